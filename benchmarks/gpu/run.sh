#!/usr/bin/env bash
# Everything that is measured on one GPU without vLLM, a scenario after the other, each at most 9 minutes:
#
#   bash benchmarks/gpu/run.sh [scenario ...]        # python and output: PYTHON=python OUT=benchmarks/results
#
# Writes $OUT/gpu_pieces.json and $OUT/gpu_trainer_step.json, and prints the table at the end.
set -uo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
out=${OUT:-benchmarks/results}
read -ra python <<< "${PYTHON:-uv run --extra gpu python}"
mkdir -p "$out"

timeout 300 "${python[@]}" benchmarks/gpu/pieces.py --json "$out/gpu_pieces.json"

names=("$@")
if ((${#names[@]} == 0)); then
    mapfile -t names < <("${python[@]}" benchmarks/gpu/trainer_step.py --list | cut -d' ' -f1)
fi
failed=0
for name in "${names[@]}"; do
    echo "== $name"
    timeout 540 "${python[@]}" benchmarks/gpu/trainer_step.py --scenario "$name" --json "$out/gpu_trainer_step.json" \
        || failed=1
done
"${python[@]}" benchmarks/gpu/trainer_step.py --table --json "$out/gpu_trainer_step.json"
exit $failed
