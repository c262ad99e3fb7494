"""Checks before a resume: changed meanings of token ids, labels and model settings, and impossible values.

`Meanings` compares the files that describe the model and the tokenizer with the files in the checkpoint, and reports
what changed. The parsed content is compared, not the bytes. If another release of transformers wrote the checkpoint, a
setting that only one of the two files contains is ignored. Settings that affect only the training of a model (dropout,
precision, caches) are ignored, too. `refuse_impossible` checks that a run can have written the numbers in a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from forgather.errors import CheckpointError
from forgather.interventions import from_dict
from forgather.ml.callbacks.base import TrainerState
from forgather.ml.checkpoint.files import CONFIG, DATA, METER, OPTIMIZER, PROGRESS, SCHEDULE
from forgather.ml.checkpoint.lineage import Origin
from forgather.ml.checkpoint.manifest import malformed_file, read_manifest, read_small_file
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.trainer.checkpoint_parts import checked_numbers, restoring

_log = get_logger(__name__)

TOKENIZER, LABELS, MODEL = "tokenizer", "labels", "model"
"""The kinds of changes that `--allow-changed` can allow, in addition to "data"."""

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
    """The description of a run's tokenizer, labels and model settings, which give the weights their meaning.

    Args:
        files: the files that describe the model and the tokenizer, as a checkpoint stores them. Empty on all processes
            except the main process.
        facts: the padding sides and class names, which these files do not contain, see `meaning_facts`.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def refuse_others(self, folder: Path, recorded: Mapping[str, Any], allowed: Sequence[str]) -> None:
        """Raises an error if the tokenizer, the labels or the model settings differ from those of a checkpoint.

        Differences that are allowed only give a warning.

        Args:
            folder: the folder of a verified checkpoint.
            recorded: the `facts` that the checkpoint stores.
            allowed: the kinds of changes that are allowed: "tokenizer", "labels", "model".

        Raises:
            CheckpointError: FG613 if there is a difference that is not allowed.
        """
        manifest = read_manifest(folder)
        versions = manifest.facts.get("versions")
        written_by = versions.get("transformers") if isinstance(versions, Mapping) else None
        changed = self.changes(_descriptions(folder, manifest.files), recorded, written_by=written_by)
        message = "; ".join(
            f"the {what} changed since the checkpoint: {', '.join(how)}" for what, how in changed.items()
        )
        refused = [what for what in changed if what not in allowed]
        if refused:
            raise CheckpointError(message, code="FG613", hint=_hint(refused, allowed, folder))
        if changed:
            _log.warning("%s: the weights were trained with the earlier meaning", message)

    def refuse_other_model(self, folder: Path, *, allowed: Sequence[str] | None = None) -> None:
        """Raises an error if the tokenizer, the labels or the model settings differ from those of a saved model.

        Args:
            folder: the folder of a saved model, of a verified checkpoint, or of a checkpoint of transformers.
            allowed: the kinds of changes that the user allowed: "tokenizer", "labels", "model"; None if nothing asks.

        Raises:
            CheckpointError: FG613 if there is a difference; FG611 if a file that describes the model is damaged.
        """
        theirs = _descriptions(folder, sorted(file.name for file in folder.iterdir()))
        _refuse_damaged(folder, theirs)
        written_by = _table(theirs[CONFIG]).get("transformers_version") if CONFIG in theirs else None
        changed = self.changes(theirs, {}, written_by=written_by)
        changed = {what: how for what, how in changed.items() if what not in (allowed or ())}
        if changed:
            raise CheckpointError(
                "; ".join(
                    f"the {what} is not that of the saved weights: {', '.join(how)}" for what, how in changed.items()
                ),
                code="FG613",
                hint="the data or the code from which it is made changed since the run: bring the earlier ones back"
                if allowed is None
                else _hint(list(changed), allowed, folder),
            )

    def changes(
        self, theirs: Mapping[str, bytes], recorded: Mapping[str, Any], *, written_by: str | None
    ) -> dict[str, list[str]]:
        """Returns descriptions of the differences to saved weights, by kind: "tokenizer", "labels", "model".

        Args:
            theirs: the files that describe the saved model and its tokenizer.
            recorded: the `facts` that a checkpoint stores.
            written_by: the release of transformers that wrote the files; None if it is not known.
        """
        mine = {name: file for name, file in self.files.items() if _is_description(name)}
        is_same_release = written_by == importlib.metadata.version("transformers")
        found: dict[str, list[str]] = {TOKENIZER: [], LABELS: [], MODEL: []}
        # Only a warning: training without a tokenizer is normal when rows hold token ids.
        if _has_tokenizer(theirs) and not _has_tokenizer(mine):
            _log.warning(
                "the checkpoint has a tokenizer, and the trainer has none (processing_class): token ids cannot be "
                "compared"
            )
        else:
            found[TOKENIZER] += _tokenizer_changes(theirs, mine)
        found[TOKENIZER] += _value_changes(_SIDES, recorded, self.facts)
        for what, how in _config_changes(theirs, mine, same_release=is_same_release):
            found[what].append(how)
        found[LABELS] += _class_name_changes(recorded.get("labels"), self.facts.get("labels"))
        return {what: how for what, how in found.items() if how}


