"""The generator of Python code for expressions; the code counts its own cost against the rendering budget.

The input is Jinja's expression nodes; the output is their Python code. Invariants: if the size of an operand determines
the cost of an operation, the size is counted before the operation runs; an expression that begins on another line of
the template than the code before it begins on a new line of the generated code, so that a traceback gives the right
line.
"""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame

INTERCEPTED = frozenset({"+", "-", "*", "/", "//", "**", "%"})
"""Operators that `RunEnvironment.call_binop` checks before it computes them."""


class ChargingGenerator(CodeGenerator):
    """Jinja's code generator for expressions; costly operations first call the budget account of the render."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Writes the code of a node; an expression from another template line begins a new line of code."""
        wrap = node.__dict__.get("fg_wrap")
        if wrap:
            self.write(wrap)
        # A statement over several lines would otherwise give every error the line of its beginning.
        moved = isinstance(node, nodes.Expr) and node.lineno not in (None, self._last_line) and not self._new_lines
        before = self._last_line
        if moved:
            self._continue_line(node.lineno)
        result = super().visit(node, *args, **kwargs)
        if moved:
            self._continue_line(before)
        if wrap:
            self.write(")")
        return result

    def _continue_line(self, lineno: int) -> None:
        # A continuation line, because the expression is in the middle of a Python statement.
        self.stream.write(" \\\n")
        self.code_lineno += 1
        self.debug_info.append((lineno, self.code_lineno))
        self._last_line = lineno

    # -- expressions that cost something

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """Writes the code of `a ~ b`, which checks the size of the result before it joins the texts."""
        self.write("fg_join((")
        for child in node.nodes:
            self.visit(child, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        """Writes the code of a comparison, which first counts the sizes of the operands against the budget."""
        for operand in (node.expr, *(op.expr for op in node.ops)):
            if not isinstance(operand, nodes.Const):
                operand.__dict__["fg_wrap"] = "fg_compared("
        super().visit_Compare(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        """Writes the code of a dict, which first counts the sizes of the keys, because they are hashed."""
        for pair in node.items:
            if not isinstance(pair.key, nodes.Const):
                pair.key.__dict__["fg_wrap"] = "fg_weigh("
        super().visit_Dict(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """Writes the code of a subscript; for a slice, the code first counts the size of the sliced value."""
        if isinstance(node.arg, nodes.Slice):
            node.node.__dict__["fg_wrap"] = "fg_weigh("
        super().visit_Getitem(node, frame)

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        """Writes the code of a constant."""
        # The repr of infinity is `inf`, which is a name in Python code: `1e999` is written as a call of float.
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            self.write(f"float('{value}')")
        else:
            super().visit_Const(node, frame)
