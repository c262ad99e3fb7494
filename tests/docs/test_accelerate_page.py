"""docs/accelerate.md names every setting that `accelerator_args` takes."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accelerate.md").read_text()
RULES = json.loads((ROOT / "forgather/ml/rules/accel_trainer.json").read_text())[0]["settings"]["accelerator_args"][
    "keys"
]


def names(keys, prefix=""):
    for name, rule in keys.items():
        yield from names(rule["keys"], f"{name}.") if "keys" in rule else [prefix + name]


def test_every_setting_has_a_row():
    rows = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in PAGE.splitlines() if line.startswith("| `")]
    written = set()
    for cells in rows:
        for cell in cells:
            first = cells[0].partition(".")[0]
            written.add(first + cell if cell.startswith(".") else cell)
    assert set() == set(names(RULES)) - written
