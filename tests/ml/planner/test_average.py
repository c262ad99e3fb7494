"""A plan counts the averaged weights with the optimizer state, without those that are frozen."""

import functools

import pytest

from forgather.launcher_env import ProcessFacts
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.planner.rank_trace import trace_rank
from tests.ml.fixtures import rows, tiny_llama


def categories(folder, **given):
    def make(hook):
        args = TrainingArguments(str(folder), use_cpu=True, optim="sgd", save_strategy="no", **given)
        return Trainer(model_init=functools.partial(hook(tiny_llama)), args=args, train_dataset=rows())

    facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
    _, peak = trace_rank(make, facts).peak
    return peak.categories


@pytest.mark.parametrize(("frozen", "share"), [(None, 1), (["lm_head"], 0)])
def test_the_average_of_what_is_trained_is_counted(tmp_path, frozen, share):
    weights = sum(one.nbytes for name, one in tiny_llama().named_parameters() if share or "lm_head" not in name)
    without = categories(tmp_path, freeze=frozen)
    averaged = categories(tmp_path, freeze=frozen, ema_decay=0.9)
    assert weights == averaged["optimizer"] - without.get("optimizer", 0)
