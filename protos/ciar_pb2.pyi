from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "software", "bundle_name", "bundle_digest", "codebook_digest", "rows", "cols", "vocabulary", "max_prompt_characters", "defaults", "methods", "compute_device", "dtype", "capacity", "active", "feature_modes")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_NAME_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEBOOK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_CHARACTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    METHODS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DEVICE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    FEATURE_MODES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    software: str
    bundle_name: str
    bundle_digest: str
    codebook_digest: str
    rows: int
    cols: int
    vocabulary: int
    max_prompt_characters: int
    defaults: Sampling
    methods: _containers.RepeatedCompositeFieldContainer[MethodDescription]
    compute_device: str
    dtype: str
    capacity: int
    active: int
    feature_modes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., software: _Optional[str] = ..., bundle_name: _Optional[str] = ..., bundle_digest: _Optional[str] = ..., codebook_digest: _Optional[str] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ..., vocabulary: _Optional[int] = ..., max_prompt_characters: _Optional[int] = ..., defaults: _Optional[_Union[Sampling, _Mapping]] = ..., methods: _Optional[_Iterable[_Union[MethodDescription, _Mapping]]] = ..., compute_device: _Optional[str] = ..., dtype: _Optional[str] = ..., capacity: _Optional[int] = ..., active: _Optional[int] = ..., feature_modes: _Optional[_Iterable[str]] = ...) -> None: ...

class MethodDescription(_message.Message):
    __slots__ = ("name", "device_role", "cloud_role", "rules", "law", "summary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ROLE_FIELD_NUMBER: _ClassVar[int]
    CLOUD_ROLE_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    device_role: str
    cloud_role: str
    rules: _containers.RepeatedCompositeFieldContainer[RuleDescription]
    law: str
    summary: str
    def __init__(self, name: _Optional[str] = ..., device_role: _Optional[str] = ..., cloud_role: _Optional[str] = ..., rules: _Optional[_Iterable[_Union[RuleDescription, _Mapping]]] = ..., law: _Optional[str] = ..., summary: _Optional[str] = ...) -> None: ...

class RuleDescription(_message.Message):
    __slots__ = ("name", "law", "summary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    law: str
    summary: str
    def __init__(self, name: _Optional[str] = ..., law: _Optional[str] = ..., summary: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "guidance")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    GUIDANCE_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    guidance: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., guidance: _Optional[float] = ...) -> None: ...

class FetchBundleRequest(_message.Message):
    __slots__ = ("paths",)
    PATHS_FIELD_NUMBER: _ClassVar[int]
    paths: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, paths: _Optional[_Iterable[str]] = ...) -> None: ...

