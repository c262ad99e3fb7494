import pytest
from documents import graph_of

from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.equality import same_graph
from forgather.config.graph import Graph
from forgather.config.materialize import materialize
from forgather.config.override import override, split_assignment
from forgather.errors import ForgatherError, GraphError, LoadError, Severity
from forgather.source import Span

CONFIG = """
.lr: &lr 0.1
.base: &base {eps: 1, betas: [1, 2]}
args: &args !singleton:dict {lr: *lr, max_steps: 10}
trainer: !singleton:dict
  args: *args
  optimizer: !factory:dict {<<: *base, lr: *lr}
callbacks: [a, b, !call:dict {prompts: [x, y]}]
table: {1: one, in.proj: p, ~: n}
seed: !var {name: seed, default: 1}
plain: &plain 5
user: [*plain]
second: {size: *plain}
"""


def graph():
    return graph_of(CONFIG)


def after(*assignments: str) -> Graph:
    return override(graph(), [split_assignment(text) for text in assignments])


def built(*assignments: str) -> dict:
    return materialize(after(*assignments))


def test_no_assignment_changes_nothing():
    assert same_graph(graph(), after())


def test_a_keyword_named_args_is_an_ordinary_step():
    assert 20 == built("trainer.args.max_steps=20")["trainer"]["args"]["max_steps"]


@pytest.mark.parametrize(
    ("assignment", "read", "expected"),
    [
        ("callbacks[1]=z", lambda b: b["callbacks"][1], "z"),
        ("callbacks[2].prompts[0]=z", lambda b: b["callbacks"][2]["prompts"], ["z", "y"]),
        ("table[1]=uno", lambda b: b["table"][1], "uno"),
        ("table[key 1]=uno", lambda b: b["table"][1], "uno"),
        ("table['in.proj']=q", lambda b: b["table"]["in.proj"], "q"),
        ("table[key None]=0", lambda b: b["table"][None], 0),
        ("seed.default=7", lambda b: b["seed"], 7),
        ("seed=3", lambda b: b["seed"], 3),
        ("args.lr=3e-4", lambda b: b["args"]["lr"], 3e-4),
        ("args.lr=yes", lambda b: b["args"]["lr"], "yes"),
        ("args.lr=", lambda b: b["args"]["lr"], None),
        ("args.lr={a: [1]}", lambda b: b["args"]["lr"], {"a": [1]}),
        ("args.lr=a=b", lambda b: b["args"]["lr"], "a=b"),
        ("callbacks=!tuple [1]", lambda b: b["callbacks"], (1,)),
        ("callbacks[0]=*args", lambda b: b["callbacks"][0] is b["args"], True),
        ("+args.new=1", lambda b: b["args"]["new"], 1),
        ("+callbacks[3]=c", lambda b: b["callbacks"][3], "c"),
        ("+table.new=1", lambda b: b["table"]["new"], 1),
        ("+extra={a: 1}", lambda b: b["extra"], {"a": 1}),
    ],
)
def test_a_value_anywhere_can_be_set(assignment, read, expected):
    assert expected == read(built(assignment))


def test_later_assignments_see_earlier_ones():
    assert {"a": 2} == built("+extra={a: 1}", "extra.a=2")["extra"]


def test_the_graph_that_was_given_is_untouched():
    first = graph()
    text = emit_yaml(first)
    override(first, [("args.lr", "1"), (".base.eps", "3"), ("+x", "1")])
    assert text == emit_yaml(first)


def test_what_was_overridden_is_remembered_with_its_place():
    entry = next(entry for entry in after("args.max_steps=20").targets["args"].value.kwargs if entry.key == "max_steps")
    assert Span("<command line>", 1) == entry.span
    assert [(10, 4)] == [(old.value.value, old.span.line) for old in entry.replaced]
    root = after("callbacks=1").targets["callbacks"]
    assert (Span("<command line>", 1), 8) == (root.span, root.replaced[0].span.line)


