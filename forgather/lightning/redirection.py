"""Calls a step of a module through the wrapper that a strategy has put around it, as Lightning does.

A wrapper for several processes works only if its own `forward` is called: it gathers weights, and prepares the
reduction of gradients. For the time of the call, the `forward` of the module is therefore the step.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from forgather.lightning.scene import Scene


def call_through(scene: Scene, name: str, args: tuple[Any, ...], engine: Any = None) -> Any:
    """Calls a step of the module, under the strategy's autocast.

    Args:
        scene: the scene, whose strategy is built.
        name: the name of the step.
        args: the arguments of the step.
        engine: the wrapper around the module, in training; None for none.
    """
    strategy: Any = scene.strategy
    module: Any = scene.module
    outer = module if engine is None else engine
    with strategy.precision.autocast():
        if outer is module and not isinstance(module, FSDPModule):
            return scene.hooks.step(name, *args)

        def step(*given: Any) -> Any:
            # At once: what the step calls is the module's own `forward` again.
            restore()
            return scene.hooks.step(name, *given)

        own = vars(module).get("forward")

        def restore() -> None:
            if own is None:
                vars(module).pop("forward", None)
            else:
                module.forward = own

        module.forward = step
        try:
            return outer(*args)
        finally:
            restore()
