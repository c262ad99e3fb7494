import pytest
from documents import graph_of, origin, rendered

from forgather.config.graph import Calc, Call, CallKind, ContainerKind, Env, Mapped, Scalar, Sequence, Var, describe
from forgather.config.load import load, load_value
from forgather.errors import LoadError, Severity
from forgather.source import Span


def plain(node):
    """A node as Python values, calls as tuples."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    if isinstance(node, Mapped):
        return {entry.key: plain(entry.value) for entry in node.entries}
    if isinstance(node, Call):
        return [plain(arg) for arg in node.args], {entry.key: plain(entry.value) for entry in node.kwargs}
    return node


def value(text):
    return plain(graph_of(text).targets["a"].value)


def load_with(text, writers):
    return load(rendered(text, writers))


def findings(graph):
    return [(finding.code, str(finding.severity), finding.message) for finding in graph.diagnostics]


# plain YAML


def test_root_keys_are_targets_in_order_and_dotted_ones_are_definitions():
    graph = graph_of("b: 1\n.d: 2\na: 3\n.d: 4\n")
    assert ["b", "a"] == list(graph.targets)
    assert [(".d", 2), (".d", 4)] == [(entry.key, plain(entry.value)) for entry in graph.definitions]


def test_every_node_and_key_knows_its_place():
    entry = graph_of("a: 1\nb:\n  c: [x,\n    y]\n").targets["b"]
    inner = entry.value.entries[0]
    assert Span("/project/t.yaml", 2) == entry.span
    assert Span("/project/t.yaml", 3) == inner.span
    assert [3, 4] == [item.span.line for item in inner.value.items]


def test_an_alias_is_the_node_itself_and_a_reused_anchor_means_the_later_node():
    graph = graph_of("a: &x [1]\nb: *x\nc: &x [2]\nd: *x\n")
    a, b, c, d = (entry.value for entry in graph.targets.values())
    assert a is b
    assert c is d
    assert "x" == graph.targets["b"].alias
    assert "x" == graph.anchors[id(a)] == graph.anchors[id(c)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1e-3", 1e-3), ("a: yes", "yes"), ("a: 017", 17), ("a: 0o17", 15), ("a: 12:30:45", "12:30:45"), ("a:", None),
        ("a: ! 12", "12"), ("a: !!str 12", "12"), ("a: !!float 1", 1.0), ("a: !!int '7'", 7), ("a: 'yes'", "yes"),
        ("a: {1: x, ~: y, [p, 2]: z}", {1: "x", None: "y", ("p", 2): "z"}),
        ("a: |\n  x\n  y\n", "x\ny\n"), ("a: !!map {b: 1}", {"b": 1}), ("a: {<<: {b: 1}}", {"b": 1}),
        ("a: {'<<': 1}", {"<<": 1}), ("k: &k key\na: {*k : 1}", {"key": 1}),
    ],
)  # fmt: skip
def test_plain_values_are_those_of_yaml_1_2(text, expected):
    assert repr(expected) == repr(value(text))


# tags


@pytest.mark.parametrize(
    ("text", "args", "kwargs"),
    [
        ("!call:m:f", [], {}),
        ("!call:m:f ''", [""], {}),
        ("!call:m:f 42", [42], {}),
        ("!call:m:f '42'", ["42"], {}),
        ("!call:m:f ~", [None], {}),
        ("!call:m:f [1, [2]]", [1, [2]], {}),
        ("!call:m:f {x: 1, self: 2, name: 3, constructor: 4}", [], {"x": 1, "self": 2, "name": 3, "constructor": 4}),
        ("!call:m:f {args: [1], kwargs: {x: 2}}", [1], {"x": 2}),
        ("!call:m:f {args: ~}", [], {}),
        ("!call:m:f {kwargs: {args: 1, arg0: 2}}", [], {"args": 1, "arg0": 2}),
        ("!call:m:f {args: 1, x: 2}", [], {"args": 1, "x": 2}),
        ("!call:m:f {arg10: c, x: 1, arg2: b, arg0: a}", ["a", "b", "c"], {"x": 1}),
        ("!call:m:f {arg01: a}", [], {"arg01": "a"}),
        ("!call:m:f {x: 1, latent_args: {y: 2}, submodule_searchpath: [d]}", [], {"x": 1}),
    ],
)
def test_arguments_take_the_form_of_what_stands_behind_the_tag(text, args, kwargs):
    assert (args, kwargs) == value(f"a: {text}\n")


def test_reserved_arguments_are_no_keywords():
    node = graph_of("a: !call:m:f {latent_args: {y: 2}, submodule_searchpath: [d]}").targets["a"].value
    assert ["y"] == [entry.key for entry in node.latent_args]
    assert ["d"] == plain(node.submodule_searchpath)


@pytest.mark.parametrize(
    ("tag", "kind", "constructor", "name"),
    [
        ("!singleton:torch:optim.AdamW@opt", CallKind.SINGLETON, "torch:optim.AdamW", "opt"),
        ("!call:torch.randn", CallKind.SINGLETON, "torch:randn", None),
        ("!factory:len", CallKind.FACTORY, "len", None),
        ("!factory:len:@n", CallKind.FACTORY, "len", "n"),
        ("!factory:len@n", CallKind.FACTORY, "len", "n"),
        ("!lambda:a/b.py:f", CallKind.PARTIAL, "a/b.py:f", None),
        ("!partial:.mod:f", CallKind.PARTIAL, ".mod:f", None),
        ("!meta:m:f@a.b", CallKind.META, "m:f", "a.b"),
        ("!singleton:a@b/c.py:f@n", CallKind.SINGLETON, "a@b/c.py:f", "n"),
        ("!call:%6d:f", CallKind.SINGLETON, "m:f", None),
    ],
)
def test_a_tag_names_kind_constructor_and_identity(tag, kind, constructor, name):
    node = graph_of(f"a: {tag}\n").targets["a"].value
    assert (kind, constructor, name) == (node.kind, node.constructor, node.name)


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("!list [1]", ContainerKind.LIST, None),
        ("!list:@n [1]", ContainerKind.LIST, "n"),
        ("!list@n", ContainerKind.LIST, "n"),
        ("!tuple:@n [1]", ContainerKind.TUPLE, "n"),
        ("!dict:@n {b: 1}", ContainerKind.DICT, "n"),
        ("!dlist:@n {b: 1}", ContainerKind.DLIST, "n"),
        ("!dlist", ContainerKind.DLIST, None),
    ],
)
def test_container_tags_take_a_name_only(text, kind, name):
    node = graph_of(f"a: {text}\n").targets["a"].value
    assert (kind, name, True) == (node.kind, node.name, node.tagged)


def test_values_found_at_construction():
    graph = graph_of("a: !var lr\nb: !var {name: lr, default: 1}\nc: !env HOME\nd: !calc 'a + 1'\n")
    a, b, c, d = (entry.value for entry in graph.targets.values())
    assert (Var, "lr", None) == (type(a), a.variable, a.default)
    assert 1 == plain(b.default)
    assert (Env, "HOME") == (type(c), c.variable)
    assert (Calc, "a + 1") == (type(d), d.expression)
    assert ["!var", "!env", "!calc"] == [describe(a), describe(c), describe(d)]


# merge keys


def test_explicit_keys_beat_merged_ones_and_stand_in_their_place():
    entry = graph_of(".b: &b {x: 1, y: 2}\na: {y: 3, <<: *b, z: 4}\n").targets["a"]
    assert {"x": 1, "y": 3, "z": 4} == plain(entry.value)
    assert ["x", "y", "z"] == [inner.key for inner in entry.value.entries]
    assert [2] == [plain(old.value) for old in entry.value.entries[1].replaced]


def test_in_one_merge_list_the_earlier_wins_and_of_two_merge_lines_the_later():
    bases = ".p: &p {x: 1}\n.q: &q {x: 2}\n"
    assert {"x": 1} == value(f"{bases}a: {{<<: [*p, *q]}}\n")
    assert {"x": 2} == value(f"{bases}a:\n  <<: *p\n  <<: *q\n")


def test_a_merge_takes_the_keys_of_a_call_too():
    assert ([], {"lr": 2, "wd": 0}) == value(".b: &b !call:m:f {lr: 1, wd: 0}\na: !call:m:g\n  <<: *b\n  lr: 2\n")


def test_merged_values_are_the_same_nodes():
    graph = graph_of(".b: &b {x: [1]}\na: {<<: *b}\nc: {<<: *b}\n")
    assert graph.targets["a"].value.entries[0].value is graph.targets["c"].value.entries[0].value


# repeated keys

CHILD, PARENT = "child.yaml", "parent.yaml"


def chained(text, writers):
    from forgather.config.environment import TemplateUse

    templates = (
        TemplateUse(CHILD, f"/project/{CHILD}", 1, "config"),
        TemplateUse(PARENT, f"/project/{PARENT}", 1, "extends", parent=0),
    )
    return load(rendered(text, writers, templates=templates))


def test_a_childs_line_below_super_overrides_the_parents_in_its_place():
    graph = chained(
        "a:\n  lr: 1\n  wd: 0\n  lr: 2\n",
        {2: origin((5, PARENT, "x")), 3: origin((6, PARENT, "x")), 4: origin((3, CHILD, "x"))},
    )
    entry = graph.targets["a"].value.entries[0]
    assert [("lr", 2), ("wd", 0)] == [(e.key, plain(e.value)) for e in graph.targets["a"].value.entries]
    assert [1] == [plain(old.value) for old in entry.replaced]
    assert Span(f"/project/{PARENT}", 5) == entry.replaced[0].span
    assert () == graph.diagnostics


def test_a_childs_line_above_super_is_buried_and_a_lint_says_so():
    graph = chained("a:\n  lr: 2\n  lr: 1\n", {2: origin((3, CHILD, "x")), 3: origin((5, PARENT, "x"))})
    assert {"lr": 1} == plain(graph.targets["a"].value)
    message = "the key 'lr' has no effect: the parent's line that follows it wins, at /project/parent.yaml:5"
    assert [("FG207", "lint", message)] == findings(graph)
    assert Span("/project/child.yaml", 3) == graph.diagnostics[0].span


def test_a_difference_of_block_is_an_override():
    graph = load_with("a:\n  lr: 1\n  lr: 2\n", {2: origin((1, CHILD, "x")), 3: origin((9, CHILD, "y"))})
    assert {"lr": 2} == plain(graph.targets["a"].value)


def test_an_included_line_and_a_line_beside_the_include_are_an_override():
    included = origin((2, CHILD, "x"), (1, "part.yaml", None))
    graph = load_with("a:\n  lr: 1\n  lr: 2\n", {2: included, 3: origin((3, CHILD, "x"))})
    assert {"lr": 2} == plain(graph.targets["a"].value)


def test_two_lines_of_one_block_with_different_values_are_an_error():
    writers = {2: origin((1, CHILD, "x")), 3: origin((2, CHILD, "x"))}
    with pytest.raises(LoadError, match=r"\[FG206\] the key 'lr' appears twice in one block"):
        load_with("a:\n  lr: 1\n  lr: 2\n", writers)


def test_a_loop_that_prints_one_key_twice_is_an_error_unless_the_values_are_equal():
    writers = {2: origin((4, CHILD, "x")), 3: origin((4, CHILD, "x"))}
    with pytest.raises(LoadError, match="FG206"):
        load_with("a:\n  lr: 1\n  lr: 2\n", writers)
    graph = load_with("a:\n  lr: [1]\n  lr: [1]\n", writers)
    assert ["FG207"] == [finding.code for finding in graph.diagnostics]
    assert [Severity.LINT] == [finding.severity for finding in graph.diagnostics]


def test_a_slip_is_not_hidden_by_the_parents_line_between():
    writers = {2: origin((1, CHILD, "x")), 3: origin((5, PARENT, "x")), 4: origin((3, CHILD, "x"))}
    with pytest.raises(LoadError, match=r"the first is at /project/child.yaml:1"):
        chained("a:\n  lr: 1\n  lr: 2\n  lr: 3\n", writers)


def test_where_a_filter_hides_the_writer_it_is_a_lint_only():
    writers = {2: origin((1, CHILD, "x"), approximate=True), 3: origin((1, CHILD, "x"), approximate=True)}
    graph = load_with("a:\n  lr: 1\n  lr: 2\n", writers)
    assert {"lr": 2} == plain(graph.targets["a"].value)
    assert [Severity.LINT] == [finding.severity for finding in graph.diagnostics]


def test_equal_keys_in_pythons_eyes_are_repeats():
    with pytest.raises(LoadError, match="FG206"):
        graph_of("a: {1: x, true: y}\n")


# indents


def test_a_key_that_lands_inside_its_neighbour_is_a_warning_with_both_indents_and_lines():
    graph = graph_of("a:\n    b:\n        c: 1\n    d:\n     e: 2\nf:\n    g: 1\n")
    message = "'e', indented by 5, becomes a child of 'd' (/project/t.yaml:4), indented by 4"
    assert [("FG221", "warning", message)] == findings(graph)


def test_indenting_by_one_blank_throughout_is_fine():
    assert () == graph_of("a:\n b:\n  c: 1\n").diagnostics


# values of the command line


def test_a_value_may_have_tags_and_aliases_and_its_origin_is_the_command_line():
    node = graph_of("a: &x [1]\n").targets["a"].value
    made = load_value("!call:m:f {p: *x, .q: 3}", anchors={"x": node})
    assert node is made.kwargs[0].value
    assert Span("<command line>", 1) == made.span
    assert {".q": 3, "a": 1} == plain(load_value("{.q: 3, a: 1}"))
    assert plain(load_value("")) is None


def test_a_malformed_value_is_located_at_the_command_line():
    with pytest.raises(LoadError, match=r"^<command line>:1: \[FG200\] a '\[' that is not closed"):
        load_value("[1, 2")
