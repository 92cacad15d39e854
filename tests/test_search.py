"""The timed search: what it tries, what it takes, and what it leaves behind. cuDNN is scripted."""

import contextlib
import dataclasses
import logging
import math
import re
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jqconv
from jqconv import Algorithm, _choice, _forms, _native, _policy, _reference, _search
from jqconv._algorithm import runs_on_cudnn
from jqconv._choice import Trial
from jqconv._spec import ConvSpec
from jqconv._timing import in_turn

REAL_PROGRAM, REAL_SECONDS = _search._Search._program, _search._seconds


def spec_of(c, k, groups=1, **changes):
    shapes = {"x_shape": (1, 4, 4, c), "w_shape": (k, 3, 3, c // groups), "groups": groups}
    return ConvSpec(**({"multiplier": "channel"} | shapes | changes))


PLAIN = spec_of(128, 128)  # has no other form
SMALL = spec_of(100, 100)
GROUPED = spec_of(128, 128, 2)  # int8 and dense
ORDERED = spec_of(128, 128, bias=True, residual="int8")  # sbz and szb
GRADIENTS = {d: PLAIN.backward(d, "bfloat16") for d in ("dgrad", "wgrad")}


def cpu(index=0):
    return jax.devices("cpu")[index]


class Lab:
    """What a search asks and times, answered from a script and noted.

    Engine n of a form takes 10 + n microseconds, and every program 20.
    """

    def __init__(self):
        self.engines = range(3)
        self.variants = []
        self.room = self.most_room = 0
        self.cores = {}
        self.proposed, self.varied, self.built, self.timed, self.programs = [], [], [], [], []
        self.operands, self.settings = [], []

    def builds(self, form, algorithm):
        return True

    def plan_us(self, form, algorithm):
        return 10.0 + algorithm.engine

    def program_us(self, form):
        return 20.0

    def search(self, spec, device=None, **options):
        for form in _forms.forms(spec):
            core = _forms.present(spec, form).core
            self.cores[str(core)] = form, core
        return _search.search(spec, device or cpu(), **options)

    def propose(self, spec, device):
        form, core = self.cores[spec]
        self.proposed.append(form)
        base = _forms.BASE_FORMS[core.x_dtype]
        return [f"{base}/{f}:eng{e}@91900" for e in self.engines for f in core.formulations]

    def vary(self, spec, algorithm, device):
        form, _ = self.cores[spec]
        self.varied.append((form, algorithm))
        base = dataclasses.replace(Algorithm.parse(algorithm), workspace=0)
        return [
            str(dataclasses.replace(base, knobs=((base.knobs[0][0], value),)))
            for value in (self.variants if base.knobs else ())
        ]

    @contextlib.contextmanager
    def room_for(self, plans):
        self.room += plans
        self.most_room = max(self.room, self.most_room)
        try:
            yield
        finally:
            self.room -= plans

    def resolve(self, spec, algorithm, device, workspace_limit, deterministic=False):
        form, _ = self.cores[spec]
        self.built.append((form, algorithm, workspace_limit))
        named = dataclasses.replace(Algorithm.parse(algorithm), workspace=8)
        return (str(named), "") if self.builds(form, named) else ("", "too old a GPU")

    def time_plans(self, core, algorithms, sets, *, runs, samples):
        assert algorithms, "there is nothing to time"
        assert runs > 0
        form, _ = self.cores[str(core)]
        self._use(core.operands, sets)
        self.timed.append((form, [a.engine for a in algorithms], samples))
        times = [[self.plan_us(form, a)] * samples for a in algorithms]
        return np.array(times, np.float32)

    def program(self, search, algorithm, sets):
        self._use(_search._held(search.spec), sets)
        return algorithm

    def seconds(self, algorithm, sets):
        self.programs.append(algorithm.form)
        return self.program_us(algorithm.form) * len(sets) / 1e6

    def _use(self, tensors, sets):
        for operands in sets:
            assert [(x.shape, x.dtype.name) for x in operands] == list(tensors.values())
            assert not any(x.is_deleted() for x in operands)
        self.operands.append(sets)
        self.settings.append(_policy.settings())


@pytest.fixture
def lab(monkeypatch):
    lab = Lab()
    monkeypatch.setattr(_native, "propose", lab.propose)
    monkeypatch.setattr(_native, "vary", lab.vary)
    monkeypatch.setattr(_native, "resolve", lab.resolve)
    monkeypatch.setattr(_native, "forget", lambda *plan: None)
    monkeypatch.setattr(_native, "room_for", lab.room_for)
    monkeypatch.setattr(_search, "time_plans", lab.time_plans)
    monkeypatch.setattr(_search._Search, "_program", lambda *args: lab.program(*args))
    monkeypatch.setattr(_search, "_seconds", lab.seconds)
    monkeypatch.setattr(_search, "_COLD_BYTES", 0)
    monkeypatch.setattr(_search, "_MOST_SETS", 2)
    return lab


# Round one: plans.


def test_the_fastest_plan_is_taken(lab):
    lab.plan_us = lambda form, algorithm: [12.0, 11.0, 13.0][algorithm.engine]
    choice = lab.search(PLAIN)
    assert str(choice.algorithm) == "int8/s:eng1,ws=8@91900"
    assert choice.algorithm.source == "tuned"
    assert choice.microseconds == 11
    assert choice.trials == tuple(
        Trial(f"int8/s:eng{engine},ws=8@91900", us)
        for engine, us in [(1, 11.0), (0, 12.0), (2, 13.0)]
    )
    assert not lab.programs, "there was nothing to compare it with"


def test_what_looks_near_the_best_is_measured_again(lab):
    """For longer, and for longer again; the last measurement counts."""
    lab.engines = range(4)
    rounds = [{0: 100, 1: 145, 2: 160, 3: 105}, {0: 100, 1: 120, 3: 104}, {0: 109, 3: 105}]
    lab.plan_us = lambda form, a: rounds[len(lab.timed) - 1][a.engine]
    choice = lab.search(PLAIN)
    assert [engines for _, engines, _ in lab.timed] == [[0, 1, 2, 3], [0, 1, 3], [0, 3]]
    samples = [samples for *_, samples in lab.timed]
    assert samples == sorted(set(samples))
    assert choice.algorithm.engine == 3
    assert [trial.microseconds for trial in choice.trials] == [105, 109, 120, 160]


def test_a_plan_that_does_not_build_is_skipped_and_logged(lab, caplog):
    caplog.set_level(logging.DEBUG, "jqconv")
    lab.builds = lambda form, algorithm: algorithm.engine != 0
    choice = lab.search(PLAIN)
    assert choice.algorithm.engine == 1
    assert len(choice.trials) == 2
    (message,) = [m for m in caplog.messages if "int8/s:eng0@91900" in m]
    assert str(PLAIN) in message
    assert "too old a GPU" in message


def test_a_plan_without_a_time_is_skipped(lab):
    lab.plan_us = lambda form, a: 10.0 + a.engine if a.engine else math.nan
    choice = lab.search(PLAIN)
    assert choice.algorithm.engine == 1
    assert choice.microseconds == 11
    assert len(choice.trials) == 2


def test_a_plan_without_a_time_is_logged(lab, caplog):
    caplog.set_level(logging.DEBUG, "jqconv")
    lab.plan_us = lambda form, a: 10.0 + a.engine if a.engine else math.nan
    lab.search(PLAIN)
    assert [m for m in caplog.messages if "int8/s:eng0" in m and "chose" not in m]


FAILURES = {
    "proposes none": {"engines": ()},
    "builds none": {"builds": lambda form, algorithm: False},
    "runs none": {"plan_us": lambda form, algorithm: math.nan},
}


@pytest.mark.parametrize("spec", [PLAIN, SMALL, GRADIENTS["wgrad"]], ids=["one", "three", "wgrad"])
@pytest.mark.parametrize("failure", FAILURES)
def test_without_any_plan_the_lax_lowering_runs(lab, spec, failure):
    vars(lab).update(FAILURES[failure])
    choice = lab.search(spec)
    assert str(choice.algorithm) == "xla"
    assert choice.microseconds is None
    assert not lab.programs


@pytest.mark.parametrize("failure", ["builds", "plan_us"])
def test_a_form_without_any_plan_is_left_out(lab, failure):
    works = getattr(lab, failure)
    fails = {"builds": False, "plan_us": math.nan}[failure]
    setattr(lab, failure, lambda form, a: fails if form == "padded128" else works(form, a))
    choice = lab.search(SMALL)
    assert choice.algorithm.form == "int8"
    assert {Algorithm.parse(t.algorithm).form for t in choice.trials} == {"int8", "padded_c128"}


def test_the_best_two_are_tried_in_other_formulations(lab):
    lab.engines = range(4)
    lab.plan_us = lambda form, a: {
        "sbz": [30, 12, 20, 13],
        "szb": [1, 14, 2, 11],
    }[a.formulation][a.engine]
    choice = lab.search(ORDERED)
    assert str(choice.algorithm) == "int8/szb:eng3,ws=8@91900"
    assert choice.microseconds == 11
    built = [algorithm for _, algorithm, _ in lab.built]
    assert sorted(built[:4]) == [f"int8/sbz:eng{engine}@91900" for engine in range(4)]
    assert sorted(built[4:]) == [f"int8/szb:eng{engine}@91900" for engine in (1, 3)]
    assert [trial.microseconds for trial in choice.trials] == [11, 12, 13, 14, 20, 30]


def test_another_formulation_that_does_not_build_is_left_out(lab):
    lab.builds = lambda form, algorithm: algorithm.formulation == "sbz"
    assert str(lab.search(ORDERED).algorithm) == "int8/sbz:eng0,ws=8@91900"


def test_an_exhaustive_search_tries_everything(lab):
    spec = dataclasses.replace(ORDERED, x_shape=(1, 4, 4, 8), w_shape=(12, 3, 3, 8))
    forms = _forms.forms(spec)
    choice = lab.search(spec, exhaustive=True)
    assert sorted(lab.proposed) == sorted(forms)
    bare = {trial.algorithm for trial in choice.trials if not trial.whole}
    assert bare == {
        f"{form}/{formulation}:eng{engine},ws=8@91900"
        for form in forms
        for formulation in ("sbz", "szb")
        for engine in lab.engines
    }
    assert len(lab.built) == len(bare)
    assert "xla" in lab.programs


def built(lab):
    return [algorithm for _, algorithm, _ in lab.built]


def test_an_exhaustive_search_tries_every_value_of_a_knob(lab):
    lab.engines, lab.variants = ["3", "4_k24=0", "4_k24=1"], [0, 1, 2, 3]
    lab.search(ORDERED, exhaustive=True)
    assert sorted(built(lab)) == sorted(
        f"int8/{order}:eng{name}@91900"
        for order in ("sbz", "szb")
        for name in ("3", *(f"4_k24={value}" for value in range(4)))
    )


def test_forms_that_no_value_of_a_knob_could_save_are_not_swept(lab):
    lab.engines, lab.variants = ["4_k24=0"], [0, 1]
    times = {"int8": 100, "padded_c128": 199, "padded128": 201}
    lab.plan_us = lambda form, a: times.get(form, 500)
    lab.search(SMALL, exhaustive=True)
    assert {form for form, _ in lab.varied} == {"int8", "padded_c128"}


def test_what_the_best_form_gains_rules_others_out(lab):
    lab.engines, lab.variants = ["4_k24=0"], [0, 1]
    times = {"int8": 100, "padded_c128": 150, "padded128": 120}
    lab.plan_us = lambda form, a: times.get(form, 500) * (0.7 if a.knobs[0][1] else 1)
    lab.search(SMALL, exhaustive=True)
    assert [form for form, _ in lab.varied] == ["int8", "padded128"]


def test_engines_that_no_value_of_their_knob_could_save_are_not_swept(lab):
    lab.engines, lab.variants = ["4_k24=0", "5_k24=0", "6_k24=0"], [0, 1]
    lab.plan_us = lambda form, a: {4: 100, 5: 199, 6: 201}[a.engine]
    lab.search(PLAIN, exhaustive=True)
    assert [Algorithm.parse(a).engine for _, a in lab.varied] == [4, 5]


def test_values_are_tried_in_the_best_order_and_the_good_ones_in_the_others(lab):
    lab.engines, lab.variants = ["4_k24=0"], [0, 1, 2, 3]
    times = {0: 100, 1: 60, 2: 50, 3: 58}
    lab.plan_us = lambda form, a: times[a.knobs[0][1]] - (a.formulation == "szb")
    choice = lab.search(ORDERED, exhaustive=True)
    assert str(choice.algorithm) == "int8/szb:eng4_k24=2,ws=8@91900"
    assert [a for a in built(lab) if "/sbz:" in a] == [
        f"int8/sbz:eng4_k24={value}@91900" for value in (0, 2)
    ]


def test_a_search_of_int8_varies_no_knob_but_knows_values_that_win(lab):
    lab.engines, lab.variants = ["2_k24=7", "4_k24=9", "4_k24=0", "4_k25=1"], [3]
    lab.search(PLAIN)
    assert not lab.varied
    values = dict.fromkeys([9, 0, *_search._UNPROPOSED])
    found = [name for name in built(lab) if ":eng4_k24=" in name]
    assert sorted(found) == sorted(f"int8/s:eng4_k24={value}@91900" for value in values)


def test_without_the_engine_nothing_is_known_to_win(lab):
    lab.engines = ["3_k24=0", "4_k25=0", "4"]
    lab.search(PLAIN)
    assert len(lab.built) == len(lab.engines)


@pytest.mark.parametrize("direction", GRADIENTS)
def test_neighbours_of_the_best_plans_of_a_gradient_are_tried_and_theirs_again(lab, direction):
    lab.engines, lab.variants = ["60_k2=0", "61_k2=0", "62_k2=0"], [1, 2]
    lab.plan_us = lambda form, a: a.engine - 10 * (a.knobs[0][1] if a.engine == 61 else 0)
    choice = lab.search(GRADIENTS[direction])
    assert str(choice.algorithm) == "bf16/c:eng61_k2=2,ws=8@91900"
    varied = [algorithm for _, algorithm in lab.varied]
    assert varied == [
        f"bf16/c:eng{name},ws=8@91900" for name in ("60_k2=0", "61_k2=0", "61_k2=2", "61_k2=1")
    ]
    assert len(set(built(lab))) == len(lab.built) == 3 + 4


@pytest.mark.parametrize("exhaustive", [False, True])
def test_the_cache_has_room_for_everything_that_is_compared(lab, exhaustive):
    lab.engines, lab.variants = ["4_k24=0"], range(64)
    lab.search(dataclasses.replace(SMALL, bias=True, residual="int8"), exhaustive=exhaustive)
    assert lab.most_room >= len(lab.built)
    assert lab.room == 0


def test_the_cache_has_its_size_again_after_an_error(lab, monkeypatch):
    monkeypatch.setattr(_search, "time_plans", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        lab.search(PLAIN)
    assert lab.room == 0


def test_only_the_best_forms_are_looked_at_closely(lab):
    spec = spec_of(8, 8)
    names = _search._pruned(spec)
    lab.plan_us = lambda form, algorithm: 100 - names.index(form)
    lab.search(spec)
    best = sorted(names[-_search._MOST_FORMS :])
    assert sorted(set(lab.programs)) == sorted(["int8", *best])


def test_forms_that_cudnn_does_not_run_are_not_asked_for(lab):
    depthwise = spec_of(128, 128, 128)
    forms = [f for f in _forms.forms(depthwise) if f.startswith("dense")]
    lab.search(depthwise)
    assert set(lab.proposed) == set(forms)
    assert not runs_on_cudnn(depthwise)


def test_the_workspace_limit_of_the_caller_reaches_cudnn(lab):
    with jqconv.config.using(workspace_limit=123):
        lab.search(ORDERED)
    assert {limit for *_, limit in lab.built} == {123}


# Round two: programs.


def form_times(**us):
    return lambda form, *algorithm: us[form]


@pytest.mark.parametrize(
    ("plans", "programs", "chosen"),
    [
        ((10, 8, 6), (20, 20, 15), "padded128"),
        ((10, 8, 6), (20, 15, 18), "padded_c128"),
        ((10, 8, 6), (20, 25, 30), "int8"),
        ((10, 8, 12), (20, 25, 5), "int8"),
        ((10, 11, 12), (), "int8"),
    ],
    ids=[
        "fastest in both",
        "fastest program of a slower plan",
        "conversions cost more than they gain",
        "a slower plan is no program",
        "only slower plans need no program",
    ],
)
def test_the_fastest_program_is_taken(lab, plans, programs, chosen):
    forms = "int8", "padded_c128", "padded128"
    lab.plan_us = form_times(**dict(zip(forms, plans, strict=True)))
    lab.program_us = form_times(**dict(zip(forms, programs, strict=False)))
    choice = lab.search(SMALL)
    assert choice.algorithm.form == chosen
    times = programs or plans
    assert choice.microseconds == pytest.approx(times[forms.index(chosen)])
    faster = {form for form, us in zip(forms, plans, strict=True) if us < plans[0]}
    assert set(lab.programs) == (faster | {"int8"} if faster else set())


@pytest.mark.parametrize(("faster", "chosen"), [(0.985, "int8"), (0.97, "padded128")])
def test_a_win_within_the_noise_keeps_the_plainer_form(lab, faster, chosen):
    lab.plan_us = form_times(int8=10, padded_c128=10, padded128=9)
    lab.program_us = form_times(int8=100, padded128=100 * faster)
    assert lab.search(SMALL).algorithm.form == chosen


def test_the_best_of_a_programs_times_counts(lab):
    slow_moments = iter([100, 15, 20, 16, 20, 16])
    lab.plan_us = form_times(int8=10, padded_c128=10, padded128=9)
    lab.program_us = lambda form: next(slow_moments)
    choice = lab.search(SMALL)
    assert lab.programs == ["int8", "padded128"] * 3, "in turn"
    assert choice.algorithm.form == "padded128"
    assert choice.microseconds == pytest.approx(15)


XLA_COULD_WIN = {
    "groups": (GROUPED, "int8"),
    "dgrad": (GRADIENTS["dgrad"], "bf16"),
    "wgrad": (GRADIENTS["wgrad"], "bf16"),
    "no plain plan": (SMALL, "padded128"),
}


@pytest.mark.parametrize("case", XLA_COULD_WIN)
@pytest.mark.parametrize("wins", [True, False], ids=["wins", "loses"])
def test_the_lax_lowering_can_win_where_no_plain_int8_plan_is(lab, case, wins):
    spec, otherwise = XLA_COULD_WIN[case]
    if case == "no plain plan":
        lab.builds = lambda form, algorithm: form == "padded128"
    lab.program_us = lambda form: {"xla": 5 if wins else 30}.get(form, 20)
    choice = lab.search(spec)
    assert choice.algorithm.form == ("xla" if wins else otherwise)
    assert choice.algorithm.source == "tuned"
    assert choice.microseconds == pytest.approx(5 if wins else 20)
    assert "xla" in lab.programs


def test_the_lax_lowering_is_not_tried_against_a_plain_int8_plan(lab):
    lab.plan_us = form_times(int8=10, padded_c128=9, padded128=9)
    lab.search(SMALL)
    assert set(lab.programs) == {"int8", "padded_c128", "padded128"}


def test_trials_are_recorded_fastest_first(lab):
    lab.engines = range(1)
    lab.plan_us = form_times(int8=10, dense=9)
    lab.program_us = form_times(int8=12, dense=8, xla=11)
    choice = lab.search(GROUPED)
    assert [(t.algorithm, round(t.microseconds), t.whole) for t in choice.trials] == [
        ("dense/s:eng0,ws=8@91900", 8, True),
        ("dense/s:eng0,ws=8@91900", 9, False),
        ("int8/s:eng0,ws=8@91900", 10, False),
        ("xla", 11, True),
        ("int8/s:eng0,ws=8@91900", 12, True),
    ]


def test_a_choice_is_logged(lab, caplog):
    caplog.set_level(logging.INFO, "jqconv")
    lab.search(PLAIN)
    (message,) = caplog.messages
    assert "int8/s:eng0,ws=8@91900" in message
    assert str(PLAIN) in message


# Operands and clocks.


def test_operands_are_on_the_device_and_gone_afterwards(lab):
    device = cpu(-1)
    where = set()
    use = lab._use
    lab._use = lambda spec, sets: (use(spec, sets), where.update(sets[0][0].devices()))
    lab.search(GROUPED, device)
    assert where == {device}
    arrays = jax.tree.leaves(lab.operands)
    assert len({id(array) for array in arrays}) > 4
    assert all(array.is_deleted() for array in arrays)


@pytest.mark.parametrize("where", ["plan_us", "program_us"])
def test_operands_are_gone_after_an_error_too(lab, where):
    works = getattr(lab, where)

    def fail(*args):
        raise RuntimeError("the device is lost")

    setattr(lab, where, fail)
    with pytest.raises(RuntimeError, match="the device is lost"):
        lab.search(GROUPED)
    arrays = jax.tree.leaves(lab.operands)
    assert arrays
    assert all(array.is_deleted() for array in arrays)
    setattr(lab, where, works)
    assert not _search._device_lock.locked()
    lab.search(GROUPED)


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"_COLD_BYTES": 0}, 2),
        ({"_COLD_BYTES": 10}, 10),
        ({"_COLD_BYTES": 10, "_MOST_SETS": 5}, 5),
        ({"_COLD_BYTES": 10, "_MOST_BYTES": 3}, 3),
        ({"_COLD_BYTES": 10, "_MOST_BYTES": 0}, 1),
    ],
    ids=str,
)
def test_as_many_operands_as_no_cache_holds(lab, monkeypatch, limits, count):
    tensors = [*PLAIN.operands.values(), PLAIN.result]
    size = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in tensors)
    limits = {"_MOST_SETS": 32} | limits
    for name, limit in limits.items():
        monkeypatch.setattr(_search, name, limit * (1 if name == "_MOST_SETS" else size))
    lab.search(PLAIN)
    assert len(lab.operands[0]) == count


