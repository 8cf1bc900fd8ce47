"""Data sets: every format alike, every fault named with its line, sentences that lose nothing, counts done by hand."""

import bz2
import csv
import gzip
import io
import json
import lzma
import subprocess
import sys
import types

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from released_data import STORIES, data_folder, read_rows

from ngramloss.data import SPLITTERS, BadRow, Example, load, measurement, split_many, split_names, table
from ngramloss.data import examples as examples_room
from ngramloss.data import sentences as sentences_room
from ngramloss.data.columns import columns
from ngramloss.data.data_sets import KNOWN, Hub, canonical, origin
from ngramloss.data.sentences import sentences
from ngramloss.data.statistics import PAPER, statistics
from ngramloss.output.progress import Progress

ROWS = [
    {"id": "a", "document": "The cat sat.", "summary": "A cat."},
    {"id": "b", "document": 'He said "no, never",\nand left.\r\nThen: £5…', "summary": "He left."},
    {"id": "c", "document": "x" * 200_000, "summary": "Long; longer than csv's own limit."},
]
EXAMPLES = [Example(row["id"], row["document"], row["summary"]) for row in ROWS]
COMPRESSED = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def json_list(rows):
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


def separated(rows, delimiter=","):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    content = io.BytesIO()
    parquet.write_table(arrow.Table.from_pylist(rows), content)
    return content.getvalue()


WRITERS = {
    ".jsonl": json_lines,
    ".json": json_list,
    ".csv": separated,
    ".tsv": lambda rows: separated(rows, "\t"),
    ".parquet": parquet,
}


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def solid(text):
    return "".join(text.split())


# ── formats ──────────────────────────────────────────────────────────────────────────────────────────────────────────


PACKINGS = [
    (kind, compression) for kind in WRITERS for compression in COMPRESSED if kind != ".parquet" or not compression
]


@pytest.mark.parametrize(("kind", "compression"), PACKINGS)
def test_every_format_gives_the_same_examples_and_fingerprint(tmp_path, kind, compression):
    name = written(tmp_path / f"mine{kind}{compression}", COMPRESSED[compression](WRITERS[kind](ROWS)))
    found = load(name, "train")
    assert found.examples == EXAMPLES
    assert found.skipped == []
    assert found.fingerprint == examples_room.fingerprint(EXAMPLES)
    assert (found.name, found.split) == (name, "train")


plain_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(str.strip)
tables = st.lists(st.tuples(plain_text, plain_text), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=tables, kind=st.sampled_from(list(WRITERS)), compression=st.sampled_from(["", ".gz", ".xz"]))
@example(rows=[("\ufeffa", "\x00b")], kind=".csv", compression="")
@example(rows=[("\ra", "b\r"), ("\u2028c", '"d')], kind=".tsv", compression=".gz")
def test_no_text_is_changed_on_its_way_through_a_file(tmp_path, rows, kind, compression):
    # Such a .tsv is refused: it looks like rows that a quotation mark joins by mistake.
    assume(kind != ".tsv" or not any("\t" in text and {*"\r\n"} & {*text} for row in rows for text in row))
    rows = [{"source": source, "target": target} for source, target in rows]
    end = "" if kind == ".parquet" else compression
    name = written(tmp_path / f"mine{kind}{end}", COMPRESSED[end](WRITERS[kind](rows)))
    expected = [Example(str(number), row["source"], row["target"]) for number, row in enumerate(rows, 1)]
    assert load(name, "train")[2:5] == (expected, [], examples_room.fingerprint(expected))


@pytest.mark.parametrize(
    "other",
    [
        [EXAMPLES[1], EXAMPLES[0]],
        [EXAMPLES[0]],
        [EXAMPLES[0], EXAMPLES[1]._replace(id="B")],
        [EXAMPLES[0], EXAMPLES[1]._replace(source="He stayed.")],
        [EXAMPLES[0], EXAMPLES[1]._replace(target="He stayed.")],
        [EXAMPLES[0], EXAMPLES[1]._replace(references=(EXAMPLES[1].target, "He stayed."))],
    ],
)
def test_a_fingerprint_tells_order_ids_sources_and_targets_apart(other):
    assert examples_room.fingerprint(other) != examples_room.fingerprint(EXAMPLES[:2])


def test_a_fingerprint_does_not_depend_on_the_release():
    assert examples_room.fingerprint([Example("1", "é", "b")]) == "e09698c891f0ca3c"


@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, kind):
    name = written(tmp_path / f"mine{kind}", b"\xef\xbb\xbf" + WRITERS[kind](ROWS))
    assert load(name, "train").examples == EXAMPLES


@pytest.mark.parametrize("kind", [".jsonl", ".csv"])
def test_blank_lines_and_carriage_returns_are_no_rows(tmp_path, kind):
    rows = [{"text": "a", "summary": "b"}, {"text": "c", "summary": "d"}]
    content = WRITERS[kind](rows).replace(b"\r", b"").replace(b"\n", b"\r\n\r\n")
    found = load(written(tmp_path / f"mine{kind}", content), "train")
    assert found.examples == [Example("1", "a", "b"), Example("2", "c", "d")]


def test_json_may_be_one_object_a_line(tmp_path):
    assert load(written(tmp_path / "mine.json", json_lines(ROWS)), "train").examples == EXAMPLES


def test_a_name_may_be_written_in_capitals(tmp_path):
    assert load(written(tmp_path / "MINE.JSONL.GZ", gzip.compress(json_lines(ROWS))), "train").examples == EXAMPLES


def test_numbers_serve_as_ids(tmp_path):
    name = written(tmp_path / "mine.jsonl", '{"id": 7, "source": "a", "target": "b"}\n')
    assert load(name, "train").examples == [Example("7", "a", "b")]


def test_limit_takes_the_first_examples_and_reads_no_further(tmp_path):
    rows = [{"source": f"a{number}", "target": "b"} for number in range(150)]
    content = json_lines(rows) + b"broken\n"
    found = load(written(tmp_path / "mine.jsonl", content), "train", limit=149)
    assert [example.source for example in found.examples] == [f"a{number}" for number in range(149)]
    with pytest.raises(ValueError, match=r"mine.jsonl:151: malformed JSON"):
        load(str(tmp_path / "mine.jsonl"), "train", limit=151)


@pytest.fixture
def shown(monkeypatch):
    """Every progress that is shown, as it is at its end."""
    ends = []
    monkeypatch.setattr(Progress, "__exit__", lambda self, *_: ends.append((self.what, self.done, self.total)))
    return ends


@pytest.mark.parametrize(("rows", "limit", "read"), [(250, 0, 250), (250, 120, 120), (3, 0, 3)])
def test_reading_shows_how_many_rows_it_has_read(tmp_path, shown, rows, limit, read):
    name = written(
        tmp_path / "mine.jsonl", json_lines([{"source": f"a{number}", "target": "b"} for number in range(rows)])
    )
    load(name, "train", limit=limit)
    load(name, "validation", limit=1, validation_fraction=0.5)
    assert shown == [("reading train", read, limit or None), ("reading train", rows, None)]


def test_local_text_files_need_neither_datasets_nor_pyarrow_nor_pysbd(tmp_path):
    name = written(tmp_path / "mine.csv.gz", gzip.compress(separated(ROWS)))
    blocked = "['torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'pysbd', 'numpy']"
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        f"from ngramloss.data import load; print(len(load({name!r}, 'train').examples))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "3\n", done.stderr


