"""The pointer-generator: its formulas and its search are those of plain Python; it copies names that it never saw."""

import json
import math

import pytest
import torch
from commands import assert_equal_runs, assert_two_processes_train_as_one, finished
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_encoders import STEPS
from transformers import AutoTokenizer

from ngramloss import cli, recipe
from ngramloss.data import Example, newswire
from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.training.system_registry import read_system, run_of
from ngramloss_systems import pointer_generator as pg
from ngramloss_systems.pointer_model import PointerGenerator, coverage_penalty, load_model, search
from ngramloss_systems.pointer_words import UNKNOWN, extended_ids, join_words, split_words, word_tokenizer

pytestmark = pytest.mark.usefixtures("own_cache")

V, U = 9, 6
"""The words and the unknown words of a tiny model."""
RECIPE = f"""
objective = "ce + 0.5*matches(2)"
system = "pointer_generator(embeddings=6,coverage=0.7,coverage_from=0.5)"
[data]
name = "data"
max_source = 40
max_target = 12
[model]
name = "scratch"
width = 8
vocabulary = 300
{STEPS}best = "last"
weight_decay = 0.0
[generation]
num_beams = 3
min_length = 2
max_length = 9
"""


# Words


@given(st.text(alphabet="aB7é_.,'-(\"￭ \n  ", max_size=30))
def test_a_text_of_known_words_is_exact_but_for_its_spaces(text):
    tokenizer = word_tokenizer([text], 1000, lowercase=False)
    words = split_words(tokenizer, text)
    expected = " ".join(text.split()).replace("￭", "■")
    assert join_words(tokenizer, words) == expected
    ids = tokenizer(text.replace("￭", "■"))["input_ids"]
    assert tokenizer.decode(ids) == expected
    assert UNKNOWN not in tokenizer.convert_ids_to_tokens(ids)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("said (Smith, 42).", ["said", "(￭", "Smith", "￭,", "42", "￭)", "￭."]),
        ('"Smith"-like', ['"￭', "Smith", '￭"', "￭-￭", "like"]),
        ("Smith's £30.6", ["Smith", "￭'￭", "s", "£￭", "30", "￭.￭", "6"]),
        ("हिन्दी में। naïve", ["हिन्दी", "में", "￭।", "naïve"]),
        ("a <s> <unk>", ["a", "<￭", "s", "￭>", "<￭", "unk", "￭>"]),
        (" \n ", []),
    ],
)
def test_a_name_is_the_same_word_wherever_it_stands(text, words):
    tokenizer = word_tokenizer([text], 1000, lowercase=False)
    assert split_words(tokenizer, text) == words


def test_the_vocabulary_has_the_most_frequent_words_and_is_a_tokenizer_file(tmp_path):
    made = word_tokenizer(["B b c c c d", "A, a"], 4 + 3, lowercase=True)
    assert made.get_vocab() == {"<unk>": 0, "<pad>": 1, "<s>": 2, "</s>": 3, "c": 4, "a": 5, "b": 6}
    made.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("A zebra,\nB")["input_ids"] == [5, 0, 0, 6]
    assert again.decode([5, 4, 6]) == "a c b"
    assert split_words(again, "A zebra,") == ["a", "zebra", "￭,"]


def test_unknown_words_of_a_document_get_the_ids_behind_the_vocabulary():
    vocabulary, unknown = {"<unk>": 0, "a": 1, "b": 2}, {}
    assert extended_ids(["x", "a", "y", "x"], vocabulary, unknown, grow=True) == [3, 1, 4, 3]
    assert extended_ids(["y", "b", "z"], vocabulary, unknown, grow=False) == [4, 2, 0]
    assert unknown == {"x": 3, "y": 4}


TOKENIZER = word_tokenizer(["a b c d e"], V, lowercase=False)
WORDS = TOKENIZER.get_vocab()


def row(source, target="", longest=(U, 4)):
    return pg.row_of(TOKENIZER, WORDS, Example("1", source, target), longest=longest)