def test_what_a_strided_window_passes_over_takes_memory_all_the_same(lab, monkeypatch):
    spec = spec_of(128, 128, x_shape=(1, 16, 16, 128), w_shape=(128, 1, 1, 128), strides=(4, 4))
    held = sum(math.prod(shape) * np.dtype(d).itemsize for shape, d in spec.operands.values())
    held += math.prod(spec.y_shape)
    assert spec.bytes_moved < held / 2
    monkeypatch.setattr(_search, "_MOST_BYTES", 3 * held)
    monkeypatch.setattr(_search, "_COLD_BYTES", 100 * held)
    monkeypatch.setattr(_search, "_MOST_SETS", 32)
    lab.search(spec)
    assert len(lab.operands[0]) == 3


@pytest.mark.parametrize(
    "spec", [PLAIN, spec_of(3, 8), spec_of(128, 128, 128)], ids=["many", "few", "depthwise"]
)
def test_operands_are_noise_with_sums_in_the_range_of_int8(spec):
    first, second = (_search._random_operands(spec, spec.operands, seed) for seed in (0, 1))
    assert not np.array_equal(first[0], second[0])
    codes = np.asarray(_reference.fprop(spec, *map(jnp.asarray, first)), np.float32)
    assert 20 < codes.std() < 100
    assert np.mean(np.abs(codes) >= 127) < 0.2


