"""The page that explains: every figure on it is the library's own."""

import math
import re

import pytest
from cases import CASES

from ngramloss import OBJECTIVES, JointLoss, Objective
from ngramloss.cli import main
from ngramloss.loss.explaining import compare_gradients
from ngramloss.loss.explaining.explain import explain
from ngramloss.loss.explaining.sentence import read

REFERENCE, CANDIDATE = "a b a b c a b d", "a b a b a b a d"


def earnings(page, block):
    lines = page.split("\n\n")[block].splitlines()
    cells = [line.split()[-1] for line in lines[2:-1]]
    return sum(0 if cell == "–" else float(cell) for cell in cells), float(lines[-1].split()[-1])


@pytest.mark.parametrize(
    ("written", "start", "sign"),
    [
        ("matches(2)", 1, -1),
        ("matches(3):released", 1, -1),
        ("rewards(2)", 1, -1),
        ("precision(2)", 0, -1),
        ("precision(1):released", 0, -1),
        ("bag(2)", 1, -1),
        ("bag(2):original", 1, -1),
        ("bag(1):released", 0, -1),
        ("eisl(2)", 0, 1),
        ("ce", 0, 1),
        ("ce(smoothing=0.1)", 0, 1),
        ("eaft", 0, 1),
        ("eaft(alpha=2):released", 0, 1),
        ("soft(2)", 1, -1),
        ("soft(3,kappa=1)", 1, -1),
        ("gated(2)", 1, -1),
        ("near(2)", 1, -1),
        ("accept(3)", 1, -1),
        ("accept(3,alpha=0.2):detached", 0, 1),
        ("accept(2):gated", 0, 1),
        ("near(1,power=0.5)", 1, -1),
        ("dft", 0, 1),
        ("ce(temperature=2)", 0, 1),
        ("tailr", 0, 1),
        ("mixce(eta=0.1)", 0, 1),
        ("unlikelihood", 0, 1),
    ],
)
def test_what_the_windows_earn_adds_up_to_the_value(written, start, sign):
    earned, value = earnings(explain(REFERENCE, CANDIDATE, written, [0.8]), 1)
    assert start + sign * earned == pytest.approx(value, abs=5e-4)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_every_objective_is_explained_with_the_librarys_value(case):
    page = explain(REFERENCE, CANDIDATE, str(case.term), [0.8])
    sentence, _ = read(REFERENCE, CANDIDATE, [0.8])
    value = JointLoss([case.term])(sentence.logits, sentence.labels)
    assert page.endswith(f"\n{case.term} = {value:.4f}")


def test_confidence_is_the_probability_of_the_candidate():
    sentence, _ = read("a b c", "a c c", [0.9, 0.5, 0.7])
    assert sentence.stats.best_logp.exp().tolist() == [pytest.approx([0.9, 0.5, 0.7])]
    assert sentence.stats.label_logp.exp().tolist() == [pytest.approx([0.9, 0.5 / 3, 0.7])]


@pytest.mark.parametrize(("candidate", "mended"), [("a", "filled with '_'"), ("a b c d", "truncated")])
def test_a_candidate_of_another_length_is_mended_with_a_note(candidate, mended):
    page = explain("a b c", candidate, "matches(1)")
    assert re.search(rf"note: the reference has 3 words and the candidate \d\. .* the candidate was {mended}\.", page)


def test_a_filler_matches_nothing_not_even_its_own_sign():
    assert explain("a _ b", "a", "matches(1)").endswith("matches(1) = 0.7000")


def test_rewards_show_no_copies_beside_a_window_out_of_place():
    page = explain("a b c a b", "a b a b d", "rewards(2)")
    assert "   4  b d                 –       –       0.8100       –" in page


def test_a_long_sentence_is_shown_in_strips_that_fit_a_terminal():
    words = " ".join(f"unmistakable{i}" for i in range(30))
    header = explain(words, words, "matches(2)").split("matches(2) = 1")[0]
    assert max(map(len, header.splitlines())) <= 100
    assert header.split().count("unmistakable29") == 2
    assert header.count("confidence") == 6


def test_figures_nobody_could_read_are_written_as_powers_of_ten():
    page = explain("a b c", "a b d", "eisl(2)", [1.0])
    assert page.endswith("eisl(2) = 5e+29")
    assert "-0.0000" not in page


def test_a_reference_shorter_than_n_says_so():
    assert "the reference is shorter than n, so there are no windows" in explain("a b", "a b", "matches(3)")


@pytest.mark.parametrize(
    ("written", "weight"), [("dft", "0.0500"), ("tailr(gamma=0)", "1.0000"), ("mixce(eta=0.5)", "0.5250")]
)
def test_the_weight_of_a_token_is_shown(written, weight):
    assert f"   3  c               0.0500  {weight}" in explain("a b c", "a b d", written, [0.8])


