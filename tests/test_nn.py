"""Pooling, relu, reshaping and the dense head: exact codes, and the float program's gradients."""

import doctest
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_relative, assert_same_codes, refused
from differentiation import off_ties
from jax.sharding import PartitionSpec
from problems import draw_codes

import jqconv
from jqconv import QTensor, nn, quantize

# (height, width), window, strides, padding
GEOMETRIES = {
    "default_strides": ((5, 6), (2, 3), None, "VALID"),
    "resnet_stem": ((9, 8), (3, 3), (2, 2), "SAME"),
    "same_of_odd_sizes": ((7, 5), (3, 2), (2, 3), "SAME"),
    "asymmetric_pairs": ((5, 5), (3, 3), (1, 2), ((0, 2), (1, 0))),
    "list_of_pairs": ((5, 4), [2, 2], [2, 1], [(1, 0), (0, 1)]),
    "ints": ((6, 5), 3, 2, 1),
    "height_and_width": ((6, 5), (3, 5), (1, 1), (1, 2)),
    "stride_beyond_window": ((9, 9), (2, 2), (3, 4), "VALID"),
    "one_element": ((1, 1), (1, 1), None, "SAME"),
    "wider_than_x": ((2, 6), (3, 3), None, "VALID"),
    "many_taps": ((7, 9), (6, 5), (1, 2), "SAME"),
}

KINDS = {"int8": ("int8", None), "int8_zero": ("int8", -37), "uint8_zero": ("uint8", 141)}


def geometries_of(kinds):
    """Each geometry with one of the kinds in turn."""
    return pytest.mark.parametrize(
        ("geometry", "dtype", "zero"),
        [
            pytest.param(GEOMETRIES[name], *KINDS[kind], id=f"{name}-{kind}")
            for name, kind in zip(GEOMETRIES, itertools.cycle(kinds), strict=False)
        ],
    )


differentiated = pytest.mark.parametrize(
    "name", ["same_of_odd_sizes", "asymmetric_pairs", "stride_beyond_window", "many_taps"]
)

SCALE = np.float32(0.25)  # float programs of such numbers round their ties as integers do


# The numbers, in float64.


def pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)


def resolved(geometry):
    """Size, window and strides as pairs, and padding as two."""
    size, window, strides, padding = geometry
    window, strides = pair(window), pair(strides or 1)
    if padding == "VALID":
        padding = 0
    elif padding == "SAME":
        padding = oracle.same_padding(size, window, strides)
    return size, window, strides, tuple(map(pair, pair(padding)))


def windows_of(geometry):
    """((p, q), rows, columns): each window and what it covers of the padded input."""
    size, window, strides, padding = resolved(geometry)
    counts = oracle.Geometry(strides, padding).output_size(size, window)
    for index in itertools.product(*map(range, counts)):
        starts = [i * stride for i, stride in zip(index, strides, strict=True)]
        yield index, *(slice(i, i + n) for i, n in zip(starts, window, strict=True))


def padded(x, geometry, fill):
    *_, padding = resolved(geometry)
    return np.pad(np.asarray(x, np.float64), ((0, 0), *padding, (0, 0)), constant_values=fill)


def unpadded(wide, geometry):
    (height, width), _, _, ((top, _), (left, _)) = resolved(geometry)
    return wide[:, top : top + height, left : left + width]


def pooled(x, geometry, fill, reduce):
    """reduce over every window of (N, H, W, C), with `fill` around it."""
    size, window, strides, padding = resolved(geometry)
    counts = oracle.Geometry(strides, padding).output_size(size, window)
    wide, y = padded(x, geometry, fill), np.zeros((x.shape[0], *counts, x.shape[-1]))
    for (p, q), rows, columns in windows_of(geometry):
        y[:, p, q] = reduce(wide[:, rows, columns], axis=(1, 2))
    return y


def max_pool_gradient(x, geometry, dy):
    """Each cotangent to the first of the largest in its window."""
    wide = padded(x, geometry, -np.inf)
    dx = np.zeros_like(wide)
    for (p, q), rows, columns in windows_of(geometry):
        for n, c in np.ndindex(x.shape[0], x.shape[-1]):
            tile = wide[n, rows, columns, c]
            first = np.unravel_index(np.argmax(tile), tile.shape)
            dx[n, rows, columns, c][first] += dy[n, p, q, c]
    return unpadded(dx, geometry)


def avg_pool_gradient(x, geometry, dy, counts):
    dx = np.zeros_like(padded(x, geometry, 0))
    for (p, q), rows, columns in windows_of(geometry):
        dx[:, rows, columns] += (dy[:, p, q] / counts[:, p, q])[:, None, None]
    return unpadded(dx, geometry)


def counts_of(x, geometry, count_include_pad):
    outside = 1.0 if count_include_pad else 0.0
    return pooled(np.ones_like(x, np.float64), geometry, outside, np.sum)


# Helpers.


def draw(rng, shape, dtype="int8", zero=None, scale=SCALE):
    return QTensor(draw_codes(rng, shape, dtype), scale, zero)


