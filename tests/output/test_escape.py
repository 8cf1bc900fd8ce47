"""Names, ids and keys of strangers stay text: in a terminal, in JSON, Markdown, LaTeX and CSV."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import PREPARED

import ngramloss
from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.metrics.registry import Score
from ngramloss.output import escape
from ngramloss.report import tables as page_tables
from ngramloss.report.record import PaperRow, PaperTable, Report, ReportSystem
from ngramloss.scoring import results, scored_texts
from ngramloss.scoring import tables as score_tables
from ngramloss.scoring.significance import CorpusScore
from ngramloss.training import card
from ngramloss.training.run import run_of

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rc\x9b31md\x08e\u202ef\u2066g\u200bh"
OBEYED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2060-\u2069\ufeff]")
READABLE = "Łódź naïve 日本語 العربية עברית हिन्दी 👩‍🔬 👨‍👩‍👧 e\u0301 «x» № 5\u00a0%"


def printed(capsys):
    """What went out, none of which a terminal obeys."""
    out, err = capsys.readouterr()
    assert not OBEYED.search(out + err), (out + err).encode("unicode_escape")
    return out, err


# The functions


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_that_a_terminal_obeys_is_left_of_any_text(text):
    for escaped in (escape.for_terminal(text), escape.name(text), escape.in_markdown(text), escape.in_latex(text)):
        assert not OBEYED.search(escaped)
        escaped.encode()
    assert "\n" not in escape.name(text)


def test_letters_of_every_script_and_joined_emoji_stay_as_they_are():
    assert escape.for_terminal(READABLE) == escape.name(READABLE) == READABLE
    assert escape.in_markdown(READABLE) == READABLE


def test_sentences_keep_their_lines_and_names_have_one():
    assert escape.for_terminal("a:\n\tb") == "a:\n\tb"
    assert escape.name("a:\n\tb") == r"a:\n\tb"


@given(st.text(st.sampled_from("a\"'\\`\n\t{}\x1b\x9b\u202e\u2028é👩") | st.characters(exclude_categories=[])))
def test_a_text_in_a_program_is_the_same_text_and_ends_no_code_block(text):
    written = escape.in_python(text)
    assert ast.literal_eval(written) == text
    assert "\n" not in written
    assert "```" not in written
    assert escape.for_terminal(written) == written


@given(st.text(st.sampled_from("<a/!?> \\`")))
def test_markdown_without_html_has_no_tag_and_is_the_same_the_second_time(text):
    shown = escape.without_html(text)
    assert all((len(match[1]) % 2) for match in re.finditer(r"(?<!\\)(\\*)<[a/!?]", shown))
    assert escape.without_html(shown) == shown
    assert re.sub(r"\\", "", shown) == re.sub(r"\\", "", text)


@given(st.dictionaries(st.text(), st.text(st.characters())))
def test_json_has_the_same_values_after_escaping(values):
    escaped = escape.in_json(json.dumps(values, ensure_ascii=False, indent=1))
    assert json.loads(escaped) == values
    assert not OBEYED.search(escaped)


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\\"), min_size=1))
def test_a_span_of_code_cannot_be_left_from_within(text):
    span = escape.as_code(text)
    fence = re.match("`+", span)[0]
    inside = span[len(fence) : -len(fence)]
    assert fence not in re.findall("`+", inside)
    assert inside.strip(" ") == escape.name(text).strip(" ")


@pytest.mark.parametrize(
    "text", ["a|b", "<script>x</script>", "[x](y)", "![x](y)", "*a*", "`a`", "_a_", "~~a~~", "$a$", "&lt;", "a\nb"]
)
def test_marks_of_markdown_are_escaped_one_by_one(text):
    escaped = escape.in_markdown(text)
    bare = re.sub(r"\\[\\|*_`<>\[\]~$&]", "", escaped)
    assert not re.search(r"[|*`<>\[\]~$\n]|\b_|_\b|&\w+;", bare)


def test_a_name_with_underscores_within_words_is_written_as_it_is():
    assert escape.in_markdown("my_good & new") == "my_good & new"


@pytest.mark.parametrize(
    ("text", "written"),
    [("[1cm]", "{[}1cm]"), ("*a", "{*}a"), ("5%_#", r"5\%\_\#"), (r"\input{x}", r"\textbackslash{}input\{x\}")],
)
def test_latex_takes_a_cell_for_text(text, written):
    assert escape.in_latex(text) == written


# The command line


@pytest.fixture
def files(tmp_path):
    (tmp_path / "refs.jsonl").write_text(
        '{"id": "1", "reference": "the cat sat"}\n{"id": "2", "reference": "a dog ran"}\n'
    )
    (tmp_path / "good.jsonl").write_text(
        '{"id": "1", "prediction": "the cat sat"}\n{"id": "2", "prediction": "a dog lay"}\n'
    )
    return tmp_path


def scored(files, *arguments):
    return cli.main(["score", "--references", str(files / "refs.jsonl"), *map(str, arguments)])


@pytest.mark.parametrize("form", [[], ["--json"], ["--latex"], ["--markdown"]])
def test_a_hostile_file_name_is_shown_as_text_in_every_form(files, form, capsys):
    path = files / f"{HOSTILE}\nerror: forged.jsonl"
    path.write_text((files / "good.jsonl").read_text())
    assert scored(files, path, files / "good.jsonl", *form) == 0
    out, err = printed(capsys)
    assert "x1b[2J" in out.replace("{[}", "[").replace("\\[", "[")
    assert "\nerror: forged" not in out + err
    if form == ["--json"]:
        assert json.loads(out)["systems"][0]["name"].startswith(r"a\x1b[2J")


def test_a_hostile_id_is_shown_as_text(files, capsys):
    (files / "bad.jsonl").write_text(
        json.dumps({"id": HOSTILE, "prediction": "x"}) + "\n" + json.dumps({"id": "2", "prediction": "x"})
    )
    assert scored(files, files / "bad.jsonl") == 2
    assert r"1 extra ('a\x1b[2J" in printed(capsys)[1]


def test_a_hostile_field_is_shown_as_text(files, capsys):
    (files / "bad.jsonl").write_text(json.dumps({"id": "1", f"{HOSTILE}\nerror: forged": "x"}))
    assert scored(files, files / "bad.jsonl") == 2
    _, err = printed(capsys)
    assert r"has no prediction. Its columns are id, a\x1b[2J" in err
    assert err.count("\n") == 1


def test_a_hostile_file_that_is_not_there_is_shown_as_text(files, capsys):
    assert scored(files, files / f"{HOSTILE}.jsonl") == 2
    assert r"a\x1b[2J" in printed(capsys)[1]


def test_a_hostile_recipe_key_is_shown_as_text(tmp_path, capsys):
    key = json.dumps(f"{HOSTILE}\nerror: forged")
    (tmp_path / "own.toml").write_text(f'base = "demo"\n{key} = 1\n[train]\n{key} = 1\n')
    assert cli.main(["train", str(tmp_path / "own.toml"), "--show"]) == 2
    _, err = printed(capsys)
    assert "\nerror: forged" not in err
    assert r"train.a\x1b[2J" in err


def test_a_recipe_that_is_shown_is_still_toml(tmp_path, capsys):
    (tmp_path / "own.toml").write_text(f'base = "demo"\n[data]\nprefix = {json.dumps(HOSTILE)}\n')
    assert cli.main(["train", str(tmp_path / "own.toml"), "--show"]) == 0
    out, _ = printed(capsys)
    (tmp_path / "shown.toml").write_text(out)
    assert recipe.load(str(tmp_path / "shown.toml")).data.prefix == HOSTILE


def test_a_hostile_column_is_shown_as_text(tmp_path, capsys):
    (tmp_path / "test.jsonl").write_text(json.dumps({HOSTILE: "x", "b": "y"}) + "\n")
    assert cli.main(["data", "stats", str(tmp_path / "test.jsonl")]) == 2
    assert r"a\x1b[2J" in printed(capsys)[1]
    assert cli.main(["data", "stats", str(tmp_path / "test.jsonl"), "--source", HOSTILE + "x"]) == 2
    printed(capsys)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_hostile_objective_and_writer_of_a_run_are_shown_as_text(tmp_path, form, capsys):
    for seed in (1, 2):
        folder = tmp_path / f"run{seed}"
        folder.mkdir()
        (folder / "recipe.toml").write_text(
            f"objective = {json.dumps(HOSTILE + chr(10) + 'forged')}\n[train]\nseed = {seed}\n"
        )
        (folder / "generation.json").write_text(
            json.dumps({"model": HOSTILE, "data": "\nforged", "generation": {"num_beams": 4}})
        )
        (folder / "references.jsonl").write_text('{"id": "1", "reference": "the cat sat"}\n')
        (folder / "predictions.jsonl").write_text('{"id": "1", "prediction": "the cat sat"}\n')
    assert cli.main(["score", *(str(tmp_path / f"run{seed}") for seed in (1, 2)), *form]) == 0
    out, _ = printed(capsys)
    assert "\nforged" not in out
    assert r"x1b[2J" in out


def test_reasons_in_json_are_json_that_no_terminal_obeys(files):
    result = results.score_systems(
        scored_texts.align(files / "refs.jsonl", [files / "good.jsonl"]), samples=2, shuffles=1
    )
    text = score_tables.as_json(result._replace(absent={"wmd": HOSTILE}))
    assert json.loads(text)["absent"] == {"wmd": HOSTILE}
    assert not OBEYED.search(text)


@pytest.mark.parametrize("asked", ["tset.jsonl", "zzzz.jsonl"])
def test_a_hostile_file_beside_the_one_asked_for_is_shown_as_text(tmp_path, asked, capsys):
    (tmp_path / "test\nforged.jsonl").touch()
    assert cli.main(["data", "stats", str(tmp_path / asked)]) == 2
    assert "\nforged" not in printed(capsys)[1]


def test_a_hostile_metric_option_is_shown_as_text(files, capsys):
    assert scored(files, files / "good.jsonl", "--set", f"rouge.{HOSTILE}=1") == 2
    printed(capsys)
    assert scored(files, files / "good.jsonl", "--set", f"{HOSTILE}=1") == 2
    printed(capsys)
    assert scored(files, files / "good.jsonl", "--metrics", HOSTILE) == 2
    printed(capsys)


def test_what_the_parser_refuses_is_shown_as_text(capsys):
    with pytest.raises(SystemExit):
        cli.main(["score", "a.jsonl", f"--{HOSTILE}"])
    assert r"\x1b[2J" in printed(capsys)[1]


def test_a_bug_that_quotes_hostile_text_is_shown_as_text(monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError(HOSTILE)

    monkeypatch.setattr("ngramloss.cli.doctor.run", broken)
    assert cli.main(["doctor"]) == 1
    assert r"RuntimeError: a\x1b[2J" in printed(capsys)[1]


def test_readable_names_are_printed_as_they_are(files, capsys):
    path = files / "Łódź 日本 👩‍🔬.jsonl"
    path.write_text((files / "good.jsonl").read_text())
    assert scored(files, path) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("Łódź 日本 👩‍🔬 ")


@pytest.mark.slow
def test_nothing_is_printed_but_by_the_command_line_and_there_escaped():
    calls = []
    for path in Path(ngramloss.__file__).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls += [
                    f"{path.name}:{function.name}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
                ]
    assert sorted(calls) == ["console.py:emit", "console.py:print_result"]


# Files


def page_of(label):
    values = {"rouge1": CorpusScore(40.0, 39.0, 41.0)}
    return Report(
        scores={"rouge1": Score("R-1")},
        systems=[
            ReportSystem(label, label, values),
            ReportSystem("other", "other", {"rouge1": CorpusScore(-1.5, -2.0, -1.0)}),
        ],
        paper=PaperTable("", [PaperRow(label, {"rouge1": 40.0})]),
    )


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_a_hostile_label_stays_in_its_line_of_the_pages_copies(form):
    for row in page_tables.copies(page_of(HOSTILE + "\n<img src=x onerror=y>| [a](b)"))[form].rows:
        assert not OBEYED.search(row)
        assert "\n" not in row
        assert form != "markdown" or not re.search(r"(?<!\\)[<>\[]", row)


def test_html_and_code_in_the_names_of_a_card_stay_text():
    settings = recipe.load("xsum", ['data.name="a`<script>`b"', 'model.name="m` | <img>"', 'data.prefix="`x` → <b>"'])
    prepared = replace(PREPARED, machine=replace(PREPARED.machine, device="<b>GPU</b>"))
    text = card.card_text(
        run_of(settings), prepared, {"step": 1, "best_step": None, "best": None}, Path("checkpoint-1")
    )
    outside = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", text)
    assert not re.search(r"(?<!\\)<", outside)
    assert "``a`<script>`b``" in text
    assert r"device: \<b\>GPU\</b\>" in text


def test_generate_tells_a_hostile_split_and_path_as_text(tmp_path, capsys):
    rows = [json.dumps({"document": item.document, "summary": item.summary}) for item in newswire.items("test", 2)]
    (tmp_path / "test.jsonl").write_text("\n".join(rows))
    assert cli.main(["generate", "lead-1", "--data", str(tmp_path), "--out", str(tmp_path / HOSTILE)]) == 0
    out, _ = capsys.readouterr()  # the bar has its own control characters
    assert not OBEYED.search(out)
    assert r"a\x1b[2J" in out
    assert (
        cli.main(["generate", "lead-1", "--data", str(tmp_path), "--split", HOSTILE, "--out", str(tmp_path / "x")]) == 2
    )
    printed(capsys)
