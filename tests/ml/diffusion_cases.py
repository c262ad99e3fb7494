"""A denoiser with the arguments of a U-Net of Stable Diffusion XL, rows for it, and the loop that a trainer must equal."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from forgather.ml.diffusion.noising import Diffusion, FlowMatching
from forgather.ml.diffusion.rows import EncodedPicture, NoisedRows
from forgather.ml.random_state import forked_random
from forgather.ml.trainer.data_rng import seed_of

ADAPTER = {"r": 2, "lora_alpha": 4, "target_modules": ["to_q", "to_out.0"]}
STEPS = 1000


class Denoiser(nn.Module):
    """Predicts 4 channels of 4 x 4 latents from the latents, the timestep, a prompt and the sizes of a picture."""

    def __init__(self):
        super().__init__()
        self.to_q = nn.Linear(64, 32)
        self.of_prompt = nn.Linear(8, 32)
        self.of_sizes = nn.Linear(6 + 8, 32)
        self.to_out = nn.ModuleList([nn.Linear(32, 64)])

    def forward(self, sample, timestep, encoder_hidden_states, added_cond_kwargs=None):
        hidden = self.to_q(sample.flatten(1)) + self.of_prompt(encoder_hidden_states).mean(1)
        facts = torch.cat([added_cond_kwargs["text_embeds"], added_cond_kwargs["time_ids"] / 100], dim=1)
        hidden = torch.tanh(hidden + self.of_sizes(facts) + timestep[:, None] / STEPS)
        return (1.0 * self.to_out[0](hidden).view_as(sample),)


def denoiser():
    with forked_random(1):
        return Denoiser()


def betas():
    return torch.linspace(0.00085**0.5, 0.012**0.5, STEPS) ** 2


def noisings():
    """The noisings by name: those of the usual betas, and a straight line."""
    kept = torch.cumprod(1 - betas(), dim=0)
    kinds = {kind: Diffusion(kept, kind, "uniform") for kind in ("epsilon", "v_prediction", "sample")}
    sigmas = torch.linspace(1, 1 / STEPS, STEPS)
    return {**kinds, "flow": FlowMatching(sigmas, sigmas * STEPS, "logit_normal")}


def pictures(number=6, variants=1):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator)

    prompt = {"encoder_hidden_states": drawn(5, 8)}
    sizes = {"text_embeds": drawn(8), "time_ids": torch.tensor([32.0, 36, 0, 2, 32, 32])}
    return [
        [
            EncodedPicture(drawn(4, 4, 4), drawn(4, 4, 4).abs() / 9, {**prompt, "added_cond_kwargs": sizes})
            for _ in range(variants)
        ]
        for _ in range(number)
    ]


def noised_rows(kind="epsilon", **options):
    return NoisedRows(pictures(**options), noisings()[kind], sample_name="sample", seed=3)


def target_of(kind, latents, noise, kept):
    """The target of a kind of prediction; `kept` is the product of alphas, or one minus sigma."""
    return {
        "epsilon": noise,
        "sample": latents,
        "v_prediction": kept**0.5 * noise - (1 - kept) ** 0.5 * latents,
        "flow": noise - latents,
    }[kind]


def plain_losses(rows, kind, make, *, steps, batch_size, rate, adapter=ADAPTER, epoch_of=lambda epoch: epoch):
    """Returns the losses of a loop of torch and peft alone, and the adapted model after it.

    The numbers of a row are drawn one after the other from a generator of its own: variant, latents, timestep, noise.
    """
    base = make()
    with forked_random(42):
        model = get_peft_model(base, LoraConfig(**adapter))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0)
    per_epoch = len(rows) // batch_size
    losses = []
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        total = 0
        for row in range(place * batch_size, (place + 1) * batch_size):
            generator = torch.Generator().manual_seed(seed_of(rows.seed, epoch_of(epoch), row) % 2**63)
            variants = rows.pictures[row]
            picture = variants[int(torch.randint(len(variants), (), generator=generator))]
            latents = picture.mean_ZHW + picture.std_ZHW * torch.randn(picture.mean_ZHW.shape, generator=generator)
            if kind == "flow":
                drawn = int(STEPS / (1 + torch.exp(-torch.randn((), generator=generator, dtype=torch.float64))))
                noise = torch.randn(latents.shape, generator=generator)
                sigma = rows.noising.sigmas_S[drawn]
                noised, timestep = latents + sigma * (noise - latents), rows.noising.timesteps_S[drawn]
                kept = 1 - sigma
            else:
                drawn = int(torch.randint(STEPS, (), generator=generator))
                noise = torch.randn(latents.shape, generator=generator)
                kept = (1 - betas()).log().cumsum(0).exp()[drawn]
                noised, timestep = kept**0.5 * latents + (1 - kept) ** 0.5 * noise, torch.tensor(drawn)
            conditions = {
                name: {key: item[None] for key, item in value.items()} if isinstance(value, dict) else value[None]
                for name, value in picture.conditions.items()
            }
            found = model(noised[None], timestep=timestep[None], **conditions)[0]
            total = total + ((found[0] - target_of(kind, latents, noise, kept)) ** 2).mean() / batch_size
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses, model
