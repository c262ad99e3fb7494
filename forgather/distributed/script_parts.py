"""`ScriptParts`: everything that a script gives, and the config that does the same.

The input is what the other modules of this package have read (engine, words, data); the output is a `ScriptConfig` and
the values of the variables in its text. Two values for one setting are an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.distributed.data_loader import ScriptData
from forgather.distributed.engine import Engine
from forgather.distributed.optimizer import ScriptOptimizer, without_stage_0
from forgather.distributed.script_config import ScriptConfig, yaml_text
from forgather.distributed.words import ScriptWords, with_defaults
from forgather.errors import TrainingError
from forgather.launcher_env import process_facts
from forgather.project.fault_tolerance import FaultTolerance
from forgather.value_text import are_equal, shown

_MONITOR = "forgather.ml.callbacks:TrainingMonitor"
_CALLBACKS, _SAVE_FUNCTION = "callbacks", "save_function"


@dataclass(frozen=True, kw_only=True)
class ScriptParts:
    """Everything that a script gives.

    Args:
        engine: what is trained.
        words: the mapping of the script.
        optimizer: the optimizer of the script, or None for the default one.
        monitor: a callback, or None.
        data: the training data, or None as long as it is not known.
        epochs: the number of passes over the data; None for that of the words.
        tolerance: what happens after a failure, or None.
    """

    engine: Engine
    words: ScriptWords
    optimizer: ScriptOptimizer | None = None
    monitor: Any = None
    data: ScriptData | None = None
    epochs: float | None = None
    tolerance: FaultTolerance | None = None

    def config(self) -> tuple[ScriptConfig, dict[str, Any]]:
        """Returns the config of the run as far as it is known, and the values of its variables."""
        words, engine, data = self.words, self.engine, self.data
        settings = _without_contradiction(words, engine.settings, "engine")
        if data is not None:
            settings = _without_contradiction(words, data.settings, data.loader) | settings
        settings |= words.settings
        if self.optimizer is not None and self.optimizer.learning_rate is not None:
            settings.setdefault("learning_rate", self.optimizer.learning_rate)
        if self.epochs is not None:
            settings["num_train_epochs"] = self.epochs
        if self.tolerance is not None and self.tolerance.checkpoint_interval is not None:
            settings["save_steps"] = self.tolerance.checkpoint_interval
        settings = without_stage_0(with_defaults(settings))
        meta: dict[str, Any] = {}
        if self.tolerance is not None:
            meta["fault_tolerance"] = {
                "auto_resume": self.tolerance.auto_resume,
                "max_retry_attempts": self.tolerance.max_retry_attempts,
            }
        blocks, variables = self._blocks()
        callbacks = self._callback_texts(variables)
        arguments: dict[str, str] = {}
        if _SAVE_FUNCTION in words.objects:
            arguments[_SAVE_FUNCTION] = f"!var {_SAVE_FUNCTION}"
            variables[_SAVE_FUNCTION] = words.objects[_SAVE_FUNCTION]
        config = ScriptConfig(
            name=_script_name(),
            template=engine.template,
            processes=process_facts(os.environ).local_world_size,
            meta=meta,
            settings=settings,
            blocks=blocks,
            callbacks=callbacks,
            arguments=arguments,
        )
        return config, variables

    def _blocks(self) -> tuple[dict[str, str], dict[str, Any]]:
        words, data = self.words, self.data
        blocks = {"model": self.engine.text, "train_dataset": "!var train_dataset"}
        variables = dict(self.engine.variables)
        if data is not None:
            variables["train_dataset"] = data.dataset
            if data.collate_fn is not None:
                if "data_collator" in words.objects:
                    raise _twice("data_collator", f"collate_fn of the {data.loader}")
                blocks["data_collator"] = "!var data_collator"
                variables["data_collator"] = data.collate_fn
        for block, value in words.objects.items():
            if block not in (_CALLBACKS, _SAVE_FUNCTION, "train_dataset"):
                blocks[block] = f"!var {block}"
                variables[block] = value
        if self.optimizer is not None:
            if "optimizer" in words.objects:
                raise _twice("optimizer", "config['optimizer_factory']")
            blocks["optimizer"] = self.optimizer.text
            variables |= self.optimizer.variables
        return blocks, variables

    def _callback_texts(self, variables: dict[str, Any]) -> dict[str, str]:
        texts = {}
        words = self.words
        if self.monitor is not None:
            texts["monitor"], variables["monitor"] = "!var monitor", self.monitor
        # A monitor that writes its own file says the same, unless the config names another folder.
        if words.save_logs and (words.log_dir is not None or not getattr(self.monitor, "save_logs", False)):
            given = {"log_interval": words.settings.get("logging_steps", 10), "log_dir": words.log_dir or "./logs"}
            texts["logs"] = f"!singleton:{_MONITOR} {yaml_text(given, 'log_dir')}"
        for position, callback in enumerate(words.objects.get(_CALLBACKS, ())):
            name = f"callback_{position}"
            texts[name], variables[name] = f"!var {name}", callback
        return texts


def are_same_objects(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two mappings have the same names, and the same objects under them.

    Args:
        one: a mapping from names to objects.
        other: another one.
    """
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def _without_contradiction(words: ScriptWords, settings: Mapping[str, Any], by: str) -> dict[str, Any]:
    """Returns settings of an engine or a loader, after a comparison with those that the script gives itself."""
    for name, value in settings.items():
        if name in words.settings and not are_equal(words.settings[name], value):
            raise _twice(
                f"{words.origins[name]}: {shown(words.settings[name], 60)}",
                f"{name}: {shown(value, 60)} of the {by or 'engine'}",
            )
    return dict(settings)


def _twice(one: str, other: str) -> TrainingError:
    return TrainingError(f"{one} contradicts {other}", code="FG812", hint="keep one of them").about(one.split(":")[0])


def _script_name() -> str:
    stem = Path(sys.argv[0]).stem if sys.argv and sys.argv[0].endswith(".py") else ""
    return stem if stem.isidentifier() and stem != "__main__" else "script"
