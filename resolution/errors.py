"""The one error of this folder."""

from __future__ import annotations

from kvferry.core import ConfigError


class ResolutionError(ConfigError):
    """What was asked for cannot be given. `field` names the setting to change, the message says to what."""
