"""Keywords that a function hands on: what is refused really raises, what is taken by a closed signature does not."""

import importlib
import inspect
import itertools
import sys
import textwrap

import pytest

from forgather.signatures import Callee, Reader

NAMES = ("a", "b", "c", "d", "zz")

# Name -> source, and whether every keyword is known afterwards.
CLOSED = {
    "super": "class g:\n    def __init__(self, a, b=1): ...\nclass f(g):\n    def __init__(self, c, **kw):\n        super().__init__(**kw)",
    "super twice": "class h:\n    def __init__(self, a): ...\nclass g(h):\n    def __init__(self, b=1, **kw): super().__init__(**kw)\nclass f(g):\n    def __init__(self, c=1, **kw): super().__init__(**kw)",
    "super of old": "class g:\n    def __init__(self, a): ...\nclass f(g):\n    def __init__(self, c=1, **kw): super(f, self).__init__(**kw)",
    "base by name": "class g:\n    def __init__(self, a): ...\nclass f(g):\n    def __init__(self, **kw): g.__init__(self, **kw)",
    "super of the object": "class f:\n    def __init__(self, a, **kw):\n        super().__init__(**kw)",
    "diamond": "class o:\n    def __init__(self, a=1): ...\nclass l(o):\n    def __init__(self, b=1, **kw): super().__init__(**kw)\nclass r(o):\n    def __init__(self, c=1, **kw): super().__init__(**kw)\nclass f(l, r): ...",
    "function": "def g(a, b=1): ...\ndef f(c=1, **kw):\n    return g(**kw)",
    "given by the function": "def g(a, b): ...\ndef f(**kw):\n    return g(b=1, **kw)",
    "given by position": "def g(a, b, c=1): ...\ndef f(**kw):\n    return g(1, **kw)",
    "taken out": "def g(a): ...\ndef f(**kw):\n    b = kw.pop('b', None)\n    return g(**kw)",
    "taken out and no more": "def f(a=1, **kw):\n    b = kw.pop('b', None)\n    if kw:\n        raise TypeError(kw)",
    "counted": "def f(a=1, **kw):\n    b = kw.pop('b', None)\n    if len(kw):\n        raise TypeError(kw)",
    "looked at": "def g(a=1, b=2): ...\ndef f(**kw):\n    if 'b' in kw and kw['b'] is None: print\n    kw.get('a')\n    return g(**kw)",
    "filled": "def g(a, b=2): ...\ndef f(**kw):\n    kw.setdefault('a', 1)\n    kw['b'] = 3\n    return g(**kw)",
    "a class": "class g:\n    def __init__(self, a, b=1): ...\ndef f(**kw):\n    return g(**kw)",
    "an imported function": "from .other import made\ndef f(c=1, **kw):\n    return made(**kw)",
    "a function imported inside": "def f(c=1, **kw):\n    from .other import made\n    return made(**kw)",
    "a method": "class f:\n    def __init__(self, **kw):\n        self.setup(**kw)\n    def setup(self, a, b=1): ...",
    "its own class": "class g:\n    def __init__(self, a, b=1): ...\n    @classmethod\n    def made(cls, c=1, **kw):\n        return cls(**kw)\nf = g.made",
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass g:\n    a: int\n    b: int = 1\nclass f(g):\n    def __init__(self, c=1, **kw): super().__init__(**kw)",
    "with": "import contextlib\ndef g(a): ...\ndef f(**kw):\n    with contextlib.nullcontext():\n        return g(**kw)",
    "all of it": "def g(a, b=1): ...\ndef f(*args, **kw):\n    return g(*args, **kw)",
    "all of it behind": "class g:\n    def __init__(self, a, b, c=1): ...\nclass f(g):\n    def __init__(self, *args, d=1, **kw):\n        super().__init__(0, *args, **kw)",
    "stars named as parameters": "def g(a, b=1): ...\ndef f(*a, **b):\n    return g(*a, **b)",
    "a base by name with stars named as parameters": "class m: ...\nclass g:\n    def __init__(self, a, b=1): ...\nclass f(m, g):\n    def __init__(self, *a, **k): g.__init__(self, *a, **k)",
    "in an assignment": "def g(a): ...\ndef f(**kw):\n    x = [g(**kw)]\n    return x",
    "new": "class f:\n    def __new__(cls, *args, **kw):\n        return object.__new__(cls)\n    def __init__(self, a): ...",
}
OPEN = {
    "kept": "def f(a=1, **kw):\n    return kw",
    "never looked at": "def f(a=1, **kw): ...",
    "in a branch": "def g(a): ...\ndef f(**kw):\n    if not kw.get('zz'):\n        return g(**kw)",
    "after a return": "def g(a): ...\ndef f(**kw):\n    if 'zz' in kw:\n        return 1\n    return g(**kw)",
    "walked": "class f:\n    def __init__(self, **kw):\n        for k, v in kw.items(): setattr(self, k, v)",
    "copied": "def g(**kw): ...\ndef f(**kw):\n    return g(**dict(kw))",
    "rebound": "def g(a): ...\ndef f(**kw):\n    kw = {'a': 1}\n    return g(**kw)",
    "caught": "def g(a): ...\ndef f(**kw):\n    try:\n        return g(**kw)\n    except TypeError:\n        return None",
    "suppressed": "import contextlib\ndef g(a): ...\ndef f(**kw):\n    with contextlib.suppress(TypeError):\n        return g(**kw)",
    "beside a position of its name": "def g(b=1, a=2): ...\ndef f(a, /, **kw):\n    return g(**kw)",
    "deferred": "def g(a): ...\ndef f(**kw):\n    return lambda: g(**kw)",
    "to what is given": "def f(function=dict, **kw):\n    return function(**kw)",
    "one of two": "import os\ndef g(a): ...\ndef h(b): ...\ndef f(**kw):\n    one = h if os.getenv('X') else dict\n    return one(**kw)",
    "or": "def g(a): ...\ndef f(**kw):\n    return kw.get('zz') or g(**kw)",
    "a loop": "def g(a): ...\ndef f(**kw):\n    for _ in ():\n        g(**kw)",
    "open below": "def g(a=1, **rest): return rest\ndef f(**kw):\n    return g(**kw)",
    "filtered": "def g(a=1): ...\ndef f(**kw):\n    kw = {k: v for k, v in kw.items() if k == 'a'}\n    return g(**kw)",
    "a base of a dict": "class f(dict):\n    def __init__(self, **kw): super().__init__(**kw)",
    "deleted": "def g(a=1): ...\ndef f(**kw):\n    del kw['zz']\n    return g(a=1)",
    "updated": "def g(a=1): ...\ndef f(**kw):\n    kw.clear()\n    return g(**kw)",
}

