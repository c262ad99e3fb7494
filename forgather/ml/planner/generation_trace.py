"""The memory of generated answers: a prompt is read, and the last token of the longest answer is computed.

Takes a strategy whose model has fake weights, and prompts; calls the model as its `generate` does, with a cache of keys
and values. The tokens in between are computed at once, outside of what is compared: only their keys and values matter.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from forgather.ml.planner.places import Places
from forgather.ml.planner.planned_batches import PromptBatch
from forgather.ml.strategy.model_strategy import to_device

GENERATION, BETWEEN = "generation", "tokens between"


def generate(
    strategy: Any, prompts: PromptBatch, places: Places, keep_cache: Callable[[Iterator[Tensor]], None]
) -> None:
    """Computes the first and the last token of the answers to prompts.

    Args:
        strategy: the strategy.
        prompts: the prompts, and the length of their answers.
        places: what is told which pass begins.
        keep_cache: a function that is called with the cache after each pass.
    """
    given = [one.clone() for one in to_device((prompts.input_ids, prompts.attention_mask), strategy.topology.device)]
    # The given tokens stay, and `generate` has its own, which grow.
    ids, mask = given[0].clone(), given[1].clone()
    rows, length = ids.shape
    with strategy.generating() as model:
        # As `generate` does, the model computes the logits of the last token only, if it can, and each row has
        # positions of its own.
        taken = inspect.signature(model.forward).parameters
        last = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        cache: Any = None
        scores: Any = None
        passes = ((GENERATION, length), (BETWEEN, prompts.num_new_tokens - 2), (GENERATION, 1))
        for phase, count in passes:
            if count < 1 or (cache is not None and prompts.num_new_tokens < 2):
                continue
            places.begin_pass(phase)
            if cache is not None:
                more = torch.ones(rows, count, dtype=torch.long, device=ids.device)
                ids, mask = torch.cat([ids, more], dim=1), torch.cat([mask, more], dim=1)
                del more
            positions = mask.cumsum(-1).sub_(1).clamp_(min=0)
            own = {"position_ids": positions[:, -count:]} if "position_ids" in taken else {}
            inputs = {"input_ids": ids[:, -count:].clone(), "attention_mask": mask, **own, **last}
            output = model(**inputs, past_key_values=cache, use_cache=True)
            # The logits of the last token in 32 bits, as they are compared. Those of the token before stay until then.
            scores = output.logits[:, -1, :].to(copy=True, dtype=torch.float32)
            cache = output.past_key_values
            del output, inputs
            keep_cache(_tensors(cache))
        del scores


def _tensors(cache: Any) -> Iterator[Tensor]:
    for layer in getattr(cache, "layers", ()):
        yield from (item for item in (layer.keys, layer.values) if isinstance(item, Tensor))