def test_importing_the_room_loads_nothing_heavy():
    program = (
        "import sys, ngramloss.data, ngramloss.data.statistics\n"
        "print({'torch', 'transformers', 'datasets', 'pyarrow', 'pandas', 'pysbd', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_missing_package_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"reading .*mine.parquet needs the package 'pyarrow'.*ngramloss\[score\]"):
        load(written(tmp_path / "mine.parquet", b""), "train")
    monkeypatch.setitem(sys.modules, "pysbd", None)
    with pytest.raises(
        ValueError, match=r"splitting sentences by rules needs the package 'pysbd'.*ngramloss\[metrics\]"
    ):
        sentences("A. B.")
    monkeypatch.setitem(sys.modules, "sentencex", None)
    with pytest.raises(
        ValueError, match=r"splitting sentences by rules needs the package 'sentencex'.*ngramloss\[hf\]"
    ):
        sentences("A. B.", "sentencex")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"reading EdinburghNLP/xsum from the hub needs the package 'datasets'"):
        load("xsum", "test")


# ── bad rows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

GOOD = b'{"id": "1", "source": "a", "target": "b"}\n'
FAULTS = {
    b'{"id": "2", "source": "a" "target": "b"}': r"malformed JSON: Expecting ',' delimiter at column 27",
    b'["a", "b"]': r"expected a JSON object, got list",
    b"[" * 100_000: r"malformed JSON: ",
    b'{"id": "2", "source": ' + b"9" * 5000 + b"}": r"malformed JSON: Exceeds the limit",
    b'{"id": "2", "source": "a"}': r"no column 'target'",
    b'{"id": "2", "source": null, "target": "b"}': r"'source' should be text, got null",
    b'{"id": "2", "source": ["a"], "target": "b"}': r"'source' should be text, got list",
    b'{"id": "2", "source": "", "target": "b"}': r"'source' is empty",
    b'{"id": "2", "source": "a", "target": " \\n\\u00a0"}': r"'target' is blank",
    b'{"id": "2", "source": "", "target": null}': r"'source' is empty; 'target' should be text, got null",
    b'{"id": "2", "source": "caf\xe9", "target": "b"}': r"'source' is not UTF-8 text, at character 4",
    b'{"id": "2", "source": "a", "target": "\\ud800"}': r"'target' is not UTF-8 text, at character 1",
    b'{"id": "1", "source": "a", "target": "b"}': r"id '1' was already used at .*mine.jsonl:1",
    b'{"id": 1, "source": "a", "target": "b"}': r"id '1' was already used at .*mine.jsonl:1",
    b'{"id": true, "source": "a", "target": "b"}': r"'id' should be text, got bool",
    b'{"source": "a", "target": "b"}': r"'id' should be text, got null",
    b'{"id": " ", "source": "a", "target": "b"}': r"'id' is blank",
}


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.values())
def test_a_bad_json_row_is_named_with_its_line(tmp_path, fault):
    name = written(tmp_path / "mine.jsonl", GOOD + b"\n" + fault + b"\n" + GOOD.replace(b"1", b"3"))
    with pytest.raises(ValueError, match=rf"1 of 3 rows of the split 'train' of .*\n  .*mine.jsonl:3: {FAULTS[fault]}"):
        load(name, "train")
    found = load(name, "train", on_bad_row="skip")
    assert found.examples == [Example("1", "a", "b"), Example("3", "a", "b")]
    assert [(row.file, row.line) for row in found.skipped] == [(name, 3)]


def test_a_bad_csv_row_is_named_with_its_first_line(tmp_path):
    content = 'source,target\n"two\nlines",b\nshort\n"a"b,c\na,b,c\n,b\nlast,"never\nclosed'
    name = written(tmp_path / "mine.csv", content)
    found = load(name, "train", on_bad_row="skip")
    assert found.examples == [Example("1", "two\nlines", "b")]
    assert [str(row).removeprefix(name) for row in found.skipped] == [
        ":4: expected 2 fields, got 1",
        ":5: malformed row: ',' expected after '\"'; write a quote inside quotes twice",
        ":6: expected 2 fields, got 3",
        ":7: 'source' is empty",
        ":8: malformed row: unexpected end of data; write a quote inside quotes twice",
    ]


def test_a_csv_text_that_is_not_utf8_is_a_bad_row(tmp_path):
    name = written(tmp_path / "mine.csv", b"source,target,note\ncaf\xe9,b,\nc,d,\xe9\n")
    found = load(name, "train", on_bad_row="skip")
    assert found.examples == [Example("2", "c", "d")]
    assert str(found.skipped[0]) == f"{name}:2: 'source' is not UTF-8 text, at character 4"


def test_a_bad_item_of_a_json_list_is_named_with_its_number(tmp_path):
    name = written(
        tmp_path / "mine.json",
        '[\n {"text": "a", "summary": "b"},\n\n {"text": "a"}, 5,\n {"text": "c", "summary": "d"}\n]',
    )
    found = load(name, "train", on_bad_row="skip")
    assert found.examples == [Example("1", "a", "b"), Example("4", "c", "d")]
    assert found.skipped == [BadRow(name, 2, "no column 'summary'"), BadRow(name, 3, "expected a JSON object, got int")]


def test_a_bad_parquet_row_is_named_with_its_number(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    latin = arrow.StringArray.from_buffers(
        3, arrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), arrow.py_buffer(b"a\xe9c")
    )
    content = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(
        arrow.table({"source": latin, "target": ["x", "y", None]}), content
    )
    name = written(tmp_path / "mine.parquet", content.getvalue())
    found = load(name, "train", on_bad_row="skip")
    assert found.examples == [Example("1", "a", "x")]
    assert found.skipped == [BadRow(name, 2, "not UTF-8 text"), BadRow(name, 3, "'target' should be text, got null")]


def test_skipping_a_row_moves_no_number(tmp_path):
    rows = [{"source": "a", "target": "b"}, {"source": "", "target": "b"}, {"source": "c", "target": "d"}]
    found = load(written(tmp_path / "mine.tsv", separated(rows, "\t")), "train", on_bad_row="skip")
    assert [example.id for example in found.examples] == ["1", "3"]


def test_a_skipped_row_leaves_its_id_free(tmp_path):
    rows = [{"id": "1", "source": "", "target": "b"}, {"id": "1", "source": "a", "target": "b"}]
    found = load(written(tmp_path / "mine.jsonl", json_lines(rows)), "train", on_bad_row="skip")
    assert found.examples == [Example("1", "a", "b")]


def test_ten_bad_rows_are_spelled_out_and_all_are_counted(tmp_path):
    name = written(tmp_path / "mine.jsonl", GOOD + b"broken\n" * 200)
    with pytest.raises(ValueError, match="200 of 201 rows of the split 'train'") as caught:
        load(name, "train")
    lines = str(caught.value).splitlines()
    assert [f"{name}:{number}:" in line for number, line in enumerate(lines[1:11], 2)] == [True] * 10
    assert lines[11:] == [
        "  … and 190 more",
        'Fix them, or skip them with --on-bad-row skip (on_bad_row="skip" in Python).',
    ]
    assert len(load(name, "train", on_bad_row="skip").skipped) == 200


def test_the_first_readable_row_may_come_late(tmp_path):
    name = written(tmp_path / "mine.jsonl", b"broken\n" * 150 + GOOD)
    found = load(name, "train", on_bad_row="skip")
    assert (found.examples, len(found.skipped)) == ([Example("1", "a", "b")], 150)


