"""Methods of texts give in every place of a template what they give in Python: loops and blocks hand on variables of theirs."""

import pytest
from markupsafe import Markup

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render_text

ARGUMENTS = {
    "capitalize": [], "casefold": [], "center": [9], "count": ["a"], "endswith": ["c"], "expandtabs": [4], "find": ["b"],
    "format": [1], "format_map": [{"x": 1}], "index": ["b"], "isalnum": [], "isalpha": [], "isascii": [], "isdecimal": [],
    "isdigit": [], "isidentifier": [], "islower": [], "isnumeric": [], "isprintable": [], "isspace": [], "istitle": [],
    "isupper": [], "join": [["x", "y"]], "ljust": [9], "lower": [], "lstrip": ["a"], "partition": ["b"],
    "removeprefix": ["a"], "removesuffix": ["c"], "replace": ["a", "z"], "rfind": ["b"], "rindex": ["b"], "rjust": [9],
    "rpartition": ["b"], "rsplit": ["b"], "rstrip": ["c"], "split": ["b"], "splitlines": [], "startswith": ["a"],
    "strip": ["a"], "swapcase": [], "title": [], "translate": [{97: "q"}], "upper": [], "zfill": [9],
}  # fmt: skip
CONTEXTS = {
    "plain": "EXPR",
    "a loop": "{% for i in [1] %}EXPR{% endfor %}",
    "a block": "-- block b\nEXPR\n-- endblock",
    "a block with a variable": "-- block b\n-- set v = 1\nEXPR\n-- endblock",
    "a bracket block": "[b]\n-- set v = 1\nEXPR",
    "a loop in a block": "-- block b\n-- set v = 1\n{% for i in [1] %}EXPR{% endfor %}\n-- endblock",
    "a macro": "{% macro m() %}{% for i in [1] %}EXPR{% endfor %}{% endmacro %}{{ m() }}",
    "a set": "-- block b\n{% set v = 1 %}{% set v %}EXPR{% endset %}{{ v }}\n-- endblock",
    "a call": "{% macro m() %}{{ caller() }}{% endmacro %}{% for i in [1] %}{% call m() %}EXPR{% endcall %}{% endfor %}",
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("safe", ["", "|safe"], ids=["text", "safe"])
def test_methods_give_what_they_give_in_python(context, safe):
    environment = ConfigEnvironment(variables={"given": ARGUMENTS})
    for method, arguments in ARGUMENTS.items():
        written = ", ".join(f"given['{method}'][{number}]" for number in range(len(arguments)))
        text = CONTEXTS[context].replace("EXPR", f"<{{{{ ('abc'{safe}).{method}({written}) }}}}>")
        subject = Markup("abc") if safe else "abc"
        assert render_text(environment, text).text.strip() == f"<{getattr(subject, method)(*arguments)}>", method


def test_every_method_is_tried():
    public = {name for name in dir(str) if not name.startswith("_")} - {"encode", "maketrans"}
    assert set(ARGUMENTS) == public
