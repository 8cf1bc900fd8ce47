"""ng.rewards: a batch of completions in one call, the numbers of the metrics, in the form that TRL's trainers take."""

import pickle
import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU, CHRF

import ngramloss as ng
from ngramloss import METRICS, Metric, Scores, rewards
from ngramloss.errors import UserError

TEXTS = ["the cat sat on the mat", "a dog slept", "", "The cat, sat on the mat!"]
GOLDS = ["the cat sat on a mat", "a dog slept all day", "nothing", "the cat sat"]


def values(reward, completions=TEXTS, golds=GOLDS, **columns):
    return reward(prompts=["p"] * len(completions), completions=completions, reference=golds, **columns)


# The numbers


@pytest.mark.parametrize("score", ["rouge1", "rouge2", "rougeL", "rougeLsum"])
def test_rouge_is_that_of_the_usual_loop(score):
    scorer = RougeScorer([score], use_stemmer=True)
    loop = [scorer.score(gold, text)[score].fmeasure for text, gold in zip(TEXTS, GOLDS, strict=True)]
    assert values(rewards.rouge(score)) == pytest.approx(loop, abs=1e-12)


def test_rouge_alone_is_the_mean_of_1_2_and_lsum():
    parts = [values(rewards.rouge(score)) for score in ("rouge1", "rouge2", "rougeLsum")]
    assert values(rewards.rouge()) == pytest.approx([sum(each) / 3 for each in zip(*parts, strict=True)])


def test_bleu_and_chrf_are_those_of_sentences():
    pairs = list(zip(TEXTS, GOLDS, strict=True))
    by_hand = [BLEU(effective_order=True).sentence_score(text, [gold]).score / 100 for text, gold in pairs]
    assert values(rewards.bleu()) == pytest.approx(by_hand)
    for order in (0, 2):
        by_hand = [CHRF(word_order=order).sentence_score(text, [gold]).score / 100 for text, gold in pairs]
        assert values(rewards.chrf(word_order=order)) == pytest.approx(by_hand)


def test_options_are_those_of_the_metric():
    assert values(rewards.rouge("rouge1", stemmer=False), ["cats"], ["cat"]) == [0.0]
    assert values(rewards.rouge("rouge1"), ["cats"], ["cat"]) == [1.0]
    assert values(rewards.rouge("rouge1", tokens="default"), ["猫"], ["猫"]) == [0.0]
    assert values(rewards.rouge("rouge1"), ["猫"], ["猫"]) == [1.0]
    with pytest.raises(UserError, match="stemming"):
        rewards.rouge(stemming=False)


def credit_by_hand(text, golds, n):
    """The definition, in the dumbest Python: of words without marks."""

    def one(words, gold):
        total = 0.0
        for t in range(len(words)):
            over = credited = 0
            for length in n:
                for start in range(len(words) - length + 1):
                    if not start <= t < start + length:
                        continue
                    over += 1
                    g = words[start : start + length]
                    count = sum(gold[at : at + length] == g for at in range(len(gold) - length + 1))
                    earlier = sum(words[at : at + length] == g for at in range(start))
                    credited += earlier < count
            total += credited / over if over else 0
        return total / len(words) if words else 0.0

    return max(one(text.split(), gold.split()) for gold in golds)


sentences = st.lists(st.sampled_from("abc"), max_size=9).map(" ".join)
references = st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=3)
lengths = st.lists(st.integers(1, 4), min_size=1, max_size=3, unique=True)


@given(st.lists(st.tuples(sentences, references), min_size=1, max_size=4), lengths)
def test_credit_is_its_definition(rows, n):
    found = values(rewards.credit(*n), [text for text, _ in rows], [golds for _, golds in rows])
    assert found == pytest.approx([credit_by_hand(text, golds, n) for text, golds in rows], abs=1e-12)
    assert all(0 <= value <= 1 + 1e-12 for value in found)


@pytest.mark.parametrize(
    ("text", "gold", "n", "value"),
    [
        ("the cat sat here", "so the cat sat", (2,), 0.625),
        ("a a a", "a a", (1,), 2 / 3),  # the third copy has no counterpart
        ("a a a", "a a", (2,), 0.5),  # one window of two: 1, 1/2, 0
        ("a b", "a b", (3,), 0.0),  # no window
        ("a b", "a b", (2, 3), 1.0),  # the longer ones cover nothing
        ("", "a", (1,), 0.0),
        ("The CAT, sat!", "the cat sat", (1, 2), 1.0),
        ("北京很好", "北京", (2,), 0.375),  # characters: 1, 1/2, 0, 0
    ],
)
def test_credit_of_small_texts(text, gold, n, value):
    assert values(rewards.credit(*n), [text], [gold]) == [pytest.approx(value)]


# The form


