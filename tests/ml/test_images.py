"""Images: what is read from folders, files and arrays, that random changes repeat, and what is refused with its row."""

import json
import random

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from forgather.errors import ForgatherError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import (
    ImageChanges,
    ImageDataset,
    PaddingCollator,
    class_names,
    image_arrays,
    image_processor,
    image_rows,
    load_image_processor,
)
from forgather.ml.data.row_epoch import reading_epoch
from tests.ml.fixtures import Recorder


def pictures(count=4, size=6, channels=3):
    return np.random.default_rng(1).integers(0, 256, (count, size, size, channels)).astype(np.uint8)


@pytest.fixture
def folder(tmp_path):
    """A folder with two classes of images."""
    for number, pixels in enumerate(pictures()):
        place = tmp_path / "images" / ("cat" if number % 2 else "bird")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.png")
    (tmp_path / "images/cat/notes.txt").write_text("not an image")
    return tmp_path / "images"


def test_folders_files_and_arrays_give_the_same_rows(folder, tmp_path):
    files = [("bird", 0), ("bird", 2), ("cat", 1), ("cat", 3)]
    lines = [{"image": f"images/{name}/{number}.png", "label": name} for name, number in files]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "rows.csv").write_text(
        "image,label\n" + "".join(f"{line['image']},{line['label']}\n" for line in lines)
    )
    arrays = image_arrays(pictures()[[0, 2, 1, 3]], np.array([0, 0, 1, 1]), names=["bird", "cat"])
    sources = [image_rows(folder), image_rows(tmp_path / "rows.jsonl"), image_rows(tmp_path / "rows.csv"), arrays]

    made = [ImageDataset(rows, image_processor(6)) for rows in sources]

    assert [["bird", "cat"]] * 4 == [class_names(rows) for rows in sources]
    assert [[0, 0, 1, 1]] * 4 == [[row["labels"] for row in rows] for rows in made]
    for rows in made:
        pixels = torch.stack([row["pixel_values"] for row in rows])
        expected = torch.tensor(pictures()[[0, 2, 1, 3]]).permute(0, 3, 1, 2) / 127.5 - 1
        torch.testing.assert_close(pixels, expected, rtol=0, atol=1e-6)


def test_brightness_is_scaled_and_a_processor_can_be_loaded_again(tmp_path):
    gray = np.array([[[0.0, 16.0], [8.0, 4.0]]] * 2)
    processor = image_processor(2, channels=1, mean=0.0, std=1.0)
    rows = image_arrays(gray, [0, 1], max_value=16)

    (pixels,) = ImageDataset(rows, processor)[1]["pixel_values"]

    torch.testing.assert_close(pixels, torch.tensor([[0.0, 1.0], [128 / 255, 64 / 255]]))
    processor.save_pretrained(tmp_path)
    assert processor.to_dict() == load_image_processor(tmp_path).to_dict()
    assert processor.to_dict() == AutoImageProcessor.from_pretrained(tmp_path, backend="pil").to_dict()
    with pytest.raises(ForgatherError, match="FG844"):
        load_image_processor(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ForgatherError, match="FG844"):
        load_image_processor(tmp_path / "empty")


def test_changes_of_an_image_are_shifts_mirrors_and_rotations():
    image = Image.fromarray(pictures(1)[0])
    pixels = np.asarray(image)
    same = np.asarray(ImageChanges()(image, random.Random(0)))
    mirrored = {np.asarray(ImageChanges(horizontal_flip=True)(image, random.Random(n))).tobytes() for n in range(9)}
    shifted = [np.asarray(ImageChanges(crop_padding=1)(image, random.Random(n))) for n in range(40)]
    turned = np.asarray(ImageChanges(rotation=90)(image, random.Random(3)))

    assert (same == pixels).all() and turned.shape == pixels.shape and (turned != pixels).any()
    assert {pixels.tobytes(), pixels[:, ::-1].tobytes()} == mirrored
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)))
    whole = {padded[y : y + 6, x : x + 6].tobytes() for x in range(3) for y in range(3)}
    assert whole == {one.tobytes() for one in shifted}
    with pytest.raises(ForgatherError, match="FG878"):
        ImageChanges(rotation=200)


def tiny():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 2))


class ByName(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny()

    def forward(self, pixel_values):
        return self.inner(pixel_values)


def trained(folder, recorder, *, workers=0, augment=None, **settings):
    rows = image_arrays(pictures(10)[..., 0], np.arange(10) % 2)
    loading = {"dataloader_num_workers": workers, "dataloader_persistent_workers": True} if workers else {}
    args = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=3, logging_steps=1, learning_rate=0.1,
        save_strategy="steps", save_steps=4, **loading, **settings,
    )  # fmt: skip
    trainer = Trainer(
        ByName(), args, train_dataset=ImageDataset(rows, image_processor(6, channels=1), augment=augment),
        data_collator=PaddingCollator(), loss_fn=torch.nn.CrossEntropyLoss(), callbacks=[recorder],
    )  # fmt: skip
    trainer.train()
    return [line["loss"] for line in recorder.lines if "loss" in line]


