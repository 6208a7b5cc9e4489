"""Generators: prompts in, token-exact completions out, on the embedded engine or on vLLM."""
