"""The system drafter: what it learns from, its objective, and that a model writes the same texts with it in fewer passes."""

import json
import shutil
from collections import Counter

import pytest
import torch
from commands import assert_equal_runs, finished
from tiny_encoders import MODEL, STEPS

import ngramloss as ng
from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.models.drafter import read_texts
from ngramloss.training.system_registry import run_of
from ngramloss_systems import drafter

pytestmark = pytest.mark.usefixtures("own_cache")

DATA = """
[data]
name = "data"
separator = "none"
max_source = 96
max_target = 24
"""
BASE = f"""
objective = "ce"
{DATA}{MODEL}decoder_layers = 1
{STEPS}
[generation]
num_beams = 1
max_length = 24
"""
DRAFTER = f"""
system = "drafter(places=3,anchors=2)"
objective = "accept(3):detached"
{DATA}
[model]
name = "base"
{STEPS}best = "accepted"
"""


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Data, a run of an encoder-decoder and one of a language model, and the recipe of a drafter."""
    folder = tmp_path_factory.mktemp("place")
    for split, count in (("train", 24), ("validation", 6), ("test", 5)):
        rows = [
            {"id": f"{split}-{number}", "document": item.document, "summary": item.summary}
            for number, item in enumerate(newswire.items(split, count))
        ]
        write_rows(folder / "data" / f"{split}.jsonl", rows)
    name = json.dumps(str(folder / "data"))
    (folder / "base.toml").write_text(BASE.replace('"data"', name))
    (folder / "tiny.toml").write_text(DRAFTER.replace('"data"', name))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", "base.toml", "--run", "base"]) == 0
        llama = ["model.architecture=llama", "data.prompt={source} =>"]
        assert cli.main(["train", "base.toml", "--run", "causal", *(x for s in llama for x in ("--set", s))]) == 0
    return folder


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    return place


def train(run, *settings):
    options = [part for setting in settings for part in ("--set", setting)]
    return cli.main(["train", "tiny.toml", "--run", str(run), *options])


@pytest.fixture(scope="module", params=["base", "causal"])
def trained(place, request):
    """The name of a run, and its drafter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert train(f"{request.param}-drafter", f"model.name={request.param}") == 0
    return request.param, f"{request.param}-drafter"


def task_of(*settings):
    torch.manual_seed(0)
    return drafter.task(run_of(recipe.load("tiny.toml", settings)))


# Writing with it


def test_a_run_writes_the_same_texts_with_its_drafter(trained, here, tmp_path):
    name, own = trained
    texts = []
    for out, more in (("hf", []), ("draft", ["--set", f"generation.drafter={own}"])):
        assert cli.main(["generate", name, "--engine", out, "--out", str(tmp_path / out), *more]) == 0
        texts.append((tmp_path / out / "predictions.jsonl").read_text())
    assert texts[0] == texts[1]
    about = json.loads((tmp_path / "draft" / "generation.json").read_text())
    assert about["engine"] == {"name": "draft", "precision": "fp32"}
    files = sorted(path.name for path in (here / own / "model").glob("*.safetensors"))
    assert files == ["model.safetensors"]
    lines = [json.loads(line) for line in (here / own / "log.jsonl").read_text().splitlines()]
    assert all(0 <= line["eval_accepted"] <= 3 for line in lines if "eval_loss" in line)
    assert "sources are read as in the training of" in (here / own / "card.md").read_text().replace("\\", "")


def test_a_drafter_of_other_weights_or_another_tokenizer_is_refused(trained, here, tmp_path, capsys):
    name, own = trained
    if name == "base":
        assert cli.main(["generate", "causal", "--engine", "draft", "--set", f"generation.drafter={own}"]) == 2
        assert "was trained for a model with other weights (" in capsys.readouterr().err
        shutil.copytree(own, tmp_path / "other")
        config = tmp_path / "other" / "model" / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer": "0"}))
        args = ["generate", "base", "--engine", "draft", "--set", f"generation.drafter={tmp_path / 'other'}"]
        assert cli.main(args) == 2
        assert "was trained for a model with another tokenizer (0) than" in capsys.readouterr().err
    assert cli.main(["generate", name, "--engine", "draft", "--set", "generation.drafter=base"]) == 2
    assert "generation.drafter: base is not a drafter. Train one: ngramloss train drafter" in capsys.readouterr().err
    assert cli.main(["generate", name, "--engine", "draft"]) == 2
    assert "the engine draft cannot be used: it needs a drafter" in capsys.readouterr().err
    assert cli.main(["generate", own]) == 2
    assert "is a drafter, which writes nothing by itself" in capsys.readouterr().err


