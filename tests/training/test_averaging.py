"""A moving average of the weights: what it is, that a stop does not change it, and when it is the model."""

import json
import os
from pathlib import Path

import pytest
import torch
from commands import EASY_RECIPE, log, train, weights, write_easy_rows
from forks import fork_ranks
from places import HELPERS, TESTS
from safetensors.torch import load_file
from trainings import rows, tiny

import ngramloss as ng
from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.models.adapters import ADAPTER, add_lora
from ngramloss.recipe import Model, Train
from ngramloss.training import averaging, checkpoints
from ngramloss.training.best import Best, better_average
from ngramloss.training.checkpoints import load_weights

SETTINGS = {
    "batch_size": 8,
    "accumulate": 1,
    "max_steps": 7,
    "learning_rate": 1e-2,
    "warmup_steps": 0,
    "log_every": 100,
    "eval_every": 0,
    "save_every": 2,
    "keep": 9,
    "seed": 3,
}


def trained(folder, *, model=None, data=22, stop=None, **changes):
    """Train a tiny model with ``ng.train``. Returns it, its outcome and the weights after each step."""
    model, history = model or tiny(), {}
    history[0] = [p.detach().clone().double() for p in averaging.trained(model)]

    def on_step(step, values):
        history[step] = [p.detach().clone().double() for p in averaging.trained(model)]
        if step == stop:
            raise KeyboardInterrupt

    settings = Train(**SETTINGS | changes)
    try:
        outcome = ng.train(
            model, None, rows(data), settings, validation=rows(7, seed=2), folder=folder, on_step=on_step
        )
    except KeyboardInterrupt:
        outcome = None
    return model, outcome, history


def of_folder(folder, like):
    """The trained weights of a saved model."""
    model = like()
    load_weights(folder, model)
    return averaging.trained(model)


def assert_near(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().double(), other, rtol=tolerance, atol=tolerance)


# What it is


def test_the_moving_average_is_that_of_plain_loops(tmp_path):
    _, _, history = trained(tmp_path, ema=0.3)
    plain = history[0]
    for step in range(1, 8):
        decay = min(0.3, step / (9 + step))
        plain = [decay * old + (1 - decay) * new for old, new in zip(plain, history[step], strict=True)]
    assert_near(of_folder(tmp_path / "ema", tiny), plain)


def test_tied_weights_are_one_and_buffers_are_those_of_the_last_step(tmp_path):
    model = tiny("bart")
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    model.register_forward_pre_hook(lambda module, _: module.__setattr__("calls", module.calls + 1))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    trained(tmp_path, model=model, ema=0.5)
    last = int(model.calls)
    saved = load_file(tmp_path / "ema" / "model.safetensors")
    assert saved["calls"].dtype == torch.int64
    assert int(saved["calls"]) == last == int(load_file(tmp_path / "checkpoint-7" / "model.safetensors")["calls"])
    assert int(load_file(tmp_path / "checkpoint-6" / "model.safetensors")["calls"]) < last


def test_of_adapters_the_factors_are_averaged_and_the_merged_model_is_their_product(tmp_path):
    def adapted():
        torch.manual_seed(0)
        return add_lora(tiny(), Model(lora=2, lora_targets=["q_proj"]))

    _, _, history = trained(tmp_path, model=adapted(), ema=0.1, max_steps=1)
    assert_near(
        of_folder(tmp_path / "ema", adapted), [(a + 9 * b) / 10 for a, b in zip(*history.values(), strict=True)]
    )
    twin = adapted()
    load_weights(tmp_path / "ema", twin)
    merged = load_file(tmp_path / "ema" / "model.safetensors")
    own = {key: value for key, value in twin.merge_and_unload().state_dict().items() if key in merged}
    assert (tmp_path / "ema" / ADAPTER / "adapter_model.safetensors").is_file()
    assert own.keys() == merged.keys()
    for key, value in own.items():
        torch.testing.assert_close(merged[key], value)


