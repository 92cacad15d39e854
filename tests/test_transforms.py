"""Under JAX's transformations: jit, remat, scan, sharding, export, lowering for another place."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checking import equations_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from problems import Form, draw_codes, draw_problem

import jqconv
from jqconv import ConvAlgorithms, QTensor, _native
from jqconv._epilogue import activate_and_quantize
from jqconv._spec import Activation

FULL = Form("relu", "int8", "int8", "channel", True, True)
OPTIONS = {"x_scale": 0.02, "w_scale": 0.01, "activation": "relu", "grad_dtype": jnp.float32}


@pytest.fixture
def leaves(rng):
    return {
        "x": jnp.asarray(rng.normal(size=(4, 5, 5, 4)), jnp.float32),
        "w": jnp.asarray(rng.normal(size=(3, 3, 4, 6)) * 0.3, jnp.float32),
        "bias": jnp.asarray(rng.normal(size=6), jnp.float32),
    }


def layer(leaves, **options):
    return jqconv.conv2d(leaves["x"], leaves["w"], leaves["bias"], **(OPTIONS | options))


def loss(leaves, **options):
    y = layer(leaves, **options)
    return jnp.sum(jnp.sin(y.dequantize() if isinstance(y, QTensor) else y))


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 1e-5, "atol": 1e-5}))


def primitives_of(function, *args):
    return [e.primitive.name for e in equations_of(jax.make_jaxpr(function)(*args))]


@pytest.mark.parametrize("out_scale", [None, 0.05], ids=["float", "int8"])
def test_jit_is_as_eager(leaves, out_scale):
    def run(leaves):
        return layer(leaves, out_scale=out_scale)

    assert_trees_close(jax.jit(run)(leaves), run(leaves), rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda t: loss(t, out_scale=out_scale))
    assert_trees_close(jax.jit(gradient)(leaves), gradient(leaves))


def test_eval_shape_asks_nothing_of_a_device(leaves):
    before = dict(jqconv.search_counts())
    shapes = jax.eval_shape(lambda t: layer(t, out_scale=0.05), leaves)
    assert isinstance(shapes, QTensor)
    assert (shapes.values.shape, shapes.values.dtype) == ((4, 5, 5, 6), jnp.int8)
    jax.eval_shape(jax.grad(loss), leaves)
    jax.make_jaxpr(jax.grad(loss))(leaves)
    if jax.default_backend() == "cpu":
        assert dict(jqconv.search_counts()) == before


def test_one_call_is_one_primitive(rng):
    problem = draw_problem(rng, FULL)
    names = primitives_of(lambda *a: jqconv.qconv2d(*a, **problem.options), *problem.operands)
    assert names.count("jqconv_fprop") == 1


def test_gradient_shows_its_algorithms(leaves):
    algorithms = ConvAlgorithms(
        fprop="int8/sbr:eng4_k24=0@91900",
        dgrad="bf16/c:eng1_k2=3@91900",
        wgrad="bf16/c:eng5,ws=64@91900",
    )
    options = {"algorithm": algorithms, "grad_dtype": jnp.bfloat16}
    with jax.default_device(jax.devices("cpu")[0]):
        jaxpr = jax.make_jaxpr(jax.grad(lambda t: loss(t, **options)))(leaves)
        found = {
            e.primitive.name: e.params["algorithm"]
            for e in equations_of(jaxpr)
            if e.primitive.name.startswith("jqconv_")
        }
        assert found == {
            "jqconv_fprop": algorithms.fprop,
            "jqconv_dgrad": algorithms.dgrad,
            "jqconv_wgrad": algorithms.wgrad,
        }
        for algorithm in (algorithms.fprop, algorithms.dgrad, algorithms.wgrad):
            assert str(algorithm) in str(jaxpr)
        named = jax.grad(lambda t: loss(t, **options))(leaves)
        plain = jax.grad(lambda t: loss(t, grad_dtype=jnp.bfloat16))(leaves)
    assert_trees_close(named, plain)


@pytest.mark.parametrize(
    ("wanted", "runs"),
    [
        ("x", {"jqconv_fprop", "jqconv_dgrad"}),
        ("w", {"jqconv_fprop", "jqconv_wgrad"}),
        ("bias", {"jqconv_fprop"}),
    ],
)
def test_only_the_gradients_wanted_are_computed(leaves, wanted, runs):
    names = primitives_of(jax.grad(lambda leaf: loss(leaves | {wanted: leaf})), leaves[wanted])
    assert {name for name in names if name.startswith("jqconv_")} == runs


def test_smooth_activation_recomputes_rather_than_keeps(leaves):
    gradient = jax.grad(lambda t: loss(t, activation="silu", out_scale=0.05))
    names = primitives_of(gradient, leaves)
    assert names.count("jqconv_fprop") == 2


@pytest.mark.parametrize("activation", [None, "relu", ("leaky_relu", 0.1), "silu"])
@pytest.mark.parametrize("out_scale", [None, 0.05], ids=["float", "int8"])
def test_backward_keeps_codes_and_bits(leaves, activation, out_scale):
    """Nothing as large as an activation or the kernel is kept in floating point."""

    def run(leaves):
        y = layer(leaves, activation=activation, out_scale=out_scale)
        return y.dequantize() if isinstance(y, QTensor) else y

    _, pull_back = jax.vjp(run, leaves)
    large = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size > 64]
    assert large
    assert not [leaf for leaf in large if jnp.issubdtype(leaf.dtype, jnp.floating)]


def test_remat(leaves):
    for out_scale in (None, 0.05):
        plain = jax.grad(lambda t, s=out_scale: loss(t, out_scale=s))(leaves)
        remat = jax.grad(jax.checkpoint(lambda t, s=out_scale: loss(t, out_scale=s)))(leaves)
        assert_trees_close(remat, plain)


@pytest.mark.parametrize("out_scale", [None, 0.05], ids=["float", "int8"])
def test_one_compiled_function_differentiated_for_one_after_another(leaves, out_scale):
    """JAX keeps one structure of residuals for all of them."""
    leaves = leaves | {"x_scale": jnp.float32(0.03)}

    @jax.jit
    def compiled(leaves):
        return loss(leaves, out_scale=out_scale, x_scale=leaves["x_scale"])

    every = jax.grad(compiled)(leaves)
    for name in (*leaves, *reversed(leaves)):
        alone = {name: leaves[name]}
        for function in (compiled, jax.checkpoint(compiled)):
            found = jax.grad(lambda alone, f=function: f(leaves | alone))(alone)
            assert_trees_close(found, {name: every[name]}, rtol=1e-4, atol=1e-4)


def chain(x, w):
    return jqconv.conv2d(x, w, w_scale=0.01, activation="relu", out_scale=0.02)


def test_scan_over_layers(rng):
    ws = jnp.asarray(rng.normal(size=(3, 3, 3, 4, 4)) * 0.3, jnp.float32)
    x0 = jnp.asarray(rng.normal(size=(2, 4, 4, 4)), jnp.float32)

    def scanned(x, ws):
        q, _ = jax.lax.scan(lambda q, w: (chain(q, w), None), jqconv.quantize(x, 0.02), ws)
        return q

    def unrolled(x, ws):
        q = jqconv.quantize(x, 0.02)
        for w in ws:
            q = chain(q, w)
        return q

    np.testing.assert_array_equal(scanned(x0, ws).values, unrolled(x0, ws).values)
    gradients = [
        jax.grad(lambda x, ws, f=f: jnp.sum(f(x, ws).dequantize() ** 2), (0, 1))(x0, ws)
        for f in (scanned, unrolled)
    ]
    assert np.any(gradients[1][1])
    # bfloat16 is the default of the backward pass.
    assert_trees_close(*gradients, rtol=1e-2, atol=1e-2)


def test_cond_and_while(leaves):
    q = QTensor(draw_codes(np.random.default_rng(0), (1, 4, 4, 4)), 0.1)
    w = QTensor(draw_codes(np.random.default_rng(1), (3, 3, 4, 4)), 0.1)

    @jax.jit
    def run(q, flag):
        return jax.lax.cond(
            flag, lambda q: jqconv.conv2d(q, w, out_scale=50.0).values, lambda q: q.values, q
        )

    expected = jqconv.conv2d(q, w, out_scale=50.0).values
    np.testing.assert_array_equal(run(q, True), expected)
    np.testing.assert_array_equal(run(q, False), q.values)


def test_second_derivatives_are_refused_by_name(leaves):
    with pytest.raises(TypeError, match=r"first derivatives in reverse mode only"):
        jax.hessian(lambda w: loss(leaves | {"w": w}))(leaves["w"])


def test_forward_mode_is_refused(leaves):
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(loss, (leaves,), (leaves,))


# Sharding.


@pytest.fixture
def mesh():
    devices = jax.devices()[:2]
    if len(devices) < 2:
        pytest.skip("needs two devices of one kind")
    return Mesh(np.array(devices), ("batch",))


@pytest.mark.parametrize("out_scale", [None, 0.05], ids=["float", "int8"])
def test_shard_map_over_the_batch(leaves, mesh, out_scale):
    batch, whole = PartitionSpec("batch"), PartitionSpec()

    def run(x, w, bias):
        y = layer({"x": x, "w": w, "bias": bias}, out_scale=out_scale)
        return y.dequantize() if isinstance(y, QTensor) else y

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(batch, whole, whole), out_specs=batch)
    args = leaves["x"], leaves["w"], leaves["bias"]
    np.testing.assert_allclose(jax.jit(sharded)(*args), run(*args), rtol=1e-6, atol=1e-6)

    def loss_of(function):
        return lambda *args: jnp.sum(jnp.sin(function(*args)))

    gradients = jax.jit(jax.grad(loss_of(sharded), (0, 1, 2)))(*args)
    assert_trees_close(gradients, jax.grad(loss_of(run), (0, 1, 2))(*args))


def test_grad_inside_shard_map_sums_over_the_shards(leaves, mesh):
    batch, whole = PartitionSpec("batch"), PartitionSpec()

    def gradient(x, w):
        def local(w):
            y = jqconv.conv2d(x, w, **OPTIONS)
            return jax.lax.psum(jnp.sum(jnp.sin(y)), "batch")

        return jax.grad(local)(w)

    sharded = jax.shard_map(gradient, mesh=mesh, in_specs=(batch, whole), out_specs=whole)
    expected = jax.grad(lambda w: jnp.sum(jnp.sin(jqconv.conv2d(leaves["x"], w, **OPTIONS))))
    found = jax.jit(sharded)(leaves["x"], leaves["w"])
    np.testing.assert_allclose(found, expected(leaves["w"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_shard_map_with_a_replicated_scale(leaves, mesh, compiled):
    batch, whole = PartitionSpec("batch"), PartitionSpec()

    def run(x, w, scale):
        return jqconv.conv2d(x, w, x_scale=scale, w_scale=0.02, grad_dtype=jnp.float32)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(batch, whole, whole), out_specs=batch)
    sharded = jax.jit(sharded) if compiled else sharded
    args = leaves["x"], leaves["w"], jnp.float32(0.03)
    np.testing.assert_allclose(sharded(*args), run(*args), rtol=1e-6, atol=1e-6)

    def gradient(function):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args))), (0, 1, 2))(*args)

    assert_trees_close(gradient(sharded), gradient(run), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "jit"])
def test_shard_map_of_the_end_of_the_epilogue(rng, mesh, compiled):
    batch, whole = PartitionSpec("batch"), PartitionSpec()

    def run(v, scale):
        codes, view = activate_and_quantize(Activation.parse("relu"), v, scale)
        return codes, view

    specs = {"in_specs": (batch, whole), "out_specs": (batch, batch)}
    sharded = jax.shard_map(run, mesh=mesh, **specs)
    sharded = jax.jit(sharded) if compiled else sharded
    args = rng.normal(size=(4, 3, 3, 5)).astype(np.float32), jnp.float32(0.03)
    assert_trees_close(sharded(*args), run(*args))

    def gradient(function):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(function(*args)[1])), (0, 1))(*args)

    assert_trees_close(gradient(sharded), gradient(run), rtol=1e-5, atol=1e-4)


def test_strict_rank_promotion(leaves):
    with jax.numpy_rank_promotion("raise"):
        for out_scale in (None, 0.05):
            jax.grad(lambda t: loss(t, out_scale=out_scale, activation="silu"))(leaves)  # noqa: B023


def test_shard_map_of_qconv2d_with_a_residual(rng, mesh):
    problem = draw_problem(rng, FULL, x_shape=(4, 5, 5, 4), k=6)
    batch = PartitionSpec("batch")
    options = {k: v for k, v in problem.options.items() if k != "residual"}

    def run(x, residual):
        _, w, multiplier, bias = problem.operands
        return jqconv.qconv2d(x, w, multiplier, bias, residual=residual, **options)

    sharded = jax.shard_map(run, mesh=mesh, in_specs=(batch, batch), out_specs=batch)
    y = jax.jit(sharded)(problem.x, problem.residual)
    np.testing.assert_array_equal(y, problem.answer)


def test_jit_of_sharded_arrays(leaves, mesh):
    x = jax.device_put(leaves["x"], NamedSharding(mesh, PartitionSpec("batch")))
    y = jax.jit(lambda x: layer(leaves | {"x": x}, out_scale=0.05))(x)
    np.testing.assert_array_equal(y.values, layer(leaves, out_scale=0.05).values)


# Export, and lowering for a GPU from a machine without one.


def serialized(exported):
    """The program after a trip through bytes."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    return jax.export.deserialize(exported.serialize())


