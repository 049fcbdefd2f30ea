from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_FULL: _ClassVar[Encoding]
    ENCODING_XOR_ZSTD: _ClassVar[Encoding]
ENCODING_UNSPECIFIED: Encoding
ENCODING_FULL: Encoding
ENCODING_XOR_ZSTD: Encoding

class Version(_message.Message):
    __slots__ = ("lineage", "n")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    lineage: int
    n: int
    def __init__(self, lineage: _Optional[int] = ..., n: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("job_id", "server")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server: str
    def __init__(self, job_id: _Optional[str] = ..., server: _Optional[str] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("job_id", "version", "total_bytes", "learner_computes")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEARNER_COMPUTES_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    version: Version
    total_bytes: int
    learner_computes: bool
    def __init__(self, job_id: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., total_bytes: _Optional[int] = ..., learner_computes: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("job_id", "server", "version", "base", "offset", "boot_id", "relays")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    RELAYS_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server: str
    version: Version
    base: Version
    offset: int
    boot_id: str
    relays: bool
    def __init__(self, job_id: _Optional[str] = ..., server: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., offset: _Optional[int] = ..., boot_id: _Optional[str] = ..., relays: _Optional[bool] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "dtype", "shape", "wire_bytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    wire_bytes: int
    digest: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., wire_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "encoding", "base", "tensors", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: Version
    encoding: Encoding
    base: Version
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    digest: bytes
    def __init__(self, version: _Optional[_Union[Version, _Mapping]] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., base: _Optional[_Union[Version, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., digest: _Optional[bytes] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("offset", "data", "checksum")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    checksum: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...

class LocalFile(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class Relay(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("manifest", "chunk", "file", "relay")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    chunk: Chunk
    file: LocalFile
    relay: Relay
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., chunk: _Optional[_Union[Chunk, _Mapping]] = ..., file: _Optional[_Union[LocalFile, _Mapping]] = ..., relay: _Optional[_Union[Relay, _Mapping]] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("job_id", "server", "version", "error", "fetch_seconds", "pause_seconds", "apply_seconds", "wire_bytes", "relay", "yielded")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    SERVER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    APPLY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    YIELDED_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    server: str
    version: Version
    error: str
    fetch_seconds: float
    pause_seconds: float
    apply_seconds: float
    wire_bytes: int
    relay: str
    yielded: bool
    def __init__(self, job_id: _Optional[str] = ..., server: _Optional[str] = ..., version: _Optional[_Union[Version, _Mapping]] = ..., error: _Optional[str] = ..., fetch_seconds: _Optional[float] = ..., pause_seconds: _Optional[float] = ..., apply_seconds: _Optional[float] = ..., wire_bytes: _Optional[int] = ..., relay: _Optional[str] = ..., yielded: _Optional[bool] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("current",)
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    current: Version
    def __init__(self, current: _Optional[_Union[Version, _Mapping]] = ...) -> None: ...
