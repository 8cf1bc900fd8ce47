"""a recipe's model section → a Hugging Face model that writes text, loaded or from scratch, and its tokenizer."""

from __future__ import annotations

import math
import os
import pickle
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ngramloss.data.tokens import cached_at, same_ids
from ngramloss.errors import UserError
from ngramloss.models.remote_code import allow_remote_code as allow_remote_code
from ngramloss.models.remote_code import remote_code_allowed as remote_code_allowed
from ngramloss.models.settings import check_settings, pad_id, try_out
from ngramloss.output.console import quiet_loading
from ngramloss.recipe import Generation, Model, trained_by
from ngramloss.storage.checksums import cached_folder
from ngramloss.storage.files import FULL, is_file_name, read_object

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
GUIDED = "guided_bart"
"""The type of a BART with a guidance, not ``bart``: all that loads a BART would leave it out silently."""
PARALLEL = "parallel"
"""The type of an encoder-decoder that predicts all tokens at once: a causal one would write nonsense silently."""
OF_SYSTEMS = {
    GUIDED: "a guided BART, which needs a guidance beside the document. To generate, give the folder of its run to "
    "ngramloss generate; to train one, use ngramloss train gsum.",
    PARALLEL: "a parallel model, which predicts all tokens at once. To generate, give the folder of its run to "
    "ngramloss generate; to train one, use ngramloss train parallel.",
}
"""Types of models that only systems load, and what to do with them."""
WEIGHTS = (".safetensors", ".bin")
"""What files of weights end with. A .bin is a pickle, of which only tensors are loaded."""


def load(settings: Model, tokenizer: Any) -> Any:
    """Load the model in fp32, or create it from scratch; a causal tokenizer without padding gets its end token."""
    if settings.encoder:
        from ngramloss.models.encoders import with_new_decoder

        return with_new_decoder(settings, tokenizer)
    if settings.name == "scratch":
        return from_scratch(settings, tokenizer)
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = load_config(settings)
    kind: Any = AutoModelForCausalLM if is_causal(config) else AutoModelForSeq2SeqLM
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")  # or transformers asks the hub to convert a .bin
    with explained(settings.name, "model"), quiet_loading():
        _check_indices(Path(settings.name))
        model = load_weights(kind, settings.name, config=config, **loading_options(settings))
        if is_causal(config):
            _pad(model, tokenizer)
        check_settings(model)
        try_out(model)
    return model


def load_weights(kind: Any, name: str, *, needless: tuple[str, ...] = (), **options: Any) -> Any:
    """A model of this class in fp32. Raises if weights are missing whose names do not begin with ``needless``."""
    model, loaded = kind.from_pretrained(
        name, dtype=torch.float32, weights_only=True, output_loading_info=True, **options
    )
    if missing := sorted(key for key in loaded["missing_keys"] if not key.startswith(needless)):
        raise UserError(f"its weights lack {len(missing)} tensors, such as {missing[0]}, which would be random")
    return model


def load_own(kind: Any, name: str) -> Any:
    """What ``save_pretrained`` of your own class wrote into a folder, in fp32."""
    with explained(name, "model"), quiet_loading():
        model = load_weights(kind, name, local_files_only=True, trust_remote_code=False)
        check_settings(model)
    return model


def _check_indices(folder: Path) -> None:
    """Raise if an index of weights in parts names anything but files of its own kind in the same folder."""
    for suffix in WEIGHTS:
        for path in folder.glob(f"*{suffix}.index.json"):
            parts = read_object(path).get("weight_map")
            if not isinstance(parts, dict) or not parts:
                raise UserError(f"{path.name} has no weight_map, which says where each tensor is")
            for name in parts.values():
                if not is_file_name(name) or not name.endswith(suffix):
                    raise UserError(f"{path.name} names {name!r}, which is not a {suffix} file in the same folder")


def _pad(model: Any, tokenizer: Any) -> None:
    """Give a decoder-only model and its tokenizer any id for padding, which is masked by place, never by id."""
    if tokenizer is None:  # without texts, as in benchmarks
        model.config.pad_token_id = model.config.pad_token_id or 0
        return
    if tokenizer.pad_token_id is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    pad = pad_id("its tokenizer has", tokenizer)
    for config in (model.config, model.generation_config):
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = pad


