"""Uploads the model of a run, and its checkpoints if asked for, to the Hugging Face Hub.

Takes the training arguments `push_to_hub` and `hub_*`; what is uploaded is what the run has written to its folder. An
upload runs in the background while the run trains, and one at the end is waited for. A failed upload never ends a run
and never changes its folder: one line says what failed and which command uploads later. The token occurs in no message.
"""

from __future__ import annotations

import json
import shlex
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, and not listed

from forgather.errors import TrainingError, first_line
from forgather.ml.callbacks.base import TrainerCallback, TrainerControl, TrainerState
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder
from forgather.ml.checkpoint.files import ADAPTER, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.log import get_logger
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.redaction import hide_known, remember

_log = get_logger(__name__)

CARD = "README.md"
# Of a checkpoint or an output folder, what `from_pretrained` does not read.
_STATE = ("optimizer*", "training_state*", "trainer_state.json", "training_args.json", "manifest.json", "index.json")
_NOT_THE_MODEL = [*_STATE, "checkpoint-*", "checkpoint-*/**", "runs/**", "custom/**", ".*", ".*/**"]


class HubUpload(TrainerCallback):
    """Uploads what a run saves. It acts in the main process alone.

    Args:
        args: the training arguments.
        api: the client of the Hub; by default one of `huggingface_hub`, which reads HF_ENDPOINT.

    Raises:
        TrainingError: FG618 if the name of the repository is not valid, or if there is no token.
    """

    def __init__(self, args: TrainingArguments, api: HfApi | None = None) -> None:
        self.repo_id = args.hub_model_id or Path(args.output_dir).resolve().name
        self._args = args
        self._api = api
        self._running: Future[Any] | None = None
        self._has_repo = False
        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise _refusal(f"{self.repo_id!r} is no name of a repository: {first_line(error)[:120]}").about(
                "args.hub_model_id"
            ) from None
        if args.hub_token is None and get_token() is None:
            raise _refusal("push_to_hub is true, and there is no token of the Hub").about("args.push_to_hub")
        if args.hub_token is not None:
            remember(args.hub_token, "hub_token")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Says where the model will be uploaded."""
        kind = {True: "private", False: "public", None: "as the default of its owner"}[self._args.hub_private_repo]
        _log.warning("hub        the model is uploaded to %s (%s), %s", self.repo_id, kind, self._args.hub_strategy)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Begins to upload a checkpoint in the background, unless an upload is still going on."""
        if self._args.hub_strategy == "end" or not state.is_world_process_zero:
            return
        if self._running is not None and not self._running.done():
            if not self._args.hub_always_push:
                _log.warning(
                    "hub: the checkpoint of step %d is not uploaded, as an upload is going on", state.global_step
                )
                return
            self._finish()
        folder = checkpoint_folder(Path(self._args.output_dir), state.global_step)
        message = f"Training in progress, step {state.global_step}"
        self._finish()
        self._running = self._client.run_as_future(self._upload_checkpoint, folder, message)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **others: Any) -> None:
        """Uploads the final model, and waits for it. A run that failed uploads no model."""
        if not state.is_world_process_zero:
            return
        self._finish()
        if others.get("error") is not None:
            return
        folder = Path(self._args.output_dir)
        try:
            self._write_card(folder, state)
            self._upload(folder, "End of training")
        # Whatever fails, the model is in its folder.
        except Exception as error:  # noqa: BLE001 - border of the network
            self._say_failure(error, folder)
        else:
            _log.warning("hub        the model is uploaded: %s/%s", self._client.endpoint, self.repo_id)

    @property
    def _client(self) -> HfApi:
        if self._api is None:
            self._api = HfApi(token=self._args.hub_token, library_name="forgather")
        return self._api

    def _upload_checkpoint(self, folder: Path, message: str) -> None:
        strategy = self._args.hub_strategy
        if any((folder / name).exists() for name in (WEIGHTS, WEIGHTS_INDEX, ADAPTER)):
            self._upload(folder, message)
        elif strategy == "every_save":
            _log.warning("hub: %s has sharded weights, and the model is uploaded at the end", folder)
        if strategy != "every_save":
            place = "last-checkpoint" if strategy == "checkpoint" else folder.name
            self._upload(folder, message, place=place)

    def _upload(self, folder: Path, message: str, *, place: str | None = None) -> None:
        client, revision = self._client, self._args.hub_revision
        if not self._has_repo:
            client.create_repo(self.repo_id, private=self._args.hub_private_repo, exist_ok=True)
            if revision is not None:
                client.create_branch(self.repo_id, branch=revision, exist_ok=True)
            self._has_repo = True
        client.upload_folder(
            repo_id=self.repo_id,
            folder_path=str(folder),
            path_in_repo=place,
            commit_message=message,
            revision=revision,
            ignore_patterns=None if place else _NOT_THE_MODEL,
            # What an earlier checkpoint left in the place must not be mixed with this one.
            delete_patterns="*" if place else None,
        )

    def _finish(self) -> None:
        """Waits for the upload in the background, and says if it failed."""
        running, self._running = self._running, None
        if running is not None and (error := running.exception()) is not None:
            self._say_failure(error, Path(self._args.output_dir))

    def _say_failure(self, error: BaseException, folder: Path) -> None:
        options = [] if self._args.hub_revision is None else ["--revision", self._args.hub_revision]
        options += ["--private"] if self._args.hub_private_repo else []
        excluded = [part for pattern in ("checkpoint-*", "runs/*") for part in ("--exclude", pattern)]
        command = shlex.join(["hf", "upload", self.repo_id, str(folder), ".", *excluded, *options])
        reason = hide_known(f"{type(error).__name__}: {first_line(error)[:160]}")
        _log.warning("hub: the upload failed (%s); the run is not affected. To upload it later: %s", reason, command)

    def _write_card(self, folder: Path, state: TrainerState) -> None:
        card = folder / CARD
        if card.exists():
            return
        last = next((line["loss"] for line in reversed(state.log_history) if "loss" in line), None)
        facts = {"steps": state.global_step, "epochs": round(float(state.epoch or 0), 4), "last logged loss": last}
        named = ("learning_rate", "lr_scheduler_type", "optim", "weight_decay", "seed", "per_device_train_batch_size")
        facts |= {name: getattr(self._args, name) for name in named}
        head = {"library_name": "transformers", "tags": ["forgather"]}
        lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in head.items()), "---", ""]
        lines += [f"# {self.repo_id.rpartition('/')[2]}", "", "Trained with Forgather.", "", "| | |", "|---|---|"]
        lines += [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
        card.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _refusal(message: str) -> TrainingError:
    return TrainingError(
        message,
        code="FG618",
        hint="`hf auth login` keeps a token, or set HF_TOKEN or hub_token: !env HF_TOKEN; hub_model_id is owner/name",
    )
