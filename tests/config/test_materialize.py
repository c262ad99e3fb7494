import pickle
import sys

import building_blocks
import pytest
from documents import graph_of

from forgather.config.graph import Node
from forgather.config.materialize import materialize
from forgather.errors import (
    ArgumentError,
    BuildNote,
    ForgatherError,
    GraphError,
    ResolveError,
    UnboundVarError,
    UnknownTargetError,
)

BLOCKS = "building_blocks"
sys.modules.setdefault(BLOCKS, building_blocks)


def build(text, targets=None, **variables):
    return materialize(graph_of(text.replace("B:", f"{BLOCKS}:")), targets=targets, variables=variables)


def error_of(text, kind=Exception, **variables):
    with pytest.raises(kind) as caught:
        build(text, **variables)
    return caught.value


# identity


def test_an_alias_of_a_plain_mapping_or_sequence_is_one_object():
    built = build("a: &a {x: 1}\nb: &b [1]\nc: [*a, *b, *a]\n")
    assert built["c"][0] is built["a"] is built["c"][2]
    assert built["c"][1] is built["b"]


@pytest.mark.parametrize("value", ["nothing", "NoneType"])
def test_a_singleton_whose_value_is_none_is_called_once(value, monkeypatch):
    calls = []
    monkeypatch.setattr(building_blocks, "nothing", lambda: calls.append(1))
    built = build("a: &a !singleton:B:nothing\nb: [*a, *a]\n")
    assert [None, None] == built["b"]
    assert [1] == calls


@pytest.mark.parametrize(("constructor", "empty"), [("int", 0), ("list", []), ("dict", {}), ("str", "")])
def test_an_empty_singleton_is_shared_too(constructor, empty):
    built = build(f"a: &a !singleton:{constructor}\nb: [*a, *a]\n")
    assert [empty, empty] == built["b"]
    assert built["b"][0] is built["b"][1] is built["a"]


def test_a_factory_is_called_anew_at_every_place():
    built = build("a: &f !factory:B:Part\nb: [*f, *f]\n")
    assert 3 == len({id(built["a"]), id(built["b"][0]), id(built["b"][1])})


def test_arguments_of_a_factory_are_new_too_unless_they_are_shared():
    built = build("s: &s [1]\nf: &f !factory:B:Part {own: [1], shared: *s, one: !singleton:B:Part }\nb: [*f, *f]\n")
    first, second = (part.kwargs for part in built["b"])
    assert first["own"] is not second["own"]
    assert first["shared"] is second["shared"] is built["s"]
    assert first["one"] is second["one"]


def test_named_containers_are_shared_even_inside_a_factory():
    built = build("f: &f !factory:B:Part [!list:@layers [1]]\nb: [*f, *f]\n")
    assert built["b"][0].args[0] is built["b"][1].args[0]


def test_targets_of_one_construction_share_singletons_and_two_constructions_share_nothing():
    graph = graph_of(f"a: &a !singleton:{BLOCKS}:Part {{x: !var x}}\nb: [*a]\n")
    one, two = materialize(graph, variables={"x": 1}), materialize(graph, variables={"x": 2})
    assert one["a"] is one["b"][0]
    assert one["a"] is not two["a"]
    assert (1, 2) == (one["a"].kwargs["x"], two["a"].kwargs["x"])


def test_only_the_targets_that_are_asked_for_are_built():
    built = build("a: 1\nb: !singleton:B:broken\n", targets=["a"])
    assert {"a": 1} == built


# values


def test_containers():
    built = build("a: !tuple [1, 2]\nb: !dlist {x: 1, y: ~, ~: 2, z: [~]}\nc: !dict {p: !list [3]}\n")
    assert {"a": (1, 2), "b": [1, 2, [None]], "c": {"p": [3]}} == built


def test_a_variable_beats_its_default_and_a_default_may_be_anything():
    text = "a: !var {name: x, default: [1]}\nb: !var {name: y, default: ~}\n"
    assert {"a": [1], "b": None} == build(text)
    assert {"a": 0, "b": 5} == build(text, x=0, y=5)


def test_an_environment_variable_is_read_at_construction(monkeypatch):
    monkeypatch.setenv("FORGATHER_TEST", "7")
    monkeypatch.delenv("FORGATHER_ABSENT", raising=False)
    built = build("a: !env FORGATHER_TEST\nb: !env {name: FORGATHER_ABSENT, default: 3}\n")
    assert {"a": "7", "b": 3} == built


def test_calc_reads_variables_before_targets():
    text = "n: 12\na: !calc n // 5\nb: !calc max(1, m) + a\n"
    assert (2, 9) == (build(text, m=7)["a"], build(text, m=7)["b"])
    assert 4 == build(text, m=7, n=20)["a"]


