"""Candidates of a decoder-only model that share their prompt: the loss of a prompt before each, with fewer tokens."""

import copy

import numpy as np
import pytest
import torch
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from logged import logged
from looped import trained
from models import GROUPED, SLIDING, V, random_weights, sliding, tiny
from own_texts import trained_online, writing_model
from trainings import assert_same_weights, joined_rows, rows_with_candidates, train_joined

import ngramloss as ng
from ngramloss import UserError
from ngramloss.data.batches.joined import JoinedPadder
from ngramloss.data.batches.plan import Plan, Size, fitted_grid
from ngramloss.data.batches.planned import lengths_of
from ngramloss.models.attached import shared_prompts
from ngramloss.models.attached.diagnosing import _first_rows
from ngramloss.models.attached.shared_prompts import on_the_right, why_not_shared
from ngramloss.training import planning

IDS = st.integers(3, V - 1)
COMPARED = "ce + matches(1,2) + rank(margin=0.1,alpha=1) + 0.5*risk + 2*prefer"
OWN = "ce + policy(baseline=greedy) + credit(1,2) + bag(2):student + precision(1):student"
FAMILIES = ["llama", "gpt2", "qwen2", "qwen3", "gpt_neox", "gemma2_sliding", "opt", "smollm3"]
BLOOM = {"vocab_size": V, "hidden_size": 16, "n_layer": 2, "n_head": 2}


def bloom():
    """A model that has no position ids."""
    return random_weights(lambda: hf.BloomForCausalLM(hf.BloomConfig(**BLOOM)), 0, torch.float32)


def gpt_neo(window):
    """A model whose windows count indices."""
    config = hf.GPTNeoConfig(
        vocab_size=V,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        intermediate_size=32,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=2,
    )
    return random_weights(lambda: hf.GPTNeoForCausalLM(config), 0, torch.float32)


