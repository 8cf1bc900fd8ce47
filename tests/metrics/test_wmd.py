"""Word Mover's Distance against its linear programme and cases by hand; vector files whole and damaged."""

import gzip
import json
import math
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from ngramloss.metrics import wmd as module
from ngramloss.metrics.scores import Absent, reference_count
from ngramloss.metrics.wmd import read_vectors, wmd, words

SQUARE = {"nw": (0, 3), "ne": (4, 3), "sw": (0, 0), "se": (4, 0), "cat": (1, 1), "zoë": (2, 2), "雨": (3, 1)}
RANDOM = {f"w{i}": tuple(row) for i, row in enumerate(np.random.default_rng(0).normal(size=(12, 5)).round(3))}


def text_file(path, vectors, *, header=False, end="\n"):
    lines = [f"{len(vectors)} {len(next(iter(vectors.values())))}"] if header else []
    lines += [" ".join([word, *map(str, vector)]) for word, vector in vectors.items()]
    content = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def binary_file(path, vectors, *, newline=b"\n"):
    dimensions = len(next(iter(vectors.values())))
    content = f"{len(vectors)} {dimensions}\n".encode()
    for word, vector in vectors.items():
        content += word.encode() + b" " + struct.pack(f"<{dimensions}f", *vector) + newline
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture(scope="module")
def square(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("vectors") / "square.txt", SQUARE)


@pytest.fixture(scope="module")
def random_vectors(tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("vectors") / "random.vec", RANDOM, header=True)


def distances(path, references, predictions, **options):
    return wmd(
        [[text] if isinstance(text, str) else text for text in references], predictions, vectors=path, **options
    ).values["wmd"]


def oracle(prediction, reference, vectors, *, normalise):
    """The transport problem as a linear programme over every pair of words, shared words and all."""
    sides = [[word for word in text.split() if word in vectors] for text in (prediction, reference)]
    if not all(sides):
        return math.nan
    names = [sorted(set(side)) for side in sides]
    shares = [[side.count(word) / len(side) for word in those] for side, those in zip(sides, names, strict=True)]

    def vector(word):
        length = math.sqrt(sum(x * x for x in vectors[word])) if normalise else 1.0
        return [x / length for x in vectors[word]]

    costs = [math.dist(vector(a), vector(b)) for a in names[0] for b in names[1]]
    n, m = map(len, names)
    sums = [[float(i == row) for i in range(n) for _ in range(m)] for row in range(n)]
    sums += [[float(j == column) for _ in range(n) for j in range(m)] for column in range(m)]
    return linprog(costs, A_eq=sums, b_eq=[*shares[0], *shares[1]]).fun


TEXTS = st.lists(st.sampled_from([*RANDOM, "unknown"]), max_size=9).map(" ".join)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4), st.booleans())
def test_agrees_with_the_linear_programme(random_vectors, pairs, normalise):
    references, predictions = zip(*pairs, strict=True)
    got = distances(random_vectors, references, predictions, normalise=normalise)
    expected = [oracle(p, r, RANDOM, normalise=normalise) for r, p in pairs]
    assert got == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_distances_by_hand(square):
    got = distances(
        square, ["ne", "sw se", "sw", "nw nw ne sw", "ne sw"], ["sw", "nw ne", "nw ne", "nw", "sw se"], normalise=False
    )
    assert got == pytest.approx([5, 3, (3 + 5) / 2, (0 + 0 + 4 + 3) / 4, 3 / 2])


def test_unit_vectors_by_hand(square):
    assert distances(square, ["nw", "se", "ne"], ["se", "ne", "sw"]) == pytest.approx(
        [math.sqrt(2), math.dist((1, 0), (0.8, 0.6)), 1]
    )  # sw has no length, and stays where it is


