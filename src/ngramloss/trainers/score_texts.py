"""a few examples, and the evaluations of any Hugging Face trainer → scores of what the model writes, in its log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import TrainerCallback

from ngramloss.data import from_rows
from ngramloss.data.prompts import prompt_of
from ngramloss.data.tokens import Shape, prompt_ids
from ngramloss.errors import UserError
from ngramloss.metrics.registry import checked_options, notes_on_references, scores_on
from ngramloss.metrics.scores import Absent, corpus_score
from ngramloss.models.attached.callers import put_first
from ngramloss.models.attached.heads import adds_tokens, bare
from ngramloss.models.loading import is_causal
from ngramloss.output.console import logger
from ngramloss.recipe import AUTO, Data
from ngramloss.search import engines
from ngramloss.search.batches import Budget
from ngramloss.search.engines.hf import search_of
from ngramloss.search.search import Options
from ngramloss.search.writer import Writer
from ngramloss.trainers.log_parts import add_to_log
from ngramloss.training.best import metric_of
from ngramloss.training.validation import TRIED, from_first, texts_of_all, unchanged

LONGEST_SOURCE = 1024
ROUGE = ("rouge1", "rouge2", "rougeL")
ARGUMENT = 'options={"rouge": {"tokens": "auto"}}'


class ScoreTexts(TrainerCallback):
    """Generates a text for each of a few examples at each evaluation, and logs its scores: ``eval_rouge1`` and so on.

    For any Hugging Face or TRL trainer, and for decoder-only models and encoder-decoders. The scores are in the metrics
    of the evaluation too, so ``metric_for_best_model="rouge2"`` selects a checkpoint by one. The model's mode and the
    random numbers that training draws next stay as they are. Several processes share the texts; the first one scores
    them. What searches is the fastest engine that writes the texts of Hugging Face's ``generate``.

    Args:
        examples: rows in memory: a document and a summary, in the usual columns, ``prompt`` and ``completion``, or
            ``messages``, whose last answer is the reference.
        scores: names of scores; those that need a model of their own are refused.
        options: metric → its options, such as ``{"rouge": {"stemmer": False}}``.
        tokenizer: by default the trainer's ``processing_class``.
        prompt: for a decoder-only model and columns other than ``prompt`` and ``messages``: a template with
            ``{source}``, or ``"chat"``, as in ``data.prompt``. Use the one that the training rows were made with.
        max_source: the most tokens of a source or prompt; longer ones are cut. By default 1,024, or as many as leave a
            decoder-only model positions for the text.
        max_new_tokens: the most tokens of a text.
        num_beams: of the search, which does not sample.
        batch_size: texts at a time.

    Raises:
        UserError: rows or scores that cannot be used.

    Example:
        >>> from trl import SFTTrainer  # doctest: +SKIP
        >>> SFTTrainer(model, callbacks=[ng.ScoreTexts(validation.select(range(50)))], ...)  # doctest: +SKIP
    """

    def __init__(
        self,
        examples: Iterable[Mapping[str, Any]],
        *,
        scores: Sequence[str] = ROUGE,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        tokenizer: Any = None,
        prompt: str = "",
        max_source: int | None = None,
        max_new_tokens: int = 128,
        num_beams: int = 1,
        batch_size: int = 8,
    ) -> None:
        if isinstance(scores, str):
            raise TypeError(f"scores must be a list of names, such as [{scores!r}], got {scores!r}.")
        read = from_rows(examples)
        self.examples, self._column = read.examples, read.column
        self._metrics: dict[str, list[str]] = {}
        for name in scores:
            self._metrics.setdefault(metric_of(name, "scores"), []).append(name)
        if others := [name for name in options or {} if name not in self._metrics]:
            raise UserError(
                f"options: {others[0]} is not a metric of the scores. Choose from {', '.join(self._metrics)}."
            )
        self._options = {name: checked_options(name, (options or {}).get(name, {})) for name in self._metrics}
        self._tokenizer, self._batch_size = tokenizer, batch_size
        self._max_new_tokens, self._num_beams = max_new_tokens, num_beams
        self._prompt, self._max_source = prompt, max_source
        self._shape: Shape | None = None
        self._last = (-1, "")
        tried = self.examples[:TRIED]
        self._scores([example.target for example in tried], tried)  # a metric that cannot score them raises now
        for metric, chosen in self._options.items():
            for note in notes_on_references(metric, self.examples, chosen):
                logger.info(f"ScoreTexts: {note} Of ScoreTexts, options are an argument, such as {ARGUMENT}.")

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move before the reporting callbacks, and check that the model can read the examples."""
        put_first(self)
        if adds_tokens(kwargs["model"]):
            raise UserError("ScoreTexts cannot generate with virtual tokens (prompt tuning, prefix tuning). Use LoRA.")
        self._prepare(bare(kwargs["model"]), kwargs.get("processing_class"))

    on_train_begin = on_init_end  # which callbacks that were added later do not get

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the scores to the log of an evaluation; of several data sets, to that of the first."""
        prefix = next((key.removesuffix("_runtime") for key in logs if key.endswith("_runtime")), "train")
        step, scored = self._last
        if prefix == "train" or (step == state.global_step and scored != prefix):
            return
        self._last = (state.global_step, prefix)
        found = self._found(kwargs["model"], kwargs.get("processing_class"))
        add_to_log({f"{prefix}_{name}": value for name, value in found.items()}, logs, state)

    def _found(self, model: Any, tokenizer: Any) -> dict[str, float]:
        """The scores, and the seconds that they took."""
        began, inner = time.perf_counter(), bare(model)
        started = torch.distributed.is_initialized()
        process, processes = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if started else (0, 1)
        tokenizer, shape = self._prepare(inner, tokenizer)
        ids = prompt_ids([example.source for example in self.examples], tokenizer, shape)
        texts = texts_of_all(lambda mine: self._write(inner, tokenizer, shape, mine), ids, process, processes)
        scores = from_first(lambda: self._scores(texts, self.examples), process, processes)
        return {**scores, "scoring_seconds": time.perf_counter() - began}

    def _prepare(self, model: Any, tokenizer: Any) -> tuple[Any, Shape]:
        """The tokenizer, and how the examples become tokens of this model."""
        tokenizer = tokenizer if self._tokenizer is None else self._tokenizer
        if tokenizer is None:
            raise UserError("ScoreTexts needs a tokenizer: the trainer has none. Pass ScoreTexts(…, tokenizer=…).")
        if self._shape is None:
            causal = is_causal(model.config)
            if not causal and (self._prompt or self._column == "messages"):
                what = "prompt" if self._prompt else "messages"
                raise UserError(
                    f"ScoreTexts: `{what}` is for decoder-only models, and {type(model).__name__} is an "
                    "encoder-decoder. Give it texts as its encoder reads them, in the columns source and target."
                )
            prompt = None
            data = Data(name="", separator="none", prompt=self._prompt, max_source=self._longest_source(model, causal))
            if causal:
                named = model.generation_config.eos_token_id
                named = tokenizer.eos_token_id if named is None else named
                if named is None:
                    raise UserError("ScoreTexts: the model has no end token. Set generation_config.eos_token_id.")
                stops = list(named) if isinstance(named, list | tuple) else [int(named)]
                prompt = prompt_of(data, "summarisation", self._column, tokenizer, stops)
            self._shape = Shape.of(data, prompt)
        return tokenizer, self._shape

    def _longest_source(self, model: Any, causal: bool) -> int:
        """The most tokens of a source. A decoder-only model must have positions for the text, too."""
        positions = getattr(model.config, "max_position_embeddings", None)
        room = positions - self._max_new_tokens if causal and positions is not None else None
        asked = self._max_source or (LONGEST_SOURCE if room is None else min(LONGEST_SOURCE, max(room, 1)))
        if room is not None and asked > room:
            raise UserError(
                f"ScoreTexts: prompts of {asked} tokens (max_source) and texts of {self._max_new_tokens} "
                f"(max_new_tokens) do not fit into the {positions} positions of the model. Lower one of them."
            )
        return asked

    def _write(self, model: Any, tokenizer: Any, shape: Shape, ids: Sequence[Sequence[int]]) -> list[str]:
        """A text for each source."""
        changes: dict[str, Any] = {"max_new_tokens": self._max_new_tokens, "max_length": None}
        if shape.prompt is not None:
            changes["eos_token_id"] = shape.prompt.eos_token_id
        with unchanged(model):
            search = search_of(model, None, Options(beams=self._num_beams), **changes)
            engine = engines.load_in_training(AUTO, model, search)
            writer = Writer(model, tokenizer, shape, search, engine, Budget(documents=self._batch_size))
            return writer.best(ids, what="scoring texts", unit="texts")

    def _scores(self, texts: Sequence[str], examples: Sequence[Any]) -> dict[str, float]:
        found: dict[str, float] = {}
        for metric, names in self._metrics.items():
            try:
                scores = scores_on(metric, examples, texts, self._options[metric])
            except Absent as reason:
                raise UserError(f"scores: {reason}") from None
            found |= {name: corpus_score(scores, name) for name in names}
        return found