def test_skipping_every_row_is_an_error(tmp_path):
    for content in (b"broken\n" * 2, b'{"source": "", "target": "b"}\n' * 2):
        name = written(tmp_path / "mine.jsonl", content)
        for on_bad_row in ("skip", "error"):
            with pytest.raises(ValueError, match=r"2 of 2 rows(.|\n)*Fix them: every row is invalid"):
                load(name, "train", on_bad_row=on_bad_row)


@pytest.mark.parametrize(
    ("content", "kind"),
    [("", ".jsonl"), ("\n \n", ".jsonl"), ("", ".csv"), ("source,target\n", ".csv"), ("[ ]", ".json")],
)
def test_a_file_without_rows_is_an_error(tmp_path, content, kind):
    with pytest.raises(ValueError, match=r"the split 'train' of .*mine\..* has no rows"):
        load(written(tmp_path / f"mine{kind}", content), "train")


# ── damaged and mistaken files ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("kind", [".jsonl", ".csv", ".json"])
def test_a_truncated_file_is_told_in_a_sentence_even_when_bad_rows_are_skipped(tmp_path, kind, compression):
    rows = [{"source": f"{number * 7919 % 10007} a", "target": "b"} for number in range(5000)]
    whole = COMPRESSED[compression](WRITERS[kind](rows))
    name = written(tmp_path / f"mine{kind}{compression}", whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"mine.* is truncated or damaged: .*Copy or create the file again"):
        load(name, "train", on_bad_row="skip")


@pytest.mark.parametrize("at", [10, 1000])
@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2"])
def test_a_damaged_file_is_told_in_a_sentence(tmp_path, compression, at):
    whole = bytearray(
        COMPRESSED[compression](json_lines([{"source": f"{number}", "target": "b"} for number in range(5000)]))
    )
    whole[at : at + 50] = b"\xff" * 50
    with pytest.raises(ValueError, match=r"mine.jsonl.* is truncated or damaged"):
        load(written(tmp_path / f"mine.jsonl{compression}", bytes(whole)), "train", on_bad_row="skip")


@pytest.mark.parametrize("compression", [".gz", ".xz", ".bz2"])
def test_a_name_that_promises_compression_must_keep_it(tmp_path, compression):
    with pytest.raises(ValueError, match="is truncated or damaged"):
        load(written(tmp_path / f"mine.jsonl{compression}", GOOD), "train")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gzip.compress(GOOD, mtime=0), "it is gzip data. Rename it so that it ends in .gz"),
        (lzma.compress(GOOD), "it is xz data. Rename it so that it ends in .xz"),
        (GOOD.decode().encode("utf-16"), "it is UTF-16 text. Save it as UTF-8"),
        (b"\xfe\xff" + GOOD.decode().encode("utf-16-be"), "it is UTF-16 text. Save it as UTF-8"),
        (b"PK\x03\x04", "it is a zip archive. Unpack it first"),
    ],
)
def test_a_file_of_another_kind_is_recognised(tmp_path, content, said):
    with pytest.raises(ValueError, match=rf"mine.jsonl should contain .jsonl text, but {said}"):
        load(written(tmp_path / "mine.jsonl", content), "train")


@pytest.mark.parametrize("content", ['[{"source": "a", "target": "b"}', "[{} {}]", "[1,]", "[1] 2", "[" * 100_000])
def test_a_json_list_must_be_whole(tmp_path, content):
    with pytest.raises(ValueError, match=r"starts as a JSON list but cannot be read to its end: .*one object per line"):
        load(written(tmp_path / "mine.json", content), "train", on_bad_row="skip")


def test_a_damaged_parquet_file_is_told_in_a_sentence(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(
        ValueError, match=r"mine.parquet cannot be read as Parquet: .*[^.]\. Copy or create the file again"
    ):
        load(written(tmp_path / "mine.parquet", b"PAR1 and nothing more"), "train")


@pytest.mark.parametrize("end", [".doc", ".gz", ".parquet.gz", ""])
def test_a_format_that_the_name_does_not_tell_is_an_error(tmp_path, end):
    with pytest.raises(
        ValueError,
        match=r"unknown file format: .*mine.*Expected a name that ends in one of .jsonl, .ndjson, .json, .csv, .tsv, .txt, .parquet",
    ):
        load(written(tmp_path / f"mine{end}", GOOD), "train")


def test_csv_columns_need_names_of_their_own(tmp_path):
    with pytest.raises(
        ValueError, match=r"mine.csv:1: column names must be unique, but \['text'\] occur more than once"
    ):
        load(written(tmp_path / "mine.csv", "text,text,summary\na,b,c\n"), "train")


def test_csv_column_names_must_be_readable(tmp_path):
    with pytest.raises(ValueError, match=r"mine.csv:1: the header line cannot be read"):
        load(written(tmp_path / "mine.csv", '"a"b,c\n'), "train")


# ── columns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        (["id", "document", "summary"], ("document", "summary", "id")),
        (["article", "highlights", "id"], ("article", "highlights", "id")),
        (["fname", "dialogue", "summary", "topic"], ("dialogue", "summary", "fname")),
        (["src", "tgt"], ("src", "tgt", None)),
        (["text", "document", "abstract"], ("document", "abstract", None)),
        (["Text", "Summary", "ID"], ("Text", "Summary", "ID")),
        (["TEXT", "text", "target"], ("TEXT", "target", None)),
    ],
)
def test_usual_columns_are_found(present, expected):
    assert columns(present, "here") == (*expected, (), ())


def test_given_columns_win_and_are_not_taken_twice():
    assert columns(["document", "summary", "body"], "here", source="body")[:3] == ("body", "summary", None)
    assert columns(["document", "summary", "output"], "here", source="summary")[:3] == ("summary", "output", None)
    found = columns(["document", "text", "title"], "here", target="document", source=None)
    assert found[:3] == ("text", "document", None)


@pytest.mark.parametrize(
    ("present", "given", "sources", "target"),
    [
        (["instruction", "input", "output", "text"], {}, ("instruction", "input"), "output"),  # Alpaca
        (["source", "output", "instruction"], {}, ("instruction",), "output"),  # MathInstruct: source is a file
        (["instruction", "context", "response", "category"], {}, ("instruction", "context"), "response"),  # Dolly
        (["Instruction", "Document", "summary"], {}, ("Instruction", "Document"), "summary"),
        (["instruction", "output"], {}, ("instruction",), "output"),
        (["context", "document", "summary"], {}, ("document",), "summary"),
        (["instruction", "document"], {"target": "instruction"}, ("document",), "instruction"),
        (["instruction", "input", "output"], {"source": "input"}, ("input",), "output"),
        (["context", "question", "answer"], {"source": "context,question", "target": "answer"},
         ("context", "question"), "answer"),
        (["a,b", "a", "b", "summary"], {"source": "a,b"}, ("a,b",), "summary"),
    ],
)  # fmt: skip
def test_an_instruction_and_its_text_are_the_source_and_so_are_several_given_columns(present, given, sources, target):
    found = columns(present, "here", **given)
    assert ((found.source, *found.more), found.target) == (sources, target)