def steps_of(q):
    return np.asarray(q.values, np.float64) - (q.zero_point or 0)


def viewed(q):
    """With the float view of the codes."""
    return QTensor(q.values, q.scale, q.zero_point, fq=q.dequantize())


def assert_like(y, x, expected, view=False):
    """Those steps, in codes of the same scale, with a view of just them or none."""
    assert isinstance(y, QTensor)
    assert y.zero_point == x.zero_point
    np.testing.assert_array_equal(y.scale, x.scale)
    assert (y.fq is not None) == view
    assert_same_codes(y.values, expected + (x.zero_point or 0), x.dtype.name)
    if view:
        np.testing.assert_array_equal(y.fq, expected * x.scale)


def pull_back(function, x, dy):
    """The gradient of sum(y * dy) in the float view of x."""

    def loss(fq):
        y = function(QTensor(x.values, x.scale, x.zero_point, fq=fq))
        return jnp.sum(y.fq * dy)

    return jax.grad(loss)(x.dequantize())


def view_gradient(function, x, dy):
    return jax.jit(functools.partial(pull_back, function))(x, dy)


def round_steps(steps, zero):
    """Half to even, as codes."""
    return np.rint(steps + (zero or 0)) - (zero or 0)


# Maxima.


@geometries_of(["int8", "uint8_zero"])
def test_max_pool_takes_the_largest_code(rng, geometry, dtype, zero):
    size, *window = geometry
    x = draw(rng, (2, *size, 3), dtype, zero)
    y = jax.jit(lambda q: nn.max_pool(viewed(q), *window))(x)
    assert_like(y, x, pooled(steps_of(x), geometry, -np.inf, np.max), view=True)


def test_max_pool_padding_never_wins_over_the_smallest_code():
    x = QTensor(np.full((1, 3, 3, 2), -128, np.int8), SCALE)
    assert_same_codes(nn.max_pool(x, (3, 3), padding="SAME").values, np.full((1, 3, 3, 2), -128))


@differentiated
def test_max_pool_gradient_goes_to_the_first_of_the_largest(rng, name):
    size, *window = geometry = GEOMETRIES[name]
    x = QTensor(rng.integers(-3, 4, (2, *size, 2)).astype(np.int8), SCALE)  # ties in most windows
    dy = rng.normal(size=pooled(x.values, geometry, 0, np.max).shape).astype(np.float32)
    found = view_gradient(lambda q: nn.max_pool(q, *window), x, dy)
    np.testing.assert_allclose(
        found, max_pool_gradient(x.values, geometry, dy), rtol=1e-6, atol=1e-6
    )


def test_max_pool_by_channel_scale(rng):
    x = draw(rng, (2, 4, 4, 3), scale=np.array([0.5, 1, 2], np.float32))
    y = jax.jit(lambda q: nn.max_pool(viewed(q), (2, 2)))(x)
    expected = pooled(steps_of(x) * x.scale, ((4, 4), (2, 2), None, "VALID"), -np.inf, np.max)
    np.testing.assert_array_equal(y.dequantize(), expected)


# Means.


@geometries_of(["uint8_zero", "int8", "int8_zero"])
def test_avg_pool_rounds_the_exact_mean(rng, geometry, dtype, zero):
    size, *window = geometry
    x = draw(rng, (2, *size, 3), dtype, zero)
    sums = pooled(steps_of(x), geometry, 0, np.sum)

    def run(q):
        return [nn.avg_pool(viewed(q), *window, count_include_pad=every) for every in (True, False)]

    for every, y in zip((True, False), jax.jit(run)(x), strict=True):
        exact = sums / counts_of(x.values, geometry, every)
        assert_like(y, x, round_steps(exact, zero), view=True)


@pytest.mark.parametrize("batch", [0, 1])
def test_pools_of_few_images(rng, batch):
    size, *window = geometry = GEOMETRIES["resnet_stem"]
    x = draw(rng, (batch, *size, 5))
    largest, average = jax.jit(lambda q: (nn.max_pool(q, *window), nn.avg_pool(q, *window)))(x)
    assert_like(largest, x, pooled(steps_of(x), geometry, -np.inf, np.max))
    exact = pooled(steps_of(x), geometry, 0, np.sum) / counts_of(x.values, geometry, True)
    assert_like(average, x, round_steps(exact, None))


@pytest.mark.parametrize("zero", [None, 1, -128])
def test_avg_pool_rounds_ties_to_even_codes(zero):
    """All pairs of neighbours: every sum is odd, every mean a tie."""
    low = np.arange(-128, 127)
    x = QTensor(np.stack([low, low + 1], -1).astype(np.int8).reshape(1, -1, 2, 1), SCALE, zero)
    even = np.where(low % 2, low + 1, low).reshape(1, -1, 1, 1)
    for y in jax.jit(lambda q: (nn.avg_pool(q, (1, 2)), nn.mean(q, 2, keepdims=True)))(x):
        assert_same_codes(y.values, even)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 49])
