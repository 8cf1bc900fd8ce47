"""a Hugging Face model → its decoder one token at a time, with caches that stay where they are.

The weights and modules are the model's own. Keys and values of a source are kept once for all of its beams, a table
says which beam wrote those of the texts, and the position is a tensor. So no step copies a cache or asks the device for
a value. A prompt of a decoder-only model is what a source is to an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import pad, scaled_dot_product_attention

from ngramloss.errors import UserError
from ngramloss.loss.stats import head_logits
from ngramloss.models.attached.heads import has_encoder, head_module, head_of
from ngramloss.models.attached.unmasked import attention_named
from ngramloss.search import fused_layers
from ngramloss.search.beams import has_kernels
from ngramloss.search.fused_layers import GATED, ROTARY, Joined, added, fused_forwards, normed, replaced

MULTIPLE = 64
"""On a GPU the head's rows are filled up to a multiple of this, or matrix products take several times as long."""


class PaddedHead(NamedTuple):
    """The output head of a model, with more rows than the vocabulary has."""

    weight: Tensor  # [V', D]
    bias: Tensor | None  # [V']; None if it is 0
    scale: float  # multiplies the hidden states
    softcap: float | None  # bounds the logits; None if nothing does
    vocabulary: int  # the rows that count, V

    @torch.no_grad()
    def refresh(self, model: Any) -> None:
        """Copy the model's weights again, where these are copies: a model in training has changed them."""
        head = head_of(model, head_module(model))
        if self.weight.data_ptr() != head.weight.data_ptr():
            self.weight[: self.vocabulary].copy_(head.weight)
        if self.bias is not None and head.bias is not None:
            self.bias[: self.vocabulary].copy_(head.bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, K, D] → [B, K, V]."""
        made = head_logits(hidden, self.weight, bias=self.bias, scale=self.scale, softcap=self.softcap)   # [B, K, V']
        return made[..., : self.vocabulary]


@torch.no_grad()
def padded_head(model: Any) -> PaddedHead:
    """The head of a model; on a GPU a copy that is filled up, if it needs to be."""
    head = head_of(model, head_module(model))
    V = head.weight.shape[0]
    more = -V % MULTIPLE if head.weight.device.type == "cuda" else 0
    weight = pad(head.weight, (0, 0, 0, more)) if more else head.weight  # [V', D]
    # One that is 0 now may be trained.
    has_bias = head.bias is not None and (head.bias.requires_grad or bool(head.bias.any()))
    bias = pad(head.bias, (0, more)).to(weight) if head.bias is not None and has_bias else None  # [V']
    return PaddedHead(weight, bias, head.scale, head.softcap, V)


class Decoder:
    """The decoder of a model in ``DECODERS``, for B sources of S tokens with padding, and K beams of up to L."""

    heads: int  # that have keys and values
    width: int  # of a head
    most_positions: int | None = None  # of a prompt and its text together, if the model has no more
    source_states: Tensor | None = None  # what the encoder made of the sources that were read last, [B, S, D]

    def __init__(
        self, model: Any, *, sources: int, beams: int, source_length: int, text_length: int, head: PaddedHead,
        joined: Joined | None = None, plain: bool = False,
    ) -> None:
        self.model, self.decoder, self.head, self.joined = model, model.get_decoder(), head, joined or Joined()
        self.beams, self.text_length = beams, text_length
        layers, dtype, device = len(self._layers()), model.dtype, model.device
        texts = layers, sources * beams, self.heads, text_length, self.width
        self.has_kernels = has_kernels(device) and not plain
        # For kernels, they lie as a product over all heads of a token leaves them.
        whole = (source_length, self.heads) if self.has_kernels else (self.heads, source_length)
        stored = layers, sources, *whole, self.width
        self.keys, self.values = (torch.zeros(texts, dtype=dtype, device=device) for _ in range(2))
        self.stored = tuple(torch.zeros(stored, dtype=dtype, device=device) for _ in range(2))
        """Keys and values of the sources as they lie in memory."""
        self.source_keys, self.source_values = (
            each.transpose(2, 3) if self.has_kernels else each for each in self.stored
        )                                                                # [layers, B, H, S, d] each
        self.source_lengths = torch.ones(sources, dtype=torch.long, device=device)       # [B]
        self.positions = torch.arange(text_length, device=device)        # [L]
        self.own = torch.arange(beams, device=device).view(1, -1, 1).expand(sources, -1, text_length)    # [B, K, L]
        self.origin = self.own.clone()                                   # [B, K, L]
        self.forwards = fused_forwards(self._reader(), self.joined, reads_sources=True) if self.has_kernels else {}

    @classmethod
    def _joinable(cls, model: Any) -> Iterator[tuple[Module, ...]]:
        yield from ()

    def refresh(self) -> None:
        """Compute again what depends on the weights alone: a model in training has changed them."""

    def _reader(self) -> Any:
        return self.model.get_encoder()

    @torch.no_grad()
    def read(self, ids: Tensor, mask: Tensor) -> None:
        """Read the sources: ids and mask, [B, S] each, with padding on the right."""
        self.refresh()
        self.source_lengths.copy_(mask.sum(-1))
        self.origin.copy_(self.own)
        with replaced(self.forwards):
            self._read(ids, mask)

    def logits(self, tokens: Tensor, position: Tensor) -> Tensor:
        """Logits of the tokens, [B, K, V], after these newest ones, [B, K], at a position, []."""
        return self.head.logits(self.hidden(tokens, position))

    def hidden(self, tokens: Tensor, position: Tensor) -> Tensor:
        """What the head reads of these newest tokens, [B, K] → [B, K, D]: of K beams at a position, [].

        Given positions [B, K], they are K tokens of one text each, of which every one sees those before it. Keys and
        values that an earlier call left at or behind a row's first position are overwritten, and never seen.
        """
        raise NotImplementedError

    def reorder(self, parents: Tensor, position: Tensor) -> None:
        """Let beam k of a source continue what beam ``parents[b, k]`` was up to this position, [B, K] and []."""
        if self.has_kernels:
            from ngramloss.search.kernels import attention as decoding

            decoding.reorder(self.origin, parents, position)
            return
        continued = self.origin.gather(1, parents.unsqueeze(-1).expand_as(self.origin))      # [B, K, L]
        self.origin.copy_(continued.where(self.positions <= position, self.own))

    def take(self, other: Decoder, sources: Tensor) -> None:
        """Have the caches of these sources of another decoder of the same model and lengths, [n]."""
        self.refresh()
        count = len(sources)
        for mine, theirs in ((self.source_lengths, other.source_lengths), (self.origin, other.origin)):
            mine[:count].copy_(theirs.index_select(0, sources))
        pairs = [*zip(self.stored, other.stored, strict=True)]
        pairs += [(mine.unflatten(1, (-1, self.beams)), theirs.unflatten(1, (-1, self.beams)))
                  for mine, theirs in ((self.keys, other.keys), (self.values, other.values))]
        for mine, theirs in pairs:
            for layer, before in zip(mine, theirs, strict=True):   # one at a time: a copy of all would need much memory
                layer[:count].copy_(before.index_select(0, sources))

    def _layers(self) -> Any:
        raise NotImplementedError

    def _read(self, ids: Tensor, mask: Tensor) -> None:
        """Put keys and values of the sources into the caches."""
        hidden = self._reader()(input_ids=ids, attention_mask=mask).last_hidden_state     # [B, S, D]
        self.source_states = hidden
        for index, (keys, values) in enumerate(self._source_projections()):
            if self.has_kernels:
                for layer, cache in zip((keys, values), self.stored, strict=True):
                    fused_layers.write_product(layer, hidden, cache[index].flatten(2))
            else:
                self._put(self._split(keys(hidden)), self._split(values(hidden)), index)

    def _put(self, keys: Tensor, values: Tensor, index: int, *_: Any) -> tuple[Tensor, Tensor]:
        """Put keys and values of the sources of a layer into the caches, and return them from there, [B, H, S, d]."""
        self.source_keys[index].copy_(keys)
        self.source_values[index].copy_(values)
        return self.source_keys[index], self.source_values[index]

    def _source_projections(self) -> Iterator[tuple[Module, Module]]:
        """For each layer, what makes keys and values of an encoder's output."""
        raise NotImplementedError

    def _split(self, rows: Tensor) -> Tensor:
        B, T, _ = rows.shape
        return rows.view(B, T, self.heads, self.width).transpose(1, 2)

    def _normed(self, hidden: Tensor, norm: Module) -> Tensor:
        return normed(hidden, norm, has_kernels=self.has_kernels)

    def _added(self, hidden: Tensor, part: Tensor, norm: Module) -> tuple[Tensor, Tensor]:
        return added(hidden, part, norm, has_kernels=self.has_kernels)

    def _attend_to_text(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, *, scale: float,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest tokens to the texts so far, which keep keys and values; ``bias`` is [H, L]."""
        if self.has_kernels:
            from ngramloss.search.kernels import attention as decoding

            cached = self.keys[index], self.values[index]                # [B · K, H, L, d] each
            return decoding.attend_to_text(queries, keys, values, cached, self.origin, position, scale=scale, bias=bias)
        B, K, _ = queries.shape
        if position.dim():
            return self._attend_to_row(index, queries, keys, values, position, scale=scale, bias=bias)
        texts = self._written(index, keys, values, position)             # [B · K, H, L, d] each
        mask = (self.positions <= position).view(1, 1, 1, -1)            # [1, 1, 1, L]
        if bias is not None:
            mask = bias.unsqueeze(1).masked_fill(~mask, torch.finfo(bias.dtype).min)     # [1, H, 1, L]
        newest = self._split(queries.flatten(0, 1).unsqueeze(1))         # [B · K, H, 1, d]
        found = scaled_dot_product_attention(newest, texts[0], texts[1], attn_mask=mask, scale=scale)
        return found.transpose(1, 2).reshape(B, K, -1)

    def _written(self, index: int, keys: Tensor, values: Tensor, position: Tensor) -> list[Tensor]:
        """Put keys and values of the newest tokens into the caches. Returns those of all texts, [B · K, H, L, d]."""
        cached = self.keys[index], self.values[index]                    # [B · K, H, L, d] each
        for cache, rows in zip(cached, (keys, values), strict=True):
            cache.index_copy_(2, position.view(1), self._split(rows.flatten(0, 1).unsqueeze(1)))
        B, K, _ = keys.shape
        first = torch.arange(0, B * K, K, device=keys.device).view(-1, 1, 1)         # [B, 1, 1]
        slots = (first + self.origin).flatten(0, 1)                      # [B · K, L]
        return [cache[slots, :, self.positions].transpose(1, 2) for cache in cached]

    def _attend_to_row(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, *, scale: float,
        bias: Tensor | None,
    ) -> Tensor:
        """The same of K tokens of one text at their positions, [B, K]; ``bias`` is [B, K, H, L]."""
        texts = self._written_row(index, keys, values, positions)        # [B, H, L, d] each
        mask = (self.positions <= positions.unsqueeze(-1)).unsqueeze(1)  # [B, 1, K, L]
        if bias is not None:
            mask = bias.transpose(1, 2).masked_fill(~mask, torch.finfo(bias.dtype).min)      # [B, H, K, L]
        found = scaled_dot_product_attention(self._split(queries), texts[0], texts[1], attn_mask=mask, scale=scale)
        return found.transpose(1, 2).flatten(2)

    def _written_row(self, index: int, keys: Tensor, values: Tensor, positions: Tensor) -> list[Tensor]:
        """Put keys and values of tokens of a text at their positions, [B, K]. Returns those of texts, [B, H, L, d]."""
        cached = [self.keys[index], self.values[index]]                  # [B, H, L, d] each
        for cache, rows in zip(cached, (keys, values), strict=True):
            new = self._split(rows)                                      # [B, H, K, d]
            cache.scatter_(2, positions[:, None, :, None].expand_as(new), new)
        return cached

    def _attend_to_source(self, index: int, queries: Tensor, *, scale: float) -> Tensor:
        """Attention of the newest tokens of all beams to their source, [B, K, H · d]."""
        keys, values = self.source_keys[index], self.source_values[index]        # [B, H, S, d] each
        if self.has_kernels:
            from ngramloss.search.kernels import attention as decoding

            return decoding.attend_to_source(queries, keys, values, self.source_lengths, scale=scale)
        B, K, _ = queries.shape
        places = torch.arange(keys.shape[2], device=keys.device)         # [S]
        mask = (places < self.source_lengths.unsqueeze(-1))[:, None, None]   # [B, 1, 1, S]
        found = scaled_dot_product_attention(self._split(queries), keys, values, attn_mask=mask, scale=scale)
        return found.transpose(1, 2).reshape(B, K, -1)


class BartDecoder(Decoder):
    """BART and its relatives: mBART, Pegasus, Marian, M2M100. They differ in positions and in where they normalise."""

    def __init__(self, model: Any, **sizes: Any) -> None:
        attention = model.get_decoder().layers[0].self_attn
        self.heads, self.width = attention.num_heads, attention.head_dim
        super().__init__(model, **sizes)
        self.norms_first = model.config.model_type in ("mbart", "pegasus", "m2m_100")
        self.table = self._positions()                                   # [L, D]

    def _layers(self) -> Any:
        return self.decoder.layers

    def _source_projections(self) -> Iterator[tuple[Module, Module]]:
        for layer in self.decoder.layers:
            yield layer.encoder_attn.k_proj, layer.encoder_attn.v_proj

    @classmethod
    def _joinable(cls, model: Any) -> Iterator[tuple[Module, ...]]:
        for layer in (*model.get_decoder().layers, *model.get_encoder().layers):
            yield layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj

    def hidden(self, tokens: Tensor, position: Tensor) -> Tensor:
        """What the head reads of these tokens, [B, K, D]."""
        hidden = self._embedded(tokens, position)                        # [B, K, D]
        each = ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
        norms = (getattr(layer, name) for layer in self.decoder.layers for name in each)
        normed = self._normed(hidden, next(norms)) if self.norms_first else hidden       # [B, K, D]
        for index, layer in enumerate(self.decoder.layers):
            for part in (partial(self._to_text, position), self._to_source, self._forward):
                residual = hidden if self.norms_first else normed        # [B, K, D]
                norm: Any = next(norms, getattr(self.decoder, "layer_norm", None))
                hidden, normed = self._added(residual, part(index, layer, normed), norm)
        return normed

    def _to_text(self, position: Tensor, index: int, layer: Any, hidden: Tensor) -> Tensor:
        own = layer.self_attn
        queries, keys, values = self.joined(hidden, own.q_proj, own.k_proj, own.v_proj)      # [B, K, D] each
        attended = self._attend_to_text(index, queries, keys, values, position, scale=own.scaling)   # [B, K, D]
        found: Tensor = own.out_proj(attended)
        return found

    def _to_source(self, index: int, layer: Any, hidden: Tensor) -> Tensor:
        other = layer.encoder_attn
        found: Tensor = other.out_proj(self._attend_to_source(index, other.q_proj(hidden), scale=other.scaling))
        return found

    def _forward(self, index: int, layer: Any, hidden: Tensor) -> Tensor:
        found: Tensor = layer.fc2(layer.activation_fn(layer.fc1(hidden)))
        return found

    def _embedded(self, tokens: Tensor, position: Tensor) -> Tensor:
        places = _rows(self.table, position if position.dim() else position.view(1))     # [1, D], or [B, K, D]
        if self.model.config.model_type == "m2m_100":   # it has no position for a padding token
            places = places.where((tokens != self.decoder.embed_positions.padding_idx).unsqueeze(-1), 0.0)   # [B, K, D]
        hidden: Tensor = self.decoder.embed_tokens(tokens)               # [B, K, D]
        if hasattr(self.decoder, "embed_scale"):   # in most of these models, the embedding scales itself
            hidden = hidden * self.decoder.embed_scale
        norm = getattr(self.decoder, "layernorm_embedding", None)
        return hidden + places if norm is None else self._added(hidden, places, norm)[1]

    def _positions(self) -> Tensor:
        """The vector of each position, [L, D]."""
        module, kind = self.decoder.embed_positions, self.model.config.model_type
        if kind == "m2m_100":
            first = module.padding_idx + 1
            if first + self.text_length > module.weights.shape[0]:
                module.make_weights(first + self.text_length + module.offset, module.embedding_dim, module.padding_idx)
            table: Tensor = module.weights[first : first + self.text_length]
        else:
            first = getattr(module, "offset", 0)
            table = module.weight[first : first + self.text_length]
        if len(table) < self.text_length:
            raise UserError(f"the model has {len(table)} positions, but outputs may have {self.text_length} tokens. "
                            "Lower generation.max_length.")
        return table.detach().to(self.model.device, self.model.dtype)


class T5Decoder(Decoder):
    """T5 and mT5: attention with a bias by distance, nothing else for positions."""

    def __init__(self, model: Any, **sizes: Any) -> None:
        attention = model.get_decoder().block[0].layer[0].SelfAttention
        self.heads, self.width = attention.n_heads, attention.key_value_proj_dim
        super().__init__(model, **sizes)
        with torch.no_grad():
            self.biases = self._biases()

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the biases again, where they are: a graph reads them."""
        for bias, now in zip(self.biases, self._biases(), strict=True):
            if bias is not None:
                bias.copy_(now)

    def _layers(self) -> Any:
        return self.decoder.block

    def _source_projections(self) -> Iterator[tuple[Module, Module]]:
        for block in self.decoder.block:
            yield block.layer[1].EncDecAttention.k, block.layer[1].EncDecAttention.v

    @classmethod
    def _joinable(cls, model: Any) -> Iterator[tuple[Module, ...]]:
        for block in model.get_decoder().block:
            own = block.layer[0].SelfAttention
            yield own.q, own.k, own.v

    def _biases(self) -> list[Any]:
        return [self._bias(block.layer[0].SelfAttention) for block in self._layers()]

    def _bias(self, attention: Any) -> Tensor | None:
        """The bias of each position to each other, [L, H, L]; None if the layer uses that of the first."""
        if not attention.has_relative_attention_bias:
            return None
        bias: Tensor = attention.compute_bias(self.text_length, self.text_length)    # [1, H, L, L]
        return bias[0].transpose(0, 1).to(self.model.dtype).contiguous()

    def hidden(self, tokens: Tensor, position: Tensor) -> Tensor:
        """What the head reads of these tokens, [B, K, D]."""
        hidden: Tensor = self.decoder.embed_tokens(tokens)               # [B, K, D]
        norms = (part.layer_norm for block in self.decoder.block for part in block.layer)
        normed = self._normed(hidden, next(norms))                       # [B, K, D]
        bias: Tensor | None = None
        for index, block in enumerate(self.decoder.block):
            own, other = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
            table = self.biases[index]
            if table is not None:
                bias = _rows(table, position)                            # [H, L], or [B, K, H, L]
            queries, keys, values = self.joined(normed, own.q, own.k, own.v)             # [B, K, H · d] each
            attended = self._attend_to_text(index, queries, keys, values, position, scale=1.0, bias=bias)
            hidden, normed = self._added(hidden, own.o(attended), next(norms))
            attended = self._attend_to_source(index, other.q(normed), scale=1.0)         # [B, K, H · d]
            hidden, normed = self._added(hidden, other.o(attended), next(norms))
            last = next(norms, self.decoder.final_layer_norm)
            hidden, normed = self._added(hidden, block.layer[2].DenseReluDense(normed), last)
        if self._scales_outputs():
            normed = normed * self.model.config.d_model**-0.5
        return normed

    def _scales_outputs(self) -> bool:
        config = self.model.config
        if config.model_type == "umt5":   # not in every version of transformers
            scales = "model_dim" in unwrap(type(self.model).forward).__code__.co_names
            return bool(config.tie_word_embeddings and scales)
        return bool(getattr(config, "scale_decoder_outputs", False))


class CausalDecoder(Decoder):
    """A decoder-only model, whose own forward runs with an attention function that has the caches here.

    A source is a prompt without its last token. Beams stand where the model has the positions of a row: everything but
    attention treats each position alone.
    """

    def __init__(self, model: Any, *, source_length: int, **sizes: Any) -> None:
        from transformers import AttentionInterface

        config = model.config
        self.heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if not any("rotary" in name for name, _ in model.named_modules()):
            self.most_positions = config.max_position_embeddings
            source_length = min(source_length, config.max_position_embeddings)   # it was rounded up
        super().__init__(model, source_length=source_length, **sizes)
        self.softcaps = config._attn_implementation != "sdpa"   # which does not in transformers 5.17
        AttentionInterface.register(CACHED, _cached_attention)

    @classmethod
    def _joinable(cls, model: Any) -> Iterator[tuple[Module, ...]]:
        for module in model.get_decoder().modules():
            if type(module).__name__ in ROTARY:
                yield module.q_proj, module.k_proj, module.v_proj
            elif type(module).__name__ in GATED:
                yield module.gate_proj, module.up_proj

    def _layers(self) -> Any:
        return range(self.model.config.num_hidden_layers)

    def _reader(self) -> Any:
        return self.decoder

    def _read(self, ids: Tensor, mask: Tensor) -> None:
        """Put keys and values of the prompts into the caches. Nothing reads the padding behind them."""
        from transformers import DynamicCache

        if not ids.shape[1]:
            return
        cache: Any = DynamicCache()
        cache.update = self._put   # it stays empty: what it would keep is put where it belongs
        self.decoder(inputs_embeds=self._embedded(ids), past_key_values=cache, use_cache=True)

    def hidden(self, tokens: Tensor, position: Tensor) -> Tensor:
        """What the head reads of these tokens, [B, K, D]."""
        places = (self.source_lengths.unsqueeze(-1) + position).expand_as(tokens)    # [B, K]
        if self.most_positions is not None:
            places = places.clamp_max(self.most_positions - 1)   # a draft may reach beyond the longest text
        forwards = fused_forwards(self.decoder, self.joined) if self.has_kernels else {}
        with attention_named(self.model.config, CACHED), replaced(forwards):
            hidden: Tensor = self.decoder(
                inputs_embeds=self._embedded(tokens), position_ids=places, use_cache=False,
                cached=self, text_position=position,
            ).last_hidden_state                                          # [B, K, D]
        return hidden

    def _embedded(self, ids: Tensor) -> Tensor:
        """[B, T] → [B, T, D]. Some models would look on the host for padding among ids."""
        embedded: Tensor = self.model.get_input_embeddings()(ids)
        return embedded

    def attend(
        self, index: int, queries: Tensor, keys: Tensor, values: Tensor, position: Tensor, *, scale: float,
        softcap: float | None = None, window: int | None = None,
    ) -> Tensor:
        """Attention of the newest tokens to prompt and text, [B, K, G · H · d]; ``window``: positions, with its own."""
        B, K, _ = queries.shape
        sources = self.source_keys[index], self.source_values[index]     # [B, H, S, d] each
        if self.has_kernels:
            from ngramloss.search.kernels import attention as decoding

            bounds: dict[str, Any] = {"scale": scale, "softcap": softcap, "window": window}
            prompt = decoding.attend_to_prompt(queries, *sources, self.source_lengths, position, **bounds)
            cached = self.keys[index], self.values[index]                # [B · K, H, L, d] each
            return decoding.attend_to_text(
                queries, keys, values, cached, self.origin, position, prompt=prompt, **bounds
            )
        if position.dim():
            texts = self._written_row(index, keys, values, position)     # [B, H, L, d] each
            texts = [each.unsqueeze(1).expand(-1, K, -1, -1, -1) for each in texts]      # [B, K, H, L, d] each
        else:
            texts = [each.unflatten(0, (B, K)) for each in self._written(index, keys, values, position)]
        grouped = queries.view(B, K, self.heads, -1, self.width)         # [B, K, H, G, d]
        to_source = torch.einsum("bkhgd,bhsd->bkhgs", grouped, sources[0])           # [B, K, H, G, S]
        to_text = torch.einsum("bkhgd,bkhtd->bkhgt", grouped, texts[0])  # [B, K, H, G, L]
        scores = scale * torch.cat([to_source, to_text], -1)             # [B, K, H, G, S + L]
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        S, lengths = sources[0].shape[2], self.source_lengths.unsqueeze(-1)          # [B, 1]
        places = torch.arange(S, device=scores.device).expand(B, -1)     # [B, S]
        places = torch.cat([places.where(places < lengths, -1), lengths + self.positions], 1)[:, None]   # [B, 1, S + L]
        newest = (lengths + position).unsqueeze(-1)                      # [B, 1, 1], or [B, K, 1]
        visible = (places >= 0) & (places <= newest)                     # [B, 1, S + L], or [B, K, S + L]
        if window is not None:
            visible &= places > newest - window
        weights = scores.float().masked_fill(~visible[:, :, None, None], -torch.inf).softmax(-1).to(scores.dtype)
        found = torch.einsum("bkhgs,bhsd->bkhgd", weights[..., :S], sources[1])      # [B, K, H, G, d]
        return (found + torch.einsum("bkhgt,bkhtd->bkhgd", weights[..., S:], texts[1])).flatten(2)


def _rows(table: Tensor, position: Tensor) -> Tensor:
    """The rows of a table at a position, [], or at several, without a look at its value on the host."""
    return table.index_select(0, position.flatten()).view(*position.shape, *table.shape[1:])


CACHED = "ngramloss"  # the name of :func:`_cached_attention` for transformers


def _cached_attention(
    module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: None, *, cached: CausalDecoder,
    text_position: Tensor, scaling: float, softcap: float | None = None, sliding_window: int | None = None, **_: Any,
) -> tuple[Tensor, None]:
    """What a layer calls instead of its own attention: queries, keys and values [B, heads, K, d] → [B, K, heads, d]."""
    query, key, value = (each.transpose(1, 2).flatten(2) for each in (queries, keys, values))        # [B, K, heads · d]
    found = cached.attend(
        module.layer_idx, query, key, value, text_position, scale=scaling,
        softcap=softcap if cached.softcaps else None, window=sliding_window,
    )
    return found.unflatten(-1, (-1, cached.width)), None


CAUSAL = ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "smollm3", "olmo", "olmo2", "phi",
          "phi3", "granite", "cohere", "gpt2", "gpt_neox", "opt"]
