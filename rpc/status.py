"""How errors travel: one table between gRPC's status codes and the classes of onesided.errors.

The server sends the code, the message, and a mark that tells its own errors from those that gRPC makes.
"""

from typing import Any

import grpc

from onesided import errors

from .membership import Forgotten

# Sorted from the most special class to the most general one: the first that fits is sent.
TABLE: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (Forgotten, grpc.StatusCode.DATA_LOSS),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.ConnectionLost, grpc.StatusCode.ABORTED),  # not UNAVAILABLE, which gRPC makes itself and clients retry
    (errors.RemoteAccessError, grpc.StatusCode.PERMISSION_DENIED),
    (errors.HandleError, grpc.StatusCode.NOT_FOUND),
    (errors.BoundsError, grpc.StatusCode.OUT_OF_RANGE),
    (errors.StaleHandle, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.RegistrationError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (TypeError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.OnesidedError, grpc.StatusCode.UNKNOWN),
)
# Not from a server of ours: it is closing, is not there, or did not answer in time.
RETRY = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})

MARK = "onesided-error"
MAX_DETAILS = 1500  # characters; gRPC sends them in a header, and headers end at 8 KiB


def to_status(error: Exception) -> tuple[grpc.StatusCode, str]:
    """The code and the text that carry `error`."""
    for kind, code in TABLE:
        if isinstance(error, kind):
            return code, str(error)[:MAX_DETAILS]
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:MAX_DETAILS]


def is_ours(error: grpc.RpcError) -> bool:
    """True if a server of ours sent this error; False if gRPC made it."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == MARK for key, _ in metadata)


def from_status(error: grpc.RpcError) -> Exception:
    """The error that was sent."""
    code, details = error.code(), error.details() or ""
    for kind, candidate in TABLE:
        if candidate == code:
            return kind(details)
    return errors.OnesidedError(f"{code.name}: {details}")
