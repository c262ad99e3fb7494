"""Runs the `main` target of a config in the current process.

The input is a `Project`. The output is the exit status and the paths of the run folder, the model and the newest
checkpoint. The record of the run is written completely before any object is constructed. An exception of the run is
raised unchanged.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from forgather.config.graph import Call, Lookup, describe, list_of_targets
from forgather.errors import ProjectError, UnknownTargetError
from forgather.heartbeat import Heartbeat
from forgather.interrupt import current_handler, status_of
from forgather.launcher_env import ProcessFacts, compared_by_launcher, is_worker, process_facts
from forgather.project.project import Project
from forgather.project.run_writer import make_run_folder, remove_unused_record, run_folder_name, write_record
from forgather.project.targets import run_meta, target_facts, trainer_output_dir
from forgather.run_status import Status

MAIN = "main"
"""The name of the target that `run` constructs and runs."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run that has not been started yet.

    Args:
        project: the project, opened with the config of the run.
        output_dir: the absolute path of the folder for the model and the run folders.
        run_dir: the path that the run folder gets if the run starts at `started`.
        constructor: a description of the target `main`, for messages.
        started: the time of the start, in UTC.
    """

    project: Project
    output_dir: str
    run_dir: str
    constructor: str
    started: datetime


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run.

    Args:
        status: the exit status.
        run_dir: the run folder. The folder no longer exists if a signal ended the run before the first step and the run
            had written no file into the folder.
        model_dir: the folder of the saved model, or None if no model was saved.
        checkpoint: the newest checkpoint that the run wrote, or None if the run wrote none.
        interrupted: True if a signal ended the run.
        nothing_trained: True if a signal ended the run before the first optimizer step.
    """

    status: int
    run_dir: str
    model_dir: str | None = None
    checkpoint: str | None = None
    interrupted: bool = False
    nothing_trained: bool = False

    @property
    def existing_run_dir(self) -> str | None:
        """The run folder, or None if it has been removed."""
        return self.run_dir if os.path.isdir(self.run_dir) else None


def _why_no_main(project: Project, targets: list[str]) -> str:
    known = list_of_targets(targets, MAIN)
    if len(project.lineage) > 1 or known.startswith("did"):
        return known
    return f"it extends nothing: add `-- extends 'trainers/trainer.yaml'`, or define {MAIN!r}; {known}"


def plan_run(project: Project) -> RunPlan:
    """Returns a plan of the run of a config. Constructs nothing and writes nothing.

    Raises:
        UnknownTargetError: FG302 if the config has no target `main`.
        ProjectError: FG412 if `main` is data instead of a constructor call.
        ForgatherError: if the config has an error; all further errors of the config are attached to the first one.
    """
    project.refuse_errors()
    facts = {target.name: target for target in target_facts(project.graph)}
    if MAIN not in facts:
        raise UnknownTargetError(
            f"config {project.config_name!r} has no target {MAIN!r} to run",
            hint=_why_no_main(project, list(facts)),
            context=project.lineage,
        )
    _refuse_plain_main(project)
    output_dir = _planned_output_dir(project)
    started = datetime.now(UTC)
    return RunPlan(
        project=project,
        output_dir=output_dir,
        run_dir=run_folder_name(output_dir, project.config_name, started),
        constructor=f"!{facts[MAIN].kind}:{facts[MAIN].summary}",
        started=started,
    )


def _refuse_plain_main(project: Project) -> None:
    """Raises FG412 if `main` is data, before a folder is made or an object is constructed."""
    main = project.graph.targets[MAIN].value
    if not isinstance(main, (Call, Lookup)):
        raise _not_runnable(describe(main), project)


def _not_runnable(what: str, project: Project) -> ProjectError:
    return ProjectError(
        f"{MAIN!r} is {what}, which can neither train nor be called",
        code="FG412",
        span=project.graph.targets[MAIN].span,
        path=MAIN,
        hint="give 'main' an object with train(), or a !partial to call",
        context=project.lineage,
    )


