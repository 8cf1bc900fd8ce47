"""Documents per second of whole trainings: the rows, the contestants, what is measured, and the command."""

import json
import math
import os
import signal
from argparse import Namespace
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from benchmarks import medians

from ngramloss.cli import main
from ngramloss.data.batches.plan import LONG
from ngramloss.data.tokens import Tokens
from ngramloss.errors import UserError
from ngramloss.training import python
from ngramloss_bench import benchmark, child, flops, lengths, models, train, trainings
from ngramloss_bench.benchmark import Measured
from ngramloss_bench.window import PROFILED, TRACED, TRIES, Window, busy

# Lengths


@pytest.mark.parametrize(
    ("name", "source", "target"), [("xsum", 480, 31), ("cnndm", 719, 68), ("dialogsum", 180, 33), ("multi30k", 18, 17)]
)
def test_sampled_lengths_have_the_means_of_the_data_set(name, source, target):
    sources, targets = lengths.sample(name, 4000, seed=0)
    assert (sources.mean(), targets.mean()) == (pytest.approx(source, rel=0.05), pytest.approx(target, rel=0.05))
    assert min(sources.min(), targets.min()) >= lengths.SHORTEST
    assert (sources.max() <= 1024, targets.max() <= 128) == (True, True)


def test_documents_that_were_cut_are_sampled_at_the_limit():
    sources, _ = lengths.sample("cnndm", 4000, seed=0)
    assert 0.15 < (sources == 1024).mean() < 0.25


def test_full_rows_have_the_greatest_lengths_of_the_model():
    assert [set(each.tolist()) for each in lengths.sample("full", 3, seed=0)] == [{1024}, {128}]
    assert [set(each.tolist()) for each in lengths.sample("full", 3, 0, longest=(100, 20))] == [{100}, {20}]


def test_a_seed_determines_the_lengths_and_a_models_limits_cut_them():
    first, second, other = (lengths.sample("xsum", 50, seed=seed)[0] for seed in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)
    sources, targets = lengths.sample("xsum", 500, 1, longest=(100, 20))
    assert (sources.max(), targets.max()) == (100, 20)


def test_written_rows_are_read_as_tokens(tmp_path):
    sources, targets = np.array([5, 3, 9]), np.array([4, 4, 7])
    lengths.write_tokens(tmp_path, sources, targets, vocabulary=50, seed=0)
    tokens = Tokens(tmp_path)
    assert tokens.lengths.tolist() == [5, 3, 9]
    assert [len(tokens[row]["labels"]) for row in range(3)] == [4, 4, 7]
    ids = np.concatenate([tokens[row]["input_ids"] for row in range(3)])
    assert ids.min() >= 4
    assert 20 < ids.max() < 50


# What is measured


