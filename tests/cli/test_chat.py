"""`fgcli chat`: a conversation over a pipe, and Ctrl-C in a terminal."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.cli.commands.chat import Stop
from forgather.cli.main import main
from tests.cli.talking import DIALOGUES, make_bench
from tests.patience import patience
from tests.project.workbench import ROOT

FIRST, SECOND = (turn[1] for turn in DIALOGUES[0] if turn[0] == "user")


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("chatting") / "bench", ["full"])


@pytest.fixture
def talk(bench, monkeypatch, capsys):
    monkeypatch.chdir(bench)

    def told(lines, *words):
        capsys.readouterr()
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return main(["chat", *map(str, words)]), *capsys.readouterr()

    return told


def test_each_line_is_a_turn_and_the_model_sees_the_turns_before(talk, bench):
    status, out, err = talk([FIRST, "", SECOND, "/exit", "not read"], "full")

    assert (0, "two\nthree four\n") == (status, out)
    assert "(step 60, intact)" in err
    # The second answer is that of the whole conversation.
    assert (0, "three four\n") != talk([SECOND], "full")[:2]


def test_the_first_turn_is_what_generate_answers_and_a_later_one_what_transformers_does(talk, bench, capsys):
    assert 0 == main(["generate", "full", FIRST])
    generated = capsys.readouterr().out
    assert generated == talk([FIRST], "full")[1] == "two\n"
    tokenizer, model = AutoTokenizer.from_pretrained("full"), AutoModelForCausalLM.from_pretrained("full")
    messages = [{"role": role, "content": text} for role, text in DIALOGUES[0][:3]]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=64, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert talk([FIRST, SECOND], "full")[1].splitlines()[1] == tokenizer.decode(written, skip_special_tokens=True)


def test_reset_begins_again_and_save_writes_rows_for_training(talk, bench, tmp_path):
    from forgather.ml.data import chats

    file = tmp_path / "talk.jsonl"
    lines = [FIRST, f"/save {file}", "/reset", FIRST, SECOND, f"/save {file}", "/help"]

    status, out, err = talk(lines, "full", "--system", "Be kind.")

    assert 0 == status and 3 == len(out.splitlines()) and "a new conversation" in err and "/save FILE" in err
    assert out.splitlines()[0] == out.splitlines()[1]
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [3, 5] == list(map(len, rows)) and {"role": "system", "content": "Be kind."} == rows[0][0]
    assert rows[1][1:3] == rows[0][1:3] and 2 == len(chats(file))


@pytest.mark.matrix
def test_draws_repeat_with_the_seed_and_differ_from_answer_to_answer(talk):
    words = ["full", "--temperature", "9", "--max-new-tokens", "6", "--seed", "5"]

    first, again = (talk([FIRST, "/reset", FIRST], *words)[1] for _ in range(2))

    assert first == again and 2 <= len(first.splitlines()) and "seed 5" in talk([FIRST], *words)[2]
    torch.manual_seed(0)
    assert first != talk([FIRST, "/reset", FIRST], *words[:-1], "6")[1]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["/nonsense", FIRST], "[FG920]: there is no command '/nonsense'"),
        (["/save", FIRST], "[FG920]: /save needs the name of a file"),
        (["/save x", FIRST], "[FG920]: there is nothing to save yet"),
        (["a " * 200, FIRST], "[FG921]: the prompt has"),
        ([FIRST, "/save no/file"], "[FG418]: 'no/file' cannot be written"),
    ],
)
def test_a_line_that_cannot_be_answered_has_no_effect(lines, told, talk):
    status, out, err = talk(lines, "full")

    assert (1, "two\n") == (status, out) and told in err


def test_a_tokenizer_without_a_chat_template_is_refused(talk, bench):
    (bench / "base/chat_template.jinja").rename(bench / "hidden")
    try:
        status, out, err = talk([FIRST], "base")
    finally:
        (bench / "hidden").rename(bench / "base/chat_template.jinja")

    assert (1, "") == (status, out) and "[FG922]: the tokenizer has no chat template" in err
    assert "fgcli generate --raw" in err


def test_ctrl_c_asks_the_model_to_stop_and_a_second_one_ends_the_answer():
    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        stop.on_signal(2, None)
    with stop.during_answer():
        stop.on_signal(2, None)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            stop.on_signal(2, None)
    with stop.during_answer():
        assert not stop.requested


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(talk, monkeypatch):
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("forgather.cli.commands.chat.write_piece", write)

    status, _, err = talk([DIALOGUES[2][0][1], "/reset", FIRST], "full")

    assert 0 == status and "(stopped)" in err
    assert DIALOGUES[2][1][1].startswith(pieces[0]) and "".join(pieces).endswith("\ntwo\n")
    assert len("".join(pieces)) < len(DIALOGUES[2][1][1] + "\ntwo\n")


@pytest.mark.matrix
def test_ctrl_c_in_a_terminal_stops_the_answer_and_not_the_program(bench):
    """The answer is endless, because the model is not trained; the terminal is a real one."""
    leader, follower = pty.openpty()
    words = [sys.executable, "-m", "forgather", "chat", "base", "--max-new-tokens", "110"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    process = subprocess.Popen(
        words, cwd=bench, env=environment, stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    told = bytearray()
    try:
        wait_for(leader, told, b"> ")
        process.send_signal(signal.SIGINT)
        wait_for(leader, told, b"Ctrl-D or /exit ends")
        wait_for(leader, told, b"> ", after=b"ends the conversation")
        os.write(leader, b"a\n")
        wait_for(leader, told, b"> ", after=b"a\r\n")
        os.write(leader, b"\x04")
        assert 0 == process.wait(patience(30))
    finally:
        process.kill()
        os.close(leader)


def wait_for(leader, told, text, after=b""):
    """Reads from a terminal until a text appears behind another one."""
    end = time.monotonic() + patience(60)
    while text not in bytes(told).rpartition(after)[2] if after else text not in told:
        assert time.monotonic() < end, bytes(told).decode()
        told += os.read(leader, 4096)
