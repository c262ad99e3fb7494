"""`python -m forgather` is `fgcli`, for a clone that was never installed."""

import os
import sys

# Python looks for modules in the working folder first: a project's own json.py must not stand in for the library's.
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

# A launcher of ours asked for the same; programs that the run starts are not asked.
if os.environ.get("PYTHONSAFEPATH") == "forgather":
    del os.environ["PYTHONSAFEPATH"]

from forgather.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
