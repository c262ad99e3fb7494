"""The block [adapter]: what `fgcli check` says of its settings, without importing torch or peft."""

import json

import pytest

from forgather.cli.options import OWN_NAMES
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

CONFIG = """\
-- extends 'trainers/{trainer}.yaml'

[model_config]
    !singleton:transformers:LlamaConfig@model_config {{vocab_size: 64}}

[adapter]
    -- include 'adapters/lora.yaml'
{lines}
"""


def findings(tmp_path, *lines, trainer="trainer", more=""):
    text = CONFIG.format(trainer=trainer, lines="\n".join(f"    {line}" for line in lines)) + more
    folder = make_project(tmp_path / "page", {"templates/configs/main.yaml": text})
    found = check_project(Project("main", folder, trust=True), reserved=OWN_NAMES).findings
    return {(one.code, one.span.line): one.message for one in found if "adapter" in str(one.path)}


@pytest.mark.parametrize("trainer", ["trainer", "accel_trainer", "pipeline_trainer", "hf_trainer"])
def test_a_block_with_settings_of_every_kind_has_no_findings(tmp_path, trainer):
    lines = ["r: 16", "target_modules: [q_proj]", "use_dora: true", "trainable_token_indices: {embed_tokens: [1]}"]
    assert findings(tmp_path, *lines, trainer=trainer) == {}
    assert findings(tmp_path, "rank: 4", "alpha: 8", "dropout: 0.1", trainer=trainer) == {}


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("r: 8, rank: 4", "FG812", "'r' is given twice, once as 'rank'"),
        ("lora_alpha: 0", "FG813", "lora_alpha is 0"),
        ("lora_dropout: 1.0", "FG813", "lora_dropout is 1.0"),
        ("lora_dropuot: 0.1", "FG810", "lora has no setting 'lora_dropuot'"),
        ("target_modules: {a: b}", "FG813", "target_modules is {'a': 'b'}"),
        ("init_lora_weights: eva", "FG813", "init_lora_weights is 'eva'"),
    ],
)
def test_a_wrong_setting_is_found_at_its_line(tmp_path, line, code, message):
    lines = line.split(", ") if "rank" in line else [line]
    assert findings(tmp_path, *lines) == {(code, 7 + len(lines)): message}


def test_an_adapter_in_slices_is_found_before_anything_is_built(tmp_path):
    folder = make_project(
        tmp_path / "page",
        {
            "templates/configs/main.yaml": CONFIG.format(trainer="accel_trainer", lines="    r: 8")
            + "\n[trainer_args]\n    == super()\n    tensor_parallel_size: 2\n"
        },
    )
    found = check_project(Project("main", folder, trust=True), reserved=OWN_NAMES).findings
    refused = {one.message.partition(":")[0] for one in found if one.code == "FG770"}
    assert refused == {"an adapter with tensor_parallel_size 2"}


BASE = "[model]\n    -- include 'models/pretrained.yaml'\n    pretrained_model_name_or_path: {folder}\n"
MODULES = ("model.embed_tokens", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("[q_proj, up_proj, self_attn.q_proj]", {}),
        ("[q_prj, up_proj]", {("FG900", 8): "'q_prj' is in no name"}),
        ("[lm_head]", {}),
        (".*q_prj", {}),
        ("all-linear", {}),
    ],
)
def test_a_misspelt_module_is_found_in_the_names_of_a_local_model(tmp_path, is_split, names, expected):
    weights = {f"{name}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in MODULES}
    if is_split:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(weights, "x")}))
    else:
        header = json.dumps(weights).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    found = findings(tmp_path, f"target_modules: {names}", more=BASE.format(folder=tmp_path))
    assert found.keys() == expected.keys()
    assert all(text in found[key] for key, text in expected.items())
