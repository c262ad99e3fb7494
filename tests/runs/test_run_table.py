"""Tables of runs: what is found, what is true, which values differ, filters, sorting, the cache, and bad files."""

import json
import math
import os
import random
import shutil
import time

import pytest

from forgather.cli.runs_output import details_lines, table_lines
from forgather.errors import ProjectError
from forgather.run_status import Status
from forgather.runs.condition import parse_condition
from forgather.runs.live_run import LiveRun
from forgather.runs.metrics_file import best_value, last_values
from forgather.runs.run_folders import find_runs
from forgather.runs.run_table import Column, read_table
from tests.runs.corpus import STARTED, make_run


def names(table):
    return [run.name for run in table.runs]


def statuses(table):
    return {run.folder: run.status for run in table.runs}


@pytest.fixture
def three(tmp_path):
    """Three runs with different learning rates and losses; the oldest first."""
    return [
        make_run(tmp_path / "out", number, lr=lr, loss=loss, optimizer=optimizer)
        for number, (lr, loss, optimizer) in enumerate(
            [(0.001, 2.0, "AdamW"), (0.003, 1.5, "AdamW"), (0.01, 3.0, "SGD")]
        )
    ]


def test_runs_are_found_wherever_they_are_but_not_inside_one_another(tmp_path, three):
    shutil.copytree(three[0], tmp_path / "moved" / "elsewhere" / "renamed")
    make_run(tmp_path / "out" / "reruns" / "20260101T000000Z", 9)
    shutil.copytree(three[0], three[1] / "templates" / "inner")
    shutil.copytree(three[0], tmp_path / "out" / "checkpoint-5" / "inner")
    shutil.copytree(three[0], tmp_path / "out" / ".hidden")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "summary.json").write_text("{}")

    found = [os.path.relpath(run.folder, tmp_path) for run in find_runs(str(tmp_path))]

    ours = [os.path.relpath(folder, tmp_path) for folder in three]
    rerun = "out/reruns/20260101T000000Z/runs/20260101T000900Z-tiny"
    assert sorted(["moved/elsewhere/renamed", rerun, *ours]) == found
    assert [str(three[0])] == [run.folder for run in find_runs(str(three[0]))]


@pytest.mark.parametrize("where", ["nowhere", "a_file"])
def test_a_folder_that_is_none_is_refused(tmp_path, where):
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ProjectError, match=r"FG500.*'.*(nowhere' does not exist|a_file' is a file)"):
        read_table([str(tmp_path / where)])


def test_a_table_states_what_the_files_say(three):
    run = read_table([str(three[1].parent)]).runs[1]
    assert (str(three[1]), Status.FINISHED, "tiny.yaml", 200, 200) == (
        run.folder, run.status, run.config, run.step, run.max_steps,
    )  # fmt: skip
    assert (STARTED + 60, 90.5, 1001.0) == (run.started, run.seconds, run.tokens_per_second)
    assert ("eval_loss", 1.35, 100) == run.best
    assert 1.5 == run.metrics["eval_loss"]
    assert {"optimizer.lr": "0.003"} == run.changes


@pytest.mark.parametrize(
    ("status", "stated", "expected"),
    [
        (Status.RUNNING, {}, Status.RUNNING),
        (Status.RUNNING, {"pid": 2**30}, Status.KILLED),
        (Status.PAUSED, {}, Status.PAUSED),
        (Status.FAILED, {"cause": {"code": None, "message": "ValueError: bad row", "rank": 1}}, Status.FAILED),
        (Status.INTERRUPTED, {}, Status.INTERRUPTED),
        (Status.FINISHED, {}, Status.FINISHED),
    ],
)
def test_the_status_of_a_run_is_what_is_true_now(tmp_path, status, stated, expected):
    folder = make_run(tmp_path, status=status, **stated)
    for _ in range(2):  # from the files, and from the cache
        table = read_table([str(tmp_path)])
        table.save()
        assert {str(folder): expected} == statuses(table)
    assert ("ValueError: bad row" if status is Status.FAILED else None) == table.runs[0].cause


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("finished", Status.FINISHED),
        ("stopped early", Status.FINISHED),
        ("failed", Status.FAILED),
        ("interrupted", Status.INTERRUPTED),
        ("running", None),  # it may go on, and it may have been killed: nothing says which
    ],
)
def test_the_status_of_a_run_of_an_older_version_follows_from_its_summary(tmp_path, word, expected):
    folder = make_run(tmp_path, status=None)
    summary = json.loads((folder / "summary.json").read_text()) | {"status": word}
    (folder / "summary.json").write_text(json.dumps(summary))
    assert {str(folder): expected} == statuses(read_table([str(tmp_path)]))


