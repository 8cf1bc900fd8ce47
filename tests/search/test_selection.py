"""The kernels that choose tokens and beams against what PyTorch computes."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from searches import tiny, with_settings

from ngramloss.errors import UserError
from ngramloss.search import beams, kernel_check, sampling
from ngramloss.search.engines import graph
from ngramloss.search.kernel_check import kernels_agree
from ngramloss.search.kernels import selection

pytestmark = pytest.mark.slow

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def ordered(logits, count):
    """The best of each row, and of equal ones those with the lowest token."""
    values, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    return values[:, :count], tokens[:, :count]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("V", "room", "count"), [(5, 5, 3), (4096, 4160, 4), (9000, 9024, 12), (4097, 4097, 2), (130, 144, 100)]
)
def test_the_best_of_each_row_and_its_sum(V, room, count, dtype):
    logits = drawn(6, room, dtype=dtype)[:, :V]
    logits[0, 1:] = -torch.inf  # all but one ruled out
    logits[1] = -torch.inf
    logits[2] = logits[2].round() + 0  # many are equal; −0 is 0
    values, tokens, sums = selection.Sweep(logits).top(count)
    torch.testing.assert_close(sums, logits.float().logsumexp(-1), atol=1e-5, rtol=1e-5)
    expected = ordered(logits, count)
    assert torch.equal(values, expected[0])
    assert torch.equal(tokens, expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("V", "room"), [(5, 5), (1024, 1024), (2600, 2624)])
def test_samples_are_those_of_pytorch(V, room, dtype):
    """Also with ties, tokens that may not follow, other temperatures and seeds of any sign."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * drawn(40, room, dtype=dtype))[:, :V]
    logits[:20] = 0
    logits[::3, ::2] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (40,), generator=generator)
    for length, temperature in ((1, 1.0), (2, 0.7), (63, 1.9)):
        search = replace(search_with(do_sample=True, top_k=0), temperature=temperature)
        expected = sampling.sampled(logits.cpu(), seeds, torch.tensor(length), search)
        given = logits, seeds.to(DEVICE), torch.tensor(length, device=DEVICE)
        found = selection.sample(*given, temperature=temperature)
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(sampling.sampled(*given, search, has_kernels=True), found)
        assert len(set(found.tolist())) > 1
    few = replace(search, top_k=2)
    one = sampling.sampled(
        logits.cpu(), seeds, torch.tensor(3), few, has_kernels=True
    )  # which the kernel does not know
    assert torch.equal(one, sampling.sampled(logits.cpu(), seeds, torch.tensor(3), few))


def test_no_best_but_the_sum():
    logits = drawn(3, 50)
    values, _, sums = selection.Sweep(logits).top(0)
    assert values.shape == (3, 0)
    torch.testing.assert_close(sums, logits.logsumexp(-1))


