"""Records how runs with the optimizers of torchao compare with a plain loop, for tests that do not need torchao.

    PYTHONPATH=FOLDER_OF_TORCHAO TORCHDYNAMO_DISABLE=1 python scripts/oracles/low_bit_optimizers.py [PART ...]

Writes tests/ml/recorded/low_bit_optimizers.json, or the named parts of it. The plain loop knows nothing of Forgather:
it steps the class of torchao. Updates are not compiled here, which makes the bits those of any machine. A run in two
processes is compared with one process; a resumed run with one that was not stopped, in the layout of the checkpoint and
in others.
"""

import functools
import json
import os
import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torchao import optim as torchao_optim  # noqa: E402

from forgather.errors import ForgatherError  # noqa: E402
from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments  # noqa: E402
from forgather.ml.adapters import lora  # noqa: E402
from forgather.ml.data import PreferenceCollator  # noqa: E402
from forgather.ml.distributed.env import DistributedEnvironment  # noqa: E402
from forgather.ml.host_reads import reads_forbidden  # noqa: E402
from forgather.ml.low_bit_optim import adopted, plain_parts  # noqa: E402
from forgather.ml.preference_losses import DPOLoss  # noqa: E402
from forgather.ml.strategy.optimizer_step import OptimizerStep  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402
from tests.ml.fixtures import StopAt, rows, tiny_llama  # noqa: E402

RECORD = ROOT / "tests/ml/recorded/low_bit_optimizers.json"
KINDS = {"adamw_torch_8bit": "AdamW8bit", "adamw_torch_4bit": "AdamW4bit"}
FACTORIES = ("AdamW8bit", "AdamW4bit", "AdamWFp8", "Adam8bit", "Adam4bit", "AdamFp8", "_AdamW")
STEPS, RATE = 4, 1e-2
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 64}
SETTINGS = {"use_cpu": True, "max_steps": STEPS, "learning_rate": RATE, "lr_scheduler_type": "linear"}
SETTINGS |= {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1}
SETTINGS |= {"train_sampling_strategy": "sequential"}


def model(dtype=torch.float32):
    return tiny_llama(**SIZES).to(dtype)


def data():
    return rows(count=4 * STEPS, length=16)


def plain_loop(kind):
    """The weights after the steps of a plain loop over the class that `optim` names."""
    net = model()
    named = list(net.named_parameters())
    groups = [
        {"params": [weight for name, weight in named if ("norm" in name) is is_norm], "weight_decay": decay}
        for is_norm, decay in ((False, 0.1), (True, 0.0))
    ]
    return steps_of(net, [getattr(torchao_optim, kind)(groups, lr=RATE, block_size=256)])


def steps_of(net, optimizers, loss_of=None, every=None):
    """Steps a model with several optimizers, and returns its weights."""
    every = data() if every is None else every
    for step in range(STEPS):
        for group in (group for one in optimizers for group in one.param_groups):
            group["lr"].fill_(RATE * (STEPS - step) / STEPS)
        batch = every[4 * step : 4 * step + 4]
        (token_loss if loss_of is None else loss_of)(net, batch).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
    return weights(net.state_dict())


def token_loss(net, batch):
    columns = {name: torch.stack([torch.as_tensor(row[name]) for row in batch]) for name in batch[0]}
    return net(**columns).loss


def weights(state):
    return {name: value.detach().clone() for name, value in state.items()}


def run(folder, layout, *, stop=None, resume=None, dtype=torch.float32, factory=None, given=None, **more):
    """Trains in the processes of a layout, and returns the weights and the bytes of the optimizer's state."""
    ranks = {"one process": 1}.get(layout, 2)
    work = functools.partial(_run, folder, layout, stop, resume, dtype, factory, given or {}, more)
    return run_ranks(ranks, work, timeout=300)[0]


