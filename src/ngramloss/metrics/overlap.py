"""references and predictions → BLEU and chrF of the corpus and of each document, by sacreBLEU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Absent, Pooled, Scores, check_lengths


def bleu(references: Sequence[Sequence[str]], predictions: Sequence[str], *, tokenize: str = "13a") -> Scores:
    """Corpus BLEU. A document's score is its sentence BLEU with sacreBLEU's smoothing.

    Example:
        >>> bleu([["the cat sat on the mat"]], ["the cat sat on the mat"]).values
        {'bleu': [100.0...]}
    """
    metric = _sacrebleu("BLEU", tokenize=tokenize)
    sentence = _sacrebleu("BLEU", tokenize=tokenize, effective_order=True)
    return _pooled_scores("bleu", metric, sentence, references, predictions)


def chrf(references: Sequence[Sequence[str]], predictions: Sequence[str], *, word_order: int = 0) -> Scores:
    """Corpus chrF; ``word_order=2`` is chrF++."""
    if word_order < 0:
        raise UserError(f"chrF needs a word_order of 0 or more, got {word_order}; 2 is chrF++.")
    metric, sentence = (_sacrebleu("CHRF", word_order=word_order) for _ in range(2))   # each counts its references
    return _pooled_scores("chrf", metric, sentence, references, predictions)


def _sacrebleu(kind: str, **options: Any) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise Absent("BLEU and chrF need the package sacrebleu: pip install 'ngramloss[score]'.") from None
    known = list(getattr(metrics, "BLEU").TOKENIZERS)  # noqa: B009, it is not declared
    if options.get("tokenize", "13a") not in known:
        raise UserError(f"unknown tokenizer {options['tokenize']!r} for BLEU; choose from {', '.join(known)}.")
    try:
        return getattr(metrics, kind)(**options)
    except (ImportError, RuntimeError, OSError) as reason:   # a tokenizer lacks its package or a file to download
        message = " ".join(str(reason).split())
        raise Absent(f"sacreBLEU's tokenizer {options['tokenize']} cannot be loaded: {message}") from None


def _pooled_scores(
    name: str, metric: Any, sentence: Any, references: Sequence[Sequence[str]], predictions: Sequence[str]
) -> Scores:
    import numpy as np

    check_lengths(references=references, predictions=predictions)
    extracted = metric._extract_corpus_statistics(list(predictions), _streams(references))   # counts references too
    statistics = np.array(extracted, dtype=np.float64)                       # [N, k]
    pairs = zip(predictions, references, strict=True)
    values = [sentence.sentence_score(text, list(golds)).score for text, golds in pairs]

    def combine(sums: Any) -> Any:
        rows = np.asarray(sums, dtype=np.float64)
        flat = [metric._compute_score_from_stats(row.tolist()).score for row in rows.reshape(-1, rows.shape[-1])]
        return np.array(flat).reshape(rows.shape[:-1])

    return Scores({name: values}, f"{name}|{metric.get_signature()}", {name: Pooled(statistics, combine)})


def _streams(references: Sequence[Sequence[str]]) -> list[list[Any]]:
    """References as sacreBLEU expects them: the first of every document, then the second; None where there is none."""
    most = max((len(golds) for golds in references), default=1)
    return [[golds[index] if index < len(golds) else None for golds in references] for index in range(most)]
