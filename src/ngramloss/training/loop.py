"""a model, examples and settings → a trained model: the loop of ``ngramloss train``, to be read from top to bottom.

A step is planned (:mod:`ngramloss.steps`), run (eager, or one CUDA graph for each shape), averaged over processes,
clipped and applied. Then, if it is time: a line in the log, a validation, a checkpoint. Everything that must survive a
stop is in :class:`State` and in the optimiser; a checkpoint has both, and a continued training has the losses of one
that was never stopped. Random numbers are drawn from seed, step and process, so they need not be saved.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.errors import UserError
from ngramloss.hf.attach import attach, attached_loss, decoder_inputs, last_call
from ngramloss.hf.diagnosing import diagnostics
from ngramloss.hf.heads import dropouts, has_encoder
from ngramloss.hf.shared_prompts import why_not_shared
from ngramloss.hf.teachers import frozen_start
from ngramloss.hf.unmasked import as_if_captured
from ngramloss.loss import JointLoss
from ngramloss.models.adapters import has_adapters, raise_unless_mergeable
from ngramloss.models.settings import pad_id
from ngramloss.output.console import logger
from ngramloss.recipe import NOT_SHARDED, Train
from ngramloss.settings import nearest
from ngramloss.stats import BESIDE_LABELS, WEIGHTS
from ngramloss.steps import reduction
from ngramloss.steps.budget import fitting_tokens, try_batch
from ngramloss.steps.joined import JoinedPadder
from ngramloss.steps.padding import Batch, Pad, Padder, Step
from ngramloss.steps.plan import MULTIPLE, Joined, Plan, fitted_grid, most_lengths
from ngramloss.steps.planned import Epochs, ExampleLengths, PlannedSteps, lengths_of
from ngramloss.steps.running import NOT_CAPTURED, StepRunner
from ngramloss.steps.twins import twins
from ngramloss.storage.typed import typed
from ngramloss.training import averaging, checkpoints, compiling
from ngramloss.training.best import is_better
from ngramloss.training.identity import IDENTITY, python_made_of, raise_unless_same, record_of
from ngramloss.training.log import Log
from ngramloss.training.online import FreshTexts, OwnTexts, writing_copy
from ngramloss.training.processes import Processes, start_processes
from ngramloss.training.run import Run, python_run, warn_unless_exact
from ngramloss.training.schedules import learning_rate
from ngramloss.training.sharding import shard
from ngramloss.training.stopping import Stopping
from ngramloss.training.validation import terms_on


class Diverged(Exception):
    """The loss became NaN or infinite."""


@dataclasses.dataclass
class State:
    """What must survive a stop, besides the model and the optimiser."""

    step: int = 0
    updates: int = 0
    """Steps that changed the weights. fp16 skips one whose gradients are infinite, and the schedule waits."""
    best: float | None = None
    best_step: int | None = None
    ended_early: bool = False
    scale: float = 2.0**16
    """What fp16 multiplies the loss with."""
    scale_grows_in: int = 0
    """Steps since the scale last changed."""
    averages: dict[str, checkpoints.Average] = dataclasses.field(default_factory=dict)
    """At the end: of ``average`` and ``ema``."""

    def judge(self, value: float, settings: Train, *, higher: bool) -> bool:
        """Keep the best value of a validation, or end a training that has not improved for long.

        Args:
            value: of what selects the best checkpoint; NaN if nothing does.
            settings: how to train.
            higher: whether higher values are better.

        Returns:
            Whether this step must be saved.
        """
        if is_better(value, self.best, higher=higher):
            self.best, self.best_step = value, self.step
            return True
        patience = settings.early_stopping * settings.eval_every
        self.ended_early = patience > 0 and self.step - (self.best_step or 0) >= patience
        return self.ended_early


def restored(checkpoint: Path, model: Any, optimiser: Any, *, sharded: bool) -> State:
    """Give model and optimiser what a checkpoint has of them, and return its state. Raises if it is not one of them."""
    saved = checkpoints.restore(checkpoint, model, optimiser, sharded=sharded)
    path = checkpoint / checkpoints.STATE
    state: State = typed(State, saved, path, checkpoints.AGAIN)
    in_order = state.step >= state.updates >= 0 and state.scale > 0 and state.scale_grows_in >= 0
    if not in_order or state.step != checkpoints.facts(checkpoint)["step"]:
        raise UserError(f"{path} is not of this checkpoint: step {state.step}. {checkpoints.AGAIN}")
    return state


class Outcome(NamedTuple):
    """How a training ended."""

    step: int
    total: int
    finished: bool
    continued_from: int
    state: State
    steps: PlannedSteps
    why_not_captured: str
    """Why steps did not run as CUDA graphs; empty if they did."""


class Job(NamedTuple):
    """What is trained, and what happens around it.

    Attributes:
        model: a Hugging Face encoder-decoder or decoder-only model, to which the objective is attached.
        tokenizer: saved with each checkpoint.
        examples: rows with ``input_ids`` and ``labels``, and perhaps ``candidates`` and ``gains``, or ``lm_logp``, a
            number for each label. For a decoder-only model, ``input_ids`` are the prompt, and ``labels`` what follows
            it.
        run: what is trained: the objective, how to train, and what selects the best checkpoint.
        validation: rows to validate on, if any.
        score: a model → further numbers of a validation, such as a score of generated texts.
        folder: where checkpoints go; None saves none.
        saved_with: file name → text that each checkpoint contains besides.
        continued_from: a checkpoint.
        logs: get every line of the log, with its step; only in the first process.
        on_step: called after each step with its number and the log's values of it, if it is logged.
        teacher: the model that ``distill`` compares with.
        own_texts: what the model writes while it is trained, if it does, for terms that compare candidates.
    """

    model: Any
    tokenizer: Any
    examples: Any
    run: Run
    validation: Any = None
    score: Callable[[Any], dict[str, float]] | None = None
    folder: Path | None = None
    saved_with: Mapping[str, str] = {}
    continued_from: Path | None = None
    logs: Sequence[Callable[[Mapping[str, float], int], object]] = ()
    on_step: Callable[[int, Mapping[str, float]], object] = lambda number, values: None
    teacher: Any = None
    own_texts: OwnTexts | None = None

    @property
    def settings(self) -> Train:
        """How to train."""
        return self.run.settings.train


def run(job: Job, here: Processes) -> Outcome:
    """Train. Every process calls this."""
    settings, best = job.settings, job.run.best
    precision = job.run.on(here.count, here.device)

    # The model, its objective, the optimiser
    model, objective = job.model, JointLoss(job.run.terms)
    if objective.needs_twins:
        raise_without_dropout(model, objective)
    if job.folder is not None:
        raise_unless_mergeable(model)
    if settings.fsdp and has_adapters(model):
        raise UserError(NOT_SHARDED)
    # Before any checkpoint is read: a start is the model before training.
    teacher = frozen_start(model) if objective.compares_with_start else job.teacher
    writes = None if job.own_texts is None else writing_copy(model, precision)
    attach(model, objective.with_ce().terms, memory=settings.memory, teacher=teacher)
    loss_fn = attached_loss(model)
    loss_fn.progress = 0.0
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.to(here.device).train()
    if teacher is not None and teacher is not model:
        teacher.to(here.device)  # before a graph is captured that reads it
    if here.count > 1:
        reduction.share_weights(model)
    why_not_captured = _why_not_captured(settings, here.device)
    if remark := _capture_remark(settings, here.device):
        logger.info(remark)
    fresh: FreshTexts | None = None
    if job.own_texts is not None:
        given = job.own_texts, model, job.tokenizer, job.examples, objective
        fresh = FreshTexts(*given, seed=settings.seed, here=here, writes=writes)
    joined, lengths = _layout(job, model, teacher, here, fresh)
    compiles = _compiles(job, here, lengths, why_not_captured)
    if compiles:
        compiling.compile_layers(model)
    if settings.fsdp:
        shard(model)
    optimiser = optimiser_of(model, settings, here.device)
    ema = averaging.MovingAverage(model, settings.ema) if settings.ema else None

    # What a micro-batch does
    def autocast() -> Any:
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
        return nullcontext() if low is None else torch.autocast(here.device.type, low)

    def share(batch: Batch, counts: Tensor) -> Tensor:
        """Run forward and backward of a micro-batch's share of the step. Returns its loss and terms, [1 + parts]."""
        with autocast(), nullcontext() if runner.why_not_captured else as_if_captured():
            loss = model(**batch, num_tokens=counts[0], num_sequences=counts[1]).loss  # []
        scaled = loss * here.count  # gradients are averaged over processes
        (scaled if scaler is None else scaler.scale(scaled)).backward()
        return torch.stack([loss.detach(), *last_call(model).parts.values()])

    # The steps
    steps, largest = _plan(
        job, model, here, autocast, fresh, joined, lengths, captures=not why_not_captured, compiled=compiles
    )
    if not steps.total:
        raise UserError("there are no examples to train on.")
    state = State()
    scaler = torch.amp.GradScaler(here.device.type) if precision == "fp16" else None
    if job.continued_from is not None:
        state = restored(job.continued_from, model, optimiser, sharded=settings.fsdp)
        if ema is not None:
            ema.restore(job.continued_from)
        if fresh is not None:
            fresh.restore(job.continued_from)
        if scaler is not None:
            scaler.load_state_dict(
                {**scaler.state_dict(), "scale": state.scale, "_growth_tracker": state.scale_grows_in}
            )
    began = state.step
    warmups = warmups_of(settings, steps.total)
    runner = StepRunner(
        model,
        share,
        device=here.device,
        processes=here.count,
        sharded=settings.fsdp,
        why_not_captured=why_not_captured,
        largest=largest,
    )
    log = Log(job.logs if here.first else (), [part.name for part in loss_fn.parts], steps, here, since=began)
    padder = _padder(job, model, here)  # of validation

    def validate() -> dict[str, float]:
        """The terms on the validation rows, and what else scores the model."""
        with autocast():
            found = terms_on(model, job.validation, settings, here, padder)
        if job.score is not None:  # in the precision of the weights, as `ngramloss generate`
            found |= {f"eval_{name}": value for name, value in job.score(model).items()}
        return found

    def save(*, finished: bool) -> None:
        """Write a checkpoint."""
        assert job.folder is not None
        with log.paused():
            if scaler is not None:
                state.scale, state.scale_grows_in = scaler.get_scale(), scaler._get_growth_tracker()
            if finished and (settings.average or settings.ema):
                state.averages = _averages(job, here, state, ema, validate, log)
            checkpoints.save(
                job.folder,
                model,
                job.tokenizer,
                optimiser,
                state,
                here,
                more={**job.saved_with, **({} if fresh is None else fresh.saved(state.step))},
                finished=finished,
                keep=settings.keep,
                sharded=settings.fsdp,
                average=settings.average,
                every=settings.save_every,
                ema=None if ema is None else ema.values,
            )

    saves = True  # what is done so far
    remaining: Iterable[Step] = ()
    if not state.ended_early and fresh is not None:
        remaining = fresh.steps(steps, state.step)  # the model writes when the first step of a refresh is asked for
    elif not state.ended_early:
        remaining = steps.from_(state.step, begin=_begin_thread(here.device))
    with Stopping(here) as stop:
        for step in remaining:
            seed_step(settings.seed, step.number, here.rank)
            loss_fn.progress = state.step / steps.total
            loss_fn.refresh_weights()
            rate, encoder_rate = learning_rates(settings, state.updates, warmups, steps.total)
            for group in optimiser.param_groups:
                group["lr"] = encoder_rate if "encoder" in group else rate

            values = runner.run(step)  # [1 + parts]: gradients are now those of the whole step
            if scaler is not None:
                scaler.unscale_(optimiser)
            norm = runner.clip(settings.clip)  # []
            done = state.updates
            if scaler is None:
                optimiser.step()
                state.updates += 1
            else:
                state.updates += _scaled_step(scaler, optimiser)
            if ema is not None and state.updates > done:
                ema.update(state.updates)
            if runner.gradients is None:
                model.zero_grad()
            state.step = step.number
            log.add(values, step)

            stops = stop.asked(step.number)
            last = step.number == steps.total
            evaluates = job.validation is not None and (step.ends(settings.eval_every) or last)
            saves = step.ends(settings.save_every) or last or stops
            line: dict[str, float] = {}
            if step.number == 1 or step.ends(settings.log_every) or saves or evaluates:
                with log.paused():
                    more = diagnostics(model, objective, runner.last_batch, autocast) | scheduled_weights(loss_fn)
                    if fresh is not None:
                        more |= fresh.values(log.spent)
                    if settings.encoder_learning_rate:
                        more["encoder_learning_rate"] = encoder_rate
                    line = log.write(step.number, norm=norm, rate=rate, more=more)
                    raise_if_diverged(line["loss"], step.number, log, fp16=scaler is not None)
            if evaluates:
                with log.paused():
                    validation = validate()
                    log.write_validation(step.number, validation)
                    raise_if_diverged(validation["eval_loss"], step.number, log, fp16=scaler is not None)
                value = validation.get(f"eval_{best.name}", math.nan)
                saves |= state.judge(value, settings, higher=best.higher)
                line |= validation
            if saves and job.folder is not None:
                save(finished=last or state.ended_early)
            job.on_step(step.number, line)
            if stops or state.ended_early:
                break
        if fresh is not None and fresh.failed is not None:
            if not saves and job.folder is not None:
                save(finished=False)
            raise fresh.failed
    if compiles:
        compiling.leave(model)
    finished = state.step >= steps.total or state.ended_early
    return Outcome(state.step, steps.total, finished, began, state, steps, runner.why_not_captured)


