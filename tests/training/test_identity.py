"""Work is reused only for what it was made from: one thing is changed, then it is refused or made again."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_multilingual
import torch
from changes import MODEL_FILES, change_json, change_weights, swap_tokens
from models import TINY_MODEL, tiny
from places import ROOT
from safetensors.torch import load_file
from searches import texts_of_run
from transformers import AutoTokenizer

from ngramloss import METRICS, Metric, Scores, cli, recipe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.generation import predictions
from ngramloss.generation.job import data_facts, job, read_split
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.models import loading
from ngramloss.recipe import Model
from ngramloss.storage.checksums import OWN as CHECKSUM
from ngramloss.storage.checksums import facts, seal
from ngramloss.storage.run_folder import RunFolder
from ngramloss.study import plan
from ngramloss.study.plan import TEST, Training
from ngramloss.study.results import DecodingResult, _raise_unless_alike
from ngramloss.training import prepare
from ngramloss.training.identity import base_made_of, changes, python_made_of, record_of
from ngramloss.training.online import OwnTexts
from ngramloss.training.precision import PRECISION
from ngramloss.training.processes import Processes
from ngramloss.training.run import run_of

pytestmark = pytest.mark.usefixtures("own_cache")

RECIPE = """
[data]
name = "data"
max_source = 96
max_target = 32
[train]
max_steps = 3
batch_size = 4
accumulate = 1
warmup_steps = 0
log_every = 1
eval_every = 2
save_every = 1
keep = 3
[generation]
num_beams = 1
max_length = 12
"""


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


RANKED = ("data.candidates=compared", "data.id=none", "objective=ce + risk")
"""Rows have no ids, so candidates belong to them by their numbers."""
TAUGHT = ("train.teacher=teacher", "objective=ce + distill")


def train(*settings, run="run"):
    return cli.main(["train", "tiny.toml", "--run", run, *(word for one in settings for word in ("--set", one))])


@pytest.fixture(scope="module")
def made(tmp_path_factory, own_cache):
    """A folder with data, a model, and a run that was stopped after its first checkpoint."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "data").mkdir()
    for split, count in (("train", 12), ("validation", 4), ("test", 3)):
        items = enumerate(newswire.items(split, count))
        write_rows(
            folder / "data" / f"{split}.jsonl",
            [
                {
                    "id": str(number),
                    "document": item.document,
                    "summary": item.summary,
                    "long": f"{item.document} And so on.",
                    "short": item.summary[:20],
                    "weights": [0.5] * len(item.summary.split()),
                }
                for number, item in items
            ],
        )
    (folder / "tiny.toml").write_text(RECIPE + TINY_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("train.max_steps=1", "train.eval_every=0", run="first") == 0
        (folder / "first" / "model").rename(folder / "base")
        (folder / "tiny.toml").write_text(RECIPE + '[model]\nname = "base"\n')
        assert train() == 0
        numbered = ["--set", "data.id=none", "--count", "2", "--search", "beams", "--out", "compared"]
        assert cli.main(["candidates", "base", "--data", "data", *numbered]) == 0
        written = [json.loads(line) for line in (folder / "compared" / "candidates.jsonl").read_text().splitlines()]
        written[0]["candidates"][1] = "eaeaea"  # tokens that a changed tokenizer changes
        write_rows(folder / "compared" / "candidates.jsonl", written)
        assert train(*RANKED, run="ranked") == 0
        shutil.copytree(folder / "base", folder / "teacher")
        assert train(*TAUGHT, run="taught") == 0
    for run in ("run", "ranked", "taught"):
        shutil.rmtree(folder / run / "model")
        for step in (2, 3):
            shutil.rmtree(folder / run / "checkpoints" / f"checkpoint-{step}")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of that folder, in which paths are the same."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "place"))
    for run in ("ranked", "taught"):  # the paths of the candidates and of the teacher
        settings = tmp_path / "place" / run / "recipe.toml"
        settings.write_text(settings.read_text().replace(str(made), str(tmp_path / "place")))
    return tmp_path / "place"


# A run is continued


CHANGED = "settings, data or code of run have changed since it was started:\n  "
OTHERWISE = "\nTo train with the new ones, choose another --run, or start over with --fresh."


def edit_split(split):
    def edit(place):
        path = place / "data" / f"{split}.jsonl"
        path.write_text(path.read_text().replace(".", "!", 1))

    return edit


FILES = {**MODEL_FILES, "weights": change_weights}
CONTINUED = {
    **{f"model: {name}": (lambda place, change=change: change(place / "base")) for name, change in FILES.items()},
    "train data": edit_split("train"),
    "validation data": edit_split("validation"),
}


@pytest.mark.parametrize("changed", CONTINUED)
def test_a_run_is_not_continued_if_one_thing_has_changed(place, capsys, changed):
    CONTINUED[changed](place)
    capsys.readouterr()
    assert train() == 2
    said = capsys.readouterr().err
    assert CHANGED in said
    assert f"{changed}: " in said
    assert OTHERWISE in said
    assert not (place / "run" / "model").exists()


def test_one_message_names_everything_that_has_changed_and_what_to_do_about_it(place, capsys):
    edit_split("train")(place)
    change_weights(place / "base")
    assert train("train.seed=7", "train.clip=0.5") == 2
    said = capsys.readouterr().err
    assert "  train.clip: 1.0 → 0.5. Set it back.\n  train.seed: 42 → 7. Set it back.\n  train data: " in said
    assert ". Restore the rows of this split.\n  model: weights: " in said
    assert f". Restore the folder of the base model.{OTHERWISE}" in said


def test_what_is_made_from_something_that_has_changed_has_no_advice_of_its_own(place, capsys):
    edit_split("train")(place)
    swap_tokens(place / "base")
    assert train() == 2
    said = capsys.readouterr().err
    assert re.search(r"\n  train tokens: \w+ → \w+\. This is made from what has changed\.\n", said)
    assert re.search(r"\n  validation tokens: \w+ → \w+\. Use the same tokenizer, in the same version\.\n", said)


OF_A_STUDY = {
    **CONTINUED,
    **{f"teacher: {name}": (lambda place, change=change: change(place / "teacher")) for name, change in FILES.items()},
}


@pytest.mark.parametrize("changed", OF_A_STUDY)
def test_results_of_a_study_are_not_compared_if_one_thing_has_changed(place, changed):
    run = run_of(recipe.load("tiny.toml", TAUGHT))
    training = Training("news", run.settings.objective, (), 1, TEST)
    results = {}
    for seed in (1, 2):
        made_of = prepare.made_of_now(run)
        result = DecodingResult(
            training._replace(seed=seed), "greedy", dict(recipe.flat(run.settings)), made_of=made_of
        )
        results[result.key] = result
        if seed == 1:
            OF_A_STUDY[changed](place)
    what, _, file = changed.partition(": ")
    with pytest.raises(UserError, match=rf"cannot be compared:\n  ({changed}|{what}: files: .* → .*{file})"):
        _raise_unless_alike(results, {})


def test_a_run_is_continued_with_settings_that_change_only_its_speed(place, capsys):
    assert train("train.max_tokens=200", "train.log_every=2") == 0
    said = capsys.readouterr().err
    assert "train.max_tokens: 0 → 200, from now on." in said
    assert "continuing run from step 1" in said


def change_record(run, **changes):
    """Change the record of a run's checkpoints. None takes a name out of it."""
    for path in (run / "checkpoints").glob("*/data.json"):
        record = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))
        seal(
            path.parent, **{name: fact for name, fact in facts(path.parent).items() if name not in ("files", CHECKSUM)}
        )