def test_rows_are_cut_as_the_authors_cut_them():
    found = row("a x b y", "x b z")
    assert found == pg.Row([4, V, 5, V + 1], [V, 5, 0, 3], ["x", "y"], (False, False))
    assert row("a b c d e a b").input_ids == [4, 5, 6, 7, 8, 4]
    assert row("a b c d e a b").cut == (True, False)
    whole = row("a", "a b c d")
    assert (whole.labels, whole.cut) == ([4, 5, 6, 7], (False, True)), "a summary that is cut has no end"
    assert row("x", "y", (1, 4)).labels == [0, 3], "a word of another document is not copied"


def test_a_document_without_words_and_one_of_unknown_words_are_read():
    empty, strange = row(" ", "a"), row("p q r s t u", "u p")
    assert (empty.input_ids, empty.unknown) == ([0], [])
    assert (strange.input_ids, strange.labels) == ([*range(V, V + U)], [V + 5, V, 3])
    batch = padded(empty, strange)
    assert batch["unknown"].tolist() == [[False] * U, [True] * U]
    logp = tiny()(batch).logp
    assert logp.isfinite().all()
    assert len(search(tiny().eval(), batch, beams=2, least=1, most=4)) == 2


def padded(*rows):
    return pg.pad_rows(U, V, [row._asdict() for row in rows])


# The formulas


def tiny(*, coverage=True, seed=0, dtype=torch.float64, scale=0.7):
    """A model whose weights are large enough that everything counts."""
    model = PointerGenerator(vocabulary=V, width=3, embeddings=2, coverage=coverage)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model.to(dtype)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def linear(part, values):
    bias = part.bias.tolist() if part.bias is not None else [0.0] * len(part.weight)
    return [
        sum(w * x for w, x in zip(row, values, strict=True)) + b
        for row, b in zip(part.weight.tolist(), bias, strict=True)
    ]


def lstm(weights, x, hidden, cell):
    """A step of an LSTM whose gates are in the order of PyTorch: input, forget, candidate, output."""
    ih, hh, b, c = (weight.tolist() for weight in weights)
    gates = [
        sum(w * v for w, v in zip(ih[k], x, strict=True))
        + sum(w * v for w, v in zip(hh[k], hidden, strict=True))
        + b[k]
        + c[k]
        for k in range(4 * len(hidden))
    ]
    D = len(hidden)
    take, keep, new, give = (gates[k * D : (k + 1) * D] for k in range(4))
    cell = [sigmoid(keep[d]) * cell[d] + sigmoid(take[d]) * math.tanh(new[d]) for d in range(D)]
    return [sigmoid(give[d]) * math.tanh(cell[d]) for d in range(D)], cell