def test_a_run_that_dies_between_two_lists_is_killed_in_the_second_although_no_file_changed(tmp_path):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    from forgather.run_status import process_start

    make_run(tmp_path, status=Status.RUNNING, pid=child, process_started=process_start(child))
    first = read_table([str(tmp_path)])
    first.save()
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert [Status.RUNNING, Status.KILLED] == [first.runs[0].status, read_table([str(tmp_path)]).runs[0].status]


@pytest.mark.parametrize("skew", [-7200, 0, 7200])
def test_the_beats_of_another_machine_count_and_not_the_difference_of_the_clocks(tmp_path, skew):
    folder = make_run(tmp_path, status=Status.RUNNING, hostname="elsewhere", beat=1, updated=STARTED + 100 + skew)
    now = STARTED + 101

    def listed(seconds, beat=None):
        if beat is not None:
            stated = json.loads((folder / "status.json").read_text())
            stated |= {"beat": beat, "updated": stated["updated"] + 5}
            (folder / "status.json").write_text(json.dumps(stated))
        table = read_table([str(tmp_path)], now=now + seconds)
        table.save()
        return table.runs[0].status

    # At first there is nothing but the clocks: one that is far behind looks like a death.
    assert (Status.KILLED if skew < 0 else Status.RUNNING) is listed(0)
    assert Status.RUNNING is listed(6, beat=2)
    assert Status.RUNNING is listed(20)
    (folder / "labels.json").write_text("{}")  # another file changes, and the beat does not
    assert Status.KILLED is listed(32)
    assert Status.RUNNING is listed(40, beat=3)  # the disk was not reachable for a while
    assert Status.KILLED is listed(70)


def test_a_clock_that_went_back_makes_the_duration_unknown_and_nothing_else(tmp_path):
    make_run(tmp_path, status=Status.FAILED, updated=STARTED - 3600, cause=None)
    (run,) = read_table([str(tmp_path)]).runs
    assert (None, Status.FAILED, ()) == (run.seconds, run.status, run.problems)
    assert ("the clock went back during the run: its duration is not known",) == run.notes


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("run.json", b"{", "run.json: it is not JSON"),
        ("run.json", b"[1]", "run.json: it is not a JSON object"),
        ("run.json", b'{"form": 99, "config": "new.yaml"}', "run.json: it has form 99, and this version reads form 2"),
        ("status.json", b'{"form": 99}', "status.json: it has form 99, and this version reads form 1"),
        ("status.json", b"\xff", "status.json: it is not JSON"),
        ("summary.json", b"nope", "summary.json: it is not JSON"),
        ("metrics.jsonl", b'{"step": 1, "loss": 2.0}\nbroken\n{"step": 3, "loss": 1.0}\n', "metrics.jsonl: line 2 is damaged"),
        ("labels.json", b'{"tags": "x"}', "labels.json: it is not an object with the texts 'group' and 'note'"),
    ],
)  # fmt: skip
def test_a_bad_file_gives_one_sentence_and_all_else_is_shown(tmp_path, three, name, content, problem):
    (three[1] / name).write_bytes(content)
    table = read_table([str(tmp_path)])
    assert [0, 1, 0] == [len(run.problems) for run in table.runs]
    assert problem in table.runs[1].problems[0]
    assert 3 == len(table.records())
    assert "new.yaml" not in str(content) or table.runs[1].config == "new.yaml"


