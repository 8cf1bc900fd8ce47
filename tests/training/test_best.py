"""What selects the best checkpoint: a term of the objective, or a score of generated texts."""

import math

import numpy as np
import pytest

import ngramloss as ng
from ngramloss import recipe
from ngramloss.data import Example
from ngramloss.metrics.registry import METRICS
from ngramloss.metrics.scores import Pooled, Scores, corpus_score
from ngramloss.scoring import results, scored_texts
from ngramloss.training import prepare, validation
from ngramloss.training.best import Best, best_of, is_better, loss_note, tie_note
from ngramloss.training.run import run_of
from ngramloss.training.validation import generated_score, notes_on, score_of


def chosen(name, *overrides):
    return best_of(recipe.load("demo", ["objective=ce + matches(2)", f"train.best={name}", *overrides]))


def complaint(name, *overrides):
    with pytest.raises(ng.UserError) as mistake:
        chosen(name, *overrides)
    return str(mistake.value)


@pytest.mark.parametrize("name", ["ce", "loss", "matches(2)"])
def test_the_lowest_value_of_a_term_is_best(name):
    assert chosen(name) == Best(name, "", False, {})


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("rouge1", "rouge"),
        ("rouge2", "rouge"),
        ("rougeL", "rouge"),
        ("rougeLsum", "rouge"),
        ("bleu", "bleu"),
        ("chrf", "chrf"),
        ("names_right", "facts"),
    ],
)
def test_the_highest_score_of_generated_texts_is_best(name, metric):
    assert chosen(name) == Best(name, metric, True, {})


def mistakes(predictions):
    """How many letters are wrong."""
    return Scores({"mistakes": [float(len(text)) for text in predictions]}, "mistakes")


def test_the_entry_of_a_metric_says_which_values_are_better():
    ng.METRICS["mistakes"] = ng.Metric(
        mistakes, reads=("predictions",), scores={"mistakes": ng.Score("Mistakes", "wrong letters", "lower")}
    )
    assert chosen("mistakes") == Best("mistakes", "mistakes", False, {})
    ng.METRICS["plain"] = ng.Metric(mistakes, reads=("predictions",))
    assert chosen("plain") == Best("plain", "plain", True, {})


def test_a_term_of_the_objective_comes_before_a_score_of_the_same_name():
    ng.METRICS["matches"] = ng.Metric(mistakes, reads=("predictions",))
    assert chosen("matches(2)").metric == ""
    assert chosen("matches").metric == "matches"


def test_a_term_that_compares_candidates_has_no_value_in_validation():
    assert complaint("rank", "objective=ce + rank") == (
        "train.best: rank compares candidates, which validation does not have. Choose one of loss, ce, or a score of generated texts such as rouge2."
    )


def test_without_terms_that_compare_candidates_there_may_be_no_loss_to_choose_by():
    for objective in ("rank", "0*ce + 10*rank(alpha=1)", "ce@until(0.5) + rank@from(0.5)"):
        assert "validation has no loss. Choose ce" in complaint("loss", f"objective={objective}")
    assert chosen("loss", "objective=0.1*ce + rank").name == "loss"


SCORES = "rouge1, rouge2, rougeL, rougeLsum, bleu, chrf, names_right, figures_right"


def test_an_unknown_name_gets_the_terms_and_the_scores():
    assert complaint("rogue2") == (
        f"train.best: 'rogue2' is neither a term nor a score. Did you mean 'rouge2'? Terms of this objective: loss, ce, matches(2). Scores of generated texts: {SCORES}."
    )
    assert "Did you mean 'rougeL'?" in complaint("rouge")
    assert "Did you mean" not in complaint("perplexity")


