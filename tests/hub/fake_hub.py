"""A local server that speaks as much of the Hub's protocol as uploads and downloads need. Not the Hub: a fake.

Repositories, commits (NDJSON with regular and LFS files), LFS uploads and downloads are kept in memory. A request
without the right token is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "secret" * 5
_LFS = (".safetensors", ".parquet", ".bin")


class FakeHub:
    """Context manager; `url` is its address.

    Attributes:
        repos: files of each repository, by `(kind, id)`, for example `("models", "me/model")`.
        requests: method and path of everything that was asked.
        refused: how many requests came with another token, or none.
        private: repositories that were made private.
    """

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.refused = 0
        self.private: set[str] = set()
        hub = self

        class Handler(_Handler):
            state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeHub:
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.state.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        # As on the Hub, an LFS upload goes to an address that is signed, without a token.
        if self.command == "PUT" and (blob := re.fullmatch(r"/lfs/(\w{64})", path)):
            assert hashlib.sha256(body).hexdigest() == blob[1]
            self.state.blobs[blob[1]] = body
            self._answer({})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.state.refused += 1
            self._answer({"error": "Invalid credentials"}, 401)
            return
        for method, pattern, function in self._ROUTES:
            if method == self.command and (found := re.fullmatch(pattern, path)):
                function(self, body, *found.groups())
                return
        self._answer({"error": f"not in this fake: {self.command} {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = _serve

    def _files(self, kind: str, repo: str) -> dict[str, bytes] | None:
        files = self.state.repos.get((kind, repo))
        if files is None:
            self._answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return files

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = "/".join(filter(None, [asked.get("organization") or "me", asked["name"]]))
        kind = f"{asked.get('type') or 'model'}s"
        if (kind, repo) in self.state.repos:
            self._answer({"error": "You already created this repo", "url": f"{self.state.url}/{repo}"}, 409)
            return
        self.state.repos[kind, repo] = {}
        if asked.get("private") or asked.get("visibility") == "private":
            self.state.private.add(repo)
        prefix = "" if kind == "models" else f"{kind}/"
        self._answer({"url": f"{self.state.url}/{prefix}{repo}", "name": repo, "id": "1"})

    def _preupload(self, body: bytes, kind: str, repo: str) -> None:
        if self._files(kind, repo) is None:
            return
        files = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(_LFS) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._answer({"files": files})

    def _batch(self, body: bytes, repo: str) -> None:
        objects = []
        for item in json.loads(body)["objects"]:
            upload = {"href": f"{self.state.url}/lfs/{item['oid']}"}
            known = item["oid"] in self.state.blobs
            objects.append(item | ({} if known else {"actions": {"upload": upload}}))
        self._answer({"transfer": "basic", "objects": objects})

    def _commit(self, body: bytes, kind: str, repo: str) -> None:
        files = self._files(kind, repo)
        if files is None:
            return
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.blobs[value["oid"]]
        sha = hashlib.sha1(body).hexdigest()
        self._answer({"commitUrl": f"{self.state.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def _info(self, body: bytes, kind: str, repo: str) -> None:
        files = self._files(kind, repo)
        if files is not None:
            self._answer({"id": repo, "sha": "0" * 40, "siblings": [{"rfilename": name} for name in files]})

    def _tree(self, body: bytes, kind: str, repo: str) -> None:
        files = self._files(kind, repo)
        if files is not None:
            self._answer(
                [{"type": "file", "oid": "0" * 40, "size": len(data), "path": name} for name, data in files.items()]
            )

    def _resolve(self, body: bytes, kind: str | None, repo: str, name: str) -> None:
        files = self._files(kind or "models", repo)
        if files is None:
            return
        if name not in files:
            self._answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        tag = hashlib.sha1(files[name]).hexdigest()
        self._answer(files[name], 200, {"ETag": f'"{tag}"', "X-Repo-Commit": "0" * 40})

    def _yaml(self, body: bytes) -> None:
        self._answer({"errors": [], "warnings": []})

    def _whoami(self, body: bytes) -> None:
        self._answer({"name": "me", "type": "user", "orgs": []})

    _REPO = r"([\w.-]+/[\w.-]+)"
    _ROUTES = (
        ("POST", "/api/repos/create", _create),
        ("POST", "/api/validate-yaml", _yaml),
        ("GET", "/api/whoami-v2", _whoami),
        ("POST", rf"/api/(models|datasets)/{_REPO}/preupload/main", _preupload),
        ("POST", rf"/api/(models|datasets)/{_REPO}/commit/main", _commit),
        ("POST", rf"/(?:datasets/)?{_REPO}\.git/info/lfs/objects/batch", _batch),
        ("GET", rf"/api/(models|datasets)/{_REPO}(?:/revision/\w+)?", _info),
        ("GET", rf"/api/(models|datasets)/{_REPO}/tree/\w+", _tree),
        ("GET", rf"/(?:(datasets)/)?{_REPO}/resolve/\w+/(.+)", _resolve),
        ("HEAD", rf"/(?:(datasets)/)?{_REPO}/resolve/\w+/(.+)", _resolve),
    )
