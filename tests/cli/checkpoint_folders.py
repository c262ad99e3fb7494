"""Checkpoints made by hand, small and without torch, as a run would write them."""

import json

import xxhash

from forgather.ml.checkpoint.checkpoint_dir import write_checkpoint
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.lineage import next_origin
from forgather.ml.checkpoint.manifest import MANIFEST


def tensor_bytes(tensors):
    """Returns a safetensors file of floats that are all zero, by name and shape."""
    header, end = {}, 0
    for name, shape in tensors.items():
        begin, end = end, end + 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def make_checkpoint(
    output_dir, step, *, run="aaaa", best=None, metric=None, loss=2.0, loss_step=None, alone=False, top_k=None, **facts
):
    """Writes a checkpoint of a run.

    Args:
        best: the best step so far.
        metric: the value at this step.
        loss, loss_step: the last line of the log that has one; of this step by default.
        alone: of the model alone.
        top_k: how many of the best the run keeps.
    """
    history = [{"step": loss_step or step, "loss": loss}]
    if metric is not None:
        history.append({"step": step, "eval_loss": metric})
    state = {
        "global_step": step,
        "max_steps": 100,
        "epoch": step / 10,
        "log_history": history,
        "best_global_step": best,
    }
    group = {"lr": 0.01, "betas": {"$tuple": [0.9, 0.95]}, "params": ["weight"]}
    args = {"metric_for_best_model": metric and "loss", "seed": 1, "save_top_k": top_k}

    def fill(draft):
        draft.write("model.safetensors", [tensor_bytes({"weight": (2, 3), "bias": (1, 3)})])
        if not alone:
            draft.write("optimizer.json", [json_bytes({"state": {}, "param_groups": [group]})])
            draft.write("optimizer.safetensors", [tensor_bytes({"state.weight.exp_avg": (2, 3)})])
            classes, position = {"optimizer": "AdamW"}, {"epoch": 0, "batch": step}
            draft.write("training_state.json", [json_bytes({"classes": classes, "data": position})])
        draft.write("trainer_state.json", [json_bytes(state)])
        draft.write("training_args.json", [json_bytes(args)])

    origin = next_origin(output_dir, run, 100)
    return write_checkpoint(output_dir, step, fill, facts={**facts, "run": origin})


def rewrite_manifest(folder, change):
    """Changes the body of a manifest and gives it the digest that fits, as whoever forges one would."""
    body = json.loads((folder / MANIFEST).read_text())
    body.pop("xxh3")
    change(body)
    body["files"] = dict(sorted(body["files"].items())) if isinstance(body["files"], dict) else body["files"]
    digest = xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**body, "xxh3": digest}, indent=1) + "\n")


def forge(folder, name, content):
    """Writes a file of a checkpoint, or removes it (None), so that every digest fits."""
    if content is None:
        (folder / name).unlink()
        rewrite_manifest(folder, lambda body: body["files"].pop(name))
        return
    (folder / name).write_bytes(content)
    fact = {"bytes": len(content), "xxh3": xxhash.xxh3_128(content).hexdigest()}
    rewrite_manifest(folder, lambda body: body["files"].update({name: fact}))
