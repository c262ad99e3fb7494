"""Static commands never run what a project names (guarantees S1 and S10)."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.matrix import thinned
from tests.patience import patience
from tests.project.workbench import make_project

COMMANDS = {
    "ls": ["ls"],
    "pp": ["pp"],
    "pp --map": ["pp", "--map", "--json"],
    "pp --set": ["pp", "--set", "main.x=1"],
    "pp --annotate": ["pp", "--annotate", "--set", "main.x=1"],
    "blame": ["blame"],
    "blame a value": ["blame", "main.x", "**.names", "-v", "--steps", "3", "--set", "main.x=1"],
    "graph": ["graph"],
    "graph yaml": ["graph", "--format", "yaml"],
    "graph html": ["graph", "--format", "html", "--set", "main.x=1"],
    "graph mermaid": ["graph", "--format", "mermaid"],
    "graph dot": ["graph", "--format", "dot"],
    "graph json": ["graph", "--format", "json", "--set", "main.x=1", "--steps", "3"],
    "targets": ["targets", "--steps", "3"],
    "trefs": ["trefs"],
    "tlist": ["tlist"],
    "diff": ["diff", "evil", "evil"],
    "diff of revisions": ["diff", "evil@HEAD", "@HEAD"],
    "golden": ["golden", "evil"],
    "check": ["check", "-v"],
    "check --all": ["check", "--all", "--json"],
    "code": ["-t", "plain", "code", "--steps", "3"],
    "code, proven": ["-t", "plain", "code", "main", "meta", "--verify", "--set", "main.x=1"],
}
NAMES = (
    "ls",
    "pp",
    "blame",
    "code",
    "graph",
    "targets",
    "trefs",
    "tlist",
    "diff",
    "golden",
    "check",
    "construct",
    "train",
    "rerun",
    "ckpt",
    "new",
    "explain",
)
CANARY = "import pathlib; pathlib.Path(__file__).with_name('CANARY').write_text('ran')\ndef touch(*a, **k): pass\n"
EVIL = """\
-- extends 'base.yaml'
[body]
dynamic_args:
  - {names: --steps, type: int, help: "{{ 1 + 1 }}"}
main: !call:evil_mod:touch
  x: {{ steps | default(0) }}
  file: !singleton:canary.py:touch
  system: !call:os:system ["touch CANARY"]
  layer: !factory:torch:nn.Linear [1, 2]
  partial: !partial:torch.py:touch [!call:transformers:pipeline [x]]
  env: !env HOME
  meta: !meta:evil_mod:touch [1]
  calc: !calc "1 + 1"
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    files = {
        "templates/configs/evil.yaml": EVIL,
        "templates/configs/plain.yaml": EVIL.replace("  meta: !meta:evil_mod:touch [1]\n", ""),
        "templates/base.yaml": "-- block body\n-- endblock body\nmeta:\n  config_name: !call:evil_mod:touch\n",
        "templates/configs/args.yaml": "dynamic_args:\n  - {names: --a, type: !call:evil_mod:touch }\nmain: 1\n",
        "templates/configs/escape.yaml": "main: {{ ''.__class__.__mro__[1].__subclasses__() }}\n",
        "templates/configs/cycler.yaml": "main: {{ cycler.__init__.__globals__.os.system('touch CANARY') }}\n",
    }
    files["templates/configs/local.yaml"] = f"meta: {{output_dir: {folder}-out}}\nmain: !partial:builtins:int [0]\n"
    for name in ("evil_mod", "canary", "torch", "transformers", "json_", "conftest", "setup"):
        files[f"{name}.py"] = CANARY
    files["templates/canary.py"] = files["templates/configs/evil.py"] = CANARY
    files[".gitattributes"] = "* filter=evil diff=evil\n"
    make_project(folder, files, meta="name: Hostile\nsystem_path: .\ndefault_config: evil\n")
    return commit(folder)


def commit(folder):
    """Makes the project a repository that would run programs on a checkout, and returns it."""
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    touch = f"touch {folder}/CANARY"
    for key in ("filter.evil.smudge", "filter.evil.process", "diff.evil.textconv", "core.fsmonitor", "core.pager"):
        subprocess.run([*git, "config", key, touch], check=True)
    hooks = [folder / ".git/hooks" / name for name in ("post-checkout", "post-index-change", "reference-transaction")]
    for hook in hooks:
        hook.write_text(f"#!/bin/sh\n{touch}\n")
        hook.chmod(0o755)
    return folder


HOSTILE = Path(__file__).with_name("hostile.py")


def run(project, arguments, home, **env):
    """Runs a command under the hook, in a fork: `torch` and the others are not imported there."""
    words = [f"{home}{os.pathsep}", *arguments]
    return audited(run_forked(words, project, {**surroundings(project, home), **env}, HOSTILE))


