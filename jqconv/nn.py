"""What stands between the convolutions of an int8 network, and its dense head.

Every function takes a QTensor and returns one of the same scale and zero point, computed in
integers: an int8 network runs through without a float tensor. Float arrays are taken too, and give
what a float network computes, so that one model serves for both. Only :func:`linear` quantizes and
changes scales, as :func:`jqconv.conv2d`, which it is.

Gradients flow through the float view, where `x` has one: they are those of the same function of
floats, with rounding passed straight through.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jqconv._algorithm import AlgorithmLike
from jqconv._conv import ActivationLike, IntOrPair, PaddingLike, conv2d
from jqconv._first_order import first_order
from jqconv._qtensor import CODE_RANGE, PackedKernel, QTensor, as_array
from jqconv._sharding import equally_varying
from jqconv._spec import as_int
from jqconv._window import Window

__all__ = ["avg_pool", "flatten", "linear", "max_pool", "mean", "relu", "reshape"]

#: Largest number of codes whose sum is sure to fit in int32, each at most 255 above the lowest.
_MAX_TERMS = (2**31 - 1) // 255


def max_pool(
    x: QTensor | ArrayLike,
    window_shape: IntOrPair,
    strides: IntOrPair | None = None,
    padding: PaddingLike = "VALID",
) -> QTensor | jax.Array:
    """Return the largest element of every window over height and width.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats of shape ``(..., H, W, C)``.
    window_shape : int or pair of int
        Height and width of the window.
    strides : int or pair of int, optional
        From window to window; 1 if None, as in Flax.
    padding : str, int or pairs
        ``"SAME"``, ``"VALID"``, an int, ``(height, width)`` or ``((top, bottom), (left, right))``.
        Padding is never the largest.

    Returns
    -------
    QTensor or Array
        Of shape ``(..., P, Q, C)`` and the kind of `x`. The gradient goes to the first of the
        largest elements of a window.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.
    ValueError
        If `x` has no height and width, or a window cannot be used: of a QTensor also one that lies
        wholly in the padding (of a float array that gives -inf).

    Examples
    --------
    >>> x = QTensor(jnp.arange(16, dtype=jnp.int8).reshape(1, 4, 4, 1), 0.5)
    >>> max_pool(x, (2, 2), strides=(2, 2)).values[0, :, :, 0]
    Array([[ 5,  7],
           [13, 15]], dtype=int8)
    """
    x = _as_tensor(x)
    window = Window.over(x.shape, window_shape, strides, padding)
    if not isinstance(x, QTensor):
        return window.maximum(x)
    window.check_covered()
    return _with_view(x, window.maximum(x.values), window.routed_maximum)


def avg_pool(
    x: QTensor | ArrayLike,
    window_shape: IntOrPair,
    strides: IntOrPair | None = None,
    padding: PaddingLike = "VALID",
    count_include_pad: bool = True,
) -> QTensor | jax.Array:
    """Return the mean of every window over height and width.

    Of a QTensor it is the exact mean, rounded half to even to a code of the same scale; of floats
    it is summed in float32 at least.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats of shape ``(..., H, W, C)``.
    window_shape : int or pair of int
        Height and width of the window.
    strides : int or pair of int, optional
        From window to window; 1 if None, as in Flax.
    padding : str, int or pairs
        ``"SAME"``, ``"VALID"``, an int, ``(height, width)`` or ``((top, bottom), (left, right))``.
    count_include_pad : bool, default True
        Whether padding takes part, as the number 0, or is left out of the mean.

    Returns
    -------
    QTensor or Array
        Of shape ``(..., P, Q, C)`` and the kind of `x`.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.
    ValueError
        If `x` has no height and width, or a window cannot be used: of a QTensor also one with more
        codes than int32 can sum, or with nothing left in it (of a float array that gives NaN).

    Examples
    --------
    >>> x = QTensor(jnp.arange(16, dtype=jnp.int8).reshape(1, 4, 4, 1), 0.5)
    >>> avg_pool(x, (2, 2), strides=(2, 2)).values[0, :, :, 0]  # 2.5, 4.5, 10.5, 12.5
    Array([[ 2,  4],
           [10, 12]], dtype=int8)
    """
    x = _as_tensor(x)
    window = Window.over(x.shape, window_shape, strides, padding)
    average = functools.partial(window.average, count_include_pad=count_include_pad)
    if not isinstance(x, QTensor):
        return average(x)
    if not count_include_pad:
        window.check_covered()
    counts = window.counts(count_include_pad, x.ndim)
    return _with_view(x, _round_mean(x, window.total(_steps(x)), counts), average)


def mean(
    x: QTensor | ArrayLike,
    axis: int | Sequence[int] | None = (1, 2),
    keepdims: bool = False,
) -> QTensor | jax.Array:
    """Return the mean over axes: without any given, global average pooling of ``(N, H, W, C)``.

    Of a QTensor it is the exact mean, rounded half to even to a code of the same scale.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats.
    axis : int or sequence of int, optional
        The axes to average over; None for all.
    keepdims : bool, default False
        Whether they stay, with size 1.

    Returns
    -------
    QTensor or Array
        Of the kind of `x`.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.
    ValueError
        If `axis` names no axis of `x`, or names one twice; of a QTensor also if it has no elements
        there, more codes than int32 can sum, or one scale per channel where the channels are
        averaged.

    Examples
    --------
    >>> x = QTensor(jnp.arange(16, dtype=jnp.int8).reshape(1, 4, 4, 1), 0.5)
    >>> mean(x)  # of 0 to 15: 7.5
    QTensor(int8[1,1], scale=0.5)
    >>> mean(x).values
    Array([[8]], dtype=int8)
    """
    x = _as_tensor(x)
    axes = _as_axes(axis, x.ndim)
    average = functools.partial(jnp.mean, axis=axes, keepdims=keepdims)
    if not isinstance(x, QTensor):
        return average(x)
    if x.scale.ndim and x.ndim - 1 in axes:
        raise ValueError(
            f"mean over axis={axis} of a QTensor of shape {x.shape} averages channels that have "
            "one scale each; quantize x with one scale, or average x.dequantize()"
        )
    count = math.prod(x.shape[a] for a in axes)
    if not count:
        raise ValueError(f"mean over axis={axis} of a QTensor of shape {x.shape} is one of nothing")
    total = jnp.sum(_steps(x), axis=axes, keepdims=keepdims, dtype=jnp.int32)
    return _with_view(x, _round_mean(x, total, np.asarray(count)), average)


def relu(x: QTensor | ArrayLike) -> QTensor | jax.Array:
    """Return ``max(x, 0)``.

    After a convolution write ``conv2d(..., activation="relu")`` instead: there it costs nothing.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats of any shape.

    Returns
    -------
    QTensor or Array
        Of the shape and kind of `x`. The gradient at 0 is 0.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.

    Examples
    --------
    >>> relu(quantize(jnp.array([-1.0, 0.5]), 0.25, zero_point=3)).values
    Array([3, 5], dtype=int8)
    """
    x = _as_tensor(x)
    if not isinstance(x, QTensor):
        return jax.nn.relu(x)
    return _with_view(x, jnp.maximum(x.values, x.zero_point or 0), jax.nn.relu)


def reshape(x: QTensor | ArrayLike, shape: int | Sequence[int]) -> QTensor | jax.Array:
    """Return the same elements in another shape.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats of any shape.
    shape : int or sequence of int
        The new shape; one entry may be -1, for what is left.

    Returns
    -------
    QTensor or Array
        Of the kind of `x`.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.
    ValueError
        If `x` has another number of elements, or one scale per channel and the last axis would no
        longer be the channels.

    Examples
    --------
    >>> reshape(QTensor(jnp.ones((2, 3, 4), jnp.int8), 0.5), (6, -1))
    QTensor(int8[6,4], scale=0.5)
    """
    x = _as_tensor(x)
    new = _as_shape(shape, x.shape)
    if not isinstance(x, QTensor):
        return jnp.reshape(x, new)
    if x.scale.ndim and new[-1:] != x.shape[-1:]:
        raise ValueError(
            f"a QTensor of shape {x.shape} with one scale per channel cannot take the shape "
            f"{new}: the scales belong to a last axis of {x.shape[-1]}; quantize x with one "
            "scale, or reshape x.dequantize()"
        )
    fq = None if x.fq is None else jnp.reshape(x.fq, new)
    return QTensor(jnp.reshape(x.values, new), x.scale, x.zero_point, fq=fq)


def flatten(x: QTensor | ArrayLike) -> QTensor | jax.Array:
    """Return `x` with everything but the batch in one axis: shape ``(N, -1)``.

    Parameters
    ----------
    x : QTensor or Array
        Codes or floats of shape ``(N, ...)``.

    Returns
    -------
    QTensor or Array
        Of the kind of `x`.

    Raises
    ------
    TypeError
        If `x` is neither a QTensor nor floating point.
    ValueError
        If `x` has no batch axis, or one scale per channel and more than channels to flatten.

    Examples
    --------
    >>> flatten(QTensor(jnp.ones((2, 3, 3, 4), jnp.int8), 0.5))
    QTensor(int8[2,36], scale=0.5)
    """
    x = _as_tensor(x)
    if not x.ndim:
        raise ValueError("x has shape (), expected (N, ...); give it a batch axis with reshape")
    return reshape(x, (x.shape[0], math.prod(x.shape[1:])))


def linear(
    x: QTensor | ArrayLike,
    w: QTensor | PackedKernel | ArrayLike,
    bias: ArrayLike | None = None,
    *,
    x_scale: ArrayLike | None = None,
    w_scale: ArrayLike | None = None,
    activation: ActivationLike = None,
    out_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    grad_dtype: DTypeLike = jnp.bfloat16,
    algorithm: AlgorithmLike = None,
) -> QTensor | jax.Array:
    """Multiply quantized tensors, with bias and activation fused in; differentiable.

    It is :func:`jqconv.conv2d` with a window of 1x1, and means and runs what that does.

    Parameters
    ----------
    x : QTensor or Array
        Shape ``(..., C)``. A QTensor with a scalar scale, or a float array with `x_scale`.
    w : QTensor, PackedKernel or Array
        Shape ``(C, K)``, or packed from ``(1, 1, C, K)``. A float array comes with `w_scale`.
    bias : Array, optional
        Float of shape ``(K,)``.
    x_scale : Array or float, optional
        Scalar scale for a float `x`.
    w_scale : Array or float, optional
        Scale of shape ``()`` or ``(K,)`` for a float `w`.
    activation : str or (str, float), optional
        As for :func:`jqconv.qconv2d`.
    out_scale : Array or float, optional
        Scalar scale of the output; with it the result is a QTensor.
    out_dtype : dtype, optional
        float32 (default), bfloat16 or float16; with `out_scale` int8 (default) or uint8.
    grad_dtype : dtype, default bfloat16
        What the backward products, and the cotangents that reach them, are carried in: bfloat16,
        float16 or float32.
    algorithm : str, Algorithm or ConvAlgorithms, optional
        How to run it; chosen by jqconv if None.

    Returns
    -------
    QTensor or Array
        Of shape ``(..., K)``, as :func:`jqconv.conv2d` returns it.

    Raises
    ------
    TypeError
        If an operand is of a kind that the operation does not take.
    ValueError
        If shapes, scales, activation or `algorithm` cannot be used.

    Examples
    --------
    >>> x = quantize(jnp.ones((2, 8)), 0.5)
    >>> w = quantize(jnp.full((8, 3), 0.25), 0.25)
    >>> linear(x, w, jnp.array([0.0, 1.0, -5.0]), activation="relu")
    Array([[2., 3., 0.],
           [2., 3., 0.]], dtype=float32)
    """
    x = _as_tensor(x)
    kernel, channels = _as_kernel(w)
    if x.shape[-1:] != (channels,):
        raise ValueError(f"x has shape {x.shape}, expected (..., {channels}): the C of w")
    leading = x.shape[:-1]
    y = conv2d(
        reshape(x, (math.prod(leading), 1, 1, channels)),
        kernel,
        bias,
        x_scale=x_scale,
        w_scale=w_scale,
        padding="VALID",
        activation=activation,
        out_scale=out_scale,
        out_dtype=out_dtype,
        grad_dtype=grad_dtype,
        algorithm=algorithm,
    )
    return reshape(y, (*leading, y.shape[-1]))


# --- means of codes -------------------------------------------------------------------------------


def _steps(x: QTensor) -> jax.Array:
    """Return the codes less their zero point, in int32."""
    return jnp.asarray(x.values).astype(jnp.int32) - (x.zero_point or 0)


def _round_mean(x: QTensor, total: jax.Array, count: np.ndarray) -> jax.Array:
    """Return the code of ``total / count``, steps of `x` summed over `count`, half to even.

    Counted from the lowest code all is positive, where integer division rounds down; that code is
    even, so that parity is not changed. No mean leaves the range of the codes.
    """
    if count.max(initial=0) > _MAX_TERMS:
        raise ValueError(
            f"a mean of {count.max()} codes of a QTensor of shape {x.shape} could overflow int32; "
            f"at most {_MAX_TERMS} are safe: average in two steps"
        )
    low, _ = CODE_RANGE[x.dtype.name]
    divisor = jnp.broadcast_to(jnp.asarray(count, jnp.int32), total.shape)
    above_low = total + divisor * ((x.zero_point or 0) - low)
    quotient, remainder = lax.div(above_low, divisor), lax.rem(above_low, divisor)
    rounds_up = 2 * remainder + (quotient & 1) > divisor
    return (quotient + rounds_up.astype(jnp.int32) + low).astype(x.dtype)


# --- float views ----------------------------------------------------------------------------------


def _with_view(x: QTensor, codes: jax.Array, function: Callable[[Any], Any]) -> QTensor:
    """Return `codes` with the scale of `x`, and with a view if `x` has one.

    `function` is the same operation on floats, whose derivative the view has.
    """
    result = QTensor(codes, x.scale, x.zero_point)
    if x.fq is None:
        return result
    fq = jnp.asarray(x.fq, jnp.float32)
    operands = equally_varying([x.values, fq, result.dequantize()])
    view = _view(function, x.zero_point or 0, *operands)
    return QTensor(codes, x.scale, x.zero_point, fq=view)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _view(
    function: Callable[[Any], Any], zero: int, codes: jax.Array, fq: jax.Array, value: jax.Array
) -> jax.Array:
    """Return `value`, what the result's codes stand for, with the derivative of ``function(fq)``.

    Rounding passes straight through. Every function here is piecewise linear and keeps positive
    factors (``function(scale * steps) == scale * function(steps)``), so that its derivative at
    ``fq`` is that at ``codes - zero``: codes are kept for the backward pass, not floats, and the
    forward pass computes `function` in integers alone.
    """
    return value


def _view_fwd(
    function: Callable[[Any], Any], zero: int, codes: jax.Array, fq: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return first_order(value, fq), codes


def _view_bwd(
    function: Callable[[Any], Any], zero: int, codes: jax.Array, ct: jax.Array
) -> tuple[None, jax.Array, None]:
    # The barrier keeps XLA from making the wide copy of the codes early and holding it.
    codes, ct = lax.optimization_barrier((codes, ct))
    _, pull_back = jax.vjp(function, codes.astype(jnp.float32) - zero)
    (dfq,) = pull_back(ct)
    return None, dfq, None


_view.defvjp(_view_fwd, _view_bwd)


# --- canonical operands ---------------------------------------------------------------------------


def _as_tensor(value: Any, name: str = "x") -> QTensor | jax.Array:
    """Return a QTensor, or an array of floats."""
    if isinstance(value, QTensor):
        return value
    array = as_array(value, name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} is an array of {array.dtype}, expected a QTensor or floats; wrap codes as "
            "QTensor(values, scale)"
        )
    return jnp.asarray(array)


def _as_shape(shape: int | Sequence[int], old: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` for the elements of an array of shape `old`, with -1 worked out."""
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    new = [as_int(size, "shape") for size in sizes]
    elements, others = math.prod(old), math.prod(size for size in new if size != -1)
    if new.count(-1) == 1 and others:
        new[new.index(-1)] = elements // others
    if min(new, default=0) < 0 or math.prod(new) != elements:
        raise ValueError(
            f"x has shape {old}, of {elements} elements, which cannot take the shape {shape}; "
            "give it as many, and write out all sizes where one is 0"
        )
    return tuple(new)


def _as_axes(axis: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return `axis` as the axes from 0 that it names."""
    axes = range(rank) if axis is None else axis
    return np.lib.array_utils.normalize_axis_tuple(axes, rank, argname="axis")


def _as_kernel(w: Any) -> tuple[QTensor | PackedKernel | jax.Array, int]:
    """Return the weights of a dense layer as a 1x1 kernel, and the number of its inputs."""
    if isinstance(w, PackedKernel):
        _, *window, channels = w.values.shape
        if window != [1, 1]:
            raise ValueError(
                f"w is packed from a kernel with a window of {tuple(window)}, expected (1, 1): "
                "pack reshape(w, (1, 1, C, K))"
            )
        return w, channels
    w = _as_tensor(w, "w")
    if w.ndim != 2:
        raise ValueError(f"w has shape {w.shape}, expected (C, K)")
    return reshape(w, (1, 1, *w.shape)), w.shape[0]
