"""The timed search, the forms and the store, on the device."""

import collections
import dataclasses
import json
import warnings

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from checking import assert_same_codes, run_python
from problems import GEOMETRIES, Form, covering_forms, draw_problem, is_exact

import jqconv
from jqconv import Algorithm, _choice, _collect, _forms, _native, _policy, _search
from jqconv._algorithm import runs_on_cudnn

pytestmark = pytest.mark.gpu

RELU = Form("relu", "int8", "int8", "channel", bias=True, residual_scale=True)


def first_algorithm(spec, form="int8", formulation=None):
    """cuDNN's first plan for `spec` in a form, and in an order of its epilogue."""
    core = _forms.present(spec, form).core
    limit = _policy.settings().workspace_limit
    text, reason = _native.resolve(str(core), "", 0, limit)
    assert text, reason
    algorithm = Algorithm.parse(text)
    if formulation is not None:
        algorithm = dataclasses.replace(algorithm, formulation=formulation, workspace=0)
        text, reason = _native.resolve(str(core), str(algorithm), 0, limit)
        assert text, reason
    return dataclasses.replace(Algorithm.parse(text), form=form)


def solve(problem, **options):
    return jqconv.qconv2d(*problem.operands, **problem.options, **options)


# Forms.

FORM_GEOMETRIES = [
    "asymmetric",
    "stem",
    "batch_1_channels_129",
    "groups_2",
    "groups_32",
    "depthwise",
    "depthwise_doubled",
    "one_channel",
    "stride_beyond_window",
]


@pytest.mark.parametrize("name", FORM_GEOMETRIES)
def test_every_form_is_exact(rng, name):
    x_shape, kernel, k, geometry = GEOMETRIES[name]
    problem = draw_problem(rng, RELU, x_shape=x_shape, kernel=kernel, k=k, geometry=geometry)
    spec, answer = problem.spec, problem.answer
    forms = [f for f in _forms.forms(spec) if runs_on_cudnn(_forms.present(spec, f).core)]
    assert len(forms) > 1
    ran = 0
    for form in forms:
        if form == "widened" and spec.groups > 1:
            continue  # grouped bf16 engines are not everywhere; the search finds out
        algorithm = first_algorithm(spec, form)
        assert_same_codes(solve(problem, algorithm=algorithm), answer)
        ran += 1
    assert ran > 0


OTHER_ORDERS = [form for form in covering_forms() if form.bias and form.residual]


@pytest.mark.parametrize("form", [f for f in OTHER_ORDERS if is_exact(f.activation)], ids=str)
def test_every_other_order_of_the_epilogue_is_exact(rng, form):
    problem = draw_problem(rng, form, x_shape=(2, 6, 5, 32), k=32)
    (_, other) = problem.spec.formulations
    algorithm = first_algorithm(problem.spec, formulation=other)
    y = solve(problem, algorithm=algorithm)
    if form.output in ("int8", "uint8"):
        assert_same_codes(y, problem.answer, form.output)
    else:
        want = jnp.asarray(problem.answer, jnp.float32).astype(form.output)
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, np.float32))


def test_plans_that_the_heuristic_never_proposes_are_exact(rng):
    problem = draw_problem(rng, RELU, x_shape=(2, 9, 8, 64), k=128)
    first = first_algorithm(problem.spec)
    ran = 0
    for value in _search._UNPROPOSED:
        knobs = ((_search._KNOB, value),)
        named = dataclasses.replace(first, engine=_search._ENGINE, knobs=knobs, workspace=0)
        text, _ = _native.resolve(str(problem.spec), str(named), 0, 2**30)
        if text:
            assert_same_codes(solve(problem, algorithm=Algorithm.parse(text)), problem.answer)
            ran += 1
    assert ran > 0


# Searching by time.


@pytest.fixture
def tuning(tmp_path):
    """The default settings, with a store of the test's own."""
    jqconv.clear_algorithms()
    with jqconv.config.using(search="tune", cache_dir=str(tmp_path)):
        yield tmp_path
    jqconv.clear_algorithms()


