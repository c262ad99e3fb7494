"""Forward passes over all stages without gradients, and the model that callbacks call.

`ForwardPass` returns the output of the last stage on the rank of that stage; `PipelineModel` returns it on every rank,
and generates text. Both work with every placement of stages and with inputs of any shape. torch's own evaluation does
not support V-shaped schedules. The buffers of the training schedule do not change. Weights that the forward pass
gathered are resharded afterwards. A rank starts its next batch while later stages still compute the previous one. Text
generation is greedy and uses no key-value cache, so each token needs a forward pass over the whole text so far.

Shapes:
    B rows, T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_outputs import CausalLMOutput

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.strategy.pipeline.local_stages import LocalStages
from forgather.ml.strategy.pipeline.microbatch_split import StepInputs, step_inputs
from forgather.ml.strategy.pipeline.schedules import Placement

# A receiver does not know the shape and dtype of what it gets, so each transfer begins with a header of fixed length.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
_MAX_DIMS = 6
_MAX_TENSORS = 4
_HEADER = 1 + _MAX_TENSORS * (2 + _MAX_DIMS)


class ForwardPass:
    """The forward pass over all stages.

    Args:
        stages: the stage modules on this rank, by stage number.
        placement: the placement of all stages on ranks.
        group: the process group of the pipeline.
        device: the device that this rank computes on.
    """

    def __init__(
        self, stages: Mapping[int, nn.Module], *, placement: Placement, group: Any, device: torch.device
    ) -> None:
        self.stages = stages
        self.placement = placement
        self.group = group
        self.device = device
        self._pending_sends: list[tuple[Any, Tensor]] = []

    def __call__(self, inputs: StepInputs) -> Any:
        """Returns the model's output on the rank of the last stage, and None on other ranks.

        Collective: every rank of the pipeline must call it.

        Shapes:
            inputs: (B, T). Returns the model's output, such as (B, T, V) logits.
        """
        output: Any = None
        carried: tuple[Tensor, ...] = ()
        last = self.placement.num_stages - 1
        for index, stage in sorted(self.stages.items()):
            if index == 0:
                carried = inputs.first
            elif index - 1 not in self.stages:
                carried = self._receive(self.placement.rank_of(index - 1))
            stage.documents = inputs.documents  # type: ignore[assignment]
            try:
                found = stage(*carried, **inputs.every)
            finally:
                stage.documents = None  # type: ignore[assignment]
            if index == last:
                output = found
                break
            carried = tuple(found) if isinstance(found, tuple | list) else (found,)
            if index + 1 not in self.stages:
                self._send(carried, self.placement.rank_of(index + 1))
        self._shard_again()
        return output

    def finish(self) -> None:
        """Waits until everything that this rank sent has arrived."""
        for work, _ in self._pending_sends:
            work.wait()
        self._pending_sends.clear()

    def _send(self, tensors: tuple[Tensor, ...], rank: int) -> None:
        # At most one batch is in transfer at a time: otherwise the batches that a fast first stage sends would fill the
        # memory.
        self.finish()
        header = torch.zeros(_HEADER, dtype=torch.int64)
        header[0] = len(tensors)
        for number, tensor in enumerate(tensors):
            start = 1 + number * (2 + _MAX_DIMS)
            header[start] = _DTYPES.index(tensor.dtype)
            header[start + 1] = tensor.ndim
            header[start + 2 : start + 2 + tensor.ndim] = torch.tensor(tensor.shape)
        for tensor in (header.to(self.device), *(tensor.detach().contiguous() for tensor in tensors)):
            # Some backends do not keep the tensor alive until it is sent.
            self._pending_sends.append((dist.isend(tensor, group=self.group, group_dst=rank), tensor))

    def _receive(self, rank: int) -> tuple[Tensor, ...]:
        header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
        dist.recv(header, group=self.group, group_src=rank)
        facts = header.tolist()
        tensors = []
        for number in range(facts[0]):
            start = 1 + number * (2 + _MAX_DIMS)
            shape = facts[start + 2 : start + 2 + facts[start + 1]]
            tensor = torch.empty(shape, dtype=_DTYPES[facts[start]], device=self.device)
            dist.recv(tensor, group=self.group, group_src=rank)
            tensors.append(tensor)
        return tuple(tensors)

    def _shard_again(self) -> None:
        for stage in self.stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    # A forward pass without a backward pass leaves the weights of the root gathered.
                    module.reshard()


_log = get_logger(__name__)


class PipelineModel(nn.Module):
    """The whole model, whose forward runs stage by stage on the ranks of the pipeline.

    Args:
        local: the stages on this rank.
        run: the forward pass over all stages.
        model: the whole model on the meta device, from which the configuration and the generation settings are taken.
    """

    def __init__(self, local: LocalStages, run: ForwardPass, model: nn.Module) -> None:
        super().__init__()
        self.local = local
        # In a tuple, so that it is not registered as a submodule: its parameters are on the meta device.
        self._whole = (model,)
        self.config: Any = getattr(model, "config", None)
        self.generation_config: Any = getattr(model, "generation_config", None)
        self.main_input_name: Any = getattr(model, "main_input_name", "input_ids")
        self._run = run
        self._warned = False

    @property
    def stands_for(self) -> nn.Module:
        """The whole model on the meta device, whose class is named in checkpoints."""
        return self._whole[0]

    @property
    def device(self) -> torch.device:
        """The device on which the model expects its inputs."""
        return self._run.device

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Returns the output of the model, computed without gradients and the same on every rank.

        Collective: every rank of the pipeline must call it.

        Shapes:
            inputs: (B, T). Returns (B, T, V) logits from a language model, or the shape of the model's output.
        """
        batch = inputs if not args else args[0] if not inputs else {self.main_input_name: args[0], **inputs}
        with torch.no_grad():
            given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            output = self._on_every_rank(self._run(step_inputs(given if given else batch)))
        # Callbacks expect the output class of a language model.
        return CausalLMOutput(logits=output) if hasattr(self.config, "vocab_size") else output

    def _on_every_rank(self, output: Tensor | None) -> Tensor:
        """Returns the output of the last stage on every rank."""
        placement, group = self._run.placement, self._run.group
        if placement.num_ranks == 1 and output is not None:
            return output
        facts = [None if output is None else (tuple(output.shape), output.dtype)]
        dist.broadcast_object_list(facts, group=group, group_src=placement.last_rank, device=self.device)
        shape, dtype = facts[0]  # type: ignore[misc]
        there = torch.empty(shape, dtype=dtype, device=self.device) if output is None else output.contiguous()
        dist.broadcast(there, group=group, group_src=placement.last_rank)
        return there

    @torch.no_grad()
    def generate(
        self, inputs: Tensor, *, attention_mask: Tensor | None = None, generation_config: Any = None, **settings: Any
    ) -> Tensor:
        """Returns the prompts followed by the text that the model generates greedily.

        Collective: every rank of the pipeline must call it.

        Args:
            inputs: the token ids of prompts of equal length.
            attention_mask: the attention mask of the prompts, in which no token may be masked.
            generation_config: a generation config, of which `max_new_tokens`, `eos_token_id` and `pad_token_id` are
                used.
            **settings: the same settings as keyword arguments, which have higher precedence.

        Shapes:
            inputs: (B, T); attention_mask: (B, T). Returns (B, T + new tokens).

        Raises:
            TrainingError: FG765 if the prompts are padded.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise TrainingError(
                "the prompts are padded, and a pipeline continues only prompts of equal length",
                code="FG765",
                hint="continue prompts one by one",
            )
        found = {**(generation_config.to_dict() if generation_config is not None else {}), **settings}
        if found.get("do_sample") and not self._warned:
            self._warned = True
            _log.warning(
                "do_sample is true, but a pipeline generates greedily: it takes the most likely token each time"
            )
        ends = found.get("eos_token_id")
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        filler = found.get("pad_token_id")
        filler = filler if filler is not None else ends[0] if ends else 0
        text = inputs.to(self.device)
        ended = torch.zeros(text.shape[0], dtype=torch.bool, device=self.device)
        for _ in range(found.get("max_new_tokens") or 20):
            logits = self._last_logits(text)
            token = logits.argmax(-1).masked_fill(ended, filler)
            text = torch.cat([text, token[:, None]], dim=1)
            ended |= torch.isin(token, torch.tensor(ends, device=self.device, dtype=token.dtype))
            # Every rank has the same tokens, so all of them leave the loop together.
            if bool(ended.all()):
                break
        return text

    def _last_logits(self, text: Tensor) -> Tensor:
        output = self._run(step_inputs({"input_ids": text}))
        return self._on_every_rank(None if output is None else output[:, -1])
