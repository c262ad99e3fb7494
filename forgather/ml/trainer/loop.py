"""The training loop, which does the optimizer steps of a run.

The loop does not depend on the strategy or on the number of processes: the loss and the counts of a window (the
micro-batches of one optimizer step) are sums over all data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forgather.ml.strategy.backward_update import BackwardUpdate, refuse_several
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.trainer.divergence import window_with_divergence
from forgather.ml.trainer.run import Run
from forgather.ml.types import Update, Window


def train_loop(run: Run) -> None:
    """Trains until the run is finished.

    Raises:
        TrainingError: FG803 if the data has no rows; FG818 or FG650 to FG652 if bad steps end the run.
        KeyboardInterrupt: at a step boundary, after Ctrl-C or a signal of a batch scheduler.
    """
    run.end_resumed_step()
    while not run.finished:
        complete = True
        for window in run.begin_epoch():
            run.begin_step()
            loss, update = train_window(run, window)
            if run.guard.bad is not None:
                # The position has not moved yet, so `rows_of` still gives the rows of this window.
                run.skips.add(run.session.state.global_step + 1, run.data.rows_of(window), run.guard.bad)
                if run.guard.rewinds:
                    run.rewind(window)
                    # `Run.rewind` replaced the iterator: the next window is the one after the checkpoint.
                    continue
            run.finish_step(loss, update, window)
            # Checked after the step was counted: callbacks set these flags in `on_step_end`.
            if run.step_ends_epoch:
                complete = run.data.at_end_of_epoch or run.session.control.should_epoch_stop
                break
        run.finish_epoch(complete=complete)


def train_window(run: Run, window: Window) -> tuple[float | Tensor | None, Update]:
    """Does one optimizer step, unless the step must be skipped, and returns its loss and the result of the update.

    Args:
        run: the run, whose strategy, step guard and settings are used.
        window: the micro-batches of the optimizer step.

    Returns:
        The loss over all data-parallel ranks, and the `Update`. The loss is a tensor if reading it would wait for the
        device, and None if the step was skipped.

    Shapes:
        The loss is a float or a scalar tensor.

    Raises:
        TrainingError: FG818 or FG650 if the step is bad and ends the run.
    """
    if run.skips.steps and run.skips.covers(run.data.rows_of(window)):
        return None, Update(skipped=True)
    strategy = run.strategy
    # Every micro-batch is divided by the target count of the whole window over all ranks, so their losses and gradients
    # can be summed.
    denom = loss_divisor(window.num_valid)
    window = window_with_divergence(strategy, window)
    if isinstance(strategy, ModelStrategy) and strategy.backward_update is not None:
        return _updated_in_backward(run, strategy, strategy.backward_update, window, denom)
    share = strategy.forward_backward(window, denom=denom, after_micro_batch=run.after_micro_batch)
    loss, squares = run.check_step(share)
    if run.guard.bad is not None:
        # Gradients of a bad loss would otherwise be added to those of the next window.
        strategy.discard()
        return None, Update(skipped=True)
    update = strategy.update(
        max_norm=run.args.max_grad_norm,
        want_norm=run.want_norm,
        before_step=run.before_update,
        after_step=run.after_update,
        squares=squares,
    )
    return loss if run.guard.bad is None else None, update


def _updated_in_backward(
    run: Run, strategy: ModelStrategy, update_in_backward: BackwardUpdate, window: Window, denom: float | Tensor
) -> tuple[float | Tensor, Update]:
    """Does one optimizer step in which the backward pass updates the weights, and returns what `train_window` does."""
    refuse_several(len(window.batches))
    losses: list[float | Tensor] = []

    def before_backward(share: Tensor) -> None:
        # The same exchange as after a backward pass: a bad loss on any rank changes no weight on any rank.
        losses.append(run.check_step(share)[0])
        run.before_update(None)
        run.clock.enter("forward_backward")

    update_in_backward.before = before_backward
    strategy.forward_backward(window, denom=denom)
    update = strategy.update(max_norm=0.0, want_norm=False, before_step=lambda norm: False, after_step=run.after_update)
    return losses[0], update


def loss_divisor(num_valid: Any) -> Any:
    """Returns the number of targets, at least 1, so that the loss of a step without targets is 0 instead of 0 / 0."""
    if isinstance(num_valid, Tensor):
        # `where` instead of `if`: a comparison would wait for the device.
        return num_valid.where(num_valid > 0, num_valid.new_ones(()))
    return num_valid if num_valid > 0 else 1
