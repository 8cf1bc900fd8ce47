"""A folder for a hub: what is in it, what the card says, and what is refused."""

import ast
import csv
import json
import re
import shutil
from contextlib import suppress

import pytest
import yaml
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from models import TINY_MODEL
from transformers import AutoTokenizer

from ngramloss import cli, recipe
from ngramloss.data import newswire
from ngramloss.errors import UserError
from ngramloss.generation.job import job
from ngramloss.generation.load_job import load_model, writer_of
from ngramloss.report.publish import publish
from ngramloss.storage.files import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("own_cache")]

RECIPE = f"""
base = "demo"
objective = "ce + matches(2)"
[data]
name = "mine.csv"
max_source = 96
max_target = 32
test_fraction = 0.2
{TINY_MODEL}
[train]
max_steps = 2
eval_every = 0
[generation]
min_length = 12
max_length = 16
"""
DECODER = 'architecture = "llama"\ncopying = false\nlora = 2\n'


def ran(*arguments):
    assert cli.main([str(argument) for argument in arguments]) == 0


@pytest.fixture(scope="module")
def trained(tmp_path_factory, own_cache):
    """A folder with two runs: an encoder-decoder with scored texts, and a decoder-only one with adapters and no texts."""
    folder = tmp_path_factory.mktemp("here")
    with (folder / "mine.csv").open("w", newline="") as file:
        rows = [(item.document, item.summary) for item in newswire.items("train", 40)]
        csv.writer(file).writerows([("article", "highlights"), *rows])
    (folder / "whole.toml").write_text(RECIPE)
    (folder / "adapters.toml").write_text(RECIPE.replace("vocabulary = 400\n", "vocabulary = 400\n" + DECODER))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        ran("train", "whole.toml", "--run", "runs/whole")
        ran("generate", "runs/whole")
        ran("score", "runs/whole", "--metrics", "rouge,bleu", "--samples", 50)
        ran("train", "adapters.toml", "--run", "runs/adapters")
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """A copy of it, which a test may change; a user works in it."""
    shutil.copytree(trained, tmp_path / "here", copy_function=shutil.copy2)
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def card_of(folder):
    return ModelCard((folder / "README.md").read_text())


def run_program(folder, capsys, names=None):
    """Run the program of the card with the folder in place of the repository, in these names. Returns what it prints."""
    (program,) = re.findall(r"```python\n(.+?)```", (folder / "README.md").read_text(), re.S)
    capsys.readouterr()
    exec(re.sub(r'"[\w-]+/[\w.-]+"', repr(str(folder)), program), {} if names is None else names)
    return capsys.readouterr().out


