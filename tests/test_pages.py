"""The pages: every link of this repository leads to a file and a heading; no page is too long."""

import pathlib
import re

from tests.test_budget import sources

ROOT = pathlib.Path(__file__).parents[1]


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them; code blocks have none."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    words = [
        re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)", text, re.M)
    ]
    return {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in words}


def test_links_lead_to_a_file_and_a_heading():
    pages = [path for folder in ("", "docs/", "gradient/") for path in ROOT.glob(f"{folder}*.md")]
    dead = []
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)|^\[\w+\]: (\S+)", page.read_text(), re.M):
            path, _, anchor = "".join(link).partition("#")
            target = page.parent / path if path else page
            if "://" in path or path.startswith("mailto:"):
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target.read_text())):
                dead.append((page.name, link))
    assert len(pages) > 20 and not dead


def test_pages_that_the_code_names_have_the_heading():
    """Code names pages as docs/PAGE.md or docs/PAGE.md#HEADING."""
    files = [*ROOT.glob("*/*.sh"), *(path for paths in sources().values() for path in paths)]
    named = {
        match
        for file in files
        for match in re.findall(r"\b(docs/\w+\.md)(?:#([\w-]+))?", file.read_text())
    }
    assert len(named) > 5
    for page, anchor in named:
        assert (ROOT / page).is_file(), page
        assert not anchor or anchor in _anchors((ROOT / page).read_text()), (page, anchor)


def test_pages_are_short():
    words = {path.name: len(path.read_text().split()) for path in ROOT.glob("docs/*.md")}
    assert max(words.values()) <= 2_300 and sum(words.values()) <= 25_000, words
    assert len((ROOT / "README.md").read_text().split()) <= 650
