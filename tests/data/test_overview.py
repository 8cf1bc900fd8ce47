"""What happens to the data is said: rows that are left out, texts that are cut, rows that are there twice."""

import pytest

from ngramloss.data import Example, Split, load
from ngramloss.data.overview import overview
from ngramloss.data.rows import BadRow
from ngramloss.recipe import Data


def split(name, *texts, more=False, skipped=()):
    examples = [Example(f"{name}-{number}", text, f"of {text}") for number, text in enumerate(texts)]
    return Split("mine", name, examples, list(skipped), "", more)


def test_a_clean_split_has_a_short_sentence():
    splits = {"train": split("train", "a", "b"), "validation": split("validation", "c"), "test": split("test", "d")}
    assert overview(splits, {"train": (0, 0), "validation": (0, 0)}, Data()) == [
        "train: 2 rows; no text cut.",
        "validation: 1 row; no text cut.",
        "test: 1 row.",
    ]


def test_everything_that_changes_the_data_is_named_with_its_setting():
    bad = [BadRow("mine", 3, "empty")]
    splits = {
        "train": split("train", *"abca", more=True, skipped=bad),
        "validation": split("validation", *"xxx", more=True),
    }
    data = Data(limit=2400, validation_limit=3, max_source=2048, max_target=64)
    assert overview(splits, {"train": (1200, 0), "validation": (0, 2)}, data) == [
        "train: 4 rows; the rest not used (data.limit = 2,400); 1 bad row skipped; 1,200 sources cut to 2,048 "
        "tokens (data.max_source); 1 repeated row.",
        "validation: 3 rows; the rest not used (data.validation_limit = 3); 2 targets cut to 64 tokens "
        "(data.max_target); 2 repeated rows.",
    ]


def test_columns_are_named_if_several_are_joined_or_one_is_not_read():
    train = split("train", "a")._replace(column="instruction,input", target_column="output")
    validation = split("validation", "b")._replace(column="dialogue", target_column="summary", unread=("topic",))
    assert overview({"train": train, "validation": train._replace(split="validation", examples=[])}, {}, Data()) == [
        "train: 1 row; sources are instruction and input, targets output.",
        "validation: 0 rows.",
    ]
    other = overview({"train": split("train", "a"), "validation": validation._replace(unread=())}, {}, Data())
    assert other[1] == "validation: 1 row; sources are dialogue, targets summary."
    chat = split("train", "a")._replace(column="messages", target_column="completion", unread=("tools",))
    assert overview({"train": chat}, {}, Data()) == ["train: 1 row; not read: tools."]
    many = validation._replace(split="train", unread=("topic", "a", "b", "c"))
    assert overview({"train": many}, {}, Data()) == [
        "train: 1 row; sources are dialogue, targets summary; not read: topic, a, b and 1 more."
    ]


def test_sources_that_contain_their_targets_are_a_warning():
    examples = [
        Example(str(number), f"Q{number}. the answer is {number}", f"the answer is {number}") for number in range(5)
    ]
    one = Split("mine", "train", examples, [], "")
    (_, warning) = overview({"train": one}, {}, Data())
    assert warning == (
        "warning: most sources of the training data contain their whole target (100% of those looked at, ids 0, 1, "
        "2, …), so there is only copying to learn. Check data.source: is the answer read as the source?"
    )
    short = [example._replace(target="answer is") for example in examples]  # a label, or a name in the text
    half = [
        example._replace(target="no such words") if number % 2 else example for number, example in enumerate(examples)
    ]
    for harmless in (short, half[1:]):
        assert len(overview({"train": one._replace(examples=harmless)}, {}, Data())) == 1


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_row_that_is_also_trained_on_is_a_warning(name):
    splits = {"train": split("train", *"abcdef"), name: split(name, *"axcde")}
    *_, warning = overview(splits, {}, Data())
    assert warning == (
        f"warning: the training data contain 4 of the 5 {name} rows (ids {name}-0, {name}-2, {name}-3, …), so scores on them say "
        "little about new texts. Remove them from one of the two splits."
    )
    splits[name] = split(name, "x", "f")
    *_, warning = overview(splits, {}, Data(test_fraction=0.1))
    assert warning == (
        f"warning: the training data contain 1 of the 2 {name} rows (ids {name}-1), so scores on them say little about new texts. "
        "Remove repeated rows from the data."
    )


def test_the_same_source_with_another_target_is_another_row():
    other = Split("mine", "test", [Example("0", "a", "else")], [], "")
    twice = Split("mine", "train", [Example("0", "a", "b"), Example("1", "a", "c"), Example("2", "ab", "c")], [], "")
    assert overview({"train": twice, "test": other}, {}, Data()) == ["train: 3 rows.", "test: 1 row."]


def test_the_built_in_corpus_has_no_row_twice():
    splits = {"train": load("newswire", "train", limit=3000), "test": load("newswire", "test")}
    assert overview(splits, {}, Data()) == ["train: 3,000 rows.", "test: 500 rows."]
