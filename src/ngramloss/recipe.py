"""a recipe's name or TOML file, and overrides → every setting of a run, typed and checked."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import MissingFileError, UserError
from ngramloss.output import escape
from ngramloss.plugins import REINSTALL, LazyFunction, installed_points
from ngramloss.settings import Setting, Switch, closest, part_of, setting, settings_of, toml_value
from ngramloss.storage.files import parse_toml
from ngramloss.storage.run_folder import RunFolder

SOURCE, CHAT = "{source}", "chat"  # In ``data.prompt``: where the source is put, and the tokenizer's chat template
AUTO = "auto"  # As ``generation.engine``: the fastest engine whose texts are those of ``hf``
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Values of ``generation.precision``, and what torch calls them."""
NO_SOURCE = "none"
"""The value of ``data.prompt`` with which a decoder-only model reads no source: a language model of the targets."""
ARCHITECTURES = ("bart", "mbart", "m2m100", "pegasus", "marian", "t5", "prophetnet", "llama")
"""What a model from scratch may be; llama is decoder-only."""
LAST = "last"  # The value of ``train.best`` with which the last weights become the model
NOT_SHARDED = "train.fsdp does not shard adapters. Leave it out, or set model.lora = 0."


@dataclass(frozen=True)
class Data:
    """The data set, and how it becomes tokens."""

    name: str = setting("newswire", "documents place")
    """A built-in or known data set, a hub id, a file, a folder with one file per split, or
    ``train=a.jsonl,validation=b.jsonl``."""
    source: str = setting("", "documents")
    """The column with the documents; empty: detect it."""
    target: str = setting("", "documents")
    """The column with the summaries; empty: detect it. Several, with commas, are several references."""
    id: str = setting("", "documents")
    """The column with the ids; empty: detect it; ``none``: number the rows."""
    source_language: str = setting("", "documents")
    """The language of the sources, for a multilingual model, as its tokenizer spells it: ``en_XX`` for mBART,
    ``eng_Latn`` for NLLB, ``en`` for M2M100."""
    target_language: str = setting("", "documents")
    """The same for the targets."""
    validation_fraction: float = setting(0.0, "documents", least=0, below=1)
    """If the data have no validation split: the part of the training split that is held out for validation, chosen by
    the ids, so that the same rows are held out every time."""
    test_fraction: float = setting(0.0, "documents", least=0, below=1)
    """The same for the test split. It shares no row with the validation split."""
    leave_out: str = setting("", "rows")
    """A part of the training rows that is not trained on: ``1/2`` is the first of two. The ids decide which rows these
    are. ``ngramloss candidates`` writes texts of them, which the model has not seen; ``limit`` counts them."""
    separator: str = setting("auto", "tokens")
    """The token before every source sentence: ``auto`` (the tokenizer's separator), ``none``, or one such as <s>."""
    splitter: str = setting("sentencex", "sentences tokens", choices=("sentencex", "pysbd", "newline", "period"))
    """How sources are split into sentences, for the separator."""
    language: str = setting("auto", "sentences tokens")
    """The language of the texts, for the splitter, such as de; ``auto`` chooses by script, and English for Latin
    letters."""
    prefix: str = setting("", "tokens")
    """Text before every source, such as ``summarize: `` for T5."""
    prompt: str = setting("", "tokens", systems=False)
    """What a decoder-only model reads: a template with ``{source}``, ``chat`` for the tokenizer's chat template, or
    ``none`` for nothing, which makes it a language model of the targets alone;
    empty: the source and ``Summary:`` or ``Translation:``, or a column ``prompt`` or ``messages`` as it is."""
    instruction: str = setting("", "tokens", systems=False)
    """Text before the source in the message of a user, for ``prompt = "chat"``."""
    max_source: int = setting(1024, "tokens", least=4)
    max_target: int = setting(128, "tokens", least=2)
    limit: int = setting(0, "rows", least=0)
    """The most training examples; 0 uses all. The built-in corpus can generate more than its default number."""
    validation_limit: int = setting(0, "rows", least=0)
    candidates: str = setting("", "weights place")
    """A file of candidates of the training examples, or a folder with one, as ``ngramloss candidates`` writes it. Terms
    that compare candidates, such as ``rank``, need it."""
    language_model: str = setting("", "weights place", systems=False)
    """A language model of the targets alone, which ``margin`` reads: a run of ``ngramloss train lm``, or any
    decoder-only model with the tokenizer of the model that is trained, by its folder or hub id."""
    weights: str = setting("", "weights", systems=False)
    """The column with weights of the targets' tokens: a list of numbers, one for each word or one for each token of the
    target. Of ``messages``, the key of each message with the weight of an answer. Empty: all tokens weigh 1."""
    on_bad_row: str = setting("error", "documents", choices=("error", "skip"))