def test_the_folder_has_what_loading_needs_and_the_command_to_type_is_shown(here, capsys):
    ran("publish", "runs/whole")
    said = capsys.readouterr()
    assert said.out == "published/whole\n"
    assert "upload the folder with: hf upload YOUR-NAME/whole published/whole .\n" in said.err
    assert "no licence is named: write one into the card, or name it with --license." in said.err
    published = here / "published" / "whole"
    assert sorted(path.name for path in published.iterdir()) == [
        "README.md", "config.json", "generation_config.json", "log.jsonl", "model.safetensors", "recipe.toml",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    weights = json.loads((here / "runs" / "whole" / "weights.json").read_text())
    assert fingerprint([published / "model.safetensors"]) == weights["fingerprint"]
    assert isinstance(run_program(published, capsys), str)


def test_the_card_has_the_scores_of_score_with_intervals_and_signatures(here, capsys):
    ran("score", "runs/whole", "--metrics", "rouge,bleu", "--samples", 50, "--json")
    (system,) = json.loads(capsys.readouterr().out)["systems"]
    ran("publish", "runs/whole", "--repo", "me/summariser", "--license", "mit", "-o", "out")
    said = capsys.readouterr().err
    assert "hf upload me/summariser out ." in said
    assert "licence" not in said
    card = card_of(here / "out")
    assert card.data.license == "mit"
    assert card.data.pipeline_tag == "summarization"
    assert card.data.model_name == "summariser"
    assert card.data.metrics == ["rouge", "bleu"]
    assert card.data.base_model is None  # from scratch
    assert card.data.datasets is None  # a file
    found = {result.metric_name: result for result in card.data.eval_results}
    assert list(found) == ["rouge1", "rouge2", "rougeL", "rougeLsum", "bleu"]
    for name, result in found.items():
        assert result.metric_value == round(system["scores"][name], 4)
        assert result.metric_args["interval_95"] == [round(end, 4) for end in system["intervals"][name]]
        assert (result.dataset_name, result.dataset_split) == ("mine.csv", "test")
        low, high = system["intervals"][name]
        assert f"| {name} | {system['scores'][name]:.2f} | {low:.2f} to {high:.2f} |" in card.text
    assert found["bleu"].metric_type == "bleu"
    assert re.fullmatch(r"rouge\|refs:1\|.*\|ngramloss:[\d.]+", found["rouge1"].metric_args["signature"])
    for signature in (found["bleu"].metric_args["signature"], "generation|model:runs/whole|weights:"):
        assert f"* `{signature}" in card.text
    assert re.search(r"On \d+ documents, split `test` of `mine.csv`\.", card.text)
    assert "Summarisation: `ce + matches(2)` on `mine.csv`, from `scratch`." in card.text  # as in card.md
    own = (here / "runs" / "whole" / "card.md").read_text()
    assert own.startswith("# whole-matches2\n")
    assert own[own.index("## Data") :] in card.text
    assert "Deviations" not in card.text  # the data are not the paper's
    assert card.text.lstrip().startswith("# summariser\n")


def test_scores_that_only_describe_texts_are_in_the_table_alone(here):
    ran("score", "runs/whole", "--metrics", "rouge,shape")
    publish(here / "runs" / "whole", here / "out")
    card = card_of(here / "out")
    assert "| words | " in card.text
    assert "words" not in {result.metric_name for result in card.data.eval_results}
    assert "rouge1" in {result.metric_name for result in card.data.eval_results}


def test_a_decoder_only_model_is_published_merged_with_its_adapter_beside_it(here, capsys):
    publish(here / "runs" / "adapters", here / "out")
    assert not card_of(here / "out").data.eval_results
    assert (here / "out" / "adapter" / "adapter_model.safetensors").is_file()
    assert not (here / "out" / "adapter" / "README.md").exists()  # PEFT's is a form to fill in
    card = card_of(here / "out")
    assert card.data.pipeline_tag == "text-generation"
    assert "the adapter alone is in `adapter/`" in card.text
    assert 'prompt = source + "\\n\\nSummary:"' in card.text
    assert isinstance(run_program(here / "out", capsys), str)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["data.prompt=Read: {source} Say:"], 'prompt = "Read: " + source + " Say:"'),
        (["data.prompt=none"], "start = tokenizer.bos_token or tokenizer.eos_token"),
        (
            ["data.prompt=chat", 'data.instruction="Say it \\"short\\"."'],
            r'messages = [{"role": "user", "content": "Say it \"short\".\n\n" + source}]',
        ),
    ],
    ids=["template", "none", "chat"],
)
def test_the_program_of_the_card_writes_what_generate_writes(here, capsys, settings, line):
    run = here / "runs" / "adapters"
    (run / "recipe.toml").write_text(recipe.dump(recipe.changed(recipe.load(str(run / "recipe.toml")), settings)))
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}<think>\n\n</think>\n\n"
        "{{ m.content }}</s>{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    config = json.loads((run / "model" / "tokenizer_config.json").read_text())
    (run / "model" / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    publish(run, here / "out")
    assert line in (here / "out" / "README.md").read_text()
    (here / "one.jsonl").write_text(json.dumps({"article": "The text that the model reads.", "highlights": "x"}))
    ran("generate", run, "--data", f"test={here / 'one.jsonl'}", "--out", here / "texts")
    (row,) = (here / "texts" / "predictions.jsonl").read_text().splitlines()
    names = {}
    assert run_program(here / "out", capsys, names) == json.loads(row)["prediction"] + "\n"
    work = job(str(run))
    (ids,) = writer_of(work, *load_model(work)).ids(["The text that the model reads."])
    assert names["batch"]["input_ids"].tolist() == [ids]


def test_the_card_says_what_its_program_leaves_out_if_the_model_has_code_of_its_own(here):
    run = here / "runs" / "adapters"
    settings = recipe.changed(recipe.load(str(run / "recipe.toml")), ["data.prompt=chat"])
    (run / "recipe.toml").write_text(recipe.dump(settings))
    (run / "model" / "modeling_own.py").write_text("raise SystemExit")
    publish(run, here / "out")
    assert "leaves out what the chat template may write before an answer" in (here / "out" / "README.md").read_text()


def test_scores_against_other_references_are_not_the_runs(here, capsys):
    rows = [json.loads(line) for line in (here / "runs" / "whole" / "predictions.jsonl").read_text().splitlines()]
    own = "".join(json.dumps({"id": row["id"], "reference": row["prediction"] or "x"}) + "\n" for row in rows)
    (here / "own.jsonl").write_text(own)
    ran("score", "--references", here / "own.jsonl", "runs/whole", "--metrics", "chrf")
    ran("publish", "runs/whole", "-o", "other")
    assert (
        "chrf of runs/whole was computed with other references or documents than the run's own"
        in capsys.readouterr().err
    )
    assert "chrf" not in (card_of(here / "other").data.metrics or [])
    ran("score", "runs/whole", "--metrics", "chrf")
    ran("publish", "runs/whole", "-o", "again")
    assert "chrf" in card_of(here / "again").data.metrics


def test_the_program_of_the_card_puts_no_end_behind_a_prompt(here):
    """The tokenizer of a model from scratch ends every text, and training does not end a prompt."""
    ran("publish", "runs/adapters", "-o", "out")
    tokenizer = AutoTokenizer.from_pretrained(here / "out")
    ends = tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    assert ("add_special_tokens=False" in (here / "out" / "README.md").read_text()) == ends
    assert ends


@pytest.mark.parametrize("metric", ["rouge", "bleu"])
def test_without_scores_the_card_has_none_and_the_program_says_so(here, capsys, metric):
    ran("publish", "runs/adapters", "-o", "a")
    assert (
        "warning: the card has no scores, because no texts were generated yet: ngramloss generate runs/adapters, then "
        "ngramloss score runs/adapters."
    ) in capsys.readouterr().err
    assert card_of(here / "a").data.eval_results is None
    assert "## Scores" not in (here / "a" / "README.md").read_text()
    (here / "runs" / "whole" / "scores.json").unlink()
    ran("publish", "runs/whole", "-o", "b")
    assert "because the texts have no scores yet: ngramloss score runs/whole." in capsys.readouterr().err
    assert card_of(here / "b").data.eval_results is None
    ran("score", "runs/whole", "--metrics", metric)
    ran("publish", "runs/whole", "-o", "c")
    assert card_of(here / "c").data.metrics == [metric]


def test_scores_of_another_models_texts_or_of_changed_texts_are_not_this_models(here, capsys):
    run = here / "runs" / "whole"
    about = json.loads((run / "generation.json").read_text())
    (run / "generation.json").write_text(json.dumps(about | {"weights": "0123456789ab", "model": "other"}))
    ran("publish", run, "-o", "a")
    assert "because another model wrote the texts in" in capsys.readouterr().err
    (run / "generation.json").write_text(json.dumps(about))
    ran("publish", run, "-o", "b")
    assert card_of(here / "b").data.eval_results
    rows = (run / "predictions.jsonl").read_text().splitlines()
    changed = json.dumps(json.loads(rows[0]) | {"prediction": "changed by hand"})
    (run / "predictions.jsonl").write_text("\n".join([changed, *rows[1:]]) + "\n")
    ran("publish", run, "-o", "c")
    assert "because the texts have no scores yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "language", "base", "data"),
    [("facebook/mbart-large-cc25", "en_XX", "facebook/mbart-large-cc25", "xsum"), ("./model", "", None, "mine.csv")],
)
def test_names_on_the_hub_are_metadata_and_folders_of_this_machine_are_not(here, name, language, base, data):
    run = here / "runs" / "whole"
    settings = recipe.changed(
        recipe.load(str(run / "recipe.toml")),
        [f"model.name={name}", f"data.name={data}", f"data.source_language={language}", "data.prefix=short: "],
    )
    (run / "recipe.toml").write_text(recipe.dump(settings))
    publish(run, here / "out")
    card = card_of(here / "out")
    assert card.data.base_model == base
    assert card.data.datasets == (["EdinburghNLP/xsum"] if data == "xsum" else None)
    assert card.data.language == (["en"] if language else None)
    assert ('tokenizer.src_lang = "en_XX"' in card.text) == bool(language)
    assert 'tokenizer("short: " + source,' in card.text


