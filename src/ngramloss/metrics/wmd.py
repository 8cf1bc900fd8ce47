"""references and predictions → Word Mover's Distance of each document, 0 and up; lower is better."""

from __future__ import annotations

import gzip
import math
import os
import re
import sys
import unicodedata
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ngramloss.errors import UserError
from ngramloss.metrics.scores import (
    Absent,
    Scores,
    check_lengths,
    fingerprint,
    reference_count,
    reference_facts,
    signature,
)
from ngramloss.version import __version__

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[Any]

# English function words: articles, pronouns, prepositions, conjunctions, auxiliaries, and the parts of contractions and
# possessives at their apostrophe. Shorter than the SMART list (571 words) of Kusner et al.
ENGLISH = frozenset(
    re.findall(
        r"\w+",
        "a about above after again against all also although am an and any are as at be because been before being "
        "below between both but by can could d did do does doing down during each either few for from further had "
        "has have having he her here hers herself him himself his how i if in into is it its itself just ll m may "
        "me might more most must my myself neither no nor not of off on once only or other our ours ourselves out "
        "over own re s same shall she should so some such t than that the their theirs them themselves then there "
        "these they this those though through to too under until up upon us ve very was we were what when where "
        "whether which while who whom whose why will with would you your yours yourself yourselves",
    )
)
FORMATS = (".txt", ".vec", ".bin")
LONGEST_WORD = 1 << 16  # bytes; a longer word means that the file is not a vector file
LONGEST_LINE = 1 << 24  # bytes, likewise
MOST_DIMENSIONS = 1 << 16
MOST_PAIRS = 10**8  # of words; a tenth of it took 5 seconds and half a gigabyte
BACKENDS = {"torch": "PYTORCH", "jax": "JAX", "cupy": "CUPY", "tensorflow": "TENSORFLOW"}  # package → POT's switch
Bag = Mapping[str, int]


