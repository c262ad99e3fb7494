"""Checkpoints are complete or invisible, verified, free of pickle, and kept when they matter."""

import contextlib
import dataclasses
import errno
import json
import os
import random
import resource
import shutil
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from forgather.errors import CheckpointError, TrainingError
from forgather.ml import AccelTrainingArguments, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.checkpoint import (
    LocalStorage,
    Retention,
    capture_rng,
    checkpoint_dir,
    checkpoint_folder,
    list_checkpoints,
    newest_verified,
    prune,
    read_state,
    restore_rng,
    verify,
    write_checkpoint,
    write_state,
)
from forgather.ml.checkpoint.checkpoint_dir import Draft, process_mark, step_of
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.manifest import digest_of_file, read_manifest
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.trainer.run_start import checkpoint_to_resume
from forgather.ml.trainer.snapshot import WITHOUT_INFLUENCE
from tests.ml.fixtures import Regression, assert_same_weights, regression_rows, rows, tiny_llama, weights
from tests.reliability.faults import Faulty, Refusal


def fill(draft):
    draft.write("a.bin", [bytes(range(256)) * 8])
    draft.write("b.json", [json_bytes({"step": 1})])
    draft.write("sub/c.txt", [b"c" * 50, b"c" * 50])


def by_hand(folder):
    return Draft(LocalStorage(), folder)


@pytest.fixture
def saved(settings):
    args = settings(save_strategy="steps", save_steps=2)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows())
    trainer.train()
    return Path(args.output_dir)


def test_a_state_comes_back_as_it_was(tmp_path):
    shared = torch.arange(6.0).reshape(2, 3)
    tree = {
        "tensor": shared,
        "again": [shared, (1, None, True, "x", 2.5)],
        3: {"int key": b"bytes"},
        "$tensor": "a mark as a key",
        "half": torch.ones(2, dtype=torch.bfloat16),
        "empty": [torch.empty(0), {}],
        "view": torch.arange(10)[2:4],
        "number": np.float64(0.5),
        "infinite": float("inf"),
    }
    write_state(by_hand(tmp_path), "state", tree)
    back = read_state(tmp_path, "state")
    assert list(tree) == list(back)
    assert torch.equal(shared, back["tensor"])
    assert back["tensor"] is back["again"][0]
    assert (1, None, True, "x", 2.5) == back["again"][1]
    assert {"int key": b"bytes"} == back[3]
    assert torch.equal(tree["half"], back["half"]) and torch.bfloat16 == back["half"].dtype
    assert torch.equal(torch.tensor([2, 3]), back["view"])
    assert (0.5, float("inf")) == (back["number"], back["infinite"])


@hypothesis_settings(max_examples=50, deadline=None)
@given(
    tree=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
        max_leaves=12,
    )
)
def test_any_plain_tree_comes_back(tree, tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    write_state(by_hand(folder), "state", {"tree": tree})
    assert {"tree": tree} == read_state(folder, "state")


def test_a_state_that_needs_pickle_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"FG606.*state.schedule.fn is a function"):
        write_state(by_hand(tmp_path), "state", {"schedule": {"fn": lambda step: step}})


def test_a_state_whose_json_file_cannot_be_read_is_one_located_error(tmp_path):
    write_state(by_hand(tmp_path), "state", {"tensor": torch.ones(2)})
    file = tmp_path / "state.json"
    file.unlink()
    file.mkdir()
    with pytest.raises(CheckpointError, match=r"FG611.*state\.json"):
        read_state(tmp_path, "state")


def test_no_file_of_a_checkpoint_is_a_pickle(saved):
    names = {file.suffix for _, folder in list_checkpoints(saved) for file in folder.rglob("*") if file.is_file()}
    assert {".json", ".safetensors"} == names


def test_randomness_goes_on_from_a_captured_state(tmp_path):
    def draw():
        return random.random(), float(np.random.normal()), torch.rand(3).tolist()

    draw()
    write_state(by_hand(tmp_path), "rng", capture_rng())
    expected = [draw(), draw()]
    restore_rng(read_state(tmp_path, "rng"))
    assert expected == [draw(), draw()]


def test_random_states_of_devices_that_are_not_here_are_mentioned(caplog):
    state = capture_rng()
    restore_rng(state)
    assert "CUDA" not in caplog.text
    restore_rng({**state, "cuda": [torch.get_rng_state()] * 99})
    assert "random states of 99 CUDA devices were saved" in caplog.text


