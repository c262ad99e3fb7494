"""The words of Lightning's `Trainer` as values: what is given, what they mean, and the state of reading them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forgather.aliases import alias_of
from forgather.errors import TrainingError
from forgather.rules import Violation, shipped_rules
from forgather.translation import translate
from forgather.value_text import are_equal, shown

TOOL = "lightning"
TRAINER = "forgather.lightning:Trainer"

KNOWN = frozenset(
    name
    for constructor in ("forgather.ml:TrainingArguments", "forgather.ml:AccelTrainingArguments")
    for rules in shipped_rules()[constructor]
    for name in rules.settings
)


class Given(NamedTuple):
    """An object among the words: a strategy, a callback, a logger or a plugin.

    Args:
        name: the name of its class.
        options: the options that differ from the defaults of the class.
        source: the object itself; None where a config is checked, which builds no objects.
    """

    name: str
    options: Mapping[str, Any]
    source: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much of the data a run reads, and when it validates; with Lightning's names and defaults.

    Args:
        fast_dev_run: False, or the number of batches of each loop of a trial run.
        limit_train_batches, limit_val_batches, limit_test_batches, limit_predict_batches: the number of batches of one
            epoch, or, as a float, the fraction of them.
        overfit_batches: the number or fraction of training batches that both training and validation use; 0 for none.
        val_check_interval: after how many training batches validation runs, or, as a float, after which fraction of an
            epoch.
        check_val_every_n_epoch: after how many epochs validation runs; None counts `val_check_interval` across epochs.
        num_sanity_val_steps: the number of validation batches before training; -1 for all.
        max_epochs: the number of epochs after which a run ends at the latest; None if `max_steps` alone ends it.
        max_steps: the number of optimizer steps after which a run ends at the latest; -1 if `max_epochs` alone does.
        min_epochs, min_steps: the epochs and optimizer steps before which no callback ends the run.
    """

    fast_dev_run: int | bool = False
    limit_train_batches: int | float = 1.0
    limit_val_batches: int | float = 1.0
    limit_test_batches: int | float = 1.0
    limit_predict_batches: int | float = 1.0
    overfit_batches: int | float = 0.0
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int = 2
    max_epochs: int | None = 1000
    max_steps: int = -1
    min_epochs: int | None = None
    min_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWords:
    """The words of Lightning's `Trainer`, as ours.

    Args:
        settings: our training arguments by name.
        strategy: "single", "ddp", "fsdp" or "deepspeed".
        trainer: the constructor of the trainer, as "module:attr".
        arguments: the constructor of its training arguments, as "module:attr".
        num_processes: the number of all processes; None where it depends on the machine (`devices="auto"`) and the
            machine is not known.
        processes_per_node: the number of processes of one machine, None as above.
        callbacks: the callbacks; in the meaning of plain words, the `Given` of each.
        limits: how much of the data the run reads.
        notes: one line for each word that was translated, or that has no effect here.
        group: `backend` and `timeout_seconds` of the process group, if they are given.
        switches: torch's switches for the time of the run: `deterministic`, `benchmark`, `detect_anomaly`.
        max_seconds: the time after which the run ends, in seconds; None for no limit.
        shows_progress: whether progress is shown.
        clip_value: the largest absolute value of a number in the gradients; None for no such limit.
        replaces_samplers: whether several processes get samplers of their own rows in place of those of the loaders.
    """

    settings: dict[str, Any]
    strategy: str = "single"
    trainer: str = "forgather.ml:Trainer"
    arguments: str = "forgather.ml:TrainingArguments"
    num_processes: int | None = 1
    processes_per_node: int | None = 1
    callbacks: list[Any] = field(default_factory=list)
    limits: Limits = field(default_factory=Limits)
    notes: list[str] = field(default_factory=list)
    group: dict[str, Any] = field(default_factory=dict)
    switches: dict[str, Any] = field(default_factory=dict)
    max_seconds: float | None = None
    shows_progress: bool = True
    clip_value: float | None = None
    replaces_samplers: bool = True


class Reading:
    """The words that have been read so far.

    Args:
        words: the words as the user wrote them.
        computed: the words whose meaning is more than their record.
        count_devices: a function from the accelerator ("cpu" or another name) to the number of devices of this machine;
            None if the machine is not known.
    """

    def __init__(
        self, words: Mapping[str, Any], computed: Collection[str], count_devices: Callable[[str], int] | None
    ) -> None:
        self.words = {name: value for name, value in words.items() if value is not None}
        self.count_devices = count_devices
        plain = {name: value for name, value in self.words.items() if name not in computed}
        found = translate(plain, tool=TOOL, known=KNOWN)
        self.settings, self.notes, self.violations = found.settings, found.notes, found.violations
        self.origins = found.origins
        self.limits: dict[str, Any] = {}
        self.rest: dict[str, Any] = {}
        """The fields of `TrainerWords` that are not settings, limits or notes."""

    def set(self, word: str, settings: Mapping[str, Any], *, note: str | None = None) -> None:
        """Adds the settings that a word means.

        Args:
            word: the word.
            settings: our settings by name.
            note: the line about it; by default, one that names value and settings.
        """
        for name, value in settings.items():
            if name in self.settings and not are_equal(self.settings[name], value):
                message = f"{word!r} and {self.origins[name]!r} both set {name!r}"
                self.violations.append(Violation("FG812", message, word, "keep one of them"))
            self.settings[name] = value
            self.origins[name] = word
        written = ", ".join(f"{name}: {shown_value(value)}" for name, value in settings.items())
        self.notes.append(note or f"{word}={shown(self.words.get(word))} is {written or 'the default'}")

    def refuse(
        self, word: str, hint: str, *, value: Any = None, code: str = "FG811", message: str | None = None
    ) -> None:
        """Adds the violation for a word that is refused.

        Args:
            word: the word.
            hint: the reason, and what to write instead.
            value: the value; by default, that of the word.
            code: the error code.
            message: what was found; by default, the word and its value.
        """
        value = self.words.get(word) if value is None else value
        message = message or f"{word}={shown(value)} of Lightning is not available"
        self.violations.append(Violation(code, message, word, hint, found=value))


def shown_value(value: Any) -> str:
    """Returns a value as a note shows it, cut if it is long."""
    return shown(value, 120)


def refuse_class(name: str) -> None:
    """Raises an error that says what to write, if Lightning has a class of this name and this package does not.

    Args:
        name: the name that a script imports.

    Raises:
        TrainingError: FG865, with what takes the place of the class.
    """
    alias = alias_of("constructor", f"*:{name}", "lightning")
    if alias is None:
        return
    target = alias.to.removeprefix("constructor:")
    hint = f"here it is {target}" if alias.verdict == "same" else alias.why
    if name.endswith("Logger"):
        hint = (
            "leave it out: logger=True, the default, writes TensorBoard files; for another tracker, install lightning"
        )
    raise TrainingError(f"forgather.lightning has no {name!r}", code="FG865", hint=hint)
