"""The symbols that a name in source code can stand for, and library names whose meaning is known without their source.

`Thing` is the union of all kinds of symbols: modules, classes, functions, partials, named tuples, other values, names
that are recognized (`Ref`), and a `Doubt` with the reason why the meaning is unknown. The tables of recognized names
contain only names whose effect on signatures is certain.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from forgather.signatures.lazy_ast import Block, Parsed, Text, body_of
from forgather.signatures.module_finder import Found

# Functions, and decorators with or without arguments, that return a callable of the same signature.
SAME = frozenset(
    """
    abc.abstractmethod contextlib.contextmanager contextlib.asynccontextmanager functools.cache functools.lru_cache
    functools.total_ordering functools.wraps typing.final typing.no_type_check typing.override typing.runtime_checkable
    typing.dataclass_transform typing_extensions.dataclass_transform typing_extensions.deprecated
    typing_extensions.final typing_extensions.override typing_extensions.runtime_checkable warnings.deprecated
    enum.unique typing.type_check_only typing_extensions.type_check_only
    torch.no_grad torch.inference_mode torch.enable_grad torch.autograd.no_grad torch.jit.ignore torch.jit.unused
    torch.jit.export torch.compiler.disable torch._dynamo.disable torch.compiler.allow_in_graph
    torch._jit_internal.ignore torch._jit_internal.unused torch.utils._contextlib._DecoratorContextManager
    torch.autograd.grad_mode.no_grad torch.autograd.grad_mode.inference_mode torch.autograd.grad_mode.enable_grad
    torch._disable_dynamo torch._compile._disable_dynamo
    transformers.utils.auto_docstring transformers.utils.auto_docstring.auto_docstring
    transformers.utils.doc.add_start_docstrings transformers.utils.add_start_docstrings
    transformers.utils.doc.add_start_docstrings_to_model_forward transformers.utils.doc.add_end_docstrings
    transformers.utils.doc.add_code_sample_docstrings transformers.utils.doc.replace_return_docstrings
    transformers.utils.add_end_docstrings transformers.utils.replace_return_docstrings
    huggingface_hub.dataclasses.strict huggingface_hub.utils.validate_hf_hub_args
    transformers.utils.import_utils.requires
    """.split()
)
# Names of the standard library that are recognized: reading their source would not show what they do.
BY_NAME = frozenset(
    """
    dataclasses.dataclass dataclasses.field dataclasses.KW_ONLY dataclasses.InitVar dataclasses.Field
    functools.partial functools.partialmethod functools.singledispatch functools.cached_property
    collections.namedtuple enum.Enum enum.IntEnum enum.StrEnum enum.Flag enum.IntFlag enum.EnumMeta enum.EnumType
    abc.ABC abc.ABCMeta types.SimpleNamespace
    """.split()
)
# Modules of which every name is recognized.
TYPING = frozenset(("typing", "typing_extensions", "collections.abc", "numbers"))
# Base classes without a constructor.
EMPTY_BASES = frozenset(
    """
    abc.ABC typing.Generic typing.Protocol typing_extensions.Protocol typing_extensions.Generic builtins.object
    typing.Iterable collections.abc.Iterable
    """.split()
)
# Mutable base classes whose `__new__` accepts any arguments, so that the `__init__` of a subclass decides.
OPEN_NEW = frozenset("builtins.dict builtins.list builtins.set builtins.bytearray collections.OrderedDict".split())
# Metaclasses that do not change how a class is constructed.
CODE_FREE_METACLASSES = frozenset(("abc.ABCMeta", "builtins.type"))


def is_by_name(dotted: str) -> bool:
    """Returns whether a library name is in the table of recognized names, so that its source is not read."""
    return dotted in SAME or dotted in BY_NAME or dotted.rpartition(".")[0] in TYPING


class Module:
    """The source code of a module, parsed on first use.

    Args:
        found: the location of the module.
        text: the source text of the module; None if the module has no source.
        is_stub: whether the text is that of a `.pyi` file.
    """

    __slots__ = ("found", "is_stub", "text", "_block", "_has", "_is_broken")

    def __init__(self, found: Found, text: Text | None, *, is_stub: bool = False) -> None:
        self.found, self.text, self.is_stub = found, text, is_stub
        self._block: Block | None = None
        self._is_broken = False
        self._has: dict[str, bool] = {}

    @property
    def name(self) -> str:
        """The dotted name of the module."""
        return self.found.name

    @property
    def file(self) -> str | None:
        """The source file or stub of the module; None if it has neither."""
        return self.found.stub if self.is_stub else self.found.file

    @property
    def block(self) -> Block:
        """The top-level statements of the module."""
        if self._block is None:
            try:
                self._block = (self.text or Text("")).block()
            except SyntaxError:
                self._block, self._is_broken = Text("").block(), True
        return self._block

    @property
    def is_broken(self) -> bool:
        """Whether a syntax error was found in the statements that have been parsed so far."""
        _ = self.block
        return self._is_broken

    def has(self, word: str) -> bool:
        """Returns whether the source of the module contains a piece of text."""
        if word not in self._has:
            self._has[word] = self.text is not None and word in self.text.text
        return self._has[word]


@dataclass(frozen=True, slots=True, eq=False)
class Class:
    """A class in source code.

    Args:
        module: the module that defines the class.
        node: the `class` statement.
        outer: the class that contains the definition; None at the top level of the module.
        altered: the names of the attributes that a decorator sets on the class.
    """

    module: Module
    node: ast.ClassDef
    outer: Class | None = None
    altered: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The qualified name of the class, which includes the names of the classes that contain it."""
        return f"{self.outer.name}.{self.node.name}" if self.outer else self.node.name

    @property
    def place(self) -> str:
        """The module and the qualified name, as in "torch.nn:Linear"."""
        return f"{self.module.name}:{self.name}"

    @property
    def body(self) -> Block | Parsed:
        """The statements in the body of the class."""
        return body_of(self.node)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function or method in source code.

    Args:
        module: the module that defines the function.
        node: the `def` statement.
        home: the class whose body contains the definition; None for a function that is not a method.
        owner: the class on which the method was looked up: `home` or a subclass.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    home: Class | None = None
    owner: Class | None = None

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.node.name

    @property
    def place(self) -> str:
        """The module and the qualified name, as in "json:loads"."""
        return f"{self.home.place}.{self.name}" if self.home else f"{self.module.name}:{self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A call of `functools.partial`.

    Args:
        inner: the callable that is the first argument.
        args: the number of further positional arguments.
        keywords: the names of the keyword arguments.
    """

    inner: Any
    args: int
    keywords: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Tuples:
    """A class made by `collections.namedtuple`.

    Args:
        fields: the names of the fields.
        defaults: the number of fields with a default; these are the last fields.
    """

    fields: tuple[str, ...]
    defaults: int


@dataclass(frozen=True, slots=True)
class Ref:
    """A library name whose meaning is known without its source ("typing.Generic", "builtins.dict")."""

    dotted: str


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A value that is neither a class nor a function nor a module; `node` is the expression of the value."""

    module: Module
    node: ast.expr


