"""Writes a tiny text-to-image pipeline with random weights, in the layout of diffusers, and pictures to learn from.

The pipeline has the parts of Stable Diffusion XL (two text encoders) or, with --kind sd3, of Stable Diffusion 3 (a
transformer that is trained by flow matching); it needs less than 5 MB. The pictures are circles on a gray ground. The
same versions of the libraries write the same files.

Usage: python make_pipeline.py [--kind sdxl|sd3] [--pictures N] [FOLDER]
"""

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw

SIZE = 32  # pixels
WIDTH = 32  # of the text encoders


def tokenizer():
    """Returns a tokenizer of CLIP whose tokens are the bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[], model_max_length=77)


def text_encoder(kind):
    from transformers import CLIPTextConfig

    config = CLIPTextConfig(
        vocab_size=514,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        projection_dim=WIDTH,
        bos_token_id=512,
        eos_token_id=513,
        pad_token_id=513,
    )
    return kind(config)


def vae(channels):
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=[16, 32],
        down_block_types=["DownEncoderBlock2D"] * 2,
        up_block_types=["UpDecoderBlock2D"] * 2,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=SIZE,
        shift_factor=0.06,
    )


def sdxl(prediction_type="epsilon"):
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    unet = UNet2DConditionModel(
        sample_size=SIZE // 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=1,
        projection_class_embeddings_input_dim=6 * 8 + WIDTH,
        cross_attention_dim=2 * WIDTH,
    )
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type
    )
    return StableDiffusionXLPipeline(
        vae=vae(4),
        text_encoder=text_encoder(CLIPTextModel),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        tokenizer_2=tokenizer(),
        unet=unet,
        scheduler=scheduler,
        add_watermarker=False,
    )


def sd3():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
    from transformers import CLIPTextModelWithProjection

    transformer = SD3Transformer2DModel(
        sample_size=SIZE // 2,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=2 * WIDTH,
        caption_projection_dim=32,
        pooled_projection_dim=2 * WIDTH,
        out_channels=4,
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae(4),
        text_encoder=text_encoder(CLIPTextModelWithProjection),
        tokenizer=tokenizer(),
        text_encoder_2=text_encoder(CLIPTextModelWithProjection),
        tokenizer_2=tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


def write_pictures(folder, number=6):
    """Writes pictures of circles, of several sizes and places."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in range(number):
        picture = Image.new("RGB", (SIZE + 4 * (one % 3), SIZE + 4 * (one % 2)), (128, 128, 128))
        left, top, width = 3 + one % 4, 2 + (2 * one) % 7, 12 + one % 5
        ImageDraw.Draw(picture).ellipse((left, top, left + width, top + width), fill=(220, 40 + 10 * one, 40))
        picture.save(folder / f"circle-{one}.png")


def write_pipeline(folder, kind="sdxl", seed=0, **options):
    torch.manual_seed(seed)
    pipeline = {"sdxl": sdxl, "sd3": sd3}[kind](**options)
    pipeline.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--kind", choices=["sdxl", "sd3"], default="sdxl")
    parser.add_argument("--pictures", type=int, default=6)
    given = parser.parse_args()
    write_pictures(given.folder / "pictures", given.pictures)
    write_pipeline(given.folder / given.kind, given.kind)
