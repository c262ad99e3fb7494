"""Switching off what transformers prints while it loads or saves a model."""

from __future__ import annotations

import logging as python_logging
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Context manager that switches off the progress bars of transformers, which would overwrite those of callbacks."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def without_load_reports() -> Iterator[None]:
    """Context manager without the tables of transformers about weights that a loaded model lacks.

    They are for a model that is used as it was loaded, not for one whose weights are replaced and compared by name.
    """
    logger = python_logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_report)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_report)


def _is_no_report(record: python_logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
