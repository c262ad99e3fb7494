"""Every link of the documentation leads somewhere: the file is there, and so is the heading."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "projects").rglob("*.md")),
]
LINK = re.compile(r"\]\((?!\w+:)([^)#]*)(?:#([^)]*))?\)")
MENTION = re.compile(r"(?<!\[)`([\w./-]+\.md)`")

of_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@cache
def prose(page):
    """Returns the text of a page without its code."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.sub(r"^    .*$", "", text, flags=re.M)


@cache
def anchors(page):
    """Returns the names that GitHub gives to the headings of a page."""
    names = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.M):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


@of_each_page
def test_every_relative_link_leads_somewhere(page):
    links = [(page.parent / file if file else page, anchor) for file, anchor in LINK.findall(prose(page))]
    broken = [
        f"{os.path.relpath(file, page.parent)}#{anchor}"
        for file, anchor in links
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert [] == broken


@of_each_page
def test_a_page_that_is_mentioned_is_linked(page):
    assert [] == [
        name for name in MENTION.findall(prose(page)) if any((base / name).is_file() for base in (ROOT, page.parent))
    ]


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {os.path.normpath(file) for file, _ in LINK.findall(index)}
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert set() == {page for page in pages if not page.startswith("errors/")} - linked - {"index.md"}


def test_links_and_anchors_were_found():
    links = [link for page in PAGES for link in LINK.findall(prose(page))]
    assert 120 < len(links)
    assert 8 < len([anchor for _, anchor in links if anchor])