@dataclass(frozen=True)
class Model:
    """The model to train. All fields from ``architecture`` to ``copying`` apply only to ``name = "scratch"``."""

    name: str = setting("facebook/bart-base", "tokens weights place")
    """A hub id, a folder, or ``scratch`` for a new model with a tokenizer trained on the corpus."""
    revision: str = setting("main", "tokens weights")
    encoder: str = setting("", "tokens weights place", systems=False)
    """Only for ``name = "scratch"``: a pretrained encoder, by its hub id or folder, such as ``model/`` of a run of
    bertsum_ext. The decoder is new, a BERT as wide as the encoder, with the encoder's tokenizer; ``decoder_layers``,
    ``heads``, ``feed_forward``, ``dropout`` and ``init_std`` are its."""
    tokenizer: str = setting("", "tokens place", systems=False)
    """Only for ``name = "scratch"``: take the tokenizer of this model, by its hub id or folder, instead of one that is
    trained on the corpus with ``vocabulary`` tokens."""
    architecture: str = setting("bart", "weights", choices=ARCHITECTURES)
    width: int = setting(256, "weights", least=4, most=2**16)
    encoder_layers: int = setting(3, "weights", least=1, most=2**10)
    decoder_layers: int = setting(3, "weights", least=1, most=2**10)
    heads: int = setting(4, "weights", least=1, most=2**12)
    feed_forward: int = setting(1024, "weights", least=1, most=2**20)
    dropout: float = setting(0.1, "weights", least=0, below=1)
    vocabulary: int = setting(8000, "tokens weights", least=300, most=2**24)
    init_std: float = setting(0.02, "weights", least=0)
    copying: bool = setting(False, "weights")
    """Make copying easy to learn: the value and output projections of cross-attention start as the identity, positions
    as sinusoids. All of them are trained."""
    lora: int = setting(0, "weights", least=0, most=2**16, systems=False)
    """The rank of LoRA adapters, which are trained instead of the model; 0: train the model itself."""
    lora_alpha: float = setting(0.0, "weights", least=0)
    """The adapters' product is multiplied by ``lora_alpha`` / ``lora``; 0 is twice the rank."""
    lora_dropout: float = setting(0.0, "weights", least=0, below=1)
    lora_targets: list[str] = setting(["all-linear"], "weights")
    """The names of the layers that get an adapter; ``all-linear`` is every linear layer except the output head."""


@dataclass(frozen=True)
class Train:
    """How to train the model."""

    epochs: float = setting(10.0, "length", least=0, most=10**9)
    max_steps: int = setting(0, "length", least=0)
    """Optimiser steps; 0 trains for ``epochs``."""
    batch_size: int = setting(16, "weights", least=1)
    """Sequences in a batch, all processes together; an optimiser step has ``batch_size`` × ``accumulate``."""
    accumulate: int = setting(2, "weights", least=1)
    max_tokens: int = setting(0, "speed", least=0)
    """The most tokens of a micro-batch in each process, padding included: a step is cut into as many micro-batches as
    that takes, which does not change it. 0: as many as the GPU's memory allows; on a CPU, ``batch_size`` sequences."""
    learning_rate: float = setting(3e-5, "weights", least=0)
    encoder_learning_rate: float = setting(0.0, "weights", least=0, systems=False)
    """The learning rate of the encoder, if it is another one; 0: the same. Weights that the decoder shares have the
    decoder's."""
    warmup_steps: float = setting(1000.0, "weights", least=0)
    """Steps in which the learning rate rises; below 1 a share of all steps, as in Transformers."""
    encoder_warmup_steps: float = setting(0.0, "weights", least=0, systems=False)
    """The same for ``encoder_learning_rate``; 0: the same as ``warmup_steps``."""
    schedule: str = setting("linear", "weights", choices=LazyFunction("ngramloss.training.learning_rates:names"))
    """``noam`` is ``learning_rate`` · min(t^-½, t · ``warmup_steps``^-1.5) at step t, in a training of any length; with
    the others ``learning_rate`` is the largest rate."""
    weight_decay: float = setting(0.01, "weights", least=0)
    beta1: float = setting(0.9, "weights", least=0, below=1)
    beta2: float = setting(0.999, "weights", least=0, below=1)
    epsilon: float = setting(1e-8, "weights", least=0)
    clip: float = setting(1.0, "weights", least=0)
    """The largest gradient norm; 0 disables clipping."""
    precision: str = setting("auto", "weights", choices=("auto", "bf16", "fp16", "fp32"))
    """``bf16``, ``fp16`` or ``fp32``; ``auto`` is bf16 on a GPU that supports it, fp16 on other GPUs, fp32 on a CPU."""
    log_every: int = setting(100, "speed", least=1)
    eval_every: int = setting(1000, "length", least=0)
    """Steps between validations; 0 disables validation."""
    save_every: int = setting(1000, "length", least=1)
    keep: int = setting(2, "speed", least=1)
    """The number of newest checkpoints to keep, besides the best."""
    ema: float = setting(0.0, "weights", least=0, below=1)
    """Also keep an exponential moving average of the weights with this decay, such as 0.999. It becomes the model if
    ``best`` finds it better, or if nothing is validated; 0 keeps none."""
    best: str = setting("ce", "scores")
    """What selects the checkpoint that becomes the model: the lowest validation value of a term (``loss`` is the whole
    objective), the best score of texts generated for the validation split, such as ``rouge2`` or ``bleu``, or nothing:
    ``last`` takes the last weights."""
    best_limit: int = setting(0, "scores", least=0, systems=False)
    """For a score: generate texts for only this many validation examples, from the first on; 0 means all."""
    best_beams: int = setting(1, "scores", least=1, most=2**12, systems=False)
    """For a score: the number of beams, instead of ``generation.num_beams``."""
    best_options: list[str] = setting([], "scores", systems=False)
    """For a score: options of its metric, such as ``["rouge.tokens=auto"]``."""
    early_stopping: int = setting(0, "length", least=0)
    """Stop after this many validations without a new best; 0 disables early stopping."""
    eval_batch_size: int = setting(0, "speed", least=0)
    """Sequences in a validation batch, all processes together; 0 uses ``batch_size``."""
    group_by_length: bool = setting(True, "weights")
    gradient_checkpointing: bool = setting(False, "speed", systems=False)
    capture: bool = setting(True, "speed")
    """On a GPU: run forward and backward as one CUDA graph for each shape of a micro-batch. Where that cannot be done,
    training says why and runs without."""
    compile: bool | str = setting(Switch.AUTO, "speed", kind=Switch, systems=False)
    """Compile the layers with torch.compile: slower to start, faster steps, less memory. ``auto`` does so
    where steps are captured on a GPU and the training is long enough to earn the time back."""
    twins: bool = setting(False, "weights", systems=False)
    """Put every example into the step twice, as neighbours, each with its own dropout: for ``rdrop``, ``rewards:twin``
    and ``gated:twin``. ``batch_size`` counts it once, all denominators count both."""
    teacher: str = setting("", "weights place", systems=False)
    """For ``distill``: the folder or hub id of another model with the same tokenizer, or a run. ``keep`` needs none: it
    compares with the model before training."""
    fsdp: bool = setting(False, "speed", systems=False)
    """Shard parameters and optimiser over the processes of torchrun."""
    memory: str = setting("fast", "speed", choices=("fast", "lean"), systems=False)
    """``fast`` stores the head's logits, ``lean`` recomputes them; see docs/performance.md."""
    seed: int = setting(42, "weights", least=0)
    report_to: list[str] = setting([], "speed", choices=("mlflow", "tensorboard", "wandb"))


