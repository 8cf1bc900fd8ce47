"""a reference, candidates and a confidence → a text that shows how an objective scores them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss.explaining.blocks import decimal, outputs, value_alone
from ngramloss.loss.explaining.sentence import Sentence, raise_if_not_compared, read
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import packing
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.output.console import aligned
from ngramloss.plugins import first_doc_line

WIDTH = 100  # approximate number of characters in a line


def explain(
    reference: str | Sequence[str],
    candidate: str | Sequence[str],
    objective: str,
    confidence: Sequence[float] = (0.9,),
    others: Sequence[str] = (),
) -> str:
    """Show what an objective computes for a sentence pair, window by window; words are split at white space.

    A position of the model is a word of the reference: a candidate that is too short is filled with ``_``, one that is
    too long is truncated. The remaining probability is divided evenly among the other words and one unknown word. The
    candidate is also the model's own greedy text; ``others`` are more outputs, with at most as many words as the
    reference. Several references, with a candidate for each, are documents packed into one row, confidences in its
    order.
    """
    loss_fn = JointLoss(objective)
    loss_fn.progress = 1.0  # what a schedule leads to
    raise_if_not_compared(others, [loss_fn])
    references, given = ([text] if isinstance(text, str) else list(text) for text in (reference, candidate))
    if len(references) > 1 or len(given) > 1:
        return _explain_packed(references, given, loss_fn, confidence)
    sentence, notes = read(references[0], given[0], confidence, others)
    sentence = sentence._replace(texts=sentence.candidates(loss_fn, sentence.logits))
    loss, parts = loss_fn.with_parts(sentence.logits, sentence.labels, candidates=sentence.texts)
    blocks = [_header(sentence), *_term_blocks(sentence, loss_fn, parts)]
    blocks += [notes] if notes else []
    return "\n\n".join("\n".join(block) for block in [*blocks, [_total(loss_fn, loss, parts)]])


def _explain_packed(
    references: Sequence[str], candidates: Sequence[str], loss_fn: JointLoss, confidence: Sequence[float]
) -> str:
    """As :func:`explain`, for documents packed into one row."""
    if len(references) != len(candidates):
        raise UserError(
            f"give a candidate for each reference: got {len(references)} references and {len(candidates)} candidates."
        )
    if loss_fn.needs_candidates:
        raise UserError(f"{str(loss_fn)!r} compares outputs for one reference. Give one reference.")
    lengths = [len(text.split()) for text in references]
    for number, (length, candidate) in enumerate(zip(lengths, candidates, strict=True), 1):
        if length != len(candidate.split()):
            raise UserError(
                f"document {number}: the reference has {length} words and the candidate {len(candidate.split())}. "
                "Give equal numbers in a packed row, or explain the documents one by one."
            )
    sentence, _ = read(" ".join(references), " ".join(candidates), confidence)
    ends = list(accumulate(lengths))
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]  # [1, T]
    packed = packing(sentence.labels, segments)
    loss, parts = loss_fn.with_parts(sentence.logits, sentence.labels, segments=packed)
    blocks = []
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
        document = sentence.part(first, end)
        _, own = loss_fn.with_parts(document.logits, document.labels)
        blocks += [[f"document {number} of {len(ends)}"], _header(document), *_term_blocks(document, loss_fn, own)]
    blocks += [[f"the row: {len(ends)} documents, {len(sentence.reference)} words"]]
    return "\n\n".join("\n".join(block) for block in [*blocks, [_total(loss_fn, loss, parts)]])


def _term_blocks(sentence: Sentence, loss_fn: JointLoss, parts: Mapping[str, Tensor]) -> list[list[str]]:
    """The lines of each term."""
    blocks = []
    for term in loss_fn.terms:
        unknown = outputs if term.reads == "candidates" else value_alone
        show = OBJECTIVES.entry(term.name).explanation(term.variant) or unknown
        for part, n in zip(term.parts, term.n if len(term.n) == len(term.parts) else [1], strict=True):
            block = show(sentence, term, n)
            tables = [*_columns(block.table), *(_columns(list(block.sums)) if block.sums else [])]
            blocks.append(
                [
                    f"{part.name} = {block.title or first_doc_line(show)}",
                    *tables,
                    f"  value {decimal(parts[part.name].item())}",
                ]
            )
    return blocks


def _total(loss_fn: JointLoss, loss: Tensor, parts: Mapping[str, Tensor]) -> str:
    """The joint loss as the sum of its terms."""
    weighted = " + ".join(
        decimal(value.item()) if weight == 1 else f"{weight:g}·{decimal(value.item())}"
        for weight, value in zip(loss_fn.weights, parts.values(), strict=True)
    )
    whole = decimal(loss.item())
    return f"{loss_fn} = {weighted}" + (f" = {whole}" if weighted != whole else "")


def _header(sentence: Sentence) -> list[str]:
    """The words in aligned columns, broken into strips that fit a terminal."""
    positions = [str(t + 1) for t in range(len(sentence.reference))]
    confidence = [f"{share:g}" for share in sentence.confidence]
    columns = list(zip(positions, sentence.reference, sentence.candidate, confidence, strict=True))
    names = ("position", "reference", "candidate", "confidence")
    lines: list[str] = []
    while columns:
        fits, width = 0, len("confidence")
        while fits < len(columns) and (not fits or width + 2 + max(map(len, columns[fits])) <= WIDTH):
            width += 2 + max(map(len, columns[fits]))
            fits += 1
        strip = [list(row) for row in zip(names, *columns[:fits], strict=True)]
        lines += ([""] if lines else []) + [line[2:] for line in _columns(strip, names=1)]
        columns = columns[fits:]
    return lines


def _columns(table: list[list[str]], names: int = 2) -> list[str]:
    """Lines with aligned columns: the first ``names`` to the left, numbers to the right."""
    if len(table) == 1 and len(table[0]) > 1:
        text = "own text" if "own text" in table[0] else "reference"
        return [f"  the {text} is shorter than n, so there are no windows"]
    left = (0,) if names == 1 else (1,) if table[0][0] in ("at", "order") else ()
    return [f"  {line}" for line in aligned(table, left)]
