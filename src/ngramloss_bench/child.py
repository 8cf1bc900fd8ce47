"""a function and its arguments → its result, computed in a process of its own or in several.

Processes are forked from a server that has computed nothing: a fork of a process that has used OpenMP hangs, and one
of a process that has started CUDA cannot use it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ngramloss import loading

IMPORTED = ["ngramloss_bench.trainings"]
"""What the server imports."""
FORKS = "forkserver" in get_all_start_methods()
Result = TypeVar("Result")


class Failed(Exception):
    """Why a process has no result."""


def in_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call the function in a new process, so that its memory, caches and errors end with it."""
    return in_children(1, function, *arguments)[0]


def in_children(count: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call the function in new processes, which know of each other as in torchrun; if one fails, all are ended."""
    context: Any = get_context("forkserver" if FORKS else "spawn")
    context.set_forkserver_preload(IMPORTED)
    processes, results, trusts = {}, {}, loading.remote_code_allowed()
    for environment in _environments(count):
        receiver, sender = context.Pipe(duplex=False)
        processes[receiver] = context.Process(target=_send, args=(sender, function, arguments, environment, trusts))
        processes[receiver].start()
        sender.close()
    try:
        while missing := [receiver for receiver in processes if receiver not in results]:
            for receiver in wait(missing):
                results[receiver] = _result(receiver, processes[receiver])
    except BaseException:  # such as KeyboardInterrupt
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for process in processes.values():
            process.join()
    return [results[receiver] for receiver in processes]


def _environments(count: int) -> list[dict[str, str]]:
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = [together | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return [{name: str(value) for name, value in rank.items()} for rank in ranks]


def _result(receiver: Any, process: Any) -> Any:
    try:
        result, why_not = receiver.recv()
    except EOFError:
        process.join()
        raise Failed(f"the process ended with exit code {process.exitcode}") from None
    if why_not:
        raise Failed(why_not)
    return result


def _send(
    sender: Connection,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    environment: dict[str, str],
    trusts: bool,
) -> None:
    os.environ.update(environment)
    if FORKS:  # as in a script; through the server each worker of a loader takes seconds
        set_start_method("fork", force=True)
    try:
        with loading.allow_remote_code(trusts):
            sender.send((function(*arguments), ""))
    except BaseException as reason:  # the parent reports it
        sender.send((None, shortened(reason)))


def shortened(reason: BaseException) -> str:
    """An error in one line.

    >>> shortened(ValueError("expected 1,\\n got 2"))
    'ValueError: expected 1, got 2'
    """
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:120]}"
