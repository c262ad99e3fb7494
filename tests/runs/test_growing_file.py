"""What a reader of a growing file gives: what a reader of the whole file would give, from new bytes alone."""

import json
import math
import os
import random
import resource
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.runs.growing_curve import NUM_BUCKETS, GrowingCurve
from forgather.runs.growing_file import BLOCK_BYTES, GrowingFile
from forgather.runs.live_run import MAX_EVENTS, MAX_METRICS, LiveRun


class Reader:
    """A growing file, and the records that count."""

    def __init__(self, file):
        self.found = []
        self.file = GrowingFile(str(file), self.found.clear)

    def update(self):
        """Reads what is new; returns whether something was."""
        before = len(self.found)
        with suppress(OSError):
            self.found.extend(self.file.records())
        return len(self.found) != before


def reader(file):
    found = Reader(file)
    return found, found.found


def parsed(content):
    """The records of a whole file, by an independent reading."""
    records = []
    for line in content.split(b"\n"):
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


EDITS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(0, 400)),
        st.tuples(st.just("truncate"), st.integers(0, 400)),
        st.tuples(st.just("rewrite"), st.integers(0, 400)),
        st.tuples(st.just("replace"), st.integers(0, 400)),
        st.tuples(st.just("damage"), st.integers(0, 4)),
    ),
    max_size=12,
)
DAMAGE = (b"\n", b"[1]\n", b"{not json}\n", b"\xff\xfe\n", b'{"a": NaN}\n')


@settings(max_examples=60, deadline=None)
@given(EDITS, st.randoms(use_true_random=False))
def test_after_any_edits_the_records_are_those_of_the_whole_file(tmp_path_factory, edits, randoms):
    file = tmp_path_factory.mktemp("grows") / "metrics.jsonl"
    lines, found = reader(file)
    stamp = 0

    def some(size):
        nonlocal stamp
        out = b""
        while len(out) < size:
            stamp += 1
            out += json.dumps({"step": randoms.randrange(100), "time": stamp}).encode() + b"\n"
        return out[:size]  # most often in the middle of a line

    content = b""
    for kind, size in edits:
        if kind == "append":
            content += some(size)
        elif kind == "truncate":
            content = content[: max(0, len(content) - size)]
        elif kind == "damage":
            content += DAMAGE[size]
        else:
            content = some(size)
        if kind == "replace":
            (file.parent / "new").write_bytes(content)
            os.replace(file.parent / "new", file)
        elif kind in ("append", "damage") and file.exists():
            with open(file, "ab") as stream:
                stream.write(content[file.stat().st_size :])
        else:
            file.write_bytes(content)
        # File systems have coarse clocks, and two edits of one size in one tick are one file to every reader.
        os.utime(file, ns=(stamp * 1000 + len(content), (stamp + 1) * 1_000_000 + len(content)))
        lines.update()
        assert parsed(content) == found


def test_a_line_is_read_once_and_a_torn_one_when_it_is_complete(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines, found = reader(file)
    assert not lines.update()
    for step in range(1000):
        with open(file, "ab") as stream:
            stream.write(b'{"step": %d, "lo' % step)
            stream.flush()
            lines.update()
            assert step == len(found)
            stream.write(b'ss": 1.5}\n')
        assert lines.update()
        assert not lines.update()
    assert [{"step": step, "loss": 1.5} for step in range(1000)] == found
    # At each of the two looks at a line: the torn line again, and the 257 bytes by which a rewritten file is known.
    assert lines.file.num_bytes_read <= file.stat().st_size + 2 * 1000 * (257 + 20)


def test_a_rewound_file_that_has_grown_again_is_read_from_its_beginning(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines, found = reader(file)
    file.write_text("".join(json.dumps({"step": step, "time": 100.0 + step}) + "\n" for step in range(10)))
    lines.update()
    again = [{"step": step, "time": 200.0 + step if step > 4 else 100.0 + step} for step in range(50)]
    file.write_text("".join(json.dumps(record) + "\n" for record in again))
    assert lines.update()
    assert again == found


def test_a_line_without_an_end_takes_no_memory_and_a_pipe_is_not_waited_for(tmp_path):
    file = tmp_path / "metrics.jsonl"
    lines, found = reader(file)
    file.write_bytes(b'{"step": 1}\n' + b"x" * (3 * BLOCK_BYTES) + b'\n{"step": 2}\n')
    assert lines.update()
    assert ([{"step": 1}, {"step": 2}], 1) == (found, lines.file.position.num_damaged)
    os.mkfifo(tmp_path / "pipe")
    assert not reader(tmp_path / "pipe")[0].update()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=3000), st.integers(1, 1000), st.randoms())
