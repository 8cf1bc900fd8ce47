"""name of a metric → its entry: function, texts it reads, scores, packages and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from ngramloss.data import Example
from ngramloss.errors import UserError
from ngramloss.metrics.scores import Scores, check_scores
from ngramloss.plugins import Registry, call, first_doc_line, load_function
from ngramloss.settings import Setting, nearest
from ngramloss.version import installed


@dataclass(frozen=True)
class Score:
    """How one score of a metric is displayed."""

    label: str
    """The heading of its column."""
    help: str = ""
    """A one-line description."""
    better: Literal["higher", "lower", "neither"] = "higher"
    """Which values are better: "neither" for scores that only describe a text, such as its length."""
    decimals: int = 2
    """Digits after the decimal point."""


@dataclass(frozen=True)
class Metric:
    """One metric: a function of texts, and everything that scoring and reports need to know about it."""

    function: str | Callable[..., Scores]
    """The function, or ``module:name``. It is called with the texts in ``reads``, in that order, and with options as
    keywords. It may have a parameter ``progress``, which it calls with the number of documents done since the last
    call."""
    reads: tuple[str, ...] = ("references", "predictions")
    """The texts it takes: ``ids``, ``references`` (a list for each document), ``documents`` or ``predictions``."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """The scores that the function may return; by default one with the name of the metric."""
    about: str = ""
    """A one-line description; by default the first line of the function's docstring."""
    optional: tuple[str, ...] = ()
    """The texts in ``reads`` that may be None."""
    packages: tuple[str, ...] = ()
    """Packages that it needs, by their names on PyPI."""
    extra: str = ""
    """The extra of ngramloss that installs them."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """The options that ``--set METRIC.OPTION=VALUE`` accepts."""
    notes: str | Callable[..., list[str]] = ""
    """A function, or ``module:name``, that returns sentences about texts which these options do not read well. They are
    printed below the table. It is called once, with the texts in ``reads``, the predictions of all systems one after
    another, and every option as a keyword."""
    usual: str = ""
    """The model that most published scores were computed with."""

    def load(self) -> Callable[..., Scores]:
        """The function; imported if the entry gives ``module:name``."""
        return load_function(self.function)

    def notes_on(self, texts: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
        """Sentences about texts that it does not read well with these options."""
        if not self.notes:
            return []
        notes: Callable[..., list[str]] = load_function(self.notes)
        return notes(*(texts[name] for name in self.reads), **self.every_option(options))

    def every_option(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options, and the defaults of those that are not given."""
        defaults = {name: setting.default for name, setting in self.options.items() if not setting.required}
        return defaults | dict(options)

    @property
    def description(self) -> str:
        """A one-line description."""
        return self.about or first_doc_line(self.load())

    @property
    def packages_needed(self) -> str:
        """The missing packages and the command that installs them, as a clause; empty if none is missing."""
        missing = [package for package in self.packages if installed(package) is None]
        if not missing:
            return ""
        wanted = f"'ngramloss[{self.extra}]'" if self.extra else " ".join(missing)
        return f"needs the package {', '.join(missing)}: pip install {wanted}"


