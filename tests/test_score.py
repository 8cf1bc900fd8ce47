"""ngramloss score: files in, figures out, and a sentence for whatever does not fit together."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sacrebleu

from ngramloss import cli, scoring, systems
from ngramloss.metrics.rouge import rouge
from ngramloss.metrics.shape import fragments, shape

DATA = Path(__file__).parents[2] / "shared" / "data"

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
    write(tmp_path / "bad.jsonl", dict(reversed(BAD.items())), "prediction")   # another order, the same ids
    write(tmp_path / "docs.jsonl", {**REFERENCES, "d": "not asked for"}, "document")
    return tmp_path


def score(folder, *arguments):
    return cli.main(["score", "--references", str(folder / "refs.jsonl"), *map(str, arguments)])


def test_systems_are_scored_and_compared(files, capsys):
    assert score(files, files / "good.jsonl", files / "bad.jsonl", "--json", "--metrics", "rouge,bleu,chrf,shape",
                 "--documents", files / "docs.jsonl") == 0
    found = json.loads(capsys.readouterr().out)
    good, bad = found["systems"]
    assert (good["name"], bad["name"]) == ("good", "bad")
    expected = rouge([[text] for text in REFERENCES.values()], list(GOOD.values())).values
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        assert good["scores"][name] == pytest.approx(sum(expected[name]) / 3)
        assert bad["against_first"][name]["difference"] == pytest.approx(bad["scores"][name] - good["scores"][name])
    assert good["scores"]["bleu"] == pytest.approx(sacrebleu.corpus_bleu(list(GOOD.values()), [list(REFERENCES.values())]).score)
    assert good["scores"]["chrf"] == pytest.approx(sacrebleu.corpus_chrf(list(GOOD.values()), [list(REFERENCES.values())]).score)
    assert {"novel2", "coverage", "density", "compression", "repeated3", "words"} <= good["scores"].keys()
    assert good["signature"]["rouge"].startswith("rouge|refs:1|stemmer:yes|lsum:newline|tokens:default|rouge_score_rs:")
    assert bad["audit"] == ["1 empty"]
    assert "against_first" not in good


def test_the_table_has_marks_signatures_and_oddities(files, capsys):
    assert score(files, files / "good.jsonl", files / "bad.jsonl") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["system", "rouge1", "rouge2", "rougeL", "rougeLsum"]
    assert "bad: 1 empty" in out
    assert "rouge|refs:1" in out


def test_markdown_and_latex_are_tables(files, capsys):
    (files / "good.jsonl").rename(files / "my_good & new.jsonl")
    assert score(files, files / "my_good & new.jsonl", "--latex") == 0
    assert r"my\_good \& new & " in capsys.readouterr().out
    assert score(files, files / "my_good & new.jsonl", "--markdown") == 0
    assert "| system | rouge1 |" in capsys.readouterr().out


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
    for references, predictions in (("refs.jsonl", "good.jsonl"), ("refs.jsonl", "packed.jsonl.xz"), ("refs.txt", "lines.txt")):
        assert cli.main(["score", "--references", str(files / references), str(files / predictions), "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out)["systems"][0])
    assert [one["name"] for one in results] == ["good", "packed", "lines"]
    assert results[0]["scores"] == results[1]["scores"] == results[2]["scores"]


def test_empty_lines_at_the_end_are_told_of(files, capsys):
    (files / "refs.txt").write_text("a b\nc d\n")
    (files / "lines.txt").write_text("a b\nc d\n\n\n")
    assert cli.main(["score", "--references", str(files / "refs.txt"), str(files / "lines.txt")]) == 0
    assert "2 empty lines at the end were left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('{"id": "a", "prediction": "x"}\n', "does not have the ids of"),
        ('{"id": "a", "prediction": "x"}\n', r"2 missing ('b', 'c')"),
        ('{"id": "a", "prediction": "x"}\n{"id": "a", "prediction": "y"}\n', "wrong.jsonl:2 repeats the id 'a'"),
        ("".join(f'{{"id": "{key}", "prediction": "x"}}\n' for key in "abcd"), "1 extra ('d')"),
        ('{"id": "a", "prediction": \n', "wrong.jsonl:1 is not JSON"),
        ('{"id": "a", "text": "x"}\n', "wrong.jsonl:1 has no prediction: it has id, text"),
        ('{"id": "a", "prediction": 3}\n', "prediction should be text, got int"),
        ('["a"]\n', "should be an object"),
        ('{"prediction": "x"}\n{"id": "b", "prediction": "x"}\n', "wrong.jsonl:2 has an id, unlike the lines before"),
        ("", "is empty"),
        ('{"prediction": "x"}\n', "has no ids and"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(files, capsys, content, sentence):
    (files / "wrong.jsonl").write_text(content)
    assert score(files, files / "wrong.jsonl") == 2
    assert sentence in capsys.readouterr().err


def test_files_that_cannot_be_read_get_a_sentence(files, capsys):
    (files / "latin.jsonl").write_bytes('{"id": "a", "prediction": "caf\xe9"}'.encode("latin-1"))
    (files / "cut.jsonl.xz").write_bytes(lzma.compress(b"x" * 10_000)[:-20])
    (files / "folder").mkdir()
    for name, sentence in (
        ("latin.jsonl", "is not UTF-8: byte 0xe9"), ("cut.jsonl.xz", "ends too early or is damaged"),
        ("folder", "no predictions in"), ("nowhere.jsonl", "there is no"),
    ):
        assert score(files, files / name) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ValueError, match="nothing to score"):
        systems.aligned(files / "refs.jsonl", [])
    with pytest.raises(ValueError, match="two systems are called"):
        systems.aligned(files / "refs.jsonl", [files / "good.jsonl", files / "good.jsonl"])


def test_seed_samples_and_shuffles_reach_the_tests(files, capsys):
    found = []
    for arguments in ([], ["--seed", "1"], ["--samples", "7"], ["--shuffles", "3"]):
        assert score(files, files / "good.jsonl", files / "bad.jsonl", "--json", *arguments) == 0
        bad = json.loads(capsys.readouterr().out)["systems"][1]
        found.append((bad["intervals"]["rouge1"], bad["against_first"]["rouge1"]["p_randomisation"]))
    assert found[0] != found[1]
    assert found[0][0] != found[2][0]
    assert found[3][1] in (0.25, 0.5, 0.75, 1.0)   # of three shuffles and the observation


def test_lines_that_cannot_be_aligned_are_refused(files, capsys):
    (files / "refs.txt").write_text("a b\nc d\n")
    (files / "lines.txt").write_text("a b\nc d\ne f\n")
    assert cli.main(["score", "--references", str(files / "refs.txt"), str(files / "lines.txt")]) == 2
    assert "has 3 lines and" in (err := capsys.readouterr().err)
    assert "a text may hold line ends of its own" in err


def test_hostile_texts_are_texts(files, capsys):
    texts = {"a": "\x00\x1b[31m\u202e" + "x" * 1_000_000, "b": "</script>", "c": "\ud800".encode("utf-8", "replace").decode()}
    write(files / "odd.jsonl", texts, "prediction")
    assert score(files, files / "odd.jsonl") == 0


@pytest.mark.parametrize("arguments", [["--metrics", "rogue"], ["--set", "bleu.tokenize=13a"], ["--set", "rouge"]])
def test_wrong_options_get_a_sentence(files, capsys, arguments):
    assert score(files, files / "good.jsonl", *arguments) == 2
    assert "error: " in capsys.readouterr().err


def test_a_figure_that_is_not_there_leaves_nothing_half_written(files, capsys):
    assert score(files, files / "nowhere.jsonl", "--per-document", files / "scores.jsonl") == 2
    assert not (files / "scores.jsonl").exists()


def test_a_metric_that_lacks_its_model_says_so_and_the_others_run(files, capsys):
    assert score(files, files / "good.jsonl", "--metrics", "rouge,bertscore,wmd,summac,factcc", "--set", "wmd.vectors=nowhere.txt") == 0
    out = capsys.readouterr().out
    assert "rouge1" in out
    assert "bertscore was left out: needs --set bertscore.model=…" in out
    assert "wmd was left out: " in out
    assert "nowhere.txt" in out
    assert "summac was left out: needs the documents: give them with --documents" in out
    assert score(files, files / "good.jsonl", "--metrics", "factcc", "--documents", files / "docs.jsonl") == 1
    assert "factcc was left out: needs --set factcc.model=…" in capsys.readouterr().out


def test_word_movers_distance_runs_from_the_command_line(files, capsys):
    words = sorted({word for texts in (REFERENCES, GOOD) for text in texts.values() for word in text.split()})
    (files / "vectors.txt").write_text("".join(f"{word} {place} {place % 3}\n" for place, word in enumerate(words)))
    assert score(files, files / "good.jsonl", "--metrics", "wmd", "--set", f"wmd.vectors={files / 'vectors.txt'}", "--json") == 0
    found = json.loads(capsys.readouterr().out)["systems"][0]
    assert found["scores"]["wmd"] > 0
    assert found["scores"]["wmd_known"] == 100.0


def test_an_unknown_option_of_a_metric_is_told(files, capsys):
    assert score(files, files / "good.jsonl", "--set", "rouge.stem=false") == 2
    assert "rouge has no option 'stem'; it has stemmer, sentences, tokenizer" in capsys.readouterr().err


def test_names_of_like_files_carry_their_folder(tmp_path):
    paths = [tmp_path / run / "predictions.jsonl" for run in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        write(path, GOOD, "prediction")
    found = systems.aligned(write(tmp_path / "refs.jsonl", REFERENCES, "summary"), paths)
    assert found.names == ["one/predictions", "two/predictions"]


def test_several_references_take_the_best(tmp_path):
    path = tmp_path / "refs.jsonl"
    path.write_text(json.dumps({"id": "a", "references": ["something else", "the cat sat"]}) + "\n")
    found = systems.aligned(path, [write(tmp_path / "p.jsonl", {"a": "the cat sat"}, "prediction")])
    assert scoring.scored(found, samples=2, shuffles=2).figures["rouge1"][0].value == 100.0


def test_lsum_splits_at_newlines_unless_told_otherwise():
    reference, prediction = ["First it rained. Then the sun came out."], "Then the sun came out. First it rained."
    assert rouge([reference], [prediction]).values["rougeLsum"][0] == pytest.approx(rouge([reference], [prediction]).values["rougeL"][0])
    split = rouge([reference], [prediction], sentences="pysbd")
    assert split.values["rougeLsum"][0] == 100.0
    assert "lsum:pysbd" in split.signature


def test_other_scripts_need_another_tokenizer():
    assert rouge([["今天 天气 很 好"]], ["今天 天气 很 好"]).values["rouge1"] == [0.0]
    assert rouge([["今天天气很好"]], ["今天天气很好"], tokenizer="characters").values["rouge1"] == [100.0]
    assert rouge([["добрый день"]], ["добрый день"], tokenizer="unicode").values["rouge1"] == [100.0]
    with pytest.raises(ValueError, match="unknown tokenizer 'chars' for ROUGE; choose from default, unicode, characters"):
        rouge([["a"]], ["a"], tokenizer="chars")


def test_shape_counts_what_is_new_repeated_and_copied():
    found = shape(["the cat sat the cat sat x"], ["the cat sat on a mat"]).values
    assert found["words"] == [7.0]
    assert found["compression"] == [6 / 7]
    assert found["novel1"] == [25.0]
    assert found["novel2"] == [pytest.approx(100 * 2 / 4)]   # sat the, sat x
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
    "xsum_test": {
        "originalCrossEntropy": (41.57, 18.65, 33.68), "234gram_matches": (41.70, 18.87, 33.97),
    },
    "cnndm_test": {
        "originalCrossEntropy": (43.20, 20.48, 40.35), "234gram_matches": (43.58, 20.80, 40.84),
    },
}


def released(name):
    folder = DATA / name
    if not folder.exists():
        pytest.skip(f"the data of {name} are not here")
    predictions = {"xsum_test": "authors_predictions_hf_order", "cnndm_test": "authors_predictions_segmented_hf_order"}[name]

    def rows(stem):
        with lzma.open(folder / f"{stem}.jsonl.xz", "rt") as file:
            return [json.loads(line) for line in file]

    return rows("references_hf_order"), rows(predictions)


def xsum_reference(row):
    if row["summary_cased"]:
        return row["summary_cased"]
    text = row["summary"]
    for before, after in ((" n't", "n't"), (" `` ", ' "'), ("`` ", '"'), (" '' ", '" '), ("can not", "cannot")):
        text = text.replace(before, after)
    return text


@pytest.mark.parametrize("name", PAPER)
def test_each_document_scores_as_googles_package_scores_it(name):
    from rouge_score.rouge_scorer import RougeScorer

    references, predictions = released(name)
    rows = list(zip(references, predictions, strict=True))[::60]
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
    references, predictions = released(name)
    gold = [[xsum_reference(row) if name == "xsum_test" else row["highlights"]] for row in references]
    for system, (one, two, three) in PAPER[name].items():
        texts = [row[system] if isinstance(row[system], str) else "\n".join(row[system]) for row in predictions]
        found = rouge(gold, texts).values
        means = [sum(found[figure]) / len(gold) for figure in ("rouge1", "rouge2", "rougeLsum")]
        assert means == pytest.approx([one, two, three], abs=0.011)


def test_the_examples_in_the_help_work_when_pasted(tmp_path):
    examples = cli.SCORE_EXAMPLES.partition("runs, after")[0].splitlines()[1:]
    program = f"ngramloss() {{ '{sys.executable}' -m ngramloss \"$@\"; }}\nset -e\n" + "\n".join(examples)
    done = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rouge1") >= 6
    assert "bertscore was left out" in done.stdout
