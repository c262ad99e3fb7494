"""Facts of hardware: no cell is a sparse rate, every cell has a source, names are found, own files are checked."""

import argparse
import json
import re

import pytest

from forgather.cli.options import memory_size
from forgather.cli.plan_find import searched_device
from forgather.errors import PlanError
from forgather.launch.planning import device_of
from forgather.planner.efficiency import Efficiency, Range
from forgather.planner.hardware import (
    DTYPES,
    as_entry,
    hardware,
    hardware_from_file,
    hardware_names,
    hardware_of_device,
)
from forgather.planner.memory_plan import parse_size

ALL = [hardware(name) for name in hardware_names()]
WANTED = """v100 t4 l4 a10 rtx3090 rtx4090 rtx5090 a100-40 a100-80 h100 h100-pcie h100-nvl h200 b200 mi300x"""


def test_the_usual_devices_are_known():
    assert set() == set(WANTED.split()) - set(hardware_names())
    assert any(one.kind == "cpu" for one in ALL)


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_no_dense_rate_is_above_half_of_the_sparse_one(one):
    assert set(one.sparse_flops) <= set(one.peak_flops) <= set(DTYPES)
    # Data sheets round: 71 and 142, 35.6 and 71.
    assert [] == [
        dtype for dtype, sparse in one.sparse_flops.items() if one.peak_flops[dtype] > 0.5 * sparse * (1 + 1e-3)
    ]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_figures_are_plausible(one):
    assert one.peak_flops["fp32"] > 0
    # The whole memory is read 10 to 100 times a second, with 5 to 600 operations in 16 bits for each byte.
    if one.memory_bytes is not None:
        assert 10 < one.memory_bytes_per_second / one.memory_bytes < 100
    if "fp16" in one.peak_flops:
        assert 5 < one.peak_flops["fp16"] / one.memory_bytes_per_second < 600
    # Narrower types are never slower, a link never faster than memory, and nvlink not slower than pcie.
    rates = [one.peak_flops[dtype] for dtype in ("fp32", "tf32", "fp16", "fp8") if dtype in one.peak_flops]
    assert sorted(rates) == rates
    assert max(one.links.values()) < one.memory_bytes_per_second
    fast = one.links.get("nvlink") or one.links.get("infinity fabric")
    assert fast is None or fast > one.links["pcie"]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_fact_has_a_source_and_a_date(one):
    facts = {*one.peak_flops, *one.links, "memory_gb_per_second"} | ({"memory_mib"} if one.memory_bytes else set())
    assert facts == set(one.sources)
    assert [] == [cell for cell, source in one.sources.items() if not source[-9:].strip("()0123456789-") == ""]
    assert "assumed" in one.sources["network"]


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_every_fact_was_looked_up_or_says_that_it_was_not(one):
    assert set(one.unverified) <= set(one.sources)
    looked_up = {cell for cell, source in one.sources.items() if source in one.checked}
    assert set(one.sources) - looked_up - {"network"} <= set(one.unverified)


def test_the_rates_where_torch_has_the_sparse_ones():
    assert hardware("h100").peak_flops["bf16"] == pytest.approx(989.4e12, rel=1e-3)
    assert hardware("l4").memory_bytes_per_second == 300e9


@pytest.mark.parametrize(
    ("written", "name"),
    [("H200", "h200"), ("RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 3090", "rtx3090"), ("A100 80GB", "a100-80")]
    + [("h100-sxm", "h100"), ("Tesla T4", "t4"), ("AMD Instinct MI300X", "mi300x")],
)
def test_a_name_is_found_in_any_spelling(written, name):
    assert hardware(written).name == name


def test_names_of_two_devices_never_collide():
    names = [alias for one in ALL for alias in (one.name, *one.aliases)]
    assert [] == [name for name in names if name not in (hardware(name).name, *hardware(name).aliases)]
    assert len(names) == len(set(names))


def test_the_name_of_a_driver_is_exact():
    assert hardware_of_device("NVIDIA H100 80GB HBM3").name == "h100"
    assert hardware_of_device("NVIDIA A10G") is None


def test_an_unknown_name_suggests_near_ones():
    with pytest.raises(PlanError, match="no 'h200s'") as info:
        hardware("h200s")
    assert info.value.code == "FG994"
    assert "did you mean h200" in info.value.hint


