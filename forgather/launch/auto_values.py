"""Numbers for the value `auto` of a trainer's arguments, found before the run starts.

`auto_settings` gives the settings of a config that ask for one. `find_values` gives an assignment in the form of
`--set` for each, which is recorded in the run folder like any other. `values_of_checkpoint` gives those of the run that
wrote a checkpoint, so that a resumed run goes on with them. One process finds them, and the others get them from it.
"""

from __future__ import annotations

import copy
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from forgather.config.graph import Mapped, Scalar
from forgather.errors import DistributedError, PlanError
from forgather.launch.batch_trial import asks_for_trial
from forgather.launch.in_process import MAIN
from forgather.launch.planning import MOST_ROWS, rows_within, traced_plan
from forgather.launch.room import Room
from forgather.launch.time_planning import time_of
from forgather.planner.leaf import value_text
from forgather.planner.memory_plan import format_size
from forgather.project.constructor_rules import rules_of
from forgather.project.project import Project
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments
from forgather.rule_conditions import AUTO

ROWS, CHUNKS, SPLIT = "per_device_train_batch_size", "pipeline_chunks", "split_spec"
PRECISION = "accelerator_args.mixed_precision"
ACCUMULATION = "gradient_accumulation_steps"
_SEARCH = "forgather.ml.planner.split_search:search_split"
_TRAINED_WITH = "training_args.json"
_MOST_CHUNKS = 6


class AutoValue(NamedTuple):
    """A value that was found.

    Args:
        name: the name of the setting.
        path: its path for `--set`.
        text: the value as YAML text.
        reason: why it is this value.
        is_kept: whether it is that of the run that is resumed.
    """

    name: str
    path: str
    text: str
    reason: str
    is_kept: bool = False

    def line(self) -> str:
        """Returns the line that is printed at the start of the run."""
        return f"auto: {self.name} is {self.text} ({self.reason})"


def auto_settings(project: Project) -> tuple[str, ...]:
    """Returns the names of the trainer's arguments for which a value is to be found, as `outer.inner` in a mapping."""
    arguments = trainer_arguments(project.graph)
    if arguments is None:
        return ()
    known: set[str] = set()
    for rules in rules_of(arguments.call.constructor):
        for name, rule in rules.settings.items():
            inner = {f"{name}.{key}": one for key, one in rule.get("keys", {}).items()}
            known |= {path for path, one in {name: rule, **inner}.items() if one.get("found")}
    return tuple(name for name in (PRECISION, ROWS, CHUNKS, SPLIT) if name in known and _asks(arguments, name))


def _asks(arguments: TrainerArguments, name: str) -> bool:
    outer, _, key = name.partition(".")
    node = arguments.get(outer)
    if key and isinstance(node, Mapped):
        node = next((entry.value for entry in node.entries if entry.key == key), None)
    return isinstance(node, Scalar) and node.value == AUTO


def _path(arguments: TrainerArguments, name: str) -> str:
    outer, _, key = name.partition(".")
    return arguments.path(outer) + (f".{key}" if key else "")


def values_of_checkpoint(project: Project, checkpoint: str) -> list[AutoValue]:
    """Returns the values with which a checkpoint was trained, for those that a run would find.

    Args:
        project: the project, opened with the config.
        checkpoint: the folder of the checkpoint.
    """
    arguments = _arguments(project)
    try:
        with open(os.path.join(checkpoint, _TRAINED_WITH), encoding="utf-8") as stream:
            trained = json.load(stream)
        names = dict.fromkeys((*auto_settings(project), *(_tried(arguments) if asks_for_trial(project) else ())))
        known = {name: _inside(trained, name) for name in names}
    except (OSError, ValueError, TypeError, AttributeError):
        # A checkpoint of another tool; whether this one can be read is for the run to say.
        return []
    reason = f"as in {os.path.basename(checkpoint)}"
    return [
        AutoValue(name, _path(arguments, name), json.dumps(value), reason, is_kept=True)
        for name, value in known.items()
        if value not in (None, AUTO)
    ]