def test_deep_wrong_and_huge_values_are_no_crash(tmp_path):
    folder = make_run(tmp_path)
    for name in ("run.json", "summary.json", "status.json", "labels.json"):
        (folder / name).write_text("[" * 100_000)
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1' + b"0" * 5000 + b', "eval_loss": 1' + b"0" * 400 + b"}\n")
    (run,) = read_table([str(tmp_path)]).runs
    assert 5 == len(run.problems)


def test_runs_without_a_record_are_listed_by_what_they_measured(tmp_path):
    folder = make_run(tmp_path, status=None)
    os.remove(folder / "run.json")
    (run,) = read_table([str(tmp_path)]).runs
    assert (None, Status.FINISHED, 2.0, STARTED) == (run.config, run.status, run.metrics["eval_loss"], run.started)


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["optimizer.lr<5e-3"], [1, 0]),
        (["optimizer.lr<=0.003", "eval_loss<1.9"], [1]),
        (["optimizer.lr=1e-3"], [0]),
        (["optimizer.lr==0.001"], [0]),
        (["optimizer.lr!=0.001"], [2, 1]),
        (["optimizer~SGD$"], [2]),
        (["optimizer=torch.optim:AdamW"], [1, 0]),
        (["trainer_args.learning_rate>=0.01"], [2]),  # no run changes it: it is read from the graph
        (["main.args.learning_rate>=0.01"], [2]),  # through two aliases
        (["lr>0.002", "step=200"], [2, 1]),  # the end of a path
        (["status=finished"], [2, 1, 0]),
        (["time>1m"], [2, 1, 0]),
        (["time>2min"], []),
        (["started>=2026-01-01T00:02"], [2]),
        (["best<1.4"], [1]),
        (["dataset.seed=42"], [2, 1, 0]),
    ],
)
def test_conditions_find_the_runs_that_fulfill_them_all(three, conditions, expected):
    table = read_table([str(three[0].parent)])
    table.where([parse_condition(text) for text in conditions])
    assert [three[number].name for number in expected] == names(table)


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("bf16=True", True, True),
        ("bf16=true", True, True),
        ("bf16!=False", False, False),
        ("path=None", None, True),
        ("path=~", None, True),
        ("tag=01", "01", True),
        ("tag='true'", "true", True),
        ("name='x y'", "x y", True),
        ("name=y'", "y'", True),
        ("bf16=1", True, False),
    ],
)
def test_a_value_is_written_as_yaml_or_as_python_shows_it(text, value, expected):
    assert expected is parse_condition(text).fits(value)


@pytest.mark.parametrize("name", ["status.json", "summary.json"])
@pytest.mark.parametrize("key", ["started", "updated", "step", "max_steps", "beat", "seconds"])
def test_numbers_that_no_run_has_cost_only_the_run_that_has_them(tmp_path, three, name, key):
    facts = json.loads((three[0] / name).read_text())
    for value in (10**400, 10**17, 1e300):
        (three[0] / name).write_text(json.dumps({**facts, key: value, "status": "running"}))
        table = read_table([str(three[0].parent)])
        assert 3 == len(table)
        assert table_lines(table, str(tmp_path), width=None, most=None, now=0.0)
        assert details_lines(table.runs[-1], "1 B", [])
        live = LiveRun(str(three[0]))
        live.update(now=0.0, version=1)
        assert live.seconds_left is None or 0 <= live.seconds_left < math.inf


def test_a_run_without_the_value_is_left_out_and_counted(tmp_path, three):
    os.remove(three[2] / "graph.yaml")
    table = read_table([str(tmp_path)])
    assert {"dataset.seed": 1} == table.where([parse_condition("dataset.seed!=41")])
    assert 2 == len(table)


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("evalloss", "no run has 'evalloss'", "did you mean 'eval_loss'"),
        ("optimizer.learnin_rate", "no run has 'optimizer.learnin_rate'", "'trainer_args.learning_rate'"),
        ("learning_rate", "'learning_rate' names 2 values", "metrics.learning_rate, trainer_args.learning_rate"),
        ("output_dri", "no run has 'output_dri'", "did you mean"),
    ],
)
def test_a_name_that_is_unknown_or_ambiguous_is_refused_with_near_names(three, name, message, hint):
    table = read_table([str(three[0].parent)])
    with pytest.raises(ProjectError) as caught:
        table.where([parse_condition(f"{name}<1")])
    assert "FG501" == caught.value.code
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    ["lr", "<3", "lr<", "lr~[", "", "=", "a b", "lr=<2", "lr=> .5", "lr~a{99999999999}", f"lr~{'(' * 999}{')' * 999}"],
)
def test_a_text_that_is_no_condition_is_refused(text):
    with pytest.raises(ProjectError, match="FG502"):
        parse_condition(text)


