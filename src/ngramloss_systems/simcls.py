"""candidates of any writer → a reranker that scores each by its likeness to the document (SimCLS), and its choice.

After Liu and Liu (2021), "SimCLS: A Simple Framework for Contrastive Learning of Abstractive Summarization", and their
code: an encoder reads document and candidate one by one, and takes the candidate with the highest cosine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ngramloss as ng
from ngramloss_systems.agreement import check_utility, expected_scores
from ngramloss_systems.candidate_sets import (
    CandidateSet,
    check_apart,
    check_training,
    metric_text,
    one_metric,
    read_set,
)

NAME = "simcls"
METRIC = "metric"
"""Where the metric of the scores is saved, with checkpoints and with choices."""
FIRST, BEST, MBR = CHOOSERS = ("first", "best", "mbr")
"""What can choose without a reranker: the writer's own first text; the one with the highest score, an oracle; the one
that agrees most with the others, by minimum Bayes risk."""


# The formula


class Penalties(NamedTuple):
    """What a row adds to the loss, [B] each."""

    order: Tensor
    """For candidates whose cosines are not in the order of their scores."""
    reference: Tensor
    """For candidates with a higher cosine than the reference."""


def penalties(
    cosine: Tensor, reference: Tensor, score: Tensor, present: Tensor, *, margin: float, gold_margin: float
) -> Penalties:
    r"""The ranking loss of SimCLS for each row, of cosines [B, K] of candidates and [B] of references.

    .. math::
        \sum_{d=1}^{K-1} \frac{1}{K-d} \sum_{i=1}^{K-d} \max(0, S_{i+d} - S_i + d \cdot \textit{margin})
        \quad\text{and}\quad
        \frac{1}{K} \sum_{k} \max(0, S_k - S_{\textit{reference}} + \textit{gold margin})

    with the K candidates from the highest score to the lowest; equal scores keep their order. A row with one candidate
    has no order, and one with none has neither.

    >>> cosine, score = torch.tensor([[0.5, 0.75]]), torch.tensor([[0.9, 0.1]])
    >>> penalties(cosine, torch.tensor([0.5]), score, score > 0, margin=0.25, gold_margin=0.0)
    Penalties(order=tensor([0.5000]), reference=tensor([0.1250]))
    """
    stats = ng.CandidateStats(cosine, present.to(cosine), score)
    too_high = (cosine - reference.unsqueeze(-1) + gold_margin).relu().where(present, 0.0)  # [B, K]
    order = ng.OBJECTIVES["rank"].formula()(stats, margin=margin, alpha=0.0)  # [B]
    return Penalties(order, too_high.sum(-1) / present.sum(-1).clamp_min(1))


class Cosines(NamedTuple):
    """Cosines with the document: of the reference, [B], and of each candidate, [B, K]; which candidates there are."""

    reference: Tensor
    candidates: Tensor
    present: Tensor


def cosines_of_batch(encoder: Any, batch: ng.padding.Batch, *, pad: int, pooling: str) -> Cosines:
    """Encode the texts of a batch of :class:`Padder` and compare. Absent ones are not encoded, and have 0."""
    ids = batch["input_ids"]  # [B, S]
    mask = batch.get("attention_mask", torch.ones_like(ids))  # [B, S]
    documents = _states(encoder, ids, mask, pooling)  # [B, D]
    texts = torch.cat([batch["labels"].unsqueeze(1), batch["candidates"]], 1)  # [B, 1 + K, T]
    real = texts != ng.IGNORE_INDEX  # [B, 1 + K, T]
    present = real.any(-1)  # [B, 1 + K]
    states = documents.new_zeros(*present.shape, documents.shape[-1])  # [B, 1 + K, D]
    states[present] = _states(encoder, texts.where(real, pad)[present], real[present].long(), pooling)
    cosine = F.cosine_similarity(documents.unsqueeze(1), states, dim=-1)  # [B, 1 + K]
    return Cosines(cosine[:, 0], cosine[:, 1:], present[:, 1:])


def _states(encoder: Any, ids: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """One vector for each text, in fp32 or more, [N, D]."""
    states: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state  # [N, T, D]
    states = states.to(torch.promote_types(states.dtype, torch.float32))  # [N, T, D]
    if pooling == "first":
        return states[:, 0]
    weights = mask.to(states).unsqueeze(-1)  # [N, T, 1]
    return (states * weights).sum(1) / weights.sum(1)


# Training


def task(run: ng.Run) -> ng.SystemTask:
    """What ``ngramloss rerank train`` trains: candidates read and tokenised, and the encoder."""
    settings, options = run.settings, run.system.options
    files = ng.candidates.named_files(settings.data.candidates)
    if "train" not in files:
        raise ng.UserError(
            "SimCLS learns from candidates, but data.candidates has none to train on. Make some with ngramloss "
            "candidates, then: ngramloss rerank train FOLDER"
        )
    config = ng.encoders.load_encoder_config(settings.model)  # a mistake is found before data are read
    check_training(files)
    sets = {split: read_set(paths, settings.data, settings.task, split) for split, paths in files.items()}
    if settings.train.eval_every == 0:
        sets.pop("validation", None)
    check_apart(sets)
    metric = one_metric({f"the {split} candidates": of_split.metric for split, of_split in sets.items()})
    used = [*_used(sets), f"scores: {metric_text(metric)}."]
    tokenizer = run.tokenizer(sets["train"])
    raise_unless_pooled(tokenizer, settings.model.name, options["pooling"])
    longest = max(settings.data.max_source, settings.data.max_target)
    encoder = ng.encoders.load_encoder(settings.model, tokenizer, longest=longest)
    rows = {split: _rows(of_split, tokenizer, settings) for split, of_split in sets.items()}
    used += _cut(rows, settings)
    margins = {name: options[name] for name in ("margin", "gold_margin")}

    def cosines_of(batch: ng.padding.Batch) -> Cosines:
        return cosines_of_batch(encoder, batch, pad=tokenizer.pad_token_id, pooling=options["pooling"])

    def parts_of(cosines: Cosines, score: Tensor) -> dict[str, Tensor]:
        found = penalties(cosines.candidates, cosines.reference, score, cosines.present, **margins)
        return {"order": found.order, "reference": options["gold_weight"] * found.reference}

    def validate(batches: Any) -> dict[str, float]:
        """The loss, and the score of the texts that are chosen."""
        total, score = 0.0, 0.0
        for _, batch in batches:
            cosines = cosines_of(batch)
            total += float(torch.stack([*parts_of(cosines, batch["scores"]).values()]).sum())
            score += float(batch["scores"].gather(-1, _choice(cosines).unsqueeze(-1)).sum())
        count = len(rows["validation"])
        return {"loss": total / count, "score": score / count}

    made_of = {f"{split} candidates": of_split.candidates.fingerprint for split, of_split in sets.items()}
    return ng.SystemTask(
        run,
        encoder,
        tokenizer,
        rows,
        _padder(tokenizer),
        Penalties._fields,
        validate,
        splits=sets,
        loss_of=lambda batch, _: parts_of(cosines_of(batch), batch["scores"]),
        config=config,
        made_of=made_of | {METRIC: json.dumps(metric)},
        used=used,
    )


def raise_unless_pooled(tokenizer: Any, name: str, pooling: str) -> None:
    """Raise if the first token of a text should stand for it, but is the text's own."""
    whole, bare = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    if pooling == "first" and whole[:1] == bare[:1]:
        raise ng.UserError(
            f"pooling=first needs a token before every text, and the tokenizer of {name} adds none. Take the mean over "
            f"all tokens: --set 'system=\"{NAME}(pooling=mean)\"'"
        )


