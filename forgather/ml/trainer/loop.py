"""The training loop, and the evaluation loop.

`train_loop` does the optimizer steps of a run. It does not depend on the strategy or on the number of processes: the
loss and the counts of a window (the micro-batches of one optimizer step) are sums over all data-parallel ranks.
`evaluate` returns metrics under `eval_` names and sends them to the callbacks. The evaluation loss is the sum over all
valid targets of the set, divided by their number, so it does not depend on the batch size or on the number of
processes. An evaluation changes neither the random states nor the training modes of modules, and every process gets the
same metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.data_loader import RankBatches, is_iterable, loader_options
from forgather.ml.trainer.run import Run
from forgather.ml.types import Topology, Update, Window


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
    """Returns the number of targets, at least 1, so that the loss of a step without targets is 0 instead of 0 / 0."""
    if isinstance(num_valid, Tensor):
        # `where` instead of `if`: a comparison would wait for the device.
        return num_valid.where(num_valid > 0, num_valid.new_ones(()))
    return num_valid if num_valid > 0 else 1


def eval_batches(
    dataset: Any, args: TrainingArguments, collate: Callable[[list[Any]], Any], topology: Topology
) -> RankBatches:
    """Returns the rank-local batches of an evaluation set, in the order of the rows in the set.

    Args:
        dataset: the evaluation set, map-style or iterable.
        args: the training arguments, whose batch size and loader options are read.
        collate: the collator, a function from a list of rows to a batch.
        topology: the topology of this process, from which the data-parallel rank is read.

    Raises:
        TrainingError: FG803 if there are no rows; FG853 if the data is already split among processes.
    """
    if not is_iterable(dataset) and len(dataset) == 0:
        raise TrainingError(
            "the evaluation data has no rows", code="FG803", hint="check how the data is filtered and split"
        )
    share = RankShare.for_topology(topology, args.per_device_eval_batch_size)
    return RankBatches(dataset, share, collate, loader_options(args, topology))


def evaluate(
    session: Session,
    strategy: Strategy,
    sets: Mapping[str, RankBatches],
    *,
    prefix: str = "eval",
    wants_end: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Evaluates the model on one or several data sets; returns the metrics and sends them to the callbacks.

    Collective: every process must call it.

    Args:
        session: the session, whose callbacks get the metrics.
        strategy: the strategy, which computes the losses.
        sets: the batches of each evaluation set, by name; a single set has the name "".
        prefix: the prefix of the names of all metrics.
        wants_end: a function that is called before each batch and returns whether to interrupt the evaluation. It must
            return the same answer on all processes.

    Returns:
        `<prefix>_loss` (nats per target for a cross-entropy), `<prefix>_runtime` (seconds), and samples and batches per
        second; None if the evaluation was interrupted.

    Raises:
        TrainingError: FG803 if a set contains no rows.
    """
    metrics: dict[str, float] = {}
    with restored_train_modes(strategy.model):
        for name, batches in sets.items():
            session.dispatcher.scene["eval_dataloader"] = batches.loader
            found = _evaluate_one(session, strategy, batches, f"{prefix}_{name}" if name else prefix, wants_end)
            if found is None:
                return None
            metrics |= found
    # Runtimes differ between processes: a decision by any metric must be the same on all of them.
    metrics = collectives.run_on_main(lambda: metrics)
    session.log(metrics)
    session.control.should_evaluate = False
    session.send("on_evaluate", metrics={**metrics, "epoch": session.state.epoch})
    return metrics


def _evaluate_one(
    session: Session, strategy: Strategy, own: RankBatches, prefix: str, wants_end: Callable[[], bool] | None
) -> dict[str, float] | None:
    began = time.perf_counter()
    collectives.require_equal_facts({"the number of evaluation rows": own.num_rows})
    device = strategy.topology.device
    # Sums of many batches lose digits in float32, and then depend on how rows were batched.
    sums = torch.zeros(3, dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    rows = batches = 0
    batches_of_all = own.read(strategy.rule)
    # The end of a stream is not known in advance: `iterate_in_step` checks that all processes still have a batch.
    for ready in batches_of_all if own.num_rows is not None else collectives.iterate_in_step(batches_of_all):
        if wants_end is not None and wants_end():
            return None
        loss, targets = strategy.evaluate(ready.batch)
        sums[0] += loss
        sums[1] += targets
        rows += ready.num_rows
        batches += 1
        session.send("on_prediction_step")
    if batches == 0:
        raise TrainingError(
            "the evaluation data has no rows", code="FG803", hint="check how the data is filtered and split"
        )
    sums[2] = rows
    loss_sum, num_targets, num_rows = strategy.reduce(sums).tolist()  # synchronizes with the device: time it too
    seconds = max(time.perf_counter() - began, 1e-9)
    return {
        f"{prefix}_loss": loss_sum / num_targets if num_targets else float("nan"),
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": num_rows / seconds,
        f"{prefix}_steps_per_second": batches / seconds,
    }
