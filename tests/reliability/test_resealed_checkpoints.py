"""Checkpoints that were changed and sealed again, so that every digest fits: none is loaded wrong, or blamed on the disk.

Each is refused by an error that names the folder, before anything of the run changes, within two seconds of CPU and 512
MB; nobody is told to remove it, for its files are those that its manifest tells.
"""

import json
import resource
import time

import pytest
import torch
from safetensors.torch import load_file, save

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.checkpoint.export import export_checkpoint
from forgather.ml.checkpoint.manifest import verify
from tests.cli.checkpoint_folders import forge, rewrite_manifest
from tests.ml.fixtures import rows, tiny_llama
from tests.reliability.test_hostile_checkpoints import chunk, hostile, index, progress, saved, text  # noqa: F401

WEIGHT = "model.norm.weight"  # 32 numbers
NAN, INFINITE = float("nan"), float("inf")


def unlisted(name):
    """Leaves a file where it is, and takes it out of the manifest."""
    return lambda folder, _: rewrite_manifest(folder, lambda body: body["files"].pop(name))


def smuggled(folder, canary):
    """Has the index name a file of other weights that the manifest does not list."""
    found = load_file(folder / "model.safetensors")
    (folder / "more.safetensors").write_bytes(save({name: value + 1 for name, value in found.items()}))
    index(lambda body: [one.update(file="more.safetensors") for f in body["tensors"]["model"].values() for one in f["chunks"]])(
        folder, canary
    )  # fmt: skip


def pieces(*boxes, shape=(32,)):
    """Cuts a weight into pieces of the file, and has the index say of each where it lies."""

    def put(folder, canary):
        found = load_file(folder / "model.safetensors")
        del found[WEIGHT]
        for number, (_, sizes) in enumerate(boxes):
            found[f"{WEIGHT}@{number}"] = torch.ones([int(size) for size in sizes])
        forge(folder, "model.safetensors", save(found))
        named = [
            {"offsets": offsets, "sizes": sizes, "file": "model.safetensors", "key": f"{WEIGHT}@{number}"}
            for number, (offsets, sizes) in enumerate(boxes)
        ]
        change = {"dtype": "F32", "shape": list(shape), "chunks": named}
        index(lambda body: body["tensors"]["model"][WEIGHT].update(change))(folder, canary)

    return put


def of_index(**facts):
    return index(lambda body: body["tensors"]["model"][WEIGHT].update(facts))


def twice(folder, canary):
    def change(body):
        first, second = (f"model.layers.{number}.self_attn.q_proj.weight" for number in range(2))
        body["tensors"]["model"][second]["chunks"] = body["tensors"]["model"][first]["chunks"]

    index(change)(folder, canary)


def changed(name, change):
    def put(folder, canary):
        found = json.loads((folder / name).read_text())
        change(found)
        forge(folder, name, json.dumps(found).encode())

    return put


def group(**facts):
    return changed("optimizer.json", lambda tree: tree["param_groups"][0].update(facts))


def counted(value):
    return changed(
        "optimizer.json", lambda tree: [one.update(step={"$number": ["F32", value]}) for one in tree["state"].values()]
    )


def part(part, **facts):
    return changed("training_state.json", lambda tree: tree[part].update(facts))


def whole(**facts):
    return changed("training_state.json", lambda tree: tree.update(facts))


def run(**facts):
    return lambda folder, _: rewrite_manifest(folder, lambda body: body["run"].update(facts))


