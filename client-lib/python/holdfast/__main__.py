"""`python -m holdfast`: what the package does from a shell."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from holdfast import __version__
from holdfast._errors import HoldfastError, InvalidArgumentError

_EXAMPLES = """\
examples:
  python -m holdfast import llama-7b consolidated.00.pth --step 0
  python -m holdfast import llama-7b ./dcp-1000 --step 1000 --only model

Exit codes are ckptctl's: 0 done; 2 wrong arguments; 3 no daemon; 4 refused, not found, or failed otherwise.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"holdfast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser(
        "import",
        help="weights that something else has saved, as the first step of a new job",
        description="Saves weights as a step of a new job, so that a run that restores goes on from them, on any number of ranks. "
        "What is no tensor is left out and named. Nothing that the source holds is executed.",
    )
    one.add_argument("job", help="the run's name; it must not have saved anything yet")
    one.add_argument(
        "source",
        help="a file of torch.save, a directory of torch.distributed.checkpoint, a safetensors file, or a directory of such",
    )
    one.add_argument("--step", type=int, required=True, help="the step that they are of")
    one.add_argument(
        "--key", default="model", help="the key of the state under which a run restores them"
    )
    one.add_argument(
        "--only", metavar="PREFIX", help="only what is called PREFIX.…, without the prefix"
    )
    one.add_argument("--socket", help="of ckptd; by default as in a training process")
    one.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="how long to wait for the daemon and the tiers; no limit",
    )
    one.add_argument("--json", action="store_true", help="one line, an object")
    return parser


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        try:
            from holdfast import importing
        except ImportError as error:
            raise InvalidArgumentError(
                f"import: it needs torch ({error}): pip install torch"
            ) from None
        imported = importing.import_weights(
            asked.job,
            asked.source,
            step=asked.step,
            key=asked.key,
            only=asked.only,
            timeout=asked.timeout,
            socket=asked.socket,
        )
    except (HoldfastError, OSError) as error:
        code = getattr(error, "code", "IO")
        exit_code = {"INVALID_ARGUMENT": 2, "UNAVAILABLE": 3}.get(code, 4)
        print(f"holdfast: {error}", file=sys.stderr)
        if asked.json:
            told = {"code": code, "message": str(error), "exit_code": exit_code}
            print(json.dumps({"error": told}))
        return exit_code
    print(json.dumps(dataclasses.asdict(imported)) if asked.json else imported)
    return 0


if __name__ == "__main__":
    sys.exit(main())