# Every keyword is known, but not how many positions there are.
LOOSE = {
    "positions rebound": "def g(a, b=1): ...\ndef f(*args, **kw):\n    args = (1, *args)\n    return g(*args, **kw)",
    "positions where there are none": "def g(a, b=1): ...\ndef f(*args, **kw):\n    if not args: args = (1,)\n    return g(*args, **kw)",
    "positions behind the first": "def g(a, b=1): ...\ndef f(*args, **kw):\n    return g(*args[1:], **kw)",
    "a position of the same name": "def g(a, b): ...\ndef f(a, *args, **kw):\n    return g(*args, **kw)",
    "a keyword of the same name": "def g(a, b): ...\ndef f(*args, a=1, **kw):\n    return g(*args, **kw)",
}


@pytest.fixture
def both(tmp_path, monkeypatch):
    """Writes a module; gives its `f` as it is read and as it is."""

    def write(source):
        folder = tmp_path / "handing"
        folder.mkdir()
        (folder / "__init__.py").write_text("")
        (folder / "other.py").write_text("def made(a, b=1): ...\n")
        (folder / "mod.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        return Reader(str(tmp_path / "elsewhere")).read("handing.mod:f"), importlib.import_module("handing.mod").f

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "handing"]:
        del sys.modules[name]


def binds(callee, args, kwargs):
    assert isinstance(callee, Callee), callee
    for signature in callee.signatures:
        try:
            signature.bind(*args, **kwargs)
        except TypeError:
            continue
        return True
    return False


def runs(function, args, kwargs):
    try:
        function(*args, **kwargs)
    except TypeError:
        return False
    return True


def calls():
    for count in range(4):
        for size in range(len(NAMES) + 1):
            for names in itertools.combinations(NAMES, size):
                yield (1,) * count, dict.fromkeys(names, 1)


@pytest.mark.parametrize("name", CLOSED)
def test_the_call_that_gets_the_keywords_decides(both, name):
    callee, function = both(CLOSED[name])
    kinds = [p.kind for p in callee.signatures[0].parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    differ = [(args, kwargs) for args, kwargs in calls() if binds(callee, args, kwargs) != runs(function, args, kwargs)]
    # What is taken out by name is optional for us, though the code may need it.
    assert [] == [call for call in differ if not binds(callee, *call)]
    assert [] == differ


@pytest.mark.parametrize("name", OPEN)
def test_where_it_is_not_sure_any_keyword_will_do(both, name):
    callee, function = both(OPEN[name])
    if isinstance(callee, Callee):
        assert inspect.Parameter.VAR_KEYWORD in [p.kind for p in callee.signatures[0].parameters.values()]
        assert [] == [call for call in calls() if not binds(callee, *call) and runs(function, *call)]


@pytest.mark.parametrize("name", LOOSE)
def test_positions_that_are_not_known_give_what_seems_missing(both, name):
    callee, function = both(LOOSE[name])
    assert [] == [call for call in calls() if not binds(callee, *call) and runs(function, *call)]
    assert not binds(callee, (), {"a": 1, "zz": 1})