# Training


@pytest.mark.slow
def test_a_killed_training_continues_to_the_same_weights(here, tmp_path):
    assert train(tmp_path / "undisturbed") == 0
    arguments = ["train", "tiny.toml", "--run", str(tmp_path / "run")]
    assert finished(arguments, sabotage="saving:4")[0] == -9
    assert finished(arguments)[0] == 0
    assert_equal_runs(tmp_path / "run", tmp_path / "undisturbed")


def test_blocks_are_the_labels_behind_a_token():
    labels = torch.tensor([[4, 5, 6, 7, -100], [8, -100, -100, -100, -100], [-100] * 5])
    blocks, begins = drafter.following(labels, 2)
    assert begins.tolist() == [[True, True, True, False, False], [False] * 5, [False] * 5]
    assert blocks[0].tolist() == [[5, 6], [6, 7], [7, -100], [-100] * 2, [-100] * 2]
    assert (blocks[1:] == -100).all()
    where = torch.stack([drafter.drawn(begins, 2) for _ in range(60)])
    assert {place for row in where[:, 0].tolist() for place in row} == {0, 1, 2}
    assert drafter.drawn(begins, 9).shape == (3, 5)


@pytest.mark.parametrize("name", ["base", "causal"])
def test_states_are_what_the_engine_has_before_it_chooses_a_token(name, here):
    """The draft behind each token is the same in training and in the engine: states and tokens are aligned."""
    from ngramloss.search.decoders import DECODERS, padded_head

    task = task_of(f"model.name={name}")
    rows = [task.examples[row] for row in range(3)]
    batch = task.pad(rows)
    frozen = ng.drafters.TeacherModel(ng.loading.load(ng.recipe.Model(name=f"{name}/model"), task.tokenizer))
    read, model = read_texts(frozen, batch), frozen.model
    sources = [row["input_ids"].tolist() for row in rows]
    causal = name == "causal"
    prompts = [source[:-1] for source in sources] if causal else sources
    S, T = max(map(len, prompts)), batch["labels"].shape[1]
    decoder = DECODERS[model.config.model_type](
        model, sources=3, beams=1, source_length=S, text_length=T, head=padded_head(model), plain=True
    )
    ids, mask = (torch.from_numpy(each) for each in ng.padding.padded(prompts, task.tokenizer.pad_token_id))
    decoder.read(ids, mask)
    labels = batch["labels"].clamp_min(0)
    first = [[source[-1]] for source in sources] if causal else [[model.generation_config.decoder_start_token_id]] * 3
    tokens = torch.cat([torch.tensor(first), labels[:, :-1]], 1)
    hidden = decoder.hidden(tokens, torch.arange(T).expand(3, -1))
    real = batch["labels"] != -100
    torch.testing.assert_close(hidden[real], read.head.hidden[real], atol=1e-4, rtol=1e-4)