def test_convolutions_in_turn_wait_for_each_other():
    def run(xs):
        return in_turn(lambda x, y: x * y, [(x, xs[0]) for x in xs])

    xs = list(jnp.arange(6.0).reshape(3, 2))
    np.testing.assert_array_equal(run(xs), [x * xs[0] for x in xs])
    text = jax.jit(run).lower(xs).as_text()
    assert text.count("optimization_barrier") == 2


def test_operands_of_gradients_are_noise():
    spec = GRADIENTS["dgrad"]
    for operand in _search._random_operands(spec, spec.operands, 0):
        assert operand.dtype == jnp.bfloat16
        assert 0.9 < operand.astype(np.float32).std() < 1.1


@pytest.mark.parametrize("direction", GRADIENTS)
def test_programs_of_gradients_widen_codes(direction):
    spec = GRADIENTS[direction]
    held = {name: dtype for name, (_, dtype) in _search._held(spec).items()}
    assert (
        held
        == {"dgrad": {"dy": "bfloat16", "w": "int8"}, "wgrad": {"x": "int8", "dy": "bfloat16"}}[
            direction
        ]
    )
    algorithm = Algorithm("xla")
    sets = [_search._random_operands(spec, _search._held(spec), seed) for seed in (0, 1)]
    results = _search._Search(spec, cpu(), False)._program(algorithm, sets)(sets)
    for result, operands in zip(results, sets, strict=True):
        wide = [jnp.asarray(x, jnp.bfloat16) for x in operands]
        want = getattr(_reference, direction)(spec, *wide)
        np.testing.assert_array_equal(result, want)


