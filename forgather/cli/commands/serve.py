"""`fgcli serve`: serves a trained model over HTTP, with the server of transformers."""

from __future__ import annotations

import argparse
import ipaddress
import os
import secrets
import socket
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from forgather.cli.generation_options import (
    Speaker,
    add_longest,
    add_model,
    load_speaker,
    print_notes,
    refuse_encoder,
)
from forgather.cli.invocation import Invocation
from forgather.cli.options import a_name
from forgather.errors import ProjectError

EXECUTES = True
KEY = "FORGATHER_API_KEY"
DESCRIPTION = """Serve a model that a run has saved to clients of OpenAI's interface: POST /v1/chat/completions and
/v1/completions. Prompts are rendered and tokens are chosen as by 'fgcli generate': without a temperature in a request,
the most likely token is taken. Requests need a key. Needs the extra 'serve': pip install 'forgather[serve]'."""
EXAMPLES = """examples:
  fgcli serve output_models/chat                            on this machine only, with a key that is printed
  FORGATHER_API_KEY=... fgcli serve output_models/chat --checkpoint best --port 9000 --name assistant
  curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer KEY" -H "Content-Type: application/json" \\
    -d '{"model": "chat", "messages": [{"role": "user", "content": "What comes after five?"}]}'"""
_NEEDED = ("fastapi", "uvicorn", "openai", "pydantic")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    add_model(parser)
    parser.add_argument(
        "--name", metavar="NAME", type=a_name, help="model name in requests (default: the folder's name)"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="port (default: 8000; 0: any free one)")
    parser.add_argument(
        "--api-key", metavar="KEY", type=a_name, help=f"the key of requests (default: ${KEY}, or a random one)"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message (default: that of the training data)")
    add_longest(parser, 1024)


def run(invocation: Invocation) -> int:
    """Runs the command: serves until Ctrl-C, and returns the exit status."""
    options = invocation.options
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if lacking:
        raise ProjectError(
            f"'fgcli serve' needs {', '.join(lacking)}, not installed",
            code="FG927",
            hint="pip install 'forgather[serve]'",
        )
    given = options.api_key or os.environ.get(KEY)
    if not given and not _is_loopback(options.host):
        raise ProjectError(
            f"{options.host} can be reached from other machines, and no key is given",
            code="FG927",
            hint=f"give --api-key or ${KEY}, or leave --host out",
        )
    # Every request that names no length would be refused.
    import_module("forgather.ml.generation.generator").Sampling(max_new_tokens=options.max_new_tokens)
    with _bound(options.host, options.port) as place:
        speaker = load_speaker(options)
        refuse_encoder(speaker, "serve")
        key = given or secrets.token_urlsafe(24)
        app, name = _app(speaker, options, key), options.name or speaker.trained.name
        host, port = place.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print_notes(
            [
                *speaker.described(),
                f"serving     {name!r} at http://{shown}:{port}/v1",
                f"key         {key if not given else 'as given'}",
                *([] if speaker.has_chat_template else ["note: without a chat template, only /v1/completions answers"]),
            ]
        )
        uvicorn: Any = import_module("uvicorn")
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[place])
    return 0


def _app(speaker: Speaker, options: argparse.Namespace, key: str) -> Any:
    try:
        server = import_module("forgather.ml.generation.server")
        system = speaker.conversations.system if options.system is None else options.system or None
        return server.make_app(
            server.Served(
                generator=speaker.generator,
                name=options.name or speaker.trained.name,
                key=key,
                max_new_tokens=options.max_new_tokens,
                system=system,
                options=speaker.conversations.options,
            )
        )
    except (ImportError, TypeError, AttributeError) as error:
        # The parts of transformers' server are not its public interface, and may change with a release.
        raise ProjectError(
            f"the server of the installed transformers has another form: {error}",
            code="FG927",
            hint="install a release with which 'fgcli serve' was tested: pip install 'transformers[serving]==5.23.*'",
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    """Returns a socket at an address, so that a port in use is reported before the model is loaded."""
    try:
        # The C library takes the lower 16 bits of a number that is too large.
        if not 0 <= port < 2**16:
            raise ValueError("a port is a number from 0 to 65535")
        facts = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        place = socket.socket(*facts[:3])
        try:
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            place.bind(facts[4])
        except OSError:
            place.close()
            raise
    except (OSError, OverflowError, ValueError) as error:
        raise ProjectError(
            f"{host}:{port} cannot be served: {getattr(error, 'strerror', None) or error}",
            code="FG927",
            hint="give another --port, or 0 for any free one",
        ) from None
    return place


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
