"""Texts become tokens once, lose nothing below the limit, and are padded as models expect."""

import gc
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss.data import Example, fingerprint, tokens
from ngramloss.data.sentences import sentences
from ngramloss.data.tokens import Shape, Tokens, separator_id, sources, targets, tokenise, tokenizer_fingerprint
from ngramloss.output.progress import Progress

ROOMY = Shape(max_source=10_000)
DOCUMENT = "The cat sat. It slept there! Was the dog awake?"
EXAMPLES = [
    Example("1", DOCUMENT, "The cat slept."),
    Example("2", "Dogs ran home quickly.", "Dogs ran."),
    Example("3", "Nobody came. The café was naïve.", "Rain in Łódź, and wind."),
]


@pytest.fixture(params=tiny_tokenizers.FAMILIES)
def tokenizer(request):
    return tiny_tokenizers.FAMILIES[request.param]()


@pytest.fixture
def ours():
    return tiny_tokenizers.ours()


def bare(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def frame(tokenizer):
    """The ids around a text, found the slow way."""
    whole, inside = tokenizer("dog")["input_ids"], bare(tokenizer, "dog")
    start = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
    return whole[:start], whole[start + len(inside) :]


def tokens_of(tokenizer, text, separator, splitter="sentencex"):
    """The definition: a separator, then the sentence, for every sentence."""
    before, after = frame(tokenizer)
    found = sentences(text, splitter)
    spaced = [found[0], *(f" {sentence}" for sentence in found[1:])] if found else []
    body = [token for sentence in spaced for token in [separator, *bare(tokenizer, sentence)]]
    return [*before, *body, *after]


def made(tmp_path, examples=EXAMPLES, tokenizer=None, shape=ROOMY):
    return tokenise(examples, fingerprint(examples), tokenizer or tiny_tokenizers.ours(), shape, cache=tmp_path)


# Separators and cutting


def test_a_separator_stands_before_every_sentence(tokenizer):
    separator = separator_id(tokenizer, "auto")
    (ids,) = sources([DOCUMENT], tokenizer, ROOMY, separator)
    assert ids == tokens_of(tokenizer, DOCUMENT, separator)
    before, after = frame(tokenizer)
    assert ids[len(before) : len(ids) - len(after)].count(separator) == 3


def test_without_separators_a_source_is_what_the_tokenizer_makes_of_it(tokenizer):
    shape = replace(ROOMY, separator="none", prefix="summarize: ")
    assert sources([DOCUMENT], tokenizer, shape, None) == [tokenizer("summarize: " + DOCUMENT)["input_ids"]]


def test_a_sentence_has_the_pieces_it_has_in_running_text():
    tokenizer = tiny_tokenizers.bart_like()
    separator = separator_id(tokenizer, "auto")
    (ids,) = sources(["The cat sat. The dog ran."], tokenizer, ROOMY, separator)
    assert [token for token in ids[1:-1] if token != separator] == bare(tokenizer, "The cat sat. The dog ran.")


WORDS = st.sampled_from(["The", "cat", "naïve", "café", "Łódź", "2024", "“no”", "dog's", "ran", "Mr.", "日本"])
DOCUMENTS = st.lists(
    st.lists(WORDS, min_size=1, max_size=6).map(lambda words: " ".join(words) + "."), min_size=1, max_size=6
)


@given(
    DOCUMENTS,
    st.sampled_from(["period", "newline", "pysbd", "sentencex"]),
    st.integers(4, 90),
    st.sampled_from(["ours", "t5"]),
)
@settings(max_examples=60, deadline=None)
def test_separators_come_first_and_the_cut_after(lines, splitter, limit, family):
    tokenizer = tiny_tokenizers.FAMILIES[family]()
    text, separator = "\n".join(lines), separator_id(tokenizer, "auto")
    (whole,) = sources([text], tokenizer, replace(ROOMY, splitter=splitter), separator)
    (cut,) = sources([text], tokenizer, Shape(splitter=splitter, max_source=limit), separator)
    before, after = frame(tokenizer)
    assert whole == tokens_of(tokenizer, text, separator, splitter)
    if len(whole) <= limit:
        assert cut == whole
    else:
        assert len(cut) == limit
        assert cut == [*before, *whole[len(before) : limit - len(after)], *after]
    inside = whole[len(before) : len(whole) - len(after)]
    spaced = [" " * (place > 0) + sentence for place, sentence in enumerate(sentences(text, splitter))]
    assert [token for token in inside if token != separator] == [
        token for one in spaced for token in bare(tokenizer, one)
    ]


def test_a_document_that_just_fits_keeps_its_end(ours):
    separator = separator_id(ours, "auto")
    (whole,) = sources([DOCUMENT], ours, ROOMY, separator)
    assert sources([DOCUMENT], ours, Shape(max_source=len(whole)), separator) == [whole]
    assert sources([DOCUMENT], ours, Shape(max_source=len(whole) - 1), separator) == [[*whole[:-2], whole[-1]]]


@pytest.mark.parametrize("separator", ["auto", "none"])
def test_only_a_text_that_lost_its_end_counts_as_cut(ours, separator):
    token = separator_id(ours, separator)
    whole, target = len(sources([DOCUMENT], ours, ROOMY, token)[0]), len(ours("A cat sat.")["input_ids"])
    for less in (0, 1):
        cut = []
        sources([DOCUMENT, "A dog."], ours, Shape(separator, max_source=whole - less), token, cut=cut)
        targets(["A cat sat.", "A"], ours, Shape(max_target=target - less), cut)
        assert cut == [bool(less), False] * 2


def test_a_prefix_stands_before_the_first_separator(ours):
    separator = separator_id(ours, "auto")
    (plain,), (prefixed,) = (
        sources(["It slept."], ours, replace(ROOMY, prefix=text), separator) for text in ("", "summarize: ")
    )
    assert prefixed == [plain[0], *bare(ours, "summarize: "), *plain[1:]]


def test_texts_of_many_lengths_keep_their_own_sentences(ours):
    texts = ["One. Two. Three.", "   ", "Four.", "Five. Six."]
    rows = sources(texts, ours, ROOMY, separator_id(ours, "auto"))
    assert rows == [tokens_of(ours, text, separator_id(ours, "auto")) for text in texts]
    assert rows[1] == [0, 2]


def test_a_limit_below_the_special_tokens_is_refused(ours):
    with pytest.raises(ValueError, match=r"max_source=2 is too small for the tokenizer's special tokens\. Raise it\."):
        sources(["a"], ours, Shape(max_source=2), None)
    assert sources(["a b"], ours, Shape(max_source=3), None) == [[0, bare(ours, "a")[0], 2]]


def test_a_tokenizer_that_writes_nothing_for_a_letter_is_refused():
    from tokenizers import Tokenizer, models, processors
    from transformers import PreTrainedTokenizerFast

    mute = Tokenizer(models.BPE({"<s>": 0, "</s>": 1}, []))
    mute.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    with pytest.raises(ValueError, match="encodes a text differently with special tokens than without"):
        sources(["a"], PreTrainedTokenizerFast(tokenizer_object=mute), ROOMY, None)


# The separator's token


@pytest.mark.parametrize(("family", "token"), [("ours", "</s>"), ("t5", "</s>"), ("bert", "[SEP]")])
def test_auto_takes_the_tokenizers_own_separator_or_its_end_of_text(family, token):
    tokenizer = tiny_tokenizers.FAMILIES[family]()
    assert separator_id(tokenizer, "auto") == tokenizer.convert_tokens_to_ids(token)


def test_auto_prefers_a_separator_to_the_end_of_text():
    tokenizer = tiny_tokenizers.bart_like()
    tokenizer.sep_token = "<unk>"
    assert separator_id(tokenizer, "auto") == 3 != tokenizer.eos_token_id


def test_a_separator_may_be_named(ours):
    assert separator_id(ours, "<s>") == 0
    assert separator_id(ours, "<unk>") == 3
    assert separator_id(ours, "none") is None


def test_a_separator_the_tokenizer_does_not_know_is_refused(tokenizer):
    with pytest.raises(
        ValueError, match=r"the tokenizer has no token '<sep>'\. Set data\.separator to a token of its vocabulary\."
    ):
        separator_id(tokenizer, "<sep>")


def test_a_tokenizer_without_any_separator_says_so():
    tokenizer = tiny_tokenizers.bert_like()
    tokenizer.sep_token = None
    with pytest.raises(ValueError, match=r'has no separator\. Set data\.separator to a token, or to "none"\.'):
        separator_id(tokenizer, "auto")


# The cache


def test_tokens_are_those_of_sources_and_targets_in_order(tmp_path, tokenizer):
    found = made(tmp_path, tokenizer=tokenizer)
    separator = separator_id(tokenizer, "auto")
    assert len(found) == 3
    for row, example in zip(found, EXAMPLES, strict=True):
        assert row["input_ids"].tolist() == tokens_of(tokenizer, example.source, separator)
        assert row["labels"].tolist() == tokenizer(example.target)["input_ids"]


def test_a_target_is_cut_and_still_ends(tmp_path, ours):
    long = [Example("1", "A dog.", " ".join(["cat"] * 50))]
    labels = made(tmp_path, long, shape=Shape(max_target=6))[0]["labels"].tolist()
    assert len(labels) == 6
    assert labels[:5] == ours(long[0].target)["input_ids"][:5]
    assert labels[-1] == ours.eos_token_id


@pytest.fixture
def counted(monkeypatch):
    """What progress is told."""
    numbers = []
    monkeypatch.setattr(Progress, "update", lambda self, count: numbers.append(count))
    return numbers


def test_many_examples_are_tokenised_in_chunks_and_counted(tmp_path, monkeypatch, counted):
    monkeypatch.setattr(tokens, "CHUNK", 2)
    found = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY, cache=tmp_path / "a")
    assert counted == [2, 1]
    monkeypatch.setattr(tokens, "CHUNK", 1000)
    at_once = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY, cache=tmp_path / "b")
    for one, other in zip(found, at_once, strict=True):
        assert all(one[name].tolist() == other[name].tolist() for name in ("input_ids", "labels"))


