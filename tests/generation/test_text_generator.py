"""A generator for programs that map batches: rows in, the same rows with a text each out, wherever it is sent."""

import pickle

import numpy as np
import pandas
import pytest
import tiny_tokenizers
from searches import DOCUMENTS, hf_texts, ids, real_model, texts_of_run

import ngramloss as ng
from ngramloss import recipe
from ngramloss.errors import UserError
from ngramloss.generation import load_job, text_generator
from ngramloss.models import loading
from ngramloss.recipe import Model
from ngramloss.search import engines, writer

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def nothing_loaded():
    text_generator._WRITERS.clear()
    yield
    text_generator._WRITERS.clear()


@pytest.fixture(scope="module")
def texts(small_run):
    return texts_of_run(small_run, DOCUMENTS)


@pytest.fixture
def write(small_run):
    return ng.TextGenerator(small_run, batch_size=3)


# Kinds of rows


def test_lists_by_name_give_lists_by_name(write, texts):
    rows = {"id": [1, 2, 3, 4, 5, 6], "document": DOCUMENTS}
    assert write(rows) == {**rows, "prediction": texts}
    assert list(rows) == ["id", "document"]  # what was given is not changed
    assert len(set(texts)) > 1


@pytest.mark.parametrize("kind", [object, str])
def test_arrays_by_name_give_arrays_by_name(write, texts, kind):
    found = write({"id": np.arange(6), "document": np.array(DOCUMENTS, dtype=kind)})
    assert isinstance(found["prediction"], np.ndarray)
    assert found["prediction"].tolist() == texts
    assert found["id"].tolist() == list(range(6))


def test_a_frame_gives_a_frame_with_its_own_index(write, texts):
    frame = pandas.DataFrame({"id": range(6), "document": DOCUMENTS}, index=[9, 7, 5, 3, 1, 0])
    found = write(frame)
    assert list(found.columns) == ["id", "document", "prediction"]
    assert found["prediction"].tolist() == texts
    assert found.index.tolist() == [9, 7, 5, 3, 1, 0]
    assert list(frame.columns) == ["id", "document"]


def test_spark_maps_an_iterator_of_frames(write, texts):
    frames = iter([pandas.DataFrame({"document": DOCUMENTS[:4]}), pandas.DataFrame({"document": DOCUMENTS[4:]})])
    found = (lambda frames: map(write, frames))(frames)
    assert [text for frame in found for text in frame["prediction"]] == texts


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_datasets_map_it_in_this_process_and_in_others(write, texts, processes, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"id": list(range(6)), "document": DOCUMENTS})
    found = data.map(write, batched=True, batch_size=2, num_proc=processes, load_from_cache_file=False)
    assert found["prediction"][:] == texts
    assert found["id"][:] == list(range(6))


def test_a_batch_without_rows_gets_a_column_without_texts(write):
    assert write({"document": []}) == {"document": [], "prediction": []}
    assert write(pandas.DataFrame({"document": []}))["prediction"].tolist() == []


def test_a_blank_text_gets_an_empty_one(write, texts):
    assert write({"document": [DOCUMENTS[0], " \n", ""]})["prediction"] == [texts[0], "", ""]


# Settings


def test_columns_have_their_usual_names_or_those_that_are_given(small_run, write, texts):
    for name in ("Article", "text", "dialogue"):
        assert write({"summary": [""] * 6, name: DOCUMENTS})["prediction"] == texts
    mine = ng.TextGenerator(small_run, source="body", prediction="short")
    assert mine({"body": DOCUMENTS, "document": [""] * 6})["short"] == texts


def test_a_run_knows_the_column_that_it_was_trained_on(tmp_path, texts):
    folder = saved_run(tmp_path, "data.source=body")
    assert ng.TextGenerator(folder)({"document": [""] * 6, "body": DOCUMENTS})["prediction"] == texts


def test_a_translation_looks_for_its_language_and_its_own_names_first(tmp_path):
    write = ng.TextGenerator(
        saved_run(tmp_path, "data.source_language=en_XX", "data.target_language=de_DE", name="translation")
    )
    assert write._columns(["document", "source", "de", "en"]) == ["en"]
    assert write._columns(["document", "source"]) == ["source"]


