"""The LoRA of a text-to-image model as a file of diffusers, which `load_lora_weights` of a pipeline reads.

Takes the folder of an adapter in the layout of peft, which every run with an adapter leaves. `lora_file` gives the
content of the file. `LoraFileCallback` writes it next to the adapter when training ends: it loads the file into a
pipeline with a fresh denoiser, and refuses a file with which the outputs differ from those of the trained model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.diffusion.pipeline import TextToImagePipeline
from forgather.ml.log import get_logger
from forgather.ml.strategy.model_strategy import to_device
from forgather.ml.train_mode import restored_train_modes

LORA_FILE = "pytorch_lora_weights.safetensors"
"""The file that `load_lora_weights` of diffusers looks for in a folder."""

TOLERANCE = 1e-5
"""The largest difference of outputs, relative to the largest output, with which a file counts as equal."""

_PREFIX = "base_model.model."
_LAYERS = (".lora_A.weight", ".lora_B.weight", ".lora_magnitude_vector")
_log = get_logger(__name__)


def lora_file(folder: Path, part: str) -> bytes:
    """Returns the LoRA of a folder as the content of a file of diffusers.

    Args:
        folder: the folder of the adapter, as peft writes it.
        part: the name of the trained part in the pipeline: "unet" or "transformer".

    Raises:
        TrainingError: FG981 if the adapter has weights that a file of diffusers cannot have.

    Source:
        `save_lora_weights` of the pipelines of diffusers.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(folder / ADAPTER).items():
        if not name.endswith(_LAYERS):
            raise TrainingError(
                f"the adapter has {name!r}, which is no layer of a LoRA: a LoRA file of diffusers cannot have it",
                code="FG981",
                hint="remove modules_to_save and bias from the settings of the adapter, or remove lora_file from "
                "[trainer_callbacks]; the adapter itself is saved in the layout of peft",
            )
        weights[f"{part}.{name.removeprefix(_PREFIX)}"] = weight.contiguous()
    settings: Mapping[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    described = {f"{part}.{name}": value for name, value in settings.items()}
    return save(weights, {"format": "pt", "lora_adapter_metadata": json.dumps(described, indent=2, sort_keys=True)})


class LoraFileCallback(TrainerCallback):
    """A callback that writes `pytorch_lora_weights.safetensors` when training ends, and proves that it can be loaded.

    The file is in the output folder, beside the adapter in the layout of peft. Without a saved adapter
    (`save_strategy: "no"`, or all weights were trained), nothing is written.

    Args:
        pipeline: the pipeline whose denoiser is trained.

    Attributes:
        difference: the largest difference of outputs with the written file; None before it is written.
    """

    def __init__(self, pipeline: TextToImagePipeline) -> None:
        self.pipeline = pipeline
        self.difference: float | None = None

    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Writes the file, unless the run ended with an error.

        Raises:
            TrainingError: FG981 if the outputs with the written file differ from those of the trained model.
        """
        folder = Path(args.output_dir)
        if error is not None or args.save_strategy == "no" or not (folder / ADAPTER).is_file():
            return
        batch = self.pipeline.example()
        # On every rank: the forward pass of a sharded model is a collective.
        expected = _output(kwargs["model"], batch)
        if not state.is_world_process_zero:
            return

        def fill(draft: Draft) -> None:
            draft.write(LORA_FILE, [lora_file(folder, self.pipeline.part)])
            self.difference = self._compare(draft.folder, expected, batch)

        write_model(LocalStorage(), folder, fill)
        _log.warning(
            "%s was loaded into a new pipeline: the outputs differ by %.1e at most",
            folder / LORA_FILE,
            self.difference,
        )

    def _compare(self, folder: Path, expected: Tensor, batch: Mapping[str, Any]) -> float:
        again = self.pipeline.with_lora(folder, LORA_FILE)
        found = _output(again.to(expected.device), batch)
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= TOLERANCE:
            raise TrainingError(
                f"{LORA_FILE} was not written: loaded again, it gives outputs that differ by {difference:.1e} from "
                "those of the trained model",
                code="FG981",
                hint=f"the adapter in the layout of peft, {ADAPTER}, is complete; a base model other than the one of "
                "the pipeline, or settings that diffusers does not read, are usual causes",
            )
        return difference


def _output(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    with restored_train_modes(model), torch.no_grad():
        model.eval()
        inputs = to_device(batch, next(model.parameters()).device)
        found: Tensor = model(**inputs)[0]
        return found.float()
