"""R14: a step that is not finite, or that spikes, on one rank alone follows the policy on all of them."""

import json
import shutil

import numpy as np
import pytest

from forgather.ml.metrics import repeatable_metrics
from tests.matrix import thinned
from tests.ml.distributed import cells
from tests.reliability.bad_steps import FAULTS, STEPS, check_left_out, gang

ONE = {"strategy": "one process", "world_size": 1, "trainer": "Trainer", "dp_size": 1, "settings": {}}
HALF = {**ONE, "strategy": "fp16", "world_size": 2, "trainer": "AccelTrainer", "dp_size": 2, "settings": {"fp16": True}}
DRAWS = {**ONE, "strategy": "dropout", "dropout": 0.2, "settings": {"dataloader_num_workers": 2, "async_save": True}}
KINDS = {"one process x1": ONE, "fp16 x2": HALF} | {
    f"{kind['strategy']} x{kind['world_size']}": kind for kind in (*cells._kinds(), *cells._zeros())
}
OTHERS = {"dropout x1": DRAWS, "dropout x2": {**DRAWS, "world_size": 2, "trainer": "AccelTrainer", "dp_size": 2}}
SKIP = {"bad_step_policy": "skip", "spike_threshold": 6.0, "spike_window": 8, "max_bad_steps": 2}
REWIND = {**SKIP, "bad_step_policy": "rewind", "save_strategy": "steps", "save_steps": 2}
BAD = 5

QUICK = [
    *(("one process x1", fault) for fault in FAULTS),
    ("DDP x2", "spike"),
    ("FSDP2 x2", "gradient inf"),
    ("ZBVZeroBubble x2", "loss nan"),
]
"""ZeRO is among all kinds; test_deepspeed.py drops gradients of its engine in every run of the suite."""


def faulty(kind, fault, settings, **given):
    """Trains with a fault on the last rank, in a step in which it has rows."""
    strategy = {**KINDS, **OTHERS}[kind]
    return gang(strategy, fault, settings, **{"steps": (BAD,), "rank": strategy["world_size"] - 1, **given})


def test_a_bad_step_of_one_rank_changes_nothing_on_any(full, figure):
    # Under fp16, gradients that are not finite are those of a loss that was scaled too far: no fault of the step.
    every = [(kind, fault) for kind in KINDS for fault in FAULTS if kind != "fp16 x2" or "gradient" not in fault]
    tried = every if full else QUICK
    for kind, fault in tried:
        check_left_out(faulty(kind, fault, SKIP), BAD)
    figure("R14", f"{len(tried)} bad steps of one rank left out under {len({kind for kind, _ in tried})} strategies: "
           "weights, optimizer and schedule unchanged")  # fmt: skip


@pytest.mark.parametrize("kind", ["one process x1", "DDP x2"])
def test_a_policy_that_applies_the_step_is_found(kind):
    """The negative control of the test above."""
    without_limit = {**SKIP, "spike_threshold": None}
    with pytest.raises(AssertionError, match="was applied"):
        check_left_out(faulty(kind, "spike", without_limit), BAD)


def test_the_scale_of_fp16_leaves_steps_out_by_itself():
    for one in faulty("fp16 x2", "gradient inf", {**SKIP, "max_bad_steps": 1}, steps=(4, 5, 6)):
        assert (one["error"], one["step"]) == (None, STEPS)
        assert one["before"][4]["model"] == one["after"][6]["model"] != one["after"][7]["model"]
        assert one["before"][4]["schedule"] == one["after"][6]["schedule"]
        assert [1, 1, 1] == [one["lines"][step]["skipped_steps"] for step in (4, 5, 6)]


def sigmas(count):
    def norm(earlier):
        window = np.array(earlier[-SKIP["spike_window"] :])
        return window.mean() + count * window.std(ddof=1)

    return norm


@pytest.mark.parametrize("kind", ["one process x1", "DDP x2"])
@pytest.mark.parametrize(("norm", "is_left_out"), [(sigmas(10), True), (sigmas(6.01), True), (sigmas(5.99), False),
                                                   (lambda earlier: float("nan"), True)])  # fmt: skip
def test_a_norm_of_ten_sigma_on_one_rank_is_a_spike_of_all_and_one_of_less_than_six_is_none(kind, norm, is_left_out):
    """Only one rank sees it: its copy of the gradients is spoiled after all were added."""
    found = faulty(kind, norm, SKIP)
    if is_left_out:
        check_left_out(found, BAD)
    else:
        assert all(one["before"][BAD] != one["after"][BAD] for one in found)


