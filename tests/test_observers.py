"""Observers, against NumPy on all the values at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jqconv.flax import MSE, AbsMax, MovingAverage, Percentile
from jqconv.flax._observers import OBSERVERS, as_observer, kernel_scale


def observe(observer, batches):
    update = jax.jit(observer.update)
    state = observer.init()
    for batch in batches:
        state = update(state, jnp.asarray(batch, jnp.float32))
    return float(observer.scale(state))


def draw(rng, sizes=(1000, 500, 2000), grows=True):
    return [
        (rng.standard_t(3, size) * (i + 1 if grows else 1)).astype(np.float32)
        for i, size in enumerate(sizes)
    ]


def test_absmax_is_the_largest_magnitude(rng):
    batches = draw(rng)
    want = max(np.abs(batch).max() for batch in batches) / 127
    assert observe(AbsMax(), batches) == pytest.approx(want)


def test_moving_average_weighs_later_batches_more(rng):
    batches = draw(rng)
    largest = [np.abs(batch).max() for batch in batches]
    weights = [0.1 * 0.9**age for age in (2, 1, 0)]
    want = np.average(largest, weights=weights) / 127
    assert observe(MovingAverage(0.9), batches) == pytest.approx(want, rel=1e-5)
    assert observe(MovingAverage(0.0), batches) == pytest.approx(largest[-1] / 127, rel=1e-5)


@pytest.mark.parametrize("name", OBSERVERS)
def test_an_empty_batch_says_nothing(rng, name):
    batches, observer = draw(rng), as_observer(name)
    assert observe(observer, [*batches, np.zeros((0, 3))]) == observe(observer, batches)


@pytest.mark.parametrize("percent", [50, 99, 99.9, 100])
def test_percentile_is_that_of_all_magnitudes(rng, percent):
    batches = draw(rng)
    magnitudes = np.abs(np.concatenate(batches))
    want = np.percentile(magnitudes, percent, method="inverted_cdf")
    bin_width = 2 ** np.ceil(np.log2(magnitudes.max())) / 2048
    assert abs(observe(Percentile(percent), batches) * 127 - want) <= bin_width * 1.001


def test_the_whole_of_many_values_has_the_one_that_is_large():
    observer = Percentile(100)
    state = observer.update(observer.init(), jnp.full(2**25, 0.001))
    state = observer.update(state, jnp.array([1000.0]))
    assert float(observer.limit(state)) >= 1000


def squared_error(values, scale):
    codes = np.clip(np.round(values / scale), -127, 127)
    return np.sum((values - codes * scale) ** 2)


def test_mse_is_as_good_as_the_best_of_many_scales(rng):
    batches = draw(rng, sizes=(20000,), grows=False)
    values = batches[0].astype(np.float64)
    found = squared_error(values, observe(MSE(), batches))
    tried = np.abs(values).max() / 127 * np.linspace(0.02, 1, 300)
    best = min(squared_error(values, scale) for scale in tried)
    assert found <= 1.03 * best
    assert found < squared_error(values, np.abs(values).max() / 127)


def test_mse_clips_nothing_where_all_values_are_alike():
    values = np.tile([1.0, -1.0], 500)
    assert observe(MSE(), [values]) * 127 == pytest.approx(1.0, rel=2e-3)


@pytest.mark.parametrize("name", OBSERVERS)
def test_batches_in_another_order_or_at_once_give_the_same(rng, name):
    if name == "moving_average":
        pytest.skip("the order is its point")
    observer = as_observer(name)
    batches = draw(rng)
    want = observe(observer, [np.concatenate(batches)])
    assert observe(observer, batches) == pytest.approx(want)
    assert observe(observer, batches[::-1]) == pytest.approx(want)


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("batches", [[], [[0.0, 0.0]], [[]]], ids=["nothing", "zeros", "empty"])
def test_nothing_to_see_gives_scale_1(name, batches):
    assert observe(as_observer(name), batches) == 1


@pytest.mark.parametrize("name", OBSERVERS)
@pytest.mark.parametrize("size", [2e-36, 1e-20, 1e-3, 1e4, 1e20, 4e37])
def test_any_magnitude_will_do(rng, name, size):
    scale = observe(as_observer(name), [np.clip(rng.normal(size=1000), -2, 2) * size])
    assert 0.5 * size < scale * 127 < 2.01 * size


@pytest.mark.parametrize("name", OBSERVERS)
def test_next_to_nothing_gives_scale_1(name):
    """Its scale would be 0 to XLA, and the logarithm of that no parameter."""
    assert observe(as_observer(name), [np.full(10, 1e-37)]) == 1


@pytest.mark.parametrize("name", OBSERVERS)
def test_half_precision_is_observed_in_float32(rng, name):
    values = rng.normal(size=1000).astype(jnp.bfloat16)
    observer = as_observer(name)
    state = observer.update(observer.init(), jnp.asarray(values))
    assert state.dtype == jnp.float32
    want = observe(observer, [values.astype(np.float32)])
    assert float(observer.scale(state)) == pytest.approx(want)


def test_a_kernel_has_one_scale_for_each_output_channel(rng):
    kernel = rng.normal(size=(3, 3, 4, 5)).astype(np.float32) * np.arange(1, 6)
    scale = kernel_scale(jnp.asarray(kernel), AbsMax(), per_channel=True)
    np.testing.assert_allclose(scale, np.abs(kernel).max((0, 1, 2)) / 127, rtol=1e-6)
    scale = kernel_scale(jnp.asarray(kernel), AbsMax(), per_channel=False)
    np.testing.assert_allclose(scale, np.abs(kernel).max() / 127, rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: MovingAverage(1.0), "momentum=1.0"),
        (lambda: Percentile(0), "percent=0"),
        (lambda: Percentile(101), "percent=101"),
        (lambda: as_observer("max"), "absmax, moving_average, percentile, mse"),
        (lambda: as_observer(MSE), r"such as Percentile\(99\.9\)"),
        (lambda: as_observer(["mse"]), "is unknown"),
    ],
)
def test_bad_options_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_more_values_are_counted_than_float32_has_ones():
    observer = Percentile(50)
    state = observer.init().at[0].set(1.0).at[1].set(2.0**24)
    state = observer.update(state, jnp.full(1000, 1e-6))
    assert float(state[1]) == 2**24 + 1000