def test_weights_of_16_bits_are_averaged_in_32():
    model = torch.nn.Linear(2, 1, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    average = averaging.MovingAverage(model, 0.999)
    torch.nn.init.constant_(model.weight, 2.0)
    for step in range(10**4, 10**4 + 3):
        average.update(step)
    assert average.values[0].tolist()[0][0] == pytest.approx(2 - 0.999**3, abs=1e-6)


# Stops


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 6])
def test_a_stop_does_not_change_it(tmp_path, stop):
    trained(tmp_path / "whole", ema=0.9)
    trained(tmp_path / "stopped", stop=stop, ema=0.9)
    _, outcome, _ = trained(tmp_path / "stopped", ema=0.9)
    assert outcome.continued_from in (0, stop - stop % 2)
    one, other = (load_file(tmp_path / each / "ema" / "model.safetensors") for each in ("whole", "stopped"))
    assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: None,
        lambda saved: dict(enumerate(saved)),
        lambda saved: saved[:-1],
        lambda saved: [torch.zeros(3), *saved[1:]],
        lambda saved: [saved[0].to_sparse(), *saved[1:]],
        lambda saved: [1.0, *saved[1:]],
    ],
    ids=["nothing", "object", "short", "shape", "sparse", "number"],
)
def test_a_moving_average_of_other_weights_is_refused(change, tmp_path):
    average = averaging.MovingAverage(tiny(), 0.9)
    torch.save(change(average.values), tmp_path / "ema.pt")
    with pytest.raises(
        UserError, match=r"ema\.pt does not have the shapes of the model's weights\. Delete the checkpoint"
    ):
        average.restore(tmp_path)


def test_a_training_without_a_moving_average_is_not_continued_with_one(tmp_path):
    trained(tmp_path, stop=5)
    with pytest.raises(
        UserError, match=r"have changed since it was started:\n  train\.ema: 0\.0 → 0\.9\. Set it back\."
    ):
        trained(tmp_path, ema=0.9)


def test_a_checkpoint_that_lost_its_moving_average_is_not_continued(tmp_path):
    with pytest.raises(UserError, match=r"has no readable moving average of the weights\. Delete"):
        averaging.MovingAverage(tiny(), 0.9).restore(tmp_path)


WORKER = """
import json, sys
sys.path[:0] = {tests!r}
from pathlib import Path
from test_averaging import trained
trained(Path(sys.argv[1]), ema=0.5, eval_every=100)
"""


