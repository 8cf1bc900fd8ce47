"""scores of several systems → a table for a terminal, in Markdown or LaTeX, JSON, and a line for each document."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from ngramloss.metrics.registry import Score
from ngramloss.output import escape, tabular
from ngramloss.output.console import fixed, is_number
from ngramloss.output.tabular import Cell, Head, Row, Table, chance, mark, signed
from ngramloss.scoring import provenance
from ngramloss.scoring.results import Result, Seeds
from ngramloss.scoring.score_cache import number
from ngramloss.scoring.significance import CorpusScore, in_words
from ngramloss.storage.files import write_whole

Difference = tuple[float | None, float | None]  # And its p, corrected


def write_documents(result: Result, path: Path) -> None:
    """Write the scores of every document, a line of JSON for each document of each system."""
    lines = []
    for name, columns in zip(result.names, result.documents, strict=True):
        for index, key in enumerate(result.ids):
            row = {score: number(values[index]) for score, values in columns.items()}
            lines.append(json.dumps({"system": name, "id": key, **row}))
    write_whole(path, "\n".join(lines) + "\n")


def record(result: Result) -> dict[str, Any]:
    """The result as ``{"systems": [{"name", "scores", …}], …}``. A score that is missing, NaN or infinite is None."""
    systems = []
    for index, name in enumerate(result.names):
        scores = {score: values[index] for score, values in result.scores.items()}
        run = result.runs[index]
        system: dict[str, Any] = {
            "name": name,
            "scores": {score: number(value.value) for score, value in scores.items()},
            "intervals": {score: [number(value.low), number(value.high)] for score, value in scores.items()},
            "signature": result.signatures,
            "audit": result.audit[index],
        }
        if run is not None:
            system |= {"label": run.label, "generation": provenance.written_by(run)}
        if index:
            system["against_first"] = {score: _against(value) for score, value in scores.items()}
        systems.append(system)
    return {
        "systems": systems,
        "documents": len(result.ids),
        "decoded_differently": result.decoded_differently,
        "lower_is_better": _lower(result),
        "absent": result.absent,
        "left_out": result.left_out,
        "notes": result.notes,
        "over_seeds": [_seeds(seeds) for seeds in result.seeds],
    }


def as_json(result: Result) -> str:
    """The record as text."""
    return escape.in_json(json.dumps(record(result), indent=1, allow_nan=False, ensure_ascii=False))


def table(result: Result) -> Table:
    """A row for each system, or for each group if there are groups, and a column for each score."""
    if result.groups:
        return _seed_table(result, corner="group")
    described, rows = result.described, []
    for index, (name, run) in enumerate(zip(result.names, result.runs, strict=True)):
        cells = [cell(scores[index], described[score]) for score, scores in result.scores.items()]
        rows.append(Row(name, name, cells, "baseline" if run and run.is_baseline else "system"))
    return Table(heads(result), rows, corner="system", intervals=True)


def heads(result: Result) -> list[Head]:
    """A head for each score, by its name."""
    return [Head(name, lower=described.better == "lower") for name, described in result.described.items()]


def cell(value: CorpusScore, score: Score) -> Cell:
    """A score of one system with its interval, mark and difference to the first system."""
    if not is_number(value.value):
        return Cell("–")
    digits, difference = score.decimals, ""
    title = [f"{score.label} {value.value:.{digits}f}"]
    if is_number(value.low) and is_number(value.high):
        title.append(f"95% interval {value.low:.{digits}f} to {value.high:.{digits}f}")
    if is_number(value.difference):
        difference = signed(value.difference, digits)
        title.append(f"against the first {difference}")
        tests = {**value.chances, "Holm": value.p_holm}
        title += [f"p {chance(p)} ({name})" for name, p in tests.items() if is_number(p)]
    interval = tabular.half_width(value.low, value.high, digits)
    shown, stars = fixed(value.value, digits), mark(value.p_holm)
    return Cell(shown, value.value, stars, interval, difference, title="; ".join(title))


def seed_cell(seeds: Seeds, name: str, score: Score) -> Cell:
    """The mean of a score over seeds with its standard deviation, mark and difference to the first system's."""
    digits, spread, test = score.decimals, seeds.spread[name], seeds.against_first.get(name, {})
    if not is_number(spread["mean"]):
        return Cell("–")
    title = [f"from {fixed(spread['low'], digits)} to {fixed(spread['high'], digits)}"] * is_number(spread["low"])
    if is_number(test.get("low")):
        title.append(f"difference from {signed(test['low'], digits)} to {signed(test['high'], digits)}")
    title += [f"p {p}"] if (p := chance(test.get("p"))) else []
    width = f"±{spread['spread']:.{digits}f}" if is_number(spread["spread"]) else ""
    difference = signed(test["difference"], digits) if is_number(test.get("difference")) else ""
    mean, stars = spread["mean"], mark(test.get("p_holm"))
    return Cell(fixed(mean, digits), mean, stars, width, difference, title="; ".join(title))


