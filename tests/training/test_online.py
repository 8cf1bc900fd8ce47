"""Texts that a model writes while it is trained: drawn with its present weights, scored, trained on, continued exactly."""

import dataclasses
import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import models
import numpy as np
import pytest
import torch
from looped import assert_same_log, in_two_processes
from models import TINY_MODEL
from own_texts import OBJECTIVE, Numbers, overlap, trained_online, writing_model, written
from safetensors.torch import load_file
from trainings import assert_same_weights, rows

from ngramloss import METRICS, JointLoss, Metric, Scores, attach, cli, recipe
from ngramloss.data.batches.planned import Epochs, PlannedSteps
from ngramloss.errors import UserError
from ngramloss.loss.stats import CandidateStats
from ngramloss.models.attached.attach import attached_loss
from ngramloss.recipe import Train
from ngramloss.search import decoders
from ngramloss.search.engines import graph, hf
from ngramloss.search.engines.hf import search_of
from ngramloss.search.search import Options
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import checkpoints, online, planning, prepare
from ngramloss.training.identity import _source_mark
from ngramloss.training.objective_task import ObjectiveTask
from ngramloss.training.online import FILE, FreshTexts, writing_copy
from ngramloss.training.processes import Processes, start_processes
from ngramloss.training.run import Needs, in_folder, own_needs, python_run, run_of

FAMILIES = ["bart", "mbart", "t5", "llama", "gpt2"]
HERE = Processes(0, 1, torch.device("cpu"))
LOGGED = ("loss", "ce", "risk(sharpness=1)", "score", "unended", "text_age", "grad_norm")


EVERY_TERM = "ce + policy(baseline=greedy) + credit(1,2) + 0.5*matches(2):student + bag(2):student"


def fresh(family="bart", data=None, seed=3, **settings):
    """A model with its objective, and what it writes."""
    data = rows(9) if data is None else data
    model = attach(writing_model(family), OBJECTIVE).train()
    return FreshTexts(written(data, **settings), model, Numbers(), data, attached_loss(model), seed=seed, here=HERE)


def moved(model):
    """The weights of a model, without those that change nothing, which only rounding moves: a bias of all keys."""
    weights = model if isinstance(model, dict) else model.state_dict()
    return {name: value for name, value in weights.items() if not name.endswith("k_proj.bias")}


def planned(texts, here=HERE, **settings):
    """The steps that train on these texts."""
    given = Train(**{"batch_size": 4, "accumulate": 1} | settings)
    task = ObjectiveTask(texts.model, Numbers(), texts.examples, python_run(OBJECTIVE, given))
    task.here, task.rows = here, texts
    task.joined, task.lengths = planning.layout(task)
    return task.plan()


@pytest.fixture
def compared(monkeypatch):
    """What the terms read of candidates, each time they do."""
    seen = []
    monkeypatch.setattr(
        "ngramloss.models.attached.candidates.CandidateStats",
        lambda *args, **more: seen.append(args) or CandidateStats(*args, **more),
    )
    return seen


def token_logp(texts, row, ids):
    """The log-probability of each token of a text, one text at a time, [T]."""
    model, source = texts.model, texts.examples[row]["input_ids"]
    with torch.no_grad():
        if texts.search.start is None:
            logits = model(input_ids=torch.tensor([source + ids])).logits[:, -len(ids) - 1 : -1]
        else:
            read = torch.tensor([[texts.search.start, *ids[:-1]]])
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits
    return logits.log_softmax(-1).gather(-1, torch.tensor([ids]).unsqueeze(-1))[0, :, 0]


def drawn(texts, numbers=range(9), done=0):
    texts.drawn = {}
    texts._draw(list(numbers), done)
    return {row: each["candidates"] for row, each in texts.drawn.items()}


# What is drawn


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_on_a_gpu_shapes_hold_texts_of_the_greatest_length(family, messages):
    texts = fresh(family)
    gpu = Processes(0, 1, torch.device("cuda"))  # where nothing runs: plans are made on the host
    grid = planned(texts, gpu, max_tokens=4096).plan.grid
    assert grid.targets[-1] >= texts.search.max_length - 1
    assert grid.sources[-1] >= max(len(row["input_ids"]) for row in texts.examples)
    assert "a step of 4 sequences is up to 1 micro-batch of up to " in messages[-1]


def test_micro_batches_are_as_long_as_what_was_drawn():
    """A plan begins with the greatest length; the lengths of the drawn texts cut the steps."""
    texts = fresh(data=rows(22), samples=2, max_length=40)
    steps = planned(texts, batch_size=8, epochs=1)
    assert steps.plan.targets.min() == 39
    seen = 0
    for step in texts.steps(steps, 0):
        (batch,) = step.batches
        numbers = steps.epochs[0][step.number - 1]
        own = [texts.drawn[row] for row in numbers]
        longest = max(len(ids) for each in own for ids in each["candidates"])
        assert batch["candidates"].shape[-1] == max(longest, batch["labels"].shape[-1])
        for row, each in zip(numbers, own, strict=True):
            lengths = [len(texts.examples[row]["labels"]), *map(len, each["candidates"])]
            assert steps.plan.targets[row] == max(lengths)
        seen += 1
    assert seen == 3


@pytest.mark.parametrize("engine", ["hf", "graph"])
@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_a_model_trained_in_16_bits_writes_in_16_bits_with_its_present_weights(family, engine):
    model = writing_model(family)
    copied = writing_copy(model, "bf16")
    data = rows(9)
    attach(model, OBJECTIVE).train()
    given = written(data, engine=engine, samples=4), model, Numbers(), data, attached_loss(model)
    texts = FreshTexts(*given, seed=3, here=HERE, copied=copied)
    assert (texts.sampler.engine.name, texts.sampler.engine.precision) == (engine, "bf16")
    before = drawn(texts)
    assert drawn(texts) == before
    with torch.no_grad():
        model.get_output_embeddings().weight.neg_()
    assert drawn(texts) != before
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for own, copy in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(own.to(torch.bfloat16), copy)