def test_buckets_keep_every_extreme_and_deltas_rebuild_them(values, stride, randoms):
    curve, copy, version = GrowingCurve(), [], 0
    for at, value in enumerate(values):
        curve.add(at * stride, value, at + 1)
        if randoms.random() < 0.02:
            kept, new = curve.changes_since(version)
            copy[kept:] = [(one.last_step, one.lowest, one.highest, one.last) for one in new]
            version = at + 1
    kept, new = curve.changes_since(version)
    copy[kept:] = [(one.last_step, one.lowest, one.highest, one.last) for one in new]
    assert len(curve.buckets) <= NUM_BUCKETS
    assert str([(one.last_step, one.lowest, one.highest, one.last) for one in curve.buckets]) == str(copy)
    finite = [value for value in values if math.isfinite(value)]
    for is_greater, best in ((False, min), (True, max)):
        expected = (best(finite), stride * values.index(best(finite))) if finite else None
        assert expected == curve.best(is_greater_better=is_greater)
    assert str(values[-1]) == str(curve.last)


def test_a_repeated_step_takes_later_points_away():
    curve = GrowingCurve()
    for step in range(5000):
        curve.add(step, 9.0 if step == 4000 else 1.0, step + 1)
    curve.add(3999, 2.0, 5001)
    assert (3999, (2.0, 3999)) == (curve.last_step, curve.best(is_greater_better=True))
    # What a reader has of the later points goes with the next answer.
    kept, new = curve.changes_since(5000)
    assert 3999 == new[-1].last_step and kept < len(curve.buckets)


def test_a_simulated_day_takes_flat_memory_and_reads_new_bytes_alone(tmp_path, request, record_property):
    """A line each second for a day, ten metrics in each; the quick set has an hour."""
    seconds = 86_400 if request.config.getoption("--full") else 3_600
    names = [f"metric_{number}" for number in range(8)]
    generator = random.Random(0)
    run, file = LiveRun(str(tmp_path)), tmp_path / "metrics.jsonl"
    sizes, cpu = [], 0.0
    with open(file, "a", buffering=1) as stream:
        for second in range(seconds):
            values = {name: generator.random() for name in names}
            stream.write(json.dumps({"step": second, "time": 1e9 + second, "loss": 2.0, **values}) + "\n")
            if second % 60 == 0:
                stream.write(json.dumps({"event": "anomaly", "step": second, "kind": "spike", "message": "m"}) + "\n")
            if second % 5 == 4:
                begin = sum(os.times()[:2])
                run.update(1e9 + second, second)
                cpu += sum(os.times()[:2]) - begin
            if second in (seconds // 4, seconds - 1):
                sizes.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    size = file.stat().st_size
    record_property("bytes_read_per_byte", run.num_bytes_read / size)
    record_property("memory_growth_kib", sizes[1] - sizes[0])
    record_property("reader_cpu_seconds", cpu)
    assert run.num_bytes_read <= size + 257 * (seconds // 5)
    assert all(len(curve.buckets) <= NUM_BUCKETS for curve in run.curves.values())
    assert len(run.events) == min(MAX_EVENTS, math.ceil(seconds / 60))
    assert sizes[1] - sizes[0] < 4096
    assert seconds - 1 == run.summary.step and 1.0 == run.seconds_per_step


def test_a_pause_does_not_count_as_time_of_steps(tmp_path):
    run = LiveRun(str(tmp_path))
    lines = [{"step": step, "time": 1e9 + step} for step in range(5)]
    lines.append({"step": 4, "time": 1e9 + 900, "event": "control", "action": "resume", "paused_seconds": 896.0})
    lines += [{"step": step, "time": 1e9 + 896 + step} for step in range(5, 8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.update(0.0, 1)
    assert 1.0 == run.seconds_per_step


def test_a_name_of_its_own_at_each_step_takes_no_memory(tmp_path):
    run = LiveRun(str(tmp_path))
    lines = [json.dumps({"step": step, f"metric_{step}": 1.0}) + "\n" for step in range(3 * MAX_METRICS)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    run.update(0.0, 1)
    assert MAX_METRICS == len(run.curves) and 3 * MAX_METRICS - 1 == run.summary.step


@pytest.mark.parametrize("value", ["NaN", '"nan"', '"-inf"', "true", '"text"', "null", "[1]", "1" + "0" * 400])
def test_a_value_of_any_kind_is_read_or_left_out(tmp_path, value):
    run = LiveRun(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {value}, "other": 2.5}}\n')
    run.update(0.0, 1)
    assert 2.5 == run.curves["other"].last
    assert ("loss" in run.curves) == (value[0] in "N1" or value in ('"nan"', '"-inf"'))
