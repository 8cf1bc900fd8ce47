"""The command line: one file per command, with its options, its examples and its action."""

from ngramloss.cli.program import main as main
from ngramloss.cli.program import parser as parser