def test_changes_repeat_in_workers_and_after_a_resume_and_differ_by_epoch(tmp_path, caplog):
    changes = ImageChanges(crop_padding=2)
    expected = trained(tmp_path / "one", Recorder(), augment=changes)

    resumed = trained(
        tmp_path / "one", Recorder(), augment=changes,
        resume_from_checkpoint=str(tmp_path / "one/checkpoint-4"),
    )  # fmt: skip

    assert 9 == len(expected) and expected[4:] == resumed[-5:]
    assert "differ" not in caplog.text
    assert expected == trained(tmp_path / "two", Recorder(), augment=changes, workers=2)
    assert expected != trained(tmp_path / "three", Recorder())
    rows = ImageDataset(image_arrays(pictures(4), [0, 1, 0, 1]), image_processor(6), augment=changes)
    epochs = []
    for epoch in (0, 1, 0):
        with reading_epoch(epoch):
            epochs.append(torch.stack([row["pixel_values"] for row in rows]))
    assert torch.equal(epochs[0], epochs[2]) and not torch.equal(epochs[0], epochs[1])


def test_an_image_that_cannot_be_read_is_refused_with_its_row(folder, tmp_path):
    (folder / "bird/2.png").write_bytes(b"no image")
    rows = ImageDataset(image_rows(folder), image_processor(6))
    with pytest.raises(
        ForgatherError, match=r"row 1 of the data set: its image '.*bird/2.png' cannot be read"
    ) as found:
        rows[1]
    assert "FG954" == found.value.code
    (tmp_path / "rows.jsonl").write_text('{"image": "images/bird/9.png", "label": "bird"}\n')
    with pytest.raises(ForgatherError, match=r"jsonl:1: its image 'images/bird/9.png' does not exist") as found:
        image_rows(tmp_path / "rows.jsonl")
    assert "FG954" == found.value.code


def test_transparent_pixels_are_white_and_suffixes_of_any_case_are_read(folder):
    hidden = np.zeros((6, 6, 4), dtype=np.uint8)
    hidden[0, 0] = (10, 20, 30, 255)
    Image.fromarray(hidden).save(folder / "cat" / "5.Png")

    pixels = ImageDataset(image_rows(folder), image_processor(6))[4]["pixel_values"]

    torch.testing.assert_close(pixels[:, 0, 0], torch.tensor([10.0, 20, 30]) / 127.5 - 1, rtol=0, atol=1e-6)
    assert (pixels[:, 1:] == 1).all()


def test_gray_pixels_of_more_than_eight_bits_are_refused(folder):
    # Pillow makes all of them white that are brighter than 255.
    Image.fromarray(np.array([[0, 300, 65535]], dtype=np.uint16)).save(folder / "bird/2.png")
    rows = ImageDataset(image_rows(folder), image_processor(6))
    with pytest.raises(ForgatherError, match="row 1 .* more than 256 levels") as found:
        rows[1]
    assert "FG954" == found.value.code


def test_folders_and_arrays_that_cannot_be_used_are_refused(folder, tmp_path):
    Image.fromarray(pictures(1)[0]).save(folder / "loose.png")
    with pytest.raises(ForgatherError, match="loose.png' is in no folder of a class"):
        image_rows(folder)
    (folder / "loose.png").unlink()
    with pytest.raises(ForgatherError, match="'cat' is none of the 2 classes"):
        image_rows(folder, labels=["bird", "dog"])
    gray = np.zeros((2, 3, 3))
    for arguments, told in [
        ((gray[0], [0, 1]), "images has the shape"),
        ((gray, [0]), "labels has the shape"),
        ((gray + 300, [0, 1]), "max_value is 255"),
        ((gray, [0, -1]), "none of the|two different names"),
        ((gray, [0, 1000000]), "labels go up to 1000000, and there are 2 images"),
    ]:
        with pytest.raises(ForgatherError, match=told):
            image_arrays(*arguments)
    for white in (0, float("nan"), float("inf")):
        with pytest.raises(ForgatherError, match="FG878"):
            image_arrays(gray, [0, 1], max_value=white)
    for size, options in [
        (0, {}),
        ("8", {}),
        (None, {}),
        ((8,), {}),
        (8.5, {}),
        (4, {"std": float("nan")}),
        (4, {"channels": 2}),
        (4, {"mean": [0.5]}),
        (4, {"std": 0.0}),
    ]:
        with pytest.raises(ForgatherError, match="FG878"):
            image_processor(size, **options)
