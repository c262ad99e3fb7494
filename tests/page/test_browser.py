"""The page in a real browser: it opens, it answers, and nothing that a config says can run in it."""

import time

import pytest

from tests.page.conftest import FILES

OVERLAPS = """(() => {
  const frames = [...document.querySelectorAll('#objects .box')].map(box => box.getBoundingClientRect());
  frames.sort((a, b) => a.top - b.top);
  const found = [];
  frames.forEach((a, at) => {
    for (let next = at + 1; next < frames.length && frames[next].top < a.bottom - 0.01; next++) {
      const b = frames[next];
      if (a.left < b.right - 0.01 && b.left < a.right - 0.01) found.push([a.left, a.top, b.left, b.top]);
    }
  });
  return { boxes: frames.length, found: found.slice(0, 3) };
})()"""

HOSTILE = r"""
"<img src=x onerror=window.ran=1>": "</script><script>window.ran=2</script>"
'a"]': &a !call:app:%3Cscript%3Ewindow.ran=3%3C/script%3E
  "`x`": "javascript:window.ran=4"
  bidi: "left \u202E thgir"
  zero: "a\0b\x1b[31m"
  lines: "one\u2028two\u2029three"
  long: "{{ '<b>long</b> ' * 20000 }}"
list: [*a, *a, "<!--<script>"]
proto: {__proto__: 1, constructor: [2, {hasOwnProperty: x}], toString: {valueOf: [3, 4]}}
main: !call:app:Main {a: *a}
"""


def synthetic(stages):
    """A graph of twenty nodes a stage, with two that all stages share."""
    lines = ["a: &a !singleton:torch.nn:Embedding {num: 10}", "b: &b !singleton:text:Tokenizer {size: 9}"]
    lines += ["main: !singleton:app:Runner", "  stages:"]
    for stage in range(stages):
        lines += [
            f"    s{stage}: !singleton:app:Stage",
            f"      name: stage {stage}",
            "      embed: *a",
            "      layers:",
        ]
        for layer in range(18):
            lines += [f"      - !factory:app:Layer{layer % 5}", f"        size: {layer}", "        tokenizer: *b"]
    return {"templates/configs/big.yaml": "\n".join(lines) + "\n"}


def test_a_page_opens_from_a_file_without_a_word_in_the_log(opened):
    page = opened()
    assert "small.yaml · Bench" == page.browser.title
    assert {"small.yaml", "Trainer", "Arguments", "Tokenizer", "Model", "Linear", "extra"} == set(page.titles)
    assert not page.panel.shown
    assert 0 == page.js("performance.getEntriesByType('resource').length")


def test_a_click_on_a_node_shows_its_path_its_file_and_its_line(opened):
    page = opened()
    page.pick("Tokenizer")
    text = page.panel.text
    assert "app.text:Tokenizer" in text
    assert "main.tokenizer\nmain.model.tokenizer\nmain.extra.tokenizer" in text
    assert "templates/base.yaml:8\n6\n    steps: 10\n7\n-- endblock args\n8\n  tokenizer: &tokenizer" in text
    assert "one object at 3 places" in text
    assert "#main.tokenizer" == page.address


def test_a_click_on_a_value_shows_who_wrote_it_and_what_it_replaced(opened):
    page = opened()
    page.box("Arguments").find_element("css selector", "[data-row='1']").click()
    text = page.panel.text
    assert text.startswith("steps")
    assert "templates/configs/small.yaml:4" in text
    assert "it replaced\n10\ntemplates/base.yaml:6" in text
    assert "#main.args.steps" == page.address


def test_a_printed_value_names_the_set_of_its_name(opened):
    page = opened(address="#main.args.rate")
    assert "templates/base.yaml:5" in page.panel.text
    assert "set at templates/base.yaml:1" in page.panel.text


def test_a_shared_node_is_drawn_once_with_an_edge_from_each_place(opened):
    page = opened()
    box = page.box("Tokenizer")
    assert "shared" in box.get_attribute("class").split()
    assert "×3" == box.find_element("css selector", ".badge").text
    edges = page.js("[...document.querySelectorAll(`path[data-to='${arguments[0]}']`)].map(p => p.getAttribute('class'))",
                    box.get_attribute("data-id"))  # fmt: skip
    assert ["held", "shared", "shared"] == sorted(edge.split()[0] for edge in edges)


def test_the_keyboard_searches_goes_on_and_leaves(opened):
    page = opened()
    page.keys("/", "tokenizer")
    assert "7" == page.browser.find_element("id", "count").text
    page.keys("\ue007")
    assert ("#main.tokenizer", "1 / 7") == (page.address, page.browser.find_element("id", "count").text)
    page.keys("\ue007")
    assert page.address != "#main.tokenizer"
    page.keys("\ue00c")
    assert "" == page.js("document.getElementById('query').value")
    page.keys("\ue00c")
    assert not page.panel.shown


@pytest.mark.parametrize(
    ("asked", "found"),
    [("0.95", "#main.tokenizer.betas[1]"), ("torch.nn", "#main.model.layer"), ("part.yaml path", "#main.extra.path")],
)
def test_search_finds_values_constructors_and_files(opened, asked, found):
    page = opened()
    page.keys("/", asked, "\ue007")
    assert found == page.address


def test_search_reveals_what_is_folded_away(opened):
    page = opened(synthetic(50), config="big")
    assert "[17]" not in page.panel.text
    page.keys("/", "stages.s49.layers[17].size", "\ue007")
    assert "#main.stages.s49.layers[17].size" == page.address
    on = page.browser.find_element("css selector", ".row.on")
    assert on.is_displayed()
    assert "size" in on.text


