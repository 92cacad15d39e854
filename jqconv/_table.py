"""A table of text, for terminals and notebooks."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text under a header; prints aligned, in a notebook too.

    Parameters
    ----------
    header : tuple of str
        Names of the columns.
    rows : tuple of tuple of str
        Their cells.
    numeric : frozenset of int, optional
        The columns to align at the right.
    foot : str, optional
        A line below.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()
    foot: str = ""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]

        def line(cells: Sequence[str]) -> str:
            padded = [
                cell.rjust(width) if i in self.numeric else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
            ]
            return "  ".join(padded).rstrip()

        lines = [self.header, ["-" * width for width in widths], *self.rows]
        return "\n".join([*map(line, lines), *(["", self.foot] if self.foot else [])])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""

        def row(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        foot = f"<p>{html.escape(self.foot)}</p>" if self.foot else ""
        return f"<table>{row(self.header, 'th')}{body}</table>{foot}"
