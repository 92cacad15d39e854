"""Forms: every one computes the numbers of the convolution as it is."""

import dataclasses

import jax
import numpy as np
import pytest
from checking import refused

from jqconv import _forms, _reference
from jqconv._algorithm import Algorithm, check_legal, core_of
from jqconv._spec import Activation, ConvSpec

SPECS = {
    "odd channels": {"x_shape": (2, 7, 6, 5), "w_shape": (3, 3, 3, 5)},
    "many odd channels": {"x_shape": (1, 4, 4, 100), "w_shape": (129, 1, 1, 100)},
    "one channel": {"x_shape": (2, 5, 5, 1), "w_shape": (1, 3, 3, 1)},
    "stem": {"x_shape": (1, 17, 16, 3), "w_shape": (8, 7, 7, 3), "strides": (2, 2)},
    "stride 3 and 2": {"x_shape": (2, 16, 13, 2), "w_shape": (4, 2, 5, 2), "strides": (3, 2)},
    "stride past the window": {"x_shape": (1, 9, 9, 4), "w_shape": (4, 1, 1, 4), "strides": (3, 3)},
    "groups": {"x_shape": (2, 5, 6, 8), "w_shape": (12, 3, 3, 2), "groups": 4},
    "depthwise": {"x_shape": (1, 6, 6, 6), "w_shape": (6, 3, 3, 1), "groups": 6},
    "depthwise, two each": {"x_shape": (1, 6, 6, 3), "w_shape": (6, 3, 3, 1), "groups": 3},
    "dilated": {"x_shape": (1, 9, 9, 6), "w_shape": (2, 3, 3, 6), "dilation": (2, 1)},
}


def spec_of(name, **changes):
    epilogue = {
        "multiplier": "channel",
        "bias": True,
        "residual": "int8",
        "residual_scale": True,
        "activation": Activation("relu"),
        "padding": ((1, 2), (0, 3)),
    }
    return ConvSpec(**(epilogue | SPECS[name] | changes))


def operands_of(spec, rng):
    """Codes of the whole range, and scales that are powers of two: no order of sums matters."""

    def draw(name, shape, dtype):
        if dtype == "int8":
            return rng.integers(-128, 128, shape).astype(np.int8)
        scale = {"multiplier": 2.0**-7, "residual_scale": 0.5, "out_multiplier": 0.25}.get(name)
        return np.asarray(rng.integers(-16, 17, shape) if scale is None else scale * np.ones(shape))

    return {
        name: draw(name, shape, dtype).astype(jax.numpy.dtype(dtype))
        for name, (shape, dtype) in spec.operands.items()
    }


def run(spec, form, operands):
    presentation = _forms.present(spec, form)
    core = presentation.core
    prepared = presentation.prepare({k: jax.numpy.asarray(v) for k, v in operands.items()})
    assert {k: (v.shape, v.dtype.name) for k, v in prepared.items()} == core.operands
    if core.x_dtype == "bfloat16":  # which the reference does not take: the values are integers
        core = dataclasses.replace(core, x_dtype="int8", w_dtype="int8")
        prepared |= {name: prepared[name].astype("int8") for name in "xw"}
    return presentation.finish(_reference.fprop(core, *_forms.in_order(core, prepared)))


@pytest.mark.parametrize("name", SPECS)
def test_every_form_gives_the_same_codes(rng, name):
    spec = spec_of(name)
    operands = operands_of(spec, rng)
    want = np.asarray(_reference.fprop(spec, *operands.values()))
    assert want.std() > 1
    forms = _forms.forms(spec)
    assert len(forms) > 1
    for form in forms:
        np.testing.assert_array_equal(run(spec, form, operands), want, err_msg=form)


@pytest.mark.parametrize("y_dtype", ["uint8", "bfloat16", "float32"])
def test_forms_keep_the_output_dtype(rng, y_dtype):
    spec = spec_of("groups", y_dtype=y_dtype, residual="bfloat16")
    operands = operands_of(spec, rng)
    want = np.asarray(_reference.fprop(spec, *operands.values()))
    for form in _forms.forms(spec):
        got = np.asarray(run(spec, form, operands))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want, err_msg=form)


def test_the_accumulator_is_never_widened(rng):
    raw = {"multiplier": None, "bias": False, "residual": None, "residual_scale": False}
    spec = spec_of("groups", y_dtype="int32", activation=None, **raw)
    forms = _forms.forms(spec)
    assert not any("widened" in form for form in forms)
    operands = operands_of(spec, rng)
    want = np.asarray(_reference.fprop(spec, *operands.values()))
    for form in forms:
        np.testing.assert_array_equal(run(spec, form, operands), want, err_msg=form)


def test_widening_stops_where_float32_sums_are_no_longer_exact():
    fits = {"x_shape": (1, 4, 4, 128), "w_shape": (4, 4, 2, 128)}  # 1024 products
    beyond = {"x_shape": (1, 4, 4, 129), "w_shape": (4, 4, 2, 129)}
    assert any("widened" in f for f in _forms.forms(spec_of("stem", strides=(1, 1), **fits)))
    assert not any("widened" in f for f in _forms.forms(spec_of("stem", strides=(1, 1), **beyond)))