def test_export_round_trip_on_this_platform(rng):
    problem = draw_problem(rng, FULL)

    def run(x, w, multiplier, bias):
        return jqconv.qconv2d(x, w, multiplier, bias, **problem.options)

    exported = jax.export.export(jax.jit(run), platforms=["cpu"])(*problem.operands)
    again = serialized(exported)
    with jax.default_device(jax.devices("cpu")[0]):
        y = again.call(*map(jnp.asarray, problem.operands))
    np.testing.assert_array_equal(y, problem.answer)


def test_exported_gradient(leaves):
    names = ("x", "w", "bias")

    def gradient(*args):
        return jax.grad(lambda t: loss(t, out_scale=0.05))(dict(zip(names, args, strict=True)))

    args = [leaves[name] for name in names]
    exported = jax.export.export(jax.jit(gradient), platforms=["cpu"])(*args)
    with jax.default_device(jax.devices("cpu")[0]):
        found = serialized(exported).call(*args)
    assert_trees_close(found, gradient(*args))


def test_exported_function_takes_and_returns_quantized_tensors(rng):
    q = QTensor(draw_codes(rng, (1, 4, 4, 4)), np.float32(0.1), 3)
    packed = jqconv.prepack(QTensor(draw_codes(rng, (3, 3, 4, 6)), np.float32(0.1)))

    def run(q, packed):
        return jqconv.conv2d(q, packed, out_scale=50.0)

    exported = jax.export.export(jax.jit(run), platforms=["cpu"])(q, packed)
    with jax.default_device(jax.devices("cpu")[0]):
        y = serialized(exported).call(q, packed)
    assert isinstance(y, QTensor)
    np.testing.assert_array_equal(y.values, run(q, packed).values)


