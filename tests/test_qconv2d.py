"""qconv2d, the kernel-level call: exact where the contract says so, within its bounds elsewhere."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_close_codes, assert_same_codes, assert_within_ulps
from oracle import Geometry
from problems import (
    ACTIVATIONS,
    GEOMETRIES,
    OUTPUTS,
    RAW,
    RESIDUALS,
    Form,
    covering_forms,
    draw_codes,
    draw_problem,
    is_exact,
    name_of,
    spec_of,
)

import jqconv
from jqconv import _reference

FLOAT_LIMIT = 2.0  # ulp, as checking.ulps counts them


def solve(problem):
    return jqconv.qconv2d(*problem.operands, **problem.options)


def assert_solves(problem, *, exact):
    """The library's answer is the oracle's, to the bit or within the contract's bound."""
    result, output = solve(problem), problem.form.output
    if output in (*oracle.LIMITS, "int32"):
        compare = assert_same_codes if exact or output == "int32" else assert_close_codes
        compare(result, problem.answer, output)
    elif exact:
        assert_same_codes(result, problem.answer.astype(jnp.dtype(output)), output)
    else:
        assert_within_ulps(result, problem.answer, problem.magnitude, FLOAT_LIMIT, output)


def test_covering_forms_cover_every_pair():
    forms = covering_forms()[1:]
    fields = {
        "activation": ACTIVATIONS,
        "residual": RESIDUALS,
        "output": OUTPUTS,
        "multiplier": ("scalar", "channel"),
        "bias": (False, True),
        "residual_scale": (False, True),
        "out_multiplier": (False, True),
    }
    for (a, options_a), (b, options_b) in itertools.combinations(fields.items(), 2):
        wanted = set(itertools.product(options_a, options_b))
        if {a, b} == {"residual", "residual_scale"}:
            wanted.discard((None, True))
        assert wanted <= {(getattr(form, a), getattr(form, b)) for form in forms}, (a, b)


@pytest.mark.parametrize("form", covering_forms(), ids=str)
def test_every_form_on_the_exact_grid(rng, form):
    problem = draw_problem(rng, form, x_shape=(2, 5, 6, 5), k=7)
    assert_solves(problem, exact=is_exact(form.activation))


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=name_of)
def test_arbitrary_scales(rng, activation, output):
    form = Form(activation, "int8", output, residual_scale=True, out_multiplier=True)
    problem = draw_problem(rng, form, x_shape=(4, 8, 9, 5), k=41, exact=False)
    assert_solves(problem, exact=False)


def same(x_shape, kernel, **options):
    """SAME padding written out, and the other options."""
    geometry = Geometry(**options)
    pads = oracle.same_padding(x_shape[1:3], kernel, geometry.strides, geometry.dilation)
    return Geometry(padding=pads, **options)


