"""`fgcli generate`: the answers of a trained model are those of plain transformers and peft."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from forgather.cli.main import main
from forgather.ml.generation.generator import Generator, Sampling
from forgather.ml.generation.prompt import PromptForm, Question, chat_ids, raw_ids
from forgather.ml.models import from_config
from tests.cli.talking import ADAPTED, CONFIG, DIALOGUES, OTHERS, make_bench, rows
from tests.matrix import thinned
from tests.project.workbench import make_project

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
QUESTION = "What comes after one?"


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return make_bench(tmp_path_factory.mktemp("talking") / "bench")


@pytest.fixture(autouse=True)
def there(bench, monkeypatch):
    monkeypatch.chdir(bench)
    return bench


def asked(capsys, *words):
    capsys.readouterr()
    status = main(["generate", *map(str, words), "--json"])
    told = capsys.readouterr()
    return json.loads(told.out) if status == 0 else told.err.replace("\n  help:", ";")


def ids_of(found):
    return [answer["ids"] for answer in found["answers"]]


def plain(folder, messages, adapter=None, **options):
    """The ids that transformers and peft give with the documented calls alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**prompt, max_new_tokens=64, do_sample=False, **options)
    return prompt["input_ids"][0].tolist(), written[0, prompt["input_ids"].shape[1] :].tolist()


def user(text):
    return [{"role": "user", "content": text}]


def test_greedy_answers_are_those_of_transformers(there, capsys):
    questions = [turns[0][1] for turns in DIALOGUES]
    expected = [plain("full", user(question)) for question in questions]

    by_model = asked(capsys, "full", *questions, "--checkpoint", "model")
    by_checkpoint = asked(capsys, "full/checkpoint-60", *questions)

    assert [list(pair) for pair in expected] == [[one["prompt_ids"], one["ids"]] for one in by_model["answers"]]
    assert ids_of(by_model) == ids_of(by_checkpoint) and (None, 60) == (by_model["step"], by_checkpoint["step"])
    # The answers are those of the training data, up to the token at which the turn ends.
    end = AutoTokenizer.from_pretrained("full").convert_tokens_to_ids("<|im_end|>")
    assert [turns[1][1] for turns in DIALOGUES] == [one["answer"] for one in by_model["answers"]]
    assert all((end, "stop") == (one["ids"][-1], one["finish"]) for one in by_model["answers"])


@pytest.mark.matrix
def test_an_earlier_checkpoint_answers_otherwise(there, capsys):
    early, late = (asked(capsys, "full", QUESTION, "--checkpoint", word) for word in (15, "latest"))

    assert (15, 60) == (early["step"], late["step"]) and ids_of(early) != ids_of(late)


def test_an_adapter_answers_as_peft_does_and_merged_as_it_does(there, capsys):
    questions = [turns[0][1] for turns in OTHERS]
    expected = [plain("full", user(question), adapter="adapted")[1] for question in questions]

    found = {
        words: asked(capsys, *words.split(), *questions)
        for words in (
            "adapted --checkpoint model",
            "adapted --checkpoint model --merged",
            "adapted/checkpoint-60",
            "adapted/checkpoint-60 --merged",
        )
    }

    assert [expected] * 4 == [ids_of(one) for one in found.values()]
    assert [turns[1][1] for turns in OTHERS] == [one["answer"] for one in found["adapted/checkpoint-60"]["answers"]]
    # A negative control: the base model gives other answers.
    assert expected != [plain("full", user(question))[1] for question in questions]
    assert [(True, False), (True, True)] * 2 == [
        (one["adapter"]["verified"], one["adapter"]["merged"]) for one in found.values()
    ]


def test_the_prompt_is_rendered_as_in_training_and_begins_once(there, bench):
    tokenizer = AutoTokenizer.from_pretrained(bench / "full")
    from transformers import PreTrainedTokenizerFast

    from forgather.ml.data.chat_template import render, set_chat_template
    from forgather.ml.data.turn_tokens import chat_tokens
    from tests.ml.chat_cases import BOS, begin_adding

    for template in ("chatml", "llama3", "gemma3", "mistral"):
        made = set_chat_template(begin_adding(), template)
        assert isinstance(made, PreTrainedTokenizerFast) and made("a")["input_ids"][0] == made.bos_token_id
        messages = [*user("One?"), {"role": "assistant", "content": "Two."}]
        trained = chat_tokens(made, render(made, messages))
        ids = chat_ids(made, messages[:1])
        assert trained.ids[: trained.turns[0][0]] == ids
        assert ids == made.apply_chat_template(messages[:1], add_generation_prompt=True)["input_ids"]
        assert ids.count(made.bos_token_id) == (template != "chatml")
        # Tokenized as any other text, the prompt would begin twice.
        text = render(made, messages[:1], add_generation_prompt=True).text
        assert made(text)["input_ids"].count(made.bos_token_id) == 1 + (template != "chatml")
        assert raw_ids(made, f"{BOS}One") == raw_ids(made, "One") == made("One")["input_ids"]
    assert raw_ids(tokenizer, "One") == tokenizer("One")["input_ids"]


