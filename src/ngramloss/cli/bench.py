"""arguments of ``ngramloss bench`` → time and memory on this machine, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, add_device, add_trust, chosen_device, verb
from ngramloss.cli.output import print_result
from ngramloss.errors import UserError

BENCH = "Measure time and memory on this machine, and compare with other implementations."

HEAD = """\
Time the path from hidden states to the loss and its gradients, for each objective and backend. PyTorch's cross-entropy
and other libraries are timed in the same run."""

HEAD_EXAMPLES = """\
examples:
  ngramloss bench head
  ngramloss bench head --sizes bart-16 bart-64 --json head.json --plot head.png
  ngramloss bench head --sizes bart-16 --loops        # the paper's own loops too: slow
"""

STEP = "Measure documents per second in training: with the model's own loss, and with each objective attached."

STEP_EXAMPLES = """\
examples:
  ngramloss bench step --batch 64
  ngramloss bench step --model path/or/hub-id --objective "ce + rewards(2,3,4)" --source 512 --target 64
"""

NGRAMS = "Time the n-gram part of an objective for T = 128 to 32,768 tokens. It grows like T log T, not T²."

NGRAMS_EXAMPLES = """\
examples:
  ngramloss bench ngrams
  ngramloss bench ngrams --objective "matches(2)" --batch 16 --device cuda
"""


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    bench = verbs.add_parser("bench", help="measure time and memory on this machine", description=BENCH)
    benches = bench.add_subparsers(required=True, metavar="WHAT", title="what to measure")

    head = verb(benches, "head", "hidden states → loss → gradients", HEAD, HEAD_EXAMPLES)
    head.add_argument("--sizes", nargs="+", metavar="SIZE",
                      help="sizes to time (default: bart-16 bart-64 llama; without a GPU: cpu)")
    head.add_argument("--dtype", choices=["bfloat16", "float16", "float32"],
                      help="data type (default: bfloat16 on a GPU, float32 on a CPU)")
    head.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")
    head.add_argument("--json", metavar="FILE", help="write all measurements as JSON")
    head.add_argument("--plot", metavar="FILE", help="draw a bar chart")
    add_device(head)
    head.set_defaults(run_verb=_bench_head)

    step = verb(benches, "step", "documents per second in training", STEP, STEP_EXAMPLES)
    step.add_argument(
        "--model", default="bart-base", metavar="NAME",
        help="bart-base or bart-tiny with random weights, a folder or a hub id (default: %(default)s)",
    )
    objectives = ["ce", "ce + matches(2,3,4)"]
    step.add_argument("--objective", nargs="+", default=objectives, metavar="OBJECTIVE",
                      help=f"objectives to attach (default: {' and '.join(map(repr, objectives))})")
    step.add_argument("--batch", type=int, default=16, metavar="B", help="batch size (default: %(default)s)")
    step.add_argument("--source", type=int, default=1024, metavar="T", help="document tokens (default: %(default)s)")
    step.add_argument("--target", type=int, default=128, metavar="T", help="summary tokens (default: %(default)s)")
    choices = ["bf16", "fp16", "fp32", "bf16-pure"]
    step.add_argument(
        "--precision", choices=choices,
        help="bf16 and fp16 are mixed precision; bf16-pure has bf16 weights too (default: bf16 on a GPU, else fp32)",
    )
    step.add_argument("--loops", action="store_true", help="also time the paper's own loops, which are slow")
    step.add_argument("--json", metavar="FILE", help="write all measurements as JSON")
    add_trust(step)
    add_device(step)
    step.set_defaults(run_verb=_bench_step)

    ngrams = verb(benches, "ngrams", "the n-gram part as T grows", NGRAMS, NGRAMS_EXAMPLES)
    ngrams.add_argument("--objective", default="matches(2,3,4)", metavar="OBJECTIVE",
                        help="objective to time (default: %(default)s)")
    ngrams.add_argument("--batch", type=int, default=4, metavar="B", help="sequences per batch (default: %(default)s)")
    ngrams.add_argument("--longest", type=int, default=32768, metavar="T",
                        help="longest sequence to time, in tokens (default: %(default)s)")
    add_device(ngrams)
    ngrams.set_defaults(run_verb=_bench_ngrams)


def _bench_head(options: argparse.Namespace) -> int:
    import torch

    from ngramloss.bench import head

    device = chosen_device(options)
    sizes = options.sizes or (["bart-16", "bart-64", "llama"] if device == "cuda" else ["cpu"])
    for size in sizes:
        if size not in head.SIZES:
            raise UserError(f"unknown size {size!r}. Choose from {', '.join(head.SIZES)}.")
    dtype = getattr(torch, options.dtype or ("bfloat16" if device == "cuda" else "float32"))
    title = f"{head.machine(device)}, {str(dtype).removeprefix('torch.')}"
    print_result(title)
    rows: list[head.Row] = []
    for row in head.measure(sizes, device, dtype, loops=options.loops):
        if not rows or row.size != rows[-1].size:
            print_result(f"\n{row.size}: {head.SIZES[row.size]}\n{'':<46}{'ms':>9}{'GiB':>8}{'/stock':>9}{'/bound':>9}")
        rows.append(row)
        values = f"{row.milliseconds:>9.2f}{row.gibibytes:>8.2f}{row.to_stock:>9.2f}{row.to_floor:>9.2f}"
        print_result(f"{row.what:<46}{row.why_not or values}")
    if options.json:
        _write_json(options.json, {"machine": title, "rows": [row._asdict() for row in rows]})
    if options.plot:
        head.plot(rows, options.plot, title)
    return 0


def _bench_step(options: argparse.Namespace) -> int:
    from ngramloss.bench import head, step

    device = chosen_device(options)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    settings = f"{options.model}, {options.source} → {options.target} tokens, batch {options.batch}, {precision}"
    title = f"{settings}, {head.machine(device)}"
    print_result(f"{title}\n{'':<46}{'docs/s':>9}{'× stock':>9}{'ms':>9}{'GiB':>8}")
    rows = []
    for row in step.measure(
        options.model, options.objective, batch=options.batch, source=options.source, target=options.target,
        precision=precision, device=device, loops=options.loops, trust_remote_code=options.trust_remote_code,
    ):  # fmt: skip
        rows.append(row)
        values = f"{row.docs_per_second:>9.1f}{row.to_stock:>9.2f}{row.milliseconds:>9.1f}{row.gibibytes:>8.2f}"
        print_result(f"{row.what:<46}{values}")
    if options.json:
        _write_json(options.json, {"machine": title, "rows": [row._asdict() for row in rows]})
    return 0


def _bench_ngrams(options: argparse.Namespace) -> int:
    from ngramloss.bench import ngrams

    device = chosen_device(options)
    for line in ngrams.measure(options.objective, batch=options.batch, longest=options.longest, device=device):
        print_result(line)
    return 0


def _write_json(path: str, content: object) -> None:
    import json

    with open(path, "w") as file:
        json.dump(content, file, indent=1)
