"""The search that takes time: builds what could run a convolution, times it, takes the fastest.

In two rounds, because what is compared differs. Plans of one form are timed bare, in CUDA graphs.
The best of each form then runs as a program, with what the form does before and after, and against
the lax lowering where that could win.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import jax
import numpy as np

from jqconv import _choice, _forms, _native, _policy, _primitive
from jqconv._algorithm import Algorithm, core_of, runs_on_cudnn
from jqconv._choice import Choice, Trial
from jqconv._spec import ConvSpec
from jqconv._timing import in_turn, time_plans

_T = TypeVar("_T")

#: Shapes and dtypes by the names of operands.
_Tensors: TypeAlias = dict[str, tuple[tuple[int, ...], str]]

_log = logging.getLogger("jqconv")

#: Bytes that the operands of one round of runs should exceed, so that the L2 cache of the largest
#: GPU does not hold them, and the most that they may take.
_COLD_BYTES, _MOST_BYTES = 192 * 2**20, 4 * 2**30
_MOST_SETS = 32

#: Bytes a second and operations a second of a fast GPU: for how long to measure, nothing else.
_BANDWIDTH, _OPERATIONS = 4e12, 1e15

#: How plans of one form are timed: all of them once, in a hurry; those that are then within a
#: factor of the best for longer, as many samples as this, and those still near for longer again.
_ROUNDS = ((1.5, 3), (1.15, 15))

#: Within which factor of the best a plan may win with its epilogue in another order.
_NEAR = 1.15

#: How much faster a form must be than a plainer one to be taken for it.
_MARGIN = 1.02

#: How many forms beside the plainest are looked at closely.
_MOST_FORMS = 3

#: What cuDNN's heuristic never proposes and is fastest for some convolution all the same, up to 1.7
#: times, or near it: values of the one knob (24, its tiles) of int8 engine 4. All were tried for
#: twelve layers of ResNet-50 and a few odd channels with cuDNN 9.19; an exhaustive search tries all
#: again. Another version may number them differently: what does not build is skipped.
_ENGINE, _KNOB = 4, 24
_UNPROPOSED = (5, 6, 9, 24, 25, 26, 28, 32, 35, 40, 41, 42, 43, 47, 51, 55)

#: How many times faster the best value of a knob may be than those that the heuristic proposes.
_MOST_GAIN = 2.0

#: How often the neighbours of a gradient's two best plans are looked at, in every knob of theirs.
_NEIGHBOUR_ROUNDS = 2


def search(spec: ConvSpec, device: jax.Device, *, exhaustive: bool = False) -> Choice:
    """Return the fastest way to run `spec` on `device`, with the times of what it was chosen from.

    Parameters
    ----------
    spec : ConvSpec
        The convolution.
    device : Device
        A GPU of this process.
    exhaustive : bool, default False
        Whether to build everything that cuDNN proposes in every form and formulation, and every
        value of the one knob of the int8 engines that could win by it. Otherwise forms that do not
        pay for such shapes are left out, few values are tried, and other formulations for the best
        plans alone.
    """
    # A thread of its own: this may be called while JAX traces or compiles, in contexts that must
    # not reach the programs here.
    return _in_thread(lambda: _Search(spec, device, exhaustive).run())


def _in_thread(function: Callable[[], _T]) -> _T:
    settings = _policy.settings()

    def run() -> _T:
        with _policy.within(settings):
            return function()

    with ThreadPoolExecutor(1, thread_name_prefix="jqconv-search") as pool:
        return pool.submit(run).result()


@functools.cache
def _builders() -> ThreadPoolExecutor:
    """Return the threads that build plans, for all searches together: each build takes a core."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="jqconv-build")


#: One search uses the device at a time, or they would time each other.
_device_lock = threading.Lock()


