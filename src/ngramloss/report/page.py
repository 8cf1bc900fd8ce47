"""what runs and systems gave, as one dict → ``index.html``, a page that needs nothing but itself."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ngramloss.files import write_whole
from ngramloss.report import blocks, charts, tables

BUDGET = 7_900_000
"""Bytes of a page, about. Summaries are always in it; documents as far as this allows."""
_RESERVE = 50_000
"""Bytes for what goes with documents: their places, and an element for each block."""
_HERE = Path(__file__).parent
_KEYS = ("title", "notes", "version", "made", "systems", "absent", "signatures", "deviations", "paper", "training")
_SCRIPTS = ("page.js", "training.js", "cases.js", "spread.js")


def write_page(data: Mapping[str, Any], folder: Path, *, budget: int = BUDGET) -> Path:
    """Write ``folder/index.html`` and return its path.

    Every key of the dict may be missing or empty:

    * ``title``, ``notes`` (plain sentences, the first stands out), ``version``, ``made``;
    * ``figures``: name → ``label``, ``lower_is_better``, ``metric``, ``help``, in the order of the columns;
    * ``systems``: each with ``name``, ``label``, ``scores`` and ``intervals`` by figure, ``against_first`` (figure →
      ``difference``, ``interval``, ``p_bootstrap``, ``p_randomisation``, ``p_holm``), ``docs_per_second``,
      ``baseline``, ``audit``, ``settings``; the first is what others are compared with;
    * ``over_seeds``: each with ``label``, ``runs``, ``scores`` (figure → ``mean``, ``spread``, ``low``, ``high``),
      ``against_first`` (figure → ``difference``, ``low``, ``high``, ``p``, ``p_holm``);
    * ``signatures`` and ``absent`` by metric, ``deviations``;
    * ``paper``: ``title`` and ``rows`` (``label``, ``scores``, ``docs_per_second``, ``ratio``);
    * ``training``: each with ``system``, ``label``, ``rows`` as in ``log.jsonl``;
    * ``ablation``: each with ``title`` and ``rows`` (``label``, ``scores``, ``paper``);
    * ``cases``: ``ids``, ``references`` (a list for each case), ``documents`` (or None, each or all), ``texts`` by
      system, ``scores`` (figure → a list for each system, None where a case has no figure);
    * ``seen``: system's name → id → ``tokens``, ``best``, ``confidence``, ``label_probability``; ``objectives`` by
      system's name.

    Args:
        data: the dict.
        folder: where; made if it is not there.
        budget: how many bytes the page may have before documents are left out.
    """
    check(data)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    write_whole(path, page_text(data, budget=budget))
    return path


def page_text(data: Mapping[str, Any], *, budget: int = BUDGET) -> str:
    """The whole page as text that UTF-8 can hold: half a surrogate pair becomes a question mark."""
    try:
        import jinja2
        import matplotlib  # noqa: F401, so that it is said before half of the work is done
    except ImportError as missing:
        raise ValueError(f"a report needs {missing.name}. Install it with: pip install 'ngramloss[report]'") from None
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    template = environment.get_template("page.html")
    data = {**dict.fromkeys(_KEYS), **data, "figures": _with_defaults(data.get("figures") or {})}
    figures = data["figures"]
    shown, shape = tables.parted(figures)
    panels = charts.training(data.get("training") or [])
    packed, facts = _case_blocks(data)
    script = "\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    known: dict[str, Any] = {
        "data": data, "figures": figures, "shown": shown, "shape": shape, "panels": panels,
        "table": tables.results(data, shown), "shape_table": tables.results(data, shape),
        "seeds": tables.seeds(data, shown),
        "comparisons": tables.comparisons(data), "ablation": _ablation(data), "settings": settings(data),
        "labels": [tables.written_label(system) for system in data["systems"] or []], "colours": charts.COLOURS,
        "runs": [str(run.get("label") or run.get("system") or "") for run in data["training"] or []],
        "audit": [(tables.written_label(system), system["audit"])
                  for system in data["systems"] or [] if system.get("audit")],
        "style": (_HERE / "page.css").read_text(encoding="utf-8"), "script": script, "script_hash": _hash(script),
    }  # fmt: skip
    facts |= {"copies": tables.copies(data), "panels": [_panel_facts(panel) for panel in panels]}
    empty = template.render(**known, blocks=packed, facts=escaped(facts))
    size = len(empty.encode("utf-8", "replace"))
    documents = blocks.documents((data.get("cases") or {}).get("documents") or [], budget - size - _RESERVE)
    if not documents.blocks:
        facts["documents"]["known"] = documents.known
        return _sound(template.render(**known, blocks=packed, facts=escaped(facts)))
    facts["documents"] = {"starts": documents.starts, "kept": len(documents.places), "known": documents.known}
    packed |= {f"document-{index}": block for index, block in enumerate(documents.blocks)}
    packed["places"] = blocks.pack(documents.places)
    return _sound(template.render(**known, blocks=packed, facts=escaped(facts)))


def check(data: Mapping[str, Any]) -> None:
    """Raise unless there is a text of every system for every case, and a figure for every text."""
    cases = data.get("cases") or {}
    count, systems = len(cases.get("ids") or []), data.get("systems") or []
    if count and len(cases["texts"]) != len(systems):
        raise ValueError(f"cases has texts of {len(cases['texts'])} systems, and there are {len(systems)}.")
    parts = {"references": cases.get("references") or [], "documents": cases.get("documents")}
    texts = zip(systems, cases.get("texts") or [], strict=False)
    parts |= {f"texts of {system.get('name')!r}": values for system, values in texts}
    for name, scores in (cases.get("scores") or {}).items():
        if len(scores) != len(systems):
            raise ValueError(f"cases has {name} of {len(scores)} systems, and there are {len(systems)}.")
        parts |= {f"{name} of {system.get('name')!r}": values for system, values in zip(systems, scores, strict=True)}
    for name, values in parts.items():
        if values is not None and len(values) != count:
            raise ValueError(f"cases has {count} ids and {len(values)} {name}: there must be one for each id.")


def escaped(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it ends the element, or opens another.

    >>> print(escaped({"text": "</script><!--"}))
    {"text":"\\u003c/script\\u003e\\u003c!--"}
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def settings(data: Mapping[str, Any]) -> dict[str, list[tuple[str, list[str]]]]:
    """Settings by name: those that are the same in all systems that have them, and those that differ, one for each."""
    systems = data.get("systems") or []
    flat = [_flat(system.get("settings") or {}) for system in systems]
    names = list(dict.fromkeys(name for row in flat for name in row))
    known = {name: list(dict.fromkeys(row[name] for row in flat if name in row)) for name in names}
    return {
        "shared": [(name, values) for name, values in known.items() if len(values) == 1],
        "different": [(name, [row.get(name, "–") for row in flat]) for name in names if len(known[name]) > 1],
    }


def _with_defaults(figures: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    plain = {"lower_is_better": False, "metric": "", "help": ""}
    return {name: {**plain, **figure, "label": figure.get("label") or name} for name, figure in figures.items()}


def _flat(value: Any, name: str = "") -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        flat: dict[str, str] = {}
        for key, inner in value.items():
            flat |= _flat(inner, f"{name}.{key}" if name else str(key))
        return flat
    return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)}


def _case_blocks(data: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Any]]:
    """Compressed blocks by name, and what the page must know to read them."""
    cases, systems = data.get("cases") or {}, data.get("systems") or []
    figures = data.get("figures") or {}
    ids = [str(key) for key in cases.get("ids") or []]
    facts: dict[str, Any] = {
        "systems": [{"name": str(system.get("name", "")), "label": tables.written_label(system)} for system in systems],
        "pair": _pair(systems), "block": blocks.BLOCK, "count": len(ids), "nothing": blocks.NOTHING, "figures": [],
        "documents": {"starts": [], "kept": 0, "known": 0}, "seen": [], "objectives": data.get("objectives") or {},
    }  # fmt: skip
    if not ids:
        return {}, facts
    packed = {"ids": blocks.pack(ids)}
    for index, block in enumerate(blocks.texts(cases["references"], cases["texts"])):
        packed[f"texts-{index}"] = block
    scores = _with_shape(cases)
    for name, values in scores.items():
        figure = figures.get(name, {})
        codes = blocks.figures(values)
        packed[f"figure-{len(facts['figures'])}"] = codes.codes
        facts["figures"].append({
            "name": name, "label": figure.get("label") or _SHAPES.get(name, name), "low": codes.low,
            "lower": bool(figure.get("lower_is_better")), "ranks": name in figures and tables.ranks(figure),
            "decimals": codes.decimals, "systems": len(values),
        })  # fmt: skip
    for name, forced in (data.get("seen") or {}).items():
        if forced:
            packed[f"seen-{len(facts['seen'])}"] = blocks.pack_forced(forced)
            facts["seen"].append(name)
    return packed, facts


def _pair(systems: Sequence[Mapping[str, Any]]) -> list[int]:
    """The two systems that are compared at first: those first given that are no baselines."""
    order = sorted(range(len(systems)), key=lambda system: bool(systems[system].get("baseline")))
    return [*order[:2], *order[:1], 0][:2]


_SHAPES = {"words": "words", "novel2": "novel bigrams, %", "reference words": "words of the reference"}


def _with_shape(cases: Mapping[str, Any]) -> dict[str, Sequence[Sequence[float | None]]]:
    """The cases' figures, and lengths and novelty where they are not among them."""
    scores = {name: values for name, values in (cases.get("scores") or {}).items() if values}
    own: dict[str, Sequence[Sequence[float | None]]] = {}
    if "words" not in scores:
        own["words"] = [blocks.lengths(system) for system in cases["texts"]]
    own["reference words"] = [blocks.lengths([gold[0] if gold else "" for gold in cases["references"]])]
    documents = cases.get("documents")
    if "novel2" not in scores and documents and any(text is not None for text in documents):
        own["novel2"] = [blocks.novelty(system, documents) for system in cases["texts"]]
    return scores | own


