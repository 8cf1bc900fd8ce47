"""A parallel decoder: what its places see and read, that labels do not leak, and how it writes, against plain Python."""

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from models import EOS, PAD, V, tiny

import ngramloss as ng
from ngramloss.data.batches.plan import Size
from ngramloss.errors import UserError
from ngramloss_systems import parallel as system
from ngramloss_systems import parallel_model
from ngramloss_systems.parallel_model import load_parallel, lowest, parallel

FAMILIES = ("bart", "marian", "t5", "mbart")
MASK = 3
TOKENIZER = SimpleNamespace(
    mask_token_id=MASK,
    unk_token_id=None,
    all_special_ids=[PAD, EOS, MASK],
    pad_token_id=PAD,
    bos_token_id=None,
    eos_token_id=EOS,
)


@pytest.fixture(autouse=True)
def source_with_special_tokens(monkeypatch):
    """One special token before a source and one behind it."""
    monkeypatch.setattr(parallel_model.ng.tokens, "special_tokens", lambda tokenizer, argument="text": ([0], [EOS]))


def made(family="bart", attention="sdpa", base=None, **options):
    base = tiny(family) if base is None else base
    base.set_attn_implementation(attention)
    settings = {"inputs": "copy", "most": 12, "ratio": 1.0, "spread": 3, "name": family} | options
    torch.manual_seed(1)
    model = parallel(base, TOKENIZER, **settings).eval()
    torch.nn.init.normal_(model.length.weight)
    return model


def rows(count=3, seed=0):
    """Sources of different lengths with special tokens around, padded; their labels, of 5, 4 and 2 tokens."""
    generator = torch.Generator().manual_seed(seed)
    sources = [[0, *torch.randint(4, V, (n,), generator=generator).tolist(), EOS] for n in (6, 3, 4)[:count]]
    labels = [torch.randint(4, V, (n,), generator=generator).tolist() for n in (5, 4, 2)[:count]]
    return [{"input_ids": ids, "labels": gold} for ids, gold in zip(sources, labels, strict=True)]


def logits_of(model, batch, labels):
    """The logits at the places of a batch, as training computes them with these labels."""
    seen = []
    head = model.get_output_embeddings().register_forward_hook(lambda _, __, made: seen.append(made.detach()))
    ng.attach(model, "ce", logits=True)
    system.shares(model, {**batch, "labels": labels}, torch.tensor([9.0, 3.0]), weight=0.1)
    head.remove()
    ng.detach(model)
    return seen[-1]


# What a place sees


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_labels_and_a_later_place_changes_an_earlier_one(family, attention):
    model = made(family, attention)
    batch = system.pad_rows(rows(), PAD)
    other = batch["labels"].where(batch["labels"] < 0, 4 + (batch["labels"] + 1) % (V - 4))
    assert not torch.equal(other, batch["labels"])
    assert torch.equal(logits_of(model, batch, batch["labels"]), logits_of(model, batch, other))
    read, real = model.places(batch["input_ids"], batch["attention_mask"], torch.tensor([5, 4, 2]), 5)
    changed = read.clone()
    changed[0, 4] = 4 + (read[0, 4] + 1 - 4) % (V - 4)
    sources = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        apart = (model(*sources, read, real).logits - model(*sources, changed, real).logits).abs().amax(-1)  # [B, T]
    assert (apart[0] > 1e-6).all(), "every place of the row sees its last one"
    assert (apart[1:] == 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_later_places_are_told_apart_by_where_they_are(family):
    """In T5 with a decoder's buckets of distances, all later places would be at one distance."""
    model = made(family)
    batch = system.pad_rows(rows(1), PAD)
    sources = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        first = [model(*sources, torch.tensor([ids]), torch.ones(1, 3)).logits[0, 0] for ids in ([6, 4, 5], [6, 5, 4])]
    assert (first[0] - first[1]).abs().max() > 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["ce", "matches(2) + bag(1)", "0.5*ce + bleu(1,2)"])
