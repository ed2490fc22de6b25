"""A server of OpenAI-style completions that makes tokens at a fixed pace, and misbehaves when told to.

    python fake_completions.py --port N [--fault FAULT] [flags of other servers, which it ignores]

Faults: usage (says it made one token more), error (an error event in the middle), cut (the connection breaks off),
refuse (status 503), once (a connection that it says stays open is reset when a second request comes over it, as
servers do that close after a stream without saying so), silent (never serves), dies (ends at once).
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_S = 0.005
_LINGER_NONE = struct.pack("ii", 1, 0)


class Completions(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = ""
    answered = 0  # requests over this connection

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        if self.answered:
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NONE)
            return
        ask = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answered += 1
        self.close_connection = self.fault != "once"
        self.send_response(503 if self.fault == "refuse" else 200)
        name, value = ("Connection", "close") if self.close_connection else ("Transfer-Encoding", "chunked")
        self.send_header(name, value)
        self.end_headers()
        if self.fault == "refuse":
            self.wfile.write(b"no room")
            return
        for number in range(ask["max_tokens"]):
            time.sleep(TOKEN_S)
            if number == 3 and self.fault == "cut":
                return
            if number == 3 and self.fault == "error":
                self._event({"error": {"message": "the worker is gone"}})
                return
            self._event({"choices": [{"index": 0, "text": f" word{number}"}]})
        self._event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        made = ask["max_tokens"] + (self.fault == "usage")
        self._event({"choices": [], "usage": {"prompt_tokens": len(ask["prompt"]), "completion_tokens": made}})
        self._line(b"data: [DONE]\n\n")
        if not self.close_connection:
            self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, object]) -> None:
        self._line(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _line(self, line: bytes) -> None:
        self.wfile.write(line if self.close_connection else b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def log_message(self, format: str, *values: object) -> None:
        pass


def serve(port: int, fault: str = "") -> ThreadingHTTPServer:
    """Not yet started; its `server_port` says where."""
    handler = type("Faulty", (Completions,), {"fault": fault})
    return ThreadingHTTPServer(("127.0.0.1", port), handler)


def main() -> None:
    flags = dict(zip(sys.argv[1:], sys.argv[2:], strict=False))
    fault = flags.get("--fault", "")
    if fault == "dies":
        sys.exit("no such model")
    if fault == "silent":
        time.sleep(600)
    serve(int(flags["--port"]), fault).serve_forever()


if __name__ == "__main__":
    main()
