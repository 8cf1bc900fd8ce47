"""A model beside its teacher: the divergence in both directions, and the terms that read it."""

import oracle
import pytest
import torch
from cases import batches
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import DEVICE, NEEDS, every_sweep

from ngramloss import JointLoss, Teacher, UserError, token_stats, token_stats_from_hidden
from ngramloss.loss.explaining.explain import explain
from ngramloss.loss.stats import head, labelled

CASES = {
    "distill": (oracle.distill, {}),
    "distill(temperature=0.5)": (oracle.distill, {"temperature": 0.5}),
    "distill(temperature=3)": (oracle.distill, {"temperature": 3.0}),
    "keep": (oracle.distill, {}),
    "keep:reverse": (oracle.keep_reverse, {}),
}
each = pytest.mark.parametrize("written", CASES)
BOTH = ("teacher_kl", "teacher_reverse_kl")
FUSED = pytest.param("fused", marks=[pytest.mark.slow] * (DEVICE == "cpu"))
HEADS = [{}, {"softcap": 2.0}, {"bias": True, "softcap": 3.0, "scale": 2.0}]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks so small that a short vocabulary has several, the last one ragged."""
    monkeypatch.setattr(head, "LEAN_BYTES", 1)


@each
@given(batch=batches(longest=5, rows=2), apart=st.sampled_from([0.0, 0.1, 2.0, 30.0]), seed=st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_value_and_gradient_are_the_oracles(written, batch, apart, seed):
    logits, labels = batch[0].requires_grad_(), batch[1]
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    other = (logits.detach() + apart * noise).requires_grad_()
    function, options = CASES[written]
    value = JointLoss(written, reduction="none")(logits, labels, teacher=other, num_tokens=1)
    p, q = logits.softmax(-1), other.detach().softmax(-1)
    rows = [function(p[b], q[b], labels[b].tolist(), **options).reshape(()) for b in range(len(labels))]
    truth = torch.stack(rows)
    torch.testing.assert_close(value, truth, atol=1e-9, rtol=1e-7)
    pull = torch.linspace(0.5, 2.0, len(labels), dtype=torch.float64)
    by_value, by_teacher = torch.autograd.grad(value, (logits, other), pull, allow_unused=True)
    assert by_teacher is None
    torch.testing.assert_close(by_value, torch.autograd.grad(truth, logits, pull)[0], atol=1e-9, rtol=1e-7)


@each
@pytest.mark.parametrize("backend", ["plain", "chunked"])
def test_gradcheck(written, backend):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, *teacher = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in [(2, 4, 3), (5, 3), (2, 4, 2), (5, 2)]
    )
    labels = torch.tensor([[0, 1, 2, 0], [2, 2, -100, -100]])
    loss_fn = JointLoss(f"ce + {written}", backend=backend, memory="lean")
    given = Teacher(hidden=teacher[0], weight=teacher[1], softcap=2.0)

    def loss(hidden, weight):
        return loss_fn.from_hidden(hidden, weight, labels, softcap=3.0, teacher=given)

    assert torch.autograd.gradcheck(loss, (hidden.requires_grad_(), weight.requires_grad_()))


def example(B=2, T=4, V=300, D=16, other=24, dtype=torch.float32):
    """A model's hidden states, weight and labels, and a teacher of another width."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, V, (B, T), generator=generator)
    labels[0, T - max(T // 3, 1) :] = -100
    shapes = [(B, T, D), (V, D), (B, T, other), (V, other)]
    made = [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]
    hidden, weight, *teacher = (x.to(DEVICE, dtype) / (x.shape[-1] ** 0.5 if x.ndim == 2 else 1) for x in made)
    return hidden, weight, labels.to(DEVICE), Teacher(hidden=teacher[0], weight=teacher[1])


def gradients(loss_fn, hidden, weight, labels, **options):
    inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
    loss = loss_fn.from_hidden(*inputs, labels, **options)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@every_sweep
@pytest.mark.parametrize("options", HEADS, ids=str)
@pytest.mark.parametrize("written", ["distill(temperature=2)", "keep + 0.5*keep:reverse"])
def test_sweeps_give_the_plain_statistics_and_gradients(backend, memory, options, written):
    hidden, weight, labels, teacher = example()
    options = dict(options)
    if options.pop("bias", False):
        options["bias"] = torch.randn(300, generator=torch.Generator().manual_seed(4)).to(DEVICE)
        teacher = teacher._replace(bias=options["bias"].flip(0))
    teacher = teacher._replace(**{name: value for name, value in options.items() if name != "bias"})
    logits = token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend="plain", teacher=teacher, **options)
    for other in (teacher, Teacher(teachers_logits(teacher))):
        all_of = f"ce(smoothing=0.1) + bag(2) + eaft + {written}"
        stats = token_stats_from_hidden(
            hidden, weight, labels, needs=(*NEEDS, *BOTH), backend=backend, memory=memory, teacher=other, **options
        )
        for name in BOTH:
            torch.testing.assert_close(getattr(stats, name), getattr(logits, name))
            assert not getattr(stats, name)[labels == -100].any()
        before = other.logits.clone() if other.logits is not None else None
        truth = gradients(JointLoss(all_of, backend="plain"), hidden, weight, labels, teacher=other, **options)
        got = gradients(
            JointLoss(all_of, backend=backend, memory=memory), hidden, weight, labels, teacher=other, **options
        )
        for one, two in zip(got, truth, strict=True):
            torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)  # sums in another order
        assert before is None or torch.equal(before, other.logits)


