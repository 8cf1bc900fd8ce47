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
    if min(batch, source, target) < 1 or max(source, target) > longest:
        raise UserError(
            f"expected a batch of at least 1 and lengths from 1 to {longest}, got {batch}, {source} and {target}."
        )
    if loops and not hasattr(model, "model"):
        raise UserError(f"the paper's loops work only with BART, not with {type(model).__name__}. Remove --loops.")
    if precision.endswith("pure"):
        model = model.to(dtype_of(precision))
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


SHAPES = {"bart-base": (50_265, 768, 6, 12), "small": (8_000, 256, 3, 4), "bart-tiny": (1_000, 32, 1, 2)}
"""Vocabulary, width, layers and heads of the models that are created here, with random weights."""

LLAMAS: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "tie_word_embeddings": True,
    },
    "llama-tiny": {
        "vocab_size": 1_000,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
}
"""Decoder-only models that are created here: settings of a ``LlamaConfig``."""


def built(name: str, *, trust_remote_code: bool = False) -> Any:
    """Create one of ``SHAPES`` or ``LLAMAS`` with random weights, or load any other name from a folder or the hub."""
    import transformers

    from ngramloss.models import loading
    from ngramloss.recipe import Model

    if name not in SHAPES | LLAMAS:
        _raise_if_scratch(name)
        return loading.load(Model(name=name), None, trust_remote_code=trust_remote_code)
    torch.manual_seed(0)
    kind: Any = transformers.LlamaForCausalLM if name in LLAMAS else transformers.BartForConditionalGeneration
    return kind(configuration(name))


def configuration(name: str, *, trust_remote_code: bool = False) -> Any:
    """The configuration of the model that :func:`built` returns."""
    import transformers

    from ngramloss.models import loading
    from ngramloss.recipe import Model

    if name not in SHAPES | LLAMAS:
        _raise_if_scratch(name)
        return loading.load_config(Model(name=name), trust_remote_code=trust_remote_code)
    if name in LLAMAS:
        return transformers.LlamaConfig(**LLAMAS[name])
    V, D, layers, heads = SHAPES[name]
    return transformers.BartConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * D,
        decoder_ffn_dim=4 * D,
        max_position_embeddings=1024,
    )


def _raise_if_scratch(name: str) -> None:
    if name == "scratch":
        names = ", ".join(SHAPES | LLAMAS)
        raise UserError(f"bench cannot use scratch, which has no size. Use {names}, a folder or a hub id.")


def example(model: Any, batch: int, source: int, target: int, device: str) -> dict[str, Tensor]:
    """A batch of random ids with full length."""
    generator = torch.Generator().manual_seed(0)
    V = model.get_output_embeddings().weight.shape[0]
    ids = torch.randint(4, V, (batch, source), generator=generator).to(device)
    labels = torch.randint(4, V, (batch, target), generator=generator).to(device)
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
