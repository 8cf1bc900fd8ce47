"""the name of a data set, a seed → token counts of sources and targets like those of its documents.

``lengths.json`` has how many documents have which lengths: tokens are 1.35 × words (about what BART's tokenizer makes
of English) plus two, cut at 1,024 and 128. Each triple of ``counts`` is a source bin, a target bin and a number; bin i
begins at i times its width. XSum and CNN/DailyMail are test sets, DialogSum and Multi30k (en–de) training sets.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import ngramloss as ng

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

LONGEST = 1024, 128
"""Limits of sources and targets, in tokens."""
SHORTEST = 3
FULL = "full"
"""Every document has the greatest lengths."""
NAMES = ("xsum", "cnndm", "dialogsum", "multi30k", FULL)

Lengths: TypeAlias = "NDArray[np.int64]"


def sample(name: str, documents: int, seed: int, longest: tuple[int, int] = LONGEST) -> tuple[Lengths, Lengths]:
    """Source and target tokens of this many documents, drawn from the data set's histogram."""
    import numpy as np

    if name == FULL:
        source, target = (np.full(documents, min(most, limit)) for most, limit in zip(LONGEST, longest, strict=True))
        return source, target
    entry = json.loads((files("ngramloss_bench") / "lengths.json").read_text())[name]
    *bins, numbers = np.array(entry["counts"]).T  # [cells] each
    random = np.random.default_rng(seed)
    cells = random.choice(len(numbers), documents, p=numbers / numbers.sum())
    sources, targets = (
        np.clip(starts[cells] * width + random.integers(0, width, documents), SHORTEST, min(most, limit))
        for starts, width, most, limit in zip(bins, entry["widths"], LONGEST, longest, strict=True)
    )
    return sources, targets


def write_tokens(folder: Path, sources: Lengths, targets: Lengths, *, vocabulary: int, seed: int) -> None:
    """Write random ids of these lengths as a folder that :class:`ngramloss.data.tokens.Tokens` reads."""
    import numpy as np

    random = np.random.default_rng(seed)
    for name, lengths in (("input_ids", sources), ("labels", targets)):
        ids = random.integers(min(4, vocabulary - 1), vocabulary, lengths.sum(), dtype=np.int32)
        with ng.files.writing(folder):
            np.save(folder / f"{name}.npy", ids)
            np.save(folder / f"{name}.ends.npy", np.cumsum(lengths, dtype=np.int64))