def test_a_padded_batch_has_the_loss_of_its_single_rows(family, attention, objective):
    model = made(family, attention).double()
    ng.attach(model, objective)
    counts = torch.tensor([11.0, 3.0])
    whole, gradients = shares_of(model, system.pad_rows(rows(), PAD), counts)
    filled, others = shares_of(model, system.pad_rows(rows(), PAD, Size(5, 9, 7)), counts)
    single = [shares_of(model, system.pad_rows([row], PAD), counts)[0] for row in rows()]
    assert filled.total.item() == pytest.approx(whole.total.item(), rel=1e-6)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-7)
    assert whole.total.item() == pytest.approx(sum(one.total.item() for one in single), rel=1e-6)
    for name, value in whole.parts.items():
        assert value.item() == pytest.approx(sum(one.parts[name].item() for one in single), rel=1e-6), name


def shares_of(model, batch, counts):
    """A batch's share of the loss, and the gradients of all weights that have one."""
    model.zero_grad()
    found = system.shares(model, batch, counts, weight=0.3)
    found.total.backward()
    return found, [weight.grad for weight in model.parameters() if weight.grad is not None]


def test_rows_that_fill_a_batch_up_are_never_hidden_or_read_as_labels():
    model = made(inputs="random").train()
    ng.attach(model, "ce")
    found, gradients = shares_of(model, system.pad_rows(rows(), PAD, Size(4, 9, 7)), torch.tensor([11.0, 3.0]))
    assert found.total.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients)
    blank, gradients = shares_of(model, system.pad_rows([], PAD, Size(2, 9, 7)), torch.tensor([11.0, 3.0]))
    assert blank.total == 0
    assert all((gradient == 0).all() for gradient in gradients)


def test_the_loss_is_the_objective_and_the_cross_entropy_of_the_length():
    model = made("bart", ratio=0.5, spread=2)
    batch, counts = system.pad_rows(rows(), PAD), torch.tensor([11.0, 3.0])
    ng.attach(model, "ce")
    found = system.shares(model, batch, counts, weight=0.25)
    ng.detach(model)
    read, real = model.places(batch["input_ids"], batch["attention_mask"], torch.tensor([5, 4, 2]), 5)
    logp = model(batch["input_ids"], batch["attention_mask"], read, real).logits.log_softmax(-1)
    ce = -sum(logp[b, t, token] for b, row in enumerate(rows()) for t, token in enumerate(row["labels"])) / 11
    length = 0.0
    for row in rows():
        ids = torch.tensor([row["input_ids"]])
        mean = model.encode(ids, torch.ones_like(ids))[0].mean(0)
        difference = len(row["labels"]) - round(0.5 * (len(row["input_ids"]) - 2))  # 5−3, 4−2 (1.5 rounds to 2), 2−2
        length -= model.length(mean).log_softmax(-1)[min(2, max(-2, difference)) + 2] / 3
    assert found.parts["ce"].item() == pytest.approx(ce.item(), rel=1e-5)
    assert found.parts["length"].item() == pytest.approx(length.item(), rel=1e-5)
    assert found.total.item() == pytest.approx((ce + 0.25 * length).item(), rel=1e-5)


# What it reads


@pytest.mark.parametrize(("n", "S"), [(5, 6), (6, 5), (1, 4), (9, 2), (4, 4)])
def test_places_read_a_uniform_copy_of_the_source_without_special_tokens(n, S):
    model = made()
    source = list(range(4, 4 + S))
    ids = torch.tensor([[0, *source, EOS, PAD, PAD]])
    read, real = model.places(ids, (ids != PAD).long(), torch.tensor([n]), n + 2)
    assert read.tolist() == [[source[math.floor(k * S / n)] for k in range(n)] + [PAD, PAD]]
    assert real.tolist() == [[True] * n + [False] * 2]


def test_with_masks_no_place_reads_the_source():
    model = made(inputs="mask")
    read, _ = model.places(torch.tensor([[0, 5, 6, EOS]]), torch.ones(1, 4), torch.tensor([2]), 3)
    assert read.tolist() == [[MASK, MASK, PAD]]


