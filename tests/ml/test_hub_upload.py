"""Uploads to the Hub, against a small server on this machine that speaks the endpoints that `huggingface_hub` calls."""

import base64
import json
import logging
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from forgather.errors import TrainingError
from forgather.ml import Trainer
from forgather.ml.trainer.argument_checks import SettingError
from tests.matrix import thinned
from tests.ml.fixtures import rows, tiny_llama

TOKEN = "hf_abcdefghijklmnopqrstuvwxyz0123"


class Hub(BaseHTTPRequestHandler):
    """Keeps the files of each commit, by repository and path."""

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.server.asked.append(self.path)
        self.answer([] if "/tree/" in self.path else {"id": "me/model", "sha": "0" * 40, "siblings": []})

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"] or 0))
        server.tokens.add(self.headers.get("Authorization"))
        if server.broken:
            self.answer({"error": "broken"}, status=403)
        elif self.path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            kinds = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]
            self.answer({"files": kinds})
        elif "/commit/" in self.path:
            lines = [json.loads(line) for line in body.splitlines()]
            server.messages += [line["value"]["summary"] for line in lines if line["key"] == "header"]
            for line in lines:
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            self.answer(
                {"commitUrl": "https://huggingface.co/me/model/commit/0", "commitOid": "0" * 40, "success": True}
            )
        elif self.path == "/api/repos/create":
            server.created.append(json.loads(body))
            self.answer({"url": "https://huggingface.co/me/model"})
        else:
            self.answer({"errors": [], "warnings": []})

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.messages, server.tokens, server.broken = {}, [], [], set(), False
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def trained(settings, **given):
    words = {
        "save_strategy": "steps",
        "save_steps": 2,
        "push_to_hub": True,
        "hub_model_id": "me/model",
        "hub_token": TOKEN,
        "hub_always_push": True,
        **given,
    }
    trainer = Trainer(tiny_llama(), settings(**words), train_dataset=rows())
    trainer.train()
    return trainer


def test_the_model_is_uploaded_at_the_end(hub, settings, caplog):
    caplog.set_level(logging.WARNING)
    trainer = trained(settings, hub_strategy="end", hub_private_repo=True)
    weights = (trainer.saved_to / "model.safetensors").read_bytes()
    assert weights == hub.files["model.safetensors"]
    assert {"config.json", "model.safetensors", "README.md"} <= hub.files.keys()
    assert not any("checkpoint-" in name or "optimizer" in name or "trainer_state" in name for name in hub.files)
    assert ["End of training"] == hub.messages
    assert "me" == hub.created[0]["organization"] and "private" == hub.created[0]["visibility"]
    assert {f"Bearer {TOKEN}"} == hub.tokens
    card = hub.files["README.md"].decode()
    assert "library_name" in card and "| steps | 4 |" in card
    assert "the model is uploaded to me/model (private), end" in caplog.text
    assert TOKEN not in caplog.text and TOKEN not in card


@pytest.mark.parametrize(
    ("strategy", "places"),
    thinned(
        [
            ("every_save", [""]),
            ("checkpoint", ["", "last-checkpoint/"]),
            ("all_checkpoints", ["", "checkpoint-2/", "checkpoint-4/"]),
        ],
        lambda strategy, places: strategy == "checkpoint",
    ),
)
def test_checkpoints_are_uploaded_by_strategy(hub, settings, strategy, places):
    trained(settings, hub_strategy=strategy)
    assert "Training in progress, step 2" in hub.messages and "Training in progress, step 4" in hub.messages
    found = {name.rpartition("/")[0] for name in hub.files}
    assert {place.rstrip("/") for place in places} == found
    for place in places[1:]:
        assert f"{place}optimizer.safetensors" in hub.files and f"{place}manifest.json" in hub.files


def test_a_failure_is_one_line_with_the_command_and_never_the_end_of_the_run(hub, settings, caplog):
    caplog.set_level(logging.WARNING)
    hub.broken = True
    trainer = trained(settings, hub_strategy="end", hub_revision="try")
    assert (trainer.saved_to / "model.safetensors").exists() and 4 == trainer.state.global_step
    (line,) = [one for one in caplog.messages if "the upload failed" in one]
    assert f"hf upload me/model {trainer.saved_to}" in line and "--revision try" in line
    assert TOKEN not in caplog.text


def test_without_network_the_run_is_not_affected(settings, caplog, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    trainer = trained(settings)
    assert (trainer.saved_to / "model.safetensors").exists()
    assert 1 <= sum("the upload failed" in one for one in caplog.messages)


def test_what_can_be_known_is_refused_before_the_run(settings, monkeypatch):
    with pytest.raises(TrainingError, match="FG618.*'not/a/name' is no name of a repository"):
        trained(settings, hub_model_id="not/a/name")
    monkeypatch.setattr("forgather.ml.trainer.hub_upload.get_token", lambda: None)
    with pytest.raises(TrainingError, match="FG618.*there is no token") as caught:
        trained(settings, hub_token=None)
    assert "hf auth login" in caught.value.hint
    with pytest.raises(SettingError, match="FG814.*writes no model that could be uploaded"):
        trained(settings, save_strategy="no")


def test_the_token_is_in_no_record(hub, settings):
    trainer = trained(settings, hub_strategy="end")
    args = trainer.args
    assert TOKEN == args.hub_token == args.replace(seed=1).hub_token
    for text in (repr(args), args.to_json_string(), str(args.to_sanitized_dict())):
        assert TOKEN not in text
    for file in trainer.saved_to.rglob("*"):
        assert not file.is_file() or TOKEN.encode() not in file.read_bytes()
