"""Measures for which model families of transformers masks that are decided on the host change no bit of the logits.

Writes forgather/ml/attention_models.json. Builds a tiny model of each family of language models, and compares the
logits of plain, padded and packed batches with those of transformers' own detection of masks, for sdpa and eager
attention. A family that differs, or that cannot be built this small, keeps transformers' own detection.

    python scripts/measure_attention_inputs.py            # all families, about ten minutes
    python scripts/measure_attention_inputs.py llama t5   # these families; the others keep their results
"""

import inspect
import json
import logging
import signal
import sys
import warnings
from pathlib import Path

import torch
import transformers
from measure_packing import LEFT_OUT, small_model, timed_out
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.auto import modeling_auto

from forgather.ml import attention_inputs
from forgather.ml.attention_inputs import AttentionInputs
from forgather.ml.model_inputs import ModelInputs, NoCache, inputs_of

TABLE = Path(__file__).parents[1] / "forgather" / "ml" / "attention_models.json"
ROWS, LENGTH, SECONDS = 3, 16, 60
MAPPINGS = (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)


class Reads(TorchDispatchMode):
    """Counts how often the host reads a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def batches(model):
    """Returns a batch of each kind. Token 0 is the padding token of the models."""
    ids = torch.randint(0, 60, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    ones = torch.ones_like(ids)
    right, left = ones.clone(), ones.clone()
    right[1, 10:], right[2, 5:], left[1, :4] = 0, 0, 0
    found = {
        "without a mask": {},
        "ones": {"attention_mask": ones},
        "padded right": {"attention_mask": right},
        "padded left": {"attention_mask": left},
    }
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters:
        packed = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)]).expand(ROWS, -1)
        found["packed"] = {"position_ids": packed}
        found["packed, ones"] = {"position_ids": packed, "attention_mask": ones}
        found["plain positions"] = {"position_ids": torch.arange(LENGTH).expand(ROWS, -1)}
    decoder = {"decoder_input_ids": ids.flip(1)} if "decoder_input_ids" in parameters else {}
    if "decoder_attention_mask" in parameters:
        found["decoder padded"] = {"attention_mask": ones, "decoder_attention_mask": right}
    return {kind: {"input_ids": ids, **decoder, **inputs} for kind, inputs in found.items()}


def built(family, kind):
    torch.manual_seed(0)
    for left_out in LEFT_OUT:
        try:
            model = small_model(family, kind, 4, left_out)
            with torch.no_grad():
                model(**batches(model)["without a mask"])
            return model
        except TimeoutError:
            raise
        except Exception as error:  # noqa: BLE001 - the configuration cannot be this small
            failure = error
    raise failure


def differing(model):
    """Returns the kinds of batches whose logits differ by a bit, and the largest number of reads of the host."""
    found, reads = [], 0
    for attention in ("sdpa", "eager"):
        try:
            model.set_attn_implementation(attention)
        except ValueError:
            continue
        for kind, batch in batches(model).items():
            inputs, keywords = ModelInputs(model), NoCache(model).keywords
            prepared = inputs.prepared(batch)
            with torch.no_grad():
                expected = model(**inputs_of(prepared), **keywords).logits
                with Reads() as counted:
                    actual = inputs.call(model, prepared).logits
            reads = max(reads, counted.count)
            if not torch.equal(expected.nan_to_num(), actual.nan_to_num()):
                found.append(f"{attention}, {kind}")
    return found, reads


def main(families):
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, timed_out)
    # All that this script builds is to be measured, whatever the table says.
    folders = {one.name for one in Path(transformers.__file__).parent.joinpath("models").iterdir()}
    attention_inputs._measured_families = lambda: folders
    table = json.loads(TABLE.read_text()) if families else {"equal": {}, "differ": {}}
    for mapping in MAPPINGS:
        for family, name in mapping.items():
            if not families or family in families:
                for one in (name,) if isinstance(name, str) else name:
                    measure(family, getattr(transformers, one), table)
    # A folder with a class that differs counts as one that does.
    table["equal"] = {one: table["equal"][one] for one in sorted(table["equal"]) if one not in table["differ"]}
    TABLE.write_text(json.dumps({"transformers": transformers.__version__, **table}, indent=1) + "\n")


def measure(family, kind, table):
    """Puts the result for a class into the table, if it could be built."""
    signal.alarm(SECONDS)
    try:
        model = built(family, kind)
        reason = AttentionInputs(model).left_alone
        gaps, reads = differing(model) if reason is None else ([reason], 0)
        found = table["differ" if gaps else "equal"].setdefault(kind.__module__.split(".")[2], [])
        found[:] = sorted({*found, kind.__name__})
        verdict = f"differs: {'; '.join(gaps)}" if gaps else f"equal, {reads} reads"
    except (Exception, TimeoutError) as error:  # noqa: BLE001
        verdict = f"{type(error).__name__}: {error}"[:100]
    finally:
        signal.alarm(0)
    print(kind.__name__, verdict, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
