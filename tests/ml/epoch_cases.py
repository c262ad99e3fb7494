"""Data sets whose rows are others in each epoch, what each row must be, and trainings that record the rows they read."""

import os
import random

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from transformers import TrainingArguments as TransformersArguments

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from forgather.ml.data import ImageChanges, ImageDataset, image_arrays, image_processor
from forgather.ml.diffusion.rows import EncodedPicture, NoisedRows
from forgather.ml.trainer.data_rng import seed_of
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.diffusion_cases import betas, noisings
from tests.ml.fixtures import Recorder
from tests.patience import patience

ROWS, EPOCHS, SIZE, STEP = 8, 3, 7, 6


class Told(Dataset):
    """A data set of the user with a method `set_epoch`."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return {"pixel_values": torch.full((1,), 100.0 * self.epoch + row), "labels": 0}


def pixels():
    return np.random.default_rng(7).integers(0, 256, (ROWS, SIZE, SIZE)).astype(np.uint8)


def latents():
    generator = torch.Generator().manual_seed(1)
    return torch.randn((ROWS, 2, 3, 3), generator=generator), torch.rand((ROWS, 2, 3, 3), generator=generator)


def images():
    changes = ImageChanges(crop_padding=3, horizontal_flip=True)
    return ImageDataset(
        image_arrays(pixels(), np.arange(ROWS) % 2), image_processor(SIZE, channels=1), augment=changes, seed=6
    )


def noise():
    pictures = [[EncodedPicture(mean, std, {})] for mean, std in zip(*latents(), strict=True)]
    return NoisedRows(pictures, noisings()["epsilon"], sample_name="pixel_values", seed=6)


ORDER = [3, 1, 7, 5, 0, 2, 4, 6]
DATA_SETS = {
    "images": images,
    "noise": noise,
    "set_epoch": Told,
    "a subset of images": lambda: Subset(images(), ORDER),
}


def image_of(epoch, row):
    """The image of a row by hand: numbers are drawn in the order that `ImageChanges` says, and pixels are moved."""
    draw = random.Random(f"6 {epoch} {row}")
    mirrored, _ = draw.random() < 0.5, draw.random()
    left, top = draw.randint(0, 6), draw.randint(0, 6)
    image = pixels()[row]
    image = np.pad(image[:, ::-1] if mirrored else image, 3)[top : top + SIZE, left : left + SIZE]
    return torch.tensor(image / 127.5 - 1)


def noised_of(epoch, row):
    generator = torch.Generator().manual_seed(seed_of(6, epoch, row) % 2**63)
    mean, std = (one[row] for one in latents())
    torch.randint(1, (), generator=generator)  # the choice among one variant
    clean = mean + std * torch.randn(mean.shape, generator=generator)
    step = int(torch.randint(len(betas()), (), generator=generator))
    kept = (1 - betas()).log().cumsum(0).exp()[step]
    return kept**0.5 * clean + (1 - kept) ** 0.5 * torch.randn(mean.shape, generator=generator)


EXPECTED = {
    "images": image_of,
    "noise": noised_of,
    "set_epoch": lambda epoch, row: torch.tensor(100.0 * epoch + row),
    "a subset of images": lambda epoch, row: image_of(epoch, ORDER[row]),
}


def key_of(values):
    return tuple(torch.as_tensor(values, dtype=torch.float64).flatten().mul(100).round().tolist())


def readings(name):
    """The (epoch, row) of everything that may be read."""
    found = {key_of(EXPECTED[name](epoch, row)): (epoch, row) for epoch in range(EPOCHS) for row in range(ROWS)}
    assert EPOCHS * ROWS == len(found)
    return found


class Witness(nn.Module):
    """A model that keeps what it read in training, and apart from it in evaluations."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.read = {True: [], False: []}

    def forward(self, pixel_values, timestep=None, labels=None):
        self.read[self.training] += [key_of(one) for one in pixel_values]
        return {"loss": (self.scale * pixel_values).mean() ** 2, "logits": pixel_values.flatten(1)}


def read_by(kind, folder, data, workers, resume=None, world=1):
    """Returns the keys of what a run of three epochs read in training and in evaluations on the same data set."""
    os.environ["OMP_NUM_THREADS"] = "1"
    given = {
        "use_cpu": True,
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": 2 // world,
        "per_device_eval_batch_size": ROWS // world,
        "save_strategy": "steps",
        "save_steps": STEP,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "dataloader_num_workers": min(workers, 2),
        "dataloader_persistent_workers": workers > 2,
    }
    if kind == "transformers":
        given |= {"report_to": "none", "disable_tqdm": True, "logging_strategy": "no", "ddp_timeout": patience(30)}
        make, settings = HFTrainer, TransformersArguments(str(folder), ddp_find_unused_parameters=False, **given)
    else:
        make = Trainer if world == 1 else AccelTrainer
        settings = (TrainingArguments if world == 1 else AccelTrainingArguments)(str(folder), **given)
    model = Witness()
    rows = data()
    trainer = make(
        model, settings, train_dataset=rows, eval_dataset=rows, callbacks=[Recorder()],
        data_collator=torch.utils.data.default_collate,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return model.read[True], model.read[False]
