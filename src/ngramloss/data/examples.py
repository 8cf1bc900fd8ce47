"""the name of a data set and of a split → its examples, checked row by row, and a fingerprint of their content."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from ngramloss.data import data_sets
from ngramloss.data.columns import NO_TARGET, Columns, check_present, columns, joined, listed
from ngramloss.data.messages import ANSWER, ANSWER_WEIGHTS, MESSAGES, are_answered, has_messages, split_messages, spoken
from ngramloss.data.rows import BadRow, RawRow, bad_row_lines, kind_of, text_fault
from ngramloss.errors import UserError
from ngramloss.output.console import logger
from ngramloss.output.progress import Progress
from ngramloss.recipe import Data

LOOKED_AT = 100
"""Number of rows read to find all columns: a JSON object may omit some."""

TRANSLATION = "translation"
"""The column in which data sets of the hub have the same text in several languages: ``{"en": "…", "de": "…"}``."""

ROWS = "examples"
"""What stands for the file of rows that are in memory."""
LARGEST = 1e30
"""Larger weights overflow where they are multiplied in fp32."""


class Example(NamedTuple):
    """A source text and its target, empty if there is none; all references, the target first, if there are several.

    ``weights``, if they were asked for, has a number for each word or each token of the target; of messages a number
    for each answer, the target last.
    """

    id: str
    source: str
    target: str
    references: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()


class Split(NamedTuple):
    """The examples of one split.

    Attributes:
        name: the data set's name, as given by the caller.
        split: "train", "validation", "test" or another name that the data set uses.
        examples: in the order of the file.
        skipped: bad rows that were skipped, if skipping was allowed.
        fingerprint: 16 hexadecimal digits that depend on ids, sources, targets and weights, but not on format or
            compression.
        more: whether there are more rows, which the limit left out.
        column: the name of the column with the sources; several, separated by commas, are joined.
        target_column: that of the targets; empty if there are none.
        unread: columns that were not read, if those that were had to be found.
    """

    name: str
    split: str
    examples: list[Example]
    skipped: list[BadRow]
    fingerprint: str
    more: bool = False
    column: str = ""
    target_column: str = ""
    unread: tuple[str, ...] = ()

    @property
    def has_targets(self) -> bool:
        """Whether the examples have targets: all of them, or none."""
        return any(example.target for example in self.examples[:1])

    @property
    def readable(self) -> list[Example]:
        """The examples with sources as people read them: of messages only what they say."""
        if self.column != MESSAGES:
            return self.examples
        return [example._replace(source=spoken(example.source)) for example in self.examples]


def load(
    name: str,
    split: str,
    *,
    on_bad_row: str = "error",
    limit: int = 0,
    validation_fraction: float = 0.0,
    test_fraction: float = 0.0,
    weights: str | None = None,
    **options: Any,
) -> Split:
    """Read one split of a data set.

    A row is bad if it is malformed, lacks a column, has a text that is null, not a string, blank or not UTF-8, has a
    different number of fields than the header, or repeats an id. Bad rows are reported with file and line.

    Args:
        name: ``newswire`` (built in); ``cnn_dailymail``, ``xsum``, ``samsum``, ``dialogsum``, ``owner/name`` or
            ``owner/name:config`` (from the hub); a file, which is the split ``train``; a folder with a file for each
            split; or ``train=a.jsonl,validation=b.csv,test=c.parquet``.
        split: ``train``, ``validation`` (also ``dev``, ``valid``, ``val``), ``test`` or another name in the data set.
        on_bad_row: ``error`` reports all bad rows at once; ``skip`` skips and lists them.
        limit: maximum number of examples, taken from the beginning; 0 means all.
        validation_fraction: if above 0, ``validation`` is this part of the data set's training split, and ``train``
            the rest. The data set must not have a validation split of its own.
        test_fraction: the same for ``test``. It shares no row with ``validation``.
        weights: the column with a list of numbers, the weights of the target's words or tokens; of messages, the key
            with the weight of an answer. None reads no weights.
        options: which columns are read, see :func:`~ngramloss.data.columns.columns`. The texts of a column
            ``translation`` that has a text by language are columns too. Without ``need_target``, conversations may end
            with a message that is to be answered.

    Raises:
        UserError: bad rows, unknown columns, no rows, a damaged file, an unknown name.
        FileNotFoundError: no such file, no such split, or the hub cannot be reached.
    """
    if on_bad_row not in ("error", "skip"):
        raise UserError(f"on_bad_row must be 'error' or 'skip', got {on_bad_row!r}.")
    if limit < 0:
        raise UserError(f"limit must be 0 (all rows) or more, got {limit}.")
    split = data_sets.SPLIT_ALIASES.get(split, split)
    fractions = {"validation": validation_fraction, "test": test_fraction}
    held_out = {part: fraction for part, fraction in fractions.items() if fraction}
    is_part = bool(held_out) and split in ("train", *held_out)
    for part in held_out if is_part else ():
        if part in data_sets.split_names(name):
            raise UserError(f"{name} has a {part} split of its own. Leave data.{part}_fraction out.")
    whole, most = ("train", 0) if is_part else (split, limit)
    hub = data_sets.origin(name)
    if isinstance(hub, data_sets.Hub):
        options["source"] = options.get("source") or hub.source
        options["target"] = options.get("target") or hub.target
    rows = data_sets.split_rows(name, whole, limit=most)
    found = _read(name, whole, rows, on_bad_row=on_bad_row, limit=most, weights=weights, **options)
    return _part(found, split, held_out, limit) if is_part else found


def from_rows(rows: Iterable[Mapping[str, Any]]) -> Split:
    """The examples of rows in memory, a list of dictionaries or a ``datasets.Dataset``, checked as by :func:`load`.

    Columns have their usual names. Prompts and completions may be lists of messages, as TRL has them.
    """
    numbered = (RawRow(ROWS, number, _in_messages(row)) for number, row in enumerate(rows, 1))
    return _read(ROWS, "validation", numbered)


def _in_messages(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row with one list of messages, if its prompt and completion are such lists."""
    prompt, completion = row.get("prompt"), row.get(ANSWER)
    if not isinstance(prompt, list) or not isinstance(completion, list):
        return row
    others = {name: value for name, value in row.items() if name not in ("prompt", ANSWER)}
    return {**others, MESSAGES: [*prompt, *completion]}


