"""Every mistake in a template: one located error, in the words of this language."""

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render_text
from forgather.errors import ForgatherError

# text, code, line, message, hint (None: any)
MISTAKES = [
    ("a: 1\n-- if x\nb: 1\n", "FG102", 2, "'if' is not closed", "add a line `-- endif`"),
    (
        "-- for i in x\n-- if y\n-- endfor\n",
        "FG102",
        2,
        "'if' is not closed before 'endfor' on line 3",
        "add a line `-- endif`",
    ),
    ("[a]\n-- if x\n[b]\ny: 1\n", "FG102", 2, "'if' is not closed", None),
    ("-- block a\nx\n", "FG102", 1, "block 'a' is not closed", "add a line `-- endblock`"),
    ("-- set a\nx\n", "FG102", 1, "'set' is not closed", "add a line `-- endset`"),
    ("-- macro m()\nx\n", "FG102", 1, "'macro' is not closed", None),
    ("x\n{% raw %}\ny\n", "FG102", 2, "'raw' is not closed", None),
    ("x\n{# a\nb\n", "FG102", 2, "a comment is not closed", "end it with '#}'"),
    ("x\na: {{ b\nc: 1\n", "FG102", 2, "'{{' is not closed", None),
    ("a: {{ 'b }}\n", "FG101", 1, 'unexpected character "\'"', None),
    ("x\n-- endif\n", "FG103", 2, "'endif' has no open statement to close or to continue", None),
    ("-- else\n", "FG103", 1, "'else' has no open statement", None),
    ("-- fi x\n", "FG103", 1, "there is no statement 'fi'", None),
    ("-- inclode 'x'\n", "FG103", 1, "there is no statement 'inclode'", "did you mean 'include'?"),
    ("-- set x == 1\n-- endset", "FG101", 1, "found '==' where the end of the statement was expected", None),
    ("-- set x =\n", "FG101", 1, "found the end of the statement where a value was expected", None),
    ("{{ 1 + }}\n", "FG101", 1, "found the end of the expression where a value was expected", None),
    ("{{ (1 }}\n", "FG101", 1, "found '}' where '\\)' was expected", None),
    ("-- if foo(\nx: 1\n", "FG101", 1, None, None),
    ("-- break\n", "FG101", 1, "'break' is used outside a loop", None),
    ("-- autoescape true\n-- endautoescape\n", "FG101", 1, "'autoescape' is not supported in a config", None),
    ("-- block a-b\n-- endblock\n", "FG101", 1, "Block names", None),
    ("{{ x | uppr }}\n", "FG104", 1, "there is no filter 'uppr'", "did you mean 'upper'?"),
    ("{{ x is definde }}\n", "FG104", 1, "there is no test 'definde'", "did you mean 'defined'?"),
    ("-- if true\n{{ 1 | uppr }}\n-- endif\n", "FG104", 2, "there is no filter 'uppr'", "did you mean 'upper'?"),
    ("[a]\nx\n[b]\n[a]\n", "FG105", 4, "the block 'a' is defined twice in one template", None),
    ("#--- s ---\nx\n#--- s ---\n", "FG105", 3, "the sub-template 's' is defined twice in one file", None),
    (" \n", "FG107", 1, "is empty", None),
    ("a: 1\nb: {{ 1 / 0 }}\n", "FG110", 2, "division by zero", None),
    ("b: {{ 'a' + 1 }}\n", "FG110", 1, "the expression failed \\(TypeError\\)", None),
    ("b: {{ 1e300 ** 9 }}\n", "FG110", 1, "the number cannot be computed", None),
    ("b: {{ [1] | first(2) }}\n", "FG110", 1, "the expression failed \\(TypeError\\)", None),
    ("b: {{ 'x' | center('y') }}\n", "FG110", 1, "the expression failed \\(TypeError\\)", None),
    ("-- macro m(a)\n-- endmacro\n{{ m(1, 2) }}\n", "FG110", 3, "takes not more than 1 argument", None),
    ("-- for i in 5\n-- endfor\n", "FG110", 1, "not iterable", None),
    ("-- set a, b = [1]\n", "FG110", 1, "not enough values", None),
    ("-- set lr = 1\nb: {{ lrr }}\n", "FG111", 2, "'lrr' is not defined", "did you mean 'lr'?"),
    ("b: {{ lr }}\n", "FG111", 1, "'lr' is not defined", None),
    ("b: {{\n  1 +\n  lr }}\n", "FG111", 3, "'lr' is not defined", None),
    ("-- set d = {}\nb: {{ basename(d.c) }}\n", "FG111", 2, "'c' is not defined in this dict", None),
    ("-- set d = {}\nb: {{ joinpath('a', d.c) }}\n", "FG111", 2, "'c' is not defined in this dict", None),
    ("-- set r = 'r: a' | fromyaml\nb: {{ 1 / r.r }}\n", "FG110", 2, "'int' and 'str'", None),
    ("-- set b = [\n  1,\n  lr.x]\n", "FG111", 3, "'lr' is not defined", None),
    ("-- if lr\n-- endif\n", "FG111", 1, "'lr' is not defined", None),
    ("-- for i in lr\n-- endfor\n", "FG111", 1, "'lr' is not defined", None),
    ("-- set d = {'a': 1}\nb: {{ d.c }}\n", "FG111", 2, "'c' is not defined in this dict", None),
    ("-- set ns = namespace()\nb: {{ ns.c }}\n", "FG111", 2, "'c' is not defined in this namespace", None),
    ("-- macro m(a)\n{{ a }}\n-- endmacro\n{{ m() }}\n", "FG111", 4, "the macro is called without 'a'", None),
    ("-- from 's' import nope\n{{ nope() }}\n#--- s ---\nx", "FG111", 1, "'s' has no macro or variable 'nope'", None),
    ("x: 1\na: {{ [1, {'b': nope}] }}\n", "FG111", 2, "'nope' is not defined", None),
    ("[x]\na: 1\n-- if 1\nb: 2\n", "FG102", 3, "'if' is not closed before the end of the block around it", None),
    ("m:\n-- 5\n", "FG101", 2, "a statement without a name", None),
    ("-- include 'nope'\n", "FG112", 1, "there is no template 'nope'", None),
    ("x\n-- include ['a', 'b']\n", "FG112", 2, "there is no template 'a'", None),
    ("-- include 5\n", "FG112", 1, "'include' needs the name of a template and got int", None),
    ("-- include []\n", "FG112", 1, "the list of templates to choose from is empty", None),
    ("-- extends 's'\n-- extends 's'\n#--- s ---\n", "FG113", 2, "a template can extend one other only", None),
    ("-- do [].append(1)\n", "FG117", 1, "a template may not use 'append' of list", None),
    ("-- set x = {}\n-- set x.a = 1\n", "FG117", 2, "only an attribute of a namespace can be set", None),
    ("{{ (1).to_bytes(2) }}\n", "FG117", 1, "'to_bytes' of int cannot be called from a template", None),
    ("{{ ','.join([1] | map('string')) }}\n", "FG117", 1, "'join' needs a list", None),
    ("{{ isotime }}\n", "FG118", 1, "'isotime' is a function and cannot be printed", "call it: isotime\\(\\)"),
    ("-- macro m()\n-- endmacro\n{{ m }}\n", "FG118", 3, "'m' is a function", None),
    ("{{ [1] | map('string') }}\n", "FG118", 1, "a generator cannot be printed", None),
    ("-- block a required\n-- endblock\n", "FG119", 1, "the block 'a' is required", None),
    (
        "[a]\n{{ super() }}\n",
        "FG119",
        2,
        "this template has no `extends`",
        "begin with `-- extends '...'`, or remove `super()`",
    ),
    ("x: 1\n- extends 'p'\n[a]\n== super()\n", "FG119", 2, "read as text", "did you mean `-- extends 'p'`?"),
    ("[a]\n== super\n", "FG119", 2, "this template has no `extends`", None),
    ("-- set a = 'x\nb: 'c'\n", "FG101", 1, "the quote is not closed", "end the text with ' on its own line"),
    ('-- set a = 3 "\n-- set b = "c"\n', "FG101", 1, "the quote is not closed", None),
    ("-- set a = 'x'\nb: 1\n-- set c = 1 'd'\n", "FG101", 3, "found 'd'", None),
    ("-- set a = 3 2\n", "FG101", 1, "found '2' where the end of the statement was expected", None),
    ("[a]\n-- block b\nx\n[c]\ny\n", "FG102", 2, "block 'b' is not closed", "add a line `-- endblock`"),
    ("-- set n = namespace(size=1)\n{{ n.sise }}\n", "FG111", 2, "'sise' is not defined", "did you mean 'size'?"),
    (
        "-- from 's' import nope\n{{ nope }}\n#--- s ---\n-- set nopes = 1\n",
        "FG111",
        1,
        "no macro",
        "did you mean 'nopes'?",
    ),
    ("-- macro m(size)\n-- endmacro\n{{ m(sise=1) }}\n", "FG110", 3, "argument 'sise'", "did you mean 'size'?"),
    ("x\n-- include shared\n#--- shared ---\n", "FG111", 2, "'shared'", "quote the name of a template: 'shared'"),
    ("-- include a.b/c.yaml\n", "FG111", 1, "'a' is not defined", "quote the name of a template: 'a.b/c.yaml'"),
    ("-- set part = 's'\n-- include parts\n", "FG111", 2, "'parts'", "did you mean 'part'?"),
]


