"""No secret is written or printed (guarantee S9)."""

import json
import os

import pytest

from forgather import redaction
from forgather.redaction import hide, is_secret, remember
from tests.project.workbench import fgcli, make_project

PLANTED = {f"SECRET_{number:02}": f"plantedvalue{number:02}xyz" for number in range(20)}
VALUES = list(PLANTED.values())
TOY = """\
import pathlib

class Trainer:
    class args:
        output_dir = "out"
    def __init__(self, run_dir, fails=False, **given):
        self.run_dir, self.fails, self.given = run_dir, fails, given
    def train(self):
        print("given", self.given)
        if self.fails:
            raise RuntimeError(f"refused: {self.given}")
        pathlib.Path(self.run_dir, "loss.jsonl").write_text("{}\\n")
"""
CONFIG = f"""\
-- set api_key = "{VALUES[10]}"
meta: {{output_dir: out}}
arguments: &arguments
  hub_token: {VALUES[0]}
  "wandb_api_key": "{VALUES[1]}"
  password: '{VALUES[2]}'
  nested: {{auth_token: {VALUES[3]}, x: 1}}
  client_secret: |
    {VALUES[4]}
  url: https://reader:{VALUES[5]}@example.org/data
  again: [the word {VALUES[0]} and {VALUES[5]}]
  from_env: !env SECRET_06
  token: !env SECRET_07
  listed: [!env SECRET_08 , x]
  used: [{{{{ api_key }}}}, 1]
  set_api_key: {{{{ api_key }}}}
  pad_token: "<pad>"
  eos_token: endoftextword
  num_memory_tokens: 16
  use_cls_token: true
  tokenizer: ordinarywords
main: !singleton:toy.py:Trainer
  run_dir: !var {{name: run_dir, default: x}}
  fails: false
  <<: *arguments
"""


@pytest.fixture(autouse=True)
def forgotten():
    before = dict(redaction._known)
    redaction._known.clear()
    yield
    redaction._known.clear()
    redaction._known.update(before)


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    folder = make_project(tmp_path / "p", {"templates/configs/a.yaml": CONFIG}, meta="name: P\ndefault_config: a\n")
    (folder / "toy.py").write_text(TOY)
    return folder


def shown(*words, cwd):
    done = fgcli(*words, cwd=cwd)
    return done.stdout + done.stderr, done


STATIC = [
    ["pp"], ["pp", "--map", "--json"], ["pp", "--annotate"], ["graph"], ["graph", "--format", "yaml"], ["blame"],
    ["graph", "--format", "json"], ["graph", "--format", "html"], ["graph", "--format", "mermaid"], ["check"],
    ["blame", "main.hub_token", "-v"], ["code"], ["code", "--verify"], ["targets"], ["trefs"],
    ["pp", "--set", f"arguments.hub_token={VALUES[11]}"], ["diff", "a", "a"],
]  # fmt: skip


@pytest.mark.parametrize("words", STATIC, ids=" ".join)
def test_a_static_command_shows_no_secret(project, words):
    text, done = shown("-t", "a", *words, cwd=project) if words[0] != "diff" else shown(*words, cwd=project)

    assert done.returncode in (0, 1)
    assert [] == [value for value in VALUES if value in text]
    if words == ["pp"]:
        for word in ('pad_token: "<pad>"', "eos_token: endoftextword", "num_memory_tokens: 16", "use_cls_token: true"):
            assert word in text
        assert "tokenizer: ordinarywords" in text


def files_with_secrets(folder, but):
    for file in folder.rglob("*"):
        if file.is_file() and file not in but:
            content = file.read_bytes()
            yield from (f"{file.relative_to(folder)}: {value}" for value in VALUES if value.encode() in content)


def test_a_run_writes_no_secret_and_what_it_lacks_is_told_when_it_is_repeated(project):
    given = {project / "templates/configs/a.yaml"}
    _, done = shown("-t", "a", "train", "--set", f"arguments.hub_token={VALUES[11]}", cwd=project)
    assert 0 == done.returncode, done.stderr
    assert [] == list(files_with_secrets(project, given))
    assert [] == [value for value in VALUES if value in done.stderr]
    (run,) = (project / "out/runs").glob("2*")
    redacted = json.loads((run / "run.json").read_text())["redacted"]
    assert {"config.yaml", "graph.yaml"} <= redacted.keys()

    text, done = shown("rerun", str(run), "--dry-run", cwd=project)
    assert 1 == done.returncode
    assert "secret" in text
    assert [] == [value for value in VALUES if value in text]


def test_an_error_shows_no_secret(project):
    text, done = shown("-t", "a", "train", "--set", "main.fails=true", cwd=project)
    assert 0 != done.returncode
    assert "refused" in text
    assert [] == [value for value in VALUES if value in done.stderr]


def test_what_is_constructed_shows_no_secret(project):
    for words in (["construct", "arguments"], ["construct", "arguments", "--json"]):
        text, done = shown("-t", "a", *words, cwd=project)
        assert 0 == done.returncode, done.stderr
        assert [] == [value for value in VALUES if value in text]
        assert "ordinarywords" in text


def test_a_run_folder_follows_the_umask(project):
    before = os.umask(0o022)
    try:
        _, done = shown("-t", "a", "train", cwd=project)
    finally:
        os.umask(before)
    (run,) = (project / "out/runs").glob("2*")
    assert (0, 0o755, 0o644) == (done.returncode, run.stat().st_mode & 0o777, (run / "run.json").stat().st_mode & 0o777)


@pytest.mark.parametrize(
    "name", ["hub_token", "HF_TOKEN", "token", "password", "db.password", "apiKey", "wandb_api_key", "clientSecret"]
)
def test_names_that_look_secret(name):
    assert is_secret(name, "abcdefgh1234")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_memory_tokens", "12345678"), ("use_cls_token", "true"), ("pad_token", "endoftext"), ("eos_token", "</s-long>"),
        ("tokenizer", "abcdefgh1234"), ("image_token", "picturehere"), ("sort_key", "abcdefgh1234"), ("token", "<s-long>"),
        ("password", "none"), ("key", "abcdefgh1234"), ("tokens_per_step", "12345678"), ("password", "{{x_password}}"),
    ],
)  # fmt: skip
def test_names_of_a_vocabulary_are_no_secrets(name, value):
    assert not is_secret(name, value)


def test_what_was_read_is_hidden_in_every_spelling():
    remember('quo"te<d>value', "HF_TOKEN")
    text = hide('plain quo"te<d>value, json quo\\"te<d>value, html quo"te&lt;d&gt;value')
    assert "te<d>" not in text and "te&lt;d" not in text


def test_a_path_or_a_small_number_of_the_environment_is_ordinary():
    remember("/data/mine", "DATA_DIR")
    remember("29500", "MASTER_PORT")
    assert "/data/mine 29500" == hide("/data/mine 29500")
    remember("/data/mine", "SECRET_FILE_PASSWORD")
    assert "(hidden) 29500" == hide("/data/mine 29500")
