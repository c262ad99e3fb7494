"""A trained adapter that a run has saved, put back onto the base model that it was trained on.

Takes the folder of a checkpoint or of a run's final adapter, and functions that make the model as the run did. The base
model has to be the one that the adapter was trained on. A quantized base model is dequantized first, because its
rounded weights cannot take the change of an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import CheckpointError, first_line
from forgather.ml.adapter_base import (
    BaseModel,
    base_of,
    describe_base,
    is_peft_model,
    names_of_adapter,
    note_base,
    read_base,
)
from forgather.ml.adapters import Adapter
from forgather.ml.checkpoint.export import weights_in_type
from forgather.ml.checkpoint.files import ADAPTER
from forgather.ml.checkpoint.manifest import Manifest, read_manifest
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.checkpoint.state import read_tensors
from forgather.ml.model_class import class_name
from forgather.ml.output_comparison import takes_tokens
from forgather.ml.vocabulary import saves_embeddings


class ExportError(CheckpointError):
    """Raised if an adapter cannot be exported, or if its export is not the same model."""

    code = "FG930"


@dataclass(frozen=True, kw_only=True)
class TrainedAdapter:
    """An adapter that a run has saved, and how its model is made.

    Args:
        folder: the folder of a checkpoint, or of the adapter that the run saved at its end.
        is_checkpoint: whether it is a checkpoint.
        make_base: a function that returns the base model as the run made it, or the model with its adapter if the
            config itself put the adapter into the model.
        adapter: the adapter of the run, without trained weights; None if `make_base` returns a model with an adapter.
        seed: the seed of the run, from which some adapters are computed.
    """

    folder: Path
    is_checkpoint: bool
    make_base: Callable[[], nn.Module]
    adapter: Adapter | None
    seed: int

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of a checkpoint; None for a final adapter."""
        return read_manifest(self.folder) if self.is_checkpoint else None

    def base(self) -> nn.Module:
        """Returns the base model, with weights that are not quantized.

        Raises:
            ExportError: FG931 if it is another model than the one that the adapter was trained on; FG932 if its outputs
                cannot be compared.
        """
        base = self.make_base()
        theirs, ours = read_base(self.folder), base_of(base) or describe_base(base)
        if theirs is not None and theirs.is_known_to_differ(ours):
            raise ExportError(
                f"the adapter in {str(self.folder)!r} was trained on {theirs}, and the config of the run makes {ours}",
                code="FG931",
                hint="restore that base model in its place: an adapter fits only the weights that it was trained on",
            )
        plain = getattr(base, "base_model", None) if is_peft_model(base) else base
        plain = getattr(plain, "model", plain)
        if not takes_tokens(plain):  # type: ignore[arg-type]
            raise ExportError(
                f"{class_name(plain)} cannot be compared with its export: it is not a model of transformers that takes "
                "input_ids",
                code="FG932",
                hint="load base and adapter in Python; merge_and_unload() of peft merges them",
            )
        base = _dequantized(base)
        note_base(base, theirs if theirs is not None and theirs.digest else ours)
        return base

    def on(self, base: nn.Module) -> nn.Module:
        """Returns the trained model: the adapter with its weights, on top of a base model, which is changed.

        Args:
            base: the result of `base`.

        Raises:
            CheckpointError: FG603, FG604 or FG611 if a file is damaged.
            ExportError: FG934 if the weights of the adapter are not those of the config.
        """
        if self.adapter is not None:
            known = base_of(base)
            base = self.adapter.apply(base, seed=self.seed)
            note_base(base, known or BaseModel())
        _load_adapter(base, self.folder, is_checkpoint=self.is_checkpoint)
        return base.eval()


def _dequantized(base: nn.Module) -> nn.Module:
    if getattr(base, "hf_quantizer", None) is None:
        return base
    if is_peft_model(base):
        raise ExportError(
            "the config puts an adapter into a quantized model itself, so the model cannot be dequantized first",
            code="FG932",
            hint="use the block [adapter] of the config",
        )
    try:
        return base.dequantize()  # type: ignore[operator, no-any-return]
    except (NotImplementedError, ValueError, RuntimeError) as error:
        raise ExportError(
            f"the base model {class_name(base)} cannot be dequantized: {first_line(error)[:200]}",
            code="FG932",
            hint="merge on a machine with the quantization library of the run",
        ) from error


def _load_adapter(model: nn.Module, folder: Path, *, is_checkpoint: bool) -> None:
    """Copies the saved weights of an adapter into a model."""
    refused = (
        f"the adapter in {str(folder)!r} has other weights than the config of the run: ",
        "export it with the config and the code that it was trained with",
    )
    if not is_checkpoint:
        import peft

        found = read_tensors(folder / ADAPTER)
        shapes = {
            name: value.shape
            for name, value in peft.get_peft_model_state_dict(
                model, save_embedding_layers=saves_embeddings(model)
            ).items()
        }
        if other := sorted(name for name in {*shapes, *found} if shapes.get(name) != _shape(found.get(name))):
            raise ExportError(f"{refused[0]}{other[0]!r:.80}", code="FG934", hint=refused[1])
        peft.set_peft_model_state_dict(model, found)
        return
    found = weights_in_type(whole_weights(folder), None)
    state = model.state_dict()
    lacking = names_of_adapter(model) - set(found)
    # A quantized base model has statistics next to its weights, which the checkpoint stores, too; they do not change.
    strange = {name for name in set(found) - set(state) if f"{name.partition('.weight.')[0]}.weight" not in state}
    differing = {name for name, value in found.items() if name in state and value.shape != state[name].shape}
    if other := sorted((lacking - _tied_rows(model, found)) | strange | differing):
        raise ExportError(f"{refused[0]}{other[0]!r:.80}", code="FG934", hint=refused[1])
    with torch.no_grad():
        for name, value in found.items():
            if name in state:
                state[name].copy_(value)


def _shape(value: Tensor | None) -> Any:
    return None if value is None else value.shape


def _tied_rows(model: nn.Module, found: Mapping[str, Tensor]) -> set[str]:
    """Returns the names of weights that are in memory under another name that was stored."""
    state = model.state_dict()
    places = {state[name].data_ptr() for name in found if name in state}
    return {name for name, value in state.items() if value.data_ptr() in places}
