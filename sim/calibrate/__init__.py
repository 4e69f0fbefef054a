"""Measured kernel times in, a calibration with its errors out. Needs the extra [calibrate]."""

from __future__ import annotations

from sim.errors import InputError


def require_scipy(what: str) -> None:
    """Raise InputError, one line, where the extra [calibrate], which `what` needs, is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise InputError(f"{what} needs scipy: pip install 'prefixsim[calibrate]'") from None
