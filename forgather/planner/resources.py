"""`calculate_resources`: memory from a number of parameters alone, for scripts that have no more than that.

Units:
    GB of 10^9 bytes.
"""

from __future__ import annotations

from typing import Any

from forgather.errors import PlanError
from forgather.planner.formulas import Way, memory
from forgather.planner.model_shapes import ModelShape, model_shape, shape_names
from forgather.planner.selection import memory_gb


def calculate_resources(model_params: float, sequence_length: int, batch_size: int) -> dict[str, Any]:
    """Returns the memory of training without mixed precision, on one device.

    A rule of thumb multiplies batch x sequence x all parameters x 4 bytes for activations, as if each token kept a
    number for each weight of the model. What is kept is a few numbers for each token, block and unit of width, which
    grow with the square root of the parameters of a block.

    Args:
        model_params: the number of parameters.
        sequence_length: the tokens of a row.
        batch_size: the rows of a batch.

    Returns:
        `total_gb`, the peak; `model_gb`, `gradient_gb`, `optimizer_gb`, `activation_gb`, `logits_gb`; `like`, the
        well-known model whose width and depth are used, because a number of parameters does not say them;
        `rule_of_thumb_gb`, what the rule gives for activations.

    Raises:
        PlanError: FG998 if a number is not above 0.

    Example:
        >>> found = calculate_resources(7e9, 2048, 1)
        >>> found["rule_of_thumb_gb"], found["like"]
        (57344.0, 'mistralai/Mistral-7B-v0.1')
    """
    for name, value in (
        ("model_params", model_params),
        ("sequence_length", sequence_length),
        ("batch_size", batch_size),
    ):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise PlanError(f"{name} is {value!r}: it is a number above 0", code="FG998", found=value).about(name)
    shape = _nearest(model_params)
    scale = model_params / shape.parameters
    used = memory(shape, Way(tokens=int(sequence_length), micro_batch=int(batch_size), dtype="fp32"))
    rows = memory_gb(used)
    state = (used.parameters + used.gradients + used.optimizer) * (scale - 1) / 1e9
    return {
        "model_gb": rows["parameters_gb"] * scale,
        "gradient_gb": rows["gradients_gb"] * scale,
        "optimizer_gb": rows["optimizer_gb"] * scale,
        "activation_gb": rows["activations_gb"],
        "logits_gb": rows["logits_gb"],
        "total_gb": rows["per_gpu_gb"] + state,
        "like": shape.name,
        "rule_of_thumb_gb": batch_size * sequence_length * model_params * 4 / 1e9,
    }


def _nearest(parameters: float) -> ModelShape:
    shapes = [shape for shape in map(model_shape, shape_names()) if shape.family == "text_generation"]
    # In the ratio, because models differ by factors.
    return min(shapes, key=lambda shape: max(shape.parameters / parameters, parameters / shape.parameters))