def _tried(arguments: TrainerArguments) -> tuple[str, ...]:
    """Returns the settings that a trial of the batch may have changed; what is solved for follows from them."""
    is_given = arguments.global_batch() is not None and arguments.plain(ACCUMULATION) is not None
    return (ROWS, ACCUMULATION) if is_given else (ROWS,)


def _inside(settings: Mapping[str, Any], name: str) -> Any:
    for key in name.split("."):
        settings = settings.get(key) or {}
    return settings or None


def find_values(project: Project, room: Room, say: Callable[[str], None] = lambda line: None) -> list[AutoValue]:
    """Returns a value for each of `auto_settings`.

    Args:
        project: the project, opened with the config, which is not changed.
        room: what is known about the devices.
        say: a function that gets a line about each number of rows that is planned after one that did not fit.

    Raises:
        PlanError: FG947 if no cuts of a pipeline fit into the memory; FG948 if nothing limits a batch, or if no batch
            fits; FG997 for the batch of a pipeline without a number of micro-batches.
    """
    wanted = auto_settings(project)
    arguments = _arguments(project)
    found: list[AutoValue] = []
    # The type comes first, because memory depends on it; the number of micro-batches divides the rows.
    rows = partial(_rows, say=say)
    for name, find in ((PRECISION, _precision), (ROWS, rows), (CHUNKS, _chunks), (SPLIT, _split)):
        if name in wanted:
            text, reason = find(_with(project, found), room)
            found.append(AutoValue(name, _path(arguments, name), text, reason))
    return found


def _arguments(project: Project) -> TrainerArguments:
    arguments = trainer_arguments(project.graph)
    assert arguments is not None  # noqa: S101 - without arguments, nothing is asked for
    return arguments


def _with(project: Project, values: Sequence[AutoValue], **others: str) -> Project:
    """Returns a copy of a project with other values of its trainer's arguments."""
    changed = copy.copy(project)
    arguments = _arguments(project)
    changed.add_overrides(
        [
            *((value.path, value.text) for value in values),
            *((arguments.path(name), text) for name, text in others.items()),
        ]
    )
    return changed


def _precision(project: Project, room: Room) -> tuple[str, str]:
    """Returns bf16 where all devices compute it, else fp16; "no" on processors."""
    if not room.devices or any(one.type == "cpu" for one in room.devices):
        return '"no"', "no GPU here"
    names = " and ".join(dict.fromkeys(one.hardware.title for one in room.devices))
    for dtype in ("bf16", "fp16"):
        if all(dtype in one.hardware.peak_flops for one in room.devices):
            return dtype, f"of {names}"
    return '"no"', f"the rates of {names} are unknown"


