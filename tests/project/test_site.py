"""The documentation as a site: every page is in it, links lead somewhere, nothing is asked of another host; the notebook runs."""

import ast
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urlsplit

import pytest
from browsers import browser  # noqa: F401
from places import ROOT

import ngramloss
from ngramloss import OBJECTIVES

pytestmark = pytest.mark.site

TOUR = ROOT / "examples" / "tour.ipynb"


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site."""
    folder = tmp_path_factory.mktemp("built")
    done = subprocess.run(
        [sys.executable, ROOT / "website" / "build.py", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


class Page(HTMLParser):
    """The links, the sources and the ids of a page, and its text outside of code."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.ids, self.text, self.code = [], [], set(), [], 0
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.code += tag in ("code", "script", "style")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag != "a":
            self.loads += [given[name] for name in ("src", "href", "data", "poster") if given.get(name)]

    def handle_endtag(self, tag):
        self.code -= tag in ("code", "script", "style")

    def handle_data(self, data):
        if not self.code:
            self.text.append(data)


@pytest.fixture(scope="session")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def test_links_of_the_built_site_lead_somewhere(pages):
    broken = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            address = urlsplit(link)
            if address.scheme:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            if not target.is_file() or (
                address.fragment and target in pages and unquote(address.fragment) not in pages[target].ids
            ):
                broken.append(f"{path.name}: {link}")
    assert not broken
    assert sum(len(page.links) for page in pages.values()) > 1000


