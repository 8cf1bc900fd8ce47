"""TRL's trainer with a joint objective: the loss, terms and gradients of each text by itself, in each version of TRL."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS
from rouge_score.rouge_scorer import RougeScorer

import ngramloss

pytestmark = [pytest.mark.adopt, pytest.mark.filterwarnings("ignore")]

OLDER = Path(sys.prefix) / "older"
VERSIONS = {"1.16.0": [], "1.14.2": [str(OLDER)]}
MODES = [
    "completion",
    "prompt",
    "assistant",
    "whole",
    "padding_free",
    "bfd",
    "bfd_split",
    "bfd_assistant",
    "lora",
    "lora_bfd",
]


@pytest.fixture(scope="module", params=VERSIONS)
def runs(request, tmp_path_factory):
    """What ``trl_runs.py`` found with a version of TRL."""
    pytest.importorskip("trl")
    if request.param == "1.14.2" and not (OLDER / "trl").is_dir():
        pytest.skip("no older TRL is installed: make setup does")
    folder = tmp_path_factory.mktemp("trl")
    paths = [*VERSIONS[request.param], str(HELPERS), str(Path(ngramloss.__file__).parents[1])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(folder),
    }
    program = [sys.executable, "-W", "ignore", HELPERS / "trl_runs.py", folder / "found.json"]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "found.json").read_text())
    assert found["version"] == request.param
    return found


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_making_rows_gives_the_terms_of_each_text_apart(runs, mode):
    found = runs["modes"][mode]
    assert found["logged"] == pytest.approx(found["expected"], abs=1e-5)
    assert found["evaluated"] == pytest.approx(found["expected"], abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_a_step_of_several_micro_batches_moves_the_weights_as_the_texts_apart_would(runs, mode):
    assert runs["modes"][mode]["weights"] < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_is_one_forward_pass(runs, mode):
    found = runs["modes"][mode]
    assert found["forwards"] == [found["micro_batches"]] * 2


def test_packed_rows_are_fewer_than_texts(runs):
    assert runs["modes"]["bfd"]["micro_batches"] < runs["modes"]["completion"]["micro_batches"]
    assert runs["modes"]["bfd_split"]["texts"] > runs["modes"]["bfd"]["texts"]


@pytest.mark.parametrize("family", ["llama", "moe"])
def test_what_trl_logs_is_logged_with_the_same_numbers(runs, family):
    for theirs, ours in zip(*runs["stock"][family], strict=True):
        for name in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "aux_loss"):
            for key in (name, f"eval_{name}"):
                if key in theirs and (family, key) != ("moe", "eval_loss"):  # ours is the objective, without the router
                    assert ours[key] == pytest.approx(theirs[key], abs=1e-5), key
    assert {"entropy", "mean_token_accuracy", "num_tokens"} <= ours.keys() | runs["stock"][family][1][0].keys()


def logs(history):
    return [log for log in history if "loss" in log], [log for log in history if "eval_loss" in log][-1]


def test_a_schedule_follows_the_steps_and_its_weight_is_logged(runs):
    (first, second), evaluated = logs(runs["schedules"]["trainer"])
    assert (first["weight/matches(2)"], second["weight/matches(2)"]) == (0, 1)
    assert first["loss"] == pytest.approx(first["ce"], abs=1e-5)
    assert second["loss"] == pytest.approx(second["ce"] + second["matches(2)"], abs=1e-5)
    assert evaluated["eval_loss"] == pytest.approx(evaluated["eval_ce"] + evaluated["eval_matches(2)"], abs=1e-5)


def test_compute_loss_func_with_log_parts_has_schedules_and_terms_too(runs):
    (first, second), evaluated = logs(runs["schedules"]["function"])
    assert first["loss"] == pytest.approx(first["ce"], abs=1e-5)
    assert second["loss"] == pytest.approx(second["ce"] + second["matches(2)"], abs=1e-5)
    exact = logs(runs["schedules"]["trainer"])[1]
    for name in ("eval_ce", "eval_matches(2)"):
        assert evaluated[name] == pytest.approx(exact[name], abs=1e-5)


@pytest.mark.parametrize(
    ("mistake", "told"),
    {
        "wrapped": "packing_strategy='wrapped' puts documents into rows without saying where they begin, and matches(1) reads",
        "eval_packing": "eval_packing=True puts documents into rows without saying where they begin",
        "packed": "padding_free=False puts documents into rows without saying where they begin",
        "dft": "UserError: loss_type='dft' has no effect. Write it in the objective: objective='dft'",
        "smoothing": "UserError: label_smoothing_factor=0.1 has no effect",
        "candidates": "'ce + rank' compares candidates, and rows of SFTTrainer have none",
        "virtual tokens": "adapters that add virtual tokens",
        "function": "NgramSFTTrainer computes its loss from `objective`",
        "head": "lm_head",
        "arguments": "NgramSFTTrainer needs args=trl.SFTConfig(...), got TrainingArguments",
    }.items(),
)
def test_what_cannot_be_done_is_refused_before_training(runs, mistake, told):
    if mistake == "head" and runs["version"] == "1.14.2":  # newer ones refuse an adapter on the head, which we take
        assert not runs["mistakes"][mistake]
    else:
        assert told in runs["mistakes"][mistake]


def test_terms_per_token_take_wrapped_rows(runs):
    assert runs["others"]["wrapped"] > 0


def test_a_compiled_model_has_the_same_loss(runs):
    assert runs["others"]["compiled"] == pytest.approx(runs["modes"]["completion"]["expected"]["loss"], abs=1e-5)


def test_a_model_may_be_given_by_its_name(runs):
    assert runs["others"]["named"] == pytest.approx(runs["modes"]["completion"]["expected"]["loss"], abs=1e-5)


def test_a_version_that_was_not_tested_gets_one_warning_that_names_both(runs):
    (warned,) = runs["others"]["warned"]
    assert "trl 9.9.9 is newer than 1.16.0" in warned


def test_texts_are_scored_while_it_trains(runs):
    (log,) = runs["others"]["scored"]
    assert 0 < log["eval_rouge1"] <= 100
    assert {"eval_rouge2", "eval_rougeL", "eval_loss", "eval_ce"} <= log.keys()


def test_predictions_are_the_models_own_logits(runs):
    assert runs["others"]["logits"] == [1, 9, 13]


def test_grpo_takes_rewards_logs_them_by_name_and_moves_the_weights(runs):
    found = runs["rewarded"]
    scorer = RougeScorer(["rouge1"], use_stemmer=True)
    for prompts, completions, references, values in found["calls"]:
        assert len(prompts) == len(completions) == len(references) == len(values) == 8, "a whole batch in one call"
        pairs = zip(references, completions, strict=True)
        assert values == pytest.approx([scorer.score(gold, said)["rouge1"].fmeasure for gold, said in pairs])
    assert len(found["calls"]) == len(found["logs"]) == 2
    for log, (*_, values) in zip(found["logs"], found["calls"], strict=True):
        assert log["rewards/kept/mean"] == pytest.approx(sum(values) / 8, abs=1e-6)
        assert 0 <= log["rewards/credit(1,2)/mean"] <= 1, "rows without a reference are left out"
        assert "rewards/bleu/mean" in log
    assert found["moved"] > 0
