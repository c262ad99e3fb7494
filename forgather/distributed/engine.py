"""What a script trains: a module, a constructor, a DeepSpeed engine, or what a class of this package has made.

The input is the argument `engine` or `model` of a script; the output is an `Engine`: the text of the block `model` of a
config, the values of its variables, and the settings that come with it.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather.distributed.script_config import is_plain, yaml_text
from forgather.errors import DistributedError, TrainingError
from forgather.launcher_env import process_facts

MODEL_VARIABLE = "model"
# DeepSpeed's names for settings that a trainer has, too.
_LIFTED = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
}


# What an engine without ZeRO may have in its config, and what changes nothing here.
_OF_STAGE_0 = {"zero_optimization", "fp16", "bf16", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"}
_OF_STAGE_0 |= {"steps_per_print", "wall_clock_breakdown"}


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a script trains.

    Args:
        model: the module, or a callable that makes it.
        text: the text of the block `model`.
        variables: the values of the variables that the text reads.
        template: the trainer template.
        settings: the training arguments that belong to the engine.
        words: the mapping that the engine brings, under the words of a script.
        optimizer: the optimizer that the engine brings, or None.
    """

    model: Any
    text: str = f"!var {MODEL_VARIABLE}"
    variables: Mapping[str, Any] = field(default_factory=dict)
    template: str = "accel_trainer"
    settings: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Any = None

    @property
    def is_constructor(self) -> bool:
        """True if the model is made anew for each trainer, and not a module that exists already."""
        return not _is_module(self.model)


def read_engine(engine: Any) -> Engine:
    """Returns what a script trains.

    Args:
        engine: a module, a callable that returns one, a DeepSpeed engine, or an object of this package that has
            `as_engine`.

    Raises:
        TrainingError: FG801 if it is none of these; FG811 if it cannot be taken over.
    """
    as_engine = getattr(engine, "as_engine", None)
    if callable(as_engine):
        found: Engine = as_engine()
        return found
    if _is_module(engine):
        kinds = [kind for kind in type(engine).__mro__ if kind.__module__.split(".")[0] == "deepspeed"]
        if kinds:
            return _of_deepspeed(engine)
        # Every wrapper of torch for several processes; a trainer wraps the model itself.
        if type(engine).__name__ in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
            raise _not_taken(type(engine).__name__, "the trainer wraps the model itself: give the module inside")
        return Engine(model=engine, variables={MODEL_VARIABLE: engine})
    if not callable(engine):
        raise TrainingError(
            f"the model is a {type(engine).__name__}",
            code="FG801",
            hint="give a torch.nn.Module, a class or functools.partial that makes one, or a DeepSpeed engine",
        ).about("model")
    text = constructor_text(engine)
    if text is None:
        return Engine(model=engine, variables={MODEL_VARIABLE: engine})
    return Engine(model=engine, text=text)


def constructor_text(maker: Any) -> str | None:
    """Returns the text of a call that makes the model, or None if a config cannot name the class or the arguments.

    Args:
        maker: a class or a function, or a `functools.partial` of it.
    """
    function, keywords = maker, {}
    if isinstance(maker, functools.partial):
        function = maker.func
        try:
            bound = inspect.signature(function).bind_partial(*maker.args, **maker.keywords)
        except (TypeError, ValueError):
            return None
        keywords = dict(bound.arguments)
        kinds = [inspect.signature(function).parameters[name].kind for name in keywords]
        if any(kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for kind in kinds):
            return None
        for name, kind in zip(list(keywords), kinds, strict=True):
            if kind is inspect.Parameter.VAR_KEYWORD:
                keywords |= keywords.pop(name)
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    # Another process has another `__main__`, and cannot find what is local to a function.
    if module in (None, "__main__") or not name or "<" in name or not is_plain(keywords):
        return None
    named: Any = sys.modules.get(str(module))
    for part in name.split("."):
        named = getattr(named, part, None)
    if named is not function:
        return None
    return "\n".join([f"!partial:{module}:{name}", *(f"{key}: {yaml_text(of, key)}" for key, of in keywords.items())])


