"""Verbs from outside the package."""

import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest

from ngramloss import plugins
from ngramloss.cli import main
from ngramloss.cli.verbs import VERBS


class FakeDistribution:
    name = "their-package"


@pytest.fixture
def theirs(monkeypatch, tmp_path):
    """A package with a verb; a function that makes the entry point."""
    (tmp_path / "their_verbs.py").write_text(
        'from ngramloss import Verb\nCOUNT = Verb("count words", "their_count:add", after="list")\n'
    )
    (tmp_path / "their_count.py").write_text(
        textwrap.dedent("""\
        def add(parser):
            parser.add_argument("words", nargs="*")
            parser.set_defaults(run_verb=lambda options: print(len(options.words)) or 0)
    """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(value):
        point = EntryPoint("count", value, "ngramloss.verbs")._for(FakeDistribution())
        monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
        VERBS.__dict__.pop("_installed", None)
        VERBS._added.clear()

    yield install
    VERBS.__dict__.pop("_installed", None)
    VERBS._added.clear()
    plugins._packages.discard("their_verbs")


def test_an_installed_package_adds_a_verb_where_it_says(theirs, capsys):
    theirs("their_verbs:COUNT")
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert "    count     count words (package their-package)\n    data" in shown
    assert "their_count" not in sys.modules, "its options are imported when it is given"
    assert main(["count", "a", "b"]) == 0
    assert capsys.readouterr().out == "2\n"


def test_a_broken_package_breaks_only_its_own_verb(theirs, capsys):
    theirs("not_there_at_all:COUNT")
    assert main(["list"]) == 0
    with pytest.raises(SystemExit) as stopped:
        main(["count", "a"])
    assert stopped.value.code == 2
    assert "the verb 'count' of the installed package their-package cannot be imported" in capsys.readouterr().err


def test_a_verb_that_lacks_a_package_says_so(theirs, monkeypatch, capsys):
    theirs("their_verbs:COUNT")
    monkeypatch.setitem(sys.modules, "their_count", None)
    assert main(["count"]) == 1
    assert "their_count" in capsys.readouterr().err
