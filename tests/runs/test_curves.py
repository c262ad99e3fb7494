"""The curves of a run against brute force: points of buckets, files that grow, steps that are logged again, damage."""

import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgather.runs.curve import MAX_BUCKETS, Curve
from forgather.runs.curve_cache import read_curves
from forgather.runs.curves import Curves
from forgather.runs.growing_file import GrowingFile
from forgather.runs.metric_columns import TIME, TOKENS, columns_of, plain_columns
from forgather.runs.metric_records import record_of
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


def points(curve):
    """The points of a curve as lists."""
    steps, values = curve.points()
    return steps.tolist(), values.tolist()


def found(curves, buckets):
    curves = {name: curve for name, curve in curves.curves.items() if name != TOKENS}
    finite = {
        name: list(zip(*points(curve.reduced(buckets)), strict=True)) for name, curve in curves.items() if curve.count
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
    steps, kept = points(curve)
    assert reduced(dict(enumerate(values, start=1)), MAX_BUCKETS) == list(zip(steps, kept, strict=True))
    assert len(steps) <= 2 * MAX_BUCKETS + 1
    assert (4321, 7000) == (steps[kept.index(max(kept))], steps[kept.index(min(kept))])
    assert (12_000, values[-1]) == (steps[-1], kept[-1])
    middles, means = (found.tolist() for found in curve.means())
    bounds = [at // curve.width * curve.width for at in middles]
    slow = [[value for step, value in enumerate(values, 1) if at <= step < at + curve.width] for at in bounds]
    assert [math.fsum(part) / len(part) for part in slow] == pytest.approx(means, rel=1e-12)


def test_every_point_is_kept_without_buckets(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": step / 7} for step in range(5000)])
    curve = read_curves(str(tmp_path), is_full=True).curves["loss"].reduced(None)
    assert [step / 7 for step in range(5000)] == points(curve)[1]


def test_a_rewound_step_counts_once_with_its_later_value(tmp_path):
    first = [{"step": step, "loss": 9.0} for step in range(1, 5001)]
    again = [{"step": step, "loss": 1.0} for step in range(2000, 3001)]
    curve = read(tmp_path / "m", first + again).curves["loss"]
    assert (5000, 1.0, 9.0) == (curve.count, min(points(curve)[1]), curve.last[1])


def test_an_evaluation_that_is_logged_twice_at_one_step_counts_once(tmp_path):
    curve = read(tmp_path / "m", [{"step": 10, "eval_loss": 2.0}, {"step": 10, "eval_loss": 1.5}]).curves["eval_loss"]
    assert ([10], [1.5]) == points(curve)


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
    assert ([2], 1) == (curves.position.damaged, curves.position.num_damaged)
    assert ([1, 5], [2.0, 1.0]) == points(curves.curves["loss"])


def test_bytes_that_are_no_text_damage_their_line_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\n{"step": 2, "\xff": 3}\n{"step": 3, "loss": 1.0}\n'
    )
    curves = read_curves(str(tmp_path))
    assert ([2], [1, 3]) == (curves.position.damaged, points(curves.curves["loss"])[0])


def test_two_lines_that_are_an_object_together_are_two_damaged_lines(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", ['{"step": 1,', '"loss": 9}', {"step": 2, "loss": 1.0}])
    curves = read_curves(str(tmp_path))
    assert ([1, 2], [2]) == (curves.position.damaged, points(curves.curves["loss"])[0])


def test_a_torn_last_line_is_no_damage_and_is_read_when_it_is_whole(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    curves = Curves()
    curves.read(str(file))
    assert (0, [1]) == (curves.position.num_damaged, points(curves.curves["loss"])[0])
    with file.open("a") as stream:
        stream.write('ss": 1.0}')
    curves.read(str(file))
    assert ([1, 2], 0) == (points(curves.curves["loss"])[0], curves.position.num_damaged)
    with file.open("a") as stream:
        stream.write('\n{"step": 3, "loss": 0.5}\n')
    curves.read(str(file))
    assert ([1, 2, 3], 0) == (points(curves.curves["loss"])[0], curves.position.num_damaged)


def test_the_next_process_reads_new_bytes_only(tmp_path):
    file = tmp_path / "metrics.jsonl"
    write_lines(file, [{"step": step, "loss": 1 / (step + 1)} for step in range(5000)])
    whole = read_curves(str(tmp_path))
    assert found(whole, MAX_BUCKETS) == found(read_curves(str(tmp_path)), MAX_BUCKETS)
    with file.open("a") as stream:
        stream.write('{"step": 5000, "loss": 0.25}\n')
    lines = GrowingFile(str(file), pytest.fail, whole.position)
    assert [{"step": 5000, "loss": 0.25}] == list(lines.records())
    assert lines.num_bytes_read < 1000
    grown, fresh = read_curves(str(tmp_path)), Curves()
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
    assert [3.0] * count == points(read_curves(str(tmp_path)).curves["loss"])[1]


def test_a_damaged_cache_is_as_none(tmp_path, private_folders):  # noqa: F811
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    read_curves(str(tmp_path))
    (entry,) = (private_folders / "cache" / "forgather" / "curves").iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"2.0", b"1.0"))
    assert [2.0] == points(read_curves(str(tmp_path)).curves["loss"])[1]


def test_tokens_follow_from_the_speeds_or_are_as_logged(tmp_path):
    lines = [
        {"step": step, "time": 5.0 + step, "tokens_per_second": 4096 * rate, "steps_per_second": rate}
        for step, rate in ((1, 0.5), (10, 2.0), (20, 1.5))
    ]
    curves = read(tmp_path / "m", lines)
    assert ([1, 10, 20], [4096, 40960, 81920]) == points(curves.num_tokens)
    assert [6.0, 15.0, 25.0] == points(curves.curves[TIME])[1]
    assert TOKENS not in curves.metrics
    own = read(tmp_path / "m", [{**line, "tokens": 3.0} for line in lines])
    assert ([3.0] * 3, [4096, 40960, 81920]) == (points(own.curves["tokens"])[1], points(own.num_tokens)[1])
    logged = read(tmp_path / "m", [{**line, "num_input_tokens_seen": line["step"] * 7} for line in lines])
    assert [7, 70, 140] == points(logged.num_tokens)[1]


def test_lines_with_an_event_are_events_and_their_numbers_no_metric(tmp_path):
    lines = [
        {"step": 1, "loss": 2.0},
        {"step": 7, "time": 1.0, "event": "spike", "metric": "loss", "value": 99.0},
        {"step": 8, "event": "pause", "message": "paused by anna"},
    ]
    curves = read(tmp_path / "m", lines)
    assert ["loss"] == curves.metrics
    told = [(event.step, event.kind, event.text) for event in curves.events]
    assert [(7, "spike", "metric loss, value 99.0"), (8, "pause", "paused by anna")] == told


def test_a_run_without_metrics_has_no_curves(tmp_path):
    assert [] == read_curves(str(tmp_path)).metrics
    assert ([], []) == points(Curve())


PLAIN = st.dictionaries(st.sampled_from(["a", "b", "tokens_per_second", "steps_per_second", "time", "epoch"]), st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**70), 2**70), st.none(), st.booleans(),
    st.sampled_from(["nan", "text", "2020-01-01", "}", 10**400, math.inf, [1.5], {}])))  # fmt: skip
