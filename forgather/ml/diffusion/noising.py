"""How noise is put on the latents of a picture, and what the model must predict for it.

Takes a noise scheduler of diffusers, of which only the configuration and the tables of numbers are read. Gives, for
latents and random numbers, the noised latents, the timestep and the target. Every prediction type of diffusers that is
a function of latents and noise is supported; others are refused.

Shapes:
    S timesteps of the scheduler; latents, noise, noised latents and targets of one picture have the same shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from forgather.errors import TrainingError

TIMESTEP_SAMPLING = ("uniform", "logit_normal")


class PipelineError(TrainingError, ValueError):
    """An error about a text-to-image pipeline whose parts cannot be trained in this way."""

    code = "FG979"


@dataclass(frozen=True, slots=True)
class Noised:
    """The noised latents of a picture, with what the model gets and must predict.

    Args:
        sample: the noised latents.
        timestep: the timestep, in the unit of the scheduler.
        target: what the model must predict.

    Shapes:
        sample, target: as the latents. timestep: a scalar.
    """

    sample: Tensor
    timestep: Tensor
    target: Tensor


class Noising(Protocol):
    """A rule that puts noise on latents."""

    def draw(self, generator: Generator) -> int:
        """Returns the number of a timestep, from 0 to S - 1."""
        ...

    def noised(self, latents: Tensor, noise: Tensor, step: int) -> Noised:
        """Returns the noised latents at a timestep.

        Args:
            latents: the latents of a picture.
            noise: standard normal noise.
            step: the number of the timestep, as `draw` returns it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Noise by a table of products of alphas (DDPM and its relatives).

    Args:
        alphas_cumprod_S: the part of the latents' variance that is left at each timestep.
        prediction_type: what the model predicts: "epsilon" (the noise), "v_prediction" or "sample".
        sampling: how timesteps are drawn, one of `TIMESTEP_SAMPLING`.

    Shapes:
        alphas_cumprod_S: (S,).

    Source:
        `DDPMScheduler.add_noise` and `get_velocity` of diffusers; v as in Salimans and Ho 2022 (arXiv:2202.00512).
    """

    alphas_cumprod_S: Tensor
    prediction_type: str
    sampling: str

    def draw(self, generator: Generator) -> int:
        """Returns the number of a timestep."""
        return _drawn(self.sampling, len(self.alphas_cumprod_S), generator)

    def noised(self, latents: Tensor, noise: Tensor, step: int) -> Noised:
        """Returns the noised latents at a timestep; see `Noising.noised`."""
        kept = self.alphas_cumprod_S[step].to(latents)
        signal, scale = kept.sqrt(), (1 - kept).sqrt()
        targets = {"epsilon": noise, "v_prediction": signal * noise - scale * latents, "sample": latents}
        return Noised(signal * latents + scale * noise, torch.tensor(step), targets[self.prediction_type])


@dataclass(frozen=True, slots=True)
class FlowMatching:
    """Noise by a straight line from the latents to the noise (rectified flow); the model predicts its direction.

    Args:
        sigmas_S: the part of noise at each timestep.
        timesteps_S: the timesteps as the model gets them.
        sampling: how timesteps are drawn, one of `TIMESTEP_SAMPLING`.

    Shapes:
        sigmas_S, timesteps_S: (S,).

    Source:
        Esser et al. 2024 (arXiv:2403.03206), section 2 and 3.1, as in the training scripts of diffusers, with equal
        weights.
    """

    sigmas_S: Tensor
    timesteps_S: Tensor
    sampling: str

    def draw(self, generator: Generator) -> int:
        """Returns the number of a timestep."""
        return _drawn(self.sampling, len(self.timesteps_S), generator)

    def noised(self, latents: Tensor, noise: Tensor, step: int) -> Noised:
        """Returns the noised latents at a timestep; see `Noising.noised`."""
        sigma = self.sigmas_S[step].to(latents)
        return Noised((1 - sigma) * latents + sigma * noise, self.timesteps_S[step].clone(), noise - latents)


def _drawn(sampling: str, num_steps: int, generator: Generator) -> int:
    if sampling == "logit_normal":
        return int(torch.randn((), generator=generator, dtype=torch.float64).sigmoid() * num_steps)
    return int(torch.randint(num_steps, (), generator=generator))


def noising_of(scheduler: Any, *, sampling: str | None = None) -> Noising:
    """Returns the rule by which a model was trained, from the noise scheduler of its pipeline.

    Args:
        scheduler: the scheduler of diffusers, whose tables must be those of a new scheduler.
        sampling: how timesteps are drawn: "uniform", or "logit_normal", which prefers those in the middle. None means
            "logit_normal" for flow matching and "uniform" otherwise.

    Raises:
        PipelineError: FG979 if the scheduler or its prediction type is not supported, or if there is no such sampling.
    """
    name = type(scheduler).__name__
    if sampling not in (None, *TIMESTEP_SAMPLING):
        raise PipelineError(
            f"timestep_sampling is {sampling!r:.80}", hint=f"one of {', '.join(TIMESTEP_SAMPLING)}"
        ).about("timestep_sampling")
    if name.startswith("FlowMatch") and hasattr(scheduler, "sigmas"):
        # The last sigma, 0, is the end of the line and belongs to no timestep.
        timesteps_S = scheduler.timesteps.float().cpu()
        sigmas_S = scheduler.sigmas.float().cpu()[: len(timesteps_S)]
        return FlowMatching(sigmas_S, timesteps_S, sampling or "logit_normal")
    if not hasattr(scheduler, "alphas_cumprod"):
        raise PipelineError(
            f"the pipeline has a {name}, whose noise is neither that of DDPM nor flow matching",
            hint="pipelines with the schedulers of Stable Diffusion, Stable Diffusion XL and Stable Diffusion 3 are "
            "supported",
        )
    kind = scheduler.config["prediction_type"]
    if kind not in ("epsilon", "v_prediction", "sample"):
        raise PipelineError(
            f"the {name} of the pipeline has prediction_type {kind!r}", hint="epsilon, v_prediction or sample"
        )
    return Diffusion(scheduler.alphas_cumprod.float().cpu(), kind, sampling or "uniform")