def test_a_run_that_began_in_another_precision_is_not_continued(place, capsys):
    change_record(place / "run", **{PRECISION: "bf16"})
    assert train() == 2
    said = capsys.readouterr().err
    assert f"{CHANGED}precision of training: bf16 → fp32. Continue on a device with the old precision." in said
    assert train("train.precision=bf16") == 2
    assert "train.precision: 'auto' → 'bf16'. Set it back." in capsys.readouterr().err


def test_one_message_names_changed_candidates_and_a_changed_setting(place, capsys):
    path = place / "compared" / "candidates.jsonl"
    path.write_text(path.read_text().replace("eaeaea", "aeaeae"))
    assert train(*RANKED, "train.seed=7", run="ranked") == 2
    said = capsys.readouterr().err
    assert "train.seed: " in said
    assert "\n  candidates: " in said


@pytest.mark.parametrize("version", [None, 0])
def test_a_run_of_another_version_is_not_continued(place, capsys, version):
    """Of a version that is not there: earlier ones did not record it."""
    change_record(place / "run", version=version)
    assert train() == 2
    assert (
        "checkpoint-1 cannot be continued: another version of ngramloss saved it, with another record. Continue it "
        "with that version, or choose another --run, or start over with --fresh."
    ) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["config.json", "weights"])
