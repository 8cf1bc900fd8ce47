"""The search in tensors: the texts of hf, groups against plain Python, samples with the right frequencies."""

import copy
import functools
import hashlib
import weakref
from dataclasses import replace
from types import SimpleNamespace

import models
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lanes import few
from searches import SERVED, SOURCES, tiny, with_settings, written

from ngramloss.errors import UserError
from ngramloss.search import beams, sampling
from ngramloss.search.decoders import difference
from ngramloss.search.engines import graph, hf

# The texts of hf

lengths = st.integers(2, 20).flatmap(
    lambda most: st.tuples(st.sampled_from([0, 3, most // 2, most]).map(lambda least: min(least, most)), st.just(most))
)
# No bans of single tokens: a tiny vocabulary would run out of them, and where no token is left, hf's texts are arbitrary.
searches = st.fixed_dictionaries(
    {
        "num_beams": st.integers(1, 6),
        "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
        "no_repeat_ngram_size": st.sampled_from([0, 2, 3, 4]),
        "early_stopping": st.sampled_from([True, False, "never"]),
        "renormalize_logits": st.sampled_from([True, None]),
        "forced_bos_token_id": st.sampled_from([None, None, 4]),
        "bad_words_ids": st.sampled_from([None, [[models.PAD], [5]]]),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("family", few(["bart", "t5", "grouped", "gemma2_sliding"], SERVED))
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    searches,
    lengths,
    st.sampled_from([models.EOS, 0, 3, 5, 7, 10, 12, [3, 7], []]),
    st.booleans(),
    st.sampled_from([None, models.PAD, 3]),
    st.integers(0, 2),
)
def test_texts_are_those_of_hf_token_for_token(family, drawn, length, end, forced, start, seed):
    """The end token is one of several, because a random model writes some of them often and others never."""
    assume(not (drawn["bad_words_ids"] and end == 5))
    one = end if isinstance(end, int) else None
    model = tiny(family, seed)
    if family == "m2m_100":  # to hf, a padding token in a text shifts the positions after it
        drawn = {**drawn, "bad_words_ids": [[models.PAD]]}
    ends = {
        "eos_token_id": end if end != [] else None,
        "forced_eos_token_id": one if forced else None,
        "decoder_start_token_id": (one or 0) if start is None else start,
    }
    search = with_settings(model, **drawn, **ends, min_length=length[0], max_length=length[1])
    assert not list(graph.unsupported(model, search))
    assert written(graph, model, search) == written(hf, model, search)


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("beams_of_each", [1, 4])
def test_texts_of_every_family_are_those_of_hf(family, beams_of_each):
    model = tiny(family)
    search = with_settings(
        model,
        num_beams=beams_of_each,
        no_repeat_ngram_size=2,
        min_length=4,
        eos_token_id=7,
        decoder_start_token_id=7,
        bad_words_ids=[[models.PAD]],
        max_length=20,
        early_stopping=False,
    )
    assert written(graph, model, search) == written(hf, model, search)


@pytest.mark.parametrize("beams_of_each", [1, 3])
def test_forced_tokens_are_those_of_hf(beams_of_each):
    model = tiny("bart")
    forced = {"forced_bos_token_id": 4, "forced_eos_token_id": models.EOS, "bad_words_ids": [[models.PAD]]}
    search = with_settings(model, num_beams=beams_of_each, min_length=9, max_length=9, **forced)
    texts = written(graph, model, search)
    assert texts == written(hf, model, search)
    assert {(text[1], len(text), text[-1]) for (text,) in texts} == {(4, 9, models.EOS)}


@pytest.mark.parametrize(
    ("early", "penalty", "ended", "can_improve"),
    [
        ("never", 1.0, -0.3, True),  # at its greatest length, 9 tokens after the first, a text may score −1/9
        (False, 1.0, -0.3, False),  # at its length now, −1/2
        ("never", -1.0, -5.0, True),  # −2; as in generate, the greatest length counts with a positive penalty only
    ],
)
def test_a_text_goes_on_as_long_as_it_may_become_the_best(early, penalty, ended, can_improve):
    search = with_settings(tiny("bart"), num_beams=2, early_stopping=early, length_penalty=penalty, max_length=10)
    given = beams.limits(search, torch.device("cpu"))
    state = beams.Beams.begin(1, 2, search, torch.device("cpu"))
    state.scores[:], state.ended_scores[:], state.has_ended[:] = -1.0, ended, True
    state.length.fill_(3)
    beams._look_ahead(state, given)
    assert state.can_improve.item() is can_improve


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_a_search_ends_when_that_of_hf_does(early, penalty):
    model = tiny("t5", 1)
    for end in (3, 7, 12):
        search = with_settings(
            model,
            num_beams=3,
            early_stopping=early,
            length_penalty=penalty,
            eos_token_id=end,
            decoder_start_token_id=end,
            max_length=16,
        )
        assert written(graph, model, search) == written(hf, model, search)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_same_tokens_would_repeat_an_ngram(n):
    from transformers import NoRepeatNGramLogitsProcessor

    generator = torch.Generator().manual_seed(n)
    search = with_settings(tiny("bart"), no_repeat_ngram_size=n, max_length=12)
    for length in range(1, 12):
        ids = torch.randint(0, 3, (40, 12), generator=generator)
        ids[:, length:] = models.PAD  # also written, as a token
        found = torch.zeros(40, 4)
        beams.rule_out(found, ids, torch.tensor(length), beams.limits(search, torch.device("cpu")))
        assert torch.equal(found, NoRepeatNGramLogitsProcessor(n)(ids[:, :length], torch.zeros(40, 4)))


@pytest.mark.parametrize("family", ["t5", "grouped"])
def test_several_texts_are_those_of_hf_in_their_order(family):
    model = tiny(family, 1)
    search = with_settings(model, num_beams=4, num_return_sequences=3, eos_token_id=7, decoder_start_token_id=7)
    assert written(graph, model, search) == written(hf, model, search)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "mistral"])
def test_a_text_does_not_depend_on_its_batch(family):
    model = tiny(family)
    for changes in ({"num_beams": 3, "early_stopping": "never"}, {"do_sample": True}):
        search = with_settings(model, eos_token_id=7, decoder_start_token_id=7, max_length=30, **changes)
        assert written(graph, model, search) == [written(graph, model, search, [source])[0] for source in SOURCES]


@pytest.mark.parametrize(
    "changes", [{"num_beams": 3, "early_stopping": False}, {}, {"do_sample": True, "num_return_sequences": 2}]
)
@pytest.mark.parametrize("family", ["t5", "grouped"])
def test_a_searcher_is_used_again_and_may_have_room_for_more_sources(family, changes):
    model = tiny(family)
    search = with_settings(model, eos_token_id=7, decoder_start_token_id=7, max_length=20, **changes)
    searcher = graph.Searcher(model, search, 4, 16)
    for sources in (SOURCES[:2], SOURCES[2:6], SOURCES[:2], SOURCES[3:4]):
        found = [[hf.ended(row, search.ends) for row in rows] for rows in graph.found(lambda _: searcher, sources)]
        assert found == written(graph, model, search, sources)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    few(
        [{"num_beams": 4, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}],
        [
            {"num_beams": 3},
            {},
            {"num_beams": 4, "num_return_sequences": 2},
            {"do_sample": True, "num_return_sequences": 2},
        ],
    ),
)
@pytest.mark.parametrize("family", few(["bart", "mistral"], ["bart", "t5", "mistral", "gpt2"]))
def test_sources_that_are_done_leave_the_batch(family, changes, monkeypatch):
    """The end token is one of several, because a random model writes some of them often and others never."""
    model, sizes, take = tiny(family), [], graph.Searcher.take
    monkeypatch.setattr(graph, "LOOKED", 2)
    monkeypatch.setattr(
        graph.Searcher,
        "take",
        lambda self, other, rows: (
            sizes.append((len(other.seeds), len(self.seeds), len(rows))),
            take(self, other, rows),
        ),
    )
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randint(4, 13, (length % 9 + 1,), generator=generator).tolist() for length in range(24)]
    for end in (0, 1, 10, 12):
        search = with_settings(model, eos_token_id=end, decoder_start_token_id=end, max_length=30, **changes)
        expected = [written(graph, model, search, [source])[0] for source in sources]
        assert written(graph, model, search, sources) == expected
        of_gpu = graph.found(lambda count: graph.Searcher(model, search, *graph._room_on_gpu(count, 9)), sources)  # noqa: B023
        assert [[hf.ended(row, search.ends) for row in rows] for rows in of_gpu] == expected
    assert len(sizes) > 1
    assert all(2 * left <= before and left <= after < before for before, after, left in sizes)


