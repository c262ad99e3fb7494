"""The training loop.

Takes a run and does its steps. The loop reads from top to bottom and does not know the strategy or the number of
processes: counts of a window and the loss are sums over all data-parallel ranks.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from forgather.ml.trainer.run import Run
from forgather.ml.types import Update, Window


def train_loop(run: Run) -> None:
    """Trains until the run is finished.

    Raises:
        TrainingError: FG803 for data without rows; FG818 and FG650 to FG652 for bad steps that end the run.
        KeyboardInterrupt: after Ctrl-C or a scheduler's signal, at a step boundary.
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
    """Does one optimizer step on a window, unless it must be skipped; returns its loss and the result of the update.

    Returns:
        The loss over all data-parallel ranks (a tensor if reading it would wait for the device; None for a skipped
        step), and the `Update`.

    Raises:
        TrainingError: FG818 and FG650 for a bad step that ends the run.
    """
    if run.skips.covers(run.data.rows_of(window)):
        return None, Update(skipped=True)
    strategy = run.strategy
    # Every micro-batch is divided by the target count of the whole window over all ranks, so their losses and gradients
    # can be summed.
    denom = loss_divisor(window.num_valid)
    share = strategy.forward_backward(window, denom=denom, after_micro_batch=run.after_micro_batch)
    loss = run.check_loss(share)
    if run.guard.bad is not None:
        # Gradients of a bad loss would otherwise be added to those of the next window.
        strategy.discard()
        return None, Update(skipped=True)
    update = strategy.update(
        max_norm=run.args.max_grad_norm,
        want_norm=run.want_norm,
        before_step=run.before_update,
        after_step=run.after_update,
    )
    return loss if run.guard.bad is None else None, update


def loss_divisor(num_valid: Any) -> Any:
    """Returns the divisor of a loss; at least 1, so that a window without targets has the loss 0 instead of 0 / 0."""
    if isinstance(num_valid, Tensor):
        # `where` instead of `if`: a comparison would wait for the device.
        return num_valid.where(num_valid > 0, num_valid.new_ones(()))
    return num_valid if num_valid > 0 else 1
