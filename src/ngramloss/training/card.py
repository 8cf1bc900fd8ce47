"""a finished run → ``card.md``: what was trained, on which data, with which versions, and deviations from the paper."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ngramloss import recipe
from ngramloss.data.data_sets import canonical
from ngramloss.loss.terms.parser import parse
from ngramloss.output.escape import as_code, in_markdown
from ngramloss.recipe import Model, Recipe
from ngramloss.training.best import weights_text
from ngramloss.training.identity import PLUGIN
from ngramloss.training.prepared import Prepared
from ngramloss.training.run import Run
from ngramloss.version import __version__, installed

PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "datasets", "numpy", "sentencex", "pysbd")

ALWAYS = (
    "Cross-entropy is the mean over tokens, as in the authors' code; the paper's equation 2 prints a sum.",
    "N-gram terms follow the paper's equations; the authors' code differs from them (docs/objectives.md).",
    "Sources of similar length share an optimiser step if `train.group_by_length` is on; the paper does not say how it "
    "builds batches.",
    "Denominators are counted over the whole optimiser step; the authors' code averages the means of micro-batches.",
)

OF_SYSTEMS = ("batch_size", "accumulate", "learning_rate", "schedule", "warmup_steps", "seed")
"""Settings of ``train`` that the card of a system has."""
PAPER = ("cnn_dailymail", "xsum")
"""The paper's data. On others, a training has nothing to deviate from."""

FES = (
    "Of FES, which `margin` is from, only this term is here. Its questions and answers and its coverage of entities "
    "are left out: the preprocessed graphs that they read were not released."
)


def card_text(run: Run, prepared: Prepared, facts: dict[str, Any], chosen: Path, *, note: str = "") -> str:
    """The card as Markdown."""
    settings, weights = run.settings, weights_text(run.best, facts, chosen).removeprefix("the ")
    versions = {"ngramloss": __version__, **{name: installed(name) or "not installed" for name in PACKAGES}}
    versions["Python"] = platform.python_version()
    plugins = {name: source for name, source in prepared.made_of.items() if name.startswith(PLUGIN)}
    languages = settings.data.source_language, settings.data.target_language
    direction = f" ({' → '.join(map(as_code, languages))})" if all(languages) else ""
    about = (
        f"{settings.task.capitalize()}{direction}: {as_code(settings.objective)} on {as_code(settings.data.name)}, from"
    )
    if run.system:
        about, heading, remarks = f"{in_markdown(run.system.entry.about)}. The model is", "Settings", _settings(run)
    elif canonical(settings.data.name) in PAPER:
        heading, remarks = "Deviations from the paper", deviations(settings, prepared.machine.precision)
    else:
        heading, remarks = "Model", [*new_model(settings.model), *_fes(settings)]
    splits = [  # systems say in sentences what they read
        f"| {name} | {split.examples:,} | {len(split.skipped)} | `{split.fingerprint}` |"
        for name, split in prepared.splits.items()
    ]
    lines = [
        f"# {in_markdown(title(settings))}",
        "",
        f"{about} {as_code(settings.model.name)}. "
        f"{weights[0].upper()}{weights[1:]} of {facts['step']}." + (f" Note: {in_markdown(note)}" if note else ""),
        "",
        "## Data",
        "",
        *(["| split | examples | skipped | fingerprint |", "|---|---|---|---|", *splits, ""] if splits else []),
        *(f"* {in_markdown(sentence)}" for sentence in prepared.used),
        *(f"\n{sentence}" for sentence in _sentences(run, prepared)),
        "",
        *([f"## {heading}", "", *(f"* {line}" for line in remarks), ""] if remarks else []),
        "## Machine",
        "",
        *(f"* {name}: {in_markdown(str(value))}" for name, value in dataclasses.asdict(prepared.machine).items()),
        *(["* code that came with the model was run (--trust-remote-code)"] * prepared.trust_remote_code),
        "",
        "## Versions",
        "",
        *(f"* {name} {number}" for name, number in versions.items()),
        *(f"* {as_code(name)}, source {source or 'unknown'}" for name, source in plugins.items()),
        "",
        f"Finished {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. Every setting is in recipe.toml, every step in log.jsonl.",
    ]
    return "\n".join(lines) + "\n"


