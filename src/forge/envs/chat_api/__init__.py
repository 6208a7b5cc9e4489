"""OpenAI's chat protocol over HTTP: requests, responses and errors. `forge serve` and episodes share it."""
