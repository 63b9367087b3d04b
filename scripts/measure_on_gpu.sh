#!/bin/sh
# Checks and measures on one GPU what the README shows, into JSON files below OUT:
#   scripts/measure_on_gpu.sh STAGE OUT [STAGE OUT ...]
# Stages, in an order that fails early, with the seconds that each took on an H200 with 16 cores,
# or where it says about, by its parts; those of the planner begin nothing after nine minutes:
#   tests       about 400: 1,000 restores of each policy and 512 drafted tokens of a planner at
#               real width, at their full counts; FP8 of a policy at real size; all of the core
#   ros_tests   about 100: those that start nodes
#   capsule     69: capsule verbs beside their copy floors
#   robot       about 210: ticks and resets over real ROS, a tiny and a real-size Pi0
#   vla         about 500: Pi0 in bf16 and FP8 at 3, 1 and 2 views, with guided and reused ticks
#   pi05        about 170: Pi0.5 in bf16 at 3, 1 and 2 views
#   peers       about 150: transformers' PI0 eager and compiled, 3 views
#   llm         about 350: the planner of 27B sizes, every table in bf16; 173 to its sizes
#   llm_fp8     about 150: first token, decode and costs in FP8; 99 without the logits
#   bringup     159: both on one GPU
# PYTHON and WORKERS (CPU cores of the tests) may be set. The packages must be importable; where
# there is no network, install their wheels by pip with --no-index.
set -eu
cd "$(dirname -- "$0")/.."
python=${PYTHON:-python3} workers=${WORKERS:-10}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

failed=0

call() { # a failure is told at the end, what is left is run all the same
    $python -m "$@" || failed=1
}

bench() { # name and options; OUT is set by the loop
    call flashrt_core.bench "$@" --device cuda --out "$out"
}

measure() {
    case $1 in
    tests)
        call pytest -q -m gpu --stress 1 test/core/test_capsule_store.py \
            test/core/test_policies_pi0_capsule.py test/core/test_planners_real_size.py
        call pytest -q -s -m gpu test/core/test_policies_pi0_fp8.py
        call pytest -q -m gpu -n "$workers" --stress 0.1 test/core ;;
    ros_tests) call pytest -q -m gpu test/ros ;;
    capsule) bench capsule ;;
    robot)
        bench tick --seconds 60
        bench reset --count 1000
        bench tick --seconds 60 --policy-config pi0 --robot tabletop --tick-period-steps 4 ;;
    vla) bench vla --views 3 1 2 --precision bf16 fp8 --variants ;;
    pi05) bench vla --config pi05 --views 3 1 2 ;;
    peers) bench vla --views 3 --reference eager compiled ;;
    llm) bench llm --limit-s 540 ;;
    llm_fp8) bench llm --precision fp8 --tables ttft decode cost precision --limit-s 540 ;;
    bringup)
        bench bringup --policy-config pi0 --planner-config qwen3_5_9b --solo-seconds 20 ;;
    *)
        echo "unknown stage $1; the head of $0 lists them" >&2
        exit 2 ;;
    esac
}

if [ $# -lt 2 ] || [ $(($# % 2)) -ne 0 ]; then
    echo "give STAGE OUT, once or more; the head of $0 lists the stages" >&2
    exit 2
fi
while [ $# -gt 0 ]; do
    out=$2
    echo "== $1"
    measure "$1"
    shift 2
done
exit $failed