def _rows(project: Project, room: Room, say: Callable[[str], None]) -> tuple[str, str]:
    arguments = _arguments(project)
    limits = room.limits_of(arguments)
    if not limits:
        raise PlanError(
            f"{ROWS} is 'auto', no memory limits it, and there is no GPU here",
            code="FG948",
            hint="name the memory of a device: device_memory: 22GB in meta, or --memory 22GB",
        )
    unit = _rows_unit(arguments)
    # The numbers that are still to be found do not matter for the trace of a model without stages.
    others = {CHUNKS: "null"} if CHUNKS in auto_settings(project) else {}
    update, steps = arguments.global_batch(), arguments.plain(ACCUMULATION)
    search = others
    if update is not None:
        free = {name: value_text(value) for name, value in arguments.without_global_batch().items()}
        # Of two micro-batches or more, all but the first find gradients in memory.
        search = {**others, **free, ACCUMULATION: str(steps or 2)}
    limit = int(min(limits))
    answer = rows_within(
        _with(project, (), **{ROWS: str(unit), **search}), **room.cluster, limit=limit, within_data=True
    )
    if answer["size"] == 0:
        raise _no_row_fits(arguments, room, unit, answer["num_bytes"], limit)
    replicas = arguments.replicas(room.gpus * room.nodes)
    text, reason = _rows_and_reason(answer, update, steps, replicas)
    sizes: Sequence[int] = range(unit, int(text) + 1, unit)
    if update is not None:
        sizes = _sizes_of_update(update, steps, int(text), replicas, unit=unit)
    planned: dict[int, tuple[int, float]] = {}

    def is_too_large(size: int) -> bool:
        plan, _ = traced_plan(_with(project, (), **{ROWS: str(size), **others}), **room.cluster)
        need, room_left = planned[size] = _peak(plan), min(room.limits_on(plan["mesh"], plan["convolution_bytes"]))
        if need > room_left or size < sizes[-1]:
            say(f"auto: {size} rows are planned to need {format_size(need)} of {format_size(room_left)}")
        return need > room_left

    if not is_too_large(sizes[-1]):
        return text, reason
    # The first rows of the data, which were traced, may need less than the others: from here on, each size is planned.
    number = bisect_left(sizes[:-1], True, key=is_too_large)
    if number == 0:
        raise _no_row_fits(arguments, room, sizes[0], *planned[sizes[0]])
    size = sizes[number - 1]
    if update is not None:
        return rows_of_update(update, steps, size, replicas, unit=unit)
    need, room_left = planned[size]
    return str(size), f"{format_size(need)} of {format_size(room_left)}"


def _no_row_fits(arguments: TrainerArguments, room: Room, rows: int, need: int, limit: float) -> PlanError:
    need_words = "row needs" if rows == 1 else "rows need"
    wholes = [one.hardware.memory_bytes for one in room.devices if one.hardware.memory_bytes is not None]
    rest = (
        f"the {format_size(limit)} that a context, workspaces, fragmentation and other processes leave of "
        f"{format_size(min(wholes))}"
        if wholes and not room.limits and limit < min(wholes)
        else format_size(limit)
    )
    return PlanError(
        f"{ROWS} is 'auto', and {rows} {need_words} {format_size(need)} of {rest}",
        code="FG948",
        # With 'auto', a plan ends with this error as well.
        hint=f"`fgcli plan --set {arguments.path(ROWS)}={rows}`, with the same --hardware and --gpus, shows what takes "
        "the memory, and what makes it smaller",
    )


def _rows_and_reason(answer: Mapping[str, Any], update: int | None, steps: object, replicas: int) -> tuple[str, str]:
    """Returns the number of rows that an answer of `rows_within` gives, and why it is this one."""
    size, unit = answer["size"], answer["unit"]
    if update is not None:
        return rows_of_update(update, steps, size, replicas, unit=unit)
    bound = ""
    if answer["most_rows"] is not None and size + unit > answer["most_rows"]:
        bound = f"; the data has no more than {answer['most_rows']} for each replica"
    elif size + unit > MOST_ROWS:
        bound = f"; no more than {MOST_ROWS} are tried"
    return str(size), f"{format_size(answer['num_bytes'])} of {format_size(answer['limit'])}{bound}"


def _rows_unit(arguments: TrainerArguments) -> int:
    """Returns of what the rows are multiples: in a pipeline, of the number of parts into which they are split."""
    if not arguments.is_pipeline:
        return 1
    chunks = arguments.plain(CHUNKS)
    if not isinstance(chunks, int):
        raise PlanError(
            f"{ROWS} is 'auto' in a pipeline, and {CHUNKS} is {chunks!r}: how many rows fit depends on it",
            code="FG997",
            hint=f"set {CHUNKS} to a number, such as that of the stages",
        )
    return chunks


