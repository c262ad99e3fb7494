"""Comparisons of recorded runs: what differs and which line set it, the ranking, groups of seeds, the result in words."""

import json
import shutil
from statistics import fmean, stdev

import pytest

from forgather.cli.comparison_output import comparison_facts, comparison_lines
from forgather.errors import ForgatherError
from forgather.interventions import Intervention, record
from forgather.run_control import Action
from forgather.runs.compared_run import open_all
from forgather.runs.comparison import Comparison
from forgather.runs.differences import file_changes
from forgather.runs.verdict import verdict_of
from tests.isolation import private_folders  # noqa: F401
from tests.runs.compared import FILES, Runs, falling, write_lines

DONE = {"status": "finished", "max_steps": 30}


def losses(*values, metric="eval_loss"):
    return [{"step": 10 * at, metric: value} for at, value in enumerate(values, start=1)]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    found = Runs(tmp_path)
    monkeypatch.chdir(found.project)
    return found


def compared(runs, **choice):
    opened, findings = open_all([str(runs.folder)])
    return Comparison(opened, **choice), findings


def rows(found):
    return {row.name: [value and (value.text, value.place) for value in row.values] for row in found}


def test_values_that_differ_have_the_template_and_the_line_of_each_run(runs):
    runs.add(lines=losses(3.0))
    runs.add(lines=losses(2.0), overrides=[("args.learning_rate", "0.5")])
    runs.add("deep.yaml", lines=losses(1.0))
    base, config = "templates/base.yaml", "templates/configs/deep.yaml"
    found = rows(compared(runs)[0].config)
    assert {
        "args.learning_rate": [("0.01", f"{base}:2"), ("0.5", "--set"), ("0.01", f"{base}:2")],
        "more": [None, None, ("{depth: 3}", f"{config}:3")],
    } == found
    for place in (f"{base}:2", f"{config}:3"):
        file, _, line = place.partition(":")
        text = (runs.project / file).read_text().splitlines()[int(line) - 1]
        assert "learning_rate:" in text or "depth: 3" in text


def test_an_option_of_the_config_is_named_as_what_set_the_value(runs):
    runs.add(lines=losses(3.0))
    runs.add(lines=losses(2.0), variables={"rate": 0.5})
    (values,) = rows(compared(runs)[0].config).values()
    assert ("0.5", "variable rate") == values[1]


def test_a_value_inside_of_what_a_run_lacks_is_not_the_value_of_the_first_run(runs):
    runs.add("deep.yaml", lines=losses(3.0))
    runs.add("deep.yaml", lines=losses(2.0), overrides=[("more.depth", "4")])
    runs.add(lines=losses(1.0))
    found = rows(compared(runs)[0].config)
    assert ["3", "4", None] == [value and value[0] for value in found["more.depth"]]


def test_the_best_run_is_that_with_the_lowest_loss_at_any_step(runs):
    runs.add(lines=losses(3.0, 1.0, 2.0), summary=DONE)
    runs.add(lines=losses(3.0, 2.0, 1.5), overrides=[("args.learning_rate", "0.5")], summary=DONE)
    comparison, _ = compared(runs)
    verdict = verdict_of(comparison)
    assert "learning_rate 0.01" == verdict.winner
    assert "eval_loss 1 at step 20, 0.5 (33 %) lower than learning_rate 0.5." == verdict.result
    (reason,) = verdict.reasons
    assert ("args.learning_rate", "0.01", "0.5", "--set") == (
        reason.name,
        reason.value,
        reason.other,
        reason.other_place,
    )
    reverse = Comparison(comparison.runs, best="max")
    assert (0, 1) == (comparison.ranking[0], Comparison(comparison.runs, metric="eval_loss", best="min").ranking[1])
    assert 3.0 == reverse.chosen_best(reverse.ranking[0])[0]


