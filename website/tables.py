"""marked pages, and the JSON of benchmarks and studies → the pages with their tables.

    python website/tables.py            # fill the tables of all pages
    python website/tables.py --check    # name the pages whose tables differ from their files

A table stands between two marks. The first names its source:

    <!-- table: benchmarks/head.json | B=64 T=128 V=50,265 D=768 | ms, GiB -->
    <!-- table: studies/ngram-terms.toml | confirmed -->
    <!-- table: studies/ngram-terms.toml | decoded | greedy -->
    <!-- end of table -->

For a benchmark, a group and columns may follow; all of them by default. The name may be a pattern: then each file is a
part of ``ngramloss bench all``, and a group of rows. For a study: ``confirmed``,
``screened``, or ``decoded`` and how.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from ngramloss.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARK = re.compile(r"(?P<open><!-- table: (?P<what>.+?) -->\n).*?(?P<close><!-- end of table -->)", re.S)


def filled(text: str) -> str:
    """A page with the tables that its marks name."""
    return MARK.sub(lambda mark: mark["open"] + table(*map(str.strip, mark["what"].split("|"))) + mark["close"], text)


def table(file: str, *choices: str) -> str:
    """The Markdown of one table."""
    made = benchmark if file.endswith(".json") else study
    return "\n" + made(ROOT / file, *choices) + "\n\n"


# Benchmarks


def benchmark(file: Path, group: str = "", columns: str = "") -> str:
    """The rows of a benchmark's file, with its machine, versions and repeats below."""
    if "*" not in file.name:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = content["rows"]
    else:
        parts = [json.loads(each.read_text(encoding="utf-8")) for each in sorted(file.parent.glob(file.name))]
        rows = [row | {"group": part_group(part, row)} for part in parts for row in part["rows"]]
        content = parts[0] | {"command": "ngramloss bench all" + " --gpu" * ("NVIDIA" in parts[0]["machine"])}
        if any(part[name] != content[name] for part in parts for name in ("machine", "versions", "code")):
            raise SystemExit(
                f"the parts of {file.name} are of different machines, versions or code: measure them again."
            )
    rows = [row for row in rows if not group or row["group"] == group]
    heads = (
        [name.strip() for name in columns.split(",")] if columns else list(dict.fromkeys(row["column"] for row in rows))
    )
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cells.setdefault((row["group"], row["name"]), {})[row["column"]] = _value(row)
    if missing := set(heads) - {row["column"] for row in rows}:
        raise SystemExit(f"{file.name} has no column {sorted(missing)[0]!r}.")
    grouped = len({row["group"] for row in rows}) > 1
    lines = [[""] * (1 + grouped) + heads]
    for (of, name), found in cells.items():
        label = [of if lines[-1][0] != of and not any(line[0] == of for line in lines) else "", name]
        lines.append(label[not grouped :] + [found.get(head, "") for head in heads])
    return f"{_markdown(lines, 1 + grouped)}\n\n*{_conditions(content, rows)}*"


def part_group(part: dict[str, Any], row: dict[str, Any]) -> str:
    """The title of a part, and the row's group in it if it says more than the name of the part's only one."""
    groups = {each["group"] for each in part["rows"]}
    return f"{part['part']}, {row['group']}" if len(groups) > 1 else str(part["part"])


