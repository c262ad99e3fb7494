"""The page in a real browser: it opens, it answers, and nothing that a config says can run in it."""

import time

import pytest

from tests.page.conftest import FILES
from tests.patience import patience

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


WIDE = {
    "templates/configs/wide.yaml": "\n".join([
        "options:",
        *(f"  {name}: {{names: --{name}, type: int, help: a long text that needs a box of its own}}"
          for name in ("first", "second", "third")),
        "main: !singleton:app:Trainer",
        *(f"  part{at}: !singleton:app:Part{at}\n    inner: !singleton:app:Inner {{size: {at}}}\n"
          + "\n".join(f"    value{number}: {number}" for number in range(12)) for at in range(9)),
    ]) + "\n",
}  # fmt: skip


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


def test_the_keyboard_searches_continues_and_leaves(opened):
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


def test_search_finds_a_number_as_it_was_written_and_as_it_is(opened):
    files = {"templates/configs/a.yaml": "main: !call:app:F {rate: 1e-2, mask: 0o17}\n"}
    for asked, path in (("1e-2", "#main.rate"), ("0.01", "#main.rate"), ("0o17", "#main.mask"), ("15", "#main.mask")):
        page = opened(files, config="a")
        assert "1e-2" in page.box("F").text
        page.keys("/", asked, "\ue007")
        assert (path, "1 / 1") == (page.address, page.browser.find_element("id", "count").text)
    assert "the number\n15" in page.panel.text


def test_search_finds_a_name_and_all_that_take_its_value(opened):
    text = ".run_dir: &run_dir !var run_dir\nmain: !call:app:F {logging_dir: *run_dir}\n"
    page = opened({"templates/configs/a.yaml": text}, config="a")
    page.keys("/", "run_dir")
    assert [".run_dir", "main.logging_dir"] == page.marked(".hit .path")
    page.keys("\ue007")
    assert "#.run_dir" == page.address


def test_a_word_of_a_file_name_finds_no_values_but_a_file_name_does(opened):
    page = opened()
    page.keys("/", "part")
    assert "part.yaml" in page.marked(".hit .path")
    assert "main.extra.path" not in page.marked(".hit .path")
    page.keys("\ue00c", "/", "part.yaml:2")
    assert ["main.extra.path"] == page.marked(".hit .path")


def test_the_list_of_finds_leaves_the_panel_free(opened):
    page = opened(address="#main.args.steps")
    page.keys("/", "tokenizer")
    right, left = page.js("[document.getElementById('hits').getBoundingClientRect().right,"
                          " document.getElementById('panel').getBoundingClientRect().left]")  # fmt: skip
    assert right <= left


def test_one_selection_is_marked_in_all_views(opened):
    page = opened(address="#main.args.steps")
    page.keys("2")
    assert ["configs/small.yaml"] == page.marked(".template.on .title")
    assert ["base.yaml"] == page.marked(".template.earlier .title")
    page.js("location.hash = '#main.args.rate'")
    page.keys("2")
    assert ["base.yaml"] == page.marked(".template.on .title")
    page.js("location.hash = '#main.args.steps'")
    page.keys("3")
    assert ["    steps: 20"] == page.marked(".line.on code")
    page.keys("1")
    assert ["steps"] == page.marked(".row.on .key")


def test_what_a_template_wrote_is_marked_in_all_views(opened):
    page = opened()
    page.keys("2")
    page.pick("part.yaml")
    page.keys("3")
    assert ["  extra:", "    path: here", "    tokenizer: *tokenizer"] == page.marked(".line.on code")
    page.keys("1")
    assert ["extra"] == page.marked(".box.written .title")
    assert {"extra", "path", "tokenizer"} == set(page.marked(".row.written .key"))


def test_a_value_shows_all_its_paths(opened):
    page = opened(address="#main.tokenizer.size")
    assert "main.tokenizer.size\nmain.model.tokenizer.size\nmain.extra.tokenizer.size" in page.panel.text


def test_the_panel_of_a_container_shows_its_place_once(opened):
    page = opened()
    page.box("Trainer").find_element("css selector", "[data-row='4']").click()
    assert 1 == page.panel.text.count("templates/part.yaml:1\n")
    assert 1 == len(page.browser.find_elements("css selector", "#panel .excerpt"))


def test_the_help_opens_by_key_and_by_button(opened):
    page = opened(address="#main.args")
    page.keys("?")
    shown = page.browser.find_element("id", "help")
    assert "fit everything, actual size" in shown.text
    page.keys("\ue00c")
    assert not shown.is_displayed()
    assert page.panel.shown
    page.click("#ask")
    assert shown.is_displayed()
    page.click("#help .close")
    assert not shown.is_displayed()


