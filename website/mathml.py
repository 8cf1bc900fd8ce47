"""``$…$`` and ``$$…$$`` in Markdown → MathML, which browsers draw without a script."""

from __future__ import annotations

import re
import xml.etree.ElementTree as etree

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.blockprocessors import BlockProcessor
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

MATHML = "http://www.w3.org/1998/Math/MathML"
INLINE = r"(?<![\\$\w])\$(?![\s$])([^$]+?)(?<![\s\\])\$(?![\w$])"


BETTER = {
    r"(<mi>(?:log|ln|exp|cos)</mi>)(?!<mo)": r'\1<mspace width="0.17em"/>',
    r"(<mi>\w</mi>)(<mi>(?:log|ln|exp|cos)</mi>)": r'\1<mspace width="0.17em"/>\2',
    r"(<mo[^>]*>(?:&#x0003D;|&#x00028;|&#x0005B;|&#x0002C;|\(|\[)</mo>)<mo>(?=&#x02212;)": r'\1<mo form="prefix">',
    r"<msub>(<mo>(?:max|min)</mo><mi>\w</mi>)</msub>": r"<munder>\1</munder>",
}
"""What the converter leaves out: the space after a function's name and before it, that a minus which begins a term has
no space after it, and limits below their operator."""

OPEN = {")": "(", "]": "["}


def mathml(formula: str, *, display: bool = False) -> str:
    """The formula as MathML; an error if it has a command that the converter does not know."""
    written = convert(formula.strip(), display="block" if display else "inline").replace(r"\_", "_")
    if unknown := re.search(r"\\\w+", written):
        raise ValueError(f"{unknown[0]} in the formula {formula.strip()!r} has no MathML. Write it differently.")
    for pattern, better in BETTER.items():
        written = re.sub(pattern, better, written)
    return _with_whole_bases(written) if re.search(r"<msup><mo[^>]*>[)\]]", written) else written


def _with_whole_bases(written: str) -> str:
    """Let an exponent stand at the whole bracket. Else a browser draws the end of the bracket as high as a letter."""
    etree.register_namespace("", MATHML)
    root = etree.fromstring(written)
    for row in root.iter(f"{{{MATHML}}}mrow"):
        for power in [each for each in row if each.tag.endswith("}msup") and each[0].text in OPEN]:
            before = list(row)[: list(row).index(power)]
            depth, first = 1, len(before)
            while depth and first:
                first -= 1
                depth += (before[first].text == power[0].text) - (before[first].text == OPEN[power[0].text or ""])
            if depth:
                raise ValueError(f"no bracket begins before {power[0].text} in {written!r}.")
            base = etree.Element(f"{{{MATHML}}}mrow")
            base.extend([*before[first:], power[0]])
            for each in before[first:]:
                row.remove(each)
            power[0] = base
    return etree.tostring(root, encoding="unicode")


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