@pytest.mark.slow
def test_two_processes_have_the_averages_of_one(tmp_path):
    codes, err = fork_ranks(
        WORKER.format(tests=[str(HELPERS), str(TESTS / "training")]),
        [str(tmp_path / "two")],
        environment={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert codes == [0, 0], err[-3000:]
    _, outcome, _ = trained(tmp_path / "one", ema=0.5, eval_every=100)
    one, two = (load_file(tmp_path / each / "ema" / "model.safetensors") for each in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)
    state = json.loads((tmp_path / "two" / "checkpoint-7" / "state.json").read_text())
    for name, known in outcome.state.averages.items():
        assert state["averages"][name] == pytest.approx(known, abs=1e-3)


# Which weights become the model


def facts(best, **averages):
    return {"step": 2, "best_step": None if best is None else 1, "best": best, "averages": averages}


@pytest.mark.parametrize(
    ("higher", "of_run", "chosen"),
    [
        (False, facts(1.0, ema=0.9), "ema"),
        (False, facts(1.0, ema=1.0), ""),
        (True, facts(1.0, ema=0.9), ""),
        (True, facts(1.0, ema=1.2), "ema"),
        (True, facts(None, ema=None), "ema"),
        (True, facts(1.0, ema=None), ""),
        (True, facts(1.0), ""),
    ],
)
def test_an_average_is_chosen_if_it_is_better(higher, of_run, chosen):
    assert better_average(Best("x", higher=higher), of_run) == chosen


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data that are learned quickly, and a recipe."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    write_easy_rows(folder / "data" / "train.jsonl", 60, 0)
    write_easy_rows(folder / "data" / "validation.jsonl", 11, 1)
    text = EASY_RECIPE.replace('best = "rouge2"', 'best = "ce"')
    (folder / "easy.toml").write_text(text.format(data=folder / "data"))
    return folder


def ran(place, run, capsys, *changes):
    assert train(place / "easy.toml", "--run", run, *(word for one in changes for word in ("--set", one))) == 0
    return capsys.readouterr().err


def ce_of(model_folder, data):
    """Validation cross-entropy of a saved model, by Hugging Face."""
    from transformers import AutoModelForSeq2SeqLM

    from ngramloss.data.tokens import Tokens

    model = AutoModelForSeq2SeqLM.from_pretrained(model_folder).eval()
    total = count = 0
    for row in (Tokens(data)[number] for number in range(11)):
        ids, labels = (torch.as_tensor(row[name]).long()[None] for name in ("input_ids", "labels"))
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * labels.numel()
        count += labels.numel()
    return total / count


HIGH_RATE = [
    "train.learning_rate=0.2",
    "train.max_steps=24",
    "train.schedule=constant_with_warmup",
    "train.warmup_steps=2",
    "train.clip=0",
]


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_a_better_average_becomes_the_model_and_its_card_says_so(place, tmp_path, capsys):
    run, name = tmp_path / "run", "ema"
    err = ran(place, run, capsys, "train.ema=0.8", *HIGH_RATE)
    seal = checkpoints.facts(run / "checkpoints" / "checkpoint-24")
    value, single = seal["averages"][name], seal["best"]
    assert value < single, "with such a learning rate, averaging helps"
    prepared = json.loads((run / "prepared.json").read_text())
    assert ce_of(run / "model", Path(prepared["splits"]["validation"]["tokens"])) == pytest.approx(value, abs=1e-4)
    saved = load_file(run / "checkpoints" / name / "model.safetensors")
    assert all(torch.equal(saved[key], each) for key, each in weights(run).items())
    what = "the moving average of the weights (ema)"
    why = f"{what} (validation ce {value:.4f}; the weights of step {seal['best_step']}: {single:.4f})"
    assert f"finished at step 24: {run / 'model'}, {why}\n" in err
    card = (run / "card.md").read_text()
    assert f". {what[4].upper()}{what[5:]} (" in card
    assert f"validation ce {value:.4f}; the weights of step {seal['best_step']}: {single:.4f}" in card
    assert sorted(path.name for path in (run / "model").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    (line,) = [line for line in log(run) if f"{name}_ce" in line]
    assert line["step"] == 24
    assert line[f"{name}_ce"] == pytest.approx(value)


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_with_the_last_weights_an_average_is_always_the_model(place, tmp_path, capsys):
    err = ran(place, tmp_path, capsys, "train.best=last", "train.ema=0.9")
    assert ", the moving average of the weights (ema) (nothing was validated that could select others)\n" in err
    saved = load_file(tmp_path / "checkpoints" / "ema" / "model.safetensors")
    assert all(torch.equal(saved[key], each) for key, each in weights(tmp_path).items())
    assert not torch.equal(
        saved["model.shared.weight"],
        load_file(tmp_path / "checkpoints" / "checkpoint-12" / "model.safetensors")["model.shared.weight"],
    )


# Bad input


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["train.ema=0.9", "train.fsdp=true"], "train.ema does not work with sharded weights"),
        (["train.ema=1"], "train.ema: must be below 1"),
    ],
)
def test_settings_that_cannot_be_are_a_sentence(changes, sentence):
    with pytest.raises(UserError) as stop:
        recipe.load("demo", changes)
    assert sentence in str(stop.value)


def test_without_a_folder_the_average_cannot_be_written():
    with pytest.raises(UserError, match=r"ema is written beside the checkpoints\. Give a folder"):
        trained(None, ema=0.9)


def test_a_system_may_have_it_too():
    from ngramloss.training.system_registry import check_recipe

    assert check_recipe(recipe.load("simcls-demo", ["train.ema=0.9"])).name == "simcls"
