"""a model, an objective, lengths of documents → documents per second of whole trainings, stock and ours."""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    ProgressCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    logging,
)

from ngramloss.bench import chart, lengths, step
from ngramloss.bench.child import in_child
from ngramloss.bench.window import Window
from ngramloss.data.tokens import Shape, Tokens, tokenise
from ngramloss.errors import UserError
from ngramloss.gpu.captured import CapturedStep
from ngramloss.output.console import logger
from ngramloss.output.tabular import aligned, fixed
from ngramloss.plugins import load_file
from ngramloss.recipe import Train
from ngramloss.stats import IGNORE_INDEX
from ngramloss.steps.plan import LONG
from ngramloss.steps.running import NOT_CAPTURED
from ngramloss.training import loop
from ngramloss.training.processes import start_processes

NAN = float("nan")
LOOKED_AT = 200
"""Batches in which padding is counted."""


@dataclass(frozen=True)
class Setup:
    """What all contestants have in common."""

    model: str
    objective: str
    tokens: Path
    """The rows, as a folder of :class:`Tokens`."""
    batch: int
    accumulate: int
    warm_up: int
    steps: int
    workers: int
    precision: str
    device: str
    seed: int
    trust_remote_code: bool = False
    plugins: tuple[str, ...] = ()
    """Files that each process runs first, for your own objectives."""
    decoder_only: bool = False
    """Whether a target follows its source in one row."""

    @property
    def cuda(self) -> bool:
        """Whether trainings run on a GPU."""
        return self.device == "cuda"

    @property
    def epoch(self) -> int:
        """Whole steps of an epoch."""
        return documents(self) // (self.batch * self.accumulate)

    @property
    def multiple(self) -> int:
        """Lengths are rounded up to a multiple of this, as by ``ngramloss train``."""
        return 8 if self.cuda else 1


class Contestant(NamedTuple):
    """A way to train."""

    name: str
    label: str
    train: Callable[[Setup, str, Window], Iterable[Any]]
    """Trains until the window's last step, with a folder for its output. Returns the batches of an epoch."""
    ours: bool = False
    compiles: bool = False
    """Whether it compiles whole models, which takes minutes."""
    needs_gpu: bool = False
    captures: bool = False
    needs_liger: bool = False

    def warm_up(self, setup: Setup) -> int:
        """Steps before the measurement: a whole epoch where steps are captured, so that most shapes have been met."""
        return max(setup.warm_up, setup.epoch) if self.captures else setup.warm_up

    def why_not(self, device: str, decoder_only: bool) -> str:
        """Why it cannot run on this device with such a model; empty if it can."""
        if self.needs_gpu and device != "cuda":
            return "needs a GPU."
        if self.needs_liger and not decoder_only:
            return "Liger-Kernel has no kernels for encoder-decoders."
        if self.needs_liger and find_spec("liger_kernel") is None:
            return "needs the package liger-kernel: pip install liger-kernel"
        return ""


class Row(NamedTuple):
    """One line of the table. Numbers that could not be measured are NaN."""

    name: str
    what: str
    docs_per_second: float = NAN
    to_random: float = NAN
    """Documents per second, as a multiple of the stock trainer's with random batches."""
    to_best: float = NAN
    """As a multiple of the best stock trainer's."""
    step_milliseconds: float = NAN
    device_milliseconds: float = NAN
    """Of a step, in which the GPU was busy. It is measured in a few other steps."""
    idle: float = NAN
    """The share of those steps in which the GPU had nothing to do."""
    padding: float = NAN
    """The share of padding among the tokens of sources and targets."""
    gibibytes: float = NAN
    """Peak memory that tensors had; on a CPU the peak of the process."""
    reserved_gibibytes: float = NAN
    """Peak memory that PyTorch's allocator held."""
    why_not: str = ""


# Contestants


def chosen(only: Sequence[str], *, compiled: bool, device: str, decoder_only: bool = False) -> list[Contestant]:
    """The contestants that were asked for: by name, or all that can run here."""
    if only:
        return [contestant for contestant in CONTESTANTS if contestant.name in only]
    return [
        contestant
        for contestant in CONTESTANTS
        if (compiled or not contestant.compiles) and not contestant.why_not(device, decoder_only)
    ]