def test_the_texts_of_several_source_columns_are_joined_and_further_ones_may_be_empty(tmp_path):
    lines = [{"input": "b"}, {"input": ""}, {"input": None}, {}]
    rows = "\n".join(json.dumps({"instruction": "a", **line, "output": "c"}) for line in lines)
    split = load(written(tmp_path / "mine.jsonl", rows), "train")
    assert [example.source for example in split.examples] == ["a\n\nb", "a", "a", "a"]
    assert split.column == "instruction,input"
    bad = written(tmp_path / "bad.jsonl", '{"instruction": "a", "input": 3, "output": "c"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: 'input' should be text, got int"):
        load(bad, "train")
    empty = written(tmp_path / "empty.jsonl", '{"instruction": "", "input": "b", "output": "c"}\n')
    with pytest.raises(ValueError, match=r"empty.jsonl:1: 'instruction' is empty"):
        load(empty, "train")
    with pytest.raises(ValueError, match=r"no column 'inputs' for the source \(did you mean 'input'\?\)"):
        load(written(tmp_path / "mine.jsonl", rows), "train", source="instruction,inputs")


def test_numbered_responses_are_no_targets():
    with pytest.raises(ValueError, match=r"cannot find the target column"):
        columns(["prompt", "response_0", "response_1"], "here")


def test_a_column_that_the_first_rows_lack_is_not_read_if_it_does_not_matter_and_otherwise_an_error(tmp_path):
    first = '{"instruction": "a", "output": "b"}\n' * 100
    topic = written(tmp_path / "topic.jsonl", first + '{"instruction": "a", "output": "b", "topic": "c"}\n')
    assert load(topic, "train").unread == ("topic",)
    late = written(tmp_path / "late.jsonl", first + '{"instruction": "a", "input": "c", "output": "b"}\n')
    with pytest.raises(ValueError, match=r"late.jsonl:101 has 'input', which the first 100 rows lack, .*data.source"):
        load(late, "train")
    assert load(late, "train", source="instruction", target="output").examples[-1].source == "a"
    assert load(written(tmp_path / "early.jsonl", late_first(first)), "train").examples[0].source == "a\n\nc"


def late_first(rows):
    return '{"instruction": "a", "input": "c", "output": "b"}\n' + rows


def test_columns_that_are_not_read_are_known_unless_both_were_given(tmp_path):
    name = written(tmp_path / "mine.csv", "id,topic,dialogue,summary\n1,x,a,b\n")
    assert load(name, "train").unread == ("topic",)
    assert load(name, "train", source="topic").unread == ("dialogue",)
    assert load(name, "train", source="topic", target="summary").unread == ()
    assert load(name, "train", validation_fraction=0).target_column == "summary"


def test_columns_that_cannot_be_found_are_asked_for():
    with pytest.raises(
        ValueError, match=r"cannot find the source column of here. Its columns are 'body', 'summary'; .*data.source = …"
    ):
        columns(["body", "summary"], "here")
    with pytest.raises(
        ValueError,
        match=r"cannot find the target column of here. .*a target is called summary, .* or completion\. .*--target",
    ):
        columns(["text", "title"], "here")
    with pytest.raises(ValueError, match=r"Its columns are '" + "x" * 39 + "…', .* and 5 more; usually"):
        columns(["x" * 50] + [str(number) for number in range(24)], "here")
    with pytest.raises(ValueError, match=r"Its columns are none; usually"):
        columns([], "here")


def test_what_a_table_without_the_usual_columns_may_be():
    with pytest.raises(
        ValueError, match=r"The first line is read as the names of the columns: perhaps .* no such line"
    ):
        columns(["The museum has 3 rooms.", "Das Museum hat 3 Zimmer."], "here")
    with pytest.raises(
        ValueError, match=r"Conversations are read from a column 'messages', whose messages have role and"
    ):
        columns(["id", "conversations"], "here")


def test_both_columns_are_asked_for_at_once():
    with pytest.raises(
        ValueError,
        match=r"cannot find the source and the target column of here\. Its columns are 'a', 'b'; usually a source is called "
        r"document, .* or prompt; a target is called summary, .* or completion\. Set it with data\.source = … and data\.target = … in "
        r"a recipe, --source COLUMN --target COLUMN on the command line or source=…, target=… in Python\.",
    ):
        columns(["a", "b"], "here")
    with pytest.raises(
        ValueError,
        match=r"here has no column 'doc' for the source and no column 'd' for the target\. Its columns are 'a'\.",
    ):
        columns(["a"], "here", source="doc", target="d")


def test_a_given_column_that_is_absent_is_corrected():
    with pytest.raises(
        ValueError, match=r"here has no column 'sumary' for the target \(did you mean 'summary'\?\). Its columns are"
    ):
        columns(["text", "summary"], "here", target="sumary")
    with pytest.raises(
        ValueError, match=r"here has no column 'zzz' for the source\. Its columns are 'text', 'summary'"
    ):
        columns(["text", "summary"], "here", source="zzz")
    with pytest.raises(ValueError, match=r"must be different columns, but both are 'text'"):
        columns(["text", "summary"], "here", source="text", target="text")


@pytest.mark.parametrize(
    ("present", "given", "expected"),
    [
        (["id", "document"], {}, ("document", None, "id", (), ())),
        (["prompt"], {}, ("prompt", None, None, (), ())),
        (["document", "response"], {}, ("document", "response", None, (), ())),
        (["document", "summary", "summary2"], {}, ("document", "summary", None, ("summary2",), ())),
        (["document", "summary", "summary2"], {"target": "none"}, ("document", None, None, (), ())),
        (["document", "response"], {"target": "none"}, ("document", None, None, (), ())),
        (["summary"], {"source": "summary", "target": "title"}, ("summary", None, None, (), ())),
        (["a", "b", "uid"], {"source": "a,b", "target": "c,d"}, ("a", None, "uid", (), ("b",))),
        (["x", "id"], {"source": "x", "id": "none", "target": "y"}, ("x", None, None, (), ())),
        (["en"], {"languages": ("en_XX", "de_DE")}, ("en", None, None, (), ())),
        (["en"], {"languages": ("en_XX", "de_DE"), "target": "de"}, ("en", None, None, (), ())),
        (["tgt", "text", "source"], {"task": "translation", "target": "tgt"}, ("source", "tgt", None, (), ())),
        (["document", "source"], {"task": "translation", "target": "tgt"}, ("source", None, None, (), ())),
    ],
)  # fmt: skip
def test_where_no_target_is_needed_there_may_be_none(present, given, expected):
    assert columns(present, "here", need_target=False, **given) == expected


@pytest.mark.parametrize(
    ("present", "given", "message"),
    [
        (["summary"], {}, "cannot find the source column of here. Its columns are 'summary'"),
        (["document", "summary"], {"target": "sumary"}, "no column 'sumary' for the target"),
        (["document", "a"], {"target": "a,b"}, "no column 'b' for the target"),
        (["document"], {"source": "text", "target": "b"}, "no column 'text' for the source"),
    ],
)
def test_where_no_target_is_needed_others_are_not_passed_over(present, given, message):
    with pytest.raises(ValueError, match=message):
        columns(present, "here", need_target=False, **given)


def test_none_is_no_target_where_one_is_needed():
    with pytest.raises(ValueError, match="here has no column 'none' for the target"):
        columns(["document", "summary"], "here", target="none")


def test_rows_without_targets_are_read_if_none_is_needed_and_their_columns_are_known(tmp_path):
    name = written(tmp_path / "mine.csv", "topic,text\nx,a\ny,b\n")
    split = load(name, "train", need_target=False)
    assert split.examples == [Example("1", "a", ""), Example("2", "b", "")]
    assert (split.has_targets, split.column, split.target_column, split.unread) == (False, "text", "", ("topic",))
    assert split.fingerprint != load(name, "train", target="topic").fingerprint
    assert load(name, "train", target="topic", need_target=False).has_targets
    given = load(name, "train", source="text", target="headline", need_target=False)
    assert given.unread == ("topic",), "both were given, but one is not there"


def test_load_reads_the_columns_it_is_given(tmp_path):
    name = written(tmp_path / "mine.csv", "body,title,summary\na,b,c\n")
    assert load(name, "train", source="body", target="title").examples == [Example("1", "a", "b")]


def test_columns_are_those_of_all_the_first_rows(tmp_path):
    name = written(tmp_path / "mine.jsonl", '{"source": "a"}\n{"source": "a", "target": "b"}\n')
    with pytest.raises(ValueError, match=r"1 of 2 rows .*\n.*mine.jsonl:1: no column 'target'"):
        load(name, "train")


# ── names, folders and splits ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def folder(tmp_path):
    written(tmp_path / "set" / "train.jsonl", json_lines(ROWS[:1]))
    written(tmp_path / "set" / "dev.csv", separated(ROWS[1:2]))
    written(tmp_path / "set" / "test.jsonl.xz", lzma.compress(json_lines(ROWS)))
    written(tmp_path / "set" / "README.md", "not a split")
    written(tmp_path / "set" / ".hidden.jsonl", "not a split")
    return tmp_path / "set"


def test_a_folder_has_a_file_for_each_split(folder):
    assert split_names(str(folder)) == ["train", "validation", "test"]
    assert [len(load(str(folder), split).examples) for split in ("train", "validation", "test")] == [1, 1, 3]
    for alias in ("dev", "valid", "val"):
        assert load(str(folder), alias).examples == EXAMPLES[1:2]
        assert load(str(folder), alias).split == "validation"


@pytest.mark.parametrize("stem", ["validation", "dev", "valid", "val"])
def test_validation_files_go_by_several_names(tmp_path, stem):
    written(tmp_path / f"{stem}.tsv", separated(ROWS, "\t"))
    assert load(str(tmp_path), "validation").examples == EXAMPLES


def test_a_split_may_have_a_name_of_its_own(folder):
    written(folder / "test_hard.jsonl", json_lines(ROWS))
    assert split_names(str(folder)) == ["train", "validation", "test", "test_hard"]
    assert load(str(folder), "test_hard").examples == EXAMPLES


def test_a_folder_lists_its_splits_when_another_is_asked_for(tmp_path, folder):
    (folder / "dev.csv").unlink()
    with pytest.raises(FileNotFoundError, match=r"set has no split 'validation'; its splits are \['test', 'train'\]"):
        load(str(folder), "validation")
    written(tmp_path / "empty" / "notes.txt", "")
    with pytest.raises(
        FileNotFoundError, match=r"empty has no data files. Expected names like train.jsonl.*contains notes.txt"
    ):
        load(str(tmp_path / "empty"), "train")


def test_a_split_in_two_files_is_ambiguous(folder):
    written(folder / "train.csv", separated(ROWS))
    with pytest.raises(
        ValueError, match=r"expected one file for the split 'train' of .*, got \['train.csv', 'train.jsonl'\]"
    ):
        load(str(folder), "train")


def test_numbered_parts_make_one_split(tmp_path):
    for number, row in enumerate(ROWS):
        written(tmp_path / f"train-0000{number}-of-00003.jsonl", json_lines([row]))
    assert load(str(tmp_path), "train").examples == EXAMPLES
    (tmp_path / "train-00001-of-00003.jsonl").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"the split 'train' of .* is incomplete: it has only the parts \['train-00000"
    ):
        load(str(tmp_path), "train")
    (tmp_path / "train-00002-of-00003.jsonl").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"is incomplete: it has only the parts \['train-00000-of-00003.jsonl'\]"
    ):
        load(str(tmp_path), "train")
    assert load(str(tmp_path / "train-00000-of-00003.jsonl"), "train").examples == EXAMPLES[:1]