def test_words_that_are_penalised_are_named():
    assert re.search(r"\n   4  c +a b +0\.", explain("a b a c", "a b a a", "unlikelihood", [0.8]))


@pytest.mark.parametrize("written", ["soft(2)", "near(2)", "dft", "tailr(min_weight=0)", "convex", "unlikelihood"])
def test_a_word_of_probability_zero_is_explained_without_nan(written):
    assert "nan" not in explain("a b c", "a b d", written, [1.0])


def test_certainty_is_allowed():
    assert explain("a b", "a b", "ce + matches(2)", [1.0]).endswith("ce + matches(2) = 0.0000 + 0.0000 = 0.0000")


def test_an_objective_of_ones_own_is_explained_by_its_value(monkeypatch):
    monkeypatch.setitem(OBJECTIVES, "half", Objective(lambda stats, labels: stats.lse[:, 0] * 0 + 0.5, least_n=None))
    page = explain("a b", "a b", "ce + 2*half")
    assert "half = your own objective\n  its windows are not shown\n  value 0.5000" in page
    assert page.endswith("2·0.5000 = 1.1054")


# Objectives that compare candidates

OTHERS = ["we met", "we met in may", "in june"]


@pytest.mark.parametrize("written", ["rank", "rank(margin=0.5,alpha=1)", "risk", "risk(sharpness=1)"])
def test_what_candidates_cost_adds_up_to_the_value(written):
    block = explain("we met in may", "we met on may", written, others=OTHERS).split("\n\n")[1].splitlines()
    costs = (
        [float(line.split()[-1]) for line in block[-4:-1]]
        if "rank" in written
        else [float(line.split()[-1]) for line in block[2:-1]]
    )
    assert sum(costs) == pytest.approx(float(block[-1].split()[-1]), abs=3e-4)


def test_candidates_are_shown_in_the_order_of_their_scores_with_what_is_compared():
    page = explain("we met in may", "we met on may", "ce + prefer(beta=1,alpha=1)", [0.9, 0.9, 0.9, 0.9], OTHERS)
    rows = [line.split() for line in page.splitlines() if line.startswith("      ")]
    assert [" ".join(row[1:-4]) for row in rows] == ["we met in may", "we met on may", "we met", "in june"]
    assert [row[-4] for row in rows] == ["1.0000", "0.7500", "0.6667", "0.3333"]
    f = [(3 * math.log(0.9) + math.log(0.1 / 6)) / 4, math.log(0.9), math.log(0.9), math.log(0.1 / 6)]
    assert [float(row[-1]) for row in rows] == pytest.approx(f, abs=5e-5)
    assert [float(row[-3]) for row in rows] == pytest.approx([f[0] * 4, f[1] * 4, f[2] * 2, f[3] * 2], abs=5e-5)
    value = math.log(1 + math.exp(f[3] - f[0]))
    assert page.endswith(f"prefer(beta=1,alpha=1) = 1.1026 + {value:.4f} = {1.10260 + value:.4f}")


def test_other_outputs_are_given_where_they_are_read_and_nowhere_else(capsys):
    pair = ["explain", "--reference", "we met in may", "--candidate", "we met on may"]
    for wrong, sentence in [
        (
            ["--objective", "ce + rank"],
            "'ce + rank' compares several outputs of a model, but there is only one candidate. Give more with --others.",
        ),
        (
            ["--others", "we met"],
            "no term of 'matches(2)' compares outputs: add rank, risk or prefer, or leave --others out.",
        ),
        (["--others", "we met", "--compare", "ce", "lcs"], "no term of 'ce' or 'lcs' compares outputs"),
        (["--others", "a b c d e", "--objective", "rank"], "an output must have 1 to 4 words, got 5."),
        (["--others", " ", "--objective", "rank"], "an output must have 1 to 4 words, got 0."),
    ]:
        assert main([*pair, *wrong]) == 2
        assert sentence in capsys.readouterr().err
    assert main([*pair, "--others", *OTHERS, "--objective", "2*ce@until(0.5) + rank@from(0.5)"]) == 0
    out = capsys.readouterr().out
    assert "-0.0000" not in out
    assert "2*ce@until(0.5) + rank@from(0.5) = 0·" in out, "with the weights of the end"


def test_an_objective_of_ones_own_shows_the_candidates_it_compares(monkeypatch):
    monkeypatch.setitem(
        OBJECTIVES, "widest", Objective(lambda stats: stats.length.amax(-1).double(), least_n=None, reads="candidates")
    )
    page = explain("we met in may", "we met on may", "widest", others=OTHERS)
    assert "widest = your own objective\n  order  output" in page
    assert page.endswith("widest = 4.0000")