def test_searches_use_the_device_one_at_a_time(lab):
    busy = threading.Lock()
    plan_us = lab.plan_us

    def alone(form, algorithm):
        assert busy.acquire(blocking=False), "another search is timing"
        time.sleep(0.002)
        busy.release()
        return plan_us(form, algorithm)

    lab.plan_us = alone
    with ThreadPoolExecutor(2) as pool:
        choices = list(pool.map(lab.search, [PLAIN, SMALL]))
    assert [choice.algorithm.form for choice in choices] == ["int8", "int8"]


@pytest.mark.parametrize(("takes", "last"), [(0.003, 7), (0.1, 4), (0.001, 20)])
def test_a_program_is_called_until_its_calls_take_20_ms(monkeypatch, takes, last):
    now = 0.0
    calls = []

    def program(sets):
        nonlocal now
        now += takes
        calls.append(sets)
        return sets

    monkeypatch.setattr(_search, "time", types.SimpleNamespace(perf_counter=lambda: now))
    assert REAL_SECONDS(program, [1]) == pytest.approx(takes)
    assert calls == [[1]] * (2 + 2 + last)


# Where a search is called from.


def in_jit(run):
    jax.jit(lambda x: (run(), x)[1])(1.0)


def in_vmap(run):
    jax.vmap(lambda x: (run(), x)[1])(jnp.ones(3))


