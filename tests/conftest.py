"""Every test finds Ctrl-C as a terminal leaves it: a shell that starts the suite in the background has it ignored.

The projects that tests make, and the suite's own, are trusted as a user trusts his own; tests of trust take it away.
"""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.patience import patience

TEST_SECONDS = 300

# Before torch is imported, here and in processes that tests start: threads that wait for one another on a tiny model
# take twice the processor time. Whoever sets another number tests with it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A thousand processes of this suite import the product: where byte code is never written, each compiles it again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What is imported and collected lives as long as the suite: the collector need not look at it again and again.
gc.disable()
gc.set_threshold(10_000, 20, 20)


def pytest_addoption(parser):
    parser.addoption("--all-cells", action="store_true", help="train every cell of the matrix of strategies, and more")
    parser.addoption("--write-results", metavar="FILE", help="write what the cells of the matrix measured as JSON")
    parser.addoption(
        "--full", action="store_true", help="run the full sets of the tests of reliability, and note figures"
    )


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_finish(session):
    gc.enable()


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
        patch.setenv("FORGATHER_TRUST", os.pathsep.join(map(str, folders)))
        yield folders


@pytest.fixture(autouse=True)
def process_group_ends():
    """Ends the process group that a test started in this process: it would be that of every later test and its forks."""
    yield
    group = sys.modules.get("forgather.ml.distributed.group")
    if group is not None:
        group.shutdown()


def pytest_collection_modifyitems(config, items):
    if config.getoption("timeout") is None:
        limit = pytest.mark.timeout(patience(TEST_SECONDS))
        for item in items:
            item.add_marker(limit)
    if not config.getoption("all_cells"):
        further = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=further)
        items[:] = [item for item in items if item not in set(further)]