def _ablation(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The ablation's tables with their drawings: a row's figures here and in the paper, the best of each in bold."""
    figures, shown = data.get("figures") or {}, []
    for index, table in enumerate(data.get("ablation") or []):
        rows = table.get("rows") or []
        columns = [(kind, name) for name in charts.ablation_figures(table, figures) for kind in ("scores", "paper")
                   if any(blocks.is_number((row.get(kind) or {}).get(name)) for row in rows)]
        best = [_best(rows, kind, figures[name], name) for kind, name in columns]
        texts = [[tables.fixed((row.get(kind) or {}).get(name), 2) for kind, name in columns] for row in rows]
        heads = [(figures[name].get("label", name), kind == "paper") for kind, name in columns]
        shown.append({
            "title": table.get("title", ""), "heads": heads, "has_paper": any(paper for _, paper in heads),
            "rows": [(row.get("label", ""), [(text, text == most) for text, most in zip(line, best, strict=True)])
                     for row, line in zip(rows, texts, strict=True)],
            "svg": charts.ablation(table, figures, f"a{index}"),
        })  # fmt: skip
    return shown


def _best(rows: Sequence[Mapping[str, Any]], kind: str, figure: Mapping[str, Any], name: str) -> str | None:
    values = [value for row in rows if blocks.is_number(value := (row.get(kind) or {}).get(name))]
    if len(values) < 2 or not tables.ranks(figure):
        return None
    return tables.fixed(min(values) if figure.get("lower_is_better") else max(values), 2)


def _panel_facts(panel: charts.Panel) -> dict[str, Any]:
    return {"box": panel.box, "steps": panel.steps, "series": [curve._asdict() for curve in panel.series]}


def _sound(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")


def _hash(script: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
