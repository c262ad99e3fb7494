"""Compiles Jinja source to Python code that records origins and counts its cost against the rendering budget.

The input is the Jinja source that `config.syntax.desugar` made of a template; the output is a code object. Invariant:
the code contains line numbers and block names of its own template, but no path and no template name. So equal text
gives equal code, and the code can be cached by the text. `RunEnvironment.instance` binds the code to its template.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import Frame
from jinja2.environment import Environment
from jinja2.idtracking import VAR_LOAD_RESOLVE

from forgather.config._jinja.charged import INTERCEPTED, ChargingGenerator
from forgather.config._jinja.parser import TracingParser
from forgather.config._jinja.seams import mark_seams
from forgather.config._jinja.static_analysis import (
    HIDDEN,
    block_contents,
    bound_names,
    contains_node,
    count_nodes,
    loop_rows,
    name_tables,
    names_in,
)

_BODY_COST = 2


class TracingGenerator(ChargingGenerator):
    """Jinja's code generator; its code records the origin of all output and counts repeated work."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.literals: list[tuple[str, int, str | None]] = []
        self.places: list[tuple[int, str | None]] = []
        self.place_numbers: dict[tuple[int, str | None], int] = {}
        self.prints: list[tuple[int, tuple[str, ...], tuple[tuple[str, str], ...]]] = []
        self.dropped: list[tuple[int, str]] = []
        self.loops: list[tuple[int, tuple[str, ...], tuple[tuple[Any, ...], ...]]] = []
        self.scoped: dict[int, int] = {}
        self.resolved: dict[str, None] = {}
        self.bound: dict[int, tuple[tuple[str, ...], int | None]] = {}
        self.turns: dict[int, str] = {}

    # -- the module

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        """Writes the Python module of a template, followed by the tables that the functions of the module read."""
        around = _blocks_around(node)
        self.has_seams = node.__dict__["fg_has_seams"]
        for block in node.find_all(nodes.Block):
            self.scoped[id(block.body)] = 0
        super().visit_Template(node, frame)
        tables = {
            "fg_literals": tuple(self.literals),
            "fg_places": tuple(self.places),
            "fg_prints": tuple(self.prints),
            "fg_loops": tuple(self.loops),
            "fg_dropped": tuple(self.dropped),
            "fg_blocks": {name: (block.lineno, around.get(name, ())) for name, block in self.blocks.items()},
            "fg_cost": 2 + count_nodes(node.body) // _BODY_COST,
            **name_tables(node),
            "fg_held": block_contents(node),
            "fg_open_end": node.__dict__["fg_open_end"],
            "fg_reads": tuple(name for name in self.resolved if name not in HIDDEN),
        }
        for name, table in tables.items():
            self.writeline(f"{name} = {table!r}")

    def enter_frame(self, frame: Frame) -> None:
        """Enters a scope, and records the names that the scope looks up in the context of the template."""
        super().enter_frame(frame)
        loads = frame.symbols.loads.values()
        self.resolved.update((str(name), None) for action, name in loads if action == VAR_LOAD_RESOLVE)

    def _place(self, lineno: int, frame: Frame) -> int:
        # Numbered, so that equal places are one object at run time.
        key = (lineno, frame.block)
        if key not in self.place_numbers:
            self.place_numbers[key] = len(self.places)
            self.places.append(key)
        return self.place_numbers[key]

    # -- output

    def visit_Output(self, node: nodes.Output, frame: Frame) -> None:
        """Writes the code of output: fixed text comes from the table of literals, `fg_print` prints expressions."""
        guarded = frame.require_output_check
        if guarded:
            self._note_dropped(node, static=self.has_known_extends)
            if self.has_known_extends:
                return
            self.writeline("if parent_template is None:")
            self.indent()
        for child in node.nodes:
            self._begin(child, frame)
            self.newline(child)
            self.start_write(frame)
            if isinstance(child, nodes.TemplateData):
                self.write(f"fg_literal[{len(self.literals)}]")
                self.literals.append((child.data, child.lineno, frame.block))
            else:
                self._write_print(child, frame)
            self.end_write(frame)
        if guarded:
            self.outdent()

    def _begin(self, node: nodes.Node, frame: Frame) -> None:
        """Writes a seam, which marks the start of a line, before a node whose output begins a line of the template."""
        if self.has_seams and node.__dict__["fg_begins"]:
            self.simple_write("fg_seam", frame)

    # Jinja silently ignores text outside of blocks in a child; its line is kept for the finding FG131.
    def _note_dropped(self, node: nodes.Output, *, static: bool) -> None:
        for child in node.nodes:
            line = child.lineno
            if isinstance(child, nodes.TemplateData):
                for offset, text in enumerate(child.data.split("\n")):
                    if text.strip() and not text.lstrip().startswith("#"):
                        line, found = child.lineno + offset, text.strip()
                        break
                else:
                    continue
            elif isinstance(child, nodes.Const) and isinstance(child.value, str) and not child.value.strip():
                continue
            else:
                found = ""
            if static:
                self.dropped.append((line, found))
            # `extends` may be inside an `if`, so only the render knows whether this text was dropped.
            elif self.extends_so_far:
                self.writeline("if parent_template is not None:")
                self.indent()
                self.writeline(f"fg_drop({line}, {found!r})")
                self.outdent()

    def _write_print(self, child: nodes.Expr, frame: Frame) -> None:
        begin, end = self._printing(child.lineno, child, frame)
        self.write(begin)
        self.visit(child, frame)
        self.write(end)

    def _printing(self, lineno: int, expression: nodes.Expr, frame: Frame) -> tuple[str, str]:
        """Returns the code to write before and after an expression that is printed on line `lineno`."""
        names, fields = names_in(expression)
        number = len(self.prints)
        self.prints.append((self._place(lineno, frame), names, fields))
        if not names and not fields:
            return f"fg_print({number}, ", ")"
        return f"fg_print_names({number}, ", f", context, ({_refs(frame, [name for name, _ in fields])}))"

    # -- assignments

    def visit_Assign(self, node: nodes.Assign, frame: Frame) -> None:
        """Writes the code of a `set`, which counts the size of the value and records the line of the `set`."""
        if not isinstance(node.node, nodes.Const):
            node.node.__dict__["fg_wrap"] = "fg_weigh("
        # Jinja first writes a check of the namespace, without a line; this statement gives its traceback one.
        self.writeline("pass", node)
        super().visit_Assign(node, frame)
        self._note_set(node, frame)

    def visit_AssignBlock(self, node: nodes.AssignBlock, frame: Frame) -> None:
        """Writes the code of a `set` block, which captures text and records the line of the `set`."""
        self.scoped[id(node.body)] = 0
        super().visit_AssignBlock(node, frame)
        self._note_set(node, frame)

    def _note_set(self, node: nodes.Assign | nodes.AssignBlock, frame: Frame) -> None:
        place = f"fg_site[{self._place(node.lineno, frame)}]"
        # A captured block has no expression; the lines of its text are its origins.
        names = names_in(node.node)[0] if isinstance(node, nodes.Assign) else ()
        if names:
            place = f"fg_given({place}, context, {names!r})"
        targets = [node.target, *node.target.find_all((nodes.Name, nodes.NSRef))]
        for target in targets:
            if isinstance(target, nodes.Name):
                self.writeline(f"context.fg_sets[{target.name!r}] = {place}")
            elif isinstance(target, nodes.NSRef):
                ref = frame.symbols.ref(target.name)
                self.writeline(f"fg_note({ref}, {target.attr!r}, {place})")

    def blockvisit(self, body: Any, frame: Frame) -> None:
        """Writes the code of a body, which counts its own cost and forgets its own assignments at the end."""
        turns, cost = self.turns.get(id(body)), self.scoped.get(id(body))
        if turns is not None:
            self.writeline(turns)
        # A soft frame (`if`) is no scope in Jinja: assignments in it stay.
        if cost is None or frame.soft_frame:
            super().blockvisit(body, frame)
            return
        if cost:
            self.writeline(f"fg_turn({cost})")
        names, place = self.bound.get(id(body), ((), None))
        saves = names or any(contains_node(child, (nodes.Assign, nodes.AssignBlock)) for child in body)
        saved = self.temporary_identifier() if saves else ""
        if saves:
            self.writeline(f"{saved} = context.fg_sets")
            self.writeline(f"context.fg_sets = {saved}.copy()")
        for name in names:
            known = f"context.fg_sets.pop({name!r}, None)"
            self.writeline(known if place is None else f"context.fg_sets[{name!r}] = fg_site[{place}]")
        super().blockvisit(body, frame)
        if saves:
            self.writeline(f"context.fg_sets = {saved}")

    def visit_With(self, node: nodes.With, frame: Frame) -> None:
        """Writes the code of a `with`; the place of its names is the line of the `with`."""
        names = tuple(name for target in node.targets for name in bound_names(target))
        self.scoped[id(node.body)] = 0
        self.bound[id(node.body)] = names, self._place(node.lineno, frame)
        super().visit_With(node, frame)

    def _scope_macro(self, node: nodes.Macro | nodes.CallBlock) -> None:
        # The value of a parameter is written at the call of the macro, and that line is already a site of the output.
        self.scoped[id(node.body)] = 3 + count_nodes(node.body) // _BODY_COST
        self.bound[id(node.body)] = tuple(argument.name for argument in node.args), None

    def visit_Macro(self, node: nodes.Macro, frame: Frame) -> None:
        """Writes the code of a macro; the cost of each call is in proportion to the size of the macro's body."""
        self._scope_macro(node)
        super().visit_Macro(node, frame)

    def visit_CallBlock(self, node: nodes.CallBlock, frame: Frame) -> None:
        """Writes the code of a call block; the origin of its output is the line of the call."""
        self._scope_macro(node)
        # Jinja's own method would write the output without origins, so its steps are repeated here.
        call_frame, macro_ref = self.macro_body(node, frame)
        self.writeline("caller = ")
        self.macro_def(macro_ref, call_frame)
        begin, end = self._printing(node.lineno, node.call, frame)
        self._begin(node, frame)
        self.start_write(frame, node)
        self.write(begin)
        self.visit_Call(node.call, frame, forward_caller=True)
        self.write(end)
        self.end_write(frame)

    def visit_FilterBlock(self, node: nodes.FilterBlock, frame: Frame) -> None:
        """Writes the code of a filter block; text without origins gets the line of the filter block."""
        self.scoped[id(node.body)] = 0
        filter_frame = frame.inner()
        filter_frame.symbols.analyze_node(node)
        self.enter_frame(filter_frame)
        self.buffer(filter_frame)
        self.blockvisit(node.body, filter_frame)
        place = self._place(node.lineno, frame)
        self._begin(node, frame)
        self.start_write(frame, node)
        self.write(f"fg_filtered({place}, ")
        self.visit_Filter(node.filter, filter_frame)
        self.write(")")
        self.end_write(frame)
        self.leave_frame(filter_frame)

    def visit_Block(self, node: nodes.Block, frame: Frame) -> None:
        """Writes the code of a block; the seam after the block completes an unfinished last line of an override."""
        guarded = frame.toplevel and self.extends_so_far > 0
        if frame.toplevel and self.has_known_extends:
            return
        if guarded:
            self.writeline("if parent_template is None:")
            self.indent()
        self._begin(node, frame)
        # The guard above includes the seams; with 0, Jinja does not write a second one around the block.
        extends, self.extends_so_far = self.extends_so_far, 0
        super().visit_Block(node, frame)
        self.extends_so_far = extends
        if node.__dict__["fg_ends"]:
            self.simple_write("fg_seam", frame)
        if guarded:
            self.outdent()

    # -- loops and other templates

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        """Writes the code of a loop; each iteration counts against the budget and has its own scope for assignments."""
        cost = 1 + (count_nodes(node.body) + count_nodes(node.else_)) // _BODY_COST
        node.iter.__dict__["fg_wrap"] = f"fg_count({cost}, "
        owners = tuple(dict.fromkeys(name for name, _ in names_in(node.iter)[1]))
        turns = self.temporary_identifier()
        self.writeline(f"{turns} = fg_loop({len(self.loops)}, context, ({_refs(frame, owners)}))")
        self.loops.append((self._place(node.lineno, frame), owners, loop_rows(node)))
        self.turns[id(node.body)] = f"{turns}.begin(context)"
        if node.else_:
            self.turns[id(node.else_)] = f"{turns}.otherwise(context)"
        super().visit_For(node, frame)
        self.writeline(f"{turns}.end(context)")

    def visit_Extends(self, node: nodes.Extends, frame: Frame) -> None:
        """Writes the code of `extends`, which passes its own line to the request for the parent template."""
        # Jinja raises "extended multiple times" without a line; this statement gives the traceback one.
        self.writeline("pass", node)
        # Jinja writes `repr(self.name)` as the name of the asking template; the `_Asker` puts its line there, too.
        self.name = _Asker(node.lineno, "extends")  # type: ignore[assignment]
        try:
            super().visit_Extends(node, frame)
        finally:
            self.name = None

    def _import_common(self, node: nodes.Import | nodes.FromImport, frame: Frame) -> None:
        self.name = _Asker(node.lineno, "import")  # type: ignore[assignment]
        super()._import_common(node, frame)
        self.name = None

    def visit_FromImport(self, node: nodes.FromImport, frame: Frame) -> None:
        """Writes the code of `from ... import`; the origins of the names remain the lines of the imported template."""
        super().visit_FromImport(node, frame)
        pairs = [name if isinstance(name, tuple) else (name, name) for name in node.names]
        self.writeline(f"fg_imported(context, included_template, {pairs!r})")

    def visit_Include(self, node: nodes.Include, frame: Frame) -> None:
        """Writes the code of an include, which adds the line of the include to the origins of the text."""
        place = self._place(node.lineno, frame)
        if node.ignore_missing:
            self.writeline("try:")
            self.indent()
        self.writeline("template = environment.get_or_select_template(", node)
        self.visit(node.template, frame)
        self.write(f", {_Asker(node.lineno, 'include')!r})")
        if node.ignore_missing:
            self.outdent()
            self.writeline("except TemplateNotFound:")
            self.indent()
            self.writeline("pass")
            self.outdent()
            self.writeline("else:")
            self.indent()
        self._begin(node, frame)
        self.start_write(frame, node)
        scope = self.dump_local_context(frame) if node.with_context else "None"
        self.write(f"fg_include({place}, template, context, {scope}, {node.__dict__['fg_inline']})")
        self.end_write(frame)
        if node.ignore_missing:
            self.outdent()