def in_grad(run):
    jax.grad(lambda x: (run(), x)[1])(1.0)


def in_context(context):
    def inside(run):
        with context():
            run()

    return inside


PLACES = {
    "jit": in_jit,
    "vmap": in_vmap,
    "grad": in_grad,
    "enable_x64": in_context(lambda: jax.enable_x64(True)),
    "default_device": in_context(lambda: jax.default_device(cpu(-1))),
    "disable_jit": in_context(jax.disable_jit),
    "transfer_guard": in_context(lambda: jax.transfer_guard("disallow")),
}


@pytest.fixture
def real_programs(lab, monkeypatch):
    """Programs that are compiled and run, as far as a CPU can."""
    monkeypatch.setattr(_search._Search, "_program", REAL_PROGRAM)
    monkeypatch.setattr(_search, "_seconds", REAL_SECONDS)
    return lab


@pytest.mark.parametrize("place", PLACES)
def test_a_search_works_anywhere(real_programs, place):
    """In a thread of its own, whose programs are no part of what surrounds the call."""
    lab = real_programs
    found = []

    def run():
        with jqconv.config.using(workspace_limit=456):
            found.append(lab.search(GROUPED))

    PLACES[place](run)
    (choice,) = found
    assert choice.algorithm.form in ("int8", "dense", "xla")
    assert {t.algorithm.split("/")[0] for t in choice.trials if t.whole} == {"int8", "xla"}
    assert all(0 < trial.microseconds < math.inf for trial in choice.trials)
    assert {settings.workspace_limit for settings in lab.settings} == {456}
    assert all(array.is_deleted() for array in jax.tree.leaves(lab.operands))


