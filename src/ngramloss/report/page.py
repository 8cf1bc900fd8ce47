"""the record of a report → ``index.html``, a page that needs nothing but itself."""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ngramloss.errors import UserError
from ngramloss.metrics.registry import Score
from ngramloss.recipe import WORDS
from ngramloss.report import blocks, charts, drawing, tables
from ngramloss.report.record import Report, ReportSystem
from ngramloss.scoring.significance import TESTS, in_words
from ngramloss.storage.files import write_whole

BUDGET = 7_900_000  # Bytes of a page, about. Summaries are always in it; documents as far as this allows.
_RESERVE = 50_000  # Bytes for what goes with documents: which cases they belong to, and an element for each block
_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "training.js", "cases.js", "spread.js")
_UNSCRIPTED = "Tables are here without scripts. Cases, distributions, sorting and opening rows need them."


def write_page(report: Report, folder: Path) -> Path:
    """Write the page of a report as ``folder/index.html`` and return its path."""
    return write(page_text(report), folder)


def write(text: str, folder: Path) -> Path:
    """Write a page as ``folder/index.html`` and return its path. The folder is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    write_whole(path, text)
    return path


def check(folder: Path, option: str) -> None:
    """Raise if a page could not be written to a folder, which an option names, before much work is done for it."""
    check_packages()
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    why = "" if os.access(existing, os.W_OK | os.X_OK) else f"no permission to write to {existing}"
    if why := why if existing.is_dir() else f"{existing} is a file":
        raise UserError(f"cannot write the page to {folder}: {why}. Choose another {option}.")


def check_packages() -> None:
    """Raise if a package that a page needs is not installed."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as missing:
        raise UserError(f"a report needs {missing.name}. Install it with: pip install 'ngramloss[report]'") from None


def page_text(report: Report, *, budget: int = BUDGET) -> str:
    """The whole page as text that UTF-8 can hold, in about ``budget`` bytes: documents that do not fit are left out."""
    check_packages()  # so that the error comes before half of the work is done
    drawings = charts.draw(report)
    shown = _shown(report, drawings)
    packed, facts = _case_blocks(report)
    facts["copies"] = {form: own._asdict() for form, own in tables.copies(report).items()}
    facts["panels"] = [panel_facts(panel) for panel in drawings.training]
    empty = rendered("page.html", _SCRIPTS, facts, blocks=packed, **shown)
    sources = (report.cases.documents if report.cases else None) or []
    documents = blocks.pack_documents(sources, budget - len(empty.encode("utf-8", "replace")) - _RESERVE)
    facts["documents"] = {"starts": documents.starts, "kept": len(documents.cases), "known": documents.known}
    if documents.blocks:
        packed |= {f"document-{index}": block for index, block in enumerate(documents.blocks)}
        packed["places"] = blocks.pack(documents.cases)
    return rendered("page.html", _SCRIPTS, facts, blocks=packed, **shown)


def rendered(template: str, scripts: Sequence[str], facts: Any, *, folder: Path = _HERE, **shown: Any) -> str:
    """A page with our style and scripts, which read ``facts``. Half a surrogate pair becomes a question mark."""
    import jinja2

    blanks: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True}
    loader, undefined = jinja2.FileSystemLoader([folder, _HERE]), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=undefined, **blanks)
    environment.globals["colours"] = drawing.COLOURS
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in scripts)
    digest = "sha256-" + b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    written = {"style": (_HERE / "page.css").read_text(encoding="utf-8"), "script": script, "script_hash": digest}
    text = environment.get_template(template).render(**written, facts=escaped(facts), **shown)
    return text.encode("utf-8", "replace").decode("utf-8")


