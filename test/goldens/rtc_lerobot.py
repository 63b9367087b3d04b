"""Make the golden arrays of real-time chunking: ``python test/goldens/rtc_lerobot.py``.

Needs Python 3.12, ``lerobot==0.6.1`` and this repository's root in PYTHONPATH; runs in seconds on
a CPU. LeRobot's own processor leads a flow whose velocity is a formula, for each case of
``rtc_recipe.py``; what is kept is where the flow ends.
"""
from __future__ import annotations

from lerobot.configs import RTCAttentionSchedule
from lerobot.policies.rtc.configuration_rtc import RTCConfig
from lerobot.policies.rtc.modeling_rtc import RTCProcessor
import numpy as np
from rtc_recipe import ARRAYS
from rtc_recipe import CASES
from rtc_recipe import FLOW_STEPS
from rtc_recipe import left_over
from rtc_recipe import noise
from rtc_recipe import RtcCase
from rtc_recipe import velocity
import torch


def flow(case: RtcCase) -> torch.Tensor:
    """Return where LeRobot's guided flow ends, float32 [H, A]."""
    processor = RTCProcessor(RTCConfig(
        prefix_attention_schedule=RTCAttentionSchedule[case.schedule.upper()],
        max_guidance_weight=case.limit, execution_horizon=case.steps))
    x, rest = noise()[None], left_over(case)
    for step in range(FLOW_STEPS):
        time = torch.tensor(1.0 - step / FLOW_STEPS)
        x = x - processor.denoise_step(x, rest, case.delay, time, velocity) / FLOW_STEPS
    return x[0].detach()


def main() -> None:
    arrays = {case.name: flow(case).numpy() for case in CASES}
    np.savez_compressed(ARRAYS, **arrays)
    print(f'{len(arrays)} flows of {next(iter(arrays.values())).shape} in {ARRAYS.name}')


if __name__ == '__main__':
    main()
