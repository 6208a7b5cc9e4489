"""What may be reached from other machines: nothing without TLS and a secret, unless the user allows it.

Every listening TCP socket of the library is checked here before it is bound.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final

from forge.errors import InsecureBindError

INSECURE: Final = "FORGE_INSECURE"
"""`1` in the processes of a run whose user has set `launcher.insecure`."""


def is_loopback_only(host: str) -> bool:
    """Return whether a listener on `host` can be reached from this machine alone. A name counts if all its addresses
    are loopback; a name that cannot be resolved does not."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    except ValueError:
        pass  # it is a name
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def check_exposure(host: str, *, what: str, path: str, value: object, repair: str) -> None:
    """Raise `InsecureBindError` if `host` can be reached from other machines. Call it where there is no TLS."""
    if not is_loopback_only(host):
        raise exposed(what=what, path=path, value=value, repair=repair)


def exposed(*, what: str, path: str, value: object, repair: str) -> InsecureBindError:
    """Return the error for something that would be served to other machines without TLS and a secret."""
    return InsecureBindError(
        f"{what} would be reachable from other machines without TLS",
        path=path,
        value=value,
        rule="off loopback, everything needs TLS and a secret, unless the user allows otherwise",
        repair=repair,
    )