@dataclass(frozen=True)
class Generation:
    """How to generate texts; saved with the model as its ``generation_config``."""

    num_beams: int = setting(4, "texts", least=1, most=2**12)
    length_penalty: float = setting(1.0, "texts")
    min_length: int = setting(0, "texts", least=0)
    max_length: int = setting(128, "texts", least=1)
    no_repeat_ngram_size: int = setting(0, "texts", least=0)
    early_stopping: bool = setting(True, "texts")
    renormalize: bool = setting(False, "texts")
    """Make the probabilities of the tokens that a minimum length and repeated n-grams leave sum to 1. Published results
    are without it. It lets ``ctranslate2`` write the same texts as ``hf``."""
    engine: str = setting(AUTO, "texts speed", choices=LazyFunction("ngramloss.search.registry:engine_choices"))
    """What ``ngramloss generate`` searches with; ``auto`` is the fastest engine whose texts are those of ``hf``."""
    precision: str = setting("fp32", "texts speed", choices=tuple(PRECISIONS))
    """Of the weights with which ``ngramloss generate`` computes. 16 bits are faster on a GPU; texts differ slightly."""
    drafter: str = setting("", "speed")
    """A run of ``ngramloss train drafter`` for the model, which the engine ``draft`` needs."""


@dataclass(frozen=True)
class Online:
    """Texts that the model writes while it is trained, for terms that compare candidates; see docs/candidates.md."""

    samples: int = setting(0, "weights", least=0, most=2**10)
    """Texts of each source that the model writes with its present weights; 0 writes none."""
    refresh: int = setting(1, "weights", least=1)
    """Write for the sources of this many steps at a time. Above 1, steps train on texts of weights that are up to
    ``refresh`` − 1 steps old."""
    temperature: float = setting(1.0, "weights", above=0)
    """Of the samples: below 1, probable tokens become more probable."""
    top_p: float = setting(1.0, "weights", above=0, most=1)
    """Sample only from the most probable tokens whose probabilities sum to this."""
    metric: str = setting("", "weights")
    """What scores a text: a metric or one of its scores, such as ``rouge``, ``rouge2``, ``bleu``, ``chrf`` or one of a
    plugin; empty: ``rouge``, for translations ``bleu``."""
    metric_options: list[str] = setting([], "weights")
    """Options of the metric, such as ``["rouge.tokens=auto"]``."""


class Words(NamedTuple):
    """What messages and the page call the texts of a task."""

    text: str
    texts: str
    source: str
    sources: str


WORDS = {
    "summarisation": Words("summary", "summaries", "document", "documents"),
    "translation": Words("translation", "translations", "source", "sources"),
}
TASKS = tuple(WORDS)
"""The task decides which columns are found first, which metrics come first, and what the texts are called."""