class _Watched(TrainerCallback):
    """Tells a window of each step of Hugging Face's trainer."""

    def __init__(self, window: Window) -> None:
        self.window = window
        self.loader: Any = ()
        """What the trainer reads its batches from."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loader = kwargs["train_dataloader"]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.window.after(state.global_step)


def _stock(
    setup: Setup, output: str, window: Window, *, grouped: bool, compiled: bool = False, liger: bool = False
) -> Iterable[Any]:
    """Hugging Face's trainer at its best: fused optimiser, expandable memory segments; if asked, Liger's kernels."""
    if setup.cuda:
        _set_allocator("expandable_segments:True")
    model = step.built(setup.model, trust_remote_code=setup.trust_remote_code)
    watched = _Watched(window)
    trainer = (Trainer if setup.decoder_only else Seq2SeqTrainer)(
        model,
        _arguments(setup, output, window.last_step, grouped=grouped, compiled=compiled, liger=liger),
        train_dataset=_Lists(Tokens(setup.tokens), joined=setup.decoder_only),
        data_collator=DataCollatorForSeq2Seq(
            _padding_tokenizer(model.config.pad_token_id),
            model=None if setup.decoder_only else model,
            pad_to_multiple_of=setup.multiple,
        ),
        callbacks=[watched],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    loader: Iterable[Any] = watched.loader
    return loader


def _set_allocator(setting: str) -> None:
    """Change the allocator's settings. The process that started this one has read the environment already."""
    new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (new or torch.cuda.memory._set_allocator_settings)(setting)


def _ours(setup: Setup, output: str, window: Window, *, capture: bool, compiled: bool = False) -> Iterable[Any]:
    """The loop of ``ngramloss train``. Compiled, it is the beginning of a training that is long enough for that."""

    def after(number: int, values: object) -> None:
        window.after(number)
        if compiled and number == window.last_step:
            signal.raise_signal(signal.SIGTERM)  # the training stops after its next step, as if a person asked it to

    settings = Train(
        max_steps=max(window.last_step + 1, LONG if compiled else 0),  # a last step logs more than others
        batch_size=setup.batch,
        accumulate=setup.accumulate,
        learning_rate=3e-5,
        warmup_steps=0,
        precision=setup.precision,
        log_every=10**9,
        eval_every=0,
        capture=capture,
        compile=compiled,
        seed=setup.seed,
    )
    model = step.built(setup.model, trust_remote_code=setup.trust_remote_code)
    job = loop.Job(model, None, Tokens(setup.tokens), settings, setup.objective, on_step=after)
    with _left_out_of(window, CapturedStep, "_capture"):
        outcome = loop.run(job, start_processes())
    if capture and outcome.why_not_captured:  # that would be another contestant
        raise RuntimeError(NOT_CAPTURED.format(outcome.why_not_captured))
    return islice(outcome.steps.from_(0), setup.epoch)


@contextmanager
def _left_out_of(window: Window, kind: type, name: str) -> Iterator[None]:
    """Leave the time that a method takes out of a measurement."""
    method = getattr(kind, name)

    def timed(*args: Any) -> Any:
        with window.without():
            return method(*args)

    setattr(kind, name, timed)
    try:
        yield
    finally:
        setattr(kind, name, method)


def _arguments(
    setup: Setup, output: str, steps: int, *, grouped: bool, compiled: bool, liger: bool
) -> Seq2SeqTrainingArguments:
    return Seq2SeqTrainingArguments(
        output_dir=output,
        per_device_train_batch_size=setup.batch,
        gradient_accumulation_steps=setup.accumulate,
        max_steps=steps,
        learning_rate=3e-5,
        optim="adamw_torch_fused" if setup.cuda else "adamw_torch",
        bf16=setup.precision == "bf16",
        fp16=setup.precision == "fp16",
        torch_compile=compiled,
        use_liger_kernel=liger,
        train_sampling_strategy="group_by_length" if grouped else "random",
        dataloader_num_workers=setup.workers,
        dataloader_pin_memory=setup.cuda,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=setup.seed,
        data_seed=setup.seed,
        use_cpu=not setup.cuda,
    )


CONTESTANTS = [
    Contestant("stock-random", "stock trainer, random batches", partial(_stock, grouped=False)),
    Contestant("stock-grouped", "stock trainer, group_by_length", partial(_stock, grouped=True)),
    Contestant(
        "stock-compiled",
        "stock trainer, group_by_length, torch_compile",
        partial(_stock, grouped=True, compiled=True),
        compiles=True,
    ),
    Contestant(
        "liger-random",
        "stock trainer with Liger-Kernel, random batches",
        partial(_stock, grouped=False, liger=True),
        needs_gpu=True,
        needs_liger=True,
    ),
    Contestant(
        "liger-grouped",
        "stock trainer with Liger-Kernel, group_by_length",
        partial(_stock, grouped=True, liger=True),
        needs_gpu=True,
        needs_liger=True,
    ),
    Contestant("eager", "ngramloss, eager", partial(_ours, capture=False), ours=True),
    Contestant(
        "captured", "ngramloss, captured", partial(_ours, capture=True), ours=True, needs_gpu=True, captures=True
    ),
    Contestant(
        "captured-compiled",
        "ngramloss, captured, compiled, as in a long training",
        partial(_ours, capture=True, compiled=True),
        ours=True,
        needs_gpu=True,
        captures=True,
    ),
]
NAMES = [contestant.name for contestant in CONTESTANTS]


