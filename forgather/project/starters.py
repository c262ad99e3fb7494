"""The files of a project for fine-tuning: its config, and rows to begin with.

Takes the kind of the project and the settings for a data file and a base model; gives texts of files. Every project
trains as it stands. The rows are small data of our own, which the user replaces.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather.errors import ProjectError

KINDS = ("chat", "classify", "preferences", "tag", "seq2seq")
"""What a new project can be for."""

_WORDS = "zero one two three four five six seven eight nine ten eleven twelve".split()
_TEMPLATES = {
    "chat": "tasks/chat.yaml",
    "classify": "tasks/classification.yaml",
    "preferences": "tasks/preferences.yaml",
    "tag": "tasks/token_classification.yaml",
    "seq2seq": "tasks/seq2seq.yaml",
}
_FILES = {
    "chat": "data/chats.jsonl",
    "classify": "data/rows.csv",
    "preferences": "data/pairs.jsonl",
    "tag": "data/words.jsonl",
    "seq2seq": "data/texts.csv",
}
_DESCRIPTIONS = {
    "chat": "Answers as in the conversations of its data",
    "classify": "Finds the class of a text",
    "preferences": "Prefers the better of two answers",
    "tag": "Finds names in a text: each word gets a tag",
    "seq2seq": "Writes a text from another one",
}
_ROWS = {
    "chat": "JSON lines with 'messages' (role and content); also ShareGPT, Alpaca, or prompt and completion.",
    "classify": "CSV or JSON lines with the columns text and label.",
    "preferences": "JSON lines with prompt, chosen and rejected: texts, or messages of a chat.",
    "tag": "JSON lines with tokens and tags, a tag for each token.",
    "seq2seq": "CSV or JSON lines with the columns source and target.",
}
_NEW = "Without a base model, a small new model is trained. To {action}, name its folder here:"
_ACTIONS = {
    "chat": "train a LoRA on a model",
    "classify": "train a model of your own",
    "preferences": "train a LoRA on a model",
    "tag": "train a model of your own",
    "seq2seq": "train an encoder-decoder of your own",
}
_USES = {
    "chat": "chat {folder}",
    "classify": "eval {folder} --out predictions.jsonl",
    "preferences": "generate {folder} TEXT",
    "tag": "eval {folder} --out predictions.jsonl",
    "seq2seq": "eval {folder} --out predictions.jsonl",
}
_CONFIG = """\
## 'fgcli pp' shows everything that is not set here.
-- set trainer_template = 'trainers/accel_trainer.yaml'
-- extends '{template}'

[config_metadata]
    == super()
    -- set ns.config_name = {title}
    -- set ns.nproc_per_node = 1
{facts}
## {rows}
[raw_dataset]
    == super()
    paths: {paths}
{settings}{held_out}"""
# Of 50 rows, the usual 5 % would be two: too few for a figure. The templates of the other kinds hold out 10 %, too.
_HELD_OUT = """
## The share of the rows that is not trained on, but evaluated.
[dataset]
    == super()
    eval_fraction: 0.1
