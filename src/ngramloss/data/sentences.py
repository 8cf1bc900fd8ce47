"""a text → its sentences, in order; only white space is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from ngramloss.data.languages import AUTO, checked_language, language_of, letters, name_of
from ngramloss.data.rows import needed
from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.recipe import Data

Part = TypeVar("Part")
Found = TypeVar("Found")
IN_PROCESS = 200
"""Fewer texts than this are split in this process: starting others would take longer."""

CHUNK = 50
"""Number of texts passed to a process at a time."""

_CLOSING = r"[\"'”’»)\]」』）】》]*"
_ENDING = re.compile(rf"(?<=[.!?…۔؟।॥։።፧။។៕།]){_CLOSING}\s+|(?<=[。！？｡])(?![。！？｡…]){_CLOSING}\s*")
"""The end of a sentence in any script. After full-width marks there is no space."""
ENDINGS = ". ! ? 。 ।"  # Some of the marks that end a sentence, for messages
ACCENTED = 0.005  # From this share of letters other than a to z on, a text in Latin letters is probably not English


LONGEST = 20_000
"""Maximum characters of a line that pysbd gets at a time."""

RULES = ("sentencex", "pysbd")  # The splitters that have rules by language
_SENTENCEX = "am ar bg bn ca da de el en es fi fr gu hi hy it ja kk kn ml mr my nl pa pl pt ru sk ta te uk zh"
"""Languages with rules of their own in sentencex, which does not list them; for Chinese, marks are enough."""
_NOT_SENTENCEX = ("bo", "km")  # Languages whose marks sentencex does not know
_OPENED = re.compile(r"""(?<=\s)["'“‘„«(\[]+$""")
_CLOSED = re.compile(r"""["'”’»)\]]+(?=\s|$)""")
"""Quotes and brackets at the end of a piece that belong to the next, and at its beginning that belong to the last."""


def sentences(text: str, splitter: str = "pysbd", *, language: str = AUTO) -> list[str]:
    """Split a text into sentences, without empty ones. No splitter loses or changes characters except white space.

    * ``sentencex``: the package's rules, line by line. Quotes that it cuts off are joined to their sentence.
    * ``pysbd``: hundreds of times slower. It may lose or repeat characters, or fail; such a line is split after marks.
      In tokenised text it reads the apostrophe of `` 's`` as an opening quote, and returns whole paragraphs.
    * ``newline``: one sentence per line, as in CNN/DailyMail's highlights.
    * ``period``: after each full stop, which is how the paper's authors counted sentences of documents.

    ``language``: two letters, or ``auto`` by script. Without rules, texts are split at marks of any script.

    >>> sentences("Dr. Who left. He came back!")
    ['Dr. Who left.', 'He came back!']
    >>> sentences("Dr. Who left. He came back!", "period")
    ['Dr.', 'Who left.', 'He came back!']
    >>> sentences('"It is late," said Mr. Fox. "Go home." He left.', "sentencex")
    ['"It is late," said Mr. Fox.', '"Go home."', 'He left.']
    """
    if splitter not in SPLITTERS:
        raise UserError(f"unknown splitter {splitter!r}; choose from {list(SPLITTERS)}.")
    checked_language(language)
    return [piece for piece in (piece.strip() for piece in SPLITTERS[splitter](text, language)) if piece]


def split_many(
    texts: Sequence[str],
    splitter: str = "pysbd",
    *,
    language: str = AUTO,
    processes: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[str]]:
    """Split many texts into sentences, with several processes for pysbd: it splits only about 300 short texts a second.

    They are spawned, so a script that calls this needs ``if __name__ == "__main__":``. ``progress`` is called with the
    number of texts done since the last call.
    """
    split = partial(sentences, splitter=splitter, language=language)
    split("")  # a wrong splitter or a missing package fails here, once
    chunks = [texts[start : start + CHUNK] for start in range(0, len(texts), CHUNK)]
    by_text: list[list[str]] = []
    for chunk in in_processes(partial(_each, split), chunks, _workers(len(texts), splitter, processes)):
        by_text += chunk
        if progress:
            progress(len(chunk))
    return by_text


def split_documents(texts: Sequence[str], data: Data) -> list[list[str]]:
    """The sentences of each text, as ``data.splitter`` finds them, with their progress."""
    with Progress("splitting sentences", total=len(texts), unit="documents") as progress:
        return split_many(texts, data.splitter, language=data.language, progress=progress.update)


def note_splitting(texts: Sequence[str], data: Data) -> None:
    """Log what ``data.splitter`` does not know about the language of texts."""
    for note in splitting_notes(texts[:LOOKED_AT], data.splitter, data.language, "--set data.language"):
        logger.info(note)


