"""The oracle itself, against jax.lax, adjoint identities, differences and autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_relative
from oracle import Geometry, Quantized
from problems import draw_codes, name_of

GEOMETRIES = [
    Geometry(),
    Geometry(padding=((1, 1), (1, 1))),
    Geometry(strides=(2, 2), padding=((0, 1), (2, 0))),
    Geometry(dilation=(2, 1), padding=((2, 2), (1, 0)), groups=3),
    Geometry(strides=(2, 3), dilation=(1, 2), padding=((3, 1), (0, 4)), groups=6),
]


def lax_conv(x, w, geometry):
    return jax.lax.conv_general_dilated(
        x,
        w,
        geometry.strides,
        geometry.padding,
        rhs_dilation=geometry.dilation,
        feature_group_count=geometry.groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest",
    )


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_accumulator_agrees_with_lax(rng, geometry):
    x = draw_codes(rng, (2, 9, 8, 6))
    w = draw_codes(rng, (3, 2, 6 // geometry.groups, 12))
    expected = lax_conv(jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32), geometry)
    np.testing.assert_array_equal(oracle.accumulate(x, w, geometry), expected)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_gradients_are_adjoints(rng, geometry):
    x = rng.normal(size=(2, 9, 8, 6))
    w = rng.normal(size=(3, 2, 6 // geometry.groups, 12))
    y = oracle.accumulate(x, w, geometry)
    dy = rng.normal(size=y.shape)
    product = np.vdot(y, dy)
    np.testing.assert_allclose(
        np.vdot(x, oracle.dgrad(dy, w, x.shape, geometry)), product, rtol=1e-10
    )
    np.testing.assert_allclose(
        np.vdot(w, oracle.wgrad(x, dy, w.shape, geometry)), product, rtol=1e-10
    )


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation"),
    [(7, 3, 2, 1), (8, 3, 2, 1), (5, 2, 1, 2), (9, 1, 3, 1)],
)
def test_same_padding_agrees_with_lax(size, kernel, stride, dilation):
    effective = dilation * (kernel - 1) + 1
    expected = jax.lax.padtype_to_pads((size,), (effective,), (stride,), "SAME")
    assert oracle.same_padding((size,), (kernel,), (stride,), (dilation,)) == tuple(
        map(tuple, expected)
    )


@pytest.mark.parametrize("activation", oracle.SMOOTH)
def test_slopes_agree_with_differences(activation):
    v = np.linspace(-5, 5, 200)
    step = 1e-6
    difference = (oracle.activate(v + step, activation) - oracle.activate(v - step, activation)) / (
        2 * step
    )
    np.testing.assert_allclose(oracle.activation_slope(v, activation), difference, atol=1e-7)


def _through(values, codes, passed):
    """Straight through: the codes' values, and where passed, the identity's gradient."""
    path = jnp.where(passed, values, 0)
    return path + jax.lax.stop_gradient(codes - path)


# Not leaky_relu to int8: backward looks at the code, where a value rounded up to 0 is positive.
@pytest.mark.parametrize(
    ("activation", "out_scale"),
    [
        (None, None),
        (("leaky_relu", 0.25), None),
        ("gelu", None),
        (None, 0.05),
        ("silu", 0.05),
        ("hard_swish", 0.05),
    ],
    ids=name_of,
)
def test_gradients_agree_with_autodiff_of_straight_through(rng, activation, out_scale):
    geometry = Geometry(strides=(2, 1), padding=((1, 0), (1, 1)), groups=2)
    x = rng.normal(size=(2, 5, 5, 4))
    w = rng.normal(size=(3, 3, 2, 6))
    bias, residual = rng.normal(size=6), rng.normal(size=(2, 2, 5, 6))
    x_scale, w_scale, residual_scale = 0.015, rng.uniform(0.01, 0.02, 6), 0.7
    cotangent = rng.normal(size=residual.shape)
    leaves = {
        "x": x,
        "w": w,
        "bias": bias,
        "residual": residual,
        "x_scale": x_scale,
        "w_scale": w_scale,
    }
    leaves |= {"residual_scale": residual_scale} | (
        {} if out_scale is None else {"out_scale": out_scale}
    )

    jax_activations = {
        None: lambda v: v,
        ("leaky_relu", 0.25): lambda v: jax.nn.leaky_relu(v, 0.25),
        "silu": jax.nn.silu,
        "gelu": jax.nn.gelu,
        "hard_swish": jax.nn.hard_swish,
    }

    def loss(t):
        views = {}
        for name in ("x", "w"):
            u = t[name] / t[name + "_scale"]
            rounded = jnp.round(u)
            views[name] = t[name + "_scale"] * _through(
                u, jnp.clip(rounded, -128, 127), (rounded >= -128) & (rounded <= 127)
            )
        v = (
            lax_conv(views["x"], views["w"], geometry)
            + t["bias"]
            + t["residual"] * t["residual_scale"]
        )
        y = jax_activations[activation](v)
        if out_scale is not None:
            u = y / t["out_scale"]
            codes = jnp.clip(jnp.round(u), -128, 127)
            y = t["out_scale"] * _through(u, codes, (codes > -128) & (codes < 127))
        return jnp.sum(y * jnp.asarray(cotangent, jnp.float32))

    expected = jax.grad(loss)(
        {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
    )
    result = oracle.gradients(
        cotangent,
        Quantized.of(x, x_scale),
        Quantized.of(w, w_scale),
        bias,
        geometry=geometry,
        residual=residual,
        residual_scale=residual_scale,
        activation=activation,
        out_scale=out_scale,
    )
    for name, gradient in expected.items():
        assert_relative(gradient, result[name], 2e-5, name)
