"""Where the models of several configs go: each has a folder of its own, or says that it shares one."""

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.project.targets import trainer_output_dir
from tests.project.workbench import make_project

BARE = "-- extends 'trainers/trainer.yaml'\n"
NAMED = BARE + "\n[config_metadata]\n    == super()\n    -- set ns.config_name = 'First Try'\n"
SHARED = NAMED + "    -- set ns.output_dir = project_dir ~ '/shared'\n"


@pytest.fixture
def bench(tmp_path):
    def make(**configs):
        files = {f"templates/configs/{name.replace('__', '/')}.yaml": text for name, text in configs.items()}
        return make_project(tmp_path / "bench", files)

    return make


def collisions(folder, config, **variables):
    found = check_project(Project(config, folder, **variables)).findings
    return [(one.span.file.rpartition("/")[2], one.span.line) for one in found if one.code == "FG421"]


def test_configs_without_a_name_have_that_of_their_file(bench):
    folder = bench(small=BARE, ablations__small=BARE)
    found = [trainer_output_dir(Project(name, folder).graph) for name in ("small", "ablations/small")]
    assert [f"{folder}/output_models/small", f"{folder}/output_models/ablations.small"] == found
    assert [] == collisions(folder, "small")


def test_a_name_that_is_given_twice_is_an_error_of_both_at_the_line_that_gives_it(bench):
    folder = bench(first=NAMED, copy=NAMED, other=BARE)
    assert [("first.yaml", 5)] == collisions(folder, "first")
    assert [("copy.yaml", 5)] == collisions(folder, "copy")
    assert [] == collisions(folder, "other")


def test_a_name_that_is_that_of_another_file_is_met_from_both_sides(bench):
    folder = bench(first_try=BARE, copy=NAMED)
    assert [("copy.yaml", 5)] == collisions(folder, "copy")
    assert [("first_try.yaml", 1)] == collisions(folder, "first_try")


def test_a_folder_that_is_named_may_be_shared(bench):
    folder = bench(first=SHARED, copy=SHARED)
    assert [] == collisions(folder, "first")


def test_an_option_that_names_the_folder_settles_it(bench):
    folder = bench(first=NAMED, copy=NAMED)
    assert [] == collisions(folder, "first", output_dir=f"{folder}/output_models/first_try")


def test_what_is_kept_of_other_configs_follows_their_files(bench):
    folder = bench(first=NAMED, copy=NAMED)
    assert [("first.yaml", 5)] == collisions(folder, "first")
    (folder / "templates/configs/copy.yaml").write_text(BARE)
    assert [] == collisions(folder, "first")
