"""Sharded programs: what jqconv has to do for jax.shard_map."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def equally_varying(operands: Any) -> Any:
    """Cast a tree of arrays to vary over the same manual mesh axes, as jax.lax's operations do.

    Inside shard_map a replicated kernel meets a sharded batch; the cast is what makes its
    gradient be summed over the shards, once.
    """
    leaves, tree = jax.tree_util.tree_flatten(operands)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    varying = [frozenset(jax.typeof(array).mat.varying) for array in arrays]
    union = frozenset().union(*varying)
    cast = [
        jax.lax.pcast(array, tuple(sorted(union - axes)), to="varying") if union - axes else array
        for array, axes in zip(arrays, varying, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, cast)


def gathered(x: jax.Array) -> jax.Array:
    """Return `x` whole on every device, where mesh axes are explicit; what follows need not say."""
    explicit = jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types
    return jax.sharding.reshard(x, jax.sharding.PartitionSpec()) if explicit else x