def _descriptions(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Returns the files of a folder that describe a model and its tokenizer, by name."""
    return {
        name: read_small_file(folder / name) for name in names if _is_description(name) and (folder / name).is_file()
    }


def meaning_facts(processing_class: Any, dataset: Any) -> dict[str, Any]:
    """Returns the padding and truncation side of the tokenizer and the class names of the data, for a checkpoint.

    Args:
        processing_class: the tokenizer or processor, or None.
        dataset: the training data set.
    """
    sides = {name: getattr(processing_class, name, None) for name in _SIDES}
    known = {name: side for name, side in sides.items() if isinstance(side, str)}
    return {**known, "labels": label_names(dataset)}


def label_names(dataset: Any) -> dict[str, list[str]]:
    """Returns the class names of a data set, by column.

    The class names of a data set without columns, such as those of torchvision, are returned under the name "".

    Example:
        >>> label_names([1, 2])
        {}
    """
    inner = dataset
    # `torch.utils.data.Subset` and similar wrappers keep the data set in `dataset`.
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


def _is_description(name: str) -> bool:
    return name in (_TOKENS, _TOKENIZER_CONFIG, _TEMPLATE, CONFIG, _ADAPTER, *_WORDS, *_PROCESSORS)


def _has_tokenizer(files: Mapping[str, bytes]) -> bool:
    return any(name in files for name in (_TOKENS, _TOKENIZER_CONFIG, *_WORDS, *_PROCESSORS))


def _tokenizer_changes(theirs: Mapping[str, bytes], mine: Mapping[str, bytes]) -> Iterator[str]:
    if not (_has_tokenizer(theirs) and _has_tokenizer(mine)):
        return
    # Parsed and compared by content: the same tokenizer is written with other bytes by other releases.
    if _TOKENS in theirs and _TOKENS in mine:
        yield from _token_changes(_table(theirs[_TOKENS]), _table(mine[_TOKENS]))
    elif _TOKENS not in theirs and _TOKENS not in mine:
        named = [name for name in _WORDS if theirs.get(name) != mine.get(name)]
        yield from (f"its file {name} changed" for name in named)
    else:
        kinds = ["a slow one" if _TOKENS not in files else "a fast one" for files in (theirs, mine)]
        yield f"it was {kinds[0]}, and is {kinds[1]}"
    before, now = (_table(files.get(_TOKENIZER_CONFIG, b"{}")) for files in (theirs, mine))
    for table, files in ((before, theirs), (now, mine)):
        if _TEMPLATE in files:
            table["chat_template"] = files[_TEMPLATE].decode()
    special = sorted(name for name in {*before, *now} if name.endswith("_token") and not name.startswith("add_"))
    yield from _value_changes([*special, "chat_template"], _plain(before), _plain(now), absent=True)
    yield from _value_changes([name for name in _IN_TOKENIZER_CONFIG if name != "chat_template"], before, now)
    for file in _PROCESSORS:
        before, now = (_table(files.get(file, b"{}")) for files in (theirs, mine))
        yield from _value_changes(sorted({*before, *now} - _ONLY_TRAINING), before, now)


def _token_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = _vocabulary(before), _vocabulary(now)
    if old != new:
        moved = [token for token, number in old.items() if new.get(token, number) != number]
        gone, added = [token for token in old if token not in new], [token for token in new if token not in old]
        parts = [
            f"{plural(len(tokens), 'token')} {one if len(tokens) == 1 else did}, such as {tokens[0]!r:.{_SHOWN}}"
            for tokens, one, did in (
                (moved, "has another id", "have other ids"),
                (gone, "is gone", "are gone"),
                (added, "is new", "are new"),
            )
            if tokens
        ]
        yield f"of {len(old)} tokens ({len(new)} now), {' and '.join(parts)}"
    elif _merges(before) != _merges(now):
        yield "its merges changed"
    for part in _STEPS:
        if not _agree(before.get(part), now.get(part)):
            yield f"its {part} is {_short(now.get(part))}, and was {_short(before.get(part))}"


def _vocabulary(tokens: Mapping[str, Any]) -> dict[str, int]:
    model = tokens.get("model")
    words = model.get("vocab", {}) if isinstance(model, Mapping) else {}
    if isinstance(words, list):  # a Unigram model has (piece, score) pairs; the index is the id
        words = {str(piece[0] if isinstance(piece, list) else piece): number for number, piece in enumerate(words)}
    added = {one["content"]: one["id"] for one in tokens.get("added_tokens", ())}
    return {**words, **added}


def _merges(tokens: Mapping[str, Any]) -> list[str]:
    """Returns the merges of a BPE tokenizer as strings. Newer tokenizer files store each merge as a pair of strings."""
    model = tokens.get("model")
    merges = model.get("merges", ()) if isinstance(model, Mapping) else ()
    return [one if isinstance(one, str) else " ".join(one) for one in merges]


def _config_changes(
    theirs: Mapping[str, bytes], mine: Mapping[str, bytes], *, same_release: bool
) -> Iterator[tuple[str, str]]:
    for file in (CONFIG, _ADAPTER):
        if file not in theirs or file not in mine:
            continue
        before, now = _table(theirs[file]), _table(mine[file])
        if file == _ADAPTER:
            # Names of modules are a set, which peft writes in another order in each process.
            before, now = _in_order(before), _in_order(now)
        for name in sorted({*before, *now} - _ONLY_TRAINING):
            # Dropout changes how a run trains, and not what its weights mean.
            if any(word in name for word in ("dropout", "_pdrop", "layerdrop")):
                continue
            # A config file omits default values, and another release may have other defaults.
            for said in _value_changes([name], before, now, absent=same_release):
                about_tokens = name.endswith("_token_id") or name == "vocab_size"
                yield TOKENIZER if about_tokens else LABELS if name in _LABELS else MODEL, said


def _in_order(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table in which lists of texts are sorted."""
    is_names = {
        name: isinstance(one, list) and all(isinstance(each, str) for each in one) for name, one in table.items()
    }
    return {name: sorted(one) if is_names[name] else one for name, one in table.items()}


def _class_name_changes(before: Any, now: Any) -> Iterator[str]:
    # Columns that only one of the two data sets has are compared by the data's fingerprint.
    for column in before if isinstance(before, Mapping) else ():
        if isinstance(now, Mapping) and column in now and before[column] != now[column]:
            where = f" of the column {column!r}" if column else ""
            yield f"the classes{where} are {_short(now[column])}, and were {_short(before[column])}"


def _value_changes(
    names: Sequence[str], before: Mapping[str, Any], now: Mapping[str, Any], *, absent: bool = False
) -> Iterator[str]:
    """Yields a description of each value that differs.

    Args:
        names: the names of the values to compare.
        before: the values of the checkpoint, by name.
        now: the values of the current run, by name.
        absent: whether a value that is missing in `before` or `now` is compared as None. If false, it is ignored.
    """
    for name in names:
        if (absent or (name in before and name in now)) and not _agree(before.get(name), now.get(name)):
            yield f"{name} is {_short(now.get(name))}, and was {_short(before.get(name))}"


def _plain(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tokenizer configuration with special tokens as strings; a file may store them as JSON objects."""
    return {name: one.get("content") if isinstance(one, Mapping) else one for name, one in table.items()}


def _agree(one: Any, other: Any) -> bool:
    """Returns whether two values are equal. Keys that only one of two mappings contains are ignored.

    Another release of a library may store further keys.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return all(_agree(one[name], other[name]) for name in one if name in other)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_agree, one, other))
    return bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _refuse_damaged(folder: Path, files: Mapping[str, bytes]) -> None:
    for name in sorted(name for name in files if name.endswith(".json")):
        try:
            _table(files[name])
        except (ValueError, TypeError, RecursionError) as error:
            raise malformed_file(folder / name, f"{type(error).__name__}: {error!s:.80}") from None


