"""Shell text to commands, each a list of words: quotes, comments, continued lines, variables and arrays.

Nothing is run. Variables that the text itself sets are put in where they are used; `${NAME:-default}` and whole-number
arithmetic are worked out; what only a shell could know ($HOME, `$(command)`) stays as it is written. A backslash with a comment
behind it continues the line, as people write it in guides (a shell would not). Variables that grow with every line, as in
`A=$A$A`, are refused beyond `MAX_EXPANSION_CHARACTERS`.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator

from trimtab.base.errors import ConfigError, Problem

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
CONTINUED = re.compile(r"\\[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
DOCUMENT = re.compile(r"<<-?\s*[\"']?(\w+)[\"']?")
ALL_OF = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]\}")
DECLARES = ("export", "local", "readonly", "declare", "env")
OPENS, CLOSES = ("if", "case", "for", "while", "until"), ("fi", "esac", "done")
MAX_EXPANSION_CHARACTERS = 1_000_000
"""Characters that variables may put in, over the whole text."""
MAX_ARITHMETIC_CHARACTERS = 1_000
"""Characters of an arithmetic expression, its variables put in."""
MAX_EXPANSION_DEPTH = 20
"""Defaults inside defaults: ${A:-${B:-...}}."""
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


class Script:
    """A shell text being read. `used` are the variables that were put in somewhere: they are settings of the script itself."""

    def __init__(self, text: str, source: str) -> None:
        self.text, self.source, self.at = text.replace("\r\n", "\n"), source, 0
        self.variables: dict[str, str] = {}
        self.used: set[str] = set()
        self._arrays: dict[str, list[str]] = {}
        self._here = ""
        self._depth = 0
        self._put = 0
        """Characters that variables have put in."""
        self._inside = 0
        """How deep the text lies in defaults of defaults."""

    def commands(self) -> Iterator[list[str]]:
        """Every command's words, in order; then arrays that no command used."""
        while self.at < len(self.text):
            words = self._command()
            if words:
                self._depth += (words[0] in OPENS) - (words[0] in CLOSES)
                yield words
        yield from (words for name, words in self._arrays.items() if name not in self.used)

    def _command(self) -> list[str]:
        words: list[str] = []
        while self.at < len(self.text):
            if continued := CONTINUED.match(self.text, self.at):
                self.at = continued.end()
            elif self.text[self.at] in " \t\r":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = _or_end(self.text, self.text.find("\n", self.at))
            elif self.text[self.at] in "\n;&|":
                self.at += 1
                self._pass_document()
                break
            elif document := DOCUMENT.match(self.text, self.at):
                self.at, self._here = document.end(), document[1]
            else:
                words += self._word(all(_declares(word) for word in words))
        return words

    def _pass_document(self) -> None:
        """Go past the text of a here-document (`<<EOF`) that the line before opened."""
        if self._here and self.text[self.at - 1] == "\n":
            end = re.compile(rf"^\s*{re.escape(self._here)}\s*$", re.MULTILINE).search(self.text, self.at)
            self.at, self._here = end.end() if end else len(self.text), ""

    def _word(self, at_start: bool) -> list[str]:
        """One word, or what it stands for: none for an array that is set, several for one that is used."""
        begin, text = self.at, ""
        while self.at < len(self.text):
            here = self.text[self.at]
            if here in "'\"":
                text += self._quoted(here)
            elif here == "\\":
                if CONTINUED.match(self.text, self.at):
                    break
                text += self.text[self.at + 1 : self.at + 2]
                self.at += 2
            elif here == "$":
                text += self._expansion()
            elif here == "(" and at_start and (array := re.fullmatch(r"(\w+)(\+?)=", text)):
                self._array(array[1], bool(array[2]))
                return []
            elif here in " \t\r\n;&|" and not (here == "&" and text.endswith(">")):
                break
            else:
                text += here
                self.at += 1
        raw = self.text[begin : self.at].strip("\"'")
        if whole := ALL_OF.fullmatch(raw):
            self.used.add(whole[1])
            words = self._arrays.get(whole[1], [])
            self._count_in(sum(map(len, words)) + len(words))
            return words
        if raw in ("$@", "$*"):
            return []
        if self.text[begin] == "$" and re.search(r"\s", text):  # outside quotes, what a variable holds is several words
            return re.sub(r"\\\s*\n", " ", text).split()
        if at_start and (found := ASSIGNMENT.fullmatch(text)) and not (self._depth and found[1] in self.variables):
            self.variables[found[1]] = found[2]
        return [text]

    def _quoted(self, quote: str) -> str:
        begin, text = self.at, ""
        self.at += 1
        while self.at < len(self.text) and self.text[self.at] != quote:
            here = self.text[self.at]
            if quote == '"' and here == "$":
                text += self._expansion()
            elif quote == '"' and here == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`"):
                text += self.text[self.at + 1]
                self.at += 2
            else:
                text += here
                self.at += 1
        if self.at >= len(self.text):
            raise self._wrong(f"a quote {quote} is opened and never closed", "Close it, or write \\ before it", begin)
        self.at += 1
        return text

    def _array(self, name: str, more: bool) -> None:
        """`NAME=(...)`, or `NAME+=(...)` for more of it."""
        self.at += 1
        words: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\r\n":
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = _or_end(self.text, self.text.find("\n", self.at))
            elif continued := CONTINUED.match(self.text, self.at):
                self.at = continued.end()
            else:
                before = self.at
                words += self._word(False)
                self.at += self.at == before  # an operator inside an array is no word of it
                if words and words[-1].endswith(")") and "(" not in words[-1]:
                    words[-1] = words[-1][:-1]
                    self.at -= 1
                    words = [word for word in words if word]
        self.at += 1
        if more:
            self._arrays[name] = self._arrays.get(name, []) + words
        elif not (self._depth and name in self._arrays):
            self._arrays[name] = words

    def _expansion(self) -> str:
        """What stands at a dollar sign, worked out; reading goes on behind it."""
        text, at = self.text, self.at
        if text.startswith("$((", at):
            raw = text[at : _closing(text, at + 1, "(", ")")]
            inner = NAME.sub(lambda name: self._variable(name[0]), re.sub(r"[${}]", "", raw[3:-2]))
            if len(inner) > MAX_ARITHMETIC_CHARACTERS:
                what = f"$((...)) has {len(inner):,} characters; the limit is {MAX_ARITHMETIC_CHARACTERS:,}"
                raise self._wrong(what, "Write its value instead")
            meant = _arithmetic(inner, raw)
        elif text.startswith("$(", at):
            raw = meant = text[at : _closing(text, at + 1, "(", ")")]
        elif text.startswith("${", at):
            raw = text[at : _closing(text, at + 1, "{", "}")]
            name, dash, default = re.fullmatch(r"(\w*)(:?-)?(.*)", raw[2:-1], re.DOTALL).groups()  # type: ignore[union-attr]
            if name not in self.variables and dash:
                meant = self._put_in(default)
            else:
                meant = raw if default and not dash else self._variable(name, raw)
        else:
            found = NAME.match(text, at + 1)
            raw = text[at : found.end() if found else at + 1]
            meant = self._variable(raw[1:], raw)
        self._count_in(len(meant) - len(raw))
        self.at += len(raw)
        return meant

    def _count_in(self, characters: int) -> None:
        self._put += max(0, characters)
        if self._put > MAX_EXPANSION_CHARACTERS:
            what = f"variables expand to more than {MAX_EXPANSION_CHARACTERS:,} characters"
            raise self._wrong(what, "A variable that is set from itself grows with every line: write its value instead")

    def _wrong(self, what: str, fix: str, at: int | None = None) -> ConfigError:
        line = self.text.count("\n", 0, self.at if at is None else at) + 1
        return ConfigError([Problem(f"{self.source}, line {line}", what, fix)])

    def _variable(self, name: str, unknown: str = "") -> str:
        if name in self.variables:
            self.used.add(name)
        return self.variables.get(name, unknown or name)

    def _put_in(self, text: str) -> str:
        """A text with its variables put in."""
        inner, found = Script(text, self.source), ""
        inner.variables, inner.used, inner._inside = self.variables, self.used, self._inside + 1
        if inner._inside > MAX_EXPANSION_DEPTH:
            raise self._wrong(
                f"defaults are nested more than {MAX_EXPANSION_DEPTH} levels deep", "Write the value instead"
            )
        while inner.at < len(text):
            if text[inner.at] == "$":
                found += inner._expansion()
            else:
                found += text[inner.at]
                inner.at += 1
        return found


def _declares(word: str) -> bool:
    return word in DECLARES or bool(ASSIGNMENT.fullmatch(word))


def _or_end(text: str, at: int) -> int:
    return at if at >= 0 else len(text)


def _closing(text: str, at: int, opens: str, closes: str) -> int:
    """The place behind the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(text)):
        depth += (text[place] == opens) - (text[place] == closes)
        if depth == 0:
            return place + 1
    return len(text)


def _arithmetic(text: str, raw: str) -> str:
    """A sum of whole numbers worked out; anything else stays as it was written."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return int(OPERATORS[type(node.op)](value(node.left), value(node.right)))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return raw
