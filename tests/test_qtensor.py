"""QTensor, quantize, scales and prepack."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_relative, assert_same_codes, refused
from problems import draw_codes

import jqconv
from jqconv import QTensor


def test_values_and_scale_give_the_numbers(rng):
    values = draw_codes(rng, (3, 4, 5, 6))
    q = QTensor(values, 0.25)
    assert (q.shape, q.dtype, q.ndim) == ((3, 4, 5, 6), np.int8, 4)
    np.testing.assert_array_equal(q.dequantize(), values * 0.25)


def test_channel_scale_lies_along_the_last_axis(rng):
    values = draw_codes(rng, (2, 3, 4))
    scale = np.array([0.5, 1, 2, 4], np.float32)
    np.testing.assert_array_equal(QTensor(values, scale).dequantize(), values * scale)


def test_zero_point_stands_for_zero():
    q = QTensor(np.array([0, 3, 255], np.uint8), 0.5, 3)
    np.testing.assert_array_equal(q.dequantize(), [-1.5, 0, 126])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dequantize_to_a_dtype(dtype):
    assert QTensor(jnp.zeros((2,), jnp.int8), 1.0).dequantize(dtype).dtype == dtype


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("zero_point", [None, 0, 7])
def test_quantize_rounds_half_to_even_and_saturates(rng, dtype, zero_point):
    steps = np.concatenate([np.arange(-300, 300, 0.5), rng.uniform(-300, 300, 1000)])
    x = (steps * 0.25).astype(np.float32)
    q = jqconv.quantize(x, 0.25, zero_point=zero_point, dtype=dtype)
    expected = oracle.quantize(x, 0.25, zero_point or 0, dtype)
    assert_same_codes(q.values, expected, dtype)
    np.testing.assert_array_equal(q.dequantize(), (expected - (zero_point or 0)) * 0.25)


def test_quantize_by_channel(rng):
    x = rng.normal(size=(5, 4)).astype(np.float32)
    scale = np.array([0.5, 0.25, 0.125, 2], np.float32)
    assert_same_codes(jqconv.quantize(x, scale).values, oracle.quantize(x, scale))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_quantize_takes_every_float(dtype):
    x = jnp.asarray([0.5, -1.5, 100.0], dtype)
    assert_same_codes(jqconv.quantize(x, 0.5).values, np.array([1, -3, 127]))


def test_quantize_sends_infinities_to_the_ends():
    x = np.array([np.inf, -np.inf], np.float32)
    assert_same_codes(jqconv.quantize(x, 1.0).values, np.array([127, -128]))


def _steps(rng, shape):
    """Distances in steps from codes, clear of the rounding's ties, some of them clipped."""
    return rng.integers(-140, 141, shape) + rng.uniform(-0.45, 0.45, shape)


@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "channel"])
def test_quantize_gradient_is_straight_through_with_learned_steps(rng, channels):
    scale = np.array([0.5, 0.3, 0.2], np.float32) if channels else np.float32(0.3)
    x = (_steps(rng, (40, 3)) * scale).astype(np.float32)
    cotangent = rng.normal(size=x.shape).astype(np.float32)

    def loss(x, scale):
        return jnp.sum(jqconv.quantize(x, scale).dequantize() * cotangent)

    dx, dscale = jax.grad(loss, (0, 1))(jnp.asarray(x), jnp.asarray(scale))
    expected_x, expected_scale = oracle.Quantized.of(x, scale).pull_back(cotangent)
    np.testing.assert_array_equal(dx, expected_x.astype(np.float32))
    assert_relative(dscale, expected_scale, 1e-5)


def test_quantize_gradient_with_a_zero_point():
    x = jnp.asarray([-3.0, -0.2, 0.2, 300.0])
    gradient = jax.grad(
        lambda x: jnp.sum(jqconv.quantize(x, 1.0, zero_point=2, dtype="uint8").dequantize())
    )(x)
    np.testing.assert_array_equal(gradient, [0, 1, 1, 0])