def _table(content: bytes) -> dict[str, Any]:
    found = json.loads(content)
    if not isinstance(found, dict):
        raise TypeError(f"a description is {found!r:.40}")
    return found


def _hint(refused: Sequence[str], allowed: Sequence[str], folder: Path) -> str:
    takes = {
        TOKENIZER: "use the tokenizer of the checkpoint: in [tokenizer], include 'tokenizers/pretrained.yaml' and add "
        f"the line pretrained_model_name_or_path: {json.dumps(str(folder), ensure_ascii=False)}",
        LABELS: "give the classes their earlier order and names",
        MODEL: "give the model its earlier settings",
    }
    every = ",".join(dict.fromkeys([*allowed, *refused]))
    return (
        f"{'; '.join(takes[what] for what in refused)}; if the change is intended, resume with --allow-changed {every}"
    )


_MOST_ROWS = 10**9  # of one update
# An upper bound for settings and rates. It is below 2**53, the bound of counts.
_MOST = 1e15
_UNSIGNED = frozenset(
    """lr initial_lr max_lr min_lr base_lr eps weight_decay momentum max_momentum base_momentum alpha lr_decay lambd t0
    clip_threshold learning_rate grad_norm""".split()
)
_FRACTIONS = frozenset(("betas", "rho"))
# For schedules of torch and transformers. State of a user's schedule (a metric, a slope) may have any sign.
_UNSIGNED_OF_SCHEDULES = _UNSIGNED | frozenset(
    """last_epoch _step_count _last_lr base_lrs max_lrs min_lrs end_lr start_lr eta_min default_min_lr base_momentums
    max_momentums start_momentum end_momentum T_0 T_cur T_i T_max T_mult _milestones milestones gamma factor power
    total_iters total_size total_steps step_ratio step_size end_step patience num_bad_epochs cooldown
    cooldown_counter""".split()
)
_COUNTS = ("steps", "losses", "skipped", "total_steps", "total_losses", "total_skipped")
_UNCARRIED = ("max_steps", "num_train_epochs", "logging_steps", "eval_steps", "save_steps", "train_batch_size")
_COUNTED_BY_CALLBACKS = ("_begins", "early_stopping_patience_counter")


