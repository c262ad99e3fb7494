"""Checks what would otherwise stop a run at its start: DeepSpeed's config and the classes to wrap.

The input is a config and its calls; the output is findings. Nothing that the config names is imported. DeepSpeed's
config is checked by the function that the run uses (`forgather.ml.strategy.deepspeed_config`, which does not import
torch). The class to wrap is looked up in the source of the model's module.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from forgather.aliases import alias_of
from forgather.batch_triangle import SCHEDULE, engine_total
from forgather.config.graph import Call, CallKind, Entry, Graph, Mapped, Node, Scalar, Sequence
from forgather.config.lint.call_check import Called
from forgather.config.path import GraphPath, Key, format_path
from forgather.errors import Diagnostic, ForgatherError, ProjectError
from forgather.project.checks.setting_rules import rules_about
from forgather.project.checks.subject import Subject
from forgather.project.literal import plain_value
from forgather.project.targets import known_processes
from forgather.project.trainer_arguments import TrainerArguments, keyword, trainer_arguments

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

_DEEPSPEED = "forgather.ml.strategy.deepspeed_config"
_DEEPSPEED_ARGUMENTS = "forgather.ml.strategy.deepspeed_arguments"
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_WRAP = "transformer_layer_cls_to_wrap"


def check_run_requirements(subject: Subject) -> Iterator[Diagnostic]:
    """Yields findings about problems that would stop a run at its start, as far as plain data shows them."""
    graph, calls, reader = subject.graph, subject.calls, subject.reader
    arguments = trainer_arguments(graph)
    if arguments is not None:
        path = format_path((Key("main"), Key("args")))
        yield from (replace(one, path=one.path or path) for one in _check_deepspeed(graph, arguments, calls))
        yield from _check_wrapping(graph, arguments, reader)


# DeepSpeed


def _check_deepspeed(graph: Graph, arguments: TrainerArguments, calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    entries = [entry for entry in arguments.call.kwargs if _is_of_deepspeed(str(entry.key))]
    entry = arguments.entry("deepspeed") or next(iter(entries), None)
    asked = _asked(entries, arguments, calls)
    if entry is None or not asked:
        return
    judge: Any = import_module(_DEEPSPEED)
    if not _is_ours(arguments, calls):
        # transformers fills the config by its own rules; only unknown keys can be judged here.
        for one in judge.unknown_settings(asked):
            yield replace(one, span=one.span or _place_in(entry, one.message))
        return
    known = known_processes(graph)
    given = _settings(arguments, calls, known or 1, asked)
    if given is None:
        return
    # With the number of processes, these may be known only at the start.
    is_solved = given.global_batch_size is not None or engine_total({"deepspeed": asked}) is not None
    open_before_a_run = _BATCH_KEYS if is_solved else ("train_batch_size",)
    try:
        # The config is checked as for GPUs, even if this machine has none.
        judge.zero_config(asked, given, processes=known or 1, on_cpu=False)
    except ForgatherError as error:
        for one in (error.diagnostic, *error.others):
            if known is not None or not one.message.startswith(open_before_a_run):
                words = one.message.split()
                place = next((word for word in entries if str(word.key) in words), entry)
                yield replace(one, span=one.span or _place_in(place, one.message))


def _is_of_deepspeed(name: str) -> bool:
    """Returns whether a setting is DeepSpeed's config, or is written next to it and belongs inside of it."""
    alias = alias_of("setting", name)
    return name == "deepspeed" or (alias is not None and alias.is_accepted and alias.name.startswith("deepspeed"))


def _asked(entries: list[Entry], arguments: TrainerArguments, calls: Mapping[int, Called]) -> Any:
    """Returns DeepSpeed's config with the settings that are written next to it; None without one, or if it is open."""
    called = calls.get(id(arguments.call))
    rules = rules_about(called) if called else ()
    try:
        words = {str(entry.key): plain_value(entry.value, str(entry.key)) for entry in entries}
    except ProjectError:
        return None
    # Only a closed set of settings takes other tools' words; the rules about other trainers do not have all settings.
    is_closed = bool(rules) and rules[0].closed
    return rules[0].names(words, {})[0].get("deepspeed") if is_closed else words.get("deepspeed")


def _is_ours(arguments: TrainerArguments, calls: Mapping[int, Called]) -> bool:
    called = calls.get(id(arguments.call))
    return called is not None and any(
        name.startswith("forgather.") for rules in rules_about(called) for name in rules.about
    )


