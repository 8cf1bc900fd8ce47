"""a study and its results → its plan with an estimate, and tables over seeds: chosen, confirmed, all other scores."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import isnan, nan
from pathlib import Path
from typing import NamedTuple

from ngramloss.metrics.registry import Score, scores_of
from ngramloss.output import escape, tabular
from ngramloss.output.console import fixed, is_number
from ngramloss.output.tabular import Cell, Head, Row, Table, chance, mark, signed
from ngramloss.scoring import provenance, significance
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study.plan import TEST, VALIDATION, DataSet, Rows, Study, Training, trainings_of
from ngramloss.study.results import DecodingResult, Results, documents_of
from ngramloss.study.stages import Stages, has_failed, is_done, new_in, primary_scores, time_left, why_stopped

LEVEL, POWER = 0.05, 0.8
SAMPLES, SHUFFLES = significance.SAMPLES, significance.SHUFFLES  # Of the tests over documents
SHAPE = ("words", "repeated3")  # The scores of the metric ``shape`` that are shown


class Comparison(NamedTuple):
    """A row of a set over its seeds, and its difference to the baseline."""

    data: DataSet  # the set
    objective: str  # the row
    setting: tuple[str, ...]  # that was tuned
    scores: dict[int, float]  # seed → primary score
    failed: dict[int, str]  # seed → why it has none; a seed that was not trained yet is in neither
    seeds: int  # how many there should be
    # difference, low, high, p and p_holm over the seeds that the baseline has, too; empty for the baseline
    against: dict[str, float]
    p_documents: float = nan  # of the paired tests over documents, corrected likewise; NaN without
    smallest: float = nan  # the smallest difference that these seeds could have shown; NaN without


Column = tuple[Head, Callable[[Comparison], Cell]]


class Shown(NamedTuple):
    """A table, and what stands above and below it."""

    title: str  # what it is, without the name of its set
    table: Table  # the table
    failures: Sequence[str] = ()  # a sentence for each seed that failed
    notes: Sequence[str] = ()  # what its columns are
    warnings: Sequence[str] = ()  # what stands above the table


class SetTables(NamedTuple):
    """All that is shown of a set. A table without results is None."""

    data: DataSet  # the set
    screening: list[Comparison]  # its rows on the validation data
    rows: list[Comparison]  # its confirmed rows on the test data
    signatures: list[tuple[str, str]]  # how its texts were scored and written, each a name and the signature
    speeds: str  # how speeds were measured
    tuned: Shown | None = None  # the primary score of each setting that was tried
    screened: Shown | None = None  # the primary score of all rows over the screening seeds
    confirmed: Shown | None = None  # the primary score of the confirmed rows, with tests
    others: Sequence[Shown] = ()  # all scores of the confirmed rows, a table for each decoding
    stopped: Sequence[str] = ()  # why no row is chosen and what to do, then the failures; empty if one is


def plan_text(study: Study, every: Sequence[Stages], results: Results, *, parallel: int = 1) -> str:
    """The plan: sets, stages, what is done, and how long the rest will take."""
    return "\n  ".join([f"{study.name}: {study.title}", *plan_lines(study, every, results, parallel=parallel)])


def plan_lines(study: Study, every: Sequence[Stages], results: Results, *, parallel: int = 1) -> list[str]:
    """A line for each set with what is done, and one with what is left."""
    lines = []
    for of_set in every:
        stages, data = [], of_set.data
        for stage in of_set.all:
            new = new_in(of_set, stage)
            done = sum(is_done(study, training, results) for training in new)
            failed = sum(has_failed(study, training, results) for training in new)
            broken = f" ({failed} failed)" if failed else ""
            stages += [f"{stage.name} {done - failed} of {stage.planned}{broken}"] if stage.planned else []
        lines.append(f"{data.name}, {data.score.label} of {data.decoding}: {', '.join(stages)} trainings done")
    trainings = sum(stage.planned for of_set in every for stage in of_set.all)
    seconds, unknown = time_left(study, every, results)
    many = f"{trainings} trainings, {trainings * len(study.decodings)} decodings"
    return [*lines, f"{many}; {_estimate(seconds / parallel, unknown)}"]


def comparisons(study: Study, every: Sequence[Stages], results: Results) -> list[Comparison]:
    """The confirmed rows of all sets on the test data; p is corrected (Holm) for all of them together.

    Rows that have no test yet count as comparisons with p = 1, so that no p becomes larger when they are done.
    """
    by_set = (_rows(study, each.data, each.tested, study.confirmation, TEST, results) for each in every)
    rows = list(chain.from_iterable(by_set))
    compared = [row for row in rows if row.against]
    family = _family(study, compared)
    p_seeds = _corrected([row.against["p"] for row in compared], family)
    p_documents = _corrected([_over_documents(row, rows, results) for row in compared], family)
    for row, by_seeds, by_documents in zip(compared, p_seeds, p_documents, strict=True):
        pairs = differences(row, rows)
        spread = statistics.stdev(pairs) if len(pairs) > 1 else nan
        smallest = significance.smallest_difference(spread, len(pairs), level=LEVEL / family, power=POWER)
        against = row.against | {"p_holm": by_seeds}
        rows[rows.index(row)] = row._replace(against=against, p_documents=by_documents, smallest=smallest)
    return rows


def _family(study: Study, rows: Sequence[Comparison]) -> int:
    """How many comparisons are corrected for together: those that are planned, or more if more were made."""
    return max(study.comparisons, sum(bool(row.against) for row in rows))


def set_tables(study: Study, every: Sequence[Stages], results: Results) -> list[SetTables]:
    """For each set its tables: what was tuned, screened and confirmed, and the other scores of the confirmed rows."""
    tested = comparisons(study, every, results)
    seeds = f"{len(study.confirmation)} seed{'s' * (len(study.confirmation) > 1)}"
    found = []
    for of_set in every:
        data = of_set.data
        primary = f"{data.score.label} of {data.decoding}"
        tried = of_set.all[0].trainings
        screening = _rows(study, data, of_set.settings or {}, data.screening, VALIDATION, results)
        rows = [row for row in tested if row.data is data]
        made = [result for result in results.values() if result.training.set == data.name and not result.failed]
        tuned = screened = confirmed = None
        others = list[Shown]()
        if any((training, data.decoding) in results for training in tried):
            title = f"tuned on validation data, {primary}, seed {tried[0].seed}"
            tuned = Shown(title, _tuned(tried, of_set, data, results))
        if any(row.scores or row.failed for row in screening):
            title = f"screened on validation data, {primary}"
            table = _screened(study, of_set, screening, results)
            notes = [*_parts(made, VALIDATION), *unread(made, VALIDATION)]
            screened = Shown(title, table, _failures(screening), notes, _decoded(made, data.decoding, VALIDATION))
        if any(row.scores or row.failed for row in rows):
            title = f"{'confirmed' if study.screening else 'compared'} on test data, {primary}, {seeds}"
            notes = [sentence for row in rows for sentence in (verdict(row), untested(study, row)) if sentence]
            notes += [*_parts(made, TEST), *unread(made, TEST), *_engines(made)]
            notes += _legend(_family(study, tested), study)
            confirmed = Shown(title, _confirmed(rows), _failures(rows), notes, _decoded(made, data.decoding, TEST))
            for decoding in study.decodings:
                table, warnings = _others(study, rows, decoding, results), _decoded(made, decoding, TEST)
                others.append(Shown(f"all scores of {decoding} on test data", table, warnings=warnings))
        stopped = [escape.name(line) for line in why_stopped(study, of_set, results)]
        shown = tuned, screened, confirmed, others, stopped
        many = " and ".join(map(str, sorted({result.parallel for result in made})))
        speeds = f"Speeds were measured with {many} at a time on a machine; written/s includes loading the model."
        found.append(SetTables(data, screening, rows, _signatures(made), speeds, *shown))
    return found


def as_text(sets: Sequence[SetTables], *, markdown: bool = False) -> str:
    """All tables, for a terminal or in Markdown."""
    parts: list[str] = []
    for own in sets:
        for shown in filter(None, [own.tuned, own.screened, own.confirmed, *own.others]):
            # In a terminal, the minus that other programs read.
            text = tabular.as_markdown(shown.table).text if markdown else tabular.as_text(shown.table).replace("−", "-")
            notes = [*shown.failures, *shown.notes]
            head = [f"{own.data.name}: {shown.title}", *shown.warnings]
            parts.append("\n".join([*head, "", text, *(["", *notes] if notes else [])]))
        if own.stopped:
            parts.append("\n  ".join([f"{own.data.name}: {own.stopped[0]}", *own.stopped[1:]]))
        if own.confirmed:
            parts.append("\n".join([*(signature for _, signature in own.signatures), own.speeds]))
    return "\n\n".join(parts) if parts else "There are no results yet."


def texts_lines(study: Study, every: Sequence[Stages], runs: Path) -> list[str]:
    """For each set, the command that shows the texts of its rows side by side, for the first seed that has some."""
    lines = []
    for of_set in every:
        data, folders = of_set.data, dict[tuple[str, int], list[str]]()
        for stage in reversed(of_set.all):
            for training in stage.trainings:
                folder = study.text_folder(training, data.decoding, runs)
                if RunFolder(folder).predictions.is_file():
                    folders.setdefault((stage.name, training.seed), []).append(shlex.quote(str(folder)))
        if folders:
            (_, seed), texts = next(iter(folders.items()))
            command = f"ngramloss report {' '.join(texts)} --out {data.name}-texts"
            lines.append(f"{data.name}, texts of seed {seed}: {command}")
    return lines


def _rows(
    study: Study, data: DataSet, settings: Rows, seeds: Sequence[int], split: str, results: Results
) -> list[Comparison]:
    """The rows of a set on a split, compared with the baseline over the seeds that both have."""
    rows: list[Comparison] = []
    for objective, setting in settings.items():
        trainings = trainings_of(data.name, {objective: setting}, seeds, split)
        scores = primary_scores(data, trainings, results)
        known = ((training.seed, results.get((training, data.decoding))) for training in trainings)
        failed = {seed: result.failed or "no score" for seed, result in known if result and seed not in scores}
        against: dict[str, float] = {}
        if objective != study.baseline:
            against = dict.fromkeys(("difference", "low", "high", "p"), nan)
            both = {seed: score for seed, score in scores.items() if rows and seed in rows[0].scores}
            if both and rows[0].objective == study.baseline:
                against = significance.between_seeds(both, {seed: rows[0].scores[seed] for seed in both})
        rows.append(Comparison(data, objective, setting, scores, failed, len(seeds), against))
    return rows


def differences(row: Comparison, rows: Sequence[Comparison]) -> list[float]:
    """The difference to the baseline for each seed that both have."""
    first, seeds = _paired(row, rows)
    return [row.scores[seed] - first.scores[seed] for seed in seeds]


def _paired(row: Comparison, rows: Sequence[Comparison]) -> tuple[Comparison, list[int]]:
    """The first row of a row's set, and the seeds that both have; none if it is not the baseline."""
    first = next(other for other in rows if other.data is row.data)
    return first, [seed for seed in row.scores if seed in first.scores and not first.against]