def _read(
    name: str,
    split: str,
    rows: Iterator[RawRow | BadRow],
    *,
    on_bad_row: str = "error",
    limit: int = 0,
    weights: str | None = None,
    **options: Any,
) -> Split:
    rows = map(_by_language, rows)
    first = _first_rows(rows)
    source, target, need_target = options.get("source"), options.get("target"), options.get("need_target", True)
    given = source is not None and target is not None
    examples: list[Example] = []
    more, read = False, dict[str, Any]()
    dropped: dict[str, None] = {}
    bad = [row for row in first if isinstance(row, BadRow)]
    if len(bad) < len(first):
        present = list(dict.fromkeys(column for row in first if isinstance(row, RawRow) for column in row.values))
        if has_messages(present, source, target):
            answered = need_target or are_answered(first)
            split_row = partial(split_messages, weight=weights, dropped=dropped, answered=answered)
            first, rows = [split_row(row) for row in first], map(split_row, rows)
            options["source"], options["target"] = MESSAGES, ANSWER if answered else NO_TARGET
            present += [ANSWER] * answered
            weights = weights and ANSWER_WEIGHTS
        elif weights:
            check_present(weights, "weights", present, first[0].file)
        choose: Callable[..., Columns] = partial(columns, **options)
        chosen, late = choose(present, first[0].file), dict[str, None]()
        every = _with_known_columns(chain(first, rows), present, chosen, choose, late)
        with Progress(f"reading {split}", total=limit or None, unit="rows") as progress:
            examples, bad = _separate(_examples(every, chosen, weights), limit, progress)
        more = len(examples) == limit and next(every, None) is not None
        unread = [] if given and chosen.target else [*present, *late]
        used = {chosen.source, *chosen.more, chosen.target, *chosen.others, chosen.id, weights}
        read = {
            "column": ",".join([chosen.source, *chosen.more]),
            "target_column": chosen.target or "",
            "unread": tuple(
                key for key in [*unread, *(f"{key} of the messages" for key in dropped)] if key not in used
            ),
        }
        if "weight" in dropped and split == "train":
            logger.warning(
                f"messages of {name} have the key weight, which is ignored: every answer has the weight 1. To read "
                "it, set data.weights=weight."
            )
    if bad and (on_bad_row == "error" or not examples):
        may_skip = on_bad_row == "error" and name != ROWS
        raise UserError(_complaint(name, split, bad, len(bad) + len(examples), may_skip=may_skip)).on_page("rows")
    if not examples:
        raise UserError(f"the split {split!r} of {name} has no rows. Expected at least one example.")
    return Split(name, split, examples, bad, fingerprint(examples), more, **read)


