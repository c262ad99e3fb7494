"""Text-to-image training without diffusers: pictures, noise, rows and loss, against a loop of torch and peft alone."""

import base64
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.diffusion import DenoisingLoss, FixedNoiseRows, InstanceImages, TextToImagePipeline
from forgather.ml.diffusion.images import InstanceImageError
from forgather.ml.diffusion.lora_file import LORA_FILE, lora_file
from forgather.ml.diffusion.noising import PipelineError, noising_of
from forgather.ml.diffusion.pipeline import PipelineSourceError
from forgather.ml.report.page import page
from forgather.ml.report.run_data import read_facts
from forgather.requirements import Requirement
from tests.matrix import thinned
from tests.ml.diffusion_cases import ADAPTER, denoiser, noised_rows, noisings, plain_losses, target_of
from tests.ml.fixtures import StopAt, largest_difference

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")


def trained(folder, rows, *, resume=False, stop=None, **changes):
    given = {"max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "steps"}
    given |= {
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_steps": 2,
        "use_cpu": True,
    }
    trainer = Trainer(
        denoiser(),
        TrainingArguments(str(folder), **{**given, **changes}),
        train_dataset=rows,
        eval_dataset=FixedNoiseRows(rows, repeats=2),
        data_collator=torch.utils.data.default_collate,
        loss_fn=DenoisingLoss(),
        adapter=ADAPTER,
        callbacks=[StopAt(stop)] if stop else [],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", thinned(list(noisings()), lambda kind: kind in ("v_prediction", "flow")))
def test_a_training_equals_a_plain_loop_over_three_epochs(kind, tmp_path, record_property):
    rows = noised_rows(kind, variants=2)
    trainer, losses = trained(tmp_path, rows, max_steps=7, save_strategy="no")
    options = {"steps": 7, "batch_size": 2, "rate": 1e-2}
    expected, model = plain_losses(rows, kind, denoiser, **options)
    assert losses == pytest.approx(expected, abs=1e-6)
    distance = largest_difference(model.state_dict(), trainer.model.state_dict())
    record_property("difference", float(distance))
    assert distance <= 1e-6
    same_in_each_epoch, _ = plain_losses(rows, kind, denoiser, **options, epoch_of=lambda epoch: 0)
    assert max(abs(a - b) for a, b in zip(losses, same_in_each_epoch, strict=True)) > 1e-2


def test_a_stopped_run_goes_on_bit_for_bit_and_an_evaluation_changes_nothing(tmp_path):
    whole, losses = trained(tmp_path / "whole", noised_rows())
    trained(tmp_path / "stopped", noised_rows(), stop=4, eval_strategy="steps", eval_steps=1)
    again, theirs = trained(tmp_path / "stopped", noised_rows(), resume=True)
    assert losses == theirs
    kept, found = (dict(whole_weights(tmp_path / name / "checkpoint-5")) for name in ("whole", "stopped"))
    assert 0 == largest_difference(kept, found)
    assert 4 == len(kept)
    evaluated = [trainer.evaluate()["eval_loss"] for trainer in (whole, again, whole)]
    assert 1 == len(set(evaluated))


def test_worker_processes_read_the_noise_of_the_epoch(tmp_path):
    _, losses = trained(tmp_path / "none", noised_rows(), max_steps=7, save_strategy="no")
    options = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    _, theirs = trained(tmp_path / "one", noised_rows(), max_steps=7, save_strategy="no", **options)
    assert losses == theirs


def test_targets_by_hand():
    latents, noise = torch.tensor([3.0]), torch.tensor([1.0])
    for kind, noising in noisings().items():
        made = noising.noised(latents, noise, 600)
        kept = 1 - noising.sigmas_S[600] if kind == "flow" else noising.alphas_cumprod_S[600]
        assert torch.allclose(made.target, target_of(kind, latents, noise, kept))
        signal, scale = (kept, 1 - kept) if kind == "flow" else (kept.sqrt(), (1 - kept).sqrt())
        assert torch.allclose(made.sample, signal * 3 + scale * 1)
        drawn = [noising.draw(torch.Generator().manual_seed(seed)) for seed in range(200)]
        assert 0 <= min(drawn) < 200 and 800 < max(drawn) < 1000
    # The middle is preferred: of a uniform draw, a fifth would be there.
    middle = [300 <= noisings()["flow"].draw(torch.Generator().manual_seed(seed)) < 700 for seed in range(300)]
    assert 0.5 < sum(middle) / 300 < 0.75


class EulerDiscreteScheduler:
    alphas_cumprod = torch.linspace(0.99, 0.01, 10)

    def __init__(self, kind="epsilon"):
        self.config = {"prediction_type": kind}


class FlowMatchEulerDiscreteScheduler:
    sigmas = torch.linspace(1, 0, 11)
    timesteps = 10 * sigmas[:-1]


class EDMEulerScheduler:
    config = {"prediction_type": "epsilon"}


def test_the_scheduler_of_the_pipeline_chooses_the_noise():
    assert "uniform" == noising_of(EulerDiscreteScheduler()).sampling
    flow = noising_of(FlowMatchEulerDiscreteScheduler())
    assert ("logit_normal", 10, 10) == (flow.sampling, len(flow.sigmas_S), len(flow.timesteps_S))
    for scheduler, sampling in (
        (EDMEulerScheduler(), None),
        (EulerDiscreteScheduler("flow_prediction"), None),
        (EulerDiscreteScheduler(), "mode"),
    ):
        with pytest.raises(PipelineError) as error:
            noising_of(scheduler, sampling=sampling)
        assert "FG979" == error.value.code


def picture(file, width, height):
    """Writes a picture whose red value is its column and whose green value is its row."""
    made = Image.new("RGB", (width, height))
    made.putdata([(column, row, 0) for row in range(height) for column in range(width)])
    made.save(file)


def test_pictures_are_cut_to_squares_and_mirrored(tmp_path):
    picture(tmp_path / "b.png", 20, 16)
    picture(tmp_path / "a.PNG", 16, 24)
    (tmp_path / "notes.txt").write_text("no picture")
    images = InstanceImages(tmp_path, resolution=16, random_flip=True)
    (tall, mirror), (wide, _) = images
    assert ((24, 16), (4, 0)) == (tall.original_size, tall.top_left)
    assert ((16, 20), (0, 2)) == (wide.original_size, wide.top_left)
    expected = torch.arange(4, 20).float() / 127.5 - 1
    assert torch.allclose(expected, tall.pixels_CRR[1, :, 0])
    assert torch.allclose(tall.pixels_CRR[0], mirror.pixels_CRR[0].flip(1))
    assert torch.allclose(torch.arange(2, 18).float() / 127.5 - 1, wide.pixels_CRR[0, 0])
    drawn = {InstanceImages(tmp_path, resolution=16, center_crop=False, seed=seed)[0][0].top_left for seed in range(40)}
    assert {(top, 0) for top in range(9)} == drawn
    assert 1 == len(InstanceImages(tmp_path, resolution=16)[0])
    assert (3, 8, 8) == InstanceImages(tmp_path, resolution=8)[0][0].pixels_CRR.shape


def test_gray_pixels_of_more_than_eight_bits_are_refused(tmp_path):
    Image.fromarray(np.full((20, 20), 300, dtype=np.uint16)).save(tmp_path / "gray.png")
    with pytest.raises(InstanceImageError, match="more than 256 levels"):
        InstanceImages(tmp_path, resolution=16)[0]


def test_what_is_no_picture_is_named(tmp_path):
    for folder in (tmp_path / "none", tmp_path):
        with pytest.raises(InstanceImageError) as error:
            InstanceImages(folder, resolution=16)
        assert ("FG977", "instance_data_dir") == (error.value.code, error.value.argument)
    picture(tmp_path / "a.png", 64, 64)
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:100])
    with pytest.raises(InstanceImageError, match="picture 2, .*b.png"):
        InstanceImages(tmp_path, resolution=8)[1]
    Image.fromarray(np.full((64, 64), 1000, dtype=np.uint16)).save(tmp_path / "b.png")
    with pytest.raises(InstanceImageError, match="picture 2, .*b.png.*more than 256 levels"):
        InstanceImages(tmp_path, resolution=8)[1]