# sharing


def messages(changed: Graph) -> list[str]:
    return [f"{finding.code} {finding.message}" for finding in changed.diagnostics]


def test_a_value_inside_a_shared_node_changes_wherever_it_is_used_and_says_so():
    changed = after("trainer.args.max_steps=20")
    made = materialize(changed)
    assert 20 == made["args"]["max_steps"]
    assert made["args"] is made["trainer"]["args"]
    assert ["FG314 trainer.args.max_steps is shared with args.max_steps"] == messages(changed)
    assert [Severity.NOTE] == [finding.severity for finding in changed.diagnostics]


def noted(config: str, assignment: str) -> list[str]:
    graph = graph_of(config)
    return messages(override(graph, [split_assignment(assignment)]))


TARGETS = """\
optimizer: &optimizer !singleton:dict {lr: 1, inner: {eps: 2}}
data: &data !singleton:dict {seed: &seed 1}
args: &args !singleton:dict {steps: 1, seed: *seed}
trainer: &trainer !singleton:dict {optimizer: *optimizer, args: *args, train: *data, eval: *data, extra: [*data]}
main: *trainer
"""


def test_a_target_that_is_used_where_targets_are_used_is_no_surprise():
    for assignment in ("optimizer.lr=2", "optimizer.inner.eps=3", "optimizer={}", "args.steps=2", "+args.lr=1"):
        assert [] == noted(TARGETS, assignment)


def test_a_note_of_sharing_names_two_places_and_counts_the_rest():
    places = "FG314 data.size is shared with trainer.train.size, trainer.eval.size and 1 more"
    assert [places.replace("data", "+data", 1)] == noted(TARGETS, "+data.size=2")
    assert ["FG314 trainer.args.steps is shared with args.steps"] == noted(TARGETS, "trainer.args.steps=2")
    assert ["FG314 main.args.steps is shared with args.steps, trainer.args.steps"] == noted(
        TARGETS, "main.args.steps=2"
    )
    assert "args.seed" in noted(TARGETS.replace("train: *data, eval: *data, extra: [*data]", ""), "data.seed=2")[0]


def test_a_definition_changes_for_every_alias_and_merge():
    changed = after(".lr=0.5", ".base.eps=2", ".base.betas[0]=9")
    made = materialize(changed)
    assert (0.5, 0.5) == (made["args"]["lr"], made["trainer"]["optimizer"]["lr"])
    assert (2, [9, 2]) == (made["trainer"]["optimizer"]["eps"], made["trainer"]["optimizer"]["betas"])
    assert ["FG314 .lr is shared with args.lr, trainer.optimizer.lr"] == messages(changed)


def test_the_place_of_the_anchor_changes_all_aliases_and_the_place_of_an_alias_that_one():
    assert (6, [6], {"size": 6}) == tuple(built("plain=6")[name] for name in ("plain", "user", "second"))
    assert (5, [6], {"size": 5}) == tuple(built("user[0]=6")[name] for name in ("plain", "user", "second"))
    assert (5, [5], {"size": 6}) == tuple(built("second.size=6")[name] for name in ("plain", "user", "second"))


def test_a_value_that_a_merge_brought_changes_in_its_own_place_only():
    changed = after("trainer.optimizer.eps=7")
    assert 7 == materialize(changed)["trainer"]["optimizer"]["eps"]
    assert 1 == changed.definitions[1].value.entries[0].value.value
    assert [] == messages(changed)


def test_a_value_that_names_what_it_replaces_makes_no_cycle():
    made = built("args.lr=*args")
    assert {"lr": 0.1, "max_steps": 10} == made["args"]["lr"]


