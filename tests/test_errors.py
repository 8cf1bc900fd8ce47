"""Pages that errors name: they exist, each is used, and a person sees them."""

import ast
import re
from pathlib import Path

import pytest
from places import ROOT

import ngramloss
from ngramloss import cli
from ngramloss.errors import PAGES, MissingFileError, UserError, see


def anchors(page):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("topic", PAGES)
def test_pages_and_anchors_exist(topic):
    name, _, anchor = PAGES[topic].partition("#")
    assert (ROOT / name).is_file()
    assert not anchor or anchor in anchors(ROOT / name)


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
    assert capsys.readouterr().err.splitlines()[-1] == "see docs/data.md#where-data-come-from"
    error = MissingFileError("no such file").on_page("data")
    assert (str(error), error.about, see("data")) == ("no such file", "data", f"see {PAGES['data']}")
    assert UserError("wrong").about == ""
