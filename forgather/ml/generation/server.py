"""The server: one model behind the chat and completions endpoints of OpenAI, with the server of transformers.

Takes a `Generator` and settings; gives the FastAPI application of `transformers serve`, which this module restricts to
one model under a short name. Requests need a key, other models are refused, and a request that would be answered with
other settings than it names is refused, too. Prompts are rendered and tokens are chosen as by `fgcli generate`: without
a temperature, the most likely token is taken.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse
from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.completion import CompletionHandler
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.server import build_server
from transformers.cli.serving.utils import GenerationState, Modality

from forgather.errors import ForgatherError
from forgather.ml.generation.generator import Generator, Sampling
from forgather.ml.generation.prompt import PromptError, chat_ids, raw_ids, require_chat_template
from forgather.ml.train_mode import sampling_mode

_ENDPOINTS = {
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/load_model"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
}
_OPEN = {("GET", "/health")}
# Fields of OpenAI that transformers' server accepts and does not follow, with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None,),
    "functions": (None,),
    "generation_config": (None,),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "auto", "none"),
    "top_logprobs": (None, 0),
    "web_search_options": (None,),
}
_SEED = "forgather_seed"
_num_prompt: ContextVar[int] = ContextVar("num_prompt")


@dataclass(frozen=True, kw_only=True)
class Served:
    """What is served.

    Args:
        generator: the model and its tokenizer.
        name: the name of the model in requests.
        key: the key that requests have to give.
        max_new_tokens: the longest answer, if a request names no other number.
        system: the system message of conversations that have none; None for no such message.
        options: further variables of the chat template.
    """

    generator: Generator
    name: str
    key: str
    max_new_tokens: int
    system: str | None = None
    options: Mapping[str, Any]


def make_app(served: Served) -> Any:
    """Returns the FastAPI application that serves a model.

    Args:
        served: what is served.
    """
    manager, state = _OneModel(served), GenerationState(continuous_batching=False)
    chat = _Chat(served, manager, state)
    none: Any = None
    app: Any = build_server(
        manager,
        chat,
        completion_handler=_Completion(served, manager, state),
        # The endpoints of these handlers are refused before they are called.
        response_handler=none,
        transcription_handler=none,
        systemone_handler=none,
        generation_state=state,
    )

    @app.middleware("http")  # type: ignore[untyped-decorator]
    async def guard(request: Request, call_next: Callable[[Request], Any]) -> Any:
        return _refusal(request, served) or await call_next(request)

    @app.exception_handler(HTTPException)  # type: ignore[untyped-decorator]
    async def tell(_: Request, error: HTTPException) -> JSONResponse:
        return _told(error.status_code, str(error.detail))

    return app


def _told(status: int, message: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "code": None, "param": None}}, status_code=status)


def _refusal(request: Request, served: Served) -> JSONResponse | None:
    """Returns the answer to a request that is not allowed; None if it is allowed."""
    place = (request.method, request.url.path)
    if place not in _OPEN:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        if not hmac.compare_digest(given.encode(), served.key.encode()):
            return _told(401, "the key is missing or wrong: send the header 'Authorization: Bearer KEY'")
    if place not in _ENDPOINTS:
        known = ", ".join(f"{method} {path}" for method, path in sorted(_ENDPOINTS))
        return _told(404, f"{' '.join(place)} is not served; there are: {known}")
    return None


class _Seeded:
    """The model of a request. It draws from the seed of the request in the thread that generates."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, **inputs: Any) -> Any:
        """Generates with the seed in the generation settings; requests are answered one after another."""
        with sampling_mode(self._model, getattr(inputs["generation_config"], _SEED)):
            return self._model.generate(**inputs)


