"""Every form of graph that jqconv can build, run on the GPU and compared with float64.

cuDNN's support checks pass graphs that it cannot run, so a form counts as supported only here.
What was measured is printed as a table at the end of the run.
"""

import concurrent.futures
import os

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import problems
import pytest
from checking import MOVED_FRACTION, moved, relative_error, ulps
from oracle import Geometry
from problems import Form, draw_codes, draw_problem, every_form, is_exact, name_of

import jqconv
from jqconv import _native, _policy, _primitive

pytestmark = pytest.mark.gpu

X_SHAPE, KERNEL, K = (4, 14, 14, 64), (3, 3), 64
FORMS = every_form()

FLOAT_LIMIT = 3.0  # ulp, as checking.ulps counts them
SMOOTH_FRACTION = 1e-3  # of codes that the GPU's exp and tanh may move by one
SMOOTH_LIMIT = 64.0  # likewise: the GPU's exp and tanh


def draw(rng, form, exact):
    return draw_problem(rng, form, x_shape=X_SHAPE, kernel=KERNEL, k=K, exact=exact)


def spec_of(form):
    """The spec that qconv2d makes of a form's problem."""
    w_shape = (*KERNEL, X_SHAPE[-1], K)
    return problems.spec_of(form, Geometry(padding=((1, 1), (1, 1))), X_SHAPE, w_shape)


@pytest.fixture(scope="session")
def plans():
    """Every plan of this file, built side by side: each takes about a second of one core."""
    device = jax.devices()[0].local_hardware_id

    def build(spec):
        return _native.resolve(str(spec), "", device, _policy.settings().workspace_limit)

    specs = [spec_of(form) for form in FORMS] + [
        spec.backward(direction, dtype)
        for spec in [spec_of(Form())]
        for direction in ("dgrad", "wgrad")
        for dtype in ("bfloat16", "float16")
    ]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = pool.map(build, specs)
    return {str(spec): answer for spec, answer in zip(specs, answers, strict=True)}


def test_search_builds_what_the_handlers_run(plans):
    """One description on both sides: what Python writes, the native side reads."""
    for spec, (text, reason) in plans.items():
        assert bool(text) != bool(reason), spec
        if text:
            assert str(jqconv.Algorithm.parse(text)) == text


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_form(rng, plans, measured, form):
    text, reason = plans[str(spec_of(form))]
    assert text, f"cuDNN runs no {form}: {reason}"
    smooth = not is_exact(form.activation)
    for exact in (True, False):
        problem = draw(rng, form, exact)
        result = jqconv.qconv2d(*problem.operands, **problem.options)
        what = f"{form} {'grid' if exact else 'any scale'}"
        assert result.dtype == jnp.dtype(form.output)
        if form.output in (*oracle.LIMITS, "int32"):
            distance = moved(result, problem.answer)
            measured(what, f"{distance.count} of {distance.size} moved, by {distance.furthest}")
            assert distance.furthest <= 1
            if (exact and not smooth) or form.output == "int32":
                assert distance.count == 0
            else:
                assert distance.fraction < (SMOOTH_FRACTION if smooth else MOVED_FRACTION)
        else:
            worst = ulps(result, problem.answer, problem.magnitude)
            measured(what, f"{worst:.3f} ulp")
            if exact and not smooth:
                expected = problem.answer.astype(jnp.dtype(form.output))
                np.testing.assert_array_equal(result, expected)
            else:
                assert worst <= (SMOOTH_LIMIT if smooth else FLOAT_LIMIT)


@pytest.mark.parametrize("slope", [0.0, 0.01, 0.3, 1.0])
def test_every_slope_of_leaky_relu(rng, measured, slope):
    problem = draw(rng, Form(("leaky_relu", slope), output="float32"), exact=False)
    result = jqconv.qconv2d(*problem.operands, **problem.options)
    worst = ulps(result, problem.answer, problem.magnitude)
    measured(f"leaky_relu:{slope}", f"{worst:.3f} ulp")
    assert worst <= FLOAT_LIMIT


@pytest.mark.parametrize("activation", ["silu", "gelu", "hard_swish"])
def test_smooth_activations_far_from_zero(activation):
    """Where exp overflows float32 the result is still v, or 0."""
    x = np.arange(-128, 128, dtype=np.int8).reshape(1, 16, 16, 1).repeat(16, -1)
    w = np.eye(16, dtype=np.int8)[None, None]
    result = jqconv.qconv2d(x, w, 1.0, activation=activation, out_dtype=jnp.float32)
    expected = oracle.activate(x.astype(np.float64), activation)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


