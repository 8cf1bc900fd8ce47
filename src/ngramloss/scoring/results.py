"""aligned texts and names of metrics → every score with its signature, interval, tests and spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.metrics import registry
from ngramloss.metrics.registry import METRICS, Metric, Score, compute_scores, scores_of
from ngramloss.metrics.scores import Absent, Pooled
from ngramloss.output.progress import Progress
from ngramloss.scoring import provenance, score_cache, significance
from ngramloss.scoring.audit import CutOff, LengthLimits, cut_off, oddities
from ngramloss.scoring.provenance import Provenance
from ngramloss.scoring.score_cache import CachedScores, Corpus, Keyed
from ngramloss.scoring.scored_texts import Aligned
from ngramloss.scoring.significance import CorpusScore, ScoredDocuments
from ngramloss.storage.run_folder import Busy
from ngramloss.version import __version__


class Seeds(NamedTuple):
    """The runs of one system that differ only in the seed."""

    label: str  # the label of the system, or the name of the group
    names: list[str]  # the names of its runs
    # score → mean, standard deviation and 95% interval over the runs; of one run only the mean
    spread: dict[str, dict[str, float]]
    # score → difference to the first system's mean, its interval, p, and p corrected; without a test NaN, but the first
    against_first: dict[str, dict[str, float]]  # empty for the first system
    test: str = ""  # how its runs are paired with those of the first; empty for the first, or if one has a single run


BY_SEED, BY_ORDER, UNPAIRED = "paired by seed", "paired in the order given", "not paired (Welch)"


class Result(NamedTuple):
    """All scores of all systems."""

    names: list[str]  # the systems; the others are compared with the first
    ids: list[str]  # the documents
    scores: dict[str, list[CorpusScore]]  # name of a score → the corpus score of each system
    documents: list[dict[str, list[float]]]  # for each system, name of a score → the scores of its documents
    signatures: dict[str, str]  # metric → everything that can change its scores, in one line
    absent: dict[str, str]  # metric → why it could not run
    left_out: dict[str, int]  # name of a score → number of documents left out because some system has no score for them
    audit: list[list[str]]  # for each system, notes on suspicious texts
    runs: list[Provenance | None]  # for each system, what its folder says about it; None for a file
    seeds: list[Seeds]  # systems with several runs
    # messages about folders whose saved scores are damaged, or in which scores could not be saved
    cache_warnings: list[str]
    metric_of: dict[str, str]  # name of a score → the metric that returned it
    notes: dict[str, list[str]]  # metric → sentences about texts that its options do not read well
    cut_off: Sequence[CutOff] = ()  # for each system, its texts with the most tokens allowed
    groups: Sequence[str] = ()  # the group of each system, empty for a system on its own; empty if there are no groups

    @property
    def decoded_differently(self) -> list[str]:
        """A warning that names every difference in how the systems decoded, if there is one."""
        pairs = zip(self.names, self.runs, strict=True)
        return provenance.decoded_differently((name, provenance.written_by(run)) for name, run in pairs if run)

    @property
    def described(self) -> dict[str, Score]:
        """Name of a score → its label, help and direction."""
        return {name: scores_of(self.metric_of[name])[name] for name in self.scores}


def score_systems(
    texts: Aligned,
    metrics: Sequence[str] = ("rouge",),
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    samples: int = significance.SAMPLES,
    shuffles: int = significance.SHUFFLES,
    seed: int = significance.SEED,
    limits: LengthLimits | None = None,
) -> Result:
    """Score every system with every metric, and compare each with the first; a run's scores are saved in its folder."""
    if not metrics:
        raise UserError(f"give at least one metric. Choose from {', '.join(METRICS)}.")
    registry.score_owners(metrics)  # raises if two metrics use the same name
    chosen = {name: registry.checked_options(name, (options or {}).get(name, {})) for name in metrics}
    significance.check(samples=samples, shuffles=shuffles, seed=seed)
    saved, unused = [], []
    for folder, predictions in zip(texts.folders, texts.texts, strict=True):
        saved.append(score_cache.read(folder, texts.task.ids, predictions) if folder else CachedScores({}, {}))
        if damage := saved[-1].damage:
            unused.append(f"the scores saved in {folder} were not used ({damage}); they are computed again.")
    # Read now: another run may have replaced the folder's content by the time the metrics are done.
    about = [provenance.run(folder) if folder else None for folder in texts.folders]
    given = texts.task._asdict()
    everyone = given | {"predictions": [text for system in texts.texts for text in system]}
    hashes = score_cache.text_hashes(given)
    scores: list[dict[str, Keyed]] = [{} for _ in texts.names]
    absent, notes = dict[str, str](), dict[str, list[str]]()
    for name in metrics:
        metric = METRICS[name]
        if reason := _why_absent(name, metric, given, chosen[name]):
            absent[name] = reason
            continue
        own_hashes = {text: digest for text, digest in hashes.items() if text in metric.reads}
        for index, system in enumerate(texts.names):
            of_system = given | {"predictions": texts.texts[index]}
            taken = {text: of_system[text] for text in metric.reads}
            key = key_of(name, of_system, chosen[name])
            if (before := saved[index].metrics.get(name)) and before.key == key and not before.pooled:
                scores[index][name] = before
                continue
            total = len(texts.task.ids)
            try:
                with Progress(f"{name} of {system}", total=total) as progress:
                    found = compute_scores(name, taken, chosen[name], documents=total, progress=progress.update)
            except Absent as missing:
                absent[name] = str(missing)
                break
            scores[index][name] = Keyed(key, found, own_hashes)
        if name not in absent and (sentences := metric.notes_on(everyone, chosen[name])):
            notes[name] = sentences
    for name in absent:
        for by_metric in scores:
            by_metric.pop(name, None)
    documents = [{name: x for own in system.values() for name, x in own.scores.values.items()} for system in scores]
    with Progress("intervals and tests", unit=""):
        corpus = significance.compare(list(map(_values, scores)), samples=samples, shuffles=shuffles, seed=seed)
    rows = {name: zip(*(system[name] for system in documents), strict=True) for name in corpus}
    without = {name: sum(not all(map(isfinite, row)) for row in of_score) for name, of_score in rows.items()}
    lengths = [_lengths(texts, run, limits) for run in about]
    result = Result(
        names=texts.names,
        ids=texts.task.ids,
        scores=corpus,
        documents=documents,
        signatures={name: f"{keyed.scores.signature}|ngramloss:{__version__}" for name, keyed in scores[0].items()},
        absent=absent,
        left_out={name: some for name, some in without.items() if some},
        audit=[oddities(texts.texts[index], *known) for index, known in enumerate(lengths)],
        runs=about,
        seeds=_over_seeds(corpus, texts, about),
        cache_warnings=unused,
        metric_of={name: metric for metric, keyed in scores[0].items() for name in keyed.scores.values},
        notes=notes,
        cut_off=[cut_off(*known) for known in lengths],
        groups=texts.groups,
    )
    unsaved = _write_caches(texts, scores, result, hashes, {"samples": samples, "seed": seed})
    return result._replace(cache_warnings=[*unused, *unsaved])