def test_x64_mode_changes_nothing(leaves):
    plain = jax.grad(loss)(leaves)
    with jax.enable_x64(True):
        wide = jax.jit(jax.grad(loss))(leaves)
    assert jax.tree.map(lambda t: t.dtype, wide) == jax.tree.map(lambda t: t.dtype, plain)
    assert_trees_close(wide, plain)


@pytest.fixture
def lower_for_cuda(monkeypatch):
    """The program's text for CUDA, lowered where there is no GPU, handlers taken as built."""
    monkeypatch.setattr(_native, "is_built", lambda: True)

    def lower(function, *args, **kwargs):
        with jax.default_device(jax.devices("cpu")[0]):
            traced = jax.jit(lambda *a, **k: function(*a, **k)).trace(*args, **kwargs)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    return lower


def test_a_program_for_a_gpu_without_handlers_warns_once(lower_for_cuda, monkeypatch):
    monkeypatch.setattr(_native, "is_built", lambda: False)
    _native.warn_missing.cache_clear()
    x, w = jnp.ones((1, 4, 4, 8), jnp.int8), jnp.ones((1, 1, 8, 8), jnp.int8)

    def two_convolutions(x, w):
        return jqconv.qconv2d(jqconv.qconv2d(x, w, 0.1), w, 0.2, activation="relu")

    with pytest.warns(RuntimeWarning, match=r"run as lax operations.*JQCONV_CUDA=OFF") as seen:
        text = lower_for_cuda(two_convolutions, x, w)
    assert not calls_of(text)
    assert len(seen) == 1


