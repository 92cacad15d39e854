"""Problems for conv2d's gradients: leaves, a loss over them, and what its gradients are."""

import jax.numpy as jnp
import numpy as np
import oracle
from checking import assert_relative
from oracle import Geometry, Quantized

import jqconv
from jqconv import QTensor

FLOAT32_LIMIT = 2e-5  # float32 rounding of sums
BFLOAT16_LIMIT = 1e-2

X_SHAPE, KERNEL, K = (2, 6, 5, 5), (3, 3), 7
SAME = Geometry(padding=((1, 1), (1, 1)))


def off_ties(rng, shape, scale, reach=140):
    """Floats on both sides of the clip, clear of the ties between codes."""
    steps = rng.integers(-reach, reach + 1, shape) + rng.uniform(-0.45, 0.45, shape)
    return (steps * scale).astype(np.float32)


def draw_leaves(rng, geometry=SAME, x_shape=X_SHAPE, kernel=KERNEL, k=K):
    """Everything of a conv that can be differentiated, as float32."""
    x_scale = np.float32(0.013)
    w_scale = rng.uniform(0.002, 0.004, k).astype(np.float32)
    w_shape = (*kernel, x_shape[-1] // geometry.groups, k)
    y_shape = (x_shape[0], *geometry.output_size(x_shape[1:3], kernel), k)
    return {
        "x": off_ties(rng, x_shape, x_scale),
        "w": off_ties(rng, w_shape, w_scale),
        "bias": rng.normal(size=k).astype(np.float32),
        "residual": rng.normal(size=y_shape).astype(np.float32),
        "x_scale": x_scale,
        "w_scale": w_scale,
        "residual_scale": np.float32(0.7),
    }


def loss_of(cotangent, **options):
    """sum(yhat * cotangent) as a function of the leaves."""

    def loss(leaves):
        leaves = dict(leaves)
        y = jqconv.conv2d(leaves.pop("x"), leaves.pop("w"), leaves.pop("bias"), **leaves, **options)
        y = y.dequantize() if isinstance(y, QTensor) else y.astype(jnp.float32)
        return jnp.sum(y * cotangent)

    return loss


def expected_gradients(cotangent, leaves, geometry=SAME, **options):
    return oracle.gradients(
        cotangent,
        Quantized.of(leaves["x"], leaves["x_scale"]),
        Quantized.of(leaves["w"], leaves["w_scale"]),
        leaves["bias"],
        geometry=geometry,
        residual=leaves["residual"],
        residual_scale=leaves["residual_scale"],
        **options,
    )


def assert_gradients(found, expected, limit):
    for name, gradient in found.items():
        cancellation = 1 if np.ndim(gradient) else 10  # a scalar is one sum over everything
        assert_relative(gradient, expected[name], cancellation * limit, name)


def cotangent_like(rng, leaves):
    return rng.normal(size=leaves["residual"].shape).astype(np.float32)
