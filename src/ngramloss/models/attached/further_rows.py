"""what a model made of further rows, candidates and streams → the statistics that terms read of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import CandidateStats, TextIds, TokenStats, at_positions, token_stats, token_stats_from_hidden
from ngramloss.models.attached.calls import HeadRows, LabelledBatch
from ngramloss.models.attached.candidates import CandidateRows
from ngramloss.models.attached.heads import OutputHead, has_encoder

STREAM_STATS = {"future_logp": "label_logp", "future_mean_logp": "mean_logp"}
"""What objectives read of a ProphetNet's further streams → the statistic of each stream that it is the sum of."""


def reads_streams(loss_fn: JointLoss) -> bool:
    """Whether an objective reads the further streams of a ProphetNet."""
    return not loss_fn.needs.isdisjoint(STREAM_STATS)


def refuse_missing_streams(model: Any, loss_fn: JointLoss) -> None:
    """Raise if the objective reads further streams, and the model has none."""
    config = model.config
    if reads_streams(loss_fn) and not ("prophetnet" in config.model_type and has_encoder(model) and config.ngram > 1):
        raise UserError(
            f"{str(loss_fn)!r} reads streams that look further ahead, which this {type(model).__name__} does not have. "
            "future is for an encoder-decoder ProphetNet with an ngram of 2 or more, such as "
            "microsoft/prophetnet-large-uncased. Leave it out for other models."
        )


def further_stats(
    loss_fn: JointLoss, made: HeadRows, candidates: CandidateRows | None, batch: LabelledBatch
) -> tuple[HeadRows, dict[str, Any]]:
    """The same with the rows of the references alone, and what terms read of others, as arguments of the loss."""
    further: dict[str, Any] = {}
    if candidates is not None:
        rows, others = candidates.split(made.rows, batch.labels.shape[-1], batch.places)  # [B, T, …], [B·K, T', …]
        made = made._replace(rows=rows)
        further["candidates"] = _candidate_stats(loss_fn, candidates, others, batch.labels, made.head)
    elif batch.places is not None:
        made = made._replace(rows=at_positions(made.rows, batch.places))  # [S, T, …]
    return made, further | _stream_stats(loss_fn, made, batch.aligned)


def _stream_stats(loss_fn: JointLoss, made: HeadRows, labels: Tensor) -> dict[str, Tensor]:
    """What the objective reads of the further streams, summed over them, for labels [B, T]; nothing if none is read."""
    wanted = {name: own for name, own in STREAM_STATS.items() if name in loss_fn.needs}
    if not wanted or made.streams is None:
        return {}
    further = made.streams.shape[1]
    repeated = labels.repeat_interleave(further, 0)  # [B·(n − 1), T]
    rows = made.streams.flatten(0, 1)  # [B·(n − 1), T, …]
    stats = _row_stats(loss_fn, rows, repeated, made.head, memory=loss_fn.memory, needs=[*wanted.values()])
    summed = {name: getattr(stats, own).unflatten(0, (-1, further)).sum(1) for name, own in wanted.items()}
    return summed  # [B, T] each


def _candidate_stats(
    loss_fn: JointLoss, candidates: CandidateRows, rows: Tensor, references: Tensor, head: OutputHead | None
) -> CandidateStats:
    """What the objective reads of the candidates, whose rows are [B·K, T', …]; ``references`` are labels, [B, T]."""
    labels, needs = candidates.labels.flatten(0, 1).to(rows.device), loss_fn.candidate_needs  # [B·K, T']
    every = functools.partial(_row_stats, loss_fn, head=head, memory="lean")
    if "greedy_cross_logp" not in needs or candidates.greedy is None:
        return candidates.stats(every(rows, labels).label_logp, needs)
    row = torch.arange(len(references), device=rows.device)  # [B]
    texts = TextIds(references.to(rows.device), row.unsqueeze(-1).expand(-1, labels.shape[-1]))  # [B, T], [B, T']
    own = every(candidates.own(rows), candidates.own(labels), needs=("cross_logp",), texts=texts)
    # Only greedy texts need `cross_logp`, which is large. If there are samples, too, the head runs twice for them.
    of_all = own if candidates.labels.shape[1] == 1 else every(rows, labels)
    return candidates.stats(of_all.label_logp, needs)._replace(greedy_cross_logp=own.cross_logp)


def _row_stats(
    loss_fn: JointLoss, rows: Tensor, labels: Tensor, head: OutputHead | None, *, memory: str, **more: Any
) -> TokenStats:
    """Statistics of further rows [N, T, …], from hidden states without ever having all logits; ``more`` is theirs."""
    labels, more["check"] = labels.to(rows.device), loss_fn.check  # [N, T]
    if head is None:
        return token_stats(rows, labels, **more)
    return token_stats_from_hidden(
        rows, labels=labels, **head._asdict(), backend=loss_fn.backend, memory=memory, **more
    )
