"""Algorithms: their text form, what equality means, and how one is chosen and remembered."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import refused

import jqconv
from jqconv import Algorithm, ConvAlgorithms, _algorithm, _native
from jqconv._spec import Activation, ConvSpec

TEXTS = [
    "int8/sbr:eng4_k24=0@91900",
    "int8/s:eng12@91900",
    "int8/c:eng0_k5=1_k2=3,ws=7700480@91900",
    "bf16/c:eng1_k2=0_k3=11@91400",
    "fp16/c:eng0@91900",
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
        "int4/sbr:eng4@91900",
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


# Choosing, against a device that is only pretended.


class Device:
    device_kind = "Pretended GPU"
    compute_capability = "9.0"
    local_hardware_id = 0


@pytest.fixture
def pretended(monkeypatch):
    """A GPU whose cuDNN answers from a script; yields the questions that it was asked."""
    asked = []

    def resolve(spec, algorithm, device, workspace_limit):
        asked.append((spec, algorithm, device, workspace_limit))
        time.sleep(0.01)  # long enough for a second thread to come along
        if "w=int8:4,3,3,1 " in spec or algorithm.startswith("int8/s:eng77"):
            return "", "no engine"
        form = {"fprop": "int8/s", "dgrad": "bf16/c", "wgrad": "bf16/c"}
        direction = spec.split()[0].removeprefix("direction=")
        return algorithm or f"{form[direction]}:eng3_k1=2,ws=16@91900", ""

    monkeypatch.setattr(_native, "resolve", resolve)
    monkeypatch.setattr(_native, "is_built", lambda: True)
    monkeypatch.setattr(_native, "versions", lambda: {"cudnn": 91900})
    monkeypatch.setattr(_algorithm, "target_gpu", Device)
    monkeypatch.setattr(_algorithm, "_choices", _algorithm._Choices())
    return asked


def spec(k=4, **changes):
    return ConvSpec(
        **({"x_shape": (1, 4, 4, 4), "w_shape": (k, 3, 3, 4), "multiplier": "scalar"} | changes)
    )


def test_searches_once_for_each_spec_and_direction(pretended):
    specs = [spec(), spec(8), spec().backward("dgrad", "bfloat16"), spec(multiplier="channel")]
    for _ in range(10):
        chosen = [_algorithm.choose(s) for s in specs[:3]]
    assert jqconv.search_counts() == {"fprop": 2, "dgrad": 1, "wgrad": 0}
    assert [str(a) for a in chosen] == [
        "int8/s:eng3_k1=2,ws=16@91900",
        "int8/s:eng3_k1=2,ws=16@91900",
        "bf16/c:eng3_k1=2,ws=16@91900",
    ]
    assert chosen[0].source == "heuristic"
    _algorithm.choose(specs[3])
    assert jqconv.search_counts()["fprop"] == 3
    assert len(pretended) == 4


def test_every_part_of_the_epilogue_is_another_choice(pretended):
    changes = [
        {},
        {"bias": True},
        {"residual": "int8"},
        {"residual": "bfloat16"},
        {"residual": "int8", "residual_scale": True},
        {"activation": Activation.parse("relu")},
        {"activation": Activation.parse("silu")},
        {"out_multiplier": True},
        {"y_dtype": "float32"},
        {"strides": (2, 2)},
    ]
    for change in changes:
        _algorithm.choose(spec(**change))
    assert jqconv.search_counts()["fprop"] == len(changes)


def test_threads_share_one_search(pretended):
    barrier = threading.Barrier(8)

    def run():
        barrier.wait()
        _algorithm.choose(spec())

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert jqconv.search_counts()["fprop"] == 1
    assert len(pretended) == 1


def test_forgetting_searches_again(pretended):
    _algorithm.choose(spec())
    jqconv.clear_algorithms()
    assert jqconv.search_counts() == {"fprop": 0, "dgrad": 0, "wgrad": 0}
    _algorithm.choose(spec())
    assert jqconv.search_counts()["fprop"] == 1


def test_what_is_given_is_asked_for_and_not_searched(pretended):
    given = Algorithm.parse("int8/s:eng9_k1=0@91900")
    assert _algorithm.choose(spec(), given) == given
    assert jqconv.search_counts()["fprop"] == 0
    assert pretended[0][1] == str(given)


def test_a_missing_algorithm_is_named(pretended):
    with refused(ValueError, "int8/s:eng77@91900", "Pretended GPU", "no engine"):
        _algorithm.choose(spec(), Algorithm.parse("int8/s:eng77@91900"))


def test_without_an_engine_the_lax_lowering_runs(pretended):
    depthwise = spec(w_shape=(4, 3, 3, 1), groups=4)
    assert str(_algorithm.choose(depthwise)) == "xla"


def test_nothing_is_searched_for_an_empty_batch(pretended):
    assert str(_algorithm.choose(spec(x_shape=(0, 4, 4, 4)))) == "xla"
    assert not pretended


def test_without_a_gpu_the_choice_is_left_open(monkeypatch):
    monkeypatch.setattr(_algorithm, "target_gpu", lambda: None)
    before = dict(jqconv.search_counts())
    assert _algorithm.choose(spec()) is None
    assert dict(jqconv.search_counts()) == before


def test_backward_runs_what_forward_chose(pretended):
    """Traced, not run: the choices stand in the jaxpr, and each was searched for once."""

    def loss(x, w):
        return jnp.sum(jqconv.conv2d(x, w, x_scale=0.1, w_scale=0.1))

    args = jnp.ones((1, 4, 4, 4)), jnp.ones((3, 3, 4, 4))
    for _ in range(3):
        jax.clear_caches()
        text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*args))
    assert jqconv.search_counts() == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    for name, algorithm in [
        ("jqconv_fprop", "int8/s:eng3_k1=2,ws=16@91900"),
        ("jqconv_dgrad", "bf16/c:eng3_k1=2,ws=16@91900"),
        ("jqconv_wgrad", "bf16/c:eng3_k1=2,ws=16@91900"),
    ]:
        assert name in text
        assert algorithm in text
