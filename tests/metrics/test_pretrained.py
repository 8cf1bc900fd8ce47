"""One way to load a metric's model, whichever the metric: folder, cache, hub; and a sentence for all that can be wrong."""

import json
import logging
import pickle
import shutil
import socket
import sys
import time
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from judges import made
from safetensors.torch import load_file, save_file

from ngramloss.metrics import pretrained
from ngramloss.metrics.bertscore import bertscore
from ngramloss.metrics.factcc import factcc
from ngramloss.metrics.scores import Absent
from ngramloss.metrics.summac import summac

pytestmark = pytest.mark.slow

DOCUMENT, SUMMARY = "The cat sat on the mat. It slept there all day!", "The dog slept all day."
METRICS = {
    "bertscore": lambda model, **options: bertscore([[DOCUMENT]], [SUMMARY], model=str(model), layer=1, **options),
    "summac": lambda model, **options: summac([DOCUMENT], [SUMMARY], model=str(model), form="zs", **options),
    "factcc": lambda model, **options: factcc([DOCUMENT], [SUMMARY], model=str(model), **options),
}
OUTPUTS = {"bertscore": None, "summac": ("entailment", "neutral", "contradiction"), "factcc": ("CORRECT", "INCORRECT")}
every_metric = pytest.mark.parametrize("metric", METRICS)


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    """A folder for each metric, all called small."""
    root = tmp_path_factory.mktemp("models")
    for metric, outputs in OUTPUTS.items():
        made(root / metric / "small", outputs=outputs)
    return root


@pytest.fixture
def folder(originals, metric, tmp_path):
    return shutil.copytree(originals / metric / "small", tmp_path / "copy" / "small")


@pytest.fixture
def no_network(monkeypatch):
    asked = []

    def refused(*_, **__):
        asked.append(time.monotonic())
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    return asked


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache, empty. ``cache(name, folder)`` puts a model there."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def put(name, folder):
        inside = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (inside / "refs").mkdir(parents=True)
        (inside / "refs" / "main").write_text("abc")
        return shutil.copytree(folder, inside / "snapshots" / "abc")

    return put


def hub_with(monkeypatch, folder):
    """A hub that has this folder under every name. What is asked of it is kept."""
    asked = []

    def info(self, name, timeout):
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=path.name) for path in folder.iterdir()])

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


@every_metric
def test_a_model_in_the_hubs_cache_is_read_without_the_hub(metric, folder, cache, no_network):
    cache("some/small", folder)
    found, named = METRICS[metric]("some/small"), METRICS[metric](folder)
    assert no_network == []
    assert found.values == named.values
    assert found.signature == named.signature.replace("|model:small|", "|model:some/small|")


def without(name):
    return lambda folder: (folder / name).unlink()