def test_a_search_works_while_a_program_is_lowered(real_programs, monkeypatch):
    lab = real_programs
    monkeypatch.setattr(_choice, "target_gpu", cpu)
    monkeypatch.setattr(_choice, "_choices", _choice._Choices())
    monkeypatch.setitem(_choice.searchers, "tune", lab.search)
    monkeypatch.setattr(_native, "is_built", lambda: True)
    monkeypatch.setattr(_native, "versions", lambda: {"cudnn": 91900, "frontend": "1.28.0"})

    def layer(x, w):
        return jqconv.qconv2d(x, w, 0.1)

    args = jnp.ones((1, 4, 4, 16), jnp.int8), jnp.ones((3, 3, 16, 16), jnp.int8)
    lab.plan_us = form_times(int8=10, padded_c128=9, padded128=12)
    with jqconv.config.using(search="tune"):
        text = jax.jit(layer).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert jqconv.search_counts() == {"fprop": 1, "dgrad": 0, "wgrad": 0}
    assert re.search(r'algorithm = "int8/s:eng0,ws=8@91900"', text)


def test_the_search_that_jqconv_installs_is_this_one():
    assert _choice.searchers["tune"] is _search.search


# Forms.


PRUNED = {
    "even": (spec_of(128, 256), "int8"),
    "16 channels": (spec_of(16, 16), "int8"),
    "100 channels": (SMALL, "int8 padded_c128 padded128"),
    "odd": (spec_of(129, 131), "int8 padded_c64 padded64 padded_c128 padded128"),
    "odd inputs": (spec_of(100, 128), "int8 padded128"),
    "classifier": (spec_of(64, 1000), "int8 padded64 padded_c128 padded128"),
    "few": (
        spec_of(8, 8),
        "int8 widened padded_c16 padded_c16+widened padded16 padded16+widened "
        "padded_c64 padded_c64+widened padded64 padded64+widened",
    ),
    "few outputs": (
        spec_of(64, 10),
        "int8 widened padded16 padded16+widened padded64 padded64+widened",
    ),
    "stem": (
        spec_of(3, 64, strides=(2, 2)),
        "int8 widened padded16 padded16+widened padded64 padded64+widened "
        "space_to_depth space_to_depth+widened space_to_depth+padded16 "
        "space_to_depth+padded16+widened space_to_depth+padded64 space_to_depth+padded64+widened",
    ),
    "depthwise": (spec_of(128, 128, 128), "int8 widened dense dense+widened"),
    "small groups": (spec_of(128, 128, 32), "int8 widened dense dense+widened"),
    "large groups": (GROUPED, "int8 dense"),
    "gradient": (GRADIENTS["dgrad"], "bf16"),
}


