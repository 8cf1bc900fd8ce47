"""lists of small mistakes, tests/*/mutants.toml → which of them the tests notice.

    python tests/run_mutants.py             # all
    python tests/run_mutants.py -k cache    # those whose name contains "cache"
    python tests/run_mutants.py --check     # only whether each is still one place of its function
    python tests/run_mutants.py -n 2        # in two processes

A mutant names a function, ``module:name``, a piece of it and what replaces the piece, and the tests that should fail
then: those of the quick lane, and with ``slow = true`` the slow ones after them. It is made in a copy of the project. A
survivor says that a test is missing or that the line is not needed.
"""

import argparse
import ast
import multiprocessing
import os
import queue
import re
import shutil
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
LISTS = sorted(Path(__file__).parent.glob("**/mutants.toml"))
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info")
WRITTEN = {"runs", "report", "build", "dist"}
"""Folders of the project's root that commands write; the package has a ``report`` of its own."""
LANES = ["not (slow or thorough)", "slow and not thorough"]
SECONDS = 300
"""The limit for the tests of one mutant in one lane. A mutant that hangs is noticed."""


def not_copied(folder, names):
    """Which of the names in a folder the copy of the project leaves out."""
    return NOT_COPIED(folder, names) | (WRITTEN & set(names) if Path(folder) == ROOT else set())


def read(paths=LISTS):
    """The mutants: dictionaries with ``name``, ``in``, ``old``, ``new``, ``tests`` and, if it is so, ``slow``."""
    return [mutant for path in paths for mutant in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]]


def source(mutant, root=ROOT):
    """The file of a mutant."""
    path = root / "src" / mutant["in"].partition(":")[0].replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def places(mutant, text):
    """Where the old piece begins in its function or class, or in its module if it names none."""
    first, last = 0, len(text)
    if name := mutant["in"].partition(":")[2]:
        starts = [0, *(match.end() for match in re.finditer("\n", text))]
        found = _scope(ast.parse(text), name.split("."))
        if found is None:
            return []
        first = starts[min([found.lineno, *(each.lineno for each in found.decorator_list)]) - 1]
        last = starts[found.end_lineno] if found.end_lineno < len(starts) else len(text)
    pieces = re.finditer(re.escape(mutant["old"]), text[first:last])
    return [first + match.start() for match in pieces]


