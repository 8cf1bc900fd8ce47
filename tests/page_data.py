"""a few sentences → the dict that a report is made of: small, hostile, or as large as XSum's test set."""

import os
import random

from released_data import data_folder, read_rows

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "</script><img src=x onerror='window.hacked = 1'><!-- ]]>",
    "right \u202eto left\u202c and \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "w" * 5000,
    "control \x07\x0b\x1b characters, U+2028 \u2028 and U+2029 \u2029 here",
    "half \ud83d of a pair, {{ braces }} {% raw %} & &amp; \" ' `",
    "",
]

FIGURES = {
    "rouge1": {"label": "R-1", "lower_is_better": False, "metric": "rouge", "help": "single words"},
    "rougeL": {"label": "R-L", "lower_is_better": False, "metric": "rouge", "help": ""},
    "rougeLsum": {"label": "R-Lsum", "lower_is_better": False, "metric": "rouge", "help": ""},
    "wmd": {"label": "WMD", "lower_is_better": True, "metric": "wmd", "help": "distance"},
    "words": {"label": "Words", "lower_is_better": False, "metric": "shape", "help": ""},
}
SUBJECTS = ["the cat", "a dog", "the old minister", "a small firm in Wales", "the Welsh team"]
VERBS = ["sat on", "lost", "has won", "is to sell", "was seen near"]
OBJECTS = ["the mat", "the second match", "a new stadium", "three of its ships", "the old mill in Wales"]


def sentence(rng):
    return f"{rng.choice(SUBJECTS)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}."


def system(name, label, rouge1, rougeL, wmd, words, **more):
    scores = {"rouge1": rouge1, "rougeL": rougeL, "rougeLsum": rougeL, "wmd": wmd, "words": words}
    intervals = {figure: [value - 0.5, value + 0.5] for figure, value in scores.items()}
    return {"name": name, "label": label, "scores": scores, "intervals": intervals, "docs_per_second": None,
            "baseline": False, "audit": [], "settings": {}, **more}


def against(difference, bootstrap, randomisation):
    return {"difference": difference, "interval": [difference - 0.1, difference + 0.1], "p_bootstrap": bootstrap,
            "p_randomisation": randomisation, "p_holm": None}


def log(seed, steps=60):
    rng = random.Random(seed)
    rows = []
    for step in range(10, steps + 1, 10):
        rows.append({"step": step, "loss": 8 - step / 20 + rng.random() / 5, "ce": 7 - step / 20, "matches(2)": 1 - step / 200,
                     "learning_rate": step * 1e-5, "docs_per_second": 100 + rng.random(), "matched/2": step / 100,
                     "placed/2": step / 150, "grad_norm": 1.0, "epoch": 0.1, "confidence/2": 0.1})
        if step % 20 == 0:
            rows.append({"step": step, "eval_loss": 8 - step / 21, "eval_ce": 7 - step / 21, "eval_runtime": 1.5,
                         "eval_samples_per_second": 100.0, "epoch": 0.1})
    return rows


