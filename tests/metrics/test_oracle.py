"""The greedy oracle takes what slow plain Python takes, and is a baseline."""

import json

from hypothesis import given
from hypothesis import strategies as st

from ngramloss import cli
from ngramloss.data import Example
from ngramloss.generation.baselines import baseline_writer, is_baseline
from ngramloss.metrics.oracle import greedy_oracle

sentences = st.lists(st.sampled_from("abcd"), max_size=5).map(" ".join)


def f_measure(chosen, gold):
    shared = len([one for one in chosen if one in gold])
    precision = shared / len(chosen) if chosen else 0.0
    recall = shared / len(gold) if gold else 0.0
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge(texts, reference):
    """ROUGE-1 + ROUGE-2 of some sentences: an n-gram counts once, and none reaches over the end of a sentence."""
    total = 0.0
    for n in (1, 2):
        chosen, gold = [], []
        for found, parts in ((chosen, texts), (gold, [reference])):
            for part in parts:
                words = part.split()
                for start in range(len(words) - n + 1):
                    if words[start : start + n] not in found:
                        found.append(words[start : start + n])
        total += f_measure(chosen, gold)
    return total


def oracle(document, references, most):
    """The definition: again and again the sentence that adds most, while one adds something."""
    chosen, best = [], 0.0
    for _ in range(most):
        values = {
            place: max(rouge([document[one] for one in [*chosen, place]], gold) for gold in references)
            for place in range(len(document))
            if place not in chosen
        }
        if not values or max(values.values()) <= best:
            break
        best = max(values.values())
        chosen.append(next(place for place, value in values.items() if value == best))
    return sorted(chosen)


@given(st.lists(sentences, max_size=6), st.lists(sentences, min_size=1, max_size=2), st.integers(1, 4))
def test_the_search_takes_what_its_definition_takes(document, references, most):
    assert greedy_oracle(document, references, most=most) == oracle(document, references, most)


def test_edges():
    assert greedy_oracle([], ["a"]) == []
    assert greedy_oracle(["", "!"], ["a"]) == []
    assert greedy_oracle(["b"], ["a"]) == []
    assert greedy_oracle(["A."], ["a"]) == [0]
    assert greedy_oracle(["a b", "a b"], ["a b"]) == [0], "a second copy adds nothing"
    assert greedy_oracle(["北京下雨", "路关了"], ["北京的路关了"]) == [0, 1]


def test_it_is_a_baseline_with_or_without_a_number():
    assert [is_baseline(name) for name in ("ext-oracle", "ext-oracle-2", "ext-oracle-")] == [True, True, False]
    example = Example(
        "1", "It rained. Roads were closed. Dogs bark. It was Monday.", "It rained. Roads closed. Was Monday."
    )
    write = baseline_writer("ext-oracle", "any", "test")
    assert write([example]) == ["It rained.\nRoads were closed.\nIt was Monday."]
    assert baseline_writer("ext-oracle-1", "any", "test")([example]) == ["It was Monday."]
    other = example._replace(references=("nothing", "Dogs bark."))
    assert write([other]) == ["Dogs bark."], "the best of several references"


def test_generate_and_score_take_it_by_name(tmp_path, capsys):
    assert cli.main(["generate", "ext-oracle", "--data", "newswire", "--limit", "3", "--out", str(tmp_path / "o")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "o" / "predictions.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert cli.main(["generate", "lead-2", "--data", "newswire", "--limit", "3", "--out", str(tmp_path / "l")]) == 0
    capsys.readouterr()
    assert cli.main(["score", str(tmp_path / "o"), str(tmp_path / "l"), "--json"]) == 0
    ours, lead = (system["scores"]["rouge1"] for system in json.loads(capsys.readouterr().out)["systems"])
    assert ours > lead