@pytest.mark.parametrize("written", ["rank", "risk(sharpness=1)", "prefer"])
def test_an_impossible_candidate_is_explained_without_nan(written):
    page = explain("we met in may", "we met on may", written, [1.0], ["we met at may", "in june"])
    assert "nan" not in page
    assert "inf" not in page


# Gradients, side by side


@pytest.mark.parametrize("confidence", [[0.6], [0.9, 0.5, 0.8]])
@pytest.mark.parametrize("objective", ["ce", "ce + matches(2,3)", "rewards(2) + bag(2)", "ce(smoothing=0.1) + lcs"])
def test_a_push_is_what_the_loss_loses_when_a_logit_rises(objective, confidence):
    found, notes = compare_gradients.pushes("a b c", "a b d", [objective], confidence)
    assert notes == []
    assert [(push.position, push.word, push.role) for push in found] == [
        (1, "a", "both"),
        (2, "b", "both"),
        (3, "c", "reference"),
        (3, "d", "predicted"),
    ]
    sentence, _ = read("a b c", "a b d", confidence)
    loss_fn, small = JointLoss(objective), 1e-5
    for push, index in zip(found, [0, 1, 2, 3], strict=True):  # a, b, c, d in the order in which they occur
        losses = []
        for sign in (1, -1):
            logits = sentence.logits.clone()
            logits[0, push.position - 1, index] += sign * small
            losses.append(loss_fn(logits, sentence.labels).item())
        assert push.by[0] == pytest.approx(-(losses[0] - losses[1]) / (2 * small), abs=1e-6)
        assert push.probability == pytest.approx(sentence.logits[0].softmax(-1)[push.position - 1, index].item())


def test_a_push_of_candidates_is_what_the_loss_loses_when_a_logit_rises():
    objectives = ["ce", "rank(margin=0.5,alpha=1)", "ce + risk(sharpness=1) + prefer"]
    found, _ = compare_gradients.pushes("a b c", "a b d", objectives, [0.8], ["a", "b c", "a b c"])
    sentence, _ = read("a b c", "a b d", [0.8], ["a", "b c", "a b c"])
    for number, objective in enumerate(objectives):
        loss_fn, small = JointLoss(objective), 1e-5
        for push, index in zip(found, [0, 1, 2, 3], strict=True):
            losses = []
            for sign in (1, -1):
                logits = sentence.logits.clone()
                logits[0, push.position - 1, index] += sign * small
                losses.append(loss_fn(logits, sentence.labels, candidates=sentence.candidates(loss_fn, logits)).item())
            assert push.by[number] == pytest.approx(-(losses[0] - losses[1]) / (2 * small), abs=1e-6)


def test_a_model_that_is_sure_gets_numbers(capsys):
    assert (
        main(
            [
                "explain",
                "--reference",
                "a b",
                "--candidate",
                "a c",
                "--confidence",
                "1",
                "--compare",
                "ce",
                "matches(2)",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "nan" not in shown
    assert shown.splitlines()[1].split() == ["at", "word", "role", "probability", "ce", "matches(2)"]


def test_words_that_are_cut_off_and_unknown_objectives_are_said(capsys):
    pair = ["explain", "--reference", "the cat sat", "--candidate", "the cat lay down"]
    assert main([*pair, "--compare", "ce", "ce + matches(2)"]) == 0
    assert "truncated" in capsys.readouterr().out
    assert main([*pair, "--compare", "ce", "cheese"]) == 2
    assert "cheese" in capsys.readouterr().err


def test_documents_of_a_packed_row_are_explained_one_by_one_and_the_row_has_their_loss():
    text = explain(["a b c", "b c d e"], ["b c c", "b c d d"], "ce + matches(2)", [0.9])
    assert text.count("document ") == 2
    first, second = (explain(*pair, "matches(2)", [0.9]) for pair in (("a b c", "b c c"), ("b c d e", "b c d d")))
    values = [float(own.rsplit(" = ", 1)[1]) for own in (first, second)]
    assert text.rstrip().rsplit(" + ", 1)[1].split(" = ")[0] == f"{sum(values) / 2:.4f}"
    assert "the row: 2 documents, 7 words" in text
    # "b c" of the first candidate is in both references, and earns in its own only
    assert "×2" not in text


@pytest.mark.parametrize(
    ("reference", "candidate", "objective", "message"),
    [
        (["a b", "c"], ["a b"], "ce", "a candidate for each reference: got 2 references and 1 candidates"),
        (["a b", "c"], ["a b", "c d"], "ce", "document 2: the reference has 1 words and the candidate 2"),
        (["a b", "c"], ["a b", "c"], "ce + rank", "compares outputs for one reference"),
    ],
)
def test_documents_that_cannot_be_explained_together_are_refused(reference, candidate, objective, message):
    with pytest.raises(ValueError, match=message):
        explain(reference, candidate, objective)
