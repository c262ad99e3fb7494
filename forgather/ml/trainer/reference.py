"""Reference log-probabilities: what a model that is not trained gives the answers of preference data.

DPO and KTO compare the trained model with a reference. Its log-probabilities do not change, so they are computed once,
before the first step: with the initial weights of the model itself under any strategy, or with another model that is
loaded for this and dropped afterwards. They become a column of the rows. The cache keeps them under a digest of the
weights, the rows and the precision, so a resumed run reads the same numbers.

Another source of reference weights, such as a model without its adapter, is one more `_Scorer`.

Shapes:
    B rows of a batch, N rows of a data set.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from forgather.errors import TrainingError
from forgather.ml.adapter_base import adapter_files
from forgather.ml.checkpoint.files import ADAPTER_CONFIG
from forgather.ml.data.cache import cached_folder, content_key, find_folder, prune
from forgather.ml.data.preference_collator import REFERENCE, PreferenceCollator
from forgather.ml.distributed import collectives, phase
from forgather.ml.feedback_rule import FeedbackRule
from forgather.ml.log import get_logger
from forgather.ml.model_class import class_name
from forgather.ml.models import from_pretrained
from forgather.ml.number_format import plural
from forgather.ml.preference_rules import PairRule
from forgather.ml.strategy.base import Strategy
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.strategy.shapes_only import has_shapes_only
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.batch_sampler import PreparedBatch, RankShare
from forgather.ml.trainer.data_changes import batch_digest
from forgather.ml.trainer.data_fingerprint import fingerprint
from forgather.ml.trainer.data_loader import RankBatches
from forgather.ml.trainer.loader_options import loader_options
from forgather.ml.trainer.predictions import PredictionCollector, Rows, nested, whole_tensor
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.ml.types import PaddingBatch

_log = get_logger(__name__)

Collate = Callable[[list[Any]], Any]

_KIND, _FILE, _NAME = "reference", "logps.safetensors", "logps"
_MAX_BYTES, _MAX_FOLDERS = 4 << 30, 64


class ReferenceRows(Dataset[Any]):
    """A data set whose rows have the log-probabilities of the reference as one more column.

    Args:
        dataset: the rows, which are read by number.
        logps_N2: the log-probabilities of both answers of each row.
        digest: the digest of the reference.

    Shapes:
        logps_N2: (N, 2).
    """

    def __init__(self, dataset: Any, logps_N2: Sequence[Any] | Tensor, digest: str) -> None:
        self.dataset = dataset
        self.digest = digest
        self._logps_N2 = logps_N2

    def __len__(self) -> int:
        return len(self._logps_N2)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**self.dataset[row], REFERENCE: self._logps_N2[row]}

    @property
    def fingerprinted(self) -> ReferenceRows:
        """The rows from which the fingerprint of the data is computed: they name the reference.

        Log-probabilities of the same reference differ by rounding errors if they are computed in other batches, and
        are not those of another reference for that.
        """
        return ReferenceRows(self.dataset, [self.digest] * len(self), self.digest)

    def __getitems__(self, rows: list[int]) -> list[dict[str, Any]]:
        """Returns several rows, which `datasets` reads faster than one by one."""
        several = getattr(self.dataset, "__getitems__", None)
        found = several(rows) if several is not None else [self.dataset[row] for row in rows]
        return [{**row, REFERENCE: self._logps_N2[number]} for row, number in zip(found, rows, strict=True)]


@dataclass(frozen=True, slots=True)
class _Scorer:
    """A model that gives rows their reference log-probabilities.

    Args:
        digest: the digest of its weights, which is right on the main process only.
        settings: what its weights alone do not say: its class, and the settings of the model and of its adapter.
        share: the slice of each global batch that this process computes.
        logps: a function from a prepared batch to (B, 2) log-probabilities, or None on a rank without an output.
        gather: a function from this rank's parts of all batches to the (N, 2) log-probabilities of all rows.
    """

    digest: str
    settings: Mapping[str, Any]
    share: RankShare
    logps: Callable[[Any], Tensor | None]
    gather: Callable[[list[Tensor | None]], Tensor]


class ReferenceScores:
    """The reference log-probabilities of the data sets of one trainer.

    Args:
        strategy: the strategy, whose model has its initial weights.
        args: the training arguments, whose evaluation batch size and loader options are read.
        collate: the collator of the trainer.
        source: the folder or name of the reference model; None for the initial weights of the model itself.

    Attributes:
        digest: the digest of the reference; None before rows were scored.
    """

    def __init__(self, strategy: Strategy, args: TrainingArguments, collate: Collate, source: Any) -> None:
        self._strategy = strategy
        self._args = args
        self._collate = collate
        self._source = source
        self._is_initial = True
        self.digest: str | None = None
        self._digest: str | None = None
        # With the data set, whose `id` must not be given to another one.
        self._known: dict[int, tuple[Any, ReferenceRows]] = {}

    def weights_change(self) -> None:
        """Records that the model loses its initial weights: rows of further data sets can no longer be scored."""
        self._is_initial = False

    def attached(self, dataset: Any) -> Any:
        """Returns a data set whose rows have the reference log-probabilities.

        Collective: every process must call it. Rows that have the column already are returned unchanged.

        Args:
            dataset: the rows of `tokenize_preferences` or `tokenize_feedback`.

        Raises:
            TrainingError: FG915 if the rows cannot be scored: they have no numbers, are drawn at random, or the model
                was trained before.
        """
        if isinstance(dataset, ReferenceRows):
            return dataset
        if (known := self._known.get(id(dataset))) is not None:
            return known[1]
        self._refuse(dataset)
        if len(dataset) == 0 or REFERENCE in dataset[0]:
            return dataset
        phase.set_phase("computing reference log-probabilities", 0)
        rows = self._scored(dataset)
        self._known[id(dataset)] = (dataset, rows)
        return rows

    def _refuse(self, dataset: Any) -> None:
        if is_iterable(dataset):
            raise _not_scored(
                "the data set is a stream, whose rows have no numbers", "give a data set with a length, or rows"
            )
        drawn = [name for name, found in fingerprint(dataset, {"num_workers": 0}).columns.items() if not found]
        if drawn:
            raise _not_scored(
                f"the column {drawn[0]!r} changes from reading to reading", "give rows that do not change, or rows"
            )
        if not self._is_initial and self._source is None:
            raise _not_scored(
                "the model was trained before the data set was given",
                "give the trainer the set as eval_dataset, name a model as the reference of the loss, or give rows",
            )

    def _scored(self, dataset: Any) -> ReferenceRows:
        if has_shapes_only():
            # A plan needs no values, and the model has none.
            return ReferenceRows(dataset, torch.zeros(len(dataset), 2), "")
        with torch.no_grad():
            scorer = self._scorer_of_initial_weights() if self._source is None else self._scorer_of_model(self._source)
            began = time.monotonic()
            key = collectives.run_on_main(lambda: self._key(scorer, dataset))
            found: Tensor | None = collectives.run_on_main(functools.partial(_read, key))
            if found is None:
                found = self._computed(scorer, dataset)
                collectives.run_on_main(functools.partial(_write, key, found))
                _log.info(
                    "reference log-probabilities of %s computed in %.1f s",
                    plural(len(dataset), "row"),
                    time.monotonic() - began,
                )
            self.digest = collectives.run_on_main(lambda: _identity(scorer))
        return ReferenceRows(dataset, found, self.digest)

    def _key(self, scorer: _Scorer, dataset: Any) -> str:
        packages = {name: version(name) for name in ("torch", "transformers")}
        return content_key(
            format=2,
            reference=_identity(scorer),
            rows=self._digest_of_rows(dataset),
            autocast=[self._args.bf16, self._args.fp16],
            device=self._strategy.topology.device.type,
            versions=packages,
        )

    def _digest_of_rows(self, dataset: Any) -> str:
        known = getattr(dataset, "_fingerprint", None)
        # `datasets` digests content; another collator than ours may do anything with it.
        if isinstance(known, str) and type(self._collate) is PreferenceCollator:
            return known
        hashed = xxhash.xxh3_128()
        for row in range(len(dataset)):
            hashed.update(str(batch_digest(self._collate([dataset[row]]))).encode())
        return hashed.hexdigest()

    def _computed(self, scorer: _Scorer, dataset: Any) -> Tensor:
        options = loader_options(self._args, self._strategy.topology)
        batches = RankBatches(dataset, scorer.share, self._collate, options)
        parts: list[Tensor | None] = []
        for ready in batches.read(self._strategy.rule):
            logps_B2 = scorer.logps(ready.batch)
            parts.append(None if logps_B2 is None else _rows_of(logps_B2, ready))
        return scorer.gather(parts)

    def _scorer_of_initial_weights(self) -> _Scorer:
        strategy, rule = self._strategy, self._strategy.rule
        assert isinstance(rule, PairRule | FeedbackRule), "only these rules need a reference"  # noqa: S101
        if self._digest is None:
            self._digest = _digest_of(strategy.export(), keep=strategy.topology.is_writer)
        topology = strategy.topology
        share = RankShare(self._args.per_device_eval_batch_size, topology.dp_rank, topology.dp_size)
        collector = PredictionCollector(strategy)

        def predict(batch: Any) -> Any:
            return nested(whole_tensor, strategy.predict(batch))

        def logps(batch: Any) -> Tensor | None:
            with restored_train_modes(strategy.model):
                return rule.answer_logps(predict, _on_device(batch, topology.device))

        def gather(parts: list[Tensor | None]) -> Tensor:
            for part in parts:
                collector.add(None if part is None or not len(part) else Rows(part, None))
            found: Tensor = collector.gather().predictions
            return found

        return _Scorer(self._digest, _settings_of(strategy.model), share, logps, gather)

    def _scorer_of_model(self, source: Any) -> _Scorer:
        device, rule = self._strategy.topology.device, self._strategy.rule
        assert isinstance(rule, PairRule | FeedbackRule), "only these rules need a reference"  # noqa: S101
        # Every process has the whole model, whatever the strategy is, and scores its part of the rows.
        model: nn.Module = collectives.run_collectively(lambda: from_pretrained(source))
        model = model.to(device).eval()
        _refuse_other_vocabulary(model, self._strategy.model, source)
        digest = _digest_of(model.state_dict().items(), keep=collectives.rank() == 0)
        autocast = torch.bfloat16 if self._args.bf16 else torch.float16 if self._args.fp16 else None
        share = RankShare(self._args.per_device_eval_batch_size, collectives.rank(), collectives.size())

        def logps(batch: Any) -> Tensor | None:
            placed = _on_device(batch, device)
            with torch.autocast(device.type, autocast, enabled=autocast is not None):
                return rule.answer_logps(lambda given: rule.output(model, given), placed)

        def gather(parts: list[Tensor | None]) -> Tensor:
            every = collectives.all_gather(parts)
            # A global batch consists of the batches of ranks 0, 1, and so on.
            return torch.cat([part for step in zip(*every, strict=True) for part in step])

        return _Scorer(digest, _settings_of(model), share, logps, gather)


def reference_scores(
    strategy: Strategy, args: TrainingArguments, collate: Collate, loss: Any
) -> ReferenceScores | None:
    """Returns the reference log-probabilities that the rule of a strategy needs, or None if it needs none.

    Args:
        strategy: the strategy, after `build`.
        args: the training arguments.
        collate: the collator of the trainer.
        loss: the loss object of the trainer, whose attribute `reference` names another reference model.
    """
    if not getattr(strategy.rule, "needs_reference", False):
        return None
    # The scores, or the key under which they are stored, are computed from the initial weights.
    strategy.make_unset_weights()
    return ReferenceScores(strategy, args, collate, getattr(loss, "reference", None))


def _on_device(batch: Any, device: torch.device) -> Any:
    return to_device(batch.batch if isinstance(batch, PaddingBatch) else batch, device)


def _rows_of(logps_B2: Tensor, ready: PreparedBatch) -> Tensor:
    # Of a padding batch, no rows.
    return logps_B2[: ready.num_rows].cpu()


def _digest_of(weights: Iterable[tuple[str, Any]], *, keep: bool) -> str:
    """Returns a digest of weights by name, which does not depend on their order or on how ranks hold them.

    Args:
        weights: an iterable of (name, value), which may be collective: every rank iterates to the end.
        keep: False on a rank that needs no digest.
    """
    facts = {}
    for name, value in weights:
        if keep and isinstance(value, Tensor):
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            facts[name] = [str(value.dtype), list(value.shape), xxhash.xxh3_128_hexdigest(data.tobytes())]
    return content_key(weights=facts)


def _identity(scorer: _Scorer) -> str:
    return content_key(weights=scorer.digest, model=scorer.settings)


def _settings_of(model: nn.Module) -> dict[str, Any]:
    """Returns what determines the output of a model besides its weights, such as the scale of an adapter.

    Names of folders are left out, because the weights that were in them have a digest.
    """
    whole: Any = getattr(model, "stands_for", model)
    config: Any = getattr(whole, "config", None)
    settings = config.to_dict() if hasattr(config, "to_dict") else {}
    adapter = json.loads(adapter_files(whole).get(ADAPTER_CONFIG, b"{}"))
    places = ("_name_or_path", "base_model_name_or_path")
    facts = [{name: value for name, value in part.items() if name not in places} for part in (settings, adapter)]
    # `default=str`: a setting may be an object, such as a dtype.
    return {"class": class_name(whole), "settings": json.dumps(facts, sort_keys=True, default=str)}


def _read(key: str) -> Tensor | None:
    folder = find_folder(_KIND, key)
    return None if folder is None else load_file(folder / _FILE)[_NAME]


def _write(key: str, logps_N2: Tensor) -> None:
    def build(folder: Path) -> None:
        save_file({_NAME: logps_N2.contiguous()}, folder / _FILE)

    # A full disk costs the next run time, and this one nothing.
    with suppress(OSError):
        cached_folder(_KIND, key, build)
        prune(_KIND, max_bytes=_MAX_BYTES, max_folders=_MAX_FOLDERS)


def _refuse_other_vocabulary(reference: nn.Module, model: nn.Module, source: Any) -> None:
    sizes = [getattr(getattr(one, "config", None), "vocab_size", None) for one in (reference, model)]
    if sizes[0] != sizes[1]:
        raise TrainingError(
            f"the reference {str(source)!r} has {sizes[0]} tokens, and the model has {sizes[1]}",
            code="FG918",
            hint="take a model with the same tokenizer",
        ).about("loss_fn.reference")


def _not_scored(message: str, hint: str) -> TrainingError:
    return TrainingError(
        f"the reference log-probabilities of a data set cannot be computed: {message}",
        code="FG915",
        hint=f"{hint} with a column {REFERENCE!r}",
    )
