"""The card: what was trained, on what, and where it leaves the paper."""

import re
from pathlib import Path

import pytest
import torch
from run_folders import PREPARED

from ngramloss import __version__, recipe
from ngramloss.training import card
from ngramloss.training.run import run_of


def test_the_papers_own_recipe_deviates_only_where_it_always_must():
    for name in ("xsum", "cnndm"):
        *always, clipping = card.deviations(recipe.load(name), "bf16")
        assert tuple(always) == card.ALWAYS
        assert clipping == "Gradients are clipped at norm 1; the paper does not say, and its authors' code uses 1."


def test_every_setting_that_is_not_the_papers_is_named_with_both_values():
    told = card.deviations(
        recipe.load(
            "xsum",
            [
                "train.batch_size=8",
                "train.clip=0.5",
                "train.log_every=7",
                "train.keep=5",
                "train.eval_batch_size=3",
                'train.report_to=["wandb"]',
                "train.max_tokens=300",
                "generation.num_beams=2",
                "data.prefix=x",
            ],
        ),
        "bf16",
    )
    assert told[:4] == [
        "`data.prefix: ''`, here `'x'`",
        "`train.batch_size: 16`, here `8`",
        "`train.clip: 1.0`, here `0.5`",
        "`generation.num_beams: 6`, here `2`",
    ]
    assert tuple(told[4:-1]) == card.ALWAYS
    assert "norm 0.5;" in told[-1]


@pytest.mark.parametrize("name", ["cnn_dailymail", "cnndm", "abisee/cnn_dailymail:3.0.0"])
def test_cnn_dailymail_is_compared_with_the_papers_own_settings_for_it(name):
    told = card.deviations(recipe.load("cnndm", [f"data.name={name}"]), "bf16")
    assert not [line for line in told if "generation" in line]


def test_a_model_from_scratch_and_its_path_for_copying_are_disclosed():
    told = card.deviations(recipe.load("demo"), "bf16")
    assert told[0] == "The model is `scratch`; the paper fine-tunes BART-base."
    assert told[1] == "From scratch: mbart, width 128, 2 + 2 layers, 4,000 tokens, init_std 0.09."
    assert told[2].startswith("The model is initialised to copy: the value and output projections of cross-attention")
    plain = card.deviations(recipe.load("demo", ["model.copying=false"]), "bf16")
    assert not [line for line in plain if "copying" in line]
    other = card.deviations(recipe.load("xsum", ["model.name=mine"]), "bf16")
    assert other[0] == "The model is `mine`; the paper fine-tunes BART-base."
    assert not [line for line in other if "From scratch" in line]


def test_the_card_says_what_was_trained_on_what_and_with_which_versions():
    text = card.card_text(
        run_of(recipe.load("demo")),
        PREPARED,
        {"step": 1800, "best_step": 1500, "best": 1.23456},
        Path("checkpoint-1500"),
    )
    assert text.startswith(
        "# demo-matches234\n\nSummarisation: `ce + matches(2,3,4)` on `newswire`, from `scratch`. Weights of step 1500 (lowest validation ce, 1.2346) of 1800.\n"
    )
    assert "\n| train | 24,000 | 1 | `0123456789abcdef` |\n| validation | 500 | 0 | `fedcba9876543210` |\n" in text
    assert f"\n* ngramloss {__version__}\n* torch {torch.__version__}\n" in text
    assert "Deviations" not in text
    paper = card.card_text(
        run_of(recipe.load("xsum")), PREPARED, {"step": 9, "best_step": None, "best": None}, Path("checkpoint-9")
    )
    assert all(f"* {line}\n" in paper for line in card.ALWAYS)
    assert re.search(
        r"Finished \d{4}-\d\d-\d\d \d\d:\d\d UTC\. Every setting is in recipe\.toml, every step in log\.jsonl\.\n$",
        text,
    )


def test_the_card_of_own_data_has_their_name_and_no_deviations_from_a_paper():
    facts = {"step": 9, "best_step": None, "best": None}
    for name in ("data/mine.csv", "test=data/mine.csv", "somebody/mine"):
        text = card.card_text(run_of(recipe.load("demo", [f"data.name={name}"])), PREPARED, facts, Path("checkpoint-9"))
        assert text.startswith("# mine-matches234\n")
        assert "paper" not in text


def test_the_card_says_which_score_of_generated_texts_chose_the_weights():
    text = card.card_text(
        run_of(recipe.load("demo", ["train.best=bleu"])),
        PREPARED,
        {"step": 1800, "best_step": 1500, "best": 31.2},
        Path("checkpoint-1500"),
    )
    assert "Weights of step 1500 (highest validation bleu, 31.2000) of 1800." in text


def test_the_card_says_that_the_best_value_was_shared():
    facts = {"step": 20, "best_step": 5, "best": 0.0}
    run = run_of(recipe.load("demo", ["train.best=rouge1"]))
    text = card.card_text(run, PREPARED, facts, Path("checkpoint-5"), note="rouge1 was 0.0000 throughout.")
    assert "(highest validation rouge1, 0.0000) of 20. Note: rouge1 was 0.0000 throughout.\n" in text
    assert "Note:" not in card.card_text(run, PREPARED, facts, Path("checkpoint-5"))


@pytest.mark.parametrize("facts", [{"best_step": None, "best": None}, {"best_step": 1500, "best": 1.2}])
def test_the_card_says_where_the_last_weights_were_taken(facts):
    text = card.card_text(run_of(recipe.load("demo")), PREPARED, {"step": 1800, **facts}, Path("checkpoint-1800"))
    assert "Weights of step 1800 (the last) of 1800." in text


def test_a_package_that_is_not_there_is_named_as_such(monkeypatch):
    monkeypatch.setattr(card, "PACKAGES", ("no-such-package-anywhere",))
    text = card.card_text(
        run_of(recipe.load("demo")), PREPARED, {"step": 1800, "best_step": None, "best": None}, Path("checkpoint-1800")
    )
    assert "* no-such-package-anywhere not installed" in text
