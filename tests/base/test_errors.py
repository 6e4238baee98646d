"""What is said of errors that others raise."""

from __future__ import annotations

from trimtab.base.errors import first_line
from trimtab.base.package import installed_version


def test_an_error_is_told_in_a_line_also_where_it_says_nothing() -> None:
    assert first_line(ValueError("\n one\ntwo")) == "one"
    assert first_line(RuntimeError()) == "RuntimeError"


def test_the_version_of_a_package_that_is_not_there_is_none() -> None:
    assert installed_version("pytest") and installed_version("no-such-package") is None