def test_equal_bags_are_exactly_0_apart(random_vectors):
    texts = ["w1 w2 w3", "w1 w1 w2 w5 w7 w7 w7", "W3, w2; w1!"]
    assert distances(random_vectors, ["w3 w1 w2", "w7 w5 w7 w2 w1 w7 w1 " * 3, "w1 w1 w2 w2 w3 w3"], texts) == [
        0.0,
        0.0,
        0.0,
    ]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(TEXTS, TEXTS)
def test_it_is_a_distance(random_vectors, one, other):
    there, back = distances(random_vectors, [one, other], [other, one])
    assert there == pytest.approx(back, abs=1e-12, nan_ok=True)
    assert math.isnan(there) or 0 <= there <= 2 + 1e-9


def test_the_order_of_documents_references_and_words_changes_nothing_at_all(random_vectors):
    references = [["w1 w2 w3 w3", "w4"], ["w5 w6 w7"], ["w8 w1", "w2 w2 w9", "unknown"], ["w11"]]
    predictions = ["w2 w4 w5 w0", "w1 w1 w6", "w10 w2 unknown", "nothing"]
    whole = wmd(references, predictions, vectors=random_vectors)
    order = [2, 0, 3, 1]
    moved = wmd(
        [references[i][::-1] for i in order],
        [" ".join(predictions[i].split()[::-1]) for i in order],
        vectors=random_vectors,
    )
    for name in ("wmd", "wmd_known"):
        assert moved.values[name] == pytest.approx([whole.values[name][i] for i in order], abs=0, nan_ok=True)
    assert moved.signature == whole.signature


def test_the_nearest_of_several_references_counts(square):
    assert distances(square, [["ne", "nw", "unknown"], ["unknown", "ne"]], ["sw", "sw"], normalise=False) == [3.0, 5.0]


def test_a_side_without_known_words_has_no_distance(square):
    values = wmd([["cat"], ["unknown"], [""], ["cat"], [""]], ["dog", "cat", "cat", " ", ""], vectors=square).values
    assert all(math.isnan(value) for value in values["wmd"])
    assert values["wmd_known"] == [50.0, 50.0, 100.0, 100.0, 0.0]


def test_the_share_of_known_words_counts_every_text_and_copy(square):
    values = wmd([["cat sat cat", "nw"]], ["a cat a sat"], vectors=square).values
    assert values["wmd_known"] == [pytest.approx(100 * 4 / 8)]


def test_words_are_runs_of_letters_digits_and_marks_in_lower_case(square):
    assert words("ZOE\u0308 Half-time: 3rd_half, हिन्दी 雨") == ["zoë", "half", "time", "3rd", "half", "हिन्दी", "雨"]
    assert words("") == words("— …!") == []
    assert distances(square, ["zoe\u0308", "雨"], ["ZOË!", "«雨»"]) == [0.0, 0.0]


def test_stop_words_are_left_out_before_counting(tmp_path):
    path = text_file(tmp_path / "few.txt", {"the": (0, 9), "cat": (3, 0), "dog": (0, 4), "s": (1, 1)})
    plain = wmd([["the dog's"]], ["The cat"], vectors=path, normalise=False)
    stopped = wmd([["the dog's unknown"]], ["The cat"], vectors=path, stop_words="english", normalise=False)
    assert stopped.values == {"wmd": [5.0], "wmd_known": [pytest.approx(200 / 3)]}
    assert plain.values["wmd"] != stopped.values["wmd"]
    assert "|stop:none|" in plain.signature
    assert "|stop:english|" in stopped.signature
    assert {"the", "t", "yourselves", "a", "not"} <= module.ENGLISH
    assert all(words(word) == [word] for word in module.ENGLISH)


def test_a_very_long_text_is_moved_exactly(random_vectors, tmp_path):
    many = {f"v{i}": tuple(row) for i, row in enumerate(np.random.default_rng(1).normal(size=(600, 3)).round(4))}
    path = text_file(tmp_path / "many.txt", many)
    shift = text_file(
        tmp_path / "shift.txt", {**many, **{f"u{i}": (x + 0.001, y, z) for i, (x, y, z) in enumerate(many.values())}}
    )
    one, other = " ".join(many), " ".join(f"u{i}" for i in range(600))
    assert distances(path, [one * 1 + " v0" * 50_000], ["v0"], normalise=False)[0] > 0
    assert distances(shift, [one], [other], normalise=False)[0] == pytest.approx(0.001, rel=1e-6)


