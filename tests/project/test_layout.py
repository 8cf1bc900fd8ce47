"""The house rules that a reader relies on."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ngramloss

ROOT = Path(ngramloss.__file__).parent
STOREYS = """
errors version
output settings
storage
plugins
loss
recipe
data
models
metrics
search
training
trainers generation
scoring
report
study
cli
"""
"""The rooms of ngramloss, from the ground up: each imports from storeys below, and from itself."""
HEIGHT = {room: number for number, storey in enumerate(STOREYS.split("\n")) for room in storey.split()}
ENTRIES = {"__init__", "__main__"}
"""What a person starts; public names are loaded when they are first used."""


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(source):
    """The modules of ours that a source imports, at its top or later; not those that it imports for types alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{one.name}" for one in node.names)


def upwards(source, here):
    """What a room imports from its own storey or from above."""
    rooms = [name.split(".")[1] for name in imported(source) if name.startswith("ngramloss.")]
    others = [name for name in imported(source) if name.startswith("ngramloss_")]
    return others + [other for other in rooms if other != here and HEIGHT.get(other, -1) >= HEIGHT[here]]


def test_every_room_has_its_storey():
    assert {room(path) for path in ROOT.rglob("*.py")} == {*HEIGHT} | ENTRIES


def test_imports_point_down():
    found = {str(path): upwards(path.read_text(), room(path)) for path in ROOT.rglob("*.py") if room(path) in HEIGHT}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import ngramloss.cli",
        "from ngramloss import cli",
        "from ngramloss.scoring import results",
        "def f():\n    from ngramloss.models.loading import load",
        "import ngramloss_systems",
    ],
)
def test_an_import_that_points_up_is_found_wherever_it_stands(line):
    assert upwards(line, "loss")


def test_every_module_says_what_it_turns_into_what():
    for path in ROOT.parent.glob("ngramloss*/**/*.py"):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        assert "→" in first or path.name in ("__init__.py", "version.py"), path


def test_importing_the_package_loads_no_torch():
    program = "import sys, ngramloss; print('torch' in sys.modules, ngramloss.JointLoss('ce'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "ce", "True"]


def test_the_core_needs_torch_alone():
    blocked = "['transformers', 'datasets', 'accelerate', 'triton', 'rich', 'jinja2', 'numpy', 'pandas', 'scipy']"
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}))\n"
        "import torch, ngramloss as ng\n"
        "x = torch.zeros(1, 3, 4, requires_grad=True)\n"
        "ng.JointLoss('ce + matches(2) + bag(2)')(x, torch.tensor([[1, 2, 3]])).backward(); print('done')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "done\n", done.stderr


def test_every_public_name_loads():
    assert all(getattr(ngramloss, name) is not None for name in ngramloss.__all__)
    assert set(ngramloss.__all__) <= set(dir(ngramloss))
    with pytest.raises(AttributeError, match="module 'ngramloss' has no attribute 'Jointloss'"):
        _ = ngramloss.Jointloss


def test_scoring_needs_no_torch(tmp_path):
    (tmp_path / "refs.jsonl").write_text('{"id": 1, "reference": "the cat sat on the mat"}\n')
    (tmp_path / "a.jsonl").write_text('{"id": 1, "prediction": "the cat sat on a mat"}\n')
    program = "import sys; sys.modules['torch'] = None; from ngramloss.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = [
        "score",
        "--references",
        tmp_path / "refs.jsonl",
        tmp_path / "a.jsonl",
        "--metrics",
        "rouge,bleu,chrf,shape",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["system", "rouge1", "rouge2"]), done.stderr


@pytest.mark.parametrize(
    "program",
    [
        "from ngramloss.cli import main; sys.exit(main(['explain', '--reference', 'a', '--candidate', 'a']))",
        "import ngramloss; ngramloss.JointLoss('ce')",
    ],
)
def test_without_torch_a_sentence_says_how_to_get_it(program):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {program}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("this needs the package torch: pip install 'ngramloss[torch]'")


def reached(source):
    """What a source imports of ngramloss, and reads as ``ng.NAME``: public names, or parts of the package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (one.name.removeprefix("ngramloss.") for one in node.names if one.name.startswith("ngramloss."))
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("ngramloss."):
            place = node.module.partition(".")[2]
            yield from (f"{place}.{one.name}" if place else one.name for one in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "ng":
            yield node.attr


REACHES = {
    "ngramloss_bench": {
        "cli.main",  # runs several commands
        "loss.kernels.graphs",  # captures as a training does
        "loss.stats.Packing",  # times the labelled positions alone
        "loss.stats.at_positions",
        "loss.stats.labelled",
        "loss.stats.chosen_backend",  # names the backend that is timed
        "training.captured.CapturedStep",  # leaves the time of captures out
    },
    "ngramloss_systems": set(),
}
"""What a package beside ngramloss reads besides public names, and what for."""


@pytest.mark.parametrize("package", REACHES)
def test_a_package_beside_ngramloss_reads_its_public_names_alone(package):
    sources = [path.read_text() for path in (ROOT.parent / package).rglob("*.py")]
    assert {name for source in sources for name in reached(source)} - {*ngramloss.__all__} == REACHES[package]


def test_the_page_of_the_architecture_names_files_that_exist():
    page = (ROOT.parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")
    places = (ROOT, ROOT.parent, ROOT.parent.parent)
    inside = [
        path
        for paragraph in re.findall(r"```text\n(src/.*?)```", page, re.S)
        for path in re.findall(r"^ +([\w/]+(?:/|\.py))", paragraph, re.M)
    ]
    named = {*re.findall(r"`([\w/]+(?:\.py|/))`", page)} - {"checkpoints/", "tensorboard/", "model/"}
    assert len(inside) > 20
    assert len(named) > 40
    assert [path for path in sorted(named) if not any((place / path).exists() for place in places)] == []
    assert [path for path in inside if not any((place / path).exists() for place in (ROOT, ROOT / "loss"))] == []
