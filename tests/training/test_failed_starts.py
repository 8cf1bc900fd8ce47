"""A training that cannot start says what to do first, and leaves nothing behind."""

import json

import pytest

from ngramloss import cli

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("recipe", "first"),
    [
        ("online-demo", "demo"),
        ("fes-demo", "lm-demo"),
        ("bertsum-abs-demo", "bertsum-ext-demo --run runs/bertsum-ext-demo"),
    ],
)
def test_a_recipe_that_needs_another_run_names_its_recipe(tmp_path, monkeypatch, capsys, recipe, first):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", recipe, "--set", "data.limit=8", "--set", "data.validation_limit=4"]) == 2
    said = capsys.readouterr().err
    assert "there is no such folder" in said
    assert f". Train it first: ngramloss train {first}.\n" in said
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize("there", [(), ("recipe.toml",), ("notes.txt",)], ids=["no folder", "a recipe", "notes"])
def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path, capsys, there):
    run = tmp_path / "run"
    for name in there:
        run.mkdir(exist_ok=True)
        (run / name).write_text('objective = "ce"\n')
    (tmp_path / "train.jsonl").write_text(json.dumps({"text": "a", "label": 1}) + "\n")
    for _ in range(2):
        assert cli.main(["train", "demo", "--run", str(run), "--set", f'data.name="{tmp_path}"']) == 2
        assert "error: " in capsys.readouterr().err
    assert {path.name for path in run.glob("*")} - {"checkpoints"} == {*there}
    assert run.exists() == bool(there)