REFUSED = {
    "other weights in a file beside": smuggled,
    "an index that is not listed": unlisted("index.json"),
    "weights that are not listed": unlisted("model.safetensors"),
    "an optimizer that is not listed": unlisted("optimizer.json"),
    "moments that are not listed": unlisted("optimizer.safetensors"),
    "a state that is not listed": unlisted("training_state.json"),
    "random states that are not listed": unlisted("training_state.safetensors"),
    "a progress that is not listed": unlisted("trainer_state.json"),
    "pieces that overlap, of the right sum": pieces(([0], [24]), ([16], [8])),
    "the same piece twice": pieces(([0], [16]), ([0], [16])),
    "pieces with a gap": pieces(([0], [8]), ([24], [8])),
    "a piece too many": pieces(([0], [32]), ([31], [1])),
    "a piece outside": pieces(([0], [16]), ([24], [16])),
    "a piece before the beginning": pieces(([-8], [8]), ([0], [24])),
    "a piece at a half": pieces(([0.5], [32])),
    "a piece of more dims": pieces(([0, 0], [32, 1])),
    "pieces of another shape": pieces(([0, 0], [4, 8]), shape=(4, 8)),
    "no pieces": of_index(chunks=[]),
    "no numbers": of_index(chunks=[], shape=[0]),
    "a shape without end": of_index(shape=[10**30]),
    "a shape that is a flag": of_index(shape=[True]),
    "a type that is none": of_index(dtype="OBJECT"),
    "another type": of_index(dtype="F16"),
    "one piece for two weights": twice,
    "a further name of another weight": index(lambda body: body["aliases"].update({WEIGHT: "lm_head.weight"})),
    "an epoch far away": part("data", epoch=10**12),
    "a row behind the data": part("data", row=9),
    "a row of a stream behind every row": part("data", row=10**15, num_rows=None),
    "a row without end": part("data", row=10**400),
    "a batch before the first": part("data", batch=-1),
    "a fingerprint that is a text": part("data", fingerprint="x"),
    "a fingerprint of numbers": part("data", fingerprint={"num_rows": 8, "columns": {"labels": [1, 2]}}),
    "a fingerprint of other rows": part("data", fingerprint={"num_rows": 8, "columns": {"labels": ["00"] * 8}}),
    "a progress in an epoch far away": progress(epoch=1e12),
    "a progress in no epoch": progress(epoch=NAN),
    "tokens below zero": progress(num_input_tokens_seen=-1),
    "a best step to come": progress(best_global_step=3),
    "a best metric that is a text": progress(best_metric="x"),
    "callbacks that are a list": progress(stateful_callbacks=[1]),
    "no learning rate": group(lr=NAN),
    "an infinite learning rate": group(lr=INFINITE),
    "a learning rate below zero": group(lr=-1.0),
    "a learning rate that is a text": group(lr="x"),
    "a learning rate that is a list": group(lr=[1.0]),
    "betas that are no numbers": group(betas=[NAN, 0.9]),
    "moments of no step": counted(NAN),
    "moments of a step without end": counted(1e30),
    "a schedule of no rate": part("schedule", base_lrs=[NAN]),
    "no mean loss": part("meter", loss=NAN),
    "an infinite mean loss": part("meter", loss=INFINITE),
    "a mean of a number without end": part("meter", loss=10**400),
    "norms that are none": whole(guard={"norms": [NAN]}),
    "left out steps that are none": whole(skips=[{"epoch": -1}]),
    "a run that was to end before": run(max_steps=1),
}  # fmt: skip


def resume(folder, settings):
    trainer = Trainer(tiny_llama(), settings(max_steps=4, learning_rate=1e-3), train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_what_was_sealed_again_is_refused_and_nobody_is_told_to_remove_it(hostile, settings, payload):  # noqa: F811
    payload(hostile, hostile.parent / "CANARY")
    verify(hostile)
    resume_cpu, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"\[FG6\d\d\] ") as caught:
        resume(hostile, settings)
    assert time.process_time() - resume_cpu < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10
    said = f"{caught.value.message} {caught.value.hint}"
    assert ("checkpoint-2" in said or caught.value.code in ("FG605", "FG610")) and len(said) < 800
    assert "remove" not in said and "corrupt" not in said


@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_what_was_sealed_again_is_exported_as_it_was_or_not_at_all(hostile, saved, tmp_path, payload):  # noqa: F811
    payload(hostile, hostile.parent / "CANARY")
    try:
        export_checkpoint(hostile, tmp_path / "exported")
    except CheckpointError as error:
        assert "remove" not in str(error) and "corrupt" not in str(error)
        assert not (tmp_path / "exported").exists()
        return
    expected, found = load_file(saved / "model.safetensors"), load_file(tmp_path / "exported/model.safetensors")
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_file_that_is_not_damaged_is_not_called_so(hostile, settings):  # noqa: F811
    pieces(([0], [24]), ([16], [8]))(hostile, None)
    expected = r"\[FG611\] the checkpoint file .*index.json' does not have the form that a run writes: tensor 'model.norm.weight': its chunks"
    with pytest.raises(CheckpointError, match=expected):
        resume(hostile, settings)


def test_pieces_that_fill_a_weight_are_read(hostile, settings):  # noqa: F811
    """The control: what is refused is what is wrong, not that there are pieces."""
    pieces(([16], [16]), ([0], [16]))(hostile, None)
    resume(hostile, settings)


def test_there_are_enough_of_them(figure):
    assert 40 <= len(REFUSED)
    figure("S11", f"{len(REFUSED)} checkpoints that were sealed again: none is loaded wrong, each is a located error")
