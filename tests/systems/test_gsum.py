"""GSum: guidance from a column, the oracle or an extractor; it trains, is killed and continued, and its guidance counts."""

import json
import math
import re
import shutil
from collections import Counter

import pytest
import tiny_tokenizers
import torch
from commands import assert_equal_runs, assert_two_processes_train_as_one, finished
from tiny_encoders import MODEL, STEPS
from transformers import AutoTokenizer, BartConfig, BartForConditionalGeneration

import ngramloss as ng
from ngramloss import cli, recipe
from ngramloss.data import Example, fingerprint, load, newswire
from ngramloss.data.batches.padding import Padder
from ngramloss.data.tokens import Shape
from ngramloss.errors import UserError
from ngramloss.loss.terms import OBJECTIVES
from ngramloss.metrics.oracle import greedy_oracle
from ngramloss.recipe import Data
from ngramloss.training.prepare import read_splits
from ngramloss.training.system_registry import read_system, run_of
from ngramloss_systems import gsum
from ngramloss_systems.guided_bart import GuidedBart

pytestmark = pytest.mark.usefixtures("own_cache")

DATA = """[data]
name = "data"
separator = "none"
max_source = 96
max_target = 24
"""
SMALL = MODEL + "decoder_layers = 1\n"
GSUM = f"""
system = "gsum"
objective = "ce(smoothing=0.1) + 0.5*matches(2)"
{DATA}{SMALL}{STEPS}best = "loss"
[generation]
num_beams = 3
max_length = 12
min_length = 4
"""
EXT = f"""
system = "bertsum_ext(layers=1,heads=2,feed_forward=16,dropout=0.0,sentences=2,min_words=0)"
[data]
name = "data"
max_source = 96
{MODEL}[train]
max_steps = 2
batch_size = 4
accumulate = 1
eval_every = 0
best = "last"
"""


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_with_guidance(split, count, guidance=lambda number, item: f"number {number} of {item.document.split()[0]}"):
    items = enumerate(newswire.items(split, count))
    return [
        {
            "id": f"{split}-{number}",
            "document": item.document,
            "summary": item.summary,
            "guidance": guidance(number, item),
        }
        for number, item in items
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for split, count in (("train", 24), ("validation", 6), ("test", 5)):
        write_rows(folder / "data" / f"{split}.jsonl", rows_with_guidance(split, count))
    name = json.dumps(str(folder / "data"))
    (folder / "tiny.toml").write_text(GSUM.replace('"data"', name))
    (folder / "ext.toml").write_text(EXT.replace('"data"', name))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def trained(place, recipe, run, *settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        options = [part for setting in settings for part in ("--set", setting)]
        assert cli.main(["train", recipe, "--run", run, *options]) == 0
    return place / run


@pytest.fixture(scope="module")
def undisturbed(place):
    return trained(place, "tiny.toml", "undisturbed")


@pytest.fixture(scope="module")
def by_oracle(place):
    return trained(place, "tiny.toml", "oracle", "system=gsum(guidance=oracle,sentences=2)", "train.max_steps=3")


@pytest.fixture(scope="module")
def extractor(place):
    return trained(place, "ext.toml", "ext")


# Guidance


def test_the_oracle_s_guidance_is_its_sentences_in_their_order():
    examples = [
        Example("1", "It rained. Roads were closed. Nobody came. It was Monday.", "Rain closed roads on Monday."),
        Example("2", "Nothing here.", "other words"),
    ]
    texts = gsum.oracle_guidance(examples, Data(splitter="period"), most=2)
    sentences = ["It rained.", "Roads were closed.", "Nobody came.", "It was Monday."]
    assert texts == [" ".join(sentences[place] for place in greedy_oracle(sentences, [examples[0].target], most=2)), ""]
    assert texts[0] == "Roads were closed. It was Monday."


def test_a_column_s_guidance_is_found_by_id_however_the_split_is_made(tmp_path):
    rows = rows_with_guidance("train", 20)
    rows[3]["summary"] = ""  # is skipped, and must not shift the others
    rows[5]["guidance"] = ["one sentence.", "another."]
    write_rows(tmp_path / "train.jsonl", rows)
    expected = {row["id"]: row["guidance"] for row in rows} | {"train-5": "one sentence. another."}
    file = str(tmp_path / "train.jsonl")
    for fractions in ({}, {"validation_fraction": 0.2, "test_fraction": 0.1}):
        data = Data(name=file, on_bad_row="skip", **fractions)
        for split in ("train", "validation", "test") if fractions else ("train",):
            for limit in (0, 2):
                found = load(file, split, on_bad_row="skip", limit=limit, **fractions)
                texts = gsum.read_column(found, data, "summarisation", "guidance")
                assert texts == [expected[example.id] for example in found.examples]


def test_guidance_for_some_rows_only_is_refused_with_their_ids(tmp_path):
    rows = rows_with_guidance("train", 20)
    for number, value in ((2, ""), (4, None), (7, "  ")):
        rows[number]["guidance"] = value
    del rows[9]["guidance"]
    write_rows(tmp_path / "train.jsonl", rows)
    file = str(tmp_path / "train.jsonl")
    message = (
        r"4 of 20 rows of the split 'train' of .*train.jsonl have no guidance: the column 'guidance' has no text in the "
        r"rows with the ids train-2, train-4, train-7, train-9. Every row needs one. Name the column with gsum"
    )
    with pytest.raises(UserError, match=message):
        gsum.read_column(load(file, "train"), Data(name=file), "summarisation", "guidance")
    held_out = {"validation_fraction": 0.5}
    with pytest.raises(UserError, match=r"of 10 rows of the split 'validation' .* have no guidance"):
        gsum.read_column(load(file, "validation", **held_out), Data(name=file, **held_out), "summarisation", "guidance")


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("keywords", r"is read from the column 'keywords'. .* has no column 'keywords' .* Name the column with gsum"),
        ("empty", r"is read from the column 'empty'. 3 of 3 rows .*'empty' is empty"),
        ("summary", r"the guidance of the split 'train' of .* equals the target in every row: the column 'summary'"),
        ("document", r"is read from the column 'document'. source and target of .* must be different columns"),
    ],
)
def test_columns_that_cannot_guide_are_refused(tmp_path, column, message):
    write_rows(tmp_path / "train.jsonl", [{**row, "empty": ""} for row in rows_with_guidance("train", 3)])
    file = str(tmp_path / "train.jsonl")
    with pytest.raises(UserError, match=re.compile(message, re.DOTALL)):
        gsum.read_column(load(file, "train", target="summary"), Data(name=file), "summarisation", column)


