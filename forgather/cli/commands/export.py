"""`fgcli export`: writes what a past run has trained as a folder for other programs."""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import nullcontext, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_checkpoint, add_json
from forgather.cli.output import plural, print_note, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.launch.export import ExportKind, ExportPlan, export, plan_export
from forgather.launch.saved_weights import find_weights
from forgather.project.path_display import near_path

EXECUTES = True
DESCRIPTION = """Write the model that a past run has trained as a folder for other programs, in the layout of
transformers. No code of the project runs, unless the run trained an adapter (LoRA): it is merged into its base model,
or written alone for peft with --adapter. The base model is made as the run made it, the written folder is read back,
and its logits and greedily generated tokens are compared with those of the adapter. A folder appears only if they are
equal."""
EXAMPLES = """examples:
  fgcli export output_models/tiny_llama exported             the newest checkpoint of the newest run
  fgcli export output_models/tiny_llama/checkpoint-500 half --dtype bfloat16
  fgcli export RUN --checkpoint best --max-shard-size 2GB    into a folder next to the output folder
  fgcli export output_models/adapted merged                  of an adapter: base model and adapter in one
  fgcli export output_models/adapted adapter --adapter       for PeftModel.from_pretrained
  fgcli export output_models/adapted for_llama --gguf --dtype bfloat16"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("folder", metavar="RUN", help="a run, a checkpoint or an output folder", type=folder_name)
    parser.add_argument(
        "into",
        metavar="OUT",
        nargs="?",
        type=folder_name,
        help="the new folder, which must not exist yet, or be empty (default: next to the output folder of the run)",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--merge", action="store_true", help="merge the adapter into its base model (default)")
    kinds.add_argument("--adapter", action="store_true", help="write the adapter alone, for peft")
    kinds.add_argument(
        "--gguf", action="store_true", help="write a GGUF file, for llama.cpp; an adapter is merged first"
    )
    add_checkpoint(parser)
    add_weight_options(parser)
    add_json(parser)


def add_weight_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options about weight files, which `fgcli ckpt export` has, too."""
    parser.add_argument(
        "--max-shard-size", default="50GB", metavar="SIZE", help="maximum size of a file (default: 50GB)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="type of the weights")


def folder_name(text: str) -> str:
    """Converts a command-line argument to the name of a folder; an empty text is an error.

    An empty text, as from an unset shell variable, would otherwise mean the working folder.
    """
    if text:
        return text
    raise argparse.ArgumentTypeError("'' names no folder")


def run(invocation: Invocation) -> int:
    """Runs the command: exports the weights of a run, and returns the exit status."""
    options = invocation.options
    chosen = {ExportKind.MERGED: options.merge, ExportKind.ADAPTER: options.adapter, ExportKind.GGUF: options.gguf}
    kind = next((kind for kind, is_chosen in chosen.items() if is_chosen), None)
    weights = find_weights(options.folder, options.checkpoint)
    plan = plan_export(weights, kind, options.into)
    if plan.project is not None and plan.targets is not None:
        ask_trust(plan.project, list(dict.fromkeys(plan.targets.values())))
    if not options.json:
        for message in weights.skipped:
            print_note(f"skipped a checkpoint: {message}")
        print_note(f"run         {shlex.quote(near_path(weights.run.folder))}")
        what = "the model of the run's end" if weights.step is None else f"step {weights.step}, intact"
        print_note(f"checkpoint  {shlex.quote(near_path(weights.folder))}  ({what})")
        if kind is None and plan.kind is ExportKind.MERGED:
            print_note("adapter     merged into its base model; --adapter writes it alone")
    with redirect_stdout(sys.stderr) if options.json else nullcontext():
        found = export(plan, dtype=options.dtype, max_shard_size=options.max_shard_size)
    if not options.json:
        _print_proof(plan, found)
    print_export(Path(weights.folder), Path(plan.into), found, is_json=options.json)
    return 0


def _print_proof(plan: ExportPlan, found: dict[str, Any]) -> None:
    facts = found.get("facts")
    if facts is None:
        return
    if base := facts.get("base"):
        digest = f"  (digest {base['digest'][:12]})" if base["digest"] else ""
        name = shlex.quote(near_path(base["name"])) if base["name"] else "made by the config"
        print_note(f"base        {name}{digest}")
    print_note(f"compared    {found['comparison']}")
    written = facts["written"]
    if plan.kind is ExportKind.MERGED and written != facts["merge"]:
        print_note(f"as written  in {', '.join(facts['dtype'])}, logits differ by {written['logits_difference']:.1e}")


def print_export(source: Path, into: Path, found: dict[str, Any], *, is_json: bool) -> None:
    """Prints what was written.

    Args:
        source: the folder of the weights.
        into: the new folder.
        found: the result of an export.
        is_json: whether JSON is wanted.
    """
    files = found["files"]
    if is_json:
        facts = {name: value for name, value in found.items() if name == "facts"}
        write_json({"checkpoint": str(source), "into": str(into), **facts, "files": files})
        return
    size = import_module("forgather.ml.number_format").format_bytes(sum(fact["bytes"] for fact in files.values()))
    write_text(f"{near_path(str(into))}  {plural(len(files), 'file')}, {size}; their digests are in SHA256SUMS")
