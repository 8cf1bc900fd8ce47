"""One table in every form: marks, decimals and escapes are written in one place."""

import math

import pytest

from ngramloss.output import console, tabular
from ngramloss.output.tabular import Cell, Head, Row, Table

TABLE = Table(
    [Head("rouge1", "R-1"), Head("wmd", "WMD", lower=True), Head("docs_per_second", "Docs/s")],
    systems=[
        Row(
            "a",
            "ce",
            [Cell("41.57", 41.5678, interval="±0.50"), Cell("4.520", 4.52), Cell("29.00", 29.0, note="×1.00")],
        ),
        Row("b", "50%_x | y", [Cell("41.87", 41.87, "**", "±0.51", best=True), Cell("–"), Cell("–")]),
    ],
    baselines=[Row("lead", "lead-3", [Cell("16.30", 16.3), Cell("6.160", 6.16), Cell("–")], "baseline")],
    paper=[Row("BART", "BART", [Cell("41.63", 41.63), Cell("–"), Cell("–", note="−1, +2")], "paper")],
    corner="system",
    intervals=True,
)


def test_text_is_aligned_and_has_intervals_marks_and_notes():
    lines = tabular.as_text(TABLE).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split() == ["ce", "41.57", "±0.50", "4.520", "29.00", "(×1.00)"]
    assert "41.87 ±0.51**" in lines[3]
    assert lines[4].endswith("– (-1, +2)"), "a minus that other programs read"


def test_markdown_says_which_rows_are_the_papers():
    assert tabular.as_markdown(TABLE).text.splitlines() == [
        "| system | R-1 | WMD ↓ | Docs/s |",
        "| --- | ---: | ---: | ---: |",
        "| lead-3 | 16.30 | 6.160 | – |",
        "| ce | 41.57 ±0.50 | 4.520 | 29.00 (×1.00) |",
        r"| 50%\_x \| y | **41.87** ±0.51\*\* | – | – |",
        "| BART (paper) | 41.63 | – | – (−1, +2) |",
    ]


def test_latex_has_rules_between_the_groups():
    assert tabular.as_latex(TABLE).text.splitlines() == [
        r"\begin{tabular}{lrrr}",
        r"\toprule",
        r"system & R-1 & WMD $\downarrow$ & Docs/s \\",
        r"\midrule",
        r"lead-3 & 16.30 & 6.160 & -- \\",
        r"\midrule",
        r"ce & 41.57 $\pm$0.50 & 4.520 & 29.00 ($\times$1.00) \\",
        r"50\%\_x | y & \textbf{41.87} $\pm$0.51$^{**}$ & -- & -- \\",
        r"\midrule",
        r"BART & 41.63 & -- & -- ($-$1, +2) \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


@pytest.mark.parametrize("write", [tabular.as_markdown, tabular.as_latex])
def test_rows_can_be_put_in_another_order(write):
    parts = write(TABLE)
    assert len(parts.rows) == 2
    assert parts.text.split("\n") == [*parts.before, *parts.rows, *parts.after]


def test_intervals_are_left_out_where_a_table_has_none():
    plain = Table(TABLE.heads, TABLE.systems)
    for text in (tabular.as_text(plain), tabular.as_markdown(plain).text, tabular.as_latex(plain).text):
        assert "±" not in text
        assert r"\pm" not in text
        assert "**" in text


@pytest.mark.parametrize(
    "write",
    [tabular.as_text, lambda table: tabular.as_markdown(table).text, lambda table: tabular.as_latex(table).text],
)
def test_a_label_or_a_head_cannot_leave_its_line(write):
    table = Table([Head("a\nb\x1b[2J")], [Row("=1+1", "x\ny\x1b[2J", [Cell("1", 1.0)])])
    text = write(table)
    assert "\x1b" not in text
    assert len(text.splitlines()) <= 7  # LaTeX has five lines around it
    assert "\n=1" not in text


def test_a_corrected_p_is_marked_and_nothing_else():
    assert [tabular.mark(p) for p in (None, math.nan, 0.5, 0.05, 0.049, 0.01, 0.009)] == [
        "",
        "",
        "",
        "",
        "*",
        "*",
        "**",
    ]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_no_number_is_a_dash_or_nothing(missing):
    assert (console.fixed(missing, 2), tabular.signed(missing, 2)) == ("–", "–")
    assert (tabular.half_width(missing, 1.0, 2), tabular.half_width(0.0, missing, 2), tabular.chance(missing)) == (
        "",
        "",
        "",
    )
