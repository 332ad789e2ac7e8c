"""The pages of the documentation as tests see them: code blocks, links, headings, words."""

import ast
import asyncio
import inspect
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    language: str
    text: str
    #: of the block's first line of text
    line: int

    def __str__(self):
        return f"{self.page.name}:{self.line}"


def blocks(page, *languages):
    """The fenced blocks of a page in the given languages."""
    source = page.read_text(encoding="utf-8")
    found = (
        Block(page, match[1], match[2], source[: match.start(2)].count("\n") + 1) for match in _BLOCK.finditer(source)
    )
    return [block for block in found if block.language in languages]


def prose(page):
    """A page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def links(page):
    """Targets of a page's links."""
    return _LINK.findall(prose(page))


def anchors(page):
    """What `#...` may name on a page: its headings, as GitHub spells them."""
    slugs = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose(page)))
    return set(slugs)


def commands(page):
    """Arguments of every call of `corogen` in a page's shell blocks and inline code."""
    lines = [line.removeprefix("$ ") for block in blocks(page, "sh", "console") for line in block.text.splitlines()]
    lines += re.findall(r"`(corogen [^`]+)`", prose(page))
    parts = (shlex.split(part, comments=True) for line in lines for part in line.split("&&"))
    return [words[1:] for words in parts if words and words[0].rpartition("/")[2] == "corogen"]


def run_page(page):
    """Run a page's Python blocks in order, in one namespace, as a reader types them. `await` may stand at the top."""
    names = {"__name__": "docs"}
    with asyncio.Runner() as runner:
        for block in blocks(page, "python"):
            source = "\n" * (block.line - 1) + block.text
            code = compile(source, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)
    return names
