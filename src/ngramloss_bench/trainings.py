"""a contestant and settings → a training in this process, watched, and the rows that all of them train on."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import (
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
)

import ngramloss as ng
from ngramloss.training.captured import CapturedStep
from ngramloss_bench import flops, lengths, models
from ngramloss_bench.benchmark import NAN
from ngramloss_bench.child import Failed
from ngramloss_bench.train import CONTESTANTS, Contestant
from ngramloss_bench.window import Window

LONG = 10**6
"""Steps of a long training."""
LOOKED_AT = 200
"""Batches in which padding is counted."""


def trained(
    contestant: Contestant, options: argparse.Namespace, tokens: Path, trace: str | None
) -> dict[str, list[float]]:
    """Train with one contestant, in this process. Memory is the peak of tensors, on a CPU of the process.

    Times have a value for each window of steps.
    """
    config = models.configuration(options.model)
    if why_not := contestant.why_not(options.device, models.is_decoder_only(config)):
        raise ng.UserError(why_not)
    models.prepare(options)
    # where steps are captured, a whole epoch comes first, so that most shapes have been met
    warm_up = max(options.warm_up, _epoch(options)) if contestant.settings.get("capture") else options.warm_up
    cuda = options.device == "cuda"
    traced = Path(trace) if trace else None
    window = Window(warm_up=warm_up, steps=options.steps, cuda=cuda, trace=traced, windows=options.windows)
    train = ours if contestant.ours else stock
    with tempfile.TemporaryDirectory() as output:
        batches = train(options, tokens, output, window, **contestant.settings)
        padding = padding_share(islice(batches, LOOKED_AT))
    rows = ng.tokens.Tokens(tokens)
    operations = flops.per_document(config, rows.lengths, rows.target_lengths)
    percent = 100 * operations / flops.peak(options.device, options.precision)  # of a document per second
    speeds = [1e3 * options.batch_size * options.accumulate / spent for spent in window.milliseconds]
    return {
        "docs/s": speeds,
        "ms a step": window.milliseconds,
        "MFU %": [percent * speed for speed in speeds],
        "GPU ms": [window.device_milliseconds],
        "idle %": [100 * window.idle],
        "padding %": [100 * padding],
        "peak GiB": [window.gibibytes],
        "reserved GiB": [window.reserved_gibibytes],
    }


def _epoch(options: argparse.Namespace) -> int:
    return int(options.documents // (options.batch_size * options.accumulate))


# Hugging Face's trainer


class _Watched(TrainerCallback):
    """Tells a window of each step of Hugging Face's trainer."""

    def __init__(self, window: Window) -> None:
        self.window = window

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.window.after(state.global_step)


def stock(
    options: argparse.Namespace,
    tokens: Path,
    output: str,
    window: Window,
    *,
    grouped: bool = False,
    compiled: bool = False,
    liger: bool = False,
    trl: bool = False,
    objective: str = "",
) -> Iterable[Any]:
    """Train with Hugging Face's trainer at its best until the window's last step. Returns the batches of an epoch.

    With ``trl`` it is TRL's, and with an objective this is attached, or given to our version of TRL's.
    """
    cuda = options.device == "cuda"
    if cuda:
        _set_allocator("expandable_segments:True")
    model = models.built(options.model, options.device)
    decoder_only = models.is_decoder_only(model.config)
    if liger:
        refuse_liger(options.device, decoder_only)
    arguments_of, trainer_of, more = _trl(objective) if trl else (Seq2SeqTrainingArguments, Seq2SeqTrainer, {})
    if objective and not trl:
        ng.attach(model, objective)
    arguments = arguments_of(
        output_dir=output,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        max_steps=window.last_step,
        learning_rate=3e-5,
        optim="adamw_torch_fused" if cuda else "adamw_torch",
        bf16=options.precision == "bf16",
        fp16=options.precision == "fp16",
        torch_compile=compiled,
        use_liger_kernel=liger,
        train_sampling_strategy="group_by_length" if grouped else "random",
        dataloader_num_workers=options.workers,
        dataloader_pin_memory=cuda,
        remove_unused_columns=False,
        logging_strategy="no",
        logging_nan_inf_filter=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
        data_seed=options.seed,
        use_cpu=not cuda,
        **more,
    )
    tokenizer, shifted = _padding_tokenizer(model.config.pad_token_id), None if decoder_only else model
    rows: Any = _Lists(ng.tokens.Tokens(tokens), joined=decoder_only)
    trainer = trainer_of(
        model,
        arguments,
        train_dataset=_dataset(rows) if trl else rows,
        processing_class=tokenizer if trl else None,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=shifted, pad_to_multiple_of=8 if cuda else 1),
        callbacks=[_Watched(window)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    loader: Iterable[Any] = trainer.get_train_dataloader()
    return loader


def _trl(objective: str) -> tuple[Any, Any, dict[str, Any]]:
    if find_spec("trl") is None:
        raise Failed("not installed: pip install trl")
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    kind: Any = partial(ng.NgramSFTTrainer, objective=objective) if objective else SFTTrainer
    return SFTConfig, kind, {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}


def _dataset(rows: Any) -> Any:
    from datasets import Dataset as Table  # type: ignore[import-untyped]

    return Table.from_list([rows[number] for number in range(len(rows))])


def refuse_liger(device: str, decoder_only: bool) -> None:
    """Raise if Liger-Kernel cannot run."""
    if why_not := CONTESTANTS["liger-random"].why_not(device, decoder_only):
        raise Failed(why_not)


# A plain loop


def loop(
    options: argparse.Namespace, tokens: Path, output: str, window: Window, *, objective: str = "", liger: bool = False
) -> None:
    """Train in a loop without a trainer until the window's last step, on rows of equal lengths."""
    device, cuda = options.device, options.device == "cuda"
    model = models.built(options.model, device).train()
    if liger:
        refuse_liger(device, models.is_decoder_only(model.config))
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    if objective:
        ng.attach(model, objective)
    rows: Any = _Lists(ng.tokens.Tokens(tokens), joined=models.is_decoder_only(model.config))
    loader = DataLoader(rows, options.batch_size, collate_fn=_stacked, num_workers=options.workers, pin_memory=cuda)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-5, fused=cuda)
    scaler = torch.amp.GradScaler(device, enabled=options.precision == "fp16")
    for number, batch in enumerate(islice(loader, window.last_step), 1):
        with models.autocast(device, options.precision):
            loss = model(**{name: ids.to(device, non_blocking=True) for name, ids in batch.items()}).loss
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        optimiser.zero_grad()
        window.after(number)


