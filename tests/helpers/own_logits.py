"""The joint loss of a model's own logits, which an attached model must give."""

import copy

import torch
from torch.testing import assert_close

from ngramloss import JointLoss
from ngramloss.models.attached.attach import detach
from ngramloss.models.attached.step_loss import shifted

OBJECTIVE = "ce + 0.5*matches(1,2) + bag(2)"


def reference(model, inputs, objective=OBJECTIVE, **counts):
    """The loss of the model's own logits; its gradients are left in a copy of the model."""
    model = detach(copy.deepcopy(model))
    labels = inputs["labels"] if model.config.is_encoder_decoder else shifted(inputs["labels"])
    loss = JointLoss(objective)(model(**inputs).logits, labels, **counts)
    loss.backward()
    return loss, model


def assert_same_gradients(model, other, **tolerance):
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        zero = torch.zeros_like(ours)
        assert_close(
            ours.grad if ours.grad is not None else zero,
            theirs.grad if theirs.grad is not None else zero,
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance,
        )
