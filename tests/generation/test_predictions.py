"""ngramloss generate: every id once, in order, however often the job is stopped."""

import json
import os
import shutil
import signal

import pytest
from changes import MODEL_FILES, change_weights
from forks import fork, fork_ranks, killed_at_third_call

from ngramloss import cli
from ngramloss.data import newswire
from ngramloss.data.sentences import sentences
from ngramloss.generation import row_file
from ngramloss.generation.baselines import BASELINES
from ngramloss.generation.job import job
from ngramloss.search import writer
from ngramloss.storage.files import lock_folder

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny finished run on the built-in corpus."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    settings = [
        "model.width=16",
        "model.vocabulary=400",
        "data.limit=40",
        "train.max_steps=2",
        "train.warmup_steps=0",
        "train.eval_every=0",
        "generation.max_length=12",
        "model.feed_forward=16",
    ]
    assert (
        cli.main(["train", "demo", "--run", str(folder), *(word for one in settings for word in ("--set", one))]) == 0
    )
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def generate(*arguments):
    return cli.main(["generate", *map(str, arguments)])


def test_a_run_writes_a_summary_for_every_document_in_their_order(run, tmp_path, capsys):
    assert generate(run, "--limit", 7, "--out", tmp_path, "--batch-size", 3) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "predictions.jsonl")
    items = newswire.items("test", 7)
    assert [row["id"] for row in rows(tmp_path / "predictions.jsonl")] == [item.id for item in items]
    assert [row["reference"] for row in rows(tmp_path / "references.jsonl")] == [item.summary for item in items]
    told = json.loads((tmp_path / "generation.json").read_text())
    assert told["generation"]["max_length"] == 12
    assert len(told["weights"]) == 12
    assert told["documents"] == 7
    assert {"torch", "transformers", "ngramloss"} <= told["versions"].keys()
    assert not list(tmp_path.glob("*partial*"))
    assert (
        cli.main(["score", "--references", str(tmp_path / "references.jsonl"), str(tmp_path / "predictions.jsonl")])
        == 0
    )


def test_batches_change_nothing_and_a_preset_is_the_papers(run, tmp_path):
    for size in (2, 5):
        assert generate(run, "--limit", 5, "--out", tmp_path / str(size), "--batch-size", size) == 0
    assert (tmp_path / "2" / "predictions.jsonl").read_text() == (tmp_path / "5" / "predictions.jsonl").read_text()
    work = job(str(run), preset="cnndm")
    assert (
        work.generation.num_beams,
        work.generation.length_penalty,
        work.generation.min_length,
        work.generation.max_length,
    ) == (4, 2.0, 56, 142)
    assert work.data.name == "newswire"
    assert job(str(run)).generation is None


def test_a_run_is_known_by_its_weights_however_its_folder_is_written(run, tmp_path, monkeypatch):
    moved = tmp_path / "runs" / "a"
    shutil.copytree(run, moved)
    assert generate(moved, "--limit", 2) == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(moved)
    for written in ("runs/a", "runs/a/", "./runs/a", "link"):
        assert generate(written, "--limit", 2) == 0
    moved.rename(tmp_path / "runs" / "b")
    assert generate("runs/b", "--limit", 2) == 0


@pytest.mark.parametrize("part", ["model", "checkpoints"])
def test_predictions_are_not_written_where_a_fresh_training_would_delete_them(run, part, capsys):
    assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", run / part) == 2
    assert (
        f"{run / part} is a part of the run {run} and would be deleted with it. Choose another --out."
        in capsys.readouterr().err
    )


def test_a_run_without_its_model_says_how_to_get_it_back(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "model")
    assert generate(tmp_path / "a") == 2
    assert (
        "has no model/: its training is not finished, or the model was deleted. The same ngramloss train command continues"
        in capsys.readouterr().err
    )


def test_who_writes_must_be_said(capsys):
    with pytest.raises(SystemExit) as stop:
        generate("--data", "newswire")
    assert stop.value.code == 2
    assert "the following arguments are required: MODEL" in capsys.readouterr().err


