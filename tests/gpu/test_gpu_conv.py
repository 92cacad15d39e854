"""On the GPU: every geometry, gradients, memory in place, threads, searches, timing and errors."""

import dataclasses
import os
import re
import threading

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from checking import assert_relative, assert_same_codes, refused, run_python
from differentiation import (
    BFLOAT16_LIMIT,
    FLOAT32_LIMIT,
    assert_gradients,
    cotangent_like,
    draw_leaves,
    expected_gradients,
    loss_of,
)
from oracle import Geometry
from problems import GEOMETRIES, RAW, Form, draw_codes, draw_problem, window_of

import jqconv
from jqconv import Algorithm, ConvAlgorithms, QTensor, _choice, _native, _primitive
from jqconv._timing import time_plans

pytestmark = pytest.mark.gpu

MORE_GEOMETRIES = GEOMETRIES | {
    "channels_3_to_5": ((2, 9, 9, 3), (3, 3), 5, Geometry(padding=((1, 1), (1, 1)))),
    "channels_129": ((2, 7, 7, 129), (3, 3), 129, Geometry(padding=((1, 1), (1, 1)))),
    "channels_64": ((4, 14, 14, 64), (3, 3), 64, Geometry(padding=((1, 1), (1, 1)))),
    "groups_of_32": ((2, 7, 7, 128), (3, 3), 128, Geometry(groups=4, padding=((1, 1), (1, 1)))),
    "stem_64": ((2, 64, 64, 3), (7, 7), 64, Geometry(strides=(2, 2), padding=((3, 3), (3, 3)))),
    "depthwise_64": ((2, 9, 9, 64), (3, 3), 64, Geometry(groups=64, padding=((1, 1), (1, 1)))),
}
RELU = Form("relu", "int8", "int8", "channel", bias=True, residual_scale=True)


def solve(problem, **options):
    return jqconv.qconv2d(*problem.operands, **problem.options, **options)


def draw(rng, form=RELU, name="channels_64"):
    x_shape, kernel, k, geometry = MORE_GEOMETRIES[name]
    return draw_problem(rng, form, x_shape=x_shape, kernel=kernel, k=k, geometry=geometry)


@pytest.mark.parametrize("algorithm", [None, "xla"], ids=["chosen", "xla"])
@pytest.mark.parametrize("name", MORE_GEOMETRIES)
def test_every_geometry_is_exact(rng, name, algorithm):
    problem = draw(rng, name=name)
    assert_same_codes(solve(problem, algorithm=algorithm), problem.answer)


@pytest.mark.parametrize("name", ["channels_64", "channels_129", "groups_of_32", "depthwise_64"])
def test_raw_accumulator_is_exact(rng, name):
    problem = draw(rng, RAW, name)
    assert_same_codes(solve(problem), problem.answer, "int32")


@pytest.mark.parametrize("algorithm", [None, "xla"], ids=["chosen", "xla"])
@pytest.mark.parametrize(("x_code", "w_code"), [(-128, -128), (-128, 127), (127, 127)])
@pytest.mark.parametrize("channels", [64, 256, 2048])
@pytest.mark.parametrize("window", [1, 3])
def test_accumulator_of_extremes_is_exact(x_code, w_code, window, channels, algorithm):
    """From 64 products up to 18,432: sums of 302 million, beyond what float32 counts."""
    x = np.full((1, 5, 5, channels), x_code, np.int8)
    w = np.full((window, window, channels, 16), w_code, np.int8)
    acc = jqconv.qconv2d(x, w, None, padding="VALID", out_dtype=jnp.int32, algorithm=algorithm)
    assert (acc.shape, acc.dtype) == ((1, 6 - window, 6 - window, 16), jnp.int32)
    assert np.all(np.asarray(acc) == x_code * w_code * channels * window**2)


def test_random_codes_beyond_1024_products(rng):
    x, w = draw_codes(rng, (2, 7, 7, 512)), draw_codes(rng, (3, 3, 512, 32))
    expected = oracle.accumulate(x, w, Geometry(padding=((1, 1), (1, 1))))
    for algorithm in (None, "xla"):
        acc = jqconv.qconv2d(x, w, None, out_dtype=jnp.int32, algorithm=algorithm)
        assert_same_codes(acc, expected, "int32")


@pytest.mark.parametrize("output", ["int8", "bfloat16"])
def test_empty_batch(output):
    x, w = np.zeros((0, 7, 7, 64), np.int8), np.zeros((3, 3, 64, 64), np.int8)
    y = jqconv.qconv2d(x, w, 1.0, out_dtype=output)
    assert (y.shape, y.dtype) == ((0, 7, 7, 64), jnp.dtype(output))