@pytest.mark.parametrize(
    ("name", "metric"), [("bertscore", "bertscore"), ("wmd", "wmd"), ("summac_conv", "summac"), ("factcc", "factcc")]
)
def test_a_score_that_needs_a_model_of_its_own_is_refused(name, metric):
    assert complaint(name) == (
        f"train.best: {name} needs a model or a file of its own, which is not loaded beside the model in training. Choose a term, or one of {SCORES}. "
        f"Score the finished run with {metric}: ngramloss score RUN --metrics {metric}."
    )


def test_a_score_that_only_describes_texts_is_refused():
    assert complaint("words").startswith(
        "train.best: words only describes texts: neither high nor low values are better. Choose a term, or one of rouge1,"
    )


def test_a_score_whose_package_is_missing_says_how_to_install_it():
    ng.METRICS["far"] = ng.Metric(mistakes, reads=("predictions",), packages=("no-such-package",))
    assert complaint("far") == "train.best: far needs the package no-such-package: pip install no-such-package."


def test_a_plugin_that_cannot_be_imported_does_not_hinder_the_others(monkeypatch):
    problem = METRICS.problem
    monkeypatch.setattr(METRICS, "problem", lambda name: "broken" if name == "chrf" else problem(name))
    assert chosen("bleu").metric == "bleu"
    assert "bleu, names_right" in complaint("chrf")


def test_options_of_the_metric_are_typed_and_checked():
    assert chosen("rouge2", 'train.best_options=["rouge.tokens=auto", "rouge.stemmer=false"]').options == {
        "tokens": "auto",
        "stemmer": False,
    }
    assert "train.best_options: rouge.tokens: must be one of script, default, unicode" in complaint(
        "rouge2", 'train.best_options=["rouge.tokens=words"]'
    )
    assert "train.best_options: rouge.token: unknown option. Did you mean 'tokens'?" in complaint(
        "rouge2", 'train.best_options=["rouge.token=auto"]'
    )
    for wrong in ("bleu.tokenize=zh", "tokens=auto", "rouge.tokens"):
        assert f"got '{wrong}'" in complaint("rouge2", f'train.best_options=["{wrong}"]')
    assert "train.best_options: ce is a term and has no options" in complaint(
        "ce", 'train.best_options=["rouge.tokens=auto"]'
    )


@pytest.mark.parametrize("name", ["ce", "loss", "last"])
def test_settings_of_a_score_are_said_to_be_without_effect_where_nothing_is_scored(messages, name):
    changes = ["train.best_limit=100", "train.best_beams=4"]
    changes += ['train.best_options=["rouge.tokens=auto"]'] if name == "last" else []
    prepare._judged(run_of(recipe.load("demo", [f"train.best={name}"])), None)
    prepare._judged(run_of(recipe.load("demo", ["train.best=rouge2", *changes])), None)
    assert messages == []
    prepare._judged(run_of(recipe.load("demo", [f"train.best={name}", *changes])), None)
    assert messages == [
        f"{change.partition('=')[0]} is not used: no texts are generated for train.best = {name}." for change in changes
    ]


@pytest.mark.parametrize(
    ("value", "than", "higher", "better"),
    [
        (1.0, 2.0, False, True),
        (2.0, 2.0, False, False),
        (3.0, 2.0, False, False),
        (3.0, 2.0, True, True),
        (2.0, 2.0, True, False),
        (1.0, 2.0, True, False),
        (math.nan, 2.0, True, False),
        (math.nan, 2.0, False, False),
        (0.0, -math.inf, True, True),
        (0.0, None, True, True),
        (0.0, None, False, True),
        (math.nan, None, False, False),
    ],
)
def test_a_value_is_better_if_it_is_on_the_right_side(value, than, higher, better):
    assert is_better(value, than, higher=higher) is better


