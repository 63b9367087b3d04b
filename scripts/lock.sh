#!/bin/sh
# Pins requirements/*.in with the hashes of every file of each version; torch-cpu.txt and models.txt are kept by hand.
set -e
cd "$(dirname -- "$0")/../requirements"
export CUSTOM_COMPILE_COMMAND='make requirements'
for name in build ros runtime torch-cuda dev; do
  echo "requirements: $name"
  ../.venv/bin/pip-compile --quiet --generate-hashes --allow-unsafe --no-annotate --strip-extras \
    --no-emit-index-url --no-emit-find-links --no-emit-trusted-host "$@" "$name.in" -o "$name.txt"
done
