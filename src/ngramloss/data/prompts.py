"""a template or a chat template, and texts → ids of prompts and of completions, for decoder-only models.

Prompt and completion are tokenised apart and joined as ids, so that training and generation read the same prompt.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain, islice
from typing import Any

from ngramloss.data.columns import INSTRUCTION
from ngramloss.data.examples import Example
from ngramloss.data.messages import ASSISTANT, MESSAGES
from ngramloss.data.rows import needed
from ngramloss.data.token_ids import bare_ids, special_tokens
from ngramloss.errors import UserError
from ngramloss.recipe import CHAT, NO_SOURCE, SOURCE, Data

DEFAULTS = {"summarisation": "{source}\n\nSummary:", "translation": "{source}\n\nTranslation:"}
"""Task → the template if none is given."""
_SOURCE, _ANSWER = "⟦source⟧", "⟦answer⟧"  # Stand for texts while a chat template is taken apart
Ids = list[int]
Message = dict[str, str]


TEMPLATES = {"prompt": SOURCE, INSTRUCTION: f"{SOURCE}\n\n"}
"""Columns of sources that are no documents → the template, if none is given."""


def template_of(data: Data, task: str, column: str) -> str:
    """The template of prompts, for a source column that has no messages."""
    return data.prompt or TEMPLATES.get(_kind(column), DEFAULTS[task])


def read_alike(trained: str, column: str, *, template: str = "") -> bool:
    """Whether the sources of two columns are read in the same way.

    >>> read_alike("document", "dialogue"), read_alike("document", "prompt"), read_alike("a,b", "b")
    (True, False, False)
    """
    kinds = _kind(trained), _kind(column)
    if kinds[0] != kinds[1] and (not template or MESSAGES in kinds):
        return False
    return INSTRUCTION in kinds or len(trained.split(",")) == len(column.split(","))


def _kind(column: str) -> str:
    """``prompt``, ``messages`` or ``instruction``, or an empty string for documents. Case does not matter."""
    first = column.partition(",")[0].casefold()
    return first if first in (*TEMPLATES, MESSAGES) else ""


@dataclass(frozen=True)
class Prompt:
    """What a decoder-only model reads beside a source, and what it ends its text with.

    Attributes:
        lead: what a chat template writes between the beginning of an answer and its text, such as an empty thought: the
            end of the prompt. None without a chat template: a space, unless white space is there already.
        ending: ids at the end of every completion; the last is the first of ``stop``.
        stop: ids at which generation stops.
        messages: whether sources are messages, as :func:`ngramloss.data.messages.split_messages` writes them.
        reads_source: False for a language model of the targets alone, whose prompt is the start token.
    """

    before: str
    after: str
    lead: str | None
    ending: tuple[int, ...]
    stop: tuple[int, ...]
    chat_template: str = ""
    messages: bool = False
    reads_source: bool = True

    @property
    def eos_token_id(self) -> int | list[int]:
        """The ids at which generation stops, as Hugging Face's settings have them."""
        return list(self.stop) if len(self.stop) > 1 else self.stop[0]


def prompt_of(data: Data, task: str, column: str, tokenizer: Any, stops: Sequence[int]) -> Prompt:
    """The prompt that a recipe asks for, for sources of this column: documents, prompts, messages or instructions."""
    if data.prefix or data.separator not in ("auto", "none"):
        key = "prefix" if data.prefix else "separator"
        raise UserError(f"data.{key}: a decoder-only model has none. Write the text into data.prompt.")
    if column == MESSAGES and (data.prompt not in ("", CHAT) or data.instruction):
        key = "instruction" if data.instruction else "prompt"
        raise UserError(f"data.{key}: the messages of the data are the prompt. Leave the setting out.")
    if column == MESSAGES or data.prompt == CHAT:
        return _chat(data.instruction, tokenizer, stops, messages=column == MESSAGES)
    end = tokenizer.eos_token_id if tokenizer.eos_token_id in stops else stops[0]
    stop = tuple(dict.fromkeys([end, *stops]))
    if data.prompt == NO_SOURCE:
        return Prompt("", "", "", (end,), stop, reads_source=False)
    before, after = template_of(data, task, column).split(SOURCE)
    return Prompt(before, after, None, (end,), stop)


