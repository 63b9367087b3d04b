#!/bin/sh
# Makes .venv complete: finds a Python that can, then bootstrap.py does the work. Seconds when nothing changed.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
check='import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))'
if [ -n "$PYTHON" ] && ! "$PYTHON" -c "$check" >/dev/null 2>&1; then
  echo "bootstrap: PYTHON is $PYTHON, which is no Python 3.11 or 3.12 with venv; name one, or leave PYTHON out." >&2
  exit 1
fi
for python in "$PYTHON" "$here/../.venv/bin/python" python3.11 python3.12 python3; do
  if [ -n "$python" ] && "$python" -c "$check" >/dev/null 2>&1; then
    exec "$python" "$here/bootstrap.py" "$@"
  fi
done
echo 'bootstrap: no Python 3.11 or 3.12 with venv was found.' >&2
echo '  Ubuntu 24.04, Debian 12: apt install python3 python3-venv python3-dev' >&2
echo '  or name one: PYTHON=/path/to/python3.11 make demo' >&2
exit 1