def train(
    model: Any,
    tokenizer: Any,
    examples: Any,
    settings: Train | None = None,
    *,
    objective: str = "ce",
    validation: Any = None,
    folder: str | Path | None = None,
    teacher: Any = None,
    own_texts: OwnTexts | None = None,
    on_step: Callable[[int, Mapping[str, float]], object] = lambda number, values: None,
    **changes: Any,
) -> Outcome:
    """Train a model in Python with the loop of ``ngramloss train``: planned, and on a GPU captured, steps.

    Args:
        model: a Hugging Face encoder-decoder or decoder-only model. The objective is attached to it.
        tokenizer: the model's tokenizer; it pads, and is saved with checkpoints.
        examples: rows with ``input_ids`` and ``labels``. For a decoder-only model, ``input_ids`` are the prompt alone,
            and ``labels`` the ids that follow it, with the end token; an id there that is read but not learnt, such as
            of a question between two answers, is written ``~id``. Rows may also have ``weights``, one for each label.
        settings: how to train, as in the section ``train`` of a recipe.
        objective: as in :class:`JointLoss`.
        validation: rows to validate on every ``eval_every`` steps.
        folder: where to save checkpoints; a training in a folder with checkpoints continues from the last, if all that
            it is made of is the same. Only ``epochs``, ``max_steps`` and what does not change steps may differ.
        teacher: the model that ``distill`` compares with, as in :func:`attach`. ``keep`` takes none: it compares with
            ``model`` as it is passed here, so a continued training must be given that model again.
        own_texts: what the model writes while it is trained, as in the section ``online`` of a recipe.
        on_step: called after every step with its number and, if the step is logged, the values.
        changes: settings to change: ``train(..., max_steps=1000, learning_rate=1e-4)``.

    Returns:
        How it ended. The model has the last weights; ``average`` and ``ema`` are models in ``folder``.
    """
    known = [field.name for field in dataclasses.fields(Train)]
    if unknown := [name for name in changes if name not in known]:
        raise TypeError(f"train has no setting {unknown[0]!r}. {nearest(unknown[0], known, 0.6)}".rstrip())
    settings = dataclasses.replace(settings or Train(), **changes)
    asked = python_run(objective, settings, own_texts)
    if folder is None and (settings.average or settings.ema):
        raise UserError("average and ema are written beside the checkpoints. Give a folder for these: folder=….")
    if settings.teacher or (teacher is not None and asked.compares_with_start):
        raise UserError(
            "train.teacher is read by ngramloss train. Here, pass the loaded model: train(..., teacher=model). For "
            "keep pass none: it compares with the model as it is before training."
        )
    if own_texts is not None:
        warn_unless_exact(asked)
    here = start_processes()
    checkpoint_folder = None if folder is None else Path(folder)
    newest, record = None, ""
    if checkpoint_folder is not None:
        newest = _newest(checkpoint_folder, here)
        given = {"validation": validation, "teacher": teacher, "own_texts": own_texts}
        record = record_of(python_made_of(model, examples, settings, objective, **given))
    if newest is not None:
        raise_unless_same(newest, record, folder=newest.parent, otherwise="choose another folder")
        logger.info(f"continuing {folder} from step {checkpoints.step(newest)}.")
    job = Job(
        model,
        tokenizer,
        examples,
        asked,
        validation=validation if settings.eval_every else None,
        folder=checkpoint_folder,
        saved_with={IDENTITY: record} if record else {},
        continued_from=newest,
        on_step=on_step,
        teacher=teacher,
        own_texts=own_texts,
    )
    return run(job, here)


