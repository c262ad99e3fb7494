"""Makes the optimizer and the learning rate schedule of a run, and estimates the size of the optimizer state.

The training arguments define the default optimizer and schedule; factories that the user gives replace them. Values
that a factory sets itself take precedence over the training arguments. A warning reports a learning rate of the
arguments that has no effect.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers.optimization import Adafactor, get_scheduler

from forgather.errors import TrainingError
from forgather.ml import bitsandbytes_optim, low_bit_optim
from forgather.ml.adapter_base import is_peft_model
from forgather.ml.host_reads import host_can_read
from forgather.ml.log import get_logger
from forgather.ml.optim import decay_groups, split_for_loraplus
from forgather.ml.strategy.optimizer_step import by_mesh, inner_optimizers
from forgather.ml.strategy.state import names_of
from forgather.ml.trainer.argument_checks import TRANSFORMERS_DEFAULTS
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.parameter_groups import ParameterGroups
from forgather.value_text import shown

_log = get_logger(__name__)

_NAMED = ("named_parameters", "named_params")
_MODEL = ("model",)


def make_optimizer(
    model: nn.Module,
    args: TrainingArguments | Any,
    factory: Callable[..., Any] | None = None,
    groups: ParameterGroups | None = None,
) -> Optimizer:
    """Returns the optimizer of a run.

    Args:
        model: the model, which must already be on its device, and sharded if the strategy shards it.
        args: the training arguments, which give the learning rate, the weight decay and the name of the default
            optimizer. With a factory, `transformers.TrainingArguments` can be used too.
        factory: the optimizer factory, or None for the default optimizer. It is called with the trainable parameters,
            or with (name, parameter) pairs if its first parameter is called `named_parameters` or `named_params`, or
            with the model if its first parameter is called `model`. It also gets `lr` and `weight_decay` if it accepts
            them and does not set them itself.
        groups: the parameter groups of the training arguments, which split those of the optimizer; None if they are
            left as they are.

    Raises:
        TrainingError: FG819 if the factory does not return an optimizer, or if the optimizer's `step` needs a closure;
            FG820 if the model has no trainable parameters; FG867 if the parameter groups do not fit the optimizer;
            FG972 if LoRA+ is asked for with an optimizer of several; FG708 if weights cannot be rounded at random, or
            an optimizer of torchao cannot be used.
        DistributedError: FG971 or FG708 if weights are sharded that an optimizer of bitsandbytes or torchao cannot
            step.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise TrainingError(
            f"{type(model).__name__} has no trainable parameter",
            code="FG820",
            hint="set requires_grad on what should be trained",
        )
    low_bit_optim.refuse_rounding(args, factory, has_adapter=is_peft_model(model))
    if factory is None:
        return _prepared(_default_optimizer(model, args), named, args, groups)
    wanted = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    parameters = _parameters_of(factory)
    first = next(iter(parameters), "")
    given: Any = model if first in _MODEL else named if first in _NAMED else [parameter for _, parameter in named]
    optimizer = factory(given, **_unset_arguments(factory, parameters, wanted))
    if not isinstance(optimizer, Optimizer):
        raise TrainingError(
            f"optimizer_factory returned a {type(optimizer).__name__}, which is not a torch optimizer",
            code="FG819",
            hint="give a callable that takes parameters, as !partial:torch.optim:AdamW",
        )
    _refuse_closure(optimizer)
    for inner in inner_optimizers(optimizer):
        if inner is not optimizer:
            low_bit_optim.refuse_untested(inner, f"inside of {type(optimizer).__name__}")
    low_bit_optim.refuse_uncompared(optimizer, model, args)
    optimizer = low_bit_optim.adopted(optimizer)
    _warn_of_conflict(optimizer, args)
    return _prepared(optimizer, named, args, groups)


