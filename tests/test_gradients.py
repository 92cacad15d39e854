"""Gradients of the fake-quantized function: of data, kernels, bias, residuals and every scale."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_relative, assert_same_codes
from differentiation import (
    BFLOAT16_LIMIT,
    FLOAT32_LIMIT,
    KERNEL,
    SAME,
    X_SHAPE,
    K,
    assert_gradients,
    cotangent_like,
    draw_leaves,
    expected_gradients,
    loss_of,
    off_ties,
)
from oracle import Geometry, Quantized
from problems import ACTIVATIONS, draw_codes, name_of, window_of

import jqconv
from jqconv import QTensor
from jqconv._epilogue import activate_and_quantize
from jqconv._spec import Activation


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_float_output(rng, activation):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    loss = loss_of(cotangent, activation=activation, grad_dtype=jnp.float32)
    expected = expected_gradients(cotangent, leaves, activation=activation)
    assert_gradients(jax.grad(loss)(leaves), expected, FLOAT32_LIMIT)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_int8_output(rng, activation):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    out_scale = np.float32(0.021 if activation == "relu6" else 0.043)
    loss = loss_of(cotangent, activation=activation, grad_dtype=jnp.float32)
    found = jax.grad(loss)(leaves | {"out_scale": out_scale})
    expected = expected_gradients(
        cotangent, leaves, activation=activation, out_scale=np.float64(out_scale)
    )
    assert_gradients(found, expected, FLOAT32_LIMIT)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_the_end_of_the_epilogue_by_itself(rng, activation, dtype):
    """What a QConv with a norm of its own ends with: the same as where it is fused."""
    act, scale = Activation.parse(activation), np.float32(0.021 if activation == "relu6" else 0.043)
    v = jnp.asarray(off_ties(rng, (3, 4, 5, 6), scale), dtype)
    cotangent = rng.normal(size=v.shape).astype(np.float32)

    def view(v, scale):
        codes, view = activate_and_quantize(act, v, scale)
        return view, codes

    _, pull_back, codes = jax.vjp(view, v, scale, has_aux=True)
    dv, dscale = pull_back(cotangent)
    wide, step = np.asarray(v, np.float64), np.float64(scale)
    value = oracle.activate(wide, activation) / step
    expected = np.clip(np.rint(value), -128, 127)
    assert_same_codes(codes, expected)
    slope = oracle.output_slope(wide, expected, activation, out_scale=step)
    assert dv.dtype == v.dtype
    assert_relative(dv, cotangent * slope, 4e-3 if dtype == "bfloat16" else FLOAT32_LIMIT, "v")
    inside = (expected > -128) & (expected < 127)
    assert_relative(dscale, np.sum(cotangent * (expected - inside * value)), 1e-5, "scale")


@pytest.mark.parametrize("activation", [None, "relu6", "silu"], ids=name_of)
def test_uint8_output(rng, activation):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    out_scale = np.float32(0.021)
    loss = loss_of(cotangent, activation=activation, grad_dtype=jnp.float32, out_dtype=jnp.uint8)
    found = jax.grad(loss)(leaves | {"out_scale": out_scale})
    expected = expected_gradients(
        cotangent, leaves, activation=activation, out_scale=np.float64(out_scale), dtype="uint8"
    )
    assert_gradients(found, expected, FLOAT32_LIMIT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["relu6", "gelu"])
def test_narrow_float_output(rng, activation, dtype):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves).astype(jnp.dtype(dtype)).astype(np.float32)
    loss = loss_of(cotangent, activation=activation, grad_dtype=jnp.float32, out_dtype=dtype)
    expected = expected_gradients(
        cotangent, leaves, activation=activation, round_output=lambda y: y.astype(jnp.dtype(dtype))
    )
    assert_gradients(jax.grad(loss)(leaves), expected, FLOAT32_LIMIT)


@pytest.mark.parametrize("out_scale", [None, 0.043], ids=["float", "int8"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"], ids=name_of)
def test_bfloat16_is_the_default_and_within_its_tolerance(rng, activation, out_scale):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    loss = loss_of(cotangent, activation=activation, out_scale=out_scale)
    expected = expected_gradients(cotangent, leaves, activation=activation, out_scale=out_scale)
    found = jax.grad(loss)(leaves)
    tensors = ("x", "w", "bias", "residual")
    assert_gradients({name: found[name] for name in tensors}, expected, BFLOAT16_LIMIT)
    for name in ("x", "w"):
        # A sum whose terms cancel: held to the norms of what it multiplies.
        slope = Quantized.of(leaves[name], leaves[f"{name}_scale"]).scale_slope
        size = np.linalg.norm(slope) * np.linalg.norm(expected[f"{name}_view"])
        error = np.linalg.norm(found[f"{name}_scale"] - expected[f"{name}_scale"])
        assert error < BFLOAT16_LIMIT * size
    exact = jax.grad(
        loss_of(cotangent, activation=activation, out_scale=out_scale, grad_dtype=jnp.float32)
    )(leaves)
    assert np.any(found["x"] != exact["x"])
    assert np.any(found["w"] != exact["w"])


GEOMETRIES = {
    "1x1": ((2, 4, 3, 6), (1, 1), 5, Geometry()),
    "stride_with_rows_left_over": ((2, 8, 7, 3), (3, 2), 4, Geometry(strides=(2, 3))),
    "dilation": ((1, 8, 9, 4), (3, 3), 3, Geometry(dilation=(2, 3), padding=((2, 2), (3, 3)))),
    "asymmetric": ((2, 5, 5, 3), (2, 4), 5, Geometry(padding=((0, 3), (4, 1)))),
    "groups_2": ((2, 5, 5, 6), (3, 3), 8, Geometry(groups=2, strides=(2, 2))),
    "depthwise": ((2, 6, 6, 5), (3, 3), 5, Geometry(groups=5, padding=((1, 1), (1, 1)))),
    "depthwise_doubled": ((1, 5, 6, 3), (3, 3), 6, Geometry(groups=3, strides=(1, 2))),
    "padding_beyond_window": ((1, 3, 3, 4), (2, 2), 4, Geometry(padding=((5, 4), (3, 6)))),
    "stride_beyond_window": ((2, 9, 9, 2), (2, 2), 4, Geometry(strides=(3, 4))),
    "window_2_with_stride_2": (
        (3, 7, 6, 1),
        (5, 2),
        5,
        Geometry(strides=(3, 2), padding=((1, 1), (1, 1))),
    ),
    "window_2_with_stride_2_both": (
        (2, 6, 5, 3),
        (2, 2),
        4,
        Geometry(strides=(2, 2), padding=((1, 0), (1, 1)), groups=1),
    ),
    "batch_1_odd_channels": ((1, 4, 4, 13), (3, 3), 11, Geometry(padding=((1, 1), (1, 1)))),
}


@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry(rng, case):
    x_shape, kernel, k, geometry = case
    leaves = draw_leaves(rng, geometry, x_shape, kernel, k)
    cotangent = cotangent_like(rng, leaves)
    options = window_of(geometry)
    loss = loss_of(cotangent, activation="relu", grad_dtype=jnp.float32, **options)
    expected = expected_gradients(cotangent, leaves, geometry, activation="relu")
    assert_gradients(jax.jit(jax.grad(loss))(leaves), expected, FLOAT32_LIMIT)


def test_one_scale_for_the_whole_kernel(rng):
    leaves = draw_leaves(rng)
    leaves["w_scale"] = np.float32(0.003)
    leaves["w"] = off_ties(rng, leaves["w"].shape, leaves["w_scale"])
    cotangent = cotangent_like(rng, leaves)
    loss = loss_of(cotangent, grad_dtype=jnp.float32)
    assert_gradients(jax.grad(loss)(leaves), expected_gradients(cotangent, leaves), FLOAT32_LIMIT)


@pytest.mark.parametrize("name", ["x", "w", "bias", "residual", "x_scale", "w_scale", "out_scale"])
def test_each_alone_is_as_in_company(rng, name):
    leaves = draw_leaves(rng) | {"out_scale": np.float32(0.04)}
    loss = loss_of(cotangent_like(rng, leaves), activation="relu", grad_dtype=jnp.float32)
    together = jax.grad(loss)(leaves)[name]
    alone = jax.grad(lambda leaf: loss(leaves | {name: leaf}))(leaves[name])
    assert_relative(alone, np.asarray(together, np.float64), 1e-6, name)


def test_value_is_that_of_the_forward_pass(rng):
    leaves = draw_leaves(rng) | {"out_scale": np.float32(0.04)}
    loss = loss_of(cotangent_like(rng, leaves), activation="gelu")
    np.testing.assert_allclose(jax.value_and_grad(loss)(leaves)[0], loss(leaves), rtol=1e-6)


def test_gradients_keep_their_dtypes(rng):
    leaves = draw_leaves(rng)
    for name in ("x", "w", "residual"):
        leaves[name] = jnp.asarray(leaves[name], jnp.bfloat16)
    gradients = jax.grad(loss_of(cotangent_like(rng, leaves)))(leaves)
    for name, leaf in leaves.items():
        assert gradients[name].dtype == leaf.dtype, name


# QTensors: with a float view the gradient goes to the view, without one to the scale.


def test_view_takes_the_gradient_and_its_scale_takes_none(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    x = jqconv.quantize(leaves["x"], leaves["x_scale"])
    w = jqconv.quantize(leaves["w"], leaves["w_scale"])

    def loss(views, scales):
        y = jqconv.conv2d(
            QTensor(x.values, scales[0], fq=views[0]),
            QTensor(w.values, scales[1], fq=views[1]),
            leaves["bias"],
            grad_dtype=jnp.float32,
        )
        return jnp.sum(y * cotangent)

    views, scales = jax.grad(loss, (0, 1))((x.fq, w.fq), (x.scale, w.scale))
    leaves["residual"] = np.zeros_like(leaves["residual"])
    expected = expected_gradients(cotangent, leaves)
    assert_relative(views[0], expected["x_view"], FLOAT32_LIMIT)
    assert_relative(views[1], expected["w_view"], FLOAT32_LIMIT)
    assert not any(np.any(scale) for scale in scales)


def test_quantize_beside_the_conv_is_the_same_as_within(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)

    def loss(leaves):
        x = jqconv.quantize(leaves["x"], leaves["x_scale"])
        w = jqconv.quantize(leaves["w"], leaves["w_scale"])
        y = jqconv.conv2d(
            x,
            w,
            leaves["bias"],
            residual=leaves["residual"],
            residual_scale=leaves["residual_scale"],
            grad_dtype=jnp.float32,
        )
        return jnp.sum(y * cotangent)

    assert_gradients(jax.grad(loss)(leaves), expected_gradients(cotangent, leaves), FLOAT32_LIMIT)


def test_scale_of_frozen_codes(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    x, w = draw_codes(rng, X_SHAPE), draw_codes(rng, leaves["w"].shape)
    residual = draw_codes(rng, cotangent.shape)

    def loss(scales):
        y = jqconv.conv2d(
            QTensor(x, scales["x_scale"]),
            QTensor(w, scales["w_scale"]),
            leaves["bias"],
            residual=QTensor(residual, scales["residual_scale"]),
            activation="relu",
            grad_dtype=jnp.float32,
        )
        return jnp.sum(y * cotangent)

    scales = {name: leaves[name] for name in ("x_scale", "w_scale", "residual_scale")}
    expected = oracle.gradients(
        cotangent,
        Quantized(x.astype(float), np.float64(scales["x_scale"])),
        Quantized(w.astype(float), scales["w_scale"].astype(float)),
        leaves["bias"],
        geometry=SAME,
        residual=residual,
        residual_scale=np.float64(scales["residual_scale"]),
        activation="relu",
    )
    assert_gradients(jax.grad(loss)(scales), expected, FLOAT32_LIMIT)


def test_residual_codes_with_a_scale_beside_them(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    leaves["residual"] = draw_codes(rng, cotangent.shape)
    leaves["residual_scale"] = np.float32(0.02)
    expected = expected_gradients(cotangent, leaves, activation="silu")
    loss = loss_of(cotangent, activation="silu", grad_dtype=jnp.float32)
    found = jax.grad(lambda s: loss(leaves | {"residual_scale": s}))(leaves["residual_scale"])
    assert_relative(found, expected["residual_scale"], FLOAT32_LIMIT)


def test_quantized_residual_passes_the_gradient_on(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    scale = np.float32(0.03)
    source = off_ties(rng, cotangent.shape, scale)

    def loss(source, scale):
        y = jqconv.conv2d(
            leaves["x"],
            leaves["w"],
            leaves["bias"],
            x_scale=leaves["x_scale"],
            w_scale=leaves["w_scale"],
            residual=jqconv.quantize(source, scale),
            activation="relu",
            out_scale=0.05,
            grad_dtype=jnp.float32,
        )
        return jnp.sum(y.dequantize() * cotangent)

    residual = Quantized.of(source, scale)
    leaves |= {"residual": residual.view, "residual_scale": 1.0}
    expected = expected_gradients(
        cotangent, leaves, activation="relu", out_scale=np.float64(np.float32(0.05))
    )
    found = jax.grad(loss, (0, 1))(source, scale)
    for gradient, wanted in zip(found, residual.pull_back(expected["v"]), strict=True):
        assert_relative(gradient, wanted, FLOAT32_LIMIT)


def test_gradient_flows_through_layers_in_int8(rng):
    leaves = draw_leaves(rng)
    hidden_scale = np.float32(0.05)
    w2_scale = rng.uniform(0.005, 0.01, 4).astype(np.float32)
    w2 = off_ties(rng, (1, 1, K, 4), w2_scale)
    cotangent = rng.normal(size=(*X_SHAPE[:3], 4)).astype(np.float32)

    def loss(leaves):
        hidden = jqconv.conv2d(
            leaves["x"],
            leaves["w"],
            leaves["bias"],
            x_scale=leaves["x_scale"],
            w_scale=leaves["w_scale"],
            residual=leaves["residual"],
            residual_scale=leaves["residual_scale"],
            activation="relu",
            out_scale=leaves["out_scale"],
            grad_dtype=jnp.float32,
        )
        y = jqconv.conv2d(hidden, leaves["w2"], w_scale=w2_scale, grad_dtype=jnp.float32)
        return jnp.sum(y * cotangent)

    first = oracle.epilogue(
        oracle.accumulate(
            oracle.quantize(leaves["x"], leaves["x_scale"]),
            oracle.quantize(leaves["w"], leaves["w_scale"]),
            SAME,
        ),
        np.float64(leaves["x_scale"]) * leaves["w_scale"],
        leaves["bias"],
        residual=leaves["residual"],
        residual_scale=leaves["residual_scale"],
        activation="relu",
        out_multiplier=1 / np.float64(hidden_scale),
        dtype="int8",
    )
    second = oracle.gradients(
        cotangent, Quantized(first, np.float64(hidden_scale)), Quantized.of(w2, w2_scale)
    )
    expected = expected_gradients(
        second["x_view"], leaves, activation="relu", out_scale=np.float64(hidden_scale)
    )
    found = jax.grad(loss)(leaves | {"out_scale": hidden_scale, "w2": w2})
    assert_relative(found.pop("w2"), second["w"], FLOAT32_LIMIT, "w2")
    assert_gradients(found, expected, FLOAT32_LIMIT)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_gradient_of_data_with_a_zero_point(rng, dtype):
    scale, zero_point = np.float32(0.02), 100
    low, high = oracle.LIMITS[dtype]
    steps = rng.integers(low - 20, high + 20, X_SHAPE) - zero_point
    x = ((steps + rng.uniform(-0.45, 0.45, X_SHAPE)) * scale).astype(np.float32)
    w = draw_codes(rng, (*KERNEL, X_SHAPE[-1], K))
    cotangent = rng.normal(size=(*X_SHAPE[:3], K)).astype(np.float32)

    def loss(x):
        q = jqconv.quantize(x, scale, zero_point=zero_point, dtype=dtype)
        y = jqconv.conv2d(q, QTensor(w, 0.01), activation="relu", grad_dtype=jnp.float32)
        return jnp.sum(y * cotangent)

    codes = oracle.quantize(x, scale, zero_point, dtype)
    centred = Quantized(codes - zero_point, np.float64(scale))
    expected = oracle.gradients(
        cotangent,
        centred,
        Quantized(w.astype(float), np.float64(np.float32(0.01))),
        geometry=SAME,
        activation="relu",
    )["x_view"]
    rounded = np.rint(x / np.float64(scale) + zero_point)
    inside = (rounded >= low) & (rounded <= high)
    assert_relative(jax.grad(loss)(x), expected * inside, FLOAT32_LIMIT)


def test_gradient_of_a_kernel_beside_data_with_a_zero_point(rng):
    x = draw_codes(rng, X_SHAPE, "uint8")
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)

    def loss(w):
        q = QTensor(x, leaves["x_scale"], 100)
        y = jqconv.conv2d(q, w, w_scale=leaves["w_scale"], grad_dtype=jnp.float32)
        return jnp.sum(y * cotangent)

    expected = oracle.gradients(
        cotangent,
        Quantized(x.astype(float) - 100, np.float64(leaves["x_scale"])),
        Quantized.of(leaves["w"], leaves["w_scale"]),
        geometry=SAME,
    )["w"]
    assert_relative(jax.grad(loss)(leaves["w"]), expected, FLOAT32_LIMIT)


def test_gradients_of_an_empty_batch_are_zero(rng):
    leaves = draw_leaves(rng, x_shape=(0, *X_SHAPE[1:])) | {"out_scale": np.float32(0.1)}
    cotangent = np.zeros(leaves["residual"].shape, np.float32)
    gradients = jax.grad(loss_of(cotangent, activation="relu"))(leaves)
    for name, leaf in leaves.items():
        assert gradients[name].shape == leaf.shape
        assert not np.any(gradients[name]), name


@pytest.mark.parametrize("name", ["bias", "residual", "scale"])
def test_nothing_to_flow_through_is_an_error_that_says_so(rng, name):
    """Frozen codes in and int8 out: no view, so a gradient would silently be zero."""
    x = QTensor(draw_codes(rng, X_SHAPE), 0.01)
    w = QTensor(draw_codes(rng, (*KERNEL, X_SHAPE[-1], K)), 0.01)
    leaf = {
        "bias": np.zeros(K, np.float32),
        "residual": np.zeros((*X_SHAPE[:3], K), np.float32),
        "scale": np.float32(0.5),
    }[name]

    def loss(leaf):
        kernel = QTensor(w.values, leaf) if name == "scale" else w
        given = {} if name == "scale" else {name: leaf}
        return jnp.sum(jqconv.conv2d(x, kernel, out_scale=0.5, **given).dequantize())

    with pytest.raises((TypeError, ValueError), match=r"quantize|fq|view"):
        jax.grad(loss)(leaf)


def test_packed_kernel_has_no_gradient_but_lets_it_pass(rng):
    leaves = draw_leaves(rng)
    cotangent = cotangent_like(rng, leaves)
    w = QTensor(oracle.quantize(leaves["w"], leaves["w_scale"]).astype(np.int8), leaves["w_scale"])

    def loss(x, kernel):
        y = jqconv.conv2d(x, kernel, x_scale=leaves["x_scale"], grad_dtype=jnp.float32)
        return jnp.sum(y * cotangent)

    packed = jax.grad(loss)(leaves["x"], jqconv.prepack(w))
    np.testing.assert_allclose(packed, jax.grad(loss)(leaves["x"], w), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("grad_dtype", [jnp.int8, jnp.float64, "complex64"], ids=str)
def test_other_grad_dtypes_are_refused(rng, grad_dtype):
    leaves = draw_leaves(rng)
    with pytest.raises((TypeError, ValueError), match="grad_dtype"):
        loss_of(cotangent_like(rng, leaves), grad_dtype=grad_dtype)(leaves)


@pytest.mark.parametrize("zero_point", [None, 100])
def test_gradient_passes_through_a_uint8_residual(rng, zero_point):
    """Frozen data and kernel, int8 output: the residual's view alone carries the gradient."""
    x, w = draw_codes(rng, X_SHAPE), draw_codes(rng, (*KERNEL, X_SHAPE[-1], K))
    source = rng.uniform(0.1, 1.4, (*X_SHAPE[:3], K)).astype(np.float32)
    cotangent = rng.normal(size=source.shape).astype(np.float32)

    def loss(source):
        residual = jqconv.quantize(source, 0.01, zero_point=zero_point, dtype=jnp.uint8)
        y = jqconv.conv2d(
            QTensor(x, 1e-4),
            QTensor(w, 1e-4),
            residual=residual,
            out_scale=0.05,
            grad_dtype=jnp.float32,
        )
        return jnp.sum(y.dequantize() * cotangent)

    # Codes stay inside their range, so the gradient is the cotangent itself.
    assert_relative(jax.grad(loss)(source), cotangent.astype(np.float64), FLOAT32_LIMIT)


def test_leaky_slope_is_that_of_the_value_and_not_of_its_code(rng):
    """Where the slope is small, many negative values round to code 0."""
    x = QTensor(np.ones((1, 1, 1, 1), np.int8), np.float32(1))
    w = jqconv.quantize(jnp.ones((1, 1, 1, 1)), np.float32(1))
    for value, slope in ((-2.0, 0.01), (2.0, 1.0)):

        def out(bias):
            y = jqconv.conv2d(x, w, bias, activation="leaky_relu", out_scale=0.05)
            return y.dequantize().sum()

        assert jax.grad(out)(jnp.full(1, value - 1, jnp.float32)) == pytest.approx(slope)


def test_leaky_relu_of_slope_0_is_relu():
    def out(bias):
        w = QTensor(np.ones((1, 1, 1, 1), np.int8), np.float32(1))
        x = jnp.zeros((1, 1, 1, 1))
        return jqconv.conv2d(x, w, bias, x_scale=1.0, activation=("leaky_relu", 0.0)).sum()

    assert jax.grad(out)(jnp.full(1, -3.0)) == 0
