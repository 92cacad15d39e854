"""conv2d and qconv2d: what users give, checked and made canonical."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jqconv._algorithm import AlgorithmLike, ConvAlgorithms
from jqconv._qtensor import (
    CODE_RANGE,
    PackedKernel,
    QTensor,
    as_array,
    as_dtype,
    as_factor,
    as_scale,
    check_holds_arrays,
    quantize,
    to_ohwi,
)
from jqconv._sharding import equally_varying
from jqconv._spec import FLOAT_DTYPES, Activation, ConvSpec, as_int, as_padding, as_pair
from jqconv._vjp import Call, Operands, fprop, fused_conv

ActivationLike = str | tuple[str, float] | None
PaddingLike = str | int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]]
IntOrPair = int | tuple[int, int]


def qconv2d(
    x: ArrayLike,
    w: ArrayLike | PackedKernel,
    multiplier: ArrayLike | None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    residual_scale: ArrayLike | None = None,
    out_multiplier: ArrayLike | None = None,
    activation: ActivationLike = None,
    strides: IntOrPair = 1,
    padding: PaddingLike = "SAME",
    dilation: IntOrPair = 1,
    groups: int = 1,
    out_dtype: DTypeLike = jnp.int8,
    algorithm: AlgorithmLike = None,
) -> jax.Array:
    """Convolve int8 codes, with everything the kernel's epilogue can do and nothing around it.

    With ``acc`` the exact int32 accumulator, in float32::

        v = acc * multiplier + bias + residual * residual_scale
        y = activation(v) * out_multiplier

    and for int8 and uint8 outputs ``clip(round_half_to_even(y))``. For inference with multipliers
    and biases computed once; it has no derivative (:func:`conv2d` has).

    Parameters
    ----------
    x : Array
        int8 of shape ``(N, H, W, C)``.
    w : Array or PackedKernel
        int8 of shape ``(kh, kw, C / groups, K)``, or packed. The scale of a packed kernel is not
        used: it is in `multiplier`.
    multiplier : Array or float, or None
        float32 of shape ``()`` or ``(K,)``. None for, and only for, ``out_dtype=int32``.
    bias : Array, optional
        float32 of shape ``(K,)``.
    residual : Array, optional
        int8, bfloat16, float16 or float32 of the output's shape. Where its dtype is the output's
        the result is written over it, which XLA does without a copy if it is not used again.
    residual_scale : Array or float, optional
        Scalar; 1 without it.
    out_multiplier : Array or float, optional
        Scalar, applied after the activation.
    activation : str or (str, float), optional
        ``"relu"``, ``"relu6"``, ``"leaky_relu"`` or ``("leaky_relu", slope)`` with a slope from 0
        to 1, ``"silu"``, ``"gelu"`` (tanh form) or ``"hard_swish"``.
    strides, dilation : int or pair of int
        For height and width.
    padding : str, int or pairs
        ``"SAME"``, ``"VALID"``, an int, ``(height, width)`` or ``((top, bottom), (left, right))``.
    groups : int
        Feature groups.
    out_dtype : dtype
        int8, uint8, bfloat16, float16, float32, or int32 for the bare accumulator.
    algorithm : str, Algorithm or ConvAlgorithms, optional
        How to run it; chosen by jqconv if None. See :class:`Algorithm`.

    Returns
    -------
    Array
        `out_dtype` of shape ``(N, P, Q, K)``.

    Raises
    ------
    TypeError
        If an operand has a dtype that the operation does not take.
    ValueError
        If shapes, scales, padding, activation or `algorithm` cannot be used.

    Examples
    --------
    >>> x = jnp.full((1, 4, 4, 8), 3, jnp.int8)
    >>> w = prepack(jnp.ones((3, 3, 8, 16), jnp.int8))
    >>> qconv2d(x, w, 0.125, activation="relu")[0, 1, 1, :4]
    Array([27, 27, 27, 27], dtype=int8)
    """
    codes = _as_codes(x, "x", "an int8 array")
    if isinstance(w, PackedKernel):
        kernel = w.values
        _check_rank(codes, kernel)
    else:
        kernel = _as_codes(w, "w", "an int8 array or a PackedKernel")
        _check_rank(codes, kernel)
        kernel = to_ohwi(kernel)
    channels = kernel.shape[0]
    multiplier = None if multiplier is None else _as_float(multiplier, "multiplier", channels)
    bias = _as_bias(bias, channels)
    residual = None if residual is None else _single(as_array(residual, "residual"))
    if residual is None and residual_scale is not None:
        raise ValueError("residual_scale is given without a residual")
    spec = _make_spec(
        codes,
        kernel,
        strides,
        padding,
        dilation,
        groups,
        y_dtype=as_dtype(out_dtype, "out_dtype"),
        multiplier=_kind(multiplier),
        bias=bias is not None,
        residual=None if residual is None else residual.dtype.name,
        residual_scale=residual_scale is not None,
        activation=Activation.parse(activation),
        out_multiplier=out_multiplier is not None,
    )
    _check_residual(spec, residual)
    optional = {
        "residual_scale": _as_float(residual_scale, "residual_scale", None),
        "out_multiplier": _as_float(out_multiplier, "out_multiplier", None),
    }
    given = {"x": codes, "w": kernel, "multiplier": multiplier, "bias": bias, "residual": residual}
    return fprop(spec, ConvAlgorithms.parse(algorithm), {**given, **optional})


def conv2d(
    x: QTensor | ArrayLike,
    w: QTensor | PackedKernel | ArrayLike,
    bias: ArrayLike | None = None,
    *,
    x_scale: ArrayLike | None = None,
    w_scale: ArrayLike | None = None,
    residual: QTensor | ArrayLike | None = None,
    residual_scale: ArrayLike | None = None,
    strides: IntOrPair = 1,
    padding: PaddingLike = "SAME",
    dilation: IntOrPair = 1,
    groups: int = 1,
    activation: ActivationLike = None,
    out_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    grad_dtype: DTypeLike = jnp.bfloat16,
    algorithm: AlgorithmLike = None,
) -> QTensor | jax.Array:
    """Convolve quantized tensors, with bias, residual and activation fused in; differentiable.

    With ``x̂ = x_scale * x`` and ``ŵ = w_scale * w`` the numbers that the codes stand for::

        v = conv(x̂, ŵ) + bias + residual
        y = activation(v)                                  # a float array
        y = clip(round_half_to_even(activation(v) / out_scale))   # with out_scale: codes

    computed from the exact int32 accumulator in one kernel. Its gradient is that of the same
    function with rounding passed straight through and 0 where a code was clipped; scales have the
    gradient of learned step sizes. `docs/numerics.md` states both in full.

    Parameters
    ----------
    x : QTensor or Array
        Shape ``(N, H, W, C)``. A QTensor with a scalar scale, or a float array with `x_scale`,
        which is quantized on the way in.
    w : QTensor, PackedKernel or Array
        Shape ``(kh, kw, C / groups, K)`` (HWIO), or packed. A float array comes with `w_scale`.
    bias : Array, optional
        Float of shape ``(K,)``.
    x_scale : Array or float, optional
        Scalar scale for a float `x`.
    w_scale : Array or float, optional
        Scale of shape ``()`` or ``(K,)`` for a float `w`.
    residual : QTensor or Array, optional
        Of the output's shape: a QTensor with a scalar scale, an int8 array with `residual_scale`,
        or a float array (bfloat16, float16, float32).
    residual_scale : Array or float, optional
        Scalar by which a residual array is multiplied.
    strides, dilation : int or pair of int
        For height and width.
    padding : str, int or pairs
        ``"SAME"``, ``"VALID"``, an int, ``(height, width)`` or ``((top, bottom), (left, right))``.
    groups : int
        Feature groups.
    activation : str or (str, float), optional
        As for :func:`qconv2d`.
    out_scale : Array or float, optional
        Scalar scale of the output; with it the result is a QTensor, so that layers chain in int8.
    out_dtype : dtype, optional
        float32 (default), bfloat16 or float16; with `out_scale` int8 (default) or uint8.
    grad_dtype : dtype, default bfloat16
        What the backward convolutions, and the cotangents that reach them, are carried in:
        bfloat16, float16 or float32.
    algorithm : str, Algorithm or ConvAlgorithms, optional
        How to run it; chosen by jqconv if None.

    Returns
    -------
    QTensor or Array
        Of shape ``(N, P, Q, K)``: a QTensor with `out_scale`, else a float array. The QTensor has
        a float view (`QTensor.fq`) where gradients could flow through it: where `x` or `w` was
        float, or an operand had a view.

    Raises
    ------
    TypeError
        If an operand is of a kind that the operation does not take: a QTensor with a scale beside
        it, a float array without one, an int8 array instead of a QTensor.
    ValueError
        If shapes, scales, padding, activation or `algorithm` cannot be used.

    Examples
    --------
    >>> x = quantize(jnp.linspace(-1, 1, 128).reshape(1, 4, 4, 8), 1 / 127)
    >>> w = quantize(jnp.ones((3, 3, 8, 16)), 1 / 127)
    >>> conv2d(x, w, activation="relu", out_scale=0.5)
    QTensor(int8[1,4,4,16], scale=0.5, fq)
    """
    xq = _as_quantized(x, x_scale, "x")
    wq = _as_quantized(w, w_scale, "w")
    _check_rank(xq.values, wq.values)
    if isinstance(xq, PackedKernel):
        raise TypeError("x is a PackedKernel, expected a QTensor or a float array")
    if xq.scale.ndim:
        raise ValueError(f"the scale of x has shape {xq.scale.shape}, expected ()")
    x_codes, x_zero = as_int8(xq)
    x_view = _as_view(xq.fq)
    w_codes, w_view = _as_kernel(wq)
    bias = _as_bias(bias, w_codes.shape[0])
    side, side_scale, side_view = as_residual(residual, residual_scale)
    act = Activation.parse(activation)
    y_dtype, out_scale = _output(out_scale, out_dtype)
    folds = out_scale is not None and (act is None or act.homogeneous)

    spec = _make_spec(
        x_codes,
        w_codes,
        strides,
        padding,
        dilation,
        groups,
        y_dtype=y_dtype,
        multiplier="channel" if wq.scale.ndim else "scalar",
        bias=bias is not None or x_zero != 0,
        residual=None if side is None else side.dtype.name,
        residual_scale=side is not None and (side_scale is not None or folds),
        activation=act,
        out_multiplier=out_scale is not None and not folds,
    )
    _check_residual(spec, side)
    if x_zero:
        spec, x_codes, x_view = _pad_explicitly(spec, x_codes, x_view, x_zero)
    views = (x_view, w_view, side_view)
    call = Call(
        spec=spec,
        algorithms=ConvAlgorithms.parse(algorithm),
        grad_dtype=as_grad_dtype(grad_dtype),
        x_zero=x_zero,
        carries_view=out_scale is not None and any(view is not None for view in views),
    )
    operands = Operands(
        x=x_codes,
        x_scale=xq.scale,
        x_view=x_view,
        w=w_codes,
        w_scale=wq.scale,
        w_view=w_view,
        bias=bias,
        residual=side,
        residual_scale=side_scale,
        residual_view=side_view,
        out_scale=out_scale,
    )
    # Before the derivative rule: it then returns cotangents of just the types it was given.
    y, view = fused_conv(call, equally_varying(operands))
    return y if out_scale is None else QTensor(y, out_scale, fq=view)


# --- canonical operands ---------------------------------------------------------------------------


def _check_rank(x: Any, w: Any) -> None:
    for name, shape in (("x", x.shape), ("w", w.shape)):
        if not all(isinstance(size, int) for size in shape):
            raise ValueError(f"{name} has the symbolic shape {shape}; export with fixed sizes")
    if x.ndim != 4:
        raise ValueError(f"x has shape {x.shape}, expected rank 4: (N, H, W, C)")
    if w.ndim != 4:
        raise ValueError(f"w has shape {w.shape}, expected rank 4: (kh, kw, C / groups, K)")


def _as_codes(value: Any, name: str, expected: str) -> Any:
    array = as_array(value, name)
    if array.dtype != jnp.int8:
        raise TypeError(f"{name} must be {expected}, got an array of {array.dtype}")
    return array


def _as_quantized(value: Any, scale: Any, name: str) -> QTensor | PackedKernel:
    """Return `x` or `w` as something quantized, or say which of value and scale is wrong."""
    if isinstance(value, QTensor | PackedKernel):
        kind = type(value).__name__
        check_holds_arrays(value, name)
        if scale is not None:
            raise TypeError(f"{name} is a {kind}, which has a scale: drop {name}_scale")
        if value.scale is None:
            raise TypeError(
                f"{name} is a {kind} without a scale, for qconv2d; prepack a QTensor for conv2d"
            )
        return value
    array = as_array(value, name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            f"{name} is an array of {array.dtype}; wrap codes as QTensor(values, scale), or call "
            "qconv2d"
        )
    if scale is None:
        raise TypeError(f"{name} is a float array without {name}_scale; give one to quantize it")
    channels = None if name == "x" else (array.shape or (None,))[-1]
    return quantize(array, as_scale(scale, f"{name}_scale", channels))


def _as_view(fq: Any) -> Any:
    return None if fq is None else jnp.asarray(fq, jnp.float32)


def as_int8(q: QTensor) -> tuple[Any, int]:
    """Return the codes and zero point of `q`, shifted together to int8 where they are uint8."""
    zero = q.zero_point or 0
    if q.dtype == jnp.int8:
        return q.values, zero
    # Flipping the top bit subtracts 128 and reinterprets in one exact step.
    shifted = lax.bitcast_convert_type(jnp.asarray(q.values) ^ np.uint8(128), jnp.int8)
    return shifted, zero - 128


def _as_kernel(w: QTensor | PackedKernel) -> tuple[Any, Any]:
    """Return a kernel's codes and its float view, both OHWI.

    A zero point is subtracted here: the difference needs int16, which takes the xla form.
    """
    if isinstance(w, PackedKernel):
        return w.values, None
    codes, zero = as_int8(w)
    if zero:
        codes = jnp.asarray(codes, jnp.int16) - np.int16(zero)
    view = None if w.fq is None else to_ohwi(_as_view(w.fq))
    return to_ohwi(codes), view


def as_residual(residual: Any, scale: Any) -> tuple[Any, Any, Any]:
    """Return what is added, the scalar that it is multiplied by, and its float view."""
    if residual is None:
        if scale is not None:
            raise ValueError("residual_scale is given without a residual")
        return None, None, None
    if isinstance(residual, QTensor):
        if scale is not None:
            raise TypeError("residual is a QTensor, which has a scale: drop residual_scale")
        if residual.scale.ndim:
            raise ValueError(f"the residual's scale has shape {residual.scale.shape}, expected ()")
        if residual.dtype != jnp.int8 or residual.zero_point:
            return _as_float_residual(residual)
        return residual.values, residual.scale, _as_view(residual.fq)
    array = _single(as_array(residual, "residual"))
    if array.dtype == jnp.int8 and scale is None:
        raise TypeError("an int8 residual needs a scale: give residual_scale, or a QTensor")
    return array, _as_float(scale, "residual_scale", None), None


def _single(array: Any) -> Any:
    """Return a float64 array, NumPy's default, as float32."""
    return jnp.asarray(array, jnp.float32) if array.dtype == np.float64 else array


