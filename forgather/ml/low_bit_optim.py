"""AdamW of torchao: states of 8 or 4 bits or in float8, and stochastic rounding of weights in bfloat16.

It takes an optimizer of torchao, and changes its class. Invariants: a state is quantized by whole blocks of the rows of
a weight, whatever part of the weight is on this rank, so that an update, and the state dict, do not depend on the
layout; other states are in float32; groups and state dict have numbers and tensors of torch only. torchao is imported
when an optimizer is made.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from forgather.errors import DistributedError, TrainingError
from forgather.requirements import needed_distribution

NAMES = ("adamw_torch_8bit", "adamw_torch_4bit")
"""The names of the optimizers with a state of few bits, as values of `optim`."""
ROUNDED = ("adamw_torch", *NAMES)
"""The values of `optim` that can round weights in bfloat16 at random."""

PARTS = ("codes", "scale")
"""The entries of a quantized state in a state dict."""

_CLASSES = {"adamw_torch": "_AdamW", "adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}
_COMPARED = ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW")
"""The classes of torchao whose runs were compared with a plain loop."""
_BLOCK = 256
_LEAST = 4096


def low_bit_optimizer(
    name: str,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bf16_stochastic_round: bool = False,
) -> Optimizer:
    """Returns an AdamW of torchao.

    Args:
        name: one of `ROUNDED`.
        groups: the parameter groups.
        lr: the learning rate.
        betas: the betas.
        eps: the eps.
        bf16_stochastic_round: whether weights in bfloat16 are rounded up or down at random.

    Raises:
        TrainingError: FG708 if torchao is not installed, or if weights are to be rounded at random and none is in
            bfloat16.

    Source:
        `transformers.Trainer.create_optimizer`, with the same blocks of 256 values.
    """
    needed = needed_distribution("torchao")
    if lack := needed.lack():
        setting, value = ("bf16_stochastic_round", "true") if name == "adamw_torch" else ("optim", repr(name))
        message = f"{setting} is {value}, which needs {lack}"
        raise TrainingError(message, code="FG708", hint=needed.hint).about(setting)
    from torchao import optim  # type: ignore[import-not-found,unused-ignore]

    if bf16_stochastic_round and not any(p.dtype is torch.bfloat16 for group in groups for p in group["params"]):
        raise TrainingError(
            "bf16_stochastic_round is true, and no trained weight is in bfloat16",
            code="FG708",
            hint="make the model with dtype: bfloat16, or remove bf16_stochastic_round",
        ).about("bf16_stochastic_round")
    settings: dict[str, Any] = {} if name == "adamw_torch" else {"block_size": _BLOCK}
    kind = getattr(optim, _CLASSES[name])
    return adopted(kind(groups, lr=lr, betas=betas, eps=eps, bf16_stochastic_round=bf16_stochastic_round, **settings))


def adopted(optimizer: Optimizer) -> Optimizer:
    """Returns an optimizer, which has the invariants of this module if it is an Adam of torchao.

    Args:
        optimizer: an optimizer that has not stepped yet.

    Raises:
        TrainingError: FG708 if it is `CPUOffloadOptimizer` of torchao, or a class of it that was not compared.
        DistributedError: FG708 if it is an Adam of torchao, and weights are divided in another way than by rows.
    """
    kind = type(optimizer)
    if not _is_of_torchao(kind) or isinstance(optimizer, _ByRows):
        return optimizer
    if not hasattr(optimizer, "_new_buffer"):
        raise TrainingError(
            f"{kind.__name__} of torchao keeps its state in a way that no checkpoint here can hold",
            code="FG708",
            hint="use torchao.optim:AdamW8bit, or fsdp_config: {cpu_offload: true} for states in host memory",
        ).about("optim")
    if not any(base.__name__ in _COMPARED for base in kind.__mro__ if _is_of_torchao(base)):
        raise TrainingError(
            f"{kind.__name__} of torchao was not compared with a plain loop",
            code="FG708",
            hint=f"take one of {', '.join(_COMPARED[:-1])}",
        ).about("optim")
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and any(
                not (placement.is_replicate() or placement == Shard(0)) for placement in parameter.placements
            ):
                raise DistributedError(
                    f"{kind.__name__} of torchao quantizes rows of weights, and weights are cut in another way",
                    code="FG708",
                    hint="shard them with fsdp: true alone, or use optim: adamw_torch",
                ).about("optim")
        group["lr"] = _rate(group["lr"], optimizer.defaults.get("lr"))
    # Made here, because the base class is known only now; it keeps the name that messages and checkpoints use.
    optimizer.__class__ = type(kind.__name__, (_ByRows, kind), {})
    return optimizer


def _rate(rate: Any, given: Any) -> float:
    # torchao makes a tensor in float32 of it.
    is_given = isinstance(given, float) and float(torch.tensor(given)) == float(rate)
    return cast(float, given) if is_given else float(rate)


class _ByRows(Optimizer):
    """What this module changes in an Adam of torchao."""

    block_size: float
    _subclass_zeros: Callable[[Tensor, bool, float], Tensor]

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Returns zeros for the state of a weight; torchao would decide by the part that is on this rank."""
        local = p.to_local() if isinstance(p, DTensor) else p
        if is_quantized(p.shape, self.block_size) and local.numel():
            zeros = self._subclass_zeros(local, signed, self.block_size)
        else:
            zeros = torch.zeros_like(local, dtype=torch.promote_types(local.dtype, torch.float32))
        return _placed(zeros, p, p.shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the weights, and returns the result of `closure`.

        Args:
            closure: a function that recomputes the loss; None recomputes nothing.
        """
        kept = [(group, group["lr"], group["params"]) for group in self.param_groups]
        # A trace of shapes would compile its own tensors.
        traced = any(_has_shape_only(p) for group in self.param_groups for p in group["params"][:1])
        locals_: list[Tensor] = []
        try:
            for group, rate, parameters in kept:
                # The compiled update reads a tensor; a number would be a constant of it.
                group["lr"] = torch.tensor(float(rate), dtype=torch.float32)
                group["params"] = [self._local(p, group, locals_) for p in parameters]
            with torch.compiler.set_stance("force_eager") if traced else contextlib.nullcontext():
                return super().step(closure)
        finally:
            for local in locals_:
                self.state.pop(local, None)
            for group, rate, parameters in kept:
                group["lr"], group["params"] = rate, parameters

    def _local(self, parameter: Tensor, group: Mapping[str, Any], locals_: list[Tensor]) -> Tensor:
        """Returns what is stepped: the local part of a DTensor, whose operators refuse quantized states in bfloat16."""
        if not isinstance(parameter, DTensor) or parameter.grad is None:
            return parameter
        state = self.state[parameter]
        if not state:
            names = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else []))
            state["step"] = torch.tensor(0.0)
            state.update({name: self._new_buffer(parameter, name == "exp_avg") for name in names})
        local = parameter.to_local().detach()
        locals_.append(local)
        if local.numel():
            local.grad = cast(DTensor, parameter.grad).redistribute(placements=parameter.placements).to_local()
            self.state[local] = {
                name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()
            }
        else:
            state["step"] += 1
        return local

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; a quantized one as its codes and scales, by the rows of the weight."""
        packed = Optimizer.state_dict(self)
        state = {
            number: {name: self._parts(value) for name, value in entry.items()}
            for number, entry in packed["state"].items()
        }
        return {**packed, "state": state}

    def _parts(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_quantized(value.shape, self.block_size):
            return value
        local: Any = value.to_local() if isinstance(value, DTensor) else value
        rows = local.shape[0]
        if not local.numel():
            like: Any = self._subclass_zeros(local.new_zeros(1, *local.shape[1:]), True, self.block_size)
            parts = {name: _bytes_of(getattr(like, name)).reshape(1, -1)[:0] for name in PARTS}
        else:
            parts = {name: _bytes_of(getattr(local, name)).reshape(rows, -1) for name in PARTS}
        return {name: _placed(part, value, (value.shape[0], part.shape[1])) for name, part in parts.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the parameter groups and the state.

        Args:
            state_dict: what `state_dict` returned, with the same parameters.

        Raises:
            ValueError: if the state is that of another optimizer or has blocks of another size.
        """
        super().load_state_dict({**state_dict, "state": {}})
        for group in self.param_groups:
            group["lr"] = float(group["lr"])
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for parameter, number in zip(parameters, numbers, strict=True):
            if number in state_dict["state"]:
                entry = state_dict["state"][number]
                self.state[parameter] = {name: self._restored(name, value, parameter) for name, value in entry.items()}

    def _restored(self, name: str, value: Any, parameter: Tensor) -> Any:
        if name == "step":
            return torch.as_tensor(value, dtype=torch.float32).clone()
        is_whole = not is_quantized(parameter.shape, self.block_size)
        if is_whole == isinstance(value, Mapping):
            raise ValueError(f"the state of a weight of shape {tuple(parameter.shape)} is quantized in one of both")
        if is_whole:
            return value
        there = self._new_buffer(parameter, name == "exp_avg")
        local: Any = there.to_local() if isinstance(there, DTensor) else there
        for part in PARTS if local.numel() else ():
            stored = value[part].to_local() if isinstance(value[part], DTensor) else value[part]
            own = _bytes_of(getattr(local, part))
            if stored.numel() != own.numel():
                raise ValueError(f"a state has {stored.numel()} {part} for {own.numel()}: another size of blocks")
            own.copy_(stored.reshape(own.shape))
        return there


def is_quantized(shape: torch.Size, block_size: float) -> bool:
    """Returns whether the state of a weight is quantized: a matrix of at least 4,096 values, in rows of whole blocks.

    Args:
        shape: the shape of the whole weight.
        block_size: the number of values with one scale; infinite if no state is quantized.
    """
    return (
        len(shape) >= 2 and math.isfinite(block_size) and shape.numel() >= _LEAST and not shape[1:].numel() % block_size
    )


def plain_parts(value: Tensor) -> list[Tensor]:
    """Returns the tensors of which a tensor of a library consists, such as the codes and scales of a quantized state.

    Args:
        value: a tensor, whose local part is taken if it is a DTensor.

    Shapes:
        value: any. Returns the shapes of the parts; a plain tensor is its own part.
    """
    local = value.to_local() if isinstance(value, DTensor) else value
    names = getattr(local, "tensor_attrs", None)
    return [local] if names is None else [getattr(local, name) for name in names]


def refuse_copies(optimizer: Optimizer, strategy: str, world_size: int) -> None:
    """Raises an error if an optimizer rounds weights at random of which several processes have copies.

    Args:
        optimizer: the optimizer.
        strategy: the title of the strategy.
        world_size: the number of processes.

    Raises:
        DistributedError: FG708 if it does.
    """
    if isinstance(optimizer, _ByRows) and getattr(optimizer, "bf16_stochastic_round", False):
        raise DistributedError(
            f"bf16_stochastic_round is true, and {strategy} with {world_size} processes has copies of weights, which "
            "each process would round in another way",
            code="FG708",
            hint="shard all weights with fsdp: full_shard, or remove bf16_stochastic_round",
        ).about("bf16_stochastic_round")


def refuse_untested(optimizer: Optimizer, place: str) -> None:
    """Raises an error if an optimizer of torchao is used where it was not shown to be right.

    Args:
        optimizer: the optimizer.
        place: what contains or steps it, as the end of a sentence.

    Raises:
        DistributedError: FG708 if it is one.
    """
    if _is_of_torchao(type(optimizer)):
        raise DistributedError(
            f"{type(optimizer).__name__} of torchao was not shown to be right {place}",
            code="FG708",
            hint="use torch.optim:AdamW, or train with trainers/accel_trainer.yaml and, at most, fsdp: true",
        ).about("optimizer_factory")


def refuse_rounding(args: Any, factory: Any, *, has_adapter: bool) -> None:
    """Raises an error if weights are to be rounded at random by an optimizer, or in a model, that does not do it.

    Args:
        args: the training arguments, ours or those of transformers.
        factory: the optimizer factory; None for the optimizer that the arguments name.
        has_adapter: whether the model has an adapter.

    Raises:
        TrainingError: FG708 if they are.
    """
    if not getattr(args, "bf16_stochastic_round", False):
        return
    if has_adapter:
        raise TrainingError(
            "bf16_stochastic_round is true, and it was not compared with a plain loop with an adapter",
            code="FG708",
            hint="remove bf16_stochastic_round",
        ).about("bf16_stochastic_round")
    if factory is not None:
        raise TrainingError(
            "bf16_stochastic_round is true, and an optimizer_factory makes the optimizer",
            code="FG708",
            hint="give bf16_stochastic_round: true to torchao.optim:AdamW8bit, or set optimizer_factory to null",
        ).about("bf16_stochastic_round")


def refuse_uncompared(optimizer: Optimizer, model: nn.Module, args: Any) -> None:
    """Raises an error if an optimizer of torchao would step a model with which it was not compared.

    Args:
        optimizer: the optimizer.
        model: the model.
        args: the training arguments, ours or those of transformers.

    Raises:
        DistributedError: FG708 if rows are divided, or if the base model is quantized.
    """
    if getattr(args, "context_parallel_size", 1) > 1:
        refuse_untested(optimizer, "with divided rows")
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        refuse_untested(optimizer, "with a quantized base model")


def _is_of_torchao(kind: type) -> bool:
    # Also a class that a user has derived from one.
    return any(base.__module__.startswith("torchao.") for base in kind.__mro__)


def _placed(local: Tensor, like: Tensor, shape: Iterable[int]) -> Tensor:
    """Returns a local part as a tensor on the ranks of another one."""
    if not isinstance(like, DTensor):
        return local
    whole = torch.Size(shape)
    stride = tuple(math.prod(whole[place + 1 :]) for place in range(len(whole)))
    made: Tensor = DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole, stride=stride
    )
    # With weights in host memory, torch moves the part to the device of the mesh.
    return made.to(like.to_local().device)


def _bytes_of(part: Tensor) -> Tensor:
    # gloo and files know no float8.
    return part.view(torch.uint8) if part.dtype.itemsize == 1 else part


def _has_shape_only(parameter: nn.Parameter) -> bool:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.is_meta or isinstance(local.data, FakeTensor)
