"""Packed rows under a model: whatever a trainer passes, each document counts as a text of its own."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from models import V, tiny
from packed_documents import LENGTHS, OBJECTIVE, agree, documents_of, expected, positions, rows
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import ngramloss as ng
from ngramloss.loss.stats import IGNORE_INDEX
from ngramloss.models.attached.attach import aligned_packing


def numbers(lengths=LENGTHS):
    """The number of each token's document, from 1."""
    return torch.stack([torch.cat([torch.full((n,), i + 1) for i, n in enumerate(row)]) for row in lengths])


def one_row(lengths=LENGTHS):
    return [[length for row in lengths for length in row]]


def flat(lengths=LENGTHS):
    return torch.tensor(one_row(lengths)[0])


KEYS = {
    "position_ids": lambda: {"position_ids": positions(one_row())},
    "cu_seq_lens_q": lambda: {"cu_seq_lens_q": torch.cat([torch.zeros(1), flat().cumsum(0)]).int()},
    "packed_seq_lengths": lambda: {"packed_seq_lengths": flat().int()},
    "seq_idx": lambda: {"seq_idx": numbers(one_row()).int()},
    "attention_mask": lambda: {"attention_mask": numbers(one_row())},
    "segments": lambda: {"segments": numbers(one_row())},
    # axolotl's squash_position_ids: positions go up through the whole row, and only the mask tells
    "squashed": lambda: {"position_ids": torch.arange(30)[None], "attention_mask": numbers(one_row())},
    "positions and a mask": lambda: {"position_ids": positions(one_row()), "attention_mask": torch.ones(1, 30).long()},
}


@pytest.mark.parametrize("masked", [True, False], ids=["boundaries masked", "labels on boundaries"])
@pytest.mark.parametrize("key", KEYS)
def test_every_key_that_tells_documents_apart_is_read(key, masked):
    ids, labels = (x.view(1, -1) for x in rows())
    labels = labels.clone()
    if masked:
        labels[positions(one_row()) == 0] = -100
    inputs = {"input_ids": ids, **KEYS[key]()}
    seen = {name: value for name, value in inputs.items() if name != "segments"}
    logits = tiny("llama")(**seen, use_cache=False).logits.detach()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    loss = model(**inputs, labels=labels).loss
    agree(model, loss, expected(logits, labels, documents_of(one_row())))


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
@pytest.mark.parametrize("key", ["position_ids", "attention_mask", "seq_idx", "segments"])
def test_several_rows_have_several_documents_each(family, key):
    ids, labels = rows()
    given = {"position_ids": positions(), "attention_mask": numbers(), "seq_idx": numbers(), "segments": numbers()}[key]
    inputs = {"input_ids": ids, key: given}
    seen = {name: value for name, value in inputs.items() if name != "segments"}
    logits = tiny(family)(**seen, use_cache=False).logits.detach()
    model = ng.attach(tiny(family), OBJECTIVE)
    loss = model(**inputs, labels=labels).loss
    agree(model, loss, expected(logits, labels, documents_of()))


def test_the_gradient_of_packed_rows_is_that_of_the_documents_apart():
    """With positions that begin anew, attention stays within a document, so that the model computes the same apart."""
    ids, labels = rows()
    labels[positions() == 0] = -100
    packed, apart = ng.attach(tiny("llama"), OBJECTIVE), ng.attach(tiny("llama"), OBJECTIVE)
    packed(input_ids=ids, labels=labels, position_ids=positions()).loss.backward()
    counts = {"num_tokens": (labels != -100).sum(), "num_sequences": 0}
    texts = [(ids[r, a:b][None], labels[r, a:b][None]) for r, a, b in documents_of()]
    counts["num_sequences"] = sum(bool((own != -100).any()) for _, own in texts)
    for tokens, own in texts:
        apart(input_ids=tokens, labels=own, **counts).loss.backward()
    for one, other in zip(packed.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.filterwarnings("error")
def test_a_packed_row_has_the_terms_of_its_documents_apart(attention, training):
    """Also where the model would have a cache by itself, and transformers then not look at the positions."""
    model, ids = ng.attach(tiny("llama"), OBJECTIVE).train(training), rows()[0]
    model.set_attn_implementation(attention)
    assert model.config.use_cache
    documents = [ids[r, a:b].tolist() for r, a, b in documents_of()]
    model(**DataCollatorWithFlattening()([{"input_ids": row, "labels": row} for row in documents]))
    found = {name: value.item() for name, value in ng.last_parts(model).items()}
    assert found == pytest.approx(terms_apart(documents), abs=1e-5)


@pytest.mark.parametrize("way", ["attach", "compute_loss_func"])
@pytest.mark.parametrize(
    ("given", "mixes"),
    [
        ({"position_ids": positions()}, False),
        ({"position_ids": positions(), "attention_mask": torch.zeros(2, 1, 15, 15)}, False),
        ({"position_ids": torch.arange(15)[None], "attention_mask": torch.ones(2, 15).long()}, False),
        ({"position_ids": positions(), "attention_mask": torch.ones(2, 15).long()}, True),
        ({"position_ids": positions(), "use_cache": True}, True),
        ({"attention_mask": numbers()}, True),
        ({"seq_idx": numbers()}, True),
    ],
)
def test_a_model_that_mixes_documents_is_warned_about_once(way, given, mixes):
    (ids, labels), model = rows(), tiny("llama")
    function = None if way == "attach" else ng.compute_loss_func(OBJECTIVE, model=model)
    if function is None:
        ng.attach(model, OBJECTIVE)
    given = {"input_ids": ids, "use_cache": False, **given}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            function(model(**given), labels) if function else model(**given, labels=labels)
    said = [warning for warning in caught if "(sdpa) sees all documents of a packed row." in str(warning.message)]
    assert len(said) == mixes


def test_padding_between_and_after_documents_separates_them():
    ids, labels = rows([[4, 3, 5, 2]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0, 2, 2, 2, 2, 2, 0, 0]])
    labels[mask == 0] = -100
    logits = tiny("llama")(input_ids=ids, attention_mask=mask).logits.detach()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    agree(model, loss, expected(logits, labels, [(0, 0, 4), (0, 7, 12)]))


