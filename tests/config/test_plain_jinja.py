"""Contract: the traced text is the text of plain Jinja, and every line of it knows a line that can have written it."""

import pytest
from jinja2 import DictLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render
from forgather.config.syntax import desugar

BASE = """-- set lr = 3
main:
  [model]
    kind: {{ kind | default('llama') }}
    layers: 2
  -- block optimizer
    lr: {{ lr }}
    wd: 0
  -- endblock optimizer
    tail: 1
"""
CASES = {
    "literal": {"main": "a: 1\nb: 2\n"},
    "expression": {"main": "a: {{ 1 + 2 }}\nb: {{ 'x' ~ 3 ~ none }}\n"},
    "extends": {"main": "-- extends 'base'\n[optimizer]\n    == super()\n    lr: 1\n", "base": BASE},
    "super twice": {"main": "-- extends 'base'\n[optimizer]\n    == super()\n    == super()\n", "base": BASE},
    "super indent": {"main": "-- extends 'base'\n[optimizer]\n== super() | indent(4)\n    q: 1\n", "base": BASE},
    "super trim replace": {
        "main": "-- extends 'base'\n[optimizer]\n    => super() | trim | replace('wd', 'weight_decay')\n",
        "base": BASE,
    },
    "super of super": {
        "main": "-- extends 'middle'\n[optimizer]\n== super()\n== super.super()\n",
        "middle": "-- extends 'base'\n[optimizer]\n== super()\n    eps: 1\n",
        "base": BASE,
    },
    "super captured": {
        "main": "-- extends 'base'\n[optimizer]\n-- set s = super()\n== s\n== s | replace('lr', 'rate')\n",
        "base": BASE,
    },
    "set block": {
        "main": "-- set body\nx: 1\ny: 2\n-- endset\n== body\nz:\n  == body | indent(2)\n  == body | indent(2, true)\n"
    },
    "set block with filter": {"main": "-- set body | upper\nx: 1\n-- endset\n== body\n"},
    "filters": {
        "main": "-- set body\n  x: 1\n\n  y: two words\n-- endset\n"
        "{{ body | trim }}|{{ body | title }}|{{ body | upper }}|{{ body | replace('x', 'zz') }}|{{ body | length }}|"
        "{{ body | wordwrap(5) }}|{{ body | center(40) }}|{{ body | truncate(5) }}|{{ body | tojson }}|{{ body | int }}|"
        "{{ body | list | length }}|{{ body | reverse }}|{{ body | first }}|{{ body[2:4] }}|{{ body[0] }}|{{ body[::2] }}|"
        "{{ body | indent(3, true, true) }}|{{ body | string }}|{{ body | e }}|{{ body | striptags }}|{{ body | safe }}\n"
    },
    "methods": {
        "main": "-- set body\n  x: 1\n y: 2\n-- endset\n"
        "{{ body.strip() }}|{{ body.split() | join('+') }}|{{ body.upper() }}|{{ body.replace('x', 'q') }}|"
        "{{ body.splitlines() }}|{{ ','.join(['a', 'b']) }}|{{ '{}-{a}'.format(1, a=body) }}|{{ '%s!' % body }}|"
        "{{ body + 'x' }}|{{ body * 2 }}|{{ body ~ body }}|{{ body.startswith(' ') }}|{{ '%5d' | format(3) }}\n"
    },
    "macro": {
        "main": "-- macro m(a, b=2)\n{{ a }}: {{ b }}\n-- endmacro\n== m('x')\n== m('y', b=3) | trim\n-- set c = m('z')\n== c\n"
    },
    "call": {
        "main": "-- macro wrap(n)\nbegin {{ n }}\n{{ caller(n) }}end\n-- endmacro\n-- call(k) wrap(3)\nbody {{ k }}\n-- endcall\n"
    },
    "import": {
        "main": "-- import 'lib' as lib\n-- from 'lib' import two as deux\n== lib.one(1)\n== deux()\n{{ lib.value }}\n",
        "lib": "-- set value = 5\n-- macro one(x)\none: {{ x }}\n-- endmacro\n-- macro two()\ntwo: {{ value }}\n-- endmacro\n",
    },
    "import with context": {
        "main": "-- set q = 4\n-- import 'lib' as lib with context\n== lib.one()\n",
        "lib": "-- macro one()\none: {{ q }}\n-- endmacro\n",
    },
    "include": {
        "main": "-- set v = 1\na:\n  -- include 'part'\n-- include 'part'\nb: \"{% include 'part' %}\"\n",
        "part": "k: {{ v }}\n",
    },
    "include without context": {"main": "a:\n-- include 'part' without context\n", "part": "k: 1\nz: 2\n"},
    "include missing": {
        "main": "a: 1\n-- include 'nope' ignore missing\n-- include ['nope', 'part']\n",
        "part": "k: 1\n",
    },
    "loops": {
        "main": "-- for k, v in {'a': 1, 'b': 2}.items()\n{{ loop.index }}/{{ loop.length }} {{ k }}: {{ v }}{{ ',' if not loop.last }}\n"
        "-- else\nnone\n-- endfor\n-- for x in [] if x\n-- else\nempty: 1\n-- endfor\n"
        "-- for x in range(5) if x % 2\n{{ x }} {{ loop.cycle('p', 'q') }} {{ loop.previtem }}\n-- endfor\n".replace(
            " {{ loop.previtem }}", ""
        )
    },
    "loop controls": {
        "main": "-- for x in range(9)\n-- if x == 2\n-- continue\n-- endif\n-- if x > 4\n-- break\n-- endif\nx{{ x }}: 1\n-- endfor\n"
    },
    "recursive loop": {
        "main": "-- set tree = [{'n': 'a', 'c': [{'n': 'b', 'c': []}]}, {'n': 'd', 'c': []}]\n"
        "-- for item in tree recursive\n{{ item.n }}:\n  {{ loop(item.c) | indent(2) }}\n-- endfor\n"
    },
    "namespace": {
        "main": "-- set ns = namespace(a=1)\n-- for i in range(3)\n-- set ns.a = ns.a + i\n-- endfor\na: {{ ns.a }}\n"
    },
    "self block": {
        "main": "-- block greet\nhi: 1\n-- endblock greet\n-- block other\nagain: 2\n-- endblock\nx:\n{{ self.greet() }}\n"
    },
    "scoped block": {"main": "-- for i in range(2)\n-- block row scoped\nr{{ i }}: 1\n-- endblock\n-- endfor\n"},
    "filter block": {
        "main": "-- filter indent(2, true)\na: 1\nb: {{ 2 }}\n-- endfilter\n-- filter upper\nq\n-- endfilter\n"
    },
    "with": {"main": "-- with a = 1, b = 2\nx: {{ a + b }}\n-- endwith\n"},
    "do": {"main": "-- do 1 + 1\nx: 1\n"},
    "dynamic extends": {
        "main": "-- set which = 'base'\n-- if which\n-- extends which\n-- endif\n[model]\n    x: 1\n",
        "base": BASE,
    },
    "bracket trim": {"main": "-- extends 'base'\n[model!]\n\n   x: 1\n\n[optimizer]\n    lr: 2\n", "base": BASE},
    "raw": {"main": "{% raw %}\n## kept {{ x }}\n-- if\n{% endraw %}\nb: 1 ## cut\n"},
    "trims": {"main": "a: 1\n<< set x = 1\nb: 2\n>> set y = 2\n\n   c: {{ x }}\n=> '\\nq\\n'\nz: 1\n"},
    "groupby": {
        "main": "-- for g, items in [{'k': 1, 'v': 'a'}, {'k': 1, 'v': 'b'}, {'k': 2, 'v': 'c'}] | groupby('k')\n{{ g }}: {{ items | map(attribute='v') | join(', ') }}\n-- endfor\n"
    },
    "chains": {
        "main": "{{ [3, 1, 2] | sort | map('string') | join('-') }} {{ ['a', 'b'] | map('upper') | list }} {{ [1, 2] | sum }} {{ [1, none] | select | list }} {{ {'b': 1, 'a': 2} | dictsort }}\n"
    },
    "tests": {
        "main": "{{ 1 is odd }} {{ x is defined }} {{ 'a' in ['a'] }} {{ 3 is divisibleby 3 }} {{ [1, 2] is sequence }} {{ 2 is in [1, 2] }} {{ 'abc' is string }}\n"
    },
    "conditional": {"main": "a: {{ 1 if x is defined else 2 }}\nb: {{ 'q' if false }}\n"},
    "join of captured": {"main": "-- set a\nx: 1\n-- endset\n-- set b\ny: 2\n-- endset\n{{ [a, b] | join('\\n') }}\n"},
    "blanks at the ends": {"main": "\n\n  a: 1\n\n\n"},
    "no newline at the end": {"main": "a: 1"},
    "unicode": {
        "main": "a: \u00e9\u2028x\nb: {{ '\U0001f600' }}\n-- set t\n\u2028 z\n-- endset\n{{ t | indent(3) }}\n"
    },
    "nested captures": {
        "main": "-- macro m()\n-- set s\ninner: {{ v }}\n-- endset\n{{ s }}\n-- endmacro\n-- set v = 1\n-- set outer\n{{ m() }}\n-- endset\n== outer | indent(2)\n"
    },
}


