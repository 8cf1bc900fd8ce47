"""a function and its arguments → its result, computed in a process of its own, or why there is none.

Processes are forked from a server that has imported torch and transformers but has computed nothing: so they start at
once, and no state of this process is in their way. A fork of a process that has used OpenMP hangs; a fork of a process
that has started CUDA cannot use it.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_all_start_methods, get_context, set_start_method
from multiprocessing.connection import Connection
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
    start_server()
    context: Any = get_context("forkserver" if "forkserver" in get_all_start_methods() else "spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, function, arguments))
    process.start()
    sender.close()
    try:
        answer: Answer[Result] = receiver.recv()
    except EOFError:
        process.join()
        answer = Answer(None, f"the process ended with exit code {process.exitcode}")
    except BaseException:  # such as KeyboardInterrupt
        process.terminate()
        raise
    finally:
        process.join()
    return answer


def _send(sender: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
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