def test_no_page_loads_anything_from_another_host(site, pages):
    loaded = {link for page in pages.values() for link in page.loads if urlsplit(link).scheme not in ("", "data")}
    assert not loaded
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not [found for style in styles for found in re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", style)]


def test_every_page_of_the_documentation_is_in_the_navigation(site):
    settings = (site.parent / "mkdocs.yml").read_text(encoding="utf-8")
    listed = re.findall(r'"([\w/.]+\.md)"', settings.split("\nnav:")[1])
    assert len(listed) == len(set(listed))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"} <= set(listed)
    assert {"index.md", "gallery.md", "tour.md", "api/index.md"} <= set(listed)


def test_a_page_that_is_missing_from_the_table_of_contents_is_an_error(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import build

    whole = build.navigation
    monkeypatch.setattr(build, "navigation", lambda contents: whole(contents.replace("* [Metrics](metrics.md)", "")))
    with pytest.raises(SystemExit, match=r"not in the navigation: \['metrics.md'\]. Add them to docs/README.md"):
        build.build(tmp_path)


def test_every_public_name_and_formula_is_in_the_reference(pages):
    ids = set().union(*(page.ids for path, page in pages.items() if path.parent.name == "api"))
    assert {*(f"ngramloss.{name}" for name in ngramloss._ROOMS), *ngramloss._MODULES} <= ids
    formulas = [entry.formula(variant) for entry in OBJECTIVES.values() for variant in (None, *entry.variants)]
    assert {f"{formula.__module__}.{formula.__name__}" for formula in formulas} <= ids


def test_mathematics_is_drawn(pages):
    """No formula is left as it was written, in pages or in docstrings."""
    for path, page in pages.items():
        if "files" not in path.parts:
            left = re.findall(
                r"\$\$|\\(?:frac|sum|log|ell|text)\b|\.\. math::|:math:|:func:|:class:", "".join(page.text)
            )
            assert not left, path.name


def test_the_gallery_has_every_objective_with_its_formula_and_its_figure(site):
    text = (site / "gallery.html").read_text(encoding="utf-8")
    sections = dict(re.findall(r'<h2 id="([\w-]+)">(.*?)(?=<h2|</article)', text, re.S))
    assert list(sections) == list(OBJECTIVES)
    without = [name for name, section in sections.items() if "<svg viewBox" not in section]
    assert without == ["rdrop", "distill", "keep", "future", "margin"]
    assert all("No figure: " in sections[name] for name in without)
    assert all("<math" in section for section in sections.values())


def test_gains_in_the_gallery_are_those_of_the_results(site):
    """What the gallery says was measured stands in results.md; trials are rounded there."""
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    text = (site / "gallery.html").read_text(encoding="utf-8")
    gains = {
        found for cell in re.findall(r"<td>([^\n]*)</td>\n</tr>", text) for found in re.findall(r"[+−]\d+\.\d\d", cell)
    }
    assert len(gains) > 8
    assert not {gain for gain in gains if gain not in results}


def test_pages_open_from_a_folder_in_a_browser_and_search_finds_an_objective(site, browser):  # noqa: F811
    wrong = []
    for width, scheme in ((1280, "light"), (390, "dark")):
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request",
            lambda request: (
                wrong.append(request.url) if not request.url.startswith(("file:", "data:", "blob:")) else None
            ),
        )
        for name in ("index", "start", "gallery", "objectives", "results", "tour", "faq", "api/losses", "api/formulas"):
            tab.goto((site / f"{name}.html").as_uri())
            assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
            assert tab.evaluate("document.body.dataset.mdColorScheme") == ("slate" if scheme == "dark" else "default")
        assert tab.evaluate("document.fonts.load('16px Formulas').then(fonts => fonts.length)") == 1
        tab.keyboard.press("/")
        tab.keyboard.type("unlikelihood", delay=20)
        tab.wait_for_selector("a[href*='objectives.html'][href*='#unlikelihood']", timeout=20_000)
        context.close()
    assert wrong == []


def test_commands_are_copied_without_prompts_and_search_finds_a_setting(site, browser):  # noqa: F811
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    tab = context.new_page()
    tab.goto((site / "start_4_results.html").as_uri())
    tab.locator(".md-code__button").first.click()
    lines = tab.evaluate("navigator.clipboard.readText()").split("\n")
    assert [line.split()[:2] for line in lines if line] == [
        ["ngramloss", verb] for verb in ("generate", "generate", "score", "report")
    ]
    tab.keyboard.press("/")
    tab.keyboard.type("leave_out", delay=20)
    tab.wait_for_selector("a[href*='settings.html'][href*='#every-setting']", timeout=20_000)
    context.close()


def test_the_notebook_runs_and_prints_what_it_shows(tmp_path, own_cache, monkeypatch):
    """With a tenth of its steps, and a pause between two lines; the words of the output are compared, not the numbers."""
    monkeypatch.syspath_prepend(ROOT / "website")
    import nbformat
    import notebook

    def shorter(text):
        text = re.sub(r"max_steps=(\d+)0\b", r"max_steps=\1", text).replace("--limit 100", "--limit 10")
        return text.replace("for name, logits in", "import time; time.sleep(1)\nfor name, logits in")

    run = notebook.execute(TOUR, tmp_path, shorter)
    shown = nbformat.read(TOUR, 4)
    assert [printed(cell) for cell in run.cells] == [printed(cell) for cell in shown.cells]
    assert sum(bool(printed(cell)) for cell in shown.cells) >= 5
    assert len(TOUR.read_bytes()) < 150_000


def printed(cell):
    """The words that a cell prints, without signatures and notes, which depend on the run; and its pictures."""
    outputs = cell.get("outputs", [])
    lines = [
        line for one in outputs for line in one.get("text", "").splitlines() if not re.search(r"\||identical", line)
    ]
    words = [re.sub(r"[\s*]+", " ", re.sub(r"[-+−±]?\d[\d.]*", "0", line)).strip() for line in lines]
    return words, [sorted(one.get("data", {})) for one in outputs]


def test_the_notebook_is_plain_python():
    import nbformat

    for cell in nbformat.read(TOUR, 4).cells:
        if cell.cell_type == "code":
            ast.parse(re.sub(r"^%%capture\n", "", cell.source))


def test_docstrings_of_the_reference_become_markdown(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import docstrings

    text = "See :func:`f`, :math:`x_t`:\n\n.. math::\n    a = 1\n        + 2\n\nthen\n\nExample:\n    >>> 1"
    assert docstrings.markdown(text) == "See `f`, $x_t$:\n\n$$\na = 1\n    + 2\n$$\n\nthen\n\nExamples:\n    >>> 1"


def test_a_formula_that_cannot_be_drawn_is_an_error(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import mathml

    assert mathml.mathml(r"\frac{1}{2}").startswith("<math")
    with pytest.raises(ValueError, match=r"\\nosuch in the formula .* has no MathML"):
        mathml.mathml(r"\nosuch{x}")


def test_an_exponent_stands_at_the_whole_bracket(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "website")
    import mathml

    drawn = re.sub(r" \w+=\"[^\"]*\"", "", mathml.mathml(r"a(b) \big( c(d) \big)^{2}"))
    whole = "<mo>(</mo><mi>c</mi><mo>(</mo><mi>d</mi><mo>)</mo><mo>)</mo>"
    assert drawn.endswith(f"<mo>)</mo><msup><mrow>{whole}</mrow><mrow><mn>2</mn></mrow></msup></mrow></math>")
    with pytest.raises(ValueError, match="no bracket begins before"):
        mathml.mathml(r"b \big)^2")
