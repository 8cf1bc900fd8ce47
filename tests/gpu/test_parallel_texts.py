"""A parallel model on a GPU: it trains in both precisions, captured as without, and writes the CPU's texts."""

import json
from pathlib import Path

import pytest
import torch
from commands import EASY_RECIPE, write_easy_rows

from ngramloss import TextGenerator, cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("own_cache"),
]


@pytest.mark.parametrize("inputs", ["copy", "random"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_trains_and_writes_the_texts_of_the_cpu(tmp_path, capsys, precision, inputs):
    (tmp_path / "data").mkdir()
    write_easy_rows(tmp_path / "data" / "train.jsonl", 60, 0)
    write_easy_rows(tmp_path / "data" / "validation.jsonl", 11, 1)
    text = EASY_RECIPE.format(data=tmp_path / "data").partition("[generation]")[0]
    (tmp_path / "easy.toml").write_text(text)
    changes = [f"system=parallel(inputs={inputs})", "objective=ce@until(0.5) + bag(2)@from(0.5)", "train.best=last"]
    changes += [f"train.precision={precision}"]
    losses = {}
    for run, capture in (("run", "true"), ("eager", "false")):
        command = ["train", str(tmp_path / "easy.toml"), "--run", str(tmp_path / run)]
        more = [*changes, f"train.capture={capture}", "model.dropout=0.0"]
        assert cli.main([*command, *(word for one in more for word in ("--set", one))]) == 0
        said = capsys.readouterr().err
        assert "steps are not captured" not in said
        lines = [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        losses[run] = [line["loss"] for line in lines if "loss" in line]
        assert all(0 <= line["eval_repeats"] <= 1 for line in lines if "eval_loss" in line)
    if inputs == "copy":  # other places are hidden in batches of other shapes
        tolerance = 1e-3 if precision == "fp32" else 0.1
        assert losses["run"] == pytest.approx(losses["eager"], rel=tolerance)
    rows = [json.loads(line) for line in Path(tmp_path / "data" / "validation.jsonl").read_text().splitlines()]
    sources = {"document": [row["document"] for row in rows]}
    settings = ["system=parallel(passes=3)"] if inputs == "random" else []
    texts = [TextGenerator(tmp_path / "run", device=place, settings=settings)(sources) for place in ("cpu", "cuda")]
    assert texts[0] == texts[1]
