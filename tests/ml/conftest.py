"""Fixtures of the ML tests: one thread, so that sums are added in one order, and short settings."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def settings(tmp_path):
    """Returns a maker of arguments: no saving, no logging, on the CPU, unless it is told otherwise."""
    from forgather.ml import TrainingArguments

    def make(**given):
        plain = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "per_device_train_batch_size": 2,
            "save_strategy": "no",
            "logging_strategy": "no",
            "num_train_epochs": 1,
            "learning_rate": 1e-2,
        }
        return TrainingArguments(**{**plain, **given})

    return make