def _rows(of_split: CandidateSet, tokenizer: Any, settings: ng.recipe.Recipe) -> Any:
    shape = ng.tokens.Shape.of(settings.data)
    return ng.candidates.tokenise(of_split.examples, of_split.fingerprint, of_split.candidates, tokenizer, shape)


def _padder(tokenizer: Any) -> ng.padding.Padder:
    return ng.padding.Padder(tokenizer.pad_token_id, lambda labels: labels)


def _used(sets: Mapping[str, CandidateSet]) -> list[str]:
    """What is used of the candidates, in sentences. Raises if there is nothing to choose between."""
    sentences = []
    for split, of_split in sets.items():
        counts = [len(texts) for texts in of_split.texts]
        alone = sum(count == 1 for count in counts)
        if alone == len(counts):
            raise ng.UserError(
                f"every source of the {split} candidates has only one candidate, so there is nothing to choose. Make "
                "several with: ngramloss candidates RUN_OR_MODEL --count 16"
            )
        equal = sum(len(set(values)) == 1 < len(values) for values in of_split.scores)
        if equal == len(counts) - alone:
            raise ng.UserError(
                f"all candidates of every source of the {split} candidates have equal scores, so there is no order to "
                "learn. Make them again with another --metric, or other texts: ngramloss candidates RUN_OR_MODEL"
            )
        few = f" {alone:,} sources have one candidate only, which has no order." if alone else ""
        ties = f" {equal:,} sources have candidates of equal scores, which have no order." if equal else ""
        origins = " and ".join(f"{name} ({own})" for name, own in dict.fromkeys(of_split.origins))
        mean = sum(counts) / len(counts)
        sentences.append(f"{split}: {len(counts):,} sources of {origins}, {mean:.1f} candidates each.{few}{ties}")
    if "validation" not in sets:
        sentences.append(
            "nothing is validated, so the last weights become the model. Candidates of the validation split select the "
            "best ones: --validation FOLDER."
        )
    return sentences


