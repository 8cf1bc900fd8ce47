"""Runs whose best checkpoint is chosen by what they generate: the score is that of what the checkpoint writes."""

import json
import re
import signal

import pytest
import torch
from commands import EASY_RECIPE, EASY_STEPS, assert_equal_runs, environment, finished, log, train, write_easy_rows
from forks import fork_ranks
from safetensors.torch import load_file
from searches import hf_texts

from ngramloss import recipe
from ngramloss.data.tokens import Shape, separator_id, sources
from ngramloss.generation.job import Job
from ngramloss.generation.load_job import load_model
from ngramloss.metrics.rouge import rouge
from ngramloss.models import loading
from ngramloss.recipe import Data, Model
from ngramloss.training import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with data that are learned quickly, and a recipe."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "data").mkdir()
    write_easy_rows(folder / "data" / "train.jsonl", 60, 0)
    write_easy_rows(folder / "data" / "validation.jsonl", 11, 1)
    (folder / "easy.toml").write_text(EASY_RECIPE.format(data=folder / "data"))
    return folder


def command(place, run, *changes):
    return ["train", str(place / "easy.toml"), "--run", str(run), *(word for one in changes for word in ("--set", one))]


def ran(place, run, *changes):
    code, _, err = finished(command(place, run, *changes))
    assert code == 0, err[-2000:]
    return err


@pytest.fixture(scope="module")
def judged(place, own_cache):
    """A run whose best checkpoint is chosen by ROUGE-2."""
    err = ran(place, place / "judged")
    (place / "judged.txt").write_text(err)
    return place / "judged"


def test_a_score_that_is_never_computed_is_a_warning(place, tmp_path):
    err = ran(place, tmp_path / "run", "train.max_steps=2", "train.eval_every=0")
    assert "train.best = rouge2 selects nothing, because train.eval_every is 0" in err
    assert "selects nothing" not in ran(
        place, tmp_path / "last", "train.max_steps=2", "train.eval_every=0", "train.best=last"
    )


def scores(run, name="rouge2"):
    return {line["step"]: line[f"eval_{name}"] for line in log(run) if f"eval_{name}" in line}


def score_by_hand(place, checkpoint, limit=None, beams=1):
    """ROUGE-2 of the texts of the model of a checkpoint."""
    chosen = recipe.load(str(place / "easy.toml"))
    rows = [json.loads(line) for line in (place / "data" / "validation.jsonl").read_text().splitlines()][:limit]
    model, tokenizer = load_model(Job("a run", Model(name=str(checkpoint)), Data(), "test", None, None, 0, 4))
    assert model.generation_config.num_beams == 3  # as the recipe says, whatever validation took
    loading.prepare_generation(
        model, recipe.load(str(place / "easy.toml"), [f"generation.num_beams={beams}"]).generation
    )
    encoded = sources(
        [row["document"] for row in rows], tokenizer, Shape.of(chosen.data), separator_id(tokenizer, "none")
    )
    texts = hf_texts(model, tokenizer, encoded, batch_size=4)
    values = rouge([[row["summary"]] for row in rows], texts).values["rouge2"]
    return sum(values) / len(values)


def test_the_score_logged_is_that_of_what_the_checkpoint_writes(place, judged):
    logged = scores(judged)
    assert list(logged) == [2, 4, 6, 8, 10, 12]
    assert len(set(logged.values())) > 1
    for step, value in logged.items():
        assert value == pytest.approx(score_by_hand(place, judged / "checkpoints" / f"checkpoint-{step}")), step


def test_the_model_has_the_highest_score_and_messages_say_so(judged):
    logged = scores(judged)
    best = max(logged, key=logged.get)
    entropies = scores(judged, "ce")
    assert best != min(entropies, key=entropies.get)  # cross-entropy would have chosen another
    chosen = load_file(judged / "checkpoints" / f"checkpoint-{best}" / "model.safetensors")
    assert all(
        torch.equal(chosen[name], value) for name, value in load_file(judged / "model" / "model.safetensors").items()
    )
    why = f"(highest validation rouge2, {logged[best]:.4f})"
    assert f"Weights of step {best} {why} of {EASY_STEPS}." in (judged / "card.md").read_text()
    assert f"finished at step {EASY_STEPS}: {judged / 'model'}, the weights of step {best} {why}\n" in (
        said := (judged.parent / "judged.txt").read_text()
    )
    assert re.search(rf"· rouge2 {logged[best]:.2f} \(generated in \d+ s\)", said)


def test_the_log_has_the_seconds_that_generation_took(judged):
    lines = [json.loads(line) for line in (judged / "log.jsonl").read_text().splitlines()]
    times = [line["eval_generation_runtime"] for line in lines if "eval_rouge2" in line]
    assert len(times) == 6
    assert all(0 < seconds < 60 for seconds in times)


