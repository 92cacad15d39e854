"""QConv and the road from a float model to an int8 one."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jqconv
import jqconv.flax as jf
from jqconv import QTensor

SAME_OPTIONS = {
    "plain": ((3, 3), {}),
    "1x1, no bias": ((1, 1), {"use_bias": False}),
    "strided": ((3, 3), {"strides": 2}),
    "strides None": ((3, 3), {"strides": None}),
    "uneven": ((3, 2), {"strides": (2, 1), "kernel_dilation": (1, 2)}),
    "valid": ((3, 3), {"padding": "VALID"}),
    "same": ((3, 3), {"padding": "same"}),
    "padding 1": ((3, 3), {"padding": 1}),
    "padding of each side": ((3, 3), {"padding": ((2, 0), (1, 3))}),
    "padding mixed": ((3, 3), {"padding": [1, (0, 2)]}),
    "groups": ((3, 3), {"feature_group_count": 4}),
    "bfloat16": ((3, 3), {"dtype": jnp.bfloat16}),
    "bfloat16 parameters": ((3, 3), {"param_dtype": jnp.bfloat16, "dtype": jnp.bfloat16}),
}


def pair(kernel_size, **options):
    """A QConv and the nnx.Conv that it stands for, with the same parameters."""
    float_options = {
        k: v for k, v in options.items() if k not in ("activation", "output", "learned_scales")
    }
    conv = nnx.Conv(8, 12, kernel_size, **float_options, rngs=nnx.Rngs(0))
    return jf.QConv(8, 12, kernel_size, **options, rngs=nnx.Rngs(0)), conv


def images(seed=0, shape=(2, 7, 6, 8), dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def calibrated(*layers, x=None, **calls):
    """A model of QConv layers one after the other, calibrated."""
    model = nnx.Sequential(*layers)
    jf.calibrate(model, [images() if x is None else x], progress=False, **calls)
    return model


def decibels(want, got):
    want, got = np.asarray(want, np.float64), np.asarray(got, np.float64)
    return 10 * np.log10(np.sum(want**2) / np.sum((want - got) ** 2))


# A drop-in for nnx.Conv.


@pytest.mark.parametrize("name", SAME_OPTIONS)
def test_in_float_it_is_nnx_conv(name):
    kernel_size, options = SAME_OPTIONS[name]
    layer, conv = pair(kernel_size, **options)
    x = images(dtype=options.get("dtype", np.float32))
    got, want = layer(x), conv(x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("name", SAME_OPTIONS)
def test_quantized_it_comes_near(name):
    kernel_size, options = SAME_OPTIONS[name]
    layer, conv = pair(kernel_size, **options)
    x = images(dtype=options.get("dtype", np.float32))
    calibrated(layer, x=x)
    got, want = layer(x), conv(x)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert decibels(want, got) > 30


@pytest.mark.parametrize("shape", [(7, 6, 8), (2, 7, 6, 8), (3, 2, 7, 6, 8), (0, 7, 6, 8)])
@pytest.mark.parametrize("mode", ["float", "train", "int8"])
def test_leading_axes_are_those_of_nnx_conv(shape, mode):
    layer, conv = pair((3, 3))
    model = nnx.Sequential(layer)
    if mode != "float":
        jf.calibrate(model, [images()], progress=False)
    if mode == "int8":
        jf.freeze(model, images())
    x = images(shape=shape)
    assert model(x).shape == conv(x).shape


def test_parameters_are_those_of_nnx_conv():
    """So that its checkpoints load."""
    layer, conv = pair((3, 3))
    state, mine = nnx.state(conv, nnx.Param), nnx.state(layer, nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, mine, state)
    other = nnx.Conv(8, 12, (3, 3), rngs=nnx.Rngs(7))
    nnx.update(layer, nnx.state(other))
    np.testing.assert_array_equal(layer.kernel[...], other.kernel[...])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernel_size": 3}, "two-dimensional"),
        ({"kernel_size": (3,)}, "two-dimensional"),
        ({"kernel_size": (3, 3, 3)}, "two-dimensional"),
        ({"padding": "CIRCULAR"}, "CIRCULAR"),
        ({"padding": "CAUSAL"}, "CAUSAL"),
        ({"input_dilation": 2}, "input_dilation"),
        ({"mask": jnp.ones((3, 3, 8, 12))}, "mask"),
        ({"conv_general_dilated": lambda *a, **k: None}, "conv_general_dilated"),
        ({"output": "int4"}, "int4"),
        ({"observer": "median"}, "median"),
        ({"activation": "tanh"}, "tanh"),
        ({"feature_group_count": 3}, "feature_group_count=3 must divide"),
        ({"feature_group_count": 0}, "feature_group_count=0 must divide"),
        ({"padding": -1}, "padding=-1 must be at least 0"),
        ({"norm": nnx.BatchNorm(8, rngs=nnx.Rngs(0))}, "norm is of 8 features, expected .*12"),
        ({"kernel_dilation": (1, 0)}, "kernel_dilation"),
    ],
)
def test_what_it_does_not_do_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        jf.QConv(8, 12, **({"kernel_size": (3, 3)} | options), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("norm", [5, "batch", nnx.BatchNorm])
def test_what_is_no_norm_is_refused(norm):
    with pytest.raises(TypeError, match=r"norm must be a flax\.nnx\.Module"):
        jf.QConv(8, 12, (3, 3), norm=norm, rngs=nnx.Rngs(0))


def test_activation_and_residual_are_part_of_the_layer():
    layer, conv = pair((3, 3), activation="relu")
    x, r = images(), images(1, (2, 7, 6, 12))
    want = nnx.relu(conv(x) + r)
    np.testing.assert_array_equal(layer(x, residual=r), want)
    model = nnx.Sequential(layer)
    jf.calibrate(model, [x], call=lambda m, x: m.layers[0](x, residual=r), progress=False)
    assert decibels(want, layer(x, residual=r)) > 30


# Quantized: the numbers and gradients of conv2d.


@pytest.mark.parametrize("learned", [False, True], ids=["fixed", "learned"])
def test_training_has_the_gradients_of_conv2d(learned):
    layer, _ = pair((3, 3), activation="relu", learned_scales=learned)
    calibrated(layer)
    x = images(1)

    def loss(layer):
        return jnp.sum(layer(x) ** 2)

    def same(kernel, bias, x_scale, w_scale):
        y = jqconv.conv2d(x, kernel, bias, x_scale=x_scale, w_scale=w_scale, activation="relu")
        return jnp.sum(y**2)

    grads = nnx.grad(loss)(layer)
    read = jnp.exp if learned else lambda scale: scale
    scales = [read(scale[...]) for scale in (layer.x_scale, layer.kernel_scale)]
    leaves = [layer.kernel[...], layer.bias[...], *scales]
    want = list(jax.grad(same, argnums=(0, 1, 2, 3))(*leaves))
    want[2:] = [gradient * scale for gradient, scale in zip(want[2:], scales, strict=True)]
    names = ["kernel", "bias", "x_scale", "kernel_scale"]
    assert {"x_scale", "kernel_scale"} <= set(grads) if learned else "x_scale" not in grads
    for name, gradient in zip(names, want, strict=True):
        if name in grads:
            np.testing.assert_allclose(grads[name][...], gradient, rtol=1e-6)


def test_learned_scales_are_parameters_and_fixed_ones_are_not():
    for learned in (False, True):
        layer, _ = pair((3, 3), learned_scales=learned)
        names = set(nnx.state(layer, nnx.Param))
        scales = {"x_scale", "kernel_scale", "out_scale"}
        assert names == {"kernel", "bias"} | (scales if learned else set())


def test_learned_scales_stay_positive_and_are_frozen_as_they_are():
    layer, conv = pair((3, 3), learned_scales=True, output="int8")
    model, x = calibrated(layer), images(1)
    of_scales = nnx.DiffState(0, jf.StepSize)
    gradient = nnx.grad(lambda m: jnp.mean((m(x).dequantize() - conv(x)) ** 2), argnums=of_scales)
    for _ in range(30):  # steps larger than the scales themselves, as Adam would take
        signs = jax.tree.map(jnp.sign, gradient(model))
        scales = nnx.state(model, jf.StepSize)
        nnx.update(model, jax.tree.map(lambda s, sign: s - 0.02 * sign, scales, signs))
    want = model(x)
    assert decibels(conv(x), want.dequantize()) > 20
    jf.freeze(model, x)
    np.testing.assert_array_equal(model(x).values, want.values)
    np.testing.assert_array_equal(model(x).scale, want.scale)


def test_an_optimizer_trains_it():
    layer, conv = pair((3, 3), learned_scales=False)
    model = calibrated(layer)
    optimizer = nnx.Optimizer(model, optax.sgd(0.3), wrt=nnx.Param)
    x, target = images(1), conv(images(1)) * 0.5

    @nnx.jit
    def step(model, optimizer):
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


def test_observers_are_silent_but_in_calibration():
    layer, _ = pair((3, 3))
    before = np.asarray(layer.x_seen[...])
    layer(images())
    np.testing.assert_array_equal(layer.x_seen[...], before)
    model = calibrated(layer)
    seen = np.asarray(layer.x_seen[...])
    assert seen.sum() > 0
    model(100 * images())
    np.testing.assert_array_equal(layer.x_seen[...], seen)


def test_it_maps_over_batches_of_images():
    layer, _ = pair((3, 3))
    calibrated(layer)
    x = images(shape=(3, 2, 7, 6, 8))
    np.testing.assert_array_equal(
        nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(layer, x), layer(x)
    )


def test_state_splits_and_merges():
    layer, _ = pair((3, 3), output="int8")
    model = calibrated(layer)
    graph, state = nnx.split(model)
    again = nnx.merge(graph, state)
    np.testing.assert_array_equal(again(images()).values, model(images()).values)
    assert {
        type(v) for v in jax.tree.leaves(state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    } == {
        nnx.Param,
        jf.Quant,
    }


@pytest.mark.parametrize("frozen", [False, True])
def test_a_checkpoint_is_saved_and_restored(tmp_path, frozen):
    ocp = pytest.importorskip("orbax.checkpoint")

    def make(seed):
        layers = [jf.QConv(8, 8, (3, 3), output="int8", rngs=nnx.Rngs(seed)) for _ in range(2)]
        model = calibrated(*layers, x=images(seed))
        if frozen:
            jf.freeze(model, images(seed))
        return model

    model, other = make(0), make(1)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(other, checkpointer.restore(tmp_path / "model", nnx.state(other)))
    np.testing.assert_array_equal(other(images()).values, model(images()).values)
    if not frozen:
        jf.freeze(other, images())
        jf.freeze(model, images())
        np.testing.assert_array_equal(other(images()).values, model(images()).values)


# Frozen.

ACTIVATIONS = [None, "relu", "relu6", ("leaky_relu", 0.125), "silu", "gelu", "hard_swish"]


class Two(nnx.Module):
    """A layer, and one that takes its output and a residual."""

    def __init__(self, activation, first, second, residual):
        options = {"activation": activation, "rngs": nnx.Rngs(0)}
        self.a = jf.QConv(8, 8, (3, 3), output=first, **options)
        self.b = jf.QConv(8, 8, (3, 3), output=second, **options)
        self.residual = residual

    def __call__(self, x):
        y = self.a(x)
        r = {"none": None, "float": x, "codes": y}[self.residual]
        return self.b(y, residual=r)


def floats(y):
    return np.asarray(y.dequantize() if isinstance(y, QTensor) else y)


KINDS = [("int8", "int8"), ("int8", "float"), ("float", "float")]
RESIDUALS = ["none", "float", "codes"]


@pytest.mark.parametrize(
    ("activation", "outputs", "residual"),
    [
        (act, KINDS[i % 3], RESIDUALS[(i + j) % 3])
        for i, act in enumerate(ACTIVATIONS)
        for j in (0, 1)
    ]
    + [("relu", outputs, residual) for outputs in KINDS for residual in RESIDUALS],
    ids=str,
)
def test_frozen_it_computes_what_it_was_trained_to(activation, outputs, residual):
    model = Two(activation, *outputs, residual)
    x = images()
    want = model(x)
    jf.calibrate(model, [x], progress=False)
    trained = model(x)
    jf.freeze(model, x[:1])
    frozen = nnx.jit(lambda m, x: m(x))(model, x)
    assert isinstance(frozen, QTensor) == (outputs[1] == "int8")
    assert decibels(want, floats(frozen)) > 20
    step = float(frozen.scale) if isinstance(frozen, QTensor) else 0.0
    off = np.abs(floats(frozen) - floats(trained))
    # Another order of float32 factors moves ties, here and there.
    assert off.max() <= 1.01 * step + 1e-4
    assert np.mean(off > 1e-4) < 1e-2


def test_frozen_it_holds_int8_kernels_and_no_floats_of_their_size():
    model = Two("relu", "int8", "int8", "none")
    jf.calibrate(model, [images()], progress=False)
    jf.freeze(model, images())
    assert not nnx.state(model, nnx.Param)
    leaves = jax.tree.leaves(nnx.state(model))
    assert {leaf.dtype.name for leaf in leaves if leaf.size > 8} == {"int8"}


def test_frozen_inference_has_no_scale_arithmetic():
    """int8 in, int8 out: what is left is the convolutions themselves."""
    model = Two("relu", "int8", "int8", "codes")
    jf.calibrate(model, [images()], progress=False)
    jf.freeze(model, images())
    graph, state = nnx.split(model)

    def run(state, codes):
        return nnx.merge(graph, state)(codes).values

    text = str(jax.make_jaxpr(run)(state, images()))
    after_quantize = text[text.index("jqconv_fprop") :]
    for operation in (" mul ", " div ", " transpose", " round", "convert_element_type"):
        assert operation not in after_quantize, operation


def test_freezing_computes_no_convolution(monkeypatch):
    model = Two("relu", "int8", "int8", "codes")
    jf.calibrate(model, [images()], progress=False)
    outputs = []

    def watched(*args, **options):
        outputs.append(jqconv.qconv2d(*args, **options))
        return outputs[-1]

    monkeypatch.setattr("jqconv.flax._frozen.qconv2d", watched)
    jf.freeze(model, images())
    assert len(outputs) == 4  # two layers, two runs
    assert all(isinstance(y, jax.core.Tracer) for y in outputs)


def test_another_kind_of_input_than_it_was_frozen_for_is_refused():
    model = Two("relu", "int8", "int8", "none")
    jf.calibrate(model, [images()], progress=False)
    jf.freeze(model, images())
    with pytest.raises(TypeError, match="frozen for a float array"):
        model.a(jqconv.quantize(images(), 0.1))
    with pytest.raises(TypeError, match="frozen for a QTensor"):
        model.b(images())


# The pipeline.


class Net(nnx.Module):
    """Convolutions in attributes, lists, sequences, and shared between two places."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.stem = nnx.Conv(8, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(2)])
        self.tail = nnx.Sequential(nnx.Conv(8, 8, (1, 1), rngs=rngs), nnx.relu)
        self.ring = nnx.Conv(8, 8, (3, 3), padding="CIRCULAR", rngs=rngs)
        self.line = nnx.Conv(8, 8, (3,), rngs=rngs)
        self.again = self.stem
        self.head = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = x + nnx.relu(block(x))
        x = self.ring(self.again(self.tail(x)))
        return self.head(jnp.mean(self.line(jnp.mean(x, 1)), 1))