def search_with(**changes):
    return with_settings(tiny("bart"), eos_token_id=7, decoder_start_token_id=7, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_tokens_that_may_not_follow(n, before, dtype):
    search = search_with(no_repeat_ngram_size=n, min_length=30, bad_words_ids=[[3], [64], [199]])
    given = beams.limits(search, torch.device(DEVICE))._replace(before=before)
    V, ids = 200, torch.randint(3, 9, (5, 70), generator=torch.Generator().manual_seed(n)).to(DEVICE)
    for length in (1, 2, 29, 30, 70):
        logits = drawn(5, 208, dtype=dtype, seed=length)[:, :V]
        logits[:, [3, 4, 64, 199]] += 3  # the largest of their spans
        expected, here = logits.cpu().clone(), torch.tensor(length)
        beams.rule_out(expected, ids.cpu(), here, given._replace(ends=given.ends.cpu(), banned=given.banned.cpu()))
        sweep, after = selection.Sweep(logits), logits.clone()
        selection.rule_out(after, ids, here.to(DEVICE), given)
        assert torch.equal(after.cpu(), expected)
        selection.rule_out(logits, ids, here.to(DEVICE), given, sweep=sweep)
        assert torch.equal(logits.cpu(), expected)
        assert torch.equal(sweep.maxima, selection.Sweep(logits).maxima)


def cases():
    for seed in range(16):
        choose = random.Random(seed).choice
        groups, each = choose([(1, 1), (1, 3), (1, 6), (2, 2), (3, 1)])
        settings = {
            "num_beams": groups * each,
            "max_length": choose([4, 4, 12, 34]),
            "min_length": choose([0, 6]),
            "length_penalty": choose([-1.0, 0.0, 0.5, 2.0]),
            "early_stopping": choose([True, False, "never"]),
            "no_repeat_ngram_size": choose([0, 2]),
            "renormalize_logits": choose([True, None]) if groups == 1 else None,
            "forced_bos_token_id": choose([None, 4]),
            "forced_eos_token_id": choose([None, 7]),
            "eos_token_id": choose([7, [3, 7], None]),
        }
        marks = [pytest.mark.thorough] * (seed >= 6)
        yield pytest.param(groups, settings, choose([13, 200, 4500]), id=str(seed), marks=marks)
    for groups, count in ((1, 17), (16, 16)):
        yield pytest.param(
            groups,
            {"num_beams": count, "max_length": 5, "eos_token_id": [3, 7]},
            300,
            id=f"{count} beams in {groups} groups",
        )


@pytest.mark.parametrize(("groups", "settings", "V"), list(cases()))
def test_steps_of_a_search_are_those_of_pytorch(groups, settings, V):
    """All that a search remembers is compared after each token."""
    search = replace(
        with_settings(tiny("bart"), **settings), groups=groups, diversity=2.0 if groups > 1 else 0.0, start=7
    )
    B, each, cpu = 2, settings["num_beams"] // groups, torch.device("cpu")
    expected = [beams.Beams.begin(B, each, search, cpu) for _ in range(groups)]
    found = [beams.Beams.begin(B, each, search, torch.device(DEVICE)) for _ in range(groups)]
    for length in range(1, search.max_length):
        logits = drawn(B, 1, V, seed=length) * 3 + drawn(B, groups * each, V + 3, seed=-length)[..., :V]
        logits[..., 7] += 3  # texts end, and groups want the same tokens
        same = copy.deepcopy(logits)
        expected_parents = beams.advance_groups(expected, logits.cpu(), beams.limits(search, cpu))
        parents = selection.advance_groups(found, same, beams.limits(search, torch.device(DEVICE))).cpu()
        goes_on = torch.cat([group.scores for group in expected], 1) > beams.NEVER / 2
        assert torch.equal(parents[goes_on], expected_parents[goes_on])
        for one, other in zip(found, expected, strict=True):
            real = {"ids": other.scores > beams.NEVER / 2, "ended_ids": other.has_ended}  # others have equal scores
            for name, value in vars(other).items():
                new, where = getattr(one, name).cpu(), real.get(name, ...)
                torch.testing.assert_close(new[where], value[where], atol=1e-5, rtol=1e-5, msg=f"{name}, {length}")


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 4}, {"early_stopping": True, "no_repeat_ngram_size": 2, "min_length": 4}]
)
def test_kernels_are_compared_with_pytorch_before_they_write(settings):
    search = with_settings(tiny("bart"), **{"num_beams": 3, "max_length": 12, "eos_token_id": 7, **settings})
    device = torch.device(DEVICE)
    assert kernels_agree(search, 200, device, advance=selection.advance_groups)

    def wrong(groups, logits, given):
        """The most probable token is overlooked."""
        logits.scatter_(-1, logits.argmax(-1, keepdim=True), -torch.inf)
        return selection.advance_groups(groups, logits, given)

    def mixed(groups, logits, given):
        """Scores are right, and texts are not, at the last token that is compared."""
        parents = selection.advance_groups(groups, logits, given)
        groups[0].ids[:, 0, 1] += groups[0].length == 1 + kernel_check.TOKENS
        return parents

    assert not kernels_agree(search, 200, device, advance=wrong)
    assert not kernels_agree(search, 200, device, advance=mixed)


@pytest.mark.parametrize("early_stopping", [True, False])
def test_ties_of_beams_that_do_not_count_are_no_difference(early_stopping):
    """One beam has the forced token; the others have no text, and which of them ended is up to the order of ties."""
    settings = {"num_beams": 5, "max_length": 2, "forced_bos_token_id": 4, "length_penalty": -1.0}
    search = with_settings(tiny("bart"), eos_token_id=7, early_stopping=early_stopping, **settings)
    assert kernels_agree(search, 13, torch.device(DEVICE), advance=selection.advance_groups)


@pytest.mark.parametrize(("name", "settings"), [("greedy", {}), ("sampled", {"do_sample": True, "top_k": 0})])
def test_kernels_of_texts_that_go_on_alone_are_compared(name, settings, monkeypatch):
    settings = {"num_beams": 1, "max_length": 12, "no_repeat_ngram_size": 2, "eos_token_id": 7, **settings}
    search = with_settings(tiny("bart"), **settings)
    assert kernels_agree(search, 200, torch.device(DEVICE))
    calls, choose = iter([0, 1]), getattr(kernel_check, name)
    monkeypatch.setattr(kernel_check, name, lambda *given, **how: choose(*given, **how) + next(calls))
    assert not kernels_agree(search, 200, torch.device(DEVICE))


def test_a_gpu_whose_kernels_choose_other_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(graph.beams, "has_kernels", lambda device: True)
    monkeypatch.setattr(graph, "kernels_agree", lambda search, vocabulary, device: False)
    model = tiny("bart")
    with pytest.raises(UserError, match="choose other tokens than PyTorch's operations"):
        graph.load(model, with_settings(model, num_beams=2), precision="fp32")