class _Asker:
    """A statement that asks for another template; `repr` gives the code of a tuple (template, line, kind)."""

    def __init__(self, lineno: int, why: str) -> None:
        self.lineno, self.why = lineno, why

    def __repr__(self) -> str:
        return f"(fg_self, {self.lineno}, {self.why!r})"


def _refs(frame: Frame, names: Iterable[str]) -> str:
    return "".join(f"{frame.symbols.find_ref(name)}, " for name in names)


def _blocks_around(node: nodes.Template) -> dict[str, tuple[str, ...]]:
    """Returns the names of the blocks that contain each nested block, outermost first."""
    around: dict[str, tuple[str, ...]] = {}
    for block in node.find_all(nodes.Block):
        for inner in block.find_all(nodes.Block):
            # From the outermost to the innermost, because find_all gives parents first.
            around[inner.name] = (*around.get(inner.name, ()), block.name)
    return around


class CompilerEnvironment(Environment):
    """The Jinja environment that parses and compiles templates; they run in a `RunEnvironment`."""

    # Jinja writes calls and operators as calls of the environment only if the environment is a sandbox.
    sandboxed = True
    intercepted_binops = INTERCEPTED
    intercepted_unops: frozenset[str] = frozenset()
    code_generator_class = TracingGenerator

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return TracingParser(self, source, name, filename).parse()

    def code(self, source: str) -> CodeType:
        """Returns the compiled code of Jinja source.

        Raises:
            Exception: any exception of Jinja or Python's compiler; `template_errors.syntax_fault` translates it.
        """
        tree = self._parse(source, None, None)
        mark_seams(tree, self.lexer.tokeniter(source, None), source)
        # Only the implicit end of a bracket block comes after the last line end.
        tree.__dict__["fg_open_end"] = not source.endswith("\n")
        return compile(self._generate(tree, None, None), "<template>", "exec")