def _newest(folder: Path, here: Processes) -> Path | None:
    """The checkpoint to continue from. Incomplete ones are deleted: they would count among those that are kept."""
    saved = checkpoints.find(folder)
    for checkpoint in saved.broken:
        if (checkpoint / checkpoints.FOREIGN_STATE).exists():
            raise UserError(f"{checkpoint} was saved by a Hugging Face trainer. Choose another folder.")
    here.wait()
    if here.first:
        folder.mkdir(parents=True, exist_ok=True)
        for checkpoint in saved.broken:
            checkpoints.delete(checkpoint)
    here.wait()
    return saved.newest


# What the loop calls


def _averages(
    job: Job,
    here: Processes,
    state: State,
    ema: averaging.MovingAverage | None,
    validate: Callable[[], dict[str, float]],
    log: Log,
) -> dict[str, checkpoints.Average]:
    """Validate the averages of the weights as a checkpoint is, and write each as a model beside the checkpoints.

    Returns:
        What ``State.averages`` keeps of each.
    """
    model, folder, found = job.model, job.folder, {}
    assert folder is not None, "train has made sure of it"
    if job.settings.average:
        others = averaging.members(folder, job.settings)
        steps = [*map(checkpoints.step, others), state.step]
        if len(steps) < job.settings.average:
            mean = f"the mean is that of {len(steps)}" if others else "there is no mean"
            logger.info(
                f"train.average asks for {job.settings.average} checkpoints, and there are {len(steps)}, so {mean}. "
                f"They are those of every {job.settings.save_every:,} steps (train.save_every), and the last weights."
            )
        if others:
            found[averaging.AVERAGE] = averaging.mean_weights(model, others), steps
    if ema is not None:
        found[averaging.EMA] = ema.values, [state.step]
    kept: dict[str, checkpoints.Average] = {}
    for name, (weights, steps) in found.items():
        value: float | None = None
        with averaging.exchanged(model, weights):
            if job.validation is not None:
                values = {key.removeprefix("eval_"): value for key, value in validate().items()}
                log.write_validation(state.step, {f"{name}_{key}": value for key, value in values.items()})
                measured = values.get(job.run.best.name, math.nan)
                value = measured if math.isfinite(measured) else None
            if here.first:
                checkpoints.save_model(folder / name, model, job.tokenizer)
        kept[name] = {"value": value, "steps": steps}
    return kept