def _prepared(
    optimizer: Optimizer, named: list[tuple[str, nn.Parameter]], args: Any, groups: ParameterGroups | None
) -> Optimizer:
    if any(isinstance(parameter, DTensor) for _, parameter in named):
        bitsandbytes_optim.refuse_shards(optimizer)
    ratio = getattr(args, "loraplus_lr_ratio", None)
    if ratio is not None:
        if next(inner_optimizers(optimizer)) is not optimizer:
            raise TrainingError(
                f"loraplus_lr_ratio needs an optimizer with one list of groups, and {type(optimizer).__name__} has "
                "optimizers inside",
                code="FG972",
                hint="use AdamW, or leave loraplus_lr_ratio out",
            ).about("loraplus_lr_ratio")
        split_for_loraplus(optimizer, named, ratio=ratio, embedding_lr=args.loraplus_lr_embedding)
    if groups:
        groups.split(optimizer, named)
    for one in inner_optimizers(optimizer):
        _update_meshes_apart(one)
    return optimizer


def _update_meshes_apart(optimizer: Optimizer) -> None:
    """Sets `foreach` for groups whose weights cannot be updated by one operator.

    On a GPU, torch takes it by default even for a group with DTensors and plain tensors, and then fails at the first
    step. `OptimizerStep` gives it the weights of one mesh at a time.
    """
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused") and _several(group["params"]):
            group["foreach"] = not all(host_can_read(parameter.device) for parameter in group["params"])


def _several(parameters: list[nn.Parameter]) -> bool:
    return len(by_mesh(parameters)) > 1


def _refuse_closure(optimizer: Optimizer) -> None:
    # LBFGS and similar ones evaluate the loss several times per step; strategies compute it once.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise TrainingError(
            f"{type(optimizer).__name__} evaluates the model itself (its step() needs a closure)",
            code="FG819",
            hint="give an optimizer whose step() needs nothing, as torch.optim:AdamW",
        )


def _warn_of_conflict(optimizer: Optimizer, args: Any) -> None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    by_default = TRANSFORMERS_DEFAULTS["learning_rate"]
    # Arguments of transformers do not record what the user gave: there only a non-default value counts.
    chosen = "learning_rate" in args.explicit if hasattr(args, "explicit") else args.learning_rate != by_default
    if chosen and args.learning_rate not in rates:
        _log.warning(
            "learning_rate is %g, but the optimizer_factory sets its own (%s), which is used",
            args.learning_rate,
            _rates(rates),
        )


