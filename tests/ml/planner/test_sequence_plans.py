"""Plans of other lengths of rows equal those of runs that have such rows; the longest rows fit, and one step more does not."""

import functools
import random
from dataclasses import replace

import pytest

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.planner.deep_trace import deep_traces, depth_traces
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.row_length import num_tokens, resized_row
from forgather.ml.planner.row_line import peak_at
from forgather.ml.planner.sequence_plans import CellSize, longest_rows, plan_cells
from forgather.ml.planner.window_shape import WindowShape
from forgather.ml.preference_losses import DPOLoss, KTOLoss
from forgather.planner.efficiency import Efficiency
from forgather.planner.hardware import hardware
from forgather.planner.step_time import step_time
from tests.ml.packed_rows import SYMBOLS, packed
from tests.ml.planner.cells import Cell, make_trainer, pipeline
from tests.ml.planner.task_cells import PAIRS, feedback, pairs, trainer

EAGER = {"attn_implementation": "eager"}
SHARDED = {"fsdp": "full_shard", "gradient_accumulation_steps": 2}
ONE = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)


def documents(length):
    numbers = random.Random(0)
    texts = ["".join(numbers.choices(SYMBOLS, k=numbers.randint(3, 12))) for _ in range(800)]
    return packed(texts, length, document_boundaries=True)


def seconds(work):
    return step_time(work, hardware("h200"), Efficiency(), simulate=None).seconds.high


def of_length(rows, length):
    """The same rows as if they had been cut, or had been longer: each answer by one number of tokens."""
    return [
        {**row, **{name: ([5] * length)[: length - 16] for name in row if name != "prompt_ids" and name != "label"}}
        for row in rows
    ]


def task(make_rows, **given):
    def make(folder, length, rows, hook):
        args = {"per_device_train_batch_size": rows}
        return trainer(args=args, rows=functools.partial(make_rows, length), **given)(folder, hook)

    return make


def cell(cell):
    def make(folder, length, rows, hook):
        args = {**cell.args, "per_device_train_batch_size": rows}
        return make_trainer(replace(cell, length=length, args=args), folder, hook)

    make.cell = cell
    return make


QUICK = {"eager, recomputed": cell(Cell("eager", args={"gradient_checkpointing": True}, layers=1, sizes=EAGER))}
FULL = {
    "single, deep": cell(Cell("single", layers=7)),
    "GPT-2, LoRA": cell(Cell("GPT-2", model="gpt2", adapter=True, sizes={"n_positions": 128})),
    "sliding window": cell(Cell("Mistral", model="mistral")),
    "classifier": cell(Cell("BERT", model="bert")),
    "DDP": cell(Cell("DDP", 2, "AccelTrainer")),
    "FSDP2, accumulated": cell(Cell("FSDP2", 2, "AccelTrainer", SHARDED, layers=7)),
    "tensor": cell(Cell("tensor", 2, "AccelTrainer", {"tensor_parallel_size": 2})),
    "ZeRO 3": cell(Cell("ZeRO", 2, "AccelTrainer", {"deepspeed": {"zero_optimization": {"stage": 3}}})),
    "documents": task(documents),
    "DPO": task(lambda length: of_length(pairs(), length), loss_fn=DPOLoss(), **PAIRS),
    "KTO": task(
        lambda length: of_length([{**row, "label": 1} for row in feedback()], length), loss_fn=KTOLoss(), **PAIRS
    ),
}
CASES = [*QUICK, *(pytest.param(name, marks=pytest.mark.matrix) for name in FULL)]


def run_of(name):
    make = {**QUICK, **FULL}[name]
    known = getattr(make, "cell", Cell(name))
    sizes = {"world_size": known.world_size, "local_world_size": known.world_size}
    return make, sizes, known.args.get("gradient_accumulation_steps", 1)


