"""Conversations, and what each chat format makes of them, written down by hand: pieces of text, and whether they are trained.

Nothing here uses a template: `PIECES` is the oracle for the packaged ones. `scripts/oracles/chat_templates.py` renders the
same conversations with the originals.
"""

import copy
import functools
import json
import os

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
MARKS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)


def said(role, content):
    return {"role": role, "content": content}


def dialogue(*texts, system=None):
    turns = [said(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]
    return [said("system", system), *turns] if system else turns


SUM_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}},
    },
}


def call(a, b, number):
    return {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}, "id": f"callsum{number:02}"}


CALLS = [
    said("user", "What is 2 + 3?"),
    {"role": "assistant", "tool_calls": [call(2, 3, 1)]},
    {"role": "tool", "content": "5", "tool_call_id": "callsum01"},
    said("assistant", "It is 5."),
    said("user", "And 1 + 1, 4 + 4?"),
    {"role": "assistant", "tool_calls": [call(1, 1, 2), call(4, 4, 3)]},
    {"role": "tool", "content": "2", "tool_call_id": "callsum02"},
    {"role": "tool", "content": "8", "tool_call_id": "callsum03"},
    said("assistant", "They are 2 and 8."),
]
# name -> (messages, tools)
CONVERSATIONS = {
    "one turn": (dialogue("Hi there", "Hello!", system="Be kind."), None),
    "many turns": (dialogue("One?", "Two.", "Three?", "Four,\n\nfive.", "Six?", "Seven — é.", system="Count."), None),
    "tools": ([said("system", "Be exact."), *CALLS], [SUM_TOOL]),
    "no system": (dialogue("First", "Second", "Third", "Fourth"), None),
    "identical turns": (dialogue("again", "again", "again", "again", "again", "again"), None),
    "a role's name": (dialogue("assistant", "user", "system", "assistant", system="user"), None),
    "open": (dialogue("Is this open?", "Yes.", "And now?"), None),
    "blanks": (dialogue("  around ", "  blanks  ", "x", "\n\ny\n", system=" s "), None),
    "thoughts": (
        dialogue("Why?", "<think>\nBecause.\n</think>\n\nSo.", "How?", "<think>\nLike this.\n</think>\n\nThus."),
        None,
    ),
    "tools, no system": (CALLS, [SUM_TOOL]),
}
SIX = ("one turn", "many turns", "tools", "no system", "identical turns", "a role's name")
WITH_TOOLS = ("mistral", "qwen2.5", "qwen3")


def chatml(messages, tools):
    for message in messages:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def llama3(messages, tools):
    yield BOS, False
    for message in messages:
        yield f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False
        yield f"{message['content'].strip()}<|eot_id|>", message["role"] == "assistant"


def phi3(messages, tools):
    for message in messages:
        yield f"<|{message['role']}|>\n", False
        yield f"{message['content']}<|end|>", message["role"] == "assistant"
        yield "\n", False
    yield EOS, False


def gemma3(messages, tools):
    yield BOS, False
    system = [message["content"] for message in messages if message["role"] == "system"]
    turns = [message for message in messages if message["role"] != "system"]
    for number, message in enumerate(turns):
        is_answer = message["role"] == "assistant"
        yield f"<start_of_turn>{'model' if is_answer else 'user'}\n", False
        if system and not number:
            yield f"{system[0]}\n\n", False
        yield f"{message['content'].strip()}<end_of_turn>", is_answer
        yield "\n", False


def alpaca(messages, tools):
    yield BOS, False
    headings = {"system": "", "user": "### Instruction:\n", "assistant": "### Response:\n"}
    for number, message in enumerate(messages):
        yield ("\n\n" if number else "") + headings[message["role"]], False
        is_answer = message["role"] == "assistant"
        yield message["content"] + (EOS if is_answer else ""), is_answer


