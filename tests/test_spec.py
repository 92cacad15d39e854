"""ConvSpec: shapes, padding, the text form that the native side reads, and what it refuses."""

import dataclasses
import math

import oracle
import pytest
from checking import refused

from jqconv._spec import Activation, ConvSpec, as_padding, as_pair, output_size


def spec(**changes):
    fields = {"x_shape": (2, 9, 8, 6), "w_shape": (4, 3, 3, 6), "multiplier": "channel"}
    return ConvSpec(**(fields | changes))


@pytest.mark.parametrize(
    ("size", "window", "stride", "pad", "dilation", "expected"),
    [
        (8, 3, 1, (0, 0), 1, 6),
        (8, 3, 1, (1, 1), 1, 8),
        (8, 3, 2, (0, 1), 1, 4),
        (224, 7, 2, (3, 3), 1, 112),
        (9, 3, 1, (2, 2), 2, 9),
        (7, 1, 3, (0, 0), 1, 3),
        (2, 3, 1, (0, 0), 1, 0),
        (2, 7, 2, (0, 0), 1, 0),
        (0, 1, 1, (0, 0), 1, 0),
    ],
)
def test_output_size(size, window, stride, pad, dilation, expected):
    assert output_size(size, window, stride, pad, dilation) == expected


def test_output_shape_is_npqk():
    assert spec(strides=(2, 1), padding=((0, 1), (2, 3))).y_shape == (2, 4, 11, 4)


@pytest.mark.parametrize("size", [(7, 8), (1, 5), (10, 9)])
@pytest.mark.parametrize("window", [(3, 3), (1, 1), (2, 5)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_same_padding_is_tensorflows(size, window, strides, dilation):
    expected = oracle.same_padding(size, window, strides, dilation)
    assert as_padding("SAME", size, window, strides, dilation) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("VALID", ((0, 0), (0, 0))),
        ("valid", ((0, 0), (0, 0))),
        ("same", ((1, 1), (1, 1))),
        (1, ((1, 1), (1, 1))),
        ((1, 2), ((1, 1), (2, 2))),
        (((1, 2), (3, 4)), ((1, 2), (3, 4))),
        ([(0, 1), (2, 0)], ((0, 1), (2, 0))),
    ],
)
def test_padding_forms(given, expected):
    assert as_padding(given, (8, 8), (3, 3), (1, 1), (1, 1)) == expected


@pytest.mark.parametrize(
    "given", ["reflect", "REFLECT", -1, (1, -1), ((0, 1), (-1, 0)), (1, 2, 3), ((1, 2),), 1.5, None]
)
def test_bad_padding_is_named(given):
    with pytest.raises((ValueError, TypeError), match="padding"):
        as_padding(given, (8, 8), (3, 3), (1, 1), (1, 1))


@pytest.mark.parametrize("given", [0, -1, (1, 0), (1, 2, 3), 1.5, "2", True])
def test_bad_pair_is_named(given):
    with pytest.raises(ValueError, match="strides"):
        as_pair(given, "strides", 1)


def test_text_form_of_a_full_epilogue():
    full = ConvSpec(
        x_shape=(64, 28, 28, 128),
        w_shape=(128, 3, 3, 128),
        padding=((1, 1), (1, 1)),
        multiplier="channel",
        bias=True,
        residual="int8",
        residual_scale=True,
        activation=Activation.parse("relu"),
        out_multiplier=True,
    )
    assert str(full) == (
        "direction=fprop x=int8:64,28,28,128 w=int8:128,3,3,128 y=int8:64,28,28,128 "
        "strides=1,1 padding=1,1,1,1 dilation=1,1 groups=1 multiplier=channel bias=channel "
        "residual=int8 residual_scale=scalar activation=relu out_multiplier=scalar"
    )


def test_text_form_leaves_out_what_is_absent():
    raw = spec(
        multiplier=None,
        y_dtype="int32",
        strides=(2, 1),
        padding=((0, 1), (2, 3)),
        groups=2,
        w_shape=(4, 3, 3, 3),
    )
    assert str(raw) == (
        "direction=fprop x=int8:2,9,8,6 w=int8:4,3,3,3 y=int32:2,4,11,4 "
        "strides=2,1 padding=0,1,2,3 dilation=1,1 groups=2"
    )