class _OneModel(ModelManager):
    """Holds one model, which is never unloaded, and refuses all others."""

    def __init__(self, served: Served) -> None:
        super().__init__(device=str(served.generator.model.device))
        self.force_model = served.name
        self._served = served
        self._made = int(time.time())

    def process_model_name(self, model_id: str) -> str:  # type: ignore[override]
        """Returns the name of the model, and refuses any other name."""
        if model_id != self._served.name:
            raise HTTPException(400, f"the model {model_id!r} is not served; use {self._served.name!r}")
        return model_id

    def load_model_and_processor(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Returns the model and the tokenizer."""
        return _Seeded(self._served.generator.model), self._served.generator.tokenizer

    def load_model_streaming(self, model_id_and_revision: str, gguf_file: str | None = None) -> Any:
        """Returns the event that the model is loaded, and refuses another file."""
        # Before the answer begins: a refusal needs its status.
        if gguf_file is not None:
            raise HTTPException(400, f"the file {gguf_file!r} is not served; use {self._served.name!r}")
        event = {"status": "ready", "model": self._served.name, "cached": True}
        return iter([f"data: {json.dumps(event)}\n\n"])

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:  # type: ignore[override]
        """Returns the one model."""
        return [{"id": self._served.name, "object": "model", "created": self._made, "owned_by": "forgather"}]

    def shutdown(self) -> None:
        """Keeps the model: a request must not unload it."""


class _Requests:
    """What both handlers have in common: the settings of a request, and its refusals."""

    served: Served

    def _build_generation_config(self, body: dict[str, Any], *_: Any, **__: Any) -> Any:
        seed = body.get("seed")
        given = (body.get("max_completion_tokens"), body.get("max_tokens"), self.served.max_new_tokens)
        count = next(one for one in given if one is not None)
        sampling = Sampling(
            # OpenAI's temperature 0 with a top_p is the most likely token, too.
            temperature=body.get("temperature"),
            top_p=body.get("top_p") if body.get("temperature") != 0 else None,
            seed=secrets.randbelow(2**31) if seed is None else int(seed),
            max_new_tokens=int(count),
        )
        settings = self.served.generator.settings(_num_prompt.get(), sampling)
        setattr(settings, _SEED, sampling.seed)
        if body.get("stop") is not None:
            settings.stop_strings = body["stop"]
        return settings

    def _refuse_ignored(self, body: Mapping[str, Any]) -> None:
        for name, neutral in _NEUTRAL.items():
            if name in body and body[name] not in neutral:
                raise PromptError(f"{name}: {body[name]!r:.60} is not supported", code="FG920", hint="leave it out")


class _Chat(_Requests, ChatCompletionHandler):
    """`/v1/chat/completions`."""

    def __init__(self, served: Served, manager: _OneModel, state: GenerationState) -> None:
        super().__init__(manager, state, dict(served.options))
        self.served = served

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answers a request, or refuses it with the reason."""
        with _refusals():
            self._refuse_ignored(body)
            tokenizer = self.served.generator.tokenizer
            require_chat_template(tokenizer)
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise PromptError("there are no messages", hint="send a list of messages")
            if self.served.system is not None and messages[0].get("role") != "system":
                body = {**body, "messages": [{"role": "system", "content": self.served.system}, *messages]}
            plain = self.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
            options = {**self.chat_template_kwargs, **(body.get("chat_template_kwargs") or {})}
            _num_prompt.set(len(chat_ids(tokenizer, plain, body.get("tools"), **options)))
            return await super().handle_request(body, request_id)


class _Completion(_Requests, CompletionHandler):
    """`/v1/completions`."""

    def __init__(self, served: Served, manager: _OneModel, state: GenerationState) -> None:
        super().__init__(manager, state)
        self.served = served

    async def handle_request(self, body: dict[str, Any], request_id: str) -> Any:
        """Answers a request, or refuses it with the reason."""
        with _refusals():
            self._refuse_ignored(body)
            prompt = body.get("prompt")
            if not isinstance(prompt, str) or not prompt.strip():
                raise PromptError("the prompt is empty, or is not one text", hint="send one text")
            tokenizer = self.served.generator.tokenizer
            ids = raw_ids(tokenizer, prompt)
            if ids != tokenizer(prompt)["input_ids"]:
                raise PromptError(
                    "the tokenizer begins or ends each text with a token that this prompt must not have twice",
                    hint="leave the begin-of-text token out of the prompt, or use 'fgcli generate --raw'",
                )
            _num_prompt.set(len(ids))
            return await super().handle_request(body, request_id)


@contextmanager
def _refusals() -> Iterator[None]:
    """Context manager that turns errors about a request into answers with the status 400."""
    try:
        yield
    except ForgatherError as error:
        raise HTTPException(400, str(error)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise HTTPException(400, f"the request is not well formed: {error}") from error
