"""a few sentences → the record of a report: small, hostile, or as large as XSum's test set."""

import math
import os
import random
from dataclasses import replace

from released_data import data_folder, read_rows

from ngramloss.data.statistics import words_of
from ngramloss.metrics.registry import Score, scores_of
from ngramloss.metrics.shape import shape
from ngramloss.report.build import curves
from ngramloss.report.record import (
    Ablation,
    AblationRow,
    Cases,
    PaperRow,
    PaperTable,
    Report,
    ReportSystem,
    TeacherForced,
    TrainingCurves,
)
from ngramloss.scoring.significance import CorpusScore

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 1'><!-- ]]>",
    "right \u202eto left\u202c and \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "w" * 5000,
    "control \x07\x0b\x1b characters, U+2028 \u2028 and U+2029 \u2029 here",
    "half \ud83d of a pair, {{ braces }} {% raw %} & &amp; \" ' `",
    "",
]

SCORES = {
    "rouge1": Score("R-1", "single words"),
    "rougeL": Score("R-L"),
    "rougeLsum": Score("R-Lsum"),
    "wmd": Score("WMD", "distance", "lower", 3),
    "words": Score("Words", better="neither"),
}
NOTHING = dict.fromkeys(SCORES)
SUBJECTS = ["the cat", "a dog", "the old minister", "a small firm in Wales", "the Welsh team"]
VERBS = ["sat on", "lost", "has won", "is to sell", "was seen near"]
OBJECTS = ["the mat", "the second match", "a new stadium", "three of its ships", "the old mill in Wales"]


def sentence(rng):
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."


def system(name, label, rouge1, rougeL, wmd, words, against_first=(), **more):
    scores = {"rouge1": rouge1, "rougeL": rougeL, "rougeLsum": rougeL, "wmd": wmd, "words": words}
    tests = dict(against_first)
    return ReportSystem(
        name,
        label,
        {score: CorpusScore(value, value - 0.5, value + 0.5, *tests.get(score, ())) for score, value in scores.items()},
        **more,
    )


def spread(mean, deviation=math.nan, low=math.nan, high=math.nan):
    return {"mean": mean, "spread": deviation, "low": low, "high": high}


def against(difference, bootstrap, randomisation):
    corrected = None if None in (bootstrap, randomisation) else max(bootstrap, randomisation)
    return difference, difference - 0.1, difference + 0.1, bootstrap, randomisation, corrected


def cases(ids, references, documents, texts, scores):
    """Cases with length and novelty as metrics/shape has them, where they are not among the scores."""
    scores = dict(scores)
    if "words" not in scores:
        scores["words"] = [shape(system_texts).values["words"] for system_texts in texts]
    if "novel2" not in scores and documents is not None:
        scores["novel2"] = [
            [
                None if source is None else shape([text], [source]).values["novel2"][0]
                for text, source in zip(system_texts, documents, strict=True)
            ]
            for system_texts in texts
        ]
    described = {name: {**scores_of("rouge"), **scores_of("shape"), **scores_of("wmd")}[name] for name in scores}
    lengths = [len(words_of(golds[0])) for golds in references]
    return Cases(ids, references, texts, described, scores, lengths, [[] for _ in texts], documents)


def log(seed, steps=60):
    rng = random.Random(seed)
    rows = []
    for step in range(10, steps + 1, 10):
        rows.append(
            {
                "step": step,
                "loss": 8 - step / 20 + rng.random() / 5,
                "ce": 7 - step / 20,
                "matches(2)": 1 - step / 200,
                "learning_rate": step * 1e-5,
                "docs_per_second": 100 + rng.random(),
                "matched/2": step / 100,
                "placed/2": step / 150,
                "grad_norm": 1.0,
                "epoch": 0.1,
                "confidence/2": 0.1,
            }
        )
        if step % 20 == 0:
            rows.append(
                {
                    "step": step,
                    "eval_loss": 8 - step / 21,
                    "eval_ce": 7 - step / 21,
                    "eval_runtime": 1.5,
                    "eval_samples_per_second": 100.0,
                    "epoch": 0.1,
                }
            )
    return rows


