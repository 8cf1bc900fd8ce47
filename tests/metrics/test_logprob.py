"""The mean log-probability of texts: equal to log-softmax of one text at a time, for each family of models."""

import pytest
import tiny_multilingual
import tiny_tokenizers
import torch

from ngramloss.cli import main
from ngramloss.errors import UserError
from ngramloss.metrics.logprob import logprob
from ngramloss.metrics.scores import Absent
from ngramloss.models.loading import from_scratch
from ngramloss.recipe import Model

DOCUMENTS = ["The cat sat on the mat. It slept there all day!", "Dogs ran home quickly in 2024.", "Nobody came."]
TEXTS = ["The cat slept.", "Dogs ran home, and a naïve cat slept on the mat.", ""]
TOKENIZERS = {"bart": tiny_tokenizers.ours, "t5": tiny_tokenizers.t5_like, "llama": tiny_tokenizers.gpt_like}
SIZE = {"width": 16, "encoder_layers": 1, "decoder_layers": 1, "heads": 2, "feed_forward": 16, "init_std": 0.5}


@pytest.fixture(scope="module", params=TOKENIZERS)
def made(request, tmp_path_factory):
    """A family, a model, its tokenizer and its folder."""
    folder, tokenizer = tmp_path_factory.mktemp(request.param), TOKENIZERS[request.param]()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = from_scratch(Model(name="scratch", architecture=request.param, **SIZE), tokenizer).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return request.param, model, tokenizer, folder


def oracle(family, model, tokenizer, document, text):
    """The definition, by the model's own labels or one row of prompt and text."""
    if family == "llama":
        read = tokenizer(f"{document}\n\nSummary:")["input_ids"]
        labels = [*tokenizer(f" {text}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        logits = model(torch.tensor([[*read, *labels]])).logits[0, len(read) - 1 : -1]
    else:
        labels = tokenizer(text)["input_ids"]
        logits = model(torch.tensor([tokenizer(document)["input_ids"]]), labels=torch.tensor([labels])).logits[0]
    logp = logits.log_softmax(-1)
    return sum(logp[at, token].item() for at, token in enumerate(labels)) / len(labels)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_are_mean_log_probabilities_whatever_the_batch(made, batch_size):
    family, model, tokenizer, folder = made
    found = logprob(DOCUMENTS, TEXTS, model=str(folder), batch_size=batch_size).values["logprob"]
    expected = [oracle(family, model, tokenizer, *pair) for pair in zip(DOCUMENTS, TEXTS, strict=True)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(value, 3) for value in found}) == 3


def test_prompts_and_prefixes_stand_before_the_document(made):
    family, _, _, folder = made
    before = {"prompt": "The dog. {source}\n\nSummary:"} if family == "llama" else {"prefix": "The dog. "}
    found = logprob(DOCUMENTS[:1], TEXTS[:1], model=str(folder), **before)
    joined = logprob([f"The dog. {DOCUMENTS[0]}"], TEXTS[:1], model=str(folder))
    assert found.values["logprob"] == pytest.approx(joined.values["logprob"], abs=1e-6)
    assert "The dog." in found.signature
    wrong = {"prefix": "a"} if family == "llama" else {"prompt": "{source}"}
    with pytest.raises(UserError, match=r"data\.prefix|data\.prompt"):
        logprob(DOCUMENTS, TEXTS, model=str(folder), **wrong)


def test_long_texts_are_cut_and_the_signature_says_where(made):
    _, _, _, folder = made
    limits = {"model": str(folder), "max_source": 12, "max_target": 4}
    longer, same = (logprob([f"{DOCUMENTS[0]}{end}"], [TEXTS[1] + end], **limits) for end in (" Nobody came.", ""))
    assert longer == same
    assert "|tokens:12+4|" in same.signature


@pytest.mark.slow
def test_no_text_is_longer_than_the_model_has_positions(made):
    family, model, _, folder = made
    limit = model.config.max_position_embeddings if family != "t5" else None
    found = logprob(["cat " * 5000], ["cat " * 5000], model=str(folder), max_source=4096, max_target=50)
    room = {"bart": limit, "llama": (limit or 0) - 50, "t5": 4096}[family]
    assert f"|tokens:{room}+50|" in found.signature
    if family == "bart":
        found = logprob(["cat"], ["cat " * 5000], model=str(folder), max_target=5000)
        assert f"|tokens:{limit}+{limit}|" in found.signature


def test_a_model_without_room_for_a_document_names_the_options_of_the_metric(made):
    family, model, _, folder = made
    limits = {"max_target": model.config.max_position_embeddings} if family == "llama" else {"max_source": 1}
    with pytest.raises(
        UserError, match=r"logprob: [01] tokens are too few .* Lower logprob\.max_target, raise logprob\."
    ):
        logprob(DOCUMENTS, TEXTS, model=str(folder), **limits)


def test_damaged_weights_are_an_error_that_names_the_document(made, tmp_path):
    _, model, tokenizer, _ = made
    damaged = type(model)(model.config)
    with torch.no_grad():
        damaged.get_input_embeddings().weight.fill_(torch.nan)
    damaged.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="logprob: the model gave NaN for document"):
        logprob(DOCUMENTS, TEXTS, model=str(tmp_path))


def test_a_missing_model_is_absent():
    with pytest.raises(Absent, match="logprob needs the model 'no/where'"):
        logprob(DOCUMENTS, TEXTS, model="no/where")


def test_a_multilingual_model_is_refused(tmp_path):
    folder = tiny_multilingual.model_folder("mbart", tmp_path)
    with pytest.raises(UserError, match="writes several languages"):
        logprob(DOCUMENTS, TEXTS, model=str(folder))


@pytest.mark.slow
def test_it_runs_from_the_command_line(made, tmp_path, capsys):
    _, _, _, folder = made
    (tmp_path / "texts.jsonl").write_text(
        '{"id": 1, "document": "a cat sat", "reference": "cat", "prediction": "a cat"}\n'
    )
    file = str(tmp_path / "texts.jsonl")
    command = ["score", "--references", file, "--documents", file, file, "--metrics", "logprob"]
    assert main([*command, "--set", f"logprob.model={folder}"]) == 0
    value = logprob(["a cat sat"], ["a cat"], model=str(folder)).values["logprob"][0]
    assert f"{value:.3f}" in capsys.readouterr().out
