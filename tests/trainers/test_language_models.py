"""Decoder-only models from a recipe to scores: train, continue, generate, candidates, adapters."""

import json
import shutil

import pytest
import tiny_tokenizers
import torch
from clocks import clock_at
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ngramloss import cli, recipe
from ngramloss.data.tokens import prompt_ids
from ngramloss.generation.job import job
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.search.engines import graph
from ngramloss.search.registry import ENGINES
from ngramloss.search.search import Options
from ngramloss.storage.run_folder import RunFolder
from ngramloss.training import runner
from ngramloss.training.run import run_of

pytestmark = pytest.mark.usefixtures("own_cache")

SETTINGS = """
base = "sft"
objective = "ce + matches(2)"
[data]
name = "{data}"
max_source = 40
max_target = 12
{more}
[model]
name = "scratch"
architecture = "llama"
width = 16
decoder_layers = 1
heads = 2
feed_forward = 32
vocabulary = 400
{model}
[train]
max_steps = 4
batch_size = 4
learning_rate = 1e-2
log_every = 1
eval_every = 2
save_every = 2
{train}
[generation]
num_beams = 2
max_length = 8
"""
ROWS = [
    {
        "id": f"d{i}",
        "document": f"{name} went to the {place} and bought a {thing} there.",
        "summary": f"{name} buys {thing}.",
    }
    for i, (name, place, thing) in enumerate(
        [("Ann", "market", "cake"), ("Bob", "shop", "pen"), ("Cy", "city", "hat"), ("Di", "farm", "cow")] * 2
    )
]


def conversation(row):
    question, answer = {"role": "user", "content": row["document"]}, {"role": "assistant", "content": row["summary"]}
    return {"id": row["id"], "messages": [question, answer, {"role": "user", "content": "Who?"}, answer]}


FORMS = {
    "document": (ROWS, ""),
    "prompt": ([{"id": r["id"], "prompt": r["document"] + " =>", "completion": r["summary"]} for r in ROWS], ""),
    "template": (ROWS, 'prompt = "Read: {source} Say:"'),
}


def written(folder, rows):
    folder.mkdir(exist_ok=True)
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def recipe_file(folder, rows=ROWS, *, more="", model="", train=""):
    data = written(folder / "data", rows)
    file = folder / "own.toml"
    file.write_text(SETTINGS.format(data=data, more=more, model=model, train=train))
    return file