def refuse_impossible(
    folder: Path,
    step: int,
    origin: Origin,
    progress: TrainerState | None,
    optimizer: Any,
    parts: Mapping[str, Any],
    *,
    groups: Sequence[Mapping[str, Any]] = (),
    schedule: Mapping[str, Any] | None = None,
) -> None:
    """Raises an error if a checkpoint contains values that no run can have written.

    Otherwise a run could continue silently from a damaged or manipulated state, for example with a negative learning
    rate or an infinite moment.

    Args:
        folder: the folder of the checkpoint.
        step: the step in the manifest of the checkpoint.
        origin: the record of the run that wrote the checkpoint.
        progress: the trainer state of the checkpoint; None if the checkpoint does not store one.
        optimizer: the optimizer state of the checkpoint, see `CheckpointReader.optimizer`.
        parts: the other parts of the training state of the checkpoint, by name.
        groups: the parameter groups of the current optimizer. If a value in these groups is infinite or negative, the
            value of the same name in the checkpoint may be so, too.
        schedule: the state of the current learning rate schedule, which is used in the same way.

    Raises:
        CheckpointError: FG675 if a value is impossible.
    """
    with restoring("step", folder):
        _check(0 < origin.max_steps < step, "step", f"{step} of {origin.max_steps}")
    if progress is not None:
        with restoring(PROGRESS, folder):
            _check_progress(step, progress)
    if isinstance(optimizer, Mapping):
        with restoring(OPTIMIZER, folder):
            _check_optimizer(optimizer, _CurrentValues([dict(group) for group in groups]))
    if SCHEDULE in parts:
        with restoring(SCHEDULE, folder):
            _check_schedule(parts[SCHEDULE], _CurrentValues(schedule))
    if DATA in parts:
        with restoring(DATA, folder):
            _check_position(step, parts[DATA])
    if METER in parts:
        with restoring(METER, folder):
            _check_meter(parts[METER])
    # Checkpoints of earlier releases hold neither guard nor skips.
    with restoring("guard", folder):
        norms = parts.get("guard", {}).get("norms", [])
        for place, norm in checked_numbers({str(place): norm for place, norm in enumerate(norms)}).items():
            _check(norm < 0, f"norms.{place}", norm)
    with restoring("skips", folder):
        for facts in parts.get("skips", ()):
            checked_numbers({name: facts[name] for name in ("step", "epoch", "first", "end")}, whole=True)
            _check(facts["end"] < facts["first"], "end", facts["end"])
    with restoring("control", folder):
        _check_control(step, parts.get("control", {}))