def key_of(name: str, texts: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """What saved scores of a metric must have been computed from: these texts, options, versions and code."""
    metric = METRICS[name]
    taken = {text: texts[text] for text in metric.reads}
    every = metric.every_option(options)
    return score_cache.key(name, every, taken, packages=metric.packages, source=METRICS.source(name))


def _own_corpus(result: Result, system: int, own: Mapping[str, Keyed], draws: Mapping[str, int]) -> dict[str, Corpus]:
    """A system's corpus scores over all documents for which it has one; a comparison leaves out what others lack."""
    missing = {name: sum(not isfinite(value) for value in result.documents[system][name]) for name in result.left_out}
    values = _values(own)
    differing = {name: values[name] for name, count in result.left_out.items() if missing[name] < count}
    alone = significance.compare([differing], shuffles=0, **draws)
    found = {name: alone[name][0] if name in alone else scores[system] for name, scores in result.scores.items()}
    return {name: Corpus(*score[:3]) for name, score in found.items()}


def _write_caches(
    texts: Aligned, scores: list[dict[str, Keyed]], result: Result, hashes: dict[str, str], draws: dict[str, int]
) -> list[str]:
    """Save the scores in the systems' folders; return a message for each folder where this fails."""
    warnings = []
    given = {name: digest for name, digest in hashes.items() if getattr(texts.task, name) is not None}
    for index, folder in enumerate(texts.folders):
        why = None
        if folder is None or not scores[index]:
            continue
        if provenance.run(folder) != result.runs[index]:
            why = "its predictions changed in the meantime"
        else:
            corpus = _own_corpus(result, index, scores[index], draws)
            try:
                score_cache.write(folder, texts.task.ids, texts.texts[index], scores[index], corpus, given)
            except Busy:
                why = "another process is using it"
            except OSError as reason:
                why = str(reason.strerror or reason)
        warnings += [f"scores were not saved in {folder}: {why}."] if why else []
    return warnings


def _values(by_metric: Mapping[str, Keyed]) -> ScoredDocuments:
    found: dict[str, Sequence[float] | Pooled] = {}
    for keyed in by_metric.values():
        found |= {**keyed.scores.values, **keyed.scores.pooled}
    return found


def _lengths(
    texts: Aligned, run: Provenance | None, limits: LengthLimits | None
) -> tuple[list[int] | None, LengthLimits | None]:
    """The number of tokens of each text of a run, and their limits."""
    counts = provenance.token_counts(run.folder) if run else {}
    lengths = [counts[key] for key in texts.task.ids] if all(key in counts for key in texts.task.ids) else None
    if limits is None and run is not None and lengths is not None:
        # Those of decoder-only models do not count prompts.
        named = (("min_length", "min_new_tokens"), ("max_length", "max_new_tokens"))
        least, most = (next((run.search[name] for name in names if run.search.get(name)), None) for names in named)
        limits = LengthLimits(least if isinstance(least, int) else 0, most if isinstance(most, int) else 0)
    return lengths, limits


def _over_seeds(
    scores: dict[str, list[CorpusScore]], texts: Aligned, about: Sequence[Provenance | None]
) -> list[Seeds]:
    """Mean and spread over each group (by default runs that differ only in the seed), tests against the first."""
    names, groups = texts.names, texts.groups
    members: dict[str, list[int]] = {}
    for system, (name, run) in enumerate(zip(names, about, strict=True)):
        if key := (groups[system] or name) if groups else run.setup if run else "":
            members.setdefault(key, []).append(system)
    seeds = [-1 if run is None or run.seed is None else run.seed for run in about]
    if not groups:  # several runs, each with another seed
        several = {setup: systems for setup, systems in members.items() if len(systems) > 1}
        members = {setup: own for setup, own in several.items() if len({seeds[system] for system in own}) == len(own)}
    rows: list[Seeds] = []
    first = next(iter(members.values()), [])
    for key, systems in members.items():
        run = about[systems[0]]
        label = key if groups or run is None else run.label
        runs = {name: [values[system].value for system in systems] for name, values in scores.items()}
        spread = {name: significance.over_seeds(values) for name, values in runs.items()}
        test, keys, first_keys = _pairing([seeds[system] for system in systems], [seeds[system] for system in first])
        against = {}
        for name, values in runs.items() if rows else ():
            theirs = zip(first_keys, (scores[name][system].value for system in first), strict=True)
            against[name] = significance.between_seeds(dict(zip(keys, values, strict=True)), dict(theirs))
        rows.append(Seeds(label, [names[system] for system in systems], spread, against, test if rows else ""))
    for name in scores:
        # Scores that do not vary over seeds have no p, and count as a comparison; rows without a test do not.
        compared = [(row.test, row.against_first[name]) for row in rows[1:]]
        chances = [1.0 if how and isnan(own["p"]) else own["p"] for how, own in compared]
        for (_, own), corrected in zip(compared, significance.holm(chances), strict=True):
            own["p_holm"] = corrected
    return rows


def _pairing(seeds: Sequence[int], first: Sequence[int]) -> tuple[str, Sequence[int], Sequence[int]]:
    """How two groups are compared, and a key for each of their runs: those with equal keys are a pair."""
    known = all(-1 not in keys and len(set(keys)) == len(keys) for keys in (seeds, first))
    keys: tuple[Sequence[int], Sequence[int]]
    keys = (seeds, first) if known else (range(len(seeds)), range(len(first)))
    if min(map(len, keys)) < 2:
        return "", *keys
    paired = BY_SEED if known else BY_ORDER
    return paired if set(keys[0]) == set(keys[1]) else UNPAIRED, *keys


def _why_absent(name: str, metric: Metric, given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    if needed := metric.packages_needed:
        return f"{needed}."
    for text in metric.reads:
        if text in given and given[text] is None and text not in metric.optional:
            why = ", and the data of these texts have no targets" if text == "references" else ""
            return f"needs the {text}{why}. Give them with --{text} FILE."
    lacking = ", ".join(f"--set {name}.{option}=…" for option in registry.missing_options(name, options))
    return f"needs {lacking}; ngramloss docs metrics says what to give." if lacking else ""
