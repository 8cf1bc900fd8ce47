"""``$…$`` and ``$$…$$`` in Markdown → MathML, which browsers draw without a script."""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

INLINE = r"(?<![\\$\w])\$(?![\s$])([^$]+?)(?<![\s\\])\$(?![\w$])"


BETTER = {
    r"(<mi>(?:log|ln|exp|cos)</mi>)(?!<mo)": r'\1<mspace width="0.17em"/>',
    r"(<mo[^>]*>(?:&#x0003D;|&#x00028;|&#x0005B;|&#x0002C;|\(|\[)</mo>)<mo>(?=&#x02212;)": r'\1<mo form="prefix">',
    r"<msub>(<mo>(?:max|min)</mo><mi>\w</mi>)</msub>": r"<munder>\1</munder>",
}
"""What the converter leaves out: the space after a function's name, that a minus which begins a term has no space after
it, and limits below their operator."""


def mathml(formula: str, *, display: bool = False) -> str:
    """The formula as MathML; an error if it has a command that the converter does not know."""
    written = convert(formula.strip(), display="block" if display else "inline").replace(r"\_", "_")
    if unknown := re.search(r"\\\w+", written):
        raise ValueError(f"{unknown[0]} in the formula {formula.strip()!r} has no MathML. Write it differently.")
    for pattern, better in BETTER.items():
        written = re.sub(pattern, better, written)
    return written


class Inline(InlineProcessor):
    """A formula in a line."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: D102
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class Display(BlockProcessor):
    """A formula in lines of its own."""

    def test(self, parent: etree.Element, block: str) -> bool:  # noqa: D102
        return re.fullmatch(r"\s*\$\$.+\$\$\s*", block, re.S) is not None

    def run(self, parent: etree.Element, blocks: list[str]) -> None:  # noqa: D102
        formula = blocks.pop(0).strip().strip("$")
        drawn = f'<div class="formula" tabindex="0" data-search-exclude>{mathml(formula, display=True)}</div>'
        etree.SubElement(parent, "p").text = self.parser.md.htmlStash.store(drawn)


class MathML(Extension):
    """Formulas between dollars; after code, before emphasis."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: D102
        md.inlinePatterns.register(Inline(INLINE, md), "mathml", 185)
        md.parser.blockprocessors.register(Display(md.parser), "mathml", 95)


def makeExtension(**options: object) -> MathML:
    """What Markdown calls."""
    return MathML(**options)