def draw_gradient(rng, direction, dtype):
    """A spec of a gradient, its operands, and the gradient in float64."""
    spec = spec_of(Form()).backward(direction, dtype)
    geometry = Geometry(padding=spec.padding)
    dy = jnp.asarray(rng.normal(size=spec.y_shape), dtype)
    if direction == "dgrad":
        w = draw_codes(rng, (*KERNEL, X_SHAPE[-1], K)) // 4
        operands = dy, jnp.asarray(w.transpose(3, 0, 1, 2), dtype)
        return spec, operands, oracle.dgrad(np.asarray(dy).astype(float), w, X_SHAPE, geometry)
    x = draw_codes(rng, X_SHAPE)
    w_shape = (*KERNEL, X_SHAPE[-1], K)
    expected = oracle.wgrad(x, np.asarray(dy).astype(float), w_shape, geometry)
    return spec, (jnp.asarray(x, dtype), dy), expected.transpose(3, 0, 1, 2)


DIRECTIONS = pytest.mark.parametrize("direction", ["dgrad", "wgrad"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@DIRECTIONS
def test_gradient_forms(rng, plans, measured, direction, dtype):
    spec, operands, expected = draw_gradient(rng, direction, dtype)
    text, reason = plans[str(spec)]
    assert text, reason
    result = _primitive.conv(spec, jqconv.Algorithm.parse(text), *operands)
    error = relative_error(result, expected)
    measured(f"{direction} {dtype}", f"relative error {error:.2e}")
    assert error < 4 * float(jnp.finfo(dtype).eps)


@DIRECTIONS
def test_plans_that_differ_in_a_knob_are_right(rng, direction):
    """Of every engine that cuDNN proposes: the search tries them."""
    spec, operands, expected = draw_gradient(rng, direction, "bfloat16")
    engines = {}
    for text in _native.propose(str(spec), 0):
        engines.setdefault(jqconv.Algorithm.parse(text).engine, text)
    variants = [v for text in engines.values() for v in _native.vary(str(spec), text, 0)]
    assert variants
    ran = 0
    for variant in variants:
        text, _ = _native.resolve(str(spec), variant, 0, 2**30)
        if text:
            plan = jqconv.Algorithm.parse(text)
            result = _primitive.conv(spec, plan, *operands, pinned=True)
            assert relative_error(result, expected) < 4 * float(jnp.finfo("bfloat16").eps), text
            ran += 1
    assert ran > 0


BFLOAT16_FORMS = [
    Form(None, None, "bfloat16", "channel", bias=False),
    Form("relu", "bfloat16", "bfloat16", "scalar", bias=True),
    Form("relu", "int8", "int8", "channel", bias=True, residual_scale=True),
    Form("silu", None, "float32", "channel", bias=True, out_multiplier=True),
]


@pytest.mark.parametrize("form", BFLOAT16_FORMS, ids=str)
def test_bfloat16_operands(rng, measured, form):
    """The native side takes bf16 operands; no Python call makes them yet, so this one does."""
    problem = draw(rng, form, exact=True)
    x, w, multiplier, bias = problem.operands
    spec = str(spec_of(form))
    for name in ("x", "w"):
        spec = spec.replace(f" {name}=int8:", f" {name}=bfloat16:")
    result = jax.ShapeDtypeStruct(problem.answer.shape, jnp.dtype(form.output))
    workspace = jax.ShapeDtypeStruct((_policy.settings().workspace_limit,), jnp.uint8)
    call = jax.ffi.ffi_call("jqconv_fprop_v1", (result, workspace))
    optional = (multiplier, bias, problem.residual, problem.residual_scale, problem.out_multiplier)
    operands = (x.astype(jnp.bfloat16), w.transpose(3, 0, 1, 2).astype(jnp.bfloat16), *optional)

    @jax.jit
    def run(*operands):
        return call(*operands, spec=spec, algorithm="", pinned=False)[0]

    y = run(*(jnp.asarray(operand) for operand in operands if operand is not None))
    if form.output in oracle.LIMITS:
        distance = moved(y, problem.answer)
        measured(f"bf16 operands {form}", f"{distance.count} of {distance.size} moved")
        assert distance.count == 0
    else:
        worst = ulps(y, problem.answer, problem.magnitude)
        measured(f"bf16 operands {form}", f"{worst:.3f} ulp")
        assert worst <= (FLOAT_LIMIT if is_exact(form.activation) else SMOOTH_LIMIT)


def test_names_are_those_of_the_forms():
    assert len({str(form) for form in FORMS}) == len(FORMS)
    assert name_of(("leaky_relu", 0.125)) == "leaky_relu:0.125"
