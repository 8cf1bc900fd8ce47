"""a reference, candidates and a confidence → a text that shows how an objective scores them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.loss import JointLoss
from ngramloss.objectives import ngrams
from ngramloss.objectives.candidates import by_gain, rank, risk
from ngramloss.objectives.tokens import unlikelihood
from ngramloss.objectives.windows import bag, bleu, eisl, gated, matches, near, precision, rewards, soft
from ngramloss.output.tabular import aligned
from ngramloss.stats import CandidateStats, TokenStats, packing, token_stats
from ngramloss.terms import OBJECTIVES, Term

FILLER = "_"
"""Replaces a missing word in a candidate. It has its own id and matches nothing, not even a real ``_``."""


WIDTH = 100
"""Approximate number of characters in a line."""


class Sentence(NamedTuple):
    """A sentence pair, and the statistics of a model that predicts the candidate."""

    reference: list[str]
    candidate: list[str]
    confidence: list[float]
    labels: Tensor
    stats: TokenStats
    logits: Tensor
    best: Tensor
    outputs: list[list[str]]
    """The candidate and the others, which objectives that compare candidates read."""
    output_ids: list[Tensor]

    def candidate_window(self, t: int, n: int) -> str:
        """The candidate's words from position t."""
        return " ".join(self.candidate[t : t + n])

    def reference_window(self, u: int, n: int) -> str:
        """The reference's words from position u."""
        return " ".join(self.reference[u : u + n])

    def part(self, first: int, end: int) -> Sentence:
        """The words from ``first`` to ``end`` by themselves."""
        labels, logits = self.labels[:, first:end], self.logits[:, first:end]  # [1, T'], [1, T', V]
        words = self.reference[first:end], self.candidate[first:end], self.confidence[first:end]
        return Sentence(*words, labels, _all_stats(logits, labels), logits, self.best[:, first:end], [words[1]], [])

    def candidates(self, loss_fn: JointLoss, logits: Tensor) -> CandidateStats | None:
        """The outputs under a model with these logits, if the objective reads them.

        A gain is the harmonic mean of the shares of words in common (ROUGE-1 without stemming).
        """
        if not loss_fn.needs_candidates:
            return None
        if len(self.outputs) == 1:
            raise UserError(
                f"{str(loss_fn)!r} compares outputs of a model, and there is only the candidate. Give more "
                "with --others."
            )
        logp = logits[0].log_softmax(-1).clamp_min(-1e30)  # [T, V]
        sums = [logp[: len(ids)].gather(-1, ids.unsqueeze(-1)).sum() for ids in self.output_ids]
        length, gain = zip(*((len(words), _f1(words, self.reference)) for words in self.outputs), strict=True)
        lengths, gains = (torch.tensor([values], dtype=logp.dtype) for values in (length, gain))  # [1, K] each
        return CandidateStats(torch.stack(sums)[None], lengths, gains)


