"""The documents: the pages of the root and the guides, and what can be read off them."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "MAINTAINERS.md")),
    *sorted((ROOT / "notebooks" / "guides").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read(page: Path) -> str:
    """Its text."""
    return page.read_text(encoding="utf-8")


def blocks(language: str, pages: list[Path] = PAGES) -> list[str]:
    """Fenced blocks of one language."""
    return [body for page in pages for kind, body in FENCE.findall(read(page)) if kind == language]


def lines(pages: list[Path] = PAGES) -> list[str]:
    """Shell commands, one a line."""
    return [line for body in blocks("sh", pages) for line in body.replace("\\\n", " ").splitlines() if line.strip()]


def spans(pages: list[Path] = PAGES) -> list[str]:
    """Inline code."""
    texts = (re.findall(r"`([^`]+)`", FENCE.sub("", read(page))) for page in pages)
    return [" ".join(text.split()) for found in texts for text in found]


def section(page: str, title: str) -> str:
    """Text under a heading of the second level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", read(ROOT / page), re.MULTILINE | re.DOTALL)
    assert found, f"{page} has no section '{title}'"
    return found[1]


def papermill_calls() -> list[list[str]]:
    """Words after `papermill` of every command that calls it."""
    split = [shlex.split(line, comments=True) for line in lines()]
    return [words[words.index("papermill") + 1 :] for words in split if "papermill" in words]


def anchor(heading: str) -> str:
    """The link target that a Markdown renderer makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
