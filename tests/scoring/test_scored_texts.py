"""Systems as groups of runs or files, as columns of one file, and as lists of texts."""

import json
from math import exp, lgamma, pi, sqrt

import pytest
from run_folders import REFERENCES, run

from ngramloss import cli
from ngramloss.scoring import scored_texts

WORDS = ["the", "cat", "sat", "on", "the", "mat"]
FEW = ("--samples", "20", "--shuffles", "20")


def texts(*right):
    """A text for each reference of six words, with so many of them right: its recall is known."""
    return [" ".join([*WORDS[:count], *["x"] * (6 - count)]) for count in right]


def written(folder, name, right):
    rows = [{"id": str(index), "prediction": text} for index, text in enumerate(texts(*right))]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def files(tmp_path, monkeypatch):
    """References, and three seeds of two objectives."""
    monkeypatch.chdir(tmp_path)
    rows = [{"id": str(index), "reference": " ".join(WORDS)} for index in range(4)]
    (tmp_path / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for seed, (ce, matches) in {1: (2, 4), 2: (3, 4), 10: (3, 6)}.items():
        written(tmp_path, f"ce-{seed}.jsonl", [ce, 3, 4, 5])
        written(tmp_path, f"m-{seed}.jsonl", [matches, 3, 5, 5])
    written(tmp_path, "lead.jsonl", [1, 1, 1, 1])
    return tmp_path


def score(capsys, *arguments):
    assert cli.main(["score", *map(str, arguments), *FEW]) == 0
    return capsys.readouterr().out


def scored(capsys, *arguments):
    return json.loads(score(capsys, *arguments, "--json"))


def refused(capsys, *arguments):
    assert cli.main(["score", *map(str, arguments), *FEW]) == 2
    return capsys.readouterr().err


def mean(values):
    return sum(values) / len(values)


def deviation(values):
    return sqrt(sum((value - mean(values)) ** 2 for value in values) / (len(values) - 1))


def two_sided(t, freedom, steps=200_000):
    """The probability beyond ±t under Student's distribution, by the area under its density."""
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(freedom * pi)
    width = abs(t) / steps
    inside = sum((1 + ((step + 0.5) * width) ** 2 / freedom) ** (-(freedom + 1) / 2) for step in range(steps)) * width
    return 1 - 2 * scale * inside


def paired(values, others):
    gaps = [value - other for value, other in zip(values, others, strict=True)]
    return two_sided(mean(gaps) / (deviation(gaps) / sqrt(len(gaps))), len(gaps) - 1)


def welch(values, others):
    parts = [deviation(group) ** 2 / len(group) for group in (values, others)]
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(group) - 1) for part, group in zip(parts, (values, others), strict=True)
    )
    return two_sided((mean(values) - mean(others)) / sqrt(sum(parts)), freedom)


def of_runs(found, row, name="rouge1"):
    by_name = {system["name"]: system["scores"][name] for system in found["systems"]}
    return [by_name[run] for run in row["runs"]]


def test_a_group_has_mean_spread_and_a_paired_test_over_seeds(files, capsys):
    found = scored(capsys, "--references", "refs.jsonl", "--group", "ce=ce-*.jsonl", "--group", "matches=m-*.jsonl")
    ce, matches = found["over_seeds"]
    assert (ce["label"], ce["runs"]) == ("ce", ["ce-1", "ce-2", "ce-10"]), "in the order of the numbers"
    assert (matches["label"], matches["runs"]) == ("matches", ["m-1", "m-2", "m-10"])
    assert (ce["test"], matches["test"]) == (None, "paired in the order given")
    runs, others = of_runs(found, matches), of_runs(found, ce)
    assert matches["scores"]["rouge1"]["mean"] == pytest.approx(mean(runs))
    assert matches["scores"]["rouge1"]["spread"] == pytest.approx(deviation(runs))
    test = matches["against_first"]["rouge1"]
    assert test["difference"] == pytest.approx(mean(runs) - mean(others))
    assert test["p"] == pytest.approx(paired(runs, others), abs=1e-6)
    assert test["p_holm"] == test["p"], "one comparison"
    assert ce["against_first"] == {}


