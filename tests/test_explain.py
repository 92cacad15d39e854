"""Collecting the convolutions of a function, and what is said of them."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checking import run_python

import jqconv
from jqconv import Algorithm, _choice, _collect, _explain
from jqconv._choice import Choice, Trial
from jqconv._spec import ConvSpec

X, W = np.ones((2, 8, 8, 16), np.float32), np.ones((3, 3, 16, 16), np.float32)


def scaled(x, w, **options):
    return jqconv.conv2d(x, w, x_scale=0.1, w_scale=0.1, **options)


def directions(fn, *args):
    return [(one.spec.direction, one.count) for one in _collect.convolutions(fn, *args)]


def test_repeated_convolutions_are_counted_once():
    found = _collect.convolutions(lambda x, w: scaled(scaled(x, w), w), X, W)
    assert [(one.count, one.pinned) for one in found] == [(2, False)]
    assert found[0].spec.x_shape == X.shape


def test_another_epilogue_is_another_convolution():
    assert len(_collect.convolutions(lambda x, w: scaled(scaled(x, w, activation="relu"), w), X, W))


@pytest.mark.parametrize("inside", ["jit", "scan", "cond", "while", "checkpoint", "vmap", "map"])
def test_convolutions_are_found_inside(inside):
    def fn(x, w):
        match inside:
            case "jit":
                return jax.jit(scaled)(x, w)
            case "scan":
                return jax.lax.scan(lambda c, _: (scaled(c, w), None), x, None, length=3)[0]
            case "cond":
                return jax.lax.cond(x.sum() > 0, lambda: scaled(x, w), lambda: x)
            case "while":
                return jax.lax.while_loop(lambda c: c.sum() > 0, lambda c: scaled(c, w), x)
            case "checkpoint":
                return jax.checkpoint(scaled)(x, w)
            case "vmap":
                return jax.vmap(lambda one: scaled(one[None], w))(x)
        return jax.lax.map(lambda one: scaled(one[None], w), x)

    assert directions(fn, X, W) == [("fprop", 1)]


def test_gradients_are_part_of_a_step():
    def step(x, w):
        return jax.grad(lambda x, w: jnp.sum(scaled(x, w)), (0, 1))(x, w)

    assert directions(step, X, W) == [("fprop", 1), ("dgrad", 1), ("wgrad", 1)]


def test_shapes_without_values_will_do():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, W)]
    assert directions(scaled, *shapes) == [("fprop", 1)]


def test_a_function_without_convolutions_has_an_empty_report():
    report = jqconv.explain(jnp.sin, 1.0)
    assert report.rows == ()
    assert "0 convolutions" in str(report)


def test_without_a_gpu_the_report_says_what_runs():
    report = jqconv.explain(scaled, X, W)
    (row,) = report.rows
    assert (row.algorithm, row.microseconds, row.percent_of_limit) == ("", None, None)
    assert "lax" in row.note
    assert report.microseconds is None
    assert "3x3 2x8x8x16->16" in str(report)


def test_without_a_gpu_tuning_says_so():
    with pytest.raises(RuntimeError, match="needs an NVIDIA GPU"):
        jqconv.tune(scaled, X, W)


class H200:
    device_kind = "NVIDIA H200"
    compute_capability = "9.0"
    local_hardware_id = 0


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is only pretended, with nothing chosen yet."""
    monkeypatch.setattr(_choice, "target_gpu", H200)
    monkeypatch.setattr(_choice._native, "is_built", lambda: True)
    monkeypatch.setattr(_choice._native, "versions", lambda: {"cudnn": 91900, "frontend": "1.28.0"})
    monkeypatch.setattr(_choice, "_choices", _choice._Choices())


def tuned(spec, text, microseconds, *trials):
    choice = Choice(Algorithm.parse(text, "tuned"), microseconds, trials)
    _choice._choices.replace(spec, H200(), choice)


@pytest.mark.usefixtures("gpu")
def test_what_is_not_chosen_says_what_to_do():
    (row,) = jqconv.explain(scaled, X, W).rows
    assert "jqconv.tune" in row.note
    assert row.floor_us > 0


