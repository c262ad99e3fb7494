"""Where trials run: groups of devices, jobs of SLURM (stand-ins of its commands), and a queue of commands."""

import errno
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.errors import ProjectError
from forgather.sweeps.journal import Journal, read_history, sweep_lock
from forgather.sweeps.queue import Queue
from forgather.sweeps.slots import Command, dealt_devices, visible_devices
from forgather.sweeps.slurm import SlurmSlots, job_script
from tests.patience import patience
from tests.project.workbench import make_project
from tests.runs.test_sweep import CONFIG, WORK


def test_devices_are_dealt_in_groups_that_no_two_trials_share():
    assert ["0,1", "2,3"] == dealt_devices(["0", "1", "2", "3", "4"], 2, None)
    assert ["a"] == dealt_devices(["a", "b"], 1, 1)
    for visible, each, number in ((["0"], 2, None), (["0", "1"], 1, 3)):
        with pytest.raises(ProjectError) as caught:
            dealt_devices(visible, each, number)
        assert "FG565" == caught.value.code
    assert ["4", "7"] == visible_devices({"CUDA_VISIBLE_DEVICES": "4, 7"}, 2)
    assert ["0", "1"] == visible_devices({}, 2)
    assert [] == visible_devices({"CUDA_VISIBLE_DEVICES": ""}, 0)