def sample(count=60):
    """Three systems and a baseline, all parts of the page filled."""
    rng = random.Random(0)
    tokens = ["the", "cat", "sat", "on", "the", "mat"]
    forced = TeacherForced(
        tokens,
        ["the", "cat", "lay", "the", "mat", "mat"],
        [0.9, 0.8, 0.4, 0.5, 0.6, 0.7],
        [0.9, 0.8, 0.1, 0.1, 0.2, 0.7],
    )
    systems = [
        system("lead", "lead-3", 16.3, 11.95, 6.16, 60.0, is_baseline=True),
        system(
            "base",
            "ce",
            41.57,
            33.68,
            4.52,
            18.6,
            settings={"recipe.train.seed": "1", "recipe.train.rate": "3e-05", "generation.beams": "6"},
        ),
        system(
            "m2",
            "ce + matches(2)",
            41.87,
            34.13,
            4.51,
            18.2,
            audit=["2 empty"],
            against_first={
                "rouge1": against(0.3, 0.001, 0.004),
                "rougeL": against(0.45, 0.001, 0.03),
                "rougeLsum": against(0.45, 0.001, None),
                "wmd": against(-0.01, 0.4, 0.001),
            },
            objective="ce + matches(2)",
            forced={"id-0": forced},
            settings={"recipe.train.seed": "2", "recipe.train.rate": "3e-05", "generation.beams": "6"},
        ),
        system("r2", "ce + rewards(2) & 50%_x", 41.6, 33.9, 4.53, 18.4),
    ]
    references = [[sentence(rng)] for _ in range(count)]
    documents = [" ".join(sentence(rng) for _ in range(8)) if place % 3 == 0 else None for place in range(count)]
    texts = [[one[0] if rng.random() < 0.2 else sentence(rng) for one in references] for _ in systems]
    scores = {
        "rouge1": [[round(rng.random() * 100, 2) for _ in references] for _ in systems],
        "rougeL": [[None if rng.random() < 0.1 else round(rng.random() * 100, 2) for _ in references] for _ in systems],
        "wmd": [[round(rng.random() * 5, 3) for _ in references] for _ in systems],
    }
    return Report(
        title="A small report",
        notes=["Three systems on sentences made of parts.", "A second note."],
        version="0.1.0",
        made="2026-11-15",
        scores=SCORES,
        systems=systems,
        signatures={"rouge": "rouge|refs:1|stemmer:yes"},
        absent={"summac": "needs the documents."},
        deviations=["bf16 instead of fp32"],
        paper=PaperTable("Table 2", [PaperRow("BART-base", NOTHING | {"rouge1": 41.63, "rougeL": 33.73}, 29.0, 1.0)]),
        training=[TrainingCurves("ce", curves(log(1))), TrainingCurves("ce + matches(2)", curves(log(2)))],
        ablations=[
            Ablation(
                "N-gram matches",
                [
                    AblationRow(
                        "BART-base",
                        NOTHING | {"rouge1": 43.2, "words": 10.0},
                        NOTHING | {"rouge1": 43.26, "rougeL": 40.40},
                    ),
                    AblationRow("+ 2-gram", NOTHING | {"rouge1": 43.5}, NOTHING | {"rouge1": 43.33, "rougeL": 40.56}),
                ],
            )
        ],
        cases=cases([f"id-{place}" for place in range(count)], references, documents, texts, scores),
    )


def hostile():
    """A report whose every text is an attack on the page."""
    report = sample(len(HOSTILE))
    ids = [f"{place} {text[:60]}" for place, text in enumerate(HOSTILE)]
    words = [word for text in HOSTILE for word in text.split(" ")]
    forced = {ids[0]: TeacherForced(words, words, [0.5] * len(words), [float("nan")] * len(words))}
    systems = [
        replace(
            one,
            label=HOSTILE[place],
            settings={f"{HOSTILE[1]}.{HOSTILE[0]}": HOSTILE[2], "x": str(place)},
            audit=[HOSTILE[0]],
            forced=forced if one.forced else {},
        )
        for place, one in enumerate(report.systems)
    ]
    logs = [
        TrainingCurves(
            HOSTILE[1], {**run.curves, "matches(</script>)": [(step, 1.0) for step, _ in run.curves["loss"]]}
        )
        for run in report.training
    ]
    rows = [replace(row, label="$\\frac$ {" + HOSTILE[1] + "\x00") for row in report.ablations[0].rows]
    scores = {name: columns for name, columns in report.cases.scores.items() if name.startswith(("rouge", "wmd"))}
    return replace(
        report,
        title=HOSTILE[0],
        version=HOSTILE[1],
        made=HOSTILE[0],
        notes=HOSTILE,
        deviations=HOSTILE,
        absent={HOSTILE[0]: HOSTILE[1], "long": HOSTILE[3]},
        signatures={HOSTILE[0]: HOSTILE[1], "long": HOSTILE[3]},
        systems=systems,
        training=logs,
        ablations=[Ablation(HOSTILE[0], rows)],
        paper=replace(report.paper, rows=[replace(report.paper.rows[0], label=HOSTILE[1])]),
        cases=cases(ids, [[text] for text in HOSTILE], [*HOSTILE[1:], None], [list(HOSTILE) for _ in systems], scores),
    )


def large(count=11_334, names=7):
    """As many cases as XSum's test set has: the authors' released summaries where NGRAMLOSS_DATA has them, else made up."""
    if os.environ.get("NGRAMLOSS_DATA"):
        folder = data_folder("xsum_test")
        gold, rows = read_rows(folder, "references_hf_order"), read_rows(folder, "authors_predictions_hf_order")
        ids = [row["id"] for row in rows]
        references = [[row["summary_cased"] or row["summary"]] for row in gold]
        texts = [[row[name] for row in rows] for name in rows[0] if name not in ("hf_index", "id")]
        source = {row["id"]: row["document"] for row in read_rows(folder, "documents_partial")}
        documents = [source.get(key) for key in ids]
    else:
        rng = random.Random(1)
        # As many different words as real text has, or it would compress too well.
        vocabulary = ["".join(rng.choices("etaoinshrdlucmfwyp", k=rng.randint(2, 9))) for _ in range(20_000)]
        ids = [str(10_000_000 + 7 * place) for place in range(count)]
        references = [[" ".join(rng.choices(vocabulary, k=21))] for _ in ids]
        texts = [
            [
                " ".join(word if rng.random() < 0.9 else rng.choice(vocabulary) for word in one[0].split())
                for one in references
            ]
            for _ in range(names)
        ]
        documents = [" ".join(rng.choices(vocabulary, k=400)) if place % 6 == 0 else None for place in range(count)]
    rng = random.Random(2)
    scores = ["rouge1", "rouge2", "rougeL", "rougeLsum", "words", "repeated3", "novel2"]
    systems = [
        system(f"system-{place}", f"ce + matches({place})", 40 + place, 33 + place, 4.5, 18.0)
        for place in range(len(texts))
    ]
    return replace(
        sample(0),
        systems=systems,
        cases=cases(
            ids,
            references,
            documents,
            texts,
            {name: [[rng.random() * 100 for _ in ids] for _ in texts] for name in scores},
        ),
    )
