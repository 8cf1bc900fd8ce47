"""Scores of what a model writes, at each evaluation of any trainer: the texts of ``generate``, and training unchanged."""

import pytest
import torch
import transformers
from models import BART, LLAMA
from tiny_tokenizers import bart_like
from transformers import Trainer, TrainingArguments

import ngramloss as ng
from ngramloss.errors import UserError
from ngramloss.metrics.registry import compute_scores
from ngramloss.metrics.scores import corpus_score

pytestmark = pytest.mark.filterwarnings("ignore")

PAIRS = [
    ("The cat sat on the mat. It slept there all day!", "The cat slept."),
    ("Dogs ran home quickly in 2024.", "Dogs ran home."),
    ("rain is expected in the north, and wind in the south.", "rain and wind"),
]
CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
ROWS = {
    "bart": [{"document": source, "summary": target} for source, target in PAIRS],
    "prompt": [{"prompt": source + "\n", "completion": target} for source, target in PAIRS],
    "messages": [
        {"messages": [{"role": "user", "content": source}, {"role": "assistant", "content": target}]}
        for source, target in PAIRS
    ],
    "conversation": [
        {"prompt": [{"role": "user", "content": source}], "completion": [{"role": "assistant", "content": target}]}
        for source, target in PAIRS
    ],
}


def tokenizer():
    made = bart_like()
    made.chat_template = CHAT
    return made


def model_of(kind):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer()),
        "max_position_embeddings": 128 if kind == "bart" else 256,
        "pad_token_id": 1,
    }
    if kind == "bart":
        settings = {**BART, **sizes, "decoder_start_token_id": 2, "dropout": 0.1}
        return transformers.BartForConditionalGeneration(transformers.BartConfig(**settings))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, **sizes, "attention_dropout": 0.1}))


def trainer(kind, folder, callbacks, model=None, **settings):
    ids = tokenizer()([source for source, _ in PAIRS], padding=True, return_tensors="pt")["input_ids"][:, :12]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"save_strategy": "no", **settings},
    )
    return Trainer(
        model=model or model_of(kind),
        args=arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=callbacks,
        processing_class=tokenizer(),
    )


def written(kind, model, max_new_tokens):
    """What ``generate`` writes for each source by itself."""
    words, texts = tokenizer(), []
    model.eval()
    for source, _ in PAIRS:
        if kind == "bart":
            ids = words(source, return_tensors="pt")["input_ids"]
        elif kind == "prompt":
            ids = torch.tensor([[words.bos_token_id, *words(source + "\n", add_special_tokens=False)["input_ids"]]])
        else:
            text = words.apply_chat_template(
                [{"role": "user", "content": source}], tokenize=False, add_generation_prompt=True
            )
            ids = torch.tensor([words(text, add_special_tokens=False)["input_ids"]])
        found = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1)[0]
        texts.append(words.decode(found if kind == "bart" else found[ids.shape[1] :], skip_special_tokens=True).strip())
    return texts


def rouge(texts):
    read = {
        "ids": ["1", "2", "3"],
        "references": [[target] for _, target in PAIRS],
        "predictions": texts,
        "documents": [source for source, _ in PAIRS],
    }
    scores = compute_scores("rouge", read, {}, documents=3)
    return {f"eval_{name}": corpus_score(scores, name) for name in ("rouge1", "rouge2", "rougeL")}


@pytest.mark.parametrize("kind", ROWS)
def test_an_evaluation_logs_and_returns_the_scores_of_what_generate_writes(kind, tmp_path, monkeypatch):
    callback, seen = ng.ScoreTexts(ROWS[kind], max_new_tokens=5, batch_size=2), []
    score = callback._scores
    monkeypatch.setattr(callback, "_scores", lambda texts, examples: seen.extend(texts) or score(texts, examples))
    it = trainer(kind, tmp_path, [callback])
    found = it.evaluate()
    assert seen == written(kind, it.model, 5)
    assert all(seen)
    expected = rouge(seen)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert {name: it.state.log_history[-1][name] for name in expected} == pytest.approx(expected)
    assert found["eval_scoring_seconds"] > 0