def _cut(rows: Mapping[str, Any], settings: ng.recipe.Recipe) -> list[str]:
    return [
        f"{split}: {ng.data.lost_ends(cut, len(of_split), 'sources', settings.data.max_source)}"
        for split, of_split in rows.items()
        if (cut := of_split.tokens.cut[0])
    ]


def _choice(cosines: Cosines) -> Tensor:
    return cosines.candidates.where(cosines.present, float("-inf")).argmax(-1)


# Choosing


class Reranker:
    """A trained reranker."""

    def __init__(self, folder: Path) -> None:
        run = ng.RunFolder(folder)
        if not run.recipe.is_file():
            raise ng.MissingFileError(
                f"{folder} is not a run: it has no {run.recipe.name}. Give the folder of ngramloss rerank train, "
                f"{FIRST}, {BEST} or {MBR}."
            )
        command = "ngramloss rerank train CANDIDATES"
        self.run = ng.saved_run(folder, NAME, noun="a reranker", command=command)
        self.tokenizer, self.data = self.run.tokenizer, self.run.settings.data
        self.pooling = self.run.options["pooling"]
        self.metric = metric_of(run)
        encoder = ng.encoders.load_encoder(ng.recipe.Model(name=str(run.model)), self.tokenizer)
        self.encoder = encoder.to(self.run.device).eval()

    @property
    def facts(self) -> dict[str, Any]:
        """What is saved with its choices."""
        return {**self.run.facts, "lengths": [self.data.max_source, self.data.max_target]}

    @torch.no_grad()
    def cosines(self, documents: Sequence[str], texts: Sequence[Sequence[str]]) -> list[list[float]]:
        """The cosine of each text with its document, −1 to 1, in fp32; −∞ for an empty text, which is never chosen."""
        shape = ng.tokens.Shape.of(self.data)
        ids = ng.tokens.prompt_ids(documents, self.tokenizer, shape)
        flat = [text for group in texts for text in group]
        encoded = iter(ng.tokens.targets(flat, self.tokenizer, shape) if flat else [])
        rows = [
            {"input_ids": own, "labels": [], "candidates": [next(encoded) for _ in group], "scores": [0.0] * len(group)}
            for own, group in zip(ids, texts, strict=True)
        ]
        found: list[list[float]] = [[] for _ in rows]
        with ng.Progress("scoring candidates", total=len(rows), unit="documents") as progress:
            for numbers, batch in self.run.batches(rows, _padder(self.tokenizer)):
                cosines = cosines_of_batch(self.encoder, batch, pad=self.tokenizer.pad_token_id, pooling=self.pooling)
                known = cosines.candidates.where(cosines.present, float("-inf"))
                for number, values in zip(numbers, known.tolist(), strict=True):
                    found[number] = [
                        value if text.strip() else float("-inf")
                        for text, value in zip(texts[number], values, strict=False)
                    ]
                    if any(map(isnan, found[number])):
                        raise ng.UserError(
                            f"{self.run.model} has a cosine that is NaN for a candidate of document {number + 1}: its "
                            "weights are not usable. Train it again, with a lower train.learning_rate."
                        )
                progress.update(len(numbers))
        return found


def metric_of(run: ng.RunFolder) -> dict[str, Any]:
    """The metric of the scores that a reranker was trained on; empty if it is not known."""
    if made_of := run.made_of:
        found: dict[str, Any] = json.loads(made_of.get(METRIC) or "{}")
        return found
    own = ng.recipe.load(str(run.recipe), objective=False)
    return next((about[METRIC] for path in _trained_on(own) if METRIC in (about := ng.candidates.about_of(path))), {})


def _trained_on(own: ng.recipe.Recipe) -> list[Path]:
    return ng.candidates.named_files(own.data.candidates)["train"]


class Chosen(NamedTuple):
    """What was chosen, for how many sources another text than the first, and mean scores: also of the best choice."""

    path: Path
    sources: int
    first: float
    chosen: float
    best: float
    mean: float
    changed: int
    metric: str


