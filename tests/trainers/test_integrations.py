"""axolotl and ms-swift with our objective: their own trainers where they are installed, and what they call elsewhere."""

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from models import tiny
from places import HELPERS

import ngramloss as ng
from ngramloss import version
from ngramloss.errors import UserError

OTHERS = Path(os.environ.get("NGRAMLOSS_TRAINERS") or Path(sys.prefix) / "others")


@pytest.fixture(scope="module", params=["axolotl", "swift"])
def run(request, tmp_path_factory):
    """What ``other_trainers.py`` found with a package: version 0.19.0 or 4.6.0, beside newer packages than it asks for."""
    if not (OTHERS / request.param).is_dir():
        pytest.skip(f"{request.param} is not installed: make others does")
    folder = tmp_path_factory.mktemp(request.param)
    paths = [str(HELPERS), str(Path(ng.__file__).parents[1]), str(OTHERS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = [sys.executable, "-W", "ignore", HELPERS / "other_trainers.py", folder / "found.json"]
    done = subprocess.run([*program, request.param], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()) | {"name": request.param}


@pytest.mark.adopt
def test_a_packed_row_in_their_trainer_logs_the_terms_of_each_document(run):
    assert run["version"] == version.NEWEST[{"swift": "ms-swift"}.get(run["name"], run["name"])]
    assert len(run["logged"]) == 2
    for before, after in run["logged"]:
        for log in (before, after):
            expected = log.get("expected", run["expected"])
            assert {name: log[name] for name in expected} == pytest.approx(expected, abs=1e-5)
        shares = {"ce": 1, "matches(1)": 0.5, "matches(2)": 0.5}
        plain = [sum(log[name] * share for name, share in shares.items()) for log in (before, after)]
        assert before["loss"] == pytest.approx(plain[0], abs=1e-4)  # bag(2)@from(0.5)
        assert after["loss"] == pytest.approx(plain[1] + after["bag(2)"], abs=1e-4)


@pytest.mark.adopt
def test_what_their_trainer_would_do_to_the_objective_is_refused(run):
    told = {
        "axolotl": {"rl": "rl: dpo computes a loss of its own", "spelling": "unknown objective 'matchs'"},
        "swift": {"kept": "With ms-swift, set --use_logits_to_keep false"},
    }
    for name, sentence in told[run["name"]].items():
        assert sentence in run["told"][name]


# What they call, without them


@pytest.fixture
def plugin(monkeypatch):
    """The plugin on a stand-in for axolotl's class, which has no behaviour of its own."""
    modules = {
        name: types.ModuleType(name) for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base")
    }
    modules["axolotl.integrations.base"].BasePlugin = object
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield importlib.import_module("ngramloss.trainers.axolotl").NgramPlugin()
    sys.modules.pop("ngramloss.trainers.axolotl")


def config(**settings):
    """As axolotl's, what is not set is None."""
    names = ("ngram_objective", "ngram_segments", "ngram_memory", "rl")
    return types.SimpleNamespace(**{**dict.fromkeys(names), **settings})


def test_axolotls_plugin_attaches_the_objective_and_adds_the_log(plugin):
    model, cfg = tiny("llama"), config(ngram_objective="ce + matches(2)", ngram_memory="lean")
    plugin.pre_model_load(cfg)
    plugin.post_model_load(cfg, model)
    assert (str(ng.attached_loss(model)), ng.attached_loss(model).memory) == ("ce + matches(2)", "lean")
    (callback,) = plugin.add_callbacks_pre_trainer(cfg, model)
    assert isinstance(callback, ng.LogParts)
    assert plugin.get_input_args() == "ngramloss.trainers.axolotl.NgramArgs"


def test_axolotls_plugin_refuses_another_loss_before_a_model_is_loaded(plugin):
    with pytest.raises(UserError, match="rl: dpo computes a loss of its own, so the objective 'ce' would not run"):
        plugin.pre_model_load(config(ngram_objective="ce", rl="dpo"))


@pytest.mark.filterwarnings("ignore")
def test_swifts_maps_get_a_loss_and_a_callback(monkeypatch):
    from ngramloss.trainers.swift import register

    modules = {"swift": {}, "swift.loss": {"loss_map": {}}, "swift.callbacks": {"callbacks_map": {}}}
    for name, contents in modules.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(contents)
    register("ce + matches(2)", name="mine", memory="lean")
    loss = modules["swift.loss"]["loss_map"]["mine"](None, None)
    assert isinstance(modules["swift.callbacks"]["callbacks_map"]["mine"](None, None), ng.LogParts)
    outputs, labels = causal_outputs()
    assert loss(outputs, labels, num_items_in_batch=None, loss_scale=None, trainer=None).item() > 0
    with pytest.raises(UserError, match="unknown objective 'matchs'"):
        register("matchs(2)")


def causal_outputs():
    from transformers.modeling_outputs import CausalLMOutputWithPast

    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([[-100, 4, 5, 4, 5], [-100, -100, 6, 7, -100]])
    return CausalLMOutputWithPast(logits=torch.randn(2, 5, 9, generator=generator)), labels


@pytest.mark.filterwarnings("ignore")
def test_weights_of_tokens_are_those_of_the_joint_loss():
    loss = ng.compute_loss_func("ce + matches(2)")
    outputs, labels = causal_outputs()
    plain = loss(outputs, labels)
    ones = torch.roll((labels != -100).float(), -1, -1).view(-1)  # as ms-swift passes it: aligned and flattened
    torch.testing.assert_close(loss(outputs, labels, loss_scale=ones), plain)
    scale = torch.rand(labels.shape, generator=torch.Generator().manual_seed(3))
    aligned = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = ng.JointLoss("ce + matches(2)")(outputs.logits, aligned, weights=scale)
    torch.testing.assert_close(loss(outputs, labels, loss_scale=scale.view(-1)), expected)
    assert expected != plain


@pytest.mark.filterwarnings("ignore")
def test_removed_positions_are_refused_for_terms_of_whole_texts():
    outputs, labels = causal_outputs()
    keeps = types.SimpleNamespace(args=types.SimpleNamespace(use_logits_to_keep=True))
    with pytest.raises(UserError, match="--use_logits_to_keep false"):
        ng.compute_loss_func("ce + matches(2)")(outputs, labels, trainer=keeps)
    assert ng.compute_loss_func("ce")(outputs, labels, trainer=keeps).item() > 0
    model = tiny("llama")
    loss, ids = ng.compute_loss_func("ce + matches(2)", model=model), torch.tensor([[4, 5, 6, 7]])
    with pytest.raises(UserError, match="logits_to_keep removes positions"):
        loss(model(input_ids=ids, logits_to_keep=2), ids[:, -2:])