def test_every_sum_is_rounded_as_it_should_be(count):
    """From count * -128 to count * 127, each once, as the mean of `count` codes."""
    sums = np.arange(-128 * count, 127 * count + 1)
    codes = np.repeat((sums // count)[:, None], count, 1)
    codes += np.arange(count) < (sums % count)[:, None]
    average = jax.jit(lambda q: nn.mean(q, 1).values)
    expected = _half_even(sums, count)
    assert_same_codes(average(QTensor(codes.astype(np.int8), SCALE)), expected)
    shifted = QTensor((codes + 128).astype(np.uint8), SCALE, 77)
    assert_same_codes(average(shifted), expected + 128, "uint8")


def _half_even(sums, count):
    """In integers alone."""
    below, rest = sums // count, sums % count
    return below + (2 * rest + below % 2 > count)


def test_padding_counts_as_the_number_0():
    x = QTensor(np.full((1, 2, 2, 1), 20, np.uint8), SCALE, 10)
    y = jax.jit(lambda q: nn.avg_pool(q, (2, 2), padding=((2, 1), (1, 1))))(x).values
    corner = 12  # (10 + 0 + 0 + 0) / 4 = 2.5 above the zero point: 12.5, to even
    assert_same_codes(y[0, 0], np.full((3, 1), 10), "uint8")  # padding alone
    assert_same_codes(y[0, 1], np.array([[corner], [15], [corner]]), "uint8")


@differentiated
@pytest.mark.parametrize("count_include_pad", [True, False], ids=["all", "inside"])
def test_avg_pool_gradient_is_that_of_the_mean(rng, name, count_include_pad):
    size, *window = geometry = GEOMETRIES[name]
    x = draw(rng, (2, *size, 3), "uint8", 99)
    counts = counts_of(x.values, geometry, count_include_pad)
    dy = rng.normal(size=counts.shape).astype(np.float32)
    found = view_gradient(
        lambda q: nn.avg_pool(q, *window, count_include_pad=count_include_pad), x, dy
    )
    expected = avg_pool_gradient(x.values, geometry, dy, counts)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


AXES = [(1, 2), 1, -2, (0, 3), (-1, 0), None, (), [2]]


@pytest.mark.parametrize(
    ("axis", "kind"), list(zip(AXES, itertools.cycle(KINDS), strict=False)), ids=str
)
def test_mean_rounds_the_exact_mean(rng, axis, kind):
    dtype, zero = KINDS[kind]
    x = draw(rng, (2, 5, 7, 3), dtype, zero)
    axes = tuple(axis) if isinstance(axis, list) else axis
    frozen, kept = jax.jit(lambda q: (nn.mean(q, axis), nn.mean(viewed(q), axis, True)))(x)
    assert_like(frozen, x, round_steps(steps_of(x).mean(axes), zero))
    assert_like(kept, x, round_steps(steps_of(x).mean(axes, keepdims=True), zero), view=True)


@pytest.mark.parametrize("axis", [(1, 2), -2, None, ()], ids=str)
def test_mean_gradient_is_that_of_the_mean(rng, axis):
    x = draw(rng, (2, 5, 7, 3), "uint8", 99)
    dy = rng.normal(size=steps_of(x).mean(axis=axis, keepdims=True).shape).astype(np.float32)
    found = view_gradient(lambda q: nn.mean(q, axis, keepdims=True), x, dy)
    share = dy * (dy.size / x.values.size)
    np.testing.assert_allclose(found, np.broadcast_to(share, x.shape), rtol=1e-5)


def test_mean_is_global_average_pooling(rng):
    x = draw(rng, (3, 7, 7, 5))
    average, pool = jax.jit(lambda q: (nn.mean(q), nn.avg_pool(q, (7, 7))))(x)
    assert_like(average, x, np.rint(x.values.astype(np.float64).mean((1, 2))))
    assert_same_codes(pool.values[:, 0, 0], average.values)


def test_mean_keeps_the_scales_of_channels_that_stay(rng):
    scale = np.array([0.5, 1, 2], np.float32)
    x = draw(rng, (2, 4, 5, 3), scale=scale)
    y = jax.jit(lambda q: nn.mean(viewed(q)))(x)
    assert_like(y, x, np.rint(steps_of(x).mean((1, 2))), view=True)
    with refused(ValueError, "axis=(2, 3)", "(2, 4, 5, 3)", "dequantize"):
        nn.mean(x, axis=(2, 3))


def test_mean_of_an_empty_batch():
    x = QTensor(np.zeros((0, 3, 3, 2), np.int8), SCALE)
    assert_like(jax.jit(nn.mean)(x), x, np.zeros((0, 2)))


def test_a_mean_of_many_codes_is_exact():
    """As many of the largest code as int32 can sum, and then one more."""
    most = (2**31 - 1) // 255
    codes = np.full(most, 255, np.uint8)
    average = jax.jit(lambda q: nn.mean(q, 0).values)
    assert average(QTensor(codes, SCALE)) == 255
    assert average(QTensor(np.zeros(most, np.uint8), SCALE, 255)) == 0
    with refused(ValueError, str(most + 1), str(most)):
        nn.mean(QTensor(np.zeros(most + 1, np.uint8), SCALE), 0)


# relu and shapes.


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("zero", [None, 0, 77])
def test_relu_is_the_maximum_with_the_code_of_zero(rng, dtype, zero):
    x = draw(rng, (2, 9, 31), dtype, zero)
    frozen, y = jax.jit(lambda q: (nn.relu(q), nn.relu(viewed(q))))(x)
    assert_like(frozen, x, np.maximum(steps_of(x), 0))
    assert_like(y, x, np.maximum(steps_of(x), 0), view=True)
    dy = rng.normal(size=x.shape).astype(np.float32)
    np.testing.assert_array_equal(view_gradient(nn.relu, x, dy), np.where(steps_of(x) > 0, dy, 0))


def test_relu_passes_no_gradient_at_0():
    x = QTensor(np.array([-1, 0, 1], np.int8), SCALE)
    np.testing.assert_array_equal(view_gradient(nn.relu, x, np.ones(3)), [0, 0, 1])


@pytest.mark.parametrize("shape", [(-1,), 24, (4, 6), (2, -1, 1), [3, 8]], ids=str)
def test_reshape_keeps_codes_and_view(rng, shape):
    x = draw(rng, (2, 3, 4), "uint8", 7)
    assert_like(nn.reshape(x, shape), x, steps_of(x).reshape(shape))
    assert_like(nn.reshape(viewed(x), shape), x, steps_of(x).reshape(shape), view=True)


def test_reshape_keeps_the_scales_of_channels_that_stay_last(rng):
    x = draw(rng, (2, 3, 4), scale=np.array([0.5, 1, 2, 4], np.float32))
    assert_like(nn.reshape(x, (1, 6, 4)), x, steps_of(x).reshape(1, 6, 4))
    for change in (lambda: nn.reshape(x, (2, 12)), lambda: nn.flatten(x)):
        with refused(ValueError, "(2, 3, 4)", "(2, 12)", "one scale per channel", "dequantize"):
            change()
    with refused(ValueError, "()"):
        nn.reshape(QTensor(np.ones(1, np.int8), np.ones(1, np.float32)), ())


@pytest.mark.parametrize("shape", [(3, 2, 2, 5), (0, 2, 2, 5), (3, 0, 2), (5,)], ids=str)
def test_flatten_keeps_the_batch(rng, shape):
    x = draw(rng, shape)
    expected = steps_of(x).reshape(shape[0], int(np.prod(shape[1:])))
    frozen, y, floats = jax.jit(
        lambda q: (nn.flatten(q), nn.flatten(viewed(q)), nn.flatten(q.dequantize()))
    )(x)
    assert_like(frozen, x, expected)
    assert_like(y, x, expected, view=True)
    np.testing.assert_array_equal(floats, expected * SCALE)


# The dense head.


def dense(x, w, multiplier, **options):
    """The oracle's 1x1 convolution of (..., C) and (C, K)."""
    acc = oracle.accumulate(x.reshape(-1, 1, 1, x.shape[-1]), np.asarray(w)[None, None])
    return oracle.epilogue(acc, multiplier, **options).reshape(*x.shape[:-1], w.shape[-1])


@pytest.mark.parametrize("leading", [(), (2, 0, 3), (2, 1, 3, 2)], ids=str)
@pytest.mark.parametrize("out_scale", [None, 0.25], ids=["float", "int8"])
def test_linear_restores_leading_axes(rng, leading, out_scale):
    x, w = draw(rng, (*leading, 12), scale=0.5), draw(rng, (12, 10), scale=2.0**-11)
    bias = rng.integers(-8, 9, 10).astype(np.float32)
    dtype = None if out_scale is None else "int8"
    expected = dense(
        steps_of(x), w.values, 2.0**-12, bias=bias, out_multiplier=1 / (out_scale or 1), dtype=dtype
    )
    packed = jqconv.prepack(nn.reshape(w, (1, 1, 12, 10)))
    for kernel in (w, viewed(w), packed):
        y = jax.jit(functools.partial(nn.linear, out_scale=out_scale))(x, kernel, bias)
        if out_scale is None:
            np.testing.assert_array_equal(y, expected)
        else:
            assert_same_codes(y.values, expected)


def test_linear_by_channel_with_zero_point_and_activation(rng):
    w_scale = (2.0 ** -rng.integers(9, 13, 7)).astype(np.float32)
    x, w = draw(rng, (6, 11), "uint8", 101, scale=0.5), draw(rng, (11, 7), scale=w_scale)
    y = nn.linear(x, w, activation="relu", out_scale=0.5, out_dtype="uint8")
    expected = dense(steps_of(x), w.values, w_scale, activation="relu", dtype="uint8")
    assert_same_codes(y.values, expected, "uint8")


def test_linear_is_the_1x1_convolution(rng):
    x = rng.normal(size=(4, 6)).astype(np.float32)
    w = rng.normal(size=(6, 3)).astype(np.float32)
    options = {"x_scale": 0.02, "w_scale": np.float32([0.01, 0.02, 0.03]), "activation": "silu"}
    options |= {"out_dtype": jnp.bfloat16, "algorithm": "xla"}

    @jax.jit
    def run(x, w):
        y = nn.linear(x, w, **options)
        return y, jqconv.conv2d(x[:, None, None], w[None, None], **options)[:, 0, 0]

    y, expected = run(x, w)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, expected)


def test_linear_gradients(rng):
    x, w = off_ties(rng, (2, 5, 6), 0.02), off_ties(rng, (6, 4), 0.01)
    bias, dy = (rng.normal(size=s).astype(np.float32) for s in ((4,), (2, 5, 4)))
    scales = np.float32(0.02), np.full(4, 0.01, np.float32)

    def loss(x, w, bias, x_scale, w_scale):
        y = nn.linear(
            x, w, bias, x_scale=x_scale, w_scale=w_scale, activation="relu", grad_dtype=jnp.float32
        )
        return jnp.sum(y * dy)

    found = jax.jit(jax.grad(loss, (0, 1, 2, 3, 4)))(x, w, bias, *scales)
    expected = oracle.gradients(
        dy.reshape(10, 1, 1, 4),
        oracle.Quantized.of(x.reshape(10, 1, 1, 6), scales[0]),
        oracle.Quantized.of(w[None, None], scales[1]),
        bias,
        activation="relu",
    )
    for name, gradient in zip(["x", "w", "bias", "x_scale", "w_scale"], found, strict=True):
        assert_relative(gradient, expected[name].reshape(gradient.shape), 1e-4, name)


# Float arrays.

FUNCTIONS = {
    "max_pool": lambda x: nn.max_pool(x, (3, 2), (2, 2), "SAME"),
    "avg_pool": lambda x: nn.avg_pool(x, (3, 2), (1, 2), "SAME"),
    "avg_pool_inside": lambda x: nn.avg_pool(x, (3, 2), (2, 1), "SAME", False),
    "mean": nn.mean,
    "relu": nn.relu,
    "reshape": lambda x: nn.reshape(x, (-1, 3 * x.shape[-2], x.shape[-1])),
}
functions = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


@pytest.mark.parametrize("name", ["default_strides", "asymmetric_pairs"])
def test_floats_are_pooled_as_by_flax(rng, name):
    flax_nnx = pytest.importorskip("flax.nnx")
    size, window, strides, padding = GEOMETRIES[name]
    x = rng.normal(size=(2, *size, 3)).astype(np.float32)

    def run(library):
        def loss(x):
            ys = (
                library.max_pool(x, window, strides, padding),
                library.avg_pool(x, window, strides, padding),
                library.avg_pool(x, window, strides, padding, count_include_pad=False),
            )
            return sum(jnp.sum(jnp.sin(y)) for y in ys), ys

        return jax.jit(jax.grad(loss, has_aux=True))(x)

    with jax.numpy_dtype_promotion("standard"):
        theirs = run(flax_nnx)
    jax.tree.map(np.testing.assert_array_equal, run(nn), theirs)


@functions
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_keep_their_dtype(function, dtype):
    y = jax.eval_shape(function, jax.ShapeDtypeStruct((2, 6, 6, 3), dtype))
    assert y.dtype == dtype


def test_double_precision_numpy_arrays_are_floats(rng):
    x = rng.normal(size=(2, 4, 4, 3))
    np.testing.assert_allclose(nn.mean(x), x.mean((1, 2)), rtol=1e-5)


def test_pools_take_any_number_of_leading_axes(rng):
    x = draw(rng, (2, 3, 5, 5, 4))

    @jax.jit
    def run(q):
        return (
            nn.max_pool(q, (2, 2), padding=1),
            nn.avg_pool(q, (2, 2), padding=1),
            nn.avg_pool(q, (2, 2), padding=1, count_include_pad=False),
        )

    together, alone = run(x), run(QTensor(x.values[1, 2], SCALE))
    for many, one in zip(together, alone, strict=True):
        assert_same_codes(one.values, many.values[1, 2])


# Gradients are those of the fake-quantized program, from its leaves to its end.


def fake_quantized(function, x, scale):
    """function of floats, rounded straight through: float32, no codes."""
    y = function(quantize(x, scale).dequantize())
    rounded = jnp.round(y / scale) * scale
    return y + jax.lax.stop_gradient(rounded - y)


@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "mean", "relu"])
def test_gradients_are_those_of_the_fake_quantized_floats(rng, name):
    function = FUNCTIONS[name]
    scale = np.array([0.125, 0.25, 0.5], np.float32)
    x = off_ties(rng, (2, 6, 6, 3), scale)  # on both sides of the clip

    def gradients(run):
        return jax.jit(jax.grad(lambda *leaves: jnp.sum(jnp.sin(run(*leaves))), (0, 1)))(x, scale)

    found = gradients(lambda x, scale: function(quantize(x, scale)).dequantize())
    expected = gradients(functools.partial(fake_quantized, function))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert_relative(found[1], expected[1], 1e-4)


