"""Rows that are divided by positions give the losses and gradients of whole rows, or are refused."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import BloomConfig, LlamaConfig, LlamaForSequenceClassification

import forgather.ml.context_attention as context_attention
import forgather.ml.strategy.context_parallel as context_parallel
from forgather.errors import DistributedError, TrainingError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments
from forgather.ml.checkpoint.rng import seed_process
from forgather.ml.context_attention import WholeRows
from forgather.ml.distributed.layout import Layout
from forgather.ml.documents import measured_families
from forgather.ml.losses import loss_rule
from forgather.ml.models import from_config
from forgather.ml.strategy.context_parallel import SequenceParts, proven_families, refuse_model
from forgather.ml.types import PaddingBatch, Topology
from forgather.parallel_sizes import uneven_heads
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.context_models import FAMILIES, model_of, rows_of_kind
from tests.ml.strategy.divided_rows import distance

KINDS = ("whole", "uneven", "packed", "uneven packed", "padded", "padded first")


def _distance(family, attention, kind, damage=contextlib.nullcontext):
    return distance(model_of(family, attention), rows_of_kind(kind), damage)


def _distances(cases):
    torch.set_num_threads(1)
    return {case: _distance(*case) for case in cases}


# The soft cap of Gemma 2 is part of eager attention alone.
PAIRS = [(family, name) for family in FAMILIES for name in ("sdpa", "eager") if (family, name) != ("gemma2", "sdpa")]
PAIRS += [("llama", "varlen"), ("mistral", "varlen")]
CASES = [(*pair, kind) for pair in PAIRS for kind in KINDS]
_QUICK = {
    2: [
        ("mistral", "sdpa", "uneven packed"),
        ("llama", "varlen", "uneven packed"),
        ("gemma3", "eager", "whole"),
        ("gpt2", "sdpa", "padded first"),
    ],
    4: [("llama", "sdpa", "packed"), ("mistral", "sdpa", "uneven")],
}


@pytest.mark.parametrize(
    ("size", "cases"),
    thinned([*_QUICK.items(), (2, CASES), (4, CASES)], lambda size, cases: cases is not CASES),
    ids=["2", "4", "2, all", "4, all"],
)
def test_divided_rows_are_equal_to_whole_rows(size, cases):
    for found in run_ranks(size, _distances, cases, start_group=True, timeout=240):
        assert {} == {case: value for case, value in found.items() if not value <= _limit(*case)}


def _limit(family, attention, kind):
    # The norms of Gemma add float32 numbers, and eager attention those of its softmax.
    if attention == "eager":
        return 2e-6
    return 1e-8 if family.startswith("gemma") else 1e-13


def test_every_proven_family_is_tested_and_keeps_documents_apart():
    assert proven_families() == set(FAMILIES)
    assert proven_families() <= set(measured_families()["apart"])


@contextlib.contextmanager
def _positions_of_the_part():
    """A negative control: each rank counts positions from the first token of its part."""
    inner = context_parallel._with_positions
    context_parallel._with_positions = lambda positions, added: inner(positions, added) % 6
    try:
        yield
    finally:
        context_parallel._with_positions = inner


@contextlib.contextmanager
def _masks_without_documents():
    """A negative control: attention knows nothing of the documents of whole rows."""
    inner = context_parallel._whole_rows
    context_parallel._whole_rows = lambda batch, documents, added: WholeRows(batch["input_ids"].shape[1] + added)
    try:
        yield
    finally:
        context_parallel._whole_rows = inner


@contextlib.contextmanager
def _masks_of_the_part():
    """A negative control: the window of a mask is made for the positions of one rank."""
    inner = context_attention._mask_of_whole_rows

    def of_part(function, rows, **given):
        return inner(function, WholeRows(given["q_length"]), **given)

    context_attention._mask_of_whole_rows = of_part
    try:
        yield
    finally:
        context_attention._mask_of_whole_rows = inner


CONTROLS = [
    ("llama", "whole", _positions_of_the_part),
    ("gpt2", "packed", _masks_without_documents),
    ("llama", "padded first", _masks_without_documents),
]


def _controls():
    found = [_distance(family, "sdpa", kind, damage) for family, kind, damage in CONTROLS]
    try:
        # The window of 4 covers more than half of the 6 positions of a part.
        _distance("mistral", "eager", "whole", _masks_of_the_part)
    except RuntimeError as error:
        return found, str(error)
    return found, "nothing"


def test_positions_and_masks_of_a_part_would_be_seen():
    distances, error = run_ranks(2, _controls, start_group=True)[0]
    assert all(found > 1e-3 for found in distances), distances
    assert "size" in error


class Unseen(nn.Module):
    """Attention that calls none of the functions of transformers."""

    def forward(self, **batch):
        return torch.zeros(())


def _refusals():
    model = model_of("llama")
    rule = loss_rule(model)
    batch = rule.prepared(rows_of_kind("whole"))
    parts = SequenceParts(dist.group.WORLD, torch.device("cpu"))
    messages = []
    wrong = [{**batch, "token_type_ids": batch["input_ids"]}, {**batch, "attention_mask": torch.ones(2, 1, 12, 12)}]
    for each in [*wrong, {"pixel_values": torch.ones(2, 3)}, torch.ones(2)]:
        with pytest.raises(TrainingError, match="FG709") as error:
            parts.part(each)
        messages.append(str(error.value))
    part = parts.part(batch)
    with pytest.raises(TrainingError, match="computed attention without a call"), parts.computing(part):
        Unseen()(**part)
    # Rows that only fill up a step are divided too, and have no loss.
    filler = parts.part(PaddingBatch(batch))
    with parts.computing(filler):
        assert float(rule.total(model, filler).detach()) == 0.0
    whole = rule.total(model, batch)
    assert torch.equal(whole, rule.total(model, batch)), "the functions of transformers are restored"
    return messages


def test_batches_that_have_no_positions_are_refused():
    messages = run_ranks(1, _refusals, start_group=True)[0]
    for message, words in zip(
        messages, ("'token_type_ids'", "4 dimensions", "without input_ids", "a Tensor"), strict=True
    ):
        assert words in message


def test_models_that_were_not_compared_are_refused():
    bloom = from_config(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=8), seed=1)
    classifier = LlamaForSequenceClassification(LlamaConfig(**_small(), num_labels=2, pad_token_id=0))
    plain = nn.Linear(2, 2)
    for model, words in ((bloom, "'bloom'"), (classifier, "ModelLoss"), (plain, "not a model of transformers")):
        with pytest.raises(DistributedError, match="FG757") as error:
            refuse_model(model, loss_rule(model), size=2)
        assert words in str(error.value)
    llama = model_of("llama")
    refuse_model(llama, loss_rule(llama, nn.CrossEntropyLoss()), size=2)


ROTARY = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.0],
        "long_factor": [2.0, 2.0],
        "original_max_position_embeddings": 8,
    },
}


@pytest.mark.parametrize("kind", ROTARY)
@pytest.mark.parametrize("method", ["ulysses", "ring"])
def test_rotary_positions_that_depend_on_the_length_of_rows_are_refused(kind, method):
    """Each rank would rotate by the angles of its own part: a model of these types differed from one process."""
    config = LlamaConfig(**_small(), max_position_embeddings=16, rope_parameters=ROTARY[kind])
    llama = from_config(config, seed=1)
    with pytest.raises(DistributedError, match=f"FG757.*of type '{kind}'"):
        refuse_model(llama, loss_rule(llama), size=2, method=method)


def _small():
    return {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}


def _checked(tmp_path, config, sizes):
    (tmp_path / "meta.yaml").write_text("name: Divided\n")
    folder = tmp_path / "templates" / "configs"
    folder.mkdir(parents=True)
    (folder / "long.yaml").write_text(f"""
