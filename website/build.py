"""docs/, the registry, docstrings and the notebook → a site of plain files: python website/build.py [FOLDER].

Pages are read on GitHub too, so they are written for it: this program copies them to FOLDER/pages, changes their links,
adds the generated pages, and calls Zensical, which writes FOLDER/site. The navigation is docs/README.md: a page that is
added there is in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gallery
import notebook
import reference

HERE = Path(__file__).parent
ROOT = HERE.parent
TOUR = ROOT / "examples" / "tour.ipynb"
MOVED = {
    ROOT / "README.md": "index.md",
    ROOT / "docs" / "README.md": "guide.md",
    ROOT / "ARCHITECTURE.md": "dev/architecture.md",
    ROOT / "CONTRIBUTING.md": "dev/contributing.md",
    ROOT / "CHANGELOG.md": "dev/changelog.md",
    ROOT / "studies" / "README.md": "dev/studies.md",
    ROOT / "LICENSE": "dev/license.md",
    TOUR: "tour.md",
}
"""Where a file that is not directly in docs/ goes."""

FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\[(?P<text>[^\[\]]*)\]\((?!https?:|data:)(?P<path>[^)#\s]+)(?P<heading>#[^)\s]+)?\)")
FILE_MARK = re.compile(r"^<!-- file (\S+) -->\n```(\w+)$", re.M)
OTHER_MARK = re.compile(r"^<!-- [\w ./-]+ -->\n(?=```)", re.M)
SECTION = re.compile(r"^\*\*(?P<title>.+)\*\*$|^ *(?:\d+\.|\*) \[(?P<name>[^\]]+)\]\((?P<page>[\w/]+\.md)\)", re.M)
WORKER = "https://unpkg.com/iframe-worker/shim"
"""A script that the theme would fetch, with which the search runs without a server; assets/worker.js is that script."""


class Pages:
    """The pages of the site by their sources, and where they are written."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.places = {page: page.name for page in sorted((ROOT / "docs").glob("*.md"))} | MOVED
        self.listings: set[Path] = set()

    def place(self, source: Path) -> str:
        """Where a linked file is in the site: a page of its own, a picture, or a listing of its text."""
        if source in self.places:
            return self.places[source]
        if not source.exists():
            raise SystemExit(f"a page links to {source.relative_to(ROOT)}, which does not exist.")
        if source.suffix in (".png", ".svg"):
            place = f"pictures/{source.name}"
            _write(self.folder / place, source.read_bytes())
            return place
        self.listings.add(source)
        return f"files/{source.relative_to(ROOT)}.md"

    def add(self, source: Path, text: str) -> None:
        """Write a page with the links of the site."""
        place = self.places[source]

        def moved(link: re.Match[str]) -> str:
            linked = (source.parent / link["path"]).resolve()
            relative = os.path.relpath(self.place(linked), Path(place).parent)
            text = title(linked) if link["text"] == linked.name and linked.suffix == ".md" else link["text"]
            return f"[{text}]({relative}{link['heading'] or ''})"

        _write(self.folder / place, "".join(_outside_fences(marked(text), lambda part: LINK.sub(moved, part))))

    def add_listings(self) -> None:
        """A page for each file that pages link to, such as a recipe; for a folder, the names of its files."""
        for source in sorted(self.listings):
            name = str(source.relative_to(ROOT))
            kind = {".py": "python", ".toml": "toml", ".json": "json"}.get(source.suffix, "text")
            names = (str(path.relative_to(source)) for path in sorted(source.rglob("*")) if path.is_file())
            text = "\n".join(names) if source.is_dir() else source.read_text(encoding="utf-8").rstrip()
            _write(self.folder / f"files/{name}.md", f"# {name}\n\n````{kind}\n{text}\n````\n")


def title(page: Path) -> str:
    """The heading of a page, which a link shows in place of the file's name."""
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def marked(text: str) -> str:
    """A page whose marks for tests are gone, but names of files stand above their blocks."""
    return OTHER_MARK.sub("", FILE_MARK.sub(r'```\2 title="\1"', text))


