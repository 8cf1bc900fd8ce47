"""the code of a language → codes that may be meant, and the columns that may have its texts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

_ISO = """
af:afr am:amh ar:arb as:asm az:azj be:bel bg:bul bn:ben bs:bos ca:cat cs:ces cy:cym da:dan de:deu el:ell en:eng es:spa
et:est eu:eus fa:pes fi:fin fr:fra ga:gle gl:glg gu:guj ha:hau he:heb hi:hin hr:hrv ht:hat hu:hun hy:hye id:ind ig:ibo
is:isl it:ita ja:jpn jv:jav ka:kat kk:kaz km:khm kn:kan ko:kor ky:kir lb:ltz lo:lao lt:lit lv:lvs mg:plt mk:mkd ml:mal
mn:khk mr:mar ms:zsm mt:mlt my:mya ne:npi nl:nld no:nob oc:oci or:ory pa:pan pl:pol ps:pbt pt:por ro:ron ru:rus sd:snd
si:sin sk:slk sl:slv so:som sq:als sr:srp su:sun sv:swe sw:swh ta:tam te:tel tg:tgk th:tha tk:tuk tl:tgl tr:tur ug:uig
uk:ukr ur:urd uz:uzn vi:vie xh:xho yi:ydd yo:yor zh:zho zu:zul
"""
SHORT = {long: short for short, _, long in (pair.partition(":") for pair in _ISO.split())}
"""The three letters that NLLB has for a language → the two letters that other models and most files have."""
LONG = {short: long for long, short in SHORT.items()}


def close_codes(code: str, known: Iterable[str]) -> list[str]:
    """At most three known codes that may be meant.

    >>> close_codes("de", ["cs_CZ", "de_DE"]), close_codes("de_DE", ["deu_Latn", "dik_Latn"])
    (['de_DE'], ['deu_Latn'])
    >>> close_codes("zho_Hans", ["en", "zh"]), close_codes("en_US", ["en_XX"]), close_codes("klingon", ["en"])
    (['zh'], ['en_XX'], [])
    """
    known = list(known)
    same = [other for other in known if _language(other) == _language(code)]
    return (same or difflib.get_close_matches(code, known, 3, cutoff=0.7))[:3]


def column_names(code: str) -> list[str]:
    """The names of columns that may have texts in a language, the code itself first.

    >>> column_names("de_DE"), column_names("deu_Latn"), column_names("")
    (['de_de', 'de', 'deu'], ['deu_latn', 'de', 'deu'], [])
    """
    short = _language(code)
    return list(dict.fromkeys(name for name in (code.casefold(), short, LONG.get(short, short)) if name))


def _language(code: str) -> str:
    first = re.split(r"[_-]", code.strip("_"))[0].casefold()
    return SHORT.get(first, first)
