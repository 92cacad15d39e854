"""The meaning of the operation, in jax.lax.

This is the lowering on every backend but CUDA, the ``xla`` form there, and what the derivative
rules are stated in. :func:`fprop`, :func:`dgrad` and :func:`wgrad` take the operands that a
:class:`ConvSpec` names, in its order, and the dtype that carries them through the convolution:
float32, which every backend has, or :func:`gpu_carrier`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jqconv._qtensor import CODE_RANGE, over_last
from jqconv._sharding import equally_varying
from jqconv._spec import Activation, ConvSpec

_LAYOUT = ("NHWC", "OHWI", "NHWC")

#: float32 holds every integer up to here, so a sum of products below it is exact in any order.
_EXACT_FLOAT32 = 2**24

#: Most taps of a depthwise window that a GPU sums one by one: one kernel, epilogue and all, limited
#: by its loads, of which there is one a tap. Larger windows are faster as XLA's convolutions.
_FEW_TAPS = 9


def fprop(spec: ConvSpec, *operands: jax.Array, carrier: str = "float32") -> jax.Array:
    """Return the fused convolution that `spec` describes.

    Parameters
    ----------
    spec : ConvSpec
        With ``direction="fprop"``.
    *operands : Array
        Those of ``spec.operands``, in order.
    carrier : str, default "float32"
        The dtype that carries the integers through the convolution, exactly: a floating-point one,
        or ``"int32"`` for a depthwise convolution.
    """
    named = dict(zip(spec.operands, operands, strict=True))
    acc = _accumulate(spec, named.pop("x"), named.pop("w"), carrier)
    if spec.y_dtype == "int32":
        return acc
    return _round_to(spec.y_dtype, epilogue(spec, acc, **named))


def dgrad(spec: ConvSpec, dy: jax.Array, w: jax.Array, *, carrier: str = "float32") -> jax.Array:
    """Return the gradient of the convolution for x, accumulated in float32."""
    # XLA:CPU aborts the process for some transposes where a window of 2 meets a stride of 2 and a
    # padding of 1: it is a window of 3 there, with a zero before the two.
    zeros = [
        int((window, stride, dilation, low) == (2, 2, 1, 1))
        for window, stride, dilation, (low, _) in zip(
            spec.w_shape[1:3], spec.strides, spec.dilation, spec.padding, strict=True
        )
    ]
    padding = [(low + zero, high) for zero, (low, high) in zip(zeros, spec.padding, strict=True)]

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        if any(zeros):
            w = jnp.pad(w, ((0, 0), *((zero, 0) for zero in zeros), (0, 0)))
        return _conv(spec, x, w, padding=padding, precision=_precision(spec))

    return _gradient(spec, dy, w, conv, carrier)


def wgrad(spec: ConvSpec, x: jax.Array, dy: jax.Array, *, carrier: str = "float32") -> jax.Array:
    """Return the gradient of the convolution for w, accumulated in float32."""

    def conv(w: jax.Array, x: jax.Array) -> jax.Array:
        return _conv(spec, x, w, precision=_precision(spec))

    return _gradient(spec, dy, x, conv, carrier)


def _gradient(
    spec: ConvSpec,
    dy: jax.Array,
    other: jax.Array,
    conv: Callable[[jax.Array, jax.Array], jax.Array],
    carrier: str,
) -> jax.Array:
    """Transpose `conv` in its first argument, the tensor that the spec computes."""
    shape, dtype = spec.result
    if spec.empty:
        return jnp.zeros(shape, dtype)
    # Of the same manual axes as the others: the transpose would else be summed over the shards.
    like, dy, other = equally_varying(
        [jnp.zeros(shape, carrier), dy.astype(carrier), other.astype(carrier)]
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
    v = acc.astype(jnp.float32) * over_last(multiplier, acc.ndim)
    if bias is not None:
        v = v + over_last(bias, acc.ndim)
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


def gpu_carrier(spec: ConvSpec) -> str:
    """Return the carrier that is fast on a GPU."""
    if spec.direction != "fprop":
        return spec.x_dtype
    _, r, s, c_group = spec.w_shape
    return "int32" if c_group == 1 and r * s <= _FEW_TAPS else "bfloat16"


def _round_to(dtype: str, v: jax.Array) -> jax.Array:
    if dtype not in CODE_RANGE:
        return v.astype(dtype)
    return jnp.clip(jnp.round(v), *CODE_RANGE[dtype]).astype(dtype)


def _conv(
    spec: ConvSpec, x: jax.Array, w: jax.Array, padding: Any = None, **options: Any
) -> jax.Array:
    if _is_pointwise(spec):  # a product of matrices, which XLA does not see in a convolution
        return lax.dot_general(x, w[:, 0, 0], (((3,), (1,)), ((), ())), **options)
    return lax.conv_general_dilated(
        x,
        w,
        window_strides=spec.strides,
        padding=spec.padding if padding is None else padding,
        rhs_dilation=spec.dilation,
        feature_group_count=spec.groups,
        dimension_numbers=_LAYOUT,
        **options,
    )


def _is_pointwise(spec: ConvSpec) -> bool:
    plain = spec.groups == 1 and spec.strides == (1, 1) and spec.padding == ((0, 0), (0, 0))
    return plain and spec.w_shape[1:3] == (1, 1)


def _precision(spec: ConvSpec) -> lax.Precision:
    """Full float32 where that was asked for; 16-bit operands are exact in any unit's mode."""
    return lax.Precision.HIGHEST if spec.x_dtype == "float32" else lax.Precision.DEFAULT