def teachers_logits(teacher):
    logits = teacher.scale * teacher.hidden @ teacher.weight.t()
    logits = logits if teacher.bias is None else logits + teacher.bias
    return logits if teacher.softcap is None else (logits / teacher.softcap).tanh() * teacher.softcap


@every_sweep
def test_twins_and_a_teacher_beside_each_other(backend, memory):
    hidden, weight, labels, teacher = example(B=4)
    labels = labels[0::2].repeat_interleave(2, 0)
    written = "ce + rdrop + rewards(2):twin + distill"
    truth = gradients(JointLoss(written, backend="plain"), hidden, weight, labels, teacher=teacher)
    got = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels, teacher=teacher)
    for one, two in zip(got, truth, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


def test_only_labelled_positions_go_through_both_heads(monkeypatch):
    hidden, weight, labels, teacher = example(T=64)
    labels[:, :-4] = -100
    positions, packed = labelled(labels)
    seen, blocks = [], head._blocks
    monkeypatch.setattr(head, "_blocks", lambda rows, *rest: seen.append(len(rows)) or blocks(rows, *rest))
    loss_fn = JointLoss("ce + distill", backend="chunked")
    got = gradients(loss_fn, hidden, weight, labels, teacher=teacher, positions=positions, segments=packed)
    assert seen == [len(positions)] * 2
    assert len(positions) < labels.numel()
    for one, two in zip(got, gradients(loss_fn, hidden, weight, labels, teacher=teacher), strict=True):
        torch.testing.assert_close(one, two)


def close_pairs(V, dtype):
    """Logits of a model and of its teacher that nearly agree; both as heads whose products are exact."""
    generator = torch.Generator().manual_seed(5)
    base, noise = (torch.randn(V, generator=generator, dtype=torch.float64) for _ in range(2))
    sure, late = base.clone(), base.clone()
    sure[V // 2] += 22  # certain, so that the difference of the other tokens hardly counts
    late[-1] += 18  # the largest logit comes last
    pairs = [
        (3 * base, 3 * base + 2e-3 * noise),
        (3 * base, 3 * base + 2e-3 * noise + 4),
        (2 * base + 60, 2 * base + 60 + 3e-3 * noise),
        (sure, sure + 0.3 * noise),
        (late, late + 0.05 * noise - 2),
        (base.sort().values * 4, base.sort().values * 4 + 0.01 * noise),
        (base, 4 * noise),
        (base, base.clone()),
    ]
    own, other = (torch.stack(rows).to(DEVICE, dtype) for rows in zip(*pairs, strict=True))  # [P, V] each
    p, q = own.double().log_softmax(-1), other.double().log_softmax(-1)
    truth = torch.stack([(q.exp() * (q - p)).sum(-1), (p.exp() * (p - q)).sum(-1)])  # [2, P]
    hidden = torch.eye(len(own), dtype=dtype, device=DEVICE).unsqueeze(1)  # [P, 1, P]
    return hidden, own.t().contiguous(), Teacher(hidden=hidden, weight=other.t().contiguous()), truth


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", ["plain", "chunked", FUSED])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_small_divergences_are_exact(backend, memory, dtype, monkeypatch):
    monkeypatch.setattr(head, "LEAN_BYTES", 2**18)
    hidden, weight, teacher, truth = close_pairs(50_265, dtype)
    labels = torch.zeros(len(hidden), 1, dtype=torch.long, device=DEVICE)
    stats = token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend=backend, memory=memory, teacher=teacher)
    found = torch.stack([getattr(stats, name).flatten() for name in BOTH]).double()
    assert (found >= 0).all()
    counts = truth >= 1e-6
    assert counts.sum() >= 10
    assert ((found - truth).abs() / truth)[counts].max() <= 5e-3
    assert (found - truth).abs()[~counts].max() <= 5e-9


@every_sweep
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hardly_further_from_the_truth_than_the_plain_sweep(backend, memory, dtype):
    hidden, weight, labels, teacher = example(T=8, V=517, D=32, dtype=dtype)
    exact = Teacher(hidden=teacher.hidden.double(), weight=teacher.weight.double())
    written = "ce + distill(temperature=2)"
    truth = gradients(JointLoss(written, backend="plain"), hidden.double(), weight.double(), labels, teacher=exact)
    plain = gradients(JointLoss(written, backend="plain"), hidden, weight, labels, teacher=teacher)
    other = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels, teacher=teacher)
    for got, reference, right in zip(other, plain, truth, strict=True):
        tolerance = torch.finfo(dtype).eps / 2 * right.abs().max() + 1e-6
        assert (got - right).abs().max() <= (reference - right).abs().max() + tolerance


