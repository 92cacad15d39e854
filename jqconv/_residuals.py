"""What a forward rule tells its backward rule about which operands are differentiated.

Which those are is static, but it must not stand in the structure of the residuals: JAX keeps one
structure for a custom VJP inside a compiled function, and takes it for every pattern of
differentiation (under jax.checkpoint, the wrong one). It stands in shapes instead, which travel
with the values: a mark is an empty array whose length says it, and a tensor that nobody will read
is left out as an empty array.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp


def mark(chosen: Collection[str], names: Sequence[str]) -> jax.Array:
    """Return an empty array that says which of `names` are in `chosen`."""
    bits = sum(1 << i for i, name in enumerate(names) if name in chosen)
    return jnp.zeros((0, bits), jnp.int8)


def marked(array: jax.Array, names: Sequence[str]) -> frozenset[str]:
    """Undo :func:`mark`."""
    return frozenset(name for i, name in enumerate(names) if array.shape[-1] >> i & 1)


def keep(needed: bool, array: jax.Array) -> jax.Array:
    """Return `array`, or an empty one where it is not needed."""
    return array if needed else jnp.zeros((0,), array.dtype)
