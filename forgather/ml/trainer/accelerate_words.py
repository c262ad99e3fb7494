"""The plugins of Accelerate and the file of `accelerate config`, as training arguments.

The input is training arguments as the user wrote them, with plugins in `accelerator_args` or the path of a file in
`accelerate_config`; the output is training arguments without the plugins. Each word means an argument, or belongs to
the launch, or is refused with a reason. Only the named file is read: the default file of Accelerate is never looked
for. The words are records in `forgather/ml/aliases.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from forgather import bounded
from forgather.errors import Diagnostic, DistributedError
from forgather.ml.log import get_logger
from forgather.ml.trainer.argument_checks import SettingError
from forgather.translation import Translation, translate_inside
from forgather.value_text import can_be_path, shown

_log = get_logger(__name__)

_TOOL = "accelerate"
_MOST_BYTES = 1_000_000
PLUGINS = {
    "deepspeed_plugin": "DeepSpeedPlugin",
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "dynamo_plugin": "TorchDynamoPlugin",
    "project_config": "ProjectConfiguration",
    "parallelism_config": "ParallelismConfig",
    "torch_tp_plugin": "TorchTensorParallelConfig",
}
"""The arguments of `Accelerator` that are objects with settings, with the class of each."""

# The mappings of the file: the class whose arguments they have, and what precedes the names of these in the file.
_SECTIONS = {
    "deepspeed_config": ("DeepSpeedPlugin", ""),
    "fsdp_config": ("FullyShardedDataParallelPlugin", "fsdp_"),
    "parallelism_config": ("ParallelismConfig", "parallelism_config_"),
    "dynamo_config": ("TorchDynamoPlugin", "dynamo_"),
}
# Accelerate reads a section only if the file asks for the engine.
_ENGINES = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP"}


def with_accelerate_words(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the training arguments, with those that plugins and the file of `accelerate config` mean.

    Args:
        given: the training arguments as the user wrote them.
        defaults: the defaults of all training arguments. An argument that has its default value is treated as not
            given, because templates write defaults.

    Raises:
        SettingError: FG723 if the file cannot be read, if a word has no counterpart, or if an argument differs.
    """
    settings = dict(given)
    plain = dict(settings.get("accelerator_args") or {})
    for name, owner in PLUGINS.items():
        words = plain.pop(name, None)
        if words is not None:
            _apply(settings, _translated(owner, words), f"accelerator_args.{name}", defaults)
    if (folder := plain.pop("project_dir", None)) is not None:
        _place(settings, "output_dir", folder, "accelerator_args.project_dir", defaults)
    if settings.get("accelerator_args") is not None:
        settings["accelerator_args"] = plain
    file = settings.get("accelerate_config")
    if file is not None:
        for found in _of_file(_read(file)):
            _apply(settings, found, "accelerate_config", defaults)
    if settings.get("deepspeed") == {}:
        settings["deepspeed"] = "auto"
    return settings


def refuse_other_processes(file: str | None, world_size: int) -> None:
    """Raises an error if the file of `accelerate config` asks for another number of processes than the run has.

    Args:
        file: the training argument `accelerate_config`.
        world_size: the number of processes of the run.

    Raises:
        DistributedError: FG724 if the numbers differ.
    """
    words = {} if file is None else _read(file)
    asked, machines = words.get("num_processes"), words.get("num_machines") or 1
    # -1 is Accelerate's "not known".
    if not isinstance(asked, int) or asked < 1 or asked == world_size:
        return
    each = asked // machines if isinstance(machines, int) and asked % max(machines, 1) == 0 else asked
    nodes = f" --nnodes {machines} --node-rank K --master-addr HOST, on each machine" if machines != 1 else ""
    raise DistributedError(
        f"accelerate_config asks for {asked} processes, and the run has {world_size}",
        code="FG724",
        hint=f"start it with `fgcli train --nproc-per-node {each}`{nodes}, or remove num_processes from the file",
    ).about("accelerate_config")


class _UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
    """A loader that refuses a key that is given twice; PyYAML would take the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of a node."""
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            raise yaml.constructor.ConstructorError(problem="a key is given twice", problem_mark=node.start_mark)
        return found


