"""a recipe's settings, a tokenizer and the kind of the model → how texts become tokens, and where generation stops."""

from __future__ import annotations

from typing import Any

from ngramloss.data.messages import MESSAGES
from ngramloss.data.prompts import Prompt, fix_date, prompt_of
from ngramloss.data.tokens import Shape
from ngramloss.errors import UserError
from ngramloss.models.attached.heads import bare
from ngramloss.models.loading import is_causal, stop_ids
from ngramloss.recipe import CHAT, Data, Model


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
