"""Requests that no page of ours sends, each of which a server on this machine has to refuse."""

import socket

from tests.patience import patience


def _request(server, *, line=None, host=None, more="", token=None, body=""):
    token = server.token if token is None else token
    line = line or f"GET /{token}/changes?since=0 HTTP/1.1"
    host = f"127.0.0.1:{server.server_address[1]}" if host is None else host
    return f"{line}\r\nHost: {host}\r\n{more}\r\n{body}".encode("latin-1")


def _to(server, path, method="GET", version="HTTP/1.1"):
    return _request(server, line=f"{method} /{server.token}/{path} {version}")


HOSTILE = {
    "no token": lambda server: _request(server, line="GET / HTTP/1.1"),
    "wrong token": lambda server: _request(server, token="x" * len(server.token)),
    "token but for its last letter": lambda server: _request(server, token=server.token[:-1]),
    "token and one more letter": lambda server: _request(server, token=server.token + "x"),
    "token that is not ASCII": lambda server: _request(server, token="\xff\xfe"),
    "token as a query": lambda server: _request(server, line=f"GET /changes?token={server.token} HTTP/1.1"),
    "host of an attacker that resolves to this machine": lambda server: _request(server, host="evil.example"),
    "host with another port": lambda server: _request(server, host="127.0.0.1:1"),
    "host as a prefix": lambda server: _request(server, host=f"127.0.0.1:{server.server_address[1]}.evil.example"),
    "no host": lambda server: f"GET /{server.token}/ HTTP/1.1\r\n\r\n".encode(),
    "two hosts": lambda server: _request(server, more=f"Host: 127.0.0.1:{server.server_address[1]}\r\n"),
    "origin of another page": lambda server: _request(server, more="Origin: https://evil.example\r\n"),
    "origin without a name": lambda server: _request(server, more="Origin: null\r\n"),
    "origin with another port": lambda server: _request(server, more="Origin: http://127.0.0.1:1\r\n"),
    "fetch from another site": lambda server: _request(server, more="Sec-Fetch-Site: cross-site\r\n"),
    "POST": lambda server: _to(server, "changes?since=0", "POST"),
    "PUT": lambda server: _to(server, "page.js", "PUT"),
    "DELETE": lambda server: _to(server, "", "DELETE"),
    "OPTIONS": lambda server: _to(server, "", "OPTIONS"),
    "HEAD": lambda server: _to(server, "", "HEAD"),
    "CONNECT": lambda server: _to(server, "", "CONNECT"),
    "a method of its own": lambda server: _to(server, "", "__init__"),
    "parent folders": lambda server: _to(server, "../../../../etc/passwd"),
    "parent folders in codes": lambda server: _to(server, "%2e%2e%2f%2e%2e%2fetc%2fpasswd"),
    "absolute file": lambda server: _to(server, "/etc/passwd"),
    "file of the run": lambda server: _to(server, "metrics.jsonl"),
    "listing": lambda server: _to(server, "./"),
    "module next to the page": lambda server: _to(server, "../watch_server.py"),
    "null byte": lambda server: _to(server, "page.js%00"),
    "URL with a host": lambda server: _to(server, "http://evil.example/"),
    "since that is no number": lambda server: _to(server, "changes?since=-1"),
    "since of a thousand digits": lambda server: _to(server, "changes?since=" + "9" * 1000),
    "since in digits of another script": lambda server: _to(server, "changes?since=\xb2"),
    "query of another kind": lambda server: _to(server, "changes?since=0&file=/etc/passwd"),
    "query of a file": lambda server: _to(server, "page.js?x=1"),
    "body": lambda server: _request(server, more="Content-Length: 5\r\n", body="hello"),
    "body in chunks": lambda server: _request(
        server, more="Transfer-Encoding: chunked\r\n", body="5\r\nhello\r\n0\r\n\r\n"
    ),
    "two lengths": lambda server: _request(server, more="Content-Length: 0\r\nContent-Length: 5\r\n"),
    "long head": lambda server: _request(server, more="X: " + "x" * 20_000 + "\r\n"),
    "many headers": lambda server: _request(server, more="".join(f"X-{at}: 1\r\n" for at in range(500))),
    "long path": lambda server: _to(server, "x" * 9_000),
    "HTTP/0.9": lambda server: f"GET /{server.token}/\r\n\r\n".encode(),
    "HTTP/0.9 with a header": lambda server: _request(server, line=f"GET /{server.token}/"),
    "path without a slash": lambda server: _request(server, line="GET page.js HTTP/1.1"),
    "HTTP/1.9": lambda server: _to(server, "", version="HTTP/1.9"),
    "HTTP/2": lambda server: _to(server, "", version="HTTP/2.0"),
    "preface of HTTP/2": lambda server: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version of its own": lambda server: _to(server, "", version="HTTP/9.9.9"),
    "TLS": lambda server: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\n\n",
    "nothing but line ends": lambda server: b"\r\n\r\n\r\n",
    "folded header": lambda server: _request(server, more="Origin: https://evil.example\r\n x\r\n"),
}


def exchange(server, request, *, is_open=False):
    """Returns all that a server answers to a request, b"" if it closes the connection without an answer.

    Args:
        is_open: whether this side waits for the answer without having sent a whole request.
    """
    with socket.create_connection(server.server_address, timeout=patience(10)) as connection:
        try:
            connection.sendall(request)
            if not is_open:
                connection.shutdown(socket.SHUT_WR)
            answer = b""
            while part := connection.recv(65536):
                answer += part
        except OSError:  # it was closed before all was sent or read
            return b""
    return answer


def status_of(answer):
    """Returns the status of an answer; None without one."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else None
