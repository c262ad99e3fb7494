"""The tables of measured equality: the worst figure of each strategy, and of each setting with its strategies."""

from scripts import write_results


def note(strategy, ranks, option="", precision="fp64", **figures):
    return {
        **{"strategy": strategy, "world_size": ranks, "option": option, "precision": precision},
        **{"digits": 14, "loss": 1e-9, "grad_norm": 2e-9, "updrel": 3e-9, **figures},
    }


NOTES = [
    note("DDP", 2),
    note("DDP", 2, digits=12),
    note("DDP", 2, precision="fp32 sgd", grad_norm=5e-8),
    note("DDP", 4),
    note("CP ring", 2, "one document", digits=13),
    note("CP ring", 2, "one document, LoRA", digits=11),
    note("DDP", 2, "LoRA"),
    note("DDP", 4, "LoRA"),
]


def test_each_strategy_has_a_row_and_each_setting_has_one_with_its_strategies():
    first, _, second = write_results.tables(NOTES).split("\n\n")
    assert first.splitlines()[2:] == [
        "| DDP | 2 | 3 | 12 | 5e-08, 3e-09 |  |",
        "| DDP | 4 | 1 | 14 |  |  |",
        "| CP ring | 2 | 1 | 13 |  |  |",
    ]
    assert second.splitlines()[2:] == ["| LoRA | CP ring on 2; DDP on 2 and 4 | 3 | 11 |  |  |"]


def test_the_page_keeps_what_is_around_the_tables():
    page = f"before\n{write_results.BEGIN}\nold\n{write_results.END}\nafter\n"
    assert write_results.replaced(page, "new") == page.replace("old", "new")
