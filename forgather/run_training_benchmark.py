"""`python -m forgather.run_training_benchmark` is `fgcli benchmark`."""

from __future__ import annotations

from forgather.planner.benchmark import benchmark

__all__ = ["benchmark"]

if __name__ == "__main__":
    import sys

    from forgather.cli.main import main

    sys.exit(main(["benchmark", *sys.argv[1:]]))
