"""ngramloss score: files in, figures out, and a sentence for whatever does not fit together."""

import bz2
import gzip
import json
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from released_data import STORIES, data_folder, read_rows, xsum_reference

from ngramloss import cli
from ngramloss.cli import score as score_verb
from ngramloss.data import newswire
from ngramloss.data.sentences import sentences
from ngramloss.metrics.newswire_facts import facts
from ngramloss.metrics.overlap import bleu, chrf
from ngramloss.metrics.registry import Score, checked_options, scores_of
from ngramloss.metrics.rouge import NAMES, PARTS, rouge
from ngramloss.metrics.scores import fingerprint
from ngramloss.metrics.shape import fragments, shape
from ngramloss.scoring import results, scored_texts
from ngramloss.scoring.texts import read_texts
from ngramloss.settings import Setting
from ngramloss.version import __version__

REFERENCES = {"a": "the cat sat on the mat", "b": "it rained all day", "c": "prices rose by three per cent"}
GOOD = {"a": "the cat sat on a mat", "b": "it rained all day", "c": "prices rose three per cent"}
BAD = {"a": "a dog", "b": "", "c": "prices fell"}


def write(path, texts, field):
    path.write_text("".join(json.dumps({"id": key, field: text}) + "\n" for key, text in texts.items()))
    return path


@pytest.fixture
def files(tmp_path):
    write(tmp_path / "refs.jsonl", REFERENCES, "reference")
    write(tmp_path / "good.jsonl", GOOD, "prediction")
    write(tmp_path / "bad.jsonl", dict(reversed(BAD.items())), "prediction")  # another order, the same ids
    write(tmp_path / "docs.jsonl", {**REFERENCES, "d": "not asked for"}, "document")
    return tmp_path


def score(folder, *arguments):
    return cli.main(["score", "--references", str(folder / "refs.jsonl"), *map(str, arguments)])


def test_one_document_has_no_interval_and_the_table_says_so(tmp_path, capsys):
    for count, said in ((1, "±0.00: there is one document"), (2, "± half of the 95% interval over documents")):
        for name, key in (("refs", "reference"), ("a", "prediction")):
            rows = [json.dumps({"id": number, key: f"the {'cat' * number} sat"}) + "\n" for number in range(count)]
            (tmp_path / f"{name}.jsonl").write_text("".join(rows))
        assert score(tmp_path, tmp_path / "a.jsonl") == 0
        assert said in capsys.readouterr().out


def test_one_document_makes_no_difference_significant_without_shuffles(tmp_path, capsys):
    for name, key, text in (
        ("refs", "reference", "a cat sat"),
        ("a", "prediction", "no"),
        ("b", "prediction", "a cat sat"),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": 1, key: text}) + "\n")
    assert score(tmp_path, tmp_path / "a.jsonl", tmp_path / "b.jsonl", "--shuffles", "0") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("b ")]
    assert "*" not in line


def test_a_column_of_what_was_generated_comes_before_a_summary(tmp_path, capsys):
    rows = [{"id": number, "summary": f"gold {number}", "generated": "other"} for number in range(3)]
    (tmp_path / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert score(tmp_path, tmp_path / "refs.jsonl") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("refs ")]
    assert "100.00" not in line


