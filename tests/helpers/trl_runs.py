"""trainings by ``NgramSFTTrainer`` on tiny models → what they logged and what each text apart gives, as JSON.

Runs in a process of its own: two versions of TRL cannot live in one, and it changes Trainer for those after it.
"""

import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from models import EOS, LLAMA, PAD, V, tiny

import ngramloss as ng
from ngramloss.models.attached.heads import bare
from ngramloss.models.attached.step_loss import shifted

OBJECTIVE = "ce + 0.5*matches(1,2) + bag(2)"
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}t9 {% generation %}{{ message.content }} "
    "t2{% endgeneration %} {% else %}t8 {{ message.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}t9 {% endif %}"
)
"""A chat template over words t0 … t12: t8 begins a question, t9 an answer, t2 ends it."""


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(V)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token=f"t{EOS}")
    made.chat_template = CHAT
    return made


def drawn(lengths, seed=0):
    """Rows of ids from few tokens, so that n-grams repeat."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 8, (length,), generator=generator).tolist() for length in lengths]


def text(ids):
    return "".join(f"t{token} " for token in ids).strip()


def completions():
    """Ids with a mask of the completion, and the same with labels."""
    rows = [
        (ids, [0] * cut + [1] * (len(ids) - cut))
        for ids, cut in zip(drawn([9, 17, 6, 12, 15]), (3, 5, 2, 9, 4), strict=False)
    ]
    data = [{"input_ids": ids, "completion_mask": mask} for ids, mask in rows]
    return data, [(ids, [i if m else -100 for i, m in zip(ids, mask, strict=True)]) for ids, mask in rows]


def prompts():
    """Texts of prompts and completions, and the ids that TRL should make of them: it adds the end."""
    both = [(ids[:cut], ids[cut:]) for ids, cut in zip(drawn([9, 17, 6, 12], seed=1), (3, 5, 2, 9), strict=True)]
    data = [{"prompt": text(prompt) + " ", "completion": text(rest) + " t2"} for prompt, rest in both]
    return data, [(prompt + rest + [EOS], [-100] * len(prompt) + rest + [EOS]) for prompt, rest in both]


def conversations():
    """Messages with one answer or two, and the ids that the chat template should make of them."""
    data, texts = [], []
    for number, (first, second, third, fourth) in enumerate(
        zip(*(drawn([4, 6, 3, 5], seed) for seed in range(4)), strict=True)
    ):
        turns = [("user", first), ("assistant", second), ("user", third), ("assistant", fourth)][
            : 2 if number % 2 else 4
        ]
        data.append({"messages": [{"role": role, "content": text(ids)} for role, ids in turns]})
        ids, labels = [], []
        for role, said in turns:
            made = [9, *said, EOS] if role == "assistant" else [8, *said]
            ids += made
            labels += [-100, *said, EOS] if role == "assistant" else [-100] * len(made)
        texts.append((ids, labels))
    return data, texts


def split(texts, longest):
    """Each text cut into pieces, as ``bfd_split`` does."""
    return [
        (ids[at : at + longest], labels[at : at + longest])
        for ids, labels in texts
        for at in range(0, len(ids), longest)
    ]


def apart(model, texts, objective=OBJECTIVE):
    """The joint loss and its terms with each text by itself in a row, from the model's own logits."""
    logits = [model(input_ids=torch.tensor([ids]), use_cache=False).logits[0] for ids, _ in texts]
    labels = [shifted(torch.tensor([own]))[0] for _, own in texts]
    padded = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return ng.JointLoss(objective).with_parts(torch.nn.utils.rnn.pad_sequence(logits, batch_first=True), padded)


def arguments(**settings):
    import trl

    usual = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 4,  # the whole data in one step, the last micro-batch of another size
        "max_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return trl.SFTConfig(**{**usual, **settings})


def lora():
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)


def trainer(data, *, kind=None, model=None, objective=OBJECTIVE, options=None, **settings):
    rows = Dataset.from_list(data)
    more = {"objective": objective} if kind is None else {}
    return (kind or ng.NgramSFTTrainer)(
        model=tiny("llama") if model is None else model,
        args=arguments(**settings),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=tokenizer(),
        **more,
        **(options or {}),
    )


def flat(model):
    return torch.cat([each.detach().flatten() for each in model.parameters() if each.requires_grad])


