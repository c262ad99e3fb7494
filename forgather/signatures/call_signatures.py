"""The parameters of classes, functions and partials in source code.

The input is a class, function or partial; the output is one list of parameters for each way to call it, or a `Doubt`
with the reason why they are unknown. Every call that the real object accepts matches the result: if `**kwargs` are
passed to other functions, the parameters of those functions are included.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import replace

from forgather.signatures import symbols
from forgather.signatures.annotations import describe
from forgather.signatures.binding import bound_values
from forgather.signatures.classes import effects_on, field_parameters, is_true, own_fields, tuple_params
from forgather.signatures.decorators import keeps_signature
from forgather.signatures.name_resolution import Names, Scope
from forgather.signatures.parameters import (
    EITHER,
    KEYWORD,
    OPTIONAL,
    STAR,
    STARS,
    KeywordForwarding,
    Param,
    accepting_anything,
    all_optional,
    default_of,
    is_local,
    keyword_forwarding,
    merged,
    parameters_of,
    remaining_after,
    without_first,
)
from forgather.signatures.results import Annotation
from forgather.signatures.symbols import Class, Doubt, Function, Partial, Ref, Thing, Tuples, Value, dotted_name

Ways = list[list[Param]] | Doubt
_CYCLE = Doubt("its arguments refer back to itself")
_PLAIN_NEW = [Param("args", STAR), Param("kwargs", STARS)]


class CallSignatures:
    """Finds the parameters of callable objects in source code.

    Args:
        names: the resolver of names in source code.
    """

    def __init__(self, names: Names) -> None:
        self.names = names

    def ways(self, thing: Thing) -> Ways:
        """Returns one list of parameters for each way to call an object; a `Doubt` if the parameters are unknown."""
        if isinstance(thing, Class):
            return self.constructor(thing)
        if isinstance(thing, Function):
            return self.function(thing, thing.owner)
        if isinstance(thing, Partial):
            return self._partial(thing)
        if isinstance(thing, Tuples):
            first = len(thing.fields) - thing.defaults
            return [[Param(n, EITHER, OPTIONAL if i >= first else None) for i, n in enumerate(thing.fields)]]
        if isinstance(thing, Value) and isinstance(thing.node, ast.Lambda):
            return [parameters_of(thing.node.args, lambda expression: None)]
        if isinstance(thing, Doubt):
            return thing
        return Doubt("it is neither a class nor a function in source")

    def _partial(self, partial: Partial) -> Ways:
        ways = self.ways(partial.inner)
        if isinstance(ways, Doubt):
            return ways
        found = []
        for params in ways:
            rest = without_first(params, partial.args)
            if rest is None:
                return Doubt("a partial with more arguments than its function takes")
            # As in `inspect.signature` of a partial: from the first parameter that is given by keyword on, all become
            # keyword-only, and the given ones get a default.
            given = [i for i, p in enumerate(rest) if p.name in partial.keywords and p.is_named]
            for index, param in enumerate(rest):
                if given and index >= given[0] and param.kind is EITHER:
                    rest[index] = replace(param, kind=KEYWORD)
                if index in given:
                    rest[index] = replace(rest[index], default=param.default or OPTIONAL)
            if given:
                rest = [p for p in rest if p.kind is not STAR]
            found.append(sorted(rest, key=lambda p: p.kind))
        return found

    def function(self, function: Function, owner: Class | None, *, bound: bool = False) -> Ways:
        """Returns the parameters of a function, one list for each overload; a `Doubt` if they are unknown.

        Args:
            function: the function or method.
            owner: the class on which the method is called; None if the function is not a method.
            bound: whether the call is bound to an instance, so that its first argument (`self`) is not a parameter.
        """
        key = (function.node, owner and owner.node, bound)
        return self.names.world.memoized(key, lambda: self._overloads(function, owner, bound), _CYCLE)

    def _overloads(self, function: Function, owner: Class | None, bound: bool) -> Ways:
        """Returns the parameters of all overloads of a function in a stub; elsewhere it has one definition."""
        if not function.module.is_stub:
            return self._function(function, owner, bound)
        block = function.home.body if function.home else function.module.block
        found: list[list[Param]] = []
        for statement in block.binding(function.node.name):
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                ways = self._function(replace(function, node=statement), owner, bound)
                if isinstance(ways, Doubt):
                    return ways
                found += ways
        if "_C" in function.module.name.split("."):
            return Doubt("it is not written in Python")
        # Stubs of compiled code omit keywords that the code accepts and ignores.
        return [
            params if params[-1:] and params[-1].kind is STARS else [*params, Param("kwargs", STARS)]
            for params in found
        ]

    def _function(self, function: Function, owner: Class | None, bound: bool) -> Ways:
        node = function.node
        scope = Scope(self.names, function.module, function.module.is_stub)
        self.names.world.record_use(function.module)
        params = parameters_of(node.args, lambda expression: describe(self.names, expression, scope))
        role = self.role(function)
        if isinstance(role, Doubt):
            return role
        if role == "class" or (bound and role == "plain"):
            rest = without_first(params)
            if rest is None:
                return Doubt("a method without a first parameter")
            params = rest
        stars = node.args.kwarg
        if stars is not None and not function.module.is_stub:
            params = self._with_forwarded(function, owner, params, stars.arg)
        return [params]

    def role(self, function: Function) -> str | Doubt:
        """Returns how a method gets its first argument, "plain", "static" or "class"; a `Doubt` if this is unknown."""
        node = function.node
        # Python makes these methods static, or class methods, without a decorator.
        role = "static" if function.home and node.name == "__new__" else "plain"
        if function.home and node.name in ("__init_subclass__", "__class_getitem__"):
            role = "class"
        scope = Scope(self.names, function.module, function.module.is_stub, function.home)
        for decorator in reversed(node.decorator_list):
            called = isinstance(decorator, ast.Call)
            things = self.names.evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator, scope)
            only = things[0] if len(things) == 1 else Doubt("decorators that are not known")
            dotted = dotted_name(only)
            if dotted == "builtins.staticmethod":
                role = "static"
            elif dotted == "builtins.classmethod":
                role = "class"
            elif dotted in symbols.SAME or dotted.endswith("typing.overload"):
                continue
            elif not isinstance(only, Function) or not keeps_signature(only, called):
                return Doubt(f"it is decorated by {ast.unparse(decorator)[:60]}")
        return role

    def _with_forwarded(self, function: Function, owner: Class | None, params: list[Param], stars: str) -> list[Param]:
        """Returns the parameters of a function, in which the keywords that `**kwargs` accepts take its place."""
        node = function.node
        forwarding = keyword_forwarding(node, stars)
        taken = [
            Param(name, KEYWORD, OPTIONAL if default is None else default_of(default))
            for name, default in forwarding.names.items()
        ]
        targets = []
        for call in forwarding.calls:
            ways = self._forwarding_target(call.func, function, owner) if forwarding.closed else []
            if isinstance(ways, Doubt) or len(ways) != 1:
                return merged(params, taken, star=None, stars=True)
            targets.append(ways[0])
        if not forwarding.closed:
            return merged(params, taken, star=None, stars=True)
        star = self._forwarded_positional(function, forwarding, targets)
        if star is not None and not {p.name for p in star}.isdisjoint(p.name for p in params if p.is_named):
            # Two parameters would have the same name, and one of them can only be given by position.
            star = None
        names, opens = list(taken), False
        for call, target in zip(forwarding.calls, targets, strict=True):
            rest = remaining_after(call, target)
            opens |= any(p.kind is STARS for p in rest)
            by_position = any(isinstance(argument, ast.Starred) for argument in call.args)
            names += rest if forwarding.sure and not forwarding.filled and not by_position else all_optional(rest)
        return merged(params, names, star=star, stars=opens)

    def _forwarded_positional(
        self, function: Function, forwarding: KeywordForwarding, targets: Sequence[list[Param]]
    ) -> list[Param] | None:
        """Returns the parameters that `*args` can fill, if its only use is in the only forwarding call; else None."""
        node = function.node
        if node.args.vararg is None or len(targets) != 1:
            return None
        name = node.args.vararg.arg
        uses = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == name]
        call = forwarding.calls[0]
        last = call.args[-1] if call.args else None
        if len(uses) != 1 or not isinstance(last, ast.Starred) or last.value is not uses[0]:
            return None
        rest = [p for p in remaining_after(call, targets[0]) if p.is_positional or p.kind is STAR]
        return rest if forwarding.sure and not forwarding.filled else all_optional(rest)

    def _forwarding_target(self, callee: ast.expr, function: Function, owner: Class | None) -> Ways:
        """Returns the parameters of a callee to which a function passes its keywords."""
        node = function.node
        first = node.args.args[0].arg if node.args.args and function.home else None
        if isinstance(callee, ast.Attribute):
            value = callee.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super":
                return self._super(function, owner or function.home, callee.attr)
            if isinstance(value, ast.Name) and value.id == first:
                return self._method(owner or function.home, callee.attr)
        # `cls(**kwargs)` in a class method.
        if isinstance(callee, ast.Name) and callee.id == first and owner is not None:
            return self.constructor(owner) if self.role(function) == "class" else Doubt("a call of its instance")
        root = callee
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name):
            return Doubt("the result of a call")
        scope = Scope(self.names, function.module)
        if is_local(node, root.id):
            things, sure = bound_values(node.body, root.id, scope)
            if not sure or callee is not root or not all(isinstance(t, Class | Function) for t in things):
                return Doubt(f"{root.id!r} is computed in code")
        else:
            things = self.names.evaluate(callee, scope)
        return self.ways(things[0]) if len(things) == 1 else Doubt("one of several callables")

    def _method(self, owner: Class | None, name: str) -> Ways:
        things = self.names.class_attribute(owner, name) if owner else []
        only = things[0] if len(things) == 1 else None
        if not isinstance(only, Function):
            return Doubt(f"{name!r} is computed in code")
        return self.function(only, owner, bound=True)

    def _super(self, function: Function, owner: Class | None, name: str) -> Ways:
        line = self.names.mro(owner) if owner else []
        places = [
            i for i, c in enumerate(line) if isinstance(c, Class) and function.home and c.node is function.home.node
        ]
        if not places or owner is None:
            return Doubt("a base that is not known")
        if name == "__init__":
            return self._init(owner, line[places[0] + 1 :])
        for base in line[places[0] + 1 :]:
            if not isinstance(base, Class):
                if isinstance(base, Ref) and base.dotted in symbols.EMPTY_BASES:
                    continue
                return Doubt("a base that is not known")
            things = self.names.own(base, name)
            if things:
                only = things[0] if len(things) == 1 else None
                if isinstance(only, Function):
                    return self.function(only, owner, bound=True)
                return Doubt(f"{name!r} is computed in code")
        return Doubt(f"no base has {name!r}")

    def _init(self, owner: Class, line: Sequence[Class | Ref | Doubt]) -> Ways:
        """Returns the parameters of the first `__init__` in a method resolution order; none if no class defines one."""
        for base in line:
            if isinstance(base, Doubt):
                return base
            if isinstance(base, Ref):
                if base.dotted in symbols.EMPTY_BASES:
                    continue
                return Doubt(f"{base.dotted} is not written in Python")
            found = self._own_constructor(owner, base, "__init__")
            if found is not None:
                return found
        return [[]]

    def _own_constructor(self, owner: Class, cls: Class, method: str) -> Ways | None:
        """Returns the parameters of `__init__` or `__new__` if `cls` itself defines or generates it, else None."""
        effects = effects_on(self.names, cls)
        things = self.names.own(cls, method)
        if things:
            only = things[0] if len(things) == 1 else Doubt("several definitions")
            if not isinstance(only, Function):
                return only if isinstance(only, Doubt) else Doubt(f"{method} is computed in code")
            ways = self.function(replace(only, owner=owner), owner, bound=method == "__init__")
        elif method == "__init__" and effects.options is not None:
            makes = is_true(effects.options, "init", True)
            if makes is None:
                return Doubt("whether it has a constructor depends on code")
            if not makes:
                return None
            ways = self._fields(cls)
        elif effects.doubt is not None and not _only_metaclass(effects.doubt):
            return effects.doubt
        else:
            return [_PLAIN_NEW] if effects.opens and method == "__init__" else None
        if effects.doubt is not None:
            return effects.doubt
        if effects.opens and method == "__init__" and not isinstance(ways, Doubt):
            return [accepting_anything(params) for params in ways]
        return ways

    def _fields(self, cls: Class) -> Ways:
        fields = []
        for base in reversed(self.names.mro(cls)):
            if isinstance(base, Doubt):
                return base
            if isinstance(base, Class):
                effects = effects_on(self.names, base)
                if effects.options is not None:
                    own = own_fields(self.names, base, effects.options)
                    if isinstance(own, Doubt):
                        return own
                    fields += own
        return [field_parameters(fields)]

    def constructor(self, cls: Class) -> Ways:
        """Returns one list of parameters for each way to construct a class; a `Doubt` if the parameters are unknown."""
        return self.names.world.memoized((cls.node, "new"), lambda: self._constructor(cls), _CYCLE)

    def _constructor(self, cls: Class) -> Ways:
        line = self.names.mro(cls)
        init: Ways | None = None
        new: Ways | None = None
        last = cls
        for base in line:
            if isinstance(base, Class):
                last = base
                effects = effects_on(self.names, base)
                if effects.doubt is not None and (init is None or _only_metaclass(effects.doubt)):
                    return effects.doubt
                init = self._own_constructor(cls, base, "__init__") if init is None else init
                new = self._own_constructor(cls, base, "__new__") if new is None else new
                continue
            if base == Ref("typing.NamedTuple"):
                made = [[Param("cls", EITHER), *tuple_params(self.names, last)]]
                return _new_and_init(init, made if new is None else new)
            ending = _foreign_base(base, init is not None, bool(self.names.own(cls, "__init__")))
            if ending is not None:
                return ending
        return _new_and_init(init, new)


def _foreign_base(base: Ref | Doubt, has_init: bool, own_init: bool) -> Doubt | None:
    """Returns why a base class makes the constructor unknown; None if the constructor is known nevertheless.

    A base such as `dict` accepts any arguments in `__new__`, so the `__init__` of the class determines the parameters.
    """
    if isinstance(base, Ref):
        if base.dotted in symbols.EMPTY_BASES or (has_init and _takes_anything(base.dotted)):
            return None
        return Doubt(f"its base {base.dotted} decides how it is constructed")
    return None if own_init and "not written in Python" not in base.reason else base


def _takes_anything(dotted: str) -> bool:
    if dotted in symbols.OPEN_NEW:
        return True
    return dotted.startswith("builtins.") and dotted.endswith(("Error", "Exception", "Warning"))


def _new_and_init(init: Ways | None, new: Ways | None) -> Ways:
    """Returns the parameters of a class from those of `__init__` and `__new__`, which get the same arguments."""
    if isinstance(init, Doubt) or isinstance(new, Doubt):
        return init if isinstance(init, Doubt) else new  # type: ignore[return-value]
    if new is None:
        return init if init is not None else [[]]
    made = []
    for params in new:
        rest = without_first(params)
        if rest is None:
            return Doubt("a __new__ without a first parameter")
        made.append(rest)
    if init is None or [[p.name for p in way] for way in init] == [[p.name for p in way] for way in made]:
        return made if init is None else init
    # A `__new__(cls, *args, **kwargs)` accepts everything, so `__init__` alone decides.
    if all({p.kind for p in way} == {STAR, STARS} for way in made):
        return init
    return Doubt("it has both __new__ and __init__")


def _only_metaclass(doubt: Doubt) -> bool:
    return " has a metaclass " in doubt.reason


def return_annotation(names: Names, function: Function) -> Annotation:
    """Returns the annotation of a function's result; an empty annotation if a decorator may change the result.

    Args:
        names: the resolver of the names in the annotation.
        function: the function whose result is annotated.
    """
    node = function.node
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        return describe(names, node.returns, Scope(names, function.module)) or Annotation("")
    return Annotation("")