def _with_known_columns(
    rows: Iterable[RawRow | BadRow],
    present: Sequence[str],
    chosen: Columns,
    choose: Callable[..., Columns],
    late: dict[str, None],
) -> Iterator[RawRow | BadRow]:
    """The rows; ``late`` gets columns that the first rows do not have. Raises at one that would have been chosen."""
    known = {*present, ANSWER_WEIGHTS}
    for row in rows:
        if isinstance(row, RawRow) and not row.values.keys() <= known:
            fresh = [name for name in row.values if name not in known]
            if choose([*present, *late, *fresh], row.file) != chosen:
                raise UserError(
                    f"{row.file}:{row.line} has {listed(fresh)}, which the first {LOOKED_AT} rows lack, so it is "
                    "unclear what to read. Name the columns: data.source, data.target, --source and --target."
                ).on_page("columns")
            known.update(fresh)
            late.update(dict.fromkeys(fresh))
        yield row


def columns_of(data: Data, task: str) -> dict[str, Any]:
    """The arguments of :func:`load` that say which columns to read, from a recipe."""
    return {
        "source": data.source or None,
        "target": data.target or None,
        "id": data.id or None,
        "languages": (data.source_language, data.target_language),
        "task": task,
    }


def has_split(data: Data, split: str) -> bool:
    """Whether a recipe's data have this split, of their own or held out; no if that cannot be found out."""
    if {"train": 1.0, "validation": data.validation_fraction, "test": data.test_fraction}.get(split):
        return True
    if data_sets.canonical(data.name) in data_sets.KNOWN:  # all of them have all three
        return split in ("validation", "test")
    try:
        return split in data_sets.split_names(data.name)
    except (UserError, FileNotFoundError):  # the hub cannot be reached
        return False


def _part(whole: Split, split: str, held_out: Mapping[str, float], limit: int) -> Split:
    """A part of a training split that is held out, by the smallest or the largest hashes of ids, or the rest."""
    order = sorted(whole.examples, key=lambda example: hashlib.sha256(example.id.encode()).digest())
    counts = {part: max(1, round(fraction * len(order))) for part, fraction in held_out.items()}
    if sum(counts.values()) >= len(order):
        wanted = " and ".join(f"{fraction:g} of them for {part}" for part, fraction in held_out.items())
        raise UserError(f"{whole.name} has {len(order)} examples: too few to hold out {wanted} and train on the rest.")
    ends = {"validation": order[: counts.get("validation", 0)], "test": order[len(order) - counts.get("test", 0) :]}
    part_of = {example.id: part for part, examples in ends.items() for example in examples}
    chosen = [example for example in whole.examples if part_of.get(example.id, "train") == split]
    kept = chosen[:limit] if limit else chosen
    skipped = whole.skipped if split == "train" else []
    more = len(kept) < len(chosen)
    return whole._replace(split=split, examples=kept, skipped=skipped, fingerprint=fingerprint(kept), more=more)


def fingerprint(examples: Iterable[Example]) -> str:
    """Hash the examples' content to 16 hexadecimal digits.

    Each field is preceded by its length, so different lists of examples give different input to the hash.

    >>> fingerprint([Example("1", "a", "bc")]) == fingerprint([Example("1", "ab", "c")])
    False
    """
    digest = hashlib.sha256()
    for example in examples:
        for field in (*example[:3], *example.references):
            content = field.encode()
            digest.update(len(content).to_bytes(8, "big") + content)
        if example.weights:  # no length begins with this byte
            digest.update(b"\xff" + struct.pack(f">q{len(example.weights)}d", len(example.weights), *example.weights))
    return digest.hexdigest()[:16]


def _by_language(row: RawRow | BadRow) -> RawRow | BadRow:
    """The row, with a column for each language if its column ``translation`` has a text for each."""
    texts = row.values.get(TRANSLATION) if isinstance(row, RawRow) else None
    if isinstance(row, BadRow) or not isinstance(texts, dict):
        return row
    others = {column: value for column, value in row.values.items() if column != TRANSLATION}
    return row._replace(values=texts | others)


def _first_rows(rows: Iterator[RawRow | BadRow]) -> list[RawRow | BadRow]:
    """The first rows, including at least one readable row if there is any."""
    first: list[RawRow | BadRow] = []
    readable = False
    for row in rows:
        first.append(row)
        readable = readable or isinstance(row, RawRow)
        if readable and len(first) >= LOOKED_AT:
            break
    return first


