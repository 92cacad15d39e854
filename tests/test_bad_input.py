"""What cannot be computed is refused with a message that names what was given and what to do."""

import jax.numpy as jnp
import numpy as np
import pytest
from checking import refused

import jqconv
from jqconv import QTensor

X = np.ones((2, 6, 5, 8), np.int8)
W = np.ones((3, 3, 8, 4), np.int8)
FLOAT_X, FLOAT_W = X.astype(np.float32), W.astype(np.float32)
Y_SHAPE = (2, 6, 5, 4)


def conv2d(x=None, w=None, *args, **kwargs):
    x = QTensor(X, 0.5) if x is None else x
    w = QTensor(W, 0.5) if w is None else w
    return jqconv.conv2d(x, w, *args, **kwargs)


def qconv2d(x=X, w=W, multiplier=1.0, *args, **kwargs):
    return jqconv.qconv2d(x, w, multiplier, *args, **kwargs)


@pytest.mark.parametrize("call", [conv2d, qconv2d])
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"padding": -1}, ValueError, ["padding", "-1"]),
        ({"padding": ((0, 0), (0, -2))}, ValueError, ["padding", "-2"]),
        ({"padding": "REFLECT"}, ValueError, ["padding", "REFLECT", "SAME"]),
        ({"padding": (1, 2, 3)}, ValueError, ["padding", "(1, 2, 3)"]),
        ({"padding": ((1, 2, 3), 0)}, ValueError, ["padding", "(1, 2, 3)", "before and after"]),
        ({"strides": 0}, ValueError, ["strides", "0"]),
        ({"strides": (1, 1, 1)}, ValueError, ["strides", "(1, 1, 1)"]),
        ({"dilation": (0, 1)}, ValueError, ["dilation", "(0, 1)"]),
        ({"groups": 3}, ValueError, ["groups=3", "8", "4"]),
        ({"groups": 2}, ValueError, ["8", "4", "2"]),
        ({"groups": 0}, ValueError, ["groups=0"]),
        ({"groups": 1.0}, (TypeError, ValueError), ["groups", "1.0"]),
        ({"activation": "tanh"}, ValueError, ["tanh", "relu"]),
        ({"activation": ("relu", 2.0)}, ValueError, ["relu", "2.0"]),
        ({"activation": 3}, (TypeError, ValueError), ["activation", "3"]),
        ({"bias": np.ones(5, np.float32)}, ValueError, ["bias", "(5,)", "(4,)"]),
        ({"bias": np.ones((1, 4), np.float32)}, ValueError, ["bias", "(1, 4)", "(4,)"]),
        ({"bias": np.ones(4, np.int32)}, TypeError, ["bias", "int32"]),
        ({"residual_scale": 0.5}, ValueError, ["residual_scale", "residual"]),
        ({"out_dtype": jnp.int16}, ValueError, ["int16"]),
        ({"algorithm": "fastest"}, ValueError, ["fastest", "int8/sbr:eng4"]),
        ({"algorithm": "int8/s:eng4_k24@91900"}, ValueError, ["int8/s:eng4_k24@91900"]),
        ({"algorithm": ""}, ValueError, ["algorithm", "''"]),
        ({"algorithm": 7}, TypeError, ["algorithm", "7"]),
        ({"algorithm": "int8/sbr:eng4_k24=0@91900"}, ValueError, ["int8/sbr:eng4", "int8/s:"]),
        ({"algorithm": "bf16/s:eng4_k24=0@91900"}, ValueError, ["bf16/s:eng4", "int8/s:"]),
    ],
    ids=str,
)
def test_options(call, change, kind, words):
    with refused(kind, *words):
        call(**change)


@pytest.mark.parametrize("call", [conv2d, qconv2d])
@pytest.mark.parametrize(
    ("residual", "kind", "words"),
    [
        (np.ones((2, 6, 5, 3), np.float32), ValueError, ["residual", "(2, 6, 5, 3)", str(Y_SHAPE)]),
        (np.ones((6, 5, 4), np.float32), ValueError, ["residual", "(6, 5, 4)", str(Y_SHAPE)]),
        (np.ones((1, 6, 5, 4), jnp.bfloat16), ValueError, ["residual", "(1, 6, 5, 4)"]),
        (np.ones(Y_SHAPE, np.int32), (TypeError, ValueError), ["residual", "int32"]),
        (np.ones(Y_SHAPE, np.uint8), (TypeError, ValueError), ["residual", "uint8"]),
    ],
    ids=lambda v: f"{v.dtype}{v.shape}" if isinstance(v, np.ndarray) else "",
)
def test_residuals(call, residual, kind, words):
    with refused(kind, *words):
        call(residual=residual, residual_scale=1.0)


