"""Walking through a model: what is in it, putting other things there, watching it run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import jax
from flax import nnx

Path: TypeAlias = tuple[str, ...]


def modules(model: nnx.Module) -> list[tuple[Path, nnx.Module]]:
    """Return `model` and the modules in it with their paths, each once.

    In the order of definition, where `nnx.iter_modules` goes by name. (A model that came out of
    `nnx.jit`, `nnx.merge` or `nnx.clone` has only names left to go by.) What is in several places
    has the path that comes first by the alphabet, whatever the order.
    """
    if not isinstance(model, nnx.Module):
        raise TypeError(f"expected a flax.nnx.Module, got {type(model).__name__}")
    paths = {id(node): path for path, node in _nodes(model, by_name=True)}
    nodes = [node for _, node in _nodes(model)]
    return [(paths[id(node)], node) for node in nodes if isinstance(node, nnx.Module)]


def _nodes(model: nnx.Module, *, by_name: bool = False) -> list[tuple[Path, nnx.Pytree]]:
    """Return `model` and what nnx knows in it, modules and others, each once."""
    found: dict[int, tuple[Path, nnx.Pytree]] = {}

    def walk(path: Path, value: Any) -> None:
        if isinstance(value, nnx.Pytree):
            if id(value) in found:
                return
            found[id(value)] = path, value
        children = [(str(key), child) for key, child in _children(value)]
        for key, child in sorted(children, key=lambda c: c[0]) if by_name else children:
            walk((*path, key), child)

    walk((), model)
    return list(found.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Return what is in a node or a plain container, with its names."""
    if isinstance(value, list | tuple | nnx.List):
        return list(enumerate(value))
    if isinstance(value, nnx.Pytree):
        return [(k, v) for k, v in vars(value).items() if not k.startswith("_pytree__")]
    return list(value.items()) if isinstance(value, dict) else []


def name_of(path: Path) -> str:
    """Return a path as reports show it."""
    return ".".join(path) or "the model"


def replace(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> None:
    """Put other modules in the places of those with these ids, everywhere in `model`."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nnx.Pytree):
            return replacements.get(id(value), value)
        if isinstance(value, tuple):
            new = [replaced(item) for item in value]
            same = all(a is b for a, b in zip(new, value, strict=True))
            if same:
                return value
            named = hasattr(value, "_fields")  # a namedtuple takes its items one by one
            return type(value)(*new) if named else type(value)(new)
        for key, item in _children(value):
            value[key] = replaced(item)
        return value

    for _, parent in _nodes(model):
        for key, child in _children(parent):
            new = replaced(child)
            if new is child:
                continue
            if isinstance(parent, nnx.List):
                parent[key] = new
            else:
                setattr(parent, key, nnx.data(new))


@dataclasses.dataclass(frozen=True)
class Watched:
    """A call of a module: what it was first given, and what it returned.

    Kept, so that the ids of arrays stay theirs.
    """

    module: nnx.Module
    x: Any
    y: Any


@contextlib.contextmanager
def watching(watched: Iterable[nnx.Module]) -> Iterator[list[Watched]]:
    """Note the calls of modules, in order, for the scope.

    The modules stay themselves: for the scope they are of classes that derive from their own.
    """
    calls: list[Watched] = []

    def derive(kind: type[Any]) -> type[Any]:
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            y = kind.__call__(self, *args, **kwargs)
            x = args[0] if args else kwargs.get("inputs", kwargs.get("x"))
            calls.append(Watched(self, x, y))
            return y

        return type(kind.__name__, (kind,), {"__call__": __call__})

    kinds = {id(module): (module, type(module)) for module in watched}
    derived = {kind: derive(kind) for kind in {kind for _, kind in kinds.values()}}
    try:
        for module, kind in kinds.values():
            object.__setattr__(module, "__class__", derived[kind])
        yield calls
    finally:
        for module, kind in kinds.values():
            object.__setattr__(module, "__class__", kind)


@contextlib.contextmanager
def state_kept(model: nnx.Module) -> Iterator[None]:
    """Put the state of the model back after the scope: running statistics, counts of keys."""
    before = jax.tree.map(lambda leaf: leaf, nnx.state(model))
    try:
        yield
    finally:
        nnx.update(model, before)
