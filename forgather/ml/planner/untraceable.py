"""Models whose forward pass reads values, which a trace does not have: their plan by formula.

`untraceable` takes the error of a trace and gives an `UntraceableModel`, which names the line of the code that reads a
value. `formula_sizes` gives the sizes of such a run: weights, gradients and the optimizer's state by their shapes, what
the layers keep for the backward pass, and the work of a step.

Source:
    Activations as in `forgather/planner/formulas.py`, part by part, for the layers that the model has. Operations:
    Kaplan et al. 2020, arXiv:2001.08361, section 2.1.
"""

from __future__ import annotations

import contextlib
import os
import site
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter
from transformers.pytorch_utils import Conv1D

import forgather
from forgather.errors import PlanError
from forgather.ml.planner.trace_facts import facts_of
from forgather.ml.planner.value_readings import ReadingZeros
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.trainer.trainer import Trainer
from forgather.ml.types import Window
from forgather.planner.work import Operation

_READINGS = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)
_WORDS = ("not supported for tensor subclasses", "Cannot access data pointer", "access its data", "data-dependent")
_GROUPED = "Expected inputs of BF16 type"
_LIBRARIES = tuple(
    str(Path(one).resolve())
    for one in (*site.getsitepackages(), sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
)
_TORCH, _OURS = (os.path.dirname(os.path.abspath(str(one.__file__))) for one in (torch, forgather))


class UntraceableModel(PlanError):
    """The code of a model reads values of tensors.

    Attributes:
        traces: the `RankTrace` of each size of a window by formula; none if there is no formula for the strategy.
    """

    code = "FG962"
    traces: Sequence[Any] = ()


def untraceable(error: BaseException) -> UntraceableModel | None:
    """Returns what a failed trace means for the user; None if the error is not that a value was read.

    Raises:
        PlanError: FG969 if something is compiled while it runs, or if torch does not know the shapes of an operator.
    """
    # The module is imported by what compiles only.
    if type(error).__module__ == "torch._dynamo.exc":
        raise PlanError(
            "no plan can be made: the step compiles functions while it runs, as optimizers of torchao do, and these "
            "take no tensors without values",
            code="FG969",
            hint="plan the same run with an optimizer of bitsandbytes of as many bits, such as optim: adamw_8bit",
        ).about("optimizer") from error
    if isinstance(error, RuntimeError) and _GROUPED in str(error):
        # A formula does not know what experts keep: it was 40 % below a run.
        raise PlanError(
            "no plan can be made: the model multiplies its experts at once in 32 bits, and torch knows the shapes of "
            "that in bfloat16 only",
            code="FG969",
            hint="load the weights in bfloat16; experts_implementation: batched_mm can be planned, and needs far more",
        ).about("model") from error
    is_reading = isinstance(error, _READINGS) or (
        isinstance(error, RuntimeError | TypeError | ValueError) and any(words in str(error) for words in _WORDS)
    )
    if not is_reading:
        return None
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if os.path.exists(frame.filename)]
    frames = [frame for frame in frames if not frame.filename.startswith((_TORCH, _OURS))]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    where = (own or frames)[-1:]
    place = "".join(f" at {_short(frame.filename)}:{frame.lineno}, {frame.line!r}," for frame in where)
    return UntraceableModel(
        f"the model reads the value of a tensor{place} and a plan has shapes only",
        hint="compute without .item(), .numpy(), `if` on a tensor or masks that select rows; for one process and DDP, "
        "fgcli plan has a formula",
    )


@contextlib.contextmanager
def naming_readings() -> Iterator[None]:
    """Context manager in which a constructor that reads values of weights is named: there is no formula for it.

    Raises:
        UntraceableModel: FG962.
    """
    try:
        yield
    except RuntimeError as error:
        if (found := untraceable(error)) is None:
            raise
        raise found from error


def _short(file: str) -> str:
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative


def has_formula(strategy: Any) -> bool:
    """Returns whether each process of a strategy holds the whole model in one part."""
    return (
        isinstance(strategy, ModelStrategy)
        and strategy.layout.pipeline_parallel_size == 1
        and not any(isinstance(weight, DTensor) for weight in strategy.model.parameters())
    )


