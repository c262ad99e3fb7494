"""Every link of the documentation leads somewhere: the file is there, and so is the heading.

Each test goes over all pages and reports every fault, by page.
"""

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    # Runs leave pages next to their models.
    *sorted(page for page in (ROOT / "projects").rglob("*.md") if not {"outputs", "output_models"} & set(page.parts)),
]
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)")
MENTION = re.compile(r"(?<!\[)`([\w./-]+\.md)`")
CODE = re.compile(r"\bFG\d{3}\b")
# Headings, links and code with more than one word: a code of an error is no mention there.
NOT_A_MENTION = re.compile(r"^#.*$|\[[^]]*\]\([^)]*\)|`[^`]*[^`\w][^`]*`", re.M)


@cache
def prose(page):
    """Returns the text of a page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


@cache
def anchors(page):
    """Returns the names that GitHub gives to the headings of a page."""
    names, times = set(), Counter()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(f"{name}-{times[name]}" if times[name] else name)
        times[name] += 1
    return names


def links(page):
    """Returns (file, anchor) of each relative link."""
    return [(page.parent / file if file else page, anchor) for file, anchor in LINK.findall(prose(page))]


def by_page(faults, pages=PAGES):
    """Returns what a function finds in the pages, without those where it finds nothing."""
    found = {str(page.relative_to(ROOT)): faults(page) for page in pages}
    return {page: wrong for page, wrong in found.items() if wrong}


def test_every_relative_link_leads_somewhere():
    def broken(page):
        return [
            f"{os.path.relpath(file, page.parent)}#{anchor}"
            for file, anchor in links(page)
            if not file.exists() or (anchor and anchor not in anchors(file))
        ]

    assert {} == by_page(broken)


def test_a_page_that_is_mentioned_is_linked():
    def unlinked(page):
        return [
            file for file in MENTION.findall(prose(page)) if (ROOT / file).is_file() or (page.parent / file).is_file()
        ]

    assert {} == by_page(unlinked)


def test_an_error_code_that_is_mentioned_is_linked():
    # A page of an error shows codes as the commands print them.
    pages = [page for page in PAGES if page.parent.name != "errors"]
    assert {} == by_page(lambda page: CODE.findall(NOT_A_MENTION.sub("", prose(page))), pages)


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "index.md"
    listed = {index, *(Path(os.path.normpath(file)) for file, _ in links(index))}
    pages = {page for page in PAGES if page.parent.name != "errors"}
    assert set() == pages - listed


def test_links_and_anchors_were_found():
    found = [link for page in PAGES for link in links(page)]
    assert 200 < len(found)
    assert 10 < len([anchor for _, anchor in found if anchor])


def test_headings_have_the_anchors_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A `code`, a [link](x.md)\n\n## Two words\n\n```\n# not this\n```\n\n## Two words\n", encoding="utf-8"
    )
    assert {"a-code-a-link", "two-words", "two-words-1"} == anchors(page)
