#!/bin/sh
# Trains the two small models on one GPU, each command below ten minutes:
#   scripts/train_on_gpu.sh policy OUT [MINUTES]    generation, training and DAgger at once
#   scripts/train_on_gpu.sh planner OUT [MINUTES]
#   scripts/train_on_gpu.sh evaluate OUT            both, with intervals
#   scripts/train_on_gpu.sh controls OUT            what capsules buy
#   scripts/train_on_gpu.sh ship OUT                into resource/models, with cards; needs no GPU
# OUT has or gets policy/ and planner/. PYTHON and WORKERS (CPU cores) may be set.
set -eu
if [ $# -lt 2 ]; then
    echo "usage: $0 policy|planner|evaluate|controls|ship OUT [MINUTES]" >&2
    exit 2
fi
what=$1 out=$(realpath -m -- "$2")
cd "$(dirname -- "$0")/.."
python=${PYTHON:-python3} workers=${WORKERS:-15}
export OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
case $what in
policy)
    $python -m flashrt_core.tabletop.train_policy all --out "$out/policy" --device cuda \
        --workers "$workers" --within "${3:-9.2}" ;;
planner)
    $python -m flashrt_core.tabletop.train_planner train --out "$out/planner" --device cuda \
        --renamed 0.5 --lists 0.5 --deep 0.3 --within "${3:-6.8}" ;;
evaluate)
    $python -m flashrt_core.tabletop.evaluate --policy "$out/policy" --planner "$out/planner" \
        --workers "$workers" --json "$out/scores.json"
    $python -m flashrt_core.tabletop.train_planner evaluate --out "$out/planner" --device cuda \
        --json "$out/plans.json" ;;
controls)
    $python -m flashrt_core.tabletop.controls --policy "$out/policy" --planner "$out/planner" \
        --device cuda --workers "$workers" --json "$out/controls.json" ;;
ship)
    $python -m flashrt_core.tabletop.model_cards --policy "$out/policy" \
        --planner "$out/planner" --scores "$out/scores.json" "$out/plans.json" ;;
*)
    echo "unknown command $what; give policy, planner, evaluate, controls or ship" >&2
    exit 2 ;;
esac
