"""Texts of the page: without secrets, and escaped."""

from __future__ import annotations

from html import escape

from forgather.redaction import hide


def html_text(text: str, *, is_document: bool = False) -> str:
    """Returns a text as HTML that shows it; secrets are hidden in the text, so that no tag can be taken for one.

    Args:
        text: any text.
        is_document: whether a user wrote it, as a configuration.
    """
    return escape(hide(text, is_document=is_document))
