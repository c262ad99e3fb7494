"""Fields of dataclasses and named tuples.

Takes a class in source, gives the parameters of the constructor that its fields make. Keeps true: a field that may
have a default counts as one that has.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace

from forgather.signatures.annotations import describe, text_of
from forgather.signatures.name_resolution import Names, Scope
from forgather.signatures.parameters import EITHER, KEYWORD, OPTIONAL, Param, default_of, with_default
from forgather.signatures.symbols import Class, Doubt, Ref

Options = Mapping[str, ast.expr]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its parameter, and whether the constructor takes it."""

    param: Param
    is_taken: bool = True


def is_true(options: Options, name: str, otherwise: bool) -> bool | None:
    """Returns an option of `dataclass` or `field`; None where it is no literal."""
    value = options.get(name)
    if value is None:
        return otherwise
    return bool(value.value) if isinstance(value, ast.Constant) else None


def own_fields(names: Names, cls: Class, options: Options) -> list[Field] | Doubt:
    """Returns the fields that a dataclass itself states."""
    keyword_only = is_true(options, "kw_only", False)
    if keyword_only is None:
        return Doubt(f"the fields of {cls.name} depend on code")
    scope = Scope(names, cls.module, cls.module.is_stub, None)
    found: list[Field] = []
    for statement in cls.body.plain():
        if isinstance(statement, ast.If | ast.Try | ast.For | ast.With):
            if any(isinstance(inner, ast.AnnAssign) for inner in ast.walk(statement)):
                return Doubt(f"the fields of {cls.name} depend on code")
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = text_of(statement.annotation)
        bare = text.partition("[")[0].rpartition(".")[2]
        if bare == "ClassVar":
            continue
        if bare == "KW_ONLY":
            keyword_only = True
            continue
        field = _field(names, statement.target.id, statement, scope, keyword_only)
        if isinstance(field, Doubt):
            return field
        found.append(field)
    return found


def _field(names: Names, name: str, statement: ast.AnnAssign, scope: Scope, keyword_only: bool) -> Field | Doubt:
    annotation = describe(names, statement.annotation, scope)
    value = statement.value
    kind = KEYWORD if keyword_only else EITHER
    if value is None:
        return Field(Param(name, kind, None, annotation))
    if isinstance(value, ast.Call):
        if names.evaluate(value.func, scope) != [Ref("dataclasses.field")]:
            return Field(Param(name, kind, OPTIONAL, annotation))
        options = {keyword.arg or "": keyword.value for keyword in value.keywords}
        taken, only = is_true(options, "init", True), is_true(options, "kw_only", keyword_only)
        if taken is None or only is None or "" in options:
            return Doubt(f"the field {name!r} depends on code")
        default = None
        if "default" in options:
            default = default_of(options["default"])
        elif "default_factory" in options:
            default = OPTIONAL
        kind = KEYWORD if only else EITHER
        return Field(Param(name, kind, default, with_default(annotation, default)), taken)
    default = default_of(value)
    return Field(Param(name, kind, default, with_default(annotation, default)))


def joined(fields: list[Field]) -> list[Param]:
    """Returns the parameters that fields make; a later field takes the place of an earlier one of its name."""
    by_name: dict[str, Field] = {}
    for field in fields:
        by_name[field.param.name] = field
    params = [field.param for field in by_name.values() if field.is_taken]
    positional = [p for p in params if p.kind is EITHER]
    for index, param in enumerate(positional):
        if param.default is None and any(earlier.default is not None for earlier in positional[:index]):
            positional[index] = replace(param, default=OPTIONAL)
    return positional + [p for p in params if p.kind is KEYWORD]


def tuple_params(names: Names, cls: Class) -> list[Param]:
    """Returns the parameters of a `typing.NamedTuple`."""
    scope = Scope(names, cls.module, cls.module.is_stub, None)
    found = []
    for statement in cls.body.plain():
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = None if statement.value is None else default_of(statement.value)
            annotation = with_default(describe(names, statement.annotation, scope), default)
            found.append(Param(statement.target.id, EITHER, default, annotation))
    return found
