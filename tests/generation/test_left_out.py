"""Candidates of sources that their writer was not trained on: data.leave_out, and candidates RUN1 RUN2."""

import json
import os
import shutil
import signal
from collections import Counter

import pytest
from forks import fork, fork_ranks, killed_at_third_call
from places import ROOT

from ngramloss import cli, recipe
from ngramloss.data import in_part, load, load_split, newswire, without_part
from ngramloss.data.candidates import read_candidates, source_hash
from ngramloss.errors import UserError
from ngramloss.generation import left_out
from ngramloss.recipe import Data
from ngramloss.search import writer
from ngramloss.settings import part_of

pytestmark = pytest.mark.usefixtures("own_cache")

TINY = (
    "model.width=16",
    "model.vocabulary=400",
    "model.feed_forward=16",
    "model.init_std=0.5",
    "train.max_steps=2",
    "train.warmup_steps=0",
    "train.eval_every=0",
    "generation.max_length=8",
    "generation.min_length=4",
)
COUNT = 24


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def train(run, *settings, data="data"):
    given = [*TINY, f"data.name={data}", *settings]
    return cli.main(["train", "demo", "--run", run, *(word for one in given for word in ("--set", one))])


def make(*arguments):
    return cli.main(["candidates", *map(str, arguments), "--count", "2"])


def made(folder, *arguments):
    assert make(*arguments, "--out", folder) == 0
    return rows_of(folder / "candidates.jsonl")


