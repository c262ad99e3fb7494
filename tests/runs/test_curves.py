"""The curves of a run against brute force: points of buckets, files that grow, steps that are logged again, damage."""

import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgather.runs.curve import MAX_BUCKETS, Curve
from forgather.runs.curve_cache import read_curves
from forgather.runs.curves import TIME, TOKENS, Curves
from tests.isolation import private_folders  # noqa: F401
from tests.runs.compared import write_lines

NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
VALUES = st.one_of(
    st.floats(-1e6, 1e6), st.sampled_from([0, 1, -3, "nan", "inf", "-inf", "text", True, None, 10**400, 1e300])
)


def expected(lines):
    """What the lines mean, without buckets: for each metric the value of each step, the later one if there are several."""
    found = {}
    for line in lines:
        for name, value in line.items():
            value = NOT_FINITE.get(value, value) if isinstance(value, str) else value
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, {})[line["step"]] = value if abs(value) < 1e308 or value != value else math.inf
    return found


def reduced(points, buckets):
    """The smallest and the largest value of each bucket, and the last point: the definition, written down slowly."""
    *inner, last = sorted(points.items())
    if len(points) <= 2 * buckets:
        return [*inner, last]
    width = 1
    while inner[-1][0] // width - inner[0][0] // width >= buckets:
        width *= 2
    kept = set()
    for bucket in {step // width for step, _ in inner}:
        held = [point for point in inner if point[0] // width == bucket]
        kept |= {min(held, key=lambda point: (point[1], point[0])), min(held, key=lambda point: (-point[1], point[0]))}
    return sorted([*kept, last])


def read(file, lines, parts=1, buckets=MAX_BUCKETS):
    """The curves of a file that grows in so many parts, of which each but the last ends anywhere in a line."""
    text = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    curves = Curves(buckets)
    for part in range(1, parts + 1):
        file.write_bytes(text[: len(text) * part // parts])
        curves.read(str(file))
    return curves


def found(curves, buckets):
    curves = {name: curve for name, curve in curves.curves.items() if name != TOKENS}
    finite = {
        name: list(zip(*curve.reduced(buckets).points(), strict=True)) for name, curve in curves.items() if curve.count
    }
    return finite, {name: [step for step, _ in curve.gaps] for name, curve in curves.items() if curve.gaps}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.fixed_dictionaries({"step": st.integers(0, 60)}, optional={"a": VALUES, "b": VALUES}), max_size=60),
    st.booleans(),
    st.integers(1, 5),
)
def test_any_file_in_any_parts_gives_the_points_of_its_definition(tmp_path, lines, is_ordered, parts):
    lines = sorted(lines, key=lambda line: line["step"]) if is_ordered else lines
    finite, gaps = {}, {}
    for name, points in expected(lines).items():
        kept = {step: value for step, value in points.items() if math.isfinite(value)}
        finite |= {name: reduced(kept, 4)} if kept else {}
        missing = sorted(set(points) - set(kept))
        gaps |= {name: missing} if missing else {}
    assert (finite, gaps) == found(read(tmp_path / "m", lines, parts, buckets=4), 4)


@pytest.mark.parametrize("parts", [1, 7])
def test_a_long_curve_keeps_its_spikes_its_last_value_and_its_means(tmp_path, parts):
    values = [math.sin(step / 100) + (50 if step == 4321 else -60 if step == 7000 else 0) for step in range(1, 12_001)]
    lines = [{"step": step, "loss": value} for step, value in enumerate(values, start=1)]
    curve = read(tmp_path / "m", lines, parts).curves["loss"].reduced(MAX_BUCKETS)
    steps, kept = curve.points()
    assert reduced(dict(enumerate(values, start=1)), MAX_BUCKETS) == list(zip(steps, kept, strict=True))
    assert len(steps) <= 2 * MAX_BUCKETS + 1
    assert (4321, 7000) == (steps[kept.index(max(kept))], steps[kept.index(min(kept))])
    assert (12_000, values[-1]) == (steps[-1], kept[-1])
    middles, means = curve.means()
    bounds = [at // curve.width * curve.width for at in middles]
    slow = [[value for step, value in enumerate(values, 1) if at <= step < at + curve.width] for at in bounds]
    assert [math.fsum(part) / len(part) for part in slow] == pytest.approx(means, rel=1e-12)


def test_means_of_numbers_whose_sum_is_no_float_are_floats():
    curve = Curve()
    for part in range(4):
        curve.extend(range(2000 * part, 2000 * (part + 1)), [1.7e308] * 2000, MAX_BUCKETS)
    assert {1.7e308} == set(curve.means()[1])


def test_every_point_is_kept_without_buckets(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": step / 7} for step in range(5000)])
    curve = read_curves(str(tmp_path), is_full=True).curves["loss"].reduced(None)
    assert [step / 7 for step in range(5000)] == curve.points()[1]


def test_a_rewound_step_counts_once_with_its_later_value(tmp_path):
    first = [{"step": step, "loss": 9.0} for step in range(1, 5001)]
    again = [{"step": step, "loss": 1.0} for step in range(2000, 3001)]
    curve = read(tmp_path / "m", first + again).curves["loss"]
    assert (5000, 1.0, 9.0) == (curve.count, min(curve.points()[1]), curve.last[1])


def test_an_evaluation_that_is_logged_twice_at_one_step_counts_once(tmp_path):
    curve = read(tmp_path / "m", [{"step": 10, "eval_loss": 2.0}, {"step": 10, "eval_loss": 1.5}]).curves["eval_loss"]
    assert ([10], [1.5]) == curve.points()


def test_a_value_that_is_not_finite_is_a_gap_and_the_last_value_may_be_one(tmp_path):
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": "nan"}, {"step": 3, "loss": 1.0}, {"step": 4, "loss": "inf"}]
    curve = read(tmp_path / "m", lines).curves["loss"]
    assert ([(2, "nan"), (4, "inf")], True, 2) == (curve.gaps, curve.ends_in_gap, curve.num_gaps)
    healed = read(tmp_path / "m", [*lines, {"step": 4, "loss": 0.5}]).curves["loss"]
    assert ([(2, "nan")], False, (4, 0.5)) == (healed.gaps, healed.ends_in_gap, healed.last)


DAMAGE = [
    "{torn", '{"step": 3, "loss": 1', "[1, 2]", "null", "\x00\x00\x00", '{"step": "x", "loss": 9}', '{"step": -1, "loss": 9}',
    '{"step": 1e999, "loss": 9}', '{"step": 2.5, "loss": 9}', '{"step": true, "loss": 9}', '{"loss": 9} {"loss": 8}',
    '{"a":' * 100_000, '{"step": 9007199254740993, "loss": 9}',
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda text: text[:16])
def test_a_damaged_line_is_counted_and_named_and_costs_no_other_line(tmp_path, damage):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}, damage, {"step": 5, "loss": 1.0}])
    curves = read_curves(str(tmp_path))
    assert ([2], 1) == (curves.lines.damaged, curves.lines.num_damaged)
    assert ([1, 5], [2.0, 1.0]) == curves.curves["loss"].points()


def test_bytes_that_are_no_text_damage_their_line_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "\xff": 3}\n{"step": 3, "loss": 1.0}\n'
    )
    curves = read_curves(str(tmp_path))
    assert ([2], [1, 3]) == (curves.lines.damaged, curves.curves["loss"].points()[0])


