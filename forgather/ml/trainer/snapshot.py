"""Snapshots: the part of a checkpoint that one process writes, and the files and entries that describe the run.

`SnapshotBuilder` takes snapshots at step boundaries. A snapshot contains weights and optimizer state as tensors, the
training state, and files in Hugging Face layout. `origin_facts` returns the entries about the run in a manifest. The
entry "config" is a digest (hash) of the training arguments and the model's settings, except folders and names.
`export_states` and `import_states` store and restore the states of callbacks.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from forgather import __version__
from forgather.errors import CheckpointError
from forgather.ml.adapter_base import adapter_files
from forgather.ml.callbacks.base import ExportableState
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import (
    EXTRA_STATE,
    MODEL,
    SLICES,
    TRAINER_STATE,
    TRAINING_ARGS,
    TRAINING_STATE,
    WEIGHTS,
    json_bytes,
)
from forgather.ml.checkpoint.hf_layout import load_mismatch
from forgather.ml.checkpoint.save_plan import SavePlanner
from forgather.ml.checkpoint.state import file_chunks, pack_tree, split_tensors, write_state, write_tensors
from forgather.ml.data.preference_collator import REFERENCE
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.model_class import class_name, initial_weights_of
from forgather.ml.strategy.base import Strategy
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.data_fingerprint import Fingerprint
from forgather.ml.trainer.optimizers import optimizer_bytes
from forgather.ml.trainer.weight_average import WeightAverage, with_average
from forgather.ml.vocabulary import save_settings
from forgather.redaction import hidden, hide_known, holds_hidden, known_hidden

WITHOUT_INFLUENCE = frozenset(
    """communication_share control dataloader_device_prefetch dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor dispatch_rows profile
    output_dir logging_dir run_name report_to project resume_from_checkpoint allow_missing allow_changed data_retries
    skip_initial_weights_on_resume push_to_hub hub_model_id hub_strategy hub_token hub_private_repo hub_always_push
    hub_revision""".split()
)
"""The settings that do not influence what is computed: folders, names, patience, measurements, ways of the rows.

