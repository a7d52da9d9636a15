"""The `interlock` command. One file per group of commands. Each command imports what it needs when it runs."""


def main() -> None:
    import sys

    from interlock.cli.app import execute

    sys.exit(execute(sys.argv[1:]))