def test_random_inputs_hide_any_number_of_places_and_score_only_those(monkeypatch):
    lengths = torch.tensor([4, 1, 3]).repeat(2000)
    real = torch.arange(4) < lengths.unsqueeze(1)
    torch.manual_seed(0)
    hidden = system.drawn(lengths, real)
    assert not (hidden & ~real).any()
    counts = hidden.sum(1)
    for n in (4, 1, 3):
        shares = counts[lengths == n].bincount(minlength=n + 1) / 2000
        assert shares.tolist() == pytest.approx([0, *[1 / n] * n], abs=0.04)
    assert (hidden[lengths == 4].float().mean(0) - 2.5 / 4).abs().max() < 0.04, "every place as often"
    model, seen = made(inputs="random").train(), {}

    def spy(model, inputs, counts, whole=ng.attached_share):
        seen.update(inputs)
        return whole(model, inputs, counts)

    monkeypatch.setattr(ng, "attached_share", spy, raising=False)
    ng.attach(model, "ce")
    batch = system.pad_rows(rows(), PAD)
    system.shares(model, batch, torch.tensor([11.0, 3.0]), weight=0.1)
    scored = seen["labels"] != ng.IGNORE_INDEX
    assert scored.any(1).all()
    assert (seen["decoder_input_ids"][scored] == MASK).all()
    known = (batch["labels"] != ng.IGNORE_INDEX) & ~scored
    assert torch.equal(seen["decoder_input_ids"][known], batch["labels"][known])
    model.eval()
    system.shares(model, batch, torch.tensor([11.0, 3.0]), weight=0.1)
    assert torch.equal(seen["labels"], batch["labels"]), "in a validation all places are hidden"


# How it writes


def slow_texts(model, source, lengths, passes):
    """The texts of one source for these lengths, and their scores, in the dumbest Python, one place after the other."""
    ids = torch.tensor([source])
    mask, found = torch.ones_like(ids), []
    for n in lengths:
        bare = source[1:-1]
        read = [bare[k * len(bare) // n] for k in range(n)] if model.config.inputs == "copy" else [MASK] * n
        tokens, logp, places = [0] * n, [0.0] * n, range(n)
        for done in range(passes):
            with torch.no_grad():
                logits = model(ids, mask, torch.tensor([read]), torch.ones(1, n)).logits[0]
            for place in places:
                row = logits[place].log_softmax(-1).tolist()
                allowed = [token for token in range(V) if token not in model.config.banned]
                tokens[place] = max(allowed, key=lambda token: row[token])
                logp[place] = row[tokens[place]]
            places = sorted(range(n), key=lambda place: logp[place])[: math.floor(n * (1 - (done + 1) / passes))]
            read = [MASK if place in places else token for place, token in enumerate(tokens)]
        found.append((tokens, sum(logp) / n))
    return sorted(found, key=lambda text: -text[1])


def slow_lengths(model, source, count, most):
    ids = torch.tensor([source])
    with torch.no_grad():
        logits = model.length(model.encode(ids, torch.ones_like(ids))[0].mean(0)).tolist()
    spread = model.config.spread
    usual = round(model.config.ratio * (len(source) - 2))
    known = [(-logits[d + spread], usual + d) for d in range(-spread, spread + 1) if 1 <= usual + d <= most]
    return [min(most, max(1, n + model.length_offset)) for _, n in sorted(known)[:count]]


@pytest.mark.parametrize(
    ("family", "inputs", "passes", "offset"),
    [
        *((family, "copy", 1, 2 * (family == "bart")) for family in FAMILIES),
        *((family, "random", 3, -1) for family in FAMILIES if family != "t5"),
    ],
)
@pytest.mark.parametrize("blocks", [2**28, 1])
def test_texts_are_those_of_plain_python_whatever_the_batch(monkeypatch, family, inputs, passes, offset, blocks):
    monkeypatch.setattr(parallel_model, "MOST_LOGITS", blocks)
    model = made(family, inputs=inputs, most=7)
    model.lengths, model.passes, model.length_offset = 3, passes, offset
    batch = system.pad_rows(rows(), PAD)
    for count in (1, 3):
        found = model.write(batch["input_ids"], batch["attention_mask"], count=count)
        for row, texts in zip(rows(), found, strict=True):
            expected = slow_texts(model, row["input_ids"], slow_lengths(model, row["input_ids"], 3, 7), passes)[:count]
            assert [text.tokens for text in texts] == [tokens for tokens, _ in expected]
            assert [text.score for text in texts] == pytest.approx([score for _, score in expected], abs=1e-4)


@pytest.mark.parametrize("remove", [True, False])
def test_generate_returns_rows_from_the_start_to_the_end_token_and_removes_repeats(remove):
    model = made(inputs="mask", most=9, ratio=1.5)
    with torch.no_grad():
        model.base.final_logits_bias[0, 7] += 60  # so that it repeats itself
    model.remove_repeats = remove
    batch = system.pad_rows(rows(), PAD)
    found = model.generate(batch["input_ids"], batch["attention_mask"], num_return_sequences=2).tolist()
    texts = [
        text.tokens for texts in model.write(batch["input_ids"], batch["attention_mask"], count=2) for text in texts
    ]
    assert any(one == other for text in texts for one, other in pairwise(text))
    for row, text in zip(found, texts, strict=True):
        kept = [token for place, token in enumerate(text) if not (remove and place and token == text[place - 1])]
        assert row == [model.config.decoder_start_token_id, *kept, EOS] + [PAD] * (len(row) - len(kept) - 2)


def test_a_text_is_never_longer_than_is_allowed():
    model = made(inputs="mask", most=6, ratio=3.0)
    batch = system.pad_rows(rows(), PAD)
    for most, longest in ((None, 6), (20, 6), (5, 3), (1, 1)):
        texts = model.generate(batch["input_ids"], batch["attention_mask"], max_length=most)
        assert texts.shape[1] <= longest + 2
    assert len(model.write(batch["input_ids"], batch["attention_mask"])[0][0].tokens) == 6


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"num_beams": 4}, "has no beams and no samples"),
        ({"do_sample": True}, "has no beams and no samples"),
        ({"max_new_tokens": 5}, "does not read max_new_tokens"),
        ({"temperature": 0.5}, "does not read temperature"),
        ({"logits_processor": [1]}, "does not read logits_processor"),
        ({"num_return_sequences": 8}, "8 texts were asked for, and the length head knows 7 lengths"),
    ],
)
def test_other_searches_are_refused(asked, sentence):
    with pytest.raises(UserError, match=sentence):
        made().generate(torch.tensor([[0, 5, EOS]]), **asked)


