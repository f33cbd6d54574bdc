"""One self-contained HTML page about a run: what it learned, how fast, what it generated, and where it came from."""
