"""Every test finds Ctrl-C as a terminal leaves it: a shell that starts the suite in the background has it ignored.

The projects that tests make, and the suite's own, are trusted as a user trusts his own; tests of trust take it away.
"""

import functools
import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.isolation import tmp_path  # noqa: F401
from tests.large_pages import ask_malloc, collapse
from tests.log_capture import keep_attached
from tests.patience import patience

TEST_SECONDS = 300

MARKS = {
    "ml/distributed": "distributed",
    "ml/strategy": "distributed",
    "launch": "distributed",
    "seeds": "distributed",
    "reliability": "reliability",
    "page": "browser",
    "build": "packaging",
}
"""What tests of a folder are marked with, so that `pytest -m "not distributed"` leaves them out."""

FIRST, LAST = (
    ("architecture", "config", "cli"),
    ("codegen", "planner", "project", "projects", "signatures"),
)
"""The folders whose tests run first, because they are fast and find most faults; and those that run last, because their
files are short: two processes that take a file at a time then end at about the same time."""

HERE = Path(__file__).parent
STARTED = pytest.StashKey[float]()

# Before torch is imported, here and in processes that tests start: threads that wait for one another on a tiny model
# take twice the processor time. Whoever sets another number tests with it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A thousand processes of this suite import the product: where byte code is never written, each compiles it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected exists as long as the suite: the collector need not look at it again and again. A
# training of transformers alone asks for four whole collections, which took nine tenths of such a test.
gc.disable()
gc.set_threshold(10_000, 20, 20)
# Garbage of the parent, such as a process group, waits when it is deleted for threads that exist only there: a forked
# process that collects it is aborted or waits for ever.
os.register_at_fork(after_in_child=gc.freeze)


def pytest_addoption(parser):
    parser.addoption("--all-cells", action="store_true", help="train every cell of the matrix of strategies, and more")
    parser.addoption("--write-results", metavar="FILE", help="write what the cells of the matrix measured as JSON")
    parser.addoption(
        "--full", action="store_true", help="run the full sets of the tests of reliability, and note figures"
    )

    parser.addoption("--dearest", type=int, default=0, metavar="N", help="show the N tests that took most CPU time")


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ask_malloc(starts_workers=bool(config.getoption("numprocesses", 0)))
    keep_attached()
    # On a busy machine, drawing a value may take seconds.
    settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("busy")


def pytest_collection_finish(session):
    gc.enable()
    gc.freeze()
    if "PYTEST_XDIST_WORKER" in os.environ:
        collapse()


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Returns the cache folder of this session; what the user keeps and set himself is neither read nor written."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def trusted_folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folders = [tmp_path_factory.getbasetemp(), Path(__file__).parent]
        root = Path(__file__).parents[1]
        # `make test-finetune` installs optional libraries there, and they count as code of the repository.
        if any(Path(entry).is_relative_to(root / "build" / "libs") for entry in sys.path if entry):
            folders.append(root)
        patch.setenv("FORGATHER_TRUST", os.pathsep.join(map(str, folders)))
        yield folders


@pytest.fixture(autouse=True)
def process_group_ends():
    """Ends the process group that a test started in this process: it would be that of every later test and its forks."""
    yield
    group = sys.modules.get("forgather.ml.distributed.group")
    if group is not None:
        group.shutdown()


def cpu_seconds():
    """Returns the CPU time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def seed_random_numbers():
    """Lets each test, and the fixtures that it makes, draw the same numbers in every run and every order of tests."""
    random.seed(0)
    for name, seed in (("numpy.random", "seed"), ("torch", "manual_seed")):
        if name in sys.modules:
            getattr(sys.modules[name], seed)(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_setup(item):
    item.stash[STARTED] = cpu_seconds()
    seed_random_numbers()
    yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_teardown(item, nextitem):
    yield
    # The report of the teardown takes it to the process that prints the summary.
    item.user_properties.append(("cpu_seconds", cpu_seconds() - item.stash[STARTED]))
    if nextitem is None or nextitem.path != item.path:
        # What a file of tests leaves, such as what it imported, stays: whole collections, for which some libraries ask, need
        # not look at it.
        gc.collect()
        gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    count = config.getoption("dearest")
    if not count:
        return
    reports = [report for found in terminalreporter.stats.values() for report in found]
    taken = [
        (dict(report.user_properties)["cpu_seconds"], report.nodeid)
        for report in reports
        if getattr(report, "when", "") == "teardown"
    ]
    whole = sum(seconds for seconds, _ in taken)
    terminalreporter.section(f"CPU time of {len(taken)} tests, their processes included: {whole:.0f} s")
    for seconds, name in sorted(taken, reverse=True)[:count]:
        terminalreporter.line(f"{seconds:7.2f} s  {name}")


def pytest_collection_modifyitems(config, items):
    limit = pytest.mark.timeout(patience(TEST_SECONDS)) if config.getoption("timeout") is None else None
    for item in items:
        for mark in _marks(item.path.parent):
            item.add_marker(mark)
        if limit is not None:
            item.add_marker(limit)
    if not (config.getoption("all_cells") or config.getoption("full")):
        further = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=further)
        dropped = set(further)
        items[:] = [item for item in items if item not in dropped]
    items.sort(key=lambda item: _place(item.path.parent))


@functools.cache
def _marks(folder):
    name = folder.relative_to(HERE).as_posix()
    return [mark for prefix, mark in MARKS.items() if name == prefix or name.startswith(f"{prefix}/")]


@functools.cache
def _place(folder):
    top = [*folder.relative_to(HERE).parts, ""][0]
    return FIRST.index(top) if top in FIRST else len(FIRST) + (top in LAST)
