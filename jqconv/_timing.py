"""How long one plan takes by itself on the device."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jqconv._algorithm import Algorithm
from jqconv._spec import ConvSpec


def time_plan(
    spec: ConvSpec,
    algorithm: Algorithm,
    operand_sets: Sequence[Sequence[jax.Array]],
    *,
    runs: int = 8,
    samples: int = 11,
) -> np.ndarray:
    """Time a plan bare: a CUDA graph that holds it and nothing else, replayed.

    Parameters
    ----------
    spec : ConvSpec
        The convolution.
    algorithm : Algorithm
        What to time.
    operand_sets : sequence of sequences of Array
        Operands of `spec`, in order, once or more: the runs take the sets in turn, so that with
        several the device's cache does not hold what it just used.
    runs : int, default 8
        Rounds over the sets in the graph.
    samples : int, default 11
        Replays, each timed by itself, after one that is not.

    Returns
    -------
    ndarray
        float32 of shape ``(samples,)``: microseconds of one run.
    """
    sets = len(operand_sets)
    results = [jax.ShapeDtypeStruct(*spec.result) for _ in range(sets)]
    workspace = jax.ShapeDtypeStruct((max(algorithm.workspace, 1),), jnp.uint8)
    times = jax.ShapeDtypeStruct((samples,), jnp.float32)
    call = jax.ffi.ffi_call("jqconv_time_v1", (*results, workspace, times))

    @jax.jit
    def timed(*operands: jax.Array) -> jax.Array:
        *_, microseconds = call(
            *operands,
            spec=str(spec),
            algorithm=str(algorithm),
            pinned=True,
            sets=np.int64(sets),
            runs=np.int64(runs),
        )
        return microseconds

    return np.asarray(timed(*(operand for operands in operand_sets for operand in operands)))
