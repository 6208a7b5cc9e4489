"""A small HTTP server of "another project", which fails in many ways: `python foreign_server.py PORT [WORD]`."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

IS_STUCK = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = str(os.getpid())
        if self.path == "/die":
            print("dying as asked", flush=True)
            os._exit(3)
        if self.path == "/stuck":
            IS_STUCK.set()
        if self.path == "/health" and IS_STUCK.is_set():
            threading.Event().wait()
        if self.path == "/child":  # in a session of its own, as a daemon is
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
            text = str(child.pid)
        if self.path == "/flood":
            for number in range(200_000):
                print(f"line {number}")
            print("the last line", flush=True)
        if self.path == "/env":
            text = "\n".join(sorted(os.environ))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        return


if __name__ == "__main__":
    if sys.argv[2:] == ["broken"]:
        sys.exit("there is no such game")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