def test_gradient_keeps_the_dtype_of_x():
    x = jnp.ones((3,), jnp.bfloat16)
    gradient = jax.grad(lambda x: jnp.sum(jqconv.quantize(x, 0.5).dequantize()))(x)
    assert gradient.dtype == jnp.bfloat16


def test_absmax_scale(rng):
    x = rng.normal(size=(3, 3, 4, 5)).astype(np.float32)
    x[..., 2] = 0
    by_channel = np.abs(x).max((0, 1, 2)) / 127
    by_channel[2] = 1
    np.testing.assert_allclose(jqconv.absmax_scale(x), np.abs(x).max() / 127, rtol=1e-7)
    np.testing.assert_allclose(jqconv.absmax_scale(x, channel_axis=-1), by_channel, rtol=1e-7)
    assert jqconv.absmax_scale(x, channel_axis=0).shape == (3,)


def test_absmax_scale_of_nothing_is_one():
    assert jqconv.absmax_scale(np.zeros((0, 3), np.float32)) == 1
    assert jqconv.absmax_scale(np.zeros((4, 3), np.float32)) == 1
    np.testing.assert_array_equal(
        jqconv.absmax_scale(np.zeros((0, 3), np.float32), channel_axis=1), [1, 1, 1]
    )


@pytest.mark.parametrize("scale", [0.5, np.array([0.5, 1, 2, 4], np.float32)], ids=["one", "each"])
def test_prepack_is_ohwi(rng, scale):
    values = draw_codes(rng, (3, 2, 5, 4))
    packed = jqconv.prepack(QTensor(values, scale))
    np.testing.assert_array_equal(packed.values, values.transpose(3, 0, 1, 2))
    np.testing.assert_array_equal(packed.scale, scale)


def test_prepack_of_plain_codes_has_no_scale(rng):
    packed = jqconv.prepack(draw_codes(rng, (3, 2, 5, 4)))
    assert packed.scale is None
    assert packed.values.shape == (4, 3, 2, 5)


# A pytree like any other.


@pytest.mark.parametrize(
    "make",
    [
        lambda: QTensor(jnp.ones((2, 3), jnp.int8), 0.5),
        lambda: QTensor(jnp.ones((2, 3), jnp.uint8), 0.5, 7),
        lambda: jqconv.quantize(jnp.ones((2, 3)), 0.5),
        lambda: jqconv.prepack(QTensor(jnp.ones((1, 1, 2, 3), jnp.int8), 0.5)),
    ],
)
def test_tree_round_trip(make):
    tree = make()
    leaves, structure = jax.tree.flatten(tree)
    again = jax.tree.unflatten(structure, leaves)
    assert type(again) is type(tree)
    assert jax.tree.structure(again) == structure
    assert repr(again) == repr(tree)


def test_unflatten_takes_anything():
    structure = jax.tree.structure(QTensor(jnp.ones((2, 3), jnp.int8), 0.5))
    axes = jax.tree.unflatten(structure, [0, None])
    assert isinstance(repr(axes), str)
    assert isinstance(repr(jax.tree.map(lambda _: jax.sharding.PartitionSpec(), axes)), str)


def test_passes_through_jit_and_vmap(rng):
    values = draw_codes(rng, (4, 3))
    q = QTensor(values, np.float32(0.5))
    out = jax.jit(lambda q: q)(q)
    assert_same_codes(out.values, values)
    dequantized = jax.vmap(QTensor.dequantize, in_axes=(axes_of(q, 0),))(q)
    np.testing.assert_array_equal(dequantized, values * 0.5)


def axes_of(q, axis):
    """The tree of in_axes that maps a QTensor's values and shares its scale."""
    structure = jax.tree.structure(q)
    return jax.tree.unflatten(structure, [axis, None])


def test_zero_point_is_static():
    a, b = (QTensor(jnp.ones((2,), jnp.uint8), 0.5, z) for z in (1, 2))
    assert jax.tree.structure(a) != jax.tree.structure(b)


