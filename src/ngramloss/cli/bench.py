"""arguments of ``ngramloss bench`` → time and memory on this machine, printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngramloss.cli.options import Verbs, add_device, add_number, add_trust, choice, chosen_device, output_file, verb
from ngramloss.engine_registry import engine_packages
from ngramloss.errors import UserError
from ngramloss.output.console import logger, print_result
from ngramloss.version import installed

if TYPE_CHECKING:
    from pathlib import Path

BENCH = "Measure time and memory on this machine, and compare with other implementations."

HEAD = """\
Time the path from hidden states to the loss and its gradients, for each objective and backend. PyTorch's cross-entropy
and other libraries are timed in the same run."""

HEAD_EXAMPLES = """\
examples:
  ngramloss bench head
  ngramloss bench head --sizes bart-16 bart-64 -o head.json --plot head.png
  ngramloss bench head --objectives ce "ce + soft(1)" "ce + unlikelihood"
  ngramloss bench head --sizes bart-64 --objectives ce "ce + rdrop"      # 2 × 32 rows, for every line
  ngramloss bench head --sizes bart-16 --loops        # the paper's own loops too: slow
"""

STEP = "Measure documents per second in training: with the model's own loss, and with each objective attached."

STEP_EXAMPLES = """\
examples:
  ngramloss bench step --batch-size 64
  ngramloss bench step --model path/or/hub-id --objectives "ce + rewards(2,3,4)" --source 512 --target 64
"""

TRAIN = """\
Measure documents per second of real trainings: Hugging Face's trainer with the model's own cross-entropy, if it is
installed also with Liger-Kernel, and the loop of ngramloss train with an objective, on the same rows and with as many
sequences in a step. Each trains in a process of its own. The rows have the lengths of a known data set's documents, or
are your own data. For a decoder-only model, a target follows its source in one row, and only the target has labels."""

TRAIN_EXAMPLES = """\
examples:
  ngramloss bench train
  ngramloss bench train --lengths cnndm --compile -o train.json --plot train.png
  ngramloss bench train --model smollm2-135m --lengths dialogsum --batch-size 32 --accumulate 1      # decoder-only
  ngramloss bench train --model path/or/hub-id --data train.jsonl --profile trace.json
  ngramloss bench train --device cpu --model bart-tiny --lengths multi30k --warm-up 5 --steps 20      # quick
"""

GENERATE = """\
Measure documents and tokens per second of each engine that is installed, at several batch sizes, beside Hugging Face's
`generate`, and the share of texts that are the same. Each engine runs in a process of its own. Documents are random
tokens, and all texts have the same length, because random weights would not end them."""

GENERATE_EXAMPLES = """\
examples:
  ngramloss bench generate
  ngramloss bench generate --beams 4 --length 62 --source 400 --batch-size 8 -o generate.json --plot generate.png
  ngramloss bench generate --model path/or/hub-id --engines ctranslate2-int8
  ngramloss bench generate --beams 6 --source 512 --batch-size 32 128 --engines graph      # on a GPU
  ngramloss bench generate --model smollm2-135m --source 256 --length 48 --batch-size 64 --engines graph
  ngramloss bench generate --model bart-tiny --source 50 --length 20      # quick
"""

CANDIDATES = """\
Time a training step that compares candidates of each source, as `rank` does, beside a plain step and its encoder. The
encoder reads a source once, and each candidate is one more text of the decoder, so the parts are the encoder once and
the rest of the plain step for each text. On a GPU, forward and backward are a CUDA graph. With --online, train shortly
on candidates that the model writes meanwhile: documents and texts per second, and the share of time spent writing."""

CANDIDATES_EXAMPLES = """\
examples:
  ngramloss bench candidates
  ngramloss bench candidates --count 4 --batch-size 8 --source 1024 --target 128 -o candidates.json
  ngramloss bench candidates --model bart-tiny --count 2 --batch-size 2 --source 20 --target 10      # quick
  ngramloss bench candidates --online --count 4 --objective "ce + risk" --refresh 1 8 --steps 20
