"""Translation is a task: its recipe, its columns, its metrics, its words."""

import json
import re

import pytest
from run_folders import PREPARED

from ngramloss import cli, recipe
from ngramloss.data import load
from ngramloss.data.columns import Columns, columns
from ngramloss.errors import UserError
from ngramloss.report.page import page_text
from ngramloss.report.record import Report
from ngramloss.scoring import provenance
from ngramloss.training import card
from ngramloss.training.run import run_of


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


# The recipe


def test_the_recipe_has_no_separators_no_least_length_and_forbids_no_repetition():
    settings = recipe.load("translation")
    assert (settings.task, settings.data.separator) == ("translation", "none")
    search = settings.generation
    assert (search.min_length, search.no_repeat_ngram_size, search.length_penalty, search.num_beams) == (0, 0, 1.0, 5)


def test_a_recipe_of_an_earlier_version_is_a_summarisation_without_languages(tmp_path):
    old = tmp_path / "recipe.toml"
    lines = recipe.dump(recipe.load("demo")).splitlines()
    old.write_text("\n".join(line for line in lines if not re.match("task|source_language|target_language", line)))
    settings = recipe.load(str(old))
    assert (settings.task, settings.data.source_language, settings.data.target_language) == ("summarisation", "", "")
    assert recipe.differences(settings, recipe.load("demo")) == []


def test_the_task_is_one_of_two_and_is_kept_in_the_file(tmp_path):
    with pytest.raises(UserError, match=r"task: must be one of summarisation, translation, got 'poetry'\."):
        recipe.load("demo", ["task=poetry"])
    file = tmp_path / "mine.toml"
    file.write_text(recipe.dump(recipe.load("demo", ["task=translation"])))
    again = recipe.load(str(file))
    assert again.task == recipe.changed(again, ["train.seed=1"]).task == "translation"
    assert "task: 'summarisation' → 'translation'" in recipe.differences(recipe.load("demo"), again)


# Columns


@pytest.mark.parametrize(
    ("present", "languages", "source", "target"),
    [
        (["document", "summary", "src", "tgt"], ("", ""), "src", "tgt"),
        (["text", "translation"], ("", ""), "text", "translation"),
        (["id", "de", "en"], ("en_XX", "de_DE"), "en", "de"),
        (["en", "de"], ("deu_Latn", "eng_Latn"), "de", "en"),
        (["deu", "eng"], ("en", "de"), "eng", "deu"),
        (["source", "target", "EN", "DE"], ("en", "de"), "EN", "DE"),
        (["de", "summary"], ("de_DE", "de_DE"), "de", "summary"),
    ],
)
def test_columns_of_a_translation_are_found_by_language_then_by_their_usual_names(present, languages, source, target):
    assert columns(present, "x", languages=languages, task="translation")[:2] == (source, target)


def test_the_names_of_a_summarisation_come_first_there():
    assert columns(["src", "tgt", "document", "summary"], "x") == Columns("document", "summary", None)


def test_texts_by_language_in_one_column_are_columns(tmp_path):
    file = jsonl(
        tmp_path / "wmt.jsonl",
        {"id": 7, "translation": {"de": "Hallo.", "en": "Hello."}},
        {"id": 8, "translation": {"de": "Nein.", "en": "No."}},
    )
    by_name = load(file, "train", source="en", target="de").examples
    assert [example[:3] for example in by_name] == [("7", "Hello.", "Hallo."), ("8", "No.", "Nein.")]
    assert load(file, "train", languages=("de_DE", "en_XX"), task="translation").examples[0][:3] == (
        "7",
        "Hallo.",
        "Hello.",
    )
    with pytest.raises(
        UserError,
        match=r"cannot find the source and the target column .* columns are 'de', 'en', 'id'|columns are 'id', 'de', 'en'",
    ):
        load(file, "train", task="translation")


def test_a_language_that_is_missing_in_a_row_makes_it_a_bad_row(tmp_path):
    file = jsonl(
        tmp_path / "wmt.jsonl",
        {"translation": {"de": "Hallo.", "en": "Hello."}},
        {"translation": {"de": "Nein."}},
        {"translation": None},
    )
    with pytest.raises(UserError, match=r"2 of 3 rows .* cannot be used:\n.*:2: no column 'en'"):
        load(file, "train", source="en", target="de")