def test_meta_gets_its_arguments_unbuilt():
    nodes, named = build("a: !meta:B:keep\n  args: [!singleton:B:broken ]\n  kwargs: {k: 1}\n")["a"]
    assert isinstance(nodes[0], Node)
    assert 1 == named["k"].value


def test_latent_arguments_are_built_and_merged_last():
    order = []
    building_blocks.note = lambda name: order.append(name) or name
    built = build("a: !call:B:Part\n  latent_args: {x: !call:B:note [late]}\n  x: early\n  y: !call:B:note [first]\n")
    assert {"x": "late", "y": "first"} == built["a"].kwargs
    assert ["first", "late"] == order


LATE = "a: !{kind}:B:Part\n  x: early\n  latent_args: !var {{name: late, default: {{x: late, y: 1}}}}\n"


@pytest.mark.parametrize(
    ("variables", "kwargs"), [({}, {"x": "late", "y": 1}), ({"late": {"z": 2}}, {"x": "early", "z": 2})]
)
def test_a_variable_may_hold_the_latent_arguments(variables, kwargs):
    assert kwargs == build(LATE.format(kind="call"), **variables)["a"].kwargs
    assert kwargs == build(LATE.format(kind="partial"), **variables)["a"]().kwargs


@pytest.mark.parametrize("value", [5, None, {1: 2}])
def test_latent_arguments_that_are_no_mapping_are_refused_at_their_line(value):
    with pytest.raises(GraphError, match=r"\[FG213\] 'latent_args' is given") as caught:
        build(LATE.format(kind="call"), late=value)
    assert (3, "a.latent_args") == (caught.value.span.line, caught.value.path)


def test_latent_arguments_of_a_variable_meet_the_signature_once_they_are_known():
    text = "a: !call:torch.nn:Linear\n  in_features: 1\n  latent_args: !var late\n"
    assert 2 == build(text, late={"out_features": 2})["a"].out_features
    with pytest.raises(ArgumentError, match="no parameter 'out_feature'"):
        build(text, late={"out_feature": 2})


def test_a_constructor_may_take_arguments_of_any_name():
    text = "a: !call:B:AnyName {constructor: 1, name: 2, path: 3, node: 4, function: 5, kwargs: 6}\n"
    assert (1, 2, 3, 4, 5, None, 6) == build(text)["a"].values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("!call:items {x: 1}", "keywords"), ("!call:items [{x: 1}]", [("x", 1)]), ("!call:keys [{x: 1}]", ["x"]),
        ("!call:values [{x: 1}]", [1]), ("!call:getitem [{x: 1}, x]", 1), ("!call:named_list [1, 2]", [1, 2]),
        ("!call:named_tuple [1, 2]", (1, 2)), ("!call:named_dict {x: 1}", {"x": 1}), ("!call:int 42", 42),
        ("!call:call [!partial:B:add [1], 2]", 3), ("!call:len [[1]]", 1),
    ],
)  # fmt: skip
def test_short_names(text, expected):
    if expected == "keywords":
        assert "FG204" == error_of(f"a: {text}\n", ArgumentError).code
    else:
        assert expected == build(f"a: {text}\n")["a"]


def test_a_hook_may_replace_a_constructor():
    graph = graph_of(f"a: !call:{BLOCKS}:add [1]\n")
    assert {"a": "1"} == materialize(graph, hook=lambda found: str if found is building_blocks.add else found)


# errors


def test_a_constructors_exception_survives_with_one_note_at_the_innermost_place():
    error = error_of("a:\n  b: !call:B:Part\n    x: [!call:B:Part {y: !call:B:broken }]\n", RuntimeError)
    notes = [note for note in error.__notes__ if isinstance(note, BuildNote)]
    assert ["while calling building_blocks:broken at a.b.x[0].y (/project/t.yaml:3)"] == notes
    assert ("a.b.x[0].y", "building_blocks:broken", 3) == (notes[0].path, notes[0].constructor, notes[0].span.line)
    assert notes[0].span == pickle.loads(pickle.dumps(notes[0])).span


