import time

import pytest
from documents import graph_of, hazards

BASE = """args:
-- block args
    lr: 1e-3
    sched: linear
    extra:
-- endblock
prompts:
-- block prompts
    - a b
    - "c"
-- endblock
last:
-- block last
    - plain
-- endblock
"""


@pytest.fixture
def found(tmp_path):
    def run(*lines, **files):
        files.setdefault("base", BASE)
        lines = hazards(tmp_path, main="\n".join(("-- extends 'base.yaml'", *lines, "")), **files)
        return [line.rpartition(" (")[0] for line in lines]

    return run


SUPER = "    == super()"


@pytest.mark.parametrize("blanks", [5, 6])
def test_a_line_after_super_that_became_a_child_of_an_inherited_key(found, blanks):
    text = f"main.yaml:4: warning[FG221]: 'steps', indented by {blanks}, becomes a child of 'extra' (base.yaml:5), indented by 4"
    assert [text] == found("[args]", SUPER, " " * blanks + "steps: 1")


def test_a_line_before_super_that_took_in_the_inherited_lines(found):
    text = (
        "main.yaml:3: warning[FG221]: 'steps', indented by 3, becomes the parent of 'lr' (base.yaml:3), indented by 4"
    )
    assert [text] == found("[args]", "   steps:", SUPER)


def test_a_line_after_an_include_that_became_a_child_of_its_last_key(found):
    text = "main.yaml:4: warning[FG221]: 'steps', indented by 5, becomes a child of 'w' (part.yaml:2), indented by 4"
    assert [text] == found("[args]", "    -- include 'part.yaml'", "     steps: 1", part="    k: v\n    w:\n")


@pytest.mark.parametrize("blanks", [3, 5])
def test_the_childs_line_is_named_whether_it_stands_before_or_after_the_inherited_ones(found, blanks):
    line = " " * blanks + "steps: 1"
    before = f"main.yaml:3: [FG201] 'steps' is indented by {blanks}, its neighbour 'lr' (base.yaml:3) by 4"
    after = f"main.yaml:4: [FG201] 'steps' is indented by {blanks}, its neighbour 'extra' (base.yaml:5) by 4"
    assert [before] == found("[args]", line, SUPER)
    if blanks == 3:
        assert [after] == found("[args]", SUPER, line)


def test_an_item_with_another_indent_than_the_inherited_ones(found):
    text = "main.yaml:{}: [FG201] '- new' is indented by {}, its neighbour '- {}' (base.yaml:{}) by 4"
    assert [text.format(4, 5, '"c"', 10)] == found("[prompts]", SUPER, "     - new")
    assert [text.format(4, 3, '"c"', 10)] == found("[prompts]", SUPER, "   - new")
    assert [text.format(3, 5, "a b", 9)] == found("[prompts]", "     - new", SUPER)


def test_an_item_that_was_folded_into_the_text_above_it(found):
    message = "main.yaml:4: warning[FG221]: '- new', indented by 5, is part of the text above it ({}), indented by 4"
    assert [message.format("base.yaml:14")] == found("[last]", SUPER, "     - new")
    assert [message.format("main.yaml:3")] == found("[last]", "    - old", "     - new")
    message = (
        "main.yaml:3: warning[FG221]: '- new', indented by 3, continues with '- plain' (base.yaml:14), indented by 4"
    )
    assert [message] == found("[last]", "   - new", SUPER)


def test_texts_of_several_lines_with_dashes_are_fine(found):
    assert [] == found("[last]", "    - a - b", "      c - d", "    - |", "      - x", '    - "- y', '      - z"')


def test_deeper_lines_and_documents_of_one_blank_are_fine(found):
    assert [] == found("[args]", SUPER, "    more:", "      a: 1", "    most:", "        b: 1")
    assert [] == found(base="a:\n b:\n  c: 1\nd:\n e:\n  f: 1\n")


def test_blanks_before_a_statement_move_the_line_behind_it(tmp_path):
    lines = ("args:", "    new: 1", "    {% if true %}", "    more: 1", "    {% endif %}", "")
    (text,) = hazards(tmp_path, main="\n".join(lines))
    assert text == (
        "main.yaml:4: [FG201] 'more' is indented by 8, its neighbour 'new' (main.yaml:2) by 4 "
        "(the spaces before '{% if true %}' indent the text after it: begin '{% if true %}' at column 0)"
    )


def test_thousands_of_findings_are_made_at_once():
    started = time.process_time()
    rows = 20_000
    graph = graph_of("x:\n" + "".join(f"  k{i}: 10k\n" for i in range(rows)))
    assert rows == len(graph.diagnostics)
    assert time.process_time() - started < 5
