"""Files and batches as the disk keeps them, and as clients of OpenAI's API see them."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from gateway.domain import Value

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank"]
FilePurpose = Literal["batch", "batch_output"]
BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDS: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(Value):
    """A file whose bytes are on the disk. owner: see `gateway.server.batches.owner`."""

    id: str
    owner: str
    filename: str
    purpose: FilePurpose
    bytes: int
    made_at: float
    expires_at: float


class FileView(Value):
    """A file in the form of OpenAI's API."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: FilePurpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class FileList(Value):
    object: Literal["list"] = "list"
    data: tuple[FileView, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Value):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchError(Value):
    """A reason why a batch has failed. line: of the input, from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(Value):
    """A batch.

    output_id, error_id: names of its two result files, which become files when it ends.
    output_bytes, error_bytes: sizes of those files at the end.
    output_s: seconds that they are kept.
    """

    id: str
    owner: str
    key_name: str
    endpoint: BatchEndpoint
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None
    made_at: float
    expires_at: float
    output_id: str
    error_id: str
    output_s: float
    status: BatchStatus = "validating"
    times: dict[BatchStatus, float] = Field(default_factory=dict)
    errors: tuple[BatchError, ...] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_bytes: int = 0
    error_bytes: int = 0

    @property
    def has_ended(self) -> bool:
        return self.status in ENDS


class BatchErrors(Value):
    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


class RequestCounts(Value):
    total: int
    completed: int
    failed: int


class BatchView(Value):
    """A batch in the form of OpenAI's API."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: BatchEndpoint
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Value):
    object: Literal["list"] = "list"
    data: tuple[BatchView, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResultLifetime(Value):
    """Seconds that the result files are kept after they were made."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class NewBatch(Value):
    """The body of a request for a batch."""

    # Built now, because FastAPI inspects the model of a body before any validation.
    model_config = ConfigDict(defer_build=False)

    input_file_id: str = Field(max_length=100)
    endpoint: BatchEndpoint
    completion_window: str = Field(
        "24h", max_length=5, description="hours or days for all lines: 24h, 7d; at most 14 days"
    )
    metadata: dict[str, str] | None = Field(
        None, max_length=16, description="texts of the client, kept with the batch"
    )
    output_expires_after: ResultLifetime | None = None


def file_view(record: FileRecord) -> FileView:
    return FileView(
        id=record.id,
        bytes=record.bytes,
        created_at=int(record.made_at),
        expires_at=int(record.expires_at),
        filename=record.filename,
        purpose=record.purpose,
    )


def batch_view(record: BatchRecord) -> BatchView:
    """The batch as the API shows it."""

    def moment(status: BatchStatus) -> int | None:
        return int(record.times[status]) if status in record.times else None

    return BatchView(
        id=record.id,
        endpoint=record.endpoint,
        errors=BatchErrors(data=record.errors) if record.errors else None,
        input_file_id=record.input_file_id,
        completion_window=record.completion_window,
        status=record.status,
        output_file_id=record.output_id if record.output_bytes else None,
        error_file_id=record.error_id if record.error_bytes else None,
        created_at=int(record.made_at),
        in_progress_at=moment("in_progress"),
        expires_at=int(record.expires_at),
        finalizing_at=moment("finalizing"),
        completed_at=moment("completed"),
        failed_at=moment("failed"),
        expired_at=moment("expired"),
        cancelling_at=moment("cancelling"),
        cancelled_at=moment("cancelled"),
        request_counts=RequestCounts(
            total=record.total, completed=record.completed, failed=record.failed
        ),
        metadata=record.metadata,
    )
