"""`fgcli serve`: refusals; and answers, where the extra `serve` is installed."""

import json
import socket
from importlib.util import find_spec

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.cli.commands import serve
from forgather.cli.main import main
from tests.cli.talking import DIALOGUES, make_bench

QUESTION = DIALOGUES[2][0][1]
needs_extra = pytest.mark.skipif(find_spec("fastapi") is None, reason="the extra 'serve' is not installed")


def test_a_missing_extra_is_named(capsys, monkeypatch):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "fastapi" else name)

    assert 1 == main(["serve", "full"])
    told = capsys.readouterr().err
    assert "[FG927]: 'fgcli serve' needs fastapi, not installed" in told and "forgather[serve]" in told


def test_an_address_without_a_key_and_a_port_in_use_are_refused(capsys, monkeypatch):
    monkeypatch.setattr(serve, "_NEEDED", ())
    monkeypatch.delenv(serve.KEY, raising=False)

    assert 1 == main(["serve", "full", "--host", "0.0.0.0"])
    assert "[FG927]: 0.0.0.0 can be reached from other machines" in capsys.readouterr().err
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert 1 == main(["serve", "full", "--port", str(other.getsockname()[1])])
    assert "[FG927]: 127.0.0.1:" in capsys.readouterr().err
    assert 1 == main(["serve", "full", "--port", "70000"])
    assert "[FG927]: 127.0.0.1:70000 cannot be served" in capsys.readouterr().err
    assert 1 == main(["serve", "full", "--max-new-tokens", "0"])
    assert "[FG925]: max-new-tokens is 0" in capsys.readouterr().err


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("serving") / "bench", ["full"])


def client_of(folder, **changes):
    from fastapi.testclient import TestClient

    from forgather.ml.generation.generator import Generator
    from forgather.ml.generation.server import Served, make_app

    tokenizer = AutoTokenizer.from_pretrained(folder)
    for name, value in changes.pop("tokenizer", {}).items():
        setattr(tokenizer, name, value)
    generator = Generator(AutoModelForCausalLM.from_pretrained(folder), tokenizer)
    given = {"generator": generator, "name": "it", "key": "secret", "max_new_tokens": 64, "options": {}, **changes}
    return TestClient(make_app(Served(**given)), headers={"Authorization": "Bearer secret"})


def user(text):
    return [{"role": "user", "content": text}]


def ask(client, messages=None, **body):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    given = {} if "prompt" in body else {"messages": user(QUESTION) if messages is None else messages}
    return client.post(path, json={"model": "it", **given, **body})


def text_of(answer):
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


@needs_extra
def test_greedy_answers_are_those_of_generate(bench, capsys, monkeypatch):
    monkeypatch.chdir(bench)
    client = client_of("full")
    questions = [turns[0][1] for turns in DIALOGUES]
    assert 0 == main(["generate", "full", *questions, "--json"])
    expected = json.loads(capsys.readouterr().out)["answers"]
    assert 0 == main(["generate", "full", "--raw", QUESTION, "--max-new-tokens", "7", "--json"])
    (raw,) = json.loads(capsys.readouterr().out)["answers"]

    found = [ask(client, user(question)).json() for question in questions]

    assert [one["answer"] for one in expected] == [one["choices"][0]["message"]["content"] for one in found]
    usages = [(one["usage"]["prompt_tokens"], one["usage"]["completion_tokens"]) for one in found]
    assert usages == [(len(one["prompt_ids"]), len(one["ids"])) for one in expected]
    assert ["stop"] * 3 == [one["choices"][0]["finish_reason"] for one in found]
    completed = ask(client, prompt=QUESTION, max_tokens=7)
    assert (raw["answer"], raw["finish"]) == (text_of(completed), completed.json()["choices"][0]["finish_reason"])
    cut = ask(client, max_tokens=2).json()
    assert ("length", 2) == (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"])


@needs_extra
def test_the_token_ids_are_those_of_generate(bench, monkeypatch):
    """The ids themselves, taken where transformers' server calls the model."""
    from forgather.ml.generation.generator import Sampling
    from forgather.ml.generation.prompt import PromptForm, Question
    from forgather.ml.generation.server import _Seeded

    client, seen = client_of(bench / "full"), []
    generate = _Seeded.generate
    monkeypatch.setattr(_Seeded, "generate", lambda self, **inputs: seen.append(generate(self, **inputs)) or seen[-1])
    assert 200 == ask(client).status_code
    tokenizer, model = (kind.from_pretrained(bench / "full") for kind in (AutoTokenizer, AutoModelForCausalLM))
    from forgather.ml.generation.generator import Generator

    prompt = PromptForm(tokenizer=tokenizer, form="chat").ids(Question(text=QUESTION))
    answer = Generator(model, tokenizer).answer(prompt, Sampling(max_new_tokens=64))
    assert [[*prompt, *answer.ids]] == seen[0].tolist()


@needs_extra
def test_an_answer_is_streamed(bench):
    client = client_of(bench / "full")

    lines = ask(client, stream=True).text.split("\n")

    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in events]
    assert DIALOGUES[2][1][1] == "".join(pieces) and "stop" == events[-1]["choices"][0]["finish_reason"]


