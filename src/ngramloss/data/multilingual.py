"""codes of two languages and a multilingual tokenizer → the tokenizer set to them; the columns a language may have."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

from ngramloss.errors import UserError

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

_SCRIPT = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


def codes(tokenizer: Any) -> dict[str, int]:
    """The codes of a multilingual tokenizer's languages → their token ids; empty for any other tokenizer."""
    if not hasattr(tokenizer, "set_tgt_lang_special_tokens"):
        return {}
    listed = getattr(tokenizer, "lang_code_to_id", None) or {  # NLLB has its codes among the special tokens
        token: tokenizer.convert_tokens_to_ids(token)
        for token in map(str, tokenizer.all_special_tokens)
        if _SCRIPT.fullmatch(token)
    }
    return {code: token for code, token in listed.items() if token is not None and token != tokenizer.unk_token_id}


def set_languages(tokenizer: Any, source: str, target: str, *, model: str) -> None:
    """Set the languages of a multilingual tokenizer. Leaves other tokenizers as they are.

    Args:
        tokenizer: a Hugging Face tokenizer.
        source: the code of the sources' language, as the tokenizer spells it; empty: the tokenizer's own.
        target: the same for the targets. Both must be given, unless the tokenizer was saved with both.
        model: the model's name, for messages.
    """
    known = codes(tokenizer)
    given = {"data.source_language": source, "data.target_language": target}
    if not known:
        if source or target:
            key, code = next((key, code) for key, code in given.items() if code)
            raise UserError(
                f"{key}: the tokenizer of {model} has no languages, so {code!r} means nothing to it. Leave "
                "the setting out; columns are chosen with data.source and data.target."
            )
        return
    if not source and not target and tokenizer.tgt_lang in known and tokenizer.src_lang in known:
        source, target = tokenizer.src_lang, tokenizer.tgt_lang
    if not source or not target:
        raise UserError(
            f"{model} is multilingual. Set data.source_language and data.target_language to codes of its "
            f"languages: {_few(known)}. If sources and targets have the same language, set it twice."
        )
    mistakes = [
        f"{key}: {model} has no language {code!r}. {_hint(code, known)}"
        for key, code in (("data.source_language", source), ("data.target_language", target))
        if code not in known
    ]
    if mistakes:
        raise UserError("\n".join(mistakes))
    tokenizer.tgt_lang = target
    tokenizer.src_lang = source


def close_codes(code: str, known: Iterable[str]) -> list[str]:
    """At most three known codes that may be meant.

    Example:
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

    Example:
        >>> column_names("de_DE"), column_names("deu_Latn"), column_names("")
        (['de_de', 'de', 'deu'], ['deu_latn', 'de', 'deu'], [])
    """
    short = _language(code)
    return list(dict.fromkeys(name for name in (code.casefold(), short, LONG.get(short, short)) if name))


def _language(code: str) -> str:
    """A code's language, in two letters where it has them."""
    first = re.split(r"[_-]", code.strip("_"))[0].casefold()
    return SHORT.get(first, first)


def _hint(code: str, known: dict[str, int]) -> str:
    close = close_codes(code, known)
    return f"Did you mean {' or '.join(map(repr, close))}?" if close else f"It has {_few(known)}."


def _few(known: dict[str, int]) -> str:
    shown = list(known)[:8]
    return ", ".join(shown) + (f" and {len(known) - len(shown)} more" if len(known) > len(shown) else "")
