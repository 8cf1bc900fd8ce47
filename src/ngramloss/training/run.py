"""a recipe → ``Run``: what it asks for, with every rule about its settings checked once; needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ngramloss import recipe
from ngramloss.data.data_sets import has_several_sentences
from ngramloss.errors import UserError
from ngramloss.loss.terms.parser import parse
from ngramloss.loss.terms.registry import START
from ngramloss.loss.terms.term import Term
from ngramloss.output.console import logger
from ngramloss.recipe import LAST, Online, Recipe, Train
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training.best import Best, best_of, has_own_model, options_of, selecting_terms
from ngramloss.training.precision import precision_of

if TYPE_CHECKING:
    import torch

    from ngramloss.data import Split
    from ngramloss.data.tokens import Shape
    from ngramloss.metrics.candidate_scores import CandidateMetric
    from ngramloss.training.online import OwnTexts

METRIC = "online.metric"
ON_POLICY = ("policy", "credit")  # Terms whose gradient is right only if texts are drawn from the model as it is


class Needs(NamedTuple):
    """Which texts of the model an objective reads: samples to compare, the greedy text first, its score."""

    samples: bool
    greedy_text: bool
    baseline: bool


def own_needs(terms: Sequence[Term]) -> Needs:
    """Which texts of the model the terms of an objective read."""
    needs = [term.needs for term in terms]
    return Needs(
        any(term.reads == "candidates" and "greedy" not in term.needs for term in terms),
        any("greedy" in own for own in needs),
        any("baseline" in own for own in needs),
    )


@dataclass(frozen=True)
class Run:
    """What a training is asked for.

    Attributes:
        settings: the recipe; with whole paths, if the run's folder is known.
        best: what selects the weights that become the model.
        writes: which texts the model writes while it is trained; None if it writes none.
        online_metric: scores them; None if it writes none, or if a function in Python scores them.
        system: what is trained instead of a model that writes texts: its name, entry, options and a plugin's code.
    """

    settings: Recipe
    terms: tuple[Term, ...]
    best: Best
    writes: Needs | None = None
    online_metric: CandidateMetric | None = None
    system: Any = None

    def names(self, what: str) -> list[str]:
        """The terms that require ``candidates``, ``twins`` or a ``teacher``, or read a statistic: ``lm_logp``."""
        return [name for term in self.terms if what in {*term.requires, *term.needs} for name in term.names]

    @property
    def compares_with_start(self) -> bool:
        """Whether the teacher is the model itself before training."""
        return any(term.name == START for term in self.terms)

    @property
    def loads_teacher(self) -> bool:
        """Whether a term compares with another model."""
        return bool(self.names("teacher")) and not self.compares_with_start

    @property
    def reads_candidates(self) -> bool:
        """Whether a term compares candidates that were written before."""
        return bool(self.names("candidates")) and self.writes is None

    def read_splits(self) -> dict[str, Split]:
        """The training split and, if there are validations, the validation split."""
        from ngramloss.training.prepare import read_splits

        return read_splits(self.settings)

    def tokenizer(self, train: Any) -> Any:
        """The tokenizer of the model; one from scratch is trained on these examples, the training split."""
        from ngramloss.training.prepare import tokenizer_for

        return tokenizer_for(self, train)[0]

    def shape(self, config: Any, tokenizer: Any, split: Split) -> Shape:
        """How the texts of a split become tokens of the model with this configuration."""
        from ngramloss.models.prompts import shape_of

        settings = self.settings
        return shape_of(settings.data, settings.task, settings.model, config, tokenizer, column=split.column)

    def prepare(self, model: Any, tokenizer: Any) -> None:
        """Give an encoder-decoder the languages, the first token and the generation settings of the recipe."""
        from ngramloss.models import first_tokens, languages, loading

        data, name = self.settings.data, self.settings.model.name
        languages.set_languages(tokenizer, data.source_language, data.target_language, model=name)
        first_tokens.align_start(model, tokenizer, name=name, training=True)
        loading.prepare_generation(model, self.settings.generation)

    def on(self, processes: int, device: torch.device) -> str:
        """The precision in which this number of processes trains on this device. Raises if they cannot."""
        from ngramloss.training.sharding import raise_unless_shardable

        train = self.settings.train
        sizes = {"train.batch_size": train.batch_size, "train.eval_batch_size": train.eval_batch_size}
        for key, rows in sizes.items():
            if rows % processes:
                raise UserError(
                    f"{key} counts rows over all processes: {rows} cannot be divided by {processes} processes."
                )
        precision = precision_of(train, device)
        if train.fsdp:
            raise_unless_shardable(processes, precision)
        return precision


def run_of(settings: Recipe) -> Run:
    """What a recipe of a model asks for. Raises if its settings contradict each other or name what is not there."""
    run = _checked(settings)
    return run if run.writes is None else replace(run, online_metric=_online_metric(settings))


def python_run(objective: str, train: Train, own: OwnTexts | None = None) -> Run:
    """The same of a training in Python, which has its data, its models and its scores as objects."""
    terms = [*selecting_terms(parse(objective)), LAST]
    if train.best not in terms:
        raise UserError(
            f"train.best: {train.best!r} is not a term of {objective!r}. Choose one of {', '.join(terms)}. Scores of "
            "generated texts select checkpoints in ngramloss train."
        )
    given = Recipe("python", objective, train=train)
    if own is not None:
        given = replace(given, online=own.settings, generation=own.generation)
    run = _checked(recipe.changed(given, ()))
    if own is not None and run.writes is None:
        raise UserError(f"own_texts: {objective!r} with {own.settings.samples} samples reads no outputs. Leave it out.")
    return run


def _checked(settings: Recipe) -> Run:
    terms, train, online = tuple(parse(settings.objective)), settings.train, settings.online
    needs = own_needs(terms)
    writes = needs if needs.greedy_text or (needs.samples and online.samples) else None
    run = Run(settings, terms, best_of(settings), writes)
    if needs.baseline and writes is None:
        raise UserError(
            "policy(baseline=greedy) needs the model's greedy text, which a file of candidates lacks. Generate "
            "during training with online.samples, or use the baseline mean or others."
        )
    if writes and needs.samples and not online.samples:  # they would learn nothing
        name = next(term.names[0] for term in terms if term.reads == "candidates" and "greedy" not in term.needs)
        raise UserError(
            f"{name} compares samples of the model, but online.samples is 0, so only the greedy text is generated. "
            f"Set online.samples=4, or leave {name} out. A file of candidates is not read beside terms of own texts."
        )
    if writes and train.fsdp:
        raise UserError(
            "train.fsdp shards the weights, so the model cannot generate during training (online.samples). Leave one "
            "of them out, or make candidates before, with ngramloss candidates."
        )
    if run.compares_with_start and train.teacher:
        raise UserError(
            "train.teacher: keep compares the model with its own start, so there is no other teacher. Leave "
            "train.teacher out, or write distill instead of keep."
        )
    if (twins := run.names("twins")) and not train.twins:
        raise UserError(
            f"{twins[0]} compares each row with its twin, the same example with another dropout, and train.twins is "
            "off. Set train.twins=true: every example is then in a step twice, which about doubles its time."
        )
    return run


def _online_metric(settings: Recipe) -> CandidateMetric:
    """What scores the texts. Raises if higher is not better, or if it needs a model of its own."""
    from ngramloss.metrics import candidate_scores

    name = settings.online.metric or candidate_scores.BY_TASK[settings.task]
    metric = candidate_scores.metric_of(name, METRIC)
    if has_own_model(metric):
        raise UserError(
            f"{METRIC}: {name} needs a model or a file of its own, which is not loaded beside the model in training. "
            "Use rouge, bleu, chrf, one of their scores, or a metric of a plugin without such an option."
        )
    options = options_of(metric, settings.online.metric_options, "online.metric_options")
    lines = settings.data.language if has_several_sentences(settings.data.name) else None
    return candidate_scores.candidate_metric(name, options, lines=lines, key=METRIC)


# What a recipe names besides


def in_folder(run: Run, folder: RunFolder) -> Run:
    """The run with whole paths of what it reads, which must be named and outside its folder. Logs what is not used."""
    settings, objective = run.settings, run.settings.objective
    data, train = settings.data, settings.train
    candidates, readers, compared = run.names("candidates"), run.names("lm_logp"), run.names("teacher")
    _note_own_texts(run)
    if run.reads_candidates and not data.candidates:
        raise UserError(
            f"{candidates[0]} compares candidates, but data.candidates is empty. Make candidates of the training "
            "split with ngramloss candidates, then name the file or its folder: --set data.candidates=FOLDER. Or "
            "generate them during training: --set online.samples=4."
        ).on_page("candidates")
    if readers and not data.language_model:
        raise UserError(
            f"{readers[0]} reads a language model of the targets alone, but data.language_model is empty. Train one, "
            "such as with ngramloss train lm, and name its run: --set data.language_model=FOLDER."
        )
    if run.loads_teacher and not train.teacher:
        raise UserError(
            f"{compared[0]} compares the model with a teacher, but train.teacher is empty. Name the folder of a model "
            "with the same tokenizer, or a run: --set train.teacher=FOLDER."
        )
    if data.candidates and not run.reads_candidates:  # the greedy text of the model alone may be
        logger.info(f"data.candidates is not used: no term of {objective!r} compares candidates.")
    if data.language_model and not readers:
        logger.info(f"data.language_model is not used: no term of {objective!r} reads one.")
    if train.teacher and not compared:
        logger.info(f"train.teacher is not used: no term of {objective!r} compares with a teacher.")
    data = replace(
        data,
        candidates=_whole(data.candidates, "data.candidates", folder),
        language_model=_model_folder(data.language_model, "data.language_model", folder),
    )
    train = replace(train, teacher=_model_folder(train.teacher, "train.teacher", folder))
    return replace(run, settings=replace(settings, data=data, train=train))


def _whole(name: str, key: str, folder: RunFolder) -> str:
    """The whole path of what a setting names, or nothing. Raises if it is inside the run itself."""
    path = Path(name).expanduser().resolve()
    if name and path.is_relative_to(folder.path.resolve()):
        raise UserError(
            f"{key} is in the run's own folder {folder.path}, where --fresh would delete it. Choose another --run."
        )
    return str(path) if name else ""


def _model_folder(name: str, key: str, folder: RunFolder) -> str:
    """The whole path of a model besides the trained one, or of a run's model; the name of one on the hub as it is."""
    path = Path(name).expanduser()
    if not name or not path.exists():
        return name
    return _whole(str(RunFolder(path).model if RunFolder(path).recipe.is_file() else path), key, folder)