@functions
def test_only_frozen_codes_send_their_gradient_to_the_scale(rng, function):
    values = draw_codes(rng, (2, 6, 6, 3))
    view = QTensor(values, SCALE).dequantize()

    def loss(scale, view):
        y = function(QTensor(values, scale, fq=view))
        return jnp.sum(y.dequantize()), y.values

    frozen, codes = jax.jit(jax.grad(loss, has_aux=True))(SCALE, None)
    np.testing.assert_allclose(frozen, np.asarray(codes, np.float64).sum(), rtol=1e-5, atol=1e-3)
    assert jax.jit(jax.grad(loss, has_aux=True))(SCALE, view)[0] == 0


@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "mean", "relu"])
def test_second_derivatives_are_refused(rng, name):
    q = draw(rng, (1, 6, 6, 3))

    def loss(fq):
        return jnp.sum(jnp.sin(FUNCTIONS[name](QTensor(q.values, SCALE, fq=fq)).fq))

    with refused(TypeError, "first derivatives"):
        jax.eval_shape(jax.grad(lambda fq: jnp.sum(jax.grad(loss)(fq) ** 2)), q.dequantize())


X_SCALE, W_SCALE, Y_SCALE, HEAD_SCALE = 2.0**-5, 2.0**-6, 0.5, 2.0**-7


