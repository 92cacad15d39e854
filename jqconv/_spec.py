"""What one fused convolution is: shapes, dtypes, epilogue. Static and hashable.

A :class:`ConvSpec` is the one description that everything else agrees on: the primitives carry it
as a parameter, the algorithm is chosen for it, its text form crosses into the native side and is
the key of every cache there.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

Direction: TypeAlias = Literal["fprop", "dgrad", "wgrad"]
Pair: TypeAlias = tuple[int, int]
Shape4: TypeAlias = tuple[int, int, int, int]
Padding: TypeAlias = tuple[Pair, Pair]

#: Largest number of elements of one tensor that a convolution kernel can address.
MAX_ELEMENTS = 2**31 - 1

#: Activations by name, with the parameter that each takes when none is given.
ACTIVATIONS: dict[str, float | None] = {
    "relu": None,
    "relu6": None,
    "leaky_relu": 0.01,
    "silu": None,
    "gelu": None,
    "hard_swish": None,
}

FLOAT_DTYPES = ("float32", "bfloat16", "float16")
OUTPUT_DTYPES = ("int8", "uint8", "int32", *FLOAT_DTYPES)
RESIDUAL_DTYPES = ("int8", *FLOAT_DTYPES)

_ITEMSIZE = {
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
}

#: Largest magnitude of each integer operand; int16 holds a kernel less its zero point.
_MAGNITUDE = {"int8": 128, "int16": 255}


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation of the epilogue.

    Parameters
    ----------
    name : str
        A key of :data:`ACTIVATIONS`.
    parameter : float, optional
        The negative slope of ``leaky_relu``; the others take none.
    """

    name: str
    parameter: float | None = None

    @classmethod
    def parse(cls, activation: str | tuple[str, float] | Activation | None) -> Activation | None:
        """Return the canonical form of what a user gives as `activation`."""
        if activation is None or isinstance(activation, Activation):
            return activation
        pair = activation if isinstance(activation, tuple) else (activation, None)
        if len(pair) != 2 or not isinstance(pair[0], str):
            raise ValueError(
                f"activation={activation!r} must be a name or a pair of a name and a parameter"
            )
        name, parameter = pair
        if name not in ACTIVATIONS:
            raise ValueError(
                f"activation={activation!r} is unknown; use None or one of {', '.join(ACTIVATIONS)}"
            )
        default = ACTIVATIONS[name]
        if default is None and parameter is not None:
            raise ValueError(f"activation {name!r} takes no parameter, got {parameter!r}")
        if parameter is None:
            parameter = default
        elif not isinstance(parameter, numbers.Real) or not 0 <= parameter <= 1:
            raise ValueError(f"the slope of {name!r} must be from 0 to 1, got {parameter!r}")
        if parameter == 0:
            return cls("relu")
        return cls(name, None if parameter is None else float(parameter))

    @property
    def homogeneous(self) -> bool:
        """Whether ``act(a * v) == a * act(v)`` for ``a > 0``, so that an output scale folds in."""
        return self.name in ("relu", "leaky_relu")

    @property
    def smooth(self) -> bool:
        """Whether the derivative needs the value before the activation."""
        return self.name in ("silu", "gelu", "hard_swish")

    @property
    def negative_slope(self) -> float:
        """Slope of a piecewise-linear activation below 0."""
        return self.parameter or 0.0

    def __str__(self) -> str:
        return self.name if self.parameter is None else f"{self.name}:{self.parameter!r}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """One convolution in one direction, with its epilogue.

    Shapes are those of the whole convolution in every direction: `x_shape` is ``(N, H, W, C)``,
    `w_shape` is ``(K, R, S, C / groups)`` (OHWI, as cuDNN reads kernels), and the tensor that the
    direction computes is ``y`` for fprop, ``x`` for dgrad and ``w`` for wgrad.

    The epilogue of fprop is, in float32 and in this order::

        v = acc * multiplier;  v += bias;  v += residual * residual_scale
        v = activation(v);     v *= out_multiplier

    Raises
    ------
    ValueError
        Where the fields contradict each other or name something that cannot be computed.
    """

    direction: Direction = "fprop"
    x_shape: Shape4
    w_shape: Shape4
    strides: Pair = (1, 1)
    padding: Padding = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    x_dtype: str = "int8"
    w_dtype: str = "int8"
    y_dtype: str = "int8"
    multiplier: Literal["scalar", "channel"] | None = None
    bias: bool = False
    residual: str | None = None
    residual_scale: bool = False
    activation: Activation | None = None
    out_multiplier: bool = False

    def __post_init__(self) -> None:
        self._check_geometry()
        if self.direction == "fprop":
            self._check_fprop()

    def _check_geometry(self) -> None:
        n, h, w, c = self.x_shape
        k, r, s, c_group = self.w_shape
        given = (
            f"x of shape {self.x_shape} (NHWC) and a kernel of shape {(r, s, c_group, k)} (HWIO)"
        )
        if min(n, h, w) < 0 or min(c, k, r, s, c_group) < 1:
            raise ValueError(f"{given}: channels and window must be at least 1")
        if self.groups < 1 or c % self.groups or k % self.groups:
            raise ValueError(
                f"{given}: groups={self.groups} must divide the {c} input and the {k} output "
                "channels"
            )
        if c_group * self.groups != c:
            raise ValueError(
                f"{given}: the kernel has {c_group} input channels, expected {c // self.groups}, "
                f"the {c} channels of x over groups={self.groups}"
            )
        for name, shape in (("x", self.x_shape), ("w", self.w_shape), ("y", self.y_shape)):
            if math.prod(shape) > MAX_ELEMENTS:
                raise ValueError(
                    f"{name} of shape {shape} has {math.prod(shape)} elements, more than the "
                    f"{MAX_ELEMENTS} that a convolution can address; split the batch, for "
                    "example with jax.lax.map"
                )

    def _check_fprop(self) -> None:
        if self.y_dtype not in OUTPUT_DTYPES:
            raise ValueError(f"out_dtype={self.y_dtype} is none of {', '.join(OUTPUT_DTYPES)}")
        if self.residual is not None and self.residual not in RESIDUAL_DTYPES:
            raise ValueError(
                f"a residual of {self.residual} cannot be added; "
                f"use one of {', '.join(RESIDUAL_DTYPES)}"
            )
        raw = self.multiplier is None
        if raw != (self.y_dtype == "int32") or (raw and self.formulation != "c"):
            raise ValueError(
                "out_dtype=int32 is the raw accumulator: it takes multiplier=None and no bias, "
                "residual, activation or out_multiplier, and every other out_dtype takes a "
                "multiplier"
            )
        if self.x_dtype not in _MAGNITUDE:
            return  # integers that a form carries as floats: fewer than overflow
        limit = (2**31 - 1) // self.product_magnitude
        if self.products > limit:
            raise ValueError(
                f"{self.products} products per output (channels per group x window) could "
                f"overflow the int32 accumulator; at most {limit} are safe"
            )

    @property
    def products(self) -> int:
        """Number of products summed into one accumulator."""
        return math.prod(self.w_shape[1:])

    @property
    def product_magnitude(self) -> int:
        """Largest magnitude of one product of the integer operands."""
        return _MAGNITUDE[self.x_dtype] * _MAGNITUDE[self.w_dtype]

    @property
    def y_shape(self) -> Shape4:
        """``(N, P, Q, K)``."""
        p, q = (
            output_size(size, window, stride, pad, dilation)
            for size, window, stride, pad, dilation in zip(
                self.x_shape[1:3],
                self.w_shape[1:3],
                self.strides,
                self.padding,
                self.dilation,
                strict=True,
            )
        )
        return (self.x_shape[0], p, q, self.w_shape[0])

    @property
    def result(self) -> tuple[Shape4, str]:
        """Shape and dtype of the tensor that this direction computes."""
        return {
            "fprop": (self.y_shape, self.y_dtype),
            "dgrad": (self.x_shape, self.x_dtype),
            "wgrad": (self.w_shape, self.w_dtype),
        }[self.direction]

    @property
    def operands(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name, shape and dtype of each operand, in the order in which they are passed."""
        x, w = (self.x_shape, self.x_dtype), (self.w_shape, self.w_dtype)
        y = (self.y_shape, self.y_dtype)
        if self.direction == "dgrad":
            return {"dy": y, "w": w}
        if self.direction == "wgrad":
            return {"x": x, "dy": y}
        k = self.w_shape[:1]
        found: dict[str, tuple[tuple[int, ...], str]] = {"x": x, "w": w}
        if self.multiplier is not None:
            found["multiplier"] = (k if self.multiplier == "channel" else (), "float32")
        if self.bias:
            found["bias"] = (k, "float32")
        if self.residual is not None:
            found["residual"] = (self.y_shape, self.residual)
        if self.residual_scale:
            found["residual_scale"] = ((), "float32")
        if self.out_multiplier:
            found["out_multiplier"] = ((), "float32")
        return found

    @property
    def formulation(self) -> str:
        """The epilogue's canonical order: one letter a step, ``"c"`` for a bare convolution."""
        return self.formulations[0]

    @property
    def formulations(self) -> list[str]:
        """The orders of the epilogue's steps that mean the same, the canonical one first."""
        steps = {
            "s": self.multiplier is not None,
            "b": self.bias,
            "z": self.residual is not None,
            "r": self.activation is not None,
            "o": self.out_multiplier,
        }
        canonical = "".join(letter for letter, present in steps.items() if present) or "c"
        swapped = canonical.replace("bz", "zb")
        return [canonical] if swapped == canonical else [canonical, swapped]

    @property
    def bytes_held(self) -> int:
        """Bytes of all operands and of the result."""
        tensors = [*self.operands.values(), self.result]
        return sum(math.prod(shape) * _ITEMSIZE[dtype] for shape, dtype in tensors)

    @property
    def bytes_moved(self) -> int:
        """Bytes that a run reads and writes, each once: of x those that a window covers."""
        if self.direction == "dgrad":  # writes all of x
            return self.bytes_held
        n, h, w, c = self.x_shape
        covered = math.prod(self._covered(axis) for axis in (0, 1))
        return self.bytes_held - n * (h * w - covered) * c * _ITEMSIZE[self.x_dtype]

    def _covered(self, axis: int) -> int:
        """Return how many positions of x along a spatial axis are in some window."""
        starts = range(0, self.y_shape[1 + axis] * self.strides[axis], self.strides[axis])
        taps = range(0, self.w_shape[1 + axis] * self.dilation[axis], self.dilation[axis])
        low = self.padding[axis][0]
        positions = {start + tap - low for start in starts for tap in taps}
        return sum(0 <= position < self.x_shape[1 + axis] for position in positions)

    @property
    def operations(self) -> int:
        """Operations of one run: two for each product."""
        return 2 * math.prod(self.y_shape) * self.products

    @property
    def empty(self) -> bool:
        """Whether an operand or the result has no elements: nothing for a kernel to do."""
        return 0 in (*self.x_shape, *self.y_shape)

    def backward(self, direction: Direction, dtype: str) -> ConvSpec:
        """Return the spec of this convolution's gradient in `direction`, carried in `dtype`."""
        return ConvSpec(
            direction=direction,
            x_shape=self.x_shape,
            w_shape=self.w_shape,
            strides=self.strides,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            x_dtype=dtype,
            w_dtype=dtype,
            y_dtype=dtype,
        )

    def __str__(self) -> str:
        def tensor(dtype: str, shape: Sequence[int]) -> str:
            return f"{dtype}:{_commas(shape)}"

        fields: dict[str, str | None] = {
            "direction": self.direction,
            "x": tensor(self.x_dtype, self.x_shape),
            "w": tensor(self.w_dtype, self.w_shape),
            "y": tensor(self.y_dtype, self.y_shape),
            "strides": _commas(self.strides),
            "padding": _commas([*self.padding[0], *self.padding[1]]),
            "dilation": _commas(self.dilation),
            "groups": str(self.groups),
            "multiplier": self.multiplier,
            "bias": "channel" if self.bias else None,
            "residual": self.residual,
            "residual_scale": "scalar" if self.residual_scale else None,
            "activation": None if self.activation is None else str(self.activation),
            "out_multiplier": "scalar" if self.out_multiplier else None,
        }
        return " ".join(f"{key}={value}" for key, value in fields.items() if value is not None)


