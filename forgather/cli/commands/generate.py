"""`fgcli generate`: asks a trained model. Runs code of the project only if the saved files cannot build the model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cli.answer_output import write_piece
from forgather.cli.generation_options import (
    Speaker,
    add_model,
    add_sampling,
    chat_form,
    control_note,
    form_lines,
    load_speaker,
    print_notes,
    refuse_encoder,
    sampling_line,
    sampling_of,
    source_form,
)
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name, add_json
from forgather.cli.output import write_json, write_text

EXECUTES = True
REST_INTO = ("prompts",)
DESCRIPTION = """Ask a model that a run has saved: a checkpoint, the model of the run's end, an adapter, or any folder
in the layout of Hugging Face. A prompt is a message of the user if the tokenizer has a chat template, and is rendered
as in training; otherwise the model continues the text. A model with an encoder, such as T5, reads the prompt as a
source, with the prefix of its training. The most likely token is taken unless a temperature is given."""
EXAMPLES = """examples:
  fgcli generate output_models/chat "What comes after five?"
  fgcli generate output_models/chat --checkpoint best --temperature 0.7 --seed 1 "Tell a story."
  fgcli generate output_models/tiny_llama --raw "def main():"   the text is continued, without a chat template
  fgcli generate output_models/summary --prompts texts.jsonl     a T5: rows with "source", or "prompt"
  fgcli generate output_models/chat/checkpoint-500 --prompts questions.jsonl --json
  git diff | fgcli generate exported_model --system "Summarise." -"""
_FINISHES = {
    "length": "the answer was cut after --max-new-tokens",
    "context": "the answer was cut at the last position of the model",
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_model(parser)
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="a text to answer; - reads the standard input")
    parser.add_argument(
        "--prompts",
        dest="prompts_file",
        metavar="FILE",
        type=a_name,
        help='a file with one prompt per line; .jsonl: {"prompt": ...} or conversations; - reads the standard input',
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="a prompt is a message of the user (default, if possible)")
    form.add_argument("--raw", action="store_true", help="the model continues the prompt as it is")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: that of the training data)")
    add_sampling(parser)
    add_json(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the answer to each prompt, and returns the exit status."""
    options = invocation.options
    # Wrong settings and prompts are reported before the model is loaded, which may take minutes.
    sampling = sampling_of(options)
    questions = _questions(options)
    speaker = load_speaker(options)
    form = _form(speaker, options)
    prompts = [form.ids(question) for question in questions]
    for ids in prompts:
        speaker.generator.settings(len(ids), sampling)
    if not options.json:
        print_notes([*speaker.described(), *form_lines(form, speaker), sampling_line(sampling)])
    longest = speaker.conversations.max_source_length
    for question, ids in zip(questions, prompts, strict=True):
        control_note(form, question)
        if form.form == "source" and longest is not None and len(ids) > longest:
            print_notes([f"note: the source has {len(ids)} tokens, and those of the training were cut to {longest}"])
    answers: list[Any] = []
    for question, ids in zip(questions, prompts, strict=True):
        if not options.json and len(questions) > 1:
            write_text(f"{chr(10) if answers else ''}> {question.shown}")
        answers.append(speaker.generator.answer(ids, sampling, write=None if options.json else write_piece))
        if not options.json:
            write_piece("\n")
            print_notes([_FINISHES[answers[-1].finish]] if answers[-1].finish in _FINISHES else [])
    if options.json:
        write_json(_facts(speaker, form, sampling, list(zip(questions, prompts, answers, strict=True))))
    return 0


def _questions(options: argparse.Namespace) -> Sequence[Any]:
    prompts = import_module("forgather.ml.generation.prompt")
    found = [prompts.Question(text=_read_input() if text == "-" else text) for text in options.prompts]
    if options.prompts_file == "-":
        found += prompts.questions_of(_read_input().splitlines(), "the standard input", is_json=False)
    elif options.prompts_file is not None:
        found += prompts.read_questions(Path(options.prompts_file))
    if not found:
        raise prompts.PromptError("there is no prompt", hint="give a text, --prompts FILE, or - for the standard input")
    for question in found:
        question.refuse_empty()
    return found


def _read_input() -> str:
    try:
        return (sys.stdin.read() if sys.stdin is not None else "").removesuffix("\n")
    except UnicodeDecodeError:
        raise import_module("forgather.ml.generation.prompt").PromptError(
            "the standard input is not text in UTF-8", hint="convert it first"
        ) from None


def _form(speaker: Speaker, options: argparse.Namespace) -> Any:
    if speaker.generator.has_encoder:
        if options.chat or options.raw:
            refuse_encoder(speaker, f"generate --{'chat' if options.chat else 'raw'}")
        return source_form(speaker, options.system)
    if options.chat or (not options.raw and (speaker.has_chat_template or options.system)):
        return chat_form(speaker, options.system)
    prompts = import_module("forgather.ml.generation.prompt")
    return prompts.PromptForm(tokenizer=speaker.loaded.tokenizer, form=prompts.RAW, system=options.system)


def _facts(speaker: Speaker, form: Any, sampling: Any, answered: Sequence[tuple[Any, Any, Any]]) -> dict[str, Any]:
    trained, base = speaker.trained, speaker.loaded.base
    return {
        "run": trained.run.folder if trained.run is not None else None,
        "model": trained.folder,
        "step": trained.step,
        "adapter": None
        if base is None
        else {
            "base": base.name,
            "digest": base.digest,
            "verified": speaker.loaded.is_base_verified,
            "merged": speaker.is_merged,
        },
        "form": form.form,
        "system": form.system,
        "sampling": {
            "greedy": sampling.is_greedy,
            "temperature": sampling.as_settings()["temperature"],
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": None if sampling.is_greedy else sampling.seed,
            "max_new_tokens": sampling.max_new_tokens,
        },
        "answers": [_answer(question, ids, answer) for question, ids, answer in answered],
    }


def _answer(question: Any, prompt_ids: Sequence[int], answer: Any) -> dict[str, Any]:
    return {
        **({"messages": list(question.messages)} if question.messages else {"prompt": question.text}),
        **({"expected": question.expected} if question.expected is not None else {}),
        "answer": answer.text,
        "finish": answer.finish,
        "prompt_ids": list(prompt_ids),
        "ids": list(answer.ids),
    }