def test_a_model_writes_by_itself_where_it_is_trained_in_its_own_precision():
    assert writing_copy(writing_model(), "fp32") is None
    assert writing_copy(writing_model(), "fp16") is None  # a copy could overflow where training does not
    assert writing_copy(writing_model().to(torch.bfloat16), "bf16") is None


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_training_in_16_bits_continues_with_the_same_bits(tmp_path, family):
    settings = {"family": family, "online": {"refresh": 2}, "precision": "bf16", "epochs": 2.0}
    whole = trained_online(tmp_path / "whole", save_every=1, keep=9, **settings)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for step in range(4, 7):
        shutil.rmtree(tmp_path / "cut" / f"checkpoint-{step}")
    again = trained_online(tmp_path / "cut", save_every=1, keep=9, **settings)
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained_on_is_what_was_drawn_with_its_log_probability(family, compared):
    """Candidates of a batch have the log-probabilities that the model gives the drawn ids, one text at a time."""
    texts = fresh(family, samples=2, max_length=7)
    model, data = texts.model, texts.examples
    own = drawn(texts)
    search, engine = texts.sampler.search, texts.sampler.engine
    seeds = [int.from_bytes(hashlib.sha256(f"3 0 {row}".encode()).digest()[:4], "big") for row in range(len(data))]
    raw = engine.write([row["input_ids"] for row in data], seeds=seeds)
    forced = [ids[-1:] if search.last is not None and len(ids) == 7 else [] for group in raw for ids in group]
    assert [ids for group in own.values() for ids in group] == [
        ids[1 : len(ids) - len(last)] for ids, last in zip([ids for group in raw for ids in group], forced, strict=True)
    ]
    numbers = [2, 5, 7]
    (batch,) = planned(texts).step(numbers).batches
    model.eval()(**batch)
    logp, lengths, scores = compared[0][:3]
    expected = [token_logp(texts, row, ids).sum() for row in numbers for ids in own[row]]
    torch.testing.assert_close(logp.flatten(), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert lengths.flatten().tolist() == [len(ids) for row in numbers for ids in own[row]]
    assert scores.flatten().tolist() == pytest.approx(
        np.array(
            overlap(data)(numbers, [Numbers().batch_decode(own[row], skip_special_tokens=True) for row in numbers])
        ).ravel()
    )


@pytest.mark.parametrize("engine", ["hf", "graph"])
@pytest.mark.parametrize("family", ["bart", "t5", "llama"])
def test_a_changed_weight_changes_the_next_text_and_an_unchanged_one_does_not(family, engine):
    texts = fresh(family, engine=engine, samples=4)
    assert texts.sampler.engine.name == engine
    before = drawn(texts)
    assert drawn(texts) == before
    with torch.no_grad():
        texts.model.get_output_embeddings().weight.neg_()
    assert drawn(texts) != before
    assert texts.model.training


def test_a_text_depends_on_seed_step_and_source_and_not_on_the_batch():
    texts = fresh(samples=4)
    before = drawn(texts)
    assert drawn(texts, [4]) == {4: before[4]}
    assert drawn(texts, done=1) != before
    assert drawn(fresh(samples=4, seed=4)) != before
    assert drawn(fresh(samples=4, engine="graph")) == before


@pytest.mark.parametrize("engine", ["hf", "graph"])
def test_equal_sources_of_a_refresh_have_different_samples(engine):
    """As the empty prompts of a language model that learns to write freely."""
    data = [{**row, "input_ids": rows(1)[0]["input_ids"]} for row in rows(9)]
    found = drawn(fresh(data=data, samples=2, engine=engine))
    assert len({str(texts) for texts in found.values()}) == 9


def test_drawing_changes_no_random_number_and_no_mode():
    texts = fresh()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    drawn(texts)
    assert torch.equal(torch.rand(3), expected)


def test_texts_are_written_without_dropout():
    texts = fresh(engine="graph")
    before = drawn(texts)
    for part in texts.model.modules():
        if isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.9
    assert drawn(texts) == before


def test_a_kept_search_reads_the_present_weights_where_it_has_copies():
    """On a GPU searches are kept, and the head is a copy with more rows: here both are made by hand."""
    model = models.tiny("t5").eval()
    search = search_of(model, None, Options(3, True, seed=1), max_new_tokens=8)
    live = decoders.padded_head(model)
    copy = live._replace(weight=live.weight.detach().clone())
    kept = graph.Searcher(model, search, 4, 6, head=copy)
    sources = [[5, 6, 7, 2], [9, 2], [4, 8, 2], [7, 7, 2]]

    def texts():
        copy.refresh(model)
        return graph.found(lambda count: kept, sources)

    before = texts()
    assert texts() == before
    table = model.get_decoder().block[0].layer[0].SelfAttention.relative_attention_bias.weight
    for weight in (table, model.get_output_embeddings().weight):
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)), alpha=3)
        new = graph.found(lambda count: graph.Searcher(model, search, count, 6), sources)
        assert texts() == new != before
        before = new


def test_a_bias_of_the_head_that_is_0_at_first_is_read_when_it_is_trained():
    model = models.tiny("phi").eval()  # its head has a bias
    bias = model.get_output_embeddings().bias
    with torch.no_grad():
        bias.zero_()
    search = search_of(model, None, Options(beams=1), max_new_tokens=6)
    write = graph.load(model, search, precision="fp32")
    with torch.no_grad():
        bias[7] = 1e4
    assert write([[5, 6]]) == hf.load(model, search, precision="fp32")([[5, 6]]) == [[[6, *[7] * 6]]]