def verdict(row: Comparison) -> str:
    """Whether a row is better or worse than the baseline, if the difference is significant; else empty."""
    if not mark(row.against.get("p_holm")):
        return ""
    is_better = (row.against["difference"] > 0) == (row.data.score.better == "higher")
    return f"{row.objective} is {'better' if is_better else 'worse'} on {row.data.name} ({_difference(row)})."


def untested(study: Study, row: Comparison) -> str:
    """Why a row has no test over seeds: it was not run, with too few seeds, or they do not vary; else empty."""
    test, name = row.against, f"{row.objective} on {row.data.name}"
    if not test or not isnan(test["p"]):
        return ""
    if isnan(test["difference"]):
        return f"{name} was not compared: no seed has a score of it and of {study.baseline} yet."
    if isnan(test["low"]):
        return f"{name} was not tested: a test needs two seeds or more of it and of {study.baseline}."
    return f"{name} was not tested: its difference is the same with every seed ({_difference(row)})."


def _difference(row: Comparison) -> str:
    return f"{signed(row.against['difference'], row.data.score.decimals)} {row.data.score.label}"


def _corrected(chances: Sequence[float], family: int) -> list[float]:
    whole = [1.0 if isnan(p) else p for p in chances] + [1.0] * (family - len(chances))
    return [nan if isnan(p) else holm for p, holm in zip(chances, significance.holm(whole), strict=False)]


