"""The same texts in every format are the same texts: for scoring, training and statistics."""

import csv
import gzip
import io
import json
import lzma
import string

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet as parquet  # noqa: E402

from ngramloss.cli import main  # noqa: E402
from ngramloss.data import load  # noqa: E402
from ngramloss.data.newswire import items  # noqa: E402
from ngramloss.errors import UserError  # noqa: E402
from ngramloss.scoring.texts import read_texts  # noqa: E402

COMPRESS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstandard.ZstdCompressor().compress}
FORMS = [".jsonl", ".ndjson", ".json", ".csv", ".tsv", ";.csv", ".parquet"]


def written(rows, form):
    """Rows of texts as bytes in a format; ``;.csv`` has semicolons."""
    if form in (".jsonl", ".ndjson"):
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8", "surrogatepass")
    if form == ".json":
        return json.dumps(rows, indent=1).encode()
    if form == ".parquet":
        out = io.BytesIO()
        parquet.write_table(pyarrow.Table.from_pylist(rows), out)
        return out.getvalue()
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), delimiter={".csv": ",", ".tsv": "\t", ";.csv": ";"}[form])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def save(folder, name, rows, form, compression=""):
    path = folder / f"{name}{form.removeprefix(';')}{compression}"
    path.write_bytes(COMPRESS[compression](written(rows, form)))
    return path


EVERY = [(form, compression) for form in FORMS for compression in COMPRESS if not (form == ".parquet" and compression)]


@pytest.fixture(scope="module")
def forty():
    found = items("test", 40)
    return {
        "reference": [{"id": item.id, "reference": item.summary} for item in found],
        "prediction": [{"id": item.id, "prediction": item.document.split(". ")[0] + "."} for item in found],
    }


def scores(capsys, *arguments):
    assert (
        main(
            [
                "score",
                *map(str, arguments),
                "--metrics",
                "rouge,bleu,chrf,shape",
                "--json",
                "--samples",
                "20",
                "--shuffles",
                "20",
            ]
        )
        == 0
    )
    return json.loads(capsys.readouterr().out)["systems"][0]


@pytest.mark.slow
def test_forty_texts_have_the_same_scores_in_every_digit_in_every_format(tmp_path, forty, capsys):
    expected = None
    for number, (form, compression) in enumerate(EVERY):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = scores(
            capsys,
            "--references",
            save(folder, "refs", forty["reference"], form, compression),
            save(folder, "p", forty["prediction"], form, compression),
        )
        expected = expected or found
        assert found == expected, (form, compression)
    for compression, compress in COMPRESS.items():
        paths = []
        for what, rows in forty.items():
            paths.append(tmp_path / f"{what}.txt{compression}")
            paths[-1].write_bytes(compress("".join(row[what] + "\n" for row in rows).encode()))
        found = scores(capsys, "--references", paths[0], paths[1])
        assert {**found, "name": "p"} == expected


ROWS = st.lists(
    st.tuples(
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1),
        st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=ROWS, every=st.sampled_from(EVERY))
def test_random_rows_come_back_from_every_format(tmp_path, pairs, every):
    form, compression = every
    rows = [
        {"id": str(number), "prediction": first, "reference": second} for number, (first, second) in enumerate(pairs)
    ]
    path = save(tmp_path, "rows", rows, form, compression)
    for what in ("prediction", "reference"):
        assert read_texts(path, what) == ({row["id"]: row[what] for row in rows}, False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=ROWS, every=st.sampled_from(EVERY))
def test_random_rows_come_back_as_examples(tmp_path, pairs, every):
    form, compression = every
    rows = [
        {"id": str(number), "document": first, "summary": second}
        for number, (first, second) in enumerate(pairs)
        if first.strip() and second.strip()
    ]
    if rows:
        found = load(str(save(tmp_path, "train", rows, form, compression)), "train")
        assert [example[:3] for example in found.examples] == [tuple(row.values()) for row in rows]