def rows_of(report):
    return {name: (runs, why) for name, runs, why in report.rows}


def test_a_float_model_becomes_an_int8_one():
    model, x = Net(), images()
    want = model(x)
    report = jf.quantize(model)
    rows = rows_of(report)
    assert "CIRCULAR" in rows["ring"][1]
    assert "two-dimensional" in rows["line"][1]
    int8 = {name for name, (runs, _) in rows.items() if runs == "int8"}
    assert int8 - {"stem", "again"} == {"blocks.0", "blocks.1", "tail.layers.0"}
    assert len(int8 & {"stem", "again"}) == 1  # one layer in two places
    assert isinstance(model.stem, jf.QConv)
    assert model.again is model.stem
    np.testing.assert_array_equal(model(x), want)
    jf.calibrate(model, [x, 0.5 * x], progress=False)
    quantized = model(x)
    assert decibels(want, quantized) > 20
    assert not np.array_equal(quantized, want)
    sensitivity = jf.sensitivity(model, [x])
    assert set(sensitivity.sqnr) == set(jf.qconvs(model))
    assert all(15 < db < 80 for db in sensitivity.sqnr.values())
    np.testing.assert_array_equal(model(x), quantized)


def test_layers_can_be_left_in_float():
    def left(**options):
        return {
            name
            for name, (runs, _) in rows_of(jf.quantize(Net(), **options)).items()
            if runs == "float"
        }

    always = {"ring", "line"}
    assert left() == always
    assert left(skip=["blocks.0"]) == always | {"blocks.0"}
    assert left(skip=lambda name, conv: name.startswith("blocks")) == always | {
        "blocks.0",
        "blocks.1",
    }
    with pytest.raises(ValueError, match=r"block0.*blocks\.0"):
        jf.quantize(Net(), skip=["block0"])


