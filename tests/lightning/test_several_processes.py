"""A module on two gloo ranks comes to what Lightning's DDP comes to: its losses, weights and synchronized metrics."""

import json
import os

import pytest

import forgather.lightning as L
from forgather.errors import ForgatherError
from tests.lightning import scripts
from tests.lightning.comparison import differences
from tests.lightning.test_against_lightning import RECORDED
from tests.ml.distributed.gang import run_ranks

STRATEGIES = {"ddp": L.DDPStrategy, "fsdp": L.FSDPStrategy}


def of_a_rank(folder, strategy):
    scripts.on_two_ranks(L, folder, strategy=STRATEGIES[strategy](), devices=2)
    with open(os.path.join(folder, f"rank-{os.environ['RANK']}.json"), encoding="utf-8") as file:
        return json.load(file)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_come_to_what_lightnings_ddp_comes_to(tmp_path, strategy):
    found = run_ranks(2, of_a_rank, str(tmp_path), strategy)
    assert [] == differences(RECORDED["on_two_ranks"], found)


def test_the_ranks_read_other_rows_so_that_the_test_above_can_fail():
    first, second = RECORDED["on_two_ranks"]
    assert not set(first["losses"]) & set(second["losses"])
    assert first["weights"] == second["weights"]
    # Neither the mean of the ranks' means, nor that of one rank.
    mean = sum(of["metrics"]["train_loss_epoch"] for of in (first, second)) / 2
    assert mean == first["metrics"]["train_loss_epoch"]
    assert abs(mean - sum(first["losses"][4:] + second["losses"][4:]) / 8) > 1e-3


def leaving_out(folder):
    changes = {"training_step": lambda self, batch, batch_idx: None}
    model = scripts.regression(L, **changes)()
    made = scripts.trainer(L, folder, max_epochs=1, strategy=L.DDPStrategy(), devices=2)
    with pytest.raises(ForgatherError, match="FG865.*training_step returned None, and the other ranks would wait"):
        made.fit(model, *scripts.loaders())


def test_a_batch_cannot_be_left_out_on_several_ranks(tmp_path):
    assert [None, None] == run_ranks(2, leaving_out, str(tmp_path))


def test_deepspeed_is_refused_by_name(tmp_path):
    made = scripts.trainer(L, tmp_path, max_epochs=1, strategy=L.DeepSpeedStrategy(stage=2))
    with pytest.raises(ForgatherError, match="FG865.*strategy='deepspeed'.*'fsdp'"):
        made.fit(scripts.regression(L)(), *scripts.loaders())