def test_several_columns_are_joined_as_in_training(small_run, texts):
    parts = [text.split(" ", 1) for text in DOCUMENTS]
    rows = {
        "instruction": [first for first, _ in parts],
        "input": [rest for _, rest in parts],
        "text": ["no"] * len(parts),
    }
    joined = ["\n\n".join(part) for part in parts]
    expected = ng.TextGenerator(small_run)({"document": joined})["prediction"]
    assert ng.TextGenerator(small_run, source="instruction,input")(rows)["prediction"] == expected
    alone = ng.TextGenerator(small_run, source="instruction,input")(
        {"instruction": DOCUMENTS, "input": [""] * len(parts)}
    )
    assert alone["prediction"] == texts
    with pytest.raises(UserError, match=r"the batch has no column 'inputs' for the source"):
        ng.TextGenerator(small_run, source="instruction,inputs")(rows)


def test_prompts_of_a_model_that_was_trained_elsewhere_are_read_as_they_are(tmp_path):
    loading.load(Model("scratch", architecture="llama"), tiny_tokenizers.ours()).save_pretrained(tmp_path)
    tiny_tokenizers.ours().save_pretrained(tmp_path)
    write = ng.TextGenerator(tmp_path, settings=["generation.max_length=2"])
    for column, after in {"prompt": "", "document": "\n\nSummary:", "instruction": "\n\n"}.items():
        write({column: DOCUMENTS[:1]})
        ((_, writer_),) = text_generator._WRITERS.items()
        assert writer_.shape.prompt.after == after


def test_a_run_of_instructions_takes_their_texts_too_and_no_documents(tmp_path):
    run = saved_run(tmp_path)
    (run / "prepared.json").write_text('{"column": "instruction,input"}')
    write = ng.TextGenerator(run)
    assert write._columns(["input", "output", "instruction", "text"]) == ["instruction", "input"]
    with pytest.raises(
        UserError, match=r"was trained on sources in the column 'instruction,input', but these are in 'input'"
    ):
        write({"input": DOCUMENTS})


def saved_run(folder, *overrides, name="demo"):
    real_model().save_pretrained(folder / "model")
    tiny_tokenizers.ours().save_pretrained(folder / "model")
    same = ["data.separator=<s>", "data.splitter=period", "data.prefix=summarize: ", "data.max_source=20"]
    (folder / "recipe.toml").write_text(recipe.dump(recipe.load(name, [*same, *overrides])))
    return folder


def test_settings_change_the_search_and_the_texts(small_run, texts):
    changed = ["generation.num_beams=1", "generation.max_length=6", "data.prefix="]
    found = ng.TextGenerator(small_run, settings=changed)({"document": DOCUMENTS})["prediction"]
    assert found != texts
    model = real_model()
    model.generation_config.update(num_beams=1, min_length=0, max_length=6, early_stopping=False)
    assert found == hf_texts(model, tiny_tokenizers.ours(), ids(separator="<s>", splitter="period", max_source=20))


def test_a_model_that_was_trained_elsewhere_needs_no_run(small_run, monkeypatch):
    loaded = record_loading(monkeypatch)
    found = ng.TextGenerator(small_run / "model")({"document": DOCUMENTS})["prediction"]
    model, tokenizer = real_model(), tiny_tokenizers.ours()
    plain = [tokenizer(text)["input_ids"] for text in DOCUMENTS]  # no prefix and no separators
    assert found == hf_texts(model, tokenizer, plain)
    assert loaded == [(None, False)]


def test_summaries_of_several_sentences_are_written_one_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "decoded", lambda tokenizer, rows: ["One came. Two left." for _ in rows])
    assert ng.TextGenerator(saved_run(tmp_path, name="cnndm"))({"document": ["a"]})["prediction"] == [
        "One came.\nTwo left."
    ]
    assert ng.TextGenerator(saved_run(tmp_path, name="xsum"))({"document": ["a"]})["prediction"] == [
        "One came. Two left."
    ]


@pytest.mark.parametrize("engine", ["hf", "ctranslate2"])
def test_an_engine_writes_batches_of_the_size_that_is_asked_for(small_run, texts, engine, monkeypatch):
    sizes, load = [], engines.load

    def counted(name, *given, **options):
        assert name == engine
        loaded = load(name, *given, **options)
        return loaded._replace(write=lambda sources: sizes.append(len(sources)) or loaded.write(sources))

    monkeypatch.setattr(engines, "load", counted)
    assert (
        ng.TextGenerator(small_run, batch_size=4, settings=[f"generation.engine={engine}"])({"document": DOCUMENTS})[
            "prediction"
        ]
        == texts
    )
    assert sizes == [4, 2]


