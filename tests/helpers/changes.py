"""One thing of a model folder is changed."""

import json

from safetensors.torch import load_file, save_file


def change_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"})


def swap_tokens(folder):
    """Give two tokens each other's ids."""
    rules = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = rules["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(rules))


MODEL_FILES = {
    "config.json": lambda folder: change_json(folder / "config.json", activation_function="relu"),
    "generation_config.json": lambda folder: change_json(folder / "generation_config.json", bad_words_ids=[[30]]),
    "tokenizer.json": swap_tokens,
    "tokenizer_config.json": lambda folder: change_json(folder / "tokenizer_config.json", truncation_side="left"),
    "special_tokens_map.json": lambda folder: (folder / "special_tokens_map.json").write_text("{}"),
    "spiece.model": lambda folder: (folder / "spiece.model").write_text("pieces"),
    "modeling_own.py": lambda folder: (folder / "modeling_own.py").write_text("# code"),
}
"""A file that a model or its tokenizer is loaded from → a function that changes it in a folder."""
