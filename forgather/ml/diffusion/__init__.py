"""Training of text-to-image models of diffusers: pictures, noise, the loss, samples and files of a LoRA.

Each public name imports its module when the name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "DenoisingLoss": "denoising_loss",
    "FixedNoiseRows": "rows",
    "ImageSampleCallback": "image_sample",
    "InstanceImages": "images",
    "LoraFileCallback": "lora_file",
    "NoisedRows": "rows",
    "TextToImagePipeline": "pipeline",
    "denoiser": "pipeline",
    "encoded_rows": "pipeline",
}

__all__ = sorted(_LAZY)  # noqa: PLE0605


# PEP 562: reading a config must not import what a part needs.
def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