def total_steps(settings: Train, examples: int) -> int:
    """How many steps a training on this number of examples has."""
    epoch = math.ceil(examples / (settings.batch_size * settings.accumulate))
    return (settings.max_steps or math.ceil(settings.epochs * epoch)) if epoch else 0


def warmups_of(settings: Train, steps: int) -> tuple[int, int]:
    """Steps of the warm-up in a training of this many steps, and of the encoder's.

    Logs if they are not those that were asked for.
    """
    encoder = dataclasses.replace(settings, warmup_steps=settings.encoder_warmup_steps or settings.warmup_steps)
    for asked in dict.fromkeys((settings.warmup_steps, encoder.warmup_steps)):
        if asked >= max(steps, 1):
            so = (
                "the learning rate rises to the end"
                if settings.schedule == "noam"
                else f"it takes a tenth of them, {steps // 10:,}"
            )
            logger.info(
                f"a warm-up of {asked:,.0f} steps does not end within this training of {steps:,} steps, so {so}. A "
                "share, such as train.warmup_steps=0.05, fits every length."
            )
    return settings.warmup(steps), encoder.warmup(steps)


def learning_rates(settings: Train, done: int, warmups: tuple[int, int], total: int) -> tuple[float, float]:
    """The learning rate of the next update, and the encoder's, which may be the same.

    Args:
        settings: of the training.
        done: updates done.
        warmups: what :func:`warmups_of` returned.
        total: all updates.
    """
    largest = settings.learning_rate, settings.encoder_learning_rate or settings.learning_rate
    rate, encoder_rate = (
        learning_rate(settings.schedule, done, warmup=warmup, total=total, rate=each)
        for warmup, each in zip(warmups, largest, strict=True)
    )
    return rate, encoder_rate