def test_a_pipeline_that_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Requirement, "lack", lambda self: None)
        for name, words in ((str(tmp_path), "no model_index.json"), (str(tmp_path / "none"), "no such folder")):
            with pytest.raises(PipelineSourceError, match=words) as error:
                TextToImagePipeline(name).parts  # noqa: B018
            assert ("FG978", "pretrained_model_name_or_path") == (error.value.code, error.value.argument)
    monkeypatch.setattr(Requirement, "lack", lambda self: f"{self.distribution}, which is not installed")
    with pytest.raises(PipelineSourceError, match="needs diffusers"):
        TextToImagePipeline(str(tmp_path)).parts  # noqa: B018


def test_rows_without_a_target_are_refused(tmp_path):
    class Bare(list):
        def __getitem__(self, row):
            return {name: value for name, value in super().__getitem__(row).items() if name != "labels"}

    rows = noised_rows()
    with pytest.raises(TrainingError) as error:
        trained(tmp_path, Bare([rows[row] for row in range(6)]), save_strategy="no", eval_strategy="no")
    assert "FG980" == error.value.code


def adapter_folder(folder, **more):
    """A run with a LoRA of `to_q` and `to_out.0`, and what `more` adds to the settings of the adapter."""
    args = TrainingArguments(str(folder), max_steps=2, per_device_train_batch_size=2, use_cpu=True, learning_rate=1e-2)
    trainer = Trainer(
        denoiser(),
        args,
        train_dataset=noised_rows(),
        data_collator=torch.utils.data.default_collate,
        loss_fn=DenoisingLoss(),
        adapter={**ADAPTER, **more},
    )
    trainer.train()
    return trainer.model


