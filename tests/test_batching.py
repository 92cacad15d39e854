"""vmap over anything: equal to a loop, forward and in gradients, without a slower convolution."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import equations_of
from problems import Form, draw_codes, draw_problem, scale_for

import jqconv
from jqconv import QTensor

SIZE = 3
OPERANDS = ("x", "w", "multiplier", "bias", "residual", "residual_scale", "out_multiplier")
FULL = Form("relu", "int8", "int8", "channel", True, True, True)


def draw_stack(rng, mapped, form=FULL):
    """The operands of one problem, those in mapped SIZE times over along a new leading axis."""
    problems = [draw_problem(rng, form, x_shape=(2, 5, 4, 4), k=6) for _ in range(SIZE)]
    first = problems[0]
    stacked = {}
    for name in OPERANDS:
        values = [getattr(p, name) for p in problems]
        if values[0] is not None:
            stacked[name] = np.stack(values) if name in mapped else values[0]
    static = {k: v for k, v in first.options.items() if k not in OPERANDS}
    return stacked, lambda operands: jqconv.qconv2d(**operands, **static)


def looped(function, operands, mapped):
    return np.stack(
        [
            function({name: v[i] if name in mapped else v for name, v in operands.items()})
            for i in range(SIZE)
        ]
    )


@pytest.mark.parametrize(
    "mapped",
    [
        *[(name,) for name in OPERANDS],
        ("x", "w"),
        ("x", "residual"),
        ("w", "multiplier", "bias"),
        ("x", "bias"),
        OPERANDS,
    ],
    ids="+".join,
)
def test_over_any_operands(rng, mapped):
    operands, function = draw_stack(rng, mapped)
    axes = {name: 0 if name in mapped else None for name in operands}
    result = jax.vmap(function, in_axes=(axes,))(operands)
    np.testing.assert_array_equal(result, looped(function, operands, mapped))


@pytest.mark.parametrize("axis", [1, 2, -1])
@pytest.mark.parametrize("out_axis", [0, 2, -1])
def test_over_any_axis(rng, axis, out_axis):
    mapped = ("x", "residual")
    operands, function = draw_stack(rng, mapped)
    moved = operands | {name: np.moveaxis(operands[name], 0, axis) for name in mapped}
    axes = {name: axis if name in mapped else None for name in operands}
    result = jax.vmap(function, in_axes=(axes,), out_axes=out_axis)(moved)
    expected = np.moveaxis(looped(function, operands, mapped), 0, out_axis)
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("mapped", [("x",), ("w", "bias"), ("x", "w")], ids="+".join)
@pytest.mark.parametrize("groups", [2, 4])
def test_with_groups(rng, mapped, groups):
    x = draw_codes(rng, (SIZE, 2, 4, 4, 4))
    w = draw_codes(rng, (SIZE, 3, 3, 4 // groups, 8))
    bias = rng.integers(-9, 9, (SIZE, 8)).astype(np.float32)
    operands = {"x": x, "w": w, "bias": bias}
    operands = {name: v if name in mapped else v[0] for name, v in operands.items()}

    def function(operands):
        multiplier = np.float32(scale_for(9 * 4 // groups))
        return jqconv.qconv2d(multiplier=multiplier, groups=groups, **operands)

    axes = {name: 0 if name in mapped else None for name in operands}
    result = jax.vmap(function, in_axes=(axes,))(operands)
    np.testing.assert_array_equal(result, looped(function, operands, mapped))


def test_nested(rng):
    x = draw_codes(rng, (2, 3, 2, 4, 4, 4))
    w = draw_codes(rng, (2, 3, 3, 4, 5))
    multiplier = np.float32(scale_for(36))

    def one(x, w):
        return jqconv.qconv2d(x, w, multiplier)

    over_x = jax.vmap(one, (0, None))
    over_both = jax.vmap(over_x, (0, 0))(x, w)
    crossed = jax.vmap(jax.vmap(one, (None, 0)), (0, None))(x[0], w)
    for i in range(2):
        for j in range(3):
            np.testing.assert_array_equal(over_both[i, j], one(x[i, j], w[i]))
            np.testing.assert_array_equal(crossed[j, i], one(x[0, j], w[i]))


def test_over_nothing(rng):
    x = np.zeros((0, 2, 4, 4, 4), np.int8)
    result = jax.vmap(lambda x: jqconv.qconv2d(x, draw_codes(rng, (3, 3, 4, 5)), 1.0))(x)
    assert (result.shape, result.dtype) == ((0, 2, 4, 4, 5), np.int8)


def test_over_packed_kernels(rng):
    x, w = draw_codes(rng, (2, 4, 4, 4)), draw_codes(rng, (SIZE, 3, 3, 4, 5))
    multiplier = np.float32(scale_for(36))
    packed = jax.vmap(jqconv.prepack)(w)
    result = jax.vmap(lambda k: jqconv.qconv2d(x, k, multiplier))(packed)
    expected = np.stack([jqconv.qconv2d(x, k, multiplier) for k in w])
    np.testing.assert_array_equal(result, expected)


def test_qtensors_with_shared_and_mapped_scales(rng):
    x = QTensor(draw_codes(rng, (SIZE, 2, 4, 4, 4)), np.float32(0.01))
    w = QTensor(draw_codes(rng, (3, 3, 4, 5)), np.float32(0.01))

    def one(x):
        return jqconv.conv2d(x, w, activation="silu", out_scale=0.5)

    axes = jax.tree.unflatten(jax.tree.structure(x), [0, None])
    shared = jax.vmap(one, (axes,), out_axes=jax.tree.unflatten(jax.tree.structure(x), [0, None]))
    y = shared(x)
    assert y.scale.shape == ()
    for i in range(SIZE):
        np.testing.assert_array_equal(y.values[i], one(QTensor(x.values[i], 0.01)).values)

    scales = jnp.asarray([0.01, 0.02, 0.03])
    mapped = jax.vmap(lambda v, s: one(QTensor(v, s)))(x.values, scales)
    for i in range(SIZE):
        np.testing.assert_array_equal(mapped.values[i], one(QTensor(x.values[i], scales[i])).values)


# What a mapped axis costs: one wider convolution wherever there is one.


@pytest.mark.parametrize(
    ("mapped", "loops"),
    [
        (("x",), False),
        (("x", "residual"), False),
        (("w",), False),
        (("w", "multiplier", "bias"), False),
        (("x", "w"), True),
        (("residual_scale",), True),
    ],
)
def test_folds_into_one_convolution_where_it_can(rng, mapped, loops):
    operands, function = draw_stack(rng, mapped)
    axes = {name: 0 if name in mapped else None for name in operands}
    jaxpr = jax.make_jaxpr(jax.vmap(function, in_axes=(axes,)))(operands)
    names = [equation.primitive.name for equation in equations_of(jaxpr)]
    assert names.count("jqconv_fprop") == 1
    assert ("scan" in names or "while" in names) is loops


# Gradients.


def leaves_and_loss(rng, activation, out_scale):
    leaves = {
        "x": rng.normal(size=(2, 4, 4, 4)).astype(np.float32),
        "w": rng.normal(size=(3, 3, 4, 6)).astype(np.float32) * 0.3,
        "bias": rng.normal(size=6).astype(np.float32),
        "residual": rng.normal(size=(2, 4, 4, 6)).astype(np.float32),
        "x_scale": np.float32(0.02),
        "w_scale": rng.uniform(0.004, 0.008, 6).astype(np.float32),
    }
    cotangent = rng.normal(size=(2, 4, 4, 6)).astype(np.float32)

    def loss(leaves):
        leaves = dict(leaves)
        y = jqconv.conv2d(
            leaves.pop("x"),
            leaves.pop("w"),
            activation=activation,
            out_scale=out_scale,
            grad_dtype=jnp.float32,
            **leaves,
        )
        y = y.dequantize() if isinstance(y, QTensor) else y
        return jnp.sum(y * cotangent)

    return leaves, loss


@pytest.mark.parametrize(
    ("activation", "out_scale"), [("relu", None), ("relu", 0.05), ("silu", 0.05)]
)
@pytest.mark.parametrize(
    "mapped",
    [("x",), ("w",), ("x", "w"), ("bias", "w_scale"), ("x", "residual"), ("x_scale",)],
    ids="+".join,
)
def test_vmap_of_grad(rng, activation, out_scale, mapped):
    leaves, loss = leaves_and_loss(rng, activation, out_scale)
    for name in mapped:
        spread = rng.uniform(0.8, 1.2, (SIZE, *(1,) * np.ndim(leaves[name])))
        leaves[name] = (
            (leaves[name] * spread).astype(np.float32).reshape(SIZE, *np.shape(leaves[name]))
        )
    axes = {name: 0 if name in mapped else None for name in leaves}
    batched = jax.vmap(jax.grad(loss), in_axes=(axes,))(leaves)
    for i in range(SIZE):
        single = jax.grad(loss)(
            {name: leaf[i] if name in mapped else leaf for name, leaf in leaves.items()}
        )
        for name in leaves:
            np.testing.assert_allclose(
                batched[name][i], single[name], rtol=1e-4, atol=1e-4, err_msg=name
            )


@pytest.mark.parametrize("mapped", [("x",), ("w",), ("x", "w", "bias")], ids="+".join)
def test_grad_of_vmap(rng, mapped):
    leaves, loss = leaves_and_loss(rng, "relu", 0.05)
    for name in mapped:
        leaves[name] = np.stack([leaves[name] * (1 + 0.1 * i) for i in range(SIZE)])
    axes = {name: 0 if name in mapped else None for name in leaves}
    whole = jax.grad(lambda t: jnp.sum(jax.vmap(loss, in_axes=(axes,))(t)))(leaves)
    singles = [
        jax.grad(loss)({name: v[i] if name in mapped else v for name, v in leaves.items()})
        for i in range(SIZE)
    ]
    for name in leaves:
        each = np.stack([single[name] for single in singles])
        expected = each if name in mapped else each.sum(0)
        np.testing.assert_allclose(whole[name], expected, rtol=1e-4, atol=1e-4, err_msg=name)


def test_gradient_of_each_example(rng):
    """Per-example kernel gradients: the kernel shared, the data mapped."""
    leaves, loss = leaves_and_loss(rng, "relu", None)
    xs = rng.normal(size=(SIZE, *leaves["x"].shape)).astype(np.float32)
    gradient = jax.grad(lambda w, x: loss(leaves | {"w": w, "x": x}))
    each = jax.vmap(gradient, (None, 0))(leaves["w"], xs)
    for i in range(SIZE):
        np.testing.assert_allclose(each[i], gradient(leaves["w"], xs[i]), rtol=1e-4, atol=1e-4)