"""

NGRAMS = "Time the n-gram part of an objective for T = 128 to 32,768 tokens. It grows like T log T, not T²."

NGRAMS_EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch-size 16 --device cuda
"""

SCALING = """\
Train shortly with more and more rows in a step, rows in all, and processes, which average their gradients or shard the
model (FSDP), and show how the cost grows, which share of the time goes into communication, and whether losses are the
same. Each process has one thread. With --bandwidth, also compute what more devices like this one would do, on paper: a
step takes a + b · tokens / N + 2 · (N − 1) / N · bytes of gradients / bandwidth."""

SCALING_EXAMPLES = """\
examples:
  ngramloss bench scaling
  ngramloss bench scaling --model bart-base --batch-size 4 8 16 --bandwidth 25 --devices 2 8 64 -o scaling.json
  ngramloss bench scaling --model bart-tiny --batch-size 4 8 --rows 64 --warm-up 1 --steps 2      # quick
"""

OBJECTIVES = ["ce", "ce + matches(2,3,4)"]
LENGTHS = ("xsum", "cnndm", "dialogsum", "multi30k", "full")
CONTESTANTS = (
    "stock-random",
    "stock-grouped",
    "stock-compiled",
    "liger-random",
    "liger-grouped",
    "eager",
    "captured",
    "captured-compiled",
)


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    bench = verbs.add_parser("bench", help="measure time and memory on this machine", description=BENCH)
    benches = choice(bench, metavar="WHAT", title="what to measure")
    _add_head(verb(benches, "head", "hidden states → loss → gradients", HEAD, HEAD_EXAMPLES))
    _add_step(verb(benches, "step", "documents per second in training", STEP, STEP_EXAMPLES))
    _add_train(verb(benches, "train", "documents per second of whole trainings", TRAIN, TRAIN_EXAMPLES))
    _add_generate(verb(benches, "generate", "documents per second of each engine", GENERATE, GENERATE_EXAMPLES))
    _add_candidates(verb(benches, "candidates", "a step that compares candidates", CANDIDATES, CANDIDATES_EXAMPLES))
    _add_scaling(verb(benches, "scaling", "cost by tokens, rows and processes", SCALING, SCALING_EXAMPLES))
    _add_ngrams(verb(benches, "ngrams", "the n-gram part as T grows", NGRAMS, NGRAMS_EXAMPLES))


def _add_head(head: argparse.ArgumentParser) -> None:
    sizes = "sizes to time (default: bart-16 bart-64 llama; without a GPU: cpu)"
    head.add_argument("--sizes", nargs="+", metavar="SIZE", help=sizes)
    objectives = "objectives to time (default: ce, and ce with matches, rewards, precision and bag)"
    head.add_argument("--objectives", nargs="+", metavar="OBJECTIVE", help=objectives)
    types = "data type (default: bfloat16 on a GPU, float32 on a CPU)"
    head.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help=types)
    _add_loops(head)
    _add_files(head, "all measurements")
    share = "share of the positions with a label, as behind a prompt; then labelled positions are also measured alone"
    head.add_argument("--labelled", type=_share, default=1.0, metavar="SHARE", help=f"{share} (default: 1)")
    head.set_defaults(run_verb=_bench_head)


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return share


def _add_step(step: argparse.ArgumentParser) -> None:
    _add_model(step)
    objectives = (
        f"objectives to attach (default: {' and '.join(map(repr, OBJECTIVES))}; as CUDA graphs, also rewards, "
        "precision and bag)"
    )
    step.add_argument("--objectives", nargs="+", metavar="OBJECTIVE", help=objectives)
    add_number(step, "--batch-size", 16, "B", "batch size")
    add_number(step, "--source", 1024, "T", "document tokens")
    add_number(step, "--target", 128, "T", "summary tokens")
    _add_precision(step, "bf16 and fp16 are mixed precision; bf16-pure has bf16 weights too", "bf16-pure")
    _add_loops(step)
    _add_files(step, "all measurements", plot=False)
    step.set_defaults(run_verb=_bench_step)