FILES = {
    "plain.txt": text_file,
    "plain.vec": text_file,
    "plain.txt.gz": text_file,
    "plain.vec.gz": text_file,
    "headed.txt": lambda path, vectors: text_file(path, vectors, header=True),
    "fasttext.vec": lambda path, vectors: text_file(path, vectors, header=True, end=" \n"),
    "windows.txt": lambda path, vectors: text_file(path, vectors, end="\r\n"),
    "blank.txt": lambda path, vectors: text_file(path, vectors, end="\n\n"),
    "plain.bin": binary_file,
    "plain.bin.gz": binary_file,
    "tight.bin": lambda path, vectors: binary_file(path, vectors, newline=b""),
}


@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_vectors(tmp_path, name):
    path = FILES[name](tmp_path / name, RANDOM)
    found, dimensions = read_vectors(path, {"w3", "w11", "w0", "absent"})
    assert dimensions == 5
    assert set(found) == {"w0", "w3", "w11"}
    for word, vector in found.items():
        assert vector.dtype == np.float64
        assert vector == pytest.approx(RANDOM[word], abs=1e-6 if ".bin" in name else 0)


def test_non_ascii_words_are_found_in_every_format(tmp_path):
    for make, name in ((text_file, "a.txt"), (binary_file, "a.bin")):
        assert set(read_vectors(make(tmp_path / name, SQUARE), {"zoë", "雨", "\ud800"})[0]) == {"zoë", "雨"}


@pytest.mark.parametrize(("make", "name"), [(text_file, "a.txt"), (binary_file, "a.bin")])
def test_only_as_many_vectors_as_the_limit_are_read(tmp_path, make, name):
    path = make(tmp_path / name, RANDOM)
    assert set(read_vectors(path, set(RANDOM), limit=4)[0]) == {"w0", "w1", "w2", "w3"}
    assert set(read_vectors(path, set(RANDOM), limit=99)[0]) == set(RANDOM)
    assert "|limit:4|" in wmd([["w1"]], ["w2"], vectors=path, limit=4).signature
    assert "|limit:no|" in wmd([["w1"]], ["w2"], vectors=path).signature


def test_the_order_of_words_changes_nothing_at_all(tmp_path):
    generator = np.random.default_rng(3)
    many = {f"v{i}": tuple(row) for i, row in enumerate(generator.normal(size=(90, 3)))}
    path = text_file(tmp_path / "many.txt", many)
    pairs = [(generator.choice(list(many), 40), generator.choice(list(many), 30)) for _ in range(20)]
    once = distances(path, [" ".join(b) for _, b in pairs], [" ".join(a) for a, _ in pairs])
    assert distances(path, [" ".join(b[::-1]) for _, b in pairs], [" ".join(sorted(a)) for a, _ in pairs]) == once


