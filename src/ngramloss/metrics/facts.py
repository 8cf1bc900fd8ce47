"""ids of built-in documents and predictions → per cent of each summary's names and figures that are right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import nan

from ngramloss.data import newswire
from ngramloss.metrics.scores import Absent, Scores, check_lengths, signature


def facts(ids: Sequence[str], predictions: Sequence[str]) -> Scores:
    """Of the names, and of the figures, in each document's summary, those that the prediction has, in per cent.

    On text made of templates a model may earn much ROUGE for the wording alone; this asks whether it says what
    happened. A document whose summary has no names has no figure for them. The built-in corpus alone knows its facts.

    Example:
        >>> item = newswire.items("test", 1)[0]
        >>> facts([item.id], [item.summary]).values
        {'names_right': [100.0], 'figures_right': [100.0]}
    """
    check_lengths(ids=ids, predictions=predictions)
    matches = [re.fullmatch(rf"newswire-({'|'.join(newswire.SPLITS)})-(\d+)", key) for key in ids]
    if not all(matches):
        raise Absent("facts are known of the built-in corpus newswire alone.")
    items = [newswire.item(match[1], int(match[2]), seed=0) for match in matches if match]
    pairs = list(zip(items, predictions, strict=True))
    return Scores({
        "names_right": [_share(item.names, text) for item, text in pairs],
        "figures_right": [_share(item.figures, text) for item, text in pairs],
    }, signature("facts", corpus="newswire"))  # fmt: skip


def _share(wanted: tuple[str, ...], prediction: str) -> float:
    return newswire.share([wanted], [prediction]) if wanted else nan