def test_systems_are_scored_and_compared(files, capsys):
    assert (
        score(
            files,
            files / "good.jsonl",
            files / "bad.jsonl",
            "--json",
            "--metrics",
            "rouge,bleu,chrf,shape",
            "--documents",
            files / "docs.jsonl",
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    good, bad = found["systems"]
    assert (good["name"], bad["name"]) == ("good", "bad")
    expected = rouge([[text] for text in REFERENCES.values()], list(GOOD.values())).values
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        assert good["scores"][name] == pytest.approx(sum(expected[name]) / 3)
        assert bad["against_first"][name]["difference"] == pytest.approx(bad["scores"][name] - good["scores"][name])
    assert good["scores"]["bleu"] == pytest.approx(
        sacrebleu.corpus_bleu(list(GOOD.values()), [list(REFERENCES.values())]).score
    )
    assert good["scores"]["chrf"] == pytest.approx(
        sacrebleu.corpus_chrf(list(GOOD.values()), [list(REFERENCES.values())]).score
    )
    assert {"novel2", "coverage", "density", "compression", "repeated3", "words"} <= good["scores"].keys()
    assert good["signature"]["rouge"].startswith("rouge|refs:1|stemmer:yes|lsum:newline|tokens:default|rouge_score_rs:")
    assert all(one.endswith(f"|ngramloss:{__version__}") for one in good["signature"].values())
    assert bad["audit"] == ["1 empty"]
    assert "against_first" not in good


def test_the_table_has_marks_signatures_and_oddities(files, capsys):
    assert score(files, files / "good.jsonl", files / "bad.jsonl") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["system", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert out.splitlines()[0].endswith("  rougeLsum")
    assert out.splitlines()[1].startswith("good    ")
    assert not any(line.endswith(" ") for line in out.splitlines()[:3]), "figures stand to the right"
    assert "bad: 1 empty" in out
    assert "rouge|refs:1" in out


def test_markdown_and_latex_are_tables(files, capsys):
    (files / "good.jsonl").rename(files / "my_good & new.jsonl")
    assert score(files, files / "my_good & new.jsonl", "--latex") == 0
    assert r"my\_good \& new & " in capsys.readouterr().out
    assert score(files, files / "my_good & new.jsonl", "--markdown") == 0
    assert "| system | rouge1 |" in capsys.readouterr().out
    (files / "my_good & new.jsonl").rename(files / "a|b*.jsonl")
    assert score(files, files / "a|b*.jsonl", "--markdown") == 0
    assert "| a\\|b\\* | " in capsys.readouterr().out


def test_every_documents_figures_can_be_kept(files, capsys):
    assert score(files, files / "good.jsonl", files / "bad.jsonl", "--per-document", files / "scores.jsonl") == 0
    rows = [json.loads(line) for line in (files / "scores.jsonl").read_text().splitlines()]
    assert [(row["system"], row["id"]) for row in rows] == [(name, key) for name in ("good", "bad") for key in "abc"]
    assert rows[1]["rouge1"] == 100.0


def test_compressed_and_plain_files_score_alike(files, capsys):
    with lzma.open(files / "packed.jsonl.xz", "wt") as file:
        file.write((files / "good.jsonl").read_text())
    (files / "lines.txt").write_text("\n".join(GOOD.values()))
    (files / "refs.txt").write_text("\n".join(REFERENCES.values()) + "\n")
    results = []
    for references, predictions in (
        ("refs.jsonl", "good.jsonl"),
        ("refs.jsonl", "packed.jsonl.xz"),
        ("refs.txt", "lines.txt"),
    ):
        assert cli.main(["score", "--references", str(files / references), str(files / predictions), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["systems"][0])
    assert [one["name"] for one in results] == ["good", "packed", "lines"]
    assert results[0]["scores"] == results[1]["scores"] == results[2]["scores"]


def test_empty_lines_at_the_end_are_told_of(files, capsys):
    (files / "refs.txt").write_text("a b\nc d\n")
    (files / "lines.txt").write_text("a b\nc d\n\n\n")
    assert cli.main(["score", "--references", str(files / "refs.txt"), str(files / "lines.txt")]) == 0
    assert "2 empty lines at the end were ignored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"id": "a", "prediction": "x"}\n', "must have the same ids. In wrong.jsonl: 2 missing"),
        ('{"id": "a", "prediction": "x"}\n', r"2 missing ('b', 'c')"),
        ('{"id": "a", "prediction": "x"}\n{"id": "a", "prediction": "y"}\n', "wrong.jsonl:2 repeats the id 'a'"),
        ("".join(f'{{"id": "{key}", "prediction": "x"}}\n' for key in "abcd"), "1 extra ('d')"),
        ('{"id": "a", "prediction": \n', "wrong.jsonl:1: malformed JSON: Expecting value at column 27"),
        (
            '{"id": "a", "text": "x"}\n',
            "wrong.jsonl:1 has no prediction. Its columns are id, text; expected prediction or predictions or",
        ),
        ('{"id": "a", "prediction": 3}\n', "prediction should be text, got int"),
        ('["a", 1]\n', "wrong.jsonl:2: expected a JSON object, got int"),
        ('[\n{"id": "a"}]\n', "wrong.jsonl:1 has no prediction. Its columns are id;"),
        (
            '{"prediction": "x"}\n{"id": "b", "prediction": "x"}\n',
            "wrong.jsonl:1: the id should be text or a number, got null",
        ),
        ("", "is empty"),
        ('{"prediction": "x"}\n', "has no ids and"),
        (
            "[" * 100_000 + "\n",
            "wrong.jsonl starts as a JSON list but cannot be read to its end: maximum recursion depth",
        ),
        ('{"id": ' + "9" * 5000 + "}\n", "wrong.jsonl:1: malformed JSON: Exceeds the limit (4300 digits)"),
        ('{"id": null, "prediction": "x"}\n', "wrong.jsonl:1: the id should be text or a number, got null"),
        ('{"id": true, "prediction": "x"}\n', "wrong.jsonl:1: the id should be text or a number, got true"),
        ('{"id": "a", "prediction": "\x01"}\n', "malformed JSON: Invalid control character at at column 28."),
        ('{"id": "a", "prediction": NaN}\n', "prediction should be text, got float"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(files, capsys, content, sentence):
    (files / "wrong.jsonl").write_text(content)
    assert score(files, files / "wrong.jsonl") == 2
    assert sentence in capsys.readouterr().err


def test_files_that_cannot_be_read_get_a_sentence(files, capsys):
    (files / "latin.jsonl").write_bytes('{"id": "a", "prediction": "caf\xe9"}'.encode("latin-1"))
    (files / "cut.jsonl.xz").write_bytes(lzma.compress(b"x" * 10_000)[:-20])
    (files / "cut.jsonl.bz2").write_bytes(bz2.compress(b"x" * 10_000)[:-20])
    packed = bytearray(gzip.compress(bytes(range(256)) * 9))
    packed[12:20] = b"\xff" * 8
    (files / "damaged.jsonl.gz").write_bytes(packed)
    (files / "no.jsonl.gz").write_bytes(b"plain")
    (files / "no.jsonl.bz2").write_bytes(b"plain")
    (files / "nothing.txt").write_text("")
    (files / "folder").mkdir()
    for name, sentence in (
        ("latin.jsonl", "latin.jsonl:1 is not UTF-8 text. Save the file as UTF-8."),
        ("cut.jsonl.xz", "is truncated or damaged"),
        ("cut.jsonl.bz2", "bz2 is truncated or damaged"),
        ("damaged.jsonl.gz", "gz is truncated or damaged"),
        ("no.jsonl.gz", "no.jsonl.gz is truncated or damaged"),
        ("no.jsonl.bz2", "no.jsonl.bz2 is truncated or damaged"),
        ("folder", "no predictions in"),
        ("nowhere.jsonl", "no such file or folder: "),
        ("nothing.txt", "nothing.txt is empty"),
        ("x" * 300, "File name too long"),
    ):
        assert score(files, files / name) in (1, 2)
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="nothing to score"):
        scored_texts.align(files / "refs.jsonl", [])
    (files / "good.txt").write_text("x")
    with pytest.raises(ValueError, match=r"two systems are called '.*/good'\. Rename a file\."):
        scored_texts.align(files / "refs.jsonl", [files / "good.jsonl", files / "good.txt"])


def test_a_file_named_twice_is_said_to_be_the_same(files, capsys):
    (files / "link.jsonl").symlink_to(files / "good.jsonl")
    for twice in ("good.jsonl", "link.jsonl", "../" + files.name + "/good.jsonl"):
        assert score(files, files / "good.jsonl", files / "bad.jsonl", files / twice) == 2
        assert f"good.jsonl and {files / twice} are the same file. Give each system once." in capsys.readouterr().err


def test_a_link_is_called_by_its_own_name_and_a_circle_of_links_is_no_file(files, capsys):
    (files / "best.jsonl").symlink_to(files / "good.jsonl")
    assert scored_texts.align(files / "refs.jsonl", [files / "best.jsonl"]).names == ["best"]
    (files / "circle.jsonl").symlink_to(files / "circle.jsonl")
    assert score(files, files / "circle.jsonl") == 2
    assert "no such file or folder: " in capsys.readouterr().err


def test_only_the_ending_is_no_part_of_a_name(files):
    names = ["bart.v1.jsonl", "bart.v2.jsonl", "x-0.5.JSONL.GZ"]
    for name in names[:2]:
        (files / name).write_text((files / "good.jsonl").read_text())
    (files / names[2]).write_bytes(gzip.compress((files / "good.jsonl").read_bytes()))
    assert scored_texts.align(files / "refs.jsonl", [files / name for name in names]).names == [
        "bart.v1",
        "bart.v2",
        "x-0.5",
    ]


def test_names_that_cannot_be_shown_are_escaped(files, capsys):
    odd = [
        files / "a\n\x1b[31mb.jsonl",
        Path(os.fsdecode(os.fsencode(files / "caf") + b"\xe9.jsonl")),
        files / "café.jsonl",
    ]
    for path in odd:
        path.write_text((files / "good.jsonl").read_text())
    assert score(files, *odd, "--json") == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["systems"]] == [
        r"a\n\x1b[31mb",
        r"caf\udce9",
        "café",
    ]


def test_seed_samples_and_shuffles_reach_the_tests(files, capsys):
    found = []
    for arguments in ([], ["--seed", "1"], ["--samples", "7"], ["--shuffles", "3"]):
        assert score(files, files / "good.jsonl", files / "bad.jsonl", "--json", *arguments) == 0
        bad = json.loads(capsys.readouterr().out)["systems"][1]
        found.append((bad["intervals"]["rouge1"], bad["against_first"]["rouge1"]["p_randomisation"]))
    assert found[0] != found[1]
    assert found[0][0] != found[2][0]
    assert found[3][1] in (0.25, 0.5, 0.75, 1.0)  # of three shuffles and the observation


def test_lines_that_cannot_be_aligned_are_refused(files, capsys):
    (files / "refs.txt").write_text("a b\nc d\n")
    (files / "lines.txt").write_text("a b\nc d\ne f\n")
    assert cli.main(["score", "--references", str(files / "refs.txt"), str(files / "lines.txt")]) == 2
    assert "has 3 lines and" in (err := capsys.readouterr().err)
    assert "a text may contain line breaks" in err


def test_hostile_texts_are_texts(files, capsys):
    texts = {
        "a": "\x00\x1b[31m\u202e" + "x" * 1_000_000,
        "b": "</script>",
        "c": "\ud800".encode("utf-8", "replace").decode(),
    }
    write(files / "odd.jsonl", texts, "prediction")
    assert score(files, files / "odd.jsonl") == 0


def test_halves_of_characters_are_read_as_one_that_stands_for_them(files, capsys):
    (files / "cut.jsonl").write_text("".join(f'{{"id": "{key}", "prediction": "it \\ud83d"}}\n' for key in REFERENCES))
    found = scored_texts.align(files / "refs.jsonl", [files / "cut.jsonl"])
    assert found.texts == [["it \ufffd"] * 3]
    assert score(files, files / "cut.jsonl", "--metrics", "rouge,bleu,chrf,shape") == 0


def test_blank_lines_between_rows_without_ids_are_no_rows(tmp_path):
    (tmp_path / "refs.jsonl").write_text('{"reference": "a"}\n{"reference": "b"}\n')
    (tmp_path / "p.jsonl").write_text('{"prediction": "a"}\n\n{"prediction": "b"}\n')
    assert scored_texts.align(tmp_path / "refs.jsonl", [tmp_path / "p.jsonl"]).texts == [["a", "b"]]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metrics", "rogue"], "unknown metric 'rogue'"),
        (["--metrics", " , "], "give at least one metric. Choose from rouge, bleu"),
        (
            ["--set", "bleu.tokenize=13a"],
            "--set takes METRIC.OPTION=VALUE for a metric in --metrics, got 'bleu.tokenize=13a'",
        ),
        (["--set", "rouge"], "--set takes METRIC.OPTION=VALUE"),
        (["--set", "rouge.stemmer"], "--set takes METRIC.OPTION=VALUE for a metric in --metrics, got 'rouge.stemmer'"),
        (["--set", "rouge.stemmer=no"], "rouge.stemmer: must be true or false, got 'no'"),
        (["--set", "rouge.stemmer=1"], "rouge.stemmer: must be true or false, got 1"),
        (
            ["--set", "rouge.tokens=2024"],
            "rouge.tokens: must be one of script, default, unicode, characters, auto, got '2024'",
        ),
        (
            ["--metrics", "bleu", "--set", "bleu.tokenize=14a"],
            "unknown tokenizer '14a' for BLEU; choose from auto, none, zh, 13a",
        ),
        (["--metrics", "chrf", "--set", "chrf.word_order=true"], "chrf.word_order: must be a whole number, got True"),
        (["--metrics", "chrf", "--set", "chrf.word_order=-1"], "chrf.word_order: must be at least 0, got -1"),
        (["--samples", "0"], "--samples must be 1 or more, got 0"),
        (
            ["--per-document", "nowhere/x.jsonl"],
            "cannot write nowhere/x.jsonl: there is no folder nowhere. Create it first.",
        ),
        (["--per-document", "."], ". is a folder; give the name of a file"),
    ],
)
def test_wrong_options_get_a_sentence(files, capsys, arguments, sentence):
    assert score(files, files / "good.jsonl", *arguments) == 2
    assert f"error: {sentence}" in capsys.readouterr().err


def test_options_are_checked_before_metrics_run(files, monkeypatch):
    monkeypatch.setattr(sys.modules["ngramloss.metrics.rouge"], "rouge", lambda *_, **__: pytest.fail("it ran"))
    assert score(files, files / "good.jsonl", "--shuffles", "-1") == 2


def test_spaces_between_metrics_do_not_matter(files, capsys):
    assert score(files, files / "good.jsonl", "--metrics", "rouge, chrf", "--set", "chrf.word_order=2", "--json") == 0
    found = json.loads(capsys.readouterr().out)["systems"][0]
    assert {"rouge1", "chrf"} <= found["scores"].keys()
    assert "nw:2" in found["signature"]["chrf"]


def test_precision_and_recall_of_rouge_come_on_request(files, capsys):
    assert score(files, files / "good.jsonl", "--set", "rouge.parts=true", "--json") == 0
    found = json.loads(capsys.readouterr().out)["systems"][0]
    assert list(found["scores"]) == [*NAMES, *PARTS]
    assert found["signature"]["rouge"] == rouge([["a"]], ["a"]).signature + f"|ngramloss:{__version__}", "F is the same"
    assert score(files, files / "good.jsonl", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)["systems"][0]["scores"]) == list(NAMES)
    assert scores_of("rouge")["rougeL_recall"] == Score(
        "R-L R", "recall of ROUGE-L: how much of the reference is in the prediction"
    )