def explain(
    reference: str | Sequence[str],
    candidate: str | Sequence[str],
    objective: str,
    confidence: Sequence[float] = (0.9,),
    others: Sequence[str] = (),
) -> str:
    """Show what an objective computes for a sentence pair, window by window.

    Words are split at white space. A model has one position for each word of the reference, so a candidate that is too
    short is filled with ``_`` and one that is too long is truncated. The candidate's word at a position has the given
    confidence; the remaining probability is divided evenly among the other words and one unknown word.

    Objectives that compare candidates (``rank``, ``risk``, ``prefer``) read the candidate and ``others``, which are
    more outputs of the same model, with at most as many words as the reference.

    Several references, with a candidate for each, are documents that a trainer packs into one row. Each is shown by
    itself; the last line has the loss of the row. A confidence for each word is given in the order of the row.

    Example:
        >>> print(explain("a b c", "a b d", "matches(2)", [0.5]))
        position      1    2    3
        reference     a    b    c
        candidate     a    b    d
        confidence  0.5  0.5  0.5
        <BLANKLINE>
        matches(2) = 1 − what the windows of the candidate earn
          at  candidate  in reference  copies  probability   earns
           1  a b                  ×1       1       0.2500  0.1250
           2  b d                   –       1       0.2500       –
          value 0.8750
        <BLANKLINE>
        matches(2) = 0.8750
    """
    loss_fn = JointLoss(objective)
    loss_fn.progress = 1.0  # what a schedule leads to
    raise_if_not_compared(others, [loss_fn])
    references, given = ([text] if isinstance(text, str) else list(text) for text in (reference, candidate))
    if len(references) > 1 or len(given) > 1:
        return _explain_packed(references, given, loss_fn, confidence)
    sentence, notes = read(references[0], given[0], confidence, others)
    candidates = sentence.candidates(loss_fn, sentence.logits)
    loss, parts = loss_fn.from_stats(sentence.stats, sentence.labels, candidates=candidates)
    blocks = [_header(sentence), *_term_blocks(sentence, loss_fn, parts, candidates)]
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
                f"document {number}: the reference has {length} words and the candidate {len(candidate.split())}. In a "
                "packed row give as many, or explain the documents one by one."
            )
    sentence, _ = read(" ".join(references), " ".join(candidates), confidence)
    ends = list(accumulate(lengths))
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]  # [1, T]
    packed = packing(sentence.labels, segments)
    loss, parts = loss_fn.with_parts(sentence.logits, sentence.labels, segments=packed)
    blocks = []
    for number, (first, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
        document = sentence.part(first, end)
        _, own = loss_fn.from_stats(document.stats, document.labels)
        blocks += [[f"document {number} of {len(ends)}"], _header(document), *_term_blocks(document, loss_fn, own)]
    blocks += [[f"the row: {len(ends)} documents, {len(sentence.reference)} words"]]
    return "\n\n".join("\n".join(block) for block in [*blocks, [_total(loss_fn, loss, parts)]])


def _term_blocks(
    sentence: Sentence, loss_fn: JointLoss, parts: Mapping[str, Tensor], candidates: CandidateStats | None = None
) -> list[list[str]]:
    """The lines of each term."""
    blocks = []
    for term in loss_fn.terms:
        if term.reads == "candidates" and candidates is not None:
            shown = _CANDIDATE_BLOCKS.get(term.name, _plain_candidates)(sentence, term, candidates)
        else:
            shown = _BLOCKS.get(term.name, _plain)(sentence, term)
        for part, rows in zip(term.parts, shown, strict=True):
            value = _figure(parts[part.name].item())
            tables = [*_columns(rows.table), *(_columns(list(rows.sums)) if rows.sums else [])]
            blocks.append([f"{part.name} = {rows.title}", *tables, f"  value {value}"])
    return blocks


def _total(loss_fn: JointLoss, loss: Tensor, parts: Mapping[str, Tensor]) -> str:
    """The joint loss as the sum of its terms."""
    weighted = " + ".join(
        _figure(value.item()) if part.weight == 1 else f"{part.weight:g}·{_figure(value.item())}"
        for part, value in zip(loss_fn.parts, parts.values(), strict=True)
    )
    whole = _figure(loss.item())
    return f"{loss_fn} = {weighted}" + (f" = {whole}" if weighted != whole else "")


def raise_if_not_compared(others: Sequence[str], objectives: Sequence[JointLoss]) -> None:
    """Raise if there are other outputs and no objective that compares them."""
    if others and not any(loss_fn.needs_candidates for loss_fn in objectives):
        listed = " or ".join(repr(str(loss_fn)) for loss_fn in objectives)
        raise UserError(f"no term of {listed} compares outputs: add rank, risk or prefer, or leave --others out.")


def read(
    reference: str, candidate: str, confidence: Sequence[float], others: Sequence[str] = ()
) -> tuple[Sentence, list[str]]:
    """Convert the sentence pair to statistics. Also returns notes about changes to the candidate."""
    wanted, given = reference.split(), candidate.split()
    if not wanted or not given:
        raise UserError(f"the {'candidate' if wanted else 'reference'} has no words. Give a sentence in quotes.")
    T, notes, outputs = len(wanted), [], [given[: len(wanted)], *(text.split() for text in others)]
    for words in outputs:
        if not 1 <= len(words) <= T:
            raise UserError(
                f"--others: an output must have from 1 to {T} words, as many as the reference, got "
                f"{len(words)}. The model of this example has one position for each word of the reference."
            )
    if len(given) != T:
        change = "truncated" if len(given) > T else f"filled with {FILLER!r}"
        notes.append(
            f"note: the reference has {T} words and the candidate {len(given)}. A model under teacher forcing predicts "
            f"one word for each position, so the candidate was {change}."
        )
    predicted = (given + [FILLER] * T)[:T]  # to show; a filler is the unknown word
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
    labels = torch.tensor([[vocabulary[word] for word in wanted]])  # [1, T]
    best = torch.tensor([[vocabulary[word] for word in given[:T]] + [V - 1] * (T - len(given))])  # [1, T]
    share = torch.tensor([sure], dtype=torch.float64).unsqueeze(-1)  # [1, T, 1]
    chosen = torch.nn.functional.one_hot(best, V).bool()  # [1, T, V]
    logits = torch.where(chosen, share, (1 - share) / (V - 1)).log()  # [1, T, V]
    stats = _all_stats(logits, labels)
    output_ids = [torch.tensor([vocabulary[word] for word in words]) for words in outputs]
    return Sentence(wanted, predicted, sure, labels, stats, logits, best, outputs, output_ids), notes


def _all_stats(logits: Tensor, labels: Tensor) -> TokenStats:
    return token_stats(logits, labels, needs=("cross_logp", "mean_logp", "entropy", "top_entropy"))


class _Block(NamedTuple):
    title: str
    table: list[list[str]]
    sums: Sequence[list[str]] = ()
    """A second table, for what the rows of the first add up to."""


def _ce(sentence: Sentence, term: Term) -> Iterator[_Block]:
    (part,) = term.parts
    table = [["at", "reference", "probability", "costs"]]
    for t, word in enumerate(sentence.reference):
        cost = _cost_alone(sentence, part.function, t) / len(sentence.reference)
        table.append([str(t + 1), word, f"{sentence.stats.label_logp[0, t].exp():.4f}", f"{cost:.4f}"])
    smoothed = ", smoothed over all words" if term.options.get("smoothing") else ""
    yield _Block(f"mean of −log p over the words of the reference{smoothed}", table)


def _cost_alone(sentence: Sentence, function: Callable[..., Tensor], t: int) -> float:
    """What a sum over tokens is if only the label of position t counts."""
    one_label = torch.full_like(sentence.labels, -100)  # [1, T]
    one_label[0, t] = sentence.labels[0, t]
    return function(sentence.stats, one_label).item()


def _eaft(sentence: Sentence, term: Term) -> Iterator[_Block]:
    (part,) = term.parts
    entropy = sentence.stats.top_entropy if term.variant == "released" else sentence.stats.entropy  # [1, T]
    assert entropy is not None
    table = [["at", "reference", "probability", "entropy", "costs"]]
    for t, word in enumerate(sentence.reference):
        cost = _cost_alone(sentence, part.function, t) / len(sentence.reference)
        probability = f"{sentence.stats.label_logp[0, t].exp():.4f}"
        table.append([str(t + 1), word, probability, f"{entropy[0, t]:.4f}", _figure(cost)])
    yield _Block("mean of −log p over the words of the reference, weighted by the entropy", table)


def _earning(sentence: Sentence, n: int, earned: matches.Earned, how: str) -> _Block:
    candidate, reference = ngrams.ids(sentence.stats.best_token, sentence.labels, n=n)  # [1, S] each
    anywhere = torch.ones_like(candidate, dtype=torch.bool)  # [1, S]
    occurs = ngrams.count(candidate, among=reference, where=anywhere)  # [1, S]
    probability = ngrams.sums(sentence.stats.best_logp, n).exp()  # [1, S]
    table = [["at", "candidate", how, "copies", "probability", "earns"]]
    for t in range(candidate.shape[1]):
        hit = bool(earned.hit[0, t])
        seen = (f"×{occurs[0, t]}" if occurs[0, t] else "–") if how == "in reference" else ("yes" if hit else "–")
        amount = f"{earned.amount[0, t]:.4f}" if hit else "–"
        copies = "–" if how == "same place" and not hit else str(int(earned.copies[0, t]))
        table.append([str(t + 1), sentence.candidate_window(t, n), seen, copies, f"{probability[0, t]:.4f}", amount])
    return _Block("1 − what the windows of the candidate earn", table)


def _matches(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        most = matches.most_counted(n) if term.variant == "released" else None
        earned = matches.matched(sentence.stats, sentence.labels, n=n, most=most)
        yield _earning(sentence, n, earned, "in reference")


def _rewards(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        yield _earning(sentence, n, rewards.placed(sentence.stats, sentence.labels, n=n), "same place")


def _precision(sentence: Sentence, term: Term) -> Iterator[_Block]:
    clipping = precision.covered_released if term.variant == "released" else precision.covered
    for n in term.n:
        share = clipping(sentence.stats, sentence.labels, n=n)  # [1, S]
        probability = ngrams.sums(sentence.stats.best_logp, n).exp()  # [1, S]
        candidate, reference = ngrams.ids(sentence.stats.best_token, sentence.labels, n=n)  # [1, S] each
        anywhere = torch.ones_like(candidate, dtype=torch.bool)  # [1, S]
        occurs = ngrams.count(candidate, among=reference, where=anywhere)  # [1, S]
        table = [["at", "candidate", "in reference", "probability", "adds"]]
        for t in range(candidate.shape[1]):
            seen = f"×{occurs[0, t]}" if occurs[0, t] else "–"
            window = sentence.candidate_window(t, n)
            table.append([str(t + 1), window, seen, f"{probability[0, t]:.4f}", f"{share[0, t]:.4f}"])
        yield _Block("− what the windows of the candidate add to the precision", table)


def _bag(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        expected = bag.expected(sentence.stats, sentence.labels, n=n)  # [1, S]
        (reference,) = ngrams.ids(sentence.labels, n=n)  # [1, S]
        copies = ngrams.count(reference, among=reference, where=torch.ones_like(reference, dtype=torch.bool))  # [1, S]
        W = max(reference.shape[1], 1)
        amount, title = {
            None: (bag.found(sentence.stats, sentence.labels, n=n) / 2, "1 − what the n-grams of the reference earn"),
            "original": (bag.found(sentence.stats, sentence.labels, n=n), "1 − what the n-grams of the reference earn"),
            "released": (expected.clamp_max(1) / W, "− what the n-grams of the reference earn"),
        }[term.variant]  # [1, S]
        table = [["at", "reference", "copies", "expected", "earns"]]
        for u in range(reference.shape[1]):
            window, many = sentence.reference_window(u, n), str(int(copies[0, u]))
            table.append([str(u + 1), window, many, f"{expected[0, u]:.4f}", f"{amount[0, u]:.4f}"])
        yield _Block(title, table)


def _bleu(sentence: Sentence, term: Term) -> Iterator[_Block]:
    table = [["n", "windows", "clipped share"]]
    for n in term.n:
        windows = int(ngrams.real(sentence.labels, n).sum())
        share = bleu.clipped_share(sentence.stats, sentence.labels, n=n).item()
        table.append([str(n), str(windows), f"{share:.4f}" if windows else "–"])
    yield _Block("− geometric mean of the clipped shares", table)


def _eisl(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        fit = eisl.preferred(sentence.stats, sentence.labels, n=n)  # [1, S]
        table = [["at", "reference", "log p where it fits", "costs"]]
        for u in range(fit.shape[1]):
            cost = -fit[0, u] / fit.shape[1]
            table.append([str(u + 1), sentence.reference_window(u, n), _figure(fit[0, u].item()), _figure(cost.item())])
        yield _Block("mean of −log p of the reference's n-grams, each where the model prefers it", table)


def _lcs(sentence: Sentence, term: Term) -> Iterator[_Block]:
    (part,) = term.parts
    share = part.function(sentence.stats, sentence.labels).neg().exp().item()
    length = share * len(sentence.reference)
    table = [["soft common words", "of"], [f"{length:.4f}", str(len(sentence.reference))]]
    yield _Block("−log of the longest common subsequence's share of the reference", table)


def _soft(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        amount = soft.powers(sentence.stats, sentence.labels, n=n, **term.options)  # [1, S]
        probability = ngrams.sums(sentence.stats.label_logp, n).exp()  # [1, S]
        table = [["at", "reference", "probability", "earns"]]
        for t in range(amount.shape[1]):
            window = sentence.reference_window(t, n)
            table.append([str(t + 1), window, f"{probability[0, t]:.4f}", f"{amount[0, t]:.4f}"])
        yield _Block("1 − what the windows of the reference earn", table)


def _gated(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        earned = gated.correct(sentence.stats, sentence.labels, n=n)
        probability = ngrams.sums(sentence.stats.best_logp, n).exp()  # [1, S]
        table = [["at", "candidate", "same place", "probability", "earns"]]
        for t in range(probability.shape[1]):
            hit = bool(earned.hit[0, t])
            seen, amount = ("yes", f"{earned.amount[0, t]:.4f}") if hit else ("–", "–")
            table.append([str(t + 1), sentence.candidate_window(t, n), seen, f"{probability[0, t]:.4f}", amount])
        yield _Block("1 − what the windows of the candidate earn", table)


def _near(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for n in term.n:
        probability, weight = near.nearness(sentence.stats, sentence.labels, n=n, **term.options)  # [1, S] each
        table = [["at", "reference", "probability", "weight", "earns"]]
        for t in range(weight.shape[1]):
            window, amount = sentence.reference_window(t, n), weight[0, t] * probability[0, t] / weight.shape[1]
            table.append([str(t + 1), window, f"{probability[0, t]:.4f}", f"{weight[0, t]:.4f}", f"{amount:.4f}"])
        yield _Block("1 − what the windows of the reference earn", table)


def _weighted(sentence: Sentence, term: Term) -> Iterator[_Block]:
    """A token's weight is its cost as a share of its cross-entropy."""
    (part,) = term.parts
    table = [["at", "reference", "probability", "weight", "costs"]]
    for t, word in enumerate(sentence.reference):
        logp, cost = sentence.stats.label_logp[0, t].item(), _cost_alone(sentence, part.function, t)
        weight = f"{-cost / logp:.4f}" if math.isfinite(cost) and -1e9 < logp < 0 else "–"
        costs = _figure(cost / len(sentence.reference))
        table.append([str(t + 1), word, f"{sentence.stats.label_logp[0, t].exp():.4f}", weight, costs])
    yield _Block("mean of −weight · log p over the words of the reference", table)


def _convex(sentence: Sentence, term: Term) -> Iterator[_Block]:
    mean = sentence.stats.label_logp.mean().exp().item()
    order = term.options.get("order", 1.0)
    table = [["mean probability", "order", "words"], [f"{mean:.4f}", f"{order:g}", str(len(sentence.reference))]]
    yield _Block("− the geometric mean of the words' probabilities, to the power of the order", table)


def _unlikelihood(sentence: Sentence, term: Term) -> Iterator[_Block]:
    penalty = unlikelihood.penalties(sentence.stats, sentence.labels)[0]  # [T, T]
    used = unlikelihood.negatives(sentence.labels)[0]  # [T, T]
    table = [["at", "reference", "penalised words", "costs"]]
    for t, word in enumerate(sentence.reference):
        words = " ".join(earlier for earlier, counts in zip(sentence.reference, used[t], strict=True) if counts)
        table.append([str(t + 1), word, words or "–", f"{penalty[t].sum() / len(sentence.reference):.4f}"])
    yield _Block("mean over the words of the reference of −log(1 − p), summed over other words before", table)


def _ranked_outputs(sentence: Sentence, candidates: CandidateStats, alpha: float) -> list[list[str]]:
    score, order, _ = by_gain.ranked(candidates, alpha=alpha)  # [1, K] each
    table = [["order", "output", "gain", "log p", "words", "f"]]
    for place, k in enumerate(order[0].tolist()):
        words, logp, f = sentence.outputs[k], candidates.logp[0, k].item(), score[0, place].item()
        table.append(
            [
                str(place + 1),
                " ".join(words),
                f"{candidates.gain[0, k]:.4f}",
                _figure(logp),
                str(len(words)),
                _figure(f),
            ]
        )
    return table


def _rank(sentence: Sentence, term: Term, candidates: CandidateStats) -> Iterator[_Block]:
    costs = rank.costs(candidates, **term.options)[0]  # [K, K]
    sums = [["places apart", "pairs", "costs"]]
    for d in range(1, len(costs)):
        sums.append([str(d), str(len(costs) - d), _figure(costs.diagonal(d).sum().item())])
    table = _ranked_outputs(sentence, candidates, _option(term, "alpha"))
    title = "sum over d of the mean of max(0, f(worse) − f(better) + d·margin), for outputs d places apart"
    yield _Block(title, table, sums)


def _prefer(sentence: Sentence, term: Term, candidates: CandidateStats) -> Iterator[_Block]:
    table = _ranked_outputs(sentence, candidates, _option(term, "alpha"))
    yield _Block("−log σ(beta · (f(first) − f(last)) − margin)", table)


def _risk(sentence: Sentence, term: Term, candidates: CandidateStats) -> Iterator[_Block]:
    share = risk.shares(candidates, **term.options)[0]  # [K]
    table = [["order", "output", "gain", "log p", "share", "costs"]]
    for place, k in enumerate(by_gain.ranked(candidates, alpha=0).order[0].tolist()):
        gain = candidates.gain[0, k].item()
        table.append(
            [
                str(place + 1),
                " ".join(sentence.outputs[k]),
                f"{gain:.4f}",
                _figure(candidates.logp[0, k].item()),
                f"{share[k]:.4f}",
                f"{share[k] * (1 - gain):.4f}",
            ]
        )
    yield _Block("sum over the outputs of their share of the probability^sharpness, times 1 − gain", table)


def _option(term: Term, name: str) -> float:
    return float(term.options.get(name, OBJECTIVES.entry(term.name).options[name].default))


def _f1(words: list[str], reference: list[str]) -> float:
    common = (Counter(words) & Counter(reference)).total()
    return 2 * common / (len(words) + len(reference))


def _figure(value: float) -> str:
    """Format with four decimals, or with an exponent for very large numbers; never a negative zero."""
    return f"{value + 0.0:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def _plain(sentence: Sentence, term: Term) -> Iterator[_Block]:
    for _ in term.parts:
        yield _Block("your own objective", [["its windows are not shown"]])


def _plain_candidates(sentence: Sentence, term: Term, candidates: CandidateStats) -> Iterator[_Block]:
    yield _Block("your own objective", _ranked_outputs(sentence, candidates, alpha=1))


_CANDIDATE_BLOCKS: dict[str, Callable[[Sentence, Term, CandidateStats], Iterator[_Block]]] = {
    "rank": _rank,
    "risk": _risk,
    "prefer": _prefer,
}


_BLOCKS: dict[str, Callable[[Sentence, Term], Iterator[_Block]]] = {
    "ce": _ce,
    "matches": _matches,
    "rewards": _rewards,
    "precision": _precision,
    "bag": _bag,
    "bleu": _bleu,
    "eisl": _eisl,
    "lcs": _lcs,
    "soft": _soft,
    "gated": _gated,
    "near": _near,
    "convex": _convex,
    "dft": _weighted,
    "tailr": _weighted,
    "mixce": _weighted,
    "unlikelihood": _unlikelihood,
    "eaft": _eaft,
}


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
        return ["  the reference is shorter than n, so there are no windows"]
    left = (0,) if names == 1 else (1,) if table[0][0] in ("at", "order") else ()
    return [f"  {line}" for line in aligned(table, left)]