The digest of a run leaves them out. A test has the other settings, so that a new one is put into one of the lists.
"""


def origin_facts(strategy: Strategy, args: TrainingArguments, data: Fingerprint) -> dict[str, Any]:
    """Returns the entries "versions", "layout", "config", "initial_weights" and "data" of a manifest, see `Manifest`.

    Args:
        strategy: the strategy, whose parallel layout is described.
        args: the training arguments, whose digest is stored.
        data: the fingerprint of the training data.
    """
    topology = strategy.topology
    return {
        "versions": {"forgather": __version__, **{name: version(name) for name in ("torch", "transformers")}},
        "layout": {
            "world_size": topology.world_size,
            "dp_size": topology.dp_size,
            "strategy": type(strategy).__name__,
        },
        "config": _digest(strategy, args),
        **({"initial_weights": made} if (made := initial_weights_of(strategy.model)) is not None else {}),
        "data": data.facts | dict(zip(("reference",), data.columns.get(REFERENCE, ()), strict=False)),
    }


def _digest(strategy: Strategy, args: TrainingArguments) -> str:
    settings = {name: value for name, value in args.to_dict().items() if name not in WITHOUT_INFLUENCE}
    # With pipeline parallelism the strategy holds a proxy; the configuration is that of the whole model.
    model = getattr(strategy.model, "stands_for", strategy.model)
    described: dict[str, Any] = getattr(getattr(model, "config", None), "to_dict", dict)()
    # `default=str`: a setting may be an object; the digest is only compared, never read back.
    text = json.dumps({"arguments": settings, "model": described}, sort_keys=True, default=str)
    return xxhash.xxh3_128(text.encode()).hexdigest()


_log = get_logger(__name__)


def export_states(session: Session) -> None:
    """Stores the states of the `ExportableState` callbacks and the control flags in the trainer state, by class name.

    Raises:
        CheckpointError: FG606 if a state cannot be stored as JSON.
    """
    states: dict[str, Any] = {}
    for part in [*session.dispatcher.callbacks, session.control]:
        if isinstance(part, ExportableState):
            name = type(part).__name__
            state, earlier = _plain(name, part.state()), states.get(name)
            if earlier is None:
                states[name] = state
            else:
                # Several callbacks of one class become a list, in the order of registration, as in transformers.
                states[name] = [*(earlier if isinstance(earlier, list) else [earlier]), state]
    # transformers annotates a list, but stores a dict by class name.
    session.state.stateful_callbacks = states  # type: ignore[assignment]


def _plain(name: str, state: Any) -> Any:
    # Checked at each save, so that the error names the callback and not a file that cannot be written.
    try:
        json.dumps(state)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the state of the callback {name} cannot be stored as JSON: {error}",
            code="FG606",
            hint="state() may hold numbers, strings, lists and dicts with string keys: nothing is pickled",
        ) from None
    return state


def import_states(session: Session, states: Mapping[str, Any], *, settings: bool) -> None:
    """Restores the states of callbacks that `export_states` stored.

    Args:
        session: the session, whose callbacks are changed.
        states: the states that a checkpoint stores, by class name.
        settings: whether the constructor arguments of the callbacks are restored, too. If false, only the attributes
            that change during a run (such as counters) are restored.
    """
    # States of one class are consumed in order, so that each of several callbacks gets its own.
    waiting = {name: list(found) if isinstance(found, list) else [found] for name, found in states.items()}
    for callback in session.dispatcher.callbacks:
        queue = waiting.get(type(callback).__name__)
        if isinstance(callback, ExportableState) and queue:
            found = queue.pop(0)
            # Arguments come from the config unless asked for: a changed setting of a callback must take effect.
            for name, value in {**(found["args"] if settings else {}), **found["attributes"]}.items():
                if holds_hidden(value):
                    _log.warning(
                        "%s.%s is not restored: the checkpoint lacks its secret", type(callback).__name__, name
                    )
                else:
                    setattr(callback, name, value)


_VOCABULARIES = frozenset(("tokenizer.json", "vocab.json", "vocab.txt", "merges.txt", "added_tokens.json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The part of a checkpoint that one process writes. Writing it needs no communication.

    Args:
        step: the number of optimizer steps that were done.
        tensors: the tensors, by safetensors file and key. They may be on a device, and training may change them later.
        texts: the contents of other files, by name.
        files: the paths of files to copy, by name in the checkpoint.
    """

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    texts: Mapping[str, bytes]
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of bytes of all tensors and texts, without file headers and copied files."""
        tensors = [tensor for file in self.tensors.values() for tensor in file.values()]
        return sum(tensor.nbytes for tensor in tensors) + sum(map(len, self.texts.values()))

    def write(self, draft: Draft) -> None:
        """Writes all files of the snapshot into the draft of a checkpoint."""
        for name, tensors in self.tensors.items():
            draft.write(name, file_chunks(tensors))
        for name, content in self.texts.items():
            draft.write(name, [content])
        for name, file in self.files.items():
            with file.open("rb", buffering=0) as stream:
                draft.write(name, iter(functools.partial(stream.read, 8 << 20), b""))


def write_weights(draft: Draft, state: Mapping[str, Any]) -> None:
    """Writes a model's state dict as `model.safetensors`; tied weights are written once.

    Args:
        draft: the draft into which the files are written.
        state: the state dict. Values that are not tensors are written to a separate file.
    """
    tensors, aliases, rest = split_tensors(state)
    metadata = {"aliases": json.dumps(aliases)} if aliases else {}
    write_tensors(draft, WEIGHTS, tensors, metadata)
    if rest:
        write_state(draft, EXTRA_STATE, rest)


def described_files(model: nn.Module, processing_class: Any, *, is_loadable: bool = True) -> dict[str, bytes]:
    """Returns the files that describe a model, as `save_pretrained` writes them: configurations, code and tokenizer.

    Args:
        model: the model whose class and configuration are described.
        processing_class: the tokenizer or processor, or None.
        is_loadable: whether `from_pretrained` can load the weights that are stored next to the files. If not, the files
            do not name the model's class.
    """
    model = getattr(model, "stands_for", model)
    parts = [getattr(model, "generation_config", None), processing_class]
    if is_loadable and isinstance(model, PreTrainedModel):
        config = _config_as_saved(model)
        parts = [_Code(model, config), *_configs(model, config, parts[0]), processing_class]
    return _saved_files(parts)


def files_of_self_saving_model(model: nn.Module, weights: Mapping[str, Any], processing_class: Any) -> dict[str, bytes]:
    """Returns all files that a model's own `save_pretrained` writes (such as peft's), and the files of its tokenizer.

    Args:
        model: the model, which has the method `save_pretrained`.
        weights: the complete (not sharded) tensors by name, from which peft saves adapters.
        processing_class: the tokenizer or processor, or None.
    """
    return _saved_files([model], **save_settings(model, weights)) | _saved_files([processing_class])


def _saved_files(parts: Iterable[Any], **settings: Any) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    # `save_pretrained` writes only to a folder; the files then go through the storage like all others.
    with tempfile.TemporaryDirectory(prefix="forgather-described-") as place:
        for part in parts:
            if callable(save := getattr(part, "save_pretrained", None)):
                save(place, **settings)
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                files[file.relative_to(place).as_posix()] = without_secrets_of(file.name, file.read_bytes())
    return files


def without_secrets_of(name: str, content: bytes) -> bytes:
    """Returns the content of a file without values that are marked as secrets by their names.

    Other strings, keys, numbers and vocabularies are not changed, because the model may need them. The word `test`, for
    example, can be a password and also a token.

    Args:
        name: the name of the file, which determines the format.
        content: the content of the file.
    """
    if name in _VOCABULARIES or not name.endswith((".json", ".py", ".md", ".txt")):
        return content
    # Bytes that are not UTF-8 come back unchanged: a file of a user's model may have any encoding.
    text = content.decode("utf-8", "surrogateescape")
    # Returned as they were: JSON that is parsed and written again could differ in form.
    if hide_known(text, is_named=True) == text:
        return content
    shown = _json_without_secrets(text) if name.endswith(".json") else hide_known(text, is_named=True, keeps_words=True)
    if shown == text:
        return content
    _log.warning("%s is written without the secret that it contains", name)
    return shown.encode("utf-8", "surrogateescape")


def _json_without_secrets(text: str) -> str:
    data = json.loads(text)
    shown = known_hidden(data, is_named=True)
    return text if shown == data else json.dumps(shown, indent=2, ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class _Code:
    """The Python files of a model whose class is not in transformers; `save_pretrained` of this object copies them."""

    model: PreTrainedModel
    config: Any

    def save_pretrained(self, place: str) -> None:
        if self.model.is_remote_code():
            custom_object_save(self.model, place, config=self.config)


def _configs(model: PreTrainedModel, config: Any, generation_config: Any) -> list[Any]:
    found = [generation_config] if model.can_generate() else []
    if not getattr(model, "_hf_peft_config_loaded", False):
        return [config, *found]
    return [*found, model.peft_config[model.active_adapters()[0]]]


def _config_as_saved(model: PreTrainedModel) -> Any:
    """Returns a copy of the configuration that names the model's class and dtype, as `save_pretrained` writes it."""
    config: Any = copy.deepcopy(model.config)  # the run's configuration must not change by saving
    config.architectures = [class_name(model)]
    config.dtype = str(model.dtype).removeprefix("torch.")
    return config