def test_it_is_done_when_all_sources_are_and_few_shapes_are_kept(monkeypatch):
    model, tokens = tiny("bart"), []
    search = with_settings(
        model, num_beams=2, eos_token_id=models.PAD, decoder_start_token_id=models.PAD, max_length=60
    )
    token = graph.Searcher.token
    monkeypatch.setattr(graph.Searcher, "token", lambda self: (tokens.append(1), token(self)))
    written(graph, model, search)
    assert len(tokens) < 59
    assert len(tokens) % graph.LOOKED == 0
    made = graph.OrderedDict()
    new = functools.partial(graph.Searcher, model, search)
    for length in (3, 4, 5, 3, *range(6, 12)):
        assert graph._searcher(made, new, (1, length), 1e9).decoder.source_keys.shape[3] == length
    assert list(made) == [(1, length) for length in (5, 3, *range(6, 12))]
    both = made[1, 10].bytes + made[1, 11].bytes
    graph._searcher(made, new, (1, 11), both)
    assert list(made) == [(1, 10), (1, 11)]


@pytest.mark.parametrize(("memory", "pool"), [(1e12, "first"), (0, "new")], ids=["all are kept", "only the newest is"])
def test_a_graph_shares_the_memory_of_graphs_that_are_kept_and_never_of_those_that_are_gone(monkeypatch, memory, pool):
    model = tiny("bart")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, memory))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "new")
    search = with_settings(model, num_beams=2)
    searcher = graph._searchers_on_gpu(functools.partial(graph.Searcher, model, search), model.device)
    first = searcher(1, 3)
    assert first.pool() == "new"
    first.graph = SimpleNamespace(pool=lambda: "first")  # as if it were captured
    assert searcher(1, 100).pool() == pool


