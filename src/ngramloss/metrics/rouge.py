"""references and predictions → ROUGE-1, 2, L and Lsum of each document, 0 to 100."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from ngramloss.data.languages import LATIN, SCRIPTS, language_of, letters, normalised, percent, token_pattern
from ngramloss.data.sentences import split_many, splitting_notes
from ngramloss.errors import UserError
from ngramloss.metrics.scores import Absent, Scores, check_lengths, reference_count, reference_facts, signature

NAMES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
PARTS = tuple(f"{name}_{part}" for name in NAMES for part in ("precision", "recall"))
"""Scores that are returned only on request."""
_DEFAULT = re.compile("[a-z0-9]+", re.IGNORECASE)
TOKENS = {"default": _DEFAULT, "unicode": re.compile(r"\w+"), "characters": re.compile(r"\S"), "auto": _DEFAULT}
"""Name → approximately what a token is, to estimate memory; for auto in the text of :func:`rewritten`."""
SCRIPT = "script"  # the option that chooses ``default`` or ``auto`` by the references, see :func:`tokens_of`
SKIPPED = 0.005  # from this share of letters on that the default rules skip, a note says so
LARGEST = 500_000_000
"""The most tokens of a prediction times tokens of a reference: ROUGE-L needs 4 bytes for each pair."""


def rouge(
    references: Sequence[Sequence[str]],
    predictions: Sequence[str],
    *,
    stemmer: bool = True,
    sentences: str = "newline",
    tokens: str = SCRIPT,
    language: str = "auto",
    parts: bool = False,
) -> Scores:
    """F-measures of each document, the numbers of Google's ``rouge-score``; of several references the highest.

    Of ``tokens``, ``script`` is :func:`tokens_of` the references, which the signature names; ``auto`` makes each
    character of Chinese, Japanese, Thai, Lao, Khmer and Burmese a token, and equals the default for plain English. Only
    words of a–z are stemmed. Precision and recall are those of the reference with the highest F-measure.
    """
    check_lengths(references=references, predictions=predictions)
    if tokens == SCRIPT:
        tokens = tokens_of(references)
    several = reference_count(references)
    as_given = sentences == "newline"
    values = _measures(references, predictions, list(NAMES if as_given else NAMES[:3]), stemmer, tokens)
    if not as_given:
        flat = [text for golds in references for text in golds]
        split_texts = split_many([*flat, *predictions], sentences, language=language)
        split = iter("\n".join(pieces) for pieces in split_texts)
        split_references = [[next(split) for _ in golds] for golds in references]
        values |= _measures(split_references, list(split), [NAMES[3]], stemmer, tokens)
    named = {} if language == "auto" or sentences != "pysbd" else {"language": language}
    wanted = (*NAMES, *PARTS) if parts else NAMES
    return Scores(
        {name: values[name] for name in wanted},
        signature(
            "rouge",
            **reference_facts(several, "best-f"),
            stemmer=stemmer,
            lsum=sentences,
            **named,
            tokens=tokens,
            rouge_score_rs=version("rouge-score-rs"),
        ),
    )


def notes(
    references: Sequence[Sequence[str]],
    predictions: Sequence[str],
    *,
    tokens: str,
    sentences: str,
    language: str,
    **_: object,
) -> list[str]:
    """Sentences about texts that these options do not read well."""
    texts = [*(text for golds in references for text in golds), *predictions]
    found = []
    if (tokens_of(references) if tokens == SCRIPT else tokens) == "default":
        counts = letters(texts)
        empty = sum(not _DEFAULT.search(text) and any(map(str.isalpha, text)) for text in texts)
        if counts.share_not_ascii >= SKIPPED or empty:
            some = " ".join([*(letter for letter, _ in counts.others.most_common(4)), "…"][: len(counts.others)])
            none = f", and find no word in {empty:,} of {len(texts):,} texts" if empty else ""
            found.append(
                f"the default rules read only a–z and 0–9: they skip {percent(counts.share_not_ascii)} of "
                f"the letters here ({some}){none}. Use --set rouge.tokens=auto."
            )
    return found + splitting_notes(texts, sentences, language, "--set rouge.language")


def tokens_of(references: Sequence[Sequence[str]]) -> str:
    """The tokens for the references' script: ``auto`` if most of their letters are not Latin, otherwise ``default``.

    >>> tokens_of([["今天天气很好"]]), tokens_of([["Käse"]])
    ('auto', 'default')
    """
    latin = language_of(text for golds in references for text in golds) == SCRIPTS[LATIN][0]
    return "default" if latin else "auto"


def rewritten(text: str) -> str:
    """A text in which the default rules find the tokens of ``auto``; line ends stay.

    A token that is not of a–z and 0–9, or begins with ``0u``, becomes ``0u``, its bytes in hexadecimal, and ``0``: such
    words are not split, differ where tokens do, and end in a digit, so Porter's stemmer leaves them.

    >>> rewritten("Ein Käse 2024")
    'ein  0u6bc3a473650  2024'
    """
    return (
        text
        if text.isascii() and "0u" not in text.lower()
        else token_pattern().sub(lambda match: _stand_in(match[0]), normalised(text))
    )


@lru_cache(maxsize=2**16)
def _stand_in(token: str) -> str:
    # The spaces separate it from its neighbours: characters of Chinese stand side by side.
    return token if token.isascii() and not token.startswith("0u") else f" 0u{token.encode().hex()}0 "


def _check_sizes(references: Sequence[Sequence[str]], predictions: Sequence[str], token: re.Pattern[str]) -> None:
    """Raise if ROUGE-L would need too much memory: the scorer would abort the program."""
    for number, (golds, prediction) in enumerate(zip(references, predictions, strict=True), 1):
        for reference in golds:
            if len(reference) * len(prediction) <= LARGEST:
                continue  # there are no more tokens than characters
            gold_words, text_words = (sum(1 for _ in token.finditer(text)) for text in (reference, prediction))
            if gold_words * text_words > LARGEST:
                raise UserError(
                    f"ROUGE-L of document {number} would need {4 * gold_words * text_words / 1e9:.0f} GB: its "
                    f"reference has {gold_words:,} words and the prediction {text_words:,}. Shorten one of them."
                )


def _measures(
    references: Sequence[Sequence[str]], predictions: Sequence[str], names: list[str], stemmer: bool, tokens: str
) -> dict[str, list[float]]:
    if tokens == "auto":
        references = [[rewritten(text) for text in golds] for golds in references]
        predictions = [rewritten(text) for text in predictions]
    _check_sizes(references, predictions, TOKENS[tokens])
    try:
        from rouge_score_rs import RougeScorer, tokenizers
    except ImportError:
        raise Absent("ROUGE needs the package rouge-score-rs: pip install 'ngramloss[score]'.") from None
    class_name: Any = {"unicode": "UnicodeTokenizer", "characters": "CharacterTokenizer"}.get(tokens)
    options = {"tokenizer": getattr(tokenizers, class_name)()} if class_name else {}
    kind: Any = RougeScorer
    scorer = kind(names, use_stemmer=stemmer, **options)
    if all(len(golds) == 1 for golds in references):
        scored = scorer.score_batch([golds[0] for golds in references], list(predictions))
    else:
        pairs = zip(references, predictions, strict=True)
        scored = [scorer.score_multi(list(golds), prediction) for golds, prediction in pairs]
    values = {name: [100 * scores[name].fmeasure for scores in scored] for name in names}
    for name in names:
        values[f"{name}_precision"] = [100 * scores[name].precision for scores in scored]
        values[f"{name}_recall"] = [100 * scores[name].recall for scores in scored]
    return values