def test_what_follows_a_step_that_is_left_out_is_the_same_whatever_was_wrong_with_it():
    ends = [faulty("one process x1", fault, SKIP)[0] for fault in ("loss nan", "gradient -inf", "spike")]
    for other in ends[1:]:
        for name in ("end", "lines", "epoch", "tokens"):
            assert ends[0][name] == other[name]
    clean = faulty("one process x1", None, SKIP)[0]
    assert clean["end"] != ends[0]["end"]
    # The position in the data advances, and what was read counts.
    assert (clean["epoch"], clean["tokens"], clean["step"]) == tuple(ends[0][n] for n in ("epoch", "tokens", "step"))


@pytest.mark.parametrize("settings", [SKIP, REWIND], ids=["skip", "rewind"])
@pytest.mark.parametrize("kind", ["one process x1", "DDP x2"])
def test_after_as_many_bad_steps_as_are_allowed_the_run_ends(kind, settings, tmp_path):
    for one in faulty(kind, "gradient nan", settings, steps=(4, 5, 6, 7), folder=tmp_path):
        assert (
            "[FG651] 3 bad steps within 8 steps, and max_bad_steps is 2; at step 6, the norm of the gradients is"
            in one["error"]
        )
        assert one["step"] == 5
        assert one["before"][4]["model"] == one["after"][5]["model"] == one["end"]["model"]


def rewound(kind, fault, folder):
    found = faulty(kind, fault, REWIND, folder=folder)
    for one in found:
        assert one["error"] is None
        assert one["rewound"] == [4]
        assert one["step"] == STEPS
        assert [line["step"] for line in one["history"] if "learning_rate" in line] == list(range(1, STEPS + 1))
        assert one["lines"][BAD]["skipped_steps"] == 1
    return found


def test_a_run_that_went_back_passes_over_the_rows_of_the_bad_step(tmp_path, full, figure):
    """Nothing here draws random numbers: to compute up to the step again and pass over it is to leave it out."""
    tried = list(KINDS) if full else ["one process x1", "DDP x2"]
    for number, kind in enumerate(tried):
        fault = "loss inf" if kind == "fp16 x2" else list(FAULTS)[number % len(FAULTS)]
        folder = tmp_path / str(number)
        back, left_out = rewound(kind, fault, folder), faulty(kind, fault, SKIP)
        for one, other in zip(back, left_out, strict=True):
            assert one["end"] == other["end"]
            assert one["lines"] == other["lines"]
        listed = json.loads((folder / "skipped_steps.json").read_text())["steps"]
        assert [(one["step"], one["epoch"], one["first"], one["end"]) for one in listed] == [(BAD, 1, 16, 32)]
        shutil.rmtree(folder)
    figure("R14", f"{len(tried)} strategies went back to a checkpoint, passed over the rows of the bad step, and ended "
           "with the bits of a run that left it out")  # fmt: skip


def lines_of(folder):
    return [file.read_bytes() for file in sorted(folder.glob("runs/*/loss.jsonl"))]


@pytest.mark.parametrize(
    ("bad", "every", "back_to"),
    thinned(
        [(4, 3, 3), (6, 3, 3), (7, 3, 6), (7, 5, 5), (2, 1, 1)], lambda bad, every, back_to: every in (1, 5) or bad == 6
    ),
)
def test_a_run_goes_back_over_the_ends_of_epochs(bad, every, back_to, tmp_path):
    """An epoch has three steps. What is due at its end is done after the rewind as it was before."""
    given = {"eval_strategy": "epoch", "logging_strategy": "epoch"}
    back = faulty("one process x1", "loss nan", {**REWIND, **given, "save_steps": every}, folder=tmp_path, steps=(bad,))
    left_out = faulty("one process x1", "loss nan", {**SKIP, **given}, steps=(bad,))
    assert back[0]["rewound"] == [back_to]
    for name in ("error", "end", "lines", "step", "epoch", "tokens"):
        assert back[0][name] == left_out[0][name]
    histories = [[repeatable_metrics(line) for line in one[0]["history"]] for one in (back, left_out)]
    assert histories[0] == histories[1]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", OTHERS)
