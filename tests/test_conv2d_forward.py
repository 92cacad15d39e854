"""conv2d's results: QTensors and floats in, int8 or float out, against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_close_codes, assert_same_codes, assert_within_ulps
from oracle import Geometry
from problems import ACTIVATIONS, RESIDUALS, draw_codes, is_exact, name_of

import jqconv
from jqconv import QTensor

X_SHAPE, KERNEL, K = (2, 6, 5, 5), (3, 3), 7
SAME = Geometry(padding=((1, 1), (1, 1)))
FLOAT_LIMIT = 3.0  # ulp, as checking.ulps counts them


@pytest.fixture
def codes(rng):
    return draw_codes(rng, X_SHAPE), draw_codes(rng, (*KERNEL, X_SHAPE[-1], K))


def powers(rng, shape, exponent):
    return (2.0 ** (exponent + rng.integers(-1, 2, shape))).astype(np.float32)


def arbitrary(rng, shape, size):
    return (size * np.exp(rng.uniform(-0.7, 0.7, shape))).astype(np.float32)


def grid(rng, shape, size):
    return (np.round(rng.uniform(-size, size, shape) * 16) / 16).astype(np.float32)


def expected_value(x, w, x_scale, w_scale, bias=None, geometry=SAME, activation=None, **residual):
    """act(v) in float64, and the size of the terms in v."""
    acc = oracle.accumulate(x, w, geometry)
    multiplier = np.float64(x_scale) * np.asarray(w_scale, np.float64)
    v = oracle.epilogue(acc, multiplier, bias, activation=activation, **residual)
    return v, oracle.magnitude(acc, multiplier, bias, **residual)


def expected_codes(value, out_scale, dtype="int8"):
    return np.clip(np.rint(value / np.float64(out_scale)), *oracle.LIMITS[dtype])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_codes_on_the_exact_grid(rng, codes, activation, channels, dtype):
    x, w = codes
    x_scale = np.float32(2.0**-6)
    w_scale = powers(rng, (K,) if channels else (), -9)
    out_scale = np.float32(2.0**-4)
    bias = grid(rng, (K,), 4)
    value, _ = expected_value(x, w, x_scale, w_scale, bias, activation=activation)
    y = jqconv.conv2d(
        QTensor(x, x_scale),
        QTensor(w, w_scale),
        bias,
        activation=activation,
        out_scale=out_scale,
        out_dtype=dtype if dtype != "int8" else None,
    )
    assert isinstance(y, QTensor)
    np.testing.assert_array_equal(y.scale, out_scale)
    compare = assert_same_codes if is_exact(activation) else assert_close_codes
    compare(y.values, expected_codes(value, out_scale, dtype), dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_codes_with_arbitrary_scales(rng, activation):
    x, w = draw_codes(rng, (4, 9, 10, 5)), draw_codes(rng, (3, 3, 5, 40))
    x_scale, w_scale = arbitrary(rng, (), 0.02), arbitrary(rng, (40,), 0.003)
    bias = rng.normal(size=40).astype(np.float32)
    residual, residual_scale = draw_codes(rng, (4, 9, 10, 40)), arbitrary(rng, (), 0.02)
    value, _ = expected_value(
        x,
        w,
        x_scale,
        w_scale,
        bias,
        activation=activation,
        residual=residual,
        residual_scale=residual_scale,
    )
    y = jqconv.conv2d(
        QTensor(x, x_scale),
        QTensor(w, w_scale),
        bias,
        residual=QTensor(residual, residual_scale),
        activation=activation,
        out_scale=0.043,
    )
    assert_close_codes(y.values, expected_codes(value, np.float32(0.043)))


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16", "float16"], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_floats(rng, codes, activation, dtype):
    x, w = codes
    x_scale, w_scale = arbitrary(rng, (), 0.02), arbitrary(rng, (K,), 0.003)
    bias = rng.normal(size=K).astype(np.float32)
    value, magnitude = expected_value(x, w, x_scale, w_scale, bias, activation=activation)
    y = jqconv.conv2d(
        QTensor(x, x_scale), QTensor(w, w_scale), bias, activation=activation, out_dtype=dtype
    )
    assert_within_ulps(y, value, magnitude, FLOAT_LIMIT, dtype or "float32")


@pytest.mark.parametrize("out_scale", [None, 2.0**-3], ids=["float", "int8"])
@pytest.mark.parametrize("activation", [None, "relu", "relu6"], ids=name_of)
@pytest.mark.parametrize("kind", RESIDUALS[1:])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_residuals(rng, codes, kind, activation, out_scale, scaled):
    x, w = codes
    y_shape = (*X_SHAPE[:3], K)
    if kind == "int8":
        residual, scale = draw_codes(rng, y_shape), np.float32(2.0**-5)
        array = {"residual": residual, "residual_scale": scale}
        given = array if scaled else {"residual": QTensor(residual, scale)}
    else:
        residual = grid(rng, y_shape, 6).astype(jnp.dtype(kind))
        scale = np.float32(0.5 if scaled else 1)
        given = {"residual": residual} | ({"residual_scale": scale} if scaled else {})
    terms = {"residual": residual, "residual_scale": scale}
    value, _ = expected_value(x, w, 2.0**-6, 2.0**-9, activation=activation, **terms)
    x, w = QTensor(x, 2.0**-6), QTensor(w, 2.0**-9)
    y = jqconv.conv2d(x, w, activation=activation, out_scale=out_scale, **given)
    if out_scale is None:
        np.testing.assert_array_equal(y, value.astype(np.float32))
    else:
        assert_same_codes(y.values, expected_codes(value, out_scale))


def test_floats_in_are_quantized_on_the_way(rng):
    x = rng.normal(size=X_SHAPE).astype(np.float32) * 3
    w = rng.normal(size=(*KERNEL, X_SHAPE[-1], K)).astype(np.float32)
    x_scale, w_scale = 2.0**-6, powers(rng, (K,), -7)
    value, _ = expected_value(
        oracle.quantize(x, x_scale), oracle.quantize(w, w_scale), x_scale, w_scale
    )
    y = jqconv.conv2d(x, w, x_scale=x_scale, w_scale=w_scale)
    np.testing.assert_array_equal(y, value.astype(np.float32))
    y = jqconv.conv2d(jqconv.quantize(x, x_scale), w, w_scale=w_scale, out_scale=0.25)
    assert_same_codes(y.values, expected_codes(value, 0.25))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_floats_in(rng, dtype):
    x = jnp.asarray(rng.normal(size=X_SHAPE), dtype)
    w = jnp.asarray(rng.normal(size=(*KERNEL, X_SHAPE[-1], K)), dtype)
    value, _ = expected_value(
        oracle.quantize(np.asarray(x).astype(np.float64), 2.0**-5),
        oracle.quantize(np.asarray(w).astype(np.float64), 2.0**-6),
        2.0**-5,
        2.0**-6,
    )
    y = jqconv.conv2d(x, w, x_scale=2.0**-5, w_scale=2.0**-6)
    np.testing.assert_array_equal(y, value.astype(np.float32))


@pytest.mark.parametrize("out_scale", [None, 0.25], ids=["float", "int8"])
def test_packed_kernels_give_the_same(rng, codes, out_scale):
    x, w = codes
    kernel = QTensor(w, powers(rng, (K,), -9))
    x = QTensor(x, 2.0**-6)
    options = {"activation": "relu", "out_scale": out_scale, "strides": 2}
    plain = jqconv.conv2d(x, kernel, **options)
    packed = jqconv.conv2d(x, jqconv.prepack(kernel), **options)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(packed), strict=True):
        np.testing.assert_array_equal(a, b)


def test_layers_chain_in_int8(rng, codes):
    x, w = codes
    w2 = draw_codes(rng, (1, 1, K, 4))
    hidden = jqconv.conv2d(
        QTensor(x, 2.0**-6), QTensor(w, 2.0**-9), activation="relu", out_scale=2.0**-4
    )
    y = jqconv.conv2d(hidden, QTensor(w2, 2.0**-7))
    value, _ = expected_value(x, w, 2.0**-6, 2.0**-9, activation="relu")
    value, _ = expected_value(
        expected_codes(value, 2.0**-4), w2, 2.0**-4, 2.0**-7, geometry=Geometry()
    )
    np.testing.assert_array_equal(y, value.astype(np.float32))


@pytest.mark.parametrize("out_scale", [None, 2.0**-3], ids=["float", "int8"])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((2, 0), (1, 3))], ids=str)
@pytest.mark.parametrize(
    ("x_dtype", "x_zero", "w_zero"),
    [
        ("uint8", 0, None),
        ("uint8", 128, None),
        ("uint8", 3, None),
        ("uint8", 255, None),
        ("uint8", None, None),
        ("int8", -128, None),
        ("int8", 5, 0),
        ("int8", None, 4),
        ("uint8", 200, -128),
        ("int8", 127, 127),
    ],
)
def test_zero_points(rng, x_dtype, x_zero, w_zero, padding, out_scale):
    x = draw_codes(rng, X_SHAPE, x_dtype)
    w = draw_codes(rng, (*KERNEL, X_SHAPE[-1], K))
    named = {"SAME": SAME.padding, "VALID": ((0, 0), (0, 0))}
    geometry = Geometry(padding=named.get(padding, padding))
    bias = grid(rng, (K,), 4)
    acc = oracle.accumulate(x, w, geometry, x_zero_point=x_zero or 0, w_zero_point=w_zero or 0)
    value = oracle.epilogue(acc, 2.0**-15, bias, activation="relu")
    y = jqconv.conv2d(
        QTensor(x, 2.0**-6, x_zero),
        QTensor(w, 2.0**-9, w_zero),
        bias,
        padding=padding,
        activation="relu",
        out_scale=out_scale,
    )
    if out_scale is None:
        np.testing.assert_array_equal(y, value.astype(np.float32))
    else:
        assert_same_codes(y.values, expected_codes(value, out_scale))


@pytest.mark.parametrize("groups", [2, 5, 10])
def test_zero_points_with_groups(rng, groups):
    x = draw_codes(rng, (2, 5, 5, 10), "uint8")
    w = draw_codes(rng, (3, 3, 10 // groups, 20))
    geometry = Geometry(padding=((1, 1), (1, 1)), groups=groups)
    acc = oracle.accumulate(x, w, geometry, x_zero_point=77)
    y = jqconv.conv2d(QTensor(x, 0.5, 77), QTensor(w, 0.25), groups=groups)
    np.testing.assert_array_equal(y, acc * 0.125)


@pytest.mark.parametrize("out_scale", [None, 0.25], ids=["float", "int8"])
@pytest.mark.parametrize("x_shape", [(0, 6, 5, 5), (2, 2, 5, 5)])
def test_nothing_in_nothing_out(x_shape, out_scale):
    y = jqconv.conv2d(
        QTensor(np.zeros(x_shape, np.int8), 1.0),
        QTensor(np.zeros((3, 3, 5, 4), np.int8), np.ones(4, np.float32)),
        np.ones(4, np.float32),
        padding="VALID",
        out_scale=out_scale,
    )
    p, q = Geometry().output_size(x_shape[1:3], (3, 3))
    assert y.shape == (x_shape[0], p, q, 4)
    assert y.dtype == (np.float32 if out_scale is None else np.int8)


def test_view_follows_what_can_be_differentiated(rng, codes):
    x, w = (QTensor(c, 0.01) for c in codes)
    assert jqconv.conv2d(x, w, out_scale=1.0).fq is None
    live = jqconv.quantize(rng.normal(size=X_SHAPE).astype(np.float32), 0.01)
    y = jqconv.conv2d(live, w, out_scale=0.5)
    np.testing.assert_array_equal(y.fq, np.asarray(y.values) * np.float32(0.5))
    residual = jqconv.quantize(rng.normal(size=(*X_SHAPE[:3], K)).astype(np.float32), 0.01)
    assert jqconv.conv2d(x, w, residual=residual, out_scale=1.0).fq is not None


def test_scales_may_be_traced(rng, codes):
    x, w = codes
    value, _ = expected_value(x, w, 2.0**-6, 2.0**-9)

    @jax.jit
    def run(x_scale, w_scale, out_scale):
        return jqconv.conv2d(QTensor(x, x_scale), QTensor(w, w_scale), out_scale=out_scale)

    y = run(jnp.float32(2.0**-6), jnp.float32(2.0**-9), jnp.float32(2.0**-3))
    assert_same_codes(y.values, expected_codes(value, 2.0**-3))
