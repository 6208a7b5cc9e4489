"""Modules that do what a fork server's modules must not."""

from __future__ import annotations

import threading

threading.Thread(target=threading.Event().wait, daemon=True).start()