def choose(chooser: str, of_split: CandidateSet, folder: Path, *, task: str, metric: str = "") -> Chosen:
    """Choose a text of each source and write it, as ``ngramloss generate`` writes predictions."""
    if metric and chooser != MBR:
        raise ng.UserError(f"--metric is an option of {MBR}, not of {chooser}. Leave it out.")
    if chooser in CHOOSERS and ng.RunFolder(Path(chooser)).recipe.is_file():
        raise ng.UserError(
            f"{chooser} is a built-in choice, but also the folder of a run here. For the run, write ./{chooser}; for "
            "the built-in choice, work in another folder."
        )
    texts, known = of_split.texts, of_split.scores
    alone = sum(len(group) == 1 for group in texts)
    if alone:
        ng.console.logger.warning(f"{alone:,} of {len(texts):,} sources have only one candidate, which is chosen.")
    facts: dict[str, Any] = {"candidates": of_split.candidates.fingerprint, METRIC: of_split.metric}
    if chooser == MBR:
        utility = ng.candidate_scores.candidate_metric(metric, {}) if metric else _saved_metric(of_split.metric, task)
        for note in check_utility(utility, of_split.examples):
            ng.console.logger.info(note)
        ng.console.logger.info(f"texts are compared by {metric_text(utility.settings)}.")
        facts |= {"utility": {**utility.settings, "versions": utility.versions}}
        picked = [_highest(values) for values in expected_scores(utility, of_split.examples, texts)]
    elif chooser in CHOOSERS:
        picked = [0 if chooser == FIRST else _highest(values) for values in known]
    else:
        reranker = Reranker(Path(chooser))
        facts |= reranker.facts
        if reranker.metric and of_split.metric and reranker.metric != of_split.metric:
            ng.console.logger.warning(
                f"{chooser} was trained on scores by {metric_text(reranker.metric)}, but these candidates are scored "
                f"by {metric_text(of_split.metric)}."
            )
        cosines = reranker.cosines([example.source for example in of_split.examples], texts)
        picked = [_highest(values) for values in cosines]
    by_id = {example.id: group[number] for example, group, number in zip(of_split.examples, texts, picked, strict=True)}

    def write(examples: Sequence[ng.data.Example]) -> list[str]:
        return [by_id[example.id] for example in examples]

    work = ng.Job(chooser, ng.recipe.Model(name=chooser), of_split.data, of_split.split, None, None, 0, 0, task=task)
    split = ng.data.Split(of_split.data.name, of_split.split, of_split.examples, [], of_split.fingerprint)
    path = ng.predictions.write_texts(work, folder, write, facts, split=split)
    count = len(texts)
    return Chosen(
        path,
        count,
        sum(values[0] for values in known) / count,
        sum(values[number] for values, number in zip(known, picked, strict=True)) / count,
        sum(map(max, known)) / count,
        sum(sum(values) / len(values) for values in known) / count,
        sum(number > 0 for number in picked),
        metric_text(of_split.metric),
    )


def generate(work: ng.Job, folder: Path) -> Path:
    """Let the writer of the training candidates write candidates of a job's documents, and choose among them."""
    run = ng.RunFolder(Path(work.model))
    own = ng.recipe.load(str(run.recipe), objective=False)
    if work.task != own.task:
        raise ng.UserError(f"{work.model} was trained for {own.task}, not for {work.task}. Leave --set task out.")
    about = _writer_of(work.model, _trained_on(own))
    data = ng.write_candidates_like(about, work, _saved_metric(metric_of(run), work.task), folder)
    of_split = read_set([folder], data, work.task, work.split, exactly=True)
    return choose(work.model, of_split, folder, task=work.task).path


def _writer_of(reranker: str, trained_on: Sequence[Path]) -> dict[str, Any]:
    """What is saved of the one writer of the training candidates. Raises unless there is one, and it can be found."""
    instead = f"ngramloss rerank apply {reranker} CANDIDATES --out DIR"
    found = {}
    for path in trained_on:
        about = ng.candidates.about_of(path)
        if "candidates" not in about:
            raise ng.UserError(
                f"{reranker} reranks the outputs of another model, but {path} does not name this model. Give its "
                f"candidates: {instead}"
            )
        found[about.get("weights") or about["model"]] = about
    if len(found) > 1:
        names = ", ".join(str(about["model"]) for about in found.values())
        raise ng.UserError(
            f"{reranker} was trained on candidates of {len(found)} models: {names}. Generate candidates with one of "
            f"them, then: {instead}"
        )
    (about,) = found.values()
    if about.get("model_files") and not Path(str(about["model"])).exists():  # a model of the hub has none
        raise ng.MissingFileError(
            f"{reranker} reranks the outputs of the model {about['model']}, but {Path.cwd()} has no such folder. Work "
            f"where it is, or give candidates: {instead}"
        )
    return about


def _saved_metric(metric: Mapping[str, Any], task: str) -> ng.candidate_scores.CandidateMetric:
    """What scores as a saved metric did, or the task's usual one."""
    if not metric:
        return ng.candidate_scores.candidate_metric(ng.candidate_scores.BY_TASK[task], {})
    name, scores = metric["name"], metric["scores"]
    known = ng.METRICS.entry(name).options
    options = {option: known[option].read(value) for option, value in metric["options"].items() if option in known}
    return ng.candidate_scores.candidate_metric(
        name if len(scores) > 1 else scores[0], options, lines=metric["sentence_a_line"] or None
    )


def _highest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=lambda place: values[place])
