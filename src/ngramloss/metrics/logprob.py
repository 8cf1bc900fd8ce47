"""documents and texts → the mean log-probability of each text's tokens under a model that reads its document."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from ngramloss.data.tokens import prompt_ids, target_ids
from ngramloss.errors import UserError
from ngramloss.metrics import pretrained
from ngramloss.metrics.nli import check_finite
from ngramloss.metrics.scores import Scores, check_lengths, signature
from ngramloss.recipe import Data, Model
from ngramloss.version import __version__


def logprob(
    documents: Sequence[str],
    predictions: Sequence[str],
    *,
    model: str,
    prompt: str = "",
    prefix: str = "",
    max_source: int = 1024,
    max_target: int = 256,
    batch_size: int = 8,
    device: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Scores:
    """Mean log-probability of a text's tokens and its end, given its document: at most 0, higher is better."""
    check_lengths(documents=documents, predictions=predictions)
    transformers = pretrained.packages("logprob")
    import torch

    from ngramloss.models import loading
    from ngramloss.models.attached.decoder_inputs import decoder_inputs
    from ngramloss.models.languages import codes
    from ngramloss.models.prompts import shape_of
    from ngramloss.models.remote_code import allow_remote_code
    from ngramloss.models.teacher_forced import text_logp

    source = pretrained.find(model, metric="logprob")
    named = Model(name=str(source.folder))
    with allow_remote_code(False):
        config = loading.load_config(named, verb="score")
        tokenizer, _ = loading.load_tokenizer(named, list, "")
        loaded = loading.load(named, tokenizer)
    if codes(tokenizer):
        raise UserError(f"logprob: {source.name} writes several languages. Give a model for one language.")
    judge = pretrained.placed(loaded, device, "logprob")
    longest = pretrained.longest_input(judge, tokenizer) or max_source + max_target
    max_target = min(max_target, longest)
    max_source = min(max_source, longest if config.is_encoder_decoder else longest - max_target)
    settings = Data(prompt=prompt, prefix=prefix, max_source=max_source, max_target=max_target, separator="none")
    shape = shape_of(settings, "summarisation", named, config, tokenizer)
    try:
        inputs = prompt_ids([pretrained.readable(text) for text in documents], tokenizer, shape)
    except UserError as reason:
        if "max_source" not in str(reason):
            raise
        raise UserError(
            f"logprob: {max_source} tokens are too few for a document. {source.name} reads up to {longest} in all, and "
            f"logprob.max_target is {max_target}. Lower logprob.max_target, raise logprob.max_source, or take a model "
            "with more positions."
        ) from reason
    labels = target_ids(documents, [pretrained.readable(text) for text in predictions], tokenizer, shape)
    start = int(decoder_inputs(judge, torch.tensor(labels[:1]))[0, 0]) if config.is_encoder_decoder else 0

    values = [0.0] * len(documents)
    order = sorted(range(len(documents)), key=lambda index: len(inputs[index]))
    for at in range(0, len(order), batch_size):
        batch = order[at : at + batch_size]
        rows = [[[start, *labels[index]]] for index in batch]
        with pretrained.computing("logprob", batch_size):
            sums = text_logp(judge, [inputs[index] for index in batch], rows, pad=tokenizer.pad_token_id)
        for index, (total,) in zip(batch, sums, strict=True):
            values[index] = total / len(labels[index])
            check_finite([[values[index]]], metric="logprob", document=index)
        if progress:
            progress(len(batch))
    facts = signature(
        "logprob",
        model=source.name,
        files=pretrained.files_hash(source),
        prompt=json.dumps(prompt or prefix),
        tokens=f"{max_source}+{max_target}",
        precision="fp32",
        transformers=transformers.__version__,
        version=__version__,
    )
    return Scores({"logprob": values}, facts)
