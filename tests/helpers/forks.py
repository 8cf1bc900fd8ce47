"""a program and its arguments → a process of its own that need not import torch again, and what became of it.

A server imports torch and transformers once and forks for every program, before any thread runs. A fork is a process like
any other: it has its own exit code, its own output, and can be stopped, killed or short of disk.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path


class Fork:
    """One process, with the methods of ``subprocess.Popen`` that tests use."""

    def __init__(self, server, request):
        self._ask, self._folder = server, tempfile.TemporaryDirectory(prefix="fork-")
        self.returncode = None
        for name in ("out", "err"):  # a process that is killed at once writes neither
            Path(self._folder.name, name).touch()
        self.pid = self._ask({**request, "folder": self._folder.name})

    def poll(self):
        if self.returncode is None:
            self.returncode = self._ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout=300):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(f"a process did not end in {timeout} seconds:\n{self._read('err')[-2000:]}")
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=300):
        self.wait(timeout)
        return self._read("out"), self._read("err")

    @property
    def stderr(self):
        return Path(self._folder.name, "err").open()

    def _read(self, name):
        return Path(self._folder.name, name).read_text()


def fork(program, arguments, *, environment, limit=None):
    """Start a Python program in the present folder, which may write no file of more than ``limit`` bytes."""
    request = {"program": program, "arguments": arguments, "environment": environment, "limit": limit}
    return Fork(_server(), {**request, "place": os.getcwd()})


def fork_ranks(program, arguments, *, environment, count=2, one_device=False):
    """Start a program in several processes, as torchrun does, and wait; the first that fails ends the others."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    together = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    ranks = [
        fork(
            program,
            arguments,
            environment={**environment, **together, "RANK": str(rank), "LOCAL_RANK": str(0 if one_device else rank)},
        )
        for rank in range(count)
    ]
    end = time.monotonic() + 300
    while (
        time.monotonic() < end and any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks)
    ):
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
        rank.wait()
    return [rank.returncode for rank in ranks], "".join(rank.communicate()[1] for rank in ranks)


def killed_at_third_call(module, name):
    """A program that runs a command of ours, and kills itself when a function is called for the third time."""
    return f"""
import os, signal, sys
from importlib import import_module
from ngramloss import cli
module, count = import_module({module!r}), 0
whole = module.{name}
def some(*args, **kwargs):
    global count
    count += 1
    if count == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*args, **kwargs)
module.{name} = some
sys.exit(cli.main(sys.argv[1:]))
"""


@functools.cache
def _server():
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    atexit.register(process.stdin.close)  # which ends it

    def ask(request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    return ask


def _child(request):
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["place"])
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(request["folder"]) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["-c", *request["arguments"]]
    code = 0
    try:
        exec(compile(request["program"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def import_once():
    """Import what a training imports on its way, so that no fork has to."""
    import torch._dynamo
    import torch.distributed.fsdp
    from transformers import BartForConditionalGeneration, MBartForConditionalGeneration  # noqa: F401

    from ngramloss.training import loop, runner  # noqa: F401

    torch.set_num_threads(1)


def main():
    import_once()
    gc.freeze()  # a fork need not look through all that was imported, nor copy it
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork() or _child(request)
        print(json.dumps(answer), flush=True)
    os._exit(0)  # at an orderly end, Triton would list all that it leaves behind


if __name__ == "__main__":
    main()
