"""State of callbacks, in the form of transformers.

Takes a session; puts what callbacks export into its state, and gives it back to them. Keeps true: several callbacks of
one class are told apart by their order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from forgather.errors import CheckpointError
from forgather.ml.callbacks.base import ExportableState
from forgather.ml.log import get_logger
from forgather.ml.trainer.session import Session
from forgather.redaction import holds_hidden

_log = get_logger(__name__)


def export_states(session: Session) -> None:
    """Puts the state of each callback that has one into the state of the run."""
    states: dict[str, Any] = {}
    for part in [*session.dispatcher.callbacks, session.control]:
        if isinstance(part, ExportableState):
            name = type(part).__name__
            state, earlier = _plain(name, part.state()), states.get(name)
            if earlier is None:
                states[name] = state
            else:
                states[name] = [*(earlier if isinstance(earlier, list) else [earlier]), state]
    # transformers declares a list, and keeps a dict by the names of classes.
    session.state.stateful_callbacks = states  # type: ignore[assignment]


def _plain(name: str, state: Any) -> Any:
    try:
        json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state of the callback {name} is not what JSON holds: {error}",
            code="FG606",
            hint="state() may hold numbers, texts, lists and dicts with texts as keys: nothing is pickled",
        ) from None
    return state


def import_states(session: Session, states: Mapping[str, Any], *, settings: bool) -> None:
    """Gives callbacks the states that `export_states` put into the state of a run.

    Args:
        session: whose callbacks go on.
        states: of a checkpoint.
        settings: also restore how the callbacks were made; otherwise only what they counted since.
    """
    waiting = {name: list(found) if isinstance(found, list) else [found] for name, found in states.items()}
    for callback in session.dispatcher.callbacks:
        queue = waiting.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and queue:
            found = queue.pop(0)
            for name, value in {**(found["args"] if settings else {}), **found["attributes"]}.items():
                if holds_hidden(value):
                    _log.warning(
                        "%s.%s is not restored: the checkpoint lacks its secret", type(callback).__name__, name
                    )
                else:
                    setattr(callback, name, value)