class _Lists(Dataset[dict[str, list[int]]]):
    """The same rows as lists of numbers, as a tokenizer returns them.

    Args:
        tokens: the rows.
        joined: put the target behind its source in one row, with labels only there, as for a decoder-only model.
    """

    def __init__(self, tokens: Tokens, *, joined: bool) -> None:
        self.tokens, self.joined = tokens, joined

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        source, target = (self.tokens[row][name].tolist() for name in ("input_ids", "labels"))
        if not self.joined:
            return {"input_ids": source, "labels": target}
        return {"input_ids": source + target, "labels": [IGNORE_INDEX] * len(source) + target}


def _padding_tokenizer(pad: int) -> PreTrainedTokenizerFast:
    """A tokenizer that can only pad, which is all that a collator asks of it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {**{f"<{token}>": token for token in range(pad)}, "<pad>": pad}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="<pad>")), pad_token="<pad>"
    )


# Rows that all contestants train on


def write_rows(folder: Path, name: str, documents: int, *, model: str, seed: int, trust_remote_code: bool) -> None:
    """Write random ids with the lengths of a known data set's documents, as a folder of :class:`Tokens`."""
    config = step.configuration(model, trust_remote_code=trust_remote_code)
    sources, targets = lengths.sample(name, documents, seed, _limits(config))
    lengths.write_tokens(folder, sources, targets, vocabulary=config.vocab_size, seed=seed)