def test_a_single_file_is_the_training_split(tmp_path):
    name = written(tmp_path / "mine.csv", separated(ROWS))
    assert split_names(name) == ["train"]
    with pytest.raises(
        ValueError,
        match=r"mine.csv is a single file, so it has no split 'test', only 'train' and what.*train=.*mine.csv,test=FILE",
    ):
        load(name, "test")


def test_splits_may_be_given_file_by_file(tmp_path):
    files = {"train": ".jsonl", "val": ".csv", "test": ".parquet"}
    name = ", ".join(
        f"{split}={written(tmp_path / f'{split}{kind}', WRITERS[kind](ROWS))}" for split, kind in files.items()
    )
    assert split_names(name) == ["train", "validation", "test"]
    assert {load(name, split).fingerprint for split in ("train", "dev", "test")} == {
        examples_room.fingerprint(EXAMPLES)
    }


def test_files_given_split_by_split_are_checked(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected train=FILE,validation=FILE,test=FILE, got 'train=a.csv,b.csv': 'b.csv' is no"
    ):
        load("train=a.csv,b.csv", "train")
    with pytest.raises(ValueError, match=r"one file for each split, got 'validation' twice"):
        load("val=a.csv,dev=b.csv", "train")
    with pytest.raises(FileNotFoundError, match=r"has no split 'test'; its splits are \['train'\]"):
        load("train=a.csv", "test")
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*absent.csv"):
        load(f"train={tmp_path / 'absent.csv'}", "train")


def test_an_equals_sign_in_a_file_name_is_harmless(tmp_path):
    assert load(written(tmp_path / "a=b.csv", separated(ROWS)), "train").examples == EXAMPLES


def test_an_absent_file_names_what_is_near(tmp_path):
    written(tmp_path / "reviews.jsonl", GOOD)
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*review.jsonl. Did you mean reviews.jsonl"):
        load(str(tmp_path / "review.jsonl"), "train")
    with pytest.raises(
        FileNotFoundError, match=r"no such file or folder: .*zzz. The folder .* contains reviews.jsonl\."
    ):
        load(str(tmp_path / "zzz"), "train")
    with pytest.raises(
        FileNotFoundError, match=r"no such file or folder: .*mine.csv. The folder .* contains reviews.jsonl\."
    ):
        load(str(tmp_path / "sub" / "sub" / "mine.csv"), "train")
    for number in range(12):
        written(tmp_path / "many" / f"{number:02}", "")
    with pytest.raises(FileNotFoundError, match=r"contains 00, 01, .*, 09 and 2 more\."):
        load(str(tmp_path / "many" / "zzz.csv"), "train")


@pytest.mark.parametrize("name", ["data/mine.csv", "./mine", "../mine", "~/mine"])
def test_a_relative_path_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*mine"):
        load(name, "train")


def test_a_file_at_home_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "mine.csv", separated(ROWS))
    assert load("~/mine.csv", "train").examples == load("train=~/mine.csv", "train").examples == EXAMPLES


def test_an_empty_folder_is_said_to_be_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"the folder .* is empty"):
        load(str(tmp_path), "train")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("xsun", "Did you mean 'xsum'?"),
        ("newswires", "Did you mean 'newswire'?"),
        ("qqq", "Known names are newswire, cnn_dailymail"),
    ],
)
def test_an_unknown_name_is_corrected(name, said):
    with pytest.raises(ValueError, match=rf"unknown data set '{name}'.*") as caught:
        load(name, "train")
    assert said in str(caught.value)
    assert ("Did you mean" in str(caught.value)) == ("Did you mean" in said)


