import io

import pytest
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from forgather.ml.callbacks import ProgressCallback
from forgather.ml.callbacks.progress import EvaluationPace
from tests.ml.callback_scene import arguments, control, state

STEP = {"loss": 2.5, "learning_rate": 3e-4, "grad_norm": 0.8123, "tokens_per_second": 12345.0, "memory_bytes": 1}


def shown(*, live, scene=lambda callback: None, torch_compile=False, **changes):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=live, width=140, color_system=None, legacy_windows=False)
    callback = ProgressCallback(console)
    args = arguments(".", torch_compile=torch_compile)
    callback.on_train_begin(args, state(**changes), control())
    scene(callback)
    callback.on_train_end(args, state(10, **changes), control())
    return screen.getvalue()


def log(callback, step, logs, **changes):
    callback.on_log(arguments("."), state(step, **changes), control(), logs=logs)


def evaluate(callback, batches=4):
    for _ in range(batches):
        callback.on_prediction_step(arguments("."), state(5), control(), eval_dataloader=range(batches))
    callback.on_evaluate(arguments("."), state(5), control(), metrics={})


def test_without_a_terminal_each_log_is_one_plain_line():
    def scene(callback):
        log(callback, 5, STEP)
        evaluate(callback)
        log(callback, 5, {"eval_loss": 2.25, "eval_runtime": 1.0, "eval_accuracy": 0.5})
        log(callback, 10, {"train_runtime": 3.0})

    lines = shown(live=False, scene=scene).splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step  5/10  loss 2.5000  lr 3.00e-04  grad norm 0.8123  tok/s 12.35k  left ")
    assert lines[1] == "step  5/10  eval loss 2.2500  eval accuracy 0.5000"


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def __call__(self):
        return self.now


def test_without_a_terminal_a_long_evaluation_prints_lines_at_the_pace_of_the_log():
    clock = Clock()

    def pass_batches(callback, loader, seconds):
        for _ in range(40):
            clock.now += seconds
            callback.on_prediction_step(arguments("."), state(5), control(), eval_dataloader=loader)

    def scene(callback):
        callback._pace = EvaluationPace(clock)
        for step in (3, 5):
            clock.now += 20
            log(callback, step, STEP)
        pass_batches(callback, range(40), 1)
        callback.on_evaluate(arguments("."), state(5), control(), metrics={})
        # Half as long between two log lines, and the time of the evaluation does not count.
        clock.now += 10
        log(callback, 6, STEP)
        pass_batches(callback, iter(range(40)), 1)

    lines = [line for line in shown(live=False, scene=scene).splitlines() if "loss" not in line]
    assert lines == [
        "step  5/10  evaluating batch 21/40  left 19.0 s",
        *(f"step  5/10  evaluating batch {number}" for number in (11, 21, 31)),
    ]


def test_several_evaluation_sets_share_the_pace_and_a_short_evaluation_prints_nothing():
    clock = Clock()

    def scene(callback):
        callback._pace = EvaluationPace(clock)
        for loader in (range(6), range(7), range(8)):
            for _ in loader:
                clock.now += 0.9
                callback.on_prediction_step(arguments("."), state(5), control(), eval_dataloader=loader)

    assert shown(live=False, scene=scene).splitlines() == ["step  5/10  evaluating batch 7/7"]


@pytest.mark.parametrize("live", [False, True])
def test_a_loader_of_a_data_set_without_length_counts_without_end(live, caplog):
    class Rows(IterableDataset):
        def __iter__(self):
            return iter(range(3))

    clock = Clock()

    def scene(callback):
        callback._pace = EvaluationPace(clock)
        loader = DataLoader(Rows())
        for _ in loader:
            clock.now += 6
            callback.on_prediction_step(arguments("."), state(5), control(), eval_dataloader=loader)

    text = shown(live=live, scene=scene)
    assert live or ["step  5/10  evaluating batch 3"] == text.splitlines()
    assert [] == caplog.records


@pytest.mark.parametrize("live", [False, True])
def test_a_run_that_compiles_says_so_before_its_first_step(live):
    assert "compil" not in shown(live=live)
    first = shown(live=live, torch_compile=True).splitlines()[0]
    assert "compiling the model (torch_compile): the first step takes longer" in first


def test_on_a_terminal_there_is_a_bar_and_evaluations_are_lines_above_it():
    def scene(callback):
        log(callback, 5, STEP)
        evaluate(callback)
        log(callback, 5, {"eval_loss": 2.25})
        callback.on_step_end(arguments("."), state(10), control())

    screen = shown(live=True, scene=scene)
    assert "training" in screen
    assert "evaluating" in screen
    assert "step  5/10  eval loss 2.2500" in screen
    assert "10/10" in screen.splitlines()[-1] + screen.splitlines()[-2]
    assert screen.rstrip().endswith("\x1b[?25h")


@pytest.mark.parametrize(
    ("width", "facts"),
    [
        (60, "loss 2.5000  lr 3.00e-04"),
        (80, "loss 2.5000  lr 3.00e-04"),
        (100, "loss 2.5000  lr 3.00e-04  tok/s 12.35k"),
        (140, "loss 2.5000  lr 3.00e-04  grad norm 0.8123  tok/s 12.35k"),
    ],
)
def test_a_narrow_terminal_keeps_step_time_left_and_loss(width, facts):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width, color_system=None, legacy_windows=False)
    callback = ProgressCallback(console)
    callback.on_train_begin(arguments("."), state(max_steps=3000), control())
    log(callback, 1500, STEP, max_steps=3000)
    callback._bars.refresh()
    last = screen.getvalue().splitlines()[-1]
    assert "1500/3000" in last and "left -:--:--" in last and facts in last
    assert "\N{HORIZONTAL ELLIPSIS}" not in last
    callback.on_train_end(arguments("."), state(1500, max_steps=3000), control())


def test_a_line_of_a_run_that_is_past_its_end_says_so():
    assert "step 70 (past max_steps 62)" in shown(
        live=False, scene=lambda callback: log(callback, 70, STEP, max_steps=62)
    )


@pytest.mark.parametrize("live", [False, True])
def test_other_ranks_show_nothing(live):
    def scene(callback):
        log(callback, 5, STEP, is_world_process_zero=False)

    assert shown(live=live, scene=scene, is_world_process_zero=False) == ""


def test_an_evaluation_without_training_has_a_bar_that_ends():
    screen = io.StringIO()
    callback = ProgressCallback(Console(file=screen, force_terminal=True, width=100))
    evaluate(callback)
    assert "evaluating" in screen.getvalue()
    assert callback._bars is None
