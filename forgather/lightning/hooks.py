"""The hooks of Lightning: which our loop calls, in which of them values may be logged, and which are refused.

The input is a `LightningModule`, a data module or a callback; the output is the call of a hook, or an error that names
what our loop would not call. A method counts as overridden if it is defined outside of Lightning's and our base
classes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from forgather.errors import TrainingError

_BASES = ("forgather.lightning.", "lightning.pytorch.", "pytorch_lightning.")

LOGGED: dict[str, tuple[bool, bool] | None] = {
    "setup": None,
    "configure_model": None,
    "on_fit_start": None,
    "on_sanity_check_start": None,
    "on_sanity_check_end": None,
    "on_train_start": (False, True),
    "on_train_epoch_start": (False, True),
    "on_train_batch_start": (True, False),
    "training_step": (True, False),
    "on_before_zero_grad": (True, False),
    "on_before_backward": (True, False),
    "on_after_backward": (True, False),
    "on_before_optimizer_step": (True, False),
    "on_train_batch_end": (True, False),
    "on_train_epoch_end": (False, True),
    "on_train_end": None,
    "on_fit_end": None,
    "teardown": None,
    "on_exception": None,
    "on_validation_model_zero_grad": None,
    "on_predict_start": None,
    "on_predict_epoch_start": None,
    "on_predict_batch_start": None,
    "predict_step": None,
    "on_predict_batch_end": None,
    "on_predict_epoch_end": None,
    "on_predict_end": None,
    "on_predict_model_eval": None,
    **{
        name: levels
        for stage in ("validation", "test")
        for name, levels in {
            f"on_{stage}_model_eval": None,
            f"on_{stage}_start": (False, True),
            f"on_{stage}_epoch_start": (False, True),
            f"on_{stage}_batch_start": (False, True),
            f"{stage}_step": (False, True),
            f"on_{stage}_batch_end": (False, True),
            f"on_{stage}_epoch_end": (False, True),
            f"on_{stage}_end": None,
            f"on_{stage}_model_train": None,
        }.items()
    },
}
"""The hooks that are called. The value is None where Lightning refuses `log`, else the defaults of `on_step` and
`on_epoch`; both hold only where `on_step` may be true, in hooks of a batch."""

_LOOP = "the loop does this itself, in the way that the strategy needs"
REFUSED = {
    "optimizer_step": _LOOP,
    "optimizer_zero_grad": _LOOP,
    "backward": f"{_LOOP}; change the loss in training_step, or gradients in on_after_backward",
    "configure_gradient_clipping": f"{_LOOP}; use gradient_clip_val and gradient_clip_algorithm",
    "clip_gradients": f"{_LOOP}; use gradient_clip_val and gradient_clip_algorithm",
    "lr_scheduler_step": "give configure_optimizers a scheduler whose step() takes no argument",
    "configure_sharded_model": "build the layers in __init__ or configure_model; the strategy shards them",
    "transfer_batch_to_device": "return tensors, lists and mappings from the loader, which are moved to the device",
    "on_before_batch_transfer": "do it in the data set or its collate function",
    "on_after_batch_transfer": "do it at the beginning of training_step",
    "on_save_checkpoint": "keep what a checkpoint needs in a buffer of the module, or give the trainer save_function",
    "on_load_checkpoint": "keep what a checkpoint needs in a buffer of the module",
    "state_dict": "keep what a checkpoint needs in a buffer of the module",
    "load_state_dict": "keep what a checkpoint needs in a buffer of the module",
}
"""The methods that our loop does not call, each with what to do instead."""

_REFUSED_OF_CALLBACK = {
    name: REFUSED[name] for name in ("on_save_checkpoint", "on_load_checkpoint", "state_dict", "load_state_dict")
}


def overridden(owner: Any, name: str) -> bool:
    """Returns whether an object has a method of its own, and not the one of a base class of Lightning or of ours.

    Args:
        owner: a module, a data module or a callback.
        name: the name of the method.
    """
    if name in getattr(owner, "__dict__", {}):
        return True
    kind = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    return kind is not None and kind not in (nn.Module, object) and not kind.__module__.startswith(_BASES)


def refuse_unsupported(module: nn.Module, callbacks: Sequence[Any] = (), data: Any = None) -> None:
    """Raises an error if a module, its callbacks or its data have methods that our loop would never call.

    Args:
        module: the `LightningModule`.
        callbacks: the callbacks.
        data: the `LightningDataModule`, or None.

    Raises:
        TrainingError: FG865 if there is such a method, or if the module optimizes by itself.
    """
    if not getattr(module, "automatic_optimization", True):
        raise unsupported(
            f"{type(module).__name__} sets automatic_optimization = False, and the loop does the optimizer step",
            "return the loss from training_step, and write the loop of a module with several optimizers as a plain "
            "torch script",
        )
    for owner in (module, data):
        for name, hint in REFUSED.items():
            if owner is not None and overridden(owner, name):
                raise unsupported(f"{type(owner).__name__} defines {name!r}, which would never be called", hint)
    for callback in callbacks:
        for name, hint in _REFUSED_OF_CALLBACK.items():
            if overridden(callback, name):
                raise unsupported(f"{type(callback).__name__} defines {name!r}, which would never be called", hint)


def unsupported(message: str, hint: str | None) -> TrainingError:
    """Returns the FG865 error: something of a `LightningModule` that our trainers do not run.

    Args:
        message: what was found.
        hint: what to do instead.
    """
    return TrainingError(message, code="FG865", hint=hint).about("model")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a step takes an argument by this name, or, as Lightning counts, at least two arguments.

    Args:
        function: the step, as a bound method.
        name: the name of the argument.
    """
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_POSITIONAL for p in parameters.values()) or len(parameters) >= 2


