"""Runs trainings that report to the library of a tracker, offline, and records what the library has of them.

One run is killed after a checkpoint and resumed; one of two processes shards the weights, and one is a pipeline. Each
is compared with the same run without the tracker. Run `make oracles`, which installs each library into a folder of its
own.

Usage:
    PYTHONPATH=FOLDER python scripts/oracles/trackers.py LIBRARY      adds to tests/ml/recorded/trackers.json
"""

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests/ml/recorded/trackers.json"
SECRET = "planted-3f9a7c21"
PARTS = """
[raw_dataset]
    -- include 'datasets/text_files.yaml'
    paths: ["{{ project_dir }}/words/*.txt"]

[tokenizer]
    == super()
    vocab_size: 258

[train_dataset]
    == super()
    block_size: 16

[eval_dataset]
    == super()
    block_size: 16

[model_config]
    == super()
    hidden_size: 16
    intermediate_size: 32
    num_hidden_layers: 2
    num_attention_heads: 2

[trainer_args]
    == super()
    report_to: {{ report_to | default('none') }}
    per_device_train_batch_size: 2
    max_steps: 6
    learning_rate: 1e-2
    logging_steps: 1
    eval_strategy: steps
    eval_steps: 3
    save_strategy: steps
    save_steps: 2
    use_cpu: true
"""
CONFIGS = {
    "one": ("-- extends 'trainers/trainer.yaml'", ""),
    "sharded": ("-- extends 'trainers/accel_trainer.yaml'", "    fsdp: full_shard\n"),
    "pipeline": (
        "-- extends 'trainers/pipeline_trainer.yaml'", "    schedule_class: Schedule1F1B\n    pipeline_chunks: 2\n",
    ),
}  # fmt: skip
CALLBACKS = """
import os
import signal
import time

import numpy

from forgather.ml.callbacks import TrainerCallback
from forgather.ml.tracking import log, log_image, log_table, log_text


class Own(TrainerCallback):
    def __init__(self, api_key):
        pass

    def on_step_end(self, args, state, control, **kwargs):
        log(own=state.global_step / 2)
        if state.global_step == 2:
            log_text("words", "hello")
            log_table("scores", ["a", "b"], [[1, "x"]])
            log_image("dot", numpy.eye(4))

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 5 and "STOP_WITH" in os.environ:
            time.sleep(4)  # W&B writes its file every second
            os.kill(os.getpid(), int(os.environ["STOP_WITH"]))
"""
# Comet writes its archive at the end of an offline experiment, and has nothing of a run that was killed before.
STOP_WITH = {"comet_ml": "SIGTERM"}


def project(folder):
    configs = folder / "templates/configs"
    configs.mkdir(parents=True)
    (folder / "meta.yaml").write_text("name: Tracked\n")
    (folder / "words").mkdir()
    for number in range(20):
        (folder / f"words/{number}.txt").write_text(f"The quick brown fox jumps over {number} lazy dogs. " * 20)
    (folder / "callbacks.py").write_text(CALLBACKS)
    for name, (head, more) in CONFIGS.items():
        meta = "" if name == "one" else "\n[config_metadata]\n    == super()\n    -- set ns.nproc_per_node = 2\n"
        own = f"\n[trainer_callbacks]\n    == super()\n    own: !singleton:callbacks.py:Own {{api_key: {SECRET}}}\n"
        (configs / f"{name}.yaml").write_text(f"{head}\n{meta}{PARTS}{more}{own}")


