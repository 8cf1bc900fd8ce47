"""The version, and those of other packages, in a file so small that reading it costs nothing."""

__version__ = "0.1.0"


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None
