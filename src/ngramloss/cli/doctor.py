"""``ngramloss doctor`` → what is installed here, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import Verbs, verb
from ngramloss.cli.output import print_result

DOCTOR = "Say what is installed here, which backend is used and why."

DOCTOR_EXAMPLES = """\
examples:
  ngramloss doctor
"""


def add(verbs: Verbs) -> None:
    """Add the verb and its options."""
    doctor = verb(verbs, "doctor", "say what is installed and which backend is used", DOCTOR, DOCTOR_EXAMPLES)
    doctor.set_defaults(run_verb=run)


def run(options: argparse.Namespace) -> int:
    """Do what the options say."""
    from ngramloss.doctor import report

    for line in report():
        print_result(line)
    return 0
