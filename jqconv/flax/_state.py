"""What quantization adds to a model's state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Quant(nnx.Variable[Any]):
    """What quantization adds to a model's state: fixed scales, statistics, int8 kernels."""


class StepSize(nnx.Param[Any]):
    """The logarithm of a scale that is learned; a parameter, so that optimizers find it.

    The scale stays positive whatever an optimizer does, and a step of it is relative to it.
    """


def scale_of(variable: Quant | StepSize) -> jax.Array:
    """Return the scale that a variable holds."""
    return jnp.exp(variable[...]) if isinstance(variable, StepSize) else variable[...]


def set_scale(variable: Quant | StepSize, scale: jax.Array) -> None:
    """Put a scale into a variable."""
    variable[...] = jnp.log(scale) if isinstance(variable, StepSize) else scale
