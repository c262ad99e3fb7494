"""Measures which model families of transformers keep the documents of a packed row apart.

Writes forgather/ml/packing_models.json. Builds a tiny model of each causal language model family, runs two packed rows
whose first documents differ, and compares the logits of the second documents. A family that cannot be built this small
is in neither list, and a run that packs rows for it warns that it was not measured.

    python scripts/measure_packing.py            # all families, about three minutes
    python scripts/measure_packing.py llama opt  # prints the results of these, writes nothing
"""

import inspect
import json
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

TABLE = Path(__file__).parents[1] / "forgather" / "ml" / "packing_models.json"
LARGEST, SECONDS, LENGTH, BORDER = 100_000_000, 60, 16, 7
SMALL = {
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "attention_hidden_size"], 32),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_experts", "num_local_experts"], 4),
    **dict.fromkeys(["n_routed_experts", "mamba_n_heads"], 4),
    **dict.fromkeys(["intermediate_size", "ffn_dim"], 48),
    **dict.fromkeys(["max_position_embeddings", "n_positions", "vocab_size"], 64),
    **dict.fromkeys(["num_key_value_heads", "num_experts_per_tok", "expand"], 2),
    **dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads"], 2),
    **dict.fromkeys(["head_dim", "state_size", "mamba_d_state", "linear_key_head_dim", "linear_value_head_dim"], 8),
    **dict.fromkeys(["moe_intermediate_size", "mamba_d_head"], 16),
    **{"rotary_dim": 4, "time_step_rank": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
LEFT_OUT = ((), ("head_dim",), ("head_dim", "num_key_value_heads"), ("head_dim", "rotary_dim"), ("n_routed_experts",))
LATENT = {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "head_dim": None}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}
OWN = {
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]], "num_layers": 8},
    **dict.fromkeys(["nemotron", "ministral", "hunyuan_v1_dense", "hunyuan_v1_moe"], HEADS),
    **dict.fromkeys(["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "minicpm3", "youtu"], LATENT),
    **dict.fromkeys(["axk1", "axk2", "glm_moe_dsa"], LATENT),
}
SEEDS = 3
"""Most models that mix documents do so with any weights; a model that routes to experts, only with some weights."""


def differs(family, kind, seed):
    """Returns the largest difference of the logits of the second documents when the first documents differ."""
    torch.manual_seed(seed)
    ids = torch.randint(3, 60, (2, LENGTH))
    other = ids.clone()
    other[:, :BORDER] = torch.randint(3, 60, (2, BORDER))
    positions = torch.cat([torch.arange(BORDER), torch.arange(LENGTH - BORDER)]).expand(2, -1)
    failure = None
    for layers in (8, 4):
        for left_out in LEFT_OUT:
            try:
                model = small_model(family, kind, layers, left_out)
                named = "position_ids" in inspect.signature(model.forward).parameters
                inputs = {"position_ids": positions} if named else {}
                with torch.no_grad():
                    one, two = (model(input_ids=each, **inputs).logits for each in (ids, other))
                return float((one - two)[:, BORDER:].abs().max())
            except Exception as error:  # noqa: BLE001 - the configuration cannot be this small
                failure = error
    raise failure


def small_model(family, kind, layers, left_out):
    make = CONFIG_MAPPING[family]
    base = make()
    sizes = SMALL | dict.fromkeys(LAYERS, layers)
    sizes = {name: value for name, value in sizes.items() if getattr(base, name, None) is not None}
    sizes = {name: value for name, value in sizes.items() if name not in left_out} | OWN.get(family, {})
    config = make(**{name: value for name, value in sizes.items() if value is not None})
    config._attn_implementation, config.use_cache = "eager", False
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(weight.numel() for weight in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters")
    return kind(config).eval()


def timed_out(*_):
    raise TimeoutError


def main(families):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, timed_out)
    found = {"apart": {}, "mixed": {}}
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if families and family not in families:
            continue
        kind = getattr(transformers, name if isinstance(name, str) else name[0])
        folder = kind.__module__.split(".")[2]
        signal.alarm(SECONDS)
        try:
            gap = min(differs(family, kind, seed) for seed in range(SEEDS))
            verdict = "apart" if gap < 1e-6 else "mixed"
            found[verdict].setdefault(folder, []).append(kind.__name__)
        except (Exception, TimeoutError) as error:  # noqa: BLE001
            gap = verdict = f"{type(error).__name__}: {error}"[:100]
        finally:
            signal.alarm(0)
        print(family, verdict, gap, flush=True)
    if not families:
        # A folder with models of both kinds counts as one that mixes documents.
        apart = {one: sorted(names) for one, names in sorted(found["apart"].items()) if one not in found["mixed"]}
        mixed = {one: sorted(names) for one, names in sorted(found["mixed"].items())}
        table = {"transformers": transformers.__version__, "apart": apart, "mixed": mixed}
        TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
