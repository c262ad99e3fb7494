#!/usr/bin/env python
"""Writes the generated pages of docs/reference: hardware, settings, templates, commands and error codes.

Reads the sources of the package and writes Markdown. With `--check` it writes nothing, and fails if a page is stale.
The pages depend only on the contents of the repository.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["COLUMNS"] = "100"
os.environ["NO_COLOR"] = "1"

from forgather.cli.commands.explain import error_codes  # noqa: E402
from forgather.cli.parsing import COMMANDS, build_parser  # noqa: E402
from forgather.planner.hardware import DTYPES, hardware, hardware_names  # noqa: E402
from forgather.project.reference import settings, templates  # noqa: E402

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
NOTE = "<!-- Written by scripts/write_reference.py from the sources. Change the sources, and run it again. -->"


def sentence(text):
    return text[:1].upper() + text[1:]


def settings_page():
    lines = ["# Settings of the trainers", NOTE, ""]
    lines += [
        "Every key of `trainer_args`. `fgcli explain trainer_args.NAME` prints the same, with the modules that read"
    ]
    lines += [
        "the setting and its names in other tools. [templates.md](templates.md) lists the templates that set it.",
        "",
    ]
    groups = {}
    for one in settings().values():
        groups.setdefault(one.trainers, []).append(one)
    for trainers, several in groups.items():
        lines += [f"## {', '.join(f'`{name}`' for name in trainers)}", ""]
        lines += ["| setting | type | default | accepted | meaning |", "|---|---|---|---|---|"]
        for one in several:
            cells = [f"`{one.name}`", f"`{one.type}`", f"`{one.default}`", one.values, sentence(one.meaning)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def templates_page():
    lines = ["# Templates of the library", NOTE, ""]
    lines += [
        "`fgcli explain NAME` prints a template with its source. [../templates.md](../templates.md) describes how"
    ]
    lines += ["they are combined.", ""]
    folder = None
    for one in templates().values():
        here, _, _ = one.name.partition("/")
        if here != folder:
            folder = here
            lines += [f"## {folder}", ""]
        lines += [f"### `{one.name}`", "", one.about, ""]
        if one.fills:
            lines += ["```yaml", f"[{one.fills}]", f"    -- include '{one.name}'", "```", ""]
        elif one.blocks:
            lines += ["```yaml", f"-- extends '{one.name}'", "```", ""]
        if one.blocks:
            lines += ["| block | about |", "|---|---|"]
            lines += [f"| `{name}` | {about} |" for name, about in one.blocks.items()] + [""]
        if one.constructors:
            lines += ["Builds " + ", ".join(f"`{name}`" for name in one.constructors) + ".", ""]
    return "\n".join(lines)


def commands_page():
    lines = ["# Commands", NOTE, "", "The output of `fgcli COMMAND --help`.", ""]
    for name in COMMANDS:
        _, parser, _ = build_parser(name)
        lines += [f"## `fgcli {name}`", "", "```text", *(line.rstrip() for line in parser.format_help().splitlines())]
        lines += ["```", ""]
    return "\n".join(lines)


def errors_page():
    lines = ["# Error codes", NOTE, "", "`fgcli explain CODE` prints a page.", "", "| code | meaning |", "|---|---|"]
    lines += [f"| [{code}](../errors/{code}.md) | {sentence(title)} |" for code, title in error_codes().items()]
    return "\n".join(lines) + "\n"


def hardware_page():
    lines = ["# Hardware", NOTE, ""]
    lines += [
        "The devices that `--hardware` of `plan` and `train` knows, from `forgather/planner/hardware.json`.",
        "Rates are peaks of dense operations in TFLOPS (TOPS for int8), with sums in 32 bits for 16-bit types; sparse",
        "rates, which data sheets often print alone, are twice as high and no training uses them. Memory is what the",
        "driver reports. Links are peaks in one direction in GB/s; the network between machines is assumed. We",
        "measured none of these figures. The date of a source is that of its edition. Each figure was looked up again",
        "where the last column says; those with a question mark were not found, and are as somebody remembered them.",
        "",
        "| name | " + " | ".join(DTYPES) + " | memory, MiB | GB/s | links | also called |",
        "|---" * (len(DTYPES) + 5) + "|",
    ]
    devices = [hardware(name) for name in hardware_names()]
    for one in devices:
        mark = {cell: "?" for cell in one.unverified}
        cells = [
            f"{one.peak_flops[dtype] / 1e12:g}{mark.get(dtype, '')}" if dtype in one.peak_flops else ""
            for dtype in DTYPES
        ]
        cells.append("" if one.memory_bytes is None else f"{one.memory_bytes >> 20}{mark.get('memory_mib', '')}")
        cells.append(f"{one.memory_bytes_per_second / 1e9:g}{mark.get('memory_gb_per_second', '')}")
        cells.append(", ".join(f"{link} {rate / 1e9:g}{mark.get(link, '')}" for link, rate in one.links.items()))
        lines.append(f"| `{one.name}` | " + " | ".join(cells) + f" | {', '.join(one.aliases)} |")
    lines += ["", "## Sources", "", "| device | facts | source | looked up |", "|---|---|---|---|"]
    for one in devices:
        for source in dict.fromkeys(one.sources.values()):
            cells = [cell for cell, origin in one.sources.items() if origin == source]
            facts = ", ".join(cell + "?" * (cell in one.unverified) for cell in cells)
            lines.append(f"| `{one.name}` | {facts} | {source} | {one.checked.get(source, '')} |")
    lines += [
        "",
        "## Other devices",
        "",
        "`--hardware FILE.json` reads one device from a file. Only `memory_mib` is required; `kind` is `cuda`, `rocm`",
        "or `cpu` (a processor has no device context and no NCCL buffers).",
        "",
        "```json",
        '{"title": "our device", "kind": "cuda", "source": "measured 2026-05", "memory_mib": 65536,',
        ' "memory_gb_per_second": 1600, "dense_tflops": {"fp32": 40, "bf16": 320},',
        ' "links_gb_per_second": {"nvlink": 200, "pcie": 32, "network": 25}}',
        "```",
        "",
        "`fgcli plan --calibrate` adds `efficiency`: the shares of these rates that runs reached, the least",
        "seconds of an operator (`call_seconds`), and those of a step of a collective inside of a machine",
        "(`message_seconds`) and between machines (`network_seconds`).",
    ]
    return "\n".join(lines)


PAGES = {
    "hardware.md": hardware_page,
    "settings.md": settings_page,
    "templates.md": templates_page,
    "commands.md": commands_page,
    "errors.md": errors_page,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page is stale")
    options = parser.parse_args()
    stale = []
    for name, page in PAGES.items():
        text, file = page().rstrip("\n") + "\n", FOLDER / name
        if options.check:
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                stale.append(name)
            continue
        FOLDER.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if stale:
        print(f"stale: {', '.join(stale)}; run scripts/write_reference.py")
    return bool(stale)


if __name__ == "__main__":
    sys.exit(main())