@every_sweep
def test_a_teacher_that_agrees_has_neither_divergence_nor_gradient(backend, memory):
    hidden, weight, labels, _ = example()
    same = Teacher(hidden=hidden.clone(), weight=weight.clone())
    for name in (backend, "plain"):
        loss_fn = JointLoss("keep + keep:reverse", backend=name, memory=memory)
        loss, *slopes = gradients(loss_fn, hidden, weight, labels, teacher=same)
        assert loss == 0
        assert all(slope.abs().max() < 1e-6 for slope in slopes)


def excluding():
    """The example with labels from 200 on, and a bias that excludes all tokens before."""
    hidden, weight, labels, teacher = example()
    bias = torch.zeros(300, device=DEVICE)
    bias[:200] = -torch.inf
    return hidden, weight, labels.where(labels == -100, labels.clamp_min(200)), teacher, bias


@every_sweep
def test_tokens_that_both_exclude_add_nothing_and_nan_is_never_hidden(backend, memory):
    hidden, weight, labels, teacher, bias = excluding()
    alone = token_stats_from_hidden(
        hidden, weight[200:], labels.where(labels == -100, labels - 200), needs=BOTH, backend="plain",
        teacher=teacher._replace(weight=teacher.weight[200:]),
    )  # fmt: skip
    options = {"bias": bias, "teacher": teacher._replace(bias=bias)}
    for name in (backend, "plain"):
        got = token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend=name, memory=memory, **options)
        for statistic in BOTH:
            torch.testing.assert_close(getattr(got, statistic), getattr(alone, statistic))
        slopes = gradients(JointLoss("ce + keep", backend=name, memory=memory), hidden, weight, labels, **options)
        assert all(x.isfinite().all() for x in slopes)
    broken = teacher._replace(hidden=teacher.hidden.clone())
    broken.hidden[1, 3] = torch.nan
    for name in (backend, "plain"):
        got = token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend=name, memory=memory, teacher=broken)
        assert all(getattr(got, statistic).isnan().nonzero().tolist() == [[1, 3]] for statistic in BOTH)


@every_sweep
@pytest.mark.parametrize(("options", "temperature"), [(HEADS[0], 0.5), (HEADS[1], 3.0)], ids=str)
def test_both_directions_beside_other_terms_at_any_temperature(backend, memory, options, temperature):
    hidden, weight, labels, teacher = example(B=4, V=1_300)
    labels = labels[1:2].expand(4, 4).contiguous()  # of twins, too
    teacher = teacher._replace(temperature=temperature)
    slopes = [torch.rand(4, 4, generator=torch.Generator().manual_seed(i)).to(DEVICE) for i in range(4)]

    def found(backend, needs):
        inputs = [x.detach().clone().requires_grad_() for x in (hidden, weight)]
        stats = token_stats_from_hidden(
            *inputs, labels, needs=needs, backend=backend, memory=memory, teacher=teacher, **options
        )
        chosen = [getattr(stats, name) for name in ("label_logp", *needs)]
        flat = [x.sum(-1) if x.ndim == 3 else x for x in chosen]
        loss = sum((x * slope).sum() for x, slope in zip(flat, slopes, strict=False))
        return [*(x.detach() for x in flat), *torch.autograd.grad(loss, inputs)]

    for needs in (BOTH[:1], BOTH[1:], (*BOTH, "cross_logp"), (*BOTH, "twin_kl")):
        for got, truth in zip(found(backend, needs), found("plain", needs), strict=True):
            torch.testing.assert_close(got, truth, atol=2e-5, rtol=1e-4)


