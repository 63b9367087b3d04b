"""Run one bench: ``python -m flashrt_core.bench NAME [options]``; without a name, list them."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import importlib
from pathlib import Path
import pkgutil
import sys

import flashrt_core.bench
from flashrt_core.command_line import make_folder
from flashrt_core.command_line import run


def names() -> list[str]:
    """Return the benches: the public modules beside this one."""
    return sorted(name for _, name, _ in pkgutil.iter_modules(flashrt_core.bench.__path__)
                  if not name.startswith('_'))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and report; return the exit status: 0 done, 1 refused with a reason, 2 usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    arguments = parse(argv)
    return run(arguments.name, lambda: _measure(arguments, argv), refused=1)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a bench, its name among them."""
    parser = argparse.ArgumentParser(prog='python -m flashrt_core.bench', description=__doc__)
    commands = parser.add_subparsers(dest='name', required=True)
    # Only the named bench is imported: another one's missing package must not stop it.
    chosen = next((word for word in argv if word in names()), None)
    for name in names():
        command = commands.add_parser(name)
        command.add_argument('--out', type=Path, default=Path('bench_results'),
                             help='directory of the JSON file (default: %(default)s)')
        if name == chosen:
            importlib.import_module(f'flashrt_core.bench.{name}').add_arguments(command)
    return parser.parse_args(argv)


def _measure(arguments: argparse.Namespace, argv: Sequence[str]) -> int:
    make_folder(arguments.out, 'directory of the JSON file')  # told before the work
    report = importlib.import_module(f'flashrt_core.bench.{arguments.name}').run(arguments)
    print(report.table())
    stamp = report.date.replace(':', '').replace('+0000', 'Z')
    path = arguments.out / f'{arguments.name}-{stamp}.json'
    report.write(path, ['python', '-m', 'flashrt_core.bench', *argv])
    print(f'\nwritten to {path}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
