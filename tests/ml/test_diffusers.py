"""Text-to-image training with diffusers itself: against plain loops with its schedulers, and files that it reads.

Skipped where diffusers is not installed; `make test-finetune` runs it with a diffusers of its own.
"""

import json
import runpy

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("diffusers", reason="the extra 'diffusion' is not installed: make test-finetune brings it")

from diffusers import DDPMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from peft import LoraConfig, get_peft_model

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapter_base import read_base
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.diffusion import (
    DenoisingLoss,
    ImageSampleCallback,
    InstanceImages,
    LoraFileCallback,
    TextToImagePipeline,
    denoiser,
    encoded_rows,
)
from forgather.ml.diffusion.lora_file import LORA_FILE, lora_file
from forgather.ml.random_state import forked_random
from forgather.ml.trainer.data_rng import seed_of
from tests.ml.fixtures import StopAt, largest_difference
from tests.project.workbench import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")
ADAPTER = {"r": 4, "lora_alpha": 8, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]}
KINDS = {
    "epsilon": ("sdxl", {"prediction_type": "epsilon"}),
    "v_prediction": ("sdxl", {"prediction_type": "v_prediction"}),
    "flow": ("sd3", {}),
}
WITHOUT = {"sd3": ["text_encoder_3", "tokenizer_3"]}
PROMPT = "a photo of sks circle"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a folder with pictures, and a pipeline of each kind."""
    folder = tmp_path_factory.mktemp("made")
    script = runpy.run_path(str(ROOT / "projects/diffusion/make_pipeline.py"))
    script["write_pictures"](folder / "pictures", 4)
    for name, (kind, options) in KINDS.items():
        script["write_pipeline"](folder / name, kind, **options)
    return folder


def loaded(made, name):
    return TextToImagePipeline(made / name, without=WITHOUT.get(KINDS[name][0], ()))


def trained(made, name, folder, *, pipeline=None, stop=None, resume=False, callbacks=(), **changes):
    pipeline = pipeline or loaded(made, name)
    rows = encoded_rows(
        InstanceImages(made / "pictures", resolution=32), pipeline=pipeline, instance_prompt=PROMPT, seed=3
    )
    given = {"max_steps": 5, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}
    given |= {"train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    trainer = Trainer(
        lambda: denoiser(pipeline),
        TrainingArguments(str(folder), use_cpu=True, **{**given, **changes}),
        train_dataset=rows,
        data_collator=torch.utils.data.default_collate,
        loss_fn=DenoisingLoss(),
        adapter=ADAPTER,
        callbacks=[*callbacks, *([StopAt(stop)] if stop else [])],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


def plain_losses(made, name, steps, epoch_of=lambda epoch: epoch):
    """A loop with the parts of diffusers, of which only the random numbers are those of our rows."""
    kind = KINDS[name][0]
    pipe = DiffusionPipeline.from_pretrained(str(made / name), **dict.fromkeys(WITHOUT.get(kind, ())))
    part = pipe.transformer if kind == "sd3" else pipe.unet
    for module in (pipe.vae, pipe.text_encoder, pipe.text_encoder_2):
        module.requires_grad_(False)
    part.requires_grad_(True).train()
    with forked_random(42):
        model = get_peft_model(part, LoraConfig(**ADAPTER))
    crops = list(InstanceImages(made / "pictures", resolution=32))
    if kind == "sd3":
        embeds, _, pooled, _ = pipe.encode_prompt(PROMPT, PROMPT, PROMPT, do_classifier_free_guidance=False)
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config)
    else:
        embeds, _, pooled, _ = pipe.encode_prompt(PROMPT, do_classifier_free_guidance=False)
        scheduler = DDPMScheduler.from_config(pipe.scheduler.config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for step in range(steps):
        epoch, place = divmod(step, 2)
        noisy, steps_drawn, targets, sizes = [], [], [], []
        for row in (2 * place, 2 * place + 1):
            [crop] = crops[row]
            generator = torch.Generator().manual_seed(seed_of(3, epoch_of(epoch), row) % 2**63)
            torch.randint(1, (), generator=generator)
            latents = pipe.vae.encode(crop.pixels_CRR[None]).latent_dist.sample(generator)
            latents = (latents - (pipe.vae.config.shift_factor or 0)) * pipe.vae.config.scaling_factor
            if kind == "sd3":
                drawn = int(torch.sigmoid(torch.randn((), generator=generator, dtype=torch.float64)) * 1000)
                noise = torch.randn(latents.shape[1:], generator=generator)[None]
                timestep = scheduler.timesteps[drawn][None]
                noisy.append(scheduler.scale_noise(latents, timestep, noise))
                targets.append(noise - latents)
            else:
                timestep = torch.randint(1000, (), generator=generator)[None]
                noise = torch.randn(latents.shape[1:], generator=generator)[None]
                noisy.append(scheduler.add_noise(latents, noise, timestep))
                v = name == "v_prediction"
                targets.append(scheduler.get_velocity(latents, noise, timestep) if v else noise)
            steps_drawn.append(timestep)
            sizes.append(
                pipe._get_add_time_ids(crop.original_size, crop.top_left, (32, 32), torch.float32, 32)
                if kind == "sdxl"
                else None
            )
        both, prompts = torch.cat(steps_drawn), embeds.expand(2, -1, -1)
        if kind == "sd3":
            found = model(
                hidden_states=torch.cat(noisy),
                timestep=both,
                encoder_hidden_states=prompts,
                pooled_projections=pooled.expand(2, -1),
                return_dict=False,
            )[0]
        else:
            conditions = {"text_embeds": pooled.expand(2, -1), "time_ids": torch.cat(sizes)}
            found = model(torch.cat(noisy), both, prompts, added_cond_kwargs=conditions, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(found, torch.cat(targets))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("name", KINDS)
def test_a_training_equals_a_loop_with_the_parts_of_diffusers(name, made, tmp_path, record_property):
    # Not Adam, which divides the gradients by their size: the smallest of them consist of rounding errors.
    trainer, losses = trained(made, name, tmp_path, optim="sgd", learning_rate=0.5)
    expected, model = plain_losses(made, name, 5)
    assert losses == pytest.approx(expected, abs=1e-6)
    distance = largest_difference(model.state_dict(), trainer.model.state_dict())
    record_property("difference", float(distance))
    assert distance <= 1e-6
    other, _ = plain_losses(made, name, 5, epoch_of=lambda epoch: 0)
    assert max(abs(a - b) for a, b in zip(losses, other, strict=True)) > 1e-3


@pytest.mark.parametrize("name", ["epsilon", "flow"])
def test_a_run_resumes_bit_for_bit_draws_pictures_and_leaves_a_file_that_diffusers_reads(
    name, made, tmp_path, record_property
):
    _, losses = trained(made, name, tmp_path / "plain")
    for folder, options in (("whole", {}), ("stopped", {"stop": 4}), ("stopped", {"resume": True})):
        pipeline = loaded(made, name)
        file = LoraFileCallback(pipeline)
        images = ImageSampleCallback(
            [PROMPT, "a circle"], pipeline, resolution=32, every_epochs=1, num_inference_steps=2
        )
        options |= {"logging_dir": str(tmp_path / folder / "run")}
        trainer, found = trained(made, name, tmp_path / folder, pipeline=pipeline, callbacks=[file, images], **options)
        assert file.difference is not None and file.difference <= 1e-5
    # Drawing pictures changes nothing, and neither does a stop.
    assert losses == found
    kept = [dict(whole_weights(tmp_path / folder / "checkpoint-5")) for folder in ("plain", "whole", "stopped")]
    assert 0 == largest_difference(kept[0], kept[1]) == largest_difference(kept[0], kept[2])
    assert read_base(tmp_path / "whole").digest == read_base(tmp_path / "stopped" / "checkpoint-5").digest != ""
    lines = [json.loads(line) for line in (tmp_path / "stopped/run/samples.jsonl").read_text().splitlines()]
    assert [2, 2, 4, 4, 5, 5] == [line["step"] for line in lines]
    pictures = [
        (tmp_path / folder / "run" / line["image"]).read_bytes() for folder in ("whole", "stopped") for line in lines
    ]
    assert pictures[:6] == pictures[6:] and len(set(pictures)) == 6
    # Without our code: the pipeline with the file draws what the trained model has drawn.
    pipe = DiffusionPipeline.from_pretrained(str(made / name), **dict.fromkeys(WITHOUT.get(KINDS[name][0], ())))
    options = {"height": 32, "width": 32, "num_inference_steps": 2}
    before = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **options).images[0]
    pipe.load_lora_weights(str(tmp_path / "whole"))
    after = pipe(PROMPT, generator=torch.Generator().manual_seed(0), **options).images[0]
    (tmp_path / "after").mkdir()
    after.save(tmp_path / "after/one.png")
    assert pictures[4] == (tmp_path / "after/one.png").read_bytes()
    assert before.tobytes() != after.tobytes()


def test_a_lora_file_is_that_of_diffusers(made, tmp_path):
    from peft.utils import get_peft_model_state_dict

    trainer, _ = trained(made, "epsilon", tmp_path)
    unet = trainer.model.get_base_model()
    type(loaded(made, "epsilon").parts).save_lora_weights(
        str(tmp_path / "theirs"), unet_lora_layers=get_peft_model_state_dict(unet, adapter_name="default")
    )
    (tmp_path / LORA_FILE).write_bytes(lora_file(tmp_path, "unet"))
    theirs, ours = load_file(tmp_path / "theirs" / LORA_FILE), load_file(tmp_path / LORA_FILE)
    assert sorted(theirs) == sorted(ours)
    assert 0 == largest_difference(theirs, ours)


def test_a_file_that_is_not_the_trained_model_is_not_kept(made, tmp_path, monkeypatch):
    pipeline = loaded(made, "epsilon")
    other = TextToImagePipeline(made / "other")
    torch.manual_seed(5)
    pipe = DiffusionPipeline.from_pretrained(str(made / "epsilon"))
    for weight in pipe.unet.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    pipe.save_pretrained(made / "other")
    callback = LoraFileCallback(pipeline)
    monkeypatch.setattr(pipeline, "with_lora", other.with_lora)
    with pytest.raises(TrainingError, match="differ by") as error:
        trained(made, "epsilon", tmp_path, pipeline=pipeline, callbacks=[callback])
    assert "FG981" == error.value.code
    assert not (tmp_path / LORA_FILE).exists()
    assert (tmp_path / "adapter_model.safetensors").exists()
