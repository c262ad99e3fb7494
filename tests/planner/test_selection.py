"""Hardware and strategy for a model by its name."""

import json
import subprocess
import sys
import warnings

import pytest

from forgather.cli.main import main
from forgather.cli.selection_output import selection_lines
from forgather.errors import PlanError
from forgather.hardware_selector import HardwareSelector
from forgather.planner.benchmark import benchmark
from forgather.planner.formulas import Way, memory
from forgather.planner.memory_plan import format_size
from forgather.planner.model_shapes import model_shape
from forgather.planner.selection import ways

SELECTOR = HardwareSelector()
BF16 = "mixed_precision_dtype is 'bf16'"


def configured(name, gpus, rows, gb=None, **more):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", BF16)
        family = model_shape(name).family
        return SELECTOR.get_distributed_training_config(family, name, gpus, rows, gb, **more)


@pytest.mark.parametrize(("gpus", "rows", "gb"), [(1, 4, 24), (2, 6, 24), (4, 8, 16), (8, 4, None), (8, 1, 12)])
def test_the_answer_fits_and_its_numbers_agree(gpus, rows, gb):
    found = configured("facebook/opt-1.3b", gpus, rows, gb)
    assert found["estimated_memory"]["per_gpu_gb"] <= (gb or 85.9)
    assert rows == found["per_gpu_batch_size"] * found["gradient_accumulation_steps"]
    assert gpus * rows == found["global_batch_size"]
    assert gpus == found["gpu_count"]
    assert found["mixed_precision"] is True
    assert ("fsdp_config" in found, "deepspeed_config" in found) == (
        found["distributed_strategy"] == "FSDP",
        found["distributed_strategy"] == "DeepSpeed",
    )


def test_the_keys_of_each_strategy():
    keys = {"sharding_strategy": str, "cpu_offload": bool, "activation_checkpointing": bool}
    found = configured("facebook/opt-13b", 4, 1, 16)["fsdp_config"]
    assert keys == {key: type(value) for key, value in found.items()}
    assert found["cpu_offload"] is True
    found = configured("llama-7b", 1, 1, 24)["deepspeed_config"]
    assert {"zero_stage": 2, "offload_optimizer": True, "offload_param": False} == found


def test_the_simplest_way_is_taken_where_everything_fits():
    assert "DDP" == configured("gpt2", 8, 8)["distributed_strategy"]
    assert configured("gpt2", 8, 8)["gradient_checkpointing"] is False


def test_what_does_not_fit_names_the_nearest_way_and_what_it_needs():
    with pytest.raises(
        PlanError, match=r"FG999.*'facebook/opt-30b' does not fit on 1 x 953.7 MiB: the nearest way.* needs"
    ) as bad:
        configured("opt-30b", 1, 1, 1)
    # No way that was left out needs less.
    least = min(memory(model_shape("opt-30b"), way).peak for way in ways(Way(gpus=1), 1))
    assert f"needs {format_size(least)}" in bad.value.message


def test_a_bf16_answer_warns_of_fp16():
    with pytest.warns(UserWarning, match="pass it as bf16=True"):
        SELECTOR.get_distributed_training_config("text_generation", "gpt2", 1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = SELECTOR.get_distributed_training_config("text_generation", "gpt2", 1, 1, device="v100")
    assert "fp16" == found["mixed_precision_dtype"]


def test_hardware_that_is_too_small_is_named_with_its_reason():
    with pytest.warns(UserWarning, match=BF16):
        found = SELECTOR.select_hardware_for_task(
            "text_generation", "llama-2-13b", "training", 1, True, 8, available_hardware=["t4", "a100-80", "h100"]
        )
    assert "h100" == found["primary_recommendation"]
    assert "a100-80" in found["fallback_options"]
    small = SELECTOR.select_hardware_for_task(
        "text_generation", "opt-30b", "training", 1, True, 1, available_hardware=["v100", "t4"], sequence_length=2048
    )
    assert {"t4": "v100"} == {name: small["primary_recommendation"] for name in small["unsuitable"]} or small[
        "fallback_options"
    ]


def test_gpus_count_only_where_the_task_is_distributed():
    with pytest.warns(UserWarning, match=BF16):
        found = SELECTOR.select_hardware_for_task("text_generation", "gpt2", gpu_count=4)
    assert 1 == found["gpu_count"]
    assert "gpu_count 4 is for distributed=True: planned for one GPU" in found["assumed"]
    assert ["rocm", "cpu"] == found["fallback_options"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: it is a whole number from 1"),
        ({"gpu_count": -1}, "gpu_count is -1"),
        ({"gpu_count": 2.0}, "gpu_count is 2.0"),
        ({"max_memory_gb": float("nan")}, "max_memory_gb is nan"),
        ({"max_memory_gb": 0}, "max_memory_gb is 0"),
        ({"sequence_length": 4096}, "takes 1 to 1024 tokens"),
        ({"model_family": "vision"}, "'openai-community/gpt2' is in the family 'text_generation'"),
    ],
)
def test_a_wrong_number_is_refused(wrong, message):
    arguments = {"model_family": "text_generation", "model_name": "gpt2", "gpu_count": 1, "batch_size": 1, **wrong}
    with pytest.raises(PlanError, match="FG998") as bad:
        SELECTOR.get_distributed_training_config(**arguments)
    assert message in bad.value.message