def network(x, w, head):
    """Everything in a row."""
    scales = {"x_scale": X_SCALE, "w_scale": W_SCALE, "out_scale": Y_SCALE}
    y = jqconv.conv2d(x, w, **scales, grad_dtype=jnp.float32)
    y = nn.avg_pool(nn.relu(nn.max_pool(y, (3, 3), (2, 2), "SAME")), (2, 2))
    y = nn.flatten(nn.mean(y, keepdims=True))
    return nn.linear(y, head, w_scale=HEAD_SCALE, grad_dtype=jnp.float32)


@pytest.fixture
def leaves(rng):
    shapes = ((4, 9, 8, 3), X_SCALE), ((3, 3, 3, 5), W_SCALE), ((5, 6), HEAD_SCALE)
    return [off_ties(rng, shape, scale, reach=120) for shape, scale in shapes]


def test_a_whole_network_differentiates(leaves):
    def floats(x, w, head):
        def rounded(v):
            return v + jax.lax.stop_gradient(quantize(v, Y_SCALE).dequantize() - v)

        x, w = quantize(x, X_SCALE).dequantize(), quantize(w, W_SCALE).dequantize()
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=numbers, precision="highest"
        )
        y = rounded(y)
        y = nn.relu(nn.max_pool(y, (3, 3), (2, 2), "SAME"))
        y = rounded(nn.mean(rounded(nn.avg_pool(y, (2, 2)))))
        return jnp.dot(y, quantize(head, HEAD_SCALE).dequantize(), precision="highest")

    def run(function):
        def loss(*leaves):
            y = function(*leaves)
            return jnp.sum(jnp.sin(y)), y

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*leaves)

    (found, y), (expected, y_expected) = run(network), run(floats)
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-5)
    for name, a, b in zip(["x", "w", "head"], found, expected, strict=True):
        assert_relative(a, np.asarray(b), 1e-3, name)