# Processes


def test_it_is_sent_without_the_model_and_works_where_it_arrives(small_run, write, texts):
    write({"document": DOCUMENTS[:1]})
    sent = pickle.dumps(write)
    assert len(sent) < 10_000
    assert pickle.loads(sent)({"document": DOCUMENTS})["prediction"] == texts
    assert repr(write) == f"TextGenerator('{small_run}')"


def test_a_process_loads_the_model_once_for_all_copies_and_only_for_a_batch(small_run, monkeypatch):
    loaded = record_loading(monkeypatch)
    write = ng.TextGenerator(small_run, device="cpu")
    write({"document": [" "]})
    assert loaded == []
    for _ in range(3):
        pickle.loads(pickle.dumps(write))({"document": DOCUMENTS[:1]})
    assert loaded == [("cpu", True)]


def record_loading(monkeypatch):
    """The device of each model that is loaded, and whether a run trained it."""
    loaded, load_model = [], load_job.load_model

    def counted(work, **options):
        loaded.append((options["device"], work.is_run))
        return load_model(work, **options)

    monkeypatch.setattr(load_job, "load_model", counted)
    return loaded


def test_a_folder_is_found_from_other_folders(small_run, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(small_run.parent)
    write = ng.TextGenerator(small_run.name)
    monkeypatch.chdir(tmp_path)
    assert write({"document": DOCUMENTS})["prediction"] == texts


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_a_model_that_changed_since_is_not_taken(tmp_path, changed):
    write = ng.TextGenerator(saved_run(tmp_path))
    with (tmp_path / "model" / changed).open("a") as file:
        file.write(" ")
    with pytest.raises(
        ng.UserError,
        match=r"the weights or settings in .*model have changed since this TextGenerator was made, or this process cannot read",
    ):
        write({"document": DOCUMENTS})


# What is wrong


def test_a_column_that_is_missing_is_named_with_those_that_are_there(small_run, write):
    with pytest.raises(
        ng.UserError,
        match=r"cannot find the column with the texts\. The batch has the columns 'id', 'body', and none of them is called document, .* or prompt\. Name it: TextGenerator\(…, source=\"…\"\)",
    ):
        write({"id": [1], "body": ["a"]})
    with pytest.raises(
        ng.UserError,
        match=r"the batch has no column 'bodi' for the source \(did you mean 'body'\?\)\. Its columns are 'id', 'body'\.",
    ):
        ng.TextGenerator(small_run, source="bodi")(pandas.DataFrame({"id": [1], "body": ["a"]}))


@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (float("nan"), "float"), (7, "int"), (["a"], "list")])
def test_a_value_that_is_no_text_is_named_with_its_row(write, value, kind):
    with pytest.raises(ng.UserError, match=f"row 1 of the batch: 'document' should be text, got {kind}"):
        write({"document": ["a", value]})


def test_a_column_of_that_name_is_not_overwritten(write):
    with pytest.raises(
        ng.UserError,
        match=r"the batch has a column 'prediction' already\. Name the new one: TextGenerator\(…, prediction=\"…\"\)",
    ):
        write({"document": ["a"], "prediction": ["b"]})


def test_single_rows_and_other_things_are_refused(write):
    with pytest.raises(
        TypeError,
        match=r"TextGenerator takes columns by name, or a pandas DataFrame, got list\. With datasets use batched=True",
    ):
        write(["a"])


def test_a_run_that_is_not_finished_and_settings_of_another_kind_are_refused(tmp_path, small_run):
    (tmp_path / "recipe.toml").write_text(recipe.dump(recipe.load("demo")))
    with pytest.raises(FileNotFoundError, match="its training is not finished"):
        ng.TextGenerator(tmp_path)
    with pytest.raises(ng.UserError, match=r"train\.seed=1"):
        ng.TextGenerator(small_run, settings=["train.seed=1"])
    with pytest.raises(ng.UserError, match="batch_size must be 0 or more, got -1"):
        ng.TextGenerator(small_run, batch_size=-1)