def test_a_partial_that_fails_later_is_noted_at_its_own_place():
    with pytest.raises(RuntimeError) as caught:
        build("a: !partial:B:broken\n")["a"]()
    assert ["while calling building_blocks:broken at a (/project/t.yaml:1)"] == caught.value.__notes__


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("!call:B:Strict {lr: 1, weigth_decay: 2}",
         "[FG204] Strict has no parameter 'weigth_decay' (did you mean 'weight_decay'?)"),
        ("!call:B:Strict {}", "[FG208] Strict lacks the argument 'lr' (its parameters: lr, weight_decay, eps; a !partial may leave some to be given later)"),
        ("!call:B:Strict [1, 2, 3]", "[FG209] Strict got 3 positional arguments but takes at most 2 "
         "(its parameters: lr, weight_decay)"),
        ("!call:B:Strict {arg0: 1, lr: 2}", "[FG209] Strict got 'lr' twice, by position and by name (leave one out)"),
        ("!call:B:nothing {x: 1}", "[FG204] nothing has no parameter 'x' (it takes none)"),
        ("!call:B:nothing [1]", "[FG209] nothing got 1 positional arguments but takes none"),
        ("!partial:B:Strict {lrr: 1}", "[FG204] Strict has no parameter 'lrr' (did you mean 'lr'?)"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_fit_are_found_before_the_call(call, expected):
    error = error_of(f"a:\n  b: {call}\n", ArgumentError)
    assert f"/project/t.yaml:2: {expected}" == str(error)
    assert "a.b" == error.path
    assert isinstance(error, TypeError)


def test_a_misspelt_keyword_is_located_at_its_own_line():
    error = error_of("a: !call:B:Strict\n  lr: 1\n  weigth_decay: 2\n", ArgumentError)
    assert 3 == error.span.line


def test_a_constructors_own_error_about_an_argument_is_located_at_that_argument():
    text = "main: !call:building_blocks:picky\n    first: 1\n    second: 2\n"
    error = error_of(text, ForgatherError)
    assert (3, "main") == (error.span.line, error.path)


@pytest.mark.parametrize(("lines", "line"), [("    steps: 1\n    lr: 2\n", 3), ("    steps: 1\n    rate: 2\n", 5)])
def test_an_error_about_a_setting_of_settings_is_located_at_that_setting(lines, line):
    call = "main: !call:building_blocks:picky_about_settings\n    settings: *part\n"
    error = error_of(f"part: &part !call:B:Part\n{lines}{call}", ForgatherError)
    assert (line, "main") == (error.span.line, error.path)


def test_a_type_error_inside_a_constructor_is_not_blamed_on_the_config():
    error = error_of("a: !call:B:inner_type_error [1]\n", TypeError)
    assert not isinstance(error, ArgumentError)
    assert 1 == len(error.__notes__)


def test_a_decorator_may_accept_more_than_what_it_wraps():
    assert (1, 2) == build("a: !call:B:decorated {x: 1, extra: 2}\n")["a"]


def test_what_has_no_signature_is_called_as_it_is():
    assert {"a": {"x": 1}} == build("a: !call:dict {x: 1}\n")


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("a: !var lr\n", UnboundVarError, "/project/t.yaml:1: [FG301] !var 'lr' has no value (did you mean 'lrs'?)"),
        ("a: !env FG_NONE\n", UnboundVarError, "/project/t.yaml:1: [FG303] the environment variable 'FG_NONE' is not set "
         "(export FG_NONE=..., or give it a default)"),
        ("a: !calc b\nb: !calc a\n", GraphError, "/project/t.yaml:2: [FG304] !calc reads the target 'a' while that is being "
         "built from it (break the cycle with a !var or a plain value)"),
        ("a: !calc a\n", GraphError, "/project/t.yaml:1: [FG304] !calc reads the target 'a' while that is being built from "
         "it (break the cycle with a !var or a plain value)"),
        ("steps: 3\na: !calc step + 1\n", UnboundVarError, "/project/t.yaml:2: [FG306] !calc reads 'step', which is neither "
         "a variable nor a target (did you mean 'steps'?)"),
        ("a: !calc 1 / 0\n", GraphError, "/project/t.yaml:1: [FG305] !calc '1 / 0': ZeroDivisionError: division by zero"),
        ("a: !call:B:NUMBER\n", ResolveError, "/project/t.yaml:1: [FG323] 'building_blocks:NUMBER' is int '5', which cannot "
         "be called (name a class or function)"),
        ("a: !call:B:Strct\n", ResolveError, "/project/t.yaml:1: [FG321] 'building_blocks' has no symbol 'Strct' "
         "(did you mean 'Strict'?)"),
        ("a: !call:x.py:y\n  submodule_searchpath: {b: 1}\n", GraphError, "/project/t.yaml:2: [FG307] submodule_searchpath "
         "is \"{'b': 1}\" (give a folder or a list of folders)"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_located(text, kind, expected, monkeypatch):
    monkeypatch.delenv("FG_NONE", raising=False)
    error = error_of(text, kind, lrs=1)
    assert expected == str(error)
    assert error.path is not None


def test_an_unknown_target_lists_the_targets():
    with pytest.raises(UnknownTargetError) as caught:
        build("model: 1\nmain: 2\n", targets=["modle"])
    assert "[FG302] no target 'modle' (did you mean 'model'? targets: model, main)" == str(caught.value)
    assert isinstance(caught.value, KeyError)
    with pytest.raises(UnknownTargetError, match=r"\(targets: t0, t1, .*, t29 and 10 more\)$"):
        build("\n".join(f"t{number}: 1" for number in range(40)), targets=["zzz"])


def test_errors_survive_pickling():
    error = error_of("a: !call:B:Strict {}\n", ArgumentError)
    assert str(error) == str(pickle.loads(pickle.dumps(error)))