def _outside_fences(text: str, change: Any) -> list[str]:
    parts, end = [], 0
    for fence in FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return [*parts, change(text[end:])]


def front_page(readme: str) -> str:
    """The README, with a figure of what an objective changes before its first section, and the whole width."""
    before, heading, after = readme.partition("## What it costs")
    return f"---\nhide: [navigation]\n---\n\n{before}{gallery.before_and_after()}\n{heading}{after}"


def navigation(contents: str) -> list[Any]:
    """The sections of docs/README.md with their pages, and the pages that are generated."""
    sections: dict[str, list[Any]] = {}
    for line in SECTION.finditer(contents):
        if line["title"]:
            sections[line["title"]] = []
        else:
            sections[list(sections)[-1]].append({line["name"]: line["page"]})
    chapters = [{title: f"api/{file}.md"} for file, (title, *_) in reference.CHAPTERS.items()]
    sections["Tutorials"].append({"A notebook": "tour.md"})
    sections["Reference"].insert(0, {"Gallery of objectives": "gallery.md"})
    return [
        {"Home": "index.md"},
        *({title: pages} for title, pages in sections.items()),
        {"API": ["api/index.md", *chapters, {"Modules": "api/modules.md"}, {"Formulas": "api/formulas.md"}]},
        {
            "Develop": [
                {"Architecture": "dev/architecture.md"},
                {"Contributing": "dev/contributing.md"},
                {"Changelog": "dev/changelog.md"},
                {"Studies": "dev/studies.md"},
            ]
        },
    ]


def listed(entries: list[Any]) -> list[str]:
    """The pages of a navigation."""
    return [
        page
        for entry in entries
        for page in (
            [entry]
            if isinstance(entry, str)
            else [one for value in entry.values() for one in ([value] if isinstance(value, str) else listed(value))]
        )
    ]


def write_pages(folder: Path) -> None:
    """All pages as Markdown."""
    pages = Pages(folder)
    for source in pages.places:
        if source.suffix == ".md":
            pages.add(source, source.read_text(encoding="utf-8"))
    _write(folder / "index.md", front_page((folder / "index.md").read_text(encoding="utf-8")))
    pages.add(TOUR, notebook.page(TOUR))
    _write(folder / "dev/license.md", f"# License\n\n```text\n{(ROOT / 'LICENSE').read_text(encoding='utf-8')}\n```\n")
    _write(folder / "gallery.md", gallery.page())
    for place, text in reference.pages().items():
        _write(folder / place, text)
    pages.add_listings()
    shutil.copytree(HERE / "assets", folder / "assets")


def build(folder: Path) -> Path:
    """Build the site; returns its first page."""
    pages, site = folder / "pages", folder / "site"
    for old in (pages, site):
        shutil.rmtree(old, ignore_errors=True)
    write_pages(pages)
    contents = navigation((ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    missing = {str(page.relative_to(pages)) for page in pages.rglob("*.md")} - {*listed(contents), "guide.md"}
    if missing := {page for page in missing if not page.startswith(("files/", "dev/license"))}:
        raise SystemExit(f"not in the navigation: {sorted(missing)}. Add them to docs/README.md.")
    settings = (HERE / "mkdocs.yml").read_text(encoding="utf-8")
    for name in ("src", "website/docstrings.py"):
        settings = settings.replace(f"[{name}]", json.dumps([str(ROOT / name)]))
    settings += f"docs_dir: {pages.name}\nsite_dir: {site.name}\nnav: {json.dumps(contents, ensure_ascii=False)}\n"
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")
    paths = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict", "--config-file", "mkdocs.yml"]
    environment = {**os.environ, "PYTHONPATH": paths, "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    if done.returncode:
        raise SystemExit("the site was not built: see the messages above.")
    for page in site.rglob("*.html"):
        up = "../" * (len(page.relative_to(site).parts) - 1)
        page.write_text(page.read_text(encoding="utf-8").replace(WORKER, f"{up}assets/worker.js"), encoding="utf-8")
    (site / "404.html").unlink(missing_ok=True)  # its links are those of a server
    return site / "index.html"


def _write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()))