def test_one_dimension_and_words_that_are_numbers(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("2 1\ncat 3\n7 4\n")
    assert {word: vector.tolist() for word, vector in read_vectors(path, {"cat", "7", "2"})[0].items()} == {
        "cat": [3],
        "7": [4],
    }


def test_a_file_is_missed_only_as_far_as_the_limit(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("9 2\na 1 2\nb 3 4\n")
    assert set(read_vectors(path, {"a", "b"}, limit=2)[0]) == {"a", "b"}
    with pytest.raises(ValueError, match="announces 9 vectors and contains 2"):
        read_vectors(path, {"a", "b"}, limit=3)


def test_damage_beyond_the_limit_is_not_met(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("2 2\na 1 2\nb 3\n")
    assert set(read_vectors(path, {"a"}, limit=1)[0]) == {"a"}


def test_the_first_of_two_vectors_of_a_word_counts(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("cat 1 2\ncat 3 4\n")
    assert read_vectors(path, {"cat"})[0]["cat"].tolist() == [1, 2]


def test_a_word_with_spaces_is_not_taken_for_its_first_part(tmp_path):
    path = tmp_path / "glove.txt"
    path.write_bytes(b"in 1 2\nat name@domain.com 3 4\n. . . 5 6\nin 2012 elections 5 6\nno\xc2\xa0break 1 1\nat 7 8\n")
    assert {word: vector.tolist() for word, vector in read_vectors(path, {"in", "at", "no", "name"})[0].items()} == {
        "in": [1, 2],
        "at": [7, 8],
    }


def test_words_that_do_not_occur_are_not_held(tmp_path):
    path = tmp_path / "large.txt"
    row = " 0.125" * 100
    with path.open("w") as file:
        file.writelines(f"w{i}{row}\n" for i in range(20_000))
    tracemalloc.start()
    found, _ = read_vectors(path, {"w7", "w19999"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found) == 2
    assert peak < 1_000_000 < path.stat().st_size


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"cat 1 2\ndog 1\n", r"a\.txt, line 2: a word and 2 numbers expected, with spaces between, got 1 after 'dog'"),
        (b"9 2\ncat 1 2\ndog\n", "line 3: a word and 2 numbers expected, with spaces between, got 0 after 'dog'"),
        (b"cat\t1\t2\n", "line 1: a word and its numbers expected, with spaces between, got 0 after"),
        (b"cat 1 2\ndog 1 2 3\n", r"line 2: 2 numbers expected, got more after 'dog'"),
        (b"cat 1 2\ndog 1 x\n", "line 2: 2 finite numbers expected after 'dog'"),
        (b"cat 1 2\ndog 1 nan\n", "line 2: 2 finite numbers expected after 'dog'"),
        (b"cat 1 2\ndog inf 1\n", "line 2: 2 finite numbers expected after 'dog'"),
        (b"cat 1 2\ndog 1e200 1\n", "line 2: 2 finite numbers expected after 'dog'"),
        (b"cat 1 2\ndog 1  2\n", "line 2: 2 numbers expected, got more after 'dog'"),
        (
            b"2 300\ncat 1 2\ndog 1 2\n",
            "line 2: a word and 300 numbers expected, with spaces between, got 2 after 'cat'",
        ),
        (b"9" * 5000 + b" 2\ncat 1 2\n", "line 2: 1 numbers expected, got more after 'cat'"),
        (
            b"cat 1 2\n" + b"x" * (1 << 24),
            r"a\.txt, line 2: longer than 16,777,216 bytes. It is not a text file of vectors",
        ),
        (b"\x00\x01\x02\xff\n" * 9, "line 1: a word and its numbers expected"),
        (b"3 2\ncat 1 2\ndog 1 2\n", r"a\.txt announces 3 vectors and contains 2: it is incomplete. Download it again"),
        (b"", r"a\.txt contains no vectors"),
    ],
)
def test_a_damaged_text_file_is_refused_with_its_place(tmp_path, content, sentence):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        wmd([["cat"]], ["dog"], vectors=tmp_path / "a.txt")


WHOLE = b"2 2\ncat " + struct.pack("<2f", 1, 2) + b"\ndog " + struct.pack("<2f", 3, 4) + b"\n"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (WHOLE[:-3], r"a\.bin announces 2 vectors and ends within number 2: it is incomplete. Download it again"),
        (WHOLE.replace(b"2 2", b"3 2"), "announces 3 vectors and ends within number 3"),
        (WHOLE[4:], "does not begin with the line `count dimensions`.* For a fastText model use the .vec file"),
        (b"2 0\n", "does not begin with the line `count dimensions`"),
        (b"2 99999999999999\ncat ", "does not begin with the line `count dimensions`"),
        (b"", "does not begin with the line `count dimensions`"),
        (
            WHOLE.replace(struct.pack("<2f", 3, 4), struct.pack("<2f", 3, math.nan)),
            "vector 2: 2 finite numbers expected after 'dog'",
        ),
        (
            b"2 2\n" + b"x" * 70_000,
            "vector 1: a word and 2 numbers of 4 bytes expected, got no word. It is not a binary file of word2vec",
        ),
        (b"2 2\n" + b"x" * 70_000 + WHOLE, "vector 1: a word and 2 numbers of 4 bytes expected, got no word"),
        (b"0 2\n", "contains no vectors"),
    ],
)
def test_a_damaged_binary_file_is_refused_with_its_place(tmp_path, content, sentence):
    (tmp_path / "a.bin").write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        wmd([["cat"]], ["dog"], vectors=tmp_path / "a.bin")


