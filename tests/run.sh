#!/usr/bin/env bash
# Sets up the project (once), then lints and runs the tests. Arguments go to pytest.
#
#   tests/run.sh             everything
#   tests/run.sh --fast      without the tests marked slow (under 3 minutes)
#
# As root on Debian or Ubuntu it also installs the packages below, for tests that train over several hosts inside
# this machine. Where that fails, those tests are skipped and say why.
set -euo pipefail
packages=(openssh-server pdsh iproute2 procps openmpi-bin mpich slurm-wlm munge)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
./launch.sh --setup_only

is_installed() {
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

install_packages() {
    local log=$root/.venv/.setup/packages.log policy=/usr/sbin/policy-rc.d missing=() package
    for package in "${packages[@]}"; do
        is_installed "$package" || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "Installing for the tests with several hosts: ${missing[*]}"
    # No daemon of a package is to start on this machine.
    if [ ! -e $policy ]; then
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
        trap "rm -f $policy" EXIT
    fi
    export DEBIAN_FRONTEND=noninteractive
    local options=(-q -y -o DPkg::Lock::Timeout=60)
    if ! { timeout 120 apt-get "${options[@]}" update &&
        timeout 300 apt-get "${options[@]}" install --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
        echo "They could not be installed, and tests that need them are skipped. See $log"
    fi
}

if [ "${1-}" != --fast ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    (install_packages)
fi

selection=()
if [ "${1-}" = --fast ]; then
    shift
    selection=(-m "not slow")
fi
bin=$root/.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
exec "$bin/python" -m pytest ${selection[@]+"${selection[@]}"} "$@"
