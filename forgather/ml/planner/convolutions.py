"""What convolutions allocate inside of themselves on a CPU, which no operator shows.

oneDNN computes with blocks of channels: it copies input, weight and result into such a layout and back. Where it has no
such kernel, it multiplies matrices of patches, as torch's own kernels do. `workspace_of` gives the sizes of these
copies for a call of `aten.convolution` or `aten.convolution_backward`.

Source:
    Layouts: oneDNN's developer guide, "Understanding Memory Formats". Which kernel copies what, and for how long: the
    events of torch's CPU allocator (torch 2.13, AVX2 and AVX-512), with which `tests/ml/planner/test_convolutions.py`
    compares the sizes.

Units:
    bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

FORWARD, BACKWARD = "aten.convolution", "aten.convolution_backward"
_COLORS = 3  # channels that are read as they are for the gradient of the weight
_SUM_COSTS = {2: 3, 4: 5, 8: 5}
"""What an element of a sum costs that a thread moves, against one of the data, by the bytes of an element."""

_SUMS = 4  # of a weight's gradient that a thread keeps while it multiplies matrices of patches
_LARGEST, _LEAST = 16, 8  # channels of a block
_WIDEST, _WIDEST_OF_CHANNEL, _WIDEST_OF_DATA = 14, 3, 24
"""The widest kernel that is computed by blocks: for the gradient of the weight, for the same where each channel is a
group, and for data. Others are multiplied as matrices of patches."""


class Workspace(NamedTuple):
    """What a convolution holds besides its arguments and results.

    Args:
        before: what is freed before there are results.
        during: what is there before, and while there are results.
        after: what is allocated when there are results.
    """

    before: int = 0
    during: int = 0
    after: int = 0


def workspace_of(name: str, args: Any) -> Workspace | None:
    """Returns what an operator allocates besides its results on a CPU; None if it is no convolution.

    Args:
        name: the name of the operator.
        args: its positional arguments.
    """
    if name == FORWARD:
        states, weight, bias, *settings = args
        kernel = torch._C._select_conv_backend(states, weight, bias, *settings, None)
        return _Convolution.of(settings, states, weight).forward(str(kernel))
    if name == BACKWARD:
        gradient, states, weight, bias_sizes, *settings, wanted = args
        kernel = torch._C._select_conv_backend(states, weight, None, *settings, bias_sizes)
        return _Convolution.of(settings, states, weight, gradient).backward(str(kernel), *wanted[:2])
    return None


class _Side(NamedTuple):
    """One side of a convolution: its channels, and its height, width, ..."""

    channels: int
    space: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Convolution:
    """The sizes of a convolution. A transposed one is computed as the gradient of the one that it reverses.

    Args:
        rows: the number of rows.
        source: what the convolution reads; what a transposed one gives.
        target: what it gives; what a transposed one reads.
        kernel: the height, width, ... of the kernel.
        groups: the groups of channels.
        element: the bytes of an element.
        is_transposed: whether it is a transposed convolution.
        is_strided: whether the target is smaller than the source by a stride.
        is_dilated: whether the kernel has gaps.
        keeps_layout: whether channels are the last dimension in memory: oneDNN reads and writes that without copies.
        rearranged: the bytes of the arguments that are copied into this layout first.
    """

    rows: int
    source: _Side
    target: _Side
    kernel: tuple[int, ...]
    groups: int
    element: int
    is_transposed: bool
    is_strided: bool
    is_dilated: bool
    keeps_layout: bool
    rearranged: int

    @classmethod
    def of(cls, settings: Any, states: Tensor, weight: Tensor, *gradient: Tensor) -> _Convolution:
        """Returns the sizes of a call with the settings that follow the bias in `aten.convolution`."""
        is_last = [suggest_memory_format(one) is not torch.contiguous_format for one in (states, weight)]
        others = [one for one in (states, weight, *gradient) if one.is_contiguous()]
        stride, padding, dilation, transposed, more, groups = settings
        kernel, given = weight.shape[2:], states.shape[2:]
        space = tuple(
            (size - 1) * step - 2 * pad + gap * (side - 1) + extra + 1
            if transposed
            else (size + 2 * pad - gap * (side - 1) - 1) // step + 1
            for size, side, step, pad, gap, extra in zip(given, kernel, stride, padding, dilation, more, strict=True)
        )
        read = _Side(states.shape[1], tuple(given))
        made = _Side(weight.shape[1] * groups if transposed else weight.shape[0], space)
        return cls(
            rows=states.shape[0],
            source=made if transposed else read,
            target=read if transposed else made,
            kernel=tuple(kernel),
            groups=groups,
            element=states.element_size(),
            is_transposed=transposed,
            is_strided=max(stride) > 1,
            is_dilated=max(dilation) > 1,
            keeps_layout=any(is_last),
            rearranged=sum(one.numel() * one.element_size() for one in others) if any(is_last) else 0,
        )

    def forward(self, kernel: str) -> Workspace:
        """Returns the workspace of the forward pass by the kernel that torch chose."""
        if "Slow" in kernel:
            return Workspace(during=self._patches_of_torch(kernel))
        data = self._to_source() if self.is_transposed else self._to_target()
        return data._replace(during=data.during + self.rearranged)

    def backward(self, kernel: str, wants_input: bool, wants_weight: bool) -> Workspace:
        """Returns the workspace of the backward pass, which computes the gradient of the input first."""
        if "Slow" in kernel:
            return Workspace(after=self._patches_of_torch(kernel))
        data, after = Workspace(), 0
        if wants_input:
            data = self._to_target() if self.is_transposed else self._to_source()
            after = data.during + data.after
        if wants_weight:
            # It is a result, and not there yet while the input's gradient is copied.
            after = max(after, self._to_weight()) - self._stored
        copies = self.rearranged
        return Workspace(before=data.before + data.during + copies, after=max(0, after) + copies)

    def _to_target(self) -> Workspace:
        if self.keeps_layout:
            return Workspace(after=self._weight())
        if self._takes_patches:
            return Workspace(before=self._patches(), during=self._size(self.target, 1))
        source = 0 if self._is_flat else self._size(self.source)
        weight = self._weight(is_flat=self._is_flat)
        return Workspace(before=source + weight, during=self._size(self.target))

    def _to_source(self) -> Workspace:
        if self.keeps_layout:
            return Workspace(after=self._weight())
        result = self._size(self.source, 1)
        if self._takes_patches:
            return Workspace(before=self._patches(), during=result)
        if self.is_strided and not self._is_by_channel:
            # Channels last, and two more copies until the result has its layout.
            return Workspace(before=self._size(self.target, 1) + self._weight(), during=result, after=result)
        return Workspace(before=self._size(self.target) + self._weight(), during=self._size(self.source))

    def _to_weight(self) -> int:
        """Returns what the gradient of the weight needs, with the result."""
        if self.keeps_layout:
            return self._weight() + 2 * self._stored
        if not self._has_blocks:
            in_32_bits = 4 * self._stored // self.element
            return self._stored + torch.get_num_threads() * _SUMS * in_32_bits + self._patches()
        is_flat = self.groups == 1 and self.source.channels <= _COLORS
        weight = self._weight(is_flat=is_flat)
        # Few channels are half a block.
        block = min(self._block, _LEAST) if self.source.channels <= _LEAST else self._block
        data = (0 if is_flat else self._size(self.source, block)) + self._size(self.target)
        if self.element < 4:
            # For each thread: sums in 32 bits, and the rows that it works on, transposed.
            threads = max(1, torch.get_num_threads() // self.groups)
            sums = self._threads_of_rows() * 2 * weight + threads * (3 * data // (2 * self.rows))
        else:
            sums = (self._threads_of_rows() - 1) * weight
        return max(data + weight + sums, weight + self._stored)

    def _threads_of_rows(self) -> int:
        """Returns among how many threads the rows are divided: each of them has a sum of the weight's gradient.

        Rows, and blocks of the channels of both sides, are divided such that a thread moves the least data.
        """
        threads = max(1, torch.get_num_threads() // self.groups)
        blocks = [-(-side.channels // _LARGEST) for side in (self.source, self.target)]
        cost: dict[float, int] = {}
        for rows in range(1, min(threads, self.rows) + 1):
            for number in range(1, min(threads // rows, blocks[0]) + 1):
                read = math.ceil(blocks[0] / number)
                made = math.ceil(blocks[1] / min(threads // rows // number, blocks[1]))
                data = math.ceil(self.rows / rows) * (read + made) * math.prod(self.target.space)
                cost[data + _SUM_COSTS[self.element] * read * made * math.prod(self.kernel) * _LARGEST] = rows
        return cost[min(cost)]

    @property
    def _is_by_channel(self) -> bool:
        return self.groups > 1 and self.groups == self.source.channels == self.target.channels

    @property
    def _is_flat(self) -> bool:
        """Whether the source has so few channels that it is read as it is."""
        return self.groups == 1 and self.source.channels < self._block

    @property
    def _takes_patches(self) -> bool:
        """Whether the data are multiplied as matrices of patches."""
        divided = self.groups > 1 and not self._is_by_channel
        uneven = any(side.channels // self.groups % _LEAST for side in (self.source, self.target))
        return (divided and uneven) or self.kernel[-1] > _WIDEST_OF_DATA

    @property
    def _has_blocks(self) -> bool:
        """Whether the gradient of the weight is computed by blocks."""
        widest = _WIDEST_OF_CHANNEL if self._is_by_channel else _WIDEST
        if self._takes_patches or self.kernel[-1] > widest:
            return False
        is_volume = len(self.kernel) == 3
        if not _has_large_blocks():
            is_covered = len(self.kernel) == 2 and min(self.source.space) < max(self.kernel)
            return not (self.is_dilated or is_covered or (is_volume and not self._is_flat))
        return not (is_volume and self._is_flat and self.target.channels % self._block)

    @property
    def _stored(self) -> int:
        sides = self.source.channels // self.groups * self.target.channels
        return sides * math.prod(self.kernel) * self.element

    @property
    def _block(self) -> int:
        """The number of channels in a block."""
        if self.groups > 1 and not self._is_by_channel:
            return 1
        return _LARGEST if _has_large_blocks() else _LEAST

    def _weight(self, *, is_flat: bool = False) -> int:
        """Returns the copy of the weight."""
        source = self.source.channels if is_flat else _rounded(self.source.channels, self._block)
        target = _rounded(self.target.channels, self._block)
        sides = source if self._is_by_channel else source * target // self.groups
        return sides * math.prod(self.kernel) * self.element

    def _size(self, side: _Side, block: int | None = None) -> int:
        """Returns the size of one side with whole blocks."""
        return self.rows * _rounded(side.channels, block or self._block) * math.prod(side.space) * self.element

    def _patches(self) -> int:
        """Returns the matrix of patches of a row and a group, or of a layer of a volume, for each thread."""
        columns = self.source.channels // self.groups * math.prod(self.kernel)
        return torch.get_num_threads() * columns * math.prod(self.target.space[-2:]) * self.element

    def _patches_of_torch(self, kernel: str) -> int:
        """Returns the matrix of patches of torch's own kernels: of all rows at once, or row by row."""
        if max(self.kernel) == 1 and not self.is_strided:
            return 0
        rows = 1 if "Transpose" in kernel or "Dilated" in kernel else self.rows
        columns = self.source.channels // self.groups * math.prod(self.kernel)
        return rows * columns * math.prod(self.target.space) * self.element


def _has_large_blocks() -> bool:
    """Returns whether the processor has registers for large blocks. The process that plans and the run share it."""
    return "AVX512" in torch.backends.cpu.get_cpu_capability()


def _rounded(size: int, block: int) -> int:
    """Returns a size rounded up to whole blocks."""
    return -(-size // block) * block