@pytest.mark.parametrize(
    "damage",
    [lambda packed: packed[:-12], lambda packed: packed[:15] + b"\xff\xff" + packed[17:], lambda packed: b"cat 1 2\n"],
)
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage(gzip.compress(b"cat 1 2\ndog 1 2\n" * 9)))
    with pytest.raises(ValueError, match=r"a\.txt\.gz is damaged or incomplete \(.*\). Download it again"):
        wmd([["cat"]], ["dog"], vectors=path)


def test_a_mark_of_utf_8_before_the_first_line_is_no_part_of_it(tmp_path):
    for content in (b"cat 1 2\n", b"1 2\ncat 1 2\n"):
        (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + content)
        assert read_vectors(tmp_path / "a.txt", {"cat"})[0]["cat"].tolist() == [1, 2]


def test_an_absent_file_is_asked_for(tmp_path):
    with pytest.raises(
        Absent,
        match=r"wmd needs word vectors, but there is no file .*none\.txt. Give word2vec, GloVe or fastText vectors, such as .*--set wmd\.vectors=FILE",
    ):
        wmd([["cat"]], ["dog"], vectors=tmp_path / "none.txt")


def test_misuse_gets_a_sentence(square, tmp_path):
    with pytest.raises(ValueError, match=r"read from \.txt, \.vec, \.bin files .* also with \.gz, got 'a\.model\.gz'"):
        wmd([["cat"]], ["dog"], vectors=tmp_path / "a.model.gz")
    with pytest.raises(ValueError, match="lengths differ: 1 references, 2 predictions"):
        wmd([["cat"]], ["dog", "cat"], vectors=square)
    with pytest.raises(
        TypeError,
        match=r"the references of a document must be a list of texts; document 1 has the text 'cat'. Put it in a list",
    ):
        wmd(["cat"], ["dog"], vectors=square)
    with pytest.raises(ValueError, match="document 2 has no reference"):
        wmd([["cat"], []], ["dog", "cat"], vectors=square)


def test_without_pot_it_says_how_to_get_it(square, monkeypatch):
    monkeypatch.setitem(sys.modules, "ot", None)
    with pytest.raises(Absent, match=r"wmd needs numpy and POT .*pip install 'ngramloss\[metrics\]'"):
        wmd([["cat"]], ["dog"], vectors=square)


def test_transport_that_is_not_solved_is_an_error(square, monkeypatch):
    import ot

    for answer, reason in (
        ((0.0, {"warning": "numItermax reached"}), "numItermax reached"),
        ((math.nan, {"warning": None}), "nan"),
    ):
        monkeypatch.setattr(ot, "emd2", lambda *_, answer=answer, **__: answer)
        with pytest.raises(
            ValueError, match=f"wmd: document 2: optimal transport of 1 to 2 words was not solved: {reason}"
        ):
            wmd([["cat"], ["nw ne"]], ["cat", "cat"], vectors=square)


def test_texts_too_long_to_compare_are_named(square, monkeypatch):
    monkeypatch.setattr(module, "MOST_PAIRS", 3)
    assert distances(square, ["nw ne sw"], ["cat"], normalise=False)[0] > 0
    with pytest.raises(
        ValueError, match=r"wmd: document 2 would move 2 different words to 2, more than 3 pairs. Shorten its texts"
    ):
        wmd([["cat"], ["nw ne"]], ["cat", "se sw"], vectors=square)


