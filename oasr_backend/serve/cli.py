"""`oasr-serve`: check the machine, then watch over a tritonserver, or become it."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script. Its own packages come with the extra `server`."""
    try:
        from oasr_backend.serve.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"oasr-serve needs {error.name}; run `pip install 'oasr-backend[server]'`")
    app()


if __name__ == "__main__":
    main()