"""
_HOLDING_OUT = ("classify", "tag", "seq2seq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Starter:
    """What the config of a new project for fine-tuning says.

    Args:
        kind: one of `KINDS`.
        data: the absolute path of the user's file; None for a file of the project with a few rows of our own.
        model: the folder of a base model or its name on the Hub; None for a small new model.
        rows: further settings of the block [raw_dataset].
        facts: further names that the block [config_metadata] sets.
    """

    kind: str
    data: str | None = None
    model: str | None = None
    rows: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def description(self) -> str:
        """Returns one line about the project."""
        return _DESCRIPTIONS[self.kind]

    def use(self, title: str) -> str:
        """Returns the command that uses the trained model.

        Args:
            title: the name of the config.
        """
        # As the templates name the output folder.
        folder = f"output_models/{title.lower().replace(' ', '_')}"
        return f"fgcli {_USES[self.kind].format(folder=shlex.quote(folder))}"

    def config(self, title: str) -> str:
        """Returns the text of the config.

        Args:
            title: the name of the config, which names its output folder, too.

        Raises:
            ProjectError: FG490 if a path has characters with a meaning in templates.
        """
        lines = [f"-- set ns.{name} = {_quoted(value)}" for name, value in self.facts.items()]
        if self.model is not None:
            lines.insert(0, f"-- set ns.base_model = {_quoted(self.model)}")
        else:
            lines = [
                f"## {_NEW.format(action=_ACTIONS[self.kind])}",
                '## -- set ns.base_model = "/path/to/model"',
                *lines,
            ]
        paths = _quoted(self.data) if self.data else f'"{{{{ project_dir }}}}/{_FILES[self.kind]}"'
        return _CONFIG.format(
            template=_TEMPLATES[self.kind],
            title=_quoted(title),
            facts="".join(f"    {line}\n" for line in lines),
            rows=_ROWS[self.kind],
            paths=paths,
            held_out=_HELD_OUT if self.kind in _HOLDING_OUT else "",
            settings="".join(f"    {name}: {_quoted(value)}\n" for name, value in self.rows.items()),
        )

    def data_file(self) -> tuple[str, str] | None:
        """Returns the path of the data file in the project and its text; None if the user has given a file."""
        if self.data is not None:
            return None
        makers = {"chat": _chats, "classify": _labelled, "preferences": _pairs, "tag": _tagged, "seq2seq": _answers}
        return _FILES[self.kind], makers[self.kind]()


def _quoted(value: Any) -> str:
    """Returns a value as a text in double quotes, which Jinja and YAML read alike."""
    text = str(value)
    if any(mark in text for mark in ("{{", "{%", "{#", "##")) or not text.isprintable():
        raise ProjectError(
            f"{text!r} has characters with a meaning in templates",
            code="FG490",
            hint="rename the file or folder, or the column",
        )
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _json_lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def _chats() -> str:
    """Returns conversations about the order of numbers; later questions depend on earlier answers."""
    rows = []
    for place, word in enumerate(_WORDS[:-2]):
        after, then = _WORDS[place + 1], _WORDS[place + 2]
        rows.append(_turns(f"What comes after {word}?", f"{after}.", "And then?", f"{then}."))
        rows.append(_turns(f"What comes before {after}?", f"{word}."))
        rows.append(_turns(f"Count from {word} to {then}.", f"{word}, {after}, {then}."))
        rows.append(_turns(f"Is {then} more than {word}?", f"Yes, {then} is more than {word}."))
    return _json_lines({"messages": messages} for messages in rows)


def _labelled() -> str:
    """Returns texts about numbers, colours and animals."""
    colours, animals = ("red", "blue", "green", "white", "black"), ("cat", "dog", "horse", "bird", "fish")
    themes = {
        "number": ("add {} and {}", "the sum of {} and {}", "is {} more than {}", _WORDS),
        "colour": ("paint it {} or {}", "a {} and {} flag", "mix {} with {}", colours),
        "animal": ("the {} saw a {}", "feed the {} and the {}", "a {} and its {}", animals),
    }
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("text", "label"))
    for place in range(40):
        for label, (*phrases, words) in themes.items():
            pair = words[place % len(words)], words[(3 * place + 1) % len(words)]
            writer.writerow((phrases[place % len(phrases)].format(*pair), label))
    return stream.getvalue()


def _pairs() -> str:
    """Returns questions with an answer that counts up, which is preferred, and one that counts down."""
    rows = []
    for place in range(1, len(_WORDS) - 1):
        word, after, before = _WORDS[place], _WORDS[place + 1], _WORDS[place - 1]
        for question in (f"What is next to {word}?", f"Count on from {word}.", f"Say {word}, and one more number."):
            answers = [{"role": "assistant", "content": f"{answer}."} for answer in (after, before)]
            rows.append({"prompt": _turns(question), "chosen": [answers[0]], "rejected": [answers[1]]})
    return _json_lines(rows)


def _tagged() -> str:
    """Returns sentences about people and towns; a name of two words has two tags."""
    people, towns = ("Ada", "Grace Hopper", "Alan", "Emmy Noether"), ("Paris", "New York", "Rome", "San Marino")
    forms = ("{} lives in {}", "{} went to {} again", "a letter of {} from {}", "did {} like {} then")
    rows = []
    for place in range(60):
        words, tags = [], []
        names = iter((("PER", people[place % 4]), ("LOC", towns[(place // 4) % 4])))
        for part in forms[place % len(forms)].split():
            kind, name = next(names) if part == "{}" else ("", part)
            own = name.split()
            words += own
            tags += [f"B-{kind}", *[f"I-{kind}"] * (len(own) - 1)] if kind else ["O"]
        rows.append({"tokens": words, "tags": tags})
    return _json_lines(rows)


def _answers() -> str:
    """Returns questions about the order of numbers, with their answers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(("source", "target"))
    for place, word in enumerate(_WORDS):
        for shift, question in ((1, "after {}"), (-1, "before {}"), (2, "two after {}"), (-2, "two before {}")):
            if 0 <= place + shift < len(_WORDS):
                writer.writerow((question.format(word), _WORDS[place + shift]))
    return stream.getvalue()
