"""Every error code has a page, and every page a code."""

import ast
import functools
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "errors"
CODE = re.compile(r"FG\d{3}")


@functools.cache
def codes_in_source():
    found = {}
    for file in sorted((ROOT / "forgather").rglob("*.py")):
        text = file.read_text()
        for node in ast.walk(ast.parse(text)) if CODE.search(text) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                found.setdefault(node.value, f"{file.relative_to(ROOT)}:{node.lineno}")
    for file in sorted((ROOT / "forgather").rglob("rules/*.json")):
        for rules in json.loads(file.read_text()):
            found |= {conflict["code"]: str(file.relative_to(ROOT)) for conflict in rules.get("conflicts", ())}
    return found


def test_every_code_has_a_page():
    missing = {code: place for code, place in codes_in_source().items() if not (PAGES / f"{code}.md").is_file()}
    assert {} == missing


def test_every_page_belongs_to_a_code():
    assert set() == {page.stem for page in PAGES.glob("*.md")} - set(codes_in_source())


def test_a_page_starts_with_its_code():
    wrong = [page.name for page in PAGES.glob("*.md") if not page.read_text().startswith(f"# {page.stem}: ")]
    assert [] == wrong


def test_every_code_occurs_in_a_test():
    files = (file for file in (ROOT / "tests").rglob("*") if file.suffix in {".py", ".txt", ".md", ".json"})
    met = {code for file in files for code in CODE.findall(file.read_text())}
    assert [] == sorted(set(codes_in_source()) - met)
