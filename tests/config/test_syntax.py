import pytest

from forgather.config.syntax import desugar

LINES = [
    ("## text", "{##}"),
    ("   ## text", "{##}"),
    ("a: 1  ## text", "a: 1"),
    ("a: 1 # yaml ## text", "a: 1 # yaml"),
    ("# yaml", "# yaml"),
    ("a: b##c", "a: b##c"),
    ("it's x  ## cut", "it's x"),
    ("a: rock 'n' roll ## cut", "a: rock 'n' roll"),
    ("a: the '90s ## cut", "a: the '90s"),
    ("a: '## kept'", "a: '## kept'"),
    ('a: "## kept"  ## cut', 'a: "## kept"'),
    ("a: 'it''s ## kept' ## cut", "a: 'it''s ## kept'"),
    ('a: "x \\" ## kept" ## cut', 'a: "x \\" ## kept"'),
    ("- 'x ## kept'", "- 'x ## kept'"),
    ("a: ['x ## kept', \"## kept\"] ## cut", "a: ['x ## kept', \"## kept\"]"),
    ("a: !tag 'x ## kept'", "a: !tag 'x ## kept'"),
    ("a: &anchor 'x ## kept'", "a: &anchor 'x ## kept'"),
    ("a: {{ '## kept' }} ## cut", "a: {{ '## kept' }}"),
    ("a: {{ {'b': {'c': 1}}}} ## cut", "a: {{ {'b': {'c': 1}}}}"),
    ("a: {{ '}}' }} ## cut", "a: {{ '}}' }}"),
    ("a: \"{{ x['## kept'] }}\" ## cut", "a: \"{{ x['## kept'] }}\""),
    ("{# ## kept #} ## cut", "{# ## kept #}"),
    ("{% set x = '## kept' %} ## cut", "{% set x = '## kept' %}"),
    ("-- if x", "{% if x %}"),
    ("    -- if x  ## text", "{% if x %}"),
    ("-- set x = '## kept' ## cut", "{% set x = '## kept' %}"),
    ('-- set x = "it\'s" ## cut', '{% set x = "it\'s" %}'),
    ("<< endif", "{%- endif %}"),
    (">> endif", "{% endif -%}"),
    ("== x", "{{ x }}"),
    ("    == super()", "{{ super() }}"),
    ("=> x | f", "{{ (x | f) | trim('\\n') }}"),
    ("== {'a': 1}", "{{ {'a': 1} }}"),
    ("-- ## only a comment", "{##}"),
    ("<<: *anchor", "<<: *anchor"),
    ("    <<: [*a, *b]", "    <<: [*a, *b]"),
    ("--", "--"),
    ("---", "---"),
    ("--x", "--x"),
    ("-- include 'x'", "{% include 'x' +%}"),
    ("{% include 'x' %}", "{% include 'x' +%}"),
    ("{% include 'x' -%}", "{% include 'x' -%}"),
    ("a: \"{% include 'v' %}\"", "a: \"{% include 'v' %}\""),
    ("[1]", "[1]"),
    ("[a, b]", "[a, b]"),
    ("[a] x", "[a] x"),
    ("- [a]", "- [a]"),
    ("[a-b]", "[a-b]"),
    ("[]", "[]"),
    ("[name]", "{% block name %}{% endblock name %}"),
    ("  [name]  ## text", "{% block name %}{% endblock name %}"),
    ("[name!]", "{% block name -%}{%- endblock name %}{{ '\\n' }}"),
    ("-- block name required", "{% block name required %}"),
]
TEXTS = {
    "a block ends at the next of the same indent": (
        "[a]\nx\n[b]\ny\n",
        "{% block a %}\nx\n{% endblock a %}{% block b %}\ny\n{% endblock b %}",
    ),
    "a deeper block is inside": (
        "[a]\nx\n  [b]\n  y\n[c]\nz",
        "{% block a %}\nx\n{% block b %}\n  y\n{% endblock b %}{% endblock a %}{% block c %}\nz{% endblock c %}",
    ),
    "a block ends before the end of what stands around it": (
        "-- if x\n[a]\n-- else\n[b]\n-- endif\nrest",
        "{% if x %}\n{% block a %}\n{% endblock a %}{% else %}\n{% block b %}\n{% endblock b %}{% endif %}\nrest",
    ),
    "also where that end stands in a line": (
        "{% if x %}\n[a]\ny {% endif %}",
        "{% if x %}\n{% block a %}\ny {% endblock a %}{% endif %}",
    ),
    "what opens inside a block closes inside": (
        "[a]\n-- for i in x\ny\n-- endfor\n-- set s\nz\n-- endset\n-- set t = 1\n[b]",
        "{% block a %}\n{% for i in x %}\ny\n{% endfor %}\n{% set s %}\nz\n{% endset %}\n{% set t = 1 %}\n{% endblock a %}{% block b %}{% endblock b %}",
    ),
    "an if inside a block holds its own blocks": (
        "[a]\n-- if x\n[b]\n-- endif\n",
        "{% block a %}\n{% if x %}\n{% block b %}\n{% endblock b %}{% endif %}\n{% endblock a %}",
    ),
    "endblock may close a bracket block": ("[a]\nx\n-- endblock a\nrest", "{% block a %}\nx\n{% endblock a %}\nrest"),
    "endblock closes the statement first": (
        "-- block o\n[a]\nx\n-- endblock\nrest",
        "{% block o %}\n{% block a %}\nx\n{% endblock a %}{% endblock %}\nrest",
    ),
    "raw switches everything off": (
        "{% raw %}\n-- if\n## x\n[a]\n{% endraw %}\n## y",
        "{% raw %}\n-- if\n## x\n[a]\n{% endraw %}\n{##}",
    ),
    "raw in the spelling of lines": (
        "-- raw\n-- if\n## x\n-- endraw\n## y",
        "{% raw %}\n-- if\n## x\n{% endraw %}\n{##}",
    ),
    "lines inside an open tag are left alone": ("{{ a +\n-- b\n## c\n}} ## cut", "{{ a +\n-- b\n## c\n}}"),
    "a comment over lines is left alone": ("{# a\n-- b\n[c]\n#}\n-- if", "{# a\n-- b\n[c]\n#}\n{% if %}"),
    "brackets carry a statement over lines": ("-- set x = [\n  1,  ## one\n  2]\ny", "{% set x = [\n  1,\n  2] %}\ny"),
    "a bracket that is never closed stays on its line": ("-- set x = [\ny: 1\n", "{% set x = [ %}\ny: 1\n"),
    "a quoted text over lines keeps its marks": (
        "k: 'a\n  ## kept\n  b' ## cut\nz ## cut",
        "k: 'a\n  ## kept\n  b'\nz",
    ),
    "a quote that never closes is none": ("k: 'a\n-- if x ## cut\nz ## cut", "k: 'a\n{% if x %}\nz"),
}


@pytest.mark.parametrize(("written", "becomes"), LINES)
def test_a_line(written, becomes):
    assert becomes == desugar(written)


@pytest.mark.parametrize("name", TEXTS)
def test_a_text(name):
    written, becomes = TEXTS[name]
    assert becomes == desugar(written)
    assert written.count("\n") == becomes.count("\n")