@pytest.mark.usefixtures("gpu")
def test_what_was_tuned_shows_times_and_alternatives():
    (one,) = _collect.convolutions(scaled, X, W)
    text = "padded64/s:eng4_k24=5@91900"
    with jqconv.config.using(search="tune"):
        tuned(
            one.spec,
            text,
            10.0,
            Trial("int8/s:eng1@91900", 40.0),
            Trial(text, 6.0),
            Trial(text, 10.0, whole=True),
            Trial("int8/s:eng1@91900", 41.0, whole=True),
        )
        report = jqconv.explain(scaled, X, W)
        (row,) = report.rows
        assert (row.algorithm, row.source, row.microseconds) == (text, "tuned", 10.0)
        assert "fastest of 2 plans in 2 forms" in row.note
        assert "its plan alone 6.0 us" in row.note
        assert "next form int8 41.0 us" in row.note
        assert report.microseconds == 10.0
        html = report._repr_html_()
        assert text in html
        assert html.count("<tr>") == 2


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("options", "x", "said"),
    [
        ({"algorithm": "xla"}, X, "named by the caller"),
        ({}, X[:0], "nothing to compute"),
    ],
)
def test_every_row_has_a_reason(options, x, said):
    (row,) = jqconv.explain(lambda x, w: scaled(x, w, **options), x, W).rows
    assert said in row.note


@pytest.mark.usefixtures("gpu")
def test_gradients_in_float32_say_why_cudnn_does_not_run_them():
    def step(w):
        return jax.grad(lambda w: jnp.sum(scaled(X, w, grad_dtype=jnp.float32)))(w)

    rows = {row.spec.direction: row for row in jqconv.explain(step, W).rows}
    assert "no kernel for float32" in rows["wgrad"].note


def test_the_floor_is_bytes_or_operations_whichever_is_longer():
    limits = _explain.Limits(bytes_per_second=1e12, int8=1e15, half=1e14)
    spec = ConvSpec(x_shape=(1, 10, 10, 100), w_shape=(100, 1, 1, 100), multiplier="scalar")
    moved = 10_000 + 10_000 + 10_000 + 4
    assert _explain.floor_us(spec, limits) == (pytest.approx(moved / 1e6), "memory")
    slow = dataclasses.replace(limits, int8=1e12)
    assert _explain.floor_us(spec, slow) == (pytest.approx(2 * 100 * 100 * 100 / 1e6), "compute")
    half = dataclasses.replace(limits, half=1e12)
    backward = spec.backward("dgrad", "bfloat16")
    assert _explain.floor_us(backward, half) == (pytest.approx(2.0), "compute")
    assert _explain.floor_us(spec, None) == (None, "-")


@pytest.mark.parametrize(
    ("kind", "int8"),
    [
        ("NVIDIA H200", 1979e12),
        ("NVIDIA H200 NVL", 1671e12),
        ("NVIDIA A100-SXM4-40GB", 624e12),
        ("NVIDIA L40S", 733e12),
        ("NVIDIA L40", 362e12),
        ("NVIDIA L4", 242e12),
    ],
)
def test_limits_are_found_by_the_device_s_name(kind, int8):
    assert _explain.limits_of(kind).int8 == int8


def test_an_unknown_device_has_no_limits():
    assert _explain.limits_of("TPU v9") is None
    assert _explain.limits_of("NVIDIA GH200 480GB") is None


@pytest.mark.usefixtures("gpu")
def test_the_roofline_shows_every_timed_convolution():
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("agg")
    (one,) = _collect.convolutions(scaled, X, W)
    with jqconv.config.using(search="tune"):
        with pytest.raises(ValueError, match="was timed"):
            jqconv.explain(scaled, X, W).plot()
        tuned(one.spec, "int8/s:eng4@91900", 10.0)
        ax = jqconv.explain(scaled, X, W).plot()
    (points,) = ax.collections
    operations = 2 * 2 * 8 * 8 * 16 * 9 * 16
    np.testing.assert_allclose(points.get_offsets()[0][1], operations / 10e-6)
    plt.close(ax.figure)


def test_the_module_reports_and_tests_itself():
    done = run_python("-m", "jqconv", "--store")
    assert done.returncode == 0, done.stderr
    for section in ("installed:", "device:", "handlers:", "settings:", "store:", "self-test:"):
        assert section in done.stdout
    assert "passed on" in done.stdout
    assert f"in {pathlib.Path(jqconv.__file__).parent}" in done.stdout
    assert "cannot be written" not in done.stdout


def test_the_module_says_that_its_store_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    done = run_python("-m", "jqconv", JQCONV_CACHE_DIR=str(tmp_path / "file" / "store"))
    assert done.returncode == 0, done.stderr
    assert "store, which cannot be written: " in done.stdout


def test_static_arguments_are_those_of_the_jitted_function():
    def model(x, w, act):
        return scaled(x, w, activation="relu" if act else None)

    (row,) = jqconv.explain(jax.jit(model, static_argnums=2), X, W, True).rows
    assert str(row.spec.activation) == "relu"


def test_eager_calls_work_without_jit():
    with jax.disable_jit():
        assert scaled(X, W).shape == (2, 8, 8, 16)
