"""what a model made of further rows, candidates and streams → the statistics that terms read of them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import CandidateStats, TextIds, TokenStats, at_positions, token_stats, token_stats_from_hidden
from ngramloss.models.attached.calls import Made
from ngramloss.models.attached.candidates import CandidateRows
from ngramloss.models.attached.heads import Head, has_encoder

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
    loss_fn: JointLoss,
    made: Made,
    candidates: CandidateRows | None,
    references: Tensor,
    aligned: Tensor,
    places: Tensor | None,
) -> tuple[Made, dict[str, Any]]:
    """The same with the rows of the references alone, and what terms read of others, as arguments of the loss.

    Args:
        aligned: the same, aligned with the positions that predict them, [B, T].
    """
    further: dict[str, Any] = {}
    if candidates is not None:
        rows, others = candidates.split(made.rows, references.shape[-1], places)  # [B, T, …], [B·K, T', …]
        made = made._replace(rows=rows)
        further["candidates"] = _candidate_stats(loss_fn, candidates, others, references, made.head)
    elif places is not None:
        made = made._replace(rows=at_positions(made.rows, places))  # [S, T, …]
    return made, further | _stream_stats(loss_fn, made, aligned)


def _stream_stats(loss_fn: JointLoss, made: Made, labels: Tensor) -> dict[str, Tensor]:
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
    loss_fn: JointLoss, candidates: CandidateRows, rows: Tensor, references: Tensor, head: Head | None
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
    loss_fn: JointLoss,
    rows: Tensor,
    labels: Tensor,
    head: Head | None,
    *,
    memory: str,
    needs: Collection[str] = (),
    texts: TextIds | None = None,
) -> TokenStats:
    """Statistics of further rows, from hidden states without ever having all logits.

    Args:
        texts: whose tokens ``cross_logp`` has, if not those of the rows themselves.
    """
    labels = labels.to(rows.device)  # [N, T]
    if head is None:
        return token_stats(rows, labels, needs=needs, check=loss_fn.check, texts=texts)
    settings: dict[str, Any] = {"check": loss_fn.check, "backend": loss_fn.backend, "memory": memory, "texts": texts}
    return token_stats_from_hidden(rows, labels=labels, **head._asdict(), needs=needs, **settings)
