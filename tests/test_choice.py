"""Who chooses an algorithm, when, and what is remembered: on a GPU that is only pretended."""

import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.export
import jax.numpy as jnp
import pytest
from checking import refused

import jqconv
from jqconv import Algorithm, _choice, _native, _policy
from jqconv._algorithm import core_of
from jqconv._choice import Choice, Trial
from jqconv._spec import Activation, ConvSpec

HEURISTIC = {d: f"{f}:eng3_k1=2,ws=16@91900" for d, f in [("fprop", "int8/s"), ("dgrad", "bf16/c")]}
HEURISTIC["wgrad"] = HEURISTIC["dgrad"]
TUNED = {d: f"{f}:eng7_k1=5,ws=32@91900" for d, f in [("fprop", "int8/s"), ("dgrad", "bf16/c")]}
TUNED["wgrad"] = TUNED["dgrad"]
PADDED = "padded16/s:eng7,ws=32@91900"
NONE = {"fprop": 0, "dgrad": 0, "wgrad": 0}


class Gpu:
    """A device whose cuDNN answers from a script, and notes what it was asked."""

    def __init__(self):
        self.device_kind = "Pretended GPU"
        self.compute_capability = "9.0"
        self.local_hardware_id = 0
        self.cudnn = 91900
        self.asked = []
        self.timed = []
        self.tuned = TUNED

    def resolve(self, spec, algorithm, device, workspace_limit, deterministic=False):
        self.asked.append((spec, algorithm, device, workspace_limit, deterministic))
        if "w=int8:5," in spec or algorithm.startswith("int8/s:eng77"):
            return "", "no engine"
        direction = spec.split()[0].removeprefix("direction=")
        return algorithm or HEURISTIC[direction], ""

    def serialize(self, spec, algorithm, device):
        return f"{algorithm} for {spec} on {device}, built".encode()

    def tune(self, spec, device):
        self.timed.append(spec)
        algorithm = Algorithm.parse(self.tuned[spec.direction], "tuned")
        return Choice(algorithm, 7.5, (Trial(str(algorithm), 7.5), Trial("xla", 9.0, True)))


@pytest.fixture
def gpu(monkeypatch):
    gpu = Gpu()
    monkeypatch.setattr(_native, "resolve", gpu.resolve)
    monkeypatch.setattr(_native, "serialize", gpu.serialize)
    monkeypatch.setattr(_native, "is_built", lambda: True)
    monkeypatch.setattr(_native, "versions", lambda: {"cudnn": gpu.cudnn, "frontend": "1.28.0"})
    monkeypatch.setattr(_choice, "target_gpu", lambda: gpu)
    monkeypatch.setattr(_choice, "_local_gpu", {0: gpu}.get)
    monkeypatch.setattr(_choice, "_choices", _choice._Choices())
    monkeypatch.setitem(_choice.searchers, "tune", gpu.tune)
    return gpu


@pytest.fixture
def restart(monkeypatch):
    """What a new process has: the store, and nothing else."""

    def restart():
        jax.clear_caches()
        monkeypatch.setattr(_choice, "_choices", _choice._Choices())

    return restart


@pytest.fixture
def store(tmp_path):
    with jqconv.config.using(cache_dir=tmp_path):
        yield _policy.store()


def using(**changes):
    return jqconv.config.using(**changes)


def settle_with(search, spec, **changes):
    with using(search=search, **changes):
        return _choice.settle(spec)


def spec(k=4, **changes):
    return ConvSpec(
        **({"x_shape": (1, 4, 4, 4), "w_shape": (k, 3, 3, 4), "multiplier": "scalar"} | changes)
    )


# One search for each convolution.


def test_searches_once_for_each_spec_and_direction(gpu):
    specs = [spec(), spec(8), spec().backward("dgrad", "bfloat16"), spec(multiplier="channel")]
    for _ in range(10):
        chosen = [_choice.settle(s) for s in specs[:3]]
    assert jqconv.search_counts() == {"fprop": 2, "dgrad": 1, "wgrad": 0}
    assert [str(a) for a in chosen] == [HEURISTIC[d] for d in ("fprop", "fprop", "dgrad")]
    assert chosen[0].source == "heuristic"
    _choice.settle(specs[3])
    assert jqconv.search_counts()["fprop"] == 3
    assert len(gpu.asked) == 4