def test_a_separator_that_the_program_leaves_out_is_said(here):
    run = here / "runs" / "whole"
    (run / "recipe.toml").write_text(
        recipe.dump(recipe.changed(recipe.load(str(run / "recipe.toml")), ["data.separator=<s>"]))
    )
    publish(run, here / "out")
    assert "In training, `<s>` stood before every sentence of a source;" in card_of(here / "out").text


def test_folders_of_this_machine_in_the_settings_get_a_warning(here, capsys):
    run = here / "runs" / "whole"
    settings = recipe.changed(recipe.load(str(run / "recipe.toml")), [f"data.name=train={here}/mine.csv"])
    (run / "recipe.toml").write_text(recipe.dump(settings))
    ran("publish", run, "-o", "out")
    assert f"name folders of this machine (data.name = train={here}/mine.csv)." in capsys.readouterr().err


def test_links_pickles_and_other_files_are_not_published(here, capsys):
    model = here / "runs" / "adapters" / "model"
    (here / "secret.txt").write_text("do not publish")
    (model / "notes.txt").symlink_to(here / "secret.txt")
    (model / "training_args.bin").write_bytes(b"pickle")
    (model / "key.pem").write_text("do not publish")
    ran("publish", "runs/adapters", "-o", "out")
    said = capsys.readouterr().err
    assert "not published, because no model is loaded from them: key.pem, notes.txt, training_args.bin." in said
    assert not {"key.pem", "notes.txt", "training_args.bin"} & {path.name for path in (here / "out").iterdir()}


