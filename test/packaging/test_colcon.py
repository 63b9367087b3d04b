"""colcon on the ROS wheels: a plain build and one with symbolic links."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import _colcon
import pytest

pytestmark = pytest.mark.slow

USE_MESSAGES = """
import flashrt_core, flashrt_ros
from flashrt_ros.msg import ActionChunk
from flashrt_ros.srv import Fork
from flashrt_ros.action import RunEpisode
from rclpy.serialization import deserialize_message, serialize_message
chunk = ActionChunk(epoch=7, actions=[0.5, -1.0], joint_names=['q1', 'q2'])
again = deserialize_message(serialize_message(chunk), ActionChunk)
assert again == chunk and len(Fork.Response(chunks=[chunk]).chunks) == 1
import flashrt_ros.msg
print(flashrt_ros.__file__, flashrt_core.__file__, flashrt_ros.msg.__file__)
"""


@pytest.fixture(scope='module')
def plain() -> Path:
    """Give the install prefix of ``colcon build``."""
    return _colcon.build('plain', symlink=False)


@pytest.fixture(scope='module')
def symlinked() -> Path:
    """Give the install prefix of ``colcon build --symlink-install``."""
    return _colcon.build('symlink', symlink=True)


def executables() -> set[str]:
    """Read the names of setup.cfg's console scripts."""
    config = configparser.ConfigParser()
    config.read(_colcon.ROOT / 'setup.cfg')
    lines = config['options.entry_points']['console_scripts'].splitlines()
    return {line.split('=')[0].strip() for line in lines if '=' in line}


def test_a_plain_build_brings_messages_that_serialize_in_a_fresh_process(plain: Path) -> None:
    for file in _colcon.python(plain, USE_MESSAGES).split():
        assert file.startswith(str(plain)), 'taken from elsewhere than the install space'


def test_a_symlinked_build_brings_messages_that_serialize_in_a_fresh_process(
        symlinked: Path) -> None:
    for file in _colcon.python(symlinked, USE_MESSAGES).split():
        assert file.startswith(str(symlinked)), 'taken from elsewhere than the install space'


@pytest.mark.parametrize('form', ['plain', 'symlinked'])
def test_every_executable_of_setup_cfg_is_installed_for_ros2_run(
        form: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(form) / 'lib' / 'flashrt_ros'
    names = {path.name for path in folder.iterdir() if path.is_file()}
    assert names == executables()
    assert all(os.access(folder / name, os.X_OK) for name in names)


@pytest.mark.parametrize('form', ['plain', 'symlinked'])
def test_launch_config_and_marker_are_installed(
        form: str, request: pytest.FixtureRequest) -> None:
    share = request.getfixturevalue(form) / 'share'
    for folder in ('launch', 'config'):
        source = _colcon.ROOT / folder
        files = [path for path in source.rglob('*') if path.suffix in {'.py', '.yaml', '.xml'}]
        for file in files:
            assert (share / 'flashrt_ros' / folder / file.relative_to(source)).is_file(), file
    assert (share / 'flashrt_ros' / 'package.xml').is_file()
    assert (share / 'ament_index/resource_index/packages/flashrt_ros').is_file()


def test_python_of_a_symlinked_build_is_the_source_itself(
        plain: Path, symlinked: Path) -> None:
    for module in ('flashrt_ros/__init__.py', 'flashrt_core/errors.py'):
        source = (_colcon.ROOT / module).resolve()
        assert (_colcon.site_packages(symlinked) / module).resolve() == source
        assert (_colcon.site_packages(plain) / module).resolve() != source