@pytest.mark.parametrize("family", ["bart", "mbart"])
def test_a_forced_first_token_is_read_and_does_not_count(family, compared):
    model = writing_model(family)
    model.generation_config.forced_bos_token_id = 9
    attach(model, OBJECTIVE).eval()
    data = rows(9)
    given = written(data, samples=2, max_length=7), model, Numbers(), data, attached_loss(model)
    texts = FreshTexts(*given, seed=3, here=HERE)
    own = drawn(texts)
    assert {ids[0] for group in own.values() for ids in group} == {9}
    numbers = [2, 5, 7]
    (batch,) = planned(texts).step(numbers).batches
    assert (batch["candidate_inputs"][..., 1] == 9).all()
    model(**batch)
    logp, lengths = compared[0][:2]
    expected = [token_logp(texts, row, ids)[1:].sum() for row in numbers for ids in own[row]]
    torch.testing.assert_close(logp.flatten(), torch.stack(expected), atol=1e-4, rtol=1e-4)
    assert lengths.flatten().tolist() == [len(ids) - 1 for row in numbers for ids in own[row]]


def test_a_forced_end_was_not_drawn():
    assert online._without_start([3, 5, 6, 2], search_with(max_length=4, last=2)) == ([5, 6], False)
    assert online._without_start([3, 5, 2], search_with(max_length=4, last=2)) == ([5, 2], True)
    assert online._without_start([3, 5, 6, 7], search_with(max_length=4, last=None)) == ([5, 6, 7], False)
    assert online._without_start([2], search_with(max_length=4, last=None)) == ([], False)


def search_with(**changes):
    return dataclasses.replace(search_of(models.tiny("bart")), ends=(2,), **changes)


def test_texts_are_those_of_the_model_alone_whatever_the_recipe_forbids():
    """Rules of the search would make texts improbable to the model that is trained on them."""
    model = writing_model()
    model.generation_config.update(no_repeat_ngram_size=2, min_length=5, num_beams=4)
    own = written(rows(9))._replace(generation=recipe.Generation(max_length=8, min_length=5, no_repeat_ngram_size=1))
    texts = FreshTexts(own, attach(model, OBJECTIVE), Numbers(), rows(9), JointLoss(OBJECTIVE), seed=3, here=HERE)
    search = texts.sampler.search
    assert (search.min_length, search.no_repeat_ngram_size, search.num_beams, search.max_length) == (0, 0, 1, 8)
    assert drawn(texts) == drawn(fresh())
    model.generation_config.update(min_new_tokens=5, max_new_tokens=6)
    again = FreshTexts(own, model, Numbers(), rows(9), JointLoss(OBJECTIVE), seed=3, here=HERE)
    assert drawn(again) == drawn(texts)


# Steps


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_texts_of_a_refresh_are_written_once_before_its_first_step(family, monkeypatch):
    asked = []
    whole = FreshTexts._draw
    monkeypatch.setattr(
        FreshTexts, "_draw", lambda self, numbers, done: asked.append((done, numbers)) or whole(self, numbers, done)
    )
    got = trained_online(family=family, online={"refresh": 4})
    assert [done for done, _ in asked] == [0, 4]
    assert asked[0][1] == list(range(22)), "an epoch of 22 rows has 3 steps, so a row of the fourth is there twice"
    assert len(asked[1][1]) == 22 - 8
    assert [line["text_age"] for line in got.log] == [0, 1, 2, 3, 0, 1]


def test_a_step_trains_on_texts_of_the_weights_before_it(monkeypatch):
    """With a refresh of 1: the model that writes is the one that the step changes."""
    sums = []
    whole = FreshTexts._draw

    def draw(self, numbers, done):
        sums.append(float(sum(p.detach().double().sum() for p in self.model.parameters())))
        whole(self, numbers, done)

    monkeypatch.setattr(FreshTexts, "_draw", draw)
    trained_online()
    assert len(sums) == len(set(sums)) == 6


def test_the_log_has_scores_ends_and_costs_of_writing():
    got = trained_online(online={"max_length": 3})
    for line in got.log:
        assert 0 <= line["score"] <= 1
        assert 0 < line["unended"] <= 1
        assert 0 < line["writing_share"] <= 1
        assert line["texts_per_second"] > 0
        assert "text_age" not in line, "every text is new"


