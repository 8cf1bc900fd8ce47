"""a notebook with its outputs → a page in Markdown.

``python website/notebook.py FILE`` runs a notebook and stores the outputs in it: what it prints, and pictures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def page(notebook: Path) -> str:
    """The page, with pictures inside."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell)) + "\n"


def _parts(cell: dict[str, Any]) -> list[str]:
    text = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return [text]
    return [f"```python\n{text}\n```", *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    """What a cell printed, or its picture."""
    data = output.get("data", {})
    if "image/png" in data:
        return f"![What the cell draws](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return "```text\n" + "".join(output.get("text") or data["text/plain"]).rstrip() + "\n```"


def execute(notebook: Path, folder: Path, change: Callable[[str], str] = str) -> Any:
    """Run all cells in a folder, each after a change of its text; returns the notebook with what they print."""
    import nbformat
    from nbclient import NotebookClient

    content = nbformat.read(notebook, 4)
    for cell in content.cells:
        cell.source = change(cell.source) if cell.cell_type == "code" else cell.source
    where = {"metadata": {"path": str(folder)}}
    NotebookClient(content, timeout=300, resources=where, coalesce_streams=True).execute()
    for cell in content.cells:
        cell.metadata.pop("execution", None)
    return content


if __name__ == "__main__":
    import nbformat

    path = Path(sys.argv[1])
    nbformat.write(execute(path, path.parent), path)