def test_a_hole_in_a_mask_does_not_cut_a_document():
    ids, labels = rows([[6, 4]])
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 2, 2, 2, 2]])
    model = ng.attach(tiny("llama"), OBJECTIVE)
    packed = aligned_packing(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    texts = (packed.labels != IGNORE_INDEX).any(-1).sum()
    assert texts == 2


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.ones(2, 15).long()},
        {"attention_mask": (torch.arange(15) < 12).long().expand(2, -1)},
        {"attention_mask": (torch.arange(15) > 2).long().expand(2, -1)},
        {"attention_mask": torch.zeros(2, 1, 15, 15)},
        {"position_ids": torch.arange(15)[None]},
        {"position_ids": torch.arange(15)[None].expand(2, -1) + 3},
        {"segments": torch.full((2, 15), 7)},
        {},
    ],
    ids=[
        "ones",
        "padded",
        "padded on the left",
        "four dimensions",
        "positions",
        "later positions",
        "one segment",
        "nothing",
    ],
)
def test_rows_of_one_document_are_not_unpacked(inputs):
    ids, labels = rows()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    assert aligned_packing(model, {"input_ids": ids, "labels": labels, **inputs}) is None


def test_positions_of_images_do_not_tell_documents_apart():
    ids, labels = rows()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    given = {"input_ids": ids, "labels": labels, "position_ids": positions().expand(3, -1, -1)}
    assert aligned_packing(model, given) is None


def test_the_mask_of_an_encoder_does_not_tell_targets_apart():
    from models import batch

    inputs = batch("bart")
    inputs["attention_mask"] = inputs["attention_mask"].cumsum(-1)
    model = ng.attach(tiny("bart"), OBJECTIVE)
    assert aligned_packing(model, inputs) is None


def test_segments_of_an_encoder_decoder_belong_to_its_labels():
    from models import batch

    inputs = batch("bart", equal=True)
    segments = (torch.arange(9) // 4).expand(3, -1)
    logits = tiny("bart")(**inputs).logits.detach()
    model = ng.attach(tiny("bart"), OBJECTIVE)
    loss = model(**inputs, segments=segments).loss
    wanted = ng.JointLoss(OBJECTIVE)(logits, inputs["labels"], segments=segments)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)