def test_two_lines_that_are_an_object_together_are_two_damaged_lines(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", ['{"step": 1,', '"loss": 9}', {"step": 2, "loss": 1.0}])
    curves = read_curves(str(tmp_path))
    assert ([1, 2], [2]) == (curves.lines.damaged, curves.curves["loss"].points()[0])


def test_a_torn_last_line_is_no_damage_and_is_read_when_it_is_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    curves = Curves()
    curves.read(str(file))
    assert (0, [1]) == (curves.lines.num_damaged, curves.curves["loss"].points()[0])
    with file.open("a") as stream:
        stream.write('ss": 1.0}')
    curves.read(str(file))
    assert ([1, 2], 0) == (curves.curves["loss"].points()[0], curves.lines.num_damaged)
    with file.open("a") as stream:
        stream.write('\n{"step": 3, "loss": 0.5}\n')
    curves.read(str(file))
    assert ([1, 2, 3], 0) == (curves.curves["loss"].points()[0], curves.lines.num_damaged)


class Watched:
    """The bytes that are read of a file."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        plain = os.read
        import forgather.runs.curves as module

        opened = module.open_regular

        def open_watched(file):
            stream, watched = opened(file), self
            assert plain is os.read

            class Stream:
                def __getattr__(self, name):
                    return getattr(stream, name)

                def __enter__(self):
                    return self

                def __exit__(self, *facts):
                    stream.close()

                def read(self, size=-1):
                    part = stream.read(size)
                    watched.bytes += len(part)
                    return part

            return Stream()

        monkeypatch.setattr(module, "open_regular", open_watched)


def test_only_new_bytes_are_read_also_by_the_next_process(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": step, "loss": 1 / (step + 1)} for step in range(5000)])
    size = file.stat().st_size
    watched = Watched(monkeypatch)
    whole = read_curves(str(tmp_path))
    assert size <= watched.bytes
    watched.bytes = 0
    assert vars(whole) == vars(read_curves(str(tmp_path)))
    assert watched.bytes < 1000
    with file.open("a") as stream:
        stream.write('{"step": 5000, "loss": 0.25}\n')
    grown = read_curves(str(tmp_path))
    assert (watched.bytes < 2000, (5000, 0.25)) == (True, grown.curves["loss"].last)
    fresh = Curves()
    fresh.read(str(file))
    assert found(fresh, MAX_BUCKETS) == found(grown, MAX_BUCKETS)


@pytest.mark.parametrize("change", ["shorter", "other", "same size"])
def test_a_file_that_was_written_again_is_read_again(tmp_path, change):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": step, "loss": 2.0} for step in range(10, 20)])
    read_curves(str(tmp_path))
    count = {"shorter": 5, "other": 30, "same size": 10}[change]
    write_lines(file, [{"step": step, "loss": 3.0} for step in range(10, 10 + count)])
    os.utime(file, ns=(1, 1))
    assert [3.0] * count == read_curves(str(tmp_path)).curves["loss"].points()[1]


def test_a_damaged_cache_is_as_none(tmp_path, private_folders):  # noqa: F811
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    read_curves(str(tmp_path))
    (entry,) = (private_folders / "cache" / "forgather" / "curves").iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"2.0", b"1.0"))
    assert [2.0] == read_curves(str(tmp_path)).curves["loss"].points()[1]


def test_tokens_follow_from_the_speeds_or_are_as_logged(tmp_path):
    lines = [
        {"step": step, "time": 5.0 + step, "tokens_per_second": 4096 * rate, "steps_per_second": rate}
        for step, rate in ((1, 0.5), (10, 2.0), (20, 1.5))
    ]
    curves = read(tmp_path / "m", lines)
    assert ([1, 10, 20], [4096, 40960, 81920]) == curves.num_tokens.points()
    assert [6.0, 15.0, 25.0] == curves.curves[TIME].points()[1]
    assert TOKENS not in curves.metrics
    own = read(tmp_path / "m", [{**line, "tokens": 3.0} for line in lines])
    assert ([3.0] * 3, [4096, 40960, 81920]) == (own.curves["tokens"].points()[1], own.num_tokens.points()[1])
    logged = read(tmp_path / "m", [{**line, "num_input_tokens_seen": line["step"] * 7} for line in lines])
    assert [7, 70, 140] == logged.num_tokens.points()[1]


def test_lines_with_an_event_are_events_and_their_numbers_no_metric(tmp_path):
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 7, "time": 1.0, "event": "spike", "metric": "loss", "value": 99.0},
        {"step": 8, "event": "pause", "message": "paused by anna"},
    ]
    curves = read(tmp_path / "m", lines)
    assert ["loss"] == curves.metrics
    told = [(event.step, event.kind, event.text) for event in curves.events]
    assert [(7, "spike", '{"metric": "loss", "value": 99.0}'), (8, "pause", "paused by anna")] == told


def test_a_run_without_metrics_has_no_curves(tmp_path):
    assert [] == read_curves(str(tmp_path)).metrics
    assert ([], []) == Curve().points()