QWEN_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function "
    f"signatures within <tools></tools> XML tags:\n<tools>\n{json.dumps(SUM_TOOL)}\n</tools>\n\nFor each function call, "
    "return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def qwen_turns(messages, thought_of=lambda number: ""):
    for number, message in enumerate(messages):
        role, content = message["role"], message.get("content", "")
        if role == "tool":
            if messages[number - 1]["role"] != "tool":
                yield "<|im_start|>user", False
            yield f"\n<tool_response>\n{content}\n</tool_response>", False
            if messages[number + 1]["role"] != "tool":
                yield "<|im_end|>\n", False
            continue
        calls = [
            f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(one["function"]["arguments"])}}}\n</tool_call>'
            for one in message.get("tool_calls", [])
        ]
        yield f"<|im_start|>{role}\n", False
        yield thought_of(number) + "\n".join([content] * bool(content) + calls) + "<|im_end|>", role == "assistant"
        yield "\n", False


def qwen25(messages, tools):
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    yield "<|im_start|>system\n", False
    yield system + ("\n\n" + QWEN_TOOLS if tools else "") + "<|im_end|>\n", False
    yield from qwen_turns(messages)


def qwen3(messages, tools):
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"], messages[1:]
    parts = [part for part in (system, QWEN_TOOLS if tools else "") if part]
    if parts:
        yield "<|im_start|>system\n" + "\n\n".join(parts) + "<|im_end|>\n", False
    last = len(messages) - 1
    yield from qwen_turns(messages, lambda number: "<think>\n\n</think>\n\n" if number == last else "")


def mistral(messages, tools):
    yield BOS, False
    system = ""
    if messages[0]["role"] == "system":
        system, messages = messages[0]["content"] + "\n\n", messages[1:]
    last = max(number for number, message in enumerate(messages) if message["role"] == "user")
    for number, message in enumerate(messages):
        if message["role"] == "user":
            if tools and number == last:
                yield f"[AVAILABLE_TOOLS] [{json.dumps(SUM_TOOL)}][/AVAILABLE_TOOLS]", False
            yield f"[INST] {system if number == last else ''}{message['content']}[/INST]", False
        elif message["role"] == "tool":
            result = f'{{"content": {message["content"]}, "call_id": "{message["tool_call_id"]}"}}'
            yield f"[TOOL_RESULTS] {result}[/TOOL_RESULTS]", False
        elif message.get("tool_calls"):
            calls = [{**one["function"], "id": one["id"]} for one in message["tool_calls"]]
            yield f"[TOOL_CALLS] {json.dumps(calls)}{EOS}", True
        else:
            yield f" {message['content'].rstrip(' ')}{EOS}", True


PIECES = {
    "alpaca": alpaca,
    "chatml": chatml,
    "gemma3": gemma3,
    "llama3": llama3,
    "mistral": mistral,
    "phi3": phi3,
    "qwen2.5": qwen25,
    "qwen3": qwen3,
}
CELLS = [(name, case) for name in PIECES for case in SIX if case != "tools" or name in WITH_TOOLS]

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def byte_pairs(template=None, pattern=LLAMA_3):
    """A byte-level BPE with some merges and the marks of all formats, each an id of its own.

    `pattern` divides a text into words; None is the pattern of GPT-2, with which line ends depend on what follows them.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from forgather.ml.data import set_chat_template

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork after it was used
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, backend.pre_tokenizer])
    backend.decoder = decoders.ByteLevel()
    specials = [BOS, EOS, PAD, *MARKS]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["\n\n\n\n a b again again Hello Hello user assistant system"] * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    return made if template is None else set_chat_template(made, template)


def begin_adding():
    """A tokenizer of `byte_pairs` that begins every text with the begin-of-text token, as those of Llama 3 do."""
    from tokenizers.processors import TemplateProcessing

    made = copy.deepcopy(byte_pairs())
    made._tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, made.bos_token_id)])
    return made


@functools.cache
def sentence_pieces(template=None):
    """A tokenizer that puts a blank before each text and falls back to bytes, as those of Llama 2 and Mistral do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AddedToken, PreTrainedTokenizerFast

    from forgather.ml.data import set_chat_template

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    letters = [*map(chr, range(33, 127)), "▁", "é", "—", "\n"]
    pieces = ["<unk>", BOS, EOS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁a", "He", "Hel"]
    merges = [("▁", "a"), ("H", "e"), ("He", "l")]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # As in Phi-3, whose marks take the line end after them.
    backend.add_special_tokens([AddedToken(mark, rstrip="|" in mark, normalized=False, special=True) for mark in MARKS])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, unk_token="<unk>")
    return made if template is None else set_chat_template(made, template)
