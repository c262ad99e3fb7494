"""The pipelines that a search plans, and the divisions of an update that each allows."""

import pytest

from forgather.errors import DistributedError
from forgather.planner.choices import DEFAULTS, changes
from forgather.planner.leaf import leaf_text
from forgather.planner.pipeline_choices import MOST_CHUNKS, divisions, pipeline_choices, settings_of

ROWS = (1, 2, 6, 16, 40, 96, 512, 1000)


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (2, 1), (4, 1), (6, 1), (8, 2)])
def test_sizes_divide_the_devices(gpus, nodes):
    world = gpus * nodes
    found = pipeline_choices(gpus, nodes)
    assert {size for size in range(2, world + 1) if world % size == 0} == {
        one.settings["pipeline_parallel_size"] for one in found
    }
    for one in found:
        assert world == one.settings["pipeline_parallel_size"] * one.replicas
        assert one.replicas == one.settings["data_parallel_size"]
    assert len(found) == len({one.title for one in found})
    # Without recomputation first: where that fits, recomputation is not planned.
    assert [one.recomputes for one in found] == sorted(one.recomputes for one in found)


def test_each_division_is_one_that_the_strategy_allows_and_keeps_the_rows():
    strategy = pytest.importorskip("forgather.ml.strategy.pipeline.schedules")
    for choice in pipeline_choices(6, 1) + pipeline_choices(8, 1):
        schedule = choice.settings["schedule_class"]
        placement = strategy.place_stages(
            schedule,
            choice.settings["pipeline_parallel_size"],
            stages_per_rank=choice.settings["stages_per_rank"],
            num_stages=None,
        )
        for rows in ROWS:
            found = divisions(choice, rows)
            assert len(found) <= 3
            for chunks, runs in found:
                assert rows == chunks * runs * choice.replicas
                assert chunks <= MOST_CHUNKS
                assert chunks == strategy.num_micro_batches(schedule, placement, chunks, chunks)
            if rows % choice.replicas or found:
                continue
            # None is left out: the strategy allows no number either, but one micro-batch alone.
            for chunks in range(2, rows // choice.replicas + 1):
                if rows // choice.replicas % chunks == 0:
                    with pytest.raises(DistributedError):
                        strategy.num_micro_batches(schedule, placement, chunks, chunks)


def test_the_changes_divide_the_rows_of_a_process_among_the_micro_batches():
    choice = pipeline_choices(8, 1)[0]
    (chunks, runs), *_ = divisions(choice, 512)
    settings = settings_of(choice, divisions(choice, 512)[0], {"model.layers.3": "end"})
    pipeline = type(choice)(title="a", trainer=choice.trainer, settings=settings)
    found = {**DEFAULTS, **changes(pipeline, (1, chunks * runs), {"fsdp": "full_shard"})}
    assert (chunks, runs, chunks) == (
        found["per_device_train_batch_size"],
        found["gradient_accumulation_steps"],
        found["pipeline_chunks"],
    )
    assert found["fsdp"] is None
    text = leaf_text("configs/a.yaml", changes(pipeline, (1, 512), {}), name="b", trainer=choice.trainer, processes=8)
    assert '    split_spec: {"model.layers.3": end}' in text.splitlines()
    assert sum(bool(line) for line in text.splitlines()) <= 19