def test_a_model_that_copies_its_answer_scores_a_hundred(tmp_path):
    """The texts are those of the references, not of the prompts: a score of 0 everywhere would pass the test above."""

    class Copies(ng.ScoreTexts):
        def _write(self, model, tokenizer, shape, ids):
            return [target for _, target in PAIRS]

    found = trainer("prompt", tmp_path, [Copies(ROWS["prompt"])]).evaluate()
    assert found["eval_rouge1"] == pytest.approx(100)


@pytest.mark.slow
def test_training_goes_on_as_without_it(tmp_path):
    """Neither the mode nor the random numbers of dropout change."""
    weights, modes = [], []
    for callbacks in ([], [ng.ScoreTexts(ROWS["bart"], max_new_tokens=4)]):
        it = trainer("bart", tmp_path, callbacks, seed=3)
        it.train()
        modes.append(it.model.training)
        weights.append(torch.cat([each.detach().flatten() for each in it.model.parameters()]))
    assert torch.equal(*weights)
    assert modes[0] == modes[1]
    assert [log for log in it.state.log_history if "eval_rouge2" in log and "eval_loss" in log]
    assert not [
        log for log in it.state.log_history if "train_rouge2" in log or ("loss" in log and "eval_rouge2" in log)
    ]


def test_the_model_and_random_numbers_are_put_back(monkeypatch):
    from ngramloss.search.writer import Writer

    callback, model = ng.ScoreTexts(ROWS["prompt"]), model_of("prompt").train()
    monkeypatch.setattr(Writer, "best", lambda self, ids, **_: [str(torch.rand(1)) for _ in ids])
    before = torch.get_rng_state()
    callback._found(model, tokenizer())
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_ends_where_its_chat_template_ends_and_where_the_model_stops(monkeypatch):
    from ngramloss.search import engines

    found, load = [], engines.load_in_training
    monkeypatch.setattr(
        engines, "load_in_training", lambda name, model, search: found.append(search) or load(name, model, search)
    )
    model = model_of("messages")
    model.generation_config.eos_token_id = 5
    ng.ScoreTexts(ROWS["messages"], max_new_tokens=3, num_beams=2)._found(model, tokenizer())
    assert (found[0].ends, found[0].num_beams, found[0].max_length, found[0].sample) == ((2, 5), 2, 4, False)
    assert model.generation_config.eos_token_id == 5


def test_prompts_and_texts_must_fit_into_the_model():
    model = model_of("prompt")
    _, shape = ng.ScoreTexts(ROWS["prompt"], max_new_tokens=200)._prepare(model, tokenizer())
    assert shape.max_source == 56
    for asked in ({"max_source": 250}, {"max_new_tokens": 256}):
        with pytest.raises(UserError, match="do not fit into the 256 positions of the model"):
            ng.ScoreTexts(ROWS["prompt"], **asked)._prepare(model, tokenizer())


def test_virtual_tokens_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(UserError, match="with virtual tokens"):
        trainer(
            "prompt", tmp_path, [ng.ScoreTexts(ROWS["prompt"])], model=peft.get_peft_model(model_of("prompt"), config)
        )


@pytest.mark.slow
def test_the_best_checkpoint_may_be_that_of_a_score(tmp_path):
    it = trainer(
        "prompt",
        tmp_path,
        [ng.ScoreTexts(ROWS["prompt"], max_new_tokens=4)],
        metric_for_best_model="rouge1",
        greater_is_better=True,
        save_strategy="steps",
        save_steps=1,
    )
    it.train()
    assert it.state.best_metric is not None


def test_several_data_sets_are_scored_once(tmp_path):
    callback = ng.ScoreTexts(ROWS["prompt"], max_new_tokens=3)
    it = trainer("prompt", tmp_path, [callback])
    found = it.evaluate({"one": it.eval_dataset, "two": it.eval_dataset})
    assert "eval_one_rouge1" in found
    assert "eval_two_rouge1" not in found
    assert "eval_one_rouge1" in it.evaluate({"one": it.eval_dataset})


