"""Shapes of well-known models: what a formula has to know about a model, without downloading or building it.

Takes the name of a model; gives a `ModelShape`. The folder `shapes` has a file for each family of models, with the
configuration of each model as transformers spells it, the number of parameters of the checkpoint and its source. The
number that `ModelShape` computes, this number and the model that transformers builds are the same, which
`tests/planner/test_model_shapes.py` shows for every model.

Units:
    parameters (elements, not bytes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from forgather.errors import PlanError
from forgather.planner.architectures import BlockShape, architecture_sizes
from forgather.spelling import close_matches

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "shapes")
FAMILY_NAMES = {
    "causal_lm": "text_generation",
    "fill_mask": "embedding",
    "masked_lm": "embedding",
    "text_embedding": "embedding",
    "text_classification": "embedding",
    "text2text": "text2text_generation",
    "seq2seq": "text2text_generation",
    "image_classification": "vision",
    "diffusion": "text_to_image",
}
"""Other words for the families of the shape files."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What formulas know about a model.

    Args:
        name: the name on the Hugging Face Hub.
        family: the family of models, such as "text_generation".
        model_class: the class of transformers that builds it.
        config: the configuration, as transformers spells it.
        published_parameters: the number of parameters of the checkpoint.
        blocks: the kinds of blocks.
        other_parameters: parameters outside of the blocks: embeddings, head, last norm.
        vocab_size: the number of classes of each prediction.
        predictions_per_row: None if each token is a prediction, otherwise their number.
        max_tokens: the longest row that the model takes; for images, the number of patches and the class token.
        fixed_tokens: True if rows always have `max_tokens`.
        traced: of a model that is no stack of equal blocks: the `other_parameters`, and for one row the bytes that are
            kept (`kept_half`, `kept_fp32`, `recomputed_half`, `recomputed_fp32`) and `forward_flops`.
    """

    name: str
    family: str
    model_class: str
    config: Mapping[str, Any]
    published_parameters: int
    blocks: tuple[BlockShape, ...]
    other_parameters: int
    vocab_size: int
    predictions_per_row: int | None
    max_tokens: int
    fixed_tokens: bool
    traced: Mapping[str, int] | None = None

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters in the matrices of all blocks."""
        return sum(block.count * inputs * outputs for block in self.blocks for inputs, outputs in block.linear_layers)

    @property
    def block_parameters(self) -> int:
        """The number of parameters in all blocks."""
        return sum(block.count * block.parameters for block in self.blocks)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model; tied weights count once."""
        return self.block_parameters + self.other_parameters

    @property
    def largest_unit(self) -> int:
        """The number of parameters of the largest part that FSDP and ZeRO-3 gather at once."""
        return max(*(block.parameters for block in self.blocks), self.other_parameters)


def shape_names() -> list[str]:
    """Returns the names of all models that have a shape."""
    return list(_entries())


def model_shape(name: str) -> ModelShape:
    """Returns the shape of a model.

    Args:
        name: the name on the Hugging Face Hub, with or without the part before the slash, or a folder with the
            `config.json` of a model of the same kind.

    Raises:
        PlanError: FG998 if no shape has this name.

    Example:
        >>> model_shape("bert-base-uncased").parameters
        109514298
    """
    entries = _entries()
    known = {_plain(word): key for key, entry in reversed(entries.items()) for word in (key, *entry["aliases"])}
    key = known.get(_plain(name))
    if key is None:
        near = dict.fromkeys(known[word] for word in close_matches(_plain(name), known))
        meant = f"did you mean {', '.join(map(repr, near))}? " if near else ""
        raise PlanError(
            f"no shape is known for the model {name!r}",
            code="FG998",
            hint=f"{meant}'fgcli benchmark --list-models' lists the names; a config with any model is planned by "
            "'fgcli plan'",
            found=name,
        )
    entry = entries[key]
    return _shape(key, entry)


def model_family(word: str) -> str:
    """Returns the family that a word means.

    Raises:
        PlanError: FG998 if there is no such family.

    Example:
        >>> model_family("fill_mask")
        'embedding'
    """
    families = dict.fromkeys(entry["family"] for entry in _entries().values())
    plain = word.lower().replace("-", "_")
    plain = FAMILY_NAMES.get(plain, plain)
    if plain not in families:
        near = close_matches(plain, [*families, *FAMILY_NAMES], n=1)
        meant = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(
            f"no model family is called {word!r}",
            code="FG998",
            hint=f"{meant}known are {', '.join(families)}",
            found=word,
        )
    return plain


def _plain(name: str) -> str:
    return name.rstrip("/").split("/")[-1].lower().replace("_", "-")


@cache
def _entries() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(os.listdir(_FOLDER)):
        with open(os.path.join(_FOLDER, file), encoding="utf-8") as stream:
            data = json.load(stream)
        shared = {"family": data["family"], "model_class": data["model_class"], "source": data["source"]}
        for name, entry in data["models"].items():
            found[name] = {"aliases": (), **shared, **entry}
    return found


def _shape(name: str, entry: Mapping[str, Any]) -> ModelShape:
    config = entry["config"]
    traced = entry.get("traced", {})
    sizes = architecture_sizes({**config, **traced})
    return ModelShape(
        name=name,
        family=entry["family"],
        model_class=entry["model_class"],
        config=config,
        published_parameters=entry["parameters"],
        traced=traced or None,
        **sizes,
    )
