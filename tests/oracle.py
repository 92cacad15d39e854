"""The numbers that jqconv has to give, in float64 NumPy, written from the op's definition alone.

Arrays are NHWC, kernels HWIO (kh, kw, C/groups, K), outputs NPQK. Integers are carried in float64,
which holds every accumulator exactly (|acc| <= 2**31 < 2**53): none from here has any rounding.

    acc = conv(x - x_zero_point, w - w_zero_point)          exact
    v   = acc * multiplier + bias + residual * residual_scale
    y   = act(v)                                            float output
    q   = clip(round_half_even(act(v) / out_scale))         integer output
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

Pair = tuple[int, int]

LIMITS = {"int8": (-128, 127), "uint8": (0, 255)}


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Where the kernel's taps fall; padding as ((top, bottom), (left, right))."""

    strides: Pair = (1, 1)
    padding: tuple[Pair, Pair] = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1

    def output_size(self, size: Pair, kernel: Pair) -> Pair:
        def one(n, k, stride, pad, dilation):
            return max((n + sum(pad) - dilation * (k - 1) - 1) // stride + 1, 0)

        return tuple(map(one, size, kernel, self.strides, self.padding, self.dilation))

    def taps(self, kernel: Pair, out: Pair) -> Iterator[tuple[int, int, slice, slice]]:
        """Each tap (i, j) with the slices of the padded input that it meets."""
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                window = (
                    slice(t * d, t * d + s * (n - 1) + 1, s)
                    for t, d, s, n in zip((i, j), self.dilation, self.strides, out, strict=True)
                )
                yield i, j, *window


def same_padding(
    size: Pair, kernel: Pair, strides: Pair = (1, 1), dilation: Pair = (1, 1)
) -> tuple[Pair, Pair]:
    """TensorFlow's SAME: ceil(size / stride) outputs, the odd row of padding at the end."""

    def one(n, k, stride, d):
        total = max((math.ceil(n / stride) - 1) * stride + d * (k - 1) + 1 - n, 0)
        return total // 2, total - total // 2

    return tuple(map(one, size, kernel, strides, dilation))


def accumulate(
    x, w, geometry: Geometry = Geometry(), *, x_zero_point=0, w_zero_point=0
) -> np.ndarray:
    """The convolution itself; padded places hold x_zero_point, that is nothing."""
    x = np.asarray(x, np.float64) - x_zero_point
    w = np.asarray(w, np.float64) - w_zero_point
    groups, (kh, kw, _, k) = geometry.groups, w.shape
    p, q = geometry.output_size(x.shape[1:3], (kh, kw))
    acc = np.zeros((x.shape[0], p, q, groups, k // groups))
    if acc.size:
        xg, wg = _grouped_input(x, geometry), _grouped_kernel(w, groups)
        for i, j, rows, columns in geometry.taps((kh, kw), (p, q)):
            acc += np.einsum("npqgc,cgk->npqgk", xg[:, rows, columns], wg[i, j], optimize=True)
    return acc.reshape(x.shape[0], p, q, k)


def dgrad(dy, w, x_shape, geometry: Geometry = Geometry()) -> np.ndarray:
    """The accumulator's gradient in x."""
    dy, w = np.asarray(dy, np.float64), np.asarray(w, np.float64)
    groups, (kh, kw, _, _) = geometry.groups, w.shape
    dxg = np.zeros_like(_grouped_input(np.zeros(x_shape), geometry))
    if dy.size:
        dyg, wg = dy.reshape(*dy.shape[:3], groups, -1), _grouped_kernel(w, groups)
        for i, j, rows, columns in geometry.taps((kh, kw), dy.shape[1:3]):
            dxg[:, rows, columns] += np.einsum("npqgk,cgk->npqgc", dyg, wg[i, j], optimize=True)
    (top, _), (left, _) = geometry.padding
    dx = dxg.reshape(*dxg.shape[:3], -1)
    return dx[:, top : top + x_shape[1], left : left + x_shape[2]]


def wgrad(x, dy, w_shape, geometry: Geometry = Geometry()) -> np.ndarray:
    """The accumulator's gradient in w."""
    x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
    groups, (kh, kw, c, k) = geometry.groups, w_shape
    dw = np.zeros((kh, kw, c, groups, k // groups))
    if dy.size:
        xg, dyg = _grouped_input(x, geometry), dy.reshape(*dy.shape[:3], groups, -1)
        for i, j, rows, columns in geometry.taps((kh, kw), dy.shape[1:3]):
            dw[i, j] = np.einsum("npqgc,npqgk->cgk", xg[:, rows, columns], dyg, optimize=True)
    return dw.reshape(w_shape)


def _grouped_input(x, geometry):
    """(N, H, W, C) -> padded (N, H', W', groups, C/groups)."""
    padded = np.pad(x, ((0, 0), *geometry.padding, (0, 0)))
    return padded.reshape(*padded.shape[:3], geometry.groups, -1)


def _grouped_kernel(w, groups):
    """(kh, kw, C/groups, K) -> (kh, kw, C/groups, groups, K/groups): outputs in runs by group."""
    return w.reshape(*w.shape[:3], groups, -1)


# The activations, each with its derivative at v.


def parse_activation(activation) -> tuple[str, float | None]:
    if activation is None:
        return "none", None
    name, parameter = activation if isinstance(activation, tuple) else (activation, None)
    return name, 0.01 if name == "leaky_relu" and parameter is None else parameter


def activate(v, activation=None) -> np.ndarray:
    name, slope = parse_activation(activation)
    match name:
        case "none":
            return v
        case "relu":
            return np.maximum(v, 0)
        case "relu6":
            return np.clip(v, 0, 6)
        case "leaky_relu":
            return np.where(v >= 0, v, slope * v)
        case "silu":
            return v * _sigmoid(v)
        case "gelu":
            return 0.5 * v * (1 + np.tanh(_gelu_inner(v)))
        case "hard_swish":
            return v * np.clip(v + 3, 0, 6) / 6
    raise ValueError(f"the oracle knows no activation {name!r}")


def activation_slope(v, activation) -> np.ndarray:
    """act'(v) of the smooth activations."""
    name, _ = parse_activation(activation)
    match name:
        case "silu":
            s = _sigmoid(v)
            return s * (1 + v * (1 - s))
        case "gelu":
            t = np.tanh(_gelu_inner(v))
            inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v**2)
            return 0.5 * (1 + t) + 0.5 * v * (1 - t**2) * inner_slope
        case "hard_swish":
            return np.where(v <= -3, 0, np.where(v >= 3, 1, (2 * v + 3) / 6))
    raise ValueError(f"{name!r} has no smooth slope")


SMOOTH = ("silu", "gelu", "hard_swish")


def _sigmoid(v):
    return 1 / (1 + np.exp(-np.clip(v, -700, 700)))


def _gelu_inner(v):
    return math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)


# The whole forward pass.


def quantize(x, scale, zero_point=0, dtype="int8") -> np.ndarray:
    """clip(round_half_even(x / scale + zero_point)); scale () or along the last axis."""
    low, high = LIMITS[dtype]
    return np.clip(
        np.rint(np.asarray(x, np.float64) / np.asarray(scale, np.float64) + zero_point), low, high
    )


def pre_activation(acc, multiplier=1.0, bias=None, residual=None, residual_scale=1.0) -> np.ndarray:
    v = acc * np.asarray(multiplier, np.float64)
    if bias is not None:
        v = v + np.asarray(bias, np.float64)
    if residual is not None:
        v = v + np.asarray(residual).astype(np.float64) * np.float64(residual_scale)
    return v


def magnitude(acc, multiplier=1.0, bias=None, residual=None, residual_scale=1.0) -> np.ndarray:
    """The sum of the terms' sizes: what float32 rounds relative to where they cancel."""
    bias = None if bias is None else np.abs(bias)
    residual = None if residual is None else np.abs(np.asarray(residual).astype(np.float64))
    return pre_activation(np.abs(acc), np.abs(multiplier), bias, residual, np.abs(residual_scale))


def epilogue(
    acc,
    multiplier=1.0,
    bias=None,
    *,
    residual=None,
    residual_scale=1.0,
    activation=None,
    out_multiplier=1.0,
    dtype=None,
) -> np.ndarray:
    """What qconv2d means, from the accumulator on; dtype int8 or uint8 rounds and saturates."""
    y = activate(pre_activation(acc, multiplier, bias, residual, residual_scale), activation)
    y = y * np.asarray(out_multiplier, np.float64)
    return y if dtype is None else np.clip(np.rint(y), *LIMITS[dtype])


# Gradients of the fake-quantized function.


@dataclasses.dataclass(frozen=True)
class Quantized:
    """A value through its quantizer: codes q of x at scale, and where the clip let it pass."""

    codes: np.ndarray
    scale: np.ndarray
    x: np.ndarray | None = None

    @classmethod
    def of(cls, x, scale):
        return cls(quantize(x, scale), np.asarray(scale, np.float64), np.asarray(x, np.float64))

    @property
    def view(self):
        return self.codes * self.scale

    @property
    def inside(self):
        rounded = np.rint(self.x / self.scale)
        return (rounded >= -128) & (rounded <= 127)

    @property
    def scale_slope(self):
        """d view / d scale of each element."""
        if self.x is None:
            return self.codes
        return np.where(self.inside, self.codes - self.x / self.scale, self.codes)

    def pull_back(self, cotangent):
        """(d x, d scale) from the view's cotangent: straight through; LSQ without its factor."""
        dx = None if self.x is None else np.where(self.inside, cotangent, 0)
        return dx, _sum_to(cotangent * self.scale_slope, self.scale)


def _sum_to(a, like):
    return a.sum() if like.ndim == 0 else a.reshape(-1, a.shape[-1]).sum(0)


def output_slope(v, y, activation, *, out_scale=None, dtype="int8") -> np.ndarray:
    """d yhat / d v; from the output (y, or the code) where the activation is piecewise linear."""
    name, slope = parse_activation(activation)
    if out_scale is None:
        match name:
            case "none":
                return np.ones_like(v)
            case "relu":
                return (y > 0).astype(np.float64)
            case "relu6":
                return ((y > 0) & (y < 6)).astype(np.float64)
            case "leaky_relu":
                return np.where(y >= 0, 1, slope)
        return activation_slope(v, activation)
    low, high = LIMITS[dtype]
    if name in SMOOTH:
        return np.where((y > low) & (y < high), activation_slope(v, activation), 0)
    if name in ("relu", "relu6"):
        low = 0
    if name == "relu6":
        high = min(high, np.rint(6 / out_scale))
    steep = np.where(v < 0, slope, 1) if name == "leaky_relu" else 1
    return np.where((y > low) & (y < high), steep, 0)


def gradients(
    cotangent,
    x: Quantized,
    w: Quantized,
    bias=None,
    *,
    geometry=Geometry(),
    residual=None,
    residual_scale=1.0,
    activation=None,
    out_scale=None,
    dtype="int8",
    round_output=lambda y: y,
) -> dict[str, np.ndarray]:
    """Every gradient of sum(yhat * cotangent), where yhat is the float output or code * out_scale.

    round_output is the rounding to the output's float type, before backward looks at the output.
    """
    cotangent = np.asarray(cotangent, np.float64)
    acc = accumulate(x.codes, w.codes, geometry)
    v = pre_activation(acc, x.scale * w.scale, bias, residual, residual_scale)
    act = activate(v, activation)
    y = (
        round_output(act)
        if out_scale is None
        else np.clip(np.rint(act / out_scale), *LIMITS[dtype])
    )
    dv = cotangent * output_slope(v, y, activation, out_scale=out_scale, dtype=dtype)
    x_view = dgrad(dv, w.view, x.codes.shape, geometry)
    w_view = wgrad(x.view, dv, w.codes.shape, geometry)
    dx, dx_scale = x.pull_back(x_view)
    dw, dw_scale = w.pull_back(w_view)
    result = {
        "x": dx,
        "x_scale": dx_scale,
        "w": dw,
        "w_scale": dw_scale,
        "bias": dv.sum((0, 1, 2)),
        "v": dv,
        "x_view": x_view,
        "w_view": w_view,
    }
    if residual is not None:
        result["residual"] = dv * residual_scale
        result["residual_scale"] = (dv * np.asarray(residual).astype(np.float64)).sum()
    if out_scale is not None:
        passed = (y > LIMITS[dtype][0]) & (y < LIMITS[dtype][1])
        result["out_scale"] = (cotangent * (y - passed * act / out_scale)).sum()
    return result