def _default_optimizer(model: nn.Module, args: TrainingArguments) -> Optimizer:
    groups = decay_groups(model, args.weight_decay)
    # torch takes betas of one type only, and a config may say 0.
    lr, betas = args.learning_rate, (float(args.adam_beta1), float(args.adam_beta2))
    trained = [one for group in groups for one in group["params"]]
    if args.optim in low_bit_optim.NAMES or args.bf16_stochastic_round:
        rounded = args.bf16_stochastic_round
        return low_bit_optim.low_bit_optimizer(
            args.optim, groups, lr=lr, betas=betas, eps=args.adam_epsilon, bf16_stochastic_round=rounded
        )
    if args.optim == "adamw_torch_fused":
        # On a CPU, weights of several meshes keep the update of earlier releases.
        return torch.optim.AdamW(
            groups,
            lr=lr,
            betas=betas,
            eps=args.adam_epsilon,
            fused=not _several(trained) or not all(host_can_read(parameter.device) for parameter in trained),
        )
    if args.optim == "adamw_torch":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=args.adam_epsilon)
    if args.optim == "adafactor":
        return Adafactor(groups, lr=lr, scale_parameter=False, relative_step=False)  # type: ignore[no-untyped-call]
    if args.optim in bitsandbytes_optim.NAMES:
        return _bitsandbytes_optimizer(model, groups, args)
    kinds: dict[str, Callable[..., Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
    }
    return kinds[args.optim](groups, lr=lr)


def _bitsandbytes_optimizer(model: nn.Module, groups: list[dict[str, Any]], args: TrainingArguments) -> Optimizer:
    betas = (float(args.adam_beta1), float(args.adam_beta2))
    optimizer = bitsandbytes_optim.bitsandbytes_optimizer(
        args.optim, groups, model, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon
    )
    if bitsandbytes_optim.is_paged_in_vain(args.optim, groups[0]["params"][0].device):
        _log.info("%s: a CPU has no paged memory; the state stays in memory, and the updates are the same", args.optim)
    return optimizer


def refuse_uncallable(**factories: Any) -> None:
    """Raises an error if a factory is not callable. The trainer calls this before it does any work.

    Args:
        **factories: the factories, by the name of the trainer's keyword argument; a factory that is None is ignored.

    Raises:
        TrainingError: FG819 if a factory cannot be called.
    """
    for name, factory in factories.items():
        if factory is not None and not callable(factory):
            raise TrainingError(
                f"{name!r} is {_kind(factory)} {repr(factory)[:60]}, which cannot be called",
                code="FG819",
                hint="give a callable, as !partial:MODULE:NAME; a template needs `-- include 'its name'`",
            ).about(name)


def _kind(value: Any) -> str:
    return "the text" if isinstance(value, str) else f"a {type(value).__name__}:"


def make_schedule(
    optimizer: Optimizer,
    args: TrainingArguments | Any,
    num_training_steps: int,
    factory: Callable[..., Any] | None = None,
) -> Any:
    """Returns the learning rate schedule of a run.

    Args:
        optimizer: the optimizer whose learning rate is scheduled.
        args: the training arguments, which give the name and the settings of the default schedule.
        num_training_steps: the number of optimizer steps of the whole run.
        factory: the schedule factory, or None for the default schedule. It is called with the optimizer, and with
            `num_training_steps` and `num_warmup_steps` if it accepts them and does not set them itself.

    Raises:
        TrainingError: FG819 if the factory does not return a learning rate schedule.
    """
    warmup = args.get_warmup_steps(num_training_steps)
    if factory is None:
        return _noting_rates(_default_schedule(args, optimizer, warmup, num_training_steps))
    parameters = _parameters_of(factory)
    wanted = {"num_training_steps": num_training_steps, "num_warmup_steps": warmup}
    given = _unset_arguments(factory, parameters, wanted)
    schedule = factory(optimizer=optimizer, **given) if "optimizer" in parameters else factory(optimizer, **given)
    # Checked by methods, not by class: schedules of transformers and of users need not derive from torch's.
    if not all(callable(getattr(schedule, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise TrainingError(
            f"lr_scheduler_factory returned a {type(schedule).__name__}, which is not a schedule",
            code="FG819",
            hint="give a callable that takes the optimizer, as !partial:torch.optim.lr_scheduler:CosineAnnealingLR",
        )
    return _noting_rates(schedule)


def _default_schedule(args: TrainingArguments | Any, optimizer: Optimizer, warmup: int, num_training_steps: int) -> Any:
    settings = dict(args.lr_scheduler_kwargs or {})
    try:
        return get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_training_steps, settings)
    except (TypeError, ValueError, ArithmeticError) as error:
        if not settings:
            raise
        raise TrainingError(
            f"lr_scheduler_type {args.lr_scheduler_type} does not take lr_scheduler_kwargs {shown(settings)}: {error}",
            code="FG813",
            hint="see the arguments of this schedule in the documentation of transformers.optimization",
        ).about("args.lr_scheduler_kwargs") from error


def _noting_rates(schedule: Any) -> Any:
    """Returns a schedule, after the rates of the config are in the optimizer's groups, as other schedules do it."""
    if isinstance(schedule, ReduceLROnPlateau):
        for group in schedule.optimizer.param_groups:
            group.setdefault("initial_lr", float(group["lr"]))
    return schedule


def _rates(rates: list[Any]) -> str:
    return ", ".join(f"{float(rate):g}" for rate in dict.fromkeys(rates) if rate is not None)


def _parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a factory's signature.

    If these are only `*args` and `**kwargs`, the parameters of the factory's attribute `func` are returned, which is
    the function that a partial calls.
    """
    for candidate in (factory, getattr(factory, "func", None)):
        if candidate is None:
            continue
        try:
            parameters = inspect.signature(candidate).parameters
        except (TypeError, ValueError):
            continue
        if any(kind.kind not in (kind.VAR_KEYWORD, kind.VAR_POSITIONAL) for kind in parameters.values()):
            return parameters
    return {}


def _unset_arguments(
    factory: Callable[..., Any], parameters: Mapping[str, inspect.Parameter], wanted: Mapping[str, Any]
) -> dict[str, Any]:
    own = getattr(factory, "keywords", None) or {}
    return {name: value for name, value in wanted.items() if name in parameters and name not in own}


_ON_THE_HOST = {"foreach": False, "fused": False, "capturable": False}


def optimizer_bytes(model: nn.Module, optimizer: Any) -> dict[str, int]:
    """Returns the number of bytes that a checkpoint needs for the optimizer state, by parameter name.

    The sizes are found by doing one step with a copy of the optimizer on the meta device, so no memory is allocated.

    Args:
        model: the model, whose parameters and their names are read. A sharded parameter is counted with its full size.
        optimizer: the optimizer, which must not have done a step yet.

    Units:
        Bytes, including file headers and the names in the index of the checkpoint.
    """
    names = names_of(model)
    found: dict[int, dict[str, Any]] = {}
    for part in inner_optimizers(optimizer):
        found |= _state_after_a_step(part)
    return {
        name: _bytes_in_checkpoint(found[number] if number in found else _adam_state(parameter), name)
        for parameter in model.parameters()
        if parameter.requires_grad and (name := names.get(number := id(parameter)))
    }


def _state_after_a_step(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        stand_ins = [_stand_in(parameter) for parameter in group["params"]]
        # Not `copy.deepcopy`: that would copy the parameters. The constructor is not called, as its arguments are not
        # known.
        twin = object.__new__(type(optimizer))
        # Tables are copied: the step may move their tensors to the meta device.
        twin.__dict__ |= {
            name: dict(value) if type(value) is dict else value for name, value in vars(optimizer).items()
        }
        twin.__dict__.pop("step", None)  # a schedule wraps `step` to count the real optimizer's steps
        twin.__dict__ |= {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}
        twin.state = defaultdict(dict)
        twin.param_groups = [{**group, "params": stand_ins, **{n: v for n, v in _ON_THE_HOST.items() if n in group}}]
        has_stepped = False
        # An optimizer creates its state before it computes. On the meta device the computation may fail; the state is
        # there.
        with suppress(Exception):
            twin.step()
            has_stepped = True
        for parameter, stand_in in zip(group["params"], stand_ins, strict=True):
            if has_stepped or stand_in in twin.state:
                found[id(parameter)] = twin.state[stand_in]
    return found


def _stand_in(parameter: Tensor) -> Tensor:
    stand_in = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta", requires_grad=True)
    stand_in.grad = torch.empty_like(stand_in)
    return stand_in


def _adam_state(parameter: Tensor) -> dict[str, Any]:
    # ZeRO stage 3 leaves an empty tensor in place of each weight; `ds_shape` is the shape of the whole.
    shape = getattr(parameter, "ds_shape", parameter.shape)
    return {name: torch.empty(shape, device="meta") for name in ("exp_avg", "exp_avg_sq")}


def _bytes_in_checkpoint(state: dict[str, Any], name: str) -> int:
    # Each tensor also has an entry in the header of its file, and its name in the index.
    return sum(
        sum(part.nbytes + 2 * len(name) + 160 for part in low_bit_optim.plain_parts(value))
        if isinstance(value, Tensor)
        else len(name) + 40
        for value in state.values()
    )
