"""`python -m trimtab`"""

from trimtab.cli import app

app(prog_name="trimtab")
