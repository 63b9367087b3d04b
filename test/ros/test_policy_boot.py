"""An executor that is given a checkpoint, or none: what a newcomer reads in its log."""

from collections.abc import Iterator
from pathlib import Path
import re

import pytest
from safetensors.torch import save_file
import torch

from flashrt_core.checkpoints import pi0_targets
from flashrt_core.policies.pi0 import load_config
from flashrt_ros.processes import ProcessGroup

pytestmark = [pytest.mark.ros, pytest.mark.slow]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with ProcessGroup(tmp_path / 'log', env={'OMP_NUM_THREADS': '1'}) as made:
        yield made


def lerobot(name: str) -> str:
    name = name.replace('vision_tower.', 'vision_tower.vision_model.')
    name = re.sub(r'^vlm\.', 'paligemma_with_expert.paligemma.model.', name)
    return 'model.' + re.sub(r'^dit\.', 'paligemma_with_expert.gemma_expert.model.', name)


def write_checkpoint(folder: Path) -> Path:
    """Write a tiny Pi0 under the names that LeRobot publishes."""
    draw = torch.Generator().manual_seed(0)
    tensors = {
        lerobot(source.key): 0.02 * torch.randn(source.shape, generator=draw)
        for target in pi0_targets(load_config('tiny')) for source in target.sources}
    save_file(tensors, folder / 'model.safetensors')
    return folder


def test_a_checkpoint_is_loaded_after_its_memory_was_told_and_the_boot_tells_its_stages(
    group: ProcessGroup, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path)
    process = group.start('executor', params={'checkpoint': str(folder), 'device': 'cpu'})
    group.wait_for(lambda: 'ready after' in process.log(), 60, 'the executor to be ready')
    log = process.log()
    words = ['memory: ', 'loading took', 'binding took', 'capturing took', 'warming up took',
             'ready after']
    places = [log.index(word) for word in words]
    assert places == sorted(places)
    assert 'weights and tables' in log and 'are free' in log and 'random' not in log


def test_without_a_checkpoint_it_says_what_to_download_and_lives(group: ProcessGroup) -> None:
    process = group.start('executor', params={
        'policy': 'pi05', 'policy_config': '', 'checkpoint': '', 'device': 'cpu',
        'embodiment': 'embodiments/so101.yaml', 'fit_to_robot': True})
    group.wait_for(lambda: 'unconfigured now' in process.log(), 60, 'the refusal')
    log = process.log()
    assert 'hf download lerobot/pi05_base' in log and 'check the licence' in log
    assert 'memory: ' not in log and 'Traceback' not in log and process.running


def test_a_size_that_does_not_fit_is_refused_with_its_figures_before_loading(
    group: ProcessGroup, tmp_path: Path
) -> None:
    huge = tmp_path / 'huge.yaml'
    huge.write_text('base: tiny\nvocab: 40000000000\n')
    process = group.start('executor', params={
        'policy_config': str(huge), 'checkpoint': 'random', 'device': 'cpu'})
    group.wait_for(lambda: 'unconfigured now' in process.log(), 60, 'the refusal')
    assert re.search(r'\d+\.\d\d GiB do not fit, nothing was loaded', process.log())
    assert 'loading took' not in process.log()
    assert process.running
