"""Settings: read from the environment, changed for the process or a block, part of every trace."""

import os
import pathlib
import pwd
import threading

import jax
import pytest
from checking import refused

import jqconv
from jqconv import _policy
from jqconv._policy import Settings

DEFAULTS = {
    "search": "tune",
    "workspace_limit": 32 * 2**20,
    "deterministic": False,
    "cache_limit": 256 * 2**20,
}
CHANGES = {
    "search": "cached",
    "workspace_limit": 123,
    "deterministic": True,
    "cache_dir": "/elsewhere",
    "cache_limit": 456,
}
BAD = [
    ("search", "fast"),
    ("search", None),
    ("workspace_limit", -1),
    ("workspace_limit", 1.5),
    ("workspace_limit", "1"),
    ("workspace_limit", True),
    ("cache_limit", -1),
    ("cache_limit", None),
    ("deterministic", 1),
    ("deterministic", "yes"),
    ("cache_dir", 5),
    ("cache_dir", b"/bytes"),
]

each_change = pytest.mark.parametrize(("name", "value"), CHANGES.items())


@pytest.fixture
def config():
    """The settings; those of the process are as before after the test."""
    before = _policy._settings.get_global()
    yield jqconv.config
    _policy._settings.set_global(before)


@pytest.fixture
def traced():
    """A jitted function's traces; call it to run the function."""

    class Traced(list):
        def __call__(self):
            run(1.0)
            return len(self)

    traces = Traced()

    @jax.jit
    def run(x):
        traces.append(_policy.settings())
        return x

    return traces


