"""The command `oasr-client`."""

from __future__ import annotations

from oasr_client.interrupt import quit_on_interrupt


def main() -> None:
    quit_on_interrupt()
    # The import takes a second, in which Ctrl-C may come, so it stands here.
    from oasr_client.cli import app

    app()


if __name__ == "__main__":
    main()
