"""ngramloss import: summaries that others released, however they mark sentences, each with the id of its reference."""

import json
from collections import Counter

import pytest
import sacrebleu
import tiny_tokenizers
import torch
import transformers as hf
from released_data import STORIES, data_folder, read_rows, xsum_reference

from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.data.statistics import words_of
from ngramloss.metrics.overlap import bleu
from ngramloss.metrics.rouge import rouge
from ngramloss.metrics.shape import shape
from ngramloss.search.engines import hf as hf_engine
from ngramloss_systems import import_summaries

REFERENCES = {"a": "The cat sat.\nIt slept.", "b": "It rained (a lot) all day.", "c": "Prices don't fall."}


@pytest.fixture
def folder(tmp_path):
    rows = ({"id": key, "reference": text} for key, text in REFERENCES.items())
    (tmp_path / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def bring(folder, path, *arguments):
    """The exit code and what was written, by id."""
    out = folder / "system.jsonl"
    code = cli.main(
        ["import", str(path), "--references", str(folder / "refs.jsonl"), "-o", str(out), *map(str, arguments)]
    )
    return code, {
        row["id"]: row["prediction"] for row in map(json.loads, out.read_text().splitlines())
    } if out.exists() else None


def written(path, text):
    path.write_text(text)
    return path


# Marks


@pytest.mark.parametrize(
    ("line", "mark", "count"),
    [
        ("the cat sat .<q>it slept .", "<q>", 1),
        ("<t> the cat sat . </t> <t> it slept . </t>", "</t>", 2),
        ("the cat sat .<n>it slept .<n>", "<n>", 2),
        ("the cat sat . [X_SEP] it slept .", "[X_SEP]", 1),
        ("the cat sat . <S_SEP> it slept .", "<S_SEP>", 1),
        ("the cat sat . [SEP] it slept . [SEP]", "[SEP]", 2),
        (r"the cat sat .\nit slept .", r"\n", 1),
    ],
)
def test_known_marks_part_sentences_and_are_counted(folder, capsys, line, mark, count):
    code, found = bring(folder, written(folder / "system.txt", f"{line}\nsecond\nthird\n"))
    assert code == 0
    assert found == {"a": "the cat sat .\nit slept .", "b": "second", "c": "third"}
    told = capsys.readouterr()
    assert f"note: split sentences at {mark}, which occurs {count} times." in told.err
    assert told.out.strip() == str(folder / "system.jsonl")


def test_a_mark_that_is_named_is_the_only_one(folder, capsys):
    code, found = bring(
        folder,
        written(folder / "system.txt", "one || two <q> three %% four\nb\nc\n"),
        "--sentences",
        "||",
        "--sentences",
        "%%",
    )
    assert code == 0
    assert found["a"] == "one\ntwo <q> three\nfour"
    assert "<q>" not in capsys.readouterr().err


def test_no_mark_need_be_one(folder):
    assert bring(folder, written(folder / "system.txt", "a <n> b\nb\nc\n"), "--sentences", "none")[1]["a"] == "a <n> b"


# Whose summary is it?


def test_a_folder_has_a_file_for_each_document_in_the_order_of_their_numbers(folder):
    decoded = folder / "decoded"
    decoded.mkdir()
    for number, text in ((10, "third ."), (8, "first .\nand more ."), (9, "second .")):
        (decoded / f"{number}_decoded.txt").write_text(text)
    (decoded / ".DS_Store").write_text("no summary")
    assert bring(folder, decoded) == (0, {"a": "first .\nand more .", "b": "second .", "c": "third ."})


def test_an_order_of_ids_is_followed_and_the_references_order_is_written(folder):
    order = written(folder / "ids.txt", "c\na\nb\n")
    code, found = bring(folder, written(folder / "system.txt", "of c\nof a\nof b\n"), "--order", order)
    assert code == 0
    assert list(found.items()) == [("a", "of a"), ("b", "of b"), ("c", "of c")]


def test_released_references_tell_the_order_however_they_are_tokenised(folder, capsys):
    gold = written(
        folder / "gold.txt", "prices do n't fall .\nit rained -lrb- a lot -rrb- all day .\nthe cat sat .<q>it slept .\n"
    )
    code, found = bring(folder, written(folder / "system.txt", "of c\nof b\nof a\n"), "--gold", gold)
    assert code == 0
    assert found == {key: f"of {key}" for key in "abc"}


def test_references_of_one_text_come_in_the_order_of_the_file_and_those_unlike_go_to_the_nearest(tmp_path, capsys):
    texts = {str(number): f"report number {number} of many" for number in range(198)} | {
        "x": "the same",
        "y": "the same",
    }
    (tmp_path / "refs.jsonl").write_text(
        "".join(json.dumps({"id": key, "reference": text}) + "\n" for key, text in texts.items())
    )
    gold = list(texts.values())
    gold[7], gold[8] = "report number 8 of many now", "report no 8 of many"  # eight is taken when seven is looked for
    written(tmp_path / "gold.txt", "\n".join(reversed(gold)))
    written(tmp_path / "system.txt", "\n".join(f"{key} report of many" for key in reversed(texts)))
    code, found = bring(tmp_path, tmp_path / "system.txt", "--gold", tmp_path / "gold.txt")
    assert code == 0
    assert (found["7"], found["8"]) == ("7 report of many", "8 report of many")
    assert (found["x"], found["y"]) == ("y report of many", "x report of many")
    err = capsys.readouterr().err
    assert "2 released references differ from ours" in err
    assert "2 references have the same text as another" in err


def jsonl(path, column, texts):
    """A file with an id for each text, or with none where it is None."""
    rows = ({"id": key, column: text} if key else {column: text} for key, text in texts)
    return written(path, "".join(json.dumps(row) + "\n" for row in rows))


def test_summaries_belong_to_released_references_with_their_ids_whatever_the_order(folder, capsys):
    gold = jsonl(folder / "gold.jsonl", "reference", [(f"doc-{key}", REFERENCES[key]) for key in "bca"])
    system = jsonl(folder / "mine.jsonl", "prediction", [(f"doc-{key}", f"of {key}") for key in "cab"])
    assert bring(folder, system, "--gold", gold) == (0, {key: f"of {key}" for key in "abc"})
    assert f"note: summaries belong to the references of {gold} by their ids." in capsys.readouterr().err


@pytest.mark.parametrize("numbered", ["gold", "system"])
def test_ids_on_one_side_pair_summaries_and_released_references_by_row(folder, capsys, numbered):
    ids = {name: list("xyz") if name != numbered else [None] * 3 for name in ("gold", "system")}
    texts = [REFERENCES[key] for key in "bca"]
    gold = jsonl(folder / "gold.jsonl", "reference", zip(ids["gold"], texts, strict=True))
    system = jsonl(folder / "mine.jsonl", "prediction", zip(ids["system"], ["of b", "of c", "of a"], strict=True))
    assert bring(folder, system, "--gold", gold) == (0, {key: f"of {key}" for key in "abc"})
    assert f"{gold} by row: only one of the two files has ids." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ("abd", "must have the same ids. In mine.jsonl: 1 missing ('c'), 1 extra ('d'). To pair them by row, remove"),
        ("ab", "In mine.jsonl: 1 missing ('c')."),
        ("aba", "mine.jsonl:3 repeats the id 'a'."),
    ],
)
def test_an_id_that_one_side_lacks_or_repeats_is_named(folder, capsys, ids, sentence):
    gold = jsonl(folder / "gold.jsonl", "reference", REFERENCES.items())
    system = jsonl(folder / "mine.jsonl", "prediction", [(key, "text") for key in ids])
    assert bring(folder, system, "--gold", gold) == (2, None)
    assert sentence in capsys.readouterr().err