def test_the_report_prints_in_a_terminal_and_a_notebook():
    report = jf.quantize(Net())
    assert "blocks.1" in str(report)
    assert report._repr_html_().count("<tr>") == 1 + len(report.rows)


def test_sensitivity_prints_the_worst_first_and_draws():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    found = jf.Sensitivity({"good": 40.0, "bad": 12.5})
    assert str(found).index("bad") < str(found).index("good")
    ax = found.plot()
    assert [bar.get_width() for bar in ax.patches] == [40.0, 12.5]
    plt.close(ax.figure)


def test_sensitivity_is_each_layers_own_error():
    layer, conv = pair((3, 3))
    model = calibrated(layer)
    x = images(1)
    found = jf.sensitivity(model, [x, x])
    assert found.sqnr["layers.0"] == pytest.approx(decibels(conv(x), layer(x)), abs=1e-3)
    assert layer.mode == "train"


@pytest.mark.parametrize("step", [jf.calibrate, jf.sensitivity])
def test_a_model_without_layers_says_so(step):
    with pytest.raises(ValueError, match="no QConv"):
        step(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [])


def test_calibration_that_reaches_nothing_says_so_and_changes_nothing():
    layer, _ = pair((3, 3))
    model = nnx.Sequential(layer)
    with pytest.raises(ValueError, match="no batches"):
        jf.calibrate(model, [], progress=False)
    with pytest.raises(ValueError, match=r"layers\.0"):
        jf.calibrate(model, [images()], call=lambda model, x: x, progress=False)
    assert layer.mode == "float"


def test_freezing_needs_calibration_and_an_example_that_reaches_all():
    layer, _ = pair((3, 3))
    model = nnx.Sequential(layer)
    with pytest.raises(ValueError, match="calibrate the model"):
        jf.freeze(model, images())
    jf.calibrate(model, [images()], progress=False)
    with pytest.raises(TypeError):
        jf.freeze(model)
    model.extra = layer2 = pair((3, 3))[0]
    layer2.mode = "train"
    with pytest.raises(ValueError, match="extra"):
        jf.freeze(model, images())


class Scaled(nnx.Module):
    """Quantizes the second layer's input, or its residual, by what `scale` finds."""

    def __init__(self, scale, of_input):
        self.scale, self.of_input = scale, of_input
        self.first = jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))
        self.second = jf.QConv(8, 8, (3, 3), activation="relu", rngs=nnx.Rngs(0))

    def __call__(self, x):
        floats = self.first(x)
        codes = jqconv.quantize(floats, self.scale(floats))
        return self.second(codes if self.of_input else x, residual=None if self.of_input else codes)


@pytest.mark.parametrize("of_input", [True, False])
def test_a_scale_that_depends_on_numbers_cannot_be_frozen(of_input):
    """The frozen layer would compute with the example's for good."""
    model = Scaled(jqconv.absmax_scale, of_input)
    jf.calibrate(model, [images()], progress=False)
    for example in (images(), jnp.zeros((2, 7, 6, 8))):
        with pytest.raises(ValueError, match="changes with the numbers"):
            jf.freeze(model, example)
    assert isinstance(model.second, jf.QConv)
    fixed = Scaled(lambda x: jnp.float32(0.02), of_input)
    jf.calibrate(fixed, [images()], progress=False)
    want = fixed(4 * images())
    jf.freeze(fixed, images())
    np.testing.assert_allclose(fixed(4 * images()), want, rtol=1e-6)


@pytest.mark.parametrize("output", ["float", "int8"])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_a_frozen_layer_refuses_codes_of_another_scale(output, activation):
    class Model(nnx.Module):
        def __init__(self):
            options = {"activation": activation, "output": output, "rngs": nnx.Rngs(0)}
            self.conv = jf.QConv(8, 8, (3, 3), **options)

        def __call__(self, x, residual):
            return self.conv(x, residual=residual)

    def codes(scale):
        return jqconv.quantize(images(), jnp.float32(scale))

    model = Model()
    model(codes(0.03), codes(0.07))
    calls = {"call": lambda model, batch: model(*batch)}
    jf.calibrate(model, [(codes(0.03), codes(0.07))], progress=False, **calls)
    jf.freeze(model, codes(0.03), codes(0.07))
    model(codes(0.03), codes(0.07))
    with pytest.raises(ValueError, match=r"scale 0.03 of its input, got 0.04"):
        model(codes(0.04), codes(0.07))
    with pytest.raises(ValueError, match=r"scale 0.07 of its residual, got 0.01"):
        model(codes(0.03), codes(0.01))


class Shared(nnx.Module):
    def __init__(self):
        self.conv = jf.QConv(8, 8, (3, 3), output="int8", rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.conv(self.conv(x))


def test_a_layer_with_two_input_scales_cannot_be_frozen():
    model = Shared()
    jf.calibrate(model, [images()], progress=False)
    with pytest.raises(ValueError, match="called twice"):
        jf.freeze(model, images())


# Models that are not what they seem.


def conv(seed=0, **options):
    return nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(seed), **options)


class Contained(nnx.Module):
    """Layers in plain containers."""

    def __init__(self, make):
        self.listed = nnx.data([make(0), {"deep": make(1)}])
        self.paired = nnx.data((make(2), make(3)))
        self.named = nnx.data({"one": make(4)})

    def __call__(self, x):
        layers = [self.listed[0], self.listed[1]["deep"], *self.paired, self.named["one"]]
        for layer in layers:
            x = layer(x)
        return x


