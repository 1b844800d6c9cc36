#!/usr/bin/env bash
# Sets up the project (once), then lints and runs tests. What follows the tier goes to pytest.
#
#   tests/run.sh --core      the heart of it: order of imports, base, job, model, all four kinds of parallelism
#                            at once, two mutations, one run that is stopped and resumed (90 seconds)
#   tests/run.sh --fast      all tests but those marked slow or multihost (4 minutes)
#   tests/run.sh             all tests but those marked repeats; what CI runs (20 minutes on two cores)
#   tests/run.sh --all       all tests: further pairs of layouts, the benchmarks' own runs
#
# Tests run on one process more than there are cores, at most four; with "-n 0" on one, in the order of the files.
#
# As root on Debian or Ubuntu it also installs the packages below, for tests that train over several hosts inside
# this machine. Where that fails, those tests are skipped and say why.
set -euo pipefail
packages=(openssh-server pdsh iproute2 procps openmpi-bin mpich slurm-wlm munge)

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
./launch.sh --setup_tests

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

tier=default
case "${1-}" in
--core | --fast | --all)
    tier=${1#--}
    shift
    ;;
esac
selection=()
case $tier in
core)
    selection=(
        -m "not slow" tests/test_import_order.py tests/test_dependencies.py tests/base tests/job tests/model
        "tests/parity/test_layouts.py::test_all_four_axes_at_once_train_as_one_process"
        "tests/parity/test_mutations.py::test_mutation_is_noticed[no_sum_after_row_parallel-tp2 zero0]"
        "tests/parity/test_mutations.py::test_mutation_is_noticed[mean_of_rank_means-dp2 zero0]"
        "tests/end_to_end/test_exact_resume.py::test_stopped_and_resumed_is_equal_to_the_last_bit[zero 1, dropout]"
    )
    ;;
fast) selection=(-m "not slow and not multihost") ;;
all) selection=(--repeats) ;;
esac

case $tier in
default | all)
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        (install_packages)
    fi
    ;;
esac
bin=$root/.venv/bin
"$bin/ruff" check .
"$bin/ruff" format --check .
exec "$bin/python" -m pytest -n auto ${selection[@]+"${selection[@]}"} "$@"
