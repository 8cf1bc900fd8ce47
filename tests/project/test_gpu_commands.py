"""Tests in tests/gpu do not run without a GPU, so here they are imported, and the commands that they run are parsed."""

import ast
from importlib import import_module

import pytest
from places import TESTS

from ngramloss.cli.program import parser

GPU = TESTS / "gpu"
MODULES = sorted(path.stem for path in GPU.glob("test_*.py"))


def commands(source):
    """The lists that ``main`` is called with. What is not a literal, such as a path, becomes a word."""
    tree = ast.parse(source)
    lists = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List) and isinstance(node.targets[0], ast.Name)
    }

    def words(node):
        for word in node.elts:
            if isinstance(word, ast.Starred):
                yield from words(lists[word.value.id]) if isinstance(word.value, ast.Name) else ()
            else:
                yield word.value if isinstance(word, ast.Constant) else "word"

    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", getattr(call.func, "id", "")) == "main":
            yield [*words(call.args[0])]


COMMANDS = [command for module in MODULES for command in commands((GPU / f"{module}.py").read_text())]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_of_gpu_tests_imports(module, monkeypatch):
    monkeypatch.syspath_prepend(GPU)
    import_module(module)


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_of_gpu_tests_replaces_exists(module, monkeypatch):
    monkeypatch.syspath_prepend(GPU)
    loaded = import_module(module)
    for call in ast.walk(ast.parse((GPU / f"{module}.py").read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "monkeypatch.setattr":
            owner, name, *_ = call.args
            if isinstance(owner, ast.Name) and hasattr(loaded, owner.id) and isinstance(name, ast.Constant):
                assert hasattr(getattr(loaded, owner.id), name.value), f"{owner.id}.{name.value}"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_of_gpu_tests_is_one(command):
    parser().parse_args(command)


def test_an_option_that_does_not_exist_is_found():
    (command,) = commands('main(["bench", "head", "--no-such-option", str(path)])')
    with pytest.raises(SystemExit):
        parser().parse_args(command)


def test_commands_are_found():
    assert {command[0] for command in COMMANDS} >= {"bench", "train"}
