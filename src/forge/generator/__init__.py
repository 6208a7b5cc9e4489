"""Generators: prompts in, token-exact completions out, on the native engine or on vLLM."""
