"""The page of watched runs answers the browser that has its address, and nobody else."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from forgather.cli.main import main
from forgather.run_status import Status
from forgather.runs import watch_server
from forgather.runs.watch_server import WatchServer
from forgather.runs.watched_runs import Ranking, WatchedRuns
from tests.patience import patience
from tests.runs.corpus import make_run
from tests.runs.hostile_page_requests import HOSTILE, exchange, status_of

LIVE = {"updated": time.time(), "step": 200, "max_steps": 1000}
SECRET = "hf_" + 6 * "aB3dE5"


@contextmanager
def serving(watched):
    with WatchServer(watched) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def served(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_server, "_FRESH_SECONDS", 0.0)
    make_run(tmp_path / "out", status=Status.RUNNING, **LIVE)
    with serving(WatchedRuns([], [str(tmp_path)])) as server:
        yield server


def got(server, name, **headers):
    connection = http.client.HTTPConnection(*server.server_address, timeout=patience(10))
    connection.request("GET", f"/{server.token}/{name}", headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer, content


@pytest.mark.parametrize(
    ("name", "kind"),
    [("", "text/html"), ("page.css", "text/css"), ("page.js", "text/javascript"), ("chart.js", "text/javascript"),
     ("changes?since=0", "application/json")],
)  # fmt: skip
def test_what_is_served_has_headers_that_keep_it_to_its_page(served, name, kind):
    answer, content = got(served, name)
    assert (200, f"{kind}; charset=utf-8", str(len(content))) == (
        answer.status, answer.headers["Content-Type"], answer.headers["Content-Length"])  # fmt: skip
    assert "no-store" == answer.headers["Cache-Control"] and "nosniff" == answer.headers["X-Content-Type-Options"]
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert "Access-Control-Allow-Origin" not in answer.headers and "Python" not in answer.headers["Server"]
    assert served.token.encode() not in content


def test_it_listens_on_the_loopback_address_with_a_long_random_token(served, tmp_path):
    assert "127.0.0.1" == served.socket.getsockname()[0]
    with WatchServer(WatchedRuns([], [str(tmp_path)])) as other:
        assert len(served.token) >= 32 and served.token != other.token


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused_and_says_nothing(served, name):
    request = HOSTILE[name](served)
    answer = exchange(served, request)
    assert status_of(answer) is None or 400 <= status_of(answer) < 600, answer[:200]
    if name.startswith(("token", "wrong token", "host", "origin", "path without")):
        assert 403 == status_of(answer)  # before any word of the path is looked at
    assert b"loss" not in answer and served.token.encode() not in answer and b"tiny" not in answer
    if status_of(answer) is not None:
        assert b"Content-Security-Policy" in answer and len(answer) < 1200
    # The server goes on.
    assert 200 == got(served, "changes?since=0")[0].status


def test_the_requests_that_are_refused_would_be_answered_without_what_is_hostile(served):
    """The negative control of the corpus: its plain request is answered."""
    host = f"127.0.0.1:{served.server_address[1]}"
    for more in ("", f"Origin: http://{host}\r\n", "Sec-Fetch-Site: same-origin\r\n", "Content-Length: 0\r\n"):
        request = f"GET /{served.token}/changes?since=0 HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()
        assert 200 == status_of(exchange(served, request))


def test_slow_and_many_connections_end_and_do_not_keep_others_out(served, monkeypatch):
    monkeypatch.setattr(watch_server, "HEAD_SECONDS", 0.5)
    slow = [socket.create_connection(served.server_address, timeout=patience(10)) for _ in range(60)]
    until = time.monotonic() + 1.5
    for connection in slow:
        connection.setblocking(True)
    while time.monotonic() < until:
        for connection in slow:
            try:
                connection.send(b"X")  # a byte now and then: each alone is within the time
            except OSError:
                continue
        time.sleep(0.1)
    assert threading.active_count() < 60
    assert 200 == got(served, "changes?since=0")[0].status
    for connection in slow:
        connection.close()


def test_a_head_without_an_end_is_refused_for_its_size_and_not_for_its_time(served, monkeypatch):
    monkeypatch.setattr(watch_server, "HEAD_SECONDS", 600.0)
    begin = time.monotonic()
    with socket.create_connection(served.server_address, timeout=patience(10)) as connection:
        with pytest.raises(OSError):
            while time.monotonic() - begin < patience(10):
                connection.send(b"x" * 65536)


def test_a_connection_above_the_limit_is_closed_at_once(served):
    most = watch_server.MAX_CONNECTIONS
    held = [socket.create_connection(served.server_address, timeout=patience(10)) for _ in range(most)]
    time.sleep(0.2)
    assert b"" == exchange(served, f"GET /{served.token}/ HTTP/1.1\r\n".encode(), is_open=True)
    for connection in held:
        connection.close()
    until = time.monotonic() + patience(5)
    while time.monotonic() < until:
        try:
            assert 200 == got(served, "")[0].status
            break
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    else:
        pytest.fail("no connection is taken after all others were closed")


def test_polling_gives_new_points_alone_and_together_they_are_the_curves(served, tmp_path):
    (run,) = (tmp_path / "out" / "runs").iterdir()
    copy, version, sizes = {}, 0, []

    def poll():
        nonlocal version
        answer = json.loads(got(served, f"changes?since={version}")[1])
        version = answer["version"]
        (facts,) = answer["runs"]
        if facts["restarted"]:
            copy.clear()
        sizes.append(sum(len(curve["points"]) for curve in facts["curves"].values()))
        for name, curve in facts["curves"].items():
            copy[name] = copy.get(name, [])[: curve["kept"]] + curve["points"]
        return facts

    def expected():
        curves = served._watched.live[str(run)].curves
        return {name: [bucket.last_step for bucket in curve.buckets] for name, curve in curves.items()}

    for step in range(201, 1200, 7):
        with open(run / "metrics.jsonl", "a") as stream:
            for each in range(step, step + 7):
                stream.write(json.dumps({"step": each, "time": 1e9 + each, "loss": 1.0}) + "\n")
        poll()
        assert expected() == {name: [point[0] for point in points] for name, points in copy.items()}
    # The rest is sent once, and after each doubling of the buckets' width the curve as a whole.
    assert sum(size > 10 for size in sizes) <= 4
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    assert poll()["restarted"] and 3 == len(copy["loss"])
    assert not poll()["restarted"] and 0 == sizes[-1]
    # A number that this server has never given, such as one of an earlier server.
    version = 10**14
    assert 3 == len(poll()["curves"]["loss"]["points"])


def test_secrets_and_values_that_are_not_finite_are_sent_as_texts_without_them(served, tmp_path):
    (run,) = (tmp_path / "out" / "runs").iterdir()
    with open(run / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps({"event": SECRET, "step": 1, "message": SECRET}) + "\n")
        stream.write(
            json.dumps({"step": 201, "time": 1.0, "loss": "nan", SECRET: 1.0, "tokens_per_second": "inf"}) + "\n"
        )
    content = got(served, "changes?since=0")[1].decode()
    facts = json.loads(content, parse_constant=pytest.fail)["runs"][0]
    assert SECRET not in content
    assert ([201, None, None, "nan"], "inf") == (facts["curves"]["loss"]["points"][-1], facts["tokens_per_second"])


def test_a_folder_that_is_removed_meanwhile_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watch_server, "_FRESH_SECONDS", 0.0)
    (tmp_path / "out").mkdir()
    watched = WatchedRuns([], [str(tmp_path / "out")], Ranking("eval_loss", is_greater_better=False))
    with serving(watched) as server:
        (tmp_path / "out").rmdir()
        answer, content = got(server, "changes?since=0")
    assert (200, [], "eval_loss") == (answer.status, *(json.loads(content)[name] for name in ("runs", "metric")))


def test_a_port_in_use_is_one_sentence(served, tmp_path, capsys):
    make_run(tmp_path / "other")
    port = served.server_address[1]
    assert 1 == main(["-p", str(tmp_path), "watch", "--serve", "--port", str(port)])
    assert f"error[FG551]: 127.0.0.1:{port} cannot be served" in capsys.readouterr().err
