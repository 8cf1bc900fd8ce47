"""attach in other people's trainers: who trains in turn, what is measured, and the command."""

import json
from argparse import Namespace

import pytest
from benchmarks import medians

from ngramloss.cli import main
from ngramloss_bench import attach, trainings

TINY = ["bench", "attach", "--device", "cpu", "--batch-size", "2", "--source", "12", "--target", "6"]
TINY += ["--warm-up", "1", "--steps", "2", "--repeats", "2", "--workers", "0", "--objectives", "ce + matches(2)"]


def test_trainings_alternate_and_one_that_fails_is_not_repeated(monkeypatch):
    trained = []

    def loop(options, tokens, output, window, *, objective, liger):
        trained.append((objective, liger))
        if objective == "ce":
            raise RuntimeError("out of memory")
        for number in range(1, window.last_step + 1):
            window.after(number)

    monkeypatch.setattr(trainings, "loop", loop)
    options = Namespace(device="cpu", repeats=3, warm_up=1, steps=2, batch_size=4, plugin=[])
    options.objectives = ["ce", "ce + matches(2)"]
    names = [attach.STOCK, "a", "b", attach.LIGER]
    measured = attach.alternated(options, names, "rows", "loop")
    others = [("", False), ("ce + matches(2)", False), ("", True)]
    assert trained == [others[0], ("ce", False), *others[1:], *others, *others]
    assert {name: why_not for name, (_, why_not) in measured.items() if why_not} == {"a": "RuntimeError: out of memory"}
    values, _ = measured["b"]
    assert values["docs/s"] == pytest.approx([4e3 / spent for spent in values["ms a step"]])
    assert len(values["docs/s"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("model", "trainers"), [("bart-tiny", 2), ("llama-tiny", 3)])
def test_the_command_measures_each_way_under_each_trainer(model, trainers, tmp_path):
    pytest.importorskip("trl")
    written = tmp_path / "a.json"
    assert main([*TINY, "--model", model, "-o", str(written)]) == 0
    rows, failed = medians(written), json.loads(written.read_text())["failed"]
    groups = [*attach.TRAINERS.values()][:trainers]
    names = [attach.STOCK, 'attach(model, "ce + matches(2)")']
    assert list(rows) == [(group, name) for group in groups for name in names]
    assert [row["× stock"] for (_, name), row in rows.items() if name == attach.STOCK] == pytest.approx([1] * trainers)
    assert failed == [{"group": group, "name": attach.LIGER, "why_not": "needs a GPU."} for group in groups]


def test_lengths_that_the_model_has_not_are_refused(capsys):
    assert main([*TINY, "--model", "llama-tiny", "--source", "1020"]) == 2
    assert "expected a batch of at least 1 and lengths from 1 to 1024, got 2, 1020 and 6." in capsys.readouterr().err
