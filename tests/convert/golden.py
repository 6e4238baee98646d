"""Commands and settings as people write them, and what they are converted to.

`python -m tests.convert.golden` writes what the code says now; read the difference before it is committed.
"""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.convert import Conversion, convert

FOLDER = Path(__file__).parent / "cases"
CASES = sorted(path.stem for path in FOLDER.glob("*.txt"))


def converted(case: str) -> Conversion:
    return convert(case.split("-")[0], text=(FOLDER / f"{case}.txt").read_text(encoding="utf-8"))


def as_json(case: str) -> str:
    return json.dumps(converted(case).as_dict(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for case in CASES:
        (FOLDER / f"{case}.json").write_text(as_json(case), encoding="utf-8")
        (FOLDER / f"{case}.yaml").write_text(converted(case).yaml, encoding="utf-8")


if __name__ == "__main__":
    main()