def _over_documents(row: Comparison, rows: Sequence[Comparison], results: Results) -> float:
    """The larger p of both paired tests over documents, of the runs of all seeds that a row and the baseline have."""
    first, both = _paired(row, rows)
    if not both:
        return nan
    systems = []
    for each in (first, row):
        trainings = trainings_of(row.data.name, {each.objective: each.setting}, both, TEST)
        runs = [results[training, row.data.decoding] for training in trainings]
        systems.append({row.data.primary: documents_of(row.data, runs)})
    test = significance.compare(systems, samples=SAMPLES, shuffles=SHUFFLES)[row.data.primary][1]
    return max((nan if p is None else p for p in test.chances.values()), key=lambda p: (isnan(p), p))


def _table(rows: Sequence[Comparison], columns: Sequence[Column]) -> Table:
    shown = [Row(row.objective, row.objective, [cell(row) for _, cell in columns]) for row in rows]
    return Table([head for head, _ in columns], shown, corner="row", intervals=True)


def _tuned(tried: Sequence[Training], of_set: Stages, data: DataSet, results: Results) -> Table:
    rows: dict[str, dict[tuple[str, ...], Cell]] = {}
    for training in tried:
        chosen = (of_set.settings or {}).get(training.objective) == training.setting
        score = primary_scores(data, [training], results).get(training.seed)
        result = results.get((training, data.decoding))
        text = "failed" if result and result.failed else fixed(score, data.score.decimals)
        rows.setdefault(training.objective, {})[training.setting] = Cell(text, score, note="chosen" * chosen)
    heads = [Head(" ".join(setting)) for setting in dict.fromkeys(training.setting for training in tried)]
    return Table(heads, [Row(name, name, [*cells.values()]) for name, cells in rows.items()], corner="row")


