"""`python -m forgather` runs `fgcli` from a clone that is not installed."""

import os
import sys

# `python -m` puts the working folder first on sys.path; a file such as json.py in a project would replace the standard
# library's module.
if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

# Our launchers set this value to make Python skip the working folder here; programs that the run starts must not
# inherit it.
if os.environ.get("PYTHONSAFEPATH") == "forgather":
    del os.environ["PYTHONSAFEPATH"]

from forgather.cli.main import main  # noqa: E402
from forgather.launcher_env import ENDS_WITH_PARENT, is_started_by_torchrun  # noqa: E402

if __name__ == "__main__" and ENDS_WITH_PARENT in os.environ:
    from forgather.launch.bound_process import end_with_parent

    end_with_parent()

if __name__ == "__main__" and is_started_by_torchrun(os.environ):
    from forgather.launch.bound_process import end_with_launcher

    end_with_launcher()

if __name__ == "__main__":
    sys.exit(main())