def run_apart(project, arguments, home, **env):
    """Runs a command under the hook, in a process that begins with this: for what imports at its start."""
    done = subprocess.run(
        [sys.executable, "-B", str(HOSTILE), f"{home}{os.pathsep}", *arguments],
        cwd=project,
        env={**os.environ, **surroundings(project, home), **env},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    return audited(done)


def surroundings(project, home):
    return {"XDG_CACHE_HOME": str(home), "HOME": str(home), "PYTHONPATH": str(project)}


def audited(done):
    lines = [line for line in done.stderr.split("\n") if line.startswith("AUDIT ")]
    assert lines, done.stderr
    return json.loads(lines[-1][6:]), done


def contents(folder):
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def assert_harmless(audit, project):
    assert {"found": [], "loaded": []} == {"found": audit["found"], "loaded": audit["loaded"]}
    assert [] == [str(file) for file in project.rglob("CANARY")]


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_static_command_runs_nothing_that_the_project_names(project, tmp_path, command):
    before = contents(project)
    audit, done = run(project, command, tmp_path)

    assert_harmless(audit, project)
    assert before == contents(project)
    assert {"forgather"} >= {entry.name for entry in tmp_path.iterdir()}, "more than the private cache"
    assert (1 if command[0] in ("ls", "golden", "check") else 0) == audit["status"], done.stderr


@pytest.mark.parametrize("config", ["args", "escape", "cycler"])
@pytest.mark.parametrize("command", ["pp", "graph"])
def test_a_config_that_tries_to_get_out_is_refused_or_printed(project, tmp_path, config, command):
    audit, _ = run(project, ["-t", config, command], tmp_path)

    assert_harmless(audit, project)
    # A wrong declaration is told by a warning: it stops `check`, and whatever uses the option.
    assert (0 if config == "args" else 1) == audit["status"]


@pytest.mark.parametrize("command", NAMES)
def test_help_runs_nothing(project, tmp_path, command):
    audit, done = run(project, ["-t", "evil", command, "--help"], tmp_path)

    assert_harmless(audit, project)
    assert 0 == audit["status"], done.stderr
    assert "example" in done.stdout


@pytest.mark.parametrize(
    ("config", "command"),
    thinned(itertools.product(["evil", "args"], NAMES), lambda config, command: config == "evil" or command == "train"),
)
def test_completion_runs_nothing(project, tmp_path, command, config):
    line = f"fgcli -t {config} {command} "
    answer = tmp_path / "answer"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    audit, _ = run_apart(project, [], tmp_path, **environment)

    assert_harmless(audit, project)
    assert 0 == audit["status"]
    assert "--json" in answer.read_text() or command in ("train", "ckpt")


def test_the_private_cache_is_what_is_written(project, tmp_path):
    run(project, ["check"], tmp_path)

    assert {"forgather"} == {entry.name for entry in tmp_path.iterdir()}
    assert 0o700 == (tmp_path / "forgather").stat().st_mode & 0o777


@pytest.mark.parametrize("command", ["pp", "ls", "check", "code"])
def test_with_the_cache_off_nothing_is_written(project, tmp_path, command):
    run(project, ["-t", "plain", command] if command == "code" else [command], tmp_path, FORGATHER_CACHE="off")

    assert [] == list(tmp_path.iterdir())


def test_a_local_run_opens_no_socket(project, tmp_path):
    audit, done = run(project, ["-t", "local", "train"], tmp_path)

    assert 0 == audit["status"], done.stderr
    assert [] == [event for event in audit["found"] if event.startswith("socket.")]


def may_leave_the_network():
    try:
        return 0 == subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode
    except OSError:
        return False


@pytest.mark.skipif(not may_leave_the_network(), reason="this system gives no empty network to a user")
@pytest.mark.parametrize("command", ["ls", "pp", "check", "train"])
def test_it_works_where_there_is_no_network(project, tmp_path, command):
    words = [
        "unshare",
        "-rn",
        sys.executable,
        "-m",
        "forgather",
        *([] if command == "ls" else ["-t", "local"]),
        command,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path)}
    # The user is another one in there.
    environment["FORGATHER_CACHE"] = "off"
    done = subprocess.run(
        words, cwd=project, env=environment, capture_output=True, text=True, timeout=patience(60), check=False
    )

    assert (1 if command == "ls" else 0) == done.returncode, done.stderr


def test_the_hook_sees_what_an_executing_command_does(project, tmp_path):
    audit, _ = run(project, ["-t", "evil", "construct", "main"], tmp_path)
    (project / "CANARY").unlink(missing_ok=True)

    assert any("evil_mod" in event for event in audit["found"]), "the control: construct imports what the config names"
