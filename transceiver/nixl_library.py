"""Where the installed NIXL's C library is, and whether it is a version that was declared for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from kvferry.core import ConfigError, TransferError
from kvferry.transceiver.implementation import NIXL_PLUGIN_SETTING
from kvferry.transceiver.native.engine import Backend, BackendError, LibraryError, NixlBackend, PluginError

DISTRIBUTION = "nixl-cu12"
VERSIONS = "1.5."
INSTALL_LINE = "pip install torch 'nixl-cu12>=1.5.1,<1.6'"
_C_LIBRARY = "libnixl_capi.so"


def nixl_c_library() -> str:
    """The path of libnixl_capi.so. Raises ConfigError with the line that installs it.

    Our declarations of its functions are checked against nothing when it is loaded, so the version must fit.
    """
    try:
        installed = distribution(DISTRIBUTION)
    except PackageNotFoundError:
        raise _unusable("is not installed") from None
    if not installed.version.startswith(VERSIONS):
        raise _unusable(f"{installed.version} is installed, but the CPP runtime was made for {VERSIONS}x")
    for file in installed.files or ():
        if file.name == _C_LIBRARY:
            return str(file.locate())
    raise _unusable(f"{installed.version} comes without {_C_LIBRARY}")


def nixl_backend(incarnation: str, plugins: tuple[str, ...] = ("UCX",)) -> Backend:
    """NIXL for the C++ engine. Raises ConfigError naming the setting when it cannot be had."""
    path = nixl_c_library()
    try:
        return NixlBackend(path, incarnation, plugins)
    except PluginError as error:
        raise ConfigError(str(error), field=NIXL_PLUGIN_SETTING) from None
    except LibraryError as error:
        raise ConfigError(f"{error}: {INSTALL_LINE}", field="transceiver.backend") from None
    except BackendError as error:
        raise TransferError(str(error)) from None


def _unusable(what: str) -> ConfigError:
    return ConfigError(
        f"{DISTRIBUTION} {what}: {INSTALL_LINE}, or set transceiver.runtime to PYTHON", field="transceiver.backend"
    )
