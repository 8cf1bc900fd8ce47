"""a teacher, or the model itself before training, and a batch → the teacher's hidden states and head, frozen."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ngramloss.errors import UserError
from ngramloss.loss.joint_loss import JointLoss
from ngramloss.loss.stats import Teacher, at_positions
from ngramloss.models.attached.adapted_heads import evaluating, head_input
from ngramloss.models.attached.calls import capturing
from ngramloss.models.attached.decoder_inputs import add_decoder_inputs
from ngramloss.models.attached.heads import bare, has_encoder, head_module, head_of, raise_unless_equal
from ngramloss.models.attached.shared_prompts import call, on_the_right


class TeacherModel:
    """A frozen model, of a student's kind and vocabulary if there is one; a student's own has its adapters off."""

    def __init__(self, model: Any, student: Any = None) -> None:
        if not isinstance(model, Module):
            raise UserError(
                f"teacher must be a Hugging Face model, got {type(model).__name__}. Pass a teacher's logits to "
                "JointLoss(...)(logits, labels, teacher=...)."
            )
        self.model, self._checked = model, False
        self.own = student is not None and bare(model) is bare(student)
        inner = bare(model)
        if self.own:
            _raise_unless_adapters(model)
        else:
            model.eval()
        if student is None:
            return
        kinds = ["an encoder-decoder" if has_encoder(each) else "decoder-only" for each in (inner, bare(student))]
        if kinds[0] != kinds[1]:
            raise UserError(f"the teacher is {kinds[0]}, but the model is {kinds[1]}. Use a teacher of the same kind.")
        ids = [head_of(each, head_module(each)).weight.shape[0] for each in (inner, bare(student))]
        if ids[0] != ids[1]:
            raise UserError(
                f"the teacher's vocabulary has {ids[0]:,} ids and the model's {ids[1]:,}, so their predictions cannot "
                "be compared. Use a teacher with the model's tokenizer and vocabulary."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> TeacherModel:
        """A copy of a student has the same teacher; without its adapters, it is its own."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model, memo) if self.own else self.model
        return other

    def predictions(self, inputs: Mapping[str, Any], labels: Tensor, places: Tensor | None) -> Teacher:
        """What the teacher predicts for a batch."""
        inner, device, given, run = bare(self.model), labels.device, dict(inputs), call
        if has_encoder(inner):
            add_decoder_inputs(inner, given, labels)
        elif places is not None:
            run = on_the_right(call)
        if not self.own and getattr(inner, "hf_device_map", None) is None and inner.device != device:
            self.model.to(device)
        module = head_module(inner)
        with torch.no_grad(), _as_it_began(self.model) if self.own else nullcontext():
            with capturing(module) as capture:
                outputs = run(self.model, **given, return_dict=True)
            hidden = capture.hidden  # [B, T, D']
            if hidden is None:
                raise UserError(
                    f"the teacher, {type(inner).__name__}, did not call its output head. Use another teacher."
                )
            head = head_of(inner, module)
            if not self._checked:
                raise_unless_equal(inner, outputs.get("logits"), head_input(module, hidden[:, :1]), head)
                self._checked = True
            made = head_input(module, hidden)  # [B, T, D' + r]
        made = (made if places is None else at_positions(made, places)).to(device)  # [S, T, D' + r]
        parts: dict[str, Any] = head._asdict()
        parts |= {name: part.to(device) for name, part in parts.items() if isinstance(part, Tensor)}
        return Teacher(hidden=made, **parts)


def teacher_model(teacher: Any, student: Any, loss_fn: JointLoss) -> TeacherModel | None:
    """The teacher of a model with this objective; None if no term compares with one. Raises if one is missing."""
    if teacher is None and not loss_fn.needs_teacher:
        return None
    name = next((term.names[0] for term in loss_fn.terms if "teacher" in term.requires), "")
    if not name:
        raise UserError(
            f"a teacher was given, but no term of {str(loss_fn)!r} uses it: add distill or keep to the objective, or "
            "leave the teacher out."
        )
    if teacher is None:
        start = (
            "teacher=copy.deepcopy(model), or teacher=model if it has adapters, which are then switched off"
            if loss_fn.compares_with_start
            else "teacher=a model with the same tokenizer"
        )
        raise UserError(f"{name} needs a teacher. Call attach(model, ..., {start}).")
    return TeacherModel(teacher, student)


def frozen_start(model: Any) -> Any:
    """What ``keep`` compares a model with: a copy, or the model itself if adapters are all that is trained."""
    if hasattr(model, "disable_adapter"):
        return model
    return copy.deepcopy(model).eval().requires_grad_(False)


def _raise_unless_adapters(model: Any) -> None:
    """Raise unless adapters are all that is trained in a model."""
    if not hasattr(model, "disable_adapter"):
        raise UserError(
            "the teacher is the model itself, which changes in training. Pass a copy, teacher=copy.deepcopy(model)."
        )
    names = tuple(f".{name}" for name in model.peft_config)
    plain = [
        name
        for name, weight in model.named_parameters()
        if weight.requires_grad and not any(each in name for each in names)
    ]
    if plain:
        raise UserError(
            f"the teacher is the model itself without its adapters, but {plain[0]} is trained too, so that is not how "
            "it began. Pass a copy, teacher=copy.deepcopy(model)."
        )


@contextmanager
def _as_it_began(model: Any) -> Iterator[None]:
    with model.disable_adapter(), evaluating(model.modules()):
        yield
