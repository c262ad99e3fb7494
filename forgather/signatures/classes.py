"""The construction of classes: dataclass fields, decorators, metaclasses and `__init_subclass__`.

The input is a class in source code; the output is the parameters of its dataclass fields, and whether something other
than its `__init__` changes how it is constructed. If code may change the constructor in a way that cannot be
determined, the result is a `Doubt` with the reason. A field that may have a default is treated as one that has a
default.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from forgather.signatures import symbols
from forgather.signatures.annotations import describe, text_of
from forgather.signatures.decorators import attributes_set, inner_functions, returns_its_argument, walk_body
from forgather.signatures.name_resolution import Names, Scope
from forgather.signatures.parameters import EITHER, KEYWORD, OPTIONAL, Param, default_of, with_default
from forgather.signatures.symbols import Class, Doubt, Function, Module, Ref, Thing, dotted_name

_DATACLASS = Ref("dataclasses.dataclass")
_CONSTRUCTING = frozenset(("__init__", "__new__", "__call__", "__signature__"))
# An `__init_subclass__` may call these with the class: they do not change how the class is constructed.
_HARMLESS = frozenset(
    f"builtins.{name}" for name in "super hasattr getattr isinstance issubclass type print vars id len str repr".split()
)
# Modules whose functions only read the class that they get.
_READERS = frozenset(("inspect", "typing", "types", "annotationlib"))


@dataclass
class Effects:
    """How the decorators, the metaclass and the base classes of a class change its construction.

    Args:
        doubt: the change that cannot be determined from the source; None if there is none.
        options: the arguments of `dataclass`; None if the class is not a dataclass.
        opens: whether the `__init__` of the class was replaced by one that accepts any arguments.
    """

    doubt: Doubt | None = None
    options: Options | None = None
    opens: bool = False


def effects_on(names: Names, cls: Class) -> Effects:
    """Returns how the decorators, the metaclass and the base classes of a class change its construction.

    Args:
        names: the resolver of the names in the source of the class.
        cls: the class.
    """
    return names.world.memoized((cls.node, "effects"), lambda: _effects(names, cls), Effects())


def _effects(names: Names, cls: Class) -> Effects:
    effects = Effects()
    scope = Scope(names, cls.module, cls.module.is_stub, cls.outer)
    if not cls.module.is_stub:
        _apply_subclass_hooks(names, cls, effects)
    # Python applies the last decorator first.
    for decorator in reversed(cls.node.decorator_list):
        call = decorator if isinstance(decorator, ast.Call) else None
        things = names.evaluate(call.func if call else decorator, scope)
        options = {k.arg or "": k.value for k in call.keywords} if call else {}
        _decorate(effects, things, options, call is not None)
    for keyword in cls.node.keywords:
        if keyword.arg == "metaclass":
            reason = _metaclass(names, names.evaluate(keyword.value, scope))
            if reason:
                effects.doubt = Doubt(f"{cls.name} has a metaclass {reason}")
    if _is_changed_outside(names, cls):
        effects.doubt = Doubt(f"code outside {cls.name} changes how it is constructed")
    return effects


def _is_changed_outside(names: Names, cls: Class) -> bool:
    """Returns whether code outside the class body, but in the same module, changes the constructor of the class."""
    module, name = cls.module, cls.node.name
    # This package never changes a constructor from outside, and the search below takes time.
    if module.name.partition(".")[0] == "forgather":
        return False
    if any(module.has(f".{word} =") for word in _CONSTRUCTING):
        for node in _nodes(module, ".__"):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in _CONSTRUCTING:
                # A loop variable may stand for any class of the module.
                if isinstance(node.value, ast.Name) and (node.value.id == name or not _is_class(module, node.value.id)):
                    return True
    return module.has(f"({name}") and any(
        isinstance(node, ast.Call) and _receives(node, name) and _changes_construction(names, node, module)
        for node in _nodes(module, f"({name}")
    )


def _nodes(module: Module, word: str) -> Iterator[ast.AST]:
    for statement in module.block.plain(word):
        yield from walk_body([statement])


def _is_class(module: Module, name: str) -> bool:
    return any(isinstance(statement, ast.ClassDef) for statement in module.block.binding(name))


def _changes_construction(names: Names, call: ast.Call, module: Module) -> bool:
    """Returns whether a call changes the constructor of a class that is passed to it."""
    things = names.evaluate(call.func, Scope(names, module))
    for thing in things:
        if thing == Ref("builtins.setattr"):
            word = call.args[1] if len(call.args) > 1 else None
            if not isinstance(word, ast.Constant) or word.value in _CONSTRUCTING:
                return True
        elif isinstance(thing, Function) and _sets_construction(thing):
            return True
    return False


def _sets_construction(function: Function) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in _CONSTRUCTING
        for node in ast.walk(function.node)
    )


def _decorate(effects: Effects, things: list[Thing], options: Options, called: bool) -> None:
    only = things[0] if len(things) == 1 else Doubt("a decorator that is not known")
    if only == _DATACLASS:
        effects.options = options
    elif dotted_name(only) in symbols.SAME:
        accepts = options.get("accept_kwargs")
        effects.opens |= accepts is not None and not (isinstance(accepts, ast.Constant) and accepts.value is False)
    elif isinstance(only, Function) and not called and returns_its_argument(only):
        return
    elif isinstance(only, Function) and called and _returns_its_class(only):
        return
    else:
        shown = dotted_name(only) or getattr(only, "reason", "")
        effects.doubt = Doubt(f"it is decorated by {shown or 'an unknown decorator'}")


def _returns_its_class(function: Function) -> bool:
    """Returns whether a decorator with arguments (`@register("name")`) returns the decorated class itself."""
    node = function.node
    inner = inner_functions(node)
    returned = [n.value for n in walk_body(node.body) if isinstance(n, ast.Return)]
    names = {value.id for value in returned if isinstance(value, ast.Name)}
    return (
        bool(returned)
        and len(returned) == sum(isinstance(value, ast.Name) for value in returned)
        and names <= set(inner)
        and all(returns_its_argument(Function(function.module, inner[name])) for name in names)
    )


def _metaclass(names: Names, things: list[Thing]) -> str:
    """Returns the name of a metaclass that may change how its classes are constructed; "" if it does not."""
    only = things[0] if len(things) == 1 else None
    if isinstance(only, Ref):
        return "" if only.dotted in symbols.CODE_FREE_METACLASSES else only.dotted
    if not isinstance(only, Class):
        return "that is not known"
    for base in names.mro(only):
        if isinstance(base, Ref):
            if base.dotted not in symbols.CODE_FREE_METACLASSES:
                return base.dotted
        elif isinstance(base, Doubt):
            return "that is not known"
        # The `__call__` of a metaclass decides whether `__init__` runs at all.
        elif names.own(base, "__call__"):
            return base.name
        else:
            for method in ("__new__", "__init__"):
                for thing in names.own(base, method):
                    if not isinstance(thing, Function) or _mentions_construction(thing):
                        return base.name
    return ""


def _mentions_construction(function: Function) -> bool:
    for node in ast.walk(function.node):
        if isinstance(node, ast.Constant) and node.value in _CONSTRUCTING:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in _CONSTRUCTING:
            return True
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            return True
    return False


@dataclass
class _Hook:
    """The changes that the `__init_subclass__` of a base class makes to each subclass.

    Args:
        doubt: the change that cannot be determined from the source; "" if there is none.
        options: the arguments of `dataclass`; None if the method does not turn the subclass into a dataclass.
        opens: whether the method replaces `__init__` by one that accepts any arguments.
    """

    doubt: str = ""
    options: Options | None = None
    opens: bool = False


def _apply_subclass_hooks(names: Names, cls: Class, effects: Effects) -> None:
    """Adds the changes that the `__init_subclass__` methods of all base classes make to a class.

    All of them are read, because each `__init_subclass__` may call the next one by `super()`.
    """
    # The method of the class itself runs only for its subclasses.
    for base in names.mro(cls)[1:]:
        if isinstance(base, Doubt):
            return
        if not isinstance(base, Class):
            continue
        for thing in names.own(base, "__init_subclass__"):
            hook = _read_hook(names, thing)
            if hook.doubt:
                effects.doubt = Doubt(f"{base.name}.__init_subclass__ {hook.doubt}")
            effects.options = hook.options if hook.options is not None else effects.options
            effects.opens |= hook.opens


def _read_hook(names: Names, thing: Thing) -> _Hook:
    if not isinstance(thing, Function) or not thing.node.args.args:
        return _Hook("is not known")
    node, cls = thing.node, thing.node.args.args[0].arg
    hook = _Hook()
    results: set[int] = set()
    for inner in walk_body(node.body):
        if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Call) and _receives(inner.value, cls):
            results.update(id(target) for target in inner.targets)
        if isinstance(inner, ast.Call) and _receives(inner, cls):
            _read_hook_call(names, thing, inner, hook)
    for inner in walk_body(node.body):
        if (
            isinstance(inner, ast.Name)
            and inner.id == cls
            and isinstance(inner.ctx, ast.Store)
            and id(inner) not in results
        ):
            hook.doubt = "replaces the class with something else"
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and inner.attr in _CONSTRUCTING:
            hook.doubt = f"sets {inner.attr}"
    return hook


def _receives(call: ast.Call, name: str) -> bool:
    return any(isinstance(a, ast.Name) and a.id == name for a in (*call.args, *(k.value for k in call.keywords)))


def _read_hook_call(names: Names, hook_function: Function, call: ast.Call, hook: _Hook) -> None:
    things = names.evaluate(call.func, Scope(names, hook_function.module))
    only = things[0] if len(things) == 1 else None
    if only == _DATACLASS:
        hook.options = {k.arg or "": k.value for k in call.keywords}
    elif isinstance(only, Ref) and (only.dotted in _HARMLESS or only.dotted.startswith("typing.")):
        return
    elif isinstance(only, Ref) and only.dotted == "builtins.setattr":
        target = call.args[1] if len(call.args) > 1 else None
        if not isinstance(target, ast.Constant) or target.value in _CONSTRUCTING:
            hook.doubt = "sets attributes by name"
    elif isinstance(only, Function) and _opens_init(only):
        hook.opens = True
    elif isinstance(only, Function) and (only.module.name in _READERS or returns_its_argument(only)):
        return
    elif isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Name):
        return
    else:
        hook.doubt = f"passes the class to {ast.unparse(call.func)}"


def _opens_init(function: Function) -> bool:
    """Returns whether a function changes only the `__init__` of a class, to one that accepts any arguments."""
    if attributes_set(function) & _CONSTRUCTING != {"__init__"}:
        return False
    for statement in function.node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            args = statement.args
            return args.vararg is not None and args.kwarg is not None and len(args.args) == 1
    return False


Options = Mapping[str, ast.expr]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass.

    Args:
        param: the parameter of the constructor that sets the field.
        is_taken: whether the constructor has this parameter; False for `field(init=False)`.
    """

    param: Param
    is_taken: bool = True