def _conditions(content: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    repeats = sorted({len(row["values"]) for row in rows})
    versions = ", ".join(
        f"{name} {number}" for name, number in content["versions"].items() if name in ("torch", "transformers")
    )
    repeated = [number for number in repeats if number > 1]  # memory and shares are measured once
    times = f"medians of {'–'.join(map(str, repeated))} runs, ± interquartile range" if repeated else "one run"
    return f"{content['machine']}, {versions}; {times}; `{content['command']}`"


def _value(row: dict[str, Any]) -> str:
    """A median as short as it is certain, with its spread."""
    unit, number = row["unit"], row["median"]
    shown = (
        f"{number:,.0f}"
        if abs(number) >= 100 or unit == "%"
        else f"{number:.1f}"
        if abs(number) >= 10
        else f"{number:.2f}"
    )
    spread = f" ±{100 * row['spread'] / number:.0f}%" if row.get("spread") else ""
    return shown + ("%" if unit == "%" else "") + spread


# Studies


@cache
def _shown(file: Path) -> dict[tuple[str, str], list[dict[str, str]]]:
    """Set and first word of a title → the rows of that table, as ``ngramloss study FILE --show`` prints it."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(["study", str(file), "--show", "--markdown"]) == 0
    printed = output.getvalue()
    found: dict[tuple[str, str], list[dict[str, str]]] = {}
    title, head = ("", ""), []
    for line in printed.splitlines():
        cells = [re.sub(r"\\([*<])", r"\1", cell.strip()) for cell in line.strip("|").split(" |")]
        if named := re.match(r"(\w+): (tuned|screened|confirmed|compared|all) ", line):
            title, head = (named[1], named[2]), []
        elif line.startswith("| ") and not head:
            head = cells
        elif line.startswith("| ") and not line.startswith("| ---"):
            found.setdefault(title, []).append(dict(zip(head, cells, strict=True)))
    return found


def _confirmed(file: Path) -> list[list[str]]:
    """Test data, the primary score of each set. Bold: below 5% after Holm's correction, over seeds."""
    lines = [["set", "row", "score", "difference", "95% interval", "p, Holm", "p over documents, Holm"]]
    for (of, title), rows in _shown(file).items():
        for row in rows if title in ("confirmed", "compared") else []:
            score = next(name for name in row if name not in ("row", "seeds"))
            corrected = row["p (Holm)"]
            difference = row["difference"].rstrip("* ")
            if corrected not in ("", "–") and float(corrected.lstrip("<≤ ")) < 0.05:
                difference = f"**{difference}**"
            label = of if row is rows[0] else ""
            value = f"{score} {row[score].rstrip('* ')}"
            lines.append(
                [label, f"`{row['row']}`", value, difference, row["95% interval"], corrected, row["p documents (Holm)"]]
            )
    return lines


def _screened(file: Path) -> list[list[str]]:
    """Validation data: the first row's score, and what the others differ by."""
    sets = {of: rows for (of, title), rows in _shown(file).items() if title == "screened"}
    found: dict[str, dict[str, str]] = {}
    for of, rows in sets.items():
        for row in rows:
            score = [*row][[*row].index("difference") - 1]
            found.setdefault(row["row"], {})[of] = row["difference"] or row[score].split(" ±")[0]
    return [["row", *sets], *([f"`{row}`", *(cells.get(of, "") for of in sets)] for row, cells in found.items())]


def _decoded(file: Path, decoding: str) -> list[list[str]]:
    """Test data, decoded in a way that was not the primary one. Student's t over seeds, not corrected."""
    from scipy.stats import ttest_rel

    study = tomllib.loads(file.read_text(encoding="utf-8"))
    lines = [["set", "row", f"score, {decoding}", "difference", "95% interval", "seeds with a gain"]]
    for of, rows in ((of, rows) for (of, title), rows in _shown(file).items() if title in ("confirmed", "compared")):
        label = next(name for name in rows[0] if name not in ("row", "seeds"))
        names = {row["row"]: _scores(file, of, row["row"], decoding, label) for row in rows}
        first = names[study.get("baseline") or rows[0]["row"]]
        for row, scores in names.items():
            cells = ["", "", ""]
            if scores is not first:
                ours, theirs = zip(*((scores[seed], first[seed]) for seed in sorted({*scores} & {*first})), strict=True)
                gained = sum(our > their for our, their in zip(ours, theirs, strict=True))
                cells = [_signed(mean(ours) - mean(theirs)), "–", f"{gained} of {len(ours)}"]
                if len(ours) > 1:
                    cells[1] = " to ".join(map(_signed, ttest_rel(ours, theirs).confidence_interval()))
            lines.append([of if scores is first else "", f"`{row}`", f"{label} {mean(scores.values()):.2f}", *cells])
    return lines


def _scores(file: Path, of: str, row: str, decoding: str, label: str) -> dict[int, float]:
    """Seed → score on test data."""
    name = {"R-2": "rouge2"}.get(label, label.lower())
    results = [
        json.loads(path.read_text(encoding="utf-8"))
        for path in file.with_suffix("").glob(f"{of}/*.test.{decoding}.json")
    ]
    return {one["seed"]: one["scores"][name] for one in results if one["objective"] == row}


def _signed(number: float) -> str:
    return f"{number:+.2f}".replace("-", "−")


def study(file: Path, what: str, *more: str) -> str:
    """A table of a study, all its sets in one."""
    lines = {"confirmed": _confirmed, "screened": _screened, "decoded": _decoded}[what](file, *more)
    return _markdown(lines, 1 if what == "screened" else 2)


def _markdown(lines: Iterable[Sequence[str]], names: int) -> str:
    """Columns after the names are numbers, to the right."""
    head, *rest = lines
    rule = ["---"] * names + ["---:"] * (len(head) - names)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, rule, *rest])


def run() -> None:
    """Fill all pages, or with ``--check`` name those whose tables differ from their files."""
    different = [page for page in PAGES if filled(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:] and different:
        raise SystemExit(
            "tables differ from their files: " + ", ".join(str(page.relative_to(ROOT)) for page in different)
        )
    for page in different:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    run()