def test_a_batch_has_the_guidance_of_its_rows():
    rows = [
        {"input_ids": [0, 5, 2], "labels": [6, 2], "guidance_ids": [0, 7, 8, 2]},
        {"input_ids": [0, 2], "labels": [2], "guidance_ids": [0, 2]},
    ]
    batch = gsum.pad_rows(Padder(1, lambda labels: labels), rows)
    assert batch["guidance_input_ids"].tolist() == [[0, 7, 8, 2], [0, 2, 1, 1]]
    assert batch["guidance_attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["input_ids"].shape == (2, 3)


# Training


@pytest.mark.slow
@pytest.mark.parametrize("sabotage", ["saving:4", "model:0"])
def test_a_killed_training_continues_to_the_same_weights(undisturbed, here, tmp_path, sabotage):
    arguments = ["train", str(here / "tiny.toml"), "--run", str(tmp_path / "run")]
    assert finished(arguments, sabotage=sabotage)[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", undisturbed)


@pytest.mark.slow
def test_two_processes_train_as_one(here, tmp_path):
    assert_two_processes_train_as_one(tmp_path, "model.dropout=0.0")


def task_of(here, *settings):
    settings = recipe.load(str(here / "tiny.toml"), [*settings, "model.dropout=0.0"])
    torch.manual_seed(0)
    return gsum.task(run_of(settings))


def test_the_loss_is_the_objective_and_its_parts_add_up_over_micro_batches(here):
    task = task_of(here)
    task.model.double()
    rows = [task.examples[number] for number in range(5)]
    assert task.terms == ["ce(smoothing=0.1)", "matches(2)"]
    labels = torch.tensor([float(sum(len(row["labels"]) for row in rows)), 5.0])
    whole = task.loss(task.pad(rows), labels)
    batch = task.pad(rows)
    logits = ng.detach(task.model)(**batch).logits
    loss, parts = ng.JointLoss("ce(smoothing=0.1) + 0.5*matches(2)").with_parts(logits, batch["labels"])
    assert whole.total.item() == pytest.approx(loss.item())
    assert {name: value.item() for name, value in whole.parts.items()} == pytest.approx(
        {name: value.item() for name, value in parts.items()}
    )
    expected = torch.autograd.grad(loss, list(task.model.parameters()))
    ng.attach(task.model, "ce(smoothing=0.1) + 0.5*matches(2)")
    shares = [task.loss(task.pad(part), labels) for part in (rows[:2], rows[2:])]
    for name, value in whole.parts.items():
        assert sum(share.parts[name].item() for share in shares) == pytest.approx(value.item())
    total = sum(share.total for share in shares)
    for ours, theirs in zip(torch.autograd.grad(total, list(task.model.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_term_may_have_a_schedule_and_validation_measures_the_end(here):
    task = task_of(here, "objective=ce + matches(2)@from(0.5)")
    batch, counts = task.pad([task.examples[0]]), torch.tensor([9.0, 1.0])
    losses = {}
    for progress in (0.0, 0.75):
        task.objective.progress = progress
        task.objective.refresh_weights()
        losses[progress] = task.loss(batch, counts)
    early, late = losses[0.0], losses[0.75]
    assert early.total.item() == pytest.approx(early.parts["ce"].item())
    assert late.total.item() == pytest.approx(late.parts["ce"].item() + late.parts["matches(2)"].item())
    task.model.eval()
    with torch.no_grad():
        assert task.score()["loss"] == task.score()["loss"] > 0
    assert task.objective.progress == 0.75


def test_the_loop_tells_the_objective_how_far_it_is(here, tmp_path):
    scheduled = [
        "--set",
        "objective=ce + matches(2)@from(0.5)",
        "--set",
        "train.eval_every=0",
        "--set",
        "train.best=last",
    ]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *scheduled]) == 0
    lines = rows_of(tmp_path / "run" / "log.jsonl")
    weights = {line["step"]: value for line in lines for name, value in line.items() if name.startswith("weight/")}
    assert [step for step in sorted(weights) if weights[step] > 0] == [4, 5, 6]


def test_validation_is_the_objective_over_all_rows_at_once(here):
    task = task_of(here)
    task.model.eval()
    settings = recipe.load(
        str(here / "tiny.toml"), ["data.name=" + str(here / "data" / "validation.jsonl"), "train.eval_every=0"]
    )
    rows = read_splits(settings)["train"]
    texts = gsum.make_guidance(rows, settings.data, settings.task, read_system("gsum").options)
    examples, _ = gsum._tokenised(rows, texts, task.tokenizer, Shape.of(settings.data))
    with torch.no_grad():
        whole = task.model(**task.pad([examples[number] for number in range(6)])).loss.item()
        assert task.score()["loss"] == pytest.approx(whole, rel=1e-5)


def test_the_log_has_every_term_and_the_card_says_what_was_trained(undisturbed):
    lines = rows_of(undisturbed / "log.jsonl")
    assert all({"ce(smoothing=0.1)", "matches(2)"} <= set(line) for line in lines if "loss" in line)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    card = (undisturbed / "card.md").read_text()
    assert "objective = `ce(smoothing=0.1) + 0.5*matches(2)`" in card
    assert "train: 24 documents. The guidance is the column 'guidance'" in card.replace("\\", "")


def test_the_last_weights_are_validated_whatever_the_number_of_steps(by_oracle):
    assert [line["step"] for line in rows_of(by_oracle / "log.jsonl") if "eval_loss" in line] == [2, 3]


def test_a_changed_plugin_is_not_continued_with(here, tmp_path, capsys):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import ngramloss as ng\n"
        "def flat(stats, labels):\n    return stats.lse[:, 0] * 0 + 1\n"
        "ng.OBJECTIVES['flat'] = ng.Objective(flat, least_n=None)\n"
    )
    arguments = ["train", "tiny.toml", "--run", str(tmp_path / "run"), "--plugin", str(plugin)]
    arguments += ["--set", "objective=ce + flat", "--set", "train.max_steps=1"]
    assert cli.main(arguments) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    OBJECTIVES._added.clear()
    plugin.write_text(plugin.read_text().replace("+ 1", "+ 2"))
    capsys.readouterr()
    assert cli.main(arguments) == 2
    assert "have changed since it was started:\n  plugin objective flat: " in capsys.readouterr().err


def test_a_changed_guidance_is_not_continued_with(here, tmp_path, capsys):
    rows = {split: rows_of(here / "data" / f"{split}.jsonl") for split in ("train", "validation")}
    for split, of_split in rows.items():
        write_rows(tmp_path / "data" / f"{split}.jsonl", of_split)
    arguments = ["train", "tiny.toml", "--run", str(tmp_path / "run"), "--set", f"data.name={tmp_path / 'data'}"]
    short = [*arguments, "--set", "train.max_steps=4"]
    assert cli.main(short) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    rows["train"][0]["guidance"] = "something else"
    write_rows(tmp_path / "data" / "train.jsonl", rows["train"])
    capsys.readouterr()
    assert cli.main(short) == 2
    said = capsys.readouterr().err
    assert "have changed since it was started:\n  train guidance: " in said
    assert "\n  train tokens: " in said, "what it is made of is known by itself, too"


def test_any_bart_is_a_beginning(here, tmp_path):
    """A saved BART with its tokenizer, in which a word after a space has pieces of its own; a run's folder is complete."""
    tokenizer = tiny_tokenizers.bart_like()
    config = BartConfig(
        vocab_size=len(tokenizer),
        d_model=16,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_position_embeddings=128,
        forced_bos_token_id=0,
    )
    torch.manual_seed(0)
    plain = BartForConditionalGeneration(config)
    plain.save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    settings = [
        "--set",
        f"model.name={tmp_path / 'bart'}",
        "--set",
        "train.max_steps=1",
        "--set",
        "train.learning_rate=0",
    ]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *settings]) == 0
    made = GuidedBart.from_pretrained(tmp_path / "run" / "model")
    for name, weight in plain.state_dict().items():
        assert torch.equal(made.state_dict()[name], weight)
    text = "The cat sat on the mat."
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "model")(text) == tokenizer(text)
    assert generate(here, str(tmp_path / "run"), tmp_path / "texts")[0] == 0


