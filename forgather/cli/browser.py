"""Opens a page that a command wrote in the user's browser."""

from __future__ import annotations

from pathlib import Path

from forgather.cli.output import print_note


def open_page(file: str) -> None:
    """Shows a page in the user's browser; if there is none, a note names the page.

    Args:
        file: the path of the page.
    """
    # A late import: only `--open` needs it.
    import webbrowser

    if not webbrowser.open(Path(file).absolute().as_uri()):
        print_note(f"note: no browser was found; the page is {file}")
