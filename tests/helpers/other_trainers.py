"""axolotl or ms-swift, as its package is → what its trainer logged with our objective, as JSON.

Runs in a process of its own: these packages want other versions of what is installed, and change it when they are imported.
"""

import json
import sys
import tempfile
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import packed_documents
import torch
from datasets import Dataset
from models import tiny
from transformers import TrainingArguments
from trl_runs import OBJECTIVE, apart, completions, tokenizer

SCHEDULED = OBJECTIVE.replace("bag(2)", "bag(2)@from(0.5)")
USUAL = {
    "per_device_train_batch_size": 5,
    "max_steps": 2,
    "learning_rate": 0.0,
    "logging_steps": 1,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}


def rows():
    """Ids, labels and positions of each text."""
    return [
        {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids), "position_ids": list(range(len(ids)))}
        for ids, labels in completions()[1]
    ]


def expected():
    with torch.no_grad():
        _, parts = apart(tiny("llama"), completions()[1])
    return {name: value.item() for name, value in parts.items()}


def of_batch(batch):
    """The terms of a packed row whose mask has the number of each document, with each document apart.

    On a CPU its documents see each other: axolotl keeps them apart in flash attention.
    """
    numbers = batch["attention_mask"][0].tolist()
    documents = [
        (0, numbers.index(number), len(numbers) - numbers[::-1].index(number)) for number in sorted({*numbers} - {0})
    ]
    with torch.no_grad():
        logits = tiny("llama")(**{name: value for name, value in batch.items() if name != "labels"}).logits
    parts = packed_documents.expected(logits, batch["labels"], documents, OBJECTIVE)
    return {name: value.item() for name, value in parts.items()}


def axolotl():
    """All texts in one row by axolotl's collator, trained by its trainer with our plugin, as its builder does it."""
    import axolotl
    from axolotl.core.trainers.base import AxolotlTrainer
    from axolotl.core.training_args_base import AxolotlTrainingMixins
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.collators import V2BatchSamplerDataCollatorForSeq2Seq
    from axolotl.utils.dict import DictDefault

    @dataclass
    class Arguments(AxolotlTrainingMixins, TrainingArguments):
        """As axolotl's own, whose file also imports what the installed TRL no longer has."""

    plugins = PluginManager.get_instance()
    plugins.register("ngramloss.trainers.axolotl.NgramPlugin")
    _, settings = merge_input_args()
    logged = []
    for squashed in (False, True):
        cfg, model = DictDefault({"ngram_objective": SCHEDULED}), tiny("llama")
        plugins.cfg = cfg
        plugins.pre_model_load(cfg)
        plugins.post_model_load(cfg, model)
        collator, batches = V2BatchSamplerDataCollatorForSeq2Seq(tokenizer(), squash_position_ids=squashed), []

        def collate(examples, collator=collator, batches=batches):
            batches.append(collator(examples))
            return batches[-1]

        trainer = AxolotlTrainer(
            model=model,
            args=Arguments(output_dir=tempfile.mkdtemp(), remove_unused_columns=False, **USUAL),
            train_dataset=Dataset.from_list(rows()),  # the collator puts the rows of a batch into one
            data_collator=collate,
            callbacks=plugins.add_callbacks_pre_trainer(cfg, model),
        )
        trainer.train()
        logged.append(
            [
                {**log, "expected": of_batch(batch)}
                for log, batch in zip(trainer.state.log_history, batches, strict=False)
            ]
        )
    told = {}
    for name, wrong in {
        "rl": {"ngram_objective": "ce", "rl": "dpo"},
        "spelling": {"ngram_objective": "matchs(2)"},
    }.items():
        try:
            plugins.pre_model_load(DictDefault(wrong))
        except Exception as mistake:
            told[name] = str(mistake)
    return {
        "version": axolotl.__version__,
        "logged": logged,
        "settings": sorted(name for name in settings.model_fields if name.startswith("ngram_")),
        "told": told,
    }


def swift():
    """All texts in one row, trained by ms-swift's loss and callbacks in its own trainer."""
    from swift.callbacks import callbacks_map
    from swift.loss import loss_map
    from swift.trainers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    from swift.version import __version__

    from ngramloss.trainers.swift import register

    register(SCHEDULED)

    class Template:
        """What the trainer asks of a template."""

        is_encoder_decoder, padding_free, task_type, sequence_parallel_size = False, True, "causal_lm", 1
        max_length, use_chat_template, packing, model_accepts_loss_kwargs = None, True, True, None
        tokenizer, template_meta = tokenizer(), SimpleNamespace(stop_words=[], suffix_stop="")

        def data_collator(self, batch, padding_to=None):
            joined = {
                name: torch.tensor([list(chain.from_iterable(row[name] for row in batch))])
                for name in ("input_ids", "labels", "position_ids")
            }
            joined["labels"][joined["position_ids"] == 0] = -100
            scale = (joined["labels"] != -100).float()
            return {**joined, **({"loss_scale": scale * self.scale} if self.scale else {})}

        def register_post_encode_hook(self, models):
            return None

        def remove_post_encode_hook(self):
            return None

        def forward_context(self, model, inputs):
            return nullcontext()

        def get_base_model(self, model):
            return model

        def compute_sft_loss(self, model, inputs, num_items_in_batch=None, trainer=None):
            return model(**inputs)

        scale = 0.0

    def trained(scale=0.0, **settings):
        model, template = tiny("llama"), Template()
        template.scale = scale
        model.model_meta, model.model_info = (
            SimpleNamespace(is_multimodal=False, model_arch=None),
            SimpleNamespace(is_moe_model=False),
        )
        args = Seq2SeqTrainingArguments(
            output_dir=tempfile.mkdtemp(),
            loss_type="ngram",
            callbacks=["ngram"],
            check_model=False,
            gradient_checkpointing=False,
            **USUAL,
            **settings,
        )
        it = Seq2SeqTrainer(model=model, args=args, template=template, train_dataset=rows())
        it.train()
        return [log for log in it.state.log_history if "loss" in log]

    told = {}
    for name, wrong in {"kept": {"use_logits_to_keep": True}}.items():
        try:
            trained(**wrong)
        except Exception as mistake:
            told[name] = str(mistake)
    return {
        "version": __version__,
        "logged": [trained(use_logits_to_keep=False), trained(scale=1.0, use_logits_to_keep=False)],
        "registered": "ngram" in loss_map and "ngram" in callbacks_map,
        "told": told,
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    found = {"axolotl": axolotl, "swift": swift}[sys.argv[2]]()
    Path(sys.argv[1]).write_text(json.dumps({**found, "expected": expected()}))