def test_the_score_of_the_log_is_the_mean_of_the_texts_of_its_steps():
    seen = []

    def scores(numbers, texts):
        seen.append(overlap(rows(22))(numbers, texts))
        return seen[-1]

    got = trained_online(scores=scores, log_every=2, save_every=100)
    means = [np.mean([value for group in found for value in group]) for found in seen]
    counts = [sum(map(len, found)) for found in seen]
    by_line = {line["step"]: line["score"] for line in got.log if "score" in line}
    assert by_line[1] == pytest.approx(means[0])
    assert by_line[4] == pytest.approx(np.average(means[2:4], weights=counts[2:4]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "term", ["risk(sharpness=1)", "policy", "policy(baseline=others,scale=std)", "policy(baseline=greedy)"]
)
def test_learning_from_samples_raises_their_score(term):
    """A reward for one id alone: without cross-entropy, the model learns to write it."""

    def scores(numbers, texts):
        return [[text.split().count("7") / max(len(text.split()), 1) for text in group] for group in texts]

    got = trained_online(
        objective=f"0*ce + {term}", scores=scores, max_steps=60, learning_rate=2e-2, online={"samples": 6}
    )
    assert got.log[0]["score"] < 0.4  # of 48 random texts
    assert np.mean([line["score"] for line in got.log[-5:]]) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("term", ["credit(1)", "bag(1):student", "precision(1):student"])
def test_terms_of_the_own_text_raise_its_overlap_with_the_reference(term):
    """One reference for all sources, so that there is something to learn without cross-entropy."""
    data = [{**row, "labels": rows(1)[0]["labels"]} for row in rows(22)]
    settings = {"max_steps": 60, "learning_rate": 1e-2, "online": {"samples": 6 if "credit" in term else 0}}
    got = trained_online(objective=f"0*ce + {term}", data=data, **settings)
    assert np.mean([line["score"] for line in got.log[-5:]]) > got.log[0]["score"] + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("objective", [OBJECTIVE, EVERY_TERM])
@pytest.mark.parametrize("cut", [{"batch_size": 4, "accumulate": 2}, {"max_tokens": 150}], ids=str)
def test_any_cut_of_a_step_ends_at_the_same_weights(family, objective, cut):
    whole, other = (trained_online(family=family, objective=objective, **more) for more in ({}, cut))
    assert_same_weights(moved(other.model), moved(whole.model), 1e-4)
    assert_same_log(other.log, whole.log, LOGGED, 1e-3)


# The greedy text


def test_only_samples_are_written_if_no_term_reads_more():
    assert own_needs(JointLoss("ce + risk").terms) == Needs(samples=True, greedy_text=False, baseline=False)
    assert own_needs(JointLoss("ce").terms) == Needs(samples=False, greedy_text=False, baseline=False)
    assert own_needs(JointLoss("ce + policy(baseline=greedy)").terms) == Needs(True, False, True)
    assert own_needs(JointLoss("ce + matches(2):student").terms) == Needs(False, True, False)
    assert own_needs(JointLoss(EVERY_TERM).terms) == Needs(True, True, True)
    texts = fresh()
    assert texts.greedy is None
    assert texts.padded["own"] == []


@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize(
    "needs", [Needs(True, True, False), Needs(True, False, True), Needs(True, True, True)], ids=str
)
def test_the_greedy_text_is_the_first_candidate_and_its_score_a_baseline(family, needs, monkeypatch):
    monkeypatch.setattr(online, "own_needs", lambda terms: needs)
    texts = fresh(family, samples=2)
    own = drawn(texts)
    model, data = texts.model, texts.examples
    steps = planned(texts)
    (batch,) = steps.step([1, 2]).batches
    expected = texts.greedy.engine.write([row["input_ids"] for row in data])
    if needs.greedy_text:
        assert [own[row][0] for row in range(9)] == [online._without_start(ids[0], texts.search)[0] for ids in expected]
        assert batch["greedy"].tolist() == [[True, False, False]] * 2
        assert batch["candidates"].shape[:2] == (2, 3)
    else:
        assert "greedy" not in batch
        assert batch["candidates"].shape[:2] == (2, 2)
    samples = [Numbers().batch_decode(own[row][needs.greedy_text :], skip_special_tokens=True) for row in (1, 2)]
    assert batch["scores"][:, int(needs.greedy_text) :].flatten().tolist() == pytest.approx(
        [value for group in overlap(data)([1, 2], samples) for value in group]
    )
    if needs.baseline:
        first = [Numbers().batch_decode([ids[0]], skip_special_tokens=True) for ids in expected]
        scores = overlap(data)(range(9), first)
        assert batch["baseline"].tolist() == pytest.approx([scores[1][0], scores[2][0]])
    seen = []
    monkeypatch.setattr(
        "ngramloss.models.attached.candidates.CandidateStats",
        lambda *args: seen.append(CandidateStats(*args)) or seen[-1],
    )
    model(**batch).loss.backward()
    assert (seen[0].greedy is not None) == needs.greedy_text
    assert (seen[0].baseline is not None) == needs.baseline
    blank = steps.padder([], steps.plan._blank)
    assert set(blank) == set(batch) - {"attention_mask"} | set(blank) & {"attention_mask"}


def test_a_training_may_read_the_greedy_text_alone(monkeypatch):
    monkeypatch.setattr(online, "own_needs", lambda loss: Needs(False, True, False))
    texts = fresh(samples=0)
    assert {len(group) for group in drawn(texts).values()} == {1}


# Remarks


def test_scores_that_are_all_equal_are_said_once(messages):
    trained_online(scores=lambda numbers, texts: [[0.5] * len(group) for group in texts])
    said = [line for line in messages if "have the same score" in line]
    assert said == [
        "warning: all outputs of each source have the same score after 0 steps, so there is nothing to compare: "
        "policy and risk learn nothing from them, and rank and prefer a random order. If this continues, raise "
        "online.temperature or online.samples, or choose another online.metric."
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (lambda group: [float("nan")] * len(group), "the score of a text of row 0 is nan: '"),
        (lambda group: [float("inf")] * len(group), "the score of a text of row 0 is inf: '"),
        (lambda group: [1.0], "lengths differ: row 0 has 3 texts and 1 scores"),
    ],
)
def test_scores_that_no_step_can_train_on_are_refused_and_nothing_is_saved_before_the_first(tmp_path, given, sentence):
    with pytest.raises(UserError, match=sentence):
        trained_online(tmp_path, data=rows(8), scores=lambda numbers, texts: list(map(given, texts)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("objective", "score", "said"),
    [
        ("ce + policy", lambda first: 0.5 * first, True),  # one sample has nothing to be compared with
        ("ce + policy + bag(1):student", lambda first: 0.5 * first, True),  # nor is it with the greedy text
        ("ce + policy(baseline=greedy)", lambda first: 0.5, True),
        ("ce + policy(baseline=greedy)", lambda first: 0.5 * first, False),
        ("ce + credit(1)", lambda first: 0.5, False),  # it reads no scores
    ],
)
def test_one_sample_that_teaches_nothing_is_said(messages, objective, score, said):
    def scores(numbers, texts):
        return [[score(place == 0) for place in range(len(group))] for group in texts]

    got = trained_online(objective=objective, scores=scores, online={"samples": 1}, max_steps=1)
    assert any("have the same score" in line for line in messages) == said
    assert (got.log[0][objective.split(" + ")[1]] == 0) == said


def test_what_the_texts_of_all_processes_show_is_said_and_not_of_one_alone(messages):
    texts = fresh(samples=2)
    texts._draw(list(range(9)), 0)
    for row in texts.drawn.values():
        row.update(scores=[0.5, 0.5], unended=2)
    others = torch.tensor([4.0, 1.0, 8.0, 1.0])  # sources, those whose scores differ, texts, those that ended
    texts.first = 1
    for more, said in ((others, 0), (torch.zeros(4), 2)):
        texts.here = SimpleNamespace(device="cpu", total=lambda own, more=more: own + more)
        before = len(messages)
        texts._remark()
        assert len(messages) - before == said
    assert all(" after 1 step" in line and " after 1 steps" not in line for line in messages[-2:])


@pytest.mark.parametrize("objective", [OBJECTIVE, "ce + policy(baseline=greedy)"])
def test_texts_that_never_end_are_trained_on_and_said_once(messages, objective):
    model = writing_model()
    model.final_logits_bias[0, models.EOS] = -1e4
    got = trained_online(model=model, objective=objective)
    assert [line["unended"] for line in got.log] == [1.0] * 6
    said = [line for line in messages if "ended within" in line]
    assert said == [
        "warning: none of the 24 outputs generated after 0 steps ended within generation.max_length. They are "
        "trained on without an end token, and the log counts them as unended."
    ]


def test_the_beginning_says_what_is_written_and_how_old_it_becomes(messages):
    fresh(refresh=5)
    assert messages[-1] == (
        "every 5 steps the model generates 3 samples for each source, of at most 7 tokens, by engine hf in "
        "fp32. Steps train on outputs that are up to 4 steps old."
    )
    fresh(samples=1)
    assert messages[-1].startswith("at every step the model generates 1 sample for each source, ")


def test_an_engine_that_converts_weights_does_not_write_and_that_is_said(messages):
    texts = fresh(engine="ctranslate2")
    assert texts.sampler.engine.name == "hf"
    assert messages[-1] == "generation.engine = ctranslate2 cannot generate with a model in training."


def test_settings_of_the_model_that_change_its_texts_are_said(messages):
    model = writing_model()
    model.generation_config.repetition_penalty = 1.5
    FreshTexts(written(rows(9)), attach(model, OBJECTIVE), Numbers(), rows(9), JointLoss(OBJECTIVE), seed=3, here=HERE)
    said = "the model's own generation settings also change its outputs: repetition_penalty."
    assert messages[-1] == said
    own, loss_fn = written(rows(9)), JointLoss("ce + policy")
    FreshTexts(own, attach(model, "ce + policy"), Numbers(), rows(9), loss_fn, seed=3, here=HERE)
    assert messages[-1] == f"policy is exact only for samples of the current model, but {said}"


def test_settings_of_the_models_own_sampling_change_no_texts_and_are_not_said_to(messages):
    texts = []
    for settings in ({}, {"min_p": 0.9, "typical_p": 0.1, "epsilon_cutoff": 0.5, "eta_cutoff": 0.5}):
        model = writing_model()
        model.generation_config.update(**settings)
        own = FreshTexts(
            written(rows(9)),
            attach(model, "ce + policy"),
            Numbers(),
            rows(9),
            JointLoss("ce + policy"),
            seed=3,
            here=HERE,
        )
        own._draw([0, 1, 2], 0)
        texts.append(own.drawn)
    assert texts[0] == texts[1]
    assert not [message for message in messages if "generation settings" in message]


def test_what_cannot_be_written_is_refused():
    with pytest.raises(UserError, match=r"own_texts: 'ce' with 3 samples reads no outputs"):
        trained_online(objective="ce")
    with pytest.raises(UserError, match=r"policy compares samples of the model, but online.samples is 0"):
        trained_online(objective="ce + policy + bag(2):student", online={"samples": 0})
    with pytest.raises(UserError, match=r"train.fsdp shards the weights, so the model cannot generate during training"):
        trained_online(fsdp=True)
    with_candidates = [{**row, "candidates": [[5]], "scores": [0.5]} for row in rows(22)]
    with pytest.raises(UserError, match="rows have several turns or candidates"):
        trained_online(data=with_candidates)


# Continuing


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "objective"), [(0.0, OBJECTIVE), (0.3, OBJECTIVE), (0.3, EVERY_TERM)])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_training_continues_between_two_refreshes_with_the_same_bits(tmp_path, family, dropout, objective):
    def model():
        made = writing_model(family)
        for part in made.modules():
            if isinstance(getattr(part, "dropout", None), float):
                part.dropout = dropout
        return made

    settings = {"model": None, "data": rows(30), "online": {"refresh": 3}, "clip": 0.5, "epochs": 2.0}
    settings["objective"] = objective
    whole = trained_online(tmp_path / "whole", **settings | {"model": model()})
    for step in (2, 3, 4):
        folder = tmp_path / str(step)
        folder.mkdir()
        moved = (tmp_path / "whole" / f"checkpoint-{step}").rename(folder / f"checkpoint-{step}")
        assert (moved / FILE).exists() == (step != 3), "at a refresh, nothing waits"
        again = trained_online(folder, **settings | {"model": model()})
        assert again.outcome[:4] == (8, 8, True, step)
        assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)
        assert_same_log(again.log, whole.log[step:], LOGGED, 0)