def _add_train(train: argparse.ArgumentParser) -> None:
    _add_model(train)
    _add_objective(train, "ce + matches(2,3,4)", "objective of ngramloss")
    rows = train.add_mutually_exclusive_group()
    rows.add_argument(
        "--lengths",
        choices=LENGTHS,
        default="xsum",
        help="train on random tokens in rows as long as this data set's documents: 1.35 × words, cut at 1,024 and 128 "
        "tokens; full: all have these lengths (default: %(default)s)",
    )
    own_data = "train on this data set instead, as in `ngramloss train`; the model must have a tokenizer"
    rows.add_argument("--data", metavar="NAME", help=own_data)
    add_number(train, "--documents", 6400, "N", "rows to train on, rounded down to whole steps")
    add_number(train, "--batch-size", 16, "B", "batch size")
    add_number(train, "--accumulate", 2, "N", "batches in a step")
    add_number(train, "--warm-up", 20, "N", "steps before the measurement")
    steps = (
        "steps that are measured; the stock trainer sorts pools of up to 50 steps by length, so fewer may be the long "
        "or the short ones"
    )
    add_number(train, "--steps", 50, "N", steps)
    add_number(train, "--workers", 2, "N", "processes that load data, for each trainer")
    _add_precision(train, "bf16 and fp16 are mixed precision")
    train.add_argument("--compile", action="store_true", help="also let the stock trainer compile, which takes minutes")
    only = f"train with these only: {', '.join(CONTESTANTS)}"
    train.add_argument("--only", nargs="+", choices=CONTESTANTS, default=[], metavar="NAME", help=only)
    add_number(train, "--seed", 0, "N", "random seed of rows and their order")
    trace = "write a Chrome trace of a few steps of ngramloss, captured where that runs"
    train.add_argument("--profile", metavar="FILE", help=trace)
    _add_files(train, "settings and all measurements")
    train.set_defaults(run_verb=_bench_train)


def _add_generate(generate: argparse.ArgumentParser) -> None:
    _add_model(generate)
    engines = "engines beside hf, as in `ngramloss list engines` (default: all that are installed)"
    generate.add_argument("--engines", nargs="+", default=[], metavar="NAME", help=engines)
    batches = "batch sizes (default: 1 8)"
    generate.add_argument("--batch-size", type=int, nargs="+", default=[1, 8], metavar="B", help=batches)
    add_number(generate, "--beams", 4, "N", "beams; 1 is greedy")
    add_number(generate, "--length", 62, "T", "tokens of each text, with its start and end; behind a prompt, new ones")
    add_number(generate, "--source", 400, "T", "tokens of each document, or of each prompt")
    add_number(generate, "--repeats", 3, "N", "times that each batch is written; the median counts")
    _add_precision(generate, "of the weights, for engines that take them as they are")
    add_number(generate, "--seed", 0, "N", "random seed of the documents")
    _add_files(generate, "settings and all measurements")
    generate.set_defaults(run_verb=_bench_generate)


def _add_candidates(candidates: argparse.ArgumentParser) -> None:
    _add_model(candidates)
    _add_objective(candidates, "ce + 10*rank(margin=0.001,alpha=2)", "with a term that compares candidates")
    add_number(candidates, "--count", 16, "K", "candidates of each source")
    add_number(candidates, "--batch-size", 16, "B", "sources")
    add_number(candidates, "--source", 512, "T", "source tokens")
    add_number(candidates, "--target", 64, "T", "tokens of each text")
    _add_precision(candidates, "bf16 and fp16 are mixed precision")
    candidates.add_argument("--online", action="store_true", help="train on texts that the model writes meanwhile")
    every = "with --online: steps for which texts are written at a time (default: 1 8)"
    candidates.add_argument("--refresh", type=int, nargs="+", default=[1, 8], metavar="N", help=every)
    add_number(candidates, "--steps", 16, "N", "with --online: steps that are measured, after as many others")
    _add_files(candidates, "all measurements", plot=False)
    candidates.set_defaults(run_verb=_bench_candidates)


