"""The house rules that a reader relies on."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ngramloss

ROOT = Path(ngramloss.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
ORDER = [
    "version",
    "errors",
    "output",
    "storage",
    "settings",
    "plugins",
    "terms",
    "stats",
    "objectives",
    "gpu",
    "diagnostics",
    "weights",
    "loss",
    "steps",
    "hf",
    "explaining",
    "engine_registry",
    "recipe",
    "data",
    "metrics",
    "models",
    "generation",
    "training",
    "systems",
    "integrations",
    "scoring",
    "report",
    "bench",
    "doctor",
    "study",
    "reproduce",
    "publish",
    "new",
    "cli",
    "__init__",
    "__main__",
]
"""The rooms: whoever stands before knows nothing of those behind."""


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(source):
    """Rooms that a source imports, at its top or later; not those it imports for its types alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{one.name}" for one in node.names]
        yield from (
            parts[1]
            for parts in (name.split(".") for name in names)
            if parts[0] == "ngramloss" and parts[1:2] and parts[1] in ORDER
        )


def against_the_order(source, here):
    return [other for other in imported_rooms(source) if ORDER.index(other) > ORDER.index(here)]


def test_every_room_has_its_place():
    assert {room(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    if room(path) != "__init__":  # public names are loaded by their rooms' names, when they are first used
        assert against_the_order(path.read_text(), room(path)) == []


@pytest.mark.parametrize(
    "line",
    [
        "import ngramloss.cli",
        "from ngramloss import cli",
        "from ngramloss.scoring import results",
        "def f():\n    from ngramloss.loss import JointLoss",
    ],
)
def test_an_import_against_the_order_is_found_wherever_it_stands(line):
    assert against_the_order(line, "objectives")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_turns_into_what(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    assert "→" in first or path.name in ("__init__.py", "version.py")


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
