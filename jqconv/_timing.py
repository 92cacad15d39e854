"""How long convolutions take on the device: plans by themselves, and in programs of many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jqconv._algorithm import Algorithm
from jqconv._spec import ConvSpec


def time_plans(
    spec: ConvSpec,
    algorithms: Sequence[Algorithm],
    operand_sets: Sequence[Sequence[jax.Array]],
    *,
    runs: int = 8,
    samples: int = 11,
    overlaps: bool = False,
) -> np.ndarray:
    """Time plans bare: CUDA graphs that hold one plan each and nothing else, replayed in turn.

    Parameters
    ----------
    spec : ConvSpec
        The convolution, as cuDNN is to run it.
    algorithms : sequence of Algorithm
        What to time.
    operand_sets : sequence of sequences of Array
        Operands of `spec`, in order, once or more: the runs take the sets in turn, so that with
        several the device's cache does not hold what it just used.
    runs : int, default 8
        Rounds over the sets in each graph.
    samples : int, default 11
        Replays of each graph, timed one by one, after one that is not.
    overlaps : bool, default False
        Whether a run may start while the one before ends. XLA records every convolution as a node
        of its own, where it may not; kernels launched on one stream may.

    Returns
    -------
    ndarray
        float32 of shape ``(len(algorithms), samples)``: microseconds of one run; NaN for a plan
        that the device does not have.
    """
    sets = len(operand_sets)
    results = [jax.ShapeDtypeStruct(*spec.result) for _ in range(sets)]
    most = max(algorithm.workspace for algorithm in algorithms)
    workspace = jax.ShapeDtypeStruct((max(most, 1),), jnp.uint8)
    times = jax.ShapeDtypeStruct((len(algorithms) * samples,), jnp.float32)
    call = jax.ffi.ffi_call("jqconv_time_v1", (*results, workspace, times))

    def timed(*operands: jax.Array) -> jax.Array:
        *_, microseconds = call(
            *operands,
            spec=str(spec),
            algorithms=" ".join(map(str, algorithms)),
            sets=np.int64(sets),
            runs=np.int64(runs),
            overlaps=overlaps,
        )
        return microseconds

    operands = [operand for operands in operand_sets for operand in operands]
    # Ahead of time: a jitted call would become part of a trace around this one.
    compiled = jax.jit(timed).lower(*operands).compile()
    return np.asarray(jax.device_get(compiled(*operands))).reshape(len(algorithms), samples)


def in_turn(
    function: Callable[..., jax.Array], operand_sets: Iterable[Sequence[Any]]
) -> list[jax.Array]:
    """Return ``function(*operands)`` for each of the sets, one after the other.

    Left alone, XLA makes one kernel of several that are alike, which no network has.
    """
    results: list[jax.Array] = []
    for operands in operand_sets:
        if results:
            operands, results[-1] = lax.optimization_barrier((operands, results[-1]))
        results.append(function(*operands))
    return results