def test_on_a_cpu_nothing_is_kept_between_batches_and_at_most_two_caches_exist(monkeypatch):
    model = tiny("bart")
    search = with_settings(model, num_beams=4, eos_token_id=7, decoder_start_token_id=7, max_length=30)
    living, peak, init = weakref.WeakSet(), [0], graph.Searcher.__init__

    def counted(self, *args, **options):
        init(self, *args, **options)
        living.add(self)
        peak[0] = max(peak[0], sum(each.bytes for each in living))

    monkeypatch.setattr(graph.Searcher, "__init__", counted)
    monkeypatch.setattr(graph, "LOOKED", 2)
    write = graph.load(model, search, precision="fp32")
    largest = graph.Searcher(model, search, 6, 12).bytes
    for length in range(1, 13):
        write([[*([5] * length), 2][:length], *SOURCES[1:2] * 5])
        assert not living, "all caches are freed when a batch is done"
    assert 0 < peak[0] <= 1.5 * largest, "one search, and the smaller one that goes on"


def test_a_model_that_computes_otherwise_is_refused():
    model = models.tiny("bart", seed=0).eval()
    assert difference(model) < 1e-4
    model.lm_head.register_forward_hook(
        lambda module, inputs, output: output * (2.0 if inputs[0].shape[1] > 1 else 1.0)
    )
    with pytest.raises(UserError, match="does not know"):
        graph.load(model, with_settings(model), precision="fp32")


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("prophetnet", {}, "not prophetnet"),
        ("bart", {"num_beams": 3, "do_sample": True}, "without beams"),
        ("bart", {"repetition_penalty": 1.3}, "repetition_penalty"),
    ],
)
def test_what_it_cannot_do_is_said(family, changes, reason):
    model = tiny(family)
    search = with_settings(model, **changes)
    assert reason in " ".join(graph.unsupported(model, search))
    model.generation_config.repetition_penalty = None


# Groups of beams


def diverse(next_logp, search, groups):
    """Diverse beam search of one source in plain Python: prefix → log-probabilities of the next token."""
    K = search.num_beams // groups
    running = [[(0.0, (search.start,))] for _ in range(groups)]
    ended, stopped = [[] for _ in range(groups)], [False] * groups
    for length in range(1, search.max_length):
        taken = {}
        for g in range(groups):
            options = sorted(
                (
                    (score + logp - search.diversity * taken.get(token, 0), (*ids, token))
                    for score, ids in running[g]
                    for token, logp in enumerate(next_logp(ids))
                ),
                key=lambda option: -option[0],
            )[: 2 * K]
            is_end = [ids[-1] in search.ends or length + 1 >= search.max_length for _, ids in options]
            if not stopped[g]:
                ended[g] += [
                    (score / length**search.length_penalty, ids)
                    for (score, ids), end in zip(options[:K], is_end[:K], strict=True)
                    if end
                ]
                ended[g] = sorted(ended[g], key=lambda option: -option[0])[:K]
            running[g] = [option for option in options if option[1][-1] not in search.ends][:K]
            for _, ids in running[g]:
                taken[ids[-1]] = taken.get(ids[-1], 0) + 1
            stopped[g] = stopped[g] or len(ended[g]) == K
    every = sorted((option for group in ended for option in group), key=lambda option: -option[0])
    return [list(ids) for _, ids in every[: search.texts]]