@pytest.mark.parametrize(
    ("strategy", "gpus", "device", "known"),
    [
        ("FSDP", 1, "cuda", "DDP, DeepSpeed"),
        ("ZeRO", 2, "cuda", "DDP, FSDP, DeepSpeed"),
        ("DeepSpeed", 2, "epyc-9654", "DDP, FSDP"),
    ],
)
def test_a_strategy_that_devices_do_not_have_is_refused_with_those_that_they_have(strategy, gpus, device, known):
    with pytest.raises(PlanError, match="FG998") as bad:
        SELECTOR.get_strategy_config(strategy, "text_generation", "gpt2", gpus, 1, device=device)
    assert bad.value.message.endswith(f" there is {known}")
    cells = benchmark("gpt2", hardware=("epyc-9654",), distributed=True, max_gpus=2)["cells"]
    assert not [cell for cell in cells if "DeepSpeed" in cell["name"]]


def test_a_text_to_image_model_is_said_to_be_in_16_bits_as_a_whole():
    def said(name):
        return [one for one in configured(name, 1, 1, 80)["assumed"] if "of the whole model in bf16" in one]

    assert (1, 0) == (len(said("sdxl")), len(said("llama-7b")))


def test_another_task_is_refused():
    with pytest.raises(PlanError, match="task_type is 'inference'"):
        SELECTOR.select_hardware_for_task("text_generation", "gpt2", "inference")


def test_selection_imports_no_torch():
    code = "import sys, forgather.hardware_selector as h; h.HardwareSelector().get_distributed_training_config("
    code += (
        "'vision', 'vit-base-patch16-224', 1, 1, device='v100'); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "False False\n" == found.stdout


def test_a_benchmark_has_a_cell_for_each_hardware_count_and_strategy():
    found = benchmark("t5-small", hardware=["cuda", "rocm"], distributed=True, max_gpus=6)
    counts = [
        (cell["hardware"], cell["config"]["gpu_count"], cell["config"]["distributed_strategy"])
        for cell in found["cells"]
    ]
    expected = [(1, "DDP"), *((gpus, name) for gpus in (2, 4, 6) for name in ("DDP", "FSDP", "DeepSpeed"))]
    assert [(device, *cell) for device in ("cuda", "rocm") for cell in expected] == counts
    cells = benchmark("llama-2-70b", hardware=["t4"], distributed=True, max_gpus=2)["cells"]
    assert "'meta-llama/Llama-2-70b-hf' does not fit on 1 x" in cells[0]["reason"]
    assert found == json.loads(json.dumps(found))


def test_the_commands_print_what_the_selector_returns(capsys):
    words = ["--model-family", "text_generation", "--model-name", "llama-7b", "--distributed", "--gpu-count", "8"]
    assert 0 == main(["select", *words, "--max-memory-gb", "24", "--json"])
    found = json.loads(capsys.readouterr().out)
    expected = configured("llama-7b", 8, 1, 24)
    assert expected == {key: found[key] for key in expected}
    assert 0 == main(["select", *words])
    assert "update     8 GPUs x 1 row x 1 pass = 8 rows" in capsys.readouterr().out
    assert 1 == main(["benchmark"])
    assert "FG998" in capsys.readouterr().err
    assert 0 == main(["benchmark", "--list-models"])
    assert "meta-llama/Llama-2-7b-hf" in capsys.readouterr().out


def test_hardware_that_is_left_out_is_named_with_what_it_lacks():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = HardwareSelector().select_hardware_for_task(
            "text_generation", "llama-7b", distributed=True, gpu_count=4, max_memory_gb=24
        )
    assert "on the host" in found["summary"]
    (line,) = [line for line in selection_lines(found) if "does not fit" in line]
    assert line.startswith("note: cpu is left out: ") and "of processors, without offload" in line
