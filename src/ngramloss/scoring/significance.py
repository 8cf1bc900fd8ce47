"""scores of each document of several systems → corpus scores, intervals, and tests of the differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Pooled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

ScoredDocuments = Mapping[
    str, Sequence[float] | Pooled
]  # Name of a score → of each document its value, or its statistics
SAMPLES = 1000
SHUFFLES = 10_000
SEED = 12345
_CHUNK = 250
_CELLS = 10_000_000  # Numbers in a block of samples, at most: 80 MB. Up to 40,000 documents a block is a whole chunk.
_SLACK = 1e-9  # Differences smaller than this are rounding errors and count as ties


class CorpusScore(NamedTuple):
    """A corpus score of one system with its interval, and its difference to the first system with p-values."""

    value: float  # the score
    low: float  # lower end of the 95% interval over documents, by bootstrap
    high: float  # upper end
    # the difference to the first system. This and all further fields are None for the first system.
    difference: float | None = None
    difference_low: float | None = None  # lower end of the difference's 95% interval
    difference_high: float | None = None  # upper end
    p_bootstrap: float | None = None  # p-value of the paired bootstrap, two-sided
    p_randomisation: float | None = None  # p-value of the paired approximate randomisation, two-sided
    p_holm: float | None = None  # the largest of these, corrected for the number of systems compared with the first

    @property
    def chances(self) -> dict[str, float | None]:
        """Name of each test → its p-value, before the correction."""
        return {name: getattr(self, f"p_{name}") for name in TESTS}


TESTS = [name.removeprefix("p_") for name in CorpusScore._fields if name.startswith("p_") and name != "p_holm"]
"""The tests over documents. Each is a field of :class:`CorpusScore`, computed in ``_corpus_scores``."""


def in_words(scores: Iterable[CorpusScore]) -> str:
    """In which tests a difference is significant, by those that were made of some scores."""
    known = [score.chances for score in scores]
    made = [name for name in TESTS if any(chances[name] is not None for chances in known)] or TESTS[:1]
    return " and in ".join(f"the paired {name}" for name in made) + " alone" * (len(made) == 1)


def compare(
    systems: Sequence[ScoredDocuments], *, samples: int = SAMPLES, shuffles: int = SHUFFLES, seed: int = SEED
) -> dict[str, list[CorpusScore]]:
    """Compare systems in every score that all of them have: name of a score → the corpus score of each system.

    The *paired bootstrap* (Koehn 2004) draws documents with replacement, the same ones for all systems and scores. Its
    p is the share of samples whose difference is at least as far from the samples' mean as the observed difference is
    from 0. The *paired approximate randomisation* (Riezler and Maxwell 2005) swaps the outputs of two systems document
    by document. Its p is the share of shuffles with a difference at least as large. Both count the observation itself,
    so p is never 0.

    A document for which any system has no score (NaN) is left out of that score, for all systems. A bootstrap sample of
    only such documents is left out too. If no document has a score, p is NaN.

    The others are compared with the first. Without shuffles there is no randomisation.
    """
    check(samples=samples, shuffles=shuffles, seed=seed)
    names = [name for name in systems[0] if all(name in system for system in systems)]
    tables = {name: _zero_unknown([_as_pooled(system[name]) for system in systems]) for name in names}
    if not tables:
        return {}
    everything = [pooled.statistics for table in tables.values() for pooled in table]
    gaps = [other.statistics - table[0].statistics for table in tables.values() for other in table[1:]]
    count = len(everything[0])
    sampled = _weighted_sums(everything, _bootstrap_counts(samples, count, seed))
    moved = _weighted_sums(gaps, _random_signs(shuffles, count, seed)) if gaps and shuffles else repeat(None)
    corpus = {}
    for name, table in tables.items():
        corpus[name] = _corpus_scores(table, [next(sampled) for _ in table], [next(moved) for _ in table[1:]])
    return corpus


def check(*, samples: int, shuffles: int, seed: int) -> None:
    """Raise if a number is too small."""
    for name, value, least in (("samples", samples, 1), ("shuffles", shuffles, 0), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} must be {least} or more, got {value}.")


def _corpus_scores(table: list[Pooled], sampled: list[Numbers], swaps: list[Numbers | None]) -> list[CorpusScore]:
    """One score of all systems, from sums in each sample, [samples, k], and of differences, [shuffles, k], or None."""
    import numpy as np

    def combine(sums: Numbers) -> Any:
        with np.errstate(invalid="ignore"):  # 0 / 0 if no document has a score
            return table[0].combine(sums)

    sums = [pooled.statistics.sum(0) for pooled in table]  # each [k]
    values = [float(combine(system_sums)) for system_sums in sums]
    resampled = [combine(system_sums) for system_sums in sampled]  # each [samples]
    scores = [CorpusScore(values[0], *_interval(resampled[0]))]
    for system, moved in enumerate(swaps, 1):
        gap, gaps = values[system] - values[0], resampled[system] - resampled[0]
        gaps = gaps[np.isfinite(gaps)]
        several = len(table[0].statistics) > 1  # one document has no spread, so nothing is known
        total = sums[0] + sums[system]  # [k]
        swapped = None if moved is None else combine((total + moved) / 2) - combine((total - moved) / 2)
        score = CorpusScore(values[system], *_interval(resampled[system]), gap, *_interval(gaps))
        score = score._replace(p_bootstrap=_chance(gaps - gaps.mean(), gap) if len(gaps) and several else np.nan)
        scores.append(score._replace(p_randomisation=None if swapped is None else _chance(swapped, gap)))
    larger = [max(chance for chance in score.chances.values() if chance is not None) for score in scores[1:]]
    corrected = zip(scores[1:], holm(larger), strict=True)
    return [scores[0], *(score._replace(p_holm=chance) for score, chance in corrected)]


def _chance(gaps: Numbers, observed: float) -> float:
    """The share of differences at least as large as the observed one, which is counted too; NaN if it is not finite."""
    import numpy as np

    if not np.isfinite(observed):
        return np.nan
    return (int((np.abs(gaps) >= abs(observed) - _SLACK).sum()) + 1) / (len(gaps) + 1)


def holm(chances: Sequence[float]) -> list[float]:
    """P-values corrected for several comparisons (Holm 1979). NaN stays NaN and does not count as a comparison."""
    known = [index for index, chance in enumerate(chances) if not isnan(chance)]
    order = sorted(known, key=lambda index: chances[index])
    corrected, so_far = [nan] * len(chances), 0.0
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, chances[index] * (len(order) - rank)))
        corrected[index] = so_far
    return corrected


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and 95% interval (Student's t) of a system's runs; NaN without scores, or of one run."""
    import statistics

    from scipy.stats import t

    if len(values) < 2 or not all(map(isfinite, values)):
        nothing = dict.fromkeys(("mean", "spread", "low", "high"), nan)
        return nothing | ({"mean": values[0]} if len(values) == 1 else {})
    mean, spread = statistics.mean(values), statistics.stdev(values)
    half = float(t.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5
    return {"mean": mean, "spread": spread, "low": mean - half, "high": mean + half}


def between_seeds(values: Mapping[int, float], first: Mapping[int, float]) -> dict[str, float]:
    """Difference of means over seeds, its 95% interval and p (Student's t; Welch's if seeds differ), or NaN."""
    from scipy.stats import ttest_ind, ttest_rel

    difference = sum(values.values()) / len(values) - sum(first.values()) / len(first)
    if min(len(values), len(first)) < 2:
        return {"difference": difference, "low": nan, "high": nan, "p": nan}
    paired = values.keys() == first.keys()
    varying = [[values[seed] - first[seed] for seed in first]] if paired else [[*values.values()], [*first.values()]]
    if all(max(numbers) - min(numbers) < _SLACK for numbers in varying):
        return {"difference": difference, "low": difference, "high": difference, "p": nan}
    if paired:
        test = ttest_rel([values[seed] for seed in first], list(first.values()))
    else:
        test = ttest_ind(list(values.values()), list(first.values()), equal_var=False)
    low, high = map(float, test.confidence_interval(0.95))
    return {"difference": difference, "low": low, "high": high, "p": float(test.pvalue)}


def smallest_difference(spread: float, pairs: int, *, level: float = 0.05, power: float = 0.8) -> float:
    """The smallest true difference that a two-sided paired t-test of this many pairs finds with this probability.

    ``spread`` is the standard deviation of the differences. With a true difference d the statistic has a noncentral t
    distribution, (Z + d √pairs / spread) / S, where Z is normal and S² is chi-square divided by its degrees of freedom.
    It must be beyond the critical value of the level, on either side. S is averaged over 10,000 quantiles. NaN for
    fewer than two pairs, or if they do not vary.

    >>> round(smallest_difference(1.0, 5), 2), round(smallest_difference(1.0, 50), 2)
    (1.68, 0.4)
    """
    import numpy as np
    from scipy.optimize import brentq
    from scipy.stats import chi2, norm, t

    if pairs < 2 or not isfinite(spread) or spread < _SLACK:
        return nan
    freedom = pairs - 1
    critical = float(t.ppf(1 - level / 2, freedom))
    needed = critical * np.sqrt(chi2.ppf((np.arange(10_000) + 0.5) / 10_000, freedom) / freedom)  # [10000]

    def lacking(shift: float) -> float:
        return power - float(np.mean(norm.sf(needed - shift) + norm.cdf(-needed - shift)))

    return float(brentq(lacking, 0.0, 4 * critical + 10) * spread / pairs**0.5)


def _as_pooled(system: Sequence[float] | Pooled) -> Pooled:
    import numpy as np

    if isinstance(system, Pooled):
        return system
    values = np.asarray(system, dtype=np.float64)  # [N]
    # A mean as two sums: of the scores, and of ones.
    return Pooled(np.stack([values, np.ones_like(values)], 1), lambda sums: sums[..., 0] / sums[..., 1])


def _zero_unknown(table: Sequence[Pooled]) -> list[Pooled]:
    """The statistics with 0 for documents for which some system has no score, so that they add nothing to sums."""
    import numpy as np

    known = np.isfinite(np.concatenate([pooled.statistics for pooled in table], axis=1)).all(1)  # [N]
    return [Pooled(np.where(known[:, None], pooled.statistics, 0.0), pooled.combine) for pooled in table]


def _weighted_sums(parts: Sequence[Numbers], blocks: Iterator[Numbers]) -> Iterator[Numbers]:
    """Sums of each part over documents, [draws, columns], from blocks of the documents' weights in each draw."""
    import numpy as np

    statistics = np.concatenate(parts, axis=1)  # [N, columns]
    sums = np.concatenate([weights @ statistics for weights in blocks])
    return iter(np.split(sums, np.cumsum([part.shape[1] for part in parts])[:-1], axis=1))


def _bootstrap_counts(samples: int, count: int, seed: int) -> Iterator[Numbers]:
    """How often each document is drawn, with replacement: [rows, N]."""
    import numpy as np

    rng = np.random.default_rng(seed)
    for rows in _blocks(samples, count):
        times = np.empty((len(rows), count))
        for row in times:  # [N]
            row[:] = np.bincount(rng.integers(0, count, count), minlength=count)
        yield times


def _random_signs(shuffles: int, count: int, seed: int) -> Iterator[Numbers]:
    """A random sign for each document: [rows, N]."""
    import numpy as np

    rng = np.random.default_rng(seed)
    for start in range(0, shuffles, _CHUNK):  # what is drawn at once decides the numbers, so a chunk is drawn whole
        drawn = rng.integers(0, 256, (min(_CHUNK, shuffles - start), -(-count // 8)), dtype=np.uint8)
        for rows in _blocks(len(drawn), count):
            signs = np.unpackbits(drawn[rows.start : rows.stop], axis=1)[:, :count].astype(np.float64)  # [rows, N]
            signs *= 2
            signs -= 1
            yield signs


def _blocks(rows: int, count: int) -> list[range]:
    """Rows of ``count`` numbers each, in blocks of at most ``_CELLS`` numbers and ``_CHUNK`` rows."""
    size = max(1, min(_CHUNK, _CELLS // max(1, count)))
    return [range(start, min(start + size, rows)) for start in range(0, rows, size)]


def _interval(values: Numbers) -> tuple[float, float]:
    import numpy as np

    known = values[np.isfinite(values)]
    low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (np.nan, np.nan)
    return float(low), float(high)
