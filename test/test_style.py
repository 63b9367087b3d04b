"""House style as tests: linters, types, layering, sizes, and what must never be committed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
import re
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 500
TEXT = {'.py', '.md', '.rst', '.txt', '.in', '.toml', '.cfg', '.xml', '.yaml', '.json', '.cmake',
        '.sh', '.msg', '.srv', '.action', ''}


def committed() -> list[Path]:
    """List the files git tracks or would track; without git, all outside .venv and build."""
    listed = subprocess.run(
        ['git', 'ls-files', '--cached', '--others', '--exclude-standard', '-z'],
        cwd=ROOT, text=True, capture_output=True)
    if listed.returncode == 0:
        files = [ROOT / name for name in listed.stdout.split('\0') if name]
    else:
        skipped = {'.venv', 'build', 'install', 'log', 'out', '.git'}
        files = [p for p in ROOT.rglob('*') if p.relative_to(ROOT).parts[0] not in skipped]
    return [path for path in files if path.is_file()]


def sources(*folders: str) -> list[Path]:
    """List the committed Python files below these folders of the root."""
    return sorted(path for path in committed() if path.suffix == '.py'
                  and path.relative_to(ROOT).parts[0] in folders)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Give line and full name of every import, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def findings(pattern: str, files: list[Path]) -> list[str]:
    """Give ``file:line: text`` for each line matching ``pattern``."""
    found = []
    for path in files:
        for number, line in enumerate(path.read_text(errors='replace').splitlines(), 1):
            if re.search(pattern, line):
                found.append(f'{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}')
    return found


def test_ruff_finds_nothing() -> None:
    command = [sys.executable, '-m', 'ruff', 'check', '--output-format', 'concise', '.']
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_mypy_passes_on_the_core() -> None:
    done = subprocess.run([sys.executable, '-m', 'mypy'], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_core_imports_no_ros() -> None:
    ros = re.compile(r'^(rclpy|rosbag|rosidl|rcl_|launch|ament|flashrt_ros)|_(msgs|interfaces)$')
    found = [f'{path.relative_to(ROOT)}:{line}: {name}' for path in sources('flashrt_core')
             for line, name in imports(path) if ros.search(name.split('.')[0])]
    assert not found


def test_the_core_loads_where_ros_cannot_be_imported() -> None:
    code = (
        'import sys\n'
        'class Blocked:\n'
        '    def find_spec(self, name, path=None, target=None):\n'
        '        root = name.split(".")[0]\n'
        '        if root in ("rclpy", "flashrt_ros", "launch") or root.endswith("_msgs"):\n'
        '            raise ImportError(f"blocked: {name}")\n'
        'sys.meta_path.insert(0, Blocked())\n'
        'import importlib, pkgutil, flashrt_core\n'
        'for module in pkgutil.walk_packages(flashrt_core.__path__, "flashrt_core."):\n'
        '    if not module.name.endswith("__main__"):\n'
        '        importlib.import_module(module.name)\n')
    done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_the_ros_side_never_touches_device_pointers() -> None:
    found = [f'{path.relative_to(ROOT)}:{line}: {name}' for path in sources('flashrt_ros')
             for line, name in imports(path) if name.split('.')[0] in ('cuda', 'triton')]
    found += findings(r'\.data_ptr\(', sources('flashrt_ros'))
    assert not [line for line in found if not line.startswith('flashrt_ros/doctor')]


def test_no_source_file_is_longer_than_500_lines() -> None:
    long = [f'{path.relative_to(ROOT)}: {count}' for path in sources('flashrt_core', 'flashrt_ros')
            if (count := len(path.read_text().splitlines())) > LONGEST_FILE]
    assert not long


@pytest.mark.parametrize(('what', 'pattern'), [
    ('pickle', r'^\s*(import|from) (pickle|cPickle|dill|cloudpickle|joblib)\b'),
    ('torch.load', r'\btorch\.load\('),
    ('wall-clock time', r'\btime\.time\(\)'),
    ('unfinished work', r'\b(TODO|FIXME|XXX)\b'),
])
def test_the_sources_are_free_of(what: str, pattern: str) -> None:
    assert not findings(pattern, sources('flashrt_core', 'flashrt_ros', 'launch')), what


def test_no_committed_text_names_a_folder_of_somebodys_machine_or_an_index_host() -> None:
    text = [path for path in committed() if path.suffix in TEXT and path != Path(__file__)]
    # Recorded boards of the doctor's tests have a user named user.
    assert not findings(r'(?<![\w.~])/(root|work|Users|home/(?!user/))/?\w', text)
    assert not findings(r'pypi\.org|pythonhosted\.org|file:///', text)


def test_the_ament_marker_is_there_and_empty() -> None:
    marker = ROOT / 'resource' / 'flashrt_ros'
    assert marker.is_file() and marker.stat().st_size == 0
