"""The objectives under test, each with its oracle and range, and the batches they are tested on."""

from typing import NamedTuple

import oracle
import torch
from hypothesis import strategies as st

from ngramloss import Term, token_stats
from ngramloss.loss.stats import LOGITS_ONLY


class Case(NamedTuple):
    term: Term
    oracle: object
    low: float
    high: float

    @property
    def part(self):
        (part,) = self.term.parts
        return part

    def __repr__(self):
        return str(self.term)


def case(name, function, low, high, n=(), variant=None, **options):
    given = {"n": n if name == "bleu" else n[0]} if n else {}
    return Case(
        Term(name, n, 1.0, variant, options), lambda p, labels: function(p, labels, **given, **options), low, high
    )


INFINITY = float("inf")
CASES = [
    case("ce", oracle.ce, 0, INFINITY),
    case("ce", oracle.ce, 0, INFINITY, smoothing=0.1),
    case("ce", oracle.ce, 0, INFINITY, temperature=2),  # one temperature in all: a sum of cases has one
    case("ce", oracle.ce, 0, INFINITY, smoothing=0.1, temperature=2),
    *(case("matches", oracle.matches, 0, 1, (n,)) for n in (1, 2, 3, 5)),
    *(case("matches", oracle.matches_released, 0, 1, (n,), "released") for n in (2, 3)),
    *(case("rewards", oracle.rewards, 0, 1, (n,)) for n in (2, 3, 4)),
    *(case("precision", oracle.precision, -1, 0, (n,)) for n in (1, 2, 3)),
    *(case("precision", oracle.precision_released, -1, 0, (n,), "released") for n in (1, 2)),
    *(case("bag", oracle.bag, 0.5, 1, (n,)) for n in (1, 2, 3)),
    *(case("bag", oracle.bag_original, 0, 1, (n,), "original") for n in (1, 2)),
    *(case("bag", oracle.bag_released, -1, 1, (n,), "released") for n in (1, 2)),
    *(case("bleu", oracle.bleu, -1, 0, n) for n in ((2,), (1, 2, 3))),
    case("lcs", oracle.lcs, 0, 69.1),
    *(case("eisl", oracle.eisl, 0, INFINITY, (n,)) for n in (1, 2, 3)),
    *(case("soft", oracle.soft, 0, 1, (n,)) for n in (1, 3)),
    *(case("soft", oracle.soft, 0, 1, (2,), kappa=kappa) for kappa in (0.5, 3)),
    *(case("gated", oracle.gated, 0, 1, (n,)) for n in (1, 2, 3)),
    *(case("near", oracle.near, 0, 1, (n,)) for n in (1, 2)),
    case("near", oracle.near, 0, 1, (2,), power=0.5),
    *(case("accept", oracle.accept, 0, 1, (n,)) for n in (1, 3)),
    *(case("accept", oracle.accept_detached, 0, INFINITY, (n,), "detached") for n in (2, 4)),
    *(case("accept", oracle.accept_detached, 0, INFINITY, (3,), "detached", alpha=alpha) for alpha in (0.0, 1.0)),
    *(case("accept", oracle.accept_gated, 0, INFINITY, (n,), "gated") for n in (1, 3)),
    *(case("convex", oracle.convex, -INFINITY, 0, order=order) for order in (1, 3)),
    case("dft", oracle.dft, 0, INFINITY),
    case("tailr", oracle.tailr, 0, INFINITY),
    case("tailr", oracle.tailr, 0, INFINITY, gamma=0.4, min_weight=0.5),
    case("mixce", oracle.mixce, 0, INFINITY),
    case("mixce", oracle.mixce, 0, INFINITY, eta=0.1),
    case("unlikelihood", oracle.unlikelihood, 0, INFINITY),
    case("focal", oracle.focal, 0, INFINITY),
    *(case("focal", oracle.focal, 0, INFINITY, gamma=gamma) for gamma in (0.0, 0.5)),
    case("eaft", oracle.eaft, 0, INFINITY),
    *(case("eaft", oracle.eaft, 0, INFINITY, alpha=alpha) for alpha in (0.0, 0.5, 2.0)),
    case("eaft", oracle.eaft_released, 0, INFINITY, variant="released"),
    case("eaft", oracle.eaft_released, 0, INFINITY, variant="released", alpha=2.0),
]
GIVEN_CASES = [
    *(case("margin", oracle.margin, 0, INFINITY, **options) for options in ({}, {"power": 1}, {"power": 2})),
    case("future", oracle.future, 0, INFINITY),
    case("future", oracle.future, 0, INFINITY, smoothing=0.1),
]
"""Those that read what the logits do not have, which :func:`given` gives."""


def given(term, logits, labels):
    """What the oracles take for a language model and a further stream, as far as the term reads it."""
    stream = token_stats(logits / 2, labels, needs=("mean_logp",))
    found = {
        "lm_logp": oracle.language_model(labels.clamp_min(0).double()).log(),
        "future_logp": stream.label_logp,
        "future_mean_logp": stream.mean_logp,
    }
    return {name: value for name, value in found.items() if name in term.needs}


FROM_HIDDEN = [each for each in CASES if not each.term.needs & LOGITS_ONLY]


class Batch(NamedTuple):
    logits: torch.Tensor
    labels: torch.Tensor


@st.composite
def batches(draw, longest=8, rows=3):
    """Few ids, so that n-grams repeat; a model that is often right; padding before, after and in the middle."""
    B, T, V = draw(st.integers(1, rows)), draw(st.integers(1, longest)), draw(st.integers(2, 4))
    labels = torch.tensor(draw(st.lists(st.integers(0, V - 1), min_size=B * T, max_size=B * T))).view(B, T)
    for row in labels:
        kind = draw(st.sampled_from(["full", "after", "before", "middle", "all"]))
        cut, length = draw(st.integers(0, T)), draw(st.integers(1, T))
        if kind == "after":
            row[length:] = -100
        elif kind == "before":
            row[:cut] = -100
        elif kind == "middle":
            row[cut : cut + length] = -100
        elif kind == "all":
            row[:] = -100
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(B, T, V, generator=generator, dtype=torch.float64)
    right = torch.nn.functional.one_hot(labels.clamp_min(0), V) * draw(st.sampled_from([0.0, 1.0, 3.0]))
    return Batch(logits + right, labels)


EVERYTHING = (
    "ce(smoothing=0.1) + 0.5*ce(temperature=2) + 0.5*matches(1,2,3) + matches(3):released + rewards(2) + 2*precision(2) + precision(2):released "
    "+ bag(2) + bag(2):original + bag(2):released + bleu(1,2) + lcs + eisl(2) "
    "+ soft(2,kappa=1) + gated(2) + near(2) + accept(3) + accept(2,alpha=0.3):detached + 0.5*accept(3):gated + convex(order=2) + dft + tailr(gamma=0.5,min_weight=0.1) + mixce + unlikelihood + focal + 0.5*eaft"
)
