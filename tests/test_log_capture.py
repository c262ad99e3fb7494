"""What a test logs is captured from every logger, and from no other test."""

import logging

import pytest

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
