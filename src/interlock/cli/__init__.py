"""The `interlock` command. One file per group of commands; each loads what it works with when it runs."""


def main() -> None:
    import sys

    from interlock.cli.app import execute

    sys.exit(execute(sys.argv[1:]))