def test_turns_of_a_conversation_are_texts():
    ids, _ = rows([[15]])
    labels = ids.clone()
    labels[0, :3] = labels[0, 7:10] = -100  # two turns of an assistant
    logits = tiny("llama")(input_ids=ids).logits.detach()
    terms = "matches(2) + bag(2)"
    own = torch.full((2, 8), -100)
    own[0, :4], own[1, :5] = labels[0, 3:7], labels[0, 10:15]
    apart = torch.zeros(2, 8, V)
    apart[0, :4], apart[1, :5] = logits[0, 2:6], logits[0, 9:14]
    turns = ng.attach(tiny("llama"), terms, segments="turns")
    torch.testing.assert_close(turns(input_ids=ids, labels=labels).loss, ng.JointLoss(terms)(apart, own))
    document = ng.attach(tiny("llama"), terms)(input_ids=ids, labels=labels).loss
    assert abs(document - turns(input_ids=ids, labels=labels).loss) > 1e-3
    with pytest.raises(ValueError, match="segments must be 'documents' or 'turns', got 'turn'"):
        ng.attach(tiny("llama"), terms, segments="turn")


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (
            {"segments": torch.zeros(2, 14).long()},
            ValueError,
            r"shape of the labels, \[B, T\] = \[2, 15\], got \[2, 14\]",
        ),
        ({"segments": torch.zeros(2, 15)}, TypeError, "segments must be integers.*torch.float32"),
        ({"segments": [[0] * 15] * 2}, TypeError, "segments must be a tensor of integers.*got list"),
        (
            {"segments": torch.zeros(2, 15).long(), "position_ids": positions()},
            ValueError,
            "`segments` and `position_ids` contradict each other: `position_ids` begin a new document inside a text",
        ),
        ({"position_ids": torch.arange(14)[None]}, ValueError, r"`position_ids` of shape \[1, 14\] does not fit"),
        ({"cu_seq_lens_q": torch.tensor([0, 9, 30])}, ValueError, "count the tokens of one row, and the labels have 2"),
    ],
)
def test_segments_that_do_not_fit_are_refused_with_both_named(inputs, error, message):
    ids, labels = rows()
    with pytest.raises(error, match=message):
        ng.attach(tiny("llama"), OBJECTIVE)(input_ids=ids, labels=labels, **inputs)


def test_segments_that_begin_a_token_after_the_documents_are_refused():
    ids, labels = rows()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    with pytest.raises(ValueError, match="contradict each other"):
        model(input_ids=ids, labels=labels, segments=numbers().roll(1, -1), position_ids=positions())


def test_segments_may_be_parts_of_documents():
    ids, labels = rows()
    finer = numbers() * 2 + (positions() > 2)
    model = ng.attach(tiny("llama"), OBJECTIVE)
    assert (
        aligned_packing(model, {"input_ids": ids, "labels": labels, "segments": finer, "position_ids": positions()})
        is not None
    )


def test_terms_that_are_sums_over_positions_need_no_segments():
    ids, labels = rows()
    model = ng.attach(tiny("llama"), "ce + dft")
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions()}
    assert aligned_packing(model, inputs) is None
    torch.testing.assert_close(
        ng.attach(tiny("llama"), "ce")(**inputs).loss,
        tiny("llama")(**inputs, use_cache=False).loss,
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.slow
def test_a_compiled_model_finds_packed_rows():
    ids, labels = rows()
    inputs = {"input_ids": ids, "labels": labels, "position_ids": positions()}
    loss = ng.attach(tiny("llama"), OBJECTIVE)(**inputs).loss
    compiled = torch.compile(ng.attach(tiny("llama"), OBJECTIVE), backend="aot_eager")
    torch.testing.assert_close(compiled(**inputs).loss, loss, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_mask_with_numbers_is_refused_in_compiled_code_that_cannot_read_it():
    ids, labels = rows()
    compiled = torch.compile(ng.attach(tiny("llama"), OBJECTIVE), backend="eager")
    with pytest.raises(RuntimeError, match="attention_mask has numbers of documents above 1"):
        compiled(input_ids=ids, labels=labels, attention_mask=numbers())


# Trainers


class Documents:
    """Documents of several lengths, as ids and labels."""

    def __init__(self, count=13, seed=0):
        generator = np.random.default_rng(seed)
        self.rows = [generator.integers(4, 9, generator.integers(2, 11)).tolist() for _ in range(count)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, row):
        return {"input_ids": self.rows[row], "labels": self.rows[row]}


def arguments(folder, **settings):
    return TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        max_steps=2,
        learning_rate=0.0,
        logging_steps=1,
        per_device_eval_batch_size=4,
        remove_unused_columns=False,
        disable_tqdm=True,
        seed=3,
        **{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2, **settings},
    )


def terms_apart(documents, objective=OBJECTIVE):
    """The terms of a data set, each document in a row of its own."""
    model = ng.attach(tiny("llama"), objective).eval()
    whole = [torch.tensor(row) for row in documents]
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=1)
    labels = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True, padding_value=-100)
    with torch.no_grad():
        model(input_ids=ids, labels=labels, attention_mask=(labels >= 0).long())
    return {name: value.item() for name, value in ng.last_parts(model).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{}, {"return_seq_idx": True, "return_flash_attn_kwargs": True}], ids=["positions", "all"]
)
def test_ngram_trainer_counts_and_scores_documents_of_flattened_batches(tmp_path, more):
    data = Documents()
    collator = DataCollatorWithFlattening(**more)
    trainer = ng.NgramTrainer(
        tiny("llama"),
        arguments(tmp_path),
        objective=OBJECTIVE,
        train_dataset=data,
        eval_dataset=data,
        data_collator=collator,
    )
    wanted = terms_apart(data.rows)
    metrics = trainer.evaluate()
    for name, value in wanted.items():
        assert metrics[f"eval_{name}"] == pytest.approx(value, abs=1e-5), name
    seen = []
    original = trainer.get_batch_samples

    def watched(*args):
        batches, counts = original(*args)
        seen.append((batches, counts))
        return batches, counts

    trainer.get_batch_samples = watched
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "ce" in entry]
    for entry, (batches, counts) in zip(log, seen, strict=True):
        documents = [
            ids.tolist()
            for batch in batches
            for ids in batch["input_ids"][0].tensor_split((batch["position_ids"][0] == 0).nonzero()[1:, 0])
        ]
        assert len(documents) == 6
        assert counts.tolist() == [sum(len(row) - 1 for row in documents), 6]
        wanted = terms_apart(documents)
        for name, value in wanted.items():
            assert entry[name] == pytest.approx(value, abs=1e-5), name
        assert "matched/2" in entry