def falcon(dtype=torch.float32):
    """A model that looks at the name of its attention."""
    config = hf.FalconConfig(vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return random_weights(lambda: hf.FalconForCausalLM(config), 0, dtype)


@st.composite
def rows(draw, least=0):
    made = []
    for _ in range(draw(st.integers(1, 3))):
        candidates = draw(st.lists(st.lists(IDS, max_size=6), min_size=least, max_size=3))
        row = {"input_ids": draw(st.lists(IDS, max_size=7)), "labels": draw(st.lists(IDS, min_size=1, max_size=6))}
        scores = [draw(st.floats(0, 1, width=32)) for _ in candidates]
        made.append(row | {"candidates": candidates, "scores": scores, "baseline": 0.5})
    return made


def outcome(model, batch):
    """The loss, all parts and the gradients of all weights."""
    model.zero_grad()
    loss = model(**batch, num_tokens=7.0, num_sequences=3.0).loss
    loss.backward()
    parts = {name: value.clone() for name, value in ng.last_parts(model).items()}
    return loss.detach(), parts, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(model, made, size=None, own=(), tolerance=1e-9):
    """Both layouts of these rows have one loss and one gradient."""
    room = None if size is None else Size(len(made) + 1, size, 8, 5, "shared")
    shared = JoinedPadder(1, own=own, shared=True)(made, room)
    repeated = JoinedPadder(1, own=own)(made, None if size is None else Size(len(made) + 1, 16, 8, 5, "repeated"))
    assert len(shared["input_ids"]) == len(shared["labels"]) < len(repeated["input_ids"])
    torch.testing.assert_close(outcome(model, shared), outcome(model, repeated), atol=tolerance, rtol=tolerance)


MODELS = {}


def attached(family, objective):
    """A model in fp64, made once for all examples of a test."""
    if (family, objective) not in MODELS:
        make = sliding if family in SLIDING else tiny
        MODELS[family, objective] = ng.attach(make(family, dtype=torch.float64), objective).train()
    return MODELS[family, objective]


@pytest.mark.slow
@given(made=rows(), filled=st.booleans())
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize(("family", "tolerance"), [("llama", 1e-5), ("gpt2", 1e-9)])
def test_texts_that_share_a_prompt_have_the_loss_and_gradients_of_a_prompt_for_each(family, tolerance, made, filled):
    """The norms of a Llama compute in fp32, whatever the weights are."""
    assert_same(attached(family, COMPARED), made, 48 if filled else None, tolerance=tolerance)


@given(made=rows(least=1))
@settings(max_examples=15, deadline=None)
def test_so_have_texts_that_the_model_wrote(made):
    assert_same(attached("gpt2", OWN), made, own=("greedy", "baseline"))


EXAMPLES = [
    {
        "input_ids": [5, 6, 7, 8, 9, 4, 3],
        "labels": [8, 9, 2],
        "candidates": [[8, 2], [9, 9, 9, 5, 6, 7, 2], [4]],
        "scores": [0.7, 0.1, 0.3],
    },
    {"input_ids": [4], "labels": [3, 2], "candidates": [[6, 2]], "scores": [0.4]},
    {"input_ids": [], "labels": [3, 5, 2], "candidates": [[6, 7, 2], [5]], "scores": [0.4, 0.2]},
    {"input_ids": [4, 4], "labels": [3, 2], "candidates": [], "scores": []},
]


@pytest.mark.parametrize("family", [*FAMILIES, *SLIDING])
def test_every_family_has_that_loss(family):
    assert_same(attached(family, COMPARED), EXAMPLES, tolerance=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_both_kinds_of_attention_have_that_loss(attention):
    model = tiny("grouped", dtype=torch.float64)
    model.set_attn_implementation(attention)
    assert_same(ng.attach(model, COMPARED).train(), EXAMPLES, tolerance=1e-6)
    assert model.config._attn_implementation == attention


def test_a_row_is_a_prompt_and_its_texts():
    batch = JoinedPadder(0, shared=True)(EXAMPLES[:2])
    assert batch["input_ids"][1].tolist() == [4, 3, 2, 6, 2] + [0] * 15
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 1, 2] + [0] * 15
    assert batch["text_numbers"][1].tolist() == [0, 1, 1, 2, 2] + [-1] * 15
    assert batch["label_positions"][1, :2].tolist() == [20, 21]
    assert batch["candidate_positions"][1, 0, :2].tolist() == [20, 23]
    assert batch["candidates"].shape == (2, 3, 7)
    assert "text_numbers" not in JoinedPadder(0)(EXAMPLES[:2])
    plain = [{"input_ids": [4], "labels": [3, 2]}]
    assert "text_numbers" not in JoinedPadder(0, shared=True)(plain)


def test_a_text_without_tokens_behind_no_prompt_is_absent():
    made = [{"input_ids": [], "labels": [5, 6], "candidates": [[], [7, 8]], "scores": [0.1, 0.2]}]
    for shared in (True, False):
        assert JoinedPadder(0, shared=shared)(made)["candidates"].tolist() == [[[-100, -100], [8, -100]]]


@pytest.mark.parametrize("window", [None, 3])
def test_a_token_sees_the_prompt_and_its_own_text_only(window):
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    batch = JoinedPadder(0, shared=True)(EXAMPLES)
    positions, numbers = batch["position_ids"], batch["text_numbers"]
    rule = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    token = shared_prompts._rows.set((positions, numbers))
    mask = shared_prompts._mask(mask_function=rule, dtype=torch.float32)
    shared_prompts._rows.reset(token)
    R, L = numbers.shape
    assert mask.shape == (R, 1, L, L)
    for r in range(R):
        for q in range(L):
            for k in range(L):
                related = numbers[r, k] == numbers[r, q] or numbers[r, k] == 0
                near = positions[r, k] <= positions[r, q] < positions[r, k] + (window or L)
                assert (mask[r, 0, q, k] == 0) == (related and bool(near))
    assert (mask == 0).any(-1).all()  # no softmax of nothing


def test_a_mask_has_the_precision_of_attention():
    model = ng.attach(tiny("llama"), COMPARED).train()
    batch = JoinedPadder(1, shared=True)(EXAMPLES)
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention
    for low in (None, torch.bfloat16):
        with pytest.MonkeyPatch.context() as patch, torch.autocast("cpu", low, enabled=low is not None):
            patch.setattr(
                torch.nn.functional,
                "scaled_dot_product_attention",
                lambda *args, **more: (seen.append(more["attn_mask"].dtype), attend(*args, **more))[1],
            )
            assert torch.isfinite(model(**batch).loss)
    assert set(seen) == {torch.float32, torch.bfloat16}


def test_rows_without_tokens_give_no_nan():
    model = ng.attach(tiny("llama"), COMPARED).train()
    batch = JoinedPadder(1, shared=True)([], Size(2, 16, 4, 3, "shared"))
    loss = model(**batch, num_tokens=1.0, num_sequences=1.0).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.isnan().any() for p in model.parameters())