def _screened(study: Study, of_set: Stages, rows: Sequence[Comparison], results: Results) -> Table:
    """Means of the primary score over the screening seeds, with each decoding, and which rows go on."""
    data, score, confirmed = rows[0].data, rows[0].data.score, of_set.confirmed or {}

    def written(decoding: str, row: Comparison) -> Cell:
        return _mean_of(_runs(study, row, decoding, VALIDATION, results), data.primary, score)

    others = [decoding for decoding in study.decodings if decoding != data.decoding]
    columns: list[Column] = [
        (Head("setting"), lambda row: Cell(" ".join(row.setting))),
        (Head("seeds"), _count),
        (Head(data.primary, score.label), lambda row: mean_cell([*row.scores.values()], score)),
        (
            Head("difference"),
            lambda row: Cell(signed(row.against["difference"], score.decimals) if row.against else ""),
        ),
        *((Head(f"{data.primary} {name}", f"{score.label} {name}"), partial(written, name)) for name in others),
        (Head("confirmed"), lambda row: Cell("yes" * (row.objective in confirmed))),
    ]
    return _table(rows, columns if data.grid else columns[1:])


def _confirmed(rows: Sequence[Comparison]) -> Table:
    """The primary score: mean, difference, interval, both tests, and what could have been shown."""
    data, score = rows[0].data, rows[0].data.score

    change = partial(signed, decimals=score.decimals)

    def interval(test: dict[str, float]) -> str:
        return f"{change(test['low'])} to {change(test['high'])}" if is_number(test["low"]) else "–"

    def p_cell(p: float) -> Cell:
        return Cell(chance(p) or "–", p)

    def compared(cell: Callable[[Comparison, dict[str, float]], Cell]) -> Callable[[Comparison], Cell]:
        return lambda row: cell(row, row.against) if row.against else Cell("")

    return _table(
        rows,
        [
            (Head("seeds"), _count),
            (
                Head(data.primary, score.label, score.better == "lower"),
                lambda row: mean_cell([*row.scores.values()], score),
            ),
            (
                Head("difference"),
                compared(lambda _, test: Cell(change(test["difference"]), test["difference"], mark(test["p_holm"]))),
            ),
            (Head("95% interval"), compared(lambda _, test: Cell(interval(test)))),
            (Head("p"), compared(lambda _, test: p_cell(test["p"]))),
            (Head("p (Holm)"), compared(lambda _, test: p_cell(test["p_holm"]))),
            (Head("p documents (Holm)"), compared(lambda row, _: p_cell(row.p_documents))),
            (Head("could show"), compared(lambda row, _: Cell(fixed(row.smallest, score.decimals), row.smallest))),
        ],
    )


