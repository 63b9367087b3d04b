"""A colcon workspace on the ROS wheels, holding this checkout as its one package."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE = ROOT / 'build' / 'colcon'
PREFIX = Path(sys.prefix)


def environment() -> dict[str, str]:
    """Copy this process's environment as a fresh shell with the venv active has it."""
    dropped = ('LD_LIBRARY_PATH', 'PYTHONPATH', '_ROS_WHEELS_BOOTSTRAP_COMPLETE', 'ROS_DISTRO')
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return env | {
        'AMENT_PREFIX_PATH': str(PREFIX), 'CMAKE_PREFIX_PATH': str(PREFIX),
        'PATH': f'{PREFIX / "bin"}{os.pathsep}{env.get("PATH", os.defpath)}',
        'COLCON_LOG_PATH': str(WORKSPACE / 'log'),
        # Objects are those of the pip build: same sources, same flags, and paths of the same depth
        # below ROOT.
        'PYTHONHASHSEED': '0',
        'CMAKE_C_COMPILER_LAUNCHER': 'ccache', 'CMAKE_CXX_COMPILER_LAUNCHER': 'ccache',
        'CCACHE_BASEDIR': str(ROOT), 'CCACHE_NOHASHDIR': '1',
        'CCACHE_DIR': env.get('CCACHE_DIR') or str(ROOT / 'build' / 'ccache'),
    }


def build(name: str, symlink: bool) -> Path:
    """Run ``colcon build`` with Ninja into an own install space; a second run is incremental.

    The build folder is one for both forms: what is generated and compiled does not depend on how
    it is installed, and most of a build is generating.

    :raises AssertionError: with the end of colcon's output when the build fails.
    """
    source = WORKSPACE / 'src' / 'flashrt_ros'
    source.parent.mkdir(parents=True, exist_ok=True)
    if not source.is_symlink():
        source.symlink_to(ROOT)
    install = WORKSPACE / f'install_{name}'
    options = ['--symlink-install'] if symlink else []
    build_base = ROOT / 'build' / 'colcon_build'
    # One form keeps the generated Python here as a folder, the other as a link in its place.
    shutil.rmtree(build_base / 'flashrt_ros' / 'ament_cmake_python', ignore_errors=True)
    done = subprocess.run(
        ['colcon', 'build', '--base-paths', 'src', '--install-base', str(install),
         '--build-base', str(build_base), *options,
         '--event-handlers', 'console_cohesion+', '--cmake-args',
         # CMake keeps what the other form said; colcon says it for symbolic links only.
         f'-DAMENT_CMAKE_SYMLINK_INSTALL={int(symlink)}',
         '-G', 'Ninja', '-DCMAKE_BUILD_TYPE=Release', f'-DPython3_EXECUTABLE={sys.executable}',
         f'-DCMAKE_PROJECT_INCLUDE={ROOT / "cmake" / "pip_wheels.cmake"}'],
        cwd=WORKSPACE, env=environment(), text=True, capture_output=True)
    assert done.returncode == 0, f'{done.stdout[-6000:]}\n{done.stderr[-3000:]}'
    return install / 'flashrt_ros'


def site_packages(prefix: Path) -> Path:
    """Find the Python folder of an installed package."""
    return next(prefix.glob('lib/python3*/site-packages'))


def python(prefix: Path, code: str) -> str:
    """Run ``code`` in a fresh process from outside the checkout, against the install space."""
    env = environment()
    env['PYTHONPATH'] = str(site_packages(prefix))
    env['AMENT_PREFIX_PATH'] = f'{prefix}{os.pathsep}{PREFIX}'
    # The wheels' start-up hook then adds the venv's libraries to ours.
    env['LD_LIBRARY_PATH'] = str(prefix / 'lib')
    done = subprocess.run([sys.executable, '-c', code], cwd='/', env=env, text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
