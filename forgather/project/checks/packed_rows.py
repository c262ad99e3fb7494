"""Checks packed rows: whether the collator and the model handle several documents in one row.

The input is calls and a reader of signatures; the output is findings. Nothing is imported. A model whose class or
family is unknown is checked by the run only; the run also refuses every config for which this check reports an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from inspect import Parameter
from typing import TYPE_CHECKING

from forgather.config.graph import Call, CallKind, Node, Scalar
from forgather.config.lint.call_check import Called
from forgather.config.path import Key, format_path
from forgather.config.traverse import walk
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.project.checks.setting_rules import arguments_of, rules_about
from forgather.project.checks.subject import Subject
from forgather.project.trainer_arguments import keyword
from forgather.ring_models import INSTEAD
from forgather.signatures.results import Callee

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "ml", "packing_models.json")
_TOKENIZE = ("forgather.ml.data:tokenize", "forgather.ml.data.packing:tokenize")
_PACKS = (*_TOKENIZE, "forgather.ml.data:prepared", "forgather.ml.data.prepared_rows:prepared")
_LABELS = ("forgather.ml.data:tokenize_examples", "forgather.ml.data.examples:tokenize_examples")
_PACKS_EXAMPLES = ("forgather.ml.data:pack_examples", "forgather.ml.data.example_packing:pack_examples")
_CAN_PACK_EXAMPLES = (*_LABELS, "forgather.ml.data:tokenize_chats", "forgather.ml.data.chat_tokens:tokenize_chats")
_STACKS = ("default_data_collator", "DefaultDataCollator", "DataCollatorWithPadding")
_KIND = re.compile(r"(Config|ForCausalLM|LMHeadModel|LMHead|ForConditionalGeneration|Decoder|WithLMHeadModel)$")


def check_packed_rows(subject: Subject) -> list[Diagnostic]:
    """Returns findings about the collators and models that receive packed rows and those of `tokenize_examples`."""
    calls, reader = subject.calls, subject.reader
    findings: list[Diagnostic] = []
    for called in calls.values():
        given = arguments_of(called)
        if "train_dataset" in given and called.node.kind is not CallKind.META and rules_about(called):
            findings += _check_trainer(called, given, calls, reader)
            if _is_on_a_ring(given.get("args")):
                findings += _check_ring(called, given)
    return findings


def _check_trainer(
    called: Called, given: Mapping[str, Node], calls: Mapping[int, Called], reader: Reader
) -> Iterator[Diagnostic]:
    made = [node for _, node in walk([((), given["train_dataset"])], unbuilt=False) if isinstance(node, Call)]
    packs = [node for node in made if node.constructor in _PACKS]
    packs_examples = [node for node in made if _packs_examples(node)]
    apart = any(not _joins_documents(node) for node in packs) or bool(packs_examples)
    collator = given.get("data_collator")
    if isinstance(collator, Call) and (packs or packs_examples or any(node.constructor in _LABELS for node in made)):
        yield from _check_collator(called, collator, apart)
        yield from _check_padding(called, collator, next((node for node in made if node.constructor in _LABELS), None))
    model = given.get("model") or given.get("model_init")
    reason = _why_mixed(model, calls, reader) if apart and isinstance(model, Call) else None
    if reason is not None and isinstance(model, Call):
        what = "examples" if packs_examples else "documents"
        yield Diagnostic(
            code="FG944" if packs_examples else "FG848",
            message=f"the rows hold several {what}, and the model does not keep them apart: {reason}",
            severity=Severity.ERROR if packs_examples else Severity.WARNING,
            span=(packs_examples or packs)[0].span,
            path=format_path((*called.path, Key("train_dataset"))),
            hint="set packing: false, or train another model"
            if packs_examples
            else "set document_boundaries: false in tokenize if this is intended, or train another model",
        )


def _check_ring(called: Called, given: Mapping[str, Node]) -> Iterator[Diagnostic]:
    for name in ("train_dataset", "eval_dataset"):
        made = [node for _, node in walk([((), given[name])], unbuilt=False)] if name in given else []
        calls = [node for node in made if isinstance(node, Call)]
        packs = [node for node in calls if node.constructor in _TOKENIZE and not _joins_documents(node)]
        if packed := packs or [node for node in calls if _packs_examples(node)]:
            yield Diagnostic(
                code="FG794",
                message=f"the rows of {name} hold several documents, which must not see one another, and "
                "context_parallel_method: ring computes causal attention over whole rows",
                span=packed[0].span,
                path=format_path((*called.path, Key(name))),
                hint=f"{INSTEAD}, or set {'document_boundaries' if packs else 'packing'}: false",
            )


def _is_on_a_ring(arguments: Node | None) -> bool:
    method = keyword(arguments, "context_parallel_method")
    return isinstance(method, Scalar) and method.value == "ring"


def _packs_examples(node: Call) -> bool:
    if node.constructor in _PACKS_EXAMPLES:
        return True
    return node.constructor in _CAN_PACK_EXAMPLES and _is(node, "packing", True)


def _joins_documents(packing: Call) -> bool:
    # A value that is known only after construction may be False, so nothing is reported for it.
    values = (entry.value for entry in packing.kwargs if entry.key == "document_boundaries")
    return any(not (isinstance(value, Scalar) and value.value is True) for value in values)


def _check_collator(called: Called, collator: Call, apart: bool) -> Iterator[Diagnostic]:
    name = collator.constructor.rpartition(":")[2].rpartition(".")[2]
    if not collator.constructor.startswith("transformers"):
        return
    if name == "DataCollatorForLanguageModeling" and _is(collator, "mlm", False):
        code, message = "FG846", f"the rows have labels, and {name} overwrites them with the inputs"
        hint = (
            "include 'collators/padded.yaml' in [data_collator] (forgather.ml.data:CausalLMCollator): it keeps labels"
        )
    elif name == "DataCollatorWithFlattening" and apart:
        code, message = "FG858", f"the rows hold several documents, and {name} treats each row as one document"
        hint = "include 'collators/packed.yaml' in [data_collator]: packed rows have no padding"
    else:
        return
    path = format_path((*called.path, Key("data_collator")))
    # transformers' trainer does not check this, so the run would not be refused.
    severity = Severity.WARNING if called.node.constructor.startswith("transformers") else Severity.ERROR
    yield Diagnostic(code=code, message=message, severity=severity, span=collator.span, path=path, hint=hint)


def _check_padding(called: Called, collator: Call, examples: Call | None) -> Iterator[Diagnostic]:
    name = collator.constructor.rpartition(":")[2].rpartition(".")[2]
    if examples is None or name not in _STACKS or not collator.constructor.startswith("transformers"):
        return
    yield Diagnostic(
        code="FG849",
        message=f"the rows of tokenize_examples differ in length, and {name} does not pad their labels",
        severity=Severity.WARNING,
        span=examples.span,
        path=format_path((*called.path, Key("train_dataset"))),
        hint="include 'collators/padded.yaml' in [data_collator] (forgather.ml.data:CausalLMCollator)",
    )


def _is(call: Call, name: str, flag: bool) -> bool:
    values = [entry.value for entry in call.kwargs if entry.key == name]
    return any(isinstance(value, Scalar) and value.value is flag for value in values)


def _why_mixed(model: Call, calls: Mapping[int, Called], reader: Reader) -> str | None:
    """Returns why attention of a model crosses document boundaries; None if it does not, or if that is unknown."""
    module, _, name = model.constructor.partition(":")
    if model.constructor in ("forgather.ml.models:from_config", "transformers:AutoModelForCausalLM.from_config"):
        called = calls.get(id(model))
        config = arguments_of(called).get("config") if called else None
        return _why_mixed(config, calls, reader) if isinstance(config, Call) else None
    if module.split(".")[0] == "transformers":
        kind = _KIND.sub("", name.partition(".")[0])
        return f"{kind} ignores position_ids" if kind in _mixed_kinds() else None
    return _why_own_model_mixes(model, name, reader)


@cache
def _mixed_kinds() -> frozenset[str]:
    """Returns the name prefixes of the model families whose attention crosses document boundaries."""
    with open(_TABLE, encoding="utf-8") as stream:
        families = json.load(stream)["mixed"].values()
    return frozenset(_KIND.sub("", name) for names in families for name in names)


def _why_own_model_mixes(model: Call, name: str, reader: Reader) -> str | None:
    if model.constructor.startswith("forgather.") or ":" not in model.constructor:
        return None
    try:
        forward = reader.read(f"{model.constructor}.forward")
    except ForgatherError:
        return None
    if not isinstance(forward, Callee) or not forward.signatures:
        return None
    parameters = forward.signatures[0].parameters.values()
    # A model with this parameter is assumed to use it to keep documents apart.
    if any(one.name == "position_ids" or one.kind is Parameter.VAR_KEYWORD for one in parameters):
        return None
    return f"the forward of {name} has no parameter position_ids"