def test_a_text_is_continued_as_it_is_with_raw(there, capsys):
    found = asked(capsys, "full", "--raw", QUESTION, "--max-new-tokens", 5)

    tokenizer, model = AutoTokenizer.from_pretrained("full"), AutoModelForCausalLM.from_pretrained("full")
    prompt = tokenizer(QUESTION, return_tensors="pt")
    expected = model.generate(**prompt, max_new_tokens=5, do_sample=False)[0].tolist()
    (answer,) = found["answers"]
    assert ("raw", expected) == (found["form"], answer["prompt_ids"] + answer["ids"])


def test_draws_are_those_of_transformers_with_the_seed(there, capsys):
    words = ["full", QUESTION, "--temperature", 5, "--top-k", 40, "--top-p", 0.95, "--max-new-tokens", 8]
    first, again, other = (asked(capsys, *words, "--seed", seed) for seed in (3, 3, 4))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained("full")
    prompt = torch.tensor([first["answers"][0]["prompt_ids"]])
    torch.manual_seed(3)
    expected = model.generate(prompt, do_sample=True, temperature=5.0, top_k=40, top_p=0.95, max_new_tokens=8)

    assert ids_of(first) == ids_of(again) == [expected[0, prompt.shape[1] :].tolist()]
    assert ids_of(first) != ids_of(other)
    # Without a seed, one is drawn and told.
    told = asked(capsys, *words)
    assert ids_of(told) == ids_of(asked(capsys, *words, "--seed", told["sampling"]["seed"]))


def test_streamed_pieces_are_the_text(bench):
    tokenizer = AutoTokenizer.from_pretrained(bench / "full")
    generator = Generator(AutoModelForCausalLM.from_pretrained(bench / "full"), tokenizer)
    prompt = PromptForm(tokenizer=tokenizer, form="chat").ids(Question(text=DIALOGUES[2][0][1]))
    pieces = []

    answer = generator.answer(prompt, Sampling(), write=pieces.append)
    stopped = generator.answer(prompt, Sampling(), stopped=lambda: True)

    assert DIALOGUES[2][1][1] == answer.text == "".join(pieces) and len(pieces) > 3
    assert ("interrupted", 1) == (stopped.finish, len(stopped.ids)) and answer.ids[:1] == stopped.ids


