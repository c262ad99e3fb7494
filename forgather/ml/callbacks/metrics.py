"""Metrics as JSON lines."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from forgather.ml.callbacks.place import cosmetic, passes, run_folder
from forgather.ml.metrics import METRICS_FILE, LineWriter, repeatable


class JsonLogger(TrainerCallback):
    """Appends each log to `metrics.jsonl` in the run's folder: `step`, `time` and the numbers under their names.

    `loss.jsonl` beside it gets the same lines without times, speeds and memory: a repeated run writes its very bytes.

    Args:
        name: written into each line as `name`, to tell runs apart that are read together.
        rank_filter: the rank, or ranks, that write; None means all, each rank but the first into
            `metrics.rank<n>.jsonl`.
        path: another file, written alone.
        run_dir: another folder than the arguments' `logging_dir`.
    """

    def __init__(
        self,
        name: str | None = None,
        rank_filter: int | Collection[int] | None = 0,
        path: str | os.PathLike[str] | None = None,
        *,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = name
        self.rank_filter = rank_filter
        self.path = path
        self.run_dir = run_dir
        self._writer: LineWriter | None = None
        self._repeatable: LineWriter | None = None

    @cosmetic
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Writes one line."""
        if not logs or not passes(self.rank_filter, args):
            return
        if self._writer is None:
            file = self._file(args)
            self._writer = LineWriter(file)
            if self.path is None:
                self._repeatable = LineWriter(file.with_name(file.name.replace("metrics", "loss")), warns=False)
        numbers = repeatable(logs)
        if self._repeatable is not None and numbers.keys() - {"epoch"}:
            self._repeatable.write({"step": state.global_step, **numbers})
        record = {"step": state.global_step, "time": round(time.time(), 3), **logs}
        self._writer.write(record if self.name is None else record | {"name": self.name})

    @cosmetic
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the file."""
        for writer in (self._writer, self._repeatable):
            if writer is not None:
                writer.close()

    def _file(self, args: Any) -> Path:
        file = Path(self.path) if self.path is not None else run_folder(args, self.run_dir) / METRICS_FILE
        several = not isinstance(self.rank_filter, int)
        rank = int(args.process_index) if several else 0
        return file.with_name(f"{file.stem}.rank{rank}{file.suffix}") if rank else file
