"""Tensor parallelism: the weights of layers are cut into slices over several ranks.

The model is on the meta device. A plan maps module names to slicing styles. Afterwards the sliced weights are DTensors.
If a name or a size in the plan does not fit the model, nothing is sliced. Tied weights are not sliced and stay tied.
Logits are whole on every rank.

Source:
    The styles are those of `base_model_tp_plan` in transformers. Slicing is done by torch's `parallelize_module`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from forgather.errors import DistributedError, nearest
from forgather.ml.log import get_logger

_log = get_logger(__name__)

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
}
# Whole on every rank, and used by one slice of the heads each, so that the gradient is the sum over ranks.
_GRAD_ALL_REDUCE = "replicated_with_grad_allreduce"
_WORDS = (*_STYLES, _GRAD_ALL_REDUCE, "replicate")


def apply_tensor_parallel(model: nn.Module, mesh: DeviceMesh, plan: str | Mapping[str, Any] | None) -> list[nn.Module]:
    """Slices the layers of a model in place, and returns the modules whose gradients must be summed over the mesh axis.

    Args:
        model: the model, which is on the meta device.
        mesh: the mesh axis of the tensor-parallel ranks.
        plan: a mapping of module names (with `*` for a number) to styles. "auto" or None uses the model's own plan.

    Raises:
        DistributedError: FG736 if the model has no plan, or if the plan has an unknown name or style; FG737 if a size
            cannot be divided by the number of ranks.
    """
    # DTensor reports for every gather over two axes that one would suffice; weights sharded over both axes always need
    # two.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    # Logits of a sliced head are views from a custom function, which autograd forbids to change in place: the problem
    # that fully_shard warns of cannot occur.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    styles = _styles_by_module(model, _plan_of(model, plan))
    _refuse_uneven_heads(model, styles, mesh.size())
    _keep_tied_whole(model, styles)
    # All checks come before the first change: a model that is refused is still whole.
    modules = dict(model.named_modules())
    for name, style in styles.items():
        _refuse_uneven(name, modules[name], style, mesh.size())
    for name, style in styles.items():
        if style in _STYLES:
            # Without a broadcast from rank 0: the weights have no values yet.
            parallelize_module(modules[name], mesh, _STYLES[style](), src_data_rank=None)
        elif isinstance(style, ParallelStyle):
            parallelize_module(modules[name], mesh, style, src_data_rank=None)
    return [modules[name] for name, style in styles.items() if style == _GRAD_ALL_REDUCE]


def _plan_of(model: nn.Module, plan: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    if isinstance(plan, Mapping):
        return plan
    found = getattr(model, "_tp_plan", None)
    if not found:
        raise DistributedError(
            f"{type(model).__name__} has no tensor-parallel plan of its own",
            code="FG736",
            hint='give tp_plan: {"layers.*.attention.query": "colwise", "layers.*.attention.output": "rowwise"} with '
            "the names of its linear layers, or shard its weights instead (fsdp: true)",
        ).about("tp_plan")
    return dict(found)


def _styles_by_module(model: nn.Module, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the style of each module that matches a name in the plan."""
    names = [name for name, _ in model.named_modules() if name]
    parameters = {name for name, _ in model.named_parameters()}
    styles: dict[str, Any] = {}
    for pattern, style in plan.items():
        if not isinstance(style, ParallelStyle) and style not in _WORDS:
            raise DistributedError(
                f"the tensor plan gives {pattern!r} the style {style!r}, which does not support training",
                code="FG736",
                hint=nearest(str(style), _WORDS) or "one of: " + ", ".join(_WORDS),
            ).about("tp_plan")
        known = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+") + "$")
        matching = [name for name in names if known.match(name)]
        # transformers' plans name parameters too, to say that they stay whole.
        if not matching and any(known.match(name) for name in parameters) and style == "replicate":
            continue
        if not matching:
            raise DistributedError(
                f"the tensor plan names {pattern!r}, and {type(model).__name__} has no such module",
                code="FG736",
                hint=nearest(pattern, _sliceable_modules(model)),
            ).about("tp_plan")
        styles |= dict.fromkeys(matching, style)
    return styles


def _sliceable_modules(model: nn.Module) -> list[str]:
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Embedding)]
    return sorted({re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names})


def _refuse_uneven_heads(model: nn.Module, styles: Mapping[str, Any], size: int) -> None:
    config: Any = getattr(model, "config", None)
    if not any(style == "colwise" for style in styles.values()):
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        # A rank gets whole heads: attention reshapes its slice of a projection to heads.
        heads = getattr(config, name, None)
        if isinstance(heads, int) and heads % size:
            raise DistributedError(
                f"{name} is {heads}, which cannot be split evenly over {size} ranks",
                code="FG737",
                hint=f"give a tensor_parallel_size that divides {heads}",
                expected=heads,
                found=size,
            ).about("tensor_parallel_size")


def _refuse_uneven(name: str, module: nn.Module, style: Any, size: int) -> None:
    attribute = {"colwise": "out_features", "rowwise": "in_features", "rowwise_split_input": "in_features"}
    if style in _STYLES and not isinstance(module, nn.Linear | nn.Embedding):
        raise DistributedError(
            f"the tensor plan cuts {name!r}, which is a {type(module).__name__}",
            code="FG736",
            hint="torch splits nn.Linear and nn.Embedding only; shard the weights of this model instead (fsdp: true)",
        ).about("tp_plan")
    features = getattr(module, attribute.get(style, ""), None) if isinstance(style, str) else None
    if isinstance(features, int) and features % size:
        raise DistributedError(
            f"{name!r} has {attribute[style]} {features}, which cannot be split evenly over {size} ranks",
            code="FG737",
            hint=f"give a tensor_parallel_size that divides {features}, or leave the layer out of tp_plan",
            expected=features,
            found=size,
        ).about("tensor_parallel_size")


def _keep_tied_whole(model: nn.Module, styles: dict[str, Any]) -> None:
    """Removes the modules with tied weights from the plan, since slicing would turn a tied weight into two weights."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        planned = [name for name in names if styles.get(name) in _STYLES]
        if len(names) > 1 and planned:
            for name in planned:
                del styles[name]
            _log.warning("the tensor plan leaves %s whole: they are tied to one weight", " and ".join(sorted(names)))