def test_pickled_weights_alone_are_refused(here, capsys):
    (here / "runs/whole/model/model.safetensors").rename(here / "runs/whole/model/pytorch_model.bin")
    assert cli.main(["publish", "runs/whole"]) == 2
    assert "has no safetensors. Only these are published: they cannot run code." in capsys.readouterr().err
    assert not (here / "published" / "whole").exists()


def test_other_weights_than_the_cards_are_refused(here, capsys):
    shutil.copyfile(here / "runs/adapters/model/model.safetensors", here / "runs/whole/model/model.safetensors")
    assert cli.main(["publish", "runs/whole"]) == 2
    assert "were changed after training, so the run's card does not describe them." in capsys.readouterr().err


def test_what_is_no_finished_run_is_refused(here, capsys):
    (here / "empty").mkdir()
    assert cli.main(["publish", "empty"]) == 2
    assert "empty is not a run's folder: it has no recipe.toml." in capsys.readouterr().err
    assert cli.main(["publish", "nowhere"]) == 2
    assert "no such file or folder: nowhere. The folder . contains " in capsys.readouterr().err
    (here / "out").mkdir()
    assert cli.main(["publish", "runs/whole", "-o", "out"]) == 2
    assert "out exists already. Delete it, or choose another folder with -o." in capsys.readouterr().err
    for repo in ("me", "me/a b", "a/b/c"):
        assert cli.main(["publish", "runs/whole", "--repo", repo]) == 2
        assert f"--repo takes OWNER/NAME, got '{repo}'" in capsys.readouterr().err
    (here / "runs" / "whole" / "model").rename(here / "model")
    assert cli.main(["publish", "runs/whole"]) == 2
    assert "has no model: its training is not finished, or the file was deleted." in capsys.readouterr().err
    (here / "runs" / "whole" / "recipe.toml").write_text(recipe.dump(recipe.load("simcls-demo")))
    assert cli.main(["publish", "runs/whole"]) == 2
    assert "is a run of simcls" in capsys.readouterr().err
    assert not (here / "published").exists()