def test_training_ends_at_the_same_weights_as_without_generation(place, judged, tmp_path):
    ran(place, tmp_path / "ce", "train.best=ce")
    ours, theirs = (
        load_file(run / "checkpoints" / f"checkpoint-{EASY_STEPS}" / "model.safetensors")
        for run in (judged, tmp_path / "ce")
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    without = [{name: value for name, value in line.items() if name != "eval_rouge2"} for line in log(judged)]
    assert without == log(tmp_path / "ce")


@pytest.mark.parametrize("sabotage", ["saving:4", "saving:8", "sealed:6", "card:0"])
def test_a_run_that_is_killed_goes_on_to_the_same_best(place, judged, tmp_path, sabotage):
    code, _, _ = finished(command(place, tmp_path / "killed"), sabotage=sabotage)
    assert code == -signal.SIGKILL
    assert f"finished at step {EASY_STEPS}" in ran(place, tmp_path / "killed")
    assert_equal_runs(tmp_path / "killed", judged)
    ours, theirs = (
        checkpoints.facts(run / "checkpoints" / f"checkpoint-{EASY_STEPS}") for run in (tmp_path / "killed", judged)
    )
    assert (ours["best"], ours["best_step"]) == (theirs["best"], theirs["best_step"])


def test_beams_and_a_limit_are_those_of_the_recipe(place, tmp_path):
    changes = ["train.best_limit=3", "train.best_beams=2", "train.max_steps=6"]
    ran(place, tmp_path / "a", *changes)
    for step, value in scores(tmp_path / "a").items():
        assert value == pytest.approx(
            score_by_hand(place, tmp_path / "a" / "checkpoints" / f"checkpoint-{step}", 3, 2)
        ), step


def test_a_limit_above_the_number_of_examples_takes_them_all(place, judged, tmp_path):
    ran(place, tmp_path / "a", "train.best_limit=1000", "train.max_steps=12")
    assert scores(tmp_path / "a") == scores(judged)


@pytest.mark.parametrize(
    "change",
    ["train.best=rouge1", "train.best_limit=5", "train.best_beams=2", 'train.best_options=["rouge.stemmer=false"]'],
)
def test_a_run_is_not_continued_with_another_score(place, judged, capsys, change):
    assert train(*command(place, judged, change)[1:]) == 2
    assert f"have changed since it was started:\n  {change.partition('=')[0]}: " in capsys.readouterr().err


def test_training_stops_early_if_the_score_does_not_rise(place, judged, tmp_path):
    logged = scores(judged)
    best = max(logged, key=logged.get)
    assert best <= EASY_STEPS - 6
    err = ran(place, tmp_path / "a", "train.early_stopping=2")
    assert list(scores(tmp_path / "a")) == list(range(2, best + 5, 2))
    assert f"finished at step {best + 4}: " in err
    assert "highest validation rouge2" in (tmp_path / "a" / "card.md").read_text()


def test_a_metric_of_a_plugin_may_say_that_lower_is_better(place, tmp_path, capsys):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "import ngramloss as ng\n"
        "def length(predictions):\n    return ng.Scores({'length': [float(len(text)) for text in predictions]}, 'length')\n"
        "ng.METRICS['length'] = ng.Metric(length, reads=('predictions',), scores={'length': ng.Score('Length', 'letters', 'lower')})\n"
    )
    arguments = [
        *command(place, tmp_path / "a", "train.best=length", "train.max_steps=8", "train.save_every=3"),
        "--plugin",
        str(plugin),
    ]
    assert finished(arguments, sabotage="saving:8")[0] == -signal.SIGKILL
    plugin.write_text(plugin.read_text().replace("float(len(text))", "-float(len(text))"))
    assert finished(arguments)[0] == 2
    assert train(*arguments[1:]) == 2
    assert "have changed since it was started:\n  plugin metric length: " in capsys.readouterr().err
    plugin.write_text(plugin.read_text().replace("-float(len(text))", "float(len(text))"))
    assert finished(arguments)[0] == 0
    logged = scores(tmp_path / "a", "length")
    card = (tmp_path / "a" / "card.md").read_text()
    assert f"(lowest validation length, {min(logged.values()):.4f})" in card
    assert "* `plugin metric length`, source " in card


def test_a_score_that_cannot_be_computed_ends_the_command_before_training(place, tmp_path, capsys):
    assert train(*command(place, tmp_path / "a", "train.best=names_right")[1:]) == 2
    assert "train.best: facts works only on the built-in corpus newswire" in capsys.readouterr().err
    assert not (tmp_path / "a" / "log.jsonl").exists()
    assert train(*command(place, tmp_path / "b", "train.best=rogue2")[1:], "--show") == 2
    assert "Did you mean 'rouge2'?" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_a_training_says_that_the_score_does_not_read_its_texts(place, tmp_path):
    (tmp_path / "data").mkdir()
    row = json.dumps({"document": "今天天气很好。我们去公园。", "summary": "天气很好"})
    for split in ("train", "validation"):
        (tmp_path / "data" / f"{split}.jsonl").write_text(
            f"{row}\n"
            if split == "validation"
            else "".join(row.replace("公园", f"公园{number}") + "\n" for number in range(8))
        )
    few = [f"data.name={tmp_path / 'data'}", "train.max_steps=2", "train.warmup_steps=0"]
    note = "rouge2: the default rules read only a–z and 0–9: they skip 100% of the letters here"
    said = ran(place, tmp_path / "a", *few, 'train.best_options=["rouge.tokens=default"]')
    assert said.count(note) == 1
    assert "Use --set rouge.tokens=auto. In a recipe, train.best_options has such options.\n" in said
    assert note not in ran(place, tmp_path / "b", *few)


@pytest.mark.parametrize("fsdp", ["false", "true"])
def test_two_processes_agree_on_the_score_of_all_texts(place, tmp_path, fsdp):
    """11 examples: one process has one more than the other."""
    few = ["train.max_steps=6", "train.early_stopping=1"]
    program = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"
    codes, err = fork_ranks(
        program, command(place, tmp_path / "two", *few, f"train.fsdp={fsdp}"), environment=environment()
    )
    assert codes == [0, 0], err[-3000:]
    assert err.count("finished at step") == 1
    logged = scores(tmp_path / "two")
    assert len(logged) > 1
    for step, value in logged.items():
        assert value == pytest.approx(score_by_hand(place, tmp_path / "two" / "checkpoints" / f"checkpoint-{step}")), (
            step
        )
