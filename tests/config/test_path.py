import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.config.path import Index, Key, format_path, parse_path
from forgather.errors import GraphError

STEPS = st.one_of(
    st.integers(0, 10**6).map(Index),
    st.text(min_size=0, max_size=12).map(Key),
    st.sampled_from(["a", "args", "in.proj", "it's", "[", "]", "=", " ", "\\", "key 1", "0", ".d", "\n"]).map(Key),
    st.one_of(st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False)).map(Key),
    st.tuples(st.text(max_size=3), st.integers()).map(Key),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=6).map(tuple))
def test_a_path_formatted_and_parsed_is_itself(path):
    parsed = parse_path(format_path(path))
    assert path == parsed
    assert [repr(step) for step in path] == [repr(step) for step in parsed]


@pytest.mark.parametrize("text", ["", "a.", "a..b", "a b", "a[", "a[x]", "a['x]", "1a", "a.1", "a[-1]", "[1]b"])
def test_what_is_no_path_says_from_which_column_on(text):
    with pytest.raises(GraphError, match=r"\[FG310\]"):
        parse_path(text)


def test_the_column_is_named():
    with pytest.raises(GraphError) as caught:
        parse_path("a.b..c")
    assert (
        "[FG310] 'a.b..c' is not a graph path: cannot read it from column 4 (write it as trainer.args.lr or "
        "callbacks[2].prompts[0])" == str(caught.value)
    )