def raise_without_dropout(model: Any, objective: JointLoss) -> None:
    """Raise if nothing distinguishes twins."""
    if not any(dropouts(model)):
        raise UserError(
            f"this {type(model).__name__} has no dropout, so twins are equal: {str(objective)!r} would learn nothing "
            "from comparing them. Set dropout: model.dropout for a new model, model.lora_dropout for adapters, or "
            "dropout in the model's own config.json."
        )


def optimiser_of(model: Any, settings: Train, device: torch.device) -> torch.optim.Optimizer:
    """AdamW. Biases and the weights of norms, which are vectors, do not decay.

    If the encoder has a learning rate of its own, its groups come last, and ``encoder`` marks them.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = _encoder_ids(model) if settings.encoder_learning_rate else frozenset()
    groups = [
        {"params": [p for p in trained if (p.ndim >= 2) == decays and (id(p) in own) == encoder]}
        | {"weight_decay": settings.weight_decay if decays else 0.0}
        | ({"encoder": True} if encoder else {})
        for encoder in ((False, True) if own else (False,))
        for decays in (True, False)
    ]
    return torch.optim.AdamW(
        groups,
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
        fused=not settings.fsdp and device.type in ("cpu", "cuda"),
    )


def _encoder_ids(model: Any) -> frozenset[int]:
    """The ids of the encoder's weights, without those that the decoder shares."""
    if not has_encoder(model):
        raise UserError("train.encoder_learning_rate: the model is decoder-only. Leave it out.")
    encoder, decoder = (
        {id(weight) for weight in part().parameters()} for part in (model.get_encoder, model.get_decoder)
    )
    return frozenset(encoder - decoder)