def test_a_checkpoint_without_the_texts_that_wait_is_damaged_and_an_earlier_one_continues(tmp_path):
    whole = trained_online(tmp_path, online={"refresh": 4})
    for step in (3, 4, 5, 6):
        shutil.rmtree(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-2" / FILE).unlink()
    again = trained_online(tmp_path, online={"refresh": 4})
    assert again.outcome.continued_from == 1
    assert_same_weights(again.model.state_dict(), whole.model.state_dict(), 0)


def test_waiting_texts_that_this_training_cannot_have_written_are_refused(tmp_path):
    texts = fresh(samples=2, refresh=2)
    texts._draw([0, 1], 0)
    (tmp_path / FILE).write_text(texts.saved(1)[FILE])
    texts.restore(tmp_path)
    good = json.loads(texts.saved(1)[FILE])
    row = good["rows"]["0"]
    wrong = [
        {"first": "x"},
        {"rows": [row]},
        {"rows": {"x": row}},
        {"rows": {"99": row}},
        *(
            {"rows": {"0": row | {"candidates": value}}}
            for value in (None, [[1]], [[1], ["x"]], [[1], [9999]], [[1], [-1]])
        ),
        {"rows": {"0": row | {"candidates": [[1], [1] * 99]}}},
        *({"rows": {"0": row | {"scores": value}}} for value in ("x", [1.0], [1.0, None], [1.0, 1e999])),
        {"rows": {"0": row | {"unended": None}}},
        {"rows": {"0": row | {"baseline": 1.0}}},
    ]
    for change in wrong:
        (tmp_path / FILE).write_text(json.dumps(good | change))
        with pytest.raises(UserError, match=r"online\.json.*Delete the checkpoint"):
            texts.restore(tmp_path)


def test_a_longer_training_continues_one_that_ended_between_two_refreshes(tmp_path):
    trained_online(tmp_path, online={"refresh": 4}, max_steps=2)
    again = trained_online(tmp_path, online={"refresh": 4}, max_steps=6)
    assert again.outcome[:4] == (6, 6, True, 2)
    assert [line["text_age"] for line in again.log] == [0, 1, 0, 1], "what was not written yet is written now"


def test_what_waits_is_no_part_of_the_model(tmp_path):
    trained_online(tmp_path, online={"refresh": 4}, max_steps=2)
    (tmp_path / "model").mkdir()
    checkpoints.copy_model(tmp_path / "checkpoint-2", tmp_path / "model")
    assert FILE not in {path.name for path in (tmp_path / "model").iterdir()}


PROCESS = SimpleNamespace(fails_at=0)
"""The call at which a metric fails in this process; 0 for none."""


def overlap_or_error(data):
    """The overlap with the references, which fails at a call in one process."""
    score, calls = overlap(data), []

    def scores(numbers, texts):
        calls.append(numbers)
        if len(calls) == PROCESS.fails_at:
            raise ValueError("no verb")
        return score(numbers, texts)

    return scores


def work(folder, fails_after=None, **changes):
    """What one process of two does: train, and save the log in the first, or an error of the second's metric."""
    rank = start_processes().rank
    PROCESS.fails_at = fails_after if rank == 1 else 0
    try:
        scores = overlap_or_error(changes["data"])
        found = trained_online(Path(folder) / "checkpoints", scores=scores, **changes).log
    except (UserError, ValueError) as mistake:
        found = str(mistake)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_two_processes_end_at_the_weights_of_one_and_continue_in_one(tmp_path, family):
    settings = {"family": family, "online": {"refresh": 4}, "data": rows(17), "epochs": 2.0}
    weights, log = in_two_processes(tmp_path, __name__, **settings)  # the last step of an epoch has one row
    alone = trained_online(**settings)
    assert_same_weights(moved(weights), moved(alone.model), 1e-4)
    assert_same_log(log, alone.log, LOGGED, 1e-3)
    for step in (3, 4, 5, 6):
        shutil.rmtree(tmp_path / "checkpoints" / f"checkpoint-{step}")
    saved = json.loads((tmp_path / "checkpoints" / "checkpoint-2" / FILE).read_text())
    assert len(saved["rows"]) == 17, "those of both processes"
    again = trained_online(tmp_path / "checkpoints", scores=overlap_or_error(settings["data"]), **settings)
    assert again.outcome.continued_from == 2
    assert_same_weights(moved(again.model), moved(alone.model), 1e-4)


@pytest.mark.slow
def test_texts_that_one_of_two_processes_cannot_score_end_both_with_a_checkpoint(tmp_path):
    settings = {"online": {"refresh": 2}, "data": rows(16), "epochs": 3.0, "save_every": 100}
    _, found = in_two_processes(tmp_path, __name__, fails_after=2, **settings)
    assert found == "the texts of another process cannot be scored."
    again = trained_online(tmp_path / "checkpoints", scores=overlap_or_error(settings["data"]), **settings)
    assert again.outcome.continued_from == 2
    assert_same_weights(moved(again.model), moved(trained_online(**settings).model), 1e-4)


# A recipe


RECIPE = """
objective = "ce + risk(sharpness=0.5)"
[data]
name = "newswire"
limit = 24
validation_limit = 4
separator = "none"
max_source = 64
max_target = 24
[train]
max_steps = 4
batch_size = 4
accumulate = 1
warmup_steps = 0
log_every = 1
eval_every = 2
save_every = 2
[generation]
num_beams = 1
max_length = 12
[online]
samples = 2
"""


@pytest.fixture
def place(own_cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE + TINY_MODEL)
    return tmp_path


def train(*settings, run="run"):
    return cli.main(["train", "tiny.toml", "--run", run, *(word for each in settings for word in ("--set", each))])


@pytest.mark.parametrize("architecture", ["bart", "mbart", "llama"])
def test_a_recipe_trains_on_what_the_model_writes(place, capsys, architecture):
    assert train(f"model.architecture={architecture}", "online.refresh=3", "online.metric=chrf") == 0
    said = capsys.readouterr().err
    assert "every 3 steps the model generates 2 samples for each source" in said
    lines = [json.loads(line) for line in (place / "run" / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "score" in line]
    assert [line["text_age"] for line in steps] == [0, 1, 2, 0]
    assert all(0 <= line["score"] <= 1 for line in steps)
    assert (place / "run" / "model" / "model.safetensors").exists()
    assert not (place / "run" / "model" / FILE).exists()
    assert (
        "texts that the model wrote while it was trained, with the weights that it had then (samples 2, refresh 3, "
        "temperature 1.0, top_p 1.0, metric chrf), scored with `chrf`."
    ) in (place / "run" / "card.md").read_text()


def metric(function):
    return Metric(function, reads=("ids", "predictions"), scores={})


def count_words(ids, predictions):
    return Scores({"words": [min(100.0, 10.0 * len(text.split())) for text in predictions]}, "words")


def test_a_metric_of_ones_own_scores_and_needs_no_references(place):
    METRICS["words"] = metric(count_words)
    assert train("online.metric=words") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (float("nan"), "online.metric words has no score for candidate 1 of 'newswire-train-"),
        (
            float("inf"),
            "online.metric words has a score of inf, not between 0 and 100, for candidate 1 of 'newswire-train-",
        ),
        (ValueError("no verb"), "online.metric words cannot score a text of 'newswire-train-"),
        (UserError("There is no verb."), ": There is no verb. Correct its plugin, and run the same command again."),
    ],
    ids=["nan", "inf", "raises", "raises a sentence"],
)
def test_a_metric_that_fails_for_one_text_names_it_and_nothing_is_lost(place, capsys, broken, sentence):
    calls = []

    def failing(ids, predictions):
        calls.append(1)
        values = count_words(ids, predictions).values["words"]
        if failing.on and len(calls) > 3:
            if isinstance(broken, Exception):
                raise broken
            values[0] = broken
        return Scores({"words": values}, "words")

    failing.on = True
    METRICS["words"] = metric(failing)
    settings = "online.metric=words", "train.save_every=1000", "train.eval_every=0", "train.best=last"
    assert train(*settings) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Correct its plugin, and run the same command again." in said
    assert "no verb" in said or not isinstance(broken, Exception)
    assert "UserError" not in said
    assert checkpoints.find(place / "run" / "checkpoints").newest is not None
    failing.on = False
    assert train(*settings) == 0
    assert "continuing run from step" in capsys.readouterr().err
    assert train(*settings, run="whole") == 0
    one, other = (load_file(place / run / "model" / "model.safetensors") for run in ("run", "whole"))
    assert_same_weights(one, other, 0)


