#!/usr/bin/env bash
# Install prime-rl: uv if it is missing, the checkout, all locked packages; then check the installation.
#
#   bash scripts/install.sh                                       this checkout
#   bash install.sh --repository URL [--dir DIR] [--ref REF]      clone URL to DIR (default: ./prime-rl) first
#   --cpu, --gpu                                                  packages; default: gpu with an NVIDIA driver
#
# Needs git and Linux on x86-64, but no root rights. A second call changes nothing that is already there. uv is installed
# to ~/.local/bin. Exit code 0: ready, 1: a step or a check failed, 2: bad arguments or an unsupported machine.
set -Eeuo pipefail
trap 'exit 1' ERR # not the exit codes of git and uv
unset CDPATH      # `cd` would print the directory

usage() {
    cat << 'END'
usage: install.sh [--repository URL] [--dir DIR] [--ref REF] [--cpu | --gpu]
  --repository URL  clone from URL; not needed in a checkout
  --dir DIR         the checkout; default: the one that contains this script, or ./prime-rl
  --ref REF         branch, tag or commit to check out
  --cpu, --gpu      packages to install; default: gpu if there is an NVIDIA driver
END
}

fail() { # exit code, message
    echo "error: $2" >&2
    exit "$1"
}

count_gpus() {
    { nvidia-smi -L || find /dev -maxdepth 1 -name 'nvidia[0-9]*' -printf 'GPU\n'; } 2> /dev/null | grep -c '^GPU' || true
}

parse() {
    repository='' directory='' ref='' extra=''
    while (($#)); do
        case $1 in
            --cpu | --gpu) extra=${1#--} ;;
            --repository | --dir | --ref)
                [[ -n ${2:-} ]] || fail 2 "$1 needs a value"
                case $1 in --repository) repository=$2 ;; --dir) directory=$2 ;; --ref) ref=$2 ;; esac
                shift
                ;;
            -h | --help) usage && exit 0 ;;
            *) fail 2 "unknown argument '$1'; see --help" ;;
        esac
        shift
    done
}

is_checkout() {
    [[ -f $1/uv.lock ]] && grep -qx 'name = "prime-rl"' "$1/pyproject.toml" 2> /dev/null
}

find_checkout() {
    local own=${BASH_SOURCE[0]:-} # empty if bash reads the script from a pipe
    own=${own:+$(cd "$(dirname "$own")/.." && pwd)}
    if [[ -z $directory ]]; then
        directory=$PWD/prime-rl
        [[ -z $repository && -n $own ]] && is_checkout "$own" && directory=$own
    fi
    if ! is_checkout "$directory"; then
        [[ -n $repository ]] || fail 2 "$directory is not a checkout of prime-rl; clone one with --repository URL"
        [[ ! -e $directory || -z $(ls -A "$directory") ]] || fail 2 "$directory is not a checkout and not empty; remove what an interrupted clone has left, or choose another --dir"
        git clone --quiet "$repository" "$directory"
        is_checkout "$directory" || fail 2 "$repository does not contain prime-rl"
    fi
    cd "$directory"
    directory=$PWD
    if [[ -n $ref ]]; then
        git fetch --quiet origin "$ref" && ref=FETCH_HEAD
        git checkout --quiet --detach "$ref"
    fi
}

install_uv() {
    PATH=$PATH:$HOME/.local/bin
    if command -v uv > /dev/null; then return; fi
    echo "installing uv to ~/.local/bin"
    mkdir -p "$HOME/.local/bin"
    # pip uses the configured package index; --target also works where the system's Python is managed externally.
    if python3 -m pip install --quiet --upgrade --target "$HOME/.local/share/uv/pip" uv 2> /dev/null; then
        ln -sf "$HOME/.local/share/uv/pip/bin/uv" "$HOME/.local/bin/uv"
    else
        command -v curl > /dev/null || fail 1 "uv, python3-pip or curl is needed; see https://docs.astral.sh/uv"
        curl -LsSf https://astral.sh/uv/install.sh | UV_INSTALL_DIR=$HOME/.local/bin UV_NO_MODIFY_PATH=1 sh
    fi
    hash -r
    uv --version > /dev/null || fail 1 "uv was installed, but does not run"
}

main() {
    parse "$@"
    [[ $(uname -s) == Linux && $(uname -m) == x86_64 ]] || fail 2 "only Linux on x86-64 is supported, not $(uname -sm)"
    command -v git > /dev/null || fail 2 "git is not installed"
    [[ -n ${HOME:-} ]] || fail 2 "the variable HOME is not set"
    local path=$PATH gpus
    gpus=$(count_gpus)
    [[ -n $extra ]] || { ((gpus)) && extra=gpu || extra=cpu; }
    find_checkout
    install_uv
    echo "installing the $extra packages in $directory ($gpus GPUs found)"
    unset VIRTUAL_ENV # another environment that happens to be active
    uv sync --locked --extra "$extra" ||
        fail 1 "the packages could not be installed; if Python is the cause: 3.11 or 3.12 is needed, install it (apt-get install python3) or let uv download it"
    uv run --no-sync doctor --install || fail 1 "the installation does not work; fix the lines that begin with 'fail'"

    local recipe=configs/reverse_text/$extra.toml
    ((gpus == 1)) && [[ $extra == gpu ]] && recipe+=" --trainer-gpu-ids 0 --gpu-memory-utilization 0.5"
    echo
    echo "prime-rl is installed. Start a run with:"
    [[ :$path: == *:$HOME/.local/bin:* || $(command -v uv) != "$HOME/.local/bin/uv" ]] ||
        echo "  export PATH=$HOME/.local/bin:\$PATH"
    echo "  cd $(printf %q "$directory")"
    echo "  uv run --extra $extra rl @ $recipe"
}

main "$@" # last, so that an incomplete download runs nothing
