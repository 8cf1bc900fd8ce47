"""the written form of an objective, ``ce + 0.5*matches(2,3,4)`` → its terms."""

from __future__ import annotations

import re
from typing import NamedTuple, NoReturn

from ngramloss.errors import UserError
from ngramloss.loss.terms.registry import MOST_N
from ngramloss.loss.terms.term import Term, check_schedules
from ngramloss.loss.terms.weight_schedule import Schedule

_TOKEN = re.compile(r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|(?P<name>[A-Za-z_]\w*)|(?P<sign>\S))")


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


def parse(written: str) -> list[Term]:
    """A sum of terms ``weight*name(n, …, option=value):variant@schedule``, of which only the name is needed."""
    terms = _Reader(written).terms()
    check_schedules(terms)
    return terms


class _Reader:
    def __init__(self, written: str) -> None:
        self.written = written
        self.tokens = [
            _Token(match.lastgroup or "", match[match.lastgroup or 0], match.start(match.lastgroup or 0))
            for match in _TOKEN.finditer(written)
        ]
        self.tokens.append(_Token("end", "", len(written)))

    def terms(self) -> list[Term]:
        terms = [self.term()]
        while self.take("+"):
            terms.append(self.term())
        if self.tokens[0].kind != "end":
            self.expected("'+' or the end")
        return terms

    def term(self) -> Term:
        at = self.tokens[0].at
        weight = -1.0 if self.take("-") else 1.0
        if self.tokens[0].kind == "number" or self.tokens[0].text.lower() in ("nan", "inf"):
            weight *= float(self.tokens.pop(0).text)
            self.take("*") or self.expected("'*' after a weight")
        if self.tokens[0].text == "(":
            self.expected("an objective (write a weight before each single term)")
        name = self.word("an objective")
        n, options = self.arguments() if self.take("(") else ((), {})
        variant = self.word("a variant") if self.take(":") else None
        schedule = self.schedule() if self.take("@") else None
        if self.tokens[0].text == "*":
            self.expected("'+' or the end (a weight goes before its term, as in 0.5*ce)")
        try:
            return Term(name, n, weight, variant, options, schedule)
        except UserError as mistake:
            self.refuse(at, str(mistake))

    def schedule(self) -> Schedule:
        at, name = self.tokens[0].at, self.word("'from', 'until' or 'ramp'")
        count = {"from": 1, "until": 1, "ramp": 2}.get(name)
        if count is None:
            self.refuse(at, f"unknown schedule {name!r}. Write @from(0.5), @until(0.5) or @ramp(0.1,0.3).")
        self.take("(") or self.expected("'(' after a schedule")
        shares = [self.share()]
        while self.take(","):
            shares.append(self.share())
        self.take(")") or self.expected("',' or ')'")
        if len(shares) != count:
            self.refuse(at, f"@{name} takes {count} share{'s' * (count > 1)}, got {len(shares)}. Write @from(0.5), "
                            "@until(0.5) or @ramp(0.1,0.3).")
        try:
            return Schedule(shares[0], shares[-1], name == "until")
        except UserError as mistake:
            self.refuse(at, str(mistake))

    def share(self) -> float:
        return (-1 if self.take("-") else 1) * float(self.number("a share of the training from 0 to 1"))

    def arguments(self) -> tuple[tuple[int, ...], dict[str, float | str]]:
        n: list[int] = []
        options: dict[str, float | str] = {}
        if self.take(")"):
            return (), {}
        while True:
            if self.tokens[0].kind == "name":
                if self.tokens[0].text in options:
                    self.expected("each option once")
                option = self.word("an option")
                self.take("=") or self.expected("'=' after an option")
                options[option] = self.value()
            else:
                n.append(self.whole())
            if self.take(")"):
                return tuple(n), options
            self.take(",") or self.expected("',' or ')'")

    def value(self) -> float | str:
        if self.tokens[0].kind == "name":   # the term knows which words there are
            return self.word("a word")
        sign, text = -1 if self.take("-") else 1, self.number("a number")
        return sign * (int(text) if text.isdecimal() and len(text) < 1000 else float(text))

    def whole(self) -> int:
        sign = -1 if self.take("-") else 1
        if not self.tokens[0].text.isdecimal():
            self.expected("a whole number for n")
        if len(self.tokens[0].text) > 1000:   # Python rejects numbers of thousands of digits
            self.expected(f"n of at most {MOST_N:,}")
        return sign * int(self.tokens.pop(0).text)

    def number(self, what: str) -> str:
        if self.tokens[0].kind != "number":
            self.expected(what)
        return self.tokens.pop(0).text

    def word(self, what: str) -> str:
        if self.tokens[0].kind != "name":
            self.expected(what)
        return self.tokens.pop(0).text

    def take(self, sign: str) -> bool:
        if self.tokens[0].text != sign:
            return False
        self.tokens.pop(0)
        return True

    def expected(self, what: str) -> NoReturn:
        got = repr(self.tokens[0].text) if self.tokens[0].text else "the end of the text"
        raise UserError(f"expected {what}, got {got}:\n{self.pointed(self.tokens[0].at)}")

    def refuse(self, at: int, mistake: str) -> NoReturn:
        raise UserError(f"{mistake}\n{self.pointed(at)}") from None

    def pointed(self, at: int) -> str:
        line = self.written.replace("\n", " ").replace("\t", " ")
        return f"  {line}\n  {' ' * at}^"
