"""What the folder of a saved model says about it, and whether a text can name a model at all. Nothing is imported.

Takes the text with which a user names a model: a folder in the layout of transformers, or a name on the Hub. Gives its
`config.json` as plain data, and a sentence if the text can be neither.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from forgather.bounded import read_bytes
from forgather.rules import is_path

_MAX_BYTES = 16 << 20
# The models on the Hub whose names have no owner; all later names have one.
_WITHOUT_OWNER = re.compile(
    r"(albert|bert|camembert|ctrl|distil(bert|gpt2|roberta)|gpt2|openai-gpt|roberta|t5|transfo-xl|xlm|xlnet)(-[\w.-]+)?"
)


def stored_config(folder: str) -> Mapping[str, Any] | None:
    """Returns the `config.json` of a model; None for a name on the Hub, or if the file cannot be read.

    Args:
        folder: the folder of a model in the layout of transformers.
    """
    try:
        facts = json.loads(read_bytes(os.path.join(os.path.expanduser(folder), "config.json"), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


def missing_model(name: str) -> str | None:
    """Returns a sentence if a text names neither a folder nor, as far as it can be known, a model on the Hub.

    Example:
        >>> missing_model("./none")
        "there is no folder './none'"
        >>> missing_model("nofolder")
        "there is no folder 'nofolder', and a name on the Hub has an owner (owner/name)"
        >>> missing_model("gpt2"), missing_model("Qwen/Qwen3-0.6B")
        (None, None)
    """
    if "://" in name or os.path.isdir(os.path.expanduser(name)):
        return None
    missing = f"there is no folder {name!r}"
    if is_path(name):
        return missing
    if "/" in name or _WITHOUT_OWNER.fullmatch(name) or os.path.isdir(os.path.join(_hub_cache(), f"models--{name}")):
        return None
    return f"{missing}, and a name on the Hub has an owner (owner/name)"


def _hub_cache() -> str:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    return os.path.expanduser(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))


def other_kind(folder: str, *, is_encoder_decoder: bool) -> str | None:
    """Returns a sentence if the model in a folder is an encoder-decoder and must not be one, or the reverse.

    Args:
        folder: the folder of a model. A name on the Hub, or a folder that cannot be read, gives None.
        is_encoder_decoder: what the model has to be.
    """
    config = stored_config(folder)
    if config is None or bool(config.get("is_encoder_decoder", False)) is is_encoder_decoder:
        return None
    names = config.get("architectures")
    named = names[0] if isinstance(names, list) and names else config.get("model_type", "of unknown type")
    what = "an encoder-decoder" if is_encoder_decoder else "a decoder that continues texts"
    return f"the model in {folder!r} is {named}, and {what} is needed"
