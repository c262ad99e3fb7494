"""Page data to one HTML document with nothing outside it.

Takes what `page_data` gives, gives text. Keeps true: the page forbids itself any connection, and no text of a config
can end the script that carries it: every text reaches the page as JSON, and the screen as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
# In this order they make one script; each speaks only of those before it, but for what `main.js` joins.
SCRIPTS = ("model.js", "dom.js", "layout.js", "canvas.js", "objects.js", "templates.js", "text.js", "panel.js",
           "search.js", "notice.js", "main.js")  # fmt: skip
_UNSAFE = re.compile("[<>&\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff]")


def page(data: Mapping[str, Any]) -> str:
    """Returns the HTML document that shows `data`."""
    parts = {
        "title": _escaped(" · ".join(part for part in (data["config"], data["project"]) if part)),
        "style": _read("page.css"),
        "data": embedded(data),
        "script": "\n".join(_read(name) for name in SCRIPTS),
    }
    # One pass: what is put in is never read for marks.
    return re.sub(r"@(title|style|data|script)@", lambda mark: parts[mark[1]], _read("page.html"))


def embedded(data: Mapping[str, Any]) -> str:
    """Returns JSON that may stand in a `<script>` element: it has no `<`, and nothing a browser reads as a line end.

    Example:
        >>> embedded({"text": "</script>"})
        '{"text":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").encode("utf-8", "replace").decode()


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
