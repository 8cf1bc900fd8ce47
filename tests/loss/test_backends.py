"""Every sweep gives the answer of the plain one."""

import contextlib

import pytest
import torch
from lanes import few
from sweeps import DEVICE, LOGS, NEEDS, every_sweep

from ngramloss import JointLoss, token_stats_from_hidden
from ngramloss.loss.stats import backends, chosen_backend, chunked, head

EVERYTHING = "ce(smoothing=0.1) + 0.5*ce(smoothing=0.1,temperature=2) + matches(1,2) + rewards(2) + precision(2) + bag(2):original + eisl(2) + soft(2) + dft + unlikelihood + eaft(alpha=2)"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that a short vocabulary has several, the last one ragged."""
    monkeypatch.setattr(head, "LEAN_BYTES", 1)


def example(B=2, T=6, V=300, D=16, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[:, 2] = labels[:, 0]
    labels[0, T - T // 3 :] = -100
    weight = size * torch.randn(V, D, generator=generator, dtype=torch.float64) / D**0.5
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    hidden += 3 * weight[labels.clamp_min(0)] / size
    return hidden.to(DEVICE, dtype), weight.to(DEVICE, dtype), labels.to(DEVICE)


def gradients(loss_fn, hidden, weight, labels, bias=None, **head_options):
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight, bias) if x is not None]
    loss = loss_fn.from_hidden(*inputs[:2], labels, bias=inputs[2] if bias is not None else None, **head_options)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@every_sweep
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.3}, {"softcap": 2.0}, {"bias": True}, {"bias": True, "softcap": 3.0, "scale": 2.0}],
    ids=str,
)
def test_statistics_and_gradients_equal_the_plain_ones(backend, memory, options):
    hidden, weight, labels = example()
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(1, 300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    plain = token_stats_from_hidden(hidden, weight, labels, needs=NEEDS, backend="plain", **options)
    other = token_stats_from_hidden(hidden, weight, labels, needs=NEEDS, backend=backend, memory=memory, **options)
    real = labels != -100
    assert torch.equal(plain.best_token[real], other.best_token[real])
    torch.testing.assert_close(other.lse[real], plain.lse[real])
    for name in ("best_logp", "label_logp", *NEEDS):
        torch.testing.assert_close(getattr(other, name), getattr(plain, name))
    expected = gradients(JointLoss(EVERYTHING, backend="plain"), hidden, weight, labels, **options)
    got = gradients(JointLoss(EVERYTHING, backend=backend, memory=memory), hidden, weight, labels, **options)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)  # sums in another order


@every_sweep
def test_low_rank_columns_are_columns_of_the_weight_and_only_what_is_trained_gets_a_product(
    backend, memory, monkeypatch
):
    hidden, weight, labels = example(D=12)
    whole = torch.cat([weight, torch.randn(300, 3, generator=torch.Generator().manual_seed(1)).to(weight)], -1)
    wide = torch.cat([hidden, hidden[..., :3] * 0.5], -1)  # [B, T, D + r]
    expected = gradients(JointLoss(EVERYTHING, backend="plain"), wide, whole, labels, scale=0.7)
    products = []
    real = head._weight_gradient
    monkeypatch.setattr(head, "_weight_gradient", lambda *given: products.append(given[1].shape[-1]) or real(*given))
    loss_fn = JointLoss(EVERYTHING, backend=backend, memory=memory)
    for trained in ({"hidden"}, {"hidden", "low_rank"}, {"weight", "low_rank"}, {"hidden", "weight"}):
        inputs = {"hidden": wide, "weight": whole[:, :12], "low_rank": whole[:, 12:]}
        inputs = {name: tensor.detach().clone().requires_grad_(name in trained) for name, tensor in inputs.items()}
        products.clear()
        options = {"low_rank": inputs["low_rank"], "scale": 0.7}
        loss = loss_fn.from_hidden(inputs["hidden"], inputs["weight"], labels, **options)
        loss.backward()
        torch.testing.assert_close(loss.detach(), expected[0], atol=2e-6, rtol=1e-4)  # sums in another order
        truth = {"hidden": expected[1], "weight": expected[2][:, :12], "low_rank": expected[2][:, 12:]}
        for name, tensor in inputs.items():
            if name in trained:
                torch.testing.assert_close(tensor.grad, truth[name], atol=2e-6, rtol=1e-4)
            else:
                assert tensor.grad is None
        assert set(products) == {width for name, width in (("weight", 12), ("low_rank", 3)) if name in trained}


def test_low_rank_columns_of_another_height_or_precision_are_refused():
    hidden, weight, labels = example()
    for low_rank in (torch.zeros(7, 4), torch.zeros(300, 4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"low_rank must be \[V, r\] with V = 300 and torch.float32"):
            token_stats_from_hidden(torch.zeros(2, 6, 20), weight, labels, low_rank=low_rank)
    with pytest.raises(ValueError, match=r"weight must be \[V, D\] with D = 12 as in hidden"):
        token_stats_from_hidden(hidden, weight, labels, low_rank=torch.zeros(300, 4))


@every_sweep
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize(
    "written",
    few(["ce(smoothing=0.1) + rewards(2)"], ["ce", "ce + matches(2)", "bag(2)", "ce(smoothing=0.1) + rewards(2)"]),
)
def test_no_further_from_the_truth_than_the_plain_sweep(backend, memory, dtype, written):
    hidden, weight, labels = example(B=4, T=12, V=517, D=32, dtype=dtype)
    truth = gradients(JointLoss(written, backend="plain"), hidden.double(), weight.double(), labels)
    plain = gradients(JointLoss(written, backend="plain"), hidden, weight, labels)
    other = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels)
    # Half a unit in the last place of the largest number, for a rounding that fell the other way.
    for got, reference, exact in zip(other, plain, truth, strict=True):
        tolerance = 0.5 * torch.finfo(dtype).eps * exact.abs().max() + 1e-6
        assert (got - exact).abs().max() <= (reference - exact).abs().max() + tolerance


@every_sweep
@pytest.mark.parametrize(
    ("B", "T", "V", "D"),
    [(1, 1, 1, 1), (1, 1, 5, 3), (2, 3, 127, 8), (1, 4, 129, 7), (1, 2, 2051, 4), (0, 3, 9, 4), (2, 0, 9, 4)],
)
def test_ragged_shapes(backend, memory, B, T, V, D):
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(B, T, D, generator=generator).to(DEVICE),
        torch.randn(V, D, generator=generator).to(DEVICE),
    )
    labels = torch.randint(0, V, (B, T), generator=generator).to(DEVICE)
    written = "ce + matches(2) + bag(1)"
    expected = gradients(JointLoss(written, backend="plain"), hidden, weight, labels)
    got = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@every_sweep
def test_input_that_is_not_contiguous(backend, memory):
    hidden, weight, labels = example()
    expected = gradients(JointLoss(EVERYTHING, backend="plain"), hidden, weight, labels)
    strange = (
        hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight.t().contiguous().t(),
        labels.t().contiguous().t(),
    )
    assert not any(x.is_contiguous() for x in strange)
    inputs = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in strange[:2]]
    loss = JointLoss(EVERYTHING, backend=backend, memory=memory).from_hidden(*inputs, strange[2])
    for one, two in zip([loss, *torch.autograd.grad(loss, inputs)], expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@every_sweep
def test_huge_logits_and_rows_of_padding(backend, memory):
    hidden, weight, labels = example(size=300.0)
    labels[1] = -100
    for written in ("ce + matches(2)", "bag(2)"):
        expected = gradients(JointLoss(written, backend="plain"), hidden, weight, labels)
        got = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels)
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-3)  # logits near 1e4 carry 1e-3 themselves
        assert not got[1][1].any()


@every_sweep
def test_ties_go_to_the_lowest_id_and_logp_stays_below_zero(backend, memory):
    hidden, weight = torch.ones(1, 3, 8, device=DEVICE), torch.zeros(400, 8, device=DEVICE)
    weight[[150, 160, 399]] = 1
    labels = torch.tensor([[1, 150, 399]], device=DEVICE)
    stats = token_stats_from_hidden(hidden, weight, labels, needs=NEEDS, backend=backend, memory=memory)
    assert stats.best_token.tolist() == [[150, 150, 150]]
    for dtype in (torch.bfloat16, torch.float16):
        hidden, weight, labels = example(dtype=dtype, size=20.0)
        stats = token_stats_from_hidden(hidden, weight, labels, needs=NEEDS, backend=backend, memory=memory)
        assert all((getattr(stats, name) <= 0).all() for name in ("best_logp", "label_logp", *LOGS))
        assert (stats.entropy >= 0).all()


@every_sweep
def test_a_vocabulary_that_begins_with_impossible_tokens(backend, memory):
    hidden, weight, labels = example()
    bias = torch.zeros(300, device=DEVICE)
    bias[:200] = -torch.inf
    labels = labels.clamp_min(200)
    needs = ("entropy",)
    expected = token_stats_from_hidden(hidden, weight, labels, bias=bias, needs=needs, backend="plain")
    got = token_stats_from_hidden(hidden, weight, labels, bias=bias, needs=needs, backend=backend, memory=memory)
    assert torch.equal(got.best_token, expected.best_token)
    torch.testing.assert_close(got.lse, expected.lse)
    alone = token_stats_from_hidden(hidden, weight[200:], labels - 200, needs=needs, backend="plain")
    torch.testing.assert_close(got.entropy, expected.entropy)
    torch.testing.assert_close(got.entropy, alone.entropy)


def exact_logits(V, dtype):
    """Hidden states that pick a column of the weight, so that products are exact, and its fp64 entropy, [1, 6]."""
    spread = torch.tensor([0.0, 0.1, 1.0, 10.0, 100.0, 1e4])
    columns = torch.randn(V, 6, generator=torch.Generator().manual_seed(6)) * spread + 50
    columns[:, 1] = columns[:, 1].sort().values  # the largest logit grows in every block
    columns[:, 2] = columns[:, 2].sort(descending=True).values
    weight = columns.to(DEVICE, dtype)  # [V, 6]
    logp = weight.double().log_softmax(0)
    return torch.eye(6, dtype=dtype, device=DEVICE).unsqueeze(0), weight, -(logp.exp() * logp).sum(0).unsqueeze(0)


@every_sweep
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("V", few([7, 2051], [1, 7, 300, 2051]))
def test_entropy_is_exact_however_flat_or_sharp(backend, memory, dtype, V):
    hidden, weight, exact = exact_logits(V, dtype)
    labels = torch.zeros(1, 6, dtype=torch.long, device=DEVICE)
    for name in (backend, "plain"):
        entropy = token_stats_from_hidden(
            hidden, weight, labels, needs=("entropy",), backend=name, memory=memory
        ).entropy
        torch.testing.assert_close(entropy, exact.float(), atol=1e-6, rtol=1e-6)


@every_sweep
@pytest.mark.parametrize("dtype", few([torch.bfloat16], [torch.float32, torch.bfloat16, torch.float16]))
def test_entropy_is_no_further_from_the_truth_than_the_plain_one(backend, memory, dtype):
    hidden, weight, labels = example(B=4, T=12, V=517, D=32, dtype=dtype)
    options = {"scale": 0.7, "softcap": 5.0, "needs": ("entropy",)}
    truth = token_stats_from_hidden(hidden.double(), weight.double(), labels, backend="plain", **options).entropy
    plain = token_stats_from_hidden(hidden, weight, labels, backend="plain", **options).entropy
    other = token_stats_from_hidden(hidden, weight, labels, backend=backend, memory=memory, **options).entropy
    tolerance = 0.5 * torch.finfo(dtype).eps * truth.max() + 1e-6
    assert (other - truth).abs().max() <= (plain - truth).abs().max() + tolerance


@every_sweep
def test_columns_that_only_pad_the_vocabulary_add_nothing_to_the_entropy(backend, memory, monkeypatch):
    def padded(part, dtype):
        return torch.nn.functional.pad(part.detach().to(dtype), (0, 0, 0, -len(part) % 128), value=1.0)

    monkeypatch.setattr(head, "_padded", padded)
    hidden, weight, exact = exact_logits(300, torch.float32)
    labels = torch.zeros(1, 6, dtype=torch.long, device=DEVICE)
    stats = token_stats_from_hidden(hidden, weight, labels, needs=("entropy",), backend=backend, memory=memory)
    torch.testing.assert_close(stats.entropy, exact.float(), atol=1e-6, rtol=1e-6)


@every_sweep
def test_entropy_has_no_gradient_and_is_computed_only_when_asked(backend, memory):
    hidden, weight, labels = example()
    hidden.requires_grad_()
    for name in (backend, "plain"):
        stats = token_stats_from_hidden(hidden, weight, labels, needs=("entropy",), backend=name, memory=memory)
        assert stats.label_logp.requires_grad
        assert not stats.entropy.requires_grad
        assert token_stats_from_hidden(hidden, weight, labels, backend=name, memory=memory).entropy is None


@every_sweep
def test_entropy_is_nan_where_a_logit_is_and_zero_where_no_label_counts(backend, memory):
    hidden, weight, labels = example()
    hidden[1, 3] = torch.inf  # becomes NaN in the product with a weight of either sign
    hidden[0, 5] = torch.inf  # padding
    for name in (backend, "plain"):
        entropy = token_stats_from_hidden(
            hidden, weight, labels, needs=("entropy",), backend=name, memory=memory
        ).entropy
        assert entropy.isnan().nonzero().tolist() == [[1, 3]]
        assert not entropy[labels == -100].any()
    weight[200, 3] = torch.nan
    entropy = token_stats_from_hidden(
        hidden, weight, labels, needs=("entropy",), backend=backend, memory=memory
    ).entropy
    assert torch.equal(entropy.isnan(), labels != -100)


@every_sweep
def test_nan_goes_through(backend, memory):
    hidden, weight, labels = example()
    loss_fn = JointLoss("matches(2)", backend=backend, memory=memory)
    weight[200, 3] = torch.nan
    assert loss_fn.from_hidden(hidden, weight, labels).isnan()


@every_sweep
def test_positions_that_do_not_count_have_no_gradient_whatever_reads_them(backend, memory):
    hidden, weight, labels = example()
    hidden.requires_grad_()
    stats = token_stats_from_hidden(hidden, weight, labels, needs=LOGS, backend=backend, memory=memory)
    (stats.lse + stats.best_logp + stats.label_logp + stats.mean_logp + stats.cross_logp.sum(-1)).sum().backward()
    assert hidden.grad.any(-1).tolist() == (labels != -100).tolist()


@every_sweep
def test_what_a_model_says_at_padding_reaches_nothing(backend, memory):
    hidden, weight, labels = example()
    hidden[labels == -100] = torch.inf if backend == "fused" else torch.nan  # the interpreter trips over NaN alone
    got = gradients(JointLoss(EVERYTHING, backend=backend, memory=memory), hidden, weight, labels)
    assert all(x.isfinite().all() for x in got[:2])


@every_sweep
def test_autocast_sets_the_precision_of_the_products(backend, memory):
    hidden, weight, labels = example()
    loss_fn = JointLoss("ce + matches(2)", backend=backend, memory=memory)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = gradients(loss_fn, hidden, weight, labels)
    expected = gradients(loss_fn, hidden.bfloat16(), weight.bfloat16(), labels)
    assert got[1].dtype == got[2].dtype == torch.float32
    for one, two in zip(got, expected, strict=True):  # a rounding of one logit may fall otherwise, so the scale decides
        torch.testing.assert_close(one, two.float(), atol=max(1e-6, 1e-3 * two.abs().max().item()), rtol=1e-2)


@every_sweep
def test_a_frozen_head_or_frozen_states_get_no_gradient(backend, memory):
    hidden, weight, labels = example()
    loss_fn = JointLoss("ce + matches(2)", backend=backend, memory=memory)
    full = gradients(loss_fn, hidden, weight, labels)
    for index, (h, w) in enumerate(
        [(hidden.clone().requires_grad_(), weight), (hidden, weight.clone().requires_grad_())]
    ):
        loss_fn.from_hidden(h, w, labels).backward()
        torch.testing.assert_close((h.grad, w.grad)[index], full[1 + index])


@every_sweep
def test_fp64_stays_fp64(backend, memory):
    if backend == "fused":
        with pytest.raises(
            ValueError, match=r"backend='fused' cannot run here: the kernels support fp32, bf16 and fp16"
        ):
            chosen_backend(torch.device(DEVICE), torch.float64, backend)
        return
    hidden, weight, labels = example(dtype=torch.float64)
    for context in (contextlib.nullcontext(), torch.autocast(DEVICE, torch.bfloat16)):
        with context:
            expected = gradients(JointLoss(EVERYTHING, backend="plain"), hidden, weight, labels, scale=0.5)
            got = gradients(JointLoss(EVERYTHING, backend=backend, memory=memory), hidden, weight, labels, scale=0.5)
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-10)


@every_sweep
def test_a_bias_finer_than_the_model_is_not_rounded(backend, memory):
    hidden, weight, labels = example(dtype=torch.bfloat16)
    bias = torch.full((300,), 1.0 + 2**-12, device=DEVICE)
    without = token_stats_from_hidden(hidden, weight, labels, backend=backend, memory=memory)
    stats = token_stats_from_hidden(hidden, weight, labels, bias=bias, backend=backend, memory=memory)
    real = labels != -100
    torch.testing.assert_close(stats.lse[real], without.lse[real] + 1.0 + 2**-12, atol=2e-6, rtol=0)


@every_sweep
def test_backward_inside_autocast_changes_nothing(backend, memory):
    hidden, weight, labels = example()
    loss_fn = JointLoss("ce", backend=backend, memory=memory)
    expected = gradients(loss_fn, hidden, weight, labels)
    h = hidden.clone().requires_grad_()
    loss = loss_fn.from_hidden(h, weight, labels)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss.backward()
    assert torch.equal(h.grad, expected[1])


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_slices_of_any_number_of_rows(rows, monkeypatch):
    monkeypatch.setattr(chunked, "SLICE_NUMBERS", {"cpu": 300 * rows, "cuda": 300 * rows})
    hidden, weight, labels = example()
    expected = gradients(JointLoss(EVERYTHING, backend="plain"), hidden, weight, labels)
    got = gradients(JointLoss(EVERYTHING, backend="chunked"), hidden, weight, labels)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_the_whole_vocabulary_is_held_only_where_a_fast_step_needs_it(mode, memory, monkeypatch):
    widths = []
    absorb = chunked.absorb
    monkeypatch.setattr(chunked, "absorb", lambda block, *rest: (widths.append(block.width), absorb(block, *rest)))
    hidden, weight, labels = example()
    with mode():
        JointLoss("ce", backend="chunked", memory=memory).from_hidden(hidden, weight.requires_grad_(), labels)
    assert widths == ([300] if mode is torch.enable_grad and memory == "fast" else [128, 128, 44])


@every_sweep
def test_a_gradient_of_the_gradient_is_refused(backend, memory):
    hidden, weight, labels = example()
    hidden.requires_grad_()
    loss = JointLoss("ce", backend=backend, memory=memory).from_hidden(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        gradient.square().sum().backward()


def test_a_vocabulary_over_several_programs_with_bias_and_softcap():
    hidden, weight, labels = example(B=1, T=3, V=2500, D=8)
    options = {"bias": torch.randn(2500, generator=torch.Generator().manual_seed(1)).to(DEVICE), "softcap": 4.0}
    expected = gradients(JointLoss(EVERYTHING, backend="plain"), hidden, weight, labels, **options)
    got = gradients(JointLoss(EVERYTHING, backend="fused"), hidden, weight, labels, **options)
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


def test_a_second_backward_is_refused_where_the_logits_are_gone():
    hidden, weight, labels = example()
    hidden.requires_grad_()
    loss = JointLoss("ce", backend="chunked").from_hidden(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r'cannot run backward twice .* overwrote the logits .* memory="lean" or backend="plain"'
    ):
        loss.backward()
    lean = JointLoss("ce", backend="chunked", memory="lean").from_hidden(hidden, weight, labels)
    once, twice = (torch.autograd.grad(lean, hidden, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)


def test_the_choice_and_its_reason(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert chosen_backend(cuda, torch.bfloat16).backend == "fused"
    assert chosen_backend(cuda, torch.float64) == (
        "chunked",
        "the kernels support fp32, bf16 and fp16, not torch.float64: PyTorch in slices",
    )
    assert chosen_backend(cpu, torch.float32, "plain") == ("plain", "requested by name")
    assert chosen_backend(cpu, torch.float32) == ("chunked", "a cpu has no Triton: PyTorch in slices")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"backend='fused' cannot run here: a cpu has no Triton\. Use backend='auto'"):
        chosen_backend(cpu, torch.float32, "fused")
    monkeypatch.setattr(backends, "triton_is_installed", lambda: False)
    assert chosen_backend(cuda, torch.bfloat16) == (
        "chunked",
        "Triton is not installed (pip install 'ngramloss[kernels]'): PyTorch in slices",
    )
    with pytest.raises(ValueError, match=r"backend must be auto or one of plain, chunked, fused, got 'triton'"):
        chosen_backend(cpu, torch.float32, "triton")
    with pytest.raises(ValueError, match=r"memory must be one of fast, lean, got 'low'"):
        JointLoss("ce", memory="low").from_hidden(torch.zeros(1, 1, 2), torch.zeros(3, 2), torch.zeros(1, 1).long())
