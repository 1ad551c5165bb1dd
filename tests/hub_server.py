"""A small stand-in for the Hub, on this machine: the endpoints that uploads and downloads use, kept in memory.

The client must have HF_HUB_DISABLE_XET=1 and offline mode off; `client_environment` says it all.
"""

import base64
import hashlib
import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.paths import ROOT

LFS_SUFFIXES = (".safetensors", ".bin")


class HubServer(ThreadingHTTPServer):
    """`with HubServer() as hub:`; `hub.repos[name]` is the last commit's {file: bytes}.

    `hub.fail = (method, path pattern, status)` refuses matching requests; `hub.requests` lists all that came.
    `hub.repos["name@branch"]` is that of a branch other than main, `hub.private` holds the names of private ones, and
    `hub.messages[name]` is the last commit's message and description.
    """

    daemon_threads = True
    token = "hf_" + "A1b2C3d4" * 4

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.commits: dict[str, str] = {}
        self.messages: dict[str, tuple[str, str]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail: tuple[str, str, int] | None = None
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def client_environment(self, home: Path) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if "proxy" not in key.lower()},
            "HF_ENDPOINT": self.endpoint,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "PYTHONPATH": str(ROOT),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        fail = self.server.fail
        if fail and self.command == fail[0] and re.search(fail[1], path):
            # As unkind as a server can be: it says in its answer whom it refused.
            return self.answer({"error": f"refused {self.headers.get('Authorization')}"}, fail[2])
        for method, pattern, action in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                return action(self, body, *match.groups())
        return self.answer({"error": f"no route for {self.command} {path}"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = do

    def answer(self, data, status=200, headers=()):
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/octet-stream" if data is content else "application/json")
        if status >= 400 and not isinstance(data, bytes):
            self.send_header("X-Error-Message", data["error"])
        for name, value in headers:
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse_strangers(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.server.token}":
            return False
        self.answer({"error": f"unknown token {self.headers.get('Authorization')}"}, 401)
        return True

    def create(self, body):
        if self.refuse_strangers():
            return
        request = json.loads(body)
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        exists = name in self.server.repos
        self.server.repos.setdefault(name, {})
        self.server.commits.setdefault(name, "0" * 40)
        if (request.get("private") or request.get("visibility") == "private") and not exists:
            self.server.private.add(name)
        url = {"url": f"{self.server.endpoint}/{name}", "name": name, "id": name}
        self.answer({**url, "error": "exists"} if exists else url, 409 if exists else 200)

    def branch(self, body, repo, name):
        if self.refuse_strangers():
            return
        self.server.repos.setdefault(f"{repo}@{name}", dict(self.server.repos[repo]))
        self.answer({})

    def validate(self, body):
        self.answer({"warnings": [], "errors": []})

    def preupload(self, body, repo, revision):
        files = json.loads(body)["files"]
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        self.answer({"files": modes})

    def lfs_batch(self, body, repo):
        objects = []
        for wanted in json.loads(body)["objects"]:
            have = wanted["oid"] in self.server.objects
            actions = {} if have else {"upload": {"href": f"{self.server.endpoint}/lfs/{wanted['oid']}"}}
            objects.append({**wanted, "actions": actions} if actions else wanted)
        self.answer({"transfer": "basic", "objects": objects})

    def lfs_put(self, body, oid):
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer({"error": "damaged on the way"}, 400)
        self.server.objects[oid] = body
        return self.answer({})

    def commit(self, body, repo, revision):
        if self.refuse_strangers():
            return
        name = repo if revision == "main" else f"{repo}@{revision}"
        files, message = dict(self.server.repos[name]), None
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"], value["description"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        oid = hashlib.sha1(body).hexdigest()
        url = f"{self.server.endpoint}/{repo}/commit/{oid}"
        answer = {"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""}
        if "create_pr=1" in self.path:
            return self.answer({**answer, "pullRequestUrl": f"{self.server.endpoint}/{repo}/discussions/1"})
        self.server.repos[name] = files
        self.server.commits[name] = oid
        self.server.messages[name] = message
        return self.answer(answer)

    def info(self, body, repo, revision=None):
        if repo not in self.server.repos:
            return self.answer({"error": "Repository not found"}, 404, [("X-Error-Code", "RepoNotFound")])
        siblings = [{"rfilename": name} for name in self.server.repos[repo]]
        return self.answer({"id": repo, "sha": self.server.commits[repo], "siblings": siblings, "private": False})

    def tree(self, body, repo, revision):
        files = self.server.repos.get(repo, {})
        self.answer([{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in files.items()])

    def resolve(self, body, repo, revision, name):
        commit = [("X-Repo-Commit", self.server.commits.get(repo, "0" * 40))]
        if repo not in self.server.repos:
            return self.answer({"error": "Repository not found"}, 404, [("X-Error-Code", "RepoNotFound")])
        data = self.server.repos[repo].get(name)
        if data is None:
            return self.answer({"error": "Entry not found"}, 404, [("X-Error-Code", "EntryNotFound"), *commit])
        return self.answer(data, 200, [("ETag", f'"{hashlib.sha256(data).hexdigest()}"'), *commit])


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES = (
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/{_REPO}/preupload/(.+)", _Handler.preupload),
    ("POST", rf"/api/models/{_REPO}/branch/(.+)", _Handler.branch),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(\w+)", _Handler.lfs_put),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", _Handler.commit),
    (("GET", "HEAD"), rf"/api/models/{_REPO}/revision/(.+)", _Handler.info),
    (("GET", "HEAD"), rf"/api/models/{_REPO}/tree/(.+)", _Handler.tree),
    (("GET", "HEAD"), rf"/api/models/{_REPO}", _Handler.info),
    (("GET", "HEAD"), rf"/{_REPO}/resolve/([^/]+)/(.+)", _Handler.resolve),
)