def test_quoted_line_ends_tabs_and_separators_are_part_of_a_text(tmp_path):
    texts = ['two\nlines; a "quote", and\ta\ttab', "=1+1", " spaces "]
    rows = [{"id": str(number), "prediction": text} for number, text in enumerate(texts)]
    for form in FORMS:
        assert list(read_texts(save(tmp_path, "p", rows, form), "prediction").by_id.values()) == texts


def test_lines_of_tab_separated_values_that_a_quotation_mark_would_join_are_a_bad_row(tmp_path):
    """Files of sentence pairs often have no quoting: a quotation mark is part of the text."""
    path = tmp_path / "pairs.tsv"
    path.write_text('en\tde\nOne.\tEins.\n"I am tired.\tIch bin müde.\nLet us go."\tGehen wir.\n"a\nb"\tc\nd\t"e\nf"\n')
    with pytest.raises(
        ValueError, match=r"(?s)1 of 4 rows .*pairs.tsv:3: a quotation mark is closed only on a later line"
    ):
        load(str(path), "train", source="en", target="de")
    kept = load(str(path), "train", source="en", target="de", on_bad_row="skip").examples
    assert [(one.source, one.target) for one in kept] == [("One.", "Eins."), ("a\nb", "c"), ("d", "e\nf")]


def test_a_header_with_more_semicolons_than_commas_is_separated_by_semicolons(tmp_path):
    (tmp_path / "a.csv").write_text('id;"the reference, first, of two, or more";prediction\n1;a, b;c\n')
    assert read_texts(tmp_path / "a.csv", "prediction").by_id == {"1": "c"}


# Standard input


class Stdin:
    def __init__(self, content):
        self.buffer = io.BufferedReader(io.BytesIO(content))

    def isatty(self):
        return False


@pytest.mark.parametrize("form", [".jsonl", ".json", ".txt"])
def test_predictions_come_from_standard_input(tmp_path, forty, capsys, monkeypatch, form):
    lines = "".join(row["prediction"] + "\n" for row in forty["prediction"]).encode()
    references = save(tmp_path, "refs", forty["reference"], ".jsonl")
    if form == ".txt":
        references = tmp_path / "refs.txt"
        references.write_text("".join(row["reference"] + "\n" for row in forty["reference"]))
    monkeypatch.setattr("sys.stdin", Stdin(lines if form == ".txt" else written(forty["prediction"], form)))
    found = scores(capsys, "--references", references, "-")
    assert found["name"] == "stdin"
    assert (
        found["scores"]
        == scores(
            capsys,
            "--references",
            save(tmp_path, "refs", forty["reference"], ".csv"),
            save(tmp_path, "p", forty["prediction"], ".csv"),
        )["scores"]
    )


def test_standard_input_is_read_only_once(capsys):
    assert main(["score", "--references", "-", "-"]) == 2
    assert "standard input (-) can be read only once" in capsys.readouterr().err


# Folders of the package datasets


def test_a_folder_that_datasets_saved_is_read(tmp_path, forty, capsys):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(forty["reference"]).save_to_disk(tmp_path / "refs")
    datasets.Dataset.from_list(forty["prediction"]).save_to_disk(tmp_path / "p")
    expected = scores(
        capsys,
        "--references",
        save(tmp_path, "refs", forty["reference"], ".csv"),
        save(tmp_path, "p", forty["prediction"], ".csv"),
    )
    assert scores(capsys, "--references", tmp_path / "refs", tmp_path / "p") == expected
    rows = [{"document": f"text {number}", "summary": f"short {number}"} for number in range(4)]
    both = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), validation=datasets.Dataset.from_list(rows[:2]))
    both.save_to_disk(tmp_path / "saved")
    assert [len(load(str(tmp_path / "saved"), split).examples) for split in ("train", "dev")] == [4, 2]
    (tmp_path / "saved" / "dataset_dict.json").write_text("[")
    with pytest.raises(UserError, match="looks like a saved data set, but its JSON files are damaged"):
        load(str(tmp_path / "saved"), "train")


