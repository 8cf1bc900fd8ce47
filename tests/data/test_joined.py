"""Steps of decoder-only models: prompts and texts in one row, labels where they are predicted."""

import json
import os

import numpy as np
import pytest
import torch
from forks import fork_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from models import SLIDING, V, sliding, tiny
from safetensors.torch import load_file
from trainings import EACH_RANK, assert_same_weights, train_joined

import ngramloss as ng
from ngramloss import JointLoss, UserError
from ngramloss.data.batches.joined import JoinedPadder, split_turns
from ngramloss.data.batches.plan import Plan, Size, fitted_grid
from ngramloss.data.batches.planned import lengths_of
from ngramloss.recipe import Generation
from ngramloss.search import engines
from ngramloss.search.engines.hf import search_of

IDS = st.integers(3, V - 1)
OBJECTIVE = "ce + matches(1,2) + bag(2)"


@st.composite
def rows(draw, turns=True):
    made = []
    for _ in range(draw(st.integers(1, 4))):
        labels = draw(st.lists(IDS, min_size=1, max_size=5))
        if turns and draw(st.booleans()):
            labels = [*labels, *(~token for token in draw(st.lists(IDS, min_size=1, max_size=3)))]
            labels += draw(st.lists(IDS, max_size=4))
        made.append({"input_ids": draw(st.lists(IDS, min_size=1, max_size=6)), "labels": labels})
    return made


def loss_in_plain_python(model, row, loss_fn):
    """Each text of a row by itself: its logits from a forward pass over the whole row. The sums of each part."""
    tokens, spans = split_turns(row["labels"])
    ids = torch.tensor([[*row["input_ids"], *tokens]])
    logits = model(input_ids=ids).logits[0]
    for span in spans:
        first, last = len(row["input_ids"]) + span.start, len(row["input_ids"]) + span.stop
        yield loss_fn(logits[None, first - 1 : last - 1], ids[:, first:last], num_tokens=1, num_sequences=1)


@given(rows=rows(), filled=st.booleans())
@settings(max_examples=30, deadline=None)
def test_a_batch_has_the_loss_of_its_texts(rows, filled):
    loss_fn = JointLoss(OBJECTIVE)
    model = tiny("llama", dtype=torch.float64)
    expected = sum(value for row in rows for value in loss_in_plain_python(model, row, loss_fn))
    size = Size(len(rows) + 2, 20, 12, 3, "turns") if filled else None
    loss = ng.attach(model, OBJECTIVE)(**JoinedPadder(1)(rows, size), num_tokens=1, num_sequences=1).loss
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)


LONG = [
    {"input_ids": list(range(3, 3 + n)), "labels": [5, 6, ~7, *range(4, 4 + m)]} for n, m in ((2, 3), (9, 4), (5, 8))
]


@pytest.mark.parametrize("family", SLIDING)
def test_padding_on_the_right_is_right_for_windows_and_soft_caps_of_attention(family):
    loss_fn, model = JointLoss(OBJECTIVE), sliding(family, dtype=torch.float64)
    expected = sum(value for row in LONG for value in loss_in_plain_python(model, row, loss_fn))
    batch = JoinedPadder(1)(LONG)
    assert "attention_mask" not in batch
    implementation = model.config._attn_implementation
    loss = ng.attach(model, OBJECTIVE)(**batch, num_tokens=1, num_sequences=1).loss
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)  # some compute attention in fp32
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("family", SLIDING)
def test_padding_before_a_prompt_does_not_change_texts_of_windows_and_soft_caps(family, beams):
    model = sliding(family).eval()
    engine = engines.load("hf", model, search_of(model, Generation(num_beams=beams, max_length=8)))
    prompts = [row["input_ids"] for row in LONG]
    assert engine.write(prompts) == [engine.write([prompt])[0] for prompt in prompts]