def test_twins_may_share_prompts():
    batch = ng.twins(JoinedPadder(1, shared=True))(EXAMPLES)
    assert all(torch.equal(value[0::2], value[1::2]) for name, value in batch.items() if "positions" not in name)
    assert_same(attached("gpt2", COMPARED), [row for row in EXAMPLES for _ in range(2)])


def test_text_numbers_without_what_they_need_are_refused():
    model = ng.attach(tiny("llama"), "ce")
    batch = JoinedPadder(1, shared=True)(EXAMPLES)
    batch = {name: value for name, value in batch.items() if not name.startswith(("candidate", "scores"))}
    model(**batch)
    with pytest.raises(UserError, match="but no `label_positions`"):
        model(**{name: value for name, value in batch.items() if name != "label_positions"})
    with pytest.raises(UserError, match="needs `position_ids`"):
        model(**{name: value for name, value in batch.items() if name != "position_ids"})
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="but the model has flash_attention_2"):
        model(**batch)


def test_a_rule_of_the_models_own_is_refused():
    with pytest.raises(UserError, match="cannot be computed from position ids"):
        shared_prompts._mask(mask_function=None, dtype=torch.float32, use_vmap=True)


# Whether a model is right so


@pytest.mark.parametrize("family", [*FAMILIES, "mistral", "gemma3_text", "phi3"])
def test_models_that_can_share_prompts_are_known(family):
    assert why_not_shared(tiny(family), longest_row=70, longest_text=12) == ""


def test_a_text_that_leaves_few_positions_to_its_prompt_says_nothing_against_a_model():
    model = tiny("gpt2")
    assert why_not_shared(model, longest_row=140, longest_text=model.config.n_positions - 2) == ""


def test_a_model_without_position_ids_cannot_share_prompts():
    assert "log-probabilities of a text then differ by" in why_not_shared(bloom(), longest_row=30, longest_text=5)


def test_a_window_that_counts_indices_shows_in_a_row_as_long_as_those_of_the_training():
    model = gpt_neo(window=24)
    assert why_not_shared(model, longest_row=24, longest_text=8) == ""
    assert "differ by" in why_not_shared(model, longest_row=120, longest_text=8)
    assert "RuntimeError" in why_not_shared(model, longest_row=400, longest_text=8)  # more than its buffer has


