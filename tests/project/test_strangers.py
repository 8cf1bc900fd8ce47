"""Folders and recipes of strangers are data: none of their code runs unless the command line of this run says so."""

import json
import os
import sys

import pytest
import tiny_tokenizers
import torch
from in_process import InProcess

from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.models import loading
from ngramloss.models.remote_code import allow_remote_code
from ngramloss.recipe import Model
from ngramloss.training import checkpoints

pytestmark = [pytest.mark.usefixtures("own_cache"), pytest.mark.slow]

CODE = """
import os
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast
open(os.environ["MARKER"], "a").write("ran")
class Mine(BartConfig):
    model_type = "mine"
class MineForWriting(BartForConditionalGeneration):
    config_class = Mine
class MineTokenizer(PreTrainedTokenizerFast):
    pass
"""
SMALL = Model(
    name="scratch", width=16, heads=2, encoder_layers=1, decoder_layers=1, feed_forward=16, vocabulary=400, dropout=0.0
)
CONSENT = (
    r"asks to run code that comes with the model \(model\.trust_remote_code\)\. A setting cannot give that consent: if you trust the model, "
    r"remove the key and use --trust-remote-code on the command line\."
)
ASKED = CONSENT.replace("\\", "")


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """What a stranger's code writes when it runs."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    yield tmp_path / "marker"
    forget()


def plant(folder, *, own_kind=True):
    """A model's folder whose configuration points to code in it, and which cannot be read without that code if it is of its own kind."""
    loading.from_scratch(SMALL, tiny_tokenizers.ours()).save_pretrained(folder)
    tiny_tokenizers.ours().save_pretrained(folder)
    (folder / "planted.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "planted.Mine", "AutoModelForSeq2SeqLM": "planted.MineForWriting"}
    config["model_type"] = "mine" if own_kind else "bart"
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plant_in_tokenizer(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(
        json.dumps(
            json.loads(path.read_text())
            | {"tokenizer_class": "MineTokenizer", "auto_map": {"AutoTokenizer": [None, "planted.MineTokenizer"]}}
        )
    )
    return folder


@pytest.fixture
def planted(tmp_path):
    return plant(tmp_path / "planted")


@pytest.fixture
def data(tmp_path):
    for split in ("train", "test"):
        rows = [json.dumps({"document": item.document, "summary": item.summary}) for item in newswire.items(split, 4)]
        (tmp_path / "data" / f"{split}.jsonl").parent.mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path / "data"


def written_recipe(path, model, data, trust="trust_remote_code = true"):
    path.write_text(f"""
objective = "ce"
[data]
name = "{data}"
max_source = 32
max_target = 16
[model]
name = "{model}"
{trust}
[train]
max_steps = 1
warmup_steps = 0
batch_size = 2
accumulate = 1
eval_every = 0
[generation]
num_beams = 1
max_length = 8
""")
    return path


@pytest.fixture
def strange_run(tmp_path, data):
    """A finished run's folder as a stranger may have made it, with predictions."""
    folder = tmp_path / "strange"
    plant(folder / "model")
    written_recipe(folder / "recipe.toml", "scratch", data)
    (folder / "predictions.jsonl").write_text('{"id": "1", "prediction": "the cat sat"}\n')
    (folder / "references.jsonl").write_text('{"id": "1", "reference": "the cat sat", "document": "A cat sat."}\n')
    return folder


def ran(*arguments):
    return cli.main([str(one) for one in arguments])


# A recipe gives no consent


def test_a_recipe_that_asks_to_run_code_is_refused_by_train(planted, data, tmp_path, marker, capsys):
    file = written_recipe(tmp_path / "own.toml", planted, data)
    assert ran("train", file, "--run", tmp_path / "run") == 2
    assert f"error: recipe {file} {ASKED}" in capsys.readouterr().err
    assert not marker.exists()
    assert not (tmp_path / "run").exists()


def test_not_even_with_the_flag_may_a_recipe_ask(planted, data, tmp_path, marker, capsys):
    file = written_recipe(tmp_path / "own.toml", planted, data)
    assert ran("train", file, "--run", tmp_path / "run", "--trust-remote-code") == 2
    assert not marker.exists()


def test_a_base_that_asks_is_refused_whatever_is_based_on_it(tmp_path):
    (tmp_path / "base.toml").write_text("[model]\ntrust_remote_code = true\n")
    (tmp_path / "own.toml").write_text('base = "base.toml"\n[model]\ntrust_remote_code = false\n')
    with pytest.raises(UserError, match=rf"recipe .*base\.toml {CONSENT}"):
        recipe.load(str(tmp_path / "own.toml"))


@pytest.mark.parametrize("value", ["true", "1", "yes", '"false"'])
def test_an_override_gives_no_consent(value):
    with pytest.raises(UserError, match=f"^--set {CONSENT}"):
        recipe.load("demo", [f"model.trust_remote_code={value}"])
    with pytest.raises(UserError, match=f"^--set {CONSENT}"):
        recipe.changed(recipe.load("demo"), [f"model.trust_remote_code={value}"])


def test_a_quoted_key_is_no_way_around(tmp_path):
    (tmp_path / "own.toml").write_text('"model.trust_remote_code" = true\n')
    with pytest.raises(UserError, match=r"model\.trust_remote_code: unknown key"):
        recipe.load(str(tmp_path / "own.toml"))


# Model folders


def test_train_runs_a_models_code_with_the_flag_alone_and_every_time_anew(planted, data, tmp_path, marker, capsys):
    file = written_recipe(tmp_path / "own.toml", planted, data, trust="")
    run = tmp_path / "run"
    assert ran("train", file, "--run", run) == 2
    assert (
        "It comes with its own code; if you trust it, pass --trust-remote-code on the command line."
        in capsys.readouterr().err
    )
    assert not marker.exists()
    assert ran("train", file, "--run", run, "--trust-remote-code") == 0
    assert marker.exists()
    assert "trust" not in (run / "recipe.toml").read_text()
    assert "code that came with the model was run (--trust-remote-code)" in (run / "card.md").read_text()
    marker.unlink()
    forget()
    assert ran("generate", run, "--split", "test") == 2
    assert "pass --trust-remote-code" in capsys.readouterr().err
    assert not marker.exists()
    assert ran("generate", run, "--split", "test", "--trust-remote-code") == 0
    assert marker.exists()


def forget():
    """The next loading imports the code again."""
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_generate_refuses_a_run_whose_recipe_asks(strange_run, marker, tmp_path, capsys):
    assert ran("generate", strange_run, "--out", tmp_path / "out") == 2
    assert f"recipe {strange_run / 'recipe.toml'} {ASKED}" in capsys.readouterr().err
    assert not marker.exists()


def test_generate_refuses_a_model_folder_with_code(planted, data, marker, tmp_path, capsys):
    arguments = ["generate", planted, "--data", data, "--set", "generation.max_length=12", "--out", tmp_path / "out"]
    assert ran(*arguments) == 2
    assert "pass --trust-remote-code on the command line" in capsys.readouterr().err
    assert not marker.exists()
    assert ran(*arguments, "--trust-remote-code") == 0
    assert marker.exists()


def test_code_in_a_tokenizers_folder_does_not_run(data, marker, tmp_path, capsys):
    folder = plant_in_tokenizer(plant(tmp_path / "m", own_kind=False))
    ran("generate", folder, "--data", data, "--set", "generation.max_length=12", "--out", tmp_path / "out")
    assert not marker.exists()
    with allow_remote_code(True):
        loading.load_tokenizer(Model(name=str(folder)), lambda: (), "")
    assert marker.exists()


def test_a_known_architecture_is_read_without_the_code_beside_it(data, marker, tmp_path):
    folder = plant(tmp_path / "m", own_kind=False)
    assert ran("generate", folder, "--data", data, "--set", "generation.max_length=12", "--out", tmp_path / "out") == 0
    assert not marker.exists()


def test_bench_step_refuses_a_model_folder_with_code(planted, marker, capsys):
    arguments = [
        "bench",
        "step",
        "--model",
        planted,
        "--batch-size",
        1,
        "--source",
        4,
        "--target",
        4,
        "--objectives",
        "ce",
    ]
    assert ran(*arguments) == 2
    assert "pass --trust-remote-code on the command line" in capsys.readouterr().err
    assert not marker.exists()
    assert ran(*arguments, "--trust-remote-code") == 0
    assert marker.exists()


def test_reproduce_runs_a_models_code_with_the_flag_alone(planted, data, marker, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ngramloss.study.run.start_process", InProcess)
    small = [
        "train.max_steps=1",
        "train.warmup_steps=0",
        "train.batch_size=2",
        "train.eval_every=0",
        "data.max_source=32",
        "data.max_target=16",
        "generation.max_length=12",
        "generation.num_beams=1",
    ]
    arguments = [
        "reproduce",
        "table2",
        "--data",
        data,
        "--model",
        planted,
        "--objectives",
        "ce",
        "--limit",
        2,
        *(word for one in small for word in ("--set", one)),
    ]
    assert ran(*arguments) == 2
    assert "pass --trust-remote-code on the command line" in capsys.readouterr().err
    assert not marker.exists()
    assert ran(*arguments, "--trust-remote-code") == 0
    assert marker.exists()


def test_bench_step_has_no_size_for_scratch(capsys):
    assert ran("bench", "step", "--model", "scratch") == 2
    assert (
        "bench cannot use scratch, which has no size. Use bart-base, small, bart-tiny, "
        "smollm2-135m, llama-tiny, a folder or a hub id." in capsys.readouterr().err
    )


@pytest.mark.parametrize("verb", [["score"], ["report", "-o", "page"]])
def test_score_and_report_read_a_strange_run_as_data(strange_run, marker, tmp_path, monkeypatch, verb, capsys):
    monkeypatch.chdir(tmp_path)
    assert ran(*verb, strange_run) == 0
    for metric in ("bertscore", "summac", "factcc"):
        ran(*verb, strange_run, "--metrics", f"rouge,{metric}", "--set", f"{metric}.model={strange_run / 'model'}")
    assert not marker.exists()


def test_nobody_is_asked_at_the_terminal(planted, data, marker, tmp_path, monkeypatch, strange_run):
    """Without a choice transformers asks whoever sits there; we always choose."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    plant_in_tokenizer(planted)
    plant_in_tokenizer(strange_run / "model")
    monkeypatch.chdir(tmp_path)
    ran("train", written_recipe(tmp_path / "own.toml", planted, data, trust=""), "--run", tmp_path / "run")
    ran("generate", planted, "--data", data, "--out", tmp_path / "out")
    ran("bench", "step", "--model", planted)
    ran("score", strange_run, "--metrics", "bertscore", "--set", f"bertscore.model={planted}")
    assert not marker.exists()


def test_attention_that_a_configuration_fetches_as_code_is_refused(tmp_path, marker):
    folder = plant(tmp_path / "m", own_kind=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_implementation": "stranger/kernel"}))
    with pytest.raises(
        UserError,
        match=r"its attention is code from the hub repository stranger/kernel .* pass --trust-remote-code on the command line",
    ):
        loading.load(Model(name=str(folder)), tiny_tokenizers.ours())


def test_a_folders_own_way_of_generating_does_not_run(data, marker, tmp_path):
    folder = plant(tmp_path / "m", own_kind=False)
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        CODE + "\ndef generate(model, **inputs):\n    return inputs['input_ids']\n"
    )
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(config | {"custom_generate": str(folder), "trust_remote_code": True})
    )
    ran("generate", folder, "--data", data, "--set", "generation.max_length=12", "--out", tmp_path / "out")
    assert not marker.exists()


# Checkpoints


class Planted:
    def __reduce__(self):
        return os.mkdir, (os.environ["MARKER"],)


def seal_again(checkpoint):
    facts = checkpoints.facts(checkpoint)
    facts.pop("files")
    checkpoints.seal(checkpoint, **facts)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "training_args.bin"])
def test_continuing_a_strangers_run_unpickles_no_code(name, data, tmp_path, marker, capsys):
    file = written_recipe(
        tmp_path / "own.toml", "scratch", data, trust="vocabulary = 400\nwidth = 16\nheads = 2\nfeed_forward = 16"
    )
    run = tmp_path / "run"
    file.write_text(file.read_text().replace("max_steps = 1", "max_steps = 2\nsave_every = 1\nkeep = 2"))
    assert ran("train", file, "--run", run) == 0
    stop_at_one(run)
    checkpoint = run / "checkpoints" / "checkpoint-1"
    assert [path.name for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".bin")] == ["optimizer.pt"]
    torch.save({"state": Planted()}, checkpoint / name)
    seal_again(checkpoint)
    ours = name == "optimizer.pt"  # what another trainer would read is not opened
    assert ran("train", file, "--run", run) == (2 if ours else 0)
    assert not ours or "contains more than tensors" in capsys.readouterr().err
    assert not marker.exists()


def stop_at_one(run):
    """As if the run had been stopped after its first step."""
    import shutil

    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")


def test_every_loading_of_a_model_says_whether_code_may_run():
    """transformers asks at the terminal where nobody chose."""
    import ast
    from pathlib import Path

    import ngramloss

    bare = []
    for path in Path(ngramloss.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "from_pretrained"
            ):
                named = {keyword.arg for keyword in node.keywords}
                bare += [] if "trust_remote_code" in named or None in named else [f"{path.name}:{node.lineno}"]
    assert not bare


def test_a_pickle_in_place_of_weights_runs_no_code(data, marker, tmp_path, capsys):
    folder = tmp_path / "pickled"
    loading.from_scratch(SMALL, tiny_tokenizers.ours()).save_pretrained(folder)
    tiny_tokenizers.ours().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.shared.weight": Planted()}, folder / "pytorch_model.bin")
    assert cli.main(["generate", str(folder), "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    assert "contains more than tensors, which is never loaded" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("key", ["plugin", "plugins"])
def test_a_recipe_cannot_name_a_plugin(key, data, tmp_path, marker):
    (tmp_path / "planted.py").write_text(CODE)
    (tmp_path / "own.toml").write_text(f'base = "demo"\n{key} = "{tmp_path / "planted.py"}"\n')
    with pytest.raises(UserError, match=rf"{key}: unknown key"):
        recipe.load(str(tmp_path / "own.toml"))
    assert not marker.exists()