ODD = st.sampled_from([*DAMAGE, 'null{"step": 3}', '{"step": 3}null}', "null}", "{null}", "", '{"step": 3, "event": null, "a": 1}', '{"a": 1}', '{"step": 4, "b": {}', ', "a": 1}',
                       '{"step": 4, "a": 1}{"step": 5, "a": 2}', '{"step": 4, "a": 1, "a": 2}', f'{{"step": 4, "a": {"9" * 5000}}}',
                       '{"step": 5.0, "\\u0061": 1e400}', '{"step": 6, "a": -0}', '{"step": 6, "\u00e4": 1}'])  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(PLAIN.map(lambda values: json.dumps({"step": 7, **values})), ODD), min_size=1, max_size=6))
def test_what_is_read_as_plain_is_what_the_records_say(lines):
    text = "".join(f"{line}\n" for line in lines).encode()
    records = [record_of(line.encode()) for line in lines]
    plain = plain_columns(text)
    if plain is not None:
        assert None not in records
        assert comparable(columns_of(records)) == comparable(plain)


@pytest.mark.parametrize("deep", ["[" * 50_000 + "]" * 50_000, '{"a":' * 50_000 + "1" + "}" * 50_000])
def test_a_value_of_any_depth_damages_its_line_alone(tmp_path, deep):
    lines = [{"step": step, "loss": 1.0} for step in (1, 3)]
    write_lines(tmp_path / "m", [lines[0], f'{{"step": 2, "loss": {deep}}}', lines[1]])
    curves = Curves()
    curves.read(str(tmp_path / "m"))
    assert ([2], [1, 3]) == (curves.position.damaged, points(curves.curves["loss"])[0])


