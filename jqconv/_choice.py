"""The algorithm of each convolution: chosen once, remembered, kept for the next process.

The choice is made for each spec and device when it is first compiled for a GPU that is here, and
from then on is a static parameter of the primitives. Order: what the caller gave, what this
process chose before, what the store on disk knows, and last a search, which times what cuDNN
proposes or, by the settings, takes its first proposal.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias

import jax

from jqconv import _forms, _native, _policy
from jqconv._algorithm import DIRECTIONS, Algorithm, check_legal, core_of, runs_on_cudnn
from jqconv._spec import ConvSpec
from jqconv._store import Store

_log = logging.getLogger("jqconv")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate that a search timed, the conversions of its form included where `whole`."""

    algorithm: str
    microseconds: float
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for a convolution, and what it was chosen from."""

    algorithm: Algorithm
    microseconds: float | None = None  # of one run on the device; None where nothing was timed
    trials: tuple[Trial, ...] = ()  # fastest first


@dataclasses.dataclass(frozen=True)
class _Key:
    """What a choice depends on, beside how it was made."""

    spec: ConvSpec
    device: str
    deterministic: bool
    workspace_limit: int


#: How a choice was made: by time, or by cuDNN's order.
_Grade: TypeAlias = Literal["tune", "heuristic"]


def _key(spec: ConvSpec, device: jax.Device) -> _Key:
    now = _policy.settings()
    return _Key(spec, _device_key(device), now.deterministic, now.workspace_limit)


def _search_grade() -> _Grade | None:
    """Return how the settings want a search to choose; None for no search."""
    now = _policy.settings()
    if now.search == "cached":
        return None
    # Where every process has to compute the same bits time may not decide, nor where processes
    # that compile one program together would each measure their own.
    if now.search == "heuristic" or now.deterministic or jax.process_count() > 1:
        return "heuristic"
    return "tune"


def _accepted_grades() -> tuple[_Grade, ...]:
    """Return what will do without a search, the better first."""
    if _policy.settings().deterministic:
        return ("heuristic",)
    return ("tune",) if _search_grade() == "tune" else ("tune", "heuristic")


class _Choices:
    """What this process has chosen, and how often it searched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: dict[tuple[_Key, _Grade], Future[Choice]] = {}
        self._searches: collections.Counter[str] = collections.Counter()

    def known(self, spec: ConvSpec, device: jax.Device) -> Choice | None:
        """Return what is chosen already, here or in the store, without a search."""
        key = _key(spec, device)
        for grade in _accepted_grades():
            with self._lock:
                future = self._chosen.get((key, grade))
            if future is None:
                stored = _stored(key, grade)
                if stored is None:
                    continue
                with self._lock:
                    future = self._chosen.setdefault((key, grade), _done(stored))
            # One that is being searched for is not known yet.
            if future.done() and not future.exception():
                return future.result()
        return None

    def get(self, spec: ConvSpec, device: jax.Device) -> Choice:
        """Return the choice for `spec`, searching if it has none yet.

        Threads that need the same spec wait for one search; other specs are searched beside it.
        """
        key, grade = _key(spec, device), _search_grade()
        found = self.known(spec, device)
        if found is not None:
            _keep(key, found, device)
            return found
        if grade is None:
            raise RuntimeError(
                f"jqconv.config.search is 'cached', but the store {_policy.config.cache_dir!r} has "
                f"no algorithm for the convolution '{spec}' on {key.device} with workspace_limit="
                f"{key.workspace_limit} and deterministic={key.deterministic}; tune it first (set "
                "search='tune', see jqconv.tune) or import the store that came with the model"
            )
        with self._lock:
            other = self._chosen.get((key, grade))
            future = other or self._chosen.setdefault((key, grade), Future())
            if other is None:
                self._searches[spec.direction] += 1
                replaced = grade == "tune" and (key, "heuristic") in self._chosen
        if other is None:
            try:
                future.set_result(_search(key, grade, device))
            except BaseException as error:
                with self._lock:
                    self._chosen.pop((key, grade), None)
                future.set_exception(error)
            if replaced:
                _policy.choices_changed()
        return future.result()

    def replace(self, spec: ConvSpec, device: jax.Device, choice: Choice) -> None:
        """Forget what was chosen for `spec` by time, for `choice`."""
        key = _key(spec, device)
        _store(key, "tune", choice, device)
        with self._lock:
            self._chosen[key, "tune"] = _done(choice)
        _policy.choices_changed()

    def searches(self) -> dict[str, int]:
        with self._lock:
            return {direction: self._searches[direction] for direction in DIRECTIONS}

    def clear(self) -> None:
        with self._lock:
            self._chosen.clear()
            self._searches.clear()


_choices = _Choices()


def _done(choice: Choice) -> Future[Choice]:
    future: Future[Choice] = Future()
    future.set_result(choice)
    return future


