"""Hostile templates: each one ends with a located error of the budget family, before it costs anything."""

import tracemalloc

import pytest

from forgather.config.environment import Budget, ConfigEnvironment
from forgather.config.render import render_text
from forgather.errors import BudgetError, ForgatherError, RenderError, SyntaxFault

HOSTILE = {
    "nested loops": "-- for i in range(99999)\n-- for j in range(99999)\nx\n-- endfor\n-- endfor",
    "nested loops without output": "-- for i in range(99999)\n-- for j in range(99999)\n-- endfor\n-- endfor",
    "a filtered loop": "-- for i in range(99999) if false\n-- endfor\n-- for i in range(99999) if false\n-- endfor\n-- for i in range(99999) if false\n-- endfor",
    "a loop in a macro": "-- macro m()\n-- for i in range(99999)\n-- endfor\n-- endmacro\n{{ m() }}{{ m() }}{{ m() }}",
    "a loop with a large body": "-- for i in range(99999)\n" + "{{ i }}" * 200 + "\n-- endfor",
    "a loop with a large body that writes nothing": "-- for i in range(99999)\n"
    + "-- if i == 'x'\n-- endif\n" * 200
    + "-- endfor",
    "a recursive loop": "-- set t = [1, 2, 3, 4, 5, 6, 7, 8, 9]\n-- for a in t recursive\n-- if loop.depth < 9\n{{ loop(t) }}\n-- endif\n-- endfor",
    "a recursive macro": "-- macro m()\n{{ m() }}\n-- endmacro\n{{ m() }}",
    "a macro that doubles": "-- macro m(n)\n-- if n\n{{ m(n - 1) }}{{ m(n - 1) }}\n-- endif\n-- endmacro\n{{ m(40) }}",
    "a macro that doubles its argument": "-- macro m(n, x)\n-- if n\n{{ m(n - 1, [x, x]) }}\n-- else\n{{ x }}\n-- endif\n-- endmacro\n{{ m(60, [1]) }}",
    "a block that calls itself": "-- block a\n{{ self.a() }}\n-- endblock",
    "blocks that double": "\n".join(
        f"-- block b{i}\n-- if true\n{{{{ self.b{i + 1}() }}}}{{{{ self.b{i + 1}() }}}}\n-- endif\n-- endblock"
        for i in range(30)
    )
    + "\n-- block b30\n-- endblock",
    "a range that is too long": "{{ range(10**9) | length }}",
    "a chain of maps": "{{ range(99999) | map('string') | map('length') | list | length }}{{ range(99999) | map('string') | list | length }}",
    "multiplied text": "{{ 'x' * 10**9 }}",
    "multiplied list": "{{ ([0] * 10**9) | length }}",
    "multiplied from the right": "{{ 10**9 * 'x' }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "a tower": "{{ 9 ** (9 ** (9 ** 9)) }}",
    "products of large numbers": "-- set ns = namespace(x=10**4000)\n-- for i in range(1000)\n-- set ns.x = ns.x * ns.x\n-- endfor",
    "center": "{{ 'x' | center(10**9) }}",
    "center the method": "{{ 'x'.center(10**9) }}",
    "ljust": "{{ 'x'.ljust(10**9) }}",
    "rjust": "{{ 'x'.rjust(10**9) }}",
    "zfill": "{{ 'x'.zfill(10**9) }}",
    "expandtabs": "{{ '\\t'.expandtabs(10**9) }}",
    "replace": "{{ ('x' * 4000) | replace('x', 'y' * 4000) }}",
    "replace the method": "{{ ('x' * 4000).replace('x', 'y' * 4000) }}",
    "replace of nothing": "{{ ('x' * 4000).replace('', 'y' * 4000) }}",
    "translate": "{{ ('x' * 4000).translate({120: 'y' * 4000}) }}",
    "join": "{{ range(4000) | join('x' * 4000) }}",
    "join the method": "{{ ('x' * 4000).join('y' * 4000) }}",
    "indent": "{{ ('x\\n' * 4000) | indent(4000) }}",
    "wordwrap": "{{ ('x ' * 4000) | wordwrap(1, wrapstring='y' * 4000) }}",
    "tojson": "{{ ([1] * 9000) | tojson(indent=90000) }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent with a star": "{{ '%*d' % (10**9, 1) }}",
    "percent with a precision": "{{ '%.1000000000f' % 1.5 }}",
    "percent with a huge width": "{{ '%99999999999999999999d' % 1 }}",
    "percent with many fields": "{{ ('%s' * 3000) % (('x' * 3000,) * 3000) }}",
    "format": "{{ '%1000000000d' | format(1) }}",
    "format the method": "{{ '{:1000000000}'.format(1) }}",
    "format with a nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "round": "{{ 5 | round(-10**9) }}",
    "doubled text": "-- set ns = namespace(x='xxxxxxxxxx')\n-- for i in range(99)\n-- set ns.x = ns.x ~ ns.x\n-- endfor",
    "added text": "-- set ns = namespace(x='xxxxxxxxxx')\n-- for i in range(99)\n-- set ns.x = ns.x + ns.x\n-- endfor",
    "doubled list": "-- set ns = namespace(x=[1])\n-- for i in range(99)\n-- set ns.x = ns.x + ns.x\n-- endfor",
    "nested list": "-- set ns = namespace(x=[1])\n-- for i in range(99)\n-- set ns.x = [ns.x, ns.x]\n-- endfor\n{{ ns.x }}",
    "nested namespace": "-- set ns = namespace(x=1)\n-- for i in range(99)\n-- set ns = namespace(a=ns, b=ns)\n-- set ns2 = namespace(a=ns, b=ns)\n-- endfor\n"
    + "-- macro m(n, x)\n-- if n\n{{ m(n - 1, namespace(a=x, b=x)) }}\n-- else\n{{ x }}\n-- endif\n-- endmacro\n{{ m(60, 1) }}",
    "captured text that doubles": "-- set x = 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx'\n"
    + "-- set x\n{{ x }}{{ x }}\n-- endset\n" * 60,
    "a sum of lists": "{{ ([[1, 2, 3]] * 90000) | sum(start=[]) | length }}",
    "work on large text": "-- set x = 'x' * 4000000\n-- for i in range(99999)\n-- set y = x | upper\n-- endfor",
    "comparisons of large text": "-- set x = 'x' * 4000000\n-- set y = 'x' * 4000000\n-- for i in range(99999)\n-- if x == y\n-- endif\n-- endfor",
    "slices of large text": "-- set x = 'x' * 4000000\n-- for i in range(99999)\n-- set y = x[1:]\n-- endfor",
    "searches of a large list": "-- set x = range(50000) | list\n{{ x | select('in', x) | list | length }}",
    "a fraction that a range has not": "-- for i in range(2000)\n-- if 1.5 in range(99999)\n-- endif\n-- endfor",
    "large arguments of a filter": "-- set x = 'x' * 4000000\n-- for i in range(3000)\n-- set y = 'a' | replace(x, 'b')\n-- endfor",
    "output of a loop": "-- for i in range(99999)\n" + "x" * 1000 + "\n-- endfor",
    "striptags": "{{ ('<!---->' * 500000) | striptags | length }}",
    "too many tags": "{{ 1 }}" * 50_000,
    "a huge expression": "{{ [" + "1," * 200_000 + "] | length }}",
    "a huge file": "a: " + "x" * 2_000_000,
    "deep brackets": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "deep lists": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "a long sum": "{{ " + "+".join("1" * 3000) + " }}",
    "deep ifs": "-- if 1\n" * 300 + "-- endif\n" * 300,
    "deep loops": "-- for i in [1]\n" * 30 + "-- endfor\n" * 30,
    "a long int": "{{ " + "9" * 10_000 + " }}",
    "int of a long text": "{{ ('1' * 1000000) | int(base=2) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_a_located_error(name):
    with pytest.raises((BudgetError, SyntaxFault)) as caught:
        render_text(ConfigEnvironment(), HOSTILE[name])
    assert caught.value.span.file == "<string>"
    assert caught.value.code in {"FG101", "FG113", "FG120", "FG121", "FG122", "FG123", "FG124"}


@pytest.mark.parametrize("name", [name for name, source in HOSTILE.items() if "\n" not in source])
def test_one_operation_is_refused_before_anything_is_made(name):
    """A value that is measured when it is there has cost its memory already."""
    tracemalloc.start()
    try:
        with pytest.raises((BudgetError, SyntaxFault)):
            render_text(ConfigEnvironment(), HOSTILE[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 10_000_000 > peak


def test_a_sum_of_lists_is_refused_before_it_is_made():
    with pytest.raises(BudgetError, match=r"'\+' would make"):
        render_text(ConfigEnvironment(), "{{ ([0] * 150000 + [0] * 150000) | length }}")


class Held:
    def _private(self):
        return "ran"

    def public(self):
        return "ran"


def test_a_private_method_that_is_given_as_a_variable_is_not_called():
    assert "ran" == render_text(ConfigEnvironment(), "{{ f() }}", variables={"f": Held().public}).text.strip()
    with pytest.raises(RenderError, match="cannot be called from a template"):
        render_text(ConfigEnvironment(), "{{ f() }}", variables={"f": Held()._private})


def test_an_honest_loop_of_twenty_thousand_turns_is_fine():
    rendered = render_text(ConfigEnvironment(), "-- for i in range(20000)\nk{{ i }}: {{ i * 2 }}\n-- endfor\n")
    assert 20_000 == rendered.text.count("\n")


def test_the_error_is_at_the_line_that_passes_the_budget():
    with pytest.raises(BudgetError, match="would make a value of more than") as caught:
        render_text(ConfigEnvironment(), "a: 1\nb: {{ 'x' * 3 }}\nc: {{ 'x' * 10**9 }}\n")
    assert 3 == caught.value.span.line


def test_budgets_are_those_of_the_environment():
    source = "-- for i in range(20)\nx\n-- endfor\n"
    with pytest.raises(BudgetError, match="more than 10 loop turns"):
        render_text(ConfigEnvironment(budget=Budget(max_loop_turns=10)), source)
    with pytest.raises(BudgetError, match="write more than 10 characters"):
        render_text(ConfigEnvironment(budget=Budget(max_output_chars=10)), source)


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ '' | attr('__class__') }}",
    "{{ [].__class__.__mro__ }}",
    "{{ (1).to_bytes(9) }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ [].append(1) }}",
    "{{ {}.update(a=1) }}",
    "-- do {}.setdefault(1, 2)",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__ }}",
    "{{ joinpath.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ['x'] | map(attribute='__class__') | first }}",
    "{{ 'x'.encode() }}",
    "{{ lipsum() }}",
    "{{ 'x' | urlize }}",
    "{{ now().__class__ }}",
    "{{ now().fromtimestamp(0) }}",
    "{{ namespace().__init__ }}",
    "-- macro m()\n-- endmacro\n{{ m._func }}",
    "{{ joinpath }}",
    "{{ range(3) | map('string') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_reach_python(source):
    with pytest.raises((RenderError, SyntaxFault)) as caught:
        render_text(ConfigEnvironment(), source)
    assert isinstance(caught.value, ForgatherError)
    assert caught.value.span is not None