def test_every_part_of_the_epilogue_is_another_choice(gpu):
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
        _choice.settle(spec(**change))
    assert jqconv.search_counts()["fprop"] == len(changes)


def test_forgetting_searches_again(gpu):
    _choice.settle(spec())
    jqconv.clear_algorithms()
    assert jqconv.search_counts() == NONE
    assert _choice.choose(spec()) is None
    _choice.settle(spec())
    assert jqconv.search_counts()["fprop"] == 1


@pytest.mark.parametrize("workspace", ["", f",ws={2**30}"], ids=["", "workspace"])
def test_what_is_given_is_asked_for_and_not_searched(gpu, workspace):
    given = Algorithm.parse(f"int8/s:eng9_k1=0{workspace}@91900")
    assert _choice.choose(spec(), given) == given
    assert jqconv.search_counts() == NONE
    ((_, asked, _, limit, _),) = gpu.asked
    assert asked == str(given)
    assert limit == max(given.workspace, jqconv.config.workspace_limit)


def test_what_is_given_in_another_form_is_asked_for_at_its_core(gpu):
    given = Algorithm.parse("padded16+widened/s:eng9@91900")
    assert _choice.choose(spec(), given) == given
    ((asked, algorithm, *_),) = gpu.asked
    assert algorithm == "bf16/s:eng9@91900"
    assert asked == str(core_of(spec(), given)[0])


def test_a_missing_algorithm_is_named(gpu):
    with refused(ValueError, "int8/s:eng77@91900", "Pretended GPU", "no engine"):
        _choice.choose(spec(), Algorithm.parse("int8/s:eng77@91900"))


@pytest.mark.parametrize(
    ("changes", "asked"),
    [({"w_shape": (4, 3, 3, 1), "groups": 4}, 0), ({"k": 5}, 1)],
    ids=["known to have none", "refused"],
)
def test_without_an_engine_the_lax_lowering_runs(gpu, changes, asked):
    for _ in range(2):
        chosen = _choice.settle(spec(**changes))
        assert (str(chosen), chosen.source) == ("xla", "table")
    assert len(gpu.asked) == asked
    assert _choice.choose(spec(**changes)) == chosen


@pytest.mark.parametrize(
    "other",
    [spec(x_shape=(0, 4, 4, 4)), spec().backward("wgrad", "float32"), spec(w_dtype="int16")],
    ids=["empty", "float32", "int16"],
)
def test_what_never_runs_on_cudnn_needs_no_search(gpu, other):
    for search in ("tune", "heuristic", "cached"):
        with using(search=search):
            assert str(_choice.choose(other)) == str(_choice.settle(other)) == "xla"
    assert not gpu.asked
    assert not gpu.timed


# Where there is no such GPU.


def test_without_a_gpu_the_choice_is_left_open(gpu, monkeypatch):
    monkeypatch.setattr(_choice, "target_gpu", lambda: None)
    monkeypatch.setattr(_choice, "_first_gpu", lambda: None)
    assert _choice.choose(spec()) is None
    assert _choice.settle(spec()) is None
    assert not gpu.asked


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a CUDA device here")
def test_no_gpu_is_found_here():
    assert _choice.target_gpu() is None
    assert _choice._first_gpu() is None
    assert _choice.settle(spec()) is None


def test_a_gpu_that_is_not_the_default_device_is_asked_for_its_programs_alone(gpu, monkeypatch):
    monkeypatch.setattr(_choice, "target_gpu", lambda: None)
    monkeypatch.setattr(_choice, "_first_gpu", lambda: gpu)
    assert str(_choice.settle(spec())) == HEURISTIC["fprop"]
    assert _choice.choose(spec()) is None