def as_text(result: Result) -> str:
    """The table for a terminal, what the marks mean, spread over seeds, the audit, and every signature."""
    differently = result.decoded_differently
    lines = [*differently, *[""] * bool(differently), tabular.as_text(table(result)), ""]
    over = "± half of the 95% interval over documents (bootstrap)."
    if len(result.ids) == 1:
        over = "±0.00: there is one document, so nothing is known of others. Score more of them for an interval."
    lines += _seed_legend(result) if result.groups else [over]
    if len(result.names) > 1 and not result.groups:
        several = f", corrected (Holm) for the {len(result.names) - 1} comparisons" if len(result.names) > 2 else ""
        tests = in_words(chain.from_iterable(result.scores.values()))
        lines += [f"* and **: differs from {result.names[0]} at 5% and 1% in {tests}{several}.", *verdicts(result)]
    if _lower(result):
        lines += ["↓: lower is better."]
    without = "documents without a score in some system are left out"
    lines += [f"{name}: {count} {without}." for name, count in result.left_out.items()]
    if result.seeds and not result.groups:
        lines += ["", tabular.as_text(_seed_table(result, corner="over seeds")), "", *_seed_legend(result)]
    lines += [f"{name}: {', '.join(odd)}." for name, odd in zip(result.names, result.audit, strict=True) if odd]
    lines += [f"{metric}: {note}" for metric, notes in result.notes.items() for note in notes]
    lines += [f"{metric} was left out: {why}" for metric, why in result.absent.items()]
    return "\n".join([*lines, *result.signatures.values(), *_written(result)])


def _written(result: Result) -> list[str]:
    written = {name: provenance.written_by(run) for name, run in zip(result.names, result.runs, strict=True) if run}
    parts = {name: text.split("|") for name, text in written.items() if text}
    shared = [part for part in next(iter(parts.values()), []) if all(part in own for own in parts.values())]
    if len(parts) < 2:
        return [f"{name}: {'|'.join(own)}" for name, own in parts.items()]
    own_parts = {name: "|".join(part for part in own if part not in shared) for name, own in parts.items()}
    return ["|".join(shared), *(f"{name}: {own}" for name, own in own_parts.items())]


def _lower(result: Result) -> list[str]:
    return [name for name, described in result.described.items() if described.better == "lower"]


def _against(score: CorpusScore) -> dict[str, Any]:
    return {
        "difference": number(score.difference),
        "interval": [number(score.difference_low), number(score.difference_high)],
        **{f"p_{name}": number(p) for name, p in score.chances.items()},
        "p_holm": number(score.p_holm),
    }


def _seeds(seeds: Seeds) -> dict[str, Any]:
    scores, against = (
        {name: {key: number(value) for key, value in values.items()} for name, values in by_score.items()}
        for by_score in (seeds.spread, seeds.against_first)
    )
    known = {"label": seeds.label, "runs": seeds.names, "scores": scores}
    return {**known, "test": seeds.test or None, "against_first": against}


