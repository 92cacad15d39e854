"""The extension, and the package around it, where there is no CUDA device."""

import jax
import pytest
from checking import refused, run_python

import jqconv
from jqconv import _native

SPEC = (
    "direction=fprop x=int8:2,6,5,8 w=int8:8,3,3,8 y=int8:2,6,5,8 "
    "strides=1,1 padding=1,1,1,1 dilation=1,1 groups=1 multiplier=channel"
)
TARGETS = {"jqconv_fprop_v1", "jqconv_dgrad_v1", "jqconv_wgrad_v1", "jqconv_time_v1"}

needs_handlers = pytest.mark.skipif(
    not _native.is_built(), reason="built without the CUDA handlers (JQCONV_CUDA=OFF)"
)
needs_no_gpu = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="there is a CUDA device here"
)


def test_import_needs_no_device_and_says_nothing():
    """Nor does it start a backend, load a CUDA library, or print."""
    code = (
        "import jqconv, jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized()\n"
        "maps = open('/proc/self/maps').read()\n"
        "assert 'libcudnn' not in maps and 'libcudart' not in maps, maps\n"
    )
    result = run_python("-W", "error::Warning:jqconv", "-c", code, CUDA_VISIBLE_DEVICES="")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_public_names():
    for name in jqconv.__all__:
        assert getattr(jqconv, name).__doc__, name


@pytest.mark.skipif(_native.is_built(), reason="built with the CUDA handlers")
def test_without_handlers_asking_for_them_says_how_to_get_them():
    for ask in (
        lambda: _native.resolve(SPEC, "", 0, 0),
        lambda: _native.propose(SPEC, 0),
        lambda: _native.vary(SPEC, "int8/s:eng4@91900", 0),
        lambda: _native.serialize(SPEC, "int8/s:eng4@91900", 0),
        _native.versions,
    ):
        with refused(RuntimeError, "JQCONV_CUDA=OFF"):
            ask()


@pytest.mark.skipif(_native.is_built(), reason="built with the CUDA handlers")
def test_without_handlers_there_is_nothing_to_tell_them():
    _native.set_store(None, None)
    _native.report_warnings()


@needs_handlers
def test_every_target_is_registered():
    registrations = _native.extension().registrations()
    assert set(registrations["targets"]) == TARGETS
    assert set(registrations["types"]) == {"jqconv_plan"}
    for stages in registrations["targets"].values():
        assert {"instantiate", "initialize", "execute"} <= set(stages)


@needs_handlers
@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("direction=fprop", "direction=sideways", "sideways"),
        ("x=int8:2,6,5,8", "x=int8:2,6,5", "2,6,5"),
        ("x=int8:2,6,5,8", "x=int4:2,6,5,8", "int4"),
        ("y=int8:2,6,5,8", "y=int8:2,6,5,9", "9"),
        ("y=int8:2,6,5,8", "y=int8:2,7,5,8", "7"),
        ("w=int8:8,3,3,8", "w=int8:8,3,3,7", "7"),
        ("strides=1,1", "strides=0,1", "0"),
        ("padding=1,1,1,1", "padding=1,1,1", "1,1,1"),
        ("padding=1,1,1,1", "padding=-1,1,1,1", "-1"),
        ("groups=1", "groups=3", "3"),
        ("groups=1", "groups=one", "one"),
        (" groups=1", "", "groups"),
        ("multiplier=channel", "multiplier=both", "both"),
        ("multiplier=channel", "multiplier=channel activation=tanh", "tanh"),
        ("multiplier=channel", "multiplier=channel activation=leaky_relu:x", "leaky_relu:x"),
        ("multiplier=channel", "multiplier=channel activation=leaky_relu:1.5", "leaky_relu:1.5"),
        ("multiplier=channel", "multiplier=channel activation=relu6:0.0", "relu6:0.0"),
        ("multiplier=channel", "multiplier=channel color=red", "color"),
        ("multiplier=channel", "multiplier=channel multiplier=channel", "multiplier"),
    ],
)
def test_malformed_specs_are_named(old, new, word):
    spec = SPEC.replace(old, new)
    for ask in (
        lambda: _native.resolve(spec, "", 0, 2**25),
        lambda: _native.propose(spec, 0),
        lambda: _native.vary(spec, "int8/s:eng4@91900", 0),
        lambda: _native.serialize(spec, "int8/s:eng4@91900", 0),
    ):
        with refused(ValueError, word):
            ask()


@needs_handlers
@pytest.mark.parametrize(
    ("algorithm", "word"),
    [
        ("fast", "fast"),
        ("int8/s", "int8/s"),
        ("int8/s:eng4", "int8/s:eng4"),
        ("int8/s:eng4_k24@91900", "eng4_k24"),
        ("int8/s:engx@91900", "engx"),
        ("int8/sbr:eng4_k24=0@91900", "int8/sbr:eng4_k24=0@91900"),
        ("bf16/s:eng4_k24=0@91900", "bf16/s:eng4_k24=0@91900"),
    ],
)
def test_malformed_and_unfit_algorithms_are_named(algorithm, word):
    for ask in (
        lambda: _native.resolve(SPEC, algorithm, 0, 2**25),
        lambda: _native.vary(SPEC, algorithm, 0),
    ):
        with refused(ValueError, word):
            ask()


@needs_handlers
@needs_no_gpu
def test_without_a_device_resolving_says_what_was_tried():
    for ask in (
        lambda: _native.resolve(SPEC, "", 0, 2**25),
        lambda: _native.propose(SPEC, 0),
        lambda: _native.vary(SPEC, "int8/s:eng4@91900", 0),
        lambda: _native.serialize(SPEC, "int8/s:eng4@91900", 0),
    ):
        with pytest.raises(RuntimeError, match=r"(?i)cudnn|cuda"):
            ask()


@needs_handlers
def test_cache_controls():
    extension = _native.extension()
    before = extension.cache_info()
    assert {"entries", "capacity", "hits", "misses", "evictions"} <= set(before)
    extension.cache_resize(3)
    try:
        assert extension.cache_info()["capacity"] == 3
    finally:
        extension.cache_resize(before["capacity"])
    with _native.room_for(5):
        assert extension.cache_info()["capacity"] == before["capacity"], "for good, that is"
    extension.cache_clear()
    assert extension.cache_info()["entries"] == 0
    assert isinstance(extension.take_warnings(), list)
    assert extension.take_warnings() == []
