import shutil
from types import SimpleNamespace

import pytest

from forgather.cli.commands.graph import config_page
from forgather.project.project import Project
from tests.isolation import private_folders  # noqa: F401
from tests.project.workbench import make_project

SWITCHES = """--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --force-prefers-reduced-motion --window-size=1400,900""".split()

FILES = {
    "templates/base.yaml": """\
-- set rate = 0.5
main: &trainer !singleton:app:Trainer@trainer
  args: !call:app:Arguments
-- block args
    rate: {{ rate }}
    steps: 10
-- endblock args
  tokenizer: &tokenizer !singleton:app.text:Tokenizer
    size: 100
    betas: [0.9, 0.95]
  model: !partial:app:Model
    tokenizer: *tokenizer
    layer: !factory:torch.nn:Linear [3, 4]
  key: !env SECRET_KEY
-- include 'part.yaml'
""",
    "templates/part.yaml": "  extra:\n    path: here\n    tokenizer: *tokenizer\n",
    "templates/configs/small.yaml": "-- extends 'base.yaml'\n[args]\n    == super()\n    steps: 20\n",
}


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """One headless Chromium for all tests of the page."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("no Chromium: apt-get install chromium chromium-driver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=Service(driver))
    yield chrome
    chrome.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens the page of a config in the browser; at the end, nothing may stand in the browser's log."""

    from selenium.webdriver.support.ui import WebDriverWait

    def open_page(files=FILES, *, config=None, address="", **settings):
        folder = make_project(tmp_path / "project", files, meta="name: Bench\n")
        file = tmp_path / "page.html"
        file.write_text(config_page(Project(config, folder, **settings)), encoding="utf-8")
        browser.get("about:blank")
        browser.get(f"{file.as_uri()}{address}")
        # On a busy machine the browser says that a page is there before its script has run.
        ready = "return location.protocol === 'file:' && 'ready' in document.documentElement.dataset"
        WebDriverWait(browser, 20, poll_frequency=0.02).until(lambda browser: browser.execute_script(ready))
        return Page(browser)

    browser.get_log("browser")
    yield open_page
    assert [] == [entry["message"] for entry in browser.get_log("browser")]


class Page:
    """The page as a reader sees it."""

    def __init__(self, browser):
        self.browser = browser

    def js(self, script, *arguments):
        return self.browser.execute_script(f"return ({script})", *arguments)

    def box(self, title):
        """The element of the box with that title, which is in view."""
        found = [box for box in self.browser.find_elements("css selector", ".box") if self.title(box) == title]
        assert 1 == len(found), [self.title(box) for box in self.browser.find_elements("css selector", ".box")]
        return found[0]

    def pick(self, title):
        """Clicks on the head of a box."""
        self.box(title).find_element("css selector", ".title").click()

    def title(self, box):
        return box.find_element("css selector", ".title").get_property("textContent")

    @property
    def titles(self):
        return self.js("[...document.querySelectorAll('#objects .title')].map(title => title.textContent)")

    def click(self, selector):
        self.browser.find_element("css selector", selector).click()

    def keys(self, *keys):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    @property
    def panel(self):
        element = self.browser.find_element("id", "panel")
        return SimpleNamespace(text=element.text, shown=element.is_displayed())

    @property
    def notice(self):
        return self.browser.find_element("id", "notice").text

    def marked(self, selector):
        """The texts of the elements that a selector finds."""
        return self.js("[...document.querySelectorAll(arguments[0])].map(found => found.textContent)", selector)

    @property
    def address(self):
        return self.js("decodeURIComponent(location.hash)")
