"""The pip build: runs the CMake install that colcon runs and packs the result into a wheel."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys

from setuptools import Distribution
from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent


class BinaryDistribution(Distribution):
    """A distribution with compiled type support, so the wheel is tagged for this platform."""

    def has_ext_modules(self) -> bool:
        return True


class BuildWithCMake(build_py):
    """Python and type support go to site-packages; lib and share become data files."""

    def run(self) -> None:
        # Modules that the sources no longer have must not be packed again.
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        scratch = Path(self.get_finalized_command('build').build_temp).resolve()
        stage = scratch / 'stage'
        shutil.rmtree(stage, ignore_errors=True)
        cmake_install(scratch / 'cmake', stage)
        site = next(stage.glob('lib/python*/site-packages'))
        lib = Path(self.build_lib)
        for src in site.rglob('*'):
            rel = src.relative_to(site)
            skip = '__pycache__' in rel.parts or rel.parts[0].endswith('.egg-info')
            if src.is_dir() or skip or src.suffix == '.c':
                continue
            (lib / rel).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(src, lib / rel)
        shutil.rmtree(site)
        data: dict[str, list[str]] = {}
        for src in sorted(stage.rglob('*')):
            if src.is_file():
                data.setdefault(str(src.parent.relative_to(stage)), []).append(str(src))
        self.distribution.data_files = sorted(data.items())


def cmake_install(build: Path, stage: Path) -> None:
    """Configure, build and install into `stage` against the ROS of this interpreter's prefix."""
    prefix = os.environ.get('AMENT_PREFIX_PATH') or sys.prefix
    path = os.path.join(sys.prefix, 'bin') + os.pathsep + os.environ.get('PATH', os.defpath)
    # The generators print sets: with a fixed seed the same messages give the same sources again.
    env = dict(os.environ, AMENT_PREFIX_PATH=prefix, PATH=path, PYTHONHASHSEED='0')
    if shutil.which('ccache', path=path):
        env |= {'CMAKE_C_COMPILER_LAUNCHER': 'ccache', 'CMAKE_CXX_COMPILER_LAUNCHER': 'ccache',
                'CCACHE_BASEDIR': str(HERE), 'CCACHE_NOHASHDIR': '1',
                'CCACHE_DIR': env.get('CCACHE_DIR') or str(HERE / 'build' / 'ccache')}
    cmake = shutil.which('cmake', path=path)
    if not cmake:
        raise SystemExit('cmake is needed to build the ROS interfaces: pip install cmake ninja')

    def run(*args: object) -> None:
        subprocess.run([cmake, *map(str, args)], check=True, env=env)

    generator = ('-G', 'Ninja') if shutil.which('ninja', path=path) else ()
    run('--fresh', '-S', HERE, '-B', build, *generator,
        f'-DCMAKE_INSTALL_PREFIX={stage}', '-DCMAKE_BUILD_TYPE=Release', '-DBUILD_TESTING=OFF',
        f'-DCMAKE_PREFIX_PATH={prefix.replace(os.pathsep, ";")}',
        f'-DPython3_EXECUTABLE={sys.executable}', '-DPython3_FIND_VIRTUALENV=ONLY',
        f'-DCMAKE_PROJECT_INCLUDE={HERE / "cmake" / "pip_wheels.cmake"}',
        '-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../../..')
    run('--build', build, '--parallel', os.cpu_count() or 1)
    run('--install', build)


setup(
    python_requires='>=3.11',
    distclass=BinaryDistribution,
    cmdclass={'build_py': BuildWithCMake},
)
