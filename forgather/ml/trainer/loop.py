"""The training loop.

Takes a run; gives it back with every step done. Keeps true: it reads top to bottom, and does not know which strategy
computes its updates, nor how many processes there are: the counts of a window and the loss are those of all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forgather.ml.trainer.run import Run
from forgather.ml.types import Update, Window


def train_loop(run: Run) -> None:
    """Trains until the run is finished.

    Raises:
        TrainingError: FG803 for data without rows, FG818 and FG650 to FG652 for bad steps that end the run.
        KeyboardInterrupt: after Ctrl-C or a scheduler's signal, at a step boundary.
    """
    run.end_resumed_step()
    while not run.finished:
        complete = True
        for window in run.begin_epoch():
            run.begin_step()
            loss, update = updated(run, window)
            if run.guard.bad is not None:
                run.skips.add(run.session.state.global_step + 1, run.data.rows_of(window), run.guard.bad)
                if run.guard.rewinds:
                    run.rewind(window)
                    continue
            run.finish_step(loss, update, window)
            if run.step_ends_epoch:
                complete = run.data.at_end_of_epoch or run.session.control.should_epoch_stop
                break
        run.finish_epoch(complete=complete)


def updated(run: Run, window: Window) -> tuple[float | Tensor | None, Update]:
    """Updates the weights by a window, unless the step is to be left out; returns its loss and what became of it."""
    if run.skips.covers(run.data.rows_of(window)):
        return None, Update(skipped=True)
    strategy = run.strategy
    denom = at_least_one_target(window.num_valid)
    share = strategy.forward_backward(window, denom=denom, after_micro_batch=run.after_micro_batch)
    loss = run.check_loss(share)
    if run.guard.bad is not None:
        strategy.discard()
        return None, Update(skipped=True)
    update = strategy.update(
        max_norm=run.args.max_grad_norm,
        want_norm=run.want_norm,
        before_step=run.before_update,
        after_step=run.after_update,
    )
    return loss if run.guard.bad is None else None, update


def at_least_one_target(num_valid: Any) -> Any:
    """Returns the divisor of a loss; a window whose labels are all ignored has the loss 0, not 0 / 0."""
    if isinstance(num_valid, Tensor):
        return num_valid.where(num_valid > 0, num_valid.new_ones(()))
    return num_valid if num_valid > 0 else 1
