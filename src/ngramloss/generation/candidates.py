"""a job, and how many candidates → several distinct texts of each source and their scores, for training on them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ngramloss.data import Example, in_part
from ngramloss.data.candidates import read_candidates, text_hashes
from ngramloss.errors import UserError
from ngramloss.generation import left_out, row_file
from ngramloss.generation.baselines import is_baseline
from ngramloss.generation.job import Job, data_facts, job, read_split
from ngramloss.generation.load_job import load_model, versions, writer_facts, writer_of
from ngramloss.generation.row_file import Author, Output
from ngramloss.metrics import candidate_scores
from ngramloss.metrics.candidate_scores import CandidateMetric
from ngramloss.models.loading import load_config, own_device
from ngramloss.output.console import logger
from ngramloss.recipe import WORDS, Data, affecting
from ngramloss.search.batches import budget_for
from ngramloss.search.registry import ENGINES
from ngramloss.search.search import Options, check_options
from ngramloss.search.writer import Text, Writer
from ngramloss.storage.run_folder import weights_mark

ROUNDS = 4  # how often samples are drawn for a source that has too few distinct texts


@dataclass(frozen=True)
class CandidatePlan:
    """How candidates are made."""

    how: str  # one of ``HOW``
    count: int  # candidates of each source
    searched: int  # candidates that the search writes; samples are the rest
    search: Options  # what is asked of the search
    samples: Options  # what is asked of the samples, also of those that take the place of equal texts


class Summary(NamedTuple):
    """What there is at the end. Scores are means over the sources."""

    sources: int
    candidates: float  # of each source, the mean
    best: float  # the score of an oracle that chooses the best candidate
    mean: float
    worst: float
    first: float  # the score of the first candidate, which the search prefers
    ties: int  # sources of which all candidates have the same score, so that nothing can be learned from them
    fewer: int  # sources with fewer candidates than were asked for
    missing: int  # candidates that they lack in all


def plan(
    work: Job,
    *,
    how: str = "groups",
    count: int = 16,
    beams: int = 0,
    groups: int = 0,
    diversity: float | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> CandidatePlan:
    """How candidates are made, or an error; 0 beams or groups: as many as candidates of the search; no diversity: 1."""
    if is_baseline(work.model):
        raise UserError(f"{work.model} is a baseline, which gives one output per document. Candidates need a model.")
    samples = Options(count, True, temperature, top_p, seed)
    check_options(samples)
    searched = {"mixed": (count + 1) // 2, "sample": 1}.get(how, count)
    if how not in ("groups", "mixed"):
        if groups or diversity is not None:
            raise UserError(f"--groups and --diversity are options of --search groups and mixed, not of {how}.")
        if how == "sample" and beams:
            raise UserError("--search sample takes no --beams. Set generation.num_beams for the first output.")
        if beams and beams < searched:
            raise UserError(f"--beams must be at least --count, {count}, got {beams}.")
        return CandidatePlan(how, count, searched, Options(searched, beams=beams), samples)
    if (groups or searched) == 1 and (groups or diversity is not None):
        raise UserError("one group is a plain beam search, which has no diversity. Use --search beams, or more groups.")
    beams, groups = beams or searched, groups or searched
    for name, number in (("groups", groups), ("candidates of the search", searched)):
        if beams % number:
            raise UserError(f"--beams must be a multiple of the {number} {name}, got {beams}.")
    loss = (1.0 if diversity is None else diversity) if groups > 1 else 0.0
    search = Options(beams, groups=groups, diversity=loss, beams=beams)
    check_options(search)
    return CandidatePlan(how, count, searched, search, samples)


def write_candidates(
    works: Sequence[Job], chosen: CandidatePlan, metric: CandidateMetric, folder: Path, parts: Sequence[str] = ("",)
) -> Summary | None:
    """Write candidates and their settings, or continue a stopped job; a summary in the first process, else None.

    ``works``: several if each model writes of a part of the sources, ``parts``, by
    :func:`ngramloss.generation.left_out.parts_of`; empty: of all.
    """
    with row_file.claimed(folder) as run:
        output = Output(run, "candidates", "candidates", run.candidates, run.about_candidates)
        _write(works, chosen, metric, output, parts)
        return summary(run.candidates, chosen.count) if row_file.rank() == 0 else None


def write_candidates_like(about: Mapping[str, Any], work: Job, metric: CandidateMetric, folder: Path) -> Data:
    """Let the writer of earlier candidates write some of other documents, in the same way.

    Args:
        about: what :func:`ngramloss.data.candidates.about_of` says of the earlier ones.
        work: a job with the documents, whose model was trained on the earlier candidates.
        metric: scores the candidates.
        folder: created if it does not exist.

    Returns:
        The data as the writer read them.

    Raises:
        UserError: the writer's weights have changed.
    """
    given = {name: getattr(work.data, name) for name in affecting("documents", section="data") if name != "name"}
    writer = job(
        str(about["model"]),
        data=work.data.name,
        split=work.split,
        limit=work.limit,
        batch_size=work.batch_size,
        overrides=[
            *(f"data.{name}={json.dumps(value)}" for name, value in given.items() if value != getattr(Data(), name)),
            *([f"task={about['task']}"] if "task" in about else []),
        ],
    )
    config = None if writer.loading_system else load_config(writer.loading, verb="generate")
    now = weights_mark(Path(writer.loading.name), config)
    if now and about.get("weights") and now != about["weights"]:
        raise UserError(
            f"the weights of {writer.model} have changed since it wrote the candidates that {work.model} was trained "
            f"on: {now}, expected {about['weights']}. Restore them, or generate new candidates with it and run: "
            f"ngramloss rerank apply {work.model} CANDIDATES --out DIR"
        )
    made, search = about["candidates"], about["generation"]
    groups = search.get("num_beam_groups", 0)
    chosen = plan(
        writer,
        **{name: made[name] for name in ("count", "temperature", "top_p", "seed")},
        how=made["search"],
        beams=0 if made["search"] == "sample" else search.get("num_beams", 0),
        groups=groups,
        diversity=search["diversity_penalty"] if groups else None,
    )
    write_candidates([writer], chosen, metric, folder)
    return writer.data


def _author(work: Job, chosen: CandidatePlan, output: Output, column: str) -> tuple[dict[str, Any], Author]:
    """Everything about the model of a job that could change its candidates, and the model as what writes them."""
    model, tokenizer = load_model(work, device=own_device())
    engine = row_file.engine_that_began(output, work.engine, chosen.search)
    writer = writer_of(work, model, tokenizer, chosen.search, engine=engine, column=column)
    if writer.engine.note:
        logger.info(writer.engine.note)

    rounds = 0 if work.loading_system else ROUNDS  # a system may have no samples

    @lru_cache(maxsize=2)  # an engine may hold caches and graphs; later rounds are rare
    def sampler(number: int) -> Writer:
        """What draws the samples of a round, with random numbers of its own."""
        if not rounds:
            return writer
        seed = chosen.samples.seed
        if number:
            seed = int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")
        engine = writer.engine.name if ENGINES[writer.engine.name].has_groups else work.engine
        options = chosen.samples._replace(seed=seed)
        return writer_of(work, model, tokenizer, options, engine=engine, column=column)

    if sampler(0).engine.note and chosen.searched < chosen.count:  # somebody asked for samples
        logger.info(f"samples: {sampler(0).engine.note}")

    def write(_: Sequence[Example], ids: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        searched = writer.write(ids)
        found = [_distinct(texts[:: max(len(texts) // chosen.searched, 1)]) for texts in searched]
        for number in range(rounds):
            lacking = [index for index, texts in enumerate(found) if len(texts) < chosen.count]
            if not lacking:
                break
            drawn = sampler(number).write([ids[index] for index in lacking])
            for index, samples in zip(lacking, drawn, strict=True):
                found[index] = _distinct([*found[index], *samples])[: chosen.count]
        return [
            {"candidates": [text for text, _ in texts], "tokens": [tokens for _, tokens in texts]} for texts in found
        ]

    facts = {
        **writer_facts(work, writer),
        "candidates": {
            "search": chosen.how,
            "count": chosen.count,
            "temperature": chosen.samples.temperature,
            "top_p": chosen.samples.top_p,
            "seed": chosen.samples.seed,
            "samples": sampler(0).engine.facts,
        },
    }
    budget = budget_for(model, [writer.search, sampler(0).search], work.batch_size)
    return facts, Author(writer.ids_of, write, budget)


def _write(
    works: Sequence[Job], chosen: CandidatePlan, metric: CandidateMetric, output: Output, parts: Sequence[str]
) -> None:
    work, several = works[0], len(works) > 1
    split = read_split(work)
    is_train = split.split == "train"
    seen = [left_out.trained_sources(each.model, split) if is_train else None for each in works]
    if parts[0] and not several:
        split = left_out.only_part(split, parts[0], work.model)
    examples = split.examples
    for note in candidate_scores.check_metric(metric, examples):
        logger.info(note)
    left_out.check_left_out(examples, works, parts, seen)

    @lru_cache(maxsize=1)  # one model at a time
    def author(number: int) -> tuple[dict[str, Any], Author]:
        return _author(works[number], chosen, output, split.column)

    every = [author(number)[0] for number in reversed(range(len(works)))][::-1]  # the first stays loaded
    settings = {**every[0], "metric": metric.settings, **data_facts(work, split)}
    if parts[0]:
        settings["leave_out"] = list(parts) if several else parts[0]
    if several:
        settings["runs"] = [each.model for each in works]
        settings["writers"] = [{key: value for key, value in facts.items() if key != "model"} for facts in every]
    settings["versions"] = versions(settings) | metric.versions
    if not row_file.begin(output, settings):
        return
    writers = {
        example.id: number
        for number, part in enumerate(parts)
        for example in examples
        if not several or in_part(example.id, part)
    }
    for number in range(len(works)):
        mine = {key for key, writer in writers.items() if writer == number}
        row_file.write_share(output, examples, author(number)[1], unit=WORDS[work.task].sources, only=mine)
    if row_file.rank() == 0:
        rows = row_file.collected(output, [example.id for example in examples])
        scores = candidate_scores.score_candidates(metric, examples, [row["candidates"] for row in rows])
        row_file.finish(
            output,
            [
                {
                    "id": row["id"],
                    "candidates": row["candidates"],
                    "scores": values,
                    "tokens": row["tokens"],
                    **text_hashes(example),
                    **({"writer": works[writers[example.id]].model} if several else {}),
                    **left_out.mark(example, seen[writers[example.id]]),
                }
                for row, values, example in zip(rows, scores, examples, strict=True)
            ],
        )


def _distinct(texts: Sequence[Text]) -> list[Text]:
    """The texts without those that are equal to an earlier one."""
    first: dict[str, Text] = {}
    for text in texts:
        first.setdefault(text.text, text)
    return list(first.values())


def summary(path: Path, count: int) -> Summary:
    """What a file of candidates contains, if ``count`` of each source were asked for."""
    rows = list(read_candidates(path).rows.values())
    of_sources = [values for _, values in rows]
    lacks = [count - len(values) for values in of_sources if len(values) < count]
    return Summary(
        len(rows),
        fmean([len(values) for values in of_sources]),
        fmean([max(values) for values in of_sources]),
        fmean([fmean(values) for values in of_sources]),
        fmean([min(values) for values in of_sources]),
        fmean([values[0] for values in of_sources]),
        sum(len(set(values)) == 1 for values in of_sources if len(values) > 1),
        len(lacks),
        sum(lacks),
    )
