"""a run or a model, and a data set → several distinct texts of each source and the gain of each, for training on them.

Each source is searched once, by groups of beams, by beams or by one plain search. Texts that are equal are removed, and
samples take their place. The gains come last, when all texts are there: they are a function of the texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.data import Example
from ngramloss.data.candidates import read_candidates, text_hashes
from ngramloss.errors import UserError
from ngramloss.generation import engines, shares
from ngramloss.generation.baselines import is_baseline
from ngramloss.generation.batches import budget_for
from ngramloss.generation.engines.settings import Search, search_of
from ngramloss.generation.predictions import (
    GROUPED,
    Job,
    Sampling,
    check_groups,
    check_sampling,
    facts_of,
    grouped_engine,
    prepare,
    read_split,
    search_facts,
    set_generation,
    versions,
    written,
)
from ngramloss.generation.search import Written
from ngramloss.generation.shares import Output, Progress
from ngramloss.storage.files import write_whole
from ngramloss.storage.run_folder import RunFolder

HOW = {
    "groups": "groups of beams that avoid each other's tokens",
    "beams": "the best of one beam search",
    "sample": "the best of the model's own search, then samples",
    "mixed": "half by groups of beams, half samples",
}
"""How candidates are made."""
ROUNDS = 4
"""How often samples are drawn for a source that has too few distinct texts."""
WITHOUT_GROUPS = "Use --how sample or --how beams."


@dataclass(frozen=True)
class Making:
    """How candidates are made.

    Attributes:
        count: candidates of each source.
        how: one of ``HOW``.
        beams: of the search; 0 means as many as there are candidates of it.
        groups: of the beams; 0 means as many as there are candidates of the search.
        diversity: what a token's log-probability loses for each beam of an earlier group that takes it; None means 1.
        temperature, top_p, seed: of the samples, also of those that take the place of equal texts.
    """

    count: int = 16
    how: str = "groups"
    beams: int = 0
    groups: int = 0
    diversity: float | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    @property
    def searched(self) -> int:
        """Candidates that the search writes; samples are the rest."""
        return {"mixed": (self.count + 1) // 2, "sample": 1}.get(self.how, self.count)

    @property
    def has_groups(self) -> bool:
        """Whether the search has groups of beams."""
        return self.how in ("groups", "mixed") and (self.groups or self.searched) > 1


class Gains(NamedTuple):
    """What makes the gains of candidates.

    Attributes:
        settings: everything that could change them.
        versions: of the packages that compute them.
        check: raises if gains of such examples cannot be computed; returns sentences to tell the user.
        compute: examples, the candidates of each and a function that is told of progress → the gains of each, 0 to 1.
    """

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    check: Callable[[Sequence[Example]], Sequence[str]]
    compute: Callable[[Sequence[Example], Sequence[Sequence[str]], Progress | None], list[list[float]]]


class Summary(NamedTuple):
    """What there is at the end. Gains are means over the sources.

    Attributes:
        sources: their number.
        candidates: of each source, the mean.
        best: the gain of an oracle that chooses the best candidate.
        mean: the gain of all candidates.
        worst: the gain of the worst candidate.
        first: the gain of the first candidate, which the search prefers.
        ties: sources of which all candidates have the same gain, so that nothing can be learned from them.
        fewer: sources with fewer candidates than were asked for.
        missing: candidates that they lack in all.
    """

    sources: int
    candidates: float
    best: float
    mean: float
    worst: float
    first: float
    ties: int
    fewer: int
    missing: int


def check_making(making: Making, work: Job) -> Making:
    """Raise if options contradict each other, or cannot be used with this model. Returns them completed.

    Args:
        making: how candidates are made.
        work: the job that they are made in.
    """
    if is_baseline(work.model):
        raise UserError(f"{work.model} is a baseline, which writes one text of each document. Candidates need a model.")
    check_sampling(Sampling(making.count, True, making.temperature, making.top_p, making.seed))
    grouped = making.how in ("groups", "mixed")
    if not grouped and (making.groups or making.diversity is not None):
        raise UserError(f"--groups and --diversity are options of --how groups and mixed, not of {making.how}.")
    if making.how == "sample" and making.beams:
        raise UserError("--how sample has no --beams. The search for the first text has generation.num_beams.")
    searched, beams = making.searched, making.beams
    if making.how == "beams" and beams and beams < searched:
        raise UserError(f"--beams {beams} are fewer than --count {making.count}.")
    if not grouped:
        return making
    beams = beams or searched
    groups = making.groups or searched
    if groups == 1 and (making.groups or making.diversity is not None):
        raise UserError("one group is a plain beam search, which has no diversity. Use --how beams, or more groups.")
    for name, number in (("groups", groups), ("candidates of the search", searched)):
        if beams % number:
            raise UserError(f"--beams {beams} must be a multiple of the {number} {name}.")
    diversity = 1.0 if making.diversity is None else making.diversity
    check_sampling(Sampling(groups=max(groups, 2), diversity=diversity))
    made = replace(making, beams=beams, groups=groups, diversity=diversity)
    if made.has_groups:
        check_groups(work, WITHOUT_GROUPS)
    return made


def candidates_in(run: RunFolder) -> Output:
    """Where the candidates of a folder are."""
    return Output(run, "candidates", "candidates", run.candidates, run.about_candidates)


def write_candidates(
    work: Job,
    making: Making,
    gains: Gains,
    folder: Path,
    *,
    progress: Progress | None = None,
    scoring: Progress | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Summary | None:
    """Write candidates and their settings into a folder, or continue a stopped job.

    Under torchrun each process writes a share, and the first one computes the gains of all.

    Args:
        work: model and data.
        making: how candidates are made, as :func:`check_making` returned it.
        gains: what each candidate scores.
        folder: where; it is created if it does not exist.
        progress: called with the number of sources done since the last call, and the number of all.
        scoring: likewise, for the gains.
        say: shows a message to the user; called only in the first process.

    Returns:
        A summary; None in other processes than the first.
    """
    with shares.claimed(folder) as run:
        output = candidates_in(run)
        is_first = shares.rank() == 0
        _write(work, making, gains, output, (progress, scoring), say if is_first else lambda _: None)
        return summary(output.whole, making.count) if is_first else None


def _write(
    work: Job,
    making: Making,
    gains: Gains,
    output: Output,
    bars: tuple[Progress | None, Progress | None],
    say: Callable[[str], None],
) -> None:
    split = read_split(work)
    examples = split.examples
    for note in gains.check(examples):
        say(note)
    ready = prepare(work, say)
    model = ready.model
    set_generation(model, work)
    search = _search(model, making)
    engine = _engine(work, making, model, search, output, say)
    sampler = _sampler(making, model, search, work.engine if engine.name != GROUPED else GROUPED, say)
    settings = {
        **ready.settings,
        "generation": search_facts(model, search),
        "engine": engine.facts,
        "candidates": {
            "how": making.how,
            "count": making.count,
            "temperature": making.temperature,
            "top_p": making.top_p,
            "seed": making.seed,
            "samples": sampler(0).facts,
        },
        "metric": dict(gains.settings),
        **facts_of(work, split),
    }
    settings["versions"] = versions(settings) | dict(gains.versions)
    if shares.was_begun(output, settings, say) and output.whole.exists():
        return
    if shares.processes() == 1:
        output.run.tidy()
    if shares.rank() == 0:
        write_whole(output.about, json.dumps(settings, indent=1))

    def write(_: Sequence[Example], sources: Sequence[Sequence[int]]) -> list[list[Written]]:
        kept = [rows[:: max(len(rows) // making.searched, 1)] for rows in engine.write(sources)]
        found = [_distinct(texts) for texts in written(ready.tokenizer, kept)]
        for number in range(ROUNDS):
            lacking = [index for index, texts in enumerate(found) if len(texts) < making.count]
            if not lacking:
                break
            drawn = written(ready.tokenizer, sampler(number).write([sources[index] for index in lacking]))
            for index, samples in zip(lacking, drawn, strict=True):
                found[index] = _distinct([*found[index], *samples])[: making.count]
        return found

    budget = budget_for(model, replace(search, num_beams=max(search.num_beams, making.count)), work.batch_size)
    shares.write_share(output, examples, ready.ids, write, _row, budget, progress=bars[0], say=say)
    if shares.rank() == 0:
        rows = shares.collected(output, [example.id for example in examples])
        scores = gains.compute(examples, [row["candidates"] for row in rows], bars[1])
        shares.finish(
            output,
            [
                {
                    "id": row["id"],
                    "candidates": row["candidates"],
                    "gains": values,
                    "tokens": row["tokens"],
                    **text_hashes(example),
                }
                for row, values, example in zip(rows, scores, examples, strict=True)
            ],
        )


def _search(model: Any, making: Making) -> Search:
    """Put the settings of the search into the model's ``generation_config``, and return them."""
    config = model.generation_config
    beams = {"beams": making.beams or max(making.count, config.num_beams or 1), "sample": config.num_beams or 1}.get(
        making.how, making.beams
    )
    texts = {"beams": making.count, "sample": 1}.get(making.how, beams)
    if beams > 1 and (config.num_beams or 1) == 1:  # greedy search has no early stopping of its own
        config.update(early_stopping=True)
    config.update(do_sample=False, num_beams=beams, num_return_sequences=texts)
    search = search_of(model)
    return replace(search, groups=making.groups, diversity=making.diversity or 0.0) if making.has_groups else search


