"""The config that does what a call from a script does: its text, and the `Project` that reads this text.

The input is the parts of a run (settings, blocks, callbacks); the output is the text of a config that extends a trainer
template, and a `Project` of the same text. What the script runs is built from this text, so that both cannot differ.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather.errors import TrainingError
from forgather.project.project import Project
from forgather.value_text import can_be_path, shown

_FILE = "script"
# The blocks of a template that get their content from a project, which a script has none of.
_EMPTY = (
    "raw_dataset",
    "dataset",
    "tokenizer",
    "train_dataset",
    "eval_dataset",
    "sample_prompts",
    "model_config",
    "data_collator",
    "optimizer",
)


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """A config whose parts come from a script.

    Args:
        name: the name of the config.
        template: the trainer template, such as "accel_trainer".
        processes: the number of processes on a machine.
        meta: further entries of the target `meta`.
        settings: the training arguments by name.
        blocks: the YAML text of each block that differs from an empty one, by name.
        callbacks: the YAML text of each further callback, by name.
        arguments: the YAML text of each further argument of the trainer, by name.
    """

    name: str
    template: str = "accel_trainer"
    processes: int = 1
    meta: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, str] = field(default_factory=dict)
    callbacks: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of the config."""
        parts = [f"-- extends 'trainers/{self.template}.yaml'", ""]
        parts += _block("config_metadata", f"-- set ns.config_name = {json.dumps(self.name)}")
        parts += [f"    -- set ns.nproc_per_node = {self.processes}"]
        if self.meta:
            parts += _extended("meta", {name: yaml_text(value, name) for name, value in self.meta.items()})
        blocks = {**dict.fromkeys(_EMPTY, "~"), **self.blocks}
        for name, text in blocks.items():
            parts += _block(name, text)
        parts += _extended("trainer_args", {name: yaml_text(value, name) for name, value in self.settings.items()})
        parts += _extended("trainer_callbacks", {"samples": "~", **self.callbacks})
        if self.arguments:
            parts += _extended("trainer", self.arguments)
        return "\n".join(parts) + "\n"

    @property
    def is_replicated(self) -> bool:
        """True if every process holds whole weights, in the module that the script gave."""
        splits = ("fsdp", "deepspeed", "pipeline_parallel_size")
        tensor = self.settings.get("tensor_parallel_size", 1)
        return tensor in (None, 1) and not any(self.settings.get(name) for name in splits)

    def open(self, folder: str) -> Project:
        """Returns the project that reads this config from a folder, into which its text is written.

        Args:
            folder: an existing folder, which must exist as long as the project is used.
        """
        file = os.path.join(folder, "templates", "configs", f"{_FILE}.yaml")
        os.makedirs(os.path.dirname(file), exist_ok=True)
        for path, text in ((os.path.join(folder, "meta.yaml"), f"name: {self.name}\n"), (file, self.text)):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
        # The code that this config calls is that of the script that is running already.
        return Project(_FILE, folder, trust=True)


def _block(name: str, text: str) -> list[str]:
    return [f"[{name}]", *(f"    {line}" for line in text.split("\n"))]


def _extended(name: str, entries: Mapping[str, str]) -> list[str]:
    return _block(name, "\n".join(["== super()", *(f"{key}: {text}" for key, text in entries.items())]))


def yaml_text(value: Any, name: str) -> str:
    """Returns plain data as YAML on one line, which a template does not change.

    Args:
        value: numbers, texts, lists and mappings with texts as keys.
        name: the name of the setting, for messages.

    Raises:
        TrainingError: FG811 if the value is no plain data.
    """
    try:
        text = json.dumps(_plain(value, name), ensure_ascii=False)
    except (RecursionError, ValueError):
        # A list of itself, or a number with more digits than Python writes.
        raise _not_plain(value, name) from None
    # `{{` begins an expression of a template; in JSON, it occurs inside of texts only.
    return re.sub(r"\{(?=[{%#])", r"\\u007b", text)


def is_plain(value: Any) -> bool:
    """Returns whether a value can be written as plain data in a config."""
    try:
        _plain(value, "")
    except (TrainingError, RecursionError):
        return False
    return True


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(inner, f"{name}.{key}") for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        return [_plain(inner, name) for inner in value]
    elif isinstance(value, os.PathLike) and can_be_path(value):
        return os.fspath(value)
    elif value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    raise _not_plain(value, name)


def _not_plain(value: Any, name: str) -> TrainingError:
    return TrainingError(
        f"{name} is {shown(value)}, which a config cannot contain",
        code="FG811",
        hint="give a number, a text, a list or a mapping with texts as keys",
    ).about(name)
