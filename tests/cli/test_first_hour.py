"""The first hour on one's own file: train, generate, score, report, and every command that is suggested on the way."""

import csv
import re
import shlex
from pathlib import Path

import pytest
import transformers as hf
from models import TINY_MODEL

from ngramloss import cli
from ngramloss.data import has_split, newswire
from ngramloss.recipe import Data

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

RECIPE = f"""
base = "demo"
objective = "ce + matches(2)"
[data]
name = "mine.csv"
max_source = 96
max_target = 32
{TINY_MODEL}
[train]
max_steps = 2
"""


def write_rows(path, split, count):
    """Rows with a header that is found by itself."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["article", "highlights"])
        writer.writerows((item.document, item.summary) for item in newswire.items(split, count))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder of a new user, who works in it: one CSV file and a recipe that names it."""
    write_rows(tmp_path / "mine.csv", "train", 60)
    (tmp_path / "tiny.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, command):
    """Run a command as it is written in a terminal. Returns what it prints, and what it says on the way."""
    program, *arguments = shlex.split(command)
    assert program == "ngramloss"
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured


def suggested(said):
    return re.findall(r"^next: (.*)$", said, re.MULTILINE)


def test_a_next_command_is_printed_in_one_place():
    """Whoever suggests another command adds it to the test below."""
    source = Path(cli.__file__).parent.parent
    places = [path.name for path in source.rglob("*.py") for _ in re.findall(r"\bnext: ", path.read_text())]
    assert sorted(places) == ["new.py", "train.py"]  # that of new is tested in test_new.py


def two_files(here):
    write_rows(here / "dev.csv", "validation", 6)
    return "--set data.name=train=mine.csv,validation=dev.csv"


def three_files(here):
    write_rows(here / "dev.csv", "validation", 6)
    write_rows(here / "test.csv", "test", 6)
    return "--set data.name=train=mine.csv,validation=dev.csv,test=test.csv"


@pytest.mark.parametrize(
    ("data", "command"),
    [
        ("--set train.eval_every=0", "ngramloss generate 'my runs/a' --split train --limit 20"),
        ("--set data.validation_fraction=0.1", "ngramloss generate 'my runs/a' --split validation"),
        ("--set train.eval_every=0 --set data.test_fraction=0.1", "ngramloss generate 'my runs/a'"),
        (
            "--set data.validation_fraction=0.1 --set data.test_fraction=0.1 --set data.id=none --on-bad-row skip",
            "ngramloss generate 'my runs/a'",
        ),
        (two_files, "ngramloss generate 'my runs/a' --split validation"),
        (three_files, "ngramloss generate 'my runs/a'"),
        ("--set data.name=newswire --set data.limit=60", "ngramloss generate 'my runs/a'"),
    ],
)
def test_the_next_command_works(here, capsys, data, command):
    options = data if isinstance(data, str) else data(here)
    again = f"ngramloss train tiny.toml --run 'my runs/a' {options}"
    said = run(capsys, again).err
    assert suggested(said) == [command]
    assert ("the data have no test split, so the next command generates for the training split" in said) == (
        "--split train" in command
    )
    assert suggested(run(capsys, again).err) == [command]  # the run is finished
    limit = " --limit 3" if "--limit" not in command else ""
    assert run(capsys, command + limit).out == "my runs/a/predictions.jsonl\n"


def test_rows_that_were_trained_on_are_not_held_out_afterwards(here, capsys):
    run(capsys, "ngramloss train tiny.toml --run a --set data.validation_fraction=0.1")
    assert cli.main(["generate", "a", "--set", "data.test_fraction=0.1"]) == 2
    assert (
        "error: a was trained with data.test_fraction = 0. With another value, some held-out rows would be rows that "
        "it was trained on. Leave data.test_fraction out, or choose other data with --data."
    ) in capsys.readouterr().err
    assert cli.main(["generate", "a"]) == 2
    assert "mine.csv is a single file, so it has no split 'test'" in capsys.readouterr().err


def test_what_is_held_out_is_of_the_runs_own_data(here, capsys):
    run(capsys, "ngramloss train tiny.toml --run a --set data.test_fraction=0.1 --set train.eval_every=0")
    write_rows(here / "test.csv", "test", 3)
    run(capsys, "ngramloss generate a --data train=mine.csv,test=test.csv --out b")
    assert len((here / "b" / "predictions.jsonl").read_text().splitlines()) == 3


def test_a_finished_run_does_not_need_the_model_that_it_began_with(here, capsys):
    few = "--set train.eval_every=0 --set train.max_steps=1"
    run(capsys, f"ngramloss train tiny.toml --run a {few}")
    again = f"ngramloss train tiny.toml --run b {few} --set model.name=a/model"
    run(capsys, again)
    (here / "a" / "model").rename(here / "elsewhere")
    assert "b is already finished." in run(capsys, again).err


def test_data_sets_that_are_known_have_a_test_split():
    """The hub need not be asked, and cannot be."""
    assert has_split(Data(name="cnndm"), "test")
    assert not has_split(Data(name="owner/unknown"), "test")
    assert has_split(Data(name="owner/unknown"), "train")


def test_what_happens_to_the_data_is_said_before_training_in_the_card_and_on_the_page(here, capsys):
    """Three rows are there twice, one document is long, one test row is trained on."""
    with (here / "mine.csv").open() as file:
        header, *rows = csv.reader(file)
    long = [rows[0][0] * 200, "Long."]
    with (here / "mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows, *rows[:3], long])
    with (here / "test.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, rows[5], ["Another text.", "Another."], ["", "bad"]])
    write_rows(here / "dev.csv", "validation", 6)
    name = "train=mine.csv,validation=dev.csv,test=test.csv"
    settings = (
        f"--set data.name={name} --set data.validation_limit=4 --set data.max_source=600 --set data.max_target=200"
    )
    said = run(capsys, f"ngramloss train tiny.toml --run a {settings}").err
    expected = [
        "train: 64 rows; 1 source cut to 600 tokens (data.max_source); 3 repeated rows.",
        "validation: 4 rows; the rest not used (data.validation_limit = 4); no text cut.",
        "test: 2 rows; 1 bad row skipped.",
        "warning: the training data contain 1 of the 2 test rows (ids 1), so scores on them say little about new texts. "
        "Remove them from one of the two splits.",
    ]
    lines = said.splitlines()
    start = lines.index(expected[0])
    assert lines[start : start + 4] == expected
    card = (here / "a" / "card.md").read_text().replace("\\", "")
    assert all(f"* {sentence}" in card for sentence in expected)
    run(capsys, "ngramloss generate a --on-bad-row skip")
    run(capsys, "ngramloss report a -o page")
    page = (here / "page" / "index.html").read_text()
    assert "<h3>Training data</h3>" in page
    assert all(sentence in page for sentence in expected)
    assert f'<p class="note" dir="auto">{expected[-1]}</p>' in page


def test_the_limit_of_the_demo_is_not_a_limit_of_other_data():
    from ngramloss import recipe
    from ngramloss.data import load

    assert recipe.load("demo", ["data.name=mine.csv"]).data.limit == 0
    assert len(load("newswire", "train", limit=recipe.load("demo").data.limit).examples) == 24_000


def test_a_test_split_that_cannot_be_read_does_not_stop_a_training(here, capsys):
    write_rows(here / "dev.csv", "validation", 6)
    (here / "test.csv").write_text("headline\nno texts here\n")
    said = run(
        capsys, "ngramloss train tiny.toml --run a --set data.name=train=mine.csv,validation=dev.csv,test=test.csv"
    ).err
    assert (
        "the test split was not compared with the training data: cannot find the source and the target column" in said
    )


@pytest.mark.parametrize("data", ["mine.csv", "not-there.csv"])  # the data are not even looked at
@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("train", "tiny.toml --run a --set model.name=bert --set data.name={data}"),
        ("generate", "bert --data {data} --split train --out a"),
        ("candidates", "bert --data {data} --out a"),
    ],
)
def test_a_model_that_writes_no_text_is_refused_before_data_are_read(here, capsys, verb, options, data):
    import models
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(**models.BERT)).save_pretrained(here / "bert")
    capsys.readouterr()
    assert cli.main(shlex.split(f"{verb} {options.format(data=data)}")) == 2
    assert capsys.readouterr().err == (
        f"error: bert writes no text (its type is bert): ngramloss {verb} needs an encoder-decoder, such as "
        "facebook/bart-base, or a decoder-only model, such as HuggingFaceTB/SmolLM2-135M-Instruct.\nsee: ngramloss docs train#models\n"
    )
    assert not (here / "a").exists()


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (hf.ViTConfig(**SMALL), "writes no text (its type is vit): ngramloss train needs"),
        (hf.WhisperConfig(), "writes no text from text (its type is whisper): ngramloss train needs"),
        (
            hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(hf.ViTConfig(**SMALL), hf.GPT2Config()),
            "writes no text from text (its type is vision-encoder-decoder)",
        ),
        (hf.Wav2Vec2Config(), "writes no text (its type is wav2vec2)"),
        (
            hf.LlamaConfig(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
            "other is quantised (bitsandbytes), and ngramloss train needs whole weights. Name the model before",
        ),
    ],
    ids=lambda config: getattr(config, "model_type", ""),
)
def test_other_kinds_of_models_are_refused_before_data_are_read(here, capsys, config, said):
    config.save_pretrained(here / "other")
    options = "tiny.toml --run a --set model.name=other --set data.name=not-there.csv"
    assert cli.main(["train", *shlex.split(options)]) == 2
    assert said in capsys.readouterr().err
    assert not (here / "a").exists()