def test_layers_in_plain_containers_are_layers():
    model, x = Contained(conv), images()
    want = model(x)
    report = jf.quantize(model, observer="absmax")
    assert [name for name, _, _ in report.rows] == [
        "listed.0",
        "listed.1.deep",
        "paired.0",
        "paired.1",
        "named.one",
    ]
    np.testing.assert_array_equal(model(x), want)
    jf.calibrate(model, [x], progress=False)
    assert decibels(want, model(x)) > 20
    jf.freeze(model, x)
    assert decibels(want, model(x)) > 20
    assert not jf.qconvs(model)
    assert isinstance(model.paired, tuple)


Pair = collections.namedtuple("Pair", "first second")


class Paired(nnx.Module):
    def __init__(self):
        self.convs = nnx.data(Pair(conv(0), conv(1)))

    def __call__(self, x):
        return self.convs.second(self.convs.first(x))


def test_layers_in_a_namedtuple_stay_in_one():
    model, x = Paired(), images()
    jf.quantize(model)
    jf.calibrate(model, [x], progress=False)
    jf.freeze(model, x)
    assert isinstance(model.convs.first, jf.Int8Conv)
    assert decibels(Paired()(x), model(x)) > 25


class Aliased(nnx.Module):
    """One layer under two names, the later one first by the alphabet."""

    def __init__(self):
        self.shared = conv()
        self.alias = self.shared

    def __call__(self, x):
        return self.alias(self.shared(x))


def test_a_layer_in_two_places_has_one_name_everywhere():
    model, x = Aliased(), images()
    reported = [name for name, _, _ in jf.quantize(model).rows]
    jf.calibrate(model, [x], progress=False)  # after nnx.jit the attributes are sorted
    assert list(jf.sensitivity(model, [x]).sqnr) == list(jf.qconvs(model)) == reported
    assert jf.quantize(Aliased(), skip=reported).rows[0][1] == "float"


@pytest.mark.parametrize(
    "layer", [conv(), jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))], ids=["nnx.Conv", "QConv"]
)
@pytest.mark.parametrize("step", [jf.quantize, lambda layer: jf.freeze(layer, images())])
def test_a_layer_itself_is_no_model(layer, step):
    with pytest.raises(ValueError, match=r"itself a Q?Conv.*nnx\.Sequential"):
        step(layer)


class Standardized(nnx.Conv):
    def __call__(self, x):
        return 2 * super().__call__(x)


def test_a_convolution_that_computes_something_else_is_left_alone():
    model, x = nnx.Sequential(conv(), Standardized(8, 8, (3, 3), rngs=nnx.Rngs(0))), images()
    want = model(x)
    (_, (name, runs_in, why)) = jf.quantize(model).rows
    assert (name, runs_in) == ("layers.1", "float")
    assert "Standardized" in why
    np.testing.assert_array_equal(model(x), want)


