"""Folders as ``ngramloss generate`` leaves them, and what a training had prepared."""

import json
from pathlib import Path

from ngramloss.training.prepared import Machine, Prepared, PreparedSplit

REFERENCES = {"a": "the cat sat on the mat", "b": "it rained all day", "c": "prices rose by three per cent"}


TEXTS = {"a": "the cat sat on a mat", "b": "it rained all day", "c": "prices rose three per cent"}


def run(folder, texts=TEXTS, references=REFERENCES, *, objective="ce", seed=1, tokens=None, limits=(0, 20), rate=3e-5):
    folder.mkdir(parents=True)
    lines = [
        {"id": key, "prediction": text} | ({"tokens": tokens[key]} if tokens else {}) for key, text in texts.items()
    ]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"id": key, "reference": text, "document": f"{text} as was said"} for key, text in references.items()]
    (folder / "references.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.toml").write_text(f'objective = "{objective}"\n[train]\nseed = {seed}\nlearning_rate = {rate}\n')
    search = {"num_beams": 6, "min_length": limits[0], "max_length": limits[1], "eos_token_id": 2}
    about = {
        "model": str(folder),
        "weights": f"0123{seed}",
        "generation": search,
        "data": "newswire",
        "split": "test",
        "fingerprint": "f00",
        "documents": len(texts),
        "versions": {"transformers": "5.22", "ngramloss": "0.1.0"},
    }
    (folder / "generation.json").write_text(json.dumps(about))
    return folder


PREPARED = Prepared(
    splits={
        "train": PreparedSplit(24000, ("a.jsonl:3: blank",), "0123456789abcdef", Path("cache/train")),
        "validation": PreparedSplit(500, (), "fedcba9876543210", Path("cache/validation")),
    },
    used=("train: 24,000 rows.",),
    candidates=None,
    language_model=None,
    made_of={"train data": "0123456789abcdef", "train tokens": "1"},
    tokenizer="scratch",
    column="document",
    continued_from=None,
    trust_remote_code=False,
    machine=Machine(2, "CPU", "fp32"),
)