main: !singleton:forgather.ml:AccelTrainer
    model_init: !partial:forgather.ml.models:from_config
        config: !singleton:transformers:{config}
    args: !singleton:forgather.ml:AccelTrainingArguments
        output_dir: out
        {sizes}
""")
    return [(one.code, one.message) for one in check_project(Project("long.yaml", str(tmp_path))).findings]


@pytest.mark.parametrize(
    ("config", "sizes", "expected"),
    (
        ("LlamaConfig { num_attention_heads: 4 }", "context_parallel_size: 4", None),
        ("LlamaConfig { num_attention_heads: 4 }", "context_parallel_size: 8", ("FG758", "its 4 attention heads")),
        ("BloomConfig { n_layer: 2 }", "context_parallel_size: 2", ("FG757", "BloomConfig")),
        ("BloomConfig { n_layer: 2 }", "context_parallel_size: 1", None),
        (
            "LlamaConfig { rope_parameters: {rope_type: dynamic, factor: 2.0} }",
            "context_parallel_size: 2",
            ("FG757", "rotary positions of LlamaConfig are of type 'dynamic'"),
        ),
        ("LlamaConfig { rope_parameters: {rope_type: linear, factor: 2.0} }", "context_parallel_size: 2", None),
    ),
)
def test_the_check_finds_models_that_cannot_be_divided(tmp_path, config, sizes, expected):
    found = [each for each in _checked(tmp_path, config, sizes) if each[0] in ("FG757", "FG758")]
    assert [expected[0]] == [code for code, _ in found] if expected else [] == found
    assert expected is None or expected[1] in found[0][1]


def test_heads_that_cannot_be_divided_are_refused():
    llama = model_of("llama")
    with pytest.raises(
        DistributedError, match="FG758.*4 attention heads cannot be divided over context_parallel_size 3"
    ):
        refuse_model(llama, loss_rule(llama), size=3)
    with pytest.raises(DistributedError, match="x tensor_parallel_size 4"):
        refuse_model(llama, loss_rule(llama), size=2, tensor_size=4)
    assert "neither" in uneven_heads(12, 3, size=2)[0]
    assert uneven_heads(8, 2, size=4) is uneven_heads(8, 8, size=4, tensor_size=2) is None


@pytest.mark.parametrize(
    ("kind", "settings", "code"),
    (
        (AccelTrainingArguments, {"context_parallel_rotate_method": "alltoall"}, "FG814.*no keys and values go around"),
        (AccelTrainingArguments, {"torch_compile": True}, "FG770"),
        (AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 1}}}, "FG770"),
        (AccelTrainingArguments, {"neftune_noise_alpha": 5.0}, "FG814"),
        (AccelTrainingArguments, {"fp8": "tensorwise"}, "FG814.*divided rows"),
        (AccelTrainingArguments, {"use_liger_kernel": True}, "FG814.*divided rows"),
        (PipelineTrainingArguments, {"split_spec": "auto"}, "FG770"),
    ),
)
def test_settings_that_do_not_fit_are_refused(kind, settings, code, tmp_path):
    with pytest.raises(ValueError, match=code):
        kind(output_dir=str(tmp_path), context_parallel_size=2, **settings)


def test_ranks_with_other_positions_draw_other_numbers():
    drawn = []
    for data in range(2):
        for context in range(2):
            sizes = {"dp_rank": data, "dp_size": 2, "cp_rank": context, "cp_size": 2}
            seed_process(1, Topology(rank=0, world_size=4, device=torch.device("cpu"), is_writer=True, **sizes))
            drawn.append(float(torch.rand(())))
    assert len(set(drawn)) == 4
    torch.manual_seed(1)
    assert drawn[0] == float(torch.rand(()))


def test_context_is_the_axis_after_the_slices():
    layout = Layout.for_world(16, context=2, tensor=2, shard=None)
    assert layout == Layout(data_parallel_size=4, context_parallel_size=2, tensor_parallel_size=2, shard_size=4)
    found = [(one.data, one.context, one.tensor) for one in map(layout.position, (0, 1, 2, 4, 15))]
    assert found == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (3, 1, 1)]
    with pytest.raises(DistributedError, match="FG704.*context_parallel_size 3"):
        Layout.for_world(4, context=3)
