"""Loading a checkpoint never unpickles, and never follows what a checkpoint says out of its folder (S6)."""

import copy
import json
import math
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.checkpoint.lineage import origin_of
from forgather.ml.checkpoint.manifest import MANIFEST
from forgather.ml.checkpoint.rng import check_rng
from forgather.ml.checkpoint.state import read_state
from forgather.ml.json_logger import JsonLogger
from forgather.ml.trainer.resume import read_progress
from forgather.ml.trainer.resume_checks import refuse_impossible
from tests.cli.checkpoint_folders import forge, rewrite_manifest
from tests.ml.conftest import settings as make_settings
from tests.ml.fixtures import rows, tiny_llama

DEEP = 100_000


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return Path.write_text, (Path(self.canary), "ran")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    args = make_settings.__wrapped__(folder) if hasattr(make_settings, "__wrapped__") else None
    args = args(save_strategy="steps", save_steps=2, max_steps=2, logging_steps=1, bad_step_policy="skip")
    args = args.replace(eval_strategy="steps", eval_steps=1, metric_for_best_model="loss", save_top_k=1)
    Trainer(tiny_llama(), args, train_dataset=rows(), eval_dataset=rows(2), callbacks=[JsonLogger()]).train()
    return Path(args.output_dir) / "checkpoint-2"


def pickled(name):
    return lambda folder, canary: forge(folder, name, pickle.dumps(Payload(canary)))


def torch_saved(name):
    def put(folder, canary):
        torch.save({"weight": Payload(canary)}, folder / "beside")
        content = (folder / "beside").read_bytes()
        (folder / "beside").unlink()
        forge(folder, name, content)

    return put


def beside(name):
    return lambda folder, canary: (folder / name).write_bytes(pickle.dumps(Payload(canary)))


def text(name, content):
    return lambda folder, canary: forge(folder, name, content.encode())


def state(**change):
    def put(folder, canary):
        found = json.loads((folder / "training_state.json").read_text())
        forge(folder, "training_state.json", json.dumps({**found, **change}).encode())

    return put


def progress(**change):
    def put(folder, canary):
        found = json.loads((folder / "trainer_state.json").read_text())
        forge(folder, "trainer_state.json", json.dumps({**found, **change}).encode())

    return put


def header(value, body=b"", length=None):
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    size = (len(raw) if length is None else length).to_bytes(8, "little")
    return lambda folder, canary: forge(folder, "model.safetensors", size + raw + body)


def tensor(shape, offsets, dtype="F32"):
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def manifest(**change):
    return lambda folder, canary: rewrite_manifest(folder, lambda body: body.update(change))


def names(name, size=4):
    return lambda folder, canary: rewrite_manifest(
        folder, lambda body: body["files"].update({name: {"bytes": size, "xxh3": "0" * 32}})
    )


def raw_manifest(change):
    def put(folder, canary):
        content = (folder / MANIFEST).read_bytes()
        (folder / MANIFEST).write_bytes(change(content))

    return put