def test_lead_3_is_a_generator(tmp_path):
    assert generate("lead-3", "--data", "newswire", "--limit", 4, "--out", tmp_path) == 0
    for row, item in zip(rows(tmp_path / "predictions.jsonl"), newswire.items("test", 4), strict=True):
        assert row["prediction"] == "\n".join(sentences(item.document)[:3])


STOP = killed_at_third_call("ngramloss.search.writer", "decoded")


@pytest.mark.slow
def test_a_killed_job_goes_on_and_writes_no_id_twice(run, tmp_path):
    arguments = ["generate", str(run), "--limit", "9", "--out", str(tmp_path / "a"), "--batch-size", "2"]
    assert fork(STOP, arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"}).wait() == -signal.SIGKILL
    partial = tmp_path / "a" / "predictions.partial-0.jsonl"
    before = partial.read_text()
    assert len(rows(partial)) == 4
    with partial.open("a") as file:
        file.write('{"id": "newswire-te')  # a line that the kill cut short
    assert cli.main(arguments) == 0
    assert generate(run, "--limit", 9, "--out", tmp_path / "b") == 0
    assert (tmp_path / "a" / "predictions.jsonl").read_text() == (tmp_path / "b" / "predictions.jsonl").read_text()
    assert all(line in (tmp_path / "a" / "predictions.jsonl").read_text() for line in before.splitlines())


@pytest.mark.slow
def test_processes_share_the_documents(run, tmp_path):
    arguments = ["generate", str(run), "--limit", "5", "--out", str(tmp_path / "two")]
    program = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"
    codes, err = fork_ranks(program, arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert codes == [0, 0], err[-2000:]
    assert generate(run, "--limit", 5, "--out", tmp_path / "one") == 0
    assert rows(tmp_path / "two" / "predictions.jsonl") == rows(tmp_path / "one" / "predictions.jsonl")


RANK = """
import os, signal, sys, time
from ngramloss import cli
from ngramloss.search import writer
whole, count = writer.decoded, 0
def some(*args, **kwargs):
    global count
    count += 1
    if os.environ["RANK"] == "1" and count == 2:
        os.kill(os.getpid(), signal.SIGKILL) if sys.argv[1] == "dies" else time.sleep(3)
    return whole(*args, **kwargs)
writer.decoded = some
sys.exit(cli.main(sys.argv[2:]))
"""


def two_ranks(how, *arguments):
    """The exit code and the errors of rank 0, which is ended if the other one dies, as by torchrun."""
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    first, second = (
        fork(RANK, [how, "generate", *map(str, arguments)], environment={**shared, "RANK": str(rank)})
        for rank in range(2)
    )
    if second.wait():
        first.kill()
    first.wait()
    return first.returncode, first.communicate()[1]


@pytest.mark.slow
def test_after_a_process_died_the_same_command_goes_on(run, tmp_path):
    arguments = [run, "--limit", 9, "--out", tmp_path / "two", "--batch-size", 1]
    code, _ = two_ranks("dies", *arguments)
    assert code
    assert not (tmp_path / "two" / "predictions.jsonl").exists()
    code, told = two_ranks("lives", *arguments)
    assert code == 0, told
    assert generate(run, "--limit", 9, "--out", tmp_path / "one", "--batch-size", 1) == 0
    assert rows(tmp_path / "two" / "predictions.jsonl") == rows(tmp_path / "one" / "predictions.jsonl")


@pytest.mark.slow
def test_a_process_that_is_slow_but_lives_is_waited_for(run, tmp_path):
    code, told = two_ranks("sleeps for three seconds", run, "--limit", 6, "--out", tmp_path / "two", "--batch-size", 1)
    assert code == 0, told
    assert len(rows(tmp_path / "two" / "predictions.jsonl")) == 6


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["lead-3", "--out", "x"], "Choose the documents with --data"),
        (["lead-3", "--data", "newswire"], "so give an output folder: --out DIR"),
        (
            ["lead-3", "--data", "newswire", "--out", "x", "--set", "train.seed=1"],
            "generate accepts --set only for generation.*, data.* and task",
        ),
        (["lead-3", "--data", "newswire", "--out", "x", "--batch-size", "0"], "--batch-size must be 1 or more, got 0"),
        (
            ["lead-3", "--data", "newswire", "--out", "x", "--batch-size", "-2"],
            "--batch-size must be 1 or more, got -2",
        ),
        (["lead-0", "--data", "newswire", "--out", "x"], "lead-0 would write nothing; use lead-1"),
        (["nowhere/model", "--data", "newswire", "--limit", "2", "--out", "x"], "cannot load the model of"),
    ],
)
def test_what_is_wrong_gets_a_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert generate(*arguments) == 2
    err = capsys.readouterr().err
    assert sentence in err
    assert "documents/s" not in err, "no bar before something is written"
    assert not (tmp_path / "x").exists()