def _others(study: Study, rows: Sequence[Comparison], decoding: str, results: Results) -> Table:
    """Means over seeds of all scores of one decoding, and speeds."""
    runs = {row.objective: _runs(study, row, decoding, TEST, results) for row in rows}
    there = {name for each in runs.values() for run in each for name in run.scores}

    def scored(name: str, score: Score, row: Comparison) -> Cell:
        return _mean_of(runs[row.objective], name, score)

    def speed(speeds: list[float]) -> Cell:
        return Cell(fixed(statistics.mean(speeds), 1) if speeds else "–")

    scores: dict[str, Score] = {}
    for metric in rows[0].data.metrics:
        shown = SHAPE if metric == "shape" else there
        scores |= {name: score for name, score in scores_of(metric).items() if name in there and name in shown}
    return _table(
        rows,
        [
            *((Head(name, x.label, x.better == "lower"), partial(scored, name, x)) for name, x in scores.items()),
            (
                Head("trained/s"),
                lambda row: speed(
                    [run.docs_per_second for run in runs[row.objective] if run.docs_per_second is not None]
                ),
            ),
            (
                Head("written/s"),
                lambda row: speed([run.count / run.write_seconds for run in runs[row.objective] if run.write_seconds]),
            ),
        ],
    )


def _runs(study: Study, row: Comparison, decoding: str, split: str, results: Results) -> list[DecodingResult]:
    seeds = row.data.screening if split == VALIDATION else study.confirmation
    trainings = trainings_of(row.data.name, {row.objective: row.setting}, seeds, split)
    found = (results.get((training, decoding)) for training in trainings)
    return [result for result in found if result is not None and not result.failed]


def _mean_of(runs: Sequence[DecodingResult], name: str, score: Score) -> Cell:
    return mean_cell([value for run in runs if (value := run.scores.get(name)) is not None], score)


def mean_cell(values: Sequence[float], score: Score) -> Cell:
    """The mean over seeds and their standard deviation."""
    spread = f"±{statistics.stdev(values):.{score.decimals}f}" if len(values) > 1 else ""
    mean = statistics.mean(values) if values else None
    return Cell(fixed(mean, score.decimals), mean, interval=spread)


