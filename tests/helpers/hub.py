"""A stand-in for the part of the Hugging Face hub's HTTP API that an upload needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

LFS_BYTES = 10_000  # larger files, and safetensors, go through LFS
TOKENS = {"hf_writer": "write", "hf_reader": "read", "hf_fine_grained": "fineGrained"}


class Hub:
    """What the hub holds.

    Attributes:
        url: its address, for HF_ENDPOINT.
        repos: contents by file name, by repository.
        private: whether a repository is private.
        requests: method and path of every request.
        refused: status by the beginning of paths that are refused.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.refused: dict[str, int] = {}


@contextmanager
def started_hub() -> Iterator[Hub]:
    """A hub on a port of its own, with the user `ada` in the organizations `team` and, only to read, `others`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self._read()
        hub, path = self.hub, self.path.partition("?")[0]
        hub.requests.append(f"{self.command} {path}")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        for start, status in hub.refused.items():
            if path.startswith(start):
                return self._send({"error": f"refused with {status}"}, status)
        if path.startswith("/upload/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/upload/")
            hub.blobs[path.removeprefix("/upload/")] = body
            return self._send({})
        if token not in TOKENS:
            return self._send({"error": "Invalid username or password."}, 401)
        values = json.loads(body) if body and not path.endswith(("/commit/main",)) else {}
        if path == "/api/whoami-v2":
            orgs = [{"name": "team", "roleInOrg": "write"}, {"name": "others", "roleInOrg": "read"}]
            access = {"role": TOKENS[token], "displayName": "laptop"}
            return self._send({"name": "ada", "type": "user", "orgs": orgs, "auth": {"accessToken": access}})
        if path == "/api/repos/create":
            repo = f"{values.get('organization') or 'ada'}/{values['name']}"
            if repo in hub.repos:
                return self._send({"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, 409)
            hub.repos[repo] = {}
            hub.private[repo] = values.get("visibility") == "private" or values.get("private") is True
            return self._send({"url": f"{hub.url}/{repo}", "name": repo})
        if path == "/api/validate-yaml":
            return self._send({"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            return self._send({"files": [self._mode(file) for file in values["files"]]})
        if re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            objects = [
                {
                    "oid": one["oid"],
                    "size": one["size"],
                    "actions": {"upload": {"href": f"{hub.url}/upload/{one['oid']}"}},
                }
                for one in values["objects"]
            ]
            return self._send({"transfer": "basic", "objects": objects})
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(found[1], body)
            oid = "0" * 40
            return self._send({"success": True, "commitOid": oid, "commitUrl": f"{hub.url}/{found[1]}/commit/{oid}"})
        return self._send({"error": f"the stand-in knows no {self.command} {path}"}, 404)

    def _commit(self, repo: str, body: bytes) -> None:
        for line in body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                self.hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                self.hub.repos[repo][value["path"]] = self.hub.blobs[value["oid"]]

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith(".safetensors") or file["size"] > LFS_BYTES
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _send(self, value: dict[str, Any], status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 401:
            self.send_header("X-Error-Message", value["error"])
        self.end_headers()
        self.wfile.write(content)
