"""Checks the user's trainer classes for hooks of transformers' trainer that Forgather's trainers never call.

The input is a graph and a reader of signatures; the output is findings at lines of Python files. Nothing is imported.
The trainer itself refuses the same hooks when it is constructed, by the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forgather.config.graph import Call
from forgather.config.traverse import all_nodes
from forgather.errors import Diagnostic
from forgather.project.checks.subject import Subject
from forgather.trainer_hooks import HF_TRAINER, refusal, refused_hooks

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

_TRAINER = "forgather.ml.trainer.trainer.Trainer"
_PACKAGE = "forgather.ml"
# Classes of these packages are not the user's, so they are not searched.
_LIBRARIES = ("forgather", "transformers", "torch", "accelerate", "datasets", "builtins")


def check_trainer_hooks(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error for each method of a trainer class that only transformers' trainer would call."""
    seen: set[str] = set()
    for _, node in all_nodes(subject.graph):
        if isinstance(node, Call) and node.constructor not in seen and _may_be_a_trainer(node):
            seen.add(node.constructor)
            yield from _check_class(node, subject.reader)


def _may_be_a_trainer(node: Call) -> bool:
    place, _, symbol = node.constructor.rpartition(":")
    if not place or not symbol or node.submodule_searchpath is not None:
        return False
    is_file = place.endswith(".py") or "/" in place
    own = is_file or place.partition(".")[0] not in _LIBRARIES
    return own and ("args" in (entry.key for entry in node.kwargs) or len(node.args) > 1)


def _check_class(call: Call, reader: Reader) -> Iterator[Diagnostic]:
    # The hooks of every trainer: the bases that are read here show which trainer it is.
    names = {name for trainer in ("", "PipelineTrainer") for name in refused_hooks([trainer])}
    lineage = reader.lineage(call.constructor, (), _PACKAGE, sorted(names))
    if _TRAINER not in lineage.bases:
        return
    ours = [name.rpartition(".")[2] for name in lineage.bases if name.startswith(f"{_PACKAGE}.")]
    refused = refused_hooks(ours)
    for member in lineage.members:
        if member.name in refused:
            code, hint = refused[member.name]
            yield Diagnostic(
                code=code,
                message=refusal(member.owner, member.name, f"forgather.ml:{ours[0]}"),
                span=member.span or call.span,
                hint=f"{hint}; or {HF_TRAINER}",
            )
