"""Documents packed into rows for a tiny model, and their terms with each document apart."""

import numpy as np
import torch
from models import V

import ngramloss as ng
from ngramloss.models.attached.attach import attached_loss

OBJECTIVE = "ce + 0.5*matches(2,3) + bag(2) + convex"


LENGTHS = [[5, 1, 7, 2], [4, 8, 3]]
"""Tokens of the documents of each row; one token and three are shorter than an n-gram after the shift."""


def rows(lengths=LENGTHS, seed=0):
    """Rows of documents, as ids and as labels whose prompt is masked in every second document."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 9, (len(lengths), sum(lengths[0])), generator=generator)
    labels = ids.clone()
    for row, documents in enumerate(lengths):
        for number, (first, length) in enumerate(zip(np.cumsum([0, *documents]).tolist(), documents, strict=False)):
            labels[row, first : first + (length // 2 if number % 2 else 0)] = -100
    return ids, labels


def documents_of(lengths=LENGTHS):
    return [
        (row, int(first), int(first) + length)
        for row, documents in enumerate(lengths)
        for first, length in zip(np.cumsum([0, *documents]), documents, strict=False)
    ]


def positions(lengths=LENGTHS):
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def expected(logits, labels, documents, objective=OBJECTIVE):
    """The terms in plain words: ``ce`` as stock computes it on the packed row, the rest with each document apart."""
    terms = ng.JointLoss(objective)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    _, packed = terms.with_parts(logits, shifted)
    longest = max(end - first for _, first, end in documents)
    own = torch.full((len(documents), longest), -100)
    rows = torch.zeros(len(documents), longest, V, dtype=logits.dtype)
    for number, (row, first, end) in enumerate(documents):
        own[number, : end - first - 1] = labels[row, first + 1 : end]
        rows[number, : end - first] = logits[row, first:end]
    _, apart = terms.with_parts(rows, own)
    return {part.name: (packed if part.by_position else apart)[part.name] for part in terms.parts}


def agree(model, parts, wanted):
    got = ng.last_parts(model)
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        parts, sum(part.weight * wanted[part.name] for part in attached_loss(model).parts), atol=1e-5, rtol=1e-5
    )
