"""The int8 layer that a QConv is frozen into."""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jqconv._conv import as_int8, as_residual, qconv2d
from jqconv._qtensor import PackedKernel, QTensor, quantize, to_ohwi
from jqconv._spec import FLOAT_DTYPES, as_padding, as_pair
from jqconv._vjp import with_zero_point
from jqconv.flax._state import Quant, scale_of
from jqconv.nn import reshape

if TYPE_CHECKING:
    from jqconv.flax._qconv import QConv

Kind: TypeAlias = Literal["none", "codes", "floats"]

#: What a frozen layer has from the layer that it was, under the same names.
_KEPT = (
    "in_features",
    "out_features",
    "kernel_size",
    "strides",
    "padding",
    "kernel_dilation",
    "feature_group_count",
    "activation",
    "algorithm",
)


class Int8Conv(nnx.Module):
    """A frozen :class:`QConv`: int8 kernel packed, multiplier and bias computed once.

    Made by :func:`freeze`. It has the attributes of the layer that say what its shape is, and no
    gradient.
    """

    in_features: int
    out_features: int
    kernel_size: Sequence[int]
    strides: Any
    padding: Any
    kernel_dilation: Any
    feature_group_count: int
    activation: Any
    algorithm: Any

    def __init__(self, layer: QConv, x: Any, residual: Any) -> None:
        """Freeze `layer` for operands with these scales, folding the output's where it can be."""
        _check_freezes(layer)
        for name in _KEPT:
            setattr(self, name, getattr(layer, name))
        is_int8 = layer.output == "int8"
        folds = is_int8 and (layer.activation is None or layer.activation.homogeneous)
        out_scale = scale_of(layer.out_scale)
        inverse = 1 / out_scale
        factor = inverse if folds else 1.0
        x_scale = x.scale if isinstance(x, QTensor) else scale_of(layer.x_scale)
        w_scale = scale_of(layer.kernel_scale)
        kernel = to_ohwi(quantize(layer.kernel[...].astype(jnp.float32), w_scale).values)
        multiplier = x_scale * w_scale
        _, residual_scale = _as_added(residual)

        self.takes_codes = isinstance(x, QTensor)
        self.x_zero = as_int8(x)[1] if isinstance(x, QTensor) else 0
        self.takes_residual = _kind(residual, residual_scale)
        self.out_dtype = jnp.dtype(jnp.int8 if is_int8 else float_dtype(layer, x))
        self.kernel = Quant(kernel)
        self.multiplier = Quant(multiplier * factor)
        bias = None if layer.bias is None else layer.bias[...].astype(jnp.float32)
        bias = with_zero_point(bias, self.x_zero, kernel, multiplier)
        self.bias = _variable(None if bias is None else bias * factor)
        self.x_scale = Quant(x_scale)
        if folds and residual is not None:
            residual_scale = inverse if residual_scale is None else residual_scale * inverse
        self.residual_scale = _variable(residual_scale)
        self.out_multiplier = _variable(inverse if is_int8 and not folds else None)
        self.out_scale = _variable(out_scale if is_int8 else None)

    def __call__(self, inputs: Any, *, residual: Any = None) -> Any:
        """Convolve as the layer did that this was made from: with the same kinds of operands.

        Parameters
        ----------
        inputs : QTensor or Array
            Of shape ``(..., H, W, C)``: a QTensor where the layer before returns one, of the scale
            that it had when the model was frozen.
        residual : QTensor or Array, optional
            Likewise.

        Returns
        -------
        QTensor or Array
            As the layer's `output` says.

        Raises
        ------
        TypeError
            If an operand is of another kind than the layer was frozen for, or differentiated.
        ValueError
            If a QTensor is of another scale than the layer was frozen for. Under `jax.jit`, where
            scales are not known, that is not noticed.
        """
        if isinstance(inputs, QTensor) != self.takes_codes:
            expected = "a QTensor" if self.takes_codes else "a float array"
            raise TypeError(f"the layer was frozen for {expected}, got {type(inputs).__name__}")
        x = flat(constant(as_floats_or_codes(inputs)))
        codes, zero = as_int8(x if isinstance(x, QTensor) else quantize(x, self.x_scale[...]))
        added, scale = _as_added(None if residual is None else flat(constant(residual)))
        self._check_kinds(zero, _kind(residual, scale))
        if isinstance(x, QTensor):
            _check_scale("its input", x.scale, self.x_scale[...])
        if scale is not None:
            _check_scale("its residual", scale, self.residual_scale[...], self._folded())
        padding = self.padding
        if zero:  # a convolution's own padding would be the code 0, not the number
            strides = as_pair(steps(self.strides), "strides", 1)
            dilation = as_pair(steps(self.kernel_dilation), "dilation", 1)
            widths = as_padding(padding, codes.shape[1:3], self.kernel_size, strides, dilation)
            codes = jnp.pad(codes, ((0, 0), *widths, (0, 0)), constant_values=zero)
            padding = "VALID"
        y = qconv2d(
            codes,
            PackedKernel(self.kernel[...]),
            self.multiplier[...],
            _value(self.bias),
            strides=steps(self.strides),
            padding=padding,
            dilation=steps(self.kernel_dilation),
            groups=self.feature_group_count,
            residual=added,
            residual_scale=_value(self.residual_scale),
            activation=self.activation,
            out_multiplier=_value(self.out_multiplier),
            out_dtype=self.out_dtype,
            algorithm=self.algorithm,
        )
        out_scale = _value(self.out_scale)
        return unflat(y if out_scale is None else QTensor(y, out_scale), inputs.shape[:-3])

    def _check_kinds(self, x_zero: int, residual: Kind) -> None:
        if x_zero != self.x_zero:
            raise TypeError(
                f"the layer was frozen for a QTensor whose zero point, as int8, is {self.x_zero}; "
                f"got one of {x_zero}"
            )
        if residual != self.takes_residual:
            raise TypeError(
                f"the layer was frozen for a residual of {self.takes_residual}, got one of "
                f"{residual}"
            )

    def _folded(self) -> Any:
        """Return the output's scale where the other factors were divided by it, or else 1."""
        folds = self.out_scale is not None and self.out_multiplier is None
        return self.out_scale[...] if folds else 1.0

    def filled(self, number: int, x: Any, residual: Any) -> Any:
        """Return an output of this number alone: what freezing is after are scales."""
        y = jax.eval_shape(lambda: self(x, residual=residual))
        values = jnp.full(y.shape, number, y.dtype)
        return QTensor(values, self.out_scale[...]) if isinstance(y, QTensor) else values