def test_any_fast_score_and_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        model_of("prompt"), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    it = trainer("prompt", tmp_path, [], model=model)
    it.add_callback(ng.ScoreTexts(ROWS["prompt"], scores=["bleu", "chrf"], max_new_tokens=3))
    assert {"eval_bleu", "eval_chrf"} <= it.evaluate().keys()


def test_two_processes_write_their_shares_and_the_first_one_scores(tmp_path, monkeypatch):
    callback = ng.ScoreTexts(ROWS["prompt"])
    shares, sent = [], []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        callback,
        "_write",
        lambda model, tokenizer, shape, ids: [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
    )
    model = model_of("prompt")
    for process in (1, 0):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda process=process: process)

        def gather(into, mine):
            shares.append(mine)
            into[:] = [mine, shares[0]]  # this process is the first in the end

        monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
        monkeypatch.setattr(
            torch.distributed,
            "broadcast_object_list",
            lambda found: sent.append(found[0]) or found.__setitem__(0, found[0] or {}),
        )
        found = callback._found(model, tokenizer())
    assert [len(share) for share in shares] == [2, 2]
    assert sent[0] is None  # the second process computed nothing
    assert found["rouge1"] == pytest.approx(rouge([source for source, _ in PAIRS])["eval_rouge1"])


def test_texts_are_read_by_the_script_of_the_references_or_by_options(messages):
    texts = ["今天天气很好我们去公园", "他昨天去了北京"]
    rows = [{"document": "文", "summary": text} for text in texts]
    found = ng.ScoreTexts(rows, scores=["rouge2", "bleu"])
    assert found._scores(texts, found.examples) == pytest.approx({"rouge2": 100, "bleu": 100})
    assert not messages
    told = ng.ScoreTexts(rows, scores=["rouge2"], options={"rouge": {"tokens": "default"}})
    assert told._scores(texts, told.examples) == {"rouge2": 0}
    assert "they skip 100% of the letters" in messages[0]
    assert messages[0].endswith('options={"rouge": {"tokens": "auto"}}.')


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"options": {"bleu": {}}}, r"options: bleu is not a metric of the scores\. Choose from rouge\."),
        ({"options": {"rouge": {"token": "auto"}}}, r"rouge\.token: unknown option. Did you mean 'tokens'\?"),
        (
            {"scores": ["rogue2"]},
            r"scores: 'rogue2' is no score\. Did you mean 'rouge2'\? Scores of generated texts: rouge1",
        ),
        ({"scores": ["bertscore"]}, "scores: bertscore needs a model"),
        (
            {"examples": [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": ""}]},
            r"'completion' is empty[\s\S]*Fix them\.",
        ),
        ({"examples": [{"a": "b"}]}, "cannot find the source and the target column of examples"),
        ({"examples": []}, "has no rows"),
    ],
)
def test_what_cannot_be_scored_is_refused_at_once(options, told):
    with pytest.raises(UserError, match=told):
        ng.ScoreTexts(options.pop("examples", ROWS["prompt"]), **options)


def test_one_name_is_not_a_list():
    with pytest.raises(TypeError, match=r"scores must be a list of names, such as \['rouge1'\]"):
        ng.ScoreTexts(ROWS["prompt"], scores="rouge1")


def test_what_a_model_cannot_read_is_refused_when_the_trainer_is_made(tmp_path):
    for rows, options in ((ROWS["messages"], {}), (ROWS["bart"], {"prompt": "{source}"})):
        with pytest.raises(
            UserError, match="is for decoder-only models, and BartForConditionalGeneration is an encoder"
        ):
            trainer("bart", tmp_path, [ng.ScoreTexts(rows, **options)])
    words = bart_like()
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        trainer("messages", tmp_path, [ng.ScoreTexts(ROWS["messages"], tokenizer=words)])
    it = trainer("prompt", tmp_path, [])
    it.processing_class = it.callback_handler.processing_class = None
    it.add_callback(ng.ScoreTexts(ROWS["prompt"]))
    with pytest.raises(UserError, match=r"ScoreTexts needs a tokenizer.*tokenizer=…"):
        it.evaluate()