REFUSED = [
    (
        ["data.candidates=some.jsonl"],
        "online.samples: generates candidates during training, but data.candidates names a file of them. "
        "Leave one of them out.",
    ),
    (["online.metric=bertscore"], "online.metric: bertscore needs a model or a file of its own"),
    (["online.metric=shape"], "online.metric shape is not a single score."),
    (["online.metric=nothing"], "online.metric: unknown metric or score 'nothing'."),
    (
        ["online.metric_options=['bleu.x=1']"],
        "online.metric_options: takes rouge.OPTION=VALUE, options of the metric rouge, got 'bleu.x=1'.",
    ),
    (["train.fsdp=true"], "train.fsdp shards the weights, so the model cannot generate"),
    (["online.temperature=0"], "online.temperature: must be above 0, got 0"),
    (["online.samples=0", "online.top_p=0.9"], "online.top_p are for samples, but online.samples is 0. Set both"),
    (["system=simcls"], "online.samples: the system simcls does not read this section"),
    (["online.samples=0"], "--set data.candidates=FOLDER. Or generate them during training: --set online.samples=4."),
    (
        ["online.samples=0", "objective=ce + rank + matches(2):student", "data.candidates=some.jsonl"],
        "rank compares samples of the model, but online.samples is 0, so only the greedy text is generated.",
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=[" ".join(settings) for settings, _ in REFUSED])
def test_what_contradicts_the_section_is_refused_before_anything_is_loaded(place, capsys, settings, sentence):
    assert train(*settings) == 2
    assert sentence in capsys.readouterr().err
    assert not (place / "run" / "model").exists()


def test_an_objective_that_reads_no_text_trains_without_writing_and_that_is_said(place, capsys):
    """So that a study may have a row without such a term."""
    assert train("objective=ce") == 0
    assert "online.samples is not used: no term of 'ce' compares candidates." in capsys.readouterr().err
    assert '"score"' not in (place / "run" / "log.jsonl").read_text()
    assert train("objective=ce", "online.samples=0", run="plain") == 0
    one, other = (load_file(place / run / "model" / "model.safetensors") for run in ("run", "plain"))
    assert_same_weights(one, other, 0)


def checked(*settings):
    """A recipe that is about to be trained."""
    in_folder(run_of(recipe.load("tiny.toml", settings)), RunFolder(Path("run")))


@pytest.mark.parametrize("objective", ["ce", "ce + rank"])
def test_settings_of_texts_that_nobody_writes_are_said_to_be_without_effect(place, messages, objective):
    """Of a file of candidates, scores are in the file."""
    of_a_file = ["data.candidates=some.jsonl"] if "rank" in objective else []
    plain = ["online.samples=0", f"objective={objective}", *of_a_file]
    checked(*plain)
    assert messages == []
    checked(*plain, "online.metric=chrf", "online.refresh=4")
    assert messages == [
        "the section online (refresh, metric) is not used: online.samples is 0, so nothing is generated."
    ]
    checked("online.samples=0", "objective=ce + bag(2):student", "online.refresh=4")
    assert len(messages) == 1, "the greedy text is written"
    checked("objective=ce", "online.refresh=4")
    assert messages[1:] == ["online.samples is not used: no term of 'ce' compares candidates."]


def test_a_term_that_needs_samples_of_the_model_as_it_is_gets_one_warning(place, messages):
    of_a_file = "data.candidates=some.jsonl", "online.samples=0"
    for settings in (["online.temperature=0.7"], of_a_file):
        checked("objective=ce + policy", *settings)
    assert messages == [
        "policy is exact only for samples of the current model, but online.temperature = 0.7 and online.top_p = 1 "
        "change the distribution. Leave both at 1.",
        "policy is exact only for samples of the current model, but a file's candidates come from an older one. Set "
        "online.samples.",
    ]
    checked("objective=ce + policy")
    for settings in (["online.temperature=0.7"], of_a_file):
        checked(*settings)
    assert len(messages) == 2
    trained_online(objective="ce + credit(1,2)", online={"top_p": 0.5}, max_steps=1)
    assert messages[2].startswith(
        "credit is exact only for samples of the current model, but online.temperature = 1 and"
    )


def test_a_file_of_candidates_beside_the_own_text_is_not_read_and_that_is_said(place, capsys):
    objective = "ce + matches(2):student"
    assert train("online.samples=0", "data.candidates=some.jsonl", f"objective={objective}") == 0
    said = f"data.candidates is not used: no term of {objective!r} compares candidates."
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["ce + credit(1,2)", "ce + bag(2):student", "ce + policy(baseline=greedy)"])
def test_a_recipe_trains_with_every_term_of_own_texts(place, capsys, objective):
    samples = f"online.samples={0 if 'student' in objective else 2}"
    assert train(f"objective={objective}", samples) == 0
    lines = [json.loads(line) for line in (place / "run" / "log.jsonl").read_text().splitlines()]
    assert [0 <= line["score"] <= 1 for line in lines if "loss" in line] == [True] * 4


