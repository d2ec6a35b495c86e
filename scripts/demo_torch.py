"""The demo's PyTorch part, run by scripts/demo.py with build/python: examples/train_gpt.py under torchrun loses a worker.

The daemon is the demo's (HOLDFAST_SOCKET). Fails when the job does not resume by itself to the exact losses.
"""

import os
import pathlib
import signal
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests" / "python"))

from training import Torchrun, check_losses, undisturbed  # noqa: E402

STEPS, KILLED_AFTER = 120, 40


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        root = pathlib.Path(folder)
        run = Torchrun(root / "run", "gpt", steps=STEPS, ranks=2, restarts=3)
        try:
            run.await_step(KILLED_AFTER)
            os.kill(run.workers()[1], signal.SIGKILL)
            print(f"    rank 1 killed (SIGKILL) after step {run.newest()}", flush=True)
            run.await_true("the workers' second start", lambda: len(run.resumed()) > 1)
            print(f"    torchrun has started both again; resumed after step {run.resumed()[1]}")
            if run.wait() != 0:
                print(run.said(), file=sys.stderr)
                return 1
            reference = undisturbed(STEPS, root / "undisturbed", ranks=2)
            check_losses(run, reference, starts=2)
        finally:
            run.close()
        print(f"    {STEPS} losses, the last {float.fromhex(reference[STEPS - 1]):.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
