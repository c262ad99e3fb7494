"""Bombs and escapes in templates and YAML: each one is a located error, for little time and memory."""

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.errors import ForgatherError
from forgather.redaction import hide, note_secrets, remember
from tests.measured import measured


def loop(statement, setting=""):
    return f"{setting}-- for i in range(99999)\n-- set y = {statement}\n-- endfor\nmain: 1\n"


TEXT = "-- set x = ('ab ' * 1500000) | safe\n"
ITEMS = "-- set x = [1] * 99999\n"
NUMBER = "-- set x = 10 ** 3500 + 7\n-- set z = 10 ** 1700 + 3\n"
TEMPLATES = {
    **{
        f"{kind}.{method}": f"main: {{{{ ('x' | {made}).{call} }}}}"
        for kind, made in (("safe", "safe"), ("escaped", "e"), ("string", "string"))
        for method, call in {
            "center": "center(3 * 10**9)",
            "ljust": "ljust(3 * 10**9)",
            "rjust": "rjust(3 * 10**9)",
            "zfill": "zfill(3 * 10**9)",
            "format": "format(1, '{:3000000000}'.format(1))",
            "replace": "replace('x', 'y' * 4000000).replace('y', 'z' * 4000000)",
            "join": "join('y' * 4000000).join('z' * 4000000)",
            "translate": "join('y' * 100000).translate({120: 'z' * 100000})",
        }.items()
    },
    "safe.expandtabs": "main: {{ ('\\t' | safe).expandtabs(3 * 10**8) }}",
    "safe % wide": "main: {{ ('%3000000000d' | safe) % 1 }}",
    "safe.format, wide": "main: {{ ('{:3000000000}' | safe).format(1) }}",
    "safe.striptags": "main: {{ (('<!---->' * 500000) | safe).striptags() }}",
    "safe.unescape": loop("x.unescape()", TEXT),
    "safe.split": TEXT + "main: {{ x.split() | length }}\n",
    "safe.splitlines": "main: {{ (('a\\n' * 2000000) | safe).splitlines() | length }}",
    "split again and again": "-- set x = 'ab ' * 1500000\nmain: {{ [" + "x.split(), " * 40 + "] | length }}",
    "rsplit": "main: {{ ('a,' * 2000000).rsplit(',') | length }}",
    "characters of a text": "main: {{ ('a' * 4000000) | list | length }}",
    "a float in a range": "-- for i in range(99999)\n-- if 1.5 in range(99999)\n-- endif\n-- endfor\nmain: 1\n",
    "a text in a range": "-- for i in range(99999)\n-- if 'a' not in range(99999)\n-- endif\n-- endfor\nmain: 1\n",
    "a range, asked by a test": "-- for i in range(99999)\n-- if 1.5 is in range(99999)\n-- endif\n-- endfor\nmain: 1\n",
    "a range, asked by a filter": "main: {{ range(99999) | map('float') | select('in', range(99999)) | list | length }}",
    "count of a range": loop("range(99999).count(1.5)"),
    "count of a list": loop("x.count(2)", ITEMS),
    "an item in a list": loop("2 in x", ITEMS),
    "lists compared": loop("x < z", ITEMS + "-- set z = [1] * 99999\n"),
    "a slice": loop("x[1:]", ITEMS),
    "many arguments": "-- for i in range(99999)\n-- set y = cycler(*range(99999))\n-- endfor\nmain: 1\n",
    "many names": "-- set d = dict(range(999) | map('string') | batch(1))\n",
    "a large number divided": loop("x // z", NUMBER),
    "a large number as a fraction": loop("x / (x + 1)", NUMBER),
    "a large number subtracted": loop("x - z", NUMBER),
    "a large number printed": f"{NUMBER}-- for i in range(99999)\n{{{{ x }}}}\n-- endfor\n",
    "a large number as a text": loop("x | string", NUMBER),
    "a large number joined": loop("x ~ ''", NUMBER),
    "a large number in a format": loop("'%d' % x", NUMBER),
    "a large number in a field": loop("'{}'.format(x)", NUMBER),
    "a large number rounded": loop("x | round(-900)", NUMBER),
    "large powers": loop("7 ** 4000"),
    "paths": loop("joinpath(x, x, x)", TEXT),
    "a path's suffix": loop("splitext(x)", "-- set x = '.' * 4000000\n"),
    "a relative path": loop("relpath(x)", "-- set x = 'a/' * 1000000\n"),
    "words counted": loop("x | wordcount", TEXT),
    "words as titles": loop("x | title", TEXT),
    "a text for a URL": "main: {{ ('ü' * 4900000) | urlencode | urlencode }}",
    "nested lists compared": "-- set n = namespace(a=[], b=[])\n-- for i in range(60)\n-- set n.a = [n.a, n.a]\n"
    "-- set n.b = [n.b, n.b]\n-- endfor\nmain: {{ n.a == n.b }}\n",
    "a nested key": "-- set n = namespace(a=())\n-- for i in range(60)\n-- set n.a = (n.a, n.a)\n-- endfor\n{{ {n.a: 1} }}\n",
}  # fmt: skip
ESCAPES = {
    "the class behind safe": "main: {{ ('x' | safe).__class__ }}",
    "a class method of safe": "main: {{ ('x' | safe).escape('<') }}",
    "html of safe": "main: {{ ('x' | safe).__html__() }}",
    "a format that reads an attribute": "main: {{ ('{0.__class__}' | safe).format(1) }}",
    "a format that reads an item's attribute": "main: {{ '{0[0].__class__.__mro__}'.format([1]) }}",
    "the globals of a global": "main: {{ joinpath.__globals__ }}",
    "the code of a macro": "-- macro m()\n-- endmacro\nmain: {{ m._func.__code__ }}",
    "the method of a clock": "main: {{ now().__reduce__() }}",
    "the maker of a clock": "main: {{ now().fromisoformat('2020-01-01') }}",
    "an attribute by a filter": "main: {{ ['x'] | map(attribute='__class__.__mro__') | list }}",
    "an attribute by sorting": "main: {{ [1, 2] | groupby('__class__') | list }}",
    "the environment of a loop": "-- for i in [1]\n{{ loop._iterator.gi_frame }}\n-- endfor",
    "the context of a block": "-- block a\n{{ self._TemplateReference__context.environment }}\n-- endblock",
    "bytes": "main: {{ 'x'.encode().center(3 * 10**9) }}",
    "a number as bytes": "main: {{ (1).to_bytes(3 * 10**9) }}",
    "the namespace's inside": "main: {{ namespace()._Namespace__attrs }}",
    "a mapping that changes": "-- do versions.update(a=1)\nmain: 1",
    "a file outside": "-- include '/etc/passwd'\n",
    "a file above": "-- include '../../etc/passwd'\n",
    "a device": "-- include 'dev/../../dev/zero'\n",
}
DEEP = 5000
YAML = {
    "doubling aliases": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
    "doubling merges": "a0: &a0 {x0: 1}\n"
    + "".join(f"a{i}: &a{i} {{x{i}: 1, <<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 400)),
    "deep brackets": "a: " + "[" * DEEP + "]" * DEEP,
    "deep braces": "a: " + "{a: " * DEEP + "1" + "}" * DEEP,
    "deep indents": "\n".join(" " * i + "a:" for i in range(400)),
    "deep sequences": "a: \n" + "- " * DEEP + "1",
    "many values": "a:\n" + "- 1\n" * 240_000,
    "many keys": "".join(f"k{i}: 1\n" for i in range(45_000)) + "a: [" + "1," * 60_000 + "]",
    "a long number": "a: " + "9" * 100_000,
    "a long hexadecimal number": "a: 0x" + "f" * 100_000,
    "brackets that never close": "a: " + "[[1, 2], " * 40_000,
    "a quote that never closes": "a: '" + "x\n" * 200_000,
    "braces that never close": "a: " + "{" * 100_000,
    "many anchors": "".join(f"a{i}: &a{i} 1\n" for i in range(30_000)) + "b: [" + "*a1," * 90_000 + "]",
    "a cycle": "a: &a [*a]",
    "a cycle of two": "a: &a {b: &b {c: *a, d: *b}}",
    "a Python object": "a: !!python/object/apply:os.system [touch x]",
    "a Python name": "a: !!python/name:os.system",
    "a tag of a document": "%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system",
    "a second document": "a: 1\n---\nb: 2",
    "many question marks": "a: " + "? " * DEEP + "x",
    "many tags": "a: " + "!x " * DEEP,
    "a long name of a constructor": "a: !call:b:" + "c." * 20_000 + "d",
    "a long name of a module": "a: !call:" + "b." * 20_000 + "c:d",
    "a long name of a node": "a: !call:dict@" + "n" * 100_000,
    "a brackets-only key": "? " + "[" * DEEP + "]" * DEEP + "\n: 1",
    "a flow text behind a colon, unread by one parser": "a: [12:30, " + "[" * DEEP,
}


def outcome(text):
    try:
        load(render_text(ConfigEnvironment(), text))
    except ForgatherError as error:
        return error.code, error.span.file if error.span else None, error.span.line if error.span else 0
    return None


@pytest.mark.parametrize("name", [*TEMPLATES, *ESCAPES, *YAML])
def test_a_hostile_text_is_a_located_error_for_little(name):
    text = {**TEMPLATES, **ESCAPES}.get(name) or "{% raw %}" + YAML[name] + "{% endraw %}"
    cost = measured(outcome, text)

    assert cost.result is not None, "it was taken for an honest text"
    code, file, line = cost.result
    assert ("<string>", True) == (file, 1 <= line <= text.count("\n") + 1)
    assert cost.is_small, (code, cost.cpu_seconds, cost.peak_bytes)


SHOWN = {
    "names": "token" * 200_000, "blanks": "password:" + " " * 500_000 + "x", "brackets": "api_key: [" * 50_000,
    "backslashes": "password: " + "\\" * 500_000, "quotes": "password: '" * 50_000, "users": "a" * 500_000 + "://@",
    "schemes": "://" * 200_000 + "@", "lines": "password:\n" * 50_000, "dots": "SECR..." * 50_000,
    "blocks": "secret: |\n  a\n" * 30_000, "options": "--api-key " * 50_000, "parts": "secrets:\n  " + "\\" * 300_000,
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_the_time_that_it_takes_to_hide_grows_with_the_text_alone(name):
    cost = measured(hide_all, SHOWN[name])
    assert cost.is_small, (cost.cpu_seconds, cost.peak_bytes)


def hide_all(text):
    remember("SECRETtok")
    note_secrets(text)
    return len(hide(text, is_document=True))
