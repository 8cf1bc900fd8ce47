"""a function and its arguments → its result, computed in a process of its own or in several.

Processes are forked from a server that has imported torch and transformers but has computed nothing: so they start at
once, and no state of this process is in their way. A fork of a process that has used OpenMP hangs; a fork of a process
that has started CUDA cannot use it. Where there is no server, a process imports everything itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

IMPORTED = ["ngramloss.bench.trainings"]
"""What the server imports."""
FORKS = "forkserver" in get_all_start_methods()
Result = TypeVar("Result")


class Failed(Exception):
    """Why a process has no result."""


def start_server() -> None:
    """Start the server early, so that it imports while this process does other things."""
    if FORKS:
        from multiprocessing import forkserver

        get_context("forkserver").set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


def in_child(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call the function in a new process, so that its memory, caches and errors end with it."""
    return _results(function, arguments, [{}])[0]


def in_children(count: int, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call the function in several processes that know of each other, as torchrun starts them.

    When one fails, the others are ended.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = [together | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(count)]
    return _results(function, arguments, [{name: str(value) for name, value in rank.items()} for rank in ranks])


def _results(
    function: Callable[..., Result], arguments: tuple[Any, ...], environments: Sequence[Mapping[str, str]]
) -> list[Result]:
    """Start a process with each of these environments, and wait for their results."""
    start_server()
    context: Any = get_context("forkserver" if FORKS else "spawn")
    processes, results = {}, {}
    for environment in environments:
        receiver, sender = context.Pipe(duplex=False)
        processes[receiver] = context.Process(target=_send, args=(sender, function, arguments, environment))
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
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    if FORKS:  # as in a script; through the server each worker of a loader takes seconds
        set_start_method("fork", force=True)
    try:
        sender.send((function(*arguments), ""))
    except BaseException as reason:  # the parent reports it
        sender.send((None, shortened(reason)))


def shortened(reason: BaseException) -> str:
    """An error in one line.

    >>> shortened(ValueError("expected 1,\\n got 2"))
    'ValueError: expected 1, got 2'
    """
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:120]}"