def test_zero_points(rng):
    x, w = draw_codes(rng, (2, 7, 7, 64), "uint8"), draw_codes(rng, (3, 3, 64, 64))
    same = Geometry(padding=((1, 1), (1, 1)))
    for w_zero in (None, 3):
        acc = oracle.accumulate(x, w, same, x_zero_point=77, w_zero_point=w_zero or 0)
        y = jqconv.conv2d(QTensor(x, 2.0**-6, 77), QTensor(w, 2.0**-9, w_zero), out_scale=0.25)
        assert_same_codes(y.values, np.clip(np.rint(acc * 2.0**-13), -128, 127))


# Gradients.


@pytest.mark.parametrize(
    ("grad_dtype", "limit"),
    [(jnp.bfloat16, BFLOAT16_LIMIT), (jnp.float32, FLOAT32_LIMIT)],
    ids=["bfloat16", "float32"],
)
@pytest.mark.parametrize(
    "name",
    [
        "channels_64",
        "1x1",
        "stride_2_1",
        "dilation",
        "asymmetric",
        "groups_of_32",
        "groups_2",
        "depthwise",
        "stem",
        "batch_1_channels_129",
        "stride_beyond_window",
    ],
)
@pytest.mark.parametrize("form", [None, "xla"], ids=["chosen", "xla"])
def test_gradients(rng, measured, name, grad_dtype, limit, form):
    x_shape, kernel, k, geometry = MORE_GEOMETRIES[name]
    leaves = draw_leaves(rng, geometry, x_shape, kernel, k)
    cotangent = cotangent_like(rng, leaves)
    options = window_of(geometry) | {"algorithm": ConvAlgorithms(dgrad=form, wgrad=form)}
    loss = loss_of(cotangent, activation="relu", grad_dtype=grad_dtype, **options)
    found = jax.jit(jax.grad(loss))(leaves)
    expected = expected_gradients(cotangent, leaves, geometry, activation="relu")
    for tensor in ("x", "w"):
        error = np.linalg.norm(found[tensor] - expected[tensor]) / np.linalg.norm(expected[tensor])
        case = f"d{tensor} {name} {jnp.dtype(grad_dtype).name} {form or 'chosen'}"
        measured(case, f"relative error {error:.2e}")
    tensors = {name: found[name] for name in ("x", "w", "bias", "residual")}
    assert_gradients(tensors, expected, limit)


@pytest.mark.parametrize("activation", ["relu6", ("leaky_relu", 0.1), "silu", "gelu"])
def test_gradients_through_int8(rng, activation):
    leaves = draw_leaves(rng, x_shape=(4, 7, 7, 32), k=32)
    cotangent = cotangent_like(rng, leaves)
    out_scale = np.float32(0.05)
    loss = loss_of(cotangent, activation=activation)
    found = jax.jit(jax.grad(loss))(leaves | {"out_scale": out_scale})
    expected = expected_gradients(
        cotangent, leaves, activation=activation, out_scale=np.float64(out_scale)
    )
    tensors = {name: found[name] for name in ("x", "w", "bias", "residual")}
    assert_gradients(tensors, expected, BFLOAT16_LIMIT)
    assert_relative(found["out_scale"], expected["out_scale"], 1e-2, "out_scale")


# Memory.


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "float32"])
def test_donated_residual_becomes_the_output(rng, dtype):
    form = Form("relu", dtype, dtype, "channel", bias=True)
    problem = draw(rng, form)
    static = {k: v for k, v in problem.options.items() if k != "residual"}

    def run(x, residual):
        _, w, multiplier, bias = problem.operands
        return jqconv.qconv2d(x, w, multiplier, bias, residual=residual, **static)

    x, residual = jnp.asarray(problem.x), jnp.array(problem.residual)
    kept = jax.jit(run)(x, residual)
    np.testing.assert_array_equal(residual, problem.residual)
    address = residual.unsafe_buffer_pointer()
    y = jax.jit(run, donate_argnums=1)(x, residual)
    assert y.unsafe_buffer_pointer() == address
    assert residual.is_deleted()
    np.testing.assert_array_equal(y, kept)
    np.testing.assert_array_equal(y, problem.answer.astype(jnp.dtype(dtype)))