def test_lines_of_numbers_are_plain():
    lines = [{"step": step, "time": step / 3, "loss": 1 / step, "count": 2**53 + step} for step in range(1, 9)]
    lines += [{"step": 9, "eval_loss": 2, "name": "x", "ok": True, "nothing": None}, {"step": 10, "tokens_per_second": 6, "steps_per_second": 2}]  # fmt: skip
    plain = plain_columns("".join(f"{json.dumps(line)}\n" for line in lines).encode())
    assert comparable(columns_of(lines)) == comparable(plain)


def comparable(columns):
    """Columns as lists, in which NaN equals NaN, and 0 equals -0 as in files."""
    return {
        name: (steps.tolist(), [str(value + 0.0) for value in values.tolist()])
        for name, (steps, values) in columns.items()
    }


def test_a_line_that_is_not_plain_costs_no_other_line_of_a_long_file(tmp_path):
    lines = [{"step": step, "loss": 1 / step, "note": "x" * 100} for step in range(1, 3001)]
    odd = [{"step": 2000, "loss": "nan"}, {"step": 2000, "event": "anomaly", "kind": "spike", "message": "m"}, "{torn"]
    (tmp_path / "m").write_text("")
    write_lines(tmp_path / "m", [*lines[:2000], *odd, *lines[2000:]])
    curves = Curves()
    curves.read(str(tmp_path / "m"))
    assert ([2003], 1, [(2000, "nan")]) == (curves.position.damaged, curves.num_events, curves.curves["loss"].gaps)
    finite = {line["step"]: line["loss"] for line in lines if line["step"] != 2000}
    assert reduced(finite, MAX_BUCKETS) == list(zip(*points(curves.curves["loss"].reduced(MAX_BUCKETS)), strict=True))


def test_a_line_number_counts_line_ends_however_the_file_was_read(tmp_path):
    file = tmp_path / "m"
    file.write_text('{"step": 1, "loss": 2.0}')
    curves = Curves()
    curves.read(str(file))
    with file.open("a") as stream:
        stream.write("\n{torn\n")
    curves.read(str(file))
    assert ([1], [2]) == (points(curves.curves["loss"])[0], curves.position.damaged)


def test_a_line_without_a_step_costs_no_line_next_to_it(tmp_path):
    curves = read(tmp_path / "m", [{"step": 1, "loss": 2.0}, {"step": None, "loss": 3.0}, {"step": 2, "loss": 1.0}])
    assert ([1, 2], [2.0, 1.0]) == points(curves.curves["loss"])


def test_a_speed_that_is_logged_twice_at_one_step_counts_once_in_any_parts(tmp_path):
    lines = [
        {"step": step, "tokens_per_second": rate, "steps_per_second": 1.0}
        for step, rate in ((2, 3.0), (5, 9.0), (5, 4.0))
    ]
    for parts in 1, 2, 3:
        assert ([2, 5], [6.0, 18.0]) == points(read(tmp_path / "m", lines, parts).num_tokens)


def test_the_time_is_without_pauses(tmp_path):
    pause = {"step": 2, "time": 102.0, "event": "control", "action": "pause", "who": "anna"}
    resume = {"step": 2, "time": 202.5, "event": "control", "action": "resume", "paused_seconds": 100.5}
    times = [(1, 101.0), (2, 102.0), (3, 203.5), (4, 204.5)]
    lines = [{"step": step, "time": at, "loss": 1.0} for step, at in times]
    curves = read(tmp_path / "m", [*lines[:2], pause, resume, *lines[2:]])
    assert [0.0, 1.0, 2.0, 3.0] == curves.seconds(None).values.tolist()
    assert 100.5 == curves.paused_seconds
