"""Writes statements of the standard library with labels, as data/kind.jsonl, data/parts.jsonl and data/size.jsonl.

kind: what the statement is (one class). parts: what occurs in it (several classes, or none). size: the logarithm of the
number of nodes in its syntax tree (a number). The same Python writes the same files.

Usage: python make_data.py [ROWS]
"""

import ast
import json
import math
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

KINDS = {
    ast.Assign: "assignment",
    ast.Expr: "expression",
    ast.FunctionDef: "function",
    ast.If: "if",
    ast.Return: "return",
    ast.For: "loop",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.Raise: "raise",
}
PARTS = {ast.Call: "call", ast.Compare: "comparison", ast.Subscript: "subscript", ast.BinOp: "arithmetic"}


def statements(folder):
    """Yields short statements with their syntax trees, each text once."""
    seen = set()
    for file in sorted(folder.glob("*.py")):
        lines = file.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(ast.parse("\n".join(lines))):
            if type(node) not in KINDS or node.end_lineno - node.lineno > 4:
                continue
            source = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if len(source) < 200 and source not in seen:
                seen.add(source)
                yield node, source


def main(rows):
    out = Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    files = {name: (out / f"{name}.jsonl").open("w", encoding="utf-8") for name in ("kind", "parts", "size")}
    for (node, source), _ in zip(statements(Path(sysconfig.get_paths()["stdlib"])), range(rows), strict=False):
        inside = [type(part) for part in ast.walk(node)]
        parts = sorted({PARTS[part] for part in inside if part in PARTS})
        labels = {"kind": KINDS[type(node)], "parts": parts, "size": round(math.log(len(inside)), 4)}
        for name, file in files.items():
            file.write(json.dumps({"text": source, "label": labels[name]}) + "\n")
    for file in files.values():
        file.close()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 4000)