@pytest.mark.parametrize(
    "text", ["eval_loss<2 and step>1", "time<1.2.3h", "eval_loss>='2'", "started>2025", "config<3", "optimizer.lr<low"]
)
def test_an_order_that_no_value_has_is_refused_instead_of_an_empty_list(three, text):
    with pytest.raises(ProjectError, match="FG502"):
        read_table([str(three[0].parent)]).where([parse_condition(text)])


def test_texts_have_an_order_with_a_text(three):
    table = read_table([str(three[0].parent)])
    table.where([parse_condition('started>"2025"'), parse_condition("config!=3"), parse_condition("time<10m")])
    assert 3 == len(table)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("eval_loss", [1, 0, 2]),
        ("-eval_loss", [2, 0, 1]),
        ("optimizer.lr", [0, 1, 2]),
        ("-time", [0, 1, 2]),
        ("started", [0, 1, 2]),
        ("-tokens/s", [2, 1, 0]),
    ],
)
def test_runs_are_sorted_by_any_value(three, key, expected):
    table = read_table([str(three[0].parent)])
    if key == "-time":
        table.runs.reverse()
    table.sort(key)
    assert [three[number].name for number in expected] == names(table)


def test_runs_without_a_value_and_with_nan_come_last_in_both_directions(tmp_path):
    losses = [2.0, math.nan, 1.0]
    folders = [make_run(tmp_path, number, loss=loss) for number, loss in enumerate(losses)]
    for folder in folders:
        text = (folder / "metrics.jsonl").read_text().replace("NaN", '"nan"')
        (folder / "metrics.jsonl").write_text(text)
        (folder / "summary.json").write_text((folder / "summary.json").read_text().replace("NaN", '"nan"'))
    folders.append(make_run(tmp_path, 3, lines=0, status=Status.KILLED))
    for key, first in (("eval_loss", [2, 0]), ("-eval_loss", [0, 2])):
        table = read_table([str(tmp_path)])
        table.sort(key)
        assert [folders[number].name for number in first] == names(table)[:2]
        assert {folders[1].name, folders[3].name} == set(names(table)[2:])


def test_the_values_that_differ_are_the_true_ones_also_of_runs_that_do_not_set_them(tmp_path):
    changed = make_run(tmp_path, 0, lr=0.1, changes={"optimizer.lr": "1e-1", "trainer_args.output_dir": "/a"})
    inherited = make_run(tmp_path, 1, lr=0.002, changes={"trainer_args.output_dir": "/b"})
    table = read_table([str(tmp_path)])
    assert [Column("optimizer.lr", "path")] == table.differing()
    values = {record["folder"]: record["values"] for record in table.records()}
    assert {str(changed): {"optimizer.lr": 0.1}, str(inherited): {"optimizer.lr": 0.002}} == values


def test_values_that_are_equal_but_written_differently_do_not_differ(tmp_path):
    make_run(tmp_path, 0, lr=0.001, changes={"optimizer.lr": "1e-3"})
    make_run(tmp_path, 1, lr=0.001, changes={})
    assert [] == read_table([str(tmp_path)]).differing()


