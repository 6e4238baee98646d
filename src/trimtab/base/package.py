"""What this package is: its version, and the folder that it lies in."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).resolve().parents[1]