@needs_extra
def test_draws_depend_on_the_seed_and_a_temperature_has_an_effect(bench):
    client = client_of(bench / "full")
    drawn = {"temperature": 9, "max_tokens": 8}

    first, again, other = (text_of(ask(client, **drawn, seed=seed)) for seed in (1, 1, 2))

    assert first == again != other and text_of(ask(client, temperature=0)) == DIALOGUES[2][1][1]


@needs_extra
def test_the_system_message_of_the_training_is_used_unless_the_request_has_one(bench):
    tokens = [
        ask(client_of(bench / "full", system=system), messages).json()["usage"]["prompt_tokens"]
        for system in (None, "Be kind.")
        for messages in (user(QUESTION), [{"role": "system", "content": "S"}, *user(QUESTION)])
    ]
    assert tokens[0] < tokens[1] == tokens[3] < tokens[2]


@needs_extra
def test_a_tokenizer_without_a_chat_template_answers_400_with_the_fix(bench):
    client = client_of(bench / "full", tokenizer={"chat_template": None})

    refused = ask(client)

    assert 400 == refused.status_code
    assert "[FG922] the tokenizer has no chat template" in refused.json()["error"]["message"]
    assert "chat_template" in refused.json()["error"]["message"]
    assert 200 == ask(client, prompt=QUESTION).status_code


@needs_extra
def test_requests_need_the_key_and_other_models_are_refused(bench):
    client = client_of(bench / "full")

    assert [401, 401] == [
        client.get("/v1/models", headers={"Authorization": value}).status_code for value in ("", "Bearer other")
    ]
    assert 200 == client.get("/health", headers={"Authorization": ""}).status_code
    assert ["it"] == [one["id"] for one in client.get("/v1/models").json()["data"]]
    for other in ("/etc", "gpt2", "it@main", "it:a.gguf"):
        assert 400 == client.post("/load_model", json={"model": other}).status_code, other
        assert 400 == ask(client, model=other).status_code
    assert '"ready"' in client.post("/load_model", json={"model": "it"}).text
    for path in ("/reset", "/v1/responses", "/v1/systemone", "/v1/audio/transcriptions"):
        assert 404 == client.post(path, json={}).status_code
    assert 200 == ask(client).status_code


@needs_extra
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"n": 2}, "n: 2 is not supported"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": -1}, "[FG925] the temperature is -1"),
        ({"temperature": "hot"}, "not well formed"),
        ({"max_tokens": -3}, "[FG925]"),
        ({"max_tokens": 0}, "[FG925]"),
        ({"messages": []}, "[FG920] there are no messages"),
        ({"messages": user("a " * 200)}, "[FG921] the prompt has"),
        ({"messages": [{"content": "a"}]}, "not well formed"),
        ({"prompt": ""}, "[FG920] the prompt is empty"),
        ({"prompt": ["a", "b"]}, "[FG920]"),
    ],
)
def test_a_request_that_would_be_answered_otherwise_is_refused(body, told, bench):
    refused = ask(client_of(bench / "full"), **body)

    assert 400 == refused.status_code and told in refused.json()["error"]["message"]
