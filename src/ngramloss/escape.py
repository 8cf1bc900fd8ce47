"""text from elsewhere → text that stays text in a terminal, in JSON, Markdown, LaTeX and CSV.

Names, ids and keys come from files that anybody may have written. Only what is not seen is escaped, and what a format
takes for its own marks; letters, accents, joined emoji and every script stay as they are.
"""

from __future__ import annotations

import re

_HIDDEN = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
"""Control characters, what reverses the direction of text, what has no width, halves of characters; no \\t, no \\n."""
_UNSEEN = re.compile(f"[{_HIDDEN}]")
_UNSEEN_OR_BREAK = re.compile(f"[{_HIDDEN}\t\n]")

_MARKDOWN = re.compile(r"[\\|*`<>\[\]~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")
_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "[": "{[}", "±": r"$\pm$",
    "×": r"$\times$", "−": "$-$", "–": "--", "↓": r"$\downarrow$", **{sign: rf"\{sign}" for sign in "&%$#_{}"},
}  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def for_terminal(text: str) -> str:
    r"""Text whose control characters are shown and not obeyed; line ends and tabs stay.

    >>> print(for_terminal("a\x1b[2Jb\rc\n\u202eďábel 日本 👩\u200d🔬"))
    a\x1b[2Jb\rc
    \u202eďábel 日本 👩‍🔬
    """
    return _UNSEEN.sub(_shown, text)


def name(text: str) -> str:
    r"""The same on one line, for a name within a sentence or a table.

    >>> print(name("a\nerror: b"))
    a\nerror: b
    """
    return _UNSEEN_OR_BREAK.sub(_shown, text)


def in_json(text: str) -> str:
    r"""JSON or TOML that stands for the same values, without characters that a terminal obeys.

    >>> print(in_json('{"a": "\x9b"}'))
    {"a": "\u009b"}
    """
    return _UNSEEN.sub(lambda found: rf"\u{ord(found[0]):04x}", text)


def in_markdown(text: str) -> str:
    r"""Text that stays one cell of a table, or part of a line.

    >>> print(in_markdown("a|b *c* <img> my_name _d_"))
    a\|b \*c\* \<img\> my_name \_d\_
    """
    return _MARKDOWN.sub(lambda found: "\\" + found[0], name(text))


def as_code(text: str) -> str:
    """A span of code in Markdown, whatever backticks the text has.

    >>> as_code("ce"), as_code("`a``b")
    ('`ce`', '``` `a``b ```')
    """
    plain = name(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if plain.startswith("`") or plain.endswith("`") or not plain else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def in_latex(text: str) -> str:
    r"""Text that stays one cell of a tabular: a row's end also takes a star or a bracket that follows it.

    >>> print(in_latex("50% of my_data [1]"), in_latex("*a"))
    50\% of my\_data {[}1] {*}a
    """
    plain = "".join(_LATEX.get(sign, sign) for sign in name(text))
    return "{*}" + plain[1:] if plain.startswith("*") else plain


def in_csv(text: str) -> str:
    """Text that no spreadsheet takes for a formula. Numbers do not go through this.

    >>> in_csv("=1+1"), in_csv("ce")
    ("'=1+1", 'ce')
    """
    return f"'{name(text)}" if text.startswith(_FORMULA) else name(text)


def _shown(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")