@pytest.fixture(scope="module")
def shared(tmp_path_factory, own_cache):
    """Data, a run of each half of them, and one of all."""
    folder = tmp_path_factory.mktemp("halves")
    (folder / "data").mkdir()
    for split, count in (("train", COUNT), ("validation", 3), ("test", 3)):
        items = newswire.items(split, count)
        texts = [{"id": f"{split}-{n}", "document": i.document, "summary": i.summary} for n, i in enumerate(items)]
        write_rows(folder / "data" / f"{split}.jsonl", texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for run, settings in (("one", ["data.leave_out=1/2"]), ("two", ["data.leave_out=2/2"]), ("all", [])):
            assert train(run, *settings) == 0
    return folder


@pytest.fixture
def place(shared, monkeypatch, tmp_path):
    monkeypatch.chdir(shutil.copytree(shared, tmp_path / "place"))
    return tmp_path / "place"


# Parts


def test_every_id_is_in_one_part_and_parts_are_alike():
    ids = [f"row-{number}" for number in range(6000)]
    for count in (2, 3, 7):
        found = Counter(number for key in ids for number in range(1, count + 1) if in_part(key, f"{number}/{count}"))
        assert found.total() == len(ids)
        assert all(abs(size - len(ids) / count) < 6 * (len(ids) / count) ** 0.5 for size in found.values())


def test_a_part_does_not_depend_on_what_is_held_out_for_validation(tmp_path):
    """Both are chosen by hashes of the ids; with the same bytes, parts of what is left would differ in size."""
    texts = [{"id": str(number), "document": f"Text {number}.", "summary": "A b."} for number in range(4000)]
    write_rows(tmp_path / "train.jsonl", texts)
    left = load(str(tmp_path / "train.jsonl"), "train", validation_fraction=0.5).examples
    assert 0.45 < sum(in_part(example.id, "1/2") for example in left) / len(left) < 0.55
    for number in (1, 2, 3, 4):
        assert any(in_part(example.id, f"{number}/4") for example in left)


@pytest.mark.slow
def test_a_row_stays_in_its_part_whatever_the_order_and_the_limit(place):
    data = Data(name="data")
    whole = load_split(data, "summarisation", "train")
    first, second = (load_split(data, "summarisation", "train", leave_out=part) for part in ("1/2", "2/2"))
    assert {row.id for row in first.examples}.isdisjoint(row.id for row in second.examples)
    assert len(first.examples) + len(second.examples) == COUNT
    assert [row for row in whole.examples if row in first.examples] == first.examples, "in the order of the file"
    limited = load_split(data, "summarisation", "train", limit=10, leave_out="1/2")
    assert limited.examples == [row for row in first.examples if row in whole.examples[:10]], "limit counts all rows"
    path = place / "data" / "train.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))
    again = load_split(data, "summarisation", "train", leave_out="1/2")
    assert {row.id for row in again.examples} == {row.id for row in first.examples}
    assert len({split.fingerprint for split in (whole, first, second, limited, again)}) == 5
    for split in ("validation", "test"):
        assert len(load_split(data, "summarisation", split, leave_out="1/2").examples) == 3, (
            "only training rows are left out"
        )


def test_a_part_with_all_rows_or_none_is_refused(place):
    few = load("data", "train", limit=1)
    for part, word in (
        (("1/2", "all"), ("2/2", "none")) if in_part(few.examples[0].id, "1/2") else (("2/2", "all"), ("1/2", "none"))
    ):
        with pytest.raises(
            UserError, match=rf"data.leave_out = '{part}': {word} of the 1 training rows of data fall into this"
        ):
            without_part(few, part)


@pytest.mark.parametrize("text", ["1", "0/2", "3/2", "1/1", "half", "1/2/3", "-1/2", "1/ 2", "٢/٣"])
def test_what_is_no_part_is_refused(text):
    with pytest.raises(UserError, match=r"data.leave_out: must be K/N, such as 1/2 for the first of two parts"):
        recipe.load("demo", [f'data.leave_out="{text}"'])
    assert recipe.load("demo", ["data.leave_out=3/10"]).data.leave_out == "3/10"
    assert part_of("3/10") == (3, 10)


def test_a_run_is_not_trained_on_what_it_leaves_out_and_says_so(place, capsys):
    prepared = json.loads((place / "one" / "prepared.json").read_text())
    left = load_split(Data(name="data"), "summarisation", "train", leave_out="1/2")
    assert prepared["splits"]["train"]["examples"] == len(left.examples) < COUNT
    assert prepared["splits"]["train"]["fingerprint"] == left.fingerprint
    assert f"train: {len(left.examples)} rows; part 1/2 left out (data.leave_out)" in prepared["used"][0]
    assert "part 1/2 left out" in (place / "one" / "card.md").read_text()


# Runs that write together


@pytest.mark.slow
def test_each_run_writes_of_what_it_has_not_seen(place, tmp_path, capsys):
    found = made(tmp_path / "c", "one", "two")
    assert [row["id"] for row in found] == [f"train-{number}" for number in range(COUNT)], "in the order of the file"
    for row in found:
        assert row["writer"] == ("one" if in_part(row["id"], "1/2") else "two")
        assert row["trained_on"] is False
    for run in ("one", "two"):
        alone = made(tmp_path / run, run)
        assert [row["candidates"] for row in found if row["writer"] == run] == [row["candidates"] for row in alone]
        assert [row["scores"] for row in found if row["writer"] == run] == [row["scores"] for row in alone]
        assert all(row["trained_on"] is False and "writer" not in row for row in alone)
    about = json.loads((tmp_path / "c" / "candidates.json").read_text())
    assert (about["runs"], about["leave_out"], about["documents"]) == (["one", "two"], ["1/2", "2/2"], COUNT)
    weights = [json.loads((place / run / "weights.json").read_text())["fingerprint"] for run in ("one", "two")]
    assert [each["weights"] for each in about["writers"]] == weights
    assert made(tmp_path / "c", "one", "two") == found, "what is done is not done again"
    assert make("two", "one", "--out", tmp_path / "c") == 2
    assert "has candidates made with other settings" in capsys.readouterr().err


def test_one_run_writes_of_its_part_and_says_so(place, tmp_path, capsys):
    found = made(tmp_path / "c", "two")
    assert {row["id"] for row in found} == {f"train-{n}" for n in range(COUNT) if in_part(f"train-{n}", "2/2")}
    assert (
        f"two was trained without part 2/2 of the training rows, so it generates for these {len(found)} of {COUNT} "
        "rows. For the others, also give runs with data.leave_out=1/2; with --data NAME it generates for all rows, "
        "and marks those"
    ) in capsys.readouterr().err
    assert json.loads((tmp_path / "c" / "candidates.json").read_text())["leave_out"] == "2/2"


def test_rows_say_whether_their_writer_was_trained_on_them(place, tmp_path, capsys):
    every = made(tmp_path / "c", "two", "--data", "data")
    assert [row["trained_on"] for row in every] == [in_part(row["id"], "1/2") for row in every]
    assert all(row["trained_on"] for row in made(tmp_path / "d", "all", "--limit", 4))
    assert all(row["trained_on"] for row in made(tmp_path / "e", "all/model", "--data", "data", "--limit", 4))
    shutil.copytree("all/model", "elsewhere")
    unknown = made(tmp_path / "f", "elsewhere", "--data", "data", "--limit", 4)
    assert not any("trained_on" in row for row in unknown)
    validation = made(tmp_path / "g", "two", "--split", "validation")
    assert len(validation) == 3
    assert not any("trained_on" in row for row in validation)


@pytest.mark.slow
def test_sources_of_two_rows_and_of_an_earlier_run_are_not_taken_for_unseen_ones(place, tmp_path, capsys):
    path = place / "data" / "train.jsonl"
    texts = rows_of(path)
    first, second = (next(row for row in texts if in_part(row["id"], part)) for part in ("1/2", "2/2"))
    second["document"] = first["document"]
    write_rows(path, texts)
    assert train("twice", "data.leave_out=1/2") == 0
    found = made(tmp_path / "c", "twice")
    assert [row["id"] for row in found if row["trained_on"]] == [first["id"]]
    assert (
        f"was trained on the sources of 1 of the {len(found)} rows of this part, such as {first['id']!r}"
        in capsys.readouterr().err
    )
    assert train("all again") == 0
    assert train("continued", "model.name=all again/model", "data.leave_out=1/2") == 0
    assert all(row["trained_on"] for row in made(tmp_path / "d", "continued"))
    assert (
        "or the run started from a model trained on it. The key trained_on of the candidates marks these rows."
        in capsys.readouterr().err
    )
    (place / "link").symlink_to(place / "all again" / "model")
    for number, base in enumerate(("all again/checkpoints/checkpoint-2", "link")):
        assert train(f"from {number}", f"model.name={base}", "data.leave_out=1/2") == 0
        assert all(row["trained_on"] for row in made(tmp_path / f"f{number}", f"from {number}")), base
    (place / "all again").rename(place / "moved")
    capsys.readouterr()
    assert make("continued", "--out", tmp_path / "e") == 2, "what it began with is not known any more"
    assert "or the data of the run that it started from, have changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["one", "all"], "all left out no part of its training rows (data.leave_out), or --data chooses other data."),
        (["one", "two", "--data", "data"], "Leave --data out, train each run with another part"),
        (["one", "one"], "several runs left out the same part of the training rows (one 1/2, one 1/2). Give one"),
        (["one", "copy"], "several runs left out the same part of the training rows (one 1/2, copy 1/2). Give one"),
        (["one", "third"], "runs left out parts of different sizes (one 1/2, third 3/3)."),
        (["third", "second"], "no run left out part 1/3 of the training rows (third 3/3, second 2/3), so they would"),
        (
            ["one", "longer"],
            "longer and one have different settings (generation.max_length: 8 → 9), so their candidates",
        ),
        (
            ["one", "two", "--split", "test"],
            "several runs need --split train, of which each left out a part, got 'test'.",
        ),
        (
            ["one", "--set", "data.leave_out=2/2"],
            "data.leave_out is a setting of train: candidates reads it from the run",
        ),
        (["all/model", "--data", "data", "--set", "data.leave_out=2/2"], "data.leave_out is a setting of train"),
    ],
)
def test_runs_that_do_not_belong_together_are_refused(place, tmp_path, capsys, arguments, sentence):
    for copy, part, length in (("copy", "1/2", 8), ("third", "3/3", 8), ("second", "2/3", 8), ("longer", "2/2", 9)):
        shutil.copytree("one", copy)
        settings = place / copy / "recipe.toml"
        changed = settings.read_text().replace('leave_out = "1/2"', f'leave_out = "{part}"')
        settings.write_text(changed.replace("max_length = 8", f"max_length = {length}"))
    assert make(*arguments, "--out", tmp_path / "c") == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_several_runs_need_a_folder(place, capsys):
    assert make("one", "two") == 2
    assert "several runs need one output folder: give it with --out DIR." in capsys.readouterr().err