def test_chain_of_residuals_copies_none(rng):
    """y <- conv(y) + y: each residual lives on as its own layer's input, and so is kept."""
    problem = draw(rng, Form("relu", "int8", "int8", "scalar", bias=False))
    _, w, multiplier, _ = problem.operands

    def step(y):
        return jqconv.qconv2d(y, w, multiplier, residual=y, activation="relu")

    def chain(y):
        for _ in range(4):
            y = step(y)
        return y

    y = jnp.asarray(problem.residual)
    expected = y
    for _ in range(4):
        expected = step(expected)
    np.testing.assert_array_equal(jax.jit(chain)(y), expected)


COMMAND_BUFFER_SCRIPT = """
import hashlib, jax, jax.numpy as jnp, numpy as np, jqconv
assert jqconv._native.is_built()
rng = np.random.default_rng(0)
x = jnp.asarray(rng.integers(-128, 128, (2, 14, 14, 64)), jnp.int8)
ws = jnp.asarray(rng.integers(-128, 128, (12, 3, 3, 64, 64)), jnp.int8)
@jax.jit
def chain(x, ws):
    for w in ws:
        x = jqconv.qconv2d(x, w, 2.0**-12, residual=x, residual_scale=0.5, activation="relu")
    return x
@jax.jit
def gradient(w):
    y = jqconv.conv2d(jqconv.QTensor(x, 0.01), w, w_scale=0.01, activation="relu")
    return y.sum()
digest = hashlib.sha256()
for _ in range(5):
    digest.update(np.asarray(chain(x, ws)).tobytes())
g = jax.grad(gradient)(ws[0].astype(jnp.float32) * 0.01)
print(digest.hexdigest(), float(jnp.linalg.norm(g)))
"""