@dataclass(frozen=True)
class Recipe:
    """All settings of a run."""

    name: str
    objective: str = setting("ce", "weights")
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    generation: Generation = field(default_factory=Generation)
    online: Online = field(default_factory=Online)
    task: str = setting(TASKS[0], "documents tokens", choices=TASKS)
    """What the targets are, such as summaries: one of ``TASKS``."""
    system: str = setting("", "weights")
    """What is trained instead of a model that writes texts: a system and its options, such as ``simcls(margin=0.01)``;
    ``ngramloss list systems`` lists them."""

    @property
    def slug(self) -> str:
        """The run's name: the recipe's name and a short form of the objective, different for every objective.

        A system adds its options, if there are any, and most have an objective of their own.

        A first term ``ce`` is omitted if others follow; ``only`` means that there is no cross-entropy.

        >>> Recipe("xsum", objective="ce + matches(2,3,4)").slug
        'xsum-matches234'
        >>> Recipe("xsum", objective="ce + 0.5*rewards(2) + bag(2):original").slug
        'xsum-0.5rewards2-bag2original'
        >>> Recipe("xsum", objective="matches(2,10)").slug
        'xsum-only-matches_2_10'
        >>> Recipe("simcls", system="simcls(margin=0.02)").slug
        'simcls-margin0.02'
        >>> Recipe("pointer", system="pointer", objective="ce + matches(2)").slug
        'pointer-matches2'
        """
        options = [option.replace("=", "") for option in re.findall(r"[\w.=-]+", self.system)[1:]]
        first, *others = self.objective.split(" + ")
        terms = others if first == "ce" and (others or self.system) else [first, *others]
        alone = [] if re.search(r"\bce\b", self.objective) else ["only"]
        for index, term in enumerate(terms):
            joint = "" if re.search(r"\((\d,)*\d\)", term) else "_"  # (2,3) is 23, but (2,13) is _2_13 and (23) is _23
            terms[index] = re.sub(r"[^\w.+-]", "", re.sub(r"[(,]", joint, term))
        return "-".join([self.name, *options, *alone, *terms])


TOP = {own.name: own.metadata["setting"] for own in dataclasses.fields(Recipe) if own.metadata}
"""The settings outside sections."""
SECTIONS: dict[str, type] = {"data": Data, "model": Model, "train": Train, "generation": Generation, "online": Online}


@cache
def _files() -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for package in (*(point.value for point in installed_points("recipes")), "ngramloss.recipes"):
        with suppress(ImportError):  # of a broken package
            found |= {entry.name.removesuffix(".toml"): entry for entry in files(package).iterdir()}
    return {name: file for name, file in sorted(found.items()) if file.name.endswith(".toml")}


def builtin() -> list[str]:
    """The names of the recipes that come with ngramloss and other installed packages."""
    return [*_files()]


def about(name: str) -> str:
    """The first sentence of the comment at the top of a built-in recipe."""
    lines = _files()[name].read_text(encoding="utf-8").splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    return re.split(r"(?<=\.)(?<!et al\.)\s", text)[0]


def load(name: str, overrides: Sequence[str] = (), *, objective: bool = True) -> Recipe:
    """Load a recipe by name or from a file, and apply ``key=value`` overrides.

    A file may begin with ``base = "xsum"`` and contain only what differs. All mistakes are reported at once. Without
    ``objective`` it is not checked: a run can be read without the plugin that defines its objective.
    """
    settings = _read(name, ())
    for override in overrides:
        _override(settings, override)
    own = Path(name).name.removesuffix(".toml")
    return _build_recipe(own, settings, name, objective=objective, overridden=bool(overrides))


def changed(recipe: Recipe, overrides: Sequence[str], *, objective: bool = True) -> Recipe:
    """The recipe with ``key=value`` overrides; ``objective`` as in :func:`load`."""
    settings = dataclasses.asdict(recipe)
    del settings["name"]
    for override in overrides:
        _override(settings, override)
    return _build_recipe(recipe.name, settings, objective=objective)