def test_a_run_that_began_with_the_encoder_of_another_knows_the_sources_of_both(place):
    settings = recipe.changed(recipe.load("one/recipe.toml"), ["model.encoder=all/model"])
    (place / "one" / "recipe.toml").write_text(recipe.dump(settings))
    split = load("data", "train")
    assert left_out.trained_sources("one", split) == {source_hash(example) for example in split.examples}


def lose(place):
    (place / "data" / "train.jsonl").rename(place / "data" / "gone")
    write_rows(place / "data" / "train.jsonl", rows_of(place / "data" / "gone")[:-1])


def renumber(place):
    rows = rows_of(place / "data" / "train.jsonl")
    write_rows(
        place / "data" / "train.jsonl",
        [{**row, "id": other["id"]} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)],
    )


@pytest.mark.parametrize(
    "change",
    [lose, renumber, lambda place: (place / "one" / "prepared.json").unlink()],
    ids=["lose", "renumber", "forget"],
)
@pytest.mark.parametrize("runs", [["one"], ["two", "one"]], ids=["alone", "both"])
def test_what_cannot_be_shown_to_be_unseen_is_refused(place, tmp_path, capsys, change, runs):
    change(place)
    assert make(*runs, "--out", tmp_path / "c") == 2
    assert "was trained without part " in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_rows_without_ids_are_left_out_by_their_numbers(place, tmp_path, capsys):
    for run, part in (("three", "1/2"), ("four", "2/2")):
        assert train(run, f"data.leave_out={part}", "data.id=none") == 0
    found = made(tmp_path / "c", "three", "four")
    assert [row["id"] for row in found] == [str(number) for number in range(1, COUNT + 1)]
    assert not any(row["trained_on"] for row in found)
    path = place / "data" / "train.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[::-1]))  # the numbers are those of other rows
    capsys.readouterr()
    assert make("three", "four", "--out", tmp_path / "d") == 2
    assert "cannot check that three was trained without part 1/2" in capsys.readouterr().err


