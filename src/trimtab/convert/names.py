"""The rule of a name, or the name that was meant.

Guarantees that a name inside a family (`name.*`) has the family's rule only where it is no slip for one that has its own: real
names that are as near to another as a slip is therefore have rules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.base.suggestions import nearest
from trimtab.convert.rules import MIN_NAME_SIMILARITY, ConvertRule

FAMILY = ".*"
MIN_ENDING_SIMILARITY = 0.85
"""How much alike the last parts of two names are where one is taken for the other (1 is equal)."""


class Names:
    def __init__(self, known: Mapping[str, ConvertRule], abbreviations: Mapping[str, str]) -> None:
        """`known` has the rules by every name, `abbreviations` the first parts that the table writes in another way."""
        self._known, self._abbreviations = known, abbreviations
        self._real = [name for name, rule in known.items() if not name.endswith(FAMILY) and name not in rule.never]

    def rule(self, name: str) -> ConvertRule | None:
        return self._known.get(name) or self._of_family(name)

    def _of_family(self, name: str) -> ConvertRule | None:
        """The rule of the longest `head.*` that a name begins with."""
        parts = name.split(".")
        heads = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        head = next((head for head in heads if head + FAMILY in self._known), None)
        if head is None:
            return None
        slip = any(_slip(parts, other.split(".")) for other in self._real if other.startswith(f"{head}."))
        return None if slip else self._known[head + FAMILY]

    def meant(self, name: str) -> str:
        """The nearest name that is known, or nothing."""
        name = self._with_a_known_head(name)
        near = nearest(name, self._real, MIN_NAME_SIMILARITY)
        if near:
            return near
        ends = [other.rsplit(".", 1)[-1] for other in self._real]
        end = nearest(name.rsplit(".", 1)[-1], ends, MIN_ENDING_SIMILARITY)
        return self._real[ends.index(end)] if "_" in end else ""

    def _with_a_known_head(self, name: str) -> str:
        """A slip in a first part that the table abbreviates would hide how near the rest is."""
        head, dot, rest = name.partition(".")
        near = nearest(head, list(self._abbreviations), MIN_NAME_SIMILARITY)
        return f"{self._abbreviations[near]}.{rest}" if dot and near else name


def _slip(parts: list[str], others: list[str]) -> bool:
    """Whether each part of a name is alike: in whole names the parts that two share would make the rest look nearer."""
    return len(parts) == len(others) and all(
        nearest(part, [other], MIN_NAME_SIMILARITY) for part, other in zip(parts, others)
    )
