"""The Hugging Face Hub, or a server that speaks like it: what a repository holds at a commit, and
parts of its files.

Methods block and are called from threads. Every failure is a BadModel that says what to do; neither
it nor a log line carries the token, which only ever goes to the Hub itself.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlsplit

from gateway.domain.units import MIB
from gateway.domain.wish import pinned
from gateway.errors import BadModel, in_brief
from gateway.models.catalog.hub_cache import COMMIT, HubCache, Listing, put, stays_inside
from gateway.version import __version__

T = TypeVar("T")

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

# A listing of all files that the Hub allows to a repository takes 20 MB.
LISTING_BYTES = 64 * MIB
MOST_FILES = 100_000

# Of the variants of a repository; in formats of other engines they are of no use here.
_MOST_VARIANTS, _VARIANTS_BYTES = 40, 4 * MIB
_FOREIGN = {"gguf", "mlx", "exl2", "exl3", "onnx", "openvino", "coreml"}

_TIMEOUT_S = 30
_CONNECT_S = 10
_TRIES = 3


class HubAway(BadModel):
    """The Hub cannot be asked now; what is on the disk may do."""


class Hub:
    """`endpoint` None is the public Hub. Listings and small files that were read are kept in
    `cache`, by commit: that what was read
    once needs no network any more. `models`: the Hub's cache of this user. `commits`: what the
    names of revisions mean here (`Wish.commits`); a name is asked for once. `read`: those names
    that were looked up; `unasked`: of these, whose meaning could not be asked.
    """

    def __init__(
        self,
        endpoint: str | None,
        token: str | None,
        cache: Path,
        *,
        models: Path | None = None,
        commits: Mapping[str, str] | None = None,
    ) -> None:
        self.endpoint = endpoint.rstrip("/") if endpoint else None
        self.token = token
        self.disk = HubCache(models, cache)
        self.commits = dict(commits or {})
        self.read: dict[str, str] = {}
        self.unasked: set[str] = set()

    def at(self, commits: Mapping[str, str]) -> Hub:
        """The same Hub, where names of revisions mean these commits."""
        return Hub(
            self.endpoint, self.token, self.disk.notes, models=self.disk.folder, commits=commits
        )

    def resolve(self, repo: str, revision: str | None) -> Listing:
        """The commit that `revision` (None: the default branch) names, and its files. A commit
        whose listing is known is not asked for; where
        the Hub cannot be asked, the name means what it meant to the program that last asked, if
        that commit is here (`unasked`).
        """
        if not REPOSITORY.fullmatch(repo):
            raise BadModel(
                f"{repo!r} is not a Hugging Face repository.", hint="It is written org/name."
            )
        name = pinned(repo, revision)
        commit = self.commits.get(name) or (revision if COMMIT.fullmatch(revision or "") else None)
        listing = self.disk.listing(repo, commit) if commit is not None else None
        if listing is None:
            try:
                listing = self._asked(repo, commit or revision)
                self.disk.keep(listing)
            except HubAway:
                here = commit or self.disk.named(repo, revision)
                listing = (
                    self.disk.listing(repo, here) or self.disk.found(repo, here)
                    if here is not None
                    else None
                )
                if listing is None or self.disk.here(repo, listing.commit) is None:
                    raise
                if commit is None:
                    self.unasked.add(name)
        self.commits[name] = self.read[name] = listing.commit
        return listing

    def _asked(self, repo: str, revision: str | None) -> Listing:
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        with self.explained(repo, revision):
            validate_repo_id(repo)
            # Not the library's model_info: it keeps the whole answer in memory, however long it is.
            url = f"{self.endpoint or constants.ENDPOINT}/api/models/{repo}"
            url += (
                "?blobs=true"
                if revision is None
                else f"/revision/{quote(revision, safe='')}?blobs=true"
            )
            answer = _retried(lambda: self._received(url, LISTING_BYTES + 1))
        return self._listing(repo, revision, answer)

    def _listing(self, repo: str, revision: str | None, answer: bytes) -> Listing:
        """Raises BadModel for an answer that is not the Hub's, or of which a file would stand
        outside of the repository's folder."""
        try:
            told = json.loads(answer) if len(answer) <= LISTING_BYTES else {}
            sizes = {sibling["rfilename"]: sibling["size"] for sibling in told["siblings"]}
            digests = {
                one["rfilename"]: str((one.get("lfs") or {}).get("sha256") or one.get("blobId"))
                for one in told["siblings"]
            }
            commit, kinds = COMMIT.fullmatch(told["sha"]), {type(size) for size in sizes.values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            commit, sizes, digests, kinds = None, {}, {}, set()
        if (
            commit is None
            or kinds - {int}
            or len(sizes) > MOST_FILES
            or min(sizes.values(), default=0) < 0
        ):
            raise HubAway(
                f"{self.place} does not answer as a Hugging Face Hub does.",
                hint="Correct FITSERVE_HF_ENDPOINT, or give a model folder on this machine.",
            )
        if COMMIT.fullmatch(revision or "") and commit[0] != revision:
            raise BadModel(
                f"{self.place} has {repo} at {commit[0]} in place of {revision}.",
                hint="Take a Hub that keeps its commits.",
            )
        strange = [path for path in sizes if not stays_inside(path)]
        if strange:
            raise BadModel(
                f"{self.place} lists a file {str(strange[0])[:200]!a} of {repo}, which could stand"
                " outside of its folder.",
                hint="Nothing of it was fetched. Take another repository, or another Hub.",
            )
        return Listing(
            repo,
            commit[0],
            sizes,
            {path: one for path, one in digests.items() if _DIGEST.fullmatch(one)},
        )

    def quantized(self, repo: str) -> list[str]:
        """Repositories that say that their weights are this one's, quantized; the most downloaded
        first. Raises BadModel."""
        from huggingface_hub import constants

        url = f"{self.endpoint or constants.ENDPOINT}/api/models?filter=base_model:quantized:{quote(repo)}"
        with self.explained(repo, None):
            answer = self._received(
                f"{url}&sort=downloads&direction=-1&limit={_MOST_VARIANTS}", _VARIANTS_BYTES
            )
        try:
            names = [
                one["id"]
                for one in json.loads(answer)
                if not _FOREIGN.intersection(one.get("tags", ()))
            ]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []
        return [name for name in names if isinstance(name, str) and REPOSITORY.fullmatch(name)]

    def fetch(self, listing: Listing, name: str) -> bytes:
        """A whole small file, of as many bytes as are listed."""
        size = listing.files[name]
        kept = self.disk.small_file(listing.repo, listing.commit, name)
        with suppress(OSError):
            if len(data := kept.read_bytes()) == size:
                return data
        # Not the library's hf_hub_download: it writes whatever comes, without end.
        data = self.part(listing, name, 0, size + 1)
        if len(data) != size:
            sent = "more" if len(data) > size else f"{len(data)}"
            raise BadModel(
                f"{self.place} lists {listing.repo}/{name} with {size} bytes and sends {sent}.",
                hint="Try again later.",
            )
        with self.explained(listing.repo, listing.commit):
            put(kept, data)
        return data

    def part(self, listing: Listing, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset` on, fewer only at its end. Never more is received
        than leads up to them."""
        from huggingface_hub import hf_hub_url

        with self.explained(listing.repo, listing.commit):
            url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.endpoint)
            return _retried(lambda: self._received(url, length, offset))

    def _received(self, url: str, length: int, offset: int = 0) -> bytes:
        """At most `length` bytes of the answer, from `offset` on."""
        # Not the library's parse_safetensors_file_metadata: it keeps the whole answer in memory,
        # which is all the weights where a mirror ignores Range, and it refuses headers over 25 MB.
        import httpx2
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status  # type: ignore[attr-defined]

        headers = build_hf_headers(
            token=self._auth, library_name="fitserve", library_version=__version__
        )
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        with get_session().stream(
            "GET", url, headers=headers, timeout=httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        ) as response:
            hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else offset
            received = bytearray()
            for chunk in response.iter_raw():
                received += chunk
                if len(received) >= skip + length:
                    break
        return bytes(received[skip : skip + length])

    @property
    def _auth(self) -> str | bool:
        # None would let the library look for a token of the user who runs us.
        return self.token or False

    @property
    def place(self) -> str:
        """The Hub's address for messages: without path and credentials."""
        from huggingface_hub import constants

        parts = urlsplit(self.endpoint or constants.ENDPOINT)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"

    @contextmanager
    def explained(self, repo: str, revision: str | None) -> Iterator[None]:
        """Turn the library's errors into ours. Their own words stay out: they hold addresses, some
        of them signed."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            # The library's way to say that the Hub failed and that it has no copy either.
            raise self._explain(error.__cause__ or error, repo, revision) from None
        except (
            errors.HfHubHTTPError,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            errors.HFValidationError,
            OSError,
        ) as error:
            raise self._explain(error, repo, revision) from None

    def _explain(self, error: BaseException, repo: str, revision: str | None) -> BadModel:
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            return BadModel(
                f"{repo} cannot be the name of a Hugging Face repository.",
                hint="Check the spelling.",
            )
        if isinstance(error, errors.GatedRepoError):
            return BadModel(
                f"{repo} is gated: its files are only for accounts that accepted its licence.",
                hint=(
                    f"Accept it at {self.place}/{repo} and set FITSERVE_HF_TOKEN to a token of that"
                    " account."
                ),
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return BadModel(
                f"{repo} has no revision {revision}.",
                hint=f"{self.place}/{repo} lists its branches, tags and commits.",
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return BadModel(
                f"A file of {repo} is gone from {self.place}.",
                hint="Try again; the repository changed meanwhile.",
            )
        if isinstance(error, errors.HfHubHTTPError):
            return self._explain_status(error.response.status_code, error, repo)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubAway(
                f"{self.place} is not asked, as HF_HUB_OFFLINE is set.",
                hint="Unset it, or give a model folder.",
            )
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return BadModel(
                f"{self.place} sends more of {repo} than it lists.",
                hint="Take another Hub, or try again later.",
            )
        if isinstance(error, OSError) and error.errno is not None:
            where = error.filename or self.disk.notes
            return BadModel(
                f"{where} cannot be written: {error.strerror}.",
                hint="Make room, or let the gateway's user write there.",
            )
        return HubAway(
            f"The Hugging Face Hub at {self.place} cannot be reached, or broke off"
            f" ({in_brief(error)}).",
            hint=(
                "Check the network, or give a model folder on this machine: that needs no network."
            ),
        )

    def _explain_status(self, status: int, error: BaseException, repo: str) -> BadModel:
        from huggingface_hub import errors

        if status == 401 and self.token and not isinstance(error, errors.RepositoryNotFoundError):
            return BadModel(
                f"{self.place} refuses the token in FITSERVE_HF_TOKEN.",
                hint="Set a valid one, or none.",
            )
        if status in (401, 404):
            return BadModel(
                f"There is no model repository {repo} at {self.place}, or it is private.",
                hint=(
                    "Check the spelling; for a private one set FITSERVE_HF_TOKEN. A folder is"
                    " written with a leading / or ./."
                ),
            )
        if status == 403:
            return BadModel(
                f"{self.place} refuses access to {repo}.",
                hint="Set FITSERVE_HF_TOKEN to a token that may read it.",
            )
        if status == 429:
            return BadModel(
                f"{self.place} says that we ask too often.",
                hint="Wait some minutes, or set FITSERVE_HF_TOKEN.",
            )
        kind = HubAway if status >= 500 else BadModel
        return kind(
            f"{self.place} answered {status} for {repo}.",
            hint="Try again later, or give a model folder.",
        )


def _retried(call: Callable[[], T]) -> T:
    """`call` again when the connection or the server fails: of hundreds of shards, one hiccup must
    not fail them all."""
    import httpx2
    from huggingface_hub.errors import HfHubHTTPError

    for _ in range(_TRIES - 1):
        try:
            return call()
        except httpx2.ConnectTimeout:
            raise
        except httpx2.TransportError:
            continue
        except HfHubHTTPError as error:
            if error.response.status_code < 500:
                raise
    return call()
