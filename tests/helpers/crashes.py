"""a training recipe → what became of trainings that were killed, each followed by the same command once more.

A program of its own, for it imports torch and transformers once and forks for every attempt before any thread runs. An
attempt has a folder for its run and its cache, counts the operations that change files there, and kills itself just
before the k-th: the same recipe comes to the same operations each time.
"""

import contextlib
import errno
import gc
import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import torch
import transformers
from forks import import_once
from safetensors import torch as safetensors_torch

from ngramloss import cli

DELETES = ("os.remove", "os.rmdir", "shutil.rmtree")
CHANGES = (*DELETES, "os.rename", "os.mkdir", "os.truncate", "shutil.copyfile")
TIMED = ("docs_per_second", "memory_gib", "runtime", "per_second", "writing_share")


def trace(root, act):
    """Call ``act(event, path)`` before each operation that changes a file or folder under ``root``.

    As in an error of the system, the path is None if the operation has only a handle.
    """

    def look(event, path):
        if isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(str(root)):
            act(event, None if event == "fsync" else path)

    def hook(event, arguments):
        if event == "open":
            if isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
                look(event, arguments[0])
        elif event in ("os.remove", "os.rmdir") and arguments[1] != -1:  # shutil.rmtree deletes by a handle
            act(event, arguments[0])
        elif event in CHANGES:
            look(event, arguments[0])

    def around(function, path_of):
        def wrapped(*args, **kwargs):
            look(function.__name__, path_of(args))
            done = function(*args, **kwargs)
            look(function.__name__, path_of(args))
            return done

        return wrapped

    # No event tells of what C++ and Rust write, nor of what reaches the disk.
    torch.save = around(torch.save, lambda args: args[1])
    safetensors_torch.save_file = around(safetensors_torch.save_file, lambda args: args[1])
    transformers.modeling_utils.safe_save_file = safetensors_torch.save_file
    os.fsync = around(os.fsync, lambda args: root)
    sys.addaudithook(hook)


def attempt(root, *more, kill_at=None, full_at=None):
    """Train in ``root/run``: the exit code, or minus the number of the signal that ended it, and the operations."""
    root.mkdir(exist_ok=True)
    os.environ["NGRAMLOSS_CACHE"] = str(root / "cache")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        count = 0

        def act(event, path):
            nonlocal count
            count += 1
            if count == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if full_at is not None and count >= full_at and event not in DELETES:
                raise OSError(errno.ENOSPC, "No space left on device", path)

        with (
            root.with_suffix(".txt").open("w") as said,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            trace(root, act)
            code = cli.main(["train", str(root.parent / "tiny.toml"), "--run", str(root / "run"), *more])
        os.write(writer, str(count).encode())
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        count = int(pipe.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), count


def said(root):
    return root.with_suffix(".txt").read_text()


def remains(folder):
    """The weights bit for bit, the log without times, the settings, and the names of all that lies in the folder."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {
        "weights": (folder / "model" / "model.safetensors").read_bytes(),
        "log": [{name: value for name, value in line.items() if not name.endswith(TIMED)} for line in lines],
        "recipe": (folder / "recipe.toml").read_text(),
        "names": sorted(path.name for path in folder.iterdir()),
    }


def outcome(root, whole, *more, **how):
    """What became of an attempt that was disturbed, and of the same command after it."""
    code, _ = attempt(root, *more, **how)
    first = said(root)
    again, _ = attempt(root, *more)
    differs = [] if again else [name for name, value in remains(root / "run").items() if value != whole[name]]
    result = {
        **how,
        "code": code,
        "said": first,
        "again": again,
        "said_again": said(root)[-500:] if again else "",
        "differs": differs,
    }
    shutil.rmtree(root)
    return result


def killed(place, whole, operations, seed, points, part, parts):
    chosen = [*range(1, 11), *sorted(random.Random(seed).sample(range(11, operations + 1), points - 10))]
    return [outcome(place / "killed", whole, kill_at=point) for point in chosen[part::parts]]


def fresh(place, whole, operations):
    old = place / "old"  # a finished run of another seed, with predictions, to be started over
    assert attempt(old, "--set", "train.seed=7")[0] == 0, said(old)
    parts = (
        "predictions.jsonl",
        "predictions.partial-0.jsonl",
        "generation.json",
        "references.jsonl",
        "seen.jsonl",
        "scores.json",
        "scores.jsonl",
    )
    for name in parts:
        (old / "run" / name).write_text("{}\n")
    outcomes = []
    for point in (1, 4, 8, 10, 15, 30):
        shutil.copytree(old, place / "fresh")
        outcomes.append(outcome(place / "fresh", whole, "--fresh", kill_at=point))
    return outcomes


def full(place, whole, operations):
    return [outcome(place / "full", whole, full_at=point) for point in (1, 2, 3, 5, 8)]


def main(place, kind, *numbers):
    import_once()
    gc.freeze()  # an attempt need not look through all that was imported, nor copy it
    code, operations = attempt(place / "whole")
    assert code == 0, said(place / "whole")
    outcomes = {"killed": killed, "fresh": fresh, "full": full}[kind](
        place, remains(place / "whole" / "run"), operations, *numbers
    )
    print(json.dumps({"operations": operations, "outcomes": outcomes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