def _read_weights(row: RawRow, column: str) -> tuple[tuple[float, ...], str]:
    """The list of numbers in a column, or in JSON text as CSV files have it; and why it cannot be used, if so.

    >>> _read_weights(RawRow("a.csv", 2, {"w": "[1, 0.5]"}), "w")
    ((1.0, 0.5), '')
    >>> _read_weights(RawRow("a.csv", 2, {"w": [1, -1]}), "w")
    ((), "number 2 of 'w' is -1, and weights are finite and 0 or more")
    """
    if column not in row.values:
        return (), f"no column {column!r}"
    found = row.values[column]
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return (), f"{column!r} should be a list of numbers, such as [1, 0.5, 1], got other text"
    if not isinstance(found, (list, tuple)):
        return (), f"{column!r} should be a list of numbers, such as [1, 0.5, 1], got {kind_of(found)}"
    if not found:
        return (), f"{column!r} is an empty list"
    for number, weight in enumerate(found, 1):
        if not isinstance(weight, (int, float)):
            return (), f"number {number} of {column!r} should be a number, got {kind_of(weight)}"
        if not 0 <= weight <= LARGEST:
            why = "0 or more" if weight <= LARGEST else f"at most {LARGEST:g}"
            return (), f"number {number} of {column!r} is {weight}, and weights are finite and {why}"
    return tuple(map(float, found)), ""


def _separate(
    checked: Iterable[Example | BadRow], limit: int, progress: Progress
) -> tuple[list[Example], list[BadRow]]:
    examples: list[Example] = []
    bad: list[BadRow] = []
    for row in checked:
        progress.update()
        if isinstance(row, BadRow):
            bad.append(row)
        else:
            examples.append(row)
            if len(examples) == limit:
                break
    return examples, bad


def _examples(
    rows: Iterable[RawRow | BadRow], chosen: Columns, weights_column: str | None = None
) -> Iterator[Example | BadRow]:
    """Convert each row to an example or a bad row. RawRow numbers count bad rows too, so skipping changes no id."""
    first_use: dict[str, tuple[str, int]] = {}  # not the rows: their other columns would stay in memory
    for number, row in enumerate(rows, 1):
        if isinstance(row, BadRow):
            yield row
            continue
        references, reasons = _references(row, [chosen.target, *chosen.others] if chosen.target else [])
        sources, faulty = _sources(row, chosen)
        reasons = [*faulty, *reasons]
        weights: tuple[float, ...] = ()
        if weights_column:
            weights, fault = _read_weights(row, weights_column)
            reasons.append(fault)
        identity = str(number) if chosen.id is None else row.values.get(chosen.id)
        if isinstance(identity, int) and not isinstance(identity, bool):
            identity = str(identity)
        if chosen.id is not None:
            reasons.append(_fault(row._replace(values={chosen.id: identity}), chosen.id))
        if isinstance(identity, str) and identity in first_use:
            reasons.append("id {!r} was already used at {}:{}".format(identity, *first_use[identity]))
        faults = [reason for reason in reasons if reason]
        if faults:
            yield BadRow(row.file, row.line, "; ".join(faults))
            continue
        several = tuple(references) if len(references) > 1 else ()
        yield Example(str(identity), joined(sources), references[0] if references else "", several, weights)
        first_use[str(identity)] = row.file, row.line


def _sources(row: RawRow, chosen: Columns) -> tuple[list[str], list[str]]:
    """The texts that make the source of a row, and why they cannot be used. Those behind the first may be empty."""
    filled = [name for name in chosen.more if row.values.get(name) is not None and row.values[name] != ""]
    faults = [fault for name in (chosen.source, *filled) if (fault := _fault(row, name))]
    return [] if faults else [str(row.values[name]) for name in (chosen.source, *filled)], faults


def _references(row: RawRow, columns: list[str]) -> tuple[list[str], list[str]]:
    """The references of a row, and why they cannot be used. Further columns may be empty."""
    texts: list[str] = []
    faults: list[str] = []
    for index, column in enumerate(columns):
        value = row.values.get(column)
        if index and (value is None or value == ""):
            continue
        values = value if isinstance(value, list) and value else [value]
        for text in values:
            faults.append(fault := _fault(row, column, text))
            texts += [] if fault else [str(text)]
    return texts, faults


def _fault(row: RawRow, column: str, *given: object) -> str:
    """The reason why a row's text, or the given one of its column, cannot be used, or an empty string."""
    if column not in row.values:
        return f"no column {column!r}"
    value = given[0] if given else row.values[column]
    if isinstance(value, str) and not value.strip():
        return f"{column!r} is {'blank' if value else 'empty'}"
    return text_fault(repr(column), value)


def _complaint(name: str, split: str, bad: list[BadRow], total: int, *, may_skip: bool) -> str:
    advice = (
        'Fix them, or skip them with --on-bad-row skip (on_bad_row="skip" in Python).'
        if may_skip and len(bad) < total
        else "Fix them: every row is invalid."
        if len(bad) == total
        else "Fix them."
    )
    counts = f"{len(bad):,} of {total:,} rows"
    return "\n".join([f"{counts} of the split {split!r} of {name} cannot be used:", *bad_row_lines(bad), advice])