def _planned_output_dir(project: Project) -> str:
    # A trainer resolves its own `output_dir` against the working folder; all other paths are relative to the project.
    saved_to = trainer_output_dir(project.graph)
    named = run_meta(project.graph).output_dir
    if saved_to is not None:
        return os.path.abspath(os.path.expanduser(saved_to))
    stem = project.config_name.removesuffix(".yaml")
    return os.path.normpath(os.path.join(project.meta.project_dir, named or os.path.join("output_models", stem)))


def prepare_run(plan: RunPlan, command: Sequence[str]) -> str:
    """Creates the run folder, writes the record of the run into the folder, and returns the path of the folder.

    Args:
        plan: the plan of the run.
        command: the words of the command line that starts the run.
    """
    folder = make_run_folder(plan.output_dir, plan.project.config_name, plan.started)
    try:
        write_record(folder, plan.project, command=command, started=plan.started)
    except BaseException:
        # A half-written record cannot be read again. Nothing but this function has written into the folder yet.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def run(
    plan: RunPlan,
    run_dir: str,
    *,
    built: Callable[[Any], None] | None = None,
    failed: Callable[[BaseException], None] | None = None,
) -> Outcome:
    """Constructs the target `main`, and calls `main.train()` for a trainer, or `main()` for any other callable.

    The main process writes the run's status into the run folder, from here to the end of the run. If an error or a
    signal ends the run before the first optimizer step, the run folder is removed. The folder is kept if the run has
    written a file of another kind into it.

    Args:
        plan: the plan of the run.
        run_dir: the run folder.
        built: a function that is called with the constructed `main` before it is run, or None.
        failed: a function that is called with the error that ends the run while the run folder still exists, or None.

    Raises:
        ProjectError: FG412 if `main` is neither a trainer nor a callable.
        Exception: if the construction or the run fails; the exception is raised unchanged.
    """
    facts = process_facts(os.environ) if is_worker(os.environ) else ProcessFacts()
    if facts.rank:
        return _run(plan, run_dir, None, built=built, failed=failed)
    rank = facts.rank if facts.world_size > 1 else None
    with Heartbeat(run_dir, started=plan.started.timestamp(), rank=rank) as heartbeat:
        outcome = _run(plan, run_dir, heartbeat, built=built, failed=failed)
        if outcome.interrupted:
            heartbeat.end(Status.INTERRUPTED)
        elif outcome.status:
            heartbeat.end(Status.FAILED, message=f"{MAIN!r} ended with status {outcome.status}")
        return outcome


def _run(
    plan: RunPlan,
    run_dir: str,
    heartbeat: Heartbeat | None,
    *,
    built: Callable[[Any], None] | None,
    failed: Callable[[BaseException], None] | None,
) -> Outcome:
    # It stays None if a signal ends the construction.
    main: Any = None
    try:
        main = construct_main(plan, run_dir)
        if heartbeat is not None:
            heartbeat.watch(main)
        if built is not None:
            built(main)
        with plan.project.located():
            if _is_trainer(main):
                _seed_again(main)
                main.train()
                saved = _save(main)
                return Outcome(status=0, run_dir=run_dir, model_dir=saved, checkpoint=_newest_checkpoint(plan, main))
            if _can_run(main):
                return Outcome(status=_call_status(main), run_dir=run_dir)
        raise _not_runnable(f"of type {type(main).__name__}", plan.project)
    except KeyboardInterrupt as stop:
        nothing_trained = _nothing_was_trained(main)
        if nothing_trained:
            remove_unused_record(run_dir)
        return Outcome(
            status=status_of(stop),
            run_dir=run_dir,
            checkpoint=_newest_checkpoint(plan, main),
            interrupted=True,
            nothing_trained=nothing_trained,
        )
    except BaseException as error:
        try:
            if failed is not None:
                _explain(error, failed)
        finally:
            # Each process removes it: the main process may be ended while it waits for one that failed.
            if not _can_run(main) or _nothing_was_trained(main):
                remove_unused_record(run_dir)
        raise


def _explain(error: BaseException, explain: Callable[[BaseException], None]) -> None:
    """Calls a function that adds notes to the error of a run, which is not lost whatever happens there."""
    try:
        explain(error)
    except KeyboardInterrupt:
        error.add_note("interrupted while it was found out what this error means for the run")
    except Exception as other:  # noqa: BLE001 - the error of the run must not be lost
        error.add_note(f"what this error means for the run is not known: {type(other).__name__}: {other}")


