"""Writes docs/coming-from/words/, a page for each tool: every public word of it, and what it is here.

    python scripts/write_words.py

The words are those that `scripts/oracles/word_lists.py` recorded. What a page says of a word is what the arguments of a
trainer say when they are given it, so that no page promises what the program does not do.
"""

import json
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from forgather.aliases import Alias, alias_of, keyword_for  # noqa: E402
from forgather.errors import Severity  # noqa: E402
from forgather.lightning.meaning import meaning_of  # noqa: E402
from forgather.ml.strategy.deepspeed_settings import ELSEWHERE, SECTIONS, unknown_keys  # noqa: E402
from forgather.rule_conditions import UNKNOWN  # noqa: E402
from forgather.rules import Violation, shipped_rules  # noqa: E402
from forgather.signatures import Reader  # noqa: E402
from forgather.signatures.results import Callee  # noqa: E402
from forgather.spelling import begin_document  # noqa: E402

FOLDER = ROOT / "docs" / "coming-from" / "words"
WORDS = json.loads((ROOT / "tests/words/recorded/words.json").read_text(encoding="utf-8"))
ACCEL = shipped_rules()["forgather.ml:AccelTrainingArguments"][0]
TITLES = {
    "transformers": "transformers' Trainer",
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
}
INSIDE = {
    ("accelerate", "Accelerator"): "accelerator_args",
    ("accelerate", "DataLoaderConfiguration"): "accelerator_args.dataloader_config",
    ("accelerate", "GradientAccumulationPlugin"): "accelerator_args.gradient_accumulation_plugin",
    ("accelerate", "FullyShardedDataParallelPlugin"): "fsdp_config",
    ("accelerate", "config file, fsdp_config"): "fsdp_config",
}
"""The mapping inside of which the words of a place are written. Those of other places are settings."""
CLASSES = {"config file": "ClusterConfig", "config file, deepspeed_config": "DeepSpeedPlugin"}
"""The class whose fields the words of a place are, where its name differs."""
OBJECTS = {
    "DeepSpeedPlugin": "deepspeed_plugin",
    "ParallelismConfig": "parallelism_config",
    "ProjectConfiguration": "project_config",
    "TorchDynamoPlugin": "dynamo_plugin",
    "TorchTensorParallelPlugin": "torch_tp_plugin",
}
"""The objects of Accelerate that are answered as a whole, and the argument that takes them."""
HANDLERS = {"DistributedDataParallelKwargs": True, "GradScalerKwargs": True, "InitProcessGroupKwargs": True}
HANDLERS |= {"AutocastKwargs": False, "ProfileKwargs": False}
"""The objects that Accelerate takes as `kwargs_handlers`, and whether a trainer takes them in `accelerator_args`."""
OUTCOMES = {
    "same": "same",
    "renamed": "taken, with a note",
    "by value": "by its value",
    "other form": "in another form",
    "no effect": "no effect, with a note",
    "refused": "refused",
}


TRIED = {
    **{"accelerator": "cpu", "strategy": "fsdp", "devices": 2, "num_nodes": 2, "precision": "bf16-mixed"},
    **{"logger": False, "callbacks": [], "plugins": ["a plugin"], "profiler": "simple", "max_time": "00:01:00:00"},
    **{"fast_dev_run": 2, "max_epochs": 3, "min_epochs": 2, "max_steps": 10, "min_steps": 5, "barebones": True},
    **{"limit_train_batches": 0.5, "limit_val_batches": 2, "limit_test_batches": 2, "limit_predict_batches": 2},
    **{"overfit_batches": 3, "val_check_interval": 0.5, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0},
    **{"log_every_n_steps": 7, "enable_checkpointing": False, "enable_progress_bar": False},
    **{"enable_model_summary": False, "accumulate_grad_batches": 4, "gradient_clip_val": 0.5},
    **{"gradient_clip_algorithm": "value", "deterministic": True, "benchmark": True, "inference_mode": False},
    **{"use_distributed_sampler": False, "detect_anomaly": True, "sync_batchnorm": True},
    **{"reload_dataloaders_every_n_epochs": 1, "default_root_dir": "runs", "enable_autolog_hparams": False},
    "model_registry": "models",
}
"""A value of each word of Lightning's `Trainer` that is not its default."""