def _run(folder, layout, stop, resume, dtype, factory, given, more):
    ranks = int(os.environ["WORLD_SIZE"])
    settings = {**SETTINGS, "per_device_train_batch_size": 4 // ranks, "output_dir": str(folder), **more}
    kind, arguments = (
        (Trainer, TrainingArguments) if layout == "one process" else (AccelTrainer, AccelTrainingArguments)
    )
    if layout == "FSDP2":
        settings["fsdp"] = "full_shard"
    trainer = kind(
        model_init=functools.partial(model, dtype),
        args=arguments(**settings),
        optimizer_factory=factory,
        **{"train_dataset": data(), **given},
        callbacks=[] if stop is None else [StopAt(stop)],
        distributed_env=DistributedEnvironment(timeout_seconds=120, start_timeout_seconds=120),
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ForgatherError as error:
        return error.code, str(error)
    states = [value for state in trainer.strategy.optimizer.state.values() for value in state.values()]
    # The table of values that comes third is the same for all weights.
    size = sum(part.nbytes for value in states if value.ndim for part in plain_parts(value)[:2])
    return weights(dict(trainer.strategy.export())), size


def distance(one, other, start):
    """The distance of two updates, relative to the update."""
    gap = sum(((one[name].double() - other[name].double()) ** 2).sum() for name in start)
    return (gap / sum(((other[name].double() - start[name].double()) ** 2).sum() for name in start)).sqrt().item()


def figures(optim):
    start = weights(model().state_dict())
    plain = plain_loop(KINDS[optim])
    with tempfile.TemporaryDirectory() as place:
        folders = {layout: Path(place) / layout for layout in ("one process", "DDP", "FSDP2")}
        found, alone = {}, None
        for layout, folder in folders.items():
            own, size = run(folder, layout, optim=optim)
            alone = own if alone is None else alone
            name = "one process, from a plain loop" if layout == "one process" else f"{layout}, from one process"
            found[name] = distance(own, plain if layout == "one process" else alone, start)
            found[f"{layout}, bytes of state"] = size
            for other in folders:
                again, _ = run(Path(place) / "again", other, optim=optim, resume=str(folder / "checkpoint-2"))
                found[f"{other}, resumed from {layout}"] = distance(again, own if other == layout else alone, start)
        on = {"optim": optim, "optimizer_in_backward": True}
        found["one process, updated in the backward pass"] = distance(
            run(Path(place) / "b", "one process", **on)[0], alone, start
        )
        found["FSDP2, updated in the backward pass"] = distance(run(Path(place) / "f", "FSDP2", **on)[0], alone, start)
    return found


def of_factories():
    """A class of torchao that a config names itself: the plain loop, two processes, and a resumed run."""
    found, start = {}, weights(model().state_dict())
    for name in FACTORIES:
        kind = getattr(torchao_optim, name)
        net = model()
        plain = steps_of(net, [kind(net.parameters(), lr=RATE)])
        factory = functools.partial(kind, lr=RATE)
        more = {"factory": factory, "weight_decay": kind([torch.zeros(1)]).defaults["weight_decay"]}
        with tempfile.TemporaryDirectory() as place:
            own, _ = run(Path(place) / "a", "FSDP2", **more)
            again, _ = run(Path(place) / "b", "FSDP2", resume=str(Path(place) / "a" / "checkpoint-2"), **more)
            one, _ = run(Path(place) / "c", "one process", **more)
        found[name] = {
            "one process, from a plain loop": distance(one, plain, start),
            "FSDP2, resumed": distance(again, own, start),
            "FSDP2, from one process": distance(own, one, start),
        }
    return found


PAIRS = [
    {"prompt_ids": [3 + n, 9, 4], "chosen_ids": [7, 12 + n, 5, 2], "rejected_ids": [8 + n, 2]} for n in range(4 * STEPS)
]
BETA = 0.3


def log_probability(net, row, answer):
    ids = torch.tensor([row["prompt_ids"] + row[answer]])
    found = torch.log_softmax(net(input_ids=ids).logits[0, :-1], -1)
    return found.gather(1, ids[0, 1:, None])[len(row["prompt_ids"]) - 1 :].sum()


def preference_loss(net, batch):
    """The loss of DPO, row by row; the model without its adapter, or as it was at first, is the reference."""
    losses = []
    for row in batch:
        ratios = []
        for answer in ("chosen_ids", "rejected_ids"):
            with torch.no_grad(), net.disable_adapter() if hasattr(net, "disable_adapter") else nullcontext():
                reference = log_probability(REFERENCE.get("model", net), row, answer)
            ratios.append(log_probability(net, row, answer) - reference)
        losses.append(-torch.nn.functional.logsigmoid(BETA * (ratios[0] - ratios[1])))
    return torch.stack(losses).mean()


REFERENCE = {}


def of_adapters_and_preferences():
    """Adapters and losses of preferences: matrices in rows of whole blocks are quantized, others are not."""
    found = {}
    for optim in KINDS:
        for rank, loss in ((16, "tokens"), (4, "tokens"), (16, "preferences"), (None, "preferences")):
            net = model()
            REFERENCE.clear()
            if rank is None:
                REFERENCE["model"] = model()
            else:
                net = lora(r=rank, alpha=2 * rank).apply(net, seed=42)
            named = [(name, one) for name, one in net.named_parameters() if one.requires_grad]
            start = weights(dict(named))
            is_low = {name: one.ndim == 2 and one.numel() >= 4096 and one.shape[1] % 256 == 0 for name, one in named}
            optimizers = [
                kind([one for name, one in named if is_low[name] is low], lr=RATE, weight_decay=0.0, **settings)
                for low, kind, settings in (
                    (True, getattr(torchao_optim, KINDS[optim]), {"block_size": 256}),
                    (False, torchao_optim._AdamW, {}),
                )
                if low in is_low.values()
            ]
            of_pairs = loss == "preferences"
            plain = steps_of(net, optimizers, preference_loss if of_pairs else None, PAIRS if of_pairs else None)
            given = {"adapter": None if rank is None else lora(r=rank, alpha=2 * rank)}
            if of_pairs:
                given |= {"train_dataset": PAIRS, "data_collator": PreferenceCollator(), "loss_fn": DPOLoss(beta=BETA)}
            for layout in ("one process", "DDP", "FSDP2"):
                with tempfile.TemporaryDirectory() as place:
                    own, _ = run(Path(place), layout, optim=optim, weight_decay=0.0, given=given)
                names = {name: next(other for other in own if name.endswith(other)) for name in start}
                own = {name: own[names[name]] for name in start}
                case = f"{optim}, {loss}, {'all weights' if rank is None else f'LoRA of rank {rank}'}, {layout}"
                found[case] = distance(own, plain, start)
                print(case, found[case], {low: list(is_low.values()).count(low) for low in (True, False)}, flush=True)
    return found


def of_rounding():
    """How much of an update that bfloat16 cannot hold is kept: 1 is all of it; and what is refused."""
    found = {}
    for is_on in (False, True):
        weight = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        optimizer = adopted(torchao_optim.AdamW8bit([weight], lr=1e-4, weight_decay=0.0, bf16_stochastic_round=is_on))
        torch.manual_seed(0)
        for _ in range(100):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found[f"kept, {'at random' if is_on else 'to nearest'}"] = (1 - weight.double().mean().item()) / 1e-2
    more = {"dtype": torch.bfloat16, "bf16_stochastic_round": True}
    with tempfile.TemporaryDirectory() as place:
        for optim in ("adamw_torch", "adamw_torch_8bit"):
            for layout in ("one process", "FSDP2"):
                folder = Path(place) / f"{optim} {layout}"
                own, _ = run(folder, layout, optim=optim, **more)
                again, _ = run(Path(place) / "x", layout, optim=optim, resume=str(folder / "checkpoint-2"), **more)
                start = weights(model(torch.bfloat16).state_dict())
                found[f"{optim}, {layout}, resumed"] = distance(again, own, start)
        found["DDP"] = run(Path(place) / "ddp", "DDP", optim="adamw_torch", **more)[0]
        found["float32"] = run(Path(place) / "f32", "one process", optim="adamw_torch", bf16_stochastic_round=True)[0]
    return found


def of_flag():
    """Whether a flag on the device leaves out a step, without a read of the host."""
    weight = torch.nn.Parameter(torch.randn(64, 256))
    optimizer = adopted(torchao_optim.AdamW8bit([weight], lr=RATE))
    step = OptimizerStep(optimizer)
    weight.grad, optimizer.found_inf = torch.randn_like(weight), torch.zeros(())
    step()
    before = [weight.detach().clone(), *(part.clone() for part in plain_parts(optimizer.state[weight]["exp_avg"]))]
    optimizer.found_inf = torch.ones(())
    with reads_forbidden():
        step()
    after = [weight.detach(), *plain_parts(optimizer.state[weight]["exp_avg"])]
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


PARTS = {
    "figures": lambda: {optim: figures(optim) for optim in KINDS},
    "factories": of_factories,
    "adapters and preferences": of_adapters_and_preferences,
    "rounding": of_rounding,
    "left out by a flag": of_flag,
    "trained values": lambda: sum(parameter.numel() for parameter in model().parameters()),
}


def main():
    parts = sys.argv[1:] or list(PARTS)
    record = json.loads(RECORD.read_text()) if sys.argv[1:] else {}
    record["versions"] = {name: version(name) for name in ("torch", "torchao", "transformers")}
    record |= {part: PARTS[part]() for part in parts}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({part: record[part] for part in parts}, indent=1))


if __name__ == "__main__":
    main()