def test_prints_what_it_is():
    text = repr(QTensor(jnp.zeros((2, 3), jnp.int8), 0.125))
    assert "int8[2,3]" in text
    assert "0.125" in text
    assert "zero_point=7" in repr(QTensor(jnp.zeros((2, 3), jnp.uint8), 0.125, 7))
    shown = []
    jax.jit(lambda q: shown.append(repr(q)))(QTensor(jnp.zeros((2, 3), jnp.int8), 0.125))
    assert "int8[2,3]" in shown[0]


# What is refused.

CODES = np.zeros((2, 3), np.int8)


@pytest.mark.parametrize("values", [np.zeros(3, np.float32), np.zeros(3, np.int32), "text", None])
def test_values_of_another_type_are_refused(values):
    given = str(values.dtype) if isinstance(values, np.ndarray) else type(values).__name__
    with refused(TypeError, "values", given):
        QTensor(values, 1.0)


@pytest.mark.parametrize(
    "scale", [0.0, -1.0, np.nan, np.inf, -np.inf, np.array([1, 0, 1], np.float32), 0], ids=repr
)
def test_scales_that_are_not_positive_and_finite_are_refused(scale):
    with refused(ValueError, "scale", "positive and finite"):
        QTensor(CODES, scale)
    with refused(ValueError, "scale", "positive and finite"):
        jqconv.quantize(np.zeros((2, 3), np.float32), scale)


@pytest.mark.parametrize("scale", [1e-60, 1e60, np.float64(1e-60), np.float64(1e60)], ids=repr)
def test_scales_that_float32_cannot_hold_are_refused(scale):
    with refused(ValueError, "scale"):
        QTensor(CODES, scale)


@pytest.mark.parametrize("shape", [(2,), (1,), (1, 3), (2, 3)])
def test_scales_of_another_shape_are_refused(shape):
    with refused(ValueError, "scale", str(shape), "(3,)"):
        QTensor(CODES, np.ones(shape, np.float32))


@pytest.mark.parametrize(
    ("dtype", "zero_point"), [("int8", 128), ("int8", -129), ("uint8", 256), ("uint8", -1)]
)
def test_zero_points_out_of_range_are_refused(dtype, zero_point):
    with refused(ValueError, str(zero_point), dtype):
        QTensor(CODES.astype(dtype), 1.0, zero_point)
    with refused(ValueError, str(zero_point), dtype):
        jqconv.quantize(np.zeros(3, np.float32), 1.0, zero_point=zero_point, dtype=dtype)


def test_zero_point_must_be_static():
    with refused(TypeError, "zero_point", "0.5"):
        QTensor(CODES, 1.0, 0.5)


def test_view_of_another_shape_is_refused():
    with refused(ValueError, "fq", "(3, 2)", "(2, 3)"):
        QTensor(CODES, 1.0, fq=jnp.zeros((3, 2)))


def test_quantize_refuses_integers_and_other_targets():
    with refused(TypeError, "int32"):
        jqconv.quantize(np.zeros(3, np.int32), 1.0)
    with refused(TypeError, "int4"):
        jqconv.quantize(np.zeros(3, np.float32), 1.0, dtype=jnp.int4)


def test_absmax_scale_refuses_integers_and_missing_axes():
    with refused(TypeError, "int8"):
        jqconv.absmax_scale(CODES)
    with refused(ValueError, "channel_axis=2", "2"):
        jqconv.absmax_scale(np.zeros((2, 3), np.float32), channel_axis=2)
    for axis in (1.5, "0", (0,)):
        with refused(TypeError, "channel_axis must be a static int"):
            jqconv.absmax_scale(np.zeros((2, 3), np.float32), channel_axis=axis)


def test_a_scale_that_xla_would_take_for_zero_is_none():
    x = np.full(3, 1e-37, np.float32)
    assert jqconv.absmax_scale(x) == 1
    with refused(ValueError, "smallest normal number"):
        QTensor(CODES, 1e-40)