def test_a_lora_file_has_the_names_of_the_pipeline_and_the_settings(tmp_path):
    model = adapter_folder(tmp_path)
    content = lora_file(tmp_path, "unet")
    (tmp_path / LORA_FILE).write_bytes(content)
    with safe_open(tmp_path / LORA_FILE, "pt") as opened:
        found = {name: opened.get_tensor(name) for name in opened.keys()}
        settings = json.loads(opened.metadata()["lora_adapter_metadata"])
    state = model.state_dict()
    layers = [f"{layer}.lora_{side}" for layer in ("to_q", "to_out.0") for side in "AB"]
    assert {f"unet.{layer}.weight" for layer in layers} == set(found)
    for layer in layers:
        assert torch.equal(found[f"unet.{layer}.weight"], state[f"base_model.model.{layer}.default.weight"])
    assert (2, 4) == (settings["unet.r"], settings["unet.lora_alpha"])


def test_what_a_lora_file_cannot_hold_is_named(tmp_path):
    adapter_folder(tmp_path, modules_to_save=["of_prompt"])
    with pytest.raises(TrainingError, match="of_prompt") as error:
        lora_file(tmp_path, "unet")
    assert "FG981" == error.value.code


def test_the_report_shows_pictures_of_the_run_alone(tmp_path):
    run = tmp_path / "run"
    (run / "images").mkdir(parents=True)
    picture(run / "images/step-1-0.png", 600, 300)
    picture(tmp_path / "outside.png", 8, 8)
    (run / "images/text.png").write_text("no picture")
    names = ["images/step-1-0.png", "../outside.png", "images/text.png", "images/none.png"]
    lines = [json.dumps({"step": 1, "prompt": f"<b>{name}", "image": name}) for name in names]
    (run / "samples.jsonl").write_text("\n".join(lines) + "\n")
    shown = page(read_facts(run))
    assert "What the model draws" in shown and "&lt;b&gt;" in shown and "<b>images" not in shown
    addresses = re.findall(r'src="data:image/png;base64,([^"]+)"', shown)
    assert 1 == len(addresses)
    assert (256, 128) == Image.open(io.BytesIO(base64.b64decode(addresses[0]))).size
    assert "img-src data:" in shown