def test_zeros_that_a_form_adds_do_not_count_as_products():
    # 576 groups of one channel make 5,184 products dense, all but 9 of them zeros.
    spec = spec_of("depthwise", x_shape=(1, 6, 6, 576), w_shape=(576, 3, 3, 1), groups=576)
    assert "dense+widened" in _forms.forms(spec)


def test_plain_channels_have_no_padded_form():
    spec = spec_of("groups", x_shape=(1, 5, 5, 128), w_shape=(256, 3, 3, 128), groups=1)
    assert _forms.forms(spec) == ["int8"]


def test_paddings_that_come_to_the_same_are_one_form():
    spec = spec_of("groups", x_shape=(1, 5, 5, 100), w_shape=(128, 1, 1, 100), groups=1)
    padded = {form for form in _forms.forms(spec) if "widened" not in form}
    assert padded == {"int8", "padded16", "padded128"}  # 112 and 128 input channels


def test_gradients_have_the_plain_form_alone():
    spec = spec_of("odd channels")
    assert _forms.forms(spec.backward("dgrad", "bfloat16")) == ["bf16"]
    assert _forms.forms(spec.backward("wgrad", "float16")) == ["fp16"]
    assert _forms.forms(spec.backward("wgrad", "float32")) == []


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("odd channels", "dense"),
        ("odd channels", "space_to_depth"),
        ("odd channels", "padded7"),
        ("odd channels", "int8+padded16"),
        ("groups", "padded16"),
        ("groups", "widened+widened"),
        ("groups", "quick"),
        ("dilated", "bf16"),
    ],
)
def test_a_form_that_does_not_fit_is_refused(name, form):
    spec = spec_of(name)
    with pytest.raises(ValueError, match="does not fit"):
        _forms.present(spec, form)
    with refused(ValueError, form, "fprop"):
        check_legal(spec, Algorithm.parse(f"{form}/{spec.formulation}:eng4@91900"))


def test_the_core_of_an_algorithm_is_what_the_handler_takes():
    spec = spec_of("stem", padding=((3, 3), (3, 3)))
    algorithm = Algorithm.parse("space_to_depth+widened/szbr:eng4_k24=26@91900")
    check_legal(spec, algorithm)
    core, named = core_of(spec, algorithm)
    assert core.x_dtype == core.w_dtype == "bfloat16"
    assert (core.strides, core.w_shape) == ((1, 1), (8, 4, 4, 12))
    assert str(named) == "bf16/szbr:eng4_k24=26@91900"


def random_spec(rng):
    """Any convolution at all: groups, strides and dilation together, windows of every size."""
    groups = int(rng.choice([1, 1, 2, 3, 8, 1366]))
    c_group, k_group = (int(rng.integers(1, 3 if groups > 8 else 20)) for _ in "ck")
    window, strides, dilation = (tuple(map(int, rng.integers(1, n, 2))) for n in (8, 4, 3))
    return ConvSpec(
        x_shape=(int(rng.integers(0, 3)), *map(int, rng.integers(1, 24, 2)), groups * c_group),
        w_shape=(groups * k_group, *window, c_group),
        strides=strides,
        dilation=dilation,
        padding=((int(rng.integers(0, 4)), 0), (1, int(rng.integers(0, 4)))),
        groups=groups,
        multiplier="channel",
    )


def test_any_convolution_has_its_forms(rng):
    refusals = []
    for _ in range(500):
        spec = random_spec(rng)
        for form in _forms.forms(spec):
            assert _forms.present(spec, form).core.y_shape[:3] == spec.y_shape[:3]
        for name in ("padded64", "dense+widened", "space_to_depth"):
            try:
                check_legal(spec, Algorithm.parse(f"{name}/s:eng4@91900"))
            except ValueError as error:
                refusals.append(str(error))
    assert refusals
    assert all("does not fit fprop" in refusal for refusal in refusals)


@pytest.mark.parametrize(
    "spec",
    [
        ConvSpec(x_shape=(1, 7, 7, 768), w_shape=(768, 7, 7, 1), groups=768, multiplier="channel"),
        ConvSpec(
            x_shape=(1, 9, 9, 1152), w_shape=(1152, 5, 5, 1), groups=1152, multiplier="scalar"
        ),
        ConvSpec(
            x_shape=(1, 9, 9, 8),
            w_shape=(8, 3, 3, 4),
            groups=2,
            strides=(2, 2),
            multiplier="scalar",
        ),
    ],
    ids=["ConvNeXt", "EfficientNet", "strided groups"],
)
def test_a_form_that_does_not_fit_leaves_the_others(spec):
    forms = _forms.forms(spec)
    assert forms[0] == "int8"
    assert "space_to_depth" not in forms
    assert ("dense" in forms) == (spec.groups == 2)


def test_forms_need_no_rank_promotion(rng):
    spec = spec_of("groups")
    operands = operands_of(spec, rng)
    with jax.numpy_rank_promotion("raise"):
        run(spec, "dense", operands)