def ran(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(own_cache, tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    ran("train", recipe_file(folder), "--run", folder / "run")
    return folder / "run"


def test_the_log_has_every_term(run):
    logged = [line for line in lines(run / "log.jsonl") if "loss" in line]
    assert [line["step"] for line in logged] == [1, 2, 3, 4]
    assert all({"ce", "matches(2)", "matched/2"} <= line.keys() for line in logged)
    assert logged[-1]["ce"] < logged[0]["ce"]


def test_texts_are_what_the_model_writes_behind_its_prompts(run, tmp_path):
    ran("generate", run, "--out", tmp_path / "out", "--batch-size", 3)
    predictions = {row["id"]: row["prediction"] for row in lines(tmp_path / "out" / "predictions.jsonl")}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "model"), AutoTokenizer.from_pretrained(run / "model")
    for row in ROWS:
        ids = tokenizer(row["document"] + "\n\nSummary:", return_tensors="pt", add_special_tokens=False)["input_ids"]
        first = [tokenizer.bos_token_id] if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else []
        ids = torch.cat([torch.tensor([first], dtype=torch.long), ids], 1)  # [1, S]
        written = model.generate(input_ids=ids, num_beams=2, max_new_tokens=8, early_stopping=True)[0, ids.shape[1] :]
        assert predictions[row["id"]] == tokenizer.decode(written, skip_special_tokens=True).strip()
    seen = lines(tmp_path / "out" / "seen.jsonl")
    assert len(seen) == len(ROWS)
    assert seen[0]["tokens"][-1] == tokenizer.eos_token
    assert json.loads((tmp_path / "out" / "generation.json").read_text())["shape"]["prompt"]["after"].endswith(
        "Summary:"
    )


def test_samples_and_their_order_do_not_depend_on_the_batch(run):
    work = job(str(run))
    model, tokenizer = load_model(work)
    options = Options(texts=3, sample=True, seed=5, rerank="probability")
    writer = writer_of(work, model, tokenizer, options, column="document")
    ids = writer.ids([row["document"] for row in ROWS])
    together = writer.write(ids)
    assert together == [writer.write([source])[0] for source in ids]
    assert len({text.text for text in together[0]}) > 1


def test_a_short_text_ends_where_the_model_ends_it(run):
    work = job(str(run))
    model, tokenizer = load_model(work)
    writer = writer_of(work, model, tokenizer, column="document")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[tokenizer.eos_token_id] = 0
    (((text, tokens),),) = writer_of(work, model, tokenizer, column="document").write(writer.ids([ROWS[0]["document"]]))
    assert (text, tokens <= 8) == ("", True)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_can_be_trained_on_and_continued(form, tmp_path):
    rows, more = FORMS[form]
    file = recipe_file(tmp_path, rows, more=more)
    whole = runner.train(run_of(recipe.load(str(file))), tmp_path / "whole")
    assert whole.finished
    stopped = runner.train(run_of(recipe.load(str(file), ["train.max_steps=2"])), tmp_path / "run")
    assert stopped.finished
    prompts = prompt_ids([rows[0].get("document", rows[0].get("prompt"))], *_reader(tmp_path / "whole", form))
    assert prompts[0]
    ran("generate", tmp_path / "whole", "--limit", 2)


def _reader(run, form):
    work = job(str(run))
    model, tokenizer = load_model(work)
    return tokenizer, writer_of(work, model, tokenizer, column="prompt" if form == "prompt" else "document").shape


@pytest.mark.slow
@pytest.mark.parametrize("model", ["", "lora = 4"], ids=["whole", "adapters"])
def test_the_best_checkpoint_may_be_chosen_by_a_score(model, tmp_path, monkeypatch):
    """The texts are those of hf, also by the engine that validates on a GPU."""
    file = recipe_file(tmp_path, model=model, train='best = "rouge1"')
    ran("train", file, "--run", tmp_path / "hf")
    loaded, load = [], graph.load
    monkeypatch.setitem(ENGINES, "graph", ENGINES["graph"]._replace(automatic="cpu"))
    monkeypatch.setattr(graph, "load", lambda *args, **options: (loaded.append(1), load(*args, **options))[1])
    ran("train", file, "--run", tmp_path / "graph")
    scores = [
        [line["eval_rouge1"] for line in lines(tmp_path / name / "log.jsonl") if "eval_rouge1" in line]
        for name in ("hf", "graph")
    ]
    assert scores[0] == scores[1]
    assert len(loaded) == len(scores[0]) == 2


@pytest.mark.parametrize("command", [("generate",), ("candidates", "--count", 2)], ids=lambda words: words[0])
def test_texts_that_were_begun_are_continued(run, tmp_path, command):
    """Settings of a prompt are compared as they are saved, where a tuple is a list."""
    verb, *options = command
    call = (verb, run, *options, "--limit", 3, "--out", tmp_path / "texts")
    ran(*call)
    file = tmp_path / "texts" / ("predictions.jsonl" if verb == "generate" else "candidates.jsonl")
    whole = file.read_text()
    file.rename(RunFolder(file.parent).share(0, file.stem))  # as if it was stopped before all were collected
    ran(*call)
    assert file.read_text() == whole


@pytest.mark.parametrize("how", [(), ("--search", "beams")], ids=["groups", "beams"])
def test_candidates_are_made_and_learnt_from(run, tmp_path, how):
    ran("candidates", run, "--split", "train", "--count", 3, *how, "--out", tmp_path / "candidates")
    file = recipe_file(tmp_path, more=f'candidates = "{tmp_path / "candidates"}"')
    ran("train", file, "--run", tmp_path / "run", "--set", "objective=ce + rank")
    logged = [line for line in lines(tmp_path / "run" / "log.jsonl") if "loss" in line]
    assert all(torch.isfinite(torch.tensor(line["rank"])) for line in logged)


def test_adapters_are_trained_saved_merged_and_continued(tmp_path):
    file = recipe_file(tmp_path, model="lora = 4")
    ran("train", file, "--run", tmp_path / "whole")
    ran("train", file, "--run", tmp_path / "run")
    for name in ("model", "checkpoints/checkpoint-4"):  # as if it had been killed after the second step
        for path in sorted((tmp_path / "run" / name).rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (tmp_path / "run" / name).rmdir()
    ran("train", file, "--run", tmp_path / "run")
    whole, run = (AutoModelForCausalLM.from_pretrained(tmp_path / name / "model") for name in ("whole", "run"))
    for one, other in zip(whole.parameters(), run.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert (tmp_path / "run" / "model" / "adapter" / "adapter_model.safetensors").exists()
    ran("generate", tmp_path / "run", "--limit", 2)


def test_a_run_reads_other_data_as_in_its_training(run, tmp_path, capsys):
    other = written(tmp_path / "other", FORMS["prompt"][0])
    arguments = ["generate", str(run), "--data", str(other), "--out", str(tmp_path / "x")]
    assert cli.main(arguments) == 2
    assert "was trained on sources in the column 'document', but these are in 'prompt'" in capsys.readouterr().err
    assert cli.main([*arguments, "--set", "data.prompt={source} TL;DR:", "--limit", "2"]) == 0
    work = job(str(run))
    assert writer_of(work, *load_model(work)).shape.prompt.after.endswith("Summary:")  # as TextGenerator calls it


def test_prompts_without_completions_are_answered_as_those_with(tmp_path):
    file = recipe_file(tmp_path, FORMS["prompt"][0])
    ran("train", file, "--run", tmp_path / "run")
    ran("generate", tmp_path / "run", "--out", tmp_path / "with")
    alone = written(tmp_path / "new", [{key: row[key] for key in ("id", "prompt")} for row in FORMS["prompt"][0]])
    ran("generate", tmp_path / "run", "--data", alone, "--out", tmp_path / "without")
    assert lines(tmp_path / "without" / "predictions.jsonl") == lines(tmp_path / "with" / "predictions.jsonl")
    assert all(row.keys() == {"id", "document"} for row in lines(tmp_path / "without" / "references.jsonl"))


def test_every_engine_writes_the_same_texts(run, tmp_path):
    for name in ("hf", "graph"):
        ran("generate", run, "--out", tmp_path / name, "--engine", name, "--set", "generation.min_length=3")
    hf, other = (lines(tmp_path / name / "predictions.jsonl") for name in ("hf", "graph"))
    assert hf == other
    assert json.loads((tmp_path / "graph" / "generation.json").read_text())["engine"]["name"] == "graph"


@pytest.mark.parametrize("engine", ["hf", "graph"])
@pytest.mark.parametrize("options", [Options(), Options(texts=2, sample=True)], ids=["beams", "sample"])
def test_n_grams_of_a_prompt_may_be_written(run, options, engine):
    changes = ["generation.no_repeat_ngram_size=1", "generation.max_length=6", f"generation.engine={engine}"]
    work = job(str(run), overrides=changes)
    model, tokenizer = load_model(work)
    writer = writer_of(work, model, tokenizer, options, column="document")
    ids = writer.ids([ROWS[0]["document"], ROWS[1]["document"]])
    with torch.no_grad():  # it repeats the last word of its prompt for ever
        model.lm_head.weight.copy_(model.model.embed_tokens.weight * 100)
    for source, texts in zip(ids, writer.engine.write(ids), strict=True):
        for start, *text in texts:
            assert start == source[-1]
            assert len(set(text)) == len(text)
    assert any(
        token in source for source, texts in zip(ids, writer.engine.write(ids), strict=True) for token in texts[0][1:]
    )


@pytest.fixture
def chat_model(tmp_path):
    """A folder with a model whose tokenizer has a chat template, and no padding."""
    tokenizer = tiny_tokenizers.gpt_like()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, initializer_range=0.3, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    return tmp_path / "chat"


def test_a_training_continues_on_another_day_with_the_prompts_of_its_first(chat_model, tmp_path, monkeypatch, capsys):
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    tokenizer.chat_template = "On {{ strftime_now('%d %b %Y') }}: " + tokenizer.chat_template
    tokenizer.save_pretrained(chat_model)
    file, run = recipe_file(tmp_path, more='prompt = "chat"'), RunFolder(tmp_path / "run")
    longer = ("--set=data.max_source=200", f"--set=model.name={chat_model}")
    clock_at(monkeypatch, 2026, 2, 3)
    ran("train", file, "--run", run.path, *longer)
    tokens, log = json.loads(run.prepared.read_text())["made_of"]["train tokens"], lines(run.log)
    shutil.rmtree(run.model)
    shutil.rmtree(run.checkpoints / "checkpoint-4")
    clock_at(monkeypatch, 2026, 2, 4)
    ran("train", file, "--run", run.path, *longer)
    assert "continuing" in capsys.readouterr().err
    made_of = json.loads(run.prepared.read_text())["made_of"]
    assert (made_of["date in prompts"], made_of["train tokens"]) == ("2026-02-03", tokens)
    losses = [[line["loss"] for line in each if "loss" in line] for each in (log, lines(run.log))]
    assert losses[0] == losses[1]
    ran("generate", run.path)
    assert json.loads(run.generation.read_text())["shape"]["prompt"]["before"].startswith("On 03 Feb 2026: ")
    ran("train", file, "--run", tmp_path / "later", *longer)
    assert json.loads((tmp_path / "later" / "prepared.json").read_text())["made_of"]["date in prompts"] == "2026-02-04"


def test_conversations_are_trained_on_and_their_last_answer_is_what_is_seen(chat_model, tmp_path, capsys):
    talks = list(map(conversation, ROWS))
    file = recipe_file(tmp_path, talks)
    longer = [f"--set={name}" for name in ("data.max_source=200", "data.max_target=200", "generation.max_length=4")]
    ran("train", file, "--run", tmp_path / "run", "--set", f"model.name={chat_model}", *longer)
    ran("generate", tmp_path / "run")
    asked = written(tmp_path / "asked", [{**row, "messages": row["messages"][:-1]} for row in talks])
    ran("generate", tmp_path / "run", "--data", asked, "--out", tmp_path / "answers")
    assert lines(tmp_path / "answers" / "predictions.jsonl") == lines(tmp_path / "run" / "predictions.jsonl")
    said = [message["content"] for message in talks[0]["messages"][:-1]]
    assert lines(tmp_path / "answers" / "references.jsonl")[0] == {"id": "d0", "document": "\n".join(said)}
    model, tokenizer = (
        kind.from_pretrained(tmp_path / "run" / "model") for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    for row, seen in zip(talks, lines(tmp_path / "run" / "seen.jsonl"), strict=True):
        before = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True)["input_ids"]
        whole = tokenizer.apply_chat_template(row["messages"])["input_ids"][:-1]  # without the line break
        logp = model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)  # [L, V]
        answer = range(len(before), len(whole))
        assert seen["tokens"] == [tokenizer.decode([whole[at]]) for at in answer]
        assert seen["label_probability"] == pytest.approx(
            [logp[at - 1, whole[at]].exp().item() for at in answer], abs=1e-3
        )
    read = lines(tmp_path / "run" / "references.jsonl")
    assert read[0]["document"] == f"{ROWS[0]['document']}\n{ROWS[0]['summary']}\nWho?"
    capsys.readouterr()
    ran("data", "stats", tmp_path / "data", "--split", "test", "--json")
    words = json.loads(capsys.readouterr().out)["splits"]["test"]
    assert words["source_words"] == pytest.approx(sum(len(row["document"].split()) + 4 for row in ROWS) / len(ROWS))


def test_conversations_are_not_scored_in_training(tmp_path, capsys):
    file = recipe_file(tmp_path, list(map(conversation, ROWS)), train='best = "rouge2"')
    assert cli.main(["train", str(file), "--run", str(tmp_path / "run")]) == 2
    assert "conversations have several" in capsys.readouterr().err


def test_adapters_of_tied_embeddings_are_refused(tmp_path, capsys):
    file = recipe_file(tmp_path, model='lora = 4\nlora_targets = ["embed_tokens", "q_proj"]')
    assert cli.main(["train", str(file), "--run", str(tmp_path / "run")]) == 2
    assert "Leave both out of model.lora_targets" in capsys.readouterr().err


def test_adapters_are_not_sharded(tmp_path, capsys):
    file = recipe_file(tmp_path, model="lora = 4", train="fsdp = true")
    assert cli.main(["train", str(file), "--run", str(tmp_path / "run")]) == 2
    assert "fsdp" in capsys.readouterr().err


def test_a_model_must_have_positions_for_prompt_and_text(chat_model, tmp_path, capsys):
    config = json.loads((chat_model / "config.json").read_text())
    (chat_model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 50}))
    file = recipe_file(tmp_path)
    options = ["--set", f"model.name={chat_model}", "--set", "data.max_source=40"]
    arguments = ["train", str(file), "--run", str(tmp_path / "run"), *options]
    assert cli.main([*arguments, "--set", "data.max_target=11"]) == 2
    assert "supports 50 positions, but the recipe asks for 51 tokens" in capsys.readouterr().err
    assert cli.main([*arguments, "--set", "data.max_target=10"]) == 0


def test_a_model_needs_a_token_that_ends_a_text(chat_model, tmp_path, capsys):
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        settings = json.loads((chat_model / name).read_text())
        settings = {key: value for key, value in settings.items() if key not in ("eos_token_id", "eos_token")}
        (chat_model / name).write_text(json.dumps(settings | ({"eos_token_id": None} if name == "config.json" else {})))
    file = recipe_file(tmp_path)
    arguments = ["train", str(file), "--run", str(tmp_path / "run"), "--set", f"model.name={chat_model}"]
    assert cli.main(arguments) == 2
    assert "has no token that ends a text. Set eos_token_id in its generation_config.json." in capsys.readouterr().err


def test_prompt_and_text_must_fit_into_the_model(run, tmp_path, capsys):
    arguments = ["generate", str(run), "--out", str(tmp_path / "x"), "--set", "data.max_source=200000"]
    assert cli.main([*arguments, "--set", "generation.max_length=900"]) == 2
    assert "need 200900 positions" in capsys.readouterr().err
