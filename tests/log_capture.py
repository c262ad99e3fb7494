"""pytest's capture of logging, kept attached: pytest 9.2 attaches it to every logger that does not propagate six times a test.

Torch has sixty of these, so that it took a millisecond and a half of each of many thousand tests. Keeps true: what is
logged while a test runs reaches its report and `caplog`, from loggers made since the last test as well.
"""

import logging
from weakref import WeakKeyDictionary

import _pytest.logging
from _pytest.logging import catching_logs

_numbers = WeakKeyDictionary()
"""How many loggers there were when a handler was attached to those that do not propagate."""


class KeptCapture(catching_logs):
    """Attaches to the root for the time of the block, and once and for all to loggers that do not propagate."""

    __slots__ = ()

    def __enter__(self):
        if self.level is not None:
            self.handler.setLevel(self.level)
        root = logging.getLogger()
        root.addHandler(self.handler)
        self.attached_loggers.append(root)
        loggers = root.manager.loggerDict
        if _numbers.get(self.handler) != len(loggers):
            _numbers[self.handler] = len(loggers)
            for logger in loggers.values():
                # A handler that is added again is there once.
                if not getattr(logger, "propagate", True):
                    logger.addHandler(self.handler)
        if self.level is not None:
            self.orig_level = root.level
            root.setLevel(min(self.orig_level, self.level))
        return self.handler


def keep_attached():
    """Lets this session capture logs in this way. Versions of pytest that attach to other loggers stay as they are."""
    if "attached_loggers" in catching_logs.__slots__:
        _pytest.logging.catching_logs = KeptCapture
