"""scores, texts and logs of systems → the record that the page is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ngramloss.metrics.registry import Score
from ngramloss.output.console import is_number
from ngramloss.recipe import TASKS
from ngramloss.scoring.results import Seeds
from ngramloss.scoring.significance import CorpusScore

LENGTH, NOVELTY = "words", "novel2"  # Scores of metrics/shape that cases are sorted by, whatever else was scored


@dataclass(frozen=True)
class TeacherForced:
    """A reference as the model predicts it, token by token."""

    tokens: list[str]
    best: list[str]  # The most probable token at each position
    confidence: list[float | None]  # The probability of the best token
    label_probability: list[float | None]  # The probability of the reference's token


@dataclass(frozen=True)
class ReportSystem:
    """One system. The first of a report is what the others are compared with."""

    name: str
    label: str
    values: Mapping[str, CorpusScore]  # By the names of all scores of the report
    is_baseline: bool = False
    objective: str | None = None  # None where the system was not trained, or the report does not know with what
    group: str = ""  # The label of the runs that differ in their seed alone, of which this is one, if it is
    most_tokens: int | None = None  # The most tokens that a text may have. A text with this many may be cut off.
    audit: Sequence[str] = ()
    used: Sequence[str] = ()  # What its training used of its data, in sentences
    settings: Mapping[str, str] = field(default_factory=dict)  # By dotted name
    forced: Mapping[str, TeacherForced] = field(default_factory=dict)  # By the id of the case


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's table."""

    label: str
    values: Mapping[str, float | None]  # By the names of all scores of the report
    docs_per_second: float | None = None
    ratio: float | None = None  # Of its speed to that of cross-entropy


@dataclass(frozen=True)
class PaperTable:
    """Rows of the paper that stand below the systems."""

    title: str
    rows: Sequence[PaperRow]


@dataclass(frozen=True)
class TrainingCurves:
    """What one training logged: name → (step, value) in the order of the steps."""

    label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]
    group: str = ""  # Trainings of one group are drawn as their mean and a band; empty for one on its own
    objective: str = ""  # Joint losses of different objectives are not drawn on one axis


@dataclass(frozen=True)
class AblationRow:
    """An objective of the ablation: its scores here, and those that the paper prints."""

    label: str
    here: Mapping[str, float | None]
    paper: Mapping[str, float | None]


@dataclass(frozen=True)
class Ablation:
    """One part of the paper's ablation. Rows are compared with the first."""

    title: str
    rows: Sequence[AblationRow]

    @property
    def scores(self) -> list[str]:
        """The scores that the paper has, or all that a row has where the paper has none."""
        paper = [name for row in self.rows for name, value in row.paper.items() if is_number(value)]
        here = [name for row in self.rows for name, value in row.here.items() if is_number(value)]
        return list(dict.fromkeys(paper or here))


@dataclass(frozen=True)
class Cases:
    """Every document with its references, the systems' texts and their scores."""

    ids: Sequence[str]
    references: Sequence[Sequence[str]]  # One or more for each case
    texts: Sequence[Sequence[str]]  # Of each system
    described: Mapping[str, Score]  # The scores of cases: also ``LENGTH``, and ``NOVELTY`` where there are documents
    scores: Mapping[str, Sequence[Sequence[float | None]]]  # Of each system; None where a case has no value
    reference_words: Sequence[int]  # Words of the first reference
    cut_off: Sequence[Sequence[int]]  # For each system, the indices of cases whose text has ``most_tokens``
    documents: Sequence[str | None] | None = None

    @property
    def empty(self) -> list[list[int]]:
        """For each system, the indices of cases whose text is empty."""
        return [[index for index, text in enumerate(texts) if not text.strip()] for texts in self.texts]


@dataclass(frozen=True)
class Report:
    """All that the page shows."""

    title: str = "ngramloss report"
    notes: Sequence[str] = ()  # Sentences below the title; the first stands out
    version: str = ""
    made: str = ""  # The date
    task: str = TASKS[0]  # What the texts are, such as summaries; the page calls them by its words
    scores: Mapping[str, Score] = field(default_factory=dict)  # In the order of the columns
    systems: Sequence[ReportSystem] = ()
    seeds: Sequence[Seeds] = ()  # A row for each system, which is its ``group``, if some have several runs
    seed_notes: Sequence[str] = ()  # What the tests over seeds compare, and which systems have none
    verdicts: Sequence[str] = ()  # Which systems are better and worse than the first, by the tests over documents
    signatures: Mapping[str, str] = field(default_factory=dict)  # By metric
    absent: Mapping[str, str] = field(default_factory=dict)  # Metric → why it could not run
    # Metric → sentences about texts that its options do not read well
    metric_notes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    deviations: Sequence[str] = ()  # Where this departs from the paper
    paper: PaperTable | None = None
    training: Sequence[TrainingCurves] = ()
    ablations: Sequence[Ablation] = ()
    cases: Cases | None = None
