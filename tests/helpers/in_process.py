"""arguments of a command → what a study takes for a process: a call of ours, which has ended when it is started."""

import contextlib

from ngramloss import cli
from ngramloss.study import run


class InProcess:
    """Stands in for a process of a study, without importing torch again."""

    def __init__(self, arguments, log, environment=None):
        with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
            self.exitcode = cli.main(arguments)

    def terminate(self):
        raise AssertionError("it has ended")


def processes_run_here(monkeypatch):
    """Let the processes of a study run here, without waiting between two tries. Returns the arguments of each."""
    calls = []
    monkeypatch.setattr(
        run, "start_process", lambda arguments, log, _: calls.append(arguments) or InProcess(arguments, log)
    )
    for pause in ("POLL", "WAIT", "PAUSE"):
        monkeypatch.setattr(run, pause, 0.0)
    return calls