def test_padding_is_counted_in_sources_and_targets_together():
    ids, labels = torch.ones(2, 4), torch.tensor([[1, 2], [1, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    whole = {"input_ids": ids, "labels": labels, "decoder_input_ids": labels}
    padded = whole | {"attention_mask": mask}
    assert trainings.padding_share([padded]) == pytest.approx(3 / 12)
    assert trainings.padding_share([whole]) == pytest.approx(1 / 12)  # without a mask no source is padded
    joined = {name: value for name, value in padded.items() if name != "decoder_input_ids"}
    assert trainings.padding_share([joined]) == pytest.approx(2 / 8)  # targets are in the same rows
    ours = {"input_ids": ids, "labels": labels, "label_positions": torch.tensor([[1, 2], [4, 0]])}
    assert trainings.padding_share([ours]) == pytest.approx(2 / 8)  # the rows end with positions 3 and 5
    filled = padded | {"labels": torch.tensor([[1, 2], [-100, -100]])}  # nothing of its second row is real
    assert trainings.padding_share([filled]) == pytest.approx(6 / 12)
    assert trainings.padding_share([[whole, padded]]) == pytest.approx(4 / 24)
    assert trainings.padding_share([SimpleNamespace(batches=[padded, [whole]], counts=torch.ones(2))]) == pytest.approx(
        4 / 24
    )


def test_the_gpu_is_busy_while_anything_runs_on_it():
    assert busy([(10, 1010), (510, 2010), (600, 700), (5010, 5510)]) == 2500
    assert busy([]) == 0


def test_the_gpu_is_idle_for_a_share_of_the_steps_in_which_it_was_watched(monkeypatch):
    """The steps of the window may be longer: with lengths like XSum's, eight others had a fifth fewer tokens."""
    window = Window(warm_up=1, steps=2, cuda=True)
    clock = iter([0.0, 1.0, 5.0, 5.0 + PROFILED * 0.010])  # steps of 500 ms, profiled ones of 10 ms
    spans = [(step * 10_000_000, 8_000_000) for step in range(PROFILED)]
    event = SimpleNamespace(device_type=lambda: SimpleNamespace(name="CUDA"), is_user_annotation=lambda: False)
    events = [
        SimpleNamespace(**vars(event), start_ns=lambda start=start: start, duration_ns=lambda length=length: length)
        for start, length in spans
    ]
    recorded = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    profiler = SimpleNamespace(start=bool, stop=bool, profiler=recorded)
    monkeypatch.setattr("ngramloss_bench.window.profile", lambda activities: profiler)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    monkeypatch.setattr(Window, "_now", lambda self: next(clock))
    for number in range(1, window.last_step + 1):
        window.after(number)
    assert window.milliseconds == pytest.approx([500])
    assert window.device_milliseconds == pytest.approx(8)
    assert window.idle == pytest.approx(0.2)


def test_work_of_what_is_left_out_is_not_taken_for_that_of_steps(monkeypatch):
    window = Window(warm_up=1, steps=1, cuda=True)
    monkeypatch.setattr("ngramloss_bench.window.profile", lambda activities: SimpleNamespace(start=bool, stop=bool))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 0)
    clock = iter(range(100))
    monkeypatch.setattr(Window, "_now", lambda self: next(clock))
    for number in range(1, window.last_step + 1):
        window.after(number)
        if number > 1:
            with window.without():
                pass
    assert window.milliseconds == [1000]
    assert math.isnan(window.idle)
    assert math.isnan(window.device_milliseconds)


def test_the_next_steps_are_profiled_if_something_that_is_left_out_fell_into_the_first(monkeypatch):
    window, profiles = Window(warm_up=1, steps=1, cuda=True), []
    event = SimpleNamespace(
        device_type=lambda: SimpleNamespace(name="CUDA"),
        is_user_annotation=lambda: False,
        start_ns=lambda: 0,
        duration_ns=lambda: PROFILED * 3_000_000,
    )
    recorded = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: [event]))
    profiler = SimpleNamespace(start=lambda: profiles.append("start"), stop=lambda: profiles.append("stop"))
    monkeypatch.setattr(
        "ngramloss_bench.window.profile", lambda activities: SimpleNamespace(**vars(profiler), profiler=recorded)
    )
    for name in ("max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    clock = iter(range(100))
    monkeypatch.setattr(Window, "_now", lambda self: next(clock))
    for number in range(1, window.last_step + 1):
        window.after(number)
        if number == 3:
            with window.without():
                pass
    assert window.device_milliseconds == pytest.approx(3)
    assert profiles == ["start", "stop", "start", "stop"]


def test_the_window_begins_after_the_warm_up_and_ends_with_its_last_step(monkeypatch):
    window = Window(warm_up=2, steps=4, cuda=False, windows=2)
    clock = {2: 10.0, 6: 12.0, 10: 13.0}
    now = []
    monkeypatch.setattr(Window, "_now", lambda self: clock[now[-1]])
    for step in range(1, 13):
        now.append(step)
        window.after(step)
    assert window.milliseconds == [500, 250]
    assert window.last_step == 10


def test_what_happens_once_in_a_training_is_left_out_of_the_window(monkeypatch):
    class Step:
        def capture(self, seconds):
            times.append(times[-1] + seconds)
            return seconds

    times, window, capture = [0.0], Window(warm_up=1, steps=2, cuda=False), Step.capture
    monkeypatch.setattr(Window, "_now", lambda self: times[-1])
    with trainings._left_out_of(window, Step, "capture"):
        for number, seconds in ((1, 50.0), (2, 7.0), (3, 0.0)):
            times.append(times[-1] + 1.0)  # the step itself
            assert Step().capture(seconds) == seconds
            window.after(number)
    assert window.milliseconds == pytest.approx([1000])
    assert Step.capture is capture


def test_on_a_gpu_as_many_steps_are_profiled_again_and_a_trace_has_a_few_more(tmp_path):
    assert Window(warm_up=2, steps=4, cuda=True).last_step == 6 + TRIES * PROFILED
    assert Window(warm_up=2, steps=4, cuda=True, profiled=False).last_step == 6
    assert (
        Window(warm_up=2, steps=4, cuda=True, trace=tmp_path / "trace.json").last_step == 6 + TRIES * PROFILED + TRACED
    )


def test_multiples_are_of_random_batches_and_of_the_best_stock_trainer():
    speeds = {"stock-random": [100], "stock-grouped": [200], "stock-compiled": [], "eager": [300]}
    rows = [
        Measured(
            train.CONTESTANTS[name].label, values={"docs/s": speed} if speed else {}, why_not="" if speed else "no"
        )
        for name, speed in speeds.items()
    ]
    benchmark.relate(train.COLUMNS, rows)
    assert [row.median("× stock") for row in rows if not row.why_not] == [1, 2, 3]
    assert [row.median("× best") for row in rows if not row.why_not] == [0.5, 1, 1.5]


# Operations


@pytest.mark.parametrize("name", ["bart-tiny", "llama-tiny"])
def test_operations_are_those_that_a_person_counts(name):
    """Every product of the model, one after the other: 2 per multiplication forward, twice that backward."""
    total = 0
    for S, T in ((7, 3), (4, 5)):
        if name == "bart-tiny":  # D = 32, one layer on each side, 4 · 32 in the middle, 1,000 tokens
            attention, middle = 32 * 32, 2 * 32 * 128
            encoder = S * (4 * attention + middle) + 2 * S * S * 32
            own = T * (4 * attention + middle) + 2 * sum(range(1, T + 1)) * 32
            across = T * 2 * attention + S * 2 * attention + 2 * S * T * 32
            products = encoder + own + across + T * 1000 * 32
        else:  # D = 32, two layers, four heads of 8, two of keys and values, 64 in the middle, 1,000 tokens
            row = S + T
            layer = row * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64) + 2 * sum(range(1, row + 1)) * 32
            products = 2 * layer + T * 1000 * 32
        total += 6 * products
    found = flops.per_document(models.configuration(name), np.array([7, 4]), np.array([3, 5]))
    assert found == total / 2