def test_every_flipped_bit_truncation_and_missing_file_is_found(tmp_path):
    folder = write_checkpoint(tmp_path, 7, fill)
    assert 7 == verify(folder).step
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        for position in range(0, len(content), 37):
            file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
            with pytest.raises(CheckpointError, match=file.name):
                verify(folder)
        file.write_bytes(content[:-2])
        with pytest.raises(CheckpointError, match="FG603"):
            verify(folder)
        file.unlink()
        with pytest.raises(CheckpointError, match="FG602|FG604"):
            verify(folder)
        file.write_bytes(content)
    assert 7 == verify(folder).step


def test_a_corrupt_file_is_one_error_that_names_it_and_what_to_do(saved, settings):
    args = settings(save_strategy="steps")
    for file in sorted(checkpoint_folder(saved, 4).iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
        with pytest.raises(CheckpointError, match=file.name) as caught:
            Trainer(tiny_llama(), args, train_dataset=rows()).train(str(checkpoint_folder(saved, 4)))
        assert caught.value.hint
        file.write_bytes(content)


def test_automatic_resume_falls_back_to_the_newest_intact_checkpoint_and_says_so(saved, settings, caplog):
    (checkpoint_folder(saved, 4) / "optimizer.safetensors").write_bytes(b"")
    found, skipped = newest_verified(saved)
    assert (checkpoint_folder(saved, 2), 1) == (found, len(skipped))
    args = settings(save_strategy="steps", resume_from_checkpoint="auto")
    trainer = Trainer(tiny_llama(), args, train_dataset=rows())
    assert 4 == trainer.train().global_step
    assert "skipped a checkpoint" in caplog.text and "optimizer.safetensors" in caplog.text


def test_automatic_resume_stops_where_no_checkpoint_is_intact(saved, settings):
    for _, folder in list_checkpoints(saved):
        (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"FG607.*none of the 2 checkpoints"):
        Trainer(tiny_llama(), settings(), train_dataset=rows()).train(resume_from_checkpoint=True)


def test_automatic_resume_begins_anew_where_there_is_no_checkpoint(settings):
    assert 4 == Trainer(tiny_llama(), settings(), train_dataset=rows()).train(resume_from_checkpoint=True).global_step


def test_a_checkpoint_that_does_not_exist_is_an_error(settings, tmp_path):
    with pytest.raises(CheckpointError, match="FG601"):
        Trainer(tiny_llama(), settings(), train_dataset=rows()).train(str(tmp_path / "checkpoint-3"))


@pytest.mark.parametrize(
    ("allowed", "said"),
    [
        ([], r"FG613.*num_hidden_layers is 3, and was 2"),
        (["model"], r"FG605.*weights do not fit LlamaForCausalLM"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, settings, allowed, said):
    other = Trainer(tiny_llama(num_hidden_layers=3), settings(allow_changed=allowed), train_dataset=rows())
    with pytest.raises(CheckpointError, match=said):
        other.train(str(checkpoint_folder(saved, 4)))


def test_weights_of_another_shape_are_told_with_both_shapes(saved, settings):
    other = Trainer(tiny_llama(vocab_size=80), settings(allow_changed=["model", "tokenizer"]), train_dataset=rows())
    shapes = (
        r"weights do not fit .*embed_tokens.weight' has shape \(64, 32\), not \(80, 32\); 'lm_head.weight' has shape"
    )
    with pytest.raises(CheckpointError, match=shapes):
        other.train(str(checkpoint_folder(saved, 4)))


def test_a_checkpoint_of_another_optimizer_is_refused(saved, settings):
    def two_groups(parameters, lr):
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=lr)

    other = Trainer(tiny_llama(), settings(), train_dataset=rows(), optimizer_factory=two_groups)
    with pytest.raises(CheckpointError, match=r"FG605.*optimizer state does not fit SGD"):
        other.train(str(checkpoint_folder(saved, 4)))


def test_a_checkpoint_of_the_model_alone_cannot_be_resumed(settings):
    args = settings(save_strategy="epoch", save_only_model=True)
    trainer = Trainer(tiny_llama(), args, train_dataset=rows())
    trainer.train()
    folder = checkpoint_folder(Path(args.output_dir), 4)
    assert not (folder / "optimizer.safetensors").exists()
    with pytest.raises(CheckpointError, match="FG608"):
        trainer.train(str(folder))


@pytest.mark.parametrize("failing", ["fill", "fsync", "replace"])
def test_a_save_that_fails_is_loud_and_leaves_the_last_one_untouched(tmp_path, monkeypatch, failing):
    write_checkpoint(tmp_path, 1, fill)

    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    def fail(draft):
        fill(draft)
        if failing == "fill":
            refuse()

    if failing != "fill":
        monkeypatch.setattr(os, failing, refuse)
    with pytest.raises(CheckpointError, match=r"FG609.*step 2.*No space left on device"):
        write_checkpoint(tmp_path, 2, fail)
    monkeypatch.undo()
    assert ["checkpoint-1"] == [entry.name for entry in tmp_path.iterdir()]
    assert 1 == verify(tmp_path / "checkpoint-1").step


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_replacement_that_fails_between_its_renames_brings_the_older_one_back(tmp_path, monkeypatch, error):
    write_checkpoint(tmp_path, 1, fill)
    rename, calls = os.replace, []

    def second_fails(*places):
        calls.append(places)
        if len(calls) == 2:
            raise error
        rename(*places)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        write_checkpoint(tmp_path, 1, lambda draft: draft.write("new", [b"new"]))
    assert ["checkpoint-1"] == [entry.name for entry in tmp_path.iterdir()]
    assert 1 == verify(tmp_path / "checkpoint-1").step
    assert (tmp_path / "checkpoint-1" / "a.bin").exists()


def test_a_full_disk_under_the_weights_is_the_same_error(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"FG609.*step 2"):
            write_checkpoint(tmp_path, 2, lambda draft: write_state(draft, "state", torch.zeros(10_000)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [] == list(tmp_path.iterdir())


def test_a_full_disk_under_the_final_model_is_one_error_and_leaves_no_half_of_it(settings, tmp_path):
    trainer = Trainer(tiny_llama(), settings(), train_dataset=rows())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(TrainingError, match=r"FG817.*'.*model' cannot be written to"):
            trainer.save_model(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [] == list((tmp_path / "model").iterdir())


def test_the_best_model_is_found_after_the_output_folder_was_moved(settings, tmp_path):
    job = {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.0}
    data = {"train_dataset": rows(), "eval_dataset": rows()}
    first = Trainer(tiny_llama(), settings(**job), **data)
    first.train()
    moved = Path(first.args.output_dir).rename(tmp_path / "moved")
    trainer = Trainer(tiny_llama(seed=1), settings(**job, output_dir=str(moved), num_train_epochs=3), **data)
    trainer.train("auto")
    assert 4 == trainer.state.best_global_step
    assert_same_weights(weights(first.model), weights(trainer.model))


def test_leftovers_of_a_killed_process_are_removed_and_never_seen(tmp_path):
    dead = tmp_path / ".saving-checkpoint-5-999999999"
    dead.mkdir()
    fill(by_hand(dead))
    assert [] == list_checkpoints(tmp_path)
    write_checkpoint(tmp_path, 6, fill)
    assert ["checkpoint-6"] == [entry.name for entry in tmp_path.iterdir()]


def test_looking_for_a_checkpoint_brings_back_a_half_replaced_one_and_removes_nothing(tmp_path):
    write_checkpoint(tmp_path, 5, fill).rename(tmp_path / ".replaced-checkpoint-5-999999999")
    draft = tmp_path / ".saving-checkpoint-6-999999999"
    draft.mkdir()
    assert (tmp_path / "checkpoint-5", []) == newest_verified(tmp_path)
    assert draft.exists()


def test_a_run_that_begins_anew_brings_it_back_before_it_removes_what_dead_ones_left(tmp_path):
    write_checkpoint(tmp_path, 5, fill).rename(tmp_path / ".replaced-checkpoint-5-999999999")
    write_checkpoint(tmp_path, 6, fill)
    assert ["checkpoint-5", "checkpoint-6"] == sorted(entry.name for entry in tmp_path.iterdir())
    assert 5 == verify(tmp_path / "checkpoint-5").step


def test_a_run_that_goes_on_brings_it_back_through_its_storage(settings, tmp_path):
    write_checkpoint(tmp_path, 5, fill).rename(tmp_path / ".replaced-checkpoint-5-999999999")
    storage = Faulty()
    args = settings(output_dir=str(tmp_path), save_strategy="no")
    assert tmp_path / "checkpoint-5" == checkpoint_to_resume(args, storage, "auto")
    assert [("rename", tmp_path / "checkpoint-5"), ("sync_folder", tmp_path)] == storage.operations


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say when a process began")
def test_leftovers_are_of_a_dead_process_also_where_its_number_is_that_of_another_one(tmp_path):
    alive = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    draft = tmp_path / f".saving-checkpoint-6-{os.getppid()}.{alive}"
    draft.mkdir()
    write_checkpoint(tmp_path, 5, fill).rename(tmp_path / f".replaced-checkpoint-5-{os.getppid()}.1")
    assert (tmp_path / "checkpoint-5", []) == newest_verified(tmp_path)
    write_checkpoint(tmp_path, 7, fill)
    assert draft.exists()


def test_what_another_machine_writes_into_a_shared_folder_is_left_alone_for_a_day(tmp_path, monkeypatch):
    own = write_checkpoint(tmp_path, 5, fill)
    marks = [f"{os.getpid()}.1.other-machine", "999999999.1.other-machine", "999999999.1"]
    drafts = [tmp_path / f".saving-checkpoint-6-{mark}" for mark in marks]
    drafts.append(tmp_path / f".removed-checkpoint-4-{marks[0]}")
    model = tmp_path / f".saving-model-{marks[1]}"
    for draft in (*drafts, model):
        draft.mkdir()
    own.rename(tmp_path / f".replaced-checkpoint-5-{marks[1]}")
    assert (None, []) == newest_verified(tmp_path)  # it may be about to come back by itself
    assert process_mark().endswith(f".{socket.gethostname()}")
    write_checkpoint(tmp_path, 7, fill)
    write_model(LocalStorage(), tmp_path, lambda draft: draft.write("README.md", [b"x"]))
    assert [True, True, False, True] == [draft.exists() for draft in drafts] and model.exists()
    now = time.time()
    monkeypatch.setattr(checkpoint_dir.time, "time", lambda: now + 100)
    assert tmp_path / "checkpoint-7" == newest_verified(tmp_path)[0] and own.exists()
    assert drafts[0].exists()
    monkeypatch.setattr(checkpoint_dir.time, "time", lambda: now + 86500)
    write_checkpoint(tmp_path, 8, fill)
    write_model(LocalStorage(), tmp_path, lambda draft: draft.write("README.md", [b"y"]))
    assert not any(draft.exists() for draft in (*drafts, model))


@pytest.mark.parametrize("name", ["checkpoint-5", "notes"])
def test_nobody_is_told_to_remove_a_folder(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError) as refused:
        verify(tmp_path / name)
    assert ("FG602", False) == (refused.value.code, "remove" in refused.value.hint)


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    write_checkpoint(tmp_path, 1, fill)
    write_checkpoint(tmp_path, 1, lambda draft: draft.write("new", [b"new"]))
    assert ["manifest.json", "new"] == sorted(file.name for file in (tmp_path / "checkpoint-1").iterdir())
    assert ["checkpoint-1"] == [entry.name for entry in tmp_path.iterdir()]


def _others(place):
    """Makes a folder of another program that has the name of a checkpoint."""
    (place / "checkpoint-1").mkdir(parents=True)
    (place / "checkpoint-1" / "pytorch_model.bin").write_bytes(b"theirs")


def test_a_folder_that_is_no_checkpoint_of_ours_is_put_aside(tmp_path, caplog):
    for name in ("checkpoint-1.aside", "checkpoint-1.aside1"):
        _others(tmp_path)
        write_checkpoint(tmp_path, 1, fill)
        verify(tmp_path / "checkpoint-1")
        assert ["pytorch_model.bin"] == [file.name for file in (tmp_path / name).iterdir()]
        assert f"it was renamed to {name}" in caplog.messages[-1]
        shutil.rmtree(tmp_path / "checkpoint-1")
    assert [] == list_checkpoints(tmp_path)


def test_a_folder_that_is_no_checkpoint_of_ours_outlives_a_refusal_at_any_act(tmp_path):
    def written(place, storage):
        _others(place)
        write_checkpoint(place, 1, fill, storage=storage)

    written(tmp_path / "whole", counting := Faulty())
    for at in range(1, len(counting.operations) + 1):
        with contextlib.suppress(CheckpointError):
            written(tmp_path / str(at), Faulty(Refusal(errno.EIO), at))
        assert [b"theirs"] == [file.read_bytes() for file in (tmp_path / str(at)).rglob("pytorch_model.bin")]


@hypothesis_settings(max_examples=60, deadline=None)
@given(steps=st.sets(st.integers(1, 30), min_size=1, max_size=8), limit=st.integers(1, 4), data=st.data())
def test_retention_keeps_the_best_and_the_newest(steps, limit, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keep")
    for step in steps:
        checkpoint_folder(folder, step).mkdir()
    best = checkpoint_folder(folder, data.draw(st.sampled_from(sorted(steps))))
    newest = checkpoint_folder(folder, data.draw(st.sampled_from(sorted(steps))))
    removed = prune(folder, Retention(limit), ranked=[step_of(best)], newest=newest)
    left = {path for _, path in list_checkpoints(folder)}
    assert {best, newest} <= left
    assert min(len(steps), max(limit, len({best, newest}))) == len(left)
    assert len(steps) == len(left) + len(removed)
    assert ["checkpoint"] * len(left) == [path.name.split("-")[0] for path in folder.iterdir()]


def test_the_limit_holds_during_a_run_and_the_best_model_is_loaded(settings):
    args = settings(
        save_strategy="steps", save_steps=1, eval_strategy="steps", eval_steps=1, num_train_epochs=3,
        save_total_limit=2, load_best_model_at_end=True, learning_rate=0.1,
    )  # fmt: skip
    trainer = Trainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(4, seed=9))
    trainer.train()
    folder = Path(args.output_dir)
    losses = {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}
    best = min(losses, key=losses.get)
    assert best == trainer.state.best_global_step < 12
    assert {best, 12} == {step for step, _ in list_checkpoints(folder)}
    assert_same_weights(load_file(checkpoint_folder(folder, best) / "model.safetensors"), weights(trainer.model))
    assert_same_weights(load_file(folder / "model.safetensors"), weights(trainer.model))
    assert losses[best] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-6)


def test_a_saved_model_and_a_checkpoint_are_read_by_transformers(saved):
    for folder in (saved, checkpoint_folder(saved, 4)):
        assert_same_weights(
            weights(AutoModelForCausalLM.from_pretrained(saved)), weights(AutoModelForCausalLM.from_pretrained(folder))
        )
    assert {"config.json", "generation_config.json", "model.safetensors"} <= {file.name for file in saved.iterdir()}


def test_a_checkpoint_has_the_configuration_of_the_final_model(saved):
    final, checkpoint = (json.loads((folder / "config.json").read_text()) for folder in (saved, saved / "checkpoint-2"))
    assert final == checkpoint
    assert ["LlamaForCausalLM"] == checkpoint["architectures"]


def test_tied_weights_are_written_once_and_tied_again(settings):
    args = settings(save_strategy="epoch")
    trainer = Trainer(tiny_llama(tie_word_embeddings=True), args, train_dataset=rows())
    trainer.train()
    folder = checkpoint_folder(Path(args.output_dir), 4)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    fresh = Trainer(tiny_llama(seed=1, tie_word_embeddings=True), args, train_dataset=rows())
    fresh.train(str(folder))
    assert_same_weights(weights(trainer.model), weights(fresh.model))
    assert fresh.model.lm_head.weight is fresh.model.model.embed_tokens.weight


def test_a_plain_module_is_saved_as_safetensors(settings, tmp_path):
    trainer = Trainer(Regression(), settings(), train_dataset=regression_rows())
    trainer.train()
    folder = trainer.save_model(tmp_path / "model")
    assert_same_weights(weights(trainer.model), load_file(folder / "model.safetensors"))
    assert ["model.safetensors"] == [file.name for file in folder.iterdir()]


def test_a_file_of_a_checkpoint_can_be_read_by_others(saved):
    umask = os.umask(0)
    os.umask(umask)
    modes = {file.stat().st_mode & 0o777 for file in checkpoint_folder(saved, 4).iterdir()}
    assert {0o666 & ~umask} == modes


def test_the_manifest_tells_versions_layout_and_a_digest_of_the_settings(settings, tmp_path):
    def digest(folder, **given):
        args = settings(output_dir=str(tmp_path / folder), save_strategy="steps", save_steps=4, **given)
        Trainer(tiny_llama(), args, train_dataset=rows()).train()
        facts = read_manifest(tmp_path / folder / "checkpoint-4").facts
        assert torch.__version__ == facts["versions"]["torch"] and 1 == facts["layout"]["world_size"]
        return facts["config"]

    first = digest("a")
    assert first == digest("b", resume_from_checkpoint="auto", run_name="other", dispatch_rows=False)
    assert first != digest("c", learning_rate=0.5)


COMPUTED = frozenset(
    """
    accelerate_config accelerator_args accumulate_grad_batches activation_memory_budget activation_offloading
    adam_beta1 adam_beta2 adam_epsilon async_save auto_find_batch_size bad_rows bad_step_policy
    batch_eval_metrics bf16 bf16_stochastic_round checkpoint_sequential context_parallel_method
    context_parallel_rotate_method context_parallel_size data_parallel_size data_seed data_streams
    dataloader_drop_last dataloader_num_workers
    ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_gradient_as_bucket_view
    ddp_static_graph deepspeed ema_decay ema_evaluate ema_every ema_update_after_step eval_delay
    eval_full_logits eval_on_start eval_steps eval_strategy fp16 fp8 fp8_emulate fp8_exclude freeze fsdp
    fsdp_config generation_max_length generation_max_new_tokens generation_max_samples global_batch_size
    gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs greater_is_better
    include_for_metrics include_num_input_tokens_seen initial_weights keep_every_n_steps label_smoothing_factor
    layer_lr_decay learning_rate liger_kernel_config linear_cross_entropy linear_cross_entropy_chunk_size
    load_best_model_at_end logging_first_step logging_steps logging_strategy loraplus_lr_embedding
    loraplus_lr_ratio lr_scheduler_kwargs lr_scheduler_type max_bad_steps max_grad_norm max_steps
    metric_for_best_model neftune_noise_alpha num_train_epochs optim optimizer_in_backward overlap_grad_reduce
    parameter_groups per_device_eval_batch_size per_device_train_batch_size pipeline_chunks
    pipeline_parallel_size predict_with_generate remove_unused_columns restore_callback_states_from_checkpoint
    save_minutes save_on_best save_only_model save_steps save_strategy save_top_k save_total_limit
    schedule_class seed shuffle_order spike_threshold spike_window split_spec stages_per_rank strict
    tensor_parallel_size tf32 torch_compile torch_compile_backend torch_compile_mode torch_compile_regions
    tp_plan train_sampling_strategy use_cpu use_liger_kernel warmup_steps weight_decay z_loss_coefficient
    """.split()
)


def test_each_setting_is_part_of_the_digest_of_a_run_or_known_to_have_no_influence():
    kinds = (TrainingArguments, AccelTrainingArguments, PipelineTrainingArguments)
    names = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    assert COMPUTED | WITHOUT_INFLUENCE == names
    assert not COMPUTED & WITHOUT_INFLUENCE


def test_the_manifest_lists_every_file(saved):
    folder = checkpoint_folder(saved, 4)
    listed = set(json.loads((folder / "manifest.json").read_text())["files"])
    assert {file.name for file in folder.iterdir()} - {"manifest.json"} == listed


@pytest.mark.parametrize("place", [0, 5 << 20, (9 << 20) - 1])
def test_damage_is_found_wherever_it_is_in_a_large_file(place, tmp_path):
    content = bytes(9 << 20)  # more than is read, and hashed, at once
    folder = write_checkpoint(tmp_path, 3, lambda draft: draft.write("file", [content]))
    verify(folder)
    with (folder / "file").open("r+b") as stream:
        stream.seek(place)
        stream.write(b"1")
    with pytest.raises(CheckpointError, match="its content is not what was written"):
        verify(folder)


@hypothesis_settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 1, 5000, 1 << 20, (8 << 20) + 3, 20 << 20]), max_size=6))
def test_the_digest_of_a_file_is_that_of_its_bytes_whatever_their_pieces(sizes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("digest")
    chunks = [os.urandom(min(size, 64)) * (size // 64 + 1) for size in sizes]
    draft = by_hand(folder)
    draft.write("file", chunks)
    whole = b"".join(chunks)
    assert (len(whole), xxhash.xxh3_128(whole).hexdigest()) == (draft.files["file"].size, draft.files["file"].digest)
    assert whole == (folder / "file").read_bytes()
    assert draft.files["file"].digest == digest_of_file(folder / "file")
    (folder / "file").unlink()