# Training on them


NOTE = "were training sources of the model that generated them."


@pytest.mark.slow
def test_training_says_once_that_candidates_are_of_sources_their_writer_knows(place, tmp_path, capsys):
    made(tmp_path / "seen", "all")
    made(tmp_path / "unseen", "one", "two")
    ranked = ("objective=ce + risk", "model.name=all/model", "train.best=last")
    capsys.readouterr()
    assert train("a", *ranked, f"data.candidates={tmp_path / 'seen'}") == 0
    told = capsys.readouterr().err
    assert told.count(NOTE) == 1
    assert f"{COUNT} of {COUNT} sources with candidates in {tmp_path / 'seen'} {NOTE}" in told
    assert "train two models, with data.leave_out=1/2 and 2/2, then: ngramloss candidates RUN1 RUN2 --out DIR" in told
    assert train("b", *ranked, f"data.candidates={tmp_path / 'unseen'}") == 0
    assert NOTE not in capsys.readouterr().err


def test_marks_change_no_fingerprint_and_may_be_missing(tmp_path):
    row = {"id": "a", "candidates": ["x"], "scores": [1.0]}
    found = []
    for mark in ({}, {"trained_on": True}, {"trained_on": None}, {"trained_on": "yes"}):
        write_rows(tmp_path / "c.jsonl", [row | mark])
        found.append(read_candidates(tmp_path / "c.jsonl"))
    assert len({each.fingerprint for each in found}) == 1
    assert [each.trained_on for each in found] == [{}, {"a": True}, {}, {}]