@pytest.mark.matrix
@pytest.mark.parametrize("name", [*QUICK, *FULL])
def test_the_plan_of_a_cell_is_that_of_a_run_with_its_sizes(name, tmp_path, record_property):
    make, sizes, steps = run_of(name)
    cells = [CellSize(length, rows, steps) for length, rows in ((32, 1), (64, 2 if name == "KTO" else 3), (96, 2))]
    # Other rows of KTO are copies of tensors that are views in the run: they need 0.04 % less.

    plans, _ = plan_cells(functools.partial(make, tmp_path, 64, 2), **sizes, cells=cells, usual_length=64)

    peaks = set()
    for one, (plan, work) in zip(cells, plans, strict=True):
        own, own_work = plan_run(functools.partial(make, tmp_path, one.length, one.rows), **sizes)
        # How many rows of another length the data has is not known to the planner.
        assert {**own, "most_rows": plan["most_rows"]} == plan, one
        if "ZeRO" in name:
            # In its second step, which alone is planned otherwise, the engine compares the order of weights among ranks.
            assert seconds(work) == pytest.approx(seconds(own_work), rel=0.05)
        else:
            assert own_work == work
        assert one.length == plan["tokens_per_row"]
        peaks.add(max(phase["num_bytes"] for phase in plan["ranks"][0]["phases"]))
    # A plan that did not depend on the size would equal itself.
    assert len(peaks) == len(cells)
    record_property("figure: cells", len(cells))


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_the_longest_rows_fit_and_one_step_more_does_not(name, tmp_path, record_property):
    make, sizes, steps = run_of(name)
    first = functools.partial(make, tmp_path, 64, 2)
    numbers = random.Random(name)
    lengths = [48] if name in QUICK else [numbers.randrange(16, 128, 16) for _ in range(3)]
    shapes = [WindowShape(rows=2, micro_batches=steps, length=length + more) for length in lengths for more in (0, 16)]
    facts = ProcessFacts(rank=0, local_rank=0, **sizes)
    peaks = [
        trace.peak[1].num_bytes + sum(trace.facts.untraced.values()) for trace in deep_traces(first, facts, shapes)
    ]
    for length, fits, following in zip(lengths, peaks[::2], peaks[1::2], strict=True):
        limit = numbers.choice([fits, following - 1, numbers.randint(fits, following - 1)])
        found = longest_rows(first, **sizes, limit=limit, size=CellSize(64, 2, steps), step=16)

        assert (length, fits, following) == (found["size"], found["num_bytes"], found["next_bytes"])
        assert found["is_exact"]
        record_property("figure: traces", len(found["traced"]))


@pytest.mark.matrix
def test_attention_that_keeps_its_scores_is_quadratic_and_two_points_do_not_tell(tmp_path):
    make = functools.partial(QUICK["eager, recomputed"], tmp_path, 64, 2)
    lengths = (16, 32, 64, 128)
    traces = depth_traces(make, ONE, [WindowShape(length=length) for length in lengths])
    points = dict(zip(lengths, traces, strict=True))
    measured = peak_at({128: points.pop(128)}, 128)
    assert measured == peak_at(points, 128)
    assert measured > 1.02 * peak_at({length: points[length] for length in (32, 64)}, 128)


def test_the_positions_of_the_model_bound_the_rows(tmp_path):
    make = functools.partial(cell(Cell("GPT-2", model="gpt2", layers=1)), tmp_path, 32, 1)
    alone = {"world_size": 1, "local_world_size": 1}
    found = longest_rows(make, **alone, limit=2**40, size=CellSize(32, 1, 1), step=24)
    assert (48, True, 64) == (found["size"], found["is_bound_by_positions"], found["max_positions"])
    # Rows of a step are not traced first, which takes very long for a huge one.
    for step in (65, 10**8):
        with pytest.raises(PlanError, match=f"a step of {step} tokens is longer than the 64 positions"):
            longest_rows(make, **alone, limit=2**40, size=CellSize(32, 1, 1), step=step)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (functools.partial(make_trainer, pipeline("1F1B", "Schedule1F1B", layers=4)), "for a pipeline"),
        (functools.partial(make_trainer, Cell("own", model="own")), "the training rows have no 'input_ids'"),
    ],
    ids=["pipeline", "images"],
)
def test_runs_whose_rows_cannot_be_resized_are_refused(make, message, tmp_path):
    sizes = {"world_size": 2 if "pipeline" in message else 1}
    with pytest.raises(PlanError, match=message) as caught:
        plan_cells(
            functools.partial(make, tmp_path),
            **sizes,
            local_world_size=1,
            cells=[CellSize(32, 1, 1)],
            usual_length=64,
        )
    assert caught.value.code == "FG997"


def test_rows_of_several_documents_keep_a_border_and_answers_their_difference():
    row = {"input_ids": [*range(8)], "position_ids": [0, 1, 2, 3, 4, 5, 0, 1], "name": "a"}
    assert resized_row(row, -5) == {"input_ids": [5, 6, 7], "position_ids": [5, 0, 1], "name": "a"}
    assert resized_row(row, 2)["position_ids"] == [0, 1, 2, 3, 4, 5, 0, 1, 0, 1]
    alone = {"input_ids": [3, 4], "position_ids": [0, 1]}
    assert resized_row(alone, 2) == {"input_ids": [3, 4, 3, 4], "position_ids": [0, 1, 2, 3]}
    pair = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7]}
    longer, shorter = resized_row(pair, 4), resized_row(pair, -4)
    assert [10, 7, 5] == [num_tokens(longer), len(longer["chosen_ids"]), len(longer["rejected_ids"])]
    assert (2, [1], [4], [7]) == (
        num_tokens(shorter), shorter["prompt_ids"], shorter["chosen_ids"], shorter["rejected_ids"]
    )  # fmt: skip
