"""a function and its arguments → its result, computed in a process of its own or in several, or why there is none.

Processes are forked from a server that has imported torch and transformers but has computed nothing: so they start at
once, and no state of this process is in their way. A fork of a process that has used OpenMP hangs; a fork of a process
that has started CUDA cannot use it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NamedTuple, TypeVar

IMPORTED = ["ngramloss.bench.train"]
"""What the server imports."""

Result = TypeVar("Result")


class Answer(NamedTuple, Generic[Result]):
    """What the process returned."""

    result: Result | None
    why_not: str = ""
    """The error, if there is no result."""


def start_server() -> None:
    """Start the server early, so that it imports while this process does other things."""
    if "forkserver" in get_all_start_methods():
        from multiprocessing import forkserver

        get_context("forkserver").set_forkserver_preload(IMPORTED)
        forkserver.ensure_running()


def in_child(function: Callable[..., Result], *arguments: Any) -> Answer[Result]:
    """Call the function in a new process, so that its memory, caches and errors end with it.

    The function and its arguments are pickled. Where there is no server, the process imports everything itself.
    """
    (answer,) = _answers(function, arguments, [{}])
    return answer


def in_children(count: int, function: Callable[..., Result], *arguments: Any) -> list[Answer[Result]]:
    """Call the function in several processes that know of each other, as torchrun starts them.

    Returns:
        An answer of each. When one fails, the others are ended.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    ranks = [{name: str(value) for name, value in (together | _rank(rank)).items()} for rank in range(count)]
    return _answers(function, arguments, ranks)


def _rank(rank: int) -> dict[str, Any]:
    return {"RANK": rank, "LOCAL_RANK": rank}


def _answers(
    function: Callable[..., Result], arguments: tuple[Any, ...], environments: Sequence[Mapping[str, str]]
) -> list[Answer[Result]]:
    """Start a process with each of these environments, and wait for their answers."""
    start_server()
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    processes, answers = {}, {}
    for environment in environments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender, function, arguments, environment))
        process.start()
        sender.close()
        processes[receiver] = process
    try:
        while missing := [receiver for receiver in processes if receiver not in answers]:
            for receiver in wait(missing):
                answers[receiver] = _answer(receiver, processes[receiver])
                if answers[receiver].result is None:
                    for other in processes.values():
                        other.terminate()
    except BaseException:  # such as KeyboardInterrupt
        for process in processes.values():
            process.terminate()
        raise
    finally:
        for process in processes.values():
            process.join()
    return [answers[receiver] for receiver in processes]


def _answer(receiver: Any, process: Any) -> Answer[Any]:
    try:
        answer: Answer[Any] = receiver.recv()
    except EOFError:
        process.join()
        answer = Answer(None, f"the process ended with exit code {process.exitcode}")
    return answer


def _send(
    sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...], environment: Mapping[str, str]
) -> None:
    os.environ.update(environment)
    if "fork" in get_all_start_methods():  # as in a script; through the server each worker of a loader takes seconds
        set_start_method("fork", force=True)
    try:
        answer = Answer(function(*arguments))
    except BaseException as reason:  # the parent reports it
        answer = Answer(None, shortened(reason))
    sender.send(answer)
    sender.close()


def shortened(reason: BaseException) -> str:
    """An error in one line.

    >>> shortened(ValueError("expected 1,\\n got 2"))
    'ValueError: expected 1, got 2'
    """
    return f"{type(reason).__name__}: {' '.join(str(reason).split())[:120]}"
