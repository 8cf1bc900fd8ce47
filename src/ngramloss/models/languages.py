"""codes of two languages and a multilingual tokenizer → the tokenizer set to them."""

from __future__ import annotations

import re
from typing import Any

from ngramloss.data.language_codes import close_codes
from ngramloss.errors import UserError

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
    """Set a multilingual tokenizer's languages, codes as it spells them; both, unless it was saved with both."""
    known = codes(tokenizer)
    settings = {"data.source_language": source, "data.target_language": target}
    if not known:
        if source or target:
            key, code = next((key, code) for key, code in settings.items() if code)
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
    mistakes = []
    for key, code in (("data.source_language", source), ("data.target_language", target)):
        if code not in known:
            close = close_codes(code, known)
            hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else f"It has {_few(known)}."
            mistakes.append(f"{key}: {model} has no language {code!r}. {hint}")
    if mistakes:
        raise UserError("\n".join(mistakes))
    tokenizer.tgt_lang = target
    tokenizer.src_lang = source


def _few(known: dict[str, int]) -> str:
    shown = list(known)[:8]
    return ", ".join(shown) + (f" and {len(known) - len(shown)} more" if len(known) > len(shown) else "")