def mode(case, *, texts=None, options=None, objective=OBJECTIVE, **settings):
    """One step and an evaluation: the log, the weights, and those of the texts apart."""
    data, own = case
    texts = own if texts is None else texts
    it = trainer(data, options=options, objective=objective, **settings)
    plain, calls = copy.deepcopy(it.model), []
    vars(bare(plain)).pop("_ngramloss_forward", None)  # TRL's is bound to the original
    ng.detach(plain)
    bare(it.model).model.register_forward_hook(lambda *_: calls.append(1))
    validated = it.evaluate()
    evaluations = len(calls)
    it.train()
    log = next(each for each in it.state.log_history if "loss" in each)
    loss, parts = apart(plain.train(), texts, objective)
    loss.backward()
    with torch.no_grad():
        for weight in plain.parameters():
            if weight.grad is not None:
                weight -= 0.1 * weight.grad
    return {
        "logged": {name: log[name] for name in ("loss", *parts)},
        "evaluated": {name: validated[f"eval_{name}"] for name in ("loss", *parts)},
        "expected": {"loss": loss.item(), **{name: value.item() for name, value in parts.items()}},
        "weights": (flat(it.model) - flat(plain)).abs().max().item(),
        "forwards": [evaluations, len(calls) - evaluations],
        "micro_batches": len(list(it.get_train_dataloader())),
        "texts": len(texts),
    }


def modes():
    long = {"max_length": 64}
    pieces = split(completions()[1], 8)
    return {
        "completion": mode(completions(), completion_only_loss=True),
        "prompt": mode(prompts()),
        "assistant": mode(conversations(), assistant_only_loss=True),
        "whole": mode(completions(), texts=[(ids, ids) for ids, _ in completions()[1]], completion_only_loss=False),
        "padding_free": mode(completions(), completion_only_loss=True, padding_free=True, max_length=None),
        "bfd": mode(completions(), completion_only_loss=True, packing=True, packing_strategy="bfd", max_length=24),
        "bfd_split": mode(
            completions(),
            texts=pieces,
            completion_only_loss=True,
            packing=True,
            packing_strategy="bfd_split",
            max_length=8,
        ),
        "bfd_assistant": mode(conversations(), assistant_only_loss=True, packing=True, packing_strategy="bfd", **long),
        "lora": mode(prompts(), options={"peft_config": lora()}),
        "lora_bfd": mode(prompts(), options={"peft_config": lora()}, packing=True, packing_strategy="bfd", **long),
    }


def stock():
    """What TRL's own trainer logs, and ours with ``ce``: one micro-batch a step, so that means of means are exact."""
    import trl

    settings = {
        "completion_only_loss": True,
        "per_device_train_batch_size": 5,
        "per_device_eval_batch_size": 5,
        "gradient_accumulation_steps": 1,
        "max_steps": 2,
    }
    moe = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    found = {}
    for family in ("llama", "moe"):
        logs = []
        for kind in (trl.SFTTrainer, None):
            torch.manual_seed(0)
            model = (
                tiny("llama")
                if family == "llama"
                else transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LLAMA, **moe))
            )
            more = {} if family == "llama" else {"router_aux_loss_coef": 0.5}
            it = trainer(completions()[0], kind=kind, model=model, objective="ce", **settings, **more)
            it.train()
            it.evaluate()
            logs.append([*it.state.log_history[:2], it.state.log_history[-1]])
        found[family] = logs
    return found


def schedules():
    """Each weight and loss of two steps: by ``NgramSFTTrainer``, and by ``compute_loss_func`` with ``LogParts``."""
    import trl

    objective, settings = (
        "ce + matches(2)@from(0.5)",
        {"max_steps": 2, "completion_only_loss": True, "loss_type": "nll", "learning_rate": 0.0},
    )
    ours = trainer(completions()[0], objective=objective, **settings)
    model = tiny("llama")
    function = ng.compute_loss_func(objective, model=model)
    theirs = trainer(
        completions()[0],
        kind=trl.SFTTrainer,
        model=model,
        options={"compute_loss_func": function, "callbacks": [ng.LogParts()]},
        **settings,
    )
    for it in (ours, theirs):
        it.train()
        it.evaluate()
    return {"trainer": ours.state.log_history, "function": theirs.state.log_history}


