"""a study and its results → ``index.html``: dots and intervals first, then every table, and what the trainings were."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from datetime import date
from math import isnan, nan
from pathlib import Path
from typing import Any

from ngramloss import recipe
from ngramloss.metrics.registry import Score
from ngramloss.output.tabular import mark
from ngramloss.report import charts, page
from ngramloss.report.build import curves, flat
from ngramloss.report.forest import Estimate, Forest, draw_forest
from ngramloss.report.record import TrainingCurves
from ngramloss.report.tables import settings
from ngramloss.scoring import provenance, significance
from ngramloss.study.plan import DataSet, Study, Training
from ngramloss.study.results import Results
from ngramloss.study.stages import Stages, is_done
from ngramloss.study.tables import Comparison, SetTables, differences, plan_lines, texts_lines, untested, verdict
from ngramloss.training.precision import PRECISION
from ngramloss.version import __version__

_SCRIPTS = ("page.js", "training.js")
_NAMES = {"tune": "were tuned", "always": "are always tested", "screen": "were screened", "confirm": "were confirmed"}


def write_page(
    study: Study, every: Sequence[Stages], results: Results, sets: Sequence[SetTables], runs: Path, folder: Path
) -> Path:
    """Write ``folder/index.html`` and return its path. Curves are drawn of the trainings that are in ``runs``."""
    confirmed = any(row.scores for own in sets for row in own.rows)
    drawn = _curves(every, runs)
    left = [training for of_set in every for stage in of_set.all for training in stage.trainings]
    text = page.rendered(
        "study.html",
        _SCRIPTS,
        {"panels": [page.panel_facts(panel) for own in drawn for panel in own["panels"]]},
        folder=Path(__file__).parent,
        title=study.title,
        notes=[_answer(study, sets) if confirmed else _unconfirmed(sets), _about(study)],
        version=__version__,
        made=date.today().isoformat(),
        unscripted="Sorting and reading values off need scripts; all else is here without them.",
        study=study,
        sets=sets,
        confirmed=confirmed,
        forests=_forests([row for own in sets for row in (own.rows if confirmed else own.screening)], tested=confirmed),
        undrawn=[own.data.name for own in sets if confirmed and not any(row.scores for row in own.rows)],
        drawn=drawn,
        texts=texts_lines(study, every, runs),
        plan=plan_lines(study, every, results),
        left=[str(training) for training in dict.fromkeys(left) if not is_done(study, training, results)],
        failed=sorted({(str(result.training), result.failed) for result in results.values() if result.failed}),
        settings=settings([_settings(own.data, results) for own in sets]),
    )
    return page.write(text, folder)


def _answer(study: Study, sets: Sequence[SetTables]) -> str:
    run = [row for own in sets for row in own.rows if not isnan(row.against.get("difference", nan))]
    compared = [row for row in run if not isnan(row.against["p"])]
    found = [sentence.removesuffix(".") for row in compared if (sentence := verdict(row))]
    others = "".join(f" {sentence}" for row in run if (sentence := untested(study, row)))
    if not compared:
        return others.strip() or "No row was compared yet."
    many = f"{len(compared)} comparison{'s' * (len(compared) != 1)} with {study.baseline}"
    verb = "are" if len(found) > 1 else "is"
    listed = f"{': ' * bool(found)}{', '.join(found)}"
    left = study.comparisons - len(compared)
    planned = f" {left} more {'are' if left > 1 else 'is'} planned." if left > 0 else ""
    return f"{len(found) or 'None'} of {many} {verb} significant at 5% (Holm){listed}.{planned}{others}"


def _unconfirmed(sets: Sequence[SetTables]) -> str:
    if not any(row.scores for own in sets for row in own.screening):
        return "There are no results yet."
    why = "rows are chosen by it, and a row that was chosen by its luck looks better than it is"
    return f"Nothing is confirmed yet. The plot shows the screening, on validation data: {why}."


def _about(study: Study) -> str:
    names = [data.name for data in study.sets]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    rows, seeds = len(study.objectives), len(study.confirmation)
    best = f"the best {study.confirm} of the others"
    chosen = "; ".join([*study.always, best]) if study.always else best[0].upper() + best[1:]
    many = f"{chosen} are confirmed, compared" if study.screening else "All of them are compared"
    compared = f"{many} with {study.baseline} on test data, with {seeds} seed{'s' * (seeds > 1)}"
    return f"Study {study.name}: {rows} rows on {listed}. {compared}."


def _forests(rows: Sequence[Comparison], *, tested: bool) -> list[tuple[Score, Forest]]:
    """A plot for each primary score: differences in different scores have no common axis."""
    scored = [row for row in rows if row.scores]
    drawn = []
    for number, (primary, score) in enumerate({row.data.primary: row.data.score for row in scored}.items()):
        estimates = [_estimate(row, rows, tested=tested) for row in scored if row.data.primary == primary]
        drawn.append((score, draw_forest(estimates, str(number), score=score.label, decimals=score.decimals)))
    return drawn


def _estimate(row: Comparison, rows: Sequence[Comparison], *, tested: bool) -> Estimate:
    values, pairs = list(row.scores.values()), differences(row, rows) if row.against else []
    spread, against, nothing = significance.over_seeds(values), row.against, {"low": nan, "high": nan}
    # The screening chooses and does not test; the intervals of its two seeds or so would hide all else.
    ends, test = (spread, against or nothing) if tested else (nothing, nothing)
    return Estimate(
        row.objective,
        spread["mean"],
        ends["low"],
        ends["high"],
        against.get("difference", nan),
        test["low"],
        test["high"],
        mark=mark(against.get("p_holm")),
        runs=values if len(values) > 1 else (),
        difference_runs=pairs if len(pairs) > 1 else (),
        is_first=not against,
        data=f"{row.data.name}, {row.data.score.label} of {row.data.decoding}",
    )


def _curves(every: Sequence[Stages], runs: Path) -> list[dict[str, Any]]:
    """For each set the curves of its last stage of which a run is there; ``first`` is the number of its first panel."""
    drawn: list[dict[str, Any]] = []
    for of_set in every:
        staged = ((stage.name, list(_logs(stage.trainings, runs))) for stage in reversed(of_set.all))
        name, logs = next((each for each in staged if each[1]), ("", []))
        if logs:
            panels, first = charts.draw_training(logs, f"t{len(drawn)}-"), sum(len(own["panels"]) for own in drawn)
            about = {"data": of_set.data.name, "rows": f"that {_NAMES[name]}", "runs": charts.run_groups(logs)}
            drawn.append({**about, "panels": panels, "first": first})
    return drawn


def _logs(trainings: Sequence[Training], runs: Path) -> Iterator[TrainingCurves]:
    for training in trainings:
        rows = provenance.log(training.run_folder(runs))
        if rows:
            row = " ".join([training.objective, *training.setting])
            yield TrainingCurves(f"{row}, seed {training.seed}", curves(rows), row, training.objective)


def _settings(data: DataSet, results: Results) -> dict[str, str]:
    own = [result for result in results.values() if result.training.set == data.name and not result.failed]
    known: dict[str, Any] = {"recipe": data.base.name, "primary score": f"{data.primary} of {data.decoding}"}
    known |= {key: value for key, value in recipe.flat(data.base) if key not in ("objective", "train.seed")}
    for result in sorted(own, key=lambda result: not result.facts.get("data.leave_out")):  # whole data count last
        known[f"texts of {result.training.split}"] = result.count
        named = {"candidates": result.facts.get("data.candidates", "")}  # rows may have different ones
        made_of = {name: value for name, value in result.made_of.items() if value}
        called = {name: name if name == PRECISION else f"fingerprint of {named.get(name, name)}" for name in made_of}
        known |= {called[name]: value for name, value in made_of.items()}
    seconds = [result.train_seconds for result in own if result.train_seconds is not None]
    if seconds:
        known["seconds of a training, median"] = round(statistics.median(seconds))
    if own:
        known["version of ngramloss"] = ", ".join(sorted({result.version for result in own}))
    return flat(known)
