"""All batches of a gateway: they begin, are cancelled, and go on after a restart."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gateway.errors import BadRequest, Busy, FitserveError
from gateway.keys import hash_key
from gateway.proxy.access.auth import ANONYMOUS_KEY, Key
from gateway.proxy.api import endpoints
from gateway.secret import Secret
from gateway.server.batches.batch_input import InputLimits
from gateway.server.batches.batch_run import BatchRun, RunParts, ended_error
from gateway.server.batches.file_store import FileStore, Quotas, new_id
from gateway.server.batches.file_threads import FileThreads
from gateway.server.batches.line_client import LineClient
from gateway.server.batches.line_places import LinePlaces, lines_at_once, lines_of_key
from gateway.server.batches.own_connections import OwnConnections
from gateway.server.batches.owner import key_of_owner, owner_of
from gateway.server.batches.reading_turns import ReadingTurns
from gateway.server.batches.records import BatchRecord, NewBatch
from gateway.supervision import SupervisedTask

if TYPE_CHECKING:
    from gateway.server.gateway_app import GatewayApp
    from gateway.server.gateway_parts import ServingParts

# Concurrent uploads; each has some mebibytes in memory.
_MAX_UPLOADS = 16
# A client may send slowly, so one key leaves places for others.
_MAX_KEY_UPLOADS = 4
_SWEEP_S = 60.0
_HOUR_S = 3600
_DAY_S = 86_400
_MAX_WINDOW_S = 14 * _DAY_S
_UNITS = {"h": _HOUR_S, "d": _DAY_S}
_KEY_CHARACTERS = 64
_VALUE_CHARACTERS = 512


class Batches:
    """Runs the batches of one process, which owns the data folder."""

    def __init__(self, app: GatewayApp, front: ServingParts) -> None:
        settings = front.settings
        quotas = Quotas(
            settings.batch_file_bytes,
            settings.batch_key_bytes,
            settings.batch_total_bytes,
            settings.batch_days,
        )
        self.store = FileStore(settings.data / "batches", quotas)
        self.threads = FileThreads()
        self._front = front
        self._client = LineClient(OwnConnections(app, front.workers).open)
        routes = front.routes
        self._parts = RunParts(
            store=self.store,
            threads=self.threads,
            client=self._client,
            places=LinePlaces(
                settings.batch_requests,
                lambda model: lines_at_once(routes.table.models.get(model)),
                lambda owner: lines_of_key(key_of_owner(owner, front.keys)),
            ),
            turns=ReadingTurns(),
            limits=InputLimits(settings.batch_lines, settings.body_limit_bytes),
            key_of=lambda owner: key_of_owner(owner, front.keys),
            token_of=self._token_of,
            model_problem=self._model_problem,
        )
        self._tokens: dict[str, Secret] = {}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, SupervisedTask] = {}
        self._sweeping: SupervisedTask | None = None
        self._ending: asyncio.Task[None] | None = None
        self._uploads: Counter[str] = Counter()
        """The uploads under way by owner."""

    # --- life ---

    def start(self) -> None:
        """Go on with all batches that have not ended."""
        self._sweeping = SupervisedTask(self._sweep, "removing files that have expired")
        for record in self.store.unfinished_batches():
            self._start(record.id)

    def stop(self) -> None:
        """Begin to end all runs, because the gateway stops; the next gateway goes on with them."""
        self.store.is_closed = True
        if self._ending is None:
            self._ending = asyncio.create_task(self._stop_tasks())

    async def close(self) -> None:
        """End all runs. Returns when they have ended."""
        self.stop()
        if self._ending is not None:
            await self._ending
        self._client.close()

    async def _stop_tasks(self) -> None:
        tasks = [*self._tasks.values(), *([self._sweeping] if self._sweeping else [])]
        if tasks:
            await asyncio.gather(*(task.close() for task in tasks))

    def review(self) -> None:
        """End the batches of keys that were revoked, and forget tokens of such keys."""
        valid_keys = self._front.keys.table.keys
        self._tokens = {
            owner: token for owner, token in self._tokens.items() if hash_key(token) in valid_keys
        }
        for run in list(self._runs.values()):
            run.review()

    # --- calls of clients ---

    async def create(self, key: Key, body: NewBatch) -> BatchRecord:
        """A new batch, which begins to run. Raises BadRequest, NotFound, QuotaReachedError,
        NotReady, OSError."""
        _check_metadata(body.metadata)
        now = time.time()
        lifetime_s = self.store.quotas.days * _DAY_S
        if body.output_expires_after is not None:
            lifetime_s = min(lifetime_s, body.output_expires_after.seconds)
        record = BatchRecord(
            id=new_id("batch_"),
            owner=owner_of(key),
            key_name=key.name,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            metadata=body.metadata,
            made_at=now,
            expires_at=now + window_s(body.completion_window),
            output_id=new_id("file-"),
            error_id=new_id("file-"),
            output_s=lifetime_s,
        )
        await self.threads.run(self.store.add_batch, record)
        self._start(record.id)
        return record

    async def cancel(self, owner: str, id_: str) -> BatchRecord:
        """Cancel a batch; its state then. Raises NotFound, Conflict, NotReady, OSError."""
        record = self.store.batch(owner, id_)
        run = self._runs.get(id_)
        if run is not None:
            return await run.cancel()
        if record.has_ended or record.status == "finalizing":
            raise ended_error(record)
        # Its next run begins with the end.
        times = {**record.times, "cancelling": time.time()}
        record = record.evolve(status="cancelling", times=times)
        await self.threads.run(self.store.save_batch, record)
        return record

    @contextmanager
    def upload_place(self, owner: str) -> Iterator[None]:
        """Hold one of the places for uploads. Raises Busy."""
        if self._uploads.total() >= _MAX_UPLOADS:
            raise _upload_error(f"{_MAX_UPLOADS} files are being uploaded.")
        if self._uploads[owner] >= _MAX_KEY_UPLOADS:
            raise _upload_error(f"{_MAX_KEY_UPLOADS} files of this key are being uploaded.")
        self._uploads[owner] += 1
        try:
            yield
        finally:
            self._uploads[owner] -= 1
            if not self._uploads[owner]:
                del self._uploads[owner]

    # --- runs ---

    def _start(self, id_: str) -> None:
        async def step() -> None:
            record = self.store.record(id_)
            if record is None or record.has_ended:
                return
            run = self._runs[id_] = BatchRun(record, self._parts)
            try:
                await run.run()
            finally:
                self._runs.pop(id_, None)
            self._tasks.pop(id_, None)

        if not self.store.is_closed:
            self._tasks[id_] = SupervisedTask(step, "running a batch", batch=id_)

    async def _sweep(self) -> float:
        await self.threads.run(self.store.sweep)
        return _SWEEP_S

    def _token_of(self, key: Key) -> Secret | None:
        """A token for requests in the name of a key; None: the gateway has no keys."""
        if key is ANONYMOUS_KEY:
            return None
        owner = owner_of(key)
        token = self._tokens.get(owner)
        if token is None or hash_key(token) not in self._front.keys.table.keys:
            token = self._tokens[owner] = self._front.keys.issue_token(key)
            if self._front.workers is not None:
                self._front.workers.publish_keys()
        return token

    def _model_problem(self, key: Key, path: str, model: str) -> str:
        try:
            route = self._front.routes.table.find(model, key)
            endpoints.find(path, b"", "POST").check(route.name, route.task)
        except FitserveError as error:
            return str(error)
        return ""


def window_s(text: str) -> float:
    """The seconds of a completion window. Raises BadRequest."""
    number = text[:-1]
    unit = text[-1:]
    seconds = int(number) * _UNITS[unit] if unit in _UNITS and number.isdecimal() else 0
    if not _HOUR_S <= seconds <= _MAX_WINDOW_S:
        raise BadRequest(
            "completion_window is not a time from 1h to 14d.",
            hint="Send 24h, or another number of hours or days.",
            param="completion_window",
        )
    return float(seconds)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    """Check texts of a client. Raises BadRequest."""
    for name, value in (metadata or {}).items():
        if len(name) > _KEY_CHARACTERS or len(value) > _VALUE_CHARACTERS:
            raise BadRequest(
                "A name or a text of `metadata` is too long.",
                hint=f"Names have {_KEY_CHARACTERS} and texts {_VALUE_CHARACTERS} characters.",
                param="metadata",
            )


def _upload_error(message: str) -> Busy:
    return Busy(message, hint="Try again in a few seconds.", retry_after_s=5)
