"""What a report shows as the settings of a run is what the run was under."""

import io
import json

import pytest
from rich.console import Console
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from transformers import get_cosine_schedule_with_warmup

from forgather.ml.callbacks import RunSummaryCallback
from forgather.ml.callbacks.effective_settings import optimizer_facts, schedule_facts
from tests.ml.callback_scene import tiny_model, trainer


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_the_optimizer_and_schedule_of_the_factories_stand_in_for_the_arguments(kind, tmp_path):
    def optimizer(parameters):
        return AdamW(parameters, lr=0.25, betas=(0.9, 0.95), weight_decay=0.125)

    def schedule(optimizer):
        return get_cosine_schedule_with_warmup(optimizer, 1, 6)

    callback = RunSummaryCallback(console=Console(file=io.StringIO()), run_dir=tmp_path)
    run = trainer(
        kind, tmp_path, [callback], factories={"optimizer_factory": optimizer, "lr_scheduler_factory": schedule}
    )
    run.train()
    summary = json.loads((tmp_path / "summary.json").read_text())
    facts = summary["optimizer"]
    assert ("AdamW", 0.25, [0.9, 0.95], 0.125) == tuple(facts[n] for n in ("class", "lr", "betas", "weight_decay"))
    assert ("cosine_schedule_with_warmup", 1) == (summary["schedule"]["plan"], summary["schedule"]["num_warmup_steps"])
    idle = {"weight_decay", "adam_beta2", "optim", "learning_rate", "lr_scheduler_type", "num_train_epochs"}
    assert set() == idle & set(summary["arguments"])
    page = (tmp_path / "report.html").read_text()
    assert "AdamW" in page and "cosine_schedule_with_warmup" in page and "adamw_torch_fused" not in page


def test_groups_that_differ_are_shown_with_each_value():
    weights = list(tiny_model().parameters())
    groups = [{"params": weights[:1], "weight_decay": 0.5}, {"params": weights[1:], "weight_decay": 0.0}]
    assert [0.5, 0.0] == optimizer_facts(AdamW(groups))["weight_decay"]


def test_a_schedule_of_torch_is_shown_with_its_settings():
    optimizer = SGD(tiny_model().parameters(), lr=0.5)
    schedule = StepLR(optimizer, step_size=3, gamma=0.25)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert {"class": "StepLR", "step_size": 3, "gamma": 0.25} == schedule_facts(schedule)
    assert 0.5 == optimizer_facts(optimizer)["lr"]