def _scope(tree, names):
    """The function or class with this name; of several with one name, the last, which is the one that counts."""
    for name in names:
        inner = [node for node in ast.walk(tree) if node is not tree and getattr(node, "name", None) == name]
        inner = [node for node in inner if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
        if not inner:
            return None
        tree = inner[-1]
    return tree


def mutated(mutant, text):
    """The source with the mutant."""
    (place,) = places(mutant, text)
    return text[:place] + mutant["new"] + text[place + len(mutant["old"]) :]


def faults(mutants, root=ROOT):
    """What is wrong with a list, a sentence each: it must be changed with the source."""
    names = [mutant["name"] for mutant in mutants]
    found = [f"{name} is in the list {names.count(name)} times" for name in sorted({*names}) if names.count(name) > 1]
    for mutant in mutants:
        name, path = mutant["name"], source(mutant, root)
        times = len(places(mutant, path.read_text(encoding="utf-8"))) if path.is_file() else 0
        if times != 1:
            found.append(f"{name}: {mutant['in']} has its old text {times} times, expected once")
        if mutant["old"] == mutant["new"]:
            found.append(f"{name}: changes nothing")
        for test in mutant["tests"]:
            path, _, function = test.partition("::")
            lines = (root / path).read_text(encoding="utf-8").splitlines() if (root / path).is_file() else []
            wanted = f"def {function.partition('[')[0]}(" if function else "def test_"
            if not any(line.startswith(wanted) for line in lines):
                found.append(f"{name}: there is no test {test}")
    return found


def written(test):
    """Where a test is written: those that share a model leave it to the next as that one expects it."""
    path, _, function = test.partition("::")
    return path, (ROOT / path).read_text(encoding="utf-8").find(f"def {function.partition('[')[0]}(")


def run(tree, tests, lane):
    """Run tests in a folder, in a process of its own. Returns pytest's exit code, None if it took too long; its output.

    The process is forked, so that it need not import torch and transformers again.
    """
    output = tree.with_name("output.txt")
    process = multiprocessing.get_context("fork").Process(target=_pytest, args=(tree, tests, lane, output))
    process.start()
    process.join(SECONDS * max(len(tests) // 10, 1))
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    return None if late else process.exitcode, output.read_text(encoding="utf-8", errors="replace")


def _pytest(tree, tests, lane, output):
    import pytest

    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree / "src"), "NGRAMLOSS_CACHE": str(tree / "cache")}
    sys.path[:0] = [str(tree / "src"), str(tree)]
    # The same examples of Hypothesis every time; no compiled files, which a change within a second would not renew.
    sys.dont_write_bytecode = True
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", "-m", lane]
    code = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    os._exit(code)


def verdict(tree, mutant):
    """How the tests took a mutant, and whether they noticed it."""
    path = source(mutant, tree)
    text = path.read_text(encoding="utf-8")
    path.write_text(mutated(mutant, text), encoding="utf-8")
    try:
        codes = []
        for lane in LANES[: 2 if mutant.get("slow") else 1]:
            code, output = run(tree, mutant["tests"], lane)
            codes.append(code)
            if code is None:
                return "killed by the clock", True
            failed = re.search(r"^(?:FAILED|ERROR) \S+::(\w+)", output, re.M)
            if code == 1 and failed:
                return f"killed by {failed[1]}", True
            if code not in (0, 5):  # 5: this lane has none of the tests
                return f"BROKEN, the tests did not run (exit code {code}):\n{output[-2000:]}", False
        return "SURVIVED" if 0 in codes else "BROKEN, the lane has none of its tests", False
    finally:
        path.write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", default="", help="only mutants whose name contains this")
    parser.add_argument("--check", action="store_true", help="only check the list")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    mutants = [mutant for mutant in read() if options.k in mutant["name"]]
    for fault in (wrong := faults(mutants)):
        print(fault)
    if options.check or wrong or not mutants:
        print(f"{len(mutants)} mutants, {len(wrong)} faults in the list")
        return bool(wrong or not mutants)
    _import_once()
    began, left = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / str(number) / "tree" for number in range(options.n)]
        for tree in trees:
            shutil.copytree(ROOT, tree, ignore=not_copied)
        for lane, some in zip(LANES, (mutants, [mutant for mutant in mutants if mutant.get("slow")]), strict=True):
            tests = sorted({test for mutant in some for test in mutant["tests"]}, key=written)
            code, output = run(trees[0], tests, lane) if some else (0, "")
            if code not in (0, 5):
                print(f"the tests fail without a mutant, too:\n{output[-3000:]}")
                return True
        print(f"without a mutant the tests pass, {time.monotonic() - began:.0f} s", flush=True)
        free = queue.SimpleQueue()
        for tree in trees:
            free.put(tree)

        def judged(mutant):
            tree, start = free.get(), time.monotonic()
            try:
                how, noticed = verdict(tree, mutant)
            finally:
                free.put(tree)
            print(f"{mutant['name']}: {how}, {time.monotonic() - start:.0f} s", flush=True)
            return noticed

        with ThreadPoolExecutor(options.n) as pool:
            verdicts = list(pool.map(judged, mutants))
        left = [mutant["name"] for mutant, noticed in zip(mutants, verdicts, strict=True) if not noticed]
    print(f"{len(mutants)} mutants, {len(left)} lived, {(time.monotonic() - began) / 60:.0f} min", *left, sep="\n  ")
    return bool(left)


def _import_once():
    """Import what all tests need before they are forked; nothing of the project.

    A device cannot be used after a fork, so there is none. Triton must know of its interpreter before it is imported.
    """
    os.environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401
    from transformers import BartForConditionalGeneration, Seq2SeqTrainer  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
