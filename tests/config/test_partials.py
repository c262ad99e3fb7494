import functools
import inspect
import pickle

import building_blocks
from building_blocks import Part, Strict
from documents import graph_of

from forgather.config.materialize import materialize
from forgather.config.partials import PartialObject, Recipe

assert building_blocks  # configs name it


def partial_of(text, **variables):
    return materialize(graph_of(text.replace("B:", "building_blocks:")), variables=variables)["a"]


def test_positional_arguments_are_appended_and_keywords_merged_over():
    made = partial_of("a: !partial:B:Part\n  args: [1]\n  kwargs: {x: 2, y: 3}\n")(4, y=5, z=6)
    assert (1, 4) == made.args
    assert {"x": 2, "y": 5, "z": 6} == made.kwargs


def test_a_singleton_inside_is_shared_by_all_calls_and_so_is_a_plain_container():
    part = partial_of("a: !partial:B:Part {one: !singleton:B:Part , plain: [1]}\n")
    first, second = part().kwargs, part().kwargs
    assert first["one"] is second["one"]
    assert first["plain"] is second["plain"]


def test_a_factory_inside_and_each_container_that_holds_one_is_rebuilt_per_call():
    part = partial_of("a: !partial:B:Part {new: !factory:B:Part , held: {deep: [!factory:B:Part ]}}\n")
    first, second = part().kwargs, part().kwargs
    assert first["new"] is not second["new"]
    assert first["held"] is not second["held"]
    assert first["held"]["deep"][0] is not second["held"]["deep"][0]


def test_within_one_call_a_shared_container_is_one_object_and_a_factory_is_not():
    text = "f: &f !factory:B:Part\nc: &c [*f]\na: !partial:B:Part [*c, *c, *f, *f]\n"
    made = partial_of(text)()
    assert made.args[0] is made.args[1]
    assert made.args[2] is not made.args[3]


def test_a_container_of_its_own_inside_a_factory_is_new_for_each_place():
    made = partial_of("f: &f !factory:B:Part [[!factory:B:Part ]]\na: !partial:B:Part [*f, *f]\n")()
    assert made.args[0].args[0] is not made.args[1].args[0]


def test_a_singleton_that_holds_a_factory_is_built_once():
    part = partial_of("a: !partial:B:Part [!singleton:B:Part [!factory:B:Part ]]\n")
    assert part().args[0] is part().args[0]


def test_a_variable_is_bound_when_the_partial_is_built_and_its_default_may_be_a_factory():
    text = "a: !partial:B:Part [!var {name: x, default: !factory:B:Part }]\n"
    part = partial_of(text)
    assert part().args[0] is not part().args[0]
    assert (7,) == partial_of(text, x=7)().args


def test_nothing_is_built_for_a_keyword_that_the_call_gives_itself():
    part = partial_of("a: !partial:B:Part {new: !factory:B:broken }\n")
    assert {"new": 1} == part(new=1).kwargs


def test_latent_arguments_win_over_those_of_the_call():
    part = partial_of("a: !partial:B:Part {x: 1, latent_args: {x: 3}}\n")
    assert {"x": 3} == part(x=2).kwargs


def test_it_can_be_inspected_like_functools_partial():
    part = partial_of("a: !partial:B:Strict {weight_decay: 0.5}\n")
    assert (Strict, (), {"weight_decay": 0.5}) == (part.func, part.args, part.keywords)
    assert inspect.signature(functools.partial(Strict, weight_decay=0.5)) == inspect.signature(part)
    assert "lr" in inspect.signature(part).parameters
    assert "partial(building_blocks:Strict, weight_decay=0.5)" == repr(part)


def test_what_each_call_builds_anew_is_a_recipe_in_keywords():
    part = partial_of("a: !partial:B:Part {new: !factory:B:Part }\n")
    assert isinstance(part.keywords["new"], Recipe)
    assert "partial(building_blocks:Part, new=<building_blocks:Part per call>)" == repr(part)


def test_what_has_no_signature_has_none_as_a_partial():
    part = partial_of("a: !partial:dict {x: 1}\n")
    assert {"x": 1, "y": 2} == part(y=2)
    assert ["args", "kwargs"] == list(inspect.signature(part).parameters)


def test_it_can_be_pickled_with_the_recipes_inside():
    part = partial_of("a: !partial:B:Part {x: 1, new: [!factory:B:Part [2]]}\n")
    copy = pickle.loads(pickle.dumps(part))
    assert isinstance(copy, PartialObject)
    made = copy(y=3)
    assert isinstance(made, Part)
    assert (1, 3, (2,)) == (made.kwargs["x"], made.kwargs["y"], made.kwargs["new"][0].args)


def test_an_alias_of_a_partial_is_one_object():
    built = materialize(graph_of("a: &p !partial:len\nb: *p\n"))
    assert built["a"] is built["b"]