def test_nodes_fold_and_unfold(opened):
    page = opened()
    page.box("Model").find_element("css selector", ".fold").click()
    assert "Linear" not in page.titles
    page.box("Model").find_element("css selector", ".fold").click()
    assert "Linear" in page.titles
    page.click("[data-do=fold]")
    assert {"small.yaml", "Trainer"} == set(page.titles)
    page.click("[data-do=unfold]")
    assert 7 == len(page.titles)


def test_an_address_leads_to_its_node_also_by_another_path(opened):
    page = opened(address="#main.model.tokenizer")
    assert "what it is" in page.panel.text
    assert "app.text:Tokenizer" in page.panel.text or "Tokenizer" in page.panel.text
    page.js("location.hash = '#main.args'")
    time.sleep(0.1)
    assert page.panel.text.startswith("Arguments")


def test_an_address_of_nothing_shows_the_whole(opened):
    page = opened(address="#no.such[9]['path']")
    assert 7 == len(page.titles)
    assert not page.panel.shown


def test_the_text_has_origins_in_its_margin_and_dims_what_was_overridden(opened):
    page = opened(address="#main.args.steps")
    page.click("[data-view=text]")
    line = page.browser.find_element("css selector", ".line.on")
    assert ["templates/configs/small.yaml:4", "steps: 20"] == [
        line.find_element("css selector", part).text.replace("\n", "").strip() for part in (".place", "code")
    ]
    dimmed = page.browser.find_elements("css selector", ".overridden")
    assert ["steps: 10"] == [row.find_element("css selector", "code").text.strip() for row in dimmed]
    assert "overridden by line 6" in dimmed[0].text


def test_a_line_of_the_text_leads_to_its_value_and_back(opened):
    page = opened()
    page.click("[data-view=text]")
    (line,) = [row for row in page.browser.find_elements("css selector", ".line") if "betas" in row.text]
    line.click()
    assert "#main.tokenizer.betas" == page.address
    page.click("[data-view=objects]")
    assert "betas" in page.browser.find_element("css selector", "#objects .row.on").text


def test_the_templates_are_a_tree_that_leads_to_their_lines(opened):
    page = opened()
    page.click("[data-view=templates]")
    names = page.js("[...document.querySelectorAll('#templates .title')].map(title => title.textContent)")
    assert {"configs/small.yaml", "base.yaml", "part.yaml"} == set(names)
    page.pick("part.yaml")
    assert "includes, by base.yaml" in page.panel.text
    assert "templates/base.yaml:15" in page.panel.text
    page.click("#panel .line-link")
    assert "extra:" in page.browser.find_element("css selector", ".line.on").text


def test_a_change_of_the_command_line_says_where_it_came_from(opened):
    page = opened(overrides=[("main.args.steps", "99")], address="#main.args.steps")
    assert "<command line>" in page.panel.text
    assert "it replaced\n20" in page.panel.text
    page.click("[data-view=text]")
    assert "before --set" in page.browser.find_element("css selector", ".note").text


def test_an_environment_variable_stays_a_name(opened, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    page = opened()
    assert "!env SECRET_KEY" in page.box("Trainer").text
    assert "hunter2" not in page.browser.page_source


def test_nothing_that_a_config_says_runs(opened):
    page = opened({"templates/configs/evil.yaml": HOSTILE}, config="evil")
    for view in ("objects", "templates", "text", "objects"):
        page.click(f"[data-view={view}]")
    for number in range(page.js("document.querySelectorAll('#objects .box').length")):
        page.js("document.querySelectorAll('#objects .box')[arguments[0]].click()", number)
    page.keys("/", "<script", "\ue007", "\ue007")
    assert page.js("window.ran === undefined")
    assert 0 == page.js("document.querySelectorAll('img, #stage script, #panel script, b b').length")
    assert 2 == page.js("document.scripts.length")
    assert "left \\u202e thgir" in page.js("document.getElementById('objects').textContent")


def test_a_long_text_is_cut_and_shown_on_demand(opened):
    page = opened({"templates/configs/evil.yaml": HOSTILE}, config="evil", address="#['a\"]'].long")
    assert 600 == page.js("document.querySelector('#panel pre').textContent.length")
    page.click("#panel .all")
    assert 20_000 == page.js("document.querySelector('#panel pre').textContent.length")


@pytest.mark.parametrize("stages", [50, 150], ids=["1000 nodes", "3000 nodes"])
def test_a_large_graph_opens_fast_folded_and_without_overlap(opened, stages):
    start = time.perf_counter()
    page = opened(synthetic(stages), config="big")
    assert time.perf_counter() - start < 5
    first = page.js(OVERLAPS)
    assert [] == first["found"]
    assert 8 <= first["boxes"] <= 120
    start = time.perf_counter()
    page.click("[data-do=unfold]")
    page.js("(() => { for (let at = 0; at < 40; at++) document.querySelector('[data-do=out]').click(); })()")
    whole = page.js(OVERLAPS)
    assert time.perf_counter() - start < 5
    assert [] == whole["found"]
    assert stages * 20 + 3 <= whole["boxes"]


def test_text_never_leaves_its_box(opened):
    page = opened({"templates/configs/evil.yaml": HOSTILE}, config="evil")
    page.click("[data-do=real]")
    spilled = page.js("""[...document.querySelectorAll('.box')].filter(box => {
      const frame = box.getBoundingClientRect();
      return [...box.querySelectorAll('span')].some(span => {
        const part = span.getBoundingClientRect();
        return part.right > frame.right + 1 || part.left < frame.left - 5 || part.bottom > frame.bottom + 1;
      });
    }).length""")
    assert 0 == spilled


def test_the_page_follows_the_color_scheme(opened):
    page = opened(FILES)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.js(ground)
    page.browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    dark = page.js(ground)
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert light != dark
