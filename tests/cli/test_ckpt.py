"""`fgcli ckpt`: what there is, whether it is whole, and what is in it; without torch."""

import io
import json
import os
import subprocess
import sys

import pytest

from forgather.cli.main import main
from forgather.ml.trainer.checkpoint_parts import EFFECTS_OF_MISSING
from tests.cli.checkpoint_folders import forge, make_checkpoint, rewrite_manifest

HEAVY = ("torch", "numpy", "transformers", "safetensors", "jinja2", "ruamel")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for step, metric in ((10, 2.5), (20, 2.1), (30, 2.3)):
        make_checkpoint(tmp_path / "out", step, best=10 if step == 10 else 20, metric=metric)
    return tmp_path / "out"


def told(capsys, *arguments):
    status = main(["ckpt", *map(str, arguments)])
    return status, capsys.readouterr()


def facts(capsys, *arguments):
    status, said = told(capsys, *arguments, "--json")
    return status, json.loads(said.out)


def test_the_list_tells_step_run_size_metric_and_what_auto_takes(folder, capsys):
    status, said = told(capsys, "ls", folder)
    lines = said.out.splitlines()
    assert (0, "out") == (status, lines[0])
    assert ["step", "run", "written", "size", "loss", "eval_loss"] == lines[1].split()
    assert ["10", "20", "30"] == [line[1:].split()[0] for line in lines[2:5]]
    assert "2.1000 best" in lines[3]
    assert lines[4].startswith("*") and "takes checkpoint-30" in lines[5]


def test_a_checkpoint_that_is_not_complete_is_listed_with_its_reason(folder, capsys):
    (folder / "checkpoint-30/optimizer.json").unlink()
    status, found = facts(capsys, "ls", folder)
    assert (1, "FG604") == (status, found["checkpoints"][2]["problem"]["code"])
    assert found["resume_auto"].endswith("checkpoint-20")
    assert "! checkpoint-30: [FG604]" in told(capsys, "ls", folder)[1].out


def test_a_model_alone_is_listed_as_such_and_not_promised_to_an_automatic_resume(folder, capsys):
    make_checkpoint(folder, 40, alone=True)
    said = told(capsys, "ls", folder)[1].out
    assert [False, False, False, True] == ["model only" in line for line in said.splitlines()[2:6]]
    parts = [part for part in EFFECTS_OF_MISSING if part != "progress"]
    assert f"unless --allow-missing {','.join(parts)} is given" in said
    assert "takes checkpoint-40" not in said
    found = facts(capsys, "ls", folder)[1]
    assert (None, [False, False, False, True]) == (
        found["resume_auto"],
        [it["model_only"] for it in found["checkpoints"]],
    )


def test_a_loss_of_an_earlier_step_is_listed_with_its_step(folder, capsys):
    assert "logged" not in told(capsys, "ls", folder)[1].out
    make_checkpoint(folder, 40, loss=1.5, loss_step=35)
    said = told(capsys, "ls", folder)[1].out
    assert "1.5000 (35)" in said and "loss is the last one that was logged" in said and 1 == said.count("(35)")
    assert 35 == facts(capsys, "ls", folder)[1]["checkpoints"][3]["loss_step"]
    assert "1.5, the last that was logged, at step 35" in told(capsys, "show", folder / "checkpoint-40")[1].out


def test_numbers_that_are_none_are_passed_over(folder, capsys):
    nonsense = {"global_step": "30", "max_steps": [], "epoch": "x", "log_history": 7}
    forge(folder / "checkpoint-30", "trainer_state.json", json.dumps(nonsense).encode())
    status, found = facts(capsys, "ls", folder)
    assert (0, None) == (status, found["checkpoints"][2]["loss"])


def test_as_many_are_marked_as_the_best_as_the_run_keeps(folder, capsys):
    make_checkpoint(folder, 40, best=20, metric=9.0, top_k=2)
    lines = told(capsys, "ls", folder)[1].out.splitlines()[2:6]
    assert ["2.5000", "2.1000 best", "2.3000 best #2", "9.0000"] == [line.split("  ")[-1] for line in lines]


def test_what_does_not_tell_when_it_was_written_is_listed_after_the_step_before(folder, capsys):
    make_checkpoint(folder, 40)
    (folder / "checkpoint-20/manifest.json").write_text("{")
    (folder / "checkpoint-40/manifest.json").unlink()
    status, found = facts(capsys, "ls", folder)
    assert [10, 20, 30, 40] == [it["step"] for it in found["checkpoints"]]
    assert 1 == status and found["resume_auto"].endswith("checkpoint-30")