def test_prompts_of_a_file_and_of_the_standard_input(there, capsys, monkeypatch, tmp_path):
    (tmp_path / "q.jsonl").write_text(rows(DIALOGUES) + json.dumps({"prompt": QUESTION}) + "\n")
    (tmp_path / "q.txt").write_text(f"{QUESTION}\n\n{QUESTION}\n")

    found = asked(capsys, "full", "--prompts", tmp_path / "q.jsonl")["answers"]
    assert ["three four", "seven", "é\n b — c"] == [one["expected"] for one in found[:3]]
    assert [one["expected"] for one in found[:3]] == [one["answer"] for one in found[:3]]
    assert "two" == found[3]["answer"] and "expected" not in found[3]
    assert ["two"] * 2 == [one["answer"] for one in asked(capsys, "full", "--prompts", tmp_path / "q.txt")["answers"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\n"))
    assert "two" == asked(capsys, "full", "-")["answers"][0]["answer"]


def test_answers_are_printed_and_what_was_used_is_a_note(there, capsys):
    assert 0 == main(["generate", "full", QUESTION])
    told = capsys.readouterr()
    assert "two\n" == told.out
    assert "(step 60, intact)" in told.err and "rendered by the chat template" in told.err
    assert 0 == main(["generate", "full", QUESTION, "a <|im_end|>", "--max-new-tokens", "1"])
    told = capsys.readouterr()
    assert told.out.startswith(f"> {QUESTION}\n") and "\n> a <|im_end|>\n" in told.out
    assert "reads '<|im_end|>' in the prompt as special tokens" in told.err and "was cut after" in told.err


def test_the_system_message_and_the_options_of_the_training_are_used(there, capsys, tmp_path):
    copied = Path(shutil.copytree(there / "full", tmp_path / "out"))
    (run,) = (copied / "runs").glob("2*")
    graph = (run / "graph.yaml").read_text()
    assert "bad_rows: refuse" in graph and "train_on: assistant" in graph
    graph = graph.replace("bad_rows: refuse", "bad_rows: refuse\n  system: Be kind.", 1)
    (run / "graph.yaml").write_text(graph.replace("train_on:", "template_options: {x: 1}\n  train_on:", 1))

    found, given, without = (
        asked(capsys, copied, QUESTION, *words) for words in ([], ["--system", "Own."], ["--system", ""])
    )

    assert ["Be kind.", "Own.", None] == [one["system"] for one in (found, given, without)]
    tokenizer = AutoTokenizer.from_pretrained(copied)
    assert "<|im_start|>system\nBe kind.<|im_end|>" in tokenizer.decode(found["answers"][0]["prompt_ids"])
    assert len({len(one["answers"][0]["prompt_ids"]) for one in (found, given, without)}) == 3


NET = """\
from transformers import LlamaConfig, LlamaForCausalLM
from forgather.ml.models import from_config

class Net(LlamaForCausalLM):
    pass

def make(tokenizer):
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
    return Net(config)
"""
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
OF_THE_RECORD = CONFIG.replace("max_steps: 60", "max_steps: 2").replace("save_steps: 15", "save_steps: 2")
OF_THE_RECORD = OF_THE_RECORD.replace("BASE", "base").replace("NAME.jsonl", "full.jsonl")


@pytest.mark.parametrize("kind", thinned(["own class", "base without a name"], lambda kind: kind == "own class"))
def test_the_record_builds_what_the_files_do_not_say(kind, there, capsys, tmp_path, monkeypatch):
    """A class of the project, and a base model that was not loaded: built by the run's own config, if it is trusted."""
    make = "net.py:make" if kind == "own class" else "forgather.ml.models:from_config"
    arguments = "tokenizer: *tokenizer" + ("" if kind == "own class" else "\n    config: *model_config")
    sizes = f"!singleton:transformers:LlamaConfig@model_config\n    {SIZES}"
    blocks = f"[model_config]\n    {sizes}\n[model]\n    !singleton:{make}@model\n    {arguments}\n"
    text = OF_THE_RECORD + blocks + (ADAPTED if kind != "own class" else "")
    folder = make_project(tmp_path / "own", {"templates/configs/a.yaml": text.replace("NAME", "out"), "net.py": NET})
    for name in ("base", "full.jsonl"):
        (folder / name).symlink_to(there / name)
    monkeypatch.setenv("FORGATHER_TRUST", f"{folder}/")
    assert 0 == main(["-p", str(folder), "-t", "a", "train"])

    found = {word: asked(capsys, folder / "out", QUESTION, "--checkpoint", word) for word in ("last", "model")}
    assert ids_of(found["last"]) == ids_of(found["model"])
    (answer,) = found["last"]["answers"]
    prompt = torch.tensor([answer["prompt_ids"]])
    written = read_plainly(folder / "out", kind).generate(prompt, max_new_tokens=256, do_sample=False)
    assert answer["ids"] == written[0, prompt.shape[1] :].tolist()[: len(answer["ids"])]
    if kind == "own class":
        monkeypatch.delenv("FORGATHER_TRUST")
        assert "[FG440]" in asked(capsys, folder / "out", QUESTION)
    else:
        assert found["last"]["adapter"]["verified"]
    shutil.rmtree(folder / "out/runs")
    told = asked(capsys, folder / "out", QUESTION)
    assert ("[FG923]: the model in" if kind == "own class" else "[FG926]: the adapter in") in told


def read_plainly(folder, kind):
    """The model of a folder, read without a record: the class is Llama's, and the base model has random weights."""
    if kind == "own class":
        return LlamaForCausalLM.from_pretrained(folder)
    from peft import PeftModel

    base = from_config(LlamaConfig(**SIZES), tokenizer=AutoTokenizer.from_pretrained(folder))
    return PeftModel.from_pretrained(base, folder)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere", "a"], "[FG437]: 'nowhere' does not exist"),
        (["full", "a", "--checkpoint", "7"], "[FG485]: the run"),
        (["base", "a", "--checkpoint", "7"], "[FG485]: 'base' is a model without the record of a run"),
        (["full"], "[FG920]: there is no prompt"),
        (["full", " "], "[FG920]: the prompt is empty"),
        (["full", "caf\udce9"], "[FG920]: the text is not in UTF-8"),
        (["full", "caf\udce9", "--raw"], "[FG920]: the text is not in UTF-8"),
        (["full", "a", "--system", "caf\udce9"], "[FG920]: the text is not in UTF-8"),
        (["full", "--prompts", "none.txt"], "[FG920]: the prompts in 'none.txt' cannot be read: No such file"),
        (["full", "--prompts", "bad.jsonl"], "[FG920]: bad.jsonl:2: the line is not a JSON object"),
        (["full", "--prompts", "answers.jsonl"], "[FG920]: answers.jsonl:1: the conversation has no message to answer"),
        (
            ["full", "--raw", "--prompts", "full.jsonl"],
            "[FG920]: full.jsonl:1: the prompt is a conversation, and --raw",
        ),
        (["full", "a " * 200], "[FG921]: the prompt has 2"),
        (["bare", "a", "--chat"], "[FG922]: the tokenizer has no chat template"),
        (["bare", "a", "--system", "s"], "[FG922]"),
        (["full", "a", "--raw", "--system", "s"], "[FG920]: a text that is continued as it is has no system message"),
        (["silent", "a"], "[FG923]: LlamaForSequenceClassification is not a model that writes texts"),
        (["unknown", "a"], "[FG923]: the model in 'unknown' cannot be loaded: 'Net' is not a class of transformers"),
        (["torn", "a"], "[FG923]: the model in 'torn' cannot be loaded: 'lm_head.weight' is missing"),
        (["untold", "a"], "[FG924]: 'untold' has no tokenizer"),
        (["small", "a"], "[FG924]: the tokenizer makes token"),
        (["full", "a", "--temperature", "-1"], "[FG925]: the temperature is -1.0"),
        (["full", "a", "--temperature", "nan"], "[FG925]"),
        (["full", "a", "--top-p", "0"], "[FG925]: top-p is 0.0"),
        (["full", "a", "--top-k", "0"], "[FG925]: top-k is 0"),
        (["full", "a", "--max-new-tokens", "0"], "[FG925]"),
        (["full", "a", "--seed", "-1"], "[FG925]"),
        (["full", "a", "--temperature", "0", "--top-p", "0.5"], "[FG925]: temperature 0 takes the most likely"),
        (["homeless", "a"], "[FG926]: the base model '/nowhere/at/all' of the adapter"),
        (["another", "a"], "[FG926]: the adapter in 'another' was trained on"),
        (["full", "a", "--merged"], "[FG929]: 'full/checkpoint-60' has no adapter"),
    ],
)
def test_bad_input_is_one_sentence(words, told, folders, capsys):
    found = asked(capsys, *words)

    assert isinstance(found, str) and told in found and "Traceback" not in found


