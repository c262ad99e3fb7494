"""The sandbox in which compiled templates run.

The inputs are the code and the definition of a template; the output is the functions that the code calls (`fg_...`).
Invariants: a `RunEnvironment` serves one load only; it checks every call of a template, counts the cost of calls and
repetitions against the rendering budget, and records the origins of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import CodeType, GeneratorType
from typing import Any

from jinja2.environment import Template, TemplateModule
from jinja2.exceptions import TemplateNotFound
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from forgather.config._jinja import call_guard, origins
from forgather.config._jinja.assignments import Turns, note_imported, sets_of, with_given
from forgather.config._jinja.budget import Account
from forgather.config._jinja.charged import INTERCEPTED
from forgather.config._jinja.filters import FILTERS, TESTS, json_text
from forgather.config._jinja.loader import Definition, Library, TemplateRequest
from forgather.config._jinja.origins import Place, Traced, Trail
from forgather.config._jinja.runtime_types import (
    RunContext,
    SuperReference,
    TracedNamespace,
    UndefinedValue,
    note_field,
)
from forgather.config._jinja.seams import Seam, line_end, seam_of
from forgather.errors import BudgetError, RenderError, SyntaxFault
from forgather.source import Span

MAX_DEPTH = 60
_TRAIL_WORK = 96
_MANY = 10


class MissingTemplate(TemplateNotFound):
    """The exception for a missing template; unless `ignore missing` catches it, its `error` is reported."""

    def __init__(self, name: str, error: RenderError) -> None:
        super().__init__(name)
        self.error = error


class _Literals(dict[int, Traced]):
    """The literal texts of a template; each is converted to a `Traced` string when it is first written."""

    def __init__(self, table: tuple[tuple[str, int, str | None], ...], owner: Definition) -> None:
        super().__init__()
        self._table, self._owner = table, owner

    def __missing__(self, number: int) -> Traced:
        text, line, block = self._table[number]
        # One segment per line, so that each line of the text has its own origin.
        starts, offset = [0], 0
        while (found := text.find("\n", offset) + 1) and found < len(text):
            starts.append(found)
            offset = found
        trails: list[Trail] = [
            (((self._owner, line + index, block),), (), False, False) for index in range(len(starts))
        ]
        made = self[number] = origins.segments(text, starts, trails) if text else origins.lost("")
        return made


class LoadedTemplate(Template):
    """A template of one load, with its compiled code, its definition, and its index in `Library.uses`."""

    definition: Definition
    use: int
    asked: dict[tuple[Any, int, str], LoadedTemplate]
    namespace: dict[str, Any]
    dropped: dict[int, str]

    def make_module(
        self, vars: dict[str, Any] | None = None, shared: bool = False, locals: Mapping[str, Any] | None = None
    ) -> TemplateModule:
        """Returns the module of the template: the names that it exports, with the lines that set them."""
        context: Any = self.new_context(vars, shared, locals)
        module = TemplateModule(self, context)
        module.__dict__["_fg_sets"] = context.fg_sets
        return module


class RunEnvironment(ImmutableSandboxedEnvironment):
    """The Jinja environment of one load.

    Args:
        library: the templates of the load.
        account: the budget account of the load.
        compiled: a function that returns the compiled code of a template.
        variables: the global variables of all templates, by name.
    """

    intercepted_binops = INTERCEPTED
    context_class = RunContext
    template_class = LoadedTemplate

    def __init__(
        self,
        library: Library,
        account: Account,
        compiled: Callable[[Definition], CodeType],
        variables: Mapping[str, object],
    ) -> None:
        super().__init__(undefined=UndefinedValue, trim_blocks=True, cache_size=0, optimized=False, auto_reload=False)
        self.library, self.account, self.compiled = library, account, compiled
        self.filters, self.tests = FILTERS, TESTS
        self.policies["json.dumps_function"] = json_text
        # lipsum makes texts of any length without a budget.
        self.globals.pop("lipsum", None)
        self.globals["namespace"] = TracedNamespace
        self.globals.update(variables)
        self.called_blocks: set[str] = set()
        self.templates: list[LoadedTemplate] = []
        # Names that compiled code calls; the prefix keeps them apart from names of templates.
        self._shared = {
            "fg_weigh": account.weigh,
            "fg_compared": account.compared,
            "fg_turn": account.turn,
            "fg_count": self._count,
            "fg_join": self.join,
            "fg_note": note_field,
            "fg_imported": note_imported,
            "fg_given": with_given,
        }

    # -- templates

    def get_template(self, name: Any, parent: Any = None, globals: Any = None) -> LoadedTemplate:
        """Returns the template that a statement asks for.

        Args:
            name: the name of the template; Jinja passes the value of any expression.
            parent: a tuple of the template that contains the statement, the line of the statement, and the kind of the
                statement.
            globals: ignored; Jinja passes it.

        Raises:
            RenderError: FG112 if the name is not a string; FG113 if templates extend each other in a circle.
            MissingTemplate: if there is no template of that name.
        """
        asker, line, why = parent
        ask = TemplateRequest(asker.definition, line, why, asker.use)
        # `extends trainer` without quotes: report the undefined name, not a missing template.
        if isinstance(name, Undefined):
            name._fail_with_undefined_error()
        if not isinstance(name, str):
            raise RenderError(
                f"'{why}' needs the name of a template and got {type(name).__name__}", code="FG112", span=ask.span
            )
        # An include in a loop uses one instance of the template: running its code again would give the same functions.
        key = (str(name), line, why)
        if key not in asker.asked:
            found = self.library.find(str(name), ask)
            if found is None:
                # `ignore missing` catches TemplateNotFound only, so the located error travels inside of one.
                raise MissingTemplate(str(name), self.library.missing(str(name), ask))
            if why == "extends":
                self._refuse_circle(found, ask)
            asker.asked[key] = self.instance(found, ask)
        made: LoadedTemplate = asker.asked[key]
        return made

    def select_template(self, names: Any, parent: Any = None, globals: Any = None) -> LoadedTemplate:
        """Returns the first template in a list of names for which a template exists.

        Raises:
            RenderError: FG112 if the list is empty.
            MissingTemplate: if there is no template of any of the names.
        """
        first: MissingTemplate | None = None
        for name in names:
            try:
                return self.get_template(name, parent)
            except MissingTemplate as error:
                first = first or error
        if first is None:
            raise RenderError("the list of templates to choose from is empty", code="FG112")
        raise first

    def get_or_select_template(self, name: Any, parent: Any = None, globals: Any = None) -> LoadedTemplate:
        """Returns the template of a name, or the first existing template of a list of names."""
        if isinstance(name, list | tuple):
            return self.select_template(name, parent)
        return self.get_template(name, parent)

    def _refuse_circle(self, found: Definition, ask: TemplateRequest) -> None:
        chain = self.library.extends_chain(ask.use)
        if any(self.library.used[use] is found for use in chain):
            names = [self.library.uses[use].name for use in reversed(chain)]
            raise RenderError(
                f"'{found.name}' extends itself through other templates",
                code="FG113",
                span=ask.span,
                hint=" -> ".join([*names, found.name]),
            )

    def instance(self, found: Definition, ask: TemplateRequest | None) -> LoadedTemplate:
        """Returns a new instance of a template, and runs its compiled code, which defines the functions of its blocks.

        Args:
            found: the definition of the template.
            ask: the statement that asks for the template; None for the config itself.

        Raises:
            SyntaxFault: if the template cannot be compiled.
        """
        use = self.library.note_use(found, ask)
        try:
            code = self.compiled(found)
        except SyntaxFault as fault:
            fault.context = (self.library.story(use),)
            raise
        namespace: dict[str, Any] = {"environment": self, "__file__": "<template>", **self._shared}
        # The text of the template was compiled by Jinja; nothing that the project names runs here.
        exec(code, namespace)  # noqa: S102  Jinja's own output
        namespace["name"] = found.name
        template: LoadedTemplate = LoadedTemplate._from_namespace(self, namespace, self.make_globals(None))  # type: ignore[assignment]
        template.definition, template.namespace = found, namespace
        template.use, template.asked = use, {}
        template.dropped = dict(namespace["fg_dropped"][:1])
        self.templates.append(template)
        self._equip(template, namespace)
        return template

    def _equip(self, template: LoadedTemplate, namespace: dict[str, Any]) -> None:
        owner, prints = template.definition, namespace["fg_prints"]
        places: list[Place] = [(owner, line, block) for line, block in namespace["fg_places"]]
        alone: list[Trail] = [((place,), (), False, False) for place in places]

        charge = self.account.charge

        # These functions are closures for speed: they run for each printed expression.
        def fg_print(number: int, value: Any) -> str:
            place = prints[number][0]
            if type(value) is Traced:
                charge(_TRAIL_WORK * len(value.trails))
                return origins.printed(value, places[place])
            apart = type(value) is Markup
            return origins.traced(self.text(value), ((places[place],), (), True, False) if apart else alone[place])

        def fg_print_names(number: int, value: Any, context: RunContext, spaces: tuple[Any, ...]) -> str:
            place, names, fields = prints[number]
            sets = sets_of(names, fields, context.fg_sets, spaces)
            if type(value) is Traced:
                charge(_TRAIL_WORK * len(value.trails))
                return origins.printed(value, places[place], sets)
            apart = type(value) is Markup
            trail: Trail = ((places[place],), sets, apart, False) if sets or apart else alone[place]
            return origins.traced(self.text(value), trail)

        def fg_loop(number: int, context: RunContext, spaces: tuple[Any, ...]) -> Turns:
            place, owners, rows = namespace["fg_loops"][number]
            return Turns(context, places[place], rows, dict(zip(owners, spaces, strict=True)))

        def fg_filtered(place: int, value: Any) -> str:
            text = value if type(value) is Traced else origins.lost(self.text(value))
            return origins.owned(text, places[place])

        def fg_include(place: int, child: LoadedTemplate, context: RunContext, scope: Any, is_inline: bool) -> str:
            text = self._include(child, context, scope)
            if is_inline and child.namespace["fg_open_end"] and text.endswith("\n"):
                # `"{% include 'v' %}"` inside a line: the newline that ends the last block of the file is not part of
                # the value.
                text = origins.cut(text, 0, len(text) - 1)
            return origins.nested(text, places[place])

        namespace.update(
            fg_self=template,
            fg_literal=_Literals(namespace["fg_literals"], owner),
            fg_site=[(place,) for place in places],
            fg_loop=fg_loop,
            fg_print=fg_print,
            fg_print_names=fg_print_names,
            fg_filtered=fg_filtered,
            fg_include=fg_include,
            fg_seam=seam_of(owner),
            fg_drop=template.dropped.setdefault,
        )

    def _include(self, child: LoadedTemplate, context: RunContext, scope: Any) -> Traced:
        account = self.account
        account.turn(child.namespace["fg_cost"])
        account.depth += 1
        if account.depth > MAX_DEPTH:
            raise BudgetError(
                f"'{child.name}' is included inside itself, or includes nest deeper than {MAX_DEPTH}",
                code="FG113",
                hint="an include that repeats itself needs a condition that ends it",
            )
        if scope is None:
            pieces: Iterable[str] = child._get_default_module()._body_stream
        else:
            inner: Any = child.new_context(context.get_all(), True, scope)
            # Jinja passes the names to an include by value, so its assignments must not change the places outside.
            inner.fg_sets = context.fg_sets.copy()
            pieces = child.root_render_func(inner)
        text = self.concat(pieces)
        # Not in a `finally`: after an error the whole render is over.
        account.depth -= 1
        return text

    # -- values

    def concat(self, pieces: Iterable[str]) -> Traced:
        """Returns pieces of output as one text; Jinja calls this function for every captured or included text.

        Raises:
            BudgetError: FG121 if the output is too long.
        """
        kept: list[str] = []
        size, limit = 0, self.account.limits.max_output_chars
        open_line = False
        for piece in pieces:
            if not piece:
                open_line = open_line or (type(piece) is Seam and kept != [] and piece.joins(kept[-1]))
                continue
            if open_line and piece[0] != "\n":
                # Two templates would share a line that neither of them wrote.
                kept.append(line_end(kept[-1]))
            open_line = False
            size += len(piece)
            kept.append(piece)
            if size > limit:
                raise self.account.overflow(_last_span(piece))
        text = origins.joined(kept)
        self.account.charge(size + _TRAIL_WORK * len(text.trails))
        return text

    def join(self, values: tuple[Any, ...]) -> str:
        """Returns the values as one text; compiled code calls this function for `a ~ b ~ c`."""
        texts = [value if isinstance(value, str) else self.text(value) for value in values]
        self.account.reserve(sum(map(len, texts)), "'~'")
        if any(type(text) is Traced for text in texts):
            return origins.joined(texts)
        return "".join(texts)

    def text(self, value: Any) -> str:
        """Returns a value as text, as an expression prints it.

        Raises:
            RenderError: FG118 if the value is a function or a generator.
        """
        if type(value) is str:
            return value
        if isinstance(value, GeneratorType):
            raise RenderError("a generator cannot be printed", code="FG118", hint="add `| list`, or loop over it")
        if isinstance(value, Macro | BlockReference) or (callable(value) and not isinstance(value, str)):
            if not isinstance(value, Undefined):
                # A lambda or a bound function has another __name__ than the template uses.
                known = (name for name, item in self.globals.items() if item is value)
                name = next(known, None) or getattr(value, "name", "it")
                name = "super" if isinstance(value, SuperReference) else name
                raise RenderError(
                    f"'{name}' is a function and cannot be printed", code="FG118", hint=f"call it: {name}()"
                )
        self.account.weigh(value)
        return str(value)

    def _count(self, cost: int, values: Any) -> Any:
        if isinstance(values, Undefined):
            return values
        return self.account.counted(values, cost)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of `+ - * / // ** %`, after a check of its size."""
        if isinstance(left, Undefined) or isinstance(right, Undefined):
            return self.binop_table[operator](left, right)
        # Dividing integers costs time by their digits; other operands are priced per operator below.
        if type(left) is int or type(right) is int:
            self.account.weigh(left)
            self.account.weigh(right)
        if operator == "%" and isinstance(left, str):
            call_guard.check_percent(self.account, left, right)
        elif operator == "**":
            self.account.power(left, right)
        elif operator == "*":
            self.account.product(left, right)
        elif operator == "+":
            self.account.addition(left, right)
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            if type(left) is Traced or type(right) is Traced:
                return origins.joined((left, right))
        result = self.binop_table[operator](left, right)
        if type(result) is str and (type(left) is Traced or type(right) is Traced):
            return origins.lost(result)
        return result

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns `obj[argument]`."""
        if isinstance(argument, tuple | list | dict):
            self.account.weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a replacement for `str.format` or `str.format_map` that checks sizes; None if `value` is neither."""
        return call_guard.checked_format(self, self.account, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of a function, macro or block that a template calls.

        The call is checked first, and its cost counts against the rendering budget. The text of a macro, a
        block or a string method keeps its origins where they can be followed.
        """
        account = __self.account
        kind = type(__obj)
        account.turn(1 if len(args) + len(kwargs) < _MANY else len(args) + len(kwargs))
        for value in args:
            account.weigh(value)
        if kind is BlockReference:
            # A block called by `self.name()` has an effect even if no parent has it (FG130).
            __self.called_blocks.add(__obj.name)
            account.turn(2)
        if kind is BlockReference or kind is Macro:
            made = __context.call(__obj, *args, **kwargs)
            return origins.captured(made) if type(made) is Traced else made
        if kind is SuperReference:
            account.turn(2)
            return __context.call(__obj, *args, **kwargs)
        if kind is LoopContext:
            cost = getattr(__obj._iterable, "cost", 1)
            known: Any = __context.fg_sets  # type: ignore[attr-defined]
            made = __context.call(__obj, *(account.counted(value, cost) for value in args), **kwargs)
            # A recursive loop runs turns of its own, whose assignments must not reach the turn that calls it.
            __context.fg_sets = known  # type: ignore[attr-defined]
            return made
        # In loops and blocks Jinja adds these two keywords, and removes them itself before the call.
        given = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
        for value in given.values():
            account.weigh(value)
        call_guard.check_call(account, __obj, args, given)
        result = super().call(__context, __obj, *args, **kwargs)
        return call_guard.traced_result(__obj, args, result)


def _last_span(piece: str) -> Span | None:
    if type(piece) is not Traced or not piece.trails or not piece.trails[-1][0]:
        return None
    owner, line, _ = piece.trails[-1][0][-1]
    span: Span = owner.span(line)
    return span
