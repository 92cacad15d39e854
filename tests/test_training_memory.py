"""What training keeps between its forward and its backward pass: int8 activations."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jqconv.flax as jf

SHAPE = (8, 32, 32, 32)
ELEMENTS = 8 * 32 * 32 * 32


class Chain(nnx.Module):
    """Convolutions one after another, with residuals at every second one or norms if wanted."""

    def __init__(self, depth, *, residual, norm=False, **options):
        self.residual = residual

        def layer(rngs):
            channels = SHAPE[-1]
            own = {"norm": nnx.BatchNorm(channels, rngs=rngs)} if norm else {}
            fixed = {"activation": "relu", "output": "int8"}
            return jf.QConv(channels, channels, (3, 3), rngs=rngs, **fixed, **own, **options)

        self.layers = nnx.List(layer(nnx.Rngs(i)) for i in range(depth))

    def __call__(self, x):
        before = x
        for i, layer in enumerate(self.layers):
            adds = self.residual and i % 2
            y = layer(x, residual=before if adds else None)
            before, x = x, y
        return x


def bytes_per_element(depth, dtype, *, quantized, residual, **options):
    """Return temporary memory of a gradient, in bytes for each element of an activation."""
    model = Chain(depth, residual=residual, **options)
    x = jax.random.normal(jax.random.key(0), SHAPE)
    if quantized:
        model.eval()
        jf.calibrate(model, [x], progress=False)
    model.train()
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    params = jax.tree.map(lambda p: p.astype(dtype), params)

    def loss(params, x):
        y = nnx.merge(graph, params, rest, copy=True)(x)
        y = y.dequantize() if quantized else y
        return jnp.sum(jnp.square(y.astype(jnp.float32)))

    compiled = jax.jit(jax.grad(loss)).lower(params, x.astype(dtype)).compile()
    return compiled.memory_analysis().temp_size_in_bytes / ELEMENTS


def growth(dtype, **options):
    """Return what one more layer costs."""
    few, many = (bytes_per_element(depth, dtype, **options) for depth in (8, 16))
    return (many - few) / 8


fuses_across_barriers = pytest.mark.skipif(
    jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11),
    reason="XLA:CPU before jax 0.11 ignores barriers, keeps float sums and rounds them again",
)
LEARNED = pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
RESIDUAL = pytest.mark.parametrize("residual", [False, True], ids=["chain", "residual"])


@fuses_across_barriers
@LEARNED
def test_a_layer_more_costs_a_byte_an_element(learned):
    assert growth(jnp.float32, quantized=False, residual=False) > 6, "what it is compared with"
    limit = 2 if learned else 1.25
    assert growth(jnp.float32, quantized=True, residual=False, learned_scales=learned) < limit


@fuses_across_barriers
@RESIDUAL
def test_peak_memory_is_less_than_half_of_the_float_networks(residual):
    in_float = bytes_per_element(16, jnp.float32, quantized=False, residual=residual)
    assert bytes_per_element(16, jnp.float32, quantized=True, residual=residual) < in_float / 2


@fuses_across_barriers
@RESIDUAL
def test_a_live_norm_keeps_codes_beside_its_input(residual):
    """A byte for what a float network keeps four: what the activation returned."""
    in_float = growth(jnp.float32, quantized=False, residual=residual, norm=True)
    assert growth(jnp.float32, quantized=True, residual=residual, norm=True) < in_float - 2.9


@pytest.mark.gpu
@LEARNED
@RESIDUAL
def test_on_a_gpu_peak_memory_is_below_that_of_bf16(learned, residual, measured):
    in_bf16 = growth(jnp.bfloat16, quantized=False, residual=residual)
    in_int8 = growth(jnp.float32, quantized=True, residual=residual, learned_scales=learned)
    name = f"memory {'residual' if residual else 'chain'}, {'learned' if learned else 'fixed'}"
    measured(name, f"{in_int8:.2f} bytes an element and layer, bf16 {in_bf16:.2f}")
    assert in_int8 < in_bf16 / 3
