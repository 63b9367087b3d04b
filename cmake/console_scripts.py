"""Writes one executable per console script of setup.cfg: console_scripts.py SETUP_CFG FOLDER."""

import configparser
import pathlib
import shutil
import sys


def main(setup_cfg: str, folder: str) -> None:
    """Write FOLDER/NAME for each ``NAME = module:function`` line; FOLDER is replaced."""
    config = configparser.ConfigParser()
    config.read(setup_cfg)
    out = pathlib.Path(folder)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for line in config['options.entry_points']['console_scripts'].splitlines():
        if '=' not in line:
            continue
        name, target = (part.strip() for part in line.split('=', 1))
        module, function = target.split(':')
        script = out / name
        # env, not a fixed interpreter: the virtual environment active at run time wins.
        script.write_text(
            '#!/usr/bin/env python3\n'
            'import sys\n\n'
            f'from {module} import {function}\n\n'
            f'sys.exit({function}())\n')
        script.chmod(0o755)


if __name__ == '__main__':
    main(*sys.argv[1:])
