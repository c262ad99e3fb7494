"""`fgcli export`: what runs have trained, as other programs read it."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.cli.main import main
from tests.project.workbench import TINY_TRAINING, make_project

BASE = (
    TINY_TRAINING.replace("'out'", "'base'")
    .replace("hidden_size: 8", "hidden_size: 48")
    .replace("intermediate_size: 16", "intermediate_size: 96")
)
CHAT = """\
-- extends 'trainers/trainer.yaml'
[config_metadata]
    -- set ns.base_model = joinpath(project_dir, 'base')
    -- set ns.chat_template = 'alpaca'
    -- set ns.output_dir = joinpath(project_dir, '{name}')
[raw_dataset]
    -- include 'datasets/chat.yaml'
    paths: "{{{{ project_dir }}}}/chats.jsonl"
[sample_prompts]
    []
[dataset]
    train: *raw_dataset
[eval_dataset]
    ~
[trainer_args]
    == super()
    max_steps: {steps}
    per_device_train_batch_size: 10
    learning_rate: {rate}
    use_cpu: true
    eval_strategy: "no"
    save_strategy: steps
    save_steps: {steps}
"""
ADAPTED = (
    CHAT.format(name="adapted", steps=4, rate="1e-2") + "[adapter]\n    -- include 'adapters/lora.yaml'\n    r: 4\n"
)
QUESTIONS = [f"What is {n} and {n + 1}?" for n in range(10)]
ANSWERS = [f"It is {2 * n + 1}." for n in range(10)]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Compares fewer generated tokens than an export does, which is most of its time with models this small."""
    monkeypatch.setattr("forgather.ml.output_comparison._NEW_TOKENS", 3)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A project whose runs have trained a base model, the same model on ten dialogues, and an adapter."""
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    files = {
        "templates/configs/base.yaml": BASE,
        "templates/configs/chat.yaml": CHAT.format(name="chat", steps=90, rate="2e-2"),
        "templates/configs/adapted.yaml": ADAPTED,
        "chats.jsonl": "".join(json.dumps(chat) + "\n" for chat in chats),
        "rows.jsonl": "".join(json.dumps({"text": f"What is {i} and {i + 1}? It is so."}) + "\n" for i in range(40)),
    }
    folder = make_project(tmp_path_factory.mktemp("exported") / "bench", files)
    for name in ("base", "chat", "adapted"):
        assert 0 == main(["-p", str(folder), "-t", name, "train"])
    return folder


@pytest.fixture
def copied(project, tmp_path, monkeypatch):
    """A copy of the runs, in a working folder of its own. The base model stays where it is."""
    monkeypatch.chdir(tmp_path)
    for name in ("chat", "adapted", "base"):
        shutil.copytree(project / name, tmp_path / name)
    return tmp_path


def exported(capsys, *words):
    capsys.readouterr()
    status = main(["export", *map(str, words)])
    told = capsys.readouterr()
    return status, told.out, told.err.replace("\n  help:", ";")


def answers(folder):
    """What plain transformers answers, and whether each answer ends by itself."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt"
        )
        made = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
        found.append((tokenizer.decode(made, skip_special_tokens=True), made.tolist()))
    return found, model.generation_config.eos_token_id


def test_ten_dialogues_are_answered_by_plain_transformers_as_they_were_trained(copied, capsys):
    status, out, err = exported(capsys, copied / "chat", "for others", "--dtype", "float32")
    assert (0, "") == (status, "" if "for others" in out else out), err
    found, ends = answers(copied / "for others")
    assert ANSWERS == [text for text, _ in found]
    ends = [ends] if isinstance(ends, int) else ends
    assert all(ids[-1] in ends and not set(ids[:-1]) & set(ends) for _, ids in found)
    # The tokens of the model that the run itself saved at its end.
    assert found == answers(copied / "chat")[0]
    assert {"chat_template.jinja", "tokenizer.json", "generation_config.json", "export.json"} <= {
        file.name for file in (copied / "for others").iterdir()
    }
    assert 0 == exported(capsys, copied / "chat", "of the end", "--checkpoint", "model", "--dtype", "bfloat16")[0]
    assert AutoModelForCausalLM.from_pretrained("of the end").dtype == torch.bfloat16
    names = {file.name for file in (copied / "of the end").iterdir()}
    assert names == {file.name for file in (copied / "for others").iterdir()}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of the test's own call of peft