class Hooks:
    """Calls the hooks of one run: first those of the callbacks, then that of the module.

    Args:
        trainer: the object that callbacks get as the trainer.
        module: the module.
        callbacks: the callbacks, in the order in which they are called.
    """

    def __init__(self, trainer: Any, module: nn.Module, callbacks: Sequence[Any]) -> None:
        self._trainer, self._module = trainer, module
        # As in Lightning: a callback that saves must see what all others have done.
        self.callbacks = sorted(callbacks, key=_is_checkpoint)
        self.current: str | None = None
        """The hook that is being called, which determines how `log` averages."""

    def call(self, name: str, *args: Any) -> Any:
        """Calls a hook of all callbacks and of the module, and returns what that of the module returned."""
        self.call_callbacks(name, *args)
        return self.call_module(name, *args)

    def call_callbacks(self, name: str, *args: Any, monitoring: bool | None = None) -> None:
        """Calls a hook of the callbacks.

        Args:
            name: the name of the hook.
            *args: the arguments after the trainer and the module.
            monitoring: true or false to call only the callbacks that do, or do not, watch a metric.
        """
        for callback in self.callbacks:
            if monitoring is None or monitoring == (getattr(callback, "monitor", None) is not None):
                method = getattr(callback, name, None)
                if callable(method):
                    self._named(name, method, self._trainer, self._module, *args)

    def call_module(self, name: str, *args: Any) -> Any:
        """Calls a hook of the module, if it has one of its own, and returns the result."""
        return self._named(name, getattr(self._module, name), *args) if overridden(self._module, name) else None

    def step(self, name: str, *args: Any) -> Any:
        """Calls a step of the module, such as `validation_step`."""
        return self._named(name, getattr(self._module, name), *args)

    def _named(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        # Steps call other hooks only in between: the name of the outer one is put back.
        outer, self.current = self.current, name
        module: Any = self._module
        module._current_fx_name = name
        try:
            return method(*args)
        finally:
            self.current = module._current_fx_name = outer


def _is_checkpoint(callback: Any) -> bool:
    return any("Checkpoint" in kind.__name__ for kind in type(callback).__mro__)