def test_residual_scales():
    codes = np.ones(Y_SHAPE, np.int8)
    with refused(TypeError, "residual", "residual_scale"):
        conv2d(residual=codes)
    with refused(TypeError, "residual", "QTensor", "residual_scale"):
        conv2d(residual=QTensor(codes, 1.0), residual_scale=1.0)
    with refused(ValueError, "residual", "(4,)"):
        conv2d(residual=QTensor(codes, np.ones(4, np.float32)))
    for call in (conv2d, qconv2d):
        with refused(ValueError, "residual_scale", "(4,)"):
            call(residual=codes, residual_scale=np.ones(4, np.float32))
        with refused(ValueError, "residual_scale", "nan"):
            call(residual=codes, residual_scale=float("nan"))


@pytest.mark.parametrize("shape", [(6, 5, 8), (1, 2, 6, 5, 8), (8,), ()], ids=str)
def test_rank_of_x(shape):
    x = np.ones(shape, np.int8)
    with refused(ValueError, "x", str(shape), "(N, H, W, C)"):
        qconv2d(x)
    with refused(ValueError, "x", str(shape), "(N, H, W, C)"):
        conv2d(QTensor(x, 0.5))


@pytest.mark.parametrize("shape", [(3, 8, 4), (1, 3, 3, 8, 4), (4,)], ids=str)
def test_rank_of_w(shape):
    w = np.ones(shape, np.int8)
    with refused(ValueError, "w", str(shape), "(kh, kw, C / groups, K)"):
        qconv2d(w=w)
    with refused(ValueError, "w", str(shape), "(kh, kw, C / groups, K)"):
        conv2d(w=QTensor(w, 0.5))


@pytest.mark.parametrize("call", [conv2d, qconv2d])
def test_layouts_that_do_not_match(call):
    """Channels first, OIHW or OHWI kernels: the channels disagree, and the message has both."""

    def given(a):
        return QTensor(a, 0.5) if call is conv2d else a

    with refused(ValueError, "8", "5"):
        call(given(np.ones((2, 8, 6, 5), np.int8)))
    with refused(ValueError, "8", "3"):
        call(w=given(np.ones((4, 8, 3, 3), np.int8)))
    with refused(ValueError, "8", "3"):
        call(w=given(np.ones((4, 3, 3, 8), np.int8)))
    with refused(ValueError, "8", "7"):
        call(w=given(np.ones((3, 3, 7, 4), np.int8)))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bool"])
def test_dtypes_of_codes(dtype):
    with refused(TypeError, "x", dtype):
        qconv2d(X.astype(dtype))
    with refused(TypeError, "w", dtype):
        qconv2d(w=W.astype(dtype))


@pytest.mark.parametrize("name", ["x", "w"])
def test_values_and_their_scales(name):
    scale = f"{name}_scale"
    codes, floats = {"x": (X, FLOAT_X), "w": (W, FLOAT_W)}[name]
    with refused(TypeError, name, "QTensor", scale):
        conv2d(**{name: QTensor(codes, 0.5), scale: 0.5})
    with refused(TypeError, name, scale):
        conv2d(**{name: floats})
    with refused(TypeError, name, "int8", "QTensor"):
        conv2d(**{name: codes})
    with refused(TypeError, name, "int8"):
        conv2d(**{name: codes, scale: 0.5})
    with refused(TypeError, name):
        conv2d(**{name: "an image", scale: 0.5})


def test_packed_kernels():
    packed = jqconv.prepack(QTensor(W, 0.5))
    with refused(TypeError, "w", "PackedKernel", "w_scale"):
        conv2d(w=packed, w_scale=0.5)
    with refused(TypeError, "PackedKernel", "scale"):
        conv2d(w=jqconv.prepack(W))
    with refused(TypeError, "x", "PackedKernel"):
        conv2d(x=packed)


def test_qconv2d_takes_plain_codes():
    with refused(TypeError, "x", "QTensor"):
        qconv2d(QTensor(X, 0.5))
    with refused(TypeError, "w", "QTensor"):
        qconv2d(w=QTensor(W, 0.5))
    with refused(TypeError, "residual", "QTensor"):
        qconv2d(residual=QTensor(np.ones(Y_SHAPE, np.int8), 0.5))


