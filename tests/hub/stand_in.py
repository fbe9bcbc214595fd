"""The Hub's HTTP API on the loopback, as far as pushing and loading models needs it; it breaks and lies as told."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_stand_in"
USER = "tester"


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit("main", {".gitattributes": b""})

    def commit(self, branch: str, changes: dict[str, bytes]) -> str:
        files = {**self.commits.get(self.branches.get(branch, ""), {}), **changes}
        sha = hashlib.sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[sha] = files
        self.branches[branch] = sha
        return sha

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]


class StandInHub(ThreadingHTTPServer):
    """Repositories in memory; writing takes `TOKEN`, and so does seeing private ones.

    Attributes:
        repositories: by name.
        objects: contents of large files by hash.
        breaks: large uploads that are cut off yet.
        uploads: large uploads that went through.
        requests: method and path of each request.
    """

    daemon_threads = True

    def __init__(self, breaks: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.breaks = breaks
        self.uploads = 0
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> StandInHub:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: Any) -> None:
        """Connections that are cut off are none to be printed."""


NAME = r"(?P<name>[^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate"),
    ("POST", rf"/api/models/{NAME}/branch/(?P<revision>.+)", "branch"),
    ("POST", rf"/api/models/{NAME}/preupload/(?P<revision>.+)", "preupload"),
    ("POST", rf"/api/models/{NAME}/commit/(?P<revision>.+)", "commit"),
    ("GET", rf"/api/models/{NAME}/tree/(?P<revision>[^/]+)(/(?P<path>.*))?", "tree"),
    ("GET", rf"/api/models/{NAME}/refs", "refs"),
    ("GET", rf"/api/models/{NAME}(/revision/(?P<revision>.+))?", "info"),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/objects/(?P<path>\w+)", "upload"),
    ("GET", rf"/{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
]


class Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        self.status, self.code, self.message = status, code, message or code


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def _serve(self, method: str, with_body: bool = True) -> None:
        path = urlsplit(self.path).path
        self.server.requests.append(f"{self.command} {path}")
        body = self._body()
        for verb, pattern, action in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and verb == method:
                try:
                    found = {name: unquote(value) for name, value in match.groupdict().items() if value}
                    status, headers, content = getattr(self, f"_{action}")(body, **found)
                except Refused as refused:
                    headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
                    status, content = refused.status, json.dumps({"error": refused.message}).encode()
                break
        else:
            status, headers, content = 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        if status is None:  # as if the line had been cut
            self.close_connection = True
            self.connection.close()
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def do_GET(self) -> None:
        self._serve("GET")

    def do_HEAD(self) -> None:
        self._serve("GET", with_body=False)

    def do_POST(self) -> None:
        self._serve("POST")

    def do_PUT(self) -> None:
        self._serve("PUT")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    # --- who may do what -----------------------------------------------------------------------------------------

    @property
    def _is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _writer(self) -> None:
        if not self._is_known:
            raise Refused(401, "", "Invalid username or password.")

    def _repository(self, name: str) -> Repository:
        found = self.server.repositories.get(name)
        if found is None or (found.private and not self._is_known):
            raise Refused(404 if self._is_known else 401, "RepoNotFound", "Repository not found")
        return found

    def _sha(self, repository: Repository, revision: str) -> str:
        sha = repository.branches.get(revision, revision)
        if sha not in repository.commits:
            raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    # --- answers -------------------------------------------------------------------------------------------------

    def _json(self, content: Any, status: int = 200) -> tuple[int, dict[str, str], bytes]:
        return status, {"Content-Type": "application/json"}, json.dumps(content).encode()

    def _whoami(self, _: bytes) -> Any:
        self._writer()
        return self._json({"type": "user", "name": USER, "orgs": [], "auth": {"type": "access_token"}})

    def _create(self, body: bytes) -> Any:
        self._writer()
        asked = json.loads(body)
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        if asked.get("organization") not in (None, USER, "org"):
            raise Refused(403, "", f"You don't have the rights to create a model under {asked['organization']!r}")
        if name in self.server.repositories:
            return self._json({"error": "exists", "url": f"{self.server.url}/{name}"}, 409)
        is_private = asked.get("private") or asked.get("visibility") == "private"
        self.server.repositories[name] = Repository(private=bool(is_private))
        return self._json({"url": f"{self.server.url}/{name}", "name": name, "id": name})

    def _validate(self, _: bytes) -> Any:
        return self._json({"errors": [], "warnings": []})

    def _branch(self, _: bytes, name: str, revision: str) -> Any:
        self._writer()
        repository = self._repository(name)
        if revision in repository.branches:
            return self._json({"error": "exists"}, 409)
        repository.branches[revision] = repository.branches["main"]
        return self._json({})

    def _preupload(self, body: bytes, name: str, revision: str) -> Any:
        self._writer()
        self._sha(self._repository(name), revision)
        files = []
        for file in json.loads(body)["files"]:
            is_large = file["path"].endswith((".safetensors", ".png", ".bin"))
            mode = "lfs" if is_large else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None})
        return self._json({"files": files})

    def _batch(self, body: bytes, name: str) -> Any:
        self._writer()
        self._repository(name)
        objects = []
        for entry in json.loads(body)["objects"]:
            if entry["oid"] not in self.server.objects:
                entry["actions"] = {"upload": {"href": f"{self.server.url}/objects/{entry['oid']}"}}
            objects.append(entry)
        return self._json({"transfer": "basic", "objects": objects})

    def _upload(self, body: bytes, path: str) -> Any:
        if self.server.breaks:
            self.server.breaks -= 1
            return None, {}, b""
        if hashlib.sha256(body).hexdigest() != path:
            raise Refused(400, "", "wrong hash")
        self.server.objects[path] = body
        self.server.uploads += 1
        return self._json({})

    def _commit(self, body: bytes, name: str, revision: str) -> Any:
        self._writer()
        repository = self._repository(name)
        self._sha(repository, revision)
        changes = {}
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                changes[value["path"]] = self.server.objects[value["oid"]]
        is_request = "create_pr" in urlsplit(self.path).query
        sha = repository.commit("refs/pr/1" if is_request else revision, changes)
        answer = {"success": True, "commitOid": sha, "commitUrl": f"{self.server.url}/{name}/commit/{sha}"}
        if is_request:
            answer["pullRequestUrl"] = f"{self.server.url}/{name}/discussions/1"
        return self._json(answer)

    def _info(self, _: bytes, name: str, revision: str = "main") -> Any:
        repository = self._repository(name)
        sha = self._sha(repository, revision)
        siblings = [{"rfilename": path} for path in repository.commits[sha]]
        return self._json({"id": name, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []})

    def _refs(self, _: bytes, name: str) -> Any:
        branches = self._repository(name).branches
        listed = [{"name": key, "ref": f"refs/heads/{key}", "targetCommit": sha} for key, sha in branches.items()]
        return self._json({"branches": listed, "tags": [], "converts": []})

    def _tree(self, _: bytes, name: str, revision: str, path: str = "") -> Any:
        repository = self._repository(name)
        files = repository.commits[self._sha(repository, revision)]
        listed = [
            {"type": "file", "path": key, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for key, content in files.items()
            if key.startswith(path)
        ]
        return self._json(listed)

    def _resolve(self, _: bytes, name: str, revision: str, path: str) -> Any:
        repository = self._repository(name)
        sha = self._sha(repository, revision)
        content = repository.commits[sha].get(path)
        if content is None:
            headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found", "X-Repo-Commit": sha}
            return 404, headers, b"Entry not found"
        etag = hashlib.sha256(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}, content


__all__ = ["TOKEN", "USER", "Repository", "StandInHub"]
