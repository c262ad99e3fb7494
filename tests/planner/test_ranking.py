"""Choices, their ranking, the text of a leaf, and work on a line, as plain values."""

import json

import pytest

from forgather.errors import PlanError
from forgather.planner.choices import ACCEL_TRAINER, DEFAULTS, batches, changes, choices
from forgather.planner.efficiency import Range
from forgather.planner.fit import Verdict
from forgather.planner.foreign_configs import FORMS, foreign_text, missing_settings
from forgather.planner.leaf import leaf_text
from forgather.planner.ranking import Cell, ranked, refuse_if_nothing_fits, rejection_lines, rejections
from forgather.planner.work import Operation, work_on_line

GIB = 2**30
GIVENS = [
    {},
    {"fsdp": "shard_grad_op", "per_device_train_batch_size": 3, "gradient_checkpointing": True},
    {"fsdp_config": {"cpu_offload": True, "mixed_precision": "autocast"}},
    {"deepspeed": {"zero_optimization": {"stage": 2}}, "gradient_accumulation_steps": 3},
    {"tensor_parallel_size": 2, "fsdp": "full_shard"},
]


def cell(title="a", rows=1, least=1, **facts):
    facts = {"verdict": Verdict.FITS, "available": 24 * GIB, "most": least, **facts}
    return Cell(title=title, rows=rows, micro_batches=8 // rows, settings={}, least=least, **facts)


def test_every_division_of_an_update_keeps_its_rows():
    for choice in choices(8, 2, {}):
        sizes = batches(96, choice.replicas)
        assert {rows * number * choice.replicas for rows, number in sizes} == {96}
        assert len(sizes) == len(set(sizes))
    assert () == batches(10, 4)


@pytest.mark.parametrize("given", GIVENS)
def test_the_changes_of_a_choice_lead_from_any_config_to_the_same_settings(given):
    for choice in choices(4, 1, {}):
        reached = {**DEFAULTS, **given, **changes(choice, (2, 4), given)}
        wanted = {**DEFAULTS, **choice.settings, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
        assert wanted == reached


@pytest.mark.parametrize("given", GIVENS)
def test_a_leaf_has_about_twelve_lines_and_one_for_each_setting_to_undo(given):
    for choice in choices(8, 2, given):
        trainer = ACCEL_TRAINER if "fsdp" not in given and "deepspeed" not in given else None
        settings = changes(choice, (2, 4), given)
        text = leaf_text("configs/a.yaml", settings, name="b", trainer=trainer, processes=8)
        # Two strategies at once take a line more, and so does each setting of another strategy that is undone.
        more = ("x FSDP2" in choice.title) + sum(value in (None, 1) for value in settings.values())
        # The name and the number of processes are in blocks of their own, so that a config that extends it can be named.
        assert sum(bool(line) for line in text.splitlines()) <= 14 + more, text
        unmoved = leaf_text("configs/a.yaml", settings, name="b", trainer=trainer, processes=None)
        assert sum(bool(line) for line in unmoved.splitlines()) <= 11 + more, unmoved


def test_hybrid_shards_need_several_machines_and_one_device_has_one_strategy():
    assert not [one for one in choices(8, 1, {}) if "hybrid" in one.title]
    assert [one for one in choices(8, 2, {}) if "hybrid" in one.title]
    assert {"forgather.ml:Trainer"} == {one.trainer for one in choices(1, 1, {}) if not one.offloads}


def test_each_offloaded_way_is_like_another_one_and_keeps_nothing_else():
    found = {one.title: one for one in choices(8, 2, {})}
    offloaded = [one for one in found.values() if one.offloads]
    assert 2 * (3 + 3 + 3) == len(offloaded)
    for one in offloaded:
        base = found[one.like]
        assert (base.trainer, base.processes, base.replicas) == (one.trainer, one.processes, one.replicas)
        assert base.recomputes == one.recomputes
        assert base.settings.keys() == one.settings.keys()
        assert 0 == one.least_state(8, 8, 8)
    for title, words in (
        ("FSDP2, offloaded, recomputed", "fsdp_offload_params: true"),
        ("ZeRO 3, offloaded, recomputed", "offload_param_device: cpu"),
    ):
        text = foreign_text("accelerate", found[title].settings, 1, 1, gpus=8, nodes=1, given={})
        assert words in text
        assert words not in foreign_text(
            "accelerate", found[found[title].like].settings, 1, 1, gpus=8, nodes=1, given={}
        )
    arguments = json.loads(
        foreign_text("arguments", found["FSDP2, offloaded, recomputed"].settings, 1, 1, gpus=8, nodes=1, given={})
    )
    assert True is arguments["fsdp_config"]["cpu_offload"]


def test_settings_of_fsdp_that_no_choice_decides_are_kept():
    given = {"fsdp_config": {"cpu_offload": True, "fsdp_transformer_layer_cls_to_wrap": "Block"}}
    sharded = next(one for one in choices(2, 1, given) if one.settings.get("fsdp") == "full_shard")
    assert {"fsdp_transformer_layer_cls_to_wrap": "Block"} == sharded.settings["fsdp_config"]


def test_the_fastest_that_surely_fits_is_first():
    cells = [
        cell("slow", tokens_per_second=Range(1, 2), most=5),
        cell("may", tokens_per_second=Range(8, 9), verdict=Verdict.MAY_FIT, most=9),
        cell("fast", tokens_per_second=Range(3, 4), most=7),
        cell("no", tokens_per_second=Range(9, 9), verdict=Verdict.TOO_LARGE),
        cell("refused", tokens_per_second=Range(9, 9), reason="[FG770] it is refused"),
    ]
    assert ["fast", "slow", "may"] == [one.title for one in ranked(cells, "tokens")]
    assert ["slow", "fast", "may"] == [one.title for one in ranked(cells, "memory")]


def test_without_rates_few_micro_batches_are_first():
    assert [8, 2] == [one.rows for one in ranked([cell(rows=2, least=1), cell(rows=8, least=2)], "tokens")]


def test_without_rates_what_is_offloaded_is_last():
    cells = [cell("offloaded", rows=8, least=1, host_bytes=9), cell("on the device", rows=1, least=5)]
    assert ["on the device", "offloaded"] == [one.title for one in ranked(cells, "tokens")]
    assert ["offloaded", "on the device"] == [one.title for one in ranked(cells, "memory")]


def test_a_rejection_names_the_smallest_size_and_the_largest_row():
    large = {"verdict": Verdict.TOO_LARGE, "largest": (("logits", 12 * GIB), ("parameters", GIB))}
    cells = [cell("A"), cell("A", rows=8, least=40 * GIB, **large), cell("A", rows=4, least=31 * GIB, **large)]
    (found,) = rejections(cells)
    assert ["A, 4 rows and more: 31.0 GiB of 24.0 GiB, logits 12.0 GiB"] == rejection_lines([found], {"A"})
    assert ["A: [FG770] no"] == rejection_lines([cell("A", reason="[FG770] no")], set())


def test_if_nothing_fits_the_nearest_way_is_named():
    large = {"verdict": Verdict.TOO_LARGE, "largest": (("logits", 12 * GIB),)}
    cells = [cell("A", least=40 * GIB, **large), cell("B", least=31 * GIB, **large)]
    # A bound from the sizes of weights alone is no need.
    cells += [cell("C", least=25 * GIB, is_bound=True, **large), cell("D", least=GIB, reason="[FG770] no")]
    with pytest.raises(PlanError, match=r"nearest way is B.*1 row, which needs 31.0 GiB of 24.0 GiB, 7.0 GiB") as found:
        refuse_if_nothing_fits(cells)
    assert "FG992" == found.value.code
    assert (found.value.hint or "").endswith("a smaller model. 1 way was not planned, such as D: [FG770] no")
    refuse_if_nothing_fits([*cells, cell("E")])
    with pytest.raises(PlanError, match="none of the ways"):
        refuse_if_nothing_fits(cells[-1:])


def test_work_is_on_a_line_even_where_sizes_of_different_operators_are_equal():
    def work(rows):
        # "add" with 8 bytes a row and 3 calls; "add" with 4 bytes a row and 5: at 1 and 2 rows, 8 bytes occur twice.
        found = {}
        for name, count, base, slope in (("add", 3, 0, 8), ("add", 5, 0, 4), ("mm", 1, 7, 2), ("step", 2, 9, 0)):
            key = Operation("forward", name, "float32", 10 * (base + slope * rows), base + slope * rows)
            found[key] = found.get(key, 0) + count
        return found

    assert work(7) == work_on_line(work(1), work(2), between=(1, 2), at=7)
    # Another number of calls: the sums are still on the line.
    other = {Operation("forward", "add", "float32", 0, 6): 3}
    drawn = work_on_line({Operation("forward", "add", "float32", 0, 4): 2}, other, between=(1, 2), at=3)
    assert 8 + 2 * 10 == sum(key.num_bytes * count for key, count in drawn.items())
    # So they are where a number below zero was drawn from two depths.
    add = Operation("forward", "add", "float32", 0, 4)
    small, large = {add: -1, add._replace(num_bytes=9): 2}, {add: -1, add._replace(num_bytes=11): 2}
    drawn = work_on_line(small, large, between=(1, 2), at=4)
    assert 14 + 3 * 4 == sum(key.num_bytes * count for key, count in drawn.items())


def test_a_cell_on_a_device_without_free_memory_lacks_all_of_its_need():
    assert (5, 0) == (cell(least=5, available=0).excess, cell(least=5, available=None).excess)


def test_a_choice_in_the_words_of_other_tools():
    given = {"bf16": True, "max_grad_norm": 0.5}
    found = {one.title: one.settings for one in choices(4, 1, {})}
    sizes = {"gpus": 4, "nodes": 1, "given": given}

    zero = json.loads(foreign_text("deepspeed", found["ZeRO 2, recomputed"], 2, 3, **sizes))
    assert (24, 2, 3) == tuple(
        zero[name] for name in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    assert (2, True, 0.5) == (zero["zero_optimization"]["stage"], zero["bf16"]["enabled"], zero["gradient_clipping"])
    accelerate = foreign_text("accelerate", found["FSDP2, not resharded, recomputed"], 2, 3, **sizes)
    assert "fsdp_reshard_after_forward: false" in accelerate
    assert "fsdp_activation_checkpointing: true" in accelerate
    assert "num_processes: 4" in accelerate
    arguments = json.loads(foreign_text("arguments", found["FSDP2 without recomputation"], 2, 3, **sizes))
    assert {"version": 2, "reshard_after_forward": True, "activation_checkpointing": False} == arguments["fsdp_config"]
    assert (2, 3, True) == (
        arguments["per_device_train_batch_size"],
        arguments["gradient_accumulation_steps"],
        arguments["bf16"],
    )
    assert foreign_text("deepspeed", found["DDP, recomputed"], 2, 3, **sizes) is None
    recomputed = {"gradient_checkpointing": True}
    assert recomputed == missing_settings("deepspeed", found["ZeRO 2, recomputed"], 2, 3)
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    assert rows | recomputed == missing_settings("accelerate", found["DDP, recomputed"], 2, 3)
    assert rows == missing_settings("accelerate", found["FSDP2, recomputed"], 2, 3)
    assert [{}, {}] == [missing_settings(form, found["DDP, recomputed"], 2, 3) for form in ("config", "arguments")]
    hybrid = next(one.settings for one in choices(4, 2, {}) if "hybrid" in one.title)
    assert foreign_text("arguments", hybrid, 2, 3, **sizes) is None
    assert [None] * 3 == [foreign_text(form, found["tensor 2 x FSDP2, recomputed"], 2, 3, **sizes) for form in FORMS]


def test_a_search_keeps_the_division_of_rows():
    given = {"context_parallel_size": 2, "fsdp_config": {"wrap_embeddings": False}}
    found = {choice.title.removesuffix(", recomputed"): choice for choice in choices(8, 1, given) if choice.recomputes}
    assert {
        *(f"FSDP2{kind}, rows over 2{end}" for kind in ("", ", not resharded") for end in ("", ", offloaded")),
        "DDP, rows over 2",
        *(f"tensor {size} x FSDP2, rows over 2{end}" for size in (2, 4) for end in ("", ", offloaded")),
        *(f"tensor {size} x DDP {8 // size}, rows over 2" for size in (2, 4)),
    } == set(found)
    # Two ranks read the same rows; a tensor slice of all eight devices leaves none to divide them.
    assert {4, 2, 1} == {choice.replicas for choice in found.values()}
    assert {2} == {choice.settings["context_parallel_size"] for choice in found.values()}
    # The written leaf keeps what the config has.
    assert "context_parallel_size" not in changes(found["DDP, rows over 2"], (1, 1), given)
    assert 1 == changes(choices(8, 1, {})[0], (1, 1), given)["context_parallel_size"]
    assert () == choices(3, 1, given)