def trained(folder, config, name, report_to="none", *words, expects=(0,)):
    """Trains a config, and returns its losses by step."""
    given = ["--set", f"trainer_args.output_dir={folder / name}", "--set", f"trainer_args.report_to={report_to}"]
    done = subprocess.run(
        [sys.executable, "-m", "forgather", "-t", config, "train", *given, *words],
        cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    if done.returncode not in expects or "failed, and" in done.stderr + done.stdout:
        raise SystemExit(f"{config} with {report_to}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
    lines = [json.loads(line) for file in sorted(folder.glob(f"{name}/runs/*/loss.jsonl")) for line in file.open()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


# What each library has: a list of runs, each with its id, the values of two metrics by step in the order in which they
# came, the settings, and the names of all else.


def wandb_runs(folder):
    from forgather.runs.wandb_files import _items, _message, _records

    runs = {}
    for file in sorted(folder.rglob("run-*.wandb")):
        run = runs.setdefault(file.stem, {"id": file.stem, "loss": [], "own": [], "config": {}, "rest": set()})
        for _, content in _records(file.read_bytes()):
            record = _message("Record").FromString(content)
            for config in (record.config, record.run.config):
                run["config"] |= flat(_items(config))
            history = _items(record.history)
            step = history.get("train/global_step")
            for name in ("loss", "own"):
                run[name] += [[step, history[f"train/{name}"]]] if f"train/{name}" in history else []
            run["rest"] |= {"words", "scores", "dot"} & {name.partition(".")[0] for name in history}
        run["rest"] |= {path.name for path in file.parent.glob("files/forgather/*")}
    return list(runs.values())


def mlflow_runs(folder):
    import mlflow

    client, runs = mlflow.MlflowClient(), []
    for found in client.search_runs([one.experiment_id for one in client.search_experiments()]):
        run = {"id": found.info.run_id, "config": found.data.params, "rest": set()}
        for name in ("loss", "own"):
            run[name] = [[value.step, value.value] for value in client.get_metric_history(run["id"], name)]
        for top in ("logged", "forgather"):
            run["rest"] |= {Path(one.path).name.partition("-step-")[0] for one in client.list_artifacts(run["id"], top)}
        runs.append(run)
    return runs


def trackio_runs(folder):
    from trackio.sqlite_storage import SQLiteStorage

    runs = []
    for name in SQLiteStorage.get_runs("huggingface"):
        lines = SQLiteStorage.get_logs("huggingface", name)
        run = {"id": name, "config": flat(SQLiteStorage.get_run_config("huggingface", name))}
        for metric in ("loss", "own"):
            key = f"train/{metric}"
            run[metric] = [[line["train/global_step"], line[key]] for line in lines if key in line]
        run["rest"] = {key for line in lines for key in line if key in ("words", "scores", "dot")}
        run["rest"] |= {name for name in ("config.yaml", "origins.txt") if f"forgather.{name}" in run["config"]}
        runs.append(run)
    return runs


def aim_runs(folder):
    import aim

    runs = []
    for key in aim.Repo(str(folder)).list_all_runs():
        # A run that is opened for reading alone does not show what its library has not indexed yet.
        found = aim.Run(key, repo=str(folder), capture_terminal_logs=False, log_system_params=False)
        run = {"id": key, "config": flat({"forgather": found.get("forgather")}), "loss": [], "own": []}
        run["config"] |= {name: str(value) for name, value in flat(found["hparams"]).items()}
        for metric in found.metrics():
            if metric.name in ("loss", "own"):
                steps, (values, *_) = metric.data.items_list()
                run[metric.name] = [[step, value] for step, value in zip(steps, values, strict=True)]
        kinds = found.collect_sequence_info(("images", "texts"))
        run["rest"] = {one["name"] for entries in kinds.values() for one in entries}
        run["rest"] |= {name for name in ("config.yaml", "origins.txt") if name in found.get("forgather")}
        found.close()
        runs.append(run)
    return runs


def comet_ml_runs(folder):
    runs = {}
    for archive in sorted(folder.rglob("*.zip"), key=lambda file: file.parent.name):
        key = archive.name.partition("-")[0]
        run = runs.setdefault(key, {"id": key, "loss": [], "own": [], "config": {}, "rest": set()})
        with zipfile.ZipFile(archive) as content:
            lines = [json.loads(line) for line in content.read("messages.json").splitlines()]
        for line in lines:
            payload = line["payload"]
            metric = payload.get("metric") or {}
            name = (metric.get("metricName") or "").removeprefix("train/")
            if name in ("loss", "own"):
                run[name].append([metric.get("step"), metric["metricValue"]])
            if payload.get("param"):
                run["config"][payload["param"]["paramName"]] = payload["param"]["paramValue"]
            run["rest"] |= named(payload)
    return list(runs.values())


def named(payload):
    known, text = ("words", "scores", "dot", "config.yaml", "origins.txt"), json.dumps(payload).replace("\\", "")
    return {name for name in known if f'"{name}"' in text or f'/{name}"' in text or f'"{name}-step-' in text}


def flat(settings, prefix=""):
    found = {}
    for name, value in dict(settings).items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def leaks(folder):
    """Returns the files of a folder that contain the secret, archives unpacked."""
    found = []
    for file in folder.rglob("*"):
        if not file.is_file() or file.name == "run.json":
            continue
        data = file.read_bytes()
        if file.suffix == ".zip":
            with zipfile.ZipFile(file) as content:
                data = b"".join(map(content.read, content.namelist()))
        found += [str(file)] if SECRET.encode() in data else []
    return found


def recorded(library, folder):
    project(folder)
    runs_of = globals()[f"{library}_runs"]
    found = {"versions": {name: version(name) for name in (library, "transformers")}}
    plain = trained(folder, "one", "plain")
    signal = STOP_WITH.get(library, "SIGKILL")
    os.environ["STOP_WITH"] = str(int(getattr(__import__("signal"), signal)))
    trained(folder, "one", "tracked", library, expects=(-9, 143))
    del os.environ["STOP_WITH"]
    stopped = [run["id"] for run in runs_of(folder)]
    losses = trained(folder, "one", "tracked", library, "--resume")
    runs = runs_of(folder)
    found["resumed"] = {
        "stopped_with": signal,
        "runs": len(runs),
        "same_id": stopped == [run["id"] for run in runs],
        "same_losses": losses == plain,
        "losses": [[step, loss] for step, loss in plain.items()],
        **{name: runs[0][name] for name in ("loss", "own")},
        "rest": sorted(runs[0]["rest"]),
        "config": {name: str(value) for name, value in runs[0]["config"].items() if wanted(name)},
    }
    for config in ("sharded", "pipeline"):
        before = len(runs_of(folder))
        tracked = trained(folder, config, f"{config}_tracked", library)
        same = tracked == trained(folder, config, f"{config}_plain")
        found[config] = {"runs": len(runs_of(folder)) - before, "same_losses": same, "steps": list(tracked)}
    stores = [
        *folder.glob("*_tracked/runs"),
        *folder.glob("tracked/runs"),
        folder / "store",
        folder / ".aim",
        folder / "mlruns",
    ]
    found["leaks"] = [leak for store in stores for leak in leaks(store)]
    return found


def wanted(name):
    ends = ("optimizer.class", "trainer_args.learning_rate", "optimizer|class", "forgather.config", "forgather|config")
    return name.endswith(ends) and "config.yaml" not in name


def main(library):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {
            "OMP_NUM_THREADS": "1", "FORGATHER_TRUST": name, "TRACKIO_DIR": str(folder / "store"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        }  # fmt: skip
        os.chdir(folder)
        found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *(str(ROOT / path) for path in found if path)])
        facts = recorded(library, folder)
        os.chdir(ROOT)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    RECORD.write_text(json.dumps({**record, library: facts}, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main(sys.argv[1])
