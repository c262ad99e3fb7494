"""What is computed from a whole micro-batch depends on how a step is divided; a warning names it, and its absence is kept."""

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, TrainingArguments

from forgather.ml import Trainer
from forgather.ml.batch_dependence import warn_of_micro_batches
from forgather.ml.trainer.collation import warn_mixed_rows
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import VOCAB, regression_rows, rows, tiny_llama


class Normalized(nn.Module):
    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), norm, nn.Linear(8, 1)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.last(self.norm(self.first(x))).squeeze(-1), y)


def mixtral(coefficient):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": coefficient}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes, **experts))


def trained(model, data, settings, accumulation):
    """The weights after a step with 8 rows, which are divided into some micro-batches."""
    size = 8 // accumulation
    args = settings(
        per_device_train_batch_size=size, gradient_accumulation_steps=accumulation, max_steps=1, optim="sgd"
    )
    Trainer(model, args, train_dataset=data).train()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


CASES = {
    "batch norm": (lambda: Normalized(nn.BatchNorm1d(8)), regression_rows, "FG886"),
    "group norm": (lambda: Normalized(nn.GroupNorm(2, 8)), regression_rows, None),
    "experts": (lambda: mixtral(0.5), rows, "FG887"),
    "experts without": (lambda: mixtral(0.0), rows, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_comes_exactly_where_dividing_a_step_changes_the_result(case, settings, caplog):
    make, data, code = CASES[case]
    whole = trained(make(), data(), settings, 1)
    assert not {"FG886", "FG887"} & {record.args[0] for record in caplog.records if record.args}

    divided = trained(make(), data(), settings, 2)

    assert (code is None) == torch.allclose(whole, divided, rtol=0, atol=1e-6)
    assert (code is None) == ("2 micro-batches" not in caplog.text)
    assert code is None or f"[{code}]" in caplog.text


def test_a_norm_with_statistics_is_named_unless_it_is_frozen_or_synchronized(caplog):
    layers = {"frozen": nn.BatchNorm1d(2).eval(), "synced": nn.SyncBatchNorm(2), "plain": nn.InstanceNorm1d(2)}
    model = nn.ModuleDict(layers)
    warn_of_micro_batches(model, replicas=2, accumulation=1)
    assert "" == caplog.text

    for name in "abcd":
        model[name] = nn.BatchNorm1d(2) if name != "b" else nn.InstanceNorm1d(2, track_running_stats=True)
    warn_of_micro_batches(model, replicas=2, accumulation=3)

    assert "[FG886] a, b, c and 1 more in ModuleDict" in caplog.text
    assert "2 processes and 3 micro-batches" in caplog.text and "convert_sync_batchnorm" in caplog.text


def test_packed_rows_of_a_mixture_of_experts_are_warned_of(caplog):
    positions = [{"input_ids": [1, 2, 3], "position_ids": ids} for ids in ([0, 1, 2], [0, 1, 0])]
    warn_mixed_rows(mixtral(0.5), positions[:1])
    warn_mixed_rows(mixtral(0.0), positions)
    assert "FG887" not in caplog.text
    warn_mixed_rows(mixtral(0.5), positions)
    assert "[FG887]" in caplog.text and "the rows hold several documents" in caplog.text


def test_the_trainer_of_transformers_warns_too(tmp_path, caplog):
    plain = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "max_steps": 1, "disable_tqdm": True}
    args = TrainingArguments(str(tmp_path), gradient_accumulation_steps=2, **plain)
    HFTrainer(mixtral(0.5), args, train_dataset=rows()).train()
    assert "[FG887]" in caplog.text


def test_rotary_positions_that_depend_on_the_longest_row_are_named(settings, caplog):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

    def padded(rows):
        longest = max(len(row["input_ids"]) for row in rows)
        short = [(row["input_ids"], longest - len(row["input_ids"])) for row in rows]
        return {
            "input_ids": torch.tensor([ids + [0] * missing for ids, missing in short]),
            "labels": torch.tensor([ids + [-100] * missing for ids, missing in short]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * missing for ids, missing in short]),
        }

    def loss(accumulation):
        model = tiny_llama(max_position_embeddings=8, rope_parameters=rope, initializer_range=0.5)
        data = [{"input_ids": [*range(1, length)]} for length in (6, 7, 16, 12)]
        args = settings(
            per_device_train_batch_size=4 // accumulation,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
            train_sampling_strategy="sequential",
        )
        return Trainer(model, args, train_dataset=data, data_collator=padded).train().training_loss

    whole = loss(1)
    assert "FG886" not in caplog.text
    assert abs(loss(2) - whole) > 1e-4
    assert "[FG886] the rotary positions of LlamaForCausalLM are of type 'dynamic'" in caplog.text
    assert "2 micro-batches" in caplog.text
