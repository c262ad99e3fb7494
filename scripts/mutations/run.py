#!/usr/bin/env python
"""Shows which mutations of the product the tests detect.

Reads the mutants from the TOML files next to this script. For each mutant it reports a test that fails with it and
passes without it ("killed"), or that there is none ("survived"). The mutants are applied one at a time to a copy of the
working tree, which itself does not change. A mutant whose text does not occur exactly once is refused.
"""

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path(__file__).parent
_NOT_COPIED = (
    ".git",
    ".venv",
    "build",
    "dist",
    "output_models",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
    "*.egg-info",
)
_FAILURE = "FORGATHER_FIRST_FAILURE"


@dataclass(frozen=True)
class Mutant:
    """A defect that the tests must detect.

    Args:
        id: the name of the mutant.
        file: the path of the changed file, relative to the root of the repository.
        old: a text that occurs in the file exactly once.
        new: the text that replaces `old`.
        why: a description of the defect.
        tests: the test files and folders that are run first, in order of increasing cost.
    """

    id: str
    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Returns the text of the file with the change.

        Raises:
            ValueError: if `old` does not occur in the text exactly once, or if the result is not valid Python.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.id}: its text occurs {count} times in {self.file}, and must occur once")
        changed = text.replace(self.old, self.new)
        if self.file.endswith(".py"):
            ast.parse(changed)
        return changed


@dataclass(frozen=True)
class Verdict:
    """The result for a mutant.

    Args:
        id: the name of the mutant.
        killed: whether a test detects the mutant.
        by: the test that detects the mutant, or the tests that were run if none detects it.
        seconds: the time that the tests took, in seconds.
    """

    id: str
    killed: bool
    by: str
    seconds: float


def read_mutants(folder: Path = FOLDER) -> list[Mutant]:
    """Returns the mutants of all TOML files of a folder, in order of file name and position."""
    mutants = []
    for file in sorted(folder.glob("*.toml")):
        for facts in tomllib.loads(file.read_text(encoding="utf-8"))["mutant"]:
            mutants.append(Mutant(**{**facts, "tests": tuple(facts["tests"])}))
    return mutants


def judge(mutant: Mutant, tree: Path, *, whole: bool = False) -> Verdict:
    """Returns the result for a mutant, tested in a copy of the repository, which is restored afterwards.

    Args:
        mutant: the mutant to apply.
        tree: the copy of the repository.
        whole: True to run the whole suite if the tests of the mutant do not detect it.
    """
    file, began = tree / mutant.file, time.monotonic()
    text = file.read_text(encoding="utf-8")
    runs = [list(mutant.tests), *([["-n", "2", "--dist", "loadfile"]] if whole else [])]
    for arguments in runs:
        file.write_text(mutant.applied(text), encoding="utf-8")
        try:
            failed = first_failure(tree, arguments)
        finally:
            file.write_text(text, encoding="utf-8")
        if failed and not first_failure(tree, [failed]):
            return Verdict(mutant.id, True, failed, round(time.monotonic() - began, 1))
        if failed:
            raise RuntimeError(f"{failed} also fails without the mutant, so it cannot detect {mutant.id}")
    ran = "the whole suite" if whole else ", ".join(mutant.tests)
    return Verdict(mutant.id, False, ran, round(time.monotonic() - began, 1))


def first_failure(tree: Path, arguments: list[str]) -> str:
    """Returns the first failing test of a pytest run; "" if all tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        report_file = Path(folder, "failure")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider"]
        paths = os.pathsep.join([str(tree), str(FOLDER)])
        done = subprocess.run(
            [*command, "-p", "first_failure", *arguments],
            cwd=tree,
            # Bytecode of one mutant must not be loaded for the next one.
            env={**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", _FAILURE: str(report_file)},
            capture_output=True,
            text=True,
            check=False,
        )
        if report_file.exists():
            return report_file.read_text(encoding="utf-8")
        if done.returncode:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return ""


def copied(root: Path, into: Path) -> Path:
    """Returns a copy of the repository without generated files."""
    return Path(shutil.copytree(root, into / "tree", ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True))


def main() -> int:
    """Tests the selected mutants, and prints each verdict at once."""
    options = _options()
    mutants = [mutant for mutant in read_mutants() if not options.only or mutant.id in options.only]
    if unknown := set(options.only or ()) - {mutant.id for mutant in mutants}:
        print(f"no such mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    if options.list:
        for mutant in mutants:
            print(f"{mutant.id:40} {mutant.file:50} {mutant.why}")
        return 0
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(ROOT, Path(folder))
        for number, mutant in enumerate(mutants, 1):
            try:
                verdict = judge(mutant, tree, whole=options.whole)
            except RuntimeError as error:
                print(f"{number}/{len(mutants)} {mutant.id}: NOT JUDGED: {error}", flush=True)
                continue
            verdicts.append(verdict)
            what = "killed by" if verdict.killed else "SURVIVED"
            print(f"{number}/{len(mutants)} {verdict.seconds:6.1f} s  {mutant.id}: {what} {verdict.by}", flush=True)
    killed = sum(verdict.killed for verdict in verdicts)
    print(f"{killed} of {len(mutants)} killed")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1), encoding="utf-8")
    return 0 if killed == len(mutants) else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tells which mutations of the product the tests catch.")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutants alone")
    parser.add_argument("--list", action="store_true", help="list the mutants, and run nothing")
    parser.add_argument("--whole", action="store_true", help="run the whole suite where a package's tests see nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON, too")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