def test_the_same_content_is_tokenised_once(tmp_path, monkeypatch):
    first = made(tmp_path)
    monkeypatch.setattr(tokens, "sources", lambda *_: pytest.fail("tokenised again"))
    again = made(tmp_path)
    assert again.folder == first.folder
    assert again[0]["input_ids"].tolist() == first[0]["input_ids"].tolist()
    assert os.listdir(tmp_path / "tokens") == [first.folder.name]


@pytest.mark.parametrize(
    "change",
    [
        {"examples": [Example("1", DOCUMENT + "!", "The cat slept."), *EXAMPLES[1:]]},
        {"examples": [Example("1", DOCUMENT, "The cat slept!"), *EXAMPLES[1:]]},
        {"examples": EXAMPLES[:2]},
        {"tokenizer": "bart"},
        {"tokenizer": "mbart"},
        *(
            {"shape": replace(ROOMY, **changed)}
            for changed in [
                {"separator": "none"},
                {"splitter": "period"},
                {"prefix": "x"},
                {"max_source": 50},
                {"max_target": 5},
                {"language": "de"},
            ]
        ),
    ],
    ids=str,
)
def test_whatever_changes_the_tokens_makes_them_anew(tmp_path, change):
    if "tokenizer" in change:
        change = {"tokenizer": tiny_tokenizers.FAMILIES[change["tokenizer"]]()}
    assert made(tmp_path).folder != made(tmp_path, **change).folder
    assert len(os.listdir(tmp_path / "tokens")) == 2


