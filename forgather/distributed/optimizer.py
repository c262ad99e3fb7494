"""ZeRO of a script, and the optimizer that a script has made.

`without_stage_0` takes the training arguments of a script that asks for ZeRO, and gives those of a trainer.
`read_optimizer` takes an optimizer of torch, and gives the text of a config that makes the same one for the weights as
the trainer holds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from forgather.distributed.script_config import is_plain, yaml_text
from forgather.errors import TrainingError
from forgather.value_text import is_one_of, shown

_ZERO = "zero_optimization"
OPTIMIZER_VARIABLE = "optimizer_factory"


def without_stage_0(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns training arguments in which stage 0 of ZeRO, which is plain data parallelism, asks for no DeepSpeed.

    Args:
        settings: the training arguments, with `deepspeed` as the script gives it.

    Raises:
        TrainingError: FG811 if the script asks DeepSpeed for something else at stage 0.
    """
    deepspeed = settings.get("deepspeed")
    zero = deepspeed.get(_ZERO) if isinstance(deepspeed, Mapping) else None
    if (
        not isinstance(deepspeed, Mapping)
        or not isinstance(zero, Mapping)
        or not is_one_of(zero.get("stage"), (0, 0.0))
    ):
        return dict(settings)
    for name, value in {**deepspeed, **zero}.items():
        if name not in (_ZERO, "stage") and not is_one_of(value, (None, False, {}, 0, 0.0)):
            raise TrainingError(
                f"{name} is {shown(value)}, and zero_stage is 0, which trains without DeepSpeed",
                code="FG811",
                hint=f"leave {name} out, or write zero_stage: 1, 2 or 3",
            ).about(name)
    return {name: value for name, value in settings.items() if name not in ("deepspeed", "strict")}


class ScriptOptimizer(NamedTuple):
    """An optimizer of a script, as a config has it.

    Args:
        text: the text of the block `optimizer`.
        variables: the values of the variables that the text reads.
        learning_rate: the learning rate of the optimizer, or None if it has none.
    """

    text: str
    variables: Mapping[str, Any]
    learning_rate: float | None


def read_optimizer(optimizer: Any, settings: Mapping[str, Any], model: Any) -> ScriptOptimizer:
    """Returns an optimizer of a script, as a config has it.

    One group with plain values is written out. Several groups, or values that are no plain data, become a variable: a
    function that makes the groups by the names of the weights.

    Args:
        optimizer: an optimizer of torch over weights of the model, which has not stepped yet.
        settings: the settings that the script gives; a learning rate must be that of the optimizer.
        model: the model.

    Raises:
        TrainingError: FG819 if the optimizer cannot be made again; FG812 if the script gives another learning rate.
    """
    rebuilt = import_module("forgather.ml.rebuilt_optimizer").RebuiltOptimizer(optimizer, model)
    rates = sorted({group["lr"] for group in optimizer.param_groups if "lr" in group})
    if rates and settings.get("learning_rate", rates[0]) not in rates:
        raise TrainingError(
            f"learning_rate is {settings['learning_rate']}, and the optimizer has {', '.join(map(str, rates))}",
            code="FG812",
            hint="keep one of them",
        ).about("learning_rate")
    rate = optimizer.defaults.get("lr")
    keywords = rebuilt.keywords
    if rebuilt.is_one_group and is_plain(keywords):
        lines = [f"{name}: {yaml_text(value, name)}" for name, value in keywords.items()]
        return ScriptOptimizer("\n".join([f"!partial:{rebuilt.constructor}", *lines]), {}, rate)
    return ScriptOptimizer(f"!var {OPTIMIZER_VARIABLE}", {OPTIMIZER_VARIABLE: rebuilt}, rate)
