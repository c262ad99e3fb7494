import os

import pytest

from tests.project.workbench import fgcli, make_project

CONFIG = """\
dynamic_args:
  steps: {names: --steps, type: int}
  mode: {names: --mode, choices: [fast, slow]}
optimizer: {lr: 1}
main: 1
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    files = {"templates/configs/tiny.yaml": CONFIG, "templates/configs/broken.yaml": "main: {{ nope }}\n"}
    return make_project(tmp_path_factory.mktemp("complete") / "bench", files, meta="default_config: tiny\n")


def words(line, bench, tmp_path):
    answer = tmp_path / "answer"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    done = fgcli(cwd=bench, env=environment)
    assert (0, "") == (done.returncode, done.stdout), done.stderr
    return {word.strip() for word in answer.read_text().split("\n")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fgcli t", {"targets", "tlist", "train", "trefs", "trust"}),
        ("fgcli -t ", {"broken.yaml", "tiny.yaml"}),
        ("fgcli -t t", {"tiny.yaml"}),
        ("fgcli -t tiny train --st", {"--steps"}),
        ("fgcli train --st", {"--steps"}),
        ("fgcli pp --mode ", {"fast", "slow"}),
        ("fgcli construct o", {"optimizer"}),
        ("fgcli -t broken construct o", {""}),
        ("fgcli blame optimizer.", {"optimizer.lr"}),
        ("fgcli -t broken blame o", {""}),
        ("fgcli -t broken graph --form", {"--format"}),
        ("fgcli export RUN --me", {"--merge"}),
        ("fgcli graph --format ", {"tree", "yaml", "json", "html", "mermaid", "dot"}),
        ("fgcli explain FG41", {f"FG41{n}" for n in (1, 2, 3, 4, 5, 6, 8, 9)}),
        ("fgcli new ", {"project", "config", "--kind", "--data", "--columns", "--model"}),
        ("fgcli ls temp", {"templates/"}),
        ("fgcli generate run --checkpoint ", {"best", "last", "model"}),
        ("fgcli chat temp", {"templates/"}),
        ("fgcli -p tem", {"templates/"}),
        ("fgcli -p nowhere -t ", {""}),
        ("fgcli 'unclosed", {""}),
    ],
)
def test_the_shell_is_offered(line, expected, bench, tmp_path):
    offered = words(line, bench, tmp_path)

    assert expected == offered - {"--help", "--json", "-h", "--extends"}


def test_files_are_offered_for_the_output(bench, tmp_path):
    assert {"meta.yaml"} == words("fgcli pp -o me", bench, tmp_path)
    assert os.path.isfile(bench / "meta.yaml")
