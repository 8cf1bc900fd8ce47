"""The system parallel: it trains, is killed and continued, learns from a teacher's texts, and writes by every command."""

import json
import shutil

import pytest
import tiny_multilingual
import tiny_tokenizers
import torch
from commands import assert_equal_runs, assert_two_processes_train_as_one, finished
from tiny_encoders import MODEL, STEPS
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import ngramloss as ng
from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.training.system_registry import run_of
from ngramloss_systems import parallel

pytestmark = pytest.mark.usefixtures("own_cache")

PARALLEL = f"""
system = "parallel(inputs=random,spread=6)"
objective = "ce@until(0.5) + bag(2)@from(0.5)"
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 24
{MODEL}decoder_layers = 1
{STEPS}best = "loss"
"""


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def split_rows(split, count):
    return [
        {"id": f"{split}-{number}", "document": item.document, "summary": item.summary}
        for number, item in enumerate(newswire.items(split, count))
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("place")
    for split, count in (("train", 24), ("validation", 6), ("test", 5)):
        write_rows(folder / "data" / f"{split}.jsonl", split_rows(split, count))
    name = json.dumps(str(folder / "data"))
    (folder / "tiny.toml").write_text(PARALLEL.replace('"data"', name))
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def train(run, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return cli.main(["train", "tiny.toml", "--run", str(run), *options])


@pytest.fixture(scope="module")
def undisturbed(place):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert train(place / "undisturbed") == 0
    return place / "undisturbed"


@pytest.fixture(scope="module")
def teacher(place):
    """An autoregressive run, and its texts of the training split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert train(place / "teacher", 'system=""', "objective=ce", "train.best=ce", "train.max_steps=1") == 0
        short = ["--set", "generation.num_beams=1", "--set", "generation.min_length=8"]
        assert cli.main(["generate", "teacher", "--split", "train", "--out", "taught", *short]) == 0
    return place / "taught"


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
    assert_two_processes_train_as_one(tmp_path, "model.dropout=0.0", "system=parallel(spread=6)")


def test_the_log_has_every_part_and_the_scores_of_each_validation(undisturbed):
    lines = rows_of(undisturbed / "log.jsonl")
    assert all({"ce", "bag(2)", "length"} <= set(line) for line in lines if "loss" in line)
    validated = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in validated] == [2, 4, 6]
    assert all(0 <= line["eval_repeats"] <= 1 and line["eval_score"] >= 0 for line in validated)
    card = (undisturbed / "card.md").read_text().replace("\\", "")
    assert "train: 24 targets of" in card


def task_of(*settings):
    settings = recipe.load("tiny.toml", ["model.dropout=0.0", "system=parallel(spread=6)", *settings])
    torch.manual_seed(0)
    return parallel.task(run_of(settings))


def test_labels_are_the_bare_tokens_and_micro_batches_add_up(here):
    task = task_of("objective=ce + matches(2)")
    tokenizer, rows = task.tokenizer, task.examples
    for number, row in enumerate(split_rows("train", 24)):
        assert rows[number]["labels"].tolist() == tokenizer(row["summary"], add_special_tokens=False)["input_ids"][:22]
    task.model.double()
    chosen = [rows[number] for number in range(5)]
    counts = torch.tensor([float(sum(len(row["labels"]) for row in chosen)), 5.0])
    parameters = [weight for weight in task.model.parameters() if weight.requires_grad]

    def gradients(*batches):
        for weight in parameters:
            weight.grad = None
        totals = [task.loss(task.pad(batch), counts) for batch in batches]
        sum(found.total for found in totals).backward()
        return totals, [weight.grad.clone() for weight in parameters if weight.grad is not None]

    (whole,), expected = gradients(chosen)
    shares, ours = gradients(chosen[:2], chosen[2:])
    assert task.terms == list(whole.parts) == ["ce", "matches(2)", "length"]
    for name, value in whole.parts.items():
        assert sum(share.parts[name].item() for share in shares) == pytest.approx(value.item())
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_lengths_beyond_the_head_are_said_with_what_to_raise(here, tmp_path, capsys):
    assert train(tmp_path / "run", "system=parallel(spread=1)", "train.max_steps=1", "data.max_target=99") == 0
    said = capsys.readouterr().err
    assert "sources are longer than data.max_source = 96 tokens" in said
    assert "of 24 targets are longer or shorter than the length head knows (±1 tokens): it learns" in said
    wanted = said.split('Raise spread: system = "parallel(spread=')[1].split(")")[0]
    assert train(tmp_path / "more", f"system=parallel(spread={wanted})", "train.max_steps=1", "data.max_target=99") == 0
    said = capsys.readouterr().err
    assert "train: 24 targets of" in said
    assert "of 24 targets are longer" not in said


def test_a_collapsed_training_is_said_in_its_second_half_alone(here, monkeypatch, caplog):
    task = task_of()
    monkeypatch.setattr(task.model, "final", lambda tokens: [5] * len(tokens))
    task.model.eval()
    for step, warned in ((2, False), (5, True)):
        task.change(step, 6, None)
        with torch.no_grad():
            task.score()
        assert ("the training has collapsed" in caplog.text) == warned


def test_a_run_is_trained_further_with_the_same_inputs(undisturbed, here, tmp_path, capsys):
    named = f"model.name={undisturbed / 'model'}"
    assert train(tmp_path / "more", named, "train.max_steps=1") == 0
    assert train(tmp_path / "other", named, "system=parallel(inputs=copy,spread=6)") == 2
    assert "was trained with inputs=random and spread=6. Use the same." in capsys.readouterr().err


# Bases


@pytest.mark.parametrize("architecture", ["marian", "mbart", "pegasus", "m2m100", "t5"])
def test_any_architecture_is_made_from_scratch(here, tmp_path, architecture):
    settings = [f"model.architecture={architecture}", "system=parallel(spread=6)", "train.max_steps=1"]
    assert train(tmp_path / "run", *settings) == 0
    assert generate(tmp_path / "run", tmp_path / "texts")[0] == 0


@pytest.mark.parametrize("family", ["t5", "mbart", "mbart50", "m2m100"])
def test_any_encoder_decoder_is_a_beginning(here, tmp_path, family):
    if family == "t5":
        tokenizer = tiny_tokenizers.t5_like()
        config = T5Config(
            vocab_size=len(tokenizer), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        T5ForConditionalGeneration(config).save_pretrained(tmp_path / "base")
        tokenizer.save_pretrained(tmp_path / "base")
        settings = []
    else:
        tiny_multilingual.model_folder(family, tmp_path / "base")
        source, target = tiny_multilingual.LANGUAGES[family]
        settings = [f"data.source_language={source}", f"data.target_language={target}"]
        settings += ["data.max_source=60", "data.source=document", "data.target=summary"]
    settings += [f"model.name={tmp_path / 'base'}", "system=parallel(spread=6)", "train.max_steps=2"]
    assert train(tmp_path / "run", *settings) == 0
    assert cli.main(["generate", str(tmp_path / "run"), "--out", str(tmp_path / "texts")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert saved["model_type"] == "parallel"
    assert sum(saved["around"]) == tokenizer.num_special_tokens_to_add()


def test_a_decoder_only_model_is_refused_with_what_to_do(here, tmp_path, capsys):
    tokenizer = tiny_tokenizers.gpt_like()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    assert train(tmp_path / "run", f"model.name={tmp_path / 'base'}") == 2
    said = capsys.readouterr().err
    assert "parallel needs an encoder-decoder, such as BART, mBART, Marian or T5, and" in said
    assert 'Train it as it is, without system, with objective = "ce + matches(2,3,4)".' in said


# Targets of a teacher


def test_a_teachers_texts_are_the_targets(teacher, here):
    task = task_of(f"system=parallel(spread=6,targets={teacher})")
    assert task.tokenizer.get_vocab() == task_of().tokenizer.get_vocab()
    texts = {row["id"]: row["prediction"] for row in rows_of(teacher / "predictions.jsonl")}
    for number, row in enumerate(split_rows("train", 24)):
        expected = task.tokenizer(texts[row["id"]], add_special_tokens=False)["input_ids"][:22]
        assert task.examples[number]["labels"].tolist() == expected
    validation = task.rows["validation"][0]["labels"].tolist()
    bare = task.tokenizer(split_rows("validation", 1)[0]["summary"], add_special_tokens=False)["input_ids"]
    assert validation == bare[:22], "a validation compares with the references"


def test_a_run_is_not_continued_with_other_texts_of_a_teacher(teacher, here, tmp_path, capsys):
    folder = tmp_path / "taught"
    shutil.copytree(teacher, folder)
    settings = [f"system=parallel(spread=6,targets={folder})", "train.max_steps=4"]
    assert train(tmp_path / "run", *settings) == 0
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "checkpoint-4")
    rows = rows_of(folder / "predictions.jsonl")
    rows[3]["prediction"] = "Another text."
    write_rows(folder / "predictions.jsonl", rows)
    capsys.readouterr()
    assert train(tmp_path / "run", *settings) == 2
    assert "have changed since it was started:\n" in (said := capsys.readouterr().err)
    assert "  targets: " in said


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"fingerprint": "0" * 16}, r"has 24 rows of"),
        ({"split": "test"}, "of the split 'test' of"),
        ("blank", "1 texts in taught are blank, such as that of train-2. Leave these rows out with"),
        ("short", "taught has no text for 1 rows, such as train-23. Make them with"),
        ("part", "taught has no finished predictions with their settings. Make them with: ngramloss generate TEACHER"),
    ],
)
def test_texts_of_a_teacher_that_do_not_fit_are_refused(teacher, here, tmp_path, monkeypatch, capsys, change, sentence):
    shutil.copytree(teacher, tmp_path / "taught")
    monkeypatch.chdir(tmp_path)
    shutil.copy(here / "tiny.toml", tmp_path)
    file, about = tmp_path / "taught" / "predictions.jsonl", tmp_path / "taught" / "generation.json"
    rows = rows_of(file)
    if isinstance(change, dict):
        about.write_text(json.dumps(json.loads(about.read_text()) | change))
    elif change == "blank":
        rows[2]["prediction"] = " "
    elif change == "short":
        rows.pop()
    write_rows(file, rows)
    if change == "part":
        file.rename(tmp_path / "taught" / "predictions-0.jsonl")
    settings = ["system=parallel(spread=6,targets=taught)", "train.max_steps=1"]
    assert train("run", *settings) == 2
    assert sentence in capsys.readouterr().err
    if change == "blank":
        assert train("run", *settings, "data.on_bad_row=skip") == 0
        assert "skipped 1 rows whose text in taught is blank." in (said := capsys.readouterr().err)
        assert "train: 23 targets" in said


# Writing


def generate(run, out, *arguments):
    code = cli.main(["generate", str(run), "--out", str(out), *arguments])
    return code, rows_of(out / "predictions.jsonl") if code == 0 else []


def test_texts_do_not_depend_on_their_batch_and_their_settings_are_saved(undisturbed, here, tmp_path, capsys):
    code, together = generate("undisturbed", tmp_path / "together")
    assert code == 0
    assert generate("undisturbed", tmp_path / "alone", "--batch-size", "1") == (0, together)
    saved = json.loads((tmp_path / "together" / "generation.json").read_text())
    assert saved["engine"]["name"] == "hf"
    assert saved["system"] == {
        "name": "parallel",
        "lengths": 5,
        "passes": 1,
        "remove_repeats": True,
        "length_offset": 0,
    }
    raw = ("--set", 'system="parallel(remove_repeats=false)"')
    assert generate("undisturbed", tmp_path / "together", *raw)[0] == 2
    assert "made with other settings (system.remove_repeats: True → False)" in capsys.readouterr().err
    code, rows = generate("undisturbed", tmp_path / "raw", *raw)
    assert code == 0
    assert sum(row["tokens"] for row in rows) > sum(row["tokens"] for row in together)
    texts = ng.TextGenerator("undisturbed")({"document": [row["document"] for row in split_rows("test", 5)]})
    assert texts["prediction"] == [row["prediction"] for row in together]


def test_options_that_are_not_given_are_those_of_the_training(here, tmp_path):
    assert train(tmp_path / "run", "system=parallel(lengths=2,length_offset=1,spread=6)", "train.max_steps=1") == 0
    assert generate(tmp_path / "run", tmp_path / "texts", "--set", "system=parallel(lengths=3)")[0] == 0
    saved = json.loads((tmp_path / "texts" / "generation.json").read_text())["system"]
    assert (saved["lengths"], saved["length_offset"]) == (3, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--set", "generation.num_beams=4"], "whose search has only generation.engine, generation.precision"),
        (["--sample"], "leave other options of a search out"),
        (["--num-return", "2"], "leave other options of a search out"),
        (
            ["--set", "system=parallel(spread=9)"],
            "is a run of parallel, which keeps the spread of its training. Only l",
        ),
        (["--set", "system=gsum"], "undisturbed is a run of parallel, not of gsum."),
        (["--engine", "graph"], "the engine graph cannot be used: it serves"),
    ],
)
def test_searches_that_it_does_not_have_are_refused(undisturbed, here, tmp_path, capsys, arguments, sentence):
    assert generate("undisturbed", tmp_path / "x", *arguments)[0] == 2
    assert sentence in capsys.readouterr().err


def test_passes_need_a_model_that_was_trained_for_them(undisturbed, here, tmp_path, capsys):
    assert generate("undisturbed", tmp_path / "x", "--set", "system=parallel(passes=3)")[0] == 0
    assert train(tmp_path / "run", "system=parallel(spread=6,passes=2)") == 2
    assert "only a model learns that was trained with inputs=random; this one was trained with" in (
        capsys.readouterr().err
    )


def test_candidates_are_the_texts_of_several_lengths(undisturbed, here, tmp_path, capsys):
    options = ["--split", "validation", "--count", "4", "--out", str(tmp_path / "c")]
    assert cli.main(["candidates", "undisturbed", *options]) == 0
    assert generate("undisturbed", tmp_path / "best", "--split", "validation")[0] == 0
    best = [row["prediction"] for row in rows_of(tmp_path / "best" / "predictions.jsonl")]
    rows = rows_of(tmp_path / "c" / "candidates.jsonl")
    assert [row["candidates"][0] for row in rows] == best
    assert all(1 < len(row["candidates"]) <= 4 for row in rows)
    assert cli.main(["candidates", "undisturbed", "--count", "14", "--out", str(tmp_path / "e")]) == 2
    assert "14 texts were asked for, and the length head knows 13 lengths. Ask for fewer." in capsys.readouterr().err
    assert cli.main(["candidates", "undisturbed", "--search", "groups", "--out", str(tmp_path / "d")]) == 2
    assert "whose search has neither beams nor samples. Leave --search and its options out" in capsys.readouterr().err


def test_score_report_and_publish_take_the_run(undisturbed, here, tmp_path, capsys):
    assert generate("undisturbed", tmp_path / "texts")[0] == 0
    assert cli.main(["score", str(tmp_path / "texts"), "--samples", "20", "--shuffles", "20"]) == 0
    assert cli.main(["report", str(tmp_path / "texts"), "-o", str(tmp_path / "page")]) == 0
    raw = tmp_path / "raw"
    assert generate("undisturbed", raw, "--set", "system=parallel(lengths=1)")[0] == 0
    capsys.readouterr()
    assert cli.main(["score", str(tmp_path / "texts"), str(raw), "--samples", "20", "--shuffles", "20"]) == 0
    found = capsys.readouterr()
    assert "decoded differently" in found.out + found.err
    assert "lengths=1,passes=1" in found.out + found.err
    assert cli.main(["publish", "undisturbed", "-o", str(tmp_path / "hub")]) == 2
    assert "whose model only ngramloss loads" in capsys.readouterr().err
    assert cli.main(["generate", "undisturbed/model", "--data", "data", "--out", str(tmp_path / "y")]) == 2
    assert "is a parallel model, which predicts all tokens at once. To generate, give the folder of its run" in (
        capsys.readouterr().err
    )


STUDY = """title = "What do n-grams gain in parallel?"
recipe = "tiny.toml"
objectives = ["ce", "ce@until(0.5) + bag(2)@from(0.5)"]
[seeds]
confirmation = [1, 2]
[decodings]
greedy = []
raw = ['system="parallel(remove_repeats=false)"']
[[set]]
name = "news"
primary = "rouge2"
decoding = "greedy"
set = ["train.eval_every=0", "train.best=last", "train.max_steps=2"]
"""


@pytest.mark.slow
def test_a_study_compares_objectives_and_decodings(here, capsys):
    (here / "study.toml").write_text(STUDY)
    assert cli.main(["study", "study.toml", "--runs", "studied"]) == 0, capsys.readouterr().err
    said = sorted(path.parent.name for path in (here / "studied").rglob("generation.json"))
    assert len(said) == 8


# Mistakes


def test_an_empty_target_is_named(here, monkeypatch, tmp_path, capsys):
    whole = ng.tokens.tokenise

    def without_tokens(examples, key, tokenizer, shape):
        return whole(
            [example._replace(target="") for example in examples[:1]] + examples[1:], key + "x", tokenizer, shape
        )

    monkeypatch.setattr(ng.tokens, "tokenise", without_tokens)
    assert train(tmp_path / "run", "train.max_steps=1") == 2
    assert (
        "1 targets of the train split have no tokens, so there is nothing to predict: the rows with the ids train-0"
        in (capsys.readouterr().err)
    )


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("data.max_source=1025", "scratch reads at most 1024 tokens, and the recipe asks for 1025. Lower"),
        ("generation.num_beams=2", "generation.num_beams: is not a setting of parallel, whose search reads engine"),
        ("objective=ce + rank", "objective: rank needs candidates, which parallel does not have."),
        ("objective=ce + keep", "objective: keep needs a teacher, which parallel does not have."),
        ("train.best=ce", "train.best: must be one of score, loss, last for parallel"),
        ("system=parallel(inputs=all)", "system: inputs: must be one of copy, mask, random"),
        ("system=parallel(targets=nowhere)", "nowhere has no finished predictions with their settings. Make them with"),
        ("model.architecture=prophetnet", "cannot run in parallel"),
    ],
)
def test_mistakes_are_sentences(here, tmp_path, capsys, setting, sentence):
    assert train(tmp_path / "run", setting, "model.copying=false") == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.slow
def test_the_demo_writes_what_the_documents_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    short = ["--set", "train.max_steps=300", "--set", "data.limit=4000", "--set", "train.eval_every=100"]
    assert cli.main(["train", "parallel-demo", "--run", "run", *short]) == 0
    scores = [line["eval_score"] for line in rows_of(tmp_path / "run" / "log.jsonl") if "eval_score" in line]
    assert scores[-1] > max(10, scores[0])
    assert cli.main(["generate", "run", "--limit", "20"]) == 0
    assert len(rows_of(tmp_path / "run" / "predictions.jsonl")) == 20
