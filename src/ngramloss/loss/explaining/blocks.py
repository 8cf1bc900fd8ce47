"""a sentence pair and a term → what the term reads and earns or costs; the function's docstring is its title."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.loss.explaining.sentence import Sentence
from ngramloss.loss.objectives import window_counts
from ngramloss.loss.objectives.candidates import by_score, student
from ngramloss.loss.objectives.candidates.credit import credits
from ngramloss.loss.objectives.candidates.policy import advantages
from ngramloss.loss.objectives.candidates.rank import costs as rank_costs
from ngramloss.loss.objectives.candidates.risk import shares
from ngramloss.loss.objectives.tokens.unlikelihood import negatives, penalties
from ngramloss.loss.objectives.windows.accept import block_shares, opened, reached, tails
from ngramloss.loss.objectives.windows.bag import expected, found
from ngramloss.loss.objectives.windows.bleu import clipped_share
from ngramloss.loss.objectives.windows.eisl import preferred
from ngramloss.loss.objectives.windows.gated import correct
from ngramloss.loss.objectives.windows.matches import Earned, matched, most_counted
from ngramloss.loss.objectives.windows.near import nearness
from ngramloss.loss.objectives.windows.precision import covered, covered_released
from ngramloss.loss.objectives.windows.rewards import placed
from ngramloss.loss.objectives.windows.soft import powers
from ngramloss.loss.stats import token_stats
from ngramloss.loss.terms import OBJECTIVES, Term

Columns = Mapping[str, Any]  # head of a column → its cells, as texts or as numbers, [1, rows]


class Explanation(NamedTuple):
    """The table of a term, with a head."""

    table: list[list[str]]
    title: str = ""
    sums: Sequence[list[str]] = ()  # A second table, for what the rows of the first add up to


def decimal(value: float) -> str:
    """Format with four decimals, or with an exponent for very large numbers; never a negative zero."""
    return f"{value + 0.0:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


def value_alone(sentence: Sentence, term: Term, n: int) -> Explanation:
    """your own objective"""
    return Explanation([["its windows are not shown"]])


def ce(sentence: Sentence, term: Term, n: int) -> Explanation:
    """mean of −log p over the words of the reference"""
    title, temperature = str(ce.__doc__), _option(term, "temperature")
    if temperature != 1:
        title = f"{temperature:g} times the {title}, at temperature {temperature:g}"
    title += ", smoothed over all words" if term.options.get("smoothing") else ""
    cooled = (sentence.logits / temperature).softmax(-1)  # [1, T, V]
    columns = {"probability": cooled.gather(-1, sentence.labels.unsqueeze(-1)).squeeze(-1)}
    return _windows(sentence, "reference", 1, columns | {"costs": _token_costs(sentence, term)})._replace(title=title)


def eaft(sentence: Sentence, term: Term, n: int) -> Explanation:
    """mean of −log p over the words of the reference, weighted by the entropy"""
    stats, costs = sentence.stats, _token_costs(sentence, term)
    entropy: Any = stats.top_entropy if term.variant == "released" else stats.entropy  # [1, T]
    columns = {"probability": stats.label_logp.exp(), "entropy": entropy, "costs": costs}
    return _windows(sentence, "reference", 1, columns)


def weighted(sentence: Sentence, term: Term, n: int) -> Explanation:
    """mean of −weight · log p over the words of the reference"""
    logp, costs = sentence.stats.label_logp, _token_costs(sentence, term)  # [1, T] each
    weight = _where(costs.isfinite() & (logp > -1e9) & (logp < 0), -costs * logp.shape[1] / logp)
    return _windows(sentence, "reference", 1, {"probability": logp.exp(), "weight": weight, "costs": costs})


def unlikelihood(sentence: Sentence, term: Term, n: int) -> Explanation:
    """mean over the words of the reference of −log(1 − p), summed over other words before"""
    used = negatives(sentence.labels)[0].tolist()  # [T, T]
    words = [" ".join(compress(sentence.reference, row)) or "–" for row in used]
    costs = penalties(sentence.stats, sentence.labels).sum(-1) / len(words)  # [1, T]
    return _windows(sentence, "reference", 1, {"penalised words": words, "costs": costs})


def matches(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the candidate earn"""
    most = most_counted(n) if term.variant == "released" else None
    earned = matched(sentence.stats, sentence.labels, n=n, most=most)
    return _earned(sentence, n, earned, {"in reference": _occurrences(sentence, n), "copies": _whole(earned.copies)})


