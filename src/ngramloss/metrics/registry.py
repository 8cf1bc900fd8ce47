"""name of a metric → its entry: function, texts it reads, scores, packages and options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import getdoc, signature
from pathlib import Path
from typing import Any, Literal

from ngramloss.errors import UserError
from ngramloss.metrics.scores import Scores
from ngramloss.plugins import Registry, load_function
from ngramloss.settings import Setting, nearest
from ngramloss.version import installed


@dataclass(frozen=True)
class Score:
    """How one score of a metric is shown."""

    label: str
    """The head of its column."""
    help: str = ""
    """What it is, in one line."""
    better: Literal["higher", "lower", "neither"] = "higher"
    """Which scores are better; a length, for example, only describes a text."""
    decimals: int = 2
    """Digits after the point."""


@dataclass(frozen=True)
class Metric:
    """One metric: a function of texts, and all that other rooms need to know about it."""

    function: str | Callable[..., Scores]
    """Called with the texts in ``reads``, in that order, and options by name; or ``module:name`` of it. If it has a
    parameter ``progress``, that is called with the number of documents done since the last call."""
    reads: tuple[str, ...] = ("references", "predictions")
    """Out of ``ids``, ``references`` (a list for each document), ``documents`` and ``predictions``."""
    scores: Mapping[str, Score] = field(default_factory=dict)
    """The names under which the function may return scores; by default one, called like the metric."""
    about: str = ""
    """What it measures, in one line; by default the function's docstring says."""
    optional: tuple[str, ...] = ()
    """Those of ``reads`` that may be None."""
    packages: tuple[str, ...] = ()
    """Packages that it needs, as pip calls them."""
    extra: str = ""
    """The extra of ngramloss that brings them."""
    options: Mapping[str, Setting] = field(default_factory=dict)
    """What ``--set METRIC.OPTION=VALUE`` may set."""
    usual: str = ""
    """The model that most published scores were computed with."""

    def load(self) -> Callable[..., Scores]:
        """The function, imported now if the entry only says where it is."""
        return load_function(self.function)

    @property
    def description(self) -> str:
        """What it measures, in one line."""
        return self.about or (getdoc(self.load()) or "").partition("\n")[0]

    @property
    def missing_packages(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [package for package in self.packages if installed(package) is None]

    @property
    def shows_progress(self) -> bool:
        """Whether the function takes ``progress``."""
        return "progress" in signature(self.load()).parameters


_HERE = "ngramloss.metrics"

_BATCH = Setting(32, least=1, most=2**16, help="texts or pairs of texts at a time")
_DEVICE = Setting(None, kind=str, help="as torch names it; by default the GPU if there is one")
_SPLITTER = Setting("pysbd", choices=("pysbd", "newline", "period"), help="how texts are split into sentences")

_BUILTIN = {
    "rouge": Metric(
        f"{_HERE}.rouge:rouge", about="ROUGE-1, 2, L and Lsum: F-measures, the numbers of Google's rouge-score.",
        scores={
            "rouge1": Score("R-1", "words shared with the reference"),
            "rouge2": Score("R-2", "pairs of words shared with the reference"),
            "rougeL": Score("R-L", "longest common subsequence of the whole texts"),
            "rougeLsum": Score("R-Lsum", "longest common subsequence sentence by sentence; the paper's R-L on "
                                         "CNN/DailyMail"),
        },
        packages=("rouge-score-rs",), extra="score",
        options={
            "stemmer": Setting(True, help="compare Porter's stems, as most published scores do"),
            "sentences": Setting("newline", choices=("newline", "pysbd", "period"), help="what splits sentences, for "
                                                                                         "Lsum"),
            "tokenizer": Setting("default", choices=("default", "unicode", "characters"),
                                 help="default knows a to z and 0 to 9 only"),
        },
    ),
    "bleu": Metric(
        f"{_HERE}.overlap:bleu", about="Corpus BLEU by sacreBLEU; of one document, sacreBLEU's sentence BLEU.",
        scores={"bleu": Score("BLEU", "n-grams of the prediction that are in the reference")},
        packages=("sacrebleu",), extra="score",
        options={"tokenize": Setting("13a", help="one of sacreBLEU's tokenizers, such as 13a, intl, zh, ja-mecab")},
    ),
    "chrf": Metric(
        f"{_HERE}.overlap:chrf", about="Corpus chrF by sacreBLEU; with chrf.word_order=2 it is chrF++.",
        scores={"chrf": Score("chrF", "character n-grams shared with the reference")},
        packages=("sacrebleu",), extra="score",
        options={"word_order": Setting(0, least=0, most=10, help="n-grams of words that count too; 2 is chrF++")},
    ),
    "shape": Metric(
        f"{_HERE}.shape:shape", reads=("predictions", "documents"), optional=("documents",),
        about="Length, repetition, and with documents compression, novelty, coverage and density.",
        scores={
            "words": Score("Words", "words of the summary", "neither"),
            "repeated3": Score("Repeated 3-grams %", "trigrams of the summary that it already has further up",
                               "neither"),
            "compression": Score("Compression", "words of the document for one word of the summary", "neither"),
            **{f"novel{n}": Score(f"Novel {n}-grams %", f"{n}-grams of the summary that the document lacks", "neither")
               for n in (1, 2, 3, 4)},
            "coverage": Score("Coverage %", "words of the summary in fragments copied from the document", "neither"),
            "density": Score("Density", "mean length of the copied fragment that a word is in", "neither"),
        },
        packages=("numpy",), extra="score",
    ),
    "bertscore": Metric(
        f"{_HERE}.bertscore:bertscore",
        about="BERTScore: precision, recall and F as Zhang et al. (2020) and bert-score 0.3.13 define them.",
        scores={
            "bertscore_precision": Score("BERTScore P", "tokens of the prediction, each with its closest in the "
                                                        "reference"),
            "bertscore_recall": Score("BERTScore R", "tokens of the reference, each with its closest in the "
                                                     "prediction"),
            "bertscore": Score("BERTScore", "F of BERTScore's precision and recall"),
        },
        packages=("transformers",), extra="hf", usual="roberta-large",
        options={
            "model": Setting(kind=str, help="a folder or hub id"),
            "layer": Setting(None, kind=int, least=1, help="counted from 1; by default the authors' choice"),
            "idf": Setting(False, help="rare tokens weigh more"),
            "baseline": Setting(None, kind=Path, help="a file of bert-score to rescale with"),
            "batch_size": Setting(64, least=1, most=2**16, help="texts at a time"),
            "device": _DEVICE,
        },
    ),
    "wmd": Metric(
        f"{_HERE}.wmd:wmd", about="Word Mover's Distance (Kusner et al., 2015): 0 is best, lower is better.",
        scores={
            "wmd": Score("WMD", "Word Mover's Distance to the reference: lower is nearer", "lower", 3),
            "wmd_known": Score("WMD words known %", "words that have a vector", "neither"),
        },
        packages=("POT",), extra="metrics",
        options={
            "vectors": Setting(kind=Path, help="a file of word2vec, GloVe or fastText"),
            "stop_words": Setting("none", choices=("none", "english"), help="words to leave out"),
            "normalise": Setting(True, help="divide each vector by its length"),
            "limit": Setting(0, least=0, help="read only so many vectors; 0 reads all"),
        },
    ),
    "summac": Metric(
        f"{_HERE}.summac:summac", reads=("documents", "predictions"),
        about="SummaC (Laban et al., 2022): how consistent each summary is with its document.",
        scores={
            "summac_conv": Score("SummaC-Conv", "probability that the summary is consistent with its document"),
            "summac_zs": Score("SummaC-ZS", "entailment of the summary's sentences, less their contradiction"),
        },
        packages=("transformers",), extra="hf", usual="tals/albert-xlarge-vitaminc-mnli",
        options={
            "model": Setting("vitc", help="vitc, mnli, anli, a folder or a hub id"),
            "form": Setting("conv", choices=("conv", "zs"), help="zs needs no weights"),
            "weights": Setting(None, kind=Path, help="SummaC-Conv's published weights"),
            "splitter": _SPLITTER,
            "document_sentences": Setting(100, least=1, help="how many sentences of a document are read"),
            "contradiction": Setting(True, help="subtract contradiction in zs"),
            "labels": Setting(None, kind=list, help="meanings of the model's outputs, if it does not say them"),
            "batch_size": _BATCH, "device": _DEVICE,
        },
    ),
    "factcc": Metric(
        f"{_HERE}.factcc:factcc", reads=("documents", "predictions"),
        about="FactCC (Kryściński et al., 2020): how factually consistent a summary's sentences are.",
        scores={
            "factcc": Score("FactCCX", "mean probability that a sentence of the summary is correct"),
            "factcc_share": Score("FactCCX, sentences > 50%", "sentences that the classifier calls correct"),
        },
        packages=("transformers",), extra="hf",
        options={
            "model": Setting(kind=str, help="a folder or hub id of FactCC or FactCCX"), "splitter": _SPLITTER,
            "batch_size": Setting(16, least=1, most=2**16, help="sentences at a time"), "device": _DEVICE,
        },
    ),
    "facts": Metric(
        f"{_HERE}.facts:facts", reads=("ids", "predictions"),
        about="Names and numbers of the reference that the prediction has; of the built-in corpus newswire only.",
        scores={
            "names_right": Score("Names right %", "names of the reference that the summary has"),
            "figures_right": Score("Numbers right %", "numbers of the reference that the summary has"),
        },
    ),
}

METRICS: Registry[Metric] = Registry("metric", Metric, _BUILTIN)
"""All metrics by name. A new one is a file with its function and an entry here, or in your own program."""


def scores_of(name: str) -> Mapping[str, Score]:
    """The scores that a metric may return."""
    return METRICS.entry(name).scores or {name: Score(name)}


def score_owners(metrics: Iterable[str]) -> dict[str, str]:
    """Score → which of these metrics returns it. Two of them may not share a score's name."""
    owners: dict[str, str] = {}
    for metric in metrics:
        for score in scores_of(metric):
            if score in owners:
                raise UserError(f"the metrics {owners[score]!r} and {metric!r} both have a score {score!r}. Rename "
                                "one of them.")
            owners[score] = metric
    return owners


def checked_options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A metric's options in their types, or an error that names what is wrong."""
    known = METRICS.entry(name).options
    for option in given:
        if option not in known:
            raise UserError(f"{name}.{option}: unknown option. {nearest(option, known, 0.5)}"
                            f"{name} has {', '.join(known) or 'no options'}.")
    return {option: known[option].check(f"{name}.{option}", value) for option, value in given.items()}


def missing_options(name: str, given: Mapping[str, Any]) -> list[str]:
    """The options that a metric needs and was not given."""
    return [option for option, described in METRICS.entry(name).options.items()
            if described.required and option not in given]