def test_messages_are_read_as_what_the_assistant_says():
    reward = rewards.rouge("rouge1")
    said = [{"role": "assistant", "content": "the cat sat"}]
    called = [
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "tool", "content": "dogs"},
        {"role": "assistant", "content": [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sat"}]},
    ]
    assert values(reward, [said, called], ["the cat sat"] * 2) == [1.0, 1.0]
    assert values(reward, [[]], ["the cat sat"]) == [0.0]
    assert values(reward, ["the cat sat"], [said]) == [1.0], "a reference may be messages, too"


def test_several_references_are_used_as_the_metric_does():
    both = ["a dog slept", "the cat sat"]
    assert values(rewards.rouge("rouge1"), ["the cat sat"] * 2, [both, both[:1]]) == [1.0, 0.0]
    assert values(rewards.credit(2), ["the cat sat"], [both]) == [1.0]
    known = BLEU(effective_order=True).sentence_score("the cat slept", both).score / 100
    assert values(rewards.bleu(), ["the cat slept"], [both]) == [pytest.approx(known)]


@pytest.mark.parametrize("reward", [rewards.rouge(), rewards.bleu(), rewards.chrf(), rewards.credit(2)], ids=str)
def test_a_missing_reference_is_no_reward_and_moves_no_other(reward):
    whole = values(reward)
    assert values(reward, TEXTS, [None, GOLDS[1], [], GOLDS[3]]) == [None, whole[1], None, whole[3]]
    assert values(reward, TEXTS, [None] * 4) == [None] * 4
    assert values(reward, [], []) == []


def test_other_columns_and_positions_do_not_matter():
    reward = rewards.rouge("rouge2", reference="summary")
    assert reward(["p"], ["a b"], summary=["a b"], trainer_state=None, log_extra=print, completion_ids=[[1]]) == [1.0]


def test_names_are_for_logs_and_rewards_can_be_pickled():
    every = [rewards.rouge("rouge2"), rewards.rouge(), rewards.bleu(), rewards.chrf(), rewards.credit(2, 3)]
    assert [each.__name__ for each in every] == ["rouge2", "rouge", "bleu", "chrf", "credit(2,3)"]
    for each in every:
        again = pickle.loads(pickle.dumps(each))
        assert (again.__name__, values(again)) == (each.__name__, values(each))
    assert repr(rewards.rouge("rouge2", reference="summary")) == "<reward rouge2 against 'summary'>"


def test_a_metric_of_a_plugin_is_a_reward():
    METRICS["halves"] = Metric(lambda references, predictions: Scores({"halves": [50.0] * len(predictions)}, "halves"))
    assert values(rewards.metric("halves")) == [0.5] * 4


@pytest.mark.parametrize("text", ["我们五月见面", "Мы встретились в мае"])
def test_texts_that_a_metric_does_not_read_are_said_once(text):
    """An equal text would earn 0, and a training would learn from nothing."""
    reward = rewards.rouge(tokens="default")
    with pytest.warns(UserWarning, match=r"the reward rouge: .*tokens=auto.* such as rouge\(tokens="):
        assert reward(["p"], [text], reference=[text]) == [0.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reward(["p"], [text], reference=[text]) == [0.0]
        assert rewards.rouge()(["p"], [text], reference=[text]) == [1.0]
        rewards.rouge()(["p"], ["we met"], reference=["we met"])


def test_large_batches_stay_in_this_process(monkeypatch):
    from ngramloss.metrics import candidate_scores

    monkeypatch.setattr(candidate_scores, "IN_PROCESS", 1)
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", None)
    assert values(rewards.rouge("rouge1"), ["a"] * 600, ["a"] * 600) == [1.0] * 600


def test_rewards_need_no_torch():
    program = "import sys; import ngramloss as ng; ng.rewards.rouge(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert "rewards" in dir(ng)


# What is wrong


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rewards.rouge("rouge3"), "rouge: choose from rouge, rouge1, rouge2, rougeL, rougeLsum, got 'rouge3'."),
        (lambda: rewards.metric("shape"), "^metric shape is not a single score"),
        (
            lambda: rewards.credit(),
            r"credit needs different lengths of n-grams, 1 or more, such as credit\(2, 3\); got",
        ),
        (lambda: rewards.credit(0), "credit needs different lengths"),
        (lambda: rewards.credit(2, 2), "credit needs different lengths"),
        (lambda: rewards.credit(2.0), "credit needs different lengths"),
        (lambda: rewards.bleu(reference="completion"), "TRL does not pass the column 'completion' to rewards. Rename"),
        (
            lambda: rewards.bleu()(["p"], ["a"], summary=["a"]),
            "the reward bleu reads the references from a column 'reference', but the rows have 'summary'. Name their",
        ),
        (
            lambda: values(rewards.bleu(), ["a", "b"], ["a"]),
            "lengths differ: 2 completions, 1 references in 'reference'",
        ),
        (lambda: values(rewards.bleu(), [7], ["a"]), "a reward reads texts, or lists of messages .*, got 7"),
        (lambda: values(rewards.bleu(), ["a"], [7]), "a reward reads texts, or lists of messages .*, got 7"),
        (lambda: values(rewards.bleu(), [[{"content": "a"}]], ["a"]), "lists of messages with role and content, got"),
        (
            lambda: values(rewards.bleu(), ["a"], [" "]),
            "a reference in the column 'reference' is blank. Fill it in, or",
        ),
        (lambda: values(rewards.bleu(), ["a"], [["a", ""]]), "a reference in the column 'reference' is blank"),
    ],
)
def test_a_mistake_is_a_sentence(call, sentence):
    with pytest.raises(UserError, match=sentence):
        call()
