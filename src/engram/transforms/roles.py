"""What a transform changes, and the warning about one that changes nothing where it is put."""

from __future__ import annotations

import enum
from typing import Any

from engram._text import warn_user

#: The attribute of a transform that has warned: each object does so once, wherever it is put.
WARNED = "_has_warned"


class Role(enum.Flag):
    """What a transform changes; see `Transform.roles`."""

    NOTHING = 0
    READING = enum.auto()  #: batches that are read from a buffer, or handed out by a collector
    WRITING = enum.auto()  #: what is written into a buffer
    ENVIRONMENT = enum.auto()  #: steps or actions of an environment


IN_BUFFERS = Role.READING | Role.WRITING
_WHERE = {
    Role.WRITING: "it changes steps when they are written: append it to their replay buffer before the first extend",
    Role.READING: "it changes batches that are read: append it to a replay buffer",
    Role.ENVIRONMENT: "it changes the steps of an environment: put it into a TransformedEnv",
    Role.NOTHING: "it names no entry, and has no method that changes one",
}


def warn_if_idle(transform: Any, roles: Role, where: str) -> None:
    """Warns of the parts of a transform that have none of these roles, and so change nothing where they are put."""
    for part in transform.parts():
        if not part.roles() & roles:
            warn_once(part, f"{part.kind} changes nothing {where}: {where_it_works(part)}")


def where_it_works(transform: Any) -> str:
    """What a transform changes and where to put it, as a part of a message."""
    roles = transform.roles()
    return next(text for role, text in _WHERE.items() if role in roles)


def warn_once(transform: Any, message: str) -> None:
    """Warns about a transform, unless there was a warning about it before."""
    if WARNED not in vars(transform):
        vars(transform)[WARNED] = True
        warn_user(message)