def _accumulate(spec: ConvSpec, x: jax.Array, w: jax.Array, carrier: str) -> jax.Array:
    """Return the exact int32 accumulator, from convolutions of integers carried as floats.

    XLA's own int8 convolutions are wrong on CUDA where grouped, and naive loops on a CPU where
    the kernel is OHWI. Floats serve both: bf16 and float32 hold every operand (at most 255 in
    magnitude), and float32 sums at most 2**24 exactly in any order. Larger windows are cut in
    pieces, first along the channels, then along the window, and the pieces summed in int32.
    """
    if spec.empty:
        return jnp.zeros(spec.y_shape, jnp.int32)
    if carrier == "int32":
        return _sum_of_taps(spec, x, w)
    limit = _EXACT_FLOAT32 // spec.product_magnitude
    x, w = x.astype(carrier), w.astype(carrier)
    wide = {"preferred_element_type": jnp.float32}
    if spec.products <= limit:
        sums = [_conv(spec, x, w, **wide)]
    else:
        sums = [
            _conv(spec, *piece, padding="VALID", **wide) for piece in _pieces(spec, x, w, limit)
        ]
    return functools.reduce(jnp.add, [jnp.round(part).astype(jnp.int32) for part in sums])


def _sum_of_taps(spec: ConvSpec, x: jax.Array, w: jax.Array) -> jax.Array:
    """Return the accumulator of a depthwise convolution: for each tap what windows see through it.

    Nothing but elementwise operations on slices, which XLA makes one loop of.
    """
    k, r, s, _ = w.shape
    _, p, q, _ = spec.y_shape
    x = jnp.repeat(_padded(spec, x), k // spec.groups, axis=3)

    def term(row: int, col: int) -> jax.Array:
        seen = x[:, _seen(spec, 0, p, row), _seen(spec, 1, q, col)]
        return seen.astype(jnp.int32) * w[:, row, col, 0].astype(jnp.int32)

    return functools.reduce(jnp.add, itertools.starmap(term, itertools.product(range(r), range(s))))


def _padded(spec: ConvSpec, x: jax.Array) -> jax.Array:
    return jnp.pad(x, ((0, 0), *spec.padding, (0, 0)))


def _pieces(
    spec: ConvSpec, x: jax.Array, w: jax.Array, limit: int
) -> Iterator[tuple[jax.Array, jax.Array]]:
    """Yield operands of unpadded convolutions of at most `limit` products that sum to the whole."""
    x = _padded(spec, x)
    _, r, s, c = spec.w_shape
    _, p, q, _ = spec.y_shape
    channels = max(1, min(c, limit // (r * s)))
    cols = max(1, min(s, limit // channels))
    rows = max(1, min(r, limit // (channels * cols)))
    for row, col, channel in itertools.product(
        _slices(r, rows), _slices(s, cols), _slices(c, channels)
    ):
        window = x[:, _reach(spec, 0, p, row), _reach(spec, 1, q, col), :]
        grouped = window.reshape(*window.shape[:3], spec.groups, c)[..., channel]
        yield grouped.reshape(*window.shape[:3], -1), w[:, row, col, channel]


def _reach(spec: ConvSpec, axis: int, windows: int, taps: slice) -> slice:
    """Return what `windows` windows read along an axis with these of their taps."""
    stride, dilation = spec.strides[axis], spec.dilation[axis]
    first = taps.start * dilation
    return slice(first, (windows - 1) * stride + (taps.stop - 1) * dilation + 1)


def _seen(spec: ConvSpec, axis: int, windows: int, tap: int) -> slice:
    """Return what `windows` windows see along an axis through one of their taps."""
    reach = _reach(spec, axis, windows, slice(tap, tap + 1))
    return slice(reach.start, reach.stop, spec.strides[axis])


def _slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
