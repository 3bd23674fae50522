"""The Hugging Face Hub, or a compatible server: listings of repositories and parts of files.

Methods block and are called from threads. Every failure raises a BadModel with a hint. The token
goes only to the Hub: no error and no log line carries it.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from gateway.disk_fault import unwritten_error
from gateway.domain.units import MIB
from gateway.domain.wish import commit_key
from gateway.errors import BadModel, short_reason
from gateway.models.catalog.hub_cache import (
    COMMIT,
    HubCache,
    Listing,
    stays_inside,
    write_atomically,
)
from gateway.secret import Secret
from gateway.version import __version__

T = TypeVar("T")

REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

# A listing of as many files as the Hub allows in a repository takes 20 MB.
LISTING_BYTES = 64 * MIB
MAX_FILES = 100_000

_MAX_VARIANTS = 40
_LIST_BYTES = 4 * MIB
# Formats of other engines.
_FOREIGN_FORMATS = {"gguf", "mlx", "exl2", "exl3", "onnx", "openvino", "coreml"}

_TIMEOUT_S = 30
_CONNECT_S = 10
_TRIES = 3


GGUF_HINT = (
    "GGUF is not planned here: give the repository or the folder of the original weights"
    " (config.json and *.safetensors)."
)


# The part of a GGUF file's or tag's name that says how it is quantized, as `-UD-Q4_K_M`.
_GGUF_FORM = re.compile(r"[-_.:](UD[-_])?I?Q\d\w*$|[-_.:](BF16|F16|F32)$|[-_]GGUF$", re.IGNORECASE)
_PAGES = re.compile(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/|^hf:", re.IGNORECASE)


def gguf_hint(name: str) -> str:
    """The remedy for a GGUF file, tag or repository, with the name of the model in it."""
    model = name.rpartition("/")[2].removesuffix(".gguf")
    model = re.sub(r":[\w.-]*$", "", model) if ":" in model else model
    while match := _GGUF_FORM.search(model):
        model = model[: match.start()]
    if not re.fullmatch(r"[\w.-]{1,96}", model):
        return GGUF_HINT
    return f"{GGUF_HINT} `fitserve search {model}` finds them."


def repository_hint(name: str) -> str:
    """The remedy for a name that is neither a folder nor a repository."""
    if name.lower().endswith(".gguf") or _is_gguf(name):
        return gguf_hint(name)
    hint = "A folder begins with /, ./, ../ or ~; a repository is written org/name."
    if "/" in name or not re.fullmatch(r"[\w.-]{1,96}(:[\w.-]{1,64})?", name):
        return hint
    return f"{hint} Names of Ollama's library are not known: qwen3:8b is Qwen/Qwen3-8B."


def _is_gguf(name: str) -> bool:
    """Whether the name has the form of a GGUF repository, with or without a tag."""
    repo, _, tag = _PAGES.sub("", name).partition(":")
    return repo.lower().endswith("gguf") or bool(tag and _GGUF_FORM.fullmatch(f":{tag}"))


class HubUnreachable(BadModel):
    """The Hub does not answer now; files on the disk may be enough."""


class Hub:
    """A client of one Hub.

    endpoint: the Hub's address, which may hold a password; None: the public Hub.
    cache: a folder for listings and small files, by commit, so that they need no second request.
    models: the Hub's cache of this user.
    commits: the commits that names of revisions stand for (`Wish.commits`).

    `resolved_commits` holds the names that were resolved, with their commits. `unconfirmed_repos`
    holds those of them that were resolved from the disk because the Hub did not answer.
    """

    def __init__(
        self,
        endpoint: Secret | str | None,
        token: Secret | None,
        cache: Path,
        *,
        models: Path | None = None,
        commits: Mapping[str, str] | None = None,
    ) -> None:
        self.endpoint = Secret(endpoint) if isinstance(endpoint, str) else endpoint
        self.token = token
        self.disk = HubCache(models, cache)
        self.commits = dict(commits or {})
        self.resolved_commits: dict[str, str] = {}
        self.unconfirmed_repos: set[str] = set()

    def pin_commits(self, commits: Mapping[str, str]) -> Hub:
        """A Hub in which names of revisions stand for these commits."""
        return Hub(
            self.endpoint, self.token, self.disk.notes, models=self.disk.folder, commits=commits
        )

    def resolve(self, repo: str, revision: str | None) -> Listing:
        """The commit that `revision` (None: the default branch) names, and its files.

        A known listing costs no request. Where the Hub does not answer, the name stands for the
        commit that a program on this machine resolved last, if that commit is on the disk.
        Raises BadModel, HubUnreachable.
        """
        if not REPOSITORY.fullmatch(repo):
            raise BadModel(
                f"{repo!r} is not a Hugging Face repository.", hint=repository_hint(repo)
            )
        name = commit_key(repo, revision)
        commit = self.commits.get(name) or (revision if COMMIT.fullmatch(revision or "") else None)
        listing = self.disk.listing(repo, commit) if commit is not None else None
        if listing is None:
            try:
                listing = self._request_listing(repo, commit or revision)
                self.disk.store(listing)
            except HubUnreachable:
                local_commit = commit or self.disk.commit_of(repo, revision)
                listing = (
                    self.disk.listing(repo, local_commit)
                    or self.disk.local_files(repo, local_commit)
                    if local_commit is not None
                    else None
                )
                if listing is None or self.disk.folder_of(repo, listing.commit) is None:
                    raise
                if commit is None:
                    self.unconfirmed_repos.add(name)
        self.commits[name] = self.resolved_commits[name] = listing.commit
        return listing

    def _request_listing(self, repo: str, revision: str | None) -> Listing:
        from huggingface_hub import constants
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

        with self.explain_errors(repo, revision):
            validate_repo_id(repo)
            # The library's model_info would keep an answer of any length in memory.
            url = f"{self.address or constants.ENDPOINT}/api/models/{repo}"
            url += (
                "?blobs=true"
                if revision is None
                else f"/revision/{quote(revision, safe='')}?blobs=true"
            )
            answer = _retry(lambda: self._receive(url, LISTING_BYTES + 1))
        return self._parse_listing(repo, revision, answer)

    def _parse_listing(self, repo: str, revision: str | None, answer: bytes) -> Listing:
        """The listing in the Hub's answer.

        Raises BadModel for an answer in another form, and for a file outside of the repository's
        folder.
        """
        try:
            document = json.loads(answer) if len(answer) <= LISTING_BYTES else {}
            siblings = document["siblings"]
            sizes = {sibling["rfilename"]: sibling["size"] for sibling in siblings}
            digests = {
                row["rfilename"]: str((row.get("lfs") or {}).get("sha256") or row.get("blobId"))
                for row in siblings
            }
            commit = COMMIT.fullmatch(document["sha"])
            kinds = {type(size) for size in sizes.values()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            commit = None
            sizes = {}
            digests = {}
            kinds = set()
        if (
            commit is None
            or kinds - {int}
            or len(sizes) > MAX_FILES
            or min(sizes.values(), default=0) < 0
        ):
            raise self._foreign_answer_error()
        if COMMIT.fullmatch(revision or "") and commit[0] != revision:
            raise BadModel(
                f"{self.shown_address} returned {repo} at commit {commit[0]} instead of"
                f" {revision}.",
                hint="The Hub returned another commit than requested; check FITSERVE_HF_ENDPOINT.",
            )
        outside_paths = [path for path in sizes if not stays_inside(path)]
        if outside_paths:
            raise BadModel(
                f"{self.shown_address} lists a file {str(outside_paths[0])[:200]!a} of {repo},"
                " whose path can leave the repository's folder.",
                hint="Nothing was downloaded. Choose another repository, or another Hub.",
            )
        return Listing(
            repo,
            commit[0],
            sizes,
            {path: digest for path, digest in digests.items() if _DIGEST.fullmatch(digest)},
        )

    def quantized_repositories(self, repo: str) -> list[str]:
        """Repositories that declare quantized weights of this one, the most downloaded first.

        Raises BadModel.
        """
        return [row["id"] for row in self.quantized_rows(repo)]

    def quantized_rows(self, repo: str) -> list[dict[str, Any]]:
        """The rows of `list_models` for repositories that declare quantized weights of this one."""
        query = {
            "filter": f"base_model:quantized:{repo}",
            "sort": "downloads",
            "limit": _MAX_VARIANTS,
        }
        return [
            model
            for model in self.list_models(query)
            if isinstance(model.get("id"), str) and REPOSITORY.fullmatch(model["id"])
        ]

    def list_models(self, query: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of the Hub's list of models, without formats of other engines.

        query: the query in the form that `HfApi.list_models` of huggingface_hub sends; empty values
            are left out. The `tags` of a row are strings. Raises BadModel, HubUnreachable.
        """
        from huggingface_hub import constants

        parameters = {name: value for name, value in query.items() if value}
        url = f"{self.address or constants.ENDPOINT}/api/models?{urlencode(parameters, doseq=True)}"
        with self.explain_errors("the list of models", None):
            answer = self._receive(url, _LIST_BYTES)
        try:
            rows = json.loads(answer)
        except (ValueError, RecursionError):
            rows = None
        if not isinstance(rows, list):
            raise self._foreign_answer_error()
        models = [row | {"tags": _texts(row.get("tags"))} for row in rows if isinstance(row, dict)]
        return [model for model in models if not _FOREIGN_FORMATS.intersection(model["tags"])]

    def _foreign_answer_error(self) -> HubUnreachable:
        return HubUnreachable(
            f"{self.shown_address} does not answer as a Hugging Face Hub does.",
            hint="Correct FITSERVE_HF_ENDPOINT, or give a model folder on this machine.",
        )

    def fetch(self, listing: Listing, name: str) -> bytes:
        """A small file, of exactly its listed size. Raises BadModel."""
        size = listing.files[name]
        cached_path = self.disk.small_file(listing.repo, listing.commit, name)
        with suppress(OSError):
            if len(data := cached_path.read_bytes()) == size:
                return data
        # The library's hf_hub_download would write an answer of any length.
        data = self.part(listing, name, 0, size + 1)
        if len(data) != size:
            amount_words = "more" if len(data) > size else f"only {len(data)}"
            raise BadModel(
                f"{self.shown_address} lists {listing.repo}/{name} with {size} bytes and sends"
                f" {amount_words}.",
                hint="Try again later, or download the model from another Hub.",
            )
        with self.explain_errors(listing.repo, listing.commit):
            write_atomically(cached_path, data)
        return data

    def part(self, listing: Listing, name: str, offset: int, length: int) -> bytes:
        """`length` bytes of a file from `offset`, fewer only at its end.

        At most `offset + length` bytes are received. Raises BadModel.
        """
        from huggingface_hub import hf_hub_url

        with self.explain_errors(listing.repo, listing.commit):
            url = hf_hub_url(listing.repo, name, revision=listing.commit, endpoint=self.address)
            return _retry(lambda: self._receive(url, length, offset))

    def _receive(self, url: str, length: int, offset: int = 0) -> bytes:
        """Bytes of the answer from `offset`, at most `length`."""
        # The library's parse_safetensors_file_metadata keeps the whole answer in memory: all the
        # weights where a mirror ignores Range. It also refuses headers over 25 MB.
        import httpx2
        from huggingface_hub import utils as library

        utils: Any = library

        headers = utils.build_hf_headers(
            token=self.auth, library_name="fitserve", library_version=__version__
        )
        headers |= {"Range": f"bytes={offset}-{offset + length - 1}", "Accept-Encoding": "identity"}
        with utils.get_session().stream(
            "GET", url, headers=headers, timeout=httpx2.Timeout(_TIMEOUT_S, connect=_CONNECT_S)
        ) as response:
            utils.hf_raise_for_status(response)
            skip = 0 if response.status_code == 206 else offset
            received_bytes = bytearray()
            for chunk in response.iter_raw():
                received_bytes += chunk
                if len(received_bytes) >= skip + length:
                    break
        return bytes(received_bytes[skip : skip + length])

    @property
    def auth(self) -> str | bool:
        # The library would look for a token of the gateway's user if it got None.
        return self.token.reveal() if self.token is not None else False

    @property
    def address(self) -> str | None:
        """The Hub's address for requests, which may hold a password; None: the public Hub's."""
        return (self.endpoint.reveal().rstrip("/") or None) if self.endpoint is not None else None

    @property
    def shown_address(self) -> str:
        """The Hub's address for messages, without path and credentials."""
        from huggingface_hub import constants

        url_parts = urlsplit(self.address or constants.ENDPOINT)
        return f"{url_parts.scheme}://{url_parts.netloc.rpartition('@')[2]}"

    @contextmanager
    def explain_errors(self, repo: str, revision: str | None) -> Iterator[None]:
        """Turn the library's errors into BadModel, without their texts: those hold signed URLs."""
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.LocalEntryNotFoundError as error:
            # The library raises it when the Hub failed and the cache has no copy.
            raise self._download_error(error.__cause__ or error, repo, revision) from None
        except (
            errors.HfHubHTTPError,
            httpx2.HTTPError,
            httpx2.InvalidURL,
            errors.HFValidationError,
            OSError,
        ) as error:
            raise self._download_error(error, repo, revision) from None

    def _download_error(self, error: BaseException, repo: str, revision: str | None) -> BadModel:
        """The error of a failed download, in the words of its cause."""
        from huggingface_hub import errors

        if isinstance(error, errors.HFValidationError):
            return BadModel(
                f"{repo} cannot be the name of a Hugging Face repository.",
                hint="Write it as ORGANIZATION/NAME, without a URL.",
            )
        if isinstance(error, errors.GatedRepoError):
            return BadModel(
                f"{repo} is gated: its files are only for accounts that accepted its licence.",
                hint=(
                    f"Accept it at {self.shown_address}/{repo} and set FITSERVE_HF_TOKEN to a token"
                    " of that account."
                ),
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return BadModel(
                f"{repo} has no revision {revision}.",
                hint=f"{self.shown_address}/{repo} lists its branches, tags and commits.",
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return BadModel(
                f"A file of {repo} was removed from {self.shown_address}.",
                hint="The repository changed during the download. Try again.",
            )
        if isinstance(error, errors.HfHubHTTPError):
            return self._status_error(error.response.status_code, error, repo)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return HubUnreachable(
                f"{self.shown_address} was not asked, because HF_HUB_OFFLINE is set.",
                hint="Unset HF_HUB_OFFLINE, or give a model folder.",
            )
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return BadModel(
                f"{self.shown_address} sends more of {repo} than it lists.",
                hint="Choose another Hub, or try again later.",
            )
        if isinstance(error, OSError) and error.errno is not None:
            path = Path(os.fsdecode(error.filename or self.disk.notes))
            disk_error = unwritten_error(f"{path} cannot be written", path.parent, error, "")
            return BadModel(disk_error.message, hint=disk_error.hint)
        return HubUnreachable(
            f"The Hugging Face Hub at {self.shown_address} cannot be reached, or the connection"
            " broke"
            f" ({short_reason(error)}).",
            hint=f"Check the network, or give a model folder on this machine; {repo} is not one.",
        )

    def _status_error(self, status: int, error: BaseException, repo: str) -> BadModel:
        """The error of an answer of the Hub with this status."""
        from huggingface_hub import errors

        if status == 401 and self.token and not isinstance(error, errors.RepositoryNotFoundError):
            return BadModel(
                f"{self.shown_address} refuses the token in FITSERVE_HF_TOKEN.",
                hint="Set a valid token, or unset FITSERVE_HF_TOKEN.",
            )
        if status in (401, 404):
            return BadModel(
                f"There is no model repository {repo} at {self.shown_address}, or it is private.",
                hint=(
                    "Check the spelling. For a private repository set FITSERVE_HF_TOKEN. A folder"
                    " begins with / or ./."
                ),
            )
        if status == 403:
            return BadModel(
                f"{self.shown_address} refuses access to {repo}.",
                hint="Set FITSERVE_HF_TOKEN to a token that may read it.",
            )
        if status == 429:
            return BadModel(
                f"{self.shown_address} limits the rate of requests from this address (status 429).",
                hint="Wait some minutes, or set FITSERVE_HF_TOKEN.",
            )
        kind = HubUnreachable if status >= 500 else BadModel
        return kind(
            f"{self.shown_address} answered {status} for {repo}.",
            hint="Try again later, or give a model folder.",
        )


def _retry(call: Callable[[], T]) -> T:
    """The result of `call`, repeated when the connection or the server fails.

    A model of hundreds of shards would else fail with a single lost connection.
    """
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


def _texts(value: object) -> list[str]:
    """The texts in a list; another value has none."""
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []
