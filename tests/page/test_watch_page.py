"""The page of watched runs in a real browser: it opens, grows, and no text of a run can act in it."""

import json
import threading
import time

import pytest
from selenium.webdriver.support.ui import WebDriverWait

from forgather.run_status import Status
from forgather.runs.watch_server import WatchServer
from forgather.runs.watched_runs import Ranking, WatchedRuns
from tests.patience import patience
from tests.runs.corpus import make_run

LIVE = {"status": Status.RUNNING, "step": 200, "max_steps": 1000}
EVIL = "<img src=x onerror=window.ran=1></script><script>window.ran=2</script>"


@pytest.fixture
def opened(browser):
    servers = []

    def open_page(*places, **settings):
        server = WatchServer(WatchedRuns(*places, **settings))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        servers.append((server, thread))
        browser.get("about:blank")
        browser.get(server.address)
        wait(lambda: int(browser.execute_script("return document.documentElement.dataset.version || 0")) > 1)
        return server

    browser.get_log("browser")
    yield open_page
    assert [] == [entry["message"] for entry in browser.get_log("browser")]
    browser.get("about:blank")
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def wait(condition):
    WebDriverWait(None, patience(10), poll_frequency=0.02).until(lambda _: condition())


def text(browser, selector="main"):
    return browser.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def log(run, **record):
    with open(run / "metrics.jsonl", "a") as stream:
        stream.write(json.dumps(record) + "\n")


def test_a_run_grows_on_the_page_within_two_seconds(browser, opened, tmp_path, record_property):
    run = make_run(tmp_path / "out", updated=time.time(), **LIVE)
    opened([str(run)])
    for wanted in (run.name, "running", "step 200 of 1,000", "left", "tokens/s", "798.9 MiB", "eval_loss"):
        assert wanted in text(browser)
    begin = time.monotonic()
    log(run, step=345, time=time.time(), loss=0.125)
    log(run, event="anomaly", step=345, kind="spike", message=EVIL)
    wait(lambda: "step 345 of 1,000" in text(browser) and EVIL in text(browser) and "0.125" in text(browser))
    delay = time.monotonic() - begin
    record_property("seconds_to_visible_in_browser", delay)
    assert delay < max(2.5, patience(1.0))
    assert browser.execute_script("return window.ran === undefined")
    # Nothing but this server was asked.
    asked = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => new URL(entry.name).host)"
    )
    assert {browser.execute_script("return location.host")} == set(asked)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1400, 900), (800, 600), (400, 700)])
def test_pages_of_any_width_have_curves_and_no_part_outside(browser, opened, tmp_path, scheme, size):
    (tmp_path / "trials.jsonl").write_text("")
    for number, lr in enumerate((0.1, 0.2, 0.3)):
        status = Status.PAUSED if number == 1 else Status.RUNNING
        live = {**LIVE, "status": status, "updated": time.time()}
        make_run(tmp_path / "trials" / f"{number:04}", number, lr=lr, loss=2.0 - lr, **live)
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    ranking = Ranking("eval_loss", is_greater_better=False, title="sweep first", num_trials=12)
    opened([], [str(tmp_path)], ranking=ranking)
    assert "sweep first" == text(browser, "h1")
    assert "3 of 12 trials started · the best eval_loss first" == text(browser, "#sub")
    assert "2 running, 1 paused" == text(browser, "#badge")
    rows = browser.execute_script(
        "return [...document.querySelectorAll('tbody tr')].map(row => row.cells[0].innerText)"
    )
    assert ["0002", "0001", "0000"] == rows
    drawn = """return [...document.querySelectorAll('canvas')].filter(one => one.offsetParent).map(one => {
        const blank = Object.assign(document.createElement('canvas'), { width: one.width, height: one.height });
        return one.toDataURL() !== blank.toDataURL();
    })"""
    assert 3 * [True] == browser.execute_script(drawn)
    outside = """return [...document.querySelectorAll('main *')].filter(one => one.getBoundingClientRect().right > innerWidth + 1
        && !one.closest('.scroll') && one.offsetParent).map(one => one.outerHTML.slice(0, 80))"""
    assert [] == browser.execute_script(outside)
    # One trial by itself, and back.
    browser.execute_script("document.querySelector('tbody a').click()")
    wait(lambda: "What" not in text(browser, "h1") and "0002 · lr 0.3" in text(browser, "h1"))
    wait(lambda: all(browser.execute_script(drawn)) and len(browser.execute_script(drawn)) > 3)
    assert [] == browser.execute_script(outside)
    overflowing = "return [...document.querySelectorAll('.tile b')].filter(one => one.scrollWidth > one.parentElement.clientWidth).length"
    assert 0 == browser.execute_script(overflowing)
    browser.execute_script("document.querySelector('#kicker a').click()")
    wait(lambda: "sweep first" in text(browser, "h1"))


def test_a_page_whose_server_has_ended_says_that_it_is_old(browser, opened, tmp_path):
    run = make_run(tmp_path / "out", updated=time.time(), **LIVE)
    server = opened([str(run)])
    server.shutdown()
    server.server_close()
    wait(lambda: "no longer up to date" in text(browser))
    # The browser itself notes each request that nobody answers.
    assert all("ERR_CONNECTION" in entry["message"] for entry in browser.get_log("browser"))
    browser.get("about:blank")
    browser.get_log("browser")


def test_a_sweep_that_has_ended_says_how(browser, opened, tmp_path):
    for number, status in enumerate((Status.FINISHED, Status.FINISHED, Status.FAILED)):
        make_run(tmp_path / "trials" / f"{number:04}", number, status=status)
    opened([], [str(tmp_path)], ranking=Ranking("eval_loss", is_greater_better=False, title="sweep a", num_trials=3))
    assert "2 finished, 1 failed" == text(browser, "#badge")
