"""`fgcli data prepare` and `verify`: the tokens of a config in shards, which another config reads, and bad input."""

import json

import pytest

from forgather.cli.main import main
from tests.project.workbench import TINY_TRAINING, make_project

PREPARED = """\
-- extends 'configs/tiny.yaml'
[train_dataset]
    -- include 'datasets/prepared.yaml'
    folder: {{ joinpath(project_dir, 'tokens') }}
"""


@pytest.fixture
def fgcli(tmp_path, monkeypatch, capsys):
    """Returns a function that runs `fgcli` in a project and returns its status, output and reports."""
    rows = "".join(json.dumps({"text": f"row {number} " * (number % 9)}) + "\n" for number in range(120))
    files = {"templates/configs/tiny.yaml": TINY_TRAINING, "templates/configs/prepared.yaml": PREPARED}
    project = make_project(tmp_path / "project", {**files, "rows.jsonl": rows})
    monkeypatch.chdir(project)
    monkeypatch.setenv("FORGATHER_CACHE", str(tmp_path / "cache"))

    def run(*arguments):
        status = main([*arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


def test_the_rows_of_a_config_are_those_of_its_prepared_tokens(fgcli):
    status, told, _ = fgcli("-t", "tiny.yaml", "data", "prepare", "tokens", "--num-proc", "2", "--json")
    facts = json.loads(told)
    assert (0, facts["shards"]) == (status, facts["written"]) and facts["tokens_per_second"] > 0
    assert {"documents", "tokens", "bytes", "dtype", "vocab_size", "folder", "seconds"} < set(facts)
    show = ("data", "show", "--rows", "0:9", "--json")
    shown = [json.loads(fgcli("-t", config, *show)[1]) for config in ("tiny.yaml", "prepared.yaml")]
    assert shown[0]["rows"] and shown[0]["rows"] == shown[1]["rows"]
    status, told, _ = fgcli("-t", "tiny.yaml", "data", "prepare", "tokens")
    assert 0 == status and "all of them were there" in told and "datasets/prepared.yaml, folder: tokens" in told
    assert (0, True) == (
        (verified := fgcli("data", "verify", "tokens"))[0],
        "every byte is what was written" in verified[1],
    )


def test_one_document_is_not_documents(fgcli, tmp_path):
    (tmp_path / "project" / "rows.jsonl").write_text(json.dumps({"text": "a row"}) + "\n" + json.dumps({"text": "b"}))
    _, told, said = fgcli("-t", "tiny.yaml", "data", "prepare", "tokens", "--set", "eval")
    assert "tokens: 1 document, " in told and " bytes in 1 shard (" in told, told + said


def test_a_flipped_bit_is_found_by_verify_and_named(fgcli, tmp_path):
    fgcli("-t", "tiny.yaml", "data", "prepare", "tokens")
    shard = sorted((tmp_path / "project" / "tokens").glob("*.arrow"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    status, told, _ = fgcli("data", "verify", "tokens")
    assert 1 == status and f"[FG782] 'tokens/{shard.name}' is not what was written" in told
    status, told, _ = fgcli("data", "verify", "tokens", "--json")
    assert (1, [shard.name]) == (status, json.loads(told)["damaged"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["prepare"], "'fgcli data prepare' needs the folder of the shards"),
        (["show", "tokens"], "'fgcli data show' takes no folder 'tokens'"),
        (["show", "--num-proc", "2"], "--num-proc is no option of 'fgcli data show'"),
        (["prepare", "x", "--rows", "0:2"], "--rows is no option of 'fgcli data prepare'"),
        (["verify", "x", "--num-shards", "2"], "--num-shards is no option of 'fgcli data verify'"),
        (["prepare", "x", "--set", "tokenizer"], "tokenizer is made by forgather.ml.data.tokenizer:train_bpe, and"),
        (["prepare", "x", "--num-proc", "0"], "'0' is not a number from 1 on"),
    ],
)
def test_wrong_words_are_refused(fgcli, arguments, said):
    try:
        status, _, told = fgcli("-t", "tiny.yaml", "data", *arguments)
    except SystemExit as ended:
        assert 2 == ended.code
        return
    assert 0 != status and said in " ".join(told.split()) and "FG588" in told


def test_a_folder_that_is_not_there_is_one_sentence_at_its_line(fgcli):
    status, _, told = fgcli("-t", "prepared.yaml", "data", "show")
    assert 0 != status and "FG779" in told and "does not exist" in " ".join(told.split()) and "prepared.yaml:4" in told