def _check_control(step: int, state: Mapping[str, Any]) -> None:
    """Raises an error if a run cannot have changed its settings in this way until a step."""
    if not state:
        return
    checked_numbers({"step": state["step"]}, whole=True)
    _check(state["step"] != step, "step", state["step"])
    for change in map(from_dict, state["changes"]):
        _check(change.step > step, "changes.step", change.step)
    schedule = state["schedule"]
    if schedule:
        _check(not schedule["factor"] > 0, "factor", schedule["factor"])
        rates = {f"rates.{place}": rate for place, rate in enumerate(schedule["rates"])}
        for place, number in checked_numbers({**rates, "factor": schedule["factor"]}).items():
            _check(not 0 <= number < _MOST, place, number)


class _CurrentValues:
    """The names of values that are infinite, very large or negative in the current run.

    Such values are intended by the user, so a checkpoint may contain them under the same names.
    """

    def __init__(self, tree: Any) -> None:
        self.large: set[str] = set()
        self.negative: set[str] = set()
        for place, number in _numbers(tree, ""):
            # `not <`, so that NaN and infinity are large, too.
            if not abs(number) < _MOST:
                self.large.add(_name_of(place))
            if number < 0:
                self.negative.add(_name_of(place))

    def judge(self, place: str, number: float, *, is_unsigned: bool) -> None:
        """Raises an error if a number in a checkpoint is impossible.

        Args:
            place: the path of the number.
            number: the number.
            is_unsigned: whether the number must not be negative, unless it is negative in the current run.

        Raises:
            ValueError: if the number is impossible.
        """
        name = _name_of(place)
        # NaN first: every comparison with it is false, so the checks below would let it pass.
        _check(math.isnan(number), place, number)
        _check(not abs(number) < _MOST and name not in self.large, place, number)
        _check(number < 0 and is_unsigned and name not in self.negative, place, number)


def _name_of(place: str) -> str:
    return next((part for part in reversed(place.split(".")) if not part.isdigit()), place)


def _check(is_impossible: bool, name: str, value: Any) -> None:
    if is_impossible:
        raise ValueError(f"{name} is {value!s:.40}")


def _check_progress(step: int, progress: TrainerState) -> None:
    # An epoch has at least one optimizer step.
    _check(not 0 <= progress.epoch <= step + 1, "epoch", progress.epoch)
    best = progress.best_global_step
    checked_numbers(
        {"num_input_tokens_seen": progress.num_input_tokens_seen, "best_global_step": best or 0}, whole=True
    )
    _check((best or 0) > step, "best_global_step", best)
    uncarried = {name: getattr(progress, name) or 0 for name in _UNCARRIED}
    for name, value in checked_numbers({"total_flos": progress.total_flos, **uncarried}).items():
        _check(value < 0 or (name != "total_flos" and value >= 2**53), name, value)
    for number, line in enumerate(progress.log_history):
        checked_numbers({f"log_history.{number}.step": line.get("step", 0)}, whole=True)
        _check(line.get("step", 0) > step, f"log_history.{number}.step", line.get("step"))
        _check(not 0 <= line.get("epoch", 0) <= step + 1, f"log_history.{number}.epoch", line.get("epoch"))
    _check_best_metric(progress, best)
    _check(not isinstance(progress.stateful_callbacks, Mapping), "stateful_callbacks", progress.stateful_callbacks)
    for place, count in _numbers(progress.stateful_callbacks, ""):
        for name in _COUNTED_BY_CALLBACKS:
            _check(f".{name}" in place and not 0 <= count < 2**53, place, count)
        _check("._times." in place and not 0 <= count < _MOST, place, count)