def _layout(
    job: Job, model: Any, teacher: Any, here: Processes, fresh: FreshTexts | None
) -> tuple[Joined, ExampleLengths]:
    """How a source and its texts stand in rows, and how long these are. Logs if prompts are computed for each text."""

    def lengths(joined: Joined) -> ExampleLengths:
        return lengths_of(job.examples, joined=joined) if fresh is None else fresh.lengths(joined=joined)

    if has_encoder(model):
        return "", lengths("")
    if not attached_loss(model).needs_candidates:
        return "turns", lengths("turns")
    shared = lengths("shared")
    if not len(shared.sources):
        return "shared", shared
    longest = {"longest_row": int(shared.sources.max()), "longest_text": int(shared.targets.max())}
    models = {"the model": model} | ({} if teacher is None or teacher is model else {"the teacher": teacher})
    reasons = {name: why_not_shared(each, **longest) for name, each in models.items()}
    if not here.any(any(reasons.values())):
        return "shared", shared
    repeated = lengths("repeated")
    texts = 1 if repeated.texts is None else repeated.texts  # [rows]
    name, why = next(((name, why) for name, why in reasons.items() if why), ("another process", "see its log"))
    logger.info(
        f"candidates do not share their prompt, because {name} cannot do that: {why}. The prompt is computed before "
        f"each text, so steps have {(repeated.sources * texts).sum() / max(shared.sources.sum(), 1):.1f} times as many "
        "tokens."
    )
    return "repeated", repeated


