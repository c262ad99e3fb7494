"""Methods of transformers' `Trainer` in a subclass of ours: which are called, and which are refused.

Takes a trainer; gives nothing, or an error. Keeps true: nothing that a user wrote for transformers' trainer is left
out in silence.
"""

from __future__ import annotations

from collections.abc import Iterator

from forgather.errors import Diagnostic, TrainingError
from forgather.trainer_hooks import HF_TRAINER, refusal, refused_hooks

_OURS = "forgather.ml."
# A class that derives from both has the methods of transformers behind those of ours: nobody wrote them for it.
_NOT_THE_USERS = (_OURS, "transformers.", "builtins")


def refuse_unused_hooks(trainer: object) -> None:
    """Raises where the class of a trainer, or the object itself, has hooks that are never called.

    Raises:
        TrainingError: FG860 for hooks that no trainer of ours calls, FG861 for those that this one does not.
    """
    found = list(_found(trainer))
    if found:
        first, *rest = found
        raise TrainingError(first.message, code=first.code, hint=f"{first.hint}; or {HF_TRAINER}", others=rest)


def _found(trainer: object) -> Iterator[Diagnostic]:
    ours = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith(_OURS)]
    refused = refused_hooks(ours)
    for owner, name in dict.fromkeys(_written(trainer)):
        if name in refused:
            code, hint = refused[name]
            yield Diagnostic(code=code, message=refusal(owner, name, f"forgather.ml:{ours[0]}"), hint=hint)
    if "compute_loss" in vars(trainer):
        message = "'compute_loss' was set on the trainer after it was made, and is not called"
        yield Diagnostic(code="FG860", message=message, hint="define it in a subclass of the trainer")


def _written(trainer: object) -> Iterator[tuple[str, str]]:
    """Yields the names that a user gave a trainer, with what has them."""
    for kind in type(trainer).__mro__:
        if not kind.__module__.startswith(_NOT_THE_USERS):
            yield from ((kind.__name__, name) for name in vars(kind))
    yield from (("the trainer", name) for name in vars(trainer))
