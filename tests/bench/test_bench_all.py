"""All benchmarks in parts: what is measured, what is there already, and what does not fit into the time."""

import json
import shlex

import pytest

from ngramloss.cli import main
from ngramloss.cli.program import parser
from ngramloss_bench import benchmark, every
from ngramloss_bench.every import Part

NGRAMS = "ngrams --longest 128 --batch-size 1 --device cpu --repeats"


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function: run with these options. Returns the exit code and the parts that were measured."""
    found = []

    def measure(command):
        found.append(command[-1].rpartition("/")[2].removesuffix(".json"))
        return main(command)

    monkeypatch.setattr(every, "main", measure)
    parts = {"enough": Part("A", f"{NGRAMS} 3", 1), "few": Part("B", f"{NGRAMS} 2", 1)}
    monkeypatch.setattr(every, "CPU", parts)

    def run(*options):
        found.clear()
        return main(["bench", "all", "--out", str(tmp_path), *options]), [*found]

    return run


def test_a_part_with_enough_repeats_is_not_measured_again(measured, tmp_path):
    assert measured() == (0, ["enough", "few"])
    content = json.loads((tmp_path / "enough.json").read_text())
    assert (content["part"], content["command"]) == ("A", f"ngramloss bench {NGRAMS} 3")
    assert measured() == (0, ["few"])
    file, part = tmp_path / "enough.json", every.CPU["enough"]
    about = benchmark.about("cpu")
    assert every.is_measured(file, part, about)
    for name in ("machine", "versions", "code"):
        assert not every.is_measured(file, part, about | {name: "other"}), name
    assert not every.is_measured(file, part._replace(command=f"{NGRAMS} 4"), about)
    assert not every.is_measured(tmp_path / "none.json", part, about)


def test_a_part_that_does_not_fit_into_the_time_is_left(measured, tmp_path, capsys):
    assert measured("--minutes", "0.5") == (1, [])
    assert not list(tmp_path.iterdir())
    assert "not measured: enough, few. The same command continues." in capsys.readouterr().err


def test_mistakes_are_sentences(measured, capsys):
    assert measured("--parts", "heads")[0] == 2
    assert measured("--out", "nowhere")[0] == 2
    said = capsys.readouterr().err
    assert "unknown part 'heads'. Choose from enough, few." in said
    assert "there is no folder nowhere. Create it, or name another one with --out." in said


@pytest.mark.parametrize("name", [*every.GPU, *every.CPU])
def test_every_part_is_a_command(name):
    part = (every.GPU | every.CPU)[name]
    options = parser().parse_args(["bench", *shlex.split(part.command)])
    measurements = getattr(options, "repeats", None) or every.ENOUGH
    assert measurements * getattr(options, "windows", 1) >= every.ENOUGH


def test_the_parts_for_a_gpu_fit_into_25_minutes():
    assert sum(part.minutes for part in every.GPU.values()) <= 25