def test_without_the_extension_the_lax_lowering_runs(gpu, monkeypatch):
    def missing():
        raise RuntimeError("built without")

    monkeypatch.setattr(_native, "is_built", lambda: False)
    monkeypatch.setattr(_native, "versions", missing)
    assert str(_choice.choose(spec())) == str(_choice.settle(spec())) == "xla"


# When it is searched: for a program that is compiled here.


def layer(x, w):
    return jqconv.qconv2d(x, w, 0.1)


def loss(x, w):
    return jnp.sum(jqconv.conv2d(x, w, x_scale=0.1, w_scale=0.1) ** 2)


gradient = jax.grad(loss, (0, 1))
CODES = jnp.ones((1, 4, 4, 4), jnp.int8), jnp.ones((3, 3, 4, 4), jnp.int8)
FLOATS = jnp.ones((1, 4, 4, 4)), jnp.ones((3, 3, 4, 4))
PROGRAMS = {
    "layer": (layer, CODES, {"fprop": 1, "dgrad": 0, "wgrad": 0}),
    "gradient": (gradient, FLOATS, {"fprop": 1, "dgrad": 1, "wgrad": 1}),
}


def fresh(function):
    """The function as JAX has not met it."""
    return lambda *args: function(*args)


def lower(function, *args):
    """The text of a program for CUDA."""
    traced = jax.jit(fresh(function)).trace(*args)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def export(function, *args):
    calls = [f"jqconv_{direction}_v1" for direction in NONE]
    checks = [jax.export.DisabledSafetyCheck.custom_call(call) for call in calls]
    jitted = jax.jit(fresh(function))
    return jax.export.export(jitted, platforms=["cuda"], disabled_checks=checks)(*args)


def algorithms_of(text):
    found = re.findall(r'@jqconv_(\w+)_v1\(.*?algorithm = "([^"]*)"', text)
    return dict(found)


@pytest.mark.parametrize("search", ["tune", "heuristic", "cached"])
def test_choosing_never_searches(gpu, search):
    with using(search=search):
        assert _choice.choose(spec()) is None
        assert _choice.known(spec(), gpu) is None
    assert not gpu.asked
    assert not gpu.timed
    assert jqconv.search_counts() == NONE


@pytest.mark.parametrize("search", ["tune", "heuristic"])
def test_what_is_settled_is_chosen_from_then_on(gpu, search):
    with using(search=search):
        settled = _choice.settle(spec())
        assert _choice.choose(spec()) == settled
        assert _choice.known(spec(), gpu).algorithm == settled
        assert _choice.choose(spec(8)) is None


def test_choosing_does_not_wait_for_a_search(gpu, monkeypatch):
    def search(searched, device):
        assert _choice.choose(searched) is None
        return gpu.tune(searched, device)

    monkeypatch.setitem(_choice.searchers, "heuristic", search)
    assert str(_choice.settle(spec())) == TUNED["fprop"]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    "look",
    [
        lambda f, *args: jax.make_jaxpr(fresh(f))(*args),
        lambda f, *args: jax.eval_shape(fresh(f), *args),
        lambda f, *args: jax.jit(fresh(f)).trace(*args),
        export,
    ],
    ids=["make_jaxpr", "eval_shape", "trace", "export"],
)
def test_looking_at_a_function_searches_nothing_and_lowering_it_does(gpu, look, program):
    function, args, searches = PROGRAMS[program]
    look(function, *args)
    assert jqconv.search_counts() == NONE
    lower(function, *args)
    assert jqconv.search_counts() == searches


def test_an_exported_program_leaves_the_choice_to_its_device(gpu):
    exported = export(gradient, *FLOATS)
    assert algorithms_of(exported.mlir_module()) == dict.fromkeys(NONE, "")


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("search", "chosen"), [("tune", TUNED), ("heuristic", HEURISTIC)])
def test_a_program_holds_what_was_chosen(gpu, program, search, chosen):
    function, args, searches = PROGRAMS[program]
    with using(search=search):
        text = lower(function, *args)
    assert algorithms_of(text) == {d: chosen[d] for d, count in searches.items() if count}
    workspace = Algorithm.parse(chosen["fprop"]).workspace
    assert f"tensor<{workspace}xui8>" in text
    assert "pinned = true" not in text


