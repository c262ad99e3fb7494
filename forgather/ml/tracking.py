"""Numbers, images, texts and tables of the user's code, in the reports of a run.

`log`, `log_image`, `log_text` and `log_table` can be called wherever the code of a run is called: in a callback, a
metric function, a reward function, a model. Numbers become lines of `metrics.jsonl`; images, texts and tables become
files in the folder `logged` of the run's folder. All of them are sent to the trackers of `report_to`. The main process
reports alone, so every process may call them.

Example:
    from forgather.ml.tracking import log, log_image

    class Mine(TrainerCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            log({"pairs_won": 0.75})
            log_image("attention", array)
"""

from __future__ import annotations

import csv
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError
from forgather.redaction import hide

logger = logging.getLogger(__name__)

FOLDER = "logged"
# The other keys of a line of metrics.
_TAKEN = frozenset(("step", "time", "event", "name", "epoch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """Something that the user's code has logged.

    Args:
        kind: "numbers", "image", "text" or "table".
        step: the number of optimizer steps that were done.
        name: the name; "" for numbers, which have names of their own.
        content: numbers by name; the text; the names of the columns and the rows; None for an image.
        file: the file of an image (PNG), a text or a table (CSV); None for numbers.
    """

    kind: str
    step: int
    name: str = ""
    content: Any = None
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    process: int
    step: Callable[[], int]
    folder: Path
    send: Callable[[Logged], None] | None


_run: ContextVar[_Run | None] = ContextVar("run that user code logs to", default=None)


@contextmanager
def receiving(step: Callable[[], int], folder: Path, send: Callable[[Logged], None] | None) -> Iterator[None]:
    """Context manager in which user code can log.

    Args:
        step: a function that returns the number of optimizer steps that were done.
        folder: the folder of the run.
        send: a function that gets what is logged; None on the processes that do not report.
    """
    token = _run.set(_Run(os.getpid(), step, folder, send))
    try:
        yield
    finally:
        _run.reset(token)


def log(numbers: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Logs numbers at the current step.

    Args:
        numbers: the numbers by name: Python numbers, or tensors and arrays of one element.
        **more: further numbers.

    Raises:
        TrainingError: FG586 if no run is going on here; FG587 if a value is not a number, or a name is taken.
    """
    run = _current("log")
    values = {name: _as_number(name, value) for name, value in {**(numbers or {}), **more}.items()}
    if run.send is not None and values:
        run.send(Logged(kind="numbers", step=run.step(), content=values))


def log_text(name: str, text: str) -> None:
    """Logs a text at the current step, and writes it as a file.

    Args:
        name: the name of the text, such as `samples/first`.
        text: the text. Secrets in it are hidden.

    Raises:
        TrainingError: FG586 if no run is going on here; FG587 if the name cannot be one of a file.
    """
    shown = hide(str(text))
    _log_file("log_text", Logged(kind="text", step=0, name=name, content=shown), ".txt", lambda: shown.encode())


def log_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Logs a table at the current step, and writes it as a CSV file.

    Args:
        name: the name of the table.
        columns: the names of the columns.
        rows: the rows, each with a value for each column.

    Raises:
        TrainingError: FG586 if no run is going on here; FG587 if a row has another number of values, or the name
            cannot be one of a file.
    """
    names = [str(column) for column in columns]
    lines = [[hide(value) if isinstance(value, str) else value for value in row] for row in rows]
    for number, line in enumerate(lines):
        if len(line) != len(names):
            message = f"log_table({name!r}): row {number} has {len(line)} values, and there are {len(names)} columns"
            raise TrainingError(message, code="FG587", hint="give each row a value for each column")

    def content() -> bytes:
        stream = io.StringIO(newline="")
        csv.writer(stream).writerows([names, *lines])
        return stream.getvalue().encode()

    _log_file("log_table", Logged(kind="table", step=0, name=name, content=(names, lines)), ".csv", content)


def log_image(name: str, image: Any) -> None:
    """Logs an image at the current step, and writes it as a PNG file.

    Args:
        name: the name of the image.
        image: an image of Pillow, a figure of matplotlib, an array or a tensor.

    Shapes:
        An array: (H, W) or (H, W, C); a tensor: (H, W) or (C, H, W); C is 1, 3 or 4. Whole numbers are from 0 to 255,
        and others from 0 to 1.

    Raises:
        TrainingError: FG586 if no run is going on here; FG587 if it is not an image, or the name cannot be one of a
            file.
    """
    _log_file("log_image", Logged(kind="image", step=0, name=name), ".png", lambda: _png(name, image))


def _current(function: str) -> _Run:
    run = _run.get()
    # A worker process of a data loader has a copy of everything, and its lines would be lost.
    if run is None or run.process != os.getpid():
        where = "no run is going on" if run is None else "this is another process than the run's"
        raise TrainingError(
            f"{function}() was called, and {where}",
            code="FG586",
            hint="call it in code that a trainer calls while it trains, in its own process and thread",
        )
    return run


def _log_file(function: str, logged: Logged, suffix: str, content: Callable[[], bytes]) -> None:
    run = _current(function)
    name = logged.name
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*", str(name)) or {".", ".."} & set(str(name).split("/")):
        message = f"{function}: {name!r} cannot be the name of a file"
        raise TrainingError(message, code="FG587", hint="use letters, digits, '_', '-', '.', and '/' for folders")
    if run.send is None:
        return
    step = run.step()
    file = run.folder / FOLDER / f"{name}-step-{step}{suffix}"
    data = content()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    except OSError as error:  # a report must not end a run
        logger.warning("%s cannot be written: %s", file, error.strerror or error)
        return
    run.send(Logged(kind=logged.kind, step=step, name=name, content=logged.content, file=file))


def _as_number(name: str, value: Any) -> float:
    if name in _TAKEN:
        message = f"log: {name!r} is a key that each line of metrics has already"
        raise TrainingError(message, code="FG587", hint="use another name")
    if callable(getattr(value, "item", None)) and getattr(value, "shape", ()) in ((), (1,)):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        message = f"log: {name} is {repr(value)[:80]}, which is not a number"
        raise TrainingError(message, code="FG587", hint="log_text, log_image and log_table take other values")
    return value


def _png(name: str, image: Any) -> bytes:
    stream = io.BytesIO()
    if callable(getattr(image, "savefig", None)):
        image.savefig(stream, format="png")
    else:
        (image if hasattr(image, "convert") else _drawn(name, image)).save(stream, format="PNG")
    return stream.getvalue()


def _drawn(name: str, image: Any) -> Any:
    """Returns an array or a tensor as an image of Pillow."""
    # Most runs log no image.
    import numpy as np
    from PIL import Image

    is_tensor = callable(getattr(image, "detach", None))
    if is_tensor:
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image  # NumPy has no bfloat16
    array = np.asarray(image)
    if is_tensor and array.ndim == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    is_image = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not is_image or array.dtype.kind not in "uif" or not array.size or not np.isfinite(array).all():
        found = f"{type(image).__name__} of shape {getattr(image, 'shape', '?')}, dtype {array.dtype}"
        message = f"log_image({name!r}): found {found}"
        raise TrainingError(message, code="FG587", hint="give an image of Pillow, or numbers (H, W) or (H, W, C)")
    whole = array if array.dtype.kind in "ui" else np.rint(array * 255)
    return Image.fromarray(np.clip(whole, 0, 255).astype(np.uint8))
