"""a Hugging Face model and source ids → ids of texts, by CTranslate2: those of ``hf`` but for :func:`differences`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from random import Random
from typing import Any, NamedTuple

import torch

from ngramloss.errors import UserError
from ngramloss.models.attached.heads import has_encoder
from ngramloss.search.engines.conversion import FAMILIES, converted
from ngramloss.search.search import Search

COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}  # what CTranslate2 calls a precision
NO_PENALTY = 1e-9
"""In place of a length penalty of 0, with which CTranslate2 would end a search earlier. It changes no score in fp32."""
MARGIN, ROUNDED = 3, 8
"""A search that stops late begins with ``MARGIN`` tokens more than greedy search, rounded up to share searches."""
Ids = Sequence[int]


def unsupported(model: Any, search: Search) -> Iterator[str]:
    """What CTranslate2 cannot do at all."""
    kind = model.config.model_type
    if not has_encoder(model):
        yield f"it serves encoder-decoders here, and {kind} is decoder-only"
        return
    if kind not in FAMILIES or not type(model).__module__.startswith("transformers."):
        yield f"it has no models of the kind {kind!r}, only {', '.join(FAMILIES)}"
    if str(model.dtype) != "torch.float32":
        yield "it is made of weights in fp32, but generation.precision is another"
    if len(search.ends) != 1:
        yield f"it ends texts at one token, but the model has {len(search.ends)} end tokens"
    if search.others:
        yield f"it does not know these generation settings of the model: {', '.join(search.others)}"
    if search.last not in (None, search.end):
        yield "the model ends its longest texts with another token than its end token"
    if search.sample and search.seed is None:
        yield "the model's own settings sample, but --sample was not given"
    if _steps(search) < 1:
        yield f"a text of at most {search.max_length} tokens has none between its first and its last"


def differences(model: Any, search: Search, *, precision: str) -> Iterator[str]:
    """Why texts may differ from those of ``hf``."""
    beams = search.num_beams > 1
    if precision != "fp32":
        yield f"it computes in {precision}"
    if search.sample:
        yield "it draws other random numbers"
    if beams and search.early_stopping not in (True, False) and search.length_penalty > 0:
        yield f"it does not know when a search stops with generation.early_stopping = {search.early_stopping!r}"
    if beams and search.limits_tokens and not search.renormalize:
        yield "it always works as with generation.renormalize = true if there is a minimum length or a banned n-gram"
    if search.no_repeat_ngram_size and (search.start != search.end or search.no_repeat_ngram_size == 1):
        yield "to hf the start token is a part of the n-grams that must not repeat"
    if model.config.model_type == "m2m_100" and search.start == search.pad:
        yield "to hf the start token has another position, because it is the padding token, too"
    if search.first is not None and search.first in search.ends:
        yield "to hf a text ends if its forced first token is the end token"
    elif beams and search.first is not None and search.min_length <= 2:
        yield "it never writes an empty text after a forced first token"
    if beams and search.last is not None and (search.texts > 1 or search.length_penalty < 0):
        yield "texts that reach generation.max_length are ranked differently"


def load(model: Any, search: Search, *, precision: str) -> Callable[[Sequence[Ids]], list[list[list[int]]]]:
    """A function from sources to the texts of each, best first, as ids."""
    translator = _translator(model, search, precision)
    assert search.start is not None  # a decoder-only model is refused
    start = search.start
    best_of = _best
    if search.num_beams > 1:
        forced = _best_with_forced_end if search.last is not None else _best
        best_of = forced if search.early_stopping is True else _best_with_late_stop

    def write(sources: Sequence[Ids]) -> list[list[list[int]]]:
        words = [[str(token) for token in source] for source in sources]
        return [
            [[start, *map(int, hypothesis)] for hypothesis in hypotheses]
            for hypotheses in best_of(translator, search, words)
        ]

    return write


def _translator(model: Any, search: Search, precision: str) -> Any:
    import ctranslate2

    folder = converted(model)
    ctranslate2.set_random_seed(search.seed or 0)  # read by each thread when it first draws
    device, threads = model.device, torch.get_num_threads()
    streams = threads if device.type == "cpu" else 1  # faster than all threads on one batch
    try:
        translator = ctranslate2.Translator(
            str(folder),
            device=device.type,
            device_index=device.index or 0,
            compute_type=COMPUTE_TYPES[precision],
            inter_threads=streams,
            intra_threads=1,
        )
        if device.type == "cuda":  # a missing library is noticed only now
            translator.translate_batch([["0"]], target_prefix=[["0"]], max_decoding_length=1)
    except (RuntimeError, ValueError) as reason:
        raise UserError(f"ctranslate2 cannot run here: {' '.join(str(reason).split())[:200].rstrip('.')}.") from reason
    torch.set_num_threads(threads)  # CTranslate2 has set it to 1 for all of this process
    return translator


def _steps(search: Search) -> int:
    return search.max_length - 1 - (search.last is not None)


def _least_steps(search: Search) -> int:
    return min(max(search.min_length - 1, 0), _steps(search))


def _translate(
    translator: Any,
    search: Search,
    words: list[list[str]],
    *,
    hypotheses: int,
    steps: int,
    of: int | None = None,
    **options: Any,
) -> list[Any]:
    """Search. Hypotheses have their end token if they have one. ``of`` counts all sources that are searched now."""
    prefix = [str(token) for token in (search.start, search.first) if token is not None]
    sampling = (
        {"sampling_topk": search.top_k, "sampling_topp": search.top_p, "sampling_temperature": search.temperature}
        if search.sample
        else {}
    )
    results: list[Any] = translator.translate_batch(
        words,
        target_prefix=[prefix] * len(words),
        beam_size=search.num_beams,
        num_hypotheses=hypotheses,
        length_penalty=search.length_penalty or NO_PENALTY,
        no_repeat_ngram_size=search.no_repeat_ngram_size,
        suppress_sequences=[[str(token)] for token in search.banned] or None,
        end_token=[str(search.end)],
        return_end_token=True,
        return_scores=True,
        max_input_length=0,
        max_decoding_length=steps,
        max_batch_size=-(-(of or len(words)) // translator.num_translators),
        min_decoding_length=min(_least_steps(search), steps),
        **sampling,
        **options,
    )
    return results


def _best(translator: Any, search: Search, words: list[list[str]]) -> list[list[list[str]]]:
    results = _translate(translator, search, words, hypotheses=search.texts, steps=_steps(search))
    chosen = [[_closed(hypothesis, search) for hypothesis in result.hypotheses] for result in results]
    if search.sample:  # they come sorted by probability, but the first must be a sample like any other
        chosen = [
            Random(f"{search.seed} {source}").sample(texts, len(texts))
            for source, texts in zip(words, chosen, strict=True)
        ]
    return chosen


def _closed(hypothesis: list[str], search: Search) -> list[str]:
    end = str(search.end)
    return hypothesis if search.last is None or hypothesis[-1:] == [end] else [*hypothesis, end]


def _best_with_forced_end(translator: Any, search: Search, words: list[list[str]]) -> list[list[list[str]]]:
    """The best hypotheses of ``hf``, where a text of ``max_length`` ends with a forced token.

    CTranslate2 cannot force one, so it stops a token earlier, and hypotheses without an end get it and the score of one
    token more. But ``hf`` takes none of them if enough others had ended until then: a search for one more token shows
    whether they had.
    """
    steps, end = _steps(search), str(search.end)
    longer = ((steps + 1) / steps) ** search.length_penalty
    chosen: list[list[list[str]]] = []
    doubtful: list[int] = []
    for result in _translate(translator, search, words, hypotheses=search.num_beams, steps=steps):
        cut = [hypothesis[-1] != end for hypothesis in result.hypotheses]
        scores = [score / longer if was_cut else score for score, was_cut in zip(result.scores, cut, strict=True)]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        if cut[order[0]] and _least_steps(search) < steps - 1:
            doubtful.append(len(chosen))
        chosen.append([_closed(result.hypotheses[index], search) for index in order[: search.texts]])
    if doubtful:
        again = _translate(
            translator, search, [words[index] for index in doubtful], hypotheses=search.num_beams, steps=steps + 1
        )
        for index, result in zip(doubtful, again, strict=True):
            if max(map(len, result.hypotheses)) <= steps:
                chosen[index] = result.hypotheses[: search.texts]
    return chosen


class _Ended(NamedTuple):
    """A hypothesis, the number of its tokens, the sum of their log-probabilities, and its score."""

    tokens: list[str]
    length: int
    logp: float
    score: float


class _Look(NamedTuple):
    steps: int  # tokens to search for
    passed: int = 0  # ``hf`` is known not to stop at or before this token


def _best_with_late_stop(translator: Any, search: Search, words: list[list[str]]) -> list[list[list[str]]]:
    """The best hypotheses of ``hf`` with ``early_stopping = false``.

    ``hf`` stops once K hypotheses have ended and the best beam that goes on, scored as though it ended here, is no
    better than the worst of them. CTranslate2 tells how probable such beams are only at the last token of a search: so
    it searches without stopping, and :func:`_texts_or_look` reads the texts or the number of tokens that decides.
    Greedy search guesses the first number.
    """
    most, greedy = _steps(search), dataclasses.replace(search, num_beams=1)
    guesses = _translate(translator, greedy, words, hypotheses=1, steps=most)
    looks = [_Look(min(most, _rounded(len(guess.hypotheses[0]) + MARGIN))) for guess in guesses]
    chosen: list[list[list[str]]] = [[] for _ in words]
    todo = set(range(len(words)))
    while todo:
        found: list[tuple[int, Any]] = []
        for steps in sorted({looks[index].steps for index in todo}, reverse=True):
            together = [index for index in todo if looks[index].steps == steps]
            results = _translate(
                translator,
                search,
                [words[index] for index in together],
                hypotheses=search.num_beams * steps,
                steps=steps,
                of=len(todo),
                patience=steps,
                asynchronous=True,
            )
            found += zip(together, results, strict=True)
        for index, result in found:
            texts_or_look = _texts_or_look(result.result(), search, looks[index])
            if isinstance(texts_or_look, _Look):
                looks[index] = texts_or_look
            else:
                chosen[index] = texts_or_look
                todo.remove(index)
    return chosen


def _rounded(steps: int) -> int:
    return -(-steps // ROUNDED) * ROUNDED


def _texts_or_look(result: Any, search: Search, look: _Look) -> list[list[str]] | _Look:
    """The texts of ``hf``, read from a search that did not stop; or the search that is needed to know them.

    A hypothesis that ends later was a beam that went on, with no smaller log-probability. So where ``hf`` would go on
    because of it, it does; where not, it may have stopped. At the last token that is certain: the best beam that goes
    on is known, unless all K ended, and then ``hf`` stops. Earlier stops matter only if the texts differ.
    """
    most, penalty, beams = _steps(search), search.length_penalty or NO_PENALTY, search.num_beams
    is_longest = look.steps == most
    ended = []
    for tokens, score in zip(result.hypotheses, result.scores, strict=True):
        has_end, logp = tokens[-1] == str(search.end), score * len(tokens) ** penalty
        length = len(tokens) if has_end or (is_longest and search.last is None) else look.steps + 1
        ended.append(_Ended(_closed(tokens, search), length, logp, logp / length**penalty))

    def goes_on(step: int) -> bool:
        best = nlargest(beams, (each.score for each in ended if each.length <= step))
        later = max((each.logp for each in ended if each.length > step), default=-torch.inf)
        return len(best) < beams or later / step**penalty > best[-1]

    def texts(step: int) -> list[list[str]]:
        known = [each for each in ended if each.length <= step]
        return [each.tokens for each in nlargest(search.texts, known, key=lambda each: each.score)]

    stops = [step for step in range(look.passed + 1, look.steps + 1) if not goes_on(step)]
    if is_longest and most not in stops:
        stops.append(most + 1)  # with the forced end token
    if not stops:
        return _Look(min(most, _rounded(look.steps + look.steps // 2)), look.steps)
    if stops[-1] >= look.steps and all(texts(step) == texts(stops[-1]) for step in stops):
        return texts(stops[-1])
    return _Look(stops[0], stops[0] - 1)
