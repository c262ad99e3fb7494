"""The page of a plan: bars, course and rows say what the plan says, and no text can be code."""

import re
from html.parser import HTMLParser

import pytest

from forgather.cli.plan_output import fit_lines, row_lines
from forgather.ml.report.html_text import html_text
from forgather.ml.report.plan_page import plan_page

GIB = 2**30


def place(phase, block, **uses):
    return {"phase": phase, "block": block, "at": f"{phase} {block}", "uses": {k: v * GIB for k, v in uses.items()}}


def row(name, size, source="traced"):
    return {"name": name, "num_bytes": size * GIB, "source": source}


@pytest.fixture
def found():
    rows = [row("activations", 4), row("parameters", 2), row("buckets", 1, "formula"), row("<b>own</b>", 1)]
    peak = {"phase": "training step", "at": "backward 1", "made_by": "aten.mm: 2 x 3 <i>", "rows": rows}
    timeline = [
        place("forward", -1, parameters=2),
        place("forward", 0, parameters=2, activations=2),
        place("forward", 2, parameters=2, activations=4),
        place("backward", 1, parameters=2, activations=4, buckets=1, **{"<b>own</b>": 1}),
        place("update", -1, parameters=2, gradients=3),
    ]
    rank = {"ranks": [0, 3], "stages": [], "phases": [{**peak, "num_bytes": 8 * GIB}], "timeline": timeline}
    overhead = {"name": "context", "least": GIB, "most": 2 * GIB, "basis": "reports", "source": "assumed"}
    fit = {"peak_bytes": 8 * GIB, "least": 9 * GIB, "most": 10 * GIB, "available": 16 * GIB, "verdict": "fits"}
    fit |= {"ranks": (0, 3), "overheads": [overhead], "largest": "activations"}
    step = {"seconds": {"low": 0.5, "high": 2.0}, "assumptions": ["0.4 to <0.75"], "rows": {}}
    step |= {"mfu": {"low": 0.2, "high": 0.4}, "tokens_per_second": {"low": 512.0, "high": 2048.0}}
    step["rows"] = {"matrix products": {"low": 0.4, "high": 1.5}, "bubble": {"low": 0.1, "high": 0.5}}
    return {
        "config": "<script>", "world_size": 4, "strategy": "Replicated", "mesh": {"dp": 4}, "parameters": 10**9,
        "trainable": 10**9, "rows_per_update": 8, "tokens_per_row": 128, "ranks": [rank], "host": [], "notes": [],
        "disk": [], "time": {"step": step, "run": None},
        "fit": {"hardware": {"title": "a card", "memory_bytes": 16 * GIB}, "held_bytes": 0, "ranks": [fit]},
    }  # fmt: skip


class Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag == self.open.pop()


def shares(page, key):
    return [float(share) for share in re.findall(rf'<i class="{key}" style="--share:([\d.]+)%', page)]


def test_bars_are_in_proportion_to_the_device(found):
    found["time"] = None
    page, whole = plan_page(found), 16 * 1.06
    sizes = {"u0": 2, "u7": 4, "u4": 1, "u13": 1, "least": 1, "most": 1}
    for key, size in sizes.items():
        assert [pytest.approx(100 * size / whole, abs=1e-3)] == shares(page, key)
    assert f'--at:{16 / whole:.3%}" title="memory of the device"' in page


def test_the_course_of_a_step_has_its_peak_where_the_plan_has_it(found):
    page = plan_page(found)
    (top, left) = re.search(
        r'class="peak[ a-z]*" style="--x:([\d.]+)%;--y:([\d.]+)%"><span>peak 8.0 GiB', page
    ).groups()[::-1]
    assert float(top) == pytest.approx(100 * 8 / (16 * 1.06), abs=0.01)
    # Blocks 1 and 2 of the forward pass are twice as far from each other as 0 is from what is before it.
    xs = [
        float(point.split(",")[0]) for point in re.search(r'<polygon class="u0" points="([^"]+)"', page)[1].split()[:5]
    ]
    assert xs[2] - xs[1] == pytest.approx(2 * (xs[1] - xs[0]), abs=0.2)
    assert float(left) == pytest.approx(xs[3] / 10, abs=0.1)
    assert "The peak is in the backward 1, when aten.mm: 2 x 3 &lt;i&gt; was allocated." in page