def test_rows_without_a_text_count_for_nothing_in_the_loop():
    examples = [{"input_ids": [3 + i, 4], "labels": [5, 6, 2]} for i in range(3)]
    empty = {"input_ids": [7, 8], "labels": []}
    losses = {}
    for name, data in (("without", examples), ("with", [examples[0], empty, *examples[1:]]), ("only", [empty] * 4)):
        model = tiny("llama")
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        lines = []
        ng.train(
            model,
            None,
            data,
            objective=OBJECTIVE,
            batch_size=len(data),
            accumulate=1,
            max_steps=1,
            log_every=1,
            warmup_steps=0,
            weight_decay=0.0,
            on_step=lambda step, line, lines=lines: lines.append(line["loss"]),
        )
        losses[name] = lines[0]
        same = all(torch.equal(weight, before[key]) for key, weight in model.state_dict().items())
        assert same == (name == "only")
    assert losses["with"] == pytest.approx(losses["without"], rel=1e-5)
    assert losses["only"] == 0


def test_masks_are_left_out_only_where_a_batch_is_ours(monkeypatch):
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *args, **more: (seen.append(more["attn_mask"]), attend(*args, **more))[1],
    )
    model, batch = ng.attach(tiny("llama"), OBJECTIVE), JoinedPadder(1)(LONG)
    model(**batch)
    assert [mask is None for mask in seen] == [True] * len(seen)
    seen.clear()
    model(input_ids=batch["input_ids"], attention_mask=(batch["input_ids"] != 1).long())
    assert [mask is None for mask in seen] == [False] * len(seen)


@given(rows=rows())
@settings(max_examples=30, deadline=None)
def test_lengths_are_those_of_the_batch(rows):
    rows = [*rows, {"input_ids": [3, 3], "labels": [4]}]  # labels of one row at least do not repeat the prompt
    lengths = lengths_of(rows, joined="turns")
    batch = JoinedPadder(1)(rows)
    counts = batch["labels"] != -100
    assert lengths.counted.sum() == counts.sum()
    assert lengths.sequences.sum() == counts.any(-1).sum()
    assert lengths.sources.max() == batch["input_ids"].shape[1]
    assert lengths.targets.max() == batch["labels"].shape[1]
    texts = 1 if lengths.texts is None else lengths.texts.max()
    assert len(batch["labels"]) == len(rows) * texts


def test_the_first_token_of_a_row_is_predicted_by_nothing():
    rows = [{"input_ids": [], "labels": [5, 6]}, {"input_ids": [], "labels": [7]}]
    batch = JoinedPadder(1)(rows)
    assert batch["labels"].tolist() == [[6, -100], [-100, -100]]
    lengths = lengths_of(rows, joined="turns")
    assert lengths.counted.tolist() == [1, 0]
    assert lengths.sequences.tolist() == [1, 0]


def test_labels_that_repeat_the_prompt_are_refused():
    with pytest.raises(UserError, match="`input_ids` are the prompt alone"):
        lengths_of([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}], joined="turns")


def test_the_label_that_hugging_face_ignores_is_refused():
    with pytest.raises(UserError, match="or contain -100"):
        lengths_of(
            [{"input_ids": [5, 6], "labels": [-100, 6, 7]}, {"input_ids": [5], "labels": [8, 9]}], joined="turns"
        )
    assert lengths_of([{"input_ids": [5], "labels": [6, ~99, ~7, 8]}], joined="turns").counted.tolist() == [2]


def test_diagnostics_take_the_rows_of_the_first_texts():
    from ngramloss.models.attached.diagnosing import _first_rows

    rows = [{"input_ids": [3 + i, 4], "labels": [5, 6, ~7, 8] if i % 2 else [9]} for i in range(6)]
    batch = JoinedPadder(1)(rows)
    first = _first_rows(batch)
    assert first["input_ids"].shape == (4, 6)
    assert first["labels"].tolist() == batch["labels"][:4].tolist()
    assert first["label_positions"].max() < first["input_ids"].numel()