def _add_scaling(scaling: argparse.ArgumentParser) -> None:
    _add_model(scaling)
    scaling.set_defaults(model="small")
    _add_objective(scaling, "ce + matches(2,3,4)", "objective to train on")
    lengths = "rows are random tokens, as long as this data set's documents; full: 1,024 and 128 (default: %(default)s)"
    scaling.add_argument("--lengths", choices=LENGTHS, default="multi30k", help=lengths)
    batches = "rows of a step over all processes; all but the first table have the largest (default: 8 16 32)"
    scaling.add_argument("--batch-size", type=int, nargs="+", default=[8, 16, 32], metavar="B", help=batches)
    rows = "rows in all; all but the second table have the fewest (default: 1000 100000)"
    scaling.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000], metavar="N", help=rows)
    processes = "numbers of processes (default: 1 2; on GPUs, 1 and all GPUs)"
    scaling.add_argument("--processes", type=int, nargs="+", metavar="N", help=processes)
    add_number(scaling, "--warm-up", 3, "N", "steps before the measurement")
    add_number(scaling, "--steps", 10, "N", "steps that are measured")
    bandwidth = "compute what more devices would do that send and receive this many GB per second each"
    scaling.add_argument("--bandwidth", type=float, metavar="GB/S", help=bandwidth)
    devices = "numbers of devices to compute that for (default: 2 4 8 16 64)"
    scaling.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16, 64], metavar="N", help=devices)
    _add_precision(scaling, "bf16 is mixed precision")
    add_number(scaling, "--seed", 0, "N", "random seed of rows and their order")
    _add_files(scaling, "settings, measurements and what was computed", plot=False)
    scaling.set_defaults(run_verb=_bench_scaling)


def _add_ngrams(ngrams: argparse.ArgumentParser) -> None:
    _add_objective(ngrams, "matches(2,3,4)", "objective to time")
    add_number(ngrams, "--batch-size", 4, "B", "sequences per batch")
    add_number(ngrams, "--longest", 32768, "T", "longest sequence to time, in tokens")
    add_device(ngrams)
    ngrams.set_defaults(run_verb=_bench_ngrams)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = (
        "bart-base, small or bart-tiny, or decoder-only smollm2-135m or llama-tiny, with random weights, a folder or a "
        "hub id (default: %(default)s)"
    )
    parser.add_argument("--model", default="bart-base", metavar="NAME", help=model)
    add_trust(parser)


def _add_objective(parser: argparse.ArgumentParser, default: str, help: str) -> None:
    parser.add_argument("--objective", default=default, metavar="OBJECTIVE", help=f"{help} (default: %(default)s)")


def _add_precision(parser: argparse.ArgumentParser, help: str, *more: str) -> None:
    choices = ["bf16", "fp16", "fp32", *more]
    parser.add_argument("--precision", choices=choices, help=f"{help} (default: bf16 on a GPU, else fp32)")


def _add_loops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")


def _add_files(parser: argparse.ArgumentParser, content: str, *, plot: bool = True) -> None:
    parser.add_argument("-o", "--out", metavar="FILE", help=f"write {content} as JSON")
    if plot:
        parser.add_argument("--plot", metavar="FILE", help="draw a bar chart")
    add_device(parser)


def _check_objectives(objectives: Sequence[str], *, has: str = "") -> None:
    """Raise if an objective is written wrongly or needs candidates or twins; ``has`` names what this benchmark has."""
    from ngramloss.terms.parser import parse
    from ngramloss.terms.term import check_names

    for objective in objectives:
        terms = parse(objective)
        check_names(terms)
        for term in terms:
            for missing in term.requires - {has}:
                raise UserError(f"{term.name} reads {missing}, and bench has none. Leave it out of {objective!r}.")