def calls_of(text):
    """Targets of the custom calls in a program's text."""
    return re.findall(r"custom_call @(jqconv_\w+)", text)


def grouped_integer_convolutions(text):
    return [
        line
        for line in text.splitlines()
        if "stablehlo.convolution" in line
        and not re.search(r"feature_group_count = 1 ", line)
        and re.search(r"\((?:tensor<[\dx]*(?:i|ui)\d+>)", line.split(":")[-1].lstrip())
    ]


def lower_problem(lower, problem):
    arrays = {"residual": problem.residual} if problem.residual is not None else {}
    static = {k: v for k, v in problem.options.items() if k not in arrays}

    def run(x, w, multiplier, bias, **arrays):
        return jqconv.qconv2d(x, w, multiplier, bias, **arrays, **static)

    return lower(run, *problem.operands, **arrays)


def test_lowers_to_one_handler_with_its_workspace(rng, lower_for_cuda):
    text = lower_problem(lower_for_cuda, draw_problem(rng, FULL))
    assert calls_of(text) == ["jqconv_fprop_v1"]
    assert "stablehlo.convolution" not in text
    assert "direction=fprop x=int8:2,6,5,8 w=int8:8,3,3,8 y=int8:2,6,5,8" in text
    assert f"tensor<{32 * 2**20}xui8>" in text