@pytest.mark.parametrize("case", PRUNED)
def test_forms_that_do_not_pay_are_left_out(case):
    spec, kept = PRUNED[case]
    assert sorted(_search._pruned(spec)) == sorted(kept.split())


@pytest.mark.parametrize("case", PRUNED)
def test_the_plainest_form_comes_first(case):
    """A search keeps it where another wins by little, and times no slower plan as a program."""
    spec, kept = PRUNED[case]
    assert _search._pruned(spec)[0] == kept.split()[0]


@pytest.mark.parametrize(("c", "k"), [(8, 8), (3, 64), (60, 8), (20, 8), (100, 8), (8, 100)])
def test_few_channels_are_padded_to_multiples_of_16_and_64(c, k):
    """Whatever the name of the form: where several paddings come to the same it is the largest."""
    spec = spec_of(c, k)
    kept = _search._pruned(spec)
    shapes = {_forms.present(spec, form).core.w_shape for form in kept}

    def up(n, multiple):
        return -(-n // multiple) * multiple

    wanted = {
        (channels, 3, 3, up(c, multiple))
        for multiple in (16, 64)
        for channels in (k, up(k, multiple))
    }
    assert shapes == wanted | {(k, 3, 3, c)}


# What goes wrong.


def out_of_memory(*args):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


def test_plans_that_cannot_be_timed_are_no_reason_not_to_run(lab, monkeypatch, caplog):
    """cuDNN's first proposal runs, and nothing is stored: there may be more memory next time."""
    lab.plan_us = out_of_memory
    monkeypatch.setattr(_choice, "target_gpu", cpu)
    monkeypatch.setattr(_choice, "_choices", _choice._Choices())
    monkeypatch.setitem(_choice.searchers, "tune", lab.search)
    monkeypatch.setattr(_native, "is_built", lambda: True)
    monkeypatch.setattr(_native, "versions", lambda: {"cudnn": 91900, "frontend": "1.28.0"})
    first = ("int8/s:eng3@91900", "")
    resolve = lab.resolve
    monkeypatch.setattr(
        _native, "resolve", lambda s, a, *rest: resolve(s, a, *rest) if a else first
    )
    with jqconv.config.using(search="tune"):
        assert str(_choice.settle(PLAIN)) == "int8/s:eng3@91900"
    assert any("could be timed" in message for message in caplog.messages)


@pytest.mark.parametrize("form", ["int8", "dense", "xla"])
def test_a_program_that_does_not_run_is_left_out(lab, form):
    lab.plan_us = form_times(int8=10, dense=9)
    works = form_times(int8=12, dense=8, xla=11)
    lab.program_us = lambda name: out_of_memory() if name == form else works(name)
    choice = lab.search(GROUPED)
    assert choice.algorithm.form == {"int8": "dense", "dense": "xla", "xla": "dense"}[form]
    assert all(math.isfinite(trial.microseconds) for trial in choice.trials)


def test_where_no_program_runs_the_plainest_form_is_taken(lab):
    lab.plan_us = form_times(int8=10, dense=9)
    lab.program_us = out_of_memory
    choice = lab.search(GROUPED)
    assert choice.algorithm.form == "int8"
    assert choice.microseconds == 10


def test_the_plans_that_lose_are_dropped(lab, monkeypatch):
    forgotten = []
    monkeypatch.setattr(
        _native, "forget", lambda spec, algorithm, device: forgotten.append(algorithm)
    )
    choice = lab.search(PLAIN)
    assert str(choice.algorithm) not in forgotten
    assert len(forgotten) == len(choice.trials) - 1
