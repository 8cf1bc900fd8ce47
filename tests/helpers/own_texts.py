"""Tiny models that write while they are trained, and a score of their texts."""

import models
from looped import trained
from trainings import rows

from ngramloss.recipe import Generation, Online
from ngramloss.training.online import OwnTexts

OBJECTIVE = "ce + 2*risk(sharpness=1)"


class Numbers:
    """A tokenizer whose texts are the ids."""

    pad_token_id = models.PAD

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(str(token) for token in row if token > models.START) for row in rows]

    def save_pretrained(self, folder):
        """Nothing is saved."""


def overlap(data):
    """What texts score: the share of the reference's ids that they have, less what they repeat."""

    def scores(numbers, texts):
        found = []
        for number, group in zip(numbers, texts, strict=True):
            reference = set(map(str, data[number]["labels"]))
            sets = [(text.split(), reference & set(text.split())) for text in group]
            found.append([len(hit) / max(len(reference), len(words), 1) for words, hit in sets])
        return found

    return scores


def written(data, *, max_length=8, engine="auto", scores=None, **settings):
    """What the model writes of these rows."""
    online = Online(**{"samples": 3} | settings)
    return OwnTexts(online, scores or overlap(data), Generation(max_length=max_length, engine=engine))


def writing_model(family="bart"):
    """A tiny model whose settings do not limit its texts."""
    model = models.tiny(family)
    model.generation_config.max_new_tokens = None
    return model


def trained_online(
    folder=None, *, family="bart", objective=OBJECTIVE, data=None, online=None, model=None, scores=None, **changes
):
    """A training of 3 steps an epoch, which writes 3 texts of each source."""
    data = rows(22) if data is None else data
    own = written(data, scores=scores, **(online or {}))
    model = writing_model(family) if model is None else model
    given = {"learning_rate": 1e-3, "tokenizer": Numbers()} | changes
    return trained(folder, model=model, objective=objective, data=data, own_texts=own, **given)