def test_a_new_format_makes_the_tokens_anew(tmp_path, monkeypatch):
    first = made(tmp_path).folder
    monkeypatch.setattr(tokens, "FORMAT", tokens.FORMAT + 1)
    assert made(tmp_path).folder != first


def test_using_a_tokenizer_does_not_change_its_fingerprint(tokenizer):
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "b c"], truncation=True, max_length=4, padding="max_length")
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer("a")
    assert tokenizer_fingerprint(tokenizer) == before


def test_another_tokenizer_has_another_fingerprint(tmp_path):
    prints = {name: tokenizer_fingerprint(make()) for name, make in tiny_tokenizers.FAMILIES.items()}
    assert len(set(prints.values())) == len(prints)
    renamed = tiny_tokenizers.bart_like()
    renamed.sep_token = "<unk>"
    assert tokenizer_fingerprint(renamed) != prints["bart"]
    translating = tiny_tokenizers.bart_like()
    translating.src_lang = "de_DE"
    assert tokenizer_fingerprint(translating) != prints["bart"]
    tiny_tokenizers.bart_like().save_pretrained(tmp_path)
    from transformers import PreTrainedTokenizerFast

    assert tokenizer_fingerprint(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == prints["bart"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("truncation_side", "left"),
        ("padding_side", "left"),
        ("split_special_tokens", True),
        ("model_max_length", 7),
        ("add_prefix_space", True),
        ("clean_up_tokenization_spaces", True),
        ("src_lang", "de"),
        ("tgt_lang", "de"),
    ],
)
def test_every_setting_of_a_tokenizer_makes_the_tokens_anew(tmp_path, name, value):
    assert {name} <= set(tokens.SETTINGS)
    tokenizer = tiny_tokenizers.bart_like()
    before = made(tmp_path, tokenizer=tokenizer).folder
    setattr(tokenizer, name, value)
    assert made(tmp_path, tokenizer=tokenizer).folder != before