class SnapshotBuilder:
    """Takes the snapshots of a run.

    Args:
        session: the session, with arguments, trainer state and callbacks.
        strategy: the strategy, whose weights and optimizer state are saved.
        average: the moving average of the weights, which is saved, too; None if there is none.
    """

    def __init__(self, session: Session, strategy: Strategy, average: WeightAverage | None = None) -> None:
        self._session, self._strategy, self._average = session, strategy, average
        self._described: dict[str, bytes] | None = None
        self._planner = SavePlanner()

    def sizes(self, training: Callable[[], Mapping[str, Any]]) -> tuple[int, int]:
        """Returns two sizes of the files that this process would write for a checkpoint: all files, and weights only.

        Args:
            training: a function that returns the training state by part, see `take`. Both methods are collective.

        Units:
            Bytes. The size of all files includes an estimate of the safetensors headers.
        """
        taken = self.take(training)
        # About 90 bytes for type, shape and offsets of a tensor.
        headers = sum(len(key) + 90 for tensors in taken.tensors.values() for key in tensors)
        files = (tensors for file, tensors in taken.tensors.items() if file.startswith((MODEL, SLICES)))
        weights = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
        return taken.size + headers, weights

    def optimizer_size(self) -> dict[str, int]:
        """Returns the bytes that the state of a new optimizer will add to a checkpoint, by parameter name."""
        # A resumed optimizer has its state already, which `sizes` counts.
        if self._session.args.save_only_model or getattr(self._strategy.optimizer, "state", None):
            return {}
        return optimizer_bytes(self._strategy.model, self._strategy.optimizer)

    def take(self, training: Callable[[], Mapping[str, Any]]) -> Snapshot:
        """Returns the part of a checkpoint of the current step that this process writes.

        Collective: every process must call it.

        Args:
            training: a function that returns the training state by part: schedule, random states, data position, ...

        Raises:
            CheckpointError: FG606 if a value cannot be stored.
        """
        args, state = self._session.args, self._session.state
        export_states(self._session)
        local_state = with_average(self._average, self._strategy.capture())
        if args.save_only_model:
            local_state = dataclasses.replace(local_state, optimizer=None)
        rank_files = self._planner.plan(local_state)
        tensors = dict(rank_files.tensors)
        texts = {
            **rank_files.texts,
            **self.description_files(),
            TRAINER_STATE: (json.dumps(hidden(dataclasses.asdict(state), is_named=True), indent=2) + "\n").encode(),
            TRAINING_ARGS: (json.dumps(hidden(args.to_dict()), indent=2, default=str) + "\n").encode(),
        }
        is_writer = self._strategy.topology.is_writer
        if not args.save_only_model:
            # Called last: it captures the random states from which the run continues.
            tree = training()
            # All processes pack it although one writes it, so that a value that cannot be stored is an error on all.
            plain, packed = collectives.run_collectively(lambda: pack_tree(tree, TRAINING_STATE))
            if is_writer:
                tensors[f"{TRAINING_STATE}.safetensors"] = packed
                texts[f"{TRAINING_STATE}.json"] = without_secrets_of(f"{TRAINING_STATE}.json", json_bytes(plain))
        return Snapshot(step=state.global_step, tensors=tensors, texts=texts if is_writer else {})

    def description_files(self) -> dict[str, bytes]:
        """Returns the files that describe model and tokenizer; empty except on the main process. Collective."""
        if self._described is None:  # configuration and tokenizer do not change during a run
            self._described = collectives.run_collectively(self._describe)
        return self._described

    def _describe(self) -> dict[str, bytes]:
        if not self._strategy.topology.is_writer:
            return {}
        reason = load_mismatch(model := self._strategy.model)
        if reason is not None and hasattr(model, "config"):
            _log.info("from_pretrained cannot load the weights of the checkpoints directly: %s", reason)
        processing_class = self._session.dispatcher.scene.get("processing_class")
        return described_files(model, processing_class, is_loadable=reason is None) | adapter_files(model)
