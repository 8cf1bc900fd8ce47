"""Pages that errors name: they exist, each is used, and a person sees them."""

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

import ngramloss
from ngramloss import cli
from ngramloss.cli import docs
from ngramloss.errors import PAGES, MissingFileError, UserError, see


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("topic", PAGES)
def test_pages_and_anchors_exist(topic):
    name, _, anchor = PAGES[topic].partition("#")
    page = ROOT / "docs" / f"{name}.md"
    assert anchor in anchors(page)
    shown = docs.section(page.read_text(), anchor)
    assert shown.startswith("#")
    assert len(shown.splitlines()) > 2


def test_docs_prints_a_page_or_a_part_up_to_the_next_heading_of_its_level(capsys):
    text = "# A\n\none\n\n## B\n\n```\n# no heading\n```\n\n### C\n\n## B and `C`\n\nlast"
    assert docs.section(text, "b") == "## B\n\n```\n# no heading\n```\n\n### C"
    assert docs.section(text, "b-and-c") == "## B and `C`\n\nlast"
    for given in ("data", "docs/data.md"):
        assert cli.main(["docs", given]) == 0
        assert capsys.readouterr().out.strip() == (ROOT / "docs" / "data.md").read_text().strip()
    assert cli.main(["docs"]) == 0
    assert "**Tutorials**" in capsys.readouterr().out
    assert cli.main(["docs", "dta"]) == 2
    assert "there is no page 'dta'. Did you mean 'data'? ngramloss docs lists all pages." in capsys.readouterr().err
    assert cli.main(["docs", "data#colums"]) == 2
    assert "the page has no part 'colums'. It has: use-your-data, " in capsys.readouterr().err


@pytest.mark.slow
def test_every_topic_that_an_error_names_has_a_page_and_every_page_is_named():
    used = set()
    for path in Path(ngramloss.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "func", None)
            if getattr(called, "attr", "") == "on_page" or getattr(called, "id", "") == "see":
                used |= {word.value for word in node.args if isinstance(word, ast.Constant)}
    used |= {"code", "models"}  # of models.loading, chosen by the reason
    assert used == set(PAGES)


def test_the_page_is_the_last_line_of_a_message_and_not_part_of_the_exception(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "demo", "--set", "data.name=nope.csv"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "see: ngramloss docs data#where-data-come-from"
    error = MissingFileError("no such file").on_page("data")
    assert (str(error), error.about, see("data")) == ("no such file", "data", f"see: ngramloss docs {PAGES['data']}")
    assert UserError("wrong").about == ""
