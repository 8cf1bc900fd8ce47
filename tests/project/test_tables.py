"""Numbers on pages come from files: each marked table is what its JSON says."""

import json

import pytest
from places import ROOT

BENCHMARKS = sorted((ROOT / "benchmarks").glob("*.json"))


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import tables

    return tables


@pytest.mark.slow  # each study's tables are printed by a command
def test_tables_of_pages_are_those_of_their_files(tables):
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.filled(text) == text, f"{page.name}: python website/tables.py"
    assert sum(page.read_text(encoding="utf-8").count("<!-- table: ") for page in tables.PAGES) > 15


def test_the_picture_of_a_late_text_shows_what_the_objectives_compute(tables):
    import one_token_late

    assert one_token_late.PICTURE.read_text(encoding="utf-8") == one_token_late.picture()


def test_a_number_that_differs_from_its_file_is_found(tables):
    mark = "<!-- table: benchmarks/step.json | | ms -->\n{}<!-- end of table -->\n"
    right = tables.filled(mark.format(""))
    assert "62.0" in right
    assert tables.filled(right.replace("62.0", "61.0")) == right


@pytest.mark.parametrize("file", BENCHMARKS, ids=lambda file: file.stem)
def test_every_benchmark_says_how_it_was_measured(file):
    content = json.loads(file.read_text(encoding="utf-8"))
    assert content["command"]
    assert content["machine"]
    assert content["versions"]["torch"]
    assert all(row["values"] and {"group", "name", "column", "unit", "median"} <= set(row) for row in content["rows"])


def test_repeats_and_spread_stand_beside_a_median(tables, tmp_path):
    row = {
        "group": "",
        "name": "x",
        "column": "ms",
        "unit": "ms",
        "values": [4.9, 5.0, 5.2],
        "median": 5.0,
        "spread": 0.15,
    }
    content = {"command": "c", "machine": "m", "versions": {"torch": "2"}, "rows": [row]}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    shown = tables.benchmark(file)
    assert "| x | 5.00 ±3% |" in shown
    assert "medians of 3 runs" in shown


def test_parts_of_one_machine_are_one_table(tables, tmp_path):
    row = {
        "group": "",
        "name": "x",
        "column": "ms",
        "unit": "ms",
        "values": [5.0, 5.0, 5.0],
        "median": 5.0,
        "spread": 0.0,
    }
    once = row | {"column": "GiB", "values": [1.0], "median": 1.0, "spread": None}
    for name, groups in (("a", [""]), ("b", ["one", "two"])):
        content = {"machine": "m", "versions": {"torch": "2"}, "code": "c", "part": name.upper(), "command": name}
        rows = [each | {"group": group} for group in groups for each in (row, once)]
        (tmp_path / f"x_{name}.json").write_text(json.dumps(content | {"rows": rows}), encoding="utf-8")
    lines = tables.benchmark(tmp_path / "x_*.json").splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| A", "| B, one", "| B, two"]
    assert lines[-1] == "*m, torch 2; medians of 3 runs, ± interquartile range; `ngramloss bench all`*"
    (tmp_path / "x_b.json").write_text((tmp_path / "x_b.json").read_text().replace('"m"', '"n"'))
    with pytest.raises(SystemExit, match="of different machines"):
        tables.benchmark(tmp_path / "x_*.json")


def test_the_corrected_p_decides_what_is_bold(tables, monkeypatch):
    row = {"row": "ce + dft", "seeds": "5", "R-2": "2.00", "difference": "+1.00*", "95% interval": "0 to 2"}
    for corrected, shown in (("0.051", "+1.00"), ("0.049", "**+1.00**"), ("< 0.001", "**+1.00**")):
        rows = [row | {"p (Holm)": corrected, "p documents (Holm)": "0.5"}]
        monkeypatch.setattr(tables, "_shown", lambda file, rows=rows: {("a", "confirmed"): rows})
        assert tables._confirmed("x")[1][3] == shown