def _search(key: _Key, grade: _Grade, device: jax.Device) -> Choice:
    """Choose anew, and store the choice for the next process."""
    choice = searchers[grade](key.spec, device)
    if grade == "tune" and not choice.trials:
        # Nothing could be timed, for want of memory perhaps. That is no reason not to run, nor
        # one to remember.
        _log.warning("no plan of '%s' could be timed; taking cuDNN's first proposal", key.spec)
        return searchers["heuristic"](key.spec, device)
    _store(key, grade, choice, device)
    return choice


def _keep(key: _Key, choice: Choice, device: jax.Device) -> None:
    """Store what is known already where this store, or its plan, is another or was lost."""
    store, algorithm = _policy.store(), choice.algorithm
    if store is None or algorithm.source == "table":
        return
    grade: _Grade = "tune" if choice.trials else "heuristic"
    kept = store.get(_name(key, grade)) is not None
    if kept and algorithm.form != "xla":
        core, named = core_of(key.spec, algorithm)
        kept = store.get(_plan_key(str(core), key.device, str(named))) is not None
    if not kept:
        _store(key, grade, choice, device)


def _heuristic(spec: ConvSpec, device: jax.Device) -> Choice:
    """Return cuDNN's first plan that builds, or the xla form where it has none."""
    if not runs_on_cudnn(spec):
        return Choice(Algorithm("xla", source="table"))
    now = _policy.settings()
    text, _ = _native.resolve(
        str(spec), "", device.local_hardware_id, now.workspace_limit, now.deterministic
    )
    return Choice(Algorithm.parse(text, "heuristic") if text else Algorithm("xla", source="table"))


#: What finds an algorithm, by grade. The one that times candidates is above this module, in
#: jqconv._search, which puts it in here.
searchers: dict[_Grade, Callable[[ConvSpec, jax.Device], Choice]] = {"heuristic": _heuristic}


# --- the store ------------------------------------------------------------------------------------


def _choice_key(spec: str, device: str, grade: _Grade, deterministic: bool, limit: int) -> str:
    how = f"{'deterministic ' if deterministic else ''}{grade} workspace={limit}"
    return f"choice {how} {device} {spec}"


def _name(key: _Key, grade: _Grade) -> str:
    limit = key.workspace_limit
    return _choice_key(str(key.spec), key.device, grade, key.deterministic, limit)


def _plan_key(spec: str, device: str, algorithm: str) -> str:
    # Serialized plans are the frontend's own format.
    return f"plan {algorithm} {device} frontend{_native.versions()['frontend']} {spec}"


def _stored(key: _Key, grade: _Grade) -> Choice | None:
    """Return what an earlier process chose."""
    store = _policy.store()
    entry = store.get(_name(key, grade)) if store else None
    if entry is None:
        return None
    try:
        algorithm = Algorithm.parse(entry.record["algorithm"], "cached")
        check_legal(key.spec, algorithm)
        trials = tuple(Trial(*trial) for trial in entry.record["trials"])
        us = entry.record["microseconds"]
        return Choice(algorithm, None if us is None else float(us), trials)
    except (KeyError, TypeError, ValueError):
        return None  # of another version of jqconv, which had other forms


def _store(key: _Key, grade: _Grade, choice: Choice, device: jax.Device) -> None:
    store = _policy.store()
    if store is None:
        return
    algorithm = choice.algorithm
    record = {
        "kind": "choice",
        "spec": str(key.spec),
        "device": key.device,
        "algorithm": str(algorithm),
        "microseconds": choice.microseconds,
        "trials": [dataclasses.astuple(trial) for trial in choice.trials],
    }
    if algorithm.form != "xla":
        core, named = core_of(key.spec, algorithm)
        _store_plan(store, str(core), str(named), key.device, device)
    store.put(_name(key, grade), record)  # last: who finds the choice finds the plan


def _store_plan(store: Store, spec: str, algorithm: str, kind: str, device: jax.Device) -> None:
    try:
        plan = _native.serialize(spec, algorithm, device.local_hardware_id)
    except RuntimeError as error:
        _log.warning("the plan %s is built in every process, for %s", algorithm, error)
        return
    record = {"kind": "plan", "spec": spec, "device": kind, "algorithm": algorithm}
    store.put(_plan_key(spec, kind, algorithm), record, plan)


# The handlers ask these where a program names no algorithm, having been exported elsewhere, and for
# plans that this process has not built.


def _choice_for_handler(device: int, spec: str) -> tuple[str | None, bool]:
    gpu, store, now = _local_gpu(device), _policy.store(), _policy.settings()
    if gpu is None or store is None:
        return None, now.deterministic
    for grade in _accepted_grades():
        key = _choice_key(spec, _device_key(gpu), grade, now.deterministic, now.workspace_limit)
        entry = store.get(key)
        algorithm = entry.record.get("algorithm") if entry else None
        # A form of several steps is more than a handler can do.
        if isinstance(algorithm, str) and algorithm.split("/")[0] in _forms.BASE_FORMS.values():
            return algorithm, now.deterministic
    return None, now.deterministic