def sharded(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


@pytest.mark.parametrize(
    "damage", [without("model.safetensors"), without("tokenizer.json"), without("config.json"), sharded]
)
def test_a_cache_that_lacks_files_does_not_count(damage, originals, cache, monkeypatch):
    damage(cache("some/small", originals / "summac" / "small"))
    asked = hub_with(monkeypatch, originals / "summac" / "small")
    METRICS["summac"]("some/small")
    assert [name for name, _ in asked] == ["some/small"]


def test_a_cache_with_all_parts_of_the_weights_counts(originals, cache, no_network):
    held = cache("some/small", originals / "summac" / "small")
    transformers.AutoModelForSequenceClassification.from_pretrained(held).save_pretrained(held, max_shard_size="9KB")
    (held / "model.safetensors").unlink()
    assert len(list(held.glob("model-*.safetensors"))) > 1
    assert METRICS["summac"]("some/small").values == METRICS["summac"](originals / "summac" / "small").values


@every_metric
def test_without_a_network_an_absent_model_is_told_of_at_once(metric, cache, no_network):
    with pytest.raises(
        Absent,
        match=rf"{metric} needs the model 'some/absent': there is no folder of that name, the hub's cache .*"
        rf"\(.*Name or service not known\)\. Give a folder .*--set {metric}\.model=FOLDER_OR_HUB_ID \(in Python model=",
    ):
        METRICS[metric]("some/absent")
    assert 0 < len(no_network) <= 2, "it was asked, but not again and again"


@pytest.mark.parametrize("name", ["nowhere/at/all", "/no/such/folder", "", "a b", "x" * 300, "nul\0"])
def test_a_name_that_the_hub_cannot_have_is_absent(name, cache, no_network):
    with pytest.raises(Absent, match="summac needs the model"):
        METRICS["summac"](name)
    assert no_network == []


def test_pickled_weights_are_fetched_only_where_there_are_no_others(originals, cache, tmp_path, monkeypatch):
    original = originals / "summac" / "small"
    asked = hub_with(monkeypatch, original)
    safe = METRICS["summac"]("some/small")
    assert not any("bin" in pattern for pattern in asked[0][1])
    pickled = shutil.copytree(original, tmp_path / "pickled")
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    asked = hub_with(monkeypatch, pickled)
    assert METRICS["summac"]("some/small").values == safe.values
    assert any("bin" in pattern for pattern in asked[0][1])


@every_metric
def test_pickled_weights_serve_where_there_are_no_others(metric, folder, originals):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    pickled, safe = METRICS[metric](folder).values, METRICS[metric](originals / metric / "small").values
    assert pickled.keys() == safe.keys()
    for name in safe:
        assert pickled[name] == pytest.approx(safe[name])  # weights at other addresses may add up in another order


@every_metric
@pytest.mark.parametrize(
    ("lost", "sentence"),
    [
        ("model.safetensors", "lacks files of its model|has neither model.safetensors nor pytorch_model.bin"),
        ("config.json", "lacks files of its model|cannot be loaded"),
        ("tokenizer.json", "lacks its tokenizer's vocabulary|lacks files of its model|cannot be loaded"),
    ],
)
def test_a_folder_that_lacks_files_is_named(metric, folder, lost, sentence):
    (folder / lost).unlink()
    with pytest.raises(ValueError, match=f"^{metric}: .*({sentence})") as caught:
        METRICS[metric](folder)
    assert str(folder) in str(caught.value)


@every_metric
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"<html>", b"{}", b"\xff\x00" * 40, b"[1, 2]"])
def test_a_damaged_file_gets_a_sentence(metric, folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{metric}: ") as caught:
        METRICS[metric](folder)
    assert str(folder) in str(caught.value)


@every_metric
def test_weights_that_lack_tensors_are_refused(metric, folder):
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layer.1." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ValueError,
        match=rf"^{metric}: the weights in {folder} lack 16 tensors of Bert\w+, .*encoder\.layer\.1\..* first. "
        "They would be random, and the scores meaningless. Give a model that was trained for this metric",
    ):
        METRICS[metric](folder)


@every_metric
def test_a_device_that_is_not_there_is_refused(metric, folder):
    with pytest.raises(
        ValueError,
        match=rf"^{metric}: device 'abacus' cannot be used \(.+\)\. Leave it out, or .*--set {metric}\.device=cpu",
    ):
        METRICS[metric](folder, device="abacus")


@every_metric
@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_without_its_packages_a_metric_is_absent(metric, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Absent, match=rf"{metric} needs the package {package}: pip install 'ngramloss\[hf,metrics\]'"):
        METRICS[metric]("some/small")


@every_metric
def test_code_that_comes_with_a_model_is_not_run(metric, folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "own.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\nclass Config: pass\n")
    told = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(told | {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModel": "own.Config"}})
    )
    if metric == "factcc":  # it is read as BERT whatever it says
        METRICS[metric](folder)
    else:
        with pytest.raises(ValueError, match=f"^{metric}: .* cannot be loaded"):
            METRICS[metric](folder)
    assert not (folder / "ran").exists()


@every_metric
@pytest.mark.parametrize("bar", [True, False])
def test_loading_is_silent_and_leaves_the_library_as_it_was(metric, folder, capfd, bar):
    records, library, settings = [], logging.getLogger("transformers"), transformers.utils.logging
    before, level = settings.is_progress_bar_enabled(), settings.get_verbosity()
    settings.set_verbosity_warning()
    (settings.enable_progress_bar if bar else settings.disable_progress_bar)()
    handler = logging.Handler()
    handler.emit = records.append
    library.addHandler(handler)
    try:
        METRICS[metric](folder)
        assert (settings.get_verbosity(), settings.is_progress_bar_enabled()) == (logging.WARNING, bar)
    finally:
        settings.set_verbosity(level)
        library.removeHandler(handler)
        (settings.enable_progress_bar if before else settings.disable_progress_bar)()
    assert records == []
    assert capfd.readouterr() == ("", "")


@every_metric
def test_the_signature_follows_the_files_that_can_change_a_figure(metric, folder):
    first = METRICS[metric](folder).signature
    assert "|model:small|files:" in first
    for name in ("README.md", "training_args.bin", "trainer_state.json", "optimizer.pt", "pytorch_model.bin"):
        (folder / name).write_text("anything")
    (folder / "tokenizer_old").mkdir()
    assert METRICS[metric](folder).signature == first
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"anything": 1}))
    second = METRICS[metric](folder).signature
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor * 0.5 for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    assert len({first, second, METRICS[metric](folder).signature}) == 3