def test_a_run_that_is_killed_right_after_it_went_back_passes_over_the_same_rows(kind, tmp_path):
    whole = rewound(kind, "gradient nan", tmp_path / "whole")
    killed = faulty(kind, "gradient nan", REWIND, folder=tmp_path / "killed", dies=True)
    assert {"died"} == {one["error"] for one in killed}
    shutil.copytree(tmp_path / "killed", tmp_path / "forgetful")
    # The fault does not come again: only the list knows of the step.
    resumed = faulty(kind, None, REWIND, folder=tmp_path / "killed", resume="auto")
    for one, other in zip(whole, resumed, strict=True):
        assert one["end"] == other["end"]
        assert [repeatable_metrics(line) for line in one["history"]] == [
            repeatable_metrics(line) for line in other["history"]
        ]
    # The files of metrics are cut back with the run; the one that was killed wrote a second one, which begins anew.
    assert lines_of(tmp_path / "whole") == lines_of(tmp_path / "killed")[1:]
    assert [json.loads(line)["step"] for line in lines_of(tmp_path / "whole")[0].splitlines()] == [*range(1, 8), 7]
    (tmp_path / "forgetful" / "skipped_steps.json").unlink()
    forgetful = faulty(kind, None, REWIND, folder=tmp_path / "forgetful", resume="auto")
    assert whole[0]["end"] != forgetful[0]["end"]


def test_a_resumed_run_judges_by_the_norms_of_before(tmp_path):
    """The window is full enough only with those of the checkpoint."""
    settings = {**SKIP, "save_strategy": "steps", "save_steps": 4}
    whole = faulty("one process x1", "spike", settings, folder=tmp_path)[0]
    resumed = faulty("one process x1", "spike", settings, folder=tmp_path, resume=str(tmp_path / "checkpoint-4"))[0]
    assert resumed["lines"][BAD] == whole["lines"][BAD] == {**whole["lines"][BAD], "skipped_steps": 1}
    assert whole["end"] == resumed["end"]


def test_the_norm_of_a_spike_judges_no_later_step():
    """In the window it would make room for the next one."""
    found = faulty("one process x1", "spike", SKIP, steps=(BAD, BAD + 1))[0]
    assert [BAD, BAD + 1] == [step for step, line in found["lines"].items() if "skipped_steps" in line]


def test_a_resumed_run_counts_the_bad_steps_of_before(tmp_path):
    settings = {**SKIP, "max_bad_steps": 1, "save_strategy": "steps", "save_steps": 4}
    assert faulty("one process x1", "loss nan", settings, folder=tmp_path, steps=(4,))[0]["error"] is None
    resumed = faulty("one process x1", "loss nan", settings, folder=tmp_path, resume=str(tmp_path / "checkpoint-4"))[0]
    assert resumed["error"].startswith("[FG651] 2 bad steps within 8 steps, and max_bad_steps is 1")


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path, caplog):
    settings = {**REWIND, "save_steps": 1}
    spoiled = tmp_path / "checkpoint-4" / "model.safetensors"
    found = faulty("one process x1", "spike", settings, folder=tmp_path, spoiled=spoiled)[0]
    assert found["rewound"] == [3]
    assert "skipped a checkpoint" in caplog.text
    assert found["end"] == faulty("one process x1", "spike", SKIP)[0]["end"]


@pytest.mark.parametrize(
    ("settings", "fault", "message"),
    [
        ({**SKIP, "bad_step_policy": "stop"}, "gradient nan", "[FG818] the norm of the gradients is nan at step 5"),
        ({**SKIP, "bad_step_policy": "stop"}, "spike", "[FG650] step 5 is a spike: the norm of the gradients is"),
        ({}, "loss inf", "[FG818] the loss is"),
        ({**REWIND, "save_steps": 7}, "loss nan", "[FG652] step 5 is bad, and there is no intact checkpoint"),
    ],
)
def test_a_run_that_cannot_go_on_says_why(settings, fault, message, tmp_path):
    found = faulty("one process x1", fault, settings, folder=tmp_path)[0]
    assert found["error"].startswith(message)
    assert found["before"][BAD]["model"] == found["end"]["model"]


def test_a_damaged_list_is_told(tmp_path):
    rewound("one process x1", "loss nan", tmp_path)
    (tmp_path / "skipped_steps.json").write_text('{"run": ')
    found = faulty("one process x1", None, REWIND, folder=tmp_path, resume="auto")[0]
    assert found["error"].startswith(f"[FG653] the list of skipped steps '{tmp_path / 'skipped_steps.json'}'")
