"""Checks whether a quantized base model can be trained: with which adapter, and under which strategy.

The input is calls; the output is findings. Nothing is imported. The run refuses the same configs, see
`forgather/quantized.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from forgather.config.graph import Call, CallKind, Node, Scalar
from forgather.config.lint.call_check import Called
from forgather.config.path import Key, format_path
from forgather.errors import Diagnostic, ProjectError, Severity
from forgather.project.checks.setting_rules import arguments_of, rules_about
from forgather.project.checks.subject import Subject
from forgather.project.literal import plain_value
from forgather.quantized import Quantized, quantized_as, refusal, stored_quantization

_ARGUMENT, _FOLDER = "quantization_config", "pretrained_model_name_or_path"
_CONFIGS = ("BitsAndBytesConfig", "TorchAoConfig")


def check_quantized_model(subject: Subject) -> list[Diagnostic]:
    """Returns findings about trainers whose model is built with a quantization config, or was saved with one."""
    findings: list[Diagnostic] = list(_check_block(subject))
    for called in subject.calls.values():
        given = arguments_of(called)
        model = given.get("model") or given.get("model_init")
        if isinstance(model, Call) and called.node.kind is not CallKind.META and rules_about(called):
            findings += _check_trainer(called, given, model, subject.calls)
    return findings


def _check_block(subject: Subject) -> Iterator[Diagnostic]:
    """Yields an error if the block [quantization] of the templates is set, and no model is built with it."""
    target = subject.graph.targets.get("quantization")
    if target is None or not isinstance(target.value, Call):
        return
    users = (arguments_of(called).get(_ARGUMENT) for called in subject.calls.values())
    if not any(user is target.value for user in users):
        yield Diagnostic(
            code="FG956",
            message="quantization is set, and no model is built with it",
            severity=Severity.ERROR,
            span=target.value.span,
            path="quantization",
            hint="-- include 'models/pretrained.yaml' in [model]: only trained weights are quantized",
        )


def _check_trainer(
    trainer: Called, given: Mapping[str, Node], model: Call, calls: Mapping[int, Called]
) -> Iterator[Diagnostic]:
    found_at = _quantization(model, calls)
    args = given.get("args")
    if found_at is None or not isinstance(args, Call):
        return
    quantized, argument, node = found_at
    rules = rules_about(trainer)
    kind = next((rule.facts["trainer"] for rule in rules if "trainer" in rule.facts), None)
    if kind is None:
        return
    settings = {**_scalars(args, calls), "trainer": kind}
    has_adapter = not _is_none(given.get("adapter")) or "peft" in model.constructor
    # The launcher decides how many processes there are: what is refused in several only is left to the run.
    found = refusal(quantized, settings, has_adapter=has_adapter, processes=1)
    if found is not None:
        yield Diagnostic(
            code=found.code,
            message=found.message,
            severity=Severity.ERROR,
            span=node.span,
            path=format_path((*trainer.path, Key("model"), Key(argument))),
            hint=found.hint,
        )


def _quantization(model: Call, calls: Mapping[int, Called]) -> tuple[Quantized, str, Node] | None:
    """Returns how the weights of a model are quantized, and the argument that says it; None if they are not."""
    making = calls.get(id(model))
    given = arguments_of(making) if making is not None else {}
    config, folder = given.get(_ARGUMENT), given.get(_FOLDER)
    if isinstance(config, Call):
        name = config.constructor.rpartition(":")[2]
        return (quantized_as(_scalars(config, calls), name), _ARGUMENT, config) if name in _CONFIGS else None
    if not isinstance(folder, Scalar) or not isinstance(folder.value, str):
        return None
    # The weights may have been quantized when they were saved.
    stored = stored_quantization(folder.value)
    return (quantized_as(stored, ""), _FOLDER, folder) if stored is not None else None


def _is_none(node: Node | None) -> bool:
    return node is None or (isinstance(node, Scalar) and node.value is None)


def _scalars(call: Call, calls: Mapping[int, Called]) -> dict[str, object]:
    """Returns the arguments of a call that are plain data; what is known only when it is built is left to the run."""
    called = calls.get(id(call))
    found: dict[str, object] = {}
    for name, node in (arguments_of(called) if called is not None else {}).items():
        with suppress(ProjectError):
            found[name] = plain_value(node, name)
    return found