def test_a_trained_model_is_trained_further(undisturbed, here, tmp_path):
    settings = ["--set", f"model.name={undisturbed / 'model'}", "--set", "train.max_steps=1"]
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "more"), *settings]) == 0
    assert (tmp_path / "more" / "model").is_dir()


@pytest.mark.slow
def test_the_demo_learns_and_its_guidance_is_used(tmp_path, monkeypatch, capsys):
    """A part of its steps: below what one gets who knows only how frequent each token is."""
    monkeypatch.chdir(tmp_path)
    short = ["--set", "train.max_steps=80", "--set", "data.limit=1300", "--set", "train.eval_every=40"]
    assert cli.main(["train", "gsum-demo", "--run", "run", *short]) == 0
    losses = [line["eval_loss"] for line in rows_of(tmp_path / "run" / "log.jsonl") if "eval_loss" in line]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    counts = Counter(token for item in newswire.items("train", 1300) for token in tokenizer(item.summary)["input_ids"])
    shares = [count / counts.total() for count in counts.values()]
    assert losses[1] < losses[0]
    assert losses[1] < -sum(share * math.log(share) for share in shares)
    rows = rows_with_guidance("test", 20, lambda number, item: item.document.split(". ")[0])
    write_rows(tmp_path / "data" / "test.jsonl", rows)
    others = [rows[(number + 1) % 20]["guidance"] for number in range(20)]
    write_rows(
        tmp_path / "other" / "test.jsonl", [{**row, "guidance": text} for row, text in zip(rows, others, strict=True)]
    )
    texts = {}
    for name in ("data", "other"):
        out = ["--set", "system=gsum(guidance=guidance)", "--data", name, "--out", f"texts-{name}"]
        assert cli.main(["generate", "run", *out]) == 0
        texts[name] = [row["prediction"] for row in rows_of(tmp_path / f"texts-{name}" / "predictions.jsonl")]
    assert sum(first != second for first, second in zip(texts["data"], texts["other"], strict=True)) >= 10


