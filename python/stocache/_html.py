"""What notebooks show: a line, and a bar for each level."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stocache.sizes import show_bytes

_BAR = (
    '<div style="background:#8884;width:20em;height:.8em;border-radius:.2em">'
    '<div style="background:#3a7;width:{share:.1f}%;height:100%;border-radius:.2em"></div></div>'
)


Level = tuple[str, float, float | None, str]
"""A name, bytes used, bytes that there are or None, and a remark."""


def table(title: str, levels: Sequence[Level], below: str = "") -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{_BAR.format(share=_share(used, of))}</td>"
        f"<td>{escape(_bytes(used, of))}</td><td>{escape(remark)}</td></tr>"
        for name, used, of, remark in levels
    )
    return (
        f"<div><b>{escape(title)}</b><table>{rows}</table>"
        + (f"<div>{escape(below)}</div>" if below else "")
        + "</div>"
    )


def _bytes(used: float, of: float | None) -> str:
    return show_bytes(used) + ("" if of is None else f" of {show_bytes(of)}")


def _share(used: float, of: float | None) -> float:
    return 100.0 if of is None else min(100.0, 100.0 * used / max(1, of))
