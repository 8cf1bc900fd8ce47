"""a row with a column ``messages`` → a row with the messages before the last answer, and that answer if there is one.

What follows the last answer is left out. An answer with the weight 0 is read, but not learnt.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from ngramloss.data.columns import TARGETS, reference_columns
from ngramloss.data.rows import BadRow, RawRow

MESSAGES, ANSWER = "messages", "completion"
"""The column that is read, and the one that is added."""
ANSWER_WEIGHTS = "weights of the answers"
"""A column that is added if weights are read: one for each answer."""
ASSISTANT, CALLS = "assistant", "tool_calls"


def has_messages(present: Sequence[str], source: str | None, target: str | None) -> bool:
    """Whether the messages of a table are its texts: they are named as the source, or no column looks like a target."""
    if MESSAGES not in present or target:
        return False
    return source == MESSAGES or (not source and not reference_columns(TARGETS, present))


def are_answered(rows: Iterable[RawRow | BadRow]) -> bool:
    """Whether one of the conversations that can be read ends with an answer."""
    found = [row.values.get(MESSAGES) for row in map(_parsed, rows) if isinstance(row, RawRow)]
    return any(messages[-1]["role"] == ASSISTANT for messages in found if not _fault(messages))  # type: ignore[index]


def split_messages(
    row: RawRow | BadRow, weight: str | None = None, dropped: dict[str, None] | None = None, *, answered: bool = True
) -> RawRow | BadRow:
    """The row with JSON of the messages before the last answer, and the answer; or of all if not ``answered``.

    ``weight`` is a message's key with the weight of an answer, by default 1. The last answer does not weigh 0.
    """
    row = _parsed(row)
    if isinstance(row, BadRow):
        return row
    found = row.values.get(MESSAGES)
    fault = _fault(found)
    roles = [] if fault else [message["role"] for message in found]  # type: ignore[attr-defined]
    if not fault and not answered and roles[-1] == ASSISTANT:
        fault = "ends with an answer, but the first rows do not. Leave the answer out, or add one to every row"
    elif not fault and answered and ASSISTANT not in roles:
        fault = f"has no answer: no message has the role {ASSISTANT!r}"
    elif roles[:1] == [ASSISTANT]:
        fault = "begins with an answer, so there is nothing to answer"
    if fault:
        return BadRow(row.file, row.line, f"{MESSAGES!r} {fault}")
    if dropped is not None:
        dropped.update({key: None for each in found for key in each if key not in ("role", "content", weight)})  # type: ignore[attr-defined]
    messages = [{"role": each["role"], "content": each["content"]} for each in found]  # type: ignore[attr-defined]
    if not answered:
        return row._replace(values={**row.values, MESSAGES: json.dumps(messages, ensure_ascii=False)})
    answers = [at for at, each in enumerate(messages) if each["role"] == ASSISTANT]
    weights: list[object] = [found[at].get(weight, 1) if weight else 1 for at in answers]  # type: ignore[index]
    learnt = [at for at, each in zip(answers, weights, strict=True) if each != 0]
    if not learnt:
        return BadRow(row.file, row.line, f"{MESSAGES!r} has no answer to learn: all have the weight 0")
    last = learnt[-1]
    texts = {MESSAGES: json.dumps(messages[:last], ensure_ascii=False), ANSWER: messages[last]["content"]}
    beside = {ANSWER_WEIGHTS: weights[: answers.index(last) + 1]} if weight else {}
    return row._replace(values={**row.values, **texts, **beside})


def spoken(source: str) -> str:
    """What the messages of a source say, one after the other, for those who count or show texts.

    >>> spoken('[{"role": "user", "content": "The cat sat."}, {"role": "assistant", "content": "Why?"}]')
    'The cat sat.\\nWhy?'
    """
    return "\n".join(message["content"] for message in json.loads(source))


def _parsed(row: RawRow | BadRow) -> RawRow | BadRow:
    if isinstance(row, BadRow) or not isinstance(found := row.values.get(MESSAGES), str):
        return row
    try:
        return row._replace(values={**row.values, MESSAGES: json.loads(found)})
    except (ValueError, RecursionError) as error:
        return BadRow(row.file, row.line, f"{MESSAGES!r} is not JSON: {error}")


def _fault(messages: object) -> str:
    if not isinstance(messages, list) or not messages:
        return "should be a list of messages, each with role and content"
    for number, message in enumerate(messages, 1):
        if isinstance(message, dict) and message.get(CALLS):
            return f"has {CALLS} in number {number}, which are not read. Write them as text"
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            return f"should be a list of messages: number {number} has no text as its role or its content"
        if message["role"] == ASSISTANT and not message["content"].strip():
            return f"has an empty answer: number {number}"
    return ""