def _as_float_residual(residual: QTensor) -> tuple[Any, None, Any]:
    """Return a residual that is not symmetric int8 as the floats that it stands for."""
    floats = QTensor(residual.values, residual.scale, residual.zero_point).dequantize()
    if residual.fq is None:
        return floats, None, None
    return lax.stop_gradient(floats), None, _as_view(residual.fq)


def _as_bias(bias: Any, channels: int) -> Any:
    if bias is None:
        return None
    array = as_array(bias, "bias")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"bias must be floating point, in the units of v; got {array.dtype}")
    if tuple(array.shape) != (channels,):
        raise ValueError(f"bias has shape {tuple(array.shape)}, expected ({channels},)")
    return jnp.asarray(array, jnp.float32)


def _as_float(value: Any, name: str, channels: int | None) -> Any:
    """Return a finite factor of any sign as float32, of shape ``()`` or ``(channels,)``."""
    if value is None:
        return None
    array = as_factor(value, name, channels)
    if isinstance(array, np.ndarray) and not np.all(np.isfinite(array)):
        raise ValueError(f"{name} must be finite in float32, got {value!r}")
    return jnp.asarray(array)


def _kind(multiplier: Any) -> Any:
    return None if multiplier is None else ("channel" if multiplier.ndim else "scalar")


