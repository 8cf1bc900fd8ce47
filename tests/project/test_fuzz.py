"""Damaged files: whatever is done to a recipe, a data set, a cache or scores, the end is a sentence or a right result.

Every case is one file, damaged at random by a seed of its own, and given to the real reader. ``make test-fuzz`` runs ten
thousand cases, the quick lane the first few of each kind. To see one case again: ``FUZZ=kind:seed``, as a failure prints it.
"""

import contextlib
import io
import json
import math
import os
import random
import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
from logged import logged

from ngramloss import cli, recipe
from ngramloss.data import Example, fingerprint, load
from ngramloss.data.tokens import Shape, tokenise
from ngramloss.errors import UserError
from ngramloss.scoring import provenance, results, score_cache, scored_texts
from ngramloss.scoring.texts import read_texts
from ngramloss.storage.files import whole_rows
from ngramloss.training import checkpoints

# Damage


def flip_bits(rng, content):
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def truncate(rng, content):
    return content[: rng.randrange(len(content))]


def chunk(rng, content):
    start = rng.randrange(len(content))
    return start, min(len(content), start + rng.choice([1, 3, 10, 100, 1000]))


def delete(rng, content):
    start, end = chunk(rng, content)
    return content[:start] + content[end:]


def duplicate(rng, content):
    start, end = chunk(rng, content)
    return content[:end] + content[start:]


def swap(rng, content):
    (a, b), (c, d) = sorted((chunk(rng, content), chunk(rng, content)))
    c = max(b, c)
    d = max(c, d)
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def insert(rng, content):
    at = rng.randrange(len(content) + 1)
    return content[:at] + rng.choice(PIECES)(rng) + content[at:]


def replace_value(rng, content):
    """Another value in place of one that stands after a colon, an equals sign or a comma."""
    values = list(re.finditer(rb"(?<=[=:,])[ \t]*(\"[^\"\n]*\"|[^,}\]\n\t\"]+)", content))
    if not values:
        return insert(rng, content)
    value = rng.choice(values)
    return content[: value.start(1)] + rng.choice(PIECES)(rng) + content[value.end(1) :]


def swap_lines(rng, content):
    lines = content.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def empty(rng, content):
    return rng.choice([b"", b"\n", b"\x00" * len(content), b"null", b"[]", b"{}", b"3", b'"text"'])


def deep(rng, sign):
    count = rng.choice([50, 900, 1100, 100_000])
    return sign * count


PIECES = [
    lambda rng: rng.randbytes(rng.randint(1, 20)),
    lambda rng: rng.choice(
        [
            b"\x00",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\xf0\x9f",
            b"\xc3",
            b"\xe2\x80\xa8",
            b"\x1b[2J",
            b"\r",
            b"\xef\xbb\xbf",
        ]
    ),
    lambda rng: rng.choice(
        [
            b"\\ud800",
            b"\\u0000",
            b'"\\ud83d"',
            b"\\",
            b'"',
            b"'",
            b'"""',
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b":",
            b"=",
            b"\n",
            b"\t",
            b";",
            b"#",
            b".",
        ]
    ),
    lambda rng: rng.choice(
        [
            b"1" * 5000,
            b"-" + b"9" * 400,
            b"1e999",
            b"-1e999",
            b"NaN",
            b"Infinity",
            b"-Infinity",
            b"0x10",
            b"1e-400",
            b"00",
            b"1_0",
            b"nan",
            b"inf",
        ]
    ),
    lambda rng: rng.choice(
        [
            b"true",
            b"false",
            b"null",
            b"[]",
            b"{}",
            b'""',
            b'"x"',
            b"[1, 2]",
            b'{"a": 1}',
            b"1979-05-27",
            b"25:61:00",
            b"2024-02-30",
        ]
    ),
    lambda rng: deep(rng, rng.choice([b"[", b'{"a":', b"[[", b"a.", b"(", b'["'])),
]
DAMAGE = [
    flip_bits,
    flip_bits,
    flip_bits,
    truncate,
    delete,
    duplicate,
    swap,
    insert,
    insert,
    replace_value,
    replace_value,
    swap_lines,
    empty,
]


def damaged(rng, content):
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        content = rng.choice(DAMAGE)(rng, content or b"x")
    return content


def ends_in_a_sentence(action):
    """What an action returns, or None if it raises a UserError, whose message must be a sentence."""
    try:
        return action()
    except UserError as mistake:
        told = str(mistake)
        if not told.strip():
            pytest.fail("an error without a message")
        return None


# What is damaged, and what must be true afterwards


class Case:
    """A kind of file: ``made`` writes it once, ``look`` is called with the folder after one of its files was damaged."""

    names: tuple[str, ...]
    count: int

    def __init__(self, folder):
        self.folder = folder
        self.make(folder)
        self.sound = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def restore(self):
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_file() and path.relative_to(self.folder) not in self.sound:
                path.unlink()
        for name, content in self.sound.items():
            path = self.folder / name
            if not path.is_file() or path.read_bytes() != content:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


