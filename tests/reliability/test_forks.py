"""What a forked process of a test does not inherit: the duty to delete what the parent has left."""

import datetime
import gc
import threading

import torch.distributed as dist

from tests.reliability.forks import in_child


def collected():
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    gc.collect()
    return "collected"


def test_garbage_of_the_parent_is_not_deleted_in_a_forked_process(tmp_path):
    gc.disable()
    try:
        group = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, datetime.timedelta(seconds=10))
        cycle = [group]
        cycle.append(cycle)
        del group, cycle
        ended = in_child(collected)
    finally:
        gc.enable()
    assert "collected" == ended.value, ended
