"""The loggers of Lightning as trackers of our trainers.

The input is what the word `logger` has; the output is added to the words that are being read: our settings, or a
violation. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.aliases import alias_of
from forgather.lightning.trainer_words import TOOL, Given, Reading
from forgather.value_text import shown

_TRACKERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "TensorBoardLogger": ("tensorboard", {"save_dir": "logging_dir", "name": "run_name"}),
    "WandbLogger": ("wandb", {"project": "project", "name": "run_name"}),
    "MLFlowLogger": ("mlflow", {"experiment_name": "project", "run_name": "run_name"}),
    "CometLogger": ("comet_ml", {"project": "project", "project_name": "project"}),
}
"""The tracker of each logger, and the setting for each of its options."""


def read_loggers(reading: Reading, word: str, value: Any) -> None:
    """Reads the loggers of a `Trainer`.

    Args:
        reading: the words that have been read so far.
        word: "logger".
        value: true, false, a logger or a list of them, each as a `Given`.
    """
    if value is True:
        return
    if value is False:
        reading.set(word, {"report_to": "none"})
        return
    loggers = list(value) if isinstance(value, Sequence) and not isinstance(value, Given | str) else [value]
    names: list[str] = []
    settings: dict[str, Any] = {}
    for one in loggers:
        if not isinstance(one, Given) or one.name not in _TRACKERS:
            name = one.name if isinstance(one, Given) else one
            alias = alias_of("constructor", f"*:{name}", TOOL) if isinstance(one, Given) else None
            reading.refuse(word, alias.hint if alias else f"expected {', '.join(_TRACKERS)}, or true", value=name)
            continue
        tracker, options = _TRACKERS[one.name]
        names.append(tracker)
        for option, given in one.options.items():
            if option in options:
                settings[options[option]] = given
            else:
                message = f"{one.name}({option}={shown(given, 60)}) is not available"
                hint = f"it has {', '.join(options)} here; {tracker} reads its other settings from its own variables"
                reading.refuse(word, hint, message=message)
    reading.set(word, {"report_to": names, **settings} if names else {})