def test_released_references_in_a_file_of_several_columns_are_its_references(folder):
    rows = [{"id": key, "prediction": f"of {key}", "reference": REFERENCES[key]} for key in "cab"]
    both = written(folder / "both.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert bring(folder, both, "--gold", both) == (0, {key: f"of {key}" for key in "abc"})


def test_rows_with_ids_keep_them(folder):
    rows = "".join(json.dumps({"id": key, "prediction": f"of {key} [X_SEP] more"}) + "\n" for key in "cab")
    assert bring(folder, written(folder / "mine.jsonl", rows))[1] == {key: f"of {key}\nmore" for key in "abc"}


def test_references_without_ids_are_counted_and_can_be_scored(tmp_path, capsys):
    written(tmp_path / "refs.txt", "a b\nc d\n")
    out = tmp_path / "out.jsonl"
    assert (
        cli.main(
            [
                "import",
                str(written(tmp_path / "s.txt", "a b\nc x\n")),
                "--references",
                str(tmp_path / "refs.txt"),
                "-o",
                str(out),
            ]
        )
        == 0
    )
    assert cli.main(["score", "--references", str(tmp_path / "refs.txt"), str(out), "--json"]) == 0
    assert '"rouge1": 75.0' in capsys.readouterr().out


@pytest.mark.parametrize("count", [import_summaries.LOOKED_AT - 1, 30])
def test_an_order_that_looks_wrong_is_told_of_where_there_are_enough(tmp_path, capsys, count):
    texts = [f"city{number} river{number} on fire" for number in range(count)]
    written(
        tmp_path / "refs.jsonl",
        "".join(json.dumps({"id": number, "reference": text}) + "\n" for number, text in enumerate(texts)),
    )
    assert bring(tmp_path, written(tmp_path / "right.txt", "\n".join(texts)))[0] == 0
    assert "order" not in capsys.readouterr().err
    assert bring(tmp_path, written(tmp_path / "wrong.txt", "\n".join(texts[9:] + texts[:9])))[0] == 0
    told = (
        "the order looks wrong: a summary shares 50% of its words with its own reference and 50% with the next one."
        in capsys.readouterr().err
    )
    assert told == (count == 30)


def test_empty_summaries_and_empty_lines_at_the_end_are_told_of(folder, capsys):
    code, found = bring(folder, written(folder / "system.txt", "a\n<q>\nc\n\n\n"))
    assert (code, found["b"]) == (0, "")
    err = capsys.readouterr().err
    assert "1 summaries are empty ('b')" in err
    assert "2 empty lines at the end were ignored" in err


# What does not fit


@pytest.mark.parametrize(
    ("lines", "more", "sentence"),
    [
        ("a\nb\n", {}, "has 2 summaries and"),
        ("a\nb\nc\nd\n", {}, "or one sentence per line. Nothing was written."),
        ("a\nb\nc\n", {"--order": "a\nb\n"}, "has 3 summaries and"),
        ("a\nb\nc\n", {"--order": "a\nb\nd\n"}, "must have the same ids. In "),
        ("a\nb\nc\n", {"--order": "a\nb\nd\n"}, "1 missing ('c'), 1 extra ('d')"),
        ("a\nb\nc\n", {"--order": "a\nb\na\n"}, "repeats 1 ids ('a')"),
        ("a\nb\nc\n", {"--gold": "other\ntexts\nhere\n"}, "has 3 references, but only 0 are among the 3 of"),
        ("a\nb\nc\n", {"--gold": "The cat sat. It slept.\n"}, "give the ids with --order"),
    ],
)
def test_what_does_not_fit_gets_a_sentence_and_nothing_is_written(folder, capsys, lines, more, sentence):
    options = [word for name, text in more.items() for word in (name, written(folder / f"{name}.txt", text))]
    assert bring(folder, written(folder / "system.txt", lines), *options) == (2, None)
    assert sentence in capsys.readouterr().err
    assert not list(folder.glob("*.partial"))


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["notes.txt"], "has no number in its name"),
        (["1.txt", "01.txt"], "have the same number"),
        (["1.txt", "2.txt", "4.txt"], "lacks 1 numbers between 1 and 4, first 3"),
        ([], "has no files"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(folder, capsys, names, sentence):
    decoded = folder / "decoded"
    decoded.mkdir()
    for name in names:
        (decoded / name).write_text("x")
    assert bring(folder, decoded) == (2, None)
    assert sentence in capsys.readouterr().err


def test_no_input_is_written_over_and_a_place_to_write_must_be_there(folder, capsys):
    (folder / "system.txt").write_text("".join("a summary\n" for _ in (folder / "refs.jsonl").read_text().splitlines()))
    before = {path: path.read_text() for path in folder.iterdir() if path.is_file()}
    for out, sentence in (
        ("refs.jsonl", "is an input and would be overwritten"),
        ("system.txt", "is an input and would be overwritten"),
        ("nowhere/x.jsonl", "nowhere. Create it first."),
        (".", "is a folder; give the name of a file"),
    ):
        assert (
            cli.main(
                [
                    "import",
                    str(folder / "system.txt"),
                    "--references",
                    str(folder / "refs.jsonl"),
                    "-o",
                    str(folder / out),
                ]
            )
            == 2
        )
        assert sentence in capsys.readouterr().err
    assert {path: path.read_text() for path in folder.iterdir() if path.is_file()} == before


def test_released_references_of_another_test_set_are_refused(tmp_path):
    rows = [{"id": str(place), "reference": f"word{place} and more{place}"} for place in range(10)]
    (tmp_path / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gold = written(
        tmp_path / "gold.txt",
        "".join(f"{'other' if place < 2 else 'word'}{place} and more{place}\n" for place in range(10)),
    )
    with pytest.raises(ValueError, match="has 10 references, but only 8 are among the 10 of"):
        import_summaries.read_summaries(written(tmp_path / "s.txt", "x\n" * 10), tmp_path / "refs.jsonl", gold=gold)


def test_released_references_are_held_against_the_first_of_several(tmp_path):
    rows = [{"id": "a", "references": ["one two", "x"]}, {"id": "b", "references": ["three", "one two"]}]
    (tmp_path / "refs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = import_summaries.read_summaries(
        written(tmp_path / "s.txt", "for b\nfor a\n"),
        tmp_path / "refs.jsonl",
        gold=written(tmp_path / "gold.txt", "three\none two\n"),
    )
    assert (found.predictions, found.notes) == ({"a": "for a", "b": "for b"}, [])


def test_the_nearest_shares_most_of_both_texts_words():
    assert import_summaries._overlap({"a", "b"}, {"a", "b"}) > import_summaries._overlap(
        {"a", "b"}, {"a", "b", "c", "d"}
    )
    assert import_summaries._overlap(set(), set()) == 0


def test_spaces_and_blank_lines_are_no_ids_and_letters_stay_readable(folder):
    order = written(folder / "ids.txt", " c\n\nb \r\na\n\n")
    code, found = bring(folder, written(folder / "s.txt", "für c\nfür b\nfür a\n"), "--order", order)
    assert (code, found) == (0, {"a": "für a", "b": "für b", "c": "für c"})
    assert "für a" in (folder / "system.jsonl").read_text(encoding="utf-8")


def test_the_word_none_stands_for_no_mark_and_is_none_itself(folder):
    code, found = bring(folder, written(folder / "s.txt", "none <q> of it\nb\nc\n"), "--sentences", "none")
    assert (code, found["a"]) == (0, "none <q> of it")


def test_an_empty_mark_and_a_missing_order_get_a_sentence(folder):
    (folder / "system.txt").write_text("".join("a summary\n" for _ in (folder / "refs.jsonl").read_text().splitlines()))
    with pytest.raises(
        ValueError, match=r"a sentence separator cannot be empty. To split at no separator, use --sentences none"
    ):
        import_summaries.read_summaries(folder / "system.txt", folder / "refs.jsonl", marks=["<q>", ""])
    with pytest.raises(
        FileNotFoundError, match=r"there is no file of ids .*nowhere\.txt. It should have one id per line"
    ):
        import_summaries.read_summaries(folder / "system.txt", folder / "refs.jsonl", order=folder / "nowhere.txt")


def test_two_ways_to_say_the_order_are_refused(folder):
    with pytest.raises(ValueError, match="order and gold both give the ids of the summaries"):
        import_summaries.read_summaries(folder / "a", folder / "refs.jsonl", order=folder / "b", gold=folder / "c")


def test_help_has_examples_that_can_be_pasted(capsys):
    with pytest.raises(SystemExit):
        cli.main(["import", "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  ngramloss import" in out
    for example in out.partition("examples:\n")[2].splitlines():
        assert cli.parser().parse_args(example.replace('"', "").split()[1:]).out.endswith(".jsonl")


# The Penn Treebank's tokens


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ("he said `` we ca n't go '' .", 'he said "we can\'t go".'),
        ("`` go , '' he said", '"go," he said'),
        ("smith -lrb- 42 , of leeds -RRB- left", "smith (42, of leeds) left"),
        ("the players ' union 's vote : 5 % !", "the players' union's vote: 5%!"),
        ("a ` big ' day", "a 'big' day"),
        ("they can not pay $ 5 or # 3m", "they cannot pay $5 or #3m"),
        ("won 3\\/4 of it ...", "won 3/4 of it..."),
        (
            "they 're here , i 've seen , we 'll go , i 'd say , i 'm out",
            "they're here, i've seen, we'll go, i'd say, i'm out",
        ),
        ("in the '90s .", "in the '90s."),
        ('It isn\'t (new): "plain" text.', 'It isn\'t (new): "plain" text.'),
        ("one .\n`` two '' .", 'one.\n"two".'),
        ("''", '"'),
        ("", ""),
    ],
)
def test_ptb_tokens_become_plain_text(tokens, text):
    assert import_summaries.plain_text(tokens) == text
    assert import_summaries.plain_text(text) == text


def test_ptb_is_undone_only_if_asked_for(folder):
    path = written(folder / "system.txt", "`` a '' .<q>b .\nb\nc\n")
    assert bring(folder, path)[1]["a"] == "`` a '' .\nb ."
    assert bring(folder, path, "--ptb")[1]["a"] == '"a".\nb.'


def test_rouge_sees_brackets_and_contractions_but_no_quotes():
    def one(reference, text):
        return rouge([[reference]], [text]).values["rouge1"][0]

    assert one('he said "no".', "he said `` no '' .") == 100
    assert one("he (42) left", "he -lrb- 42 -rrb- left") < 100
    assert one("they don't", "they do n't") < 100
    assert one("they don't (42)", import_summaries.plain_text("they do n't -lrb- 42 -rrb-")) == 100


# Systems that write for themselves


def prophetnet(folder):
    """A tiny ProphetNet with its own tokenizer, whose vocabulary file is named as on the hub."""
    words = sorted({word for item in newswire.items("test", 3) for word in words_of(item.document) if word.isalpha()})
    special = ["[PAD]", "[unused0]", "[unused1]", "[X_SEP]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
    (folder / "prophetnet.tokenizer").write_text("\n".join([*special, *words]) + "\n")
    tokenizer = hf.ProphetNetTokenizer(str(folder / "prophetnet.tokenizer"))
    model = hf.ProphetNetForConditionalGeneration(
        hf.ProphetNetConfig(
            vocab_size=len(special) + len(words),
            hidden_size=16,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_encoder_layers=1,
            num_decoder_layers=1,
            num_encoder_attention_heads=2,
            num_decoder_attention_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            eos_token_id=6,
            bos_token_id=6,
            decoder_start_token_id=6,
            init_std=1.0,
        )
    )
    return model, tokenizer


def t5(folder):
    tokenizer = tiny_tokenizers.t5_like()
    model = hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=len(tokenizer),
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            pad_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            initializer_factor=5.0,
        )
    )
    return model, tokenizer


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("family", [prophetnet, t5])
def test_prophetnet_and_t5_write_through_generate_and_read_their_prefix(family, tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    model, tokenizer = family(tmp_path)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    seen = []
    whole = hf_engine._generated
    monkeypatch.setattr(hf_engine, "_generated", lambda *args, **more: seen.extend(args[1]) or whole(*args, **more))
    settings = ["generation.max_length=12", "generation.num_beams=2", "generation.min_length=2", "data.max_source=40"]
    arguments = [
        str(tmp_path / "model"),
        "--data",
        "newswire",
        "--limit",
        "3",
        "--out",
        str(tmp_path / "out"),
        "--set",
        "data.prefix=summarize: ",
    ]
    assert cli.main(["generate", *arguments, *(word for one in settings for word in ("--set", one))]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [item.id for item in newswire.items("test", 3)]
    assert all(row["prediction"] for row in rows)
    prefix = tokenizer("summarize: ", add_special_tokens=False)["input_ids"]
    assert all(list(source[: len(prefix)]) == prefix and len(source) <= 40 for source in seen)
    assert (
        cli.main(
            [
                "score",
                "--references",
                str(tmp_path / "out" / "references.jsonl"),
                str(tmp_path / "out" / "predictions.jsonl"),
            ]
        )
        == 0
    )


def test_prophetnets_decoder_leaves_out_what_parts_sentences(tmp_path):
    _, tokenizer = prophetnet(tmp_path)
    ids = tokenizer.convert_tokens_to_ids([".", "[X_SEP]", ".", "[SEP]"])
    assert "[X_SEP]" not in tokenizer.decode(ids, skip_special_tokens=True)
    assert "[X_SEP]" in tokenizer.decode(ids)


# Released data, and a few stories of our own in the same form


def as_released(folder, data, place, reference, gold):
    """References in their order; released references and SimCLS's summaries in the order they were released in."""
    references, systems = read_rows(data, "references_hf_order"), read_rows(data, "other_systems_hf_order")
    written(
        folder / "refs.jsonl",
        "".join(json.dumps({"id": row["id"], "reference": reference(row)}) + "\n" for row in references),
    )
    order = sorted(range(len(references)), key=lambda number: references[number][place])
    written(folder / "order.txt", "\n".join(references[number]["id"] for number in order))
    written(folder / "gold.txt", "\n".join(gold(references[number]) for number in order))
    written(folder / "simcls.txt", "\n".join(systems[number]["SimCLS"] for number in order))
    return [[reference(row)] for row in references]


def means(gold, found, **options):
    values = rouge(gold, list(found.values()), **options).values
    return [sum(values[name]) / len(gold) for name in ("rouge1", "rouge2", "rougeLsum")]


def as_xsum(folder, data):
    return as_released(folder, data, "gold_index", xsum_reference, lambda row: row["summary"])


def as_cnndm(folder, data):
    return as_released(
        folder, data, "see_index", lambda row: row["highlights"], lambda row: row["highlights_tok"].replace("\n", "<q>")
    )


def test_one_sentence_summaries_find_their_ids_by_an_order_or_by_their_references(tmp_path, capsys):
    as_xsum(tmp_path, STORIES / "xsum_test")
    texts = {row["id"]: row["SimCLS"] for row in read_rows(STORIES / "xsum_test", "other_systems_hf_order")}
    assert bring(tmp_path, tmp_path / "simcls.txt", "--order", tmp_path / "order.txt") == (0, texts)
    assert bring(tmp_path, tmp_path / "simcls.txt", "--gold", tmp_path / "gold.txt") == (0, texts)
    assert "order looks wrong" not in capsys.readouterr().err
    code, found = bring(tmp_path, tmp_path / "simcls.txt")
    assert (code, found == texts, sorted(found.values())) == (0, False, sorted(texts.values()))
    assert "the order looks wrong" in capsys.readouterr().err


def test_tokenised_summaries_of_many_sentences_become_plain_lines(tmp_path):
    as_cnndm(tmp_path, STORIES / "cnndm_test")
    told = ("--gold", tmp_path / "gold.txt")
    plain = bring(tmp_path, tmp_path / "simcls.txt", *told, "--ptb", "--sentences", " . ")[1]
    for row in read_rows(STORIES / "cnndm_test", "authors_predictions_segmented_hf_order"):
        written_plainly = [
            line.removesuffix(".").lower() for line in row["originalCrossEntropy"]
        ]  # its first two sentences
        assert plain[row["id"]].split("\n")[:2] == written_plainly
    tokens = bring(tmp_path, tmp_path / "simcls.txt", *told)[1]
    assert tokens == {row["id"]: row["SimCLS"] for row in read_rows(STORIES / "cnndm_test", "other_systems_hf_order")}
    assert bring(tmp_path, tmp_path / "simcls.txt", "--order", tmp_path / "order.txt") == (0, tokens)


@pytest.mark.slow
def test_simcls_on_xsum_scores_as_seen_whichever_way_its_order_is_told(tmp_path, capsys):
    gold = as_xsum(tmp_path, data_folder("xsum_test"))
    code, by_order = bring(tmp_path, tmp_path / "simcls.txt", "--order", tmp_path / "order.txt")
    assert code == 0
    assert means(gold, by_order) == pytest.approx([47.34, 24.45, 39.27], abs=0.006)
    alike = {key: xsum_reference({"summary": text, "summary_cased": None}) for key, text in by_order.items()}
    assert means(gold, alike) == pytest.approx([47.35, 24.45, 39.28], abs=0.006), "written as the references are"
    assert bring(tmp_path, tmp_path / "simcls.txt", "--gold", tmp_path / "gold.txt") == (0, by_order)
    assert "order looks wrong" not in capsys.readouterr().err
    assert bring(tmp_path, tmp_path / "simcls.txt")[0] == 0
    assert "the order looks wrong" in capsys.readouterr().err


@pytest.mark.slow
def test_simcls_on_cnndm_scores_as_seen_with_its_sentences_on_lines(tmp_path):
    gold = as_cnndm(tmp_path, data_folder("cnndm_test"))
    order = ("--order", tmp_path / "order.txt")
    code, found = bring(tmp_path, tmp_path / "simcls.txt", *order, "--ptb", "--sentences", " . ")
    assert code == 0
    assert means(gold, found) == pytest.approx([46.38, 22.03, 43.41], abs=0.011)
    tokens = bring(tmp_path, tmp_path / "simcls.txt", *order)[1]
    assert means(gold, tokens) == pytest.approx([46.33, 21.97, 38.96], abs=0.011)  # brackets stay words; one line
    by_text = bring(tmp_path, tmp_path / "simcls.txt", "--gold", tmp_path / "gold.txt")[1]
    assert sum(tokens[key] != by_text[key] for key in tokens) <= 80  # references of one text may be exchanged


@pytest.mark.parametrize("data", ["stories", pytest.param("released", marks=pytest.mark.slow)])
def test_bleu_on_xsum_is_sacrebleus_own_and_repetition_is_a_plain_count(data):
    folder = STORIES / "xsum_test" if data == "stories" else data_folder("xsum_test")
    gold = [xsum_reference(row) for row in read_rows(folder, "references_hf_order")]
    texts = [row["originalCrossEntropy"] for row in read_rows(folder, "authors_predictions_hf_order")]
    pooled = bleu([[text] for text in gold], texts).pooled["bleu"]
    ours = float(pooled.combine(pooled.statistics.sum(0)))
    assert ours == pytest.approx(sacrebleu.corpus_bleu(texts, [gold]).score, abs=1e-9)
    if data == "released":
        assert ours == pytest.approx(7.667, abs=0.001)  # low: it knows case, and most of these references have none
    repeated = shape(texts).values["repeated3"]
    for text, value in zip(texts, repeated, strict=True):
        words = words_of(text)
        seen, again = Counter(), 0
        for start in range(len(words) - 2):
            trigram = " ".join(words[start : start + 3])
            again += seen[trigram] > 0
            seen[trigram] += 1
        assert value == pytest.approx(100 * again / max(len(words) - 2, 1))
    if data == "released":
        assert 0 < sum(repeated) / len(repeated) < 1
