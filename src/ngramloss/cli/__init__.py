"""The program: one file a verb, each with its parser, its examples and what it does."""

from ngramloss.cli.program import main as main
from ngramloss.cli.program import parser as parser