# Writing


def generate(here, run, out, *arguments):
    code = cli.main(["generate", run, "--out", str(out), *arguments])
    return code, rows_of(out / "predictions.jsonl") if code == 0 else []


def test_a_batch_of_beams_writes_the_texts_of_each_document_alone(undisturbed, here, tmp_path):
    code, together = generate(here, "undisturbed", tmp_path / "together")
    assert code == 0
    assert generate(here, "undisturbed", tmp_path / "alone", "--batch-size", "1") == (0, together)
    assert all(4 <= row["tokens"] <= 12 for row in together)
    saved = json.loads((tmp_path / "together" / "generation.json").read_text())
    assert saved["generation"]["num_beams"] == 3
    assert saved["guidance"]["column"] == "guidance"
    assert saved["engine"]["name"] == "hf"
    assert generate(here, "undisturbed", tmp_path / "sources", "--target", "none") == (0, together), (
        "it reads no targets"
    )


def test_settings_of_the_search_count(undisturbed, here, tmp_path, capsys):
    code, rows = generate(here, "undisturbed", tmp_path / "short", "--set", "generation.max_length=6")
    assert code == 0
    assert max(row["tokens"] for row in rows) <= 6
    assert generate(here, "undisturbed", tmp_path / "short", "--set", "generation.max_length=7")[0] == 2
    assert "made with other settings (generation.max_length: 6 → 7)" in capsys.readouterr().err
    assert generate(here, "undisturbed", tmp_path / "x", "--sample")[0] == 2
    assert (
        "generates the best output for each document. Leave samples, groups and --num-return out"
        in capsys.readouterr().err
    )
    assert generate(here, "undisturbed", tmp_path / "x", "--engine", "graph")[0] == 2
    assert "the engine graph cannot be used" in capsys.readouterr().err


