"""`python -m forgather` is `fgcli`, for a clone that was never installed."""

import sys

from forgather.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
