"""JSON that ends in a checksum of itself, so that no changed byte goes unnoticed."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import xxhash

_BEFORE_HASH = b',"xxh3_128":"'
_AFTER_HASH = b'"}\n'
_HASH_LENGTH = 32
_TAIL_LENGTH = len(_BEFORE_HASH) + _HASH_LENGTH + len(_AFTER_HASH)


def digest(data: bytes) -> str:
    """XXH3-128 of `data`, as 32 lower-case hexadecimal digits."""
    return str(xxhash.xxh3_128(data).hexdigest())


def to_checksummed_json(document: dict[str, Any]) -> bytes:
    """`document` as one line of JSON whose last key, `xxh3_128`, is the hash of all bytes before that key."""
    head = to_json(document)[:-1]
    return head + _BEFORE_HASH + digest(head).encode() + _AFTER_HASH


def from_checksummed_json(data: bytes) -> dict[str, Any]:
    """The document that `to_checksummed_json` wrote; a ValueError says why it is none."""
    if len(data) <= _TAIL_LENGTH:
        raise ValueError(f"it has {len(data)} bytes, too few for a document with a checksum")
    head = data[:-_TAIL_LENGTH]
    if data[-_TAIL_LENGTH:] != _BEFORE_HASH + digest(head).encode() + _AFTER_HASH:
        raise ValueError("its bytes do not match the hash at its end")
    document = from_json(head + b"}")
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document


def to_json(value: Any) -> bytes:
    """Compact ASCII JSON; NaN and infinities, which JSON does not have, are a ValueError."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def from_json(data: bytes) -> Any:
    """What `to_json` wrote; anything that is not JSON is a ValueError."""
    try:
        value = json.loads(data, parse_constant=_no_constant)
        if to_json(value) == data:  # so it has no key twice
            return value
        del value  # frees its memory before the text, which has another layout, is parsed a second time
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):  # readers could differ in which of them counts
        raise ValueError("its JSON has a key twice")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
