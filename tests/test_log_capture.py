"""What a test logs is captured from every logger, and from no other test."""

import logging

import _pytest.logging
import pytest

from tests import log_capture

APART = logging.getLogger("tests.apart")
APART.propagate = False


@pytest.mark.parametrize("turn", [1, 2])
def test_what_a_logger_logs_that_does_not_propagate_is_captured_once(caplog, turn):
    new = logging.getLogger(f"tests.apart.{turn}")
    new.warning("of the root of these")
    APART.warning("turn %d", turn)
    assert [record.getMessage() for record in caplog.records] == ["of the root of these", f"turn {turn}"]


def test_a_level_that_a_test_asked_for_ends_with_it(caplog):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("tests.apart_not").debug("said")
    assert caplog.messages == ["said"]


def test_the_level_is_that_of_before():
    assert not logging.getLogger("tests.apart_not").isEnabledFor(logging.DEBUG)


def test_a_pytest_that_attaches_in_another_way_stays_as_it_is(monkeypatch):
    class Other:
        __slots__ = ("handler", "level", "orig_level")

    # pytest itself captures after the test.
    with monkeypatch.context() as patched:
        patched.setattr(log_capture, "catching_logs", Other)
        patched.setattr(_pytest.logging, "catching_logs", Other)
        log_capture.keep_attached()
        assert _pytest.logging.catching_logs is Other
