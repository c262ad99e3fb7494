"""The state of a ZeRO engine by parameter name: capturing it, restoring it, and filling the initial weights at stage 3.

DeepSpeed keeps its state in flat slices, one for each parameter group and rank. `EngineState` converts between these
slices and whole weights and optimizer states, which every layout can read. Each method that gathers or sets state is
collective: every rank must call it, in the same order on every rank. The weights are the float32 weights that the
optimizer steps, even if the model computes in half precision. At stage 3, no rank has more than one whole weight in
memory at a time (except tied weights), the parameters stay the same objects that the optimizer was made with, and tied
weights stay tied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgather.ml.adapter_base import names_of_base
from forgather.ml.checkpoint.reader import CheckpointReader, StoredTensor
from forgather.ml.distributed import collectives
from forgather.ml.strategy.initial_weights import InitialWeights
from forgather.ml.strategy.meta_model import set_tensor, tensors_of
from forgather.ml.strategy.state import (
    LAYOUT_KEYS,
    names_of,
    refuse_other_model,
    refuse_other_optimizer,
    whole_model_state,
)


class EngineState:
    """The state of a ZeRO engine.

    Args:
        deepspeed: the imported module `deepspeed`.
        model: the model in the engine.
        zero: the engine's ZeRO optimizer.
        stage: the ZeRO stage.
        groups: the names of the weights in each parameter group of the optimizer.
    """

    def __init__(
        self, deepspeed: Any, model: nn.Module, zero: Any, *, stage: int, groups: Sequence[Sequence[str]]
    ) -> None:
        self._deepspeed = deepspeed
        self._model = model
        self._zero = zero
        self._stage = stage
        self._groups = [list(names) for names in groups]
        self._initial = [{name: value for name, value in group.items() if name != "params"} for group in self._settings]

    @property
    def _settings(self) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = self._zero.optimizer.param_groups
        return groups

    def _slices(self) -> Iterator[tuple[list[nn.Parameter], nn.Parameter]]:
        """Yields the weights in each flat slice, and the slice."""
        if self._stage == 3:
            yield from zip(self._zero.fp16_groups, self._zero.fp32_partitioned_groups_flat, strict=True)
        else:
            yield from zip(self._zero.bit16_groups, self._zero.single_partition_of_fp32_groups, strict=True)

    def norm(self) -> Tensor:
        """Returns the norm of the gradients before clipping, or infinity if a gradient is not finite.

        Shapes:
            Returns a scalar tensor.
        """
        if self._stage == 3:
            parts = self._zero._get_norm_groups()
            scaled = self._deepspeed.runtime.utils.combine_grad_norm_groups(parts)
        else:
            scaled = self._zero.scaled_global_norm()
        norm = torch.as_tensor(scaled, dtype=torch.float32) / float(self._zero.loss_scale)
        # DeepSpeed marks a norm that is not finite by a negative number.
        return torch.where(norm < 0, torch.full_like(norm, torch.inf), norm)

    def drop_gradients(self) -> None:
        """Drops gradients that were not used for an update."""
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self._stage == 3:
            zero.averaged_gradients = {}
            return
        # Stages 1 and 2 accumulate in buffers of their own, which the next backward pass would add to.
        zero.micro_step_id = -1
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None

    def reset_optimizer(self) -> None:
        """Resets the optimizer: its groups get their initial settings back, and its state tensors become zero."""
        for group, initial in zip(self._settings, self._initial, strict=True):
            params = group["params"]
            group.clear()
            group |= {"params": params, **initial}
        for state in self._zero.optimizer.state.values():
            for value in state.values():
                if isinstance(value, Tensor):
                    value.zero_()

    def weights(self, *, stored_only: bool = False) -> Iterator[tuple[str, Any]]:
        """Yields (name, value) for each entry in the model's state, with sharded weights gathered.

        Collective: every rank must iterate to the end. A tied weight is gathered only once.

        Args:
            stored_only: True to leave out the entries that checkpoints do not keep.

        Shapes:
            value: the shape of the whole weight.
        """
        return whole_model_state(self._model, self._whole_tensor, stored_only=stored_only)

    def _whole_tensor(self, weight: Tensor) -> Tensor:
        if not isinstance(weight, nn.Parameter):
            return weight.detach()
        # Below stage 3 every rank has the whole weight, and only a weight in half precision has a float32 copy.
        if self._stage < 3 and (not weight.requires_grad or weight.dtype == torch.float32):
            return weight.detach()
        if weight.requires_grad:
            master: Tensor = self._deepspeed.utils.safe_get_full_fp32_param(weight)
            return master.detach()
        with self._deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def restore_model(self, saved: CheckpointReader) -> None:
        """Restores weights and buffers, one by one. Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the weights of another model.
        """
        # A checkpoint of an earlier release also has the frozen weights of an adapter's base model.
        left_out = names_of_base(self._model) - saved.weights.keys()
        whole = self._model.state_dict(keep_vars=True)
        present = {name: value for name, value in whole.items() if name not in left_out}
        kind = type(self._model).__name__
        collectives.run_collectively(lambda: refuse_other_model(kind, present, self._shapes(present), saved))
        done: set[int] = set()
        for name, held in present.items():
            if id(held) in done:
                continue
            done.add(id(held))
            if isinstance(held, nn.Parameter):
                self._set_weight(held, saved.whole(saved.weights[name]))
            elif isinstance(held, Tensor):
                saved.read(saved.weights[name], held)
            else:
                self._model.load_state_dict({name: saved.extra[name]}, strict=False)

    def _shapes(self, present: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        tensors = {name: value for name, value in present.items() if isinstance(value, Tensor)}
        return {name: tuple(getattr(value, "ds_shape", value.shape)) for name, value in tensors.items()}

    def _set_weight(self, weight: nn.Parameter, value: Tensor) -> None:
        """Sets a weight and the optimizer's float32 copy of it, from which the next step computes the weight."""
        if self._stage == 3:
            # Leaving the context broadcasts the value of rank 0 and slices it again.
            with self._deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(value)
        else:
            weight.data.copy_(value)
        if weight.requires_grad:
            self._set_slice(weight, value, None)

    def _set_slice(self, weight: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Sets this rank's slice of the optimizer state `key` of a weight, or of its float32 copy if `key` is None."""
        utils = self._deepspeed.utils
        if self._stage < 3:
            # Each process passes the whole weight, and DeepSpeed copies the part that the process holds.
            placed = value.to(weight.device, torch.float32)
            if key is None:
                utils.safe_set_full_fp32_param(weight, placed)
            else:
                utils.safe_set_full_optimizer_state(weight, placed, key)
            return
        part = _local_slice(weight, value, torch.distributed.get_rank())
        if key is None:
            utils.safe_set_local_fp32_param(weight, part)
        else:
            utils.safe_set_local_optimizer_state(weight, part, key)

    def capture(self, *, keep: bool) -> dict[str, Any]:
        """Returns the optimizer state by parameter name. Collective: every rank must call it.

        Args:
            keep: True to return the state. False to return an empty state, on a rank that only takes part in the
                collectives.
        """
        names = names_of(self._model)
        state: dict[str, Any] = {}
        self._link_states()
        for weights, flat in self._slices():
            held = self._zero.optimizer.state.get(flat) or {}
            for weight in weights:
                # On every process, also without `keep`: reading a state is collective.
                found = {key: self._read(weight, key, value, flat) for key, value in held.items()}
                if keep and found:
                    state[names[id(weight)]] = found
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": list(names)}
            for group, names in zip(self._settings, self._groups, strict=True)
        ]
        return {"state": state, "param_groups": groups if keep else []}

    def _link_states(self) -> None:
        """Connects the optimizer state of each weight with that of its slice, which DeepSpeed does not do by itself."""
        if self._stage < 3 and any(self._zero.optimizer.state.values()):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()

    def _read(self, weight: nn.Parameter, key: str, value: Any, flat: nn.Parameter) -> Any:
        if not _has_slice_shape(value, flat):
            return value.clone() if isinstance(value, Tensor) else value
        return self._deepspeed.utils.safe_get_full_optimizer_state(weight, key).detach().cpu()

    def restore_optimizer(self, saved: CheckpointReader) -> None:
        """Restores the optimizer state, weight by weight. Collective: every rank must call it.

        Raises:
            CheckpointError: FG605, on every rank, if the checkpoint has the state of another optimizer.
        """
        tree = saved.optimizer or {}
        kind = type(self._zero.optimizer).__name__
        own = [name for names in self._groups for name in names]
        collectives.run_collectively(lambda: refuse_other_optimizer(kind, own, self._groups, tree))
        group_of = {name: group for group in tree["param_groups"] for name in group["params"]}
        for group, names in zip(self._settings, self._groups, strict=True):
            group |= {key: value for key, value in group_of[names[0]].items() if key not in ("params", *LAYOUT_KEYS)}
        name_of = names_of(self._model)
        state = tree["state"]
        # DeepSpeed can set only a state that exists, and a new optimizer has none before its first step.
        for weights, flat in self._slices():
            held = next((state[name_of[id(weight)]] for weight in weights if name_of[id(weight)] in state), None)
            if held is not None:
                self._zero.optimizer.state[flat] = _empty_slice_state(held, weights, flat)
        if not state:
            return
        self._link_states()
        for weights, flat in self._slices():
            for weight in weights:
                for key, value in state.get(name_of[id(weight)], {}).items():
                    if _has_slice_shape(self._zero.optimizer.state[flat].get(key), flat):
                        self._set_slice(weight, saved.whole(value), key)


