"""Documents packed into rows, and the same documents apart, for tests."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

V = 4


class Packed(NamedTuple):
    """Rows with several documents each.

    Attributes:
        logits: [B, T, V].
        labels: [B, T].
        segments: [B, T].
        documents: the places of each document in the rows, (row, first, end).
    """

    logits: torch.Tensor
    labels: torch.Tensor
    segments: torch.Tensor
    documents: list[tuple[int, int, int]]

    def apart(self, rows):
        """Numbers of the packed positions with one document a row, filled up with 0 or, for labels, with −100."""
        longest = max((end - first for _, first, end in self.documents), default=0)
        filler = 0 if rows.dtype.is_floating_point else -100
        documents = [rows[row, first:end] for row, first, end in self.documents]
        return torch.stack([_filled(document, longest, filler) for document in documents])


def _filled(document, length, filler):
    rest = document.new_full((length - len(document), *document.shape[1:]), filler)
    return torch.cat([document, rest])


@st.composite
def packed_rows(draw, *, boundary_labels=False):
    """Documents of one token, shorter than n, with masked prompts; padding before, between and after them."""
    rows, documents = [], []
    for row in range(draw(st.integers(1, 3))):
        labels, segments, number = [], [], draw(st.integers(0, 5))
        for place in range(draw(st.integers(1, 4))):
            if place or not row or draw(st.booleans()):  # otherwise the row begins with a document
                gap = draw(st.integers(0, 2))
                outside = draw(st.integers(0, V - 1)) if boundary_labels and draw(st.booleans()) else -100
                labels += [-100] * gap + [outside]
                segments += [draw(st.sampled_from([-1, -7, number + 1]))] * gap + [-1]
            number = number + draw(st.integers(2, 3)) if draw(st.booleans()) else number  # −1 lies between: a new text
            own = draw(st.lists(st.sampled_from([*range(V), *range(V), -100]), min_size=1, max_size=6))
            documents.append((row, len(labels), len(labels) + len(own)))
            labels += own
            segments += [number] * len(own)
        rows.append((labels, segments))
    T = max(len(labels) for labels, _ in rows) + draw(st.integers(0, 2))
    labels = torch.tensor([labels + [-100] * (T - len(labels)) for labels, _ in rows])
    segments = torch.tensor([segments + segments[-1:] * (T - len(segments)) for _, segments in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(*labels.shape, V, generator=generator, dtype=torch.float64)
    right = torch.nn.functional.one_hot(labels.clamp_min(0), V) * draw(st.sampled_from([0.0, 1.0, 3.0]))
    return Packed(logits + right, labels, segments, documents)