@pytest.mark.slow
def test_the_study_of_rank_runs_on_a_small_scale(place, capsys):
    """Its file, with a tiny model and fewer rows and seeds; its comment's commands are run as they are."""
    text = (ROOT / "studies" / "rank.toml").read_text()
    commands = [line.removeprefix("#   ngramloss ") for line in text.splitlines() if line.startswith("#   ngramloss ")]
    assert [command.split()[0] for command in commands] == ["candidates", "study"]
    tiny = "".join(f"{name}\n" for name in ('base = "demo"', "[data]", 'name = "data"', "[model]", "width = 16"))
    tiny += (
        'vocabulary = 400\nfeed_forward = 16\ninit_std = 0.5\n[train]\nmax_steps = 2\neval_every = 0\nbest = "last"\n'
    )
    (place / "studies").mkdir()
    (place / "studies" / "own_texts_smollm2.toml").write_text(tiny + "[generation]\nmax_length = 8\n")
    text = text.replace(', "ce + matches + 0.1*rank, unseen"]', "]")
    text = "\n".join(line for line in text.splitlines() if "matches" not in line and "XSum" not in line)
    for old, new in (
        ("[21, 22, 23, 24, 25]", "[21, 22]"),
        ("max_steps=288", "max_steps=3"),
        ("num_beams=4", "num_beams=2"),
    ):
        assert old in text
        text = text.replace(old, new)
    (place / "studies" / "rank.toml").write_text(text)

    own = ["train", "studies/own_texts_smollm2.toml", "--run"]  # what own_texts.sh does before its study
    assert cli.main([*own, "runs/own-texts/smollm2/all"]) == 0
    assert cli.main([*own, "runs/own-texts/smollm2/writer", "--set", "data.leave_out=1/2"]) == 0
    unseen = "candidates runs/own-texts/smollm2/writer --count 8 --out runs/own-texts/smollm2/unseen"
    for command in (unseen, *commands):
        assert cli.main(command.split()) == 0, command
    shown = capsys.readouterr()
    assert "dialogsum: confirmed on test data, R-2 of beam4, 2 seeds" in shown.out
    assert "BRIO for CNN/DailyMail, unseen, 2e-5" in shown.out
    logs = {log.parent.parent.name: rows_of(log) for log in place.glob("runs/rank/*/*/run/log.jsonl")}
    assert len(logs) == 3 * 5
    compared = {name for name, rows in logs.items() if any(key.startswith("rank(") for row in rows for key in row)}
    assert compared == {name for name in logs if "seen" in name}
    assert len(compared) == 3 * 3


# Stopped, continued, shared


STOP = killed_at_third_call("ngramloss.search.writer", "decoded")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 8], ids=["in the first run", "in the second"])
def test_a_killed_job_goes_on_where_it_was(place, tmp_path, monkeypatch, size):
    """The first run writes two batches of eight, the second one more before it is killed."""
    arguments = ["candidates", "one", "two", "--count", "2", "--out", str(tmp_path / "a"), "--batch-size", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert fork(STOP, arguments, environment=environment).wait() == -signal.SIGKILL
    done = rows_of(tmp_path / "a" / "candidates.partial-0.jsonl")
    assert done
    whole, decoded = writer.decoded, []
    monkeypatch.setattr(writer, "decoded", lambda *given: decoded.append(given) or whole(*given))
    assert cli.main(arguments) == 0
    assert sum(len(texts) for _, texts in decoded) >= 2 * (COUNT - len(done))
    assert len(decoded) < COUNT
    made(tmp_path / "b", "one", "two")
    assert (tmp_path / "a" / "candidates.jsonl").read_text() == (tmp_path / "b" / "candidates.jsonl").read_text()


@pytest.mark.slow
def test_two_processes_share_the_sources_of_each_run(place, tmp_path):
    arguments = ["candidates", "one", "two", "--count", "2", "--out", str(tmp_path / "a")]
    program = "import sys\nfrom ngramloss import cli\nsys.exit(cli.main(sys.argv[1:]))"
    codes, err = fork_ranks(program, arguments, environment={**os.environ, "OMP_NUM_THREADS": "1"})
    assert codes == [0, 0], err[-2000:]
    made(tmp_path / "b", "one", "two")
    assert (tmp_path / "a" / "candidates.jsonl").read_text() == (tmp_path / "b" / "candidates.jsonl").read_text()


def test_the_hash_of_a_source_is_that_of_its_row(place, tmp_path):
    found = made(tmp_path / "c", "all", "--limit", 3)
    assert [row["source_hash"] for row in found] == [
        source_hash(row) for row in load("data", "train", limit=3).examples
    ]