def _padder(
    job: Job,
    model: Any,
    here: Processes,
    *,
    joined: Joined = "turns",
    always_mask: bool = False,
    fresh: FreshTexts | None = None,
) -> Pad:
    multiple = MULTIPLE if here.device.type == "cuda" else 1
    beside = [name for name in BESIDE_LABELS if name in attached_loss(model).needs]
    if len(job.examples) and WEIGHTS in job.examples[0]:  # blank batches have them, too: one graph for each shape
        beside.append(WEIGHTS)
    own = [] if fresh is None else fresh.keys
    if not has_encoder(model):  # padding follows the text, so any id will do
        routed, shared = hasattr(model.config, "output_router_logits"), joined == "shared"
        pad = getattr(job.tokenizer, "pad_token_id", None) or getattr(model.config, "pad_token_id", None) or 0
        return JoinedPadder(int(pad), multiple=multiple, always_mask=routed, beside=beside, own=own, shared=shared)
    return Padder(
        pad_id("the tokenizer and the model's config have", job.tokenizer, model.config),
        lambda labels: decoder_inputs(model, labels),
        multiple=multiple,
        always_mask=always_mask,
        beside=beside,
        own=own,
        start=None if fresh is None else fresh.search.start,
        forced=fresh is not None and fresh.search.first is not None,
    )


