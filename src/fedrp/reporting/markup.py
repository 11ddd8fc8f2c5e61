"""HTML that is safe by construction: whatever is no `Markup` is text, and is escaped."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence

_EMPTY = frozenset({"meta"})  # elements without content
_IN_JSON = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


class Markup(str):
    """HTML, as opposed to text."""

    __slots__ = ()


def element(tag: str, attributes: Mapping[str, str], *content: str) -> Markup:
    """An element with text and elements in it."""
    given = "".join(f' {name}="{html.escape(value)}"' for name, value in attributes.items())
    if tag in _EMPTY:
        return Markup(f"<{tag}{given}>")
    return Markup(f"<{tag}{given}>{joined(content)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Text and elements, one after the other."""
    return Markup("".join(part if isinstance(part, Markup) else html.escape(part) for part in parts))


def script_json(value: object) -> Markup:
    """JSON that can stand inside a `script` element, whatever its strings hold. No number that JSON does not know."""
    return Markup(json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_IN_JSON))


def number(value: object, shown: str) -> str:
    """A number for people, with the exact one in the page; text of anything that is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "none" if value is None else str(value)
    return element("data", {"value": repr(value)}, shown)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Markup:
    """A table that scrolls in a frame of its own, also by keyboard.

    The first `words` columns hold words, the others numbers. A table of sentences alone becomes a list on a phone.
    """
    sentences = words == len(head) > 2
    kinds = ["word" if place < words else "number" for place in range(len(head))]
    top = [element("th", {"scope": "col", "class": kind}, name) for name, kind in zip(head, kinds, strict=True)]
    body = []
    for row in rows:
        labels = [{"data-label": name} if sentences else {} for name in head]
        first = element("th", {"scope": "row", "class": kinds[0]}, row[0])
        rest = zip(kinds[1:], labels[1:], row[1:], strict=True)
        cells = (element("td", {"class": kind, **label}, content) for kind, label, content in rest)
        body.append(element("tr", {}, first, *cells))
    inner = element("table", {}, element("thead", {}, element("tr", {}, *top)), element("tbody", {}, *body))
    style = "scroll sentences" if sentences else "scroll"
    return element("div", {"class": style, "role": "region", "aria-label": caption, "tabindex": "0"}, inner)
