"""An unknown key is answered as `trimtab convert` would translate it: the names are those of its tables."""

from __future__ import annotations

import subprocess
import sys

from trimtab.config.foreign_names import AUTOMATIC, SAME, our_keys
from trimtab.config.reference import STAGES, slot, use_schema
from trimtab.convert import script, trl_table


def test_the_names_are_those_of_the_tables_of_scripts_and_of_trl() -> None:
    found: dict[str, dict[str, set[str]]] = {"mapped": {}, "automatic": {}}
    for rule in (*script.RULES, *trl_table.RULES):
        names = {name for name in rule.names if name != rule.key.split(".")[-1] and "." not in name}
        if rule.key and names:
            found[rule.outcome].setdefault(rule.key, set()).update(names)
    assert found["mapped"] == {key: set(names.split()) for key, names in SAME.items()}
    assert found["automatic"] == {key: set(names.split()) for key, names in AUTOMATIC.items()}


def test_every_name_leads_to_one_key_and_the_key_is_there() -> None:
    names = [name for table in (SAME, AUTOMATIC) for text in table.values() for name in text.split()]
    assert all(len(our_keys(name)) == 1 for name in names)
    for key in {**SAME, **AUTOMATIC}:
        present = []
        for schema in STAGES.values():
            with use_schema(schema):
                present.append(slot(key.split(".")) is not None)
        assert any(present), key


def test_reading_a_config_does_not_import_convert() -> None:
    code = (
        "import sys; from trimtab.config.advice import unknown_key; unknown_key('learn.learning_rate');"
        "assert not any(name.startswith('trimtab.convert') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
