"""an encoder-decoder → the same without its causal mask: it predicts all tokens of a text at once, and their number.

After Gu et al. (2018), with a length head instead of fertilities; in several passes after Ghazvininejad et al. (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import ngramloss as ng

hf: Any = transformers
MOST_LOGITS = 2**28
"""Logits that are computed at a time: 1 GB in fp32."""
INPUTS = ("copy", "mask", "random")
"""What the decoder reads: tokens of the source, mask tokens, or mask tokens and a part of the text."""


class ParallelConfig(hf.PreTrainedConfig):  # type: ignore[misc]
    """The configuration of the base model, what the decoder reads at each place, and which lengths are known."""

    model_type = ng.loading.PARALLEL

    def __init__(
        self,
        base: Mapping[str, Any] | None = None,
        inputs: str = "copy",
        ratio: float = 1.0,
        spread: int = 24,
        most: int = 1,
        around: tuple[int, int] = (0, 0),
        mask: int = 0,
        banned: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        """Set all of it.

        ``base``: its dtype is left out, or trained weights would be loaded in 16 bits, if it was published in these;
        ``ratio``: target tokens for each source token; ``most``: of a text; ``around``: special tokens before and after
        a source; ``banned``: tokens that are never written.
        """
        super().__init__(**{"is_encoder_decoder": True, **more})
        self.base = {name: value for name, value in (base or {}).items() if name not in ("dtype", "torch_dtype")}
        self.inputs, self.ratio, self.spread, self.most = inputs, ratio, spread, most
        self.around, self.mask, self.banned = list(around), mask, list(banned)


hf.AutoConfig.register(ng.loading.PARALLEL, ParallelConfig)  # or its tokenizer is loaded with a warning


class Text(NamedTuple):
    """A text that was written for one length."""

    tokens: list[int]
    score: float
    """The mean log-probability of its tokens."""


class ParallelModel(hf.PreTrainedModel, hf.GenerationMixin):  # type: ignore[misc]
    """An encoder-decoder whose decoder sees all places of a text, with a head for its length."""

    config_class = ParallelConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules: tuple[str, ...] = ()

    def __init__(self, config: Any, base: Any = None) -> None:
        super().__init__(config)
        if base is None:
            settings = dict(config.base)
            base = hf.AutoModelForSeq2SeqLM.from_config(hf.AutoConfig.for_model(settings.pop("model_type"), **settings))
        self.base = base
        self.length = nn.Linear(base.get_input_embeddings().embedding_dim, 2 * config.spread + 1)
        self.lengths, self.passes, self.remove_repeats, self.length_offset = 5, 1, True, 0
        for name, module in base.get_decoder().named_modules():
            if name.endswith(".SelfAttention"):  # of T5: otherwise all later places would have one relative position
                module.is_decoder = False
        self.post_init()

    def get_input_embeddings(self) -> Any:
        """Those of the base model."""
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head of the base model."""
        return self.base.get_output_embeddings()

    def get_encoder(self, *names: Any, **options: Any) -> Any:
        """That of the base model."""
        return self.base.get_encoder()

    @property
    def final_logits_bias(self) -> Any:
        """What the base model adds to its logits, if it does."""
        return getattr(self.base, "final_logits_bias", None)

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The states of sources, [B, S, D]."""
        states: Tensor = self.base.get_encoder()(input_ids=input_ids, attention_mask=attention_mask)[0]
        return states

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        **options: Any,
    ) -> Any:
        """As the base model's, but each place sees all real ones, by ``decoder_attention_mask`` [B, T]."""
        if decoder_input_ids is None or decoder_attention_mask is None:
            raise ng.UserError(
                "a parallel model needs decoder_input_ids and decoder_attention_mask, never labels alone."
            )
        return self.base(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=self._seen(decoder_attention_mask.bool()),
            encoder_outputs=encoder_outputs,
            **{**options, "use_cache": False},
        )

    def _seen(self, real: Tensor) -> Tensor:
        """What each place sees, [B, 1, T, T], in the form that the decoder's attention adds or applies."""
        seen = real[:, None, None].expand(-1, 1, real.shape[1], -1)  # [B, 1, T, T]
        if self.base.get_decoder().config._attn_implementation == "sdpa":
            return seen
        least = torch.finfo(self.dtype).min
        return torch.zeros_like(seen, dtype=self.dtype).masked_fill(~seen, least)  # [B, 1, T, T]

    # Lengths

    def source_lengths(self, sizes: Tensor) -> Tensor:
        """Tokens of sources of these sizes without special ones around them, at least 1, [B]."""
        lengths: Tensor = (sizes - sum(self.config.around)).clamp_min(1)  # [B]
        return lengths

    def usual_lengths(self, sizes: Tensor) -> Tensor:
        """The length that texts of sources of these sizes have on average, [B]."""
        usual: Tensor = (self.source_lengths(sizes) * self.config.ratio).round().long()  # [B]
        return usual

    def length_classes(self, lengths: Tensor, attention_mask: Tensor) -> Tensor:
        """The classes of lengths in the length head, [B]. Lengths that it does not know get the next one."""
        spread: int = self.config.spread
        return (lengths - self.usual_lengths(attention_mask.sum(1))).clamp(-spread, spread) + spread

    def length_logits(self, states: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits of lengths, from the mean state of a source, [B, 2 · spread + 1]."""
        real = attention_mask.unsqueeze(-1).to(states.dtype)  # [B, S, 1]
        logits: Tensor = self.length((states * real).sum(1) / real.sum(1))
        return logits

    def best_lengths(self, states: Tensor, attention_mask: Tensor, count: int, most: int) -> Tensor:
        """The most probable lengths of each source's text, at most all known, and ``length_offset``, [B, C]."""
        spread = self.config.spread
        logits = self.length_logits(states, attention_mask).float()  # [B, 2 · spread + 1]
        steps = torch.arange(-spread, spread + 1, device=logits.device)  # [2 · spread + 1]
        known = self.usual_lengths(attention_mask.sum(1)).unsqueeze(1) + steps  # [B, 2 · spread + 1]
        logits = logits.masked_fill((known < 1) | (known > most), -torch.inf)
        chosen = logits.sort(descending=True, stable=True).indices[:, :count]  # [B, C]
        return (known.gather(1, chosen) + self.length_offset).clamp(1, most)

    def write_at_most(self, most: int) -> None:
        """Never write texts of more tokens, nor of more than the base model has positions."""
        positions = getattr(self.config, "max_position_embeddings", None)
        self.config.most = most if positions is None else min(most, positions)
        self.generation_config.max_length = self.config.most + 2

    # What the decoder reads

    def places(self, input_ids: Tensor, attention_mask: Tensor, lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """What the decoder reads of texts of these lengths before any token is known, and what is real, [B, T] each.

        With ``copy``, place k of n reads token ⌊k · S / n⌋ of the S tokens of the source.
        """
        k = torch.arange(size, device=input_ids.device)  # [T]
        real = k < lengths.unsqueeze(1)  # [B, T]
        if self.config.inputs == "copy":
            sources = self.source_lengths(attention_mask.sum(1)).unsqueeze(1)  # [B, 1]
            copied = k * sources // lengths.clamp_min(1).unsqueeze(1)  # [B, T]
            ids = input_ids.gather(1, (copied + self.config.around[0]).clamp_max(input_ids.shape[1] - 1))  # [B, T]
        else:
            ids = torch.full_like(real, self.config.mask, dtype=torch.long)  # [B, T]
        return ids.masked_fill(~real, self.config.pad_token_id), real

    # Writing

    @torch.no_grad()
    def write(
        self, input_ids: Tensor, attention_mask: Tensor, *, count: int = 1, most: int | None = None
    ) -> list[list[Text]]:
        """The texts of each source, that with the highest score first: ``count`` of the lengths that are tried."""
        most = min(most or self.config.most, self.config.most)
        states = self.encode(input_ids, attention_mask)  # [B, S, D]
        if count > (known := 2 * self.config.spread + 1):
            raise ng.UserError(
                f"{count} texts were asked for, and the length head knows {known} lengths. Ask for fewer."
            )
        lengths = self.best_lengths(states, attention_mask, max(self.lengths, count), most)  # [B, C]
        B, C = lengths.shape
        owners = torch.arange(B, device=lengths.device).repeat_interleave(C)  # [B · C]
        vocabulary = self.get_output_embeddings().weight.shape[0]
        rows = max(1, MOST_LOGITS // (vocabulary * int(lengths.max())))
        texts: list[Text] = []
        for some, n in zip(owners.split(rows), lengths.flatten().split(rows), strict=True):
            tokens, logp = self._fill(input_ids[some], attention_mask[some], states[some], n)  # [N, T] each
            means = logp.masked_fill(~_real(n, logp), 0.0).sum(1) / n  # [N]
            texts += [
                Text(ids[:count], score)
                for ids, count, score in zip(tokens.tolist(), n.tolist(), means.tolist(), strict=True)
            ]
        grouped = [texts[start : start + C] for start in range(0, B * C, C)]
        return [sorted(group, key=lambda text: -text.score)[:count] for group in grouped]

    def _fill(
        self, input_ids: Tensor, attention_mask: Tensor, states: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The tokens of texts of these lengths and their log-probabilities, [N, T] each, in ``passes`` passes."""
        read, real = self.places(input_ids, attention_mask, lengths, int(lengths.max()))  # [N, T] each
        tokens, logp = self._predict(read, real, attention_mask, states)  # [N, T] each
        for done in range(1, self.passes):
            count = lengths * (self.passes - done) // self.passes  # [N]
            again = lowest(logp.masked_fill(~real, torch.inf), count)  # [N, T]
            read = tokens.masked_fill(again, self.config.mask).masked_fill(~real, self.config.pad_token_id)  # [N, T]
            new, new_logp = self._predict(read, real, attention_mask, states)  # [N, T] each
            tokens, logp = tokens.where(~again, new), logp.where(~again, new_logp)
        return tokens, logp

    def _predict(self, read: Tensor, real: Tensor, attention_mask: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable token of each place and its log-probability, [N, T] each."""
        logits = self(
            attention_mask=attention_mask,
            encoder_outputs=hf.modeling_outputs.BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=read,
            decoder_attention_mask=real,
        ).logits.float()  # [N, T, V]
        lse = logits.logsumexp(-1)  # [N, T]
        logits[..., self.config.banned] = -torch.inf
        best, tokens = logits.max(-1)  # [N, T] each
        return tokens, best - lse

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        num_return_sequences: int = 1,
        max_length: int | None = None,
        **others: Any,
    ) -> Tensor:
        """Texts as ids from the start to the end token, [B · texts, T]; those of several lengths, best first."""
        unread = ("num_beams", "early_stopping", "do_sample", "_from_model_config")
        if strange := [name for name, value in others.items() if name not in unread and value is not None]:
            raise ng.UserError(
                f"a parallel model predicts all tokens at once and does not read {', '.join(strange)}. Leave it out."
            )
        if others.get("num_beams") not in (None, 1, num_return_sequences) or others.get("do_sample"):
            raise ng.UserError(
                "a parallel model has no beams and no samples: it tries several lengths. Leave them out."
            )
        attention_mask = (input_ids != self.config.pad_token_id).long() if attention_mask is None else attention_mask
        found = self.write(
            input_ids, attention_mask, count=num_return_sequences, most=max(1, max_length - 2) if max_length else None
        )
        config = self.config
        rows = [
            [config.decoder_start_token_id, *self.final(text.tokens), config.eos_token_id]
            for texts in found
            for text in texts
        ]
        ids, _ = ng.padding.padded(rows, config.pad_token_id)
        return torch.from_numpy(ids).to(input_ids.device)

    def final(self, tokens: list[int]) -> list[int]:
        """The tokens of a text as it is written: with ``remove_repeats``, without those equal to the one before."""
        return without_repeats(tokens) if self.remove_repeats else tokens


def without_repeats(tokens: list[int]) -> list[int]:
    """Tokens without those that are equal to the one before.

    >>> without_repeats([7, 7, 8, 7, 7, 7])
    [7, 8, 7]
    """
    return [token for place, token in enumerate(tokens) if place == 0 or token != tokens[place - 1]]


def lowest(values: Tensor, count: Tensor) -> Tensor:
    """Which values of each row are its ``count`` lowest, bool [B, T]; of equal ones the first.

    >>> lowest(torch.tensor([[3.0, 1.0, 2.0, 1.0]]), torch.tensor([2]))
    tensor([[False,  True, False,  True]])
    """
    ranks = values.argsort(stable=True).argsort()  # [B, T]
    return ranks < count.unsqueeze(1)


def _real(lengths: Tensor, like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device) < lengths.unsqueeze(1)  # [B, T]


# Loading


def parallel(
    base: Any, tokenizer: Any, *, inputs: str, most: int, ratio: float, spread: int, name: str
) -> ParallelModel:
    """An encoder-decoder → a parallel model with its weights and a new length head."""
    ids = {key: getattr(base.config, key, None) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    for key, value in ids.items():
        ids[key] = getattr(tokenizer, key) if value is None else value[0] if isinstance(value, list) else value
    if ids["eos_token_id"] is None or ids["pad_token_id"] is None:
        raise ng.UserError(f"{name} has no token that ends a text, or none for padding. Choose another model.")
    start = base.generation_config.decoder_start_token_id
    mask = tokenizer.mask_token_id if tokenizer.mask_token_id is not None else tokenizer.unk_token_id
    if mask is None and inputs != "copy":
        raise ng.UserError(f"the tokenizer of {name} has no mask token and no unknown token. Use inputs=copy.")
    if inputs == "copy" and not getattr(base.config, "share_encoder_decoder_embeddings", True):
        raise ng.UserError(
            f"the decoder of {name} has another vocabulary than its encoder, so it cannot read a copy of the source. "
            "Use inputs=mask."
        )
    before, after = ng.tokens.special_tokens(tokenizer)
    positions = getattr(base.config, "max_position_embeddings", None)
    config = ParallelConfig(
        base.config.to_dict(),
        inputs,
        ratio,
        spread,
        most,
        (len(before), len(after)),
        mask or 0,
        tuple(sorted({*tokenizer.all_special_ids, *(token for token in ids.values() if isinstance(token, int))})),
        **ids,
        vocab_size=base.get_output_embeddings().weight.shape[0],
        decoder_start_token_id=ids["eos_token_id"] if start is None else start,
        tie_word_embeddings=False,
        **({} if positions is None else {"max_position_embeddings": positions}),
    )
    model = ParallelModel(config, base)
    model.generation_config = hf.GenerationConfig(
        **{key: getattr(config, key) for key in (*ids, "decoder_start_token_id")}
    )
    model.write_at_most(most)
    raise_unless_parallel(model, name)
    return model


@torch.no_grad()
def raise_unless_parallel(model: ParallelModel, name: str) -> None:
    """Try three places: the first must see the last if it is real, not if it is padding, and differ from it."""
    was_training = model.training
    model.eval()
    ids = torch.tensor([[1, 2, 3]], device=model.device) % model.config.vocab_size  # [1, 3]
    other = ids.clone()
    other[0, 2] = (other[0, 2] + 1) % model.config.vocab_size

    def tried(read: Tensor, real: list[int]) -> Tensor:
        mask = torch.tensor([real], device=ids.device)  # [1, 3]
        logits: Tensor = model(ids, torch.ones_like(ids), read, mask).logits[0]
        return logits  # [3, V]

    try:
        sees = not torch.equal(tried(ids, [1, 1, 1])[0], tried(other, [1, 1, 1])[0])
        leaks = not torch.equal(tried(ids, [1, 1, 0])[0], tried(other, [1, 1, 0])[0])
        masked = tried(torch.full_like(ids, model.config.mask), [1, 1, 1])  # [3, V]
    except (RuntimeError, ValueError, TypeError, IndexError) as reason:
        raise ng.UserError(
            f"the decoder of {name} ({type(model.base).__name__}) cannot run in parallel: {reason}"
        ) from reason
    if leaks or not sees:
        what = "reads padding" if leaks else "does not see later places"
        raise ng.UserError(
            f"the decoder of {name} ({type(model.base).__name__}) {what} when its causal mask is replaced, so it "
            "cannot be parallel. Use BART, mBART, Marian or T5."
        )
    if model.config.inputs != "copy" and (masked[0] - masked[2]).abs().max() <= 1e-5 * masked.abs().max():
        raise ng.UserError(
            f"the decoder of {name} ({type(model.base).__name__}) knows only distances between places, so places that "
            f"all read the mask token would get the same token. Use inputs=copy, not inputs={model.config.inputs}."
        )
    model.train(was_training)


def load_parallel(name: str) -> ParallelModel:
    """What a run of ``parallel`` saved, in fp32."""
    model: ParallelModel = ng.loading.load_own(ParallelModel, name)
    raise_unless_parallel(model, name)
    return model