@pytest.mark.parametrize(("count", "groups"), [(4, 2), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("diversity", [0.0, 0.7, 3.0])
@pytest.mark.parametrize("family", ["bart", "grouped"])
def test_groups_are_diverse_beam_search(family, count, groups, diversity):
    model = tiny(family)
    plain = with_settings(
        model, num_beams=count, num_return_sequences=count, eos_token_id=7, decoder_start_token_id=7, max_length=8
    )
    search = replace(plain, groups=groups, diversity=diversity)

    def next_logp(source, ids):
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([ids])}
        if search.start is None:  # texts begin with the last token of the prompt
            inputs = {"input_ids": torch.tensor([[*source, *ids[1:]]])}
        with torch.no_grad():
            return model(**inputs).logits[0, -1].log_softmax(-1).tolist()

    expected = [
        diverse(
            functools.cache(functools.partial(next_logp, source)),
            replace(search, start=source[-1]) if search.start is None else search,
            groups,
        )
        for source in SOURCES[:3]
    ]
    assert written(graph, model, search, SOURCES[:3]) == expected
    assert (list(hf.unsupported(model, search)) == []) is (groups == 1)


def test_more_diversity_gives_more_different_texts():
    model = tiny("bart")
    plain = with_settings(model, num_beams=4, num_return_sequences=4, eos_token_id=7, decoder_start_token_id=7)

    def different(diversity):
        found = written(graph, model, replace(plain, groups=4, diversity=diversity))
        return sum(len({tuple(text) for text in texts}) for texts in found)

    assert different(0.0) == len(SOURCES)  # all groups write the same
    assert different(5.0) > 2 * len(SOURCES)


# Samples


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.5}, {"top_p": 0.7}, {"top_k": 3}, {"top_k": 4, "top_p": 0.9, "temperature": 1.5}]
)
def test_samples_have_the_frequencies_of_the_distribution(changes):
    """A chi-squared of 20,000 samples from 12 tokens exceeds 40 with probability 4e-5 at 11 degrees of freedom."""
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    model, N = tiny("bart"), 20_000
    search = with_settings(model, do_sample=True, **changes)
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(1))][None]
    warpers = [
        TemperatureLogitsWarper(search.temperature),
        TopKLogitsWarper(search.top_k),
        TopPLogitsWarper(search.top_p),
    ]
    expected = LogitsProcessorList(warpers)(None, logits).softmax(-1)[0] * N
    seeds = torch.arange(N) * 7_919 - 50
    drawn = sampling.sampled(logits.expand(N, -1), seeds, torch.tensor(5), search)
    counts = torch.bincount(drawn, minlength=12).float()
    assert not counts[expected == 0].any()
    chi_squared = ((counts - expected).square() / expected)[expected > 0].sum()
    assert chi_squared < 40


def test_a_very_small_top_p_leaves_the_most_probable_token():
    search = with_settings(tiny("bart"), do_sample=True, top_p=1e-9)
    logits = torch.randn(50, 13, generator=torch.Generator().manual_seed(0))
    drawn = sampling.sampled(logits, torch.arange(50), torch.tensor(1), search)
    assert torch.equal(drawn, logits.argmax(-1))


def test_the_same_seed_samples_the_same_texts_and_another_others():
    model = tiny("bart")
    search = with_settings(model, do_sample=True, num_return_sequences=3)
    one, again, other = (written(graph, model, replace(search, seed=seed)) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert len({tuple(text) for text in one[0]}) == 3


def test_sources_of_equal_length_draw_different_noise():
    """All tokens are equally probable, whatever the source: only the noise decides."""
    model = copy.deepcopy(tiny("bart"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.final_logits_bias.zero_()
    search = with_settings(model, do_sample=True, top_k=0)
    sources = [[5, 6, 7, 2], [6, 5, 7, 2], [5, 6, 8, 2]]
    texts = written(graph, model, search, sources)
    assert len({tuple(text) for (text,) in texts}) == 3
    assert len(set(texts[0][0])) > 3, "and so does each position of a text"
    assert written(graph, model, search, sources[::-1]) == texts[::-1]


def test_the_seed_of_a_text_is_a_hash_of_the_seed_its_number_and_the_source():
    search = with_settings(tiny("bart"), do_sample=True, num_return_sequences=2)
    sources = [[5, 60, 7], [9], []]
    for seeds, whole in ((None, [search.seed] * 3), ([11, -1, 11], [11, -1, 11])):
        written_out = [
            [repr((seed, number, *source)) for number in range(2)] for seed, source in zip(whole, sources, strict=True)
        ]
        hashes = [[hashlib.sha256(each.encode()).digest() for each in row] for row in written_out]
        expected = [[int.from_bytes(each[:8], "big", signed=True) for each in row] for row in hashes]
        assert sampling.text_seeds(search, sources, seeds=seeds).tolist() == expected