def test_the_other_end_of_a_target_is_cut_after_the_side_has_changed(tmp_path):
    tokenizer, long = tiny_tokenizers.bart_like(), [Example("1", "A dog.", "one two three four five six seven")]
    cut = []
    for side in ("right", "left"):
        tokenizer.truncation_side = side
        cut.append(made(tmp_path, long, tokenizer=tokenizer, shape=Shape(max_target=6))[0]["labels"].tolist())
    assert cut[0] != cut[1]


def test_special_tokens_in_a_text_are_split_after_that_was_asked_for(tmp_path):
    tokenizer, marked = tiny_tokenizers.bart_like(), [Example("1", "A </s> dog.", "A dog.")]
    encoded = []
    for split in (False, True):
        tokenizer.split_special_tokens = split
        encoded.append(made(tmp_path, marked, tokenizer=tokenizer)[0]["input_ids"].tolist())
    assert encoded[0] != encoded[1]


@pytest.mark.parametrize("changed", ["bare", "framed", "target", "truncated", "special", "decoded"])
def test_what_a_tokenizer_does_is_in_its_fingerprint_although_no_setting_says_it(changed):
    """Code of a tokenizer's own may do anything; here it changes one thing that no file shows."""

    class Own(type(tiny_tokenizers.bart_like())):
        odd = False

        def __call__(self, text=None, text_target=None, **options):
            encoded = super().__call__(text=text, text_target=text_target, **options)
            odd = {
                "bare": not options.get("add_special_tokens", True),
                "framed": text is not None and options.get("add_special_tokens", True),
                "target": text_target is not None,
                "truncated": bool(options.get("truncation")),
                "special": any("</s>" in each for each in (text or ())),
            }
            if self.odd and odd.get(changed):
                encoded["input_ids"] = [row[::-1] for row in encoded["input_ids"]]
            return encoded

        def batch_decode(self, rows, **options):
            texts = super().batch_decode(rows, **options) if changed == "decoded" else ["" for _ in rows]
            return [text.upper() for text in texts] if self.odd and changed == "decoded" else texts

    tokenizer = Own(tokenizer_object=tiny_tokenizers.bart_like().backend_tokenizer, eos_token="</s>")
    before = tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(tokenizer) == before
    tokenizer.odd = True
    assert tokenizer_fingerprint(tokenizer) != before


