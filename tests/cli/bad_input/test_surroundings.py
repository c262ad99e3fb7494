"""Bad surroundings: streams that are closed or full, a working folder that is gone, files that are none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forgather.cli.main import main
from tests.patience import patience
from tests.project.workbench import ROOT, fgcli, make_project

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="uses /dev/full, FIFOs and a shell")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    folder = make_project(tmp_path / "bench")
    monkeypatch.chdir(folder)
    return folder


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", command.replace("fgcli", f"{sys.executable} -m forgather")],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


@pytest.mark.parametrize("command", ["pp", "targets", "ls"])
@pytest.mark.parametrize(
    ("stream", "problem"),
    [(">&-", "the standard output is closed"), (">/dev/full", "the standard output cannot be written: No space left")],
)
def test_output_that_goes_nowhere_is_a_failure_that_is_told(bench, command, stream, problem):
    done = shell(f"fgcli {command} {stream}", bench)

    assert 1 == done.returncode
    assert done.stderr.startswith(f"error[FG418]: {problem}")
    assert 2 == done.stderr.count("\n"), done.stderr


@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full"])
def test_a_report_that_nobody_can_read_changes_no_exit_status(bench, stream):
    assert 1 == shell(f"fgcli -t nope pp {stream}", bench).returncode
    assert 0 == shell(f"fgcli pp {stream}", bench).returncode


def test_a_working_folder_that_is_gone_is_told(tmp_path):
    for command in ("ls", "pp", "train --dry-run"):
        done = shell(f"mkdir gone; cd gone; rmdir ../gone; fgcli {command}", tmp_path)

        assert 1 == done.returncode
        assert done.stderr.startswith("error[FG400]: the working folder does not exist any more\n"), done.stderr


def test_modules_of_the_project_do_not_stand_in_for_the_librarys(bench):
    for name in ("json", "argparse", "difflib", "hashlib", "tempfile", "jinja2"):
        (bench / f"{name}.py").write_text("raise SystemExit('shadowed')\n")

    assert [0, 0] == [fgcli(command, cwd=bench).returncode for command in ("pp", "ls")]


def test_a_pipe_in_place_of_a_config_is_refused_at_once(bench, capsys):
    os.mkfifo(bench / "templates/configs/pipe.yaml")

    assert 1 == main(["-t", "pipe", "pp"])
    assert "error[FG115]: the template 'pipe.yaml' cannot be read: it is not a regular file" in capsys.readouterr().err


def test_a_link_that_leads_out_is_refused_and_not_shown(bench, capsys):
    (bench.parent / "secret.txt").write_text("the secret\n")
    (bench / "templates/configs/link.yaml").symlink_to(bench.parent / "secret.txt")

    assert 1 == main(["-t", "link", "pp"])
    report = capsys.readouterr().err
    assert "FG114" in report
    assert "the secret" not in report


def test_a_report_reads_no_more_of_a_file_than_it_shows(bench, capsys):
    with (bench / "templates/configs/sparse.yaml").open("wb") as stream:
        stream.truncate(50_000_000_000)

    assert 1 == main(["-t", "sparse", "pp"])
    assert "FG106" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\0" * 1000])
def test_rubbish_in_the_cache_changes_nothing(bench, capsys, private_folders, content):
    assert 0 == main(["pp"])
    expected = capsys.readouterr().out
    kept = [file for file in (private_folders / "cache").rglob("*") if file.is_file()]
    for file in kept:
        file.write_bytes(content)

    done = fgcli("pp", cwd=bench)

    assert kept
    assert (0, expected, "") == (done.returncode, done.stdout, done.stderr)


def test_a_cache_that_is_a_file_changes_nothing(bench, capsys, monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    assert 0 == main(["pp"])
    assert "" == capsys.readouterr().err


def test_commands_at_the_same_time_do_not_disturb_each_other(bench):
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "forgather", "pp"],
            cwd=bench,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    answers = [process.communicate(timeout=patience(60)) for process in running]

    assert [0] * 6 == [process.returncode for process in running]
    assert 1 == len(set(answers))
    assert "" == answers[0][1]


SECRETS = """\
meta: {output_dir: out}
.login: &login !env {name: ATTACK_LOGIN, default: ~}
parts: &parts
  token: !env ATTACK_LOGIN
  nested: [!call:str [!env ATTACK_LOGIN ], *login]
main: !partial:fractions:Fraction
  numerator: 1
  denominator: !call:len [!env ATTACK_LOGIN ]
"""


def test_a_secret_of_the_environment_is_in_nothing_that_is_written(bench, capsys, monkeypatch, private_folders):
    secret = "s3cr3t-p4ssw0rd"
    monkeypatch.setenv("ATTACK_LOGIN", secret)
    (bench / "templates/configs/secrets.yaml").write_text(SECRETS)
    printed = ""
    for command in (["pp"], ["pp", "--map"], ["graph"], ["graph", "--format", "yaml"], ["graph", "--format", "json"],
                    ["targets"], ["targets", "--json"], ["ls"], ["train", "--dry-run"], ["train"]):  # fmt: skip
        assert 0 == main(["-t", "secrets", *command] if command != ["ls"] else command)
        text = capsys.readouterr()
        printed += text.out + text.err
    written = [file for root in (bench, private_folders) for file in root.rglob("*") if file.is_file()]

    assert any(file.name == "run.json" for file in written)
    assert secret not in printed
    assert [] == [str(file) for file in written if secret.encode() in file.read_bytes()]