def test_wrong_options_are_told(tmp_path):
    name = written(tmp_path / "mine.jsonl", GOOD)
    with pytest.raises(ValueError, match="on_bad_row must be 'error' or 'skip', got 'ignore'"):
        load(name, "train", on_bad_row="ignore")
    with pytest.raises(ValueError, match=r"limit must be 0 \(all rows\) or more, got -1"):
        load(name, "train", limit=-1)


# ── the hub and the built-in corpus ──────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: what is asked of it is kept, and what it answers is set by the test."""
    stand_in = types.ModuleType("datasets")
    stand_in.asked, stand_in.answer = [], ROWS

    def answer(*asked, **options):
        stand_in.asked.append((*asked, *options.values()))
        if isinstance(stand_in.answer, Exception):
            raise stand_in.answer
        return stand_in.answer

    stand_in.load_dataset = stand_in.get_dataset_split_names = answer
    monkeypatch.setitem(sys.modules, "datasets", stand_in)
    return stand_in


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("cnndm", ("abisee/cnn_dailymail", "3.0.0", "test")),
        ("cnn_dailymail", ("abisee/cnn_dailymail", "3.0.0", "test")),
        ("abisee/cnn_dailymail", ("abisee/cnn_dailymail", "3.0.0", "test")),
        ("abisee/cnn_dailymail:1.0.0", ("abisee/cnn_dailymail", "1.0.0", "test")),
        ("xsum", ("EdinburghNLP/xsum", None, "test")),
        ("samsum", ("knkarthick/samsum", None, "test")),
        ("dialogsum", ("knkarthick/dialogsum", None, "test")),
        ("some-one/set_1.0:en", ("some-one/set_1.0", "en", "test")),
    ],
)
def test_names_of_the_hub_are_asked_for_with_their_config(hub, name, asked):
    known = origin(name)
    hub.answer = [{"id": "1", known.source or "document": "a", known.target or "summary": "b"}]
    assert load(name, "test").examples == [Example("1", "a", "b")]
    assert hub.asked == [asked]


def test_the_hubs_splits_come_training_first(hub):
    hub.answer = ["test", "train", "unsupervised", "validation"]
    assert split_names("xsum") == ["train", "validation", "test", "unsupervised"]
    assert hub.asked == [("EdinburghNLP/xsum", None)]


def test_known_columns_give_way_to_given_ones(hub):
    hub.answer = [{"id": "1", "dialogue": "a", "summary": "b", "topic": "c"}]
    assert load("dialogsum", "test", target="topic").examples == [Example("1", "a", "c")]


def test_bad_rows_of_the_hub_are_named_by_their_number(hub):
    hub.answer = [*ROWS, {"id": "d", "document": "", "summary": "b"}]
    with pytest.raises(ValueError, match=r"\n  EdinburghNLP/xsum/train:4: 'document' is empty"):
        load("xsum", "train")


def test_a_data_set_of_the_real_library_is_read(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: datasets.Dataset.from_list(ROWS))
    assert load("xsum", "train").examples == EXAMPLES


@pytest.mark.parametrize("name", ["xsum", "nobody/nothing"])
def test_an_unreachable_hub_points_to_local_files(hub, name):
    hub.answer = ConnectionError("Couldn't reach it on the Hub (LocalEntryNotFoundError)\nand more")
    for attempt in (lambda: load(name, "test"), lambda: split_names(name)):
        with pytest.raises(
            FileNotFoundError, match=rf"cannot load '{name}': tried the data set .*/.* on the Hugging Face hub"
        ) as caught:
            attempt()
        said = str(caught.value)
        assert "(ConnectionError: Couldn't reach it on the Hub (LocalEntryNotFoundError))" in said
        assert f"there is no local file or folder '{name}'" in said
        assert "You can use local files instead: give a file, a folder with train.jsonl" in said


def test_a_local_folder_of_a_known_name_is_pointed_out(hub, tmp_path, monkeypatch):
    written(tmp_path / "xsum" / "train.jsonl", json_lines(ROWS))
    monkeypatch.chdir(tmp_path)
    hub.answer = ConnectionError("no network")
    with pytest.raises(FileNotFoundError, match=r"for the local folder xsum, write ./xsum\.") as caught:
        load("xsum", "train")
    assert "no local" not in str(caught.value)
    assert load("./xsum", "train").examples == EXAMPLES


def test_a_split_that_the_hub_does_not_have_is_a_bad_value(hub):
    hub.answer = ValueError("Unknown split \"validation\". Should be one of ['train'].")
    with pytest.raises(
        ValueError,
        match=r"cannot load 'xsum'.*ValueError: Unknown split \"validation\". Should be one of \['train'\]\)",
    ):
        load("xsum", "validation")


def test_known_names_are_recognised_in_every_spelling():
    spellings = ["cnndm", "cnn_dailymail", "abisee/cnn_dailymail", "abisee/cnn_dailymail:3.0.0"]
    assert {canonical(name) for name in spellings} == {"cnn_dailymail"}
    assert canonical("abisee/cnn_dailymail:1.0.0") != "cnn_dailymail"
    assert origin("a/b:c") == Hub("a/b", "c")
    assert set(PAPER) <= set(KNOWN)


def test_newswire_is_made_here():
    newswire = pytest.importorskip("ngramloss.data.newswire")
    assert split_names("newswire") == ["train", "validation", "test"]
    found = load("newswire", "dev", limit=3)
    item = newswire.items("validation", 3)[0]
    assert len(found.examples) == 3
    assert found.examples[0] == Example(item.id, item.document, item.summary)
    assert found.fingerprint == load("newswire", "validation", limit=3).fingerprint
    with pytest.raises(
        ValueError, match=r"newswire has no split 'tset'; choose from \['train', 'validation', 'test'\]"
    ):
        load("newswire", "tset")


def test_no_more_of_newswire_is_made_than_is_asked_for(monkeypatch):
    newswire = pytest.importorskip("ngramloss.data.newswire")
    asked, items = [], newswire.items
    monkeypatch.setattr(newswire, "items", lambda split, count=None: asked.append((split, count)) or items(split, 4))
    load("newswire", "train", limit=2)
    load("newswire", "test")
    assert asked == [("train", 2), ("test", None)]


# ── sentences ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sentences_of_a_plain_text():
    text = "Dr. Smith paid $3.50 on Jan. 5. Did he?  Yes!\nA line\n\n\tends one. "
    assert sentences(text) == ["Dr. Smith paid $3.50 on Jan. 5.", "Did he?", "Yes!", "A line", "ends one."]
    assert sentences(text, "newline") == ["Dr. Smith paid $3.50 on Jan. 5. Did he?  Yes!", "A line", "ends one."]
    assert sentences("One.Two. 3.5 four", "period") == ["One.", "Two.", "3.", "5 four"]


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_a_text_without_words_has_no_sentences(splitter):
    assert sentences("", splitter) == sentences(" \n\t\u2028 ", splitter) == []


odd_text = st.text(
    st.sampled_from("aB1 .!?…\"'”’()[]{}|\\*+^$&#@,;:–—•\n\r\t\u2028\u00a0ß€∯ȸȹƪ☉☇☈☄☏☍☝♟☺ȠϟⅤ"), max_size=60
)
phrases = st.lists(
    st.sampled_from(
        [
            "Dr.",
            "U.S.",
            "e.g.",
            "a",
            "He said",
            '"No."',
            "'s",
            "1.",
            "(i)",
            "...",
            ". . .",
            "http://a.b/c?d",
            "??",
            "&ᓰ&",
            "p.m.",
            "\n",
            "No.",
            "Yes!",
            "–",
            "3.5",
        ]
    ),
    max_size=14,
).map(" ".join)


