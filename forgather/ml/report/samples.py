"""The part of the report page that shows what the model writes or draws.

Takes the lines of the samples file; gives HTML: the continuations of prompts, and a table of the answers that
evaluations have generated, next to the expected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forgather.ml.report.html_text import html_text
from forgather.ml.report.pictures import thumbnail


def samples_html(samples: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Returns the HTML of the samples of each step, with the newest step first.

    Args:
        samples: the lines of the samples file.
        folder: the folder of the run, which has the pictures that the lines name.
    """
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample.get("step"), []).append(sample)
    groups = []
    for number, (step, group) in enumerate(reversed(by_step.items())):
        texts = "".join(_sample(sample, folder) for sample in group if "reference" not in sample)
        shown = texts + _answers([sample for sample in group if "reference" in sample])
        groups.append(
            f"<details{' open' if number == 0 else ''}><summary>step {html_text(str(step))}</summary>{shown}</details>"
        )
    return "".join(groups)


def _sample(sample: Mapping[str, Any], folder: Path) -> str:
    prompt = html_text(str(sample.get("prompt", "")))
    if "image" not in sample:
        return f'<pre class="sample"><mark>{prompt}</mark>{html_text(str(sample.get("text", "")))}</pre>'
    address = thumbnail(folder, sample["image"])
    shown = f'<img src="{address}" alt="">' if address else html_text(str(sample["image"]))
    return f'<figure class="sample">{shown}<figcaption>{prompt}</figcaption></figure>'


def _answers(answers: Sequence[Mapping[str, Any]]) -> str:
    """Returns the HTML of a table of prompts, expected answers and generated answers."""
    if not answers:
        return ""
    has_sets = any(answer.get("set") for answer in answers)
    names = [*(["set"] if has_sets else []), "prompt", "reference", "text"]
    head = "".join(f"<th>{'answer' if name == 'text' else name}</th>" for name in names)
    body = "".join(
        f'<tr class="{"good" if answer.get("text") == answer["reference"] else ""}">'
        + "".join(f"<td>{html_text(str(answer.get(name, '')))}</td>" for name in names)
        + "</tr>"
        for answer in answers
    )
    table = f'<table class="answers"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="scroll">{table}</div>'
