"""a sentence pair and several objectives → how each would change every word's logit, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ngramloss.loss.explaining.sentence import raise_if_not_compared, read
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.output.console import aligned


class Push(NamedTuple):
    """What each objective does to one word at one position."""

    position: int  # from 1
    word: str  # the word
    role: str  # ``both`` if the model predicts the reference's word, otherwise ``reference`` or ``predicted``
    probability: float  # of the word
    by: list[float]
    """The negative gradient of its logit, for each objective: above 0, a step of training raises the logit."""


def pushes(
    reference: str,
    candidate: str,
    objectives: Sequence[str],
    confidence: Sequence[float] = (0.9,),
    others: Sequence[str] = (),
) -> tuple[list[Push], list[str]]:
    """What each objective does to the words of the pair; also notes about changes to the candidate."""
    losses = [JointLoss(objective) for objective in objectives]
    raise_if_not_compared(others, losses)
    sentence, notes = read(reference, candidate, confidence, others)
    slopes: list[Tensor] = []
    for loss_fn in losses:
        logits = sentence.logits.clone().requires_grad_()  # [1, T, V]
        loss_fn.progress = 1.0  # what a schedule leads to
        loss_fn(logits, sentence.labels, candidates=sentence.candidates(loss_fn, logits)).backward()
        assert logits.grad is not None
        slopes.append(-logits.grad[0])  # [T, V]
    rows = []
    probability = sentence.logits[0].softmax(-1)  # [T, V]
    for t, (label, best) in enumerate(
        zip(sentence.labels[0].tolist(), sentence.stats.best_token[0].tolist(), strict=True)
    ):
        words = (
            [(label, sentence.reference[t], "both")]
            if label == best
            else [(label, sentence.reference[t], "reference"), (best, sentence.candidate[t], "predicted")]
        )
        rows += [
            Push(t + 1, word, role, probability[t, index].item(), [slope[t, index].item() for slope in slopes])
            for index, word, role in words
        ]
    return rows, notes


def as_text(rows: Sequence[Push], objectives: Sequence[str], notes: Sequence[str] = ()) -> str:
    """A table, one row for each word.

    >>> rows, _ = pushes("a b c", "a b d", ["ce", "matches(2)"], [0.6])
    >>> print(as_text(rows, ["ce", "matches(2)"]))
    one step of training: + raises the logit of a word, − lowers it
    at  word  role       probability       ce  matches(2)
     1  a     both            0.6000  +0.1333     +0.0720
     2  b     both            0.6000  +0.1333     +0.0720
     3  c     reference       0.1000  +0.3000      0.0000
     3  d     predicted       0.6000  −0.2000      0.0000
    """
    table = [["at", "word", "role", "probability", *objectives]]
    table += [
        [str(push.position), push.word, push.role, f"{push.probability:.4f}", *map(_signed, push.by)] for push in rows
    ]
    title = "one step of training: + raises the logit of a word, − lowers it"
    return "\n".join([title, *aligned(table, left=(1, 2)), *notes])


def _signed(value: float) -> str:
    shown = f"{abs(value):.4f}"
    return shown if float(shown) == 0 else ("+" if value > 0 else "−") + shown