@every_sweep
def test_an_objective_of_both_directions_and_ngrams(backend, memory):
    hidden, weight, labels, teacher = example(T=7)
    written = "ce + matches(2,3,4) + keep + 0.5*keep:reverse"
    truth = gradients(JointLoss(written, backend="plain"), hidden, weight, labels, teacher=teacher)
    got = gradients(JointLoss(written, backend=backend, memory=memory), hidden, weight, labels, teacher=teacher)
    for one, two in zip(got, truth, strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@every_sweep
def test_a_token_that_one_of_both_excludes(backend, memory):
    hidden, weight, labels, teacher, bias = excluding()
    finite = {"teacher_kl": {"teacher": teacher._replace(bias=bias)}, "teacher_reverse_kl": {"bias": bias}}
    for name, options in finite.items():
        options = {"teacher": teacher, **options}
        got, truth = (
            token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend=which, memory=memory, **options)
            for which in (backend, "plain")
        )
        torch.testing.assert_close(getattr(got, name), getattr(truth, name))
        (infinite,) = set(BOTH) - {name}
        assert (getattr(got, infinite)[labels != -100] > 1e20).all()
        assert getattr(got, infinite).isfinite().all()
        term = {"teacher_kl": "keep", "teacher_reverse_kl": "keep:reverse"}[name]
        slopes = [
            gradients(JointLoss(f"ce + {term}", backend=which, memory=memory), hidden, weight, labels, **options)
            for which in (backend, "plain")
        ]
        for one, two in zip(*slopes, strict=True):
            torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("backend", ["plain", FUSED])
@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_two_rows_of_which_one_excludes_all_tokens_are_not_compared(backend, memory):
    hidden, weight, labels, teacher = example()
    bias = torch.full((300,), -torch.inf, device=DEVICE)
    for options in ({"teacher": teacher._replace(bias=bias)}, {"teacher": teacher, "bias": bias}):
        got = token_stats_from_hidden(hidden, weight, labels, needs=BOTH, backend=backend, memory=memory, **options)
        assert all(torch.equal(getattr(got, name).isnan(), labels != -100) for name in BOTH)


@every_sweep
def test_positions_that_do_not_count_are_not_read(backend, memory):
    hidden, weight, labels, teacher = example()
    broken = teacher._replace(hidden=teacher.hidden.masked_fill((labels == -100).unsqueeze(-1), torch.nan))
    loss_fn = JointLoss("ce + bag(2) + keep + keep:reverse", backend=backend, memory=memory)
    truth = gradients(loss_fn, hidden, weight, labels, teacher=teacher)
    for one, two in zip(gradients(loss_fn, hidden, weight, labels, teacher=broken), truth, strict=True):
        assert torch.equal(one, two)


@every_sweep
def test_logits_of_a_teacher_in_any_order_of_memory_and_precision(backend, memory):
    hidden, weight, labels, teacher = example()
    logits = teachers_logits(teacher)
    loss_fn = JointLoss("ce + bag(2) + distill(temperature=2)", backend=backend, memory=memory)
    truth = gradients(loss_fn, hidden, weight, labels, teacher=logits)
    wide = torch.zeros(*logits.shape[:2], 333, device=DEVICE)
    wide[..., :300] = logits
    for other in (logits.permute(2, 0, 1).contiguous().permute(1, 2, 0), wide[..., :300], logits.double()):
        for one, two in zip(gradients(loss_fn, hidden, weight, labels, teacher=other), truth, strict=True):
            torch.testing.assert_close(one, two)


@every_sweep
def test_a_teacher_in_another_precision(backend, memory):
    hidden, weight, labels, teacher = example()
    low = teacher._replace(hidden=teacher.hidden.bfloat16(), weight=teacher.weight.bfloat16())
    bias = torch.linspace(-1, 1, 300, device=DEVICE, dtype=torch.float64)
    high = Teacher(hidden=teacher.hidden.double(), weight=teacher.weight.double(), bias=bias, softcap=4.0)
    for other in (low, high):
        got, truth = (
            gradients(JointLoss("ce + distill", backend=name, memory=memory), hidden, weight, labels, teacher=other)
            for name in (backend, "plain")
        )
        for one, two in zip(got, truth, strict=True):
            torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-4)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = [
            JointLoss("distill", backend=name, memory=memory).from_hidden(hidden, weight, labels, teacher=teacher)
            for name in (backend, "plain")
        ]
    torch.testing.assert_close(*loss)