def _engine(
    work: Job, making: Making, model: Any, search: Search, output: Output, say: Callable[[str], None]
) -> engines.Loaded:
    if making.has_groups:
        return grouped_engine(model, search, WITHOUT_GROUPS, say=say)
    return engines.load(shares.engine_that_began(output, work.engine, say), model, search, say=say)


def _sampler(
    making: Making, model: Any, search: Search, name: str, say: Callable[[str], None]
) -> Callable[[int], engines.Loaded]:
    """The number of a round → the engine that draws samples in it, with random numbers of its own."""
    sampling = replace(
        search,
        sample=True,
        num_beams=1,
        groups=1,
        diversity=0.0,
        early_stopping=False,
        texts=making.count,
        temperature=making.temperature,
        top_p=making.top_p,
        top_k=0,
    )

    @lru_cache(maxsize=2)  # an engine may hold caches and graphs; later rounds are rare
    def of_round(number: int) -> engines.Loaded:
        seed = making.seed if not number else _seed(making.seed, number)
        is_silent = number or making.searched == making.count  # nobody asked for samples
        tell = (lambda _: None) if is_silent else (lambda sentence: say(f"samples: {sentence}"))
        return engines.load(name, model, replace(sampling, seed=seed), say=tell)

    return of_round


def _seed(seed: int, number: int) -> int:
    """The seed of a round, of 32 bits."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number}".encode()).digest()[:4], "big")


def _distinct(texts: Sequence[Written]) -> list[Written]:
    """The texts without those that are equal to an earlier one."""
    first: dict[str, Written] = {}
    for written_text in texts:
        first.setdefault(written_text.text, written_text)
    return list(first.values())


def _row(key: str, texts: Sequence[Written]) -> dict[str, Any]:
    return {"id": key, "candidates": [text for text, _ in texts], "tokens": [tokens for _, tokens in texts]}


def summary(path: Path, count: int) -> Summary:
    """What a file of candidates contains.

    Args:
        path: the file.
        count: candidates of each source that were asked for.
    """
    rows = list(read_candidates(path).rows.values())
    gains = [values for _, values in rows]
    lacks = [count - len(values) for values in gains if len(values) < count]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    return Summary(
        len(rows),
        mean([len(values) for values in gains]),
        mean([max(values) for values in gains]),
        mean([mean(values) for values in gains]),
        mean([min(values) for values in gains]),
        mean([values[0] for values in gains]),
        sum(len(set(values)) == 1 for values in gains if len(values) > 1),
        len(lacks),
        sum(lacks),
    )
