"""The end of the epilogue, an activation quantized, and the derivative that its codes tell.

In a convolution it is fused; where something stands between, a BatchNorm that is trained, it is
:func:`activate_and_quantize`. The derivatives are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jqconv import _reference
from jqconv._first_order import first_order
from jqconv._qtensor import CODE_RANGE, round_to_codes
from jqconv._residuals import keep, mark, marked
from jqconv._sharding import equally_varying
from jqconv._spec import Activation


def hides(act: Activation | None, quantized: bool) -> bool:
    """Whether the output does not tell an activation's slope.

    Where a leaky slope is quantized, many values round to code 0, which does not tell their sign.
    """
    return act is not None and (act.smooth or (quantized and act.name == "leaky_relu"))


def slope_of_codes(act: Activation | None, codes: jax.Array, scale: Any, v: Any) -> jax.Array:
    """Return the slope of an activation that is quantized, `v` where the codes do not tell it.

    A piecewise-linear activation is active where the output says so; codes say it strictly
    between the limits of the activation's range, so that one rounded to a limit is not.
    """
    inside = _unclipped(act, codes, scale)
    if act is None or act.name in ("relu", "relu6"):
        return inside.astype(jnp.float32)
    if act.smooth:
        return jnp.where(inside, _reference.activation_slope(act, v), 0.0)
    return jnp.where(inside, jnp.where(v >= 0, 1.0, act.negative_slope), 0.0)


def _unclipped(act: Activation | None, codes: jax.Array, scale: Any) -> jax.Array:
    """Return where a code lies strictly between its limits."""
    low, high = CODE_RANGE[codes.dtype.name]
    if act is not None and act.name in ("relu", "relu6"):
        low = 0
    steps = codes.astype(jnp.float32)
    inside = (steps > low) & (steps < high)
    if act is not None and act.name == "relu6":
        inside &= steps < jnp.round(6.0 / scale)
    return inside


def step_size_grad(
    act: Activation | None, codes: jax.Array, scale: Any, v: Any, dy: jax.Array
) -> jax.Array:
    """Return a learned step size's gradient: ``sum dy * (code - inside * act(v) / scale)``."""
    inside = _unclipped(None, codes, scale)
    value = _reference.activate(act, v) / scale
    return jnp.sum(dy * (codes.astype(jnp.float32) - jnp.where(inside, value, 0.0)))


def activate_and_quantize(
    activation: Activation | None, v: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return ``activation(v)`` in int8 codes of `scale`, and their float view.

    The derivatives are those of a convolution with this activation and `scale` as its out_scale:
    codes are kept for them, which are kept for the next layer anyway.
    """
    codes, view = _requantize(activation, *equally_varying([v, scale]))
    return codes, view


@functools.partial(jax.jit, static_argnums=0, inline=True)  # as fused_conv
def _requantize(activation: Activation | None, v: jax.Array, scale: jax.Array) -> Any:
    return _requantize_vjp(activation, v, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _requantize_vjp(
    activation: Activation | None, v: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    values = _reference.activate(activation, v.astype(jnp.float32))
    codes, view, _ = round_to_codes("int8", 0, values, scale)
    return codes, view


def _requantize_fwd(activation: Activation | None, v: Any, scale: Any) -> tuple[Any, Any]:
    codes, view = _requantize_vjp(activation, v.value, scale.value)
    asked = mark(["scale"] if scale.perturbed else [], ["scale"])
    kept = keep(scale.perturbed or hides(activation, True), v.value)
    like_v = jnp.zeros((0,), v.value.dtype)
    return (codes, first_order(view, v.value)), (asked, kept, like_v, codes, scale.value)


def _requantize_bwd(activation: Activation | None, saved: Any, cts: Any) -> tuple[Any, Any]:
    asked, v, like_v, codes, scale = saved
    _, dy = cts
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None
    v = v.astype(jnp.float32)
    dv = (dy * slope_of_codes(activation, codes, scale, v)).astype(like_v.dtype)
    if not marked(asked, ["scale"]):
        return dv, None
    return dv, step_size_grad(activation, codes, scale, v, dy)


_requantize_vjp.defvjp(_requantize_fwd, _requantize_bwd, symbolic_zeros=True)
