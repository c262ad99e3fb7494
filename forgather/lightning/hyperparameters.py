"""The hyper-parameters of a module: the arguments of its constructor, or what the user names.

`HyperParameters` is a base class for modules and data modules, as in Lightning: `save_hyperparameters()` in a
constructor keeps the arguments, `hparams` gives them, and a checkpoint stores those that JSON can hold.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

from forgather.errors import nearest
from forgather.lightning.hooks import unsupported
from forgather.value_text import shown


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are also attributes.

    Example:
        >>> AttributeDict(lr=0.1).lr
        0.1
    """

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no hyper-parameter {name!r}; {nearest(name, sorted(self))}")

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class HyperParameters:
    """The base class of objects that keep the arguments of their constructor."""

    _hparams: AttributeDict | None = None
    _hparams_initial: AttributeDict | None = None

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Collection[str] | None = None,
        frame: FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keeps hyper-parameters, which checkpoints then store.

        Args:
            *args: the names of constructor arguments to keep, or mappings or namespaces of values; without any, all
                arguments of the constructor are kept.
            ignore: the names of arguments that are not kept.
            frame: the frame of the constructor; by default that of the caller.
            logger: whether trackers get the values; kept for Lightning's sake, they always do.
        """
        here = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
        found = _constructor_arguments(self, here)
        skipped = {ignore} if isinstance(ignore, str) else set(ignore or ())
        names = [arg for arg in args if isinstance(arg, str)]
        if unknown := [name for name in names if name not in found]:
            raise unsupported(
                f"save_hyperparameters({shown(unknown[0])}): the constructor has no such argument",
                nearest(unknown[0], sorted(found)),
            )
        kept = found if not args else {name: found[name] for name in names}
        for given in args:
            if not isinstance(given, str):
                kept |= dict(given) if isinstance(given, Mapping) else vars(given)
        chosen = {name: value for name, value in kept.items() if name not in skipped}
        # As in Lightning: in place, so that the hyper-parameters of a base class are kept, too.
        self.__dict__["_hparams"] = AttributeDict({**(self._hparams or {}), **chosen})
        self.__dict__["_hparams_initial"] = AttributeDict(copy.copy(self.hparams))

    @property
    def hparams(self) -> AttributeDict:
        """The hyper-parameters; empty if none were saved."""
        if self._hparams is None:
            self.__dict__["_hparams"] = AttributeDict()
        assert self._hparams is not None  # noqa: S101
        return self._hparams

    @property
    def hparams_initial(self) -> AttributeDict:
        """The hyper-parameters as they were saved, whatever the module changed later."""
        return AttributeDict(self._hparams_initial or {})


def _constructor_arguments(owner: Any, frame: FrameType | None) -> dict[str, Any]:
    """Returns the arguments of the constructors that are running for an object, those of subclasses last."""
    found: list[dict[str, Any]] = []
    while frame is not None:
        local = frame.f_locals
        if frame.f_code.co_name == "__init__" and next(iter(local.values()), None) is owner:
            info = inspect.getargvalues(frame)
            given = {name: local[name] for name in info.args[1:]}
            given |= {name: local[name] for name in frame.f_code.co_varnames[_positional(frame) : _named(frame)]}
            found.append(given | dict(local.get(info.keywords or "", {})))
        frame = frame.f_back
    return {name: value for given in found for name, value in given.items()}


def _positional(frame: FrameType) -> int:
    return frame.f_code.co_argcount


def _named(frame: FrameType) -> int:
    return frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