def _output(out_scale: Any, out_dtype: Any) -> tuple[str, Any]:
    """Return the dtype of the output and its scale, if it has one."""
    if out_scale is None:
        name = as_dtype(out_dtype or jnp.float32, "out_dtype")
        if name not in FLOAT_DTYPES:
            raise ValueError(
                f"out_dtype={name} without out_scale: expected one of {', '.join(FLOAT_DTYPES)}; "
                "int8 and uint8 take out_scale, and int32 is qconv2d's"
            )
        return name, None
    name = as_dtype(out_dtype or jnp.int8, "out_dtype")
    if name not in CODE_RANGE:
        raise ValueError(f"out_dtype={name} with out_scale: expected int8 or uint8")
    return name, as_scale(out_scale, "out_scale", channels=None)


def as_grad_dtype(dtype: Any) -> str:
    """Return the name of a dtype that gradients may be carried in."""
    name = as_dtype(dtype, "grad_dtype")
    if name not in FLOAT_DTYPES:
        raise ValueError(f"grad_dtype={name} must be one of {', '.join(FLOAT_DTYPES)}")
    return name


def _make_spec(
    x: Any, w: Any, strides: Any, padding: Any, dilation: Any, groups: int, **epilogue: Any
) -> ConvSpec:
    groups = as_int(groups, "groups")
    strides = as_pair(strides, "strides", 1)
    dilation = as_pair(dilation, "dilation", 1)
    return ConvSpec(
        x_shape=tuple(x.shape),
        w_shape=tuple(w.shape),
        strides=strides,
        padding=as_padding(padding, x.shape[1:3], w.shape[1:3], strides, dilation),
        dilation=dilation,
        groups=groups,
        x_dtype=x.dtype.name,
        w_dtype=w.dtype.name,
        **epilogue,
    )


def _check_residual(spec: ConvSpec, residual: Any) -> None:
    if residual is not None and tuple(residual.shape) != spec.y_shape:
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}, expected the output's, {spec.y_shape}"
        )


def _pad_explicitly(spec: ConvSpec, x: Any, view: Any, zero: int) -> tuple[ConvSpec, Any, Any]:
    """Pad with the zero point: a convolution's own padding would be the code 0, not the number."""
    widths = ((0, 0), *spec.padding, (0, 0))
    shape = tuple(n + low + high for n, (low, high) in zip(x.shape, widths, strict=True))
    spec = dataclasses.replace(spec, x_shape=shape, padding=((0, 0), (0, 0)))  # may be too large
    x = jnp.pad(x, widths, constant_values=zero)
    return spec, x, None if view is None else jnp.pad(view, widths)