def test_a_search_builds_nothing_twice(tuning, rng, monkeypatch):
    """However small the cache of plans is."""
    asked = []

    def resolve(*args):
        asked.append(args)
        return resolve_natively(*args)

    resolve_natively = _native.resolve
    monkeypatch.setattr(_native, "resolve", resolve)
    extension = _native.extension()
    extension.cache_clear()
    before = extension.cache_info()
    try:
        extension.cache_resize(1)
        _search.search(draw_problem(rng, RELU, x_shape=(2, 6, 5, 32), k=32).spec, jax.devices()[0])
        after = extension.cache_info()
    finally:
        extension.cache_resize(before["capacity"])
    assert after["misses"] - before["misses"] <= len(asked)
    assert after["entries"] <= 1


def scaled(x, w):
    return jqconv.conv2d(x, w, x_scale=0.02, w_scale=0.01, activation="relu")


X = np.random.default_rng(0).normal(size=(2, 8, 8, 32)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 3, 32, 32)).astype(np.float32)


def test_first_use_tunes_wherever_it_happens(tuning):
    """In jit, under grad, in scan and in vmap; and never where nothing runs."""

    def looped(x, w):
        def body(carry, _):
            return scaled(carry, w), None

        return jax.lax.scan(body, x, None, length=2)[0]

    def loss(x, w):
        return jnp.sum(looped(x, w)) + jnp.sum(jax.vmap(scaled, (0, None))(x[:, None], w))

    step = jax.value_and_grad(loss, (0, 1))
    jax.make_jaxpr(step)(X, W)
    jax.eval_shape(step, X, W)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"jqconv_{direction}_v1")
        for direction in ("fprop", "dgrad", "wgrad")
    ]
    jax.export.export(jax.jit(step), disabled_checks=checks)(X, W)
    assert sum(jqconv.search_counts().values()) == 0

    run = jax.jit(step)
    value, (dx, dw) = run(X, W)
    counts = jqconv.search_counts()
    specs = {one.spec for one in _collect.convolutions(step, X, W)}
    distinct = collections.Counter(spec.direction for spec in specs)
    assert counts == distinct
    assert set(distinct) == {"fprop", "dgrad", "wgrad"}
    run(X, W)
    jax.clear_caches()  # JAX keeps traces, which show what was known when they were made
    assert "algorithm=None" not in str(jax.make_jaxpr(step)(X, W))
    again, (_, dw2) = jax.jit(step)(X, W)
    assert jqconv.search_counts() == counts
    np.testing.assert_array_equal(value, again)
    np.testing.assert_array_equal(dw, dw2)

    with jax.default_device(jax.devices("cpu")[0]):
        want, (dx0, dw0) = jax.jit(step)(X, W)
    np.testing.assert_allclose(value, want, rtol=1e-3)
    np.testing.assert_allclose(dx, dx0, atol=2e-2 * np.abs(dx0).max())
    np.testing.assert_allclose(dw, dw0, atol=2e-2 * np.abs(dw0).max())


def test_tuned_and_cached_runs_lower_to_the_same_program(tuning):
    tuned = jax.jit(scaled).lower(X, W).as_text()
    assert jqconv.search_counts()["fprop"] == 1
    jqconv.clear_algorithms()
    cached = jax.jit(scaled).lower(X, W).as_text()
    assert jqconv.search_counts()["fprop"] == 0
    assert cached == tuned
    assert "eng" in tuned


def test_settings_take_effect_in_a_jitted_function(tuning):
    run = jax.jit(scaled)
    with jqconv.config.using(search="heuristic"):
        run(X, W)
        assert jqconv.search_counts()["fprop"] == 1
    run(X, W)
    assert jqconv.search_counts()["fprop"] == 2
    with jqconv.config.using(search="cached", cache_dir=""):
        run(X, W)  # known to this process
        jqconv.clear_algorithms()
        with pytest.raises(RuntimeError, match="direction=fprop"):
            run(X, W)


def test_the_search_never_chooses_what_is_slower_than_the_heuristic(tuning):
    spec = draw_problem(
        np.random.default_rng(0), Form("relu"), x_shape=(16, 28, 28, 128), k=128
    ).spec
    choice = _search.search(spec, jax.devices()[0])
    first = first_algorithm(spec)
    times = {trial.algorithm: trial.microseconds for trial in choice.trials}
    assert str(choice.algorithm) in times
    assert choice.microseconds <= 1.02 * times[str(first)]
    assert len(times) > 9  # more than the heuristic's own


