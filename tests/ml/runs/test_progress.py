"""The heartbeat reads the progress of each trainer, ours and that of transformers, from its state."""

import pytest
from transformers import TrainerCallback

from forgather.heartbeat import Heartbeat, current_heartbeat
from forgather.run_status import load_status
from tests.ml.callback_scene import trainer


class Reader(TrainerCallback):
    """Writes a heartbeat at the end of each step, and reads it as another process would."""

    def __init__(self, folder):
        self.folder = str(folder)
        self.steps = []

    def on_step_end(self, args, state, control, **kwargs):
        current_heartbeat().update()
        found = load_status(self.folder)
        self.steps.append((found.step, found.max_steps))


@pytest.mark.parametrize("kind", ["ours", "transformers"])
def test_each_heartbeat_states_the_last_finished_step(kind, tmp_path):
    (tmp_path / "run").mkdir()
    reader = Reader(tmp_path / "run")
    with Heartbeat(str(tmp_path / "run"), started=1.0) as heartbeat:
        main = trainer(kind, tmp_path / "out", [reader])
        heartbeat.watch(main)
        main.train()
    assert [(step, 6) for step in range(1, 7)] == reader.steps
    assert (6, 6) == (load_status(reader.folder).step, load_status(reader.folder).max_steps)
