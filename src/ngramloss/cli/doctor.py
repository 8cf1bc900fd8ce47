"""``ngramloss doctor`` → the installed packages and the backend, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, verb
from ngramloss.cli.output import print_result

DOCTOR = "Show which packages are installed, which backend is used, and why."

DOCTOR_EXAMPLES = """\
examples:
  ngramloss doctor
"""


def add(verbs: Verbs) -> None:
    """Add the command and its options."""
    doctor = verb(verbs, "doctor", "show installed packages and the backend", DOCTOR, DOCTOR_EXAMPLES)
    doctor.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from ngramloss.doctor import report

    for line in report():
        print_result(line)
    return 0