def test_an_adapter_is_merged_and_written_for_peft(copied, capsys):
    status, out, err = exported(capsys, copied / "adapted", "merged", "--checkpoint", "latest")
    assert 0 == status and "merged  " in out and "merged into its base model; --adapter" in err, err
    assert "compared    logits differ by at most " in err and "greedy ids of " in err and "base        " in err
    assert 0 == exported(capsys, copied / "adapted", "alone", "--adapter")[0]
    base = AutoModelForCausalLM.from_pretrained(
        json.loads(Path("alone/adapter_config.json").read_text())["base_model_name_or_path"]
    )
    merged, plain = AutoModelForCausalLM.from_pretrained("merged"), base.state_dict()
    assert any(not torch.equal(value, plain[name]) for name, value in merged.state_dict().items())
    loaded = PeftModel.from_pretrained(base, "alone")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert float((loaded(input_ids=ids).logits - merged(input_ids=ids).logits).abs().max()) <= 1e-5
    for folder in ("merged", "alone"):
        assert "### Response" in AutoTokenizer.from_pretrained(folder).chat_template
    # Without an option it is merged, and without a folder it is next to that of the run.
    status, out, _ = exported(capsys, copied / "adapted", "--json")
    told = json.loads(out)
    assert 0 == status and Path(told["into"]) == copied / "adapted-merged"
    assert told["facts"]["merge"]["logits_difference"] <= told["facts"]["merge"]["allowed"]
    assert set(told["files"]) == {file.name for file in (copied / "adapted-merged").iterdir()} - {"SHA256SUMS"}


def test_what_cannot_be_exported_is_one_sentence_and_leaves_nothing(copied, capsys, project):
    (copied / "full").mkdir()
    (copied / "full/file").touch()
    (copied / "a file").touch()
    shutil.copytree(copied / "chat", copied / "empty run", ignore=lambda *_: ["checkpoint-90", "model.safetensors"])
    before = sorted(copied.rglob("*"))
    for words, code, text in (
        (["chat", "new", "--merge"], "FG930", "holds a whole model, and no adapter"),
        (["chat", "new", "--adapter"], "FG930", "leave out --merge and --adapter"),
        (["adapted", "full", "--merge"], "FG677", "'full' is not empty"),
        (["chat", "full"], "FG677", "'full' is not empty"),
        (["chat", "a file"], "FG677", "'a file' is a file"),
        (["adapted", "adapted/checkpoint-4/in", "--merge"], "FG677", "is inside of the checkpoint"),
        (["adapted", "/proc/new", "--merge"], "FG677", "cannot be written"),
        (["chat", "/proc/new"], "FG677", "cannot be written"),
        (["chat", "new", "--max-shard-size", "huge"], "FG677", "'huge' is not a file size"),
        (["adapted", "new", "--merge", "--max-shard-size", "huge"], "FG677", "'huge' is not a file size"),
        (["empty run", "new"], "FG485", "has saved no checkpoint"),
        (["nowhere", "new"], "FG437", "nowhere"),
        (["chat", "new", "--gguf"], "FG936", "pip install 'forgather[gguf]'"),
        (["chat", "new", "--checkpoint", "7"], "FG485", "no checkpoint of step 7"),
    ):
        status, out, err = exported(capsys, *words)
        assert (1, "") == (status, out) and f"error[{code}]" in err and text in err, (words, err)
        assert "Traceback" not in err
    assert before == sorted(copied.rglob("*"))
    with pytest.raises(SystemExit):
        main(["export", "chat", "new", "--merge", "--adapter"])
    assert "not allowed with argument --merge" in capsys.readouterr().err


def test_a_base_that_was_trained_further_is_refused(copied, capsys, project):
    base = project / "base"
    model = AutoModelForCausalLM.from_pretrained(base)
    shutil.copytree(base, copied / "kept", dirs_exist_ok=True)
    try:
        model.lm_head.weight.data += 0.1
        model.save_pretrained(base)
        status, out, err = exported(capsys, "adapted", "new", "--merge")
    finally:
        shutil.rmtree(base)
        shutil.copytree(copied / "kept", base)
    assert (1, "") == (status, out) and "error[FG931]" in err and "was trained on '" in err
    assert not (copied / "new").exists()
