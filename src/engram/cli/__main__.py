"""`python -m engram.cli`: the same as the command `engram`."""

from engram.cli.main import run

if __name__ == "__main__":
    run()