@pytest.mark.parametrize(("text", "code", "line", "message", "hint"), MISTAKES)
def test_a_mistake_is_one_located_error(text, code, line, message, hint):
    with pytest.raises(ForgatherError, match=message) as caught:
        render_text(ConfigEnvironment(), text)
    error = caught.value
    assert (code, "<string>", line) == (error.code, error.span.file, error.span.line)
    if hint:
        assert error.hint is not None and hint.replace("\\", "") == error.hint


@pytest.mark.parametrize("text", [mistake[0] for mistake in MISTAKES])
def test_no_message_shows_rewritten_text(text):
    with pytest.raises(ForgatherError) as caught:
        render_text(ConfigEnvironment(), text)
    shown = f"{caught.value.message} {caught.value.hint}"
    assert "Jinja" not in shown and "fg_" not in shown and "{% " not in shown and "\n" not in shown


def test_a_failure_inside_a_macro_names_the_lines_that_call_it():
    text = "-- from 'lib' import outer\nx: 1\ny: {{ outer(0) }}\n#--- lib ---\n-- macro outer(n)\n{{ inner(n) }}\n"
    text += "-- endmacro\n-- macro inner(n)\n{{ 1 // n }}\n-- endmacro\n"
    with pytest.raises(ForgatherError, match="<string>:9: ") as caught:
        render_text(ConfigEnvironment(), text)
    assert ("called at <string>:6", "called at <string>:3") == caught.value.context[1:]
