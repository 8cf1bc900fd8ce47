"""a model, lengths, a number of candidates → cost of a step that compares them, or of a training that writes them."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngramloss import UserError
from ngramloss_bench import options as add
from ngramloss_bench import step
from ngramloss_bench.benchmark import NAN, Column, Measured, Plan, Row, repeated
from ngramloss_bench.child import in_child

if TYPE_CHECKING:
    from torch import Tensor

SUMMARY = "a step that compares candidates"
TEXT = """\
Time a training step that compares candidates of each source, as `rank` does, beside a plain step and its encoder. The
encoder reads a source once, and each candidate is one more text of the decoder, so the parts are the encoder once and
the rest of the plain step for each text. On a GPU, forward and backward are a CUDA graph. With --online, train shortly
on candidates that the model writes meanwhile: documents and texts per second, and the share of time spent writing."""
EXAMPLES = """\
examples:
  ngramloss bench candidates
  ngramloss bench candidates --count 4 --batch-size 8 --source 1024 --target 128 -o candidates.json
  ngramloss bench candidates --model bart-tiny --count 2 --batch-size 2 --source 20 --target 10      # quick
  ngramloss bench candidates --online --count 4 --objective "ce + risk" --refresh 1 8 --steps 20
"""
PLAIN, ENCODER, ONLINE = "ce", "the encoder alone", "ce, without writing"
PARTS = "/ parts"
"""The time of a step, divided by that of its parts: the encoder once, and the rest of the plain step for each text."""
COLUMNS = [Column("docs/s", 1), Column("ms"), Column("GiB"), Column(PARTS, unit="×")]
ONLINE_COLUMNS = [Column("docs/s", 1), Column("texts/s", 1), Column("writing %", 0, "%"), Column("GiB")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add.model(parser)
    add.objective(parser, "ce + 10*rank(margin=0.001,alpha=2)", "with a term that compares candidates")
    add.number(parser, "--count", 16, "K", "candidates of each source")
    add.number(parser, "--batch-size", 16, "B", "sources")
    add.number(parser, "--source", 512, "T", "source tokens")
    add.number(parser, "--target", 64, "T", "tokens of each text")
    add.precision(parser, "bf16 and fp16 are mixed precision")
    parser.add_argument("--online", action="store_true", help="train on texts that the model writes meanwhile")
    add.numbers(parser, "--refresh", [1, 8], "N", "with --online: steps for which texts are written at a time")
    add.number(parser, "--steps", 16, "N", "with --online: steps that are measured, after as many others")
    repeats = "timed steps, or trainings, of each row (default: 3; CUDA graphs are replayed 30 times)"
    parser.add_argument("--repeats", type=int, metavar="N", help=repeats)


def plan(options: argparse.Namespace, folder: Path) -> Plan:
    """A step and its parts, or trainings."""
    from ngramloss import JointLoss
    from ngramloss_bench import models

    if not JointLoss(options.objective).needs_candidates:
        raise UserError(f"no term of {options.objective!r} compares candidates. Add one, such as rank.")
    numbers = [options.count, options.batch_size, options.source, options.target]
    numbers += [options.steps, *options.refresh] if options.online else []
    if min(numbers) < 1:
        raise UserError(f"expected numbers of at least 1, got {', '.join(map(str, numbers))}.")
    if options.online:
        models.configuration(options.model)
        return Plan(step.title(options), ONLINE_COLUMNS, trainings(options))
    return Plan(step.title(options), COLUMNS, steps(options), partial(compare, options.count))


def steps(options: argparse.Namespace) -> Iterator[Row]:
    """A plain step, its encoder, and a step that compares candidates of each source."""
    import torch

    from ngramloss import attach, detach
    from ngramloss_bench import clock, models

    device, batch, count = options.device, options.batch_size, options.count
    model: Any = models.built(options.model, device)
    if models.is_decoder_only(model.config):
        raise UserError(f"{options.model} is decoder-only, and has no encoder to time. Name an encoder-decoder.")
    longest, most = models.most_positions(model.config), max(options.source, options.target)
    if most > longest:
        raise UserError(f"{options.model} has {longest:,} positions, but {most:,} tokens were asked for.")
    inputs = models.example(model, batch, options.source, options.target, device)
    others = models.example(model, batch * count, 1, options.target, device)["labels"].view(
        batch, count, -1
    )  # [B, K, T]
    scores = torch.linspace(1, 0, count, device=device).expand(batch, -1)  # [B, K]

    def loss_of(**more: Tensor) -> Tensor:
        loss: Tensor = model(**inputs, **more).loss
        return loss

    def encoded() -> Tensor:
        hidden: Tensor = model.get_encoder()(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).last_hidden_state  # [B, S, D]
        return hidden.float().square().mean()

    def cost(loss_of: Callable[[], Tensor]) -> dict[str, list[float]]:
        def run() -> None:
            model.zero_grad()
            with models.autocast(device, options.precision):
                loss = loss_of()
            loss.backward()

        common: Any = {"device": device, "clear": model.zero_grad, "repeats": options.repeats}
        captured = device == "cuda"
        spent = clock.captured_cost(run, **common) if captured else clock.cost(run, usual=3, warm_up=1, **common)
        return clock.per_second(spent, batch)

    attach(model, PLAIN)
    yield Row(PLAIN, partial(cost, loss_of))
    detach(model)
    yield Row(ENCODER, partial(cost, encoded))
    attach(model, options.objective)
    name = f"{options.objective}, {count} candidates"
    yield Row(name, partial(cost, partial(loss_of, candidates=others, scores=scores)))


def compare(count: int, measured: list[Measured]) -> None:
    """Add the ratio to the parts."""
    plain, encoder, _ = (row.median("ms") for row in measured)
    parts = encoder + (1 + count) * (plain - encoder)
    if parts == parts and not measured[2].why_not:
        measured[2].values[PARTS] = [spent / parts for spent in measured[2].values["ms"]]


# Texts that the model writes


def trainings(options: argparse.Namespace) -> Iterator[Row]:
    """Train without writing, then with own texts for each refresh; the second half of twice ``--steps`` is measured."""
    for refresh in (0, *options.refresh):
        name = f"{options.objective}, {options.count} samples, refresh {refresh}" if refresh else ONLINE
        yield Row(name, partial(repeated, partial(in_child, trained, options, refresh), options.repeats or 3))


class _Numbers:
    """A tokenizer whose words are ids."""

    pad_token_id: int | None = None

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def trained(options: argparse.Namespace, refresh: int) -> dict[str, float]:
    """Train once."""
    import ngramloss as ng
    from ngramloss_bench import models

    models.prepare(options)
    batch, source, target, steps = options.batch_size, options.source, options.target, options.steps
    model: Any = models.built(options.model)
    ids = models.example(model, batch * 8, source, target, "cpu")
    read, labels = ids["input_ids"][:, :source].tolist(), ids["labels"][:, -target:].tolist()
    rows = [{"input_ids": source_ids, "labels": label_ids} for source_ids, label_ids in zip(read, labels, strict=True)]
    tokenizer, own = _Numbers(), None
    if refresh:  # scores are ROUGE, in which ids are words
        metric = ng.candidate_scores.candidate_metric("rouge", {})
        texts = zip(tokenizer.batch_decode(read), tokenizer.batch_decode(labels), strict=True)
        examples = [ng.data.Example(str(number), *each) for number, each in enumerate(texts)]
        own = ng.OwnTexts(
            ng.recipe.Online(samples=options.count, refresh=refresh),
            lambda numbers, texts: ng.candidate_scores.scores_at_once(
                metric, [examples[number] for number in numbers], texts
            ),
            ng.recipe.Generation(max_length=target + (not models.is_decoder_only(model.config))),
        )
    lines: list[Mapping[str, float]] = []
    models.train(
        options,
        model,
        rows,
        lambda _, line: lines.append(line),
        objective=options.objective if refresh else PLAIN,
        tokenizer=tokenizer,
        own_texts=own,
        max_steps=2 * steps,
        batch_size=batch,
        accumulate=1,
        log_every=steps,
        save_every=2 * steps,
    )
    line = lines[-1]
    return {
        "docs/s": line["docs_per_second"],
        "texts/s": line.get("texts_per_second", NAN),
        "writing %": 100 * line.get("writing_share", NAN),
        "GiB": line["memory_gib"] if options.device == "cuda" else NAN,
    }