def test_the_end_is_learnt_where_it_is_also_the_padding():
    end = 2
    batch = JoinedPadder(end)([{"input_ids": [5], "labels": [6, end]}, {"input_ids": [5, 5, 5], "labels": [6, 7, end]}])
    assert (batch["labels"] == end).sum() == 2


CANDIDATES = [
    {"input_ids": [5, 6, 7], "labels": [8, 9, 2], "candidates": [[8, 2], [9, 9, 9, 2]], "scores": [0.7, 0.1]},
    {"input_ids": [4], "labels": [3, 2], "candidates": [[6, 2]], "scores": [0.4]},
    {"input_ids": [4, 4], "labels": [3, 2], "candidates": [], "scores": []},
]


@pytest.mark.parametrize("size", [None, Size(4, 12, 6, 4, "repeated")])
def test_candidates_are_rows_of_their_own(size):
    model = tiny("llama", dtype=torch.float64)
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for b, row in enumerate(CANDIDATES):
        for k, text in enumerate(row["candidates"]):
            logp = model(input_ids=torch.tensor([row["input_ids"] + text])).logits.log_softmax(-1)[0]
            first = len(row["input_ids"])
            expected[b, k] = sum(logp[first + t - 1, token] for t, token in enumerate(text))
    seen = []
    objective = "ce + rank + risk"
    ng.attach(model, objective).train()
    loss_fn = ng.attached_loss(model)
    compute = loss_fn.from_hidden_with_parts
    loss_fn.from_hidden_with_parts = lambda *args, **more: (seen.append(more["candidates"]), compute(*args, **more))[1]
    batch = JoinedPadder(1)(CANDIDATES, size)
    loss = model(**batch).loss
    (stats,) = seen
    torch.testing.assert_close(stats.logp[:3, :2], expected)
    assert stats.length[:3, :2].tolist() == [[2, 4], [2, 0], [0, 0]]
    loss.backward()
    model.eval()
    rest = {name: value for name, value in batch.items() if not name.startswith(("candidate", "scores"))}
    assert set(ng.last_parts(model)) >= {"ce"}
    assert torch.isfinite(model(**rest).loss)


def test_numbers_beside_the_labels_are_those_of_the_reference_beside_a_longer_candidate():
    rows = [{**row, "weights": np.arange(1.0, 1 + len(row["labels"]))} for row in CANDIDATES]
    batch = JoinedPadder(1)(rows)
    assert batch["weights"].tolist() == [[1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 0, 0]]


def test_padding_does_not_read_one_position_alone():
    """Its gradients, all 0, would be added up at that position one after the other."""
    places = JoinedPadder(1)([], Size(2, 4, 6, 1, "turns"))["label_positions"]
    assert places.tolist() == [[0, 1, 2, 3, 3, 3], [4, 5, 6, 7, 7, 7]]


def test_candidates_without_positions_are_refused():
    model = ng.attach(tiny("llama"), "ce + rank").train()
    inputs = {"input_ids": torch.full((2, 5), 4), "labels": torch.full((2, 5), 4)}
    with pytest.raises(UserError, match="candidate_positions"):
        model(**inputs, candidates=torch.full((2, 1, 3), 5), scores=torch.ones(2, 1))
    batch = JoinedPadder(1)(CANDIDATES)
    model(**batch)
    with pytest.raises(UserError, match="label_positions"):
        model(**{name: value for name, value in batch.items() if name != "label_positions"})


def test_candidates_of_several_turns_are_refused():
    with pytest.raises(UserError, match="several turns"):
        lengths_of([{"input_ids": [5], "labels": [6, ~7, 8], "candidates": [[6]], "scores": [1.0]}], joined="turns")
    with pytest.raises(UserError, match="several turns"):
        JoinedPadder(1)([{"input_ids": [5], "labels": [6, ~7, 8], "candidates": [[6]], "scores": [1.0]}])