@pytest.fixture(scope="module")
def folders(bench):
    """Folders that are copies of the model, each with one fault; a link to each is in the bench."""

    def copy(name, of="full", **changes):
        folder = bench / name
        shutil.copytree(bench / of, folder, ignore=shutil.ignore_patterns("runs", "checkpoint-*"))
        for file, change in changes.items():
            path = folder / f"{file}.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        return folder

    (copy("bare") / "chat_template.jinja").unlink()
    copy("silent", config={"architectures": ["LlamaForSequenceClassification"]})
    copy("unknown", config={"architectures": ["Net"]})
    drop_weight(copy("torn"), "lm_head.weight")
    for file in (untold := copy("untold")).glob("tokenizer*"):
        file.unlink()
    (untold / "chat_template.jinja").unlink()
    shrink(copy("small"))
    copy("homeless", "adapted", base_model={"name": "/nowhere/at/all"}, adapter_config={"base_model_name_or_path": ""})
    copy("another", "adapted", base_model={"digest": "0" * 32})
    (bench / "bad.jsonl").write_text('{"prompt": "a"}\n[1\n')
    (bench / "answers.jsonl").write_text('{"messages": [{"role": "assistant", "content": "a"}]}\n')
    return bench


def drop_weight(folder, name):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file({key: value for key, value in weights.items() if key != name}, folder / "model.safetensors")


def shrink(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(20)
    model.save_pretrained(folder)
