"""several texts of each source → how much each agrees with the others, by a metric: minimum Bayes risk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

import ngramloss as ng


def check_utility(metric: ng.candidate_scores.CandidateMetric, examples: Sequence[ng.data.Example]) -> list[str]:
    """Raise if a metric cannot compare texts (K² − K scores for K of them); sentences on texts that it reads badly."""
    if "model" in ng.METRICS[metric.name].options:
        raise ng.UserError(
            f"--metric {metric.name} has a model of its own, and comparing every text of a source with every "
            "other needs a score for each pair. Use rouge, bleu or chrf."
        )
    return ng.candidate_scores.check_metric(metric, examples)


def expected_scores(
    metric: ng.candidate_scores.CandidateMetric, examples: Sequence[ng.data.Example], texts: Sequence[Sequence[str]]
) -> list[list[float]]:
    """The mean score of each text with its source's other texts as references, one at a time; 0 for a single text.

    A text that occurs c times is c texts, and a reference of its copies: so for samples the mean estimates the score
    that the model itself expects of a text (Eikema and Aziz, 2020).
    """
    groups = [_in_lines(group, metric.lines) for group in texts]
    counts = [Counter(group) for group in groups]
    references = [
        ng.data.Example(example.id, example.source, text)
        for example, own in zip(examples, counts, strict=True)
        for text in own
    ]
    judged = [[text for text in own if text != other or own[other] > 1] for own in counts for other in own]
    plain = metric._replace(lines=None)
    found = zip(judged, ng.candidate_scores.score_candidates(plain, references, judged, unit="texts"), strict=True)
    means = []
    for own in counts:
        sums: dict[str, list[float]] = {text: [] for text in own}
        for other, (judged_texts, scores) in zip(own, found, strict=False):
            for text, value in zip(judged_texts, scores, strict=True):
                sums[text].append(value * (own[other] - (text == other)))
        means.append({text: fsum(values) / max(own.total() - 1, 1) for text, values in sums.items()})
    return [[of[text] for text in group] for group, of in zip(groups, means, strict=True)]


def _in_lines(texts: Sequence[str], language: str | None) -> list[str]:
    return list(texts) if language is None else list(map("\n".join, ng.data.split_many(texts, language=language)))