VITC = "tals/albert-xlarge-vitaminc-mnli"
"""The hub id of SummaC's usual model. Here, as :mod:`ngramloss.metrics.nli` is imported only to run it."""
_HERE = "ngramloss.metrics"
_of_texts = partial(Metric, packages=("sacrebleu",), extra="score")
_of_model = partial(Metric, packages=("transformers",), extra="hf")
_BATCH = Setting(32, least=1, most=2**16, help="texts or pairs of texts per batch")
_DEVICE = Setting(None, kind=str, help="device, such as cpu or cuda:1; by default the GPU if there is one")
_SPLITTER = Setting("pysbd", choices=("pysbd", "newline", "period"), help="how texts are split into sentences")
_LANGUAGE = Setting("auto", help="language of the texts, for pysbd, such as de; auto chooses by script")
_ROUGE_PARTS = {
    "precision": "how much of the prediction is in the reference",
    "recall": "how much of the reference is in the prediction",
}
_BUILTIN = {
    "rouge": Metric(
        f"{_HERE}.rouge:rouge",
        about="ROUGE-1, 2, L and Lsum: F-measures, the same values as Google's rouge-score.",
        scores={
            "rouge1": Score("R-1", "words shared with the reference"),
            "rouge2": Score("R-2", "pairs of words shared with the reference"),
            "rougeL": Score("R-L", "longest common subsequence of the whole texts"),
            "rougeLsum": Score(
                "R-Lsum", "longest common subsequence sentence by sentence; the paper's R-L on CNN/DailyMail"
            ),
            **{
                f"rouge{n}_{part}": Score(f"R-{n} {part[0].upper()}", f"{part} of ROUGE-{n}: {about}")
                for n in ("1", "2", "L", "Lsum")
                for part, about in _ROUGE_PARTS.items()
            },
        },
        packages=("rouge-score-rs",),
        extra="score",
        options={
            "stemmer": Setting(True, help="compare Porter stems, as most published scores do"),
            "sentences": Setting("newline", choices=("newline", "pysbd", "period"), help="how Lsum splits sentences"),
            "tokens": Setting(
                "script",
                choices=("script", "default", "unicode", "characters", "auto"),
                help="how texts are split into words: default keeps a to z and 0 to 9, auto letters of any script; "
                "script is auto if most letters of the references are not Latin, otherwise default",
            ),
            "language": _LANGUAGE,
            "parts": Setting(False, help="also show precision and recall"),
        },
        notes=f"{_HERE}.rouge:notes",
    ),
    "bleu": _of_texts(
        f"{_HERE}.overlap:bleu",
        about="Corpus BLEU by sacreBLEU; for one document, sacreBLEU's sentence BLEU.",
        scores={"bleu": Score("BLEU", "n-grams of the prediction that are in the reference")},
        options={
            "tokenize": Setting(
                "auto", help="tokenizer of sacreBLEU, such as 13a, intl, zh or ja-mecab; auto chooses by script"
            )
        },
        notes=f"{_HERE}.overlap:bleu_notes",
    ),
    "chrf": _of_texts(
        f"{_HERE}.overlap:chrf",
        about="Corpus chrF by sacreBLEU; with chrf.word_order=2 it is chrF++.",
        scores={"chrf": Score("chrF", "character n-grams shared with the reference")},
        options={"word_order": Setting(0, least=0, most=10, help="longest word n-grams that also count; 2 is chrF++")},
    ),
    "shape": Metric(
        f"{_HERE}.shape:shape",
        reads=("predictions", "documents"),
        optional=("documents",),
        about="Length and repetition; with documents also compression, novelty, coverage and density.",
        scores={
            "words": Score("Words", "words of the summary", "neither"),
            "repeated3": Score("Repeated 3-grams %", "trigrams of the summary that repeat an earlier one", "neither"),
            "compression": Score("Compression", "words of the document per word of the summary", "neither"),
            **{
                f"novel{n}": Score(f"Novel {n}-grams %", f"{n}-grams of the summary not in the document", "neither")
                for n in (1, 2, 3, 4)
            },
            "coverage": Score("Coverage %", "words of the summary in fragments copied from the document", "neither"),
            "density": Score("Density", "mean length of the copied fragment that a word is in", "neither"),
        },
        packages=("numpy",),
        extra="score",
    ),
    "bertscore": _of_model(
        f"{_HERE}.bertscore:bertscore",
        about="BERTScore: precision, recall and F as Zhang et al. (2020) and bert-score 0.3.13 define them.",
        scores={
            "bertscore_precision": Score(
                "BERTScore P", "similarity of the prediction's tokens to the closest in the reference"
            ),
            "bertscore_recall": Score(
                "BERTScore R", "similarity of the reference's tokens to the closest in the prediction"
            ),
            "bertscore": Score("BERTScore", "harmonic mean of BERTScore's precision and recall"),
        },
        usual="roberta-large",
        options={
            "model": Setting(kind=str, help="folder or hub id of the model"),
            "layer": Setting(None, kind=int, least=1, help="layer, counted from 1; by default the authors' choice"),
            "batch_size": Setting(64, least=1, most=2**16, help="texts per batch"),
            "device": _DEVICE,
        },
    ),
    "wmd": Metric(
        f"{_HERE}.wmd:wmd",
        about="Word Mover's Distance (Kusner et al., 2015): 0 is best, lower is better.",
        scores={
            "wmd": Score("WMD", "Word Mover's Distance to the reference; lower is closer", "lower", 3),
            "wmd_known": Score("WMD words known %", "words that have a vector", "neither"),
        },
        packages=("POT",),
        extra="metrics",
        options={
            "vectors": Setting(kind=Path, help="file of word2vec, GloVe or fastText vectors"),
            "stop_words": Setting("none", choices=("none", "english"), help="words to ignore"),
            "normalise": Setting(True, help="divide each vector by its length"),
            "limit": Setting(0, least=0, help="read only the first vectors of the file, this many; 0 reads all"),
        },
    ),
    "summac": _of_model(
        f"{_HERE}.summac:summac",
        reads=("documents", "predictions"),
        about="SummaC (Laban et al., 2022): how consistent each summary is with its document.",
        scores={
            "summac_conv": Score("SummaC-Conv", "probability that the summary is consistent with its document"),
            "summac_zs": Score("SummaC-ZS", "entailment of the summary's sentences minus their contradiction"),
        },
        usual=VITC,
        options={
            "model": Setting("vitc", help="NLI model: vitc, mnli, anli, a folder or a hub id"),
            "form": Setting("conv", choices=("conv", "zs"), help="variant of SummaC; zs needs no weights"),
            "weights": Setting(None, kind=Path, help="file of SummaC-Conv's published weights"),
            "splitter": _SPLITTER,
            "language": _LANGUAGE,
            "document_sentences": Setting(100, least=1, help="most sentences read of a document"),
            "contradiction": Setting(True, help="whether zs subtracts contradiction"),
            "labels": Setting(None, kind=list, help="meanings of the model's outputs, if its config lacks them"),
            "batch_size": _BATCH,
            "device": _DEVICE,
        },
        notes=f"{_HERE}.summac:notes",
    ),
    "factcc": _of_model(
        f"{_HERE}.factcc:factcc",
        reads=("documents", "predictions"),
        about="FactCC (Kryściński et al., 2020): how factually consistent a summary's sentences are.",
        scores={
            "factcc": Score("FactCCX", "mean probability that a sentence of the summary is correct"),
            "factcc_share": Score("FactCCX, sentences ≥ 50%", "sentences that the classifier calls correct"),
        },
        options={
            "model": Setting(kind=str, help="folder or hub id of FactCC or FactCCX"),
            "splitter": _SPLITTER,
            "language": _LANGUAGE,
            "batch_size": Setting(16, least=1, most=2**16, help="sentences per batch"),
            "device": _DEVICE,
        },
        notes=f"{_HERE}.factcc:notes",
    ),
    "facts": Metric(
        f"{_HERE}.newswire_facts:facts",
        reads=("ids", "predictions"),
        about="Names and numbers of the reference that the prediction contains; for the built-in corpus newswire only.",
        scores={
            "names_right": Score("Names right %", "names of the reference that the summary contains"),
            "figures_right": Score("Numbers right %", "numbers of the reference that the summary contains"),
        },
    ),
}
METRICS: Registry[Metric] = Registry("metric", Metric, _BUILTIN)
"""All metrics by name. To add one, write its function and an entry, here or in your own program."""


