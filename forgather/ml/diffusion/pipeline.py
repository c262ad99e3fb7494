"""`TextToImagePipeline`: the parts of a pipeline of diffusers, of which one, the denoiser, is trained.

Takes the folder or the name of a pipeline. Gives the denoiser (a U-Net or a transformer), pictures and prompts as the
frozen encoders encode them, the noise by which the denoiser was trained, and pictures that the pipeline generates.
diffusers is imported, and the pipeline is loaded, when a part is first asked for.

Shapes:
    C color channels (3), R pixels along each side, Z channels of the latents, H and W their height and width, T tokens
    of a prompt, D size of a token's embedding, P size of the embedding of a prompt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import nn

from forgather.errors import ForgatherError, TrainingError, first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.diffusion.images import Crop, InstanceImageError, InstanceImages
from forgather.ml.diffusion.noising import Noising, PipelineError, noising_of
from forgather.ml.diffusion.rows import EncodedPicture, NoisedRows
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.hub import folder_problem, hub_access, lookup_hint
from forgather.ml.library_progress import without_progress_bars
from forgather.ml.log import get_logger
from forgather.ml.models import as_dtype
from forgather.requirements import needed_distribution

_INDEX = "model_index.json"
_log = get_logger(__name__)


class PipelineSourceError(TrainingError, OSError):
    """Raised if a pipeline cannot be found or loaded."""

    code = "FG978"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


@dataclass(frozen=True, slots=True)
class _Family:
    """What the pipelines with one kind of denoiser have in common.

    Args:
        part: the name of the denoiser in the pipeline.
        sample: the name of the latents among the arguments of the denoiser.
        conditions: a function that returns the arguments for a prompt, from what `encode_prompt` of the pipeline gives.
        time_ids: True if the denoiser gets the sizes of the picture and of its crop.
    """

    part: str
    sample: str
    conditions: Callable[[Sequence[Any]], dict[str, Any]]
    time_ids: bool = False


def _xl_conditions(found: Sequence[Any]) -> dict[str, Any]:
    return {"encoder_hidden_states": found[0][0], "added_cond_kwargs": {"text_embeds": found[2][0]}}


_FAMILIES = {
    "StableDiffusionPipeline": _Family("unet", "sample", lambda found: {"encoder_hidden_states": found[0][0]}),
    "StableDiffusionXLPipeline": _Family("unet", "sample", _xl_conditions, time_ids=True),
    "StableDiffusion3Pipeline": _Family(
        "transformer",
        "hidden_states",
        lambda found: {"encoder_hidden_states": found[0][0], "pooled_projections": found[2][0]},
    ),
}


class TextToImagePipeline:
    """A pipeline of diffusers whose denoiser is trained.

    Args:
        pretrained_model_name_or_path: the folder of the pipeline, which has a `model_index.json`, or its name on the
            Hub.
        dtype: the dtype of the weights, such as "bfloat16"; float32 by default.
        variant: the variant of the weight files, such as "fp16"; None for those without a variant.
        timestep_sampling: how timesteps are drawn: "uniform", or "logit_normal", which prefers those in the middle.
            None means "logit_normal" for flow matching and "uniform" otherwise.
        revision: the branch, tag or commit on the Hub; None for the newest.
        without: the names of optional parts that are left out, such as "text_encoder_3" and "tokenizer_3".
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        variant: str | None = None,
        timestep_sampling: str | None = None,
        revision: str | None = None,
        without: Sequence[str] = (),
    ) -> None:
        self.name = str(pretrained_model_name_or_path)
        self.dtype = torch.float32 if dtype is None else as_dtype(dtype)
        self._timestep_sampling = timestep_sampling
        self._without = dict.fromkeys(without)
        # Weights that are pickles are never loaded: they could run code.
        self._options = {"variant": variant, "revision": revision, "use_safetensors": True}

    @cached_property
    def parts(self) -> Any:
        """The pipeline of diffusers.

        Raises:
            PipelineSourceError: FG978 if it cannot be loaded.
            PipelineError: FG979 if pipelines of its kind are not supported.
        """
        return self._loaded()

    def _loaded(self) -> Any:
        needed = needed_distribution("diffusers")
        if lack := needed.lack():
            raise PipelineSourceError(f"a text-to-image pipeline needs {lack}", hint=needed.hint)
        folder = Path(self.name).expanduser()
        wrong = folder_problem(self.name)
        if folder.is_dir() and not (folder / _INDEX).is_file():
            wrong = f"the folder has no {_INDEX}"
        if wrong:
            raise self._not_loaded(wrong)
        import diffusers

        source = str(folder) if folder.is_dir() else self.name
        try:
            with _quiet(diffusers), nullcontext() if folder.is_dir() else hub_access():
                found = diffusers.DiffusionPipeline.from_pretrained(
                    source, dtype=self.dtype, **self._options, **self._without
                )
        except (OSError, ValueError, ImportError, AttributeError, TypeError) as error:
            raise self._not_loaded(first_line(error)[:300]) from error
        if type(found).__name__ not in _FAMILIES:
            raise PipelineError(
                f"{self.name!r} is a {type(found).__name__}, whose training is not supported",
                hint=f"one of {', '.join(_FAMILIES)}",
            ).about("pretrained_model_name_or_path")
        found.set_progress_bar_config(disable=True)
        for part in _modules(found).values():
            part.requires_grad_(False)
        return found

    def _not_loaded(self, why: str) -> PipelineSourceError:
        found: PipelineSourceError = PipelineSourceError(
            f"the pipeline {self.name!r} could not be loaded: {why}", hint=lookup_hint(self.name)
        )
        found.argument = "pretrained_model_name_or_path"
        return found

    @property
    def _family(self) -> _Family:
        return _FAMILIES[type(self.parts).__name__]

    @property
    def part(self) -> str:
        """The name of the denoiser in the pipeline: "unet" or "transformer"."""
        return self._family.part

    @property
    def denoiser(self) -> nn.Module:
        """The model that predicts noise from noised latents, or the direction to it."""
        found: nn.Module = getattr(self.parts, self.part)
        return found

    @cached_property
    def noising(self) -> Noising:
        """The noise by which the denoiser was trained.

        Raises:
            PipelineError: FG979 if the scheduler of the pipeline is not supported.
        """
        # A new one: the tables of a scheduler change when pictures are generated.
        scheduler = type(self.parts.scheduler).from_config(self.parts.scheduler.config)
        return noising_of(scheduler, sampling=self._timestep_sampling)

    def refuse_resolution(self, resolution: int) -> None:
        """Raises an error if pictures of a size cannot be encoded for the denoiser.

        Args:
            resolution: the number of pixels along each side.

        Raises:
            InstanceImageError: FG977 if it is not a multiple of the size of a patch.
        """
        patch = int(self.denoiser.config.get("patch_size") or 1)  # type: ignore[operator, union-attr]
        factor = int(self.parts.vae_scale_factor) * patch
        if resolution < factor or resolution % factor:
            raise InstanceImageError(
                f"resolution is {resolution}, and the pipeline needs a multiple of {factor}",
                hint=f"set resolution: {max(1, round(resolution / factor)) * factor}",
            ).about("resolution")

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Context manager in which the encoders are on the device of this process, and the image encoder is exact."""
        vae, device = self.parts.vae, DistributedEnvironment().device
        others = {name: part for name, part in _modules(self.parts).items() if name != self.part}
        dtype = vae.dtype
        try:
            for part in others.values():
                part.to(device)
            # In half precision, the image encoder of Stable Diffusion XL overflows.
            if dtype != torch.float32:
                vae.to(torch.float32)
            with torch.no_grad():
                yield
        finally:
            if dtype != torch.float32:
                vae.to(dtype)
            for part in others.values():
                part.to("cpu")

    def encode_prompt(self, prompt: str) -> Mapping[str, Any]:
        """Returns what the denoiser gets for a prompt. To be called within `encoding`.

        Shapes:
            encoder_hidden_states: (T, D); text_embeds or pooled_projections: (P,).
        """
        device = self.parts.text_encoder.device
        further = {"prompt_2": None, "prompt_3": None} if self.part == "transformer" else {}
        found = self.parts.encode_prompt(
            prompt, device=device, num_images_per_prompt=1, do_classifier_free_guidance=False, **further
        )
        conditions: Mapping[str, Any] = _on_host(self._family.conditions(found))
        return conditions

    def encode_picture(self, crop: Crop, prompt: Mapping[str, Any]) -> EncodedPicture:
        """Returns an encoded picture. To be called within `encoding`.

        Args:
            crop: the picture.
            prompt: what `encode_prompt` has returned.
        """
        vae = self.parts.vae
        found = vae.encode(crop.pixels_CRR[None].to(vae.device)).latent_dist
        shift, scale = float(vae.config.get("shift_factor") or 0), float(vae.config.scaling_factor)
        conditions = dict(prompt)
        if self._family.time_ids:
            resolution = crop.pixels_CRR.shape[-1]
            facts = [*crop.original_size, *crop.top_left, resolution, resolution]
            conditions["added_cond_kwargs"] = {**prompt["added_cond_kwargs"], "time_ids": torch.tensor(facts).float()}
        return EncodedPicture((found.mean[0].cpu() - shift) * scale, found.std[0].cpu() * scale, conditions)

    @property
    def sample_name(self) -> str:
        """The name of the latents among the arguments of the denoiser."""
        return self._family.sample

    def example(self) -> dict[str, Any]:
        """Returns a batch of one row, which is always the same, as arguments of the denoiser: a prompt and noise."""
        with self.encoding():
            pixels = torch.zeros(3, 8 * int(self.parts.vae_scale_factor), 8 * int(self.parts.vae_scale_factor))
            picture = self.encode_picture(Crop(pixels, (64, 64), (0, 0)), self.encode_prompt("a photo"))
        row = NoisedRows([[picture]], self.noising, sample_name=self.sample_name, dtype=self.dtype)[0]
        batch: dict[str, Any] = torch.utils.data.default_collate([row])
        del batch["labels"]
        return batch

    def generate(
        self, model: nn.Module, prompts: Sequence[str], *, resolution: int, seed: int, **options: Any
    ) -> list[Image]:
        """Returns a picture for each prompt. The random state of this process is not changed.

        Args:
            model: the denoiser, with its adapter and the wrapper of its strategy.
            prompts: the prompts.
            resolution: the number of pixels along each side.
            seed: the seed of the initial noise of each picture.
            **options: further arguments of the pipeline, such as `num_inference_steps` and `guidance_scale`.
        """
        device = next(self.denoiser.parameters()).device
        others = [part for name, part in _modules(self.parts).items() if name != self.part]
        before = self.denoiser
        try:
            # A sharded model gathers its weights when its wrapper is called, not when the part inside is called.
            setattr(self.parts, self.part, model)
            for part in others:
                part.to(device)
            with torch.no_grad():
                return [
                    self.parts(
                        prompt,
                        height=resolution,
                        width=resolution,
                        generator=torch.Generator().manual_seed(seed),
                        **options,
                    ).images[0]
                    for prompt in prompts
                ]
        finally:
            setattr(self.parts, self.part, before)
            for part in others:
                part.to("cpu")

    def with_lora(self, folder: Path, weight_name: str) -> nn.Module:
        """Returns a denoiser that is loaded again, with the LoRA of a file, as a user of the file would load it.

        Args:
            folder: the folder of the file.
            weight_name: the name of the file.
        """
        import diffusers

        kind, own = type(self.denoiser), Path(self.name).expanduser()
        source = str(own) if own.is_dir() else self.name
        with _quiet(diffusers), nullcontext() if own.is_dir() else hub_access():
            again = kind.from_pretrained(  # type: ignore[attr-defined]
                source, subfolder=self.part, dtype=self.dtype, **self._options
            )
            pipeline = type(self.parts)(**{**self.parts.components, self.part: again})
            pipeline.load_lora_weights(str(folder), weight_name=weight_name)
        found: nn.Module = getattr(pipeline, self.part)
        return found


def denoiser(pipeline: TextToImagePipeline) -> nn.Module:
    """Returns the model of a pipeline that is trained: a U-Net or a transformer.

    Args:
        pipeline: the pipeline.
    """
    return pipeline.denoiser.requires_grad_(True).train()


def encoded_rows(
    images: InstanceImages, *, pipeline: TextToImagePipeline, instance_prompt: str, seed: int = 0
) -> NoisedRows:
    """Returns the rows of a training on pictures of one prompt.

    Args:
        images: the pictures.
        pipeline: the pipeline, whose encoders and noise are used.
        instance_prompt: the prompt of all pictures.
        seed: the seed of the noise, the timesteps and the choice between a picture and its mirror image.

    Raises:
        InstanceImageError: FG977 if a picture cannot be read, or its size does not fit the pipeline.
        PipelineError: FG978 or FG979 if the pipeline cannot be loaded or is not supported.
    """
    refuse_wrong_values("diffusion:encoded_rows", locals())
    pipeline.refuse_resolution(images.resolution)
    with pipeline.encoding():
        prompt = pipeline.encode_prompt(instance_prompt)
        one_by_one = ([images[row]] for row in range(len(images)))
        read = show_progress(one_by_one, total=len(images), what="encoding pictures", logger=_log)
        pictures = [[pipeline.encode_picture(crop, prompt) for crop in crops] for [crops] in read]
    return NoisedRows(pictures, pipeline.noising, sample_name=pipeline.sample_name, seed=seed, dtype=pipeline.dtype)


def _modules(pipeline: Any) -> dict[str, nn.Module]:
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def _on_host(found: Any) -> Any:
    if isinstance(found, Mapping):
        return {name: _on_host(item) for name, item in found.items()}
    return found.cpu()


@contextmanager
def _quiet(diffusers: Any) -> Iterator[None]:
    """Context manager without the progress bars of diffusers, and without its remarks about parts without a LoRA."""
    log = diffusers.utils.logging
    shown, verbosity = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        log.set_verbosity(verbosity)
        if shown:
            log.enable_progress_bar()
