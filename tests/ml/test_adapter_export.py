"""Exports of adapters: merged, and for peft. What is written equals what was trained, or nothing is written."""

import dataclasses
import functools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, LoraModel, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgather.errors import CheckpointError
from forgather.ml.adapters import as_adapter
from forgather.ml.checkpoint.export_folder import ExportDraft, refuse_place
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.classifiers import classifier_from_pretrained
from forgather.ml.data import DataFileError, load_tokenizer
from forgather.ml.models import ModelSourceError, from_pretrained
from forgather.ml.output_comparison import compare, outputs_of
from forgather.ml.trained_adapter import ExportError, TrainedAdapter
from forgather.ml.trainer.adapter_export import _tokenizer, export_adapter, export_merged
from tests.matrix import thinned
from tests.ml.fixtures import rows, tiny_llama
from tests.ml.test_adapter_checkpoints import run
from tests.ml.test_adapters import KINDS, SEED, gpt2

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing", "ignore:.*fan_in_fan_out", "ignore:.*tie_word_embeddings"
)
ALL_KINDS = {
    **KINDS,
    "all of it": {"r": 2, "use_dora": True, "use_rslora": True, "modules_to_save": ["embed_tokens"], "bias": "all"},
}
QUICK = ("DoRA",)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Compares fewer generated tokens than an export does, which is most of its time with models this small."""
    monkeypatch.setattr("forgather.ml.output_comparison._NEW_TOKENS", 3)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a base model, in which each training runs once."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_llama().save_pretrained(folder / "base")
    return folder


@pytest.fixture
def base(place):
    return place / "base"


@pytest.fixture
def once(place, base):
    """Trains an adapter on the base once for all tests of this module; returns the model and the adapter."""

    def train(kind):
        if kind not in TRAINED:
            TRAINED[kind] = trained(place / kind, base, ALL_KINDS[kind])
        return TRAINED[kind]

    return train


TRAINED = {}


def adapter_of(folder, base, settings, *, is_checkpoint=True, **options):
    make = base if callable(base) else lambda: from_pretrained(base, **options)
    folder = folder / "checkpoint-4" if is_checkpoint else folder
    return TrainedAdapter(
        folder=folder, is_checkpoint=is_checkpoint, make_base=make, adapter=as_adapter(settings), seed=SEED
    )


def trained(folder, base, settings, **options):
    make = base if callable(base) else lambda: from_pretrained(base, **options)
    trainer, _ = run(folder, make, settings, max_steps=4, seed=SEED)
    return trainer.model.eval(), adapter_of(folder, base, settings, **options)


def logits(model, ids=None):
    with torch.no_grad():
        return model.eval()(input_ids=rows(2)[1]["input_ids"][None] if ids is None else ids).logits.float()


@pytest.mark.parametrize("kind", thinned(list(ALL_KINDS), lambda kind: kind in QUICK))
def test_a_merged_adapter_is_the_trained_model_for_plain_transformers(tmp_path, base, once, kind):
    model, adapter = once(kind)
    found = export_merged(adapter, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5
    # A negative control: the base model gives other logits.
    assert float((logits(from_pretrained(base)) - logits(model)).abs().max()) > 1e-3
    assert found["facts"]["merge"]["equal_greedy_ids"] == found["facts"]["merge"]["prompts"] >= 3
    assert found["facts"]["base"]["name"] == str(base) and len(found["facts"]["base"]["digest"]) == 32
    assert json.loads((tmp_path / "merged/export.json").read_text()) == found["facts"]
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float32"
    assert {"model.safetensors", "generation_config.json", "SHA256SUMS"} <= set(os.listdir(tmp_path / "merged"))


@pytest.mark.parametrize(
    ("kind", "is_checkpoint"),
    thinned(
        [(kind, is_checkpoint) for kind in ALL_KINDS for is_checkpoint in (True, False)],
        lambda kind, is_checkpoint: (kind, is_checkpoint) == ("PiSSA", True),
    ),
)
def test_an_exported_adapter_is_the_trained_model_for_plain_peft(tmp_path, base, place, once, kind, is_checkpoint):
    model, _ = once(kind)
    adapter = adapter_of(place / kind, base, ALL_KINDS[kind], is_checkpoint=is_checkpoint)
    export_adapter(adapter, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base)
    loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5
    facts = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert facts["base_model_name_or_path"] == str(base)
    assert json.loads((tmp_path / "adapter/base_model.json").read_text())["digest"]


def test_a_merge_into_bfloat16_is_added_in_float32_and_rounded_once(tmp_path, base):
    _, adapter = trained(tmp_path / "out", base, KINDS["LoRA"], dtype="bfloat16")
    exact = export_merged(adapter, tmp_path / "exact", dtype="float32")
    found = export_merged(adapter, tmp_path / "merged")
    assert (["bfloat16"], ["float32"]) == (found["facts"]["dtype"], exact["facts"]["dtype"])
    whole, rounded = (load_file(tmp_path / name / "model.safetensors") for name in ("exact", "merged"))
    assert all(torch.equal(value.bfloat16(), rounded[name]) for name, value in whole.items())
    assert found["facts"]["written"]["logits_difference"] > 1e-5 >= exact["facts"]["written"]["logits_difference"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", thinned(["head", "tokens"], lambda kind: kind == "head"))
def test_tied_weights_stay_one_or_become_two(tmp_path, kind):
    settings = {"r": 2, "modules_to_save": ["lm_head"]} if kind == "head" else {"r": 2, "trainable_token_indices": [3]}
    model, adapter = trained(tmp_path / "out", gpt2, settings)
    export_merged(adapter, tmp_path / "merged")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5
    assert loaded.config.tie_word_embeddings == (kind == "tokens")


@pytest.mark.matrix
def test_a_model_that_the_config_wrapped_itself_is_exported(tmp_path, base):
    def wrapped():
        return get_peft_model(from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    model, adapter = trained(tmp_path / "out", wrapped, None)
    export_adapter(adapter, tmp_path / "adapter")
    export_merged(adapter, tmp_path / "merged")
    for loaded in (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"),
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged"),
    ):
        assert float((logits(loaded) - logits(model)).abs().max()) <= 1e-5


# What is refused


def test_another_base_is_refused_and_leaves_nothing(tmp_path, place, once):
    once("LoRA")
    tiny_llama(seed=3).save_pretrained(tmp_path / "other")
    before = sorted(tmp_path.iterdir())
    for export in (export_merged, export_adapter):
        with pytest.raises(ExportError, match=r"was trained on '.*base' \(digest .*\), .* makes '.*other'") as refused:
            export(adapter_of(place / "LoRA", tmp_path / "other", KINDS["LoRA"]), tmp_path / "new")
        assert refused.value.code == "FG931"
    assert before == sorted(tmp_path.iterdir())


def test_a_merge_that_differs_is_an_error_and_leaves_nothing(tmp_path, once, monkeypatch):
    _, adapter = once("LoRA")
    before = sorted(tmp_path.iterdir())
    merge = LoraModel.merge_and_unload

    def wrong(model):
        merged = merge(model)
        merged.model.layers[1].self_attn.q_proj.weight.data[0, 0] += 0.01
        return merged

    with monkeypatch.context() as patched:
        patched.setattr(LoraModel, "merge_and_unload", wrong)
        with pytest.raises(
            ExportError, match="the merged model in memory is not the model that was trained"
        ) as refused:
            export_merged(adapter, tmp_path / "new")
    assert refused.value.code == "FG933" and before == sorted(tmp_path.iterdir())


def test_a_file_that_was_written_wrong_is_an_error_and_leaves_nothing(tmp_path, once, monkeypatch):
    _, adapter = once("LoRA")
    digested = ExportDraft.written_chunks

    def corrupt(draft, name, chunks):
        found = list(digested(draft, name, chunks))
        if name.endswith(".safetensors"):
            last = bytearray(found[-1])
            last[-2] ^= 0x40
            found[-1] = bytes(last)
        return found

    monkeypatch.setattr(ExportDraft, "written_chunks", corrupt)
    for export in (export_merged, export_adapter):
        with pytest.raises(ExportError) as refused:
            export(adapter, tmp_path / "new")
        assert refused.value.code == "FG933" and not list(tmp_path.iterdir())


def test_an_interrupted_export_leaves_nothing_and_a_killed_one_is_removed_by_the_next(tmp_path, once):
    _, adapter = once("LoRA")
    before = sorted(tmp_path.iterdir())

    class Interrupting(LocalStorage):
        def rename(self, old, new):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_merged(adapter, tmp_path / "new", storage=Interrupting())
    assert before == sorted(tmp_path.iterdir())
    if (child := os.fork()) == 0:

        class Killing(LocalStorage):
            def rename(self, old, new):
                os._exit(9)

        torch.set_num_threads(1)
        export_merged(adapter, tmp_path / "new", storage=Killing())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert not (tmp_path / "new").exists() and len(list(tmp_path.glob(".exporting-new-*"))) == 1
    export_merged(adapter, tmp_path / "new")
    assert [*before, tmp_path / "new"] == sorted(tmp_path.iterdir(), key=lambda path: (path.name == "new", path))


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, once):
    _, adapter = once("LoRA")

    class Full(LocalStorage):
        def create(self, file: Path):
            raise OSError(28, "No space left on device")

    for export in (export_merged, export_adapter):
        with pytest.raises(CheckpointError, match="cannot be written: No space left on device") as refused:
            export(adapter, tmp_path / "new", storage=Full())
        assert refused.value.code == "FG677"
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
def test_a_base_without_a_name_is_merged_only(tmp_path):
    example = tiny_llama()

    def random_base():
        torch.manual_seed(7)
        return type(example)(example.config)

    _, nameless = trained(tmp_path / "a", random_base, KINDS["LoRA"])
    with pytest.raises(ExportError, match="the base model of the adapter has no name") as refused:
        export_adapter(nameless, tmp_path / "new")
    assert refused.value.code == "FG935"
    assert export_merged(nameless, tmp_path / "merged")["facts"]["base"]["name"] == ""


def test_weights_that_are_not_those_of_the_config_are_refused(tmp_path, base, place, once):
    _, adapter = once("LoRA")
    other = adapter_of(place / "LoRA", base, {**KINDS["LoRA"], "r": 2})
    with pytest.raises(ExportError, match="has other weights than the config of the run") as refused:
        export_merged(other, tmp_path / "new")
    assert refused.value.code == "FG934"
    final = adapter_of(place / "LoRA", base, {**KINDS["LoRA"], "r": 2}, is_checkpoint=False)
    with pytest.raises(ExportError, match="has other weights than the config of the run"):
        export_merged(final, tmp_path / "new")
    damaged = shutil.copytree(adapter.folder, tmp_path / "checkpoint-4")
    (damaged / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError) as refused:
        export_merged(dataclasses.replace(adapter, folder=damaged), tmp_path / "new")
    assert refused.value.code == "FG603" and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("adapter_model.safetensors", b"cut", "FG611"),
        ("base_model.json", b"[]", "FG611"),
        ("base_model.json", b"\xff", "FG611"),
    ],
)
def test_a_damaged_file_of_a_final_adapter_is_named(tmp_path, base, place, once, name, content, code):
    once("LoRA")
    final = shutil.copytree(place / "LoRA", tmp_path / "out")
    (final / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name) as refused:
        export_merged(adapter_of(final, base, KINDS["LoRA"], is_checkpoint=False), tmp_path / "new")
    assert refused.value.code == code and not (tmp_path / "new").exists()


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ExportError, match="the tokenizer in .* cannot be read") as refused:
        _tokenizer(tmp_path)
    assert refused.value.code == "FG930"
    with pytest.raises(DataFileError, match="could not be loaded") as refused:
        load_tokenizer(tmp_path)
    assert "damaged" not in refused.value.hint and refused.value.code == "FG844"


def test_a_damaged_base_model_is_one_error(tmp_path, base):
    for load in (from_pretrained, functools.partial(classifier_from_pretrained, labels=["a", "b"])):
        damaged = shutil.copytree(base, tmp_path / "base", dirs_exist_ok=True)
        (damaged / "model.safetensors").write_bytes(b"cut")
        with pytest.raises(ModelSourceError, match="could not be loaded") as refused:
            load(damaged)
        assert (refused.value.code, "damaged or incomplete" in refused.value.hint) == ("FG840", True)


def test_a_target_in_a_file_or_a_closed_folder_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be made: '.*/file' is a file") as refused:
        refuse_place(tmp_path / "source", tmp_path / "file" / "a" / "b")
    assert refused.value.code == "FG677"
    # The superuser, as whom tests may run, can write to every folder.
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        refuse_place(tmp_path / "source", tmp_path / "new")


def test_a_model_without_tokens_and_a_folder_without_an_adapter_are_refused(tmp_path, base, place, once):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

    _, adapter = once("LoRA")
    final = shutil.copytree(place / "LoRA", tmp_path / "out")
    (final / "base_model.json").unlink()
    plain = TrainedAdapter(folder=final, is_checkpoint=False, make_base=Plain, adapter=adapter.adapter, seed=SEED)
    with pytest.raises(ExportError, match="Plain cannot be compared with its export") as refused:
        export_merged(plain, tmp_path / "new")
    assert refused.value.code == "FG932"
    with pytest.raises(ExportError, match="holds a whole model, and no adapter") as refused:
        export_merged(dataclasses.replace(plain, folder=base), tmp_path / "new")
    assert refused.value.code == "FG930"


def test_logits_that_are_not_numbers_are_never_equal():
    model = tiny_llama()
    prompts = [torch.tensor([[1, 2, 3]])]
    good = outputs_of(model, prompts)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    assert compare(good, good).is_equal and not compare(good, outputs_of(model, prompts)).is_equal