def _plan_for_handler(device: int, spec: str, algorithm: str) -> bytes | None:
    gpu, store = _local_gpu(device), _policy.store()
    if gpu is None or store is None:
        return None
    entry = store.get(_plan_key(spec, _device_key(gpu), algorithm))
    return entry.blob if entry else None


_native.set_store(_choice_for_handler, _plan_for_handler)


# --- choosing -------------------------------------------------------------------------------------


def search_counts() -> Mapping[str, int]:
    """Return how many searches this process has made, by direction.

    A search asks cuDNN for its candidates and builds them. There is one for each distinct
    convolution, direction and kind of device, however often and under whatever transformation
    it runs, and none for what the store knows.

    Returns
    -------
    dict
        Keys ``"fprop"``, ``"dgrad"`` and ``"wgrad"``.
    """
    return _choices.searches()


def clear_algorithms() -> None:
    """Forget every choice made in this process, and reset :func:`search_counts`.

    The store keeps what it has: see :mod:`jqconv.cache`. Jitted functions are traced again.
    """
    _choices.clear()
    _policy.choices_changed()


def choose(spec: ConvSpec, given: Algorithm | None = None) -> Algorithm | None:
    """Return the algorithm for `spec` as far as it is known now, while a function is traced.

    That is the one given or the one chosen before. ``None`` leaves it open: :func:`settle`
    decides when the program is compiled for a GPU that is here, else the device that runs it.
    So tracing for its own sake (eval_shape, make_jaxpr) never searches.

    Raises
    ------
    ValueError
        If `given` does not fit `spec`, or the GPU that is here does not have it.
    """
    _native.report_warnings()
    if given is not None:
        check_legal(spec, given)
        return given if given.form == "xla" or spec.empty else _require(spec, given)
    device = target_gpu()
    if device is None:
        return None
    if not is_open(spec):
        return Algorithm("xla", source="table")
    known = _choices.known(spec, device)
    return None if known is None else known.algorithm


def settle(spec: ConvSpec) -> Algorithm | None:
    """Return the algorithm to compile into a program, searching if none is known.

    ``None`` leaves it to the device that will run the program: there is no GPU here.
    """
    device = gpu_here()
    if device is None:
        return None
    if not is_open(spec):
        return Algorithm("xla", source="table")
    return get(spec, device).algorithm


def get(spec: ConvSpec, device: jax.Device) -> Choice:
    """Return the choice for `spec` on `device`, searching if there is none."""
    return _choices.get(spec, device)


def known(spec: ConvSpec, device: jax.Device) -> Choice | None:
    """Return the choice for `spec` on `device` if there is one, here or in the store."""
    return _choices.known(spec, device)


def replace(spec: ConvSpec, device: jax.Device, choice: Choice) -> None:
    """Make `choice`, found by time, that of this process and of the store."""
    _choices.replace(spec, device, choice)


def gpu_here() -> jax.Device | None:
    """Return the GPU that programs are compiled for, whatever JAX's default device is."""
    return target_gpu() or _first_gpu()


def is_open(spec: ConvSpec) -> bool:
    """Whether there is anything to choose: cuDNN could run `spec` in some form."""
    return _native.is_built() and bool(_forms.forms(spec))


def target_gpu() -> jax.Device | None:
    """Return the CUDA device that what is traced now will run on, or None."""
    config: Any = jax.config  # whose options are typed in some versions of JAX only
    default = config.jax_default_device
    if isinstance(default, str):
        device = jax.local_devices(backend=default)[0]
    else:
        device = default or jax.local_devices()[0]
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return device if is_cuda else None


def _first_gpu() -> jax.Device | None:
    """Return a CUDA device of this process although another is the default."""
    try:
        return jax.local_devices(backend="cuda")[0]
    except RuntimeError:  # JAX found none
        return None


def _device_key(device: jax.Device) -> str:
    version = _native.versions()["cudnn"]
    capability = getattr(device, "compute_capability", "")
    return f"{device.device_kind} sm{capability} cudnn{version}"


def _require(spec: ConvSpec, algorithm: Algorithm) -> Algorithm:
    """Return `algorithm`, its workspace filled in, or raise where the GPU that is here lacks it."""
    device = target_gpu()
    if device is None:
        return algorithm
    limit = max(algorithm.workspace, _policy.settings().workspace_limit)
    core, named = core_of(spec, algorithm)
    text, reason = _native.resolve(str(core), str(named), device.local_hardware_id, limit)
    if not text:
        raise ValueError(
            f"algorithm={str(algorithm)!r} is not available on {device.device_kind}: {reason}; "
            "leave algorithm out to let jqconv choose"
        )
    return dataclasses.replace(Algorithm.parse(text), form=algorithm.form)


def _local_gpu(ordinal: int) -> jax.Device | None:
    devices = jax.local_devices(backend="cuda")
    return next((d for d in devices if d.local_hardware_id == ordinal), None)
