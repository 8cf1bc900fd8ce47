"""ids of built-in documents and predictions → percentage of each summary's names and numbers that are right."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ngramloss.data import newswire
from ngramloss.metrics.scores import Absent, Scores, check_lengths, signature


def facts(ids: Sequence[str], predictions: Sequence[str]) -> Scores:
    """The percentage of the reference's names (NaN: it has none) and numbers that the prediction contains.

    On text made from templates, a high ROUGE may come from the wording alone. Only the built-in corpus has these facts.

    >>> item = newswire.items("test", 1)[0]
    >>> facts([item.id], [item.summary]).values
    {'names_right': [100.0], 'figures_right': [100.0]}
    """
    check_lengths(ids=ids, predictions=predictions)
    matches = [re.fullmatch(rf"newswire-({'|'.join(newswire.SPLITS)})-(\d+)", key) for key in ids]
    if not all(matches):
        raise Absent("facts works only on the built-in corpus newswire, whose facts are known.")
    items = [newswire.item(match[1], int(match[2]), seed=0) for match in matches if match]
    pairs = list(zip(items, predictions, strict=True))
    return Scores(
        {
            "names_right": [newswire.share(item.names, text) for item, text in pairs],
            "figures_right": [newswire.share(item.figures, text) for item, text in pairs],
        },
        signature("facts", corpus="newswire"),
    )