# Warnings


def _note_own_texts(run: Run) -> None:
    """Say which settings of texts that the model writes nothing reads, and which texts a term should not have."""
    online = run.settings.online
    if online.samples and not own_needs(run.terms).samples:  # such as the baseline of a study
        logger.info(f"online.samples is not used: no term of {run.settings.objective!r} compares candidates.")
    changed = [key for key, value in asdict(online).items() if value != getattr(Online(), key)]
    if run.writes is not None:
        warn_unless_exact(run)
    elif changed and not online.samples:  # no error: a study may set them for all of its rows
        logger.info(
            f"the section online ({', '.join(changed)}) is not used: online.samples is 0, so nothing is generated."
        )
    if run.reads_candidates and run.settings.data.candidates:
        warn_of_others(run.terms, "a file's candidates come from an older one. Set online.samples")


def warn_unless_exact(run: Run) -> None:
    """Warn if a term needs samples of the model as it is, and the settings ask for other texts."""
    online = run.settings.online
    if (online.temperature, online.top_p) != (1.0, 1.0):
        warn_of_others(
            run.terms,
            f"online.temperature = {online.temperature:g} and online.top_p = {online.top_p:g} change the "
            "distribution. Leave both at 1",
        )


def warn_of_others(terms: Sequence[Term], why: str) -> bool:
    """Warn if a term needs samples of the model as it is: ``why`` says which there are. Returns whether one does."""
    exact = [term.name for term in terms if term.name in ON_POLICY]
    if exact:
        logger.warning(f"{exact[0]} is exact only for samples of the current model, but {why}.")
    return bool(exact)