def _check_scale(what: str, given: Any, frozen: Any, folded: Any = 1.0) -> None:
    """Refuse another scale than the one frozen, divided by `folded`, where all are known."""
    if any(isinstance(scale, jax.core.Tracer) for scale in (given, frozen, folded)):
        return
    expected = np.asarray(frozen) * np.asarray(folded)
    if not np.allclose(given, expected, rtol=1e-5, atol=0):
        raise ValueError(
            f"the layer was frozen for the scale {float(expected):.6g} of {what}, got "
            f"{float(given):.6g}: give codes of that scale, or floats and freeze the layer for them"
        )


def _check_freezes(layer: QConv) -> None:
    if isinstance(layer.norm, nnx.BatchNorm):
        raise ValueError("a QConv with a norm cannot be frozen: call fold_batch_norm first")
    if layer.norm is not None:
        raise ValueError(
            f"a QConv with a {type(layer.norm).__name__} cannot be frozen, which is in float: "
            "put it after the layer"
        )


@dataclasses.dataclass(frozen=True)
class Freezing:
    """One run of a model that is being frozen, and its frozen layers by the id of the layer.

    `number` stands in the place of what layers compute: 0 in the first run, and 1 in the second,
    on other inputs, which shows what scales depend on.
    """

    layers: dict[int, Int8Conv]
    number: int

    def freeze(self, layer: QConv, x: Any, residual: Any) -> Any:
        """Freeze a layer, and return what stands for its output.

        One that is called twice must come to the same.
        """
        frozen = Int8Conv(layer, x, residual)
        before = self.layers.setdefault(id(layer), frozen)
        if before is not frozen and not _alike(before, frozen):
            raise ValueError(_SCALE_VARIES if self.number else _CALLED_TWICE)
        return frozen.filled(self.number, x, residual)