def test_rules_of_sentencepiece_that_no_probe_shows_are_in_the_fingerprint():
    tokenizer, prints = tiny_tokenizers.bart_like(), set()
    for rules in (b"one", b"other"):
        tokenizer.sp_model = SimpleNamespace(serialized_model_proto=lambda rules=rules: rules)
        prints.add(tokenizer_fingerprint(tokenizer))
    assert len(prints) == 2


def test_a_tokenizer_without_a_backend_has_a_fingerprint_of_its_vocabulary():
    class Slow:
        special_tokens_map: dict = {}  # noqa: RUF012
        all_special_tokens: tuple = ()

        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

        def __call__(self, text=None, text_target=None, **_):
            return {"input_ids": [[0] for _ in text or text_target]}

        def batch_decode(self, rows, **_):
            return ["a" for _ in rows]

    one, same, other = (
        tokenizer_fingerprint(Slow(vocab)) for vocab in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    )
    assert one == same != other


def test_another_version_of_sentencex_makes_the_tokens_anew(tmp_path, monkeypatch):
    shapes = [ROOMY, replace(ROOMY, separator="none"), replace(ROOMY, splitter="pysbd")]
    first = [made(tmp_path, shape=shape).folder for shape in shapes]
    monkeypatch.setattr(tokens, "installed", {"sentencex": "9.9"}.get)
    assert [made(tmp_path, shape=shape).folder == before for shape, before in zip(shapes, first, strict=True)] == [
        False,
        True,
        True,
    ]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(tokens.np, "cumsum", fail)
        with pytest.raises(RuntimeError, match="no power"):
            made(tmp_path)
    assert list((tmp_path / "tokens").iterdir()) == []
    assert len(made(tmp_path)) == 3


@pytest.mark.parametrize("name", ["input_ids.npy", "labels.npy", "labels.ends.npy"])
def test_a_damaged_cache_is_named_and_tokenised_again(tmp_path, name, messages):
    first = made(tmp_path)
    path = first.folder / name
    sound, last = path.read_bytes(), first[-1]["labels"].tolist()
    path.write_bytes(sound[:-4] + bytes([sound[-4] ^ 1]) + sound[-3:])  # another token, or another end of a row
    again = tokenise(EXAMPLES, fingerprint(EXAMPLES), tiny_tokenizers.ours(), ROOMY, cache=tmp_path)
    assert messages == [f"the token cache {first.folder} is damaged ({name} was changed); rebuilding it."]
    assert path.read_bytes() == sound
    assert again[-1]["labels"].tolist() == last


def test_no_examples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there are no examples to tokenise, expected at least one"):
        made(tmp_path, [])


def test_tokens_go_to_the_common_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path))
    found = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY)
    assert found.folder.parent == tmp_path / "tokens"


# Words that are encoded once

MANY = [
    Example(
        str(number),
        f"{DOCUMENT} It's {number}% naïve.  “Łódź”, she'd said\n\n{'日本 ' * (number % 3)}and </s> left.\x0b",
        f"The café, no. {number}: {text}",
    )
    for number, text in enumerate(
        ["rain", "", "日本", "“no”", "</s>", "they'll", "1½", "a\u00a0b", "\u200fx", "cat " * 40]
    )
]


def written_the_plain_way(folder, examples, tokenizer, shape):
    """As tokens were written before words were looked up: the tokenizer encodes every sentence, everything is in memory."""
    separator, (before, after) = separator_id(tokenizer, shape.separator), frame(tokenizer)
    rows = {"input_ids": [], "labels": []}
    cut = []
    for example in examples:
        whole = tokens_of(tokenizer, example.source, separator, shape.splitter)
        target = tokenizer(text_target=example.target)["input_ids"]
        cut.append([len(whole) > shape.max_source, len(target) > shape.max_target])
        body = whole[len(before) : len(whole) - len(after)]
        rows["input_ids"].append([*before, *body[: shape.max_source - len(before) - len(after)], *after])
        rows["labels"].append(
            tokenizer(text_target=example.target, truncation=True, max_length=shape.max_target)["input_ids"]
        )
    for name, lists in rows.items():
        np.save(folder / f"{name}.npy", np.array([token for row in lists for token in row], dtype=np.int32))
        np.save(folder / f"{name}.ends.npy", np.cumsum([len(row) for row in lists], dtype=np.int64))
    np.save(folder / "cut.npy", np.array(cut, np.uint8).flatten())
    np.save(folder / "cut.ends.npy", np.arange(2, 2 * len(cut) + 1, 2))
    return tuple(np.array(cut).sum(0))


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "whole.json"}