def test_the_table_has_a_row_for_each_group_and_says_what_is_tested(files, capsys):
    arguments = ("--references", "refs.jsonl", "--group", "ce=ce-*.jsonl", "--group", "matches=m-*.jsonl")
    head, ce, matches, empty, *legend = score(capsys, *arguments).splitlines()
    assert head.split() == ["group", "runs", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert ce.split()[:4] == ["ce", "3", "61.11", "±2.41"]
    assert matches.split()[:4] == ["matches", "3", "73.61", "±4.81*"]
    assert "(+12.50, " in matches
    assert not empty
    assert legend[:2] == [
        "± standard deviation over seeds; in brackets the difference to ce and, where it is tested, its 95% interval.",
        "* and **: the mean over seeds differs from that of ce at 5% and 1% (Student's t, paired in the order given).",
    ]
    assert "documents (bootstrap)" not in "\n".join(legend)
    assert score(capsys, *arguments, "--markdown").splitlines()[2].startswith("| ce | 3 | 61.11 ±2.41 |")
    assert r"ce & 3 & 61.11 $\pm$2.41 &" in score(capsys, *arguments, "--latex")


def test_holm_counts_the_rows_that_are_tested(files, capsys):
    for seed, right in enumerate((5, 6, 4)):
        written(files, f"b-{seed}.jsonl", [right, right, 5, 5])
    groups = [part for name in ("ce", "m", "b") for part in ("--group", f"{name}={name}-*.jsonl")]
    found = scored(capsys, "--references", "refs.jsonl", *groups, "lead.jsonl")
    _, *others, lead = found["over_seeds"]
    chances = [row["against_first"]["rouge1"]["p"] for row in others]
    smaller, larger = sorted(range(2), key=lambda row: chances[row])
    corrected = [row["against_first"]["rouge1"]["p_holm"] for row in others]
    assert corrected[smaller] == pytest.approx(2 * chances[smaller])
    assert corrected[larger] == pytest.approx(max(2 * chances[smaller], chances[larger]))
    assert lead["test"] is None
    assert lead["against_first"]["rouge1"] == {
        "difference": pytest.approx(of_runs(found, lead)[0] - mean(of_runs(found, found["over_seeds"][0]))),
        "low": None,
        "high": None,
        "p": None,
        "p_holm": None,
    }
    shown = score(capsys, "--references", "refs.jsonl", *groups, "lead.jsonl")
    assert "(Student's t, paired in the order given), corrected (Holm) for the 2 comparisons." in shown
    assert "No test over seeds with lead, of one run: a test needs two runs or more of both." in shown


def test_with_one_seed_of_each_group_it_says_that_there_is_no_test(files, capsys):
    shown = score(capsys, "--references", "refs.jsonl", "--group", "ce=ce-1.jsonl", "--group", "matches=m-1.jsonl")
    assert "No test over seeds with ce, matches, of one run: a test needs two runs or more of both." in shown
    assert "* and **" not in shown


def test_groups_of_different_sizes_are_not_paired(files, capsys):
    (files / "m-10.jsonl").unlink()
    found = scored(capsys, "--references", "refs.jsonl", "--group", "ce=ce-*.jsonl", "--group", "matches=m-*.jsonl")
    ce, matches = found["over_seeds"]
    assert matches["test"] == "not paired (Welch)"
    runs, others = of_runs(found, matches, "rouge2"), of_runs(found, ce, "rouge2")
    assert matches["against_first"]["rouge2"]["p"] == pytest.approx(welch(runs, others), abs=1e-6)


def folders(tmp_path, objective, seeds):
    """Runs whose scores depend on the seed, in an order that is not that of their names."""
    for name, (seed, length) in seeds.items():
        cut = {key: " ".join(text.split()[:length]) for key, text in REFERENCES.items()}
        run(tmp_path / name, cut, objective=objective, seed=seed)


def test_runs_of_a_group_are_paired_by_the_seed_of_their_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folders(tmp_path, "ce", {"ce-a": (7, 2), "ce-b": (8, 3), "ce-c": (9, 4)})
    folders(tmp_path, "ce + matches(2)", {"m-a": (9, 4), "m-b": (7, 3), "m-c": (8, 4)})
    found = scored(capsys, "--group", "ce=ce-*", "--group", "matches=m-?")
    ce, matches = found["over_seeds"]
    assert matches["test"] == "paired by seed"
    last, *rest = of_runs(found, matches)
    assert matches["against_first"]["rouge1"]["p"] == pytest.approx(paired([*rest, last], of_runs(found, ce)), abs=1e-6)
    folders(tmp_path, "ce", {"d-a": (1, 2), "d-b": (2, 3), "d-c": (3, 3)})
    assert scored(capsys, "--group", "ce=ce-*", "--group", "d=d-*")["over_seeds"][1]["test"] == "not paired (Welch)"


def test_a_group_can_be_written_in_several_ways(files, capsys):
    ways = [
        ["--group", "ce=ce-1.jsonl,ce-2.jsonl"],
        ["--group", "ce=ce-1.jsonl", "--group", "ce=ce-2.jsonl"],
        ["--group", "ce=ce-1.jsonl", "ce=ce-2.jsonl"],  # what a shell makes of ce=ce-{1,2}.jsonl
        ["--group", f"ce={files}/ce-[12].jsonl"],
    ]
    for way in ways:
        (row,) = scored(capsys, "--references", "refs.jsonl", *way)["over_seeds"]
        assert (row["label"], row["runs"]) == ("ce", ["ce-1", "ce-2"]), way


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--group", "ce-*.jsonl"], "--group takes NAME=FILES, such as --group 'ce=ce-*.jsonl', got 'ce-*.jsonl'."),
        (["--group", "ce="], "--group takes NAME=FILES, such as --group 'ce=ce-*.jsonl', got 'ce='."),
        (["--group", "ce=cd-*.jsonl"], "no file or folder matches 'cd-*.jsonl' of the group 'ce'."),
        (["--group", "ce=ce-*.jsonl", "ce-1.jsonl"], "ce-1.jsonl and ce-1.jsonl are the same file."),
        (
            ["--group", "lead=ce-*.jsonl", "lead.jsonl"],
            "a group and a system are both called 'lead'. Rename the group.",
        ),
        ([], "there is nothing to score: give one or more files of predictions, or run folders."),
    ],
)
def test_groups_that_cannot_be_read_get_a_sentence(files, capsys, arguments, sentence):
    assert f"error: {sentence}" in refused(capsys, "--references", "refs.jsonl", *arguments)