# Parallel lines


def test_files_of_parallel_lines_are_the_columns_of_a_split(tmp_path):
    for name, lines in {"train.en": "a\nb\n", "train.de": "A\nB\n", "dev.en.gz": "c\n", "dev.de": "C\n"}.items():
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    found = load(str(tmp_path), "train", source="en", target="de")
    assert [example[:3] for example in found.examples] == [("1", "a", "A"), ("2", "b", "B")]
    assert load(str(tmp_path), "validation", source="de", target="en").examples[0].source == "C"
    given = f"train={tmp_path / 'train.en'}+{tmp_path / 'train.de'}"
    assert load(given, "train", source="en", target="de").examples == found.examples
    (tmp_path / "train.de").write_text("A\n")
    with pytest.raises(UserError, match=r"do not have the same number of lines: train.de ends after line 1"):
        load(str(tmp_path), "train", source="en", target="de")


def test_source_and_target_are_found_as_fairseq_names_them(tmp_path):
    (tmp_path / "train.source").write_text("a\n")
    (tmp_path / "train.target").write_text("b\n")
    assert load(str(tmp_path), "train").examples[0][:3] == ("1", "a", "b")


# Columns


def test_columns_can_be_named_in_every_scoring_command(tmp_path, capsys):
    (tmp_path / "r.csv").write_text("key,gold,long\nx,the cat,the cat sat here\ny,a dog,a dog ran home\n")
    (tmp_path / "p.csv").write_text("key,ours\nx,the cat\ny,the dog\n")
    given = [
        "--references",
        str(tmp_path / "r.csv"),
        "--documents",
        str(tmp_path / "r.csv"),
        str(tmp_path / "p.csv"),
        "--target",
        "gold",
        "--source",
        "long",
    ]
    assert main(["score", *given]) == 2
    message = capsys.readouterr().err
    assert "p.csv:2 has no prediction. Its columns are key, ours; " in message
    assert "Name another column with --prediction." in message
    named = [*given, "--prediction", "ours", "--id", "key"]
    assert main(["score", *named, "--metrics", "rouge,shape", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["systems"][0]["scores"]
    assert found["rouge1"] == 75.0
    assert found["compression"] == 2.0
    assert main(["report", *named, "-o", str(tmp_path / "page")]) == 0
    assert main(["score", *named[:-1], "kee"]) == 2
    assert "has no column 'kee' for the id (did you mean 'key'?)" in capsys.readouterr().err


def test_rows_can_be_compared_by_their_order(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text('{"id": "x", "reference": "a b"}\n{"id": "y", "reference": "c d"}\n')
    (tmp_path / "p.jsonl").write_text('{"prediction": "a b"}\n{"prediction": "c d"}\n')
    given = ["score", "--references", str(tmp_path / "r.jsonl"), str(tmp_path / "p.jsonl")]
    assert main(given) == 2
    assert "--id none compares them row by row." in capsys.readouterr().err
    assert main([*given, "--id", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["systems"][0]["scores"]["rouge1"] == 100.0


def test_a_mistyped_path_says_that_there_is_no_such_file(tmp_path, capsys):
    (tmp_path / "preds.csv").write_text("id,prediction\n1,a\n")
    assert main(["score", "--references", str(tmp_path / "pred.csv"), str(tmp_path / "preds.csv")]) == 2
    message = capsys.readouterr().err
    assert "no such file or folder: " in message
    assert "Did you mean preds.csv?" in message
    assert "preds.csv" in message


# Several references


def several(tmp_path, way):
    """The same two references of two documents, given in three ways."""
    first, second = {"1": "the cat sat", "2": "it rained"}, {"1": "a cat was sitting", "2": "rain fell all day"}
    if way == "repeated":
        rows = [[{"id": key, "reference": text} for key, text in texts.items()] for texts in (first, second)]
        return [
            word
            for number, table in enumerate(rows)
            for word in ("--references", save(tmp_path, f"r{number}", table, ".csv"))
        ]
    if way == "list":
        return [
            "--references",
            save(tmp_path, "r", [{"id": key, "references": [first[key], second[key]]} for key in first], ".jsonl"),
        ]
    return [
        "--references",
        save(
            tmp_path, "r", [{"id": key, "reference1": first[key], "reference2": second[key]} for key in first], ".csv"
        ),
    ]


def test_several_references_are_the_same_however_they_are_given(tmp_path, capsys):
    predictions = save(
        tmp_path, "p", [{"id": "1", "prediction": "a cat was sitting"}, {"id": "2", "prediction": "it rained"}], ".csv"
    )
    found = [scores(capsys, *several(tmp_path, way), predictions) for way in ("repeated", "list", "columns")]
    assert found[0] == found[1] == found[2]
    assert found[0]["scores"]["rouge1"] == 100.0
    assert "|refs:2|rule:best-f|" in found[0]["signature"]["rouge"]
    assert "nrefs:2" in found[0]["signature"]["bleu"]


def test_a_second_file_of_references_must_have_the_same_ids(tmp_path, capsys):
    given = several(tmp_path, "repeated")
    (tmp_path / "r1.csv").write_text("id,reference\n1,x\n")
    predictions = save(tmp_path, "p", [{"id": "1", "prediction": "a"}, {"id": "2", "prediction": "b"}], ".csv")
    assert main(["score", *map(str, given), str(predictions)]) == 2
    assert "must have the same ids. In r1.csv: 1 missing ('2')." in capsys.readouterr().err


def test_a_split_with_several_references_keeps_them_all(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [
        {"id": "1", "text": "the cat sat on the mat. it slept.", "summary1": "a cat sat", "summary2": "the cat slept"},
        {"id": "2", "text": "it rained all day. then it stopped.", "summary1": "rain", "summary2": ""},
    ]
    found = load(str(save(tmp_path, "test", rows, ".csv")), "train")
    assert found.examples[0].references == ("a cat sat", "the cat slept")
    assert found.examples[1].references == ()
    assert found.examples[0].target == "a cat sat"
    assert main(["generate", "lead-1", "--data", "test=test.csv", "--out", "out"]) == 0
    capsys.readouterr()
    assert main(["score", "out", "--json"]) == 0
    assert "|refs:var|" in json.loads(capsys.readouterr().out)["systems"][0]["signature"]["rouge"]


# A part held out


def test_a_part_of_one_file_is_held_out_by_the_ids(tmp_path):
    rows = [
        {"id": f"row {letter}{number}", "text": f"{letter} {number}", "summary": letter}
        for letter in string.ascii_lowercase
        for number in range(4)
    ]
    path = save(tmp_path, "all", rows, ".csv")
    train, held_out = (load(str(path), split, validation_fraction=0.25) for split in ("train", "validation"))
    assert len(held_out.examples) == 26
    assert len(train.examples) == 78
    assert {example.id for example in train.examples}.isdisjoint(example.id for example in held_out.examples)
    edited = [{**row, "text": row["text"] + " more"} for row in rows[::-1]]
    shuffled = load(str(save(tmp_path, "back", edited, ".jsonl")), "validation", validation_fraction=0.25)
    assert {example.id for example in shuffled.examples} == {example.id for example in held_out.examples}


def test_holding_out_needs_rows_and_no_validation_split(tmp_path):
    path = save(tmp_path, "one", [{"text": "a", "summary": "b"}], ".csv")
    with pytest.raises(UserError, match=r"has 1 examples: too few to hold out 0.1 of them"):
        load(str(path), "train", validation_fraction=0.1)
    with pytest.raises(
        UserError, match=r"newswire has a validation split of its own. Leave data.validation_fraction out."
    ):
        load("newswire", "train", validation_fraction=0.1)
    with pytest.raises(UserError, match=r"newswire has a test split of its own. Leave data.test_fraction out."):
        load("newswire", "train", test_fraction=0.1)
    for split in ("validation", "test"):
        with pytest.raises(
            UserError,
            match=rf"one.csv is a single file, so it has no split '{split}', only 'train' and what is held out of it. .*or hold "
            rf"a part of the training split out with data.{split}_fraction=0.1. (train.eval_every=0 trains without it|"
            r"--split train reads all of its rows)\.",
        ):
            load(str(path), split)
    (tmp_path / "folder").mkdir()
    save(tmp_path / "folder", "train", [{"text": "a", "summary": "b"}], ".csv")
    with pytest.raises(
        FileNotFoundError,
        match=r"has no split 'test'; its splits are \['train'\]. Add a file for it, or hold .* data.test_fraction=0.1.",
    ):
        load(str(tmp_path / "folder"), "test")


def test_a_test_split_is_held_out_beside_the_validation_split(tmp_path):
    rows = [{"id": f"row {number}", "text": f"text {number}", "summary": "b"} for number in range(100)]
    path = str(save(tmp_path, "all", rows, ".csv"))

    def ids(split, **fractions):
        return [example.id for example in load(path, split, **fractions).examples]

    both = {"validation_fraction": 0.1, "test_fraction": 0.2}
    parts = {split: ids(split, **both) for split in ("train", "validation", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 70, "validation": 10, "test": 20}
    assert len(set().union(*parts.values())) == 100
    assert parts["validation"] == ids("validation", validation_fraction=0.1)
    assert parts["test"] == ids("test", test_fraction=0.2)
    assert len(ids("train", test_fraction=0.2)) == 80
    with pytest.raises(UserError, match=r"has no split 'validation'"):
        ids("validation", test_fraction=0.2)
    with pytest.raises(
        UserError,
        match=r"too few to hold out 0.6 of them for validation and 0.5 of them for test and train on the rest",
    ):
        ids("train", validation_fraction=0.6, test_fraction=0.5)


@pytest.mark.parametrize("fractions", [{}, {"test_fraction": 0.25}])
def test_a_split_says_whether_its_limit_leaves_rows_out(tmp_path, fractions):
    rows = [{"text": f"text {number}", "summary": "b"} for number in range(12)]
    path = str(save(tmp_path, "all", rows, ".jsonl"))
    count = len(load(path, "train", **fractions).examples)
    assert [load(path, "train", limit=limit, **fractions).more for limit in (0, count - 1, count, count + 1)] == [
        False,
        True,
        False,
        False,
    ]


FRAMES = zstandard.ZstdCompressor()
WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False)


def lines_of(count):
    return [json.dumps({"document": f"text {number}", "summary": f"short {number}"}) + "\n" for number in range(count)]


@pytest.mark.parametrize("frames", [1, 2, 7])
def test_every_frame_of_a_zst_file_is_read(tmp_path, frames):
    lines = lines_of(700)
    step = len(lines) // frames
    blocks = ["".join(lines[start : start + step]).encode() for start in range(0, len(lines), step)]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(map(WITHOUT_SIZE.compress, blocks)))
    assert [row.target for row in load(str(tmp_path / "a.jsonl.zst"), "train").examples] == [
        f"short {number}" for number in range(700)
    ]


@pytest.mark.parametrize("missing", [1, 3, 200])
@pytest.mark.parametrize("before", [0, 1])
def test_a_zst_file_that_ends_too_early_is_an_error_in_any_frame(tmp_path, before, missing):
    frame = WITHOUT_SIZE.compress("".join(lines_of(700)).encode())
    (tmp_path / "a.jsonl.zst").write_bytes(frame * before + frame[:-missing])
    with pytest.raises(UserError, match=r"a.jsonl.zst is truncated or damaged: Truncated compressed stream"):
        load(str(tmp_path / "a.jsonl.zst"), "train", on_bad_row="skip", id="none")


def long_row(form, size):
    """A file whose second row is of this size."""
    first = "a" * 5000
    rows = [{"document": first, "summary": "b"}, {"document": "c" * size, "summary": "d"}]
    if form == ".txt":
        return f"{first}\n{'c' * size}\n".encode()
    if form == "quoted.csv":  # many short lines between two quotes
        return (f'document,summary\n{first},b\n"' + "c\n" * (size // 2) + '",d\n').encode()
    return written(rows, form)


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("form", [".jsonl", ".csv", ".tsv", "quoted.csv", ".txt", ".parquet"])
def test_a_row_has_a_bound(tmp_path, monkeypatch, form, compression):
    from ngramloss.data import rows

    if form == ".parquet" and compression:
        pytest.skip("Parquet has its own compression")
    path = tmp_path / f"a.{form.rpartition('.')[2]}{compression}"
    monkeypatch.setattr(rows, "LONGEST_ROW", 100_000)
    path.write_bytes(COMPRESS[compression](long_row(form, 99_000)))
    assert len([row for row in rows.rows(path) if isinstance(row, rows.RawRow)]) == 2
    path.write_bytes(COMPRESS[compression](long_row(form, 300_000)))
    line = {".csv": 3, ".tsv": 3, "quoted.csv": 3}.get(form, 2)
    with pytest.raises(
        UserError,
        match=rf"a\..*:{line}: the row is longer than 100,000 bytes, the limit for one row\. Look for an unclosed quote or "
        r"bracket, or a missing line end; otherwise divide the text into several rows\.",
    ):
        list(rows.rows(path))


@pytest.mark.parametrize("form", [".jsonl", ".csv", ".txt"])
def test_the_bound_of_a_row_is_none_of_a_file(tmp_path, monkeypatch, form):
    from ngramloss.data import rows

    monkeypatch.setattr(rows, "LONGEST_ROW", 300)
    path = tmp_path / f"a{form}"
    texts = [{"document": str(number) * 50, "summary": "b"} for number in range(20)]
    path.write_bytes("".join("c" * 200 + "\n" for _ in texts).encode() if form == ".txt" else written(texts, form))
    assert len([row for row in rows.rows(path) if isinstance(row, rows.RawRow)]) == 20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[{"a": 1},\n {"a": }]', "Expecting value: line 2"),
        ('[{"a": 1}\n {"a": 2}]', "Expecting ',' delimiter: line 2"),
        ('[{"a": 1}]\n\nmore', "Extra data: line 3"),
        ('[{"a": 1},\n {"a": "b', "Unterminated string starting at: line 2"),
        ('[{"a":\n' + "9" * 5000 + "}]", "Exceeds the limit .4300 digits"),
        ('[{"a": "' + "b" * 300 + '"}]', "it has more than 300 bytes"),
    ],
)
def test_a_json_list_says_where_it_cannot_be_read(tmp_path, monkeypatch, text, reason):
    from ngramloss.data import rows

    monkeypatch.setattr(rows, "LONGEST_LIST", 300 if "b" * 300 in text else 10_000)
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=rf"a.json starts as a JSON list but cannot be read to its end: .*{reason}"):
        list(rows.rows(tmp_path / "a.json"))


def test_a_json_list_is_the_same_however_it_is_written(tmp_path):
    from ngramloss.data import rows

    items = [{"a": 12345, "b": 'x\n"] é'}, {"a": [1, {"c": None}]}, 123, "text", True, {}]
    for text in (
        json.dumps(items),
        json.dumps(items, indent=2, ensure_ascii=False),
        " [ ] \n",
        "\ufeff" + json.dumps(items),
    ):
        (tmp_path / "a.json").write_text(text, encoding="utf-8")
        found = list(rows.rows(tmp_path / "a.json"))
        expected = json.loads(text.removeprefix("\ufeff"))
        assert [row.values if isinstance(row, rows.RawRow) else row.reason.split()[-1] for row in found] == [
            item if isinstance(item, dict) else type(item).__name__ for item in expected
        ]
        assert [row.line for row in found] == [*range(1, len(expected) + 1)]
