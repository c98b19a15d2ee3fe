#!/usr/bin/env bash
# Everything that the gate (.ci/run) leaves out, in parts of at most 20 minutes on two free cores.
#
#   scripts/extended_tests.sh                      all parts that have no result for this commit yet
#   scripts/extended_tests.sh --part NAME...       these parts, also if they have one
#   scripts/extended_tests.sh --list
#
# Logs and results are in .git/extended_tests/COMMIT. Exit code 1 if a part failed. As root it installs the tools that no
# registry package has (Slurm, sshd, a browser, bindfs) with apt-get; without them, their tests are skipped.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
unset PYTHONDONTWRITEBYTECODE

parts=(units trainer orchestrator inference families rl runs agents api tinker relay sandbox page nodes slurm bare chaos python-3.12 release)

need() {  # COMMAND PACKAGE...: install the packages if the command is missing
    [ -x "$(command -v "$1")" ] || [ -x "/usr/sbin/$1" ] && return
    { [ "$(id -u)" = 0 ] && apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${@:2}" >/dev/null; } ||
        echo "warning: ${*:2} could not be installed; the tests of $1 are skipped"
}
extended() { uv run --extra cpu python scripts/run_tests.py --extended -m "extended and not release" "$@"; }

run_part() {
    case $1 in
        units)
            need bindfs bindfs fuse3
            need tmux tmux
            extended tests/chaos tests/unit --ignore=tests/unit/{trainer,orchestrator,rollouts,evaluation,environments} --ignore=tests/unit/test_slurm.py
            ;;
        trainer) extended tests/unit/trainer tests/integration/{trainer,sft} ;;
        orchestrator) extended tests/unit/{orchestrator,rollouts,evaluation,environments} ;;
        inference) extended tests/integration/inference ;;
        families) extended tests/integration/families ;;
        rl) extended tests/integration/rl/shared_server tests/integration/rl/test_[a-l]*.py ;;
        runs) extended tests/integration/rl/test_[m-z]*.py ;;
        agents) extended tests/integration/agents ;;  # installs from PyPI and npm
        api) extended tests/integration/{api,delivery} ;;
        tinker | relay | sandbox) extended "packages/$1/tests" ;;
        page)
            need chromium chromium
            extended packages/page/tests
            ;;
        nodes)
            need sshd openssh-server openssh-client iproute2
            extended tests/integration/nodes
            ;;
        slurm)
            need slurmctld munge slurmctld slurmd slurm-client iproute2
            extended tests/integration/slurm tests/unit/test_slurm.py
            ;;
        bare) bare ;;
        chaos) uv run --extra cpu python tests/chaos/run.py --cases 8 --seed 177 ;;  # strikes at six kinds of processes
        python-3.12)
            # uv does not find pyenv's while another version is selected
            python=$(uv python find --system --no-python-downloads 3.12 ||
                printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12.*/bin/python | sort -V | tail -n 1)
            [ -x "$python" ] || python=3.12
            export UV_PROJECT_ENVIRONMENT=$output/venv
            uv sync --python "$python" --extra cpu --locked --quiet &&
                uv run --python "$python" --extra cpu python scripts/run_tests.py -m "not slow"
            ;;
        release) uv run --extra cpu python scripts/run_tests.py --extended -m release ;;
    esac
}

bare() {  # both commands of README.md where nothing but git and uv is installed
    [ "$(id -u)" = 0 ] || { echo "warning: only root can hide system packages"; return 1; }
    .ci/without_system_tools uv run --extra cpu rl @ configs/reverse_text/cpu.toml --output-dir "$output/run" &&
        uv run --extra cpu python scripts/check_reward.py "$output/run" --at-least 0.9 &&
        .ci/without_system_tools uv run --extra cpu doctor --sandbox &&
        .ci/without_system_tools uv run --extra cpu pytest
}

asked=()
case ${1:-} in
    '') ;;
    --list) printf '%s\n' "${parts[@]}" && exit ;;
    --part) asked=("${@:2}") ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
[ "${1:-}" != --part ] || [ ${#asked[@]} -gt 0 ] || { echo "error: --part needs a name; see --list" >&2; exit 2; }
for part in "${asked[@]}"; do
    [[ " ${parts[*]} " == *" $part "* ]] || { echo "error: there is no part '$part'; see --list" >&2; exit 2; }
done

folder=$(git rev-parse --git-common-dir)/extended_tests/$(git rev-parse HEAD)
if [ -n "$(git status --porcelain)" ]; then  # other results each time
    folder+=-changed
    [ ${#asked[@]} -gt 0 ] || rm -rf "$folder"
fi
mkdir -p "$folder"
output=$(mktemp -d)
trap 'rm -rf "$output"' EXIT
uv sync --extra cpu --locked --compile-bytecode --quiet || exit
for part in "${asked[@]:-${parts[@]}}"; do
    [ ${#asked[@]} -eq 0 ] && [ -f "$folder/$part.result" ] && continue
    start=$SECONDS
    echo "part $part: log $folder/$part.log"
    rm -rf "${output:?}"/* "$folder/$part.result"
    (run_part "$part") >"$folder/$part.log" 2>&1 </dev/null
    echo "exit code $?, $((SECONDS - start)) s, $(grep -a ' in [0-9.]*s' "$folder/$part.log" | tail -n 1 | tr -d =)" >"$folder/$part.result"
done

code=0
for part in "${parts[@]}"; do
    [ -f "$folder/$part.result" ] || continue
    printf '%-12s %s\n' "$part" "$(cat "$folder/$part.result")"
    grep -q '^exit code 0,' "$folder/$part.result" || code=1
done
exit $code
