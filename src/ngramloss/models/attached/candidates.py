"""candidates of each source → rows of the decoder beside the reference's; further rows → what terms read of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module

from ngramloss.errors import UserError
from ngramloss.loss import stats as loss_stats
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import IGNORE_INDEX, CandidateStats, TextIds, TokenStats, at_positions
from ngramloss.models.attached.calls import HeadRows, LabelledBatch
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.models.attached.heads import OutputHead, has_encoder
from ngramloss.models.attached.segments import POSITIONS

KEYS = ("candidates", "candidate_inputs", "candidate_positions", "scores", "greedy", "baseline")
"""What a batch with candidates has besides the inputs of a model."""
FOR_ONE_TEXT = ("decoder_attention_mask", "decoder_inputs_embeds", "decoder_position_ids")
"""Inputs of a decoder that are not known for the candidates."""

NOT_CAUSAL = ("prophetnet",)
"""Models whose predictions depend on what follows, in transformers' implementation."""
STREAM_STATS = {"future_logp": "label_logp", "future_mean_logp": "mean_logp"}
"""What objectives read of a ProphetNet's further streams → the statistic of each stream that it is the sum of."""


class CandidateRows(NamedTuple):
    """The candidates of a batch: K texts for each source, of which some may be absent.

    In an encoder-decoder, row b·(1 + K) is the reference of source b, and the K rows after it are its candidates. A
    decoder-only model has prompts and texts in any order; texts may share a prompt.
    """

    labels: Tensor  # ids, −100 where they do not count. A candidate without ids is absent, [B, K, T'].
    inputs: Tensor | None  # what the decoder of an encoder-decoder reads to predict them, [B, K, T']
    scores: Tensor  # what each candidate scores against the reference, [B, K]
    positions: Tensor | None  # indices of the positions of a decoder-only model that predict them, [B, K, T']
    greedy: Tensor | None = None  # whether a candidate is the model's own greedy text, bool [B, K]
    baseline: Tensor | None = None  # what that text scores, [B]

    def beside(self, references: Tensor, pad: int) -> Tensor:
        """The decoder's input with a row for each text, also of references [B, T]: [B·(1 + K), max(T, T')]."""
        assert self.inputs is not None
        length = max(references.shape[-1], self.inputs.shape[-1])
        texts = (references.unsqueeze(1), self.inputs)  # [B, 1, T], [B, K, T']
        filled = [F.pad(ids, (0, length - ids.shape[-1]), value=pad) for ids in texts]
        return torch.cat(filled, 1).flatten(0, 1)  # [B·(1 + K), T'']

    def split(self, rows: Tensor, length: int, references: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Rows [B·(1 + K), T'', …] → of references (or at these positions), [B, T, …], and candidates, [B·K, T', …]."""
        if references is not None and self.positions is not None:
            return at_positions(rows, references), at_positions(rows, self.positions).flatten(0, 1)
        texts = rows.unflatten(0, (-1, 1 + self.labels.shape[1]))  # [B, 1 + K, T'', …]
        return texts[:, 0, :length], texts[:, 1:, : self.labels.shape[-1]].flatten(0, 1)

    def own(self, rows: Tensor) -> Tensor:
        """What was computed for the greedy text of each source, [B, T', …]; for some text of it if there is none."""
        assert self.greedy is not None
        marked = self.greedy & (self.labels != IGNORE_INDEX).any(-1)  # [B, K]
        return rows.index_select(0, loss_stats.own_rows(marked).to(rows.device))

    def stats(self, label_logp: Tensor, needs: Collection[str] = ()) -> CandidateStats:
        """Sums over each candidate's tokens, by [B·K, T'], start and end included; BRIO's code leaves the start out."""
        device = label_logp.device
        labels, token_logp = self.labels.to(device), label_logp.view(self.labels.shape)  # [B, K, T'] each
        baseline, greedy = (None if x is None else x.to(device) for x in (self.baseline, self.greedy))  # [B], [B, K]
        stats = CandidateStats(
            token_logp.sum(-1), (labels != IGNORE_INDEX).sum(-1), self.scores.to(device), baseline, greedy
        )
        return stats._replace(tokens=labels, token_logp=token_logp) if "token_logp" in needs else stats


def candidate_rows(model: Any, inputs: dict[str, Any]) -> CandidateRows | None:
    """Take the candidates out of a model's inputs, which lose their keys; None if it has none."""
    references = inputs["labels"]  # [B, T]
    labels, ready, positions, scores, greedy, baseline = (inputs.pop(name, None) for name in KEYS)
    if labels is None:
        if any(value is not None for value in (ready, positions, scores, greedy, baseline)):
            raise UserError("the inputs have `scores` or other inputs of candidates, but `candidates` are missing.")
        return None
    if labels.ndim != 3 or len(labels) != len(references):
        raise UserError(
            f"candidates must be label ids [B, K, T] with B = {len(references)}, -100 where they do not "
            f"count, got a tensor of shape {list(labels.shape)}."
        )
    if scores is None or scores.shape != labels.shape[:2]:
        actual = "none" if scores is None else f"a tensor of shape {list(scores.shape)}"
        raise UserError(
            f"candidates need `scores` [B, K] = {list(labels.shape[:2])}, what each scores against the "
            f"reference, got {actual}."
        )
    if greedy is not None and (greedy.shape != labels.shape[:2] or greedy.dtype != torch.bool):
        raise UserError(
            f"`greedy` must be true or false for each candidate, {list(labels.shape[:2])}, got {greedy.dtype} of shape "
            f"{list(greedy.shape)}."
        )
    if baseline is not None and baseline.shape != labels.shape[:1]:
        raise UserError(
            f"`baseline` must be what the greedy text of each source scores, {list(labels.shape[:1])}, got a tensor of "
            f"shape {list(baseline.shape)}."
        )
    greedy = greedy if labels.shape[1] else None  # without room for candidates there is no greedy text
    if refused := [name for name in FOR_ONE_TEXT if inputs.get(name) is not None]:
        raise UserError(
            f"{refused[0]} is for the reference alone, but the decoder also reads the candidates. Leave it out: "
            "padding at the end needs none."
        )
    if not has_encoder(model):
        if positions is None or positions.shape != labels.shape or inputs.get(POSITIONS) is None:
            raise UserError(
                "candidates of a decoder-only model are in the rows of the batch, so it needs `label_positions`, and "
                f"`candidate_positions` in the shape of the candidates, {list(labels.shape)}. `ngramloss train` and "
                "ng.train make such batches."
            )
        return CandidateRows(labels, None, scores, positions, greedy, baseline)
    own = inputs.get("decoder_input_ids")  # [B, T]
    if own is not None and own.shape != references.shape:
        raise UserError(
            f"decoder_input_ids and labels must have one shape, got {list(own.shape)} and {list(references.shape)}."
        )
    if ready is None:
        ready = decoder_inputs(model, labels.flatten(0, 1)).view(labels.shape)  # [B, K, T']
    return CandidateRows(labels, ready, scores, None, greedy, baseline)


def decoder_that_repeats(model: Any) -> Module:
    """The decoder of a model, which can get several rows for each source. Raises if the model has none."""
    name = type(model).__name__
    if model.config.model_type in NOT_CAUSAL:
        raise UserError(
            f"the probabilities of {name} change with padding, so candidates of different lengths cannot be compared. "
            "Leave out the terms that compare candidates."
        )
    decoder = model.get_decoder()
    if not isinstance(decoder, Module) or "encoder_hidden_states" not in inspect.signature(decoder.forward).parameters:
        raise UserError(
            f"the decoder of {name}, {type(decoder).__name__}, takes no `encoder_hidden_states`, so a "
            "source cannot be given to several candidates. Leave out the terms that compare candidates."
        )
    return decoder


def repeat_sources(decoder: Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The forward pre-hook on a decoder: if it gets several rows for each source, repeat what the encoder returned."""
    hidden, ids = kwargs.get("encoder_hidden_states"), kwargs.get("input_ids")  # [B, S, D], [B·(1 + K), T]
    if hidden is None or ids is None or hidden.shape[0] == ids.shape[0]:
        return None
    times = ids.shape[0] // hidden.shape[0]
    names = ("encoder_hidden_states", "encoder_attention_mask")
    encoded = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    return args, {**kwargs, **{name: value.repeat_interleave(times, 0) for name, value in encoded.items()}}


# What terms read of further rows: candidates and streams


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
        return loss_stats.token_stats(rows, labels, **more)
    return loss_stats.token_stats_from_hidden(
        rows, labels=labels, **head._asdict(), backend=loss_fn.backend, memory=memory, **more
    )
