"""Algorithms: their text form, what equality means, and which convolutions they fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import refused

import jqconv
from jqconv import Algorithm, ConvAlgorithms

TEXTS = [
    "int8/sbr:eng4_k24=0@91900",
    "int8/s:eng12@91900",
    "int8/c:eng0_k5=1_k2=3,ws=7700480@91900",
    "bf16/c:eng1_k2=0_k3=11@91400",
    "fp16/c:eng0@91900",
    "padded64/sbr:eng4_k24=0@91900",
    "dense+padded_c128+widened/s:eng4_k24=26,ws=16@91900",
    "xla",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trip(text):
    algorithm = Algorithm.parse(text)
    assert str(algorithm) == text
    assert Algorithm.parse(str(algorithm)) == algorithm


def test_text_holds_every_field():
    assert Algorithm.parse("int8/sbzro:eng0_k5=1_k2=3,ws=7700480@91900") == Algorithm(
        form="int8",
        formulation="sbzro",
        engine=0,
        knobs=((5, 1), (2, 3)),
        workspace=7700480,
        cudnn=91900,
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "int8",
        "int8/sbr",
        "int8/sbr:eng4_k24=0",
        "int8/sbr:eng4_k24@91900",
        "int8/sbr:eng-1@91900",
        "int8/sbr:eng4,ws=@91900",
        "int8/sbr:eng4@91900 ",
        " int8/sbr:eng4@91900",
        "int8/SBR:eng4@91900",
        "/sbr:eng4@91900",
        "padded64+/sbr:eng4@91900",
        "+widened/sbr:eng4@91900",
        "dense++widened/sbr:eng4@91900",
        "dense widened/sbr:eng4@91900",
        "xla@91900",
        "int8/sbr:eng4@91900\n",
        "int8/sbr:eng٤@91900",
    ],
)
def test_other_texts_are_refused(text):
    with refused(ValueError, repr(text), "int8/sbr:eng4_k24=0@91900"):
        Algorithm.parse(text)


def test_equality_ignores_the_source():
    a, b = (Algorithm.parse(TEXTS[0], source) for source in ("user", "heuristic"))
    assert a.source != b.source
    assert a == b
    assert hash(a) == hash(b)
    assert str(a) == str(b)
    assert a != Algorithm.parse(TEXTS[1])


def test_source_causes_no_retrace():
    traces = []

    @jax.jit
    def run(x, algorithms):
        traces.append(algorithms)
        return x

    for source in ("user", "heuristic", "user"):
        run(1.0, ConvAlgorithms(fprop=Algorithm.parse(TEXTS[0], source)))
    assert len(traces) == 1


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Algorithm.parse("xla").engine = 3


def test_three_directions():
    algorithms = ConvAlgorithms(fprop=TEXTS[0], wgrad=Algorithm.parse(TEXTS[3]))
    assert str(algorithms.fprop) == TEXTS[0]
    assert algorithms.dgrad is None
    assert str(algorithms.wgrad) == TEXTS[3]
    assert jax.tree.leaves(algorithms) == []
    assert hash(algorithms) == hash(ConvAlgorithms(fprop=TEXTS[0], wgrad=TEXTS[3]))
    with refused(TypeError, "dgrad", "5"):
        ConvAlgorithms(dgrad=5)
    with refused(ValueError, "'fast'"):
        ConvAlgorithms(dgrad="fast")


def test_one_algorithm_is_that_of_fprop():
    for given in (TEXTS[0], Algorithm.parse(TEXTS[0]), ConvAlgorithms(fprop=TEXTS[0])):
        assert ConvAlgorithms.parse(given) == ConvAlgorithms(fprop=TEXTS[0])
    assert ConvAlgorithms.parse(None) == ConvAlgorithms()


@pytest.mark.parametrize("text", ["xla", "int8/sr:eng4_k24=0@91900"])
def test_algorithm_changes_no_result(rng, text):
    x = rng.integers(-128, 128, (1, 4, 4, 4)).astype(np.int8)
    w = rng.integers(-128, 128, (3, 3, 4, 4)).astype(np.int8)
    plain = jqconv.qconv2d(x, w, 2.0**-9, activation="relu")
    with jax.default_device(jax.devices("cpu")[0]):
        named = jqconv.qconv2d(x, w, 2.0**-9, activation="relu", algorithm=text)
    np.testing.assert_array_equal(named, plain)


@pytest.mark.parametrize(
    ("algorithms", "words"),
    [
        ({"fprop": "int8/sbr:eng4_k24=0@91900"}, ["fprop", "int8/sbr", "int8/sb:"]),
        ({"fprop": "int4/sb:eng4_k24=0@91900"}, ["fprop", "int4/sb", "int8/sb:", "padded16"]),
        ({"dgrad": "padded16/c:eng0@91900"}, ["dgrad", "padded16/c", "bf16/c"]),
        ({"dgrad": "int8/c:eng0@91900"}, ["dgrad", "int8/c", "bf16/c"]),
        ({"wgrad": "bf16/s:eng0@91900"}, ["wgrad", "bf16/s", "bf16/c"]),
        ({"wgrad": "fp16/c:eng0@91900"}, ["wgrad", "fp16/c", "bf16/c"]),
    ],
    ids=str,
)
def test_algorithms_of_another_convolution_are_refused(algorithms, words):
    def loss(w):
        x = jnp.ones((1, 4, 4, 4))
        options = {"x_scale": 0.1, "w_scale": 0.1, "algorithm": ConvAlgorithms(**algorithms)}
        return jnp.sum(jqconv.conv2d(x, w, jnp.zeros(4), **options))

    with refused(ValueError, *words):
        jax.grad(loss)(jnp.ones((3, 3, 4, 4)))
        jax.grad(lambda x: loss(jnp.ones((3, 3, 4, 4)) * x))(1.0)
        _dgrad_of_conv(algorithms)


def _dgrad_of_conv(algorithms):
    def loss(x):
        w = jnp.ones((3, 3, 4, 4))
        options = {"x_scale": 0.1, "w_scale": 0.1, "algorithm": ConvAlgorithms(**algorithms)}
        return jnp.sum(jqconv.conv2d(x, w, jnp.zeros(4), **options))

    jax.grad(loss)(jnp.ones((1, 4, 4, 4)))
