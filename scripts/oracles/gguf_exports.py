"""Exports small models as GGUF files, and records what transformers and llama.cpp compute with them for `make test`.

transformers reads each file with the package gguf; llama.cpp, as the package xllamacpp builds it, tokenizes texts and
generates greedily. Both are compared with the model that was exported. Run `make oracles`; it needs the package index.

Example:
    python scripts/oracles/gguf_exports.py        writes tests/ml/recorded/gguf_exports.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "tests" / "ml" / "recorded" / "gguf_exports.json"
PACKAGES = {"gguf": "0.19.0", "xllamacpp": "2026.10.11549"}
NEW_TOKENS = 12


def install(folder: Path) -> None:
    wanted = [f"{name}=={number}" for name, number in PACKAGES.items()]
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", "--no-deps", "-t", str(folder)]
    subprocess.run([*pip, *wanted], check=True)


class LlamaCpp:
    """A model in a GGUF file, as llama.cpp reads it."""

    def __init__(self, file: Path) -> None:
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_gpu_layers, settings.warmup = 128, 0, False
        settings.cpuparams.n_threads = 1
        self._server = xllamacpp.Server(settings)

    def _ask(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(  # noqa: S310 - the address is that of our own process
            self._server.listening_address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:  # noqa: S310
            return json.load(answer)

    def tokens(self, text: str) -> list[int]:
        return self._ask("/tokenize", {"content": text, "add_special": True})["tokens"]

    def greedy(self, ids: list[int]) -> list[int]:
        body = {"prompt": ids, "n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True, "cache_prompt": False}
        return self._ask("/completion", body)["tokens"]

    def chat(self, messages: list[dict[str, str]]) -> str:
        return self._ask("/apply-template", {"messages": messages})["prompt"]


def greedy(model: Any, ids: list[int]) -> list[int]:
    import torch

    made = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    return made[0, len(ids) :].tolist()


def figures(kind: str, pre: str, folder: Path) -> dict[str, Any]:
    from forgather.ml import gguf_export
    from forgather.ml.checkpoint.export_folder import export_draft
    from tests.ml import gguf_cases

    words = gguf_cases.tokenizer(pre, cache_dir=str(folder / "cache"))
    model = gguf_cases.model(kind, words)
    for part in (model, words):
        part.save_pretrained(folder / kind / "model")
    found: dict[str, Any] = {"pre": pre, "transformers": {}}
    for dtype in gguf_export.TYPES:
        with export_draft(folder / kind / dtype) as draft:
            measured = gguf_export.write_gguf(draft, folder / kind / "model", dtype=dtype, name=kind)
            draft.finish({})
        found["transformers"][dtype] = measured["figures"]
    reader = LlamaCpp(folder / kind / "float32" / gguf_export.FILE)
    prompts = [words(text)["input_ids"] for text in gguf_cases.TEXTS]
    question = [{"role": "user", "content": "What?"}]
    found["llama.cpp"] = {
        "texts": len(prompts),
        "equal_tokens": sum(reader.tokens(text) == ids for text, ids in zip(gguf_cases.TEXTS, prompts, strict=True)),
        "equal_greedy_ids": sum(reader.greedy(ids) == greedy(model, ids) for ids in prompts),
        "equal_chat_prompt": reader.chat(question)
        == words.apply_chat_template(question, add_generation_prompt=True, tokenize=False),
    }
    found["control"] = control(model, words, folder / kind)
    return found


def control(model: Any, words: Any, folder: Path) -> dict[str, int]:
    """Returns how many texts llama.cpp tokenizes in the same way with the name of another pre-tokenizer."""
    from forgather.ml import gguf_export
    from forgather.ml.gguf_layout import architecture_of
    from forgather.ml.gguf_tokenizer import gguf_tokenizer
    from tests.ml import gguf_cases

    entries = gguf_tokenizer(words, rows=gguf_cases.ROWS)
    other = replace(entries, pre="gpt-2" if entries.pre != "gpt-2" else "llama-bpe")
    architecture = architecture_of(model.config, type(model).__name__)
    gguf_export._write(folder / "control.gguf", model, architecture, other, dtype="float32", name="control")
    reader = LlamaCpp(folder / "control.gguf")
    equal = sum(reader.tokens(text) == words(text)["input_ids"] for text in gguf_cases.TEXTS)
    return {"equal_tokens_with_another_pre_tokenizer": equal}


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        install(Path(place) / "packages")
        sys.path[:0] = [str(ROOT), str(Path(place) / "packages")]
        os.environ["HF_HUB_OFFLINE"] = "1"
        import torch
        import transformers

        from tests.ml import gguf_cases

        torch.set_num_threads(1)
        shapes = {kind: figures(kind, pre, Path(place)) for kind, pre in gguf_cases.KINDS.items()}
        versions = {**PACKAGES, "torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}
    RECORD.write_text(json.dumps({"versions": versions, "shapes": shapes}, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RECORD.relative_to(ROOT)}: {len(shapes)} shapes")


if __name__ == "__main__":
    main()