def test_transposed_convolutions_are_reported():
    model = nnx.Sequential(conv(), nnx.ConvTranspose(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    (_, (name, runs_in, why)) = jf.quantize(model).rows
    assert (name, runs_in) == ("layers.1", "float")
    assert "ConvTranspose" in why


def stacked(make):
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def layers(rngs):
        return make(8, 8, (3, 3), rngs=rngs)

    model = nnx.Module()
    model.stack = layers(nnx.Rngs(0))
    return model


def test_stacked_layers_are_refused():
    ((_, runs_in, why),) = jf.quantize(stacked(nnx.Conv)).rows
    assert runs_in == "float"
    assert "nnx.vmap" in why
    for step in (jf.calibrate, jf.sensitivity):
        with pytest.raises(ValueError, match=r"stack holds several layers.*nnx\.vmap"):
            step(stacked(jf.QConv), [])


class Misnamed(nnx.Module):
    """Its names are in another order than its layers."""

    def __init__(self):
        self.stem, self.middle, self.a_head = conv(0), conv(1), conv(2)

    def __call__(self, x):
        return self.a_head(self.middle(self.stem(x)))


@nnx.jit
def passed_through_jit(model):
    """Its attributes are in the order of their names afterwards."""
    model(images())


@pytest.mark.parametrize("change", [lambda model: None, passed_through_jit])
def test_first_and_last_are_those_that_the_model_calls_so(change):
    model = Misnamed()
    change(model)
    report = jf.quantize(model, images(), first_in_float=True, last_in_float=True)
    rows = rows_of(report)
    assert rows["stem"] == ("float", "the first convolution")
    assert rows["middle"] == ("int8", "")
    assert rows["a_head"] == ("float", "the last convolution")
    assert type(model.stem) is nnx.Conv


class Inside(Misnamed):
    def __call__(self, x):
        return nnx.jit(lambda model, x: Misnamed.__call__(model, x))(self, x)


@pytest.mark.parametrize("model", [Inside, lambda: nnx.Sequential(nnx.relu)])
def test_a_first_that_cannot_be_told_is_not_guessed(model):
    with pytest.raises(ValueError, match="cannot be told which"):
        jf.quantize(model(), images(), first_in_float=True)


def test_first_and_last_need_an_example():
    with pytest.raises(ValueError, match="give an example"):
        jf.quantize(Misnamed(), last_in_float=True)


def test_a_run_to_find_the_first_changes_nothing():
    model = nnx.Sequential(conv(), nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    before = jax.tree.leaves(nnx.state(model))
    jf.quantize(model, images(), first_in_float=True)
    for old, new in zip(before, jax.tree.leaves(nnx.state(model)), strict=True):
        np.testing.assert_array_equal(old, new)


class Part(nnx.Pytree):
    """Known to nnx, and no module."""

    def __init__(self, layer):
        self.layer = layer


def test_layers_in_other_nodes_of_nnx_are_layers():
    model = nnx.Sequential(conv())
    model.part = Part(conv(1))
    assert set(rows_of(jf.quantize(model))) == {"layers.0", "part.layer"}
    assert isinstance(model.part.layer, jf.QConv)


def test_a_kernel_that_is_made_anew_stays_in_float():
    model = nnx.Sequential(nnx.WeightNorm(conv(), rngs=nnx.Rngs(0)), conv(1))
    rows = rows_of(jf.quantize(model))
    assert sorted(rows.values()) == [
        ("float", "its kernel is made anew in every call"),
        ("int8", ""),
    ]


@pytest.mark.parametrize("step", [jf.quantize, jf.freeze, jf.fold_batch_norm, jf.qconvs])
def test_what_is_no_module_is_refused(step):
    with pytest.raises(TypeError, match=r"expected a flax\.nnx\.Module, got int"):
        step(3)


def test_wrong_options_are_no_reason_to_leave_layers_in_float():
    with pytest.raises(ValueError, match="norm belongs to one layer"):
        jf.quantize(Misnamed(), norm=nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="'foo' is unknown"):
        jf.quantize(Misnamed(), observer="foo")
    with pytest.raises(ValueError, match="grad_dtype=int8"):
        jf.quantize(Misnamed(), grad_dtype="int8")
    with pytest.raises(ValueError, match="algorithm='fast'"):
        jf.quantize(Misnamed(), algorithm="fast")
    with pytest.raises(ValueError, match="activation belongs to one layer"):
        jf.quantize(Misnamed(), activation="relu")
    with pytest.raises(TypeError, match="no option 'padding'; they are output, observer"):
        jf.quantize(Misnamed(), padding="VALID")
    with pytest.raises(TypeError, match=r"skip=\['stem'\]"):
        jf.quantize(Misnamed(), skip="stem")


OBSERVERS = pytest.mark.parametrize(
    "observer", ["absmax", "moving_average", "percentile", "mse"], ids=str
)


@OBSERVERS
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_do_not_calibrate(observer, value):
    layer = jf.QConv(8, 8, (3, 3), observer=observer, rngs=nnx.Rngs(0))
    model, bad = nnx.Sequential(layer), images().at[0, 1, 2, 3].set(value)
    with pytest.raises(ValueError, match=r"not finite \(or beyond 1e\+30\) reached layers\.0"):
        jf.calibrate(model, [images(), bad, images()], progress=False)
    assert layer.mode == "float"
    jf.calibrate(model, [images()], progress=False)  # what was seen before is forgotten
    assert 0.01 < layer.x_scale[...] < 0.1


@OBSERVERS
def test_a_nan_among_many_values_does_not_calibrate(observer):
    """XLA's maximum loses it on a CPU, from 4096 values on."""
    model = nnx.Sequential(jf.QConv(8, 8, (3, 3), observer=observer, rngs=nnx.Rngs(0)))
    bad = images(shape=(4, 16, 16, 8)).at[1, 2, 3, 4].set(np.nan)
    with pytest.raises(ValueError, match=r"not finite \(or beyond 1e\+30\) reached layers\.0"):
        jf.calibrate(model, [bad], progress=False)


@OBSERVERS
@pytest.mark.parametrize("factor", [0, 1e-32])
def test_zeros_do_not_calibrate(observer, factor):
    model = nnx.Sequential(jf.QConv(8, 8, (3, 3), observer=observer, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="only zeros"):
        jf.calibrate(model, [factor * images()], progress=False)


@OBSERVERS
@pytest.mark.parametrize("factor", [1e-29, 1e-18, 1e20, 1e29])
def test_any_magnitude_is_quantized_as_well(observer, factor):
    layer = jf.QConv(8, 8, (3, 3), observer=observer, use_bias=False, rngs=nnx.Rngs(0))
    x = images() * factor
    want = layer(x)
    model = calibrated(layer, x=x)
    assert decibels(want / factor, layer(x) / factor) > 25
    assert jf.sensitivity(model, [x]).sqnr["layers.0"] > 25


def test_magnitudes_near_the_end_of_float32_do_not_calibrate():
    model = nnx.Sequential(jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"beyond 1e\+30"):
        jf.calibrate(model, [images() * 1e31], progress=False)


def test_a_channel_of_next_to_nothing_trains_with_learned_scales():
    layer = jf.QConv(8, 4, (1, 1), learned_scales=True, rngs=nnx.Rngs(0))
    layer.kernel[...] *= jnp.array([1e-37, 1, 1, 1])  # as weight decay leaves them
    model = calibrated(layer)
    grads = nnx.grad(lambda model: (model(images()) ** 2).mean())(model)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("step", [jf.calibrate, jf.sensitivity])
def test_one_array_is_no_list_of_batches(step):
    with pytest.raises(TypeError, match=r"\[images\]"):
        step(calibrated(pair((3, 3))[0]), images())


def test_a_model_of_one_layer_has_a_name():
    layer = pair((3, 3))[0]
    with pytest.raises(ValueError, match="the model has no scales yet"):
        jf.sensitivity(layer, [images()])
    jf.calibrate(layer, [images()], progress=False)
    assert list(jf.sensitivity(layer, [images()]).sqnr) == ["the model"]


@pytest.mark.parametrize("mode", ["float", "train", "int8"])
def test_a_calibrated_model_is_tabulated(mode):
    model = nnx.Sequential(pair((3, 3))[0])
    if mode != "float":
        jf.calibrate(model, [images()], progress=False)
    if mode == "int8":
        jf.freeze(model, images())
    assert "layers/0" in nnx.tabulate(model, images())


def test_the_road_needs_no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        x, model = images(), nnx.Sequential(normed_layer(), conv(1))
        model.eval()
        jf.fold_batch_norm(model, x)
        jf.quantize(model)
        jf.calibrate(model, [x], progress=False)
        jf.sensitivity(model, [x])
        jf.freeze(model, x)
        assert np.isfinite(model(x)).all()


@OBSERVERS
def test_images_on_a_mesh_of_explicit_axes_calibrate(observer):
    devices = jax.devices()[:2]
    mesh = jax.make_mesh(
        (len(devices),), ("d",), (jax.sharding.AxisType.Explicit,), devices=devices
    )
    want = calibrated(jf.QConv(8, 8, (3, 3), observer=observer, rngs=nnx.Rngs(0)))
    with jax.set_mesh(mesh):
        x = jax.device_put(images(), jax.NamedSharding(mesh, jax.P("d")))
        got = calibrated(jf.QConv(8, 8, (3, 3), observer=observer, rngs=nnx.Rngs(0)), x=x)
    np.testing.assert_allclose(got.layers[0].x_scale[...], want.layers[0].x_scale[...])


def test_sensitivity_needs_scales_and_batches():
    model = nnx.Sequential(pair((3, 3))[0])
    with pytest.raises(ValueError, match=r"layers\.0 has no scales"):
        jf.sensitivity(model, [images()])
    batches = iter([images()])
    jf.calibrate(model, batches, progress=False)
    with pytest.raises(ValueError, match="no batches"):
        jf.sensitivity(model, batches)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "bool"])
def test_images_of_integers_are_taken_in_every_mode(dtype):
    pixels = jnp.asarray(np.random.default_rng(0).integers(0, 2, (2, 7, 6, 8)), dtype)
    model = nnx.Sequential(pair((3, 3))[0])
    want = model(pixels)
    with jax.numpy_dtype_promotion("standard"):
        np.testing.assert_array_equal(want, pair((3, 3))[1](pixels))
    jf.calibrate(model, [pixels], progress=False)
    assert decibels(want, model(pixels)) > 25
    jf.freeze(model, pixels)
    assert decibels(want, model(pixels)) > 25


def test_a_residual_of_another_rank_is_named_in_every_mode():
    layer = jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    for mode in ("float", "train"):
        layer.mode = mode
        with pytest.raises(ValueError, match=r"residual has shape \(8,\)"):
            layer(images(), residual=jnp.ones(8))


def test_a_residual_that_would_broadcast_is_refused_in_every_mode():
    layer = jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    for mode in ("float", "train"):
        layer.mode = mode
        with pytest.raises(ValueError, match=r"residual has shape \(1, 1, 1, 8\)"):
            layer(images(), residual=jnp.ones((1, 1, 1, 8)))


@pytest.mark.parametrize(
    ("inputs", "residual", "said"),
    [
        (None, None, "expected an array or a QTensor, got NoneType"),
        ([[1.0]], None, "got list"),
        ((images(), 3), None, "got tuple.*call="),
        (images(), 3.0, "residual must be a float array or a QTensor, got float"),
        (images(), jnp.ones((2, 7, 6, 8), jnp.int32), "got an array of int32"),
    ],
    ids=["None", "list", "tuple", "float", "integers"],
)
def test_what_is_no_operand_is_refused(inputs, residual, said):
    layer = jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=said):
        layer(inputs, residual=residual)


@pytest.mark.parametrize("mode", ["float", "train", "int8"])
def test_an_operand_in_a_wrong_place_or_shape_is_named(mode):
    model, x = nnx.Sequential(layer := pair((3, 3))[0]), images()
    with pytest.raises(TypeError, match="a residual goes by its name"):
        layer(x, x)
    if mode != "float":
        jf.calibrate(model, [x], progress=False)
    if mode == "int8":
        jf.freeze(model, x)
    with pytest.raises(ValueError, match=r"\(\.\.\., H, W, C\), got \(6, 8\)"):
        model.layers[0](x[0, 0])


def test_there_are_no_other_modes():
    with pytest.raises(ValueError, match="mode='foo' must be one of float, observe"):
        jf.set_mode(nnx.Sequential(jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0))), "foo")