@dataclass(frozen=True, slots=True)
class Doubt:
    """The reason why the meaning of a name cannot be determined from the source."""

    reason: str


Thing = Module | Class | Function | Partial | Tuples | Ref | Value | Doubt


def dotted_name(thing: Thing) -> str:
    """Returns the dotted name of a symbol; "" if the symbol has none."""
    if isinstance(thing, Ref):
        return thing.dotted
    if isinstance(thing, Class | Function):
        return f"{thing.module.name}.{thing.name}"
    return ""


def foreign(module: Module) -> Doubt:
    """Returns the `Doubt` for a name in a module that is not written in Python (a C extension module)."""
    return Doubt(f"{module.name!r} is not written in Python")


Line = list[Class | Ref | Doubt]


def merge(chains: list[Line]) -> Line:
    """Returns the method resolution order of a class from those of its base classes.

    Source:
        C3 linearization, as in Python's `type.mro`.
    """
    merged: Line = []
    while chains := [chain for chain in chains if chain]:
        for chain in chains:
            head = chain[0]
            if not any(_same(head, later) for other in chains for later in other[1:]):
                break
        else:
            return [*merged, Doubt("its bases have no order")]
        merged.append(head)
        for chain in chains:
            if _same(chain[0], head):
                del chain[0]
    return merged


def _same(one: Class | Ref | Doubt, other: Class | Ref | Doubt) -> bool:
    if isinstance(one, Class) and isinstance(other, Class):
        return one.node is other.node
    return one == other


def named_tuple(call: ast.Call) -> Thing:
    """Returns the class that a call of `collections.namedtuple` creates; a `Doubt` if its fields are not literals."""
    if len(call.args) != 2 or any(keyword.arg not in ("defaults", "module") for keyword in call.keywords):
        return Doubt("a named tuple whose fields are computed in code")
    defaults = 0
    for keyword in call.keywords:
        if keyword.arg == "defaults":
            if not isinstance(keyword.value, ast.Tuple | ast.List):
                return Doubt("a named tuple whose fields are computed in code")
            defaults = len(keyword.value.elts)
    try:
        names = ast.literal_eval(call.args[1])
    except ValueError:
        return Doubt("a named tuple whose fields are computed in code")
    fields = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    return Tuples(tuple(str(field) for field in fields), defaults)


def is_generic(thing: Thing) -> bool:
    """Returns whether `thing[...]` is constructed in the same way as `thing`."""
    if isinstance(thing, Ref):
        return thing.dotted in EMPTY_BASES or not thing.dotted.startswith("typing")
    return isinstance(thing, Class | Doubt)
