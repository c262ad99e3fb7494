"""Switching off what transformers and peft print while they load or save a model."""

from __future__ import annotations

import logging as python_logging
import warnings
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


@contextmanager
def without_peft_warnings() -> Iterator[None]:
    """Context manager without two warnings of peft about what it does itself.

    It asks transformers for an old name, and reports that it handles the transposed layers of GPT-2.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out")
        yield


def _is_no_report(record: python_logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()
