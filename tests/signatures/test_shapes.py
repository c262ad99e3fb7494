"""What source can look like: each shape with what Python says of it after an import."""

import importlib
import inspect
import sys
import textwrap

import pytest

from forgather.errors import ResolveError
from forgather.signatures import UNKNOWN, Callee, Reader, Unknown


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package `shapes` on the search path; gives what is read and what Python says."""

    def write(**files):
        folder = tmp_path / "shapes"
        for name, text in {"__init__": "", **files}.items():
            file = folder / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(textwrap.dedent(text))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        reader = Reader(str(tmp_path / "elsewhere"))
        return reader.read

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "shapes"]:
        del sys.modules[name]


def shape(signature):
    return [(p.name, p.kind.name, p.default is p.empty) for p in signature.parameters.values()]


def ways(callee):
    assert isinstance(callee, Callee), callee
    return [list(signature.parameters) for signature in callee.signatures]


def real(constructor):
    module, _, symbol = constructor.partition(":")
    found = importlib.import_module(module)
    for part in symbol.split("."):
        found = getattr(found, part)
    return inspect.signature(found)


SAME_AS_PYTHON = {
    "all kinds": "def f(a, /, b, c=1, *rest, d, e=None, **more): ...",
    "async": "async def f(a, b=2): ...",
    "lambda": "f = lambda a, b=1: a",
    "alias": "def g(a): ...\nf = g",
    "tuple assignment": "def g(a): ...\ndef h(b): ...\nx, f = g, h",
    "redefined": "def f(a): ...\ndef f(b): ...",
    "decorated by itself": "def keep(x): return x\ndef f(a): ...\nf = keep(f)",
    "class": "class f:\n    def __init__(self, a, b=1): ...",
    "class without constructor": "class f: ...",
    "new": "class f:\n    def __new__(cls, a, b=1): return object.__new__(cls)",
    "base": "class g:\n    def __init__(self, a): ...\nclass f(g): ...",
    "two bases": "class a:\n    def __init__(self, x): ...\nclass b(a): ...\nclass c(a):\n    def __init__(self, y): ...\nclass f(b, c): ...",
    "generic base": "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass g(Generic[T]):\n    def __init__(self, a): ...\nclass f(g[int]): ...",
    "abstract": "from abc import ABC, abstractmethod\nclass f(ABC):\n    @abstractmethod\n    def __init__(self, a): ...",
    "metaclass of abc": "from abc import ABCMeta\nclass f(metaclass=ABCMeta):\n    def __init__(self, a): ...",
    "exception": "class f(ValueError):\n    def __init__(self, a): ...",
    "dict": "class f(dict):\n    def __init__(self, a): ...",
    "nested class": "class f:\n    def __init__(self, a): ...\n    class g:\n        def __init__(self, b): ...",
    "version": "import sys\nif sys.version_info >= (3, 8):\n    def f(a): ...\nelse:\n    def f(b): ...",
    "import that works": "try:\n    from json import dumps as f\nexcept ImportError:\n    f = None",
    "import that fails": "try:\n    from no_such_library import f\nexcept ImportError:\n    def f(a): ...",
    "partial": "from functools import partial\ndef g(a, b, c=1, *, d): ...\nf = partial(g, 1)",
    "partial of keywords": "import functools\ndef g(a, b, c=1, *, d): ...\nf = functools.partial(g, b=1)",
    "partial of a class": "import functools\nclass g:\n    def __init__(self, a, b): ...\nf = functools.partial(g, 1)",
    "wrapped": """
        import functools
        def deco(g):
            @functools.wraps(g)
            def inner(*args, **kwargs):
                return g(*args, **kwargs)
            return inner
        @deco
        def f(a, b=1): ...
        """,
    "wrapped with arguments": """
        import functools
        def deco(times):
            def outer(g):
                @functools.wraps(g)
                def inner(*args, **kwargs):
                    for _ in range(times):
                        g(*args, **kwargs)
                return inner
            return outer
        @deco(3)
        def f(a, b=1): ...
        """,
    "cached": "import functools\n@functools.lru_cache(maxsize=None)\ndef f(a): ...",
    "context manager": "import contextlib\n@contextlib.contextmanager\ndef f(a): yield",
    "registered class": "SEEN = []\ndef register(cls):\n    SEEN.append(cls)\n    return cls\n@register\nclass f:\n    def __init__(self, a): ...",
    "dataclass": "from dataclasses import dataclass, field\n@dataclass\nclass f:\n    a: int\n    b: str = ''\n    c: list = field(default_factory=list)\n    d: int = field(default=1, init=False)",
    "dataclass of keywords": "import dataclasses\n@dataclasses.dataclass(kw_only=True, frozen=True)\nclass f:\n    a: int\n    b: int = 2",
    "dataclass with a mark": "from dataclasses import dataclass, KW_ONLY\n@dataclass\nclass f:\n    a: int\n    _: KW_ONLY\n    b: int = 2",
    "inherited fields": "from dataclasses import dataclass\n@dataclass\nclass g:\n    a: int\n    b: int = 1\n@dataclass\nclass f(g):\n    c: int = 2\n    a: int = 3",
    "class variables": "from dataclasses import dataclass, InitVar\nfrom typing import ClassVar\n@dataclass\nclass f:\n    a: InitVar[int]\n    b: ClassVar[int] = 1\n    c: 'ClassVar[int]' = 1",
    "dataclass with a constructor": "from dataclasses import dataclass\n@dataclass\nclass f:\n    a: int = 1\n    def __init__(self, b): ...",
    "dataclass without one": "from dataclasses import dataclass\nclass g:\n    def __init__(self, b): ...\n@dataclass(init=False)\nclass f(g):\n    a: int = 1",
    "dataclass by another name": "from dataclasses import dataclass as record\n@record\nclass f:\n    a: int",
    "named tuple": "from typing import NamedTuple\nclass f(NamedTuple):\n    a: int\n    b: int = 1",
    "below a named tuple": "from typing import NamedTuple\nclass g(NamedTuple):\n    a: int\n    b: int = 1\nclass f(g):\n    c: int = 2",
    "below a named tuple, with new": "from typing import NamedTuple\nclass g(NamedTuple):\n    a: int\n    b: int = 1\nclass f(g):\n    def __new__(cls, x): return super().__new__(cls, x)",
    "registered by a call": "SEEN = []\ndef register(cls): SEEN.append(cls)\nclass f:\n    def __init__(self, a): ...\nregister(f)",
    "named tuple by call": "from collections import namedtuple\nf = namedtuple('f', 'a b c', defaults=(1,))",
    "class below an init_subclass": "class g:\n    def __init_subclass__(cls, **more): super().__init_subclass__(**more)\n    def __init__(self, a): ...\nclass f(g): ...",
    "docstring with code at the margin": 'def f(a):\n    """\ndef f(b): ...\nclass f: ...\n"""\n',
    "odd text": "x = '''\ndef f(wrong): ...\n'''\ny = \"it's\"  # it's a ''' comment\ndef f(a): ...\n",
    "brackets at the margin": "x = [\n1,\n2,\n]\ndef f(a,\nb=2,\n): ...\n",
    "tabs": "class f:\n\tx = 1\n\tdef __init__(self, a):\n\t\tpass\n",
    "one line": "class f: x = 1\n",
    "long header": "class g:\n    def __init__(self, a): ...\nclass f(\n    g,  # the base:\n):\n    y: int = 1\n",
}


@pytest.mark.parametrize("name", SAME_AS_PYTHON)
def test_what_is_read_is_what_python_says(package, name):
    callee = package(mod=SAME_AS_PYTHON[name])("shapes.mod:f")
    assert isinstance(callee, Callee), callee
    assert [shape(real("shapes.mod:f"))] == [shape(signature) for signature in callee.signatures]


METHODS = """
    import functools
    class f:
        def __init__(self, a): ...
        def plain(self, b): ...
        @classmethod
        def made(cls, c, *, d=1): ...
        @staticmethod
        def still(e): ...
        @functools.lru_cache
        def kept(self, g): ...
        class Inner:
            def __init__(self, h): ...
    class sub(f): ...
    """


@pytest.mark.parametrize(
    "symbol", ["f.plain", "f.made", "f.still", "f.kept", "f.Inner", "sub.made", "sub.still", "sub.Inner"]
)
def test_symbols_inside_of_classes(package, symbol):
    callee = package(mod=METHODS)(f"shapes.mod:{symbol}")
    assert [shape(real(f"shapes.mod:{symbol}"))] == [shape(signature) for signature in callee.signatures]


UNKNOWN_SHAPES = {
    "a decorator of its own mind": "def deco(g):\n    def inner(x): ...\n    return inner\n@deco\ndef f(a): ...",
    "a decorator that changes keywords": "import functools\ndef deco(g):\n    @functools.wraps(g)\n    def inner(*args, **kwargs):\n        kwargs.pop('x', None)\n        return g(*args, **kwargs)\n    return inner\n@deco\ndef f(a): ...",
    "a decorator that goes on after errors": "def deco(g):\n    def inner(*args, **kwargs):\n        try:\n            return g(*args, **kwargs)\n        except TypeError:\n            return None\n    return inner\n@deco\ndef f(a): ...",
    "a decorator that calls again without keywords": "def deco(g):\n    def inner(*args, **kwargs):\n        if 'x' in inner.__dict__:\n            return g(*args, **kwargs)\n        return g(*args)\n    return inner\n@deco\ndef f(a): ...",
    "a decorator with two wrappers of a name": "def deco(g):\n    def inner(*args, **kwargs): return g(*args, **kwargs)\n    def inner(*args): return 1\n    return inner\n@deco\ndef f(a): ...",
    "a decorator that wraps its wrapper": "import functools\ndef deco(g):\n    def inner(*args, **kwargs): return g(*args, **kwargs)\n    inner = functools.partial(inner, 1)\n    return inner\n@deco\ndef f(a): ...",
    "a class decorator that sets the constructor": "def deco(cls):\n    cls.__init__ = lambda self, z: None\n    return cls\n@deco\nclass f:\n    def __init__(self, a): ...",
    "a metaclass with a call": "class M(type):\n    def __call__(cls, *a, **k): return super().__call__()\nclass f(metaclass=M):\n    def __init__(self, a): ...",
    "a hook that sets the constructor": "class g:\n    def __init_subclass__(cls):\n        cls.__init__ = lambda self, z: None\nclass f(g):\n    def __init__(self, a): ...",
    "a compiled function": "from math import sqrt as f",
    "a base by code": "def make(): return object\nclass f(make()): ...",
    "an immutable base": "class f(str): ...",
    "an enum": "import enum\nclass f(enum.Enum):\n    A = 1",
    "a result": "def make(): return lambda a: a\nf = make()",
    "a value": "import os\nf = os.sep",
    "a constructor set later": "class f:\n    def __init__(self, a): ...\nf.__init__ = lambda self, b: None",
    "a constructor set by name": "class f:\n    def __init__(self, a): ...\nsetattr(f, '__init__', lambda self, b: None)",
    "a constructor set by a function": "def patch(cls): cls.__init__ = lambda self, b: None\nclass f:\n    def __init__(self, a): ...\npatch(f)",
    "constructors set in a loop": "class g: ...\nclass f:\n    def __init__(self, a): ...\nfor one in (g, f):\n    one.__init__ = lambda self, b: None",
    "a constructor of a base set later": "class g:\n    def __init__(self, a): ...\ng.__init__ = lambda self, b: None\nclass f(g): ...",
    "a signature of its own": "import inspect\nclass f:\n    def __init__(self, a): ...\nf.__signature__ = inspect.Signature()",
    "a name by code": "globals()['f'] = lambda a: a",
    "a global of a function": "f = 3\ndef setup():\n    global f\n    f = lambda a: a\nsetup()",
    "a loop": "for f in (len, print): pass",
    "a property": "class g:\n    @property\n    def p(self): ...\nf = g.p",
    "new and init": "class f:\n    def __new__(cls, a): return object.__new__(cls)\n    def __init__(self, b): ...",
    "fields by code": "from dataclasses import dataclass\n@dataclass\nclass f:\n    if True:\n        a: int = 1",
    "itself": "f = f2 = f",
    "a circle of bases": "class f(g): ...\nclass g(f): ...",
}


@pytest.mark.parametrize("name", UNKNOWN_SHAPES)
def test_what_source_does_not_tell_is_unknown(package, name):
    answer = package(mod=UNKNOWN_SHAPES[name])("shapes.mod:f")
    assert isinstance(answer, Unknown), answer
    assert answer.reason


def test_either_of_two_definitions_will_do(package):
    read = package(mod="import os\nif os.getenv('X'):\n    def f(a): ...\nelse:\n    def f(b): ...\n")
    assert [["a"], ["b"]] == sorted(ways(read("shapes.mod:f")))


def test_a_definition_that_may_be_replaced(package):
    read = package(mod="import os\ndef f(a): ...\nif os.getenv('X'):\n    def f(b): ...\n")
    assert [["a"], ["b"]] == sorted(ways(read("shapes.mod:f")))


def test_all_definitions_of_a_stub(package, tmp_path):
    read = package(mod="from ._compiled import f\n")
    (tmp_path / "shapes" / "_compiled.pyi").write_text(
        "from typing import overload\n@overload\ndef f(a: int) -> int: ...\n@overload\ndef f(a: str, b: int) -> str: ...\n"
    )
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    (tmp_path / "shapes" / f"_compiled{suffix}").write_bytes(b"")
    assert [["a", "kwargs"], ["a", "b", "kwargs"]] == ways(read("shapes.mod:f"))


def test_a_value_that_a_stub_leaves_out_may_be_called(package, tmp_path):
    read = package(mod="from ._compiled import f\n")
    (tmp_path / "shapes" / "_compiled.pyi").write_text("from typing import Final\nf: Final = ...\n")
    (tmp_path / "shapes" / f"_compiled{importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"")
    assert isinstance(read("shapes.mod:f"), Unknown)


EXPORTS = {
    "from": "from .mod import f",
    "renamed": "from .mod import g as f",
    "module": "from . import mod\nf = mod.f",
    "dotted": "import shapes.mod as m\nf = m.f",
    "plain dotted": "import shapes.mod\nf = shapes.mod.f",
    "star": "from .mod import *",
    "star twice": "from .other import *\nfrom .mod import *",
    "star of a list": "from .listed import *",
    "lazy table": "_LAZY = {'f': '.mod'}\ndef __getattr__(name):\n    if name not in _LAZY:\n        raise AttributeError(name)\n    import importlib\n    return getattr(importlib.import_module(_LAZY[name], __name__), name)",
    "lazy table of bare names": "_LAZY = {'f': 'mod'}\ndef __getattr__(name):\n    from importlib import import_module\n    return getattr(import_module(f'{__name__}.{_LAZY[name]}'), name)",
    "lazy pairs": "_LAZY = {'f': ('shapes.mod', 'g')}\ndef __getattr__(name):\n    from importlib import import_module\n    return getattr(import_module(_LAZY[name][0]), _LAZY[name][1])",
    "lazy lists": "_LAZY = {'mod': ['f']}\ndef __getattr__(name):\n    from importlib import import_module\n    for place, names in _LAZY.items():\n        if name in names:\n            return getattr(import_module('.' + place, __name__), name)\n    raise AttributeError(name)",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .mod import f\ndef __getattr__(name):\n    import importlib\n    return getattr(importlib.import_module('shapes.mod'), name)",
}


@pytest.mark.parametrize("name", EXPORTS)
def test_names_are_followed_to_where_they_are_defined(package, name):
    source = "def f(a, b=1): ...\ng = f\n"
    read = package(
        __init__=EXPORTS[name],
        mod=source,
        other="def f(wrong): ...\n",
        listed="from .mod import f, g\n__all__ = ['f']\n",
    )
    callee = read("shapes:f")
    assert [["a", "b"]] == ways(callee)
    assert callee.span.file.endswith("mod.py")
    assert shape(real("shapes:f")) == shape(callee.signatures[0])


ABSENT = {
    "plain": "def f(a): ...",
    "star of a list": "from .listed import *",
    "private by a star": "from .hidden import *",
    "lazy table": "_LAZY = {'f': '.mod'}\ndef __getattr__(name):\n    if name not in _LAZY:\n        raise AttributeError(name)\n",
    "lazy table and a list of names": "_LAZY = {'f': '.mod'}\ndef __getattr__(name):\n    if name not in _LAZY:\n        raise AttributeError(name)\ndef __dir__():\n    return sorted({*globals(), *_LAZY})\n",
    "for types alone": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .listed import _g",
    "deleted": "_g = 1\ndel _g",
}


@pytest.mark.parametrize("name", ABSENT)
def test_a_name_that_surely_does_not_exist_is_refused(package, name):
    read = package(
        __init__=ABSENT[name], listed="def f(a): ...\ndef _g(b): ...\n__all__ = ['f']", hidden="def _g(b): ..."
    )
    with pytest.raises(ResolveError, match="'shapes' has no symbol '_g'") as caught:
        read("shapes:_g")
    assert "FG321" == caught.value.code
    with pytest.raises((AttributeError, ImportError)):
        real("shapes:_g")


@pytest.mark.parametrize(
    ("text", "shown"),
    [("f = 3", "int '3'"), ("f = 'eval_loss'", "str 'eval_loss'"), ("f = [1, 2]", "list '[1, 2]'")],
)
def test_a_literal_cannot_be_called(package, text, shown):
    with pytest.raises(ResolveError, match="'shapes.mod:f' is .* which cannot be called") as caught:
        package(mod=text)("shapes.mod:f")
    assert ("FG323", True) == (caught.value.code, shown in caught.value.message)


def test_a_submodule_is_a_symbol_too(package):
    read = package(mod="def f(a): ...")
    assert [["a"]] == ways(read("shapes:mod.f"))


def test_an_attribute_that_no_base_has_is_refused(package):
    read = package(mod="class g:\n    def there(self): ...\nclass f(g): ...")
    with pytest.raises(ResolveError, match="'shapes.mod:f' has no symbol 'thre'.*did you mean 'there'"):
        read("shapes.mod:f.thre")


def test_an_attribute_that_code_may_set_is_unknown(package):
    read = package(mod="class f: ...\nf.made = classmethod(lambda cls, a: a)")
    assert isinstance(read("shapes.mod:f.made"), Unknown)


def test_defaults_and_annotations(package):
    text = "import os\ndef f(a: int = 3, b: 'str | None' = None, c=os.sep, d: float = -1.5, e=(1, [2])): ..."
    (signature,) = package(mod=text)("shapes.mod:f").signatures
    defaults = {name: (p.default.text, p.default.value) for name, p in signature.parameters.items()}
    assert {
        "a": ("3", 3),
        "b": ("None", None),
        "c": ("os.sep", UNKNOWN),
        "d": ("-1.5", -1.5),
        "e": ("(1, [2])", (1, [2])),
    } == defaults


ANNOTATIONS = {
    "int": {"int", "bool"},
    "float": {"float", "int", "bool"},
    "str": {"str"},
    "'bool'": {"bool"},
    "None": {"none"},
    "list[int]": {"list"},
    "List[int]": {"list"},
    "Sequence[int]": {"list", "tuple", "str", "bytes", "iterable"},
    "Optional[int]": {"int", "bool", "none"},
    "Union[str, int]": {"str", "int", "bool"},
    "int | str | None": {"int", "bool", "str", "none"},
    "Literal['a', 3]": {"str", "int"},
    "Callable[[int], str]": {"callable", "type"},
    "type[C]": {"type"},
    "dict[str, Any]": {"dict"},
    "Annotated[int, 'unit']": {"int", "bool"},
    "C": {"instance:shapes.mod:C"},
    "'C'": {"instance:shapes.mod:C"},
    "other.D": {"instance:shapes.other:D"},
    "Imported": {"instance:shapes.other:D"},
    "Alias": {"int", "bool", "none"},
    "S": {"instance:shapes.mod:S", "str"},
    "Any": None,
    "object": None,
    "T": None,
    "P": None,
    "E": None,
    "int | Any": None,
    "Missing": None,
    "make()": None,
    "Path": None,
}
ANNOTATED = """
    from __future__ import annotations
    import enum
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TYPE_CHECKING, Annotated, Any, List, Literal, Optional, Protocol, TypeVar, Union
    from . import other
    if TYPE_CHECKING:
        from .other import D as Imported
    T = TypeVar("T")
    Alias = Optional[int]
    class C: ...
    class S(str): ...
    class P(Protocol): ...
    class E(enum.Enum):
        A = 1
    """


@pytest.mark.parametrize("text", ANNOTATIONS)
def test_what_an_annotation_accepts(package, text):
    read = package(mod=f"{textwrap.dedent(ANNOTATED)}def f(a: {text}): ...\n", other="class D: ...\n")
    annotation = read("shapes.mod:f").signatures[0].parameters["a"].annotation
    assert text.strip("'") == annotation.text
    assert ANNOTATIONS[text] == annotation.accepts


def test_an_annotation_that_denies_its_default_is_not_believed(package):
    (signature,) = package(mod="def f(a: int = 'auto', b: int = None): ...")("shapes.mod:f").signatures
    assert [None, {"int", "bool", "none"}] == [p.annotation.accepts for p in signature.parameters.values()]


def test_what_a_call_gives(package):
    read = package(mod="class C:\n    def __call__(self): ...\nclass D(C): ...\nclass E: ...\ndef f() -> D: ...\n")
    c, d, e, f = (read(f"shapes.mod:{name}") for name in "CDEf")
    assert ({"instance:shapes.mod:D"}, {"instance:shapes.mod:D"}) == (d.gives.accepts, f.gives.accepts)
    data = package(data="from dataclasses import dataclass\n@dataclass\nclass F:\n    a: int\n")
    assert data("shapes.data:F").callable_instance is False
    assert [True, True, False, None] == [one.callable_instance for one in (c, d, e, f)]
    assert ["class", "class", "class", "function"] == [one.kind for one in (c, d, e, f)]
