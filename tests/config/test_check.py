import time

from documents import graph_of

from forgather.config.lint.graph_check import check_graph


def findings(text):
    return [f"{found.severity} {found.code} {found.span.line} {found.message}" for found in check_graph(graph_of(text))]


def test_a_sound_config_has_no_findings():
    text = ".lr: &lr 1\n.base: &base {x: 1}\n.none:\na: {<<: *base, lr: *lr}\nb: !calc a + seed\nc: !var seed\n"
    assert [] == findings(text)


def test_one_name_for_two_nodes():
    assert ["warning FG231 2 the name @n is given to two nodes; the first is a"] == findings("a: !list@n\nb: !dict@n\n")
    assert [] == findings("a: &a !list@n\nb: *a\n")


def test_a_definition_that_nothing_uses():
    assert ["lint FG230 1 nothing uses the definition '.lr'"] == findings(".lr: &lr 1\na: 2\n")
    assert ["lint FG230 1 nothing uses the definition '.b'"] == findings(".b: &b {x: 1}\n.c: *b\na: 2\n")[:1]


def test_a_definition_is_used_when_a_part_of_it_is():
    assert [] == findings(".parts:\n  x: &x [1]\na: *x\n")


def test_a_definition_is_used_where_every_key_that_it_brings_is_overridden():
    assert [] == findings(".base: &base {lr: 1}\na:\n  <<: *base\n  lr: 2\n")
    assert [] == findings(".p: &p {lr: 1}\n.q: &q {lr: 2}\na:\n  <<: *p\n  <<: *q\n")


def test_names_in_calc_that_the_config_does_not_have():
    text = "steps: 1\na: !calc step + steps\n"
    assert ["warning FG232 2 !calc reads 'step', which is neither a target nor a !var of this config"] == findings(text)


def test_an_expression_that_is_none():
    assert ["error FG305 1 '1 +' is not an expression"] == findings("a: !calc 1 +\n")


def test_targets_that_are_computed_from_one_another_are_one_error():
    text = "a: !calc a + 1\n"
    assert ["error FG304 1 !calc reads 'a', which is computed from it"] == findings(text)
    text = "a: {x: [!calc b]}\nb: !calc c + 1\nc: !calc a\n"
    assert ["error FG304 1 !calc reads 'b', which is computed from it (a -> b -> c -> a)"] == findings(text)


def test_a_variable_a_default_and_a_partial_make_no_circle():
    assert [] == findings("a: !calc a + 1\nb: !var a\n")
    assert [] == findings("a: !var {name: x, default: !calc a}\n")
    assert [] == findings("a: !partial:m:f {x: !calc a}\n")
    assert [] == findings("a: !calc b\nb: !calc c\nc: 1\nd: !calc a + b\n")


def test_thousands_of_targets_computed_from_one_another_are_judged_at_once():
    rows = [f"c{i}: !calc c{i + 1} + 1" for i in range(3000)]
    started = time.process_time()
    assert ["warning FG232 3000 !calc reads 'c3000', which is neither a target nor a !var of this config"] == findings(
        "\n".join(rows)
    )
    (circle,) = findings("\n".join([*rows, "c3000: !calc c0"]))
    assert circle.startswith("error FG304 1 ") and circle.count(" -> ") == 3001
    assert time.process_time() - started < 3
