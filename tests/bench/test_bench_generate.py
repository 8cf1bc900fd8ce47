"""Documents per second of each engine: what is measured, compared and printed."""

import json
from argparse import Namespace

import pytest
from benchmarks import medians

from ngramloss.cli import main
from ngramloss.errors import UserError
from ngramloss_bench import benchmark, generate
from ngramloss_bench.benchmark import Measured

pytest.importorskip("ctranslate2")
TINY = [
    "bench",
    "generate",
    "--model",
    "bart-tiny",
    "--source",
    "12",
    "--length",
    "8",
    "--repeats",
    "2",
    "--device",
    "cpu",
]


def options(**changes):
    common = {"model": "bart-tiny", "batch_size": [2], "beams": 2, "length": 8, "source": 12, "repeats": 1, "seed": 0}
    return Namespace(**{**common, "device": "cpu", "precision": "fp32", "plugin": [], **changes})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_CACHE", "put back after the test")
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_every_engine_writes_texts_of_the_given_length(cache, batch):
    (values, first), (_, second) = (generate.written(options(), cache, name, batch) for name in ("hf", "ctranslate2"))
    assert first == second
    assert len(first) == batch
    assert {len(text) for best in first for text in best} == {8}
    assert values["tokens/s"] == pytest.approx([7 * each for each in values["docs/s"]])
    assert 0.05 < values["peak GiB"][0] < 50


@pytest.mark.slow
def test_prompts_are_read_and_new_tokens_are_counted(cache):
    """Of the first engine, too: it begins with the last token of a prompt, and writes this many behind it."""
    prompted = options(model="llama-tiny")
    (values, first), (_, second) = (generate.written(prompted, cache, name, 3) for name in ("hf", "graph"))
    assert first == second
    assert {len(text) for best in first for text in best} == {9}
    assert values["tokens/s"] == pytest.approx([8 * each for each in values["docs/s"]])


def test_engines_are_compared_with_hugging_face_at_the_same_batch():
    rows = [
        Measured(generate.label(name), f"batch {batch}", {"docs/s": [speed]})
        for name, batch, speed in (("hf", 1, 2.0), ("hf", 2, 4.0), ("x", 2, 10.0))
    ]
    rows.append(Measured(generate.label("y"), "batch 2", why_not="no"))
    texts = {("batch 2", row.name): [[[1]], [[number]]] for number, row in enumerate(rows) if row.group == "batch 2"}
    benchmark.relate(generate.COLUMNS, rows)
    generate.compare(texts, rows)
    assert [(row.median("× hf"), row.median("× best hf")) for row in rows[:3]] == [(1, 0.5), (1, 1), (2.5, 2.5)]
    assert rows[2].median("same texts %") == 50
    assert "× hf" not in rows[3].values


def test_hugging_face_is_always_measured_first():
    assert generate.chosen(["ctranslate2-int8"]) == ["hf", "ctranslate2-int8"]
    assert generate.chosen([]) == ["hf", "graph", "ctranslate2", "ctranslate2-int8"]
    with pytest.raises(UserError, match="auto is not an engine of its own"):
        generate.chosen(["auto"])
    with pytest.raises(UserError, match="unknown engine 'fast'"):
        generate.chosen(["fast"])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"batch_size": [0, 2]}, "--batch-size must be 1 or more, got 0."),
        ({"source": 2000}, "--source must be from 1 to 1,024 for bart-tiny, got 2,000."),
        ({"length": 3}, "--length must be from 4 to 1,024 for bart-tiny, got 3."),
        (
            {"model": "llama-tiny", "source": 1000, "length": 25},
            "--source and --length are 1,025 together, but llama-tiny has 1,024 positions.",
        ),
    ],
)
def test_numbers_that_cannot_be_are_a_sentence(changes, sentence):
    with pytest.raises(UserError) as raised:
        generate.raise_unless_possible(options(**changes))
    assert str(raised.value) == sentence


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys):
    files = ["-o", str(tmp_path / "a.json")]
    assert main([*TINY, "--batch-size", "1", "2", "--engines", "ctranslate2", *files]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "bart-tiny, 4 beams, 12 → 8 tokens, fp32"
    engines = ["Hugging Face (hf)", "ngramloss, ctranslate2"]
    assert [line.split("  ")[0] for line in printed[2:]] == ["batch 1", *engines, "batch 2", *engines]
    assert json.loads((tmp_path / "a.json").read_text())["settings"]["batch_size"] == [1, 2]
    lines = medians(tmp_path / "a.json")
    assert list(lines) == [(f"batch {batch}", name) for batch in (1, 2) for name in engines]
    assert all(row["same texts %"] == 100 for row in lines.values())