class Answer(NamedTuple):
    """What the arguments of a trainer say to a word.

    Args:
        outcome: a key of `OUTCOMES`, or "unknown" if nothing is said about the word.
        ours: our name for it; "" if there is none.
        text: what to write instead, or why there is no counterpart.
    """

    outcome: str
    ours: str = ""
    text: str = ""


def answer(tool: str, place: str, word: str) -> Answer:
    """Returns what is said to a word of a tool where it is written."""
    # Guesses from the spelling are counted for each document, and answers must not depend on those before.
    begin_document()
    if tool == "deepspeed":
        return _of_config(place, word)
    if tool == "lightning":
        return _of_lightning(place, word)
    if (tool, place) == ("transformers", "Trainer"):
        return _of_keyword(word)
    if place in HANDLERS:
        return _of_handler(place, word)
    alias = alias_of("inner", f"{CLASSES.get(place, place)}.{word}", tool)
    if alias is not None:
        return _of_record(alias)
    inside = INSIDE.get((tool, place))
    found = _inside(inside, word) if inside else None
    found = found or _of_setting(tool, word)
    if found.outcome == "unknown" and place.startswith("config file"):
        alias = alias_of("inner", f"{'deepspeed' if 'deepspeed' in place else 'accelerator_args'}.{word}")
        return _of_record(alias) if alias else found
    if found.outcome == "unknown" and place in OBJECTS:
        return _inside("accelerator_args", OBJECTS[place]) or found
    return found


def _of_lightning(place: str, word: str) -> Answer:
    alias = alias_of("inner", f"{place}.{word}", "lightning") or alias_of("setting", word, "lightning")
    if place == "Trainer":
        # On two processes, where more is refused than on one.
        found, refused = meaning_of({"devices": 2, word: TRIED[word]}, lambda _: 2)
        if refused:
            return Answer("refused", "", refused[0].hint or "")
        if alias is None or alias.verdict == "none":
            notes = [note.partition(" is ")[2] or note for note in found.notes if note.startswith(f"{word}=")]
            return Answer("other form", "", notes[0]) if notes else Answer("unknown")
    if alias is None:
        return Answer("unknown")
    if alias.values or alias.verdict == "none":
        return _of_record(alias)
    # `forgather.lightning` reads these words itself.
    return Answer("renamed" if alias.verdict == "same" else "other form", alias.name, alias.why)


def _of_keyword(word: str) -> Answer:
    (signature,) = _trainer().signatures
    known = list(signature.parameters)
    if word in known:
        return Answer("same", word)
    ours = keyword_for(word, known)
    alias = alias_of("setting", word)
    return Answer("refused", ours, f"write {ours}") if ours else _of_record(alias) if alias else Answer("unknown")


@cache
def _trainer() -> Callee:
    found = Reader(str(ROOT)).read("forgather.ml:Trainer")
    return cast(Callee, found)


def _of_handler(place: str, word: str) -> Answer:
    if HANDLERS[place]:
        return Answer("same", f"kwargs_handlers: {place}({word}=...)", "inside accelerator_args")
    alias = alias_of("setting", place)
    return Answer("refused", alias.name, alias.why) if alias else Answer("unknown")


def _of_setting(tool: str, word: str) -> Answer:
    alias = alias_of("setting", word, tool)
    if alias is not None and alias.values:
        return _of_record(alias)
    # A value of its own, which is the default of no setting, so that no default hides what is said to others.
    settings, found = ACCEL.names({word: object()}, {word: None} if word in _fields() else {})
    said = next((one for one in found if one.code != "FG813"), None)
    ours = next(iter(settings), "")
    if said is None:
        return Answer("same" if ours == word else "renamed" if ours else "unknown", ours)
    if said.severity is Severity.WARNING:
        reason = said.message.rpartition("has no effect: ")[2]
        return Answer("renamed", alias.name if alias else ours) if ours else Answer("no effect", "", reason)
    if alias is not None and said.code == "FG810":
        return _of_record(alias)
    return Answer("refused" if _tells(word, said) else "unknown", "", said.hint or "")


def _fields() -> list[str]:
    return WORDS["transformers"]["words"]["TrainingArguments"]


def _tells(word: str, said: Violation) -> bool:
    """Returns whether a hint is about this word, and not a guess from its spelling."""
    is_known = word in ACCEL.instead or word in ACCEL.without_effect or word in _fields()
    return is_known and said.hint is not None and not said.hint.startswith("did you mean")