def _chat(instruction: str, tokenizer: Any, stops: Sequence[int], *, messages: bool) -> Prompt:
    """Take the chat template apart: it writes a message and an answer, whose places are then known."""
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        wanted = f"the column {MESSAGES!r} needs" if messages else f'data.prompt = "{CHAT}" needs'
        other = "" if messages else ', or a template such as data.prompt = "{source}\\n\\nSummary:"'
        raise UserError(
            f"the tokenizer has no chat template, which {wanted}. Use a model that was trained to chat{other}; or give "
            "the tokenizer one, tokenizer.chat_template = …, save it with save_pretrained, and name that folder: "
            "model.name, or model.tokenizer for a model from scratch."
        )
    asked = {"role": "user", "content": f"{instruction}\n\n{_SOURCE}" if instruction else _SOURCE}
    prompt = _written(tokenizer, [asked], ask=True)
    whole = _written(tokenizer, [asked, {"role": ASSISTANT, "content": _ANSWER}])
    if prompt.count(_SOURCE) != 1 or not whole.startswith(prompt) or whole.count(_ANSWER) != 1:
        raise UserError(
            "the tokenizer's chat template writes a message differently once its answer follows, so training and "
            'generation would differ. Use another chat template, or data.prompt with "{source}".'
        )
    lead, rest = whole[len(prompt) :].split(_ANSWER)
    ending = bare_ids(tokenizer, [rest])[0] if rest else []
    special = {*stops, *tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    at = next((at for at, token in enumerate(ending) if token in special), None)
    if at is None:
        raise UserError(
            "the tokenizer's chat template puts no token at the end of an answer, so a model would not learn to "
            'stop. Use another chat template, or data.prompt with "{source}".'
        )
    before, after = prompt.split(_SOURCE)
    stop = tuple(dict.fromkeys([ending[at], *stops]))
    text = template if isinstance(template, str) else json.dumps(template)
    return Prompt(before, after + lead, lead, tuple(ending[: at + 1]), stop, text, messages)


TODAY = "NGRAMLOSS_TODAY"
"""The environment variable with a day, YYYY-MM-DD, that chat templates write in place of today."""
_MACRO = re.compile(r"{% macro strftime_now\(format\) %}{# (\S+) #}")
"""How a chat template begins that writes one day, and this day."""


def fix_date(tokenizer: Any, day: str = "") -> str:
    """Let a chat template that reads the clock, such as Llama 3's, write one day; returns it, empty if it writes none.

    A template keeps the day that it has; the first is ``NGRAMLOSS_TODAY``, or today. It is saved with the tokenizer.
    """
    template = getattr(tokenizer, "chat_template", None) or ""
    several = template if isinstance(template, dict) else {"": template}
    day = day or os.environ.get(TODAY, "")
    try:
        written = date.fromisoformat(day) if day else date.today()
    except ValueError:
        raise UserError(f"{TODAY} should be a day such as 2026-01-31, got {day!r}.") from None
    dated = {name: _dated(each, written) for name, each in several.items()}
    if dated != several:
        tokenizer.chat_template = dated if isinstance(template, dict) else dated[""]
    return next((found[1] for each in dated.values() if (found := _MACRO.match(each))), "")


def _dated(template: str, day: date) -> str:
    if "strftime_now" not in template or "macro strftime_now(" in template:
        return template
    codes = dict.fromkeys(re.findall("%-?[aAbBcdeFHIjmMpSUwWxXyY]", template))
    written = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in codes)
    # Hugging Face's settings leave out the line break after a tag.
    return f"{{% macro strftime_now(format) %}}{{# {day} #}}{{{{ format{written} }}}}{{% endmacro %}}\n{template}"


def _written(tokenizer: Any, messages: Sequence[Message], *, ask: bool = False) -> str:
    """Messages as one text, by the chat template; if an answer is to follow (``ask``), with what begins one."""
    jinja = needed("jinja2", "a chat template", "hf")
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=ask)
    except (jinja.TemplateError, TypeError, ValueError, LookupError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"the chat template of the tokenizer refuses messages of {roles}: {error}.") from error
    return text


