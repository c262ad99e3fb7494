import platform
import subprocess
import sys

import pytest

from forgather.project.versions import VersionTable, installed_versions
from tests.project.workbench import ROOT


def test_the_table_lists_its_keys_and_reads_values():
    table = VersionTable()

    assert ["python", "torch", "transformers", "accelerate"] == list(table)
    assert 4 == len(table)
    assert platform.python_version() == table["python"]


def test_an_unknown_library_is_a_key_error():
    with pytest.raises(KeyError):
        VersionTable()["numpy"]


def test_a_library_that_is_not_installed_has_no_version():
    assert installed_versions(["no_such_distribution"])["no_such_distribution"] is None


def test_making_and_listing_the_table_looks_nothing_up():
    code = (
        "import sys; from forgather.project.versions import VersionTable; list(VersionTable());"
        "assert 'importlib.metadata' not in sys.modules; VersionTable()['python'];"
        "assert 'importlib.metadata' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
