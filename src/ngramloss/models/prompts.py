"""a recipe's settings, a tokenizer and the kind of the model → how texts become tokens, and where generation stops."""

from __future__ import annotations

import json
import shlex
from functools import cache
from typing import Any

from ngramloss.data.messages import MESSAGES
from ngramloss.data.prompts import Prompt, fix_date, prompt_ids, prompt_of
from ngramloss.data.tokens import Shape
from ngramloss.errors import UserError
from ngramloss.models.attached.heads import bare
from ngramloss.models.loading import is_causal, stop_ids
from ngramloss.output.console import logger
from ngramloss.recipe import CHAT, SOURCE, Data, Model


def shape_of(
    data: Data, task: str, model: Model, config: Any, tokenizer: Any, *, column: str = "", day: str = ""
) -> Shape:
    """The settings for turning texts into this model's tokens; chat templates write ``day``, by default today."""
    if is_causal(config):
        if column == MESSAGES or data.prompt == CHAT:
            fix_date(tokenizer, day)
        return Shape.of(data, prompt_of(data, task, column, tokenizer, stop_ids(model, config, tokenizer)))
    if data.prompt:
        raise UserError(f"data.prompt: {model.name} is an encoder-decoder. Text before its sources is data.prefix.")
    if column == MESSAGES:
        raise UserError(
            f"the column {MESSAGES!r} has conversations, for decoder-only models; {model.name} is an encoder-decoder. "
            "Set data.source and data.target to columns with texts."
        )
    return Shape.of(data)


def align_stop(model: Any, prompt: Prompt) -> None:
    """Let generation stop at the token that ends a completion in training, too, and at those it stopped at before."""
    bare(model).generation_config.eos_token_id = prompt.eos_token_id


def warn_without_bos(config: Any, tokenizer: Any, prompt: Prompt | None) -> None:
    """Warn if the prompts of a Gemma do not begin with its BOS token, without which its texts collapse.

    A converted tokenizer may not put it there. The rule knows only Gemma, by ``model_type``: no file says whether a
    model was trained with BOS first. SmolLM2 and GPT-2 have a ``bos_token``, too, and were not.
    """
    if prompt is None or "gemma" not in config.model_type:
        return
    source = json.dumps([{"role": "user", "content": "a"}]) if prompt.messages else "a"
    bos = tokenizer.bos_token_id if config.bos_token_id is None else config.bos_token_id
    if prompt_ids([source], tokenizer, prompt, 10**6)[0][:1] == [bos]:
        return
    name = tokenizer.decode([bos])
    written = f"data.prompt={json.dumps(f'{name}{prompt.before}{SOURCE}{prompt.after}', ensure_ascii=False)}"
    advice = "Begin the chat template with it." if prompt.chat_template else f"Use --set {shlex.quote(written)}."
    _warn_once(
        f"a prompt of {config.model_type} must begin with {name}, and neither the tokenizer nor the prompt puts it "
        f"there: texts will be much worse. {advice}"
    )


@cache
def _warn_once(sentence: str) -> None:
    logger.warning(sentence)