def is_causal(config: Any) -> bool:
    """Whether a configuration is that of a decoder-only model, which reads a prompt and writes on."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
    from transformers import MODEL_FOR_MASKED_LM_MAPPING as MASKED

    if getattr(config, "is_encoder_decoder", False):
        return False
    if type(config) in CAUSAL:  # BERT is among them: as a decoder, which it is only if it says so
        return type(config) not in MASKED or bool(getattr(config, "is_decoder", False))
    return "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})


def stop_ids(settings: Model, config: Any, tokenizer: Any) -> list[int]:
    """The ids at which a decoder-only model stops: those of its generation settings, or its tokenizer's end token."""
    found = None
    if settings.name != "scratch":
        from transformers import GenerationConfig

        options = loading_options(settings)
        options.pop("trust_remote_code")  # it is a file of settings, which has no code
        with explained(settings.name, "model"):
            try:
                generation = GenerationConfig.from_pretrained(settings.name, **options)
            except OSError:  # it has no file of them
                generation = GenerationConfig.from_model_config(config)
        found = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
    found = tokenizer.eos_token_id if found is None else found
    if found is None:
        raise UserError(
            f"{settings.name} has no token that ends a text. Set eos_token_id in its generation_config.json."
        )
    return list(found) if isinstance(found, list | tuple) else [int(found)]


def load_config(settings: Model, *, verb: str = "train") -> Any:
    """Load the configuration of a model, which must write text; of one from scratch, that of its family."""
    from transformers import AutoConfig

    if settings.encoder:
        from ngramloss.models.encoders import with_decoder_config

        return with_decoder_config(settings)
    if settings.name == "scratch":
        return AutoConfig.for_model(_family(settings))
    if (kind := saved_type(settings.name)) in OF_SYSTEMS:
        raise UserError(f"{settings.name} is {OF_SYSTEMS[kind]}")
    with explained(settings.name, "model"):
        config = AutoConfig.from_pretrained(settings.name, **loading_options(settings))
        refuse_foreign_kernels(config)
    if not is_causal(config) and not _rewrites_text(config):
        raise UserError(
            f"{settings.name} writes no text{' from text' if config.is_encoder_decoder else ''} (its type is "
            f"{config.model_type}): ngramloss {verb} needs an encoder-decoder, such as facebook/bart-base, or a "
            "decoder-only model, such as HuggingFaceTB/SmolLM2-135M-Instruct."
        ).on_page("models")
    if quantised := getattr(config, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UserError(
            f"{settings.name} is quantised ({method or 'quantization_config'}), and ngramloss {verb} needs whole "
            "weights. Name the model before quantisation, or dequantise it with model.dequantize() and "
            "save_pretrained. To train adapters of a quantised model, use attach with PEFT in another trainer."
        )
    return config


def saved_type(name: str) -> str:
    """The type of the model in a folder, such as ``bart``; empty if it is not one."""
    try:
        return str(read_object(Path(name) / "config.json").get("model_type", ""))
    except (OSError, ValueError):  # there is none, or it is damaged, which is reported where it is loaded
        return ""


def _rewrites_text(config: Any) -> bool:
    """Whether a configuration is that of an encoder-decoder that reads text, not images or speech."""
    from transformers import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING as FROM_TEXT

    code = getattr(config, "auto_map", None) or {}
    return config.is_encoder_decoder and (type(config) in FROM_TEXT or "AutoModelForSeq2SeqLM" in code)


@cache
def hub_answers() -> bool:
    """Whether the Hugging Face hub can be reached. Checked once, with the hub's client, for at most 3 seconds."""
    try:
        from huggingface_hub import constants, get_session
    except ImportError:
        return False
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=3)
    except Exception:  # a network may fail in many ways
        return False
    return True


def loading_options(settings: Model) -> dict[str, Any]:
    """Options for ``from_pretrained``. Without the hub only its cache is used: the client would retry for a minute."""
    offline = not Path(settings.tokenizer or settings.encoder or settings.name).is_dir() and not hub_answers()
    trust = remote_code_allowed()
    return {"revision": settings.revision, "trust_remote_code": trust, "local_files_only": offline}


