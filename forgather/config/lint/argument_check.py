"""Checks the arguments of one call: their names and number against a signature, and their values against annotations.

The inputs are a callable, or signatures that were read from source, and the arguments in the config. The output is a
`Mismatch` for a wrong name or number of arguments, and a `Misfit` for a value that the annotation of its parameter
rules out. Invariants: only arguments that the signature itself rules out are reported, never a `TypeError` from inside
a constructor; construction and the static check report the same mismatch. As in Python, an int is accepted as a float
and a list as a tuple; a string is accepted as a path or a member of an enum; a value that cannot be ruled out is
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import BoundArguments, Parameter, Signature
from inspect import signature as signature_of
from typing import Any, NamedTuple

from forgather.aliases import suggest
from forgather.config.graph import Call, CallKind, Container, ContainerKind, Node, Scalar, describe
from forgather.config.graph import Sequence as SequenceNode
from forgather.config.lint.suspicious_scalars import BOOLEANS
from forgather.config.path import PlainScalar
from forgather.signatures.results import Annotation, Callee

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Mismatch(NamedTuple):
    """Arguments that a signature rules out.

    Args:
        code: the error code.
        message: a description of what was found.
        hint: a suggestion of what the user can do.
        keyword: the keyword argument to point at; None to point at the call.
        expected: for an unknown keyword, the names of all parameters; for missing arguments, the names of the
            parameters that got none.
        position: the index of the positional argument to point at; None if the error is not about one.
    """

    code: str
    message: str
    hint: str | None = None
    keyword: str | None = None
    expected: tuple[str, ...] = ()
    position: int | None = None


def mismatch(
    function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
) -> Mismatch | None:
    """Returns why `function` cannot take these arguments; None if it can, or if it has no readable signature.

    Args:
        function: the callable.
        name: the name of the callable in the message.
        args: the positional arguments.
        kwargs: the keyword arguments.
        partial: whether more arguments will be given later; missing arguments are then accepted.
    """
    signature = _readable_signature(function)
    if signature is None:
        return None
    return next(iter(mismatches((signature,), name, args, kwargs, partial=partial)), None)


def _readable_signature(function: Callable[..., Any]) -> Signature | None:
    try:
        # A decorator may accept more than the function that it wraps, so the wrapper's own signature counts.
        signature = signature_of(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return None
    # The text signature of a class compiled by PyO3 contains `self`, and its parameters are not always the real ones.
    is_text = isinstance(function, type) and getattr(function, "__text_signature__", None) is not None
    return None if is_text and next(iter(signature.parameters), None) == "self" else signature


def mismatches(
    signatures: Sequence[Signature],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    partial: bool = False,
) -> list[Mismatch]:
    """Returns the reasons why none of these signatures accepts the arguments; an empty list if one accepts them.

    Args:
        signatures: the overloads, at least one; the report is about the overload that has most of the keywords.
        name: the name of the callable in the messages.
        args: the positional arguments.
        kwargs: the keyword arguments.
        partial: whether more arguments will be given later; missing arguments are then accepted.
    """
    if any(binds(signature, args, kwargs, partial=partial) for signature in signatures):
        return []
    # With overloads, the one with most of the keywords is most likely the one that was meant.
    nearest_one = max(signatures, key=lambda signature: sum(keyword in signature.parameters for keyword in kwargs))
    return list(_diagnose(nearest_one, name, args, kwargs, partial))


def binds(
    signature: Signature, args: Sequence[Any], kwargs: Mapping[str, Any], *, partial: bool = False
) -> BoundArguments | None:
    """Returns the arguments by parameter; None if the signature does not accept them.

    Args:
        signature: the signature.
        args: the positional arguments.
        kwargs: the keyword arguments.
        partial: whether arguments may be missing.
    """
    try:
        return (signature.bind_partial if partial else signature.bind)(*args, **kwargs)
    except TypeError:
        return None


def _diagnose(
    signature: Signature, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], partial: bool
) -> Iterator[Mismatch]:
    parameters = signature.parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    named = tuple(parameter.name for parameter in parameters if parameter.kind in _NAMED)
    positional = tuple(parameter.name for parameter in parameters if parameter.kind in _POSITIONAL)
    filled = positional[: len(args)]
    meant = set[str]()
    # `**options` accepts any name; near misses are a warning of `call_check`.
    if Parameter.VAR_KEYWORD not in kinds:
        for keyword in kwargs:
            if keyword not in named:
                hint: str | None = suggest("keyword", keyword, named) or _list(named) or "it takes none"
                # A misspelt keyword is not reported a second time as a missing argument.
                meant.update(word for word in named if hint == f"did you mean {word!r}?")
                yield Mismatch("FG204", f"{name} has no parameter {keyword!r}", hint, keyword, named)
    if len(args) > len(positional) and Parameter.VAR_POSITIONAL not in kinds:
        takes = f"at most {len(positional)}" if positional else "none"
        message = f"{name} got {len(args)} positional arguments but takes {takes}"
        yield Mismatch("FG209", message, _list(positional), position=len(positional))
    for keyword in kwargs:
        # A positional-only parameter may share its name with a keyword for `**options`.
        if keyword in filled and keyword in named:
            yield Mismatch("FG209", f"{name} got {keyword!r} twice, by position and by name", "leave one out", keyword)
    missing = tuple(
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (*_NAMED, Parameter.POSITIONAL_ONLY)
        and parameter.name not in (*filled, *kwargs, *meant)
    )
    # A partial may get its missing arguments when it is called.
    if missing and not partial:
        what = "argument" if len(missing) == 1 else "arguments"
        names = ", ".join(repr(word) for word in missing)
        hint = f"{_list(named)}; a !partial may leave some to be given later" if named else None
        yield Mismatch("FG208", f"{name} lacks the {what} {names}", hint, expected=missing)


def _list(names: tuple[str, ...]) -> str | None:
    return f"its parameters: {', '.join(names[:20])}" if names else None


_SIMPLE = frozenset({"none", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict", "iterable", "type"})
_SWITCHING = frozenset({"bool", "int", "float"})
_TENSORS = frozenset(f"{tensor}{end}" for tensor in ("Tensor", "torch.Tensor") for end in ("", " | None"))
_TENSORS |= frozenset(f"Optional[{tensor}]" for tensor in ("Tensor", "torch.Tensor"))
_ROW = {"list", "tuple", "iterable"}
_CONTAINERS = {"list": _ROW, "tuple": _ROW, "dict": {"dict", "iterable"}}

_TYPES: dict[type, str] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}


class KnownValue(NamedTuple):
    """The value that a node will have, as far as it is known before construction.

    Args:
        word: the type of the value: none, bool, int, float, str, list, tuple, dict, callable or instance.
        described: the description of the value in messages, such as "the text '3e-4'".
        constructor: the name of the constructor if the node is a call.
        value: the Python value if the node is a scalar.
        is_callable: whether the value, an instance of a class, can be called; None if that is unknown.
        of_class: whether the value is a partial of a class.
    """

    word: str
    described: str
    constructor: str = ""
    value: PlainScalar = None
    is_callable: bool | None = None
    of_class: bool = False


class Misfit(NamedTuple):
    """A value that an annotation rules out.

    Args:
        code: the error code.
        wanted: the expected type in words; None to quote the annotation.
        hint: a suggestion of what the user can do.
    """

    code: str
    wanted: str | None
    hint: str


def known_value(node: Node, callee: Callee | None) -> KnownValue | None:
    """Returns what is known about the value that a node will have; None if only construction can determine it.

    Args:
        node: the node.
        callee: the constructor of the node; None if the node has no constructor, or if the constructor is not known.
    """
    if isinstance(node, Scalar):
        word = _TYPES[type(node.value)]
        return KnownValue(word, _literal(node.value), value=node.value)
    if isinstance(node, Container):
        # A `!dlist` is written as a mapping, but its object is a list.
        if node.kind is ContainerKind.DLIST:
            return KnownValue("list", "a list")
        return KnownValue(str(node.kind), describe(node))
    if not isinstance(node, Call) or node.kind is CallKind.META:
        return None
    if node.kind is CallKind.PARTIAL:
        of_class = callee is not None and callee.kind == "class"
        return KnownValue("callable", f"a !partial of {node.constructor}", node.constructor, of_class=of_class)
    return _built(node, callee)


def _built(node: Call, callee: Callee | None) -> KnownValue | None:
    if callee is None:
        return None

    if callee.kind == "class":
        described = f"an object of {callee.name}"
        return KnownValue("instance", described, node.constructor, is_callable=callee.callable_instance)
    gives = callee.gives.accepts
    if not gives or not gives <= _SIMPLE:
        # A function may return a subclass of the annotated class, and the subclass may be callable.
        return None
    return KnownValue("instance", f"what {callee.name} gives", node.constructor, is_callable=False)


def misfit(given: KnownValue, accepts: frozenset[str], is_callable: Callable[[str], bool | None]) -> Misfit | None:
    """Returns why a value does not fit an annotation; None if it fits, or may fit.

    Args:
        given: the value.
        accepts: the words for the types that the annotation accepts.
        is_callable: a function that returns whether instances of a class (`module:Class`) can be called, or None if
            that is unknown.
    """
    if given.word == "callable":
        return _partial(given, accepts, is_callable)
    if given.word != "none" and accepts - {"none", "type"} == {"callable"}:
        return _for_callable(given)
    if given.word == "instance":
        return None
    return None if _fits(given, accepts) else Misfit("FG242", None, _advice(given, accepts))


def list_for_tensor(node: Node, annotation: str) -> Misfit | None:
    """Returns a misfit if a list is given for a tensor parameter, because torch does not convert lists; else None.

    Args:
        node: the node of the value.
        annotation: the annotation of the parameter, as torch writes it.
    """
    is_row = isinstance(node, Container) and node.kind is not ContainerKind.DICT
    if not is_row or annotation not in _TENSORS:
        return None
    return Misfit("FG242", None, f"a tensor is made by a call: write !call:torch:tensor [{_floats(node)}]")


def _floats(node: Node) -> str:
    """Returns the text of a short list of numbers as floats, as weights must be; for any other value, an example."""
    items = node.items if isinstance(node, SequenceNode) else ()
    values = [item.value for item in items if isinstance(item, Scalar)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return repr(numbers) if 0 < len(numbers) == len(items) <= 8 else "[1.0, 3.0]"


def asks_for_text(parameter: Parameter) -> bool:
    """Returns whether a parameter takes strings but no number or boolean, so that `no` and `10k` are meant as strings.

    A parameter that also accepts None takes strings in this sense only if its default is a string.
    """
    accepts = parameter.annotation.accepts if isinstance(parameter.annotation, Annotation) else None
    has_text = isinstance(getattr(parameter.default, "value", None), str)
    if accepts is None:
        return has_text
    return "str" in accepts and accepts.isdisjoint(_SWITCHING) and (has_text or "none" not in accepts)


def _partial(given: KnownValue, accepts: frozenset[str], is_callable: Callable[[str], bool | None]) -> Misfit | None:
    for word in accepts:
        if word.startswith("instance:"):
            # A partial of a function can replace an object that is called, such as a module; one of a class cannot.
            if not given.of_class and is_callable(word.removeprefix("instance:")) is not False:
                return None
        # A callable or an unknown word may accept a partial.
        elif word not in _SIMPLE:
            return None
    return Misfit("FG240", None, f"write !singleton or !factory:{given.constructor}, which calls it")


def _for_callable(given: KnownValue) -> Misfit | None:
    if given.word == "instance":
        if given.is_callable is not False:
            return None
        return Misfit("FG241", "a callable", f"write !partial:{given.constructor}, to be called later")
    if isinstance(given.value, str) and ":" in given.value:
        return Misfit("FG241", "a callable", f"write !partial:{given.value}")
    hint = "give a callable, as !partial:module:function; a template needs `-- include 'its name'`"
    return Misfit("FG241", "a callable", hint)


def _fits(given: KnownValue, accepts: frozenset[str]) -> bool:
    if given.word == "none":
        return "none" in accepts
    # A text may become a path or a member of an enum, and a list an array; only construction can tell.
    if given.word != "dict" and any(word.startswith("instance:") for word in accepts):
        return True
    if given.word in _CONTAINERS:
        return not accepts.isdisjoint(_CONTAINERS[given.word])
    if given.word == "str":
        return not accepts.isdisjoint({"str", "iterable"})
    # In Python a bool is an int, and 0 and 1 are used as booleans.
    if given.word == "bool":
        return not accepts.isdisjoint({"bool", "int", "float"})
    if given.word == "int":
        return not accepts.isdisjoint({"int", "float"}) or ("bool" in accepts and given.value in (0, 1))
    return given.word in accepts


def _advice(given: KnownValue, accepts: frozenset[str]) -> str:
    if given.word == "str" and not accepts.isdisjoint({"int", "float"}) and _is_number(str(given.value)):
        return f"a number in quotes is a text: write {given.value} without quotes"
    if given.word == "str" and "bool" in accepts and str(given.value).lower() in BOOLEANS:
        return f"write {BOOLEANS[str(given.value).lower()]}, without quotes"
    if given.word == "float" and "int" in accepts and float(str(given.value)).is_integer():
        return f"write the whole number {int(float(str(given.value)))}"
    if given.word == "none":
        return "give a value, or leave the argument out"
    return f"give {_any_of(accepts)}"


_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
          "bytes": "bytes", "list": "a list", "tuple": "a list", "dict": "a mapping", "iterable": "a list",
          "callable": "a !partial"}  # fmt: skip


def _any_of(accepts: frozenset[str]) -> str:
    # A bool is an int and an int is a float in Python, but the hint should name only the type that was meant.
    implied = {"bool", "int"} if "float" in accepts else {"bool"} if "int" in accepts else set[str]()
    names = [name for word, name in _NAMES.items() if word in accepts - implied]
    names += [f"an object of {word.rpartition(':')[2]}" for word in sorted(accepts) if word.startswith("instance:")]
    return " or ".join(dict.fromkeys(names)) or "what the annotation names"


def _is_number(text: str) -> bool:
    try:
        float(text.replace("_", "") or "x")
    except ValueError:
        return False
    return True


def _literal(value: PlainScalar) -> str:
    if value is None:
        return "nothing (~)"
    if isinstance(value, bool):
        return str(value).lower()
    kind = {str: "the text ", int: "the whole number ", float: "the number "}[type(value)]
    found = repr(value)
    return kind + (found if len(found) <= 80 else found[:77] + "...")
