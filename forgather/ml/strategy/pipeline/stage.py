"""One stage of a pipeline: the model's module tree without the parts of other stages, under the model's own forward.

`make_stage` takes a model and its cuts. It returns a module whose parameters have the names that they have in the
model. The forward of this module takes token ids (in the first stage) or hidden states, and the same keyword arguments
in every stage. It returns hidden states, or logits (in the last stage). Each stage computes masks, rotary embeddings
and document boundaries with the model's own code, from the keyword arguments and the shape of the hidden states. In a
later stage, tensors that are computed before its first block are NaN and are discarded.

Placeholders without parameters replace the modules of other stages. The first block of a stage is called with the
received hidden states, instead of the tensors that the code before it computed. The placeholder for the first block of
the next stage ends the forward pass, and the hidden states that it was called with are sent to the next stage. So code
between two blocks runs only once, in the earlier stage. A placeholder that is called where a correct stage would not
call it raises an error.

Shapes:
    B rows, T positions, D features, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.attention_inputs import AttentionInputs
from forgather.ml.documents import Documents
from forgather.ml.loss_path import LossPath
from forgather.ml.model_inputs import SHIFTED, NoCache
from forgather.ml.strategy.pipeline.blocks import BlockList, Entry
from forgather.ml.strategy.pipeline.split import SplitPlan
from forgather.ml.strategy.pipeline.trace import first_tensor, with_first_tensor


class StageExit(Exception):  # noqa: N818 - not an error: the way out of a forward pass
    """Raised to end the forward pass of a stage, with the hidden states that the stage sends to the next one.

    Args:
        states: the hidden states.
    """

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


class ContiguousGradient(torch.autograd.Function):
    """The identity function with a contiguous gradient, because gloo cannot send a gradient that is not contiguous."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        """Returns the hidden states unchanged.

        Shapes:
            states: (B, T, D). Returns (B, T, D).
        """
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Returns the gradient in contiguous memory.

        Shapes:
            gradient: (B, T, D). Returns (B, T, D).
        """
        return gradient.contiguous()


class Gate:
    """A store for the hidden states that a stage received, until the stage's first block takes them."""

    states: Tensor | None = None
    like: Tensor | None = None
    unused = math.nan

    def open(self, states: Tensor, unused: float) -> None:
        """Stores the hidden states of a forward pass.

        Args:
            states: the hidden states that the stage received.
            unused: the fill value of the tensors that the code before the stage's first block computes with.

        Shapes:
            states: (B, T, D).
        """
        self.states, self.like, self.unused = states, states, unused

    def take(self) -> Tensor:
        """Returns the hidden states. It can be called only once per forward pass.

        Raises:
            RuntimeError: if it is called a second time in one forward pass.

        Shapes:
            Returns (B, T, D).
        """
        if self.states is None:
            raise RuntimeError("a block was called twice in one forward pass of its stage")
        states, self.states = self.states, None
        return states

    def close(self) -> None:
        """Drops the hidden states."""
        self.states = self.like = None


class _Placeholder(nn.Module):
    """A module without parameters that replaces a module of another stage."""

    def __init__(self, name: str, gate: Gate, *, width: int | None = None) -> None:
        super().__init__()
        self.name, self.gate, self.width = name, gate, width

    def extra_repr(self) -> str:
        return f"{self.name!r} is in another stage"


class PlaceholderBefore(_Placeholder):
    """A placeholder, in a later stage, for a module before the blocks. Its result is discarded."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a tensor of the right shape without meaningful values.

        Shapes:
            Returns the shape of the first tensor among the arguments. If the replaced module is an embedding, the shape
            has an additional last axis of `width` features.

        Raises:
            TrainingError: FG754 if the module is called after the first block of a later stage.
        """
        like = self.gate.like
        if like is None or self.gate.states is None:
            raise _used_elsewhere(self.name, "after the first block of a later stage")
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        # A norm or a dropout, for example, keeps the shape of its input.
        if given is not None and self.width is None and given.is_floating_point():
            return given
        shape = () if given is None or self.width is None else (*given.shape, self.width)
        return like.detach().new_full((), self.gate.unused).expand(shape)


class PlaceholderAfter(_Placeholder):
    """A placeholder, in an earlier stage, for a module after the blocks. A correct stage never calls it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses the call.

        Raises:
            TrainingError: FG754 for any call.
        """
        raise _used_elsewhere(self.name, "before the last block")