def _precision(options: argparse.Namespace, device: str) -> str:
    return options.precision or ("bf16" if device == "cuda" else "fp32")


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    """The model and the shape of a step, for the benchmarks that time one step."""
    names = ("source", "target", "trust_remote_code")
    return {"batch": options.batch_size, **{name: getattr(options, name) for name in names}}


def _step_title(options: argparse.Namespace, precision: str, device: str) -> str:
    from ngramloss.bench.head import machine

    shape = f"{options.source} → {options.target} tokens, batch {options.batch_size}"
    return f"{options.model}, {shape}, {precision}, {machine(device)}"


def _machine_in_child(device: str) -> str:
    """The machine's description, from a process of its own: this one must not hold memory of the GPU."""
    from ngramloss.bench import child, head

    machine = child.in_child(head.machine, device)
    if machine.result is None:
        raise RuntimeError(machine.why_not)
    return machine.result


def _bench_head(options: argparse.Namespace) -> int:
    import torch

    from ngramloss.bench import chart, head

    _check_objectives(options.objectives or (), has="twins")  # before anything is timed
    json_file, plot_file = (output_file(name, []) for name in (options.out, options.plot))
    chart.raise_unless_drawable(plot_file)
    device = chosen_device(options)
    sizes = options.sizes or (["bart-16", "bart-64", "llama"] if device == "cuda" else ["cpu"])
    for size in sizes:
        if size not in head.SIZES:
            raise UserError(f"unknown size {size!r}. Choose from {', '.join(head.SIZES)}.")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    title = f"{head.machine(device)}, {str(dtype).removeprefix('torch.')}"
    print_result(title)
    rows: list[head.Row] = []
    measured = head.measure(
        sizes, device, dtype, loops=options.loops, objectives=options.objectives or (), share=options.labelled
    )
    for row in measured:
        if not rows or row.size != rows[-1].size:
            print_result(f"\n{row.size}: {head.SIZES[row.size]}\n{'':<54}{'ms':>9}{'GiB':>8}{'/stock':>9}{'/bound':>9}")
        rows.append(row)
        values = [(row.milliseconds, 9), (row.gibibytes, 8), (row.to_stock, 9), (row.to_floor, 9)]
        print_result(f"{row.what:<54}{row.why_not or ''.join(_cell(*value) for value in values)}")
    _explain_dashes(rows)
    if impossible := [row.what for row in rows if row.to_floor < 0.95 and head.LABELLED not in row.what]:
        logger.warning(
            f"warning: {impossible[0]!r} took less time than the lower bound, so the machine was busy with something "
            "else and no time in this table can be trusted. Measure again when it is free."
        )
    if json_file:
        _write_json(json_file, {"machine": title, "rows": [row._asdict() for row in rows]})
    if plot_file:
        head.plot(rows, plot_file, title)
    return 0


def _bench_step(options: argparse.Namespace) -> int:
    from ngramloss.bench import head, step

    _check_objectives(options.objectives or ())
    json_file = output_file(options.out, [])
    device = chosen_device(options)
    precision = _precision(options, device)
    title = _step_title(options, precision, device)
    captured = (options.objectives or head.OBJECTIVES) if device == "cuda" else []
    more = f"{'+ ms to ce':>12}" if captured else ""
    print_result(f"{title}\n{'':<46}{'docs/s':>9}{'× stock':>9}{'ms':>9}{'GiB':>8}{more}")
    rows = []
    for row in step.measure(
        options.model,
        options.objectives or OBJECTIVES,
        captured=captured,
        precision=precision,
        device=device,
        loops=options.loops,
        **_sizes(options),
    ):
        rows.append(row)
        values = f"{row.docs_per_second:>9.1f}{_cell(row.to_stock, 9)}{row.milliseconds:>9.1f}{_cell(row.gibibytes, 8)}"
        added = "" if row.added_milliseconds != row.added_milliseconds else f"{row.added_milliseconds:>12.2f}"
        print_result(f"{row.what:<46}{row.why_not or values + added}")
    _explain_dashes(rows)
    if json_file:
        _write_json(json_file, {"machine": title, "rows": [row._asdict() for row in rows]})
    return 0


