"""What this package is: its version, and the folder that it lies in. And the versions of others."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]


def installed_version(package: str) -> str | None:
    """The version of a package that is installed; None where it is not."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
