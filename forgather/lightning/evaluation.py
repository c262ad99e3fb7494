"""The loops of validation, test and prediction, with Lightning's hooks in Lightning's order.

The input is the scene and the loaders of a stage; the output is the metrics of each loader, or the predictions of each.
No gradients are computed, and each module is put back into the mode in which it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from forgather.lightning import loaders
from forgather.lightning.hooks import overridden, takes
from forgather.lightning.redirection import call_through
from forgather.lightning.scene import Scene, limit_of
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.train_mode import restored_train_modes

_NAMES = {"sanity": "validation", "validate": "validation", "test": "test", "predict": "predict"}


def num_batches(scene: Scene, given: Sequence[Any], stage: str) -> list[int | None]:
    """Returns the number of batches that a stage reads of each loader; None if it is unknown.

    Args:
        scene: the scene, whose limits are read.
        given: the loaders.
        stage: "validate", "test" or "predict".
    """
    limit, word = limit_of(scene.limits, stage)
    return [loaders.limited(loaders.length(one), limit, word) for one in given]


def evaluate_module(
    scene: Scene, given: Sequence[Any], stage: str, *, most: int | None = None
) -> list[dict[str, float]]:
    """Evaluates a module on the loaders of a stage; returns the metrics of each loader.

    Collective: every process must call it.

    Args:
        scene: the scene; its stage is `stage` while the loop runs.
        given: the loaders.
        stage: "sanity", "validate" or "test".
        most: the largest number of batches of each loader; None for no such limit.
    """
    counts = _counts(scene, given, "validate" if stage == "sanity" else stage, most)
    if not any(count is None or count for count in counts):
        return []
    outer, scene.stage = scene.stage, stage
    name, hooks, values = _NAMES[stage], scene.hooks, scene.values
    module = scene.module
    found: list[dict[str, float]] = []
    try:
        with restored_train_modes(module), torch.no_grad():
            if overridden(module, f"on_{name}_model_eval"):
                hooks.call_module(f"on_{name}_model_eval")
            else:
                module.eval()
            hooks.call(f"on_{name}_start")
            hooks.call(f"on_{name}_epoch_start")
            for number, loader in enumerate(given):
                values.loader = number if len(given) > 1 else None
                for batch, args in _batches(scene, loader, counts[number], values.loader):
                    values.begin_batch(batch, values.loader)
                    hooks.call(f"on_{name}_batch_start", *args)
                    output = _step(scene, f"{name}_step", args)
                    hooks.call(f"on_{name}_batch_end", output, *args)
                    scene.take_metrics()
                    values.end_batch()
                values.end_batches()
                # As in Lightning: what a trial of the validation data logs is not kept.
                found.append(_floats((values.metrics() if stage == "sanity" else scene.take_metrics()).log))
            values.loader = None
            hooks.call(f"on_{name}_epoch_end")
            whole = _floats(scene.take_metrics().log)
            found = [{**one, **whole} for one in found]
            if outer == "train" and stage != "sanity":
                scene.trainer.log_metrics({key: of for one in found for key, of in one.items()})
            hooks.call(f"on_{name}_end")
        if overridden(module, f"on_{name}_model_train"):
            hooks.call_module(f"on_{name}_model_train")
    finally:
        values.reset()
        scene.stage = outer
    return found


def predict_module(scene: Scene, given: Sequence[Any]) -> list[list[Any]]:
    """Returns what `predict_step` returns for each batch of each loader. Collective.

    Args:
        scene: the scene; its stage is "predict" while the loop runs.
        given: the loaders.
    """
    counts, hooks, module = _counts(scene, given, "predict", None), scene.hooks, scene.module
    outer, scene.stage = scene.stage, "predict"
    found: list[list[Any]] = []
    try:
        with restored_train_modes(module), torch.no_grad():
            hooks.call("on_predict_start")
            module.eval()
            hooks.call("on_predict_epoch_start")
            for number, loader in enumerate(given):
                found.append([])
                for _, args in _batches(scene, loader, counts[number], number if len(given) > 1 else None):
                    hooks.call("on_predict_batch_start", *args)
                    output = _step(scene, "predict_step", args)
                    hooks.call("on_predict_batch_end", output, *args)
                    found[-1].append(output)
            hooks.call("on_predict_epoch_end")
            hooks.call("on_predict_end")
    finally:
        scene.stage = outer
    return found


def _counts(scene: Scene, given: Sequence[Any], stage: str, most: int | None) -> list[int | None]:
    counts = num_batches(scene, given, stage)
    if isinstance(scene.module, FSDPModule):
        # Each forward pass gathers the weights of all ranks.
        loaders.require_equal_counts(counts, f"the data of {stage}")
    return counts if most is None else [most if count is None else min(count, most) for count in counts]


def _batches(scene: Scene, loader: Any, count: int | None, number: int | None) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yields each batch, and the arguments of the hooks of a batch."""
    assert scene.strategy is not None  # noqa: S101
    loaders.set_epoch(loader, scene.epoch)
    further = () if number is None else (number,)
    for index, batch in enumerate(itertools.islice(iter(loader), count)):
        moved = to_device(batch, scene.strategy.topology.device)
        yield moved, (moved, index, *further)


def _step(scene: Scene, name: str, args: tuple[Any, ...]) -> Any:
    step: Any = getattr(scene.module, name)
    batch, index, *further = args
    given = (batch, index) if takes(step, "batch_idx") else (batch,)
    return call_through(scene, name, (*given, *further))


def _floats(values: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}