ODD = {
    "empty": "",
    "spaces": " \t\n\u3000",
    "controls": "The cat\x00 \x07sat\x1b[0m\x7f on\u202e the \ufeffmat.\x85",
    "one letter": "a",
    "one word": "cat",
    "no letters": "?!… — «»",
    "other scripts": "東京は雨。 Łódź हिन्दी العربية 😀👩‍👩‍👧",
    "combining": "e" + "\u0301" * 5000,
    "special tokens": "[CLS] [SEP] [MASK] [PAD] <s> </s>",
    "half a pair": "cat \ud83d sat on the mat.",
    "a megabyte": "the cat sat on the mat. " * 43_000,
    "a word of a megabyte": "x" * 1_000_000,
    "many lines": "cat sat on it\n" * 400,
}


@every_metric
@pytest.mark.parametrize(
    "text", [pytest.param(text, id=name, marks=[pytest.mark.slow] * ("megabyte" in name)) for name, text in ODD.items()]
)
def test_whatever_the_text_every_figure_is_a_number_of_its_range(metric, text, originals):
    model = str(originals / metric / "small")
    documents, summaries = [text, DOCUMENT, text], [SUMMARY, text, text]
    if metric == "bertscore":
        found = bertscore([[document] for document in documents], summaries, model=model, layer=1)
    else:
        options = {"form": "zs"} if metric == "summac" else {}
        found = {"summac": summac, "factcc": factcc}[metric](
            documents, summaries, model=model, splitter="newline", **options
        )
    for values in found.values.values():
        assert len(values) == 3
        assert all(-100 - 1e-6 <= value <= 100 + 1e-6 for value in values)  # false of NaN


def test_nothing_but_tensors_is_read_from_a_pickle(tmp_path):
    (tmp_path / "evil.bin").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(pickle.UnpicklingError):
        pretrained.read_state(tmp_path / "evil.bin")
    for other in ([torch.zeros(1)], {"model": {"weight": torch.zeros(1)}}):
        torch.save(other, tmp_path / "other.bin")
        with pytest.raises(ValueError, match="it is not a dictionary of tensors"):
            pretrained.read_state(tmp_path / "other.bin")


def test_the_configuration_tells_the_longest_input_where_no_table_does():
    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(max_position_embeddings=30)
    assert pretrained.longest_input(model, SimpleNamespace(model_max_length=10**30)) == 30
    assert pretrained.longest_input(model, SimpleNamespace(model_max_length=20)) == 20
    model.config = SimpleNamespace()
    assert pretrained.longest_input(model, SimpleNamespace(model_max_length=10**30)) is None


@every_metric
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_out_of_memory_names_the_way_out(metric, folder, monkeypatch, error):
    def full(*_, **__):
        raise error

    monkeypatch.setattr(transformers.BertModel, "forward", full)
    with pytest.raises(
        ValueError, match=rf"{metric} ran out of memory with batch_size 12: lower it \(--set {metric}\.batch_size=3\)"
    ):
        METRICS[metric](folder, batch_size=12)


def test_other_errors_of_a_model_are_left_as_they_are():
    with pytest.raises(RuntimeError, match="illegal memory access"), pretrained.computing("m", 4):
        raise RuntimeError("an illegal memory access was encountered")
