"""`HardwareSelector` under the name that other programs import, and `python -m forgather.hardware_selector`."""

from __future__ import annotations

from forgather.planner.selection import HardwareSelector

__all__ = ["HardwareSelector"]

if __name__ == "__main__":
    import sys

    from forgather.cli.main import main

    sys.exit(main(["select", *sys.argv[1:]]))
