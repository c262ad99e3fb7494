"""A process that dies at any operation on files leaves the old checkpoint or the new one, and nothing between."""

import os
import sys
import warnings

import pytest
import torch

from forgather.ml.checkpoint import (
    newest_verified,
    prune,
    read_state,
    verify,
    write_checkpoint,
    write_state,
)

DIED = 77
WATCHED = ("open", "os.", "shutil.")


def save(folder, step, content=None):
    content = step if content is None else content

    def fill(draft):
        write_state(draft, "optimizer", {"step": content, "weight": torch.full((64,), float(content))})
        write_state(draft, "training_state", {"schedule": {"last_epoch": content}})

    newest = write_checkpoint(folder, step, fill)
    prune(folder, 1, newest=newest)


def dies_at(folder, operation, step):
    """Saves content 2 as `step` in a process that dies before operation number `operation`; tells whether it died."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        left = operation

        def die(event, _):
            nonlocal left
            if event.startswith(WATCHED):
                left -= 1
                if left < 0:
                    os._exit(DIED)

        sys.addaudithook(die)
        save(folder, step, 2)
        os._exit(0)
    return DIED == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("step", [2, 1], ids=["next", "same"])
def test_every_point_of_death_leaves_a_whole_checkpoint(tmp_path, step):
    points = 0
    for operation in range(1000):
        folder = tmp_path / str(operation)
        folder.mkdir()
        save(folder, 1)
        died = dies_at(folder, operation, step)
        newest, skipped = newest_verified(folder)
        assert [] == skipped
        state = read_state(newest, "optimizer")
        assert state["step"] == read_state(newest, "training_state")["schedule"]["last_epoch"]
        assert verify(newest).step == (1 if step == 1 else state["step"])
        assert torch.equal(torch.full((64,), float(state["step"])), state["weight"])
        save(folder, 3)
        assert ["checkpoint-3"] == [entry.name for entry in folder.iterdir()]
        if not died:
            break
        points += 1
    assert points > 15
    assert 2 == state["step"]