def formula_sizes(trainer: Trainer, windows: Iterable[Window], notes: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yields the facts and the operations of a run for each window; the optimizer does a step before.

    Args:
        trainer: the trainer, whose optimizer was built.
        windows: the windows that are planned.
        notes: what the plan leaves out, one sentence each; the last one says why there is no trace.
    """
    strategy: Any = trainer.strategy
    with ReadingZeros():
        for weight in strategy.model.parameters():
            if weight.requires_grad:
                weight.grad = torch.empty_like(weight)
        strategy.optimizer.step()
    *others, reason = notes
    said = [*others, f"{reason}: all rows are formulas; of the layers, matrices and norms are counted"]
    for window in windows:
        facts = facts_of(trainer, window, strategy.model, said)
        rows = {**_rows(trainer, window), **facts.untraced}
        yield {"facts": replace(facts, untraced=rows), "operations": _operations(trainer, window)}


def _rows(trainer: Trainer, window: Window) -> dict[str, int]:
    """Returns the bytes of a process by their use."""
    strategy: Any = trainer.strategy
    weights = list(strategy.model.parameters())
    state = [item for one in strategy.optimizer.state.values() for item in tree_iter(one) if isinstance(item, Tensor)]
    wide = 2 if trainer.args.bf16 or trainer.args.fp16 else 4
    matrices = [one for one in strategy.model.modules() if isinstance(one, nn.Linear | Conv1D)]
    width = _sizes(matrices[-1])[1] if matrices else 0
    return {
        "parameters": _bytes([*weights, *strategy.model.buffers()]),
        "gradients": _bytes(weight for weight in weights if weight.requires_grad),
        "optimizer": _bytes(state),
        "activations": _positions(window) * (_kept(strategy.model) - width) * wide,
        # The predictions, their log-softmax in 32 bits, and the gradient of it.
        "logits": _positions(window) * width * (wide + 4 + 4),
        "batch": _bytes(item for item in tree_iter(window.batches) if isinstance(item, Tensor)),
    }


def _operations(trainer: Trainer, window: Window) -> dict[Operation, float]:
    """Returns the work of a step as two operations, forward and backward."""
    weights = list(trainer.strategy.model.parameters())
    number = sum(weight.numel() for weight in weights if weight.dim() > 1)
    trained = sum(weight.numel() for weight in weights if weight.dim() > 1 and weight.requires_grad)
    tokens, moved = _positions(window), _bytes(weights)
    dtype = "bfloat16" if trainer.args.bf16 else "float16" if trainer.args.fp16 else "float32"
    steps = trainer.args.accumulation.largest
    return {
        Operation("forward", "aten.mm", dtype, 2 * number * tokens, moved): steps,
        Operation("backward", "aten.mm", dtype, 2 * (number + trained) * tokens, 2 * moved): steps,
    }


def _bytes(tensors: Any) -> int:
    return sum(item.numel() * item.element_size() for item in {id(one): one for one in tensors}.values())


def _positions(window: Window) -> int:
    """Returns the number of tokens of a micro-batch, or of its rows if these have no tokens."""
    tensors = [item for item in tree_iter(window.batches[0]) if isinstance(item, Tensor) and item.dim()]
    ids = [item for item in tensors if item.dim() == 2 and not item.is_floating_point()]
    return int(ids[0].numel()) if ids else max((len(item) for item in tensors), default=0)


def _kept(model: nn.Module) -> int:
    """Returns the number of elements that the layers keep for each position: what matrices read and give, and norms."""
    return sum(_elements(owner) for owner in model.modules())


def _elements(owner: nn.Module) -> int:
    # Matrices of one module that read the same width, as those of queries, keys and values do, read one tensor.
    matrices = [child for child in owner.children() if isinstance(child, nn.Linear | Conv1D)]
    inputs = {_sizes(matrix)[0] for matrix in matrices}
    norms = [child for child in owner.children() if "Norm" in type(child).__name__]
    return sum(inputs) + sum(_sizes(matrix)[1] for matrix in matrices) + sum(2 * width for width in _widths(norms))


def _sizes(matrix: nn.Module) -> tuple[int, int]:
    weight: Any = matrix.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(matrix, Conv1D) else (columns, rows)


def _widths(norms: list[nn.Module]) -> Iterator[int]:
    for norm in norms:
        weight = next(norm.parameters(recurse=False), None)
        if weight is not None:
            yield int(weight.numel())
