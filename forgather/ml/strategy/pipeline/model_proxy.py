"""What callbacks see as the model of a pipeline: one that computes over all stages.

Takes a forward pass over stages; gives logits on every rank, and text. Keeps true: every rank of a replica calls it
with the same inputs and gets the same answer; text is greedy and keeps no cache of keys and values, so each token is
a pass over the whole text so far.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from forgather.errors import TrainingError
from forgather.ml.log import get_logger
from forgather.ml.strategy.pipeline.inference import ForwardPass
from forgather.ml.strategy.pipeline.local_stages import LocalStages
from forgather.ml.strategy.pipeline.microbatch_split import step_inputs

_log = get_logger(__name__)


class PipelineView(nn.Module):
    """The whole model, computed stage by stage.

    Args:
        local: the stages of this rank.
        run: the forward pass over all stages.
        model: the whole model without memory; tells configuration and settings of generation.
    """

    def __init__(self, local: LocalStages, run: ForwardPass, model: nn.Module) -> None:
        super().__init__()
        self.local = local
        # In a tuple, so that it is no part of the view: it has no memory.
        self._whole = (model,)
        self.config: Any = getattr(model, "config", None)
        self.generation_config: Any = getattr(model, "generation_config", None)
        self.main_input_name: Any = getattr(model, "main_input_name", "input_ids")
        self._run = run
        self._said = False

    @property
    def stands_for(self) -> nn.Module:
        """The whole model without memory: its class is the one that is saved."""
        return self._whole[0]

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        return self._run.device

    def forward(self, *args: Any, **inputs: Any) -> Any:
        """Returns the output of the model, the same on every rank; without gradients."""
        batch = inputs if not args else args[0] if not inputs else {self.main_input_name: args[0], **inputs}
        with torch.no_grad():
            given = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
            output = self._everywhere(self._run(step_inputs(given if given else batch)))
        return CausalLMOutput(logits=output) if hasattr(self.config, "vocab_size") else output

    def _everywhere(self, output: Tensor | None) -> Tensor:
        """Returns the tensor of the last stage on every rank."""
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
        """Returns the prompts with what the model writes after them, the likeliest token each time.

        Args:
            inputs: token ids, one row a prompt, all of one length.
            attention_mask: of the prompts; none of their tokens may be masked.
            generation_config: `max_new_tokens`, `eos_token_id` and `pad_token_id` count.
            settings: the same, by name.

        Raises:
            TrainingError: FG765 for prompts that are padded.
        """
        if attention_mask is not None and not bool(attention_mask.all()):
            raise TrainingError(
                "the prompts are padded, and a pipeline continues prompts of one length",
                code="FG765",
                hint="continue prompts one by one",
            )
        found = {**(generation_config.to_dict() if generation_config is not None else {}), **settings}
        if found.get("do_sample") and not self._said:
            self._said = True
            _log.warning("do_sample is true, and text of a pipeline is greedy: the likeliest token each time")
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
            if bool(ended.all()):
                break
        return text

    def _last_logits(self, text: Tensor) -> Tensor:
        output = self._run(step_inputs({"input_ids": text}))
        return self._everywhere(None if output is None else output[:, -1])
