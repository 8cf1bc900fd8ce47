"""a reference, candidates and a confidence → a text that shows how an objective scores them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, compress
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.objectives import ngrams
from ngramloss.loss.objectives.candidates import by_gain, credit, policy, rank, risk, student
from ngramloss.loss.objectives.tokens import unlikelihood
from ngramloss.loss.objectives.windows import bag, bleu, eisl, gated, matches, near, precision, rewards, soft
from ngramloss.loss.stats import GIVEN, IGNORE_INDEX, CandidateStats, TokenStats, packing, token_stats
from ngramloss.loss.terms import OBJECTIVES, Term
from ngramloss.output.tabular import aligned

FILLER = "_"
"""Replaces a missing word in a candidate. It has its own id and matches nothing, not even a real ``_``."""


_CANDIDATE_EARNS = "1 − what the windows of the candidate earn"
_REFERENCE_EARNS = "1 − what the windows of the reference earn"

_MISSING = {
    "twins": "two predictions of a model with different dropout, and a pair of sentences has one",
    "teacher": "all probabilities of a model with those of a teacher, and a pair of sentences has none",
}
"""What a pair of sentences lacks, as in ``Term.requires`` → the end of a sentence that says so."""

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
    outputs: list[list[str]]
    """The candidate and the others, which objectives that compare candidates read."""
    output_ids: list[Tensor]

    def part(self, first: int, end: int) -> Sentence:
        """The words from ``first`` to ``end`` by themselves."""
        labels, logits = self.labels[:, first:end], self.logits[:, first:end]  # [1, T'], [1, T', V]
        words = self.reference[first:end], self.candidate[first:end], self.confidence[first:end]
        return Sentence(*words, labels, _all_stats(logits, labels), logits, [words[1]], [])

    def candidates(self, loss_fn: JointLoss, logits: Tensor) -> CandidateStats | None:
        """The outputs under a model with these logits, if the objective reads them.

        A gain is the harmonic mean of the shares of words in common (ROUGE-1 without stemming).
        """
        if not loss_fn.needs_candidates:
            return None
        if loss_fn.needs_samples and len(self.outputs) == 1:
            raise UserError(
                f"{str(loss_fn)!r} compares outputs of a model, and there is only the candidate. Give more "
                "with --others."
            )
        logp = logits[0].log_softmax(-1).clamp_min(-1e30)  # [T, V]
        tokens = pad_sequence(self.output_ids, batch_first=True, padding_value=IGNORE_INDEX)  # [K, T']
        real = tokens != IGNORE_INDEX  # [K, T']
        per_token = logp[: tokens.shape[-1]].expand(len(tokens), -1, -1)  # [K, T', V]
        token_logp = per_token.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1).where(real, 0.0)  # [K, T']
        gain = torch.tensor([_f1(words, self.reference) for words in self.outputs], dtype=logp.dtype)  # [K]
        if loss_fn.needs_own_text:  # the candidate, once more, after all outputs
            tokens, token_logp, gain = (torch.cat([values, values[:1]]) for values in (tokens, token_logp, gain))
        own = torch.arange(len(tokens)) >= len(self.outputs)  # [K]
        length = (tokens != IGNORE_INDEX).sum(-1)  # [K]
        cross = logp[: tokens.shape[-1], self.labels[0]]  # [T', T]
        found = (token_logp.sum(-1), length, gain, gain[0], own, tokens, token_logp, cross)
        return CandidateStats(*(values[None] for values in found))

    def samples(self, candidates: CandidateStats) -> CandidateStats:
        """The outputs without the own text after them."""
        names = ("logp", "length", "gain", "tokens", "token_logp")
        K = len(self.outputs)
        return candidates._replace(greedy=None, **{name: getattr(candidates, name)[:, :K] for name in names})


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

    Objectives that compare candidates (``rank``, ``risk``, ``prefer``, ``policy``, ``credit``) read the candidate and
    ``others``, which are more outputs of the same model, with at most as many words as the reference. The candidate is
    also the model's own greedy text, which variants ``:student`` read.

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
    loss, parts = loss_fn.with_parts(sentence.logits, sentence.labels, candidates=candidates)
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
        _, own = loss_fn.with_parts(document.logits, document.labels)
        blocks += [[f"document {number} of {len(ends)}"], _header(document), *_term_blocks(document, loss_fn, own)]
    blocks += [[f"the row: {len(ends)} documents, {len(sentence.reference)} words"]]
    return "\n\n".join("\n".join(block) for block in [*blocks, [_total(loss_fn, loss, parts)]])


def _term_blocks(
    sentence: Sentence, loss_fn: JointLoss, parts: Mapping[str, Tensor], candidates: CandidateStats | None = None
) -> list[list[str]]:
    """The lines of each term."""
    blocks = []
    for term in loss_fn.terms:
        for part, n in zip(term.parts, term.n if len(term.n) == len(term.parts) else [1], strict=True):
            if term.variant == "student" and candidates is not None:
                block = _student_block(sentence, term, n, candidates)
            elif term.name == "credit" and candidates is not None:
                block = _credit_block(sentence, term, sentence.samples(candidates))
            elif term.reads == "candidates" and candidates is not None:
                block = _candidate_block(sentence, term, sentence.samples(candidates))
            else:
                block = _token_block(sentence, term, n)
            tables = [*_columns(block.table), *(_columns(list(block.sums)) if block.sums else [])]
            blocks.append([f"{part.name} = {block.title}", *tables, f"  value {_decimal(parts[part.name].item())}"])
    return blocks


def _total(loss_fn: JointLoss, loss: Tensor, parts: Mapping[str, Tensor]) -> str:
    """The joint loss as the sum of its terms."""
    weighted = " + ".join(
        _decimal(value.item()) if part.weight == 1 else f"{part.weight:g}·{_decimal(value.item())}"
        for part, value in zip(loss_fn.parts, parts.values(), strict=True)
    )
    whole = _decimal(loss.item())
    return f"{loss_fn} = {weighted}" + (f" = {whole}" if weighted != whole else "")


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
    return Sentence(wanted, predicted, sure, labels, stats, logits, outputs, output_ids), notes


def _all_stats(logits: Tensor, labels: Tensor) -> TokenStats:
    return token_stats(logits, labels, needs=("cross_logp", "mean_logp", "entropy", "top_entropy"))


class _Block(NamedTuple):
    title: str
    table: list[list[str]]
    sums: Sequence[list[str]] = ()
    """A second table, for what the rows of the first add up to."""


Columns = Mapping[str, Tensor | Sequence[str]]
"""Head of a column → its cells, as texts or as numbers, [1, rows]."""

Windows = tuple[str, Literal["candidate", "reference"], Columns]
"""The title, whose words the windows are, and the columns after them."""


def _token_block(sentence: Sentence, term: Term, n: int) -> _Block:
    """The windows of an objective that reads token statistics, and what each of them earns or costs."""
    if term.name in _SUMMARIES:
        return _SUMMARIES[term.name](sentence, term)
    shown = _windows(sentence, term, n)
    if shown is None:
        return _Block("your own objective", [["its windows are not shown"]])
    title, side, columns = shown
    return _Block(
        title, _window_table(side, sentence.candidate if side == "candidate" else sentence.reference, n, columns)
    )


def _window_table(side: str, words: Sequence[str], n: int, columns: Columns) -> list[list[str]]:
    """A row for each window of these words; columns may have further cells, of windows over padding."""
    windows = [" ".join(words[t : t + n]) for t in range(len(words) - n + 1)]
    shown = {
        name: column[..., : len(windows)] if isinstance(column, Tensor) else column[: len(windows)]
        for name, column in columns.items()
    }
    return _table("at", side, windows, shown)


def _table(first: str, second: str, names: Sequence[str], columns: Columns) -> list[list[str]]:
    """A head, and a row for each name with its number before it."""
    cells = [
        [_decimal(value) for value in column[0].tolist()] if isinstance(column, Tensor) else column
        for column in columns.values()
    ]
    rows = zip(names, *cells, strict=True)
    return [[first, second, *columns], *([str(number), *row] for number, row in enumerate(rows, 1))]


def _windows(sentence: Sentence, term: Term, n: int) -> Windows | None:
    stats, labels, released = sentence.stats, sentence.labels, term.variant == "released"
    T, S = len(sentence.reference), max(len(sentence.reference) - n + 1, 1)
    options: dict[str, Any] = dict(term.options)
    probability, best = (ngrams.sums(logp, n).exp() for logp in (stats.label_logp, stats.best_logp))  # [1, S] each
    columns: dict[str, Tensor | Sequence[str]]
    match term.name:
        case "ce":
            title = "mean of −log p over the words of the reference"
            if (temperature := _option(term, "temperature")) != 1:
                title = f"{temperature:g} times the {title}, at temperature {temperature:g}"
                cooled = (sentence.logits / temperature).softmax(-1)  # [1, T, V]
                probability = cooled.gather(-1, labels.unsqueeze(-1)).squeeze(-1)  # [1, T]
            smoothed = ", smoothed over all words" if term.options.get("smoothing") else ""
            return title + smoothed, "reference", {"probability": probability, "costs": _token_costs(sentence, term)}
        case "eaft":
            entropy = stats.top_entropy if released else stats.entropy  # [1, T]
            assert entropy is not None
            title = "mean of −log p over the words of the reference, weighted by the entropy"
            costs = _token_costs(sentence, term)  # [1, T]
            return title, "reference", {"probability": probability, "entropy": entropy, "costs": costs}
        case "dft" | "tailr" | "mixce" | "focal":  # a token's weight is its cost as a share of its cross-entropy
            logp, costs = stats.label_logp, _token_costs(sentence, term)  # [1, T] each
            weight = _where(costs.isfinite() & (logp > -1e9) & (logp < 0), -costs * T / logp)
            title = "mean of −weight · log p over the words of the reference"
            return title, "reference", {"probability": probability, "weight": weight, "costs": costs}
        case "unlikelihood":
            used = unlikelihood.negatives(labels)[0].tolist()  # [T, T]
            words = [" ".join(compress(sentence.reference, row)) or "–" for row in used]
            costs = unlikelihood.penalties(stats, labels).sum(-1) / T  # [1, T]
            title = "mean over the words of the reference of −log(1 − p), summed over other words before"
            return title, "reference", {"penalised words": words, "costs": costs}
        case "matches":
            earned = matches.matched(stats, labels, n=n, most=matches.most_counted(n) if released else None)
            columns = {"in reference": _occurrences(sentence, n), "copies": _whole(earned.copies), "probability": best}
            return _CANDIDATE_EARNS, "candidate", columns | {"earns": _where(earned.hit, earned.amount)}
        case "rewards":
            earned = rewards.placed(stats, labels, n=n)
            copies = [count if hit else "–" for count, hit in zip(_whole(earned.copies), earned.hit[0], strict=True)]
            columns = {"same place": _yes(earned.hit), "copies": copies, "probability": best}
            return _CANDIDATE_EARNS, "candidate", columns | {"earns": _where(earned.hit, earned.amount)}
        case "gated":
            earned = gated.correct(stats, labels, n=n)
            columns = {"same place": _yes(earned.hit), "probability": best}
            return _CANDIDATE_EARNS, "candidate", columns | {"earns": _where(earned.hit, earned.amount)}
        case "precision":
            share = (precision.covered_released if released else precision.covered)(stats, labels, n=n)  # [1, S]
            columns = {"in reference": _occurrences(sentence, n), "probability": best, "adds": share}
            return "− what the windows of the candidate add to the precision", "candidate", columns
        case "bag":
            (reference,) = ngrams.ids(labels, n=n)  # [1, S]
            copies = _whole(ngrams.count(reference, among=reference, where=torch.ones_like(reference).bool()))
            expected, found = bag.expected(stats, labels, n=n), bag.found(stats, labels, n=n)  # [1, S] each
            earns = expected.clamp_max(1) / S if released else found if term.variant == "original" else found / 2
            title = f"{'' if released else '1 '}− what the n-grams of the reference earn"
            return title, "reference", {"copies": copies, "expected": expected, "earns": earns}
        case "eisl":
            fit = eisl.preferred(stats, labels, n=n)  # [1, S]
            title = "mean of −log p of the reference's n-grams, each where the model prefers it"
            return title, "reference", {"log p where it fits": fit, "costs": -fit / S}
        case "soft":
            earns = soft.powers(stats, labels, n=n, **options)  # [1, S]
            return _REFERENCE_EARNS, "reference", {"probability": probability, "earns": earns}
        case "near":
            probability, near_weight = near.nearness(stats, labels, n=n, **options)  # [1, S] each
            earns = near_weight * probability / S  # [1, S]
            return _REFERENCE_EARNS, "reference", {"probability": probability, "weight": near_weight, "earns": earns}
    return None


def _token_costs(sentence: Sentence, term: Term) -> Tensor:
    """What each token adds to the mean of a sum over tokens: the sum if only this label counts."""
    (part,) = term.parts
    stats, costs = token_stats(sentence.logits, sentence.labels, needs=term.needs), []
    for t, label in enumerate(sentence.labels[0]):
        one_label = torch.full_like(sentence.labels, -100)  # [1, T]
        one_label[0, t] = label
        costs.append(part.function(stats, one_label))
    return torch.stack(costs, -1) / len(costs)  # [1, T]


def _occurrences(sentence: Sentence, n: int) -> list[str]:
    """How often each window of the candidate is in the reference."""
    candidate, reference = ngrams.ids(sentence.stats.best_token, sentence.labels, n=n)  # [1, S] each
    counts = ngrams.count(candidate, among=reference, where=torch.ones_like(candidate).bool())  # [1, S]
    return _times(counts)


def _times(counts: Tensor) -> list[str]:
    return [f"×{count}" if count else "–" for count in counts[0].tolist()]


def _where(known: Tensor, values: Tensor) -> list[str]:
    return [_decimal(value) if yes else "–" for value, yes in zip(values[0].tolist(), known[0], strict=True)]


def _whole(counts: Tensor) -> list[str]:
    return [str(int(count)) for count in counts[0]]


def _yes(hit: Tensor) -> list[str]:
    return ["yes" if match else "–" for match in hit[0]]


def _bleu(sentence: Sentence, term: Term) -> _Block:
    table = [["n", "windows", "clipped share"]]
    for n in term.n:
        windows = int(ngrams.real(sentence.labels, n).sum())
        share = bleu.clipped_share(sentence.stats, sentence.labels, n=n).item()
        table.append([str(n), str(windows), f"{share:.4f}" if windows else "–"])
    return _Block("− geometric mean of the clipped shares", table)


def _lcs(sentence: Sentence, term: Term) -> _Block:
    (part,) = term.parts
    length = part.function(sentence.stats, sentence.labels).neg().exp().item() * len(sentence.reference)
    table = [["soft common words", "of"], [f"{length:.4f}", str(len(sentence.reference))]]
    return _Block("−log of the longest common subsequence's share of the reference", table)


def _convex(sentence: Sentence, term: Term) -> _Block:
    mean = sentence.stats.label_logp.mean().exp().item()
    order = f"{_option(term, 'order'):g}"
    table = [["mean probability", "order", "words"], [f"{mean:.4f}", order, str(len(sentence.reference))]]
    return _Block("− the geometric mean of the words' probabilities, to the power of the order", table)


_SUMMARIES: dict[str, Callable[[Sentence, Term], _Block]] = {"bleu": _bleu, "lcs": _lcs, "convex": _convex}
"""Objectives whose value is no sum over windows."""


def _candidate_block(sentence: Sentence, term: Term, candidates: CandidateStats) -> _Block:
    """The outputs of the model in the order of their gains, and what an objective that compares them computes."""
    alpha = _option(term, "alpha") if term.name in ("rank", "prefer", "policy") else 1
    score, order, _ = by_gain.ranked(candidates, alpha=alpha)  # [1, K] each
    gain, logp = candidates.gain[:, order[0]], candidates.logp[:, order[0]]  # [1, K] each
    outputs = [sentence.outputs[k] for k in order[0].tolist()]
    columns: dict[str, Tensor | Sequence[str]] = {"gain": gain, "log p": logp}
    if term.name == "risk":
        share = risk.shares(candidates, sharpness=_option(term, "sharpness"))[:, order[0]]  # [1, K]
        columns |= {"share": share, "costs": share * (1 - gain)}
    elif term.name == "policy":
        chosen = {name: str(_choice(term, name)) for name in ("baseline", "scale")}
        advantage = policy.advantages(candidates, **chosen)[:, order[0]]  # [1, K]
        columns |= {"words": [str(len(words)) for words in outputs], "advantage": advantage}
        columns |= {"costs": -advantage * score / len(outputs)}
    else:
        columns |= {"words": [str(len(words)) for words in outputs], "f": score}
    titles = {
        "rank": "sum over d of the mean of max(0, f(worse) − f(better) + d·margin), for outputs d places apart",
        "risk": "sum over the outputs of their share of the probability^sharpness, times 1 − gain",
        "prefer": "−log σ(beta · (f(first) − f(last)) − margin)",
        "policy": "− mean over the outputs of the advantage times log p / words^alpha",
    }
    sums = []
    if term.name == "rank":
        costs = rank.costs(candidates, margin=_option(term, "margin"), alpha=alpha)[0]  # [K, K]
        distances = range(1, len(costs))
        sums = [["places apart", "pairs", "costs"]]
        sums += [[str(d), str(len(costs) - d), _decimal(costs.diagonal(d).sum().item())] for d in distances]
    table = _table("order", "output", [" ".join(words) for words in outputs], columns)
    return _Block(titles.get(term.name, "your own objective"), table, sums)


def _credit_block(sentence: Sentence, term: Term, samples: CandidateStats) -> _Block:
    """The words of each output, and what a policy gradient with credit for each of them computes."""
    assert samples.token_logp is not None
    found = credit.credits(samples, sentence.labels, n=term.n)
    costs = -(found.credit - found.mean) * found.share * samples.token_logp  # [1, K, T']
    table = [["output", "word", "credit", "log p", "costs"]]
    for k, words in enumerate(sentence.outputs):
        numbers = (x[0, k, : len(words)].tolist() for x in (found.credit, samples.token_logp, costs))
        table += [[str(k + 1), *row] for row in zip(words, *(map(_decimal, x) for x in numbers), strict=True)]
    mean = _decimal(found.mean.item())
    return _Block(f"− mean of (credit − {mean}) · log p over the words of each output, then over outputs", table)


def _student_block(sentence: Sentence, term: Term, n: int, candidates: CandidateStats) -> _Block:
    """The windows of the own text, or for a bag those of the reference, and what each earns."""
    tokens, logp = candidates.own_text()  # [1, T'] each
    own, reference = ngrams.same_length(tokens, sentence.labels)  # [1, L] each
    ids, wanted = ngrams.ids(own, reference, n=n)  # [1, S] each
    of_reference = ngrams.real(reference, n)  # [1, S]
    columns: dict[str, Tensor | Sequence[str]]
    if term.name == "bag":
        words, side = sentence.reference, "reference"
        title = "1 − what the n-grams of the reference earn along the own text"
        found = student.found(candidates, sentence.labels, n=n)
        copies = ngrams.count(wanted, among=wanted, where=of_reference)  # [1, S]
        columns = {"copies": _whole(copies), "expected": found.expected, "earns": found.amount}
    else:
        words, side = sentence.outputs[0], "own text"
        columns = {"in reference": _times(ngrams.count(ids, among=wanted, where=of_reference))}
        columns |= {"probability": ngrams.sums(logp, n).exp()}
        if term.name == "matches":
            title = "1 − what the windows of the own text earn"
            earned = student.matched(candidates, sentence.labels, n=n)
            columns |= {"copies": _whole(earned.copies), "earns": _where(earned.hit, earned.amount)}
        else:
            title = "− what the windows of the own text add to the precision"
            columns |= {"adds": student.covered(candidates, sentence.labels, n=n)}
    return _Block(title, _window_table(side, words, n, columns))


def _option(term: Term, name: str) -> float:
    return float(_choice(term, name))


def _choice(term: Term, name: str) -> float | str:
    """The value of an option, given or by default."""
    value: float | str = term.options.get(name, OBJECTIVES.entry(term.name).options[name].default)
    return value


def _f1(words: list[str], reference: list[str]) -> float:
    common = (Counter(words) & Counter(reference)).total()
    return 2 * common / (len(words) + len(reference))


def _decimal(value: float) -> str:
    """Format with four decimals, or with an exponent for very large numbers; never a negative zero."""
    return f"{value + 0.0:.4f}" if abs(value) < 1e6 else f"{value:.3g}"


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
