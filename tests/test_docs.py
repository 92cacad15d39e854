"""What the documentation shows runs, and prints what it says."""

from __future__ import annotations

import doctest
import pathlib
import re

import jax.numpy as jnp
import pytest

import jqconv

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", jqconv.__all__)
def test_docstring_examples(name: str) -> None:
    namespace = {**vars(jqconv), "jnp": jnp}
    finder, runner = doctest.DocTestFinder(recurse=False), doctest.DocTestRunner()
    for example in finder.find(getattr(jqconv, name), name, globs=namespace):
        report: list[str] = []
        assert runner.run(example, out=report.append).failed == 0, "".join(report)


def test_readme_example(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    namespace: dict[str, object] = {}
    exec(code, namespace)
    assert capsys.readouterr().out == "QTensor(int8[8,28,28,128], scale=0.05, fq)\n"
    values = namespace["y"].values
    assert (namespace["codes"] == values).mean() > 1 - 1e-4