@pytest.mark.parametrize("shape", [(8,), (1,), (1, 4)], ids=str)
def test_shapes_of_scales(shape):
    scale = np.ones(shape, np.float32)
    with refused(ValueError, "scale", str(shape[-1]), "()"):
        conv2d(FLOAT_X, x_scale=scale)
    with refused(ValueError, "scale", str(shape), "(4,)"):
        conv2d(w=FLOAT_W, w_scale=scale)
    with refused(ValueError, "out_scale", str(shape), "()"):
        conv2d(out_scale=scale)
    with refused(ValueError, "multiplier", str(shape), "(4,)"):
        qconv2d(multiplier=scale)
    with refused(ValueError, "out_multiplier", str(shape), "()"):
        qconv2d(out_multiplier=scale)


def test_data_has_one_scale():
    by_channel = np.ones(8, np.float32)
    with refused(ValueError, "x", "(8,)", "()"):
        conv2d(QTensor(X, by_channel))
    with refused(ValueError, "x", "(8,)", "()"):
        conv2d(FLOAT_X, x_scale=by_channel)


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize("wrap", [float, np.float32])
def test_values_of_scales(scale, wrap):
    for given in (
        {"x": FLOAT_X, "x_scale": wrap(scale)},
        {"w": FLOAT_W, "w_scale": wrap(scale)},
        {"w": FLOAT_W, "w_scale": np.array([1, 1, scale, 1], np.float32)},
        {"out_scale": wrap(scale)},
    ):
        with refused(ValueError, "scale", repr(next(reversed(given.values())))):
            conv2d(**given)


def test_outputs():
    with refused(ValueError, "float32", "out_scale"):
        conv2d(out_scale=0.5, out_dtype=jnp.float32)
    with refused(ValueError, "uint8", "out_scale"):
        conv2d(out_dtype=jnp.uint8)
    with refused(ValueError, "int32", "qconv2d"):
        conv2d(out_dtype=jnp.int32)
    with refused(ValueError, "int32", "multiplier"):
        qconv2d(out_dtype=jnp.int32)
    with refused(ValueError, "int32", "bias"):
        qconv2d(multiplier=None, bias=np.ones(4, np.float32), out_dtype=jnp.int32)
    with refused(ValueError, "multiplier"):
        qconv2d(multiplier=None)


def test_accumulator_that_could_overflow():
    channels = 131072 // 9 + 1
    x, w = np.ones((1, 3, 3, channels), np.int8), np.ones((3, 3, channels, 1), np.int8)
    with refused(ValueError, str(9 * channels), "131071"):
        qconv2d(x, w)


def test_tensors_beyond_what_a_kernel_addresses():
    """Refused at trace time, from shapes alone."""
    import jax

    x = jax.ShapeDtypeStruct((40000, 256, 256, 8), jnp.int8)
    with refused(ValueError, "(40000, 256, 256, 8)", str(2**31 - 1)):
        jax.eval_shape(lambda x: qconv2d(x), x)


def test_names_that_do_not_exist():
    with refused(TypeError, "stride"):
        conv2d(stride=2)


def test_tensors_of_axes_are_no_operands():
    with refused(TypeError, "x is a QTensor of axes or specs"):
        conv2d(QTensor(5, 0.1))
    with refused(TypeError, "w is a PackedKernel of axes or specs"):
        conv2d(w=jqconv.PackedKernel(0, None))
    with refused(TypeError, "of axes or specs"):
        jqconv.prepack(QTensor(0, None))


@pytest.mark.parametrize("name", ["multiplier", "out_multiplier", "residual_scale"])
def test_factors_are_finite_real_numbers_in_float32(name):
    options = {"residual": np.zeros(Y_SHAPE, np.int8)} if name == "residual_scale" else {}
    with refused(ValueError, name, "finite in float32", "1e+39"):
        qconv2d(**options, **{name: 1e39})
    for value in (np.complex64(1), jnp.complex64(1), np.bool_(True)):
        with refused(TypeError, name, "real number"):
            qconv2d(**options, **{name: value})


def test_padding_with_a_zero_point_is_checked_before_it_is_made():
    with refused(ValueError, "elements"):
        conv2d(QTensor(X, 0.5, zero_point=3), padding=60_000, strides=60_000)


@pytest.mark.parametrize("dtype", [None, "int9"])
def test_what_is_no_dtype_is_named(dtype):
    with refused(TypeError, "out_dtype must be a dtype", repr(dtype)):
        qconv2d(out_dtype=dtype)
    with refused(TypeError, "grad_dtype must be a dtype", repr(dtype)):
        conv2d(grad_dtype=dtype)
    with refused(TypeError, "dtype must be a dtype", repr(dtype)):
        jqconv.quantize(FLOAT_X, 0.5, dtype=dtype)


def test_a_slope_may_be_any_real_number():
    slope = ("leaky_relu", np.float32(0.5))
    assert jnp.array_equal(conv2d(activation=slope), conv2d(activation=("leaky_relu", 0.5)))
