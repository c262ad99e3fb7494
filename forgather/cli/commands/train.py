"""`fgcli train`: constructs the target `main` of a config and runs it, with all code that the config names."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from datetime import datetime
from functools import partial
from typing import Any

from forgather.cli.auto_start import auto_values_of_all, refuse_unused_memory, with_auto_values
from forgather.cli.dry_run_output import dry_run, machines_of
from forgather.cli.invocation import Invocation
from forgather.cli.next_steps import (
    RESUME_OPTION,
    add_resume_command,
    checkpoint_to_resume,
    requeued_job_resumes,
    resume_command,
    resume_words,
)
from forgather.cli.options import OWN_NAMES, add_json, add_set, comma_separated
from forgather.cli.output import print_error, print_findings, print_note, write_json, write_text
from forgather.cli.plan_start import add_devices, note_ways_out, plan_checks
from forgather.cli.trusting import ask_trust
from forgather.errors import Diagnostic, ForgatherError, ProjectError
from forgather.interrupt import NOTHING_TRAINED
from forgather.launch import Outcome, RunPlan, plan_run, prepare_run
from forgather.launch import run as run_plan
from forgather.launch.auto_values import AutoValue
from forgather.launch.in_process import read_summary
from forgather.launch.launch_files import FIND_EACH_OTHER, launch_file
from forgather.launch.launch_files import KINDS as LAUNCH_FILES
from forgather.launch.launch_job import launch_job
from forgather.launch.multi_process import (
    CHECKED,
    launched_nodes,
    refuse_lone_process,
    refuse_other_process_count,
    run_joined,
    start_processes,
)
from forgather.launch.plan_check import PlanCheck, is_out_of_memory
from forgather.launch.planning import device_of
from forgather.launch.process_request import (
    ProcessRequest,
    add_process_options,
    added_settings,
    asked_processes,
    refuse_missing_rendezvous,
    use_devices,
)
from forgather.launch.restart import RestartPolicy, requeue, resumes_after_restart
from forgather.launcher_env import accelerate_config, is_accelerate, is_worker, node_facts
from forgather.project.fault_tolerance import (
    ALLOW_CHANGED,
    ALLOW_MISSING,
    RESUME,
    FaultTolerance,
    fault_tolerance,
    restart_assignments,
    resume_assignments,
    resumes_from,
)
from forgather.project.output_lock import output_folder_lock
from forgather.project.path_display import near_path
from forgather.project.project import Project

CONFIG_OPTIONS = True
HANDS_THROUGH = True
EXECUTES = True
TRAINS = True
DESCRIPTION = """Run the target 'main' of a config: train a trainer, or call a callable. The exit status is that of
the run. The run's folder records what is needed to repeat it (config, templates, overrides, versions, git state).
The config is checked first, as by 'fgcli check'; one with errors is not run. A failed start leaves no run folder."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml train
  fgcli -t tiny.yaml train --dry-run
  fgcli -t fsdp2.yaml train --dry-run --world-size 64
  fgcli -t fsdp2.yaml train --dry-run --hardware rtx4090 --world-size 8
  fgcli -t fsdp2.yaml train --dry-run --free 22GB
  fgcli -t fsdp2.yaml train --nnodes 4 --print kubeflow               print a file that starts the run elsewhere
  fgcli -t tiny.yaml train --set trainer_args.max_steps=10 --set trainer_args.learning_rate=3e-4
  fgcli -t tiny.yaml train --resume                                   resume from the newest intact checkpoint
  fgcli -t tiny.yaml train --resume DIR/checkpoint-500 --allow-missing optimizer,schedule"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would run, and construct nothing; with --world-size, --hardware or --free, construct it "
        "without weights; the exit status is 1 if it does not fit",
    )
    parser.add_argument(
        "--world-size",
        "--world_size",
        type=int,
        metavar="N",
        help="with --dry-run: build the run for N processes, without weights, and print what each process would hold",
    )
    parser.add_argument("--print", choices=LAUNCH_FILES, help="print a file that starts the run, and run nothing")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        metavar="CHECKPOINT",
        help="resume from a checkpoint: its folder, 'auto' (the default without a value) for the newest intact one of "
        "the output folder, or 'never'; takes precedence over resume_from_checkpoint of the config",
    )
    parser.add_argument(
        "--allow-missing",
        "--allow_missing",
        type=comma_separated,
        metavar="PART,...",
        help="parts that may be missing from the checkpoint, and then start from the beginning: optimizer, schedule, "
        "data, rng, meter, progress",
    )
    parser.add_argument(
        "--allow-changed",
        "--allow_changed",
        type=comma_separated,
        metavar="WHAT",
        help="what may have changed since the checkpoint was written: data, tokenizer, labels, model, learning_rate",
    )
    add_devices(parser)
    parser.add_argument("--no-check", action="store_true", help="run without checking the config first")
    add_set(parser)
    add_json(parser)
    add_process_options(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: runs `main` in the requested number of processes, and returns the exit status of the run."""
    options = invocation.options
    if is_worker(os.environ) and not options.dry_run:
        return run_joined(partial(_run_joined, invocation))
    if options.world_size is not None and not options.dry_run:
        raise ProjectError(
            "--world-size is for a dry run",
            code="FG462",
            hint="add --dry-run, or give --nproc-per-node and --nnodes",
        )
    use_devices(options.devices)
    if options.hardware is not None:
        device_of(options.hardware, gpus=1)  # an unknown name is refused before anything is started
    project = _with_fault_tolerance(_with_resume_options(invocation.open_project(), invocation))
    findings = () if options.no_check else _findings(project, is_run=not (options.dry_run or options.print))
    refuse_unused_memory(project, options)
    plan = plan_run(project)
    asked = asked_processes(project, options, node_facts(os.environ), invocation.handed)
    if options.print not in FIND_EACH_OTHER:
        refuse_missing_rendezvous(asked)
    print_findings(findings or project.diagnostics, project.meta.project_dir, invocation.check_command)
    command = ["fgcli", *invocation.arguments]
    # A dry run that says who holds what, or whether it fits, constructs the objects of the config: it runs their code.
    builds = any(one is not None for one in (options.world_size, options.hardware, options.free, options.memory))
    if builds or not (options.dry_run or options.print):
        ask_trust(project)
    if options.dry_run:
        machines = machines_of(asked, options.world_size) if builds else None
        if machines is not None:
            for value in with_auto_values(project, invocation, **machines):
                print_note(value.line())
        return dry_run(plan, asked, command, options, machines)
    if options.print:
        job = launch_job(asked, invocation.arguments, plan, resume=resume_words(project), devices=options.devices)
        write_text(launch_file(options.print, job))
        return 0
    if is_accelerate(os.environ):
        refuse_lone_process(asked, project.config_name)
        _print_what_accelerate_adds()
    elif not asked.is_one:
        # The processes inherit the variable and do not check the config again.
        os.environ[CHECKED] = "1"
        ending = start_processes(asked, invocation.arguments, again=_restart_policy(plan, asked))
        if ending.error is not None:
            print_error(ending.error, project.meta.project_dir)
        return ending.status
    found = auto_values_of_all(project, invocation, output_dir=plan.output_dir)
    # With --json, the standard output contains only the result; what the run prints goes to the error stream.
    with output_folder_lock(plan.output_dir), redirect_stdout(sys.stderr) if options.json else nullcontext():
        run_dir = prepare_run(plan, command)
        outcome = _run_main(plan, run_dir, invocation, found=found)
    return _report_outcome(outcome, plan, command, as_json=options.json)


def _restart_policy(plan: RunPlan, asked: ProcessRequest) -> RestartPolicy:
    graph = plan.project.graph
    tolerance = fault_tolerance(graph) or FaultTolerance(auto_resume=False)
    return RestartPolicy(
        plan.output_dir,
        auto_resume=tolerance.auto_resume,
        resume=resumes_from(graph),
        world_size=asked.world_size,
        say=print_note,
    )


def _run_joined(invocation: Invocation, member: Any) -> int:
    """Runs `main` in the current process, which a launcher has started with others; only rank 0 writes and prints."""
    options = invocation.options
    project = invocation.open_project()
    # All processes render with the time of rank 0, or a template that prints the time would give different graphs.
    project.set_clock(datetime.fromisoformat(member.share("instant", {"now": datetime.now().isoformat()})["now"]))
    _with_fault_tolerance(_with_resume_options(project, invocation))
    findings = _findings(project) if member.is_main and not (options.no_check or CHECKED in os.environ) else ()
    plan = plan_run(project)
    refuse_other_process_count(
        asked_processes(project, options, launched_nodes(member.facts)), member.facts, project.config_name
    )
    command = ["fgcli", *invocation.arguments]
    aside = redirect_stdout(sys.stderr) if options.json or not member.is_main else nullcontext()
    if not member.is_main:
        auto_values_of_all(project, invocation, output_dir=plan.output_dir, member=member)
        member.begin_construction(run_dir := member.share("run")["run_dir"])
        with aside:
            return _run_main(plan, run_dir, invocation, member).status
    print_findings(findings, project.meta.project_dir, invocation.check_command)
    _print_what_accelerate_adds()
    found = auto_values_of_all(project, invocation, output_dir=plan.output_dir, member=member)
    with output_folder_lock(plan.output_dir), aside:
        run_dir = prepare_run(plan, command)
        member.share("run", {"run_dir": run_dir})
        member.begin_construction(run_dir)
        outcome = _run_main(plan, run_dir, invocation, member, found=found)
    # The launcher ends this process with a signal if another one failed; that one reports the failure.
    if outcome.interrupted and member.failed_elsewhere():
        return outcome.status
    return _report_outcome(outcome, plan, command, as_json=options.json)


def _with_resume_options(project: Project, invocation: Invocation) -> Project:
    """Applies `--resume`, `--allow-missing` and `--allow-changed` to the trainer of a project; returns the project.

    Raises:
        ProjectError: FG676 if the trainer has no arguments for these options, if an option of the config also names a
            checkpoint, or if the run does not resume.
        CheckpointError: FG601 if the checkpoint does not exist.
    """
    options = invocation.options
    allowed = {ALLOW_MISSING: options.allow_missing, ALLOW_CHANGED: options.allow_changed}
    if options.resume is None and set(allowed.values()) == {None}:
        return project
    said = invocation.variables.get(RESUME)
    if options.resume is not None and said is not None:
        raise ProjectError(
            f"both --resume {options.resume} and {RESUME_OPTION} {said} name a checkpoint to resume from",
            code="FG676",
            hint="leave one of them out",
        )
    project.add_overrides(resume_assignments(project.graph, options.resume, allowed))
    return project


def _with_fault_tolerance(project: Project) -> Project:
    """Applies the `fault_tolerance` settings of a project to the arguments of the trainer; returns the project."""
    tolerance = fault_tolerance(project.graph)
    project.add_overrides(
        restart_assignments(project.graph, tolerance, resumes=resumes_after_restart(tolerance, os.environ))
    )
    return project


def _print_what_accelerate_adds() -> None:
    settings = added_settings(os.environ)
    if settings:
        file = accelerate_config(os.environ)
        source = f"its options, or {near_path(file)}" if file else "its options"
        print_note(
            f"accelerate launch sets {', '.join(settings)} (from {source}); "
            "Trainer, AccelTrainer and PipelineTrainer go by the config alone"
        )


def _run_main(
    plan: RunPlan, run_dir: str, invocation: Invocation, member: Any = None, *, found: Sequence[AutoValue] = ()
) -> Outcome:
    """Runs `main`. If the run can be resumed after an error, the command for this is added to the error's hint.

    Args:
        plan: the plan of the run.
        run_dir: the run folder.
        invocation: the command line.
        member: the current process as a `Peer` of several processes, or None if there is only one process.
        found: the numbers that were found for values `auto`.

    Raises:
        Exception: if the construction or the run fails; the exception is raised unchanged, except for the hint.
    """
    checks: list[PlanCheck] = []
    mains: list[object] = []

    def built(main: object) -> None:
        mains.append(main)
        # Printed after construction, because a construction that fails leaves no run folder.
        if member is None or member.is_main:
            print_note(f"run folder {near_path(run_dir)}")
            checks.extend(plan_checks(main, run_dir, invocation, configure, member, found=found))
        if member is not None:
            member.begin_run()

    def failed(error: BaseException) -> None:
        if is_out_of_memory(error):
            main = mains[0] if mains else None
            note_ways_out(error, main, run_dir, invocation, configure, member, found=found, checks=checks)

    try:
        return run_plan(plan, run_dir, built=built, failed=failed)
    except ForgatherError as error:
        add_resume_command(error, plan.project, ["fgcli", *invocation.arguments], plan.output_dir)
        raise
    finally:
        for check in checks:
            check.end()


def _report_outcome(outcome: Outcome, plan: RunPlan, command: Sequence[str], *, as_json: bool) -> int:
    """Prints the result of a run, requeues its SLURM job if necessary, and returns the exit status of the run."""
    project = plan.project
    staying = checkpoint_to_resume(project, plan.output_dir) if outcome.nothing_trained else None
    _print_outcome(outcome, staying, as_json=as_json)
    if outcome.interrupted and not as_json:
        # A run that would have resumed from a checkpoint is repeated as it was typed, and resumes from the same one.
        going_on = shlex.join(command) if staying else outcome.checkpoint and resume_command(project, command)
        if going_on:
            print_note(f"to resume:  {going_on}")
    if (note := requeue(outcome, os.environ, resumes=requeued_job_resumes(project))) is not None:
        print_note(note)
    return outcome.status


def _findings(project: Project, *, is_run: bool = True) -> Sequence[Diagnostic]:
    """Checks the config, and returns those findings that the run does not report later.

    Args:
        project: the config.
        is_run: whether `main` is run after the check; if it is only planned, a missing data file is returned.

    Raises:
        ProjectError: if the config has errors; all errors are attached to the first one.
    """
    from forgather.project.check import check_project, is_reported_by_run

    findings = check_project(project, for_run=True, reserved=OWN_NAMES).findings
    project.refuse(findings)
    return [found for found in findings if not is_reported_by_run(found, project.graph, is_run=is_run)]


def _print_outcome(outcome: Outcome, staying: str | None, *, as_json: bool) -> None:
    ending = read_summary(outcome.run_dir)
    if as_json:
        write_json(
            {
                "status": outcome.status,
                "interrupted": outcome.interrupted,
                "run_dir": outcome.existing_run_dir,
                "model_dir": outcome.model_dir,
                "checkpoint": outcome.checkpoint,
                "step": ending.get("step"),
                "max_steps": ending.get("max_steps"),
                "metrics": ending.get("final", {}),
            }
        )
        return
    if outcome.interrupted and (ending.get("status") != "interrupted" or "checkpoint" not in ending["places"]):
        saved = outcome.checkpoint and f"the state is saved in {near_path(outcome.checkpoint)}"
        if staying:
            print_note(f"interrupted; nothing was trained yet, and {near_path(staying)} is unchanged")
            return
        note = NOTHING_TRAINED if outcome.nothing_trained else f"interrupted; {saved or 'nothing was saved'}"
        print_note(note)
    if outcome.model_dir and "model" not in ending["places"]:
        # transformers' trainer saves its model after the summary was printed: the line continues the summary's list.
        indent = "  " if ending["places"] else ""
        print_note(f"{indent}model      {near_path(outcome.model_dir)}")