def listened(monkeypatch):
    """Every example that lead-N is asked for, in order."""
    asked, whole = [], BASELINES["lead-N"]
    heard = whole._replace(
        write=lambda number, split, examples, language: (
            asked.extend(examples) or whole.write(number, split, examples, language)
        )
    )
    monkeypatch.setitem(BASELINES, "lead-N", heard)
    return asked


def test_a_continued_job_writes_only_what_is_missing_whatever_the_versions(tmp_path, monkeypatch):
    arguments = ["lead-3", "--data", "newswire", "--limit", 4, "--out", tmp_path]
    assert generate(*arguments) == 0
    whole = (tmp_path / "predictions.jsonl").read_text()
    (tmp_path / "predictions.partial-0.jsonl").write_text("".join(whole.splitlines(keepends=True)[:3]))
    (tmp_path / "predictions.jsonl").unlink()
    about = json.loads((tmp_path / "generation.json").read_text())
    (tmp_path / "generation.json").write_text(json.dumps(about | {"versions": {"python": "3.9"}}))
    asked = listened(monkeypatch)
    assert generate(*arguments) == 0
    assert [example.id for example in asked] == [newswire.items("test", 4)[3].id]
    assert (tmp_path / "predictions.jsonl").read_text() == whole


def test_predictions_of_another_baseline_are_not_returned(tmp_path, capsys):
    assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 0
    assert generate("lead-2", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 2
    assert "other settings (model: 'lead-3' → 'lead-2'). Choose another --out" in capsys.readouterr().err


def test_who_copies_tells_no_tokens_and_letters_stay_readable(tmp_path):
    (tmp_path / "test.jsonl").write_text(
        '{"id": "x", "document": "Zoë rief an.", "summary": "Zoë."}\n', encoding="utf-8"
    )
    assert generate("lead-3", "--data", tmp_path, "--out", tmp_path / "o") == 0
    assert (tmp_path / "o" / "predictions.jsonl").read_text(
        encoding="utf-8"
    ) == '{"id": "x", "prediction": "Zoë rief an."}\n'


def test_the_longest_documents_come_first(tmp_path, monkeypatch):
    asked = listened(monkeypatch)
    assert generate("lead-3", "--data", "newswire", "--limit", 6, "--out", tmp_path, "--batch-size", 2) == 0
    lengths = [len(example.source) for example in asked]
    assert lengths == sorted(lengths, reverse=True), "a lack of memory shows at once"
    assert len(set(lengths)) > 1


def test_models_that_were_trained_elsewhere_get_no_separators():
    assert job("some/model", preset="xsum").data.separator == "none"
    assert job("some/model", data="newswire").data.separator == "none"


def test_each_process_takes_its_own_share(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert generate("lead-3", "--data", "newswire", "--limit", 5, "--out", tmp_path) == 0
    items = newswire.items("test", 5)
    assert {row["id"] for row in rows(tmp_path / "predictions.partial-1.jsonl")} == {item.id for item in items[1::2]}
    assert [path.name for path in tmp_path.iterdir()] == ["predictions.partial-1.jsonl"], (
        "the first process writes the rest"
    )


def test_predictions_of_unknown_making_are_not_written_over(tmp_path, capsys):
    path = tmp_path / "predictions.jsonl"
    for settings in (None, "{", "[]", "3", "[" * 100_000):
        path.write_text('{"id": "mine", "prediction": "precious"}\n')
        if settings is not None:
            (tmp_path / "generation.json").write_text(settings)
        assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 2
        assert "has predictions" in capsys.readouterr().err
        assert "precious" in path.read_text()


def test_another_process_may_begin_before_the_first(tmp_path):
    (tmp_path / "predictions.partial-1.jsonl").write_text("")
    assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 0
    assert len(rows(tmp_path / "predictions.jsonl")) == 2


def test_rows_that_are_no_predictions_are_written_again(tmp_path):
    arguments = ["lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path]
    assert generate(*arguments) == 0
    whole = (tmp_path / "predictions.jsonl").read_text()
    (tmp_path / "predictions.jsonl").rename(tmp_path / "predictions.partial-0.jsonl")
    with (tmp_path / "predictions.partial-0.jsonl").open("a") as file:
        file.write('{"x": 1}\n{"id": "newswire-test-0"}\n')
    assert generate(*arguments) == 0
    assert (tmp_path / "predictions.jsonl").read_text() == whole


# One thing of the model has changed


CHANGES = {"weights": change_weights} | {f"model_files.{name}": change for name, change in MODEL_FILES.items()}


@pytest.mark.parametrize("half_done", [False, True], ids=["done", "half done"])
@pytest.mark.parametrize("verb", ["generate", "candidates"])
@pytest.mark.parametrize("changed", CHANGES)
def test_texts_of_a_model_that_has_changed_are_neither_returned_nor_mixed(
    run, tmp_path, capsys, changed, verb, half_done
):
    shutil.copytree(run, tmp_path / "run")
    options = {"generate": [], "candidates": ["--count", "2", "--split", "test"]}[verb]
    noun = {"generate": "predictions"}.get(verb, verb)
    command = [verb, str(tmp_path / "run"), *options, "--limit", "3", "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0
    whole, share = tmp_path / "out" / f"{noun}.jsonl", tmp_path / "out" / f"{noun}.partial-0.jsonl"
    if half_done:
        share.write_text(whole.read_text().splitlines(keepends=True)[0])
        whole.unlink()
    before = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    CHANGES[changed](tmp_path / "run" / "model")
    capsys.readouterr()
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert f"has {noun} made with other settings (" in err
    assert f"{changed}: " in err
    assert f"Choose another --out, or delete {share if half_done else whole}." in err
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("changed", CHANGES)
def test_predictions_of_a_model_that_has_changed_are_not_scored(run, tmp_path, capsys, changed):
    shutil.copytree(run, tmp_path / "run")
    assert generate(tmp_path / "run", "--limit", 2) == 0
    CHANGES[changed](tmp_path / "run" / "model")
    capsys.readouterr()
    assert cli.main(["score", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    if changed == "weights":
        assert "were written by other weights (" in err
    else:
        name = changed.removeprefix("model_files.")
        assert f"were written before files in {tmp_path / 'run' / 'model'} were changed ({name}). Delete " in err
    assert f"make new ones with: ngramloss generate {tmp_path / 'run'}" in err


def test_files_that_no_model_is_loaded_from_change_nothing(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    assert generate(tmp_path / "run", "--limit", 2) == 0
    (tmp_path / "run" / "model" / "README.md").write_text("mine")
    assert generate(tmp_path / "run", "--limit", 2) == 0
    assert cli.main(["score", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_not_mixed(tmp_path, capsys):
    with lock_folder(tmp_path, wait=True):
        assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 2
    assert (
        f"another process is training, generating or scoring in {tmp_path}. Wait for it to end, or choose another --out."
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())
    assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 0


def test_a_file_is_no_folder_to_write_into(tmp_path, capsys):
    (tmp_path / "x").write_text("mine")
    assert generate("lead-3", "--data", "newswire", "--limit", 2, "--out", tmp_path / "x") == 2
    assert "is a file, but --out needs a folder" in capsys.readouterr().err


def test_bad_rows_are_left_out_if_asked_for(tmp_path, capsys):
    (tmp_path / "test.jsonl").write_text(
        '{"id": "x", "document": "A b. C d.", "summary": "A."}\n{"id": "x", "document": "E f.", "summary": "E."}\n'
    )
    assert generate("lead-3", "--data", tmp_path, "--out", tmp_path / "o") == 2
    assert "--on-bad-row skip" in capsys.readouterr().err
    assert generate("lead-3", "--data", tmp_path, "--out", tmp_path / "o", "--on-bad-row", "skip") == 0
    assert [row["id"] for row in rows(tmp_path / "o" / "predictions.jsonl")] == ["x"]


def test_other_settings_do_not_mix_with_what_is_there(run, tmp_path, capsys):
    assert generate(run, "--limit", 2, "--out", tmp_path) == 0
    assert generate(run, "--limit", 1, "--out", tmp_path) == 2
    assert "has predictions made with other settings (fingerprint: " in (told := capsys.readouterr().err)
    assert f"; documents: 2 → 1). Choose another --out, or delete {tmp_path / 'predictions.jsonl'}." in told
    assert (
        generate(
            run,
            "--limit",
            2,
            "--out",
            tmp_path,
            "--set",
            "generation.max_length=9",
            "--set",
            "generation.length_penalty=0.5",
        )
        == 2
    )
    told = capsys.readouterr().err
    assert (
        "other settings (generation.max_length: 12 → 9; generation.length_penalty: 1.0 → 0.5). Choose another" in told
    ), "nothing else"
    assert generate(run, "--limit", 2, "--out", tmp_path) == 0


@pytest.mark.parametrize("killed", [False, True])
def test_more_documents_continue_the_first_of_them(run, tmp_path, capsys, monkeypatch, killed):
    assert generate(run, "--limit", 4, "--out", tmp_path / "whole") == 0
    out = tmp_path / "out"
    assert generate(run, "--limit", 2, "--out", out) == 0
    if killed:
        (out / "predictions.jsonl").rename(out / "predictions.partial-0.jsonl")
        (out / "predictions.partial-0.jsonl").write_text(
            (out / "predictions.partial-0.jsonl").read_text().splitlines(keepends=True)[0]
        )
    capsys.readouterr()
    written = []
    batches = row_file.batches
    monkeypatch.setattr(row_file, "batches", lambda mine, *more: written.extend(mine) or batches(mine, *more))
    assert generate(run, "--limit", 4, "--out", out) == 0
    assert "the predictions of the first 2 documents are kept or continued.\n" in capsys.readouterr().err
    assert len(written) == (3 if killed else 2)
    for name in ("predictions.jsonl", "references.jsonl", "seen.jsonl"):
        assert (out / name).read_text() == (tmp_path / "whole" / name).read_text(), name
    about, whole = (json.loads((folder / "generation.json").read_text()) for folder in (out, tmp_path / "whole"))
    assert about == whole
    assert not list(out.glob("*.partial-*"))


@pytest.mark.parametrize("unsure", ["processes", "references"])
def test_more_documents_are_refused_if_nothing_says_that_the_first_are_the_same(
    run, tmp_path, capsys, monkeypatch, unsure
):
    assert generate(run, "--limit", 2, "--out", tmp_path / "out") == 0
    if unsure == "processes":
        monkeypatch.setattr(row_file, "processes", lambda: 2)
    else:
        (tmp_path / "out" / "references.jsonl").unlink()
    assert generate(run, "--limit", 4, "--out", tmp_path / "out") == 2
    assert "documents: 2 → 4). Choose another --out, or delete " in capsys.readouterr().err


def test_an_unfinished_run_is_told_how_to_be_finished(tmp_path, capsys):
    (tmp_path / "recipe.toml").write_text('objective = "ce"\n')
    assert generate(tmp_path) == 2
    assert (
        "has no model/: its training is not finished, or the model was deleted. The same ngramloss train command continues"
        in capsys.readouterr().err
    )


def test_tokens_written_are_counted_as_the_limits_count_them(run, tmp_path):
    assert (
        generate(
            run, "--limit", 6, "--out", tmp_path, "--set", "generation.min_length=5", "--set", "generation.max_length=9"
        )
        == 0
    )
    counts = [row["tokens"] for row in rows(tmp_path / "predictions.jsonl")]
    assert all(5 <= count <= 9 for count in counts)
    assert cli.main(["score", str(tmp_path)]) == 0


def test_a_run_keeps_what_its_objective_sees(run, tmp_path):
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    assert generate(run, "--limit", 3, "--out", tmp_path) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    for row, item in zip(rows(tmp_path / "seen.jsonl"), newswire.items("test", 3), strict=True):
        assert row["id"] == item.id
        labels = tokenizer(item.summary, truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        source = tokenizer(item.document, truncation=True, max_length=256, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            probabilities = model(input_ids=source, labels=labels).logits[0].softmax(-1)
        best = probabilities.max(-1)
        assert "".join(row["tokens"]) == tokenizer.decode(labels[0])
        assert row["best"] == [tokenizer.decode([token]) for token in best.indices]
        assert row["confidence"] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert row["label_probability"] == pytest.approx(probabilities.gather(1, labels.T)[:, 0].tolist(), abs=1e-4)
        assert len(row["tokens"]) == len(row["best"])


def test_models_that_were_not_trained_here_have_nothing_to_be_seen(run, tmp_path):
    assert generate(run / "model", "--data", "newswire", "--limit", 2, "--out", tmp_path) == 0
    assert not (tmp_path / "seen.jsonl").exists()


def test_the_baselines_of_newswire_are_generators(tmp_path, capsys):
    assert generate("random-facts", "--data", "newswire", "--limit", 4, "--out", tmp_path / "facts") == 0
    assert generate("lead-2", "--data", "newswire", "--limit", 4, "--out", tmp_path / "lead") == 0
    items = newswire.items("test", 4)
    assert [row["prediction"] for row in rows(tmp_path / "facts" / "predictions.jsonl")] == [
        item.decoy for item in items
    ]
    assert [row["prediction"] for row in rows(tmp_path / "lead" / "predictions.jsonl")] == [
        "\n".join(sentences(item.document)[:2]) for item in items
    ]
    assert generate("random-facts", "--data", "xsum", "--out", tmp_path / "x") == 2
    assert "random-facts works only on newswire, not on xsum; use lead-3 for other data." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "several"),
    [
        ({"data": "cnndm"}, True),
        ({"data": "abisee/cnn_dailymail"}, True),
        ({"preset": "cnndm", "data": "newswire"}, True),
        ({"preset": "xsum"}, False),
        ({"data": "newswire"}, False),
    ],
)
def test_sentences_stand_on_lines_of_their_own_where_the_data_set_has_several(arguments, several):
    assert job("some/model", **arguments).has_lines is several


def test_a_summary_of_several_sentences_is_written_one_a_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "decoded", lambda *_: ["It rained. Nobody came."])
    assert generate(run, "--preset", "cnndm", "--limit", 1, "--out", tmp_path / "a") == 0
    assert generate(run, "--limit", 1, "--out", tmp_path / "b") == 0
    assert rows(tmp_path / "a" / "predictions.jsonl")[0]["prediction"] == "It rained.\nNobody came."
    assert rows(tmp_path / "b" / "predictions.jsonl")[0]["prediction"] == "It rained. Nobody came."