def _bench_train(options: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from ngramloss.bench import chart, child

    json_file, plot_file, trace = (
        output_file(name, [options.data]) for name in (options.out, options.plot, options.profile)
    )
    chart.raise_unless_drawable(plot_file)
    _check_objectives([options.objective])
    child.start_server()
    device = chosen_device(options)

    from ngramloss.bench import train

    step_size = options.batch_size * options.accumulate
    if not 1 <= step_size <= options.documents:
        raise UserError(
            f"a step of {options.batch_size} × {options.accumulate} rows needs at least 1 row and at most "
            f"--documents {options.documents}."
        )
    common = {"model": options.model, "trust_remote_code": options.trust_remote_code}
    decoder_only = train.is_decoder_only(**common)
    contestants = train.chosen(options.only, compiled=options.compile, device=device, decoder_only=decoder_only)
    precision = _precision(options, device)
    with tempfile.TemporaryDirectory() as folder:
        rows_folder = Path(folder)
        if options.data:
            rows_folder = train.tokenised_rows(
                rows_folder, options.data, options.documents, step_size=step_size, **common
            )
        else:
            whole = options.documents // step_size * step_size
            train.write_rows(rows_folder, options.lengths, whole, seed=options.seed, **common)
        setup = train.Setup(
            objective=options.objective,
            tokens=rows_folder,
            batch=options.batch_size,
            accumulate=options.accumulate,
            warm_up=options.warm_up,
            steps=options.steps,
            workers=options.workers,
            precision=precision,
            device=device,
            seed=options.seed,
            plugins=tuple(options.plugin),
            decoder_only=decoder_only,
            **common,
        )
        documents = train.documents(setup)
        if documents < step_size * (options.warm_up + options.steps):
            logger.info(
                f"note: {documents} rows are {setup.epoch} steps, so an epoch ends and the next begins in "
                "the steps that are measured. Raise --documents to leave that out."
            )
        machine = _machine_in_child(device)
        title = (
            f"{options.model}, {options.objective}, {options.data or options.lengths}, {options.batch_size} × "
            f"{options.accumulate} rows, {precision}\n{machine}"
        )
        print_result(title)
        rows = train.measure(setup, contestants, trace=trace)
    print_result(train.as_text(rows))
    if json_file:
        names = ("model", "objective", "batch_size", "accumulate", "warm_up", "steps", "workers", "seed", "data")
        settings = {name: getattr(options, name) for name in names} | {
            "lengths": None if options.data else options.lengths,
            "documents": documents,
            "precision": precision,
            "device": device,
        }
        measured = [row._asdict() for row in rows]
        _write_json(json_file, {"machine": machine, "settings": settings, "rows": measured})
    if plot_file:
        train.plot(rows, plot_file, title)
    return int(all(row.why_not for row in rows))


def _bench_generate(options: argparse.Namespace) -> int:
    import tempfile

    from ngramloss.bench import chart, child

    json_file, plot_file = (output_file(name, []) for name in (options.out, options.plot))
    chart.raise_unless_drawable(plot_file)
    child.start_server()
    device = chosen_device(options)

    from ngramloss.bench import generate

    names = generate.chosen(options.engines)
    with tempfile.TemporaryDirectory() as folder:
        setup = generate.Setup(
            model=options.model,
            batches=tuple(options.batch_size),
            beams=options.beams,
            length=options.length,
            source=options.source,
            repeats=options.repeats,
            device=device,
            seed=options.seed,
            cache=folder,
            trust_remote_code=options.trust_remote_code,
            precision=_precision(options, device),
        )
        generate.raise_unless_possible(setup)
        machine = _machine_in_child(device)
        packages = [f"{package} {installed(package) or 'not installed'}" for package in engine_packages()]
        title = (
            f"{options.model}, {options.beams} beams, {options.source} → {options.length} tokens, "
            f"{setup.precision}\n"
            f"{', '.join([machine, *packages])}"
        )
        print_result(title)
        rows = generate.measure(setup, names)
    print_result(generate.as_text(rows))
    if json_file:
        measured = [row._asdict() for row in rows]
        _write_json(json_file, {"machine": title, "settings": generate.settings(setup), "rows": measured})
    if plot_file:
        generate.plot(rows, plot_file, title)
    return int(all(row.why_not for row in rows))


def _bench_candidates(options: argparse.Namespace) -> int:
    from ngramloss import JointLoss
    from ngramloss.bench import candidates

    if not JointLoss(options.objective).needs_candidates:
        raise UserError(f"no term of {options.objective!r} compares candidates. Add one, such as rank.")
    json_file = output_file(options.out, [])
    device = chosen_device(options)
    precision = _precision(options, device)
    title = _step_title(options, precision, device)
    if options.online:
        return _bench_online(options, precision, device, title, json_file)
    print_result(f"{title}\n{'':<54}{'docs/s':>9}{'ms':>9}{'GiB':>8}{'/ parts':>9}")
    rows = []
    for row in candidates.measure(
        options.model, options.objective, count=options.count, precision=precision, device=device, **_sizes(options)
    ):
        rows.append(row)
        to_parts = f"{row.to_parts:>9.2f}" if row.to_parts == row.to_parts else ""
        print_result(
            f"{row.what:<54}{row.docs_per_second:>9.1f}{row.milliseconds:>9.2f}{_cell(row.gibibytes, 8)}{to_parts}"
        )
    _explain_dashes(rows)
    if json_file:
        _write_json(json_file, {"machine": title, "rows": [row._asdict() for row in rows]})
    return 0


def _bench_online(options: argparse.Namespace, precision: str, device: str, title: str, json_file: Path | None) -> int:
    from ngramloss.bench import online

    print_result(f"{title}\n{'':<66}{'docs/s':>9}{'texts/s':>9}{'writing':>9}{'GiB':>8}")
    rows = []
    for row in online.measure(
        options.model,
        options.objective,
        count=options.count,
        steps=options.steps,
        refreshes=options.refresh,
        precision=precision,
        device=device,
        **_sizes(options),
    ):
        rows.append(row)
        share = "" if row.writing_share != row.writing_share else f"{row.writing_share:>9.0%}"
        written = f"{row.texts_per_second:>9.1f}{share}" if share else f"{'–':>9}{'–':>9}"
        print_result(f"{row.what:<66}{row.docs_per_second:>9.1f}{written}{_cell(row.gibibytes, 8)}")
    if json_file:
        _write_json(json_file, {"machine": title, "rows": [row._asdict() for row in rows]})
    return 0


def _bench_scaling(options: argparse.Namespace) -> int:
    import tempfile
    from pathlib import Path

    from ngramloss.bench import child

    json_file = output_file(options.out, [])
    _check_objectives([options.objective])
    child.start_server()
    device = chosen_device(options)
    processes = options.processes or _processes(device)
    batches, numbers = sorted(set(options.batch_size)), sorted(set(options.rows))
    _check_scaling(options, batches, numbers, processes)

    from ngramloss.bench import scaling, train

    common = {"model": options.model, "trust_remote_code": options.trust_remote_code}
    setup = scaling.Setup(
        objective=options.objective,
        warm_up=options.warm_up,
        steps=options.steps,
        precision=_precision(options, device),
        seed=options.seed,
        plugins=tuple(options.plugin),
        **common,
    )
    title = f"{options.model}, {options.objective}, {options.lengths}, {setup.precision}\n{_machine_in_child(device)}"
    print_result(title)
    with tempfile.TemporaryDirectory() as folder:
        folders = {number: Path(folder) / str(number) for number in numbers}
        for number, rows_folder in folders.items():
            rows_folder.mkdir()
            train.write_rows(rows_folder, options.lengths, number, seed=options.seed, **common)
        rows = []
        for row in scaling.measure(setup, folders, batches, processes):
            logger.info(f"{row.what}: {row.why_not or f'{row.docs_per_second:.1f} rows per second'}")
            rows.append(row)
    print_result(scaling.as_text(rows))
    agree = scaling.losses_agree(rows, precision=setup.precision)
    said = {True: "are the same", False: "differ", None: "were not compared: no two trainings have the same"}
    print_result(f"losses of the same steps {said[agree]}.")
    forecasts = []
    if options.bandwidth:
        alone = next(row for row in rows if row.processes == 1 and row.batch == batches[-1])
        line = scaling.line_of([row for row in rows if row.documents == numbers[0]])
        forecasts = [
            scaling.forecast(alone, line, devices=number, bandwidth=options.bandwidth) for number in options.devices
        ]
        print_result(
            f"\ncomputed, not measured: devices like this one with {options.bandwidth:g} GB per second each, "
            f"{alone.gradient_bytes / 1e6:,.0f} MB of gradients\n{scaling.forecast_text(forecasts)}"
        )
    if json_file:
        names = ("model", "objective", "lengths", "warm_up", "steps", "seed", "bandwidth")
        content = {
            "machine": title,
            "settings": {name: getattr(options, name) for name in names},
            "rows": [row._asdict() for row in rows],
            "losses_agree": agree,
            "computed": [each._asdict() for each in forecasts],
        }
        _write_json(json_file, content)
    return 0 if agree is not False and not any(row.why_not for row in rows) else 1


def _processes(device: str) -> list[int]:
    import torch

    return [1, 2] if device == "cpu" else sorted({1, torch.accelerator.device_count()})


def _check_scaling(
    options: argparse.Namespace, batches: Sequence[int], numbers: Sequence[int], processes: Sequence[int]
) -> None:
    least = min(*batches, *numbers, *processes, *options.devices, options.warm_up, options.steps)
    if least < 1:
        raise UserError(f"numbers must be at least 1, got {least}.")
    if options.bandwidth is not None and not options.bandwidth > 0:
        raise UserError(f"--bandwidth must be above 0, got {options.bandwidth:g}.")
    if options.bandwidth and len(batches) < 2:
        raise UserError("--bandwidth computes with two sizes of steps or more: name them, such as --batch-size 8 16.")
    if batches[-1] > numbers[0]:
        raise UserError(f"a step of {batches[-1]} rows needs at least as many, but --rows has {numbers[0]}.")
    for count in processes:
        if batches[-1] % count:
            raise UserError(f"--batch-size counts rows over all processes: {batches[-1]} cannot be divided by {count}.")


def _bench_ngrams(options: argparse.Namespace) -> int:
    from ngramloss.bench import ngrams

    _check_objectives([options.objective])
    device = chosen_device(options)
    for line in ngrams.measure(options.objective, batch=options.batch_size, longest=options.longest, device=device):
        print_result(line)
    return 0


def _cell(value: float, width: int) -> str:
    """A number in a column; a dash where it could not be measured."""
    return f"{value:>{width}.2f}" if value == value else f"{'–':>{width}}"


def _explain_dashes(rows: Sequence[Any]) -> None:
    """Say why memory was not measured. A ratio lacks only if what it compares with could not run, as its line says."""
    if any(row.gibibytes != row.gibibytes and not getattr(row, "why_not", "") for row in rows):
        logger.info("note: GiB is – because this system has no /proc, where the memory of a process is read.")


def _write_json(path: Path, content: object) -> None:
    """Write JSON, with null for what could not be measured."""
    import json

    from ngramloss.storage.files import writing

    with writing(path):
        path.write_text(json.dumps(_without_nan(content), indent=1) + "\n")


def _without_nan(content: object) -> object:
    if isinstance(content, dict):
        return {name: _without_nan(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_nan(value) for value in content]
    return None if content != content else content
