"""Every test finds Ctrl-C as a terminal leaves it: a shell that starts the suite in the background has it ignored."""

import signal


def pytest_addoption(parser):
    parser.addoption("--all-cells", action="store_true", help="train every cell of the matrix of strategies, and more")
    parser.addoption("--write-results", metavar="FILE", help="write what the cells of the matrix measured as JSON")
    parser.addoption(
        "--full", action="store_true", help="run the full sets of the tests of reliability, and note figures"
    )


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config, items):
    if not config.getoption("all_cells"):
        further = [item for item in items if item.get_closest_marker("matrix")]
        config.hook.pytest_deselected(items=further)
        items[:] = [item for item in items if item not in set(further)]