def _nothing_was_trained(main: object) -> bool:
    handler = current_handler()
    # A trainer that never announced its `begin`, such as transformers', may have trained already.
    return handler is not None and not handler.began and (main is None or handler.has_trainer)


def _can_run(main: object) -> bool:
    return _is_trainer(main) or (callable(main) and not _is_module(main))


def construct_main(plan: RunPlan, run_dir: str) -> Any:
    """Returns the constructed target `main` of a plan.

    Args:
        plan: the plan of the run.
        run_dir: the value of the variable `run_dir`, a folder for the files of callbacks.
    """
    # The caller has already compared the number of processes with the config's.
    token = compared_by_launcher.set(True)
    try:
        return plan.project(MAIN, run_dir=run_dir)
    finally:
        compared_by_launcher.reset(token)


def _is_trainer(main: object) -> bool:
    # A class has the attribute `train`, too, but cannot be trained.
    return callable(getattr(main, "train", None)) and not _is_module(main) and not isinstance(main, type)


def _seed_again(trainer: Any) -> None:
    """Seeds all random number generators with the trainer's seed, because not every trainer does so in `train`."""
    seed = getattr(getattr(trainer, "args", None), "seed", None)
    if isinstance(seed, int):
        import_module("forgather.ml.checkpoint.rng").seed_everything(seed)


def _is_module(main: object) -> bool:
    # `Module.train()` only sets a flag: it would return at once with nothing trained.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(main, torch.nn.Module)


def _save(trainer: Any) -> str | None:
    folder = _output_dir(trainer)
    if folder is None or not callable(getattr(trainer, "save_model", None)):
        return None
    # Our trainer has saved the model at the end of `train`; transformers' trainer has not.
    saved_to = getattr(trainer, "saved_to", None)
    if saved_to is None or os.path.abspath(saved_to) != folder:
        trainer.save_model()
    return folder


def _output_dir(trainer: object) -> str | None:
    folder = getattr(getattr(trainer, "args", None), "output_dir", None)
    return os.path.abspath(folder) if isinstance(folder, (str, os.PathLike)) and os.fspath(folder) else None


def _newest_checkpoint(plan: RunPlan, trainer: object) -> str | None:
    folders = dict.fromkeys(folder for folder in (_output_dir(trainer), plan.output_dir) if folder)
    found: list[tuple[float, str]] = []
    for folder in folders:
        if not os.path.isdir(folder):
            continue
        with os.scandir(folder) as entries:
            checkpoints = [entry for entry in entries if entry.is_dir() and entry.name.startswith("checkpoint-")]
        found += [(entry.stat().st_mtime, entry.path) for entry in checkpoints]
    # File systems store coarse times, so one second is tolerated.
    fresh = [item for item in found if item[0] >= plan.started.timestamp() - 1]
    return max(fresh)[1] if fresh else None


def _call_status(main: Callable[[], object]) -> int:
    """Calls `main` and returns the exit status: the result of the call, or the argument of `sys.exit`."""
    try:
        return _status(main())
    except SystemExit as ended:
        # sys.exit with a text: the interpreter prints it and exits with status 1.
        if ended.code is not None and not isinstance(ended.code, int):
            raise
        return _status(ended.code)


def _status(result: object) -> int:
    if not isinstance(result, int) or isinstance(result, bool):
        return 0
    # The operating system keeps eight bits of a status: 256 would read as success.
    return result if 0 <= result <= 255 else 1


def read_summary(run_dir: str) -> dict[str, Any]:
    """Returns the content of `summary.json` of a run, with the paths of the results under `places`.

    Args:
        run_dir: the run folder.

    Returns:
        The content of the file, or `{"places": {}}` if there is no such file or the file is malformed.
    """
    try:
        with open(os.path.join(run_dir, "summary.json"), encoding="utf-8") as stream:
            summary = json.load(stream)
    except (OSError, ValueError):
        summary = None
    return summary if isinstance(summary, dict) and isinstance(summary.get("places"), dict) else {"places": {}}