def test_a_run_is_not_continued_with_another_teacher(place, capsys, name):
    FILES[name](place / "teacher")
    assert train(*TAUGHT, run="taught") == 2
    assert f"have changed since it was started:\n  teacher: {name}: " in capsys.readouterr().err


def test_a_model_on_the_hub_is_known_by_its_commit():
    config = SimpleNamespace(_commit_hash="abc")
    assert base_made_of(recipe.load("xsum").model, config) == {"model: commit": "abc"}
    assert base_made_of(recipe.load("demo").model, config) == {}


@pytest.mark.parametrize(
    ("run", "settings", "names"),
    [("run", (), ("train", "validation")), ("ranked", RANKED, ("train", "validation", "candidates"))],
    ids=["run", "ranked"],
)
def test_a_run_is_not_continued_with_other_tokens_of_the_same_texts(place, capsys, run, settings, names):
    swap_tokens(place / "base")
    assert train(*settings, run=run) == 2
    said = capsys.readouterr().err
    assert all(f"{name} tokens: " in said for name in names)
    assert " data: " not in said


def test_the_seed_of_a_run_is_that_of_a_model_from_scratch(place):
    (place / "tiny.toml").write_text(RECIPE + TINY_MODEL)
    assert train("train.max_steps=1", "train.eval_every=0", "train.seed=7", run="seventh") == 0
    first, seventh = (load_file(folder / "model.safetensors") for folder in (place / "base", place / "seventh/model"))
    assert max((first[name] - seventh[name]).abs().max() for name in first) > 0.02, "more than one step changes"


# Candidates are trained on


def reorder(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))