# errors


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("arg.lr=1", "[FG311] no target 'arg' for the path 'arg.lr' (did you mean 'args'?)"),
        (".lrr=1", "[FG311] no target '.lrr' for the path '.lrr' (did you mean '.lr'?)"),
        ("args.max_step=1", "/project/t.yaml:4: [FG311] args (!singleton:dict) has no 'max_step' (did you mean "
         "'max_steps'?; +args.max_step=... adds it)"),
        ("args.unlike=1", "/project/t.yaml:4: [FG311] args (!singleton:dict) has no 'unlike' (one of: lr, max_steps; "
         "+args.unlike=... adds it)"),
        ("args.xx.y=1", "/project/t.yaml:4: [FG311] args (!singleton:dict) has no 'xx' (one of: lr, max_steps)"),
        ("callbacks[7]=1", "/project/t.yaml:8: [FG311] callbacks (a sequence) has no [7] (it has 3 items)"),
        ("callbacks.x=1", "/project/t.yaml:8: [FG311] callbacks (a sequence) has no 'x'"),
        ("args[0]=1", "/project/t.yaml:4: [FG311] args (!singleton:dict) has no [0] (it has: lr, max_steps)"),
        ("args.lr.x=1", "/project/t.yaml:2: [FG311] args.lr (the value '0.1') has no 'x'"),
        ("+args.lr=1", "/project/t.yaml:2: [FG312] '+args.lr': args.lr is already there (leave out the '+')"),
        ("+args=1", "/project/t.yaml:4: [FG312] '+args': args is already there (leave out the '+')"),
        ("+callbacks[9]=1", "/project/t.yaml:8: [FG312] '+callbacks[9]': this cannot be added to callbacks "
         "(a sequence) (a sequence grows at its end only)"),
        ("args lr=1", "[FG310] 'args lr' is not a graph path: cannot read it from column 5 (write it as trainer.args.lr or "
         "callbacks[2].prompts[0])"),
        ("args.lr", "[FG313] 'args.lr' is not an assignment: it has no '=' (write path=value)"),
        ("args.lr=[1", "<command line>:1: [FG200] a '[' that is not closed, or a missing ',' (close it with ']')"),
        ("args.lr=*nothing", "<command line>:1: [FG203] *nothing refers to an anchor that is not defined above it (one of: args, base, lr, "
         "plain)"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_says_why(assignment, expected):
    with pytest.raises(ForgatherError) as caught:
        after(assignment)
    assert expected == str(caught.value)
    assert isinstance(caught.value, (GraphError, LoadError))


def test_a_value_may_not_nest_the_config_too_deep():
    innermost = "deep" + "[0]" * 60
    with pytest.raises(GraphError, match=r"\[FG220\] .* nests the config deeper than 100"):
        after(f"+deep={'[' * 60}1{']' * 60}", f"{innermost}={'[' * 60}1{']' * 60}")


def test_an_equals_sign_in_a_quoted_key_belongs_to_the_key():
    assert ("a['x=y']", "1") == split_assignment("a['x=y']=1")
    assert ("a['it\\'s=']", "=") == split_assignment("a['it\\'s=']==")
    assert ("a['x]=[']", "1") == split_assignment("a['x]=[']=1")
    assert ("a[key ('x', \"it's=\")]", "1") == split_assignment("a[key ('x', \"it's=\")]=1")


def test_how_to_add_a_keyword_stands_before_a_long_list():
    names = "".join(f"  name_{number}: 1\n" for number in range(15))
    with pytest.raises(GraphError) as caught:
        override(graph_of(f"a: !singleton:dict\n{names}"), [split_assignment("a.other=1")])
    assert caught.value.hint.startswith("+a.other=... adds it; it has: name_0, name_1")


def test_a_shared_value_under_a_key_that_a_call_has_twice_is_set():
    text = "a: &a {x: &v {y: 1}}\nb: !call:m:f {kwargs: {k: 1}, latent_args: {k: *v}}\n"
    changed = override(graph_of(text), [("a.x.y", "2")])
    assert "b.k.y" in changed.diagnostics[-1].message
