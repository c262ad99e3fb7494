"""No secret is written or printed (guarantee S9)."""

import inspect
import json
import os
import re
from dataclasses import fields

import pytest
import transformers

from forgather import redaction
from forgather.ml import TrainingArguments
from forgather.ml.trainer.snapshot import without_secrets_of
from forgather.redaction import hidden, hide, hide_known, is_secret, known_hidden, note_secrets, remember
from forgather.secret_names import strength_of
from tests.docs.lessons import import_libraries, run_fgcli
from tests.forked import run_forked
from tests.project.workbench import ROOT, fgcli, make_project
from tests.reliability.forks import in_child

PLANTED = {f"SECRET_{number:02}": f"plantedvalue{number:02}xyz" for number in range(50)}
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
-- set token = "{VALUES[47]}"
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
  password_file: /etc/ordinary
  headers: {{X-Api-Key: {VALUES[20]}, Accept: all}}
  Authorization: Bearer {VALUES[21]}
  auth_token: {{value: {VALUES[22]}, type: ordinarytype}}
  bearer: {VALUES[23]}
  connection: "Server=s;Password={VALUES[24]};Database=ordinarybase"
  words: ["--api-key={VALUES[25]}", "--api-key", "{VALUES[26]}", --steps, ordinarysteps]
  query: https://example.org/d?token={VALUES[27]}&api_key={VALUES[28]}&sig={VALUES[29]}&part=ordinarypart
  credentials:
    user: ordinaryuser
    first: {VALUES[30]}
    more: [{VALUES[31]}]
  named: &named {VALUES[32]}
  access_token: *named
  passphrase: correct horse {VALUES[33]}
  long_password: {VALUES[34]}{"abcdefghij" * 12}
  inner: {{{{ token }}}}
  pw: {VALUES[39]}
  hook: {{slack_webhook_url: "https://hooks.example.org/{VALUES[35]}"}}
main: !singleton:toy.py:Trainer
  run_dir: !var {{name: run_dir, default: x}}
  fails: false
  <<: *arguments
"""

OTHER = CONFIG.replace(VALUES[0], VALUES[36]).replace(VALUES[21], VALUES[37]).replace(VALUES[22], VALUES[38])
REAL = """\
import logging, sys, warnings
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

def model(hub_token):
    settings = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, use_auth=hub_token, **settings))

