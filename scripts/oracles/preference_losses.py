"""Records what TRL's losses give on fixed batches, in the file that the tests of our losses read.

    make oracles

Needs trl on the path, which the project itself does not.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.ml import preference_cases as cases  # noqa: E402

FILE = ROOT / "tests/ml/recorded/preference_losses.json"
warnings.filterwarnings("ignore")


def word_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(cases.VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", unk_token="w1")


def config(kind: Any, **settings: Any) -> Any:
    shared = {"use_cpu": True, "bf16": False, "report_to": "none", "max_length": None, "per_device_train_batch_size": 2}
    return kind(output_dir=tempfile.mkdtemp(), **{**shared, **settings})


def text_rows(**columns: Any) -> Dataset:
    return Dataset.from_list([columns] * 2)


def recorded(trainer: Any, model: Any, batch: Any) -> dict[str, Any]:
    model.train()
    model.zero_grad()
    loss = trainer.compute_loss(model, batch)
    loss.backward()
    return {"loss": float(loss), "probes": cases.probes(model)}


def dpo_figures() -> dict[str, Any]:
    from trl import DPOConfig, DPOTrainer
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    collate = DataCollatorForPreference(pad_token_id=0)
    rows = text_rows(prompt="w3 w9 ", chosen="w7 w12", rejected="w8")
    found: dict[str, Any] = {}

    def run(name: str, batches: list[Any], **settings: Any) -> None:
        model, reference = cases.language_model(1), cases.language_model(2)
        args = config(DPOConfig, precompute_ref_log_probs=False, **settings)
        trainer = DPOTrainer(model, reference, args=args, train_dataset=rows, processing_class=word_tokenizer())
        found[name] = [recorded(trainer, trainer.model, collate(batch)) for batch in batches]

    for name, settings in cases.DPO.items():
        own = {"label_smoothing": 0.0, **settings, "loss_type": [settings.get("loss_type", "sigmoid")]}
        run(f"dpo_{name}", [cases.PAIRS], **own)
    # With one row in a batch nothing is sorted, and "aot" is the sigmoid loss with label smoothing.
    singles = [[row] for row in cases.PAIRS]
    run("dpo_smoothed", singles, beta=0.3, loss_type=["aot"], label_smoothing=0.2)
    run("dpo_sft", [cases.EVEN_PAIRS], beta=0.3, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5])
    return found


def orpo_figures() -> dict[str, Any]:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
    from trl.experimental.utils import DPODataCollatorWithPadding

    model = cases.language_model(1)
    rows = text_rows(prompt="w3 w9 ", chosen="w7 w12", rejected="w8")
    args = config(ORPOConfig, beta=0.3, max_length=64, remove_unused_columns=False)
    trainer = ORPOTrainer(model, args=args, train_dataset=rows, processing_class=word_tokenizer())

    def features(row: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name in ("chosen", "rejected"):
            ids = row["prompt_ids"] + row[f"{name}_ids"]
            made[f"{name}_input_ids"] = ids
            made[f"{name}_attention_mask"] = [1] * len(ids)
            made[f"{name}_labels"] = [-100] * len(row["prompt_ids"]) + row[f"{name}_ids"]
        return made

    collate = DPODataCollatorWithPadding(pad_token_id=0)
    batches = [[row] for row in cases.PAIRS] + [cases.EVEN_PAIRS]
    return {"orpo": [recorded(trainer, trainer.model, collate([features(row) for row in batch])) for batch in batches]}


def kto_figures() -> dict[str, Any]:
    from trl import KTOConfig, KTOTrainer
    from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference

    collate = DataCollatorForUnpairedPreference(pad_token_id=0)
    rows = Dataset.from_list([{"prompt": "w3 w9 ", "completion": "w7 w12", "label": good} for good in (True, False)])
    found = {}
    for name, settings in cases.KTO.items():
        model, reference = cases.language_model(1), cases.language_model(2)
        args = config(KTOConfig, **settings)
        trainer = KTOTrainer(model, reference, args=args, train_dataset=rows, processing_class=word_tokenizer())
        batch = [
            {**{key: row[key] for key in ("prompt_ids", "completion_ids")}, "label": bool(row["label"])}
            | ({"KL_completion_ids": row["kl_ids"]} if trainer.calculate_KL else {})
            for row in cases.FEEDBACK
        ]
        found[f"kto_{name}"] = [recorded(trainer, trainer.model, collate(batch))]
    return found


def reward_figures() -> dict[str, Any]:
    from trl import RewardConfig, RewardTrainer
    from trl.trainer.reward_trainer import DataCollatorForPreference

    rows = Dataset.from_list([{"chosen_ids": [3, 7, 2], "rejected_ids": [3, 8, 2]}] * 2)
    collate = DataCollatorForPreference(pad_token_id=0)
    found = {}
    for name, settings in cases.REWARD.items():
        model = cases.reward_model(1)
        args = config(RewardConfig, center_rewards_coefficient=settings.get("center_weight"))
        trainer = RewardTrainer(model, args=args, train_dataset=rows, processing_class=word_tokenizer())
        batch = [
            {side: row["prompt_ids"] + row[side] for side in ("chosen_ids", "rejected_ids")}
            | ({"margin": 0.1 * place} if name == "margin" else {})
            for place, row in enumerate(cases.PAIRS)
        ]
        found[f"reward_{name}"] = [recorded(trainer, trainer.model, collate(batch))]
    return found


def distillation_figures() -> dict[str, Any]:
    from trl.experimental.gkd import GKDTrainer

    found = {}
    for temperature in cases.TEMPERATURES:
        model, teacher = cases.language_model(1), cases.language_model(2)
        ids = torch.tensor(cases.TOKENS)
        labels = torch.tensor(cases.TOKEN_LABELS)[:, 1:]
        with torch.no_grad():
            given = teacher(input_ids=ids).logits[:, :-1]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = GKDTrainer.generalized_jsd_loss(logits, given, labels=labels, beta=0.0, temperature=temperature)
        loss.backward()
        found[f"distillation_{temperature}"] = [{"loss": float(loss), "probes": cases.probes(model)}]
    return found


def main() -> None:
    torch.set_num_threads(1)
    steps: list[Callable[[], dict[str, Any]]] = [
        dpo_figures,
        orpo_figures,
        kto_figures,
        reward_figures,
        distillation_figures,
    ]
    figures: dict[str, Any] = {}
    for step in steps:
        figures |= step()
    versions = {name: version(name) for name in ("trl", "transformers", "torch")}
    FILE.write_text(json.dumps({"versions": versions, "figures": figures}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
