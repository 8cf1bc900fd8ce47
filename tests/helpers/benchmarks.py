"""The JSON of a benchmark, as its tables show it."""

import json
from pathlib import Path


def medians(path):
    """Group and name of each line, or the name alone where there is one group → column → median."""
    content = json.loads(Path(path).read_text())
    groups = {row["group"] for row in content["rows"]} - {"devices"}
    lines = {}
    for row in content["rows"]:
        key = (row["group"], row["name"]) if len(groups) > 1 else row["name"]
        lines.setdefault(key, {})[row["column"]] = row["median"]
    return lines
