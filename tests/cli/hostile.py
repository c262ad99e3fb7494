"""Runs one `fgcli` command under an audit hook, and prints what it did that a static command must not do.

Usage: python hostile.py FOLDER_THAT_MAY_BE_WRITTEN ARGUMENT... (in the project's folder). Completion is asked for
through the environment, as argcomplete does.
"""

import json
import os
import sys

PROJECT = os.getcwd()
WRITABLE = tuple(sys.argv[1].split(os.pathsep))
THEIR_MODULES = {name[:-3] for name in os.listdir(PROJECT) if name.endswith(".py")}
STARTERS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "pty.",
    "ctypes.",
)
CHANGERS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.chmod",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.",
)
# What may be started: Git, to read what a revision holds.
GIT = ("rev-parse", "ls-tree", "cat-file", "for-each-ref")
SAFE = ["-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null", "-C"]
found = []


def reads_git(event, args):
    git = event == "subprocess.Popen" and args[0] == args[1][0] == "git"
    return git and args[1][1:6] == SAFE and args[1][7] in GIT


def theirs(file):
    return isinstance(file, str) and not file.startswith("<") and os.path.abspath(file).startswith(PROJECT + os.sep)


def may_write(path):
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    return not isinstance(path, str) or os.path.abspath(path).startswith((*WRITABLE, os.devnull))


def hook(event, args):
    if event == "import" and args[0].split(".")[0] in THEIR_MODULES | {"torch", "transformers", "numpy"}:
        found.append(f"import {args[0]}")
    elif event == "compile" and theirs(args[1]) and not str(args[1]).endswith(".yaml"):
        found.append(f"compile {args[1]}")
    elif event == "exec" and theirs(args[0].co_filename) and not args[0].co_filename.endswith(".yaml"):
        found.append(f"exec {args[0].co_filename}")
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC) and not may_write(args[0]):
        found.append(f"write {args[0]}")
    elif event.startswith(STARTERS) and not reads_git(event, args):
        found.append(f"{event} {args}")
    elif event.startswith(CHANGERS) and not may_write(args[0]):
        found.append(f"{event} {args}")


def answer(status):
    loaded = sorted({"torch", "transformers", "numpy", "accelerate"} & set(sys.modules))
    # The standard output belongs to the command, and completion ends the process: the answer goes beside.
    sys.stderr.write("\nAUDIT " + json.dumps({"found": found, "loaded": loaded, "status": status}) + "\n")
    sys.stderr.flush()


sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.addaudithook(hook)
if "_ARGCOMPLETE" in os.environ:
    leave = os._exit
    os._exit = lambda status: (answer(status), leave(status))
try:
    from forgather.cli.main import main

    code = main(sys.argv[2:])
except SystemExit as ended:
    code = ended.code
answer(code)
