"""The meaning of the operation, in jax.lax.

This is the lowering on every backend but CUDA, the ``xla`` form there, and what the derivative
rules are stated in. :func:`fprop`, :func:`dgrad` and :func:`wgrad` take the operands that a
:class:`ConvSpec` names, in its order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jqconv._qtensor import CODE_RANGE
from jqconv._sharding import equally_varying
from jqconv._spec import Activation, ConvSpec

_LAYOUT = ("NHWC", "OHWI", "NHWC")

#: float32 holds every integer up to here, so a sum of products below it is exact in any order.
_EXACT_FLOAT32 = 2**24


def fprop(spec: ConvSpec, *operands: jax.Array, integer_conv: bool = True) -> jax.Array:
    """Return the fused convolution that `spec` describes.

    Parameters
    ----------
    spec : ConvSpec
        With ``direction="fprop"``.
    *operands : Array
        Those of ``spec.operands``, in order.
    integer_conv : bool, default True
        Whether the backend convolves integers rightly. Without it (XLA on CUDA returns wrong
        results for grouped int8) they are carried in floating point, exactly.
    """
    named = dict(zip(spec.operands, operands, strict=True))
    x, w = named.pop("x"), named.pop("w")
    if spec.empty:
        acc = jnp.zeros(spec.y_shape, jnp.int32)
    else:
        acc = (_accumulate_integer if integer_conv else _accumulate_float)(spec, x, w)
    if spec.y_dtype == "int32":
        return acc
    return _round_to(spec.y_dtype, epilogue(spec, acc, **named))


def dgrad(spec: ConvSpec, dy: jax.Array, w: jax.Array) -> jax.Array:
    """Return the gradient of the convolution for x, accumulated in float32."""
    return _gradient(spec, dy, w, lambda x, w: _conv(spec, x, w, precision=_precision(spec)))


def wgrad(spec: ConvSpec, x: jax.Array, dy: jax.Array) -> jax.Array:
    """Return the gradient of the convolution for w, accumulated in float32."""
    return _gradient(spec, dy, x, lambda w, x: _conv(spec, x, w, precision=_precision(spec)))


def _gradient(
    spec: ConvSpec,
    dy: jax.Array,
    other: jax.Array,
    conv: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Transpose `conv` in its first argument, the tensor that the spec computes."""
    shape, dtype = spec.result
    if spec.empty:
        return jnp.zeros(shape, dtype)
    # Of the same manual axes as the others: the transpose would else be summed over the shards.
    like, dy, other = equally_varying(
        [jnp.zeros(shape), dy.astype(jnp.float32), other.astype(jnp.float32)]
    )
    (gradient,) = jax.linear_transpose(lambda first: conv(first, other), like)(dy)
    return gradient.astype(dtype)


def epilogue(
    spec: ConvSpec,
    acc: jax.Array,
    multiplier: jax.Array,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    residual_scale: jax.Array | None = None,
    out_multiplier: jax.Array | None = None,
) -> jax.Array:
    """Return the float32 value of the epilogue, before it is rounded to the output's dtype."""
    v = acc.astype(jnp.float32) * multiplier
    if bias is not None:
        v = v + bias
    if residual is not None:
        side = residual.astype(jnp.float32)
        v = v + (side if residual_scale is None else side * residual_scale)
    v = activate(spec.activation, v)
    return v if out_multiplier is None else v * out_multiplier


def activate(activation: Activation | None, v: jax.Array) -> jax.Array:
    """Return ``activation(v)``."""
    if activation is None:
        return v
    match activation.name:
        case "relu":
            return jnp.maximum(v, 0)
        case "relu6":
            return jnp.clip(v, 0, 6)
        case "leaky_relu":
            return jnp.where(v >= 0, v, v * activation.negative_slope)
        case "silu":
            return jax.nn.silu(v)
        case "gelu":
            return jax.nn.gelu(v, approximate=True)
        case "hard_swish":
            return v * jnp.clip(v + 3, 0, 6) * (1 / 6)
    raise AssertionError(activation)


def activation_slope(activation: Activation, v: jax.Array) -> jax.Array:
    """Return the derivative of a smooth activation at `v`."""
    if activation.name == "hard_swish":
        return jnp.where(v <= -3, 0.0, jnp.where(v >= 3, 1.0, (2 * v + 3) / 6))
    _, slope = jax.jvp(functools.partial(activate, activation), (v,), (jnp.ones_like(v),))
    return slope


def _round_to(dtype: str, v: jax.Array) -> jax.Array:
    if dtype not in CODE_RANGE:
        return v.astype(dtype)
    return jnp.clip(jnp.round(v), *CODE_RANGE[dtype]).astype(dtype)


def _conv(spec: ConvSpec, x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=spec.strides,
        padding=spec.padding,
        rhs_dilation=spec.dilation,
        feature_group_count=spec.groups,
        dimension_numbers=_LAYOUT,
        **options,
    )


def _precision(spec: ConvSpec) -> lax.Precision:
    """Full float32 where that was asked for; 16-bit operands are exact in any unit's mode."""
    return lax.Precision.HIGHEST if spec.x_dtype == "float32" else lax.Precision.DEFAULT


def _accumulate_integer(spec: ConvSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    if w.dtype != x.dtype:  # a kernel less its zero point is wider than int8
        x, w = x.astype(jnp.int32), w.astype(jnp.int32)
    return _conv(spec, x, w, preferred_element_type=jnp.int32)


def _accumulate_float(spec: ConvSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """Accumulate in bf16 convolutions small enough for float32 to be exact, summed in int32.

    bf16 holds every integer up to 256, and float32 sums at most 2**24 of them exactly in any
    order. Larger windows are cut in pieces: first along the channels, then along the window.
    """
    (top, bottom), (left, right) = spec.padding
    x = jnp.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0))).astype(jnp.bfloat16)
    w = w.astype(jnp.bfloat16)
    limit = _EXACT_FLOAT32 // spec.product_magnitude
    _, p, q, _ = spec.y_shape

    def piece(rows: slice, cols: slice, channels: slice) -> jax.Array:
        # One window position reads rows.start * dilation further down, and so to the right.
        part = w[:, rows, cols, channels]
        _, r, s, c = part.shape
        y0, x0 = rows.start * spec.dilation[0], cols.start * spec.dilation[1]
        height = (p - 1) * spec.strides[0] + (r - 1) * spec.dilation[0] + 1
        width = (q - 1) * spec.strides[1] + (s - 1) * spec.dilation[1] + 1
        window = x[:, y0 : y0 + height, x0 : x0 + width, :]
        if c < spec.w_shape[3]:
            n, h_in, w_in, _ = window.shape
            grouped = window.reshape(n, h_in, w_in, spec.groups, spec.w_shape[3])
            window = grouped[..., channels].reshape(n, h_in, w_in, spec.groups * c)
        sums = lax.conv_general_dilated(
            window,
            part,
            window_strides=spec.strides,
            padding="VALID",
            rhs_dilation=spec.dilation,
            feature_group_count=spec.groups,
            dimension_numbers=_LAYOUT,
            preferred_element_type=jnp.float32,
        )
        return jnp.round(sums).astype(jnp.int32)

    _, r, s, c = spec.w_shape
    channels = max(1, min(c, limit // (r * s)))
    cols = max(1, min(s, limit // channels))
    rows = max(1, min(r, limit // (channels * cols)))
    pieces = [
        piece(row, col, channel)
        for row in _slices(r, rows)
        for col in _slices(s, cols)
        for channel in _slices(c, channels)
    ]
    return functools.reduce(jnp.add, pieces)


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
