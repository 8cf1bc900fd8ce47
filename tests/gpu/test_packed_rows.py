"""Packed rows on a GPU: kernels, replayed graphs and compiled code agree with texts apart."""

import pytest
import torch

from ngramloss import JointLoss
from ngramloss.loss.stats import packing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WRITTEN = "ce + matches(2,3,4) + 0.5*rewards(2) + precision(2) + soft(2) + accept(3) + bag(2) + unlikelihood + convex"


def packed_batch(seed, B=4, T=512, V=1000, D=64, dtype=torch.float32):
    """Rows of documents of 1 to 60 tokens, and the same documents apart."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float32)
    weight = torch.randn(V, D, generator=generator) / 4
    labels = torch.randint(0, 30, (B, T), generator=generator)
    hidden += 2 * weight[labels] * (torch.rand(B, T, 1, generator=generator) < 0.7)
    segments = torch.zeros(B, T, dtype=torch.long)
    documents = []
    for row in range(B):
        first, number = 0, 0
        while first < T:
            end = min(T, first + int(torch.randint(1, 60, (), generator=generator)))
            segments[row, first:end] = number
            labels[row, first] = -100
            documents.append((row, first, end))
            first, number = end, number + 1
    longest = max(end - first for _, first, end in documents)
    rows = torch.zeros(len(documents), longest, D)
    own = torch.full((len(documents), longest), -100)
    for index, (row, first, end) in enumerate(documents):
        rows[index, : end - first], own[index, : end - first] = hidden[row, first:end], labels[row, first:end]
    packed = [x.cuda() for x in (hidden.to(dtype), weight.to(dtype), labels)]
    return packed, segments.cuda(), [x.cuda() for x in (rows.to(dtype), weight.to(dtype), own)], documents


def gradients(loss_fn, hidden, weight, labels, **more):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss, parts = loss_fn.from_hidden_with_parts(*leaves, labels, **more)
    return loss, parts, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_kernels_and_replayed_graphs_agree_with_texts_apart(memory):
    loss_fn, plain = JointLoss(WRITTEN, backend="fused", memory=memory), JointLoss(WRITTEN, backend="plain")
    for turn in range(6):  # from the third batch of a shape on, a graph is replayed
        packed, segments, apart, documents = packed_batch(turn % 2)
        got, wanted = gradients(loss_fn, *packed, segments=segments), gradients(plain, *apart)
        torch.testing.assert_close(got[0], wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1], wanted[1], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[3], wanted[3], atol=2e-6, rtol=1e-3)
        for index, (row, first, end) in enumerate(documents):
            torch.testing.assert_close(got[2][row, first:end], wanted[2][index, : end - first], atol=2e-6, rtol=1e-3)


def test_bf16_differs_from_texts_apart_by_its_rounding_only():
    loss_fn = JointLoss("ce + matches(2,3,4) + bag(2)", backend="fused")
    packed, segments, apart, _ = packed_batch(3, dtype=torch.bfloat16)
    for _ in range(4):
        got, wanted = gradients(loss_fn, *packed, segments=segments), gradients(loss_fn, *apart)
        torch.testing.assert_close(got[1], wanted[1], atol=1e-5, rtol=1e-5)  # the same logits, rounded once


def test_compiled_code_agrees():
    loss_fn = JointLoss("ce + matches(2,3) + bag(2)")
    packed, segments, apart, _ = packed_batch(1, B=2, T=128)
    made = packing(packed[2], segments)
    compiled = torch.compile(
        lambda hidden, weight, labels, made: loss_fn.from_hidden(hidden, weight, labels, segments=made), fullgraph=True
    )
    torch.testing.assert_close(compiled(*packed, made), loss_fn.from_hidden(*apart), atol=1e-5, rtol=1e-5)


def test_an_attached_model_unpacks_on_a_gpu():
    from models import tiny
    from packed_documents import OBJECTIVE, agree, documents_of, expected, positions, rows

    import ngramloss as ng

    ids, labels = rows()
    logits = tiny("llama")(input_ids=ids, position_ids=positions(), use_cache=False).logits.detach()
    model = ng.attach(tiny("llama"), OBJECTIVE).cuda()
    wanted = expected(logits, labels, documents_of())
    for _ in range(4):
        loss = model(input_ids=ids.cuda(), position_ids=positions().cuda(), labels=labels.cuda(), use_cache=False).loss
        loss.backward()
        agree(model, loss, {name: value.cuda() for name, value in wanted.items()})