def plain(model, ids, labels):
    """The definition in plain loops: the distribution of each position over all V + U words, and its coverage loss."""
    D, table = 3, model.embedding.weight.tolist()
    embed = lambda token: table[token if token < V else 0]  # noqa: E731
    ways = []
    for suffix, order in (("", range(len(ids))), ("_reverse", reversed(range(len(ids))))):
        weights = [
            getattr(model.encoder, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        hidden, cell, states = [0.0] * D, [0.0] * D, {}
        for i in order:
            hidden, cell = lstm(weights, embed(ids[i]), hidden, cell)
            states[i] = hidden
        ways.append((states, hidden, cell))
    states = [ways[0][0][i] + ways[1][0][i] for i in range(len(ids))]
    hidden = [max(0.0, x) for x in linear(model.first_hidden, ways[0][1] + ways[1][1])]
    cell = [max(0.0, x) for x in linear(model.first_cell, ways[0][2] + ways[1][2])]
    context, covered = [0.0] * 2 * D, [0.0] * len(ids)
    weights = [getattr(model.decoder, name) for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    distributions, losses = [], []
    for before in [2, *labels[:-1]]:
        x = linear(model.merge, embed(before) + context)
        hidden, cell = lstm(weights, x, hidden, cell)
        from_decoder = linear(model.decoder_features, cell + hidden)
        energies = []
        for i, state in enumerate(states):
            from_document = linear(model.document_features, state)
            energy = 0.0
            for d in range(2 * D):
                c = model.coverage_features[d].item() * covered[i] if model.coverage else 0.0
                energy += model.energy[d].item() * math.tanh(from_document[d] + from_decoder[d] + c)
            energies.append(math.exp(energy))
        attention = [energy / sum(energies) for energy in energies]
        context = [sum(a * state[d] for a, state in zip(attention, states, strict=True)) for d in range(2 * D)]
        p_gen = sigmoid(linear(model.generates, context + cell + hidden + x)[0])
        scores = [math.exp(score) for score in linear(model.words, linear(model.word_features, hidden + context))]
        final = [p_gen * score / sum(scores) for score in scores] + [0.0] * U
        for a, token in zip(attention, ids, strict=True):
            final[token] += (1 - p_gen) * a
        losses.append(sum(min(a, c) for a, c in zip(attention, covered, strict=True)))
        covered = [c + a for a, c in zip(attention, covered, strict=True)]
        distributions.append(final)
    return distributions, losses


@pytest.mark.parametrize("coverage", [True, False])
def test_the_distribution_and_the_coverage_loss_are_those_of_plain_loops(coverage):
    rows = [row("a x b x y", "x b a"), row("c", "c c"), row("p q a", "q z d")]
    model, batch = tiny(coverage=coverage), padded(*rows)
    found = model(batch)
    for index, each in enumerate(rows):
        distributions, losses = plain(model, each.input_ids, each.labels)
        length = len(each.labels)
        assert found.penalty[index, :length].tolist() == pytest.approx(losses, abs=1e-9)
        for position, expected in enumerate(distributions):
            assert found.logp[index, position].exp().tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(found.logp.logsumexp(-1), torch.zeros(3, 4, dtype=torch.float64), atol=1e-12)


@pytest.mark.slow
def test_the_loss_has_its_gradient():
    model, batch = tiny(), padded(row("a x b x", "x b"), row("y", "y a"))
    counts = torch.tensor([6.0, 2.0])
    weights = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    names = [name for name, _ in model.named_parameters()]
    objective = JointLoss("ce(smoothing=0.1) + soft(2)")

    def loss(*weights):
        found = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (batch,))
        total = objective(found.logp, batch["labels"], num_tokens=counts[0], num_sequences=counts[1])
        return total + found.penalty.where(batch["labels"] != -100, 0.0).sum()

    assert torch.autograd.gradcheck(loss, weights)


@given(st.lists(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_coverage_loss_is_what_is_attended_to_again(rows):
    expected, covered = [], [0.0] * 3
    for attention in rows:
        expected.append(sum(min(a, c) for a, c in zip(attention, covered, strict=True)))
        covered = [a + c for a, c in zip(attention, covered, strict=True)]
    assert coverage_penalty(torch.tensor([rows], dtype=torch.float64))[0].tolist() == pytest.approx(expected, abs=1e-9)


def test_a_certain_model_has_no_infinite_loss():
    model, batch = tiny(dtype=torch.float32), padded(row("x y", "y a"))
    with torch.no_grad():
        model.generates.bias.fill_(500.0)
        model.energy.mul_(1e4)  # attention to one of both words is 0
    found = model(batch)
    found.logp.sum().backward()
    assert found.logp.isfinite().all()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize(
    "objective", ["ce(smoothing=0.1)", "ce + matches(2) + bag(1)", "eaft + rewards(2)", "bleu(2) + 0.5*lcs"]
)
def test_the_rows_of_a_step_add_up_to_the_step(objective):
    rows = [row("a x b x y", "x b a"), row("c", "c c"), row("p q a", "q z d")]
    model, loss_fn = tiny(), JointLoss(objective)

    def loss(*rows):
        batch = padded(*rows)
        return loss_fn(model(batch).logp, batch["labels"], num_tokens=11, num_sequences=3)

    assert sum(loss(each) for each in rows).item() == pytest.approx(loss(*rows).item(), abs=1e-9)


# The search


def plain_search(model, each, *, beams, least, most):
    """The authors' search, one document after the other, in plain lists. A text's probability comes from the whole of it."""

    def probabilities(text):
        labels = [token for token in text[1:]] + [0]
        found = model(padded(each._replace(labels=labels)))
        return found.logp[0, -1].tolist()

    texts, results = [([2], 0.0)], []
    for count in range(most):
        if len(results) >= beams:
            break
        longer = [
            ([*text, token], total + logp) for text, total in texts for token, logp in enumerate(probabilities(text))
        ]
        longer.sort(key=lambda pair: -pair[1] / len(pair[0]))
        texts = []
        for text, total in longer:
            if text[-1] == 3:
                if count >= least:
                    results.append((text, total))
            else:
                texts.append((text, total))
            if len(texts) == beams or len(results) == beams:
                break
    best = max(results or texts, key=lambda pair: pair[1] / len(pair[0]))[0]
    return [token for token in best[1:] if token != 3]


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(0, 3), st.integers(4, 6), st.booleans())
@example(1, 1, 0, 1, True)
@example(2, 1, 1, 5, False)
def test_the_search_is_that_of_plain_python(seed, beams, least, most, coverage):
    model = tiny(seed=seed, coverage=coverage, scale=2.0).eval()
    with torch.no_grad():
        model.words.bias[3] += 1.5  # so that texts end
    rows = [row("a x b x y"), row("c"), row("p q a")]
    found = search(model, padded(*rows), beams=beams, least=least, most=most)
    for each, ids in zip(rows, found, strict=True):
        assert ids == plain_search(model, each, beams=beams, least=least, most=most)


def test_more_beams_than_words_are_refused():
    with pytest.raises(UserError, match=r"a vocabulary of 9 words allows at most 4 beams, got 5\."):
        search(tiny(), padded(row("a")), beams=5, least=0, most=3)


# Training


NAMES = ("Alda", "Bero", "Cimo", "Dule", "Enzo", "Fira", "Gano", "Hilo", "Iska", "Jora")
STRANGERS = ("Zorblax", "Quenthar", "Wumbly", "Xiphon")
FILLERS = ("today", "again", "here", "once", "slowly", "then")


def copying_rows(names, count):
    """Documents with a name in one of several places; the summary says it."""
    rows = []
    for number in range(count):
        name, other = names[number % len(names)], FILLERS[number % 5]
        words = [FILLERS[(number * 7 + place * place) % 6] for place in range(number % 4)]
        rows.append({"document": " ".join([*words, f"({name})", "came", other]) + ".", "summary": f"{name} came."})
    return rows


def write_rows(path, rows):
    path.write_text("".join(json.dumps({"id": str(number), **each}) + "\n" for number, each in enumerate(rows)))


@pytest.mark.slow
def test_a_name_that_is_in_no_vocabulary_is_copied(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [f"{a}{b}{c}".title() for a in letters for b in letters for c in "aeiou"]  # too many for the vocabulary
    write_rows(tmp_path / "data" / "train.jsonl", copying_rows(names, 1200))
    write_rows(tmp_path / "data" / "test.jsonl", copying_rows(STRANGERS, 4))
    (tmp_path / "copy.toml").write_text("""
system = "pointer_generator(embeddings=16,optimizer=adamw,coverage_from=0.9)"
[data]
name = "data"
max_source = 16
max_target = 8
[model]
name = "scratch"
width = 32
vocabulary = 300
[train]
max_steps = 150
batch_size = 16
accumulate = 1
learning_rate = 1e-2
warmup_steps = 10
eval_every = 0
best = "last"
[generation]
max_length = 8
""")
    assert cli.main(["train", "copy.toml", "--run", "run"]) == 0
    assert cli.main(["generate", "run", "--out", "texts"]) == 0
    vocabulary = AutoTokenizer.from_pretrained(tmp_path / "run" / "model").get_vocab()
    assert len(vocabulary) == 300
    assert not vocabulary.keys() & set(STRANGERS)
    rows = [json.loads(line) for line in (tmp_path / "texts" / "predictions.jsonl").read_text().splitlines()]
    assert [each["prediction"] for each in rows] == [f"{name} came." for name in STRANGERS]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    for split, count in (("train", 24), ("validation", 6), ("test", 5)):
        items = newswire.items(split, count)
        write_rows(folder / "data" / f"{split}.jsonl", [{"document": i.document, "summary": i.summary} for i in items])
    (folder / "tiny.toml").write_text(RECIPE.replace('"data"', json.dumps(str(folder / "data"))))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


@pytest.fixture(scope="module")
def undisturbed(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert cli.main(["train", "tiny.toml", "--run", "undisturbed"]) == 0
    return place / "undisturbed"


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["saving:4", "saving:6", "model:0"])
def test_a_killed_training_continues_to_the_same_weights(undisturbed, here, tmp_path, sabotage):
    arguments = ["train", str(here / "tiny.toml"), "--run", str(tmp_path / "run")]
    assert finished(arguments, sabotage=sabotage)[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_two_processes_train_as_one(here, tmp_path):
    assert_two_processes_train_as_one(tmp_path, "train.best=loss")


def log_of(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "eval_loss" in line]


def test_coverage_begins_at_its_step_and_is_a_part_of_the_loss(undisturbed):
    steps, validations = log_of(undisturbed)
    assert [line["weight/coverage"] for line in steps] == pytest.approx([0, 0, 0, 0.7, 0.7, 0.7])
    for line in steps:
        parts = line["ce"] + 0.5 * line["matches(2)"] + line["weight/coverage"] * line["coverage"]
        assert line["loss"] == pytest.approx(parts, rel=1e-5)
        assert line["coverage"] > 0, "it is measured before it counts"
    assert [line["step"] for line in validations] == [2, 4, 6]
    for line, weight in zip(validations, (0, 0.7, 0.7), strict=True):
        parts = line["eval_ce"] + 0.5 * line["eval_matches(2)"] + weight * line["eval_coverage"]
        assert line["eval_loss"] == pytest.approx(parts, rel=1e-5)
    saved = [
        json.loads((undisturbed / "checkpoints" / f"checkpoint-{step}" / "pointer_generator.json").read_text())
        for step in (2, 4)
    ]
    assert [config["coverage"] for config in saved] == [False, True]


def test_the_mechanism_of_coverage_learns_only_in_its_phase(undisturbed):
    from safetensors.torch import load_file

    weights = [
        load_file(undisturbed / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")["coverage_features"]
        for step in (2, 4, 6)
    ]
    start = torch.load(undisturbed / "checkpoints" / "checkpoint-2" / "optimizer.pt", weights_only=True)
    sums = [state["sum"] for state in start["state"].values()]
    assert any(torch.equal(each, torch.full_like(each, 0.1)) for each in sums), "no step has moved it"
    assert not torch.equal(weights[1], weights[2])


def task_of(here, *changes):
    return pg.task(run_of(recipe.load("tiny.toml", changes)))


def test_adagrad_starts_again_when_coverage_begins(here):
    task = task_of(here)
    optimiser = task.optimiser_of(task.model)
    (first, *_) = optimiser.state.values()
    for number, expected in ((3, 5.0), (4, 0.1), (5, 0.1)):
        if number == 3:
            first["sum"].fill_(5.0)
        task.change(number, 6, optimiser)
        assert first["sum"].flatten()[0].item() == pytest.approx(expected)
        assert task.model.coverage == (number >= 4)
    task.change(1, 6, optimiser)
    assert not task.model.coverage
    first["sum"].fill_(7.0)
    task.change(5, 6, optimiser)
    assert task.model.coverage, "as in a training that is continued there"
    assert first["sum"].flatten()[0] == 7, "later steps go on with what they have"


def test_the_weights_of_scheduled_terms_follow_the_step(here, tmp_path):
    scheduled = ["--set", "objective=ce + matches(2)@ramp(0,1)"]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *scheduled]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    weights = {line["step"]: line["weight/matches(2)"] for line in lines if "weight/matches(2)" in line}
    total = max(weights)
    assert weights == pytest.approx({step: (step - 1) / total for step in weights})
    assert len(weights) > 2


def test_validation_has_the_final_weights_of_scheduled_terms(here):
    task = task_of(
        here, "objective=ce@until(0.5) + 0.5*matches(2)@from(0.5)", "system=pointer_generator(coverage_from=1)"
    )
    task.objective.progress = 0.25
    task.model.eval()
    found = task.score()
    assert found["loss"] == pytest.approx(0.5 * found["matches(2)"])
    assert task.objective.progress == 0.25


def test_generate_needs_no_targets(undisturbed, here, tmp_path):
    for name, options in (("with", []), ("without", ["--target", "none"])):
        assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / name), *options]) == 0
    texts = [(tmp_path / name / "predictions.jsonl").read_text() for name in ("with", "without")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_generate_score_and_report_take_the_run(undisturbed, here, tmp_path, capsys):
    texts, other = str(tmp_path / "texts"), str(tmp_path / "other")
    assert cli.main(["generate", "undisturbed", "--out", texts]) == 0
    rows = [json.loads(line) for line in (tmp_path / "texts" / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 5
    assert all(2 <= len(split_words(TOKENIZER, each["prediction"])) <= 9 for each in rows)
    about = json.loads((tmp_path / "texts" / "generation.json").read_text())
    assert about["generation"] == {"num_beams": 3, "min_length": 2, "max_length": 9}
    assert cli.main(["generate", "undisturbed", "--out", texts]) == 0
    assert cli.main(["generate", "undisturbed", "--out", texts, "--set", "generation.num_beams=1"]) == 2
    search = ["--set", "generation.num_beams=1", "--set", "generation.max_length=4", "--batch-size", "2"]
    assert cli.main(["generate", "undisturbed", "--out", other, *search]) == 0
    rows = [json.loads(line) for line in (tmp_path / "other" / "predictions.jsonl").read_text().splitlines()]
    assert all(len(split_words(TOKENIZER, each["prediction"])) <= 4 for each in rows)
    capsys.readouterr()
    assert cli.main(["generate", "undisturbed", "--out", other, "--set", "generation.no_repeat_ngram_size=3"]) == 2
    assert "whose search has only generation.num_beams, generation.min_length" in capsys.readouterr().err
    assert cli.main(["generate", "undisturbed", "--out", other, "--set", "data.separator=none"]) == 2
    assert "which keeps the data.separator of its training. It accepts --set for task, data" in capsys.readouterr().err
    assert cli.main(["candidates", "undisturbed", "--out", other]) == 2
    assert "is a run of pointer_generator, which generates one output for each source" in capsys.readouterr().err
    assert cli.main(["generate", "lead-2", "--like", "undisturbed", "--out", str(tmp_path / "lead")]) == 0
    assert cli.main(["score", str(tmp_path / "lead"), texts]) == 0
    assert cli.main(["report", str(tmp_path / "lead"), texts, "-o", str(tmp_path / "page")]) == 0


def test_generate_says_what_is_cut_and_what_is_not_known(undisturbed, here, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pg, "search", lambda model, batch, **_: [[0, 4]] * len(batch["input_ids"]))
    assert cli.main(["generate", "undisturbed", "--out", str(tmp_path / "texts")]) == 0
    message = capsys.readouterr().err
    assert "5 of 5 documents are longer than data.max_source = 40 words and lost their end." in message
    assert "5 of 5 texts have <unk>: a word that the model neither knew nor copied." in message


def test_what_is_used_of_the_data_and_the_objective_are_on_the_card(undisturbed):
    card = (undisturbed / "card.md").read_text()
    assert "train: 24 documents of 40.0 words. Beyond the vocabulary of 300 are" in card
    assert "24 documents are longer than data.max_source = 40 and lost their end." in card
    assert "* objective = `ce + 0.5*matches(2)`" in card


# Mistakes


def test_a_model_with_another_vocabulary_or_other_weights_is_refused(undisturbed, tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    assert load_model(tmp_path, TOKENIZER).coverage
    other = word_tokenizer(["a"], 9, lowercase=False)
    with pytest.raises(UserError, match="has a vocabulary of 9 words, and its tokenizer 5: one of them is another"):
        load_model(tmp_path, other)
    config = tmp_path / "pointer_generator.json"
    config.write_text(config.read_text().replace('"width": 3', '"width": 4'))
    with pytest.raises(UserError, match=r"the weights in .* do not fit its pointer_generator\.json"):
        load_model(tmp_path, TOKENIZER)
    config.write_text("{}")
    with pytest.raises(UserError, match="is not a model of pointer_generator"):
        load_model(tmp_path, TOKENIZER)


@pytest.mark.slow
def test_a_training_is_not_continued_on_other_words(undisturbed, here, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.jsonl").write_text((here / "data" / f"{split}.jsonl").read_text())
    own = ["--run", str(tmp_path / "run"), "--set", f"data.name={tmp_path / 'data'}"]
    arguments = ["train", str(here / "tiny.toml"), *own]  # the process may have begun in another folder
    assert finished(arguments, sabotage="saving:4")[0] == -9
    write_rows(tmp_path / "data" / "train.jsonl", copying_rows(NAMES, 24))
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err
    assert "have changed since it was started:\n  train data: " in said
    assert "\n  words: " in said
    assert "To train with the new ones" in said


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        (["objective=ce + rank"], ["objective: rank needs candidates, which pointer_generator does not have."]),
        (["model.heads=2"], ["model.heads: is not a setting of pointer_generator. Leave it out."]),
        (["model.name=facebook/bart-base"], ["model.name: pointer_generator is trained from scratch."]),
        (["data.separator=<s>"], ["data.separator: pointer_generator puts nothing between sentences."]),
        (
            ["train.weight_decay=0.1", "train.beta1=0.5"],
            ["train.weight_decay: is a setting of AdamW", "train.beta1: is a setting of AdamW"],
        ),
        (["data.prefix=a"], ["data.prefix: is not a setting of pointer_generator."]),
        (["generation.no_repeat_ngram_size=3"], ["generation.no_repeat_ngram_size: is not a setting of pointer_gen"]),
        (["train.best=matches(2)"], ["train.best: must be one of ce, loss, last for pointer_generator"]),
        (["system=pointer_generator(coverage_from=2)"], ["system: coverage_from: must be at most 1, got 2"]),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, changes, sentences):
    options = [part for change in changes for part in ("--set", change)]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *options]) == 2
    message = capsys.readouterr().err
    assert all(sentence in message for sentence in sentences), message


def test_what_may_keep_coverage_from_the_model_is_said(here):
    used = task_of(here, "train.best=ce", "train.early_stopping=2").used
    assert any("may choose weights from before coverage begins" in sentence for sentence in used)
    assert "train.early_stopping may end the training before coverage begins." in used
    assert not any("coverage" in sentence for sentence in task_of(here).used)


@pytest.mark.slow
def test_the_recipe_has_the_authors_settings():
    own = recipe.load("pointer-generator")
    options = read_system(own.system).options
    assert (own.model.width, own.model.vocabulary, options["embeddings"], options["lowercase"]) == (
        256,
        50000,
        128,
        True,
    )
    assert (own.data.max_source, own.data.max_target) == (400, 100)
    train = own.train
    assert (train.batch_size * train.accumulate, train.learning_rate, train.clip) == (16, 0.15, 2)
    assert (options["optimizer"], options["accumulator"], options["coverage"]) == ("adagrad", 0.1, 1)
    assert (own.generation.num_beams, own.generation.min_length, own.generation.max_length) == (4, 35, 100)
    model = PointerGenerator(vocabulary=50000, width=256, embeddings=128)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert trained == 21_499_600 + 1_153 + 512, "the paper's baseline, pointer and coverage"
    assert pg.first_step_with_coverage(options, train.max_steps) == pytest.approx(230_000, abs=100)
