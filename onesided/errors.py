"""The errors of onesided. The one module that every room may import; it imports nothing itself.

    OnesidedError
    ├── ConnectionLost        the peer died, closed its end, or cannot be reached     (also ConnectionError)
    ├── DeadlineExceeded      the deadline passed; the operation is cancelled         (also TimeoutError)
    ├── RemoteAccessError     the peer does not permit this access, or its memory is gone
    ├── BoundsError           a rank, index, offset, length or alignment out of range (also ValueError)
    ├── LayoutError           memory that is strided, read-only or on the wrong device (also ValueError)
    ├── HandleError           bytes that are not a handle or an endpoint of ours      (also ValueError)
    ├── RegistrationError     memory could not be had or registered; names the limit  (also OSError)
    ├── StaleHandle           closed, revoked, or of an earlier generation
    └── Unsupported           this kind of memory, transport or system cannot do it; says why

A mistake of the caller (BoundsError, LayoutError, HandleError, and plain TypeError for a wrong type) is raised before
anything is touched. After any other error of a put, the target's bytes in the put's own range are undefined and all
others are unchanged. The data plane raises these very classes: `_core` imports this module when it is loaded.
"""

__all__ = [
    "BoundsError",
    "ConnectionLost",
    "DeadlineExceeded",
    "HandleError",
    "LayoutError",
    "OnesidedError",
    "RegistrationError",
    "RemoteAccessError",
    "StaleHandle",
    "Unsupported",
]


class OnesidedError(Exception):
    """Every error that onesided raises on purpose, plain TypeError apart."""


class ConnectionLost(OnesidedError, ConnectionError):
    """The peer died, closed its end, or cannot be reached. Make a new connection; the old one stays lost."""


class DeadlineExceeded(OnesidedError, TimeoutError):
    """The deadline passed. The operation is cancelled: its source is not read again once this has been raised."""


class RemoteAccessError(OnesidedError):
    """The peer's memory does not permit this access, or is no longer mapped."""


class BoundsError(OnesidedError, ValueError):
    """A rank, signal index, offset, length or alignment out of range. Nothing was touched."""


class LayoutError(OnesidedError, ValueError):
    """Memory that one operation cannot describe: strided, read-only where written, or on another device."""


class HandleError(OnesidedError, ValueError):
    """Bytes that are not a handle or an endpoint: truncated, altered, of another version or another kind."""


class RegistrationError(OnesidedError, OSError):
    """Memory could not be allocated, mapped or registered. The message names the limit that was hit."""


class StaleHandle(OnesidedError):
    """The object was closed or revoked, or the handle belongs to an earlier generation."""


class Unsupported(OnesidedError):
    """This memory, transport or system cannot do what was asked; the message says why and what would."""
