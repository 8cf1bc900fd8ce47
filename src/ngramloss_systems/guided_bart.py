"""a BART → the same with a second text that guides it: its decoder attends to the guidance, then to the document.

After Dou et al. (2021) and their BART in fairseq. One encoder reads both texts; only its top layer is each text's own.
Attention to the guidance has its own residual and norm, between self-attention and the attention to the document.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, BartConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bart import modeling_bart

import ngramloss as ng

bart: Any = modeling_bart


class GuidedBartConfig(BartConfig):  # type: ignore[no-untyped-call]
    """The configuration of a BART. Only the name of its type is another one."""

    model_type = ng.loading.GUIDED


AutoConfig.register(ng.loading.GUIDED, GuidedBartConfig)  # or its tokenizer is loaded with a warning


class GuidanceAttention(nn.Module):
    """Attention of the decoder to the guidance, whose keys and values are made once for all tokens of a text."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def keys_values(self, states: Tensor) -> Tensor:
        """States of the guidance, [B, G, D] → keys and values, [B, 2, H, G, D / H]."""
        return torch.stack([self._by_head(self.k_proj(states)), self._by_head(self.v_proj(states))], 1)

    def forward(self, hidden: Tensor, keys_values: Tensor, mask: Tensor | None) -> Tensor:
        """States of the decoder, [B, T, D], keys and values, and what is real of the guidance, [B, G] → [B, T, D]."""
        keys, values = keys_values.unbind(1)  # [B, H, G, D / H]
        found = F.scaled_dot_product_attention(
            self._by_head(self.q_proj(hidden)),
            keys,
            values,
            attn_mask=None if mask is None else mask[:, None, None].bool(),  # [B, 1, 1, G]
            dropout_p=self.dropout if self.training else 0.0,
        )  # [B, H, T, D / H]
        made: Tensor = self.out_proj(found.transpose(1, 2).flatten(2))  # [B, T, D]
        return made

    def _by_head(self, states: Tensor) -> Tensor:
        B, T, _ = states.shape
        return states.view(B, T, self.heads, -1).transpose(1, 2)  # [B, H, T, D / H]


class GuidedDecoderLayer(bart.BartDecoderLayer):  # type: ignore[misc]
    """A layer of BART's decoder with an attention to the guidance before that to the document."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.number = layer_idx
        self.guidance_attn = GuidanceAttention(self.embed_dim, config.decoder_attention_heads, config.attention_dropout)
        self.guidance_attn_layer_norm = nn.LayerNorm(self.embed_dim)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = True,
        *,
        guidance: Sequence[Tensor],
        guidance_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """As BART's, with the keys and values of the guidance for each layer, and what is real of it, [B, G]."""
        found, _ = self.self_attn(
            hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **options
        )  # [B, T, D]
        hidden = self.self_attn_layer_norm(hidden_states + self._dropped(found))  # [B, T, D]
        found = self.guidance_attn(hidden, guidance[self.number], guidance_mask)  # [B, T, D]
        hidden = self.guidance_attn_layer_norm(hidden + self._dropped(found))  # [B, T, D]
        found, _ = self.encoder_attn(
            hidden,
            key_value_states=encoder_hidden_states,
            attention_mask=encoder_attention_mask,
            past_key_values=past_key_values,
            **options,
        )  # [B, T, D]
        hidden = self.encoder_attn_layer_norm(hidden + self._dropped(found))  # [B, T, D]
        wide = F.dropout(self.activation_fn(self.fc1(hidden)), self.activation_dropout, self.training)  # [B, T, F]
        made: Tensor = self.final_layer_norm(hidden + self._dropped(self.fc2(wide)))  # [B, T, D]
        return made

    def _dropped(self, states: Tensor) -> Tensor:
        return F.dropout(states, self.dropout, self.training)