def test_conversations_are_refused(place, capsys):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]}] * 4
    Path("talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = "data.name=train=talk.jsonl,validation=talk.jsonl", "model.architecture=llama", "data.limit=0"
    assert train(*settings) == 2
    assert "online: the model generates one output for each prompt" in capsys.readouterr().err


def length(rows, texts, most=3):
    return [[min(len(text), most) / most for text in each] for each in texts]


class Length:
    def __init__(self, most):
        self.most = most

    def __call__(self, rows, texts):
        return length(rows, texts, self.most)


def banning(*tokens):
    model = writing_model()
    model.generation_config.bad_words_ids = [[token] for token in tokens]
    return model


class Reversed(Numbers):
    """A tokenizer that writes the last token first."""

    def batch_decode(self, rows, skip_special_tokens):
        return super().batch_decode([row[::-1] for row in rows], skip_special_tokens)


OTHER_TEXTS = {
    "tokenizer": (lambda number: {"tokenizer": Numbers() if number == 3 else Reversed()}, "tokenizer: "),
    "samples": (lambda number: {"online": {"samples": number}}, "online.samples: 3 → 30"),
    "search": (lambda token: {"model": banning(token)}, r"generation_config.bad_words_ids: \[\[3\]\] → \[\[30\]\]"),
    "scores": (lambda number: {"scores": length if number == 3 else Length(number)}, "scores: "),
}


@pytest.mark.parametrize("changed", OTHER_TEXTS)
def test_a_training_in_python_is_not_continued_with_other_texts_of_its_own(tmp_path, changed):
    given, named = OTHER_TEXTS[changed]
    trained_online(tmp_path, max_steps=1, **given(3))
    with pytest.raises(UserError, match=rf"have changed since it was started:\n  {named}"):
        trained_online(tmp_path, max_steps=2, **given(30))
    assert trained_online(tmp_path, max_steps=2, **given(3)).outcome.continued_from == 1


def scaled(factor):
    return lambda n: n * factor


def test_a_function_is_known_by_its_source_and_the_values_that_are_bound_to_it():
    mark = _source_mark(length)
    assert len({mark, *(_source_mark(partial(length, most=most)) for most in (1, 1, 2))}) == 3
    assert _source_mark(scaled(2)) == _source_mark(scaled(2)) != _source_mark(scaled(3))
    assert _source_mark(lambda n: n in {"a", "b"}) != _source_mark(lambda n: n in {"a", "c"})
    assert _source_mark(lambda n: n) != mark
    assert _source_mark(lambda n: n) == _source_mark(lambda n: n) != _source_mark(lambda n: n + 1)
    assert _source_mark(lambda n: n + 2) != _source_mark(lambda n: n + 1)
    assert _source_mark(max) != _source_mark(min), "which have a name alone"


@pytest.mark.parametrize("best", [[], ["train.best=counted", "train.eval_every=2"]], ids=["scores", "selects, too"])
def test_a_corrected_plugin_continues_the_run_with_a_warning_unless_it_selects_weights(place, capsys, best):
    plugin = place / "mine.py"
    plugin.write_text(
        "import ngramloss as ng\n"
        "def counted(predictions):\n    return ng.Scores({'counted': [10.0] * len(predictions)}, 'counted')\n"
        "ng.METRICS['counted'] = ng.Metric(counted, reads=('predictions',), scores={})\n"
    )
    settings = ["online.metric=counted", "train.max_steps=2", *best]

    def started():
        options = (word for each in settings for word in ("--set", each))
        return cli.main(["train", "tiny.toml", "--run", "run", "--plugin", str(plugin), *options])

    assert started() == 0
    shutil.rmtree(place / "run" / "model")
    plugin.write_text(plugin.read_text().replace("[10.0]", "[20.0]"))
    capsys.readouterr()
    code = started()
    said = capsys.readouterr().err
    assert code == (2 if best else 0)
    assert ("have changed since it was started:\n  plugin metric counted: " in said) == bool(best)
    assert ("warning: the plugin metric counted has changed since run was started" in said) == (not best)


def test_each_process_reads_the_training_examples_that_were_prepared(place):
    settings = recipe.load("tiny.toml")
    prepared, _ = prepare.prepare(run_of(settings), RunFolder(Path("new")), HERE, None)
    assert len(prepare.read_scored(settings, prepared)) == 24
    with pytest.raises(UserError, match="the train data have changed since they were prepared"):
        prepare.read_scored(recipe.load("tiny.toml", ["data.limit=23"]), prepared)


def test_steps_know_their_rows_and_those_of_a_process():
    lengths = np.full(10, 5)
    epochs = Epochs(lengths, step=4, seed=1, grouped=False)
    steps = PlannedSteps([], epochs, None, None, lengths=None, total=5, process=1, processes=2)
    found = list(steps.rows_from(1))
    assert [number for number, _ in found] == [2, 3, 4, 5]
    assert [rows for _, rows in found] == [*epochs[0][1:], *epochs[1][:2]]
    assert steps.own([4, 5, 6, 7]) == [5, 7]


def test_a_greedy_baseline_is_refused_where_the_model_does_not_write():
    settings = recipe.load("demo", ["objective=ce + policy(baseline=greedy)", "data.candidates=somewhere"])
    with pytest.raises(UserError, match="which a file of candidates lacks"):
        run_of(settings)