def test_the_held_out_part_is_read_from_the_same_columns(tmp_path):
    file = jsonl(tmp_path / "x.jsonl", *({"de": f"Nein {i}.", "en": f"No {i}."} for i in range(6)))
    for split, count in (("train", 3), ("validation", 3)):
        examples = load(file, split, languages=("en", "de"), task="translation", validation_fraction=0.5).examples
        assert len(examples) == count
        assert all(example.source.startswith("No") for example in examples)


# Metrics and words


def system(tmp_path, name, task=None):
    folder = tmp_path / name
    folder.mkdir()
    jsonl(
        folder / "references.jsonl",
        *({"id": str(i), "reference": f"das ist der Satz {i}", "document": f"this is sentence {i}"} for i in range(4)),
    )
    jsonl(folder / "predictions.jsonl", *({"id": str(i), "prediction": f"das war der Satz {i}"} for i in range(4)))
    about = {"task": task} if task else {}
    (folder / "generation.json").write_text(json.dumps({"model": name, **about}))
    return str(folder)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("translation", ["bleu", "chrf"]),
        (None, ["rouge1", "rouge2", "rougeL", "rougeLsum"]),
        ("poetry", ["rouge1", "rouge2", "rougeL", "rougeLsum"]),
    ],
)
def test_score_computes_the_metrics_of_the_task_first(tmp_path, capsys, task, expected):
    assert cli.main(["score", system(tmp_path, "a", task), "--json", "--samples", "10", "--shuffles", "10"]) == 0
    assert list(json.loads(capsys.readouterr().out)["systems"][0]["scores"]) == expected


def test_one_run_that_translates_is_enough_and_metrics_given_count_more(tmp_path, capsys):
    runs = [system(tmp_path, "a"), system(tmp_path, "b", "translation")]
    assert cli.main(["score", *runs, "--json", "--samples", "10", "--shuffles", "10"]) == 0
    assert list(json.loads(capsys.readouterr().out)["systems"][0]["scores"]) == ["bleu", "chrf"]
    assert cli.main(["score", *runs, "--metrics", "chrf", "--json", "--samples", "10", "--shuffles", "10"]) == 0
    assert list(json.loads(capsys.readouterr().out)["systems"][0]["scores"]) == ["chrf"]


def test_seeds_are_grouped_by_all_other_settings(tmp_path):
    setups = []
    for name, task, seed in (("a", "summarisation", 1), ("b", "summarisation", 2), ("c", "translation", 2)):
        text = f'objective = "ce"\ntask = "{task}"\n[data]\nname = "x"\n[train]\nseed = {seed}\n'
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.toml").write_text(text)
        (tmp_path / name / "generation.json").write_text(json.dumps({"model": name}))
        setups.append(provenance.run(tmp_path / name).setup)
    assert setups[0] == setups[1] != setups[2]


def test_the_help_says_that_the_default_depends_on_the_task(capsys):
    with pytest.raises(SystemExit):
        cli.main(["score", "--help"])
    assert "(default: rouge; if a run's task is translation: bleu,chrf)" in " ".join(capsys.readouterr().out.split())


def test_the_page_calls_texts_by_the_words_of_the_task(tmp_path):
    for task, sources, help in (
        ("translation", "sources", "words of the translation"),
        (None, "documents", "words of the summary"),
    ):
        out = tmp_path / f"page-{task}"
        assert (
            cli.main(
                ["report", system(tmp_path, f"run-{task}", task), "-o", str(out), "--samples", "10", "--shuffles", "10"]
            )
            == 0
        )
        text = (out / "index.html").read_text()
        assert f"1 system on 4 {sources}" in text
        assert help in text
        assert f'"text":"{"translation" if task else "summary"}"' in text
        columns = re.findall(r"<th[^>]*>(?:<[^>]+>)*(BLEU|R-1)", text)
        assert columns[0] == ("BLEU" if task else "R-1")
    assert '"text":"summary"' in page_text(Report())


def test_the_card_names_the_task_and_the_languages():
    settings = recipe.load("translation", ["data.source_language=en", "data.target_language=de"])
    text = card.card_text(
        run_of(settings), PREPARED, {"step": 1, "best_step": None, "best": None}, card.Path("checkpoint-1")
    )
    assert "\nTranslation (`en` → `de`): `ce + matches(2,3,4)` on `multi30k`, from `scratch`." in text
    assert "the paper" not in text, "these are not its data"
