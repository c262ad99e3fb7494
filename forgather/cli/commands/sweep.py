"""`fgcli sweep`: runs one config many times with other values. Runs the code that the config names."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.next_steps import resume_words
from forgather.cli.options import add_json, add_set
from forgather.cli.output import plural, print_note, write_json, write_lines
from forgather.cli.sweep_output import SweepReporter, plan_lines, result_lines
from forgather.cli.trusting import ask_trust
from forgather.errors import PlanError, ProjectError
from forgather.launch import plan_run
from forgather.launch.launch_files import refuse_secret
from forgather.project.path_display import near_path
from forgather.project.project import Project
from forgather.project.targets import run_meta
from forgather.sweeps.best_config import config_text
from forgather.sweeps.driver import Sweep, trial_folder
from forgather.sweeps.journal import Journal, TrialHistory, make_folder, read_history, sweep_lock
from forgather.sweeps.plan import SweepPlan, plan_of, plan_of_rest, refusal_text
from forgather.sweeps.request import SweepRequest, default_folder, newest_sweep, reopened, trial_words
from forgather.sweeps.result import TrialResult, best_of, results_of
from forgather.sweeps.search import proposed, refuse_missing_optuna
from forgather.sweeps.slots import Command, Slots, local_slots
from forgather.sweeps.slurm import SlurmSlots
from forgather.sweeps.space import MOST_TRIALS
from forgather.sweeps.spec import Goal, Method, ignored_keys
from forgather.sweeps.trials import Trial, Trials, refuse_set_parameters

CONFIG_OPTIONS = True
EXECUTES = True
TRAINS = True
BEST_CONFIG, PAGE = "best.yaml", "comparison.html"
_JOBS, _NEWEST = 8, "newest"
_QUIET_SECONDS = 10.0
DESCRIPTION = """Run a config many times with other values: a grid, random values, or values that Optuna proposes. The
values are those of the target 'sweep' of the config, of a sweep file of Weights & Biases (--file), or of --grid. All
trials are checked before the first one starts. Each trial is a run in a folder of its own; the sweep can be killed at
any time, and --resume continues it. The result is a page that compares the trials, and the best one as a config."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml sweep --grid learning_rate=1e-3,3e-3,1e-2 --dry-run
  fgcli -t tiny.yaml sweep --grid learning_rate=1e-3,3e-3 --grid optimizer.weight_decay=0,0.1 --slots 2
  fgcli -t tiny.yaml sweep --method random --trials 20 --metric eval_loss
  fgcli -t tiny.yaml sweep --resume                       go on with the newest sweep of this config
  fgcli -t tiny.yaml sweep --file sweep.yaml --write tuned"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="PATH=VALUE,VALUE",
        help="values to try; given several times, all combinations",
    )
    parser.add_argument("--file", metavar="FILE", help="a sweep file in the form of Weights & Biases")
    parser.add_argument("--method", choices=[*Method], help="how values are chosen (default: grid)")
    parser.add_argument("--trials", type=int, metavar="N", help="number of trials in all")
    parser.add_argument(
        "--metric",
        metavar="NAME[:GOAL]",
        help="what is compared, as eval_loss or eval_f1:maximize (default: eval_loss)",
    )
    parser.add_argument("--sweep-seed", type=int, metavar="N", help="seed of random values (default: 0)")
    parser.add_argument(
        "--slots", type=int, metavar="N", help="trials at once (default: one for each group of devices, or 1)"
    )
    parser.add_argument(
        "--slurm",
        metavar="OPTIONS",
        help="run each trial as a job of SLURM with these options of sbatch, as --slurm='--partition=gpu --gpus=1'; "
        "--slots is the number of jobs at once (default: 8)",
    )
    parser.add_argument("--name", metavar="NAME", help="name of the sweep's folder (default: the time)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=_NEWEST,
        metavar="DIR",
        help="go on with a sweep: its folder, that of --name, or the newest one; --slots and --slurm are those of its "
        "start if they are not given",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the trials that would run, and run nothing")
    parser.add_argument("--write", metavar="NAME", help="write the best trial as a config of the project")
    add_set(parser)
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: plans, runs or resumes a sweep, and returns the exit status: 0 if a trial has a result."""
    options = invocation.options
    if options.slots is not None and not 1 <= options.slots <= MOST_TRIALS:
        hint = f"give a number from 1 to {MOST_TRIALS:,}"
        raise ProjectError(f"--slots is {options.slots}", code="FG565", hint=hint)
    if options.name is not None:
        _refuse_name(options.name)
    project = invocation.open_project()
    output_dir = plan_run(project).output_dir
    if options.resume is not None:
        return _go_on(invocation, project, _folder_to_resume(options, output_dir))
    request = SweepRequest(
        project_dir=project.meta.project_dir,
        config=project.config_name,
        variables=dict(invocation.variables),
        trials=options.trials,
        working_dir=os.getcwd(),
        **_asked(options, project),
    )
    request.refuse_secrets()
    refuse_secret(options.slurm or "", "the journal of the sweep would store it")
    project, spec = request.open()
    if spec.method is Method.OPTUNA:
        refuse_missing_optuna(spec)
    trials = Trials(project, spec)
    refuse_set_parameters(project, trials.spec)
    if ignored := ignored_keys(project, request.file):
        print_note(f"without effect in this sweep: {', '.join(ignored)}")
    plan = plan_of(trials.spec, _counted(trials.planned()))
    _refuse_unwritable(project, options.write, [dict(trial.assignments) for trial in plan.trials if trial.runs])
    if options.dry_run:
        return _show_plan(options, plan)
    if not options.json:
        write_lines(plan_lines(plan))
    ask_trust(project)
    folder = default_folder(output_dir, options.name or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    places = {"slots": options.slots, "slurm": options.slurm}
    # Before the folder is made: a sweep that cannot run is none that could go on.
    slots = _slots(project, options, folder, places)
    make_folder(folder)
    with sweep_lock(folder):
        journal = Journal.create(folder, {**request.as_record(project, spec), **places})
        for trial in plan.trials:
            _announce(journal, trial)
        return _run(invocation, journal, request, project, trials, slots)


def _counted(trials: Iterator[Trial]) -> Iterator[Trial]:
    """Yields trials, and says now and then how many are checked: a large grid takes minutes."""
    due = time.monotonic() + _QUIET_SECONDS
    for count, trial in enumerate(trials, start=1):
        yield trial
        if time.monotonic() > due:
            due = time.monotonic() + _QUIET_SECONDS
            print_note(f"{plural(count, 'trial is', 'trials are')} checked")


def _refuse_name(name: str) -> None:
    """Raises an error for a name that is no folder of its own below the folder of sweeps."""
    if name in ("", os.curdir, os.pardir) or name != os.path.basename(name) or not name.isprintable():
        raise ProjectError(
            f"--name is {name!r}, which is not the name of a folder",
            code="FG563",
            hint="give a name without slashes; the folder is made in 'sweeps' of the output folder",
        )


def _refuse_unwritable(project: Project, name: str | None, values: Sequence[Mapping[str, str]]) -> None:
    """Raises an error if the best trial could not be written as a config, before anything runs."""
    if name is None:
        return
    try:
        import_module("forgather.launch.written_choice").refuse_file(project, name, "config")
    except PlanError as error:
        raise ProjectError(error.message, code="FG567", hint=error.hint) from None
    if values:
        config_text(project, values[0], name)


def _asked(options: argparse.Namespace, project: Project) -> dict[str, Any]:
    """Returns what the command line asks for, by the fields of a request: all of them, given or not."""
    return {
        "overrides": project.overrides,
        "file": None if options.file is None else os.path.abspath(options.file),
        "grid": tuple(options.grid),
        "method": options.method,
        "metric": options.metric,
        "seed": options.sweep_seed,
    }


def _folder_to_resume(options: argparse.Namespace, output_dir: str) -> str:
    if options.resume != _NEWEST:
        folder = options.resume
    elif options.name:
        folder = default_folder(output_dir, options.name)
    else:
        folder = newest_sweep(output_dir)
    if folder is None:
        raise ProjectError(f"there is no sweep in {output_dir!r}", code="FG563", hint="start one: leave out --resume")
    return _existing(folder)


def _go_on(invocation: Invocation, project: Project, folder: str) -> int:
    """Goes on with the sweep in a folder, or says what that would run."""
    options = invocation.options
    asked = {name: value for name, value in _asked(options, project).items() if value not in (None, ())}
    asked |= {"config": project.config_name, "variables": dict(invocation.variables)}
    if options.dry_run:
        history = read_history(folder)
        _, project, spec = reopened(history.sweep, asked, trials=options.trials)
        return _show_plan(options, plan_of_rest(spec, Trials(project, spec).planned(), history))
    with sweep_lock(folder):
        journal = Journal.open(folder)
        request, project, spec = reopened(journal.history.sweep, asked, trials=options.trials)
        trials = Trials(project, spec)
        known = journal.history.trials.values()
        _refuse_unwritable(project, options.write, [one.values for one in known if one.skipped is None])
        _announce_added(journal, trials)
        slots = _slots(project, options, journal.folder, journal.history.sweep)
        return _run(invocation, journal, request, project, trials, slots)


def _show_plan(options: argparse.Namespace, plan: SweepPlan) -> int:
    if options.json:
        write_json(plan.as_data())
    else:
        write_lines(plan_lines(plan))
    return 0


def _existing(folder: str) -> str:
    if not os.path.isdir(folder):
        raise ProjectError(f"there is no folder {folder!r}", code="FG563", hint="name the folder of a sweep")
    return os.path.abspath(folder)


def _announce_added(journal: Journal, trials: Trials) -> None:
    """Announces the trials that a larger number of trials adds, and those that the first process did not reach."""
    for trial in trials.planned():
        if trial.number not in journal.history.trials:
            _announce(journal, trial)
    if trials.spec.method is Method.OPTUNA:
        for known in journal.history.trials.values():
            if known.skipped is None:
                trials.remember(known.number, known.values)


def _announce(journal: Journal, trial: Trial) -> None:
    journal.announce(trial.number, dict(trial.assignments), refusal_text(trial) or None, trial.same_as)


def _run(
    invocation: Invocation, journal: Journal, request: SweepRequest, project: Project, trials: Trials, slots: Slots
) -> int:
    spec = trials.spec
    resume, here = list(resume_words(project)), request.working_dir or os.getcwd()

    def command(trial: TrialHistory, is_again: bool) -> Command:
        folder = trial_folder(journal.folder, trial.number)
        words = trial_words(request, project, trial.values, folder, resume if is_again else ())
        if not os.path.isdir(here):
            # Each trial would fail for this reason, and none would be started again.
            message = f"the working folder does not exist any more: {here}"
            raise ProjectError(message, code="FG563", hint="make it again, and go on with --resume")
        return Command(words, here)

    sweep = Sweep(
        journal=journal,
        spec=spec,
        slots=slots,
        next_trial=lambda: _proposed(sweep, trials),
        command=command,
    )
    reporter = SweepReporter(sweep, say=print_note)
    sweep.changed = reporter.report
    print_note(f"sweep folder {near_path(journal.folder)}")
    try:
        sweep.run()
    except KeyboardInterrupt:
        words = ["fgcli", "-p", near_path(request.project_dir), "-t", request.config, "sweep", "--resume"]
        print_note(f"to go on:  {shlex.join([*words, near_path(journal.folder)])}")
        raise
    return _finish(invocation, sweep, project)


def _slots(project: Project, options: argparse.Namespace, folder: str, stored: Mapping[str, Any]) -> Slots:
    """Returns the places for trials: jobs of SLURM, or shares of this machine; by default those of the start."""
    number = stored.get("slots") if options.slots is None else options.slots
    slurm = stored.get("slurm") if options.slurm is None else options.slurm
    if slurm is not None:
        try:
            words = shlex.split(slurm)
        except ValueError as error:
            raise ProjectError(
                f"--slurm is {slurm!r}: {error}", code="FG565", hint="close the quotation mark"
            ) from None
        return SlurmSlots(number or _JOBS, words, os.path.join(folder, "jobs"))
    each = run_meta(project.graph).nproc_per_node
    return local_slots(number, each if isinstance(each, int) else None)


def _proposed(sweep: Sweep, trials: Trials) -> int | None:
    """Announces a trial that Optuna proposes, and returns its number; None if there are enough."""
    spec, history = sweep.spec, sweep.journal.history
    while spec.method is Method.OPTUNA and len(history.trials) < (spec.num_trials or 0):
        number = len(history.trials)
        results = {one.number: one for one in results_of(history, spec, sweep.progress)}
        # A duplicate of a good trial is as good, and not one without a result.
        known = [
            (trials.values_of(one.values), results[at if one.same_as is None else one.same_as].value)
            for at, one in sorted(history.trials.items())
        ]
        trial = trials.judged(number, proposed(spec, number, known))
        _announce(sweep.journal, trial)
        if trial.runs:
            return number
    return None


def _finish(invocation: Invocation, sweep: Sweep, project: Project) -> int:
    """Prints the result, writes the best config, and returns the exit status."""
    options = invocation.options
    results = results_of(sweep.journal.history, sweep.spec, sweep.progress)
    best = best_of(results)
    file = None if best is None else _write_best(sweep, project, best, options.write)
    page = None if best is None else _write_page(sweep, results)
    if options.json:
        write_json(
            {
                "folder": sweep.journal.folder,
                "metric": sweep.spec.metric,
                "best": None if best is None else best.as_data(),
                "config": file,
                "page": page,
                "trials": [one.as_data() for one in results],
            }
        )
    else:
        write_lines(result_lines(results, sweep.spec, file and near_path(file), page and near_path(page)))
    return int(best is None)


def _write_page(sweep: Sweep, results: Sequence[TrialResult]) -> str | None:
    """Writes the page that compares the trials; returns the file, or None for a single one."""
    folders = [trial_folder(sweep.journal.folder, one.number) for one in results if one.value is not None]
    if len(folders) < 2:
        return None
    # Late imports: a sweep that is planned needs no page.
    from forgather.runs.compared_run import open_all
    from forgather.runs.comparison import Comparison
    from forgather.runs.comparison_page.page import page, page_data

    file = os.path.join(sweep.journal.folder, PAGE)
    runs, _ = open_all(folders, are_trials=True)
    best = "min" if sweep.spec.goal is Goal.MINIMIZE else "max"
    comparison = Comparison(runs, metric=sweep.spec.metric, best=best)
    title = f"Sweep {os.path.basename(sweep.journal.folder)}: {plural(len(runs), 'trial')}"
    try:
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(page(page_data(comparison), title))
    except OSError as error:
        # The trials are done: their result is worth more than the page.
        print_note(f"{file!r} cannot be written: {error.strerror or error}; 'fgcli compare' makes the page later")
        return None
    return file


def _write_best(sweep: Sweep, project: Project, best: TrialResult, name: str | None) -> str | None:
    """Writes the config of the best trial into the sweep folder, or into the project if it has a name."""
    folder = sweep.journal.folder
    file = os.path.join(folder, BEST_CONFIG)
    try:
        text = config_text(project, best.values, name or os.path.basename(folder))
    except ProjectError as error:
        print_note(f"{error.message}; {error.hint}")
        return None
    except OSError as error:
        print_note(f"the best config cannot be written: {error.strerror or error}")
        return None
    if name is not None:
        written_choice = import_module("forgather.launch.written_choice")
        file = written_choice.target_file(project, name, "config")
    try:
        with open(file, "w" if name is None else "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ProjectError(f"{file!r} exists already", code="FG567", hint="name a new config with --write") from None
    except OSError as error:
        print_note(f"{file!r} cannot be written: {error.strerror or error}")
        return None
    return file