def test_another_run_in_the_folder_is_the_newest_whatever_its_steps_and_times(folder, capsys):
    make_checkpoint(folder, 5, run="bbbb")
    os.utime(folder / "checkpoint-5", (1, 1))
    assert facts(capsys, "ls", folder)[1]["resume_auto"].endswith("checkpoint-5")


def test_verify_tells_every_problem_of_every_checkpoint_at_once(folder, capsys):
    assert 0 == told(capsys, "verify", folder)[0]
    flipped = folder / "checkpoint-20/model.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    (folder / "checkpoint-20/optimizer.json").unlink()
    (folder / "checkpoint-20/notes.txt").touch()
    (folder / "checkpoint-20/training_args.json").write_text("{}")
    status, found = facts(capsys, "verify", folder)
    problems = {
        problem["message"].split("'")[1].split("/")[-1]: problem["code"]
        for problem in found["checkpoints"][1]["problems"]
    }
    assert 1 == status
    assert [True, False, True] == [it["intact"] for it in found["checkpoints"]]
    assert {
        "model.safetensors": "FG603", "optimizer.json": "FG604", "training_args.json": "FG603", "notes.txt": "FG673"
    } == problems  # fmt: skip
    said = told(capsys, "verify", folder / "checkpoint-20")[1]
    assert "4 problems" in said.out and "next:" in said.err


def test_swapped_files_are_found(folder, capsys):
    one, two = folder / "checkpoint-10/training_args.json", folder / "checkpoint-10/training_state.json"
    kept = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(kept)
    assert 2 == len(facts(capsys, "verify", folder / "checkpoint-10")[1]["checkpoints"][0]["problems"])


def test_verify_of_a_folder_whose_run_has_saved_nothing_yet_says_so(tmp_path, capsys):
    (tmp_path / "runs/first").mkdir(parents=True)
    for act in ("ls", "verify"):
        status, said = told(capsys, act, tmp_path)
        assert 1 == status and f"error[FG601]: there is no checkpoint in '{tmp_path}'" in said.err


def test_verify_names_what_to_do_with_what_is_bad(folder, capsys):
    (folder / "checkpoint-10/notes.txt").touch()
    assert "next: move the files that are not part" in told(capsys, "verify", folder)[1].err
    (folder / "checkpoint-20/optimizer.json").unlink()
    assert "next: '--resume auto' takes an intact one; to remove the damaged ones: rm -r out/checkpoint-20\n" in (
        told(capsys, "verify", folder)[1].err
    )
    assert "fgcli ckpt verify out\n" in told(capsys, "verify", folder / "checkpoint-20")[1].err.replace(
        str(folder), "out"
    )
    for step in (10, 30):
        (folder / f"checkpoint-{step}/optimizer.json").unlink()
    said = told(capsys, "verify", folder)[1].err
    assert (
        "next: restore one from a copy, or start from the beginning: --resume never" in said
        and "move them away" in said
    )


def test_show_tells_what_is_in_a_checkpoint(folder, capsys):
    make_checkpoint(folder, 40, versions={"forgather": "0.1"}, layout={"world_size": 4, "strategy": "Sharded"})
    status, said = told(capsys, "show", folder)
    assert 0 == status
    assert "the newest of out: checkpoint-40" in said.err
    for text in (
        "40 of 100",
        "world_size 4, strategy Sharded",
        "AdamW: 1 weight at lr 0.01, betas (0.9, 0.95)",
        "epoch 0, batch 40",
    ):
        assert text in said.out
    assert ["weight", "F32", "2x3"] in [line.split() for line in said.out.splitlines()]


def test_show_tells_how_two_checkpoints_differ(folder, capsys):
    said = told(capsys, "show", folder / "checkpoint-10", folder / "checkpoint-20")[1]
    rows = {line.split("  ")[0]: line.split()[-2:] for line in said.out.splitlines()}
    assert (["10", "20"], ["10", "20"]) == (rows["step"], rows["position batch"])
    assert "4 files of the same bytes" in said.out


def test_the_folder_of_a_config_is_its_output_folder(folder, capsys, monkeypatch):
    (folder.parent / "project/templates/configs").mkdir(parents=True)
    (folder.parent / "project/meta.yaml").write_text("name: p\nconfig_prefix: configs\ndefault_config: a.yaml\n")
    config = f"meta:\n  output_dir: {folder}\nmain: !call:builtins:print []\n"
    (folder.parent / "project/templates/configs/a.yaml").write_text(config)
    assert 0 == main(["-p", str(folder.parent / "project"), "-t", "a.yaml", "ckpt", "ls"])
    assert "checkpoint-30" in capsys.readouterr().out
    assert 0 == main(["-p", str(folder.parent / "project"), "ckpt", "ls", str(folder)])