ALWAYS_0 = (
    "rouge1 was 0.0000 in all 3 validations, so it could not select a checkpoint: the model has the weights of the first "
    "validation, at step 5. Choose another train.best; train.best=last takes the last weights."
)


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("rouge1", [0.0, 0.0, 0.0], ALWAYS_0),
        ("rouge1", [0.0, math.nan, 0.0, 0.0], ALWAYS_0),
        ("rouge1", [1.0, 2.5, 2.5], ""),
        ("rouge1", [2.5, 1.0, 1.0], ""),
        ("ce", [2.5, 2.5, 1.0], ""),
        ("rouge1", [0.0], ""),
        ("rouge1", [], ""),
        ("rouge1", [math.nan, math.nan], ""),
    ],
)
def test_if_all_values_are_the_same_it_is_said(name, values, sentence):
    history = [{"step": 5, "loss": 0.0}, {"step": 10, "loss": 0.0}]
    history += [{"step": 5 * number, f"eval_{name}": value} for number, value in enumerate(values, 1)]
    note = tie_note(chosen(name), history)
    assert note.startswith(sentence)
    assert bool(note) == bool(sentence)


@pytest.mark.parametrize(
    ("name", "losses", "says"),
    [
        ("ce", [3.4, 3.3], True),
        ("ce", [3.3, 3.4], False),
        ("ce", [3.3, 3.3], False),
        ("ce", [3.4, math.nan], False),
        ("loss", [3.4, 3.3], False),
        ("rouge2", [3.4, 3.3], False),
        ("ce", [], False),
    ],
)
def test_if_the_whole_objective_was_lower_elsewhere_it_is_said(name, losses, says):
    history = [{"step": 1, "loss": 0.0}, *({"step": 5 * n, "eval_loss": loss} for n, loss in enumerate(losses, 1))]
    note = loss_note(chosen(name), 5, history)
    assert bool(note) == says
    if says:
        assert note.startswith(
            "ce selected the weights of step 5, but the loss of the whole objective was lowest at step 10 (3.3000, and "
            "3.4000 there)."
        )


def test_the_last_weights_can_be_asked_for():
    assert chosen("last") == Best("last")
    told = "train.early_stopping: needs a term or score to watch, but train.best is last."
    assert told in complaint("last", "train.early_stopping=3")


# The score


REFERENCES = ["the cat sat on the mat", "a dog ran home", "rain is expected in the north"]
TEXTS = ["the cat sat on a mat", "the dog ran", "rain in the north is expected"]
EXAMPLES = [Example(f"newswire-test-{number}", "document", reference) for number, reference in enumerate(REFERENCES)]


GENERATION = {"settings": None, "tokenizer": None, "batch_size": 1}


@pytest.fixture
def model_is_its_texts(monkeypatch):
    """What a model generates: the "model" is a list of texts, and a source the number of one."""
    monkeypatch.setattr(validation, "write_texts", lambda texts, sources, **_: [texts[row] for (row,) in sources])


def generated(name, examples=EXAMPLES):
    return generated_score(chosen(name), [[row] for row in range(len(examples))], examples=examples, **GENERATION)


@pytest.mark.usefixtures("model_is_its_texts")
@pytest.mark.parametrize("name", ["rouge1", "rouge2", "rougeL", "rougeLsum", "bleu", "chrf", "names_right"])
def test_the_score_is_the_one_that_the_command_score_computes(name, tmp_path):
    found = generated(name)(TEXTS)
    task = scored_texts.DocumentSet([example.id for example in EXAMPLES], [[text] for text in REFERENCES], None)
    scored = results.score_systems(
        scored_texts.Aligned(task, ["a"], [TEXTS], [None], []), [chosen(name).metric], samples=1, shuffles=0
    )
    assert found[name] == pytest.approx(scored.scores[name][0].value)
    assert found["generation_runtime"] >= 0
    assert list(found) == [name, "generation_runtime"]


@pytest.mark.usefixtures("model_is_its_texts")
def test_several_references_are_all_read():
    examples = [
        example._replace(references=(example.target, text)) for example, text in zip(EXAMPLES, TEXTS, strict=True)
    ]
    assert generated("rouge2", examples=examples)(TEXTS)["rouge2"] == 100