class PlaceholderEarlier(_Placeholder):
    """A placeholder for a block of an earlier stage. It passes on tensors that are discarded."""

    def __init__(self, name: str, gate: Gate, *, num_outputs: int | None, enters: bool) -> None:
        super().__init__(name, gate)
        self.num_outputs, self.enters = num_outputs, enters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns its input, or, if the stage has no blocks, the received hidden states.

        Shapes:
            Returns (B, T, D).
        """
        states = self.gate.take() if self.enters else first_tensor(args, kwargs)
        if self.num_outputs is None:
            return states
        return (states, *[None] * (self.num_outputs - 1))


class PlaceholderLater(_Placeholder):
    """A placeholder for a block of a later stage. The hidden states that it is called with leave this stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Ends the forward pass of the stage by raising `StageExit`."""
        raise StageExit(first_tensor(args, kwargs))


@dataclass(frozen=True, slots=True)
class Border:
    """Whether received hidden states enter the stage at a block, and whether the stage's output is that block's output.

    Args:
        gate: the store of the received hidden states.
        enters: True if the block takes the received hidden states from the gate.
        leaves: True if the forward pass of the stage ends after the block.
    """

    gate: Gate
    enters: bool
    leaves: bool


class BorderBlock:
    """A base class that is put in front of the class of the first block and of the last block of a stage.

    It overrides `__call__` instead of registering a hook, for two reasons: activation checkpointing calls the block's
    forward again, which must not take the hidden states from the gate a second time; and FSDP2 casts the arguments of
    the block.
    """

    _border: Border

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the block, with the received hidden states if they enter the stage at this block."""
        border = self._border
        if border.enters:
            replaced, kwargs = with_first_tensor(args, kwargs, border.gate.take())
            output = super().__call__(*replaced, **kwargs)  # type: ignore[misc]
        else:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if border.leaves:
            raise StageExit(output[0] if isinstance(output, tuple) else output)
        return output