class Half(nnx.Module):
    """Parameters in bfloat16, int8 in between."""

    def __init__(self):
        options = {"param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
        self.a = jf.QConv(8, 8, (3, 3), output="int8", **options)
        self.b = jf.QConv(8, 8, (3, 3), **options)

    def __call__(self, x):
        return self.b(self.a(x))


def test_the_output_is_of_one_dtype_in_every_mode():
    model, x = Half(), images(dtype=jnp.bfloat16)
    assert model(x).dtype == jnp.bfloat16
    jf.calibrate(model, [x], progress=False)
    assert model(x).dtype == jnp.bfloat16
    jf.freeze(model, x)
    assert model(x).dtype == jnp.bfloat16


ASYMMETRIC = {
    "int8, zero point": lambda x: jqconv.quantize(x, 0.03, zero_point=17),
    "uint8": lambda x: jqconv.quantize(x, 0.03, dtype="uint8", zero_point=100),
    "uint8 from 0": lambda x: jqconv.quantize(jnp.abs(x), 0.02, dtype="uint8"),
}


@pytest.mark.parametrize("name", ASYMMETRIC)
@pytest.mark.parametrize("where", ["inputs", "residual", "both"])
@pytest.mark.parametrize("output", ["float", "int8"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_a_zero_point_survives_freezing(name, where, output, use_bias):
    layer = jf.QConv(8, 8, (3, 3), output=output, use_bias=use_bias, rngs=nnx.Rngs(0))
    model = Around(layer)
    x, z = images(), images(1)
    jf.calibrate(model, [(x, z)], call=lambda m, batch: m(*batch), progress=False)
    x = x if where == "residual" else ASYMMETRIC[name](x)
    z = z if where == "inputs" else ASYMMETRIC[name](z)
    want = floats(model(x, z))
    jf.freeze(model, x, z)
    got = floats(model(x, z))
    step = float(jnp.max(jnp.abs(want))) / 100
    np.testing.assert_allclose(got, want, atol=step if output == "int8" else 1e-4)
    if where != "residual":
        with pytest.raises(TypeError, match="zero point"):
            model(jqconv.quantize(images(), 0.03, zero_point=3), z)


class Around(nnx.Module):
    """One layer with a residual."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x, z):
        return self.layer(x, residual=z)


class Times10(jf.QConv):
    def __call__(self, x, **options):
        return super().__call__(x, **options) * 10


def test_a_layer_with_a_call_of_its_own_is_not_frozen():
    model = calibrated(Times10(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match=r"layers\.0 is of a class with a __call__ of its own"):
        jf.freeze(model, images())


def test_freezing_leaves_the_rest_of_the_state_alone():
    layers = conv(), nnx.BatchNorm(8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
    model = nnx.Sequential(*layers)
    jf.quantize(model)
    jf.calibrate(model, [images()], progress=False)
    model.train()
    before = jax.tree.leaves(nnx.state((model.layers[1], model.layers[2])))
    jf.freeze(model, images())
    after = jax.tree.leaves(nnx.state((model.layers[1], model.layers[2])))
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(
            jax.random.key_data(old) if is_key(old) else old,
            jax.random.key_data(new) if is_key(new) else new,
        )


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("frozen", [False, True])
def test_lists_in_its_options_do_not_keep_it_from_being_hashed(frozen):
    options = {"strides": [1, 2], "padding": [1, (0, 2)], "kernel_dilation": [1, 1]}
    model = calibrated(jf.QConv(8, 8, [3, 3], **options, rngs=nnx.Rngs(0)))
    if frozen:
        jf.freeze(model, images())
    hash(nnx.graphdef(model))


def test_a_frozen_layer_tells_its_shape_as_the_float_one_did():
    layer = jf.QConv(8, 12, (3, 2), strides=2, padding=1, rngs=nnx.Rngs(0))
    model = calibrated(layer)
    jf.freeze(model, images())
    for name in ("in_features", "out_features", "kernel_size", "strides", "padding"):
        assert getattr(model.layers[0], name) == getattr(layer, name)


@pytest.mark.parametrize("step", [lambda m: jf.freeze(m, images()), lambda m: jf.calibrate(m, [])])
def test_a_frozen_model_says_that_it_is(step):
    model = calibrated(jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    jf.freeze(model, images())
    with pytest.raises(ValueError, match="frozen already"):
        step(model)


def test_a_norm_that_cannot_be_folded_is_named():
    norm = nnx.LayerNorm(8, rngs=nnx.Rngs(0))
    model = calibrated(jf.QConv(8, 8, (3, 3), norm=norm, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="LayerNorm cannot be frozen"):
        jf.freeze(model, images())


class Added(nnx.Module):
    def __init__(self, output):
        self.first = jf.QConv(8, 8, (3, 3), output=output, rngs=nnx.Rngs(0))
        self.second = jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(1))

    def __call__(self, x, adapt=lambda residual: residual):
        y = self.first(x)
        return self.second(y, residual=adapt(y))


@pytest.mark.parametrize("output", ["float", "int8"])
def test_another_kind_of_residual_than_it_was_frozen_for_is_refused(output):
    model, x = Added(output), images()
    jf.calibrate(model, [x], progress=False)
    jf.freeze(model, x)
    model(x)
    other = {"float": lambda y: jqconv.quantize(y, 0.1), "int8": lambda y: y.dequantize()}[output]
    for adapt in (other, lambda y: None):
        with pytest.raises(TypeError, match="frozen for a residual"):
            model(x, adapt)


def test_a_frozen_layer_sends_back_no_silent_zero():
    model = nnx.Sequential(conv(), jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    jf.calibrate(model, [images()], progress=False)
    jf.freeze(model, images())
    with pytest.raises(TypeError, match="frozen QConv has no gradient"):
        nnx.grad(lambda model, x: model(x).sum())(model, images())
    kept = jax.grad(lambda x: model.layers[1](jax.lax.stop_gradient(x)).sum() + x.sum())
    np.testing.assert_array_equal(kept(images()), jnp.ones_like(images()))


@pytest.mark.parametrize("view", [lambda x: x, lambda x: jqconv.quantize(x, 0.03)])
@pytest.mark.parametrize("which", [0, 1])
def test_nor_does_it_for_codes_or_a_residual(view, which):
    model = Around(jf.QConv(8, 8, (3, 3), rngs=nnx.Rngs(0)))
    jf.calibrate(model, [images()], call=lambda m, x: m(x, x), progress=False)
    jf.freeze(model, *map(view, (images(), images(1))))
    with pytest.raises(TypeError, match="frozen QConv has no gradient"):
        jax.grad(lambda *xs: model(*map(view, xs)).sum(), which)(images(), images(1))


# BatchNorm.


def with_statistics(norm, seed=0):
    """A BatchNorm that was trained: not the statistics, scale and bias that it starts with."""
    rng = np.random.default_rng(seed)
    for variable, low in ((norm.mean, -1), (norm.var, 0.2), (norm.scale, 0.5), (norm.bias, -1)):
        if variable is not None:
            variable[...] = jnp.asarray(rng.uniform(low, 2, variable.shape), jnp.float32)
    return norm


class Normed(nnx.Module):
    """conv, norm, relu; a norm that follows an addition; and one that follows nothing."""

    def __init__(self, **options):
        rngs = nnx.Rngs(0)
        self.first = with_statistics(nnx.BatchNorm(8, rngs=rngs))
        self.conv = nnx.Conv(8, 8, (3, 3), rngs=rngs, **options)
        self.norm = with_statistics(nnx.BatchNorm(8, rngs=rngs), 1)
        self.blocks = nnx.List([nnx.Conv(8, 8, (1, 1), rngs=rngs, use_bias=False)])
        self.norms = nnx.List([with_statistics(nnx.BatchNorm(8, use_scale=False, rngs=rngs), 2)])
        self.last = with_statistics(nnx.BatchNorm(8, use_bias=False, rngs=rngs), 3)
        self.eval()

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(self.first(x))))
        return self.last(x + self.norms[0](self.blocks[0](x)))


@pytest.mark.parametrize("options", [{}, {"use_bias": False}, {"feature_group_count": 4}], ids=str)
def test_batch_norms_fold_into_the_convolutions_before_them(options):
    model, x = Normed(**options), images()
    want = model(x)
    report = jf.fold_batch_norm(model, x)
    rows = {name: (into, why) for name, into, why in report.rows}
    assert rows["norm"] == ("conv", "")
    assert rows["norms.0"] == ("blocks.0", "")
    assert rows["first"][1] == rows["last"][1] == "its input is not a convolution's output"
    assert isinstance(model.norm, jf.Identity)
    assert isinstance(model.last, nnx.BatchNorm)
    np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-5)
    jf.quantize(model)
    jf.calibrate(model, [x], progress=False)
    assert decibels(want, model(x)) > 25


class Reads(nnx.Module):
    """Its forward looks at its layers, and names their arguments."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Conv(8, 8, (3, 3), rngs=rngs) for _ in range(2)])
        self.norm = with_statistics(nnx.BatchNorm(8, rngs=rngs))
        self.eval()

    def __call__(self, x):
        for layer in self.layers:
            x = layer(inputs=x) if isinstance(layer, nnx.Conv) else x
        return self.norm(x=x).reshape(len(x), -1, self.layers[0].out_features)


def test_folding_runs_models_that_look_at_their_layers():
    model = Reads()
    want = model(images())
    assert jf.fold_batch_norm(model, images()).rows == (("norm", "layers.1", ""),)
    assert type(model.layers[0]) is nnx.Conv
    np.testing.assert_allclose(model(images()), want, rtol=1e-4, atol=1e-5)


def test_folding_is_checked_in_full_float32():
    """A GPU's TF32 is off by more than folding is, and more so the deeper a network."""
    precisions = []

    class Noted(Reads):
        def __call__(self, x):
            precisions.append(jax.config.jax_default_matmul_precision)
            return super().__call__(x)

    jf.fold_batch_norm(Noted(), images())
    assert set(precisions) == {"highest"}


def test_folding_says_that_dropout_is_active():
    norm = with_statistics(nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0)))
    model = nnx.Sequential(conv(), norm, nnx.Dropout(0.5, rngs=nnx.Rngs(1)))
    with pytest.raises(ValueError, match=r"something else each time.*model\.eval\(\)"):
        jf.fold_batch_norm(model, images())


@pytest.mark.parametrize("learned", [False, True])
def test_a_channel_that_a_norm_turns_off_keeps_a_scale(learned):
    norm = with_statistics(nnx.BatchNorm(8, use_running_average=True, rngs=nnx.Rngs(0)))
    norm.scale[...] = norm.scale[...].at[3].set(0.0)
    layer = jf.QConv(8, 8, (3, 3), norm=norm, learned_scales=learned, rngs=nnx.Rngs(0))
    model = calibrated(layer)
    jf.fold_batch_norm(model, images())
    grads = nnx.grad(lambda model: jnp.square(model(images()) - 1).sum())(model)
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(grads))
    assert jnp.all(jnp.any(grads["layers"][0]["kernel"][...] != 0, (0, 1, 2)))


