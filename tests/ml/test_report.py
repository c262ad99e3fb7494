import json
import math
import re
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather import redaction
from forgather.ml.callbacks import JsonLogger
from forgather.ml.report import write_report
from forgather.ml.report.chart import Look, Scale, axis, chart, smoothed, thinned
from forgather.ml.report.run_data import ReportError, Series, read_facts

VOID = {"meta", "circle", "line", "path", "br"}


class Balance(HTMLParser):
    """Notes elements that are not closed in order, and every address that the page would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.wrong, self.fetched, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "srcset", "action", "data") and value]
        self.fetched += [value for name, value in attrs if name == "href" and tag != "a"]

    def handle_endtag(self, tag):
        if tag not in VOID and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text.append(data)


def parsed(page):
    reader = Balance()
    reader.feed(page)
    reader.close()
    assert (reader.open, reader.wrong, reader.fetched) == ([], [], [])
    return " ".join(reader.text)


def run_folder(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        file = folder / name.replace("_", ".")
        file.write_text(content if isinstance(content, str) else "\n".join(json.dumps(line) for line in content) + "\n")
    return folder


METRICS = [
    {"step": step, "time": 1000.0 + step, "loss": 9 - step / 20, "learning_rate": 1e-3} for step in range(0, 100, 5)
]
METRICS += [{"step": 50, "eval_loss": 7.0}, {"step": 95, "eval_loss": 6.5}]


def test_a_report_shows_curves_numbers_and_samples_and_needs_no_other_file(tmp_path):
    known = {"status": "finished", "step": 95, "max_steps": 95, "has_perplexity": True}
    summary = json.dumps({**known, "arguments": {"learning_rate": 0.001}})
    samples = [{"step": 95, "prompt": "def ", "text": "main():"}]
    run_folder(tmp_path, metrics_jsonl=METRICS, summary_json=summary, samples_jsonl=samples, config_yaml="lr: 0.001\n")
    text = parsed(write_report(tmp_path).read_text())
    for wanted in (
        "finished",
        "6.5",
        f"{math.exp(6.5):.4g}",
        "Learning rate",
        "def ",
        "main():",
        "lr: 0.001",
        "metrics.jsonl",
    ):
        assert wanted in text


def test_texts_of_a_run_cannot_become_markup(tmp_path):
    evil = "<script>alert(1)</script>\"'&</pre>"
    metrics = [{"step": 1, evil: 1.0}, {"step": 2, evil: 2.0}]
    samples = [{"step": evil, "prompt": evil, "text": evil}]
    run_json = json.dumps({evil: {evil: evil}, "config": evil})
    run_folder(tmp_path, metrics_jsonl=metrics, samples_jsonl=samples, run_json=run_json, config_yaml=evil)
    page = write_report(tmp_path).read_text()
    assert "<script>alert" not in page
    assert evil in parsed(page)


@pytest.mark.parametrize("word", ["class", "width", "section", "span", "html", "script", "summary", "text", "path"])
def test_a_value_of_env_is_hidden_in_the_texts_of_a_page_and_in_none_of_its_tags(tmp_path, monkeypatch, word):
    monkeypatch.setattr(redaction, "_known", {})
    samples = [{"step": 1, "prompt": "a", "text": f"the {word} of it"}]
    run_folder(tmp_path, metrics_jsonl=METRICS, samples_jsonl=samples, config_yaml=f"one: {word}\n")
    page = write_report(tmp_path).read_text()
    (tmp_path / "report.html").unlink()
    redaction.remember(word)
    hidden_page = write_report(tmp_path).read_text()
    assert Counter(re.findall("<[^>]*>", page)) == Counter(re.findall("<[^>]*>", hidden_page))
    text = parsed(hidden_page)
    assert f"the {word} of it" in parsed(page)
    assert "the (hidden) of it" in text
    assert "one: (hidden)" in text


SECRETS = {"of !env": "9fQ8a7xB6c5dZ4e3f2", "named": "hunter2Wq9z", "of the Hub": "hf_" + 6 * "aB3dE5"}


@pytest.mark.parametrize("kind", SECRETS)
def test_a_secret_is_nowhere_on_the_page(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(redaction, "_known", {})
    secret = SECRETS[kind]
    if kind != "of the Hub":
        redaction.remember(secret, "API_KEY" if kind == "named" else "RUN")
    metrics = [{"step": step, "loss": 1.0, f"eval_{secret}_loss": 1.0, f"my {secret}": step} for step in (1, 2, 3)]
    summary = {"status": "finished", "error": f"no {secret}", "arguments": {secret: secret}, "places": {"at": secret}}
    samples = [{"step": 1, "prompt": secret, "text": secret}]
    run_folder(tmp_path, metrics_jsonl=metrics, samples_jsonl=samples, config_yaml=f"one: {secret}\n")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / f"{secret}.txt").touch()
    page = write_report(tmp_path).read_text()
    assert "(hidden)" in parsed(page)
    assert secret not in page


@pytest.mark.parametrize(
    ("name", "content", "shown"),
    [
        ("metrics_jsonl", METRICS, "Learning rate"),
        ("samples_jsonl", [{"step": 1, "prompt": "once upon", "text": "a time"}], "once upon"),
        ("summary_json", '{"status": "interrupted"}', "interrupted"),
        ("run_json", '{"config": "tiny.yaml"}', "tiny.yaml"),
    ],
)
def test_any_one_file_is_enough(tmp_path, name, content, shown):
    assert shown in parsed(write_report(run_folder(tmp_path, **{name: content})).read_text())


def test_a_run_cut_at_any_byte_still_gives_a_report(tmp_path):
    run_folder(tmp_path, metrics_jsonl=METRICS[:3], run_json='{"config": "tiny.yaml"}')
    content = (tmp_path / "metrics.jsonl").read_bytes()
    for cut in range(0, len(content), 7):
        (tmp_path / "metrics.jsonl").write_bytes(content[:cut])
        assert "tiny.yaml" in parsed(write_report(tmp_path).read_text())
        # Each line that is whole, and no other, is a point of the curve.
        whole = [json.loads(line) for line in content[:cut].decode().splitlines() if line.endswith("}")]
        losses = read_facts(tmp_path).series.get("loss", Series("loss", [], []))
        assert [line["loss"] for line in whole if "loss" in line] == losses.values


def test_torn_documents_are_named_and_the_rest_is_shown(tmp_path):
    run_folder(tmp_path, metrics_jsonl=METRICS, summary_json='{"status": "fin', run_json="[]")
    text = parsed(write_report(tmp_path).read_text())
    assert "summary.json cannot be read" in text
    assert "run.json holds no object" in text
    assert "Learning rate" in text


def test_values_that_are_not_finite_are_counted_and_leave_the_curve_whole(tmp_path):
    metrics = [{"step": step, "loss": value} for step, value in enumerate([3.0, "nan", 2.0, "inf"])]
    run_folder(tmp_path, metrics_jsonl=metrics)
    page = write_report(tmp_path).read_text()
    assert "2 values were not finite" in parsed(page)
    assert not re.search(r'(?:d|cx|cy|x1|y1)="[^"]*(?:nan|inf)', page)


HUGE = "9" * 400


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("metrics_jsonl", f'{{"step": {HUGE}, "loss": 1}}'),
        ("metrics_jsonl", '{"step": "nan", "loss": 1}'),
        ("metrics_jsonl", f'{{"step": 3, "loss": {HUGE}}}'),
        ("metrics_jsonl", f'{{"step": 3, "time": {HUGE}, "loss": 1}}'),
        ("metrics_jsonl", '{"step": 3, "time": "nan", "loss": 1}'),
        ("metrics_jsonl", f'{{"event": "anomaly", "kind": "spike", "step": {HUGE}, "message": "x"}}'),
        ("metrics_jsonl", f'{{"event": "anomaly", "kind": "spike", "step": {"9" * 200}, "message": "x"}}'),
        ("metrics_jsonl", "[" * 100_000),
        ("ranks_jsonl", f'{{"ranks": [{{"rank": 1, "data_seconds": {HUGE}, "memory_bytes": {HUGE}}}]}}'),
        ("memory_json", f'{{"phases": {{"a": {HUGE}}}}}'),
        ("memory_json", "[" * 100_000),
        ("metrics_jsonl", '{"step": 3, "loss": 1e308}'),
        ("metrics_jsonl", '{"step": {"a": 1}, "eval_loss": {"b": 2}}'),
        ("summary_json", '{"model": [1], "seconds": 1e400, "places": "x", "machine": "x", "tokens_per_second": {}}'),
        ("summary_json", '{"model": {"class": "A", "num_parameters": "x"}, "optimizer": 3, "arguments": [1]}'),
    ],
)
def test_numbers_that_no_run_has_are_left_out_and_the_rest_is_shown(tmp_path, name, line):
    more = {"metrics_jsonl": "\n".join(map(json.dumps, METRICS)) + "\n"}
    more[name] = more.get(name, "") + line + "\n"
    page = write_report(run_folder(tmp_path, **more)).read_text()
    assert "step 95" in parsed(page)
    assert not re.search(r'(?:d|cx|cy|x1|y1)="[^"]*(?:nan|inf)', page)


def test_what_a_user_asked_of_a_run_is_among_its_events_in_words(tmp_path):
    logger, state = JsonLogger(run_dir=tmp_path), SimpleNamespace(global_step=7, log_history=[])
    facts = {"action": "set", "name": "learning_rate", "value": 1e-4, "who": "ann", "host": "here"}
    done = "learning_rate 0.001 -> 0.0001 (the rest of the schedule times 0.1)"
    logger.on_control(SimpleNamespace(process_index=0), state, None, facts=facts, done=done)
    assert f"<td>7</td><td>control</td><td>{done.replace('>', '&gt;')}</td>" in write_report(tmp_path).read_text()


def test_of_several_values_of_a_step_the_last_counts(tmp_path):
    run_folder(tmp_path, metrics_jsonl=[{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 1, "loss": 3.0}])
    assert read_facts(tmp_path).series["loss"] == Series("loss", [1, 2], [3.0, 4.0])


@pytest.mark.parametrize("folder", ["absent", "."])
def test_a_folder_without_a_run_is_refused(tmp_path, folder):
    with pytest.raises(ReportError) as excinfo:
        write_report(tmp_path / folder)
    assert excinfo.value.code == "FG850"


finite = st.floats(-1e12, 1e12).map(lambda value: value if abs(value) > 1e-9 else 0.0)


@given(st.lists(finite, min_size=1, max_size=40))
def test_an_axis_holds_its_values_and_its_ticks_are_round_and_inside(values):
    scale = axis(values, 100.0, 0.0, may_log=True)
    assert all(-1e-6 <= scale.place(value) <= 100 + 1e-6 for value in values)
    ticks = scale.ticks(5)
    assert len(ticks) <= 10
    assert all(-1e-6 <= scale.place(tick) <= 100 + 1e-6 for tick in ticks)


def test_linear_ticks_are_those_one_would_write():
    assert Scale(0, 400, 0, 1).ticks(4) == [0, 100, 200, 300, 400]
    assert Scale(4.4, 7.7, 0, 1).ticks(5) == [5.0, 6.0, 7.0]
    assert Scale(0.5, 900, 0, 1, log=True).ticks(4) == [1.0, 10.0, 100.0]


@settings(max_examples=50, deadline=None)
@given(st.lists(finite, min_size=1, max_size=3000))
def test_a_thinned_series_keeps_its_ends_and_extremes(values):
    series = Series("loss", list(range(len(values))), values)
    thin = thinned(series, most=100)
    assert len(thin.values) <= 104
    assert (thin.steps[0], thin.steps[-1]) == (0, len(values) - 1)
    assert (min(thin.values), max(thin.values)) == (min(values), max(values))


def test_a_smooth_curve_of_a_constant_is_the_constant_and_does_not_lag():
    assert smoothed([2.0] * 9, 4) == pytest.approx([2.0] * 9)
    ramp = smoothed([float(value) for value in range(101)], 5)
    assert ramp[50] == pytest.approx(50.0)


@pytest.mark.parametrize("number", [0, 1, 2, 31, 61, 5000])
def test_a_chart_of_any_length_is_balanced(number):
    series = Series("loss", list(range(number)), [1.0 + value % 7 for value in range(number)])
    card = chart("Loss", [("train", series), ("eval", series)], Look(wide=True))
    parsed(card)
    assert bool(card) == bool(number)


CHANGES = {
    "parent": "project.yaml",
    "values": [{"path": "trainer_args.lr", "value": "1e-2", "was": "1e-3"}, {"path": "a.b", "value": "7", "was": None}],
}
RUN = {"config": "a.yaml", "command": "fgcli -t a train", "working_dir": "/nowhere", "changes": CHANGES}


def body_of(folder):
    return write_report(folder).read_text().partition("<body>")[2]


def test_what_one_looks_for_comes_before_what_is_looked_up(tmp_path):
    summary = {"status": "finished", "places": {"model": "out/model"}, "arguments": {"seed": 1}}
    run_folder(tmp_path, metrics_jsonl=METRICS, summary_json=json.dumps(summary), run_json=json.dumps(RUN))
    body = body_of(tmp_path)
    parts = (
        "eval loss", "train loss", 'aria-label="Loss by step"', "Changed against project.yaml", "fgcli rerun",
        "fgcli -t a train", "out/model", "<details",
    )  # fmt: skip
    places = [body.index(part) for part in parts]
    assert sorted(places) == places
    assert "<details open" not in body.partition("What the model writes")[0]


def test_a_change_is_shown_with_what_it_replaced(tmp_path):
    run_folder(tmp_path, run_json=json.dumps(RUN))
    text = " ".join(parsed(write_report(tmp_path).read_text()).split())
    assert "trainer_args.lr 1e-3 → 1e-2 a.b 7" in text


def test_a_run_without_a_parent_has_no_changes(tmp_path):
    run_folder(tmp_path, run_json=json.dumps({**RUN, "changes": {"parent": None, "values": []}}))
    assert "Changed" not in body_of(tmp_path)


def test_a_secret_among_the_changes_is_hidden(tmp_path):
    values = [{"path": "hub.token", "value": "hf_abcdef0123456789", "was": None}]
    run_folder(tmp_path, run_json=json.dumps({**RUN, "changes": {"parent": "p.yaml", "values": values}}))
    assert "hf_abcdef0123456789" not in body_of(tmp_path)


def test_metrics_of_an_evaluation_are_tiles_and_curves_before_what_is_looked_up(tmp_path):
    records = [
        {"step": step, "eval_loss": 2.0 / step, "eval_f1": step / 10, "eval_runtime": 1.0, "eval_few_f1": 0.5,
         "eval_few_loss": 1.0, "eval_few_runtime": 1.0}
        for step in (1, 2, 3)
    ]  # fmt: skip
    run_folder(tmp_path, metrics_jsonl="".join(json.dumps(record) + "\n" for record in records))
    body = body_of(tmp_path)
    tiles, first = body[: body.index('aria-label="Loss')], body[: body.index("<details")]
    assert "<span>eval f1</span><b>0.3</b><small>from 0.1 to 0.3</small>" in tiles
    assert "<span>eval f1 (few)</span><b>0.5</b>" in tiles
    assert 'aria-label="eval f1 by step"' in first
    assert 'aria-label="eval f1 (few) by step"' in first
    assert "runtime" not in tiles


def test_answers_of_evaluations_are_a_table_beside_what_was_expected(tmp_path):
    answers = [
        {"step": 4, "set": "few", "prompt": "1 + 1", "reference": "2", "text": text} for text in ("2", "<b>3</b>")
    ]
    run_folder(tmp_path, metrics_jsonl=METRICS, samples_jsonl=[*answers, {"step": 4, "prompt": "x", "text": "y"}])
    text = write_report(tmp_path).read_text()
    assert "<th>set</th><th>prompt</th><th>reference</th><th>answer</th>" in text
    assert '<tr class="good"><td>few</td><td>1 + 1</td><td>2</td><td>2</td></tr>' in text
    assert '<tr class=""><td>few</td><td>1 + 1</td><td>2</td><td>&lt;b&gt;3&lt;/b&gt;</td></tr>' in text
    assert text.count('<pre class="sample">') == 1


PEAKS = [{"step": step, "memory_peak_bytes": peak} for step, peak in ((1, 2 * 2**30), (2, 4 * 2**30))]


@pytest.mark.parametrize(
    ("metrics", "plan", "shown"),
    [
        (
            PEAKS,
            {"fit": {"ranks": [{"ranks": [2, 3], "peak_bytes": 1}, {"ranks": [0, 1], "peak_bytes": 3 * 2**30}]}},
            True,
        ),
        (METRICS, {"fit": {"ranks": [{"ranks": [0, 0], "peak_bytes": 3}]}}, False),
        (PEAKS, {"fit": {"ranks": [{"ranks": [0, 0], "peak_bytes": "many"}]}}, False),
        (PEAKS, {"fit": None}, False),
    ],
)
def test_the_planned_peak_stands_beside_the_measured_one(tmp_path, metrics, plan, shown):
    folder = run_folder(tmp_path / "run", metrics_jsonl=metrics, plan_json=json.dumps(plan))
    text = parsed(write_report(folder).read_text())
    assert shown is ("planned 3.0 GiB, measured 4.0 GiB on rank 0 (plan -25.0%)" in text)
    assert shown is ("Peak memory" in text)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        ({"low": 0.5, "high": 1.0}, "planned 0.5 to 1 s, measured 0.5 s (plan +50%)"),
        ({"low": 0.5, "high": 0.5}, "planned 0.5 s, measured 0.5 s (plan +0%)"),
        ({"low": 0.5}, None),
        ({"low": 2, "high": 1}, None),
    ],
)
def test_the_planned_time_of_a_step_stands_beside_the_measured_one(tmp_path, seconds, shown):
    metrics = [{"step": step, "steps_per_second": speed} for step, speed in ((1, 0.1), (2, 2.0), (3, 2.0))]
    plan = json.dumps({"time": {"step": {"seconds": seconds}}})
    text = parsed(write_report(run_folder(tmp_path / "run", metrics_jsonl=metrics, plan_json=plan)).read_text())
    assert (shown is not None) is ("Time of a step" in text)
    assert shown is None or shown in text
