"""Every test finds Ctrl-C as a terminal leaves it: a shell that starts the suite in the background has it ignored."""

import signal


def pytest_configure(config):
    signal.signal(signal.SIGINT, signal.default_int_handler)