def test_notes_are_not_findings(opened):
    page = opened(overrides=[("main.tokenizer.size", "99")])
    assert "1 note" == page.browser.find_element("id", "findings").text
    page.click("#findings")
    assert page.panel.text.startswith("Notes\nof small.yaml")
    assert "note FG314" in page.panel.text


def test_a_large_config_begins_with_what_runs_and_its_arguments_in_view(opened):
    page = opened(WIDE, config="wide")
    frames = page.js("""[...document.querySelectorAll('#objects .box')].map(box => {
      const frame = box.getBoundingClientRect(), plane = document.getElementById('plane').getBoundingClientRect();
      return frame.top >= plane.top && frame.bottom <= plane.bottom && frame.left >= 0 && frame.right <= plane.right;
    })""")
    assert {"wide.yaml", "Trainer", "options", *(f"Part{at}" for at in range(9))} == set(page.titles)
    assert all(frames)
    assert 85 <= int(page.browser.find_element("id", "zoom").text[:-1])
    # Data that nothing uses is folded, and stands below what runs.
    assert [] == page.box("options").find_elements("css selector", ".row")
    assert page.box("Trainer").location["y"] < page.box("options").location["y"]
    page.box("options").find_element("css selector", ".fold").click()
    assert "first" in page.box("options").text


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


def test_an_address_of_nothing_shows_the_whole_and_says_so(opened):
    page = opened(address="#no.such[9]['path']")
    assert 7 == len(page.titles)
    assert not page.panel.shown
    assert "There is no no.such[9]['path'] in this config." in page.notice


def test_an_address_with_a_slip_leads_to_the_nearest_path(opened):
    page = opened(address="#main.args.stepz")
    assert "The nearest is main.args.steps." in page.notice
    page.click("#notice .link")
    assert ("#main.args.steps", "") == (page.address, page.notice)


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
    assert "set on the command line\n--set main.args.steps=99" in page.panel.text
    assert "it replaced\n20" in page.panel.text
    page.keys("2")
    assert "Set on the command line, by no template: --set main.args.steps=99" in page.notice
    assert {"configs/small.yaml", "base.yaml"} == set(page.marked(".earlier .title"))
    page.keys("3")
    assert ["--set main.args.steps=99"] == page.marked(".line.on code")
    (old,) = [row for row in page.browser.find_elements("css selector", ".overridden") if "steps: 20" in row.text]
    assert "overridden on the command line" in old.text
    page.keys("\ue00c")
    page.click(".line.given")
    assert "#main.args.steps" == page.address
    assert ["--set main.args.steps=99"] == page.marked(".line.on code")


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
    assert time.perf_counter() - start < patience(5)
    first = page.js(OVERLAPS)
    assert [] == first["found"]
    assert 8 <= first["boxes"] <= 120
    start = time.perf_counter()
    page.click("[data-do=unfold]")
    page.js("(() => { for (let at = 0; at < 40; at++) document.querySelector('[data-do=out]').click(); })()")
    whole = page.js(OVERLAPS)
    assert time.perf_counter() - start < patience(5)
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


@pytest.fixture
def small_window(browser):
    frame = {"width": 800, "height": 600, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", frame)
    yield
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


LIKE_A_RUN = {
    "templates/configs/run.yaml": "\n".join([
        "meta: {config_name: Run}",
        "dynamic_args: {names: --steps}",
        *(f"part{at}: &part{at} !singleton:application.parts:Part{at}@part{at}\n  size: {at}" for at in range(9)),
        "main: !singleton:application:Trainer@trainer",
        *(f"  argument{at}: *part{at}" for at in range(9)),
        "",
    ])
}  # fmt: skip


def test_in_a_small_window_nothing_is_cut_and_all_can_be_read(opened, small_window):
    page = opened(LIKE_A_RUN, config="run")
    assert page.js("""[...document.querySelectorAll('#objects .box')].every(box => {
      const frame = box.getBoundingClientRect(), plane = document.getElementById('plane').getBoundingClientRect();
      return frame.top >= plane.top && frame.bottom <= plane.bottom && frame.left >= 0 && frame.right <= plane.right;
    })""")
    assert {"run.yaml", "Trainer"} < set(page.titles)
    assert 70 <= int(page.browser.find_element("id", "zoom").text[:-1])
    page.click("[data-do=unfold]")
    assert 70 <= int(page.browser.find_element("id", "zoom").text[:-1])


def test_what_runs_is_listed_before_what_describes_it(opened):
    page = opened(LIKE_A_RUN, config="run")
    rows = page.box("run.yaml").text.split("\n")
    assert rows.index("main") < min(rows.index("meta"), rows.index("dynamic_args"))
