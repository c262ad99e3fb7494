"""What the numbers of a run mean: its token ids, its labels, and the settings of the model that its weights are for.

Takes the files that describe a run's model and tokenizer, and those in a checkpoint; gives an error that names what has
changed. Keeps true: files are compared by what they say, not by their bytes; what only one of the two tells is left
out where another release of transformers wrote it; what changes how a run trains, and not what its numbers mean
(dropout, precision, caches), is left out, too.

Rows alone do not tell: where other rows are meant, those of another tokenizer would pass for them.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.files import CONFIG
from forgather.ml.checkpoint.manifest import read_manifest, small_file
from forgather.ml.log import get_logger

_log = get_logger(__name__)

TOKENIZER, LABELS, MODEL = "tokenizer", "labels", "model"
"""What may have changed, as `--allow-changed` names it."""

_TOKENS = "tokenizer.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_ADAPTER = "adapter_config.json"
_WORDS = ("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model")
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_TEMPLATE = "chat_template.jinja"
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_SIDES = ("padding_side", "truncation_side")
_IN_TOKENIZER_CONFIG = ("chat_template", "add_bos_token", "add_eos_token", "add_prefix_space", "do_lower_case", *_SIDES)
_LABELS = ("id2label", "label2id", "problem_type")
_ONLY_TRAINING = frozenset(
    "_name_or_path architectures attn_implementation auto_map chunk_size_feed_forward dtype gradient_checkpointing "
    "initializer_factor initializer_range output_attentions output_hidden_states output_router_logits "
    "quantization_config return_dict router_aux_loss_coef torch_dtype torchscript transformers_version use_cache "
    "base_model_name_or_path inference_mode peft_version processor_class".split()
)
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Meanings:
    """What the numbers of a run mean.

    Args:
        files: that tell what the model is, and the tokenizer, as a checkpoint holds them; on the process that writes.
        facts: what no file tells: see `facts_of`.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def refuse_others(self, folder: Path, recorded: Mapping[str, Any], allowed: Sequence[str]) -> None:
        """Raises where those of a checkpoint are others.

        Args:
            folder: of a verified checkpoint.
            recorded: the `facts` that it holds.
            allowed: what may have changed.

        Raises:
            CheckpointError: FG613.
        """
        changed = self._changed(folder, recorded)
        told = "; ".join(f"the {what} changed since the checkpoint: {', '.join(how)}" for what, how in changed.items())
        refused = [what for what in changed if what not in allowed]
        if refused:
            raise CheckpointError(told, code="FG613", hint=_hint(refused, allowed, folder))
        if changed:
            _log.warning("%s: the weights were trained with the earlier meaning", told)

    def _changed(self, folder: Path, recorded: Mapping[str, Any]) -> dict[str, list[str]]:
        manifest = read_manifest(folder)
        mine = {name: file for name, file in self.files.items() if _is_told_by(name)}
        names = [name for name in manifest.files if _is_told_by(name) and (folder / name).is_file()]
        theirs = {name: small_file(folder / name) for name in names}
        versions = manifest.facts.get("versions")
        written_by = versions.get("transformers") if isinstance(versions, Mapping) else None
        is_same_release = written_by == importlib.metadata.version("transformers")
        found: dict[str, list[str]] = {TOKENIZER: [], LABELS: [], MODEL: []}
        if _has_tokenizer(theirs) and not _has_tokenizer(mine):
            _log.warning(
                "the checkpoint has a tokenizer, and the trainer has none (processing_class): whether token ids still "
                "mean the same is not known"
            )
        else:
            found[TOKENIZER] += _other_tokenizer(theirs, mine)
        found[TOKENIZER] += _others(_SIDES, recorded, self.facts)
        for what, how in _other_config(theirs, mine, same_release=is_same_release):
            found[what].append(how)
        found[LABELS] += _other_names(recorded.get("labels"), self.facts.get("labels"))
        return {what: how for what, how in found.items() if how}


def facts_of(processing_class: Any, dataset: Any) -> dict[str, Any]:
    """Returns the facts that a checkpoint records because none of its files tells them.

    Args:
        processing_class: a tokenizer or processor; None for none.
        dataset: of the training.
    """
    sides = {name: getattr(processing_class, name, None) for name in _SIDES}
    known = {name: side for name, side in sides.items() if isinstance(side, str)}
    return {**known, "labels": label_names(dataset)}


def label_names(dataset: Any) -> dict[str, list[str]]:
    """Returns the names of a data set's classes, by column; one without columns (of torchvision) has them as a whole.

    Example:
        >>> label_names([1, 2])
        {}
    """
    inner = dataset
    while not (hasattr(inner, "features") or hasattr(inner, "classes")) and hasattr(inner, "dataset"):
        inner = inner.dataset
    features = getattr(inner, "features", None)
    if isinstance(features, Mapping):
        kinds = {str(name): getattr(feature, "feature", feature) for name, feature in features.items()}
        found = {name: getattr(kind, "names", None) for name, kind in kinds.items()}
    else:
        found = {"": getattr(inner, "classes", None)}
    return {
        name: list(names)
        for name, names in found.items()
        if isinstance(names, list | tuple) and names and all(isinstance(one, str) for one in names)
    }


def _is_told_by(name: str) -> bool:
    return name in (_TOKENS, _TOKENIZER_CONFIG, _TEMPLATE, CONFIG, _ADAPTER, *_WORDS, *_PROCESSORS)


def _has_tokenizer(files: Mapping[str, bytes]) -> bool:
    return any(name in files for name in (_TOKENS, _TOKENIZER_CONFIG, *_WORDS, *_PROCESSORS))


