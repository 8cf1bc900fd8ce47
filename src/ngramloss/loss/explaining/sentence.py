"""a reference, outputs and a confidence → the logits of a model that predicts the first output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import GIVEN, IGNORE_INDEX, CandidateStats, TokenStats, token_stats

FILLER = "_"  # replaces a missing word in a candidate. It has its own id and matches nothing, not even a real ``_``
_MISSING = {
    "twins": "two predictions of a model with different dropout, but a pair of sentences has one",
    "teacher": "all probabilities of a model with a teacher's, but a pair of sentences has none",
}
"""What a pair of sentences lacks, as in ``Term.requires`` → the end of a sentence that says so."""


class Sentence(NamedTuple):
    """A sentence pair, and a model that predicts the candidate."""

    reference: list[str]
    candidate: list[str]
    confidence: list[float]
    labels: Tensor
    logits: Tensor
    outputs: list[list[str]]  # the candidate and the others, which objectives that compare candidates read
    output_ids: list[Tensor]
    texts: CandidateStats | None = None  # the outputs under the model, if the objective reads them

    @property
    def stats(self) -> TokenStats:
        """All statistics that a pair of sentences has."""
        return token_stats(self.logits, self.labels, needs=("cross_logp", "mean_logp", "entropy", "top_entropy"))

    @property
    def written(self) -> CandidateStats:
        """The outputs, and the own text after them."""
        assert self.texts is not None
        return self.texts

    @property
    def samples(self) -> CandidateStats:
        """The outputs alone."""
        names, K = ("logp", "length", "score", "tokens", "token_logp"), len(self.outputs)
        return self.written._replace(greedy=None, **{name: getattr(self.written, name)[:, :K] for name in names})

    def part(self, first: int, end: int) -> Sentence:
        """The words from ``first`` to ``end`` by themselves."""
        words = self.reference[first:end], self.candidate[first:end], self.confidence[first:end]
        return Sentence(*words, self.labels[:, first:end], self.logits[:, first:end], [words[1]], [])

    def candidates(self, loss_fn: JointLoss, logits: Tensor) -> CandidateStats | None:
        """The outputs under a model with these logits, if the objective reads them; scores are ROUGE-1."""
        if not loss_fn.needs_candidates:
            return None
        if loss_fn.needs_samples and len(self.outputs) == 1:
            raise UserError(
                f"{str(loss_fn)!r} compares several outputs of a model, but there is only one candidate. Give more "
                "with --others."
            )
        logp = logits[0].log_softmax(-1).clamp_min(-1e30)  # [T, V]
        tokens = pad_sequence(self.output_ids, batch_first=True, padding_value=IGNORE_INDEX)  # [K, T']
        real = tokens != IGNORE_INDEX  # [K, T']
        per_token = logp[: tokens.shape[-1]].expand(len(tokens), -1, -1)  # [K, T', V]
        token_logp = per_token.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1).where(real, 0.0)  # [K, T']
        common = ((Counter(words) & Counter(self.reference)).total() for words in self.outputs)
        shares = [2 * n / (len(words) + len(self.reference)) for n, words in zip(common, self.outputs, strict=True)]
        score = torch.tensor(shares, dtype=logp.dtype)  # [K]
        if loss_fn.needs_own_text:  # the candidate, once more, after all outputs
            tokens, token_logp, score = (torch.cat([values, values[:1]]) for values in (tokens, token_logp, score))
        own = torch.arange(len(tokens)) >= len(self.outputs)  # [K]
        length = (tokens != IGNORE_INDEX).sum(-1)  # [K]
        cross = logp[: tokens.shape[-1], self.labels[0]]  # [T', T]
        found = (token_logp.sum(-1), length, score, score[0], own, tokens, token_logp, cross)
        return CandidateStats(*(values[None] for values in found))


def raise_if_not_compared(others: Sequence[str], objectives: Sequence[JointLoss]) -> None:
    """Raise if there are other outputs and no objective that compares them, or one reads what words do not have."""
    for loss_fn in objectives:
        for missing, why in _MISSING.items():
            for term in loss_fn.terms:
                if missing in term.requires:
                    raise UserError(f"{term.names[0]} compares {why}. Explain the other terms without it.")
        if loss_fn.needs & GIVEN.keys():
            raise UserError(
                f"{str(loss_fn)!r} reads a second model's probabilities or further streams, which a pair of sentences "
                "does not have. Leave out margin and future."
            )
    if others and not any(loss_fn.needs_samples for loss_fn in objectives):
        listed = " or ".join(repr(str(loss_fn)) for loss_fn in objectives)
        raise UserError(f"no term of {listed} compares outputs: add rank, risk or prefer, or leave --others out.")


def read(
    reference: str, candidate: str, confidence: Sequence[float], others: Sequence[str] = ()
) -> tuple[Sentence, list[str]]:
    """The sentence pair as a model sees it. Also returns notes about changes to the candidate."""
    wanted, given = reference.split(), candidate.split()
    if not wanted or not given:
        raise UserError(f"the {'candidate' if wanted else 'reference'} has no words. Give a sentence in quotes.")
    T, notes, outputs = len(wanted), [], [given[: len(wanted)], *(text.split() for text in others)]
    for words in outputs:
        if not 1 <= len(words) <= T:
            raise UserError(
                f"--others: an output must have 1 to {T} words, got {len(words)}. It cannot be longer than the "
                "reference, whose words are the model's positions."
            )
    if len(given) != T:
        change = "truncated" if len(given) > T else f"filled with {FILLER!r}"
        notes.append(
            f"note: the reference has {T} words and the candidate {len(given)}. A model under teacher forcing predicts "
            f"one word for each position, so the candidate was {change}."
        )
    sure = list(confidence) * T if len(confidence) == 1 else list(confidence)
    if len(sure) != T:
        raise UserError(f"expected 1 confidence, or {T} (one for each word), got {len(sure)}.")
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(chain(wanted, *outputs)))}
    V = len(vocabulary) + 1
    for position, given_share in enumerate(sure, 1):
        if not 1 / V < given_share <= 1:
            raise UserError(
                f"the confidence at position {position} must be above {1 / V:.3g} (1/{V}, all words equally likely) "
                f"and at most 1, got {given_share:g}: the candidate must be the most probable word."
            )
    labels, *output_ids = (torch.tensor([vocabulary[word] for word in words]) for words in (wanted, *outputs))
    best = torch.nn.functional.pad(output_ids[0], (0, T - len(output_ids[0])), value=V - 1)  # [T], a filler is unknown
    share = torch.tensor(sure, dtype=torch.float64).unsqueeze(-1)  # [T, 1]
    chosen = torch.nn.functional.one_hot(best, V).bool()  # [T, V]
    logits = torch.where(chosen, share, (1 - share) / (V - 1)).log()  # [T, V]
    predicted = (given + [FILLER] * T)[:T]
    return Sentence(wanted, predicted, sure, labels[None], logits[None], outputs, output_ids), notes
