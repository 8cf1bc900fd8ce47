"""a parser → the same with options that several benchmarks have."""

from __future__ import annotations

from argparse import ArgumentParser

from ngramloss import options as cli


def number(parser: ArgumentParser, name: str, default: int, metavar: str, help: str) -> None:
    """Add an option that takes a whole number; its help ends with the default."""
    parser.add_argument(name, type=int, default=default, metavar=metavar, help=f"{help} (default: %(default)s)")


def numbers(parser: ArgumentParser, name: str, default: list[int], metavar: str, help: str) -> None:
    """Add an option that takes several whole numbers."""
    help = f"{help} (default: {' '.join(map(str, default))})"
    parser.add_argument(name, type=int, nargs="+", default=default, metavar=metavar, help=help)


def calls(parser: ArgumentParser, usual: str) -> None:
    """Add the number of repeats, where a repeat is a call; it depends on the call."""
    parser.add_argument("--repeats", type=int, metavar="N", help=f"times that each row is timed (default: {usual})")


def model(parser: ArgumentParser, default: str = "bart-base") -> None:
    """Add the name of a model, and the trust in its code."""
    names = (
        "bart-base, small or bart-tiny, or decoder-only smollm2-135m or llama-tiny, with random weights, a folder or a "
        "hub id (default: %(default)s)"
    )
    parser.add_argument("--model", default=default, metavar="NAME", help=names)
    cli.add_trust(parser)


def objective(parser: ArgumentParser, default: str, help: str) -> None:
    """Add an objective."""
    parser.add_argument("--objective", default=default, metavar="OBJECTIVE", help=f"{help} (default: %(default)s)")


def precision(parser: ArgumentParser, help: str, *more: str) -> None:
    """Add the precision. The default is that of the device."""
    choices = ["bf16", "fp16", "fp32", *more]
    parser.add_argument("--precision", choices=choices, help=f"{help} (default: bf16 on a GPU, else fp32)")
