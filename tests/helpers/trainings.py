"""rows of ids → tiny models that NgramTrainer trained on them, for tests that compare trainings."""

import models
import torch
from places import HELPERS
from transformers import Seq2SeqTrainingArguments

from ngramloss import NgramTrainer, train
from ngramloss.models.adapters import add_lora
from ngramloss.models.attached.decoder_inputs import decoder_inputs
from ngramloss.recipe import Model

OBJECTIVE = "ce + matches(2,3) + bag(2)"


RANKED = "ce + matches(2) + 10*rank(margin=0.1,alpha=1) + 0.5*prefer(beta=1)"


def rows(count, seed=1):
    source = torch.Generator().manual_seed(seed)

    def ids(least):
        length = int(torch.randint(least, 9, (1,), generator=source))
        return torch.randint(4, models.V, (length,), generator=source).tolist()

    return [{"input_ids": ids(3), "labels": ids(2)} for _ in range(count)]


def rows_with_candidates(count, seed=1, most=3):
    """Rows with up to so many candidates; some have none."""
    source = torch.Generator().manual_seed(seed + 100)

    def number(least, below):
        return int(torch.randint(least, below, (1,), generator=source))

    made = rows(count, seed=seed)
    for row in made:
        K = number(0, most + 1)
        row["candidates"] = [torch.randint(4, models.V, (number(1, 11),), generator=source).tolist() for _ in range(K)]
        row["scores"] = torch.rand(K, generator=source).tolist()
    return made


def padded(model):
    def collate(batch):
        def fill(name, value):
            longest = max(len(row[name]) for row in batch)
            return torch.tensor([row[name] + [value] * (longest - len(row[name])) for row in batch])

        ids, labels = fill("input_ids", models.PAD), fill("labels", -100)
        return {
            "input_ids": ids,
            "attention_mask": (ids != models.PAD).long(),
            "labels": labels,
            "decoder_input_ids": decoder_inputs(model, labels),
        }

    return collate


def arguments(folder, **changes):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "logging_steps": 1,
        "report_to": [],
        "seed": 3,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    return Seq2SeqTrainingArguments(**settings | changes)


def tiny(family="bart"):
    torch.manual_seed(0)
    return models.ENCODER_DECODER[family]()


def row_count(predicted):
    return {"rows": len(predicted.predictions)}


def trained(
    folder,
    *,
    objective=OBJECTIVE,
    data=22,
    kind=NgramTrainer,
    model=None,
    compute_metrics=None,
    ours=(),
    resume=None,
    **changes,
):
    model = tiny() if model is None else model
    extra = {"objective": objective} | dict(ours) if kind is NgramTrainer else {}
    trainer = kind(
        model,
        arguments(folder, **changes),
        train_dataset=rows(data) if isinstance(data, int) else data,
        eval_dataset=rows(7, seed=2),
        data_collator=padded(model),
        compute_metrics=compute_metrics,
        **extra,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def assert_same_weights(one, other, tolerance=1e-5):
    other = dict(other.items())
    for name, weight in one.items():
        torch.testing.assert_close(
            weight, other[name], atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def moved(labels):
    start = torch.full((len(labels), 1), 99)
    return torch.cat([start, labels[:, :-1]], 1).masked_fill(torch.cat([start, labels[:, :-1]], 1) == -100, 1)


# Decoder-only models, in the loop of ngramloss train


def joined_rows(count, seed=1, *, candidates=False):
    """Prompts and what follows them: of one turn, with candidates, or of several turns."""
    source = torch.Generator().manual_seed(seed)

    def number(least, below):
        return int(torch.randint(least, below, (1,), generator=source))

    def ids(least, below):
        return torch.randint(4, models.V, (number(least, below),), generator=source).tolist()

    made = []
    for row in rows_with_candidates(count, seed) if candidates else rows(count, seed):
        if not candidates and number(0, 2):
            row["labels"] += [*(~token for token in ids(1, 5)), *ids(2, 7)]
        made.append(row)
    return made


def train_joined(folder, objective, *, lora=0, **settings):
    """Train a tiny Llama, or adapters of it, with checkpoints in a folder. Returns the loss of each step."""
    torch.manual_seed(0)
    losses = []
    train(
        add_lora(models.tiny("llama"), Model(lora=lora, lora_targets=["q_proj", "down_proj", "lm_head"])),
        None,
        joined_rows(22, candidates="rank" in objective),
        objective=objective,
        folder=folder,
        **{"batch_size": 8, "accumulate": 1, "max_steps": 5, "learning_rate": 1e-2, "warmup_steps": 0, **settings},
        log_every=1,
        on_step=lambda step, line: losses.append(line["loss"]),
    )
    return losses


EACH_RANK = f"""
import json, os, sys
sys.path.insert(0, {str(HELPERS)!r})
import trainings
folder, objective, settings = sys.argv[1:]
losses = trainings.train_joined(folder, objective, **json.loads(settings))
if os.environ["RANK"] == "0":
    open(os.path.join(folder, "losses.json"), "w").write(json.dumps(losses))
"""
"""A program: :func:`train_joined` in one of several processes."""