def linked(name):
    def put(folder, canary):
        os.replace(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return put


def piped(folder, canary):
    (folder / "optimizer.json").unlink()
    os.mkfifo(folder / "optimizer.json")


def index(change):
    def put(folder, canary):
        found = json.loads((folder / "index.json").read_text())
        change(found)
        forge(folder, "index.json", json.dumps(found).encode())

    return put


def chunk(**facts):
    """Says something else of where the first weight lies."""
    return index(lambda found: next(iter(found["tensors"]["model"].values()))["chunks"][0].update(facts))


def outside(folder, canary):
    (folder / "beside.safetensors").symlink_to(folder.parent / "elsewhere.safetensors")
    shutil.copy(folder / "model.safetensors", folder.parent / "elsewhere.safetensors")
    chunk(file="beside.safetensors")(folder, canary)


REFUSED = {
    "an index that is a pickle": pickled("index.json"),
    "an index that is a list": text("index.json", "[]"),
    "a deep index": text("index.json", "[" * DEEP + "]" * DEEP),
    "a weight out of the folder": chunk(file="../model.safetensors"),
    "a weight in another place": chunk(file="/etc/passwd"),
    "a weight in no file": chunk(file=5),
    "a weight behind a link": outside,
    "a weight of another size": chunk(sizes=[1 << 62]),
    "a weight at another place of its own": chunk(offsets=[-1]),
    "a weight under another name": chunk(key="model.norm.weight"),
    "a tied name of nothing": index(lambda found: found.update(aliases={"a": "b"})),
    "no weights at all": index(lambda found: found["tensors"].pop("model")),
    "weights that are a pickle": pickled("model.safetensors"),
    "weights of torch.save": torch_saved("model.safetensors"),
    "an optimizer that is a pickle": pickled("optimizer.safetensors"),
    "an optimizer of torch.save": torch_saved("optimizer.safetensors"),
    "a state that is a pickle": pickled("training_state.safetensors"),
    "JSON of the optimizer that is a pickle": pickled("optimizer.json"),
    "JSON of the state that is a pickle": pickled("training_state.json"),
    "JSON of the progress that is a pickle": pickled("trainer_state.json"),
    "a manifest that is a pickle": raw_manifest(lambda content: pickle.dumps({"step": 2})),
    "a tensor by a list": text("optimizer.json", '{"state": {"$tensor": ["x"]}, "param_groups": []}'),
    "a tensor that is not there": text("optimizer.json", '{"state": {"$tensor": "x"}, "param_groups": []}'),
    "items that are none": text("optimizer.json", '{"$items": 5}'),
    "a key that is no key": text("optimizer.json", '{"$items": [[{"$items": []}, 1], [[], 2]]}'),
    "bytes that are none": text("training_state.json", '{"$bytes": 7}'),
    "bytes that are no base64": text("training_state.json", '{"$bytes": "x"}'),
    "a tuple of a number": text("training_state.json", '{"$tuple": 3}'),
    "a list where a table is": text("training_state.json", "[1, 2]"),
    "an optimizer that is a number": text("optimizer.json", "5"),
    "deep lists in the optimizer": text("optimizer.json", "[" * DEEP + "]" * DEEP),
    "deep tables in the state": text("training_state.json", '{"a":' * DEEP + "1" + "}" * DEEP),
    "deep lists in the progress": text("trainer_state.json", "[" * DEEP + "]" * DEEP),
    "a deep manifest": raw_manifest(lambda content: b"[" * DEEP + b"]" * DEEP),
    "a header of 2**63 bytes": header(b"{}", length=1 << 63),
    "a header of a terabyte": header(b"{}", length=1 << 40),
    "a header without end": header(b'{"a":' * 5000, length=None),
    "a deep header": header(b'{"a":' * DEEP + b"1" + b"}" * DEEP),
    "a tensor larger than memory": header(tensor([1 << 62, 1 << 62], [0, 4]), b"1234"),
    "a tensor of negative size": header(tensor([-1], [0, 4]), b"1234"),
    "a tensor behind the end": header(tensor([1], [1 << 40, (1 << 40) + 4]), b"1234"),
    "tensors over one another": header({**tensor([1], [0, 4]), "b": tensor([1], [0, 4])["weight"]}, b"1234"),
    "a tensor of an unknown type": header(tensor([1], [0, 4], "OBJECT"), b"1234"),
    "a name out of the folder": names("../../../etc/passwd"),
    "an absolute name": names("/etc/passwd"),
    "a name that goes out and in": names("a/../../b"),
    "an empty name": names(""),
    "a name with a zero": names("a\0b"),
    "a file of negative size": names("model.safetensors", -1),
    "a file of endless size": names("model.safetensors", 10**30),
    "a step that is a text": manifest(step="5"),
    "a step that is a flag": manifest(step=True),
    "a step before the beginning": manifest(step=-1),
    "files that are a list": manifest(files=[]),
    "a key that stands there twice": raw_manifest(lambda it: it.replace(b'"step": 2', b'"step": 9,\n "step": 2')),
    "a step that is no number": raw_manifest(lambda content: content.replace(b'"step": 2', b'"step": NaN')),
    "another text of the same meaning": raw_manifest(lambda content: content.replace(b"\n", b"\n ", 1)),
    "a manifest without its last character": raw_manifest(lambda content: content[:-1]),
    "an endless number": raw_manifest(lambda content: content.replace(b'"step": 2', b'"step": ' + b"9" * 5000)),
    "a link in the place of the weights": linked("model.safetensors"),
    "a pipe in the place of a file": piped,
    "a position that is a text": state(data={"epoch": "x", "batch": 0, "row": 0}),
    "a position before the beginning": state(data={"epoch": -1, "batch": -3, "row": -3}),
    "a position without an epoch": state(data={}),
    "a position that is a list": state(data=[1]),
    "random states that are none": state(rng={"torch": 5}),
    "random states of Python that are none": state(rng={"python": [3, [1, 2], None]}),
    "classes that are a list": state(classes=[1]),
    "a mean that is a text": state(meter={"loss": "x", "steps": "y"}),
    "a schedule that replaces a method": state(schedule={"step": 5, "last_epoch": 2, "lr_lambdas": [None]}),
    "a schedule that is a list": state(schedule=[1]),
    "a schedule of an infinite rate": state(schedule={"base_lrs": [math.inf], "last_epoch": 2, "_step_count": 3}),
    "a progress of another step": progress(global_step=10**9),
    "a progress that is a text": progress(global_step="x"),
    "a log of numbers": progress(log_history=[1, 2]),
    "a progress with other words": progress(__class__="os.system"),
}
IGNORED = {
    name: beside(name)
    for name in ("optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin", "pytorch_model.bin", ".metadata")
}


@pytest.fixture
def hostile(saved, tmp_path):
    folder = tmp_path / "checkpoint-2"
    shutil.copytree(saved, folder)
    return folder


def resume(folder, settings):
    trainer = Trainer(tiny_llama(), settings(max_steps=4), train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(folder))
    return trainer


def kept(folder):
    """Returns what a refusal must not change."""
    return {file: (file.lstat().st_size, file.lstat().st_mtime_ns) for file in folder.rglob("*")}


@pytest.mark.parametrize("payload", REFUSED.values(), ids=REFUSED)
def test_a_hostile_checkpoint_is_one_located_error(hostile, settings, payload):
    canary = hostile.parent / "CANARY"
    payload(hostile, canary)
    before = kept(hostile)
    with pytest.raises(CheckpointError, match=r"\[FG6\d\d\] .*checkpoint-2") as caught:
        resume(hostile, settings)
    assert len(caught.value.message) < 600
    assert not canary.exists()
    assert before == kept(hostile)


def test_the_part_that_is_not_as_a_run_writes_it_is_named(hostile, settings):
    state(data={})(hostile, None)
    with pytest.raises(
        CheckpointError, match=r"\[FG675\] the part 'data' of the checkpoint .*checkpoint-2' .*KeyError"
    ):
        resume(hostile, settings)


@pytest.mark.parametrize("payload", IGNORED.values(), ids=IGNORED)
def test_a_pickle_beside_the_files_of_a_checkpoint_is_not_read(hostile, settings, payload):
    canary = hostile.parent / "CANARY"
    payload(hostile, canary)
    assert 4 == resume(hostile, settings).state.global_step
    assert not canary.exists()


def test_the_payload_runs_where_it_is_unpickled(tmp_path):
    """The control: a payload that did nothing would prove nothing."""
    pickle.loads(pickle.dumps(Payload(tmp_path / "CANARY")))
    assert (tmp_path / "CANARY").exists()


# -- each number of a checkpoint, as a number that none is

EVIL = (math.inf, math.nan, -1, 10**18)
# What may be so: figures for people, losses, a seed, and what a schedule keeps of a metric.
LEGAL = (
    r"log_history\.\d+\.(?!step|epoch)",
    r"meter\.(total_)?loss = (-1|10)",
    r"data\.seed = 10",
    r"trainer_state\.json\.total_flos = 10",
    r"optimizer.*\.state\..*\.(?!step)\w+ = (-1|10)",
    r"guard\.norms\.\d+ = 10",
    r"rng\.(python\.2|numpy\.4) = -1",
)


def numbers_in(tree, path=()):
    """Yields the path of each number; of long lists, of the first, one in the middle and the last."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from numbers_in(value, (*path, name))
    elif isinstance(tree, list | tuple):
        for place in range(len(tree)) if len(tree) < 9 else (0, len(tree) // 2, len(tree) - 1):
            yield from numbers_in(tree[place], (*path, place))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path
    elif isinstance(tree, torch.Tensor) and not tree.ndim:
        yield path


def with_number(tree, path, number):
    if not path:
        return torch.tensor(float(number)) if isinstance(tree, torch.Tensor) else number
    if isinstance(tree, tuple):
        return (*tree[: path[0]], with_number(tree[path[0]], path[1:], number), *tree[path[0] + 1 :])
    changed = copy.copy(tree)
    changed[path[0]] = with_number(tree[path[0]], path[1:], number)
    return changed


def judged(saved, parts):
    """Judges a checkpoint whose parts are changed, as a resume does before it puts anything back."""
    progress = copy.copy(read_progress(saved))
    for name, value in parts["trainer_state.json"].items():
        setattr(progress, name, value)
    training = parts["training_state"]
    refuse_impossible(saved, 2, origin_of(saved), progress, parts["optimizer"], training)
    check_rng(training["rng"])


def test_each_number_of_a_checkpoint_is_judged(saved, figure):
    progress = json.loads((saved / "trainer_state.json").read_text())
    # The run takes them from its own settings, or another test replaces them.
    del progress["global_step"]
    parts = {
        "trainer_state.json": progress,
        "training_state": read_state(saved, "training_state"),
        "optimizer": read_state(saved, "optimizer"),
    }
    skip = {"step": 1, "epoch": 0, "first": 2, "end": 4, "reason": "x"}
    change = {
        "step": 1,
        "action": "set",
        "name": "learning_rate",
        "value": 0.5,
        "before": 1.0,
        "factor": 0.5,
        "when": 9.0,
    }
    control = {"step": 2, "changes": [change], "schedule": {"factor": 0.5, "rates": [1.0, 1.0]}}
    parts["training_state"] |= {"guard": {"norms": [1.5, 2.0]}, "skips": [skip], "control": control}
    judged(saved, parts)
    paths = list(numbers_in(parts))
    places = {".".join(map(str, path)) for path in paths}
    assert {
        "training_state.schedule.base_lrs.0",
        "trainer_state.json.best_metric",
        "training_state.guard.norms.0",
    } <= places
    taken = []
    for path in paths:
        for number in EVIL:
            try:
                judged(saved, with_number(parts, path, number))
            except (CheckpointError, ValueError, TypeError, OverflowError):
                continue
            taken.append(f"{'.'.join(map(str, path))} = {number}")
    figure("C1", f"{len(paths)} numbers of a checkpoint, each as {len(EVIL)} that none is; {len(taken)} are legal")
    assert [] == [place for place in taken if not any(re.search(legal, place) for legal in LEGAL)]


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "ASGD", "Rprop", "RMSprop", "SGD", "Adadelta", "NAdam"])
def test_what_optimizers_and_schedules_of_torch_write_is_plausible(saved, name):
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = getattr(torch.optim, name)([weight])
    schedules = torch.optim.lr_scheduler
    for make in (
        lambda: schedules.ReduceLROnPlateau(optimizer, mode="max"),
        lambda: schedules.ReduceLROnPlateau(optimizer),
        lambda: schedules.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False),
        lambda: schedules.CosineAnnealingWarmRestarts(optimizer, 4),
        lambda: schedules.LinearLR(optimizer),
    ):
        schedule = make()
        weight.grad = torch.ones(3, 3)
        optimizer.step()
        state = {"state": {"w": optimizer.state_dict()["state"].get(0, {})}, "param_groups": optimizer.param_groups}
        present = {"groups": optimizer.param_groups, "schedule": schedule.state_dict()}
        refuse_impossible(saved, 2, origin_of(saved), None, state, {"schedule": schedule.state_dict()}, **present)


class Follows(torch.optim.lr_scheduler.LRScheduler):
    """A schedule of the user's that keeps the last change of a metric."""

    slope = 0.0

    def get_lr(self):
        self.slope -= 0.5
        return list(self.base_lrs)


def test_a_schedule_of_the_user_may_keep_numbers_below_zero(saved):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    written, present = Follows(optimizer).state_dict(), {**Follows(optimizer).state_dict(), "slope": 0.0}
    assert written["slope"] < 0
    refuse_impossible(saved, 2, origin_of(saved), None, None, {"schedule": written}, schedule=present)


def test_there_are_payloads_enough(figure):
    assert 24 <= len(REFUSED) + len(IGNORED)
    figure("S6", f"{len(REFUSED) + len(IGNORED)} hostile checkpoints: none ran anything, each is a located error")