# Transformations.


@functions
def test_vmap_is_a_loop(rng, function):
    values = draw_codes(rng, (3, 2, 6, 6, 4))
    one = jax.eval_shape(function, jax.ShapeDtypeStruct(values.shape[1:], np.float32))
    dy = rng.normal(size=(3, *one.shape)).astype(np.float32)

    @jax.jit
    def run(values, dy):
        q = viewed(QTensor(values, SCALE, 5))
        return function(q), pull_back(function, q, dy)

    together = jax.jit(jax.vmap(run, (-1, 0)))(np.moveaxis(values, 0, -1), dy)
    y, gradient = jax.tree.map(np.asarray, together)
    for i in range(3):
        alone, alone_gradient = run(values[i], dy[i])
        assert_same_codes(y.values[i], alone.values)
        np.testing.assert_array_equal(y.fq[i], alone.fq)
        np.testing.assert_allclose(gradient[i], alone_gradient, rtol=1e-6, atol=1e-7)


def test_vmap_of_linear_is_a_loop(rng):
    x, w = draw(rng, (3, 4, 6)), draw(rng, (3, 6, 5), scale=0.01)
    shared = QTensor(w.values[0], w.scale)

    run = jax.jit(nn.linear)
    each = QTensor(0, None)
    own = jax.jit(jax.vmap(run, (each, each)))(x, w)
    common = jax.jit(jax.vmap(run, (each, None)))(x, shared)
    for i in range(3):
        alone = QTensor(x.values[i], x.scale)
        np.testing.assert_allclose(own[i], run(alone, QTensor(w.values[i], w.scale)), rtol=1e-6)
        np.testing.assert_allclose(common[i], run(alone, shared), rtol=1e-6)


