"""Documents per second of each engine: what is measured, compared and printed."""

import json

import pytest

from ngramloss.bench import generate
from ngramloss.cli import main
from ngramloss.errors import UserError

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
    "1",
    "--device",
    "cpu",
]


def setup(**changes):
    common = {
        "model": "bart-tiny",
        "batches": (2,),
        "beams": 2,
        "length": 8,
        "source": 12,
        "repeats": 1,
        "device": "cpu",
        "seed": 0,
        "cache": "",
    }
    return generate.Setup(**{**common, **changes})


def test_every_engine_writes_texts_of_the_given_length(tmp_path, monkeypatch):
    monkeypatch.setenv("NGRAMLOSS_CACHE", "put back after the test")
    first, second = (
        generate.written(setup(cache=str(tmp_path), batches=(1, 3)), name) for name in ("hf", "ctranslate2")
    )
    assert [measured.texts for measured in first] == [measured.texts for measured in second]
    assert [len(measured.texts) for measured in first] == [1, 3]
    assert {len(text) for measured in first for best in measured.texts for text in best} == {8}
    for measured in (*first, *second):
        row = measured.row
        assert row.tokens_per_second == pytest.approx(7 * row.docs_per_second)
        assert 0.05 < row.gibibytes < 50


def test_prompts_are_read_and_new_tokens_are_counted():
    """Of the first engine, too: it begins with the last token of a prompt, and writes this many behind it."""
    first, second = (generate.written(setup(model="llama-tiny", batches=(1, 3)), name) for name in ("hf", "graph"))
    assert [measured.texts for measured in first] == [measured.texts for measured in second]
    assert {len(text) for measured in first for best in measured.texts for text in best} == {9}
    assert first[0].row.tokens_per_second == pytest.approx(8 * first[0].row.docs_per_second)


def test_engines_are_compared_with_hugging_face_at_the_same_batch():
    stock = [generate.Measured(generate.Row("hf", 2, 4.0), [[[1]], [[2]]])]
    other = [generate.Measured(generate.Row("x", 2, 10.0), [[[1]], [[3]]])]
    (row,) = generate.compared(other, stock)
    assert (row.to_hf, row.to_best_hf, row.same) == (2.5, 2.5, 0.5)
    (failed,) = generate.compared([generate.Measured(generate.Row("x", 2, why_not="no"), [])], stock)
    assert failed.same != failed.same


def test_an_engine_that_fails_gets_a_line_with_the_reason():
    text = generate.as_text(
        [
            generate.Row("hf", 1, 2.0, 20.0, 1.0, 0.8, 1.0, 0.5),
            *(generate.Row("x", batch, why_not="no library") for batch in (1, 8)),
        ]
    )
    assert text.splitlines()[1].split() == [
        "batch",
        "1:",
        "Hugging",
        "Face",
        "(hf)",
        "2.00",
        "20.0",
        "1.00",
        "0.80",
        "100",
        "0.50",
    ]
    assert text.splitlines()[2:] == ["ngramloss, x: no library"]


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
        ({"batches": (0, 2)}, "--batch must be 1 or more, got 0."),
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
        generate.raise_unless_possible(setup(**changes))
    assert str(raised.value) == sentence


@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json_and_a_chart(tmp_path, capsys):
    files = ["-o", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main([*TINY, "--batch-size", "1", "2", "--engines", "ctranslate2", *files]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("bart-tiny, 4 beams, 12 → 8 tokens, fp32\n")
    assert [line.split(":")[0] for line in printed.splitlines()[3:]] == ["batch 1", "batch 1", "batch 2", "batch 2"]
    content = json.loads((tmp_path / "a.json").read_text())
    assert content["settings"]["batches"] == [1, 2]
    assert [row["engine"] for row in content["rows"]] == ["hf", "ctranslate2"] * 2
    assert all(row["same"] == 1.0 for row in content["rows"])
    assert (tmp_path / "a.png").stat().st_size > 1000