@every_sweep
def test_low_rank_columns_of_a_teacher_are_columns_of_its_weight(backend, memory):
    hidden, weight, labels, teacher = example()
    parts = teacher._replace(weight=teacher.weight[:, :20], low_rank=teacher.weight[:, 20:])
    loss_fn = JointLoss("ce + distill", backend=backend, memory=memory)
    got, truth = (gradients(loss_fn, hidden, weight, labels, teacher=given) for given in (parts, teacher))
    torch.testing.assert_close(got, truth)


def test_micro_batches_add_up_to_the_step():
    hidden, weight, labels, teacher = example(B=3)
    logits, other = hidden @ weight.t(), teacher.hidden @ teacher.weight.t()
    loss_fn, counts = JointLoss("ce + distill"), {"num_tokens": (labels != -100).sum()}
    pieces = [loss_fn(logits[i : i + 1], labels[i : i + 1], teacher=other[i : i + 1], **counts) for i in range(3)]
    torch.testing.assert_close(sum(pieces), loss_fn(logits, labels, teacher=other))


def test_asft_is_dft_beside_keep():
    """Zhu et al. (2025): DFT and a tenth of KL(start‖model), as their published code computes it."""
    torch.manual_seed(0)
    logits, start = torch.randn(2, 5, 30).requires_grad_(), torch.randn(2, 5, 30)
    labels = torch.tensor([[1, 2, 3, -100, -100], [4, 5, 6, 7, 8]])
    JointLoss("dft + 0.1*keep")(logits, labels, teacher=start).backward()
    ours, logits.grad = logits.grad, None
    real = labels != -100
    logp = logits.log_softmax(-1)[real]
    label = logp.gather(-1, labels[real].unsqueeze(-1)).squeeze(-1)
    q = start[real].softmax(-1)
    ((-label.exp().detach() * label).mean() + 0.1 * (q * (q.log() - logp)).sum(-1).mean()).backward()
    torch.testing.assert_close(ours, logits.grad)


@pytest.mark.parametrize(
    ("teacher", "error"),
    [
        (None, "distill needs a teacher: set train.teacher"),
        (torch.zeros(2, 4, 299), "vocabulary has 299 ids and the model's 300, .* tokenizer"),
        (torch.zeros(2, 3, 300), r"logits must be .* \[2, 4\] as the labels, got .* \[2, 3, 300\]"),
        (Teacher(hidden=torch.zeros(2, 4, 8)), "its logits, .* or its hidden states and the head's weight"),
        (Teacher(torch.zeros(2, 4, 300), torch.zeros(2, 4, 8), torch.zeros(300, 8)), "Give one of the two, complete"),
        (Teacher(hidden=torch.zeros(2, 4, 8), weight=torch.zeros(300, 7)), "must be .* D' = 8 as in its hidden"),
        ("model", r"teacher must be logits .* or ngramloss.Teacher\(...\), got str"),
    ],
)
def test_a_teacher_that_does_not_fit_is_refused(teacher, error):
    loss_fn, labels = JointLoss("ce + distill"), torch.zeros(2, 4, dtype=torch.long)
    with pytest.raises((UserError, ValueError, TypeError), match=error):
        loss_fn(torch.zeros(2, 4, 300), labels, teacher=teacher)
    with pytest.raises((UserError, ValueError, TypeError), match=error):
        loss_fn.from_hidden(torch.zeros(2, 4, 5), torch.zeros(300, 5), labels, teacher=teacher)


def test_objectives_that_no_teacher_serves_are_refused():
    with pytest.raises(UserError, match=r"would need two teachers, .* Write distill or keep"):
        JointLoss("ce + distill + keep")
    with pytest.raises(UserError, match="several temperatures, but the teacher is compared at one"):
        JointLoss("distill + distill(temperature=2)")
    with pytest.raises(UserError, match=r"distill\(temperature\)"):
        JointLoss("distill(temperature=0)")
    logits, labels = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(UserError, match="no term of 'ce' uses it: add distill or keep"):
        JointLoss("ce")(logits, labels, teacher=logits)
    with pytest.raises(UserError, match="keep compares all probabilities of a model with a teacher's"):
        explain("a b", "a b", "ce + keep", [0.5])
    rest = JointLoss("ce + keep").without("teacher")
    assert str(rest) == "ce"
    assert JointLoss("ce + keep").diagnose(logits, labels).keys() == {"gradient/ce"}
    assert token_stats(logits, labels).teacher_kl is None
