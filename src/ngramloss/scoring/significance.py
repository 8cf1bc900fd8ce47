"""figures of each document of several systems → intervals, and whether a difference could be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Pooled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.float64]

SAMPLES = 1000
SHUFFLES = 10_000
SEED = 12345
_CHUNK = 250
_SLACK = 1e-9
"""Differences that rounding alone makes are ties."""


class Figure(NamedTuple):
    """A corpus figure with its interval, and against the first system its difference and how likely that is by chance.

    Attributes:
        value: the figure.
        low: lower end of the 95% interval over documents, by bootstrap.
        high: upper end.
        difference: to the first system; None for the first itself, and so for the rest.
        difference_low: lower end of the difference's 95% interval.
        difference_high: upper end.
        p_bootstrap: paired bootstrap, two-sided.
        p_randomisation: paired approximate randomisation, two-sided.
        p_holm: the larger of the two, corrected for the systems that this figure compares with the first.
    """

    value: float
    low: float
    high: float
    difference: float | None = None
    difference_low: float | None = None
    difference_high: float | None = None
    p_bootstrap: float | None = None
    p_randomisation: float | None = None
    p_holm: float | None = None


def compare(
    systems: Sequence[Mapping[str, Sequence[float] | Pooled]], *,
    samples: int = SAMPLES, shuffles: int = SHUFFLES, seed: int = SEED,
) -> dict[str, list[Figure]]:
    """Every figure that all systems have, on the same documents: name → a figure for each system.

    The *paired bootstrap* (Koehn 2004) draws documents with replacement, the same for all systems and figures; p is the
    share of samples whose difference is further from the mean of the samples than the observed one is from 0. The
    *paired approximate randomisation* (Riezler and Maxwell 2005) swaps the two systems' outputs document by document; p
    is the share of shuffles with a difference at least as large. Both count the observation itself, so p is never 0.
    Documents without a figure (NaN) in any system are left out of that figure, and so is a sample that drew such
    documents alone; where no document has a figure, neither has p.

    Args:
        systems: for each system its figures: those of its documents, or what they add to a pooled figure. The others
            are compared with the first.
        samples: of the bootstrap.
        shuffles: of the randomisation; 0 leaves it out.
        seed: of both.
    """
    import numpy as np

    check(samples=samples, shuffles=shuffles, seed=seed)
    names = [name for name in systems[0] if all(name in system for system in systems)]
    tables = {name: _zero_unknown([_as_pooled(system[name]) for system in systems]) for name in names}
    sizes = {name: table[0].statistics.shape[1] for name, table in tables.items()}
    if not tables:
        return {}
    everything = np.concatenate(                                         # [N, columns]
        [pooled.statistics for table in tables.values() for pooled in table], axis=1)
    drawn = _bootstrap_sums(everything, samples, seed)                   # [samples, columns]
    differences = [other.statistics - table[0].statistics for table in tables.values() for other in table[1:]]
    moved = None
    if differences and shuffles:
        moved = _randomised_sums(np.concatenate(differences, axis=1), shuffles, seed)  # [shuffles, columns]
    figures, at, moved_at = {}, 0, 0
    for name, table in tables.items():
        width = sizes[name]
        sampled = np.split(drawn[:, at : at + width * len(table)], len(table), axis=1)   # each [samples, k]
        at += width * len(table)
        swaps: list[Numbers | None] = [None] * len(table)
        if moved is not None:
            swaps[1:] = np.split(moved[:, moved_at : moved_at + width * (len(table) - 1)], len(table) - 1, axis=1)
            moved_at += width * (len(table) - 1)
        figures[name] = _with_holm(_figures(table, sampled, swaps))
    return figures


def check(*, samples: int, shuffles: int, seed: int) -> None:
    """Raise unless so many samples and shuffles can be drawn from this seed."""
    for name, value, least in (("samples", samples, 1), ("shuffles", shuffles, 0), ("seed", seed, 0)):
        if value < least:
            raise UserError(f"{name} must be {least} or more, got {value}.")


def _with_holm(figures: Sequence[Figure]) -> list[Figure]:
    """The figures with their chances corrected for being several; the first system has none."""
    first, *others = figures
    larger = [max(chance for chance in (test.p_bootstrap, test.p_randomisation) if chance is not None)
              for test in others]
    return [first, *(test._replace(p_holm=chance) for test, chance in zip(others, holm(larger), strict=True))]


def _figures(table: Sequence[Pooled], sampled: Sequence[Numbers], swaps: Sequence[Numbers | None]) -> list[Figure]:
    """One figure of all systems, of their sums [k] under the samples and the swaps of the first and each other."""
    import numpy as np

    def combine(sums: Numbers) -> Any:
        with np.errstate(invalid="ignore"):   # no document with a figure: 0 / 0
            return table[0].combine(sums)

    sums = [pooled.statistics.sum(0) for pooled in table]                # each [k]
    values = [float(combine(system_sums)) for system_sums in sums]
    resampled = [combine(system_sums) for system_sums in sampled]        # each [samples]
    figures = [Figure(values[0], *_interval(resampled[0]))]
    for system in range(1, len(table)):
        gap, gaps = values[system] - values[0], resampled[system] - resampled[0]
        gaps = gaps[np.isfinite(gaps)]
        drawn = _chance(gaps - gaps.mean(), gap) if len(gaps) else np.nan
        swapped, moved = None, swaps[system]
        if moved is not None:
            total = sums[0] + sums[system]                               # [k]
            swapped = _chance(combine((total + moved) / 2) - combine((total - moved) / 2), gap)
        figures.append(Figure(values[system], *_interval(resampled[system]), gap, *_interval(gaps), drawn, swapped))
    return figures


def _chance(gaps: Numbers, observed: float) -> float:
    """The share of differences at least as large as the observed one, which counts itself; NaN where it is none."""
    import numpy as np

    if not np.isfinite(observed):
        return np.nan
    return (int((np.abs(gaps) >= abs(observed) - _SLACK).sum()) + 1) / (len(gaps) + 1)


def holm(chances: Sequence[float]) -> list[float]:
    """Chances corrected for being several (Holm 1979): the k-th smallest of m times m − k + 1, never falling.

    One that is NaN is no comparison: it stays and does not count.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    known = [index for index, chance in enumerate(chances) if not isnan(chance)]
    order = sorted(known, key=lambda index: chances[index])
    corrected, so_far = [nan] * len(chances), 0.0
    for rank, index in enumerate(order):
        so_far = max(so_far, min(1.0, chances[index] * (len(order) - rank)))
        corrected[index] = so_far
    return corrected


