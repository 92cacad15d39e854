"""Choosing the algorithms of a whole function at once, ahead of its first run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
from tqdm.auto import tqdm

from jqconv import _choice, _collect, _policy, _search
from jqconv._explain import Report, explain
from jqconv._spec import ConvSpec

#: Searches at a time. Each waits for its builds most of the time, and these share the cores. An
#: exhaustive one builds enough for all of them, and holds it until it is done.
_AT_A_TIME, _EXHAUSTIVE_AT_A_TIME = 16, 4


def tune(
    fn: Callable[..., Any],
    *args: Any,
    exhaustive: bool = False,
    progress: bool = True,
    **kwargs: Any,
) -> Report:
    """Find the fastest algorithm of every convolution in `fn`, and keep them in the store.

    `fn` is traced, not run. What is known already is not searched for again. To tune a training
    step pass the function that calls ``jax.grad``: the gradients' convolutions are part of it.

    Parameters
    ----------
    fn : callable
        Any function that JAX can trace; with static arguments, one that ``jax.jit`` made.
    *args, **kwargs
        Its arguments; arrays may be ``jax.ShapeDtypeStruct``.
    exhaustive : bool, default False
        Whether to search anew, through everything that cuDNN proposes in every form and
        formulation; takes several times as long and rarely finds anything faster.
    progress : bool, default True
        Whether to show a progress bar on stderr.

    Returns
    -------
    Report
        What was chosen, with times: see :func:`jqconv.explain`.

    Raises
    ------
    RuntimeError
        If there is no NVIDIA GPU here.
    ValueError
        If `exhaustive` under ``config.deterministic`` or in one of several JAX processes, where
        nothing is chosen by time.

    Examples
    --------
    >>> step = jax.grad(lambda w, x: conv2d(x, w, x_scale=0.1, w_scale=0.1).sum())  # doctest: +SKIP
    >>> report = tune(step, w, x)  # doctest: +SKIP
    >>> report  # doctest: +SKIP
    """
    device = _choice.gpu_here()
    if device is None:
        raise RuntimeError(
            "jqconv.tune needs an NVIDIA GPU that JAX can use; there is only "
            f"{jax.devices()[0].device_kind}"
        )
    if exhaustive and (_policy.settings().deterministic or jax.process_count() > 1):
        raise ValueError(
            "exhaustive=True chooses by time, which jqconv.config.deterministic, and several "
            "processes that compile one program, rule out; tune in a process of its own"
        )
    found = _collect.convolutions(fn, *args, **kwargs)
    specs = {one.spec for one in found if not one.pinned and _choice.is_open(one.spec)}
    _search_all(specs, device, exhaustive, progress)
    with _policy.config.using(search="tune"):
        return explain(fn, *args, **kwargs)


def _search_all(
    specs: Collection[ConvSpec], device: jax.Device, exhaustive: bool, progress: bool
) -> None:
    settings = dataclasses.replace(_policy.settings(), search="tune")

    def search(spec: ConvSpec) -> None:
        with _policy.within(settings):
            if exhaustive:
                _choice.replace(spec, device, _search.search(spec, device, exhaustive=True))
            else:
                _choice.get(spec, device)

    workers = _EXHAUSTIVE_AT_A_TIME if exhaustive else _AT_A_TIME
    pool = ThreadPoolExecutor(workers, thread_name_prefix="jqconv-tune")
    try:
        with tqdm(total=len(specs), desc="tuning", unit="conv", disable=not progress) as bar:
            for done in as_completed([pool.submit(search, spec) for spec in specs]):
                done.result()
                bar.update()
    finally:
        # After an error, or Ctrl-C: what has not begun is not begun.
        pool.shutdown(wait=False, cancel_futures=True)
