"""Engines of a user's own, named by `module:attribute`."""

from __future__ import annotations

from dataclasses import replace

from forge.generator.native.engine import NativeEngine


class OneVersion(NativeEngine):
    """An engine that serves the live weights only, as vLLM does."""

    capabilities = replace(NativeEngine.capabilities, pinned_versions=False, adapters=False)


class WholeVersions(NativeEngine):
    """An engine whose versions hold all weights."""

    capabilities = replace(NativeEngine.capabilities, live_adapter=False)