def test_the_lowest_values_are_the_first_of_equal_ones():
    values = torch.tensor([[2.0, 1.0, 1.0, 1.0], [0.0, 3.0, -1.0, 5.0]])
    assert lowest(values, torch.tensor([2, 0])).tolist() == [[False, True, True, False], [False] * 4]


# Loading


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_is_the_same_and_no_other_program_takes_it_for_its_base(family, tmp_path):
    base = tiny(family)
    base.config.dtype = torch.bfloat16  # as of most published models, whatever they are loaded in
    for name, weight in base.named_parameters():
        if family == "marian" and name.endswith("embed_positions.weight"):  # fixed, so they are not saved
            weight.data = base.get_submodule(name.removesuffix(".weight")).create_weight()
    model = made(family, base=base, inputs="copy" if family == "t5" else "random")
    model.save_pretrained(tmp_path)
    again = load_parallel(str(tmp_path)).eval()
    batch = system.pad_rows(rows(), PAD)
    sources = batch["input_ids"], batch["attention_mask"]
    places = model.places(*sources, torch.tensor([5, 4, 2]), 5)
    assert torch.equal(again(*sources, *places).logits, model(*sources, *places).logits)
    assert {weight.dtype for weight in again.parameters()} == {torch.float32}
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    for name in ("inputs", "ratio", "spread", "most", "around", "mask", "banned", "decoder_start_token_id"):
        assert getattr(again.config, name) == getattr(model.config, name)
    with pytest.raises(UserError, match="is a parallel model, which predicts all tokens at once"):
        ng.loading.load_config(ng.recipe.Model(name=str(tmp_path)))


def test_models_whose_places_cannot_see_each_other_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"prophetnet .*cannot run in parallel"):
        made("prophetnet", attention="eager")
    with pytest.raises(UserError, match=r"knows only distances between places.* Use inputs=copy, not inputs=mask"):
        made("t5", inputs="mask")
    causal = torch.ones(3, 3).tril()[None, None].bool()
    monkeypatch.setattr(parallel_model.ParallelModel, "_seen", lambda model, real: causal & real[:, None, None].bool())
    with pytest.raises(UserError, match="does not see later places"):
        made("bart")
    monkeypatch.setattr(parallel_model.ParallelModel, "_seen", lambda model, real: torch.ones(1, 1, 3, 3).bool())
    with pytest.raises(UserError, match="reads padding"):
        made("bart")