@given(rows=rows(), most=st.integers(10, 60))
@settings(max_examples=20, deadline=None)
def test_plans_by_tokens_hold_every_row_once(rows, most):
    rows = [*rows, {"input_ids": [3, 3], "labels": [4]}]
    lengths = lengths_of(rows * 3, joined="turns")
    texts = 1 if lengths.texts is None else int(lengths.texts.max())
    grid = fitted_grid(lengths.sources, lengths.targets, [range(len(rows) * 3)], texts=max(texts, 1), joined="turns")
    for chosen in (grid, None):
        plan = Plan(lengths.sources, lengths.targets, 12, most, chosen, lengths.texts, "turns")
        pieces = plan.cut(range(len(rows) * 3))
        assert sorted(row for piece in pieces for row in piece.rows) == list(range(len(rows) * 3))
        for piece in pieces:
            batch = JoinedPadder(1)([(rows * 3)[row] for row in piece.rows], piece.size)
            assert batch["input_ids"].numel() <= most or len(piece.rows) == 1 or piece.size.rows == 1
            if piece.size is not None:
                assert batch["input_ids"].numel() == piece.size.tokens


SPLITS = {
    "accumulated": {"batch_size": 4, "accumulate": 2},
    "by tokens": {"max_tokens": 60},
    "two processes": {"processes": 2},
    "two processes, accumulated": {"processes": 2, "batch_size": 4, "accumulate": 2},
    "sharded": {"processes": 2, "fsdp": True},
}
KINDS = {
    "turns": {"objective": "ce + matches(2,3)"},
    "candidates": {"objective": "ce + matches(2) + rank + 0.5*risk + 2*prefer"},
    "adapters": {"objective": "ce + matches(2,3)", "lora": 2},
}


def trained(folder, objective, processes=1, **settings):
    """The losses and the weights of a training."""
    if processes == 1:
        losses = train_joined(folder, objective, **settings)
    else:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [str(folder), objective, json.dumps(settings)]
        codes, errors = fork_ranks(EACH_RANK, arguments, environment=environment, count=processes)
        assert codes == [0] * processes, errors[-3000:]
        losses = json.loads((folder / "losses.json").read_text())
    return losses, load_file(folder / "checkpoint-5" / "model.safetensors")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return {kind: trained(tmp_path_factory.mktemp("whole"), **KINDS[kind]) for kind in KINDS}


@pytest.mark.parametrize(
    ("split", "kind"),
    [
        pytest.param(split, kind, marks=[pytest.mark.slow] * ("processes" in SPLITS[split]))
        for split in SPLITS
        for kind in KINDS
        if (split, kind) != ("sharded", "adapters")
    ],
)
def test_steps_may_be_split_over_micro_batches_and_processes(split, kind, whole, tmp_path):
    losses, weights = trained(tmp_path, **KINDS[kind], **SPLITS[split])
    expected, whole_weights = whole[kind]
    assert len(set(losses)) == 5
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_weights(weights, whole_weights)


def test_a_model_learns_in_the_loop():
    examples = [{"input_ids": [3 + i % 5, 4, 9], "labels": [5 + i % 4, 6, 2]} for i in range(8)]
    losses = []
    ng.train(
        tiny("llama"),
        None,
        examples,
        objective=OBJECTIVE,
        batch_size=8,
        accumulate=1,
        max_steps=20,
        learning_rate=0.01,
        warmup_steps=0,
        log_every=1,
        eval_every=10,
        validation=examples,
        on_step=lambda number, values: losses.append(values["loss"]),
    )
    assert losses[-1] < losses[0] / 2


def test_adapters_are_not_sharded(monkeypatch):
    monkeypatch.setattr("ngramloss.training.sharding.raise_unless_shardable", lambda *given: None)
    with pytest.raises(UserError, match=r"train.fsdp does not shard adapters"):
        train_joined(None, OBJECTIVE, lora=2, fsdp=True)