def test_a_splitter_of_sentences_reaches_rouge(files, capsys):
    assert score(files, files / "good.jsonl", "--set", "rouge.sentences=period", "--json") == 0
    assert "|lsum:period|" in json.loads(capsys.readouterr().out)["systems"][0]["signature"]["rouge"]


def test_no_input_is_written_over(files, capsys):
    before = {path: path.read_text() for path in files.iterdir()}
    (files / "link.jsonl").symlink_to(files / "refs.jsonl")
    for name in ("good.jsonl", "refs.jsonl", "link.jsonl", "docs.jsonl"):
        assert (
            score(files, files / "good.jsonl", "--documents", files / "docs.jsonl", "--per-document", files / name) == 2
        )
        assert f"{files / name} is an input and would be overwritten. Choose another name." in capsys.readouterr().err
    assert {path: path.read_text() for path in before} == before


def test_a_tokenizer_of_sacrebleu_that_cannot_be_had_is_told_and_others_run(files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    assert score(files, files / "good.jsonl", "--metrics", "rouge,bleu", "--set", "bleu.tokenize=ja-mecab") == 0
    assert "bleu was left out: sacreBLEU's tokenizer ja-mecab cannot be loaded: " in capsys.readouterr().out


def test_without_shuffles_no_randomisation_is_spoken_of(files, capsys):
    assert score(files, files / "good.jsonl", files / "bad.jsonl", "--shuffles", "0") == 0
    out = capsys.readouterr().out
    assert "in the paired bootstrap alone." in out
    assert "randomisation" not in out


def test_a_terminal_without_some_characters_still_shows_the_figures(files):
    arguments = ["score", "--references", "refs.jsonl", "good.jsonl"]
    done = subprocess.run(
        [sys.executable, "-m", "ngramloss", *arguments],
        cwd=files,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert " ?0.00" in done.stdout or " ?" in done.stdout.splitlines()[1]


def test_two_enormous_texts_are_refused_with_a_sentence(monkeypatch):
    monkeypatch.setattr(sys.modules["ngramloss.metrics.rouge"], "LARGEST", 12)
    assert rouge([["a b c"]], ["a b c d"]).values["rouge1"][0] > 0
    with pytest.raises(
        ValueError,
        match=r"ROUGE-L of document 2 would need 0 GB: its reference has 3 words and the prediction 5\. Shorten one",
    ):
        rouge([["a"], ["x", "a b c"]], ["a", "a b c d e"])
    with pytest.raises(ValueError, match="has 4 words"):
        rouge([["abcd"]], ["abcd"], tokens="characters")


def test_long_documents_are_searched_for_copies_in_good_time():
    many = ["word", "another", "thing"] * 50_000
    assert fragments(many, many) == [150_000]
    assert fragments(many, ["word", "another", "x", "thing"]) == [2, 1]


@given(st.lists(st.sampled_from("ab"), max_size=12), st.lists(st.sampled_from("abc"), max_size=8))
def test_fragments_are_those_that_a_plain_search_finds(document, text):
    found, at = [], 0
    while at < len(text):
        ends = [
            end
            for end in range(at + 1, len(text) + 1)
            if any(document[place : place + end - at] == text[at:end] for place in range(len(document)))
        ]
        found += [max(ends) - at] if ends else []
        at = max(ends, default=at + 1)
    assert fragments(document, text) == found


@pytest.mark.slow
def test_ctrl_c_while_sentences_are_split_ends_at_once_with_a_word(files):
    texts = {
        str(place): "It rained in the old town. Dr. Who left the house at 9 a.m. and came back." * 9
        for place in range(3000)
    }
    write(files / "refs.jsonl", texts, "reference")
    write(files / "many.jsonl", texts, "prediction")
    arguments = ["score", "--references", "refs.jsonl", "many.jsonl", "--set", "rouge.sentences=pysbd"]
    with subprocess.Popen(
        [sys.executable, "-m", "ngramloss", *arguments],
        cwd=files,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as job:  # a shell's background jobs ignore it
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        if not children.exists():
            job.kill()
            pytest.skip("children of a process cannot be seen here")
        deadline = time.monotonic() + 60
        while len(children.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(0.3)
        os.killpg(job.pid, signal.SIGINT)  # others may still be starting: it is not lost
        said = job.communicate(timeout=60)[1]
        assert (job.returncode, "stopped.\n" in said) == (130, True), said  # one that was starting may complain


def test_a_figure_that_is_not_there_leaves_nothing_half_written(files, capsys):
    assert score(files, files / "nowhere.jsonl", "--per-document", files / "scores.jsonl") == 2
    assert not (files / "scores.jsonl").exists()


def test_a_metric_that_lacks_its_model_says_so_and_the_others_run(files, capsys):
    assert (
        score(
            files,
            files / "good.jsonl",
            "--metrics",
            "rouge,bertscore,wmd,summac,factcc",
            "--set",
            "wmd.vectors=nowhere.txt",
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "rouge1" in out
    assert "bertscore was left out: needs --set bertscore.model=…" in out
    assert "wmd was left out: " in out
    assert "nowhere.txt" in out
    assert "summac was left out: needs the documents. Give them with --documents FILE" in out
    assert score(files, files / "good.jsonl", "--metrics", "factcc", "--documents", files / "docs.jsonl") == 2
    printed = capsys.readouterr()
    assert "error: nothing was scored.\n  factcc: needs --set factcc.model=…" in printed.err
    assert printed.out == ""


def test_word_movers_distance_runs_from_the_command_line(files, capsys):
    words = sorted({word for texts in (REFERENCES, GOOD) for text in texts.values() for word in text.split()})
    (files / "vectors.txt").write_text("".join(f"{word} {place} {place % 3}\n" for place, word in enumerate(words)))
    assert (
        score(
            files, files / "good.jsonl", "--metrics", "wmd", "--set", f"wmd.vectors={files / 'vectors.txt'}", "--json"
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)["systems"][0]
    assert found["scores"]["wmd"] > 0
    assert found["scores"]["wmd_known"] == 100.0
    assert score(files, files / "good.jsonl", "--metrics", "wmd", "--set", f"wmd.vectors={files / 'vectors.txt'}") == 0
    distance, known = capsys.readouterr().out.splitlines()[1].split()[1::2]
    assert (distance, known) == (f"{found['scores']['wmd']:.3f}", "100.00"), "decimals are those of the registry"


def test_an_unknown_option_of_a_metric_is_told(files, capsys):
    assert score(files, files / "good.jsonl", "--set", "rouge.stem=false") == 2
    assert (
        "rouge.stem: unknown option. Did you mean 'stemmer'? rouge has stemmer, sentences, tokens, language, parts."
        in capsys.readouterr().err
    )


def test_progress_is_no_option_and_numbers_may_be_whole():
    with pytest.raises(
        ValueError, match=r"bertscore\.progress: unknown option. bertscore has model, layer, batch_size, device\."
    ):
        checked_options("bertscore", {"progress": True})
    assert isinstance(Setting(0.5).check("x.y", 2), float)
    with pytest.raises(ValueError, match=r"x\.y: must be a number, got 'a'"):
        Setting(0.5).check("x.y", "a")


def test_a_byte_order_mark_and_foreign_line_ends_are_no_text(tmp_path):
    (tmp_path / "refs.txt").write_bytes(b"\xef\xbb\xbfa b\r\nc\rd\xc2\x85e\r\n")
    (tmp_path / "p.txt").write_bytes(b"a b\nc d\n")
    assert scored_texts.align(tmp_path / "refs.txt", [tmp_path / "p.txt"]).task.references == [["a b"], ["c\rd\x85e"]]


def test_lines_and_ids_that_are_their_numbers_go_together(tmp_path):
    (tmp_path / "refs.txt").write_text("a\nb\n")
    write(tmp_path / "p.jsonl", {2: "two", 1: "one"}, "prediction")
    assert scored_texts.align(tmp_path / "refs.txt", [tmp_path / "p.jsonl"]).texts == [["one", "two"]]


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("highlights", "reference"),
        ("target", "reference"),
        ("summary", "reference"),
        ("hypothesis", "prediction"),
        ("output", "prediction"),
        ("summary", "prediction"),
        ("article", "document"),
        ("dialogue", "document"),
    ],
)
@pytest.mark.parametrize("ending", ["json", "ndjson", "jsonl.gz"])
def test_the_usual_names_of_fields_and_files_are_read(tmp_path, field, what, ending):
    path = tmp_path / f"x.{ending}"
    text = json.dumps({"id": "a", field: "some text"}) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
    assert read_texts(path, what) == ({"a": "some text"}, False)


def test_of_many_ids_the_first_are_named(files, capsys):
    write(files / "refs.jsonl", dict.fromkeys("abcdefgh", "x"), "reference")
    write(files / "p.jsonl", {"h": "x"}, "prediction")
    assert score(files, files / "p.jsonl") == 2
    assert "7 missing ('a', 'b', 'c', 'd', 'e', …)." in capsys.readouterr().err


def test_names_of_like_files_carry_their_folder(tmp_path):
    paths = [tmp_path / run / "predictions.jsonl" for run in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        write(path, GOOD, "prediction")
    found = scored_texts.align(write(tmp_path / "refs.jsonl", REFERENCES, "summary"), paths)
    assert found.names == ["one/predictions", "two/predictions"]


def test_several_references_take_the_best(tmp_path):
    path = tmp_path / "refs.jsonl"
    path.write_text(json.dumps({"id": "a", "references": ["something else", "the cat sat"]}) + "\n")
    found = scored_texts.align(path, [write(tmp_path / "p.jsonl", {"a": "the cat sat"}, "prediction")])
    assert results.score_systems(found, samples=2, shuffles=2).scores["rouge1"][0].value == 100.0


WORDS = "the cats cat running run runs Mr. Smith's 3.5% don't jumped jump jumping happiness, étude 今天 a_b co-op x1 — “so” ! ."


@pytest.mark.parametrize("stemmer", [True, False])
@pytest.mark.parametrize("splitter", ["newline", "pysbd"])
def test_any_texts_and_several_references_score_as_googles_package_scores_them(stemmer, splitter):
    from rouge_score.rouge_scorer import RougeScorer

    draw = random.Random(0)

    def text():
        return " ".join(draw.choices([*WORDS.split(), "\n"], k=draw.randint(0, 25))) + draw.choice(
            ["", "\n", ". It rained. It stopped!\nThen more."]
        )

    references, predictions = (
        [[text() for _ in range(draw.randint(1, 3))] for _ in range(60)],
        [text() for _ in range(60)],
    )
    found = rouge(references, predictions, stemmer=stemmer, sentences=splitter, parts=True)
    scorer = RougeScorer(list(NAMES), use_stemmer=stemmer)
    for place, (those, prediction) in enumerate(zip(references, predictions, strict=True)):
        whole = scorer.score_multi(those, prediction)
        split = scorer.score_multi(
            ["\n".join(sentences(one, splitter)) for one in those], "\n".join(sentences(prediction, splitter))
        )
        for name, values in found.values.items():
            measured, _, part = name.partition("_")
            expected = getattr((split if measured == "rougeLsum" else whole)[measured], part or "fmeasure")
            assert values[place] == pytest.approx(100 * expected, abs=1e-9), name
    assert list(found.values) == [*NAMES, *PARTS]
    assert list(rouge(references, predictions, stemmer=stemmer, sentences=splitter).values) == list(NAMES)
    assert found.signature.startswith(
        f"rouge|refs:var|rule:best-f|stemmer:{'yes' if stemmer else 'no'}|lsum:{splitter}|"
    )


def test_precision_and_recall_are_of_the_reference_with_the_best_f():
    found = rouge([["the cat sat on the mat today", "cat"]], ["the cat"], parts=True).values
    assert [found[f"rouge1{part}"][0] for part in ("_precision", "_recall", "")] == pytest.approx([50, 100, 200 / 3])
    assert [found[f"rouge2{part}"][0] for part in ("_precision", "_recall", "")] == pytest.approx(
        [100, 100 / 6, 200 / 7]
    )


def test_bleu_and_chrf_are_sacrebleus_with_several_references():
    references = [
        ["the cat sat on the mat", "a cat sat there"],
        ["it rained all day in town"],
        ["a", "b c", "prices rose by three"],
    ]
    predictions = ["a cat sat on the mat", "it rained all day", "prices rose three"]
    streams = [[those[place] if place < len(those) else None for those in references] for place in range(3)]
    for found, name, corpus, sentence in (
        (bleu(references, predictions), "bleu", sacrebleu.corpus_bleu, sacrebleu.sentence_bleu),
        (chrf(references, predictions), "chrf", sacrebleu.corpus_chrf, sacrebleu.sentence_chrf),
    ):
        assert float(found.pooled[name].combine(found.pooled[name].statistics.sum(0))) == pytest.approx(
            corpus(predictions, streams).score
        )
        assert found.values[name] == pytest.approx(
            [sentence(text, those).score for text, those in zip(predictions, references, strict=True)]
        )
        assert found.signature.startswith(f"{name}|nrefs:var|case:")


def test_a_fingerprint_is_of_names_and_contents_in_any_order(tmp_path):
    for place, name in enumerate(("b", "a")):
        (tmp_path / name).write_text(name)
        os.utime(tmp_path / name, (place, place))
    before = fingerprint([tmp_path / "a", tmp_path / "b"])
    assert fingerprint([tmp_path / "b", tmp_path / "a"]) == before
    os.utime(tmp_path / "a", (-5, -5))
    assert fingerprint([tmp_path / "a", tmp_path / "b"]) == before
    (tmp_path / "a").rename(tmp_path / "aa")
    assert fingerprint([tmp_path / "aa", tmp_path / "b"]) != before


def test_facts_are_those_of_the_built_in_corpus():
    items = newswire.items("test", 30)
    ids = [item.id for item in items]
    found = facts(ids, [item.summary for item in items])
    assert found.values == {"names_right": [100.0] * 30, "figures_right": [100.0] * 30}
    assert sum(facts(ids, [item.decoy for item in items]).values["figures_right"]) < 100 * 30 / 2
    assert facts(ids, [""] * 30).values["names_right"] == [0.0] * 30
    with pytest.raises(ValueError, match="facts works only on the built-in corpus newswire"):
        facts([ids[0], "a"], ["x", "y"])


def test_lsum_splits_at_newlines_unless_told_otherwise():
    reference, prediction = ["First it rained. Then the sun came out."], "Then the sun came out. First it rained."
    assert rouge([reference], [prediction]).values["rougeLsum"][0] == pytest.approx(
        rouge([reference], [prediction]).values["rougeL"][0]
    )
    split = rouge([reference], [prediction], sentences="pysbd")
    assert split.values["rougeLsum"][0] == 100.0
    assert "lsum:pysbd" in split.signature


def test_other_scripts_need_another_tokenizer():
    assert rouge([["今天 天气 很 好"]], ["今天 天气 很 好"], tokens="default").values["rouge1"] == [0.0]
    assert rouge([["今天天气很好"]], ["今天天气很好"], tokens="characters").values["rouge1"] == [100.0]
    assert rouge([["добрый день"]], ["добрый день"], tokens="unicode").values["rouge1"] == [100.0]
    assert rouge([["今天。很好。"]], ["今天。很好。"], tokens="characters", sentences="pysbd").values["rougeLsum"] == [
        100.0
    ]


def test_shape_counts_what_is_new_repeated_and_copied():
    found = shape(["the cat sat the cat sat x"], ["the cat sat on a mat"]).values
    assert found["words"] == [7.0]
    assert found["compression"] == [6 / 7]
    assert found["novel1"] == [25.0]
    assert found["novel2"] == [pytest.approx(100 * 2 / 4)]  # sat the, sat x
    assert found["novel3"] == [pytest.approx(100 * 3 / 4)]  # all but the cat sat
    assert found["novel4"] == [100.0]
    assert found["repeated3"] == [pytest.approx(100 * 1 / 5)]
    assert found["coverage"] == [pytest.approx(100 * 6 / 7)]
    assert found["density"] == [pytest.approx((9 + 9) / 7)]
    empty = shape([""], ["the cat"]).values
    assert all(value == [0.0] for name, value in empty.items() if name != "compression")


def test_fragments_take_the_longest_copy():
    assert fragments(["a", "b", "x", "a", "b", "c"], ["a", "b", "c"]) == [3]
    assert fragments([], ["a"]) == []


# The authors' released summaries

PAPER = {
    "xsum_test": {"originalCrossEntropy": (41.57, 18.65, 33.68), "234gram_matches": (41.70, 18.87, 33.97)},
    "cnndm_test": {"originalCrossEntropy": (43.20, 20.48, 40.35), "234gram_matches": (43.58, 20.80, 40.84)},
}


def released(folder):
    predictions = {"xsum_test": "authors_predictions_hf_order", "cnndm_test": "authors_predictions_segmented_hf_order"}[
        folder.name
    ]
    return read_rows(folder, "references_hf_order"), read_rows(folder, predictions)


@pytest.mark.parametrize("data", ["stories", "released"])
@pytest.mark.parametrize("name", PAPER)
def test_each_document_scores_as_googles_package_scores_it(name, data):
    from rouge_score.rouge_scorer import RougeScorer

    references, predictions = released(STORIES / name if data == "stories" else data_folder(name))
    rows = list(zip(references, predictions, strict=True))[:: 1 if data == "stories" else 60]
    gold = [xsum_reference(row) if name == "xsum_test" else row["highlights"] for row, _ in rows]
    for system in ("originalCrossEntropy", "BoN"):
        texts = [row[system] if isinstance(row[system], str) else "\n".join(row[system]) for _, row in rows]
        found = rouge([[one] for one in gold], texts).values
        scorer = RougeScorer(list(found), use_stemmer=True)
        for place, (one, text) in enumerate(zip(gold, texts, strict=True)):
            for figure, score in scorer.score(one, text).items():
                assert found[figure][place] == pytest.approx(100 * score.fmeasure, abs=1e-7), (figure, one, text)


@pytest.mark.parametrize("name", PAPER)
def test_the_released_summaries_score_as_published(name):
    references, predictions = released(data_folder(name))
    gold = [[xsum_reference(row) if name == "xsum_test" else row["highlights"]] for row in references]
    for system, (one, two, three) in PAPER[name].items():
        texts = [row[system] if isinstance(row[system], str) else "\n".join(row[system]) for row in predictions]
        found = rouge(gold, texts).values
        means = [sum(found[figure]) / len(gold) for figure in ("rouge1", "rouge2", "rougeLsum")]
        assert means == pytest.approx([one, two, three], abs=0.011)


@pytest.mark.slow
def test_the_examples_in_the_help_work_when_pasted(tmp_path):
    examples = score_verb.SCORE_EXAMPLES.partition("runs, after")[0].splitlines()[1:]
    program = f"ngramloss() {{ '{sys.executable}' -m ngramloss \"$@\"; }}\nset -e\n" + "\n".join(examples)
    done = subprocess.run(
        ["bash", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rouge1") >= 6
    assert "bertscore was left out" in done.stdout
