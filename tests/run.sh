#!/usr/bin/env bash
# Sets up the project (once), then lints and runs the tests. Arguments go to pytest.
#
#   tests/run.sh             everything
#   tests/run.sh --fast      without the tests marked slow (under 3 minutes)
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
./launch.sh --setup_only

selection=()
if [ "${1-}" = --fast ]; then
    shift
    selection=(-m "not slow")
fi
bin=$root/.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
exec "$bin/python" -m pytest ${selection[@]+"${selection[@]}"} "$@"