@settings(max_examples=150, deadline=None)
@given(st.one_of(odd_text, phrases, st.text(max_size=40)), st.sampled_from(list(SPLITTERS)))
@example("This is it. This is it. This is it.", "pysbd")
@example("a ∯ b. c", "pysbd")
@example("He said (it. Was. So", "pysbd")
@example("No. \ud800 Yes.", "sentencex")
@example('so. "\x85" No', "sentencex")
def test_no_splitter_loses_or_moves_a_character(text, splitter):
    found = sentences(text, splitter)
    assert solid("".join(found)) == solid(text)
    assert all(piece == piece.strip() != "" for piece in found)


@pytest.mark.parametrize("segment", [lambda line: [line[:5]], lambda line: [line, line], lambda line: 1 / 0])
def test_a_line_that_pysbd_spoils_is_split_at_endings(segment, monkeypatch):
    stand_in = types.ModuleType("pysbd")
    stand_in.Segmenter = lambda **_: types.SimpleNamespace(segment=segment)
    monkeypatch.setitem(sys.modules, "pysbd", stand_in)
    assert sentences('One. "Two!" Three 3.5? (Four.) five') == ["One.", '"Two!"', "Three 3.5?", "(Four.)", "five"]


def test_wrong_splitters_and_languages_are_told():
    with pytest.raises(
        ValueError, match=r"unknown splitter 'nltk'; choose from \['sentencex', 'pysbd', 'newline', 'period'\]"
    ):
        sentences("A.", "nltk")
    with pytest.raises(ValueError, match="the language must be auto or a code of two letters such as de, got 'German'"):
        sentences("A.", language="German")
    with pytest.raises(ValueError, match="processes must be 1 or more, or None for all processors, got 0"):
        split_many(["A."], processes=0)
    with pytest.raises(ValueError, match="unknown splitter 'nltk'"):
        split_many([], "nltk")


@pytest.mark.parametrize("splitter", ["sentencex", "pysbd"])
def test_another_language_has_rules_of_its_own(splitter):
    text = "Er kam am 5. Januar z.B. nach Bonn."
    assert sentences(text, splitter, language="de") == [text]
    assert len(sentences(text, splitter)) > 1


def test_sentencex_splits_a_plain_text_at_line_ends_and_by_its_rules():
    text = "Mr. Smith paid $3.50 in the U.S. on Jan. 5. Did he?  Yes!\nA line\n\n\tends one. "
    assert sentences(text, "sentencex") == [
        "Mr. Smith paid $3.50 in the U.S. on Jan. 5.",
        "Did he?",
        "Yes!",
        "A line",
        "ends one.",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            '"It did not work," Horner added. "We have not put on a show.',
            ['"It did not work," Horner added.', '"We have not put on a show.'],
        ),
        (
            'Adam: "I have seen 3 "when are you going?" Racist incidents here."',
            ['Adam: "I have seen 3 "when are you going?"', 'Racist incidents here."'],
        ),
        ("Nobody came.It rained.", ["Nobody came.", "It rained."]),
    ],
)
def test_quotes_stay_with_their_sentence(text, parts):
    assert sentences(text, "sentencex") == parts


@pytest.mark.parametrize(
    "segment", [lambda language, line: [line[:5]], lambda language, line: [line, line], lambda language, line: 1 / 0]
)
def test_a_line_that_sentencex_spoils_is_split_at_endings(segment, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencex", types.SimpleNamespace(segment=segment))
    assert sentences('One. "Two!" Three 3.5? (Four.) five', "sentencex") == [
        "One.",
        '"Two!"',
        "Three 3.5?",
        "(Four.)",
        "five",
    ]


def test_many_texts_are_split_alike_by_one_process_and_by_two():
    texts = [f"Mr. {number} came. He left." for number in range(sentences_room.IN_PROCESS + 5)]
    done = []
    found = split_many(texts, processes=2, progress=done.append)
    assert (
        found == split_many(texts, processes=1) == [[f"Mr. {number} came.", "He left."] for number in range(len(texts))]
    )
    assert len(done) > 1
    assert sum(done) == len(texts)


@pytest.mark.parametrize(
    ("count", "splitter", "processes", "workers"),
    [
        (199, "pysbd", 4, 1),
        (200, "pysbd", 4, 4),
        (200, "newline", 4, 1),
        (200, "sentencex", 4, 1),
        (200, "pysbd", None, 3),
        (200, "pysbd", 1, 1),
    ],
)
def test_processes_are_started_only_where_they_pay(count, splitter, processes, workers, monkeypatch):
    monkeypatch.setattr(sentences_room, "processors", lambda: 3)
    assert sentences_room._workers(count, splitter, processes) == workers


def test_a_process_starts_no_further_processes(monkeypatch):
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "someone")
    assert sentences_room._workers(1000, "pysbd", 4) == 1


def test_no_texts_make_no_sentences():
    assert split_many([]) == []


# ── statistics ───────────────────────────────────────────────────────────────────────────────────────────────────────

PAIRS = [
    Example(
        "1", "The cat sat on the mat. It's 3.5 o'clock.\nThe well-known cat slept.", "A cat sat on the mat.\nA cat sat."
    ),
    Example("2", "Nothing here. At all!", "Nothing HERE"),
    Example("3", "One.", "One."),
]


def test_standard_figures_by_hand():
    found = statistics(PAIRS)
    assert found.examples == 3
    assert found.source_words_total == (6 + 3 + 4) + 4 + 1  # … the mat | it's 3.5 o'clock | the well-known cat slept
    assert (found.source_sentences_total, found.target_sentences_total) == (3 + 2 + 1, 2 + 1 + 1)
    assert found.target_words_total == 9 + 2 + 1
    # "a cat" and "mat a" are new; "cat sat", "sat on", "on the", "the mat" are not. "a cat" comes twice, and so does "cat sat".
    assert found.with_bigrams == 2
    assert found.means["novel_bigrams"] == pytest.approx(100 * (2 / 6 + 0) / 2)
    assert found.means["novel_bigram_tokens"] == pytest.approx(100 * (3 / 8 + 0) / 2)
    assert found.means["novel_bigrams_pooled"] == pytest.approx(100 * 2 / 7)


def test_released_figures_by_hand():
    found = statistics(PAIRS, rules="released")
    assert found.source_words_total == 12 + 4 + 1  # "o'clock.\nThe" is one piece between spaces
    assert found.target_words_total == 8 + 2 + 1
    assert found.source_sentences_total == 5 + 2 + 2  # at 3.5 too, and an empty piece after the last full stop
    assert found.target_sentences_total == 2 + 1 + 1
    # A cat | cat sat | sat on | on the | the mat. | mat. A | A cat | cat sat. : new are A cat, mat. A, cat sat.
    assert found.means["novel_bigrams"] == pytest.approx(100 * (3 / 7 + 1) / 2)
    assert found.means["novel_bigram_tokens"] == pytest.approx(100 * (4 / 8 + 1) / 2)
    assert found.means["novel_bigrams_pooled"] == pytest.approx(100 * 4 / 8)


def test_summaries_too_short_for_a_bigram_have_no_share():
    found = statistics(PAIRS[2:])
    assert (found.means["novel_bigrams"], found.means["novel_bigram_tokens"], found.means["novel_bigrams_pooled"]) == (
        None,
        None,
        None,
    )
    assert found.record()["novel_bigrams"] is None
    assert "–" in table("mine", {"train": found})


