"""Facts that are cached between commands belong to the code that made them: no part of it is left out of the key."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sources import PACKAGE, sources  # noqa: E402

from forgather.config._jinja.renderer import _COMPILING  # noqa: E402
from forgather.project.fact_cache import _CODE  # noqa: E402

COMPILER = "forgather.config._jinja.compiler"


def test_every_package_of_the_stages_and_of_projects_is_part_of_the_key_of_project_facts():
    folders = {file.parent for name in ("config", "project") for file in (PACKAGE / name).rglob("*.py")}
    assert set() == folders - {Path(os.path.normpath(folder)) for folder in _CODE}


def test_every_module_that_the_compiler_of_templates_uses_is_part_of_the_key_of_compiled_templates():
    compiler = next(source for source in sources() if source.name == COMPILER)
    used = {part for part in compiler.text.split() if part.startswith("forgather.config._jinja.")}
    names = {part.rpartition(".")[2] for part in used} - {"origins"}
    assert set() == names - set(_COMPILING)
    assert set() == {name for name in _COMPILING if not (PACKAGE / f"config/_jinja/{name}.py").is_file()}
