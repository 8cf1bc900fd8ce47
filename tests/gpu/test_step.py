"""What only a GPU can show: replayed graphs, no waiting for the device, the same bits twice."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from cases import FROM_HIDDEN

from ngramloss import JointLoss
from ngramloss.loss.kernels import replay

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OBJECTIVE = "ce + matches(2,3,4) + rewards(2) + precision(2) + bag(2)"


def example(seed, B=4, T=40, V=1001, D=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 50, (B, T), generator=generator)
    labels[0, 20:], labels[1, 5:9] = -100, -100
    weight = torch.randn(V, D, generator=generator)
    hidden = torch.randn(B, T, D, generator=generator) + weight[labels.clamp_min(0)] / 4
    return (hidden.cuda().to(dtype).requires_grad_(), (weight / 8).cuda().to(dtype).requires_grad_(), labels.cuda())


def step(loss_fn, hidden, weight, labels, **counts):
    loss = loss_fn.from_hidden(hidden, weight, labels, **counts)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


@pytest.mark.parametrize("case", FROM_HIDDEN, ids=repr)
def test_replayed_graphs_give_the_loss_that_is_computed_step_by_step(case):
    replayed, checked = JointLoss([case.term]), JointLoss([case.term], check=True)  # check never replays
    for seed in range(5):
        hidden, weight, labels = example(seed, dtype=torch.float32)
        for counts in ({}, {"num_tokens": 100, "num_sequences": torch.tensor(7)}):
            got, expected = (step(fn, hidden, weight, labels, **counts) for fn in (replayed, checked))
            for one, two in zip(got, expected, strict=True):
                torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


def test_results_of_a_replay_survive_the_next_one():
    loss_fn = JointLoss(OBJECTIVE)
    batches = [example(seed) for seed in range(6)]
    alone = [step(loss_fn, *batch) for batch in batches]
    losses = [loss_fn.from_hidden_with_parts(*batch) for batch in batches]
    for (loss, parts), batch, expected in zip(losses, batches, alone, strict=True):
        torch.testing.assert_close(loss.detach(), expected[0])
        torch.testing.assert_close(sum(parts.values()), expected[0])
        torch.testing.assert_close(torch.autograd.grad(loss, batch[0])[0], expected[1])


def test_a_loss_is_replayed_after_all_others_are_gone_and_something_of_their_memory_is_not():
    """PyTorch does not give memory back of which a tensor is alive, and refuses it to new graphs."""
    batch, alive = example(0), []
    for _ in range(3):
        loss_fn = JointLoss(OBJECTIVE)
        expected = step(JointLoss(OBJECTIVE, check=True), *batch)
        for _ in range(4):
            got = step(loss_fn, *batch)
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, atol=1e-3, rtol=1e-2)
        (replayed,) = replay._programs[loss_fn].graphs.values()
        alive.append([cell.cell_contents for cell in replayed.__closure__ if isinstance(cell.cell_contents, list)])
        del loss_fn, replayed
        gc.collect()


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_no_step_waits_for_the_device(memory):
    loss_fn, (hidden, weight, labels) = JointLoss(OBJECTIVE, memory=memory), example(0)
    for _ in range(4):
        step(loss_fn, hidden, weight, labels)
    on_device = torch.tensor(9).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for counts in (
            {},
            {"num_tokens": 100, "num_sequences": 4},
            {"num_tokens": torch.tensor(9)},
            {"num_tokens": on_device},
        ):
            step(loss_fn, hidden, weight, labels, **counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("memory", ["fast", "lean"])
def test_a_step_gives_the_same_bits_twice(memory):
    loss_fn, batch = JointLoss(OBJECTIVE, memory=memory), example(1)
    first = step(loss_fn, *batch)
    for _ in range(5):
        assert all(torch.equal(one, two) for one, two in zip(step(loss_fn, *batch), first, strict=True))


def test_threads_that_share_a_loss_get_its_right_value_and_gradient():
    loss_fn, batches = JointLoss(OBJECTIVE), [example(seed, T=30 + seed % 2) for seed in range(6)]
    expected = [step(JointLoss(OBJECTIVE, check=True), *batch) for batch in batches]  # check never replays
    wrong = []

    def work(number, own_stream):
        try:
            with torch.cuda.stream(torch.cuda.Stream() if own_stream else torch.cuda.current_stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for turn in range(60):
                    place = (number + turn) % len(batches)
                    for got, true in zip(step(loss_fn, *batches[place]), expected[place], strict=True):
                        if not torch.allclose(got, true, atol=1e-3, rtol=2e-2):  # bf16
                            wrong.append((number, turn))
        except Exception as error:
            wrong.append((number, repr(error)))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(number, number >= 2)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_check_names_a_bad_label_at_the_price_of_waiting():
    hidden, weight, labels = torch.zeros(1, 2, 8).cuda(), torch.zeros(50, 8).cuda(), torch.tensor([[1, 999]]).cuda()
    with pytest.raises(ValueError, match="got 999 at row 0, position 1"):
        JointLoss("ce", check=True).from_hidden(hidden, weight, labels)
    with pytest.raises(ValueError, match="got 999 at row 0, position 1"):
        JointLoss("ce", check=True)(torch.zeros(1, 2, 50).cuda(), labels)


def test_evaluation_in_inference_mode_then_training():
    loss_fn, batch = JointLoss(OBJECTIVE), example(2)
    with torch.inference_mode():
        evaluated = [loss_fn.from_hidden(*batch) for _ in range(4)][-1].item()
    assert step(loss_fn, *batch)[0].item() == pytest.approx(evaluated, rel=1e-5)


def test_a_label_out_of_range_is_refused_on_the_device():
    program = (
        "import torch, ngramloss as ng\n"
        "labels = torch.tensor([[1, 999]]).cuda()\n"
        "ng.JointLoss('ce').from_hidden(torch.zeros(1, 2, 8).cuda(), torch.zeros(50, 8).cuda(), labels)\n"
        "torch.cuda.synchronize(); print('went through')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "went through" not in done.stdout
    assert "labels must be -100 or an id" in done.stdout + done.stderr


def test_a_negative_count_is_refused_on_the_device():
    program = (
        "import torch, ngramloss as ng\n"
        "labels, count = torch.tensor([[1, 9]]).cuda(), torch.tensor(-2).cuda()\n"
        "ng.JointLoss('ce').from_hidden(torch.zeros(1, 2, 8).cuda(), torch.zeros(50, 8).cuda(), labels, num_tokens=count)\n"
        "torch.cuda.synchronize(); print('went through')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "went through" not in done.stdout
    assert "num_tokens must be a count of 0 or more" in done.stdout + done.stderr


@pytest.mark.parametrize("written", ["matches(41)", "rewards(1024)", "precision(1024)", "matches(20)"])
def test_n_beyond_the_kernels_is_computed_by_the_formula(written):
    hidden, weight, labels = example(3, dtype=torch.float32)
    replayed, checked = JointLoss(f"ce + {written}"), JointLoss(f"ce + {written}", check=True)
    for _ in range(4):
        got, expected = (step(fn, hidden, weight, labels) for fn in (replayed, checked))
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)