def wmd(
    references: Sequence[Sequence[str]],
    predictions: Sequence[str],
    *,
    vectors: Path,
    stop_words: str = "none",
    normalise: bool = True,
    limit: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Word Mover's Distance of each document, and the percentage of known words, as docs/metrics.md defines them.

    Weight that a word has on both sides is not moved: for a metric this is always optimal. So equal bags of words have
    a distance of exactly 0. Cost grows a little faster than the square of the number of different words.

    ``vectors`` is streamed: only vectors of words that occur are kept.
    """
    refs = reference_count(references)
    check_lengths(references=references, predictions=predictions)
    ot = _transport()
    stopped = ENGLISH if stop_words == "english" else frozenset[str]()
    documents = [
        (_bag(prediction, stopped), [_bag(text, stopped) for text in texts])
        for prediction, texts in zip(predictions, references, strict=True)
    ]
    wanted = {word for prediction, golds in documents for bag in (prediction, *golds) for word in bag}
    known, dimensions = read_vectors(Path(vectors), wanted, normalise=normalise, limit=limit)

    values: dict[str, list[float]] = {"wmd": [], "wmd_known": []}
    for number, (prediction, golds) in enumerate(documents, 1):
        bags = [{word: count for word, count in bag.items() if word in known} for bag in (prediction, *golds)]
        distances = [_distance(bags[0], bag, known, ot, f"document {number}") for bag in bags[1:] if bags[0] and bag]
        words = sum(sum(bag.values()) for bag in (prediction, *golds))
        values["wmd"].append(min(distances, default=math.nan))
        values["wmd_known"].append(100 * sum(sum(bag.values()) for bag in bags) / max(1, words))
        if progress:
            progress(1)
    return Scores(
        values,
        signature(
            "wmd",
            vectors=Path(vectors).name,
            files=fingerprint([Path(vectors)]),
            dimensions=dimensions,
            words="lower",
            stop=stop_words,
            normalised=normalise,
            limit=limit or "no",
            **reference_facts(refs, "nearest"),
            pot=ot.__version__,
            version=__version__,
        ),
    )


def words(text: str) -> list[str]:
    """Runs of letters, digits and marks, in lower case.

    >>> words("Don't stop, Zoë: 3rd half_time!")
    ['don', 't', 'stop', 'zoë', '3rd', 'half', 'time']
    """
    return _word().findall(unicodedata.normalize("NFC", text.lower()))


@cache
def _word() -> re.Pattern[str]:
    marks = "".join(sign for sign in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(sign)[0] == "M")
    return re.compile(rf"[^\W_](?:[^\W_]|[{marks}])*")  # \w alone would cut Hindi at each vowel sign


def _bag(text: str, stopped: frozenset[str]) -> Bag:
    return Counter(word for word in words(text) if word not in stopped)


def _transport() -> Any:
    """The package POT. Its environment switches keep it from importing every installed array library."""
    switches = [f"POT_BACKEND_DISABLE_{name}" for package, name in BACKENDS.items() if package not in sys.modules]
    added = [switch for switch in switches if switch not in os.environ]
    os.environ.update(dict.fromkeys(added, "1"))
    try:
        import ot  # type: ignore[import-untyped]
    except ImportError as error:
        raise Absent(f"wmd needs numpy and POT ({error}): pip install 'ngramloss[metrics]'.") from None
    finally:
        for switch in added:
            del os.environ[switch]
    return ot


def _distance(prediction: Bag, reference: Bag, vectors: Mapping[str, Vector], ot: Any, place: str) -> float:
    """The distance of two bags of words. Frequencies are compared as integers, so that equal ones cancel exactly."""
    import numpy
    from scipy.spatial.distance import cdist

    size, other_size = sum(prediction.values()), sum(reference.values())
    surplus = {
        word: prediction.get(word, 0) * other_size - reference.get(word, 0) * size
        for word in sorted({*prediction, *reference})
    }
    sources = [word for word, count in surplus.items() if count > 0]
    targets = [word for word, count in surplus.items() if count < 0]
    if not sources:
        return 0.0
    if len(sources) * len(targets) > MOST_PAIRS:
        raise UserError(
            f"wmd: {place} would move {len(sources):,} different words to {len(targets):,}, more than "
            f"{MOST_PAIRS:,} pairs. Shorten its texts."
        )
    moved = sum(surplus[word] for word in sources)
    costs = cdist(numpy.stack([vectors[word] for word in sources]), numpy.stack([vectors[word] for word in targets]))
    shares = [numpy.array([abs(surplus[word]) / moved for word in side]) for side in (sources, targets)]
    cost, report = ot.emd2(*shares, costs, numItermax=100_000_000, log=True)
    if report["warning"] or not math.isfinite(cost):
        raise UserError(
            f"wmd: {place}: optimal transport of {len(sources)} to {len(targets)} words was not solved: "
            f"{report['warning'] or cost}."
        )
    return float(cost) * moved / (size * other_size)


def read_vectors(
    path: Path, wanted: set[str], *, normalise: bool = False, limit: int = 0
) -> tuple[dict[str, Vector], int]:
    """The vectors of the wanted words in fp64, the first of each, and their dimensions.

    A damaged file raises an error with the line or vector: too few or too many numbers, a value that is not a number,
    or fewer vectors than announced. Numbers of other words are counted, not parsed.
    """
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in FORMATS:
        raise UserError(
            f"vectors are read from {', '.join(FORMATS)} files (word2vec, GloVe, fastText), also with "
            f".gz, got {path.name!r}. Save them in one of these formats, or rename the file."
        )
    if not path.is_file():
        raise Absent(
            f"wmd needs word vectors, but there is no file {path}. Give word2vec, GloVe or fastText vectors, such as "
            "GoogleNews-vectors-negative300.bin.gz or glove.840B.300d.txt, with --set wmd.vectors=FILE (in Python "
            "vectors=)."
        )
    import numpy

    sought = {word.encode("utf-8", "replace"): word for word in wanted}
    vectors: dict[str, Vector] = {}
    dimensions = 0
    binary = kind == ".bin"
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        try:
            for word, numbers, place in (_binary if binary else _text)(file, path, limit):
                dimensions = dimensions or (len(numbers) // 4 if binary else numbers.count(b" ") + 1)
                if (name := sought.get(word)) is None or name in vectors:
                    continue
                try:
                    vector = numpy.frombuffer(numbers, "<f4") if binary else numpy.array(numbers.split(b" "), "f8")
                except ValueError:
                    vector = numpy.array([math.nan])
                vector = vector.astype("f8")
                with numpy.errstate(all="ignore"):
                    squared_length = vector @ vector  # not finite for NaN, infinite and enormous numbers
                if not numpy.isfinite(squared_length):
                    raise UserError(f"{place}: {dimensions} finite numbers expected after {_shown(word)}.")
                length = float(numpy.linalg.norm(vector))
                vectors[name] = vector / length if normalise and length else vector
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(f"{path} is damaged or incomplete ({error}). Download it again.") from error
    if not dimensions:
        raise UserError(f"{path} contains no vectors.")
    return vectors, dimensions


def _text(file: BinaryIO | gzip.GzipFile, path: Path, limit: int) -> Iterator[tuple[bytes, bytes, str]]:
    """Each word, its numbers and its place, from lines of text."""
    announced = dimensions = read = 0
    for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
        if limit and read == limit:
            return
        place = f"{path}, line {number}"
        if len(line) == LONGEST_LINE:
            raise UserError(f"{place}: longer than {LONGEST_LINE:,} bytes. It is not a text file of vectors.")
        fields = (line.removeprefix(BOM_UTF8) if number == 1 else line).strip()  # fastText ends lines with a space
        if number == 1 and re.fullmatch(rb"\d{1,18} \d{1,18}", fields):
            announced, dimensions = map(int, fields.split())
            continue
        if not fields:
            continue
        gaps = fields.count(b" ")
        dimensions = dimensions or gaps
        word, _, numbers = fields.partition(b" ")
        if not 0 < dimensions <= gaps:
            raise UserError(
                f"{place}: a word and {dimensions or 'its'} numbers expected, with spaces between, got {gaps} after "
                f"{_shown(word)}."
            )
        if gaps > dimensions:  # GloVe has words with spaces, such as `at name@domain.com`
            phrase, *parts = fields.rsplit(b" ", dimensions)
            if all(map(_is_number, phrase.split(b" ")[1:])):
                raise UserError(f"{place}: {dimensions} numbers expected, got more after {_shown(word)}.")
            word, numbers = phrase, b" ".join(parts)
        read += 1
        yield word, numbers, place
    if read < min(announced, limit or announced):
        raise UserError(
            f"{path} announces {announced} vectors and contains {read}: it is incomplete. Download it again."
        )


def _binary(file: BinaryIO | gzip.GzipFile, path: Path, limit: int) -> Iterator[tuple[bytes, bytes, str]]:
    """Each word, its numbers and its place, from word2vec's binary format."""
    header = re.fullmatch(rb"(\d+) (\d+)\s*", file.readline(100))
    if header is None or not 0 < int(header[2]) <= MOST_DIMENSIONS:
        raise UserError(
            f"{path} does not begin with the line `count dimensions` of word2vec's binary files. For a "
            "fastText model use the .vec file instead."
        )
    announced, dimensions = int(header[1]), int(header[2])
    for number in range(1, min(announced, limit or announced) + 1):
        place = f"{path}, vector {number}"
        word = b"".join(islice(iter(partial(file.read, 1), b" "), LONGEST_WORD + 1))
        if len(word) > LONGEST_WORD:
            raise UserError(
                f"{place}: a word and {dimensions} numbers of 4 bytes expected, got no word. It is not a binary file "
                "of word2vec."
            )
        numbers = file.read(4 * dimensions)
        if len(numbers) < 4 * dimensions:
            raise UserError(
                f"{path} announces {announced} vectors and ends within number {number}: it is incomplete. Download it "
                "again."
            )
        yield word.lstrip(b"\n"), numbers, place


def _is_number(field: bytes) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _shown(word: bytes) -> str:
    return repr(word.decode("utf-8", "replace")[:40])