class Recipes(Case):
    names = ("own.toml",)
    count = 2500

    def make(self, folder):
        text = recipe.dump(recipe.load("demo", ["data.prefix=summarise: é", 'train.report_to=["tensorboard"]']))
        (folder / "own.toml").write_text('base = "xsum"\n' + text, encoding="utf-8")

    def look(self, folder, name):
        settings = ends_in_a_sentence(lambda: recipe.load(str(folder / name)))
        if settings is not None:  # legal, so it must be what its own text says
            again = folder / "again.toml"
            again.write_text(recipe.dump(settings), encoding="utf-8")
            assert recipe.differences(recipe.load(str(again)), settings) == []
        ends_in_a_sentence(lambda: provenance.run(folder))


DOCUMENTS = [
    {
        "id": str(number),
        "document": f"Profits at Acme rose {number} per cent. Ann said “so”; 日本.",
        "summary": f"Acme, up {number}: “so”.",
    }
    for number in range(8)
]


class DataSets(Case):
    names = ("data.jsonl", "data.json", "data.csv", "data.tsv")
    count = 2500

    def make(self, folder):
        import csv

        for name in self.names:
            path = folder / name
            if name.endswith("sv"):
                with path.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.DictWriter(file, DOCUMENTS[0], delimiter="\t" if name.endswith(".tsv") else ",")
                    writer.writeheader()
                    writer.writerows(DOCUMENTS)
            elif name.endswith("l"):
                path.write_text(
                    "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in DOCUMENTS), encoding="utf-8"
                )
            else:
                path.write_text(json.dumps(DOCUMENTS, ensure_ascii=False, indent=1), encoding="utf-8")

    def look(self, folder, name):
        path = folder / name
        split = ends_in_a_sentence(lambda: load(str(path), "train"))
        some = ends_in_a_sentence(lambda: load(str(path), "train", on_bad_row="skip"))
        assert split is None or (some is not None and split.examples == some.examples)
        for example in some.examples if some is not None else []:
            assert all(isinstance(text, str) and text.strip() and text.encode() for text in example[:3])
        if name == "data.jsonl":  # nothing is read but what a line says
            said = [[*row.values()] for line in path.read_bytes().split(b"\n") for row in parsed(line)]
            assert all(
                any(example.source in row and example.target in row for row in said)
                for example in (some.examples if some else [])
            )
        ids = [example.id for example in some.examples] if some is not None else []
        assert len(set(ids)) == len(ids)
        for what in ("reference", "document", "prediction"):
            ends_in_a_sentence(lambda what=what: read_texts(path, what))


def parsed(line):
    try:
        row = json.loads(line.decode("utf-8-sig", "surrogateescape"))
    except (ValueError, RecursionError):
        return []
    return [row] if isinstance(row, dict) else []


class TokenCaches(Case):
    count = 600
    examples = tuple(Example(row["id"], row["document"], row["summary"]) for row in DOCUMENTS)

    def make(self, folder):
        self.tokenizer = tiny_tokenizers.ours()
        self.print = fingerprint(self.examples)
        tokens = self.tokens(folder)
        self.rows = self.listed(tokens)
        self.names = tuple(str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())

    def tokens(self, folder):
        return tokenise(self.examples, self.print, self.tokenizer, Shape(splitter="period"), cache=folder)

    def listed(self, tokens):
        return [
            [row["input_ids"].tolist(), row["labels"].tolist()] for row in (tokens[at] for at in range(len(tokens)))
        ]

    def look(self, folder, name):
        changed = (folder / name).read_bytes() != self.sound[Path(name)]
        with logged() as said:
            tokens = self.tokens(folder)
        assert self.listed(tokens) == self.rows
        assert tokens.lengths.tolist() == [len(ids) for ids, _ in self.rows]
        if changed and name.endswith(".npy"):
            assert len(said) == 1, "a damaged cache was used"
            assert Path(name).name in said[0]


class Checkpoints(Case):
    names = ("checkpoint-2/whole.json", "checkpoint-2/model.safetensors")
    count = 1000

    def make(self, folder):
        for step in (1, 2):
            path = folder / f"checkpoint-{step}"
            path.mkdir()
            (path / "model.safetensors").write_bytes(np.arange(300).tobytes())
            (path / "trainer_state.json").write_text('{"global_step": 2}')
            checkpoints.seal(path, step=step, best_step=1, best=0.25, finished=step == 2)

    def look(self, folder, name):
        found = checkpoints.find(folder)
        assert found.newest in (folder / "checkpoint-1", folder / "checkpoint-2")
        facts = checkpoints.facts(found.newest)
        assert (facts["best_step"], facts["best"], facts["finished"]) == (1, 0.25, found.newest.name == "checkpoint-2")
        sound = (folder / name).read_bytes() == self.sound[Path(name)]
        assert found.newest.name == "checkpoint-2" or not sound
        assert sound or name.endswith(".json") or found.newest.name == "checkpoint-1"


