"""Where the installed UCX is. The library says its version itself, and is refused when it does not fit."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvferry.core import ConfigError, TransferError
from kvferry.transceiver.native.engine import Backend, BackendError, LibraryError, UcxBackend

INSTALL_LINE = "pip install libucx-cu12"
_PACKAGE = "libucx"
"""Which libucx-cu12 and libucx-cu13 install: for host memory they are the same, and neither needs CUDA."""
_LIBRARY = Path("lib", "libucp.so.0")


def ucx_library() -> str:
    """The path of libucp.so. Raises ConfigError with the line that installs it."""
    found = find_spec(_PACKAGE)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        library = Path(folder) / _LIBRARY
        if library.is_file():
            return str(library)
    missing = "is not installed" if found is None else f"comes without {_LIBRARY}"
    raise ConfigError(f"{_PACKAGE} {missing}: {INSTALL_LINE}", field="transceiver.backend")


def ucx_backend(incarnation: str) -> Backend:
    """UCX for the C++ engine. Raises ConfigError naming the setting when it cannot be had."""
    path = ucx_library()
    try:
        return UcxBackend(path, incarnation)
    except LibraryError as error:
        raise ConfigError(f"{error}: {INSTALL_LINE}", field="transceiver.backend") from None
    except BackendError as error:
        raise TransferError(str(error)) from None
