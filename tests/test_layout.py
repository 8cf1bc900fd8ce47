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
    "version", "errors", "escape", "files", "run_folder", "stats", "objectives", "heads", "calls", "attachment", "log_parts", "explain", "corpus", "metrics", "doctor", "recipe",
    "batch", "models", "bench", "trainer", "checkpoints", "significance", "runs", "audit", "systems", "kept", "scoring", "tables", "watching", "card", "run", "generate", "seen", "predictions", "floors", "paper", "report", "reproduce", "released", "cli", "__init__", "__main__",
]


def room(path):
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            yield from (name.split(".")[1] for name in names if name and name.startswith("ngramloss."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    here = ORDER.index(room(path))
    assert all(ORDER.index(other) <= here for other in imported_rooms(ast.parse(path.read_text())))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_says_what_it_turns_into_what(path):
    first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
    assert "→" in first or path.name in ("__init__.py", "version.py")


def test_importing_the_package_loads_no_torch():
    program = "import sys, ngramloss; print('torch' in sys.modules, ngramloss.JointLoss('ce'), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "ce", "True"]


def test_the_core_needs_torch_alone():
    blocked = "['transformers', 'datasets', 'accelerate', 'triton', 'rich', 'jinja2', 'pandas', 'scipy']"
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
    arguments = ["score", "--references", tmp_path / "refs.jsonl", tmp_path / "a.jsonl", "--metrics", "rouge,bleu,chrf,shape"]
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:3]) == (0, ["system", "rouge1", "rouge2"]), done.stderr


@pytest.mark.parametrize("program", ["from ngramloss.cli import main; sys.exit(main(['explain', '--reference', 'a', '--candidate', 'a']))", "import ngramloss; ngramloss.JointLoss('ce')"])
def test_without_torch_a_sentence_says_how_to_get_it(program):
    done = subprocess.run([sys.executable, "-c", f"import sys; sys.modules['torch'] = None; {program}"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("this needs the package torch: pip install 'ngramloss[torch]'")
