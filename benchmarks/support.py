"""Which convolutions does this GPU's cuDNN have an engine for?

Builds cuDNN's first plan for each of a grid of channel and group counts in every direction, and
prints those without one. It is the source of ``jqconv._algorithm.runs_on_cudnn``, which decides
where there is no GPU to ask.

    python benchmarks/support.py --json benchmarks/results/support_h200.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import jax

from jqconv import _algorithm, _native, _policy
from jqconv._spec import ConvSpec

PER_GROUP = (1, 2, 3, 4, 5, 8, 16, 20, 32)
GROUPS = (1, 2, 3, 8, 32)


def fprop(c: int, k: int, groups: int, **epilogue: object) -> ConvSpec:
    """Return a fused 3x3 int8 convolution of `c` to `k` channels in each group."""
    return ConvSpec(
        x_shape=(4, 14, 14, c * groups),
        w_shape=(k * groups, 3, 3, c),
        padding=((1, 1), (1, 1)),
        groups=groups,
        **({"multiplier": "channel", "bias": True} | epilogue),
    )


def grid() -> list[ConvSpec]:
    """Return the specs to try."""
    specs = []
    for c, k, groups in itertools.product(PER_GROUP, PER_GROUP, GROUPS):
        if c == k or groups == 1 or 1 in (c, k):
            spec = fprop(c, k, groups)
            specs += [spec, spec.backward("dgrad", "bfloat16"), spec.backward("wgrad", "bfloat16")]
            specs += [spec.backward("dgrad", "float16"), spec.backward("wgrad", "float16")]
    for dtype in ("uint8", "bfloat16", "float16", "float32"):
        specs += [fprop(c, c, 1, y_dtype=dtype) for c in (3, 16)]
    specs += [
        fprop(c, k, g, y_dtype="int32", multiplier=None, bias=False)
        for c, k, g in ((3, 5, 1), (16, 16, 1), (16, 16, 2), (1, 1, 32))
    ]
    return specs


def main() -> None:
    """Try every spec, print those that have no engine, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file for the answers")
    args = parser.parse_args()
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit("this survey needs an NVIDIA GPU; JAX found none")

    def ask(spec: ConvSpec) -> tuple[str, str]:
        return _native.resolve(
            str(spec), "", device.local_hardware_id, _policy.settings().workspace_limit
        )

    specs = grid()
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, specs))
    missing = 0
    for spec, (text, reason) in zip(specs, answers, strict=True):
        expected = _algorithm.runs_on_cudnn(spec)
        if bool(text) != expected:
            print(f"{'has' if text else 'lacks'} an engine, table says otherwise: {spec} {reason}")
        missing += not text
    print(f"{len(specs)} convolutions, {missing} without an engine")
    if args.json:
        rows = [
            {"spec": str(spec), "algorithm": text, "reason": reason.splitlines()[-1:]}
            for spec, (text, reason) in zip(specs, answers, strict=True)
        ]
        versions = {"device": device.device_kind, "cudnn": _native.versions()["cudnn"]}
        with open(args.json, "w") as file:
            json.dump(versions | {"convolutions": rows}, file, indent=1)


if __name__ == "__main__":
    main()