def test_a_program_holds_what_a_form_does_around_its_core(gpu):
    gpu.tuned = {"fprop": PADDED}
    with using(search="tune"):
        text = lower(layer, *CODES)
    assert algorithms_of(text) == {"fprop": "int8/s:eng7,ws=32@91900"}
    assert "x=int8:1,4,4,16 w=int8:16,3,3,16" in text
    assert "stablehlo.pad" in text
    assert "-> tensor<1x4x4x4xi8>" in text


def test_a_program_of_the_lax_lowering_has_no_handler(gpu):
    gpu.tuned = {"fprop": "xla"}
    with using(search="tune"):
        text = lower(layer, *CODES)
    assert not algorithms_of(text)
    assert "stablehlo.convolution" in text


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("search", ["tune", "heuristic"])
def test_a_program_is_the_same_whenever_its_choices_were_made(gpu, store, restart, program, search):
    """So that JAX's own cache of compiled programs knows it again."""
    function, args, searches = PROGRAMS[program]
    with using(search=search):
        first = lower(function, *args)
        assert jqconv.search_counts() == searches
        assert lower(function, *args) == first
        assert jqconv.search_counts() == searches
        restart()
        assert lower(function, *args) == first
        assert jqconv.search_counts() == NONE


def test_backward_runs_what_forward_chose(gpu, restart):
    def jaxpr():
        jax.clear_caches()
        return str(jax.make_jaxpr(gradient)(*FLOATS))

    assert jaxpr().count("algorithm=None") == 3
    for _ in range(2):
        lower(gradient, *FLOATS)
        text = jaxpr()
    assert jqconv.search_counts() == {"fprop": 1, "dgrad": 1, "wgrad": 1}
    assert "algorithm=None" not in text
    for direction, algorithm in HEURISTIC.items():
        assert re.search(rf"jqconv_{direction}\[\s*algorithm={re.escape(algorithm)}\s", text)


def test_a_mapped_convolution_is_chosen_as_the_wider_one(gpu):
    xs = jnp.ones((3, *CODES[0].shape), jnp.int8)
    lower(layer, *CODES)
    text = lower(jax.vmap(layer, (0, None)), xs, CODES[1])
    assert jqconv.search_counts()["fprop"] == 2
    wider = gpu.asked[1][0]
    assert "x=int8:3,4,4,4" in wider
    assert wider in text


# Threads.


@pytest.fixture
def watched(monkeypatch):
    """A semaphore that everyone releases who waits for another's search."""
    waiting = threading.Semaphore(0)

    class Watched(Future):
        def result(self, timeout=None):
            if not self.done():
                waiting.release()
            return super().result(timeout)

    monkeypatch.setattr(_choice, "Future", Watched)
    return waiting


@pytest.mark.parametrize("fails", [False, True], ids=["found", "fails"])
def test_threads_share_one_search_and_its_error(gpu, monkeypatch, watched, fails):
    threads = 8
    searches = []

    def search(searched, device):
        for _ in range(threads - 1):
            assert watched.acquire(timeout=10)
        searches.append(searched)
        if fails and len(searches) == 1:
            raise RuntimeError("cuDNN is out of order")
        return gpu.tune(searched, device)

    def run(_):
        try:
            return str(_choice.settle(spec()))
        except RuntimeError as error:
            return str(error)

    monkeypatch.setitem(_choice.searchers, "heuristic", search)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(run, range(threads)))
    assert found == ["cuDNN is out of order" if fails else TUNED["fprop"]] * threads
    assert len(searches) == 1
    assert jqconv.search_counts()["fprop"] == 1


def test_other_specs_are_searched_beside_it(gpu, monkeypatch):
    together = threading.Barrier(2)

    def search(searched, device):
        together.wait(timeout=10)
        return gpu.tune(searched, device)

    monkeypatch.setitem(_choice.searchers, "heuristic", search)
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(_choice.settle, [spec(), spec(8)]))) == 2


