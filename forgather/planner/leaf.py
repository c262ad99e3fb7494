"""The text of a config that extends another one and takes another strategy, in about twelve lines.

Takes the name of a config and the settings in which a choice differs; gives the text of a template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def leaf_text(
    parent: str, settings: Mapping[str, Any], *, name: str, trainer: str | None, processes: int | None
) -> str:
    """Returns the text of the config.

    Args:
        parent: the name of the template that it extends, such as "configs/tiny.yaml".
        settings: the settings of the trainer's arguments.
        name: the name of the config, and with it of its output folder.
        trainer: the constructor of its trainer; None for that of the parent.
        processes: the number of processes on a machine; None for that of the parent.

    Example:
        >>> print(leaf_text("a.yaml", {"fsdp": "full_shard"}, name="A", trainer=None, processes=None), end="")
        -- extends 'a.yaml'
        <BLANKLINE>
        [config_metadata]
            == super()
            -- set ns.config_name = "A"
        <BLANKLINE>
        [trainer_args]
            == super()
            fsdp: full_shard
    """
    # With `default`, a config that extends this one can choose another trainer.
    lines = [f"-- set trainer_class = trainer_class | default({_quoted(trainer)})"] if trainer else []
    lines += [f"-- extends {_quoted(parent)}", "", "[config_metadata]", "    == super()"]
    # In this block, a config that extends this one can give itself another name.
    lines.append(f"    -- set ns.config_name = {json.dumps(name)}")
    if processes is not None:
        lines += ["", "[meta]", "    == super()", f"    nproc_per_node: {processes}"]
    if settings:
        lines += ["", "[trainer_args]", "    == super()"]
        lines += [f"    {key}: {value_text(value)}" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def value_text(value: Any) -> str:
    """Returns a value as YAML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{value_text(key)}: {value_text(item)}" for key, item in value.items()) + "}"
    is_word = isinstance(value, str) and value.replace("_", "").isalnum() and not value[0].isdigit()
    if is_word and value.lower() not in ("true", "false", "null"):
        return str(value)
    return "~" if value is None else json.dumps(value)