def test_score_and_report_take_the_run(undisturbed, here, tmp_path):
    assert generate(here, "undisturbed", tmp_path / "texts")[0] == 0
    assert cli.main(["score", str(tmp_path / "texts"), "--samples", "20", "--shuffles", "20"]) == 0
    assert cli.main(["report", str(tmp_path / "texts"), "-o", str(tmp_path / "page")]) == 0


def test_the_oracle_never_guides_unless_it_is_named(by_oracle, here, tmp_path, capsys):
    assert generate(here, "oracle", tmp_path / "texts")[0] == 2
    assert (
        "was trained with the guidance of the oracle, which reads the references. Choose the" in capsys.readouterr().err
    )
    assert not (tmp_path / "texts").exists()
    for column in ("guidance", "no-such"):
        code, _ = generate(here, "oracle", tmp_path / column, "--set", f"system=gsum(guidance={column})")
        assert code == (0 if column == "guidance" else 2)
    capsys.readouterr()
    assert generate(here, "oracle", tmp_path / "texts", "--set", "system=gsum(guidance=oracle)")[0] == 0
    assert "the oracle's guidance reads the references, so these outputs are an upper bound" in capsys.readouterr().err
    saved = json.loads((tmp_path / "texts" / "generation.json").read_text())["guidance"]
    assert saved["oracle"] == "reads the references, so the scores are an upper bound"
    again = generate(here, "oracle", tmp_path / "texts", "--set", "system=gsum(guidance=guidance)")
    assert again[0] == 2
    assert "made with other settings (guidance." in capsys.readouterr().err
    without = ("--target", "none", "--set", "system=gsum(guidance=oracle)")
    assert generate(here, "oracle", tmp_path / "x", *without)[0] == 2
    assert (
        f"the guidance of the oracle reads the targets, and {here / 'data'} (test) has no targets."
        in capsys.readouterr().err
    )