def output_size(size: int, window: int, stride: int, pad: Pair, dilation: int) -> int:
    """Return the number of windows along one axis: ``floor((size + pad - span) / stride) + 1``."""
    span = dilation * (window - 1) + 1
    return max(0, (size + sum(pad) - span) // stride + 1)


def as_int(value: Any, name: str) -> int:
    """Return `value` as an int."""
    if not _is_int(value):
        raise ValueError(f"{name}={value!r} must be an int")
    return operator.index(value)


def as_pair(value: Any, name: str, minimum: int, axes: str = "height, width") -> Pair:
    """Return `value`, an int or two of them, as a pair of ints of at least `minimum`."""
    given = (value, value) if _is_int(value) else value
    if not (isinstance(given, tuple | list) and len(given) == 2 and all(map(_is_int, given))):
        raise ValueError(f"{name}={value!r} must be an int or a pair of ints ({axes})")
    first, second = (operator.index(v) for v in given)
    if min(first, second) < minimum:
        raise ValueError(f"{name}={value!r} must be at least {minimum}")
    return first, second


def as_padding(
    padding: Any, size: Sequence[int], window: Sequence[int], strides: Pair, dilation: Pair
) -> Padding:
    """Return what a user gives as `padding` as ``((top, bottom), (left, right))``."""
    if isinstance(padding, str):
        return _named_padding(padding, size, window, strides, dilation)
    if isinstance(padding, tuple | list) and not all(map(_is_int, padding)):
        if len(padding) != 2:
            raise ValueError(f"padding={padding!r} must hold two pairs (height, width)")
        height, width = (as_pair(p, "padding", 0, "before and after") for p in padding)
        return height, width
    rows, columns = as_pair(padding, "padding", 0)
    return (rows, rows), (columns, columns)


def _named_padding(
    name: str, size: Sequence[int], window: Sequence[int], strides: Pair, dilation: Pair
) -> Padding:
    kind = name.upper()  # as in jax.lax
    if kind == "VALID":
        return (0, 0), (0, 0)
    if kind != "SAME":
        raise ValueError(f"padding={name!r} is unknown; use 'SAME', 'VALID', an int or pairs")

    def same(axis: int) -> Pair:
        # ceil(size / stride) windows, the odd element of padding at the end.
        span = dilation[axis] * (window[axis] - 1) + 1
        windows = -(-size[axis] // strides[axis])
        total = max(0, (windows - 1) * strides[axis] + span - size[axis])
        return total // 2, total - total // 2

    return same(0), same(1)


def _commas(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _is_int(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True
