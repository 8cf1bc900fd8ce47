"""The engine draft against hf: the same texts, whatever is drafted, in as few passes as the drafts allow."""

import copy
import dataclasses

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from searches import PROMPTED, SERVED, SOURCES, tiny, with_settings, written

from ngramloss.errors import UserError
from ngramloss.models.drafter import Drafter, Sizes
from ngramloss.search import engines
from ngramloss.search.engines import draft, hf

FEW = ["bart", "m2m_100", "pegasus", "t5", "llama", "gpt2", "mistral", "gemma2_sliding"]


def drafter_of(model, places):
    width = model.get_output_embeddings().weight.shape[1]
    torch.manual_seed(0)
    drafter = Drafter(Sizes(width, 2, 16, 1, places, bool(model.config.is_encoder_decoder), 5, None, "")).eval()
    drafter.shortlist.copy_(torch.tensor([2, 4, 7, 9, 11]))
    return drafter


def with_drafter(model, places=3, **given):
    return dataclasses.replace(with_settings(model, **given), drafter=drafter_of(model, places))


class Oracle:
    """Drafts what hf writes, but tokens that are wrong at some places of some rows. Counts the drafts."""

    def __init__(self, texts, places, wrong):
        self.texts, self.places, self.wrong, self.drafts = texts, places, wrong, 0

    def __call__(self, drafter, head, few, hidden, ids, length, *source):
        self.drafts += 1
        rows = []
        for row, n in enumerate(length.flatten().tolist()):
            ahead = [*self.texts[row], *[models.PAD] * 99][n : n + self.places]
            rows.append([(token + ((row, n + i) in self.wrong)) % models.V for i, token in enumerate(ahead)])
        return torch.tensor(rows)


def assert_same_texts(model, search, sources, wrong=frozenset()):
    expected = written(hf, model, search, sources)
    assert written(draft, model, search, sources) == expected
    oracle = Oracle([row for (row,) in expected], search.drafter.sizes.places, wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "proposed", oracle)
        assert written(draft, model, search, sources) == expected
    return oracle, expected


DRAWN = st.fixed_dictionaries(
    {},
    optional={
        "min_length": st.integers(0, 9),
        "no_repeat_ngram_size": st.integers(1, 3),
        "forced_bos_token_id": st.just(5),
        "forced_eos_token_id": st.just(models.EOS),
        "eos_token_id": st.sampled_from([models.EOS, [models.EOS, 7, 9]]),
        "bad_words_ids": st.just([[4], [6], [11]]),
        "max_length": st.integers(2, 14),
    },
)


@given(
    family=st.sampled_from(FEW),
    drawn=DRAWN,
    places=st.integers(1, 9),
    sources=st.lists(st.sampled_from(SOURCES), min_size=1, max_size=5),
    wrong=st.frozensets(st.tuples(st.integers(0, 4), st.integers(1, 13)), max_size=12),
    seed=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_texts_are_those_of_hf(family, drawn, places, sources, wrong, seed):
    model = tiny(family, seed)
    assert_same_texts(model, with_drafter(model, places, **drawn), sources, wrong)


@pytest.mark.parametrize("family", ["bart", "t5", "mistral"])
def test_rows_of_a_batch_keep_different_numbers_of_tokens(family):
    model = tiny(family)
    for rules in ({"min_length": 20}, {"no_repeat_ngram_size": 2}, {"eos_token_id": [models.EOS, 7, 9]}):
        wrong = {(row, place) for row in range(6) for place in range(1, 30) if (3 * row + place) % 5 == 0}
        assert_same_texts(model, with_drafter(model, 4, max_length=24, **rules), SOURCES, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("family", SERVED)
def test_every_family_that_is_served_writes_the_texts_of_hf(family):
    model = tiny(family)
    wrong = {(row, place) for row in range(6) for place in range(1, 30) if (3 * row + place) % 5 == 0}
    assert_same_texts(model, with_drafter(model, 4, max_length=24, no_repeat_ngram_size=3), SOURCES, wrong)


@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_a_right_draft_needs_a_pass_for_each_k_and_one_tokens(family):
    model = tiny(family)
    search = with_drafter(model, 4, max_length=21, min_length=21)
    oracle, texts = assert_same_texts(model, search, SOURCES)
    assert {len(row) for (row,) in texts} == {21}
    assert oracle.drafts == 4  # a token without one, then 19 in fives
    oracle, _ = assert_same_texts(model, search, SOURCES, {(0, place) for place in range(99)})
    assert oracle.drafts == 19  # a row whose drafts are always wrong still gets a token in each pass


def test_a_draft_longer_than_the_text_has_fewer_places():
    model = tiny("bart")
    oracle, _ = assert_same_texts(model, with_drafter(model, 40, max_length=7, min_length=7), SOURCES)
    assert oracle.drafts == 1


@pytest.mark.parametrize("family", PROMPTED[:2])
def test_a_prompt_and_its_text_may_fill_all_positions(family):
    model = tiny(family)
    prompts = [[4 + place % 8 for place in range(50)], [5]]
    assert_same_texts(model, with_drafter(model, 9, max_length=16, min_length=16), prompts)
    if family == "gpt2":
        with pytest.raises(UserError, match="may need 65 positions, but the model has 64"):
            written(draft, model, with_drafter(model, 9, max_length=17), prompts)


@pytest.mark.parametrize(
    ("family", "given_", "reason"),
    [
        ("bart", {"num_beams": 2}, "it has no beams, and generation.num_beams is 2: set it to 1"),
        ("bart", {"do_sample": True}, "it does not sample"),
        ("bart", {"repetition_penalty": 2.0}, "it does not know repetition_penalty"),
        ("prophetnet", {}, r"it serves bart, .*, not prophetnet"),
    ],
)
def test_what_it_cannot_do_is_said(family, given_, reason):
    model = tiny(family)
    with pytest.raises(UserError, match=f"the engine draft cannot be used: .*{reason}.* Use --engine hf"):
        engines.load("draft", model, with_drafter(model, **given_))


def test_it_needs_a_drafter_and_auto_does_not_take_it():
    model = tiny("bart")
    with pytest.raises(UserError, match="it needs a drafter: train one with ngramloss train drafter"):
        engines.load("draft", model, with_settings(model))
    assert engines.load("auto", model, with_drafter(model)).name != "draft"


def test_in_16_bits_rounding_is_said():
    model = tiny("bart")
    assert list(draft.differences(model, with_drafter(model), precision="bf16")) == [
        "rounding in bf16 depends on how many tokens a pass reads"
    ]


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_draft_is_the_best_of_the_shortlist_at_each_place(family):
    """Against logits of the whole head; of a model whose head has a bias, too."""
    model = copy.deepcopy(tiny(family))
    if family == "bart":
        model.final_logits_bias.copy_(torch.linspace(-3, 3, models.V))
    search, drafts = with_drafter(model, 3, max_length=9, min_length=9), []
    own = draft.proposed

    def watched(drafter, head, few, hidden, ids, length, *source):
        drafts.append(own(drafter, head, few, hidden, ids, length, *source))
        newest = head.weight[ids.gather(1, length - 1)]
        logits = head.logits(drafter(hidden, newest, *source)[:, 0])
        allowed = torch.full((models.V,), -torch.inf).index_fill(0, drafter.shortlist, 0.0)
        assert drafts[-1].equal((logits + allowed).argmax(-1))
        return drafts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft, "proposed", watched)
        written(draft, model, search)
    assert len({token for each in drafts for token in each.flatten().tolist()}) > 1