def edit(path, key):
    """Change a text of the third row."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[2][key] += " And more."
    write_rows(path, rows)


OF_OTHERS = {
    "reordered data": (
        lambda place: reorder(place / "data" / "train.jsonl"),
        "12 of 12 training examples have another source than the candidates with the same id",
    ),
    "an edited source": (
        lambda place: edit(place / "data" / "train.jsonl", "document"),
        "1 of 12 training examples have another source than the candidates with the same id",
    ),
    "an edited reference": (
        lambda place: edit(place / "data" / "train.jsonl", "summary"),
        "1 of 12 training examples have other references than those with which the scores",
    ),
    "another split": (
        lambda place: change_json(place / "compared" / "candidates.json", split="test"),
        "are for the split 'test', but training needs candidates for the split 'train'",
    ),
}


@pytest.mark.parametrize("changed", OF_OTHERS)
def test_candidates_of_other_data_are_not_trained_on(place, capsys, changed):
    change, sentence = OF_OTHERS[changed]
    change(place)
    assert train(*RANKED, run="new") == 2
    assert sentence in capsys.readouterr().err


def test_candidates_from_elsewhere_are_trained_on_with_a_remark(place, capsys):
    rows = [json.loads(line) for line in (place / "compared" / "candidates.jsonl").read_text().splitlines()]
    write_rows(place / "theirs.jsonl", [{key: row[key] for key in ("id", "candidates", "scores")} for row in rows])
    assert train(*RANKED[1:], "data.candidates=theirs.jsonl", "train.max_steps=1", run="new") == 0
    assert "12 of 12 rows of candidates in " in capsys.readouterr().err


def test_candidates_of_the_data_are_trained_on_without_a_word(place, capsys):
    assert train(*RANKED, "train.max_steps=1", run="new") == 0
    assert "rows of candidates" not in capsys.readouterr().err


@pytest.mark.parametrize("key", ["candidates", "scores"])
def test_a_run_is_not_continued_with_other_candidates(place, capsys, key):
    path = place / "compared" / "candidates.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[3][key] = [rows[3][key][1], rows[3][key][0]] if key == "candidates" else [0.125, 0.25]
    write_rows(path, rows)
    assert train(*RANKED, run="ranked") == 2
    assert (
        "settings, data or code of ranked have changed since it was started:\n  candidates: " in capsys.readouterr().err
    )


def test_a_run_continues_with_its_candidates(place, capsys):
    assert train(*RANKED, run="ranked") == 0
    assert "continuing ranked from step 1" in capsys.readouterr().err


# The best checkpoint


def test_a_score_that_selects_nothing_is_told_at_the_end_and_in_the_card(place, capsys):
    """The model of three steps writes nothing of the references."""
    assert train("train.best=rouge2", "train.eval_every=1", run="new") == 0
    sentence = (
        "rouge2 was 0.0000 in all 3 validations, so it could not select a checkpoint: the model has the weights of"
    )
    assert capsys.readouterr().err.count(sentence) == 1
    assert sentence in (place / "new" / "card.md").read_text()


def lengths(references, predictions):
    """A score that every reference and every text changes."""
    pairs = zip(references, predictions, strict=True)
    return Scores({"lengths": [float(len(golds[0]) + 1000 * len(text)) for golds, text in pairs]}, "lengths")


def test_the_score_of_a_limited_validation_is_that_of_the_first_examples_by_hand(place):
    METRICS["lengths"] = Metric(lengths)
    settings = ("train.best=lengths", "train.best_limit=3", "train.eval_every=1", "train.max_steps=1")
    assert train(*settings, run="new") == 0
    logged = [json.loads(line) for line in (place / "new" / "log.jsonl").read_text().splitlines()]
    (score,) = [line["eval_lengths"] for line in logged if "eval_lengths" in line]
    rows = [json.loads(line) for line in (place / "data" / "validation.jsonl").read_text().splitlines()]
    assert len(rows[0]["summary"]) != len(rows[3]["summary"])
    texts = texts_of_run(place / "new", [row["document"] for row in rows[:3]])
    by_hand = [len(row["summary"]) + 1000 * len(text) for row, text in zip(rows, texts, strict=False)]
    assert score == pytest.approx(sum(by_hand) / 3)


# Every setting


ONE_FILE = ("data.name=data/train.jsonl", "train.eval_every=0")
OWN = ("online.samples=2", "objective=ce + risk")

SETTINGS = {
    "objective": ("ce + matches(2)", "training"),
    "task": ("translation", "training texts"),
    "system": ("bertsum_ext", "training"),
    "data.name": ("test=data/validation.jsonl,train=data/test.jsonl,validation=data/test.jsonl", "tokens texts"),
    "data.source": ("long", "tokens texts"),
    "data.target": ("short", "tokens texts"),
    "data.id": ("none", "tokens texts"),  # the order of the rows and what is held out depend on ids
    "data.source_language": ("de_DE", "tokens texts", "multilingual"),
    "data.target_language": ("de_DE", "tokens texts", "multilingual"),
    "data.test_fraction": (0.25, "tokens", *ONE_FILE),
    "data.validation_fraction": (0.5, "tokens", *ONE_FILE),
    "data.leave_out": ("1/2", "tokens", "train.eval_every=0"),  # generate and candidates read what a run left out
    "data.separator": ("<s>", "tokens texts"),
    "data.splitter": ("period", "tokens texts"),
    "data.language": ("de", "tokens texts"),
    "data.prefix": ("summarize: ", "tokens texts"),
    "data.prompt": ("{source} In short:", "tokens texts", "model.name=causal"),
    "data.instruction": ("Summarise.", "tokens texts", "model.name=causal", "data.prompt=chat"),
    "data.max_source": (40, "tokens texts"),
    "data.max_target": (9, "tokens texts"),
    "data.limit": (5, "tokens"),
    "data.validation_limit": (2, "tokens"),
    "data.candidates": ("others", "tokens", *RANKED),
    "data.language_model": ("other", "training"),
    "data.weights": ("weights", "tokens"),
    "data.on_bad_row": ("skip", "nothing"),  # which rows are read is in the fingerprint
    "model.name": ("other", "tokens texts"),
    "model.revision": ("v1", "training"),
    "model.encoder": ("base", "training", "model.name=scratch"),
    "model.tokenizer": ("base", "tokens", "model.name=scratch"),
    "model.architecture": ("mbart", "training"),
    "model.width": (32, "training"),
    "model.encoder_layers": (2, "training"),
    "model.decoder_layers": (2, "training"),
    "model.heads": (2, "training"),
    "model.feed_forward": (64, "training"),
    "model.dropout": (0.3, "training"),
    "model.vocabulary": (500, "tokens", "model.name=scratch"),
    "model.init_std": (0.1, "training"),
    "model.copying": (True, "training"),
    "model.lora": (4, "training"),
    "model.lora_alpha": (8.0, "training", "model.lora=4"),
    "model.lora_dropout": (0.1, "training", "model.lora=4"),
    "model.lora_targets": (["q_proj"], "training", "model.lora=4"),
    "online.samples": (4, "training", *OWN),
    "online.refresh": (2, "training", *OWN),
    "online.temperature": (0.5, "training", *OWN),
    "online.top_p": (0.5, "training", *OWN),
    "online.metric": ("chrf", "training", *OWN),
    "online.metric_options": (["rouge.stemmer=false"], "training", *OWN),
    "train.epochs": (2.0, "training"),
    "train.max_steps": (2, "training"),
    "train.batch_size": (2, "training"),
    "train.accumulate": (2, "training"),
    "train.max_tokens": (100, "nothing"),  # any split of a step is the same step
    "train.learning_rate": (1e-3, "training"),
    "train.encoder_learning_rate": (1e-3, "training"),
    "train.warmup_steps": (1, "training"),
    "train.encoder_warmup_steps": (1, "training", "train.encoder_learning_rate=1e-3"),
    "train.schedule": ("cosine", "training"),
    "train.weight_decay": (0.5, "training"),
    "train.beta1": (0.5, "training"),
    "train.beta2": (0.5, "training"),
    "train.epsilon": (1e-3, "training"),
    "train.clip": (0.5, "training"),
    "train.precision": ("bf16", "training"),
    "train.log_every": (2, "nothing"),
    "train.eval_every": (3, "training"),
    "train.save_every": (2, "nothing"),
    "train.keep": (1, "nothing"),
    "train.best": ("loss", "training"),
    "train.best_limit": (1, "training"),
    "train.best_beams": (2, "training"),
    "train.best_options": (["rouge.stemmer=false"], "training", "train.best=rouge1"),
    "train.early_stopping": (1, "training"),
    "train.eval_batch_size": (2, "nothing"),
    "train.group_by_length": (False, "training"),
    "train.gradient_checkpointing": (True, "nothing"),
    "train.capture": (False, "nothing"),
    "train.compile": (True, "nothing"),
    "train.fsdp": (True, "nothing"),
    "train.memory": ("lean", "nothing"),
    "train.twins": (True, "training"),
    "train.teacher": ("models/teacher", "training"),
    "train.ema": (0.5, "training"),
    "train.seed": (1, "training"),
    "train.report_to": (["wandb"], "nothing"),
    "generation.num_beams": (2, "texts"),
    "generation.length_penalty": (2.0, "texts"),
    "generation.min_length": (3, "texts"),
    "generation.max_length": (50, "texts"),
    "generation.no_repeat_ngram_size": (2, "texts"),
    "generation.early_stopping": (False, "texts", "generation.num_beams=4"),  # the base has False of its own
    "generation.renormalize": (True, "texts"),
    "generation.engine": ("hf", "texts"),
    "generation.precision": ("bf16", "texts"),
    "generation.drafter": ("runs/drafter", "nothing"),
}
"""Setting → another value, what it changes, and the settings with which it does.

