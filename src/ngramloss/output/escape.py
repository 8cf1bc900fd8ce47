"""untrusted text → text that is safe to show in a terminal, in JSON, Python, Markdown and LaTeX."""

from __future__ import annotations

import json
import re

_HIDDEN = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff"
"""Control characters, direction marks, zero-width characters, lone surrogates; but not \\t and \\n."""
_UNSEEN = re.compile(f"[{_HIDDEN}]")
_UNSEEN_OR_BREAK = re.compile(f"[{_HIDDEN}\t\n]")

_MARKDOWN = re.compile(r"[\\|*`<>\[\]~$]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "–": "--",
    "↓": r"$\downarrow$",
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
}


def for_terminal(text: str) -> str:
    r"""Show control characters instead of executing them; line ends and tabs stay.

    >>> print(for_terminal("a\x1b[2Jb\rc\n\u202eďábel 日本 👩\u200d🔬"))
    a\x1b[2Jb\rc
    \u202eďábel 日本 👩‍🔬
    """
    return _UNSEEN.sub(_shown, text)


def name(text: str) -> str:
    """Like :func:`for_terminal`, but on one line, for a name in a sentence or a table."""
    return _UNSEEN_OR_BREAK.sub(_shown, text)


def in_json(text: str) -> str:
    r"""Escape control characters in JSON or TOML, without changing its values.

    >>> print(in_json('{"a": "\x9b"}'))
    {"a": "\u009b"}
    """
    return _UNSEEN.sub(lambda match: rf"\u{ord(match[0]):04x}", text)


def in_python(text: str) -> str:
    r"""A literal of Python that is this text, for a program in a code block of Markdown, which it cannot end.

    >>> print(in_python('a"; import os\n```\u202e'))
    "a\"; import os\n``\x60\u202e"
    """
    return name(json.dumps(text, ensure_ascii=False)).replace("```", r"``\x60")


def without_html(markdown: str) -> str:
    r"""Markdown in which nothing is HTML; what else it says stays.

    >>> print(without_html(r"a <b> \<c> \\<d> 1 < 2"))
    a \<b> \<c> \\\<d> 1 < 2
    """
    return re.sub(r"(?<!\\)((?:\\\\)*)<(?=[A-Za-z/!?])", r"\1\\<", for_terminal(markdown))


def in_markdown(text: str) -> str:
    r"""Escape text for a table cell or a part of a line in Markdown.

    >>> print(in_markdown("a|b *c* <img> my_name _d_"))
    a\|b \*c\* \<img\> my_name \_d\_
    """
    return _MARKDOWN.sub(lambda match: "\\" + match[0], name(text))


def as_code(text: str) -> str:
    """Format text as a code span in Markdown, even if it contains backticks.

    >>> as_code("ce"), as_code("`a``b")
    ('`ce`', '``` `a``b ```')
    """
    plain = name(text)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", plain)), default=0))
    pad = " " if plain.startswith("`") or plain.endswith("`") or not plain else ""
    return f"{fence}{pad}{plain}{pad}{fence}"


def in_latex(text: str) -> str:
    """Escape a cell of a LaTeX tabular, where a leading star or bracket would belong to the row before it."""
    plain = "".join(_LATEX.get(sign, sign) for sign in name(text))
    return "{*}" + plain[1:] if plain.startswith("*") else plain


def _shown(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