def test_operations_of_a_model_with_other_layers_are_unknown():
    from models import tiny

    lengths_of_rows = np.array([5]), np.array([5])
    assert flops.per_document(tiny("t5").config, *lengths_of_rows) > 0
    assert math.isnan(flops.per_document(tiny("gpt2").config, *lengths_of_rows))  # its weights are in no nn.Linear


def test_the_peak_is_that_of_the_device_if_it_is_known(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert flops.peak("cuda", "bf16") == 989e12
    assert math.isnan(flops.peak("cuda", "fp32"))
    assert math.isnan(flops.peak("cpu", "bf16"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 NVL")
    assert math.isnan(flops.peak("cuda", "bf16"))


# Contestants


@pytest.mark.parametrize(
    ("only", "compiled", "device", "names"),
    [
        ([], False, "cpu", ["stock-random", "stock-grouped", "eager"]),
        ([], True, "cpu", ["stock-random", "stock-grouped", "stock-compiled", "eager"]),
        ([], False, "cuda", ["stock-random", "stock-grouped", "eager", "captured", "captured-compiled"]),
        ([], True, "cuda", [name for name in train.CONTESTANTS if not name.startswith("liger")]),
        (["captured-compiled", "stock-random"], False, "cpu", ["stock-random", "captured-compiled"]),
    ],
)
def test_contestants_that_compile_or_need_a_gpu_run_only_if_they_can_or_are_named(only, compiled, device, names):
    assert train.chosen(only, compiled=compiled, device=device) == names


def test_liger_runs_where_it_is_installed_and_has_kernels(monkeypatch):
    stock, ours = ["stock-random", "stock-grouped"], ["eager", "captured", "captured-compiled"]
    names = [[*stock, *ours], [*stock, *ours], [*stock, "liger-random", "liger-grouped", *ours]]
    for installed, decoder_only, expected in zip((False, True, True), (True, False, True), names, strict=True):
        monkeypatch.setattr(train, "find_spec", lambda name, installed=installed: object() if installed else None)
        assert train.chosen([], compiled=False, device="cuda", decoder_only=decoder_only) == expected
    liger = train.CONTESTANTS["liger-random"]
    assert liger.why_not("cuda", False) == "Liger-Kernel has no kernels for encoder-decoders."
    assert liger.why_not("cpu", True) == "needs a GPU."


@pytest.fixture(params=["bart-tiny", "llama-tiny"])
def options(request):
    common = {"objective": "ce + matches(2)", "batch_size": 3, "accumulate": 2, "documents": 12, "workers": 0}
    common |= {"precision": "fp32", "device": "cpu", "seed": 0}
    return Namespace(model=request.param, **common)


@pytest.fixture
def tokens(options, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    trainings.write_rows(folder, "multi30k", 12, models.configuration(options.model), seed=0)
    return folder


def rows_of(batch):
    """The source and the labels of each row; those of a decoder-only model are one row."""
    masks = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    for row, (ids, mask, labels) in enumerate(zip(batch["input_ids"], masks, batch["labels"], strict=True)):
        real = labels != -100
        if "label_positions" in batch:
            positions = batch["label_positions"][row][real] + 1
            assert batch["input_ids"].flatten()[positions].tolist() == labels[real].tolist()
            mask = torch.arange(len(ids)) <= positions.max() % len(ids)
        if "decoder_input_ids" in batch:
            yield (*ids[mask.bool()].tolist(), None, *batch["decoder_input_ids"][row][real].tolist())
        yield (*ids[mask.bool()].tolist(), None, *labels[real].tolist())


@pytest.fixture
def epoch(options, tokens, tmp_path):
    """A function: the batches of an epoch of two steps, after training on them."""

    def train_on(name):
        contestant, window = train.CONTESTANTS[name], Window(warm_up=1, steps=1, cuda=False)
        way = trainings.ours if contestant.ours else trainings.stock
        return list(islice(way(options, tokens, str(tmp_path), window, **contestant.settings), 4))

    return train_on


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stock-grouped", "eager"])
def test_all_contestants_train_on_the_same_rows_in_batches_of_the_same_size(epoch, name):
    seen = {}
    for each in ("stock-random", name):
        batches = list(trainings.micro_batches(epoch(each)))
        assert [len(batch["labels"]) for batch in batches] == [3, 3, 3, 3]
        seen[each] = [row for batch in batches for row in rows_of(batch)]
    assert seen["stock-random"] != seen[name]
    assert sorted(seen["stock-random"], key=str) == sorted(seen[name], key=str)


def test_compiled_steps_are_the_first_of_a_long_training(options, tokens, tmp_path, monkeypatch):
    asked, run = [], python.run

    def watched(task, settings, here, around):
        asked.append(settings)
        task.settings = replace(settings, compile=False)
        return run(task, task.settings, here, around)

    monkeypatch.setattr(python, "run", watched)
    window = Window(warm_up=1, steps=1, cuda=False)
    for compiled in (False, True):
        batches = trainings.ours(options, tokens, str(tmp_path), window, capture=False, compiled=compiled)
        assert len(list(batches)) == 2  # an epoch
    assert [settings.max_steps for settings in asked] == [window.last_step + 1, trainings.LONG]
    assert trainings.LONG >= LONG  # is one for the plan, too


@pytest.mark.slow
def test_stock_groups_by_length_where_it_is_asked_to(epoch):
    def spread(name):
        rows = [int(mask.sum()) for batch in epoch(name) for mask in batch["attention_mask"]]
        return sum(abs(a - b) for a, b in pairwise(rows))

    assert spread("stock-grouped") < spread("stock-random")


def test_own_data_are_tokenised_in_whole_steps(tmp_path, monkeypatch):
    from models import tiny

    from ngramloss.models.loading import train_tokenizer

    rows = [{"document": f"number {row} of a few words", "summary": f"words {row}"} for row in range(11)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "model"
    train_tokenizer((row["document"] for row in rows), 300).save_pretrained(folder)
    model = tiny("bart")
    model.resize_token_embeddings(300)
    model.save_pretrained(folder)

    def tokenised(documents):
        asked = Namespace(model=str(folder), data=str(tmp_path / "data.jsonl"), documents=documents)
        return trainings.tokenised_rows(tmp_path / "cache", asked, models.configuration(str(folder)), 4)

    assert len(Tokens(tokenised(100))) == 8
    tiny("bart").save_pretrained(folder)
    with pytest.raises(UserError, match=r"has \d+ tokens, but the model \d+"):
        tokenised(100)
    with pytest.raises(UserError, match="has 3 documents, but one step needs 4"):
        tokenised(3)


def test_a_decoder_only_model_in_a_folder_needs_no_tokenizer(tmp_path):
    from models import tiny

    model = tiny("llama")
    model.config.pad_token_id = None
    model.save_pretrained(tmp_path)
    assert models.built(str(tmp_path)).config.pad_token_id == 0


# Processes


def _add(a, b):
    return a + b


def _fail():
    raise ValueError("expected\n one " + "x" * 200)


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_process_answers_with_a_result_or_the_reason_why_there_is_none():
    assert child.in_child(_add, 2, 3) == 5
    with pytest.raises(child.Failed, match=f"^ValueError: expected one {'x' * 107}$"):
        child.in_child(_fail)
    with pytest.raises(child.Failed, match=r"^the process ended with exit code -9$"):
        child.in_child(_die)


# The command

TINY = [
    "bench",
    "train",
    "--device",
    "cpu",
    "--model",
    "bart-tiny",
    "--lengths",
    "multi30k",
    "--documents",
    "67",
    "--batch-size",
    "4",
]
TINY += ["--warm-up", "1", "--steps", "2", "--windows", "2", "--workers", "0", "--repeats", "2"]


@pytest.mark.slow
def test_the_command_measures_reports_failures_and_writes_its_files(tmp_path, capfd):
    written, traced = tmp_path / "train.json", tmp_path / "trace.json"
    only = ["--only", "stock-random", "stock-grouped", "eager", "captured"]
    assert main([*TINY, *only, "-o", str(written), "--profile", str(traced)]) == 0
    names = ["stock trainer, random batches", "stock trainer, group_by_length", "ngramloss, eager"]
    content, rows = json.loads(written.read_text()), medians(written)
    assert list(rows) == names
    for row in rows.values():
        assert not {"GPU ms", "MFU %"} & {*row}, "no GPU, and no known peak"
        assert row["peak GiB"] > 0
    speeds, times = (
        next(row["values"] for row in content["rows"] if row["column"] == name) for name in ("docs/s", "ms a step")
    )
    assert speeds == pytest.approx([8e3 / spent for spent in times])
    assert len(speeds) == 4, "two windows of two trainings"
    assert rows[names[0]]["× stock"] == pytest.approx(1)
    assert rows["ngramloss, eager"]["padding %"] < rows[names[0]]["padding %"]
    failed = {"group": "", "name": "ngramloss, captured", "why_not": "UserError: needs a GPU."}
    assert content["failed"] == [failed]
    assert (content["settings"]["accumulate"], content["settings"]["documents"]) == (2, 64)
    printed, said = capfd.readouterr()
    assert "CPU thread" in printed.splitlines()[1]
    shown = [line.split("  ")[0] for line in printed.splitlines()[3:]]
    assert shown == [*names, "ngramloss, captured: UserError: needs a GPU."]
    assert "ngramloss, eager: " in said
    assert "note:" not in said
    assert any(event.get("cat") == "cpu_op" for event in json.loads(traced.read_text())["traceEvents"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "nowhere/x.json"], "cannot write nowhere/x.json: there is no folder nowhere. Create it first."),
        (["-o", "."], ". is a folder; give the name of a file."),
        (["--profile", "nowhere/x.json"], "cannot write nowhere/x.json"),
        (["--objective", "matchs(2)"], "unknown objective 'matchs'. Did you mean 'matches'?"),
        (["--batch-size", "0"], "--batch-size must be 1 or more, got 0."),
        (["--documents", "7"], "a step of 4 × 2 rows needs at least 1 row and at most --documents 7."),
        (["--steps", "0"], "--steps must be 1 or more, got 0."),
    ],
)
def test_a_mistake_is_reported_before_any_training(arguments, message, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ngramloss_bench.benchmark.measure", lambda _: pytest.fail("it trains"))
    assert main([*TINY, *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_trace_needs_a_contestant_of_ours_that_can_run(tmp_path, capsys):
    assert main([*TINY, "--only", "stock-random", "captured", "--profile", str(tmp_path / "trace.json")]) == 2
    assert (
        "--profile traces ngramloss, but --only names none of its contestants that can run here."
        in capsys.readouterr().err
    )


def test_own_data_need_a_model_with_a_tokenizer(capsys):
    arguments = [word for word in TINY if word not in ("--lengths", "multi30k")]
    assert main([*arguments, "--data", "newswire"]) == 2
    assert (
        "bart-tiny is created here with random weights and has no tokenizer, which --data needs."
        in capsys.readouterr().err
    )


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_reported_before_any_training(tmp_path, capsys):
    tmp_path.chmod(0o500)
    assert main([*TINY, "-o", str(tmp_path / "x.json")]) == 2
    assert "permission denied" in capsys.readouterr().err


def test_if_all_contestants_fail_so_does_the_command(capfd):
    assert main([*TINY, "--only", "captured", "--steps", "8"]) == 1
    printed, said = capfd.readouterr()
    assert printed.endswith("ngramloss, captured: UserError: needs a GPU.\n")
    assert "note: 64 rows are 8 steps, so an epoch ends and the next begins in the steps that are measured." in said
