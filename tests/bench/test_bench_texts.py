"""Documents per second of finished runs."""

import pytest
from benchmarks import medians
from commands import EASY_RECIPE, write_easy_rows

from ngramloss.cli import main


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_each_writer_is_timed_with_its_own_settings(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for split, count in (("train", 20), ("validation", 5), ("test", 9)):
        write_easy_rows(tmp_path / "data" / f"{split}.jsonl", count, count)
    (tmp_path / "easy.toml").write_text(EASY_RECIPE.format(data=tmp_path / "data"))
    run = str(tmp_path / "run")
    assert main(["train", str(tmp_path / "easy.toml"), "--run", run, "--set", "train.max_steps=2"]) == 0
    writers = ["--writer", run, "generation.num_beams=1", "--writer", run, "generation.num_beams=4"]
    out = tmp_path / "texts.json"
    numbers = ["--batch-size", "4", "--repeats", "1", "--device", "cpu", "-o", str(out)]
    assert main(["bench", "texts", *writers, *numbers]) == 0
    assert "9 documents of" in capsys.readouterr().out
    found = medians(out)
    for beams in (1, 4):
        own = found[f"{run} num_beams={beams}"]
        assert own["ms a batch"] == pytest.approx(1e3 * 9 / 3 / own["docs/s"], rel=1e-6)
    assert found[f"{run} num_beams=1"]["× first"] == 1.0


def test_a_writer_is_a_run(tmp_path, capsys):
    assert main(["bench", "texts", "--writer", str(tmp_path), "--device", "cpu"]) == 2
    assert str(tmp_path) in capsys.readouterr().err
