"""The reference of settings and library templates, for `fgcli explain` and the pages in `docs/reference`.

The input is names; the output is facts from the source of the package: the classes of training arguments, the rules
about the arguments, their names in other tools, and the template library. No module under `forgather/ml` is imported.
"""

from __future__ import annotations

import ast
import functools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from forgather.aliases import other_words
from forgather.project.locations import library_dir
from forgather.rule_conditions import accepted_values
from forgather.rules import shipped_rules

_ML = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "ml")
_TRAINER = os.path.join(_ML, "trainer")
_SOURCES = ("arguments.py", "parallel_arguments.py")
_TRAINERS = {
    "TrainingArguments": ("Trainer", "AccelTrainer", "PipelineTrainer"),
    "ParallelArguments": ("AccelTrainer", "PipelineTrainer"),
    "AccelTrainingArguments": ("AccelTrainer",),
    "PipelineTrainingArguments": ("PipelineTrainer",),
}
_ARGUMENT = re.compile(r"^ {0,8}([a-z_]\w*(?:, [a-z_]\w*)*): (.*)$")
_BLOCK = re.compile(r"^(?:\[([a-z_]\w*)\]|-- block ([a-z_]\w*))")
_FILLS = re.compile(r"^For \[(\w+)\]: ")
_CONSTRUCTOR = re.compile(r"!(?:singleton|factory|partial)[: ]+([\w.]+:[\w.]+)")
_USED = re.compile(r"^\s*-- (?:extends|include) '([^']+)'", re.M)


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of the training arguments.

    Args:
        name: the key of the setting in `trainer_args`.
        type: the source text of the annotation.
        default: the source text of the default.
        values: the description of the accepted values.
        meaning: the description of the setting in the docstring of the class.
        trainers: the names of the trainers that accept the setting.
        read_by: the modules that read the setting, relative to the package.
        other_words: the names of the setting in other tools and older releases.
        set_by: the templates of the library that set the setting, each with the value.
    """

    name: str
    type: str
    default: str
    values: str
    meaning: str
    trainers: tuple[str, ...]
    read_by: tuple[str, ...]
    other_words: tuple[str, ...]
    set_by: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class LibraryTemplate:
    """A template of the template library.

    Args:
        name: the name of the template for `extends` and `include`.
        about: the first comment in the template.
        blocks: the blocks that the template defines or overrides, each with the comment above it.
        fills: the block in which the template is included; "" for a template that is extended, or included elsewhere.
        uses: the templates that this template extends or includes by name.
        constructors: the constructors in the template.
        text: the source text of the template.
    """

    name: str
    about: str
    blocks: Mapping[str, str]
    fills: str
    uses: tuple[str, ...]
    constructors: tuple[str, ...]
    text: str


@functools.cache
def settings() -> Mapping[str, Setting]:
    """Returns the settings of all trainers by name, in the order of their declarations."""
    rules = _rules_of_arguments()
    found: dict[str, Setting] = {}
    for file in _SOURCES:
        with open(os.path.join(_TRAINER, file), encoding="utf-8") as stream:
            tree = ast.parse(stream.read())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in _TRAINERS:
                found |= {one.name: one for one in _settings_of(node, rules)}
    return found


def _settings_of(node: ast.ClassDef, rules: Mapping[str, Mapping[str, object]]) -> Iterator[Setting]:
    meanings = argument_meanings(ast.get_docstring(node) or "")
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, kind = statement.target.id, ast.unparse(statement.annotation)
        if kind.startswith("ClassVar"):
            continue
        yield Setting(
            name=name,
            type=kind,
            default=_default(statement.value),
            values=accepted_values(rules[name]) if name in rules else "any value",
            meaning=meanings.get(name, ""),
            trainers=_TRAINERS[node.name],
            read_by=_readers().get(name, ("ml/trainer/arguments.py",)),
            other_words=tuple(other_words(name)),
            set_by=tuple(_set_by(name)),
        )


def _default(value: ast.expr | None) -> str:
    """Returns the source text of a default; for `field(default=...)`, the source text of the argument `default`."""
    if isinstance(value, ast.Call):
        value = next((keyword.value for keyword in value.keywords if keyword.arg == "default"), value)
    return ast.unparse(value) if value is not None else ""


def argument_meanings(docstring: str) -> dict[str, str]:
    """Returns the descriptions in the `Args` section of a Google-style docstring, by parameter.

    Example:
        >>> argument_meanings("Runs.\\n\\nArgs:\\n    a, b: sizes\\n        in bytes.\\n\\nRaises:\\n    X: y.")
        {'a': 'sizes in bytes.', 'b': 'sizes in bytes.'}
    """
    _, _, section = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    names: list[str] = []
    for line in section.split("\n"):
        if line and not line.startswith(" "):
            break
        heading = _ARGUMENT.match(line) if len(line) - len(line.lstrip()) == 4 else None
        if heading:
            names = heading[1].split(", ")
            found |= dict.fromkeys(names, heading[2].strip())
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _rules_of_arguments() -> dict[str, Mapping[str, object]]:
    ours = (rules for constructor, several in shipped_rules().items() for rules in several if _is_ours(constructor))
    return {name: rule for rules in ours for name, rule in rules.settings.items()}


def _is_ours(constructor: str) -> bool:
    module, _, name = constructor.rpartition(":")
    return module.startswith("forgather.") and name in _TRAINERS


@functools.cache
def _readers() -> Mapping[str, tuple[str, ...]]:
    """Returns, by name, the modules under `forgather/ml` that read an attribute of an object called `args`."""
    found: dict[str, dict[str, None]] = {}
    for folder, _, files in sorted(os.walk(_ML)):
        for file in sorted(files):
            if not file.endswith(".py") or file in _SOURCES:
                continue
            with open(os.path.join(folder, file), encoding="utf-8") as stream:
                text = stream.read()
            place = os.path.relpath(os.path.join(folder, file), os.path.dirname(_ML)).replace(os.sep, "/")
            # By text: most of these modules import torch, which this package does not.
            for name in re.findall(r"\b_?args\.([a-z_]\w*)", text):
                found.setdefault(name, {})[place] = None
    return {name: tuple(places) for name, places in found.items()}


@functools.cache
def templates() -> Mapping[str, LibraryTemplate]:
    """Returns the templates of the template library by name."""
    root = library_dir()
    found: dict[str, LibraryTemplate] = {}
    for folder, _, files in sorted(os.walk(root)):
        for file in sorted(files):
            if file.endswith(".yaml"):
                path = os.path.join(folder, file)
                name = os.path.relpath(path, root).replace(os.sep, "/")
                with open(path, encoding="utf-8") as stream:
                    found[name] = _template(name, stream.read())
    return found


def _template(name: str, text: str) -> LibraryTemplate:
    lines = text.split("\n")
    folder, _, file = name.partition("/")
    comment = " ".join(filter(None, (line.lstrip("# ").rstrip() for line in lines[: _length_of_comment(lines)])))
    fills = _FILLS.match(comment)
    if folder == "defaults":
        block = file.removesuffix(".yaml")
        about = f"The content of the block [{block}] if a config does not override it. A template of the same name in "
        about += "a project replaces it for all configs of the project."
    else:
        block, about = fills[1] if fills else "", comment[fills.end() :] if fills else comment
    return LibraryTemplate(
        name=name,
        about=about[:1].upper() + about[1:],
        blocks=dict(_blocks(lines)),
        fills=block,
        uses=tuple(dict.fromkeys(_USED.findall(text))),
        constructors=tuple(dict.fromkeys(_CONSTRUCTOR.findall(text))),
        text=text,
    )


def _length_of_comment(lines: list[str]) -> int:
    return next((number for number, line in enumerate(lines) if not line.startswith("##")), len(lines))


def _blocks(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each block with its comment; the comment is above the key whose value is the block."""
    for number, line in enumerate(lines):
        if found := _BLOCK.match(line):
            above = number
            while above and re.match(r"##|\.?[a-z_]+:", lines[above - 1]):
                above -= 1
            comment = (part.lstrip("# ").rstrip() for part in lines[above:number] if part.startswith("##"))
            yield found[1] or found[2], " ".join(comment)


