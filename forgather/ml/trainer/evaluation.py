"""Evaluation: the loss on data that is not trained on.

Takes data sets; gives metrics under `eval_` names and sends them to the callbacks. The loss is a sum over valid targets
divided by their number over the whole set: batch size, accumulation and the number of processes do not change it.
Random states and training modes are the same afterwards. Every process has the same metrics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.train_mode import modes_kept
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.batch_sampler import RankShare
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.data_loader import RankBatches, is_iterable, loader_options
from forgather.ml.types import Topology


def eval_batches(
    dataset: Any, args: TrainingArguments, collate: Callable[[list[Any]], Any], topology: Topology
) -> RankBatches:
    """Returns the rank-local batches of an evaluation set, in the order of its rows.

    Args:
        dataset: map-style or iterable rows.
        args: batch size and loader options.
        collate: makes a batch of rows.
        topology: gives the data-parallel rank.

    Raises:
        TrainingError: FG803 for no rows, FG853 for data that is already split among processes.
    """
    if not is_iterable(dataset) and len(dataset) == 0:
        raise TrainingError("the evaluation data has no rows", code="FG803", hint="look at what filters and splits it")
    share = RankShare.by(topology, args.per_device_eval_batch_size)
    return RankBatches(dataset, share, collate, loader_options(args, topology))


def evaluate(
    session: Session,
    strategy: Strategy,
    sets: Mapping[str, RankBatches],
    *,
    prefix: str = "eval",
    wants_end: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Returns the metrics of one or several data sets, and sends them to the callbacks; None if it was interrupted.

    Collective: every process calls it.

    Args:
        session: gives the callbacks.
        strategy: computes losses.
        sets: batches by name; the name "" is for a single set.
        prefix: of the name of every metric.
        wants_end: returns before each batch, with the same answer on all processes, whether to stop.

    Returns:
        `<prefix>_loss` (nats per target for a cross-entropy), `<prefix>_runtime` (seconds), and samples and batches per
        second.

    Raises:
        TrainingError: FG803 if a set gives no batch.
    """
    metrics: dict[str, float] = {}
    with modes_kept(strategy.model):
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
        raise TrainingError("the evaluation data has no rows", code="FG803", hint="look at what filters and splits it")
    sums[2] = rows
    loss_sum, num_targets, num_rows = strategy.reduce(sums).tolist()  # synchronizes with the device: time it too
    seconds = max(time.perf_counter() - began, 1e-9)
    return {
        f"{prefix}_loss": loss_sum / num_targets if num_targets else float("nan"),
        f"{prefix}_runtime": seconds,
        f"{prefix}_samples_per_second": num_rows / seconds,
        f"{prefix}_steps_per_second": batches / seconds,
    }
