#!/usr/bin/env bash
# Sets up this project once (.venv, with the versions of constraints.txt), then checks and starts a training job.
#
#   ./launch.sh [launcher options] [job options]     see ./launch.sh --help
#   ./launch.sh --setup_only                         make .venv, start nothing
#
# Needs a shell and Python >= 3.10. Exit codes: 0 finished, 1 failed, 2 the job description is wrong, 3 stopped
# with a checkpoint saved.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

# Prints the first Python that is new enough and can make virtual environments.
find_python() {
    local candidate old="" incomplete=""
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        command -v "$candidate" >/dev/null || continue
        if ! "$candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            old=$candidate
        elif ! "$candidate" -I -c 'import venv, ensurepip' 2>/dev/null; then
            incomplete=$candidate
        else
            echo "$candidate"
            return 0
        fi
    done
    if [ -n "$incomplete" ]; then
        echo "error: $incomplete cannot make virtual environments (its venv and ensurepip modules are missing)." >&2
        echo "On Debian and Ubuntu: apt-get install python3-venv" >&2
    elif [ -n "$old" ]; then
        echo "error: Python 3.10 or newer is needed; $old is $("$old" -V 2>&1)." >&2
    else
        echo "error: Python 3.10 or newer is needed; there is no python3 on the PATH." >&2
    fi
    return 1
}

python=$(find_python)
"$python" -I "$root/pipeline/cluster/install.py" "$root"
if [ "${1-}" = --setup_only ]; then
    exit 0
fi
# By its path: -m would prefer a folder "pipeline" in the current folder, such as another clone's.
exec "$root/.venv/bin/python" "$root/pipeline/cluster/launch.py" "$@"
