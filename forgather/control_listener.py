"""Takes requests to the run in this process, in a thread of its own: a slow or hostile client never delays a step.

The input is the run folder; the output is the requests in the order of their arrival, which the training loop takes at
the end of a step and answers later. Requests come through a Unix socket of this user, and through files in the run
folder: from another machine, or where no socket can be made. Only requests of the user who runs the run are taken.
"""

from __future__ import annotations

import os
import pwd
import selectors
import socket
import stat
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from forgather.bounded import open_regular
from forgather.control_socket import NAME, make_socket_folder, remove_dead_sockets, socket_parents
from forgather.errors import ControlError
from forgather.run_control import (
    BY_FILE,
    FOLDER,
    MAX_BYTES,
    REQUEST_FILE,
    Answer,
    Request,
    encode_answer,
    is_private,
    note_address,
    read_request,
    refusal,
)

THREAD = "forgather-control"
_PATIENCE_SECONDS, _LEAVING_SECONDS, _POLL_SECONDS = 10.0, 1.0, 1.0
"""Units: seconds. The time a client has to send its request and to take its answer; the time for which the end of a run
waits for that; and the time between two looks for files.
"""
_MOST_CLIENTS, _MOST_FILES = 16, 64
_LONGEST_PATH = 107
"""Units: bytes. The longest path of a Unix socket."""


@dataclass(frozen=True)
class Arrival:
    """A request that waits for its answer.

    Args:
        request: the request.
        answer: a function that sends the answer. It returns at once.
    """

    request: Request
    answer: Callable[[Answer], None]


@dataclass
class _Client:
    connection: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytearray = field(default_factory=bytearray)
    has_asked: bool = False
    is_answered: bool = False


