"""arguments of ``ngramloss bench`` → time and memory on this machine, printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ngramloss.cli.options import Verbs, add_device, add_trust, choice, chosen_device, output_file, verb
from ngramloss.engine_registry import engine_packages
from ngramloss.errors import UserError
from ngramloss.output.console import print_result, tell
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
  ngramloss bench head --sizes bart-16 bart-64 --json head.json --plot head.png
  ngramloss bench head --objective ce "ce + soft(1)" "ce + unlikelihood"
  ngramloss bench head --sizes bart-16 --loops        # the paper's own loops too: slow
"""

STEP = "Measure documents per second in training: with the model's own loss, and with each objective attached."

STEP_EXAMPLES = """\
examples:
  ngramloss bench step --batch 64
  ngramloss bench step --model path/or/hub-id --objective "ce + rewards(2,3,4)" --source 512 --target 64
"""

TRAIN = """\
Measure documents per second of real trainings: Hugging Face's Seq2SeqTrainer with the model's own cross-entropy, and
the loop of ngramloss train with an objective, on the same rows and with as many sequences in a step. Each trains in a
process of its own. The rows have the lengths of a known data set's documents, or are your own data."""

TRAIN_EXAMPLES = """\
examples:
  ngramloss bench train
  ngramloss bench train --lengths cnndm --compile --json train.json --plot train.png
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
  ngramloss bench generate --beams 4 --length 62 --source 400 --batch 8 --json generate.json --plot generate.png
  ngramloss bench generate --model path/or/hub-id --engines ctranslate2-int8
  ngramloss bench generate --beams 6 --source 512 --batch 32 128 --engines graph      # on a GPU
  ngramloss bench generate --model bart-tiny --source 50 --length 20      # quick
"""

CANDIDATES = """\
Time a training step that compares candidates of each source, as `rank` does, beside a plain step and its encoder. The
encoder reads a source once, and each candidate is one more text of the decoder, so the parts are the encoder once and
the rest of the plain step for each text. On a GPU, forward and backward are a CUDA graph."""

CANDIDATES_EXAMPLES = """\
examples:
  ngramloss bench candidates
  ngramloss bench candidates --count 4 --batch 8 --source 1024 --target 128 --json candidates.json
  ngramloss bench candidates --model bart-tiny --count 2 --batch 2 --source 20 --target 10      # quick
"""

NGRAMS = "Time the n-gram part of an objective for T = 128 to 32,768 tokens. It grows like T log T, not T²."