def test_an_own_file_is_read(tmp_path):
    file = tmp_path / "box.json"
    file.write_text(json.dumps({"memory_mib": 1024, "dense_tflops": {"bf16": 2}, "links_gb_per_second": {"pcie": 8}}))
    one = hardware(str(file))
    assert (one.name, one.memory_bytes, one.peak_flops, one.links) == ("box.json", 2**30, {"bf16": 2e12}, {"pcie": 8e9})
    assert one.memory_bytes_per_second is None
    assert set(one.sources) == {"bf16", "pcie", "memory_mib"}


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('{\n "title": "x",\n "memory_gib": 4}', 3, "did you mean 'memory_mib'"),
        ('{"memory_mib": 1,\n "dense_tflops": {"bf16": 1,\n "bf17": 2}}', 3, "no type 'bf17'"),
        ('{"memory_mib":\n -4}', 1, "memory_mib is -4"),
        ('{"memory_mib": true}', 1, "memory_mib is True"),
        ('{"memory_mib": 4,\n "kind": "gpu"}', 2, "cuda, rocm or cpu"),
        ('{"memory_mib": 4, "links_gb_per_second": 3}', 1, "not a mapping"),
        ('{"title": "x"}', 1, "memory_mib is missing"),
        ('{"title": \n', 2, "not JSON"),
        ("[]", 1, "holds list"),
        ("[" * 10**5, 1, "nested too deeply"),
        ('{"memory_mib": 4,\n "title": "{[\\"}",\n "memory_mib": 5}', 3, "'memory_mib' twice, first on line 1"),
        ('{"memory_mib": 4, "dense_tflops": {"bf16": 1,\n "bf16": 2}}', 2, "'bf16' twice, first on line 1"),
        ('{"memory_mib": 4, "dense_tflops": {"bf16": 1},\n "sparse_tflops": {\n "bf16": 0}}', 3, "bf16 of sparse"),
        ('{"memory_mib": 4, "links_gb_per_second": {\n "nvlnk": 3}}', 2, "no link 'nvlnk'"),
        ('{"memory_mib": 4, "efficiency": {\n "fitted": [1]}}', 2, "fitted of efficiency names 1"),
        ('{"memory_mib": 4, "efficiency": {\n "compute": 0}}', 2, "compute of efficiency is 0"),
        ('{"memory_mib": 4, "efficiency": {\n "comput": 1}}', 2, "did you mean 'compute'"),
        ('{"memory_mib": 4, "efficiency": {\n "fitted": 1}}', 2, "fitted of efficiency is 1, and not a list"),
    ],
)
def test_a_wrong_file_is_located(tmp_path, text, line, what):
    file = tmp_path / "box.json"
    file.write_text(text)
    with pytest.raises(PlanError) as info:
        hardware_from_file(str(file))
    assert (info.value.code, info.value.span.line) == ("FG995", line)
    assert what in info.value.message
    assert "docs/reference/hardware.md" in info.value.hint


def test_a_file_repeats_a_device_with_its_efficiency(tmp_path):
    known = hardware("h200")
    file = tmp_path / "ours.json"
    numbers = {"compute": 0.5, "call_seconds": 1e-5}
    about = {"fitted": ["call_seconds"], "largest_error": 0.125, "source": "fitted to 4 runs on x"}
    file.write_text(json.dumps({**as_entry(known), "efficiency": {**numbers, **about}}))
    ours = hardware(str(file))
    for fact in ("peak_flops", "sparse_flops", "links", "memory_bytes", "memory_bytes_per_second", "kind"):
        assert getattr(ours, fact) == pytest.approx(getattr(known, fact)) if fact != "kind" else ours.kind == known.kind
    found = ours.efficiency
    assert (Range(0.5, 0.5), Range(1e-5, 1e-5), Efficiency().memory) == (
        found.compute,
        found.call_seconds,
        found.memory,
    )
    assert "fitted to 4 runs on x, which it gives within 12%, call fitted apart" == found.source
    assert known.efficiency is None


def test_a_missing_file_is_reported():
    with pytest.raises(PlanError, match="cannot be read") as info:
        hardware("nowhere.json")
    assert info.value.code == "FG995"


@pytest.mark.parametrize(
    ("written", "size", "sized"),
    [("24GB", "24GB", "rtx4090"), ("24 GB", "24GB", "rtx4090"), (" 7.5 GiB", "7.5GiB", None), ("5e3MB", "5e3MB", None)],
)
def test_a_size_in_place_of_a_name_gets_the_options_for_sizes(written, size, sized):
    with pytest.raises(PlanError) as info:
        hardware(written)
    # A shell hands one word to each option, and the option takes it.
    assert re.findall(r"--(?:free|memory) (\S+) (?:says|the)", info.value.hint) == [size, size]
    assert memory_size(size) == parse_size(written)
    named, _, _ = info.value.hint.partition("For a size alone")
    assert (sized in named) if sized else not named
    assert "h200" not in named


@pytest.mark.parametrize("written", ["0GB", "0.0 GiB", "24G", "24gib", "-1GB", "nanGB", "infGB", "24", ""])
def test_what_is_no_size_of_an_option_is_not_advised_as_one(written):
    with pytest.raises(PlanError) as info:
        hardware(written)
    assert info.value.code == "FG994"
    assert "--free" not in info.value.hint


def test_the_memory_of_a_search_replaces_that_of_a_calibrated_device(tmp_path):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"memory_mib": 4096, "efficiency": {"compute": 0.5}}))
    known = device_of(str(file), gpus=1)

    def device(known=known, **given):
        usual = {"memory": 2**31, "free": None, "device_type": None}
        return searched_device(known, argparse.Namespace(**{**usual, **given}))

    ours = device()
    assert (Range(0.5, 0.5), 2**31, 0) == (
        ours.hardware.efficiency.compute,
        ours.hardware.memory_bytes,
        ours.held_bytes,
    )
    # What is free is a part of this memory.
    assert [2**31 - 2**30, 0] == [device(free=free).held_bytes for free in (2**30, 2**40)]
    assert "cpu" == device(None, device_type="cpu").hardware.kind
