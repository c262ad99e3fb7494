"""Does a value fit an annotation?

Takes what a node will give and the words of an annotation (see `signatures.results.Annotation`), gives a `Misfit` or
None. Keeps true: Python's own tolerance holds (an int is a float, a list stands for a tuple), a text may become a path
or a member of an enum, and what cannot be ruled out fits.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter
from typing import NamedTuple

from forgather.config.graph import Call, CallKind, Container, ContainerKind, Node, Scalar, Sequence, describe
from forgather.config.path import PlainScalar
from forgather.signatures.results import Annotation, Callee

_SIMPLE = frozenset({"none", "bool", "int", "float", "str", "bytes", "list", "tuple", "dict", "iterable", "type"})
_SWITCHING = frozenset({"bool", "int", "float"})
_TENSORS = frozenset(f"{tensor}{end}" for tensor in ("Tensor", "torch.Tensor") for end in ("", " | None"))
_TENSORS |= frozenset(f"Optional[{tensor}]" for tensor in ("Tensor", "torch.Tensor"))
_ROW = {"list", "tuple", "iterable"}
_CONTAINERS = {"list": _ROW, "tuple": _ROW, "dict": {"dict", "iterable"}}
_SWITCHES = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}
_TYPES: dict[type, str] = {type(None): "none", bool: "bool", int: "int", float: "float", str: "str"}


class Given(NamedTuple):
    """What a node will give.

    Args:
        word: a word of annotations: "none bool int float str list tuple dict callable instance".
        described: for people, as in "the text '3e-4'".
        constructor: what is called, for a call.
        value: the value of a scalar.
        is_callable: whether an instance can be called; None where that is unknown.
        of_class: whether a class is what a partial calls.
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
        code: stable code.
        wanted: what was wanted, in words; None to quote the annotation.
        hint: what can be done.
    """

    code: str
    wanted: str | None
    hint: str


def given_by(node: Node, callee: Callee | None) -> Given | None:
    """Returns what a node will give; None where only construction tells.

    Args:
        node: the node.
        callee: what it calls, where that is known.
    """
    if isinstance(node, Scalar):
        word = _TYPES[type(node.value)]
        return Given(word, _literal(node.value), value=node.value)
    if isinstance(node, Container):
        if node.kind is ContainerKind.DLIST:
            return Given("list", "a list")
        return Given(str(node.kind), describe(node))
    if not isinstance(node, Call) or node.kind is CallKind.META:
        return None
    if node.kind is CallKind.PARTIAL:
        of_class = callee is not None and callee.kind == "class"
        return Given("callable", f"a !partial of {node.constructor}", node.constructor, of_class=of_class)
    return _built(node, callee)


def _built(node: Call, callee: Callee | None) -> Given | None:
    if callee is None:
        return None
    if callee.kind == "class":
        described = f"an object of {callee.name}"
        return Given("instance", described, node.constructor, is_callable=callee.callable_instance)
    gives = callee.gives.accepts
    if not gives or not gives <= _SIMPLE:
        # A function may give a subclass of what its annotation names, and that may be callable.
        return None
    return Given("instance", f"what {callee.name} gives", node.constructor, is_callable=False)


def misfit(given: Given, accepts: frozenset[str], is_callable: Callable[[str], bool | None]) -> Misfit | None:
    """Returns why a value does not fit; None where it does, or may.

    Args:
        given: the value.
        accepts: words of the annotation.
        is_callable: tells whether instances of a class (`module:Class`) can be called.
    """
    if given.word == "callable":
        return _partial(given, accepts, is_callable)
    if given.word != "none" and accepts - {"none", "type"} == {"callable"}:
        return _for_callable(given)
    if given.word == "instance":
        return None
    return None if _fits(given, accepts) else Misfit("FG242", None, _advice(given, accepts))


def list_for_tensor(node: Node, annotation: str) -> Misfit | None:
    """Returns the misfit of a list where torch takes a tensor, which its code does not make of it.

    Args:
        node: the value.
        annotation: of a parameter of torch, as torch writes it.
    """
    is_row = isinstance(node, Container) and node.kind is not ContainerKind.DICT
    if not is_row or annotation not in _TENSORS:
        return None
    return Misfit("FG242", None, f"a tensor is made by a call: write !call:torch:tensor [{_floats(node)}]")


def _floats(node: Node) -> str:
    """Returns a short list of numbers as floats, which is what weights have to be; an example for anything else."""
    items = node.items if isinstance(node, Sequence) else ()
    values = [item.value for item in items if isinstance(item, Scalar)]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return repr(numbers) if 0 < len(numbers) == len(items) <= 8 else "[1.0, 3.0]"


def asks_for_text(parameter: Parameter) -> bool:
    """Returns whether a parameter takes a text and neither number nor boolean, so that `no` and `10k` mean themselves.

    Nothing (`none`) is a text to it where it has another text as its default.
    """
    accepts = parameter.annotation.accepts if isinstance(parameter.annotation, Annotation) else None
    has_text = isinstance(getattr(parameter.default, "value", None), str)
    if accepts is None:
        return has_text
    return "str" in accepts and accepts.isdisjoint(_SWITCHING) and (has_text or "none" not in accepts)


def _partial(given: Given, accepts: frozenset[str], is_callable: Callable[[str], bool | None]) -> Misfit | None:
    for word in accepts:
        if word.startswith("instance:"):
            # A function may stand for an object that is called, as for a module; a class to be called never does.
            if not given.of_class and is_callable(word.removeprefix("instance:")) is not False:
                return None
        elif word not in _SIMPLE:
            return None
    return Misfit("FG240", None, f"write !singleton or !factory:{given.constructor}, which calls it")


def _for_callable(given: Given) -> Misfit | None:
    if given.word == "instance":
        if given.is_callable is not False:
            return None
        return Misfit("FG241", "a callable", f"write !partial:{given.constructor}, to be called later")
    if isinstance(given.value, str) and ":" in given.value:
        return Misfit("FG241", "a callable", f"write !partial:{given.value}")
    hint = "give a callable, as !partial:module:function; a template needs `-- include 'its name'`"
    return Misfit("FG241", "a callable", hint)


def _fits(given: Given, accepts: frozenset[str]) -> bool:
    if given.word == "none":
        return "none" in accepts
    if given.word != "dict" and any(word.startswith("instance:") for word in accepts):
        return True
    if given.word in _CONTAINERS:
        return not accepts.isdisjoint(_CONTAINERS[given.word])
    if given.word == "str":
        return not accepts.isdisjoint({"str", "iterable"})
    if given.word == "bool":
        return not accepts.isdisjoint({"bool", "int", "float"})
    if given.word == "int":
        return not accepts.isdisjoint({"int", "float"}) or ("bool" in accepts and given.value in (0, 1))
    return given.word in accepts


def _advice(given: Given, accepts: frozenset[str]) -> str:
    if given.word == "str" and not accepts.isdisjoint({"int", "float"}) and _is_number(str(given.value)):
        return f"a number in quotes is a text: write {given.value} without quotes"
    if given.word == "str" and "bool" in accepts and str(given.value).lower() in _SWITCHES:
        return f"write {_SWITCHES[str(given.value).lower()]}, without quotes"
    if given.word == "float" and "int" in accepts and float(str(given.value)).is_integer():
        return f"write the whole number {int(float(str(given.value)))}"
    if given.word == "none":
        return "give a value, or leave the argument out"
    return f"give {_any_of(accepts)}"


_NAMES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text",
          "bytes": "bytes", "list": "a list", "tuple": "a list", "dict": "a mapping", "iterable": "a list",
          "callable": "a !partial"}  # fmt: skip


def _any_of(accepts: frozenset[str]) -> str:
    # What Python takes for a number is not all that one would write.
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