def _of_record(alias: Alias) -> Answer:
    if alias.values:
        return Answer("by value", alias.name, _of_values(alias))
    if alias.verdict == "same":
        text = alias.why or f"write {alias.name}"
        # The words of an object are translated where the object is.
        is_taken = alias.is_accepted or alias.word[0].isupper()
        return Answer("renamed" if is_taken else "refused", alias.name, "" if is_taken else text)
    return Answer("refused", "" if alias.verdict == "none" else alias.name, alias.why)


def _of_values(alias: Alias) -> str:
    shown = []
    for value, meant in alias.values.items():
        if isinstance(meant, str):
            shown.append(f"{value}: {meant}")
        else:
            text = ", ".join(f"{name}: {json.dumps(of)}" for name, of in meant.items())
            shown.append(f"{value}: `{text or 'the default'}`")
    return "; ".join([*shown, alias.why] if alias.why else shown)


def _inside(owner: str, word: str) -> Answer | None:
    outer, *rest = owner.split(".")
    rule = ACCEL.settings[outer]
    for key in rest:
        rule = rule["keys"][key]
    plain = word.removeprefix(rule.get("prefix", ""))
    if plain in rule["keys"]:
        return Answer("same", f"{owner.rpartition('.')[2]}.{word}")
    value: dict[str, object] = {word: UNKNOWN}
    for key in reversed(rest):
        value = {key: value}
    (said,) = ACCEL.values({outer: value})
    beside = alias_of("setting", word)
    is_told = word in rule.get("instead", ()) or alias_of("inner", f"{owner.rpartition('.')[2]}.{plain}") is not None
    is_told |= beside is not None and beside.name in rule["keys"]
    # Any other hint is a guess from the spelling.
    is_told |= said.hint is not None and said.hint.startswith("it is a setting of")
    return Answer("refused", "", said.hint or "") if is_told else None


def _of_config(place: str, word: str) -> Answer:
    path = "deepspeed" if place == "config" else place
    config: dict[str, object] = {word: UNKNOWN}
    for section in reversed([] if place == "config" else place.split(".")):
        config = {section: config}
    said = next(iter(unknown_keys(config)), None)
    alias = alias_of("inner", f"{path.rpartition('.')[2]}.{word}", "deepspeed")
    if said is not None:
        is_same = alias is not None and alias.verdict == "same"
        is_told = alias is not None or (said.hint is not None and said.hint.startswith("write it inside"))
        return Answer("refused" if is_told else "unknown", alias.name if is_same and alias else "", said.hint or "")
    if place == "config" and word in ELSEWHERE:
        return Answer("refused", "", ELSEWHERE[word])
    return Answer("same" if word in SECTIONS[path] else "unknown", word if word in SECTIONS[path] else "")


def answers(tool: str) -> dict[str, dict[str, Answer]]:
    """Returns the answers to all words of a tool, by place."""
    places = WORDS[tool]["words"]
    return {place: {word: answer(tool, place, word) for word in words} for place, words in places.items()}


def page(tool: str) -> str:
    """Returns the page of a tool."""
    found = answers(tool)
    counts = dict.fromkeys(OUTCOMES, 0)
    for words in found.values():
        for one in words.values():
            counts[one.outcome] += 1
    total = ", ".join(f"{count} {OUTCOMES[outcome]}" for outcome, count in counts.items() if count)
    lines = [
        f"# Every word of {TITLES[tool]}",
        "",
        f"This page has each public word of {tool} {WORDS[tool]['version']}, and what it is here: {total}. The page is",
        "written by `scripts/write_words.py` from what the program itself says. `fgcli explain WORD` prints the same.",
    ]
    for place, words in found.items():
        lines += ["", f"## {place}", "", "| word | here | what to write, or why not |", "|---|---|---|"]
        lines += [_row(word, one) for word, one in words.items()]
    return "\n".join(lines) + "\n"


def _row(word: str, one: Answer) -> str:
    ours = f"`{one.ours}`" if one.ours not in ("", word) and one.ours not in one.text else ""
    text = one.text.replace("|", "\\|").replace("<", "\\<")
    here = OUTCOMES[one.outcome]
    return f"| `{word}` | {here} | {': '.join(filter(None, [ours, text]))} |"


def main() -> None:
    """Writes the page of each tool."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for tool in TITLES:
        (FOLDER / f"{tool}.md").write_text(page(tool), encoding="utf-8")


if __name__ == "__main__":
    main()