def test_a_failed_search_is_not_remembered(gpu, store, monkeypatch):
    def search(searched, device):
        raise RuntimeError("cuDNN is out of order")

    with monkeypatch.context() as broken:
        broken.setitem(_choice.searchers, "heuristic", search)
        for _ in range(2):
            with refused(RuntimeError, "out of order"):
                _choice.settle(spec())
            assert _choice.choose(spec()) is None
    assert store.entries() == []
    assert str(_choice.settle(spec())) == HEURISTIC["fprop"]


# How it is searched.


def test_a_heuristic_search_takes_a_tuned_choice_where_there_is_one(gpu):
    tuned = settle_with("tune", spec())
    assert settle_with("heuristic", spec()) == tuned
    assert not gpu.asked


def test_a_timed_search_is_not_content_with_a_heuristic_choice(gpu):
    settle_with("heuristic", spec())
    with using(search="tune"):
        assert _choice.choose(spec()) is None
        assert str(_choice.settle(spec())) == TUNED["fprop"]
    assert str(_choice.choose(spec())) == TUNED["fprop"], "now that it is known"


def test_functions_are_traced_again_where_a_timed_choice_replaces_another(gpu):
    traces = []

    @jax.jit
    def run(x):
        traces.append(_choice.choose(spec()))
        return x

    def traced():
        run(1.0)
        return len(traces)

    settle_with("heuristic", spec())
    assert traced() == 1
    settle_with("tune", spec(8))
    assert traced() == 1, "nothing was replaced"
    settle_with("tune", spec())
    assert traced() == 2
    settle_with("tune", spec())
    assert traced() == 2
    assert [str(a) for a in traces] == [HEURISTIC["fprop"], TUNED["fprop"]]
    jqconv.clear_algorithms()
    assert traced() == 3


def test_a_choice_can_be_replaced(gpu, store, restart):
    traces = []
    run = jax.jit(lambda x: (x, traces.append(_choice.choose(spec())))[0])
    better = Choice(Algorithm.parse("int8/s:eng9@91900", "tuned"), 5.0)
    settle_with("tune", spec())
    run(1.0)
    _choice.replace(spec(), gpu, better)
    run(1.0)
    assert [str(algorithm) for algorithm in traces] == [TUNED["fprop"], str(better.algorithm)]
    assert _choice.known(spec(), gpu) == better
    restart()
    assert _choice.known(spec(), gpu) == better
    assert _choice._choice_for_handler(0, str(spec()))[0] == str(better.algorithm)


@pytest.mark.parametrize("search", ["tune", "heuristic"])
def test_a_deterministic_choice_is_made_by_order(gpu, search):
    settle_with("tune", spec())
    chosen = settle_with(search, spec(), deterministic=True)
    assert (str(chosen), chosen.source) == (HEURISTIC["fprop"], "heuristic")
    assert [deterministic for *_, deterministic in gpu.asked] == [True]
    assert len(gpu.timed) == 1
    assert str(settle_with("heuristic", spec(8))) == HEURISTIC["fprop"]
    assert [deterministic for *_, deterministic in gpu.asked] == [True, False]


def test_a_deterministic_choice_is_not_replaced_by_a_timed_one(gpu):
    with using(deterministic=True):
        settled = _choice.settle(spec())
        _choice.replace(spec(), gpu, gpu.tune(spec(), gpu))
        assert _choice.choose(spec()) == settled


