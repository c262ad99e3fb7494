"""`fgcli data prepare` and `fgcli data verify`: shards of tokens that are written from the texts of a config."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import construction_variables
from forgather.cli.output import print_findings, write_json, write_text
from forgather.cli.trusting import ask_trust
from forgather.config.graph import Call, Node, Scalar
from forgather.errors import ForgatherError, ProjectError
from forgather.project.data_targets import ChosenSet, DataTargets, with_targets
from forgather.project.trainer_arguments import keyword

_TOKENIZE = ("forgather.ml.data:tokenize", "forgather.ml.data.packing:tokenize")
_ARGUMENTS = ("dataset", "tokenizer", "block_size", "text_column")
_OF_PREPARE = {"num_proc": "--num-proc", "num_shards": "--num-shards"}
_OF_SHOW = {"rows": "--rows", "all": "--all", "no_collator": "--no-collator", "html": "--html"}
_MOST_PROCESSES = 4096


def count(text: str) -> int:
    """Converts a command-line argument to a number from 1 on, as an argparse type."""
    if text.isascii() and text.isdecimal() and 0 < int(text) <= 10**6:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")


def refuse_options_of_others(options: argparse.Namespace) -> None:
    """Raises an error if an option is given that belongs to another action, or the folder is missing.

    Args:
        options: the options of `fgcli data`.

    Raises:
        ProjectError: FG588.
    """
    action = options.action
    others = {"show": _OF_PREPARE, "prepare": _OF_SHOW, "verify": {**_OF_SHOW, **_OF_PREPARE, "data_set": "--set"}}
    if given := [option for name, option in others[action].items() if getattr(options, name)]:
        raise ProjectError(
            f"{given[0]} is no option of 'fgcli data {action}'", code="FG588", hint="'fgcli data --help' describes both"
        )
    if action == "show" and options.folder:
        hint = f"a data set is named by '--set {options.folder}'"
        raise ProjectError(f"'fgcli data show' takes no folder {options.folder!r}", code="FG588", hint=hint)
    if action != "show" and not options.folder:
        hint = f"as in 'fgcli data {action} tokens/train'"
        raise ProjectError(f"'fgcli data {action}' needs the folder of the shards", code="FG588", hint=hint)


def prepare(invocation: Invocation) -> int:
    """Writes the tokens of a data set of a config as shards, and returns the exit status."""
    options = invocation.options
    project = invocation.open_project()
    project.refuse_errors()
    print_findings(project.diagnostics, project.meta.project_dir)
    found = DataTargets(project.graph)
    chosen = found.chosen(options.data_set or "train")
    arguments = _tokenized(chosen)
    nodes = {"the texts": arguments["dataset"], "the tokenizer": arguments["tokenizer"]}
    for name, node in nodes.items():
        found.refuse_model(node, name)
    column = arguments.get("text_column")
    project.graph, names = with_targets(project.graph, nodes)
    ask_trust(project, list(names.values()))
    built = project(list(names.values()), **construction_variables(invocation))
    dataset = built[names["the texts"]]
    if not hasattr(dataset, "select_columns") or isinstance(dataset, Mapping):
        what = "several data sets" if isinstance(dataset, Mapping) else "streamed"
        hint = "give one of its parts, as !call:getitem [*dataset, train]; or set streaming: false"
        raise ProjectError(f"the texts of {chosen.name} are {what}", code="FG588", span=chosen.span, hint=hint)
    writer = import_module("forgather.ml.data.shard_writer")
    try:
        done = writer.prepare_tokens(
            dataset,
            built[names["the tokenizer"]],
            options.folder,
            text_column=column.value if isinstance(column, Scalar) else "text",
            num_proc=min(options.num_proc or len(os.sched_getaffinity(0)), _MOST_PROCESSES),
            num_shards=options.num_shards,
        )
    except ForgatherError as error:
        error.span = error.span or (chosen.span if error.code in ("FG831", "FG837") else None)
        raise
    _report(done.manifest, options, written=done.written, seconds=round(done.seconds, 3), tokens=done.tokens)
    return 0


def verify(invocation: Invocation) -> int:
    """Compares every shard of a folder with its digest, and returns the exit status: 1 if one differs."""
    options = invocation.options
    manifests = import_module("forgather.ml.data.prepared_manifest")
    folder = Path(options.folder).expanduser()
    manifest = manifests.read_manifest(folder)
    damaged = [shard.file for shard in manifests.damaged_shards(folder, manifest)]
    if options.json:
        write_json({"folder": options.folder, **_facts(manifest), "damaged": damaged}, options.output)
    elif damaged:
        for shard in manifest.shards:
            if shard.file in damaged:
                write_text(f"{manifests.damaged(folder, shard)}\n", options.output)
    else:
        write_text(f"{_described(manifest)}: every byte is what was written\n", options.output)
    return 1 if damaged else 0


ACTIONS: Mapping[str, Callable[[Invocation], int]] = {"prepare": prepare, "verify": verify}


def _tokenized(chosen: ChosenSet) -> dict[str, Node]:
    """Returns the arguments of the call of `tokenize` that a data set is.

    Raises:
        ProjectError: FG588 if the data set is no such call.
    """
    node = chosen.node
    if not isinstance(node, Call) or node.constructor not in _TOKENIZE or chosen.keys:
        made = f"made by {node.constructor}" if isinstance(node, Call) else "no call"
        raise ProjectError(
            f"{chosen.name} is {made}, and 'fgcli data prepare' writes the tokens of packed texts",
            code="FG588",
            span=node.span,
            hint="name a data set that forgather.ml.data:tokenize makes: '--set NAME'",
        )
    given = dict(zip(_ARGUMENTS, node.args, strict=False))
    return given | {name: value for name in _ARGUMENTS if (value := keyword(node, name)) is not None}


def _facts(manifest: Any) -> dict[str, Any]:
    return {
        "documents": manifest.num_documents,
        "tokens": manifest.num_tokens,
        "bytes": manifest.num_bytes,
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "shards": len(manifest.shards),
    }


def _described(manifest: Any) -> str:
    documents, shards = manifest.num_documents, len(manifest.shards)
    return (
        f"{documents:,} document{'' if documents == 1 else 's'}, {manifest.num_tokens:,} tokens, "
        f"{manifest.num_bytes:,} bytes in {shards:,} shard{'' if shards == 1 else 's'}"
    )


def _report(manifest: Any, options: argparse.Namespace, *, written: int, seconds: float, tokens: int) -> None:
    rate = round(tokens / seconds) if seconds else 0
    if options.json:
        facts = {"folder": options.folder, **_facts(manifest), "written": written, "seconds": seconds}
        write_json({**facts, "tokens_per_second": rate}, options.output)
        return
    now = f"{written:,} written now, {rate:,} tokens/s" if written else "all of them were there"
    text = f"{options.folder}: {_described(manifest)} ({now})\n"
    use = f"read them with datasets/prepared.yaml, folder: {options.folder}\n"
    write_text(text + use, options.output)
