"""Work is reused only for what it was made from: one thing is changed, then it is refused or made again."""

import json
import shutil
from types import SimpleNamespace

import pytest
from changes import MODEL_FILES, change_weights, swap_tokens
from models import TINY_MODEL

from ngramloss import checksums, cli, recipe
from ngramloss.data import newswire
from ngramloss.training import runner

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
            [{"id": str(number), "document": item.document, "summary": item.summary} for number, item in items],
        )
    (folder / "tiny.toml").write_text(RECIPE + TINY_MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert train("train.max_steps=1", "train.eval_every=0", run="first") == 0
        (folder / "first" / "model").rename(folder / "base")
        (folder / "tiny.toml").write_text(RECIPE + '[model]\nname = "base"\n')
        assert train() == 0
    shutil.rmtree(folder / "run" / "model")
    for step in (2, 3):
        shutil.rmtree(folder / "run" / "checkpoints" / f"checkpoint-{step}")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of that folder, in which paths are the same."""
    monkeypatch.chdir(shutil.copytree(made, tmp_path / "place"))
    return tmp_path / "place"


# A run is continued


FILES = "files of the model have changed since run was started ({}). Restore them to continue, or start over with --fresh."


def edit_split(split):
    def edit(place):
        path = place / "data" / f"{split}.jsonl"
        path.write_text(path.read_text().replace(".", "!", 1))

    return edit


CONTINUED = {
    **{
        name: (lambda place, change=change: change(place / "base"), FILES.format(name))
        for name, change in MODEL_FILES.items()
    },
    "training data": (edit_split("train"), "the train data have changed since run was started"),
    "validation data": (edit_split("validation"), "the validation data have changed since run was started"),
}


@pytest.mark.parametrize("changed", CONTINUED)
def test_a_run_is_not_continued_if_one_thing_has_changed(place, capsys, changed):
    change, sentence = CONTINUED[changed]
    change(place)
    capsys.readouterr()
    assert train() == 2
    assert sentence in capsys.readouterr().err
    assert not (place / "run" / "model").exists()


def test_a_run_continues_from_its_own_weights_whatever_those_of_the_base_are(place, capsys):
    change_weights(place / "base")
    assert train() == 0
    assert "continuing run from step 1" in capsys.readouterr().err


def test_a_model_on_the_hub_is_known_by_its_commit(monkeypatch):
    monkeypatch.setattr(runner.models, "load_config", lambda *_, **__: SimpleNamespace(_commit_hash="abc"))
    assert runner._model_files(recipe.load("xsum"), False) == {"commit": "abc"}
    assert runner._model_files(recipe.load("demo"), False) == {}


def forget(checkpoint, *kinds):
    """Make a checkpoint such as one of an earlier version, which does not say so much."""
    facts = {name: value for name, value in checksums.facts(checkpoint).items() if name not in ("files", "checksum")}
    saved = json.loads((checkpoint / "data.json").read_text())
    for kind in kinds:
        del saved[kind]
    (checkpoint / "data.json").write_text(json.dumps(saved))
    checksums.seal(checkpoint, **facts)


def test_a_run_is_not_continued_with_other_tokens_of_the_same_texts(place, capsys):
    forget(place / "run" / "checkpoints" / "checkpoint-1", "model_files")
    swap_tokens(place / "base")
    assert train() == 2
    assert (
        "the tokens (train, validation) are not those with which run was started, although the texts are: the "
        "tokenizer has changed, or the version of the package that splits sentences. Restore it to continue, or start "
        "over with --fresh."
    ) in capsys.readouterr().err


def test_a_run_of_an_earlier_version_continues(place, capsys):
    forget(place / "run" / "checkpoints" / "checkpoint-1", "model_files", "tokens")
    swap_tokens(place / "base")
    assert train() == 0
    assert "continuing run from step 1" in capsys.readouterr().err