def test_processes_that_compile_together_time_nothing(gpu, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert str(settle_with("tune", spec())) == HEURISTIC["fprop"]
    assert not gpu.timed


def test_the_workspace_limit_reaches_cudnn(gpu):
    settle_with("heuristic", spec(), workspace_limit=123)
    assert [limit for *_, limit, _ in gpu.asked] == [123]


# The store.


def entry_of(store, kind):
    (key,) = [stored.key for stored in store.entries() if stored.record["kind"] == kind]
    return store.get(key)


@pytest.mark.parametrize("search", ["tune", "heuristic"])
@pytest.mark.parametrize("algorithm", [TUNED["fprop"], PADDED, "xla"])
def test_a_new_process_searches_nothing(gpu, store, restart, search, algorithm):
    gpu.tuned = {"fprop": algorithm}
    with using(search=search):
        settled = _choice.settle(spec())
        before = _choice.known(spec(), gpu)
        restart()
        chosen = _choice.choose(spec())
        assert chosen == settled == _choice.settle(spec())
        assert chosen.source == "cached"
        assert _choice.known(spec(), gpu) == before
    assert jqconv.search_counts() == NONE
    assert len(gpu.asked) + len(gpu.timed) == 1


def test_without_a_store_a_new_process_searches_again(gpu, restart):
    _choice.settle(spec())
    restart()
    assert _choice.choose(spec()) is None
    _choice.settle(spec())
    assert len(gpu.asked) == 2


@pytest.mark.parametrize("algorithm", [TUNED["fprop"], PADDED])
def test_handlers_get_the_plan_that_was_built(gpu, store, algorithm):
    gpu.tuned = {"fprop": algorithm}
    core, named = map(str, core_of(spec(), settle_with("tune", spec())))
    built = gpu.serialize(core, named, 0)
    assert _choice._plan_for_handler(0, core, named) == built
    assert _choice._plan_for_handler(1, core, named) is None
    assert _choice._plan_for_handler(0, str(spec(8)), named) is None
    assert _choice._plan_for_handler(0, core, HEURISTIC["fprop"]) is None
    gpu.cudnn = 92000
    assert _choice._plan_for_handler(0, core, named) is None
    gpu.cudnn = 91900
    with using(cache_dir=""):
        assert _choice._plan_for_handler(0, core, named) is None


def test_handlers_get_the_choice_for_a_program_that_names_none(gpu, store):
    text = str(spec())
    assert _choice._choice_for_handler(0, text)[0] is None
    settle_with("heuristic", spec())
    assert _choice._choice_for_handler(0, text)[0] == HEURISTIC["fprop"]
    settle_with("tune", spec())
    assert _choice._choice_for_handler(0, text)[0] == TUNED["fprop"]
    assert _choice._choice_for_handler(1, text)[0] is None
    with using(deterministic=True):
        assert _choice._choice_for_handler(0, text)[0] is None
    with using(cache_dir=""):
        assert _choice._choice_for_handler(0, text)[0] is None


@pytest.mark.parametrize("algorithm", [PADDED, "xla"])
@pytest.mark.parametrize("before", [None, HEURISTIC["fprop"]], ids=["alone", "after another"])
def test_handlers_get_no_choice_that_takes_more_than_a_handler(gpu, store, algorithm, before):
    gpu.tuned = {"fprop": algorithm}
    if before:
        settle_with("heuristic", spec())
    assert str(settle_with("tune", spec())) == algorithm
    assert _choice._choice_for_handler(0, str(spec()))[0] == before


@pytest.mark.parametrize("search", ["tune", "heuristic"])
@pytest.mark.parametrize(
    ("attributes", "settings"),
    [
        ({"device_kind": "Another GPU"}, {}),
        ({"compute_capability": "10.0"}, {}),
        ({"cudnn": 92000}, {}),
        ({}, {"workspace_limit": 2**20}),
        ({}, {"deterministic": True}),
    ],
    ids=str,
)
def test_what_a_choice_depends_on_is_not_shared(gpu, store, restart, search, attributes, settings):
    def searches():
        return len(gpu.asked) + len(gpu.timed)

    first = settle_with(search, spec())
    original = {name: getattr(gpu, name) for name in attributes}
    for again in (lambda: None, restart):
        again()
        vars(gpu).update(attributes)
        with using(search=search, **settings):
            if again is restart:
                assert _choice.choose(spec()).source == "cached"
            else:
                assert _choice.choose(spec()) is None
            _choice.settle(spec())
        assert searches() == 2
        vars(gpu).update(original)
        assert settle_with(search, spec()) == first
    assert searches() == 2


@pytest.mark.parametrize(
    "damage",
    [
        {"algorithm": "folded/s:eng3@91900"},
        {"algorithm": "space_to_depth/s:eng3@91900"},
        {"algorithm": "bf16/s:eng3@91900"},
        {"algorithm": "int8/sb:eng3@91900"},
        {"algorithm": "fast"},
        {"algorithm": 5},
        {"algorithm": None},
        {"trials": 5},
        {"trials": None},
        {"trials": ["int8/s:eng3@91900"]},
        {"trials": [["int8/s:eng3@91900"]]},
        {"trials": [["int8/s:eng3@91900", 1.0, False, "more"]]},
        ["algorithm"],
        ["microseconds"],
        ["trials"],
    ],
    ids=str,
)
def test_a_record_that_is_not_understood_is_searched_for_again(gpu, store, restart, damage):
    with using(search="tune"):
        _choice.settle(spec())
        entry = entry_of(store, "choice")
        lacking = [] if isinstance(damage, dict) else damage
        record = {name: value for name, value in entry.record.items() if name not in lacking}
        store.put(entry.key, record | (damage if isinstance(damage, dict) else {}))
        restart()
        assert _choice.choose(spec()) is None
        assert str(_choice.settle(spec())) == TUNED["fprop"]
        assert len(gpu.timed) == 2
        assert store.get(entry.key) == entry


@pytest.mark.parametrize("kept", ["tune", "heuristic"])
def test_cached_takes_what_the_store_has(gpu, store, restart, kept):
    settled = settle_with(kept, spec())
    restart()
    assert settle_with("cached", spec()) == settled
    assert jqconv.search_counts() == NONE


def test_cached_prefers_what_was_timed(gpu, store, restart):
    for search in ("heuristic", "tune"):
        settle_with(search, spec())
    restart()
    assert str(settle_with("cached", spec())) == TUNED["fprop"]


def test_cached_without_an_entry_names_the_convolution(gpu, store):
    settle_with("tune", spec(8))
    with refused(RuntimeError, str(spec()), "Pretended GPU", str(store.root), "'cached'"):
        settle_with("cached", spec())
    with refused(RuntimeError, "x=int8:1,4,4,4", "'cached'"), using(search="cached"):
        lower(layer, *CODES)
    assert jqconv.search_counts() == {**NONE, "fprop": 1}


def test_a_plan_that_cannot_be_stored_fails_no_run(gpu, store, restart, monkeypatch, caplog):
    def serialize(spec, algorithm, device):
        raise RuntimeError("this engine cannot be serialized")

    monkeypatch.setattr(_native, "serialize", serialize)
    settled = _choice.settle(spec())
    assert str(settled) == HEURISTIC["fprop"]
    (message,) = caplog.messages
    assert str(settled) in message
    assert "cannot be serialized" in message
    assert [entry.record["kind"] for entry in store.entries()] == ["choice"]
    restart()
    assert _choice.choose(spec()) == settled


def test_another_store_gets_what_is_known_already(gpu, tmp_path):
    """So that a store of its own can be shipped with a model that has run before."""
    for place in ("first", "second"):
        with using(cache_dir=tmp_path / place, search="tune"):
            _choice.settle(spec())
            kinds = [entry.record["kind"] for entry in _policy.store().entries()]
        assert sorted(kinds) == ["choice", "plan"]
    assert jqconv.search_counts()["fprop"] == 1


def test_a_plan_that_was_lost_is_stored_again(gpu, store, restart):
    settle_with("tune", spec())
    (plan,) = [entry for entry in store.entries() if entry.record["kind"] == "plan"]
    (
        store.root
        / next(p.name for p in store.root.iterdir() if plan.key in p.read_text("latin-1"))
    ).unlink()
    restart()
    settle_with("tune", spec())
    assert plan.key in [entry.key for entry in store.entries()]


def test_handlers_are_told_to_be_deterministic(gpu, store):
    assert _choice._choice_for_handler(0, str(spec())) == (None, False)
    with using(deterministic=True):
        assert _choice._choice_for_handler(0, str(spec())) == (None, True)