def test_a_metric_that_cannot_score_these_texts_is_told_before_training():
    examples = [example._replace(id="mine") for example in EXAMPLES]
    with pytest.raises(ng.UserError, match=r"train\.best: facts works only on the built-in corpus newswire"):
        notes_on(chosen("names_right"), examples)
    assert notes_on(chosen("names_right"), EXAMPLES) == []


def test_a_score_that_an_option_turns_on_is_told_before_training():
    with pytest.raises(
        ng.UserError,
        match=r"rouge does not compute rouge2_recall with these options, only rouge1, rouge2, rougeL, rougeLsum\. An option in train\.best_options",
    ):
        notes_on(chosen("rouge2_recall"), EXAMPLES)
    with_parts = chosen("rouge2_recall", 'train.best_options=["rouge.parts=true"]')
    assert notes_on(with_parts, EXAMPLES) == []
    assert score_of(with_parts, EXAMPLES, REFERENCES) == 100


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0] * 3, r"the metric 'mine' must return ngramloss\.Scores, got list"),
        (Scores({"mine": [1.0]}, ""), "returned 1 values for 'mine', expected 3 values"),
        (Scores({"other": [1.0] * 3}, ""), "returned the score 'other', which its entry does not name"),
    ],
)
def test_a_metric_that_returns_something_else_is_told_before_training(returned, sentence):
    ng.METRICS["mine"] = ng.Metric(lambda predictions, *, progress: returned, reads=("predictions",))
    with pytest.raises(ng.UserError, match=sentence):
        notes_on(chosen("mine"), EXAMPLES)


def test_texts_that_the_metric_does_not_read_well_get_a_note():
    examples = [Example("1", "文", "今天天气很好")]
    (note,) = notes_on(chosen("rouge2", 'train.best_options=["rouge.tokens=default"]'), examples)
    assert "the default rules read only a–z and 0–9" in note
    assert notes_on(chosen("rouge2"), examples) == []
    assert score_of(chosen("rouge2"), examples, ["今天天气很好"]) == 100


def test_the_corpus_score_leaves_out_documents_without_one():
    assert corpus_score(Scores({"a": [1.0, math.nan, 4.0]}, ""), "a") == 2.5
    assert math.isnan(corpus_score(Scores({"a": [math.nan]}, ""), "a"))
    pooled = Pooled(np.array([[1.0, 2.0], [math.nan, 5.0], [2.0, 2.0]]), lambda sums: sums[..., 0] / sums[..., 1])
    assert corpus_score(Scores({"a": [50.0, 0.0, 100.0]}, "", {"a": pooled}), "a") == 0.75
    assert math.isnan(
        corpus_score(Scores({"a": [0.0]}, "", {"a": pooled._replace(statistics=np.array([[math.nan, 1.0]]))}), "a")
    )


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_processes_share_the_sources_equally_and_agree_on_the_score(monkeypatch, count):
    """Both processes, one after the other: what each would send is kept for the first."""
    import torch

    texts = [f"text {number}" for number in range(count)]
    written, scored = {}, []
    for process in (1, 0):

        def write(model, sources, process=process, **_):
            written[process] = [texts[row] for (row,) in sources]
            return written[process]

        monkeypatch.setattr(validation, "write_texts", write)

        score = generated_score(
            chosen("chrf"),
            [[row] for row in range(count)],
            examples=[Example(str(row), "d", text) for row, text in enumerate(texts)] if process == 0 else (),
            process=process,
            processes=2,
            **GENERATION,
        )
        monkeypatch.setattr(
            torch.distributed,
            "all_gather_object",
            lambda shares, mine: shares.__setitem__(slice(None), [written.get(rank, mine) for rank in (0, 1)]),
        )
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", scored.append)
        value = score(None)["chrf"]
    assert len(written[0]) == len(written[1]) == math.ceil(count / 2)
    assert value == 100
    assert scored == [[None], [100.0]]  # the other process takes what the first sends