NGRAMS_EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch 16 --device cuda
"""

MODEL_HELP = "bart-base, small or bart-tiny with random weights, a folder or a hub id (default: %(default)s)"
OBJECTIVES = ["ce", "ce + matches(2,3,4)"]
LENGTHS = ("xsum", "cnndm", "dialogsum", "multi30k")
CONTESTANTS = ("stock-random", "stock-grouped", "stock-compiled", "eager", "captured", "captured-compiled")


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    bench = verbs.add_parser("bench", help="measure time and memory on this machine", description=BENCH)
    benches = choice(bench, metavar="WHAT", title="what to measure")

    head = verb(benches, "head", "hidden states → loss → gradients", HEAD, HEAD_EXAMPLES)
    head.add_argument(
        "--sizes", nargs="+", metavar="SIZE", help="sizes to time (default: bart-16 bart-64 llama; without a GPU: cpu)"
    )
    head.add_argument(
        "--objective",
        nargs="+",
        metavar="OBJECTIVE",
        help="objectives to time (default: ce, and ce with matches, rewards, precision and bag)",
    )
    head.add_argument(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        help="data type (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    head.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")
    head.add_argument("--json", metavar="FILE", help="write all measurements as JSON")
    head.add_argument("--plot", metavar="FILE", help="draw a bar chart")
    add_device(head)
    head.set_defaults(run_verb=_bench_head)

    step = verb(benches, "step", "documents per second in training", STEP, STEP_EXAMPLES)
    step.add_argument("--model", default="bart-base", metavar="NAME", help=MODEL_HELP)
    step.add_argument(
        "--objective",
        nargs="+",
        metavar="OBJECTIVE",
        help=f"objectives to attach (default: {' and '.join(map(repr, OBJECTIVES))}; as CUDA graphs, also rewards, "
        "precision and bag)",
    )
    step.add_argument("--batch", type=int, default=16, metavar="B", help="batch size (default: %(default)s)")
    step.add_argument("--source", type=int, default=1024, metavar="T", help="document tokens (default: %(default)s)")
    step.add_argument("--target", type=int, default=128, metavar="T", help="summary tokens (default: %(default)s)")
    choices = ["bf16", "fp16", "fp32", "bf16-pure"]
    step.add_argument(
        "--precision",
        choices=choices,
        help="bf16 and fp16 are mixed precision; bf16-pure has bf16 weights too (default: bf16 on a GPU, else fp32)",
    )
    step.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")
    step.add_argument("--json", metavar="FILE", help="write all measurements as JSON")
    add_trust(step)
    add_device(step)
    step.set_defaults(run_verb=_bench_step)

    _add_train(benches)
    _add_generate(benches)
    _add_candidates(benches)

    ngrams = verb(benches, "ngrams", "the n-gram part as T grows", NGRAMS, NGRAMS_EXAMPLES)
    ngrams.add_argument(
        "--objective", default="matches(2,3,4)", metavar="OBJECTIVE", help="objective to time (default: %(default)s)"
    )
    ngrams.add_argument("--batch", type=int, default=4, metavar="B", help="sequences per batch (default: %(default)s)")
    ngrams.add_argument(
        "--longest",
        type=int,
        default=32768,
        metavar="T",
        help="longest sequence to time, in tokens (default: %(default)s)",
    )
    add_device(ngrams)
    ngrams.set_defaults(run_verb=_bench_ngrams)


def _add_train(benches: Verbs) -> None:
    train = verb(benches, "train", "documents per second of whole trainings", TRAIN, TRAIN_EXAMPLES)
    train.add_argument("--model", default="bart-base", metavar="NAME", help=MODEL_HELP)
    train.add_argument(
        "--objective",
        default="ce + matches(2,3,4)",
        metavar="OBJECTIVE",
        help="objective of ngramloss (default: %(default)s)",
    )
    rows = train.add_mutually_exclusive_group()
    rows.add_argument(
        "--lengths",
        choices=LENGTHS,
        default="xsum",
        help="train on random tokens in rows as long as this data set's documents: 1.35 × words, cut at 1,024 and 128 "
        "tokens (default: %(default)s)",
    )
    rows.add_argument(
        "--data",
        metavar="NAME",
        help="train on this data set instead, as in `ngramloss train`; the model must have a tokenizer",
    )
    train.add_argument(
        "--documents",
        type=int,
        default=6400,
        metavar="N",
        help="rows to train on, rounded down to whole steps (default: %(default)s)",
    )
    train.add_argument("--batch", type=int, default=16, metavar="B", help="batch size (default: %(default)s)")
    train.add_argument(
        "--accumulate", type=int, default=2, metavar="N", help="batches in a step (default: %(default)s)"
    )
    train.add_argument(
        "--warm-up", type=int, default=20, metavar="N", help="steps before the measurement (default: %(default)s)"
    )
    train.add_argument(
        "--steps",
        type=int,
        default=50,
        metavar="N",
        help="steps that are measured; the stock trainer sorts pools of up to 50 steps by length, so fewer may be the "
        "long or the short ones (default: %(default)s)",
    )
    train.add_argument(
        "--workers",
        type=int,
        default=2,
        metavar="N",
        help="processes that load data, for each trainer (default: %(default)s)",
    )
    train.add_argument(
        "--precision",
        choices=["bf16", "fp16", "fp32"],
        help="bf16 and fp16 are mixed precision (default: bf16 on a GPU, else fp32)",
    )
    train.add_argument("--compile", action="store_true", help="also train with torch.compile, which takes minutes")
    train.add_argument(
        "--only",
        nargs="+",
        choices=CONTESTANTS,
        default=[],
        metavar="NAME",
        help=f"train with these only: {', '.join(CONTESTANTS)}",
    )
    train.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of rows and their order (default: %(default)s)"
    )
    train.add_argument("--json", metavar="FILE", help="write settings and all measurements as JSON")
    train.add_argument("--plot", metavar="FILE", help="draw a bar chart")
    train.add_argument(
        "--profile", metavar="FILE", help="write a Chrome trace of a few steps of ngramloss, captured where that runs"
    )
    add_trust(train)
    add_device(train)
    train.set_defaults(run_verb=_bench_train)


def _add_generate(benches: Verbs) -> None:
    generate = verb(benches, "generate", "documents per second of each engine", GENERATE, GENERATE_EXAMPLES)
    generate.add_argument("--model", default="bart-base", metavar="NAME", help=MODEL_HELP)
    generate.add_argument(
        "--engines",
        nargs="+",
        default=[],
        metavar="NAME",
        help="engines beside hf, as in `ngramloss list engines` (default: all that are installed)",
    )
    generate.add_argument(
        "--batch", type=int, nargs="+", default=[1, 8], metavar="B", help="batch sizes (default: 1 8)"
    )
    generate.add_argument("--beams", type=int, default=4, metavar="N", help="beams; 1 is greedy (default: %(default)s)")
    generate.add_argument(
        "--length",
        type=int,
        default=62,
        metavar="T",
        help="tokens of each text, with its start and end (default: %(default)s)",
    )
    generate.add_argument("--source", type=int, default=400, metavar="T", help="document tokens (default: %(default)s)")
    generate.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="times that each batch is written; the median counts (default: %(default)s)",
    )
    generate.add_argument(
        "--precision",
        choices=["bf16", "fp16", "fp32"],
        help="of the weights, for engines that take them as they are (default: bf16 on a GPU, else fp32)",
    )
    generate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="random seed of the documents (default: %(default)s)"
    )
    generate.add_argument("--json", metavar="FILE", help="write settings and all measurements as JSON")
    generate.add_argument("--plot", metavar="FILE", help="draw a bar chart")
    add_trust(generate)
    add_device(generate)
    generate.set_defaults(run_verb=_bench_generate)


def _check_objectives(objectives: Sequence[str]) -> None:
    """Raise if an objective is written wrongly or reads candidates, which the benchmarks do not have."""
    from ngramloss.terms.parser import parse
    from ngramloss.terms.term import check_names

    for objective in objectives:
        terms = parse(objective)
        check_names(terms)
        for term in terms:
            if term.reads == "candidates":
                raise UserError(f"{term.name} reads candidates, and bench has none. Leave it out of {objective!r}.")


def _add_candidates(benches: Verbs) -> None:
    candidates = verb(benches, "candidates", "a step that compares candidates", CANDIDATES, CANDIDATES_EXAMPLES)
    candidates.add_argument("--model", default="bart-base", metavar="NAME", help=MODEL_HELP)
    candidates.add_argument(
        "--objective",
        default="ce + 10*rank(margin=0.001,alpha=2)",
        metavar="OBJECTIVE",
        help="with a term that compares candidates (default: %(default)s)",
    )
    candidates.add_argument(
        "--count", type=int, default=16, metavar="K", help="candidates of each source (default: %(default)s)"
    )
    candidates.add_argument("--batch", type=int, default=16, metavar="B", help="sources (default: %(default)s)")
    candidates.add_argument("--source", type=int, default=512, metavar="T", help="source tokens (default: %(default)s)")
    candidates.add_argument(
        "--target", type=int, default=64, metavar="T", help="tokens of each text (default: %(default)s)"
    )
    candidates.add_argument(
        "--precision",
        choices=["bf16", "fp16", "fp32"],
        help="bf16 and fp16 are mixed precision (default: bf16 on a GPU, else fp32)",
    )
    candidates.add_argument("--json", metavar="FILE", help="write all measurements as JSON")
    add_trust(candidates)
    add_device(candidates)
    candidates.set_defaults(run_verb=_bench_candidates)


def _bench_head(options: argparse.Namespace) -> int:
    import torch

    from ngramloss.bench import chart, head

    _check_objectives(options.objective or ())  # before anything is timed
    json_file, plot_file = (output_file(name, []) for name in (options.json, options.plot))
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
    for row in head.measure(sizes, device, dtype, loops=options.loops, objectives=options.objective or ()):
        if not rows or row.size != rows[-1].size:
            print_result(f"\n{row.size}: {head.SIZES[row.size]}\n{'':<54}{'ms':>9}{'GiB':>8}{'/stock':>9}{'/bound':>9}")
        rows.append(row)
        values = [(row.milliseconds, 9), (row.gibibytes, 8), (row.to_stock, 9), (row.to_floor, 9)]
        print_result(f"{row.what:<54}{row.why_not or ''.join(_cell(*value) for value in values)}")
    _explain_dashes(rows)
    if json_file:
        _write_json(json_file, {"machine": title, "rows": [row._asdict() for row in rows]})
    if plot_file:
        head.plot(rows, plot_file, title)
    return 0


def _bench_step(options: argparse.Namespace) -> int:
    from ngramloss.bench import head, step

    _check_objectives(options.objective or ())
    json_file = output_file(options.json, [])
    device = chosen_device(options)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    settings = f"{options.model}, {options.source} → {options.target} tokens, batch {options.batch}, {precision}"
    title = f"{settings}, {head.machine(device)}"
    captured = (options.objective or head.OBJECTIVES) if device == "cuda" else []
    more = f"{'+ ms to ce':>12}" if captured else ""
    print_result(f"{title}\n{'':<46}{'docs/s':>9}{'× stock':>9}{'ms':>9}{'GiB':>8}{more}")
    rows = []
    for row in step.measure(
        options.model,
        options.objective or OBJECTIVES,
        captured=captured,
        batch=options.batch,
        source=options.source,
        target=options.target,
        precision=precision,
        device=device,
        loops=options.loops,
        trust_remote_code=options.trust_remote_code,
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
        output_file(name, [options.data]) for name in (options.json, options.plot, options.profile)
    )
    chart.raise_unless_drawable(plot_file)
    _check_objectives([options.objective])
    child.start_server()
    device = chosen_device(options)

    from ngramloss.bench import head, train

    step_size = options.batch * options.accumulate
    if not 1 <= step_size <= options.documents:
        raise UserError(
            f"a step of {options.batch} × {options.accumulate} rows needs at least 1 row and at most "
            f"--documents {options.documents}."
        )
    contestants = train.chosen(options.only, compiled=options.compile, device=device)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    with tempfile.TemporaryDirectory() as folder:
        rows_folder = Path(folder)
        common = {"model": options.model, "trust_remote_code": options.trust_remote_code}
        if options.data:
            rows_folder = train.tokenised_rows(
                rows_folder, options.data, options.documents, step_size=step_size, say=tell, **common
            )
        else:
            whole = options.documents // step_size * step_size
            train.write_rows(rows_folder, options.lengths, whole, seed=options.seed, **common)
        setup = train.Setup(
            objective=options.objective,
            tokens=rows_folder,
            batch=options.batch,
            accumulate=options.accumulate,
            warm_up=options.warm_up,
            steps=options.steps,
            workers=options.workers,
            precision=precision,
            device=device,
            seed=options.seed,
            plugins=tuple(options.plugin),
            **common,
        )
        documents = train.documents(setup)
        if documents < step_size * (options.warm_up + options.steps):
            tell(
                f"note: {documents} rows are {documents // step_size} steps, so an epoch ends and the next begins in "
                "the steps that are measured. Raise --documents to leave that out."
            )
        machine = child.in_child(head.machine, device)
        if machine.result is None:
            raise RuntimeError(machine.why_not)
        title = (
            f"{options.model}, {options.objective}, {options.data or options.lengths}, {options.batch} × "
            f"{options.accumulate} rows, {precision}\n{machine.result}"
        )
        print_result(title)
        rows = train.measure(setup, contestants, trace=trace, say=tell)
    print_result(train.as_text(rows))
    if json_file:
        names = ("model", "objective", "batch", "accumulate", "warm_up", "steps", "workers", "seed", "data")
        settings = {name: getattr(options, name) for name in names} | {
            "lengths": None if options.data else options.lengths,
            "documents": documents,
            "precision": precision,
            "device": device,
        }
        measured = [row._asdict() for row in rows]
        _write_json(json_file, {"machine": machine.result, "settings": settings, "rows": measured})
    if plot_file:
        train.plot(rows, plot_file, title)
    return int(all(row.why_not for row in rows))


def _bench_generate(options: argparse.Namespace) -> int:
    import tempfile

    from ngramloss.bench import chart, child

    json_file, plot_file = (output_file(name, []) for name in (options.json, options.plot))
    chart.raise_unless_drawable(plot_file)
    child.start_server()
    device = chosen_device(options)

    from ngramloss.bench import generate, head

    names = generate.chosen(options.engines)
    with tempfile.TemporaryDirectory() as folder:
        setup = generate.Setup(
            model=options.model,
            batches=tuple(options.batch),
            beams=options.beams,
            length=options.length,
            source=options.source,
            repeats=options.repeats,
            device=device,
            seed=options.seed,
            cache=folder,
            trust_remote_code=options.trust_remote_code,
            precision=options.precision or ("bf16" if device == "cuda" else "fp32"),
        )
        generate.raise_unless_possible(setup)
        machine = child.in_child(head.machine, device)
        if machine.result is None:
            raise RuntimeError(machine.why_not)
        packages = [f"{package} {installed(package) or 'not installed'}" for package in engine_packages()]
        title = (
            f"{options.model}, {options.beams} beams, {options.source} → {options.length} tokens, "
            f"{setup.precision}\n"
            f"{', '.join([machine.result, *packages])}"
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
    from ngramloss.bench import candidates, head

    if not JointLoss(options.objective).needs_candidates:
        raise UserError(f"no term of {options.objective!r} compares candidates. Add one, such as rank.")
    json_file = output_file(options.json, [])
    device = chosen_device(options)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    title = (
        f"{options.model}, {options.source} → {options.target} tokens, batch {options.batch}, {precision}, "
        f"{head.machine(device)}"
    )
    print_result(f"{title}\n{'':<54}{'docs/s':>9}{'ms':>9}{'GiB':>8}{'/ parts':>9}")
    rows = []
    for row in candidates.measure(
        options.model,
        options.objective,
        count=options.count,
        batch=options.batch,
        source=options.source,
        target=options.target,
        precision=precision,
        device=device,
        trust_remote_code=options.trust_remote_code,
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


def _bench_ngrams(options: argparse.Namespace) -> int:
    from ngramloss.bench import ngrams

    _check_objectives([options.objective])
    device = chosen_device(options)
    for line in ngrams.measure(options.objective, batch=options.batch, longest=options.longest, device=device):
        print_result(line)
    return 0


def _cell(value: float, width: int) -> str:
    """A number in a column; a dash where it could not be measured."""
    return f"{value:>{width}.2f}" if value == value else f"{'–':>{width}}"


def _explain_dashes(rows: Sequence[Any]) -> None:
    """Say why memory was not measured. A ratio lacks only if what it compares with could not run, as its line says."""
    if any(row.gibibytes != row.gibibytes and not getattr(row, "why_not", "") for row in rows):
        tell("note: GiB is – because this system has no /proc, where the memory of a process is read.")


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
