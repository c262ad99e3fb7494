"""How a snapshot of a run is taken.

Takes the parts of a run at a step boundary; gives a `Snapshot`. Keeps true: every process calls it; nothing of the run
changes, but for what callbacks export of themselves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from forgather.ml.checkpoint.claims import misfit_of
from forgather.ml.checkpoint.files import MODEL, SLICES, TRAINER_STATE, TRAINING_ARGS
from forgather.ml.checkpoint.save_plan import Planning
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.callback_states import export_states
from forgather.ml.trainer.optimizer_size import optimizer_bytes
from forgather.ml.trainer.session import Session
from forgather.ml.trainer.snapshot import Snapshot, described_files, snapshot
from forgather.redaction import hidden

_log = get_logger(__name__)


class Camera:
    """Takes the snapshots of a run.

    Args:
        session: arguments, state, callbacks.
        strategy: holds weights and optimizer.
    """

    def __init__(self, session: Session, strategy: Strategy) -> None:
        self._session = session
        self._strategy = strategy
        self._described: dict[str, bytes] | None = None
        self._planning = Planning()

    def sizes(self, training: Callable[[], Mapping[str, Any]]) -> tuple[int, int]:
        """Returns the bytes that this process writes of a checkpoint of the present step, and those of weights alone.

        Args:
            training: as for `take`.
        """
        taken = self.take(training)
        headers = sum(len(key) + 90 for tensors in taken.tensors.values() for key in tensors)
        weights = sum(
            tensor.nbytes
            for file, tensors in taken.tensors.items()
            if file.startswith((MODEL, SLICES))
            for tensor in tensors.values()
        )
        return taken.size + headers, weights

    def optimizer_size(self) -> dict[str, int]:
        """Returns the bytes, by name of a parameter, that the state of an optimizer will add that has made no step."""
        optimizer = self._strategy.optimizer
        if self._session.args.save_only_model or getattr(optimizer, "state", None):
            return {}
        return optimizer_bytes(self._strategy.model, optimizer)

    def take(self, training: Callable[[], Mapping[str, Any]]) -> Snapshot:
        """Returns what this process writes of a checkpoint of the present step.

        Args:
            training: gives schedule, random states, position in the data; last of all, as the run goes on from there.
        """
        args, state = self._session.args, self._session.state
        export_states(self._session)
        held = self._strategy.capture()
        alone = args.save_only_model
        shards = self._planning.shards(dataclasses.replace(held, optimizer=None) if alone else held)
        texts = {
            **self.described(),
            TRAINER_STATE: (json.dumps(hidden(dataclasses.asdict(state), is_named=True), indent=2) + "\n").encode(),
            TRAINING_ARGS: (json.dumps(hidden(args.to_dict()), indent=2, default=str) + "\n").encode(),
        }
        return snapshot(
            state.global_step,
            shards,
            texts,
            None if alone else training(),
            is_writer=self._strategy.topology.is_writer,
        )

    def described(self) -> dict[str, bytes]:
        """Returns the files that tell what model and tokenizer are, on the process that writes; every process asks."""
        if self._described is None:  # configuration and tokenizer stay what they are
            self._described = collectives.together(self._describe)
        return self._described

    def _describe(self) -> dict[str, bytes]:
        if not self._strategy.topology.is_writer:
            return {}
        model = self._strategy.model
        reason = misfit_of(model)
        if reason is not None and hasattr(model, "config"):
            _log.info("from_pretrained cannot read the weights of the checkpoints as they lie there: %s", reason)
        processing_class = self._session.dispatcher.scene.get("processing_class")
        return described_files(model, processing_class, is_loadable=reason is None)
