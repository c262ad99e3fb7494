"""Images with labels: from folders, files or arrays, as tensors for a model.

`image_rows` and `image_arrays` give a data set with the columns `image` and `label`, whose images are decoded by Pillow
when they are read. `ImageDataset` makes the rows that a model takes. The random changes of an image (`ImageChanges`)
depend on a seed, the epoch and the number of the row alone, so neither the number of processes nor a resume changes
them.

Shapes:
    N images, C channels, H height, W width.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, Image
from PIL import Image as PillowImage
from PIL import ImageOps
from transformers import AutoImageProcessor

from forgather.errors import first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError, DataFileError, row_place
from forgather.ml.data.file_rows import (
    FileRow,
    check_labels,
    label_of,
    numbered_labels,
    rows_with_columns,
    stored_rows,
    text_of,
    unusable,
)
from forgather.ml.data.row_epoch import EpochDataset
from forgather.ml.data.sources import Paths, find_files
from forgather.ml.hub import folder_problem, hub_access, lookup_hint

_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm")

Change = Callable[[PillowImage.Image, random.Random], PillowImage.Image]
"""A random change of an image, which draws from the given generator alone."""


def image_rows(
    paths: Paths,
    *,
    image_column: str = "image",
    label_column: str = "label",
    labels: Sequence[str] | None = None,
) -> Dataset:
    """Returns the images of a folder, whose subfolders are the classes, or those that JSON lines or CSV files name.

    Args:
        paths: a folder with one subfolder of images for each class; or a `.jsonl`, `.json` or `.csv` file, or a list of
            these, whose rows have the path of an image and a label. Paths are relative to the folder of the file.
        image_column: the name of the column with the path of the image.
        label_column: the name of the column with the label.
        labels: the names of the classes in the order of their numbers. None for all labels that occur, sorted.

    Returns:
        A data set with the columns `image` and `label`, a `ClassLabel` with all names.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line cannot be read.
        DataError: FG831 if a column is missing; FG832 if there are no rows; FG876 if a label is not one of `labels`;
            FG877 if a row has no image or no label, or if there is only one class; FG878 if the arguments cannot be
            used; FG954 if an image does not exist.
    """
    check_labels(labels)
    folder = Path(paths).expanduser() if isinstance(paths, str | os.PathLike) else None
    if folder is not None and folder.is_dir():
        files = find_files(folder, _IMAGE_SUFFIXES)
        rows = [FileRow(file, file, {}) for file in files]
        given = [[_class_of(folder, file)] for file in files]
    else:
        rows = rows_with_columns(paths, {"image_column": image_column, "label_column": label_column})
        files = [_file_of(row, row.values["image_column"]) for row in rows]
        given = [[label_of(row, row.values["label_column"], "a class is a text or a whole number")] for row in rows]
    names, numbers = numbered_labels(rows, given, labels)
    return _stored(files, [one for (one,) in numbers], names)


def image_arrays(images: Any, labels: Any, *, max_value: float = 255, names: Sequence[str] | None = None) -> Dataset:
    """Returns images that are given as an array, such as those of `sklearn.datasets.load_digits`.

    Args:
        images: the brightness of each pixel, from 0 to `max_value`. They are stored with 256 levels.
        labels: the class of each image, as a number from 0.
        max_value: the value of a white pixel.
        names: the names of the classes; None for their numbers.

    Returns:
        A data set with the columns `image` and `label`, a `ClassLabel` with all names.

    Shapes:
        images: (N, H, W) or (N, H, W, C) with 1, 3 or 4 channels. labels: (N,).

    Raises:
        DataError: FG876 if a label is not the number of a class; FG878 if the arrays do not have these shapes or
            values.
    """
    refuse_wrong_values("data:image_arrays", locals())
    pixels, numbers = np.asarray(images), np.asarray(labels)
    if pixels.ndim == 4 and pixels.shape[-1] == 1:
        pixels = pixels[..., 0]
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[-1] not in (3, 4)) or not pixels.size:
        raise unusable(f"images has the shape {pixels.shape}", "give (N, H, W), or (N, H, W, C) with 3 or 4 channels")
    if numbers.shape != pixels.shape[:1] or numbers.dtype.kind not in "iu":
        found = f"labels has the shape {numbers.shape} of {numbers.dtype}"
        raise unusable(found, f"give {len(pixels)} whole numbers, one for each image")
    if not np.isfinite(pixels).all() or pixels.min() < 0 or pixels.max() > max_value:
        found = f"images has values from {pixels.min():g} to {pixels.max():g}, and max_value is {max_value:g}"
        raise unusable(found, "give max_value the value of a white pixel, and 0 for black")
    if names is None and numbers.max() >= len(numbers):
        raise unusable(
            f"labels go up to {numbers.max()}, and there are {len(numbers)} images",
            "give names, one for each class, or number the classes from 0",
        )
    classes = [str(name) for name in names] if names is not None else [str(one) for one in range(numbers.max() + 1)]
    check_labels(classes)
    if numbers.min() < 0 or numbers.max() >= len(classes):
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise DataError(
            f"the label {wrong} is none of the {len(classes)} classes", code="FG876", hint="classes count from 0"
        ).about("labels")
    levels = np.rint(pixels * (255 / max_value)).astype(np.uint8)
    return _stored([_png(one) for one in levels], numbers.tolist(), classes)


def image_processor(
    size: int | tuple[int, int],
    *,
    channels: int = 3,
    mean: float | Sequence[float] = 0.5,
    std: float | Sequence[float] = 0.5,
) -> Any:
    """Returns an image processor of transformers, which resizes images and scales their pixels.

    It is saved with the model, so that a program that loads the model prepares images in the same way.

    Args:
        size: the height and width of the result in pixels; one number for both.
        channels: 1 for brightness alone, 3 for colors.
        mean: the mean brightness, from 0 to 1, that is subtracted: one number, or one for each channel.
        std: the standard deviation by which the result is divided: one number, or one for each channel.

    Raises:
        DataError: FG878 if a number is out of range, or if there is not one for each channel.
    """
    refuse_wrong_values("data:image_processor", locals())
    from transformers import ViTImageProcessorPil

    sides = [size, size] if isinstance(size, int) else list(size)
    if channels not in (1, 3) or len(sides) != 2:
        raise unusable(
            f"size is {size!r} and channels is {channels!r}", "give a size from 1, and 1 or 3 channels"
        ).about("size")
    height, width = sides
    means, stds = ([one] * channels if isinstance(one, int | float) else list(one) for one in (mean, std))
    if len(means) != channels or len(stds) != channels:
        found = f"mean is {mean!r} and std is {std!r}, for {channels} channels"
        raise unusable(found, "give one number, or one for each channel").about("mean")
    return ViTImageProcessorPil(size={"height": height, "width": width}, image_mean=means, image_std=stds)


def load_image_processor(pretrained_model_name_or_path: str | os.PathLike[str]) -> Any:
    """Returns the image processor of a pretrained model, from a folder or the Hub.

    Args:
        pretrained_model_name_or_path: a folder, or the name of a model on the Hub.

    Raises:
        DataFileError: FG844 if it cannot be loaded.
    """
    name, source = str(pretrained_model_name_or_path), os.path.expanduser(pretrained_model_name_or_path)
    reason = folder_problem(name)
    try:
        if not reason:
            with nullcontext() if os.path.isdir(source) else hub_access():
                return AutoImageProcessor.from_pretrained(source, backend="pil")  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        reason = first_line(error).rstrip(": ")
    hint = "give a folder with 'preprocessor_config.json'" if os.path.isdir(source) else lookup_hint(name)
    found: DataFileError = DataFileError(
        f"the image processor of {name!r} could not be loaded: {reason}", code="FG844", hint=hint
    )
    found.argument = "pretrained_model_name_or_path"
    raise found


def eight_bit(image: PillowImage.Image) -> PillowImage.Image:
    """Returns an image itself if its pixels have at most 256 levels for each channel.

    Raises:
        ValueError: if they have more: Pillow would make all that is brighter than 255 white.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 256 levels (mode {image.mode!r})")
    return image