def _workers(count: int, splitter: str, processes: int | None) -> int:
    from multiprocessing import parent_process

    if processes is not None and processes < 1:
        raise UserError(f"processes must be 1 or more, or None for all processors, got {processes}.")
    if splitter != "pysbd" or count < IN_PROCESS or parent_process():
        return 1
    return processes or processors()


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_processes(function: Callable[[Part], Found], parts: Iterable[Part], workers: int) -> Iterator[Found]:
    """What a function returns for each part, in order, by this many processes; 1: by this one."""
    if workers == 1:
        yield from map(function, parts)
        return
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    try:
        with _ctrl_c_blocked():
            futures = [pool.submit(function, part) for part in parts]
        for future in futures:
            yield future.result()
    except BaseException:  # Ctrl-C: an orderly shutdown of a pool that is still starting may never end
        for process in list(pool._processes.values()):
            process.kill()
        raise
    finally:
        pool.shutdown(wait=False)


@contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """Delay Ctrl-C until the block ends. Processes started in the block inherit the mask and never get it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _each(split: Callable[[str], list[str]], texts: Sequence[str]) -> list[list[str]]:
    return [split(text) for text in texts]


LOOKED_AT = 1000
"""Number of texts of a data set that are read for notes."""


def splitting_notes(texts: Sequence[str], splitter: str, language: str, option: str) -> list[str]:
    """Sentences about languages without rules in the splitter, and about Latin letters that are hardly English."""
    if splitter not in RULES:
        return []
    checked_language(language)
    by_language: dict[str, list[str]] = {}
    for text in texts:
        by_language.setdefault(language_of([text]) if language == AUTO else language, []).append(text)
    found = []
    for code, some in by_language.items():
        if not (code in _SENTENCEX.split() if splitter == "sentencex" else _segmenter(code)):
            found.append(
                f"{splitter} has no rules for {name_of(code)}: {len(some):,} of {len(texts):,} texts are "
                f"split at line ends and after {ENDINGS} and the like."
            )
    if language == AUTO and letters(by_language.get("en", [])).share_not_ascii >= ACCENTED:
        found.append(
            "sentences are split by the rules of English, but some texts seem to be in another language. Name it, "
            f"for example {option}=de."
        )
    return found


def _by_sentencex(text: str, language: str) -> Iterator[str]:
    segment = needed("sentencex", "splitting sentences by rules", "hf").segment
    code = language_of([text]) if language == AUTO else language
    for line in text.splitlines():
        if code in _NOT_SENTENCEX:
            yield from _by_endings(line)
        elif line and not line.isspace():
            yield from _quotes_joined(_line_by_rules(line, partial(segment, code)))


def _quotes_joined(pieces: list[str]) -> list[str]:
    """Move quotes and brackets across boundaries that are not at white space: ``said. "`` and ``No.`` are wrong."""
    for index in range(1, len(pieces)):
        before, after = pieces[index - 1 : index + 1]
        if before[-1:].isspace() or after[:1].isspace():
            continue
        if opened := _OPENED.search(before):
            pieces[index - 1 : index + 1] = before[: opened.start()], opened[0] + after
        elif closed := _CLOSED.match(after):
            pieces[index - 1 : index + 1] = before + closed[0], after[closed.end() :]
    return pieces


def _by_rules(text: str, language: str) -> Iterator[str]:
    segmenter = _segmenter(language_of([text]) if language == AUTO else language)
    for line in text.splitlines():
        for piece in _pieces(line):
            if piece.strip():
                yield from _line_by_rules(piece, segmenter.segment) if segmenter else _by_endings(piece)


def _segmenter(language: str) -> Any:
    pysbd = needed("pysbd", "splitting sentences by rules", "metrics")
    try:
        return pysbd.Segmenter(language=language, clean=False, char_span=False)
    except ValueError:
        return None


def _pieces(line: str) -> Iterator[str]:
    """Cut a very long line into pieces that end with a sentence, or else a word: pysbd takes quadratic time."""
    while len(line) > LONGEST:
        ends = [match.end() for match in _ENDING.finditer(line[:LONGEST])]
        cut = ends[-1] if ends else line[:LONGEST].rfind(" ") + 1 or LONGEST
        yield line[:cut]
        line = line[cut:]
    yield line


def _line_by_rules(line: str, segment: Callable[[str], list[str]]) -> list[str]:
    try:
        pieces = [str(piece) for piece in segment(line)]
    except Exception:  # pysbd builds regular expressions from the text's own characters, so any error may occur
        return _by_endings(line)
    return pieces if "".join("".join(pieces).split()) == "".join(line.split()) else _by_endings(line)


def _by_endings(line: str) -> list[str]:
    ends = [0, *(match.end() for match in _ENDING.finditer(line)), len(line)]
    return [line[start:end] for start, end in pairwise(ends)]


SPLITTERS: dict[str, Callable[[str, str], Iterable[str]]] = {
    "sentencex": _by_sentencex,
    "pysbd": _by_rules,
    "newline": lambda text, language: text.splitlines(),
    "period": lambda text, language: re.findall(r"[^.]*\.|[^.]+", text),
}
"""Name of a splitter → its function."""
