"""Exports what a past run has trained: the whole model, its adapter, merged or alone, or a GGUF file.

Takes the weights that `saved_weights` has found. A whole model is read from its files, and no code of the project runs.
For an adapter, the base model is made as the run made it, from the recorded graph: the nodes of the model and of the
adapter are built, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.config.graph import Graph, Node, is_null
from forgather.errors import ProjectError
from forgather.launch.in_process import MAIN
from forgather.launch.recorded_graph import USUAL_SEED, building, recorded_project
from forgather.launch.saved_weights import SavedWeights
from forgather.project.data_targets import with_targets
from forgather.project.project import Project
from forgather.project.trainer_arguments import keyword, model_of_main, trainer_arguments

_ADAPTER_EXPORT, _EXPORT = "forgather.ml.trainer.adapter_export", "forgather.ml.checkpoint.export"
_GGUF = "forgather.ml.gguf_export"


class ExportKind(StrEnum):
    """What an export writes."""

    MODEL = "exported"
    MERGED = "merged"
    ADAPTER = "adapter"
    GGUF = "gguf"


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """An export that has not been started yet.

    Args:
        weights: the weights to export.
        kind: what is written.
        into: the new folder.
        project: the config that builds the base model; None if nothing is built.
        targets: the targets to build, by "model", "adapter" and "seed".
    """

    weights: SavedWeights
    kind: ExportKind
    into: str
    project: Project | None = None
    targets: Mapping[str, str] | None = None


def plan_export(weights: SavedWeights, kind: ExportKind | None, into: str | None) -> ExportPlan:
    """Returns the plan of an export. Constructs nothing and writes nothing.

    Args:
        weights: the weights to export.
        kind: what is written; None for a whole model, into which an adapter is merged.
        into: the new folder; None for a folder next to the output folder of the run.

    Raises:
        CheckpointError: FG677 if the folder cannot be used.
        ProjectError: FG932 if the run's `main` has no model.
        ForgatherError: if the recorded graph has an error.
    """
    # Whether it is an adapter is known without building it, and so is the error if it is none.
    is_adapter = Path(weights.folder, "adapter_config.json").is_file()
    kind = kind or (ExportKind.MERGED if is_adapter else ExportKind.MODEL)
    into = into or f"{os.path.normpath(weights.run.output_dir)}-{kind}"
    inside = Path(weights.folder) if weights.is_checkpoint else Path(weights.folder, "model")
    import_module("forgather.ml.checkpoint.export_folder").refuse_place(inside, Path(into))
    if kind is ExportKind.GGUF:
        import_module(_GGUF).require_gguf()
    if kind is ExportKind.MODEL or not is_adapter:
        return ExportPlan(weights=weights, kind=kind, into=into)
    run = weights.run
    project = recorded_project(run)
    project.refuse_errors()
    nodes = _nodes(project.graph, run.folder)
    project.graph, targets = with_targets(project.graph, nodes)
    return ExportPlan(weights=weights, kind=kind, into=into, project=project, targets=targets)


def _nodes(graph: Graph, folder: str) -> dict[str, Node]:
    """Returns the nodes of the model, of the adapter and of the seed."""
    entry, model, arguments = graph.targets.get(MAIN), model_of_main(graph), trainer_arguments(graph)
    main = entry.value if entry else None
    named = {
        "model": model[1] if model else None,
        "adapter": keyword(main, "adapter"),
        "seed": arguments.get("seed") if arguments else None,
    }
    found = {name: node for name, node in named.items() if node is not None and not is_null(node)}
    if "model" not in found:
        raise ProjectError(
            f"'main' of the run {os.path.basename(folder)!r} has no argument model or model_init",
            code="FG932",
            span=getattr(main, "span", None),
            hint="load base and adapter in Python; merge_and_unload() of peft merges them",
        )
    return found


def export(plan: ExportPlan, *, dtype: str | None, max_shard_size: str) -> dict[str, Any]:
    """Runs an export in the current process.

    Args:
        plan: the plan, whose code is trusted.
        dtype: the type of the weights; None to keep it.
        max_shard_size: the maximum size of a weight file.

    Returns:
        The `files` by name, and for an adapter the `facts` of its export and a sentence about the `comparison`.

    Raises:
        CheckpointError: if the weights cannot be exported.
    """
    if plan.kind is not ExportKind.GGUF:
        return _exported(plan, Path(plan.into), dtype=dtype, max_shard_size=max_shard_size)

    def make(folder: Path) -> None:
        kind = ExportKind.MODEL if plan.project is None else ExportKind.MERGED
        _exported(replace(plan, kind=kind), folder, dtype=dtype, max_shard_size=max_shard_size)

    name = os.path.basename(os.path.normpath(plan.weights.run.output_dir))
    found = import_module(_GGUF).export_gguf(Path(plan.weights.folder), Path(plan.into), make, dtype=dtype, name=name)
    return dict(found)


def _exported(plan: ExportPlan, into: Path, *, dtype: str | None, max_shard_size: str) -> dict[str, Any]:
    """Writes a whole model or an adapter; returns what `export` returns."""
    source = Path(plan.weights.folder)
    if plan.kind is ExportKind.MODEL:
        module = import_module(_EXPORT)
        write = module.export_checkpoint if plan.weights.is_checkpoint else module.export_saved_model
        return {"files": write(source, into, max_shard_size=max_shard_size, dtype=dtype)}
    module = import_module(_ADAPTER_EXPORT)
    if plan.project is None:
        raise module.not_an_adapter(source)
    with building(plan.weights.run, plan.project):
        trained = _trained(plan, module)
        if plan.kind is ExportKind.ADAPTER:
            return dict(module.export_adapter(trained, into, dtype=dtype))
        return dict(module.export_merged(trained, into, dtype=dtype, max_shard_size=max_shard_size))


def _trained(plan: ExportPlan, module: Any) -> Any:
    """Returns the adapter that the run trained, on the model that its config makes."""
    targets = plan.targets or {}
    names = list(dict.fromkeys(targets.values()))
    built = plan.project(names, run_dir=plan.weights.run.folder) if plan.project else {}  # the folder is only named
    objects = {name: built[target] for name, target in targets.items()}
    seed = objects.get("seed", USUAL_SEED)
    setup = import_module("forgather.ml.trainer.model_setup")
    return module.TrainedAdapter(
        folder=Path(plan.weights.folder),
        is_checkpoint=plan.weights.is_checkpoint,
        make_base=partial(setup.make_model, objects["model"], None, seed),
        adapter=import_module("forgather.ml.adapters").as_adapter(objects.get("adapter")),
        seed=seed,
    )
