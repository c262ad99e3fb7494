"""Host memory and disk of a run: checkpoints by their limit, copies of background saves, processes and workers."""

import pytest

from forgather.planner.storage import checkpoint_bytes, disk_rows, host_rows


def plan(**settings):
    return {
        "world_size": 8,
        "ranks": [],
        "model_bytes": 100,
        "weights_bytes": 80,
        "optimizer_bytes": 160,
        "settings": {"save_strategy": "steps", "save_steps": 10, "max_steps": 100, **settings},
    }


def disk(**settings):
    return {row.name: row.least for row in disk_rows(plan(**settings))}


def host(processes=4, **settings):
    return {row.name: (row.least, row.most) for row in host_rows(plan(**settings), processes=processes)}


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"save_total_limit": 2}, {"one checkpoint": 240, "checkpoints that are kept": 720, "the model": 80}),
        ({}, {"one checkpoint": 240, "all checkpoints": 2400, "the model": 80}),
        ({"save_steps": 0.25}, {"one checkpoint": 240, "all checkpoints": 960, "the model": 80}),
        ({"max_steps": -1}, {"one checkpoint": 240, "the model": 80}),
        ({"save_strategy": "epoch"}, {"one checkpoint": 240, "the model": 80}),
        ({"save_only_model": True, "save_total_limit": 1}, {"one checkpoint": 80, "checkpoints that are kept": 160, "the model": 80}),
        ({"save_strategy": "no"}, {}),
    ],
)  # fmt: skip
def test_the_disk_of_a_run(settings, found):
    assert found == disk(**settings)


def test_a_state_that_is_stored_in_another_way_is_not_guessed():
    unknown = {**plan(async_save=True), "weights_bytes": None, "optimizer_bytes": None}
    assert checkpoint_bytes(unknown) is None
    assert () == disk_rows(unknown)
    assert "copies for async_save" not in [row.name for row in host_rows(unknown, processes=8)]


def test_the_memory_of_a_machine():
    assert {"weights while they are made or read", "weights while the model is saved", "processes"} == set(host())
    assert "weights while the model is saved" not in host(save_strategy="no")
    assert (100, 100) == host()["weights while they are made or read"]
    assert (120, 120) == host(async_save=True)["copies for async_save"]
    assert (240, 240) == host(processes=8, async_save=True)["copies for async_save"]
    # Half of the ranks are on the machine, and no process holds the whole model.
    assert (0, 50) == host(initial_weights="counter")["weights while they are made or read"]
    assert (100, 100) == host(initial_weights="sequential")["weights while they are made or read"]
    least, most = host(dataloader_num_workers=2)["data loader workers"]
    assert (2 * least, 2 * most) == host(processes=8, dataloader_num_workers=2)["data loader workers"]
    assert least < most


def test_a_machine_holds_what_its_processes_offload():
    offloaded = [{"name": "parameters", "num_bytes": 10}, {"name": "optimizer", "num_bytes": 20}]
    run = {**plan(), "ranks": [{"ranks": (0, 7), "host": offloaded}]}
    found = {row.name: (row.least, row.most) for row in host_rows(run, processes=4)}
    # Pinned memory is rounded up to a power of two.
    assert ((40, 80), (80, 80)) == (found["offloaded parameters"], found["offloaded optimizer"])