@pytest.mark.parametrize("bad", ["nan", "-inf", "inf"])
def test_a_value_that_is_not_finite_is_never_the_best(runs, bad):
    runs.add(lines=losses(2.0, bad))
    runs.add(lines=losses(3.0), overrides=[("args.batch", "16")])
    runs.add(lines=losses(bad, bad), overrides=[("args.batch", "32")])
    for best in ("min", "max"):
        comparison, _ = compared(runs, best=best)
        assert {2.0, 3.0} == {comparison.chosen_best(at)[0] for at in comparison.ranking[:2]}
        assert (2, None) == (comparison.ranking[2], comparison.chosen_best(2))
    notes = " ".join(verdict_of(comparison).notes)
    assert "Without a finite value of eval_loss: batch 32." in notes
    assert "not finite: batch 8, batch 32." in notes


def seeded(runs, values, **options):
    for seed, value in enumerate(values):
        runs.add(lines=losses(value), overrides=[("args.seed", str(seed)), *options.get("overrides", ())])


def test_runs_that_differ_in_seeds_alone_are_one_group_with_mean_and_deviation(runs):
    seeded(runs, [2.0, 2.1, 2.3])
    seeded(runs, [1.0, 1.2], overrides=[("args.learning_rate", "0.5")])
    comparison, _ = compared(runs)
    first, second = comparison.groups
    assert ("learning_rate 0.5", (3, 4), fmean([1.0, 1.2])) == (first.label, first.runs, first.mean)
    assert ((0, 1, 2), pytest.approx(stdev([2.0, 2.1, 2.3]))) == (second.runs, second.deviation)
    assert "(mean of 2 seeds)" in verdict_of(comparison).result
    assert "by chance" not in verdict_of(comparison).result
    assert not any(note.startswith("Each config ran once") for note in verdict_of(comparison).notes)


def test_a_difference_within_the_spread_of_seeds_is_said_to_be_chance(runs):
    seeded(runs, [2.0, 3.0])
    seeded(runs, [1.9, 2.9], overrides=[("args.learning_rate", "0.5")])
    assert "The seeds spread by more than this, so it may be chance." in verdict_of(compared(runs)[0]).result


def test_the_best_single_run_is_named_if_it_is_not_of_the_best_group(runs):
    seeded(runs, [0.5, 3.5])
    seeded(runs, [1.0, 1.2], overrides=[("args.learning_rate", "0.5")])
    assert any(note.startswith("The best single run is ") for note in verdict_of(compared(runs)[0]).notes)


def test_runs_with_other_code_or_versions_are_no_group(runs):
    seeded(runs, [2.0])
    (runs.project / "app.py").write_text(FILES["app.py"] + "    depth = 2\n")
    seeded(runs, [1.0])
    comparison, _ = compared(runs)
    assert 2 == len(comparison.groups)
    assert "The configs are the same. What differs: the code." == verdict_of(comparison).cause
    (row,) = comparison.facts
    assert ("code", "app.py", ["version 1", "version 2"]) == (row.kind, row.name, [value.text for value in row.values])
    ((version, lines),) = file_changes(row)
    assert ("version 2", True) == (version, "+    depth = 2" in lines)


def test_texts_that_are_shortened_to_the_same_are_not_the_same_group(runs):
    long = "x" * 300
    runs.add(lines=losses(2.0), overrides=[("args.schedule", f"{long}a{long}")])
    runs.add(lines=losses(1.0), overrides=[("args.schedule", f"{long}b{long}")])
    runs.add(lines=losses(1.0), overrides=[("args.schedule", f"[{long}, 1, {long}, 2]")])
    runs.add(lines=losses(1.0), overrides=[("args.schedule", f"[{long}, 1, {long}, 3]")])
    assert 4 == len(compared(runs)[0].groups)


