"""The work of a step: floating-point operations, bytes that operators read and write, and messages between ranks.

`WorkCounter.count` is called with each operator below autograd. Equal operators are counted together, so that the
result stays small: how often each `Operation` and each `Message` occurs.

Units:
    FLOPs as multiplications and additions, two for each multiply-add; bytes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from forgather.ml.planner.operators import name_of, tensors_in
from forgather.planner.work import Message, Operation

_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Operators that are alike on all devices, while torch's table lists those of CUDA only. (query, key and value, causal)
_ATTENTIONS: Mapping[Any, tuple[slice, int, Callable[..., int]]] = {
    _ATTENTION: (slice(0, 3), 4, sdpa_flop_count),
    _ATTENTION_BACKWARD: (slice(0, 4), 7, sdpa_backward_flop_count),
    torch.ops.aten._scaled_dot_product_flash_attention: (slice(0, 3), 4, sdpa_flop_count),
    torch.ops.aten._scaled_dot_product_flash_attention_backward: (slice(0, 4), 10, sdpa_backward_flop_count),
}

# torch's table lists no operator that adds products to its first argument in place.
_IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm, torch.ops.aten.baddbmm_: torch.ops.aten.baddbmm}
_MOVING_NOTHING = {
    getattr(torch.ops.aten, name)
    for name in (
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_permuted",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
    )
}
"""Operators that only allocate, or that only look at memory in another way without being declared as views."""


class WorkCounter:
    """Counts operators and messages.

    Args:
        phase: a function that returns the current phase.
        block: a function that returns the index of the current block; None to count operators of all blocks only.

    Attributes:
        repeats: how often what is counted next happens in a step: a trace executes fewer micro-batches than the run.
        is_repeated: whether what is counted next belongs to a micro-batch that is not the last one.
        repeated: the operations and messages of one such micro-batch.
    """

    def __init__(self, phase: Callable[[], str], block: Callable[[], int] | None = None) -> None:
        self._phase = phase
        self._block = block
        self.repeats: float = 1
        self.is_repeated = False
        self.repeated: defaultdict[Operation | Message, int] = defaultdict(int)
        self.operations: defaultdict[Operation, float] = defaultdict(int)
        self.block_operations: defaultdict[tuple[int, Operation], float] = defaultdict(int)
        self.messages: defaultdict[Message, float] = defaultdict(int)

    def count(self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Counts one call of an operator.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its keyword arguments.
            result: its result.
        """
        packet = func.overloadpacket
        if not self.repeats:
            return
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count_message(packet, args, kwargs, result)
            return
        # Operators of "prim" ask for facts of a tensor, such as its device, and move nothing.
        if func.is_view or func.namespace == "prim":
            return
        tensors = tensors_in(args, kwargs, result)
        if not tensors:
            return
        sizes = {id(one): one.numel() * one.element_size() for one in tensors}
        moved = 0 if packet in _MOVING_NOTHING else sum(sizes.values())
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        flops, num_keys = _flops(packet, args, kwargs, result)
        operation = Operation(self._phase(), name_of(func), dtype, flops, moved, num_keys)
        self.operations[operation] += self.repeats
        if self._block is not None:
            self.block_operations[self._block(), operation] += self.repeats
        self.repeated[operation] += self.is_repeated

    def _count_message(self, packet: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        members = _members((args, kwargs))
        if not members or packet is torch.ops._c10d_functional.wait_tensor:
            return
        tensors = tensors_in(args, kwargs, result)
        largest = max((one.numel() * one.element_size() for one in tensors), default=0)
        stride = members[1] - members[0] if len(members) > 1 else 1
        self.count_message(Message(self._phase(), str(packet), largest, len(members), stride))

    def count_message(self, message: Message) -> None:
        """Counts a message.

        Args:
            message: what moves.
        """
        self.messages[message] += self.repeats
        self.repeated[message] += self.is_repeated


def _flops(packet: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> tuple[int, float]:
    """Returns the FLOPs of an operator, and the number of keys that `Operation` has."""
    if (attention := _ATTENTIONS.get(packet)) is not None:
        given, causal, count = attention
        flops = count(*(tuple(one.shape) for one in args[given]))
        is_causal = args[causal] if len(args) > causal else kwargs.get("is_causal", False)
        # The keys are next to the values, which are last.
        num_keys = args[given][-2].shape[-2]
        if is_causal is True:
            # Half of the scores of a causal attention are never computed.
            return int(flops // 2), num_keys / 2
        return int(flops), num_keys if kwargs.get("attn_mask") is not None else 0
    formula = flop_registry.get(_IN_PLACE.get(packet, packet))
    return (0 if formula is None else int(formula(*args, **kwargs, out_val=result))), 0


def _members(values: Any) -> list[int]:
    """Returns the ranks of the process group among the arguments of an operator; an empty list if there is none."""
    for item in tree_iter(values):
        if isinstance(item, torch.ScriptObject) and "ProcessGroup" in item._type().qualified_name():
            return list(dist.get_process_group_ranks(dist.ProcessGroup.unbox(item)))
        if isinstance(item, dist.ProcessGroup):
            return list(dist.get_process_group_ranks(item))
    names = [item for item in tree_iter(values) if isinstance(item, str)]
    for name in reversed(names):
        try:
            group = torch._C._distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
        except (RuntimeError, ValueError, KeyError):
            # Another text among the arguments, such as "sum".
            continue
        return list(dist.get_process_group_ranks(group))
    return []
