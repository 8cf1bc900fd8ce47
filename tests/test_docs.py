"""The documentation keeps its word: its commands print what it shows, and its Python runs."""

import re
import shlex
from pathlib import Path
from unittest.mock import patch

import pytest

from ngramloss import OBJECTIVES
from ngramloss.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[\w ]+) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$(?:\n\n^```text\n(?P<printed>.*?)^```$)?",
    re.M | re.S,
)
QUICK = r"ngramloss (?:explain |data stats newswire |train (?=.* --show$))"
COMMAND = re.compile(rf"^\$ (?P<words>{QUICK}(?:.*\\\n)*.*)\n(?P<shown>(?:(?!\$ ).*\n)*)", re.M)


def blocks(kind):
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            if block["kind"] == kind:
                yield page, block, text.count("\n", 0, block.start("text")) + 1


def commands():
    for page, block, line in blocks("console"):
        for command in COMMAND.finditer(block["text"]) if block["mark"] != "not run" else ():
            at = line + block["text"].count("\n", 0, command.start())
            yield pytest.param(command["words"].replace("\\\n", " "), command["shown"], id=f"{page.name}:{at}")


def programs():
    for page, block, line in blocks("python"):
        if block["mark"] == "run" or (page.name != "README.md" and block["mark"] != "not run"):
            yield pytest.param(page, line, block["text"], block["printed"], id=f"{page.name}:{line}")


def trimmed(text):
    return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())


def omitting(shown):
    """A pattern for the shown lines, in which a line of dots alone stands for any lines."""
    return "".join(r"(?:.*\n)*" if line in ("…\n", "...\n") else re.escape(line) for line in shown.splitlines(True))


@pytest.mark.parametrize(("words", "shown"), list(commands()))
def test_a_command_prints_what_the_documentation_shows(words, shown, capsys):
    assert main(shlex.split(words)[1:]) == 0
    printed, shown = trimmed(capsys.readouterr().out), trimmed(shown)
    assert printed == shown or re.fullmatch(omitting(shown), printed)


@pytest.mark.parametrize(("page", "line", "text", "shown"), list(programs()))
def test_python_in_the_documentation_runs_and_prints_the_text_after_it(page, line, text, shown, capsys):
    program = compile("\n" * (line - 1) + text, page, "exec")   # a traceback names the line of the page
    with patch.dict(OBJECTIVES):
        exec(program, {"__name__": "__main__"})
    assert shown is None or trimmed(capsys.readouterr().out) == trimmed(shown)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_and_variant_is_documented_under_its_name(name):
    page = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    for needed in ("$$", "$ ngramloss explain", *(f":{variant}`" for variant in OBJECTIVES[name].variants)):
        assert needed in section
