"""Image samples: pictures that the model generates for prompts during training."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.output_target import report_only, run_folder, shared_console
from forgather.ml.callbacks.text_sample import TextSampleCallback
from forgather.ml.diffusion.pipeline import TextToImagePipeline

FOLDER = "images"
"""The folder of the pictures, within that of the run."""


class ImageSampleCallback(TextSampleCallback):
    """A callback that generates a picture for each prompt, and stores them in the folder of the run.

    The pictures are in the folder `images`; `samples.jsonl` names them, and the report shows them. Sampling does not
    affect training: the random states and the train or eval mode of each module are restored.

    Args:
        prompts: a prompt or a list of prompts.
        pipeline: the pipeline whose denoiser is trained.
        resolution: the number of pixels along each side of a picture.
        every_epochs: the number of epochs between two samples, or None to sample after each evaluation. A sample is
            taken at the end of training in both cases.
        num_inference_steps: the number of steps in which a picture is made of noise.
        guidance_scale: how far a picture is moved towards its prompt; None for the default of the pipeline.
        seed: the seed of the noise. Equal models give equal pictures.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.
        console: the console that is printed to, or None for standard output.

    Raises:
        ArgumentValueError: FG813 if a number is out of range.
    """

    def __init__(
        self,
        prompts: str | Sequence[str],
        pipeline: TextToImagePipeline,
        *,
        resolution: int,
        every_epochs: int | None = None,
        num_inference_steps: int = 25,
        guidance_scale: float | None = None,
        seed: int = 0,
        run_dir: str | os.PathLike[str] | None = None,
        console: Console | None = None,
    ) -> None:
        refuse_wrong_values("diffusion:ImageSampleCallback", locals())
        super().__init__(prompts, seed=seed, run_dir=run_dir, console=console)
        self.pipeline, self.resolution, self.every_epochs = pipeline, resolution, every_epochs
        self.options: dict[str, Any] = {"num_inference_steps": num_inference_steps}
        if guidance_scale is not None:
            self.options["guidance_scale"] = guidance_scale

    @report_only
    def on_evaluate(
        self, args: Any, state: Any, control: Any, answers: Sequence[Mapping[str, Any]] = (), **kwargs: Any
    ) -> None:
        """Generates pictures after an evaluation, unless `every_epochs` is set."""
        if self.every_epochs is None:
            self._sample(args, state, kwargs)

    @report_only
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Generates pictures after every `every_epochs` epochs."""
        if self.every_epochs is not None and round(state.epoch) % self.every_epochs == 0:
            self._sample(args, state, kwargs)

    def _samples_at_all(self, state: Any, scene: dict[str, Any]) -> bool:
        return bool(self.prompts)

    def _made(self, model: Any, tokenizer: Any) -> list[Any]:
        return list(
            self.pipeline.generate(
                model,
                [str(prompt) for prompt in self.prompts],
                resolution=self.resolution,
                seed=self.seed,
                **self.options,
            )
        )

    def _kept(self, samples: list[Any], args: Any, step: int) -> list[dict[str, Any]]:
        folder = run_folder(args, self.run_dir)
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        names = [f"{FOLDER}/step-{step}-{number}.png" for number in range(len(samples))]
        for name, picture in zip(names, samples, strict=True):
            picture.save(folder / name)
        console = self.console or shared_console()
        console.print(Text(f"{len(names)} pictures at step {step}: {folder / FOLDER}", style="bold"))
        return [{"prompt": prompt, "image": name} for prompt, name in zip(self.prompts, names, strict=True)]
