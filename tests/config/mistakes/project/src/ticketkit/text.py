"""Cleaning of the texts that customers write."""

import re


def clean(texts, *, lower=False, keep_urls=True, width=0):
    """Returns the texts without signatures and double blanks, cut to `width` characters (0: all)."""
    cleaned = []
    for text in texts:
        text = text.split("\n-- \n")[0]
        text = text if keep_urls else re.sub(r"https?://\S+", "<url>", text)
        text = re.sub(r"[ \t]+", " ", text).strip()
        cleaned.append((text.lower() if lower else text)[: width or None])
    return cleaned
