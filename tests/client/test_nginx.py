"""A real nginx in front of the servers."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import time

import httpx
import pytest

from trl_support_replay.client.pool import GenerationError

from ..server.fakes import FakeEngine, HTTPServer, serving
from ..server.test_endpoint import assert_foretold, request

pytestmark = [pytest.mark.slow, pytest.mark.needs("nginx")]

CONFIGURATION = """
daemon off;
worker_processes 1;
error_log {folder}/error.log;
pid {folder}/pid;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    gzip on;
    gzip_types application/json application/msgpack;
    gzip_proxied any;
    gzip_min_length 100;
    upstream servers {{ {servers} keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        client_max_body_size {max_body};
        location = /{name} {{
            return 204;
        }}
        location /pool/ {{
            proxy_pass http://servers/;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_read_timeout 30s;
            proxy_next_upstream off;
        }}
    }}
}}
"""


class Nginx:
    def __init__(self, folder, *ports, max_body="1m"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        name = f"nginx-{secrets.token_hex(8)}"  # another program may come to hold the port first
        servers = " ".join(f"server 127.0.0.1:{port} max_fails=0;" for port in ports)
        configuration = folder / "nginx.conf"
        configuration.write_text(
            CONFIGURATION.format(folder=folder, servers=servers, port=self.port, max_body=max_body, name=name)
        )
        self._process = subprocess.Popen(["nginx", "-c", str(configuration), "-p", str(folder)])
        self.url = f"http://127.0.0.1:{self.port}/pool"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/{name}", trust_env=False).status_code == 204:
                    return
            assert self._process.poll() is None, (folder / "error.log").read_text()
            time.sleep(0.05)
        raise RuntimeError("nginx did not come up")

    def stop(self):
        self._process.terminate()
        self._process.wait(timeout=10)


def check(pool, count=12, weights=None):
    requests = [request(prompt=[i + 1, 2], n=8, routes_start=0, weights_version=weights) for i in range(count)]
    for asked, samples in zip(requests, pool.generate(requests), strict=True):
        assert_foretold(samples, asked, weights)


def test_a_proxy_in_front_changes_nothing(server, engine, pool_of, tmp_path):
    with serving(Nginx(tmp_path, server.port)) as proxy:
        pool = pool_of(proxy.url)
        check(pool)
        check(pool)
    assert len(engine.calls) == 24


def test_a_server_restarted_behind_the_proxy_is_found_again(server, engine, pool_of, tmp_path):
    with serving(Nginx(tmp_path, server.port)) as proxy:
        pool = pool_of(proxy.url)
        check(pool, 2)
        server.stop()  # nginx answers 502 now
        import threading

        threading.Timer(0.5, server.start).start()
        check(pool, 4)


def test_several_servers_behind_one_proxy_all_get_the_weights(engine, pool_of, tmp_path, weights_dir):
    """The proxy deals requests out in turn, so a reload reaches one server; the others ask for theirs when needed."""
    (weights_dir / "v1").mkdir()
    (weights_dir / "v1" / "0.safetensors").touch()
    with serving(HTTPServer(engine)) as a, serving(HTTPServer(FakeEngine())) as b:
        with serving(Nginx(tmp_path, a.port, b.port)) as proxy:
            pool = pool_of(proxy.url)
            pool.set_weights("v1", reload=True)
            check(pool, 20, weights="v1")
        assert a.engine.weights == b.engine.weights == "v1"
        assert a.engine.calls and b.engine.calls


def test_a_body_too_large_for_the_proxy_is_an_error_at_once(server, engine, pool_of, tmp_path):
    with serving(Nginx(tmp_path, server.port, max_body="1k")) as proxy:
        pool = pool_of(proxy.url)
        with pytest.raises(GenerationError, match="answered 413"):
            pool.generate([request(prompt=range(490))])
    assert not engine.calls