def test_text_form_carries_the_slope_in_full():
    slope = 0.1 + 1e-17 + 1 / 3
    text = str(spec(activation=Activation.parse(("leaky_relu", slope))))
    token = next(t for t in text.split() if t.startswith("activation="))
    name, parameter = token.removeprefix("activation=").split(":")
    assert (name, float(parameter)) == ("leaky_relu", slope)


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_text_form_of_a_gradient_has_no_epilogue(direction):
    forward = spec(bias=True, activation=Activation.parse("relu"), padding=((1, 0), (0, 1)))
    assert str(forward.backward(direction, "bfloat16")) == (
        f"direction={direction} x=bfloat16:2,9,8,6 w=bfloat16:4,3,3,6 y=bfloat16:2,8,7,4 "
        "strides=1,1 padding=1,0,0,1 dilation=1,1 groups=1"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"x_shape": (3, 9, 8, 6)},
        {"w_shape": (4, 1, 3, 6)},
        {"strides": (2, 1)},
        {"padding": ((1, 0), (0, 0))},
        {"dilation": (1, 2)},
        {"y_dtype": "float32"},
        {"multiplier": "scalar"},
        {"bias": True},
        {"residual": "int8"},
        {"residual": "bfloat16", "residual_scale": True},
        {"activation": Activation.parse("relu")},
        {"activation": Activation.parse(("leaky_relu", 0.5))},
        {"out_multiplier": True},
    ],
    ids=str,
)
def test_every_field_is_in_the_key(change):
    base, other = spec(), spec(**change)
    assert base != other
    assert str(base) != str(other)
    assert hash(other) == hash(dataclasses.replace(other))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"w_shape": (4, 3, 3, 5)}, ["5", "6"]),
        ({"groups": 4}, ["groups=4", "6"]),
        ({"groups": 0}, ["groups=0"]),
        ({"groups": 2}, ["6", "3"]),
        ({"x_shape": (2, 9, 8, 0), "w_shape": (4, 3, 3, 0)}, ["(2, 9, 8, 0)"]),
        ({"y_dtype": "int16"}, ["int16"]),
        ({"residual": "int32"}, ["int32"]),
        ({"multiplier": None}, ["multiplier"]),
        ({"multiplier": None, "y_dtype": "int32", "bias": True}, ["int32", "bias"]),
        ({"x_shape": (60000, 200, 200, 6)}, ["(60000, 200, 200, 6)", "2147483647"]),
        ({"w_shape": (4, 30, 30, 180), "x_shape": (1, 40, 40, 180)}, ["162000", "131071"]),
    ],
    ids=str,
)
def test_contradictions_are_refused(change, words):
    with refused(ValueError, *words):
        spec(**change)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (None, None),
        ("relu", "relu"),
        ("relu6", "relu6"),
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("hard_swish", "hard_swish"),
        ("leaky_relu", "leaky_relu:0.01"),
        (("leaky_relu", 0.2), "leaky_relu:0.2"),
    ],
)
def test_activation_text(given, text):
    activation = Activation.parse(given)
    assert text == (None if activation is None else str(activation))


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("tanh", "tanh"),
        (("relu", 6.0), "relu"),
        (("leaky_relu", float("nan")), "nan"),
        (("leaky_relu", float("inf")), "inf"),
        (("leaky_relu", -0.5), "-0.5"),
        (("leaky_relu", 1.5), "1.5"),
    ],
)
def test_bad_activation_is_named(given, word):
    with pytest.raises(ValueError, match=word):
        Activation.parse(given)


@pytest.mark.parametrize(
    ("geometry", "window", "covered"),
    [
        ({}, (1, 1), 8 * 6),
        ({"strides": (2, 2)}, (1, 1), 4 * 3),
        ({"strides": (3, 3)}, (2, 2), 6 * 4),
        ({"padding": ((1, 1), (1, 1))}, (3, 3), 8 * 6),
        ({"strides": (2, 2), "padding": ((1, 1), (0, 0))}, (1, 1), 4 * 3),
        ({"dilation": (4, 1)}, (2, 2), 8 * 6),
        ({"dilation": (7, 5)}, (2, 2), 2 * 2),
    ],
    ids=str,
)
def test_bytes_that_no_window_covers_are_not_moved(geometry, window, covered):
    one = ConvSpec(x_shape=(2, 8, 6, 3), w_shape=(5, *window, 3), multiplier="scalar", **geometry)
    rest = 5 * math.prod(window) * 3 + math.prod(one.y_shape) + 4
    assert one.bytes_moved == 2 * covered * 3 + rest
    gradient = one.backward("dgrad", "bfloat16")
    assert gradient.bytes_moved == 2 * (2 * 8 * 6 * 3 + rest - 4)