class ControlListener:
    """The thread that takes requests.

    Args:
        run_dir: the run folder, in which the address is noted.
    """

    def __init__(self, run_dir: str) -> None:
        self._run_dir = os.path.abspath(run_dir)
        self._queue: deque[Arrival] = deque()
        self._has_arrival = threading.Event()
        # What the thread has to do, put here by other threads: only the thread itself touches sockets.
        self._outbox: deque[Callable[[], None]] = deque()
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._awake = socket.socketpair()
        for end in (self._wake, self._awake):
            end.setblocking(False)
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._folder: str | None = None
        self._server = self._bound()
        self._ends_at: float | None = None
        self._thread = threading.Thread(target=self._serve, name=THREAD, daemon=True)
        _open.add(self)
        note_address(self._run_dir, BY_FILE if self._server is None else self._server.getsockname())
        self._thread.start()

    @property
    def waiting(self) -> bool:
        """Whether a request waits to be taken."""
        return bool(self._queue)

    def wait(self, seconds: float) -> None:
        """Waits until a request arrives.

        Args:
            seconds: the longest wait, in seconds.
        """
        self._has_arrival.clear()
        if not self._queue:
            self._has_arrival.wait(seconds)

    def take(self) -> list[Arrival]:
        """Returns the requests that have arrived since the last call, in the order of their arrival."""
        found = []
        while self._queue:
            found.append(self._queue.popleft())
        return found

    def close(self) -> None:
        """Removes the address, and ends the thread when its clients have their answers or too much time has passed.

        Every request must have been taken and answered.
        """
        _open.discard(self)
        note_address(self._run_dir, None)
        self._do(self._leave)
        self._thread.join(2 * _LEAVING_SECONDS)
        self.close_in_child()
        if self._folder is not None:
            with suppress(OSError):
                os.rmdir(self._folder)

    def close_in_child(self) -> None:
        """Closes this process's copies of all sockets, such as in a forked process that loads data."""
        # Not `unregister`: a child shares the selector's table with its parent.
        sockets = [self._wake, self._awake, *self._clients, *([self._server] if self._server is not None else [])]
        for one in sockets:
            one.close()
        self._selector.close()

    def _leave(self) -> None:
        self._ends_at = time.monotonic() + _LEAVING_SECONDS
        if self._server is not None:
            with suppress(OSError):
                os.unlink(self._server.getsockname())
            self._selector.unregister(self._server)
            self._server.close()
            self._server = None

    def _do(self, act: Callable[[], None]) -> None:
        """Makes the thread call a function."""
        self._outbox.append(act)
        # A full pipe wakes the thread as well.
        with suppress(OSError):
            self._wake.send(b"\0")

    def _bound(self) -> socket.socket | None:
        """Returns a listening socket that only this user can reach, or None where that is not possible."""
        # Without the credentials of a peer, a file whose owner is known is the safer way.
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        remove_dead_sockets()
        for parent in socket_parents():
            with suppress(OSError):
                return self._bound_below(parent)
        return None

    def _bound_below(self, parent: str) -> socket.socket:
        folder = make_socket_folder(parent)
        path = os.path.join(folder, NAME)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            if len(os.fsencode(path)) > _LONGEST_PATH:
                raise OSError(f"{path!r} is too long")
            server.bind(path)
            os.chmod(path, 0o600)
            server.listen(_MOST_CLIENTS)
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ)
        except OSError:
            server.close()
            with suppress(OSError):
                os.unlink(path)
            os.rmdir(folder)
            raise
        self._folder = folder
        return server

    def _serve(self) -> None:
        while self._ends_at is None or (self._unanswered() and time.monotonic() < self._ends_at):
            for key, events in self._selector.select(_POLL_SECONDS if self._ends_at is None else 0.05):
                if key.fileobj is self._awake:
                    with suppress(OSError):
                        self._awake.recv(4096)
                elif key.fileobj is self._server:
                    self._accept()
                else:
                    self._exchange(self._clients[key.fileobj], events)  # type: ignore[index]
            while self._outbox:
                self._outbox.popleft()()
            self._drop_the_late()
            if self._ends_at is None:
                self._read_files()

    def _unanswered(self) -> bool:
        return any(client.to_send or client.has_asked for client in self._clients.values())

    def _accept(self) -> None:
        assert self._server is not None, "it is registered"  # noqa: S101
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        connection.setblocking(False)
        client = _Client(connection, time.monotonic() + _PATIENCE_SECONDS)
        self._clients[connection] = client
        self._selector.register(connection, selectors.EVENT_READ)
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, user, _ = struct.unpack("3i", credentials)
        if user != os.getuid():
            self._refuse(client, "it is of another user")
        elif len(self._clients) > _MOST_CLIENTS:
            self._refuse(client, f"{_MOST_CLIENTS} clients are connected already")

    def _exchange(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                sent = client.connection.send(client.to_send)
                del client.to_send[:sent]
                if not client.to_send:
                    self._after_sending(client)
            elif not client.has_asked:
                self._receive(client)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        part = client.connection.recv(MAX_BYTES)
        client.received += part
        line, newline, _ = client.received.partition(b"\n")
        if newline or len(client.received) > MAX_BYTES or not part:
            if not client.received:
                self._drop(client)
                return
            self._ask(client, bytes(line if newline else client.received))

    def _ask(self, client: _Client, message: bytes) -> None:
        client.has_asked = True
        # From here on nothing more is read: a client that keeps writing blocks itself.
        self._selector.unregister(client.connection)

        def answer(given: Answer) -> None:
            self._do(lambda: self._send(client, given))

        try:
            request = read_request(message, who=_user_name(os.getuid()), host=os.uname().nodename)
        except ControlError as error:
            self._send(client, refusal(error))
            return
        client.deadline = float("inf")
        self._arrive(Arrival(request, answer))

    def _arrive(self, arrival: Arrival) -> None:
        if self._ends_at is not None:
            return
        self._queue.append(arrival)
        self._has_arrival.set()

    def _refuse(self, client: _Client, why: str) -> None:
        self._selector.unregister(client.connection)
        client.has_asked = True
        self._send(client, refusal(ControlError(f"the request is refused: {why}", code="FG517")))

    def _send(self, client: _Client, answer: Answer) -> None:
        if client.connection not in self._clients:
            return
        client.is_answered, client.deadline = True, time.monotonic() + _PATIENCE_SECONDS
        client.to_send += encode_answer(answer)
        self._selector.register(client.connection, selectors.EVENT_WRITE)

    def _after_sending(self, client: _Client) -> None:
        if client.is_answered:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        self._clients.pop(client.connection, None)
        with suppress(KeyError, ValueError):
            self._selector.unregister(client.connection)
        client.connection.close()

    def _drop_the_late(self) -> None:
        now = time.monotonic()
        for client in [one for one in self._clients.values() if one.deadline < now]:
            self._drop(client)

    def _read_files(self) -> None:
        folder = os.path.join(self._run_dir, FOLDER)
        try:
            if not is_private(os.lstat(folder), is_folder=True):
                return
            names = sorted(filter(REQUEST_FILE.fullmatch, os.listdir(folder)))
        except OSError:
            return
        for name in names[:_MOST_FILES]:
            with suppress(OSError):
                self._read_file(folder, name)

    def _read_file(self, folder: str, name: str) -> None:
        file = os.path.join(folder, name)
        is_link = stat.S_ISLNK(os.lstat(file).st_mode)
        content = b"" if is_link else _private_content(file)
        # Removed first: a file that cannot be removed would be done again and again.
        os.unlink(file)
        reply = os.path.join(folder, name.replace("request", "answer", 1))

        def answer(given: Answer) -> None:
            with suppress(OSError):
                with open(f"{reply}.draft", "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as stream:
                    stream.write(encode_answer(given))
                os.replace(f"{reply}.draft", reply)

        if content is None:
            return
        try:
            request = read_request(content, who=_user_name(os.getuid()))
        except ControlError as error:
            answer(refusal(error))
            return
        self._arrive(Arrival(request, answer))


def _private_content(file: str) -> bytes | None:
    """Returns the content of a file of this user, cut after the largest message; None for a file of another user."""
    with open_regular(file) as stream:
        if not is_private(os.fstat(stream.fileno()), is_folder=False):
            return None
        return stream.read(MAX_BYTES + 1)


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


# A forked process, such as one that loads data, takes no requests.
_open: weakref.WeakSet[ControlListener] = weakref.WeakSet()


def _in_child() -> None:
    for listener in list(_open):
        listener.close_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)