def test_an_extractor_guides_with_what_it_takes(by_oracle, extractor, here, tmp_path, monkeypatch, capsys):
    seen = []

    def spy(ids, pad, whole=gsum.pad_guidance):
        seen.extend(ids)
        return whole(ids, pad)

    monkeypatch.setattr(gsum, "pad_guidance", spy)
    assert generate(here, "oracle", tmp_path / "texts", "--set", "system=gsum(extractor=ext)")[0] == 0
    assert "5 of 5 documents are longer than the 96 tokens that ext reads" in capsys.readouterr().err
    code, taken = generate(here, "ext", tmp_path / "taken")
    assert code == 0
    tokenizer = ng.models.loading.load_tokenizer(recipe.Model(name="oracle/model"), lambda: (), "")[0]
    texts = sorted(tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in seen)
    wholes = sorted(" ".join(row["prediction"].split()) for row in taken)
    assert all(text and whole.startswith(text) for text, whole in zip(texts, wholes, strict=True))
    saved = json.loads((tmp_path / "texts" / "generation.json").read_text())["guidance"]
    assert (saved["extractor"], saved["max_source"]) == ("ext", 96)
    assert saved["weights"] == json.loads((tmp_path / "taken" / "generation.json").read_text())["weights"]
    examples = load(str(here / "data"), "test").examples
    guides = [
        example._replace(source=row["prediction"].replace("\n", " "))
        for example, row in zip(examples, taken, strict=True)
    ]
    assert any("\n" in row["prediction"] for row in taken)
    assert saved["fingerprint"] == fingerprint(guides)
    without = ("--target", "none", "--set", "system=gsum(guidance=oracle,extractor=ext)")
    assert generate(here, "oracle", tmp_path / "sources", *without)[1] == rows_of(
        tmp_path / "texts" / "predictions.jsonl"
    )


def test_the_extractor_of_the_recipe_is_checked_before_training_and_used_after_it(extractor, here, tmp_path, capsys):
    def train(named):
        settings = ["--set", f"system=gsum(guidance=oracle,extractor={named})", "--set", "train.max_steps=1"]
        return cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), *settings])

    for named in ("nowhere", "data"):
        assert train(named) == 2
        assert (
            f"{named} is not a run of bertsum_ext. Train one with: ngramloss train bertsum-ext"
            in capsys.readouterr().err
        )
    assert train("ext") == 0
    assert generate(here, str(tmp_path / "run"), tmp_path / "texts")[0] == 0
    assert json.loads((tmp_path / "texts" / "generation.json").read_text())["guidance"]["extractor"] == "ext"


def test_an_extractor_must_be_a_finished_run_of_bertsum_ext(undisturbed, extractor, here, tmp_path, capsys):
    assert generate(here, "undisturbed", tmp_path / "x", "--set", "system=gsum(extractor=undisturbed)")[0] == 2
    assert "undisturbed is not a run of bertsum_ext" in capsys.readouterr().err
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "recipe.toml").write_text((extractor / "recipe.toml").read_text())
    assert generate(here, "undisturbed", tmp_path / "x", "--set", f"system=gsum(extractor={tmp_path / 'half'})")[0] == 2
    assert "half has no model/: its training is not finished" in capsys.readouterr().err
    assert generate(here, "undisturbed", tmp_path / "x", "--set", "system=bertsum_ext")[0] == 2
    assert "system: undisturbed is a run of gsum, not of bertsum_ext." in capsys.readouterr().err


