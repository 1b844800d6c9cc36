# The first that `python -m pipeline.X` reads, by whichever Python: an old one must understand it.
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    sys.exit(
        "error: Python 3.10 or newer is needed; "
        + sys.executable
        + " is Python "
        + sys.version.split()[0]
        + "."
    )

from importlib.util import find_spec

if find_spec("tyro") is None:
    sys.exit(
        "error: the packages of this project are not installed for " + sys.executable + ".\n"
        "./launch.sh --setup_only makes .venv with them; then source .venv/bin/activate."
    )