def _other_tokenizer(theirs: Mapping[str, bytes], mine: Mapping[str, bytes]) -> Iterator[str]:
    if not (_has_tokenizer(theirs) and _has_tokenizer(mine)):
        return
    if _TOKENS in theirs and _TOKENS in mine:
        yield from _other_tokens(_table(theirs[_TOKENS]), _table(mine[_TOKENS]))
    elif _TOKENS not in theirs and _TOKENS not in mine:
        named = [name for name in _WORDS if theirs.get(name) != mine.get(name)]
        yield from (f"its file {name} is another one" for name in named)
    else:
        kinds = ["a slow one" if _TOKENS not in files else "a fast one" for files in (theirs, mine)]
        yield f"it was {kinds[0]}, and is {kinds[1]}"
    before, now = (_table(files.get(_TOKENIZER_CONFIG, b"{}")) for files in (theirs, mine))
    for table, files in ((before, theirs), (now, mine)):
        if _TEMPLATE in files:
            table["chat_template"] = files[_TEMPLATE].decode()
    special = sorted(name for name in {*before, *now} if name.endswith("_token") and not name.startswith("add_"))
    yield from _others([*special, "chat_template"], _plain(before), _plain(now), absent=True)
    yield from _others([name for name in _IN_TOKENIZER_CONFIG if name != "chat_template"], before, now)
    for file in _PROCESSORS:
        before, now = (_table(files.get(file, b"{}")) for files in (theirs, mine))
        yield from _others(sorted({*before, *now} - _ONLY_TRAINING), before, now)


def _other_tokens(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = _vocabulary(before), _vocabulary(now)
    if old != new:
        moved = [token for token, number in old.items() if new.get(token, number) != number]
        gone, added = [token for token in old if token not in new], [token for token in new if token not in old]
        parts = [
            f"{len(tokens)} tokens {did}, such as {tokens[0]!r:.{_SHOWN}}"
            for tokens, did in ((moved, "have other ids"), (gone, "are gone"), (added, "are new"))
            if tokens
        ]
        yield f"of {len(old)} tokens ({len(new)} now), {' and '.join(parts)}"
    elif _merges(before) != _merges(now):
        yield "its merges are others"
    for part in _STEPS:
        if not _agree(before.get(part), now.get(part)):
            yield f"its {part} is {_short(now.get(part))}, and was {_short(before.get(part))}"


def _vocabulary(tokens: Mapping[str, Any]) -> dict[str, int]:
    model = tokens.get("model")
    words = model.get("vocab", {}) if isinstance(model, Mapping) else {}
    if isinstance(words, list):  # of pieces with their scores
        words = {str(piece[0] if isinstance(piece, list) else piece): number for number, piece in enumerate(words)}
    added = {one["content"]: one["id"] for one in tokens.get("added_tokens", ())}
    return {**words, **added}


def _merges(tokens: Mapping[str, Any]) -> list[str]:
    """Returns the merges as texts; newer files have a pair in the place of each."""
    model = tokens.get("model")
    merges = model.get("merges", ()) if isinstance(model, Mapping) else ()
    return [one if isinstance(one, str) else " ".join(one) for one in merges]


def _other_config(
    theirs: Mapping[str, bytes], mine: Mapping[str, bytes], *, same_release: bool
) -> Iterator[tuple[str, str]]:
    for file in (CONFIG, _ADAPTER):
        if file not in theirs or file not in mine:
            continue
        before, now = _table(theirs[file]), _table(mine[file])
        for name in sorted({*before, *now} - _ONLY_TRAINING):
            if any(word in name for word in ("dropout", "_pdrop", "layerdrop")):
                continue
            # A file leaves out what is as the class has it, and a release may have another default.
            for said in _others([name], before, now, absent=same_release):
                about_tokens = name.endswith("_token_id") or name == "vocab_size"
                yield TOKENIZER if about_tokens else LABELS if name in _LABELS else MODEL, said


def _other_names(before: Any, now: Any) -> Iterator[str]:
    for column in before if isinstance(before, Mapping) else ():
        if isinstance(now, Mapping) and column in now and before[column] != now[column]:
            where = f" of the column {column!r}" if column else ""
            yield f"the classes{where} are {_short(now[column])}, and were {_short(before[column])}"


def _others(
    names: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any], *, absent: bool = False
) -> Iterator[str]:
    """Yields, in words, the values that are others; `absent`: one that is not there is one, too."""
    for name in names:
        if (absent or (name in before and name in now)) and not _agree(before.get(name), now.get(name)):
            yield f"{name} is {_short(now.get(name))}, and was {_short(before.get(name))}"


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table whose special tokens are texts, as one may be written as a table of its own."""
    return {name: one.get("content") if isinstance(one, Mapping) else one for name, one in table.items()}


def _agree(one: Any, other: Any) -> bool:
    """Tells whether two values are alike, as far as both tell it: a newer release may say more of the same."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_agree(one[name], other[name]) for name in one if name in other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    return bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _table(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError(f"a description is {found!r:.40}")
    return found


def _hint(refused: Sequence[str], allowed: Sequence[str], folder: Path) -> str:
    takes = {
        TOKENIZER: "take the tokenizer of the checkpoint: in [tokenizer], include 'tokenizers/pretrained.yaml' and add "
        f"the line pretrained_model_name_or_path: {json.dumps(str(folder), ensure_ascii=False)}",
        LABELS: "give the classes their earlier order and names",
        MODEL: "give the model its earlier settings",
    }
    every = ",".join(dict.fromkeys([*allowed, *refused]))
    return f"{'; '.join(takes[what] for what in refused)}; or, where it is meant, go on with --allow-changed {every}"