@pytest.mark.parametrize("scale", [np.complex64(1 + 2j), jnp.complex64(1), True, np.bool_(True)])
def test_a_scale_is_a_real_number(scale):
    with refused(TypeError, "scale must be a real number"):
        jqconv.quantize(np.zeros(3, np.float32), scale)


def test_a_view_is_an_array():
    with refused(ValueError, "fq has shape (1,)"):
        QTensor(CODES, 1.0, fq=[1.0])
    with refused(TypeError, "fq must be an array"):
        QTensor(CODES, 1.0, fq="view")


def test_it_holds_axes_and_shapes_in_the_places_of_arrays():
    q = QTensor(np.stack([CODES, CODES]), 0.5)
    scales = jnp.asarray([0.5, 0.25, 1.0])
    mapped = jax.vmap(lambda q: q.dequantize(), in_axes=(QTensor(None, 0),))
    got = mapped(QTensor.tree_unflatten(None, (q.values, scales, None)))
    assert got.shape == (3, *q.shape)
    packed = jqconv.PackedKernel(np.zeros((2, 1, 1, 3), np.int8), 0.5)
    both = jax.vmap(lambda p: p.values * 1, in_axes=(jqconv.PackedKernel(None, None),), axis_size=2)
    assert both(packed).shape == (2, 2, 1, 1, 3)
    shapes = QTensor(jax.ShapeDtypeStruct((2, 3), jnp.int8), jax.ShapeDtypeStruct((), jnp.float32))
    assert shapes.shape == (2, 3)


def test_prepack_refuses_what_cannot_be_packed():
    with refused(TypeError, "uint8"):
        jqconv.prepack(np.zeros((1, 1, 2, 3), np.uint8))
    with refused(TypeError, "int8[2,3]"):
        jqconv.prepack(CODES)
    with refused(ValueError, "zero_point=5"):
        jqconv.prepack(QTensor(np.zeros((1, 1, 2, 3), np.int8), 1.0, 5))


@pytest.mark.parametrize("size", [2, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_of_nan_is_nan(size, dtype):
    """XLA's maximum loses it on a CPU, from 4096 values on."""
    x = jnp.ones((size, 2), dtype).at[size // 2, 0].set(-np.nan)
    assert np.isnan(jqconv.absmax_scale(x))
    np.testing.assert_array_equal(np.isnan(jqconv.absmax_scale(x, channel_axis=1)), [True, False])


def test_placeholders_stand_for_arrays(rng):
    """in_axes and in_specs are QTensors of axes and specs."""
    q = QTensor(draw_codes(rng, (3, 4)), np.float32(0.5))
    spec = QTensor(jax.sharding.PartitionSpec("d"), jax.sharding.PartitionSpec())
    assert spec.values == jax.sharding.PartitionSpec("d")
    found = jax.vmap(lambda q: q.dequantize().sum(), in_axes=(QTensor(0, None),))(q)
    np.testing.assert_allclose(found, np.sum(q.values.astype(float) * 0.5, axis=1))


def test_a_view_is_mapped_with_its_codes():
    x = jnp.arange(12.0).reshape(3, 4)
    rows = jax.vmap(lambda q: q.dequantize().sum(), in_axes=(QTensor(0, None),))
    np.testing.assert_allclose(rows(jqconv.quantize(x, 0.1)), x.sum(1), rtol=1e-6)
    grads = jax.grad(lambda x: rows(jqconv.quantize(x, 0.1))[1])(x)
    np.testing.assert_array_equal(grads, jnp.zeros((3, 4)).at[1].set(1))


@pytest.mark.parametrize("function", [np.asarray, jnp.asarray, jnp.sum, lambda q: jnp.ones(3) + q])
def test_what_takes_arrays_says_that_a_qtensor_is_none(function):
    with refused(TypeError, "dequantize()"):
        function(QTensor(jnp.ones(3, jnp.int8), 0.5))
