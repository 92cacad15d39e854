"""Random problems: full-range codes, and epilogues on or off the exact grid."""

import dataclasses
import itertools
import math

import jax.numpy as jnp
import numpy as np
import oracle
from oracle import Geometry

from jqconv._spec import Activation, ConvSpec

ACTIVATIONS = (None, "relu", "relu6", ("leaky_relu", 0.125), "silu", "gelu", "hard_swish")
RESIDUALS = (None, "int8", "bfloat16", "float16", "float32")
OUTPUTS = ("int8", "uint8", "bfloat16", "float16", "float32")


def name_of(value) -> str:
    if isinstance(value, tuple):
        return ":".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, str) else repr(value)


def is_exact(activation) -> bool:
    """Whether the contract promises this activation bit for bit on a power-of-two grid."""
    return oracle.parse_activation(activation)[0] not in oracle.SMOOTH


def draw_codes(rng, shape, dtype="int8") -> np.ndarray:
    """Over the full range; both ends are always there where there is room."""
    low, high = oracle.LIMITS[dtype]
    codes = rng.integers(low, high + 1, shape).astype(dtype)
    if codes.size > 1:
        codes.flat[rng.integers(codes.size // 2)] = low
        codes.flat[-1] = high
    return codes


def scale_for(products: int, spread: float = 60.0) -> float:
    """The power of two that spreads accumulators of random codes over about this many units."""
    return 2.0 ** round(math.log2(spread / (5461 * math.sqrt(max(products, 1)))))


@dataclasses.dataclass(frozen=True)
class Form:
    """One kind of epilogue: what cuDNN's graph is made of, beside the geometry."""

    activation: str | tuple | None = None
    residual: str | None = None
    output: str | None = "int8"
    multiplier: str | None = "channel"
    bias: bool = True
    residual_scale: bool = False
    out_multiplier: bool = False

    def __str__(self):
        parts = [name_of(self.activation), f"to_{self.output}", self.multiplier or "raw"]
        if self.residual:
            parts.append(f"z_{self.residual}")
        parts += [
            word for word in ("bias", "residual_scale", "out_multiplier") if getattr(self, word)
        ]
        return "-".join(parts)


RAW = Form(output="int32", multiplier=None, bias=False)


def every_form() -> list[Form]:
    """Each activation with each residual, output and kind of scale, the rest drawn; and the raw."""
    rng = np.random.default_rng(11)
    options = itertools.product(ACTIVATIONS, RESIDUALS, OUTPUTS, ("scalar", "channel"))
    forms = [RAW]
    for activation, residual, output, multiplier in options:
        bias, scaled, multiplied = (bool(b) for b in rng.integers(2, size=3))
        scaled = scaled and residual is not None
        forms.append(Form(activation, residual, output, multiplier, bias, scaled, multiplied))
    return forms


def covering_forms() -> list[Form]:
    """Every pair of options; activation and residual twice; and the raw accumulator."""
    rng = np.random.default_rng(7)
    forms = [RAW]
    for turn, (a, activation), (r, residual) in itertools.product(
        range(2), enumerate(ACTIVATIONS), enumerate(RESIDUALS)
    ):
        channel, bias, scaled, multiplied = (bool(b) for b in rng.integers(2, size=4))
        forms.append(
            Form(
                activation,
                residual,
                OUTPUTS[(a + 2 * r + turn) % len(OUTPUTS)],
                "channel" if channel else "scalar",
                bias,
                scaled and residual is not None,
                multiplied,
            )
        )
    return forms


#: x_shape, kernel, K and where the taps fall.
GEOMETRIES = {
    "1x1": ((2, 5, 4, 16), (1, 1), 24, Geometry()),
    "1x1_stride_2": ((2, 5, 4, 16), (1, 1), 8, Geometry(strides=(2, 2))),
    "3x3": ((2, 6, 7, 8), (3, 3), 8, Geometry(padding=((1, 1), (1, 1)))),
    "stride_2_1": ((2, 7, 6, 8), (3, 3), 8, Geometry(strides=(2, 1), padding=((1, 0), (2, 1)))),
    "dilation": ((1, 9, 9, 4), (3, 3), 8, Geometry(dilation=(2, 3), padding=((2, 2), (3, 3)))),
    "asymmetric": ((2, 5, 5, 3), (2, 4), 5, Geometry(padding=((0, 3), (4, 1)))),
    "stem": ((1, 20, 18, 3), (7, 7), 16, Geometry(strides=(2, 2), padding=((3, 3), (3, 3)))),
    "batch_1_channels_129": ((1, 4, 4, 129), (3, 3), 131, Geometry(padding=((1, 1), (1, 1)))),
    "groups_2": ((2, 5, 5, 6), (3, 3), 10, Geometry(groups=2, padding=((1, 1), (1, 1)))),
    "groups_4": ((2, 5, 5, 16), (3, 3), 8, Geometry(groups=4)),
    "groups_32": ((1, 4, 4, 64), (3, 3), 64, Geometry(groups=32, strides=(2, 2))),
    "depthwise": ((2, 6, 6, 7), (3, 3), 7, Geometry(groups=7, padding=((1, 1), (1, 1)))),
    "depthwise_doubled": ((1, 6, 6, 5), (5, 3), 10, Geometry(groups=5, dilation=(1, 2))),
    "one_channel": ((3, 5, 5, 1), (3, 3), 1, Geometry()),
    "window_is_the_image": ((2, 4, 5, 8), (4, 5), 9, Geometry()),
    "stride_beyond_window": ((2, 9, 9, 4), (2, 2), 4, Geometry(strides=(3, 4))),
    "padding_beyond_window": ((1, 3, 3, 4), (2, 2), 4, Geometry(padding=((5, 4), (3, 6)))),
}


def window_of(geometry: Geometry) -> dict:
    """The options of conv2d and qconv2d, and fields of ConvSpec, that place the taps."""
    return {
        "strides": geometry.strides,
        "padding": geometry.padding,
        "dilation": geometry.dilation,
        "groups": geometry.groups,
    }


def spec_of(form: Form, geometry: Geometry, x_shape, w_shape) -> ConvSpec:
    """The spec that qconv2d makes of a form with these shapes of x and of the HWIO kernel."""
    return ConvSpec(
        x_shape=tuple(x_shape),
        w_shape=(w_shape[-1], *w_shape[:-1]),
        y_dtype=form.output,
        multiplier=form.multiplier,
        bias=form.bias,
        residual=form.residual,
        residual_scale=form.residual_scale,
        activation=Activation.parse(form.activation),
        out_multiplier=form.out_multiplier,
        **window_of(geometry),
    )


@dataclasses.dataclass(frozen=True)
class Problem:
    """Operands of one qconv2d in NumPy, and its answer."""

    form: Form
    geometry: Geometry
    x: np.ndarray
    w: np.ndarray
    multiplier: np.ndarray | None
    bias: np.ndarray | None
    residual: np.ndarray | None
    residual_scale: np.ndarray | None
    out_multiplier: np.ndarray | None

    @property
    def operands(self) -> tuple:
        return self.x, self.w, self.multiplier, self.bias

    @property
    def spec(self) -> ConvSpec:
        return spec_of(self.form, self.geometry, self.x.shape, self.w.shape)

    @property
    def options(self) -> dict:
        return window_of(self.geometry) | {
            "residual": self.residual,
            "residual_scale": self.residual_scale,
            "out_multiplier": self.out_multiplier,
            "activation": self.form.activation,
            "out_dtype": jnp.dtype(self.form.output),
        }

    @property
    def _terms(self):
        one = np.float32(1)
        return {
            "multiplier": one if self.multiplier is None else self.multiplier,
            "bias": self.bias,
            "residual": self.residual,
            "residual_scale": one if self.residual_scale is None else self.residual_scale,
        }

    @property
    def _out(self):
        return 1.0 if self.out_multiplier is None else float(self.out_multiplier)

    @property
    def answer(self) -> np.ndarray:
        acc = oracle.accumulate(self.x, self.w, self.geometry)
        dtype = self.form.output if self.form.output in oracle.LIMITS else None
        return oracle.epilogue(
            acc,
            **self._terms,
            activation=self.form.activation,
            out_multiplier=self._out,
            dtype=dtype,
        )

    @property
    def magnitude(self) -> np.ndarray:
        acc = oracle.accumulate(self.x, self.w, self.geometry)
        return oracle.magnitude(acc, **self._terms) * self._out


def draw_problem(
    rng,
    form: Form = Form(),
    *,
    x_shape=(2, 6, 5, 8),
    kernel=(3, 3),
    k=8,
    geometry: Geometry | None = None,
    exact=True,
) -> Problem:
    """A problem of this form; exact: all on a power-of-two grid, so that float32 rounds nothing."""
    geometry = geometry or Geometry(padding=oracle.same_padding(x_shape[1:3], kernel))
    w_shape = (*kernel, x_shape[-1] // geometry.groups, k)
    products = math.prod(w_shape[:3])
    clipped = form.activation == "relu6"
    spread = 4.0 if clipped or not is_exact(form.activation) else 60.0
    step = scale_for(products, spread)
    y_shape = (x_shape[0], *geometry.output_size(x_shape[1:3], kernel), k)

    def scale(shape, size):
        if exact:
            exponent = round(math.log2(size)) + rng.integers(-1, 2, shape)
            return np.exp2(exponent).astype(np.float32)
        return (size * np.exp(rng.uniform(-0.7, 0.7, shape))).astype(np.float32)

    def grid(shape, size):
        values = rng.uniform(-size, size, shape)
        return (np.round(values * 16) / 16 if exact else values).astype(np.float32)

    multiplier = None
    if form.multiplier:
        multiplier = scale((k,) if form.multiplier == "channel" else (), step)
    residual = None
    if form.residual == "int8":
        residual = draw_codes(rng, y_shape)
    elif form.residual:
        residual = grid(y_shape, spread).astype(jnp.dtype(form.residual))
    return Problem(
        form,
        geometry,
        draw_codes(rng, x_shape),
        draw_codes(rng, w_shape),
        multiplier,
        grid((k,), spread) if form.bias else None,
        residual,
        scale((), spread / 128 if form.residual == "int8" else 0.5)
        if form.residual_scale
        else None,
        scale((), 64 / spread) if form.out_multiplier else None,
    )
