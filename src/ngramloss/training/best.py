"""``train.best`` of a recipe → what selects the weights that become the model: a term, a score of texts, or nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.term import Term, check_names
from ngramloss.metrics.registry import METRICS, checked_options, missing_options, score_owners, scores_of
from ngramloss.recipe import LAST, Recipe
from ngramloss.settings import nearest, toml_value


class Best(NamedTuple):
    """What selects the best checkpoint: a term, ``ce``, ``loss``, a score of ``metric`` (else empty), or ``last``."""

    name: str
    metric: str = ""
    higher: bool = False
    options: Mapping[str, Any] = {}


def tie_note(best: Best, history: Iterable[Mapping[str, Any]]) -> str:
    """What to say if all validations have the same value, so that the first of them was chosen; else empty."""
    values = _validations(history, f"eval_{best.name}")
    if len(values) < 2 or len({*values.values()}) > 1:
        return ""
    step, value = next(iter(values.items()))
    return (
        f"{best.name} was {value:.4f} in all {len(values)} validations, so it could not select a checkpoint: the model "
        f"has the weights of the first validation, at step {step}. Choose another train.best; train.best=last takes "
        "the last weights."
    )


def loss_note(best: Best, chosen: int, history: Iterable[Mapping[str, Any]]) -> str:
    """What to say if the objective itself was lower at another validation than at the chosen one; else empty."""
    losses = _validations(history, "eval_loss")
    lowest = min(losses, key=lambda step: losses[step], default=chosen)
    if best.metric or best.name == "loss" or chosen not in losses or losses[lowest] == losses[chosen]:
        return ""
    return (
        f"{best.name} selected the weights of step {chosen}, but the loss of the whole objective was lowest at step "
        f"{lowest} ({losses[lowest]:.4f}, and {losses[chosen]:.4f} there). n-gram terms often improve while ce rises: "
        "train.best=loss, train.best=last, or a score of texts such as train.best=rouge2 might choose another."
    )


def _validations(history: Iterable[Mapping[str, Any]], key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in history if row.get(key, math.nan) == row.get(key)}


def is_better(value: float, than: float | None, *, higher: bool) -> bool:
    """Whether a value is better than another, or the first; NaN and infinity never are."""
    return math.isfinite(value) and (than is None or (value > than if higher else value < than))


def better_average(best: Best, facts: Mapping[str, Any]) -> str:
    """The name of the average if it is better than every checkpoint, or if nothing is validated; or empty."""
    for name, value in facts["averages"].items():
        than = facts["best"]
        if than is None if value is None else is_better(value, than, higher=best.higher):
            return str(name)
    return ""


def weights_text(best: Best, facts: Mapping[str, Any], chosen: Path) -> str:
    """Which weights became the model, and what they and the averages score.

    >>> facts = {"step": 30, "best_step": 20, "best": 1.25}
    >>> weights_text(Best("ce"), facts, Path("checkpoint-20"))
    'the weights of step 20 (lowest validation ce, 1.2500)'
    >>> weights_text(Best("ce"), facts, Path("checkpoint-30"))
    'the weights of step 30 (the last)'
    >>> facts["averages"] = {"ema": 1.2}
    >>> weights_text(Best("ce"), facts, Path("ema"))
    'the moving average of the weights (ema) (validation ce 1.2000; the weights of step 20: 1.2500)'
    """
    averages = {name: f"the moving average of the weights ({name})" for name in facts.get("averages", {})}
    newest = facts["step"] if facts["best_step"] is None else facts["best_step"]
    own = f"the weights of step {newest if chosen.name in averages else chosen.name.rpartition('-')[2]}"
    values: dict[str, float | None] = {own: facts["best"] if own.endswith(f" {facts['best_step']}") else None}
    values |= {text: facts["averages"][name] for name, text in averages.items()}
    taken = averages.get(chosen.name, own)
    value = values.pop(taken)
    if value is None:
        reason = "nothing was validated that could select others" if taken != own else "the last"
    else:
        which = f"{'highest' if best.higher else 'lowest'} validation {best.name}, {value:.4f}"
        reason = which if taken == own else f"validation {best.name} {value:.4f}"
    rest = [f"{text}: {other:.4f}" for text, other in values.items() if other is not None]
    return f"{taken} ({'; '.join([reason, *rest])})"


def selecting_terms(terms: Sequence[Term]) -> list[str]:
    """What validation computes of an objective: the whole loss, ``ce``, and terms of neither candidates nor twins."""
    compared = [name for term in terms if term.requires - {"teacher"} for name in term.names]
    return [name for name in dict.fromkeys(["loss", "ce", *check_names(terms)]) if name not in compared]


def best_of(settings: Recipe) -> Best:
    """What selects the best checkpoint. Metrics with a model or file of their own are refused: read again and again."""
    name = settings.train.best
    if name == LAST:
        return Best(name)
    parsed = parse(settings.objective)
    absent = {term: term.requires - {"teacher"} for term in parsed}
    compared = [term_name for term in parsed if absent[term] for term_name in term.names]
    terms = selecting_terms(parsed)
    if name in compared:
        missing = " and ".join(sorted(next(absent[term] for term in parsed if name in term.names)))
        raise UserError(
            f"train.best: {name} compares {missing}, which validation does not have. Choose one of "
            f"{', '.join(terms)}, or a score of generated texts such as rouge2."
        )
    if (
        name == "loss"
        and compared
        and not any(part.final_weight for term in parsed if not absent[term] for part in term.parts)
    ):
        missing = " and ".join(sorted({each for needs in absent.values() for each in needs}))
        raise UserError(
            f"train.best: without the terms that compare {missing}, validation has no loss. Choose ce, or "
            "a score of generated texts such as rouge2."
        )
    if name in terms:
        if settings.train.best_options:
            raise UserError(f"train.best_options: {name} is a term and has no options. Leave them out.")
        return Best(name)
    metric = metric_of(name, "train.best", terms)
    better = scores_of(metric)[name].better
    return Best(name, metric, better == "higher", options_of(metric, settings.train.best_options, "train.best_options"))


def metric_of(name: str, key: str, terms: Sequence[str] = ()) -> str:
    """The metric that has a score, and can score texts of a model in training."""
    usable = [metric for metric in METRICS if not METRICS.problem(metric)]
    scores = [score for each in usable if not has_own_model(each) for score in scores_of(each).items()]
    names = [each for each, score in scores if score.better != "neither"]
    owners = score_owners(usable)
    choices = [each for each in names if not any(each.startswith(f"{other}_") for other in names)]  # no rouge2_recall
    if name not in owners:
        kind = "neither a term nor a score" if terms else "no score"
        of_objective = f"Terms of this objective: {', '.join(terms)}. " if terms else ""
        raise UserError(
            f"{key}: {name!r} is {kind}. {nearest(name, [*terms, *choices], 0.6)}{of_objective}Scores of generated "
            f"texts: {', '.join(choices)}."
        )
    metric, instead = owners[name], f"{'a term, or ' if terms else ''}one of {', '.join(choices)}"
    if scores_of(metric)[name].better == "neither":
        raise UserError(
            f"{key}: {name} only describes texts: neither high nor low values are better. Choose {instead}."
        )
    if has_own_model(metric):
        raise UserError(
            f"{key}: {name} needs a model or a file of its own, which is not loaded beside the model in training. "
            f"Choose {instead}. Score the finished run with {metric}: ngramloss score RUN --metrics {metric}."
        )
    if needed := METRICS[metric].packages_needed:
        raise UserError(f"{key}: {name} {needed}.")
    return metric


def has_own_model(metric: str) -> bool:
    """Whether a metric needs a model or a file of its own."""
    return "model" in METRICS[metric].options or bool(missing_options(metric, {}))


def options_of(metric: str, given: Sequence[str], key: str) -> dict[str, Any]:
    """Options of a metric, each written ``METRIC.OPTION=VALUE``, checked; ``key`` is the setting that has them."""
    options = {}
    for text in given:
        name, equals, value = text.partition("=")
        owner, _, option = name.strip().partition(".")
        if not equals or owner != metric:
            raise UserError(f"{key}: takes {metric}.OPTION=VALUE, options of the metric {metric}, got {text!r}.")
        described = METRICS[metric].options.get(option)
        options[option] = described.read(value) if described else toml_value(value)
    try:
        return checked_options(metric, options)
    except UserError as mistake:
        raise UserError(f"{key}: {mistake}") from None