def _set_by(setting: str) -> Iterator[tuple[str, str]]:
    for template in templates().values():
        if template.name.startswith("trainers/") and (
            found := re.search(rf"^    {setting}: (.+)$", template.text, re.M)
        ):
            yield template.name, found[1]


def setting_page(setting: Setting) -> str:
    """Returns the page of a setting as text."""
    facts = [
        ("values", setting.values),
        ("trainers", ", ".join(setting.trainers)),
        *(("template", f"{name} sets {value}") for name, value in setting.set_by),
        ("read by", ", ".join(f"forgather/{place}" for place in setting.read_by)),
        *([("other tools", ", ".join(setting.other_words))] if setting.other_words else []),
    ]
    lines = "\n".join(f"{name:<12} {text}" for name, text in facts)
    heading = f"trainer_args.{setting.name}: {setting.type} = {setting.default}"
    return f"{heading}\n\n{setting.meaning[:1].upper()}{setting.meaning[1:]}\n\n{lines}"


def template_page(template: LibraryTemplate) -> str:
    """Returns the page of a template as text: its description, an example, its blocks and its source."""
    if template.fills:
        example = f"[{template.fills}]\n    -- include '{template.name}'"
    else:
        example = f"-- extends '{template.name}'" if template.blocks else f"-- include '{template.name}'"
    parts = [template.name, template.about, f"example:\n\n{_indented(example)}"]
    if template.blocks:
        width = max(map(len, template.blocks)) + 2
        rows = (f"[{name}]".ljust(width) + f"  {comment}" for name, comment in template.blocks.items())
        parts.append("blocks:\n\n" + "\n".join(f"  {row}".rstrip() for row in rows))
    if template.uses:
        parts.append("uses: " + ", ".join(template.uses))
    parts.append(f"source:\n\n{_indented(template.text.rstrip())}")
    return "\n\n".join(part for part in parts if part)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.split("\n"))