def _plan(
    job: Job,
    model: Any,
    here: Processes,
    autocast: Callable[[], Any],
    fresh: FreshTexts | None,
    joined: Joined,
    lengths: ExampleLengths,
    *,
    captures: bool,
    compiled: bool = False,
) -> tuple[PlannedSteps, Batch | None]:
    """The steps of the training, and a micro-batch of the largest shape on a GPU. Compiled layers first run here."""
    settings, cuda = job.settings, here.device.type == "cuda"
    sources, targets, texts = lengths[:3]
    total = total_steps(settings, len(sources))
    step = settings.batch_size * settings.accumulate
    epochs = Epochs(lengths.order, step=step, seed=settings.seed, grouped=settings.group_by_length)
    padder = _padder(job, model, here, joined=joined, always_mask=captures and cuda, fresh=fresh)
    copies = 2 if settings.twins else 1
    padder = twins(padder) if settings.twins else padder
    most_tokens = settings.max_tokens // copies
    rows, largest = -(-step // here.count), None
    if cuda:
        first = epochs[0]
        most = 1 if texts is None else max(int(texts.max()), 2)
        # Position ids of texts that share a prompt begin again, so such a row may be longer.
        positions = None if joined == "shared" else getattr(model.config, "max_position_embeddings", None)
        if fresh is None:
            axes = most_lengths(total if captures else 0)
            grid = fitted_grid(sources, targets, first, longest=positions, texts=most, joined=joined, most=axes)
        else:
            grid = fresh.grid(longest=positions, joined=joined)

        def loss(batch: Batch) -> Tensor:
            with autocast(), as_if_captured() if captures else nullcontext():
                value: Tensor = model(**batch).loss  # []
            return value

        if compiled:
            compiled = compiling.run_compiled(
                model, lambda: try_batch(model, loss, grid, padder, here.device), asked=settings.compile is True
            )
        # Of a single row, the compiler would make code of its own.
        fewest = 2 if compiled else 1
        limit = most_tokens or fitting_tokens(model, loss, grid, rows, padder, here.device, fewest=fewest)
        plan = Plan(sources, targets, rows, limit, grid, texts, joined)
        sizes, shown = plan.sizes(rows), first[:50]
        largest = padder([], sizes[0])
        micro = sum(len(plan.cut(piece[:: here.count])) for piece in shown) / len(shown)
        padding = "" if fresh is not None else f", with {plan.padding(shown):.0%} padding"
        logger.info(
            f"a step of {copies * len(first[0])} sequences is {'up to ' * (fresh is not None)}{micro:.3g} "
            f"micro-batch{'es' if micro != 1 else ''} of up to {copies * sizes[0].tokens:,} tokens, in {len(sizes)} "
            f"shapes{padding}."
        )
    else:
        each = -(-settings.batch_size // here.count)
        plan = Plan(sources, targets, rows if most_tokens else each, most_tokens or None, texts=texts, joined=joined)
    steps = PlannedSteps(
        job.examples if fresh is None else fresh,
        epochs,
        plan,
        padder,
        lengths=lengths,
        total=total,
        process=here.rank,
        processes=here.count,
        equally_many=settings.fsdp,
        copies=copies,
        pin=cuda,
    )
    return steps, largest


def _why_not_captured(settings: Train, device: torch.device) -> str:
    """Why steps cannot run as CUDA graphs; empty if they can."""
    if device.type != "cuda":
        return "there is no NVIDIA GPU"
    if not settings.capture:
        return "train.capture is off"
    if settings.fsdp:
        return "train.fsdp gathers parameters in the middle of a step"
    if settings.gradient_checkpointing:
        return "gradient checkpointing computes activations again in the backward pass"
    return ""


def _capture_remark(settings: Train, device: torch.device) -> str:
    """What to say if steps on a GPU should be captured and cannot be; otherwise it is empty."""
    wanted = settings.capture and device.type == "cuda"
    why = _why_not_captured(settings, device)
    return NOT_CAPTURED.format(why) if wanted and why else ""


def _compiles(job: Job, here: Processes, lengths: ExampleLengths, why_not_captured: str) -> bool:
    """Whether the layers are compiled. Decided by the whole training, so that a continued one does the same."""
    settings, seconds = job.settings, 0.0
    if len(lengths.sources) and not why_not_captured:
        rows = settings.batch_size * settings.accumulate * (2 if settings.twins else 1) / here.count
        steps = total_steps(settings, len(lengths.sources))
        seconds = compiling.seconds_saved(job.model, lengths, rows=rows, steps=steps)
    facts = {"why_not_captured": why_not_captured, "writes": job.own_texts is not None, "seconds": seconds}
    return compiling.decide(job.model, settings, here.device, **facts)


def _begin_thread(device: torch.device) -> Callable[[], object]:
    return (lambda: torch.cuda.set_device(device)) if device.type == "cuda" else bool


def seed_step(seed: int, step: int, rank: int) -> None:
    """Set the random numbers of a step: dropout is the same however often the training was stopped before.

    ``torch.manual_seed`` does the same, and 0.2 ms of work for devices that are not there.
    """
    number = (seed * 1_000_003 + step) * 4099 + rank
    if not torch.cuda.is_initialized() and torch.accelerator.is_available():  # such as MPS or XPU
        torch.manual_seed(number)
        return
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def scheduled_weights(loss_fn: JointLoss) -> dict[str, float]:
    """The weights of terms that change in the training, for the log."""
    weights = zip(loss_fn.parts, loss_fn.weights, strict=True)
    return {f"weight/{part.name}": weight for part, weight in weights if part.schedule is not None}


def _scaled_step(scaler: Any, optimiser: torch.optim.Optimizer) -> bool:
    """Update the weights, unless a gradient is infinite. Returns whether they were."""
    before = scaler.get_scale()
    scaler.step(optimiser)
    scaler.update()
    return bool(scaler.get_scale() >= before)


def raise_if_diverged(loss: float, step: int, log: Log, *, fp16: bool) -> None:
    """Stop a training whose loss is NaN or infinite before it is saved. fp16 tolerates two logs: the scale adjusts."""
    log.broken = 0 if math.isfinite(loss) else log.broken + 1
    if log.broken > (2 if fp16 else 0):
        raise Diverged(
            f"the loss became NaN or infinite at step {step}. Lower train.learning_rate, raise train.warmup_steps, or "
            "use bf16 instead of fp16; then start over with --fresh."
        )
