"""The part of the report page that shows what the model writes.

Takes the lines of the samples file; gives HTML: the continuations of prompts, and a table of the answers that
evaluations have generated, next to the expected ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.ml.report.html_text import html_text


def samples_html(samples: Sequence[Mapping[str, Any]]) -> str:
    """Returns the HTML of the samples of each step, with the newest step first.

    Args:
        samples: the lines of the samples file.
    """
    by_step: dict[Any, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample.get("step"), []).append(sample)
    groups = []
    for number, (step, group) in enumerate(reversed(by_step.items())):
        texts = "".join(
            f'<pre class="sample"><mark>{html_text(str(s.get("prompt", "")))}</mark>'
            f"{html_text(str(s.get('text', '')))}</pre>"
            for s in group
            if "reference" not in s
        )
        shown = texts + _answers([sample for sample in group if "reference" in sample])
        groups.append(
            f"<details{' open' if number == 0 else ''}><summary>step {html_text(str(step))}</summary>{shown}</details>"
        )
    return "".join(groups)


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