def over_seeds(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation and 95% interval (Student's t) of one system's runs; NaN if a run has no figure."""
    import statistics

    from scipy.stats import t

    if len(values) < 2:
        raise ValueError(f"a spread needs two runs or more, got {len(values)}.")
    if not all(map(isfinite, values)):
        return dict.fromkeys(("mean", "spread", "low", "high"), nan)
    mean, spread = statistics.mean(values), statistics.stdev(values)
    half = float(t.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5
    return {"mean": mean, "spread": spread, "low": mean - half, "high": mean + half}


def between_seeds(values: Mapping[int, float], first: Mapping[int, float]) -> dict[str, float]:
    """Difference of two systems' means over seeds, its 95% interval and p (Student's t).

    Paired where both have the same seeds, else Welch's. Where runs do not vary there is nothing to test with: p is NaN.

    Args:
        values: seed → figure.
        first: the same of the system compared with.
    """
    from scipy.stats import ttest_ind, ttest_rel

    if min(len(values), len(first)) < 2:
        raise ValueError(f"a comparison over seeds needs two runs of each, got {len(values)} and {len(first)}.")
    difference = sum(values.values()) / len(values) - sum(first.values()) / len(first)
    paired = values.keys() == first.keys()
    varying = [[values[seed] - first[seed] for seed in first]] if paired else [[*values.values()], [*first.values()]]
    if all(max(numbers) - min(numbers) < _SLACK for numbers in varying):
        return {"difference": difference, "low": difference, "high": difference, "p": nan}
    if paired:
        test = ttest_rel([values[seed] for seed in first], list(first.values()))
    else:
        test = ttest_ind(list(values.values()), list(first.values()), equal_var=False)
    interval = test.confidence_interval(0.95)
    low, high, chance = float(interval.low), float(interval.high), float(test.pvalue)
    return {"difference": difference, "low": low, "high": high, "p": chance}


def _as_pooled(system: Sequence[float] | Pooled) -> Pooled:
    import numpy as np

    if isinstance(system, Pooled):
        return system
    values = np.asarray(system, dtype=np.float64)                        # [N]
    # A mean as sums: of the figures, and of ones.
    return Pooled(np.stack([values, np.ones_like(values)], 1), lambda sums: sums[..., 0] / sums[..., 1])


def _zero_unknown(table: Sequence[Pooled]) -> list[Pooled]:
    """The statistics with 0 for documents that some system has no figure for: they then add to no sum."""
    import numpy as np

    known = np.isfinite(np.concatenate([pooled.statistics for pooled in table], axis=1)).all(1)   # [N]
    return [Pooled(np.where(known[:, None], pooled.statistics, 0.0), pooled.combine) for pooled in table]


def _bootstrap_sums(statistics: Numbers, samples: int, seed: int) -> Numbers:
    """Sums over documents drawn with replacement, [samples, columns]."""
    import numpy as np

    rng, count = np.random.default_rng(seed), len(statistics)
    sums = []
    for start in range(0, samples, _CHUNK):
        drawn = rng.integers(0, count, (min(_CHUNK, samples - start), count))   # [rows, N]
        times = np.stack([np.bincount(row, minlength=count) for row in drawn]).astype(np.float64)   # [rows, N]
        sums.append(times @ statistics)
    return np.concatenate(sums)


def _randomised_sums(gaps: Numbers, shuffles: int, seed: int) -> Numbers:
    """Sums of differences with random signs, [shuffles, columns]."""
    import numpy as np

    rng = np.random.default_rng(seed)
    sums = []
    for start in range(0, shuffles, _CHUNK):
        rows = min(_CHUNK, shuffles - start)
        bits = np.unpackbits(rng.integers(0, 256, (rows, -(-len(gaps) // 8)), dtype=np.uint8), axis=1)[:, : len(gaps)]
        sums.append((bits.astype(np.float64) * 2 - 1) @ gaps)            # [rows, columns]
    return np.concatenate(sums)


def _interval(values: Numbers) -> tuple[float, float]:
    import numpy as np

    known = values[np.isfinite(values)]
    low, high = np.percentile(known, [2.5, 97.5]) if len(known) else (np.nan, np.nan)
    return float(low), float(high)
