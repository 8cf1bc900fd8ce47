"""a model in training and the sources of its next steps → texts that it writes of them, their scores, and the steps.

The ids are those that were drawn, so log-probabilities in training are those of the drawn texts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from ngramloss.data import Example
from ngramloss.data.batches.padding import Step
from ngramloss.data.batches.plan import Grid, Joined, Lengths, Plan, open_grid
from ngramloss.data.batches.planned import CannotMakeStep, ExampleLengths, PlannedSteps, lengths_of
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.metrics import candidate_scores
from ngramloss.metrics.candidate_scores import CandidateMetric
from ngramloss.models.precision import to_precision
from ngramloss.output.console import logger
from ngramloss.recipe import AUTO, Generation, Online, Recipe
from ngramloss.search import engines
from ngramloss.search.batches import CPU_TOKENS, Budget, batches, budget_for
from ngramloss.search.engines.hf import search_of
from ngramloss.search.registry import ENGINES, STANDARD
from ngramloss.search.search import Options, Search
from ngramloss.search.writer import decoded
from ngramloss.storage.files import read_object
from ngramloss.storage.typed import typed
from ngramloss.training.checkpoints import AGAIN
from ngramloss.training.planning import Rows
from ngramloss.training.processes import Processes
from ngramloss.training.run import METRIC, own_needs, warn_of_others
from ngramloss.training.validation import unchanged

FILE = "online.json"
"""The file of a checkpoint with the texts of the steps after it."""
NO_SCORES = ("greedy", "token_logp")  # Terms that need one of these statistics read no scores

TextScores = Callable[[Sequence[int], Sequence[Sequence[str]]], list[list[float]]]
"""Numbers of rows, and texts of each → the score of each text, 0 to 1."""


class OwnTexts(NamedTuple):
    """What the model writes while it is trained, and how that is scored.

    Attributes:
        settings: how many texts, and how often.
        scores: a function that scores texts.
        generation: of which only the greatest length and the engine are used: texts are those of the model alone.
    """

    settings: Online
    scores: TextScores
    generation: Generation = Generation()


def own_texts(settings: Recipe, metric: CandidateMetric, examples: Sequence[Example]) -> OwnTexts:
    """Those of a recipe. Tries the metric on a few references first."""
    for note in candidate_scores.check_metric(metric, examples):
        logger.info(f"{METRIC}: {note} In a recipe, online.metric_options has such options.")
    return OwnTexts(
        settings.online,
        lambda rows, texts: candidate_scores.scores_at_once(metric, [examples[row] for row in rows], texts),
        settings.generation,
    )


# Writing


def writing_copy(model: Any, precision: str) -> Any:
    """A bf16 copy of a bare model trained in bf16; None if it writes itself: in fp16 a copy could overflow."""
    if precision != "bf16" or model.dtype == torch.bfloat16:
        return None
    return to_precision(copy.deepcopy(model), torch.bfloat16).eval()


@torch.no_grad()
def refresh(copied: Any, model: Any) -> None:
    """Give a copy the weights that the model has now."""
    torch._foreach_copy_(list(copied.parameters()), list(model.parameters()))


class _Writer(NamedTuple):
    """An engine, its search, and how much one batch may contain."""

    engine: engines.Loaded
    search: Search
    budget: Budget

    def write(self, sources: Sequence[Sequence[int]], seeds: Sequence[int]) -> list[list[list[int]]]:
        """The texts of each source, as ids that begin with the start token; samples have the source's seed."""
        found: list[list[list[int]]] = [[]] * len(sources)
        order = sorted(range(len(sources)), key=lambda row: -len(sources[row]))

        def written(rows: Sequence[int], ids: Sequence[Sequence[int]]) -> list[list[list[int]]]:
            more = {"seeds": [seeds[row] for row in rows]} if self.search.sample else {}
            return self.engine.write(ids, **more)

        for rows, texts in batches(order, lambda rows: [list(sources[row]) for row in rows], written, self.budget):
            for row, own in zip(rows, texts, strict=True):
                found[row] = own
        return found