def in_a_thread(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


# The environment.


def test_the_environment_is_read_at_import():
    given = _policy._settings.get_global()
    assert given.search == os.environ["JQCONV_SEARCH"]
    assert given.cache_dir == os.environ["JQCONV_CACHE_DIR"]


def test_without_variables_all_is_as_documented():
    settings = Settings.from_environment({"XDG_CACHE_HOME": "/caches"})
    assert settings == Settings(**DEFAULTS, cache_dir="/caches/jqconv")


@pytest.mark.parametrize("environment", [{}, {"XDG_CACHE_HOME": ""}], ids=["unset", "empty"])
def test_without_a_place_for_caches_the_store_is_at_home(monkeypatch, environment):
    monkeypatch.setenv("HOME", "/home/someone")
    found = Settings.from_environment(environment).cache_dir
    assert found == "/home/someone/.cache/jqconv"


@pytest.mark.parametrize("environment", [{}, {"JQCONV_CACHE_DIR": "/given"}], ids=["", "given"])
def test_a_user_without_a_home_can_import(monkeypatch, environment):
    """As in a container that runs under a number that it has no name for."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    found = Settings.from_environment(environment)
    assert found.cache_dir == environment.get("JQCONV_CACHE_DIR", found.cache_dir)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("JQCONV_SEARCH", "heuristic", "heuristic"),
        ("JQCONV_SEARCH", "cached", "cached"),
        ("JQCONV_WORKSPACE_LIMIT", "0", 0),
        ("JQCONV_WORKSPACE_LIMIT", "1048576", 2**20),
        ("JQCONV_DETERMINISTIC", "1", True),
        ("JQCONV_DETERMINISTIC", "True", True),
        ("JQCONV_DETERMINISTIC", "yes", True),
        ("JQCONV_DETERMINISTIC", "on", True),
        ("JQCONV_DETERMINISTIC", "0", False),
        ("JQCONV_DETERMINISTIC", "FALSE", False),
        ("JQCONV_DETERMINISTIC", "no", False),
        ("JQCONV_DETERMINISTIC", "off", False),
        ("JQCONV_DETERMINISTIC", "", False),
        ("JQCONV_CACHE_DIR", "/given", "/given"),
        ("JQCONV_CACHE_DIR", "", ""),
        ("JQCONV_CACHE_LIMIT", "7", 7),
    ],
)
def test_each_setting_has_a_variable(variable, text, value):
    name = variable.removeprefix("JQCONV_").lower()
    settings = Settings.from_environment({"XDG_CACHE_HOME": "/caches", variable: text})
    assert settings == Settings(**DEFAULTS | {"cache_dir": "/caches/jqconv"} | {name: value})


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JQCONV_SEARCH", "fast"),
        ("JQCONV_SEARCH", ""),
        ("JQCONV_WORKSPACE_LIMIT", "32 MiB"),
        ("JQCONV_WORKSPACE_LIMIT", "1.5"),
        ("JQCONV_WORKSPACE_LIMIT", ""),
        ("JQCONV_WORKSPACE_LIMIT", "-1"),
        ("JQCONV_DETERMINISTIC", "maybe"),
        ("JQCONV_DETERMINISTIC", "2"),
        ("JQCONV_CACHE_LIMIT", "lots"),
    ],
)
def test_a_bad_variable_is_named(variable, text):
    with refused(ValueError, variable, text):
        Settings.from_environment({variable: text})


# Changes.


@each_change
def test_update_is_for_every_thread(config, name, value):
    assert getattr(config, name) != value
    config.update(**{name: value})
    assert getattr(config, name) == value
    assert in_a_thread(lambda: getattr(config, name)) == value


@each_change
def test_assignment_is_an_update(config, name, value):
    setattr(config, name, value)
    assert in_a_thread(lambda: getattr(config, name)) == value


@each_change
def test_using_is_for_a_block_of_one_thread(config, name, value):
    before = getattr(config, name)
    with config.using(**{name: value}):
        assert getattr(config, name) == value
        assert in_a_thread(lambda: getattr(config, name)) == before
    assert getattr(config, name) == before


def test_using_ends_with_an_error_too(config):
    with pytest.raises(KeyError), config.using(search="cached"):
        raise KeyError
    assert config.search == "heuristic"


def test_blocks_nest(config):
    with config.using(search="tune", workspace_limit=1):
        with config.using(search="cached", cache_limit=2):
            assert (config.search, config.workspace_limit, config.cache_limit) == ("cached", 1, 2)
        assert (config.search, config.workspace_limit) == ("tune", 1)
        assert config.cache_limit == DEFAULTS["cache_limit"]


def test_a_block_outranks_an_update_inside_it(config):
    with config.using(search="tune", deterministic=True):
        config.update(search="cached", workspace_limit=1)
        assert config.search == "tune"
        assert in_a_thread(lambda: config.search) == "cached"
    assert (config.search, config.workspace_limit, config.deterministic) == ("cached", 1, False)


def test_several_settings_change_at_once_or_not_at_all(config):
    config.update(search="cached", workspace_limit=1)
    assert (config.search, config.workspace_limit) == ("cached", 1)
    with refused(ValueError, "workspace_limit", "-1"):
        config.update(search="tune", workspace_limit=-1)
    assert (config.search, config.workspace_limit) == ("cached", 1)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_named_and_changes_nothing(config, name, value):
    before = repr(config)
    with refused((ValueError, TypeError), name, repr(value)):
        config.update(**{name: value})
    with refused((ValueError, TypeError), name, repr(value)), config.using(**{name: value}):
        pass
    assert repr(config) == before


def test_an_unknown_name_is_refused_with_the_known_ones(config):
    known = ("'serach'", "cache_dir", "deterministic", "search", "workspace_limit")
    with refused(AttributeError, *known):
        config.serach  # noqa: B018
    with refused(TypeError, *known):
        config.serach = "tune"
    with refused(TypeError, *known):
        config.update(serach="tune")
    with refused(TypeError, *known), config.using(serach="tune"):
        pass
    assert not hasattr(config, "serach")


def test_repr_shows_the_settings_in_force(config):
    with config.using(workspace_limit=5, cache_dir="/d", cache_limit=6):
        assert repr(config) == (
            "jqconv.config(search='heuristic', workspace_limit=5, deterministic=False, "
            "cache_dir='/d', cache_limit=6)"
        )


# Traces.


PLACES = ("cache_dir", "cache_limit")


@each_change
def test_a_change_traces_again(config, traced, name, value):
    if name in PLACES:
        pytest.skip("where results are kept changes no program")
    assert traced() == 1
    with config.using(**{name: value}):
        assert traced() == 2
    assert traced() == 2, "what was traced with the settings before is still good"
    config.update(**{name: value})
    assert traced() == 2, "and so is what was traced with these"
    assert [getattr(settings, name) == value for settings in traced] == [False, True]


@pytest.mark.parametrize(("name", "value"), [("cache_dir", "/elsewhere"), ("cache_limit", 456)])
def test_where_results_are_kept_changes_no_program(config, traced, name, value):
    assert traced() == 1
    with config.using(**{name: value}):
        assert traced() == 1
    config.update(**{name: value})
    assert traced() == 1
    assert getattr(config, name) == value


def test_a_directory_is_made_absolute(config, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    with config.using(cache_dir="~/plans"):
        assert config.cache_dir == "/home/someone/plans"
    with config.using(cache_dir="plans"):
        assert config.cache_dir == os.path.abspath("plans")


def test_the_settings_are_listed(config):
    assert {"search", "deterministic", "update"} <= set(dir(config))


@each_change
def test_the_same_value_does_not(config, traced, name, value):
    config.update(**{name: value})
    traced()
    config.update(**{name: value})
    with config.using(**{name: value}):
        assert traced() == 1


def test_changed_choices_trace_again_in_every_thread(traced):
    assert traced() == 1
    in_a_thread(_policy.choices_changed)
    assert traced() == 2
    assert in_a_thread(traced) == 2


# The store.


def test_a_directory_has_one_store(config, tmp_path):
    with config.using(cache_dir=str(tmp_path / "a")):
        first = _policy.store()
        assert (first.root, first.limit) == (tmp_path / "a", DEFAULTS["cache_limit"])
        with config.using(cache_dir=str(tmp_path / "b")):
            assert _policy.store().root == tmp_path / "b"
        with config.using(cache_limit=5):
            assert _policy.store().limit == 5
        assert _policy.store() is first
    config.update(cache_dir=tmp_path / "a")
    assert in_a_thread(_policy.store) is first


def test_a_path_is_kept_as_text(config):
    with config.using(cache_dir=pathlib.Path("/d")):
        assert config.cache_dir == "/d"


def test_an_empty_directory_switches_the_store_off(config):
    with config.using(cache_dir=""):
        assert _policy.store() is None
        assert jqconv.cache.path() is None
