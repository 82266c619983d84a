from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("client_id", "group", "size", "rank", "lease_s", "timeout_s")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    group: str
    size: int
    rank: int
    lease_s: float
    timeout_s: float
    def __init__(self, client_id: _Optional[str] = ..., group: _Optional[str] = ..., size: _Optional[int] = ..., rank: _Optional[int] = ..., lease_s: _Optional[float] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("rank", "epoch")
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    rank: int
    epoch: int
    def __init__(self, rank: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("client_id", "group", "size", "rank", "epoch", "lease_s", "sequence", "payload", "operation")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    group: str
    size: int
    rank: int
    epoch: int
    lease_s: float
    sequence: int
    payload: bytes
    operation: str
    def __init__(self, client_id: _Optional[str] = ..., group: _Optional[str] = ..., size: _Optional[int] = ..., rank: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_s: _Optional[float] = ..., sequence: _Optional[int] = ..., payload: _Optional[bytes] = ..., operation: _Optional[str] = ...) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("client_id", "member", "entries")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    member: bool
    entries: int
    def __init__(self, client_id: _Optional[str] = ..., member: bool = ..., entries: _Optional[int] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("gone_ranks", "republish")
    GONE_RANKS_FIELD_NUMBER: _ClassVar[int]
    REPUBLISH_FIELD_NUMBER: _ClassVar[int]
    gone_ranks: _containers.RepeatedScalarFieldContainer[int]
    republish: bool
    def __init__(self, gone_ranks: _Optional[_Iterable[int]] = ..., republish: bool = ...) -> None: ...

class AllGatherRequest(_message.Message):
    __slots__ = ("client_id", "sequence", "operation", "payload", "timeout_s")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    sequence: int
    operation: str
    payload: bytes
    timeout_s: float
    def __init__(self, client_id: _Optional[str] = ..., sequence: _Optional[int] = ..., operation: _Optional[str] = ..., payload: _Optional[bytes] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class AllGatherReply(_message.Message):
    __slots__ = ("payloads",)
    PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    payloads: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, payloads: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("client_id",)
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    def __init__(self, client_id: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Entry(_message.Message):
    __slots__ = ("name", "value", "version", "owner")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: bytes
    version: int
    owner: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[bytes] = ..., version: _Optional[int] = ..., owner: _Optional[str] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("client_id", "name", "value", "lease_s", "replace", "version")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    name: str
    value: bytes
    lease_s: float
    replace: bool
    version: int
    def __init__(self, client_id: _Optional[str] = ..., name: _Optional[str] = ..., value: _Optional[bytes] = ..., lease_s: _Optional[float] = ..., replace: bool = ..., version: _Optional[int] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("name", "timeout_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    timeout_s: float
    def __init__(self, name: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class WatchReply(_message.Message):
    __slots__ = ("kind", "entry", "server_id")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[WatchReply.Kind]
        PUBLISHED: _ClassVar[WatchReply.Kind]
        WITHDRAWN: _ClassVar[WatchReply.Kind]
        EXPIRED: _ClassVar[WatchReply.Kind]
        SYNCED: _ClassVar[WatchReply.Kind]
    KIND_UNSPECIFIED: WatchReply.Kind
    PUBLISHED: WatchReply.Kind
    WITHDRAWN: WatchReply.Kind
    EXPIRED: WatchReply.Kind
    SYNCED: WatchReply.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    kind: WatchReply.Kind
    entry: Entry
    server_id: str
    def __init__(self, kind: _Optional[_Union[WatchReply.Kind, str]] = ..., entry: _Optional[_Union[Entry, _Mapping]] = ..., server_id: _Optional[str] = ...) -> None: ...

class WithdrawRequest(_message.Message):
    __slots__ = ("client_id", "name")
    CLIENT_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    client_id: str
    name: str
    def __init__(self, client_id: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class WithdrawReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("prefix", "after")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    after: str
    def __init__(self, prefix: _Optional[str] = ..., after: _Optional[str] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("entries", "more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., more: bool = ...) -> None: ...