def test_a_file_that_is_named_like_a_pattern_is_that_file(files, capsys):
    (files / "ce-[1].jsonl").write_text((files / "ce-2.jsonl").read_text())
    (row,) = scored(capsys, "--references", "refs.jsonl", "--group", "ce=ce-[1].jsonl")["over_seeds"]
    assert row["runs"] == ["ce-[1]"]
    for name in ("ce,1.jsonl", "ce=1.jsonl"):
        (files / name).write_text((files / "ce-2.jsonl").read_text())
    group, other = scored(capsys, "--references", "refs.jsonl", "--group", "ce=ce,1.jsonl", "ce=1.jsonl")["over_seeds"]
    assert (group["runs"], other["runs"]) == (["ce,1"], ["ce=1"])


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test.csv").write_text(
        "article,summary,lead,bart,odd:name\nthe cat sat here,the cat sat,the cat,the cat sat,the\n"
        "it rained a lot,it rained,it,it rained,it\n"
    )
    return tmp_path


def test_systems_are_columns_of_one_file(table, capsys):
    arguments = ["--references", "test.csv:summary", "test.csv:lead", "test.csv:bart", "test.csv:odd:name"]
    found = scored(capsys, *arguments, "--documents", "test.csv:article", "--metrics", "rouge,shape")
    assert [system["name"] for system in found["systems"]] == ["lead", "bart", "odd:name"]
    assert [round(system["scores"]["rouge1"]) for system in found["systems"]] == [73, 100, 58]
    assert "coverage" in found["systems"][0]["scores"]
    grouped = scored(capsys, "--references", "test.csv:summary", "--group", "a=test.csv:lead,test.csv:bart")
    assert grouped["over_seeds"][0]["runs"] == ["lead", "bart"]


def test_equal_columns_of_two_files_carry_the_files_name(table):
    (table / "dev.csv").write_text((table / "test.csv").read_text())
    given = [scored_texts.parse_file(text) for text in ("test.csv:lead", "dev.csv:lead", "test.csv:bart")]
    assert scored_texts.align([scored_texts.parse_file("test.csv:summary")], given).names == [
        "test/lead",
        "dev/lead",
        "bart",
    ]


def test_a_file_with_a_colon_in_its_name_is_a_file(table, capsys):
    (table / "test.csv:lead").write_text("a\nb\n")
    assert scored_texts.parse_file("test.csv:lead").column == ""


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["test.csv:leda"], "test.csv has no column 'leda' for the prediction (did you mean 'lead'?)"),
        (["tset.csv:lead"], "no such file or folder: tset.csv. Did you mean test.csv?"),
        (["test.csv:lead", "test.csv:lead"], "test.csv:lead is given twice. Give each system once."),
        (
            ["test.csv:lead,bart"],
            "the predictions are one column, got 'lead,bart'. Each system has a column of its own: give test.csv:lead "
            "test.csv:bart.",
        ),
        (["test.csv:lead", "--per-document", "test.csv"], "test.csv is an input and would be overwritten."),
    ],
)
def test_columns_that_cannot_be_read_get_a_sentence(table, capsys, arguments, sentence):
    assert f"error: {sentence}" in refused(capsys, "--references", "test.csv:summary", *arguments)


def test_a_json_list_of_texts_is_read(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "refs.json").write_text('["the cat\\nsat", "it rained"]')
    (tmp_path / "ours.json").write_text('[\n "the cat",\n "it rained"\n]\n')
    (found,) = scored(capsys, "--references", "refs.json", "ours.json")["systems"]
    assert found["scores"]["rouge1"] == pytest.approx(90)