def opaque(image: PillowImage.Image) -> PillowImage.Image:
    """Returns an image itself if it has no transparency, and otherwise the image on a white background.

    Without a background, Pillow would show the color that a transparent pixel has by chance, most often black.
    """
    if not image.has_transparency_data:
        return image
    colors = image.convert("RGBA")
    return PillowImage.alpha_composite(PillowImage.new("RGBA", image.size, "white"), colors)


class ImageChanges:
    """Random changes of the images of a training set, so that a model sees each image in several forms.

    Args:
        crop_padding: the largest shift in pixels in each direction; what moves in is black.
        horizontal_flip: whether half of the images are mirrored.
        rotation: the largest rotation in degrees in each direction.
    """

    def __init__(self, *, crop_padding: int = 0, horizontal_flip: bool = False, rotation: float = 0.0) -> None:
        refuse_wrong_values("data:ImageChanges", locals())
        self.crop_padding, self.horizontal_flip, self.rotation = crop_padding, horizontal_flip, rotation

    def __call__(self, image: PillowImage.Image, rng: random.Random) -> PillowImage.Image:
        """Returns a changed copy of an image of the same size.

        Args:
            image: the image.
            rng: the generator of the random numbers. The same number of them is drawn for every image.
        """
        is_mirrored, angle = rng.random() < 0.5, rng.uniform(-self.rotation, self.rotation)
        left, top = (rng.randint(0, 2 * self.crop_padding) for _ in range(2))
        if self.horizontal_flip and is_mirrored:
            image = ImageOps.mirror(image)
        if self.rotation:
            image = image.rotate(angle, resample=PillowImage.Resampling.BILINEAR)
        if self.crop_padding:
            width, height = image.size
            image = ImageOps.expand(image, self.crop_padding).crop((left, top, left + width, top + height))
        return image