def refuse_foreign_kernels(config: Any) -> None:
    """Refuse a configuration that names a repository whose code computes attention, unless such code may run."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        kernel = str(getattr(part, "_attn_implementation", None))
        if "/" in kernel and not remote_code_allowed():
            raise UserError(f"its attention is code from the hub repository {kernel} (trust_remote_code)")


def load_tokenizer(settings: Model, texts: Callable[[], Iterable[str]], fingerprint: str) -> tuple[Any, Path | None]:
    """The tokenizer, loaded or trained (cached by the texts' ``fingerprint``), and its folder if trained here."""
    from transformers import AutoTokenizer

    if settings.name != "scratch" or settings.encoder or settings.tokenizer:
        name = settings.tokenizer or settings.encoder or settings.name
        options = loading_options(settings)
        with explained(name, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(name, **options)
            if tokenizer.vocab_size <= len(set(tokenizer.all_special_tokens)):  # loaded from a config only
                raise UserError("it has only special tokens; its vocabulary is missing")
            tokenizer.decode(tokenizer("a b")["input_ids"])  # raises if it cannot be used
        return tokenizer, None
    what = ["bpe", 1, fingerprint, settings.vocabulary]
    return cached_tokenizer(what, lambda: train_tokenizer(texts(), settings.vocabulary))


def cached_tokenizer(what: Sequence[Any], train: Callable[[], Any]) -> tuple[Any, Path]:
    """A tokenizer that is trained once, and its folder; ``what`` is all that it depends on."""
    from transformers import AutoTokenizer

    folder = cached_at("tokenizers", what)
    cached_folder(folder, lambda partial: train().save_pretrained(partial), what="tokenizer cache")
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False), folder


def load_frozen(name: str, tokenizer: Any, otherwise: str) -> tuple[Any, Any]:
    """A model that is not trained, and its tokenizer."""
    named = Model(name=name)
    own, _ = load_tokenizer(named, list, "")
    if not same_ids(own, tokenizer):
        raise UserError(otherwise)
    return load(named, own).eval().requires_grad_(False), own


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Train a byte-level BPE with BART's special tokens. A word gets the same tokens at every position."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", SPECIAL.index("<s>")), ("</s>", SPECIAL.index("</s>"))]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        bos_token="<s>",
        eos_token="</s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def from_scratch(settings: Model, tokenizer: Any) -> Any:
    """Create a new model of this architecture and size, with torch's current seed.

    With ``copying``, the value and output projections of cross-attention start as the identity. t5 is refused, because
    its inner width may differ. Positions start as sinusoids in bart and mbart; m2m100, pegasus and marian always have
    fixed sinusoids. ``init_std`` applies to all except t5, which scales each matrix by its size. prophetnet has two
    streams; its cross-attention has other names, so ``copying`` is refused. llama is decoder-only: it has
    ``decoder_layers`` alone, and no dropout.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    start = tokenizer.pad_token_id if settings.architecture == "t5" else tokenizer.eos_token_id
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    ids["vocab_size"] = len(tokenizer)
    if settings.architecture != "llama":
        ids["decoder_start_token_id"] = start
    config = AutoConfig.for_model(_family(settings), **ids, **_sizes(settings))
    kind: Any = AutoModelForCausalLM if is_causal(config) else AutoModelForSeq2SeqLM
    model = kind.from_config(config)
    if settings.architecture == "prophetnet":  # with a cache, transformers counts its positions from a padding id of 0
        model.generation_config.use_cache = False
    if settings.copying:
        _open_copying_path(model)
        _order_positions(model, settings.init_std)
    return model


def generation_changes(settings: Generation, *, causal: bool = False, only: Collection[str] = ()) -> dict[str, Any]:
    """A recipe's generation settings, ``only`` these, by Hugging Face's names; lengths never count a causal prompt."""
    changes: dict[str, Any] = {"do_sample": False}
    changes["_from_model_config"] = False  # otherwise it may be recreated from the model's config
    for name, value in vars(settings).items():
        stops = name == "early_stopping" and settings.num_beams == 1
        if name in ("engine", "precision", "drafter") or (only and name not in only and not stops):
            continue
        if name in ("min_length", "max_length"):  # a model's own by the other name would win
            tokens = name.replace("length", "new_tokens")
            changes |= {name: None, tokens: value or None} if causal else {name: value, tokens: None}
        elif name == "renormalize":
            changes["renormalize_logits"] = value or None  # None: not named in files
        else:
            changes[name] = value and not stops if name == "early_stopping" else value
    return changes


def prepare_generation(model: Any, settings: Generation) -> None:
    """Set the model's default generation settings, which are saved with it as ``generation_config``."""
    model.generation_config.update(**generation_changes(settings, causal=is_causal(model.config)))


def _family(settings: Model) -> str:
    return {"m2m100": "m2m_100"}.get(settings.architecture, settings.architecture)


def _sizes(settings: Model) -> dict[str, Any]:
    """The settings of a model from scratch by the names of its family."""
    if settings.architecture == "llama":
        return {
            "hidden_size": settings.width,
            "num_hidden_layers": settings.decoder_layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.heads,
            "head_dim": settings.width // settings.heads,
            "intermediate_size": settings.feed_forward,
            "initializer_range": settings.init_std,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": True,
        }
    if settings.architecture == "t5":
        return {
            "d_model": settings.width,
            "num_layers": settings.encoder_layers,
            "num_heads": settings.heads,
            "num_decoder_layers": settings.decoder_layers,
            "d_ff": settings.feed_forward,
            "d_kv": settings.width // settings.heads,
            "dropout_rate": settings.dropout,
        }
    shared = {
        "encoder_ffn_dim": settings.feed_forward,
        "decoder_ffn_dim": settings.feed_forward,
        "dropout": settings.dropout,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "init_std": settings.init_std,
        "max_position_embeddings": 1024,
    }
    if settings.architecture == "prophetnet":
        return {
            **shared,
            "hidden_size": settings.width,
            "num_encoder_layers": settings.encoder_layers,
            "num_decoder_layers": settings.decoder_layers,
            "num_encoder_attention_heads": settings.heads,
            "num_decoder_attention_heads": settings.heads,
            "ngram": 2,
        }
    return {
        **shared,
        "d_model": settings.width,
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "encoder_attention_heads": settings.heads,
        "decoder_attention_heads": settings.heads,
        "tie_word_embeddings": True,
        "forced_eos_token_id": None,
    }


@torch.no_grad()
def _open_copying_path(model: Any) -> None:
    """Make cross-attention pass on what it attends to, unchanged, from the first step."""
    attentions = [module for name, module in model.named_modules() if name.endswith("encoder_attn")]
    if not attentions:
        raise UserError(
            f"model.copying: {type(model).__name__} has no `encoder_attn` to initialise as the identity. Set "
            "model.copying=false, or choose the architecture bart, mbart, m2m100, pegasus or marian."
        )
    for attention in attentions:
        start_as_identity(attention)


@torch.no_grad()
def start_as_identity(attention: Any) -> None:
    """Let an attention pass on what it attends to, unchanged."""
    for projection in (attention.v_proj, attention.out_proj):
        torch.nn.init.eye_(projection.weight)
        torch.nn.init.zeros_(projection.bias)


@torch.no_grad()
def _order_positions(model: Any, scale: float) -> None:
    """Initialise learned positions as sinusoids, so that neighbours are similar from the first step."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.endswith("embed_positions") and module.weight.requires_grad:
            rows, width = module.weight.shape
            rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))  # [D / 2]
            angles = torch.arange(rows).unsqueeze(1) * rates  # [positions, D / 2]
            waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width]  # [positions, D]
            module.weight.copy_(waves * scale * 2**0.5)


@contextmanager
def explained(name: str, what: str) -> Iterator[None]:
    """Turn errors of loading into one message that says what to do."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of a library in Rust
            raise
        if _is_ours(error) or getattr(error, "errno", None) in FULL:
            raise
        reason = " ".join(str(error).split())
        if not reason or not isinstance(error, (OSError, ValueError, ImportError)):  # KeyError has only the key
            reason = f"{type(error).__name__}: {reason}"
        folder = Path(name)
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to run what is in it
            reason = "its .bin file is damaged, or contains more than tensors, which is never loaded"
        if "trust_remote_code" in reason:
            advice = "It comes with its own code; if you trust it, pass --trust-remote-code on the command line."
        elif folder.is_dir():
            advice = (
                "The folder must contain what save_pretrained writes: config, tokenizer files, and weights as "
                "model.safetensors or pytorch_model.bin."
            )
        else:
            advice = (
                "Give a folder that save_pretrained wrote, a hub id (the hub must be reachable), or model.name = "
                '"scratch" for a new model.'
            )
        if len(folder.parts) > 2 and not folder.exists():  # a hub id has one or two
            reason = "there is no such folder"
        if not folder.exists() and (command := trained_by(name)):
            advice = f"Train it first: {command}."
        if "couldn't connect to" in reason and not folder.is_dir():
            reason = "there is no such folder, and the Hugging Face hub cannot be reached"
        reason = reason[:300].rstrip(".")
        about = "code" if "trust_remote_code" in reason else "models"
        raise UserError(f"cannot load the {what} of {name!r}: {reason}. {advice}").on_page(about) from error


def _is_ours(error: BaseException) -> bool:
    """Whether our own code raised this, unintentionally. A library may raise anything at a file of anything."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    ours = str(innermost.f_globals.get("__name__", "")).startswith("ngramloss.")
    return ours and not isinstance(error, UserError)


def iterate_texts(examples: Iterable[Any]) -> Iterator[str]:
    """All sources and targets, to train a tokenizer for both."""
    for example in examples:
        yield example.source
        yield example.target


def own_device() -> str | None:
    """This process's own GPU under torchrun; otherwise None, for the default device."""
    rank = os.environ.get("LOCAL_RANK")
    return f"cuda:{rank}" if rank is not None and torch.cuda.is_available() else None