def test_micro_batches_add_up_and_only_the_drafter_learns(here):
    task = task_of("objective=ce + matches(2) + accept(3)")
    chosen = [task.examples[row] for row in range(5)]
    counts = torch.tensor([float(sum(len(row["labels"]) for row in chosen)), 5.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "drawn", lambda begins, anchors: torch.tensor([[0, 2]]).expand(len(begins), -1))
        whole = task.loss(task.pad(chosen), counts)
        parts = [task.loss(task.pad(some), counts) for some in (chosen[:2], chosen[2:])]
    assert task.terms == list(whole.parts) == ["ce", "matches(2)", "accept(3)"]
    for name, value in whole.parts.items():
        assert sum(part.parts[name].item() for part in parts) == pytest.approx(value.item(), rel=1e-4)
    whole.total.backward()
    assert all(weight.grad is not None for weight in task.model.parameters())


def test_a_validation_counts_what_a_greedy_draft_would_have_accepted(here, monkeypatch):
    monkeypatch.setattr(drafter, "MOST_LOGITS", 20_000)  # some places at a time
    task = task_of("objective=ce + accept(3)", 'system="drafter(places=3,anchors=2,shortlist=12)"')
    counts = Counter(token for row in range(24) for token in task.examples[row]["labels"].tolist())
    few = task.model.shortlist.tolist()
    assert len(few) == 12
    assert sorted(few) == few
    assert min(counts[token] for token in few) >= max(count for token, count in counts.items() if token not in few)
    found = task.score()
    model = ng.loading.load(ng.recipe.Model(name="base/model"), task.tokenizer).eval()
    kept, sums, blocks, tokens = 0, 0.0, 0, 0
    for row in range(len(task.rows["validation"])):  # a slow walk through every token of every text
        batch = task.pad([task.rows["validation"][row]])
        read = read_texts(ng.drafters.TeacherModel(model), batch)
        labels = batch["labels"][0].tolist()
        for t in range(len(labels) - 1):
            made = task.model(read.head.hidden[:, [t]], read.head.weight[labels[t]][None, None], read.states, read.mask)
            logits = made[0, 0] @ read.head.weight.T + (0 if read.head.bias is None else read.head.bias)
            block = labels[t + 1 : t + 4]
            logp = logits.log_softmax(-1)
            sums -= sum(logp[place, token].item() for place, token in enumerate(block))
            right = [logits[place].argmax() == token and token in few for place, token in enumerate(block)]
            kept += next((place for place, same in enumerate(right) if not same), len(right))
            blocks, tokens = blocks + 1, tokens + len(block)
    assert found["accepted"] == pytest.approx(kept / blocks)
    assert found["ce"] == pytest.approx(sums / tokens, rel=1e-4)
    assert found["loss"] == pytest.approx(found["ce"] + found["accept(3)"])


def test_a_drafter_learns(here):
    """Short texts of few words: the loss falls, and more of a draft is accepted."""
    task = task_of("train.learning_rate=1e-2")
    before = task.score()
    optimiser = torch.optim.Adam(task.model.parameters(), lr=1e-2)
    rows = [task.examples[row] for row in range(24)]
    for _ in range(30):
        optimiser.zero_grad()
        task.loss(task.pad(rows), torch.tensor([1.0, 24.0])).total.backward()
        optimiser.step()
    assert task.score()["loss"] < before["loss"]


@pytest.mark.slow
def test_own_texts_may_be_the_targets(here, tmp_path, capsys):
    assert cli.main(["generate", "base", "--split", "train", "--out", "own"]) == 0
    path = here / "own" / "predictions.jsonl"  # a model of six steps writes nothing
    rows = [json.loads(line) | {"prediction": f"a b {n}"} for n, line in enumerate(path.read_text().splitlines())]
    write_rows(path, rows)
    assert train(tmp_path / "run", 'system="drafter(targets=own)"', "train.max_steps=1") == 0
    assert "were written by" not in capsys.readouterr().err
    about = here / "own" / "generation.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "weights": "0"}))
    task = task_of('system="drafter(targets=own)"')
    assert task.tokenizer.decode(task.examples[0]["labels"], skip_special_tokens=True).strip() == "a b 0"
    assert "the texts in own were written by base (0), not by base" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.name=scratch"], "a drafter is trained for a model that is there"),
        (["model.name=nowhere/at/all"], "there is no such folder"),
        (["objective=eaft:released"], "needs the 20 largest logits"),
    ],
)
def test_mistakes_are_said(here, settings, message):
    with pytest.raises(UserError, match=message):
        task_of(*settings)


@pytest.mark.parametrize("reads_source", [True, False])
def test_drafts_of_a_text_do_not_see_each_other(reads_source):
    sizes = ng.drafters.Sizes(16, 2, 32, 2, 3, reads_source, 9, None, "")
    model = ng.drafters.Drafter(sizes).eval()
    hidden, tokens, states = (torch.randn(2, n, 16) for n in (4, 4, 5))
    source = (states, torch.tensor([[1, 1, 1, 0, 0], [1] * 5])) if reads_source else (None, None)
    whole = model(hidden, tokens, *source)
    assert whole.shape == (2, 4, 3, 16)
    for a in range(4):
        alone = model(hidden[:, [a]], tokens[:, [a]], *source)
        torch.testing.assert_close(alone[:, 0], whole[:, a], atol=1e-5, rtol=1e-5)
    if reads_source:  # padding is not seen
        other = states.clone()
        other[0, 3:] = 7.0
        torch.testing.assert_close(model(hidden, tokens, other, source[1]), whole)
    torch.testing.assert_close(model(2 * hidden, tokens, *source), 2 * whole)