class BundleChunk(_message.Message):
    __slots__ = ("manifest", "file")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    manifest: str
    file: FileChunk
    def __init__(self, manifest: _Optional[str] = ..., file: _Optional[_Union[FileChunk, _Mapping]] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("path", "offset", "data")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    data: bytes
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class DeviceMessage(_message.Message):
    __slots__ = ("open", "draft")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    open: Open
    draft: Draft
    def __init__(self, open: _Optional[_Union[Open, _Mapping]] = ..., draft: _Optional[_Union[Draft, _Mapping]] = ...) -> None: ...

class CloudMessage(_message.Message):
    __slots__ = ("opened", "tokens", "verdict", "done")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    tokens: Tokens
    verdict: Verdict
    done: Done
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., done: _Optional[_Union[Done, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "bundle_digest", "codebook_digest", "rows", "cols", "vocabulary", "generation", "prompt", "seed", "method", "rule", "sampling", "tokens", "provenance", "epoch", "pipelined", "selective", "rule_options", "window")
    class RuleOptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    BUNDLE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CODEBOOK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PIPELINED_FIELD_NUMBER: _ClassVar[int]
    SELECTIVE_FIELD_NUMBER: _ClassVar[int]
    RULE_OPTIONS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    bundle_digest: str
    codebook_digest: str
    rows: int
    cols: int
    vocabulary: int
    generation: str
    prompt: str
    seed: int
    method: str
    rule: str
    sampling: Sampling
    tokens: _containers.RepeatedScalarFieldContainer[int]
    provenance: bytes
    epoch: int
    pipelined: bool
    selective: Selective
    rule_options: _containers.ScalarMap[str, float]
    window: Window
    def __init__(self, protocol: _Optional[int] = ..., bundle_digest: _Optional[str] = ..., codebook_digest: _Optional[str] = ..., rows: _Optional[int] = ..., cols: _Optional[int] = ..., vocabulary: _Optional[int] = ..., generation: _Optional[str] = ..., prompt: _Optional[str] = ..., seed: _Optional[int] = ..., method: _Optional[str] = ..., rule: _Optional[str] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., provenance: _Optional[bytes] = ..., epoch: _Optional[int] = ..., pipelined: _Optional[bool] = ..., selective: _Optional[_Union[Selective, _Mapping]] = ..., rule_options: _Optional[_Mapping[str, float]] = ..., window: _Optional[_Union[Window, _Mapping]] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("size", "after", "init")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    INIT_FIELD_NUMBER: _ClassVar[int]
    size: int
    after: str
    init: str
    def __init__(self, size: _Optional[int] = ..., after: _Optional[str] = ..., init: _Optional[str] = ...) -> None: ...

class Selective(_message.Message):
    __slots__ = ("prefix", "feature_mode", "features", "local_repair", "audit")
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    FEATURE_MODE_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_REPAIR_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    prefix: int
    feature_mode: str
    features: bytes
    local_repair: bool
    audit: float
    def __init__(self, prefix: _Optional[int] = ..., feature_mode: _Optional[str] = ..., features: _Optional[bytes] = ..., local_repair: _Optional[bool] = ..., audit: _Optional[float] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("position", "cost", "law")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    position: int
    cost: Cost
    law: str
    def __init__(self, position: _Optional[int] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., law: _Optional[str] = ...) -> None: ...

class Draft(_message.Message):
    __slots__ = ("epoch", "start", "ids", "uncertain", "features")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    UNCERTAIN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    uncertain: bytes
    features: bytes
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., uncertain: _Optional[bytes] = ..., features: _Optional[bytes] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("start", "ids", "cost", "provenance", "entropy", "tv_cost")
    START_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    ENTROPY_FIELD_NUMBER: _ClassVar[int]
    TV_COST_FIELD_NUMBER: _ClassVar[int]
    start: int
    ids: _containers.RepeatedScalarFieldContainer[int]
    cost: Cost
    provenance: bytes
    entropy: bytes
    tv_cost: float
    def __init__(self, start: _Optional[int] = ..., ids: _Optional[_Iterable[int]] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., provenance: _Optional[bytes] = ..., entropy: _Optional[bytes] = ..., tv_cost: _Optional[float] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("epoch", "start", "accepted", "token", "cost", "corrected", "replacements", "audited", "relaxed", "tv_cost")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    CORRECTED_FIELD_NUMBER: _ClassVar[int]
    REPLACEMENTS_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    RELAXED_FIELD_NUMBER: _ClassVar[int]
    TV_COST_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    accepted: int
    token: int
    cost: Cost
    corrected: _containers.RepeatedScalarFieldContainer[int]
    replacements: _containers.RepeatedScalarFieldContainer[int]
    audited: _containers.RepeatedScalarFieldContainer[float]
    relaxed: _containers.RepeatedScalarFieldContainer[int]
    tv_cost: float
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., accepted: _Optional[int] = ..., token: _Optional[int] = ..., cost: _Optional[_Union[Cost, _Mapping]] = ..., corrected: _Optional[_Iterable[int]] = ..., replacements: _Optional[_Iterable[int]] = ..., audited: _Optional[_Iterable[float]] = ..., relaxed: _Optional[_Iterable[int]] = ..., tv_cost: _Optional[float] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("stale_drafts", "bytes_in", "bytes_out")
    STALE_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    stale_drafts: int
    bytes_in: int
    bytes_out: int
    def __init__(self, stale_drafts: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ...) -> None: ...

class Cost(_message.Message):
    __slots__ = ("forwards", "tokens", "microseconds")
    FORWARDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MICROSECONDS_FIELD_NUMBER: _ClassVar[int]
    forwards: int
    tokens: int
    microseconds: int
    def __init__(self, forwards: _Optional[int] = ..., tokens: _Optional[int] = ..., microseconds: _Optional[int] = ...) -> None: ...
