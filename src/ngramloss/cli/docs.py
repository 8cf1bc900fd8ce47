"""the name of a page of the guide, and perhaps of a part of it → its text, printed as Markdown."""

from __future__ import annotations

import argparse
import re
from importlib.resources import files

from ngramloss.cli.options import describe
from ngramloss.errors import UserError
from ngramloss.output.console import print_result
from ngramloss.settings import nearest

DOCS = "Print a page of the guide, or a part of it. Without a name, print the list of all pages."
DOCS_EXAMPLES = """\
examples:
  ngramloss docs
  ngramloss docs start | less
  ngramloss docs data#columns
"""
CONTENTS = "README"


def add(docs: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(docs, DOCS, DOCS_EXAMPLES, run)
    docs.add_argument("page", nargs="?", default=CONTENTS, metavar="PAGE[#PART]", help="such as data, or data#columns")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    name, _, part = options.page.removeprefix("docs/").partition("#")
    text = page(name.removesuffix(".md"))
    print_result(section(text, part) if part else text.rstrip())
    return 0


def page(name: str) -> str:
    """The text of a page, which the package contains."""
    folder = files("ngramloss") / "pages"
    known = {each.name.removesuffix(".md"): each for each in folder.iterdir() if each.name.endswith(".md")}
    if name not in known:
        raise UserError(f"there is no page {name!r}. {nearest(name, known, 0.5)}ngramloss docs lists all pages.")
    return known[name].read_text(encoding="utf-8")


def section(text: str, part: str) -> str:
    """The lines below a heading, as far as the next one of its level."""
    lines, headings, fenced = text.splitlines(), dict[str, tuple[int, int]](), False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        if not fenced and (found := re.match(r"(#+) (.+)", line)):
            headings.setdefault(slug(found[2]), (number, len(found[1])))
    if part not in headings:
        raise UserError(f"the page has no part {part!r}. It has: {', '.join(headings)}.")
    first, level = headings[part]
    later = (start for start, depth in headings.values() if start > first and depth <= level)
    return "\n".join(lines[first : min(later, default=len(lines))]).rstrip()


def slug(heading: str) -> str:
    """A heading as links name it.

    >>> slug("The `head`, in `ce + bag(2)`")
    'the-head-in-ce--bag2'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