def prompt_ids(
    sources: Sequence[str], tokenizer: Any, prompt: Prompt, max_source: int, cut: list[bool] | None = None
) -> list[Ids]:
    """The ids of prompts. In one that is too long, the source loses its end; without a template, its beginning."""
    if not prompt.reads_source:
        if cut is not None:
            cut += [False] * len(sources)
        return [start_of_text(tokenizer) for _ in sources]
    first = [] if prompt.chat_template else special_tokens(tokenizer)[0]
    texts = [_texts(source, tokenizer, prompt) for source in sources]
    following = iter(_following([text for one in texts for text in one[1:]], tokenizer))
    made = []
    for source, one, ids in zip(sources, texts, bare_ids(tokenizer, [one[0] for one in texts]), strict=True):
        ids = ids if ids[: len(first)] == first else [*first, *ids]
        ids = [*ids, *chain.from_iterable(islice(following, len(one) - 1))]
        too_long = len(ids) > max_source
        made.append(_shortened(source, ids, first, tokenizer, prompt, max_source) if too_long else ids)
        if cut is not None:
            cut.append(too_long)
    return made


def _texts(source: str, tokenizer: Any, prompt: Prompt) -> list[str]:
    """The text of a prompt in the pieces that are tokenised apart: several if messages have answers."""
    if not prompt.messages:
        return [prompt.before + (source.strip() if prompt.chat_template else source) + prompt.after]
    messages, lead = json.loads(source), prompt.lead or ""
    whole = _written(tokenizer, messages, ask=True) + lead
    return [text for text, _ in _pieces(messages, whole, tokenizer, lead)]


def _pieces(messages: Sequence[Message], whole: str, tokenizer: Any, lead: str) -> list[tuple[str, int]]:
    """The text of messages in pieces, each with the place of its answer or −1, as training and generation read it.

    An answer that the template writes differently when others follow is part of what is read.
    """
    pieces, done = [], 0
    for at in [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]:
        try:
            asked = _written(tokenizer, messages[:at], ask=True) + lead
            answered = _written(tokenizer, messages[: at + 1])
        except UserError:  # some templates refuse messages without a question, such as before a greeting
            continue
        if whole.startswith(answered) and answered.startswith(asked):
            pieces += [(whole[done : len(asked)], -1), (whole[len(asked) : len(answered)], at)]
            done = len(answered)
    return [*pieces, (whole[done:], -1)]


def _shortened(source: str, ids: Ids, first: Ids, tokenizer: Any, prompt: Prompt, max_source: int) -> Ids:
    """The ids of a prompt that is too long, without the end of its source; of messages, that of the longest one."""
    text = source.strip() if prompt.chat_template else source
    if not (prompt.messages or prompt.before or prompt.after):
        return [*first, *ids[len(first) - max_source :]]
    emptied = _SOURCE
    if prompt.messages:
        messages = json.loads(source)
        read = [each for each in messages if each["role"] != ASSISTANT]
        longest = max(read, key=lambda message: len(message["content"]))
        text, longest["content"] = longest["content"], _SOURCE
        emptied = json.dumps(messages)
    texts = _texts(emptied, tokenizer, prompt)
    at = next((at for at, one in enumerate(texts) if _SOURCE in one), -1)
    before, _, after = texts[at].partition(_SOURCE)
    texts, rest = [*texts[:at], before], [after, *texts[at + 1 :]]
    head, document = bare_ids(tokenizer, [texts[0], text])
    head = head if head[: len(first)] == first else [*first, *head]
    head += chain.from_iterable(_following(texts[1:], tokenizer))
    tail = [*chain.from_iterable(_following(rest, tokenizer))]
    room = max_source - len(head) - len(tail)
    if room < 1:
        raise UserError(
            f"data.max_source = {max_source} is too small: the prompt takes {len(head) + len(tail)} tokens without "
            f"the {'longest message' if prompt.messages else 'source'}, {text[:40]!r}…. Raise it."
        )
    return [*head, *document[:room], *tail]


def completion_ids(
    sources: Sequence[str],
    targets: Sequence[str],
    tokenizer: Any,
    prompt: Prompt,
    max_target: int,
    cut: list[bool] | None = None,
) -> list[Ids]:
    """The ids of completions, cut at the end. A space goes before one unless its prompt ends in white space."""
    made = [[*ids, *prompt.ending] for ids in bare_ids(tokenizer, led_texts(sources, targets, tokenizer, prompt))]
    if cut is not None:
        cut += [len(ids) > max_target for ids in made]
    return [ids[:max_target] for ids in made]


