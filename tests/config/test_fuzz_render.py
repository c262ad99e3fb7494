"""Any text gives a rendering or a located error; rewriting keeps lines."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgather.config.environment import Budget, ConfigEnvironment
from forgather.config.render import render_text
from forgather.config.split import split
from forgather.config.syntax import desugar
from forgather.errors import ForgatherError

PIECES = st.sampled_from(
    """-- if x|-- endif|-- else|-- elif y|-- for i in [1, 2]|-- endfor|-- block a|-- endblock|-- endblock a|[a]|[b]|[c!]|  [d]|-- set x = 1|
-- set y|-- endset|== x|=> x | trim|== super()|<< if 1|>> endif|## gone|a: 1  ## cut|b: "## kept"|it's x ## c|{{ x }}|{{|}}|{%|%}|{#|#}|{% raw %}|
{% endraw %}|-- raw|-- endraw|#--- sub ---|-- include 'sub'|-- extends 'sub'|-- import 'sub' as s|-- macro m(a)|{{ m(1) }}|-- endmacro|
-- call m(1)|-- endcall|-- filter indent(2)|-- endfilter|-- do 1|-- break|-- continue|-- with z = 1|-- endwith|{{ [1, 2] | join }}|{{ 'x' * 3 }}|
-- set q = [|1]|{{ "a|'|"|\\|<<: *a|- x|k: v|    deep: 1|{{ loop.index }}|{{ self.a() }}|{{ x.y.z }}|{{ x['y'] }}|-- |--|==|{{ 1 if }}|{% include 'sub' %}|
-- block r required|-- include 'no' ignore missing|{{ namespace(a=1).a }}|-- set ns.a = 1|-- set (a, b) = x|-- if (|)|\u2028|\x00|\r|{{ caller() }}""".replace(
        "\n", ""
    ).split("|")
)
TEXTS = st.lists(PIECES | st.text(max_size=8), max_size=14).map("\n".join) | st.lists(PIECES, max_size=10).map("".join)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
SMALL = ConfigEnvironment(budget=Budget(max_loop_turns=500))


@SETTINGS
@given(TEXTS | st.text(alphabet="-<>=#[]{}%'\" \nab:|()", max_size=60))
def test_rewriting_keeps_the_line_count(text):
    assert text.count("\n") == desugar(text).count("\n")


@SETTINGS
@given(TEXTS)
def test_any_text_gives_a_rendering_or_a_located_error(text):
    try:
        rendered = render_text(SMALL, text, variables={"x": "v", "y": [1, {"z": 2}]})
    except ForgatherError as error:
        assert error.span is not None
        assert 1 <= error.span.line <= text.replace("\r\n", "\n").replace("\r", "\n").count("\n") + 1
        assert error.code.startswith("FG1")
        return
    for line, origin in rendered.source_map.lines():
        assert not line.strip() or origin.sites


@SETTINGS
@given(
    st.lists(
        st.sampled_from(["#--- a ---", "# --- b/c.d ----", "#---x---", "text", "", "{% raw %}", "{% endraw %}"])
    ).map("\n".join)
)
def test_the_parts_of_a_file_know_their_lines(text):
    lines = text.split("\n")
    for part in split(text):
        own = part.text.split("\n")
        assert own[: len(own) - 1] == lines[part.line - 1 : part.line - 1 + len(own) - 1]
