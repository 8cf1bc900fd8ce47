"""The built-in corpus: the same for everybody, true to its own facts, and not to be summed up by copying."""

import hashlib
import os
import re
import subprocess
import sys
from itertools import pairwise
from math import isnan
from statistics import mean

import pytest

from ngramloss.data import newswire
from ngramloss.data.newswire import EVENTS, FIGURES, NAMES, PHRASES, items, joined

pytestmark = pytest.mark.slow

TEST = items("test")


def bigrams(text):
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    return set(pairwise(words))


def novel(item):
    found = bigrams(item.summary)
    return len(found - bigrams(item.document)) / len(found)


def sentences(document):
    return re.findall(r"\S.*?\.(?= |$)", document)


def fits(template, text):
    pattern = re.sub(r"\\{[^}]*\\}", ".+", re.escape(template))
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def many():
    return items("train", 20_000)


# The same for everybody


def test_another_process_with_other_hashes_makes_the_same_items():
    program = "from ngramloss.data.newswire import items; print(items('train', 40, seed=3))"
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == str(items("train", 40, seed=3))


def test_the_corpus_is_the_one_our_numbers_were_measured_on():
    text = "\n".join("\n".join((item.document, item.summary, item.decoy)) for item in TEST)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == "d0b96d4cda06"


def test_a_longer_list_begins_with_the_shorter_one(many):
    assert items("train", 100) == many[:100]


def test_each_split_has_its_own_size_unless_told_otherwise():
    assert {split: len(items(split)) for split in ("validation", "test")} == {"validation": 500, "test": 500}
    assert newswire.SPLITS == {"train": 24_000, "validation": 500, "test": 500}
    assert items("train", 0) == []


def test_an_id_tells_split_and_number():
    assert [item.id for item in items("validation", 2)] == ["newswire-validation-0", "newswire-validation-1"]


def test_another_seed_makes_another_corpus():
    assert not {item.document for item in items("test", seed=1)} & {item.document for item in TEST}


def test_no_document_comes_twice_in_a_split_or_in_two(many):
    documents = [item.document for item in [*many, *items("validation"), *TEST]]
    assert len(set(documents)) == len(documents)


# What an item is like


def test_every_kind_is_there_in_every_split(many):
    assert len(EVENTS) >= 6
    assert {item.event for item in TEST} == {item.event for item in items("validation")} == set(EVENTS)
    assert {item.event for item in many[:200]} == set(EVENTS)


def test_documents_have_four_to_nine_sentences(many):
    assert {len(sentences(item.document)) for item in many} == {4, 5, 6, 7, 8, 9}


def test_every_sentence_begins_with_a_capital_or_a_figure_and_no_field_is_left(many):
    for item in many:
        text = [*sentences(item.document), item.summary, item.decoy]
        assert all(re.fullmatch(r"[A-Z0-9£][^{}]*\.", sentence) for sentence in text)


@pytest.mark.slow
def test_names_and_figures_stand_in_the_summary_and_can_be_copied_from_the_document(many):
    for item in many:
        assert item.names
        assert item.figures
        assert len({*item.names, *item.figures}) == len(item.names) + len(item.figures)
        for text in (*item.names, *item.figures):
            assert newswire.stands_in(text, item.summary)
            assert newswire.stands_in(text, item.document)


def test_no_figure_or_name_of_a_summary_goes_unlisted():
    for item in TEST:
        rest = item.summary
        for text in (*item.names, *item.figures):
            rest = rest.replace(text, "", 1)
        assert not re.search(r"\d", rest)


def test_a_summary_is_mostly_in_words_of_its_own(many):
    assert mean(map(novel, many)) > 0.4


def test_every_summary_has_the_one_wording_of_its_outcome(many):
    seen = set()
    for item in many:
        (wording,) = (one["summary"] for one in EVENTS[item.event]["outcomes"] if fits(one["summary"], item.summary))
        seen.add(wording)
    assert seen == {one["summary"] for kind in EVENTS.values() for one in kind["outcomes"]}


def test_a_summary_has_its_own_word_for_what_the_document_describes(many):
    said = [say for pool in PHRASES.values() for say, word in pool.items() if say != word]
    summaries = "\n".join(item.summary for item in many).lower()
    assert not [say for say in said if say in summaries]


def test_documents_hold_names_and_figures_beside_the_point(many):
    beside = [len(re.findall(r"\d+", item.document)) - len(re.findall(r"\d+", item.summary)) for item in many]
    assert mean(beside) > 1


# Two baselines


def test_the_first_sentences_seldom_hold_what_the_summary_needs():
    assert mean(newswire.share(item.names, " ".join(sentences(item.document)[:2])) for item in TEST) < 50


@pytest.mark.slow
def test_a_decoy_has_the_summarys_wording_and_none_of_its_facts(many):
    for item in many:
        assert item.decoy != item.summary
        assert newswire.share(item.names, item.decoy) == newswire.share(item.figures, item.decoy) == 0
        assert any(
            fits(one["summary"], item.summary) and fits(one["summary"], item.decoy)
            for one in EVENTS[item.event]["outcomes"]
        )


# Names and figures right


@pytest.mark.parametrize(
    ("wanted", "prediction", "found"),
    [
        ("Ashby", "in Ashby.", True),
        ("Ashby", "in ashby", True),
        ("Ashby", "in Ashbyton", False),
        ("Ashby", "in Greatashby", False),
        ("Ada Halson", "Ada met Halson", False),
        ("5 per cent", "by 15 per cent", False),
        ("5 per cent", "by 2.5 per cent", False),
        ("£4.2 million", "to £4.2 million.", True),
        ("£4.2 million", "to £4x2 million", False),
        ("£250", "pays £250,000", False),
        ("£250", "pays £250, no more", True),
        ("450", "1,450 people", False),
    ],
)
def test_right_finds_whole_names_and_whole_figures(wanted, prediction, found):
    assert newswire.share((wanted,), prediction) == 100 * found
    assert newswire.share((wanted, "absent"), prediction) == 50 * found


def test_nothing_wanted_has_no_share():
    assert isnan(newswire.share((), "text"))


# What goes wrong is said


def test_an_unknown_split_is_refused():
    with pytest.raises(
        ValueError, match=r"unknown split 'dev' of newswire; choose from \['test', 'train', 'validation'\]"
    ):
        items("dev")


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match=r"a count of 0 or more, got -1\. Omit it for 24,000 items"):
        items("train", -1)


# The pools


def test_pools_are_large():
    first, _, last = NAMES["person"]
    assert min(len(first), len(last), len(NAMES["place"][0])) >= 200
    assert all(len(set(part)) == len(part) for pool in (*NAMES.values(), *FIGURES.values()) for part in pool)


def test_joined_names_double_no_letter_at_the_seam():
    assert joined("Marsh Oak", "ham ton") == ("Marshton", "Oakham", "Oakton")


def test_every_field_names_a_pool():
    for kind in EVENTS.values():
        for outcome in kind["outcomes"]:
            wanted = {newswire.pool(field) for field in newswire.fields_of(kind, outcome)}
            assert wanted <= {*NAMES, *FIGURES, *PHRASES}
            assert set(newswire.fields(outcome["summary"])) <= set(newswire.fields_of(kind, outcome))


def test_whatever_sentences_are_chosen_the_facts_of_the_summary_are_told():
    for kind in EVENTS.values():
        for outcome in kind["outcomes"]:
            sure = set().union(
                *(set.intersection(*(set(newswire.fields(said)) for said in slot)) for slot in outcome["reports"])
            )
            assert set(newswire.fields(outcome["summary"])) <= sure