@pytest.mark.parametrize("case", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry(rng, case):
    x_shape, kernel, k, geometry = case
    for form in (Form("relu", "int8"), Form(output="int32", multiplier=None, bias=False)):
        problem = draw_problem(rng, form, x_shape=x_shape, kernel=kernel, k=k, geometry=geometry)
        assert_solves(problem, exact=True)


@pytest.mark.parametrize(
    ("padding", "strides", "dilation"),
    [("SAME", 1, 1), ("SAME", (2, 3), 1), ("SAME", 1, (2, 1)), ("VALID", 2, 1), (1, 1, 2)],
)
def test_padding_and_pairs_in_their_short_forms(rng, padding, strides, dilation):
    def pair(value):
        return value if isinstance(value, tuple) else (value, value)

    geometry = Geometry(strides=pair(strides), dilation=pair(dilation))
    if padding == "SAME":
        geometry = same((2, 7, 8, 3), (3, 2), strides=pair(strides), dilation=pair(dilation))
    elif padding == 1:
        geometry = Geometry(pair(strides), ((1, 1), (1, 1)), pair(dilation))
    problem = draw_problem(rng, x_shape=(2, 7, 8, 3), kernel=(3, 2), geometry=geometry)
    short = problem.options | {"padding": padding, "strides": strides, "dilation": dilation}
    assert_same_codes(jqconv.qconv2d(*problem.operands, **short), problem.answer)


@pytest.mark.parametrize("x_code", [-128, 127])
@pytest.mark.parametrize("w_code", [-128, 127])
@pytest.mark.parametrize("channels", [64, 130])
def test_accumulator_of_extremes_is_exact(x_code, w_code, channels):
    x = np.full((1, 5, 5, channels), x_code, np.int8)
    w = np.full((3, 3, channels, 3), w_code, np.int8)
    acc = jqconv.qconv2d(x, w, None, padding="VALID", out_dtype=jnp.int32)
    assert_same_codes(acc, np.full((1, 3, 3, 3), x_code * w_code * channels * 9), "int32")


@pytest.mark.parametrize(
    "x_shape", [(0, 6, 5, 8), (2, 2, 5, 8), (2, 6, 1, 8), (0, 0, 0, 8), (2, 0, 5, 8)]
)
@pytest.mark.parametrize("output", ["int8", "float32"])
def test_nothing_in_nothing_out(x_shape, output):
    result = jqconv.qconv2d(
        np.zeros(x_shape, np.int8),
        np.zeros((3, 3, 8, 4), np.int8),
        np.ones(4, np.float32),
        np.ones(4, np.float32),
        padding="VALID",
        out_dtype=output,
    )
    p, q = Geometry().output_size(x_shape[1:3], (3, 3))
    assert (result.shape, result.dtype) == ((x_shape[0], p, q, 4), jnp.dtype(output))
    assert result.size == 0


def test_padding_alone_gives_the_bias(rng):
    bias = np.array([1, -2, 300], np.float32)
    result = jqconv.qconv2d(
        np.zeros((2, 0, 0, 5), np.int8),
        draw_codes(rng, (2, 2, 5, 3)),
        np.float32(1),
        bias,
        padding=2,
    )
    assert_same_codes(result, np.broadcast_to([1, -2, 127], (2, 3, 3, 3)))


@pytest.mark.parametrize("form", [Form(), Form("relu", "int8", multiplier="scalar")], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
def test_packed_kernels_give_the_same(rng, form, groups):
    geometry = Geometry(groups=groups, strides=(2, 1))
    problem = draw_problem(rng, form, geometry=geometry, k=6)
    x, w, *rest = problem.operands
    result = jqconv.qconv2d(x, jqconv.prepack(w), *rest, **problem.options)
    assert_same_codes(result, problem.answer)


def test_scale_of_a_packed_kernel_is_ignored(rng):
    problem = draw_problem(rng)
    x, w, *rest = problem.operands
    packed = jqconv.prepack(jqconv.QTensor(w, 77.0))
    assert_same_codes(jqconv.qconv2d(x, packed, *rest, **problem.options), problem.answer)


def test_multiplier_may_be_a_python_number(rng):
    problem = draw_problem(rng, Form(multiplier="scalar", bias=False))
    x, w, multiplier, _ = problem.operands
    result = jqconv.qconv2d(x, w, float(multiplier), **problem.options)
    assert_same_codes(result, problem.answer)


def test_residual_scale_without_one_is_one(rng):
    problem = draw_problem(rng, Form(residual="int8"))
    explicit = problem.options | {"residual_scale": 1.0}
    assert_same_codes(jqconv.qconv2d(*problem.operands, **explicit), problem.answer)


def test_rounds_half_to_even_and_saturates():
    x = np.arange(-128, 128, dtype=np.int8).reshape(1, 16, 16, 1)
    w = np.array([[[[1, 3, -3]]]], np.int8)
    result = jqconv.qconv2d(x, w, np.float32(0.5))
    expected = np.clip(np.rint(x.astype(float) * [0.5, 1.5, -1.5]), -128, 127)
    assert_same_codes(result, expected)
    assert {-128, 127} <= set(np.asarray(result).flat)


def test_has_no_gradient_and_says_what_has():
    def loss(multiplier):
        x, w = jnp.ones((1, 3, 3, 2), jnp.int8), jnp.ones((1, 1, 2, 2), jnp.int8)
        return jqconv.qconv2d(x, w, multiplier, out_dtype=jnp.float32).sum()

    with pytest.raises(TypeError, match="conv2d"):
        jax.grad(loss)(jnp.float32(1))
    with pytest.raises(TypeError, match="conv2d"):
        jax.jvp(loss, (jnp.float32(1),), (jnp.float32(1),))


@pytest.mark.parametrize("name", ["1x1", "groups_2", "depthwise_doubled", "asymmetric", "stem"])
def test_integers_carried_in_floats_are_exact(rng, name):
    """The xla form on a GPU, run here: floats below 1024 products, sums of pieces beyond."""
    x_shape, kernel, k, geometry = GEOMETRIES[name]
    _assert_float_form_is_exact(draw_codes(rng, x_shape), kernel, k, geometry, rng)


@pytest.mark.parametrize(
    ("channels", "kernel", "groups"),
    [(1030, (1, 1), 1), (130, (3, 3), 1), (6, (33, 35), 2), (1, (1, 1100), 1), (2, (1100, 1), 1)],
)
def test_integers_carried_in_floats_are_exact_beyond_1024_products(rng, channels, kernel, groups):
    x = np.full((1, kernel[0] + 1, kernel[1] + 2, channels), -128, np.int8)
    x[:, ::2, ::3] = 127
    geometry = Geometry(groups=groups, padding=((1, 0), (0, 2)), dilation=(1, 1))
    _assert_float_form_is_exact(x, kernel, 2 * groups, geometry, rng, extreme=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16"])
@pytest.mark.parametrize(
    ("channels", "k", "kernel", "geometry"),
    [
        (7, 7, (3, 3), Geometry(groups=7, padding=((1, 1), (1, 1)))),
        (5, 10, (2, 3), Geometry(groups=5, strides=(2, 3), padding=((0, 2), (3, 1)))),
        (3, 3, (3, 2), Geometry(groups=3, dilation=(2, 3), strides=(1, 2))),
        (1, 4, (3, 3), Geometry(padding=((0, 3), (1, 0)))),
    ],
    ids=["depthwise", "doubled", "dilated", "one_channel"],
)
def test_depthwise_sums_of_taps_are_exact(rng, channels, k, kernel, geometry, dtype):
    """The xla form of depthwise convolutions on a GPU, run here."""
    low, high = (-255, 256) if dtype == "int16" else oracle.LIMITS[dtype] + np.array([0, 1])
    x = rng.integers(low, high, (2, 8, 9, channels)).astype(dtype)
    w = draw_codes(rng, (*kernel, 1, k))
    spec = dataclasses.replace(spec_of(RAW, geometry, x.shape, w.shape), x_dtype=dtype)
    assert _reference.gpu_carrier(spec) == "int32"
    packed = jnp.asarray(w.transpose(3, 0, 1, 2))
    acc = _reference.fprop(spec, jnp.asarray(x), packed, carrier="int32")
    assert_same_codes(acc, oracle.accumulate(x, w, geometry), "int32")


def _assert_float_form_is_exact(x, kernel, k, geometry, rng, extreme=False):
    w = draw_codes(rng, (*kernel, x.shape[-1] // geometry.groups, k))
    if extreme:
        w = np.where(w < 96, np.int8(-128), np.int8(127))
    packed = w.transpose(3, 0, 1, 2)
    spec = spec_of(RAW, geometry, x.shape, w.shape)
    acc = _reference.fprop(spec, jnp.asarray(x), jnp.asarray(packed), carrier="bfloat16")
    assert_same_codes(acc, oracle.accumulate(x, w, geometry), "int32")
