"""names of experiment trackers → functions that get every line of the log."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from ngramloss.errors import UserError

Values = Mapping[str, float]


class Tracker(NamedTuple):
    """One experiment tracker of a run."""

    log: Callable[[Values, int], Any]  # called with the values of a logging step, by their names there, and the step
    end: Callable[[], Any]


def start_trackers(names: list[str], *, run_name: str, folder: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    """Start each tracker."""
    return [TRACKERS[name](run_name, folder, settings) for name in names]


def check_trackers(names: list[str]) -> None:
    """Raise if the package of a tracker is not installed."""
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"train.report_to: {name} is not installed. Install it with: pip install {name}")


def grouped(values: Values) -> dict[str, float]:
    """The names under which trackers show values: training and validation in groups of their own."""
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in values.items()
    }


def _tensorboard(run_name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def log(values: Values, step: int) -> None:
        for name, value in grouped(values).items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return Tracker(log, writer.close)


def _wandb(run_name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    import wandb

    run = wandb.init(project=os.environ.get("WANDB_PROJECT", "ngramloss"), name=run_name, config=dict(settings))
    return Tracker(lambda values, step: run.log(grouped(values), step=step), run.finish)


def _mlflow(run_name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    import mlflow

    mlflow.start_run(run_name=run_name)
    mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(values: Values, step: int) -> None:
        # Names may not contain the brackets and signs that terms are written with.
        plain = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(metrics=plain, step=step)

    return Tracker(log, mlflow.end_run)


TRACKERS = {"mlflow": _mlflow, "tensorboard": _tensorboard, "wandb": _wandb}
"""Name in ``train.report_to`` → what starts the tracker."""
