#!/usr/bin/env bash
# Sets up this project once (.venv, with the versions of constraints.txt), then checks and starts a training job.
#
#   ./launch.sh [options]                            see ./launch.sh --help
#   ./launch.sh --setup_only                         make .venv, start nothing
#   ./launch.sh --setup_tests                        the same with the tools for tests
#
# Needs a shell and Python >= 3.10. Exit codes: 0 finished, 1 failed, 2 the job description is wrong, 3 stopped
# with a checkpoint saved, or before anything was started.
set -euo pipefail

# A request to stop before anything has been started.
leave() {
    echo "Stopped before anything was started." >&2
    exit 3
}
trap leave INT TERM USR1 HUP

# Also where this was called by a link to it.
root=$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")

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
# Beside this shell, which would otherwise keep a request to stop until the set-up has ended.
setup="" stopped="" code=0
trap 'stopped=yes; [ -z "$setup" ] || kill -TERM "$setup" 2>/dev/null || true' INT TERM USR1 HUP
tools=()
[ "${1-}" != --setup_tests ] || tools=(--tests)
"$python" -I "$root/pipeline/launch/install.py" "$root" ${tools[@]+"${tools[@]}"} &
setup=$!
[ -z "$stopped" ] || kill -TERM "$setup" 2>/dev/null || true
wait "$setup" || code=$?
trap leave INT TERM USR1 HUP
if [ -n "$stopped" ]; then
    wait "$setup" || true # it ends what it has begun
    leave
fi
if [ "$code" -ne 0 ]; then
    exit "$code"
fi
case "${1-}" in
--setup_only | --setup_tests) exit 0 ;;
esac
# The versions of constraints.txt and nothing else, on every host: no modules of the shell's Python, of the
# user's own folder, nor of the current one, whose random.py the launcher would import. An empty value is none,
# and replaces what another host's login sets.
for name in PYTHONPATH PYTHONHOME PYTHONSTARTUP PYTHONUSERBASE; do
    [ -z "${!name-}" ] || echo "note: $name=${!name} is not used: only the packages in $root/.venv are." >&2
    export "$name="
done
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1
# By its path: -m would prefer a folder "pipeline" in the current folder, such as another clone's.
exec "$root/.venv/bin/python" "$root/pipeline/launch/launch.py" "$@"
