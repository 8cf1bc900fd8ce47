"""batches of rows → the same rows with a generated text each, for programs that map batches over processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ngramloss.data.columns import FIRST, SOURCES, check_present, found_sources, given_columns, joined, listed
from ngramloss.data.language_codes import column_names
from ngramloss.errors import UserError
from ngramloss.generation.job import Job, job
from ngramloss.models.remote_code import allow_remote_code
from ngramloss.output.console import logger
from ngramloss.storage.files import fingerprint
from ngramloss.storage.run_folder import RunFolder, model_files, weight_files

if TYPE_CHECKING:
    from ngramloss.search.writer import Writer

IMPORTED_BY = os.getpid()  # the process that imported this file. Another one that has it in memory is a fork
_WRITERS: dict[str, Writer] = {}  # the writer that this process has loaded
ROWS = "rows"  # what stands for the name of a data set in the settings of a model that was trained elsewhere


class TextGenerator:
    """Generates a text for each row of a batch, as ``ngramloss generate`` would.

    A callable for ``datasets.map(batched=True)``, Ray Data's ``map_batches`` and Spark's ``mapInPandas``. It contains
    only settings, so it can be pickled and sent to other processes. A process loads the model when it generates its
    first batch, once for all copies. docs/scaling.md has examples.

    Args:
        model: a run's folder, a model's folder or a hub id. Texts for a run are prepared like its training data.
        source: the column with the texts; by default the one with the usual name of the run's data, or of any data.
            The texts of several, with commas between their names, are joined.
        prediction: the name of the new column.
        settings: changes of settings, each ``key=value``, such as ``"generation.num_beams=4"`` or
            ``"generation.engine=hf"``.
        preset: the recipe with the generation settings, as in ``ngramloss generate --preset``.
        batch_size: texts that are generated at a time; 0 means as many as the memory allows.
        device: such as ``"cpu"`` or ``"cuda:1"``; by default the GPU if there is one.
        trust_remote_code: whether code that comes with the model may run.

    Raises:
        UserError: in a call: the column is missing, contains something other than texts, or the new one exists already.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        source: str = "",
        prediction: str = "prediction",
        settings: Sequence[str] = (),
        preset: str | None = None,
        batch_size: int = 0,
        device: str | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        if batch_size < 0:
            raise UserError(f"batch_size must be 0 or more, got {batch_size}.")
        path = Path(model)
        name = str(path.resolve() if path.is_dir() else model)  # other processes may work in other folders
        own = RunFolder(Path(name)).recipe.is_file()
        self._trusts = trust_remote_code
        with allow_remote_code(trust_remote_code):
            self.job = job(name, data=None if own else ROWS, preset=preset, overrides=settings, batch_size=batch_size)
        self.source, self.prediction, self.device = source, prediction, device
        self.weights = _weights(self.job)

    def __repr__(self) -> str:
        return f"TextGenerator({self.job.model!r})"

    def __call__(self, rows: Any) -> Any:
        """The rows with a new column of generated texts. A blank text gets an empty one.

        ``rows``: columns by name, each a list or a NumPy array; or a pandas DataFrame. What is returned is of the same
        kind.
        """
        pandas = sys.modules.get("pandas")  # a caller with a DataFrame has imported it
        is_frame = pandas is not None and isinstance(rows, pandas.DataFrame)
        if not is_frame and not isinstance(rows, Mapping):
            raise TypeError(
                f"TextGenerator takes columns by name, or a pandas DataFrame, got {type(rows).__name__}. "
                'With datasets use batched=True, with Ray Data batch_format="numpy" or "pandas".'
            )
        present = [str(name) for name in (rows.columns if is_frame else rows)]
        if self.prediction in present:
            raise UserError(
                f"the batch has a column {self.prediction!r} already. Name the new one: "
                'TextGenerator(…, prediction="…").'
            )
        columns = self._columns(present)
        parts = [_checked_texts(list(rows[name]), name) for name in columns]
        texts = self._generate([joined(row) for row in zip(*parts, strict=True)], ",".join(columns))
        if is_frame:
            return rows.assign(**{self.prediction: texts})
        return {**rows, self.prediction: _like(rows[columns[0]], texts)}

    def _columns(self, present: Sequence[str]) -> list[str]:
        """The columns with the texts; those of several are joined."""
        data = self.job.data
        given = given_columns(self.source, present)
        for name in given:
            check_present(name, "source", present, "the batch")
        trained = given_columns(data.source, present)
        if given or (trained and all(name in present for name in trained)):
            return given or trained
        of_task = FIRST.get(self.job.task, ((), ()))[0]
        names = list(dict.fromkeys([*column_names(data.source_language), *of_task, *SOURCES]))
        columns = found_sources(names, present)
        if not columns:
            raise UserError(
                f"cannot find the column with the texts. The batch has the columns {listed(present)}, and "
                f"none of them is called {', '.join(names[:-1])} or {names[-1]}. Name it: "
                'TextGenerator(…, source="…").'
            )
        return columns

    def _generate(self, texts: Sequence[str], column: str) -> list[str]:
        rows = [row for row, text in enumerate(texts) if text.strip()]
        written = [""] * len(texts)
        if rows:
            writer = self._writer("" if self.source else column)  # who names a column does not say what it has
            for row, text in zip(rows, writer.best(writer.ids([texts[row] for row in rows])), strict=True):
                written[row] = text
        return written

    def _writer(self, column: str) -> Writer:
        """The writer with its model, loaded once in each process for all copies."""
        key = repr((self.job, self.device, self.weights, column, os.getpid()))
        if key not in _WRITERS:
            _WRITERS.clear()  # the model of another one makes room
            with allow_remote_code(self._trusts):
                _WRITERS[key] = _load(self.job, self.device, self.weights, column)
        return _WRITERS[key]


def _load(work: Job, device: str | None, weights: str | None, column: str) -> Writer:
    """Load the model of a job; a forked process, without its parent's threads, must compute with one."""
    import torch

    if os.getpid() != IMPORTED_BY:
        torch.set_num_threads(1)
    from ngramloss.generation.load_job import load_model, writer_of

    if _weights(work) != weights:
        raise UserError(
            f"the weights or settings in {work.loading.name} have changed since this TextGenerator was made, or this "
            "process cannot read the folder. Use a folder that all machines share."
        )
    writer = writer_of(work, *load_model(work, device=device), has_lines=work.has_lines, column=column)
    if writer.engine.note:
        logger.info(writer.engine.note)
    return writer


def _weights(work: Job) -> str | None:
    """The fingerprint of the model's weights, and of its other files; None for a model of the hub."""
    folder = Path(work.loading.name)
    files = weight_files(folder)
    return " ".join([fingerprint(files), *model_files(folder).values()]) if files else None


def _checked_texts(values: list[Any], column: str) -> list[str]:
    for row, value in enumerate(values):
        if not isinstance(value, str):
            raise UserError(f"row {row} of the batch: {column!r} should be text, got {type(value).__name__}.")
    return values


def _like(column: Any, texts: list[str]) -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.array(texts, dtype=object) if numpy is not None and isinstance(column, numpy.ndarray) else texts