@pytest.mark.parametrize("output", ["int8", "bfloat16", "float16", "float32"])
def test_residual_of_the_output_is_written_in_place(rng, lower_for_cuda, output):
    form = Form("relu", output, output, "channel", True, True)
    text = lower_problem(lower_for_cuda, draw_problem(rng, form))
    assert re.search(
        r"output_operand_alias<output_tuple_indices = \[0\],\s*operand_index = 4", text
    )


@pytest.mark.parametrize(("residual", "output"), [("int8", "float32"), ("bfloat16", "int8")])
def test_residual_of_another_dtype_is_not(rng, lower_for_cuda, residual, output):
    form = Form("relu", residual, output, "channel", True, True)
    text = lower_problem(lower_for_cuda, draw_problem(rng, form))
    assert "output_operand_alias" not in text


def test_a_residual_that_training_needs_again_is_not_written_over(rng, lower_for_cuda):
    codes, w = draw_codes(rng, (2, 5, 5, 8)), draw_codes(rng, (1, 1, 8, 8))

    def block(fq):
        x = jqconv.QTensor(codes, 0.5, fq=fq)
        return jqconv.conv2d(x, jqconv.QTensor(w, 0.1), residual=x, out_scale=0.5)

    def loss(fq):
        return block(fq).dequantize().sum()

    fq = codes * np.float32(0.5)
    assert "output_operand_alias" in lower_for_cuda(lambda fq: block(fq).values, fq)
    assert "output_operand_alias" not in lower_for_cuda(jax.grad(loss), fq)


def test_packed_kernel_is_not_transposed(rng, lower_for_cuda):
    problem = draw_problem(rng, Form("relu"))
    x, w, multiplier, bias = problem.operands
    packed = jqconv.prepack(w)

    def run(x, w):
        return jqconv.qconv2d(x, w, multiplier, bias, **problem.options)

    assert "stablehlo.transpose" not in lower_for_cuda(run, x, packed)
    assert "stablehlo.transpose" in lower_for_cuda(run, x, w)