@pytest.mark.slow
def test_the_shares_of_a_stock_trainer_count_documents(tmp_path):
    """One micro-batch: its own share of the tokens is all of them, so the loss is exact."""
    data, log = Documents(6), ng.LogParts()
    model = ng.attach(tiny("llama"), OBJECTIVE)
    trainer = Trainer(
        model,
        arguments(tmp_path, per_device_train_batch_size=6, gradient_accumulation_steps=1),
        train_dataset=data,
        eval_dataset=data,
        data_collator=DataCollatorWithFlattening(),
        callbacks=[log],
    )
    with pytest.warns(UserWarning, match="a stock Trainer counts the tokens"):
        trainer.train()
    wanted = terms_apart(data.rows)
    entry = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert {name: entry[name] for name in wanted} == pytest.approx(wanted, abs=1e-5)
    metrics = trainer.evaluate()
    assert {name: metrics[f"eval_{name}"] for name in wanted} == pytest.approx(wanted, abs=1e-5)


def function_trainer(folder, function, model, **settings):
    return Trainer(
        model,
        arguments(folder, per_device_train_batch_size=6, gradient_accumulation_steps=1, **settings),
        train_dataset=Documents(6),
        data_collator=DataCollatorWithFlattening(),
        compute_loss_func=function,
    )


@pytest.mark.slow
def test_compute_loss_func_sees_packed_rows_by_a_hook_on_the_model(tmp_path):
    model = tiny("llama")
    function = ng.compute_loss_func(OBJECTIVE, model=model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="compute_loss_func sees")
        warnings.filterwarnings("ignore", message="a stock Trainer")
        trainer = function_trainer(tmp_path, function, model)
        trainer.train()
    wanted = terms_apart(Documents(6).rows)
    total = sum(part.weight * wanted[part.name] for part in ng.JointLoss(OBJECTIVE).parts)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(total, abs=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:compute_loss_func sees", "ignore:a stock Trainer")
def test_log_parts_lets_compute_loss_func_see_packed_rows(tmp_path):
    trainer = function_trainer(tmp_path, ng.compute_loss_func(OBJECTIVE), tiny("llama"))
    trainer.add_callback(ng.LogParts())
    trainer.train()
    wanted = terms_apart(Documents(6).rows)
    assert {name: trainer.state.log_history[0][name] for name in wanted} == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_compute_loss_func_without_a_model_warns_that_it_cannot_see_packed_rows(tmp_path):
    with pytest.warns(UserWarning, match=r"compute_loss_func sees only logits.*model=model"):
        function_trainer(tmp_path, ng.compute_loss_func("ce + matches(2)"), tiny("llama")).train()
    copied = pickle.loads(pickle.dumps(ng.compute_loss_func("ce + matches(2)", model=tiny("llama"))))
    with pytest.warns(UserWarning, match="compute_loss_func sees only logits"):
        function_trainer(tmp_path, copied, tiny("llama")).train()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:compute_loss_func sees")
def test_compute_loss_func_of_sums_over_positions_needs_no_model(tmp_path):
    function_trainer(tmp_path, ng.compute_loss_func("ce + dft"), tiny("llama")).train()


@pytest.mark.slow
def test_compute_loss_func_with_another_model_is_refused(tmp_path):
    function = ng.compute_loss_func("ce + matches(2)", model=tiny("llama"))
    with pytest.raises(ValueError, match="did not make these outputs"):
        function_trainer(tmp_path, function, tiny("llama")).train()


@pytest.mark.slow
def test_label_smoothing_beside_compute_loss_func_is_refused(tmp_path):
    model = tiny("llama")
    function = ng.compute_loss_func("ce + matches(2)", model=model)
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 has no effect.*ce\(smoothing=0.1\)"):
        function_trainer(tmp_path, function, model, label_smoothing_factor=0.1).train()