def everything(q):
    return nn.relu(nn.mean(nn.avg_pool(nn.max_pool(q, (3, 3), (2, 2), "SAME"), (2, 2))))


@pytest.mark.parametrize(
    ("function", "compiled"), [(everything, True), (nn.relu, False)], ids=["jit", "eager"]
)
def test_shard_map_over_the_batch(rng, function, compiled):
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("batch",))
    batch = PartitionSpec("batch")

    def run(x):
        return function(quantize(x, SCALE)).dequantize()

    def derived(run):
        def loss(x):
            y = run(x)
            return jnp.sum(jnp.sin(y)), y

        return jax.grad(loss, has_aux=True)

    sharded = derived(jax.shard_map(run, mesh=mesh, in_specs=batch, out_specs=batch))
    x = off_ties(rng, (4, 6, 6, 3), SCALE)
    found = (jax.jit(sharded) if compiled else sharded)(x)
    expected = jax.jit(derived(run))(x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


@functions
def test_gradient_of_an_empty_batch(function):
    x = jnp.zeros((0, 6, 6, 3))

    def loss(x):
        y = function(quantize(x, SCALE))
        return jnp.sum(y.dequantize()), y.values

    gradient, codes = jax.jit(jax.grad(loss, has_aux=True))(x)
    assert gradient.shape == x.shape
    assert codes.shape[0] == 0


@functions
def test_strict_rank_promotion(function):
    def loss(x):
        return jnp.sum(function(quantize(x, np.full(3, SCALE))).dequantize())

    with jax.numpy_rank_promotion("raise"):
        jax.eval_shape(jax.grad(loss), jax.ShapeDtypeStruct((2, 6, 6, 3), np.float32))


# No float tensor in memory.

SHAPE = (2, 16, 12, 8)


def tail(q):
    return nn.mean(nn.relu(nn.max_pool(q, (3, 3), (2, 2), "SAME")))


def float_shapes(text):
    """The shapes of all float tensors that a compiled program's text names."""
    found = re.findall(r"\b(?:f16|bf16|f32|f64)\[([\d,]+)\]", text)
    return {tuple(map(int, shape.split(","))) for shape in found}


def test_compiled_int8_forward_holds_no_floats(rng):
    values = draw_codes(rng, SHAPE)

    def run(values, scale):
        return tail(viewed(QTensor(values, scale))).values

    compiled = jax.jit(run).lower(values, SCALE).compile()
    assert float_shapes(compiled.as_text()) == set()

    def returns_floats(values, scale):
        return tail(viewed(QTensor(values, scale))).fq

    text = jax.jit(returns_floats).lower(values, SCALE).compile().as_text()
    assert float_shapes(text) == {(2, 8)}  # the search does find floats, and these are the result


@pytest.mark.parametrize("pool", [nn.max_pool, nn.avg_pool])
def test_compiled_pools_hold_no_floats(rng, pool):
    values = draw_codes(rng, SHAPE)

    def run(values, scale):
        return pool(viewed(QTensor(values, scale, 3)), (3, 3), (2, 2), 1).values

    text = jax.jit(run).lower(values, SCALE).compile().as_text()
    assert float_shapes(text) == set()


@pytest.mark.parametrize("name", ["max_pool", "avg_pool", "mean", "relu"])
def test_codes_are_kept_for_the_backward_pass_and_no_floats(rng, name):
    q = draw(rng, SHAPE)

    def run(fq):
        return FUNCTIONS[name](QTensor(q.values, SCALE, fq=fq)).fq

    _, pull_back = jax.vjp(jax.jit(run), q.dequantize())
    kept = [leaf.dtype for leaf in jax.tree.leaves(pull_back) if leaf.size == q.values.size]
    assert kept == [np.int8]


# What is refused.

X = QTensor(np.ones((2, 6, 5, 8), np.int8), 0.5)


@pytest.mark.parametrize("pool", [nn.max_pool, nn.avg_pool])
@pytest.mark.parametrize("x", [X, np.ones(X.shape, np.float32)], ids=["codes", "floats"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"window_shape": 0}, ["window_shape", "0"]),
        ({"window_shape": (2, 2, 2)}, ["window_shape", "(2, 2, 2)", "pair"]),
        ({"window_shape": (2, 2.0)}, ["window_shape", "2.0"]),
        ({"strides": (0, 1)}, ["strides", "(0, 1)"]),
        ({"padding": "REFLECT"}, ["padding", "REFLECT", "SAME"]),
        ({"padding": ((0, -1), (0, 0))}, ["padding", "-1"]),
        ({"padding": ((0, 0),)}, ["padding", "two pairs"]),
    ],
    ids=str,
)
def test_windows(pool, x, arguments, words):
    with refused(ValueError, *words):
        pool(x, **{"window_shape": (2, 2), **arguments})


@pytest.mark.parametrize("pool", [nn.max_pool, nn.avg_pool])
def test_arrays_without_height_and_width(pool):
    with refused(ValueError, "(6, 5)", "(..., H, W, C)"):
        pool(QTensor(np.ones((6, 5), np.int8), 0.5), (2, 2))