def test_differences_of_versions_data_and_hardware_are_found(runs):
    first, second = runs.add(lines=losses(2.0)), runs.add(lines=losses(1.0))
    facts = json.loads((second / "run.json").read_text())
    facts["versions"]["torch"], facts["hostname"], facts["processors"]["count"] = "9.9", "other", 77
    data = {"named": "rows.jsonl", "at": "x", "files": {"/rows.jsonl": {"size": 5, "mtime_ns": 1, "digest": "aa"}}}
    facts["data"] = [data]
    (second / "run.json").write_text(json.dumps(facts))
    ours = json.loads((first / "run.json").read_text())
    ours["data"] = [{**data, "files": {"/elsewhere/rows.jsonl": {"size": 5, "mtime_ns": 2, "digest": "bb"}}}]
    (first / "run.json").write_text(json.dumps(ours))
    comparison, _ = compared(runs)
    names = {(row.kind, row.name) for row in comparison.facts}
    assert {("version", "torch"), ("data", "rows.jsonl"), ("hardware", "machine"), ("hardware", "processors")} == names
    assert 2 == len(comparison.groups)


def test_labels_say_what_differs_and_are_unique(runs):
    for _ in range(2):
        runs.add(lines=losses(2.0))
    runs.add(lines=losses(2.0), overrides=[("args.batch", "16")])
    runs.add("deep.yaml", lines=losses(1.0))
    labels = compared(runs)[0].labels
    assert 4 == len(set(labels))
    assert ("plain · 20260101T120000Z", "plain · batch 16", "deep") == (labels[0], labels[2], labels[3])


def test_the_value_that_explains_most_is_named_with_its_means(runs):
    for rate, center in (("0.1", 1.0), ("0.2", 2.0)):
        for batch, more in (("8", 0.0), ("16", 0.1), ("32", 0.2)):
            overrides = [("args.learning_rate", rate), ("args.batch", batch)]
            runs.add(lines=losses(center + more), overrides=overrides)
    comparison, _ = compared(runs)
    text = verdict_of(comparison).influence
    values = [comparison.chosen_best(at)[0] for at in range(6)]
    total = sum((value - fmean(values)) ** 2 for value in values)
    share = 6 * 0.5**2 / total
    assert f"args.learning_rate matters most ({100 * share:.0f} % of the variance)" in text
    assert "on average 1.1 with 0.1 (3 runs), 2.1 with 0.2 (3 runs)." in text
    assert "args.learning_rate" == verdict_of(comparison).main_setting


def test_the_largest_numbers_of_floats_are_compared_as_any_others(runs):
    for rate, loss in (("0.1", 1e308), ("0.2", -1.7e308)):
        seeded(runs, [loss, loss], overrides=[("args.learning_rate", rate)])
    comparison, _ = compared(runs)
    assert [-1.7e308, 1e308] == [group.mean for group in comparison.groups]
    assert "learning_rate matters most (100 %" in verdict_of(comparison).influence


def test_nothing_is_explained_by_a_value_that_each_run_has_alone(runs):
    for rate in ("0.1", "0.2", "0.3"):
        runs.add(lines=losses(float(rate)), overrides=[("args.learning_rate", rate)])
    assert "" == verdict_of(compared(runs)[0]).influence


def test_equal_values_are_a_tie(runs):
    runs.add(lines=losses(2.0))
    runs.add(lines=losses(2.0), overrides=[("args.batch", "16")])
    assert "the same as" in verdict_of(compared(runs)[0]).result


def test_one_metric_in_half_of_the_runs_is_none_in_common(runs):
    runs.add(lines=losses(2.0, metric="a_loss"))
    runs.add(lines=losses(2.0, metric="b_loss"), overrides=[("args.batch", "16")])
    comparison, _ = compared(runs)
    assert (None, ["FG544"]) == (comparison.choice, [note.code for note in comparison.notes])
    assert "" == verdict_of(comparison).winner
    assert "args.batch" in "\n".join(line.text for line in comparison_lines(comparison, None))


def refusal(*words):
    with pytest.raises(ForgatherError) as caught:
        open_all(list(map(str, words)))
    return caught.value


