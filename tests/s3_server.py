"""An S3 server on loopback (moto's), and a connection to it that can be cut, changed, slowed down and counted."""

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

BUCKET = "sets"
LARGE = 4096  # bytes of an answer that came at once, from which on it is taken for one with data


class Line:
    """What clients connect to. cut, flip: how many answers with data are still to be cut off in their middle, or to
    come with a wrong byte. requests: first lines of what was asked."""

    def __init__(self, port: int) -> None:
        self._to, self.cut, self.flip, self.down = port, 0, 0, False
        self.requests: list[str] = []
        self.stall = threading.Event()
        self.stall.set()
        self._lock = threading.Lock()
        self._listen = socket.create_server(("127.0.0.1", 0))
        self.port = self._listen.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listen.accept()[0]
            except OSError:
                return
            if self.down:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._there, args=(client, server), daemon=True).start()
            threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _there(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(2**16):
                self.requests += [line for line in data.decode("latin1").split("\r\n") if line.endswith("HTTP/1.1")]
                server.sendall(data)
        for end in (client, server):
            end.close()

    def _back(self, server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(2**16):
                with self._lock:
                    large = len(data) > LARGE
                    cut, flip = large and self.cut > 0, large and self.flip > 0
                    self.cut, self.flip = self.cut - cut, self.flip - flip
                if large:
                    self.stall.wait()
                if flip:
                    data = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
                client.sendall(data[: len(data) // 2] if cut else data)
                if cut:
                    break
        for end in (client, server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listen.close()


@contextmanager
def s3_server() -> Iterator[tuple[Any, int]]:
    """A client of a running server with an empty bucket, and its port."""
    import boto3
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").disabled = True  # a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    keys = {"aws_access_key_id": "a test", "aws_secret_access_key": "a test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", **keys)
    client.create_bucket(Bucket=BUCKET, ACL="public-read")
    yield client, port
    server.stop()


def upload(client: Any, folder: Path, name: str) -> str:
    """Put the files of a folder under a name; returns the URL."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        key = f"{name}/{path.relative_to(folder).as_posix()}"
        client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes(), ACL="public-read")  # for HTTP without a key
    return f"s3://{BUCKET}/{name}"
