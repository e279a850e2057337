"""Optional packages: what an error says where one is missing, or is there and broken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram._text import visible


@contextmanager
def packages(needed_by: str, install: str, **modules: str) -> Iterator[None]:
    """Around the imports of optional packages: an ImportError says what needs them, and what to do.

    Args:
        needed_by: what needs them.
        install: what pip is to install.
        modules: the modules that are imported, by the names of their packages.

    Raises:
        ImportError: a package is missing; or it is installed, and another error, which is the cause, ended its import.

    Example:
        >>> with packages("a table", "engram[tables]", tables="no_such_module"):
        ...     import no_such_module
        Traceback (most recent call last):
            ...
        ImportError: a table needs tables: pip install "engram[tables]"
    """
    try:
        yield
    except ImportError as error:
        packages_of = {module: name.replace("_", "-") for name, module in modules.items()}
        quoted = f'"{install}"' if set(install) & set("[<>=") else install
        if isinstance(error, ModuleNotFoundError) and error.name in packages_of:
            missing = packages_of[error.name]
            raise ImportError(f"{needed_by} needs {missing}: pip install {quoted}", name=error.name) from error
        names = " and ".join(packages_of.values())
        raise ImportError(
            f"{needed_by} needs {names}, and what is installed of it cannot be imported here ({visible(str(error))}). "
            f"Where the cause does not say more, install it anew: pip install --force-reinstall "
            f"{' '.join(packages_of.values())}",
            name=error.name,
        ) from error