def test_what_the_cache_says_is_what_the_files_say_after_any_change(tmp_path):
    draws = random.Random(3)
    folders = [make_run(tmp_path / "out", number, lr=0.001 * (number + 1)) for number in range(6)]
    for turn in range(25):
        number = draws.randrange(len(folders))
        change = draws.choice(["metrics", "labels", "status", "remove", "graph", "nothing"])
        folder = folders[number]
        if change == "metrics" and folder.exists():
            with (folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": 1000 + turn, "eval_loss": draws.random()}) + "\n")
        elif change == "labels" and folder.exists():
            (folder / "labels.json").write_text(json.dumps({"tags": [str(turn)]}))
        elif change == "status" and folder.exists():
            (folder / "status.json").write_text((folder / "status.json").read_text().replace("finished", "failed"))
        elif change == "graph" and folder.exists():
            (folder / "graph.yaml").write_text((folder / "graph.yaml").read_text().replace("seed: 4", "seed: 14"))
        elif change == "remove":
            shutil.rmtree(folder, ignore_errors=True)
        kept = read_table([str(tmp_path)], now=STARTED)
        seeds = [kept.value(run, Column("dataset.seed", "path")) for run in kept.runs]
        kept.save()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FORGATHER_CACHE", "off")
            fresh = read_table([str(tmp_path)], now=STARTED)
        assert fresh.runs == kept.runs, change
        assert seeds == [fresh.value(run, Column("dataset.seed", "path")) for run in fresh.runs]


def test_a_cache_that_is_damaged_or_cannot_be_written_changes_nothing(tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    make_run(tmp_path / "out", 0)
    first = read_table([str(tmp_path / "out")], now=STARTED)
    first.save()
    files = list(cache.rglob("*.json"))
    assert files
    for content in (b"", b"garbage\n{}", files[0].read_bytes()[:-5]):
        for file in files:
            file.write_bytes(content)
        assert first.runs == read_table([str(tmp_path / "out")], now=STARTED).runs
    shutil.rmtree(cache)
    cache.write_text("a file in place of the folder")
    table = read_table([str(tmp_path / "out")], now=STARTED)
    table.save()
    assert first.runs == table.runs


def reference_best(content, metric, better):
    """The best value, from every line that json can parse."""
    found = []
    for line in content.decode().split("\n")[:-1]:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        value = record.get(metric) if isinstance(record, dict) and "event" not in record else None
        if type(value) in (int, float) and math.isfinite(value):
            found.append((value, record.get("step")))
    if not found:
        return None
    best = better(value for value, _ in found)
    return (metric, best, next(step for value, step in found if value == best))


def test_the_best_value_is_that_of_parsing_every_line():
    draws = random.Random(8)
    for _ in range(200):
        lines = []
        for step in range(draws.randrange(12)):
            kind = draws.randrange(8)
            value = draws.choice([1.5, -2, 1e-9, 3.25e12, "nan", "inf", 0.5, draws.random()])
            record = {"step": step, "eval_loss": value, "note": '"eval_loss": 0'}
            record |= {"event": "spike"} if kind == 0 else {}
            record = {"step": step, "loss": value} if kind == 1 else record
            line = json.dumps(record)
            lines.append("{broken " + line if kind == 2 else line[:-3] if kind == 3 else line)
        content = "\n".join(lines).encode() + draws.choice([b"", b"\n"])
        for is_greater in (False, True):
            expected = reference_best(content, "eval_loss", max if is_greater else min)
            assert expected == best_value(content, "eval_loss", is_greater_better=is_greater), content


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", {}),
        (b'{"step": 3, "loss": 1.5}\n{"step": 4, "lo', {"loss": 1.5}),
        (b'{"step": 3, "loss": "nan"}\n', {"loss": math.nan}),
        (
            b'{"step": 3, "loss": 1' + b"0" * 400 + b', "epoch": 1, "grad_norm": true, "lr": 0.5}\n',
            {"loss": math.inf, "lr": 0.5},
        ),
        (b'{"step": 3, "event": "pause", "loss": 9}\n{"step": 3, "loss": 2}\n', {"loss": 2.0}),
        (b'{"step": 1, "eval_loss": 5.0}\n' + b'{"step": 2, "loss": 1.0}\n' * 50, {"eval_loss": 5.0, "loss": 1.0}),
    ],
)
def test_the_last_values_are_those_of_whole_lines_that_are_no_events(content, expected):
    found = last_values(content)
    assert repr(expected) == repr(dict(sorted(found.metrics.items())))
    assert found.damaged is None