def dump(recipe: Recipe) -> str:
    """The recipe as TOML that :func:`load` reads back."""
    lines = [f"{key} = {_toml(getattr(recipe, key))}" for key in TOP]
    for section in SECTIONS:
        values = dataclasses.asdict(getattr(recipe, section))
        lines += ["", f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def trained_by(folder: str) -> str:
    """The command that trains the run of a built-in recipe, if this is its folder or its model's; or an empty string.

    >>> trained_by("runs/lm-demo-ce/model"), trained_by("runs/bertsum-ext-demo/model")
    ('ngramloss train lm-demo', 'ngramloss train bertsum-ext-demo --run runs/bertsum-ext-demo')
    """
    parts = Path(folder).parts
    if len(parts) < 2 or parts[0] != "runs":
        return ""
    if parts[1] in builtin():
        return f"ngramloss train {parts[1]} --run runs/{parts[1]}"
    return next((f"ngramloss train {name}" for name in builtin() if load(name).slug == parts[1]), "")


def differences(recipe: Recipe, other: Recipe) -> list[str]:
    """The settings in which two recipes differ, as ``train.seed: 1 → 2``."""
    pairs = zip(flat(recipe), flat(other), strict=True)
    return [f"{key}: {before!r} → {after!r}" for (key, before), (_, after) in pairs if before != after]


def changed_settings(saved: Recipe, now: Recipe) -> dict[str, tuple[Any, Any]]:
    """The settings that keep a run from being continued: name → before and now. Speed may differ."""
    before, known, speed, changed = dict(flat(saved)), every_setting(), only_speed(), {}
    for key, value in flat(now):
        if value != before[key] and key not in speed:
            path = Path(value).expanduser() if value and "place" in known[key].affects else None
            # The whole path of what a recipe names, which may be a run that has it.
            if not path or before[key] not in (str(path.resolve()), str(RunFolder(path).model.resolve())):
                changed[key] = before[key], value
    return changed


def affecting(*effects: str, section: str = "") -> tuple[str, ...]:
    """The settings that affect one of these; of a section, their names in it."""
    found = [key for key, described in every_setting().items() if described.affects & {*effects}]
    prefix = f"{section}." * bool(section)
    return tuple(key.removeprefix(prefix) for key in found if key.startswith(prefix))


def only_speed() -> frozenset[str]:
    """The settings that change no result, but for rounding and dropout."""
    return frozenset(key for key, described in every_setting().items() if described.affects == {"speed"})


def flat(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Every setting as key and value, such as ``train.seed`` and 42."""
    yield from ((key, getattr(recipe, key)) for key in TOP)
    for section in SECTIONS:
        for key, value in dataclasses.asdict(getattr(recipe, section)).items():
            yield f"{section}.{key}", value


def _read(name: str, above: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a recipe, merged over those of its bases. ``above`` are files based on it, the closest last."""
    path = Path(name)
    if name in builtin():
        content, where = _files()[name].read_bytes(), f"recipe {name}"
    elif path.is_file():
        content, where = path.read_bytes(), name
    else:
        close = difflib.get_close_matches(name, builtin(), 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        asked = f", the base of {above[-1]}" if above else ""
        again = "" if installed_points("recipes") else f" {REINSTALL}"
        known = ", ".join(builtin())
        raise MissingFileError(f"there is no recipe {name!r}{asked}: neither a file nor one of {known}.{hint}{again}")
    settings = parse_toml(content, where)
    _refuse_consent(settings, where if name in builtin() else f"recipe {where}")
    base = settings.pop("base", None)
    if base is None:
        return settings
    if not isinstance(base, str) or not base:
        raise UserError(f"{where}: base must be the name of another recipe, got {base!r}.")
    if base not in builtin() and (path.parent / base).is_file():
        base = str(path.parent / base)  # in the folder of the file that names it
    chain = (*above, where)
    if Path(base).resolve() in [Path(file).resolve() for file in chain]:
        raise UserError(f"{where}: recipes are based on each other in a circle: {' → '.join([*chain, base])}.")
    return _merge(_read(base, chain), settings)


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    tables = [key for key, value in above.items() if isinstance(value, dict) and isinstance(below.get(key), dict)]
    return {**below, **above, **{key: _merge(below[key], above[key]) for key in tables}}


def _override(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals:
        raise UserError(f"--set takes key=value, got {override!r}; for example --set train.batch_size=8.")
    described = every_setting().get(key.strip())
    value = described.read(text) if described else toml_value(text.strip())
    *sections, last = key.strip().split(".")
    table = settings
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {section} is a setting, not a section.")
    table[last] = value
    _refuse_consent(settings, "--set")


def _refuse_consent(settings: dict[str, Any], where: str) -> None:
    model = settings.get("model")
    if isinstance(model, dict) and model.get("trust_remote_code", False) is not False:
        raise UserError(
            f"{where} asks to run code that comes with the model (model.trust_remote_code). A setting cannot give that "
            "consent: if you trust the model, remove the key and use --trust-remote-code on the command line."
        ).on_page("code")


def _build_recipe(
    name: str, settings: Mapping[str, Any], where: str = "", *, objective: bool = True, overridden: bool = False
) -> Recipe:
    mistakes: list[str] = []
    known = every_setting()
    values: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in SECTIONS:
            values[key] = value
        elif isinstance(value, Mapping):
            values |= {f"{key}.{inner}": entry for inner, entry in value.items()}
        else:
            example = next(iter(settings_of(SECTIONS[key])))
            mistakes.append(f"{key}: must be a section of settings, such as {key}.{example}, got {value!r}.")
    mistakes += [_unknown(escape.name(key), known) for key in values if key not in known]
    typed: dict[str, Any] = {}
    for key, described in known.items():
        if key not in values:
            continue
        try:
            typed[key] = described.check(key, values[key])
        except UserError as mistake:
            mistakes.append(str(mistake))
    sections = {
        section: kind(**{key: typed[f"{section}.{key}"] for key in settings_of(kind) if f"{section}.{key}" in typed})
        for section, kind in SECTIONS.items()
    }
    recipe = Recipe(name, **{key: typed.get(key, described.default) for key, described in TOP.items()}, **sections)
    mistakes += _broken_rules(recipe)
    if objective:
        try:
            recipe = _with_objective(recipe)
        except UserError as mistake:
            mistakes.append(str(mistake))
    if mistakes:
        count = "one mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        changed = " with your options" if overridden else ""
        listed = "\n".join(f"  {mistake}" for mistake in mistakes)
        raise UserError(f"recipe {where or name}{changed} has {count}:\n{listed}").on_page("settings")
    return recipe


def _with_objective(recipe: Recipe) -> Recipe:
    """The recipe with its objective in standard spelling. Raises if ``train.best`` is a term that it does not have."""
    from ngramloss.loss.terms.parser import parse
    from ngramloss.loss.terms.term import check_names

    try:
        terms = parse(recipe.objective)
        names = dict.fromkeys(["loss", "ce", *check_names(terms)])
    except UserError as mistake:
        raise UserError(f"objective: {mistake}") from None
    best = recipe.train.best
    if best not in names and not re.fullmatch(r"[A-Za-z_]\w*", best, re.ASCII):  # not the name of a score either
        raise UserError(f"train.best: must be one of {', '.join(names)}, or a score such as rouge2, got {best!r}.")
    return dataclasses.replace(recipe, objective=" + ".join(map(str, terms)))


def every_setting() -> dict[str, Setting]:
    """Every key and its setting."""
    sections = {name: settings_of(fields) for name, fields in SECTIONS.items()}
    return TOP | {f"{name}.{key}": own for name, fields in sections.items() for key, own in fields.items()}


OTHER_NAMES = {
    "bf16": "precision",
    "d_model": "width",
    "eval_steps": "eval_every",
    "fp16": "precision",
    "gradient_accumulation_steps": "accumulate",
    "hidden_size": "width",
    "logging_steps": "log_every",
    "max_grad_norm": "clip",
    "max_new_tokens": "max_length",
    "save_steps": "save_every",
}
"""Names in Hugging Face's trainers that resemble none of ours."""


def _unknown(key: str, known: Iterable[str]) -> str:
    section, _, name = key.rpartition(".")
    every = sorted(known, key=lambda other: other.rpartition(".")[0] != section)
    names = [other.rpartition(".")[2] for other in every]
    close = closest(OTHER_NAMES.get(name, name), names, 0.7)
    return f"{key}: unknown key." + (f" Did you mean {every[names.index(close)]}?" if close else "")


def _broken_rules(recipe: Recipe) -> Iterator[str]:
    data, model, train, generation = recipe.data, recipe.model, recipe.train, recipe.generation
    simple = (
        (not train.epochs and not train.max_steps, "train.epochs: this or train.max_steps must be above 0."),
        (model.width % model.heads, "model.width: must be a multiple of model.heads."),
        (not data.name, "data.name: must not be empty."),
        (not model.name, "model.name: must not be empty."),
        (model.lora and train.fsdp, NOT_SHARDED),
    )
    yield from (mistake for is_broken, mistake in simple if is_broken)
    if train.early_stopping and not train.eval_every:
        yield "train.early_stopping: needs validations, but train.eval_every is 0."
    if train.early_stopping and train.best == LAST:
        yield f"train.early_stopping: needs a term or score to watch, but train.best is {LAST}."
    if generation.min_length > generation.max_length:
        yield "generation.min_length: must not be above generation.max_length."
    for key in ("warmup_steps", "encoder_warmup_steps"):
        steps: float = getattr(train, key)
        if steps >= 1 and not steps.is_integer():
            yield f"train.{key}: must be a whole number of steps, or a share of all steps below 1, got {steps:g}."
    if train.encoder_warmup_steps and not train.encoder_learning_rate:
        yield "train.encoder_warmup_steps: needs train.encoder_learning_rate. Set both."
    if model.encoder and model.name != "scratch":
        yield 'model.encoder: is for a model with a new decoder. Set model.name = "scratch", too.'
    if model.tokenizer and (model.name != "scratch" or model.encoder):
        yield 'model.tokenizer: is for a model from scratch, model.name = "scratch" without model.encoder.'
    if data.validation_fraction + data.test_fraction >= 1:
        yield (
            "data.validation_fraction: the sum of this and data.test_fraction must be below 1; the rest is trained on."
        )
    if data.leave_out and (part_of(data.leave_out) or (0, 0))[1] <= 1:
        yield f"data.leave_out: must be K/N, such as 1/2 for the first of two parts, got {data.leave_out!r}."
    if data.prompt not in ("", CHAT, NO_SOURCE) and data.prompt.count(SOURCE) != 1:
        yield f'data.prompt: must have {SOURCE} once, or be "{CHAT}" or "{NO_SOURCE}", got {data.prompt!r}.'
    for key in ("prompt", "instruction"):
        if "\\n" in getattr(data, key):
            yield (
                f"data.{key}: has a backslash and an n where a line should end. On the command line, put it in quotes: "
                """--set 'data.prompt="{source}\\n\\nSummary:"'."""
            )
    for key in ("lora_alpha", "lora_dropout", "lora_targets"):
        if not model.lora and getattr(model, key) != getattr(Model(), key):
            yield f"model.{key}: is for adapters, but model.lora is 0. Set model.lora, or leave this out."
    if data.instruction and data.prompt != CHAT:
        yield f'data.instruction: belongs to data.prompt = "{CHAT}". Set that, or write it into the template.'
    if train.fsdp and train.ema:
        yield "train.fsdp: train.ema does not work with sharded weights. Leave it out."
    yield from _broken_rules_of_online(recipe)


def _broken_rules_of_online(recipe: Recipe) -> Iterator[str]:
    online = recipe.online
    if online.samples and recipe.data.candidates:
        yield (
            "online.samples: generates candidates during training, but data.candidates names a file of them. Leave "
            "one of them out."
        )
    if online.samples and recipe.system:
        yield f"online.samples: the system {recipe.system} does not read this section. Leave one of them out."
    if not online.samples and (online.temperature, online.top_p) != (1.0, 1.0):
        yield "online.temperature: this and online.top_p are for samples, but online.samples is 0. Set both."


def _toml(value: Any) -> str:
    """A value as TOML: like JSON, except for one control character and escapes beyond 16 bits, which it lacks."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
