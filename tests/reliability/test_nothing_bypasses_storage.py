"""What the system was asked to change below an output folder is what the storage was asked: nothing goes past it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.workbench import ROOT

CALLS = "open,openat,openat2,creat,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir"
CALLS += ",link,linkat,symlink,symlinkat,truncate,mknod,mknodat"
SCRIPT = """\
import json, pathlib, sys
from forgather.ml import Trainer, TrainingArguments
from tests.ml.fixtures import tiny_llama
from tests.reliability import faults, job

out, notes, kinds = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
out.mkdir()
storage = faults.Faulty()
for kind in kinds:
    job.trainer(out / kind, kind, storage).train()
    job.trainer(out / kind, kind, storage).train()  # anew: it replaces checkpoints
args = TrainingArguments(str(out / "exported"), use_cpu=True, report_to="none")
Trainer(tiny_llama(), args, storage=storage).save_model()
notes.write_text(json.dumps([(name, str(file)) for name, file in storage.operations]))
"""
_CALL = re.compile(r"\d+\s+(\w+)\((.*)")
_PATH = re.compile(r'(?:(?:AT_FDCWD|\d+)<([^>]*)>, )?"((?:[^"\\]|\\.)*)"')
_CHANGES = ("O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND")
_ANNOUNCED = {"remove_file": "remove", "remove_folder": "remove"}


@pytest.mark.matrix
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed (apt-get install strace)")
def test_every_change_below_the_output_folder_was_asked_of_the_storage(tmp_path):
    out, notes, log = tmp_path / "out", tmp_path / "notes.json", tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = ["strace", "-f", "--seccomp-bpf", "-q", "-y", "-e", f"trace={CALLS}", "-o", str(log)]
    command = [*words, sys.executable, "-c", SCRIPT, str(out), str(notes), "retention", "asynchronous"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    if "ptrace" in done.stderr and not notes.exists():
        pytest.skip(f"this machine lets nobody trace: {done.stderr.strip()[:100]}")
    assert 0 == done.returncode, done.stderr[-3000:]
    announced = {(_ANNOUNCED.get(name, name), file) for name, file in json.loads(notes.read_text())}
    found = [change for change in changes(log.read_text(errors="replace")) if lies_below(change[1], out)]
    assert len(found) > 100
    assert [] == sorted({change for change in found if change not in announced})
    assert {"create", "make_folder", "rename", "remove"} == {name for name, _ in found}


def changes(log):
    """Yields (act, path) of each call that changes files or names, as a storage would call them."""
    for line in log.splitlines():
        match = _CALL.match(line)
        if match is None:
            continue
        call, words = match.groups()
        paths = [os.path.join(folder, name) for folder, name in _PATH.findall(words)]
        if call.startswith(("open", "creat")):
            if call == "creat" or any(flag in words for flag in _CHANGES):
                yield "create", paths[0]
        elif call.startswith("rename"):
            yield "rename", paths[1]
        elif call.startswith("mkdir"):
            yield "make_folder", paths[0]
        elif call in ("unlink", "unlinkat", "rmdir"):
            yield "remove", paths[0]
        else:
            yield call, paths[-1]


def lies_below(path, folder):
    return Path(path).is_relative_to(folder) and Path(path) != folder


def test_the_reader_of_the_log_sees_every_form_of_a_call():
    log = """\
1 openat(AT_FDCWD</w>, "a/b.json", O_WRONLY|O_CREAT|O_CLOEXEC, 0666) = 3</w/a/b.json>
1 openat(AT_FDCWD</w>, "/w/read.json", O_RDONLY|O_CLOEXEC) = 3</w/read.json>
2 unlinkat(5</w/old>, "c", 0 <unfinished ...>
1 renameat2(AT_FDCWD</w>, "/w/x", AT_FDCWD</w>, "/w/y", RENAME_NOREPLACE) = 0
1 mkdir("/w/new", 0777) = 0
2 <... unlinkat resumed>) = 0
"""
    expected = [("create", "/w/a/b.json"), ("remove", "/w/old/c"), ("rename", "/w/y"), ("make_folder", "/w/new")]
    assert expected == list(changes(log))
