import re
from pathlib import Path

from documents import graph_of

from forgather.config.materialize import materialize

PAGE = (Path(__file__).parents[2] / "docs" / "graph.md").read_text()


def test_the_example_of_identity_builds_what_the_page_says():
    built = materialize(graph_of(re.findall(r"```yaml\n(.*?)```", PAGE, re.S)[0]))
    first, second, third, fourth = built["main"]
    assert third is fourth is built["shared"]
    assert first is not second
    assert first["sizes"] is second["sizes"] is built["sizes"]
    assert first["own"] is not second["own"]
    assert built["make"]()["fresh"] is not built["make"]()["fresh"]
    assert built["make"]()["kept"] is built["sizes"]
