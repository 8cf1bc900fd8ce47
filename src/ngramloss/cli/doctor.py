"""``ngramloss doctor`` → the installed packages and the backend, printed."""

from __future__ import annotations

import argparse

from ngramloss.cli.options import describe
from ngramloss.output.console import print_result

DOCTOR = "Show which packages are installed, which backend is used, and why."

DOCTOR_EXAMPLES = """\
examples:
  ngramloss doctor
  ngramloss doctor --json
"""


def add(doctor: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    describe(doctor, DOCTOR, DOCTOR_EXAMPLES, run)
    doctor.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import json

    from ngramloss.cli import doctor_rows as doctor
    from ngramloss.output import escape

    known = doctor.facts()
    if options.json:
        print_result(escape.in_json(json.dumps(known, indent=1, ensure_ascii=False)))
    else:
        for line in doctor.lines(known):
            print_result(line)
    return 0