def rows_of_update(update: int, steps: object, most: int, replicas: int, *, unit: int = 1) -> tuple[str, str]:
    """Returns the largest number of rows that divides a global batch, so that accumulation makes up the rest.

    Args:
        update: the rows of an optimizer step.
        steps: the number of micro-batches of a step; None if it follows.
        most: the largest number of rows that fits.
        replicas: the number of data-parallel ranks.
        unit: of what the rows are multiples.

    Raises:
        PlanError: FG948 if no number of rows that fits makes the global batch.
    """
    sizes = _sizes_of_update(update, steps, most, replicas, unit=unit)
    if not sizes:
        raise PlanError(
            f"{ROWS} is 'auto', and no number up to {most}, which fits, makes an update of {update} rows "
            f"on {replicas} ranks" + ("" if steps is None else f" in {steps} micro-batches"),
            code="FG948",
            hint=f"write {ACCUMULATION}: null, so that it follows"
            if steps is not None
            else f"make the rows of an update a multiple of {replicas}",
        )
    return str(
        sizes[-1]
    ), f"{most} would fit; {update // (sizes[-1] * replicas)} micro-batches make an update of {update} rows"


def _sizes_of_update(update: int, steps: object, most: int, replicas: int, *, unit: int) -> list[int]:
    """Returns the numbers of rows, in order, that make a global batch, see `rows_of_update`."""
    sizes = [rows for rows in range(unit, most + 1, unit) if update % (rows * replicas) == 0]
    return sizes if steps is None else [rows for rows in sizes if rows * replicas * int(str(steps)) == update]


def _chunks(project: Project, room: Room) -> tuple[str, str]:
    hardware = room.devices[0].hardware if room.devices else None
    limits = room.limits_of(_arguments(project))
    has_times = hardware is not None and hardware.gives_times
    usual, work = traced_plan(_with(project, (), **{CHUNKS: "null"}), **room.cluster)
    tried = {work.micro_batches: (usual, work)}
    rows = usual["settings"][ROWS]
    further = (number for number in range(work.micro_batches + 1, rows + 1) if rows % number == 0)
    for chunks in further if has_times or limits else ():
        if len(tried) == _MOST_CHUNKS:
            break
        try:
            tried[chunks] = traced_plan(_with(project, (), **{CHUNKS: str(chunks)}), **room.cluster)
        except DistributedError as error:
            # The schedule does not run this number.
            if error.code != "FG761":
                raise
    fitting = [chunks for chunks, (plan, _) in tried.items() if not limits or _peak(plan) <= min(limits)]
    # Where none fits, other cuts may: the more micro-batches there are, the less they need.
    allowed = fitting or [max(tried)]
    if hardware is None or not has_times:
        return str(min(allowed)), "as few as fill the pipeline and fit; no device is known whose times could be planned"
    seconds = {chunks: time_of(one, hardware)["step"]["seconds"]["high"] for chunks, (_, one) in tried.items()}
    times = ", ".join(f"{chunks}: {seconds[chunks]:.3g} s" for chunks in sorted(seconds))
    return str(min(allowed, key=lambda chunks: seconds[chunks])), f"the shortest step on {hardware.title}: {times}"


def _peak(plan: Mapping[str, Any]) -> int:
    return max(int(phase["num_bytes"]) for rank in plan["ranks"] for phase in rank["phases"])


def _split(project: Project, room: Room) -> tuple[str, str]:
    module, function = _SEARCH.split(":")
    search = getattr(import_module(module), function)
    limits = room.limits_of(_arguments(project))

    def make_with(spec: Mapping[str, str] | None) -> Any:
        changed = _with(project, (), **{SPLIT: AUTO if spec is None else json.dumps(spec)})
        return lambda hook: changed.build_with(hook, MAIN)

    with project.located():
        answer = search(
            make_with,
            world_size=room.gpus * room.nodes,
            local_world_size=room.gpus,
            devices=[one.hardware for one in room.devices],
            limits=limits,
        )
    peaks = ", ".join(map(format_size, answer["peaks"]))
    basis = f"traced peaks of the ranks: {peaks}" if peaks else "stages of similar cost; no device is known"
    return json.dumps(answer["spec"]), basis
