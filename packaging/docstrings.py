"""For the reference: examples of docstrings, as doctest finds them, are shown as code."""

from __future__ import annotations

from typing import Any

from griffe import Extension


def with_examples(text: str) -> str:
    """The docstring with each example under a heading that the reference's reader of docstrings knows."""
    lines: list[str] = []
    shown = False  # whether this line is of an example that had no heading
    for line in text.splitlines():
        if line == "Example:":
            lines.append("Examples:")
        elif line.startswith(">>>") and not shown:
            shown = True
            lines += ["", "Examples:", f"    {line}"]
        else:
            shown = shown and bool(line.strip())
            lines.append(f"    {line}" if shown else line)
    return "\n".join(lines)


class DoctestExamples(Extension):  # type: ignore[misc]
    """Changes docstrings before they are parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = with_examples(obj.docstring.value)