def led_texts(sources: Sequence[str], targets: Sequence[str], tokenizer: Any, prompt: Prompt) -> list[str]:
    """The texts whose ids are those of completions, without their ends. They have the words of the targets."""
    texts = [_led(source, target, prompt) for source, target in zip(sources, targets, strict=True)]
    return _as_following(texts, tokenizer)


def _led(source: str, target: str, prompt: Prompt) -> str:
    """The target with what stands between it and the prompt."""
    if prompt.lead is not None:
        return target.strip()
    joined = (prompt.after or source)[-1:].isspace() or target[:1].isspace()
    return target if joined else f" {target}"


def rows(
    examples: Sequence[Example],
    tokenizer: Any,
    prompt: Prompt,
    max_source: int,
    max_target: int,
    cut: tuple[list[bool], list[bool]],
) -> tuple[list[Ids], list[Ids]]:
    """The ids of prompts (of messages: before the first answer) and completions, where ``~id`` is read but not learnt.

    ``cut`` is extended by whether each prompt, and each completion, was too long.
    """
    sources, targets = ([getattr(example, name) for example in examples] for name in ("source", "target"))
    if not prompt.messages:
        made = completion_ids(sources, targets, tokenizer, prompt, max_target, cut[1])
        return prompt_ids(sources, tokenizer, prompt, max_source, cut[0]), made
    conversations = [_turns(example, tokenizer, prompt.lead or "") for example in examples]
    following = iter(_following([text for _, pieces in conversations for text, _ in pieces], tokenizer))
    labels = []
    for _, pieces in conversations:
        row: Ids = []
        for (_, learnt), ids in zip(pieces, following, strict=False):
            row += _learnt(ids, prompt.ending[-1]) if learnt else [~token for token in ids]
        row = row[: len(row) - next(at for at, token in enumerate(reversed(row)) if token >= 0)]
        cut[1].append(len(row) > max_target)
        labels.append(row[:max_target])
    return prompt_ids([first for first, _ in conversations], tokenizer, prompt, max_source, cut[0]), labels


def _learnt(ids: Ids, end: int) -> Ids:
    """The ids of an answer: learnt up to its end; white space after that is read."""
    if end not in ids:
        raise UserError(
            "the tokenizer's chat template does not end every answer in the same way. Use another chat template."
        )
    after = len(ids) - ids[::-1].index(end)
    return [*ids[:after], *(~token for token in ids[after:])]


def _turns(example: Example, tokenizer: Any, lead: str) -> tuple[str, list[tuple[str, bool]]]:
    """The messages before the first answer that is learnt, and the pieces from there with whether each is learnt."""
    messages: list[Message] = [*json.loads(example.source), {"role": ASSISTANT, "content": example.target}]
    answers = [at for at, message in enumerate(messages) if message["role"] == ASSISTANT]
    if example.weights:
        answers = [at for at, weight in zip(answers, example.weights, strict=True) if weight]
    pieces = _pieces(messages, _written(tokenizer, messages), tokenizer, lead)
    places = [at for _, at in pieces]
    if changed := [at for at in answers if at not in places]:
        raise UserError(
            f"the tokenizer's chat template writes messages differently when others follow (row {example.id!r}, "
            f"message {changed[0] + 1}). Give each answer that is learnt its own row, or use another chat template."
        )
    learnt = [(text, at in answers) for text, at in pieces[places.index(answers[0]) :]]
    return json.dumps(messages[: answers[0]], ensure_ascii=False), learnt


def start_of_text(tokenizer: Any) -> Ids:
    """The ids that a text without a prompt begins with: the tokenizer's own, or its token for the beginning or end."""
    tokens = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id)
    start = special_tokens(tokenizer)[0] or [token for token in tokens if token is not None][:1]
    if not start:
        raise UserError("the tokenizer has no token to begin a text with. Use another tokenizer.")
    return start


def _following(texts: Sequence[str], tokenizer: Any) -> list[Ids]:
    return bare_ids(tokenizer, _as_following(texts, tokenizer))


def _as_following(texts: Sequence[str], tokenizer: Any) -> list[str]:
    """Texts that follow others, for the tokenizer. Some put a space before a text by themselves: not another one."""
    alone, before, both = bare_ids(tokenizer, ["a", "b", "b a"])
    return [text.removeprefix(" ") for text in texts] if both == [*before, *alone] else list(texts)
