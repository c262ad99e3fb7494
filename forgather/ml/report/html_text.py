"""HTML escaping for the texts of the report page, with secrets hidden."""

from __future__ import annotations

import re
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


def prose_html(text: str) -> str:
    """Returns a sentence as escaped HTML, in which names between backticks are code.

    Args:
        text: the sentence.

    Example:
        >>> prose_html("set `bf16: true`, if a < b")
        'set <code>bf16: true</code>, if a &lt; b'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", html_text(text))