def _writer(model: Any, options: Options, generation: Generation) -> _Writer:
    """What writes by a search without any rule of the recipe: the model's own probabilities decide alone."""
    plain = Generation(num_beams=1, max_length=generation.max_length)
    search = search_of(model, plain, options)
    name = generation.engine
    named = name in ENGINES and ENGINES[name].in_torch
    try:
        load = engines.load if named else engines.load_in_training
        engine = load(name, model, search)
    except UserError as mistake:
        raise UserError(f"online: {mistake}") from None
    if model.device.type == "cuda":
        return _Writer(engine, search, budget_for(model, [search], 0))
    # Not by the free memory: batches would differ from start to start, and with them the rounding.
    return _Writer(engine, search, Budget(padded=max(CPU_TOKENS // search.rows, 1)))


def _without_start(row: Sequence[int], search: Search) -> tuple[list[int], bool]:
    """The ids that were drawn, without a last token that the search forced, and whether the text ended by itself."""
    if len(row) == search.max_length and search.last is not None:
        return list(row[1:-1]), False
    return list(row[1:]), len(row) > 1 and row[-1] in search.ends


def _raise_unless_finite(
    rows: Sequence[int], texts: Sequence[Sequence[str]], scores: Sequence[Sequence[float]]
) -> None:
    """Raise if a text has no score, or one that is NaN or infinite, which would spoil all weights."""
    for row, own, values in zip(rows, texts, scores, strict=True):
        if len(own) != len(values):
            raise UserError(f"lengths differ: row {row} has {len(own)} texts and {len(values)} scores.")
        for text, value in zip(own, values, strict=True):
            if not isfinite(value):
                raise UserError(f"the score of a text of row {row} is {value}: {text!r:.200}. Scores are from 0 to 1.")


class _DrawnTexts(TypedDict):
    candidates: list[list[int]]
    scores: list[float]
    unended: int


class DrawnTexts(_DrawnTexts, total=False):
    """The texts of a source and their scores, how many have no end, and the greedy text's score if that is needed."""

    baseline: float


class Saved(NamedTuple):
    """The texts that a checkpoint has, and the steps that were done when they were written."""

    first: int
    rows: dict[int, DrawnTexts]


class FreshTexts(Rows):
    """Examples with the texts that the model, or its copy, has written of them, and the steps that train on these."""

    writes = True

    def __init__(
        self,
        own: OwnTexts,
        model: Any,
        tokenizer: Any,
        examples: Any,
        loss_fn: JointLoss,
        *,
        seed: int,
        here: Processes,
        copied: Any = None,
    ) -> None:
        settings, self.needs = own.settings, own_needs(loss_fn.terms)
        self.samples = settings.samples if self.needs.samples else 0
        reading = [part for part in loss_fn.parts if part.reads == "candidates" and part.needs.isdisjoint(NO_SCORES)]
        self.compares = bool(self.samples and reading)
        """Whether a term compares the scores of samples."""
        super().__init__(examples)
        self.own, self.model, self.tokenizer = own, model, tokenizer
        self.seed, self.here = seed, here
        self.copy = None if copied is None else copied.to(here.device)
        """A copy in another precision that writes; None if the model itself does."""
        self.sampler: _Writer | None = None
        self.greedy: _Writer | None = None
        with unchanged(model):
            if self.samples:
                options = Options(self.samples, True, settings.temperature, settings.top_p)
                self.sampler = _writer(self.copy or model, options, own.generation)
            if self.needs.greedy_text or self.needs.baseline:
                self.greedy = _writer(self.copy or model, Options(beams=1), own.generation)
        self.search = (self.sampler or self.greedy).search  # type: ignore[union-attr]  # one of them is there
        self.drawn: dict[int, DrawnTexts] = {}
        """Row → its texts."""
        self.first = 0
        """Steps that were done when these texts were written."""
        self._warned: set[str] = set()
        self._sums: Any = Counter()
        """What the next line of the log divides: scores, texts, seconds and so on."""
        self._log_what_is_written(loss_fn)

    # Examples of the planned steps

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {**self.examples[row], **self.drawn[row]}

    @property
    def padded(self) -> dict[str, Any]:  # type: ignore[override]  # here it depends on the search
        """What pads batches knows of candidates: what else there is of them, and how they start."""
        own = ["greedy"] * self.needs.greedy_text + ["baseline"] * self.needs.baseline
        return {"own": own, "start": self.search.start, "forced": self.search.first is not None}

    @property
    def texts(self) -> int:
        """Texts of each source: the reference, samples and the greedy text."""
        return 1 + self.samples + self.needs.greedy_text

    def lengths(self, *, joined: Joined) -> ExampleLengths:
        """Numbers of each example, as if every text had the greatest length; steps know better when it is written."""
        known = self.known = lengths_of(self.examples, joined=joined)
        if known.texts is not None:
            raise UserError(
                "online sampling generates one output for each source, but rows have several turns or candidates. "
                "Leave the section online out."
            )
        most = self.search.max_length - 1
        targets: Lengths = np.maximum(known.targets, most)
        order: Lengths = known.sources + (targets - known.targets) if joined else known.sources
        sources = known.sources + (self.texts - 1) * most if joined == "shared" else order
        return known._replace(sources=sources, targets=targets, texts=np.full(len(self), self.texts), order=order)

    def grid(
        self, known: ExampleLengths, first: Sequence[Sequence[int]], *, most: tuple[int, int], **shape: Any
    ) -> Grid:
        """The shapes of micro-batches on a GPU, for texts of any length."""
        known = self.known
        prompts = known.sources - known.targets if shape["joined"] else known.sources
        longest = max(self.search.max_length - 1, int(known.targets.max()))
        return open_grid(prompts, longest, texts=self.texts, **shape)

    # Steps

    def steps(self, planned: PlannedSteps, done: int) -> Iterator[Step]:
        """The steps after those that are done. Each is made when it is asked for: the model writes at a refresh."""
        refresh, ahead = self.own.settings.refresh, planned.rows_from(done)
        while some := list(islice(ahead, refresh - done % refresh)):
            own = {row for _, rows in some for row in planned.own(rows)}
            if done % refresh == 0:
                self.drawn = {}
            missing = sorted(own - self.drawn.keys())  # all, unless a checkpoint had texts
            failed = self._draw(missing, done) if missing else None
            if self.here.any(failed is not None):
                raise CannotMakeStep(failed or UserError("the texts of another process cannot be scored."))
            self._remark()
            planned.plan = self._with_lengths(planned.plan)
            for number, rows in some:
                self._count(planned.own(rows), number)
                yield planned.step(rows, number)
                done = number

    def _with_lengths(self, plan: Plan) -> Plan:
        rows = sorted(self.drawn)
        known = self.known
        drawn = [list(map(len, self.drawn[row]["candidates"])) for row in rows]
        targets = [max([int(known.targets[row]), *lengths]) for row, lengths in zip(rows, drawn, strict=True)]
        sources = known.sources[rows]
        if plan.joined == "shared":
            sources = sources + np.array([sum(lengths) for lengths in drawn], np.int64)
        elif plan.joined:
            sources = sources - known.targets[rows] + targets
        return plan.with_lengths(rows, sources.tolist(), targets)

    def _draw(self, rows: list[int], done: int) -> Exception | None:
        """Write the texts of these rows with the weights as they are, and score them. Returns why that failed."""
        began, self.first = time.perf_counter(), done
        sources = [np.asarray(self.examples[row]["input_ids"]).tolist() for row in rows]
        named = (f"{self.seed} {done} {row}" for row in rows)  # equal sources are to have different samples
        seeds = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") for name in named]
        found: list[list[tuple[list[int], bool]]] = [[] for _ in rows]
        with unchanged(self.model):
            if self.copy is None:
                self.model.eval()
            else:
                refresh(self.copy, self.model)
            for writer in (self.greedy, self.sampler):  # the greedy text comes first
                if writer is not None:
                    for texts, written in zip(found, writer.write(sources, seeds), strict=True):
                        texts += [_without_start(row, writer.search) for row in written]
        flat = iter(decoded(self.tokenizer, [ids for texts in found for ids, _ in texts]))
        read = [[next(flat) for _ in texts] for texts in found]
        try:
            scores = self.own.scores(rows, read)
            _raise_unless_finite(rows, read, scores)
        except Exception as reason:  # of a metric or a function: any class
            return reason
        self.drawn |= {row: self._drawn(texts, values) for row, texts, values in zip(rows, found, scores, strict=True)}
        self._sums.update(seconds=time.perf_counter() - began, texts=sum(map(len, found)))
        return None

    def _drawn(self, texts: Sequence[tuple[list[int], bool]], values: Sequence[float]) -> DrawnTexts:
        first = int(self.greedy is not None and not self.needs.greedy_text)  # it is only a baseline
        made: DrawnTexts = {
            "candidates": [ids for ids, _ in texts[first:]],
            "scores": [float(value) for value in values[first:]],
            "unended": sum(not ended for _, ended in texts[first:]),
        }
        return made | {"baseline": float(values[0])} if self.needs.baseline else made

    # Checkpoints

    def saved(self, step: int) -> dict[str, str]:
        """File name → text for a checkpoint: the texts of the steps after it. Every process calls this."""
        if step % self.own.settings.refresh == 0:
            return {}
        shares: list[Any] = [self.drawn]
        if self.here.count > 1:
            shares = [None] * self.here.count
            torch.distributed.all_gather_object(shares, self.drawn)
        rows = {row: drawn for share in shares for row, drawn in share.items()}
        return {FILE: json.dumps({"first": self.first, "rows": rows})}

    def restore(self, checkpoint: Path) -> None:
        """Take the texts of the steps after a checkpoint from it, if they were written before."""
        if not (checkpoint / FILE).exists():  # nothing waits: its seal would know of a file that is missing
            return
        path, number = checkpoint / FILE, self.texts - 1
        saved: Saved = typed(Saved, read_object(path, AGAIN), path, AGAIN)
        tokens = range(self.model.get_input_embeddings().weight.shape[0])
        for row, drawn in saved.rows.items():
            texts = drawn["candidates"]
            longest = max([0, *map(len, texts)])
            if not (
                row < len(self)
                and len(texts) == len(drawn["scores"]) == number
                and longest < self.search.max_length
                and all(token in tokens for text in texts for token in text)
                and ("baseline" in drawn) == self.needs.baseline
            ):
                raise UserError(f"{path}: rows.{row} does not have the outputs of this training. {AGAIN}")
        self.first, self.drawn = saved.first, saved.rows

    # The log

    def _count(self, rows: Sequence[int], number: int) -> None:
        drawn = [self.drawn[row] for row in rows]
        self._sums.update(
            score=sum(sum(each["scores"]) for each in drawn),
            trained=sum(len(each["scores"]) for each in drawn),
            unended=sum(each["unended"] for each in drawn),
            age=number - 1 - self.first,
            steps=1,
        )

    def values(self, spent: float) -> dict[str, float]:
        """Numbers of the steps since the last call, for the log. Every process calls this."""
        sums, self._sums = self._sums, Counter()
        counted = [sums[name] for name in ("score", "unended", "trained", "texts", "seconds")]
        total = torch.tensor(counted, dtype=torch.float32, device=self.here.device)  # [5]
        score, unended, trained, texts, seconds = self.here.total(total).tolist()
        seconds /= self.here.count
        found = {"score": score / max(trained, 1), "unended": unended / max(trained, 1)}
        found["writing_share"] = min(seconds / max(spent, 1e-9), 1.0)
        if texts:
            found["texts_per_second"] = texts / max(seconds, 1e-9)
        if self.own.settings.refresh > 1:
            found["text_age"] = sums["age"] / max(sums["steps"], 1)
        return found

    def _log_what_is_written(self, loss: JointLoss) -> None:
        """Say what is written, with what, and how old it becomes."""
        settings = self.own.settings
        drawn = [f"{self.samples} sample{'s' * (self.samples != 1)}"] * (self.samples > 0)
        texts = drawn + ["the greedy text"] * (self.greedy is not None)
        often = "at every step" if settings.refresh == 1 else f"every {settings.refresh} steps"
        last = "1 step" if settings.refresh == 2 else f"{settings.refresh - 1} steps"
        old = f" Steps train on outputs that are up to {last} old." * (settings.refresh > 1)
        writer = self.sampler or self.greedy
        assert writer is not None
        logger.info(
            f"{often} the model generates {' and '.join(texts)} for each source, of at most "
            f"{self.search.max_length - 1} tokens, by engine {writer.engine.name} in {writer.engine.precision}.{old}"
        )
        if writer.engine.name == STANDARD and writer.engine.note:  # why not a faster one
            logger.info(writer.engine.note)
        if self.own.generation.engine not in (AUTO, writer.engine.name):
            logger.info(f"generation.engine = {self.own.generation.engine} cannot generate with a model in training.")
        others = f"the model's own generation settings also change its outputs: {', '.join(writer.search.others)}"
        if writer.search.others and not (self.samples and warn_of_others(loss.terms, others)):
            logger.info(f"{others}.")

    def _remark(self) -> None:
        """Warn, one time each, if the texts of all processes teach nothing, or do not end. Every process calls this."""
        first = int(self.needs.greedy_text)
        baselines = [[each["baseline"]] if self.needs.baseline else [] for each in self.drawn.values()]
        compared = [each["scores"][first:] + own for each, own in zip(self.drawn.values(), baselines, strict=True)]
        written = sum(len(each["scores"]) for each in self.drawn.values())
        ended = written - sum(each["unended"] for each in self.drawn.values())
        counts = [len(compared), sum(len({*group}) > 1 for group in compared), written, ended]
        every = self.here.total(torch.tensor(counts, dtype=torch.float32, device=self.here.device))  # [4]
        groups, differ, texts, ends = map(int, every.tolist())
        after = f"{self.first} step{'s' * (self.first != 1)}"
        if self.compares and groups and not differ:
            self._warn(
                "scores",
                f"all outputs of each source have the same score after {after}, so there is nothing to compare: "
                "policy and risk learn nothing from them, and rank and prefer a random order. If this continues, "
                "raise online.temperature or online.samples, or choose another online.metric.",
            )
        if texts and not ends:
            self._warn(
                "ends",
                f"none of the {texts} outputs generated after {after} ended within generation.max_length. They are "
                "trained on without an end token, and the log counts them as unended.",
            )

    def _warn(self, about: str, sentence: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            logger.warning(f"warning: {sentence}")