# Each stand-in keeps its jobs in a folder: the job is a process, and its state is in a file of its number.
SBATCH = """#!{python}
import os, subprocess, sys
jobs = os.environ["STAND_IN_JOBS"]
if "--version" in sys.argv: print("slurm 24.05"); sys.exit()
if "--partition=none" in sys.argv: sys.exit("sbatch: error: invalid partition specified: none")
number = len(os.listdir(jobs)) + 1
script = sys.argv[-1]
log, name = (next(word.split("=", 1)[1] for word in sys.argv if word.startswith(option))
             for option in ("--output=", "--job-name="))
stdout = open(log.replace("%%", "%"), "ab")
child = subprocess.Popen(["bash", script], stdout=stdout, stderr=subprocess.STDOUT, start_new_session=True)
open(os.path.join(jobs, str(number)), "w").write(f"{{child.pid}} {{name}}")
print(number)
"""
SQUEUE = """#!{python}
import json, os, sys
jobs = os.environ["STAND_IN_JOBS"]
if os.path.exists(f"{{jobs}}.down"): sys.exit("slurm_load_jobs error: Unable to contact slurm controller")
kind, asked = next(word.split("=") for word in sys.argv if word.startswith(("--jobs=", "--name=")))
def facts(number):
    return open(os.path.join(jobs, number)).read().split()
def state(number):
    pid = facts(number)[0]
    try:
        line = open(f"/proc/{{pid}}/stat").read()
    except OSError:
        return "COMPLETED"
    return "COMPLETED" if line.rsplit(")", 1)[1].split()[0] == "Z" else "RUNNING"
known = [one for one in os.listdir(jobs) if (one in asked.split(",") if kind == "--jobs" else facts(one)[1] == asked)]
if kind == "--jobs" and not known: sys.exit("slurm_load_jobs error: Invalid job id specified")
print(json.dumps({{"jobs": [{{"job_id": int(one), "job_state": [state(one)]}} for one in known]}}))
"""
SCANCEL = """#!{python}
import os, signal, sys
pid = int(open(os.path.join(os.environ["STAND_IN_JOBS"], sys.argv[-1])).read().split()[0])
os.killpg(pid, signal.SIGTERM)
"""


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    programs, jobs = tmp_path / "bin", tmp_path / "jobs"
    programs.mkdir()
    jobs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        file = programs / name
        file.write_text(text.format(python=sys.executable))
        file.chmod(file.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN_JOBS", str(jobs))
    return jobs


def waited(slots):
    deadline = time.monotonic() + patience(20)
    while not (found := list(slots.ended())):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_a_job_is_submitted_watched_found_again_and_stopped(slurm, tmp_path):
    slots = SlurmSlots(2, ["--partition=gpu"], str(tmp_path / "scripts"), ask_seconds=0.0)
    handle = slots.start(3, Command(["--version"], str(tmp_path)), str(tmp_path / "log"))
    assert ({"job": 1}, {3}) == (handle, slots.running())
    assert [(3, None)] == waited(slots)
    assert "forgather" in (tmp_path / "log").read_text()
    assert not slots.adopt(3, handle), "it has ended"
    again = SlurmSlots(2, [], str(tmp_path / "scripts"), ask_seconds=0.0)
    assert again.adopt(5, {"job": long_job(tmp_path, "any")})
    again.stop(5)
    assert [(5, None)] == waited(again)
    again.stop(5)
    assert not again.adopt(6, {"job": 99})
    assert not again.adopt(6, None)


def long_job(folder, name):
    """Submits a job that runs for a minute, and returns its number."""
    script = folder / "long.sh"
    script.write_text("#!/bin/bash\nexec sleep 60\n")
    words = ["sbatch", "--parsable", f"--output={folder}/log", f"--job-name={name}", str(script)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)


def test_a_job_goes_on_while_slurm_does_not_answer(slurm, tmp_path):
    slots = SlurmSlots(2, [], str(tmp_path / "scripts"), ask_seconds=0.0)
    job = long_job(tmp_path, "any")
    assert slots.adopt(5, {"job": job})
    down = Path(f"{slurm}.down")
    down.touch()
    # More often than a job that squeue has forgotten may be missing.
    assert [] == [one for _ in range(5) for one in slots.ended()]
    again = SlurmSlots(2, [], str(tmp_path / "scripts"))
    with pytest.raises(ProjectError, match="does not say whether the job of trial 5 still runs") as caught:
        again.adopt(5, {"job": job})
    assert "FG565" == caught.value.code
    down.unlink()
    slots.stop(5)
    assert [(5, None)] == waited(slots)


def test_a_job_whose_number_was_not_recorded_is_found_by_its_name(slurm, tmp_path):
    first, other = (SlurmSlots(2, [], str(tmp_path / name), ask_seconds=0.0) for name in ("scripts", "other sweep"))
    long_job(tmp_path, first._name(5))
    assert not other.adopt(5, None)
    assert not first.adopt(4, None)
    assert first.adopt(5, None)
    first.stop(5)
    assert [(5, None)] == waited(first)


def test_the_log_of_a_job_may_have_any_path(slurm, tmp_path):
    log = tmp_path / "a b %j" / "log"
    log.parent.mkdir()
    slots = SlurmSlots(2, ["--job-name=mine"], str(tmp_path / "scripts"), ask_seconds=0.0)
    slots.start(0, Command(["--version"], str(tmp_path)), str(log))
    waited(slots)
    assert "forgather" in log.read_text()


def test_a_refused_job_is_an_error_of_slurm(slurm, tmp_path, monkeypatch):
    slots = SlurmSlots(1, ["--partition=none"], str(tmp_path))
    with pytest.raises(ProjectError, match="invalid partition"):
        slots.start(0, Command([], str(tmp_path)), str(tmp_path / "log"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProjectError, match="sbatch cannot be called"):
        SlurmSlots(1, [], str(tmp_path))


def test_a_log_may_have_any_name(slurm, tmp_path):
    slots = SlurmSlots(1, [], str(tmp_path / "scripts"), ask_seconds=0.0)
    slots.start(0, Command(["--version"], str(tmp_path)), str(tmp_path / "a b 50%j \udc80\n'x'"))
    waited(slots)
    assert "forgather" in (tmp_path / "a b 50%j \udc80\n'x'").read_text()


@pytest.mark.parametrize(
    "answer", ["echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", "echo {"]
)
def test_a_controller_that_does_not_answer_says_nothing_about_jobs(slurm, tmp_path, answer, monkeypatch):
    slots = SlurmSlots(1, [], str(tmp_path / "scripts"), ask_seconds=0.0)
    slots.start(0, Command(["--version"], str(tmp_path)), str(tmp_path / "log"))
    down = tmp_path / "down"
    down.mkdir()
    (down / "squeue").write_text(f"#!/bin/sh\n{answer}\n")
    (down / "squeue").chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{down}:{os.environ['PATH']}")
        assert [[]] * 9 == [list(slots.ended()) for _ in range(9)]
        # Started again, the trial would run twice.
        with pytest.raises(ProjectError, match="squeue does not say whether the job of trial 0 still runs"):
            slots.adopt(0, {"job": 1})
        (down / "squeue").write_text("#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
        assert not slots.adopt(0, {"job": 1})
    waited(slots)


def test_a_job_without_a_number_is_an_error(slurm, tmp_path, monkeypatch):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/sbatch").write_text("#!/bin/sh\necho welcome\n")
    (tmp_path / "odd/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/odd:{os.environ['PATH']}")
    with pytest.raises(ProjectError, match="sbatch answered 'welcome'"):
        SlurmSlots(1, [], str(tmp_path / "scripts")).start(0, Command([], str(tmp_path)), str(tmp_path / "log"))


def test_a_script_of_a_job_is_valid_and_quotes_its_words(tmp_path):
    text = job_script(Command(["-t", "a b", "train", "--set", "x=$(rm -rf /)"], "/a dir"))
    assert "cd '/a dir'" in text
    assert "'x=$(rm -rf /)'" in text
    file = tmp_path / "job.sh"
    file.write_text(text)
    assert 0 == os.system(f"bash -n {file}")


def test_a_sweep_runs_as_jobs(slurm, tmp_path, monkeypatch, capsys):
    text = CONFIG.format(steps=2, seconds=0.0)
    folder = Path(make_project(tmp_path / "work", {"work.py": WORK, "templates/configs/work.yaml": text}))
    monkeypatch.chdir(folder)
    monkeypatch.setattr("forgather.sweeps.slurm._ASK_SECONDS", 0.1)
    status = main(["-t", "work", "sweep", "--grid", "main.x=1,2", "--slurm=--partition=gpu", "--name", "a", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (0, {"main.x": "2"}, 2) == (status, found["best"]["values"], len(os.listdir(slurm)))


@pytest.fixture
def queue(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    text = CONFIG.format(steps=2, seconds=0.0)
    folder = make_project(tmp_path / "work", {"work.py": WORK, "templates/configs/work.yaml": text})
    monkeypatch.chdir(folder)
    return Path(folder)


def listed(capsys, *words):
    status = main(["queue", *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_a_queue_runs_what_was_added_in_order(queue, capsys, tmp_path):
    train = ["-t", "work", "train"]
    assert 0 == main(["queue", "add", "--", *train, "--set", "meta.output_dir=a"])
    assert 0 == main(["queue", "add", "--", *train, "--set", "main.fails=true", "--set", "meta.output_dir=b"])
    assert 0 == main(["queue", "add", "--", *train, "--set", "meta.output_dir=c"])
    assert 0 == main(["queue", "rm", "2"])
    capsys.readouterr()
    _, waiting = listed(capsys, "ls")
    assert ["waiting", "waiting", "removed"] == [one["state"] for one in waiting["entries"]]
    # The working folder of a command is the one in which it was added.
    os.chdir(tmp_path)
    status, done = listed(capsys, "run", "--slots", "2")
    assert (1, ["finished", "failed", "removed"]) == (status, [one["state"] for one in done["entries"]])
    assert "no such luck" in done["entries"][1]["cause"]
    assert (True, False) == ((queue / "a").exists(), (queue / "c").exists())
    assert (0, []) == (main(["queue", "rm", "0"]) - 1, [])
    assert "was started already" in capsys.readouterr().err


class FullDisk:
    """Places whose first trial runs until it is asked to end, while the second one finds no room on the disk."""

    def __init__(self, *, is_full):
        self.number, self.is_full, self.started, self.asked = 2, is_full, [], []
        self._running = {}

    def start(self, trial, command, log):
        self.started.append(trial)
        self._running[trial] = log
        return trial

    def adopt(self, trial, handle):
        return False

    def running(self):
        return set(self._running)

    def ended(self):
        for trial in [one for one in self._running if one or not self.is_full]:
            log = Path(self._running.pop(trial))
            if self.is_full:
                log.write_text(f"start\nerror: OSError: [Errno 28] {os.strerror(errno.ENOSPC)}\n")
            yield trial, int(self.is_full)

    def stop(self, trial):
        self.asked.append(trial)

    def wind_down(self):
        self.asked += self._running

    def close(self):
        self._running.clear()


def test_a_full_disk_ends_a_sweep_and_loses_no_trial(queue):
    waiting = Queue(str(queue / "q"))
    for _ in range(3):
        waiting.add(["--version"], str(queue))
    full = FullDisk(is_full=True)
    with pytest.raises(
        ProjectError, match="trial 1 ended because the disk is full: error: OSError: .* No space left"
    ) as caught:
        waiting.run(full, lambda sweep: None)
    assert ("FG563", [0, 1], [0]) == (caught.value.code, full.started, full.asked)
    # Trial 0 was running, trial 1 had no room, and trial 2 was not started: all of them are.
    entries = waiting.run(FullDisk(is_full=False), lambda sweep: None)
    assert ["finished"] * 3 == [str(one.outcome) for one in entries]


def test_the_cause_of_a_failure_is_at_the_end_of_a_log_of_any_size(queue):
    class Loud(FullDisk):
        def ended(self):
            for trial, log in [*self._running.items()]:
                del self._running[trial]
                with open(log, "wb") as stream:
                    stream.seek(1 << 33)  # a file with a hole takes no room
                    stream.write(b"\n\xff\nerror[FG100]: no such luck\n  help: none\n")
                yield trial, 1

    waiting = Queue(str(queue / "q"))
    waiting.add(["--version"], str(queue))
    (entry,) = waiting.run(Loud(is_full=False), lambda sweep: None)
    assert "error[FG100]: no such luck" == entry.cause


def test_what_is_added_while_a_queue_runs_is_run(queue):
    waiting = Queue(str(queue / "q"))
    waiting.add(["-t", "work", "train"], str(queue))
    other = Queue(str(queue / "q"))

    class Places:
        """Ends each command at once, and adds another one while the first runs."""

        number, _running, _seen = 1, None, 0

        def start(self, trial, command, log):
            self._running, self._seen = trial, self._seen + 1
            if self._seen == 1:
                other.add(["--version"], str(queue))
            return 1

        def adopt(self, trial, handle):
            return False

        def running(self):
            return set() if self._running is None else {self._running}

        def ended(self):
            if self._running is not None:
                ended, self._running = self._running, None
                yield ended, 0

        def stop(self, trial):
            pass

        def close(self):
            pass

    entries = waiting.run(Places(), lambda sweep: None)
    assert ["finished", "finished"] == [str(one.outcome) for one in entries]
    assert read_history(str(queue / "q")).trials.keys() == {0, 1}


def test_a_command_is_either_started_or_removed_whoever_comes_first(tmp_path):
    waiting = Queue(str(tmp_path))
    for word in "ab":
        waiting.add([word], str(tmp_path))
    runner = Journal.open(str(tmp_path))
    assert runner.started(0, 1, None)
    with pytest.raises(ProjectError, match="entry 0 was started already"):
        waiting.remove([0])
    # The runner has looked at the queue, and has not recorded the start yet.
    assert {0, 1} == runner.history.trials.keys()
    waiting.remove([1])
    assert not runner.started(1, 1, None)
    assert ["removed" if one.skipped else "started" for one in waiting.entries()] == ["started", "removed"]


def test_a_command_whose_folder_is_gone_fails_alone(queue, capsys, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    waiting = Queue(str(queue / "q"))
    waiting.add(["--version"], str(gone))
    waiting.add(["--version"], str(queue))
    gone.rmdir()
    assert 1 == main(["queue", "run", "--queue", "q"])
    assert ["failed", "finished"] == [str(one.outcome) for one in waiting.entries()]
    assert f"its working folder does not exist any more: {gone}" in capsys.readouterr().out


def test_what_is_removed_is_removed_together_or_not_at_all(queue, capsys):
    for _ in range(3):
        main(["queue", "add", "--", "--version"])
    assert 1 == main(["queue", "rm", "0", "7"])
    assert 0 == main(["queue", "rm", "2", "1", "2"])
    assert 1 == main(["queue", "rm", "1"])
    assert "entry 1 is not in the queue" in capsys.readouterr().err
    assert ["waiting", "removed", "removed"] == [one["state"] for one in listed(capsys, "ls")[1]["entries"]]


def test_a_queue_is_run_by_one_process(queue, capsys):
    with sweep_lock(str(queue)):
        assert 1 == main(["queue", "run", "--queue", "."])
    assert "error[FG564]: another process runs the queue in" in capsys.readouterr().err


def test_a_queue_is_read_while_it_is_written(queue, capsys):
    main(["queue", "add", "--", "--version"])
    (file,) = Path(os.environ["XDG_STATE_HOME"]).rglob("trials.jsonl")
    content = file.read_bytes() + b'{"event": "tri'
    file.write_bytes(content)
    capsys.readouterr()
    assert 1 == len(listed(capsys, "ls")[1]["entries"])
    assert content == file.read_bytes()


@pytest.mark.parametrize("left", [b"", b'{"event": "swe'])
def test_a_queue_that_a_full_disk_left_empty_is_begun_again(queue, capsys, left):
    (queue / "q").mkdir()
    (queue / "q/trials.jsonl").write_bytes(left)
    assert [] == listed(capsys, "ls", "--queue", "q")[1]["entries"]
    assert 0 == main(["queue", "add", "--queue", "q", "--", "--version"])
    capsys.readouterr()
    assert 1 == len(listed(capsys, "ls", "--queue", "q")[1]["entries"])


def test_a_command_that_is_damaged_is_refused_by_its_number(queue, capsys):
    main(["queue", "add", "--queue", "q", "--", "train"])
    file = queue / "q/trials.jsonl"
    file.write_text(file.read_text().replace('"train"', '"\'"'))
    assert 1 == main(["queue", "run", "--queue", "q"])
    assert "[FG563]: command 0 of the queue" in capsys.readouterr().err


def test_the_folder_of_a_sweep_is_no_queue(queue, capsys):
    assert 0 == main(["-t", "work", "sweep", "--grid", "main.x=1", "--name", "a"])
    for action in ("ls", "run"):
        assert 1 == main(["queue", action, "--queue", "out/sweeps/a"])
        assert "[FG563]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["add"], ["rm"], ["rn"], ["rm", "7"], ["run", "--slots", "0"], ["run", "2"], ["run", "--", "train"],
     ["ls", "--slots", "2"], ["run", "--queue", "/dev/null"], ["rm", "x"], ["add", "--queue", "/dev/null/a", "--", "ls"]],
)  # fmt: skip
def test_what_has_no_meaning_is_refused(queue, capsys, words):
    assert 1 == main(["queue", *words])
    assert "[FG56" in capsys.readouterr().err
    assert 1 == main(["queue", "add", "--", "-t", "work", "train", "--set", "+main.api_key=s3cr3tvalue99"])
    assert "error[FG531]: the command contains a secret, and the queue would store it" in capsys.readouterr().err
    assert (0, {"folder": str(Path(os.environ["XDG_STATE_HOME"]) / "forgather/queue"), "entries": []}) == listed(
        capsys, "ls"
    )