def _seed_legend(result: Result) -> list[str]:
    first, *others = result.seeds
    brackets = f"; in brackets the difference to {first.label} and, where it is tested, its 95% interval."
    lines = ["± standard deviation over seeds" + (brackets if others else ".")]
    tests = seed_tests(result.seeds)
    return [*lines, *[f"* and **: {tests}."] * bool(tests), *seed_verdicts(result), *untested(result.seeds)]


def seed_tests(rows: Sequence[Seeds]) -> str:
    """What the tests over seeds compare, and how; empty if there are none."""
    tested = [row for row in rows if row.test]
    if not tested:
        return ""
    ways = list(dict.fromkeys(row.test for row in tested))
    how = ways[0] if len(ways) == 1 else ", ".join(f"{row.label} {row.test}" for row in tested)
    several = f", corrected (Holm) for the {len(tested)} comparisons" if len(tested) > 1 else ""
    return f"the mean over seeds differs from that of {rows[0].label} at 5% and 1% (Student's t, {how}){several}"


def untested(rows: Sequence[Seeds]) -> list[str]:
    """Which rows have no test over seeds, and why, in sentences; none if all have."""
    single = [row.label for row in rows if len(row.names) == 1]
    few = f"No test over seeds with {', '.join(single)}, of one run: a test needs two runs or more of both."
    tested = {row.label: row.against_first.items() if row.test else () for row in rows}
    same = {label: [name for name, test in own if not is_number(test["p"])] for label, own in tested.items()}
    steady = ", ".join(f"{label} ({', '.join(names)})" for label, names in same.items() if names)
    zero = f"No test over seeds where the difference to {rows[0].label} does not vary: {steady}."
    return [few] * bool(single and len(rows) > 1) + [zero] * bool(steady)


def verdicts(result: Result) -> list[str]:
    """Which systems are better and which are worse than the first by the tests over documents."""
    tests: dict[str, dict[str, Difference]] = {name: {} for name in result.names[1:]}
    for score, (_, *values) in result.scores.items():
        for test, value in zip(tests.values(), values, strict=True):
            test[score] = value.difference, value.p_holm
    return _verdicts(result, result.names[0], tests)


def seed_verdicts(result: Result) -> list[str]:
    """The same by the tests over seeds."""
    rows = {row.label: row.against_first.items() for row in result.seeds[1:]}
    tests = {row: {name: (test["difference"], test.get("p_holm")) for name, test in own} for row, own in rows.items()}
    return _verdicts(result, result.seeds[0].label, tests) if tests else []


def _verdicts(result: Result, first: str, tests: Mapping[str, Mapping[str, Difference]]) -> list[str]:
    """A sentence for better systems and one for worse ones. Scores that only describe texts are neither."""
    found: dict[str, dict[str, list[str]]] = {"better": {}, "worse": {}}
    for name, scores in tests.items():
        for score, (difference, p) in scores.items():
            better = result.described[score].better
            if mark(p) and difference and better != "neither":
                word = "better" if (difference > 0) == (better == "higher") else "worse"
                found[word].setdefault(name, []).append(score)
    named = {word: [f"{name} ({', '.join(scores)})" for name, scores in each.items()] for word, each in found.items()}
    return [f"{word.capitalize()} than {first}: {'; '.join(each)}." for word, each in named.items() if each]


def _seed_table(result: Result, *, corner: str) -> Table:
    """A row for each system with several seeds: mean, standard deviation, mark, and the difference to the first."""
    described = result.described
    rows = []
    for seeds in result.seeds:
        runs, cells = len(seeds.names), []
        for name in seeds.spread:
            shown = seed_cell(seeds, name, described[name])
            if name in seeds.against_first and shown.value is not None:
                test = seeds.against_first[name]
                ends = [signed(test[part], described[name].decimals) for part in ("low", "high")]
                interval = f", {' to '.join(ends)}" if is_number(test["low"]) else ""
                shown = replace(shown, note=signed(test["difference"], described[name].decimals) + interval)
            cells.append(shown)
        rows.append(Row(seeds.label, seeds.label, [Cell(str(runs), runs), *cells]))
    return Table([Head("runs"), *heads(result)], rows, corner=corner, intervals=True)