def tokenised_rows(
    folder: Path, data: str, documents: int, *, step_size: int, model: str, trust_remote_code: bool
) -> Path:
    """Tokenise one's own data, in whole steps, with the model's tokenizer. Returns the folder of :class:`Tokens`."""
    from ngramloss.data import fingerprint, load
    from ngramloss.models import loading
    from ngramloss.recipe import Model

    if model in step.SHAPES:
        raise UserError(
            f"{model} is created here with random weights and has no tokenizer, which --data needs. Name a model that "
            "has one with --model (a folder or a hub id), or use --lengths."
        )
    examples = load(data, "train", limit=documents).examples
    whole = examples[: len(examples) // step_size * step_size]
    if not whole:
        raise UserError(f"{data} has {len(examples)} documents, but one step needs {step_size}. Lower --batch.")
    tokenizer, _ = loading.load_tokenizer(Model(name=model), lambda: (), "", trust_remote_code=trust_remote_code)
    config = step.configuration(model, trust_remote_code=trust_remote_code)
    if len(tokenizer) > config.vocab_size:
        raise UserError(f"the tokenizer of {model} has {len(tokenizer)} tokens, but the model {config.vocab_size}.")
    if is_decoder_only(model, trust_remote_code=trust_remote_code):
        raise UserError(f"{model} is decoder-only, and --data has no prompts for it yet. Use --lengths.")
    source, target = _limits(config)
    shape = Shape(separator="none", max_source=source, max_target=target)
    return tokenise(whole, fingerprint(whole), tokenizer, shape, cache=folder).folder


def is_decoder_only(model: str, *, trust_remote_code: bool) -> bool:
    """Whether a target follows its source in one row of this model."""
    return not step.configuration(model, trust_remote_code=trust_remote_code).is_encoder_decoder


def documents(setup: Setup) -> int:
    """How many rows there are."""
    return len(Tokens(setup.tokens))


def _limits(config: Any) -> tuple[int, int]:
    positions = getattr(config, "max_position_embeddings", None) or max(lengths.LONGEST)
    source, target = (min(most, positions) for most in lengths.LONGEST)
    return source, target


# Measuring


def measure(setup: Setup, contestants: Sequence[Contestant], *, trace: Path | None = None) -> list[Row]:
    """Train with each contestant in a process of its own. One that fails gets a row with the reason.

    Args:
        setup: what all have in common.
        contestants: who trains.
        trace: where to write a Chrome trace of ngramloss: captured if that runs, else the last of its contestants.
    """
    ours = [each.name for each in contestants if each.ours and not each.why_not(setup.device, setup.decoder_only)]
    if trace is not None and not ours:
        raise UserError("--profile traces ngramloss, but none of its contestants was asked for that can run here.")
    traced = "captured" if "captured" in ours else ours[-1] if ours else None
    rows = []
    for number, contestant in enumerate(contestants, 1):
        logger.info(f"{number} of {len(contestants)}: {contestant.label}")
        answer = in_child(trained, setup, contestant, trace if contestant.name == traced else None)
        rows.append(answer.result or Row(contestant.name, contestant.label, why_not=answer.why_not))
        logger.info(f"  {answer.why_not or f'{rows[-1].docs_per_second:.0f} documents per second'}")
    return compared(rows)


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows with their multiples of the stock trainers."""
    ours = {contestant.name for contestant in CONTESTANTS if contestant.ours}
    stock = {row.name: row.docs_per_second for row in rows if row.name not in ours and not row.why_not}
    random, best = stock.get("stock-random", NAN), max(stock.values(), default=NAN)
    return [row._replace(to_random=row.docs_per_second / random, to_best=row.docs_per_second / best) for row in rows]


def trained(setup: Setup, contestant: Contestant, trace: Path | None) -> Row:
    """Train with one contestant, in this process."""
    if why_not := contestant.why_not(setup.device, setup.decoder_only):
        raise UserError(why_not)
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    warnings.simplefilter("ignore")
    for plugin in setup.plugins:
        load_file(Path(plugin))
    window = Window(warm_up=contestant.warm_up(setup), steps=setup.steps, cuda=setup.cuda, trace=trace)
    with tempfile.TemporaryDirectory() as output:
        batches = contestant.train(setup, output, window)
        padding = padding_share(islice(batches, LOOKED_AT))
    return Row(
        contestant.name,
        contestant.label,
        docs_per_second=1e3 * setup.batch * setup.accumulate / window.milliseconds,
        step_milliseconds=window.milliseconds,
        device_milliseconds=window.device_milliseconds,
        idle=window.idle,
        padding=padding,
        gibibytes=window.gibibytes,
        reserved_gibibytes=window.reserved_gibibytes,
    )


def padding_share(batches: Iterable[Any]) -> float:
    """The share of padding in sources and targets together. A row without labels is there to fill the batch up."""
    real = every = 0
    for batch in (part for whole in batches for part in micro_batches(whole)):
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        counted = labels != IGNORE_INDEX  # [B, T]
        used = torch.ones_like(ids) if mask is None else mask  # [B, S]
        if (positions := batch.get("label_positions")) is not None:  # a row ends with its last label
            last = positions.where(counted, -1).amax(-1, keepdim=True) % ids.shape[1] + 1  # [B, 1]
            used = torch.arange(ids.shape[1]) <= last  # [B, S]
        real += int(used[counted.any(-1)].sum())
        every += ids.numel()
        if "decoder_input_ids" in batch:  # otherwise targets are in the same rows
            real += int(counted.sum())
            every += labels.numel()
    return 1 - real / every if every else NAN


def micro_batches(batch: Any) -> Iterator[Mapping[str, Tensor]]:
    """The batches that the model gets: this one, or those in it, if a loader returns several at once."""
    if isinstance(batch, Mapping):
        yield batch
    elif isinstance(batch, (list, tuple)):
        for part in batch:
            yield from micro_batches(part)
    elif hasattr(batch, "__dict__"):
        for part in vars(batch).values():
            yield from micro_batches(part)


HEADS = ("docs/s", "× random", "× best", "ms a step", "GPU ms", "idle %", "padding %", "peak GiB")


def as_text(rows: Sequence[Row]) -> str:
    """The rows as a table, then a line for each contestant that failed."""
    table: list[tuple[str, ...]] = [("", *HEADS)]
    for row in rows:
        if not row.why_not:
            numbers = (
                row.docs_per_second,
                row.to_random,
                row.to_best,
                row.step_milliseconds,
                row.device_milliseconds,
                100 * row.idle,
                100 * row.padding,
                row.gibibytes,
            )
            table.append((row.what, *map(fixed, numbers, (1, 2, 2, 1, 1, 0, 1, 2))))
    failed = [f"{row.what}: {row.why_not}" for row in rows if row.why_not]
    return "\n".join([*(aligned(table) if len(table) > 1 else []), *failed])


def plot(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw bars of documents per second."""
    bars = [(row.what, row.docs_per_second, f"{row.docs_per_second:,.0f}") for row in rows if not row.why_not]
    chart.draw([chart.Panel("", "documents per second in training", bars)], path, title)
