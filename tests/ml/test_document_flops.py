"""The FLOPs of packed rows: those of the scores inside of documents, in plans and in the MFU of log lines."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import forgather.ml
from forgather.launch.planning import traced_plan
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.losses import loss_rule
from forgather.ml.planner.masked_rows import document_length
from forgather.planner.work import RankWork, RunWork
from forgather.project import Project
from tests.ml.distributed.bench import make_model, packed_rows
from tests.ml.distributed.gang import run_ranks
from tests.ml.test_counted_flops import HEADS, LAYERS, ROWS, TOKENS, VOCABULARY, WIDTH, Counting
from tests.patience import patience

LENGTHS = [[5, 20, 7], [30, 2]]
STEP = {"model_flops": 8e9, "document_flops": 3e9, "document_length": 6.0, "peak_flops": 1e12}


def counted(attention, lengths, document_length):
    """Returns the work of a step on rows of documents, as torch's dispatcher sees it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=96,
        vocab_size=VOCABULARY,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    rule = loss_rule(model)
    batch = {"input_ids": torch.randint(VOCABULARY, (ROWS, TOKENS)), "position_ids": positions}
    prepared = rule.prepared({**batch, "labels": batch["input_ids"]})
    with Counting() as counting:
        loss = rule.total(model, prepared, denom=1.0)
        counting.phase = "backward"
        loss.backward()
    one = RankWork(ranks=(0, 0), stages=(), operations=counting.work.operations, messages={})
    sizes = {
        "world_size": 1,
        "local_world_size": 1,
        "rows_per_update": ROWS,
        "tokens_per_row": TOKENS,
        "num_updates": 1,
    }
    rest = {"schedule": None, "micro_batches": 1, "schedule_runs": 1}
    return RunWork(**sizes, **rest, ranks=(one,), document_length=document_length)


@pytest.mark.parametrize(("attention", "lengths"), [("sdpa", LENGTHS), ("varlen", LENGTHS), ("sdpa", [[32], [32]])])
def test_the_scores_inside_of_documents_count(attention, lengths):
    pairs = sum(length**2 for row in lengths for length in row)
    work = counted(attention, lengths, pairs / (ROWS * TOKENS))
    products = 2 * ROWS * TOKENS * (LAYERS * (4 * WIDTH**2 + 3 * WIDTH * 96) + WIDTH * VOCABULARY)
    scores = LAYERS * 4 * WIDTH * pairs // 2
    assert work.document_flops == pytest.approx(3 * scores, rel=1e-3)
    assert work.model_flops == pytest.approx(3 * (products + scores), rel=1e-3)


def test_without_a_length_of_documents_what_is_computed_counts():
    work = counted("sdpa", LENGTHS, None)
    products = 2 * ROWS * TOKENS * (LAYERS * (4 * WIDTH**2 + 3 * WIDTH * 96) + WIDTH * VOCABULARY)
    assert work.model_flops == pytest.approx(3 * (products + LAYERS * 4 * WIDTH * ROWS * TOKENS**2), rel=1e-3)
    assert work.document_flops == 0


def flops_a_token(folder, trainer=forgather.ml.Trainer, kind=forgather.ml.TrainingArguments, rows=8, **settings):
    """Returns the model FLOPs for each token that each line of a run counts, by its MFU."""
    args = kind(
        str(folder),
        use_cpu=True,
        max_steps=4,
        logging_steps=2,
        save_strategy="no",
        per_device_train_batch_size=rows // 2,
        gradient_accumulation_steps=2,
        logging_dir=str(folder / "run"),
        **settings,
    )
    (folder / "run").mkdir(parents=True, exist_ok=True)
    plan = {"time": {"step": STEP}, "rows_per_update": 8, "tokens_per_row": 12, "world_size": 1}
    (folder / "run" / "plan.json").write_text(json.dumps(plan))
    environment = (
        {}
        if trainer is forgather.ml.Trainer
        else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    )
    made = trainer(lambda: make_model("llama", torch.float32, 1), args, train_dataset=packed_rows(1, 4), **environment)
    made.train()
    return [line["mfu"] * 1e12 / line["tokens_per_second"] for line in made.state.log_history if "mfu" in line]


def lengths_of(rows):
    starts = [[*(number for number, at in enumerate(row["position_ids"].tolist()) if at == 0), 12] for row in rows]
    return [end - start for row in starts for start, end in zip(row, row[1:], strict=False)]


def test_each_line_counts_the_documents_of_its_own_steps(tmp_path):
    rows = packed_rows(1, 4)
    found = flops_a_token(tmp_path, seed=0, train_sampling_strategy="sequential")
    expected = []
    for line in (rows[:16], rows[16:32]):
        lengths = lengths_of(line)
        mean = sum(length**2 for length in lengths) / sum(lengths)
        expected.append((5e9 + 3e9 * mean / 6) / (8 * 12))
    assert found == pytest.approx(expected)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)


def on_two_ranks(folder):
    kind, trainer = forgather.ml.AccelTrainingArguments, forgather.ml.AccelTrainer
    return flops_a_token(folder, trainer, kind, rows=4, seed=0, train_sampling_strategy="sequential")


def test_the_documents_of_all_ranks_count(tmp_path):
    single = flops_a_token(tmp_path / "single", seed=0, train_sampling_strategy="sequential")
    for found in run_ranks(2, on_two_ranks, tmp_path / "several"):
        assert found == pytest.approx(single)


def test_the_length_of_documents_is_a_mean_over_tokens():
    rows = [
        {"position_ids": torch.cat([torch.arange(length) for length in lengths])} for lengths in ([5, 20, 7], [30, 2])
    ]
    assert document_length(rows) == sum(length**2 for row in LENGTHS for length in row) / 64


@pytest.mark.matrix
def test_what_is_computed_in_another_way_does_not_change_the_flops_of_the_model():
    def work(config="single.yaml", gpus=1, **settings):
        changes = [(f"+trainer_args.{name}", str(value).lower()) for name, value in settings.items()]
        return traced_plan(Project(config, "projects/parallel", overrides=changes), gpus=gpus, nodes=1)[1]

    plain = work()
    assert plain.document_length == plain.tokens_per_row == 64
    assert 0 < plain.document_flops < plain.model_flops / 4
    for other in (
        work(gradient_checkpointing=True),
        work(linear_cross_entropy=True, linear_cross_entropy_chunk_size=128),
        work("context.yaml", 2),
    ):
        assert other.document_length == plain.document_length
        assert other.model_flops == pytest.approx(plain.model_flops, rel=1e-3)
        assert other.document_flops == pytest.approx(plain.document_flops, rel=1e-3)
