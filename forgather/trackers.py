"""The trackers that `report_to` may name: what each needs, and which environment variables must not be set with it.

The input is names of trackers and the environment; the output is a `Fault` for each name that a run cannot report to.
The check before a run and the trainers read the same facts. Nothing is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from forgather.errors import nearest
from forgather.requirements import needed_distribution

NONE, ALL = "none", "all"
_ON = ("true", "1", "yes", "on")
_CANONICAL = {"comet": "comet_ml"}
_USUAL = "tensorboard, wandb, mlflow, trackio, aim, comet_ml, none"


class Tracker(NamedTuple):
    """What a tracker needs.

    Args:
        distribution: the distribution that contains its library; "" for a tracker that needs nothing more.
        refused: the environment variables that make the callback of transformers do what a run of Forgather must not
            do, with the values that ask for it.
        instead: what to do in place of that.
    """

    distribution: str = ""
    refused: Mapping[str, tuple[str, ...]] = {}
    instead: str = ""


_UPLOAD = "the model and its checkpoints stay in the output folder, from which they can be uploaded after the run"
TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": Tracker(),
    "wandb": Tracker(
        "wandb",
        {"WANDB_LOG_MODEL": ("end", "checkpoint"), "WANDB_WATCH": ("all", "gradients", "parameters")},
        f"{_UPLOAD}; the gradient norm is reported in any case",
    ),
    "mlflow": Tracker("mlflow", {"HF_MLFLOW_LOG_ARTIFACTS": _ON}, _UPLOAD),
    "trackio": Tracker("trackio"),
    "aim": Tracker("aim"),
    "comet_ml": Tracker("comet-ml", {"COMET_LOG_ASSETS": _ON}, _UPLOAD),
    # Those of transformers that nothing here is written for: its own callback, behind the same guard.
    "azure_ml": Tracker("azureml-core"),
    "clearml": Tracker("clearml"),
    "codecarbon": Tracker("codecarbon"),
    "dagshub": Tracker("dagshub"),
    "dvclive": Tracker("dvclive"),
    "flyte": Tracker("flytekit"),
    "kubeflow": Tracker(),
    "neptune": Tracker("neptune"),
    "swanlab": Tracker("swanlab"),
}


class Fault(NamedTuple):
    """Why a run cannot report to a tracker.

    Args:
        code: the error code.
        message: what was found.
        hint: what to do.
    """

    code: str
    message: str
    hint: str


def named_trackers(report_to: str | Iterable[str] | None) -> list[str]:
    """Returns the trackers that `report_to` names, each once; those of "all" are the ones that are installed.

    Args:
        report_to: one name, several, or None.

    Example:
        >>> named_trackers("comet"), named_trackers(["none"]), named_trackers(["wandb", "aim", "wandb"])
        (['comet_ml'], [], ['wandb', 'aim'])
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names: dict[str, None] = {}
    for name in given:
        if name == ALL:
            names |= dict.fromkeys(["tensorboard", *filter(_is_installed, TRACKERS)])
        elif name != NONE:
            names[_CANONICAL.get(name, name)] = None
    return list(names)


def tracker_faults(report_to: str | Iterable[str] | None, environ: Mapping[str, str]) -> Iterator[Fault]:
    """Yields why a run cannot report to the trackers that `report_to` names.

    Args:
        report_to: the value of the setting.
        environ: the environment variables.
    """
    for name in named_trackers(report_to):
        if name not in TRACKERS:
            hint = nearest(name, [*TRACKERS, *_CANONICAL, ALL, NONE]) or f"one of: {_USUAL}"
            message = f"report_to names {name!r}, and there is no tracker of this name"
            yield Fault("FG583", message, hint)
            continue
        tracker = TRACKERS[name]
        needed = needed_distribution(tracker.distribution) if tracker.distribution else None
        if needed is not None and (lack := needed.lack()) is not None:
            yield Fault("FG881", f"report_to: {name} needs {lack}", f"{needed.hint}, or leave it out")
        for variable, values in tracker.refused.items():
            if (value := environ.get(variable, "")).lower() in values:
                message = f"{variable} is {value!r}, and runs report no more than numbers and settings to {name}"
                yield Fault("FG584", message, f"unset {variable}: {tracker.instead}")


def _is_installed(name: str) -> bool:
    distribution = TRACKERS[name].distribution
    return bool(distribution) and needed_distribution(distribution).lack() is None
