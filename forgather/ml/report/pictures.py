"""Small copies of the pictures in the folder of a run, as parts of its report page."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

_SIDE = 256  # pixels


def thumbnail(folder: Path, name: Any) -> str | None:
    """Returns a small copy of a picture as a `data:` address; None if there is no such picture in the folder.

    Args:
        folder: the folder of the run.
        name: the path of the picture within the folder, as a file of the run names it.
    """
    try:
        file = (folder / str(name)).resolve()
        # The name is from a file that anyone may have written.
        if not file.is_relative_to(folder.resolve()):
            return None
        with Image.open(file, formats=["PNG"]) as picture:
            picture.thumbnail((_SIDE, _SIDE))
            into = io.BytesIO()
            picture.convert("RGB").save(into, "PNG")
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None
    return f"data:image/png;base64,{base64.b64encode(into.getvalue()).decode()}"