def _empty_slice_state(entry: Mapping[str, Any], weights: Sequence[nn.Parameter], flat: nn.Parameter) -> dict[str, Any]:
    """Returns an empty optimizer state for a slice: zeros for tensors of a weight's shape, other values unchanged."""
    shapes = {torch.Size(getattr(weight, "ds_shape", weight.shape)) for weight in weights}
    room: dict[str, Any] = {}
    for key, value in entry.items():
        if isinstance(value, StoredTensor) and value.shape in shapes:
            room[key] = torch.zeros_like(flat, requires_grad=False)
        else:
            room[key] = value.clone() if isinstance(value, Tensor) else value
    return room


def _has_slice_shape(value: Any, flat: Tensor) -> bool:
    """Returns whether a value in the optimizer state has one element for each element of the slice."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.numel() == flat.numel()


def _local_slice(weight: Any, value: Tensor, rank: int) -> Tensor:
    """Returns the flat slice of a weight that belongs to a rank at stage 3; the last slice is padded with zeros."""
    size = weight.ds_tensor.ds_numel
    rows = value.to(device=weight.ds_tensor.device, dtype=torch.float32).flatten()
    part = rows[size * rank : size * (rank + 1)]
    return nn.functional.pad(part, (0, size - part.numel()))


def fill_stage_3(
    model: nn.Module, initial: InitialWeights, deepspeed: Any, settings: Mapping[str, Any], device: torch.device
) -> None:
    """Fills each weight of a model with its initial value and slices it, one weight at a time, and fills each buffer.

    Collective: every rank must call it.

    Args:
        model: the model, whose tensors are on the meta device.
        initial: the initial weights.
        deepspeed: the imported module `deepspeed`.
        settings: the DeepSpeed config of the engine.
        device: the device that this rank computes on.
    """
    # As in `deepspeed.initialize`: slicing uses DeepSpeed's process group, not torch's.
    backend = deepspeed.accelerator.get_accelerator().communication_backend_name()
    deepspeed.init_distributed(dist_backend=backend, dist_init_required=False)
    dtype = _engine_dtype(settings)
    first: Any = None
    buffers: dict[int, tuple[Tensor, Tensor]] = {}
    for fqn, owner, name, tensor in list(tensors_of(model)):
        if not tensor.is_meta:
            continue
        if not isinstance(tensor, nn.Parameter):
            if id(tensor) not in buffers:
                buffers[id(tensor)] = (tensor, initial.read(fqn).to(device, copy=True))
            set_tensor(owner, name, buffers[id(tensor)][1])
        elif not hasattr(tensor, "ds_id"):
            kind = dtype if tensor.is_floating_point() else None
            value = nn.Parameter(initial.read(fqn).to(device, kind, copy=True), requires_grad=tensor.requires_grad)
            value.__dict__.update(vars(tensor))
            # The object stays the same: the optimizer and tied modules hold it.
            torch.utils.swap_tensors(tensor, value)  # type: ignore[no-untyped-call]
            del value
            if first is None:
                deepspeed.zero.Init(module=nn.ParameterList([tensor]), config_dict_or_path=dict(settings))
                first = tensor
            else:
                first.convert_to_zero_parameters(param_list=[tensor])


def _engine_dtype(settings: Mapping[str, Any]) -> torch.dtype | None:
    """Returns the dtype in which the engine expects the weights, or None if it accepts the dtype that they have."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if (settings.get(section) or {}).get("enabled") is True:
            return dtype
    return None
