"""The rows of a text-to-image training: encoded pictures, with noise that depends on the row and the epoch alone.

Takes pictures as the frozen encoders encode them, which is done once. Each reading of a row puts noise on the latents,
from a generator that is seeded with the seed, the epoch and the number of the row. So neither the number of processes,
nor the batch size, nor a resume changes the noise of a row.

Shapes:
    Z channels of the latents, H and W their height and width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.row_epoch import EpochDataset
from forgather.ml.diffusion.noising import Noising
from forgather.ml.trainer.data_rng import seed_of


@dataclass(frozen=True, slots=True)
class EncodedPicture:
    """A picture as the frozen encoders give it to the denoiser.

    Args:
        mean_ZHW: the mean of the distribution of the latents.
        std_ZHW: its standard deviation.
        conditions: what the denoiser gets beside latents and timestep.

    Shapes:
        mean_ZHW, std_ZHW: (Z, H, W).
    """

    mean_ZHW: Tensor
    std_ZHW: Tensor
    conditions: Mapping[str, Any]

    def latents(self, generator: Generator) -> Tensor:
        """Returns latents that are drawn from their distribution.

        Shapes:
            Returns (Z, H, W).
        """
        return self.mean_ZHW + self.std_ZHW * torch.randn(self.mean_ZHW.shape, generator=generator)

    @property
    def facts(self) -> dict[str, Any]:
        """The tensors by name."""
        return {"mean": self.mean_ZHW, "std": self.std_ZHW, **self.conditions}


class NoisedRows(EpochDataset):
    """Noised latents of pictures, as arguments of the denoiser, with the target as `labels`.

    Args:
        pictures: for each row, the picture or several variants of it, of which every reading draws one.
        noising: the noise by which the denoiser was trained.
        sample_name: the name of the latents among the arguments of the denoiser.
        seed: the seed of the noise, the timesteps and the choice between variants.
        dtype: the dtype of the noised latents, which is that of the denoiser.
    """

    def __init__(
        self,
        pictures: Sequence[Sequence[EncodedPicture]],
        noising: Noising,
        *,
        sample_name: str,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        refuse_wrong_values("diffusion:NoisedRows", locals())
        self.pictures, self.noising, self.sample_name, self.seed = pictures, noising, sample_name, seed
        self.dtype = dtype

    @property
    def fingerprinted(self) -> Sequence[dict[str, Any]]:
        """The rows without noise, which are the same in every epoch."""
        return [
            {f"{name}{number}": value for number, one in enumerate(row) for name, value in one.facts.items()}
            for row in self.pictures
        ]

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.noised(row, seed_of(self.seed, self.epoch, row))

    def noised(self, row: int, seed: int) -> dict[str, Any]:
        """Returns a row with the noise of a seed.

        Args:
            row: the number of the picture.
            seed: the seed of everything that is drawn for this row.
        """
        generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        variants = self.pictures[row]
        picture = variants[int(torch.randint(len(variants), (), generator=generator))]
        latents = picture.latents(generator)
        step = self.noising.draw(generator)
        noise: Tensor = torch.randn(latents.shape, generator=generator)
        made = self.noising.noised(latents, noise, step)
        return {
            self.sample_name: made.sample.to(self.dtype),
            "timestep": made.timestep,
            **picture.conditions,
            "labels": made.target,
        }


class FixedNoiseRows(Dataset[dict[str, Any]]):
    """The pictures of training rows with noise that is the same in every evaluation.

    Args:
        rows: the training rows.
        repeats: how often each picture occurs, with other noise and another timestep each time.
        seed: the seed of the noise.
    """

    def __init__(self, rows: NoisedRows, *, repeats: int = 4, seed: int = 0) -> None:
        refuse_wrong_values("diffusion:FixedNoiseRows", locals())
        self.rows, self.repeats, self.seed = rows, repeats, seed

    @property
    def fingerprinted(self) -> Sequence[dict[str, Any]]:
        """The rows without noise."""
        return self.rows.fingerprinted

    def __len__(self) -> int:
        return len(self.rows) * self.repeats

    def __getitem__(self, row: int) -> dict[str, Any]:
        number, repeat = divmod(row, self.repeats)
        # -1: the noise of an evaluation is that of no epoch.
        return self.rows.noised(number, seed_of(self.seed, -1, number, repeat))