class ImageDataset(EpochDataset):
    """Images as tensors with their labels, in the form in which models for image classification take them.

    Args:
        dataset: the rows that `image_rows` or `image_arrays` returned.
        processor: the image processor. Images become gray if it has one mean, and get three colors otherwise.
        augment: a function of (image, random.Random) that returns a changed image, such as `ImageChanges`; None leaves
            images as they are.
        seed: the seed of the random changes.

    Shapes:
        `pixel_values`: (C, H, W). `labels`: a class number.

    Raises:
        DataError: FG954 if an image cannot be read, when its row is read.
    """

    def __init__(self, dataset: Dataset, processor: Any, *, augment: Change | None = None, seed: int = 42) -> None:
        refuse_wrong_values("data:ImageDataset", locals())
        self._rows, self._processor, self._augment, self._seed = dataset, processor, augment, seed
        means = getattr(processor, "image_mean", None)
        self._mode = "L" if isinstance(means, Sequence) and len(means) == 1 else "RGB"

    @property
    def fingerprinted(self) -> ImageDataset:
        """The data set without random changes, by which a resumed run compares its data."""
        return ImageDataset(self._rows, self._processor)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        try:
            row = self._rows[number]
            image = opaque(eight_bit(row["image"])).convert(self._mode)
        except (OSError, ValueError, SyntaxError, PillowImage.DecompressionBombError) as error:
            raise self._unreadable(number, error) from error
        if self._augment is not None:
            # A seed of three numbers as text: Python's generator takes a digest of it.
            image = self._augment(image, random.Random(f"{self._seed} {self.epoch} {number}"))
        pixels = np.asarray(image)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        made = self._processor([pixels], return_tensors="pt", input_data_format="channels_last")
        return {"pixel_values": made["pixel_values"][0], "labels": row["label"]}

    def _unreadable(self, number: int, error: Exception) -> DataError:
        stored = self._rows.cast_column("image", Image(decode=False))[number]["image"]
        name = f" {stored['path']!r}" if stored["path"] else ""
        return DataError(
            f"{row_place(number)}: its image{name} cannot be read: {first_line(error)[:200]}",
            code="FG954",
            hint="replace the file, or remove the row",
        )


def _class_of(folder: Path, file: str) -> str:
    parts = Path(file).relative_to(folder).parts
    if len(parts) < 2:
        raise unusable(
            f"{file!r} is in no folder of a class",
            "move images to one folder for each class, or name a file of JSON lines with image and label",
        ).about("paths")
    return parts[0]


def _file_of(row: FileRow, value: Any) -> str:
    file = Path(row.file).parent / Path(text_of(row, value, "image")).expanduser()
    if not file.is_file():
        hint = f"the path is relative to the folder of the file, {str(Path(row.file).parent)!r}"
        raise row.refuse(f"its image {str(value)!r} does not exist", hint, code="FG954")
    return str(file)


def _png(pixels: np.ndarray) -> dict[str, Any]:
    stream = io.BytesIO()
    PillowImage.fromarray(pixels).save(stream, format="png")
    return {"path": None, "bytes": stream.getvalue()}


def _stored(images: Sequence[Any], numbers: Sequence[int], names: Sequence[str]) -> Dataset:
    return stored_rows(
        "images", {"image": images, "label": numbers}, {"image": Image(), "label": ClassLabel(names=list(names))}
    )
