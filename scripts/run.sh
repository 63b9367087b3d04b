#!/bin/sh
# Runs the venv's python in the environment that ROS on wheels needs: scripts/run.sh -m flashrt_ros.doctor
root=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd)
export AMENT_PREFIX_PATH="${AMENT_PREFIX_PATH:-$root/.venv}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
export PATH="$root/.venv/bin:$PATH"
export PYTHONUNBUFFERED=1
cd "$root" && exec "$root/.venv/bin/python" "$@"