class GuidedBart(bart.BartForConditionalGeneration):  # type: ignore[misc]
    """A BART that reads a document and a guidance. ``forward`` and ``generate`` take the guidance's ids and mask."""

    config_class = GuidedBartConfig
    config: GuidedBartConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.guidance_layer = bart.BartEncoderLayer(config)
        self.model.decoder.layers = nn.ModuleList(
            GuidedDecoderLayer(config, number) for number in range(config.decoder_layers)
        )
        self.post_init()

    def guidance(self, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The keys and values of a guidance for every layer of the decoder, [B, 2, H, G, D / H] each."""
        encoder = self.model.encoder
        embedded = encoder.embed_tokens(ids)  # [B, G, D]
        states = encoder.layernorm_embedding(embedded + encoder.embed_positions(ids))  # [B, G, D]
        states = F.dropout(states, encoder.dropout, self.training)
        seen = create_bidirectional_mask(config=self.config, inputs_embeds=embedded, attention_mask=mask)
        for layer in (*encoder.layers[:-1], self.guidance_layer):
            states = layer(states, seen)  # [B, G, D]
        return [layer.guidance_attn.keys_values(states) for layer in self.model.decoder.layers]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        encoder_outputs: Any = None,
        guidance_input_ids: Tensor | None = None,
        guidance_attention_mask: Tensor | None = None,
        guidance_keys_values: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As BART's, with a guidance, [B, G], or its keys and values, [B, L, 2, H, G, D / H], if they are known."""
        if guidance_keys_values is not None:
            guidance = list(guidance_keys_values.unbind(1))
        elif guidance_input_ids is not None:
            guidance = self.guidance(guidance_input_ids, guidance_attention_mask)
        else:
            raise ng.UserError(NO_GUIDANCE)
        if encoder_outputs is None:
            encoder_outputs = self.model.encoder(input_ids=input_ids, attention_mask=attention_mask)
        if decoder_input_ids is None and labels is None:  # BART's own would be the document
            raise ng.UserError("a guided BART needs decoder_input_ids or labels.")
        return super().forward(
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            labels=labels,
            encoder_outputs=encoder_outputs,
            guidance=guidance,
            guidance_mask=guidance_attention_mask,
            **options,
        )

    @torch.no_grad()
    def generate(
        self,
        *inputs: Any,
        guidance_input_ids: Tensor | None = None,
        guidance_attention_mask: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As BART's. Keys and values of the guidance are made once; beams of a document have the same ones."""
        if guidance_input_ids is None:
            raise ng.UserError(NO_GUIDANCE)
        made = torch.stack(self.guidance(guidance_input_ids, guidance_attention_mask), 1)  # [B, L, 2, H, G, D / H]
        if guidance_attention_mask is not None:
            options["guidance_attention_mask"] = guidance_attention_mask
        return super().generate(*inputs, guidance_keys_values=made, **options)


NO_GUIDANCE = (
    "a guided BART reads a guidance beside the document: pass guidance_input_ids and guidance_attention_mask. If it is "
    "a run of gsum, ngramloss generate makes them from the run's folder."
)


def guided(model: Any, *, copying: bool = False) -> GuidedBart:
    """A BART → a guided BART with its weights, also in the guidance's top layer; attention to the guidance is new."""
    settings = {
        name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "architectures")
    }
    made = GuidedBart(GuidedBartConfig(**settings))
    unknown = made.load_state_dict(model.state_dict(), strict=False).unexpected_keys
    assert not unknown, f"a BART has no weights such as {unknown[0]}"
    made.guidance_layer.load_state_dict(made.model.encoder.layers[-1].state_dict())
    made.generation_config = model.generation_config
    if copying:
        for layer in made.model.decoder.layers:
            ng.loading.start_as_identity(layer.guidance_attn)
    return made


def load_guided(settings: ng.recipe.Model, tokenizer: Any) -> GuidedBart:
    """A guided BART from its folder, from any BART, or from scratch, in fp32."""
    if ng.loading.saved_type(settings.name) == ng.loading.GUIDED:
        made: GuidedBart = ng.loading.load_own(GuidedBart, settings.name)
        return made
    config = ng.loading.load_config(settings)
    if config.model_type != "bart":
        what = f"{settings.name} is of the type {config.model_type}"
        if settings.name == "scratch":
            what = f"model.architecture is {settings.architecture}"
        raise ng.UserError(f"guidance needs a BART, such as facebook/bart-large, and {what}.")
    model = ng.loading.load(settings, tokenizer)
    return guided(model, copying=settings.name == "scratch" and settings.copying)