def escaped(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, or opens another."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _shown(report: Report, drawings: charts.Drawings) -> dict[str, Any]:
    quality, description = tables.quality_and_description(report)
    ablations = [tables.ablation(part, report.scores) for part in report.ablations]
    scores = [score for system in report.systems for score in system.values.values()]
    drawn = {row.label for score in drawings.results for row in charts.estimates(report, score)}
    return {
        "report": report,
        **{name: getattr(report, name) for name in ("title", "notes", "version", "made")},
        "unscripted": _UNSCRIPTED,
        "panels": drawings.training,
        "results": drawings.results,
        "runs": charts.run_groups(report.training),
        "compared_with": (report.seeds or report.systems)[0].label if drawings.results else "",
        "undrawn": any(each.is_baseline and not {each.label, each.group} & drawn for each in report.systems),
        "seed_runs": tables.runs(report, quality),
        "described_runs": tables.runs(report, description),
        "ablations": list(zip(ablations, drawings.ablations, strict=True)),
        "table": tables.results(report, quality),
        "seeds": tables.seeds(report, quality),
        "marked": tables.marked(report),
        "description": tables.description(report, description) if description else None,
        "comparisons": tables.comparisons(report),
        "compared": ["Difference", "95% interval", *(f"p, {name}" for name in [*TESTS, "Holm"])],
        "settings": tables.settings([system.settings for system in report.systems]),
        "data": _data(report.systems),
        "tests": in_words(scores),
    }


def _data(systems: Sequence[ReportSystem]) -> list[tuple[str, tuple[str, ...]]]:
    """Labels of systems → what their trainings used of their data; systems that used the same are together."""
    labels: dict[tuple[str, ...], list[str]] = {}
    for system in systems:
        if system.used:
            labels.setdefault(tuple(system.used), []).append(system.label)
    return [(", ".join(names), used) for used, names in labels.items()]


def _case_blocks(report: Report) -> tuple[dict[str, str], dict[str, Any]]:
    """Compressed blocks by name, and what the page must know to read them."""
    cases, systems = report.cases, report.systems
    facts: dict[str, Any] = {
        "systems": [
            {"name": each.name, "label": each.label, "objective": each.objective, "mostTokens": each.most_tokens}
            for each in systems
        ],
        "pair": _pair(systems),
        "text": WORDS[report.task].text,
        "block": blocks.BLOCK,
        "count": len(cases.ids) if cases else 0,
        "nothing": blocks.NOTHING,
        "figures": [],
        "seen": [system.name for system in systems if system.forced],
    }
    if cases is None or not cases.ids:
        return {}, facts
    marks = {"empty": cases.empty, "cutOff": cases.cut_off}
    packed = {"ids": blocks.pack(list(cases.ids)), "marks": blocks.pack(marks)}
    packed |= {f"texts-{index}": block for index, block in enumerate(blocks.pack_texts(cases.references, cases.texts))}
    scores = [(name, cases.described[name], values) for name, values in cases.scores.items()]
    # The length of the reference belongs to no system.
    words = ("reference words", Score("words of the reference", better="neither"), [cases.reference_words])
    for index, (name, score, values) in enumerate([*scores, words]):
        encoded = blocks.encode_scores(values)
        packed[f"figure-{index}"] = encoded.codes
        about = {"name": name, "label": score.label, "digits": score.decimals, "systems": len(values)}
        about |= {"lower": score.better == "lower", "ranks": score.better != "neither"}
        facts["figures"].append({**about, "low": encoded.low, "decimals": encoded.decimals})
    forced = [system.forced for system in systems if system.forced]
    return packed | {f"seen-{index}": blocks.pack_forced(cases) for index, cases in enumerate(forced)}, facts


def _pair(systems: Sequence[ReportSystem]) -> list[int]:
    """The two systems that are compared at first: the first that are not baselines, of two groups if possible."""
    order = sorted(range(len(systems)), key=lambda index: systems[index].is_baseline)
    kinds = [system.group or system.objective or system.name for system in systems]
    others = sorted(order[1:], key=lambda index: kinds[index] == kinds[order[0]] or systems[index].is_baseline)
    return [*order[:1], *others[:1], *order[:1], 0][:2]


def panel_facts(panel: charts.Panel) -> dict[str, Any]:
    """What the script reads of a panel."""
    series = [{"run": curve.run, "part": curve.part, "x": curve.x, "y": curve.y} for curve in panel.series]
    return {"box": panel.box, "steps": panel.steps, "series": series}