def rewarded():
    """Two steps of GRPO with three rewards, one of which lacks half of its references."""
    import trl

    found, shown = [], ng.rewards.rouge("rouge1", reference="summary")

    def kept(prompts, completions, **columns):
        values = shown(prompts, completions, **columns)
        found.append([prompts, completions, columns["summary"], values])
        return values

    data = [
        {"prompt": text(ids[:4]), "summary": text(ids[4:]), "some": None if number % 2 else [text(ids[4:]), "t9"]}
        for number, ids in enumerate(drawn([9, 9, 9, 9]))
    ]
    usual = arguments(learning_rate=1.0, max_steps=2).to_dict()
    known = {"output_dir", "max_steps", "learning_rate", "lr_scheduler_type", "optim", "logging_steps", "use_cpu"}
    more = {name: usual[name] for name in (*known, "bf16", "save_strategy", "report_to", "disable_tqdm")}
    model = tiny("llama")
    before = flat(model)
    it = trl.GRPOTrainer(
        model=model,
        reward_funcs=[kept, ng.rewards.credit(1, 2, reference="some"), ng.rewards.bleu(reference="summary")],
        args=trl.GRPOConfig(**more, per_device_train_batch_size=8, num_generations=4, max_completion_length=6),
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )
    it.train()
    logs = [log for log in it.state.log_history if "reward" in log]
    return {"calls": found, "logs": logs, "moved": (flat(it.model) - before).abs().max().item()}


def mistakes():
    """What each wrong setting says."""
    from peft import PromptTuningConfig

    data = completions()[0]
    cases = {
        "wrapped": {"packing": True, "packing_strategy": "wrapped", "max_length": 64},
        "eval_packing": {"eval_packing": True, "max_length": 64},
        "packed": {"packed": True},
        "dft": {"loss_type": "dft"},
        "smoothing": {"label_smoothing_factor": 0.1},
        "candidates": {"objective": "ce + rank"},
        "virtual tokens": {"options": {"peft_config": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}},
        "function": {"options": {"compute_loss_func": print}},
        "head": {
            "options": {
                "peft_config": __import__("peft").LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM")
            }
        },
    }
    told = {}
    for name, settings in cases.items():
        lengths = [{**row, "seq_lengths": [4, len(row["input_ids"]) - 4]} for row in data]
        try:
            trainer(lengths if settings.pop("packed", False) else data, **settings).train()
            told[name] = ""
        except Exception as mistake:
            told[name] = f"{type(mistake).__name__}: {mistake}"
    try:
        ng.NgramSFTTrainer(
            tiny("llama"),
            transformers.TrainingArguments(tempfile.mkdtemp()),
            objective="ce",
            train_dataset=Dataset.from_list(data),
        )
    except TypeError as mistake:
        told["arguments"] = str(mistake)
    return told


def others():
    """What else should work: terms per token on wrapped rows, a model by name, a version that is not tested."""
    from ngramloss import version

    wrapped = trainer(completions()[0], objective="ce", packing=True, packing_strategy="wrapped", max_length=16)
    wrapped.train()
    compiled = trainer(completions()[0], completion_only_loss=True, torch_compile=True, torch_compile_backend="eager")
    compiled.train()
    folder = tempfile.mkdtemp()
    tiny("llama").save_pretrained(folder)
    named = trainer(completions()[0], model=folder, completion_only_loss=True)
    named.train()
    found = version.installed
    version.warn_if_untested.cache_clear()
    version.installed = lambda package: "9.9.9" if package == "trl" else found(package)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            trainer(completions()[0])
    scored = trainer(
        prompts()[0],
        options={"callbacks": [ng.ScoreTexts(prompts()[0], max_new_tokens=4)], "peft_config": lora()},
        eval_strategy="steps",
        eval_steps=1,
    )
    scored.train()
    predicted = trainer(completions()[0], completion_only_loss=True).predict
    return {
        "scored": [log for log in scored.state.log_history if "eval_rouge1" in log],
        "wrapped": wrapped.state.log_history[0]["loss"],
        "compiled": compiled.state.log_history[0]["loss"],
        "named": named.state.log_history[0]["loss"],
        "warned": [str(each.message) for each in caught if "trl 9.9.9" in str(each.message)],
        "logits": list(
            predicted(
                Dataset.from_list([{"input_ids": ids, "labels": labels} for ids, labels in completions()[1][:1]])
            ).predictions.shape
        ),
    }


if __name__ == "__main__":
    import trl

    warnings.filterwarnings("ignore")
    parts = {
        "modes": modes,
        "stock": stock,
        "schedules": schedules,
        "mistakes": mistakes,
        "others": others,
        "rewarded": rewarded,
    }
    Path(sys.argv[1]).write_text(
        json.dumps({"version": trl.__version__, **{name: parts[name]() for name in sys.argv[2:] or parts}})
    )