def plain(templates):
    environment = ImmutableSandboxedEnvironment(
        loader=DictLoader({name: desugar(text) for name, text in templates.items()}),
        undefined=StrictUndefined,
        trim_blocks=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"],
    )
    return environment.get_template("main").render()


@pytest.fixture
def traced(tmp_path):
    def run(templates):
        for name, text in templates.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")

    return run


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_that_of_plain_jinja(name, traced):
    assert plain(CASES[name]) == traced(CASES[name]).text


@pytest.mark.parametrize("name", CASES)
def test_every_line_has_an_origin_in_a_line_that_exists(name, traced):
    rendered = traced(CASES[name])
    assert rendered.text == rendered.source_map.text
    for line, origin in rendered.source_map.lines():
        if line.strip():
            for site in (*origin.sites, *origin.sets):
                source = rendered.sources[site.span.file]
                assert 1 <= site.span.line <= source.text.count("\n") + 1


@pytest.mark.parametrize(
    "name", ["extends", "set block", "include", "super indent", "super trim replace", "macro", "nested captures"]
)
def test_literal_text_is_mapped_to_the_line_that_holds_it(name, traced):
    rendered = traced(CASES[name])
    for line, origin in rendered.source_map.lines():
        word = line.split(":")[0].strip()
        if word and not origin.approximate and not word.startswith("weight"):
            source = rendered.sources[origin.span.file].line(origin.span.line)
            assert word in source or "{{" in source