def sample(count=60):
    """Three systems and a baseline, all parts of the page filled."""
    rng = random.Random(0)
    systems = [
        system("lead", "lead-3", 16.3, 11.95, 6.16, 60.0, baseline=True),
        system("base", "ce", 41.57, 33.68, 4.52, 18.6, docs_per_second=29.0,
               settings={"recipe": {"train": {"seed": 1, "rate": 3e-5}}, "generation": {"beams": 6}}),
        system("m2", "ce + matches(2)", 41.87, 34.13, 4.51, 18.2, docs_per_second=26.1, audit=["2 empty"],
               against_first={"rouge1": against(0.3, 0.001, 0.004), "rougeL": against(0.45, 0.001, 0.03),
                              "rougeLsum": against(0.45, 0.001, None), "wmd": against(-0.01, 0.4, 0.001)},
               settings={"recipe": {"train": {"seed": 2, "rate": 3e-5}}, "generation": {"beams": 6}}),
        system("r2", "ce + rewards(2) & 50%_x", 41.6, 33.9, 4.53, 18.4, docs_per_second=23.2),
    ]  # fmt: skip
    references = [[sentence(rng)] for _ in range(count)]
    documents = [" ".join(sentence(rng) for _ in range(8)) if place % 3 == 0 else None for place in range(count)]
    texts = [[one[0] if rng.random() < 0.2 else sentence(rng) for one in references] for _ in systems]
    scores = {"rouge1": [[round(rng.random() * 100, 2) for _ in references] for _ in systems],
              "rougeL": [[None if rng.random() < 0.1 else round(rng.random() * 100, 2) for _ in references] for _ in systems]}
    tokens = ["the", "cat", "sat", "on", "the", "mat"]
    return {
        "title": "A small report", "notes": ["Three systems on sentences made of parts.", "A second note."],
        "version": "0.1.0", "made": "2026-11-15", "figures": FIGURES, "systems": systems,
        "over_seeds": [{"label": "ce", "runs": ["base", "base2"], "against_first": None, "scores": {
            "rouge1": {"mean": 41.5, "spread": 0.12, "low": 41.4, "high": 41.6}}}],
        "signatures": {"rouge": "rouge|refs:1|stemmer:yes"}, "absent": {"summac": "needs the documents."},
        "deviations": ["bf16 instead of fp32"],
        "paper": {"title": "Table 2", "rows": [
            {"label": "BART-base", "scores": {"rouge1": 41.63, "rougeL": 33.73}, "docs_per_second": 29.0, "ratio": 1.0}]},
        "training": [{"system": "base", "label": "ce", "rows": log(1)},
                     {"system": "m2", "label": "ce + matches(2)", "rows": log(2)}],
        "ablation": [{"title": "N-gram matches", "rows": [
            {"label": "BART-base", "scores": {"rouge1": 43.2, "words": 10.0}, "paper": {"rouge1": 43.26, "rougeL": 40.40}},
            {"label": "+ 2-gram", "scores": {"rouge1": 43.5}, "paper": {"rouge1": 43.33, "rougeL": 40.56}}]}],
        "cases": {"ids": [f"id-{place}" for place in range(count)], "references": references, "documents": documents,
                  "texts": texts, "scores": scores},
        "seen": {"m2": {"id-0": {"tokens": tokens, "best": ["the", "cat", "lay", "the", "mat", "mat"],
                                 "confidence": [0.9, 0.8, 0.4, 0.5, 0.6, 0.7], "label_probability": [0.9, 0.8, 0.1, 0.1, 0.2, 0.7]}}},
        "objectives": {"m2": "ce + matches(2)"},
    }  # fmt: skip


def hostile():
    """A report whose every text is an attack on the page."""
    data = sample(len(HOSTILE))
    for key, text in {"title": HOSTILE[0], "version": HOSTILE[1], "made": HOSTILE[0]}.items():
        data[key] = text
    data["notes"] = data["deviations"] = list(HOSTILE)
    data["absent"] = data["signatures"] = {HOSTILE[0]: HOSTILE[1], "long": HOSTILE[3]}
    data["cases"]["ids"] = [f"{place} {text[:60]}" for place, text in enumerate(HOSTILE)]
    data["cases"]["references"] = [[text] for text in HOSTILE]
    data["cases"]["documents"] = [*HOSTILE[1:], None]
    data["cases"]["texts"] = [list(HOSTILE) for _ in data["systems"]]
    for place, one in enumerate(data["systems"]):
        one["label"] = HOSTILE[place]
        one["settings"] = {HOSTILE[1]: {HOSTILE[0]: HOSTILE[2]}, "x": place}
        one["audit"] = [HOSTILE[0]]
    for run in data["training"]:
        run["label"] = HOSTILE[1]
        for row in run["rows"]:
            row["matches(</script>)"] = 1.0
    data["ablation"][0] |= {"title": HOSTILE[0]}
    for row in data["ablation"][0]["rows"]:
        row["label"] = "$\\frac$ {" + HOSTILE[1] + "\x00"
    data["paper"]["rows"][0]["label"] = HOSTILE[1]
    words = [word for text in HOSTILE for word in text.split(" ")]
    data["seen"] = {"m2": {data["cases"]["ids"][0]: {"tokens": words, "best": words, "confidence": [0.5] * len(words),
                                                     "label_probability": [float("nan")] * len(words)}}}
    return data


def large(count=11_334, names=7):
    """As many cases as XSum's test set has: the authors' released summaries where NGRAMLOSS_DATA has them, else made up."""
    data = sample(0)
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
        texts = [[" ".join(word if rng.random() < 0.9 else rng.choice(vocabulary) for word in one[0].split())
                  for one in references] for _ in range(names)]
        documents = [" ".join(rng.choices(vocabulary, k=400)) if place % 6 == 0 else None for place in range(count)]
    rng = random.Random(2)
    figures = ["rouge1", "rouge2", "rougeL", "rougeLsum", "words", "repeated3", "novel2"]
    data["systems"] = [system(f"system-{place}", f"ce + matches({place})", 40 + place, 33 + place, 4.5, 18.0) for place in range(len(texts))]
    data["cases"] = {"ids": ids, "references": references, "documents": documents, "texts": texts, "scores": {
        name: [[rng.random() * 100 for _ in ids] for _ in texts] for name in figures}}
    data["seen"] = {}
    return data