def test_tune_and_explain(tuning):
    def step(x, w):
        return jax.grad(lambda w: jnp.sum(scaled(scaled(x, w), w)))(w)

    before = jqconv.explain(step, X, W)
    assert {row.algorithm for row in before.rows} == {""}
    report = jqconv.tune(step, X, W, progress=False)
    assert [row.spec for row in report.rows] == [row.spec for row in before.rows]
    assert {row.source for row in report.rows} == {"tuned"}
    assert all(row.microseconds > 0 for row in report.rows)
    assert report.microseconds > 0
    searched = jqconv.search_counts()
    jax.jit(step)(X, W)
    assert jqconv.search_counts() == searched
    assert "fastest of" in str(report)
    assert str(report) == str(jqconv.explain(step, X, W))


# The store, across processes.

CHILD = """
import json, sys, warnings
import jax, jax.numpy as jnp, numpy as np
import jqconv
x = np.random.default_rng(0).normal(size=(2, 8, 8, 32)).astype(np.float32)
w = np.random.default_rng(1).normal(size=(3, 3, 32, 32)).astype(np.float32)
step = jax.jit(jax.grad(lambda w: jnp.sum(jqconv.conv2d(x, w, x_scale=0.02, w_scale=0.01) ** 2)))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        dw = step(w)
    from jqconv import _native
    _native.report_warnings()
print(json.dumps({
    "searches": dict(jqconv.search_counts()),
    "sum": np.asarray(dw).tobytes().hex()[:64] + str(float(jnp.sum(jnp.abs(dw)))),
    "algorithms": [row.algorithm for row in jqconv.explain(step, w).rows],
    "warnings": [str(w.message) for w in caught if "jqconv" in str(w.message)
                 or "stored plan" in str(w.message)],
}))
"""


def child(cache_dir, **settings):
    environment = {
        "JQCONV_CACHE_DIR": str(cache_dir),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **{f"JQCONV_{name.upper()}": value for name, value in settings.items()},
    }
    done = run_python("-c", CHILD, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_second_process_searches_nothing(tmp_path):
    first = child(tmp_path, search="tune")
    second = child(tmp_path, search="tune")
    assert sum(first["searches"].values()) == 2  # fprop and wgrad
    assert sum(second["searches"].values()) == 0
    assert second["algorithms"] == first["algorithms"]
    assert second["sum"] == first["sum"]
    assert not first["warnings"]
    assert not second["warnings"]


def test_deterministic_processes_agree_without_a_common_store(tmp_path):
    runs = [child(tmp_path / str(i), search="tune", deterministic="1") for i in range(2)]
    assert runs[0]["sum"] == runs[1]["sum"]
    assert runs[0]["algorithms"] == runs[1]["algorithms"]
    assert sum(runs[1]["searches"].values()) == 2


def test_a_stored_plan_that_does_not_load_is_built_anew(tuning):
    spec = draw_problem(np.random.default_rng(0), Form("relu"), x_shape=(2, 6, 5, 32), k=32).spec
    device = jax.devices()[0]
    with jqconv.config.using(search="heuristic"):
        algorithm = _choice.get(spec, device).algorithm
        store = _policy.store()
        (plan,) = [e for e in store.entries() if e.record["kind"] == "plan"]
        blob = store.get(plan.key).blob
        for bad in (b"", b"no plan", blob[: len(blob) // 2], blob[:-40] + bytes(40)):
            store.put(plan.key, plan.record, bad)
            _native.extension().cache_clear()
            _native.extension().take_warnings()
            text, reason = _native.resolve(str(spec), str(algorithm), 0, 2**25)
            assert text == str(algorithm), reason
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                _native.report_warnings()
            if bad != blob[:-40] + bytes(40):  # cuDNN may not notice zeros at the end
                assert any("stored plan" in str(w.message) for w in caught), bad[:20]


def test_a_loaded_plan_computes_the_same(rng, tuning):
    problem = draw_problem(rng, RELU, x_shape=(2, 6, 5, 32), k=32)
    with jqconv.config.using(search="heuristic"):
        assert_same_codes(solve(problem), problem.answer)
        _native.extension().cache_clear()
        jqconv.clear_algorithms()
        jax.clear_caches()
        assert_same_codes(solve(problem), problem.answer)
        assert jqconv.search_counts()["fprop"] == 0


def test_the_module_reports_and_tests_itself(tmp_path):
    done = run_python("-m", "jqconv", JQCONV_CACHE_DIR=str(tmp_path / "store"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed on NVIDIA" in done.stdout
    assert "cudnn-frontend" in done.stdout