def rows():
    return [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8

class Talks(TrainerCallback):
    def __init__(self, secret):
        self.secret = secret
    def state(self):
        return {"args": {}, "attributes": {"secret": self.secret}}
    def on_log(self, args, state, control, logs=None, **kwargs):
        print("printed", self.secret)
        sys.stderr.write(f"written {self.secret}\\n")
        logging.getLogger("theirs").warning("logged %s", self.secret)
        warnings.warn(f"warned {self.secret}")
        if logs is not None:
            logs["note"] = f"noted {self.secret}"
"""
TRAINING = f"""\
meta: {{output_dir: out_real}}
main: !singleton:forgather.ml:Trainer
  model: !singleton:real.py:model {{hub_token: !env SECRET_40 }}
  args: !singleton:forgather.ml:TrainingArguments
    output_dir: out_real
    logging_dir: &run_dir !var {{name: run_dir, default: x}}
    run_name: !env SECRET_41
    max_steps: 2
    save_steps: 2
    logging_steps: 1
    use_cpu: true
  train_dataset: !singleton:real.py:rows []
  callbacks:
    - !singleton:real.py:Talks [!env SECRET_43 ]
    - !singleton:forgather.ml.json_logger:JsonLogger {{run_dir: *run_dir}}
    - !singleton:forgather.ml.tb_logger:TBLogger
      experiment_info: {{note: !env SECRET_44 , split: !env SPLIT , db_password: step, passcode: 2, headers: {{X-Api-Key: {VALUES[45]}}}, text: "Password={VALUES[46]};x=1"}}
    - !singleton:forgather.ml.callbacks:RunSummaryCallback {{run_dir: *run_dir}}
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
    folder = make_project(
        tmp_path / "p",
        {"templates/configs/a.yaml": CONFIG, "templates/configs/b.yaml": OTHER},
        meta="name: P\ndefault_config: a\n",
    )
    (folder / "toy.py").write_text(TOY)
    return folder


def shown(*words, cwd):
    done = fgcli(*words, cwd=cwd)
    return done.stdout + done.stderr, done


STATIC = [
    ["pp"], ["pp", "--map", "--json"], ["pp", "--annotate"], ["graph"], ["graph", "--format", "yaml"], ["blame"],
    ["graph", "--format", "json"], ["graph", "--format", "html"], ["graph", "--format", "mermaid"], ["check"],
    ["blame", "main.hub_token", "-v"], ["code"], ["code", "--verify"], ["targets"], ["trefs"],
    ["pp", "--set", f"arguments.hub_token={VALUES[11]}"], ["diff", "a", "a"], ["diff", "a", "b"], ["diff", "a", "b", "--json"],
    ["check", "--json"], ["check", "--set", f"main.api_key={VALUES[11]}"], ["targets", "--json"], ["blame", "--json"],
    ["graph", "--set", f"main.bearer={{value: {VALUES[11]}}}"], ["check", f"--api-key={VALUES[12]}"], ["graph", "-x", f"--token={VALUES[13]}"],
]  # fmt: skip


@pytest.mark.parametrize("words", STATIC, ids=" ".join)
def test_a_static_command_shows_no_secret(project, words):
    done = run_forked(words if words[0] == "diff" else ["-t", "a", *words], project)
    text = done.stdout + done.stderr

    assert done.returncode in (0, 1, 2)
    assert "Traceback" not in text
    assert [] == [value for value in VALUES if value in text]
    if words == ["pp"]:
        for word in ('pad_token: "<pad>"', "eos_token: endoftextword", "num_memory_tokens: 16", "use_cls_token: true"):
            assert word in text
        assert "tokenizer: ordinarywords" in text and "password_file: /etc/ordinary" in text
        for word in ("type", "base", "steps", "part", "user"):
            assert f"ordinary{word}" in text


def files_with_secrets(folder, but):
    for file in folder.rglob("*"):
        if file.is_file() and file not in but:
            content = file.read_bytes()
            yield from (f"{file.relative_to(folder)}: {value}" for value in VALUES if value.encode() in content)


def test_a_run_writes_no_secret_and_what_it_lacks_is_reported_when_it_is_repeated(project):
    given = {project / "templates/configs/a.yaml", project / "templates/configs/b.yaml"}
    _, done = shown("-t", "a", "train", "--set", f"arguments.hub_token={VALUES[11]}", cwd=project)
    assert 0 == done.returncode, done.stderr
    assert [] == list(files_with_secrets(project, given))
    assert [] == [value for value in VALUES if value in done.stdout + done.stderr]
    (run,) = (project / "out/runs").glob("2*")
    redacted = json.loads((run / "run.json").read_text())["redacted"]
    assert {"config.yaml", "graph.yaml"} <= redacted.keys()

    text, done = shown("rerun", str(run), "--dry-run", cwd=project)
    assert 1 == done.returncode
    assert "secret" in text
    assert [] == [value for value in VALUES if value in text]


def test_a_training_writes_no_secret_into_any_file(project, monkeypatch):
    """Checkpoints, event files, report, summary, metrics, samples, and what user's code prints, logs and warns of."""
    (project / "real.py").write_text(REAL)
    (project / "templates/configs/real.yaml").write_text(TRAINING)
    monkeypatch.setenv("SPLIT", "loss")
    before = set(project.rglob("*"))
    import_libraries()
    with (project.parent / "printed.txt").open("w+b") as output:
        ended = in_child(run_fgcli, ["fgcli", "-t", "real", "train"], project, output.fileno())
        output.seek(0)
        text = output.read().decode()
    assert 0 == ended.value, text + ended.error
    written = {file.name for file in (project / "out_real").rglob("*")}
    assert {"training_args.json", "trainer_state.json", "report.html", "summary.json", "metrics.jsonl"} <= written
    assert [name for name in written if name.startswith("events.out")]
    assert [] == list(files_with_secrets(project, before))
    assert [] == [value for value in VALUES if value in text]
    checkpoint = project / "out_real/checkpoint-2"
    assert "(hidden)" in (checkpoint / "training_args.json").read_text()
    # What the run goes on from has its own words, `loss` and `step`, though they are values of secrets, too.
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert [1, 2] == [line["step"] for line in state["log_history"] if "loss" in line]
    metrics = [json.loads(line) for line in next(project.rglob("metrics.jsonl")).read_text().splitlines()]
    assert [1, 2] == [line["step"] for line in metrics if "loss" in line]

    done = run_forked(["ckpt", "show", "out_real/checkpoint-2", "--json"], project)
    assert 0 == done.returncode, done.stderr
    assert [] == [value for value in VALUES if value in done.stdout + done.stderr]


def test_an_error_shows_no_secret(project):
    text, done = shown("-t", "a", "train", "--set", "main.fails=true", cwd=project)
    assert 0 != done.returncode
    assert "refused" in text
    assert [] == [value for value in VALUES if value in text]


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


def test_harmless_names_of_the_library_and_of_transformers_hide_nothing():
    names = {"password_file", "token_ids", "max_tokens", "num_tokens", "tokenizer", "pad_token", "token_type_ids"}
    for folder in ("templatelib", "projects"):
        for file in (ROOT / folder).rglob("*.yaml"):
            names.update(re.findall(r"(?:^[ -]*|[{,]\s*)[\"']?([\w.-]+)[\"']?\s*:", file.read_text(), re.MULTILINE))
    names.update(field.name for made in (transformers.TrainingArguments, TrainingArguments) for field in fields(made))
    names.update(*(made().to_dict() for made in (transformers.GenerationConfig, transformers.LlamaConfig)))
    names.update(inspect.signature(transformers.PreTrainedTokenizerBase.__call__).parameters)
    assert len(names) > 300
    assert ["hub_token"] == sorted(name for name in names if strength_of(name))


SPELLED = {
    "a query": "https://h/p?token=SEEN1234&x=1",
    "a short name in a query": "https://h/p?x=1&sig=SEEN1234",
    "a user": "https://me:SEEN1234@h/p",
    "a header": "X-Api-Key: SEEN1234",
    "a header of two words": "Authorization: Bearer SEEN1234",
    "a connection": "'Server=x;Password=SEEN1234;Database=y'",
    "words": "['--api-key', 'SEEN1234']",
    "words in lines": "- --api-key\n- SEEN1234\n",
    "a word with its value": '["--api-key=SEEN1234"]',
    "a mapping": "auth_token: {value: SEEN1234, type: x}",
    "a mapping in lines": "auth_token:\n  value: SEEN1234\n  type: x\n",
    "a list": "api_keys:\n- SEEN1234\nother: 1\n",
    "a default of a variable": "hub_token: !env {name: HUB, default: SEEN1234}",
    "an anchor": "x: &a SEEN1234\ny: 1\npassword: *a",
    "an option": "run --password SEEN1234 --default: x",
    "a record": "env: [{name: HF_TOKEN, value: SEEN1234}]",
    "a record in lines": "- name: HF_TOKEN\n  value: SEEN1234\n",
    "a name of two words": "{'api key': SEEN1234}",
    "a cookie": "Set-Cookie: session=SEEN1234",
    "an argument": "password: !call:mod:decode [SEEN1234]",
    "JSON in JSON": '{"text": "{\\"password\\": \\"SEEN1234\\"}"}',
    "a number of JSON": '{"password": 12345678, "x": 1}',
    "several words": "passphrase: correct horse SEEN1234",
    "a famous form": "pushed with ghp_" + "SEEN1234" * 5,
}
CODE = {
    "an annotation": 'def f(password: str = "SEEN1234"): ...',
    "an environment": 'os.environ["HF_TOKEN"] = "SEEN1234"',
    "a call": "login(token='SEEN1234x')",
    "a comparison": 'if args.password == "SEEN1234": ...',
    "a dict": 'api_keys = {"one": "SEEN1234"}',
}


@pytest.mark.parametrize("name", [*SPELLED, *CODE])
def test_a_secret_is_hidden_however_it_is_spelled(name):
    text = {**SPELLED, **CODE}[name]
    note_secrets(text, is_code=name in CODE)
    shown = hide(text, is_code=name in CODE, is_document=True)
    assert "SEEN" not in shown and "12345678" not in shown and "(hidden)" in shown
    assert "JSON" not in name or json.loads(shown)


@pytest.mark.parametrize(
    "text",
    [
        "password_file: /etc/x", "token: {{ token }}", "hub_token: !env HF_TOKEN", "hub_token: !var hub_token",
        "password: !call:os.environ.get [MY_PASSWORD]", "the token: a word of a text", "found 'password': expected a text",
        "https://h/p?page=12&next=abcdefgh", "git@github.com:a/b", "secret_tool.py:12: here", "{token: &t *other}",
        "api_key: null", "token: <|endoftext|>", "tokens: [12345678, 23456789]", "https://git@host/x",
    ],
)  # fmt: skip
def test_what_is_not_secret_stays(text):
    assert text == hide(text, is_document=True)


def test_a_secret_is_never_shown_in_part():
    remember("SECRETtok")
    remember("baseline")
    remember("A1" + "b2c3d4e5" * 12)
    assert "(hidden) (hidden)" == hide("SECRETtokl1 xSECRETtok9")
    assert "(hidden) baselines (hidden)_1 out/(hidden)" == hide("baseline baselines baseline_1 out/baseline")
    cut = "A1" + "b2c3d4e5" * 12
    assert [] == [text for text in (f"{cut[:40]}...", f"...{cut[-9:]}", cut[:60], f"{cut[:9]}…") if "b2c" in hide(text)]
    assert {"a": "x\n(hidden)"} == json.loads(hide(json.dumps({"a": "x\nSECRETtok"})))


def test_data_keep_their_shape():
    remember("SECRETtok")
    data = {
        "hub_token": "abcdefgh", "args": ["--api-key", "abcdefgh", "x"], "n": 12345678, "password": 12345678,
        "auth_token": {"value": "abcdefgh", "file": "/etc/x"}, "SECRETtok": 1.5, "url": "https://h?sig=abcdefgh",
    }  # fmt: skip
    assert {
        "hub_token": "(hidden)", "args": ["--api-key", "(hidden)", "x"], "n": 12345678, "password": "(hidden)",
        "auth_token": {"value": "(hidden)", "file": "/etc/x"}, "(hidden)": 1.5, "url": "https://h?sig=(hidden)",
    } == hidden(data)  # fmt: skip


def test_keys_and_numbers_are_not_secrets_because_they_are_spelled_like_one():
    remember("train", "SPLIT")
    remember("test", "db_password")
    remember("1234", "passcode")
    data = {"train_batch_size": 1234, "log_history": [{"train": 0.1234, "test": [881234]}], "password_loss": 0.1234}
    assert data == hidden(data) == known_hidden(data)
    assert {"best": "out/train", "by": "(hidden)"} == hidden({"best": "out/train", "by": "test"}, is_named=True)
    assert "def test_train(): 'test'" == hide_known("def test_train(): 'test'", is_named=True, keeps_words=True)


def test_the_history_of_a_long_run_is_judged_by_each_name_once(monkeypatch):
    remember("SECRETtok", "password")
    judged = []
    monkeypatch.setattr(redaction, "hide_known", lambda text, **_: judged.append(text) or text)
    data = [{"loss": 1.5, "grad_norm": 0.5, "step": step} for step in range(100)] + [{"SECRETtok_loss": 1.5}]
    assert data == hidden(data)
    assert ["SECRETtok_loss"] == judged


@pytest.mark.parametrize("name", ["tokenizer.json", "training_state.json", "config.json"])
def test_a_file_of_a_checkpoint_works_without_the_secrets_of_its_texts(name):
    remember("test", "db_password")
    remember("1234", "passcode")
    content = {"vocab": {"test": 1, "testing": 2}, "rng": [8812349911, 0.1234], "by": "test"}
    shown = json.loads(without_secrets_of(name, json.dumps(content).encode()))
    assert {**content, "by": "test" if name == "tokenizer.json" else "(hidden)"} == shown


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_memory_tokens", "12345678"), ("use_cls_token", "true"), ("pad_token", "endoftext"), ("eos_token", "</s-long>"),
        ("tokenizer", "abcdefgh1234"), ("image_token", "picturehere"), ("sort_key", "abcdefgh1234"), ("token", "<s-long>"),
        ("password", "none"), ("key", "abcdefgh1234"), ("tokens_per_step", "12345678"), ("password", "{{x_password}}"),
        ("PWD", "/home/me/project"),
    ],
)  # fmt: skip
def test_names_of_a_vocabulary_are_not_secrets(name, value):
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
