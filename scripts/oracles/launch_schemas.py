"""Records the schemas of SkyPilot, dstack and Kubeflow Trainer, with which the printed launch files are compared.

Each library has a folder of its own, because none of them is needed by Forgather. Before a schema is written, the
library's own parser reads every printed file, and must refuse a file with a misspelled key. Run `make oracles`; it
needs the package index.

Usage:
    python scripts/oracles/launch_schemas.py files FOLDER                       prints the launch files
    PYTHONPATH=LIBS python scripts/oracles/launch_schemas.py skypilot FOLDER    writes tests/runs/recorded/skypilot.json
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests/runs/recorded"


def print_files(folder):
    sys.path.insert(0, str(ROOT))
    from tests.runs.launch_cells import CELLS, printed

    folder.mkdir(parents=True, exist_ok=True)
    for cell in CELLS:
        for kind in READERS:
            text = printed(cell, kind)
            if text is not None:
                (folder / f"{cell.name}.{kind}.yaml").write_text(text, encoding="utf-8")


def skypilot():
    import sky
    from sky.utils import schemas

    schema = schemas.get_task_schema()
    schema["properties"]["resources"] = schemas.get_resources_schema()

    def read(data):
        given = dict.fromkeys(data.get("secrets") or {}, "x")
        sky.Task.from_yaml_config(data, secrets_overrides=list(given.items()))

    return "skypilot", schema, read


def dstack():
    from dstack._internal.core.models import configurations

    return (
        "dstack",
        configurations.TaskConfiguration.model_json_schema(),
        configurations.parse_run_configuration,
    )


def kubeflow():
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob as TrainJob

    schema = TrainJob.model_json_schema(by_alias=True)
    # The generated models hold a number or a string in an object of their own.
    schema["$defs"] = {
        name: {"type": ["string", "number"]} if "actual_instance" in definition.get("properties", {}) else definition
        for name, definition in schema["$defs"].items()
    }

    def read(data):
        # The models drop keys that they do not know, and the API server refuses them.
        left = TrainJob.from_dict(data).to_dict()
        if keys(data) != keys(left):
            raise ValueError(f"unknown keys: {keys(data) ^ keys(left)}")

    return "kubeflow_trainer_api", closed(schema), read


def keys(data, place=""):
    if isinstance(data, dict):
        return {f"{place}.{key}" for key in data} | {k for key, v in data.items() for k in keys(v, f"{place}.{key}")}
    if isinstance(data, list):
        return {found for item in data for found in keys(item, f"{place}[]")}
    return set()


def closed(schema):
    """Returns a schema in which an object has no other keys than its properties, as the API server judges it."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    whole = {key: closed(value) for key, value in schema.items()}
    return whole | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else whole


READERS = {"skypilot": skypilot, "dstack": dstack, "kubeflow": kubeflow}
_TEXTS = ("description", "title", "default", "examples")


def without_texts(schema, is_names=False):
    """Returns a schema without descriptions; below `properties`, keys are names of settings."""
    if isinstance(schema, list):
        return [without_texts(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if is_names or key not in _TEXTS}
    return {
        key: without_texts(value, not is_names and key in ("properties", "$defs", "patternProperties"))
        for key, value in kept.items()
    }


def with_used_definitions(schema):
    """Returns a schema without the definitions that nothing refers to."""
    definitions = schema.pop("$defs", {})
    used, text = {}, json.dumps(schema)
    while new := [name for name in definitions if name not in used and f'/{name}"' in text]:
        used |= {name: definitions[name] for name in new}
        text += json.dumps([definitions[name] for name in new])
    return schema | {"$defs": used} if used else schema


def record(kind, folder):
    from ruamel.yaml import YAML

    distribution, schema, read = READERS[kind]()
    files = sorted(folder.glob(f"*.{kind}.yaml"))
    if not files:
        raise SystemExit(f"no files of {kind} in {folder}")
    for file in files:
        data = YAML(typ="safe").load(file.read_text(encoding="utf-8"))
        read(json.loads(json.dumps(data)))
    misspelled = {**data, "comands": data.pop("commands", None)} if kind == "dstack" else {**data, "voluems": {}}
    try:
        read(misspelled)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - of any library
        refusal = " ".join(str(error).split())[:160]
    else:
        raise SystemExit(f"{kind} accepts a misspelled key")
    content = {
        distribution: version(distribution),
        "accepted_files": len(files),
        "refuses": refusal,
        "schema": with_used_definitions(without_texts(schema)),
    }
    target = RECORDED / f"{kind}.json"
    target.write_text(json.dumps(content, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{distribution} {content[distribution]} accepts {len(files)} files: {target}")


if __name__ == "__main__":
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "files":
        print_files(folder)
    else:
        record(what, folder)
