"""The pictures of a folder, resized and cropped to a square, as the training of a text-to-image model takes them.

Takes a folder with image files. Gives, for each file, the pixels and the facts about the crop that Stable Diffusion XL
is conditioned on. A file is read when its row is asked for.

Shapes:
    C color channels (3), R pixels along each side.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from forgather.errors import ForgatherError, TrainingError
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.images import eight_bit, opaque
from forgather.ml.trainer.data_rng import seed_of

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")


class InstanceImageError(TrainingError, OSError):
    """An error about a folder of pictures, or about one of them."""

    code = "FG977"

    __str__ = ForgatherError.__str__
    __init__ = ForgatherError.__init__
    __reduce__ = ForgatherError.__reduce__


@dataclass(frozen=True, slots=True)
class Crop:
    """A square part of a picture.

    Args:
        pixels_CRR: the pixels, from -1 to 1.
        original_size: the height and the width of the picture in its file.
        top_left: the row and the column of the resized picture at which the square begins.

    Shapes:
        pixels_CRR: (3, R, R).

    Units:
        pixels.
    """

    pixels_CRR: Tensor
    original_size: tuple[int, int]
    top_left: tuple[int, int]


class InstanceImages:
    """The pictures in a folder, in the order of their names.

    The shorter side of a picture is resized to `resolution`, and a square is cut out of it.

    Args:
        instance_data_dir: the folder; its files with the endings .bmp, .jpeg, .jpg, .png and .webp are read.
        resolution: the number of pixels along each side of the square.
        center_crop: True to cut out the center. False to draw the place of the square once for each picture.
        random_flip: True to train on the mirror image in about every second visit of a picture.
        seed: the seed of the places that are drawn.

    Raises:
        InstanceImageError: FG977 if there is no such folder, or no picture in it.
    """

    def __init__(
        self,
        instance_data_dir: str | os.PathLike[str],
        *,
        resolution: int,
        center_crop: bool = True,
        random_flip: bool = False,
        seed: int = 0,
    ) -> None:
        refuse_wrong_values("diffusion:InstanceImages", locals())
        self.folder = Path(instance_data_dir).expanduser()
        self.resolution, self.center_crop, self.random_flip, self.seed = resolution, center_crop, random_flip, seed
        if not self.folder.is_dir():
            raise InstanceImageError(
                f"there is no folder {str(self.folder)!r} with pictures",
                hint=f"name the folder of the pictures; the working folder is {os.getcwd()!r}",
            ).about("instance_data_dir")
        self.files = sorted(file for file in self.folder.iterdir() if file.suffix.lower() in SUFFIXES)
        if not self.files:
            raise InstanceImageError(
                f"the folder {str(self.folder)!r} has no picture", hint=f"files that end in {', '.join(SUFFIXES)}"
            ).about("instance_data_dir")

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> list[Crop]:
        """Returns a picture; with `random_flip`, the picture and its mirror image.

        Raises:
            InstanceImageError: FG977 if the file is not a picture that can be read.
        """
        file = self.files[row]
        try:
            with Image.open(file) as opened:
                picture = opaque(ImageOps.exif_transpose(eight_bit(opened))).convert("RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InstanceImageError(
                f"picture {row + 1}, {str(file)!r}, cannot be read: {error}",
                hint="remove the file from the folder, or save it again as a PNG or JPEG file",
            ).about("instance_data_dir") from None
        original = (picture.height, picture.width)
        scale = self.resolution / min(original)
        height, width = (max(self.resolution, round(side * scale)) for side in original)
        resized = picture.resize((width, height), Image.Resampling.LANCZOS)
        top, left = self._top_left(row, height, width)
        both = [resized, ImageOps.mirror(resized)] if self.random_flip else [resized]
        box = (left, top, left + self.resolution, top + self.resolution)
        return [Crop(_as_tensor(one.crop(box)), original, (top, left)) for one in both]

    def _top_left(self, row: int, height: int, width: int) -> tuple[int, int]:
        rest_y, rest_x = height - self.resolution, width - self.resolution
        if self.center_crop:
            return round(rest_y / 2), round(rest_x / 2)
        generator = torch.Generator().manual_seed(seed_of(self.seed, row))
        y, x = torch.rand(2, generator=generator).tolist()
        return int(y * (rest_y + 1)), int(x * (rest_x + 1))


def _as_tensor(picture: Image.Image) -> Tensor:
    pixels_RRC = torch.from_numpy(np.array(picture)).float()
    return (pixels_RRC / 127.5 - 1).permute(2, 0, 1).contiguous()
