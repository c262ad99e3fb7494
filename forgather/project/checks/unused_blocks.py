"""Checks blocks of the library's templates that a config fills, and that the template it extends does not use.

The input is a graph and the rendered text; the output is findings. A trainer template that has no use for a block of
`trainers/base.yaml` still has the block, so that what a config writes into it would be left out without a word.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from forgather.config.graph import Entry, Scalar
from forgather.errors import Diagnostic, Severity
from forgather.project.checks.root_settings import is_read
from forgather.project.checks.subject import Subject

_OWN = frozenset({"main", "meta", "dynamic_args"})
# Other blocks read these. A config may replace such a block, and leave what a parent wrote for it unused.
_FOR_BLOCKS = frozenset({"raw_dataset", "dataset", "model_config", "sample_prompts", "tokenizer"})


def check_unused_blocks(subject: Subject) -> Iterator[Diagnostic]:
    """Yields a warning for each block with a value of the user that nothing reads."""
    graph, own = subject.graph, os.path.join(subject.project.meta.project_dir, "")
    main = graph.targets.get("main")
    # Who writes the trainer decides what it is given.
    if main is None or _is_written_in(main, own):
        return
    text = subject.project.rendered.text
    for name, entry in graph.targets.items():
        is_empty = isinstance(entry.value, Scalar) and entry.value.value is None
        if name in _OWN | _FOR_BLOCKS or is_empty or entry.value is main.value:
            continue
        # A target of the user's own may be for `fgcli construct` or for Python.
        if entry.origin is None or _is_user(entry.origin.span.file, own) or not _is_written_in(entry, own):
            continue
        # A merge key copies entries, so that only the text shows that it uses the target.
        if not is_read(name, entry, graph) and not re.search(rf"\*{re.escape(name)}\b", text):
            yield Diagnostic(
                code="FG885",
                message=f"the block [{name}] has no effect: {_trainer(subject)} does not use it",
                severity=Severity.WARNING,
                span=entry.value.span,
                path=name,
                hint="remove it, or extend a template that uses it",
            )


def _is_written_in(entry: Entry, own: str) -> bool:
    origin = entry.value.origin
    return origin is not None and any(_is_user(site.span.file, own) for site in (*origin.sites, *origin.sets))


def _is_user(file: str, own: str) -> bool:
    return file.startswith((own, "<"))


def _trainer(subject: Subject) -> str:
    chain = subject.project.rendered.extends_chain
    return next((repr(name) for name in chain if name.startswith("trainers/")), "the config")