def test_such_a_window_shows_if_one_text_is_nearly_as_long_as_a_row():
    model = gpt_neo(window=24)
    assert "differ by" in why_not_shared(model, longest_row=60, longest_text=40)
    examples = [
        {
            "input_ids": [5, 6, 7, 8] * 3,
            "labels": [8, 9, 4] * 4,
            "candidates": [[4, 5, 6] * 4] * 2,
            "scores": [0.5] * 2,
        },
        {"input_ids": [5, 6], "labels": [8, 9], "candidates": [[4, 5, 6, 7] * 10], "scores": [0.5]},
    ]
    lengths = lengths_of(examples, joined="shared")
    longest = {"longest_row": int(lengths.sources.max()), "longest_text": int(lengths.targets.max())}
    assert longest == {"longest_row": 48, "longest_text": 40}
    assert "differ by" in why_not_shared(model, **longest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_compared_as_fp32(dtype, monkeypatch):
    """Their rounding may make log-probabilities differ as much as a window or positions that are wrong."""
    compared, logp = [], shared_prompts._logp
    monkeypatch.setattr(
        shared_prompts, "_logp", lambda model, batch: compared.append(model.dtype) or logp(model, batch)
    )
    for make in (bloom, lambda: gpt_neo(window=24)):
        assert "differ by" in why_not_shared(make().to(dtype), longest_row=120, longest_text=8)
    model = tiny("llama").to(dtype)
    places = [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    before = copy.deepcopy(model.state_dict())
    assert why_not_shared(model, longest_row=70, longest_text=12) == ""
    assert places == [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {value.dtype for value in model.state_dict().values()} == {dtype}
    assert set(compared) == {torch.float32}


def test_attention_without_masks_cannot_share_prompts():
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    assert why_not_shared(model, longest_row=30, longest_text=5) == "flash_attention_2 takes no mask of its own"


def test_the_comparison_changes_nothing():
    model = ng.attach(tiny("llama"), COMPARED).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    assert why_not_shared(model, longest_row=70, longest_text=12) == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert hooks == [len(module._forward_pre_hooks) for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_a_model_that_compares_the_name_of_its_attention_sees_no_later_token():
    model = falcon(torch.float64).eval()
    ids = torch.randint(V, (2, 12), generator=torch.Generator().manual_seed(0))
    run = on_the_right(lambda model, **inputs: model(**inputs))
    torch.testing.assert_close(run(model, input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.parametrize("make", [falcon, lambda: tiny("llama"), lambda: tiny("gpt2")])
def test_layers_that_are_computed_again_have_the_same_gradients(make):
    """Falcon computes them again under the name sdpa, with other operations: its gradients were silently wrong."""
    made = []
    for again in (False, True):
        model = make()
        if again:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        why = why_not_shared(model, longest_row=30, longest_text=8)
        assert bool(why) == (again and model.config.model_type == "falcon")
        made.append(outcome(ng.attach(model, COMPARED).train(), JoinedPadder(1, shared=not why)(EXAMPLES)))
    torch.testing.assert_close(*made, atol=1e-4, rtol=1e-4)


# Trainings


def both(monkeypatch, train):
    """What a training returns with shared prompts, and with a prompt before each text."""
    with logged() as said:
        first = train()
    assert not any("share their prompt" in line for line in said)
    monkeypatch.setattr(planning, "why_not_shared", lambda *given, **more: "of a test")
    with logged() as said:
        second = train()
    assert any("do not share their prompt, because the model cannot do that: of a test" in line for line in said)
    return first, second


KINDS = {
    "plain": {},
    "adapters": {"lora": 2},
    "by tokens": {"max_tokens": 60},
    "accumulated": {"batch_size": 4, "accumulate": 2},
    "random order": {"group_by_length": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_does_not_depend_on_the_layout(monkeypatch, kind):
    one, other = both(monkeypatch, lambda: train_joined(None, COMPARED, **KINDS[kind]))
    assert len(set(one)) == 5
    np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("objective", [OWN, "ce + risk", "ce + 0.1*keep + policy"])
def test_a_training_on_own_texts_does_not_depend_on_the_layout(monkeypatch, objective):
    changes = {"family": "llama", "objective": objective, "learning_rate": 1e-3, "online": {"refresh": 2}}
    one, other = both(monkeypatch, lambda: trained_online(**changes))
    names = [name for name in one.log[0] if name not in ("docs_per_second", "texts_per_second", "writing_share")]
    for line, expected in zip(one.log, other.log, strict=True):
        for name in set(names) & expected.keys() - {"memory_gib", "eta"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-4), name


def test_micro_batches_of_own_texts_are_cut_by_the_tokens_of_rows():
    seen, model = [], writing_model("llama")
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    trained_online(model=model, objective="ce + risk", max_tokens=60, epochs=1.0)
    batches = [kwargs["input_ids"] for kwargs in seen if "text_numbers" in kwargs]
    assert len(batches) > 3
    assert all(ids.numel() <= 60 or len(ids) == 1 for ids in batches)


def test_a_teacher_reads_the_same_rows(monkeypatch):
    given = {"objective": "ce + rank + 0.5*distill", "data": joined_rows(22, candidates=True)}
    one, other = both(monkeypatch, lambda: trained(model=tiny("llama"), teacher=tiny("gpt2"), epochs=1.0, **given))
    assert [line["distill"] for line in one.log] == pytest.approx([line["distill"] for line in other.log], rel=1e-5)
    assert_same_weights(one.model.state_dict(), other.model.state_dict(), tolerance=1e-4)


def test_a_teacher_that_cannot_share_prompts_is_named():
    with logged() as said:
        trained(
            model=tiny("llama"),
            teacher=bloom(),
            objective="ce + rank + 0.5*distill",
            data=joined_rows(22, candidates=True),
            max_steps=1,
        )
    assert any("because the teacher cannot do that: log-probabilities" in line for line in said), said


def test_a_model_that_cannot_share_prompts_trains_with_a_prompt_before_each_text_and_says_so():
    seen, data = [], joined_rows(22, candidates=True)
    model = bloom()
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    with logged() as said:
        trained(model=model, objective=COMPARED, data=data, max_steps=2)
    (line,) = [line for line in said if "share their prompt" in line]
    lengths = {name: lengths_of(data, joined=name) for name in ("shared", "repeated")}
    cost = (lengths["repeated"].sources * lengths["repeated"].texts).sum() / lengths["shared"].sources.sum()
    assert "log-probabilities of a text then differ by" in line
    assert f"{cost:.1f} times as many tokens" in line
    batches = [kwargs for kwargs in seen if "labels" in kwargs]
    assert all(len(batch["input_ids"]) > len(batch["labels"]) for batch in batches)
    assert not any("text_numbers" in batch for batch in batches)


def test_a_mixture_of_experts_counts_no_padding():
    config = hf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
    model = random_weights(lambda: hf.MixtralForCausalLM(config), 0, torch.float32)
    ng.attach(model, COMPARED).train()
    losses = [
        model(**JoinedPadder(1, always_mask=True, shared=True)(EXAMPLES, size), num_tokens=1.0, num_sequences=1.0).loss
        for size in (None, Size(4, 64, 8, 4, "shared"))
    ]
    torch.testing.assert_close(*losses)


# Lengths and plans


@given(made=rows(least=1))
@settings(max_examples=30, deadline=None)
def test_lengths_are_those_of_the_rows(made):
    made = [*made, {"input_ids": [3, 3], "labels": [4], "candidates": [[5]], "scores": [1.0]}]
    lengths, other = (lengths_of(made, joined=joined) for joined in ("shared", "repeated"))
    batch = JoinedPadder(1, shared=True)(made)
    assert lengths.sources.max() == batch["input_ids"].shape[1]
    assert lengths.sources.tolist() == [
        len(row["input_ids"]) + len(row["labels"]) + sum(map(len, row["candidates"])) for row in made
    ]
    assert [column.tolist() for column in lengths[1:]] == [column.tolist() for column in other[1:]]


@given(made=rows(least=1), most=st.integers(10, 90))
@settings(max_examples=20, deadline=None)
def test_plans_by_tokens_hold_every_row_once(made, most):
    made = [*made, {"input_ids": [3, 3], "labels": [4], "candidates": [[5]], "scores": [1.0]}] * 3
    lengths = lengths_of(made, joined="shared")
    texts = max(int(lengths.texts.max()), 2)
    grid = fitted_grid(lengths.sources, lengths.targets, [range(len(made))], texts=texts, joined="shared")
    for chosen in (grid, None):
        plan = Plan(lengths.sources, lengths.targets, 12, most, chosen, lengths.texts, "shared")
        pieces = plan.cut(range(len(made)))
        assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(made)))
        for piece in pieces:
            batch = JoinedPadder(1, shared=True)([made[row] for row in piece.rows], piece.size)
            assert batch["input_ids"].numel() <= most or len(piece.rows) == 1 or piece.size.rows == 1
            if piece.size is not None:
                assert batch["input_ids"].numel() == piece.size.tokens


def test_shared_prompts_are_counted_once():
    made = [{"input_ids": [3] * 200, "labels": [4] * 40, "candidates": [[5] * 40] * 8, "scores": [0.0] * 8}]
    lengths = {joined: lengths_of(made, joined=joined) for joined in ("shared", "repeated")}
    sizes = [Plan(*lengths[name][:2], 1, texts=lengths[name].texts, joined=name)._smallest([0]) for name in lengths]
    assert [size.tokens for size in sizes] == [200 + 9 * 40, 9 * (200 + 40)]
    for size, shared in zip(sizes, (True, False), strict=True):
        assert JoinedPadder(0, shared=shared)(made)["input_ids"].numel() == size.tokens


def test_diagnostics_read_nothing_behind_the_reference():
    made = [row | {"baseline": 0.0} for row in [EXAMPLES[0], *EXAMPLES]]
    batch = JoinedPadder(1, shared=True)(made)
    model = ng.attach(tiny("llama", dtype=torch.float64), COMPARED)
    first = _first_rows(batch)
    assert first["input_ids"].shape == (4, 7 + 3 - 1)
    expected = ng.models.attached.attach.logits_of(model, JoinedPadder(1)([{**row} for row in made]))
    real = batch["labels"][:4] != -100
    torch.testing.assert_close(ng.models.attached.attach.logits_of(model, first)[real], expected[:4][real])


def test_candidates_from_prepared_tokens_have_the_same_lengths():
    made = rows_with_candidates(12)

    class Known(list):
        lengths = np.array([len(row["input_ids"]) for row in made])
        target_lengths = np.array([max(map(len, [row["labels"], *row["candidates"]])) for row in made])
        label_lengths = np.array([len(row["labels"]) for row in made])
        texts = np.array([1 + len(row["candidates"]) for row in made])
        has_turns = False

    exact = lengths_of(made, joined="shared").sources
    assert (lengths_of(Known(made), joined="shared").sources >= exact).all()
    Known.all_target_lengths = np.array([sum(map(len, [row["labels"], *row["candidates"]])) for row in made])
    assert lengths_of(Known(made), joined="shared").sources.tolist() == exact.tolist()