def _check_best_metric(progress: TrainerState, best: int | None) -> None:
    metric = progress.best_metric
    if metric is None:
        return
    _check(type(metric) not in (int, float) or math.isnan(metric), "best_metric", metric)
    lines = [line for line in progress.log_history if best is not None and line.get("step") == best]
    measured = [value for line in lines for name, value in line.items() if name.startswith("eval_")]
    # The best metric is a value of an evaluation, whose line the log may lack.
    is_known = any(isinstance(value, int | float) and _is_near(value, metric) for value in measured)
    _check(not is_known and (bool(measured) or not abs(metric) < _MOST), "best_metric", metric)


def _is_near(one: float, other: float) -> bool:
    """Returns whether two numbers agree to about three significant digits."""
    return one == other or math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-6)


def _check_optimizer(tree: Mapping[str, Any], present: _CurrentValues) -> None:
    for group in tree["param_groups"]:
        for place, number in _numbers({name: value for name, value in group.items() if name != "params"}, ""):
            present.judge(place, number, is_unsigned=_name_of(place) in _UNSIGNED)
            _check(_name_of(place) in _FRACTIONS and not 0 <= number <= 1, place, number)
        rate = group.get("lr", 0.0)
        _check(isinstance(rate, bool) or not isinstance(rate, int | float | Tensor), "lr", rate)
    for name, state in tree["state"].items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            is_step = key == "step" and isinstance(value, int | float | Tensor)
            _check(is_step and not 0 <= float(value) < 2**53, f"step of {name}", value)
            for place, number in _numbers(value, key):
                _check(not math.isfinite(number), f"{place} of {name}", number)


def _check_schedule(tree: Any, present: _CurrentValues) -> None:
    for place, number in _numbers(tree, ""):
        present.judge(place, number, is_unsigned=_name_of(place) in _UNSIGNED_OF_SCHEDULES)


def _check_meter(state: Any) -> None:
    checked_numbers(state)
    checked_numbers({name: state[name] for name in _COUNTS if name in state}, whole=True)
    # Of the sums only norm and rate have a sign that is known: a loss may be negative.
    for name, value in state.items():
        _check(name in _UNSIGNED and not 0 <= value < _MOST, name, value)
    for prefix in ("", "total_"):
        steps = state.get(f"{prefix}steps", 0)
        for name in ("losses", "skipped"):
            _check(state.get(prefix + name, 0) > steps, prefix + name, state.get(prefix + name))


def _check_position(step: int, position: Mapping[str, Any]) -> None:
    counts = {
        name: position[name]
        for name in ("epoch", "row", "batch", "batch_rows", "update_rows", "workers")
        if name in position
    }
    checked_numbers(counts, whole=True)
    for place, number in _numbers(position, ""):
        # A seed may use all 64 bits; 2**53 is the largest count that a float holds exactly.
        _check(not 0 <= number < (2**64 if place == "seed" else 2**53), place, number)
    _check(counts["epoch"] > step, "epoch", counts["epoch"])
    rows = position.get("num_rows")
    _check(rows is not None and (type(rows) is not int or rows < counts.get("row", 0)), "row", f"{counts} of {rows!r}")
    for name in ("row", "batch"):
        _check(counts.get(name, 0) > step * _MOST_ROWS, name, counts.get(name))


def _numbers(tree: Any, place: str) -> Iterator[tuple[str, float]]:
    """Yields the path and the value of each number in nested mappings and lists; a scalar tensor is one number."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _numbers(value, f"{place}.{name}" if place else str(name))
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from _numbers(value, f"{place}.{number}")
    elif isinstance(tree, Tensor) and not tree.ndim and not tree.is_complex():
        yield place, float(tree.detach())
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield place, float(tree)