@pytest.mark.parametrize(
    "text", ["cat\x00nw", "\x1bcat\x7fnw", "cat\ud83dnw", "cat\u202enw\ufeff", "CAT\r\n\v\f\x85nw", "😀cat😀nw😀"]
)
def test_signs_that_are_no_letters_only_part_words(square, text):
    assert words(text) == ["cat", "nw"]
    assert distances(square, ["nw cat"], [text]) == [0.0]


@pytest.mark.slow
def test_a_text_of_a_megabyte_is_compared(square):
    long = "cat nw \x00 zoë! " * 70_000
    assert len(long.encode()) > 1_000_000
    assert distances(square, ["cat nw zoë", long], [long, "zoë nw cat"]) == [0.0, 0.0]
    assert distances(square, ["cat"], ["x" * 1_000_000 + " nw"]) == distances(square, ["cat"], ["nw"])


PROGRAM = """
import os, sys
{before}
from ngramloss import cli
code = cli.main(["score", "--references", "refs.jsonl", "--documents", "docs.jsonl", "mine.jsonl", "--json",
                 "--metrics", "rouge,bleu,chrf,shape,wmd", "--set", "wmd.vectors=vectors.txt"])
switches = [name for name in os.environ if name.startswith("POT_BACKEND")]
print(code, sys.modules.get("torch") is not None, switches, file=sys.stderr)
"""


HIDDEN = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", HIDDEN], ids=["installed", "not installed"])
def test_scoring_by_words_neither_imports_torch_nor_needs_it(tmp_path, before):
    for name, row in (
        ("refs", {"reference": "the cat"}),
        ("docs", {"document": "a cat ran."}),
        ("mine", {"prediction": "a dog"}),
    ):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": "1", **row}))
    text_file(tmp_path / "vectors.txt", {"cat": (1, 2), "dog": (2, 1)})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stderr == "0 False []\n"
    found = json.loads(done.stdout)["systems"][0]["scores"]
    assert {"rouge1", "bleu", "chrf", "words", "wmd"} <= found.keys()


@pytest.mark.slow
def test_pot_is_imported_as_it_would_be_where_torch_is_in_use():
    program = (
        "import os, sys, torch\nos.environ['POT_BACKEND_DISABLE_JAX'] = 'mine'\n"
        "from ngramloss.metrics import wmd\not = wmd._transport()\n"
        "print(float(ot.emd2(torch.ones(1), torch.ones(1), torch.full((1, 1), 3.0))), os.environ['POT_BACKEND_DISABLE_JAX'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["3.0", "mine"], done.stderr


def test_the_signature_says_what_could_change_a_figure(square, tmp_path):
    import ot

    found = wmd([["cat"]], ["nw"], vectors=square).signature
    assert found.startswith("wmd|vectors:square.txt|files:")
    assert f"|dimensions:2|words:lower|stop:none|normalised:yes|limit:no|refs:1|pot:{ot.__version__}|version:" in found
    assert wmd([["cat"]], ["nw"], vectors=text_file(tmp_path / "square.txt", SQUARE)).signature == found
    assert (
        wmd([["cat"]], ["nw"], vectors=text_file(tmp_path / "square.txt", SQUARE | {"cat": (9, 9)})).signature != found
    )
    assert "|normalised:no|" in wmd([["cat"]], ["nw"], vectors=square, normalise=False).signature
    assert [reference_count(of) for of in ([], [["a"]], [["a", "b"]] * 2, [["a"], ["a", "b"]])] == [
        "1",
        "1",
        "2",
        "var",
    ]


def test_progress_counts_each_document_once(square):
    told = []
    assert wmd([["cat"]] * 3, ["nw"] * 3, vectors=square, progress=told.append).values["wmd_known"] == [100.0] * 3
    assert sum(told) == 3
    assert wmd([], [], vectors=square).values == {"wmd": [], "wmd_known": []}