class Scores(Case):
    """A run's folder with saved scores: they are used if they are whole, and computed again otherwise."""

    names = ("scores.json", "scores.jsonl")
    count = 1200

    def make(self, folder):
        rows = [{"id": row["id"], "reference": row["summary"], "document": row["document"]} for row in DOCUMENTS]
        (folder / "references.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        texts = [{"id": row["id"], "prediction": row["document"][:30], "tokens": 9} for row in DOCUMENTS]
        (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
        (folder / "recipe.toml").write_text('objective = "ce"\n[train]\nseed = 1\n')
        (folder / "generation.json").write_text(
            json.dumps({"model": "m", "generation": {"num_beams": 2, "max_length": 20}, "versions": {"ngramloss": "1"}})
        )
        (folder / "log.jsonl").write_text(
            "".join(json.dumps({"step": step, "loss": 1.5, "docs_per_second": 2.0}) + "\n" for step in range(3))
        )
        self.result = self.scored(folder)
        self.keyed = score_cache.read(folder, *self.inputs(folder)).metrics
        assert self.keyed

    def scored(self, folder):
        return results.score_systems(scored_texts.align(None, [folder]), ["chrf", "shape"], samples=2, shuffles=0)

    def inputs(self, folder):
        texts = scored_texts.align(None, [folder])
        return texts.task.ids, texts.texts[0]

    def look(self, folder, name):
        ids, texts = self.inputs(folder)
        kept, _, damage = score_cache.read(folder, ids, texts)
        assert kept in ({}, self.keyed), "scores were believed that nobody computed"
        changed = (folder / name).read_bytes() != self.sound[Path(name)]
        if changed and name == "scores.jsonl":
            assert kept == {}
        assert (kept == {}) == bool(damage)
        if random.Random(len(kept) + changed).random() < 0.2:
            again = self.scored(folder)
            assert same(again.documents, self.result.documents)


def same(one, other):
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


class Folders(Scores):
    """The other files of a run's folder, which people and other tools write."""

    names = ("recipe.toml", "generation.json", "log.jsonl", "predictions.jsonl", "references.jsonl")
    count = 1700

    def look(self, folder, name):
        run = ends_in_a_sentence(lambda: provenance.run(folder))
        if run is not None:
            provenance.written_by(run)
        provenance.docs_per_second(folder)
        provenance.token_counts(folder)
        whole_rows(folder / name)
        texts = ends_in_a_sentence(lambda: scored_texts.align(None, [folder]))
        if texts is not None and run is not None:
            found = ends_in_a_sentence(lambda: results.score_systems(texts, ["shape"], samples=2, shuffles=0))
            assert found is None or len(found.documents[0]["words"]) == len(texts.task.ids)


class Commands(Scores):
    """The same through the command line, where an error that is no sentence prints a traceback."""

    names = (
        "recipe.toml",
        "generation.json",
        "predictions.jsonl",
        "references.jsonl",
        "scores.json",
        "scores.jsonl",
        "log.jsonl",
    )
    count = 500

    def look(self, folder, name):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.main(["score", str(folder), "--metrics", "shape", "--json", "--samples", "2", "--shuffles", "0"])
        assert code in (0, 2), err.getvalue()
        assert "Traceback" not in err.getvalue(), err.getvalue()
        assert code == 0 or err.getvalue().startswith("error: ")
        assert code or json.loads(out.getvalue())["systems"]


KINDS = {kind.__name__: kind for kind in (Recipes, DataSets, TokenCaches, Checkpoints, Scores, Folders, Commands)}
ASKED = os.environ.get("FUZZ", "")


def run_cases(kind, folder, seeds):
    case = KINDS[kind](folder)
    failures = []
    for seed in seeds:
        rng = random.Random(f"{kind}:{seed}")
        name = rng.choice(case.names)
        case.restore()
        (folder / name).write_bytes(damaged(rng, case.sound[Path(name)]))
        try:
            case.look(folder, name)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            failures.append(
                f"FUZZ={kind}:{seed} ({name}): {type(error).__name__}: {str(error)[:300]} at {Path(last.filename).name}:{last.lineno}"
            )
    return failures


@pytest.fixture(autouse=True)
def _little_memory():
    """A file that takes gigabytes is a failure, not the end of the machine."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_damaged_files_end_in_a_sentence_or_a_right_result(kind, tmp_path):
    asked = [int(ASKED.partition(":")[2])] if ASKED.startswith(f"{kind}:") else []
    assert run_cases(kind, tmp_path, asked or range(20)) == []


PARTS = 10


@pytest.mark.fuzz
@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind in KINDS for part in range(PARTS)])
def test_ten_thousand_damaged_files_end_in_a_sentence_or_a_right_result(kind, part, tmp_path):
    count = KINDS[kind].count // PARTS
    assert run_cases(kind, tmp_path, range(part * count, (part + 1) * count)) == []


def test_ten_thousand_are_ten_thousand():
    assert sum(kind.count for kind in KINDS.values()) >= 10_000
    assert all(kind.count % PARTS == 0 for kind in KINDS.values())