def refuse_missing_loss(model: Any, dataset: Any) -> None:
    """Raises an error if a module takes fewer inputs than a row has, and so cannot compute its loss itself.

    Args:
        model: the module, which is trained without a loss of the script.
        dataset: the training data, of which the first row is read.

    Raises:
        TrainingError: FG806 if the first row does not fit the module's `forward`.
    """
    if not _is_module(model) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset)):
        return
    row = dataset[0]
    if not isinstance(row, tuple | list):
        return
    try:
        inspect.signature(model.forward).bind(*row)
    except TypeError:
        raise TrainingError(
            f"a row has {len(row)} items, and {type(model).__name__} does not take all of them: it returns no loss",
            code="FG806",
            hint="give config['loss_fn'], a function of (outputs, targets) such as torch.nn.CrossEntropyLoss()",
        ).about("loss_fn") from None


def refuse_other_processes(count: int, what: str) -> None:
    """Raises an error if the number of processes is not the one that a script states.

    Args:
        count: the number of processes that the script states.
        what: what states it, for the message.

    Raises:
        DistributedError: FG776 if there is one process; FG704 if there is another number of them.
    """
    found = process_facts(os.environ).world_size
    if found != count:
        raise DistributedError(
            f"{what} needs {count} processes, and there {'is one' if found == 1 else f'are {found}'}",
            code="FG776" if found == 1 else "FG704",
            hint=launch_line(count),
        ).about("devices")


def launch_line(count: int, *options: str) -> str:
    """Returns the command that starts this script in several processes.

    Args:
        count: the number of processes.
        *options: further options of torchrun.
    """
    script = os.path.relpath(sys.argv[0]) if sys.argv and sys.argv[0].endswith(".py") else "script.py"
    return " ".join(["start it with: torchrun", *options, "--nproc-per-node", str(count), script])


def _is_module(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def _of_deepspeed(engine: Any) -> Engine:
    """Returns the module, the config and the optimizer of a DeepSpeed engine that has not stepped yet.

    The weights of the module must still be those that the script made: an engine that has cast or split them lost them.
    """
    stage = engine.zero_optimization_stage()
    if engine.global_steps:
        raise _not_taken(
            f"a DeepSpeed engine that has done {engine.global_steps} steps", "give a new one, or its model"
        )
    if stage or engine.fp16_enabled() or engine.bfloat16_enabled():
        what = (
            f"ZeRO stage {stage}, which has taken the weights apart" if stage else "half precision, with cast weights"
        )
        raise _not_taken(
            f"a DeepSpeed engine of {what}",
            "give the model itself, and DeepSpeed's mapping as config: setup_distributed_training(model, "
            "{'deepspeed': {...}})",
        )
    config = {name: value for name, value in engine.config.items() if value not in (None, {}, "auto")}
    words: dict[str, Any] = {_LIFTED[name]: config.pop(name) for name in list(config) if name in _LIFTED}
    # It is the product of the other two and the number of processes.
    config.pop("train_batch_size", None)
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise _not_taken(
                f"a DeepSpeed engine whose config makes the {name}",
                f"leave {name} out of it, and give the model, the optimizer and the mapping to DistributedTrainer",
            )
    left = {name: value for name, value in config.items() if name not in _OF_STAGE_0 and value is not False}
    if left:
        raise _not_taken(
            f"{', '.join(sorted(left))} of a DeepSpeed engine", "give the model itself, and the words of a script"
        )
    words |= {"fp16": False, "zero_stage": 0}
    return Engine(
        model=engine.module,
        variables={MODEL_VARIABLE: engine.module},
        words=words,
        optimizer=getattr(engine, "client_optimizer", None),
    )


def _not_taken(what: str, hint: str) -> TrainingError:
    return TrainingError(f"{what} cannot be taken over", code="FG811", hint=hint).about("engine")