def test_other_commands_refuse_the_model(undisturbed, here, tmp_path, capsys):
    for command in ("generate", "candidates"):
        data = ["--data", str(here / "data"), "--out", str(tmp_path / command)]
        assert cli.main([command, "undisturbed/model", *data]) == 2
        assert "is a guided BART, which needs a guidance beside the document" in capsys.readouterr().err
    assert cli.main(["candidates", "undisturbed", "--out", str(tmp_path / "y")]) == 2
    assert "is a run of gsum, which generates one output for each source" in capsys.readouterr().err


# Mistakes


def test_a_long_guidance_is_cut_and_an_empty_one_is_counted_and_both_are_said(here, tmp_path, capsys):
    for split in ("train", "validation", "test"):
        rows = rows_with_guidance(split, 6, lambda number, item: "many words " * (90 if number == 0 else 1))
        rows[1]["summary"] = "xyzzy"  # shares no word with the document
        write_rows(tmp_path / "data" / f"{split}.jsonl", rows)
    options = ["--set", f"data.name={tmp_path / 'data'}", "--set", "train.max_steps=1"]
    assert cli.main(["train", "tiny.toml", *options, "--run", str(tmp_path / "run")]) == 0
    message = "1 of 6 guidance texts are longer than data.max_source = 96 tokens and lost their end."
    assert f"train: {message}" in capsys.readouterr().err
    assert generate(here, str(tmp_path / "run"), tmp_path / "texts")[0] == 0
    assert message in capsys.readouterr().err
    oracle = ["--set", "system=gsum(guidance=oracle)"]
    assert cli.main(["train", "tiny.toml", *options, *oracle, "--run", str(tmp_path / "oracle")]) == 0
    assert "train: 1 documents have an empty guidance." in capsys.readouterr().err
    assert generate(here, str(tmp_path / "run"), tmp_path / "empty", *oracle)[0] == 0
    assert "1 of 6 documents have an empty guidance." in capsys.readouterr().err
    for split in ("train", "validation"):
        write_rows(tmp_path / "data" / f"{split}.jsonl", [{**row, "summary": "xyzzy"} for row in rows])
    assert cli.main(["train", "tiny.toml", *options, *oracle, "--run", str(tmp_path / "none")]) == 2
    assert "the guidance of every document of the train split is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.max_source=1025", "scratch reads at most 1024 tokens, and the recipe asks for 1025. Lower"),
        ("data.max_target=1025", "scratch reads at most 1024 tokens, and the recipe asks for 1025. Lower"),
        ("data.prefix=a", "data.prefix: is not a setting of gsum. Leave it out."),
        ("data.candidates=x", "data.candidates: is not a setting of gsum. Leave it out."),
        ("objective=ce + rank", "objective: rank needs candidates, which gsum does not have. Leave it out; terms of "),
        ("objective=ce + rewards(2):twin", "objective: rewards(2):twin needs twins, which gsum does not have."),
        ("objective=ce + keep", "objective: keep needs a teacher, which gsum does not have."),
        ("objective=margin", "objective: margin needs a language model of the targets, which gsum does not have."),
        ("objective=ce + nothing", "objective: unknown objective 'nothing'"),
        ("objective=eaft:released", "gsum cannot compute eaft:released: it needs the 20 largest logits"),
        (
            "model.architecture=mbart",
            "guidance needs a BART, such as facebook/bart-large, and model.architecture is mbart.",
        ),
        ("model.lora=2", "model.lora: is not a setting of gsum. Leave it out."),
        ("train.best=ce", "train.best: must be one of loss, last for gsum"),
        ("system=gsum(sentences=0)", "system: sentences: must be at least 1, got 0."),
        ("system=gsum(guidance=no-such)", "is read from the column 'no-such'."),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, setting, sentence):
    assert cli.main(["train", "tiny.toml", "--run", str(tmp_path / "run"), "--set", setting]) == 2
    assert sentence in capsys.readouterr().err


def test_options_of_other_systems_are_those_of_their_training(extractor, undisturbed, here, tmp_path, capsys):
    assert generate(here, "ext", tmp_path / "x", "--set", "system=bertsum_ext(sentences=2)")[0] == 2
    assert "is a run of bertsum_ext, which keeps the options of its training" in capsys.readouterr().err