def test_fewer_than_two_runs_are_refused(runs, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    assert ("FG540", "there is no run at or below") == (refusal(empty).code, refusal(empty).message[:27])
    one = runs.add(lines=losses(1.0))
    for words in ([one], [one, one], [runs.folder], [one, f"{one}/"]):
        error = refusal(*words)
        assert ("FG540", True) == (error.code, "only the run" in error.message and "report.html" in error.hint)


def test_a_folder_that_is_no_run_is_refused_with_runs_nearby(runs):
    run = runs.add(lines=losses(1.0))
    error = refusal(run, runs.folder / "typo")
    assert ("FG437", True) == (error.code, run.name in error.hint)


@pytest.mark.parametrize("damage", ["run.json", "graph.yaml", "metrics.jsonl"])
def test_a_damaged_run_is_refused_if_it_was_named_and_left_out_below_a_folder(runs, damage):
    for _ in range(2):
        runs.add(lines=losses(1.0))
    broken = runs.add(lines=losses(1.0))
    (broken / damage).unlink()
    if damage == "metrics.jsonl":
        (broken / damage).mkdir()
    else:
        (broken / damage).write_text("{[")
    assert refusal(runs.folder / "20260101T120000Z-plain", broken).code in ("FG438", "FG543")
    comparison, findings = compared(runs)
    assert (2, True) == (len(comparison.runs), "left out" in findings[0].message)


def test_the_reason_is_said_if_too_few_runs_can_be_read(runs):
    runs.add(lines=losses(1.0))
    (runs.add(lines=losses(1.0)) / "run.json").write_text("{[")
    error = refusal(runs.folder)
    assert ("FG540", True) == (error.code, "1 cannot be read: [FG438] the record of the run" in error.message), error


def test_damaged_lines_are_a_finding_that_names_the_first_line(runs):
    runs.add(lines=losses(1.0))
    runs.add(lines=[*losses(1.0), "{torn", *losses(2.0)])
    _, findings = compared(runs)
    assert [("FG542", 2)] == [(finding.code, finding.span.line) for finding in findings]


def test_run_folders_are_left_as_they_are_and_may_be_moved(runs, tmp_path):
    runs.add(lines=losses(1.0))
    runs.add(lines=losses(2.0), overrides=[("args.batch", "16")])
    before = sorted((str(file), file.read_bytes()) for file in runs.folder.rglob("*") if file.is_file())
    first = comparison_facts(compared(runs)[0])
    assert before == sorted((str(file), file.read_bytes()) for file in runs.folder.rglob("*") if file.is_file())
    moved = tmp_path / "moved"
    shutil.move(runs.folder, moved)
    opened, _ = open_all([str(moved)])
    assert first["differences"][0]["name"] == comparison_facts(Comparison(opened))["differences"][0]["name"]


def test_a_run_that_goes_on_is_compared_by_what_it_has_logged(runs):
    first = runs.add(lines=falling(40, end=1.0))
    runs.add(lines=falling(80, end=2.0), overrides=[("args.batch", "16")])
    assert 40 == compared(runs)[0].runs[0].last_step
    write_lines(first / "metrics.jsonl", falling(60, end=1.0))
    comparison, _ = compared(runs)
    assert (60, "did not finish") == (comparison.runs[0].last_step, comparison.runs[0].status)
    assert any("end at different steps, from 60 to 80" in note for note in verdict_of(comparison).notes)


def test_a_run_that_got_worse_after_its_best_step_is_said_to_have(runs):
    runs.add(lines=losses(1.0, 1.5))
    runs.add(lines=losses(2.0), overrides=[("args.batch", "16")])
    notes = " ".join(verdict_of(compared(runs)[0]).notes)
    assert "batch 8 was best at step 10; at its end, at step 20, eval_loss is 1.5." in notes
    assert "Each config ran once: how much of a difference is chance" in notes
    seeded(runs, [0.5], overrides=[("args.batch", "16")])
    notes = " ".join(verdict_of(compared(runs)[0]).notes)
    assert "at its end" not in notes and "Each config" not in notes


def test_code_whose_copies_are_equal_because_secrets_were_hidden_differs(runs):
    for secret in ("Zq81kX0pLw", "Rt55mN2vBc"):
        (runs.project / "app.py").write_text(FILES["app.py"] + f'PASSWORD = "{secret}"\n')
        run = runs.add(lines=losses(1.0))
        assert secret not in (run / "templates/project/app.py").read_text()
    assert [("code", "app.py")] == [(row.kind, row.name) for row in compared(runs)[0].facts]


TRAINED = {
    "app.py": "def Settings(**kwargs):\n    return kwargs\ndef Trainer(args):\n    return args\n",
    "templates/configs/plain.yaml": """\
args: &args !singleton:app.py:Settings
  learning_rate: 0.01
  resume_from_checkpoint: ~
main: !singleton:app.py:Trainer
  kwargs: {args: *args}
""",
}
RESUMED = ("args.resume_from_checkpoint", "auto")


@pytest.fixture
def attempts(tmp_path, monkeypatch):
    """A run that was killed, changed before that, and resumed; and one that was not resumed."""
    runs = Runs(tmp_path, TRAINED)
    monkeypatch.chdir(runs.project)
    killed = runs.add(lines=losses(3.0), summary={"status": "running", "max_steps": 30})
    change = Intervention(step=13, action=Action.SET, name="learning_rate", value=0.002, factor=0.2)
    record(str(killed), [change])
    runs.add(lines=losses(3.0, 2.0, 1.0), summary=DONE, overrides=[RESUMED])
    runs.add(lines=losses(3.5, 2.5, 1.5), summary=DONE, overrides=[("args.learning_rate", "0.5")])
    return runs, killed


def test_a_run_that_was_resumed_is_one_run_with_its_attempts(attempts):
    runs, _ = attempts
    found, _ = compared(runs)
    assert ["learning_rate 0.01", "learning_rate 0.5"] == [group.label for group in found.groups]
    assert ["args.learning_rate"] == [row.name for row in found.settings]
    said = verdict_of(found).notes
    assert "1 attempt that did not finish is part of the run that resumed after it." in said
    assert not any(note.startswith("Not finished") for note in said)
    # What was changed in an attempt has an effect on the run that went on from its checkpoint.
    changed = "learning_rate 0.01 (learning_rate set to 0.002 after step 13)"
    assert f"Changed by hand while they ran: {changed}. Their configs do not say so." in said
    facts = next(run for run in comparison_facts(found)["runs"] if run["attempts"])
    assert (1, ["learning_rate set to 0.002 after step 13"]) == (len(facts["attempts"]), facts["interventions"])


def test_an_attempt_that_is_named_or_that_nothing_resumed_is_compared(attempts):
    runs, killed = attempts
    opened, _ = open_all([str(killed), str(runs.folder)])
    assert 3 == len(opened)
    # Without the attempt, nothing explains where the run began.
    assert "args.resume_from_checkpoint" in {row.name for row in Comparison(opened).settings}
    last = runs.add(lines=losses(3.0, 2.0), summary={"status": "failed", "max_steps": 30})
    runs.add(lines=losses(3.0, 2.0, 1.1), summary=DONE)
    assert str(last) in {run.run.folder for run in compared(runs)[0].runs}
    # Of a trial, the last run counts, also if it has begun again.
    other = runs.project / "other" / "runs" / killed.name
    shutil.copytree(killed, other)
    trials, _ = open_all([str(runs.folder), str(other.parent)], are_trials=True)
    assert [(killed.name, 0), (max(runs.folder.iterdir()).name, 4)] == [(run.name, len(run.earlier)) for run in trials]


def test_a_run_whose_changes_cannot_be_read_is_left_out_by_name(attempts):
    runs, killed = attempts
    (killed / "interventions.jsonl").write_text("{}\n")
    found, findings = compared(runs)
    assert (2, ["FG518"]) == (len(found.runs), [one.code for one in findings])
    with pytest.raises(ForgatherError, match="interventions"):
        open_all([str(killed), str(runs.folder)])