def test_a_fold_that_is_taken_back_leaves_a_shared_bias_shared():
    model = Twice()
    other = nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(5))
    bias = other.bias = model.conv.bias
    model.other = other
    jf.fold_batch_norm(model, images())
    assert model.conv.bias is model.other.bias is bias


def test_folding_needs_running_averages():
    model = Normed()
    model.train()
    with pytest.raises(ValueError, match=r"first.*model\.eval"):
        jf.fold_batch_norm(model, images())


class Twice(nnx.Module):
    def __init__(self, **options):
        self.conv = conv(**options)
        self.norm = with_statistics(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
        self.eval()

    def __call__(self, x):
        y = self.conv(x)
        return y + self.norm(y)


def test_folding_that_would_change_the_model_is_taken_back():
    model, x = Twice(), images()
    want, state = model(x), nnx.state(model)
    ((_, into, why),) = jf.fold_batch_norm(model, x).rows
    assert not into
    assert "something else" in why
    np.testing.assert_array_equal(model(x), want)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)


class Preactivated(nnx.Module):
    """The stem feeds a BatchNorm and a shortcut; what is inside the branch can be folded."""

    def __init__(self):
        self.stem, self.first, self.second = conv(0), conv(1), conv(2)
        norms = [with_statistics(nnx.BatchNorm(8, rngs=nnx.Rngs(0)), seed) for seed in range(2)]
        self.norm_of_stem, self.inner = norms
        self.eval()

    def __call__(self, x):
        x = self.stem(x)
        return x + self.second(nnx.relu(self.inner(self.first(nnx.relu(self.norm_of_stem(x))))))


def test_what_can_be_folded_is_where_something_else_cannot():
    model, x = Preactivated(), images()
    want = model(x)
    rows = {name: (into, why) for name, into, why in jf.fold_batch_norm(model, x).rows}
    assert rows["inner"] == ("first", "")
    assert rows["norm_of_stem"][0] == ""
    assert "something else" in rows["norm_of_stem"][1]
    assert isinstance(model.norm_of_stem, nnx.BatchNorm)
    np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-4)


def test_what_folds_is_the_same_before_and_after_training():
    """A new BatchNorm changes nothing, wherever it is folded, and a checkpoint would not fit."""
    model = Preactivated()
    for norm in (model.norm_of_stem, model.inner):
        norm.mean[...], norm.var[...] = jnp.zeros(8), jnp.ones(8)
        norm.bias[...], norm.scale[...] = jnp.zeros(8), jnp.ones(8)
    model.inner.scale[...] = jnp.zeros(8)  # as the last one of a residual branch often starts
    state = nnx.state(model)
    rows = [(name, into) for name, into, _ in jf.fold_batch_norm(model, images()).rows]
    assert rows == [("norm_of_stem", ""), ("inner", "first")]
    trained = Preactivated()
    assert [row[:2] for row in jf.fold_batch_norm(trained, images()).rows] == rows
    kept = nnx.state(model)["norm_of_stem"]
    jax.tree.map(np.testing.assert_array_equal, kept, state["norm_of_stem"])


def two_outputs(**options):
    """A convolution without a norm, and one with a norm that multiplies by a million."""

    class Two(nnx.Module):
        def __init__(self):
            self.plain, self.conv = conv(0), conv(1, **options)
            self.norm = nnx.BatchNorm(8, epsilon=1e-14, rngs=nnx.Rngs(0))
            self.norm.var[...] = jnp.full(8, 1e-12)
            self.eval()

        def __call__(self, x):
            return self.plain(x), self.norm(self.conv(x)), "a name"

    return Two()


@jax.numpy_dtype_promotion("standard")  # as nnx.Conv mixes dtypes
@pytest.mark.parametrize("shape", [(1, 4, 4, 8), (4, 16, 16, 8)])
def test_a_kernel_that_would_overflow_is_not_folded(shape):
    x, model = images(shape=shape), two_outputs(param_dtype=jnp.float16)
    want = model(x)[1]
    ((_, into, why),) = jf.fold_batch_norm(model, x).rows
    assert not into
    assert "leave their dtype" in why
    np.testing.assert_array_equal(model(x)[1], want)


@jax.numpy_dtype_promotion("standard")
def test_bf16_parameters_fold():
    model, x = two_outputs(param_dtype=jnp.bfloat16), images()
    want = model(x)[1]
    ((_, into, _),) = jf.fold_batch_norm(model, x).rows
    assert into == "conv"
    assert decibels(want, model(x)[1]) > 40