def _settings(run: Run) -> list[str]:
    train = dataclasses.asdict(run.settings.train)
    shown = {"objective": run.settings.objective} if run.system.entry.takes_objective else {}
    shown |= {name: value for name, value in run.system.options.items() if value != ""}
    shown |= {name: train[name] for name in OF_SYSTEMS}
    return [f"{name} = {as_code(str(value))}" for name, value in shown.items()]


def title(settings: Recipe) -> str:
    """The name of a run; of a recipe of ours on other data, with the name of the data instead of the recipe's.

    >>> title(recipe.load("demo")), title(recipe.load("demo", ["data.name=data/mine.csv"]))
    ('demo-matches234', 'mine-matches234')
    """
    if settings.name in recipe.builtin():
        usual = recipe.load(settings.name, objective=False).data.name
        if canonical(usual) != canonical(settings.data.name):
            return dataclasses.replace(settings, name=Path(settings.data.name.rpartition("=")[2]).stem).slug
    return settings.slug


def _sentences(run: Run, prepared: Prepared) -> Iterator[str]:
    """What is held out, and what the objective reads beside the splits: candidates, own texts, a language model."""
    for part in ("validation", "test"):
        if fraction := getattr(run.settings.data, f"{part}_fraction"):
            yield f"The {part} split is {fraction:g} of the training split, held out by the ids of its rows."
    if compared := prepared.candidates:
        scored = f", scored with {as_code(compared.metric)}" if compared.metric else ""
        cut = f" {compared.cut:,} of them were cut." if compared.cut else ""
        yield (
            f"The objective compares {compared.texts:,} candidates of {compared.examples:,} training examples{scored}, "
            f"from {as_code(str(compared.file))}, fingerprint `{compared.fingerprint}`.{cut}"
        )
    if run.online_metric is not None:
        given = [f"{name} {value}" for name, value in dataclasses.asdict(run.settings.online).items() if value]
        yield (
            "The objective compares texts that the model wrote while it was trained, with the weights that it had then "
            f"({', '.join(given)}), scored with {', '.join(map(as_code, run.online_metric.scores))}."
        )
    if lm := prepared.language_model:
        yield (
            f"The objective reads what the language model {as_code(lm.name)} says of the targets, fingerprint "
            f"`{lm.fingerprint}`. Its perplexity on the training targets is {lm.perplexity:.4g}."
        )


def deviations(settings: Recipe, precision: str) -> list[str]:
    """Every setting that differs from the paper, and every choice that the paper does not specify."""
    paper = recipe.load("cnndm" if canonical(settings.data.name) == "cnn_dailymail" else "xsum")
    said_elsewhere = "objective", "task", "model", "data.candidates", "data.language_model", "online", "data.weights"
    left_out = *said_elsewhere, *recipe.only_speed()
    lines = [line.partition(" → ") for line in recipe.differences(paper, settings) if not line.startswith(left_out)]
    differences = [f"{as_code(theirs)}, here {as_code(ours)}" for theirs, _, ours in lines]
    if settings.model.name != paper.model.name:
        name = f"The model is {as_code(settings.model.name)}; the paper fine-tunes BART-base."
        differences = [name, *new_model(settings.model), *differences]
    if settings.task != paper.task:
        differences.insert(0, f"The task is {settings.task}; the paper's is {paper.task}.")
    differences += _fes(settings)
    if precision == "fp32":
        differences.append("Trained in fp32; the paper trains in mixed precision.")
    return [
        *differences,
        *ALWAYS,
        f"Gradients are clipped at norm {settings.train.clip:g}; the paper does not say, and its authors' code uses 1.",
    ]


def _fes(settings: Recipe) -> list[str]:
    return [FES] if any(term.name == "margin" for term in parse(settings.objective)) else []


def new_model(model: Model) -> list[str]:
    """What a model from scratch is."""
    if model.encoder:
        return [
            f"The encoder is {as_code(model.encoder)}, the decoder is new: {model.decoder_layers} layers of "
            f"{model.heads} heads, init_std {model.init_std:g}."
        ]
    if model.name != "scratch":
        return []
    sizes = (
        f"From scratch: {model.architecture}, width {model.width}, {model.encoder_layers} + "
        f"{model.decoder_layers} layers, {model.vocabulary:,} tokens, init_std {model.init_std:g}."
    )
    copying = (
        "The model is initialised to copy: the value and output projections of cross-attention "
        "start as the identity, positions as sinusoids."
    )
    return [sizes, *[copying] * model.copying]