@pytest.mark.parametrize("padding", [2, ((2, 0), (0, 0)), ((0, 0), (0, 3))], ids=str)
def test_windows_of_codes_in_the_padding_alone(padding):
    floats = np.ones(X.shape, np.float32)
    for pool, options in ((nn.max_pool, {}), (nn.avg_pool, {"count_include_pad": False})):
        with refused(ValueError, "padding", "(2, 2)", "(6, 5)", "less than the window"):
            pool(X, (2, 2), padding=padding, **options)
        assert not np.isfinite(pool(floats, (2, 2), padding=padding, **options)).all()


def test_padding_beyond_the_window_that_no_window_reaches():
    """The strides step over it."""
    x = QTensor(np.ones((1, 2, 2, 1), np.int8), 0.5)
    assert nn.max_pool(x, (2, 2), (4, 4), ((0, 3), (0, 3))).shape == (1, 1, 1, 1)


CALLS = {
    "max_pool": lambda x: nn.max_pool(x, (2, 2)),
    "avg_pool": lambda x: nn.avg_pool(x, (2, 2)),
    "mean": nn.mean,
    "relu": nn.relu,
    "reshape": lambda x: nn.reshape(x, (-1,)),
    "flatten": nn.flatten,
    "linear": lambda x: nn.linear(x, QTensor(np.ones((8, 3), np.int8), 0.5)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_bare_codes(call):
    with refused(TypeError, "x", "int8", "QTensor(values, scale)"):
        call(X.values)
    with refused(TypeError, "x", "PackedKernel"):
        call(jqconv.prepack(QTensor(np.ones((1, 1, 8, 3), np.int8), 0.5)))
    with refused(TypeError, "x", "str"):
        call("codes")


@pytest.mark.parametrize("axis", [4, -5, (1, 1), (1, -3)], ids=str)
def test_axes_that_are_none(axis):
    with refused(ValueError, "axis"):
        nn.mean(X, axis)


def test_a_mean_of_nothing():
    with refused(ValueError, "axis=(1, 2)", "(2, 0, 3, 4)", "nothing"):
        nn.mean(QTensor(np.zeros((2, 0, 3, 4), np.int8), 0.5))


def test_flatten_without_a_batch():
    with refused(ValueError, "()", "(N, ...)"):
        nn.flatten(QTensor(np.int8(1), 0.5))


def test_reshape_to_another_size():
    for x in (X, X.dequantize()):
        for shape in ((7,), (2, 7, -1), (-2, -240), (-1, -1, 480)):
            with refused(ValueError, "(2, 6, 5, 8)", str(shape), "480"):
                nn.reshape(x, shape)
        with refused(ValueError, "shape", "2.0"):
            nn.reshape(x, (2.0, 240))
    with refused(ValueError, "(0, 3, 4)", "(0, -1, 4)", "write out"):
        nn.reshape(QTensor(np.zeros((0, 3, 4), np.int8), SCALE), (0, -1, 4))


def test_operands_of_linear():
    w = QTensor(np.ones((8, 3), np.int8), 0.5)
    with refused(ValueError, "x", "(2, 6)", "(..., 8)"):
        nn.linear(QTensor(np.ones((2, 6), np.int8), 0.5), w)
    with refused(ValueError, "x", "()", "(..., 8)"):
        nn.linear(QTensor(np.int8(1), 0.5), w)
    with refused(ValueError, "w", "(1, 1, 8, 3)", "(C, K)"):
        nn.linear(X, QTensor(np.ones((1, 1, 8, 3), np.int8), 0.5))
    with refused(ValueError, "w", "(3, 3)", "(1, 1)"):
        nn.linear(X, jqconv.prepack(QTensor(np.ones((3, 3, 8, 3), np.int8), 0.5)))
    with refused(TypeError, "w", "int8", "QTensor"):
        nn.linear(X, w.values)
    with refused(TypeError, "x", "x_scale"):
        nn.linear(X.dequantize(), w)
    with refused(ValueError, "scale of x", "(8,)"):
        nn.linear(QTensor(X.values, np.ones(8, np.float32)), w)
    with refused(ValueError, "bias", "(8,)", "(3,)"):
        nn.linear(X, w, np.ones(8, np.float32))


# Documentation.


@pytest.mark.parametrize("name", nn.__all__)
def test_docstring_examples(name):
    function = getattr(nn, name)
    namespace = {"QTensor": QTensor, "quantize": quantize, "jnp": jnp, name: function}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    (example,) = finder.find(function, name, globs=namespace)
    assert example.examples
    report = []
    assert runner.run(example, out=report.append).failed == 0, "".join(report)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_mean_of_many_narrow_floats_is_their_mean(dtype):
    x = jnp.full((1, 32, 32, 1), 300, dtype)
    assert nn.avg_pool(x, 32)[0, 0, 0, 0] == x[0, 0, 0, 0]