def scores_of(name: str) -> Mapping[str, Score]:
    """The scores that a metric may return."""
    return METRICS.entry(name).scores or {name: Score(name)}


def compute_scores(
    name: str,
    texts: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    documents: int,
    progress: Callable[[int], object] = bool,
) -> Scores:
    """Call a metric with the texts that it reads, and check what it returns; ``progress`` gets new documents' count."""
    metric = METRICS[name]
    function = metric.load()
    more = {"progress": progress} if "progress" in signature(function).parameters else {}
    scores: Scores = call("metric", name, function, *(texts[text] for text in metric.reads), **options, **more)
    check_scores(name, scores, list(scores_of(name)), documents)
    return scores


def score_owners(metrics: Iterable[str]) -> dict[str, str]:
    """Score → the metric that returns it. Raises if two metrics use the same name."""
    owners: dict[str, str] = {}
    for metric in metrics:
        for score in scores_of(metric):
            if score in owners:
                raise UserError(
                    f"the metrics {owners[score]!r} and {metric!r} both have a score {score!r}. Rename one of them."
                )
            owners[score] = metric
    return owners


def checked_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A metric's options, checked and converted to their types."""
    known = METRICS.entry(name).options
    for option in given:
        if option not in known:
            raise UserError(
                f"{name}.{option}: unknown option. {nearest(option, known, 0.5)}"
                f"{name} has {', '.join(known) or 'no options'}."
            )
    return {option: known[option].check(f"{name}.{option}", value) for option, value in given.items()}


def missing_options(name: str, given: Mapping[str, Any]) -> list[str]:
    """The required options of a metric that are not given."""
    return [
        option
        for option, described in METRICS.entry(name).options.items()
        if described.required and option not in given
    ]


def scores_on(name: str, examples: Sequence[Example], texts: Sequence[str], options: Mapping[str, Any]) -> Scores:
    """The scores of texts that were generated for these examples, or an error as in :func:`compute_scores`."""
    return compute_scores(name, _read(examples, texts), options, documents=len(examples))


def notes_on_references(name: str, examples: Sequence[Example], options: Mapping[str, Any]) -> list[str]:
    """Sentences about references that a metric does not read well with these options."""
    return METRICS[name].notes_on(_read(examples, [example.target for example in examples]), options)


def references_of(example: Example) -> list[str]:
    """Its references: several, or its target."""
    return list(example.references) or [example.target]


def _read(examples: Sequence[Example], texts: Sequence[str]) -> dict[str, Any]:
    """What a metric may read."""
    return {
        "ids": [example.id for example in examples],
        "documents": [example.source for example in examples],
        "references": [references_of(example) for example in examples],
        "predictions": list(texts),
    }