def test_a_config_that_has_saved_nothing_yet_is_told_how_to_save_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "meta.yaml").write_text("name: p\n")
    (tmp_path / "templates/configs").mkdir(parents=True)
    (tmp_path / "templates/configs/a.yaml").write_text("meta:\n  output_dir: out\nmain: !call:builtins:print []\n")
    for act in ("ls", "verify"):
        assert 1 == main(["-t", "a.yaml", "ckpt", act])
        said = capsys.readouterr().err
        assert "error[FG601]: there is no checkpoint in" in said
        assert "this config has saved no checkpoint yet: train it with save_strategy: steps" in said


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["ckpt", "ls", "nowhere"], "FG601"),
        (["ckpt", "ls", "empty"], "FG601"),
        (["ckpt", "ls", "out/checkpoint-10"], "FG674"),
        (["-t", "a.yaml", "ckpt", "ls", "out"], "FG674"),
        (["ckpt", "show", "out", "out", "out"], "FG674"),
        (["ckpt", "verify", "file.pt"], "FG601"),
        (["ckpt", "show", "link"], "FG601"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_one_error_with_the_next_step(folder, capsys, arguments, code):
    (folder.parent / "empty").mkdir()
    (folder.parent / "file.pt").touch()
    (folder.parent / "link").symlink_to("nothing")
    assert 1 == main(arguments)
    said = capsys.readouterr().err
    assert f"error[{code}]" in said and "help:" in said


def test_a_manifest_that_names_a_file_outside_is_not_followed(folder, capsys):
    rewrite_manifest(folder / "checkpoint-10", lambda body: body["files"].update({"../../x": {"bytes": 0, "xxh3": ""}}))
    status, said = told(capsys, "show", folder / "checkpoint-10")
    assert 1 == status and "FG672" in said.err and "'../../x'" in said.err


@pytest.mark.parametrize(("found", "word"), [(3, "a newer"), (1, "an older")])
def test_a_checkpoint_of_another_format_is_named_as_such(folder, capsys, found, word):
    rewrite_manifest(folder / "checkpoint-30", lambda body: body.update(format=found))
    status, said = told(capsys, "show", folder / "checkpoint-30")
    assert 1 == status and f"[FG670]: the checkpoint 'out/checkpoint-30' was written by {word} version" in said.err
    assert facts(capsys, "ls", folder)[1]["resume_auto"].endswith("checkpoint-20")


@pytest.mark.parametrize(
    ("names", "code", "writer"),
    [
        (["trainer_state.json", "optimizer.pt", "model.safetensors"], "FG671", "the Trainer of transformers"),
        (["trainer_state.json", "training_args.bin"], "FG671", "the Trainer of transformers"),
        ([".metadata", "__0_0.distcp"], "FG671", "torch.distributed.checkpoint"),
        (["random_states_0.pkl", "model.safetensors"], "FG671", "accelerator.save_state()"),
        (["latest", "global_step5"], "FG671", "DeepSpeed"),
        (["config.json", "model.safetensors"], "FG671", "is a model"),
        (["config.json", "model.safetensors", "optimizer.safetensors"], "FG602", "has no manifest.json"),
        (["x.txt"], "FG602", "has no manifest.json"),
    ],
)
def test_what_another_program_wrote_is_named_and_not_opened(tmp_path, capsys, names, code, writer):
    folder = tmp_path / "checkpoint-5"
    folder.mkdir()
    for name in names:
        os.mkfifo(folder / name)  # whoever opened one would wait for ever
    status, said = told(capsys, "show", folder)
    assert 1 == status and f"error[{code}]" in said.err and writer in said.err


def left(folder):
    return sorted(
        int(entry.name.rpartition("-")[2]) for entry in folder.iterdir() if entry.name.startswith("checkpoint")
    )


@pytest.mark.parametrize(
    ("asked", "stay"),
    [
        (["--keep-last", "2"], [20, 30, 40]),  # 20 is the best
        (["--keep-last", "1", "--keep-best", "2"], [20, 30, 40]),
        (["--keep-every", "10"], [10, 20, 30, 40]),
        (["--keep-best", "3"], [10, 20, 30, 40]),
        (["--keep-every", "40"], [20, 40]),
    ],
)
def test_prune_removes_what_is_not_asked_for(folder, capsys, asked, stay):
    make_checkpoint(folder, 40, best=20, metric=9.0)
    status, found = facts(capsys, "prune", folder, *asked, "--dry-run")
    assert (0, [10, 20, 30, 40]) == (status, left(folder))
    assert stay == [int(name.rpartition("-")[2]) for name in found["kept"]]
    said = told(capsys, "prune", folder, *asked, "--dry-run")[1].out
    assert 4 - len(stay) == said.count("  goes ") and "newest" in said and "best" in said
    assert 0 == told(capsys, "prune", folder, *asked, "--yes")[0]
    assert stay == left(folder)
    assert [] == [entry.name for entry in folder.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("words", [["ls", ""], ["prune", "", "--keep-last", "1", "--yes"], ["export", "out", ""]])
def test_an_empty_name_is_not_the_working_folder(folder, capsys, monkeypatch, words):
    if words[0] != "export":
        monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as ended:
        main(["ckpt", *words])
    assert 2 == ended.value.code and "'' names no folder" in capsys.readouterr().err
    assert 3 == len(list(folder.glob("checkpoint-*")))


def test_prune_asks_and_removes_nothing_where_nobody_answers(folder, capsys, monkeypatch):
    status, said = told(capsys, "prune", folder, "--keep-last", "1")
    assert (1, [10, 20, 30]) == (status, left(folder))
    assert "error[FG678]: there is no terminal to ask whether 1 checkpoint may be removed" in said.err
    for answer, stay in (("\n", [10, 20, 30]), ("no\n", [10, 20, 30]), ("y\n", [20, 30])):
        answers = io.StringIO(answer)
        answers.isatty = lambda: True
        monkeypatch.setattr("sys.stdin", answers)
        assert 0 == told(capsys, "prune", folder, "--keep-last", "1")[0]
        assert stay == left(folder)


def test_prune_leaves_what_is_broken_or_in_progress_and_never_the_only_good_one(folder, capsys):
    (folder / "checkpoint-30/optimizer.json").unlink()
    draft = folder / f".saving-checkpoint-40-{os.getppid()}"
    draft.mkdir()
    assert 0 == told(capsys, "prune", folder, "--keep-last", "1", "--yes")[0]
    assert [20, 30] == left(folder) and draft.exists()
    assert 0 == told(capsys, "prune", folder, "--keep-last", "1", "--yes")[0]
    assert [20, 30] == left(folder)


def test_prune_reads_what_stays_before_anything_goes(folder, capsys):
    for step in (20, 30):
        weights = folder / f"checkpoint-{step}/model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    status, said = told(capsys, "prune", folder, "--keep-last", "1", "--yes")
    assert (1, [10, 20, 30]) == (status, left(folder))
    assert "FG678" in said.err and "no checkpoint that would remain is intact" in said.err


def test_prune_does_not_guess_which_are_the_best(tmp_path, capsys):
    for step in (10, 20, 30):
        make_checkpoint(tmp_path / "out", step)
    for more in (["--dry-run"], ["--yes"], ["--yes", "--keep-last", "1"]):
        status, said = told(capsys, "prune", tmp_path / "out", "--keep-best", "2", *more)
        assert (1, [10, 20, 30]) == (status, left(tmp_path / "out"))
        assert "error[FG678]: no checkpoint in" in said.err and "metric_for_best_model" in said.err
    assert 0 == told(capsys, "prune", tmp_path / "out", "--keep-last", "2", "--yes")[0]
    assert [20, 30] == left(tmp_path / "out")


def test_the_help_of_prune_promises_no_default(capsys):
    with pytest.raises(SystemExit):
        main(["ckpt", "prune", "--help"])
    assert "default" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--keep-last", "0"], ["--keep-best", "many"]])
def test_prune_needs_to_know_what_stays(folder, capsys, arguments):
    try:
        status = main(["ckpt", "prune", str(folder), "--yes", *arguments])
    except SystemExit as ended:
        status = ended.code
    assert (2 if arguments else 1, [10, 20, 30]) == (status, left(folder))


@pytest.mark.parametrize("action", ["ls", "verify", "show", "prune"])
def test_looking_at_checkpoints_needs_no_torch(folder, action):
    more = ["--keep-last", "1", "--yes"] if action == "prune" else []
    code = (
        f"import sys; from forgather.cli.main import main; main(['ckpt', {action!r}, {str(folder)!r}, *{more}])\n"
        f"print([name for name in sys.modules if name.split('.')[0] in {HEAVY}], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stderr.splitlines()[-1]