words = st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_novel_bigrams_agree_with_the_definition(pairs):
    shares, tokens = [], []
    for source, target in pairs:
        old = [tuple(source[at : at + 2]) for at in range(len(source) - 1)]
        new = [tuple(target[at : at + 2]) for at in range(len(target) - 1)]
        if new:
            shares.append(len([bigram for bigram in set(new) if bigram not in old]) / len(set(new)))
            tokens.append(len([bigram for bigram in new if bigram not in old]) / len(new))
    found = statistics([Example("", " ".join(source), " ".join(target)) for source, target in pairs], rules="released")
    assert found.means["novel_bigrams"] == (pytest.approx(100 * sum(shares) / len(shares)) if shares else None)
    assert found.means["novel_bigram_tokens"] == (pytest.approx(100 * sum(tokens) / len(tokens)) if tokens else None)


@pytest.mark.parametrize("rules", ["standard", "released"])
def test_statistics_of_parts_add_up_to_those_of_the_whole(rules):
    parts = [statistics([pair], rules=rules) for pair in PAIRS]
    assert (parts[0] + parts[1] + parts[2]).record() == pytest.approx(statistics(PAIRS, rules=rules).record())


def test_composed_and_decomposed_letters_make_the_same_words():
    found = statistics([Example("1", "Caf\u00e9 NOIR here", "cafe\u0301 noir")])
    assert (found.means["target_words"], found.means["novel_bigrams"]) == (2, 0)


def test_statistics_refuse_what_they_cannot_count():
    with pytest.raises(ValueError, match="expected at least one example for statistics, got none"):
        statistics([])
    for attempt in (lambda: statistics(PAIRS, rules="own"), lambda: measurement("newswire", rules="own")):
        with pytest.raises(ValueError, match=r"unknown rules 'own'; choose from \['standard', 'released'\]"):
            attempt()


def test_a_table_stands_in_columns_with_its_definitions():
    found = statistics(PAIRS, rules="released")
    assert table("mine.csv", {"train": found, "test": found}, rules="released").splitlines()[:6] == [
        "mine.csv, released rules",
        "",
        "                 source        target        % novel bigrams",
        "split  examples  words  sents  words  sents  types  tokens  pooled",
        "train         3   5.67   3.00   3.67   1.33  71.43   75.00   50.00",
        "test          3   5.67   3.00   3.67   1.33  71.43   75.00   50.00",
    ]
    assert "all           6   5.67" in table("mine.csv", {"train": found, "test": found}, rules="released")
    assert "\nall" not in table("mine.csv", {"train": found})
    assert "len(text.split(' '))" in table("mine.csv", {"train": found}, rules="released")
    assert r"\w+" in table("mine.csv", {"train": found})


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("cnndm", "paper  287K/13K/11K  690.90  42.38  49.08   3.81  62.22"),
        ("EdinburghNLP/xsum", "paper  204K/11K/11K  431.07  19.77  23.26   1.00  88.13"),
    ],
)
def test_the_papers_own_figures_stand_beside_the_data_sets_it_used(name, row):
    found = statistics(PAIRS, rules="released")
    assert row in table(name, {"test": found}).splitlines()
    assert "paper: Table 1" in table(name, {"test": found})
    assert "\npaper" not in table("mine.csv", {"test": found})


def test_a_measurement_goes_over_the_splits_that_are_there(folder, shown):
    found = measurement(str(folder))
    assert list(found.statistics) == ["train", "validation", "test"]
    assert [figures.examples for figures in found.statistics.values()] == [1, 1, 3]
    counted = [row for row in shown if row[0].startswith("counting")]
    assert counted == [("counting train", 2, 2), ("counting validation", 2, 2), ("counting test", 6, 6)]
    assert list(measurement(str(folder), splits=["dev"], rules="released").statistics) == ["validation"]
    assert str(found) == table(str(folder), found.statistics)


def test_a_measurement_says_which_rows_it_is_of(folder):
    written(folder / "train.jsonl", json_lines(ROWS) + b"broken\n")
    with pytest.raises(ValueError, match=r"train.jsonl:4: malformed JSON"):
        measurement(str(folder), rules="released")
    found = measurement(
        str(folder), splits=["train"], rules="released", on_bad_row="skip", limit=0, source="summary", target="document"
    )
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    train = record["splits"]["train"]
    assert (record["rules"], train["examples"], len(train["skipped"])) == ("released", 3, 1)
    assert train["skipped"][0].endswith("train.jsonl:4: malformed JSON: Expecting value at column 1")
    assert train["source_words"] == pytest.approx((2 + 2 + 6) / 3)
    assert train["fingerprint"] == examples_room.fingerprint(
        [Example(row["id"], row["summary"], row["document"]) for row in ROWS]
    )
    assert measurement(str(folder), splits=["test"], rules="released", limit=2).statistics["test"].examples == 2


# ── real data ────────────────────────────────────────────────────────────────────────────────────────────────────────


def real(name):
    return str(data_folder(name))


@pytest.mark.parametrize(("name", "target"), [("xsum_test", "summary"), ("cnndm_test", "highlights")])
def test_a_folder_of_released_files_loads_by_the_name_of_a_file(name, target):
    rows = read_rows(STORIES / name, "documents_partial")
    assert load(str(STORIES / name), "documents_partial").examples == [
        Example(row["id"], row["document"], row[target]) for row in rows
    ]


def test_dialogsum_loads_whole():
    name = real("dialogsum")
    assert {split: len(load(name, split).examples) for split in split_names(name)} == {
        "train": 12460,
        "validation": 500,
        "test": 500,
    }
    assert load(name, "train", limit=1).examples[0].id == "train_0"
    found = measurement(name, splits=["test"], rules="released").statistics["test"]
    assert (round(found.means["source_words"], 2), round(found.means["novel_bigrams"], 2)) == (126.96, 84.49)


def test_multi30k_loads_whole():
    name = real("multi30k_en_de")
    assert {split: len(load(name, split).examples) for split in split_names(name)} == {
        "train": 29000,
        "validation": 1014,
        "test": 1000,
    }
    assert load(name, "test").examples[0] == (
        "1",
        "A man in an orange hat starring at something.",
        "Ein Mann mit einem orangefarbenen Hut, der etwas anstarrt.",
        (),
    )


@pytest.mark.parametrize(("name", "known"), [("xsum_test", "xsum"), ("cnndm_test", "cnn_dailymail")])
def test_the_released_rules_come_near_the_papers_novel_bigrams(name, known):
    found = measurement(real(name), splits=["documents_partial"], rules="released").statistics["documents_partial"]
    assert found.means["novel_bigrams"] == pytest.approx(PAPER[known][-1], abs=0.6)  # a part of the test set alone


def test_real_dialogues_lose_nothing_in_splitting():
    for entry in load(real("dialogsum"), "validation", limit=100).examples:
        assert solid("".join(sentences(entry.source))) == solid(entry.source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "sentences_of_it"),
    [("It rained on the mat, Dr. Who said. " * 6_000, 6_000), ("word " * 40_000, None), ("x" * 200_000, None)],
)
def test_a_line_of_200_000_characters_is_split_in_time_and_loses_nothing(text, sentences_of_it):
    from ngramloss.data.sentences import sentences

    found = sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    if sentences_of_it:
        assert len(found) == sentences_of_it