def _count(row: Comparison) -> Cell:
    done = len(row.scores)
    return Cell(f"{done} of {row.seeds}" if done != row.seeds else str(done), done)


def _failures(rows: Sequence[Comparison]) -> list[str]:
    failed = [(f"{row.objective}, seed {seed}", why) for row in rows for seed, why in row.failed.items()]
    return [escape.name(f"{what} failed and is in no mean: {why}") for what, why in failed]


def _legend(family: int, study: Study) -> list[str]:
    """What the columns of the confirmed rows are; nothing where none is compared."""
    if not family:
        return []
    rows = "confirmed rows" if study.screening else "rows"
    tests = " and ".join(f"the paired {name}" for name in significance.TESTS)
    return [
        "± standard deviation over seeds. Difference, interval and p: Student's t, paired by seed, against "
        f"{study.baseline}.",
        f"p (Holm): corrected for {family} comparison{'s' * (family > 1)}, all {rows} of all sets; * and **: "
        "below 5% and 1%.",
        f"p documents (Holm): the larger p of {tests} over documents, all seeds together, corrected likewise.",
        f"could show: the smallest true difference that a paired t-test at 5% / {family} finds with a probability of "
        f"{POWER:.0%}, if differences between seeds vary as they do here.",
    ]


def _signatures(own: Sequence[DecodingResult]) -> list[tuple[str, str]]:
    """How texts were scored and written, each way once."""
    found = [pair for result in own for pair in result.signatures.items()]
    for result in own:
        parts = [part for part in result.generation.split("|") if not part.startswith("weights:")]
        found += [(parts[0], "|".join(parts))] if result.generation else []
    return list(dict.fromkeys(found))


def _engines(own: Sequence[DecodingResult]) -> list[str]:
    """A note if the texts of a set were written by several engines: rounding may choose other words."""
    parts = (dict(part.partition(":")[::2] for part in result.generation.split("|")) for result in own)
    engines = Counter(f"{part['engine']} in {part.get('precision')}" for part in parts if "engine" in part)
    listed = " and ".join(f"{name} ({count})" for name, count in sorted(engines.items()))
    note = f"Texts were written by different engines, {listed}: where probabilities are close, they may differ."
    return [note] if len(engines) > 1 else []


def _decoded(own: Sequence[DecodingResult], decoding: str, split: str) -> list[str]:
    """A warning if rows decoded differently, although a study gives all of them the same settings."""
    shown = [result for result in own if (result.decoding, result.training.split) == (decoding, split)]
    return provenance.decoded_differently((result.training.objective, result.generation) for result in shown)


def _parts(own: Sequence[DecodingResult], split: str) -> list[str]:
    """A note if rows of which this split was written were trained on a part of the data."""
    shown = [result for result in own if result.training.split == split]
    rows = {result.training.objective: result.facts.get("data.leave_out") for result in shown}
    left_out, same = [f"{row} (part {part})" for row, part in rows.items() if part], set(rows.values())
    listed = f"all rows (part {same.pop()})" if len(same) == 1 else "; ".join(left_out)
    return [f"Trained without a part of the data (data.leave_out): {listed}."] if left_out else []


def unread(own: Sequence[DecodingResult], split: str) -> list[str]:
    """Notes of metrics on texts of this split that they do not read well, once for each metric."""
    notes = {name: said for result in own if result.training.split == split for name, said in result.notes.items()}
    found = [escape.name(f"{name}: {sentence}") for name, said in notes.items() for sentence in said]
    return [*found, "A study names such options in metric_options of the set."] if found else []


def _estimate(seconds: float, unknown: int) -> str:
    if not seconds:
        return "how long they take is not known before the first is finished" if unknown else "nothing is left"
    minutes = seconds / 60
    text = f"about {minutes / 60:.1f} hours left" if minutes > 90 else f"about {max(1, round(minutes))} minutes left"
    return text + (f", and {unknown} trainings of unknown length" if unknown else "")