def run_script(script, **environment):
    result = run_python("-c", script, XLA_PYTHON_CLIENT_PREALLOCATE="false", **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


def test_command_buffers_change_nothing():
    flags = os.environ.get("XLA_FLAGS", "")
    with_buffers = run_script(COMMAND_BUFFER_SCRIPT)
    without = run_script(
        COMMAND_BUFFER_SCRIPT, XLA_FLAGS=f"{flags} --xla_gpu_enable_command_buffer=".strip()
    )
    assert with_buffers[0] == without[0]
    np.testing.assert_allclose(float(with_buffers[1]), float(without[1]), rtol=1e-3)


# Threads.


def in_threads(count, function):
    """Run function(i) in so many threads at once; the first failure is raised."""
    failures = []
    barrier = threading.Barrier(count)

    def run(i):
        try:
            barrier.wait()
            function(i)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_many_threads_run_one_executable(rng):
    problem = draw(rng)
    run = jax.jit(lambda *operands: jqconv.qconv2d(*operands, **problem.options))
    expected = problem.answer

    def repeat(_):
        for _ in range(30):
            assert_same_codes(run(*problem.operands), expected)

    in_threads(16, repeat)


def test_many_threads_build_and_run_their_own(rng):
    problems = [
        draw_problem(rng, RELU, x_shape=(2, 6 + i, 7, 32), k=32, kernel=(3, 3)) for i in range(8)
    ]
    jqconv.clear_algorithms()

    def repeat(i):
        problem = problems[i % 8]
        for _ in range(5):
            assert_same_codes(solve(problem), problem.answer)

    in_threads(16, repeat)
    assert jqconv.search_counts()["fprop"] == 8


# Searching.


@pytest.fixture
def fresh():
    jqconv.clear_algorithms()
    return _native.extension().cache_info()


def step_of(rng):
    leaves = draw_leaves(rng, x_shape=(2, 7, 7, 32), k=32)
    loss = loss_of(cotangent_like(rng, leaves), activation="relu")
    leaves = jax.tree.map(jnp.asarray, leaves)
    return loss, leaves


def test_one_search_over_100_eager_steps(rng, fresh):
    loss, leaves = step_of(rng)
    for _ in range(100):
        jax.grad(loss)(leaves)
    assert jqconv.search_counts() == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert _native.extension().cache_info()["misses"] - fresh["misses"] <= 3


def test_one_search_over_100_steps_with_caches_cleared(rng, fresh):
    loss, leaves = step_of(rng)
    for _ in range(100):
        jax.jit(jax.grad(loss))(leaves)
        jax.clear_caches()
    assert jqconv.search_counts() == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert _native.extension().cache_info()["misses"] - fresh["misses"] <= 3


def test_choice_stands_in_the_jaxpr(rng, fresh):
    loss, leaves = step_of(rng)
    jax.make_jaxpr(jax.grad(loss))(leaves)
    assert sum(jqconv.search_counts().values()) == 0
    jax.grad(loss)(leaves)
    jax.clear_caches()  # JAX keeps traces, which show what was known when they were made
    text = str(jax.make_jaxpr(jax.grad(loss))(leaves))
    assert len(re.findall(r"int8/sbzr:eng\d", text)) >= 1
    assert len(re.findall(r"bf16/c:eng\d", text)) >= 2


# Algorithms by name.


def test_named_algorithm_runs(rng):
    problem = draw(rng)
    spec = problem.spec
    chosen = _choice.settle(spec)
    assert chosen.form == "int8"
    assert_same_codes(solve(problem, algorithm=str(chosen)), problem.answer)
    assert_same_codes(solve(problem, algorithm=chosen), problem.answer)


def test_missing_algorithm_is_named_and_the_process_goes_on(rng):
    problem = draw(rng)
    missing = "int8/sbzr:eng9876@91900"
    for _ in range(2):
        with refused(ValueError, missing):
            solve(problem, algorithm=missing)
        assert_same_codes(solve(problem), problem.answer)


def operands_of(problem):
    """The handler's operands: OHWI, and only what the form has."""
    x, w, multiplier, bias = problem.operands
    optional = (multiplier, bias, problem.residual, problem.residual_scale, problem.out_multiplier)
    given = (x, w.transpose(3, 0, 1, 2), *optional)
    return [jnp.asarray(operand) for operand in given if operand is not None]


def test_missing_algorithm_in_a_program_is_an_error_where_pinned(rng):
    problem = draw(rng)
    missing = Algorithm.parse("int8/sbzr:eng9876@91900")
    with pytest.raises(Exception, match="eng9876") as caught:
        run_named(problem, missing, pinned=True)
    assert "direction=fprop" in str(caught.value)
    assert "cuDNN" in str(caught.value)
    assert_same_codes(solve(problem), problem.answer)


def test_missing_algorithm_in_a_program_is_replaced_with_a_warning(rng):
    problem = draw(rng)
    missing = Algorithm.parse("int8/sbzr:eng9876@91900")
    _native.extension().take_warnings()
    assert_same_codes(run_named(problem, missing, pinned=False), problem.answer)
    with pytest.warns(RuntimeWarning, match="eng9876"):
        _native.report_warnings()


def run_named(problem, algorithm, pinned):
    """Run a program that was lowered with an algorithm that nobody checked."""
    spec = problem.spec

    @jax.jit
    def run(*operands):
        return _primitive.conv(spec, algorithm, *operands, pinned=pinned)

    return jax.block_until_ready(run(*operands_of(problem)))


def test_program_exported_from_a_cpu_host_runs_here(rng):
    problem = draw(rng)
    before = dict(jqconv.search_counts())

    def run(*operands):
        return jqconv.qconv2d(*operands, **problem.options)

    with jax.default_device(jax.devices("cpu")[0]):
        exported = jax.export.export(
            jax.jit(run),
            platforms=["cuda"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jqconv_fprop_v1")],
        )(*problem.operands)
    assert 'algorithm = ""' in exported.mlir_module()
    assert dict(jqconv.search_counts()) == before
    assert_same_codes(exported.call(*map(jnp.asarray, problem.operands)), problem.answer)


# The plan cache.


def test_eviction_breaks_no_executable(rng):
    extension = _native.extension()
    capacity = extension.cache_info()["capacity"]
    problem = draw(rng)
    run = jax.jit(lambda *operands: jqconv.qconv2d(*operands, **problem.options))
    assert_same_codes(run(*problem.operands), problem.answer)
    try:
        extension.cache_resize(1)
        for height in (5, 6):
            other = draw_problem(rng, RELU, x_shape=(1, height, 7, 32), k=32)
            assert_same_codes(solve(other), other.answer)
        assert extension.cache_info()["entries"] <= 1
        assert extension.cache_info()["evictions"] > 0
        for _ in range(3):
            assert_same_codes(run(*problem.operands), problem.answer)
        extension.cache_clear()
        assert_same_codes(run(*problem.operands), problem.answer)
    finally:
        extension.cache_resize(capacity)


def test_versions_are_those_of_the_libraries_that_jax_loaded():
    versions = _native.versions()
    assert versions["cudnn"] >= 90000
    with open("/proc/self/maps") as maps:
        loaded = {line.split()[-1] for line in maps if "libcudnn.so" in line}
    assert len(loaded) == 1, f"more than one cuDNN in the process: {loaded}"
    assert os.path.realpath(versions["cudnn_path"]) in map(os.path.realpath, loaded)


# Timing.


def test_timing_gives_plausible_microseconds(rng):
    problem = draw_problem(
        rng, Form("relu"), x_shape=(64, 28, 28, 128), k=128, kernel=(3, 3), exact=True
    )
    spec = problem.spec
    found = _choice.settle(spec)
    missing = dataclasses.replace(found, engine=99999)
    times = time_plans(spec, [found, missing], [operands_of(problem)] * 2, samples=5)
    assert times.shape == (2, 5)
    # 14.8 GFLOP and 13 MB: no GPU does it in 2 us, and a working plan takes no 2 ms.
    assert np.all((times[0] > 2) & (times[0] < 2000)), times
    assert times[0].max() < 3 * times[0].min(), times
    assert np.all(np.isnan(times[1])), times


# What never reaches cuDNN.

SPEC = (
    "direction=fprop x=int8:2,6,5,32 w=int8:32,3,3,32 y=int8:2,6,5,32 strides=1,1 "
    "padding=1,1,1,1 dilation=1,1 groups=1 multiplier=channel residual=int8"
)


def call_handler(
    target="jqconv_fprop_v1",
    *,
    spec=SPEC,
    algorithm="",
    workspace=2**25,
    drop=(),
    extra=(),
    y=((2, 6, 5, 32), "int8"),
    **operands,
):
    given = {
        "x": ((2, 6, 5, 32), "int8"),
        "w": ((32, 3, 3, 32), "int8"),
        "multiplier": ((32,), "float32"),
        "residual": ((2, 6, 5, 32), "int8"),
    } | operands
    arrays = [jnp.ones(*given[name]) for name in given if name not in drop]
    results = (
        jax.ShapeDtypeStruct(y[0], jnp.dtype(y[1])),
        jax.ShapeDtypeStruct((workspace,), jnp.uint8),
    )

    @jax.jit
    def run(*arrays):
        call = jax.ffi.ffi_call(target, results)
        return call(*arrays, spec=spec, algorithm=algorithm, pinned=False)[0]

    return jax.block_until_ready(run(*arrays, *(jnp.ones(*e) for e in extra)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": ((2, 6, 5, 16), "int8")}, ["x", "2,6,5,16", "2,6,5,32"]),
        ({"x": ((2, 6, 4, 32), "int8")}, ["x", "2,6,4,32"]),
        ({"x": ((2, 6, 5, 32), "uint8")}, ["x"]),
        ({"x": ((60, 32), "int8")}, ["x", "60,32"]),
        ({"w": ((3, 3, 32, 32), "int8")}, ["w", "3,3,32,32"]),
        ({"multiplier": ((), "float32")}, ["multiplier"]),
        ({"multiplier": ((31,), "float32")}, ["multiplier", "31"]),
        ({"multiplier": ((32,), "bfloat16")}, ["multiplier"]),
        ({"residual": ((1, 6, 5, 32), "int8")}, ["residual", "1,6,5,32"]),
        ({"residual": ((2, 6, 5, 32), "float32")}, ["residual"]),
        ({"drop": ("residual",)}, ["operands", "3", "4"]),
        ({"extra": (((32,), "float32"),)}, ["operands", "5", "4"]),
        ({"y": ((2, 6, 5, 31), "int8")}, ["y", "2,6,5,31"]),
        ({"y": ((2, 6, 5, 32), "float32")}, ["y"]),
        ({"workspace": 0}, ["workspace"]),
        ({"spec": SPEC.replace("y=int8:2,6,5,32", "y=int8:2,6,5,33")}, ["33"]),
        ({"spec": SPEC.replace("residual=int8", "residual=int8 mood=good")}, ["mood"]),
        ({"spec": ""}, ["spec"]),
        ({"algorithm": "int8/szr:eng1@91900"}, ["int8/szr:eng1@91900"]),
        ({"algorithm": "quick"}, ["quick"]),
        ({"target": "jqconv_dgrad_v1"}, ["direction"]),
    ],
    ids=str,
)
def test_malformed_calls_are_refused_and_the_context_lives(change, words):
    with pytest.raises(Exception, match=r"(?i)invalid.?argument") as caught:
        call_handler(**change)
    for word in words:
        assert word in str(caught.value)
    assert call_handler().shape == (2, 6, 5, 32)