def _settings(
    arguments: TrainerArguments, calls: Mapping[int, Called], processes: int, asked: Any
) -> SimpleNamespace | None:
    """Returns the trainer arguments that DeepSpeed's config must agree with; None if one of them is not plain data."""
    called = calls.get(id(arguments.call))
    rules = rules_about(called) if called else ()
    if not rules:
        return None
    written = {str(entry.key): entry.value for entry in arguments.call.kwargs}
    values: dict[str, object] = {
        name: node.value if isinstance(node, Scalar) else None for name, node in written.items()
    }
    try:
        values |= {name: plain_value(written[name], name) for name in (SCHEDULE,) if name in written}
    except ProjectError:
        return None
    given = {rules[0].renamed.get(name, name): value for name, value in values.items()}
    given["deepspeed"] = asked
    explicit = {name for name, value in given.items() if value is not None}
    judge: Any = import_module(_DEEPSPEED_ARGUMENTS)
    given |= {name: value for _, name, value in judge.implied_settings(given)}
    whole = rules[0].complete({**given, "nproc_per_node": processes}, given)
    numbers = ("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm")
    if not all(isinstance(whole.get(name), int | float) for name in numbers):
        return None
    plain = {name.replace(".", "_"): value for name, value in whole.items()}
    return SimpleNamespace(**plain, explicit=explicit)


def _place_in(entry: Entry, message: str) -> Any:
    """Returns the location of the key that a message names, or else the location of the setting."""
    words = message.replace("'", " ").replace(".", " ").split()
    inside, named = [entry], list[Entry]()
    while inside:
        one = inside.pop()
        inside += one.value.entries if isinstance(one.value, Mapped) else ()
        named += [one] if one is not entry and str(one.key) in words else []
    found = min(named, key=lambda one: words.index(str(one.key)), default=entry)
    return found.span or found.value.span


# classes of layers


def _check_wrapping(graph: Graph, arguments: TrainerArguments, reader: Reader) -> Iterator[Diagnostic]:
    config = arguments.entry("fsdp_config")
    module = _module_of_model(graph)
    if config is None or module is None or not isinstance(config.value, Mapped):
        return
    for entry in config.value.entries:
        if str(entry.key).removeprefix("fsdp_") != _WRAP:
            continue
        names = entry.value.items if isinstance(entry.value, Sequence) else (entry.value,)
        for node in names:
            name = node.value if isinstance(node, Scalar) else None
            # accelerate accepts several names in one text, separated by commas.
            for word in str(name or "").replace(",", " ").split():
                yield from _missing_class(word, module, entry, node, reader)


def _missing_class(name: str, module: str, entry: Entry, node: Node, reader: Reader) -> Iterator[Diagnostic]:
    try:
        reader.read(f"{module}:{name}")
    except ForgatherError as error:
        if error.code == "FG321":
            path: GraphPath = (Key("main"), Key("args"), Key("fsdp_config"), Key(entry.key))
            yield Diagnostic(
                code="FG883",
                message=f"{module.rpartition('.')[2]} has no class {name!r} to wrap",
                span=(entry.span if isinstance(entry.value, Scalar) else node.span) or entry.span,
                path=format_path(path),
                hint=error.hint or "leave it out: the repeated blocks of the model are wrapped",
            )


def _module_of_model(graph: Graph) -> str | None:
    """Returns the module of the model's classes; None if the config does not describe a model of transformers."""
    main = graph.targets.get("main")
    config = keyword(keyword(main.value, "model"), "config") if main else None
    constructor = config.constructor if isinstance(config, Call) and config.kind is not CallKind.META else ""
    library, _, name = constructor.rpartition(":")
    if library != "transformers" or not name.endswith("Config"):
        return None
    found = _family(name)
    return found and f"transformers.models.{found}.modeling_{found}"


def _family(config: str) -> str | None:
    """Returns the folder of transformers that contains a config class, such as "gpt_neox" for GPTNeoXConfig."""
    spec = find_spec("transformers")
    if spec is None or spec.submodule_search_locations is None:
        return None
    folder = os.path.join(spec.submodule_search_locations[0], "models")
    wanted = config.removesuffix("Config").lower()
    return next((name for name in sorted(os.listdir(folder)) if name.replace("_", "") == wanted), None)