_CALLED_TWICE = (
    "a QConv is called twice with operands of different kinds or scales, and cannot be frozen into "
    "one int8 layer: give each call a layer of its own"
)
_SCALE_VARIES = (
    "a QConv is given a QTensor whose kind or scale changes with the numbers in it, and a frozen "
    "layer has one scale for good: give it floats, which it quantizes by its calibrated scale, or "
    "quantize them by a fixed one"
)


def _alike(a: Int8Conv, b: Int8Conv) -> bool:
    kinds = [(one.takes_codes, one.x_zero, one.takes_residual, one.out_dtype) for one in (a, b)]
    if kinds[0] != kinds[1]:
        return False
    same = jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), nnx.state(a), nnx.state(b))
    return all(jax.tree.leaves(same))


#: Set while a model is being frozen.
freezing: contextvars.ContextVar[Freezing | None] = contextvars.ContextVar(
    "jqconv_freezing", default=None
)


# --- operands of both layers ----------------------------------------------------------------------


def as_floats_or_codes(x: Any) -> QTensor | jax.Array:
    """Return images of integers as floats, as `flax.nnx.Conv` takes them; refuse what is none."""
    if not hasattr(x, "dtype") or not hasattr(x, "shape"):
        raise TypeError(
            f"expected an array or a QTensor, got {type(x).__name__}; where batches are more than "
            "images, calibrate and sensitivity take call="
        )
    if len(x.shape) < 3:
        raise ValueError(f"expected an array of shape (..., H, W, C), got {tuple(x.shape)}")
    if isinstance(x, QTensor):
        return x
    return jnp.asarray(x, None if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float32)


def float_dtype(layer: QConv, x: QTensor | jax.Array) -> Any:
    """Return the dtype of a float output, as the float layer has it: codes are of any float."""
    own = layer.kernel[...].dtype
    found = layer.dtype or (own if isinstance(x, QTensor) else jnp.result_type(x.dtype, own))
    return found if jnp.dtype(found).name in FLOAT_DTYPES else jnp.float32


def constant(x: QTensor | jax.Array) -> QTensor | jax.Array:
    """Return `x`; differentiating it is an error, where codes would send back a silent zero."""
    if not isinstance(x, QTensor):
        return _constant(jnp.asarray(x))
    if x.fq is None:
        return x
    return QTensor(x.values, x.scale, x.zero_point, _constant(x.fq))


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    return x


@_constant.defjvp
def _refuse(primals: Any, tangents: Any) -> Any:
    raise TypeError(
        "a frozen QConv has no gradient: differentiate the model before freeze, or keep gradients "
        "from its input with jax.lax.stop_gradient"
    )


def _as_added(residual: QTensor | jax.Array | None) -> tuple[Any, Any]:
    """Return the array that is added, and its scale where it is codes."""
    array, scale, _ = as_residual(residual, None)
    return array, scale


def _kind(residual: QTensor | jax.Array | None, scale: Any) -> Kind:
    if residual is None:
        return "none"
    return "floats" if scale is None else "codes"


def flat(x: Any) -> Any:
    """Return `x` with its leading axes as one."""
    return x if len(x.shape) == 4 else reshape(x, (-1, *x.shape[-3:]))


def unflat(y: Any, batch: tuple[int, ...]) -> Any:
    """Return `y` with the leading axes that `flat` took."""
    return y if len(batch) == 1 else reshape(y, (*batch, *y.shape[1:]))


def steps(value: Any) -> Any:
    """Return strides or a dilation of nnx.Conv, where None is 1, as conv2d takes them."""
    return 1 if value is None else value


def _variable(value: jax.Array | None) -> Any:
    return nnx.data(None) if value is None else Quant(value)


def _value(variable: Any) -> Any:
    return None if variable is None else variable[...]