"tokens": those of the training, and then the training; "training": it alone; "texts": those of generate and candidates;
"nothing" but speed, memory, logs or rounding.
"""


def test_every_setting_is_known_to_change_something_or_nothing():
    """A new setting: add it to the list above, and to the key of whatever it changes."""
    assert set(SETTINGS) == set(recipe.every_setting())
    kinds = {word for _, kinds, *_ in SETTINGS.values() for word in kinds.split()}
    assert kinds == {"tokens", "training", "texts", "nothing"}
    without = {key for key, (_, kinds, *_) in SETTINGS.items() if kinds == "nothing"}
    assert without - {"data.on_bad_row", "train.save_every"} == recipe.only_speed()


def test_every_file_of_a_model_folder_is_known_to_change_something(made):
    names = {path.name for path in (made / "base").iterdir()}
    assert names <= {*MODEL_FILES, "model.safetensors"}


def overridden(name, value):
    return f"{name}={json.dumps(value) if isinstance(value, list | bool) else value}"


def tokens_key(settings):
    """Where the tokens of a training are cached."""
    here = Processes(0, 1, torch.device("cpu"))
    made, _ = prepare.prepare(run_of(settings), RunFolder(Path("new")), here, None)
    return [made.candidates and made.candidates.tokens, *(split.tokens for split in made.splits.values())]


def texts_key(model, settings):
    """What predictions are kept with."""
    allowed = [one for one in settings if one.startswith(("data.", "generation.", "task"))]
    work = job(model, data="data", overrides=allowed)
    writer = writer_of(work, *load_model(work), has_lines=work.has_lines)
    return predictions._settings(work, writer) | data_facts(work, read_split(work))


def study_key(settings):
    """What a result of a study is kept with."""
    study = plan.read(ROOT / "studies/pairs.toml")
    training = Training(study.sets[0].name, study.objectives[0], (), 1, TEST)
    study._recipes[training] = settings
    return study.facts(training, next(iter(study.decodings)))


def python_key(settings):
    """What a training in Python agrees on: data and model are objects there."""
    own = OwnTexts(settings.online, list, settings.generation)
    return python_made_of(tiny("bart"), [], settings.train, settings.objective, precision="fp32", own_texts=own)


@pytest.fixture(scope="module")
def shared(made):
    """A folder in which nothing is changed, with other models and other candidates."""
    tokenizer = AutoTokenizer.from_pretrained(made / "base")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
    tokenizer.save_pretrained(made / "causal")
    loading.load(Model("scratch", architecture="llama"), tokenizer).save_pretrained(made / "causal")
    shutil.copytree(made / "base", made / "other")
    swap_tokens(made / "other")
    shutil.copytree(made / "compared", made / "others")
    rows = [json.loads(line) for line in (made / "others" / "candidates.jsonl").read_text().splitlines()]
    rows[0]["scores"] = [0.125, 0.25]
    write_rows(made / "others" / "candidates.jsonl", rows)
    return made


LANGUAGES = [name for name, (_, _, *given) in SETTINGS.items() if "multilingual" in given]


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in LANGUAGES])
def test_a_setting_changes_the_keys_of_what_it_changes(shared, monkeypatch, name):
    monkeypatch.chdir(shared)
    value, kinds, *given = SETTINGS[name]
    change = overridden(name, value)
    before, after = (recipe.load("tiny.toml", [*given, *more]) for more in ((), (change,)))
    assert [line.partition(":")[0] for line in recipe.differences(before, after)] == [name]
    counts = name not in recipe.only_speed()
    assert [*recipe.changed_settings(before, after)] == [name] * counts, "whether a run is continued"
    recorded = [json.loads(record_of({}, settings)) for settings in (before, after)]
    is_place = "place" in recipe.every_setting()[name].affects  # its content is recorded
    assert [*changes(*recorded)] == [name] * (counts and not is_place)
    assert [*changes(study_key(before), study_key(after))] == [name] * counts
    in_python = name.startswith(("objective", "online.", "generation.")) or name[6:] in recipe.affecting(
        "weights", "scores", section="train"
    )
    assert [*changes(python_key(before), python_key(after))] == [name] * in_python
    if not name.startswith("train.") and (name == "model.vocabulary" or "scratch" not in after.model.name):
        offline = [replace(each, model=replace(each.model, revision="main")) for each in (before, after)]
        assert (tokens_key(offline[0]) != tokens_key(offline[1])) == ("tokens" in kinds)
    if name.startswith("data.") and name in recipe.affecting("rows", "weights"):
        with pytest.raises(UserError, match=f"{name} is a setting of train"):
            texts_key("base", [change])
    elif name.startswith(("data.", "generation.", "task")) and not given:
        keys = [texts_key("base", [*given, *more]) for more in ((), (change,))]
        assert (keys[0] != keys[1]) == ("texts" in kinds)
    if name == "model.name":
        assert texts_key("base", []) != texts_key("other", [])


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_language_changes_the_tokens_and_the_texts_of_a_multilingual_model(shared, monkeypatch, tmp_path, name):
    monkeypatch.chdir(shared)
    folder = str(tiny_multilingual.model_folder("mbart", tmp_path / "model"))
    both = ["data.source_language=en_XX", "data.target_language=en_XX"]
    keys = []
    for more in ([], [overridden(name, SETTINGS[name][0])]):
        settings = recipe.load("tiny.toml", [f"model.name={folder}", *both, *more])
        keys.append((tokens_key(settings), texts_key(folder, [*both, *more])))
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]
