"""Runs the Ray driver on a real Ray cluster of two machines, and records what came of it.

Both machines are on this computer, as `ray.cluster_utils.Cluster` makes them; the processes use gloo. The run is that
of `fgcli train` with two processes, whose losses and weights it must have. Run `make oracles`, which installs Ray into
a folder of its own.

Usage:
    PYTHONPATH=FOLDER python scripts/oracles/ray_driver.py        writes tests/runs/recorded/ray.json
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
EACH = {"CPU": 1, "GPU": 0}
RECORD = ROOT / "tests/runs/recorded/ray.json"
sys.path.insert(0, str(ROOT))

from forgather.launch.ray_driver import start  # noqa: E402


def words(folder, processes, *more):
    given = ["--set", "trainer_args.max_steps=4", "--set", f"trainer_args.output_dir={folder}"]
    return ["-p", "projects/parallel", "-t", "ddp", "train", "--nproc-per-node", str(processes), *more, *given]


def outcome(folder):
    """Returns the losses and a digest of the weights of the run in a folder."""
    (metrics,) = Path(folder).rglob("metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    (weights,) = Path(folder).glob("model.safetensors")
    return [line["loss"] for line in lines if "loss" in line], hashlib.sha256(weights.read_bytes()).hexdigest()


def on_ray(folder):
    import ray
    from ray.cluster_utils import Cluster

    # Two machines, of which each has one process; STRICT_SPREAD would wait for ever on one.
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address)
    failed = start(words(folder, 1, "--no-such-option"), folder=str(ROOT), nodes=2, resources=EACH)
    status = start(words(folder, 1), folder=str(ROOT), nodes=2, resources=EACH)
    ray.shutdown()
    cluster.shutdown()
    return status, failed


if __name__ == "__main__":
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])
    os.environ |= {"OMP_NUM_THREADS": "1", "FORGATHER_TRUST": str(ROOT), "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        status, failed = on_ray(one)
        subprocess.run([sys.executable, "-m", "forgather", *words(two, 2)], cwd=ROOT, check=True)
        ours, others = outcome(one), outcome(two)
    if (status, failed) != (0, 2) or ours != others:
        raise SystemExit(f"status {status}, of wrong words {failed}; {ours} on Ray, {others} without it")
    found = {"ray": version("ray"), "machines": 2, "backend": "gloo", "status": status, "status_of_wrong_words": failed}
    found |= {"losses": ours[0], "same_weights_as_torchrun": True}
    RECORD.write_text(json.dumps(found) + "\n", encoding="utf-8")
    print(RECORD.read_text())
