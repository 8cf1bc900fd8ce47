"""the registry, docs/objectives.md and docs/choose.md → a page with each objective's formula, figure, use and gain."""

from __future__ import annotations

import re
from pathlib import Path

from figures import bars
from reference import path

from ngramloss import OBJECTIVES, Objective, UserError
from ngramloss.loss.explaining.compare_gradients import pushes

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = "the storm closed two roads near the river"
SWAPPED = "the storm closed the river near two roads"
WORSE = "the storm closed both bridges at a river"
CONFIDENCE = 0.7

KEY = """\
<span class="key reference">words of the reference</span>
<span class="key predicted">wrong predictions</span>
"""

INTRODUCTION = f"""\
# Gallery of objectives

Every objective on one sentence: its formula, what one step of training with it does, when to use it, and what it
gained. The figures are computed when this page is built, by the code behind `ngramloss explain --compare`.

The reference is *{REFERENCE}*. The model gives a probability of {CONFIDENCE} to each word of
*{SWAPPED}*: it has swapped two phrases. A bar above zero is a word whose logit a step raises.

{KEY}

"""

LEGEND = """\
*Gained* is the difference to `ce` in [results](results.md), over five or six seeds, in BLEU on Multi30k or R-1 on
DialogSum; bold differs at 5% after Holm's correction. A trial is
[one run with one seed](results.md#trials-with-one-seed).
"""


def page() -> str:
    """The whole page."""
    return INTRODUCTION + LEGEND + "".join(map(section, OBJECTIVES))


def section(name: str) -> str:
    """One objective."""
    entry, row = OBJECTIVES[name], choices()[name]
    cells = " | ".join(row[head] for head in ("objective", "when to use it", "measured"))
    return (
        f"\n## {name}\n\n{entry.description()}\n\n{formula(name)}\n\n{figure(name, entry)}\n\n"
        f"| write | when to use it | gained |\n|---|---|---|\n| {cells} |\n\n"
        f"[All about `{name}`](objectives.md#{name}) · [its function](api/formulas.md#{path(entry)})\n"
    )


def written(name: str, entry: Objective) -> str:
    """The objective as it is spelled for the figure: n-grams are pairs."""
    if entry.least_n is None:
        return name
    return f"{name}(1,2)" if entry.joint else f"{name}(2)"


def figure(name: str, entry: Objective) -> str:
    """The gradient on the sentence, or the reason why a sentence pair has none."""
    spelled, compares = written(name, entry), entry.reads == "candidates"
    candidate, others = (WORSE, [REFERENCE]) if compares else (SWAPPED, [])
    try:
        rows, _ = pushes(REFERENCE, candidate, [spelled], [CONFIDENCE], others)
    except UserError as reason:
        return f"*No figure: {reason}*"
    drawn = bars(rows, 0, title=f"What one step with {spelled} does to each word")
    if compares:
        drawn += f"\n\nHere the model has written two texts, *{WORSE}* and the reference itself, which scores higher."
    return drawn


def formula(name: str) -> str:
    """The formulas that docs/objectives.md begins the objective's section with."""
    section = (DOCS / "objectives.md").read_text(encoding="utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\$\$\n.+?^\$\$$", section, re.M | re.S)
    if not found:
        raise SystemExit(f"docs/objectives.md has no formula of {name!r}: begin its section with one between $$.")
    return str(found[0])


def choices() -> dict[str, dict[str, str]]:
    """Objective → the cells of its first row in the table of docs/choose.md, by the column's head."""
    table = (DOCS / "choose.md").read_text(encoding="utf-8").split("\n## Every objective\n")[1].split("\n## ")[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", table, re.M)]
    head, _, *rows = lines
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(re.split(r"[`(]", row[0].lstrip("`"))[0], dict(zip(head, row, strict=True)))
    return found


def before_and_after() -> str:
    """Two figures for the front page: cross-entropy, and what an n-gram term adds to it."""
    objectives = ["ce", "ce + matches(2)"]
    rows, _ = pushes(REFERENCE, SWAPPED, objectives, [CONFIDENCE])
    most = max(abs(value) for push in rows for value in push.by)
    lines = [
        "## Before and after",
        "",
        f"The reference is *{REFERENCE}*, and a model is about to write *{SWAPPED}*. What one step of training does to "
        "each word (bars above zero: its logit rises):",
        "",
        KEY,
        "**Before**, cross-entropy looks at one position at a time:",
        "",
        bars(rows, 0, title="What one step with ce does to each word", most=most),
        "",
        "**After**, `ce + matches(2)` also sees that *the storm closed*, *the river* and *two roads* are right, "
        "wherever they stand: it strengthens the first, and lowers the swapped phrases less.",
        "",
        bars(rows, 1, title="What one step with ce + matches(2) does to each word", most=most),
        "",
        "[Every objective on this sentence](gallery.md)",
        "",
    ]
    return "\n".join(lines)
