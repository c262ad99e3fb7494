"""The page of a comparison as data: its points, its size, and that nothing that a run says can be markup."""

import base64
import json
import re
import struct
from itertools import accumulate

import pytest

from forgather.redaction import remember
from forgather.runs.compared_run import open_all
from forgather.runs.comparison import Comparison
from forgather.runs.comparison_page.page import SCRIPTS, page, page_data
from tests.isolation import private_folders  # noqa: F401
from tests.runs.compared import Runs, falling

FORMATS = {1: "B", 2: "H", 4: "I", 8: "Q"}


@pytest.fixture
def runs(tmp_path, monkeypatch):
    found = Runs(tmp_path)
    monkeypatch.chdir(found.project)
    return found


def data_of(runs, **settings):
    opened, _ = open_all([str(runs.folder)], is_full=settings.get("is_full", False))
    return page_data(Comparison(opened), **settings)


def decoded(facts):
    """The points as a reader of the format decodes them, without the code of the page."""
    deltas = base64.b64decode(facts["steps"])
    values = base64.b64decode(facts["values"])
    kind = "f" if facts["bits"] == 32 else "d"
    steps = accumulate(struct.unpack(f"<{len(deltas) // facts['size']}{FORMATS[facts['size']]}", deltas))
    return list(steps), list(struct.unpack(f"<{len(values) * 8 // facts['bits']}{kind}", values))


@pytest.mark.parametrize("every", [1, 300, 70_000])
def test_the_points_of_the_page_are_those_of_the_file(runs, every):
    lines = falling(40 * every, end=1.0, every=every)
    runs.add(lines=lines)
    runs.add(lines=lines, overrides=[("args.batch", "16")])
    steps, values = decoded(data_of(runs)["curves"][0]["metrics"][0])
    assert [line["step"] for line in lines] == steps
    assert [line["loss"] for line in lines] == pytest.approx(values, rel=1e-7)


@pytest.mark.parametrize("value", [1e300, -1e300, 1e-300, 0.0])
def test_a_value_that_32_bits_do_not_hold_has_64(runs, value):
    for batch in ("8", "16"):
        runs.add(lines=[{"step": 1, "loss": value}], overrides=[("args.batch", batch)])
    assert [value] == decoded(data_of(runs)["curves"][0]["metrics"][0])[1]


def test_a_long_curve_has_buckets_and_with_full_every_point(runs):
    lines = [{"step": step, "loss": 9.0 if step == 3333 else 1.0 + step / 1e4} for step in range(1, 5001)]
    runs.add(lines=lines)
    runs.add(lines=lines, overrides=[("args.batch", "16")])
    facts = data_of(runs)["curves"][0]["metrics"][0]
    steps, values = decoded(facts)
    assert (True, 5000, 3333) == (len(steps) <= 801, facts["count"], steps[values.index(9.0)])
    assert 9.0 > max(decoded(facts["means"])[1])
    full = data_of(runs, is_full=True)["curves"][0]["metrics"][0]
    assert ([line["step"] for line in lines], False) == (decoded(full)[0], "means" in full)


def test_the_axes_of_time_and_tokens_belong_to_the_run(runs):
    lines = [
        {"step": step, "time": 1.7e9 + step, "loss": 1.0, "tokens_per_second": 50.0, "steps_per_second": 0.5}
        for step in (1, 2, 4)
    ]
    runs.add(lines=lines)
    runs.add(lines=[{"step": 1, "loss": 1.0}])
    first, second = data_of(runs)["curves"]
    assert ([1, 2, 4], [0.0, 1.0, 3.0]) == decoded(first["time"])
    assert ([1, 2, 4], [100.0, 200.0, 400.0]) == decoded(first["tokens"])
    assert (None, None) == (second["time"], second["tokens"])


SECRET = "Zq81kX0pLwRt55mN2vBc"


def test_secrets_are_hidden_in_texts_and_points_that_look_like_one_are_kept(runs):
    letters = "AIzaKM2UzkyIVbNRrG1Y7jW641rifxiPEuCFIKK6iNRwVmg1"  # as a key of a well-known service begins
    values = struct.unpack("<9f", base64.b64decode(letters))
    lines = [{"step": step, "loss": value} for step, value in enumerate(values)]
    lines.append({"step": 9, "event": "note", "message": f"password={SECRET}"})
    for batch in ("8", "16"):
        runs.add(lines=lines, overrides=[("args.batch", batch)])
    text = page(data_of(runs), "runs")
    assert (False, True) == (SECRET in text, letters in text)


HOSTILE = "</script><script>window.ran=1</script><img src=x onerror=window.ran=2>'\"&\u2028\u202e@data@ @script@"


def test_no_text_of_a_run_can_be_markup(runs):
    lines = [{"step": 1, "loss": 1.0, HOSTILE: 2.0}, {"step": 1, "event": HOSTILE, "message": HOSTILE}]
    runs.add(lines=lines, overrides=[("args.schedule", json.dumps(HOSTILE))], summary={"status": HOSTILE})
    runs.add(lines=lines)
    text = page(data_of(runs), HOSTILE)
    assert (3, 4) == (len(re.findall("<script", text)) - 1, len(re.findall("</script>", text)))
    assert not re.search("<img|onerror=(?!window)", text)
    embedded = re.search(r'id="data">(.*?)</script>', text, re.S)[1]
    assert HOSTILE in [metric["name"] for metric in json.loads(embedded)["metrics"]]


def test_the_page_refers_to_nothing_outside_and_carries_the_licence_of_the_library(runs):
    for batch in ("8", "16"):
        runs.add(lines=falling(20, end=1.0), overrides=[("args.batch", batch)])
    text = page(data_of(runs), "title")
    assert "default-src 'none'" in text
    assert not re.search(
        r"<link(?! rel=\"icon\" href=\"data:,\")|<img|<iframe|@import|url\(|src=|fetch\(|XMLHttp", text
    )
    addresses = set(re.findall(r"https?://[\w./]+", text))
    assert {"https://github.com/leeoniya/uPlot", "http://www.w3.org/2000/svg"} == addresses
    assert "The MIT License (MIT)" in text
    assert str(runs.project.parent) not in json.dumps([row for row in data_of(runs)["config"] if not row["label"]])


def test_known_secrets_are_hidden(runs):
    remember("s3cr3t-Zq81kX0pLw", "api_key")
    lines = [{"step": 1, "loss": 1.0}, {"step": 1, "event": "x", "message": "with s3cr3t-Zq81kX0pLw"}]
    for batch in ("8", "16"):
        runs.add(lines=lines, overrides=[("args.batch", batch)])
    assert "s3cr3t" not in page(data_of(runs), "title")


def test_no_script_inserts_markup():
    from pathlib import Path

    import forgather.runs.comparison_page as package

    for name in SCRIPTS:
        text = (Path(package.__file__).parent / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", text), name