"""Decoder-only models whose texts are compared with those of ``hf``."""
DECODERS: dict[str, type[Decoder]] = (
    dict.fromkeys(["bart", "mbart", "pegasus", "marian", "m2m_100"], BartDecoder)
    | dict.fromkeys(["t5", "mt5", "umt5"], T5Decoder)
    | dict.fromkeys(CAUSAL, CausalDecoder)
)
"""Kind of model → its decoder."""


def joined(model: Any) -> Joined:
    """Linear layers of a model that are computed together; on a CPU there are none."""
    return Joined(DECODERS[model.config.model_type]._joinable(model) if has_kernels(model.device) else ())


def random_ids(model: Any, rows: int, *lengths: int) -> list[Tensor]:
    """Random ids to compare two forms of a model, [rows, length] each; no padding, which moves M2M100's positions."""
    generator = torch.Generator().manual_seed(0)
    V, pad = model.get_output_embeddings().weight.shape[0], model.config.pad_token_id or 0
    longest = getattr(model.config, "max_position_embeddings", None) or max(lengths)
    return [(torch.randint(1, V, (rows, min(length, longest)), generator=generator) + pad) % V for length in lengths]


@torch.inference_mode()
def difference(model: Any, *, plain: bool = False) -> float:
    """How far log-probabilities of the decoder here are from the model's own on random tokens: root mean square.

    The largest of a million differences says little in 16 bits: rounding alone makes it 0.5 to 0.9 in a deep model.
    ``plain``: without kernels, and with all tokens of a text at once.
    """
    source, target = (ids.to(model.device) for ids in random_ids(model, 2, 24, 8))   # [B, S], [B, T]
    (B, S), T = source.shape, target.shape[1]
    mask = torch.ones_like(source)
    mask[1, S // 2 :] = 0
    training = model.training
    model.eval()
    own = partial(type(model).forward, model)   # not what a trainer put there: it may compute in another precision
    if has_encoder(model):
        expected = own(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits       # [B, T, V]
    else:
        rows = [torch.cat(row).unsqueeze(0) for row in ((source[0], target[0]), (source[1, : S // 2], target[1]))]
        expected = torch.cat([own(input_ids=row).logits[:, -T:] for row in rows])    # [B, T, V]
    decoder = DECODERS[model.config.model_type](
        model, sources=B, beams=1, source_length=S, text_length=T, head=padded_head(model),
        joined=None if plain else joined(model), plain=plain,
    )
    decoder.read(source, mask)
    places = torch.arange(T, device=model.device)                        # [T]
    if plain:
        found = decoder.logits(target, places.expand(B, -1))             # [B, T, V]
    else:
        found = torch.cat([decoder.logits(target[:, [t]], places[t]) for t in range(T)], 1)
    model.train(training)
    apart: Tensor = found.float().log_softmax(-1) - expected.float().log_softmax(-1)
    return float(apart.square().mean().sqrt())
