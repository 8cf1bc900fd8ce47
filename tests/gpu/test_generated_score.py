"""Validation by generated texts on a GPU: captured steps go on as if nothing had been generated."""

import json

import pytest
import torch
from commands import EASY_RECIPE, EASY_STEPS, write_easy_rows
from safetensors.torch import load_file

from ngramloss import cli

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("own_cache"),
]


def trained(place, run, *changes):
    assert (
        cli.main(
            [
                "train",
                str(place / "easy.toml"),
                "--run",
                str(run),
                *(word for one in changes for word in ("--set", one)),
            ]
        )
        == 0
    )
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return load_file(run / "checkpoints" / f"checkpoint-{EASY_STEPS}" / "model.safetensors"), lines


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_captured_steps_end_at_the_same_weights_with_and_without_generation(tmp_path, capsys, precision):
    (tmp_path / "data").mkdir()
    write_easy_rows(tmp_path / "data" / "train.jsonl", 60, 0)
    write_easy_rows(tmp_path / "data" / "validation.jsonl", 11, 1)
    (tmp_path / "easy.toml").write_text(EASY_RECIPE.format(data=tmp_path / "data"))
    with_texts, lines = trained(tmp_path, tmp_path / "rouge", f"train.precision={precision}")
    without, _ = trained(tmp_path, tmp_path / "ce", f"train.precision={precision}", "train.best=ce")
    assert "steps are not captured" not in capsys.readouterr().err
    assert [line["step"] for line in lines if "eval_rouge2" in line] == [2, 4, 6, 8, 10, 12]
    for name, value in without.items():
        torch.testing.assert_close(with_texts[name], value, atol=1e-5, rtol=0)
