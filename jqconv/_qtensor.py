"""Quantized arrays: what they hold, and how they are made from float ones and back."""

from __future__ import annotations

import functools
import json
import math
import operator
from typing import Any, NoReturn, Self

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jqconv._first_order import first_order
from jqconv._residuals import keep, mark, marked
from jqconv._sharding import equally_varying

#: Smallest and largest code of each integer dtype that a QTensor may hold.
CODE_RANGE: dict[str, tuple[int, int]] = {"int8": (-128, 127), "uint8": (0, 255)}

#: The smallest normal number of float32; XLA takes smaller ones for 0.
_TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_pytree_with_keys_class
class QTensor:
    """A quantized array: integer codes and the scale that gives them meaning.

    It stands for the real numbers ``(values - zero_point) * scale``. It is a pytree of `values`,
    `scale` and `fq`. For ``in_axes``, ``in_specs`` and the like, a QTensor may hold an axis, None
    or a PartitionSpec in their places: ``jax.vmap(f, in_axes=(QTensor(0, None),))``.

    Parameters
    ----------
    values : Array
        The codes, int8 or uint8, of any shape.
    scale : Array or float
        The step between codes: float32 of shape ``()``, or ``(K,)`` along the last axis.
    zero_point : int, optional
        The code that stands for 0. ``None`` is a symmetric tensor (the same as 0).
    fq : Array, optional
        The float view of the same numbers, through which gradients flow: integer codes have
        none. :func:`quantize` and :func:`conv2d` make it; it costs nothing where it is not used,
        because XLA removes it. A QTensor with a view sends no gradient to its `scale`.

    Raises
    ------
    TypeError
        If `values` is no int8 or uint8 array.
    ValueError
        If `scale` has another shape, is not positive and finite (where that can be seen without
        asking a device), or `zero_point` is no code.

    Examples
    --------
    >>> q = QTensor(jnp.array([-128, 0, 127], jnp.int8), 0.5)
    >>> q
    QTensor(int8[3], scale=0.5)
    >>> q.dequantize()
    Array([-64. ,   0. ,  63.5], dtype=float32)
    """

    __slots__ = ("fq", "scale", "values", "zero_point")

    values: Any
    scale: Any
    zero_point: int | None
    fq: Any

    def __init__(
        self,
        values: ArrayLike,
        scale: ArrayLike,
        zero_point: int | None = None,
        fq: jax.Array | None = None,
    ) -> None:
        self.values, self.scale, self.zero_point, self.fq = values, scale, zero_point, fq
        if _is_placeholder(values, scale):
            self.fq = values if fq is None else fq  # a view goes where its codes go
            return
        self.values = as_array(values, "values")
        if self.values.dtype.name not in CODE_RANGE:
            raise TypeError(f"values must be int8 or uint8, got {self.values.dtype}")
        self.scale = as_scale(scale, "scale", channels=(self.values.shape or (None,))[-1])
        self.zero_point = as_zero_point(zero_point, self.values.dtype.name)
        view = None if fq is None else as_array(fq, "fq")
        if view is not None and (
            view.shape != self.values.shape or not jnp.issubdtype(view.dtype, jnp.floating)
        ):
            raise ValueError(
                f"fq has shape {tuple(view.shape)} and dtype {view.dtype}, expected a float array "
                f"of the values' shape, {self.shape}"
            )
        self.fq = view

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return tuple(self.values.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the codes."""
        return np.dtype(self.values.dtype)

    @property
    def ndim(self) -> int:
        """Rank of the codes."""
        return len(self.shape)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Return the numbers that the codes stand for, as floats.

        The float view is returned where there is one, so that gradients pass.
        """
        if self.fq is not None:
            return jnp.asarray(self.fq, dtype)
        codes = jnp.asarray(self.values).astype(jnp.float32) - (self.zero_point or 0)
        return (codes * over_last(self.scale, self.ndim)).astype(dtype)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse: functions of arrays would take codes for numbers."""
        raise TypeError(
            "a QTensor is no array: use the functions of jqconv and jqconv.nn, or its floats, "
            "dequantize(), or its codes, values"
        )

    __jax_array__ = __array__

    def __repr__(self) -> str:
        if not hasattr(self.values, "dtype"):  # a tree of axes, specs or shapes, not of arrays
            return f"QTensor({self.values!r}, scale={self.scale!r})"
        scale = _brief(self.scale)
        zero = "" if self.zero_point is None else f", zero_point={self.zero_point}"
        view = "" if self.fq is None else ", fq"
        return f"QTensor({_brief_type(self.values)}, scale={scale}{zero}{view})"

    def tree_flatten_with_keys(self) -> tuple[Any, int | None]:
        """Children with their names, and the static rest, for jax.tree_util."""
        names = ("values", "scale", "fq")
        children = [(jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in names]
        return children, self.zero_point

    @classmethod
    def tree_unflatten(cls, zero_point: int | None, children: Any) -> Self:
        """Rebuild without checks: JAX puts axes, specs and placeholders where arrays were."""
        new = object.__new__(cls)
        new.values, new.scale, new.fq = children
        new.zero_point = zero_point
        return new


@jax.tree_util.register_pytree_with_keys_class
class PackedKernel:
    """An int8 kernel in the order in which convolutions read it (OHWI), made by :func:`prepack`.

    Parameters
    ----------
    values : Array
        int8 of shape ``(K, kh, kw, C / groups)``.
    scale : Array, optional
        float32 of shape ``()`` or ``(K,)``; ``None`` where the kernel came without one.
    """

    __slots__ = ("scale", "values")

    values: Any
    scale: Any

    def __init__(self, values: ArrayLike, scale: ArrayLike | None = None) -> None:
        self.values, self.scale = values, scale
        if _is_placeholder(values, scale):
            return
        self.values = as_array(values, "values")
        if self.values.dtype != jnp.int8 or self.values.ndim != 4:
            raise TypeError(
                "a packed kernel holds int8 values of shape (K, kh, kw, C / groups), got "
                f"{_brief_type(self.values)}"
            )
        self.scale = (
            None if scale is None else as_scale(scale, "scale", channels=self.values.shape[0])
        )

    def __repr__(self) -> str:
        if not hasattr(self.values, "dtype"):
            return f"PackedKernel({self.values!r}, scale={self.scale!r})"
        return f"PackedKernel(OHWI {_brief_type(self.values)}, scale={_brief(self.scale)})"

    def tree_flatten_with_keys(self) -> tuple[Any, None]:
        """Children with their names, for jax.tree_util."""
        children = [
            (jax.tree_util.GetAttrKey(name), getattr(self, name)) for name in ("values", "scale")
        ]
        return children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> Self:
        """Rebuild without checks."""
        new = object.__new__(cls)
        new.values, new.scale = children
        return new


# So that an exported function may take and return them.
jax.export.register_pytree_node_serialization(
    QTensor,
    serialized_name="jqconv.QTensor",
    serialize_auxdata=lambda zero_point: json.dumps(zero_point).encode(),
    deserialize_auxdata=json.loads,
)
jax.export.register_pytree_node_serialization(
    PackedKernel,
    serialized_name="jqconv.PackedKernel",
    serialize_auxdata=lambda _: b"",
    deserialize_auxdata=lambda _: None,
)


def prepack(w: QTensor | ArrayLike) -> PackedKernel:
    """Reorder a kernel once, so that inference never transposes it.

    Parameters
    ----------
    w : QTensor or Array
        An int8 kernel of shape ``(kh, kw, C / groups, K)`` (HWIO), symmetric; a plain array has
        no scale and serves :func:`qconv2d` alone.

    Returns
    -------
    PackedKernel
        The same numbers in OHWI order. It takes part in no gradient.

    Raises
    ------
    TypeError
        If the values are not int8 of rank 4.
    ValueError
        If the kernel has a zero point: such kernels cannot run packed.

    Examples
    --------
    >>> prepack(QTensor(jnp.ones((3, 3, 8, 16), jnp.int8), 0.5))
    PackedKernel(OHWI int8[16,3,3,8], scale=0.5)
    """
    if isinstance(w, QTensor):
        check_holds_arrays(w, "w")
        values, scale = w.values, w.scale
    else:
        values, scale = as_array(w, "w"), None
    if values.dtype != jnp.int8 or values.ndim != 4:
        raise TypeError(
            f"a kernel to pack must be int8 of shape (kh, kw, C / groups, K), got "
            f"{_brief_type(values)}"
        )
    if isinstance(w, QTensor) and w.zero_point:
        raise ValueError(
            f"a kernel with zero_point={w.zero_point} cannot be packed; quantize it symmetrically"
        )
    return PackedKernel(to_ohwi(values), scale)


def to_ohwi(kernel: ArrayLike) -> jax.Array:
    """Return a kernel given in HWIO order in the order in which convolutions read it."""
    return jnp.transpose(kernel, (3, 0, 1, 2))


def quantize(
    x: ArrayLike,
    scale: ArrayLike,
    *,
    zero_point: int | None = None,
    dtype: DTypeLike = jnp.int8,
) -> QTensor:
    """Quantize a float array: ``clip(round_half_even(x / scale + zero_point))``.

    Differentiable: the gradient reaches `x` unchanged where `x` was not clipped and is 0 where it
    was (the straight-through estimator), and `scale` as a learned step size [1]_, without that
    paper's gradient-scale factor.

    Parameters
    ----------
    x : Array
        A float array.
    scale : Array or float
        Shape ``()``, or ``(K,)`` along the last axis of `x`.
    zero_point : int, optional
        The code for 0.
    dtype : dtype, default int8
        int8 or uint8.

    Returns
    -------
    QTensor
        With its float view, which XLA removes where it is not used.

    Raises
    ------
    TypeError
        If `x` is not floating point, or `dtype` neither int8 nor uint8.
    ValueError
        If `scale` or `zero_point` cannot be used.

    References
    ----------
    .. [1] Esser et al., "Learned step size quantization", ICLR 2020.

    Examples
    --------
    >>> quantize(jnp.array([0.3, -5.0, 1.0]), 0.01).values
    Array([  30, -128,  100], dtype=int8)
    """
    array = as_array(x, "x")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"quantize takes a float array, got {_brief_type(array)}")
    name = as_dtype(dtype, "dtype")
    if name not in CODE_RANGE:
        raise TypeError(f"quantize makes int8 or uint8, got dtype={name}")
    scale = as_scale(scale, "scale", channels=(array.shape or (None,))[-1])
    zero_point = as_zero_point(zero_point, name)
    codes, view = _quantize(name, zero_point or 0, *equally_varying([array, scale]))
    return QTensor(codes, scale, zero_point, fq=view)


def absmax_scale(x: ArrayLike, *, channel_axis: int | None = None) -> jax.Array:
    """Return the scale that maps the largest magnitude in `x` to code 127.

    Parameters
    ----------
    x : Array
        A float array.
    channel_axis : int, optional
        The axis to keep: one scale for each of its entries. ``None`` gives one for all of `x`.

    Returns
    -------
    Array
        float32 of shape ``()`` or ``(x.shape[channel_axis],)``. Where all is zero (or `x` is
        empty, or the scale were less than float32's smallest normal number) the scale is 1, and
        where there is a NaN it is NaN. It is a statistic: no gradient flows through it.

    Raises
    ------
    TypeError
        If `x` is not floating point, or `channel_axis` no int.
    ValueError
        If `channel_axis` is no axis of `x`.

    Examples
    --------
    >>> absmax_scale(jnp.array([[1.27, 0.0], [-2.54, 0.0]]), channel_axis=1)
    Array([0.02, 1.  ], dtype=float32)
    """
    array = as_array(x, "x")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"absmax_scale takes a float array, got {_brief_type(array)}")
    rank, kept = array.ndim, None
    if channel_axis is not None:
        kept = as_index(channel_axis, "channel_axis")
        if not -rank <= kept < rank:
            raise ValueError(f"channel_axis={channel_axis} is no axis of an array of rank {rank}")
        kept %= rank
    axes = tuple(axis for axis in range(rank) if axis != kept)
    return scale_from(magnitude(jax.lax.stop_gradient(array), axes))


def magnitude(x: ArrayLike, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Return the largest magnitude over axes, all by default; 0 of nothing, NaN where one is.

    Bits are compared, whose order as integers is that of magnitudes with NaN above all: XLA's
    maximum of floats loses NaNs on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(jnp.abs(x).astype(jnp.float32), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=axes, initial=0), jnp.float32)


def scale_from(limit: jax.Array) -> jax.Array:
    """Return the scale that gives a magnitude the code 127; 1 where it would be no normal number.

    Of a NaN it is NaN.
    """
    scale = limit / 127
    return jnp.where(scale < _TINY, 1.0, scale)


def _is_placeholder(values: Any, scale: Any) -> bool:
    """Whether `values` stands for an array: an axis or a PartitionSpec, or None beside one."""
    kinds = int, jax.sharding.PartitionSpec
    if values is None:
        return scale is None or (isinstance(scale, kinds) and not isinstance(scale, bool))
    return isinstance(values, kinds) and not isinstance(values, bool)


def check_holds_arrays(value: QTensor | PackedKernel, name: str) -> None:
    """Refuse a tree of axes, specs or the like, which is no operand."""
    if not hasattr(value.values, "dtype"):
        raise TypeError(f"{name} is a {type(value).__name__} of axes or specs, not of arrays")


def as_array(value: ArrayLike, name: str) -> Any:
    """Return `value` as something with a shape and a dtype, without moving it to a device."""
    if isinstance(value, QTensor | PackedKernel):
        raise TypeError(
            f"{name} is a {type(value).__name__}, expected a plain array, such as its values"
        )
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    if isinstance(value, bool | int | float | list | tuple):
        return np.asarray(value)
    raise TypeError(f"{name} must be an array, got {type(value).__name__}")


def as_factor(value: ArrayLike, name: str, channels: int | None) -> Any:
    """Return a real `value` as a float32 array of shape ``()`` or ``(channels,)``.

    It is a NumPy array where the numbers are at hand, to be checked.
    """
    array = as_array(value, name)
    if not any(jnp.issubdtype(array.dtype, kind) for kind in (jnp.floating, jnp.integer)):
        raise TypeError(f"{name} must be a real number, got {array.dtype}")
    expected = "()" if channels is None else f"() or ({channels},)"
    if tuple(array.shape) not in ((), (channels,)):
        raise ValueError(f"{name} has shape {tuple(array.shape)}, expected {expected}")
    if isinstance(array, np.ndarray | np.generic):
        with np.errstate(over="ignore"):
            return np.asarray(array, np.float32)
    return array if isinstance(array, jax.ShapeDtypeStruct) else jnp.asarray(array, jnp.float32)


def as_scale(scale: ArrayLike, name: str, channels: int | None) -> Any:
    """Return `scale` as a float32 array of shape ``()`` or ``(channels,)``.

    Values are checked where they are at hand (Python and NumPy numbers); those of a device
    array are not, since reading them would wait for the device.
    """
    array = as_factor(scale, name, channels)
    if isinstance(array, np.ndarray) and not np.all(np.isfinite(array) & (array >= _TINY)):
        raise ValueError(
            f"{name} must be positive and finite in float32, and no less than its smallest normal "
            f"number, {_TINY:.3g}; got {scale!r}"
        )
    return array


def as_dtype(dtype: Any, name: str) -> str:
    """Return the name of a dtype."""
    try:
        return np.dtype("none" if dtype is None else dtype).name  # None is float64 to NumPy
    except TypeError:
        raise TypeError(f"{name} must be a dtype, got {dtype!r}") from None


def as_index(value: Any, name: str) -> int:
    """Return `value` as an int."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a static int, got {value!r}") from None


def as_zero_point(zero_point: int | None, dtype: str) -> int | None:
    """Return `zero_point` as a code of `dtype`, or None."""
    if zero_point is None:
        return None
    low, high = CODE_RANGE[dtype]
    code = as_index(zero_point, "zero_point")
    if not low <= code <= high:
        raise ValueError(f"zero_point={code} is no {dtype} code, expected {low} to {high}")
    return code


def round_to_codes(
    dtype: str, zero_point: int, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the codes of `x`, their float view, and where nothing was clipped."""
    low, high = CODE_RANGE[dtype]
    step = over_last(scale, x.ndim)
    rounded = jnp.round(x.astype(jnp.float32) / step + zero_point)
    codes = jnp.clip(rounded, low, high)
    return codes.astype(dtype), (codes - zero_point) * step, codes == rounded


# Compiled, although a step of other programs as a rule: jax.shard_map outside of jit has no rule
# for a bare custom VJP that asks what is differentiated.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _quantize(dtype: str, zero_point: int, x: jax.Array, scale: jax.Array) -> Any:
    return _quantize_vjp(dtype, zero_point, x, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantize_vjp(
    dtype: str, zero_point: int, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the codes of `x` and their float view, which has the derivatives.

    They are those of a learned step size, with `inside` where nothing was clipped::

        d/dx     = inside
        d/dscale = (code - zero_point) - inside * x / scale
    """
    codes, view, _ = round_to_codes(dtype, zero_point, x, scale)
    return codes, view


def _quantize_fwd(dtype: str, zero_point: int, x: Any, scale: Any) -> tuple[Any, Any]:
    codes, view, inside = round_to_codes(dtype, zero_point, x.value, scale.value)
    # The clip mask is kept as bits; x itself only where the scale is differentiated.
    learned = scale.perturbed
    saved = (keep(learned, x.value), keep(learned, codes), scale.value)
    asked = mark(["scale"] if learned else [], ["scale"])
    view = first_order(view, x.value)
    return (codes, view), (asked, pack_mask(inside), jnp.zeros((0,), x.value.dtype), saved)


def _quantize_bwd(dtype: str, zero_point: int, residuals: Any, cts: Any) -> tuple[Any, Any]:
    asked, bits, like_x, (x, codes, scale) = residuals
    _, ct = cts
    if isinstance(ct, jax.custom_derivatives.SymbolicZero):
        return None, None
    inside = unpack_mask(bits, ct.shape)
    dx = jnp.where(inside, ct, 0).astype(like_x.dtype)
    if not marked(asked, ["scale"]):
        return dx, None
    steps = codes.astype(jnp.float32) - zero_point
    ratio = x.astype(jnp.float32) / over_last(scale, x.ndim)
    slope = steps - jnp.where(inside, ratio, 0)
    return dx, sum_to_scale(ct * slope, scale)


_quantize_vjp.defvjp(_quantize_fwd, _quantize_bwd, symbolic_zeros=True)


def over_last(vector: ArrayLike, rank: int) -> jax.Array:
    """Return a scalar, or a vector of the last axis, ready to meet an array of `rank`.

    Written out, for programs that set ``jax_numpy_rank_promotion="raise"``.
    """
    array = jnp.asarray(vector)
    return array.reshape((1,) * (rank - array.ndim) + array.shape) if array.ndim else array


def sum_to_scale(terms: jax.Array, scale: jax.Array) -> jax.Array:
    """Sum `terms` to the shape of `scale`: all of it, or all but the last axis."""
    return jnp.sum(terms, axis=tuple(range(terms.ndim - scale.ndim)), dtype=jnp.float32)


def pack_mask(mask: jax.Array) -> jax.Array:
    """Return a boolean array as bits, eight to a byte."""
    return jnp.packbits(mask)


def unpack_mask(bits: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo :func:`pack_mask`."""
    return jnp.unpackbits(bits, count=math.prod(shape)).reshape(shape).astype(bool)


def _brief_type(array: Any) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _brief(scale: Any) -> str:
    """Return a scale as a short text; tracers and placeholders have none and show their type."""
    concrete = isinstance(scale, np.ndarray | jax.Array) and not isinstance(scale, jax.core.Tracer)
    if concrete and scale.shape == ():
        return f"{float(scale):.4g}"
    return _brief_type(scale) if hasattr(scale, "dtype") else repr(scale)
