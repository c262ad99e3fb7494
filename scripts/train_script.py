"""Trains a config under `python`, `torchrun` or `accelerate launch`.

    python scripts/train_script.py -p projects/tiny_llama tiny.yaml --set trainer_args.max_steps=10
    torchrun --nproc_per_node 4 scripts/train_script.py -p projects/parallel ddp.yaml

Equivalent to `fgcli -p DIR -t CONFIG train [options]`. A launcher runs this script in each process.
"""

from __future__ import annotations

import argparse
import os
import sys

# So that a clone works without an installation.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from forgather.cli.main import main  # noqa: E402


def command_line(arguments: list[str]) -> list[str]:
    """Returns the equivalent arguments of `fgcli`."""
    parser = argparse.ArgumentParser(description="train a config", allow_abbrev=False)
    parser.add_argument(
        "-p", "--project", metavar="DIR", help="project folder (default: nearest above the working folder)"
    )
    parser.add_argument("config", metavar="CONFIG", help="name of the config, with or without .yaml")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="options of the config, --set PATH=VALUE, --dry-run")
    known = parser.parse_args(arguments)
    project = ["-p", known.project] if known.project else []
    return [*project, "-t", known.config, "train", *known.options]


if __name__ == "__main__":
    sys.exit(main(command_line(sys.argv[1:])))