def test_a_refused_model_does_not_delete_an_earlier_run(here, capsys):
    import models
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(**models.BERT)).save_pretrained(here / "bert")
    run(capsys, "ngramloss train tiny.toml --run a --set train.eval_every=0 --set train.max_steps=1")
    (here / "a" / "model").rename(here / "elsewhere")  # not finished
    assert cli.main(["train", "tiny.toml", "--run", "a", "--fresh", "--set", "model.name=bert"]) == 2
    assert (here / "a" / "checkpoints" / "checkpoint-1").is_dir()


@pytest.mark.parametrize(
    ("objective", "remarked"), [("matches(1)", True), ("0*ce + matches(1)", False), ("dft + matches(1)", False)]
)
def test_an_objective_without_a_term_for_each_token_gets_one_remark(here, capsys, objective, remarked):
    said = run(capsys, f"ngramloss train tiny.toml --run a --set train.eval_every=0 --set objective='{objective}'").err
    remark = (
        "matches(1) has no term for each token, such as ce. N-gram terms are meant to be added to ce: alone, they "
        "teach little that the model cannot do already. Train on ce + matches(1). To silence this warning, write "
        "0*ce + matches(1)."
    )
    assert said.count(remark) == said.count("has no term for each token") == int(remarked)


def test_the_first_hour_on_ones_own_csv(here, capsys):
    """As the README and docs/start.md go, with columns of one's own and nothing that is trained long enough."""
    rows = [(item.document, item.summary) for item in newswire.items("train", 300)]
    with (here / "mine.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("Ticket text", "Short version"), *rows])
    small = "--set data.max_source=96 --set data.max_target=32 --set generation.max_length=32 --set train.max_steps=2"
    train = f"ngramloss train demo --run runs/mine --set data.name=mine.csv {small}"
    columns = '--source "Ticket text" --target "Short version"'
    parts = "--set data.validation_fraction=0.1 --set data.test_fraction=0.1"

    assert cli.main(shlex.split(train)[1:]) == 2
    assert "--source COLUMN --target COLUMN on the command line" in capsys.readouterr().err
    assert cli.main(shlex.split(f"{train} {columns}")[1:]) == 2
    assert "hold a part of the training split out with data.validation_fraction=0.1" in capsys.readouterr().err
    said = run(capsys, f"{train} {columns} {parts}").err
    assert re.search(r"train: 240 rows; .*\nvalidation: 30 rows; .*\ntest: 30 rows\.$", said, re.MULTILINE)

    (following,) = suggested(said)
    assert run(capsys, following).out == "runs/mine/predictions.jsonl\n"
    baseline = f"ngramloss generate lead-1 --data mine.csv --out lead {columns} --set data.test_fraction=0.1"
    assert run(capsys, baseline).out == "lead/predictions.jsonl\n"
    table = run(capsys, "ngramloss score lead runs/mine --samples 20 --shuffles 20").out
    assert re.search(r"^system .*rouge1.*\nlead .*\nmine ", table)
    assert run(capsys, "ngramloss report lead runs/mine -o page --samples 20 --shuffles 20").out == "page/index.html\n"
    page = (here / "page" / "index.html").read_text()
    assert "2 systems on 30 documents" in page
    assert "train: 240 rows;" in page
    assert "<bdi>lead-1</bdi>: <span" not in page  # it was not trained