@pytest.mark.parametrize("splitter", ["pysbd", "sentencex"])
def test_files_are_byte_for_byte_those_of_the_plain_way(tmp_path, monkeypatch, tokenizer, splitter):
    monkeypatch.setattr(tokens, "CHUNK", 2)
    cuts = []
    for max_source, max_target in ((40, 12), (400, 40)):
        shape = Shape(splitter=splitter, max_source=max_source, max_target=max_target)
        plain = tmp_path / f"plain-{max_source}"
        plain.mkdir()
        cuts.append(written_the_plain_way(plain, MANY, tokenizer, shape))
        found = made(tmp_path, MANY, tokenizer, shape)
        assert content(found.folder) == content(plain)
        assert found.cut == cuts[-1]
    assert cuts[0] > cuts[1] == (0, 1)
    fits = made(tmp_path, MANY[:1], tokenizer, Shape(splitter=splitter))
    exactly = Shape(splitter=splitter, max_source=int(fits.lengths[0]), max_target=int(fits.target_lengths[0]))
    assert made(tmp_path, MANY[:1], tokenizer, exactly).cut == (0, 0)


def test_a_tokenizer_that_cuts_from_the_left_keeps_doing_so(tmp_path):
    tokenizer = tiny_tokenizers.bart_like()
    tokenizer.truncation_side = "left"
    labels = made(tmp_path, MANY, tokenizer, Shape(max_target=6))[9]["labels"].tolist()
    assert labels == tokenizer(MANY[9].target, truncation=True, max_length=6)["input_ids"]


def test_the_collector_is_as_it_was_after_a_preparation(tmp_path):
    assert gc.isenabled()
    made(tmp_path / "a")
    assert gc.isenabled()
    gc.disable()
    try:
        made(tmp_path / "b")
        assert not gc.isenabled()
    finally:
        gc.enable()


# Rows


def test_rows_are_read_by_number_from_either_end(tmp_path):
    found = made(tmp_path)
    for row in range(3):
        assert found[row]["labels"].tolist() == found[row - 3]["labels"].tolist()
    assert len({tuple(found[row]["input_ids"].tolist()) for row in range(3)}) == 3
    for row in (3, -4):
        with pytest.raises(IndexError, match=f"row {row} of 3"):
            found[row]


def test_lengths_are_those_of_sources(tmp_path):
    found = made(tmp_path)
    assert found.lengths.tolist() == [len(row["input_ids"]) for row in found]


def test_tokens_are_read_again_from_their_folder(tmp_path):
    found = made(tmp_path)
    again = Tokens(str(found.folder))
    assert [row["labels"].tolist() for row in again] == [row["labels"].tolist() for row in found]
    np.save(tmp_path / "weights.npy", np.ones(3))
    with pytest.raises(ValueError, match=r"weights\.npy has 3 numbers for \d+ labels"):
        Tokens(found.folder, {"weights": tmp_path / "weights.npy"})


def test_tokens_are_sent_to_another_process_as_the_name_of_their_folder(tmp_path):
    for name in ("input_ids", "labels"):
        np.save(tmp_path / f"{name}.npy", np.arange(10_000))
        np.save(tmp_path / f"{name}.ends.npy", np.array([4, 10_000]))
    sent = pickle.dumps(Tokens(tmp_path))
    assert len(sent) < 1_000
    assert pickle.loads(sent)[0]["labels"].tolist() == [0, 1, 2, 3]