def _stacked(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


def _set_allocator(setting: str) -> None:
    """Change the allocator's settings. The process that started this one has read the environment already."""
    new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (new or torch.cuda.memory._set_allocator_settings)(setting)


class _Lists(Dataset[dict[str, list[int]]]):
    """The same rows as lists of numbers, as a tokenizer returns them."""

    def __init__(self, tokens: ng.tokens.Tokens, *, joined: bool) -> None:
        self.tokens, self.joined = tokens, joined

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        source, target = (self.tokens[row][name].tolist() for name in ("input_ids", "labels"))
        if not self.joined:
            return {"input_ids": source, "labels": target}
        return {"input_ids": source + target, "labels": [ng.IGNORE_INDEX] * len(source) + target}


def _padding_tokenizer(pad: int) -> PreTrainedTokenizerFast:
    """A tokenizer that can only pad, which is all that a collator asks of it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({"<pad>": pad}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")  # type: ignore[no-untyped-call]


# The loop of ngramloss train


def ours(
    options: argparse.Namespace, tokens: Path, output: str, window: Window, *, capture: bool, compiled: bool = False
) -> Iterable[Any]:
    """The loop of ``ngramloss train``. Compiled, it is the beginning of a training that is long enough for that."""

    def after(number: int, values: object) -> None:
        window.after(number)
        if compiled and number == window.last_step:
            signal.raise_signal(signal.SIGTERM)  # the training stops after its next step, as if a person asked it to

    model = models.built(options.model, options.device)
    with _left_out_of(window, CapturedStep, "_capture"):
        outcome = models.train(
            options,
            model,
            ng.tokens.Tokens(tokens),
            after,
            max_steps=max(window.last_step + 1, LONG if compiled else 0),  # a last step logs more than others
            batch_size=options.batch_size,
            accumulate=options.accumulate,
            capture=capture,
            compile=compiled,
            seed=options.seed,
        )
    if capture and outcome.why_not_captured:  # that would be another contestant
        raise RuntimeError(f"steps are not captured as CUDA graphs: {outcome.why_not_captured}")
    return islice(outcome.steps.from_(0), _epoch(options))


@contextmanager
def _left_out_of(window: Window, kind: type, name: str) -> Iterator[None]:
    method = getattr(kind, name)

    def timed(*args: Any) -> Any:
        with window.without():
            return method(*args)

    setattr(kind, name, timed)
    try:
        yield
    finally:
        setattr(kind, name, method)


# Rows that all contestants train on


def write_rows(folder: Path, name: str, documents: int, config: Any, *, seed: int) -> None:
    """Write random ids with the lengths of a known data set's documents, as a folder of :class:`Tokens`."""
    positions = models.most_positions(config)
    sources, targets = lengths.sample(name, documents, seed, (positions, positions))
    lengths.write_tokens(folder, sources, targets, vocabulary=config.vocab_size, seed=seed)


def tokenised_rows(folder: Path, options: argparse.Namespace, config: Any, step_size: int) -> Path:
    """Tokenise one's own data, in whole steps, with the model's tokenizer. Returns the folder of :class:`Tokens`."""
    model = options.model
    if model in models.SHAPES:
        raise ng.UserError(
            f"{model} is created here with random weights and has no tokenizer, which --data needs. Name a model that "
            "has one with --model (a folder or a hub id), or use --lengths."
        )
    examples = ng.data.load(options.data, "train", limit=options.documents).examples
    whole = examples[: len(examples) // step_size * step_size]
    if not whole:
        raise ng.UserError(
            f"{options.data} has {len(examples)} documents, but one step needs {step_size}. Lower --batch-size."
        )
    tokenizer, _ = ng.loading.load_tokenizer(ng.recipe.Model(name=model), lambda: (), "")
    if len(tokenizer) > config.vocab_size:
        raise ng.UserError(f"the tokenizer of {model} has {len(tokenizer)} tokens, but the model {config.vocab_size}.")
    if models.is_decoder_only(config):
        raise ng.UserError(f"{model} is decoder-only, which --data does not support. Use --lengths.")
    source, target = (min(most, models.most_positions(config)) for most in lengths.LONGEST)
    shape = ng.tokens.Shape(separator="none", max_source=source, max_target=target)
    return ng.tokens.tokenise(whole, ng.data.fingerprint(whole), tokenizer, shape, cache=folder).folder


# Padding


def padding_share(batches: Iterable[Any]) -> float:
    """The share of padding in sources and targets together. A row without labels is there to fill the batch up."""
    real = every = 0
    for batch in (part for whole in batches for part in micro_batches(whole)):
        ids, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
        counted = labels != ng.IGNORE_INDEX  # [B, T]
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
