"""The import budget, as a fact about `sys.modules`, not about time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "transformers", "accelerate", "datasets", "jinja2", "ruamel", "importlib.metadata", "rich"}


def loaded_after(code):
    script = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "code",
    [
        "import forgather",
        "import forgather.config.render, forgather.config.load, forgather.config.materialize",
        "from forgather import Project",
        "from forgather.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit: pass",
    ],
)
def test_importing_stays_light(code):
    modules = loaded_after(code)
    assert set() == {name for name in modules if name in HEAVY or name.split(".")[0] in HEAVY}


def test_a_project_loads_its_stages_when_they_are_used():
    stages = {"forgather.config.load", "forgather.config.materialize", "forgather.rules", "forgather.compatibility"}
    assert set() == stages & loaded_after("import forgather.project.project")


def test_the_check_sees_a_heavy_import():
    assert "jinja2" in loaded_after("import jinja2")