@dataclasses.dataclass
class _Form:
    """One form of the convolution: its core, and microseconds of the core's plans."""

    name: str
    core: ConvSpec
    tried: set[Algorithm] = dataclasses.field(default_factory=set)
    times: dict[Algorithm, float] = dataclasses.field(default_factory=dict)

    def fastest_first(self) -> list[Algorithm]:
        return sorted(self.times, key=self.times.__getitem__)

    @property
    def best_us(self) -> float:
        return min(self.times.values())

    def named(self, plan: Algorithm) -> Algorithm:
        """Return what a plan of the core is called for the convolution itself."""
        return dataclasses.replace(plan, form=self.name)


class _Search:
    """One search, from candidates to a choice."""

    def __init__(self, spec: ConvSpec, device: jax.Device, exhaustive: bool) -> None:
        self.spec = spec
        self.device = device
        self.exhaustive = exhaustive
        self.settings = _policy.settings()
        self.trials: list[Trial] = []

    def run(self) -> Choice:
        start = time.perf_counter()
        with contextlib.ExitStack() as self._room:
            choice = self._choose(self._finalists())
            self._forget_losers(choice.algorithm)
        _log.info(
            "chose %s of %d candidates in %.1f s for %s",
            choice.algorithm,
            len(choice.trials),
            time.perf_counter() - start,
            self.spec,
        )
        return choice

    # Round one: plans, form by form.

    def _finalists(self) -> list[_Form]:
        """Return the forms that could win, the plainest first, with times of their plans."""
        forms = [_Form(name, _forms.present(self.spec, name).core) for name in self._names()]
        self._add(forms, self._proposals)
        forms = [form for form in forms if form.times]
        if self.exhaustive:
            for form in sorted(forms, key=_best_us):  # what one gains may rule the next ones out
                limit = _MOST_GAIN * min(map(_best_us, forms))
                self._add([form], functools.partial(self._sweep, limit=limit))
            finalists = _contenders(forms)
        else:
            finalists = _contenders(forms)
            self._add(finalists, _unproposed)
        self._add(finalists, self._other_orders)
        if self.spec.direction != "fprop":
            for _ in range(_NEIGHBOUR_ROUNDS):
                self._add(finalists, self._neighbours)
        self.trials += [
            Trial(str(form.named(plan)), us) for form in forms for plan, us in form.times.items()
        ]
        return _contenders(finalists)

    def _names(self) -> list[str]:
        names = _forms.forms(self.spec) if self.exhaustive else _pruned(self.spec)
        return [name for name in names if runs_on_cudnn(_forms.present(self.spec, name).core)]

    def _proposals(self, form: _Form) -> list[Algorithm]:
        texts = _native.propose(str(form.core), self.device.local_hardware_id)
        proposed = [Algorithm.parse(text, "tuned") for text in texts]
        if self.exhaustive:
            return proposed
        return [plan for plan in proposed if plan.formulation == form.core.formulation]

    def _sweep(self, form: _Form, limit: float) -> list[Algorithm]:
        """Return all values of the one knob of int8 engines, where a plan is within `limit` us."""
        if form.core.x_dtype != "int8":  # with half a dozen knobs, that is
            return []
        fastest: dict[int, Algorithm] = {}
        for plan in form.fastest_first():
            if len(plan.knobs) == 1 and form.times[plan] <= limit:
                fastest.setdefault(plan.engine, plan)
        return [variant for plan in fastest.values() for variant in self._vary(form, plan)]

    def _other_orders(self, form: _Form) -> list[Algorithm]:
        """Return the two best plans, or all near the best, with their epilogues in other orders."""
        best = form.fastest_first()
        if self.exhaustive:
            best = [plan for plan in best if form.times[plan] <= _NEAR * form.best_us]
        else:
            best = best[:2]
        return [
            dataclasses.replace(plan, formulation=formulation, workspace=0)
            for plan, formulation in itertools.product(best, form.core.formulations)
            if formulation != plan.formulation
        ]

    def _neighbours(self, form: _Form) -> list[Algorithm]:
        """Return what differs from the two best plans in one knob."""
        best = form.fastest_first()[:2]
        return [variant for plan in best for variant in self._vary(form, plan)]

    def _vary(self, form: _Form, plan: Algorithm) -> list[Algorithm]:
        texts = _native.vary(str(form.core), str(plan), self.device.local_hardware_id)
        return [Algorithm.parse(text, "tuned") for text in texts]

    def _add(self, forms: list[_Form], candidates: Callable[[_Form], list[Algorithm]]) -> None:
        """Build and time more plans of each form; all builds are on their way before any is timed.

        What does not build or run is skipped and logged.
        """
        pending = []
        for form in forms:
            plans = [plan for plan in dict.fromkeys(candidates(form)) if plan not in form.tried]
            form.tried.update(plans)
            self._room.enter_context(_native.room_for(len(plans)))
            pending.append((form, self._build(form.core, plans)))
        for form, built in pending:
            form.times |= self._time(form.core, [plan for plan in built if plan is not None])

    def _build(self, core: ConvSpec, plans: list[Algorithm]) -> Iterator[Algorithm | None]:
        def build(plan: Algorithm) -> Algorithm | None:
            with _policy.within(self.settings):  # it may ask the store
                text, reason = _native.resolve(
                    str(core),
                    str(plan),
                    self.device.local_hardware_id,
                    self.settings.workspace_limit,
                )
            if text:
                return Algorithm.parse(text, "tuned")
            _log.debug("skipped %s for %s: %s", plan, core, reason)
            return None

        return _builders().map(build, plans)

    def _time(self, core: ConvSpec, plans: list[Algorithm]) -> dict[Algorithm, float]:
        """Return microseconds of a run of each plan, those near the best measured for longer."""
        if not plans:
            return {}
        try:
            with self._operands(core, core.operands) as sets:
                long = min(16, math.ceil(300 / (len(sets) * _estimate_us(core))))
                times = self._medians(core, plans, sets, runs=1, samples=1)
                for factor, samples in _ROUNDS:
                    limit = factor * min(times.values(), default=0)
                    near = [plan for plan, us in times.items() if us <= limit]
                    times |= self._medians(core, near, sets, runs=long, samples=samples)
                return times
        except jax.errors.JaxRuntimeError as error:  # most likely out of memory
            _log.warning("could not time the plans of %s: %s", core, error)
            return {}

    def _medians(
        self,
        core: ConvSpec,
        plans: list[Algorithm],
        sets: list[list[jax.Array]],
        runs: int,
        samples: int,
    ) -> dict[Algorithm, float]:
        if not plans:
            return {}
        times = time_plans(core, plans, sets, runs=runs, samples=samples)
        found = dict(zip(plans, np.median(times, axis=1).tolist(), strict=True))
        for failed in [plan for plan, us in found.items() if math.isnan(us)]:
            _log.debug("skipped %s for %s: it does not run", failed, core)
            del found[failed]
        return found

    # Round two: programs.

    def _choose(self, finalists: list[_Form]) -> Choice:
        if not finalists:
            return Choice(Algorithm("xla", source="tuned"))
        algorithms = [form.named(form.fastest_first()[0]) for form in finalists]
        if self._xla_could_win(algorithms):
            algorithms.append(Algorithm("xla", source="tuned"))
        if len(algorithms) == 1:
            return self._choice(algorithms[0], finalists[0].best_us)
        times = self._time_programs(algorithms)
        if not times:
            return self._choice(algorithms[0], finalists[0].best_us)
        self.trials += [Trial(str(a), us, whole=True) for a, us in times.items()]
        chosen, *others = times
        for algorithm in others:
            if times[algorithm] * _MARGIN < times[chosen]:
                chosen = algorithm
        return self._choice(chosen, times[chosen])

    def _xla_could_win(self, algorithms: list[Algorithm]) -> bool:
        """Whether the lax lowering is worth timing: never against a plain fused int8 plan."""
        plain = algorithms[0].form == "int8" and self.spec.groups == 1
        return self.exhaustive or not plain

    def _choice(self, algorithm: Algorithm, microseconds: float) -> Choice:
        trials = sorted(self.trials, key=lambda trial: trial.microseconds)
        return Choice(dataclasses.replace(algorithm, source="tuned"), microseconds, tuple(trials))

    def _time_programs(self, algorithms: list[Algorithm]) -> dict[Algorithm, float]:
        """Return microseconds of one convolution in a program of many, whole forms and all.

        A program that does not compile or run, most likely out of memory, is left out.
        """
        best: dict[Algorithm, float] = {}
        # Enough of them for a call that is longer than it takes to dispatch.
        least = math.ceil(400 / _estimate_us(self.spec))
        with self._operands(self.spec, _held(self.spec), least) as sets:
            programs = {a: self._tried(a, self._program, a, sets) for a in algorithms}
            for _ in range(3):  # in turn, so that a slow moment is nobody's alone
                for algorithm, program in programs.items():
                    seconds = program and self._tried(algorithm, _seconds, program, sets)
                    if seconds is None:
                        programs = {a: p for a, p in programs.items() if a != algorithm}
                        best.pop(algorithm, None)
                        continue
                    us = seconds / len(sets) * 1e6
                    best[algorithm] = min(us, best.get(algorithm, math.inf))
        return {algorithm: best[algorithm] for algorithm in algorithms if algorithm in best}

    def _tried(self, algorithm: Algorithm, step: Callable[..., _T], *args: Any) -> _T | None:
        try:
            return step(*args)
        except jax.errors.JaxRuntimeError as error:
            _log.debug("skipped %s for %s: %s", algorithm, self.spec, error)
            return None

    def _program(self, algorithm: Algorithm, sets: list[list[jax.Array]]) -> Callable[..., Any]:
        dtypes = [dtype for _, dtype in self.spec.operands.values()]

        @jax.jit  # traced and lowered once for all sets
        def conv(*held: jax.Array) -> jax.Array:
            operands = [x.astype(dtype) for x, dtype in zip(held, dtypes, strict=True)]
            # In place it would copy the residual first, which is there for the next call as well.
            return _primitive.conv(self.spec, algorithm, *operands, pinned=True, in_place=False)

        def program(sets: list[list[jax.Array]]) -> list[jax.Array]:
            return in_turn(conv, sets)

        compiled: Callable[..., Any] = jax.jit(program).lower(sets).compile()
        return compiled

    def _forget_losers(self, chosen: Algorithm) -> None:
        """Drop the plans that will not run from the native cache: they hold device memory."""
        for trial in self.trials:
            algorithm = Algorithm.parse(trial.algorithm)
            if algorithm != chosen and algorithm.form != "xla":
                core, plan = core_of(self.spec, algorithm)
                _native.forget(str(core), str(plan), self.device.local_hardware_id)

    @contextlib.contextmanager
    def _operands(
        self, spec: ConvSpec, tensors: _Tensors, least: int = 2
    ) -> Iterator[list[list[jax.Array]]]:
        """Make `tensors`, enough sets of them that the cache does not hold what it just used.

        The device is this search's for the scope, and the memory the user's again after it.
        """
        wanted = max(least, math.ceil(_COLD_BYTES / spec.bytes_moved))
        count = min(wanted, _MOST_SETS, max(1, _MOST_BYTES // spec.bytes_held))
        with _device_lock:
            drawn = [_random_operands(spec, tensors, seed) for seed in range(count)]
            sets = [jax.device_put(operands, self.device) for operands in drawn]
            try:
                yield sets
            finally:
                for array in itertools.chain.from_iterable(sets):
                    array.delete()


def _pruned(spec: ConvSpec) -> list[str]:
    """Return the forms that pay for such shapes, the plainest first.

    Multiples of 16 channels need no padding; few channels are padded to few, more to multiples of
    64 or 128. Carrying int8 as bf16 doubles the bytes and halves the rate: it pays where int8 has
    no good engine, with few channels.
    """
    c, k = spec.x_shape[3] // spec.groups, spec.w_shape[0]
    few = min(c, k) <= 16
    aligned = c % 16 == 0 and k % 16 == 0
    multiples = () if aligned else (16, 64) if few else (64, 128)
    names = _forms.forms(spec, multiples)
    return [name for name in names if (few and not aligned) or "widened" not in name.split("+")]


def _contenders(forms: list[_Form]) -> list[_Form]:
    """Return the plainest form, and the best of those whose plans alone are faster than its.

    Another will not win once its conversions are added.
    """
    if not forms:
        return []
    plainest, *others = forms
    faster = sorted((form for form in others if form.best_us < plainest.best_us), key=_best_us)
    kept = faster[:_MOST_FORMS]
    return [plainest, *(form for form in others if form in kept)]


def _best_us(form: _Form) -> float:
    return form.best_us


def _unproposed(form: _Form) -> list[Algorithm]:
    """Return plans that the heuristic never proposes and that are good for some shapes."""
    if form.core.x_dtype != "int8":
        return []
    alike = [p for p in form.tried if p.engine == _ENGINE and [k for k, _ in p.knobs] == [_KNOB]]
    return [
        dataclasses.replace(plan, knobs=((_KNOB, value),))
        for plan in alike[:1]
        for value in _UNPROPOSED
    ]


def _estimate_us(spec: ConvSpec) -> float:
    """Return about the least that a run could take, at least 2 us."""
    seconds = max(spec.bytes_moved / _BANDWIDTH, spec.operations / _OPERATIONS)
    return max(2.0, 1e6 * seconds)


def _held(spec: ConvSpec) -> _Tensors:
    """Return the operands as a program has them: codes where a gradient takes them as floats.

    Widening them is part of what is timed. XLA's products of matrices do it on the way.
    """
    codes = {"dgrad": "w", "wgrad": "x"}.get(spec.direction)
    return {
        name: (shape, "int8" if name == codes else dtype)
        for name, (shape, dtype) in spec.operands.items()
    }


def _random_operands(spec: ConvSpec, tensors: _Tensors, seed: int) -> list[np.ndarray]:
    """Return tensors of noise and scales that bring its sums back into the range of int8.

    What the values are matters: a GPU takes less power, and runs faster, on zeros.
    """
    scales = {"multiplier": 1 / (74 * math.sqrt(spec.products))}
    return [
        _random(shape, dtype, offset=7919 * seed)
        if len(shape) == 4
        else np.full(shape, scales.get(name, 0.5), dtype)
        for name, (shape, dtype) in tensors.items()
    ]


def _random(shape: Sequence[int], dtype: str, offset: int) -> np.ndarray:
    return np.resize(np.roll(_noise(dtype), offset), tuple(shape))


@functools.cache
def _noise(dtype: str) -> np.ndarray:
    """Return random values to draw tensors from: integers of the whole range, floats near 1."""
    rng = np.random.default_rng(0)
    if np.issubdtype(jax.numpy.dtype(dtype), np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, 2**22, dtype=dtype, endpoint=True)
    return rng.standard_normal(2**20, np.float32).astype(jax.numpy.dtype(dtype))


def _seconds(program: Callable[..., Any], sets: list[list[jax.Array]]) -> float:
    """Return seconds of one call: of as many as take 20 ms, issued without waiting in between."""

    def batch(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            results = program(sets)
        jax.block_until_ready(results)
        return (time.perf_counter() - start) / calls

    batch(2)
    return batch(max(4, math.ceil(0.02 / batch(2))))


_choice.searchers["tune"] = search
