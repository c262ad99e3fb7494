"""Anomalies of a run: spikes, explosions of the gradient, NaN, lost throughput, plateaus and divergence.

`AnomalyDetector` takes the `StepRecord` of each optimizer step and gives the anomalies that are found with it. Values
are compared with the median of recent steps and with their median absolute deviation (MAD), which single bad values
do not move. Each anomaly is found once, and can be found again only after the run was normal in between. The detector
stores numbers of a bounded number of steps, and a step costs some microseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from forgather.errors import TrainingError, nearest
from forgather.ml.types import StepRecord

DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "not_finite": {},
    "spike": {"window": 64, "deviations": 12.0, "ratio": 1.5},
    "explosion": {"window": 64, "deviations": 10.0, "ratio": 10.0},
    "throughput": {"window": 64, "ratio": 2.0, "steps": 4, "seconds": 1.0},
    "plateau": {"window": 0.25, "least_window": 200, "improvement": 0.005},
    "divergence": {"window": 0.1, "least_window": 60, "ratio": 1.15},
}
"""The settings of each kind of anomaly, and their defaults. Units: steps, ratios, and seconds for `seconds`."""

_LEAST: Mapping[str, float] = {"ratio": 1.0}
"""What a setting must be greater than: a value that is no greater than usual is no anomaly. It is 0 for others."""
_MOST = 1e9
_MAD_OF_NORMAL = 1.4826
"""The standard deviation of normally distributed values as a multiple of their MAD."""
_MEDIAN_ERROR = 1.2533
"""The standard error of the median of normally distributed values as a multiple of that of their mean."""
_CERTAIN = 6.0
"""How many standard errors a rise of the level must have, to be more than noise."""
_MOST_MEANS = 400
"""The largest number of means that a window consists of."""


class AnomalyError(TrainingError, ValueError):
    """An error about the settings of anomalies: an unknown name, or a value that is not allowed."""

    code = "FG520"


@dataclass(frozen=True, slots=True)
class Anomaly:
    """Something unusual that was found at a step.

    Args:
        kind: a key of `DEFAULTS`.
        step: the step with which it was found.
        message: what was found, with the usual value.
        value: the value that was found; None if there is none.
        usual: the value with which it was compared; None if there is none.
    """

    kind: str
    step: int
    message: str
    value: float | None = None
    usual: float | None = None

    def event(self) -> dict[str, Any]:
        """Returns the line of `metrics.jsonl` about this anomaly."""
        found = {"event": "anomaly", "step": self.step, "kind": self.kind, "message": self.message}
        numbers = {"value": self.value, "usual": self.usual}
        return found | {name: number for name, number in numbers.items() if number is not None}


def anomaly_settings(given: Mapping[str, Any] | None) -> dict[str, dict[str, float]]:
    """Returns the settings of each kind of anomaly that is looked for.

    Args:
        given: the settings that differ from the defaults, by kind; None or false for a kind turns it off.

    Raises:
        AnomalyError: FG520 if a name is unknown, or a value is not a number that the setting can have.
    """
    found = {kind: dict(values) for kind, values in DEFAULTS.items()}
    if given is not None and not isinstance(given, Mapping):
        raise AnomalyError(f"settings are {given!r}: give a mapping, such as {{spike: {{ratio: 2}}}}").about("settings")
    for kind, values in (given or {}).items():
        if kind not in DEFAULTS:
            raise AnomalyError(f"there is no anomaly {kind!r}", hint=nearest(str(kind), [*DEFAULTS])).about("settings")
        if values is None or values is False:
            del found[kind]
            continue
        for name, value in ({} if values is True else _as_mapping(kind, values)).items():
            if name not in DEFAULTS[kind]:
                hint = nearest(str(name), [*DEFAULTS[kind]])
                raise AnomalyError(f"anomaly {kind!r} has no setting {name!r}", hint=hint).about("settings")
            least, is_whole = _LEAST.get(name, 0), isinstance(DEFAULTS[kind][name], int)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and least < value < _MOST
            if not is_number or (is_whole and value != int(value)):
                what = f"a {'whole ' if is_whole else ''}number above {least:g}"
                message = f"{name} of anomaly {kind!r} is {value!r:.80}, and must be {what}"
                raise AnomalyError(message).about("settings")
            found[kind][name] = value
    return found


def _as_mapping(kind: str, values: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        shown = ", ".join(DEFAULTS[kind]) or "no settings"
        message = f"anomaly {kind!r} is set to {values!r}"
        raise AnomalyError(message, hint=f"give a mapping ({shown}), or false to turn it off").about("settings")
    return values


class _Recent:
    """The values of recent steps; a limit above which a value is unusual."""

    def __init__(self, settings: Mapping[str, float]) -> None:
        self._settings = settings
        self.values: deque[float] = deque(maxlen=max(2, int(settings["window"])))
        self.quiet_until = 0

    @property
    def is_filled(self) -> bool:
        # Half a window: the first, steep steps of a run are no measure.
        return 2 * len(self.values) >= (self.values.maxlen or 0)

    def median(self) -> float:
        return median(self.values)

    def exceeds(self, value: float) -> float | None:
        """Returns the usual value if a value is far above it; otherwise None."""
        if not self.is_filled:
            return None
        usual = self.median()
        # The deviation costs as much as the median, and few values get this far.
        if value - usual <= (self._settings["ratio"] - 1) * abs(usual):
            return None
        return usual if value - usual > self._settings["deviations"] * _deviation(self.values) else None

    def found_again(self, step: int) -> bool:
        """Returns whether this kind was found within the last window, and notes that it is found now."""
        is_known, self.quiet_until = step < self.quiet_until, step + (self.values.maxlen or 0)
        return is_known


def _deviation(values: Sequence[float] | deque[float]) -> float:
    """Returns a robust estimate of the standard deviation."""
    middle = median(values)
    return _MAD_OF_NORMAL * median([abs(value - middle) for value in values])


class _High:
    """Finds single values that are far above the usual ones: spikes of the loss, explosions of the gradient."""

    def __init__(self, kind: str, field: str, title: str, settings: Mapping[str, float]) -> None:
        self._kind, self._field, self._title = kind, field, title
        self._recent = _Recent(settings)

    def observe(self, record: StepRecord) -> Anomaly | None:
        """Takes the record of a step, and returns an anomaly if one begins with it."""
        value = getattr(record, self._field)
        if value is None or not math.isfinite(value):
            return None
        usual = self._recent.exceeds(value)
        number = len(self._recent.values)
        self._recent.values.append(value)
        if usual is None or self._recent.found_again(record.step):
            return None
        message = f"{self._title} is {value:.4g}; the median of the last {number} steps is {usual:.4g}"
        return Anomaly(self._kind, record.step, message, value, usual)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self._recent.values), "quiet_until": self._recent.quiet_until}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._recent.values.clear()
        self._recent.values.extend(state["values"])
        self._recent.quiet_until = state["quiet_until"]


class _NotFinite:
    """Finds losses and norms that are not finite, and steps that the guard of the trainer refused."""

    def __init__(self) -> None:
        self._told: str | None = None

    def observe(self, record: StepRecord) -> Anomaly | None:
        """Takes the record of a step, and returns an anomaly if one begins with it."""
        values = (("the loss", record.loss), ("the norm of the gradients", record.grad_norm))
        wrong = [f"{title} is {value}" for title, value in values if value is not None and not math.isfinite(value)]
        message = record.bad or next(iter(wrong), "")
        kind = "explosion" if "standard deviation" in message else "not_finite"
        told, self._told = self._told, kind if message else None
        return Anomaly(kind, record.step, message) if message and kind != told else None

    def state_dict(self) -> dict[str, Any]:
        return {"told": self._told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Earlier releases stored nothing.
        self._told = state.get("told")


_PARTS = {
    "data_seconds": "waiting for data",
    "forward_backward_seconds": "forward and backward passes",
    "sync_seconds": "waiting for other ranks",
    "update_seconds": "the optimizer step",
}


class _Slow:
    """Finds steps in a row that take much longer than usual, also per token."""

    def __init__(self, settings: Mapping[str, float]) -> None:
        self._settings = settings
        self._seconds = _Recent(settings)
        self._per_token = _Recent(settings)
        self._slow: deque[StepRecord] = deque(maxlen=self._seconds.values.maxlen)
        self._num_slow = 0
        self._lost = 0.0
        self._num_usual = 0
        self._is_told = False

    def observe(self, record: StepRecord) -> Anomaly | None:
        """Takes the record of a step, and returns an anomaly if one begins with it."""
        if record.bad is not None or record.seconds <= 0:
            return None
        per_token = record.seconds / max(record.num_tokens, 1)
        if not self._is_slow(record.seconds, per_token):
            self._seconds.values.append(record.seconds)
            self._per_token.values.append(per_token)
            self._slow.clear()
            self._num_slow, self._lost = 0, 0.0
            self._num_usual += 1
            # Not at the first usual step: a machine that is slow now and then is reported once.
            self._is_told = self._is_told and 2 * self._num_usual < self._settings["window"]
            return None
        # Slow steps stay out of what is usual, so that they are found once and until they end.
        self._num_usual = 0
        if self._is_told:
            return None
        usual = self._seconds.median()
        self._slow.append(record)
        self._num_slow += 1
        self._lost += record.seconds - usual
        if self._num_slow < self._settings["steps"] or self._lost < self._settings["seconds"]:
            return None
        self._is_told = True
        return self._anomaly(record.step, usual)

    def _is_slow(self, seconds: float, per_token: float) -> bool:
        # Also per token: a step of long rows takes long without being slow.
        pairs = ((self._seconds, seconds), (self._per_token, per_token))
        return all(known.is_filled and value > self._settings["ratio"] * known.median() for known, value in pairs)

    def _anomaly(self, step: int, usual: float) -> Anomaly:
        now = median(slow.seconds for slow in self._slow)
        sums = {name: sum(getattr(slow, name) for slow in self._slow) for name in _PARTS}
        part = _PARTS[max(sums, key=sums.__getitem__)]
        message = (
            f"the last {self._num_slow} steps took {now:.3g} s each, mostly {part}; the median before is {usual:.3g} s"
        )
        return Anomaly("throughput", step, message, now, usual)

    def state_dict(self) -> dict[str, Any]:
        # Seconds belong to the machine, and a resumed run may have another one.
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.__init__(self._settings)  # type: ignore[misc]


class _Trend:
    """The losses of a window of steps, looked at ten times per window: the base of plateau and divergence.

    A long window is stored as means of equally many steps, so that its size is bounded.
    """

    def __init__(self, settings: Mapping[str, float], max_steps: int) -> None:
        size = settings["window"]
        if size < 1:
            size = max(size * max_steps, settings["least_window"])
        self._settings = settings
        self._each = max(1, int(size) // _MOST_MEANS)
        self._means: deque[float] = deque(maxlen=max(4, int(size) // self._each))
        self._open: list[float] = []
        self._seen = 0
        self._is_told = False

    def observe(self, record: StepRecord) -> Anomaly | None:
        """Takes the record of a step, and returns an anomaly if one begins with it."""
        if record.loss is None or not math.isfinite(record.loss):
            return None
        self._open.append(record.loss)
        if len(self._open) < self._each:
            return None
        self._means.append(math.fsum(self._open) / len(self._open))
        self._open = []
        self._seen += 1
        size = self._means.maxlen or 0
        if len(self._means) < self._least or self._seen % max(1, size // 10):
            return None
        found = self._look(record.step)
        is_new, self._is_told = found is not None and not self._is_told, found is not None
        return found if is_new else None

    @property
    def _least(self) -> int:
        return self._means.maxlen or 0

    def _look(self, step: int) -> Anomaly | None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"means": list(self._means), "open": self._open, "seen": self._seen, "is_told": self._is_told}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._means.clear()
        self._means.extend(state["means"])
        self._open, self._seen, self._is_told = [*state["open"]], state["seen"], state["is_told"]


def _error(values: Sequence[float]) -> float:
    """Returns the standard error of the median of values."""
    return _MEDIAN_ERROR * _deviation(values) / math.sqrt(len(values))


class _Plateau(_Trend):
    """Finds that the loss of the second half of a window is certainly not better than that of the first half."""

    def _look(self, step: int) -> Anomaly | None:
        means = [*self._means]
        half = len(means) // 2
        before, now = means[:half], means[half:]
        was, level = median(before), median(now)
        least = self._settings["improvement"] * abs(was)
        error = 3 * math.hypot(_error(before), _error(now))
        # Noise that hides an improvement is no plateau, and neither is a rise.
        if was - level + error >= least or level - was > error + least:
            return None
        message = (
            f"the loss has not improved over {len(means) * self._each} steps: its median is {level:.4g} in the second "
            f"half of them, and {was:.4g} in the first"
        )
        return Anomaly("plateau", step, message, level, was)


class _Divergence(_Trend):
    """Finds that the level of the loss, over half a window, is certainly above the lowest level of the run."""

    def __init__(self, settings: Mapping[str, float], max_steps: int) -> None:
        super().__init__(settings, max_steps)
        self._lowest: tuple[float, float] | None = None

    @property
    def _least(self) -> int:
        return super()._least // 2

    def _look(self, step: int) -> Anomaly | None:
        recent = [*self._means][-((self._means.maxlen or 0) // 2) :]
        level, error = median(recent), _error(recent)
        if self._lowest is None or level < self._lowest[0]:
            self._lowest = (level, error)
            return None
        lowest, known = self._lowest
        if level - lowest <= max((self._settings["ratio"] - 1) * abs(lowest), _CERTAIN * math.hypot(error, known)):
            return None
        number = len(recent) * self._each
        message = f"the loss rises: its median over the last {number} steps is {level:.4g}; the lowest was {lowest:.4g}"
        return Anomaly("divergence", step, message, level, lowest)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"lowest": self._lowest and [*self._lowest]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._lowest = state["lowest"] and tuple(state["lowest"])


class AnomalyDetector:
    """Finds the anomalies of a run.

    Args:
        settings: what `anomaly_settings` returns.
        max_steps: the number of steps of the run, of which windows below 1 are a fraction.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, float]], max_steps: int) -> None:
        makers: dict[str, Any] = {
            "not_finite": lambda _: _NotFinite(),
            "spike": lambda given: _High("spike", "loss", "the loss", given),
            "explosion": lambda given: _High("explosion", "grad_norm", "the norm of the gradients", given),
            "throughput": _Slow,
            "plateau": lambda given: _Plateau(given, max_steps),
            "divergence": lambda given: _Divergence(given, max_steps),
        }
        self._parts = {kind: makers[kind](given) for kind, given in settings.items()}

    def observe(self, record: StepRecord) -> list[Anomaly]:
        """Returns the anomalies that are found with the record of the next step."""
        return [found for part in self._parts.values() if (found := part.observe(record)) is not None]

    def state_dict(self) -> dict[str, Any]:
        """Returns what later findings depend on, as JSON data. Times of steps are left out."""
        return {kind: part.state_dict() for kind, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned; kinds that only one of both has are ignored."""
        for kind in self._parts.keys() & state.keys():
            self._parts[kind].load_state_dict(state[kind])