def is_true(options: Options, name: str, otherwise: bool) -> bool | None:
    """Returns the value of an option of `dataclass` or `field`; None if the option is not a literal.

    Args:
        options: the keyword arguments of the call.
        name: the name of the option.
        otherwise: the value of an option that is not given.
    """
    value = options.get(name)
    if value is None:
        return otherwise
    return bool(value.value) if isinstance(value, ast.Constant) else None


def own_fields(names: Names, cls: Class, options: Options) -> list[Field] | Doubt:
    """Returns the fields that a dataclass declares in its own body; a `Doubt` if the fields depend on code that runs.

    Args:
        names: the resolver of the names in the source of the class.
        cls: the dataclass.
        options: the keyword arguments of the class's `dataclass` call.
    """
    keyword_only = is_true(options, "kw_only", False)
    if keyword_only is None:
        return Doubt(f"the fields of {cls.name} depend on code")
    scope = Scope(names, cls.module, cls.module.is_stub, None)
    found: list[Field] = []
    for statement in cls.body.plain():
        # A field in a condition or loop may or may not exist.
        if isinstance(statement, ast.If | ast.Try | ast.For | ast.With):
            if any(isinstance(inner, ast.AnnAssign) for inner in ast.walk(statement)):
                return Doubt(f"the fields of {cls.name} depend on code")
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        text = text_of(statement.annotation)
        bare = text.partition("[")[0].rpartition(".")[2]
        if bare == "ClassVar":
            continue
        # `_: KW_ONLY` is a marker: the fields after it are keyword-only.
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


def field_parameters(fields: list[Field]) -> list[Param]:
    """Returns the parameters of fields in the order of `dataclass`; of several fields of one name, the last counts."""
    by_name: dict[str, Field] = {}
    for own in fields:
        # As in `dataclass`, a redefined field keeps the position of its first definition.
        by_name[own.param.name] = own
    params = [field.param for field in by_name.values() if field.is_taken]
    positional = [p for p in params if p.kind is EITHER]
    for index, param in enumerate(positional):
        if param.default is None and any(earlier.default is not None for earlier in positional[:index]):
            # `inspect.Signature` refuses a required parameter after an optional one.
            positional[index] = replace(param, default=OPTIONAL)
    return positional + [p for p in params if p.kind is KEYWORD]


def tuple_params(names: Names, cls: Class) -> list[Param]:
    """Returns the parameters of the constructor of a `typing.NamedTuple`."""
    scope = Scope(names, cls.module, cls.module.is_stub, None)
    found = []
    for statement in cls.body.plain():
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            default = None if statement.value is None else default_of(statement.value)
            annotation = with_default(describe(names, statement.annotation, scope), default)
            found.append(Param(statement.target.id, EITHER, default, annotation))
    return found
