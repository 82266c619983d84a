"""Addresses of the control plane: "host:port", with IPv6 hosts in brackets, as "[::1]:29500"."""

import socket

from onesided.errors import BoundsError, OnesidedError


def parse(address: object, *, port_zero: bool = False) -> tuple[str, int]:
    """Splits an address into host and port. Raises BoundsError for what is none; port 0 only where one is
    chosen."""
    if not isinstance(address, str):
        raise TypeError(f"an address must be a str, not {type(address).__name__}")
    host, colon, digits = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not host or (":" in host and not bracketed) or not digits.isascii() or not digits.isdigit():
        raise BoundsError(f'{address!r} is not an address: write "host:port", or "[::1]:port" for IPv6')
    port = int(digits)
    if not (0 if port_zero else 1) <= port <= 65_535:
        raise BoundsError(f"{address!r}: the port must be {0 if port_zero else 1} to 65535")
    return (host[1:-1] if bracketed else host), port


def join(host: str, port: int) -> str:
    """The address of `host` and `port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str) -> str:
    """The one numeric address that `host` means, the first IPv4 one if there is any. Raises OnesidedError if
    none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OnesidedError(f"the host name {host!r} cannot be resolved: {error}") from error
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    return str(found[0][4][0])


def why_not_bound(host: str, port: int) -> str:
    """Why nothing can listen on this numeric address, in the system's words; empty if something could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))  # fails where another listens; not listening, this takes nobody's connection
    except OSError as error:
        return error.strerror or str(error)
    return ""
