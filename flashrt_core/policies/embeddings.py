"""Rows that a planner gives in the place of a subgoal's tokens, handed over to a policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
import torch
from torch import Tensor

from flashrt_core.errors import ConfigError


class Embedding:
    """A copy of rows float32 [n, width], in the scale of the policy's embedding table.

    A row is what the policy would look up for one token: of the embedding table, before the factor
    sqrt(width) that Gemma multiplies every looked-up row by. The copy is complete when the
    constructor returns, so the giver may go on writing where its rows lie.

    ``rows``: on the device where they were given, else in host memory; never written again.
    ``values``: the same, read-only numpy, for records.
    """

    def __init__(self, rows: NDArray[np.float32] | Tensor) -> None:
        """Take over rows; the calling thread waits until they are made.

        Call it with the stream current that makes them, as it is where they were computed: the
        copy is queued behind them. Rows on a device do not go through host memory on their way to
        the policy; one copy for the record is made here, on the calling thread.

        :raises ConfigError: not float32 [n, width] with n >= 1, or a value that is not finite.
        """
        whole = isinstance(rows, Tensor) or type(rows) is np.ndarray
        if not whole or str(rows.dtype).removeprefix('torch.') != 'float32':
            kind = getattr(rows, 'dtype', type(rows).__name__)
            raise ConfigError(f'embedding is {kind}; give a float32 array or tensor [n, width]')
        if rows.ndim != 2 or not all(rows.shape):
            raise ConfigError(
                f'embedding is {list(rows.shape)}; give a row a token, [n, width] with n of 1 or '
                'more')
        if isinstance(rows, Tensor):
            self.rows = rows.detach().clone(memory_format=torch.contiguous_format)
        else:
            self.rows = torch.from_numpy(rows.copy())
        self.values: NDArray[np.float32] = self.rows.cpu().numpy()  # waits for the copy
        self.values.flags.writeable = False
        if not np.isfinite(self.values).all():
            at = np.argwhere(~np.isfinite(self.values))[0].tolist()
            raise ConfigError(
                f'embedding holds {self.values[tuple(at)]} at {at}; give finite values')

    def __len__(self) -> int:
        """Return the number of rows."""
        return int(self.rows.shape[0])

    def __repr__(self) -> str:
        return f'Embedding({list(self.rows.shape)} on {self.rows.device})'