def test_each_row_says_how_it_was_found_and_texts_are_escaped(found):
    page = plan_page(found)
    for name, source in (("activations", "traced"), ("buckets", "formula"), ("context", "assumed")):
        assert re.search(rf'{name}(<small>reports</small>)?</td>.*?<b class="{source}">{source}</b></td></tr>', page)
    assert "&lt;b&gt;own&lt;/b&gt;" in page
    reader = Balanced()
    reader.feed(page)
    assert [] == reader.open
    assert "script" not in reader.seen
    assert "default-src 'none'" in page


def test_names_in_sentences_are_code_and_no_backtick_is_left(found):
    found["notes"] = ["set `bf16: <true>`"]
    found["time"]["step"]["assumptions"] = ["no `overlap`"]
    found["fit"]["ranks"][0]["overheads"][0]["basis"] = "as of `torch`"
    page = plan_page(found)
    assert all(f"<code>{name}</code>" in page for name in ("bf16: &lt;true&gt;", "overlap", "torch"))
    assert "`" not in page


ANSWER = {"limit": 2 * GIB, "num_bytes": GIB, "unit": 1, "pipeline_chunks": None, "most_rows": 8, "is_exact": True}


@pytest.mark.parametrize("size", [0, 4, 16])
def test_each_answer_about_the_batch_is_on_the_page_and_in_the_text(found, size):
    answer = {**ANSWER, "size": size, "num_bytes": 3 * GIB if size == 0 else GIB, "next_bytes": 3 * GIB}
    page = plan_page({**found, "largest_batch": answer})
    lines = [line.strip() for line in row_lines(answer) if line]
    assert (1, 2, 3)[(0, 4, 16).index(size)] == len(lines)
    for line in lines:
        assert html_text(line) in page
    assert "largest batch" not in plan_page(found).lower()


def test_a_colour_has_one_meaning(found):
    rows = found["time"]["step"]["rows"]
    rows |= {name: {"low": 0.1, "high": 0.2} for name in ("optimizer", "communication", "attention")}
    found["ranks"][0]["phases"][0]["rows"] += [row("optimizer", 1), row("communication", 1)]
    page = plan_page(found)
    keys = {}
    for key, name in re.findall(r'<i class="([uw]\d+)"[^>]* title="([^:"]+): ', page):
        keys.setdefault(key, set()).add(name)
    assert {"u1": {"optimizer"}, "u5": {"communication"}, "w0": {"matrix products"}}.items() <= keys.items()
    assert all(len(names) == 1 for names in keys.values())
    style = {key: re.search(rf"--{key}:(#\w+)", page)[1] for key in [*(f"u{n}" for n in range(13)), "w0", "w1", "w2"]}
    assert len({*style.values()}) == len(style)


def test_a_plan_without_a_device_has_no_line_and_no_time(found):
    page = plan_page({**found, "fit": None, "time": None})
    assert "memory of the device" not in page
    assert "Time of a step" not in page


def test_the_terminal_shows_a_bar_with_the_device(found):
    (bar,) = [line.strip() for line in fit_lines(found["fit"], 4) if "#" in line]
    # 16 GiB are 48 characters.
    assert "|" + "#" * 24 + "+" * 3 + "-" * 3 + " " * 18 + "|" == bar
    found["fit"]["ranks"][0]["available"] = 5 * GIB
    (bar,) = [line.strip() for line in fit_lines(found["fit"], 4) if "#" in line]
    assert "|" + "#" * 24 + "|" + "#" * 14 + "+" * 5 + "-" * 5 == bar


def test_the_page_answers_how_many_devices_a_deadline_needs(found):
    assert "deadline" not in plan_page(found)
    times = {"by_time": {"low": 3.0, "high": 5.0}, "days": {"low": 8.0, "high": 13.5}, "by_memory": 2}
    count = {"devices_per_machine": 8, "planned": 5, "why_fewer": None, "tokens_per_update": 4096, "verdict": "fits"}
    count["tokens_before"] = 4096
    page = plan_page({**found, "devices": {**times, **count}})

    cells = dict(re.findall(r"<tr><td>([^<]*)</td><td>([^<]*)</td></tr>", page))
    assert ("3 to 5", "at least 2") == (cells["machines, by time"], cells["machines, by memory"])
    assert ("5 of 8 devices", "8 to 13.5 days") == (
        cells["machines that were planned"],
        cells["time of the run on these"],
    )
    assert ("4,096", "fits") == (cells["tokens of a step"], cells["memory"])
    assert "why" not in page and "more could not be planned" not in cells
    assert "follows the number" not in page
    grown = plan_page({**found, "devices": {**times, **count, "tokens_before": 1024}})
    assert "the step follows the number of devices: 4,096 tokens in place of the config&#x27;s 1,024" in grown