def _read(file: str) -> dict[str, Any]:
    if not can_be_path(file):
        raise _refused(f"accelerate_config is {shown(file)}", "give the path of a file of `accelerate config`")
    try:
        # Accelerate reads its file with the same library.
        found = yaml.load(bounded.read_text(file, _MOST_BYTES), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or getattr(error, "problem", None) or error
        raise _refused(
            f"accelerate_config {file!r} cannot be read: {reason}", "give a file of `accelerate config`"
        ) from None
    if not isinstance(found, dict):
        raise _refused(f"accelerate_config {file!r} contains no mapping", "give a file of `accelerate config`")
    return found


def _of_file(words: dict[str, Any]) -> Iterator[Translation]:
    """Yields the translation of the outer words of the file, and of each section."""
    outer = {name: value for name, value in words.items() if name not in _SECTIONS}
    engine = outer.get("distributed_type")
    backend = outer.pop("dynamo_backend", None)
    yield _translated("ClusterConfig", outer)
    if backend is not None:
        yield _translated("TorchDynamoPlugin", {"backend": backend})
    for name, (owner, prefix) in _SECTIONS.items():
        section = words.get(name) or {}
        if not isinstance(section, Mapping):
            raise _refused(f"{name} of accelerate_config is {section!r:.80}", "give a mapping")
        if section and engine != _ENGINES.get(name, engine):
            note = f"{name} has no effect: distributed_type is {engine}, and Accelerate reads it for {_ENGINES[name]}"
            yield Translation({}, [note], [], {})
        elif section:
            yield _translated(owner, {str(key).removeprefix(prefix): value for key, value in section.items()})


_CONTEXT_SIZES = ("cp_size", "sp_size")


def _translated(owner: str, words: Mapping[str, Any]) -> Translation:
    sizes = _parallel_sizes(words) if owner == "ParallelismConfig" else {}
    rest = {word: value for word, value in words.items() if not sizes or not word.startswith("dp_")}
    if owner == "ParallelismConfig":
        # Two names of one size: Accelerate writes 1 for the one that is not in use.
        rest = {word: value for word, value in rest.items() if word not in _CONTEXT_SIZES or value != 1}
    # Accelerate's names of backends are those of torch in capitals.
    if isinstance(backend := rest.get("backend"), str) and owner == "TorchDynamoPlugin":
        rest["backend"] = backend.lower()
    found = translate_inside(owner, rest, tool=_TOOL)
    found.settings.update(sizes)
    found.origins.update(dict.fromkeys(sizes, "dp_replicate_size x dp_shard_size"))
    if owner == "FullyShardedDataParallelPlugin":
        found.settings.setdefault("fsdp", True)
    if owner == "DeepSpeedPlugin":
        found.settings.setdefault("deepspeed", {})
    return found


def _parallel_sizes(words: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments for the two data-parallel sizes, which mean one thing together; none for other values."""
    replicas, shards = (words.get(name) or 1 for name in ("dp_replicate_size", "dp_shard_size"))
    if not isinstance(replicas, int) or not isinstance(shards, int):
        return {}
    found: dict[str, Any] = {"data_parallel_size": replicas * shards} if replicas * shards > 1 else {}
    if shards > 1:
        found["fsdp"] = True
    if shards > 1 and replicas > 1:
        found |= {"fsdp_config.sharding_strategy": "HYBRID_SHARD", "fsdp_config.shard_size": shards}
    return found


def _apply(settings: dict[str, Any], found: Translation, where: str, defaults: Mapping[str, Any]) -> None:
    """Adds the arguments of a translation to the settings, and logs one line for each."""
    if found.violations:
        first, *others = (
            Diagnostic(code="FG723", message=f"{where}: {one.message}", span=None, hint=one.hint)
            for one in found.violations
        )
        error = SettingError(first.message, code="FG723", hint=first.hint, others=others)
        raise error.about(where.partition(".")[0])
    for note in found.notes:
        _log.warning("%s: %s", where, note)
    for path, value in found.settings.items():
        _place(settings, path, value, f"{where}.{found.origins.get(path, '')}".rstrip("."), defaults)


def _place(settings: dict[str, Any], path: str, value: Any, where: str, defaults: Mapping[str, Any]) -> None:
    root, *keys = path.split(".")
    outer = settings.get(root)
    # `fsdp: full_shard` next to a plugin says more than that FSDP is on, and DeepSpeed's file more than that it is.
    if (value is True and root == "fsdp" and outer) or (root == "deepspeed" and value == {} and outer is not None):
        return
    holder, key = settings, root
    if keys:
        if isinstance(outer, str) and outer != "auto":
            raise _differs(where, value, root, outer)
        holder = settings[root] = dict(outer) if isinstance(outer, Mapping) else {}
        for inner in keys[:-1]:
            holder[inner] = dict(holder.get(inner) or {})
            holder = holder[inner]
        key = keys[-1]
    default = None if keys else defaults.get(root)
    if holder.get(key) in (None, default):
        holder[key] = value
        if value is not True and value != {}:
            _log.warning("%s was taken as %s: %s", where, path, value)
        else:
            _log.warning("%s was taken as %s: %s", where, path, "auto" if value == {} else "true")
    elif holder[key] != value:
        raise _differs(where, value, path, holder[key])


def _differs(where: str, value: Any, path: str, present: Any) -> SettingError:
    return _refused(
        f"{where} is {shown(value)}, and {path} is {present!r}", "keep one of them", where.partition(".")[0]
    )


def _refused(message: str, hint: str, about: str = "accelerate_config") -> SettingError:
    return SettingError(message, code="FG723", hint=hint).about(about)