def rewards(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the candidate earn"""
    earned = placed(sentence.stats, sentence.labels, n=n)
    copies = [count if hit else "–" for count, hit in zip(_whole(earned.copies), earned.hit[0], strict=True)]
    return _earned(sentence, n, earned, {"same place": _yes(earned.hit), "copies": copies})


def gated(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the candidate earn"""
    earned = correct(sentence.stats, sentence.labels, n=n)
    return _earned(sentence, n, earned, {"same place": _yes(earned.hit)})


def precision(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− what the windows of the candidate add to the precision"""
    share = (covered_released if term.variant == "released" else covered)(sentence.stats, sentence.labels, n=n)
    probability = window_counts.sums(sentence.stats.best_logp, n).exp()  # [1, S]
    columns = {"in reference": _occurrences(sentence, n), "probability": probability, "adds": share}
    return _windows(sentence, "candidate", n, columns)


def bag(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the n-grams of the reference earn"""
    counts, share = (of(sentence.stats, sentence.labels, n=n) for of in (expected, found))  # [1, S] each
    released = counts.clamp_max(1) / max(counts.shape[1], 1)  # [1, S]
    earns = {"released": released, "original": share, None: share / 2}[term.variant]  # [1, S]
    block = _windows(sentence, "reference", n, {"copies": _copies(sentence, n), "expected": counts, "earns": earns})
    return block._replace(title=str(bag.__doc__)[2:] if term.variant == "released" else "")


def eisl(sentence: Sentence, term: Term, n: int) -> Explanation:
    """mean of −log p of the reference's n-grams, each where the model prefers it"""
    fit = preferred(sentence.stats, sentence.labels, n=n)  # [1, S]
    return _windows(sentence, "reference", n, {"log p where it fits": fit, "costs": -fit / max(fit.shape[1], 1)})


def soft(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the reference earn"""
    options: dict[str, Any] = dict(term.options)
    earns = powers(sentence.stats, sentence.labels, n=n, **options)  # [1, S]
    probability = window_counts.sums(sentence.stats.label_logp, n).exp()  # [1, S]
    return _windows(sentence, "reference", n, {"probability": probability, "earns": earns})


def near(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the reference earn"""
    options: dict[str, Any] = dict(term.options)
    probability, weight = nearness(sentence.stats, sentence.labels, n=n, **options)  # [1, S] each
    earns = weight * probability / max(weight.shape[1], 1)  # [1, S]
    return _windows(sentence, "reference", n, {"probability": probability, "weight": weight, "earns": earns})


def accept(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the words of the blocks earn"""
    stats, labels, own = sentence.stats, sentence.labels, torch.arange(sentence.labels.shape[1])  # [T]
    blocks, places = own // n, own % n  # [T] each

    def of_words(values: Tensor) -> Tensor:
        return values[:, own - places, places]  # [1, T]

    share, reach = block_shares(stats, labels, n=n), of_words(reached(stats, labels, n=n))
    given, logp, title = of_words(share), stats.label_logp, ""  # [1, T] each
    columns: dict[str, Any] = {"block": _whole(blocks[None] + 1), "probability": logp.exp()}
    if term.variant is None:
        columns |= {"accepted": reach, "earns": reach * given}
    else:
        detached = term.variant == "detached"
        weight = tails(stats, share, alpha=_option(term, "alpha")) if detached else opened(stats, labels, n=n)
        counted = of_words(weight.to(logp.dtype))  # [1, T]
        costs = (-counted * logp).masked_fill(counted == 0, 0.0) * given  # [1, T]
        columns |= {"weight": counted, "costs": costs}
        title = "mean over the blocks of −weight · log p over their words"
    return _windows(sentence, "reference", 1, columns)._replace(title=title)


def bleu(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− geometric mean of the clipped shares"""
    table = [["n", "windows", "clipped share"]]
    for order in term.n:
        windows = int(window_counts.real(sentence.labels, order).sum())
        share = clipped_share(sentence.stats, sentence.labels, n=order).item()
        table.append([str(order), str(windows), f"{share:.4f}" if windows else "–"])
    return Explanation(table)


def lcs(sentence: Sentence, term: Term, n: int) -> Explanation:
    """−log of the longest common subsequence's share of the reference"""
    (part,), words = term.parts, len(sentence.reference)
    length = part.function(sentence.stats, sentence.labels).neg().exp().item() * words
    return Explanation([["soft common words", "of"], [f"{length:.4f}", str(words)]])


def convex(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− the geometric mean of the words' probabilities, to the power of the order"""
    mean = sentence.stats.label_logp.mean().exp().item()
    cells = [f"{mean:.4f}", f"{_option(term, 'order'):g}", str(len(sentence.reference))]
    return Explanation([["mean probability", "order", "words"], cells])


def outputs(sentence: Sentence, term: Term, n: int) -> Explanation:
    """your own objective"""
    return _ranked(sentence, {"words": _words(sentence), "f": _score(sentence, term)})


def prefer(sentence: Sentence, term: Term, n: int) -> Explanation:
    """−log σ(beta · (f(first) − f(last)) − margin)"""
    return outputs(sentence, term, n)


def rank(sentence: Sentence, term: Term, n: int) -> Explanation:
    """sum over d of the mean of max(0, f(worse) − f(better) + d·margin), for outputs d places apart"""
    costs = rank_costs(sentence.samples, margin=_option(term, "margin"), alpha=_option(term, "alpha"))[0]  # [K, K]
    sums = [[str(d), str(len(costs) - d), decimal(costs.diagonal(d).sum().item())] for d in range(1, len(costs))]
    return outputs(sentence, term, n)._replace(sums=[["places apart", "pairs", "costs"], *sums])


def risk(sentence: Sentence, term: Term, n: int) -> Explanation:
    """sum over the outputs of their share of the probability^sharpness, times 1 − score"""
    share = shares(sentence.samples, sharpness=_option(term, "sharpness"))  # [1, K]
    return _ranked(sentence, {"share": share, "costs": share * (1 - sentence.samples.score)})


def policy(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− mean over the outputs of the advantage times log p / words^alpha"""
    chosen = {name: _option(term, name) for name in ("baseline", "scale")}
    advantage = advantages(sentence.samples, **chosen)  # [1, K]
    costs = -advantage * _score(sentence, term) / len(sentence.outputs)  # [1, K]
    return _ranked(sentence, {"words": _words(sentence), "advantage": advantage, "costs": costs})


def credit(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− mean of (credit − {}) · log p over the words of each output, then over outputs"""
    given, logp = credits(sentence.samples, sentence.labels, n=term.n), sentence.samples.token_logp
    assert logp is not None
    costs = -(given.credit - given.mean) * given.share * logp  # [1, K, T']
    table = [["output", "word", "credit", "log p", "costs"]]
    for k, words in enumerate(sentence.outputs):
        numbers = (map(decimal, x[0, k, : len(words)].tolist()) for x in (given.credit, logp, costs))
        table += [[str(k + 1), *row] for row in zip(words, *numbers, strict=True)]
    return Explanation(table, str(credit.__doc__).format(decimal(given.mean.item())))


def matches_student(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the windows of the own text earn"""
    earned = student.matched(sentence.written, sentence.labels, n=n)
    return _own(sentence, n, {"copies": _whole(earned.copies), "earns": _where(earned.hit, earned.amount)})


def precision_student(sentence: Sentence, term: Term, n: int) -> Explanation:
    """− what the windows of the own text add to the precision"""
    return _own(sentence, n, {"adds": student.covered(sentence.written, sentence.labels, n=n)})


def bag_student(sentence: Sentence, term: Term, n: int) -> Explanation:
    """1 − what the n-grams of the reference earn along the own text"""
    counts, amount = student.found(sentence.written, sentence.labels, n=n)  # [1, S] each
    columns = {"copies": _copies(sentence, n), "expected": counts, "earns": amount}
    return _windows(sentence, "reference", n, columns)


def _earned(sentence: Sentence, n: int, earned: Earned, columns: Columns) -> Explanation:
    probability = window_counts.sums(sentence.stats.best_logp, n).exp()  # [1, S]
    numbers = {"probability": probability, "earns": _where(earned.hit, earned.amount)}
    return _windows(sentence, "candidate", n, {**columns, **numbers})


def _own(sentence: Sentence, n: int, columns: Columns) -> Explanation:
    tokens, logp = sentence.written.own_text()  # [1, T'] each
    own, reference = window_counts.same_length(tokens, sentence.labels)  # [1, L] each
    shown = {"in reference": _times(own, reference, n), "probability": window_counts.sums(logp, n).exp()}
    return _windows(sentence, "own text", n, {**shown, **columns})


def _windows(sentence: Sentence, side: str, n: int, columns: Columns) -> Explanation:
    """A row for each window of these words; columns may have further cells, of windows over padding."""
    words = {"reference": sentence.reference, "candidate": sentence.candidate}.get(side, sentence.outputs[0])
    windows = [" ".join(words[t : t + n]) for t in range(len(words) - n + 1)]
    return Explanation(_table(("at", side), windows, columns))


def _ranked(sentence: Sentence, columns: Columns) -> Explanation:
    """A row for each output, in the order of their scores."""
    order = by_score.ranked(sentence.samples, alpha=1).order[0]  # [K]
    shown = {"score": sentence.samples.score, "log p": sentence.samples.logp, **columns}
    placed = {
        name: column[:, order] if isinstance(column, Tensor) else [column[k] for k in order]
        for name, column in shown.items()
    }
    return Explanation(_table(("order", "output"), [" ".join(sentence.outputs[k]) for k in order], placed))


def _table(heads: tuple[str, str], names: Sequence[str], columns: Columns) -> list[list[str]]:
    """A head, and a row for each name with its number before it."""
    cells = [
        [decimal(value) for value in column[0].tolist()] if isinstance(column, Tensor) else column
        for column in columns.values()
    ]
    rows = zip(names, *cells, strict=False)
    return [[*heads, *columns], *([str(number), *row] for number, row in enumerate(rows, 1))]


def _token_costs(sentence: Sentence, term: Term) -> Tensor:
    """What each token adds to the mean of a sum over tokens: the sum if only this label counts."""
    (part,), labels = term.parts, sentence.labels
    stats = token_stats(sentence.logits, labels, needs=term.needs)
    alone = labels[0].diag().masked_fill(~torch.eye(labels.shape[1]).bool(), -100).unsqueeze(1)  # [T, 1, T]
    return torch.stack([part.function(stats, row) for row in alone], -1) / len(alone)  # [1, T]


def _occurrences(sentence: Sentence, n: int) -> list[str]:
    return _times(sentence.stats.best_token, sentence.labels, n)


def _times(text: Tensor, reference: Tensor, n: int) -> list[str]:
    """How often each window of a text is in the reference."""
    own, wanted = window_counts.ids(text, reference, n=n)  # [1, S] each
    counts = window_counts.count(own, among=wanted, where=window_counts.real(reference, n))  # [1, S]
    return [f"×{count}" if count else "–" for count in counts[0].tolist()]


def _copies(sentence: Sentence, n: int) -> list[str]:
    """How often each n-gram of the reference is in it."""
    (ids,) = window_counts.ids(sentence.labels, n=n)  # [1, S]
    return _whole(window_counts.count(ids, among=ids, where=window_counts.real(sentence.labels, n)))


def _words(sentence: Sentence) -> list[str]:
    return [str(len(words)) for words in sentence.outputs]


def _score(sentence: Sentence, term: Term) -> Tensor:
    alpha = _option(term, "alpha") if "alpha" in OBJECTIVES.entry(term.name).options else 1
    return sentence.samples.logp / sentence.samples.length**alpha  # [1, K]


def _where(known: Tensor, values: Tensor) -> list[str]:
    return [decimal(value) if yes else "–" for value, yes in zip(values[0].tolist(), known[0], strict=True)]


def _whole(counts: Tensor) -> list[str]:
    return [str(int(count)) for count in counts[0]]


def _yes(hit: Tensor) -> list[str]:
    return ["yes" if match else "–" for match in hit[0]]


def _option(term: Term, name: str) -> Any:
    return term.options.get(name, OBJECTIVES.entry(term.name).options[name].default)
