# shellcheck shell=bash
# Sourced by the other scripts: makes the virtual environment and installs this package into it.
# Nothing is done again while the lock files, pyproject.toml and the C sources stay the same.
#
#   DSV41_VENV    where the environment lies (default: .venv in the repository)
#   PYTHON        interpreter that makes it (default: python3.11, else python3)

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)
venv=$(readlink -m "${DSV41_VENV:-$root/.venv}")

fail() {
    echo "$(basename "$0"): error: $*" >&2
    exit 1
}

environment() {
    local locks=("$root/requirements/cpu.lock" "$root/requirements/test.lock")
    local python=${PYTHON:-$(command -v python3.11 || command -v python3)}
    [[ -n $python ]] || fail "no python3.11 and no python3 on PATH; install Python 3.11"
    "$python" -c "" || fail "cannot run $python; name another interpreter in PYTHON"
    mkdir -p "$(dirname "$venv")"
    command -v flock >/dev/null || fail "flock is missing; install util-linux"
    exec 9>"$venv.lock" || fail "cannot write $venv.lock"
    flock --nonblock 9 || { echo "environment: waiting for another script that uses $venv"; flock 9; }
    local wanted
    wanted=$(echo "$root"; cat "${locks[@]}" "$root/pyproject.toml" "$root"/native/*.[ch] | sha256sum)
    if [[ -x $venv/bin/python && $(cat "$venv/.dsv41-installed" 2>/dev/null) == "$wanted" ]]; then
        echo "environment: $venv is up to date"
    else
        "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 13))' ||
            fail "$python is $("$python" --version 2>&1); Python 3.10 to 3.12 is needed, the lock is made for 3.11"
        if [[ ! -x $venv/bin/python || ! -x $venv/bin/pip ]]; then  # none, or one whose making was interrupted
            echo "environment: making $venv with $python"
            "$python" -m venv --clear "$venv" || fail "python -m venv failed; on Debian install python3-venv"
        fi
        rm -f "$venv/.dsv41-installed"
        echo "environment: installing ${locks[*]##*/} (about 3.4 GB, some minutes)"
        "$venv/bin/pip" install --quiet --no-deps -r "${locks[0]}" -r "${locks[1]}" || fail \
            "pip could not install the pinned packages. If it found no torch 2.13.0+cpu: that wheel is on PyTorch's" \
            "own CPU index (pytorch.org, 'Get Started'); name it in PIP_EXTRA_INDEX_URL or a folder in PIP_FIND_LINKS"
        echo "environment: installing this package"
        "$venv/bin/pip" install --quiet --no-deps --no-build-isolation -e "$root" || fail "this package did not install"
        echo "$wanted" >"$venv/.dsv41-installed"
    fi
    exec 9>&-
    # no look-ups on model hubs, no usage reports, one GiB of key-value cache: what a tiny model needs
    export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1}
}