def _used_elsewhere(name: str, when: str) -> TrainingError:
    return TrainingError(
        f"{name!r} is used {when}, and is in another stage",
        code="FG754",
        hint="create modules in the order in which the model calls them, or train without a pipeline",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """The part of the model that a stage consists of. It is the attribute `pipeline_part` of a stage.

    Args:
        index: the number of the stage.
        num_stages: the number of stages.
        blocks: the names, in the whole model, of the blocks in this stage.
        held: the names of all modules and parameters in this stage, blocks included.
        entry: how hidden states enter the model's own forward.
    """

    index: int
    num_stages: int
    blocks: tuple[str, ...]
    held: tuple[str, ...]
    entry: Entry

    @property
    def is_first(self) -> bool:
        """True if the stage is the first one, which receives token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True if the stage is the last one, which returns logits."""
        return self.index == self.num_stages - 1


class _StageForward:
    """A base class that is put in front of the class of the model in a stage."""

    pipeline_part: StagePart
    documents: Documents | None
    """The documents of the rows of the next forward pass, which the host knows; None if it does not."""
    _gate: Gate
    _no_cache: NoCache
    _attention: AttentionInputs
    _input_name: str
    _leak_checked: bool
    loss_path: LossPath | None
    """How the last stage computes the loss if the inputs have targets; None in any other stage."""

    def forward(self, states: Tensor, **keywords: Any) -> Tensor:
        """Returns hidden states, or logits in the last stage.

        Args:
            states: the model's input (token ids) in the first stage, and hidden states in any other stage.
            **keywords: the keyword arguments of the model's forward (`position_ids`, `attention_mask`, ...), which are
                the same in every stage.

        Shapes:
            states: (B, T) in the first stage, (B, T, D) in any other stage. Returns (B, T, D), or (B, T, V) in the last
                stage; (1,) in the last stage if the inputs have targets.
        """
        # The targets come with the inputs of every stage if the last one computes the loss in place of logits.
        targets = keywords.pop(SHIFTED, None)
        if targets is not None and self.loss_path is not None:
            total, _ = self.loss_path.total(lambda: self._compute(states, keywords, unused=math.nan), targets)
            assert total is not None, "the last stage calls the head"  # noqa: S101
            # A view would be one that autograd forbids to change, of which `fully_shard` warns.
            return torch.stack([total])
        result = self._compute(states, keywords, unused=math.nan)
        if not self._leak_checked:
            self._refuse_leak(states, keywords, result)
        return result

    def _compute(self, states: Tensor, keywords: dict[str, Any], *, unused: float) -> Tensor:
        """Runs the model's own forward up to the end of this stage.

        Args:
            states: the tensor that the stage received.
            keywords: the keyword arguments of the model's forward.
            unused: in a later stage, the fill value of the tensors that the code before its first block computes with.
        """
        part, gate = self.pipeline_part, self._gate
        forward = super().forward  # type: ignore[misc]
        documents = self.documents
        keywords = {**self._attention.completed(keywords, documents), **self._no_cache.keywords}
        given, name = states, self._input_name
        if not part.is_first:
            given = ContiguousGradient.apply(states) if states.requires_grad else states  # type: ignore[no-untyped-call]
            if part.entry is not Entry.CHAIN:
                gate.open(given, unused)
                given, name = _stand_in_input(part.entry, states, unused), "inputs_embeds"
        try:
            with self._no_cache.in_force(), self._attention.in_force(documents):
                named = part.entry is Entry.EMBEDS
                output = forward(**{name: given}, **keywords) if named else forward(given, **keywords)
        except StageExit as left:
            output = left.states
        finally:
            # Otherwise the hidden states would stay in memory until the next forward pass.
            gate.close()
        # torch sends only contiguous tensors.
        return output_tensor(output) if part.is_last else output.contiguous()

    def _refuse_leak(self, states: Tensor, keywords: dict[str, Any], result: Tensor) -> None:
        """Checks, once, whether values that should be discarded had an effect on the result.

        Args:
            states: the tensor that the stage received.
            keywords: the keyword arguments of the model's forward.
            result: the result of the stage.

        Raises:
            TrainingError: FG754 if the result depends on values that should be discarded.
        """
        part = self.pipeline_part
        if type(result) is not Tensor or result.device.type == "meta":  # torch infers shapes
            return
        if part.is_first or part.entry is Entry.CHAIN or not bool(result.detach().isnan().all()):
            self._leak_checked = True
            return
        # The received tensor may be NaN itself, because torch infers shapes from uninitialized memory. The result
        # depends on the discarded values only if it is NaN when they are NaN, and not NaN when they are zero.
        with torch.no_grad():
            again = self._compute(states, keywords, unused=0.0)
        if not bool(again.isnan().all()):
            raise TrainingError(
                f"{type(self).__name__} uses more of what it computes before its blocks than the hidden states that "
                f"enter the first block, so stage {part.index} cannot compute without it",
                code="FG754",
                hint="train it without a pipeline",
            )


def _stand_in_input(entry: Entry, states: Tensor, unused: float) -> Tensor:
    """Returns an input for the model's forward in a later stage: a tensor of the right shape that takes no memory."""
    if entry is Entry.IDS:
        return torch.zeros((), dtype=torch.long, device=states.device).expand(states.shape[:-1])
    return states.detach().new_full((), unused).expand(states.shape)


def make_stage(model: nn.Module, plan: SplitPlan, index: int) -> nn.Module:
    """Returns the part of the model that belongs to a stage. The model itself is not changed.

    The parameters and buffers of the stage are the same objects as those of the model, under the same names. If they
    are on the meta device, fill the stage afterwards.

    Args:
        model: the whole model.
        plan: the cuts of the model.
        index: the number of the stage.
    """
    blocks, span = plan.blocks, plan.span(index)
    held = plan.held(index)
    part = StagePart(
        index=index,
        num_stages=plan.num_stages,
        blocks=tuple(blocks.block_name(block) for block in span),
        held=held,
        entry=blocks.entry,
    )
    gate = Gate()
    # With these entries, `deepcopy` copies modules but neither tensors nor the config, and puts the placeholders where
    # modules of other stages are.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    if (config := getattr(model, "config", None)) is not None:
        memo[id(config)] = config
    if blocks.entry is Entry.CHAIN:
        memo |= {id(module): module for name, module in model.named_children() if name not in held}
    else:
        memo |= _stand_ins(model, blocks, span, held, gate)
    stage = copy.deepcopy(model, memo)
    if blocks.entry is Entry.CHAIN:
        for name in [name for name in stage._modules if name not in held]:
            del stage._modules[name]
    else:
        _replace_bare_parameters(stage, blocks, held)
        _mark_borders(stage, part, blocks, span, gate)
    _become_stage(stage, part, gate)
    return stage


def _stand_ins(
    model: nn.Module, blocks: BlockList, span: range, held: tuple[str, ...], gate: Gate
) -> dict[int, nn.Module]:
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[int, nn.Module] = {}
    for unit in (*blocks.before, *blocks.after):
        if unit in held or unit not in modules:
            continue
        module = modules[unit]
        kind = PlaceholderBefore if unit in blocks.before else PlaceholderAfter
        found[id(module)] = kind(unit, gate, width=getattr(module, "embedding_dim", None))
    for index, name in enumerate(blocks.names):
        if index >= span.stop:
            found[id(modules[name])] = PlaceholderLater(name, gate)
        elif index < span.start:
            # A stage without blocks (only norm and head) receives the output of the last block.
            enters = not span and index == len(blocks) - 1
            found[id(modules[name])] = PlaceholderEarlier(name, gate, num_outputs=blocks.num_outputs, enters=enters)
    return found


def _replace_bare_parameters(stage: nn.Module, blocks: BlockList, held: tuple[str, ...]) -> None:
    """Replaces the parameters of other stages that no placeholder replaces by buffers of the same shape."""
    for unit in (*blocks.before, *blocks.after):
        owner, _, name = unit.rpartition(".")
        module = stage.get_submodule(owner)
        if unit not in held and isinstance(parameter := module._parameters.get(name), nn.Parameter):
            del module._parameters[name]
            # Not persistent: the state of a stage must not have entries of other stages.
            module.register_buffer(name, torch.full_like(parameter.detach(), math.nan), persistent=False)


def _mark_borders(stage: nn.Module, part: StagePart, blocks: BlockList, span: range, gate: Gate) -> None:
    enters = span.start if span and not part.is_first else None
    leaves = span.stop - 1 if span and span.stop == len(blocks) and not part.is_last else None
    for index in sorted(edge for edge in {enters, leaves} if edge is not None):
        block = stage.get_submodule(blocks.block_name(index))
        block._border = Border(gate, enters=index == enters, leaves=index == leaves)  # type: ignore[assignment]
        kind = type(block)
        # Python looks up `__call__` on the class, so an attribute of this one block would have no effect.
        block.__class__ = type(kind.__name__, (BorderBlock, kind), {"__module__": kind.__module__})


def _become_stage(stage: nn.Module, part: StagePart, gate: Gate) -> None:
    parameters = inspect.signature(stage.forward).parameters
    kind = type(stage)
    input_name: str = getattr(kind, "main_input_name", "") or next(iter(parameters), "input")
    stage.__class__ = type(kind.__name__, (_StageForward, kind), {"__module__": kind.__module__})
    stage.pipeline_part = part  # type: ignore[assignment]
    stage._gate = gate  # type: ignore[assignment]
    stage._no_cache = NoCache(stage)  # type: ignore[assignment]
    stage._attention = AttentionInputs(stage)  # type: ignore[assignment]
    stage.documents = None  # type: ignore[assignment]
    stage._input_name = input_name  # type: ignore[assignment]
    stage._leak_checked = False  # type: ignore[assignment]
    stage.loss_path = None  # type: ignore[assignment]


def blocks_of_stage(stage: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a stage by their names in the model. These are the units to compile, shard or recompute."""
    part: Any = stage.pipeline_part
    return {name: stage.get_submodule(name) for name in part.blocks}


def output_tensor(output: Any) -> Tensor:
    """Returns the logits in a model's output, or the first tensor if there are no logits.

    Args:
        output: the output of the model.

    Shapes:
        Returns (B, T, V), or the shape of the first tensor.

    Raises:
        TrainingError: FG754 if the output has no tensor.
    """
    if isinstance(output, Tensor):
        return output
    items = output if isinstance(output, Mapping) else getattr(output, "__dict__", {})
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := items.get(name), Tensor):
            return found
    values = output if isinstance(output, tuple | list) else items.values()
    for found in values:
        if isinstance(found, Tensor):
            return found
    raise TrainingError(
        f"the model returned a {type(output).__name__} without a tensor, and the last stage must return logits",
        code="FG754",
        hint="return logits as a tensor, first in a tuple, or as 'logits'",
    )
