"""a model, an objective, lengths → documents per second of whole training steps, compared with the model's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ngramloss.bench.captured import captured as graph_of
from ngramloss.bench.child import shortened
from ngramloss.bench.clock import cost, median_milliseconds
from ngramloss.bench.peers import papers_loops
from ngramloss.errors import UserError
from ngramloss.hf.heads import has_encoder
from ngramloss.models.precision import to_precision
from ngramloss.stats import IGNORE_INDEX

NAN = float("nan")


class Step(NamedTuple):
    """One line of the table."""

    what: str
    docs_per_second: float
    milliseconds: float
    gibibytes: float
    to_stock: float
    added_milliseconds: float = NAN
    """Of a captured forward and backward pass, in addition to that of captured ``ce``."""
    why_not: str = ""


STOCK = "the model's own cross-entropy"
CAPTURED = ", captured"
"""At the end of objectives whose forward and backward pass is a CUDA graph."""


def measure(
    model_name: str,
    objectives: list[str],
    *,
    batch: int,
    source: int,
    target: int,
    precision: str,
    device: str,
    loops: bool,
    trust_remote_code: bool = False,
    captured: Sequence[str] = (),
) -> Iterator[Step]:
    """Measure docs/s of forward, backward and optimiser: first with the model's own loss, then with each objective.

    The objectives in ``captured`` come last, after ``ce``, with their forward and backward pass as a CUDA graph.
    """
    from ngramloss.hf.attach import attach, detach

    model: Any = built(model_name, trust_remote_code=trust_remote_code).to(device)
    longest = getattr(model.config, "max_position_embeddings", None) or max(source, target)
    if min(batch, source, target) < 1 or (max(source, target) if has_encoder(model) else source + target) > longest:
        raise UserError(
            f"expected a batch of at least 1 and lengths from 1 to {longest}, got {batch}, {source} and {target}."
        )
    if loops and not (hasattr(model, "model") and has_encoder(model)):
        raise UserError(f"the paper's loops work only with BART, not with {type(model).__name__}. Remove --loops.")
    if precision.endswith("pure"):
        model = to_precision(model, dtype_of(precision))
    inputs = example(model, batch, source, target, device)
    optimiser = torch.optim.AdamW(model.parameters(), 3e-5, fused=device == "cuda")
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16")
    first: float | None = None
    contestants: list[str] = [STOCK, *objectives, *(["the paper's loops, ce + matches(2,3,4)"] if loops else [])]
    for what in contestants:
        loss_of: Callable[[], Tensor] = lambda: model(**inputs).loss  # noqa: E731
        if what in objectives:
            attach(model, what)
        elif what != STOCK:
            loss_of = lambda: _loops(model, inputs)  # noqa: E731

        def run(loss_of: Callable[[], Tensor] = loss_of) -> None:
            with torch.autocast(device, dtype_of(precision), enabled=precision in ("bf16", "fp16")):
                loss = loss_of()
            scaler.scale(loss).backward()
            scaler.step(optimiser)
            scaler.update()
            optimiser.zero_grad(set_to_none=True)

        spent = cost(run, device, repeats=15, warm_up=5)
        if what in objectives:
            detach(model)
        first = first or spent.milliseconds
        yield Step(what, 1e3 * batch / spent.milliseconds, *spent, first / spent.milliseconds)

    base = NAN
    for objective in dict.fromkeys(["ce", *captured]) if captured else ():
        attach(model, objective)
        try:
            passes, whole, gibibytes = _captured_times(model, inputs, optimiser, scaler, precision, device)
            base = passes if objective == "ce" else base
            to_stock = (first or NAN) / whole
            row = Step(objective + CAPTURED, 1e3 * batch / whole, whole, gibibytes, to_stock, passes - base)
        except RuntimeError as reason:  # such as too little memory, or a model that waits for the device
            row = Step(objective + CAPTURED, NAN, NAN, NAN, NAN, why_not=shortened(reason))
        detach(model)
        yield row


def _captured_times(
    model: Any, inputs: dict[str, Tensor], optimiser: torch.optim.Optimizer, scaler: Any, precision: str, device: str
) -> tuple[float, float, float]:
    """Milliseconds of the captured passes, the same with the optimiser, and GiB. Gradients are dropped at the end."""

    def forward_backward() -> None:
        optimiser.zero_grad()
        with torch.autocast(device, dtype_of(precision), enabled=precision in ("bf16", "fp16")):
            loss = model(**inputs).loss
        scaler.scale(loss).backward()

    def run() -> None:
        graph.replay()
        scaler.step(optimiser)
        scaler.update()

    try:
        graph = graph_of(forward_backward, optimiser.zero_grad)
        passes = median_milliseconds(graph.replay, device, repeats=15, warm_up=5)
        whole = median_milliseconds(run, device, repeats=15, warm_up=5)
        return passes, whole, graph.gibibytes
    finally:
        optimiser.zero_grad()


class Shape(NamedTuple):
    """The sizes of a model that is created here, with random weights."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_value_heads: int = 0
    """Of a Llama; a BART has none of its own."""
    mlp: int = 0
    positions: int = 1_024