@pytest.mark.parametrize("groups", [2, 4, 8], ids=["two", "four", "depthwise"])
@pytest.mark.parametrize("named", [None, "xla"], ids=["open", "xla"])
def test_no_grouped_integer_convolution_reaches_xla(rng, lower_for_cuda, groups, named):
    x, w = draw_codes(rng, (2, 5, 5, 8)), draw_codes(rng, (3, 3, 8 // groups, 8))

    def run(x, w):
        return jqconv.qconv2d(x, w, 0.1, groups=groups, algorithm=named)

    text = lower_for_cuda(run, x, w)
    assert not grouped_integer_convolutions(text)
    on_cudnn = named is None and groups == 2
    assert bool(calls_of(text)) == on_cudnn
    depthwise = groups == 8  # a sum of slices
    assert ("stablehlo.convolution" in text) == (not on_cudnn and not depthwise)


def test_the_check_for_grouped_integers_sees_one(lower_for_cuda):
    def plain(x, w):
        return jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            feature_group_count=2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            preferred_element_type=jnp.int32,
        )

    x, w = jnp.ones((2, 5, 5, 8), jnp.int8), jnp.ones((3, 3, 4, 8), jnp.int8)
    assert grouped_integer_convolutions(lower_for_cuda(plain, x, w))


def test_depthwise_takes_the_xla_form(rng, lower_for_cuda):
    """cuDNN has no engine for it, which a program exported from a CPU host has to know."""
    x, w = draw_codes(rng, (2, 5, 5, 8)), draw_codes(rng, (3, 3, 1, 8))
    text = lower_for_cuda(lambda x, w: jqconv.qconv2d(x, w, 0.1, groups=8), x, w)
    assert not calls_of(text)


def test_kernel_with_a_zero_point_takes_the_xla_form(rng, lower_for_cuda):
    x, w = draw_codes(rng, (2, 5, 5, 8)), draw_codes(rng, (3, 3, 8, 8))

    def run(x, w):
        return jqconv.conv2d(QTensor(x, 0.1), QTensor(w, 0.1, 3))

    assert not calls_of(lower_for_cuda(run, x, w))


def test_empty_batch_calls_no_handler(rng, lower_for_cuda):
    x, w = np.zeros((0, 5, 5, 8), np.int8), draw_codes(rng, (3, 3, 8, 8))
    assert not calls_of(lower_for_cuda(lambda x, w: jqconv.qconv2d(x, w, 0.1), x, w))


@pytest.mark.parametrize(
    ("grad_dtype", "calls"),
    [
        (jnp.bfloat16, {"jqconv_fprop_v1", "jqconv_dgrad_v1", "jqconv_wgrad_v1"}),
        (jnp.float32, {"jqconv_fprop_v1"}),
    ],
    ids=["bfloat16", "float32"],
)
def test_gradient_lowers_to_handlers(leaves, lower_for_cuda, grad_dtype, calls):
    gradient = jax.grad(lambda t: loss(t, grad_dtype=grad_dtype))
    assert set(calls_of(lower_for_cuda(gradient, leaves))) == calls


def test_algorithm_stands_in_the_program(rng, lower_for_cuda):
    problem = draw_problem(rng, Form("relu"))
    name = "int8/sbr:eng4_k24=0,ws=96@91900"

    def run(*operands):
        return jqconv.qconv2d(*operands, **problem.options, algorithm=name)

    text = lower_for_cuda(run, *problem.operands)
    assert f'algorithm = "{name}"' in text
    assert "pinned = true" in text
    assert "tensor<96xui8>" in text


def test_export_for_cuda_from_a_cpu_host(rng, lower_for_cuda):
    problem = draw_problem(rng, Form("relu"))

    def run(*operands):
        return jqconv.qconv2d(*operands, **problem.options)

    before = dict(jqconv.search_counts())
    with jax.default_device(jax.devices("cpu")[0]):
        exported = jax.export.export(
            jax.jit(run),
            platforms=["cuda", "cpu"],
            disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("jqconv_fprop_v1")],
        )(*problem.operands)
        again = serialized(exported)
        y = again.call(*map(jnp.asarray, problem.operands))
    np.testing.assert_array_equal(y, problem.answer)
    assert "jqconv_fprop_v1" in again.mlir_module()
    assert dict(jqconv.search_counts()) == before
