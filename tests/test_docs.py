"""What the documentation shows runs, and prints what it says."""

from __future__ import annotations

import doctest
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jqconv
import jqconv.flax
import jqconv.nn

ROOT = pathlib.Path(__file__).parents[1]


EXAMPLES = [
    (module, name) for module in (jqconv, jqconv.flax, jqconv.nn) for name in module.__all__
]


@pytest.mark.parametrize(("module", "name"), EXAMPLES, ids=str)
def test_docstring_examples(module: types.ModuleType, name: str) -> None:
    namespace = {**vars(jqconv), **vars(module), "jnp": jnp, "nnx": nnx}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for example in finder.find(getattr(module, name), name, globs=namespace):
        report: list[str] = []
        assert runner.run(example, out=report.append).failed == 0, "".join(report)


def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    assert capsys.readouterr().out == "QTensor(int8[8,28,28,128], scale=0.05, fq)\n"
    values = namespace["y"].values
    assert (namespace["codes"] == values).mean() > 1 - 1e-4


def test_flax_guide() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "flax.md").read_text(), re.DOTALL)
    assert len(blocks) > 5
    namespace: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(block, namespace)
    losses = [float(loss) for loss in namespace["losses"]]
    assert losses[29] < 0.7 * losses[0]
    assert losses[-1] < 1.3 * losses[29]
    np.testing.assert_allclose(namespace["int8_logits"], namespace["trained"], atol=0.05)
