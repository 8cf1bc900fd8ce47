"""several texts of each source, and a metric → how much each text agrees with the others, for minimum Bayes risk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import fsum

from ngramloss.data import Example
from ngramloss.data.sentences import sentences
from ngramloss.errors import UserError
from ngramloss.metrics.gains import Gain, check_gain, gains_of
from ngramloss.metrics.registry import METRICS


def check_utility(gain: Gain, examples: Sequence[Example]) -> list[str]:
    """Raise if a metric cannot compare texts with each other. Returns sentences about texts that it does not read well.

    K texts of a source need K² − K scores, which is too many for a metric with a model of its own.
    """
    if "model" in METRICS[gain.metric].options:
        raise UserError(
            f"--metric {gain.metric} has a model of its own, and comparing every text of a source with every "
            "other needs a score for each pair. Use rouge, bleu or chrf."
        )
    return check_gain(gain, examples)


def expected_gains(gain: Gain, examples: Sequence[Example], texts: Sequence[Sequence[str]]) -> list[list[float]]:
    """The mean gain of each text with the other texts of its source as references, one at a time; 0 for a single text.

    A text that occurs c times is c texts: each is a reference of the others, and of its copies. So if texts are
    samples, the mean estimates the gain that the model itself expects of a text (Eikema and Aziz, 2020). The references
    of the examples are not read.

    Args:
        gain: the metric.
        examples: the sources; a metric may read them.
        texts: several of each.
    """
    groups = [_in_lines(group, gain.lines) for group in texts]
    counts = [Counter(group) for group in groups]
    references = [
        Example(example.id, example.source, text) for example, own in zip(examples, counts, strict=True) for text in own
    ]
    judged = [[text for text in own if text != other or own[other] > 1] for own in counts for other in own]
    found = zip(judged, gains_of(gain._replace(lines=None), references, judged, unit="texts"), strict=True)
    means = []
    for own in counts:
        sums: dict[str, list[float]] = {text: [] for text in own}
        for other, (judged_texts, gains) in zip(own, found, strict=False):
            for text, value in zip(judged_texts, gains, strict=True):
                sums[text].append(value * (own[other] - (text == other)))
        means.append({text: fsum(values) / max(own.total() - 1, 1) for text, values in sums.items()})
    return [[of[text] for text in group] for group, of in zip(groups, means, strict=True)]


def _in_lines(texts: Sequence[str], language: str | None) -> list[str]:
    return list(texts) if language is None else ["\n".join(sentences(text, language=language)) for text in texts]