EVIL = 'x"\nimport os; os.mkdir("ran")  # ` ``` \n```\n<script>alert(1)</script> | [a](b) \\x1b[2J\u202e\n---\n'


@pytest.mark.parametrize("name", ["whole", "adapters"])
def test_nothing_of_a_strangers_folder_becomes_code_or_html(here, capsys, name):
    run = here / "runs" / name
    texts = [
        f"data.{key}={json.dumps(EVIL)}" for key in ("source_language", "target_language", "language", "separator")
    ]
    texts += (
        [f"data.prefix={json.dumps(EVIL)}"] if name == "whole" else ["data.prompt=" + json.dumps(EVIL + "{source}")]
    )
    texts += [f"model.name={json.dumps(EVIL)}", f"data.name={json.dumps(EVIL)}"]
    settings = recipe.load(str(run / "recipe.toml"))
    for text in texts:  # those that a recipe may have
        with suppress(UserError):
            settings = recipe.changed(settings, [text])
    assert settings.data.name == settings.data.source_language == EVIL
    (run / "recipe.toml").write_text(recipe.dump(settings))
    (run / "card.md").write_text(f"# a\n\n{EVIL} `<img src=x>` <img src=x>\n\n## Data\n\n{EVIL}\n")
    if name == "whole":
        about = json.loads((run / "generation.json").read_text())
        odd = {"data": EVIL, "split": EVIL, "documents": EVIL, "seed": EVIL, "versions": {"transformers": EVIL}}
        (run / "generation.json").write_text(json.dumps(about | odd))
    publish(run, here / "out")
    text = (here / "out" / "README.md").read_text()
    front, _, body = text.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["tags"] == ["ngramloss"]
    assert not re.search(r"[\x1b\u202e]", text)
    html = MarkdownIt().enable("table").render(body)
    assert "alert(1)" in html
    assert not re.search(r"<(script|img)", html)
    (program,) = re.findall(r"^```python\n(.+?)^```$", text.partition("## Use")[2].partition("## Data")[0], re.S | re.M)
    names = {node.id for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Name)}
    assert "os" not in names
    assert card_of(here / "out").data.model_name == name


@pytest.mark.parametrize("name", ["log.jsonl", "card.md", "recipe.toml", "generation.json", "weights.json", "model"])
def test_a_link_of_a_strangers_folder_is_not_published(here, capsys, name):
    part = here / "runs" / "whole" / name
    part.rename(here / "private")
    part.symlink_to(here / "private")
    assert cli.main(["publish", "runs/whole", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert f"error: runs/whole/{name}" in said
    assert f" leads out of runs/whole, to {here / 'private'}" in said
    assert not (here / "out").exists()


def test_the_metadata_are_yaml_and_odd_names_stay_text(here):
    run = here / "runs" / "whole"
    odd = here / "runs" / "a: [b] #c"
    run.rename(odd)
    assert publish(odd, here / "out") == "YOUR-NAME/a-b-c"
    front = (here / "out" / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(front)["model-index"][0]["name"] == "a-b-c"
