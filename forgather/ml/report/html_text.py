"""HTML escaping for the texts of the report page, with secrets hidden."""

from __future__ import annotations

from html import escape

from forgather.redaction import hide


def html_text(text: str, *, is_document: bool = False) -> str:
    """Returns a text as escaped HTML in which secrets are hidden.

    Secrets are hidden before the text is escaped, so that HTML is never mistaken for a secret.

    Args:
        text: any text.
        is_document: True if a user wrote the text, such as a config. Nested lines below a name then belong to the name.
    """
    return escape(hide(text, is_document=is_document))
