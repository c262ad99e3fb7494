"""Resolves names, attributes and expressions in source code to symbols.

The input is modules, classes and expressions; the output is all symbols that a name, an attribute or an expression can
stand for. An empty list means that the name certainly does not exist; a `Doubt` means that its value is unknown, and
gives the reason.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from dataclasses import replace

from forgather.signatures import symbols
from forgather.signatures.binding import bound_values, static_condition
from forgather.signatures.decorators import attributes_set, returns_its_argument
from forgather.signatures.modules import (
    ModuleTable,
    has_stars,
    lazy_target,
    may_be_in_all,
    may_create_names,
    read_all_list,
    set_by_functions,
    stars_last,
)
from forgather.signatures.symbols import (
    Class,
    Doubt,
    Function,
    Module,
    Partial,
    Ref,
    Thing,
    Value,
    dotted_name,
    foreign,
    is_generic,
    merge,
    named_tuple,
)

_MADE = Doubt("its module creates names when it is imported")
_LAZY_MARKS = ("\ndef __getattr__", "\n    def __getattr__(name", "\n__getattr__", "_LazyModule(", "lazy_loader")
_RECURSION = Doubt("its definition refers back to itself")


class Names:
    """Resolves names within one table of modules.

    Args:
        world: the table of modules.
    """

    def __init__(self, world: ModuleTable) -> None:
        self.world = world
        self.spelled: dict[tuple[int, ...], tuple[Sequence[Thing], list[str], list[str]]] = {}

    def member(self, module: Module, name: str, *, typing: bool = False) -> list[Thing]:
        """Returns the symbols that an attribute of a module can stand for.

        Args:
            module: the module.
            name: the name of the attribute.
            typing: whether names that are defined only under `TYPE_CHECKING` are included.
        """
        self.world.record_use(module)
        if module.is_broken:
            return [Doubt(f"{module.name!r} has a syntax error")]
        key = (module, name, typing)
        return self.world.memoized(key, lambda: self._member(module, name, typing), [_RECURSION])

    def _member(self, module: Module, name: str, typing: bool) -> list[Thing]:
        if module.text is None:
            return self._submodule(module, name) or (
                [] if module.found.folders and module.found.closed else [foreign(module)]
            )
        is_lazy = any(module.has(mark) for mark in _LAZY_MARKS)
        scope = Scope(self, module, typing or module.is_stub)
        for_types = Scope(self, module, True) if is_lazy and module.has("TYPE_CHECKING") else None
        # A `_LazyModule` replaces the module in `sys.modules`, so the names that its statements bind do not exist.
        if for_types and module.has("_LazyModule(") and (found := self._flow(for_types, name)):
            return found
        found, sure = bound_values(module.block.binding(name), name, scope)
        if not found and not sure and for_types and (found := self._flow(for_types, name)):
            return found
        if not found or not sure:
            found = found + self._unbound_member(module, name, is_lazy, bool(found))
        if set_by_functions(module, name):
            return [Doubt(f"{name!r} is set by functions of its module")]
        if any(isinstance(thing, Doubt) for thing in found):
            stub = self.world.stub_of(module)
            described = self.member(stub, name, typing=True) if stub else []
            if described and not any(isinstance(thing, Doubt) for thing in described):
                return described
        return found

    def _flow(self, scope: Scope, name: str) -> list[Thing]:
        return bound_values(scope.module.block.binding(name), name, scope)[0]

    def _unbound_member(self, module: Module, name: str, is_lazy: bool, is_bound: bool) -> list[Thing]:
        """Returns the symbols of a name that perhaps no statement binds: a lazy import or a submodule of the module."""
        if is_lazy:
            target = lazy_target(module, name)
            if isinstance(target, Doubt):
                part = self._submodule(module, name) if module.has("_LazyModule(") else []
                return part if part and isinstance(part[0], Module) else [target]
            if target is not None:
                return self._lazy_member(module, target, name)
        found = self._submodule(module, name)
        if found or is_bound:
            return found
        if name in ("__name__", "__doc__", "__file__", "__path__", "__spec__", "__all__"):
            return [Doubt("it is neither a class nor a function")]
        return [_MADE] if may_create_names(module, is_lazy) else []

    def _lazy_member(self, module: Module, target: tuple[str, str], name: str) -> list[Thing]:
        place, attribute = target
        relative = f"{module.name}.{place.lstrip('.')}"
        for full in (relative, place):
            source = None if full.startswith(".") else self.world.module(full)
            if isinstance(source, Module):
                if not attribute:
                    return [source]
                return self.member(source, attribute) or [Doubt(f"{name!r} is created at import")]
        return [Doubt(f"the lazy name {name!r} refers to no module")]

    def _submodule(self, module: Module, name: str) -> list[Thing]:
        if module.found.folders is None or not name.isidentifier():
            return []
        found = self.world.module(f"{module.name}.{name}")
        return [] if found is None else [found]

    def exports(self, module: Module, name: str) -> list[Thing] | None:
        """Returns the symbols that `from module import *` binds to a name; None if it does not bind the name."""
        if module.text is None:
            return [foreign(module)]
        listed = self.listed(module)
        if name.startswith("_") if listed is None else name not in listed:
            return None
        part = self._submodule(module, name)
        if part and isinstance(part[0], Module) and listed is None:
            return [Doubt(f"{name!r} may be a part of {module.name!r}")]
        if not module.has(name) and not has_stars(module):
            if may_create_names(module):
                return [_MADE]
            self.world.record_use(module)
            return None
        return self.member(module, name) or None

    def listed(self, module: Module) -> frozenset[str] | None:
        """Returns the names in the `__all__` of a module; None if there is no `__all__`, or it is not a literal."""
        return self.world.memoized((module, "__all__"), lambda: read_all_list(module), None)

    def star_source(self, module: Module, statement: ast.ImportFrom) -> Module | Doubt | None:
        """Returns the module that a `from` import names; None if the module does not exist."""
        return Scope(self, module).source(statement)

    def evaluate(self, expression: ast.expr, scope: Scope) -> list[Thing]:
        """Returns the symbols that an expression can stand for."""
        if isinstance(expression, ast.Name):
            return scope.lookup(expression.id)
        if isinstance(expression, ast.Attribute):
            found: list[Thing] = []
            for thing in self.evaluate(expression.value, scope):
                found += self.attribute(thing, expression.attr, typing=scope.typing) or [
                    Doubt(f"{expression.attr!r} is not found")
                ]
            return found
        if isinstance(expression, ast.Subscript):
            things = self.evaluate(expression.value, scope)
            return [t if is_generic(t) else Value(scope.module, expression) for t in things]
        if isinstance(expression, ast.IfExp):
            return self.evaluate(expression.body, scope) + self.evaluate(expression.orelse, scope)
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str) and scope.typing:
            try:
                return self.evaluate(ast.parse(expression.value.strip(), "<annotation>", "eval").body, scope)
            except (SyntaxError, ValueError, RecursionError):
                return [Doubt("an annotation that cannot be read")]
        if isinstance(expression, ast.Call):
            return self._called(expression, scope)
        return [Value(scope.module, expression)]

    def _called(self, call: ast.Call, scope: Scope) -> list[Thing]:
        functions = self.evaluate(call.func, scope)
        if len(functions) != 1:
            return [Doubt("the result of a call")]
        function = functions[0]
        starred = any(isinstance(a, ast.Starred) for a in call.args) or any(k.arg is None for k in call.keywords)
        if function == Ref("functools.partial") and call.args and not starred:
            keywords = tuple(keyword.arg or "" for keyword in call.keywords)
            return [
                thing if isinstance(thing, Doubt) else Partial(thing, len(call.args) - 1, keywords)
                for thing in self.evaluate(call.args[0], scope)
            ]
        if function == Ref("collections.namedtuple"):
            return [named_tuple(call)]
        if isinstance(function, Function) and call.args and not starred:
            if returns_its_argument(function):
                altered = attributes_set(function)
                return [
                    replace(thing, altered=thing.altered | altered) if isinstance(thing, Class) else thing
                    for thing in self.evaluate(call.args[0], scope)
                ]
        return [Doubt("the result of a call")]

    def attribute(self, thing: Thing, name: str, *, typing: bool = False) -> list[Thing]:
        """Returns the symbols that `thing.name` can stand for; an empty list if there certainly is no such attribute.

        Args:
            thing: the symbol of the object.
            name: the name of the attribute.
            typing: whether names that are defined only under `TYPE_CHECKING` are included.
        """
        if isinstance(thing, Module):
            dotted = f"{thing.name}.{name}"
            return [Ref(dotted)] if symbols.is_by_name(dotted) else self.member(thing, name, typing=typing)
        if isinstance(thing, Class):
            return self.class_attribute(thing, name)
        if isinstance(thing, Ref) and thing.dotted in ("typing", "collections"):
            return [Ref(f"{thing.dotted}.{name}")]
        return [thing if isinstance(thing, Doubt) else Doubt(f"an attribute {name!r} of a value")]

    def own(self, cls: Class, name: str) -> list[Thing]:
        """Returns the symbols that a class binds to a name in its own body."""
        self.world.record_use(cls.module)
        key = (cls.node, name)
        return self.world.memoized(key, lambda: self._own(cls, name), [_RECURSION])

    def _own(self, cls: Class, name: str) -> list[Thing]:
        return bound_values(cls.body.binding(name), name, Scope(self, cls.module, cls.module.is_stub, cls))[0]

    def class_attribute(self, cls: Class, name: str) -> list[Thing]:
        """Returns the symbols that an attribute of a class can stand for, including inherited attributes."""
        if name in cls.altered:
            return [Doubt(f"{name!r} is set on {cls.name} by a function")]
        for base in self.mro(cls):
            if isinstance(base, Class):
                found = self.own(base, name)
                if found:
                    return [Function(f.module, f.node, f.home, cls) if isinstance(f, Function) else f for f in found]
            elif isinstance(base, Doubt):
                return [base]
            elif base.dotted not in symbols.EMPTY_BASES:
                return [Doubt(f"{cls.name} has the base {base.dotted}")]
        if any(self._may_gain(base, name) for base in self.mro(cls) if isinstance(base, Class)):
            return [Doubt(f"{name!r} may be set from outside of {cls.name}")]
        return []

    def _may_gain(self, cls: Class, name: str) -> bool:
        """Returns whether code outside the body of a class may set an attribute of the given name on the class."""
        module = cls.module
        if module.has(f".{name}") or any(k.arg == "metaclass" for k in cls.node.keywords):
            return True
        scope = Scope(self, module, False, cls.outer)
        for decorator in cls.node.decorator_list:
            things = self.evaluate(decorator.func if isinstance(decorator, ast.Call) else decorator, scope)
            dotted = dotted_name(things[0]) if len(things) == 1 else None
            if dotted not in symbols.SAME and not (dotted == "dataclasses.dataclass" and name == "__call__"):
                return True
        return module.has("setattr(") and bool(module.block.plain("setattr("))

    def bases(self, cls: Class) -> list[Class | Ref | Doubt]:
        """Returns the direct base classes of a class, with a `Doubt` in place of each unknown base."""
        scope = Scope(self, cls.module, cls.module.is_stub, cls.outer)
        found: list[Class | Ref | Doubt] = []
        for expression in cls.node.bases:
            things = self.evaluate(expression, scope)
            only = things[0] if len(things) == 1 else Doubt(f"a base of {cls.name} is not known")
            if isinstance(only, Class | Ref | Doubt):
                found.append(only)
            else:
                found.append(Doubt(f"a base of {cls.name} is not known"))
        return found

    def mro(self, cls: Class) -> list[Class | Ref | Doubt]:
        """Returns the method resolution order of a class, with a `Doubt` in place of unknown bases."""
        return self.world.memoized((cls.node, "mro"), lambda: self._mro(cls), [cls, _RECURSION])

    def _mro(self, cls: Class) -> list[Class | Ref | Doubt]:
        bases = self.bases(cls)
        # These two replace the bases of the class that they make, so there is nothing to linearize.
        if any(base == Ref("typing.NamedTuple") or base == Ref("typing.TypedDict") for base in bases):
            return [cls, *bases]
        chains = [self.mro(base) if isinstance(base, Class) else [base] for base in bases]
        return [cls, *merge([[*chain] for chain in chains] + [list(bases)])]


class Scope:
    """The scope in which a name is looked up: a module, or the body of a class.

    Args:
        names: the resolver of names in source code.
        module: the module that is the scope, or that contains the class.
        typing: whether names that are defined only under `TYPE_CHECKING` are included.
        cls: the class whose body is the scope; None for the scope of the module.
    """

    def __init__(self, names: Names, module: Module, typing: bool = False, cls: Class | None = None) -> None:
        self.names, self.module, self.typing, self.cls = names, module, typing, cls
        # A statement that rebinds a name may use the old value, as in `f = decorate(f)`.
        self._before: tuple[str, int] | None = None

    def lookup(self, name: str) -> list[Thing]:
        """Returns the symbols that a name can stand for in this scope."""
        if self._before is not None and self._before[0] == name:
            block = self.module.block if self.cls is None else self.cls.body
            earlier = [s for s in block.binding(name) if s.lineno < self._before[1]]
            found, sure = bound_values(earlier, name, Scope(self.names, self.module, self.typing, self.cls))
            if found or sure:
                return found or [Doubt(f"the name {name!r} was deleted")]
            return [Ref(f"builtins.{name}")] if hasattr(builtins, name) else [Doubt(f"{name!r} is defined by itself")]
        if self.cls is not None:
            found = self.names.own(self.cls, name)
            if found:
                return found
        found = self.names.member(self.module, name, typing=self.typing)
        doubtful = all(isinstance(thing, Doubt) for thing in found)
        if doubtful and hasattr(builtins, name) and not (found and self._may_rebind(name)):
            return [Ref(f"builtins.{name}")]
        return found or [Doubt(f"the name {name!r} is not found")]

    def _may_rebind(self, name: str) -> bool:
        """Returns whether the module may bind the name of a builtin to something else."""
        if self.module.text is None:
            return True
        pattern = rf"(?:\b(?:def|class|import|as)[ \t]+{name}\b|\n[ \t]*{name}[ \t]*[:=])"
        return re.search(pattern, self.module.text.text) is not None

    def static_condition(self, test: ast.expr) -> bool | None:
        """Returns the value of a condition; None if the value is unknown without running code."""
        return static_condition(test, self.typing)

    def importable(self, statement: ast.Import | ast.ImportFrom) -> bool | None:
        """Returns whether an import would succeed; None if this is unknown."""
        if isinstance(statement, ast.Import):
            modules = [self.names.world.module(alias.name) for alias in statement.names]
        else:
            modules = [self.source(statement)]
        if any(module is None for module in modules):
            return False
        if not all(isinstance(module, Module) and module.text is not None for module in modules):
            return None
        if isinstance(statement, ast.ImportFrom) and isinstance(modules[0], Module):
            for alias in statement.names:
                if alias.name == "*":
                    continue
                found = self.names.member(modules[0], alias.name)
                if not found:
                    return False
                if any(isinstance(thing, Doubt) for thing in found):
                    return None
        return True

    def source(self, statement: ast.ImportFrom) -> Module | Doubt | None:
        """Returns the module that a `from` import names; None if the module does not exist."""
        name = statement.module or ""
        if statement.level:
            package = self.module.name
            for _ in range(statement.level - (self.module.found.folders is not None)):
                package = package.rpartition(".")[0]
            name = f"{package}.{name}" if name and package else package or name
        return self.names.world.module(name) if name else Doubt("an import from no package")

    def value(self, statement: ast.stmt, name: str, expression: ast.expr | None) -> list[Thing] | None:
        """Returns the symbols that a statement binds to a name; None if the statement does not bind the name.

        Args:
            statement: the statement.
            name: the name.
            expression: the assigned expression; None if the statement is not an assignment, or the expression is
                unknown.
        """
        if isinstance(statement, ast.ClassDef):
            return [Class(self.module, statement, self.cls)]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            return [Function(self.module, statement, self.cls, self.cls)]
        if isinstance(statement, ast.Import):
            return self._imported(statement, name)
        if isinstance(statement, ast.ImportFrom):
            return self._imported_from(statement, name)
        if expression is None:
            return [Doubt(f"{name!r} is computed in code")]
        scope = Scope(self.names, self.module, self.typing, self.cls)
        scope._before = (name, statement.lineno)
        return self.names.evaluate(expression, scope) or [Doubt(f"{name!r} is computed in code")]

    def _imported(self, statement: ast.Import, name: str) -> list[Thing]:
        for alias in reversed(statement.names):
            if alias.asname == name or (not alias.asname and alias.name.partition(".")[0] == name):
                wanted = alias.name if alias.asname else name
                if wanted in ("typing", "collections"):
                    return [Ref(wanted)]
                return [self.names.world.module(wanted) or Doubt(f"no module named {wanted!r}")]
        return []

    def _imported_from(self, statement: ast.ImportFrom, name: str) -> list[Thing] | None:
        for alias in reversed(statement.names):
            if (alias.asname or alias.name) == name:
                dotted = f"{statement.module}.{alias.name}"
                if not statement.level and symbols.is_by_name(dotted):
                    return [Ref(dotted)]
                source = self.source(statement)
                if isinstance(source, Module):
                    if source is self.module and alias.name == name:
                        return self.names._submodule(source, name) or [Doubt(f"{name!r} is imported from itself")]
                    found = self.names.attribute(source, alias.name, typing=self.typing)
                    return found or [Doubt(f"{source.name!r} has no symbol {alias.name!r}")]
                return [source or Doubt(f"no module named {statement.module!r}")]
        source = self.source(statement)
        if isinstance(source, Module):
            if self.typing and self.module.has("_LazyModule(") and not may_be_in_all(source, name):
                return None
            return self.names.exports(source, name) if source is not self.module else None
        return None if source is None else [source]

    def ordered(self, statements: Sequence[ast.stmt], name: str) -> Sequence[ast.stmt]:
        """Returns statements in an order in which a later binding of the name replaces an earlier one."""
        return stars_last(statements, name) if self.typing else statements
