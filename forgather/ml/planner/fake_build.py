"""Builds a strategy for a trace: with fake weights, and with few blocks if the model may be shortened.

`FakeBuild` takes the place of `Strategy.build`, see `forgather.ml.strategy.base.build_strategy`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.ml.planner.engine_tensors import passes_to_settle
from forgather.ml.planner.extrapolation import block_list, shorten
from forgather.ml.planner.model_builders import building
from forgather.ml.strategy.base import Recipe, Strategy
from forgather.ml.strategy.meta_model import move_to_meta
from forgather.ml.strategy.shapes_only import fill_with_fakes
from forgather.ml.trainer.model_setup import Step, compile_model, recompute_activations

_recomputes_all: ContextVar[bool] = ContextVar("_recomputes_all", default=False)


@contextmanager
def recomputing_all() -> Iterator[None]:
    """Context manager in which blocks with an `activation_memory_budget` are traced as if they recomputed everything.

    What torch chooses within the budget is known only when it compiles; otherwise the blocks keep everything.
    """
    token = _recomputes_all.set(True)
    try:
        yield
    finally:
        _recomputes_all.reset(token)


class FakeBuild:
    """A function that builds a strategy.

    Args:
        fake: the mode of the weights.
        depth: the number of blocks to which the model is shortened; None keeps all of them.
        cuts_depth: whether a model that is cut into pipeline stages is shortened as well; its cuts are for `depth`.
        holds_recomputation: whether the model does not recompute yet. A strategy that learns from its first step how
            the model computes, as ZeRO 3 does, cannot recompute later: its model recomputes from the beginning.

    Attributes:
        whole: the number of blocks before the model was shortened; None if it was not.
        recomputation: the steps that make the model recompute, if they are held.
    """

    def __init__(
        self, fake: FakeTensorMode, depth: int | None, *, cuts_depth: bool = False, holds_recomputation: bool = False
    ) -> None:
        self._fake = fake
        self._depth = depth
        self._cuts_depth = cuts_depth
        self._holds_recomputation = holds_recomputation
        self.whole: int | None = None
        self.recomputation: list[Step] = []

    def __call__(self, strategy: Strategy, recipe: Recipe) -> None:
        """Builds a strategy by a recipe."""
        # The stages of a pipeline are cut at the names of blocks.
        is_whole = self._cuts_depth or strategy.layout.pipeline_parallel_size == 1
        is_whole &= not any(skips_blocks(step) for step in recipe.prepare)
        make_fake = functools.partial(
            self._faked, recipe.make_model, strategy.topology.device, self._depth if is_whole else None
        )
        steps = [step for step in recipe.prepare if not _is(step, compile_model)]
        if _recomputes_all.get():
            steps.append(functools.partial(recompute_activations, settings={}))
        if self._holds_recomputation and passes_to_settle(strategy) == 1:
            self.recomputation = [step for step in steps if _is(step, recompute_activations)]
        steps = [step for step in steps if step not in self.recomputation]
        # The strategy also makes meshes, whose ranks are real.
        with building(self._fake):
            strategy.build(replace(recipe, make_model=make_fake, prepare=steps))

    def _faked(self, make_model: Callable[[], nn.Module], device: torch.device, depth: int | None) -> nn.Module:
        """Returns the model with fake tensors on a device, shortened to a depth if it may be."""
        model = make_model()
        if depth is not None and (blocks := block_list(model)) is not None:
            self.whole = len(blocks)
            shorten(model, depth)
        if any(not isinstance(item, FakeTensor) or item.device != device for item in model.parameters()):
            # The config built the model before the trace began, or its constructor reads values.
            move_to_meta(model)
            fill_with_fakes(model, device)
        return model


def skips_blocks(step: Step) -> bool:
    """Returns whether a step makes only some of the blocks recompute, so that a plan needs all of them.

    Args:
        step: a preparation step of a model.
    """
    settings = getattr(step, "keywords", {}).get("settings", {})
    return _is(step, recompute_activations) and settings.get("every_n_layers", 1) > 1


def _is(step: Step, function: Callable[..., None]) -> bool:
    return getattr(step, "func", step) is function
