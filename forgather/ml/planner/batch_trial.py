"""A trial of a run's batch on the device: the steps that a plan traces, computed with memory.

Takes a trainer of which nothing was trained; raises the error of the device if its memory does not suffice. All
processes of a run call it together, each in a process that ends afterwards.
"""

from __future__ import annotations

from forgather.ml.planner.planned_batches import planned_batches
from forgather.ml.planner.window_shape import WindowShape
from forgather.ml.trainer.divergence import window_with_divergence
from forgather.ml.trainer.loop import loss_divisor
from forgather.ml.trainer.trainer import Trainer

_STEPS = 2  # the first one makes the optimizer's state, and the second one finds it in memory


def try_batch(trainer: Trainer) -> None:
    """Computes two optimizer steps with the longest rows of the data, and a batch of each evaluation set.

    Of the micro-batches of a step, two are computed: later ones are like the second. The model is trained by it.

    Args:
        trainer: the trainer of the config.

    Raises:
        torch.OutOfMemoryError: if the memory of the device does not suffice.
    """
    strategy = trainer.strategy
    # Also before a resume: which path a loss takes depends on the values.
    strategy.make_unset_weights()
    strategy.build_optimizer()
    planned = planned_batches(trainer)
    window = planned.window(WindowShape())
    for _ in range(_STEPS):
        step = window_with_divergence(strategy, window)
        strategy.forward_backward(step, denom=loss_divisor(window.num_valid))
        strategy.update(
            max_norm=trainer.args.max_grad_norm,
            want_norm=True,
            before_step=lambda norm: False,
            after_step=lambda: None,
        )
    for batch in planned.evaluation:
        strategy.evaluate(batch)
