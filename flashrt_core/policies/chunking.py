"""How a new chunk joins the one being played: one pure function a mode, all values device data.

``blend``     the first steps fall linearly from the previous chunk to the new one.
``sync``      nothing is joined: a new chunk is made when the last one is used up.
``ensemble``  each step is the weighted mean of all chunks that cover it (ACT).
``rtc``       the flow is guided towards what is left of the previous chunk (real-time chunking).

R rows, H horizon, A actions; ``delay`` int64 [], control steps that pass before the new chunk
comes into play. What a mode keeps between ticks is state of the session that calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
import math

import torch
from torch import Tensor

MODES = ('blend', 'sync', 'ensemble', 'rtc')
ALIKE = 1e-30  # a decay below it changes no float32 weight, and may be none itself
SCHEDULES = ('zeros', 'ones', 'linear', 'exp')


@dataclass(frozen=True)
class Overlap:
    """Where the steps of a new chunk lie in the previous one.

    ``index`` int64 [R, H], within bounds everywhere; ``held`` bool [R, H], whether the previous
    chunk has that step.
    """

    index: Tensor
    held: Tensor

    def take(self, previous: Tensor) -> Tensor:
        """Return the previous chunk [R, H, A] moved to the new one's steps, [R, H, A]."""
        return previous.gather(1, self.index[..., None].expand_as(previous))


def overlap(start: Tensor, valid: Tensor, horizon: int) -> Overlap:
    """Return the overlap for a new chunk whose step 0 is step ``start`` of the previous one.

    :param start: int64 [R], any value. :param valid: bool [R], whether there is a previous chunk.
    """
    index = start[:, None] + torch.arange(horizon, device=start.device)
    held = (index >= 0) & (index < horizon) & valid[:, None]
    return Overlap(index.clamp(0, horizon - 1), held)


def blend(new: Tensor, previous: Tensor, where: Overlap, delay: Tensor, steps: int) -> Tensor:
    """Mix new [R, H, A] with what is left of the previous chunk, both in physical units.

    out = w * previous + (1 - w) * new; w = 1 below ``delay``, then falls linearly over ``steps``
    steps; 0 where no previous step is held or where it is not finite.
    """
    at = torch.arange(new.shape[1], device=new.device)
    w = 1.0 - (at - delay + 1) / (steps + 1)  # [H]
    w = w.clamp(0.0, 1.0)[None, :, None].expand_as(new)
    old = where.take(previous)
    mixed = where.held[..., None] & (w > 0) & old.isfinite()
    return torch.where(mixed, w * old + (1.0 - w) * new, new)


def ensemble(
    new: Tensor, mean: Tensor, counts: Tensor, where: Overlap, decay: float
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean of all chunks that cover each step, and how many they are.

    Temporal ensembling of ACT (arXiv 2304.13705, algorithm 2), kept up step by step: of the chunks
    that cover a step the i-th, counted from the oldest, weighs exp(-decay * i), so with n of them
    in ``mean``, out = (mean * (w_0 + ... + w_(n-1)) + new * w_n) / (w_0 + ... + w_n).

    :param mean: float32 [R, H, A], what the last call returned. :param counts: int64 [R, H], of
        the chunks in it, by step of the last call; from the horizon on they count no further.
    :param decay: 0 weighs all chunks alike, above 0 the older ones more.
    """
    H = new.shape[1]
    old = where.take(mean)
    n = counts.gather(1, where.index).clamp(0, H)
    joined = where.held & (n > 0) & old.isfinite().all(-1)
    age = n[..., None].float()
    alike = abs(decay) < ALIKE
    before = age if alike else torch.expm1(-decay * age) / math.expm1(-decay)
    weight = torch.exp(-decay * age)
    out = (old * before + new * weight) / (before + weight)
    out = torch.where(joined[..., None], out, new)
    return out, torch.where(joined, (n + 1).clamp(max=H), torch.ones_like(n))


def prefix_weights(schedule: str, delay: Tensor, end: Tensor, horizon: int) -> Tensor:
    """Return how strongly each step of a new chunk is held to the previous one, float32 [..., H].

    1 below ``delay``, 0 from ``end`` on, and between them, at step i with
    c = (end - i) / (end - delay + 1):
    'zeros' 0, 'ones' 1, 'linear' c, 'exp' c (e^c - 1) / (e - 1).
    A delay beyond ``end`` counts as ``end``; 'ones' is 1 up to ``end`` whatever the delay.
    Source: get_prefix_weights of real-time chunking (arXiv 2506.07339, equation 5).

    :param delay: int64 [...]. :param end: int64 [...], first step without guidance.
    """
    at = torch.arange(horizon, device=delay.device)
    delay, end = torch.minimum(delay, end)[..., None], end[..., None]
    c = ((end - at) / (end - delay + 1)).float()
    if schedule == 'zeros':
        c = torch.zeros_like(c)
    elif schedule == 'ones':
        c = torch.ones_like(c)
    elif schedule == 'exp':
        c = c * torch.expm1(c) / (math.e - 1.0)
    c = torch.where(at < delay, torch.ones_like(c), c)
    return torch.where(at < end, c, torch.zeros_like(c))


def guidance_weight(step: int, flow_steps: int, limit: float) -> float:
    """Return how strongly flow step ``step`` of ``flow_steps`` is corrected.

    min(limit, ((1 - tau) / tau) * ((1 - tau)^2 + tau^2) / (1 - tau)^2) with tau = step /
    flow_steps, from 0 (noise) towards 1; ``limit`` at tau = 0. Source: arXiv 2506.07339,
    equations 2 to 4.
    """
    tau = step / flow_steps
    if tau == 0.0:
        return limit
    return min(limit, ((1.0 - tau) ** 2 + tau**2) / (tau * (1.0 - tau)))


def guided(
    velocity: Tensor, x: Tensor, time: float, weight: float, prefix: Tensor, left_over: Tensor
) -> Tensor:
    """Return the velocity that leads towards the left-over of the previous chunk.

    v' = v - weight * prefix * (left_over - (x - time * v)): where the flow would end from here is
    compared with the left-over, and the error itself is the correction. The full method multiplies
    it with the Jacobian of the model; LeRobot takes that as the identity, as is done here, so no
    backward pass is needed (arXiv 2506.07339; LeRobot 0.6.1, policies/rtc).

    :param velocity: float32 [R, H, A], of a flow from t = 1 (noise) to 0; ``x`` likewise.
    :param time: t of this flow step. :param prefix: float32 [R, H, 1].
    :param left_over: float32 [R, H, A], normalised actions; read where ``prefix`` is above 0.
    """
    error = left_over - (x - time * velocity)
    return torch.where(prefix > 0, velocity - weight * prefix * error, velocity)


def reanchored(
    actions: Tensor, then: Tensor, now: Tensor, relative: Tensor, std: Tensor
) -> Tensor:
    """Return normalised relative actions as seen from other joints: + (then - now) / std.

    :param actions: float32 [R, H, W], normalised, W >= A. :param then: float32 [R, A], joints
        they are relative to, ``now`` [A] those they shall be relative to.
    :param relative: float32 [A], 1 where an action is relative. :param std: float32 [A].
    """
    shift = relative * (then - now) / std
    padding = actions.shape[-1] - shift.shape[-1]
    return actions + torch.nn.functional.pad(shift, (0, padding))[:, None]
