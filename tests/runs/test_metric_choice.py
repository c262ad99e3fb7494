"""Which metric ranks runs, and in which direction."""

import pytest

from forgather.errors import ProjectError
from forgather.runs.metric_choice import choose_metric, is_higher_better

TRAIN, EVAL = (
    ["loss", "grad_norm", "learning_rate", "tokens_per_second"],
    ["eval_loss", "eval_accuracy", "eval_runtime"],
)
F1 = {"metric_for_best_model": "f1", "greater_is_better": True}
ODD = {"metric_for_best_model": "eval_distance", "greater_is_better": False}

CASES = [
    ([TRAIN, TRAIN], [{}, {}], ("loss", False)),
    ([TRAIN + EVAL] * 2, [{}, {}], ("eval_loss", False)),
    ([TRAIN + EVAL, TRAIN], [{}, {}], ("loss", False)),
    ([TRAIN + EVAL, TRAIN + EVAL, TRAIN], [{}] * 3, ("eval_loss", False)),
    ([["loss", "eval_f1", "eval_loss"]] * 2, [F1, F1], ("eval_f1", True)),
    ([["loss", "eval_f1", "eval_loss"]] * 2, [F1, {}], ("eval_f1", True)),
    ([["loss", "eval_distance"]] * 2, [ODD, ODD], ("eval_distance", False)),
    ([["loss", "eval_f1", "eval_loss", "eval_distance"]] * 2, [F1, ODD], ("eval_loss", False)),
    ([["eval_de_loss", "eval_en_loss", "loss"]] * 2, [{}, {}], ("eval_de_loss", False)),
    ([["reward"], ["reward"]], [{}, {}], ("reward", True)),
    ([["a"], ["b"]], [{}, {}], None),
    ([["tokens_per_second"]] * 2, [{}, {}], None),
    ([[], []], [{}, {}], None),
]


@pytest.mark.parametrize(("metrics", "arguments", "chosen"), CASES)
def test_the_metric_is_what_the_runs_recorded_or_the_first_of_the_rule(metrics, arguments, chosen):
    found = choose_metric(metrics, arguments)
    assert chosen == (found and (found.name, found.is_higher_better))


def test_runs_that_recorded_opposite_directions_leave_it_to_the_name():
    opposite = {**F1, "greater_is_better": False}
    assert choose_metric([["eval_f1"]] * 2, [F1, opposite]).is_higher_better


@pytest.mark.parametrize(
    ("wanted", "best", "chosen"),
    [("grad_norm", None, True), ("grad_norm", "min", False), ("eval_loss", None, False), ("eval_loss", "max", True)],
)
def test_the_user_chooses_the_metric_and_the_direction(wanted, best, chosen):
    assert chosen == choose_metric([TRAIN + EVAL] * 2, [{}, {}], wanted=wanted, best=best).is_higher_better


@pytest.mark.parametrize(
    ("metrics", "hint"),
    [
        ([["eval_loss"], []], "did you mean 'eval_loss'?"),
        ([["a", "b"], []], "a, b"),
        ([[], []], "they logged no metric"),
        ([[f"m{number}" for number in range(20)], []], "and 11 more"),
    ],
)
def test_a_metric_of_no_run_is_refused_with_the_names_that_exist(metrics, hint):
    with pytest.raises(ProjectError) as caught:
        choose_metric(metrics, [{}, {}], wanted="eval_los")
    assert ("FG541", True) == (caught.value.code, hint in caught.value.hint)


LOWER = "loss eval_loss train_loss aux_loss perplexity eval_wer mse eval_runtime memory_bytes memory_peak eval_rmse"
HIGHER = "accuracy eval_accuracy eval_f1 eval_rougeL rewards/margins eval_bleu tokens_per_second mfu eval_exact_match"
UNKNOWN = "grad_norm learning_rate epoch glossary lossless time_left scored"


@pytest.mark.parametrize(
    ("names", "direction"), [(LOWER, False), (HIGHER, True), (UNKNOWN, None)], ids=["lower", "higher", "unknown"]
)
def test_the_direction_follows_from_whole_words_of_the_name(names, direction):
    assert [direction] * len(names.split()) == [is_higher_better(name) for name in names.split()]
