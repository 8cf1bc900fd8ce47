"""Texts become tokens once, lose nothing below the limit, and are padded as models expect."""

import os
from dataclasses import replace

import pytest
import tiny_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ngramloss.data import Example, fingerprint, tokens
from ngramloss.data.sentences import sentences
from ngramloss.data.tokens import Shape, Tokens, separator_id, sources, tokenise, tokenizer_fingerprint

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


def tokens_of(tokenizer, text, separator, splitter="pysbd"):
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
DOCUMENTS = st.lists(st.lists(WORDS, min_size=1, max_size=6).map(lambda words: " ".join(words) + "."), min_size=1, max_size=6)


@given(DOCUMENTS, st.sampled_from(["period", "newline", "pysbd"]), st.integers(4, 90), st.sampled_from(["ours", "t5"]))
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
    assert [token for token in inside if token != separator] == [token for one in spaced for token in bare(tokenizer, one)]


def test_a_document_that_just_fits_keeps_its_end(ours):
    separator = separator_id(ours, "auto")
    (whole,) = sources([DOCUMENT], ours, ROOMY, separator)
    assert sources([DOCUMENT], ours, Shape(max_source=len(whole)), separator) == [whole]
    assert sources([DOCUMENT], ours, Shape(max_source=len(whole) - 1), separator) == [[*whole[:-2], whole[-1]]]


def test_a_prefix_stands_before_the_first_separator(ours):
    separator = separator_id(ours, "auto")
    (plain,), (prefixed,) = (sources(["It slept."], ours, replace(ROOMY, prefix=text), separator) for text in ("", "summarize: "))
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
    with pytest.raises(ValueError, match=r"the tokenizer has no token '<sep>'\. Set data\.separator to a token of its vocabulary\."):
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


def test_many_examples_are_tokenised_in_chunks_and_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens, "CHUNK", 2)
    counted = []
    found = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY, cache=tmp_path / "a", progress=counted.append)
    assert counted == [2, 1]
    monkeypatch.setattr(tokens, "CHUNK", 1000)
    at_once = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY, cache=tmp_path / "b")
    for one, other in zip(found, at_once, strict=True):
        assert all(one[name].tolist() == other[name].tolist() for name in ("input_ids", "labels"))


def test_the_same_content_is_tokenised_once(tmp_path, monkeypatch):
    first = made(tmp_path)
    monkeypatch.setattr(tokens, "_write", lambda *_: pytest.fail("tokenised again"))
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
        *({"shape": replace(ROOMY, **changed)} for changed in [
            {"separator": "none"}, {"splitter": "period"}, {"prefix": "x"}, {"max_source": 50}, {"max_target": 5}, {"language": "de"},
        ]),
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


def test_a_tokenizer_without_a_backend_has_a_fingerprint_of_its_vocabulary():
    class Slow:
        special_tokens_map: dict = {}   # noqa: RUF012

        def __init__(self, vocabulary):
            self.get_vocab = lambda: vocabulary

    one, same, other = (tokenizer_fingerprint(Slow(vocab)) for vocab in ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0}))
    assert one == same != other


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no power")

    with monkeypatch.context() as patch:
        patch.setattr(tokens.np, "cumsum", fail)
        with pytest.raises(RuntimeError, match="no power"):
            made(tmp_path)
    assert os.listdir(tmp_path / "tokens") == []
    assert len(made(tmp_path)) == 3


@pytest.mark.parametrize("name", ["input_ids.npy", "labels.npy", "labels.ends.npy"])
def test_a_damaged_cache_is_named_and_tokenised_again(tmp_path, name):
    first = made(tmp_path)
    path = first.folder / name
    sound, last = path.read_bytes(), first[-1]["labels"].tolist()
    path.write_bytes(sound[:-4] + bytes([sound[-4] ^ 1]) + sound[-3:])   # another token, or another end of a row
    said = []
    again = tokenise(EXAMPLES, fingerprint(EXAMPLES), tiny_tokenizers.ours(), ROOMY, cache=tmp_path, say=said.append)
    assert said == [f"the token cache {first.folder} is damaged ({name} was changed); rebuilding it."]
    assert path.read_bytes() == sound
    assert again[-1]["labels"].tolist() == last


def test_no_examples_are_refused(tmp_path):
    with pytest.raises(ValueError, match="there are no examples to tokenise, expected at least one"):
        made(tmp_path, [])


def test_tokens_go_to_the_common_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.setenv("NGRAMLOSS_CACHE", str(tmp_path))
    found = tokenise(EXAMPLES, "x", tiny_tokenizers.ours(), ROOMY)
    assert found.folder.parent == tmp_path / "tokens"


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
