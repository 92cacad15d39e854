"""The settings: how algorithms are chosen, and where choices are kept.

They are part of JAX's trace context, as is the generation of what has been chosen: a change makes
jitted functions trace again and so takes effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import pathlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias, get_args

import jax

from jqconv._store import Store

Search: TypeAlias = Literal["tune", "heuristic", "cached"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The values of :data:`jqconv.config`, which documents them.

    Raises
    ------
    ValueError
        If a value is none that its setting can have.
    """

    search: Search = "tune"
    workspace_limit: int = 32 * 2**20
    deterministic: bool = False
    # Where results are kept changes no program: no part of the trace context.
    cache_dir: str = dataclasses.field(default="", compare=False)
    cache_limit: int = dataclasses.field(default=256 * 2**20, compare=False)

    def __post_init__(self) -> None:
        if self.search not in get_args(Search):
            raise ValueError(f"search={self.search!r} is none of {', '.join(get_args(Search))}")
        for name in ("workspace_limit", "cache_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{name}={value!r} must be a number of bytes, an int of at least 0"
                )
        if not isinstance(self.deterministic, bool):
            raise ValueError(f"deterministic={self.deterministic!r} must be True or False")
        if not isinstance(self.cache_dir, str | pathlib.Path):
            raise ValueError(f"cache_dir={self.cache_dir!r} must be a path, a str or pathlib.Path")
        if str(self.cache_dir):
            path = pathlib.Path(self.cache_dir).expanduser().absolute()
            object.__setattr__(self, "cache_dir", str(path))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the defaults, less what variables such as ``JQCONV_SEARCH`` say."""
        given: dict[str, Any] = {"cache_dir": _default_cache_dir(environment)}
        for field in dataclasses.fields(cls):
            variable = f"JQCONV_{field.name.upper()}"
            if variable in environment:
                given[field.name] = _parse(variable, environment[variable], field.type)
                try:
                    cls(**given)
                except ValueError as error:
                    raise ValueError(f"{variable}={environment[variable]!r}: {error}") from None
        return cls(**given)


def _default_cache_dir(environment: Mapping[str, str]) -> str:
    base = environment.get("XDG_CACHE_HOME")
    try:
        home = pathlib.Path(base) if base else pathlib.Path("~/.cache").expanduser()
    except RuntimeError:  # a user without a home, as in some containers: nothing is kept
        return ""
    return str(home / "jqconv")


def _parse(variable: str, text: str, kind: Any) -> Any:
    if kind == "bool":
        if text.lower() in (*_TRUE, *_FALSE):
            return text.lower() in _TRUE
        raise ValueError(f"{variable}={text!r} must be 1 or 0")
    if kind == "int":
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{variable}={text!r} must be a number of bytes") from None
    return text


# The generation is global alone: a choice made or forgotten is so in every thread.
_settings = jax.make_user_context(default_value=Settings.from_environment(os.environ))
_generation = jax.make_user_context(default_value=0)
_lock = threading.Lock()


def settings() -> Settings:
    """Return the settings in force in this thread."""
    found: Settings = _settings.value
    return found


def within(settings: Settings) -> contextlib.AbstractContextManager[None]:
    """Put `settings` in force in this thread, inside a ``with`` block."""
    context: contextlib.AbstractContextManager[None] = _settings(settings)
    return context


def choices_changed() -> None:
    """Make jitted functions trace again: what has been chosen for them may be another."""
    with _lock:
        _generation.set_global(_generation.get_global() + 1)


def store() -> Store | None:
    """Return the store of the settings in force, or None where it is switched off."""
    now = settings()
    return _open_store(now.cache_dir, now.cache_limit) if now.cache_dir else None


@functools.lru_cache(maxsize=16)
def _open_store(root: str, limit: int) -> Store:
    return Store(pathlib.Path(root), limit)


class Config:
    """How jqconv chooses algorithms; the one instance is ``jqconv.config``.

    Every setting has an environment variable, read at import: ``JQCONV_`` and its name in
    capitals. A change takes effect at once: functions under ``jax.jit`` are traced again.

    Attributes
    ----------
    search : {"tune", "heuristic", "cached"}
        What to do for a convolution that was not met before on a GPU. ``"tune"`` (the default)
        builds and times what cuDNN proposes, which takes seconds once; ``"heuristic"`` takes its
        first proposal; ``"cached"`` raises RuntimeError unless the store has a choice.
    workspace_limit : int
        Most bytes of workspace that a plan may need; 32 MiB by default.
    deterministic : bool
        Whether to use only plans that return the same bits in every run and, so that two
        processes agree, to choose by cuDNN's order and never by time. False by default.
    cache_dir : str
        Where choices and plans are kept between processes: ``jqconv`` in ``$XDG_CACHE_HOME`` or in
        ``~/.cache`` by default; ``""`` keeps nothing.
    cache_limit : int
        Bytes that the store may take; the least recently used goes first. 256 MiB by default.

    Examples
    --------
    >>> with config.using(search="heuristic"):
    ...     config.search
    'heuristic'
    """

    search: Search
    workspace_limit: int
    deterministic: bool
    cache_dir: str
    cache_limit: int

    def __getattr__(self, name: str) -> Any:
        if name in _names():
            return getattr(settings(), name)
        raise AttributeError(f"jqconv.config has no setting {name!r}; there are {_listed()}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.update(**{name: value})

    def update(self, **changes: Any) -> None:
        """Change settings for the whole process; inside :meth:`using`, what is after it.

        Raises
        ------
        ValueError
            If a setting cannot have its value.
        TypeError
            If there is no such setting.
        """
        with _lock:
            _settings.set_global(_changed(_settings.get_global(), changes))

    @contextlib.contextmanager
    def using(self, **changes: Any) -> Iterator[None]:
        """Change settings in this thread, inside a ``with`` block. Raises as :meth:`update`."""
        with within(_changed(settings(), changes)):
            yield

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *_names()]

    def __repr__(self) -> str:
        return repr(settings()).replace("Settings", "jqconv.config", 1)


def _changed(base: Settings, changes: Mapping[str, Any]) -> Settings:
    unknown = sorted(changes.keys() - _names())
    if unknown:
        raise TypeError(f"jqconv.config has no setting {unknown[0]!r}; there are {_listed()}")
    return dataclasses.replace(base, **changes)


def _names() -> frozenset[str]:
    return frozenset(field.name for field in dataclasses.fields(Settings))


def _listed() -> str:
    return ", ".join(sorted(_names()))


config = Config()