SHAPES = {
    "bart-base": Shape(50_265, 768, 6, 12),
    "small": Shape(8_000, 256, 3, 4),
    "bart-tiny": Shape(1_000, 32, 1, 2),
    "smollm2-135m": Shape(49_152, 576, 30, 9, key_value_heads=3, mlp=1_536, positions=8_192),
    "llama-tiny": Shape(1_000, 32, 2, 4, key_value_heads=2, mlp=64),
}
"""The models that are created here, by name."""


def built(name: str, *, trust_remote_code: bool = False) -> Any:
    """Create one of ``SHAPES`` with random weights, or load any other name from a folder or the hub."""
    import transformers

    from ngramloss.models import loading
    from ngramloss.recipe import Model

    if name not in SHAPES:
        _raise_if_scratch(name)
        return loading.load(Model(name=name), None, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    config = configuration(name)
    if config.is_encoder_decoder:
        return transformers.BartForConditionalGeneration(config)
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-untyped-call]


def configuration(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model that :func:`built` returns."""
    import transformers

    from ngramloss.models import loading
    from ngramloss.recipe import Model

    if name not in SHAPES:
        _raise_if_scratch(name)
        return loading.load_config(Model(name=name), trust_remote_code=trust_remote_code)
    V, D, layers, heads, key_value_heads, mlp, positions = SHAPES[name]
    if key_value_heads:
        return transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=D,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_value_heads,
            intermediate_size=mlp,
            max_position_embeddings=positions,
            rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    return transformers.BartConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * D,
        decoder_ffn_dim=4 * D,
        max_position_embeddings=positions,
    )


def _raise_if_scratch(name: str) -> None:
    if name == "scratch":
        names = ", ".join(SHAPES)
        raise UserError(f"bench cannot use scratch, which has no size. Use {names}, a folder or a hub id.")


def example(model: Any, batch: int, source: int, target: int, device: str) -> dict[str, Tensor]:
    """A batch of random ids with full length. For a decoder-only model, the target follows the source in one row."""
    generator = torch.Generator().manual_seed(0)
    V = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(4, V, (batch, source), generator=generator).to(device)
    labels = torch.randint(4, V, (batch, target), generator=generator).to(device)
    if not has_encoder(model):
        ids, labels = torch.cat([ids, labels], 1), torch.cat([torch.full_like(ids, IGNORE_INDEX), labels], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def dtype_of(precision: str) -> torch.dtype:
    """The dtype of the matrix products."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision.removesuffix("-pure")]


def _loops(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    hidden = model.model(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        decoder_input_ids=model.prepare_decoder_input_ids_from_labels(inputs["labels"]),
    ).last_hidden_state  # [B, T, D]
    return papers_loops(hidden, model.lm_head.weight, inputs["labels"], placed=False, lengths=(2, 3, 4))