def test_a_fold_refused_in_a_narrow_dtype_says_what_else_it_may_be():
    with jax.numpy_dtype_promotion("standard"):
        model = Twice(param_dtype=jnp.bfloat16)
        ((_, into, why),) = jf.fold_batch_norm(model, images()).rows
    assert not into
    assert "is it bfloat16? Fold in float32" in why


def test_an_example_that_gives_nan_is_none():
    with pytest.raises(ValueError, match="NaN for the example"):
        jf.fold_batch_norm(two_outputs(), images(shape=(4, 16, 16, 8)).at[0, 0, 0, 0].set(np.nan))


def test_a_model_that_raises_while_it_is_folded_is_as_before():
    class Fails(Twice):
        def __call__(self, x):
            if not isinstance(self.norm, nnx.BatchNorm):
                raise RuntimeError("no")
            return super().__call__(x)

    model = Fails()
    want, state = model(images()), nnx.state(model)
    with pytest.raises(RuntimeError, match="no"):
        jf.fold_batch_norm(model, images())
    np.testing.assert_array_equal(model(images()), want)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), state)


def test_a_norm_out_of_sight_says_so():
    class Hidden(Twice):
        def __call__(self, x):
            return nnx.jit(lambda norm, x: norm(x))(self.norm, self.conv(x))

    ((_, into, why),) = jf.fold_batch_norm(Hidden(), images()).rows
    assert not into
    assert "nnx.jit" in why


def test_a_norm_that_two_layers_own_stays():
    norm = with_statistics(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    layers = [jf.QConv(8, 8, (3, 3), norm=norm, rngs=nnx.Rngs(i)) for i in range(2)]
    model, x = nnx.Sequential(*layers), images()
    model.eval()
    want = model(x)
    assert all(not into for _, into, _ in jf.fold_batch_norm(model, x).rows)
    np.testing.assert_array_equal(model(x), want)
    assert layers[0].norm is layers[1].norm is norm


@pytest.mark.parametrize(
    ("example", "output"),
    [(images()[:0], lambda y: y), (images(), lambda y: y.argmax(-1))],
    ids=["empty", "classes"],
)
def test_folding_needs_floats_to_check_by(example, output):
    model = nnx.Sequential(Twice(), output)
    with pytest.raises(ValueError, match="no floats"):
        jf.fold_batch_norm(model, example)


class Mixed(nnx.Module):
    """bf16 inside, float32 logits, some of them minus infinity."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.convs = nnx.List([conv(i, dtype=jnp.bfloat16) for i in range(3)])
        norms = [nnx.BatchNorm(8, dtype=jnp.bfloat16, rngs=rngs) for _ in range(3)]
        self.norms = nnx.List([with_statistics(norm, i) for i, norm in enumerate(norms)])
        self.eval()

    def __call__(self, x):
        for convolution, norm in zip(self.convs, self.norms, strict=True):
            x = nnx.relu(norm(convolution(x)))
        logits = x.mean((1, 2)).astype(jnp.float32)
        return jnp.where(jnp.arange(8) < 2, -jnp.inf, logits)


def test_bf16_models_with_other_outputs_fold():
    model, x = Mixed(), images()
    want = model(x)
    assert all(into for _, into, _ in jf.fold_batch_norm(model, x).rows)
    np.testing.assert_allclose(model(x), want, rtol=5e-2, atol=5e-2)


def test_a_norm_behind_an_activation_stays():
    layer = jf.QConv(8, 8, (3, 3), activation="relu", rngs=nnx.Rngs(0))
    model = nnx.Sequential(layer, with_statistics(nnx.BatchNorm(8, rngs=nnx.Rngs(0))))
    model.eval()
    want = model(images())
    ((_, into, why),) = jf.fold_batch_norm(model, images()).rows
    assert not into
    assert "activation" in why
    np.testing.assert_array_equal(model(images()), want)


def test_a_model_without_batch_norm_is_left_alone():
    model = Net()
    report = jf.fold_batch_norm(model, images())
    assert report.rows == ()


def normed_layer(**options):
    norm = with_statistics(nnx.BatchNorm(8, rngs=nnx.Rngs(0)))
    return jf.QConv(8, 8, (3, 3), norm=norm, activation="relu", **options, rngs=nnx.Rngs(0))


def test_a_norm_of_the_layers_own_comes_before_residual_and_activation():
    layer, x = normed_layer(), images()
    layer.eval()
    conv = nnx.Conv(8, 8, (3, 3), rngs=nnx.Rngs(0))
    want = nnx.relu(layer.norm(conv(x)) + x)
    np.testing.assert_array_equal(layer(x, residual=x), want)
    model = nnx.Sequential(layer)
    jf.calibrate(model, [x], call=lambda m, x: m.layers[0](x, residual=x), progress=False)
    trained = layer(x, residual=x)
    assert decibels(want, trained) > 25
    with pytest.raises(ValueError, match="fold_batch_norm"):
        jf.freeze(model, x)
    report = jf.fold_batch_norm(model, x)
    assert report.rows == (("layers.0.norm", "layers.0", ""),)
    assert layer.norm is None
    np.testing.assert_allclose(layer(x, residual=x), trained, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("output", ["float", "int8"])
def test_training_with_a_live_norm_moves_its_statistics(output):
    layer = normed_layer(output=output)
    model = nnx.Sequential(layer)
    model.eval()
    jf.calibrate(model, [images()], progress=False)
    model.train()
    before = np.asarray(layer.norm.mean[...])

    @nnx.jit
    def step(model, x):
        def loss(model):
            y = model(x)
            return jnp.sum((y.dequantize() if output == "int8" else y) ** 2)

        return nnx.grad(loss)(model)

    grads = step(model, images(1))
    assert not np.array_equal(layer.norm.mean[...], before)
    assert float(jnp.abs(grads["layers"][0]["norm"]["scale"][...]).max()) > 0
    assert float(jnp.abs(grads["layers"][0]["kernel"][...]).max()) > 0


def test_folded_and_frozen_it_computes_what_it_was_trained_to():
    layer = normed_layer(output="int8")
    model, x = nnx.Sequential(layer), images()
    model.eval()
    want = model(x)
    jf.fold_batch_norm(model, x)
    jf.calibrate(model, [x], progress=False)
    trained = model(x)
    jf.freeze(model, x)
    np.testing.assert_array_equal(model(x).values, trained.values)
    assert decibels(want, floats(trained)) > 25


@pytest.mark.parametrize("own", [True, False])
def test_layers_of_one_scale_fold_before_calibration(own):
    x, layer = images(), normed_layer(per_channel=False)
    model = nnx.Sequential(layer)
    if not own:
        layer.norm, norm, layer.activation = None, layer.norm, None
        model = nnx.Sequential(layer, norm)
    model.eval()
    want = model(x)
    jf.fold_batch_norm(model, x)
    np.testing.assert_allclose(model(x), want, rtol=1e-4, atol=1e-4)
    jf.calibrate(model, [x], progress=False)
    jf.freeze(model, x)
    assert decibels(want, model(x)) > 25


def test_folding_after_calibration_keeps_the_codes_or_says_why_not():
    x = images()
    for per_channel in (True, False):
        model = nnx.Sequential(normed_layer(output="int8", per_channel=per_channel))
        model.eval()
        jf.calibrate(model, [x], progress=False)
        trained = model(x)
        if per_channel:
            jf.fold_batch_norm(model, x)
            assert np.mean(model(x).values != trained.values) < 1e-3
        else:
            with pytest.raises(ValueError, match="per_channel"):
                jf.fold_batch_norm(model, x)
